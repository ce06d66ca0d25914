"""extras/sweep.py, with a script that trains nothing."""

import pytest

from extras import sweep

# Its dev score depends on lr and seed; lr 9 fails; lr 8 is interrupted when it runs first.
SCRIPT = """
import argparse, json, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--student")
parser.add_argument("--student-layers", default="0")
parser.add_argument("--output")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()
folder = pathlib.Path(args.output)
is_new = not folder.exists()
folder.mkdir(exist_ok=True)
with open(folder.parent.parent / "calls", "a") as file:
    file.write(f"{folder.name} {args.student}\\n")
dev = 10 * args.lr + args.seed**2 + len(args.student_layers)
scores = [("first", 1), ("first", 999), ("second", 2), ("second", dev), ("second", 3)]
lines = [json.dumps(dict(stage=stage, dev=score)) for stage, score in scores]
lines.append(json.dumps(dict(stage="second", loss=1.0)))
(folder / "metrics.jsonl").write_text("\\n".join(lines))
if args.lr == 9 or args.lr == 8 and is_new:
    sys.exit("error: step 5: the loss is nan")
assert args.resume
(folder / "README.md").write_text("a model card")
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def calls(folder):
    return (folder / "calls").read_text().splitlines()


def test_it_ranks_by_the_mean_over_seeds_and_goes_on(script, tmp_path, call_main):
    command = (sweep, script, "lr=9,8,1,3 seed=0,1,3", "--output", tmp_path / "out")
    printed = call_main(*command)
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in printed.splitlines()[2:]]
    assert rows == [
        ["lr=3 (runs: 3)", f"{31 + 10 / 3:.2f}", "4.93"],
        ["lr=1 (runs: 3)", f"{11 + 10 / 3:.2f}", "4.93"],
    ]
    assert len(calls(tmp_path)) == 12
    rows = call_main(*command).splitlines()[2:]  # 8 is resumed; 9 fails again
    assert [row.split()[1] for row in rows] == ["lr=8", "lr=3", "lr=1"]
    assert calls(tmp_path)[12:] == [f"lr={lr},seed={n} None" for lr in (9, 8) for n in (0, 1, 3)]


def test_every_combination_runs_in_the_order_given_with_the_options_after_it(
    script, tmp_path, call_main, fails
):
    grid = "student-layers=1,3;5 --student=models/a,b"
    command = (sweep, script, grid, "--output", tmp_path / "out", "--", "--seed")
    printed = call_main(*command, 3)
    assert calls(tmp_path) == [
        "student-layers=1,3,student=models_a models/a",
        "student-layers=1,3,student=b b",
        "student-layers=5,student=models_a models/a",
        "student-layers=5,student=b b",
    ]
    assert printed.count(" 22.00 |") == printed.count(" 20.00 |") == 2  # 10 + 3**2 + 3 or 1
    assert "another --output" in fails(*command, 4)  # not of the same sweep


def test_it_fails_if_every_run_fails(script, tmp_path, fails):
    assert "no run has succeeded" in fails(sweep, script, "lr=9", "--output", tmp_path / "out")
