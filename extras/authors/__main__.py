# SPDX-License-Identifier: MIT
"""The authors' own training programs and our scripts, step by step, on the same start and data.

Runs the authors' program in --python, an environment with the libraries of its time, and our
script with the departures from it undone, and prints how far apart the losses are: with every
departure undone, then with each of them left in, alone. docs/authors.md has the results.

  python -m extras.authors ckd --checkout sentemb --python env/bin/python
"""

import importlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import torch

from common import UserError, note, read_options, run_main, write_json

MODULES = dict(ckd="distilcse", kd="distilcse", nli="distilcse", congen="congen")
MODULES |= {"ibkd-1": "ibkd", "ibkd-2": "ibkd", "distilface": "distilface"}
MODULES |= {f"dse{kind}": "dse" for kind in ("", "-teacher", "-mnli", "-mnli-teacher")}
RECORDED = Path(__file__).resolve().parents[2] / "tests" / "authors"
# What an environment has of the libraries that are given, as a dict in JSON, and its Python.
VERSIONS = """
import json, platform, sys
from importlib.metadata import version
found = {name: version(name) for name in sys.argv[1:]}
print(json.dumps({"python": platform.python_version(), **found}))
"""


class Options:
    name: Literal[tuple(MODULES)]  # of a program of the authors
    checkout: Path = None  # folder with a clone of the authors' code
    python: str = sys.executable  # an interpreter with the authors' libraries
    work: Path = None  # folder for all that both runs write (default: a temporary one)
    record: bool = False  # write the authors' losses to tests/authors/
    epoch: Path = None  # folder of real data: whole epochs of them; both students are scored
    departures: list = []  # with --epoch: also with each of these alone left in


def check_checkout(folder, module):
    """Raise UserError unless the folder is the authors' repository at the commit we read."""
    command = ["git", "-C", folder, "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if found != module.COMMIT:
        note(f"git clone https://github.com/{module.REPOSITORY} {folder}")
        note(f"git -C {folder} checkout {module.COMMIT}")
        raise UserError(f"{folder}: is not {module.REPOSITORY} at commit {module.COMMIT:.7}")


def read_versions(python, module):
    """The authors' libraries that an interpreter has -> {name: version}. Raises UserError."""
    alone = getattr(module, "ALONE", "")  # what is installed without its dependencies
    wanted = f"{module.LIBRARIES} {alone}".split()
    names = [re.split("[=<>]", word)[0] for word in wanted]
    done = subprocess.run([python, "-c", VERSIONS, *names], capture_output=True)
    found = {} if done.returncode else json.loads(done.stdout)
    pins = dict(word.split("==") for word in wanted if "==" in word)
    if any(found.get(name, "").partition("+")[0] != pin for name, pin in pins.items()):
        note("python3.11 -m venv env")  # tokenizers 0.13.3 has no wheel for a later Python
        note(f"env/bin/pip install {shlex.join(module.LIBRARIES.split())}")
        if alone:
            note(f"env/bin/pip install --no-deps {alone}")
        raise UserError(f"{python}: the authors' libraries are not there; give --python")
    return found


def record(name, module, versions, theirs):
    """Write the authors' losses, and what made them, to tests/authors/NAME.json."""
    machine = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    content = dict(repository=module.REPOSITORY, commit=module.COMMIT, libraries=versions)
    content |= dict(processor=machine, threads=torch.get_num_threads())
    content |= dict(dev=theirs["dev"], losses=theirs["losses"])
    write_json(RECORDED / f"{name}.json", content)


def compare(program, work, theirs):
    """Print the table of one program."""
    from extras.authors import harness

    everything = set(program.departures)
    losses = theirs["losses"]
    print(f"{len(losses)} losses, from {min(losses):.4g} to {max(losses):.4g}\n")
    print("| departure left in | largest relative difference of a loss | of loss |")
    print("|---|---:|---:|")
    for name, what in {"none": "all are undone", **program.departures}.items():
        outcome = program.ours(work, everything - {name})
        largest, step = harness.loss_difference(outcome, theirs)
        print(f"| {name}: {what} | {largest:.1e} | {step} |", flush=True)
        if name == "none":
            equal = outcome
    print(f"\nlargest difference of a weight: {harness.weight_difference(equal, theirs):.1e}")
    print(f"dev: theirs {theirs['dev']}, ours {equal['dev']}")


def main():
    args = read_options(Options, __doc__)
    if not args.checkout:
        raise UserError("give --checkout, a folder with a clone of the authors' code")
    if args.epoch:
        os.environ["AUTHORS_DATA"] = f"{args.epoch.resolve()}"  # for both programs
    from extras.authors import epoch, harness

    module = importlib.import_module(f"extras.authors.{MODULES[args.name]}")
    program = module.PROGRAMS[args.name]
    check_checkout(args.checkout, module)
    versions = read_versions(args.python, module)
    with tempfile.TemporaryDirectory() as temporary:
        work = (args.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        program.prepare(work)
        begin = time.perf_counter()
        theirs = harness.run_theirs(args.python, MODULES[args.name], args.name, args.checkout, work)
        theirs["minutes"] = (time.perf_counter() - begin) / 60
        print(f"{program.title} of {module.REPOSITORY}, commit {module.COMMIT:.7}")
        if args.record:
            record(args.name, module, versions, theirs)
        if args.epoch:
            epoch.compare(args.name, program, work, theirs, args.departures)
        else:
            compare(program, work, theirs)


if __name__ == "__main__":
    run_main(main)
