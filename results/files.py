"""Time the files of several models in turns: one sentence at a time, and in batches of 32.

  python results/files.py sentence-transformers/all-MiniLM-L6-v2 runs/three-0 --pairs my-pairs.tsv

Rows are files: in fp32 by torch, and by ONNX Runtime in fp32, int8 and 4 bits. Columns: megabytes;
sentences per second without tokenization: the median of --rounds, the lowest and the highest. All
embed the same sentences; in each round, they take turns in another order.
"""

import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import chunks, positive_int, read_options, read_scored_pairs, run_main, table, tokenize
from extras.quantize import ROWS, load_models, padded, write_onnx

KINDS = ("fp32, torch", ROWS["fp32"], ROWS["int8"], ROWS["q4"])
SIZES = {"one": 1, "batch": 32}  # sentences at a time


class Options:
    models: list  # folders or Hub names
    pairs: str = None  # TSV file, whose first sentences are embedded
    sentences: positive_int = 512  # how many
    rounds: positive_int = 5  # of all files


def in_batches(encoder, texts, size):
    return [padded(encoder, chunk) for chunk in chunks(tokenize(encoder, texts), size)]


@torch.no_grad()
def speed(embed_batch, batches, sentences):
    """-> sentences per second."""
    embed_batch(*batches[0])  # the first call is slower
    begin = time.perf_counter()
    for batch in batches:
        embed_batch(*batch)
    return sentences / (time.perf_counter() - begin)


def main():
    args = read_options(Options, __doc__)
    texts = [first for first, _, _ in read_scored_pairs(args.pairs)][: args.sentences]
    rows, jobs = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(args.models):
            Path(folder, str(number)).mkdir()
            encoder, embed, files = write_onnx(name, Path(folder, str(number)))
            models = load_models(encoder, embed, files)
            batches = {label: in_batches(encoder, texts, size) for label, size in SIZES.items()}
            for kind in KINDS:
                rows[f"{name}, {kind}"] = {"MB": models[kind][0]}
                for label in SIZES:
                    run = partial(speed, models[kind][1], batches[label], len(texts))
                    jobs.append((f"{name}, {kind}", label, run))
        found = {(row, label): [] for row, label, _ in jobs}
        for number in range(args.rounds):
            for row, label, run in random.Random(number).sample(jobs, len(jobs)):
                found[row, label].append(run())
    for (row, label), speeds in found.items():
        rows[row] |= {label: median(speeds)}
        rows[row] |= {f"{label}, lowest": min(speeds), f"{label}, highest": max(speeds)}
    print(table(rows))


if __name__ == "__main__":
    run_main(main)
