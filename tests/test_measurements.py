"""The scripts of results/ that measure what no command of the project does."""

import shutil
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, demo_sentences

import ckd
import common
from extras import quantize

sys.path.insert(0, str(ROOT / "results"))
import onnx_scores
import two_teachers


def test_two_teachers(models_folder, monkeypatch):
    """The targets are the weighted mean of both teachers' embeddings."""
    texts = demo_sentences(5)
    first, second = [common.load_encoder(models_folder / name) for name in ("mean", "cls")]
    monkeypatch.setattr(two_teachers, "SECOND", models_folder / "cls", raising=False)
    monkeypatch.setattr(two_teachers, "WEIGHT", 0.3, raising=False)
    found = two_teachers.embeddings_of_two(ckd.embed, first, texts)
    parts = [common.encode(ckd.embed, encoder, texts) for encoder in (first, second)]
    assert np.allclose(found, 0.7 * parts[0] + 0.3 * parts[1], atol=1e-6)


@pytest.mark.slow
def test_onnx_scores(models_folder, call_main, monkeypatch, tmp_path):
    """The embeddings are those of the file, not of the folder's weights."""
    pytest.importorskip("onnxscript")
    folder = tmp_path / "model"
    shutil.copytree(models_folder / "mean", folder)
    call_main(quantize, folder, "--bits", 32)
    monkeypatch.setattr(onnx_scores, "FILE", "model.onnx", raising=False)
    encoder = onnx_scores.load_file(folder)
    expected = common.encode(ckd.embed, encoder, demo_sentences(4))
    for value in encoder.model.parameters():
        torch.nn.init.zeros_(value.data)
    found = common.encode(onnx_scores.embed, encoder, demo_sentences(4))
    assert np.allclose(found, expected, atol=1e-5)
