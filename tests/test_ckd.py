"""ckd.py: losses, bank and schedule against plain loops in float64; two steps a stage by hand.

It also tests what several scripts have alike: their pooling, and the queue of congen.py.
"""

import math
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from conftest import Adam, demo_sentences, demo_triplets, infonce, losses, random_rows
from processes import small_options
from torch.autograd import gradcheck

import ckd
import common
import congen
import eval_sts
import ibkd

# ---- losses


@pytest.mark.parametrize("queue_size", [None, 0, 1, 11])
@pytest.mark.parametrize("tau", [1, 0.07, 0.01])
def test_contrastive_distillation_is_equation_5(queue_size, tau):
    student, teacher = random_rows(6, 5, seed=1), random_rows(6, 5, seed=2)
    queue = None if queue_size is None else random_rows(queue_size, 5, seed=3)
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


# ---- bank, embedding, schedule


@pytest.mark.parametrize("script", [ckd, congen])
@pytest.mark.parametrize("size", [0, 3, 13])
def test_a_queue_holds_the_newest_embeddings_newest_first(script, size):
    """Batches smaller and larger than it, an empty start, and clearing as in the loop."""
    queue, past = torch.empty(0, 2), []
    for step, count in enumerate([4, 1, 7, 13, 40, 3, 2, 1]):
        if step == 5:
            queue, past = queue[:0], []
        new = torch.arange(step * 100.0, step * 100 + count)
        embeddings = torch.stack([new, -new], dim=1).requires_grad_()
        queue = script.enqueue(queue, embeddings, size)
        past = [*new.tolist(), *past]
        assert queue[:, 0].tolist() == past[:size]
        assert torch.equal(queue[:, 0], -queue[:, 1]) and not queue.requires_grad


@pytest.mark.parametrize("script", [ckd, congen, ibkd, eval_sts])
@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_pooling_equals_loops_and_padding_never_counts(script, pooling):
    """In all scripts; the last token is counted from the right, where batches have padding."""
    states = random_rows(3, 4, 6, seed=1)
    third = [1, 0, 0, 0] if pooling == "lasttoken" else [0, 0, 1, 1]
    masks = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], third])
    output = SimpleNamespace(last_hidden_state=states)
    encoder = SimpleNamespace(pooling=pooling, heads=torch.nn.Sequential(), training=False)
    encoder.model = lambda input_ids, *, attention_mask, **options: output  # by its name
    for encoder.normalize in (False, True):
        found = script.embed(encoder, None, masks)
        for row, mask in enumerate(masks.tolist()):
            tokens = [states[row, i] for i in range(4) if mask[i]]
            mean = sum(tokens) / len(tokens)
            expected = {"mean": mean, "cls": states[row, 0], "lasttoken": tokens[-1]}[pooling]
            length = expected.square().sum().sqrt() if encoder.normalize else 1
            assert (found[row] - expected / length).abs().max() < 1e-6


def test_the_learning_rate_rises_for_a_tenth_of_an_epoch_and_falls_as_a_cosine():
    """As in transformers, from rate 0; a tenth of an epoch may end between two steps."""
    sgd = torch.optim.SGD([torch.zeros(1)], 1)
    for epoch_steps, total in ((40, 120), (8, 16), (22, 44), (1000, 7)):
        rates = [ckd.warmup_cosine(step, epoch_steps, total) for step in range(total)]
        schedule = transformers.get_cosine_schedule_with_warmup(sgd, epoch_steps / 10, total)
        assert rates == pytest.approx([schedule.lr_lambdas[0](step) for step in range(total)])
    rates = [ckd.warmup_cosine(step, 40, 120) for step in range(120)]
    assert rates[:5] == [0, 0.25, 0.5, 0.75, 1.0]
    assert rates[62] == pytest.approx(0.5)
    assert all(a > b for a, b in zip(rates[4:], rates[5:]))


# ---- options


def test_defaults_are_the_papers(parse):
    args = parse(ckd, "--student", "bert-base-uncased")
    assert (args.epochs, args.batch_size, args.eval_steps, args.patience) == (20, 512, 125, 3)
    assert (args.finetune_epochs, args.finetune_batch_size, args.max_length) == (5, 128, 64)
    assert args.teacher == "princeton-nlp/sup-simcse-roberta-large"
    assert (args.objective, args.queue_size, args.finetune_temperature) == ("ckd", 65536, 0.05)
    ckd.choose_defaults(args, torch.nn.Linear(1, 1))
    assert args.temperature == 0.05
    own = parse(ckd, "--student", "x", "--objective", "kd", "--learn-temperature")
    ckd.choose_defaults(own, torch.nn.Linear(1, 1))
    assert own.queue_size == 0 and own.temperature == pytest.approx(math.exp(-1))


@pytest.mark.parametrize(
    "words, read",
    [
        ("", ["news5m.en", "nli_for_simcse.csv"]),
        ("--train my.txt", ["my.txt"]),  # without triplets, stage 1 alone
        ("--train my.txt --triplets my.csv", ["my.txt", "my.csv"]),
        ("--stage finetune", ["nli_for_simcse.csv"]),
    ],
)
def test_the_default_files_and_stages(call_main, monkeypatch, words, read):
    asked = []
    monkeypatch.setattr(ckd, "resolve_data", lambda name: asked.append(name) or name)
    for name in ("read_dev", "read_sentences", "read_triplets"):
        monkeypatch.setattr(ckd, name, lambda path: [])
    monkeypatch.setattr(ckd, "load_untrained_student", lambda *_, **__: sys.exit())
    with pytest.raises(SystemExit):
        call_main(ckd, "--student", "bert-base-uncased", *words.split())
    assert asked == read


@pytest.mark.parametrize("millions, rates", [(110, (2e-4, 5e-5)), (67, (3e-4, 1e-5))])
def test_learning_rates_depend_on_the_size_of_the_student(
    call_main, models_folder, files, tmp_path, monkeypatch, millions, rates
):
    """And are recorded: args.json has the numbers that were used."""
    student = torch.nn.ParameterList([torch.empty(millions * 1_000_000, device="meta")])
    load = common.load_encoder(models_folder / "bert", layers="0,2")
    choose = ckd.choose_defaults
    monkeypatch.setattr(ckd, "choose_defaults", lambda args, _: choose(args, student))
    monkeypatch.setattr(ckd, "load_untrained_student", lambda args, otherwise: load)
    words = small_options("ckd", models_folder, files, tmp_path / "out")
    del words[words.index("--lr") : words.index("--lr") + 2]
    del words[words.index("--finetune-lr") : words.index("--finetune-lr") + 2]
    call_main(ckd, *words, "--max-steps", 1)
    used = common.read_json(tmp_path / "out/args.json", {})
    assert (used["--lr"], used["--finetune-lr"]) == rates


# ---- whole steps, by hand


def batch_of(encoder, sentences):
    """Padded token ids and mask, by the tokenizer itself."""
    batch = encoder.tokenizer(sentences, padding=True, return_tensors="pt")
    return batch["input_ids"], batch["attention_mask"]


def infonce_of(queries, keys, tau):
    """The loss that infonce() computes, with a gradient."""
    similarity = torch.cosine_similarity(queries[:, None], keys[None], dim=-1) / tau
    return (similarity.logsumexp(1) - similarity.diagonal()).mean()


@pytest.mark.parametrize(
    "batch_size, queue_size, learned", [(2, 3, False), (2, 1, True), (4, 9, True), (2, 0, False)]
)
def test_steps_of_stage_1_by_hand(
    models_folder, files, tmp_path, call_main, monkeypatch, batch_size, queue_size, learned
):
    """Four steps of two sentences, or two of four.

    Fails if the bank is filled before the loss or is not cleared at an epoch's start, or if order,
    learning rate, clipping, temperature or projection differ.
    """
    monkeypatch.setattr(common, "LOG_STEPS", 1)
    texts = demo_sentences(4)
    (tmp_path / "four.txt").write_text("\n".join(texts) + "\n", "utf-8")
    out, name = tmp_path / "out", models_folder / "bert"
    data = ["--train", tmp_path / "four.txt", "--dev", files / "dev.tsv"]
    models = ["--teacher", models_folder / "wide", "--student", name, "--pooling", "mean"]
    steps = ["--epochs", 2, "--batch-size", batch_size, "--queue-size", queue_size]
    more = ["--temperature", 0.1, "--lr", 1e-3, "--dropout", 0, "--output", out]
    call_main(ckd, *data, *models, *steps, *more, *["--learn-temperature"] * learned)

    teacher = common.load_encoder(models_folder / "wide").eval()
    targets = ckd.embed(teacher, *batch_of(teacher, texts)).detach()
    student = common.load_encoder(name).eval()
    torch.manual_seed(0)
    projection = torch.nn.Linear(32, 48)  # M
    log_tau = torch.tensor(math.log(0.1), requires_grad=True)
    parameters = [*student.parameters(), *projection.parameters(), *[log_tau] * learned]
    adam = Adam(parameters, betas=(0.9, 0.98))
    orders = [np.random.default_rng([0, epoch]).permutation(4) for epoch in (0, 1)]
    epoch_steps = 4 // batch_size
    total = 2 * epoch_steps
    found = losses(out)
    assert list(found) == [("distill", step) for step in range(1, total + 1)]
    for step, picked in enumerate(np.reshape(orders, (total, batch_size)), 1):
        if (step - 1) % epoch_steps == 0:
            bank = []
        projected = projection(ckd.embed(student, *batch_of(student, [texts[i] for i in picked])))
        past = bank[max(0, len(bank) - queue_size) :]
        keys = torch.stack([targets[i] for i in picked] + past)
        expected = infonce(projected.tolist(), keys.tolist(), log_tau.exp().item())
        assert found["distill", step] == pytest.approx(expected, abs=2e-5)
        warmup = epoch_steps / 10  # less than a step, after which the cosine begins
        progress = (step - 1 - warmup) / (total - warmup)
        rate = 0 if step == 1 else (1 + math.cos(math.pi * progress)) / 2
        adam.step(infonce_of(projected, keys, log_tau.exp()), 1e-3 * rate)
        bank += reversed([targets[i] for i in picked])


def test_steps_of_kd_by_hand_are_unclipped(models_folder, files, tmp_path, call_main, monkeypatch):
    """Targets far away, whose gradients' norms are above 1 and differ from step to step."""
    monkeypatch.setattr(common, "LOG_STEPS", 1)
    texts = demo_sentences(8)
    (tmp_path / "eight.txt").write_text("\n".join(texts) + "\n", "utf-8")
    targets = random_rows(8, 32).float() * torch.tensor([[30.0], [1]] * 4)
    np.save(tmp_path / "targets.npy", targets.numpy())
    words = ["--objective", "kd", "--train", tmp_path / "eight.txt", "--dev", files / "dev.tsv"]
    words += ["--teacher-embeddings", tmp_path / "targets.npy", "--student", models_folder / "bert"]
    words += ["--pooling", "mean", "--dropout", 0, "--batch-size", 2, "--epochs", 1, "--lr", 0.01]
    call_main(ckd, *words, "--output", tmp_path / "out")

    student = common.load_encoder(models_folder / "bert").eval()
    adam = torch.optim.Adam(student.parameters(), betas=(0.9, 0.98))
    norms = []
    for step, picked in enumerate(np.random.default_rng([0, 0]).permutation(8).reshape(4, 2)):
        embedding = ckd.embed(student, *batch_of(student, [texts[i] for i in picked]))
        loss = (embedding - targets[picked]).square().mean()
        logged = losses(tmp_path / "out")["distill", step + 1]
        assert logged == pytest.approx(loss.item(), rel=1e-4)
        adam.zero_grad()
        loss.backward()
        squares = [
            value.grad.square().sum() for value in student.parameters() if value.grad is not None
        ]
        norms.append(sum(squares).sqrt().item())
        adam.param_groups[0]["lr"] = 0.01 * ckd.warmup_cosine(step, 4, 4)
        adam.step()
    assert min(norms) > 2 and max(norms) > 2 * min(norms)


@pytest.mark.parametrize("learned", [False, True])
def test_steps_of_stage_2_by_hand(models_folder, files, tmp_path, call_main, monkeypatch, learned):
    """100 triplets, 14 at a time. The gradients' norms differ, so that clipping counts."""
    monkeypatch.setattr(common, "LOG_STEPS", 1)
    words = small_options("ckd", models_folder, files, tmp_path / "out")
    words += ["--stage", "finetune", "--dropout", 0, "--pooling", "mean", "--max-steps", 5]
    words += ["--finetune-batch-size", 14, "--finetune-temperature", 0.02, "--finetune-lr", 0.01]
    words += ["--teacher", "nowhere"]  # it is not loaded
    call_main(ckd, *words, *["--learn-temperature"] * learned)
    sides = demo_triplets(100)
    student = common.load_encoder(models_folder / "bert", layers="0,2").eval()
    log_tau = torch.tensor(math.log(0.02), requires_grad=True)
    order = np.random.default_rng([0, 0]).permutation(100)
    adam = Adam([*student.parameters(), *[log_tau] * learned], betas=(0.9, 0.98))
    for step, picked in enumerate(order[:70].reshape(5, 14), 1):
        batches = [batch_of(student, [texts[i] for i in picked]) for texts in sides]
        anchor, positive, negative = [ckd.embed(student, *batch) for batch in batches]
        keys = torch.cat([positive, negative])
        expected = infonce(anchor.tolist(), keys.tolist(), log_tau.exp().item())
        assert losses(tmp_path / "out")["finetune", step] == pytest.approx(expected, rel=1e-4)
        progress = (step - 1.8) / 4.2  # of the cosine, after a warm-up of 0.8 steps
        rate = 0 if step == 1 else (1 + math.cos(math.pi * progress)) / 2
        adam.step(infonce_of(anchor, keys, log_tau.exp()), 0.01 * rate)
