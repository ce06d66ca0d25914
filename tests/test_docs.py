"""The pages and docstrings: every command that they show is accepted by its script's own parser,
every block of Python runs, every link leads somewhere, every function that they name exists."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys

import huggingface_hub
import pytest
import torch
from conftest import DEMO, ROOT

import common
import dse

sys.path.insert(0, str(ROOT / "results"))
import make
import runs

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES += sorted(ROOT.glob("results/*.md"))
# results/make.py and results/teaching.py take no arguments.
PROGRAM = re.compile(r"(?:-m (extras\.\w+)|\b(?!make|teaching)(\w+)\.py)(?: |$)")


def commands():
    """(page, command) for each line of a shell block that runs a script of the project."""
    found = []
    for page in PAGES:
        text = page.read_text("utf-8")
        for block in re.findall(r"```sh\n(.*?)```", text, re.S):
            for line in block.replace("\\\n", " ").splitlines():
                for part in re.split(r"&&|;", line.split("  #")[0]):
                    if re.match(r"\s*(python|torchrun) ", part) and PROGRAM.search(part):
                        found.append((page.name, part.strip()))
    return [(page, part) for page, part in found if "pytest" not in part and "venv" not in part]


def code_spans():
    """(page, code) for each span of code in a text or a table, blocks excepted."""
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)
        for code in re.findall(r"`([^`]+)`", text):
            yield page.name, " ".join(code.split())


def inline_commands():
    """(page, command) for each span that is a command of the project, with nothing left out."""
    for page, code in code_spans():
        is_command = re.match("python |torchrun ", code) and PROGRAM.search(code)
        if is_command and not re.search(r"\.\.\.|…|NAME", code):
            yield page, code


def options_of_scripts():
    """(page, script, option) for each span such as "ckd.py --objective kd"."""
    found = []
    for page, code in code_spans():
        if name := re.match(r"(\w+)\.py (?=--)", code):
            found += [(page, name[1], option) for option in re.findall(r"--[\w-]+", code)]
    return found


def usage_lines():
    """(file, command) for each command in the docstring of a script; "[--option]" is none."""
    found = []
    for path in [*ROOT.glob("*.py"), *ROOT.glob("extras/*.py"), ROOT / "results/data_sets.py"]:
        docstring = path.read_text("utf-8").split('"""')[1]
        for lines in re.findall(r"^  +(python .*(?:\n {6,}--.*)*)", docstring, re.M):
            command = " ".join(line.strip().split("  ")[0] for line in lines.splitlines())
            if "[" not in command:
                found.append((path.name, command))
    return found


def blocks(pattern):
    """(page, group 1 of the pattern) for each place of a page where it matches."""
    texts = [(page.name, page.read_text("utf-8")) for page in PAGES]
    return [(name, found[1]) for name, text in texts for found in re.finditer(pattern, text, re.S)]


COMMANDS, INLINE, USAGE = commands(), list(inline_commands()), usage_lines()
PYTHON = blocks(r"```python\n(.*?)```")
ONE_LINERS = blocks(r"""(python -c (?:'[^']*'|"[^"]*"))""")


def test_there_are_commands():
    counts = [len(found) for found in (COMMANDS, INLINE, options_of_scripts(), USAGE)]
    assert min(counts) >= 5 and sum(counts) >= 80, counts
    assert min(len(PYTHON), len(ONE_LINERS)) >= 2


@pytest.mark.parametrize("page, command", COMMANDS + INLINE + USAGE, ids=lambda value: value[-60:])
def test_a_documented_command_is_accepted(page, command, parse):
    found = PROGRAM.search(command)
    module = importlib.import_module(found[1] or found[2])
    parse(module, *shlex.split(command[found.end() :]))


def test_the_options_that_a_page_names_exist(parse, capsys):
    for page, script, option in options_of_scripts():
        with pytest.raises(SystemExit):
            parse(importlib.import_module(script), "--help")
        assert re.search(rf"{option}\b", capsys.readouterr().out), (page, script, option)


@pytest.fixture(scope="module")
def reader(models_folder, tmp_path_factory):
    """A folder that has what the pages' Python reads: small models instead of students and Hub."""
    root = tmp_path_factory.mktemp("reader")
    for name in ("bert-base-uncased", "bert-large-uncased"):
        shutil.copytree(models_folder / "bert", root / name)
    for name in ("ckd-demo", "small"):
        shutil.copytree(models_folder / "mean", root / "runs" / name)
    (root / "runs" / "dse").mkdir()
    student = dse.add_head(common.load_encoder(models_folder / "bert", "mean"), classes=1)
    dse.save_student(student, root / "runs" / "dse")
    shutil.copytree(DEMO / "beir", root / "BeIR" / "msmarco")
    weights = common.load_encoder(models_folder / "bert").model.state_dict()
    torch.save(weights, root / "weights.pth")
    return root


@pytest.mark.slow
@pytest.mark.parametrize("page, code", PYTHON, ids=lambda value: value[:20])
def test_the_python_of_a_page_runs(page, code, reader, monkeypatch):
    for names in re.findall(r"^(?:import|from) ([\w, ]+)", code, re.M):
        for name in names.partition(" import")[0].split(", "):
            pytest.importorskip(name, reason=f"{page} needs {name}")
    if "onnx" in code:
        write_int8(reader / "runs" / "small")
    monkeypatch.chdir(reader)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *names: "weights.pth")
    exec(compile(code, page, "exec"), {})


def write_int8(folder):
    """What `python -m extras.quantize FOLDER` does."""
    quantize = importlib.import_module("extras.quantize")
    for package in quantize.PACKAGES:
        pytest.importorskip(package, reason=f"extras.quantize needs {package}")
    (folder / "onnx").mkdir(exist_ok=True)
    _, _, files = quantize.write_onnx(folder, folder / "onnx")
    files["int8"].rename(folder / "onnx" / "model_int8.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("page, command", ONE_LINERS, ids=lambda value: value[:40])
def test_a_line_of_python_runs(page, command, reader):
    code = shlex.split(command.replace("\\\n", ""))[2]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run([sys.executable, "-c", code], cwd=reader, env=environment)
    assert run.returncode == 0


def test_the_command_of_each_run_is_accepted(parse):
    every = list(runs.all_runs())
    assert len(every) > 60
    for _, _, _, command in every:
        words = runs.expand(command, "data")
        words = words[words.index(sys.executable) + 1 :]
        start = 2 if words[0] == "-m" else 1
        parse(importlib.import_module(words[start - 1].removesuffix(".py")), *words[start:])


def test_the_tables_of_the_pages_are_those_of_the_data():
    pages = [page.read_text("utf-8") for page in (ROOT / "README.md", *make.HERE.glob("*.md"))]
    assert sum(page.count("<!-- table: ") for page in pages) == len(make.TABLES)
    for page in pages:
        assert make.with_tables(page) == page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)
    for target in re.findall(r"\]\((?!http)([^)]+)\)", text):
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.M)
            anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in anchors, target


def test_a_page_that_uses_the_data_says_where_they_come_from():
    for page in PAGES:
        text = page.read_text("utf-8")
        if re.search(r"\$DATA|unlabeled\.txt|first\d+k", text) and "## Data" not in text:
            assert "results/README.md#data)" in text or "](README.md#data)" in text, page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_functions_that_a_page_names_exist(page):
    scripts = "ckd|congen|ibkd|dse|distilface"
    for script, name in re.findall(rf"`({scripts})\.(\w+)`", page.read_text("utf-8")):
        if name not in ("py", "md"):
            assert hasattr(importlib.import_module(script), name), f"{script}.{name}"


@pytest.mark.parametrize("script", ["ckd", "congen", "ibkd", "dse", "distilface"])
def test_a_page_and_its_script_tell_the_method_alike(script):
    """The page's section "The method" begins with the method's paragraph in the docstring."""
    page = (ROOT / "docs" / f"{script}.md").read_text("utf-8")
    method = page.partition("## The method\n")[2].partition("\n![")[0]
    docstring = importlib.import_module(script).__doc__
    told = [" ".join(part.split()) for part in docstring.split("\n\n")]
    assert " ".join(method.split()) in told
