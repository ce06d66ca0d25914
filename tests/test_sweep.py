"""extras/sweep.py, with a script that trains nothing."""

import pytest

from extras import sweep

SCRIPT = """
import argparse, json, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--seed", type=int)
parser.add_argument("--student")
parser.add_argument("--output")
args = parser.parse_args()
folder = pathlib.Path(args.output)
is_new = not folder.exists()
folder.mkdir(exist_ok=True)
with open(folder.parent.parent / "calls", "a") as file:
    file.write(f"{folder.name} {args.student}\\n")
dev = 10 * args.lr + args.seed**2
scores = dict(before=dict(dev=999.0), after={"dev": dev, "STS-B": 1.0, "avg": dev + args.seed / 9})
(folder / "scores.json").write_text(json.dumps(scores))
if args.lr == 9 and is_new:
    sys.exit("error: step 5: the loss is nan")
"""


def test_it_ranks_by_the_mean_over_seeds_and_goes_on(tmp_path, call_main):
    """dev is 10 lr + 1, and 9 more with seed 3; lr 9 fails when it runs first."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = (tmp_path / "train.py", "lr=9,3 seed=0,3", "--output", tmp_path / "out")
    printed = call_main(sweep, *command, "--", "--student", "models/a")
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in printed.splitlines()]
    assert rows[0] == ["model", "dev", "± dev", "STS-B", "± STS-B", "avg", "± avg"]
    expected = ["34.50", "6.36", "1.00", "0.00", "34.67", "6.60"]
    assert rows[2:] == [["lr=3 (runs: 2)", *expected]]
    names = ("lr=9,seed=0", "lr=9,seed=3", "lr=3,seed=0", "lr=3,seed=3")
    assert (tmp_path / "calls").read_text().splitlines() == [f"{name} models/a" for name in names]
    printed = call_main(sweep, *command, "--", "--student", "models/a")
    assert [line[:8] for line in printed.splitlines()[2:]] == ["| lr=9 (", "| lr=3 ("]


def test_p_is_that_of_a_paired_test_over_common_seeds():
    """t = mean / (s / sqrt(n)) of the differences 1, 2, 4: p of |t| with two degrees of freedom."""
    best = {"0": {"dev": 11.0}, "1": {"dev": 12.0}, "2": {"dev": 14.0}, "3": {"dev": 99.0}}
    other = {seed: {"dev": 10.0} for seed in ("0", "1", "2")}
    t = (7 / 3) / ((7 / 3) ** 0.5 / 3**0.5)  # the variance of 1, 2, 4 is 7/3
    expected = 1 - t / (2 + t**2) ** 0.5  # Student's distribution for two degrees of freedom
    assert sweep.p_value(best, other) == pytest.approx(expected)
    results = [(dict(lr="1", seed=seed), scores) for seed, scores in best.items()]
    results += [(dict(lr="2", seed=seed), scores) for seed, scores in other.items()]
    header, _, first, second = sweep.table(sweep.rank(results)).splitlines()
    assert header.endswith("| p, uncorrected |")
    assert first.startswith("| lr=1 ") and first.endswith(" |  |")
    assert second.endswith(f" {expected:.3f} |")


@pytest.mark.filterwarnings("error")
def test_without_variance_or_common_seeds_there_is_no_p():
    best = {str(seed): {"dev": 0.1 * seed} for seed in range(3)}
    other = {seed: {"dev": scores["dev"] - 0.3} for seed, scores in best.items()}
    assert sweep.p_value(best, other) is None  # each difference is 0.3
    assert sweep.p_value(best, best) is None and sweep.p_value(best, {"9": {"dev": 1.0}}) is None
    results = [(dict(lr="1", seed=seed), scores) for seed, scores in best.items()]
    results += [(dict(lr="2", seed=seed), scores) for seed, scores in other.items()]
    assert "uncorrected" not in sweep.table(sweep.rank(results))


def test_a_second_attempt_keeps_the_log_and_reports_its_own_error(tmp_path):
    """The first one ends with an error, the second one without a word."""
    script = tmp_path / "script.py"
    script.write_text("import sys; print('error: no memory'); sys.exit(2)\n")
    folder = tmp_path / "lr=1"
    assert sweep.run_setting(str(script), {"lr": 1}, [], folder) == "no memory"
    script.write_text("import sys; sys.exit(3)\n")
    assert sweep.run_setting(str(script), {"lr": 1}, [], folder) == "exit status 3"
    assert "no memory" in (tmp_path / "lr=1.log").read_text()
