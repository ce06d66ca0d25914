"""Score sentence encoders on SentEval's transfer tasks: a linear classifier on frozen embeddings.

  MR, CR, SUBJ, MPQA   accuracy, the mean over 10 folds; in each, 10 folds of the rest choose C
  TREC, MRPC           accuracy on test, for MRPC also F1; 10 folds of the training set choose C
  SST-2                accuracy on test; the dev set chooses C

All scores are in percent, and "avg" is the mean of the seven accuracies. The protocol is that of
SentEval (Conneau and Kiela, arXiv:1803.05449) with usepytorch off, which runs scikit-learn's
logistic regression too; the values of C, the folds and the order of rows from which they are drawn
are SentEval's own. On CR, another order moves the score by half a point.

  python -m extras.eval_transfer runs/ckd sentence-transformers/all-MiniLM-L6-v2
  python -m extras.eval_transfer runs/ckd --tasks MR,TREC --folds 5
"""

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from common import BAR, POOLINGS, ArgumentParser, UserError, number, one_line_errors
from common import run_main, table
from common import encode, refuse_overwriting, resolve_data, write_json
from eval_sts import load

SEED = 1111  # SentEval's, of the folds
STRENGTHS = [2.0**power for power in range(-2, 4)]  # SentEval's C, the inverse of the penalty
STRENGTHS_OF_TRAINING_FOLDS = [2.0**power for power in range(-1, 6)]  # for TREC and MRPC
EMPTY = "."  # SentEval's sentence for a blank line

# ---- Files ---------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """How a task is stored."""

    files: dict  # {split: names}; where lines have no label, the first file is class "0", ...
    line: str  # what a line has, in words
    pattern: str  # the same as a regular expression with the groups first, second and label
    header_lines: int = 0
    encoding: str = "utf-8-sig"


class Split(NamedTuple):
    """n sentences, or pairs of sentences, with their labels."""

    first: list
    second: list  # empty strings where the task has single sentences
    labels: np.ndarray  # [n], str


def polarity(*files):
    """A task with one file for each of its two classes."""
    return Layout({"train": files}, "one sentence per line", r"(?P<first>.*)")


LAYOUTS = {
    "MR": polarity("MR/rt-polarity.neg", "MR/rt-polarity.pos"),
    "CR": polarity("CR/custrev.neg", "CR/custrev.pos"),
    "SUBJ": polarity("SUBJ/subj.subjective", "SUBJ/subj.objective"),
    "MPQA": polarity("MPQA/mpqa.neg", "MPQA/mpqa.pos"),
    "SST-2": Layout(
        {split: [f"SST/binary/sentiment-{split}"] for split in ("train", "dev", "test")},
        "sentence, tab, 0 or 1",
        r"(?P<first>[^\t]+)\t(?P<label>[01])",
    ),
    "TREC": Layout(
        {"train": ["TREC/train_5500.label"], "test": ["TREC/TREC_10.label"]},
        "CLASS:kind question",
        r"(?P<label>ABBR|DESC|ENTY|HUM|LOC|NUM):\S+ (?P<first>.+)",
        encoding="latin-1",
    ),
    "MRPC": Layout(
        {"train": ["MRPC/msr_paraphrase_train.txt"], "test": ["MRPC/msr_paraphrase_test.txt"]},
        "0 or 1, two numbers, two sentences, separated by tabs",
        r"(?P<label>[01])\t\d+\t\d+\t(?P<first>[^\t]+)\t(?P<second>[^\t]+)",
        header_lines=1,
    ),
}
TASKS = tuple(LAYOUTS)


def find(folder, file):
    """A file of SentEval, in its folder or in one above it -> Path. Raises UserError."""
    found = sorted(Path(folder).rglob(file))
    if not found:
        raise UserError(f"{folder}: no {file} in it; give SentEval's folder or tar file")
    return found[0]


def read_file(path, layout, label):
    """-> [(first, second, label)]. label: where lines have none. Raises UserError."""
    rows = []
    with one_line_errors(path, f"a line of this file is: {layout.line}") as place:
        lines = path.read_bytes().decode(layout.encoding).removesuffix("\n").split("\n")
        for place.line, line in enumerate(lines, 1):
            if place.line <= layout.header_lines:
                continue
            row = re.fullmatch(layout.pattern, line.strip())
            if row is None:
                raise ValueError("the line does not have this form")
            fields = dict(second="", label=label) | row.groupdict()
            rows.append((fields["first"], fields["second"], fields["label"]))
        if not rows:
            raise ValueError("there is only a header")
    return rows


def read_task(folder, task, folds):
    """-> {split: Split}: "train" and, where a task has them, "dev" and "test". Raises UserError."""
    layout = LAYOUTS[task]
    splits = {}
    for name, files in layout.files.items():
        parts = [read_file(find(folder, file), layout, str(i)) for i, file in enumerate(files)]
        splits[name] = in_order(sum(parts, []))
    counts = Counter(splits["train"].labels.tolist())
    needed = 2 * folds  # so that each of the inner folds has one, whatever the outer fold takes
    if len(counts) < 2 or min(counts.values()) < needed:
        found = ", ".join(f"{count} of class {label}" for label, count in counts.items())
        advice = f"{folds} folds need two classes or more, with {needed} each"
        raise UserError(f"{task}: its training set has {found}; {advice}")
    return splits


def in_order(rows):
    """Rows -> Split, in SentEval's order: by number of words, then by label."""
    rows = sorted(rows, key=lambda row: (len(row[0].split()), len(row[1].split()), row[2]))
    first, second, labels = zip(*rows)
    return Split([text or EMPTY for text in first], second, np.array(labels))


# ---- Scores --------------------------------------------------------------------------------------


def features(split, vector):
    """What a classifier sees, [n, D]; for pairs |u - v| and u o v side by side, [n, 2 D].

    vector {sentence: [D]}.
    """
    first = np.stack([vector[text] for text in split.first])
    if not split.second[0]:
        return first
    second = np.stack([vector[text] for text in split.second])
    return np.hstack([np.abs(first - second), first * second])


def stratified(folds):
    return StratifiedKFold(folds, shuffle=True, random_state=SEED)


def chosen_by_folds(strengths, folds):
    """A classifier with the C whose accuracy is best over the folds; of equals, the smallest."""
    return GridSearchCV(LogisticRegression(max_iter=1000), {"C": strengths}, cv=stratified(folds))


def score(task, splits, vector, folds):
    """Accuracy of a task, and for MRPC F1 -> {name: percent}.

    splits: from read_task(); vector {sentence: [D]}.
    """
    x = {name: features(split, vector) for name, split in splits.items()}
    y = {name: split.labels for name, split in splits.items()}
    if "test" not in splits:  # MR, CR, SUBJ, MPQA
        model = chosen_by_folds(STRENGTHS, folds)
        accuracies = cross_val_score(model, x["train"], y["train"], cv=stratified(folds))
        return {task: 100 * float(accuracies.mean())}
    if "dev" in splits:  # SST-2
        models = [LogisticRegression(C=strength, max_iter=1000) for strength in STRENGTHS]
        models = [model.fit(x["train"], y["train"]) for model in models]
        model = max(models, key=lambda model: model.score(x["dev"], y["dev"]))
    else:  # TREC, MRPC
        model = chosen_by_folds(STRENGTHS_OF_TRAINING_FOLDS, folds).fit(x["train"], y["train"])
    predicted = model.predict(x["test"])
    scores = {task: 100 * float((predicted == y["test"]).mean())}
    if task == "MRPC":
        scores["MRPC F1"] = 100 * float(f1_score(y["test"], predicted, pos_label="1"))
    return scores


# ---- Command line --------------------------------------------------------------------------------


def score_model(name, encoder, embed, tasks, folds):
    """-> {task: percent}, and "avg" if all tasks are there. tasks {task: {split: Split}}."""
    splits = [split for task in tasks.values() for split in task.values()]
    texts = sorted({text for split in splits for text in (*split.first, *split.second)} - {""})
    vector = dict(zip(texts, encode(embed, encoder, texts)))
    scores = {}
    for task in tqdm(tasks, f"{name}: classifiers", leave=False, **BAR):
        with threadpool_limits(1):  # on matrices of this size ten times as fast as two threads
            scores |= score(task, tasks[task], vector, folds)
    if set(TASKS) <= set(scores):
        scores["avg"] = float(np.mean([scores[task] for task in TASKS]))
    return scores


def parse_args():
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="folder or Hub name")
    add("--senteval", default="senteval.tar", help="its folder or tar file (default: %(default)s)")
    some = f"some of {','.join(TASKS)} (default: all)"
    add("--tasks", type=lambda text: text.split(","), default=TASKS, help=some)
    fast = "SentEval's fast setting has 5 (default: %(default)s)"
    add("--folds", type=number(int, 2, 100), default=10, help=fast)
    add("--pooling", choices=POOLINGS, help="of all models (default: as a folder states, or mean)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=("cuda", "cpu"), default=device, help="(default: %(default)s)")
    add("--json", metavar="FILE", help="write the scores as JSON")
    args = parser.parse_args()
    if not set(args.tasks) <= set(TASKS):
        raise UserError(f"--tasks {','.join(args.tasks)}: choose from {','.join(TASKS)}")
    if args.json is not None:
        refuse_overwriting(args.json, args.senteval, *args.models)
    return args


def main():
    args = parse_args()
    folder = resolve_data(args.senteval)
    tasks = {task: read_task(folder, task, args.folds) for task in args.tasks}
    rows = {}
    for name in args.models:
        encoder, embed = load(name, args.pooling)
        encoder.to(args.device)
        rows[name] = score_model(name, encoder, embed, tasks, args.folds)
    print(table(rows))
    if args.json is not None:
        write_json(Path(args.json), rows)


if __name__ == "__main__":
    run_main(main)
