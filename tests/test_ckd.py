"""ckd.py: losses, bank and schedule against plain loops in float64; whole steps by hand; runs."""

import math
from functools import partial
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import Adam, demo_sentences, dev_scores, infonce, losses, random_rows
from processes import small_options
from torch.autograd import gradcheck

import ckd
import common
import congen
import eval_sts
import ibkd

# ---- losses


@pytest.mark.parametrize("queue_size", [0, 1, 11])
@pytest.mark.parametrize("tau", [1, 0.07, 0.01])
def test_contrastive_distillation_is_equation_5(queue_size, tau):
    student, teacher = random_rows(6, 5, seed=1), random_rows(6, 5, seed=2)
    queue = random_rows(queue_size, 5, seed=3) if queue_size else None
    keys = teacher.tolist() + (queue.tolist() if queue_size else [])

    def loss(x):
        return ckd.contrastive_distillation_loss(x, teacher, queue, tau)

    assert loss(student).item() == pytest.approx(infonce(student.tolist(), keys, tau), abs=1e-10)
    assert gradcheck(loss, student.requires_grad_())


def test_supervised_contrast_is_equation_7():
    sides = [random_rows(6, 5, seed=seed).requires_grad_() for seed in (1, 2, 3)]
    anchor, positive, hard_negative = (side.tolist() for side in sides)
    loss = partial(ckd.supervised_contrastive_loss, temperature=0.05)
    expected = infonce(anchor, positive + hard_negative, 0.05)
    assert loss(*sides).item() == pytest.approx(expected, abs=1e-10)
    assert gradcheck(loss, sides)


def test_squared_error_is_equation_2_averaged_over_the_batch():
    student, teacher = random_rows(4, 3, seed=1), random_rows(4, 3, seed=2)
    total = 0.0
    for s, t in zip(student.tolist(), teacher.tolist()):
        total += sum((a - b) ** 2 for a, b in zip(s, t)) / 3
    assert ckd.mse_loss(student, teacher).item() == pytest.approx(total / 4, abs=1e-12)
    assert gradcheck(ckd.mse_loss, (student.requires_grad_(), teacher))


# ---- memory bank


def rows_of(numbers):
    return torch.tensor([[number, -number] for number in numbers], dtype=torch.float32)


@pytest.mark.parametrize("filled", [0, 13])
def test_a_queue_holds_the_last_embeddings_whatever_the_batches(filled):
    """The memory bank, which starts empty, and congen.py's queue, which starts full."""
    past = list(range(filled))
    queue = congen.InstanceQueue(rows_of(past)) if filled else ckd.MemoryBank(13, 2)
    assert len(queue.embeddings()) == filled
    for size in [*np.random.default_rng(0).integers(1, 14, 60), 13, 14, 40, 3]:
        new = range(len(past), len(past) + size)
        queue.enqueue(rows_of(new))
        past += new
        held = queue.embeddings()
        assert sorted(held[:, 0].tolist()) == past[-13:]
        assert torch.equal(held[:, 0], -held[:, 1])


def test_a_bank_that_is_cleared_or_has_no_place_is_empty():
    for size in (13, 0):
        bank = ckd.MemoryBank(size, 2)
        bank.enqueue(rows_of(range(4)))
        assert len(bank.embeddings()) == min(4, size)
        bank.clear()
        assert len(bank.embeddings()) == 0


# ---- embedding, schedule


@pytest.mark.parametrize("script", [ckd, congen, ibkd, eval_sts])
@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_pooling_equals_loops_and_padding_never_counts(script, pooling):
    """In all scripts, wherever the padding is."""
    states = random_rows(3, 4, 6, seed=1)
    masks = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]])
    output = SimpleNamespace(last_hidden_state=states)
    encoder = SimpleNamespace(pooling=pooling, heads=torch.nn.Sequential(), normalize=False)
    encoder.model = lambda input_ids, attention_mask, **options: output
    found = script.embed(encoder, None, masks)
    for row, mask in enumerate(masks.tolist()):
        tokens = [states[row, i] for i in range(4) if mask[i]]
        expected = {
            "mean": sum(tokens) / len(tokens),
            "cls": states[row, 0],
            "lasttoken": tokens[-1],
        }
        assert (found[row] - expected[pooling]).abs().max() < 1e-6


def test_the_learning_rate_rises_for_a_tenth_of_an_epoch_and_falls_as_a_cosine():
    """Steps of 3 epochs of 40: 4 up, then half a cosine down."""
    rates = [ckd.warmup_cosine(step, 40, 120) for step in range(1, 121)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[61] == pytest.approx(0.5)
    assert rates[-1] == pytest.approx(0, abs=1e-9)
    assert all(a > b for a, b in zip(rates[3:], rates[4:]))
    assert ckd.warmup_cosine(1, 4, 8) == 1  # an epoch of less than ten steps has no warm-up


# ---- options


def test_defaults_are_the_papers(parse):
    args = parse(ckd, "--student", "bert-base-uncased")
    assert (args.epochs, args.batch_size, args.eval_steps, args.patience) == (20, 512, 125, 3)
    ckd.resolve_defaults(args, torch.nn.ParameterList([torch.empty(1)]), 10**6)
    assert (args.finetune_epochs, args.finetune_batch_size, args.max_length) == (5, 128, 64)
    assert args.teacher == "princeton-nlp/sup-simcse-roberta-large"
    assert (args.train, args.triplets) == ("ffgcc/NEWS5M", "nli_for_simcse.csv")
    assert (args.stage, args.temperature, args.objective) == ("both", 0.05, "ckd")
    learned = parse(ckd, "--student", "x", "--learn-temperature")
    ckd.resolve_defaults(learned, torch.nn.ParameterList([torch.empty(1)]), 10**6)
    assert learned.temperature == pytest.approx(0.368, abs=1e-3)  # of the authors' code
    assert learned.finetune_temperature == 1 / 20


def test_own_sentences_without_triplets_train_stage_1_alone(parse):
    assert parse(ckd, "--student", "x", "--train", "my.txt").stage == "distill"
    assert parse(ckd, "--student", "x", "--train", "my.txt", "--triplets", "t.csv").stage == "both"


@pytest.mark.parametrize(
    "millions, lr, finetune_lr", [(110, 2e-4, 5e-5), (52, 3e-4, 1e-5), (14, 3e-4, 5e-5)]
)
def test_learning_rates_depend_on_the_size_of_the_student(parse, millions, lr, finetune_lr):
    encoder = torch.nn.ParameterList([torch.empty(millions * 1_000_000, device="meta")])
    args = parse(ckd, "--student", "x")
    ckd.resolve_defaults(args, encoder, sentences=1000)
    assert (args.lr, args.finetune_lr) == (lr, finetune_lr)


FILLED = [("ckd", 1_000_000, 65536), ("ckd", 3000, 2560), ("ckd", 100, 0), ("kd", 3000, 0)]


@pytest.mark.parametrize("objective, sentences, size", FILLED)
def test_the_bank_is_what_an_epoch_fills_before_its_last_batch(parse, objective, sentences, size):
    args = parse(ckd, "--student", "x", "--objective", objective)
    ckd.resolve_defaults(args, torch.nn.ParameterList([torch.empty(1)]), sentences)
    assert args.queue_size == size
    assert args.max_length == (64 if objective == "ckd" else 128)


# ---- whole steps, by hand


def batch_of(encoder, sentences):
    """Padded token ids and mask, by the tokenizer itself."""
    batch = encoder.tokenizer(sentences, padding=True, return_tensors="pt")
    return batch["input_ids"], batch["attention_mask"]


@pytest.mark.parametrize("batch_size, queue_size, total", [(2, 2, 3), (4, 0, 2)])
def test_steps_of_stage_1_by_hand(
    models_folder, files, tmp_path, call_main, monkeypatch, batch_size, queue_size, total
):
    """Two batches of an epoch (the second sees the first in the bank), or two epochs of one batch.

    Fails if the bank is filled before the loss, is not cleared at the epoch, or if the learning
    rate, the clipping or the projection differ.
    """
    monkeypatch.setattr(common, "LOG_STEPS", 1)
    texts = demo_sentences(4)
    (tmp_path / "four.txt").write_text("\n".join(texts) + "\n", "utf-8")
    out, name = tmp_path / "out", models_folder / "bert"
    data = ["--train", tmp_path / "four.txt", "--dev", files / "dev.tsv", "--stage", "distill"]
    models = ["--teacher", models_folder / "wide", "--student", name, "--pooling", "mean"]
    steps = ["--epochs", 2, "--max-steps", 3, "--batch-size", batch_size, "--eval-steps", 1]
    more = ["--queue-size", queue_size, "--lr", 1e-3, "--dropout", 0, "--output", out]
    call_main(ckd, *data, *models, *steps, *more)

    teacher = common.load_encoder(models_folder / "wide").eval()
    targets = ckd.embed(teacher, *batch_of(teacher, texts)).detach()
    student = common.load_encoder(name)
    torch.manual_seed(0)
    projection = torch.nn.Linear(32, 48)  # M
    adam = Adam([*student.parameters(), *projection.parameters()], betas=(0.9, 0.98))
    steps_per_epoch = 4 // batch_size
    lengths = common.Tokens(student, texts).lengths
    bank = []
    found = losses(out)
    for step, picked in enumerate(islice(common.batches(lengths, batch_size, 0), total), 1):
        if (step - 1) % steps_per_epoch == 0:
            bank = []
        projected = projection(ckd.embed(student, *batch_of(student, [texts[i] for i in picked])))
        keys = torch.stack([targets[i] for i in picked] + bank[-2:])
        expected = infonce(projected.tolist(), keys.tolist(), 0.05)
        assert found["distill", step] == pytest.approx(expected, abs=2e-5)
        similarity = torch.cosine_similarity(projected[:, None], keys[None], dim=-1) / 0.05
        loss = (similarity.logsumexp(1) - similarity.diagonal()).mean()
        rate = (1 + math.cos(math.pi * (step - 1) / max(1, total - 1))) / 2  # warm-up of one step
        adam.step(loss, 1e-3 * rate)
        bank += [targets[i] for i in picked]
    assert len(found) == total


# ---- runs


def test_stage_2_alone_has_no_teacher(call_main, models_folder, files, tmp_path):
    words = small_options("ckd", models_folder, files, tmp_path)
    call_main(ckd, *words, "--stage", "finetune", "--teacher", "nowhere")
    assert {stage for stage, _ in dev_scores(tmp_path)} == {"finetune"}
    assert "Teacher: none." in (tmp_path / "README.md").read_text()


def test_a_student_of_a_plain_teacher_is_pooled_as_it_is(call_main, models_folder, files, tmp_path):
    """A folder without modules.json is pooled by a mean, as a teacher and as its own student."""
    words = ["--teacher", models_folder / "bert", "--student-layers", "0,2", "--max-steps", 1]
    words += ["--train", files / "sentences.txt", "--dev", files / "dev.tsv"]
    call_main(ckd, *words, "--output", tmp_path)
    encoder = common.load_encoder(tmp_path)
    assert (encoder.pooling, len(encoder.heads)) == ("mean", 0)
