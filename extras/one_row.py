# SPDX-License-Identifier: MIT
"""An experiment: a batch as one row of all its tokens, so that nothing is padded.

  python -m extras.one_row ckd.py --student bert-base-uncased --dropout 0

runs a script with embed_in_one_row() instead of common.embed_texts(), which pads short texts to
the longest of their part. The transformer reads the tokens of N texts as one text of T tokens, and
attention is computed within each text alone: on a GPU by torch's varlen_attn (torch 2.10 or later,
in bf16 or fp16), elsewhere text by text. Its output is then padded to [N, L, H], so that a script's
embed() pools it as it always does. Scoring and the teacher's pass stay as they are.

It holds for transformers that take their attention from transformers' AttentionInterface and state
no more than positions and a mask: BERT, DistilBERT, RoBERTa, ELECTRA. MPNet and DeBERTa compute an
attention of their own, and varlen_attn has no dropout. `python -m extras.benchmark --only gpu`
measures it (docs/engineering.md).
"""

import runpy
import sys

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

import common
from common import UserError, embed_texts, run_main, tokenize

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None


def attend_within_texts(
    module, query, key, value, mask, dropout=0.0, scaling=None, starts=None, longest=None, **_
):
    """Attention of a row of T tokens, each with the tokens of its own text.

    query, key, value [1, heads, T, d]; starts int32 [N + 1]: where each text begins, then T;
    longest: the tokens of the longest text. Returns [1, T, heads, d] and no weights.
    """
    if dropout > 0:
        raise UserError("attention within texts has no dropout; give --dropout 0")
    query, key, value = [each[0].transpose(0, 1) for each in (query, key, value)]  # [T, heads, d]
    if scaling is not None:  # varlen_attn scales by 1 / sqrt(d)
        query = query * (scaling * query.shape[-1] ** 0.5)
    if query.is_cuda and varlen_attn and query.dtype != torch.float32:
        output = varlen_attn(query, key, value, starts, starts, longest, longest)
    else:
        output = attend_text_by_text(query, key, value, starts)
    return output.unsqueeze(0), None


def attend_text_by_text(query, key, value, starts):
    """What varlen_attn computes, by a loop. [T, heads, d] each -> [T, heads, d]."""
    outputs = []
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist()):
        text = [each[begin:end].transpose(0, 1) for each in (query, key, value)]  # [heads, l, d]
        outputs.append(F.scaled_dot_product_attention(*text).transpose(0, 1))
    return torch.cat(outputs)


AttentionInterface.register("within_texts", attend_within_texts)


def embed_in_one_row(embed, encoder, texts, max_length=None):
    """embed() of a batch of N texts -> [N, D]: what common.embed_texts() returns.

    The number of tokens is known on the host, which therefore asks the device for nothing. Raises
    UserError for a transformer with an attention of its own, and for dropout in attention.
    """
    if not encoder.model._supports_attention_backend:
        raise UserError(f"{encoder.name}: its attention cannot be replaced; train without one_row")
    token_ids = tokenize(encoder, texts, max_length)
    lengths = np.array([len(ids) for ids in token_ids])
    positions = np.arange(lengths.max())
    is_token = positions < lengths[:, None]  # [N, L]
    padded_ids = np.zeros(is_token.shape, np.int64)  # any token will do where there is none
    padded_ids[is_token] = np.concatenate(token_ids)
    places = np.flatnonzero(is_token)  # [T], where a token is in [N * L]
    position_ids = np.broadcast_to(positions, is_token.shape)[is_token]  # [T]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    arrays = (padded_ids, is_token.astype(np.int64), places, position_ids, starts)
    device = encoder.model.device
    ids, mask, place, position, starts = [torch.from_numpy(array).to(device) for array in arrays]
    model_forward = encoder.model.forward

    def pad(states):
        """[1, T, H] -> [N, L, H], zeros where there is no token."""
        padded = states.new_zeros(is_token.size, states.shape[-1])
        return padded.index_copy(0, place, states[0]).view(*is_token.shape, -1)

    def forward(input_ids, attention_mask, **options):
        ids = input_ids.flatten()[place].unsqueeze(0)  # [1, T]
        options |= dict(starts=starts, longest=int(lengths.max()))
        output = model_forward(ids, position_ids=position.unsqueeze(0) + offset, **options)
        output.last_hidden_state = pad(output.last_hidden_state)
        if output.get("hidden_states"):
            output.hidden_states = tuple(pad(states) for states in output.hidden_states)
        return output

    embeddings = getattr(encoder.model, "embeddings", None)
    offset = getattr(embeddings, "padding_idx", -1) + 1  # RoBERTa's positions begin after it
    usual = encoder.model.config._attn_implementation
    encoder.model.config._attn_implementation = "within_texts"
    encoder.model.forward = forward
    try:
        return embed(encoder, ids, mask)
    finally:
        del encoder.model.forward
        encoder.model.config._attn_implementation = usual


def embed_training_texts(embed, encoder, texts, max_length=None):
    way = embed_in_one_row if torch.is_grad_enabled() else embed_texts
    return way(embed, encoder, texts, max_length)


def main():
    common.embed_texts = embed_training_texts
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    run_main(main)
