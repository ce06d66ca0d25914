"""Programs as processes that start at once, and a small run of each training script.

A server (multiprocessing's forkserver) imports torch and transformers once and forks for every
program, which is then a process of its own: it can be killed, and has an exit status.
"""

import multiprocessing
import os
import runpy
import socket
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("ckd", "congen", "ibkd", "dse", "distilface")
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "transformers", "scipy.stats"])


def run_program(script, words, environment, log):
    """What a new process does."""
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import torch

    torch.set_num_threads(1)
    sys.argv = [script, *words]
    sys.path.insert(0, str(ROOT))
    runpy.run_path(str(ROOT / script), run_name="__main__")


def start(script, words, log, **environment):
    """start("ckd.py", ["--demo"], log file, NAME="value") -> a process that has started."""
    words = [str(word) for word in words]
    arguments = (script, words, {"HF_HUB_OFFLINE": "1"} | environment, str(log))
    process = CONTEXT.Process(target=run_program, args=arguments)
    process.start()
    return process


def finish(process, log):
    """Wait for the end of a process that must succeed."""
    process.join(300)
    assert process.exitcode == 0, Path(log).read_text()[-3000:]


def start_several(count, script, words, folder, more=()):
    """As torchrun starts `count` processes -> [(process, log file)]. more: words of the last."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(count):
        environment = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=count, MASTER_PORT=port)
        environment = {name: str(value) for name, value in environment.items()}
        log = folder / f"{Path(script).stem}-{count}-{rank}.log"
        own = [*words, *more] if rank == count - 1 else words
        process = start(script, own, log, MASTER_ADDR="127.0.0.1", **environment)
        started.append((process, log))
    return started


def small_options(script, models_folder, files, output):
    """The words of a small run of a script, of both stages if it has two."""
    sentences = ["--train", files / "sentences.txt", "--dev", files / "dev.tsv"]
    triplets = ["--triplets", files / "triplets.csv", "--finetune-epochs", 2]
    triplets += ["--finetune-batch-size", 24, "--finetune-lr", 1e-3]
    teacher = ["--teacher", models_folder / "wide", "--student", models_folder / "bert"]
    teacher += ["--student-layers", "0,2", "--dropout", 0.1, "--epochs", 2]
    options = {
        "ckd": [*sentences, *triplets, *teacher],
        "congen": [*sentences, *teacher, "--queue-size", 100],
        "extras.baselines": [*sentences, *teacher, "--dimension", 8],
        "ibkd": [*sentences, *triplets, *teacher, "--dim", 16],
        "dse": [*teacher, "--task", "stsb", "--glue", files, "--teacher-epochs", 2],
        "distilface": [*sentences, "--student", models_folder / "bert", "--max-steps", 16]
        + ["--pooling", "avg_first_last"],
    }
    run = ["--output", output, "--batch-size", 32, "--lr", 1e-3, "--eval-steps", 3]
    return [*options[script], *run]
