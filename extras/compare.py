"""Score sentence encoders on translations, where no pairs are scored.

Prints how often the nearest neighbor of a text, by cosine, is its own translation: both ways, in
percent.

  python -m extras.compare MODEL runs/congen --translations en-de.tsv
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from common import POOLINGS, ArgumentParser, encode, run_main, table, write_json
from congen import read_text_pairs
from eval_sts import load


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
        parts = vectors[query].split(1000)  # a matrix [n, n] may be too large
        nearest = torch.cat([(part @ vectors[answer].T).argmax(dim=1) for part in parts])
        found = texts[answer][nearest.numpy()] == texts[answer]
        accuracy[f"{query + 1} -> {answer + 1}"] = 100 * float(found.mean())
    return accuracy


def parse_args():
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="folder or Hub name")
    add("--translations", metavar="FILE", required=True, help="TSV: a text, its translation")
    add("--pooling", choices=POOLINGS, help="of all models (default: as a folder states, or mean)")
    add("--student-layers", help="keep only these layers of each model, as in 1,3,5")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=sorted({"cpu", device}), default=device, help="(default: %(default)s)")
    add("--json", metavar="FILE", help="write the numbers as JSON")
    return parser.parse_args()


def main():
    args = parse_args()
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
