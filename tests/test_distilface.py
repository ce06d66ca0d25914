"""distilface.py: the fourteen poolings and the loss against plain loops, runs from end to end."""

import json
import math
import sys

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from safetensors.torch import load_file

import common
import distilface
from support import demo
from support.encoder import LayerPooling, load_encoder

FOURTEEN = (
    "cls",
    "avg",
    "last_second_hidden",
    "avg_all_hidden",
    "avg_second_to_last_hidden",
    "avg_first_last",
    "avg_last2",
    "avg_last4",
    "max_all_hidden",
    "max_second_to_last_hidden",
    "max_first_last",
    "max_last2",
    "max_last4",
    "concat_last4",
)


def rows(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


# ---- poolings and loss


def pooled_by_loops(states, lengths, pooling):
    """Written from section 5.6 and the names alone: lists of numbers, one at a time."""
    which = {
        "cls": [-1],
        "avg": [-1],
        "last_second_hidden": [-2],
        "all_hidden": range(len(states)),
        "second_to_last_hidden": range(1, len(states)),
        "first_last": [0, -1],
        "last2": [-2, -1],
        "last4": [-4, -3, -2, -1],
    }
    name = pooling if pooling in which else pooling.split("_", 1)[1]
    states = [state.tolist() for state in states]
    embeddings = []
    for sentence, length in enumerate(lengths):
        tokens = []
        for position in range(length):
            vectors = [states[layer][sentence][position] for layer in which[name]]
            if pooling.startswith("concat"):
                tokens.append([value for vector in vectors for value in vector])
            elif pooling.startswith("max"):
                tokens.append([max(values) for values in zip(*vectors)])
            else:
                tokens.append([sum(values) / len(values) for values in zip(*vectors)])
        if pooling == "cls":
            embeddings.append(tokens[0])
        else:
            embeddings.append([sum(values) / length for values in zip(*tokens)])
    return torch.tensor(embeddings, dtype=torch.float64)


@pytest.mark.parametrize("pooling", FOURTEEN)
def test_each_pooling_equals_loops(pooling):
    states = [rows(3, 6, 5, seed=layer) for layer in range(7)]
    lengths = [6, 2, 4]
    mask = torch.tensor([[1] * length + [0] * (6 - length) for length in lengths])
    expected = pooled_by_loops(states, lengths, pooling)
    assert expected.shape == (3, 20 if pooling == "concat_last4" else 5)
    pooled = distilface.pool(states, mask, pooling)
    assert (pooled - expected).abs().max() < 1e-10
    noise = [state.masked_fill(mask[..., None] == 0, 1e3) for state in states]
    assert torch.equal(distilface.pool(noise, mask, pooling), pooled)


def test_the_fourteen_poolings_are_fourteen():
    states = [rows(2, 3, 4, seed=layer) for layer in range(7)]
    mask = torch.ones(2, 3)
    results = {name: distilface.pool(states, mask, name) for name in distilface.POOLINGS}
    assert tuple(distilface.POOLINGS) == (*FOURTEEN, "mean")
    assert torch.equal(results.pop("mean"), results["avg"])
    assert len({tuple(result.flatten().tolist()) for result in results.values()}) == 14


@pytest.mark.parametrize(
    "pooling, layers",
    [
        ("avg_last4", 3),
        ("max_last4", 2),
        ("concat_last4", 3),
        ("avg_last2", 1),
        ("last_second_hidden", 1),
    ],
)
def test_a_pooling_says_how_many_layers_it_needs(pooling, layers):
    message = f"pooling {pooling} needs . layers, the encoder has {layers}"
    with pytest.raises(ValueError, match=message):
        distilface.pool([rows(1, 2, 3)] * (layers + 1), torch.ones(1, 2), pooling)
    distilface.pool([rows(1, 2, 3)] * 5, torch.ones(1, 2), pooling)


@pytest.mark.parametrize("temperature", [0.05, 1])
def test_the_loss_is_that_of_section_3(temperature):
    first, second = rows(5, 3, seed=1), rows(5, 3, seed=2)

    def cosine(a, b):
        dot = sum(x * y for x, y in zip(a, b))
        return dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))

    total = 0.0
    for i, h in enumerate(first.tolist()):
        similar = [math.exp(cosine(h, other) / temperature) for other in second.tolist()]
        total -= math.log(similar[i] / sum(similar)) / 5
    loss = distilface.simcse_loss(first, second, temperature)
    assert loss.item() == pytest.approx(total, abs=1e-10)
    assert torch.autograd.gradcheck(
        lambda a, b: distilface.simcse_loss(a, b, temperature),
        (first.requires_grad_(), second.requires_grad_()),
    )


# ---- the student


def encoder_of(folder, pooling, monkeypatch, *more):
    command = ["distilface.py", "--student", str(folder), "--pooling", pooling]
    options = ["--device", "cpu", "--precision", "fp32", *more]
    monkeypatch.setattr(sys, "argv", [*command, *options])
    return distilface.load_student(distilface.parse_args())


def student_of(folder, pooling, monkeypatch, *more):
    return distilface.Student(encoder_of(folder, pooling, monkeypatch, *more), pooling)


def batch_of(encoder, sentences):
    return common.Tokens(encoder, sentences).batch(np.arange(len(sentences)))


@pytest.mark.parametrize("pooling", FOURTEEN)
def test_what_is_trained_is_what_is_saved_and_padding_never_counts(
    models_folder, tmp_path, monkeypatch, pooling
):
    """pool() in training, Encoder in the folder, SentenceTransformer: written apart, all equal.

    distilbert has no pooler and no token types.
    """
    from sentence_transformers import SentenceTransformer

    student = student_of(models_folder / "distilbert", pooling, monkeypatch).eval()
    encoder = student.encoder
    sentences = ["Run.", *demo.sentences(6)]
    batch = batch_of(encoder, sentences)
    embedding, second = student(*batch)
    assert torch.equal(embedding, second)  # without dropout
    assert embedding.shape[1] == encoder.dimension
    assert (embedding - encoder(*batch)).abs().max() < 1e-6
    for row, sentence in enumerate(sentences):
        alone = encoder(*batch_of(encoder, [sentence]))[0]
        assert (alone - embedding[row]).abs().max() < 1e-6

    encoder.save(tmp_path)
    encoder.save(tmp_path)  # a better student replaces it
    again = load_encoder(tmp_path).eval()
    assert again.pooling == encoder.pooling
    assert (again(*batch) - embedding).abs().max() < 1e-6
    if pooling.startswith(("max", "concat")):
        with pytest.raises(Exception, match="LayerPooling"):
            SentenceTransformer(str(tmp_path), device="cpu")
        return
    theirs = SentenceTransformer(str(tmp_path), device="cpu").encode(sentences)
    assert np.abs(theirs - embedding.detach().numpy()).max() < 1e-5
    assert np.abs(theirs - theirs[0]).max() > 0.01


def test_a_folder_states_the_positions_of_its_layers():
    states = {name: distilface.encoder_pooling(name, depth=6) for name in distilface.POOLINGS}
    assert (states["cls"], states["avg"], states["mean"]) == ("cls", "mean", "mean")
    assert states["avg_first_last"] == LayerPooling((0, 6), "mean")
    assert states["last_second_hidden"] == LayerPooling((5,), "mean")
    assert states["max_second_to_last_hidden"] == LayerPooling((1, 2, 3, 4, 5, 6), "max")
    assert states["concat_last4"] == LayerPooling((3, 4, 5, 6), "concat")
    assert len(set(states.values())) == 14


@pytest.mark.parametrize("name", ["bert", "roberta", "pooler", "mean"])
def test_other_encoders_too(models_folder, monkeypatch, name):
    """With a pooler, token types, heads and normalization in their folder, or without.

    They are read by the pooling that --pooling names, and nothing behind it.
    """
    folder = models_folder / name
    encoder = encoder_of(folder, "avg_last2", monkeypatch, "--student-layers", "0,2,3").eval()
    batch = batch_of(encoder, demo.sentences(5))
    states = encoder.model(*batch, output_hidden_states=True).hidden_states
    assert len(states) == 4
    lengths = batch[1].sum(1).tolist()
    expected = pooled_by_loops([state.double() for state in states], lengths, "avg_last2")
    assert (encoder(*batch) - expected).abs().max() < 1e-5


def test_both_views_come_from_one_pass_and_differ_by_dropout_alone(models_folder, monkeypatch):
    student = student_of(models_folder / "bert", "avg", monkeypatch).train()
    batch = batch_of(student.encoder, demo.sentences(5))
    calls = []
    student.encoder.model.register_forward_hook(
        lambda module, inputs, output: calls.append(inputs[0].shape[0])
    )
    first, second = student(*batch)
    assert calls == [10]
    assert first.shape == second.shape == (5, 32)
    assert (first - second).abs().max() > 0.01
    mean = torch.stack([torch.cat(student(*batch)) for _ in range(400)]).mean(0)
    # the same sentence, row by row
    assert (mean[:5] - mean[5:]).abs().max() < 0.25 * (first - second).abs().max()


def test_half_precision_gives_nearly_the_same_embedding_in_fp32(models_folder, monkeypatch):
    student = student_of(models_folder / "bert", "avg_last4", monkeypatch).eval()
    batch = batch_of(student.encoder, demo.sentences(5))
    full = student(*batch)[0]
    with torch.autocast("cpu", torch.bfloat16):
        half = student(*batch)[0]
    assert half.dtype == torch.float32
    assert 0 < (full - half).abs().max() < 0.05 * full.abs().max()


def test_a_folder_that_pools_in_an_unknown_way_is_not_taken_for_a_mean(
    models_folder, tmp_path, monkeypatch
):
    encoder_of(models_folder / "bert", "avg_last2", monkeypatch).save(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    unstated = [
        {key: value for key, value in module.items() if key != "pooling"} for module in modules
    ]
    (tmp_path / "modules.json").write_text(json.dumps(unstated))
    with pytest.raises(common.DataError, match="2_Pooling: Pooling"):  # not ours
        load_encoder(tmp_path)
    normalize = dict(
        idx=1, name="1", path="1_Normalize", type="sentence_transformers.models.Normalize"
    )
    (tmp_path / "modules.json").write_text(json.dumps([modules[0], normalize]))
    with pytest.raises(common.DataError, match="Normalize, expected a pooling behind the transf"):
        load_encoder(tmp_path)


def test_defaults_are_those_of_table_3(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["distilface.py"])
    args = distilface.parse_args()
    assert (args.batch_size, args.lr, args.max_length) == (128, 1e-5, 32)
    assert (args.temperature, args.pooling, args.max_steps) == (0.05, "avg_last4", 20_000)
    assert args.student == "distilbert-base-uncased"
    assert args.train == "wiki1m_for_simcse.txt"
    assert not args.patience


# ---- runs


def options(models_folder, files, output, *more):
    return (
        *("--student", models_folder / "bert", "--train", files / "sentences.txt"),
        *("--dev", files / "dev.tsv", "--output", output, "--batch-size", 32),
        *("--max-steps", 12, "--eval-steps", 4, "--lr", 1e-3),
        *more,
    )


def metrics(folder):
    """The lines of metrics.jsonl, without the speed."""
    entries = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        entry.pop("sentences_per_second", None)
        entry.pop("peak_memory_mb", None)
        entries.append(entry)
    return entries


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--pooling", "max_last2", "--student-layers", "0,3"),
        ("--pooling", "mean", "--patience", 1),
    ],
)
def test_a_run_leaves_the_best_student(run, models_folder, files, tmp_path, more):
    out = tmp_path / "out"
    process = run("distilface.py", *options(models_folder, files, out, *more))
    assert process.returncode == 0, process.stderr[-3000:]
    entries = metrics(out)
    assert {entry["stage"] for entry in entries} == {"train"}
    assert all(math.isfinite(entry.get("loss", 0)) for entry in entries)
    scores = {entry["step"]: entry["dev"] for entry in entries if "dev" in entry}
    # 300 sentences make nine full batches of 32, which --patience counts as an epoch.
    assert set(scores) == {0, 4, 8, 12} or ("--patience" in more and max(scores) > 9)
    rates = {entry["step"]: entry["lr"] for entry in entries if "lr" in entry}
    assert rates[4] == pytest.approx(1e-3 * 9 / 12)  # the fourth of twelve steps
    pairs = {"dev": common.read_scored_pairs(files / "dev.tsv")}
    dev = common.spearman(load_encoder(out).eval(), pairs)["dev"]
    assert dev == pytest.approx(max(scores.values()), abs=1e-4)
    (last,) = [line for line in process.stdout.splitlines() if "student after" in line]
    assert float(last.split("|")[2]) == pytest.approx(dev, abs=0.006)
    card = ModelCard.load(out / "README.md")
    assert card.data.eval_results[0].metric_value == pytest.approx(dev, abs=0.006)
    assert str(models_folder) not in str(card)
    assert ("has no such pooling" in str(card)) == ("max_last2" in more)
    sts = run("eval_sts.py", out, "--pairs", files / "dev.tsv")
    assert f"{dev:.2f}" in sts.stdout, sts.stderr


def test_an_epoch_leaves_out_the_batch_that_is_not_full(
    models_folder, files, tmp_path, monkeypatch
):
    seen = []

    def record(first, second, temperature):
        seen.append(len(first))
        return (first - second).square().sum()

    monkeypatch.setattr(distilface, "simcse_loss", record)
    command = options(models_folder, files, tmp_path / "out", "--max-steps", 11)
    monkeypatch.setattr(sys, "argv", ["distilface.py", *map(str, command)])
    distilface.main()
    assert seen == [32] * 11  # 300 sentences: 9 full batches, then the next epoch's


def test_training_cuts_at_32_tokens_and_scoring_at_the_models_maximum(
    call_main, models_folder, files, tmp_path, monkeypatch
):
    words = demo.sentences(20)
    long = [" ".join(words[i : i + 12]) for i in range(8)]
    (tmp_path / "long.txt").write_text("\n".join(long))
    pairs = [f"{a}\t{b}\t{i % 5}\n" for i, (a, b) in enumerate(zip(long, long[1:]))]
    (tmp_path / "dev.tsv").write_text("".join(pairs))
    lengths = {True: set(), False: set()}  # in training or not
    forward = transformers.BertModel.forward

    def record(self, input_ids, *args, **options):
        lengths[self.training].add(input_ids.shape[1])
        return forward(self, input_ids, *args, **options)

    monkeypatch.setattr(transformers.BertModel, "forward", record)
    data = ("--train", tmp_path / "long.txt", "--dev", tmp_path / "dev.tsv")
    command = options(models_folder, files, tmp_path / "out", "--batch-size", 4, "--max-steps", 2)
    call_main(distilface, *command, *data)
    assert lengths[True] == {32}
    assert max(lengths[False]) == 128


def test_max_steps_0_trains_nothing(call_main, models_folder, files, tmp_path):
    """The encoder, read by another pooling: for quantize.py, or as a baseline (Table 2)."""
    out = tmp_path / "out"
    command = options(models_folder, files, out, "--max-steps", 0, "--pooling", "avg_first_last")
    printed = call_main(distilface, *command)
    before = load_encoder(models_folder / "bert", "avg_first_last")
    after = load_encoder(out)
    assert after.pooling == before.pooling == LayerPooling((0, 4), "mean")
    weights = before.model.state_dict()
    assert all(
        torch.equal(value, weights[name]) for name, value in after.model.state_dict().items()
    )
    pairs = {"dev": common.read_scored_pairs(files / "dev.tsv")}
    dev = common.spearman(before.eval(), pairs)["dev"]
    assert [(entry["step"], entry["dev"]) for entry in metrics(out)] == [(0, pytest.approx(dev))]
    scores = [line.split("|")[2].strip() for line in printed.splitlines() if "| student" in line]
    assert scores == [f"{dev:.2f}"] * 2  # before and after


@pytest.mark.slow
def test_a_few_steps_raise_the_real_students_score(run, tmp_path):
    """Layers 1,3,5 of all-MiniLM-L6-v2 on the demo's sentences, as --demo does, fewer steps."""
    out = tmp_path / "out"
    command = ("--demo", "--max-steps", 25, "--output", out)
    process = run("distilface.py", *command, OMP_NUM_THREADS="2")
    assert process.returncode == 0, process.stderr[-2000:]
    test = {}
    for line in process.stdout.splitlines():
        if line.startswith("| student"):
            _, name, _, score, _ = line.split("|")
            test[name.strip()] = float(score)
    assert test["student after"] > test["student before"] + 1, test


@pytest.mark.slow
def test_a_loss_that_becomes_nan_stops_the_run_and_keeps_the_best_student(
    run, models_folder, files, tmp_path
):
    out = tmp_path / "out"
    process = run("distilface.py", *options(models_folder, files, out, "--lr", 1e38))
    assert process.returncode == 2
    assert "Traceback" not in process.stderr
    line = process.stderr.splitlines()[-1]
    assert line.startswith("error: step ")
    assert "the loss is nan" in line
    weights = load_file(out / "model.safetensors")
    assert all(torch.isfinite(value).all() for value in weights.values())


# ---- what invalid input gets


def test_bad_input_gets_one_line_and_status_2(fails, models_folder, files, tmp_path):
    out = tmp_path / "out"
    base = options(models_folder, files, out)
    alone = tmp_path / "alone.txt"
    alone.write_text("One sentence.\n")
    cases = [
        (
            ("--student-layers", "0,1,2"),
            "pooling avg_last4 needs 4 layers, the encoder has 3",
        ),
        (("--batch-size", 1), "--batch-size 1: expected 2"),
        (("--batch-size", 400), "--batch-size 400: expected at most 300, the number of sentences"),
        (("--train", alone), "1 text to train on, expected 2 or more, to have negatives"),
        (("--pooling", "max"), "--pooling"),
        (("--temperature", 0), "argument --temperature: '0' is not a number above 0"),
        (("--train", tmp_path / "none"), "no such file"),
        (("--student", tmp_path / "none"), "no local path"),
        (("--device", "gpu"), "--device gpu"),
        (("--teacher", "x"), "--teacher"),
        (("--grid", "lr=1e-5,3e-5"), "--grid is not an option of this script any longer: sweep.py"),
        (("--quantize",), "--quantize is not an option of this script any longer: quantize.py"),
    ]
    for extra, expected in cases:
        line = fails(distilface, *base, *extra)
        assert expected in line, line
        assert not out.exists(), line


@pytest.mark.slow
def test_a_run_in_the_way_is_kept(run, fails, models_folder, files, tmp_path):
    out = tmp_path / "out"
    base = options(models_folder, files, out)
    assert run("distilface.py", *base).returncode == 0
    before = (out / "model.safetensors").read_bytes()
    assert "already contains a run" in fails(distilface, *base)
    assert "--lr 0.5: the run to resume" in fails(distilface, *base, "--resume", "--lr", 0.5)
    assert before == (out / "model.safetensors").read_bytes()
    again = run("distilface.py", *base, "--resume")
    assert again.returncode == 0
    assert "student after" in again.stdout
    assert before == (out / "model.safetensors").read_bytes()
