# SPDX-License-Identifier: MIT
"""Train a student with the rounding that its file in 4 bits has, so that the file loses less.

  python -m extras.rounded ckd.py @demo/ckd.txt
  python -m extras.quantize runs/ckd-demo --bits 4

runs a script. In training and in dev scores, the student has the file's weights, in groups of 32,
and rounds the inputs of linear layers as the file does (in bf16, up to bf16's own rounding).
Gradients pass the rounding as if there were none (the straight-through estimator,
arXiv:1308.3432). The weights before rounding are saved; used without it, they are worse than those
of usual training. With --layer-bits 2 before the script, linear layers have 2 bits; give it to
extras.quantize, too.
"""

import contextlib
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

from torch import nn

import common
from common import UserError, embed_texts, run_main, run_settings, teacher_embeddings
from extras import quantize

SCRIPTS = ("ckd.py", "congen.py", "ibkd.py", "distilface.py")
GROUP = int(quantize.Options.group_size)
state = SimpleNamespace(layer_bits=4, is_teacher=False)  # a teacher is not rounded


def straight_through(round_values, values, *bits):
    """The rounded values, with the gradient of the values."""
    return values + (round_values(values.detach(), GROUP, *bits) - values).detach()


def layers_of(encoder):
    """-> linear layers, embedding tables. Raises UserError if other layers have a matrix."""
    modules = [*encoder.model.modules(), *encoder.heads.modules()]
    linear = [layer for layer in modules if isinstance(layer, nn.Linear)]
    tables = [layer for layer in modules if isinstance(layer, nn.Embedding)]
    for layer in set(modules) - {*linear, *tables}:
        if any(value.ndim > 1 for value in layer.parameters(recurse=False)):
            raise UserError(f"{encoder.name}: has a {type(layer).__name__}; omit extras.rounded")
    return linear, tables


def embed_rounded(embed, encoder, texts, max_length=None):
    """What replaces common.embed_texts()."""
    linear, tables = ([], []) if state.is_teacher else layers_of(encoder)
    with contextlib.ExitStack() as stack:
        for layer in linear:
            add = layer.register_forward_pre_hook
            stack.callback(add(lambda _, x: straight_through(quantize.rounded_inputs, *x)).remove)
            # What is in __dict__ hides the parameter, which stays the same.
            weight = straight_through(quantize.rounded_weights, layer.weight, state.layer_bits)
            layer.__dict__["weight"] = weight
            stack.callback(layer.__dict__.pop, "weight")
        for table in tables:  # of the rows that the batch reads: a group lies within a row
            add = table.register_forward_hook
            stack.callback(add(lambda *x: straight_through(quantize.rounded_weights, x[2])).remove)
        return embed_texts(embed, encoder, texts, max_length)


def embed_teacher(*arguments):
    """What replaces common.teacher_embeddings()."""
    state.is_teacher = True
    embeddings = teacher_embeddings(*arguments)
    state.is_teacher = False
    return embeddings


def settings(args, files, texts):
    """What replaces common.run_settings(): a run depends on the rounding, too."""
    args.layer_bits = state.layer_bits
    return run_settings(args, [*files, __file__, quantize.__file__], texts)


def main():
    del sys.argv[0]
    if sys.argv[:2] == ["--layer-bits", "2"]:
        del sys.argv[:2]
        state.layer_bits = 2
    if not sys.argv or Path(sys.argv[0]).name not in SCRIPTS:
        usage = "extras.rounded [--layer-bits 2] SCRIPT ..."
        raise UserError(f"{usage}: a script is one of {', '.join(SCRIPTS)}")
    common.embed_texts, common.teacher_embeddings = embed_rounded, embed_teacher
    common.run_settings = settings
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    run_main(main)
