"""Score sentence encoders on SentEval's transfer tasks: a linear model on frozen embeddings.

  MR, CR, SUBJ, MPQA     accuracy, the mean over 10 folds; within each, 10 more folds choose C
  TREC, MRPC             accuracy, for MRPC also F1; 10 folds of the training set choose C
  SST-2, SICK-E, SNLI    accuracy; the dev set chooses C, but SNLI has no penalty
  SICK-R, STS-B          Pearson and Spearman x 100 of SentEval's relatedness model,
                         see relatedness()

All scores are in percent. SNLI is scored only where its training files are. "avg" is the average of
SimCSE and of most papers here: MR, CR, SUBJ, MPQA, SST-2, TREC, MRPC. "avg of 10" is that of DSE's
Table 2: all tasks but SNLI, with the mean of accuracy and F1 for MRPC, that of Pearson and Spearman
for STS-B.

The protocol is SentEval's with usepytorch off: scikit-learn's logistic regression with SentEval's
values of C, here in torch, for all folds and all values of C at once. With usepytorch on, SentEval
stops the training of the same model early and chooses among other penalties. The folds, and the
order of rows from which they are drawn, are SentEval's own: on CR another shuffle moves the score
by half a point.

--fast takes 5 folds instead of 10, as SentEval's prototyping configuration does. The other half of
that configuration, a coarser optimizer for fewer epochs, does not apply to a fit that converges.

  python eval_transfer.py runs/ckd sentence-transformers/all-MiniLM-L6-v2
  python eval_transfer.py runs/ckd --tasks MR,TREC --fast
  python eval_transfer.py bert-large-uncased --pooling concat_last4_no_cls
      DSE's Table 2, the row of BERT-Large
"""

import argparse
import re
import time
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import pearsonr, spearmanr
from torch import nn

from common import (
    SICK_COLUMNS,
    STS_BENCHMARK_COLUMNS,
    DataError,
    encode_sentences,
    find_senteval,
    progress,
    read_scored_pairs,
    resolve,
    table,
)
from support.command_line import (
    ArgumentParser,
    add_evaluation_options,
    run_main,
    write_report,
)
from support.encoder import POOLING_NAMES, load_encoder

TASKS = ("MR", "CR", "SUBJ", "MPQA", "SST-2", "TREC", "MRPC", "SICK-E", "SICK-R", "STS-B", "SNLI")
AVERAGE = ("MR", "CR", "SUBJ", "MPQA", "SST-2", "TREC", "MRPC")
AVERAGE_OF_10 = (*AVERAGE, "SICK-E", "SICK-R", "STS-B")
SECOND_SCORES = {"MRPC": "MRPC F1", "STS-B": "STS-B Spearman"}  # half of such a task's score there
RELATEDNESS = ("SICK-R", "STS-B")
FOLDS = 10
FAST_FOLDS = 5
SEED = 1111  # SentEval's, of folds and of the relatedness model

# SentEval's values of C, the inverse strength of the penalty
STRENGTHS = [2.0**power for power in range(-2, 4)]
STRENGTHS_OF_TRAINING_FOLDS = [2.0**power for power in range(-1, 6)]  # TREC, MRPC
NO_PENALTY = [1e9]  # SNLI

# --------------------------------------------------------------------------------------------------
# Readers
# --------------------------------------------------------------------------------------------------


class Split(NamedTuple):
    """n sentences, or pairs of sentences, with their labels."""

    first: list
    second: list | None
    labels: np.ndarray  # [n], class numbers; gold scores for a task of relatedness


class Layout(NamedTuple):
    """How a task is stored."""

    files: dict  # {split: path}
    line: str  # what a line contains, in words
    pattern: str  # the same as a regular expression with the groups first, second and label
    header_lines: int = 0


POLARITY_FILES = {  # class 0, class 1
    "MR": ("rt-polarity.neg", "rt-polarity.pos"),
    "CR": ("custrev.neg", "custrev.pos"),
    "MPQA": ("mpqa.neg", "mpqa.pos"),
    "SUBJ": ("subj.subjective", "subj.objective"),
}
SICK_FILES = {
    "train": "SICK/SICK_train.txt",
    "dev": "SICK/SICK_trial.txt",
    "test": "SICK/SICK_test_annotated.txt",
}
STS_BENCHMARK_FILES = {
    split: f"STS/STSBenchmark/sts-{split}.csv" for split in ("train", "dev", "test")
}
SNLI_LABELS = ("entailment", "neutral", "contradiction")
PAIR = r"(?P<first>[^\t]*)\t(?P<second>[^\t]*)"
LAYOUTS = {
    "SST-2": Layout(
        {split: f"SST/binary/sentiment-{split}" for split in ("train", "dev", "test")},
        "sentence, tab, 0 or 1",
        r"(?P<first>[^\t]*)\t(?P<label>[01])",
    ),
    "TREC": Layout(
        {"train": "TREC/train_5500.label", "test": "TREC/TREC_10.label"},
        "CLASS:kind question",
        r"(?P<label>ABBR|DESC|ENTY|HUM|LOC|NUM):\S+ (?P<first>.*)",
    ),
    "MRPC": Layout(
        {"train": "MRPC/msr_paraphrase_train.txt", "test": "MRPC/msr_paraphrase_test.txt"},
        "0 or 1, two numbers, two sentences, tab-separated",
        rf"(?P<label>[01])\t\d+\t\d+\t{PAIR}",
        header_lines=1,
    ),
    "SICK-E": Layout(
        SICK_FILES,
        "number, two sentences, score, ENTAILMENT, NEUTRAL or CONTRADICTION, tab-separated",
        rf"\d+\t{PAIR}\t[\d.]+\t(?P<label>ENTAILMENT|NEUTRAL|CONTRADICTION)",
        header_lines=1,
    ),
}


def read_lines(path):
    """A file of SentEval -> list of str. A line may be empty. Raises DataError.

    The files are UTF-8, except for a few lines of Latin-1.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}, expected SentEval's file") from None
    if not lines[-1]:
        lines.pop()
    return [decode(line) for line in lines]


def decode(line):
    try:
        return line.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        return line.decode("latin-1").strip()


def read_task(root, task):
    """SentEval's folder and the name of a task -> {split: Split}. Raises DataError.

    The splits are "train" and, where the task has them, "dev" and "test".
    """
    if task in POLARITY_FILES:
        return {"train": read_polarity(root / task, POLARITY_FILES[task])}
    if task == "SICK-R":
        return read_relatedness(root, SICK_FILES, SICK_COLUMNS)
    if task == "STS-B":
        return read_relatedness(root, STS_BENCHMARK_FILES, STS_BENCHMARK_COLUMNS)
    if task == "SNLI":
        files = {split: f"SNLI/labels.{split}" for split in ("train", "dev", "test")}
        splits = {split: read_snli(root / "SNLI", split) for split in files}
    else:
        files = LAYOUTS[task].files
        splits = {split: read_layout(root / files[split], LAYOUTS[task]) for split in files}
    return number_classes(splits, {split: root / file for split, file in files.items()})


def read_polarity(folder, files):
    negative, positive = (read_lines(folder / name) for name in files)
    for name, lines in zip(files, (negative, positive)):
        if not lines:
            raise DataError(f"{folder / name}: the file is empty, expected a sentence a line")
    labels = np.repeat([0, 1], [len(negative), len(positive)])
    return by_length(Split(negative + positive, None, labels))


def read_relatedness(root, files, columns):
    splits = {}
    for split, file in files.items():
        pairs = read_scored_pairs(root / file, columns)
        splits[split] = Split(pairs.first, pairs.second, np.array(pairs.scores))
    return splits


def read_snli(folder, split):
    """-> Split with the labels in words. Raises DataError."""
    first = read_lines(folder / f"s1.{split}")
    second = read_lines(folder / f"s2.{split}")
    path = folder / f"labels.{split}"
    labels = read_lines(path)
    expected = f"{SNLI_LABELS[0]}, {SNLI_LABELS[1]} or {SNLI_LABELS[2]}"
    expected += f", one for each line of s1.{split} and s2.{split}"
    for line, label in enumerate(labels, 1):
        if label not in SNLI_LABELS:
            raise DataError(f"{path}:{line}: expected {expected}")
    if not labels or not len(first) == len(second) == len(labels):
        raise DataError(f"{path}:{len(labels)}: expected {expected}")
    return Split(first, second, labels)


def read_layout(path, layout):
    """-> Split with the labels in words. Raises DataError."""
    rows = []
    lines = read_lines(path)[layout.header_lines :]
    for line, text in enumerate(lines, layout.header_lines + 1):
        row = re.fullmatch(layout.pattern, text)
        if row is None:
            raise DataError(f"{path}:{line}: expected {layout.line}")
        rows.append(row.groupdict())
    if not rows:
        raise DataError(f"{path}: no rows, expected {layout.line}")
    first = [row["first"] for row in rows]
    second = [row["second"] for row in rows] if "second" in rows[0] else None
    return Split(first, second, [row["label"] for row in rows])


def number_classes(splits, paths):
    """Labels in words -> their numbers in alphabetical order, and SentEval's order of rows.

    Raises DataError, also for a label that the training set does not have.
    """
    names = sorted(set(splits["train"].labels))
    if len(names) < 2:
        raise DataError(f"{paths['train']}: one class alone, expected two or more")
    numbered = {}
    for name, split in splits.items():
        unknown = sorted(set(split.labels) - set(names))
        if unknown:
            expected = f"one of the training set: {', '.join(names)}"
            raise DataError(f"{paths[name]}: label {unknown[0]!r}, expected {expected}")
        labels = np.array([names.index(label) for label in split.labels])
        numbered[name] = by_length(split._replace(labels=labels))
    return numbered


def by_length(split):
    """SentEval's order of rows, on which its folds depend: by number of words, then by label."""

    def key(i):
        words_of_second = len(split.second[i].split()) if split.second else 0
        return len(split.first[i].split()), words_of_second, split.labels[i]

    order = sorted(range(len(split.labels)), key=key)
    first = [split.first[i] for i in order]
    second = split.second and [split.second[i] for i in order]
    return Split(first, second, split.labels[order])


# --------------------------------------------------------------------------------------------------
# Linear models
# --------------------------------------------------------------------------------------------------


def logistic_regression(features, labels, rows, strengths):
    """P problems at once: each minimizes C sum(cross-entropy) + |w|^2 / 2, as scikit-learn does.

    features [n, D]; labels [n], class numbers; rows [n, P], 1 where a problem trains on a row,
    else 0; strengths, P values of C. Returns weights [K, D, P] and intercepts [K, 1, P]; K is the
    number of classes, or 1 if there are two.

    L-BFGS takes few steps where the curvature is about one in all directions. So the features are
    rotated to their principal axes, and each is divided by the root of its approximate second
    derivative: the variance times p (1 - p), p the share of the class, plus the penalty's own. The
    minimum stays where it is.
    """
    share = class_shares(labels)  # p, [K, 1, 1]
    bernoulli = share * (1 - share)
    strengths = torch.tensor(strengths, device=features.device)
    scale = 1 / rows.sum(dim=0)  # [P]
    mean = features.mean(dim=0)
    variance, axes = principal_axes(features - mean)
    rotated = (features - mean) @ axes  # [n, D]
    curvature = variance[:, None] * share * (1 - share) + scale / strengths  # [K, D, P]
    weight_unit = curvature.rsqrt()
    bias_unit = bernoulli.rsqrt()
    weights = torch.zeros_like(weight_unit, requires_grad=True)
    bias = torch.zeros_like(weight_unit[:, :1], requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights, bias],
        max_iter=500,
        history_size=20,
        tolerance_grad=1e-5,
        line_search_fn="strong_wolfe",
    )

    def objective():
        optimizer.zero_grad()
        unscaled = weight_unit * weights
        losses = cross_entropy(rotated @ unscaled + bias * bias_unit, labels)  # [n, P]
        penalty = unscaled.square().sum(dim=(0, 1)) / (2 * strengths)
        each = scale * ((rows * losses).sum(dim=0) + penalty)  # [P]
        total = each.double().sum()  # float32 would hide the last progress of a single problem
        total.backward()
        return total

    optimizer.step(objective)
    weights = axes @ (weight_unit * weights).detach()
    bias = (bias * bias_unit).detach()
    return weights, bias - (mean @ weights)[:, None]


def class_shares(labels):
    """Of the classes, for two of the second one alone: [K, 1, 1]."""
    share = torch.bincount(labels) / len(labels)
    if len(share) == 2:
        share = share[1:]
    return share[:, None, None]


def principal_axes(centered):
    """[n, D] -> variance along each axis [D], the axes as columns [D, D]."""
    variance, axes = torch.linalg.eigh(centered.T @ centered / len(centered))
    return variance.clamp(min=0), axes


def cross_entropy(scores, labels):
    """[K, n, P], [n] -> [n, P]."""
    if len(scores) == 1:
        return F.softplus((1 - 2 * labels[:, None]) * scores[0])
    index = torch.arange(len(labels), device=labels.device)
    return scores.logsumexp(dim=0) - scores[labels, index]


def predict(features, weights, bias):
    """[n, D] and what logistic_regression returns -> class numbers [n, P]."""
    scores = features @ weights + bias
    if len(scores) == 1:
        return (scores[0] > 0).long()
    return scores.argmax(dim=0)


def accuracy(predicted, labels):
    """[n, P], [n] -> [P], in percent."""
    return 100 * (predicted == labels[:, None]).float().mean(dim=0)


def f1(predicted, labels):
    """[n], [n], class numbers of two classes -> of class 1, in percent."""
    hits = int(((predicted == 1) & (labels == 1)).sum())
    return 200 * hits / max(1, int((predicted == 1).sum() + (labels == 1).sum()))


def folds(labels, k, seed=SEED):
    """The fold of each row, as scikit-learn's StratifiedKFold(k, shuffle=True, random_state=seed).

    labels [n] -> [n], 0 to k - 1.
    """
    random = np.random.RandomState(seed)
    fold = np.zeros(len(labels), int)
    classes = list(dict.fromkeys(labels.tolist()))  # in the order in which they appear
    counts = np.bincount([classes.index(label) for label in labels.tolist()])
    # The rows, sorted by class, are dealt to fold 0, 1, ...: this sets the size of each share.
    dealt = np.arange(len(classes)).repeat(counts)
    for number, label in enumerate(classes):
        sizes = [np.count_nonzero(dealt[i::k] == number) for i in range(k)]
        share = np.arange(k).repeat(sizes)
        random.shuffle(share)
        fold[labels == label] = share
    return fold


def chosen_by_folds(features, labels, strengths, k):
    """The model that is trained on all rows, with the value of C that is best over k folds.

    As in SentEval, the mean accuracies are rounded to two decimals, and the smallest C among equals
    is taken. Returns weights [K, D, 1] and intercept [K, 1, 1].
    """
    tried = len(strengths)
    fold = torch.from_numpy(folds(labels.cpu().numpy(), k)).to(labels.device)
    columns = [fold != i for i in range(k + 1) for _ in strengths]  # no row is in fold k
    rows = torch.stack(columns, dim=1).float()  # [n, (k + 1) tried]
    weights, bias = logistic_regression(features, labels, rows, strengths * (k + 1))
    predicted = predict(features, weights, bias).split(tried, dim=1)
    scores = [accuracy(predicted[i][fold == i], labels[fold == i]) for i in range(k)]
    means = torch.stack(scores).mean(dim=0)  # [tried]
    best = k * tried + int(means.round(decimals=2).argmax())
    return pick(weights, bias, best)


def chosen_by_dev(features, labels, dev_features, dev_labels, strengths):
    """The model with the value of C that is best on dev, as in chosen_by_folds."""
    rows = torch.ones(len(labels), len(strengths), device=labels.device)
    weights, bias = logistic_regression(features, labels, rows, strengths)
    best = int(accuracy(predict(dev_features, weights, bias), dev_labels).argmax())
    return pick(weights, bias, best)


def pick(weights, bias, problem):
    """One of P problems."""
    return weights[..., problem : problem + 1], bias[..., problem : problem + 1]


GRADES = 5
BATCH_SIZE = 64
EPOCHS_PER_EVALUATION = 50
EVALUATIONS = 21  # at most: 1,050 epochs
PATIENCE = 4  # evaluations without progress, which end the training


def relatedness(features, scores, seed=SEED):
    """SentEval's model of SICK-R and STS-B -> Pearson x 100, Spearman x 100 on test.

    features: {split: [n, D]}; scores: {split: [n]}, 0 to 5. A score is spread over its two
    neighbors among the grades 1 to 5 (Tai et al., 2015). A softmax over the grades is trained to
    the squared error by Adam. The evaluation with the best Pearson on dev counts.
    """
    torch.manual_seed(seed)
    device = features["train"].device
    grades = torch.arange(1, GRADES + 1, device=device)
    distance = (torch.tensor(scores["train"], device=device)[:, None] - grades).abs()
    target = (1 - distance).clamp(min=0).float()  # [n, 5]
    linear = nn.Linear(features["train"].shape[1], GRADES)
    model = nn.Sequential(linear, nn.Softmax(dim=1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def correlation(function, split):
        with torch.no_grad():
            predicted = model(features[split]) @ grades.float()
        return 100 * float(function(predicted.cpu().numpy(), scores[split]).statistic)

    best_dev = -1
    test = float("nan"), float("nan")
    idle = 0
    for _ in range(EVALUATIONS):
        for _ in range(EPOCHS_PER_EVALUATION):
            train_epoch(model, optimizer, features["train"], target)
        dev = correlation(pearsonr, "dev")
        if dev > best_dev:
            best_dev = dev
            test = correlation(pearsonr, "test"), correlation(spearmanr, "test")
        else:
            idle += 1
        if idle == PATIENCE:
            break
    return test


def train_epoch(model, optimizer, features, target):
    for rows in torch.randperm(len(target), device=target.device).split(BATCH_SIZE):
        optimizer.zero_grad()
        F.mse_loss(model(features[rows]), target[rows]).backward()
        optimizer.step()


# --------------------------------------------------------------------------------------------------
# Protocols
# --------------------------------------------------------------------------------------------------


def score(task, splits, embed, k):
    """One task -> {name: percent}.

    splits: of read_task(); embed: n sentences -> [n, D]; k: the number of folds.
    """
    inputs = {name: make_features(task, split, embed) for name, split in splits.items()}
    if task in RELATEDNESS:
        scores = {name: split.labels for name, split in splits.items()}
        pearson, spearman = relatedness(inputs, scores)
        return {task: pearson, f"{task} Spearman": spearman}
    device = inputs["train"].device
    labels = {name: torch.from_numpy(split.labels).to(device) for name, split in splits.items()}
    if set(splits) == {"train"}:  # MR, CR, SUBJ, MPQA
        return {task: folds_within_folds(inputs["train"], labels["train"], k)}
    if "dev" in splits:  # SST-2, SICK-E, SNLI
        strengths = NO_PENALTY if task == "SNLI" else STRENGTHS
        model = chosen_by_dev(
            inputs["train"], labels["train"], inputs["dev"], labels["dev"], strengths
        )
    else:  # TREC, MRPC
        strengths = STRENGTHS_OF_TRAINING_FOLDS
        model = chosen_by_folds(inputs["train"], labels["train"], strengths, k)
    predicted = predict(inputs["test"], *model)  # [n, 1]
    result = {task: float(accuracy(predicted, labels["test"]))}
    if task == "MRPC":
        result["MRPC F1"] = f1(predicted[:, 0], labels["test"])
    return result


def make_features(task, split, embed):
    """[n, D]; of pairs |u - v|, u o v, [n, 2 D]; of SNLI's u, v, u o v, |u - v|, [n, 4 D]."""
    u = embed(split.first)
    if split.second is None:
        return u
    v = embed(split.second)
    difference = (u - v).abs()
    parts = [u, v, u * v, difference] if task == "SNLI" else [difference, u * v]
    return torch.cat(parts, dim=1)


def folds_within_folds(features, labels, k):
    """Accuracy in percent, the mean over k folds; the fold takes no part in the choice of C."""
    fold = torch.from_numpy(folds(labels.cpu().numpy(), k)).to(labels.device)
    results = []
    for i in range(k):
        model = chosen_by_folds(features[fold != i], labels[fold != i], STRENGTHS, k)
        results.append(accuracy(predict(features[fold == i], *model), labels[fold == i]))
    return float(torch.stack(results).mean())


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------

EMPTY = "."  # what is encoded for an empty sentence


def task_names(text):
    names = text.split(",")
    if not set(names) <= set(TASKS):
        raise argparse.ArgumentTypeError(f"{text!r}, expected some of {','.join(TASKS)}")
    return names


def parse_args():
    parser = ArgumentParser(
        "SentEval's transfer tasks: a linear model on frozen embeddings, in percent."
    )
    add_evaluation_options(parser)
    add = parser.add_argument
    add(
        "--senteval",
        default="senteval.tar",
        help="SentEval's folder or tar, local or from the Hub; %(default)s",
    )
    add(
        "--tasks",
        type=task_names,
        help=f"some of {','.join(TASKS)}; all, SNLI where its training files are",
    )
    add("--fast", action="store_true", help=f"{FAST_FOLDS} folds instead of {FOLDS}")
    add("--pooling", choices=POOLING_NAMES, help="read every model so, whatever its folder states")
    return parser.parse()


def read_tasks(args):
    """--senteval, --tasks -> {task: {split: Split}}. Raises DataError."""
    root = find_senteval(resolve(args.senteval))
    tasks = args.tasks
    if tasks is None:
        has_snli = (root / "SNLI" / "s1.train").exists()
        tasks = [task for task in TASKS if task != "SNLI" or has_snli]
    return {task: read_task(root, task) for task in tasks}


def check_folds(data, k):
    """Raises DataError for a task with fewer than k sentences of a class to draw k folds from."""
    for task, splits in data.items():
        if "dev" in splits:
            continue
        smallest = int(np.bincount(splits["train"].labels).min())
        if smallest < k:
            problem = f"{smallest} training sentences of one class"
            raise DataError(f"{task}: {problem}, expected {k} or more, one for each fold")


def number_sentences(data):
    """{task: {split: Split}} -> {sentence: row}, each distinct sentence once."""
    numbers = {}
    for splits in data.values():
        for split in splits.values():
            for text in [*split.first, *(split.second or [])]:
                numbers.setdefault(text or EMPTY, len(numbers))
    return numbers


def look_up(vectors, numbers, sentences):
    """n sentences -> their rows of vectors, [n, D]."""
    return vectors[[numbers[text or EMPTY] for text in sentences]]


def score_model(name, data, numbers, args):
    """-> {task: percent}, their averages if all tasks are there, and how long it took."""
    begin = time.perf_counter()
    encoder = load_encoder(name, args.pooling).to(args.device).eval()
    vectors = torch.from_numpy(encode_sentences(encoder, numbers, name)).to(args.device)
    encoding_seconds = time.perf_counter() - begin
    embed = partial(look_up, vectors, numbers)
    scores = {}
    for task, splits in progress(data.items(), desc=f"{name}: classifiers", leave=False):
        scores |= score(task, splits, embed, FAST_FOLDS if args.fast else FOLDS)
    scores |= averages(scores)
    scores["encoding, s"] = encoding_seconds
    scores["in all, s"] = time.perf_counter() - begin
    return scores


def averages(scores):
    """{task: percent} -> those of the two averages for which all tasks are there."""
    found = {}
    if set(AVERAGE) <= set(scores):
        found["avg"] = float(np.mean([scores[task] for task in AVERAGE]))
    if set(AVERAGE_OF_10) <= set(scores):
        of_task = {task: scores[task] for task in AVERAGE_OF_10}
        for task, second in SECOND_SCORES.items():
            of_task[task] = (scores[task] + scores[second]) / 2
        found["avg of 10"] = float(np.mean(list(of_task.values())))
    return found


def main():
    args = parse_args()
    data = read_tasks(args)
    check_folds(data, FAST_FOLDS if args.fast else FOLDS)
    numbers = number_sentences(data)
    rows = {name: score_model(name, data, numbers, args) for name in args.models}
    print(table(rows))
    write_report(args.json, rows)


if __name__ == "__main__":
    run_main(main)
