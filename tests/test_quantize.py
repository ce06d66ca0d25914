"""extras/quantize.py: the ONNX models against the encoder, the command, the README's code."""

import logging
import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch
from conftest import demo_sentences
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
session = onnxruntime.InferenceSession("onnx/model_int8.onnx")
embeddings = session.run(
    ["sentence_embedding"], {{name: numpy.array(value) for name, value in inputs.items()}}
)[0]
assert not {{"torch", "transformers"}} & {{*sys.modules}}
numpy.save("embeddings.npy", embeddings)
"""
ENCODERS = [  # folder, pooling, its width
    ("roberta", "cls", 32),
    ("bert", "lasttoken", 32),
    ("distilbert", "concat_last4", 128),
]


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
    tokens = common.Tokens(encoder, ["a boy runs.", *demo_sentences(8)])
    with torch.no_grad():
        quantize.export(encoder, embed, tmp_path / "fp32.onnx")
        embed_batch = quantize.onnx_model(tmp_path / "fp32.onnx")
        for rows in (np.arange(9), np.array([0])):
            batch = tokens.batch(rows)
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
    assert [cell.strip() for cell in lines[0]] == ["model", "MB", "Spearman", "sentences/s"]
    torch_row, fp32, linear, small = [[float(cell) for cell in line[1:]] for line in lines[2:]]
    sets = {"": common.read_scored_pairs(files / "dev.tsv")}
    score = common.spearman(embed, encoder, sets)[""]
    assert (torch_row[1], fp32[1]) == pytest.approx((score, score), abs=0.02)
    assert small[1] == pytest.approx(score, abs=3)
    assert small[0] < linear[0] < fp32[0]
    for tensor in onnx.load(int8).graph.initializer:  # every matrix of the encoder
        if len(tensor.dims) == 2 and min(tensor.dims) > 1:
            assert tensor.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8), tensor.name

    texts = ["A boy runs.", "A man plays the guitar in a park, and two dogs run."]
    subprocess.run([sys.executable, "-c", README.format(texts=texts)], cwd=tmp_path, check=True)
    expected = common.encode(embed, encoder, texts)  # normalized
    assert (np.load(tmp_path / "embeddings.npy") * expected).sum(axis=1).min() > 0.98
