"""Score sentence encoders on semantic textual similarity (STS): Spearman x 100 of the cosine.

By default: the seven STS test sets of SentEval and their average, in the "all" setting of SimCSE,
where the subsets of a year are concatenated before one correlation is computed. A model is a folder
or a name on the Hugging Face Hub: a student of these scripts, a sentence-transformers model, or a
plain transformer. Each model is read as its own folder states (pooling, dense heads,
normalization), unless --pooling replaces that for all of them.

  python eval_sts.py runs/ckd sentence-transformers/all-MiniLM-L6-v2
  python eval_sts.py runs/ckd --split dev            STS-B dev, by which the scripts select students
  python eval_sts.py runs/ckd --pairs my.tsv         your own scored pairs (TSV)
  python eval_sts.py distilbert-base-uncased --pooling avg_first_last \\
      --sets STS12,STS13,STS14,STS15,STS-B
      A row of DistilFACE's Table 2, whose average is that of these five sets.
  python eval_sts.py runs/congen --pairs STS2017.eval.v1.1/STS.input.track1.ar-ar.txt
      STS-2017 (ConGen's Table 3) as it was released, with the scores in STS2017.gs beside that
      folder. The sets of sentence-transformers (STS.en-de.txt) have three columns, and need none.
  python eval_sts.py runs/congen --translations en-de.tsv
      How many sentences, in percent, have their own translation as nearest neighbor? Both ways.
"""

import argparse
import math
from pathlib import Path

import numpy as np

from common import (
    STS_YEARS,
    DataError,
    ScoredPairs,
    encode_sentences,
    read_columns,
    read_lines,
    read_pairs,
    read_score,
    read_scored_pairs,
    read_sts,
    resolve,
    spearman,
    table,
)
from support import demo
from support.command_line import (
    ArgumentParser,
    add_evaluation_options,
    number,
    run_main,
    write_report,
)
from support.encoder import POOLING_NAMES, load_encoder

TEST_SETS = (*STS_YEARS, "STS-B", "SICK-R")
INPUT = "STS.input."  # how the name of a file of the STS tasks begins: sentences without scores
GOLD = "STS.gs."  # the same for its scores
GOLD_FOLDER = "STS2017.gs"  # of the release of STS-2017
SCORE_RANGE = 0, 5  # of STS
finite = number(float, lambda value: abs(value) <= 1e9, "a number from -1000000000 to 1000000000")
QUERIES_AT_ONCE = 1000  # rows of the matrix of cosines that is in memory


def translation_accuracy(encoder, sides, title=""):
    """How many sentences, in percent, have their own translation as nearest neighbor by cosine.

    sides: two lists of n sentences, line by line translations of each other.
    Returns {"1 -> 2": 0 to 100, "2 -> 1": 0 to 100}. Where a translation occurs in several lines,
    any of them is right.
    """
    first_texts, second_texts = sides
    first = normalized_vectors(encoder, first_texts, title)
    second = normalized_vectors(encoder, second_texts, title)
    return {
        "1 -> 2": retrieval_accuracy(first, second, second_texts),
        "2 -> 1": retrieval_accuracy(second, first, first_texts),
    }


def normalized_vectors(encoder, sentences, title):
    vectors = encode_sentences(encoder.eval(), sentences, title)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def retrieval_accuracy(queries, answers, texts):
    """queries, answers [n, D], L2-normalized; texts, the n answers' sentences -> percent."""
    right = 0
    for start in range(0, len(queries), QUERIES_AT_ONCE):
        cosine = queries[start : start + QUERIES_AT_ONCE] @ answers.T
        for query, nearest in enumerate(cosine.argmax(axis=1), start):
            right += texts[nearest] == texts[query]
    return 100 * right / len(texts)


def read_own_pairs(file, low, high):
    """A file of --pairs -> its name in the table, its ScoredPairs. Raises DataError."""
    path = Path(file)
    if not path.name.startswith(INPUT):
        return path.stem, read_scored_pairs(path, low=low, high=high)
    return path.stem.removeprefix(INPUT), read_sts_task(path, find_gold(path), low, high)


def read_all_pairs(files, low, high):
    """The files of --pairs -> {name: ScoredPairs}; where two have one name, their paths name them.

    Raises DataError.
    """
    named = [(file, *read_own_pairs(file, low, high)) for file in dict.fromkeys(files)]
    names = [name for _, name, _ in named]
    return {file if names.count(name) > 1 else name: pairs for file, name, pairs in named}


def find_gold(path):
    """STS.input.NAME.txt -> STS.gs.NAME.txt beside it, or as STS-2017 was released.

    Raises DataError.
    """
    name = path.name.replace(INPUT, GOLD, 1)
    beside = path.with_name(name)
    released = path.absolute().parent.parent / GOLD_FOLDER / name
    for gold in (beside, released):
        if gold.exists():
            return gold
    raise DataError(f"{path}: no scores, expected them in {beside} or {released}")


def read_sts_task(sentences, gold, low, high):
    """Two tab-separated sentences a line, and a file with the score of each -> ScoredPairs.

    Pairs without a gold score are left out. Raises DataError.
    """
    rows = list(read_columns(sentences, ("sentence 1", "sentence 2"), at=(0, 1)))
    scores = list(read_lines(gold))
    if len(scores) != len(rows):
        expected = f"{len(scores)} as in {gold.name}"
        raise DataError(f"{sentences}: {len(rows)} lines, expected {expected}")
    pairs = []
    for (line, score), (_, row) in zip(scores, rows):
        if score.strip():
            pairs.append((*row, read_score(score, f"{gold}:{line}", low, high)))
    if len({score for _, _, score in pairs}) < 2:
        raise DataError(f"{gold}: expected two different scores, which a correlation needs")
    return ScoredPairs(*zip(*pairs))


def describe(encoder):
    """What a report says of an encoder beside its scores."""
    pooling = encoder.pooling
    return {
        "pooling": pooling if isinstance(pooling, str) else pooling._asdict(),
        "dense_heads": len(encoder.heads),
        "normalize": encoder.normalize,
        "dimensions": encoder.dimension,
        "parameters": sum(value.numel() for value in encoder.parameters()),
    }


def set_names(text):
    names = text.split(",")
    if not set(names) <= set(TEST_SETS):
        raise argparse.ArgumentTypeError(f"{text!r}, expected some of {','.join(TEST_SETS)}")
    return names


def parse_args():
    parser = ArgumentParser(
        "Spearman x 100 of cosine similarity on the STS sets of SentEval, or on your own pairs."
    )
    add_evaluation_options(parser)
    add = parser.add_argument
    add(
        "--senteval",
        default="senteval.tar",
        help="SentEval's folder or tar, local or from the Hub; %(default)s",
    )
    add(
        "--split",
        choices=("test", "dev"),
        default="test",
        help="the seven test sets, or STS-B dev; %(default)s",
    )
    add(
        "--sets",
        type=set_names,
        help=f"some of the test sets, {','.join(TEST_SETS)}, and their average; all",
    )
    add(
        "--pairs",
        action="append",
        metavar="FILE",
        help="scored pairs (TSV), or STS.input.NAME.txt with its STS.gs.NAME.txt, instead of "
        "SentEval; may be given several times",
    )
    add(
        "--score-range",
        nargs=2,
        type=finite,
        metavar=("LOW", "HIGH"),
        help="of the scores in --pairs; 0 5",
    )
    add(
        "--translations",
        metavar="FILE",
        help="translations (TSV, two columns) instead: accuracy of nearest-neighbor search",
    )
    add("--demo", action="store_true", help="the generated test pairs of support/demo.py instead")
    add("--pooling", choices=POOLING_NAMES, help="read every model so, whatever its folder states")
    add("--student-layers", help="keep only these layers of every model, counted from 0: 1,3,5")
    args = parser.parse()
    low, high = args.score_range or SCORE_RANGE
    if low >= high:
        raise DataError(f"--score-range {low:g} {high:g}: expected a lower one, then a higher one")
    if args.score_range and not args.pairs:
        raise DataError("--score-range: expected with --pairs")
    args.score_range = low, high
    if args.sets and (args.pairs or args.translations or args.demo or args.split != "test"):
        raise DataError("--sets: expected with SentEval's test sets, and with no other data")
    if sum(map(bool, (args.pairs, args.translations, args.demo))) > 1:
        raise DataError("--pairs, --translations, --demo: expected one of them")
    return args


def read_sets(args):
    """The scored pairs that the options name -> {name: ScoredPairs}. Raises DataError."""
    if args.pairs:
        return read_all_pairs(args.pairs, *args.score_range)
    if args.demo:
        return demo.test()
    sets = read_sts(resolve(args.senteval), args.split)
    if args.sets:
        return {name: sets[name] for name in args.sets}
    return sets


def main():
    args = parse_args()
    if args.translations:
        sets = read_pairs(args.translations, ("sentence", "translation"))
        if len(sets[0]) < 2:
            raise DataError(f"{args.translations}: one pair, expected others to search among")
        measure = "accuracy"
        score = translation_accuracy
    else:
        sets = read_sets(args)
        measure = "spearman"
        score = spearman
    rows = {}
    report = {}
    for name in args.models:
        encoder = load_encoder(name, args.pooling, layers=args.student_layers).to(args.device)
        row = f"{name} layers {args.student_layers}" if args.student_layers else name
        rows[row] = score(encoder, sets, title=name)
        for title, value in rows[row].items():
            if math.isnan(value):
                expected = "similarities and scores that are not all equal"
                raise DataError(f"{name}: no correlation for {title}, expected {expected}")
        report[row] = {measure: rows[row]} | describe(encoder)
    print(table(rows))
    write_report(args.json, report)


if __name__ == "__main__":
    run_main(main)
