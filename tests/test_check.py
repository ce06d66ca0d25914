"""extras/check.py: a folder that is right, one that another program reads differently."""

import re
import shutil
import sys

import pytest
import torch
import transformers
from conftest import alter
from torch import nn

import common
import distilface
import dse
from extras import check

SMALL = dict(hidden_size=32, num_hidden_layers=2, intermediate_size=64, pad_token_id=0)
OTHERS = {  # in which the states of a token depend on the padding behind it
    "fnet": SMALL,
    "convbert": dict(num_attention_heads=4, embedding_size=32, conv_kernel_size=3, **SMALL),
}


@pytest.fixture
def folder(models_folder, tmp_path):
    """A model with a head, normalization, and two prompts."""
    encoder = common.load_encoder(models_folder / "distilbert", "mean")
    torch.manual_seed(0)
    encoder.heads.append(nn.Sequential(nn.Linear(32, 24), nn.Tanh()))
    encoder.normalize = True
    encoder.settings = dict(default_prompt_name="passage")
    encoder.prompts = dict(query="a man is ", passage="the dog ", none="")
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
    alter(folder / "1_Pooling" / "config.json", dict(pooling_mode="cls"))


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
    distilface.save_student(student, tmp_path / "distilface")
    encoder = common.load_encoder(models_folder / "bert", "mean")
    dse.save_student(dse.add_head(encoder, classes=1), tmp_path / "dse")
    for name in ("distilface", "dse"):
        found = fails(check, tmp_path / name)
        assert f"{tmp_path / name}: sentence-transformers does not have its pooling" in found


def test_an_average_of_layers_is_compared(models_folder, call_main, tmp_path):
    student = distilface.load_student(models_folder / "bert", "avg_first_last")
    distilface.save_student(student, tmp_path)
    assert rows(call_main(check, tmp_path))[str(tmp_path), "default"] > 0.9999


def test_without_sentence_transformers_it_says_what_to_install(models_folder, fails, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    assert "pip install -r requirements-dev.txt" in fails(check, models_folder / "mean")


@pytest.fixture
def tokenizer(models_folder):
    return common.load_encoder(models_folder / "bert").tokenizer


@pytest.mark.parametrize("kind", OTHERS)
def test_vectors_that_change_with_the_padding_beside_a_text(kind, tokenizer, fails, tmp_path):
    """Loading such a model finds nothing."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, vocab_size=len(tokenizer), **OTHERS[kind])
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    common.load_encoder(tmp_path)
    found = fails(check, tmp_path)
    assert found.startswith(f"error: {tmp_path}: the vector of a text changes with the padding ")


@pytest.mark.parametrize("key", ["add_bos_token", "add_eos_token"])
def test_a_token_that_the_tokenizer_does_not_add(models_folder, call_main, fails, tmp_path, key):
    shutil.copytree(models_folder / "bert", tmp_path, dirs_exist_ok=True)
    alter(tmp_path / "tokenizer_config.json", {key: True})
    call_main(check, tmp_path)  # its tokenizer adds [CLS] and [SEP]
    alter(tmp_path / "tokenizer.json", dict(post_processor=None))
    common.load_encoder(tmp_path)
    found = fails(check, tmp_path)
    assert found.startswith(f"error: {tmp_path}: tokenizer_config.json has {key}, but its ")


def test_a_classifier_is_named(models_folder, tokenizer, call_main, monkeypatch, tmp_path):
    said = []
    monkeypatch.setattr(common, "note", said.append)
    config = transformers.AutoConfig.from_pretrained(models_folder / "bert")
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    found = rows(call_main(check, tmp_path, models_folder / "bert"))
    assert min(found.values()) > 0.9999
    assert f"{tmp_path}: it is a classifier, of which only the encoder is read" in said


def test_a_classifier_whose_logits_change_with_padding_is_named(tokenizer, fails, tmp_path):
    """GPT-2 reads the last token that is not padding; its padding is not the tokenizer's."""
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, num_labels=1, pad_token_id=1
    )
    torch.manual_seed(0)
    transformers.GPT2ForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert "the logits of a pair change with the padding" in fails(check, tmp_path)
