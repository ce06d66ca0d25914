"""bf16 and fp16 on a CPU: every script runs in them from end to end, near what it does in fp32."""

import importlib
import json
import math

import pytest

WITH_TEACHER = ("--teacher", "mean", "--student-layers", "0,2", "--train", "sentences.txt")
CONTRAST = ("--stage", "distill", "--epochs", 2)
ARGUMENTS = {
    "ckd": (*WITH_TEACHER, *CONTRAST, "--queue-size", 64),
    "congen": (*WITH_TEACHER, "--epochs", 2, "--head", "identity", "--queue-size", 64),
    "ibkd": (*WITH_TEACHER, *CONTRAST),
    "baselines": ("--method", "pkd", *WITH_TEACHER, "--epochs", 2),
    "distilface": ("--student", "bert", "--train", "sentences.txt", "--max-steps", 12),
    "dse": (
        *("--teacher", "bert", "--task", "stsb", "--glue", "demo"),
        *("--teacher-epochs", 1, "--epochs", 1, "--max-steps", 12),
    ),
}
SIMILARITY = ("ckd", "congen", "ibkd", "baselines", "distilface")  # choose the student by --dev


def places(words, models_folder, files):
    """The words of a command line, with the folder of each model and file before its name."""
    folders = {"--teacher": models_folder, "--student": models_folder, "--train": files}
    placed = []
    for before, word in zip(("", *words), words):
        placed.append(folders[before] / word if before in folders else word)
    return placed


def train(call_main, name, models_folder, files, output, precision):
    """Run a script without dropout -> its losses and its dev scores, {(stage, step): number}."""
    words = places(ARGUMENTS[name], models_folder, files)
    if name in SIMILARITY:
        words += ["--dev", files / "dev.tsv"]
    script = importlib.import_module(name)
    options = ("--lr", 2e-4, "--eval-steps", 6, "--batch-size", 32, "--dropout", 0)
    precision = ("--precision", precision, "--device", "cpu")
    call_main(script, *words, *options, *precision, "--output", output)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    numbers = {}
    for kind in ("loss", "dev"):
        entries = [line for line in lines if kind in line]
        numbers[kind] = {(line["stage"], line["step"]): line[kind] for line in entries}
    return numbers["loss"], numbers["dev"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ARGUMENTS)
def test_half_precision_trains_as_single_precision_does(
    call_main, models_folder, files, tmp_path, name
):
    losses, scores = train(call_main, name, models_folder, files, tmp_path / "fp32", "fp32")
    for precision in ("bf16", "fp16"):
        folder = tmp_path / precision
        half_losses, half_scores = train(call_main, name, models_folder, files, folder, precision)
        assert half_losses.keys() == losses.keys()
        for step, loss in losses.items():
            assert math.isclose(half_losses[step], loss, rel_tol=0.05), (precision, step)
            assert half_losses[step] != loss, "it was computed in fp32"
        for step, score in scores.items():
            assert abs(half_scores[step] - score) < 3, (precision, step)
