"""Score sentence encoders on SentEval's transfer tasks: a linear model on frozen embeddings.

  MR, CR, SUBJ, MPQA   accuracy, the mean over 10 folds; 10 folds of the rest choose the penalty
  TREC, MRPC           accuracy on test, for MRPC also F1; 10 folds of train choose the penalty
  SST-2, SICK-E        accuracy on test; the dev set chooses the penalty
  SNLI                 accuracy on test; without a penalty
  SICK-R, STS-B        Pearson and Spearman of a regression on test; the dev set ends its training

The first seven are the default. All scores are in percent; "avg" is the mean of these seven
accuracies. "DSE avg" is the mean of DSE's Table 2: all but SNLI, where MRPC counts as the mean of
accuracy and F1, STS-B as the mean of Pearson and Spearman, and SICK-R as Pearson.

The protocol is that of SentEval (Conneau and Kiela, arXiv:1803.05449): its penalties, folds, seed
and order of rows, from which folds and batches are drawn. On CR, another order moves the score by
half a point. SentEval has two classifiers:

  pytorch   a linear layer trained by Adam: SentEval's default, and what the papers report, as
            they follow SimCSE
  sklearn   scikit-learn's logistic regression (SentEval's usepytorch=False): the default here, as
            it takes a fraction of the time

  python -m extras.eval_transfer runs/ckd sentence-transformers/all-MiniLM-L6-v2
  python -m extras.eval_transfer runs/ckd --tasks MR,TREC --folds 5
  python -m extras.eval_transfer runs/ckd --tasks SICK-R,SICK-E,STS-B --classifier pytorch
"""

import copy
import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import pearsonr, spearmanr
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.model_selection import StratifiedKFold
from threadpoolctl import threadpool_limits
from torch import nn
from tqdm import tqdm

from common import BAR, POOLINGS, ArgumentParser, UserError, number, one_line_errors, run_main
from common import encode, resolve_data, table, write_json
from eval_sts import load

SEED = 1111  # SentEval's
EMPTY = "."  # SentEval's sentence for a blank line

# ---- Files ---------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """How a task is stored."""

    files: dict  # {split: files}; "a b c": three files, side by side, are the columns of one
    line: str  # what a line has, in words
    pattern: str  # the same as a regular expression with the groups first, second and label
    classes: tuple = ("0", "1")  # as SentEval numbers them; empty: labels are scores
    header_lines: int = 0
    encoding: str = "utf-8-sig"


class Split(NamedTuple):
    """n sentences, or pairs of sentences, with their labels."""

    first: list
    second: list  # empty strings where the task has single sentences
    labels: np.ndarray  # [n], number of the class or score


def polarity(*files):
    """A task with one file for each of its two classes."""
    return Layout({"train": files}, "one sentence per line", r"(?P<first>.*)")


def sick(label, classes):
    """One of the two tasks of SICK. label: a regular expression of the last two columns."""
    names = dict(train="SICK_train", dev="SICK_trial", test="SICK_test_annotated")
    return Layout(
        {split: [f"SICK/{name}.txt"] for split, name in names.items()},
        "number, two sentences, score from 1 to 5, judgment, separated by tabs",
        r"\d+\t(?P<first>[^\t]+)\t(?P<second>[^\t]+)\t" + label,
        classes,
        header_lines=1,
    )


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
        ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM"),
        encoding="latin-1",
    ),
    "MRPC": Layout(
        {"train": ["MRPC/msr_paraphrase_train.txt"], "test": ["MRPC/msr_paraphrase_test.txt"]},
        "0 or 1, two numbers, two sentences, separated by tabs",
        r"(?P<label>[01])\t\d+\t\d+\t(?P<first>[^\t]+)\t(?P<second>[^\t]+)",
        header_lines=1,
    ),
    "SICK-R": sick(r"(?P<label>[1-4](\.\d+)?|5(\.0+)?)\t[A-Z]+", ()),
    "SICK-E": sick(
        r"[\d.]+\t(?P<label>CONTRADICTION|NEUTRAL|ENTAILMENT)",
        ("CONTRADICTION", "NEUTRAL", "ENTAILMENT"),
    ),
    "STS-B": Layout(
        {split: [f"STS/STSBenchmark/sts-{split}.csv"] for split in ("train", "dev", "test")},
        "four columns, score from 0 to 5, two sentences, separated by tabs",
        r"([^\t]*\t){4}(?P<label>[0-4](\.\d+)?|5(\.0+)?)"
        r"\t(?P<first>[^\t]+)\t(?P<second>[^\t]+)(\t.*)?",
        classes=(),
    ),
    "SNLI": Layout(
        {s: [f"SNLI/s1.{s} SNLI/s2.{s} SNLI/labels.{s}"] for s in ("train", "dev", "test")},
        "a sentence in s1, a sentence in s2, entailment, neutral or contradiction in labels",
        r"(?P<first>[^\t]*)\t(?P<second>[^\t]*)\t(?P<label>entailment|neutral|contradiction)",
        ("entailment", "neutral", "contradiction"),
        encoding="latin-1",
    ),
}
TASKS = ("MR", "CR", "SUBJ", "MPQA", "SST-2", "TREC", "MRPC")  # of "avg"
TASKS_OF_DSE = (*TASKS, "SICK-R", "SICK-E", "STS-B")


def find(folder, file):
    """A file of SentEval, in its folder or in one above it -> Path. Raises UserError."""
    found = sorted(Path(folder).rglob(file))
    if found:
        return found[0]
    if file.startswith("SNLI/"):
        advice = "SentEval's get_transfer_data.bash makes it; without it, leave SNLI out of --tasks"
    else:
        advice = "give SentEval's folder or tar file"
    raise UserError(f"{folder}: no {file} in it; {advice}")


def read_lines(path, encoding):
    return path.read_bytes().decode(encoding).removesuffix("\n").split("\n")


def read_file(paths, layout, label):
    """-> [(first, second, label)]. label: where lines have none. Raises UserError.

    paths: one file, or several whose lines are joined by tabs.
    """
    rows = []
    with one_line_errors(paths[-1], f"a line of this file is: {layout.line}") as place:
        columns = [read_lines(path, layout.encoding) for path in paths]
        if len({len(column) for column in columns}) > 1:
            raise ValueError(f"not as many lines as in {paths[0].name} or {paths[1].name}")
        for place.line, line in enumerate(zip(*columns), 1):
            if place.line <= layout.header_lines:
                continue
            row = re.fullmatch(layout.pattern, "\t".join(cell.strip() for cell in line))
            if row is None:
                raise ValueError("the line does not have this form")
            fields = dict(second="", label=label) | row.groupdict()
            rows.append((fields["first"].split(), fields["second"].split(), fields["label"]))
        if not rows:
            raise ValueError("there is only a header")
    return rows


def read_task(folder, task):
    """-> {split: Split}: "train" and, where a task has them, "dev" and "test". Raises UserError."""
    layout = LAYOUTS[task]
    splits = {}
    for split, files in layout.files.items():
        rows = []
        for i, names in enumerate(files):
            paths = [find(folder, name) for name in names.split()]
            rows += read_file(paths, layout, str(i))
        splits[split] = in_order(task, rows)
    return splits


def in_order(task, rows):
    """Rows -> Split, in SentEval's order: by numbers of words, then by label."""
    classes = LAYOUTS[task].classes

    def value(label):
        return classes.index(label) if classes else float(label)

    def key(row):
        first, second, label = row
        if task == "SNLI":
            return len(second), len(first), label  # by the label's name
        return len(first), len(second), value(label)

    first, second, labels = zip(*sorted(rows, key=key))
    no_text = EMPTY if any(second) else ""
    return Split(
        [" ".join(words) or EMPTY for words in first],
        [" ".join(words) or no_text for words in second],
        np.array([value(label) for label in labels]),
    )


# ---- Classifiers ---------------------------------------------------------------------------------


def penalties(classifier, task):
    """What SentEval chooses from: the inverse penalty C (sklearn) or Adam's decay (pytorch)."""
    if classifier == "pytorch":
        return [1e-9] if task == "SNLI" else [1e-5, 1e-4, 1e-3, 1e-2]
    if task == "SNLI":
        return [1e9]
    powers = range(-1, 6) if task in ("TREC", "MRPC") else range(-2, 4)
    return [2.0**power for power in powers]


def fit_sklearn(x, y, strength, held_out=None):
    """Logistic regression on x [n, D], y [n] -> a function from [m, D] to classes [m]."""
    return LogisticRegression(C=strength, max_iter=1000).fit(x, y).predict


def fit_pytorch(x, y, decay, held_out=None, epochs=4, most_epochs=200):
    """The same by train(). held_out (x, y) ends it; without it, a twentieth of x and y does."""
    random = start()
    model = nn.Linear(x.shape[1], int(y.max()) + 1)
    if held_out is None:
        rows = random.permutation(len(x))
        some, others = np.split(rows, [int(0.05 * len(x))])
        held_out = x[some], y[some]
        x, y = x[others], y[others]

    def predict(model, x):
        return apply(model, x).argmax(axis=1)

    def score(model):
        return accuracy(partial(predict, model), *held_out)

    y = torch.from_numpy(y)
    model = train(model, F.cross_entropy, x, y, score, random, decay, epochs, most_epochs, stalls=5)
    return partial(predict, model)


def start():
    """Seed what draws a model's first weights -> the generator that draws the batches."""
    torch.manual_seed(SEED)
    return np.random.RandomState(SEED)


def apply(model, x):
    with torch.no_grad():
        return model(torch.from_numpy(x)).numpy()


def train(model, loss, x, y, score, random, decay, epochs, most_epochs, stalls):
    """Train by Adam in batches of 64 -> the model as it was when score(model) was highest.

    The score is taken every so many epochs. Training ends after most_epochs, or when the score has
    failed to rise more than `stalls` times, in a row or not.
    """
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=decay, fused=True)
    x = torch.from_numpy(x)
    best, best_score = model, -1
    for _ in range(0, most_epochs + 1, epochs):  # SentEval starts once more at most_epochs
        for _ in range(epochs):
            for rows in torch.from_numpy(random.permutation(len(x))).split(64):
                optimizer.zero_grad()
                loss(model(x[rows]), y[rows]).backward()
                optimizer.step()
        new_score = score(model)
        if new_score > best_score:
            best, best_score = copy.deepcopy(model), new_score
        else:
            stalls -= 1
            if stalls < 0:
                break
    return best


# ---- Scores --------------------------------------------------------------------------------------


def features(task, split, vector):
    """What a model sees. vector {sentence: [D]}.

    [n, D]; for pairs |u - v| and u o v side by side, [n, 2 D]; for SNLI u and v before them and in
    the order u, v, u o v, |u - v|, [n, 4 D].
    """
    first = np.stack([vector[text] for text in split.first])
    if not split.second[0]:
        return first
    second = np.stack([vector[text] for text in split.second])
    difference, product = np.abs(first - second), first * second
    if task == "SNLI":
        return np.hstack([first, second, product, difference])
    return np.hstack([difference, product])


def accuracy(predict, x, y):
    return float((predict(x) == y).mean())


def folds_of(x, y, folds):
    """Yield ((x, y) of the rest, (x, y) of the fold)."""
    for rest, fold in StratifiedKFold(folds, shuffle=True, random_state=SEED).split(x, y):
        yield (x[rest], y[rest]), (x[fold], y[fold])


def best_of(choices, fit, pairs):
    """The penalty with the best mean accuracy, to two decimals; of equals, the first.

    pairs: ((x, y) to fit, (x, y) to score), ...
    """
    if len(choices) == 1:
        return choices[0]
    found = [[accuracy(fit(*a, choice, b), *b) for choice in choices] for a, b in pairs]
    return choices[int(np.round(100 * np.mean(found, axis=0), 2).argmax())]


def score(task, splits, vector, folds=10, classifier="sklearn"):
    """A task's accuracy, for MRPC also F1, or Pearson and Spearman -> {name: percent}.

    splits: from read_task(); vector {sentence: [D]}.
    """
    data = {name: (features(task, part, vector), part.labels) for name, part in splits.items()}
    if not LAYOUTS[task].classes:
        return score_regression(task, data)
    fit = fit_pytorch if classifier == "pytorch" else fit_sklearn
    if (task, classifier) == ("SNLI", "pytorch"):
        fit = partial(fit_pytorch, epochs=1, most_epochs=15)
    choices = penalties(classifier, task)
    if "test" not in splits:  # MR, CR, SUBJ, MPQA
        accuracies = []
        for rest, fold in folds_of(*data["train"], folds):
            penalty = best_of(choices, fit, folds_of(*rest, folds))
            accuracies.append(accuracy(fit(*rest, penalty), *fold))
        return {task: 100 * float(np.mean(accuracies))}
    if "dev" in splits:  # SST-2, SICK-E, SNLI
        penalty = best_of(choices, fit, [(data["train"], data["dev"])])
    else:  # TREC, MRPC
        penalty = best_of(choices, fit, folds_of(*data["train"], folds))
    predict = fit(*data["train"], penalty, data.get("dev"))
    scores = {task: 100 * accuracy(predict, *data["test"])}
    if task == "MRPC":
        x, y = data["test"]
        scores["MRPC F1"] = 100 * float(f1_score(y, predict(x)))
    return scores


def shares(scores):
    """Scores [n] -> [n, 5], float32: 3.3 is 0.7 of a 3 and 0.3 of a 4.

    Below 1 nothing replaces the missing 0: a score of 0.4 is 0.4 of a 1, and no more.
    """
    distances = np.abs(scores[:, None] - np.arange(1, 6))
    return np.clip(1 - distances, 0, None).astype(np.float32)


def predicted_scores(model, x):
    """-> [n]: the five classes' probabilities times 1 to 5."""
    return apply(model, x) @ np.arange(1, 6)


def score_regression(task, data):
    """-> {task: Pearson, task + " Spearman": Spearman}, in percent. data {split: (x, y)}.

    A linear layer with softmax, whose squared distance from shares() is minimized.
    """
    random = start()
    x, y = data["train"]
    model = nn.Sequential(nn.Linear(x.shape[1], 5), nn.Softmax(dim=-1))

    def correlation(function, model, split):
        x, y = data[split]
        return float(np.nan_to_num(function(predicted_scores(model, x), y).statistic))

    def score(model):
        return correlation(pearsonr, model, "dev")

    y = torch.from_numpy(shares(y))
    model = train(model, F.mse_loss, x, y, score, random, 0, epochs=50, most_epochs=1000, stalls=3)
    return {
        task: 100 * correlation(pearsonr, model, "test"),
        f"{task} Spearman": 100 * correlation(spearmanr, model, "test"),
    }


# ---- Command line --------------------------------------------------------------------------------


def with_means(scores):
    """Scores and the means for which all tasks are there."""
    means = {}
    if set(TASKS) <= set(scores):
        means["avg"] = float(np.mean([scores[task] for task in TASKS]))
    if set(TASKS_OF_DSE) <= set(scores):
        columns = {task: scores[task] for task in TASKS_OF_DSE}
        columns["MRPC"] = (scores["MRPC"] + scores["MRPC F1"]) / 2
        columns["STS-B"] = (scores["STS-B"] + scores["STS-B Spearman"]) / 2
        means["DSE avg"] = float(np.mean(list(columns.values())))
    return scores | means


def score_model(name, encoder, embed, tasks, folds, classifier):
    """-> {name: percent} of score() and with_means(). tasks {task: {split: Split}}."""
    splits = [split for task in tasks.values() for split in task.values()]
    texts = sorted({text for split in splits for text in (*split.first, *split.second)} - {""})
    vector = dict(zip(texts, encode(embed, encoder, texts)))
    scores = {}
    for task in tqdm(tasks, f"{name}: classifiers", leave=False, **BAR):
        with threadpool_limits(1):  # on matrices of this size ten times as fast as two threads
            scores |= score(task, tasks[task], vector, folds, classifier)
    return with_means(scores)


def parse_args():
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="folder or Hub name")
    add("--senteval", default="senteval.tar", help="its folder or tar file (default: %(default)s)")
    some = f"all, or some of {','.join(LAYOUTS)} (default: the first seven)"
    add("--tasks", type=lambda text: text.split(","), default=TASKS, help=some)
    two = "pytorch: the papers' (default: %(default)s)"
    add("--classifier", choices=("sklearn", "pytorch"), default="sklearn", help=two)
    fast = "SentEval's fast setting has 5 (default: %(default)s)"
    add("--folds", type=number(int, 2, 100), default=10, help=fast)
    add("--pooling", choices=POOLINGS, help="of all models (default: as a folder states, or mean)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=("cuda", "cpu"), default=device, help="(default: %(default)s)")
    add("--json", metavar="FILE", help="write the scores as JSON")
    args = parser.parse_args()
    if args.tasks == ["all"]:
        args.tasks = list(LAYOUTS)
    if not set(args.tasks) <= set(LAYOUTS):
        raise UserError(f"--tasks {','.join(args.tasks)}: choose from {','.join(LAYOUTS)}, or all")
    return args


def main():
    args = parse_args()
    folder = resolve_data(args.senteval)
    tasks = {task: read_task(folder, task) for task in args.tasks}
    rows = {}
    for name in args.models:
        encoder, embed = load(name, args.pooling)
        encoder.to(args.device)
        rows[name] = score_model(name, encoder, embed, tasks, args.folds, args.classifier)
    print(table(rows))
    if args.json:
        write_json(Path(args.json), rows)


if __name__ == "__main__":
    run_main(main)
