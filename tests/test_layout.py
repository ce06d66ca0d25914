"""The rule of the house: a script stands on common.py alone, and its upper part on torch alone."""

import ast
import shutil
import subprocess
import sys

import pytest
from conftest import DEMO, ROOT, dev_scores
from processes import finish, start

METHODS = ("ckd", "congen", "ibkd", "dse", "distilface")
SCRIPTS = (*METHODS, "eval_sts", "eval_retrieval")
EXTRAS = sorted(path.stem for path in (ROOT / "extras").glob("*.py"))
SIGNATURES = {  # readers and tests rely on these names and orders
    "ckd.contrastive_distillation_loss": "student teacher queue temperature",
    "ckd.mse_loss": "student teacher",
    "ckd.supervised_contrastive_loss": "anchor positive hard_negative temperature",
    "congen.similarity_distribution": "z queue temperature",
    "congen.congen_loss": "student_control student_generalize teacher_reference queue "
    "teacher_temperature student_temperature alpha",
    "ibkd.gram_matrix": "z kernel gamma",
    "ibkd.hsic": "gram_x gram_s",
    "ibkd.info_nce": "student teacher temperature",
    "dse.pool_last_four": "hidden_states attention_mask",
    "dse.pair_features": "u v",
    "dse.dse_loss": "student_logits teacher_logits labels alpha task",
    "distilface.pool": "hidden_states attention_mask pooling",
    "distilface.simcse_loss": "first second temperature",
}


def imported(path):
    """The project's modules that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    own = {path.stem for path in ROOT.glob("*.py")} | {"extras"}
    return {name.split(".")[0] for name in names} & own


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_imports_common_alone(script):
    allowed = {"common", "eval_retrieval"} if script == "ibkd" else {"common"}
    assert imported(ROOT / f"{script}.py") == allowed
    assert imported(ROOT / "common.py") == set()


@pytest.mark.parametrize("name", SIGNATURES)
def test_losses_keep_their_names_and_arguments(name):
    script, function = name.split(".")
    for node in ast.parse((ROOT / f"{script}.py").read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            assert [argument.arg for argument in node.args.args] == SIGNATURES[name].split()
            return
    raise AssertionError(f"{name} is gone")


@pytest.mark.parametrize("script", METHODS)
def test_losses_and_model_need_torch_alone(script, tmp_path):
    """The part above the ruler "Training" runs in an empty folder without the other packages."""
    source = (ROOT / f"{script}.py").read_text("utf-8")
    upper, _, _ = source.partition("\n# Training\n")
    assert upper != source
    (tmp_path / "upper.py").write_text(upper, "utf-8")
    blocked = "import sys\nfor name in ('common', 'transformers', 'numpy', 'scipy', 'tqdm'):\n"
    blocked += "    sys.modules[name] = None\n"
    (tmp_path / "main.py").write_text(blocked + "import upper\n")
    command = [sys.executable, "main.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


DATA = {
    "train": ["--train", DEMO / "sentences.txt", "--dev", DEMO / "dev.tsv"],
    "teacher": ["--teacher", "bert", "--student-layers", "0,2"],
    "steps": ["--max-steps", 2, "--eval-steps", 1, "--batch-size", 8, "--output", "out"],
}
COPIES = {
    "ckd": [*DATA["train"], *DATA["teacher"], *DATA["steps"], "--queue-size", 8],
    "congen": [*DATA["train"], *DATA["teacher"], *DATA["steps"], "--queue-size", 8],
    "ibkd": [*DATA["train"], *DATA["teacher"], *DATA["steps"]],
    "dse": ["--task", "stsb", "--glue", DEMO / "glue", *DATA["teacher"], *DATA["steps"]],
    "distilface": [*DATA["train"], "--student", "bert", *DATA["steps"]],
    "eval_sts": ["bert", "--pairs", DEMO / "test.tsv"],
}


@pytest.mark.parametrize("script", COPIES)
def test_a_script_copied_with_common_alone_trains_two_steps(script, models_folder, tmp_path):
    """In an empty folder, from which nothing of the project can be imported."""
    for file in (f"{script}.py", "common.py"):
        shutil.copy(ROOT / file, tmp_path)
    shutil.copytree(models_folder / "bert", tmp_path / "bert")
    (tmp_path / "main.py").write_text(
        f"import os, runpy, sys\nos.chdir({str(tmp_path)!r})\nsys.path[:] = "
        f"[{str(tmp_path)!r}] + [p for p in sys.path if p not in ({str(ROOT)!r}, '')]\n"
        f"runpy.run_path({script + '.py'!r}, run_name='__main__')\n"
    )
    log = tmp_path / "log"
    finish(start(str(tmp_path / "main.py"), COPIES[script], log), log)
    if script == "eval_sts":
        assert "| bert " in log.read_text()
    else:
        stages = {stage for stage, step in dev_scores(tmp_path / "out") if step == 2}
        assert len(stages) == (2 if script == "dse" else 1)


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


def test_no_line_is_too_long_and_no_path_of_a_machine_is_committed():
    for path in [*ROOT.glob("*.py"), *ROOT.glob("extras/*.py"), *ROOT.glob("tests/*.py")]:
        text = path.read_text("utf-8")
        assert max(map(len, text.splitlines())) <= 100, path
        assert "/" + "work/" not in text, path
