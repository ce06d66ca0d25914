"""The rule of the house: a script stands on common.py alone, and its upper part on torch alone."""

import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, dev_scores
from processes import SCRIPTS, finish, small_options, start

OTHERS = {"eval_sts": {"distilface", "dse"}}  # inside functions, for the folders that these save


def test_a_script_imports_common_alone():
    at_the_top = {path.stem for path in ROOT.glob("*.py")}
    assert at_the_top == {*SCRIPTS, "common", "eval_sts"}
    for script in at_the_top:
        text = (ROOT / f"{script}.py").read_text("utf-8")
        found = re.findall(r"^( *)(?:import|from) (\w+)", text, re.M)
        own = {(name, bool(indent)) for indent, name in found if name in {*at_the_top, "extras"}}
        expected = {("common", False)} if script != "common" else set()
        assert own == expected | {(name, True) for name in OTHERS.get(script, ())}, script


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
    main, log, cache = tmp_path / "main.py", tmp_path / "log", tmp_path / "cache"
    finish(start(str(main), words, log, XDG_CACHE_HOME=str(cache)), log)
    stages = {stage for stage, step in dev_scores(tmp_path / "out") if step == 2}
    assert len(stages) == (2 if script in ("ckd", "ibkd", "dse") else 1)
