"""Architectures that people bring: cut, trained, saved, read back, the same in SentenceTransformer.

Tiny models with random weights, since none can be downloaded here.
"""

import numpy as np
import pytest
import torch
import transformers
from conftest import demo_sentences, word_tokenizer
from sentence_transformers import SentenceTransformer

import ckd
import common

SIZES = dict(
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=130,
    pad_token_id=0,
)
GROUPED = dict(num_key_value_heads=2, head_dim=8)
CONFIGS = {
    "bert": ("BertConfig", SIZES),
    "roberta": ("RobertaConfig", SIZES),
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
    "albert": ("AlbertConfig", SIZES | dict(embedding_size=32)),
    "t5": ("T5Config", dict(d_model=32, d_kv=8, d_ff=64, num_layers=4, num_heads=4)),
}
CUT = [name for name in CONFIGS if name not in ("albert", "t5")]
TOKENS = dict(bos_token_id=2, cls_token_id=2, eos_token_id=3, sep_token_id=3)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    def call(name):
        kind, options = CONFIGS[name]
        if not hasattr(transformers, kind):
            pytest.skip(f"this version of transformers has no {kind}")
        folder = tmp_path_factory.mktemp(name)
        tokenizer = word_tokenizer()
        torch.manual_seed(0)
        config = getattr(transformers, kind)(vocab_size=len(tokenizer), **TOKENS, **options)
        transformers.AutoModel.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return call


@pytest.mark.parametrize("name", CUT)
def test_it_is_cut_trained_saved_and_read_by_everybody(build, tmp_path, name):
    pooling = "lasttoken" if name in ("qwen3", "gemma3") else "mean"
    encoder = common.load_encoder(build(name), pooling, "0,2")
    encoder.prompt = "A boy plays: " if name == "qwen3" else ""
    texts = demo_sentences(12)
    optimizer = torch.optim.Adam(encoder.parameters(), 1e-3)
    for _ in range(2):
        embedding = ckd.embed(encoder, *common.Tokens(encoder, texts).batch(np.arange(12)))
        optimizer.zero_grad()
        ckd.mse_loss(embedding, torch.ones_like(embedding)).backward()
        optimizer.step()
    common.save_encoder(encoder, tmp_path / "out")
    ours = common.encode(ckd.embed, encoder, texts)
    again = common.load_encoder(tmp_path / "out")
    theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(texts)
    assert np.abs(ours - common.encode(ckd.embed, again, texts)).max() < 1e-6
    assert np.abs(ours - theirs).max() < 1e-5
    assert again.model.config.num_hidden_layers == 2
    batch = common.Tokens(encoder, texts).batch(np.arange(12))
    for dropout in (0.0, 0.5):  # also that of attention
        encoder = common.load_encoder(tmp_path / "out", dropout=dropout).train()
        equal = torch.equal(ckd.embed(encoder, *batch), ckd.embed(encoder, *batch))
        assert equal == (dropout == 0)


NOT_CUT = [
    ("albert", "0,2", "no list of 4 layers"),
    ("t5", "0,2", ""),  # it has a decoder
    ("modernbert", "1,3", "needs its layer 0; keep it first"),  # which lacks a norm
]


@pytest.mark.parametrize("name, layers, reason", NOT_CUT)
def test_what_cannot_be_cut_is_refused_before_training(
    build, fails, files, tmp_path, name, layers, reason
):
    data = ["--train", files / "sentences.txt", "--dev", files / "dev.tsv"]
    folder = build(name)
    student = ["--teacher", folder, "--student-layers", layers, "--output", tmp_path / "out"]
    line = fails(ckd, *data, *student)
    assert str(folder) in line and reason in line
    assert not (tmp_path / "out").exists()
