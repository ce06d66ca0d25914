"""The pages: every command that they show is accepted by its script's own parser, every link leads
somewhere, every function that they name exists."""

import importlib
import re
import shlex
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "results"))
import make
import runs

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES += sorted(ROOT.glob("results/*.md"))
PROGRAM = re.compile(r"(?:-m (extras\.\w+)|(\w+)\.py)(?: |$)")


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


COMMANDS = commands()


def test_there_are_commands():
    assert len(COMMANDS) >= 20


@pytest.mark.parametrize("page, command", COMMANDS, ids=lambda value: value[-60:])
def test_a_documented_command_is_accepted(page, command, parse):
    found = PROGRAM.search(command)
    module = importlib.import_module(found[1] or found[2])
    parse(module, *shlex.split(command[found.end() :]))


def test_the_command_of_each_run_is_accepted(parse):
    every = list(runs.all_runs())
    assert len(every) > 60
    for _, _, _, command in every:
        words = runs.expand(command, "data")[1:]
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
