"""Several processes train as one does: the same losses and dev scores, without dropout."""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, alter, dev_scores, losses
from processes import finish, small_options, start, start_several


@pytest.fixture
def options_of(models_folder, files, tmp_path):
    """options_of("ckd", "out"): the words of a small run, in tmp_path / "out".

    It has no dropout, which each process draws for itself.
    """
    teacher = shutil.copytree(models_folder / "wide", tmp_path / "teacher")
    rates = dict(hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    alter(teacher / "config.json", rates)  # dse.py fine-tunes it

    def call(script, output):
        words = small_options(script, models_folder, files, tmp_path / output)
        return [*words, "--max-steps", 8, "--teacher", teacher, "--dropout", 0]

    return call


def check_same(folder):
    """The runs "one" and "out" have the same losses and dev scores."""
    assert losses(folder / "out") == pytest.approx(losses(folder / "one"), abs=1e-6, rel=1e-6)
    assert dev_scores(folder / "out") == pytest.approx(dev_scores(folder / "one"), abs=0.05)


TWO = ["--finetune-batch-size", 49]  # of 100 triplets, which leaves a batch of two


@pytest.mark.parametrize(
    "script, count, more", [("congen", 2, []), ("ibkd", 3, TWO), ("dse", 2, [])]
)
def test_two_or_three_processes_give_the_losses_of_one(script, count, more, options_of, tmp_path):
    """Also where a process has no row of a batch."""
    log = tmp_path / "log"
    finish(start(f"{script}.py", options_of(script, "one") + more, log), log)
    words = options_of(script, "out") + more
    for process, log in start_several(count, f"{script}.py", words, tmp_path):
        finish(process, log)
    check_same(tmp_path)


def test_torchrun_itself_gives_the_losses_of_one_process(options_of, tmp_path):
    """With three unequal parts of a batch."""
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
