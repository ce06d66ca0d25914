# SPDX-License-Identifier: MIT
"""Train a student with the rounding that its file in 4 bits has, so that the file loses less.

  python -m extras.rounded ckd.py @demo/ckd.txt
  python -m extras.quantize runs/ckd-demo --bits 4

runs a script. In its training steps, the student's linear layers and embedding tables have weights,
and linear layers inputs, as in the file of extras.quantize. Gradients pass the rounding as if there
were none (the straight-through estimator, arXiv:1308.3432). The weights before rounding are saved,
and extras.quantize rounds them in the same way. Scores and the teacher are without rounding.
"""

import runpy
import sys
from pathlib import Path

import torch
from torch import nn

import common
from common import UserError, embed_texts, run_main
from extras.quantize import rounded_inputs, rounded_weights

SCRIPTS = ("ckd.py", "congen.py", "ibkd.py", "distilface.py")
GROUP = 32  # the default of extras.quantize


def straight_through(round_values, values):
    """The rounded values, with the gradient of the values."""
    return values + (round_values(values.detach(), GROUP) - values).detach()


def round_inputs(layer, inputs):
    return straight_through(rounded_inputs, *inputs)


def round_rows(table, inputs, rows):
    """The rows of a table that a batch reads: a group lies within a row."""
    return straight_through(rounded_weights, rows)


def layers_of(encoder):
    """-> linear layers, embedding tables. Raises UserError if other layers have a matrix."""
    modules = [*encoder.model.modules(), *encoder.heads.modules()]
    linear = [layer for layer in modules if isinstance(layer, nn.Linear)]
    tables = [layer for layer in modules if isinstance(layer, nn.Embedding)]
    for layer in set(modules) - {*linear, *tables}:
        if any(value.ndim > 1 for value in layer.parameters(recurse=False)):
            found = f"{encoder.name}: its {type(layer).__name__} has weights"
            raise UserError(f"{found}; only linear layers and embedding tables can be rounded")
    return linear, tables


def embed_rounded(embed, encoder, texts, max_length=None):
    """What replaces common.embed_texts()."""
    if not torch.is_grad_enabled():  # scoring, and the teacher
        return embed_texts(embed, encoder, texts, max_length)
    linear, tables = layers_of(encoder)
    hooks = [layer.register_forward_pre_hook(round_inputs) for layer in linear]
    hooks += [table.register_forward_hook(round_rows) for table in tables]
    for layer in linear:  # a value in its __dict__ hides the parameter, which stays the same
        layer.__dict__["weight"] = straight_through(rounded_weights, layer.weight)
    try:
        return embed_texts(embed, encoder, texts, max_length)
    finally:
        for hook in hooks:
            hook.remove()
        for layer in linear:
            del layer.__dict__["weight"]


def main():
    del sys.argv[0]
    if not sys.argv or Path(sys.argv[0]).name not in SCRIPTS:
        raise UserError(f"extras.rounded SCRIPT ...: a script is one of {', '.join(SCRIPTS)}")
    common.embed_texts = embed_rounded
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    run_main(main)
