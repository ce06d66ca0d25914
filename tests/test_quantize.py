"""extras/quantize.py: the ONNX models against the encoder, the command, the README's code."""

import logging
import re
import shutil
import subprocess
import sys
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import demo_sentences, random_rows
from torch import nn

import common
import distilface
import eval_sts
from eval_sts import embed
from extras import quantize

README = """
import numpy, onnxruntime, sys, tokenizers

tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
tokenizer.enable_padding()
tokenizer.enable_truncation(128)
rows = tokenizer.encode_batch({texts})
inputs = {{
    "input_ids": [row.ids for row in rows],
    "attention_mask": [row.attention_mask for row in rows],
}}
session = onnxruntime.InferenceSession("onnx/{file}")
embeddings = session.run(
    ["sentence_embedding"], {{name: numpy.array(value) for name, value in inputs.items()}}
)[0]
assert not {{"torch", "transformers"}} & {{*sys.modules}}
numpy.save("embeddings.npy", embeddings)
"""
LOSS = r"its file, 4 bits, loses (\S+) points \((\S+) to (\S+)\)"
BLOCKWISE = ("GatherBlockQuantized", "MatMulNBits")
ENCODERS = [  # folder, pooling, its width
    ("roberta", "cls", 32),
    ("bert", "lasttoken", 32),
    ("distilbert", "concat_last4", 128),
]
# Without these instructions, sums of int8 products saturate on x86 (docs/engineering.md), so that
# vectors of a small random model are far from those in fp32.
HAS_VNNI = "vnni" in Path("/proc/cpuinfo").read_text()


def add_head(encoder, width):
    torch.manual_seed(0)
    encoder.heads.append(torch.nn.Sequential(nn.Linear(width, 24), nn.Tanh()))


@pytest.mark.slow
@pytest.mark.parametrize("folder, pooling, width", ENCODERS)
def test_all_of_an_encoder_is_exported(models_folder, tmp_path, folder, pooling, width):
    encoder = common.load_encoder(models_folder / folder).eval()
    encoder.pooling = pooling
    embed = eval_sts.embed
    if pooling == "concat_last4":
        embed = distilface.embed
    else:
        add_head(encoder, width)
    token_ids = common.tokenize(encoder, ["a boy runs.", *demo_sentences(8)])
    with torch.no_grad():
        quantize.export(encoder, embed, tmp_path / "fp32.onnx")
        embed_batch = quantize.onnx_model(tmp_path / "fp32.onnx")
        for chunk in (token_ids, token_ids[:1]):
            batch = quantize.padded(encoder, chunk)
            assert np.abs(embed_batch(*batch) - embed(encoder, *batch).numpy()).max() < 1e-5


@pytest.mark.slow
def test_the_command_writes_a_file_for_the_readme_s_code(models_folder, files, tmp_path, call_main):
    encoder = common.load_encoder(models_folder / "bert").eval()
    encoder.normalize = True
    add_head(encoder, 32)
    common.save_encoder(encoder, tmp_path)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    printed = call_main(quantize, tmp_path, "--pairs", files / "dev.tsv", "--rounds", 2)
    logging.disable(logging.NOTSET)
    int8 = tmp_path / "onnx" / "model_int8.onnx"
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before | {int8}

    lines = [line.split("|")[1:-1] for line in printed.splitlines()]
    columns = ["model", "M parameters", "MB", "Spearman", "same in batches", "sentences/s"]
    assert [cell.strip() for cell in lines[0]] == columns
    rows = [[float(cell) for cell in line[2:]] for line in lines[2:]]
    torch_row, torch_linear, fp32, linear, small, four, mixed, two = rows
    score = common.spearman(embed, encoder, common.read_scored_pairs(files / "dev.tsv"))
    assert (torch_row[1], fp32[1]) == pytest.approx((score, score), abs=0.02)
    if HAS_VNNI:
        assert small[1] == pytest.approx(score, abs=3)
    assert small[0] < linear[0] < fp32[0] and two[0] < four[0] < mixed[0] < fp32[0]
    assert torch_linear[0] < torch_row[0]
    # In 8 bits, a vector depends on the other texts of its batch.
    expected = [True, False, True, False, False, True, True, True]
    assert [row[2] > 99.99 for row in rows] == expected
    for tensor in onnx.load(int8).graph.initializer:  # every matrix of the encoder
        if len(tensor.dims) == 2 and min(tensor.dims) > 1:
            assert tensor.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8), tensor.name

    least = least_cosine(encoder, tmp_path, "model_int8.onnx")
    assert not HAS_VNNI or least > 0.98


@pytest.mark.slow
def test_a_file_that_loses_too_much_is_not_written(models_folder, tmp_path, call_main, fails):
    """The gold scores are the cosines in fp32, so that the file loses what 100 points exceed it."""
    folder = shutil.copytree(models_folder / "wide", tmp_path / "model")
    texts = demo_sentences(60)
    vectors = common.encode(embed, common.load_encoder(folder), texts)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    lines = []
    for i, (first, second) in enumerate(pairwise(texts)):
        gold = 2.5 + 2.5 * (vectors[i] * vectors[i + 1]).sum().clip(-1, 1)
        lines.append(f"{first}\t{second}\t{gold:.9f}\n")
    (tmp_path / "pairs.tsv").write_text("".join(lines))
    options = [folder, "--bits", 4, "--pairs", tmp_path / "pairs.tsv", "--rounds", 1]
    rows = ["--rows", "4 bits", "--at-most"]
    found = fails(quantize, *options, *rows, 0)
    logging.disable(logging.NOTSET)
    loss, before, after = map(float, re.search(LOSS, found).groups())
    assert before == 100 and after < 100 and loss == pytest.approx(100 - after, abs=0.011)
    assert not (folder / "onnx").exists()
    printed = call_main(quantize, *options, *rows, loss + 0.01)
    logging.disable(logging.NOTSET)
    names = [line.split("|")[1].strip() for line in printed.splitlines()[2:]]
    assert names == ["fp32, torch", "4 bits"]
    assert (folder / "onnx" / "model_q4.onnx").exists()
    assert "needs --pairs" in fails(quantize, folder, "--at-most", 1)


def least_cosine(encoder, folder, file):
    """Of the vectors that the README's code makes with a file, and the encoder's own."""
    texts = ["A boy runs.", "A man plays the guitar in a park, and two dogs run."]
    code = README.format(texts=texts, file=file)
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
    vectors, expected = np.load(folder / "embeddings.npy"), common.encode(embed, encoder, texts)
    return (vectors * expected).sum(axis=1).min()  # both are normalized


@pytest.mark.slow
@pytest.mark.parametrize("group_size, layer_bits", [(16, 4), (32, 8), (128, 4), (32, 2)])
def test_four_bits_are_the_nearest_of_sixteen_multiples_of_a_group_s_scale(
    models_folder, tmp_path, call_main, group_size, layer_bits
):
    encoder = common.load_encoder(models_folder / "wide", "mean").eval()  # 48 dimensions
    encoder.normalize = True
    common.save_encoder(encoder, tmp_path)
    options = ("--group-size", group_size, "--layer-bits", layer_bits)
    call_main(quantize, tmp_path, "--bits", 4, *options)
    logging.disable(logging.NOTSET)
    graph = onnx.load(tmp_path / "onnx" / "model_q4.onnx").graph
    nodes = {kind: [node for node in graph.node if node.op_type == kind] for kind in BLOCKWISE}
    assert [len(nodes[kind]) for kind in BLOCKWISE] == [3, 24]  # tables; six in each of four layers
    bits = {
        attribute.i
        for node in nodes["MatMulNBits"]
        for attribute in node.attribute
        if attribute.name == "bits"
    }
    assert bits == {layer_bits}
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    words = encoder.model.get_input_embeddings().weight.detach().numpy()
    (node,) = [
        node
        for node in nodes["GatherBlockQuantized"]
        if tuple(tensors[node.input[0]].dims) == words.shape
    ]
    packed = np.frombuffer(tensors[node.input[0]].raw_data, np.uint8)
    levels = np.stack([packed & 15, packed >> 4], axis=1).astype(int)
    levels = np.where(levels > 7, levels - 16, levels).reshape(words.shape)
    scales = onnx.numpy_helper.to_array(tensors[f"{node.input[2]}_fp16"]).astype(np.float32)
    for row in range(0, len(words), 50):
        for column in range(words.shape[1]):
            scale = scales[row, column // group_size]
            choices = [scale * level for level in range(-8, 8)]
            nearest = min(abs(words[row, column] - choice) for choice in choices)
            error = abs(words[row, column] - scale * levels[row, column])
            assert error <= nearest + 1e-6
    assert least_cosine(encoder, tmp_path, "model_q4.onnx") > (0.5 if layer_bits == 2 else 0.9)


def rounded_by_hand(row, size, low, high):
    """Of the three scales of each group, the one with the least squared error."""
    made = []
    for start in range(0, len(row), size):
        group = row[start : start + size]
        largest = max(group, key=abs)
        tried = []
        for factor in (1, 0.92, 0.84):
            scale = float(np.float16(np.float32(factor * largest / low)))
            levels = [min(high, max(low, round(w / scale))) if scale else 0 for w in group]
            new = [level * scale for level in levels]
            tried.append((sum((a - b) ** 2 for a, b in zip(new, group)), new))
        made += min(tried)[1]
    return made


@pytest.mark.parametrize("bits, low, high", [(4, -8, 7), (2, -2, 1)])
@pytest.mark.parametrize("width, size", [(64, 32), (48, 32), (20, 16)])
def test_weights_are_rounded_to_multiples_of_the_best_scale(width, size, bits, low, high):
    weights = random_rows(30, width)
    weights[0, :size] = 0
    weights[1] *= 1e-4
    expected = torch.tensor([rounded_by_hand(row, size, low, high) for row in weights.tolist()])
    made = quantize.rounded_weights(weights.float(), size, bits)
    assert (made - expected).abs().max() < 1e-6
    assert torch.equal(quantize.rounded_weights(made, size, bits), made)  # the file relies on it


def test_inputs_are_rounded_to_whole_numbers_up_to_127():
    inputs = random_rows(5, 7, 48).float()
    made = quantize.rounded_inputs(inputs, 32)
    for old, new in zip(inputs.flatten(0, 1).tolist(), made.flatten(0, 1).tolist()):
        for group in (slice(0, 32), slice(32, 48)):
            scale = max(map(abs, old[group])) / 127
            expected = [round(value / scale) * scale for value in old[group]]
            assert new[group] == pytest.approx(expected, abs=1e-5)
    assert quantize.rounded_inputs(torch.zeros(2, 32), 32).tolist() == [[0.0] * 32] * 2


@pytest.mark.slow
@pytest.mark.parametrize("folder, bits", [("bert", 4), ("wide", 4), ("roberta", 4), ("wide", 2)])
def test_the_file_in_4_bits_computes_what_torch_does_with_rounded_weights(
    models_folder, tmp_path, folder, bits
):
    """With inputs in fp32, and as it is, with rounded ones.

    An input between two whole numbers goes to the one or the other by the last digit of fp32, and
    then changes those of the next layers: not all texts have the same vectors.
    """
    size, kind = 32, {4: "q4", 2: "q4_2"}[bits]
    encoder, embed, files = quantize.write_onnx(str(models_folder / folder), tmp_path, size)
    logging.disable(logging.NOTSET)
    file = onnx.load(files[kind])
    for node in file.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 0
    onnx.save(file, tmp_path / "exact.onnx")
    batch = quantize.padded(encoder, common.tokenize(encoder, demo_sentences(8)))
    for layer in encoder.modules():
        if isinstance(layer, (nn.Linear, nn.Embedding)):
            of_layer = bits if isinstance(layer, nn.Linear) else 4
            layer.weight.data = quantize.rounded_weights(layer.weight.data, size, of_layer)
    with torch.no_grad():
        expected = embed(encoder, *batch)
    exact = torch.from_numpy(quantize.onnx_model(tmp_path / "exact.onnx")(*batch))
    assert (exact - expected).abs().max() < 1e-5
    for layer in encoder.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(lambda _, x: quantize.rounded_inputs(x[0], size))
    with torch.no_grad():
        expected = embed(encoder, *batch)
    shipped = torch.from_numpy(quantize.onnx_model(files[kind])(*batch))
    differences = (shipped - expected).abs().amax(dim=1)  # of each text
    assert differences.min() < 1e-5
    assert differences.mean() < (shipped - exact).abs().amax(dim=1).mean()


@pytest.mark.parametrize("folder, pooling, width", ENCODERS)
def test_torch_has_int8_linear_layers_and_fp32_embeddings(
    models_folder, tmp_path, folder, pooling, width
):
    encoder = common.load_encoder(models_folder / folder).eval()
    encoder.pooling = pooling
    embed = distilface.embed if pooling == "concat_last4" else eval_sts.embed
    files = {kind: tmp_path / f"{kind}.onnx" for kind in quantize.ROWS}
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # torch deprecates this int8
        patch.setattr(quantize, "ROWS", {})
        models = quantize.load_models(encoder, embed, files)
    (size, _), (int8_size, embed_int8) = models.values()
    linear = sum(x.weight.numel() for x in encoder.modules() if isinstance(x, nn.Linear))
    rest = sum(value.numel() for value in encoder.parameters()) - linear
    assert size * 1e6 == pytest.approx(4 * (linear + rest), abs=60_000)
    assert int8_size * 1e6 == pytest.approx(linear + 4 * rest, abs=60_000)
    (model,) = embed_int8.args
    assert model.model.get_input_embeddings().weight.dtype == torch.float32
    assert not any(type(module) is nn.Linear for module in model.modules())
    batch = quantize.padded(encoder, common.tokenize(encoder, demo_sentences(8)))
    with torch.no_grad():
        expected, made = embed(encoder, *batch), embed_int8(*batch)
    assert nn.functional.cosine_similarity(made, expected).min() > 0.97
    assert not torch.equal(made, expected)


def test_a_table_has_the_parameters_each_set_and_their_average(models_folder, files):
    encoder = common.load_encoder(models_folder / "bert").eval()
    pairs = common.read_scored_pairs(files / "dev.tsv")
    sets = {"STS12": pairs[:40], "STS-B": pairs[20:]}
    (row,) = quantize.measure(encoder, {"a": (1.5, partial(embed, encoder))}, sets, 1).values()
    assert list(row) == [
        *("M parameters", "MB", "STS12", "STS-B", "avg"),
        *("same in batches", "sentences/s"),
    ]
    assert row["M parameters"] * 1e6 == sum(x.numel() for x in encoder.parameters())
    for name, some in sets.items():
        assert row[name] == pytest.approx(common.spearman(embed, encoder, some))
    assert row["avg"] == pytest.approx((row["STS12"] + row["STS-B"]) / 2)


def test_sets_are_those_of_senteval(fails, tmp_path, monkeypatch):
    monkeypatch.setattr(eval_sts, "read_sts", lambda *_: {"STS12": [], "STS-B": []})
    options = [tmp_path, "--senteval", tmp_path, "--sets", "STS12,STS13"]
    assert "--sets STS12,STS13: choose from STS12,STS-B" in fails(quantize, *options)
