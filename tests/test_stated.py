"""What a model folder states is obeyed, harmless, or refused: never silently another vector."""

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import alter, demo_sentences
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

import ckd
import common
from common import UserError

BERT_CONFIG = "sentence_bert_config.json"
MODEL_CONFIG = "config_sentence_transformers.json"
TEXTS = [*demo_sentences(6), "A MAN Plays The GUITAR."]
OTHER_TEXT = {"text": {"method": "forward", "method_output_name": "pooler_output"}}
# file, key, a value that is not neutral; of each key that sentence-transformers 6.2 writes or reads
STATED = [
    ("modules.json", "kwargs", ["task"]),
    ("modules.json", "type", "custom_st.Transformer"),
    (BERT_CONFIG, "max_seq_length", 5),
    (BERT_CONFIG, "do_lower_case", True),
    (BERT_CONFIG, "transformer_task", "fill-mask"),
    (BERT_CONFIG, "modality_config", OTHER_TEXT),
    (BERT_CONFIG, "module_output_name", "other"),
    (BERT_CONFIG, "processing_kwargs", {"text": {"max_length": 4}}),
    (BERT_CONFIG, "unpad_inputs", False),
    (BERT_CONFIG, "query_length", 4),
    (BERT_CONFIG, "document_length", 4),
    (BERT_CONFIG, "query_expansion", {"strategy": "mask"}),
    *[
        (BERT_CONFIG, f"{name}_{end}", {"a": 1})
        for name in ("model", "config")
        for end in ("args", "kwargs")
    ],
    (BERT_CONFIG, "tokenizer_args", {"model_max_length": 4}),
    (BERT_CONFIG, "processor_kwargs", {"model_max_length": 4}),
    (BERT_CONFIG, "tokenizer_name_or_path", "another"),
    (MODEL_CONFIG, "truncate_dim", 8),
    (MODEL_CONFIG, "model_type", "SparseEncoder"),
    (MODEL_CONFIG, "similarity_fn_name", "dot"),
    (MODEL_CONFIG, "prompts", {"query": None, "passage": "passage: "}),
    (MODEL_CONFIG, "default_prompt_name", "query"),
    ("1_Pooling/config.json", "pooling_mode", "weightedmean"),
    ("1_Pooling/config.json", "pooling_mode", "cls"),
    ("1_Pooling/config.json", "pooling_mode", ["mean", "cls"]),
    ("1_Pooling/config.json", "include_prompt", False),
    ("1_Pooling/config.json", "pooling_mode_max_tokens", True),
    ("2_Dense/config.json", "use_residual", True),
    ("2_Dense/config.json", "activation_function", "torch.nn.modules.activation.GELU"),
    ("2_Dense/config.json", "module_input_name", "token_embeddings"),
    ("2_Dense/config.json", "module_output_name", "other"),
    ("3_Normalize/config.json", "module_input_name", "token_embeddings"),
    ("3_Normalize/config.json", "module_output_name", "other"),
]
DERIVED = {"embedding_dimension", "in_features", "out_features", "bias"}  # of the weights' shapes


def test_each_key_of_sentence_transformers_is_in_the_list():
    keys = {
        key for module in (Transformer, Pooling, Dense, Normalize) for key in module.config_keys
    }
    assert keys <= {key for _, key, _ in STATED} | DERIVED


@pytest.fixture
def folder(models_folder, tmp_path):
    """A cased BERT, mean pooling, a dense layer, normalization: saved by sentence-transformers."""
    encoder = common.load_encoder(models_folder / "mean")
    torch.manual_seed(0)
    encoder.heads.append(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()))
    encoder.settings, encoder.prompts = {"similarity_fn_name": "cosine"}, {"query": "query: "}
    common.save_encoder(encoder, tmp_path / "ours")
    SentenceTransformer(str(tmp_path / "ours"), device="cpu").save(str(tmp_path / "model"))
    tokenizer = tmp_path / "model" / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    content["normalizer"]["lowercase"] = False  # so that do_lower_case makes a difference
    tokenizer.write_text(json.dumps(content))
    return tmp_path / "model"


def test_a_folder_that_states_nothing_else_has_equal_vectors(folder):
    theirs = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    encoder = common.load_encoder(folder)
    assert np.abs(common.encode(ckd.embed, encoder, TEXTS) - theirs).max() < 1e-5
    assert encoder.settings["similarity_fn_name"] == "cosine"


@pytest.mark.parametrize("file, key, value", STATED, ids=lambda value: str(value)[:40])
def test_a_stated_key_gives_equal_vectors_or_is_refused_by_name(folder, file, key, value):
    def change(content):
        target = content[0] if file == "modules.json" else content
        target[key] = value
        if key == "pooling_mode_max_tokens":
            del target["pooling_mode"]  # as older folders have it

    before = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    alter(folder / file, change)
    try:
        encoder = common.load_encoder(folder)
    except UserError as error:
        line = str(error)
        assert "\n" not in line and str(folder) in line
        is_word = not isinstance(value, bool | int)  # "4" is in many lines
        assert key in line or (is_word and str(value) in line), line
        return
    theirs = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    assert np.abs(common.encode(ckd.embed, encoder, TEXTS) - theirs).max() < 1e-5
    changes = key in (
        "max_seq_length",
        "default_prompt_name",
        "activation_function",
    )
    assert (np.abs(theirs - before).max() > 1e-3) == (changes or value == "cls")


def test_a_student_is_saved_with_what_its_source_states(folder, tmp_path):
    """The tokenizer's files byte for byte, null prompts as none, and activations by the names that
    sentence-transformers gives them. config.json is new, with the same keys.
    """
    alter(folder / "tokenizer_config.json", dict(tokenizer_class="BertTokenizer"))
    alter(folder / MODEL_CONFIG, dict(prompts=None))
    (folder / "vocab.txt").write_text("of an older library")
    encoder = common.load_encoder(folder, layers="0,2")
    encoder.heads[0][0].weight.data *= 2
    common.save_encoder(encoder, tmp_path / "out")
    trained = common.encode(ckd.embed, encoder, TEXTS)
    saved = common.load_encoder(tmp_path / "out")
    assert np.array_equal(common.encode(ckd.embed, saved, TEXTS), trained)
    theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert np.abs(theirs.encode(TEXTS) - trained).max() < 1e-5
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    assert common.read_json(tmp_path / "out" / MODEL_CONFIG, None)["prompts"] == {}
    dense = common.read_json(tmp_path / "out/2_Dense/config.json", None)
    assert dense["activation_function"] == "torch.nn.modules.activation.Tanh"
    places = (folder, tmp_path / "out")
    before, after = [common.read_json(place / "config.json", {}) for place in places]
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    assert {"num_hidden_layers"} <= changed
    assert all(before.get(key) is None for key in changed - {"num_hidden_layers"}), changed


OTHERS = [
    ("adapter_config.json", {"peft_type": "LORA"}, "adapter"),
    ("config.json", {"auto_map": {"AutoModel": "modeling.Model"}}, "auto_map"),
]


@pytest.mark.parametrize("file, content, named", OTHERS)
def test_another_kind_of_model_is_refused_before_its_weights_are_read(folder, file, content, named):
    path = folder / file
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | content))
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=f"{named}.*--teacher-embeddings"):
        common.load_encoder(folder)


def test_a_folder_refused_by_name_writes_nothing(folder, fails, files, tmp_path):
    alter(folder / "2_Dense" / "config.json", {"use_residual": True})
    data = [
        "--train",
        files / "sentences.txt",
        "--dev",
        files / "dev.tsv",
        "--output",
        tmp_path / "out",
    ]
    line = fails(ckd, "--teacher", folder, "--student-layers", "1,3", *data)
    assert line == (
        f"error: {folder}/2_Dense/config.json: use_residual=true is not supported; "
        "ckd.py, congen.py and ibkd.py can take its embeddings by --teacher-embeddings"
    )
    assert not (tmp_path / "out").exists()


def test_a_model_that_cannot_be_used_is_refused_on_loading(models_folder, tmp_path):
    """Its embeddings have fewer rows than the tokenizer has tokens."""
    path = shutil.copytree(models_folder / "bert", tmp_path / "short")
    alter(path / "config.json", {"vocab_size": 3})
    rows = "embeddings.word_embeddings.weight"
    alter(
        path / "model.safetensors",
        lambda tensors: tensors.update({rows: tensors[rows][:3].clone()}),
    )
    with pytest.raises(UserError, match="short: its weights have no row for some token"):
        common.load_encoder(path)
