"""ckd.py: losses, bank and schedule against plain loops in float64; whole steps by hand; runs."""

import json
import math
import sys

import numpy as np
import pytest
import torch
from conftest import DEMO, cosine, demo_sentences, dev_scores, losses
from conftest import rows as log_rows

import ckd
import common

TINY = ["--epochs", 2, "--batch-size", 32, "--eval-steps", 4, "--lr", 1e-3]


def random_rows(count, dimension, seed):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, dimension, dtype=torch.float64, generator=random)


def infonce(anchors, keys, tau):
    """The mean of -log( exp(cos(a_i, k_i) / tau) / sum_j exp(cos(a_i, k_j) / tau) ), by loops."""
    total = 0.0
    for i, anchor in enumerate(anchors):
        exponentials = [math.exp(cosine(anchor, key) / tau) for key in keys]
        total -= math.log(exponentials[i] / sum(exponentials))
    return total / len(anchors)


# ---- losses


@pytest.mark.parametrize("queue_size", [0, 1, 11])
def test_contrastive_distillation_is_equation_5(queue_size):
    student, teacher = random_rows(6, 5, 1), random_rows(6, 5, 2)
    queue = random_rows(queue_size, 5, 3) if queue_size else None
    keys = teacher.tolist() + (queue.tolist() if queue_size else [])
    loss = ckd.contrastive_distillation_loss(student, teacher, queue, 0.07)
    assert loss.item() == pytest.approx(infonce(student.tolist(), keys, 0.07), abs=1e-10)


def test_a_student_equal_to_its_teacher_loses_nothing_as_temperature_falls():
    teacher, queue = random_rows(8, 16, 1), random_rows(20, 16, 2)
    found = [
        ckd.contrastive_distillation_loss(3 * teacher, teacher, queue, tau).item()
        for tau in (1, 0.1, 0.01)
    ]
    assert found[0] > found[1] > found[2]
    assert found[2] < 1e-10


def test_supervised_contrast_is_equation_7():
    anchor, positive, hard_negative = (random_rows(6, 5, seed) for seed in (1, 2, 3))
    keys = positive.tolist() + hard_negative.tolist()
    loss = ckd.supervised_contrastive_loss(anchor, positive, hard_negative, 0.05)
    assert loss.item() == pytest.approx(infonce(anchor.tolist(), keys, 0.05), abs=1e-10)


def test_squared_error_is_equation_2_averaged_over_the_batch():
    student, teacher = random_rows(4, 3, 1), random_rows(4, 3, 2)
    total = 0.0
    for s, t in zip(student.tolist(), teacher.tolist()):
        total += sum((a - b) ** 2 for a, b in zip(s, t)) / 3
    assert ckd.mse_loss(student, teacher).item() == pytest.approx(total / 4, abs=1e-12)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: ckd.contrastive_distillation_loss(
            x, random_rows(3, 4, 2), random_rows(5, 4, 3), 0.1
        ),
        lambda x: ckd.contrastive_distillation_loss(x, random_rows(3, 4, 2), None, 0.1),
        lambda x: ckd.supervised_contrastive_loss(x, 2 * x.flip(1), x.flip(0), 0.1),
        lambda x: ckd.mse_loss(x, random_rows(3, 4, 2)),
    ],
)
def test_gradients(loss):
    assert torch.autograd.gradcheck(loss, random_rows(3, 4, 1).requires_grad_())


# ---- memory bank


def test_the_bank_holds_the_last_embeddings_whatever_the_batches():
    random = np.random.default_rng(0)
    bank = ckd.MemoryBank(13, 2)
    past = []
    assert bank.embeddings() is None
    for size in [*random.integers(1, 13, 40), 13, 14, 40, 3]:
        batch = torch.arange(len(past), len(past) + size, dtype=torch.float32)
        bank.enqueue(torch.stack([batch, -batch], 1))
        past += batch.tolist()
        held = bank.embeddings()
        assert sorted(held[:, 0].tolist()) == past[-13:]
        assert torch.equal(held[:, 0], -held[:, 1])
    bank.clear()
    assert bank.embeddings() is None


def test_a_bank_of_size_0_stays_empty():
    bank = ckd.MemoryBank(0, 3)
    bank.enqueue(torch.ones(4, 3))
    assert bank.embeddings() is None


def test_the_bank_is_saved_and_restored():
    bank, other = ckd.MemoryBank(5, 2), ckd.MemoryBank(5, 2)
    bank.enqueue(torch.randn(7, 2))
    other.load_state_dict(bank.state_dict())
    for each in (bank, other):
        each.enqueue(torch.full((2, 2), 9.0))
    assert torch.equal(bank.embeddings(), other.embeddings())


# ---- embedding, alignment, schedule


class States:
    """A transformer whose last hidden state is given."""

    def __init__(self, states):
        self.last_hidden_state = states

    def __call__(self, input_ids, attention_mask):
        return self


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_pooling_equals_loops_and_padding_never_counts(pooling):
    states = random_rows(12, 6, 1).float().view(3, 4, 6)
    masks = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]])  # padding on either side
    encoder = common.Encoder(torch.nn.Identity(), None, pooling, [], False, "", 9)
    encoder.model = None
    object.__setattr__(encoder, "model", States(states))
    found = ckd.embed(encoder, None, masks)
    for row, mask in enumerate(masks.tolist()):
        tokens = [states[row, i] for i in range(4) if mask[i]]
        expected = {
            "mean": sum(tokens) / len(tokens),
            "cls": states[row, 0],
            "lasttoken": tokens[-1],
        }
        assert (found[row] - expected[pooling]).abs().max() < 1e-6


def test_alignment_finds_the_rotation_between_two_spaces():
    """A teacher that is the student's embeddings, rotated into more dimensions, is brought back."""
    random = np.random.default_rng(0)
    student = random.normal(size=(50, 4)).astype(np.float32)
    rotation = np.linalg.qr(random.normal(size=(7, 4)))[0]  # orthonormal columns
    teacher = student @ rotation.T.astype(np.float32)
    found = ckd.align(teacher, student, "cpu")
    assert np.abs(teacher @ found.matrix.numpy() - student).max() < 1e-5
    assert found.length == pytest.approx(np.linalg.norm(student, axis=1).mean(), rel=1e-6)


def test_the_learning_rate_rises_for_a_tenth_of_an_epoch_and_falls_as_a_cosine():
    """Steps of 3 epochs of 40: 4 up, then half a cosine down."""
    rates = [ckd.warmup_cosine(step, 40, 120) for step in range(1, 121)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[61] == pytest.approx(0.5)
    assert rates[-1] == pytest.approx(0, abs=1e-9)
    assert all(a > b for a, b in zip(rates[3:], rates[4:]))
    assert ckd.warmup_cosine(1, 4, 8) == 1  # an epoch of less than ten steps has no warm-up


# ---- options


@pytest.fixture
def parse(monkeypatch):
    def call(*options):
        monkeypatch.setattr(sys, "argv", ["ckd.py", *map(str, options)])
        return ckd.parse_args()

    return call


def test_defaults_are_the_papers(parse):
    args = parse("--student", "bert-base-uncased")
    assert (args.epochs, args.batch_size, args.eval_steps, args.patience) == (20, 512, 125, 3)
    assert (args.finetune_epochs, args.finetune_batch_size, args.max_length) == (5, 128, 64)
    assert args.teacher == "princeton-nlp/sup-simcse-roberta-large"
    assert (args.train, args.triplets) == ("ffgcc/NEWS5M", "nli_for_simcse.csv")
    assert (args.stage, args.temperature, args.objective) == ("both", 0.05, "ckd")
    learned = parse("--student", "x", "--learn-temperature")
    assert learned.temperature == pytest.approx(0.368, abs=1e-3)  # of the authors' code
    assert learned.finetune_temperature == 1 / 20


def test_own_sentences_without_triplets_train_stage_1_alone(parse):
    assert parse("--student", "x", "--train", "my.txt").stage == "distill"
    assert parse("--student", "x", "--train", "my.txt", "--triplets", "t.csv").stage == "both"


@pytest.mark.parametrize(
    "millions, lr, finetune_lr", [(110, 2e-4, 5e-5), (52, 3e-4, 1e-5), (14, 3e-4, 5e-5)]
)
def test_learning_rates_depend_on_the_size_of_the_student(parse, millions, lr, finetune_lr):
    encoder = torch.nn.ParameterList([torch.empty(millions * 1_000_000, device="meta")])
    args = parse("--student", "x")
    ckd.choose_learning_rates(args, encoder)
    assert (args.lr, args.finetune_lr) == (lr, finetune_lr)


@pytest.mark.parametrize("sentences, size", [(1_000_000, 65536), (3000, 2560), (100, 0)])
def test_the_memory_bank_is_what_an_epoch_fills_before_its_last_batch(parse, sentences, size):
    args = parse("--student", "x")
    ckd.choose_queue_size(args, max(sentences, 2))
    assert args.queue_size == size


# ---- two whole steps, by hand


def two_steps(models_folder, files, tmp_path, call_main, *options):
    """Run two epochs of one step each on four sentences -> what the test computes again."""
    sentences = demo_sentences(4)
    (tmp_path / "four.txt").write_text("\n".join(sentences) + "\n", "utf-8")
    teacher, student = models_folder / "wide", models_folder / "bert"
    data = ["--train", tmp_path / "four.txt", "--dev", files / "dev.tsv", "--stage", "distill"]
    models = ["--teacher", teacher, "--student", student, "--pooling", "mean", "--dropout", 0]
    out = ["--output", tmp_path / "out", "--eval-steps", 1]
    call_main(ckd, *data, *models, *out, "--lr", 1e-3, *options)
    return sentences, common.load_encoder(teacher).eval(), common.load_encoder(student)


def batch_of(encoder, sentences):
    """Padded token ids and mask, by the tokenizer itself."""
    batch = encoder.tokenizer(sentences, padding=True, return_tensors="pt")
    return batch["input_ids"], batch["attention_mask"]


@pytest.mark.parametrize("batch_size", [2, 4])
def test_two_steps_of_stage_1_by_hand(
    models_folder, files, tmp_path, call_main, monkeypatch, batch_size
):
    """Two batches of an epoch (the second sees the first in the bank), or two epochs of one batch.

    Fails if the bank is filled before the loss, is not cleared at the epoch, or if the learning
    rate, the clipping or the projection differ.
    """
    monkeypatch.setattr(common, "LOG_STEPS", 1)
    queue = ["--queue-size", 2] if batch_size == 2 else ["--queue-size", 0]
    options = ["--batch-size", batch_size, "--epochs", 2]
    texts, teacher, student = two_steps(
        models_folder, files, tmp_path, call_main, *options, *queue, "--max-steps", 3
    )
    targets = ckd.embed(teacher, *batch_of(teacher, texts)).detach()
    torch.manual_seed(0)
    projection = torch.nn.Linear(32, 48)  # M
    parameters = [*student.parameters(), *projection.parameters()]
    optimizer = torch.optim.Adam(parameters, betas=(0.9, 0.98))
    steps_per_epoch = 4 // batch_size
    total = min(3, 2 * steps_per_epoch)
    lengths = common.Tokens(student, texts).lengths
    bank = []
    found = losses(tmp_path / "out")
    for step, rows in common.batches(lengths, batch_size, 0, 0, total):
        if (step - 1) % steps_per_epoch == 0:
            bank = []
        rate = (1 + math.cos(math.pi * (step - 1) / max(1, total - 1))) / 2  # warm-up of one step
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * rate
        projected = projection(ckd.embed(student, *batch_of(student, [texts[i] for i in rows])))
        keys = torch.stack([targets[i] for i in rows] + bank[-2:])
        expected = infonce(projected.tolist(), keys.tolist(), 0.05)
        assert found["distill", step] == pytest.approx(expected, abs=2e-4)
        similarity = torch.cosine_similarity(projected[:, None], keys[None], dim=-1) / 0.05
        loss = (similarity.logsumexp(1) - similarity.diagonal()).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        bank += [targets[i] for i in rows]
    assert len(found) == total


# ---- runs


def words(models_folder, files, output, *more):
    models = ["--teacher", models_folder / "mean", "--student-layers", "0,2"]
    data = ["--train", files / "sentences.txt", "--dev", files / "dev.tsv"]
    return [*models, *data, "--output", output, *TINY, *more]


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--objective", "kd"],
        ["--objective", "kd", "--align", "--teacher", "wide", "--student", "bert"],
        ["--align", "--teacher", "wide", "--student", "mean", "--learn-temperature"],
        ["--teacher", "wide", "--student", "pooler", "--student-layers", "1"],
        ["--teacher", "cls", "--student", "distilbert", "--queue-size", "0"],
        ["--teacher", "roberta", "--student", "roberta", "--pooling", "lasttoken"],
    ],
)
def test_a_run_leaves_the_best_student_for_everybody(
    call_main, models_folder, files, tmp_path, more
):
    from sentence_transformers import SentenceTransformer

    folders = {path.name: path for path in models_folder.iterdir()}
    out = tmp_path / "out"
    printed = call_main(ckd, *words(models_folder, files, out), *[folders.get(x, x) for x in more])
    scores = dev_scores(out)
    assert [step for _, step in scores] == [0, 4, 8, 12, 16, 20]
    encoder = common.load_encoder(out)
    texts = demo_sentences(20)
    vectors = common.encode(ckd.embed, encoder, texts)
    theirs = SentenceTransformer(str(out), device="cpu").encode(texts)
    assert np.abs(theirs - vectors).max() < 1e-5
    dev = {"dev": common.read_scored_pairs(files / "dev.tsv")}
    assert ckd.scores(encoder, dev)["dev"] == pytest.approx(max(scores.values()), abs=1e-3)
    assert f"{max(scores.values()):.2f}" in printed.splitlines()[-1]
    assert f"{max(scores.values()):.2f}" in (out / "README.md").read_text()
    assert json.loads((out / "args.json").read_text())["epochs"] == 2


def test_both_stages_and_stage_2_alone(call_main, models_folder, files, tmp_path):
    second = ["--triplets", files / "triplets.csv", "--finetune-epochs", 1]
    second += ["--finetune-batch-size", 32]
    call_main(ckd, *words(models_folder, files, tmp_path / "both", *second))
    assert [key for key in dev_scores(tmp_path / "both") if key[0] == "finetune"] == [
        ("finetune", 0),
        ("finetune", 4),
    ]
    alone = ["--student", models_folder / "bert", "--stage", "finetune", "--teacher", "nowhere"]
    call_main(ckd, *words(models_folder, files, tmp_path / "alone", *second, *alone))
    assert {row["stage"] for row in log_rows(tmp_path / "alone")} == {"finetune"}


def test_a_loss_that_becomes_nan_stops_the_run_and_keeps_the_best_student(
    fails, models_folder, files, tmp_path
):
    line = fails(ckd, *words(models_folder, files, tmp_path / "out", "--lr", 1e8))
    assert "nan" in line
    weights = common.load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.isfinite(value).all() for value in weights.values())


def test_a_student_of_a_plain_teacher_is_pooled_as_it_is(call_main, models_folder, tmp_path):
    """A folder without modules.json is pooled by a mean, as a teacher and as its own student."""
    models = ("--teacher", models_folder / "bert", "--student-layers", "0,2", "--queue-size", 8)
    data = ("--train", DEMO / "sentences.txt", "--dev", DEMO / "dev.tsv", "--batch-size", 8)
    call_main(ckd, *models, *data, "--max-steps", 1, "--output", tmp_path / "out")
    encoder = common.load_encoder(tmp_path / "out")
    assert (encoder.pooling, len(encoder.heads)) == ("mean", 0)


@pytest.mark.slow
def test_a_dozen_steps_bring_the_real_student_five_points_nearer(run, tmp_path):
    """all-MiniLM-L6-v2 into its layers 1,3,5, on the demo's sentences."""
    options = ["--demo", "--stage", "distill", "--max-steps", 12, "--eval-steps", 12]
    process = run("ckd.py", *options, "--output", tmp_path / "out")
    assert process.returncode == 0, process.stderr[-2000:]
    scores = dev_scores(tmp_path / "out")
    assert scores["distill", 12] > scores["distill", 0] + 5
