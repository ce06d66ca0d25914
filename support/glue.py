"""GLUE's sentence-pair tasks: files in, metrics out.

A folder as GLUE's archives unpack (MRPC/train.tsv, STS-B/dev.tsv, ...; SNLI as GLUE's own archive
has it), read by the names in its header. Without a folder, the data sets SetFit/mrpc and so on of
the Hugging Face Hub: JSON lines with text1, text2, label. Test files without labels are left out,
and so are QQP's rows without two questions, which a line on stderr counts.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from huggingface_hub import hf_hub_download
from scipy.stats import pearsonr, spearmanr

from common import DataError, parse_json, read_lines, read_score
from support import demo, distributed
from support.encoder import read_json
from support.records import is_number

BINARY = ("0", "1")
NLI = ("entailment", "neutral", "contradiction")
NO_AGREEMENT = "-"  # the label of an NLI pair on which the annotators did not agree
NO_LABEL = "-1"  # of the Hub's test sets
JSON_KEYS = ("text1", "text2", "label")
REGRESSION = "stsb"  # the task whose labels are scores
F1_TASKS = ("mrpc", "qqp")  # two classes, of which class 1 says "the same"
THRESHOLDS = 200  # cosines that are tried as the border between two classes
DEMO_PAIRS = 2500
SCORES = "scores.json"  # in the folder of a run: {task: {row: {column: score}}}


class Pairs(NamedTuple):
    """n sentences, n sentences, and their labels [n]: int64 class numbers, or float32 scores."""

    first: list
    second: list
    labels: np.ndarray


class Task(NamedTuple):
    """The columns of a task's files, and its classes in the order of the logits."""

    first: str
    second: str
    label: str
    classes: tuple | None  # None: the label is a score from 0 to 5

    @property
    def outputs(self):
        """How many logits a pair has."""
        return len(self.classes) if self.classes else 1


class Row(NamedTuple):
    """A pair as it stands in a file."""

    line: int
    first: str
    second: str
    label: str


TASKS = {
    "mrpc": Task("#1 String", "#2 String", "Quality", BINARY),
    "stsb": Task("sentence1", "sentence2", "score", None),
    "qqp": Task("question1", "question2", "is_duplicate", BINARY),
    "qnli": Task("question", "sentence", "label", ("entailment", "not_entailment")),
    "mnli": Task("sentence1", "sentence2", "gold_label", NLI),
    "allnli": Task("sentence1", "sentence2", "gold_label", NLI),
}


def splits(folder):
    return {split: [f"{folder}/{split}.tsv"] for split in ("train", "dev", "test")}


# task -> {set: its files}
FILES = {
    "mrpc": splits("MRPC"),
    "stsb": splits("STS-B"),
    "qqp": splits("QQP"),
    "qnli": splits("QNLI"),
    "mnli": {
        "train": ["MNLI/train.tsv"],
        "dev": ["MNLI/dev_matched.tsv"],
        "matched": ["MNLI/dev_matched.tsv"],
        "mismatched": ["MNLI/dev_mismatched.tsv"],
    },
    "allnli": {
        "train": ["MNLI/train.tsv", "SNLI/train.tsv"],
        "dev": ["MNLI/dev_matched.tsv", "SNLI/dev.tsv"],  # both, as in the authors' code
        "matched": ["MNLI/dev_matched.tsv"],
        "mismatched": ["MNLI/dev_mismatched.tsv"],
        "snli": ["SNLI/test.tsv"],
    },
}


# --------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------


def read_task(folder, task):
    """A task of TASKS -> {"train": Pairs, "dev": Pairs, and the test sets that have labels}.

    folder: GLUE's, None for the Hugging Face Hub, or "demo" for generated pairs with scores.
    Raises DataError.
    """
    if folder == "demo":
        return demo_sets(task)
    sets = {}
    for name, files in FILES[task].items():
        parts = [read_pairs(find_file(folder, file), task) for file in files]
        if any(part is None for part in parts):
            continue
        sets[name] = Pairs(
            [text for part in parts for text in part.first],
            [text for part in parts for text in part.second],
            np.concatenate([part.labels for part in parts]),
        )
        if task == REGRESSION and name != "train" and len(set(sets[name].labels.tolist())) < 2:
            expected = "two different ones, which a correlation needs"
            raise DataError(f"{find_file(folder, files[0])}: one score alone, expected {expected}")
    return sets


def demo_sets(task):
    """Generated pairs for --demo. Raises DataError for a task with classes."""
    if task != REGRESSION:
        raise DataError(f"--task {task}: the demo has scored pairs, expected --task {REGRESSION}")
    scored = {
        "train": demo.scored_pairs(DEMO_PAIRS, seed=5),
        "dev": demo.dev()["demo dev"],
        "test": demo.test()["demo test"],
    }
    sets = {}
    for name, pairs in scored.items():
        labels = np.array(pairs.scores, np.float32)
        sets[name] = Pairs(list(pairs.first), list(pairs.second), labels)
    return sets


def find_file(folder, name):
    """A file of a GLUE folder, or where `folder` is None the same of the Hub -> Path.

    name: "MRPC/train.tsv". Raises DataError.
    """
    if folder is None:
        return download_file(name)
    path = Path(folder) / name
    if not path.exists():
        archive = Path(name).parent
        raise DataError(f"{path}: no such file, expected a folder that contains GLUE's {archive}")
    return path


def download_file(name):
    """The JSON lines of the Hub with the content of a GLUE file -> Path. Raises DataError."""
    task, split = name.lower().replace("-", "").removesuffix(".tsv").split("/")
    repository = f"SetFit/{task}"
    if split == "dev_mismatched":
        repository += "_mm"
    if split.startswith("dev"):
        split = "validation"
    try:
        return Path(hf_hub_download(repository, f"{split}.jsonl", repo_type="dataset"))
    except Exception as error:  # the client's errors have no base class
        reason = " ".join(str(error).split())[:150]
        raise DataError(
            f"{repository}: the Hugging Face Hub did not provide it ({reason}); download GLUE and "
            f"give its folder, which contains {name}, as --glue"
        ) from None


def read_pairs(path, task):
    """A file of a task -> Pairs, or None if it has no labels, as most of GLUE's test files.

    Raises DataError.
    """
    classes = TASKS[task].classes
    read_rows = read_json_lines if path.suffix == ".jsonl" else read_tsv
    rows = read_rows(path, task)
    if rows is None:
        return None
    if task == "qqp":
        rows = leave_out_incomplete(rows, path)
    if classes == NLI:
        rows = [row for row in rows if row.label != NO_AGREEMENT]
    if not rows:
        raise DataError(f"{path}: no pairs, expected a header and rows")
    labels = [read_label(row, path, classes) for row in rows]
    return Pairs(
        [row.first for row in rows],
        [row.second for row in rows],
        np.array(labels, np.int64 if classes else np.float32),
    )


def leave_out_incomplete(rows, path):
    """Rows of QQP -> those with two questions. How many the others are is said on stderr."""
    complete = [row for row in rows if row.first and row.second]
    left_out = len(rows) - len(complete)
    if left_out:
        distributed.note(f"{path}: rows left out, without two questions: {left_out}")
    return complete


def read_tsv(path, task):
    """A file with a header -> list of Row, or None for a test set without labels.

    Raises DataError.
    """
    *names, _ = TASKS[task]
    lines = read_lines(path)
    _, text = next(lines)
    header = text.split("\t")
    if path.stem == "test" and TASKS[task].label not in header:
        return None
    for name in names:
        if name not in header:
            expected = f"a header with {', '.join(names)}"
            raise DataError(f"{path}:1: no column {name!r}, expected {expected}")
    positions = [header.index(name) for name in names]
    rows = []
    for line, text in lines:
        cells = text.split("\t")
        if task == "qqp" and len(cells) < len(header):
            rows.append(Row(line, "", "", ""))  # a newline inside a question breaks a few rows
            continue
        if len(cells) != len(header):
            found = f"{len(cells)} tab-separated columns"
            raise DataError(f"{path}:{line}: {found}, expected {len(header)} as in the header")
        rows.append(Row(line, *[cells[position].strip() for position in positions]))
    return rows


def read_json_lines(path, task):
    """A file of the Hub -> list of Row, or None for a test set without labels. Raises DataError."""
    class_names = {str(number): name for number, name in enumerate(TASKS[task].classes or ())}
    rows = []
    for line, text in read_lines(path):
        try:
            values = parse_json(text)
            cells = [cell_text(values[key], key) for key in JSON_KEYS]
        except (ValueError, KeyError):
            expected = "JSON with the keys " + ", ".join(JSON_KEYS)
            raise DataError(f"{path}:{line}: {text[:40]!r}, expected {expected}") from None
        first, second, label = [cell.strip() for cell in cells]
        if label.startswith(NO_LABEL):
            return None
        rows.append(Row(line, first, second, class_names.get(label, label)))
    return rows


def cell_text(value, key):
    """A value of a line of JSON -> its text; numbers are labels alone. Raises ValueError."""
    if value is None:
        return ""
    if isinstance(value, str) or (key == "label" and isinstance(value, (int, float))):
        return str(value)
    raise ValueError(f"{key} is not text")


def read_label(row, path, classes):
    """-> a class number or a score. Raises DataError, also if a sentence of the pair is empty."""
    place = f"{path}:{row.line}"
    empty = not row.first or not row.second
    if empty or (classes and row.label not in classes):
        found = f"label {row.label[:40]!r}"
        if empty:
            found += " and an empty sentence"
        expected = f"two sentences and {' or '.join(classes or ['a score'])}"
        raise DataError(f"{place}: {found}, expected {expected}")
    return classes.index(row.label) if classes else read_score(row.label, place)


def class_positions(task, label2id):
    """Where a classifier has the task's classes among its logits: list of C positions.

    label2id: of the classifier's config, or None. A class that it does not name has its own place.
    """
    positions = {str(name).lower(): position for name, position in (label2id or {}).items()}
    classes = TASKS[task].classes or ("score",)
    return [positions.get(name, number) for number, name in enumerate(classes)]


# --------------------------------------------------------------------------------------------------
# Metrics
# --------------------------------------------------------------------------------------------------


def metrics(logits, labels, task):
    """The metrics that DSE's Table 1 has of a task: logits [n, C], labels [n] -> {name: x 100}.

    Pearson and Spearman for scores, accuracy for classes, and F1 for those of F1_TASKS.
    """
    if task == REGRESSION:
        return {
            "Pearson": 100 * float(pearsonr(logits[:, 0], labels).statistic),
            "Spearman": 100 * float(spearmanr(logits[:, 0], labels).statistic),
        }
    predicted = logits.argmax(axis=1)
    result = {"accuracy": 100 * float((predicted == labels).mean())}
    if task in F1_TASKS:
        both = float((predicted & labels).sum())
        either = float(predicted.sum() + labels.sum())
        result["F1"] = 200 * both / max(1, either)
    return result


def cosine_logits(cosines, dev_labels, task):
    """What plain cosine says of pairs: {set: [n]}, "dev" among them -> {set: [n, C]}.

    For scores the cosine itself; for F1_TASKS the class is 1 above the threshold with the best
    metrics on dev; nothing for other tasks, since a cosine has no direction.
    """
    if task == REGRESSION:
        return {name: values[:, None] for name, values in cosines.items()}
    if task not in F1_TASKS:
        return {}

    def separate(values, threshold):
        return np.stack([threshold - values, values - threshold], axis=1)

    def dev_score(threshold):
        return sum(metrics(separate(cosines["dev"], threshold), dev_labels, task).values())

    thresholds = np.quantile(cosines["dev"], np.linspace(0, 1, THRESHOLDS))
    best = max(thresholds, key=dev_score)
    return {name: separate(values, best) for name, values in cosines.items()}


class Evaluation(NamedTuple):
    """The labeled sets of a task: dev chooses the best model, the others test it."""

    task: str
    sets: dict  # {name: Pairs}, "dev" among them

    def dev_score(self, logits_of):
        """logits_of(pairs) -> [n, C] of a model: the mean of its metrics on dev, x 100."""
        dev = self.sets["dev"]
        values = metrics(logits_of(dev), dev.labels, self.task)
        return float(np.mean(list(values.values())))

    def scores(self, logits_of):
        """logits_of(pairs) -> [n, C] of a model: its row of a table, see score_logits."""
        return self.score_logits({name: logits_of(pairs) for name, pairs in self.sets.items()})

    def cosine_scores(self, cosine_of):
        """cosine_of(pairs) -> [n]: the row of plain cosine, empty where it can say nothing."""
        cosines = {name: cosine_of(pairs) for name, pairs in self.sets.items()}
        logits = cosine_logits(cosines, self.sets["dev"].labels, self.task)
        return self.score_logits(logits) if logits else {}

    def score_logits(self, logits):
        """{set: [n, C]} -> {"dev accuracy": x 100, ..., "mean"}: the mean is that of the test sets,
        or of dev where no test set has labels."""
        row = {}
        tested = []
        for name, pairs in self.sets.items():
            for metric, value in metrics(logits[name], pairs.labels, self.task).items():
                row[f"{name} {metric}"] = value
                if name != "dev":
                    tested.append(value)
        row["mean"] = float(np.mean(tested or list(row.values())))
        return row


def add_degradation(scores, of):
    """How much of the mean of row `of` each row lacks, in percent: a new column. In place."""
    reference = scores[of]["mean"]
    for row in scores.values():
        row["degradation %"] = 100 * (1 - row["mean"] / reference) if reference else math.nan


def read_scores(folders):
    """The folders of runs, one a task -> {task: {row: {column: score}}}. Raises DataError."""
    tables = {}
    for folder in folders:
        path = Path(folder) / SCORES
        found = read_json(path)
        if found is None:
            raise DataError(f"{path}: no such file, expected the folder of a finished run")
        check_scores(path, found)
        for task in found:
            if task in tables:
                raise DataError(f"{path}: another run of task {task}, expected one for each task")
        tables |= found
    return tables


def check_scores(path, tables):
    """Raises DataError unless it is {task: {row: {column: number}}}, with a mean in each row."""
    if not tables:
        raise DataError(f"{path}: no task, expected the scores of one or more")
    for rows in tables.values():
        for row in rows.values() if rows and isinstance(rows, dict) else [None]:
            numbers = isinstance(row, dict) and "mean" in row
            if not numbers or not all(map(is_number, row.values())):
                expected = "JSON, {task: {row: {column: number}}}, with a mean in each row"
                raise DataError(f"{path}: {json.dumps(row)[:40]}, expected {expected}")


def average(tables):
    """{task: {row: {column: score}}} -> DSE's Table 1: {row: {task: score, "mean": average}}.

    The score of a task is the mean of its one or two scores. Rows that a task lacks are left out.
    """
    first, *others = tables.values()
    names = [name for name in first if all(name in rows for rows in others)]
    averages = {}
    for name in names:
        averages[name] = {task: rows[name]["mean"] for task, rows in tables.items()}
        averages[name]["mean"] = float(np.mean(list(averages[name].values())))
    if "teacher" in averages:
        add_degradation(averages, of="teacher")
    return averages
