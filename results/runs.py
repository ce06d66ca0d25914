"""Run the commands of results/commands.sh that have not been run yet, and keep a line of each.

  python results/runs.py --data FOLDER --jobs 2            all of them: a night on two cores
  python results/runs.py --data FOLDER --only three-0      some of them

FOLDER is written by data_sets.py. A run has its folder in runs/, and its line in
results/data/PAGE.jsonl: name, command, commit, seed, machine, seconds, peak memory in MB, its
scores, and for training the sentences per second, without scoring. The commit is the last one that
has changed any code that a run depends on. A run that has a line is not run again; one that was
broken off goes on. With --jobs, several run at a time, each on its share of the cores: two of one
thread do 1.2 to 1.4 times as much as one of two. What measures speed runs alone. Linux only.
"""

import json
import os
import re
import shlex
import string
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import positive_int, read_options, run_main
from extras.benchmark import machine

HERE = Path(__file__).parent
DATA = HERE / "data"
# The lines that prepare files, and the pages.
PREPARATION, *PAGES = (HERE / "commands.sh").read_text("utf-8").split("\n## ")
VARIABLE = re.compile(r"^(\w+)=(?:\$\{\w+:-)?([^\s}]+)", re.M)  # T=name or T=${T:-name}
COMMAND = re.compile(r"^# (\S+?)(?:: seeds (.+))?\n(python (?:.*\\\n)*.*)$", re.M)
OPTIONS = re.compile(r"^options (\S+) <<END.*\n((?:.*\n)+?)END$", re.M)
ALONE = re.compile(r"extras\.(benchmark|quantize)|results/files|runs/time-")  # what measures speed
CODE = ["--", ":(glob)*.py", "extras", *map("results/{}.py".format, ("files", "scores", "unseen"))]
SHARED = {
    f"@runs/{name}.txt": " ".join(text.split()) for name, text in OPTIONS.findall(PREPARATION)
}


class Options:
    data: str = "data"  # the folder that data_sets.py writes
    only: list = None  # names of runs (default: all)
    jobs: positive_int = 1  # runs at a time


def all_runs():
    """Yield page, run, seed, command for each run of commands.sh, with shared options in full."""
    for text in PAGES:
        page = text.split("\n")[0]
        for name, seeds, command in COMMAND.findall(text):
            command = " ".join(command.replace("\\\n", "").split())
            command = re.sub(r"@\S+", lambda match: SHARED[match[0]], command)
            if not seeds:
                yield page, name, 0, command
                continue
            for seed in seeds.split(", "):
                yield page, f"{name}-{seed}", int(seed), command.replace("$SEED", seed)


def expand(command, data):
    """The words of a command. `data` takes the place of $DATA, and so do variables like $T."""
    values = dict(VARIABLE.findall(PREPARATION)) | os.environ | dict(DATA=data)
    words = shlex.split(string.Template(command).substitute(values))
    return [sys.executable if word == "python" else word for word in words]


def with_public_names(text):
    """A printed table, with $T's name on the Hub where its folder on this machine stands."""
    for name, public in VARIABLE.findall(PREPARATION):
        text = text.replace(os.environ.get(name, public), public)
    return text


def prepare(data):
    """Write the files of texts and options, as commands.sh says."""
    environment = os.environ | dict(DATA=data)
    subprocess.run(["bash", "-e", "-c", PREPARATION], env=environment, check=True)


def commit_of_code():
    """The last commit that has changed CODE, none of which may differ from it."""
    git = ["git", "-C", str(HERE.parent)]
    changed = subprocess.check_output([*git, "status", "--porcelain", *CODE], text=True)
    if changed:
        sys.exit(f"commit these files first:\n{changed}")
    return subprocess.check_output([*git, "log", "-1", "--format=%h", *CODE], text=True).strip()


def scores_of(run):
    """The final table of a run that trains -> {row: {column: score}}."""
    return json.loads((run / "scores.json").read_text("utf-8"))


def tables(printed):
    """The rows of all Markdown tables in a text -> {row: {column: number}}."""
    rows = {}
    header = None
    for line in printed.splitlines():
        if not line.startswith("|"):
            header = None
            continue
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if header is None:
            header = cells
        elif not re.fullmatch("[- :]*", name) or not name:
            rows[name] = {key: float(cell) for key, cell in zip(header, cells) if cell}
    return rows


def training_speed(run):
    """Sentences per second of a run's last stage, without scoring, or None for a short stage.

    The median over successive lines that have a loss: where a dev score or another start of the run
    is between two lines, their times do not count.
    """
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    settings = json.loads((run / "args.json").read_text("utf-8"))
    is_second = lines[0]["stage"] == "finetune"
    batch = settings["--finetune-batch-size" if is_second else "--batch-size"]
    speeds = []
    for before, after in pairwise(lines):
        seconds = after["seconds"] - before["seconds"]
        if "loss" in before and "loss" in after and seconds > 0:
            speeds.append(batch * (after["step"] - before["step"]) / seconds)
    return round(median(speeds), 1) if speeds else None


def execute(run, words):
    """Run it, or continue it -> what its line states of the outcome, or None if it has failed."""
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+") as printed:
        child = subprocess.Popen(words, stdout=printed)
        _, status, usage = os.wait4(child.pid, 0)
        printed.seek(0)
        text = printed.read()
    print(text)
    spent = Path("runs", f"{run}.seconds")  # of a run that was broken off
    seconds = time.perf_counter() - begin + float(spent.read_text() if spent.exists() else 0)
    spent.write_text(str(seconds))
    if status != 0:
        return None
    outcome = dict(seconds=round(seconds), peak_memory_MB=usage.ru_maxrss // 1000)
    if "--json" in words:
        file = Path(words[words.index("--json") + 1])
        return outcome | dict(scores=json.loads(file.read_text("utf-8")))
    if "--seed" not in words:  # it does not train
        return outcome | dict(scores=tables(with_public_names(text)))
    folder = Path("runs") / run
    speed = training_speed(folder)
    return outcome | dict(sentences_per_second=speed, scores=scores_of(folder))


def run_and_keep(page, run, seed, command, data, commit, needed=()):
    """Run a command once those that it needs have ended, and append its line to the page's data."""
    for other in needed:
        other.result()
    print(f"{run} ({page}): {command}", flush=True)
    outcome = execute(run, expand(command, data))
    if outcome is None:
        print(f"{run}: failed", file=sys.stderr)
        return
    print(f"{run}: {outcome['seconds']} seconds; {time.strftime('%H:%M')}", flush=True)
    line = dict(run=run, command=command, commit=commit, seed=seed, machine=machine())
    with open(DATA / f"{page}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line | outcome) + "\n")


def use_threads(count):
    """Of the processes that start from now on, and in machine()'s words."""
    os.environ["OMP_NUM_THREADS"] = str(count)
    torch.set_num_threads(count)


def run_all(waiting, jobs, data, commit):
    cores = os.cpu_count()
    use_threads(cores // jobs)
    started = {}  # run: its future
    with ThreadPoolExecutor(jobs) as pool:
        for page, run, seed, command in waiting:
            arguments = (page, run, seed, command, data, commit)
            if ALONE.search(command):
                for other in started.values():
                    other.result()
                use_threads(cores)
                run_and_keep(*arguments)
                use_threads(cores // jobs)
                continue
            words = {word.removeprefix("runs/") for word in command.split()}
            needed = [started[name] for name in words & started.keys()]
            started[run] = pool.submit(run_and_keep, *arguments, needed)
        for other in started.values():
            other.result()


def main():
    args = read_options(Options, __doc__)
    prepare(args.data)
    DATA.mkdir(exist_ok=True)
    os.environ.setdefault("XDG_CACHE_HOME", str(Path("runs", "cache").absolute()))
    waiting = []
    for page, run, seed, command in all_runs():
        path = DATA / f"{page}.jsonl"
        done = path.read_text("utf-8") if path.exists() else ""
        if f'"run": "{run}"' not in done and (not args.only or run in args.only):
            waiting.append((page, run, seed, command))
    if args.only:
        waiting.sort(key=lambda entry: args.only.index(entry[1]))
    run_all(waiting, args.jobs, args.data, commit_of_code())


if __name__ == "__main__":
    run_main(main)
