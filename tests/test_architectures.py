"""Architectures that people bring: cut, trained, saved, the same in SentenceTransformer."""

import numpy as np
import pytest
import torch
import transformers
from conftest import DEMO, alter, demo_sentences, losses, word_tokenizer
from sentence_transformers import SentenceTransformer

import ckd
import common

SIZES = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64)
SIZES |= dict(max_position_embeddings=130, pad_token_id=0)
GROUPED = dict(num_key_value_heads=2, head_dim=8)
CONFIGS = {
    "bert": ("BertConfig", SIZES),
    "roberta": ("RobertaConfig", SIZES),
    "distilbert": ("DistilBertConfig", dict(dim=32, n_layers=4, n_heads=4, hidden_dim=64)),
    "xlm-roberta": ("XLMRobertaConfig", SIZES),
    "camembert": ("CamembertConfig", SIZES),
    "mpnet": ("MPNetConfig", SIZES),
    "electra": ("ElectraConfig", SIZES | dict(embedding_size=32)),
    "deberta-v2": ("DebertaV2Config", SIZES | dict(relative_attention=True)),
    "modernbert": ("ModernBertConfig", SIZES | dict(local_attention=16)),
    "nomic-bert": ("NomicBertConfig", SIZES),
    "longformer": ("LongformerConfig", SIZES | dict(attention_window=[8] * 4)),
    "qwen3": ("Qwen3Config", SIZES | GROUPED),
    "gemma3": ("Gemma3TextConfig", SIZES | GROUPED | dict(sliding_window=8)),
    "t5": ("T5Config", dict(d_model=32, d_kv=8, d_ff=64, num_layers=4, num_heads=4)),
    "albert": ("AlbertConfig", SIZES | dict(embedding_size=32)),
    "xlm": ("XLMConfig", dict(emb_dim=32, n_layers=4, n_heads=4)),
    "esm": ("EsmConfig", SIZES),
    "lfm2": ("Lfm2Config", SIZES | GROUPED | dict(full_attn_idxs=[1, 3])),
}
DECODERS = ("qwen3", "gemma3", "lfm2")
CUT = [name for name in CONFIGS if name not in ("t5", "albert", "xlm", "esm")]
TOKENS = dict(bos_token_id=2, cls_token_id=2, eos_token_id=3, sep_token_id=3)
STATED = dict(prompts=dict(query="A boy plays: ", document=""), similarity_fn_name="dot")
TEXTS = demo_sentences(12)


@pytest.fixture
def build(tmp_path):
    """build("bert", torch.float32) -> the folder of a model whose weights have this type."""
    tokenizer = word_tokenizer()

    def call(name, dtype=torch.float32):
        kind, options = CONFIGS[name]
        if not hasattr(transformers, kind):
            pytest.skip(f"this version of transformers has no {kind}")
        torch.manual_seed(0)
        config = getattr(transformers, kind)(vocab_size=len(tokenizer), **TOKENS, **options)
        folder = tmp_path / f"{name} {dtype}"
        model = transformers.AutoModel.from_config(config)
        rounded = {key: value.bfloat16().to(dtype) for key, value in model.state_dict().items()}
        model.to(dtype).load_state_dict(rounded)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        default = dict(default_prompt_name="query" if name in DECODERS else None)
        alter(folder / "config_sentence_transformers.json", STATED | default)
        return folder

    return call


@pytest.mark.parametrize("name", CUT)
def test_it_is_cut_trained_saved_and_read_by_everybody(build, tmp_path, name):
    """With its prompts and its similarity."""
    pooling = "lasttoken" if name in DECODERS else "mean"
    encoder = common.load_encoder(build(name), pooling, "0,2")
    optimizer = torch.optim.Adam(encoder.parameters(), 1e-3)
    for _ in range(2):
        embedding = common.embed_texts(ckd.embed, encoder, TEXTS)
        optimizer.zero_grad()
        ckd.mse_loss(embedding, torch.ones_like(embedding)).backward()
        optimizer.step()
    common.save_encoder(encoder, tmp_path / "out")
    ours = common.encode(ckd.embed, encoder, TEXTS)
    again = common.load_encoder(tmp_path / "out")
    theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert np.abs(ours - common.encode(ckd.embed, again, TEXTS)).max() < 1e-6
    assert np.abs(ours - theirs.encode(TEXTS)).max() < 1e-5
    assert again.model.config.num_hidden_layers == 2
    assert (again.prompts, theirs.similarity_fn_name) == (STATED["prompts"], "dot")
    again.prompt = STATED["prompts"]["query"]
    queries = common.encode(ckd.embed, again, TEXTS)
    assert np.abs(queries - theirs.encode_query(TEXTS)).max() < 1e-5
    for dropout in (0.0, 0.5):  # also that of attention
        encoder = common.load_encoder(tmp_path / "out", dropout=dropout).train()
        first, second = [common.embed_texts(ckd.embed, encoder, TEXTS) for _ in range(2)]
        equal = torch.equal(first, second)
        assert equal == (dropout == 0 or name == "lfm2")  # which has no dropout


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_keeps_no_keys_and_values_and_computes_in_fp32(build, name):
    """Also from weights in bf16, whose rounding must not reach Gemma's factor of embeddings."""
    vectors = []
    for dtype in (torch.bfloat16, torch.float32):
        encoder = common.load_encoder(build(name, dtype), "lasttoken").eval()
        ids = torch.tensor(common.tokenize(encoder, TEXTS[:1]))
        assert encoder.model(ids).past_key_values is None
        assert {value.dtype for value in encoder.parameters()} == {torch.float32}
        vectors.append(common.encode(ckd.embed, encoder, TEXTS))
    assert np.array_equal(*vectors)


REFUSED = [
    ("t5", None, "an encoder and a decoder"),
    ("albert", "0,2", r"--student-layers 0,2: choose each once from \[\]"),
    ("xlm", "0,2", r"--student-layers 0,2: choose each once from \[\]"),
    ("bert", "1,4", r"--student-layers 1,4: choose each once from \[0, 1, 2, 3\]"),
    ("bert", "1,", r"--student-layers 1,: choose each once from \[0, 1, 2, 3\]"),
    ("bert", "1,1", r"--student-layers 1,1: choose each once from \[0, 1, 2, 3\]"),
]


@pytest.mark.parametrize("name, layers, reason", REFUSED)
def test_what_cannot_be_read_or_cut_is_refused(build, name, layers, reason):
    with pytest.raises(common.UserError, match=reason):
        common.load_encoder(build(name), layers=layers)


def test_alberts_pooler_is_a_head(build):
    """Its linear layer has no further name."""
    encoder = common.load_encoder(build("albert"), "pooler").eval()
    model = transformers.AutoModel.from_pretrained(encoder.folder).eval()
    ids = torch.tensor(common.tokenize(encoder, TEXTS[:1]))
    with torch.no_grad():
        expected = model(ids).pooler_output
        found = ckd.embed(encoder, ids, torch.ones_like(ids))
    assert torch.allclose(found, expected, atol=1e-6)


def test_a_switch_that_is_named_dropout_is_no_rate(build):
    """ESM's token_dropout is true or false."""
    encoder = common.load_encoder(build("esm"), "mean", dropout=0.3)
    config = encoder.model.config
    assert (config.token_dropout, config.hidden_dropout_prob) == (False, 0.3)


UNREADABLE = [
    ("modernbert", "1,3"),  # which lacks a norm
    ("esm", "1,3"),  # its contact head has all layers' heads
]


@pytest.mark.parametrize("name, layers", UNREADABLE)
def test_a_cut_that_cannot_be_read_again_ends_the_run_before_its_first_step(
    build, fails, tmp_path, name, layers
):
    words = ["--train", DEMO / "sentences.txt", "--dev", DEMO / "dev.tsv", "--epochs", 1]
    words += ["--teacher", build(name), "--student-layers", layers, "--teacher-pooling", "mean"]
    fails(ckd, *words, "--output", tmp_path / "out")
    assert not losses(tmp_path / "out")
    assert not (tmp_path / "out/config.json").exists()  # nothing takes the place of a student
