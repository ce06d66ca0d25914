"""distilface.py: the fourteen poolings and the loss against plain loops, the steps, the folder."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from conftest import Adam, demo_sentences, infonce, losses, random_rows, rows
from processes import small_options
from sentence_transformers import SentenceTransformer

import common
import distilface
import eval_sts

LAYERS = {  # of hidden_states, after the end of a name
    "cls": [-1],
    "avg": [-1],
    "last_second_hidden": [-2],
    "all_hidden": [0, 1, 2, 3, 4],
    "second_to_last_hidden": [1, 2, 3, 4],
    "first_last": [0, -1],
    "last2": [-2, -1],
    "last4": [-4, -3, -2, -1],
}
FOURTEEN = (
    *("cls", "avg", "last_second_hidden", "avg_all_hidden", "avg_second_to_last_hidden"),
    *("avg_first_last", "avg_last2", "avg_last4", "max_all_hidden", "max_second_to_last_hidden"),
    *("max_first_last", "max_last2", "max_last4", "concat_last4"),
)


def pool_by_loops(states, lengths, pooling):
    """Written from section 5.6 and the names alone: lists of numbers, one at a time."""
    name = pooling if pooling in LAYERS else pooling.split("_", 1)[1]
    layers = [states[layer].tolist() for layer in LAYERS[name]]
    embeddings = []
    for sentence, length in enumerate(lengths):
        tokens = []
        for position in range(length):
            vectors = [layer[sentence][position] for layer in layers]
            if pooling.startswith("concat"):
                tokens.append([value for vector in vectors for value in vector])
            elif pooling.startswith("max"):
                tokens.append([max(values) for values in zip(*vectors)])
            else:
                tokens.append([sum(values) / len(values) for values in zip(*vectors)])
        mean = [sum(values) / length for values in zip(*tokens)]
        embeddings.append(tokens[0] if pooling == "cls" else mean)
    return torch.tensor(embeddings, dtype=torch.float64)


@pytest.mark.parametrize("pooling", FOURTEEN)
def test_each_pooling_equals_loops_and_padding_never_counts(pooling):
    states = [random_rows(3, 6, 5, seed=layer) for layer in range(5)]
    lengths = [6, 2, 4]
    mask = torch.tensor([[1] * length + [0] * (6 - length) for length in lengths])
    expected = pool_by_loops(states, lengths, pooling)
    pooled = distilface.pool(states, mask, pooling)
    assert (pooled - expected).abs().max() < 1e-10
    noise = [state.masked_fill(mask[..., None] == 0, 1e3) for state in states]
    assert torch.equal(distilface.pool(noise, mask, pooling), pooled)


@pytest.mark.parametrize("tau", [0.05, 1])
def test_the_loss_is_that_of_section_3(tau):
    first, second = random_rows(5, 3, seed=1), random_rows(5, 3, seed=2)
    expected = infonce(first.tolist(), second.tolist(), tau)
    assert distilface.simcse_loss(first, second, tau).item() == pytest.approx(expected, abs=1e-10)
    loss = partial(distilface.simcse_loss, temperature=tau)
    assert torch.autograd.gradcheck(loss, (first.requires_grad_(), second.requires_grad_()))


def test_defaults_are_those_of_table_3(parse):
    args = parse(distilface)
    assert (args.batch_size, args.lr, args.max_length) == (128, 1e-5, 32)
    assert (args.pooling, args.temperature, args.steps) == ("avg_last4", 0.05, 20_000)
    assert (args.student, args.eval_steps) == ("distilbert-base-uncased", 250)


@pytest.mark.parametrize("dropout", [None, 0.3])
def test_steps_by_hand(call_main, models_folder, files, tmp_path, monkeypatch, one_part, dropout):
    """An epoch of three steps, and one more: rows, dropout, loss, clipping, Adam, learning rate.

    Ten sentences, cut at 32 tokens, are batches of four, four and two. Dropout is the model's own,
    or that of the option. Both views come from one pass.
    """
    monkeypatch.setattr(common, "LOG_STEPS", 1)
    texts, seed, total, lr, tau = demo_sentences(10), 3, 4, 3e-3, 0.2
    texts[0] = " ".join(texts)
    (tmp_path / "ten.txt").write_text("\n".join(texts))
    command = ("--train", tmp_path / "ten.txt", "--batch-size", 4, "--steps", total, "--lr", lr)
    command += ("--temperature", tau, "--seed", seed, "--pooling", "avg_last2")
    command += ("--dropout", dropout) if dropout else ()
    command += ("--dev", files / "dev.tsv", "--student", models_folder / "bert")
    call_main(distilface, *command, "--output", tmp_path / "out", "--precision", "fp32")

    encoder = common.load_encoder(models_folder / "bert")
    model = encoder.model.train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            assert part.p == 0.1  # the model's own
            part.p = dropout or 0.1
    ids = [encoder.tokenizer(text, truncation=True, max_length=32)["input_ids"] for text in texts]
    orders = [np.random.default_rng([seed, epoch]).permutation(10) for epoch in (0, 1)]
    adam = Adam(model.parameters())
    batches = [orders[0][:4], orders[0][4:8], orders[0][8:], orders[1][:4]]
    for step, picked in enumerate(batches):
        batch = encoder.tokenizer.pad({"input_ids": [ids[row] for row in picked] * 2})
        torch.manual_seed(seed * 1_000_003 + step)
        batch = {name: torch.tensor(batch[name]) for name in ("input_ids", "attention_mask")}
        states = model(**batch, output_hidden_states=True).hidden_states
        mask = batch["attention_mask"][..., None]
        embedding = ((states[-1] + states[-2]) / 2 * mask).sum(1) / mask.sum(1)
        unit = embedding / embedding.norm(dim=1, keepdim=True)
        first, second = unit.chunk(2)
        logits = first @ second.T / tau
        loss = (logits.logsumexp(1) - logits.diagonal()).mean()
        found = losses(tmp_path / "out")["train", step + 1]
        assert found == pytest.approx(loss.item(), rel=1e-4), step
        adam.step(loss, lr * (1 - step / total))
    rates = [row["lr"] for row in rows(tmp_path / "out") if "lr" in row]
    assert rates == pytest.approx([lr, lr * 3 / 4, lr / 2, lr / 4])


def test_fp16_leaves_out_steps_that_overflow_and_clips_unscaled_gradients(
    check_resume, models_folder, files, monkeypatch
):
    """The scale falls until the gradients are finite; a continued run keeps its scale."""
    scaler = partial(torch.amp.GradScaler, init_scale=2.0**22, growth_interval=5)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    clip, norms = torch.nn.utils.clip_grad_norm_, []
    record = lambda values, limit: norms.append(clip(values, limit).item())  # noqa: E731
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", record)
    command = small_options("distilface", models_folder, files, "")
    command += ["--steps", 12, "--eval-steps", 4, "--precision", "fp16"]
    check_resume(distilface, "train", 8, *command)
    assert len(norms) == 12 + 8 + 4  # whole; until step 8; from its checkpoint
    later = [norm for norm in norms[8:12] if math.isfinite(norm)]  # the scale has risen again
    assert not math.isfinite(norms[0]) and 1 < max(later) < 100


SAVED = [*(("distilbert", name) for name in FOURTEEN), ("pooler", "avg"), ("pooler", "avg_last2")]


@pytest.mark.parametrize("name, pooling", SAVED)
def test_a_saved_student_gives_the_vectors_that_were_trained(
    models_folder, tmp_path, name, pooling
):
    """The folder `pooler` states a dense head, which is left out."""
    texts = ["Run.", *demo_sentences(6)]
    student = distilface.load_student(models_folder / name, pooling)
    distilface.save_student(student, tmp_path)
    encoder = common.load_encoder(models_folder / name, "mean").eval()
    encoder.pooling = pooling
    expected = common.encode(distilface.embed, encoder, texts)
    saved, embed = eval_sts.load(tmp_path)
    assert np.abs(common.encode(embed, saved, texts) - expected).max() < 1e-6
    assert saved.dimension == expected.shape[1]
    if pooling.startswith(("max", "concat")):
        with pytest.raises(Exception, match="sentence_distillation|LayerPooling"):
            SentenceTransformer(str(tmp_path), device="cpu")
    else:
        theirs = SentenceTransformer(str(tmp_path), device="cpu").encode(texts)
        assert np.abs(theirs - expected).max() < 1e-5
