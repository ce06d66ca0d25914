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
