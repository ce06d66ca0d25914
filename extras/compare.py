# SPDX-License-Identifier: MIT
"""Score sentence encoders on translations, where no pairs are scored.

Prints how often the nearest neighbor of a text, by cosine, is its own translation: both ways, in
percent.

  python -m extras.compare MODEL runs/congen --translations en-de.tsv
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from common import UserError, encode
from common import Device, Pooling, read_options, run_main, table, write_json
from congen import read_text_pairs
from eval_sts import load


class Options:
    models: list  # folders, or names on the Hub
    translations: str = None  # TSV: a text, its translation
    pooling: Pooling = None  # of all models (default: as a folder states, or mean)
    student_layers: str = None  # keep only these layers of each model, as in 1,3,5
    device: Device = None  # (default: cuda if there is one)
    json: str = None  # a file for the numbers


def translation_accuracy(embed, encoder, pairs):
    """Percentage of texts whose nearest neighbor by cosine is their own translation.

    pairs: n of [text, translation]. Returns {"1 -> 2": 0 to 100, "2 -> 1": 0 to 100}. Where a
    translation occurs in several pairs, any of them is right.
    """
    texts = [np.array(side, dtype=object) for side in zip(*pairs)]
    arrays = [encode(embed, encoder, side.tolist()) for side in texts]
    vectors = [F.normalize(torch.from_numpy(array)) for array in arrays]
    accuracy = {}
    for query, answer in ((0, 1), (1, 0)):
        queries = vectors[query].split(1000)  # a matrix [n, n] may be too large
        nearest = torch.cat([(chunk @ vectors[answer].T).argmax(dim=1) for chunk in queries])
        found = texts[answer][nearest.numpy()] == texts[answer]
        accuracy[f"{query + 1} -> {answer + 1}"] = 100 * float(found.mean())
    return accuracy


def main():
    args = read_options(Options, __doc__)
    if not args.translations:
        raise UserError("give --translations, a file of texts and their translations")
    pairs = read_text_pairs(args.translations)
    rows = {}
    for name in args.models:
        encoder, embed = load(name, args.pooling, args.student_layers)
        rows[name] = translation_accuracy(embed, encoder.to(args.device), pairs)
    if args.json:
        write_json(Path(args.json), rows)
    print(table(rows))


if __name__ == "__main__":
    run_main(main)
