"""Several processes train as one does: the same losses and dev scores, without dropout."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, dev_scores, losses
from processes import SCRIPTS, finish, small_options, start, start_several

pytestmark = pytest.mark.slow


def options_of(script, models_folder, files, output):
    """Without dropout, which each process draws for itself; distilface.py cannot do without."""
    options = small_options(script, models_folder, files, output)
    if script == "dse":  # its teacher is fine-tuned with its own dropout
        teacher = shutil.copytree(
            models_folder / "wide", output.parent / "teacher", dirs_exist_ok=True
        )
        config = json.loads((teacher / "config.json").read_text())
        config |= dict(hidden_dropout_prob=0, attention_probs_dropout_prob=0)
        (teacher / "config.json").write_text(json.dumps(config))
        options += ["--teacher", teacher]
    return options if script == "distilface" else [*options, "--dropout", 0]


def run_several(count, script, options, folder):
    for process, log in start_several(count, f"{script}.py", options, folder):
        finish(process, log)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "distilface"])
def test_several_processes_give_the_losses_of_one(script, count, models_folder, files, tmp_path):
    one = options_of(script, models_folder, files, tmp_path / "one")
    finish(start(f"{script}.py", one, tmp_path / "log"), tmp_path / "log")
    run_several(count, script, options_of(script, models_folder, files, tmp_path / "out"), tmp_path)
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    assert dev_scores(tmp_path / "out") == pytest.approx(dev_scores(tmp_path / "one"), abs=0.05)


def test_distilface_trains_with_two_processes(models_folder, files, tmp_path):
    run_several(
        2, "distilface", options_of("distilface", models_folder, files, tmp_path / "out"), tmp_path
    )
    assert len(dev_scores(tmp_path / "out")) == 7


def test_torchrun_itself_and_a_resume_with_another_number_of_processes(
    models_folder, files, tmp_path
):
    """Two processes by torchrun are stopped after some steps; one process goes on."""
    one = options_of("ckd", models_folder, files, tmp_path / "one")
    finish(start("ckd.py", one, tmp_path / "log"), tmp_path / "log")
    options = [*options_of("ckd", models_folder, files, tmp_path / "out"), "--resume"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, ROOT / "ckd.py", *options, "--lr", "oops"]
    failed = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=ROOT)
    assert failed.returncode != 0
    assert "--lr" in failed.stderr

    command = [*torchrun, ROOT / "ckd.py", *options]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    finish(start("ckd.py", options, tmp_path / "log"), tmp_path / "log")  # nothing is left to do


@pytest.mark.parametrize("processes", [2, 3])
def test_gather_has_the_gradient_of_one_process(processes, tmp_path):
    """The mean of the gradients is that of a single process, also where one has no row."""
    code = """
import torch, common
import torch.distributed as dist
from common import own_rows, gather, average_gradients, RANK
import numpy as np
if common.WORLD_SIZE > 1: dist.init_process_group("gloo")
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
    (tmp_path / "grad.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{code}")
    start_one = start(str(tmp_path / "grad.py"), [], tmp_path / "one")
    finish(start_one, tmp_path / "one")
    expected = eval((tmp_path / "one").read_text().splitlines()[-1])
    for process, log in start_several(processes, str(tmp_path / "grad.py"), [], tmp_path):
        finish(process, log)
        found = eval(log.read_text().splitlines()[-1])
        for a, b in zip(found, expected):
            assert torch.allclose(torch.tensor(a), torch.tensor(b), atol=1e-12)
