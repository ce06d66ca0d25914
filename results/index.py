"""Search a smaller index: queries by each model, passages by the teacher, in fewer dimensions.

  python results/index.py --beir FOLDER TEACHER STUDENT ...

The passages' mean is subtracted from them, and both sides are projected on the first principal
components of the passages ("components"), or cut to their first dimensions ("first"). A dimension
of a passage is a float, an int8 (one scale for all) or a sign bit; queries stay floats, and the
score is the dot product. Models with separate prompts for queries and passages are not supported.
Columns: bytes per passage, nDCG@10 and MRR@10 x 100.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import encode, load_encoder, run_main, table
from eval_sts import embed
from extras.eval_retrieval import metrics, read_split, read_texts, search

DIMENSIONS = (384, 256, 128)


def rounded(passages):
    """[n, D] -> {format: (bytes of a passage, the passages as they are compared)}."""
    scale = np.abs(passages).max() / 127
    size = passages.shape[1]
    return {
        "float": (4 * size, passages),
        "int8": (size, np.round(passages / scale)),
        "sign": (size / 8, np.where(passages > 0, 1, -1).astype(np.float32)),
    }


def rows(name, queries, passages, answers):
    """Yield (row of the table, its columns) for each projection, dimension and format."""
    centred = passages - passages.mean(0)
    _, _, components = np.linalg.svd(centred, full_matrices=False)
    for basis, axes in (("first", np.eye(passages.shape[1])), ("components", components)):
        for size in DIMENSIONS:
            axes_kept = axes[:size].T.astype(np.float32)  # [D, size]
            for form, (count, kept) in rounded(centred @ axes_kept).items():
                found = search(queries @ axes_kept, [kept], 10, "dot", "cpu")
                scores = metrics(found, answers)
                columns = dict(bytes=count, **{key: scores[key] for key in ("nDCG@10", "MRR@10")})
                yield f"{name}: {basis} {size} {form}", columns


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="the teacher, then students")
    parser.add_argument("--beir", required=True, help="a BEIR folder")
    return parser.parse_args()


def main():
    args = parse_args()
    queries, answers = read_split(args.beir, "test")
    corpus = [text for _, text in read_texts(args.beir, "corpus.jsonl")]
    passages = encode(embed, load_encoder(args.models[0]), corpus)
    found = {}
    for name in args.models:
        vectors = encode(embed, load_encoder(name), queries)
        found.update(rows(name, vectors, passages, answers))
    print(table(found))


if __name__ == "__main__":
    run_main(main)
