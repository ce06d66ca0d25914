"""SIGKILL at random moments, again and again: a resumed run ends as the one that nobody touched.

The moments are spread over all of a run: while it starts, embeds by its teacher, trains, writes,
and scores. Other moments each time: a failure prints the seed that --soak-seed takes.
"""

import json
import math
import os
import random
import signal
import time

import pytest
from processes import SCRIPTS, result, small_run

RUNS = {script: script for script in SCRIPTS} | {
    "baselines pkd": "baselines",
    "baselines hpd": "baselines",
    "sweep": "sweep",
}
SHARES = {"sweep": 10}  # of all kills a tenth, as its runs load torch; the others a fifth each
METHODS = {"baselines pkd": "pkd", "baselines hpd": "hpd"}  # with projections of their own
PROJECTION = ("--dimension", 16)


def arguments(name, models_folder, files, folder):
    """The command line of a run in `folder`, with a cache of its own."""
    cache = ("--cache-dir", folder / "cache")
    if name == "sweep":
        settings = ("distilface.py", "pooling=avg,max_last2", "--output", folder / "out")
        return *settings, "--", *small_run("distilface", models_folder, files), *cache
    options = small_run(RUNS[name], models_folder, files)
    if name in METHODS:
        options = (*options, "--method", METHODS[name], *PROJECTION)
    return *options, *cache, "--resume", "--output", folder / "out"


def outcome(name, folder):
    """What must be equal: weights, logs, and a sweep's lines without its times."""
    if name != "sweep":
        return result(folder / "out")
    runs = sorted(path.parent for path in (folder / "out").glob("*/metrics.jsonl"))
    lines = map(json.loads, (folder / "out" / "sweep.jsonl").read_text().splitlines())
    scores = [(line["name"], line["dev"], line["step"], line["error"] is None) for line in lines]
    return {path.name: result(path) for path in runs}, scores


def kill(process):
    """The process and those that it has started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_killed_at_random_moments(processes, models_folder, files, tmp_path, pytestconfig, name):
    seed = pytestconfig.getoption("--soak-seed")
    moments = random.Random(f"{seed} {name}")
    kills = math.ceil(pytestconfig.getoption("--soak") / SHARES.get(name, 5))
    whole = tmp_path / "whole"
    begin = time.monotonic()
    process = processes.run(RUNS[name], *arguments(name, models_folder, files, whole))
    assert process.returncode == 0, process.errors
    duration = time.monotonic() - begin
    expected = outcome(name, whole)

    number, killed = 0, 0
    while killed < kills:
        folder = tmp_path / f"killed{number}"
        process = processes.start(RUNS[name], *arguments(name, models_folder, files, folder))
        end = time.monotonic() + moments.uniform(0, duration)
        process.wait_until(lambda: time.monotonic() > end, or_end=True)  # noqa: B023
        if process.returncode is None:
            kill(process)
            killed += 1
        else:  # it was nearly done; the next one begins anew
            assert process.returncode == 0, (seed, process.errors)
            assert outcome(name, folder) == expected, seed
            number += 1
    for _ in range(2):  # a run that is over says so again
        process = processes.run(RUNS[name], *arguments(name, models_folder, files, folder))
        assert process.returncode == 0, (seed, process.errors)
        assert outcome(name, folder) == expected, (seed, folder)
        assert process.output.read_text().count("| model") + (name == "sweep") == 1
