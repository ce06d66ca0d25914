"""The rule of the house: a script stands on common.py alone, and its upper part on torch alone."""

import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, dev_scores
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
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_copied_with_common_alone_trains_two_steps(script, models_folder, files, tmp_path):
    """In an empty folder, from which nothing of the project can be imported."""
    for file in (f"{script}.py", "common.py"):
        shutil.copy(ROOT / file, tmp_path)
    (tmp_path / "main.py").write_text(
        f"import os, runpy, sys\nos.chdir({str(tmp_path)!r})\nsys.path[:] = "
        f"[{str(tmp_path)!r}] + [p for p in sys.path if p not in ({str(ROOT)!r}, '')]\n"
        f"runpy.run_path({script + '.py'!r}, run_name='__main__')\n"
    )
    words = [*small_options(script, models_folder, files, "out"), "--max-steps", 2]
    log = tmp_path / "log"
    # LOCAL_RANK alone, as some clusters set it, is no reason to leave the cache to another process.
    cluster = dict(LOCAL_RANK="1", XDG_CACHE_HOME=str(tmp_path / "cache"))
    finish(start(str(tmp_path / "main.py"), words, log, **cluster), log)
    stages = {stage for stage, step in dev_scores(tmp_path / "out") if step == 2}
    assert len(stages) == (2 if script in ("ckd", "ibkd", "dse") else 1)
