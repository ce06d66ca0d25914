# SPDX-License-Identifier: MIT
"""Which layers should a student keep? Score cuts of a model before any training.

Each cut keeps --keep layers, always the last one, and is scored on the same --sample of pairs. All
cuts are scored if there are at most 300 (3 of 12: 55); otherwise the layer whose removal costs
least is removed, until --keep are left. Up to ten are printed; training changes their order
(results/size.md).

  python -m extras.layers sentence-transformers/all-MiniLM-L6-v2 --keep 3 --dev demo/dev.tsv
"""

import copy
import math
import random
from itertools import combinations

from tqdm import tqdm

from common import BAR, UserError, spearman
from common import keep_layers, load_encoder, read_dev
from common import in_range, read_options, run_main, table
from eval_sts import embed

MOST_CUTS = 300


class Options:
    model: str  # folder, or name on the Hub
    keep: in_range(int, 1) = 3  # number of layers
    dev: str = None  # scored pairs (TSV) (default: STS-B dev)
    sample: in_range(int, 2) = 300  # pairs, at most


def cut_copy(encoder, layers):
    """A copy of the encoder with these layers alone; it shares the weights. Raises UserError."""
    shared = {id(item): item for item in (*encoder.parameters(), encoder.tokenizer)}
    student = copy.deepcopy(encoder, shared)
    try:
        keep_layers(student.model, ",".join(map(str, layers)))
    except UserError as error:  # as in ALBERT, and in XLM
        raise UserError(f"{encoder.name}: its layers cannot be cut") from error
    return student


def score_cuts(encoder, cuts, pairs):
    """cuts: tuples of layers; pairs: scored -> {cut: Spearman x 100}. Raises UserError."""
    scores = {}
    for layers in tqdm(cuts, "cuts", leave=False, **BAR):
        scores[layers] = spearman(embed, cut_copy(encoder, layers), pairs)
    return scores


def main():
    args = read_options(Options, __doc__)
    pairs = read_dev(args.dev)
    pairs = random.Random(0).sample(pairs, min(args.sample, len(pairs)))
    encoder = load_encoder(args.model)
    depth = encoder.model.config.num_hidden_layers
    if args.keep >= depth:
        raise UserError(f"--keep {args.keep}: {args.model} has {depth} layers; keep fewer")
    *others, last = range(depth)
    sizes = [args.keep - 1]
    if math.comb(depth - 1, args.keep - 1) > MOST_CUTS:
        sizes = range(depth - 2, args.keep - 2, -1)
    for size in sizes:
        cuts = [(*kept, last) for kept in combinations(others, size)]
        scores = score_cuts(encoder, cuts, pairs)
        ranked = sorted(scores, key=scores.get, reverse=True)
        *others, _ = ranked[0]
    print(table({",".join(map(str, cut)): {"dev, untrained": scores[cut]} for cut in ranked[:10]}))


if __name__ == "__main__":
    run_main(main)
