# SPDX-License-Identifier: MIT
"""Whole epochs of real data by the authors' program and by ours: are the two students the same?

Both students are scored with our code: encoders on the seven STS sets, DSE's models on the test set
of their task. The cosines are those of the two vectors of each of 1,000 sentences; of a teacher of
DSE, which has no vectors, none. The runs of ours have the same order of batches and the same start
as theirs, except for those with another seed.
"""

import copy
import importlib
import time
from statistics import mean, stdev

import numpy as np
import torch

from extras.authors import harness

SEEDS = (1, 2)  # of ours as it is, with another order of batches than theirs
SENTENCES = 1000


def sts_scores(embed, model):
    """The seven STS sets -> {name: Spearman x 100}, and their mean."""
    import common
    import eval_sts

    sets = eval_sts.read_sts(harness.REAL)
    scores = {name: common.spearman(embed, model, pairs) for name, pairs in sets.items()}
    return scores | {"avg": mean(scores.values())}


def task_scores(model, task):
    """The test set of DSE's task -> {metric: x 100}."""
    import dse

    if task == "stsb":
        file = f"{harness.REAL}/senteval/data/downstream/STS/STSBenchmark/sts-test.csv"
        rows = dse.read_scored_pairs(file, (5, 6, 4))
    else:
        lines = [line.split("\t") for line in harness.demo_lines("snli-test.tsv")[1500:]]
        rows = [(a, b, dse.CLASSES[task].index(label)) for a, b, label in lines]
    first, second, labels = zip(*rows)
    logits = dse.logits_of(model, list(zip(first, second)))
    return dse.metrics(logits, np.array(labels), task)


def measure(name, model):
    """A trained model -> its scores, and its vectors [n, D] or None."""
    import common

    sentences = harness.demo_lines("sentences.txt")[-SENTENCES:]
    script = importlib.import_module(dict(kd="ckd", nli="ckd").get(name, name.split("-")[0]))
    if script.__name__ == "dse":
        scores = task_scores(model, "mnli" if "mnli" in name else "stsb")
        if name.endswith("teacher"):
            return scores, None
    else:
        scores = sts_scores(script.embed, model)
    return scores, common.encode(script.embed, model, sentences)


def compare(name, program, work, theirs, departures=()):
    """Print the table of one program."""
    everything = set(program.departures)
    runs = {"theirs": None, "ours, departures undone": everything}
    runs |= {f"ours, but for: {departure}": everything - {departure} for departure in departures}
    runs |= {"ours as it is": set()} | {f"the same, seed {seed}": set() for seed in SEEDS}
    rows, vectors, model = {}, {}, None
    for row, undone in runs.items():
        if row == "theirs":
            continue
        harness.SEED[0] = int(row.split("seed ")[1]) if "seed" in row else 0
        begin = time.perf_counter()
        outcome = program.ours(work, undone)
        minutes = (time.perf_counter() - begin) / 60
        if model is None:
            largest, _ = harness.loss_difference(outcome, theirs)
            print(f"largest relative difference of {len(theirs['losses'])} losses: {largest:.1e}")
            print(
                f"largest difference of a weight: {harness.weight_difference(outcome, theirs):.1e}"
            )
            model = copy.deepcopy(outcome["model"])
            model.load_state_dict(theirs["weights"], strict=False)  # without a pooler, ...
            rows["theirs"], vectors["theirs"] = measure(name, model)
            columns = [*rows["theirs"], "largest difference", "lowest cosine", "minutes"]
            print(f"| run | {' | '.join(columns)} |\n|---{'|---:' * len(columns)}|")
            show(rows, vectors, "theirs", theirs["minutes"])
        rows[row], vectors[row] = measure(name, outcome["model"])
        show(rows, vectors, row, minutes)
    seeds = [row for row in rows if "as it is" in row or "seed" in row]
    last = list(rows["theirs"])[-1]
    spread = stdev(rows[row][last] for row in seeds)
    print(f"{last} of ours as it is, {len(seeds)} seeds: ± {spread:.2f}")


def show(rows, vectors, row, minutes):
    """Print a row: scores; the largest difference from theirs; the lowest cosine; minutes."""
    scores = rows[row]
    difference = max(abs(scores[name] - rows["theirs"][name]) for name in scores)
    cosine = ""
    if vectors[row] is not None:
        pair = map(torch.from_numpy, (vectors[row], vectors["theirs"]))
        cosine = f"{torch.cosine_similarity(*pair).min():.6f}"
    cells = [f"{score:.3f}" for score in scores.values()]
    cells = [row, *cells, f"{difference:.3f}", cosine, f"{minutes:.1f}"]
    print(f"| {' | '.join(cells)} |", flush=True)
