"""extras/one_row.py: a batch as one row has the embeddings and gradients of a padded one."""

from functools import partial

import numpy as np
import pytest
import torch
from conftest import demo_sentences

import ckd
import common
import distilface
import ibkd
from extras import one_row

EMBED = {"ckd": ckd.embed, "ibkd": partial(ibkd.embed, with_input=True)}


def output_and_gradients(embed_texts, embed, encoder, texts):
    encoder.zero_grad()
    output = embed_texts(embed, encoder, texts, 20)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    (output * weights).sum().backward()
    gradients = [value.grad for value in encoder.parameters() if value.grad is not None]
    return [output.detach(), *gradients]


@pytest.mark.parametrize("script", EMBED)
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_a_row_is_a_padded_batch(models_folder, name, script, one_part):
    """The padded batch is one forward pass, not in parts."""
    encoder = common.load_encoder(models_folder / name, "mean", dropout=0.0).double().train()
    sentences = demo_sentences(40)
    texts = [sentences[row] for row in np.random.default_rng(0).permutation(40)]
    assert len({len(ids) for ids in common.tokenize(encoder, texts, 20)}) > 5
    expected = output_and_gradients(common.embed_texts, EMBED[script], encoder, texts)
    found = output_and_gradients(one_row.embed_in_one_row, EMBED[script], encoder, texts)
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert encoder.model.config._attn_implementation == "sdpa"  # as before, for scoring


def test_scoring_is_as_always(models_folder):
    """Also with dropout, which scoring has not: the vectors are the same to the bit."""
    encoder = common.load_encoder(models_folder / "bert", "mean", dropout=0.1)
    with torch.no_grad():
        ours = one_row.embed_training_texts(ckd.embed, encoder, demo_sentences(40))
        expected = common.embed_texts(ckd.embed, encoder, demo_sentences(40))
    assert torch.equal(ours, expected)


def test_dropout_in_attention_is_refused(models_folder):
    encoder = common.load_encoder(models_folder / "bert", "mean", dropout=0.1).train()
    with pytest.raises(common.UserError, match="--dropout 0"):
        one_row.embed_training_texts(distilface.embed, encoder, demo_sentences(4))
