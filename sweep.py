"""Run a training script with every combination of some options, and say which is best on dev.

    sweep.py SCRIPT "OPTION=VALUE,VALUE OPTION=VALUE" [--output FOLDER] [--keep best] -- ARGUMENTS

One setting after another runs as SCRIPT ARGUMENTS --OPTION VALUE ... --output FOLDER/SETTING, and
what it prints goes to FOLDER/SETTING.log. The same command continues an interrupted sweep: it skips
the settings that are finished, resumes the one that was running, and repeats those that failed.
A setting that fails does not end the sweep. Teacher embeddings are computed once for all settings.

The score of a setting is its student's dev score, from metrics.jsonl; test scores are never read.
Settings that differ in their seed alone are one row of the table at the end: mean and standard
deviation (n - 1) of their dev scores, and the number of seeds. FOLDER/sweep.jsonl has a line for
each setting, FOLDER/sweep.json the command. A value contains no comma and no space.

  python sweep.py ckd.py "lr=1e-4,3e-4 seed=0,1,2" -- --demo
  python sweep.py distilface.py "pooling=avg,cls" --keep best --output runs/poolings -- --dev my.tsv
"""

import itertools
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from common import DataError, WriteError, parse_json, read_lines, write_whole, writing
from support.command_line import ArgumentParser, run_main
from support.encoder import read_json
from support.process import Interrupted, check_lock, die_with_parent, lock_folder
from support.records import read_metrics

RESERVED = ("output", "resume", "overwrite")  # the sweep itself gives these
WEIGHTS = (".safetensors", ".bin", ".onnx")
LONGEST_NAME = 200  # characters of a setting's folder; a file system takes 255 bytes


# --------------------------------------------------------------------------------------------------
# Settings
# --------------------------------------------------------------------------------------------------


def read_settings(text):
    """ "lr=1e-4,3e-4 seed=0,1" -> [{"lr": "1e-4", "seed": "0"}, ...], every combination.

    Raises DataError.
    """
    options = {}
    for part in text.split():
        name, _, values = part.partition("=")
        name = name.removeprefix("--").replace("_", "-")
        values = values.split(",")
        if not name or not all(values):
            raise DataError(f"{part}: expected OPTION=VALUE,VALUE, as in lr=1e-4,3e-4")
        if name in options:
            raise DataError(f"{part}: {name} is given twice, expected all its values at once")
        if len(set(values)) < len(values):
            raise DataError(f"{part}: a value is given twice, expected different ones")
        options[name] = values
    if not options:
        raise DataError("no settings, expected OPTION=VALUE,VALUE, as in lr=1e-4,3e-4")
    settings = [dict(zip(options, values)) for values in itertools.product(*options.values())]
    names = [setting_name(setting) for setting in settings]
    if len(set(names)) < len(names) or max(map(len, names)) > LONGEST_NAME:
        expected = f"different ones of at most {LONGEST_NAME} characters"
        raise DataError(f"the settings' folders are named as {names[-1]}, expected {expected}")
    return settings


def setting_name(setting):
    """{"lr": "1e-4", "seed": "0"} -> "lr=1e-4,seed=0", a file name."""
    return ",".join(f"{option}={value}" for option, value in setting.items()).replace("/", "_")


def read_options(script):
    """What a script's --help says of its options -> {name: does it take a value}.

    Raises DataError if the script cannot be run so.
    """
    command = [sys.executable, script, "--help"]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace")
    usage = " ".join(process.stdout.split("\n\n")[0].split())  # one line, as before its wrapping
    options = {name: bool(value) for name, value in re.findall(r"--([\w-]+)( \[?[\w{])?", usage)}
    if not set(RESERVED) <= set(options):
        expected = "a training script with --output, --resume and --overwrite"
        raise DataError(f"{script}: expected {expected}")
    return options


def check_options(script, setting, arguments):
    """Raises DataError for an option that the script does not have, or that is not free."""
    options = read_options(script)
    for name in setting:
        if name in RESERVED:
            raise DataError(f"{name}: the sweep chooses it, expected another option")
        if not options.get(name):
            problem = "takes no value" if name in options else "is unknown to"
            raise DataError(
                f"--{name} {problem} {script}, expected one of its options with a value"
            )
    check_arguments(script, setting, arguments, options)


def check_arguments(script, setting, arguments, options):
    """Raises DataError for an argument after -- that is unknown, or that the sweep sets."""
    for word in arguments:
        name = word.removeprefix("--").split("=")[0]
        if not word.startswith("--"):
            continue
        if any(option.replace("_", "-").startswith(name) for option in setting):
            raise DataError(f"{word} after --: it is a setting, expected it left out")
        if any(reserved.startswith(name) for reserved in RESERVED):
            raise DataError(f"{word} after --: the sweep chooses it, expected it left out")
        if not any(option.startswith(name) for option in options):
            raise DataError(f"{word} is unknown to {script}, expected one of its options")


# --------------------------------------------------------------------------------------------------
# Runs
# --------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """How one setting ended: with the dev score of its student, or an error line."""

    name: str
    setting: dict
    dev: float | None
    step: int | None  # of the student
    error: str | None
    seconds: float  # since the sweep was last started


KINDS = {  # of the values of a Result, as JSON
    "name": str,
    "setting": dict,
    "dev": (int, float, type(None)),
    "step": (int, type(None)),
    "error": (str, type(None)),
    "seconds": (int, float),
}


def best_dev(folder):
    """The student's dev score and its step, from metrics.jsonl -> (None, None) without one.

    It is the best of the last stage, which begins with the score of the student before it.
    """
    stages = {}
    for _, entry in read_metrics(folder / "metrics.jsonl"):
        if math.isfinite(entry.get("dev", math.nan)):
            stages.setdefault(entry.get("stage"), []).append((entry["dev"], entry["step"]))
    if not stages:
        return None, None
    return max(list(stages.values())[-1], key=lambda scored: scored[0])


def error_line(log, status):
    """What a failed run's log says of it."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if line.startswith("error: ")]
    if errors:
        return errors[-1].removeprefix("error: ")
    if status < 0:
        return f"ended by signal {-status}"
    return lines[-1] if lines else f"exit status {status}"


def run_setting(script, setting, arguments, folder):
    """Run the script with one setting, from its start or where it was interrupted -> Result."""
    name = setting_name(setting)
    options = [word for option, value in setting.items() for word in (f"--{option}", value)]
    command = [sys.executable, script, *arguments, *options]
    command += ["--output", str(folder / name), "--resume"]
    log = folder / f"{name}.log"
    begin = time.perf_counter()
    with writing(log), open(log, "w", encoding="utf-8") as file:
        status = run_to_its_end(command, file)
    seconds = round(time.perf_counter() - begin, 1)
    if status != 0:
        return Result(name, setting, None, None, error_line(log, status), seconds)
    try:
        dev, step = best_dev(folder / name)
        error = "no dev score in metrics.jsonl" if dev is None else None
    except DataError as problem:
        dev, step, error = None, None, str(problem)
    return Result(name, setting, dev, step, error, seconds)


def run_to_its_end(command, log):
    """Run a command whose output goes to an open file -> its exit status.

    Ctrl-C and SIGTERM end the sweep alone, which tells the script to end with a checkpoint, and
    waits for that. If the sweep is killed, the script is killed as well.
    """
    with subprocess.Popen(
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # the terminal's Ctrl-C does not reach it
        preexec_fn=die_with_parent,
    ) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            try:
                process.wait()
            except KeyboardInterrupt:
                process.kill()
            raise


def open_folder(folder, command, overwrite):
    """Begin a sweep in its folder, or continue it -> its lock, {name: Result} of what is finished.

    Raises DataError if the folder contains something else, or another process writes into it.
    """
    check_lock(folder)
    before = read_json(folder / "sweep.json")
    if before is not None and not isinstance(before.get("settings"), str):
        raise DataError(f"{folder / 'sweep.json'}: no settings, expected the command of a sweep")
    if before is None and folder.exists() and (folder.is_file() or any(folder.glob("[!.]*"))):
        raise DataError(f"{folder}: contains no sweep, expected a new folder for --output")
    if before not in (None, command) and not overwrite:
        advice = "use --overwrite or another --output"
        raise DataError(f"{folder}: already contains another sweep; {advice}")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(folder)
    if before is not None and overwrite:
        delete_sweep(folder, before)
    write_whole(folder / "sweep.json", json.dumps(command, indent=2) + "\n")
    return lock, {result.name: result for result in read_results(folder) if result.error is None}


def read_results(folder):
    """sweep.jsonl -> list of Result. Raises DataError."""
    path = folder / "sweep.jsonl"
    if not path.exists():
        return []
    results = []
    for line, text in read_lines(path):
        try:
            values = parse_json(text)
            result = Result(**values)
            for name, kind in KINDS.items():
                if not isinstance(values[name], kind):
                    raise ValueError(f"{name} is {json.dumps(values[name])[:40]}")
            if result.error is None and None in (result.dev, result.step):
                raise ValueError("neither a dev score nor an error")
        except (ValueError, TypeError) as error:
            problem = str(error)[:200]
            raise DataError(f"{path}:{line}: {problem}, expected a line of a sweep") from None
        results.append(result)
    return results


def delete_sweep(folder, command):
    """Delete a sweep's files, its record last, and nothing else."""
    for setting in read_settings(command["settings"]):
        name = setting_name(setting)
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / f"{name}.log").unlink(missing_ok=True)
    (folder / "sweep.jsonl").unlink(missing_ok=True)
    (folder / "sweep.json").unlink()


def delete_weights(folder):
    """Delete a run's checkpoint and model weights; args.json, metrics.jsonl and the card stay."""
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    for path in folder.rglob("*"):
        if path.suffix in WEIGHTS:
            path.unlink()


# --------------------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """Settings that differ in their seed alone."""

    name: str
    mean: float  # of their dev scores
    deviation: float | None  # standard deviation, n - 1; None of one seed
    best: Result  # the seed with the best dev score
    seeds: int


def make_rows(results):
    """Results with a dev score -> Rows, the best mean first."""
    groups = {}
    for result in results:
        rest = {option: value for option, value in result.setting.items() if option != "seed"}
        groups.setdefault(setting_name(rest), []).append(result)
    rows = []
    for name, group in groups.items():
        scores = [result.dev for result in group]
        deviation = statistics.stdev(scores) if len(scores) > 1 else None
        best = max(group, key=lambda result: result.dev)
        rows.append(Row(name or "all seeds", statistics.mean(scores), deviation, best, len(scores)))
    return sorted(rows, key=lambda row: -row.mean)


def markdown(rows, failed):
    """Rows, and the Results of settings that failed -> a Markdown table."""
    lines = [["setting", "dev", "standard deviation", "seeds", "error"]]
    lines.append(["---", "---:", "---:", "---:", "---"])
    for row in rows:
        deviation = "" if row.deviation is None else f"{row.deviation:.2f}"
        lines.append([row.name, f"{row.mean:.2f}", deviation, str(row.seeds), ""])
    for result in failed:
        lines.append([result.name, "", "", "", result.error.replace("|", "\\|")])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------


def parse_args():
    parser = ArgumentParser("Run a training script with every combination of some options.")
    parser.usage = '%(prog)s SCRIPT "lr=1e-4,3e-4 seed=0,1,2" [options] -- ARGUMENTS'
    add = parser.add_argument
    add("script", metavar="SCRIPT", help="such as ckd.py")
    add("settings", metavar="SETTINGS", help="options and their values: lr=1e-4,3e-4 seed=0,1,2")
    add("--output", help="a folder for each setting goes here; runs/sweep-SCRIPT")
    add(
        "--keep",
        choices=("all", "best"),
        default="all",
        help="best: delete the weights and checkpoints of all students but the best; %(default)s",
    )
    add("--overwrite", action="store_true", help="delete the sweep in --output and begin again")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    args.arguments = words[end + 1 :]  # the script's own
    return args


def run_all(settings, args, folder):
    """Run every setting that is not finished -> the Results of all."""
    command = dict(script=args.script, settings=args.settings, arguments=args.arguments)
    lock, results = open_folder(folder, command, args.overwrite)
    names = [setting_name(setting) for setting in settings]
    for number, (name, setting) in enumerate(zip(names, settings), 1):
        if name in results:
            continue
        print(f"{number} of {len(settings)}: {name}: ", end="", file=sys.stderr, flush=True)
        result = run_setting(args.script, setting, args.arguments, folder)
        results[name] = result
        done = [results[name] for name in names if name in results]
        lines = [json.dumps(result._asdict()) + "\n" for result in done]
        write_whole(folder / "sweep.jsonl", "".join(lines))
        outcome = result.error or f"dev {result.dev:.2f} at step {result.step}"
        print(f"{outcome} ({result.seconds:.0f} s)", file=sys.stderr)
    lock.close()
    return [results[name] for name in names]


def report(results, folder):
    """Print the table -> the name of the best student's setting. Raises DataError without one."""
    rows = make_rows([result for result in results if result.error is None])
    failed = [result for result in results if result.error is not None]
    print(markdown(rows, failed))
    if not rows:
        raise DataError(f"no setting succeeded; the first: {failed[0].error}")
    best = rows[0].best.name
    print(f"\nBest on dev: {rows[0].name}. Its best student: {folder / best}")
    return best


def main():
    args = parse_args()
    if not Path(args.script).is_file():
        raise DataError(f"{args.script}: no such file, expected a training script such as ckd.py")
    settings = read_settings(args.settings)
    check_options(args.script, settings[0], args.arguments)
    folder = Path(args.output or f"runs/sweep-{Path(args.script).stem}")
    try:
        results = run_all(settings, args, folder)
    except Interrupted as error:
        print(file=sys.stderr)  # ends the line of the setting that was running
        error.args = ("interrupted; the same command continues",)
        raise
    except WriteError as error:
        kept = "finished settings are kept, and the same command continues"
        raise DataError(f"{error.problem}; {kept}") from None
    best = report(results, folder)
    if args.keep == "best":
        for result in results:
            if result.name != best:
                delete_weights(folder / result.name)


if __name__ == "__main__":
    run_main(main)
