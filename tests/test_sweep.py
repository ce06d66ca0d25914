"""extras/sweep.py, with a script that trains nothing."""

import math

import pytest

from extras import sweep

# Its dev score depends on lr and seed; lr 9 fails; lr 8 is interrupted when it runs first.
SCRIPT = """
import argparse, pathlib, sys, torch
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--student")
parser.add_argument("--student-layers", default="0")
parser.add_argument("--output")
args = parser.parse_args()
folder = pathlib.Path(args.output)
is_new = not folder.exists()
folder.mkdir(exist_ok=True)
with open(folder.parent.parent / "calls", "a") as file:
    file.write(f"{folder.name} {args.student}\\n")
dev = 10 * args.lr + args.seed**2 + len(args.student_layers)
scores = dict(before=dict(dev=999.0), after={"dev": dev, "STS-B": 1.0, "avg": dev + args.seed / 9})
torch.save(dict(scores=scores), folder / "checkpoint.pt")
if args.lr == 9 or args.lr == 8 and is_new:
    sys.exit("error: step 5: the loss is nan")
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def calls(folder):
    return (folder / "calls").read_text().splitlines()


def test_it_ranks_by_the_mean_over_seeds_and_goes_on(script, tmp_path, call_main):
    command = (sweep, script, "lr=9,1,3 seed=0,3", "--output", tmp_path / "out")
    printed = call_main(*command)
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in printed.splitlines()]
    assert rows[0] == ["model", "dev", "± dev", "STS-B", "± STS-B", "avg", "± avg", "p"]
    # dev is 10 lr + 1, and 9 more with seed 3; avg then has 1/3 more than dev.
    expected = ["35.50", "6.36", "1.00", "0.00", "35.67", "6.60"]
    assert rows[2] == ["lr=3 (runs: 2)", *expected, ""]
    assert rows[3][:2] == ["lr=1 (runs: 2)", "15.50"]
    assert len(calls(tmp_path)) == 6
    command = (sweep, script, "lr=8,3", "--output", tmp_path / "again")
    assert "lr=8" not in call_main(*command)  # it has failed
    assert "lr=8" in call_main(*command)  # and goes on


def test_p_is_that_of_a_paired_test_over_common_seeds():
    """t = mean / (s / sqrt(n)) of the differences 1, 2, 4: p of |t| with two degrees of freedom."""
    best = {"0": {"dev": 0.0, "avg": 11.0}, "1": {"dev": 0.0, "avg": 12.0}}
    best |= {"2": {"dev": 0.0, "avg": 14.0}, "3": {"dev": 0.0, "avg": 99.0}}
    other = {seed: {"dev": 50.0, "avg": 10.0} for seed in ("0", "1", "2")}
    t = (7 / 3) / ((7 / 3) ** 0.5 / 3**0.5)  # the variance of 1, 2, 4 is 7/3
    expected = 1 - t / (2 + t**2) ** 0.5  # Student's distribution for two degrees of freedom
    assert sweep.p_value(best, other) == pytest.approx(expected)
    assert math.isnan(sweep.p_value(best, best)) and math.isnan(sweep.p_value(best, {"9": {}}))


def test_every_combination_runs_in_the_order_given_with_the_options_after_it(
    script, tmp_path, call_main, fails
):
    grid = "student-layers=1,3;5 --student=models/a,b"
    printed = call_main(sweep, script, grid, "--output", tmp_path / "out", "--", "--seed", 3)
    assert calls(tmp_path) == [
        "student-layers=1,3,student=models_a models/a",
        "student-layers=1,3,student=b b",
        "student-layers=5,student=models_a models/a",
        "student-layers=5,student=b b",
    ]
    assert printed.count(" 22.00 |") == printed.count(" 20.00 |") == 2  # 10 + 3**2 + 3 or 1
    assert "no run has succeeded" in fails(sweep, script, "lr=9", "--output", tmp_path / "all fail")
