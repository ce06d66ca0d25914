"""dse.py: equations against plain loops, GLUE files, three steps by hand, runs from end to end."""

import math
import shutil
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from conftest import Adam, alter, demo_sentences, dev_scores, losses, random_rows
from processes import small_options
from sentence_transformers import CrossEncoder, SentenceTransformer

import common
import dse


def features(a, b):
    """h of eq. 3 for two lists."""
    products = [x * y for x, y in zip(a, b)]
    return [*a, *b, *products, *(abs(x - y) for x, y in zip(a, b))]


def difference(a, b):
    a, b = [torch.as_tensor(x).detach().numpy() for x in (a, b)]
    return np.abs(a - b).max()


# ---- losses


@pytest.mark.parametrize("alpha", [0, 0.3, 1])
@pytest.mark.parametrize("task, classes", [("mrpc", 2), ("mnli", 3), ("stsb", 1)])
def test_dse_loss_is_equation_2(task, classes, alpha):
    student, teacher = random_rows(5, classes, seed=1), random_rows(5, classes, seed=2)
    labels = random_rows(5, seed=3) if task == "stsb" else torch.tensor([0, 1, 1, 0, classes - 1])
    total = 0.0
    for s, t, r in zip(student.tolist(), teacher.tolist(), labels.tolist()):
        distillation = sum((a - b) ** 2 for a, b in zip(s, t))
        if task == "stsb":
            label = (s[0] - r) ** 2
        else:
            label = -math.log(math.exp(s[r]) / sum(math.exp(a) for a in s))
        total += (alpha * distillation + (1 - alpha) * label) / 5

    def loss(logits):
        return dse.dse_loss(logits, teacher, labels, alpha, task)

    assert loss(student).item() == pytest.approx(total, abs=1e-10)
    assert torch.autograd.gradcheck(loss, student.requires_grad_())


# ---- pooling, features, head


@pytest.mark.parametrize("layers", [2, 4, 7])
def test_pool_last_four_is_that_of_section_3_4(layers):
    """Without [CLS]; a text of one token, of a tokenizer without special tokens, is that token."""
    states = [random_rows(4, 6, 5, seed=layer) for layer in range(layers)]
    lengths = [6, 2, 4, 1]
    mask = torch.tensor([[1] * length + [0] * (6 - length) for length in lengths])
    expected = []
    for i, length in enumerate(lengths):
        embedding = []
        for layer in states[-4:]:
            read = layer[i, min(1, length - 1) : length].tolist()
            embedding += [sum(column) / len(read) for column in zip(*read)]
        expected.append(embedding)
    expected = torch.tensor(expected, dtype=torch.float64)
    assert difference(dse.pool_last_four(states, mask), expected) < 1e-10
    assert mask.sum(dim=1).tolist() == lengths  # the caller's mask is left as it was


def test_features_and_head_are_those_of_equation_3():
    head = dse.SimilarityHead(3, 2).double()
    assert head.W.weight.shape == (512, 12)
    assert head.W.bias is None and head.w.bias is None
    u, v = random_rows(4, 3, seed=1), random_rows(4, 3, seed=2)
    h = [features(a, b) for a, b in zip(u.tolist(), v.tolist())]
    assert difference(dse.pair_features(u, v), torch.tensor(h, dtype=torch.float64)) < 1e-12
    for row, logits in zip(h, head(u, v).tolist()):
        hidden = []
        for weights in head.W.weight.tolist():
            hidden.append(max(0.0, sum(w * x for w, x in zip(weights, row))))
        for weights, logit in zip(head.w.weight.tolist(), logits):
            assert logit == pytest.approx(sum(w * x for w, x in zip(weights, hidden)), abs=1e-10)


# ---- models


STUDENTS = [("bert", "0,1,3", [1, 2, 3]), ("roberta", None, [1, 2, 3, 4])]
STUDENTS += [("distilbert", "2", [1]), (common.MINILM, None, [3, 4, 5, 6])]  # of six layers


@pytest.mark.parametrize("name, layers, read", STUDENTS)
def test_a_saved_student_repeats_its_embedding(models_folder, tmp_path, name, layers, read):
    """SentenceTransformer cannot concatenate layers. It must refuse the folder, not misread it."""
    name = name if name == common.MINILM else models_folder / name
    student = dse.add_head(common.load_encoder(name, "mean", layers), 2).eval()
    texts = demo_sentences(6)
    u = torch.from_numpy(common.encode(dse.embed, student, texts))
    dse.save_student(student, tmp_path)
    model = transformers.AutoModel.from_pretrained(tmp_path).eval()
    for row, text in zip(u, texts):
        batch = student.tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        states = model(**batch, output_hidden_states=True).hidden_states
        expected = [states[layer][0, 1:].mean(dim=0) for layer in read]
        assert difference(row, torch.cat(expected)) < 1e-5
    again = dse.load_student(tmp_path)
    assert difference(torch.from_numpy(common.encode(dse.embed, again, texts)), u) < 1e-6
    assert torch.equal(again.head(u, u.flip(0)), student.head(u, u.flip(0)))
    with pytest.raises(Exception, match="sentence_distillation|LayerPooling"):
        SentenceTransformer(str(tmp_path), device="cpu")


def classify(folder, pairs):
    """transformers' own logits of pairs [n, C]."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    batch = tokenizer(*map(list, zip(*pairs)), padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(**batch).logits


@pytest.mark.parametrize("name", [common.MINILM, "bert", "roberta", "distilbert"])
def test_the_cross_encoder_reads_pairs_as_transformers_does(models_folder, tmp_path, name):
    """The tokenizer of MiniLM, which is BERT's, numbers the two segments.

    A typed "[SEP]" belongs to its sentence: it begins no segment.
    """
    is_minilm = name == common.MINILM
    teacher = dse.load_cross_encoder(name if is_minilm else models_folder / name, "mnli")
    assert teacher.fresh
    assert is_minilm == ("token_type_ids" in teacher.tokenizer("a", "b"))
    common.save_encoder(teacher, tmp_path / "teacher")
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]
    pairs = list(zip(demo_sentences(10)[:5], demo_sentences(10)[5:]))
    again = dse.load_cross_encoder(tmp_path / "teacher", "mnli").eval()
    assert not again.fresh
    expected = classify(tmp_path / "teacher", pairs)
    for model in (teacher, again):
        assert difference(dse.logits_of(model, pairs), expected) < 1e-5
    typed = ("One [SEP] two [SEP]", "[SEP] A man runs.")
    batch = teacher.tokenizer(*typed, return_tensors="pt")
    assert difference(dse.logits_of(again, [typed]), again.model(**batch).logits) < 1e-5


def test_nobody_is_asked_whether_to_run_the_code_of_a_teachers_folder(
    models_folder, tmp_path, monkeypatch
):
    """transformers has no classifier of its own for this kind of model."""
    folder, mark = shutil.copytree(models_folder / "bert", tmp_path / "own"), tmp_path / "mark"
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass M: pass")
    own = {"AutoModelForSequenceClassification": "own.M"}
    alter(folder / "config.json", {"model_type": "bert-generation", "auto_map": own})
    monkeypatch.setattr("builtins.input", lambda *text: mark.touch() or "y")
    with pytest.raises(common.UserError, match="own/config.json: auto_map is not supported"):
        dse.load_cross_encoder(folder, "mrpc")
    assert not mark.exists()


def test_a_cross_encoder_that_states_a_sigmoid_gives_scores_from_0_to_5(models_folder, tmp_path):
    """As CrossEncoder of sentence-transformers saves one: its own prediction is from 0 to 1."""
    theirs = CrossEncoder(str(models_folder / "bert"), num_labels=1, device="cpu")
    theirs.save(str(tmp_path))
    pairs = list(zip(demo_sentences(8), demo_sentences(16)[8:]))
    teacher = dse.load_cross_encoder(tmp_path, "stsb").eval()
    found = common.encode(dse.pair_logits, teacher, pairs)
    assert difference(found[:, 0], 5 * theirs.predict(pairs)) < 1e-5


def test_a_teachers_classes_are_put_in_the_tasks_order(models_folder, tmp_path):
    teacher = dse.load_cross_encoder(models_folder / "bert", "mnli")
    names = ("CONTRADICTION", "neutral", "entailment")
    teacher.model.config.label2id = {name: number for number, name in enumerate(names)}
    teacher.model.config.id2label = dict(enumerate(names))
    common.save_encoder(teacher, tmp_path / "teacher")
    teacher = dse.load_cross_encoder(tmp_path / "teacher", "mnli")
    assert not teacher.fresh
    order = dict(teacher.named_buffers())["order"]  # it is moved with the model, once
    assert order.tolist() == [2, 1, 0] and teacher.to("meta").order.is_meta
    teacher = dse.load_cross_encoder(tmp_path / "teacher", "mnli")
    pair = tuple(demo_sentences(2))
    expected = classify(tmp_path / "teacher", [pair])[:, [2, 1, 0]]
    assert difference(dse.logits_of(teacher, [pair]), expected) < 1e-5
    with pytest.raises(common.UserError, match="teacher: .*differ in .*classifier.*predict 0, 1"):
        dse.load_cross_encoder(tmp_path / "teacher", "mrpc")


# ---- GLUE


def write(path, *lines):
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def read_sets(folder, task):
    return dse.read_sets(SimpleNamespace(task=task, data=folder, train=None))


JSON = '{"text1": " A", "text2": "B ", "label": '
FILES = [  # task, split, lines, and labels of the pair A, B, or the error
    ("mrpc", "train", [f"{JSON}1}}", f"{JSON}0}}"], [1, 0]),
    ("stsb", "validation", [f"{JSON}2.5}}", f"{JSON}5}}"], [2.5, 5]),
    ("mnli", "validation", [f"{JSON}2}}", f"{JSON}-1}}"], [2]),  # -1: hidden, or no agreement
    ("mrpc", "test", [f"{JSON}-1}}"], []),
    ("stsb", "test", [f"{JSON}-1.0}}"], []),
    ("mrpc", "test", None, []),  # there is no such file
    ("mrpc", "train", [f"{JSON}1}}", f"{JSON}2}}"], "train.jsonl:2: 2 is no label"),
    ("qnli", "validation", [f"{JSON}-1}}"], []),
    ("stsb", "validation", [f"{JSON}1}}", f"{JSON}NaN}}"], "validation.jsonl:2: nan is no label"),
    ("mrpc", "validation", [f"{JSON}1}}", "[1]"], "validation.jsonl:2: "),
    ("mrpc", "validation", ["{}"], "validation.jsonl:1: "),
]


@pytest.mark.parametrize("task, name, lines, expected", FILES)
def test_pairs_are_read_or_refused_with_their_line(tmp_path, task, name, lines, expected):
    if lines is not None:
        write(tmp_path / task / f"{name}.jsonl", *lines)
    if isinstance(expected, str):
        with pytest.raises(common.UserError, match=expected):
            dse.read_labeled_pairs(tmp_path / task / f"{name}.jsonl", task)
    else:
        pairs = dse.read_labeled_pairs(tmp_path / task / f"{name}.jsonl", task)
        assert pairs == [("A", "B", label) for label in expected]


def test_sets_without_labels_and_scores_for_classes_are_refused(tmp_path):
    write(tmp_path / "mrpc/train.jsonl", f"{JSON}-1}}")
    with pytest.raises(common.UserError, match="train.jsonl: it has no labels"):
        read_sets(tmp_path, "mrpc")
    scored = write(tmp_path / "mine" / "pairs.tsv", "A\tB\t2.5", "C\tD\t0")
    args = SimpleNamespace(task="stsb", train=scored, dev=scored)
    pairs, labels = dse.read_sets(args)["dev"]
    assert (pairs, labels.tolist()) == ([("A", "B"), ("C", "D")], [2.5, 0])
    args.task = "mnli"
    with pytest.raises(common.UserError, match="pairs.tsv: scored pairs are for --task stsb"):
        dse.read_sets(args)


def test_each_tensor_is_clipped_alone():
    """As torch's clip_grad_norm_() of one tensor at a time, to 1e-6."""
    values = [torch.nn.Parameter(row.float()) for row in random_rows(6, 5, 4)]
    for scale, value in enumerate(values[:5]):
        value.grad = value.detach() * 10.0 ** (scale - 3)
    expected = [value.grad.clone() for value in values[:5]]
    for gradient in expected:
        gradient /= max(1.0, gradient.norm().item())
    dse.clip_each(values)
    for value, gradient in zip(values, expected):
        torch.testing.assert_close(value.grad, gradient, rtol=1e-6, atol=0)
    assert values[5].grad is None


def test_metrics_are_those_counted_by_hand(monkeypatch):
    logits = np.array([[0, 1], [1, 0], [0, 1], [0, 1], [1, 0.0]])
    labels = np.array([1, 1, 0, 1, 0])  # true positives 2, false positive 1, false negative 1
    monkeypatch.setattr(dse, "logits_of", lambda *_: logits)
    row = dse.scores(None, {"dev": ([], labels)}, "mrpc")
    assert row["dev F1"] == pytest.approx(100 * 2 / 3)
    assert row["dev"] == pytest.approx((60 + 200 / 3) / 2)
    gold, scores = np.array([0.0, 1, 2, 5]), np.array([[0.0], [3], [2], [9]])  # one inversion
    x, y = scores[:, 0] - scores.mean(), gold - gold.mean()
    pearson = 100 * (x * y).sum() / ((x**2).sum() * (y**2).sum()) ** 0.5
    expected = {"Pearson": pytest.approx(pearson), "Spearman": pytest.approx(80)}
    assert dse.metrics(scores, gold, "stsb") == expected


# ---- training


def test_three_steps_of_each_stage_are_those_computed_by_hand(
    call_main, monkeypatch, models_folder, files, tmp_path, one_part
):
    """With the dropout of each step. T is that of the teacher which was best on dev."""
    monkeypatch.setattr(common, "LOG_STEPS", 1)
    name, seed, lr, alpha = models_folder / "bert", 3, 2e-3, 0.3
    options = small_options("dse", models_folder, files, tmp_path)
    options += ["--teacher", name, "--seed", seed, "--lr", lr, "--teacher-lr", lr, "--alpha", alpha]
    call_main(dse, *options, "--max-steps", 3)

    torch.manual_seed(seed)
    student = dse.add_head(common.load_encoder(name, "mean", "0,2", dropout=0.1), 1).train()
    teacher = dse.load_cross_encoder(name, "stsb").train()
    pairs, scores = read_sets(files, "stsb")["train"]
    order = np.random.default_rng([seed, 0]).permutation(100)
    read = partial(teacher.tokenizer, padding=True, return_tensors="pt")

    def psi(texts):
        batch = read(texts)
        states = student.model(**batch, output_hidden_states=True).hidden_states
        mask = batch["attention_mask"][:, 1:, None]
        return torch.cat([(x[:, 1:] * mask).sum(dim=1) / mask.sum(dim=1) for x in states[1:]], 1)

    def teacher_loss(first, second, label):
        return (teacher.model(**read(first, second)).logits[:, 0] - label).square().mean()

    def student_loss(first, second, label):
        u, v = psi(first), psi(second)
        h = torch.cat([u, v, u * v, (u - v).abs()], dim=1)
        logit = ((h @ student.head.W.weight.T).relu() @ student.head.w.weight.T)[:, 0]
        target = classify(tmp_path / "teacher", list(zip(first, second)))[:, 0]
        return (alpha * (logit - target) ** 2 + (1 - alpha) * (logit - label) ** 2).mean()

    teacher_rates = (0, 20 / 27, 10 / 27)  # after a tenth of three steps, falling to 0
    student_rates = (0, 25 / 27, 20 / 27)  # of six steps, of which three are made
    stages = {"teacher": (teacher, teacher_loss, teacher_rates)}
    stages["student"] = (student, student_loss, student_rates)
    for stage, (model, loss_of, rates) in stages.items():
        adam = Adam(model.parameters(), eps=1e-6, each=True, correction=False)
        for step, rate in enumerate(rates):
            picked = order[32 * step : 32 * (step + 1)]
            torch.manual_seed(seed * 1_000_003 + step)  # of dropout
            batch = map(list, zip(*[pairs[row] for row in picked]))
            loss = loss_of(*batch, torch.from_numpy(scores[picked]))
            assert losses(tmp_path)[stage, step + 1] == pytest.approx(loss.item(), rel=2e-4)
            adam.step(loss, lr * rate)


def test_the_learning_rate_rises_for_a_tenth_of_the_steps():
    rates = [dse.warmup_linear(step, 100) for step in (0, 5, 10, 55, 99, 100)]
    assert rates == pytest.approx([0, 0.5, 1, 0.5, 1 / 90, 0])


def test_defaults_are_those_of_section_4_1_1(call_main, monkeypatch):
    """Of a task, and of --train alone."""
    seen = []
    monkeypatch.setattr(dse, "read_sets", lambda args: seen.append(args) or sys.exit())
    pairs = ["--train", "my.tsv", "--dev", "my.tsv"]
    for words, task, rate in (
        ([], "mrpc", 2e-5),
        (["--task", "stsb"], "stsb", 1e-5),
        (pairs, "stsb", 1e-5),
    ):
        with pytest.raises(SystemExit):
            call_main(dse, *words)
        args = seen.pop()
        assert (args.task, args.lr) == (task, rate)
        assert (args.epochs, args.batch_size, args.alpha) == (8, 32, 0.5)
        assert (args.teacher, args.student) == ("bert-large-uncased", None)
        assert (args.teacher_lr, args.teacher_epochs, args.max_length) == (2e-5, 3, 128)


def test_a_run_leaves_the_best_student(call_main, models_folder, files, tmp_path):
    words = small_options("dse", models_folder, files, tmp_path) + ["--eval-steps", 4]
    table = call_main(dse, *words, "--freeze-encoder", "--max-length", 20)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert list(dev_scores(tmp_path)) == [(s, i) for s in ("teacher", "student") for i in (0, 4, 8)]
    scored = {step: score for (s, step), score in dev_scores(tmp_path).items() if s == "student"}
    last = f"best student (step {max(scored, key=scored.get)} of 8)"
    assert [line[0] for line in lines[2:]] == ["teacher", last]
    best, sets = dse.load_student(tmp_path), read_sets(files, "stsb")
    del sets["train"]
    row = dse.scores(best, sets, "stsb")
    assert lines[-1][1:] == [f"{score:.2f}" for score in row.values()]
    assert row["dev"] == pytest.approx(max(scored.values()))
    assert best.max_length == 20
    plain = common.load_encoder(models_folder / "bert", "mean", "0,2").model.state_dict()
    assert all(map(torch.equal, plain.values(), best.model.state_dict().values()))
