"""Several processes train as one does: losses, weights, files, errors, resuming.

The processes are forks of a server that has imported torch and the project once, since that takes
seconds for each process of its own. One test starts torchrun itself, on two "hosts".
"""

import importlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_retrieval import training_folder

import common
from support import distributed
from support import run as run_module

SCRIPTS = ("baselines", "ckd", "congen", "distilface", "dse", "ibkd")
SERVER = multiprocessing.get_context("forkserver")
PRELOADED = ("test_distributed", *SCRIPTS, "transformers.models.bert.modeling_bert")
ROOT = Path(common.__file__).parent
STEPS = 30
BATCH = 33  # of 300 rows: the last batch of an epoch has 3, fewer than four processes
LIMIT = 60  # seconds


# ---- processes


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def begin(log, environment, function, *arguments):
    """What a new process does: function(*arguments), with what it prints in the file `log`."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    torch.set_num_threads(1)
    os.environ.update(environment)
    function(*arguments)


class Processes:
    """`count` processes that call function(*arguments), as torchrun starts them."""

    def __init__(self, folder, count, function, *arguments):
        folder.mkdir(parents=True, exist_ok=True)
        port = str(free_port())
        self.logs = [folder / f"process-{rank}.log" for rank in range(count)]
        self.members = []
        for rank, log in enumerate(self.logs):
            environment = dict(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(count),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            )
            member = SERVER.Process(target=begin, args=(log, environment, function, *arguments))
            member.start()
            self.members.append(member)

    def wait(self):
        """-> the exit status of each process, after at most a minute."""
        until = time.monotonic() + LIMIT
        for member in self.members:
            member.join(max(0, until - time.monotonic()))
        statuses = [member.exitcode for member in self.members]
        for member in self.members:
            member.kill()
        return statuses

    def printed(self):
        """What all processes have printed."""
        return "\n".join(log.read_text() for log in self.logs)

    def succeed(self):
        statuses = self.wait()
        assert set(statuses) == {0}, (statuses, self.printed()[-3000:])
        return self.printed()


def run_script(name, options, cache):
    """The command line of a script. Every step is logged, every checkpoint of a stage is kept."""
    common.CACHE = Path(cache)
    run_module.LOG_STEPS = 1
    write = run_module.Run.checkpoint

    def checkpoint(self, modules=(), optimizer=None):
        write(self, modules, optimizer)
        if modules and distributed.is_main():
            shutil.copy(self.file, self.folder / f"last-{self.state['stage']}.safetensors")

    run_module.Run.checkpoint = checkpoint
    sys.argv = [f"{name}.py", *map(str, options)]
    script = importlib.import_module(name)
    script.run_main(script.main)


def train(folder, count, name, *options):
    """Start a script in `count` processes; OUTPUT is folder/out, the cache is folder/cache."""
    options = [*options, "--output", folder / "out"]
    return Processes(folder, count, run_script, name, options, folder / "cache")


# ---- what a run leaves


def metrics(folder):
    """The lines of metrics.jsonl without speed and memory."""
    lines = []
    for line in (folder / "out" / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        values.pop("peak_memory_mb", None)
        lines.append({key: value for key, value in values.items() if "_per_second" not in key})
    return lines


def assert_same_run(folder, reference):
    """The same losses to 1e-5, dev scores to 0.001, weights to 1e-4; returns the number of steps.

    Weights: all parameters, and the queue, as they are at the end of each stage.
    """
    lines, expected = metrics(folder), metrics(reference)
    assert len(lines) == len(expected)
    for line, other in zip(lines, expected):
        assert line.keys() == other.keys()
        assert line.pop("stage") == other.pop("stage")
        for key, value in line.items():
            tolerance = 1e-3 if key == "dev" else 1e-5
            assert value == pytest.approx(other[key], rel=1e-5, abs=tolerance), (line, other)
    stages = sorted(path.name for path in (reference / "out").glob("last-*.safetensors"))
    for stage in stages:
        weights, others = load_file(folder / "out" / stage), load_file(reference / "out" / stage)
        for name, other in others.items():
            # Attention does not depend on the bias of keys, so its gradient is 0 but for rounding,
            # which Adam divides by its own size.
            if not name.startswith("optimizer.") and not name.endswith("key.bias"):
                difference = (weights[name] - other).abs().max()
                assert difference < 1e-4, (stage, name, difference)
    return len(lines) - len(stages)


@pytest.fixture(scope="module", autouse=True)
def server():
    """Starts it with the folders in which it finds the modules that it loads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        SERVER.set_forkserver_preload([*PRELOADED])
        forkserver.ensure_running()


@pytest.fixture(scope="module")
def data(models_folder, files, tmp_path_factory):
    """Options that all scripts share, and models without dropout."""
    root = tmp_path_factory.mktemp("without-dropout")
    for name in ("bert", "wide"):
        shutil.copytree(models_folder / name, root / name)
        config = json.loads((root / name / "config.json").read_text())
        config.update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        (root / name / "config.json").write_text(json.dumps(config))
    sentences = ("--train", files / "sentences.txt", "--dev", files / "dev.tsv")
    common_options = ("--max-steps", STEPS, "--eval-steps", 15)
    student = ("--student", root / "bert", "--student-layers", "0,2", "--pooling", "mean")
    distill = (*common_options, *sentences, *student, "--teacher", root / "wide")
    distill = (*distill, "--epochs", 9, "--batch-size", BATCH, "--lr", 1e-3)
    triplets = ("--triplets", files / "triplets.csv", "--finetune-epochs", 20)
    triplets = (*triplets, "--finetune-batch-size", BATCH, "--finetune-lr", 1e-3)
    return {
        "ckd": ("ckd", *distill, *triplets, "--queue-size", 100, "--learn-temperature"),
        "congen": ("congen", *distill, "--queue-size", 100),
        "ibkd": ("ibkd", *distill, *triplets, "--hsic-texts", "all", "--dim", 8),
        "pkd": ("baselines", "--method", "pkd", *distill),
        "skd": ("baselines", "--method", "skd", *distill),
        "distilface": (
            *("distilface", *common_options, *sentences, "--lr", 1e-3, "--batch-size", BATCH),
            *("--student", root / "bert", "--pooling", "avg_last2"),
        ),
        "dse": (
            *("dse", *common_options, "--task", "stsb", "--glue", "demo", "--lr", 1e-3),
            *("--teacher", root / "bert", "--student-layers", "0,2", "--batch-size", BATCH),
            *("--teacher-lr", 1e-3),
        ),
    }


@pytest.fixture(scope="module")
def one_process(data, tmp_path_factory):
    """one_process("ckd") -> the folder of the run of one process, which runs once."""
    finished = {}

    def call(name):
        if name not in finished:
            folder = tmp_path_factory.mktemp(f"one-{name}")
            train(folder, 1, *data[name]).succeed()
            finished[name] = folder
        return finished[name]

    return call


# ---- training


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ckd", "congen", "ibkd", "pkd", "skd", "distilface", "dse"])
def test_two_processes_train_as_one(data, one_process, tmp_path, name):
    printed = train(tmp_path, 2, *data[name]).succeed()
    assert assert_same_run(tmp_path, one_process(name)) >= STEPS
    assert printed.count("| student") >= 1
