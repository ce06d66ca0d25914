"""Programs as processes that start at once, and a small run of each training script.

multiprocessing's forkserver imports torch and transformers once and forks for every program.
"""

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("ckd", "congen", "ibkd", "dse", "distilface")
CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ("torch", "scipy.stats", "tqdm", "transformers.models.bert.modeling_bert")
CONTEXT.set_forkserver_preload([*PRELOADED, "transformers.tokenization_utils_tokenizers"])


def run_program(script, words, environment, log):
    """What a new process does. It logs, and may save a checkpoint, at every step."""
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import torch

    torch.set_num_threads(1)
    tempfile.tempdir = environment.get("TMPDIR")
    sys.argv = [script, *words]
    if not os.path.isabs(script):
        os.chdir(ROOT)
        sys.path.insert(0, str(ROOT))
        import common

        common.LOG_STEPS, common.CHECKPOINT_SECONDS = 1, 0
    if script.endswith(".py"):
        runpy.run_path(script, run_name="__main__")
    else:  # read_options() reads the source of the module that is called __main__
        runpy.run_module(script, run_name="__main__", alter_sys=True)


def start(script, words, log, **environment):
    """start("ckd", ["@demo/ckd.txt"], log file, NAME="value") -> a process that has started.

    script: of SCRIPTS, a module of extras, or the path of a file.
    """
    script = f"{script}.py" if script in SCRIPTS else script
    words = [str(word) for word in words]
    process = CONTEXT.Process(target=run_program, args=(script, words, environment, str(log)))
    process.start()
    return process


def finish(process, log):
    """Wait for the end of a process that must succeed."""
    process.join(300)
    assert process.exitcode == 0, Path(log).read_text()[-3000:]


def start_several(count, script, words, folder):
    """As torchrun starts `count` processes of extras.distributed -> [(process, log file)].

    folder: for logs, and for the processes' own temporary files.
    """
    (folder / "temporary").mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    place |= dict(WORLD_SIZE=str(count), TMPDIR=str(folder / "temporary"))
    words = [f"{script}.py" if script in SCRIPTS else script, *words]
    started = []
    for rank in map(str, range(count)):
        log = folder / f"{count}-{rank}.log"
        place |= dict(RANK=rank, LOCAL_RANK=rank)
        started.append((start("extras.distributed", words, log, **place), log))
    return started


def finish_several(started):
    """Wait for the end of processes that must succeed; if one fails, end the others."""
    processes = [process for process, _ in started]
    while not any(process.exitcode for process in processes):
        if not any(process.is_alive() for process in processes):
            return
        time.sleep(0.02)
    for process, log in started:
        process.kill()
        print(log.read_text()[-3000:])
    raise AssertionError("a process has failed")


def small_options(script, models_folder, files, output):
    """The words of a small run of a script, of both stages if it has two."""
    bert, wide = models_folder / "bert", models_folder / "wide"
    data = ["--train", files / "sentences.txt", "--dev", files / "dev.tsv"]
    two = ["--triplets", files / "triplets.csv", "--finetune-epochs", 2]
    two += ["--finetune-batch-size", 24, "--finetune-lr", 1e-3]
    cut = ["--teacher", wide, "--student", bert, "--student-layers", "0,2", "--dropout", 0.1]
    cut += ["--epochs", 2]
    options = {
        "ckd": [*data, *two, *cut],
        "congen": [*data, *cut, "--queue-size", 100],
        "extras.baselines": [*data, *cut, "--dimension", 8],
        "ibkd": [*data, *two, *cut, "--dim", 16],
        "dse": [*cut, "--task", "stsb", "--data", files, "--teacher-epochs", 2],
        "distilface": [*data, "--student", bert, "--steps", 16, "--pooling", "avg_first_last"],
    }
    run = ["--output", output, "--batch-size", 32, "--lr", 1e-3, "--eval-steps", 3]
    return [*options[script], *run]
