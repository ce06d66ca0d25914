"""congen.py: its losses against plain loops, its steps by hand, its runs.

test_ckd.py tests its pooling and its queue, too.
"""

import math
from collections import deque

import numpy as np
import pytest
import torch
import transformers
from conftest import Adam, cosine, demo_sentences, dev_scores, random_rows, rows
from processes import small_options

import common
import congen


def distribution(z, queue, tau):
    """Eq. 1 for one embedding, in plain Python."""
    powers = [math.exp(cosine(z, d) / tau) for d in queue]
    return [power / sum(powers) for power in powers]


def cross_entropy(p, q):
    return -sum(p_j * math.log(q_j) for p_j, q_j in zip(p, q))


# ---- losses


@pytest.mark.parametrize("alpha", [0, 0.25, 1])
def test_the_loss_is_equation_2_of_the_distributions_of_equation_1(alpha):
    control, generalize, reference = (random_rows(6, 5, seed=seed) for seed in (1, 2, 3))
    queue = random_rows(11, 5, seed=4)
    total = 0.0
    for con, gen, ref in zip(control.tolist(), generalize.tolist(), reference.tolist()):
        p_ref = distribution(ref, queue.tolist(), 0.05)
        p_con = distribution(con, queue.tolist(), 0.07)
        p_gen = distribution(gen, queue.tolist(), 0.07)
        found = congen.similarity_distribution(torch.tensor([ref], dtype=queue.dtype), queue, 0.05)
        assert found[0].tolist() == pytest.approx(p_ref, abs=1e-12)
        total += alpha * cross_entropy(p_ref, p_con) + (1 - alpha) * cross_entropy(p_ref, p_gen)

    def loss(control, generalize):
        return congen.congen_loss(control, generalize, reference, queue, 0.05, 0.07, alpha)

    assert loss(control, generalize).item() == pytest.approx(total / 6, abs=1e-10)
    inputs = control.requires_grad_(), generalize.requires_grad_()
    assert torch.autograd.gradcheck(loss, inputs)


def test_the_loss_normalizes_the_queue_once(monkeypatch):
    """The queue is the largest tensor of a step."""
    normalize, sizes = torch.nn.functional.normalize, []

    def counted(tensor, **options):
        sizes.append(len(tensor))
        return normalize(tensor, **options)

    monkeypatch.setattr(congen.F, "normalize", counted)
    embeddings = [random_rows(6, 5, seed=seed) for seed in (1, 2, 3)]
    congen.congen_loss(*embeddings, random_rows(11, 5, seed=4), 0.05, 0.07, 0.5)
    assert sorted(sizes) == [6, 6, 6, 11]


# ---- model, queue, views, settings


def test_second_views_lack_words_but_never_all():
    """Which words depends on the sentences and the seed alone."""
    (first, second), views = demo_sentences(2), []
    for step in range(30):
        random = np.random.default_rng([7, step])
        views.append(congen.delete_words([second, "Stop!", first, second], random))
    assert len(set(map(tuple, views))) > 10 and {view[1] for view in views} == {"Stop!"}
    assert any(view[0] != view[3] for view in views)  # each by itself
    again = np.random.default_rng([7, 3])
    assert views[3] == congen.delete_words([second, "Stop!", first, second], again)


def test_pairs_are_two_columns_with_text(tmp_path):
    file = tmp_path / "pairs.tsv"
    file.write_text("one\t two \nthree\tfour\n", "utf-8")
    assert congen.read_text_pairs(file) == [["one", "two"], ["three", "four"]]
    for line in ("one", "one\ttwo\tthree", "one\t ", ""):
        file.write_text(f"one\ttwo\n{line}\n", "utf-8")
        with pytest.raises(common.UserError, match="pairs.tsv:2: .*two tab-separated columns"):
            congen.read_text_pairs(file)


@pytest.mark.parametrize(
    "sentence", ["一个男人在弹吉他。", "ผู้ชายเล่นกีตาร์", "男がギターを弾いている。"]
)
def test_scripts_without_spaces_lose_characters(sentence):
    """As many as words of other scripts, a tenth; the others stay in their order."""
    random = np.random.default_rng(0)
    views = congen.delete_words([sentence] * 500, random)
    shares = [1 - len(view) / len(sentence) for view in views]
    assert 0.07 < sum(shares) / 500 < 0.13 and views.count(sentence) < 350
    for view in views:
        rest = iter(sentence)
        assert all(character in rest for character in view)


def test_the_learning_rate_rises_for_a_tenth_of_the_steps_then_falls_to_zero():
    """As in transformers: the first step has rate 0, and so would the step after the last."""
    shares = [congen.warmup_linear(step, 95) for step in range(95)]
    assert shares[:10] == pytest.approx([i / 10 for i in range(10)])
    assert shares[10:] == pytest.approx([i / 85 for i in range(85, 0, -1)])
    sgd = torch.optim.SGD([torch.zeros(1)], 1)
    lambdas = transformers.get_linear_schedule_with_warmup(sgd, 10, 95).lr_lambdas
    assert shares == pytest.approx([lambdas[0](step) for step in range(95)])


def test_matrices_decay_by_a_hundredth_of_the_rate_and_vectors_do_not():
    """Without a gradient, AdamW does nothing else. The decay is the authors' 0.01."""
    matrix, vector = torch.ones(2, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    optimizer = congen.make_optimizer([matrix, vector], lr=1.0)
    (0 * matrix.sum() + 0 * vector.sum()).backward()
    for _ in range(3):
        optimizer.step()
    assert matrix.tolist() == [pytest.approx([0.99**3] * 3)] * 2
    assert vector.tolist() == [1, 1, 1]


def test_defaults_are_the_papers_for_bert_base(parse):
    args = parse(congen, "--student", "bert-base-uncased")
    assert (args.epochs, args.batch_size, args.eval_steps, args.alpha) == (20, 128, 512, 0.5)
    assert args.teacher == "princeton-nlp/unsup-simcse-roberta-large"
    assert (args.head, args.pairs, args.patience, args.max_length) == ("random", None, 7, 128)
    table_7 = (args.teacher_temperature, args.student_temperature, args.queue_size, args.lr)
    assert table_7 == (0.05, 0.07, 65536, 5e-5)


# ---- runs


@pytest.mark.parametrize("views_are_given", [False, True])
def test_three_steps_by_hand(
    call_main, monkeypatch, models_folder, files, tmp_path, views_are_given
):
    """24 sentences, batches of 16 and 8, 6 epochs: the third step begins the second epoch.

    The dev score of step 0 is the student's with its new head.
    """
    sentences, others = demo_sentences(24), demo_sentences(48)[24:]
    pairs = [f"{first}\t{second}" for first, second in zip(sentences, others)]
    (tmp_path / "train.txt").write_text("\n".join(pairs if views_are_given else sentences))
    monkeypatch.setattr(common, "LOG_STEPS", 1)
    words = small_options("congen", models_folder, files, tmp_path / "out")
    option = "--pairs" if views_are_given else "--train"
    words += [option, tmp_path / "train.txt", "--batch-size", 16, "--epochs", 6]
    words += ["--queue-size", 20, "--eval-steps", 99, "--lr", 0.003, "--alpha", 0.3, "--dropout", 0]
    words += ["--teacher-temperature", 0.02, "--student-temperature", 0.03]
    call_main(congen, *words)

    teacher = transformers.AutoModel.from_pretrained(models_folder / "wide").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(models_folder / "wide")
    student = transformers.AutoModel.from_pretrained(models_folder / "bert").eval()
    del student.encoder.layer[3], student.encoder.layer[1]
    torch.manual_seed(0)
    head = torch.nn.Linear(32, 48)
    weights = [*student.parameters(), *head.parameters()]
    adam = Adam(weights, eps=1e-6, decay=0.01, correction=False)

    def mean(model, text):
        return model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(dim=0)

    def unit(vectors):
        return torch.stack([vector / vector.norm() for vector in vectors])

    def loss_of(texts, p_ref, queue):
        z = unit([torch.tanh(head(mean(student, text))) for text in texts])
        return -(p_ref * torch.log_softmax(z @ queue.T / 0.03, dim=1)).sum() / len(texts)

    def start(_, encoder, texts):
        return torch.stack([torch.tanh(head(mean(student, text))) for text in texts]).numpy()

    with torch.no_grad():
        targets = unit([mean(teacher, text) for text in sentences])
        dev_pairs = common.read_scored_pairs(files / "dev.tsv")
        before = common.spearman(None, None, dev_pairs, start)
    assert list(dev_scores(tmp_path / "out")) == [("distill", 0), ("distill", 12)]
    assert dev_scores(tmp_path / "out")["distill", 0] == pytest.approx(before, abs=1e-4)

    start_rows = np.random.default_rng([0, 0, 1]).permutation(24)[:20]
    queue = deque(start_rows[::-1], maxlen=20)  # the newest last
    logged = {row["step"]: row for row in rows(tmp_path / "out") if "loss" in row}
    orders = [np.random.default_rng([0, epoch]).permutation(24) for epoch in (0, 1)]
    batches = [orders[0][:16], orders[0][16:], orders[1][:16]]
    for step, batch in enumerate(batches, 1):
        queue.extend(batch[::-1])  # the oldest leave, at the left
        keys = targets[list(queue)]
        p_ref = torch.softmax(targets[batch] @ keys.T / 0.02, dim=1)
        first = [sentences[row] for row in batch]
        coin = np.random.default_rng([0, step])
        kept = [[word for word in text.split() if coin.random() >= 0.1] for text in first]
        second = [" ".join(words) for words in kept]
        if views_are_given:
            second = [others[row] for row in batch]
        loss = 0.3 * loss_of(first, p_ref, keys) + 0.7 * loss_of(second, p_ref, keys)
        lr = 0.003 * (0, 0.5, 1)[step - 1]  # of 12 steps, 2 of warm-up
        assert logged[step]["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert logged[step]["lr"] == pytest.approx(lr)
        adam.step(loss, lr)
