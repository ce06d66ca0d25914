"""The rule of the house: a script stands on common.py alone, and its upper part on torch alone.

And the demo of each method, as a process.
"""

import re
import shutil
import subprocess
import sys

import pytest
from conftest import DEMO, ROOT, demo_sentences, dev_scores
from processes import SCRIPTS, finish, small_options, start


def imported(path):
    """The project's modules that a file imports, also inside functions."""
    own = {path.stem for path in ROOT.glob("*.py")} | {"extras"}
    return own & set(re.findall(r"^ *(?:import|from) (\w+)", path.read_text("utf-8"), re.M))


def test_a_script_imports_common_alone():
    assert imported(ROOT / "common.py") == set()
    for script in (*SCRIPTS, "eval_sts", "eval_retrieval"):
        others = {"ibkd": {"eval_retrieval"}, "eval_sts": {"distilface", "dse"}}  # inside functions
        assert imported(ROOT / f"{script}.py") == {"common"} | others.get(script, set())


def test_losses_and_model_need_torch_alone(tmp_path):
    """The parts above the ruler "Training" run in an empty folder without the other packages."""
    for script in SCRIPTS:
        source = (ROOT / f"{script}.py").read_text("utf-8")
        upper, _, _ = source.partition("\n# ---- Training")
        assert upper != source
        (tmp_path / f"{script}.py").write_text(upper, "utf-8")
    blocked = dict.fromkeys(("common", "transformers", "numpy", "scipy", "tqdm"))
    code = f"import sys\nsys.modules.update({blocked})\nimport {', '.join(SCRIPTS)}"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("script", [*SCRIPTS, "eval_sts"])
def test_a_script_copied_with_common_alone_trains_two_steps(script, models_folder, files, tmp_path):
    """In an empty folder, from which nothing of the project can be imported."""
    for file in (f"{script}.py", "common.py"):
        shutil.copy(ROOT / file, tmp_path)
    (tmp_path / "main.py").write_text(
        f"import os, runpy, sys\nos.chdir({str(tmp_path)!r})\nsys.path[:] = "
        f"[{str(tmp_path)!r}] + [p for p in sys.path if p not in ({str(ROOT)!r}, '')]\n"
        f"runpy.run_path({script + '.py'!r}, run_name='__main__')\n"
    )
    log = tmp_path / "log"
    if script == "eval_sts":
        words = [models_folder / "bert", "--pairs", DEMO / "test.tsv"]
    else:
        words = [*small_options(script, models_folder, files, "out"), "--max-steps", 2]
    finish(start(str(tmp_path / "main.py"), words, log), log)
    if script == "eval_sts":
        assert "bert " in log.read_text()
        return
    stages = {stage for stage, step in dev_scores(tmp_path / "out") if step == 2}
    assert len(stages) == (2 if script in ("ckd", "ibkd", "dse") else 1)


DEMOS = {  # the points that the student gains
    "ckd.py --stage distill --max-steps 12 --eval-steps 12": 5,
    "congen.py --head identity --max-steps 12 --eval-steps 12": 5,
    "ibkd.py --stage distill --max-steps 12 --eval-steps 12": 5,
    "distilface.py --max-steps 24 --eval-steps 12": 1,
    "extras/baselines.py --method crd --max-steps 12 --eval-steps 12": 5,
}


@pytest.mark.slow
@pytest.mark.parametrize("command", DEMOS)
def test_a_demo_improves_the_real_student_and_keeps_the_best(command, tmp_path):
    """Layers 1,3,5 of all-MiniLM-L6-v2 after a few steps on 768 of the demo's sentences."""
    script, *options = command.split()
    train, log, out = tmp_path / "train.txt", tmp_path / "log", tmp_path / "out"
    train.write_text("\n".join(demo_sentences(768)), "utf-8")
    finish(start(script, ["--demo", *options, "--train", train, "--output", out], log), log)
    before, *after = dev_scores(out).values()
    assert max(after) > before + DEMOS[command]
    assert f" {max(after):.2f} |\n" in log.read_text()


def test_an_import_changes_nothing_in_another_program(tmp_path):
    """No logger is silenced, no signal handler set, nothing printed; no module of POSIX alone."""
    code = """
import logging, signal, sys, os
import transformers, huggingface_hub
def state():
    return (transformers.logging.get_verbosity(), huggingface_hub.logging.get_verbosity(),
            signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), sys.excepthook,
            sys.stdout, sys.stderr, dict(os.environ), logging.root.level)
before = state()
import common
assert state() == before
assert not {"fcntl", "resource"} & {name for name in vars(common)}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
