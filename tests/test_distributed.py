"""Several processes train as one does: the same losses and dev scores, without dropout."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, dev_scores, losses
from processes import finish, small_options, start, start_several

pytestmark = pytest.mark.slow


def check_same(folder):
    """The runs "one" and "out" have the same losses and dev scores."""
    assert losses(folder / "out") == pytest.approx(losses(folder / "one"), abs=1e-4)
    assert dev_scores(folder / "out") == pytest.approx(dev_scores(folder / "one"), abs=0.05)


@pytest.fixture
def options_of(models_folder, files, tmp_path):
    """options_of("ckd", "out"): the words of a small run without dropout, in tmp_path / "out".

    Each process draws its own dropout; distilface.py cannot do without.
    """
    teacher = tmp_path / "teacher"
    shutil.copytree(models_folder / "wide", teacher)
    config = json.loads((teacher / "config.json").read_text())
    config |= dict(hidden_dropout_prob=0, attention_probs_dropout_prob=0)  # dse.py fine-tunes it
    (teacher / "config.json").write_text(json.dumps(config))

    def call(script, output):
        options = small_options(script, models_folder, files, tmp_path / output)
        no_dropout = ["--teacher", teacher, "--dropout", 0]
        return options if script == "distilface" else [*options, *no_dropout]

    return call


@pytest.mark.parametrize("script", ["congen", "ibkd", "dse"])
def test_two_and_four_processes_give_the_losses_of_one(script, options_of, tmp_path):
    log = tmp_path / "log"
    finish(start(f"{script}.py", options_of(script, "one"), log), log)
    for count in (2, 4):
        options = [*options_of(script, "out"), "--overwrite"]
        for process, log in start_several(count, f"{script}.py", options, tmp_path):
            finish(process, log)
        check_same(tmp_path)


def test_distilface_trains_with_two_processes(options_of, tmp_path):
    options = options_of("distilface", "out")
    for process, log in start_several(2, "distilface.py", options, tmp_path):
        finish(process, log)
    assert len(dev_scores(tmp_path / "out")) == 7


def test_torchrun_itself_gives_the_losses_of_one_process(options_of, tmp_path):
    """With three unequal parts of a batch; one process takes the run as finished."""
    log = tmp_path / "log"
    finish(start("ckd.py", options_of("ckd", "one"), log), log)
    options = [*options_of("ckd", "out"), "--resume"]

    def torchrun(count, *more):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", count]
        command = map(str, [*command, ROOT / "ckd.py", *options, *more])
        return subprocess.run([*command], capture_output=True, text=True, cwd=ROOT)

    failed = torchrun(2, "--lr", "oops")
    assert failed.returncode != 0
    assert failed.stderr.count("error: argument --lr") == 1
    done = torchrun(3)
    assert done.returncode == 0, done.stderr[-3000:]
    check_same(tmp_path)
    finish(start("ckd.py", options, log), log)  # nothing is left to do
    check_same(tmp_path)


def test_a_process_with_other_data_ends_with_a_line(options_of, tmp_path):
    (tmp_path / "other.txt").write_text("A boy runs.\nA cook eats.\n" * 150)
    more = ["--train", tmp_path / "other.txt"]
    options = options_of("ckd", "out")
    (first, _), (second, log) = start_several(2, "ckd.py", options, tmp_path, more)
    second.join(300)
    first.kill()  # as torchrun does
    assert second.exitcode == 2
    line = "error: process 1 has other options or data than process 0"
    assert log.read_text().splitlines()[-1] == line


def test_gather_has_the_gradient_of_one_process(tmp_path):
    """The mean of the gradients is that of a single process, also where one has no row."""
    code = """
import torch
from common import own_rows, gather, average_gradients
import numpy as np
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(2, 3, dtype=torch.float64)
w = torch.nn.Linear(3, 4).double()
v = torch.nn.Linear(4, 2).double()
rows = np.arange(2)
h = gather(w(x[own_rows(rows)]), 2)
(v(h) @ v(h).T).logsumexp(1).sum().backward()
average_gradients([*w.parameters(), *v.parameters()])
print([p.grad.flatten().tolist() for p in [*w.parameters(), *v.parameters()]])
"""
    (tmp_path / "grad.py").write_text(code)
    found = []
    for count in (1, 2, 3):
        for process, log in start_several(count, str(tmp_path / "grad.py"), [], tmp_path):
            finish(process, log)
            found.append(eval(log.read_text().splitlines()[-1]))
    for others in found[1:]:
        for a, b in zip(others, found[0]):
            assert torch.allclose(torch.tensor(a), torch.tensor(b), atol=1e-12)
