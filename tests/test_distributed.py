"""Several processes train as one does: losses, weights, files, errors, resuming.

The processes are forks of a server that has imported torch and the project once, since that takes
seconds for each process of its own. One test starts torchrun itself, on two "hosts".
"""

import importlib
import json
import math
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
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_retrieval import training_folder
from torch.distributed import TCPStore

import ckd
import common
import distilface
from support import cache, demo, distributed
from support import run as run_module
from support.encoder import load_encoder
from support.run import Step

SCRIPTS = ("baselines", "ckd", "congen", "distilface", "dse", "ibkd")
SERVER = multiprocessing.get_context("forkserver")
PRELOADED = ("test_distributed", *SCRIPTS, "transformers.models.bert.modeling_bert")
ROOT = Path(common.__file__).parent
STEPS = 30
STEPS_DONE = []  # of a process
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
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    torch.set_num_threads(1)
    os.environ.update(environment)
    try:
        function(*arguments)
    except Exception:
        sys.excepthook(*sys.exc_info())


class Processes:
    """`count` processes that call function(*arguments), as torchrun starts them.

    Like torchrun, the process that starts them has the store in which they meet.
    """

    def __init__(self, folder, count, function, *arguments):
        folder.mkdir(parents=True, exist_ok=True)
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.logs = [folder / f"process-{rank}.log" for rank in range(count)]
        self.members = []
        for rank, log in enumerate(self.logs):
            environment = dict(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(count),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(self.store.port),
                TORCHELASTIC_USE_AGENT_STORE="True",
                TORCHELASTIC_RESTART_COUNT="0",
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


def run_script(name, options, cache, killed=None):
    """The command line of a script. Every step is logged, every checkpoint of a stage is kept.

    killed: (rank, step), the process that SIGKILL ends in the middle of a step.
    """
    common.Cache.folder = Path(cache)
    run_module.LOG_STEPS = 1
    write = run_module.Run.checkpoint

    def checkpoint(self, modules=(), optimizer=None):
        write(self, modules, optimizer)
        if modules and distributed.is_main():
            shutil.copy(self.file, self.folder / f"last-{self.state['stage']}.safetensors")

    backward = run_module.Run.backward

    def backward_or_die(self, loss, optimizer):
        STEPS_DONE.append(loss)
        if killed == (distributed.rank(), len(STEPS_DONE)):
            os.kill(os.getpid(), signal.SIGKILL)
        backward(self, loss, optimizer)

    run_module.Run.checkpoint = checkpoint
    run_module.Run.backward = backward_or_die
    sys.argv = [f"{name}.py", *map(str, options)]
    script = importlib.import_module(name)
    script.run_main(script.main)


def train(folder, count, name, *options, killed=None):
    """Start a script in `count` processes; OUTPUT is folder/out, the cache is folder/cache."""
    options = [*options, "--output", folder / "out"]
    return Processes(folder, count, run_script, name, options, folder / "cache", killed)


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
    """The same losses to 1e-5, dev scores to 0.001, weights to 1e-4 -> number of steps.

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


def assert_same_means(lines, steps):
    """The losses of a log are means of those of a log of every step."""
    assert [line["step"] for line in lines] == [0, 15, 25, STEPS]
    for before, line in zip(lines, lines[1:]):
        losses = [step["loss"] for step in steps if before["step"] < step["step"] <= line["step"]]
        assert line["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def assert_same_teacher_embeddings(folder, reference):
    """The same files in folder/cache, byte for byte."""
    files = sorted((folder / "cache").glob("*.npy"))
    expected = sorted((reference / "cache").glob("*.npy"))
    assert [path.name for path in files] == [path.name for path in expected] != []
    for path, other in zip(files, expected):
        assert path.read_bytes() == other.read_bytes()


def write_glue(folder):
    """STS-B of the demo's pairs."""
    folder.mkdir(parents=True)
    for split, count in (("train", 200), ("dev", 60), ("test", 60)):
        lines = ["sentence1\tsentence2\tscore\n"]
        for first, second, score in zip(*demo.scored_pairs(count, seed=count)):
            lines.append(f"{first}\t{second}\t{score}\n")
        (folder / f"{split}.tsv").write_text("".join(lines), "utf-8")


@pytest.fixture(scope="module")
def data(models_folder, files, tmp_path_factory):
    """{name: a script and its options}, with models without dropout."""
    root = tmp_path_factory.mktemp("without-dropout")
    write_glue(root / "glue" / "STS-B")
    training_folder(root / "beir", 200, 60)
    for name in ("bert", "wide"):
        shutil.copytree(models_folder / name, root / name)
        config = json.loads((root / name / "config.json").read_text())
        config.update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        (root / name / "config.json").write_text(json.dumps(config))
    sentences = ("--train", files / "sentences.txt", "--dev", files / "dev.tsv")
    common_options = ("--max-steps", STEPS, "--eval-steps", 15, "--dropout", 0)
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
            *("dse", *common_options, "--task", "stsb", "--glue", root / "glue", "--lr", 1e-3),
            *("--teacher", root / "bert", "--student-layers", "0,2", "--batch-size", BATCH),
            *("--teacher-lr", 1e-3),
        ),
        "retrieval": (
            *("ibkd", "--task", "dr", "--beir", root / "beir", "--hard-negatives", 3),
            *(
                "--max-steps",
                10,
                "--eval-steps",
                5,
                "--dropout",
                0,
                *student,
                "--batch-size",
                BATCH,
            ),
            *("--finetune-batch-size", BATCH),
            *("--teacher", root / "wide", "--lr", 1e-3, "--finetune-lr", 1e-3),
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


# ---- exchanges


def parts_of_a_batch(rows):
    """What a process has of a batch, and how it computes with it -> gradients, loss.

    Two vectors: one is a parameter before gather(), the other one behind it. A row has two more
    rows in a second tensor. The loss is of all pairs.
    """
    before = torch.linspace(-1, 2, 4).double().requires_grad_()
    behind = torch.linspace(1, -2, 4).double().requires_grad_()
    data = torch.arange(4 * rows).double().view(rows, 4).cos()
    more = torch.arange(8 * rows).double().view(2 * rows, 4).sin()
    step = Step(1, 1, 1, np.arange(rows))
    own_more = more.view(rows, 2, 4)[step.own_rows].flatten(0, 1)
    first, second = step.gather(data[step.own_rows] * before, own_more * before)
    loss = ((first * behind) @ second.T).tanh().square().sum()
    loss.backward()
    gradients = [before.grad, behind.grad]
    distributed.average(gradients)
    return [loss.detach(), *gradients]


def save_parts(folder, sizes):
    distributed.start()
    for rows in sizes:
        torch.save(parts_of_a_batch(rows), folder / f"{distributed.rank()}-{rows}.pt")
    distributed.finish()


@pytest.mark.parametrize("count", [2, 4])
def test_losses_and_gradients_of_gathered_rows(tmp_path, count):
    """Also of a batch that does not divide by the number of processes, or is smaller."""
    sizes = (1, 3, 8, 11)
    Processes(tmp_path, count, save_parts, tmp_path, sizes).succeed()
    for rows in sizes:
        expected = parts_of_a_batch(rows)
        for rank in range(count):
            for result, value in zip(torch.load(tmp_path / f"{rank}-{rows}.pt"), expected):
                assert torch.allclose(result, value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("processes", [1, 2, 5])
@pytest.mark.parametrize("rows", [0, 1, 4, 5, 128])
def test_rows_are_split_evenly(monkeypatch, processes, rows):
    monkeypatch.setattr(distributed, "world_size", lambda: processes)
    sizes = distributed.split(rows)
    assert sizes == [len(part) for part in np.array_split(np.arange(rows), processes)]
    owned = []
    for rank, size in enumerate(sizes):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        if size > 0:
            owned += range(rows)[distributed.own_part(sizes)]
    assert owned == list(range(rows))


# ---- training


NAMES = ("ckd", "congen", "ibkd", "retrieval", "pkd", "skd", "distilface", "dse")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_train_as_one(data, one_process, tmp_path, name):
    printed = train(tmp_path, 2, *data[name]).succeed()
    reference = one_process(name)
    assert assert_same_run(tmp_path, reference) >= (20 if name == "retrieval" else STEPS)
    assert printed.count("| model") == 1
    if name not in ("dse", "distilface"):  # their teachers: trained in the run, and none
        assert_same_teacher_embeddings(tmp_path, reference)


@pytest.mark.slow
def test_a_killed_process_ends_the_run_which_any_number_of_processes_resume(
    data, one_process, tmp_path
):
    processes = train(tmp_path, 3, *data["ckd"], killed=(2, 20))
    begin = time.monotonic()
    statuses = processes.wait()
    assert time.monotonic() - begin < LIMIT / 2
    assert statuses == [2, 2, -signal.SIGKILL]
    errors = [line for line in processes.printed().splitlines() if "rror" in line]
    assert errors == [distributed.ENDED.strip()]
    processes = train(tmp_path, 2, *data["ckd"], "--resume", killed=(0, 20))  # after 15: in stage 2
    assert processes.wait() == [-signal.SIGKILL, 2]
    train(tmp_path, 1, *data["ckd"], "--resume").succeed()
    assert_same_run(tmp_path, one_process("ckd"))


@pytest.mark.slow
def test_four_processes_train_as_one(data, one_process, tmp_path):
    train(tmp_path, 4, *data["pkd"]).succeed()
    assert_same_run(tmp_path, one_process("pkd"))


@pytest.mark.slow
def test_torchrun_on_two_hosts(data, one_process, tmp_path):
    """Each host has its own cache. All of them share the output folder."""
    script, *options = data["pkd"]
    port = free_port()
    hosts = []
    for host in range(2):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            2,
            "--node-rank",
            host,
        ]
        command += ["--nproc-per-node", 1, "--master-addr", "127.0.0.1", "--master-port", port]
        command += [ROOT / f"{script}.py", *options, "--output", tmp_path / "out"]
        cache = {"XDG_CACHE_HOME": str(tmp_path / f"host-{host}"), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            list(map(str, command)),
            env=os.environ | cache,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        hosts.append(process)
    outputs = [host.communicate(timeout=2 * LIMIT) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    assert sum(output.count("| model") for output, _ in outputs) == 1
    reference = one_process("pkd")
    assert_same_means(metrics(tmp_path), metrics(reference))
    for host in range(2):
        home = tmp_path / f"host-{host}"
        (home / "sentence-distillation").rename(home / "cache")
        assert_same_teacher_embeddings(home, reference)


# ---- teacher embeddings


def compute_embeddings(folder, model, sentences, interrupt_at=None):
    """The teacher's, in folder/cache; folder/RANK says how many batches a process has computed."""
    common.Cache.folder = folder / "cache"
    cache.SECONDS_BETWEEN_SAVES = -1  # after every batch
    teacher = load_encoder(model).eval()
    computed = folder / str(distributed.rank())

    def encode_batch(input_ids, attention_mask):
        batches = int(computed.read_text()) if computed.exists() else 0
        if batches == interrupt_at:
            raise KeyboardInterrupt
        computed.write_text(str(batches + 1))
        return teacher(input_ids, attention_mask)

    tokens = common.Tokens(teacher, sentences)
    cache.teacher_embeddings(teacher, tokens, "cpu", encode_batch)


def share_embeddings(*arguments):
    distributed.start()
    compute_embeddings(*arguments)
    distributed.finish()


def test_teacher_embeddings_are_shared_and_continue_after_a_crash(
    models_folder, tmp_path, monkeypatch
):
    """The same bytes as one process writes, each batch computed once."""
    for owner, name in ((common.Cache, "folder"), (cache, "SECONDS_BETWEEN_SAVES")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # and undo what follows
    sentences = demo.sentences(1000)
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    compute_embeddings(one, models_folder / "wide", sentences)
    batches = int((one / "0").read_text())
    with pytest.raises(KeyboardInterrupt):
        compute_embeddings(two, models_folder / "wide", sentences, 3)
    assert not list((two / "cache").glob("*.npy"))
    (two / "0").unlink()
    Processes(two, 2, share_embeddings, two, models_folder / "wide", sentences).succeed()
    computed = [int((two / rank).read_text()) for rank in ("0", "1")]
    left = batches - 3
    assert computed == [math.ceil(left / 2)] * 2  # where one is left over, both compute it
    assert_same_teacher_embeddings(two, one)
    assert not list((two / "cache").glob("*.pa*"))


# ---- errors and options


@pytest.mark.parametrize(
    "options, expected",
    [
        (("--lr", -1), "error: argument --lr: '-1' is not a number above 0"),
        (("--dev", "none.tsv"), "error: none.tsv: No such file or directory"),
    ],
)
def test_an_error_of_every_process_is_one_line(data, tmp_path, options, expected):
    processes = train(tmp_path, 3, *data["ckd"], *options)
    assert processes.wait() == [2, 2, 2]
    (line,) = [line for line in processes.printed().splitlines() if "rror" in line]
    assert line.startswith(expected)
    assert not (tmp_path / "out").exists()


def crash_in_one(rank):
    distributed.start()
    if distributed.rank() == rank:
        raise RuntimeError("a bug")
    distributed.wait_for_all()


def test_a_crash_of_one_process_is_one_traceback(tmp_path):
    processes = Processes(tmp_path, 2, crash_in_one, 1)
    assert processes.wait() == [2, 1]
    assert processes.printed().count("Traceback") == 1
    assert "RuntimeError: a bug" in processes.printed()
    assert "error: " not in processes.printed()


def help_of(name):
    sys.argv = [name, "--help"]
    script = importlib.import_module(name)
    script.run_main(script.main)


def test_help_is_printed_once(tmp_path):
    assert Processes(tmp_path, 2, help_of, "ckd").succeed().count("usage: ") == 1


@pytest.mark.parametrize("script, dropout", [(ckd, 0.0), (distilface, None)])
def test_several_processes_have_no_dropout(monkeypatch, capsys, script, dropout):
    """Unless it is given, or is what the method rests on."""
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(sys, "argv", ["script", "--student", "mine"])
    assert script.parse_args().dropout == dropout
    assert capsys.readouterr().err.count("--dropout 0") == (dropout is not None)
    monkeypatch.setattr(sys, "argv", ["script", "--student", "mine", "--dropout", "0.2"])
    assert script.parse_args().dropout == 0.2
    assert not capsys.readouterr().err


def draw(folder):
    """The first random number of each step of two epochs."""
    options = dict(output=str(folder / "out"), resume=False, overwrite=False, device="cpu")
    options |= dict(precision="fp32", seed=3, shuffle=False, max_steps=0, eval_steps=0)
    distributed.start()
    training = run_module.Run(SimpleNamespace(**options))
    training.start()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    drawn = []
    steps = training.steps(
        "stage",
        np.full(9, 5),
        [model],
        optimizer,
        lambda: 0.0,
        lambda: None,
        epochs=2,
        batch_size=4,
    )
    for step in steps:
        drawn.append(float(torch.rand(())))
        step.log(loss=0.0)
    (folder / f"drawn-{distributed.rank()}").write_text(json.dumps(drawn))
    distributed.finish()


def test_each_process_draws_its_own_dropout(tmp_path):
    Processes(tmp_path, 2, draw, tmp_path).succeed()
    first, second = [json.loads((tmp_path / f"drawn-{rank}").read_text()) for rank in range(2)]
    shutil.rmtree(tmp_path / "out")
    draw(tmp_path)
    assert first == json.loads((tmp_path / "drawn-0").read_text())  # as without torchrun
    assert len({*first, *second}) == 12
