"""Run a training script with every combination of some options, and rank them by dev score.

    python -m extras.sweep SCRIPT "OPTION=VALUE,VALUE OPTION=VALUE" [--output FOLDER] -- OPTIONS

Each combination is a run, SCRIPT OPTIONS --OPTION VALUE ..., with a folder and a log file of its
own. The same command continues a sweep: a complete run (one with a model card) is kept, an
interrupted one is resumed, and a failed one, which does not end the sweep, is tried again. Runs are
scored by the best dev score of their last stage; those that differ only in their seed share a row
(mean and standard deviation, n - 1). Semicolons separate values that contain commas.

  python -m extras.sweep ckd.py "lr=1e-4,4e-4 seed=0,1,2" -- --demo
  python -m extras.sweep extras.baselines "student-layers=1,3,5;0,2,4" -- --method pkd --dev my.tsv
"""

import itertools
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

from common import ArgumentParser, UserError, note, run_main
from common import read_json, read_rows, table, write_json


def read_grid(text):
    """ "lr=1e-4,4e-4 seed=0,1" -> [{"lr": "1e-4", "seed": "0"}, ...]. Raises UserError."""
    grid = {}
    for part in text.split() or [text]:
        option, _, values = part.removeprefix("--").partition("=")
        values = values.split(";" if ";" in values else ",")
        names = {value.replace("/", "_") for value in values}  # of folders
        if not option or not all(values) or len(names) < len(values) or option in grid:
            raise UserError(f"{part!r}: give each option once, as in lr=1e-4,4e-4, and each value")
        grid[option] = values
    return [dict(zip(grid, values)) for values in itertools.product(*grid.values())]


def name_of(setting):
    """{"lr": "1e-4", "seed": "0"} -> "lr=1e-4,seed=0", a file name."""
    return ",".join(f"{option}={value}" for option, value in setting.items()).replace("/", "_")


def run_setting(script, setting, options, folder):
    """Run or resume the script with one setting -> what is wrong, or None."""
    program = [script] if script.endswith(".py") else ["-m", script]
    options = options + [f"--{option}={value}" for option, value in setting.items()]
    command = [sys.executable, *program, *options, f"--output={folder}", "--resume"]
    log = Path(f"{folder}.log")
    with log.open("w") as file:
        status = subprocess.run(command, stdout=file, stderr=file).returncode
    errors = re.findall(r"[eE]rror: (.*)", log.read_text("utf-8", "replace"))
    return [f"exit status {status}", *errors][-1] if status else None


def best_dev(folder):
    """A run's folder -> the best dev score of its last stage. Raises UserError."""
    rows = list(read_rows(folder / "metrics.jsonl", json.loads, "it must be the log of a run"))
    return max(row["dev"] for row in rows if "dev" in row and row["stage"] == rows[-1]["stage"])


def rank(scores):
    """[(setting, dev score)] -> {row name: {column: number}}, the best mean over seeds first."""
    groups = {}
    for setting, score in scores:
        rest = {option: value for option, value in setting.items() if option != "seed"}
        groups.setdefault(name_of(rest) or "all", []).append(score)
    rows = {}
    for name, group in sorted(groups.items(), key=lambda item: -statistics.mean(item[1])):
        row = rows[f"{name} (runs: {len(group)})"] = {"dev": statistics.mean(group)}
        if len(group) > 1:
            row["standard deviation"] = statistics.stdev(group)
    return rows


def parse_args():
    """-> the sweep's own arguments, and the script's."""
    parser = ArgumentParser(__doc__)
    parser.add_argument("script", help="ckd.py, or extras.baselines")
    parser.add_argument("grid", help='options and their values: "lr=1e-4,4e-4 seed=0,1,2"')
    parser.add_argument("--output", default="runs/sweep", help="(default: %(default)s)")
    words = [*sys.argv[1:], "--"]
    end = words.index("--")
    return parser.parse_args(words[:end]), words[end + 1 : -1]


def main():
    args, options = parse_args()
    folder = Path(args.output)
    settings = read_grid(args.grid)
    sweep = {"script": args.script, "options": options}
    if read_json(folder / "sweep.json") not in ({}, sweep):
        raise UserError(f"{folder}: has a sweep with other options; choose another --output")
    write_json(folder / "sweep.json", sweep)
    scores = []
    for number, setting in enumerate(settings, 1):
        run = folder / name_of(setting)
        if not (run / "README.md").exists():
            note(f"{number} of {len(settings)}: {run.name}")
            if error := run_setting(args.script, setting, options, run):
                note(f"{run.name} has failed: {error}")
                continue
        scores.append((setting, best_dev(run)))
    if not scores:
        raise UserError(f"no run has succeeded; see {folder}/*.log")
    print(table(rank(scores)))


if __name__ == "__main__":
    run_main(main)
