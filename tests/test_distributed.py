"""torchrun -m extras.distributed: several processes have the losses and dev scores of one.

Without dropout, which each process draws for itself.
"""

import functools
import math
import os
import shutil
import subprocess
import sys
import time

import pytest
from conftest import ON_GPU, ROOT, alter, dev_scores, losses, rows
from processes import finish, finish_several, small_options, start, start_several

import eval_sts

pytestmark = pytest.mark.skipif(ON_GPU, reason="several processes cannot share one GPU")


@pytest.fixture(scope="module")
def options_of(models_folder, files, tmp_path_factory):
    """options_of("ckd", output): the words of a small run.

    The third batch of a stage has two texts, and a fourth begins the second epoch.
    """
    teacher = shutil.copytree(models_folder / "wide", tmp_path_factory.mktemp("teacher") / "wide")
    rates = dict(hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    alter(teacher / "config.json", rates)  # dse.py fine-tunes it

    def call(script, output):
        words = small_options(script, models_folder, files, output)
        words += ["--teacher", teacher, "--dropout", 0, "--max-steps", 4, "--eval-steps", 2]
        words += ["--batch-size", 49 if script == "dse" else 149]
        words += ["--lr", 1e-4]  # at higher rates, rounding errors grow from step to step
        if script in ("ckd", "ibkd"):
            words += ["--finetune-batch-size", 49, "--finetune-lr", 2e-5]
        return [*words, "--method", "pkd"] if script == "extras.baselines" else words

    return call


@pytest.fixture(scope="module")
def one(options_of, tmp_path_factory):
    """one("ckd"): the folder of the same run by one process."""

    @functools.cache
    def call(script):
        folder = tmp_path_factory.mktemp(script)
        log = folder / "log"
        finish(start(script, options_of(script, folder / "out"), log), log)
        return folder / "out"

    return call


def check_same(out, one):
    """The same losses, dev scores and files, all of which process 0 alone has written."""
    assert len(rows(out)) == len(rows(one))
    assert losses(out) == pytest.approx(losses(one), abs=1e-6, rel=1e-6)
    assert dev_scores(out) == pytest.approx(dev_scores(one), abs=0.05)
    found = [sorted(path.relative_to(top) for path in top.rglob("*")) for top in (out, one)]
    assert found[0] == found[1]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("script", ["ckd", "congen", "ibkd", "dse", "extras.baselines"])
def test_several_processes_give_the_losses_of_one(script, count, options_of, one, tmp_path):
    """Also where a process has no row of a batch."""
    words = options_of(script, tmp_path / "out")
    finish_several(start_several(count, script, words, tmp_path))
    check_same(tmp_path / "out", one(script))
    assert len(losses(one(script))) == (8 if script in ("ckd", "ibkd", "dse") else 4)


def test_torchrun_itself_gives_the_losses_of_one_process(options_of, one, tmp_path):
    """Of a script beside those of the project. The processes' copies of its folder are deleted."""
    script = tmp_path / "log_all.py"
    script.write_text(
        "import common, runpy\ncommon.LOG_STEPS = 1\nrunpy.run_path('ckd.py', run_name='__main__')"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    command += ["-m", "extras.distributed", script, *options_of("ckd", tmp_path / "out")]
    (tmp_path / "temporary").mkdir()
    options = dict(capture_output=True, text=True, cwd=ROOT)
    options["env"] = os.environ | dict(TMPDIR=str(tmp_path / "temporary"))
    done = subprocess.run([*map(str, command)], **options)
    assert done.returncode == 0, done.stderr[-3000:]
    check_same(tmp_path / "out", one("ckd"))
    assert done.stdout.count("best of finetune") == 1
    assert not [*tmp_path.glob("temporary/*/output")]


def test_a_killed_run_continues_with_another_number_of_processes(options_of, one, tmp_path):
    words = options_of("ckd", tmp_path / "out")
    started = start_several(2, "ckd", words, tmp_path)
    while len(rows(tmp_path / "out")) < 4 and all(process.is_alive() for process, _ in started):
        time.sleep(0.005)
    for process, _ in started:
        process.kill()
    for process, _ in started:
        process.join()
    assert len(rows(tmp_path / "out")) < len(rows(one("ckd")))
    finish_several(start_several(3, "ckd", words, tmp_path))
    check_same(tmp_path / "out", one("ckd"))


def test_distilface_trains_with_dropout(models_folder, files, tmp_path):
    words = small_options("distilface", models_folder, files, tmp_path / "out")
    finish_several(start_several(2, "distilface", [*words, "--steps", 6], tmp_path))
    found = losses(tmp_path / "out")
    assert len(found) == 6 and all(map(math.isfinite, found.values()))
    encoder, _ = eval_sts.load(tmp_path / "out")
    assert encoder.pooling == "avg_first_last"
    assert {path.name for path in tmp_path.glob("*[!.log]")} == {"out", "temporary"}


def test_an_error_ends_all_processes_in_one_line(options_of, tmp_path):
    words = [*options_of("ckd", tmp_path / "out"), "--train", tmp_path / "missing.txt"]
    for process, log in start_several(2, "ckd", words, tmp_path):
        process.join(60)
        assert process.exitcode == 2
        assert "Traceback" not in log.read_text()
    printed = "".join(log.read_text() for log in tmp_path.glob("*.log"))
    assert f"error: {tmp_path}/missing.txt: " in printed
