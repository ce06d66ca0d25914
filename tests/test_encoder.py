"""Model folders: read alike here and by sentence-transformers; test_inputs.py: what is refused."""

from shutil import copytree

import numpy as np
import pytest
import torch
import transformers
from conftest import alter, demo_sentences
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import nn

import ckd
import common
from common import UserError, load_encoder

SENTENCES = [*demo_sentences(20), "word " * 300, "It's \U0001f600", "x"]
PROMPTS = dict(prompts={"a": "find: "}, default_prompt_name="a")


def encode(encoder):
    return common.encode(ckd.embed, encoder, SENTENCES)


def encode_elsewhere(folder):
    return SentenceTransformer(str(folder), device="cpu").encode(SENTENCES)


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_heads_normalization_prompt_and_length_are_saved(models_folder, tmp_path, pooling):
    source = copytree(models_folder / "roberta", tmp_path / "source")
    alter(source / "config_sentence_transformers.json", PROMPTS)
    encoder = load_encoder(source, pooling)
    torch.manual_seed(1)
    encoder.heads.append(nn.Sequential(nn.Linear(32, 9), nn.ReLU()))
    encoder.heads.append(nn.Sequential(nn.Linear(9, 7, bias=False), nn.Identity()))
    encoder.normalize, encoder.max_length = True, 11
    common.save_encoder(encoder.eval(), tmp_path / "saved")
    ours = encode(encoder)
    assert ours.shape[1] == encoder.dimension == 7
    assert np.array_equal(ours, encode(load_encoder(tmp_path / "saved").eval()))
    assert np.abs(ours - encode_elsewhere(tmp_path / "saved")).max() < 1e-5


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_what_sentence_transformers_saves_is_read_alike(models_folder, tmp_path, pooling):
    transformer = modules.Transformer(str(models_folder / "bert"), max_seq_length=20)
    dense = modules.Dense(32, 5, activation_function=nn.Tanh())
    parts = [transformer, modules.Pooling(32, pooling), dense, modules.Normalize()]
    theirs = SentenceTransformer(modules=parts, device="cpu", **PROMPTS)
    theirs.save(str(tmp_path))
    ours = load_encoder(tmp_path).eval()
    assert np.abs(encode(ours) - theirs.encode(SENTENCES)).max() < 1e-5


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta"])
def test_what_older_sentence_transformers_saved_is_read_alike(models_folder, tmp_path, kind):
    """The transformer in a folder of its own, and the length under the model's own name."""
    folder = copytree(models_folder / "mean", tmp_path / "old")
    copytree(models_folder / "bert", folder / "0_Transformer")
    (folder / "config.json").unlink()
    alter(folder / "1_Pooling" / "config.json", dict(include_prompt=True))
    alter(folder / "modules.json", lambda entries: entries[0].update(path="0_Transformer"))
    alter(folder / f"0_Transformer/sentence_{kind}_config.json", dict(max_seq_length=17))
    encoder = load_encoder(folder).eval()
    assert encoder.max_length == 17
    assert np.abs(encode(encoder) - encode_elsewhere(folder)).max() < 1e-5


def test_the_longest_input_has_a_position_for_each_token(models_folder, tmp_path):
    folder = copytree(models_folder / "roberta", tmp_path / "long")
    alter(folder / "sentence_bert_config.json", dict(max_seq_length=4096))
    assert load_encoder(folder).max_length == 128


def test_layers_are_kept_in_the_order_given(models_folder):
    whole = load_encoder(models_folder / "bert").model.encoder.layer
    part = load_encoder(models_folder / "bert", layers="3,1").model
    assert part.config.num_hidden_layers == len(part.encoder.layer) == 2
    for kept, number in zip(part.encoder.layer, (3, 1)):
        assert all(map(torch.equal, kept.parameters(), whole[number].parameters()))


HOW_IT_IS_READ = [
    ("mean", dict(otherwise="pooler"), ("mean", 0, True)),
    ("pooler", {}, ("cls", 1, False)),  # saved as a dense head, which any reader applies
    ("pooler", dict(pooling="mean"), ("mean", 0, False)),
    ("bert", dict(otherwise="pooler"), ("cls", 1, False)),
    ("distilbert", dict(otherwise="pooler"), ("cls", 0, False)),  # it has no pooler
]


@pytest.mark.parametrize("name, options, expected", HOW_IT_IS_READ)
def test_options_then_the_folder_then_the_default_choose_the_pooling(
    models_folder, name, options, expected
):
    encoder = load_encoder(models_folder / name, **options)
    assert (encoder.pooling, len(encoder.heads), encoder.normalize) == expected
    if len(encoder.heads) == 1:  # the model's own pooler
        model = transformers.AutoModel.from_pretrained(models_folder / "bert").eval()
        batch = encoder.tokenizer(SENTENCES, padding=True, truncation=True, return_tensors="pt")
        pooled = model(**batch).pooler_output.detach().numpy()
        assert np.abs(encode(encoder.eval()) - pooled).max() < 1e-5


def test_code_in_a_folder_is_never_run(models_folder, tmp_path, monkeypatch):
    folder, mark = copytree(models_folder / "bert", tmp_path / "own"), tmp_path / "mark"
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w').close()")
    own = {"AutoConfig": "own.C", "AutoModel": "own.M", "AutoTokenizer": [None, "own.T"]}
    alter(folder / "config.json", dict(auto_map=own))
    alter(folder / "tokenizer_config.json", dict(auto_map=own))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # to whoever asks
    for change in (dict(), dict(model_type="own"), dict(auto_map={})):
        alter(folder / "config.json", change)
        with pytest.raises(UserError, match="own/.*config.json: auto_map is not supported"):
            load_encoder(folder)
    assert not mark.exists()


def test_that_texts_are_cut_is_said_once(models_folder, capsys):
    """In training, scoring and the teacher's pass alike, where their tokens are made."""
    encoder = common.load_encoder(models_folder / "bert", "mean")
    encoder.name = str(models_folder)  # notes come once
    texts = ["a boy plays", "a boy plays " * 9, "a lad"]  # with two marks: 5, 29 and 4 tokens
    capsys.readouterr()
    for _ in range(2):
        common.tokenize(encoder, texts, 7)
    common.tokenize(encoder, texts)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"{encoder.name}: of a long text, it reads the first 7 tokens"]
