"""extras/check.py: a folder that is right, one that another program reads differently."""

import re
import shutil
import sys

import pytest
import torch
from conftest import alter
from torch import nn

import common
import distilface
from extras import check


@pytest.fixture
def folder(models_folder, tmp_path):
    """A model with a head, normalization, and two prompts."""
    encoder = common.load_encoder(models_folder / "distilbert", "mean")
    torch.manual_seed(0)
    encoder.heads.append(nn.Sequential(nn.Linear(32, 24), nn.Tanh()))
    encoder.normalize = True
    prompts = dict(query="a man is ", passage="the dog ", none="")
    encoder.stated = dict(prompts=prompts, default_prompt_name="passage")
    common.save_encoder(encoder, tmp_path / "model")
    return tmp_path / "model"


def rows(printed):
    """{(model, prompt): lowest cosine}"""
    cells = [line.strip("| ").split(" | ") for line in printed.splitlines()[2:]]
    return {(model, prompt): float(lowest) for model, prompt, lowest, _ in cells}


def test_a_folder_that_is_read_right_has_a_row_for_each_prompt(call_main, folder, models_folder):
    found = rows(call_main(check, folder, models_folder / "cls"))
    names = ["default", "no prompt", 'prompt "query"', 'prompt "passage"']
    expected = [(str(folder), name) for name in names]
    assert list(found) == [*expected, (str(models_folder / "cls"), "default")]
    assert min(found.values()) > 0.9999


def pool_otherwise(folder):
    flags = dict(pooling_mode_mean_tokens=False, pooling_mode_cls_token=True)
    alter(folder / "1_Pooling" / "config.json", flags)


def leave_out_the_head(folder):
    alter(folder / "modules.json", lambda modules: modules.pop(2))


def read_five_tokens(folder):
    alter(folder / "sentence_bert_config.json", dict(max_seq_length=5))


def state_another_prompt(folder):
    prompts = dict(query="a woman is ", passage="the dog ", none="")
    alter(folder / "config_sentence_transformers.json", dict(prompts=prompts))


CHANGES = {
    pool_otherwise: r"default: the two vectors of '.* have a cosine of 0\.",
    leave_out_the_head: "default: .*; both must embed all texts, in the same dimension",
    read_five_tokens: r"default: the two vectors of '.* have a cosine of 0\.",
    state_another_prompt: r'prompt "query": the two vectors of .* have a cosine of 0\.',
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_reading_is_refused_and_names_a_text(folder, fails, tmp_path, monkeypatch, change):
    """sentence-transformers gets a copy that differs from the folder that we load."""
    other = shutil.copytree(folder, tmp_path / "other")
    change(other)
    load = check.load
    monkeypatch.setattr(check, "load", lambda name: load(folder))
    found = fails(check, other)
    assert re.match(f"error: {other}, {CHANGES[change]}", found), found


def test_a_pooling_of_this_project_alone_is_named(models_folder, fails, tmp_path):
    student = distilface.load_student(models_folder / "bert", "concat_last4")
    common.save_encoder(student, tmp_path, *distilface.pooling_modules(student))
    assert "sentence-transformers does not have its pooling" in fails(check, tmp_path)


def test_an_average_of_layers_is_compared(models_folder, call_main, tmp_path):
    student = distilface.load_student(models_folder / "bert", "avg_first_last")
    common.save_encoder(student, tmp_path, *distilface.pooling_modules(student))
    assert rows(call_main(check, tmp_path))[str(tmp_path), "default"] > 0.9999


def test_without_sentence_transformers_it_says_what_to_install(models_folder, fails, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    assert "pip install -r requirements-dev.txt" in fails(check, models_folder / "mean")
