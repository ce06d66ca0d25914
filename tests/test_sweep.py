"""sweep.py, most of it with a script that trains nothing, then with distilface.py."""

import json
import signal
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import sweep
from common import DataError

# It has the options and the output folder of a training script. Its dev score depends on lr and
# seed; lr 9 fails as a loss that is not a number does; --wait gives time to interrupt it.
SCRIPT = """
import argparse, json, pathlib, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1)
parser.add_argument("--batch-size", type=int, default=1)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--student", default="")
parser.add_argument("--wait", type=float, default=0)
parser.add_argument("--output")
parser.add_argument("--projection", action="store_true")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--overwrite", action="store_true")
args = parser.parse_args()
folder = pathlib.Path(args.output)
with open(folder.parent.parent / "calls", "a") as file:
    file.write(folder.name + "\\n")
(folder / "checkpoint").mkdir(parents=True, exist_ok=True)
(folder / "1_Dense").mkdir(exist_ok=True)
for name in ("model", "checkpoint/state", "1_Dense/model"):
    (folder / f"{name}.safetensors").write_text("weights")
(folder / "args.json").write_text(json.dumps(vars(args)))
print("| student after | 99.99 |")
time.sleep(args.wait)
dev = 10 * args.lr + args.seed**2 + args.batch_size
lines = [
    dict(stage="first", step=0, dev=1.0),
    dict(stage="first", step=7, loss=1.0, dev=1000.0),
    dict(stage="second", step=0, dev=2.0),
    dict(stage="second", step=5, loss=1.0, dev=dev, test=5000.0),
    dict(stage="second", step=6, loss=1.0),
    dict(stage="second", step=9, loss=1.0, dev=dev - 1),
]
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
if args.lr == 9:
    print("a progress bar", file=sys.stderr)
    print("error: step 5: the loss is | nan", file=sys.stderr)
    sys.exit(2)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def calls(folder):
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


def lines(folder):
    return [json.loads(line) for line in (folder / "sweep.jsonl").read_text().splitlines()]


def table_of(output):
    rows = [line for line in output.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.split(" | ")] for row in rows[2:]]


def sweeping(script, settings, monkeypatch, capsys, *more):
    """Call main() -> the standard output. Tests that end with an error line use `fails`."""
    out = script.parent / "out"
    command = ["sweep.py", str(script), settings, "--output", str(out), *map(str, more)]
    monkeypatch.setattr(sys, "argv", command)
    sweep.main()
    return capsys.readouterr().out


def test_a_required_option_takes_a_value_too():
    """argparse prints it without brackets, and may break the line behind it."""
    options = sweep.read_options("baselines.py")
    assert options["method"] and options["lr"] and not options["demo"]


def test_every_combination_in_the_order_given():
    settings = sweep.read_settings("lr=1e-4,3e-4 batch_size=8 --seed=0,1")
    assert [sweep.setting_name(setting) for setting in settings] == [
        "lr=1e-4,batch-size=8,seed=0",
        "lr=1e-4,batch-size=8,seed=1",
        "lr=3e-4,batch-size=8,seed=0",
        "lr=3e-4,batch-size=8,seed=1",
    ]
    assert settings[2] == {"lr": "3e-4", "batch-size": "8", "seed": "0"}
    assert sweep.setting_name({"student": "models/a"}) == "student=models_a"


def test_the_score_is_the_best_dev_of_the_last_stage(tmp_path):
    entries = [
        '{"stage": "distill", "step": 0, "dev": 60.0}',
        '{"stage": "distill", "step": 9, "loss": 1.0, "dev": 90.0}',
        '{"stage": "finetune", "step": 0, "dev": 70.0}',
        '{"stage": "finetune", "step": 3, "loss": 1.0, "dev": 80.0, "test": 99.0}',
        '{"stage": "finetune", "step": 4, "loss": 1.0}',
        '{"stage": "finetune", "step": 6, "loss": 1.0, "dev": NaN}',
        '{"stage": "finetune", "step": 8, "loss": 1.0, "dev": 75.0}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(entries))
    assert sweep.best_dev(tmp_path) == (80.0, 3)
    (tmp_path / "metrics.jsonl").write_text('{"stage": "distill", "step": 1, "loss": 1.0}\n')
    assert sweep.best_dev(tmp_path) == (None, None)


def test_the_table_is_sorted_by_the_mean_over_seeds(script, tmp_path, monkeypatch, capsys):
    settings = "lr=1,3,2 seed=0,1,3"
    output = sweeping(script, settings, monkeypatch, capsys, "--", "--batch-size", "4")
    scores = {lr: [10 * lr + seed**2 + 4 for seed in (0, 1, 3)] for lr in (3, 2, 1)}
    expected = []
    for lr, devs in scores.items():
        mean = sum(devs) / 3
        deviation = (sum((dev - mean) ** 2 for dev in devs) / 2) ** 0.5
        expected.append([f"| lr={lr}", f"{mean:.2f}", f"{deviation:.2f}", "3", "|"])
    assert table_of(output) == expected
    assert "Best on dev: lr=3" in output.splitlines()[-1]
    assert output.splitlines()[-1].endswith("lr=3,seed=3")
    assert len(calls(tmp_path)) == 9
    entries = lines(tmp_path / "out")
    assert [entry["name"] for entry in entries] == calls(tmp_path)
    assert entries[0]["setting"] == {"lr": "1", "seed": "0"}
    assert (entries[0]["dev"], entries[0]["step"], entries[0]["error"]) == (14, 5, None)
    arguments = json.loads((tmp_path / "out" / "lr=2,seed=1" / "args.json").read_text())
    assert (arguments["lr"], arguments["seed"], arguments["batch_size"]) == (2, 1, 4)
    assert arguments["resume"]
    assert not arguments["overwrite"]
    # Without --keep best, nothing is deleted.
    assert len(list((tmp_path / "out").glob("*/model.safetensors"))) == 9


def test_one_seed_has_no_standard_deviation(script, monkeypatch, capsys):
    output = sweeping(script, "batch_size=2,8", monkeypatch, capsys)
    assert table_of(output) == [
        ["| batch-size=8", "18.00", "", "1", "|"],
        ["| batch-size=2", "12.00", "", "1", "|"],
    ]


def test_seeds_alone_are_one_row(script, monkeypatch, capsys):
    output = sweeping(script, "seed=0,1", monkeypatch, capsys)
    deviation = f"{statistics.stdev([11, 12]):.2f}"
    assert table_of(output) == [["| all seeds", "11.50", deviation, "2", "|"]]


def test_a_setting_that_fails_does_not_end_the_sweep(script, tmp_path, monkeypatch, capsys):
    output = sweeping(script, "lr=9,1 seed=0,1", monkeypatch, capsys)
    table = table_of(output)
    assert table[0][:1] == ["| lr=1"]  # lr=9 has the higher dev scores
    assert [row[0] for row in table[1:]] == ["| lr=9,seed=0", "| lr=9,seed=1"]
    assert table[1][1:] == ["", "", "", "step 5: the loss is \\| nan |"]
    assert "Best on dev: lr=1" in output
    entries = lines(tmp_path / "out")
    assert [entry["error"] is None for entry in entries] == [False, False, True, True]
    assert entries[0]["error"] == "step 5: the loss is | nan"
    # What is finished is not run again, what failed is.
    assert table_of(sweeping(script, "lr=9,1 seed=0,1", monkeypatch, capsys)) == table
    assert calls(tmp_path)[4:] == ["lr=9,seed=0", "lr=9,seed=1"]
    names = [entry["name"] for entry in lines(tmp_path / "out")]
    assert names == ["lr=9,seed=0", "lr=9,seed=1", "lr=1,seed=0", "lr=1,seed=1"]


def test_it_fails_if_every_setting_fails(script, fails, tmp_path):
    line = fails(sweep, script, "lr=9 seed=0,1", "--output", tmp_path / "out")
    assert line == "error: no setting succeeded; the first: step 5: the loss is | nan"
    assert len(calls(tmp_path)) == 2


def test_a_script_that_crashes_or_is_killed_has_an_error_line(tmp_path):
    log = tmp_path / "log"
    log.write_text("Traceback (most recent call last):\n  a line\nValueError: too bad\n\n")
    assert sweep.error_line(log, 1) == "ValueError: too bad"
    assert sweep.error_line(log, -9) == "ended by signal 9"
    log.write_text("error: the first\nerror: step 3: nan\na warning at the end\n")
    assert sweep.error_line(log, 2) == "step 3: nan"
    log.write_text("")
    assert sweep.error_line(log, 3) == "exit status 3"


def test_keep_best_deletes_the_weights_of_the_others(script, tmp_path, monkeypatch, capsys):
    sweeping(script, "lr=9,1,2 seed=0,1", monkeypatch, capsys, "--keep", "best")
    out = tmp_path / "out"
    weights = {str(path.relative_to(out)) for path in out.rglob("*.safetensors")}
    names = ("model", "checkpoint/state", "1_Dense/model")
    assert weights == {f"lr=2,seed=1/{name}.safetensors" for name in names}
    assert len(list(out.glob("*/args.json"))) == 6
    assert len(list(out.glob("*/metrics.jsonl"))) == 6


def test_another_sweep_is_not_written_over(script, fails, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    sweeping(script, "lr=1,2", monkeypatch, capsys)
    before = lines(out)
    for settings, more in (("lr=1,3", ()), ("lr=1,2", ("--", "--batch-size", 2))):
        line = fails(sweep, script, settings, "--output", out, *more)
        assert "already contains another sweep; use --overwrite or another --output" in line
    assert lines(out) == before
    (out / "mine").mkdir()
    sweeping(script, "lr=1,3", monkeypatch, capsys, "--overwrite")
    assert [entry["name"] for entry in lines(out)] == ["lr=1", "lr=3"]
    assert calls(tmp_path) == ["lr=1", "lr=2", "lr=1", "lr=3"]
    folders = {path.name for path in out.iterdir() if path.is_dir()}
    assert folders == {"lr=1", "lr=3", "mine"}


def test_bad_input_gets_one_line_and_runs_nothing(script, fails, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    (tmp_path / "other.py").write_text("import argparse; argparse.ArgumentParser().parse_args()")
    base = (script, "lr=1", "--output", out)
    cases = [
        ((script, "lr="), "lr=: expected OPTION=VALUE,VALUE"),
        ((script, "lr=1,"), "lr=1,: expected OPTION=VALUE,VALUE"),
        ((script, "lr"), "lr: expected OPTION=VALUE,VALUE"),
        ((script, "=1"), "=1: expected OPTION=VALUE,VALUE"),
        ((script, " "), "no settings"),
        ((script, "lr=1 lr=2"), "lr=2: lr is given twice"),
        ((script, "batch-size=1 batch_size=2"), "batch-size is given twice"),
        ((script, "lr=1,1"), "a value is given twice"),
        ((script, "student=a/b,a_b"), "expected different ones"),
        ((script, f"student={'a' * 300}"), "of at most 200 characters"),
        ((script, "depth=1"), "--depth is unknown to"),
        ((script, "projection=1"), "--projection takes no value"),
        ((script, "output=a"), "output: the sweep chooses it"),
        ((tmp_path / "none.py", "lr=1"), "none.py: no such file"),
        ((tmp_path / "other.py", "lr=1"), "expected a training script with --output"),
        ((script,), "SETTINGS"),
        ((script, "lr=1", "--batch-size", 2), "unrecognized arguments: --batch-size 2"),
        ((script, "lr=1", "--keep", "none"), "--keep"),
        ((*base, "--", "--depth", 1), "--depth is unknown to"),
        ((*base, "--", "--overwrite"), "--overwrite after --: the sweep chooses it"),
        ((*base, "--", "--output=x"), "--output=x after --: the sweep chooses it"),
        ((script, "lr=1", "--output", tmp_path / "full"), "contains no sweep"),
        ((script, "lr=1", "--output", tmp_path / "full" / "file"), "contains no sweep"),
        ((script, "lr=1", "--output", tmp_path / "full" / "file" / "x"), "can be written"),
    ]
    for command, expected in cases:
        if "--output" not in command:
            command = (*command, "--output", out)
        assert expected in fails(sweep, *command), command
        assert not out.exists()
        assert not calls(tmp_path)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_continues_with_the_same_command(script, run, tmp_path, end):
    out = tmp_path / "out"
    command = (script, "seed=0,1,2", "--output", out, "--", "--wait", 2)
    process = subprocess.Popen(
        [sys.executable, sweep.__file__, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background lets its processes ignore SIGINT.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    while len(calls(tmp_path)) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(end)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + end
    assert errors.splitlines()[-1] == "error: interrupted; the same command continues"
    time.sleep(2.5)  # the script was ended too, so that it does not finish the setting
    assert not (out / "seed=1" / "metrics.jsonl").exists()
    assert [entry["name"] for entry in lines(out)] == ["seed=0"]
    again = run("sweep.py", *command)
    assert again.returncode == 0, again.stderr
    assert calls(tmp_path) == ["seed=0", "seed=1", "seed=1", "seed=2"]
    assert "1 of 3" not in again.stderr
    assert "2 of 3: seed=1: dev 12.00 at step 5" in again.stderr


def test_a_sweep_that_is_killed_takes_its_script_with_it(script, tmp_path):
    if sys.platform != "linux":
        pytest.skip("only Linux ends a process with its parent")
    out = tmp_path / "out"
    command = (script, "seed=0,1", "--output", out, "--", "--wait", 60)
    sweeping = subprocess.Popen([sys.executable, sweep.__file__, *map(str, command)], stderr=-3)
    while not calls(tmp_path):
        assert sweeping.poll() is None
        time.sleep(0.02)
    children = Path(f"/proc/{sweeping.pid}/task/{sweeping.pid}/children").read_text().split()
    with pytest.raises(DataError, match=f"process {sweeping.pid} on .* is writing into it"):
        sweep.open_folder(out, {}, overwrite=True)
    sweeping.kill()
    sweeping.wait()
    (child,) = children
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < deadline, "the script runs on"
        time.sleep(0.02)
