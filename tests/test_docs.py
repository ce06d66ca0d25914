"""The pages: their commands are accepted by the scripts' own parsers, their Python runs, links and
names are right, tables are those of the data, and the papers' pages have one skeleton."""

import importlib
import json
import os
import re
import shlex
import shutil
import string
import subprocess
import sys

import huggingface_hub
import pytest
import torch
from conftest import DEMO, ROOT
from processes import SCRIPTS

import common
import dse
from extras import sweep

sys.path.insert(0, str(ROOT / "results"))
import make
import runs

PAGES = {"README.md": ROOT / "README.md", "CONTRIBUTING.md": ROOT / "CONTRIBUTING.md"}
PAGES |= {f"docs/{path.name}": path for path in sorted(ROOT.glob("docs/*.md"))}
PAGES |= {f"results/{path.name}": path for path in sorted(ROOT.glob("results/*.md"))}
TEXTS = {name: path.read_text("utf-8") for name, path in PAGES.items()}
TABLES = {f"docs/tables/{name}.sh": ROOT / f"docs/tables/{name}.sh" for name in SCRIPTS}
TABLES = {name: path.read_text("utf-8") for name, path in TABLES.items()}
PROSE = {name: re.sub(r"```.*?```", "", text, flags=re.S) for name, text in TEXTS.items()}
# What each page of a paper has, in this order, and the columns of its tables.
SECTIONS = {
    "Is it the authors' method?": None,
    "On your own data": None,
    "Paper against here": "run | student before | after | teacher",
    "Equations": "equation | function",
    "Departures that change the loss": "departure (size) | paper | authors' code | here (option "
    "that undoes it)",
    "Data, scoring and defaults": "item | paper | authors' code | here (option)",
    "The paper's tables": "table or figure | what it shows | status",
}
# What runs another script, with arguments of its own before the script's.
WRAPPERS = {r"-m extras\.(distributed|one_row|rounded( --layer-bits 2)?) ": ""}
# results/make.py, docs/lesson.py, unseen.py and tests have no options.
PROGRAM = re.compile(
    r"^(?:python|torchrun)\b.*?(?:-m (extras\.\w+)|\b(?!make|lesson|unseen)(\w+)\.py)"
)


def blocks(language):
    """(page, block of code); a file of commands is one block."""
    for page, text in TEXTS.items():
        for block in re.findall(rf"```{language}\n(.*?)```", text, re.S):
            yield page, block
    if language == "sh":
        yield from TABLES.items()


def commands():
    """(place, command) that runs a script of the project: in blocks, inline, and in docstrings."""
    found = []
    for page, block in blocks("sh"):
        block = block.replace("\\\n", "")
        variables = dict(re.findall(r'^(\w+)="?([^"\n#]*?)"?(?: +#.*)?$', block, re.M))
        for line in string.Template(block).safe_substitute(variables).splitlines():
            found += [(page, part) for part in re.split(r"&& |; ", line.split("  #")[0])]
    for page, text in PROSE.items():
        spans = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]
        found += [(page, code) for code in spans if not re.search(r"\.\.\.|…|NAME", code)]
    for path in [*ROOT.glob("*.py"), *ROOT.glob("extras/*.py")]:
        docstring = path.read_text("utf-8").split('"""')[1]
        for lines in re.findall(r"^  +(python .*(?:\n {6,}--.*)*)", docstring, re.M):
            joined = " ".join(line.strip().split("  ")[0] for line in lines.splitlines())
            found += [(path.name, joined)] if "[" not in joined else []
    return [(place, part.strip()) for place, part in found if PROGRAM.match(part.strip())]


def accept(parse, command):
    for wrapper, script in WRAPPERS.items():
        command = re.sub(wrapper, script, command)
    found = PROGRAM.match(command)
    words = shlex.split(command[found.end() :])
    name = found[1] or found[2]
    if (ROOT / name.replace(".", "/")).is_dir():  # a package, extras.authors
        name += ".__main__"
    if name == "extras.sweep" and "--" in words:  # the options of the script follow
        (script, grid, *own), rest = words[: words.index("--")], words[words.index("--") + 1 :]
        rest += [f"--{option}={value}" for option, value in sweep.read_grid(grid)[0].items()]
        program = [script] if script.endswith(".py") else ["-m", script]
        accept(parse, shlex.join(["python", *program, *rest]))
        words = [script, grid, *own]
    return parse(importlib.import_module(name), *words)


@pytest.mark.parametrize("place, command", commands(), ids=lambda value: value[-60:])
def test_a_documented_command_is_accepted(place, command, parse):
    accept(parse, command)


def test_the_command_of_each_run_is_accepted_and_has_batches_of_similar_length(parse):
    every = [command for *_, command in runs.all_runs()]
    assert len(every) > 60 and len(commands()) > 120
    for command in every:
        if command.startswith("python results/unseen.py"):  # it has no options
            continue
        words = ["python", *runs.expand(command, "data")[1:]]
        args = accept(parse, shlex.join(words))
        assert getattr(args, "group_by_length", True), command


def test_code_is_at_most_100_columns_wide():
    for language in ("sh", "python", "diff"):
        for page, block in blocks(language):
            longest = max(block.splitlines(), key=len)
            assert len(longest) <= 100, (page, longest)


def test_no_empty_line_splits_a_table_and_continued_lines_are_indented_by_four():
    for page, text in TEXTS.items():
        assert not re.search(r"^\|.*\n\n+\|", text, re.M), page
    for page, block in blocks("sh"):
        for indent in re.findall(r"\\\n( *)", block):
            assert len(indent) in (0, 4, 6), page  # 0: another command, after "&& \\"


def test_the_options_and_functions_that_a_page_names_exist(parse, capsys):
    for page, text in PROSE.items():
        for code in re.findall(r"`([^`]+)`", text):
            if named := re.match(r"(\w+)\.py\s+(--.*)", code, re.S):
                with pytest.raises(SystemExit):
                    parse(importlib.import_module(named[1]), "--help")
                help = capsys.readouterr().out
                for option in re.findall(r"--[\w-]+", named[2]):
                    assert re.search(rf"{option}\b", help), (page, code)
            if named := re.fullmatch(rf"({'|'.join(SCRIPTS)})\.(?!py|md)(\w+)", code):
                assert hasattr(importlib.import_module(named[1]), named[2]), (page, code)


@pytest.fixture(scope="module")
def reader(models_folder, tmp_path_factory):
    """A folder that has what the pages' Python reads: small models instead of students and Hub."""
    root = tmp_path_factory.mktemp("reader")
    for name in ("bert-base-uncased", "bert-large-uncased", "distilbert-base-uncased"):
        shutil.copytree(models_folder / "bert", root / name)
    for name in ("runs/ckd-demo", "runs/small", "my-encoder"):
        shutil.copytree(models_folder / "mean", root / name)
    shutil.copy(DEMO / "sentences.txt", root / "my-sentences.txt")
    shutil.copy(DEMO / "dev.tsv", root / "my-pairs.tsv")
    student = dse.add_head(common.load_encoder(models_folder / "bert", "mean"), classes=1)
    dse.save_student(student, root / "runs" / "pairs")
    shutil.copytree(DEMO / "beir", root / "BeIR" / "msmarco")
    weights = common.load_encoder(models_folder / "bert").model.state_dict()
    torch.save(weights, root / "weights.pth")
    return root


@pytest.mark.slow
@pytest.mark.parametrize("page, code", list(blocks("python")), ids=lambda value: value[:20])
def test_the_python_of_a_page_runs(page, code, reader, call_main, monkeypatch):
    for names in re.findall(r"^(?:import|from) ([\w, ]+)", code, re.M):
        for name in names.partition(" import")[0].split(", "):
            pytest.importorskip(name, reason=f"{page} needs {name}")
    if "onnx" in code:
        pytest.importorskip("onnxscript", reason="extras.quantize needs it")
        call_main(
            importlib.import_module("extras.quantize"), reader / "runs" / "small", "--bits", 4
        )
    monkeypatch.chdir(reader)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_: str(reader / "weights.pth"))
    exec(code, {})


@pytest.mark.slow
def test_a_line_of_python_runs(reader):
    lines = re.findall(r"""python -c ('[^']*'|"[^"]*")""", "".join(TABLES.values()))
    lines = [line for line in lines if "mbart" not in line]  # it cannot be had here
    assert len(lines) == 2
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    for line in lines:
        command = [sys.executable, "-c", shlex.split(line.replace("\\\n", ""))[0]]
        subprocess.run(command, cwd=reader, env=environment, check=True)


def test_the_tables_of_the_pages_are_those_of_the_data():
    tables = make.page_tables()
    shown = re.findall(r"<!-- table: (\S+) -->", "".join(TEXTS.values()))
    assert sorted(shown) == sorted(tables)
    for text in TEXTS.values():
        assert make.with_tables(text, tables) == text


def test_links_lead_somewhere():
    for page, text in PROSE.items():
        for target in re.findall(r"\]\((?!http)([^)]+)\)", text):
            name, _, anchor = target.partition("#")
            path = PAGES[page].parent / name if name else PAGES[page]
            assert path.exists(), (page, target)
            titles = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.M) if anchor else []
            anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in ("", *anchors), (page, target)


def test_a_method_is_named_in_the_files_that_contributing_lists():
    (step,) = re.findall(r"Name it in eleven files: (.*?)\.\n", TEXTS["CONTRIBUTING.md"], re.S)
    files = re.findall(r"`([\w/]+\.\w+)`", step)
    assert len(files) == 11
    for script in SCRIPTS:
        for file in files:
            assert script in (ROOT / file.replace("NAME", script)).read_text("utf-8"), file


def sections(script):
    """{title: text} of the second-level sections of a paper's page."""
    parts = re.split(r"^## (.*)\n", PROSE[f"docs/{script}.md"], flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


def cells(text):
    """The rows of the tables in a page, as lists of cells; the rows of dashes are left out."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if not row[0].startswith("-")]


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_pages_of_papers_have_one_skeleton(script):
    found = sections(script)
    assert list(found)[: len(SECTIONS)] == list(SECTIONS)
    for title, columns in SECTIONS.items():
        assert columns is None or " | ".join(cells(found[title])[0]) == columns, title
    assert f"tables/{script}.sh" in found["The paper's tables"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_cell_has_at_most_25_words(script):
    """References to lines of the authors' code and links' targets are not counted."""
    for row in cells(PROSE[f"docs/{script}.md"]):
        for cell in row:
            words = re.sub(r"`[^`]*:\d[^`]*`,?|\]\([^)]*\)|[()]", " ", cell).split()
            assert len(words) <= 25, (len(words), cell)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_size_of_a_departure_is_one_of_those_that_were_measured(script):
    found = sections(script)
    measured = TEXTS["docs/authors.md"] + (ROOT / "docs/departures.jsonl").read_text("utf-8")
    numbers = re.findall(r"\d\.\de-\d+", found["Is it the authors' method?"])
    assert numbers
    rows = [row for row in cells(found["Departures that change the loss"]) if len(row) == 4]
    for departure, *_ in rows[1:]:
        sizes = re.findall(r"\d\.\d(?:e-\d+)?", departure.partition("(")[2])
        assert sizes or re.search(r"not (measured|visible)", departure), departure
        numbers += sizes
    for number in numbers:
        assert re.search(rf"(?<![\d.]){number}(?![\de])", measured), number


def test_each_measured_departure_is_on_the_page_of_its_script():
    for line in map(json.loads, (ROOT / "docs/departures.jsonl").read_text("utf-8").splitlines()):
        kind = line["program"].split("-")[0]
        page = TEXTS[f"docs/{dict(kd='ckd', nli='ckd').get(kind, kind)}.md"]
        assert re.search(rf"(?<![\d.]){line['size']}(?!\d)", page), line


def test_the_numbers_of_one_gpu_are_those_of_its_data():
    """docs/gpu.jsonl: the table, memory by the formula, the recipe and the paper's sizes."""
    lines = list(map(json.loads, (ROOT / "docs/gpu.jsonl").read_text("utf-8").splitlines()))
    section = TEXTS["docs/engineering.md"].split("## One GPU")[1].split("\n## ")[0]
    found = {
        (line["model"], line["batch"], line["way"]): line
        for line in lines
        if line["part"] == "gpu" and line["work"] == "training"
    }
    encoding = {
        (line["model"], line["batch"]): line["sentences/s"]
        for line in lines
        if line["part"] == "gpu" and line["work"] == "encoding" and line["way"] == "parts"
    }
    used = []
    for (model, batch, way), line in found.items():
        layers, width = map(int, re.findall(r"\d+", model))
        weights = layers * (12 * width**2 + 13 * width) + 30_522 * width
        tokens = batch * line["tokens/s"] / line["sentences/s"] / (1 - line["padding"] / 100)
        used.append(line["GB"] / (18 * weights + 45 * layers * width * tokens) * 1e9)
        if way == "parts" and (batch > 512 or width > 384 and batch > 64):
            three = [found[model, batch, way] for way in ("parts", "padded", "one row")]
            cells = [f"{row['sentences/s']:,.0f}" for row in three]
            cells += [f"{row['GB']:.1f}" for row in three] + [f"{encoding[model, batch]:,.0f}"]
            assert f"| {model}, {batch:,} | {' | '.join(cells)} |" in section
    base = [
        found["12 layers of 768", 2048, way]["sentences/s"]
        for way in ("parts", "padded", "one row")
    ]
    stated = [f"{min(used):.2f} to {max(used):.2f}", f"{base[0] / base[1]:.1f} times as fast"]
    stated += [f"trains {base[2] / base[1]:.1f} times as fast"]
    small = [
        [found[f"{layers} layers of 384", 2048, way] for way in ("parts", "padded")]
        for layers in (6, 3)
    ]
    slower = [100 - 100 * a["sentences/s"] / b["sentences/s"] for a, b in small]
    stated += [f"{slower[0]:.0f} to {slower[1]:.0f} %"]
    recipe = [line for line in lines if line["part"] == "recipe"]
    stated += [f"{line['seconds']} seconds" for line in recipe]
    for words in stated:
        assert words in " ".join(section.split()), words
    for line in recipe:
        assert abs(line["dev on a CPU"] - line["dev"]) < 0.01
