# SPDX-License-Identifier: MIT
"""Train a student with the rounding that its file in 4 bits has, so that the file loses less.

  python -m extras.rounded ckd.py @demo/ckd.txt
  python -m extras.quantize runs/ckd-demo --bits 4

runs a script. Its training steps use the weights of the file, and round the inputs of linear layers
as it does (in bf16, up to bf16's own rounding). Gradients pass the rounding as if there were none
(the straight-through estimator, arXiv:1308.3432). The weights before rounding are saved and scored;
used without it, they are worse than those of usual training. What cannot be rounded is refused at
the first step.
"""

import contextlib
import runpy
import sys
from pathlib import Path

import torch
from torch import nn

import common
from common import UserError, embed_texts, run_main, run_settings
from extras import quantize
from extras.quantize import rounded_inputs, rounded_weights

SCRIPTS = ("ckd.py", "congen.py", "ibkd.py", "distilface.py")
GROUP = 32  # the default of extras.quantize


def straight_through(round_values, values):
    """The rounded values, with the gradient of the values."""
    return values + (round_values(values.detach(), GROUP) - values).detach()


def layers_of(encoder):
    """-> linear layers, embedding tables. Raises UserError if other layers have a matrix."""
    modules = [*encoder.model.modules(), *encoder.heads.modules()]
    linear = [layer for layer in modules if isinstance(layer, nn.Linear)]
    tables = [layer for layer in modules if isinstance(layer, nn.Embedding)]
    for layer in set(modules) - {*linear, *tables}:
        if any(value.ndim > 1 for value in layer.parameters(recurse=False)):
            found = f"its {type(layer).__name__} is neither a linear layer nor an embedding table"
            raise UserError(f"{encoder.name}: {found}; train it without extras.rounded")
    return linear, tables


def embed_rounded(embed, encoder, texts, max_length=None):
    """What replaces common.embed_texts()."""
    if not torch.is_grad_enabled():  # scoring, and the teacher
        return embed_texts(embed, encoder, texts, max_length)
    linear, tables = layers_of(encoder)
    with contextlib.ExitStack() as stack:
        for layer in linear:
            add = layer.register_forward_pre_hook
            stack.callback(add(lambda _, x: straight_through(rounded_inputs, *x)).remove)
            # What is in __dict__ hides the parameter, which stays the same.
            layer.__dict__["weight"] = straight_through(rounded_weights, layer.weight)
            stack.callback(layer.__dict__.pop, "weight")
        for table in tables:  # of the rows that the batch reads: a group lies within a row
            add = table.register_forward_hook
            stack.callback(add(lambda *x: straight_through(rounded_weights, x[2])).remove)
        return embed_texts(embed, encoder, texts, max_length)


def settings_of_rounding(args, files, texts):  # a run depends on this code, too
    return run_settings(args, [*files, __file__, quantize.__file__], texts)


def main():
    del sys.argv[0]
    if not sys.argv or Path(sys.argv[0]).name not in SCRIPTS:
        raise UserError(f"extras.rounded SCRIPT ...: a script is one of {', '.join(SCRIPTS)}")
    common.embed_texts, common.run_settings = embed_rounded, settings_of_rounding
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    run_main(main)
