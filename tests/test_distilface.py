"""distilface.py: the fourteen poolings and the loss against plain loops, the steps, the folder."""

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from conftest import DEMO, Adam, demo_sentences, infonce, losses, random_rows
from conftest import rows as metrics
from processes import small_options

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


# ---- poolings and loss


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


@pytest.mark.parametrize(
    "pooling, needed",
    [("avg_last4", 4), ("max_last4", 4), ("concat_last4", 4), ("max_last2", 2)]
    + [("last_second_hidden", 2)],
)
def test_the_embedding_layer_is_none_of_the_last_layers(pooling, needed):
    states = [random_rows(1, 2, 3)] * (needed + 1)
    distilface.pool(states, torch.ones(1, 2), pooling)
    with pytest.raises(ValueError, match=f"{pooling} needs {needed} layers"):
        distilface.pool(states[1:], torch.ones(1, 2), pooling)


@pytest.mark.parametrize("tau", [0.05, 1])
def test_the_loss_is_that_of_section_3(tau):
    first, second = random_rows(5, 3, seed=1), random_rows(5, 3, seed=2)
    expected = infonce(first.tolist(), second.tolist(), tau)
    assert distilface.simcse_loss(first, second, tau).item() == pytest.approx(expected, abs=1e-10)
    loss = partial(distilface.simcse_loss, temperature=tau)
    assert torch.autograd.gradcheck(loss, (first.requires_grad_(), second.requires_grad_()))


# ---- training


def test_defaults_are_those_of_table_3(parse):
    args = parse(distilface)
    assert (args.batch_size, args.lr, args.max_length) == (128, 1e-5, 32)
    assert (args.pooling, args.temperature, args.max_steps) == ("avg_last4", 0.05, 20_000)
    assert (args.student, args.patience) == ("distilbert-base-uncased", 0)


def full_batches(lengths, size, seed, epochs):
    """The rows of each step: sorted by length, without an epoch's batch that is not full."""
    steps = []
    for epoch in range(epochs):
        random = np.random.default_rng([seed, epoch])
        rows = sorted(random.permutation(len(lengths)), key=lambda row: lengths[row])
        cut = [rows[i : i + size] for i in range(0, len(rows), size)]
        steps += [cut[i] for i in random.permutation(len(cut)) if len(cut[i]) == size]
    return steps


@pytest.mark.parametrize("dropout", [None, 0.3])
def test_steps_by_hand(call_main, models_folder, tmp_path, monkeypatch, dropout):
    """Two epochs of two steps: rows, dropout, loss, clipping, Adam and learning rate.

    Dropout is the model's own, or that of the option. Both views come from one pass.
    """
    monkeypatch.setattr(common, "LOG_STEPS", 1)
    texts, seed, total, lr, tau = demo_sentences(10), 3, 4, 3e-3, 0.2
    (tmp_path / "ten.txt").write_text("\n".join(texts))
    command = ("--train", tmp_path / "ten.txt", "--batch-size", 4, "--max-steps", total, "--lr", lr)
    command += ("--temperature", tau, "--seed", seed, "--pooling", "avg_last2")
    command += ("--dropout", dropout) if dropout else ()
    out = tmp_path / "out"
    pairs = ("--dev", DEMO / "dev.tsv", "--student", models_folder / "bert")
    call_main(distilface, *pairs, *command, "--output", out, "--precision", "fp32")

    encoder = common.load_encoder(models_folder / "bert")
    model = encoder.model.train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            assert part.p == 0.1  # the model's own
            part.p = dropout or 0.1
    ids = [encoder.tokenizer(text, truncation=True, max_length=32)["input_ids"] for text in texts]
    steps = full_batches([len(row) for row in ids], 4, seed, epochs=2)
    adam = Adam(model.parameters())
    for step, rows in enumerate(steps, 1):
        batch = encoder.tokenizer.pad({"input_ids": [ids[row] for row in rows] * 2})
        torch.manual_seed(seed * 1_000_003 + step)
        batch = {name: torch.tensor(batch[name]) for name in ("input_ids", "attention_mask")}
        states = model(**batch, output_hidden_states=True).hidden_states
        mask = batch["attention_mask"][..., None]
        embedding = ((states[-1] + states[-2]) / 2 * mask).sum(1) / mask.sum(1)
        unit = embedding / embedding.norm(dim=1, keepdim=True)
        logits = unit[:4] @ unit[4:].T / tau
        loss = (logits.logsumexp(1) - logits.diagonal()).mean()
        assert losses(out)["train", step] == pytest.approx(loss.item(), rel=1e-4), step
        adam.step(loss, lr * (1 - (step - 1) / total))
    rates = [row["lr"] for row in metrics(out) if "lr" in row]
    assert rates == pytest.approx([lr, lr * 3 / 4, lr / 2, lr / 4])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_resumed_run_is_the_same_run(check_resume, models_folder, files, monkeypatch, precision):
    """fp16: the first steps overflow, and are left out; its gradients are clipped unscaled."""
    scaler = partial(torch.amp.GradScaler, init_scale=2.0**22, growth_interval=5)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    clip, norms = torch.nn.utils.clip_grad_norm_, []
    record = lambda values, limit: norms.append(clip(values, limit).item())  # noqa: E731
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", record)
    checkpoint, scales = common.Run.checkpoint, {}

    def record_scale(run, best, best_step, step, modules, optimizer):
        checkpoint(run, best, best_step, step, modules, optimizer)
        scale = modules[1].state_dict().get("scale")
        scales.setdefault(run.folder.name, {})[step] = scale

    monkeypatch.setattr(common.Run, "checkpoint", record_scale)
    command = small_options("distilface", models_folder, files, "")
    command += ["--max-steps", 12, "--eval-steps", 4, "--precision", precision]
    check_resume(distilface, "train", 8, *command)
    assert list(scales["whole"]) == [0, 4, 8, 12]
    assert scales["stopped"] == scales["whole"]
    assert math.isfinite(norms[0]) == (precision == "fp32")
    assert 1 < max(norms[8:12]) < 100


def test_training_cuts_at_32_tokens_and_scoring_at_the_models_maximum(
    call_main, models_folder, files, tmp_path, monkeypatch
):
    words = demo_sentences(20)
    long = [" ".join(words[i : i + 12]) for i in range(8)]
    (tmp_path / "long.txt").write_text("\n".join(long))
    pairs = [f"{a}\t{b}\t{i % 5}\n" for i, (a, b) in enumerate(zip(long, long[1:]))]
    (tmp_path / "dev.tsv").write_text("".join(pairs))
    lengths = {True: set(), False: set()}  # in training or not
    embed = distilface.embed

    def record(encoder, input_ids, attention_mask):
        lengths[encoder.training].add(input_ids.shape[1])
        return embed(encoder, input_ids, attention_mask)

    monkeypatch.setattr(distilface, "embed", record)
    command = small_options("distilface", models_folder, files, tmp_path / "out")
    command += ["--train", tmp_path / "long.txt", "--dev", tmp_path / "dev.tsv"]
    call_main(distilface, *command, "--batch-size", 4)
    assert lengths[True] == {32}
    assert max(lengths[False]) == 128


# ---- the folder


@pytest.mark.parametrize("pooling", FOURTEEN)
def test_a_folder_gives_the_vectors_that_were_trained(
    call_main, models_folder, files, tmp_path, pooling
):
    """--max-steps 0 trains nothing. The folder `pooler` states a dense head, which is left out."""
    from sentence_transformers import SentenceTransformer

    texts = ["Run.", *demo_sentences(6)]
    pairs = ("--pairs", files / "dev.tsv", "--json", tmp_path / "scores.json")
    for name in ("distilbert", "pooler"):
        out = tmp_path / name
        command = small_options("distilface", models_folder, files, out)
        command += ["--student", models_folder / name, "--pooling", pooling]
        printed = call_main(distilface, *command, "--max-steps", 0)
        encoder = common.load_encoder(models_folder / name, "mean").eval()
        encoder.pooling = pooling
        expected = common.encode(distilface.embed, encoder, texts)
        saved, embed = eval_sts.load(out)
        ours = common.encode(embed, saved, texts)
        assert np.abs(ours - expected).max() < 1e-6
        call_main(eval_sts, out, *pairs)
        (score,) = json.loads((tmp_path / "scores.json").read_text())[str(out)].values()
        assert printed.count(f" {score:.2f} |") == 2  # before and after
        if pooling.startswith(("max", "concat")):
            with pytest.raises(Exception, match="sentence_distillation|LayerPooling"):
                SentenceTransformer(str(out), device="cpu")
        else:
            theirs = SentenceTransformer(str(out), device="cpu").encode(texts)
            assert np.abs(theirs - expected).max() < 1e-5
