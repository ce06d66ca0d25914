"""The exercises of docs/teaching.md: applies the page's diffs to ckd.py and fills in the results.

  python docs/lesson.py       three seeds of each: 12 minutes of one core

It needs runs/lesson.txt, which the page's first command writes. A run adds its line to
teaching.jsonl; one that has a line is not run again.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "results"))
import make
import runs

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "teaching.md"
DATA = ROOT / "docs" / "teaching.jsonl"
SEEDS = (0, 1, 2)
COMMAND = re.compile(r"^python ckd\.py (@demo/ckd\.txt (?:\\\n|.)*)$", re.M)
DIFF = re.compile(r"^### \d\. (.+)\n+```diff\n- (.+)\n\+ (.+)\n```", re.M)
TEXT = PAGE.read_text("utf-8")
# title -> the code of a line of ckd.py, without indentation and comment, and the code in its place
EXERCISES = {"Unchanged": ("import math", "import math")}
EXERCISES |= {title: (old, new) for title, old, new in DIFF.findall(TEXT)}


def changed_script(title):
    """The source of ckd.py after an exercise. The first such line, stage 1's, is changed."""
    old, new = EXERCISES[title]
    lines = (ROOT / "ckd.py").read_text("utf-8").splitlines(keepends=True)
    number = [line.split("  #")[0].strip() for line in lines].index(old)
    lines[number] = lines[number].replace(old, new)
    return "".join(lines)


def measured():
    """{run: its scores}"""
    lines = map(json.loads, DATA.read_text("utf-8").splitlines()) if DATA.exists() else ()
    return {line["run"]: line["scores"] for line in lines}


def run_name(title, seed):
    return f"lesson-{title.lower().replace(' ', '-')}-{seed}"


def measure(title, seed):
    """Run the page's command with the changed script, and add a line to the data."""
    name = run_name(title, seed)
    folder = ROOT / "runs" / name
    script = ROOT / "runs" / "exercise.py"
    script.write_text(changed_script(title), "utf-8")
    words = shlex.split(COMMAND.search(TEXT)[1].replace("\\\n", ""))
    words += ["--seed", str(seed), "--output", f"runs/{name}"]
    # The changed script finds common.py in the project's folder.
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    subprocess.run([sys.executable, script, *words], cwd=ROOT, env=environment, check=True)
    *_, loss_line, dev_line = map(json.loads, (folder / "metrics.jsonl").open())
    last = dict(dev=dev_line["dev"], loss=loss_line["loss"])
    scores = runs.scores_of(folder) | {"last step": last}
    revision = ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]
    commit = subprocess.check_output(revision, text=True).strip()
    line = dict(run=name, command=shlex.join(["python", "ckd.py", *words]), commit=commit)
    line |= dict(seed=seed, machine=runs.machine(), scores=scores)
    with DATA.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def filled(page):
    """The page, with the table of results; a difference is that of two runs with the same seed."""
    scores_of = measured()
    rows = []
    for title in EXERCISES:
        found = [scores_of[run_name(title, seed)] for seed in SEEDS]
        dev = [scores["last step"]["dev"] for scores in found]
        unchanged = [scores_of[run_name("Unchanged", s)]["last step"]["dev"] for s in SEEDS]
        before = [f"{found[0][row]['dev']:.2f}" for row in ("teacher", "student before")]
        difference = [a - b for a, b in zip(dev, unchanged)]
        loss = mean(scores["last step"]["loss"] for scores in found)
        rows.append([title, *before, make.cell(dev), make.cell(difference), f"{loss:.4f}"])
    header = ["", "teacher", "student before", "after 50 steps", "difference", "loss at step 50"]
    table = make.markdown(header, rows)
    markers = r"(<!-- measured -->).*?(<!-- end -->)"
    return re.sub(markers, rf"\1\n\n{table}\n\n\2", page, flags=re.S)


def main():
    for seed in SEEDS:
        for title in EXERCISES:
            if run_name(title, seed) not in measured():
                measure(title, seed)
    PAGE.write_text(filled(TEXT), "utf-8")
    print(f"{PAGE} has the results of {len(measured())} runs")


if __name__ == "__main__":
    main()
