"""quantize.py: the ONNX models beside the encoder itself, the table, invalid input."""

import importlib.util
import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import common
import quantize
from support import demo
from support.encoder import Encoder, LayerPooling, load_encoder

# Two sentences of one length to trace with, then others: padding must not count.
SENTENCES = ["a boy runs.", "a girl eats.", *demo.sentences(8)]


def build_encoder(models_folder, name, pooling, head=None, normalize=False):
    """A plain folder of conftest.py, read by a pooling, a dense tanh head [D -> head], ..."""
    plain = load_encoder(models_folder / name, "mean")
    encoder = Encoder(plain.model, plain.tokenizer, pooling, [], normalize, plain.max_length)
    if head:
        torch.manual_seed(0)
        encoder.add_head(nn.Linear(encoder.dimension, head), nn.Tanh())
    return encoder.eval()


ENCODERS = {
    "a dense tanh head and normalization": ("bert", "mean", 24, True),
    "a dense head on [CLS]": ("roberta", "cls", 24, False),
    "the mean of two layers": ("distilbert", LayerPooling((0, 4)), None, False),
    "four layers side by side, [CLS] left out": (
        "bert",
        LayerPooling((1, 2, 3, 4), "concat", True),
        None,
        True,
    ),
    "a maximum over layers": ("distilbert", LayerPooling((3, 4), "max"), 16, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ENCODERS)
def test_the_whole_encoder_is_exported(models_folder, tmp_path, case):
    encoder = build_encoder(models_folder, *ENCODERS[case])
    encoder.save(tmp_path)
    encoder = load_encoder(tmp_path).eval()
    tokens = common.Tokens(encoder, SENTENCES)
    with torch.no_grad(), quantize.quiet():
        quantize.export(encoder, tokens, tmp_path / "fp32.onnx")
    encode_batch = quantize.onnx_encoder(tmp_path / "fp32.onnx")
    for rows in (np.arange(len(SENTENCES)), np.array([2])):
        batch = tokens.batch(rows)
        with torch.no_grad():
            expected = encoder(*batch)
        assert expected.shape[1] == encoder.dimension
        assert (encode_batch(*batch) - expected).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("case", list(ENCODERS)[:3])
def test_int8_is_smaller_and_nearly_the_same(models_folder, tmp_path, case):
    encoder = build_encoder(models_folder, *ENCODERS[case])
    output = tmp_path / "int8.onnx"
    (pairs,) = demo.test().values()
    rows = quantize.quantize(encoder, pairs, output, tmp_path)
    assert list(rows) == ["fp32, torch", "fp32, ONNX Runtime", "int8 but the embeddings", "int8"]
    assert all(row["seconds"] > 0 for row in rows.values())
    sizes = [row["MB"] for row in rows.values()]
    assert sizes[3] < sizes[2] < sizes[1]
    assert sizes[3] == output.stat().st_size / 1e6
    spearman = [row["Spearman"] for row in rows.values()]
    # measured without the batches and the cache of distinct sentences of common.spearman
    assert spearman[0] == pytest.approx(common.spearman(encoder, {"": pairs})[""], abs=1e-3)
    assert spearman[1] == pytest.approx(spearman[0], abs=0.01)
    assert spearman[3] == pytest.approx(spearman[0], abs=3)
    batch = common.Tokens(encoder, SENTENCES).batch(np.arange(len(SENTENCES)))
    with torch.no_grad():
        expected = encoder(*batch)
    cosine = torch.cosine_similarity(quantize.onnx_encoder(output)(*batch), expected)
    assert cosine.min() > 0.98

    large = 32  # numbers; all that is as large is a matrix of the encoder
    for tensor in onnx.load(output).graph.initializer:
        if len(tensor.dims) == 2 and np.prod(tensor.dims) > large and min(tensor.dims) > 1:
            assert tensor.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8), tensor.name


@pytest.mark.slow
def test_the_command_writes_into_the_models_folder(run, models_folder, files, tmp_path):
    folder = tmp_path / "model"
    encoder = build_encoder(models_folder, "bert", LayerPooling((1, 4), "max"), 24, True)
    encoder.save(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    process = run("quantize.py", folder, "--pairs", files / "dev.tsv")
    assert process.returncode == 0, process.stderr[-2000:]
    header, _, *rows = process.stdout.splitlines()
    assert [cell.strip() for cell in header.split("|")[1:5]] == [
        "model",
        "MB",
        "Spearman",
        "seconds",
    ]
    assert len(rows) == 4
    assert all(row.startswith("|") for row in rows)
    assert process.stderr == ""  # the exporters are silent
    new = folder / "onnx" / "model_int8.onnx"
    assert [path.name for path in new.parent.iterdir()] == [new.name]
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert after.pop(new)
    assert after == before


@pytest.mark.slow
def test_the_real_model_needs_neither_torch_nor_transformers(run, tmp_path):
    """all-MiniLM-L6-v2: a quarter of the size, nearly the score, read by tokenizers alone."""
    import tokenizers

    output = tmp_path / "minilm.onnx"
    process = run("quantize.py", common.MINILM, "--demo", "--output", output)
    assert process.returncode == 0, process.stderr[-2000:]
    table = {}
    for line in process.stdout.splitlines()[2:]:
        name, *cells = [cell.strip() for cell in line.split("|")[1:-1]]
        table[name] = [float(cell) for cell in cells]
    size, score, _ = table["fp32, torch"]
    assert abs(table["fp32, ONNX Runtime"][1] - score) < 0.02
    assert table["int8"][0] < 0.3 * size
    assert table["int8"][0] < 0.4 * table["int8 but the embeddings"][0]
    assert table["int8"][1] > score - 2

    sentences = ["A boy runs.", "A young man is running through the park."]
    encoder = load_encoder(common.MINILM).eval()
    encoder.tokenizer.save_pretrained(tmp_path / "tokenizer")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    tokenizer.enable_padding()
    rows = tokenizer.encode_batch(sentences)
    inputs = dict(
        input_ids=np.array([row.ids for row in rows]),
        attention_mask=np.array([row.attention_mask for row in rows]),
    )
    session = onnxruntime.InferenceSession(output, providers=["CPUExecutionProvider"])
    int8 = session.run(["sentence_embedding"], inputs)[0]
    fp32 = common.encode_sentences(encoder, sentences)
    for ours, theirs in zip(fp32, int8):
        assert ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs) > 0.97
        assert np.linalg.norm(theirs) == pytest.approx(1, abs=1e-5)


# ---- what invalid input gets


def test_bad_input_gets_one_line_and_status_2(fails, models_folder, files, tmp_path, monkeypatch):
    (tmp_path / "two.tsv").write_text("a\tb\n")
    (tmp_path / "file").write_text("")
    model = models_folder / "pooler"
    pairs = ("--pairs", files / "dev.tsv")
    cases = [
        ((tmp_path / "none", *pairs), "none: not a folder here, expected one, or --output FILE"),
        ((tmp_path / "none", *pairs, "--output", tmp_path / "x.onnx"), "no local path"),
        ((tmp_path, *pairs), "expected a complete model"),
        ((model, "--pairs", tmp_path / "two.tsv"), "two.tsv:1: 2 tab-separated columns"),
        ((model, "--senteval", tmp_path), "no STS/STSBenchmark below it"),
        ((model, *pairs, "--demo"), "not allowed with"),
        ((model, *pairs, "--output", tmp_path), "Is a directory, expected a file"),
        ((model, *pairs, "--output", tmp_path / "file" / "x.onnx"), "a file that can be written"),
        ((), "MODEL"),
    ]
    for command, expected in cases:
        assert expected in fails(quantize, *command)
    assert not (model / "onnx").exists()
    monkeypatch.setattr(quantize, "LARGEST", 1000)
    assert "MB of weights, expected" in fails(quantize, model, *pairs)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    expected = "quantize.py needs onnx, onnxscript, onnxruntime: pip install onnx"
    assert expected in fails(quantize, model, *pairs)


def test_a_failure_keeps_the_old_file_and_leaves_nothing(
    fails, models_folder, files, tmp_path, monkeypatch
):
    output = tmp_path / "old.onnx"
    output.write_bytes(b"old")

    def disk_full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quantize, "export", disk_full)
    model = models_folder / "mean"
    line = fails(quantize, model, "--pairs", files / "dev.tsv", "--output", output)
    assert "old.onnx: No space left on device" in line
    assert output.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["old.onnx"]
    assert json.loads((model / "modules.json").read_text())
