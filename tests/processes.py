"""Processes of the programs that start at once, so that tests can kill many of them.

A server loads torch once and forks for every program: a process of its own, with signals, limits
and exit status as any other, but without the seconds that torch takes to load. Beside it, a small
run of each training script.
"""

import atexit
import contextlib
import gc
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("ckd", "congen", "ibkd", "dse", "distilface", "baselines")
PATIENCE = 120  # seconds until a test gives up
VARYING = ("sentences_per_second", "pairs_per_second", "peak_memory_mb")  # of a line of the log


# ---- the server


def serve():
    """Answer requests, a line of JSON each: {"start": {...}} with a pid, {"poll": pid} with the
    exit status, None while it runs."""
    sys.path[0] = str(ROOT)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch._dynamo
    from transformers.models.bert import modeling_bert
    from transformers.models.distilbert import modeling_distilbert

    import support.command_line
    import support.run
    import support.views

    gc.freeze()  # nothing that is loaded by now is copied for a fork
    del torch, support, modeling_bert, modeling_distilbert
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            answer = os.fork()
            if answer == 0:
                break
        else:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        print(json.dumps(answer), file=answers, flush=True)
    else:
        return
    answers.close()
    run_program(**request["start"])


def run_program(words, environment, output, errors, file_size):
    """What a new process does."""
    for number, path in ((0, os.devnull), (1, output), (2, errors)):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.setsid()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, resource.RLIM_INFINITY))
    sys.argv = words
    status = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    # Without the seconds that Python takes to delete torch, but with what runs at its end.
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        status = 120
    os._exit(status)


# ---- its client


class Processes:
    """Starts programs by way of a server, which it starts itself."""

    def __init__(self, folder):
        self.folder = folder
        self.count = 0
        self.server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )

    def ask(self, **request):
        print(json.dumps(request), file=self.server.stdin, flush=True)
        return json.loads(self.server.stdout.readline())

    def start(self, script, *options, file_size=None, output=None, **environment):
        """A running Process of script.py; file_size: the limit of its files in bytes."""
        self.count += 1
        errors = self.folder / f"{self.count}.err"
        output = output or self.folder / f"{self.count}.out"
        start = dict(
            words=[str(ROOT / f"{script}.py"), *map(str, options)],
            environment=environment,
            output=str(output),
            errors=str(errors),
            file_size=file_size,
        )
        return Process(self, self.ask(start=start), output, errors)

    def run(self, script, *options, **more):
        """The same process, at its end."""
        return self.start(script, *options, **more).wait()

    def close(self):
        self.server.stdin.close()
        self.server.wait()


class Process:
    """A program that runs, or has ended with `returncode`."""

    def __init__(self, processes, pid, output, errors):
        self.processes = processes
        self.pid = pid
        self.output = Path(output)
        self.error_file = errors
        self.returncode = None
        self.begin = time.monotonic()

    @property
    def errors(self):
        """The lines of stderr without the progress bars."""
        lines = self.error_file.read_text().replace("\r", "\n").splitlines()
        return [line for line in lines if line.strip() and "|" not in line]

    def poll(self):
        if self.returncode is None:
            self.returncode = self.processes.ask(poll=self.pid)
        return self.returncode

    def wait(self):
        self.wait_until(lambda: False, or_end=True)
        return self

    def wait_until(self, condition, or_end=False):
        """Until condition() holds; that the process ends before is an error, unless `or_end`."""
        while not condition():
            if self.poll() is not None:
                assert or_end, f"it ended with {self.returncode}: {self.errors}"
                return
            assert time.monotonic() < self.begin + PATIENCE, self.errors
            time.sleep(0.005)

    def wait_for_step(self, folder, step):
        """Until the log of the run in `folder` has a line of this step or a later one."""
        self.wait_until(lambda: any(line["step"] >= step for line in metrics(folder)))

    def send_signal(self, number):
        os.kill(self.pid, number)

    def limit_file_size(self, size):
        """Let it write no longer files than this from now on."""
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


# ---- small runs


def small_run(script, models_folder, files):
    """The options of a run of some steps, in as many stages as the script has, without --output.

    files: as in conftest.py, and GLUE's folder STS-B.
    """
    data = ("--train", files / "sentences.txt", "--dev", files / "dev.tsv", "--eval-steps", 3)
    teacher = ("--teacher", models_folder / "wide", "--student", models_folder / "bert")
    training = ("--epochs", 1, "--batch-size", 32, "--lr", 1e-3)
    triplets = ("--triplets", files / "triplets.csv", "--finetune-batch-size", 16)
    return {
        "ckd": (*data, *teacher, *training, *triplets, "--finetune-epochs", 1),
        "congen": (*data, *teacher, *training),
        "ibkd": (*data, *teacher, *training, *triplets, "--finetune-epochs", 1, "--dim", 16),
        "dse": (
            *("--task", "stsb", "--glue", files, *teacher, "--teacher-epochs", 1, "--epochs", 6),
            *("--batch-size", 20, "--lr", 1e-3, "--eval-steps", 3),
        ),
        "distilface": (
            *(*data, "--student", models_folder / "bert", "--batch-size", 32),
            *("--max-steps", 12, "--lr", 1e-3),
        ),
        "baselines": (*data, *teacher, *training, "--method", "skd"),
    }[script]


def metrics(folder):
    """The lines of metrics.jsonl that are complete, without speed and memory."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    entries = [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]
    return [{key: line[key] for key in line if key not in VARYING} for line in entries]


def result(folder):
    """What two runs of the same options have in common: the student's weights, and the log."""
    weights = {}
    for path in sorted(folder.rglob("*.safetensors")):
        if path.parent.name != "checkpoint":
            weights[str(path.relative_to(folder))] = path.read_bytes()
    return weights, metrics(folder)


@contextlib.contextmanager
def largest_file(size):
    """The system refuses to write a longer file, also to libraries."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


if __name__ == "__main__":
    serve()
