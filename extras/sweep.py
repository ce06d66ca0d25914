# SPDX-License-Identifier: MIT
"""Run a training script with every combination of some options, and rank them by dev score.

    python -m extras.sweep SCRIPT "OPTION=VALUE,VALUE OPTION=VALUE" [--output FOLDER] -- OPTIONS

Each combination is a run, SCRIPT OPTIONS --OPTION VALUE ..., with a folder and a log file of its
own. The same command continues a sweep: the script keeps a finished run, continues an interrupted
one from its checkpoint, and tries again one that failed, which does not end the sweep.

Runs that differ only in their seed share a row: for each column of the final student's scores, the
mean and the standard deviation (n - 1) over seeds, as in ConGen (section 4.3). Rows are ranked by
dev. With two seeds or more, p is that of a paired t-test on dev, over the seeds that a row shares
with the best one; IBKD (Tables 2, 3) asks for p < 0.01. It is not corrected for the number of rows:
the more rows, the more of them have a small p by chance. It stays blank if all differences are
equal. Dev has also chosen the best row, so confirm it on test sets (eval_sts.py). Semicolons
separate values that contain commas.

  python -m extras.sweep ckd.py "lr=1e-4,4e-4 seed=0,1,2" -- @demo/ckd.txt
  python -m extras.sweep extras.baselines "student-layers=1,3,5;0,2,4" -- --method pkd --dev my.tsv
"""

import itertools
import re
import statistics
import subprocess
import sys
from pathlib import Path

from scipy.stats import ttest_1samp

from common import UserError, note, read_json, read_options, run_main, table


class Options:
    script: str  # ckd.py, or extras.baselines
    grid: str  # options and their values: "lr=1e-4,4e-4 seed=0,1,2"
    output: str = "runs/sweep"  # folder of all runs


def read_grid(text):
    """ "lr=1e-4,4e-4 seed=0,1" -> [{"lr": "1e-4", "seed": "0"}, ...]. Raises UserError."""
    grid = {}
    for word in text.split() or [text]:
        option, _, values = word.removeprefix("--").partition("=")
        grid[option] = values.split(";" if ";" in values else ",")
        if not option or not all(grid[option]):
            raise UserError(f"{word!r}: give an option and its values, as in lr=1e-4,4e-4")
    return [dict(zip(grid, values)) for values in itertools.product(*grid.values())]


def name_of(setting):
    """{"lr": "1e-4", "seed": "0"} -> "lr=1e-4,seed=0", a file name."""
    return ",".join(f"{option}={value}" for option, value in setting.items()).replace("/", "_")


def run_setting(script, setting, options, folder):
    """Run or continue the script with one setting -> what is wrong, or None."""
    program = [script] if script.endswith(".py") else ["-m", script]
    options = options + [f"--{option}={value}" for option, value in setting.items()]
    command = [sys.executable, *program, *options, f"--output={folder}"]
    log = Path(f"{folder}.log")
    with log.open("a") as file:
        begin = file.tell()  # what is before is of an earlier attempt
        status = subprocess.run(command, stdout=file, stderr=file).returncode
    printed = log.read_bytes()[begin:].decode("utf-8", "replace")
    errors = re.findall(r"[eE]rror: (.*)", printed)
    return [f"exit status {status}", *errors][-1] if status else None


def student_scores(folder):
    """A finished run's folder -> {column: score} of its final student."""
    return list(read_json(folder / "scores.json", {}).values())[-1]


def rank(results):
    """[(setting, {column: score})] -> {row name: {column: number}}, the best mean on dev first."""
    groups = {}  # {row name: {seed: scores}}
    for setting, scores in results:
        rest = {option: value for option, value in setting.items() if option != "seed"}
        groups.setdefault(name_of(rest) or "all", {})[setting.get("seed")] = scores
    of_seeds = {name: [scores["dev"] for scores in runs.values()] for name, runs in groups.items()}
    mean_dev = {name: statistics.mean(values) for name, values in of_seeds.items()}
    order = sorted(groups, key=mean_dev.get, reverse=True)
    rows = {}
    for name in order:
        row = rows[f"{name} (runs: {len(groups[name])})"] = {}
        for column in next(iter(groups[name].values())):
            values = [scores[column] for scores in groups[name].values()]
            row[column] = statistics.mean(values)
            if len(values) > 1:
                row[f"± {column}"] = statistics.stdev(values)
        p = p_value(groups[order[0]], groups[name])
        if p is not None:
            row["p, uncorrected"] = ThreeDigits(p)
    return rows


class ThreeDigits(float):
    """A number that table() prints with three digits after the point."""

    def __format__(self, _):
        return f"{float(self):.3f}"


def p_value(best, other):
    """Of a paired, two-sided t-test over common seeds; {seed: scores} twice -> 0 to 1, or None."""
    seeds = best.keys() & other.keys()
    differences = [best[seed]["dev"] - other[seed]["dev"] for seed in seeds]
    if len(differences) < 2 or max(differences) - min(differences) < 1e-9:
        return None  # without variance, there is no test
    return float(ttest_1samp(differences, 0).pvalue)


def main():
    words = [*sys.argv[1:], "--"]
    end = words.index("--")
    args = read_options(Options, __doc__, words[:end])
    options = words[end + 1 : -1]  # the script's
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    settings = read_grid(args.grid)
    results = []
    for number, setting in enumerate(settings, 1):
        run = folder / name_of(setting)
        note(f"{number} of {len(settings)}: {run.name}")
        error = run_setting(args.script, setting, options, run)
        if error:
            note(f"{run.name} has failed: {error}")
        else:
            results.append((setting, student_scores(run)))
    if not results:
        raise UserError(f"no run has succeeded; see {folder}/*.log")
    print(table(rank(results)))


if __name__ == "__main__":
    run_main(main)
