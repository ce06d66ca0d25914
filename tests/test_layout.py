"""How the project is laid out: sections, imports, the README's tables, signatures, line lengths."""

import ast
import builtins
import dis
import importlib
import inspect
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("ckd", "congen", "ibkd", "dse", "distilface")
SCRIPTS = (*METHODS, "baselines")  # they have sections
SECTIONS = ["Losses", "Model", "Training", "Command line"]
QUEUES = ("Memory bank", "Instance queue")  # a section between Model and Training
RULE = "# " + 98 * "-"
LONGEST_LINE = 100

PROGRAMS = sorted(path.stem for path in ROOT.glob("*.py") if path.stem != "common")
SUPPORT = sorted(path.stem for path in (ROOT / "support").glob("*.py"))
SOURCES = sorted(
    path for pattern in ("*.py", "support/*.py", "tests/*.py") for path in ROOT.glob(pattern)
)

# What a copy of a script's upper part must do without: all but torch, and what torch imports.
BLOCKED = (
    "common",
    "huggingface_hub",
    "numpy",
    "safetensors",
    "scipy",
    "sklearn",
    "support",
    "tokenizers",
    "tqdm",
    "transformers",
)
BLOCKER = """
import importlib
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(name + " is blocked")

sys.meta_path.insert(0, Blocker())
for script in {scripts}:
    sys.path[0] = {folder!r} + "/" + script
    print(importlib.import_module(script).__file__)
"""

# Readers and tests rely on these names and orders.
SIGNATURES = {
    "ckd.contrastive_distillation_loss": "student teacher queue temperature",
    "ckd.supervised_contrastive_loss": "anchor positive hard_negative temperature",
    "baselines.mse_loss": "student teacher",
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


def read(path):
    return path.read_text("utf-8")


def sections(text):
    """-> [(title, number of its first line)] of the comments between two rules."""
    lines = text.splitlines()
    found = []
    for number, line in enumerate(lines[1:-1], 1):
        if lines[number - 1] == lines[number + 1] == RULE:
            found.append((line.removeprefix("# "), number - 1))
    return found


def copied_part(script):
    """What people copy: the text above the section Training."""
    text = read(ROOT / f"{script}.py")
    line = dict(sections(text))["Training"]
    return "\n".join(text.splitlines()[:line]) + "\n"


# ---- sections


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_has_the_five_sections_in_order(script):
    """Docstring, losses, model, a queue if it has one, training, command line."""
    text = read(ROOT / f"{script}.py")
    assert ast.get_docstring(ast.parse(text))
    titles = [title for title, _ in sections(text)]
    assert [title for title in titles if title not in QUEUES] == SECTIONS
    for queue in set(QUEUES) & set(titles):
        assert titles.index("Model") + 1 == titles.index(queue)
    # No rule stands anywhere else.
    assert text.count(RULE) == 2 * len(titles)


def test_losses_and_model_need_torch_alone(tmp_path):
    """The copy of each script, alone in a folder. One process, since torch takes long to load."""
    expected = []
    for script in SCRIPTS:
        path = tmp_path / script / f"{script}.py"
        path.parent.mkdir()
        path.write_text(copied_part(script), "utf-8")
        expected.append(str(path))
    code = BLOCKER.format(blocked=BLOCKED, folder=str(tmp_path), scripts=SCRIPTS)
    empty = tmp_path / "empty"
    empty.mkdir()
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=empty
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == expected


def global_names(code):
    """The names that functions look up in their module when they are called."""
    loads = dis.get_instructions(code)
    names = {item.argval for item in loads if item.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= global_names(constant)
    return names


@pytest.mark.parametrize("script", SCRIPTS)
def test_losses_and_model_use_nothing_defined_below(script):
    """An import of the copy shows only that it loads; this, that its functions can run."""
    code = compile(copied_part(script), f"{script}.py", "exec")
    stores = dis.get_instructions(code)
    stored = {item.argval for item in stores if item.opname == "STORE_NAME"}
    known = stored | set(dir(builtins)) | {"__name__", "__file__", "__doc__"}
    assert global_names(code) <= known


# ---- imports


def imported(path):
    """The modules that a file imports, anywhere in it."""
    modules = set()
    for node in ast.walk(ast.parse(read(path))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            modules.add(node.module)
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def imports_package(path, package):
    return any(module.split(".")[0] == package for module in imported(path))


@pytest.mark.parametrize("path", ["common.py", *(f"support/{name}.py" for name in SUPPORT)])
def test_what_programs_stand_on_imports_no_program(path):
    modules = {module.split(".")[0] for module in imported(ROOT / path)}
    assert not modules & set(PROGRAMS)
    # Nor by name, at run time.
    assert not re.search(r"import_module|__import__|runpy", read(ROOT / path))


def test_common_imports_one_file_of_support_which_imports_nothing_of_the_project():
    own = {"common", "support", *PROGRAMS}
    modules = imported(ROOT / "common.py")
    support = {module for module in modules if module.startswith("support.")}
    assert support == {"support.distributed"}
    modules = {module.split(".")[0] for module in imported(ROOT / "support" / "distributed.py")}
    assert not modules & own


MEASURED = {("benchmark", "dse")}  # the program that measures, and what it measures


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_program_imports_another(program):
    for other in PROGRAMS:
        imported = imports_package(ROOT / f"{program}.py", other)
        assert imported == ((program, other) in MEASURED), other


# ---- equations


def equation_table():
    """README's table -> {"module.function": the set of "Eq. 5", "Section 3.1", ... in its rows}."""
    rows = []
    for line in read(ROOT / "README.md").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells == ["paper", "equation", "what it is", "function"]:
            rows = [cells]
        elif rows and line.startswith("|"):
            rows.append(cells)
        elif rows:
            break
    assert len(rows) > 2, "README.md has no table paper | equation | what it is | function"
    table = {}
    for _, equation, _, function in rows[2:]:
        names = re.findall(r"`([\w.]+)`", function)
        assert names, f"{function}: no `module.function`"
        sources = re.findall(r"(?:Eq\.|Section) [\d.]*\d", equation)
        assert sources, f"{equation}: no Eq. N or Section N"
        for name in names:
            table.setdefault(name, set()).update(sources)
    return table


def look_up(name):
    """ "module.attribute", or "module.Class.attribute" -> the object."""
    module, *attributes = name.split(".")
    found = importlib.import_module(module)
    for attribute in attributes:
        found = getattr(found, attribute)
    return found


def docstrings(script):
    """{"module.function" or "module.Class.method": its docstring}"""
    found = {}

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                name = f"{prefix}.{child.name}"
                found[name] = ast.get_docstring(child) or ""
                visit(child, name)

    visit(ast.parse(read(ROOT / f"{script}.py")), script)
    return found


def test_every_function_of_the_equation_table_exists():
    for name in equation_table():
        assert callable(look_up(name)), name


def test_every_function_of_the_equation_table_names_its_equations():
    for name, sources in equation_table().items():
        text = (look_up(name).__doc__ or "").lower()
        for source in sources:
            kind, number = source.lower().split()
            # "eq. 4, 5 and 6" names three of them.
            pattern = rf"{re.escape(kind)}s? (?:[\d.]+(?:, | and ))*{re.escape(number)}(?![\d])"
            assert re.search(pattern, text), f"{name} does not name {source}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_equation_that_begins_a_docstring_is_in_the_table(script):
    table = equation_table()
    begun = {}
    for name, text in docstrings(script).items():
        if match := re.match(r"Eq\. ([\d, and]*\d)", text):
            begun[name] = {f"Eq. {number}" for number in re.findall(r"\d+", match[1])}
    for name, equations in begun.items():
        assert equations <= table.get(name, set()), f"{name}: {equations} in its docstring"


@pytest.mark.parametrize("name", SIGNATURES)
def test_losses_and_poolings_keep_their_arguments(name):
    expected = SIGNATURES[name].split()
    parameters = list(inspect.signature(look_up(name)).parameters.values())
    assert [parameter.name for parameter in parameters[: len(expected)]] == expected
    # What a function takes beyond them has a default.
    assert all(
        parameter.default is not parameter.empty for parameter in parameters[len(expected) :]
    )


# ---- text


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_are_short(path):
    for number, line in enumerate(read(path).splitlines(), 1):
        assert len(line) <= LONGEST_LINE, f"{path}:{number}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_readme_mentions_every_program(program):
    assert re.search(rf"\b{program}\.py\b", read(ROOT / "README.md"))
