"""support/encoder.py: model folders in and out, read alike here, by AutoModel and elsewhere."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import common
import support.encoder
from common import DataError, Tokens, encode_sentences
from support import demo
from support.encoder import Encoder, LayerPooling, dense_head, load_encoder, pool

SENTENCES = [*demo.sentences(20), "word " * 300, "It's \U0001f600", "x"]
LAYER_POOLINGS = {
    "mean": LayerPooling((1, 4), "mean"),
    "mean with the embedding layer": LayerPooling((0, 2, 3)),
    "max": LayerPooling((0, 1, 2, 3, 4), "max"),
    "concat": LayerPooling((3, 4), "concat"),
    "concat without [CLS]": LayerPooling((1, 2, 3, 4), "concat", skip_first_token=True),
    "mean without [CLS]": LayerPooling((3, 4), "mean", skip_first_token=True),
}
READABLE_ELSEWHERE = ("mean", "mean with the embedding layer")


def copy(source, target):
    shutil.copytree(source, target)
    return target


def sentence_transformer(folder):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


def how_it_reads(name, **options):
    encoder = load_encoder(name, **options)
    return encoder.pooling, len(encoder.heads), encoder.normalize


# ---- folders in


def test_broken_model_folders_are_refused(models_folder, tmp_path):
    gone = copy(models_folder / "bert", tmp_path / "gone")
    (gone / "model.safetensors").unlink()
    short = copy(models_folder / "bert", tmp_path / "short")
    os.truncate(short / "model.safetensors", 5000)
    incomplete = copy(models_folder / "bert", tmp_path / "incomplete")
    tensors = load_file(incomplete / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, incomplete / "model.safetensors", {"format": "pt"})
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder, expected in (
        (gone, "complete model"),
        (short, "complete model"),
        (incomplete, "lack encoder.layer.1.output"),
        (empty, "complete model"),
    ):
        with pytest.raises(DataError, match=expected):
            load_encoder(folder)


def test_layers_are_kept_in_the_order_given(models_folder):
    whole = load_encoder(models_folder / "bert")
    part = load_encoder(models_folder / "bert", layers="3,1")
    assert part.model.config.num_hidden_layers == len(part.model.encoder.layer) == 2
    for kept, number in zip(part.model.encoder.layer, (3, 1)):
        original = whole.model.encoder.layer[number]
        for a, b in zip(kept.parameters(), original.parameters()):
            assert torch.equal(a, b)
    for layers in ("1,4", "-1", "1,1", "one", "", "1,,2"):
        with pytest.raises(DataError, match="expected different ones of its layers 0 to 3"):
            load_encoder(models_folder / "bert", layers=layers)


def test_pooling_comes_from_the_folder_then_from_the_default(models_folder):
    assert how_it_reads(models_folder / "mean") == ("mean", 0, True)
    assert how_it_reads(models_folder / "cls") == ("cls", 0, False)
    assert how_it_reads(models_folder / "pooler") == ("cls", 1, False)
    assert how_it_reads(models_folder / "bert") == ("mean", 0, False)
    assert how_it_reads(models_folder / "bert", default="pooler") == ("cls", 1, False)
    assert how_it_reads(models_folder / "pooler", pooling="mean") == ("mean", 0, False)
    # DistilBERT has no pooler.
    assert how_it_reads(models_folder / "distilbert", default="pooler") == ("cls", 0, False)
    with pytest.raises(DataError, match="pooling 'pooler'"):
        load_encoder(models_folder / "distilbert", "pooler")


def test_only_a_hub_name_of_simcse_changes_the_default_pooling(
    models_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(support.encoder, "resolve", lambda name, model: models_folder / "bert")
    for name, expected in (
        ("princeton-nlp/sup-simcse-bert-base-uncased", ("cls", 1, False)),
        ("princeton-nlp/unsup-simcse-roberta-large", ("cls", 0, False)),
        ("someone/sup-simcse-bert-base-uncased", ("mean", 0, False)),
        ("princeton-nlp/other", ("mean", 0, False)),
    ):
        assert how_it_reads(name) == expected, name
    monkeypatch.undo()
    for name in ("sup-simcse-bert", "unsup-simcse-bert"):
        folder = copy(models_folder / "bert", tmp_path / "princeton-nlp" / name)
        assert how_it_reads(folder) == ("mean", 0, False)
        monkeypatch.chdir(tmp_path)
        assert how_it_reads(f"princeton-nlp/{name}") == ("mean", 0, False)


def test_poolings_that_are_unknown_here_are_refused(models_folder, tmp_path):
    folder = copy(models_folder / "cls", tmp_path / "other")
    config = folder / "1_Pooling" / "config.json"
    two = json.loads(config.read_text()) | {"pooling_mode_mean_tokens": True}
    for stated, name in (
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"),
        ({"pooling_mode": "lasttoken"}, "lasttoken"),
        (two, "cls\\+mean"),
    ):
        config.write_text(json.dumps(stated))
        with pytest.raises(DataError, match=f"pooling '{name}'"):
            load_encoder(folder)
    (folder / "modules.json").write_text("{")
    with pytest.raises(DataError, match="modules.json: .*expected JSON"):
        load_encoder(folder)


def test_heads_that_are_unknown_here_are_refused(models_folder, tmp_path):
    folder = copy(models_folder / "pooler", tmp_path / "other")
    (dense,) = folder.glob("*_Dense")
    config = json.loads((dense / "config.json").read_text())
    other = config | dict(activation_function="torch.nn.Softmax")
    (dense / "config.json").write_text(json.dumps(other))
    with pytest.raises(DataError, match="Dense Softmax, expected Dense with Tanh"):
        load_encoder(folder)
    (dense / "config.json").write_text(json.dumps(config))
    (dense / "model.safetensors").unlink()
    with pytest.raises(DataError, match="no such file, expected model.safetensors"):
        load_encoder(folder)


# ---- folders out


def check_folder(encoder, folder):
    """The saved folder gives the same vectors here, in SentenceTransformer and in AutoModel."""
    encoder.eval().save(folder)
    ours = encode_sentences(encoder, SENTENCES)
    again = load_encoder(folder).eval()
    assert again.dimension == encoder.dimension == ours.shape[1]
    assert np.array_equal(ours, encode_sentences(again, SENTENCES))
    theirs = sentence_transformer(folder).encode(SENTENCES)
    assert np.abs(ours - theirs).max() < 1e-5
    model, report = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for a, b in zip(model.parameters(), encoder.model.parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["mean", "cls", "pooler", "roberta", "distilbert"])
def test_a_folder_is_read_alike_everywhere(models_folder, tmp_path, name):
    check_folder(load_encoder(models_folder / name), tmp_path / "saved")


def test_a_folder_with_a_dense_head_is_read_alike_everywhere(models_folder, tmp_path):
    plain = load_encoder(models_folder / "bert")
    head = dense_head(nn.Linear(32, 7, bias=False), nn.Identity())
    check_folder(
        Encoder(plain.model, plain.tokenizer, "mean", [head], True, 128), tmp_path / "saved"
    )


def test_an_added_head_changes_the_dimension(models_folder, tmp_path):
    encoder = load_encoder(models_folder / "wide")
    assert encoder.dimension == 48
    encoder.add_head(nn.Linear(48, 5), nn.Tanh())
    assert encoder.dimension == 5
    check_folder(encoder, tmp_path / "saved")


def test_layers_of_the_real_teacher_are_read_alike_everywhere(teacher, tmp_path):
    check_folder(load_encoder(common.MINILM, layers="1,3,5"), tmp_path / "saved")
    official = sentence_transformer(common.resolve(common.MINILM, model=True))
    theirs = official.encode(SENTENCES)
    assert np.abs(encode_sentences(teacher, SENTENCES) - theirs).max() < 1e-5


def test_a_pooler_stays_one_layer_when_its_folder_is_trained_further(models_folder, tmp_path):
    encoder = load_encoder(models_folder / "pooler")
    with torch.no_grad():
        encoder.heads[0].linear.weight.add_(1)
    assert torch.equal(encoder.model.pooler.dense.weight, encoder.heads[0].linear.weight)
    encoder.save(tmp_path)
    pooler = load_file(tmp_path / "model.safetensors")["pooler.dense.weight"]
    head = load_file(tmp_path / "2_Dense" / "model.safetensors")["linear.weight"]
    assert torch.equal(pooler, head)


def test_modules_json_is_the_last_file_written(models_folder, tmp_path, monkeypatch):
    """A crash while saving leaves no folder that says how to read files that are not there."""
    written = []
    monkeypatch.setattr(support.encoder, "replace", lambda new, path: written.append(path.name))
    load_encoder(models_folder / "pooler").save(tmp_path / "saved")
    assert written[-1] == "modules.json"
    assert {"model.safetensors", "config.json", "tokenizer.json"} < set(written)


def test_nothing_of_saving_is_left_behind(models_folder, tmp_path):
    plain = load_encoder(models_folder / "pooler")
    plain.save(tmp_path)
    plain.save(tmp_path)  # over itself
    assert not (tmp_path / ".saving").exists()


# ---- poolings of several layers


@torch.no_grad()
@pytest.mark.parametrize("name", LAYER_POOLINGS)
def test_a_layer_pooling_equals_loops(models_folder, name):
    pooling = LAYER_POOLINGS[name]
    encoder = load_encoder(models_folder / "bert", pooling).double().eval()
    tokens = Tokens(encoder, demo.sentences(4))
    input_ids, mask = tokens.batch(np.arange(4))
    states = encoder.model(input_ids, mask, output_hidden_states=True).hidden_states
    embeddings = encoder(input_ids, mask)
    for row, length in enumerate(tokens.lengths):
        first = 1 if pooling.skip_first_token else 0
        total = 0
        for position in range(first, length):
            layers = [states[layer][row, position] for layer in pooling.layers]
            if pooling.join == "concat":
                total = total + torch.cat(layers)
            elif pooling.join == "max":
                total = total + torch.tensor([max(values) for values in zip(*layers)])
            else:
                total = total + sum(layers) / len(layers)
        expected = total / (length - first)
        assert (embeddings[row] - expected).abs().max() < 1e-10


def test_mean_and_cls_equal_loops(models_folder):
    tokens = Tokens(load_encoder(models_folder / "bert"), demo.sentences(5))
    for pooling in ("mean", "cls"):
        encoder = load_encoder(models_folder / "bert", pooling).double().eval()
        together = encoder(*tokens.batch(np.arange(5)))
        for row in range(5):
            ids = torch.tensor([tokens.ids[tokens.starts[row] : tokens.starts[row + 1]].tolist()])
            states = encoder.model(ids).last_hidden_state[0]
            alone = states[0] if pooling == "cls" else sum(states) / len(states)
            assert (together[row] - alone).abs().max() < 1e-6


def test_padding_never_counts():
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    states = [torch.randn(2, 4, 6, dtype=torch.float64) for _ in range(5)]
    noisy = [layer.masked_fill(mask[..., None] == 0, 1e3) for layer in states]
    for pooling in ("mean", "cls", *LAYER_POOLINGS.values()):
        assert torch.equal(pool(noisy, mask, pooling), pool(states, mask, pooling))
    assert mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]  # the caller's mask stays as it is


@pytest.mark.parametrize("name", LAYER_POOLINGS)
@pytest.mark.parametrize("with_head", [False, True])
def test_a_folder_states_its_layer_pooling(models_folder, tmp_path, name, with_head):
    """Read back the same by load_encoder; SentenceTransformer reads it the same or refuses it."""
    pooling = LAYER_POOLINGS[name]
    encoder = load_encoder(models_folder / "bert", pooling).eval()
    if with_head:
        encoder.add_head(nn.Linear(encoder.dimension, 9), nn.Tanh())
        encoder.normalize = True
    if name in READABLE_ELSEWHERE:
        check_folder(encoder, tmp_path / "saved")
    else:
        encoder.save(tmp_path / "saved")
        with pytest.raises(Exception, match="sentence_distillation"):
            sentence_transformer(tmp_path / "saved")
    again = load_encoder(tmp_path / "saved").eval()
    assert again.pooling == pooling
    assert isinstance(again.pooling, LayerPooling)
    assert again.normalize == encoder.normalize
    ours = encode_sentences(encoder, SENTENCES)
    assert np.array_equal(ours, encode_sentences(again, SENTENCES))


def test_a_folder_saved_again_with_a_plain_pooling_forgets_the_layers(models_folder, tmp_path):
    averaged = load_encoder(models_folder / "bert", LAYER_POOLINGS["mean"])
    averaged.save(tmp_path / "averaged")
    plain = load_encoder(tmp_path / "averaged", "mean")
    check_folder(plain, tmp_path / "plain")
    assert load_encoder(tmp_path / "plain").pooling == "mean"


def test_a_layer_pooling_reads_only_layers_that_are_there(models_folder, tmp_path):
    deep = load_encoder(models_folder / "bert", LayerPooling((1, 4)))
    deep.save(tmp_path / "deep")
    with pytest.raises(DataError, match="its pooling reads layer 4, expected its layers up to 2"):
        load_encoder(tmp_path / "deep", layers="0,2")
