"""Score sentence encoders on semantic textual similarity: the seven STS test sets of SentEval and their average, Spearman x 100.

Any number of models, each a folder or a hub name: a student of these scripts, a sentence-transformers model, a plain transformer. Each is
read as its own folder says (pooling, heads, normalization), or, all of them, as --pooling says. "All" setting, as in SimCSE: the subsets of
a year are concatenated, then there is one correlation. Cosine similarity. A sentence that occurs in several pairs is encoded once.

  python eval_sts.py runs/ckd sentence-transformers/all-MiniLM-L6-v2
  python eval_sts.py runs/ckd --split dev                   STS-B dev, what the scripts select by
  python eval_sts.py runs/ckd --pairs my.tsv                your own pairs: sentence 1, sentence 2, score, tab-separated
"""
import json
from pathlib import Path

import torch

import common
import demo


def parse_args():
    parser = common.ArgumentParser(description="Spearman x 100 of cosine similarity on the STS sets of SentEval, or on pairs of your own")
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="folder or hub name")
    add("--senteval", default="senteval.tar", help="SentEval's folder or tar, local or from the hub; %(default)s")
    add("--split", choices=("test", "dev"), default="test", help="the seven test sets, or STS-B dev; %(default)s")
    add("--pairs", action="append", metavar="FILE", help="score these graded pairs instead, TSV; may be given several times")
    add("--score-range", nargs=2, type=float, default=(0, 5), metavar=("LOW", "HIGH"), help="of the scores in --pairs; 0 5")
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
    if args.pairs:
        sets = {Path(name).stem: common.read_graded_pairs(name, None, *args.score_range) for name in args.pairs}
    else:
        sets = demo.test() if args.demo else common.read_sts(common.resolve(args.senteval), args.split)
    rows, report = {}, {}
    for name in args.models:
        encoder = common.load_encoder(name, args.pooling, layers=args.student_layers).to(args.device)
        row = name + (f" layers {args.student_layers}" if args.student_layers else "")
        rows[row] = common.spearman(encoder, sets, title=name)
        report[row] = dict(spearman=rows[row], pooling=encoder.pooling, dense_heads=len(encoder.heads), normalize=encoder.normalize,
                           dimensions=encoder.width, parameters=sum(p.numel() for p in encoder.parameters()))
    print(common.table(rows))
    if args.json:
        try:
            Path(args.json).write_text(json.dumps(report, indent=2) + "\n", "utf-8")
        except OSError as error:
            raise common.DataError(f"{args.json}: {error.strerror}, expected a file that can be written") from None


if __name__ == "__main__":
    common.run_main(main)
