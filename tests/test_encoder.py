"""Model folders in and out: read alike here, by sentence-transformers and by transformers."""

import contextlib
import json
import math
import pickle
from functools import partial
from shutil import copytree

import numpy as np
import pytest
import torch
import transformers
from conftest import demo_sentences
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import nn

import ckd
import common
from common import UserError, load_encoder

SENTENCES = [*demo_sentences(20), "word " * 300, "It's \U0001f600", "x"]


def alter(path, change):
    """Change a file of JSON or of tensors by a dict of new values, or by a function."""
    is_json = path.suffix == ".json"
    if is_json:
        content = json.loads(path.read_text()) if path.exists() else {}
    else:
        content = load_file(path)
    change(content) if callable(change) else content.update(change)
    if is_json:
        path.write_text(json.dumps(content))
    else:
        save_file(content, path, {"format": "pt"})


def encode(encoder):
    return common.encode(ckd.embed, encoder, SENTENCES)


def encode_elsewhere(folder):
    return SentenceTransformer(str(folder), device="cpu").encode(SENTENCES)


def check_folder(encoder, folder):
    """The saved folder gives the same vectors here and in SentenceTransformer."""
    common.save_encoder(encoder.eval(), folder)
    ours = encode(encoder)
    assert ours.shape[1] == encoder.dimension
    again = load_encoder(folder).eval()
    assert np.array_equal(ours, encode(again))
    assert np.abs(ours - encode_elsewhere(folder)).max() < 1e-5
    model, report = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    missing = [key for key in report["missing_keys"] if not key.startswith("pooler.")]
    assert not missing and not report["unexpected_keys"]
    assert all(map(torch.equal, model.parameters(), encoder.model.parameters()))


@pytest.mark.parametrize("name", ["mean", "cls", "pooler", "roberta", "distilbert"])
def test_a_folder_is_read_alike_everywhere(models_folder, tmp_path, name):
    check_folder(load_encoder(models_folder / name), tmp_path / "saved")


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_heads_normalization_prompt_and_length_are_saved(models_folder, tmp_path, pooling):
    encoder = load_encoder(models_folder / "roberta", pooling)
    encoder.heads.append(nn.Sequential(nn.Linear(32, 9), nn.ReLU()))
    encoder.heads.append(nn.Sequential(nn.Linear(9, 7, bias=False), nn.Identity()))
    encoder.normalize, encoder.prompt, encoder.max_length = True, "find: a ", 11
    check_folder(encoder, tmp_path / "saved")


@pytest.mark.slow
def test_layers_of_the_real_teacher_are_read_alike_everywhere(teacher, tmp_path):
    check_folder(load_encoder(common.MINILM, layers="1,3,5"), tmp_path / "saved")
    folder = common.resolve_model(common.MINILM)
    assert np.abs(encode(teacher) - encode_elsewhere(folder)).max() < 1e-5


def test_modules_json_comes_last_and_nothing_else_is_left(models_folder, tmp_path, monkeypatch):
    """A crash while saving leaves no folder that describes files that are not there."""
    encoder = load_encoder(models_folder / "pooler")
    replace, written = common.os.replace, []

    def record(source, target):
        written.append(target)
        replace(source, target)

    monkeypatch.setattr(common.os, "replace", record)
    for _ in range(2):  # the second time over itself
        common.save_encoder(encoder, tmp_path)
        assert written[-1] == tmp_path / "modules.json"
    assert {path for path in tmp_path.rglob("*") if path.is_file()} <= set(written)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_what_sentence_transformers_saves_is_read_alike(models_folder, tmp_path, pooling):
    transformer = modules.Transformer(str(models_folder / "bert"), max_seq_length=20)
    dense = modules.Dense(32, 5, activation_function=nn.Tanh())
    parts = [transformer, modules.Pooling(32, pooling), dense, modules.Normalize()]
    prompts = {} if pooling == "cls" else dict(prompts={"a": "find: "}, default_prompt_name="a")
    theirs = SentenceTransformer(modules=parts, device="cpu", **prompts)
    theirs.save(str(tmp_path))
    ours = load_encoder(tmp_path).eval()
    assert np.abs(encode(ours) - theirs.encode(SENTENCES)).max() < 1e-5


def test_what_older_sentence_transformers_saved_is_read_alike(models_folder, tmp_path):
    folder = copytree(models_folder / "mean", tmp_path / "old")
    copytree(models_folder / "bert", folder / "0_Transformer")
    (folder / "config.json").unlink()
    alter(folder / "1_Pooling" / "config.json", dict(include_prompt=True))
    alter(folder / "modules.json", lambda entries: entries[0].update(path="0_Transformer"))
    assert np.abs(encode(load_encoder(folder).eval()) - encode_elsewhere(folder)).max() < 1e-5


def test_layers_are_kept_in_the_order_given(models_folder):
    whole = load_encoder(models_folder / "bert").model.encoder.layer
    part = load_encoder(models_folder / "bert", layers="3,1").model
    assert part.config.num_hidden_layers == len(part.encoder.layer) == 2
    for kept, number in zip(part.encoder.layer, (3, 1)):
        assert all(map(torch.equal, kept.parameters(), whole[number].parameters()))
    for layers in ("1,4", "-1", "1,1", "one", "1,,2"):
        with pytest.raises(UserError, match=f"{layers}.* \\[0, 1, 2, 3\\]"):
            load_encoder(models_folder / "bert", layers=layers)


HOW_IT_IS_READ = [
    ("mean", dict(default="pooler"), ("mean", 0, True)),
    ("pooler", {}, ("cls", 1, False)),  # saved as a dense head, which any reader applies
    ("pooler", dict(pooling="mean"), ("mean", 0, False)),
    ("bert", {}, ("mean", 0, False)),
    ("bert", dict(default="pooler"), ("cls", 1, False)),
    ("distilbert", dict(default="pooler"), ("cls", 0, False)),  # it has no pooler
]


@pytest.mark.parametrize("name, options, expected", HOW_IT_IS_READ)
def test_options_then_the_folder_then_the_default_choose_the_pooling(
    models_folder, name, options, expected
):
    """After the options come the names of SimCSE's models on the Hub, in test_hub.py."""
    encoder = load_encoder(models_folder / name, **options)
    assert (encoder.pooling, len(encoder.heads), encoder.normalize) == expected


def test_a_pooler_that_is_not_there_is_refused(models_folder):
    with pytest.raises(UserError, match="distilbert: .*pooler"):
        load_encoder(models_folder / "distilbert", "pooler")


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_the_longest_input_has_a_position_for_each_token(models_folder, tmp_path, name):
    folder = copytree(models_folder / name, tmp_path / "long")
    alter(folder / "sentence_bert_config.json", dict(max_seq_length=4096))
    encoder = load_encoder(folder).eval()
    assert encoder.max_length == 128
    assert np.isfinite(encode(encoder)).all()


WORDS = "embeddings.word_embeddings.weight"
LAYER_1 = "encoder.layer.1.output.dense.weight"
WEIGHTS, HEAD = "model.safetensors", "2_Dense/model.safetensors"
POOLING, PROMPTS = "1_Pooling/config.json", "config_sentence_transformers.json"
FEW_WORDS = dict(type="WordLevel", vocab={"[UNK]": 0, "[CLS]": 1}, unk_token="[UNK]")
FALSE = dict.fromkeys(("special", "normalized", "single_word", "lstrip", "rstrip"), False)
NEW = dict(id=286, content="new", **FALSE)
SUM = dict(pooling_mode_cls_token=False, pooling_mode_mean_sqrt_len_tokens=True)
UNCASED = {
    "sentence_bert_config.json": dict(do_lower_case=True),
    "tokenizer.json": lambda tokenizer: tokenizer["normalizer"].update(lowercase=False),
}


def without_words(tokenizer):
    vocabulary = tokenizer["model"]["vocab"]
    renamed = {key if key.startswith("[") else f"{key}?": at for key, at in vocabulary.items()}
    tokenizer["model"]["vocab"] = renamed


SILENTLY_WRONG = {  # what is changed in the folder "pooler", what the error must say
    "lacks a weight": ({WEIGHTS: lambda tensors: tensors.pop(LAYER_1)}, LAYER_1),
    "not a number": ({WEIGHTS: lambda tensors: tensors[WORDS].fill_(math.nan)}, WORDS),
    "deeper weights": ({"config.json": dict(num_hidden_layers=2)}, r"layer\.[23]"),
    "no head": ({HEAD: lambda tensors: tensors.pop("linear.bias")}, "bias"),
    "few tokens": ({"tokenizer.json": dict(added_tokens=[], model=FEW_WORDS)}, "5 tokens"),
    "many tokens": ({"tokenizer.json": lambda t: t["added_tokens"].append(NEW)}, "287 tokens"),
    "unknown words": ({"tokenizer.json": without_words}, "unknowns"),
    "int8": ({WEIGHTS: lambda tensors: tensors.update({WORDS: tensors[WORDS].char()})}, WORDS),
    "fp8": ({WEIGHTS: lambda t: t.update({WORDS: t[WORDS].to(torch.float8_e4m3fn)})}, WORDS),
    "lower case": (UNCASED, "do_lower_case"),
    "own module": ({"modules.json": lambda entries: entries[2].update(type="my.Gate")}, "Gate"),
    "order": ({"modules.json": lambda entries: entries.insert(1, entries.pop())}, "modules.json"),
    "activation": ({"2_Dense/config.json": dict(activation_function="torch.nn.Sinc")}, "Sinc"),
    "two poolings": ({POOLING: dict(pooling_mode_mean_tokens=True)}, "mean"),
    "two poolings, new": ({POOLING: dict(pooling_mode=["cls", "mean"])}, "mean"),
    "sum": ({POOLING: SUM}, "mean_sqrt_len"),
    "no pooling": ({POOLING: dict(pooling_mode_cls_token=False)}, "1_Pooling"),
    "no prompt to it": ({POOLING: dict(include_prompt=False)}, "1_Pooling"),
    "an adapter": ({"adapter_config.json": {}}, "it is an adapter"),
    "unknown prompt": ({PROMPTS: dict(prompts={}, default_prompt_name="query")}, "query"),
}


@pytest.mark.parametrize("name", SILENTLY_WRONG)
def test_a_folder_that_would_be_silently_wrong_is_refused(models_folder, tmp_path, name):
    folder = copytree(models_folder / "pooler", tmp_path / "other")
    changes, expected = SILENTLY_WRONG[name]
    for part, change in changes.items():
        load_encoder(folder)  # each of the changes matters
        alter(folder / part, change)
    with pytest.raises(UserError, match=f"(?s)other: .*{expected}"):
        load_encoder(folder)


def test_a_head_of_another_width_is_refused(models_folder, tmp_path):
    encoder = load_encoder(models_folder / "bert")
    encoder.heads.append(nn.Sequential(nn.Linear(16, 8), nn.Identity()))
    common.save_encoder(encoder, tmp_path / "narrow")
    with pytest.raises(UserError, match="narrow: .*cannot be multiplied"):
        load_encoder(tmp_path / "narrow")


def test_a_special_token_may_have_no_weights_as_in_gemma_3(models_folder, tmp_path):
    folder = copytree(models_folder / "bert", tmp_path / "more")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(folder)
    before = encode(load_encoder(models_folder / "bert"))
    assert np.array_equal(encode(load_encoder(folder)), before)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})  # which every batch needs
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match="tokens, its weights"):
        load_encoder(folder)


class Payload:
    """Leaves a mark where it is unpickled by somebody who runs what a pickle says."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@pytest.mark.parametrize("part", ["", "2_Dense"])
@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_weights_are_read_and_run_no_code(models_folder, tmp_path, part, zipped):
    folder = copytree(models_folder / "pooler", tmp_path / "old")
    expected = encode(load_encoder(folder).eval())
    weights, mark = folder / part / "model.safetensors", tmp_path / "mark"
    save = partial(torch.save, f=folder / part / "pytorch_model.bin")
    tensors = load_file(weights)
    weights.unlink()
    save(tensors, _use_new_zipfile_serialization=zipped)
    assert np.array_equal(encode(load_encoder(folder).eval()), expected)
    save(tensors | {"x": Payload(mark)}, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match="old: "):
        load_encoder(folder)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Payload(mark))).close()
    assert mark.exists()  # the payload is live


@pytest.mark.parametrize("kind", ["own", "bert"])
def test_code_in_a_folder_is_never_run(models_folder, tmp_path, monkeypatch, capsys, kind):
    folder = copytree(models_folder / "bert", tmp_path / "own")
    mark = tmp_path / "mark"
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w').close()")
    own = {"AutoConfig": "own.C", "AutoModel": "own.M", "AutoTokenizer": [None, "own.T"]}
    alter(folder / "config.json", dict(auto_map=own, model_type=kind))
    alter(folder / "tokenizer_config.json", dict(auto_map=own))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # to whoever asks
    refused = pytest.raises(UserError, match="own: ")
    with contextlib.nullcontext() if kind == "bert" else refused:  # transformers' code reads "bert"
        load_encoder(folder)
    lines = [f"{folder}: its own code is not run; it is read as a plain bert"]
    assert capsys.readouterr().err.splitlines() == (lines if kind == "bert" else [])
    assert not mark.exists()
