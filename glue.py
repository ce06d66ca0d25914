"""GLUE's sentence-pair tasks: files in, metrics out.

A folder as GLUE's archives unpack (MRPC/train.tsv, STS-B/dev.tsv, ...; SNLI as GLUE's own archive lays it out), read by the names in its header; or,
without a folder, the hub's SetFit/mrpc and so on, JSON lines text1, text2, label. Test files that GLUE hands out without labels are left out."""
import json
from collections import namedtuple
from pathlib import Path

import numpy as np
from huggingface_hub import hf_hub_download
from scipy.stats import pearsonr, spearmanr

import common
import demo

Pairs = namedtuple("Pairs", "first second labels")  # n sentences, n sentences, array [n]: int64 class numbers, or float32 scores from 0 to 5
NLI = ("sentence1", "sentence2", "gold_label"), ("entailment", "neutral", "contradiction")
TASKS = {  # columns of the first sentence, the second, the label; the classes in order, None for a score from 0 to 5
    "mrpc": (("#1 String", "#2 String", "Quality"), ("0", "1")),
    "stsb": (("sentence1", "sentence2", "score"), None),
    "qqp": (("question1", "question2", "is_duplicate"), ("0", "1")),
    "qnli": (("question", "sentence", "label"), ("entailment", "not_entailment")),
    "mnli": NLI,
    "allnli": NLI,
}
FILES = {task: {split: [f"{folder}/{split}.tsv"] for split in ("train", "dev", "test")}
         for task, folder in (("mrpc", "MRPC"), ("stsb", "STS-B"), ("qqp", "QQP"), ("qnli", "QNLI"))}
FILES["mnli"] = dict(train=["MNLI/train.tsv"], dev=["MNLI/dev_matched.tsv"], matched=["MNLI/dev_matched.tsv"], mismatched=["MNLI/dev_mismatched.tsv"])
FILES["allnli"] = FILES["mnli"] | dict(train=["MNLI/train.tsv", "SNLI/train.tsv"], snli=["SNLI/test.tsv"])


def find(folder, name):
    """A file of a GLUE folder, or where `folder` is None the hub's of the same content -> Path. Raises DataError."""
    if folder:
        if not (Path(folder) / name).exists():
            raise common.DataError(f"{Path(folder) / name}: no such file, expected a folder with GLUE's {Path(name).parent}")
        return Path(folder) / name
    task, split = name.lower().replace("-", "").removesuffix(".tsv").split("/")
    repository = f"SetFit/{task}" + "_mm" * (split == "dev_mismatched")
    try:
        return Path(hf_hub_download(repository, ("validation" if split.startswith("dev") else split) + ".jsonl", repo_type="dataset"))
    except Exception as error:  # the client's errors have no base class
        raise common.DataError(f"{repository}: not to be had from the hub ({' '.join(str(error).split())[:150]}); download GLUE and give its "
                               f"folder as --glue, expected in it: {name}") from None


def read_pairs(path, task):
    """One file -> Pairs, or None where it has no labels, as most of GLUE's test files. Raises DataError."""
    (*columns, gold), classes = TASKS[task]
    first, second, labels, header = [], [], [], None
    for line, text in common.read_lines(path):
        if path.suffix == ".jsonl":
            try:
                row = json.loads(text)
                cells = [str(row[key]).strip() for key in ("text1", "text2", "label")]
            except (ValueError, KeyError, TypeError):
                raise common.DataError(f'{path}:{line}: {text[:40]!r}, expected JSON, {{"text1": ..., "text2": ..., "label": ...}}') from None
            cells[2] = classes[int(cells[2])] if classes and cells[2] in map(str, range(len(classes))) else cells[2]
            if cells[2].startswith("-1"):
                return None
        elif not header:
            header = text.split("\t")
            if gold not in header and path.stem == "test":
                return None
            if missing := [name for name in (*columns, gold) if name not in header]:
                raise common.DataError(f"{path}:1: no column {missing[0]!r}, expected a header with {', '.join((*columns, gold))}")
            continue
        else:
            cells = text.split("\t")
            if task == "qqp" and len(cells) < len(header):  # a few of its rows are broken by a newline inside a question
                continue
            if len(cells) != len(header):
                raise common.DataError(f"{path}:{line}: {len(cells)} tab-separated columns, expected {len(header)} as in the header")
            cells = [cells[header.index(name)].strip() for name in (*columns, gold)]
        if cells[2] == "-" and classes == NLI[1]:  # the annotators did not agree
            continue
        if classes and cells[2] not in classes or not cells[0] or not cells[1]:
            raise common.DataError(f"{path}:{line}: label {cells[2][:40]!r}{' and an empty sentence' * (not cells[0] or not cells[1])}, "
                                   f"expected two sentences and {' or '.join(classes or ['a score'])}")
        labels.append(classes.index(cells[2]) if classes else common.read_score(cells[2], f"{path}:{line}"))
        first.append(cells[0])
        second.append(cells[1])
    if not first:
        raise common.DataError(f"{path}: no pairs, expected a header and rows")
    return Pairs(first, second, np.array(labels, np.int64 if classes else np.float32))


def read_task(folder, task):
    """-> {"train": Pairs, "dev": Pairs, and the labelled test sets}; the folder "demo": generated pairs, for stsb."""
    if folder == "demo":
        sets = {"train": demo.graded(2500, seed=5), "dev": demo.dev()["demo dev"], "test": demo.test()["demo test"]}
        return {name: Pairs(list(a), list(b), np.array(scores, np.float32)) for name, (a, b, scores) in sets.items()}
    sets = {name: [read_pairs(find(folder, file), task) for file in files] for name, files in FILES[task].items()}
    return {name: Pairs(*(sum(lists, []) for lists in list(zip(*parts))[:2]), np.concatenate([part.labels for part in parts]))
            for name, parts in sets.items() if None not in parts}


def metrics(scores, labels, task):
    """Table 1's: scores [n, C] and labels [n] -> {metric: x 100}: accuracy and F1, accuracy, or Pearson and Spearman."""
    if task == "stsb":
        return {"Pearson": 100 * float(pearsonr(scores[:, 0], labels).statistic), "Spearman": 100 * float(spearmanr(scores[:, 0], labels).statistic)}
    guess = scores.argmax(axis=1)
    result = {"accuracy": 100 * float((guess == labels).mean())}
    if task in ("mrpc", "qqp"):  # of class 1, "the same"
        result["F1"] = 200 * float((guess & labels).sum()) / max(1, float(guess.sum() + labels.sum()))
    return result


def cosine_logits(cosine, dev_labels, task):
    """What an untrained encoder says: {set: cosines [n]}, one of them dev -> {set: [n, C]} for metrics(): the cosine itself for stsb; for mrpc
    and qqp "the same" is what lies above the threshold that is best on dev; for other tasks nothing, as a cosine knows no direction."""
    if task == "stsb":
        return {name: values[:, None] for name, values in cosine.items()}
    if task not in ("mrpc", "qqp"):
        return {}
    logits = [{name: np.stack([threshold - values, values - threshold], axis=1) for name, values in cosine.items()}
              for threshold in np.quantile(cosine["dev"], np.linspace(0, 1, 200))]
    return max(logits, key=lambda those: sum(metrics(those["dev"], dev_labels, task).values()))
