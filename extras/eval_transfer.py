# SPDX-License-Identifier: MIT
"""Score sentence encoders on SentEval's transfer tasks: a linear model on frozen embeddings.

  MR, CR, SUBJ, MPQA   accuracy, the mean over 10 folds; in each, 10 folds of the rest choose C
  TREC, MRPC           accuracy on test, for MRPC also F1; 10 folds of the training set choose C
  SST-2, SICK-E, SNLI  accuracy on test; the dev set chooses C, but SNLI has no penalty
  SICK-R, STS-B        Pearson and Spearman of a regression on test; the dev set ends its training

All in percent. "avg" is the mean accuracy of the default tasks, MR to MRPC. "DSE avg" is that of
DSE's Table 2: of all tasks but SNLI, with the means of MRPC's and of STS-B's two scores.

The protocol is SentEval's (Conneau and Kiela, arXiv:1803.05449): penalties, folds, seed, order of
rows. --classifier pytorch is SentEval's default, a linear layer trained by Adam, which SimCSE and
the papers that follow it use. sklearn is its logistic regression (usepytorch=False), the default
here: it takes a fraction of the time.

  python -m extras.eval_transfer runs/ckd sentence-transformers/all-MiniLM-L6-v2
  python -m extras.eval_transfer runs/dse --tasks SICK-R,SICK-E,STS-B --classifier pytorch
"""

import re
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

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

from common import BAR, SENTEVAL, UserError, chunks, encode, one_line_errors, resolve_data
from common import Device, Pooling, in_range, read_options, run_main, table, write_json
from eval_sts import load

SEED = 1111  # SentEval's
EMPTY = "."  # SentEval's sentence for a blank line
FIVE = torch.arange(1, 6).double()  # the classes of a regression
TASKS = ("MR", "CR", "SUBJ", "MPQA", "SST-2", "TREC", "MRPC")  # of "avg"
TASKS_OF_DSE = (*TASKS, "SICK-R", "SICK-E", "STS-B")  # of "DSE avg"


class Options:
    models: list  # folders, or names on the Hub
    senteval: str = SENTEVAL  # its folder or tar file
    tasks: str = ",".join(TASKS)  # all, or some of these and of SICK-R,SICK-E,STS-B,SNLI
    classifier: Literal["sklearn", "pytorch"] = "sklearn"  # papers: pytorch
    folds: in_range(int, 2, 100) = 10  # fast: 5
    pooling: Pooling = None  # of all models (default: as a folder states, or mean)
    device: Device = None  # (default: cuda if there is one)
    json: str = None  # a file for the scores


# ---- Files ---------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """How a task is stored."""

    files: dict  # {split: names}; "a b c": three files, side by side, are the columns of one
    columns: str  # names; those used are first, second and label
    classes: str = "0 1"  # without labels, the first file is "0"; empty: scores from 0 to 5
    header_lines: int = 0
    encoding: str = "utf-8-sig"
    separator: str = "\t"  # a regular expression


class Split(NamedTuple):
    """n sentences, or pairs of sentences, with their labels."""

    first: list
    second: list  # empty strings where the task has single sentences
    labels: np.ndarray  # [n], numbers of classes, or scores


def polarity(*files):
    """A task with one file for each of its two classes."""
    return Layout({"train": files}, "first", separator="\n")


def files(form, **names):
    return {split: [form.format(name)] for split, name in names.items()}


THREE = dict(train="train", dev="dev", test="test")
TREC = files("TREC/{}.label", train="train_5500", test="TREC_10")
MRPC = files("MRPC/msr_paraphrase_{}.txt", train="train", test="test")
SICK = files("SICK/SICK_{}.txt", train="train", dev="trial", test="test_annotated")
STS = files("STS/STSBenchmark/sts-{}.csv", **THREE)
SNLI = files("SNLI/s1.{0} SNLI/s2.{0} SNLI/labels.{0}", **THREE)
LAYOUTS = {
    "MR": polarity("MR/rt-polarity.neg", "MR/rt-polarity.pos"),
    "CR": polarity("CR/custrev.neg", "CR/custrev.pos"),
    "SUBJ": polarity("SUBJ/subj.subjective", "SUBJ/subj.objective"),
    "MPQA": polarity("MPQA/mpqa.neg", "MPQA/mpqa.pos"),
    "SST-2": Layout(files("SST/binary/sentiment-{}", **THREE), "first label"),
    "TREC": Layout(TREC, "label kind first", "ABBR DESC ENTY HUM LOC NUM", 0, "latin-1", "[: ]"),
    "MRPC": Layout(MRPC, "label id id first second", header_lines=1),
    "SICK-R": Layout(SICK, "id first second label judgment", "", 1),
    "SICK-E": Layout(SICK, "id first second score label", "CONTRADICTION NEUTRAL ENTAILMENT", 1),
    "STS-B": Layout(STS, "genre file year id label first second", ""),
    "SNLI": Layout(SNLI, "first second label", "contradiction entailment neutral", 0, "latin-1"),
}


def find(folder, file):
    """A file of SentEval, in its folder or in one above it -> Path. Raises UserError."""
    found = sorted(Path(folder).rglob(file))
    if not found:
        advice = "give SentEval's folder or tar file, or leave this task out of --tasks"
        raise UserError(f"{folder}: no {file} in it; {advice}")
    return found[0]


def read_file(paths, layout, label):
    """One file, or several side by side -> [(words, words, label)]. label: if lines have none."""
    form = f"its columns are: {layout.columns}"
    with one_line_errors(paths[-1], form):
        texts = [path.read_bytes().decode(layout.encoding) for path in paths]
        columns = [text.removesuffix("\n").split("\n") for text in texts]
        lines = list(zip(*columns, strict=True))[layout.header_lines :]
        if not lines:
            raise ValueError("there is only a header")
    rows = []
    for number, cells in enumerate(lines, layout.header_lines + 1):
        with one_line_errors(f"{paths[-1]}:{number}", form):
            rows.append(read_line("\t".join(map(str.strip, cells)), layout, label))
    return rows


def read_line(line, layout, label):
    """-> (words, words, label). Raises ValueError."""
    names = layout.columns.split()
    classes = layout.classes.split()
    cells = re.split(layout.separator, line, maxsplit=len(names) - 1)
    if len(cells) < len(names):
        raise ValueError("the line does not have all columns")
    row = dict(second="", label=label) | dict(zip(names, cells))
    value = classes.index(row["label"]) if classes else float(row["label"])
    if not 0 <= value <= 5:
        raise ValueError(f"{value} is not a score from 0 to 5")
    return row["first"].split(), row["second"].split(), value


def read_task(folder, task):
    """-> {split: Split}: "train" and, where a task has them, "dev" and "test". Raises UserError.

    In SentEval's order: by numbers of words (in SNLI, those of the second first), then by label.
    """
    layout = LAYOUTS[task]
    splits = {}
    for split, tables in layout.files.items():
        rows = []
        for i, names in enumerate(tables):
            rows += read_file([find(folder, name) for name in names.split()], layout, str(i))
        rows.sort(key=lambda row: (len(row[0]), len(row[1]), row[2]))
        if task == "SNLI":
            rows.sort(key=lambda row: (len(row[1]), len(row[0]), row[2]))
        first, second, labels = zip(*rows)
        if task == "SNLI":  # SentEval sorts by name, and numbers from entailment on
            labels = [(2, 0, 1)[label] for label in labels]
        blank = EMPTY if any(second) else ""
        first = [" ".join(words) or EMPTY for words in first]
        second = [" ".join(words) or blank for words in second]
        splits[split] = Split(first, second, np.array(labels))
    return splits


# ---- Models and scores ---------------------------------------------------------------------------


def fit_sklearn(x, y, strength, held_out=None):
    """-> a function from x [n, D] to classes [n].

    SentEval stops after 100 iterations, scikit-learn's default, on some tasks before convergence.
    """
    return LogisticRegression(C=strength, max_iter=1000).fit(x, y).predict


def fit_pytorch(x, y, decay, held_out=None, rounds=51, epochs=4, stalls=5):
    """A linear layer trained by Adam -> a function from x [n, D] to classes or scores [n].

    The best of its rounds, of so many epochs each, is kept: on held_out (x, y), or on a twentieth
    of x and y. `stalls` rounds, in a row or not, may bring no progress; the next ends the training.
    """
    random = np.random.RandomState(SEED)
    torch.manual_seed(SEED)
    regression = y.dtype == float
    model = nn.Linear(x.shape[1], 5 if regression else int(y.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=decay, fused=True)
    loss = squared_error if regression else F.cross_entropy
    quality = pearson if regression else accuracy
    if held_out is None:
        some, others = np.split(random.permutation(len(x)), [max(1, len(x) // 20)])
        held_out, x, y = (x[some], y[some]), x[others], y[others]
    x, y = torch.from_numpy(x), torch.from_numpy(y)

    @torch.no_grad()
    def predict(x):
        logits = model(torch.from_numpy(x))
        if regression:
            return (logits.softmax(dim=-1).double() @ FIVE).numpy()
        return logits.argmax(dim=-1).numpy()

    best = -np.inf
    for _ in range(rounds):
        for _ in range(epochs):
            for rows in torch.from_numpy(random.permutation(len(x))).split(64):
                optimizer.zero_grad()
                loss(model(x[rows]), y[rows]).backward()
                optimizer.step()
        reached = quality(predict(held_out[0]), held_out[1])
        if reached > best:
            best, weights = reached, {k: v.clone() for k, v in model.state_dict().items()}
        elif stalls == 0:
            break
        else:
            stalls -= 1
    model.load_state_dict(weights)
    return predict


def squared_error(logits, scores):
    """A score's target is its share of each of five classes: 3.3 is 0.7 of a 3, 0.3 of a 4."""
    shares = (1 - (scores[:, None] - FIVE).abs()).clamp(min=0)  # those of 0.4: 0.4 of a 1, no more
    return F.mse_loss(logits.softmax(dim=-1), shares.float())


def accuracy(predicted, y):
    return 100 * float((predicted == y).mean())


def pearson(predicted, y):
    return 100 * float(np.nan_to_num(pearsonr(predicted, y).statistic))


def fit_for(task, classifier):
    """-> fit(), and the penalties that SentEval tries: C for sklearn, Adam's decay for pytorch."""
    if not LAYOUTS[task].classes:  # 1,050 epochs: at its limit of 1,000 a last round starts
        return partial(fit_pytorch, rounds=21, epochs=50, stalls=3), [0]
    if classifier == "pytorch" and task == "SNLI":
        return partial(fit_pytorch, rounds=16, epochs=1), [1e-9]
    if classifier == "pytorch":
        return fit_pytorch, [1e-5, 1e-4, 1e-3, 1e-2]
    powers = range(-1, 6) if task in ("TREC", "MRPC") else range(-2, 4)
    return fit_sklearn, [1e9] if task == "SNLI" else [2.0**power for power in powers]


def features(task, split, vector):
    """-> [n, D], pairs [n, 2 D] or, for SNLI, [n, 4 D]. vector {sentence: [D]}."""
    u = np.stack([vector[text] for text in split.first])
    if not split.second[0]:
        return u
    v = np.stack([vector[text] for text in split.second])
    return np.hstack([u, v, u * v, abs(u - v)] if task == "SNLI" else [abs(u - v), u * v])


def folds_of(x, y, folds):
    """Yield (x, y) of the rest and (x, y) of the fold."""
    for rest, fold in StratifiedKFold(folds, shuffle=True, random_state=SEED).split(x, y):
        yield (x[rest], y[rest]), (x[fold], y[fold])


def best_of(penalties, fit, pairs):
    """The first with the best mean accuracy, to two decimals. pairs: (x, y) to fit and to score."""
    if len(penalties) == 1:
        return penalties[0]
    found = []
    for fitted, scored in pairs:
        predictors = [fit(*fitted, penalty, scored) for penalty in penalties]
        found.append([accuracy(predict(scored[0]), scored[1]) for predict in predictors])
    return penalties[int(np.mean(found, axis=0).round(2).argmax())]


def score(task, splits, vector, folds=10, classifier="sklearn"):
    """-> {name: percent}. splits: from read_task(); vector {sentence: [D]}."""
    data = {name: (features(task, split, vector), split.labels) for name, split in splits.items()}
    fit, penalties = fit_for(task, classifier)
    if "test" not in data:  # MR, CR, SUBJ, MPQA
        accuracies = []
        for rest, (x, y) in folds_of(*data["train"], folds):
            penalty = best_of(penalties, fit, folds_of(*rest, folds))
            accuracies.append(accuracy(fit(*rest, penalty)(x), y))
        return {task: float(np.mean(accuracies))}
    dev = data.get("dev")  # not in TREC, MRPC
    pairs = [(data["train"], dev)] if dev else folds_of(*data["train"], folds)
    penalty = best_of(penalties, fit, pairs)
    x, y = data["test"]
    predicted = fit(*data["train"], penalty, dev)(x)
    if not LAYOUTS[task].classes:
        spearman = 100 * float(spearmanr(predicted, y).statistic)
        return {task: pearson(predicted, y), f"{task} Spearman": spearman}
    scores = {task: accuracy(predicted, y)}
    if task == "MRPC":
        scores["MRPC F1"] = 100 * float(f1_score(y, predicted))
    return scores


# ---- Command line --------------------------------------------------------------------------------


def score_model(name, encoder, embed, tasks, folds, classifier):
    """-> {name: percent}, and the means of which all tasks are there. tasks {task: read_task()}."""
    splits = [split for task in tasks.values() for split in task.values()]
    texts = sorted({text for split in splits for text in (*split.first, *split.second)} - {""})
    vector = {}
    for chunk in tqdm(chunks(texts, 1024), name, leave=False, delay=1, **BAR):
        vector |= zip(chunk, encode(embed, encoder, chunk))
    scores = {}
    for task in tqdm(tasks, f"{name}: classifiers", leave=False, **BAR):
        with threadpool_limits(1):  # on matrices of this size ten times as fast as two threads
            scores |= score(task, tasks[task], vector, folds, classifier)
    if set(TASKS) <= set(scores):
        scores["avg"] = float(np.mean([scores[task] for task in TASKS]))
    if set(TASKS_OF_DSE) <= set(scores):
        pairs = {"MRPC": scores["MRPC F1"], "STS-B": scores["STS-B Spearman"]}
        columns = [(scores[task] + pairs.get(task, scores[task])) / 2 for task in TASKS_OF_DSE]
        scores["DSE avg"] = float(np.mean(columns))
    return scores


def main():
    args = read_options(Options, __doc__)
    names = list(LAYOUTS) if args.tasks == "all" else args.tasks.split(",")
    if not {*names} <= LAYOUTS.keys():
        raise UserError(f"--tasks {args.tasks}: choose from {','.join(LAYOUTS)}, or all")
    folder = resolve_data(args.senteval)
    tasks = {task: read_task(folder, task) for task in names}
    rows = {}
    for name in args.models:
        encoder, embed = load(name, args.pooling)
        encoder.to(args.device)
        rows[name] = score_model(name, encoder, embed, tasks, args.folds, args.classifier)
    if args.json:
        write_json(Path(args.json), rows)
    print(table(rows))


if __name__ == "__main__":
    run_main(main)
