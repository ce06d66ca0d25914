"""Several processes train as one does: the same losses and dev scores, without dropout."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, alter, dev_scores, losses
from processes import finish, small_options, start, start_several


@pytest.fixture
def options_of(models_folder, files, tmp_path):
    """options_of("ckd", "out"): the words of a small run, in tmp_path / "out".

    It has no dropout, which each process draws for itself, but distilface.py cannot do without.
    """
    teacher = shutil.copytree(models_folder / "wide", tmp_path / "teacher")
    rates = dict(hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    alter(teacher / "config.json", rates)  # dse.py fine-tunes it

    def call(script, output):
        words = [*small_options(script, models_folder, files, tmp_path / output), "--max-steps", 8]
        return words if script == "distilface" else [*words, "--teacher", teacher, "--dropout", 0]

    return call


def check_same(folder):
    """The runs "one" and "out" have the same losses and dev scores."""
    assert losses(folder / "out") == pytest.approx(losses(folder / "one"), abs=1e-6, rel=1e-6)
    assert dev_scores(folder / "out") == pytest.approx(dev_scores(folder / "one"), abs=0.05)


@pytest.mark.parametrize("script, count", [("congen", 2), ("ibkd", 3), ("dse", 2)])
def test_two_or_three_processes_give_the_losses_of_one(script, count, options_of, tmp_path):
    log = tmp_path / "log"
    finish(start(f"{script}.py", options_of(script, "one"), log), log)
    for process, log in start_several(count, f"{script}.py", options_of(script, "out"), tmp_path):
        finish(process, log)
    check_same(tmp_path)


def test_distilface_trains_with_two_processes(options_of, tmp_path):
    for process, log in start_several(
        2, "distilface.py", options_of("distilface", "out"), tmp_path
    ):
        finish(process, log)
    assert len(dev_scores(tmp_path / "out")) == 4


def test_torchrun_itself_gives_the_losses_of_one_process(options_of, tmp_path):
    """With three unequal parts of a batch; one process takes the run as finished."""
    log, script, words = tmp_path / "log", tmp_path / "log_all.py", options_of("ckd", "out")
    script.write_text(
        f"import runpy, sys\nsys.path.insert(0, {str(ROOT)!r})\nimport common\n"
        f"common.LOG_STEPS = 1\nrunpy.run_path({str(ROOT / 'ckd.py')!r}, run_name='__main__')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 3, script]
    command = map(str, [*command, *words])
    done = subprocess.run([*command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    finish(start("ckd.py", options_of("ckd", "one"), log), log)
    check_same(tmp_path)
    before = (tmp_path / "out" / "metrics.jsonl").read_bytes()
    finish(start("ckd.py", words, log), log)
    assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == before


GRADIENTS = """
import numpy as np
import torch
from common import own_rows, gather, average_gradients
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(2, 3, dtype=torch.float64)
w = torch.nn.Linear(3, 4).double()
v = torch.nn.Linear(4, 2).double()
h = gather(w(x[own_rows(np.arange(2))]), 2)
(v(h) @ v(h).T).logsumexp(1).sum().backward()
average_gradients([*w.parameters(), *v.parameters()])
print([p.grad.flatten().tolist() for p in [*w.parameters(), *v.parameters()]])
"""


def test_gather_has_the_gradient_of_one_process(tmp_path):
    """The mean of the gradients is that of a single process, also where one has no row."""
    script = tmp_path / "gradients.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{GRADIENTS}")
    found = []
    for count in (1, 2, 3):
        for process, log in start_several(count, str(script), [], tmp_path):
            finish(process, log)
            found.append(json.loads(log.read_text().splitlines()[-1]))
    for others in found[1:]:
        for a, b in zip(others, found[0]):
            assert torch.allclose(torch.tensor(a).double(), torch.tensor(b).double(), atol=1e-12)
