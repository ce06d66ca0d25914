"""distilface.py: the fourteen poolings and the loss against plain loops, runs from end to end, the grid, int8."""
import json
import math
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import common
import demo
import distilface

FOURTEEN = ("cls", "avg", "last_second_hidden", "avg_all_hidden", "avg_second_to_last_hidden", "avg_first_last", "avg_last2", "avg_last4",
            "max_all_hidden", "max_second_to_last_hidden", "max_first_last", "max_last2", "max_last4", "concat_last4")


def rows(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ---- poolings and loss

def pooled_by_loops(states, lengths, pooling):
    """Written from section 5.6 and the names alone: lists of numbers, one at a time."""
    which = {"cls": [-1], "avg": [-1], "last_second_hidden": [-2], "all_hidden": range(len(states)), "second_to_last_hidden": range(1, len(states)),
             "first_last": [0, -1], "last2": [-2, -1], "last4": [-4, -3, -2, -1]}
    name = pooling if pooling in which else pooling.split("_", 1)[1]
    states, embeddings = [state.tolist() for state in states], []
    for sentence, length in enumerate(lengths):
        tokens = []
        for t in range(length):
            vectors = [states[i][sentence][t] for i in which[name]]
            if pooling.startswith("concat"):
                tokens.append([value for vector in vectors for value in vector])
            elif pooling.startswith("max"):
                tokens.append([max(values) for values in zip(*vectors)])
            else:
                tokens.append([sum(values) / len(values) for values in zip(*vectors)])
        embeddings.append(tokens[0] if pooling == "cls" else [sum(values) / length for values in zip(*tokens)])
    return torch.tensor(embeddings, dtype=torch.float64)


@pytest.mark.parametrize("pooling", FOURTEEN)
def test_each_pooling_equals_loops(pooling):
    states, lengths = [rows(3, 6, 5, seed=layer) for layer in range(7)], [6, 2, 4]
    mask = torch.tensor([[1] * length + [0] * (6 - length) for length in lengths])
    expected = pooled_by_loops(states, lengths, pooling)
    assert expected.shape == (3, 20 if pooling == "concat_last4" else 5)
    assert (distilface.pool(states, mask, pooling) - expected).abs().max() < 1e-10
    noise = [state.masked_fill(mask[..., None] == 0, 1e3) for state in states]
    assert torch.equal(distilface.pool(noise, mask, pooling), distilface.pool(states, mask, pooling))


def test_the_fourteen_poolings_are_fourteen():
    states, mask = [rows(2, 3, 4, seed=layer) for layer in range(7)], torch.ones(2, 3)
    assert distilface.POOLING_NAMES[:14] == FOURTEEN and torch.equal(distilface.pool(states, mask, "mean"), distilface.pool(states, mask, "avg"))
    results = [tuple(distilface.pool(states, mask, name).flatten().tolist()) for name in FOURTEEN]
    assert len(set(results)) == 14


@pytest.mark.parametrize("pooling, layers", [("avg_last4", 3), ("max_last4", 2), ("concat_last4", 3), ("avg_last2", 1), ("last_second_hidden", 1)])
def test_a_pooling_says_how_many_layers_it_needs(pooling, layers):
    with pytest.raises(ValueError, match=f"pooling {pooling} needs . layers, the encoder has {layers}"):
        distilface.pool([rows(1, 2, 3)] * (layers + 1), torch.ones(1, 2), pooling)
    distilface.pool([rows(1, 2, 3)] * 5, torch.ones(1, 2), pooling)


@pytest.mark.parametrize("temperature", [0.05, 1])
def test_the_loss_is_that_of_section_3(temperature):
    first, second, total = rows(5, 3, seed=1), rows(5, 3, seed=2), 0.0

    def cosine(a, b):
        return sum(x * y for x, y in zip(a, b)) / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))
    for i, h in enumerate(first.tolist()):
        similar = [math.exp(cosine(h, other) / temperature) for other in second.tolist()]
        total -= math.log(similar[i] / sum(similar)) / 5
    assert distilface.simcse_loss(first, second, temperature).item() == pytest.approx(total, abs=1e-10)
    assert torch.autograd.gradcheck(lambda a, b: distilface.simcse_loss(a, b, temperature), (first.requires_grad_(), second.requires_grad_()))


# ---- the student

def student_of(folder, pooling, monkeypatch, *more):
    monkeypatch.setattr(sys, "argv", ["distilface.py", "--student", str(folder), "--pooling", pooling, "--device", "cpu", "--precision", "fp32", *more])
    return distilface.load_student(distilface.parse_args())


@pytest.mark.parametrize("pooling", FOURTEEN)
def test_what_is_trained_is_what_is_saved_and_padding_never_counts(models_folder, tmp_path, monkeypatch, pooling):
    """distilbert has no pooler and no token types. A sentence alone and among longer ones: the same to 1e-6."""
    from sentence_transformers import SentenceTransformer
    student = student_of(models_folder / "distilbert", pooling, monkeypatch).eval()
    sentences = ["Run.", *demo.sentences(6)]
    batch = common.Tokens(student.encoder, sentences).batch(np.arange(7), "cpu")
    embedding, twin = student(*batch)
    assert torch.equal(embedding, twin) and embedding.shape[1] == student.encoder.width  # without dropout
    assert (embedding - student.encoder(*batch)).abs().max() < 1e-6
    for i, sentence in enumerate(sentences):
        assert (student.encoder(*common.Tokens(student.encoder, [sentence]).batch(np.array([0]), "cpu"))[0] - embedding[i]).abs().max() < 1e-6
    student.save(tmp_path), student.save(tmp_path)
    again = common.load_encoder(tmp_path).eval()
    assert again.pooling == dict(cls="cls", avg="mean").get(pooling, f"distilface.{pooling}") and (again(*batch) - embedding).abs().max() < 1e-6
    if pooling.startswith(("max", "concat")):
        with pytest.raises(Exception, match=f"distilface.{pooling}"):
            SentenceTransformer(str(tmp_path), device="cpu")
    else:
        theirs = SentenceTransformer(str(tmp_path), device="cpu").encode(sentences)
        assert np.abs(theirs - embedding.detach().numpy()).max() < 1e-5 and np.abs(theirs - theirs[0]).max() > 0.01


@pytest.mark.parametrize("name", ["bert", "roberta", "pooler", "mean"])
def test_other_encoders_too(models_folder, monkeypatch, name):
    """With a pooler, token types, heads and Normalize in their folder, or without: the pooling that was asked for, nothing behind it."""
    student = student_of(models_folder / name, "avg_last2", monkeypatch, "--student-layers", "0,2,3").eval()
    batch = common.Tokens(student.encoder, demo.sentences(5)).batch(np.arange(5), "cpu")
    states = student.encoder.model(*batch, output_hidden_states=True).hidden_states
    lengths = batch[1].sum(1).tolist()
    assert len(states) == 4 and (student.encoder(*batch) - pooled_by_loops([state.double() for state in states], lengths, "avg_last2")).abs().max() < 1e-5


def test_both_views_come_from_one_pass_and_differ_by_dropout_alone(models_folder, monkeypatch):
    student = student_of(models_folder / "bert", "avg", monkeypatch).train()
    batch, calls = common.Tokens(student.encoder, demo.sentences(5)).batch(np.arange(5), "cpu"), []
    student.encoder.model.register_forward_hook(lambda module, inputs, output: calls.append(inputs[0].shape[0]))
    first, second = student(*batch)
    assert calls == [10] and first.shape == second.shape == (5, 32) and (first - second).abs().max() > 0.01
    mean = torch.stack([torch.cat(student(*batch)) for _ in range(400)]).mean(0)
    assert (mean[:5] - mean[5:]).abs().max() < 0.25 * (first - second).abs().max()  # the same sentence, row by row


def test_half_precision_gives_nearly_the_same_embedding_in_fp32(models_folder, monkeypatch):
    student = student_of(models_folder / "bert", "avg_last4", monkeypatch).eval()
    batch = common.Tokens(student.encoder, demo.sentences(5)).batch(np.arange(5), "cpu")
    full, half = student(*batch)[0], distilface.Student(student.encoder, "avg_last4", "bf16")(*batch)[0]
    assert half.dtype == torch.float32 and 0 < (full - half).abs().max() < 0.05 * full.abs().max()


def test_a_folder_that_pools_in_an_unknown_way_is_not_taken_for_a_mean(models_folder, tmp_path, monkeypatch):
    student = student_of(models_folder / "bert", "avg_last2", monkeypatch)
    student.save(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    (tmp_path / "modules.json").write_text(json.dumps([{key: value for key, value in module.items() if key != "pooling"} for module in modules]))
    with pytest.raises(common.DataError, match="2_Pooling: Pooling"):  # somebody else's WeightedLayerPooling
        common.load_encoder(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps([modules[0], dict(idx=1, name="1", path="1_Normalize", type="sentence_transformers.models.Normalize")]))
    with pytest.raises(common.DataError, match="pooling 'none', expected mean or cls"):
        common.load_encoder(tmp_path)


def test_defaults_are_those_of_table_3(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["distilface.py"])
    args = distilface.parse_args()
    assert (args.batch_size, args.lr, args.max_length, args.temperature, args.pooling, args.max_steps) == (128, 1e-5, 32, 0.05, "avg_last4", 20_000)
    assert args.student == "distilbert-base-uncased" and args.train == "wiki1m_for_simcse.txt" and not args.patience


# ---- runs

def options(models_folder, files, output, *more):
    return ("--student", models_folder / "bert", "--train", files / "sentences.txt", "--dev", files / "dev.tsv", "--output", output, "--batch-size", 32,
            "--max-steps", 12, "--eval-steps", 4, "--lr", 1e-3, *more)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("more", [(), ("--pooling", "max_last2", "--student-layers", "0,3"), ("--pooling", "mean", "--patience", 1)])
def test_a_run_leaves_the_best_student(run, models_folder, files, tmp_path, more):
    from huggingface_hub import ModelCard
    process = run("distilface.py", *options(models_folder, files, tmp_path / "out", *more))
    assert process.returncode == 0, process.stderr[-3000:]
    entries = lines(tmp_path / "out")
    scores = {entry["step"]: entry["dev"] for entry in entries if "dev" in entry}
    assert set(scores) <= {0, 4, 8, 12} and all(math.isfinite(entry.get("loss", 0)) for entry in entries)
    rates = {entry["step"]: entry["lr"] for entry in entries if "lr" in entry}
    assert rates[4] == pytest.approx(1e-3 * 9 / 12)  # the fourth of twelve steps: three are behind it
    dev = common.spearman(common.load_encoder(tmp_path / "out").eval(), {"dev": common.read_graded_pairs(files / "dev.tsv")})["dev"]
    assert dev == pytest.approx(max(scores.values()), abs=1e-4)
    last = [line.split("|") for line in process.stdout.splitlines() if "student after" in line][0]
    assert float(last[2]) == pytest.approx(dev, abs=0.006)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.eval_results[0].metric_value == pytest.approx(dev, abs=0.006) and str(models_folder) not in str(card)
    assert ("cannot express" in str(card)) == ("max_last2" in more)
    sts = run("eval_sts.py", tmp_path / "out", "--pairs", files / "dev.tsv")
    assert f"{dev:.2f}" in sts.stdout, sts.stderr


def test_a_few_steps_raise_the_real_students_score(run, tmp_path):
    """Layers 1,3,5 of all-MiniLM-L6-v2 on the demo's sentences, as --demo does, fewer steps; then int8: a quarter of the size, nearly the score."""
    process = run("distilface.py", "--demo", "--max-steps", 25, "--quantize", "--output", tmp_path / "out", OMP_NUM_THREADS="2")
    assert process.returncode == 0, process.stderr[-2000:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in process.stdout.splitlines()]
    table = {row[0]: [float(value) for value in row[1:]] for row in cells if row and row[0].startswith(("student", "fp32", "int8"))}
    assert table["student after"][1] > table["student before"][1] + 1, table
    assert abs(table["fp32, torch"][1] - table["student after"][1]) < 0.02 and abs(table["fp32, ONNX Runtime"][1] - table["fp32, torch"][1]) < 0.02
    assert table["int8"][0] < 0.3 * table["fp32, torch"][0] and table["int8"][0] < 0.4 * table["int8 but the embeddings"][0]
    assert table["int8"][1] > table["fp32, torch"][1] - 2
    import onnxruntime
    import tokenizers  # as the README has it: neither torch nor transformers
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    tokenizer.enable_padding()
    rows = tokenizer.encode_batch(["A boy runs.", "A young man is running through the park."])
    names = dict(input_ids=[row.ids for row in rows], attention_mask=[row.attention_mask for row in rows])
    session = onnxruntime.InferenceSession(tmp_path / "out" / "onnx" / "model_int8.onnx", providers=["CPUExecutionProvider"])
    a, b = session.run(["sentence_embedding"], {name: np.array(value) for name, value in names.items()})[0]
    encoder = common.load_encoder(tmp_path / "out").eval()
    fp32 = common.encode(encoder, common.Tokens(encoder, ["A boy runs.", "A young man is running through the park."]), "cpu")
    for ours, theirs in zip(fp32, (a, b)):
        assert ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs) > 0.97


def test_killed_and_resumed_it_ends_as_if_nobody_had_touched_it(run, models_folder, files, tmp_path):
    """A grid, killed at random moments: the same best student bit for bit, the same lines, each setting trained once from its start."""
    more = ("--grid", "lr=1e-3,3e-3 temperature=0.05,0.2", "--eval-steps", 2)
    assert run("distilface.py", *options(models_folder, files, tmp_path / "whole", *more)).returncode == 0
    command = [sys.executable, "distilface.py", *map(str, options(models_folder, files, tmp_path / "killed", *more)), "--resume"]
    where, rng = dict(env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=os.path.dirname(distilface.__file__)), random.Random(0)
    for _ in range(4):
        process, before = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **where), time.time()
        while process.poll() is None and not any(path.stat().st_mtime > before for path in tmp_path.glob("killed/*/metrics.jsonl")):
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.2))
        assert process.poll() is None, "the run ended before it was killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
    again = subprocess.run(command, capture_output=True, text=True, **where)
    assert again.returncode == 0, again.stderr[-2000:]
    assert load_file(tmp_path / "whole" / "model.safetensors").keys() and (tmp_path / "whole" / "model.safetensors").read_bytes() == (
        tmp_path / "killed" / "model.safetensors").read_bytes()
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole") and len(lines(tmp_path / "whole")) == 4

    def inner(name):
        return {path.parent.name: [{key: value for key, value in entry.items() if key != "sentences_per_second"} for entry in lines(path.parent)]
                for path in (tmp_path / name).glob("*/metrics.jsonl")}
    assert len(inner("whole")) == 4 and inner("killed") == inner("whole")


def test_a_grid_is_sorted_keeps_the_best_and_survives_a_loss_that_is_nan(run, fails, models_folder, files, tmp_path):
    base = options(models_folder, files, tmp_path / "out", "--grid", "pooling=avg,max_last2,mean lr=1e-3,1e38")
    process = run("distilface.py", *base)
    assert process.returncode == 0, process.stderr[-2000:]
    entries = {entry["setting"]: entry for entry in lines(tmp_path / "out")}
    assert len(entries) == 6 and sum("stopped" in entry for entry in entries.values()) == 3 and "the loss is nan" in entries["pooling=avg,lr=1e+38"]["stopped"]
    names = [line.split("|")[1].strip() for line in process.stdout.splitlines() if line.startswith("| pooling")]
    assert sorted(names) == sorted(entries) and names == sorted(names, key=lambda name: -entries[name]["dev"])
    best, alike = entries[names[0]], ("pooling=avg,lr=0.001", "pooling=mean,lr=0.001")
    assert entries[alike[0]]["dev"] == entries[alike[1]]["dev"]
    dev = common.spearman(common.load_encoder(tmp_path / "out").eval(), {"dev": common.read_graded_pairs(files / "dev.tsv")})["dev"]
    assert dev == pytest.approx(best["dev"], abs=1e-4)
    assert not list((tmp_path / "out").glob("*/model.safetensors")) and len(list((tmp_path / "out").glob("*/metrics.jsonl"))) == 6
    for extra, expected in ((("--grid", "lr=1e-3"), "--grid lr=1e-3: the run to resume"), (("--lr", 2e-3), "--lr 0.002: the run to resume")):
        assert expected in fails(distilface, *base, "--resume", *extra)
    assert run("distilface.py", *options(models_folder, files, tmp_path / "out", "--grid", "seed=0,1"), "--overwrite").returncode == 0
    assert len(lines(tmp_path / "out")) == 2


def test_a_loss_that_becomes_nan_stops_the_run_and_keeps_the_best_student(run, models_folder, files, tmp_path):
    process = run("distilface.py", *options(models_folder, files, tmp_path / "out", "--lr", 1e38))
    line = process.stderr.splitlines()[-1]
    assert process.returncode == 2 and line.startswith("error: step ") and "the loss is nan" in line and "Traceback" not in process.stderr
    assert all(torch.isfinite(value).all() for value in load_file(tmp_path / "out" / "model.safetensors").values())


def test_int8_can_come_later(run, models_folder, files, tmp_path):
    base = options(models_folder, files, tmp_path / "out", "--pooling", "concat_last4")
    assert run("distilface.py", *base).returncode == 0
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    process = run("distilface.py", *base, "--resume", "--quantize")
    assert process.returncode == 0 and "| int8 " in process.stdout, process.stderr[-2000:]
    assert all(line.startswith("|") for line in process.stdout.splitlines()) and "Warning" not in process.stderr  # the exporters are silent
    assert weights == (tmp_path / "out" / "model.safetensors").read_bytes()
    assert [path.name for path in (tmp_path / "out" / "onnx").iterdir()] == ["model_int8.onnx"]
    assert run("distilface.py", *base, "--overwrite", "--seed", 1).returncode == 0
    assert not list((tmp_path / "out" / "onnx").iterdir())  # the old student's does not stay beside the new one


# ---- what bad input gets

def test_bad_input_gets_one_line_and_status_2(fails, models_folder, files, tmp_path, monkeypatch):
    out = tmp_path / "out"
    base = options(models_folder, files, out)
    for extra, expected in ((("--student-layers", "0,1,2"), "pooling avg_last4 needs 4 layers, the encoder has 3"), (("--batch-size", 1), "--batch-size 1: expected 2"),
                            (("--batch-size", 400), "to 300, all there are"), (("--pooling", "max"), "--pooling"), (("--temperature", 0), "--temperature 0.0"),
                            (("--train", tmp_path / "none"), "no such file"), (("--student", tmp_path / "none"), "not a local path"),
                            (("--precision", "fp16", "--device", "cpu"), "expected cpu and fp32"), (("--device", "gpu"), "--device gpu"),
                            (("--grid", "lr"), "--grid lr: expected lr, temperature"), (("--grid", "depth=1"), "--grid depth=1: expected"),
                            (("--grid", "lr=fast"), "--grid lr=fast"), (("--grid", "pooling=max"), "--grid pooling=max"), (("--grid", "lr=0,1e-5"), "--grid lr=0"),
                            (("--grid", "pooling=avg,avg_last4", "--student-layers", "0,1"), "pooling avg_last4 needs 4 layers"),
                            (("--grid", "batch-size=8,1"), "--batch-size 1: expected 2")):
        line = fails(distilface, *base, *extra)
        assert expected in line and not out.exists(), line
    monkeypatch.setattr(distilface.importlib.util, "find_spec", lambda name: None)
    assert "--quantize needs onnx, onnxscript, onnxruntime: pip install onnx" in fails(distilface, *base, "--quantize") and not out.exists()


def test_a_run_in_the_way_is_kept(run, fails, models_folder, files, tmp_path):
    base = options(models_folder, files, tmp_path / "out")
    assert run("distilface.py", *base).returncode == 0
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert "holds a run" in fails(distilface, *base)
    assert "--lr 0.5: the run to resume" in fails(distilface, *base, "--resume", "--lr", 0.5)
    assert before == (tmp_path / "out" / "model.safetensors").read_bytes()
    again = run("distilface.py", *base, "--resume")
    assert again.returncode == 0 and "student after" in again.stdout and before == (tmp_path / "out" / "model.safetensors").read_bytes()
