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


def outputs_and_gradients(embed_rows, embed, encoder, tokens, rows):
    encoder.zero_grad()
    outputs = embed_rows(embed, encoder, tokens, rows, "cpu")
    outputs = [outputs] if torch.is_tensor(outputs) else [*outputs]
    weights = torch.linspace(-1, 1, outputs[-1].numel()).view_as(outputs[-1])
    (outputs[-1] * weights).sum().backward()
    gradients = [value.grad for value in encoder.parameters() if value.grad is not None]
    return [output.detach() for output in outputs], gradients


@pytest.mark.parametrize("script", EMBED)
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_a_row_is_a_padded_batch(models_folder, name, script):
    """The padded batch is one forward pass, not in parts."""
    encoder = common.load_encoder(models_folder / name, "mean", dropout=0.0).double().train()
    tokens = common.Tokens(encoder, demo_sentences(40), 20)
    rows = np.random.default_rng(0).permutation(40)
    embed = EMBED[script]

    def embed_padded(embed, encoder, tokens, rows, device):
        return embed(encoder, *tokens.batch(rows, device))

    expected, theirs = outputs_and_gradients(embed_padded, embed, encoder, tokens, rows)
    found, ours = outputs_and_gradients(one_row.embed_in_one_row, embed, encoder, tokens, rows)
    assert len(set(tokens.lengths)) > 5
    for one, other in zip(found + ours, expected + theirs):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert encoder.model.config._attn_implementation == "sdpa"  # as before, for scoring


def test_dropout_in_attention_is_refused(models_folder):
    encoder = common.load_encoder(models_folder / "bert", "mean", dropout=0.1).train()
    tokens = common.Tokens(encoder, demo_sentences(4))
    with pytest.raises(common.UserError, match="--dropout 0"):
        one_row.embed_in_one_row(distilface.embed, encoder, tokens, np.arange(4), "cpu")
