"""extras/rounded.py: a training step with the file's rounding, and gradients as if without it."""

import copy
import json
import time

import pytest
import torch
from conftest import demo_sentences, outcome, rows
from processes import finish, small_options, start
from torch import nn
from transformers.pytorch_utils import Conv1D

import ckd
import common
from extras import quantize, rounded

SCRIPTS = ("ckd", "congen", "ibkd", "distilface")


def with_rounded_weights(encoder, layer_bits=4):
    """A copy that computes as the file in 4 bits does, with so many in linear layers."""
    made = copy.deepcopy(encoder)
    for layer in made.modules():
        if isinstance(layer, (nn.Linear, nn.Embedding)):
            bits = layer_bits if isinstance(layer, nn.Linear) else 4
            layer.weight.data = quantize.rounded_weights(layer.weight.data, 32, bits)
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(lambda _, x: quantize.rounded_inputs(x[0], 32))
    return made


@pytest.mark.parametrize("bits", [4, 2])
def test_a_step_has_the_rounded_outputs_and_leaves_the_weights(models_folder, monkeypatch, bits):
    monkeypatch.setattr(rounded.state, "layer_bits", bits)
    encoder = common.load_encoder(models_folder / "bert", "mean", dropout=0.0).train()
    before = copy.deepcopy(encoder.state_dict())
    names = [name for name, _ in encoder.named_parameters()]
    texts = demo_sentences(20)
    found = rounded.embed_rounded(ckd.embed, encoder, texts)
    expected = common.encode(ckd.embed, with_rounded_weights(encoder, bits), texts)
    assert (found.detach() - torch.from_numpy(expected)).abs().median() < 1e-5
    plain = common.encode(ckd.embed, encoder, texts)
    assert (found.detach() - torch.from_numpy(plain)).abs().median() > 1e-3
    found.square().sum().backward()
    assert [name for name, _ in encoder.named_parameters()] == names
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    with torch.no_grad():  # in scores, too
        scored = rounded.embed_rounded(ckd.embed, encoder.eval(), texts)
    assert (scored - torch.from_numpy(expected)).abs().median() < 1e-5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounded, "teacher_embeddings", rounded.embed_rounded)
        found = rounded.embed_teacher(ckd.embed, encoder, texts)
    assert torch.equal(found, common.embed_texts(ckd.embed, encoder, texts))


def test_gradients_pass_the_rounding():
    """Of one linear layer and one table: those at the rounded weights and inputs."""
    torch.manual_seed(0)
    table, layer = nn.Embedding(9, 32), nn.Linear(32, 5)
    encoder = nn.Module()
    encoder.model, encoder.heads = nn.Sequential(table, layer), nn.Identity()
    numbers, slopes = torch.tensor([3, 1, 4, 1]), torch.randn(4, 5)
    linear, tables = rounded.layers_of(encoder)
    assert (linear, tables) == ([layer], [table])
    rows = quantize.rounded_weights(table.weight.detach(), 32)[numbers]
    inputs = quantize.rounded_inputs(rows, 32)
    weight = quantize.rounded_weights(layer.weight.detach(), 32)

    def embed_texts(embed, encoder, texts, max_length):
        return encoder.model(numbers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounded, "embed_texts", embed_texts)
        output = rounded.embed_rounded(None, encoder, None)
    assert torch.allclose(output, inputs @ weight.T + layer.bias, atol=1e-6)
    (output * slopes).sum().backward()
    assert torch.allclose(layer.weight.grad, slopes.T @ inputs, atol=1e-6)
    expected = torch.zeros(9, 32).index_add(0, numbers, slopes @ weight)
    assert torch.allclose(table.weight.grad, expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_killed_run_continues_to_the_same_bytes(name, models_folder, files, tmp_path):
    """In 4 bits; that of ckd.py has 2 in linear layers, and dev chooses by what the file has."""
    whole, killed, log = tmp_path / "whole", tmp_path / "killed", tmp_path / "log"
    bits = 2 if name == "ckd" else 4
    for folder, steps in ((whole, None), (killed, 2), (killed, None)):
        words = [f"{name}.py", *small_options(name, models_folder, files, folder)]
        words = ["--layer-bits", 2] * (bits == 2) + words
        process = start("extras.rounded", words, log)
        if steps:
            while process.is_alive() and len(rows(folder)) <= steps:
                time.sleep(0.01)
            process.kill()
            process.join()
            assert not (folder / "README.md").exists()  # it was not finished
        else:
            finish(process, log)
    assert outcome(killed) == outcome(whole)
    assert json.loads((whole / "args.json").read_text())["--layer-bits"] == bits
    if name == "ckd":
        scores = json.loads((whole / "scores.json").read_text())
        student = with_rounded_weights(common.load_encoder(whole), 2)
        expected = common.spearman(ckd.embed, student, common.read_dev(files / "dev.tsv"))
        assert list(scores.values())[-1]["dev"] == pytest.approx(expected, abs=0.05)
    usual = start(name, small_options(name, models_folder, files, whole), log)
    usual.join(300)
    assert usual.exitcode == 2 and "a run with its code:" in log.read_text()  # is not mixed with it


def test_what_it_cannot_round_is_refused(fails):
    expected = "a script is one of ckd.py, congen.py, ibkd.py, distilface.py"
    assert expected in fails(rounded, "dse.py", "--task", "stsb")
    assert expected in fails(rounded)
    encoder = nn.Module()
    encoder.name, encoder.model, encoder.heads = "my-gpt", Conv1D(4, 32), nn.Identity()
    with pytest.raises(common.UserError, match="my-gpt: has a Conv1D; omit extras.rounded"):
        rounded.embed_rounded(ckd.embed, encoder, demo_sentences(2))
