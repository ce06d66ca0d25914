"""Score sentence encoders on semantic textual similarity: the seven STS test sets of SentEval and their average, Spearman x 100.

Any number of models, each a folder or a hub name: a student of these scripts, a sentence-transformers model, a plain transformer. Each is
read as its own folder says (pooling, heads, normalization), or, all of them, as --pooling says. "All" setting, as in SimCSE: the subsets of
a year are concatenated, then there is one correlation. Cosine similarity. A sentence that occurs in several pairs is encoded once.

  python eval_sts.py runs/ckd sentence-transformers/all-MiniLM-L6-v2
  python eval_sts.py runs/ckd --split dev                   STS-B dev, what the scripts select by
  python eval_sts.py runs/ckd --pairs my.tsv                your own pairs: sentence 1, sentence 2, score, tab-separated
  python eval_sts.py runs/congen --translations en-de.tsv   nearest-neighbour accuracy of column 1 in column 2, and back, in percent
"""
import json
from pathlib import Path

import numpy as np
import torch

import common
import demo


def translation_accuracy(encoder, sides, title=""):
    """How many sentences, in percent, have their own translation as the nearest by cosine among all on the other side, both ways.
    sides: two tuples of n sentences, line by line translations -> {"1 -> 2": 0 to 100, "2 -> 1"}. An equal translation of another counts."""
    device = next(encoder.parameters()).device
    vectors = [common.encode(encoder.eval(), common.Tokens(encoder, list(side)), device, title) for side in sides]
    first, second = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in vectors)

    def accuracy(queries, answers, texts):
        nearest = np.concatenate([(queries[i:i + 1000] @ answers.T).argmax(1) for i in range(0, len(texts), 1000)])
        return 100 * sum(texts[i] == texts[found] for i, found in enumerate(nearest)) / len(texts)
    return {"1 -> 2": accuracy(first, second, sides[1]), "2 -> 1": accuracy(second, first, sides[0])}


def parse_args():
    parser = common.ArgumentParser(description="Spearman x 100 of cosine similarity on the STS sets of SentEval, or on pairs of your own")
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="folder or hub name")
    add("--senteval", default="senteval.tar", help="SentEval's folder or tar, local or from the hub; %(default)s")
    add("--split", choices=("test", "dev"), default="test", help="the seven test sets, or STS-B dev; %(default)s")
    add("--pairs", action="append", metavar="FILE", help="score these graded pairs instead, TSV; may be given several times")
    add("--score-range", nargs=2, type=float, default=(0, 5), metavar=("LOW", "HIGH"), help="of the scores in --pairs; 0 5")
    add("--translations", metavar="FILE", help="score translations instead, TSV of two columns: is a sentence's own the nearest of all?")
    add("--demo", action="store_true", help="score the test pairs of demo.py instead")
    add("--pooling", choices=("mean", "cls", "pooler"), help="read every model so, whatever its folder says")
    add("--student-layers", help="keep these layers of every model only, zero-based: 1,3,5")
    add("--json", metavar="FILE", help="write the scores, unrounded, with each model's pooling and size")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="%(default)s")
    return parser.parse_args()


def main():
    args = parse_args()
    if args.device != "cpu" and not (args.device.startswith("cuda") and torch.cuda.is_available()):
        raise common.DataError(f"--device {args.device}: expected cpu, or cuda on a machine that has it")
    score = common.spearman
    if args.translations:
        sets = list(zip(*(fields for _, fields in common.read_columns(args.translations, ("sentence", "translation")))))
        score = translation_accuracy
    elif args.pairs:
        sets = {Path(name).stem: common.read_graded_pairs(name, None, *args.score_range) for name in args.pairs}
    else:
        sets = demo.test() if args.demo else common.read_sts(common.resolve(args.senteval), args.split)
    rows, report = {}, {}
    for name in args.models:
        encoder = common.load_encoder(name, args.pooling, layers=args.student_layers).to(args.device)
        row = name + (f" layers {args.student_layers}" if args.student_layers else "")
        rows[row] = score(encoder, sets, title=name)
        report[row] = {"accuracy" if args.translations else "spearman": rows[row], "pooling": encoder.pooling, "dense_heads": len(encoder.heads),
                       "normalize": encoder.normalize, "dimensions": encoder.width, "parameters": sum(p.numel() for p in encoder.parameters())}
    print(common.table(rows))
    if args.json:
        try:
            Path(args.json).write_text(json.dumps(report, indent=2) + "\n", "utf-8")
        except OSError as error:
            raise common.DataError(f"{args.json}: {error.strerror}, expected a file that can be written") from None


if __name__ == "__main__":
    common.run_main(main)
