"""The folder of a run: the same command continues it, to the same bytes, or prints its table."""

import importlib
import itertools
import json
import math
import random
import shutil
import time

import pytest
import torch
import transformers
from conftest import check_student, demo_lines, dev_scores, losses, outcome, rows
from processes import SCRIPTS, finish, small_options, start
from safetensors import SafetensorError

import ckd
import common
import congen

BASE = ["--student-layers", "0,2", "--max-steps", 6, "--eval-steps", 2, "--batch-size", 16]


@pytest.fixture
def options(models_folder, files, tmp_path):
    """The words of a small run, whose files are copies that a test may change."""
    for name in ("sentences.txt", "dev.tsv"):
        shutil.copy(files / name, tmp_path)
    data = ["--train", tmp_path / "sentences.txt", "--dev", tmp_path / "dev.tsv"]
    return ["--teacher", models_folder / "mean", *data, "--output", tmp_path / "out", *BASE]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_that_is_killed_at_any_moment_ends_as_one_that_was_not(
    name, models_folder, files, tmp_path, request
):
    """By SIGKILL, `--kills` times; each time, the same command again."""
    seed = time.time_ns()
    print("the seed of the moments is", seed)
    moments = random.Random(seed)
    whole, killed, log = tmp_path / "whole", tmp_path / "killed", tmp_path / "log"
    more = ["--learn-temperature", "--queue-size", 64] if name == "ckd" else []
    finish(start(f"{name}.py", small_options(name, models_folder, files, whole) + more, log), log)
    lines = len(rows(whole))
    words = small_options(name, models_folder, files, killed) + more
    for kill in range(request.config.getoption("--kills")):
        process = start(f"{name}.py", words, log)
        after = moments.randrange(lines * kill // 10, lines * 9 // 10)
        while process.is_alive() and len(rows(killed)) <= after:
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.05))
        process.kill()
        process.join()
        assert process.exitcode == -9
    finish(start(f"{name}.py", words, log), log)
    assert outcome(killed) == outcome(whole)


TWO_STAGES = [("ckd", "", "finetune"), ("ibkd", "--dim 16", "finetune"), ("dse", "", "student")]


@pytest.mark.parametrize("name, more, second", TWO_STAGES)
def test_a_run_that_dies_between_its_stages_loses_neither(
    check_resume, models_folder, files, name, more, second
):
    """Before stage 2's first checkpoint, after it, and after stage 2 has saved its student."""
    words = [*small_options(name, models_folder, files, ""), *more.split()]
    check_resume(importlib.import_module(name), second, ("before", "after", 0), *words)


def test_a_finished_run_prints_its_table_and_loads_no_model(
    call_main, options, tmp_path, monkeypatch
):
    """It has saved two checkpoints, of 1.6 GB each for BERT-base: as it began, and at its end."""
    saved, save = [], torch.save
    monkeypatch.setattr(torch, "save", lambda *both: (saved.append(both), save(*both)))
    table = call_main(ckd, *options)
    assert len(saved) == 2
    before = contents(tmp_path / "out")
    monkeypatch.setattr(ckd, "load_student", None)
    assert call_main(ckd, *options) == table
    assert contents(tmp_path / "out") == before


def test_another_run_is_refused_and_nothing_is_touched(
    call_main, fails, options, tmp_path, monkeypatch
):
    """The line names the first option that differs, or that the texts or the code have changed."""
    call_main(ckd, *options)
    out, edited = tmp_path / "out", tmp_path / "edited.py"
    before = contents(out)
    assert f"{out}: has a run with --seed 0, not 5; choose" in fails(ckd, *options, "--seed", 5)
    edited.write_text("# another loss\n")
    for module in (ckd, common):
        with monkeypatch.context() as patch:
            patch.setattr(module, "__file__", str(edited))
            assert "has a run with other code (its script or" in fails(ckd, *options)
    text = (tmp_path / "dev.tsv").read_text()
    (tmp_path / "dev.tsv").write_text(text + "a boy\ta lad\t4\n")
    assert "has a run with other texts (a file" in fails(ckd, *options)
    assert contents(out) == before


@pytest.mark.parametrize("owner", [torch, transformers.PreTrainedModel])
def test_a_disk_that_is_full_for_a_while_loses_nothing(
    call_main, fails, options, tmp_path, monkeypatch, owner
):
    """The third write fails; with space again, the same command ends with the same student."""
    name = "save" if owner is torch else "save_pretrained"
    write, writes, rising = getattr(owner, name), [], itertools.count(1.0)
    monkeypatch.setattr(common, "CHECKPOINT_SECONDS", 0)
    monkeypatch.setattr(ckd, "spearman", lambda *_, **__: {"dev": next(rising)})
    call_main(ckd, *options, "--output", tmp_path / "whole")

    def write_until_full(*arguments, **further):
        writes.append(arguments)
        if len(writes) == 3:
            raise SafetensorError("No space left on device")  # which is no OSError
        write(*arguments, **further)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, write_until_full)
        assert "No space left on device; " in fails(ckd, *options)
    call_main(ckd, *options)
    assert outcome(tmp_path / "out")[2] == outcome(tmp_path / "whole")[2]


def test_patience_ends_a_stage(call_main, options, tmp_path, monkeypatch):
    """Dev scores that fall: the first that is two epochs or more after the best ends the stage."""
    falling = iter(range(100, 0, -1))
    monkeypatch.setattr(ckd, "spearman", lambda *_, **__: {"dev": float(next(falling))})
    (tmp_path / "sentences.txt").write_text("\n".join(demo_lines("sentences.txt", 32)))
    call_main(ckd, *options, "--max-steps", 0, "--epochs", 9, "--patience", 2, "--eval-steps", 5)
    assert max(step for _, step in dev_scores(tmp_path / "out")) == 5


DATA = "--train sentences.txt --dev dev.tsv --epochs 2 --batch-size 32 --eval-steps 4 --lr 1e-3"
STAGE_2 = "--triplets triplets.csv --finetune-epochs 1 --finetune-batch-size 32"
TRAINED = [  # script, its options, dimension of the student; the teacher is "mean" unless given
    ("ckd", "--student-layers 0,2 --objective kd", 32),
    ("ckd", "--teacher wide --student mean --learn-temperature --group-by-length", 32),
    ("ckd", "--teacher wide --student pooler --student-layers 1", 32),
    ("ckd", "--teacher roberta --student roberta --pooling lasttoken", 32),
    ("ckd", f"{STAGE_2} --student-layers 0,2 --queue-size 0 --precision bf16", 32),
    ("congen", "--teacher wide --student bert --pairs pairs.tsv", 48),
    ("congen", "--teacher wide --student distilbert --alpha 1 --queue-size 50", 48),
    ("ibkd", f"{STAGE_2} --teacher wide --student bert --kernel imq --dim 16", 16),
    ("ibkd", f"{STAGE_2} --teacher wide --student-layers 1,3 --keep-mapping --dim 16", 16),
    ("ibkd", f"{STAGE_2} --student distilbert --batch-negatives --kernel linear", 32),
]


@pytest.mark.parametrize("name, more, dimension", TRAINED)
def test_a_run_leaves_the_best_student_for_everybody(
    call_main, models_folder, files, tmp_path, monkeypatch, name, more, dimension
):
    """dse.py's and distilface.py's students are in their own tests."""
    if "--alpha 1" in more:  # no second view is computed, as it would have no weight
        monkeypatch.setattr(congen, "second_views", None)
    paths = {path.name: path for path in (*models_folder.iterdir(), *files.iterdir())}
    words = [paths.get(word, word) for word in f"--teacher mean {DATA} {more}".split()]
    out, script = tmp_path / "out", importlib.import_module(name)
    printed = call_main(script, *words, "--output", out)
    scores = dev_scores(out)
    expected = [("distill", step) for step in range(0, 9 if "--pairs" in more else 21, 4)]
    if STAGE_2 in more:
        expected += [("finetune", 0), ("finetune", 4)]
    assert list(scores) == expected
    assert all(math.isfinite(loss) for loss in losses(out).values())
    best = max(score for (stage, _), score in scores.items() if stage == expected[-1][0])
    vectors = check_student(script, out, files / "dev.tsv", best, printed)
    assert vectors.shape[1] == dimension


# Excerpts of the logs of docs/engineering.md: dev scores; losses; sizes of the bank. The last two
# are made up.
FAILED = [
    ("distill", [78.33, 13.05, 12.99, 11.22, 6.36], [404, 403, 437, 405, 402, 413], [0] * 6,
     "the loss did not fall: try a smaller"),
    ("distill", [78.33, -1.11, 2.61, 1.71, -0.95], [7.805, 8.316, 8.576, 7.195, 8.055, 8.604],
     [1536, 3136, 4680, 1280, 2880, 4424], "the loss did not fall: try a smaller"),
    ("distill", [78.33, 44.29, 34.64, 58.98, 63.10, 64.24, 64.02],
     [127, 124, 125, 122, 115, 111, 107, 107, 110], [0] * 9, "extras.align"),
    ("distill", [86.72, 85.31, 84.85, 84.76], [137, 111, 88, 97, 92, 131, 83, 109, 98, 81, 104, 76],
     [0] * 12, "up to 2.0 points: try a smaller"),
    ("distill", [86.72, 85.49, 85.32, 85.16],
     [138, 117, 96, 105, 106, 139, 100, 127, 118, 104, 124, 98], [0] * 12,
     "the loss did not fall: try a smaller"),
    ("finetune", [86.93, 86.51, 86.54, 86.29, 86.10, 86.14], [0.258, 0.260, 0.113, 0.188, 0.210],
     None, "dev hardly changed"),
    ("finetune", [86.93, 71.64, 66.95, 71.18, 72.94, 73.68], [1.763, 0.932, 0.472, 0.497, 0.883],
     None, "up to 20.0 points: try a smaller"),
    ("train", [78.33, 14.72, 24.30, 21.48], [3.160, 2.608, 2.371, 1.846, 1.978], None,
     "points: try a smaller"),
    ("distill", [78.33, 78.30], [], None, "too few steps"),
    ("distill", [78.33, 13.05], [7.805, 8.316], [1, 1], "the loss did not fall"),  # --queue-size 1
]  # fmt: skip


@pytest.mark.parametrize("stage, dev, losses, banks, expected", FAILED)
def test_a_failed_stage_says_what_its_log_shows(stage, dev, losses, banks, expected):
    lines = [dict(stage="another", dev=99.0, loss=0.0), *(dict(stage=stage, dev=x) for x in dev)]
    for number, loss in enumerate(losses):
        bank = {} if banks is None else dict(bank=banks[number])
        lines.append(dict(stage=stage, loss=loss, **bank))
    assert expected in common.reason_for_failure(stage, [json.dumps(line) for line in lines])


def test_a_learning_rate_that_is_too_high(call_main, monkeypatch, tmp_path):
    """A real run, whose starting model is kept."""
    said = []
    monkeypatch.setattr(common, "note", said.append)
    options = ["--demo", "--stage", "distill", "--lr", 0.1, "--max-steps", 75]
    call_main(ckd, *options, "--output", tmp_path / "run")
    assert "step 0 of 75" in (tmp_path / "run" / "README.md").read_text("utf-8")
    (line,) = [line for line in said if "no step improved" in line]
    assert line.startswith("distill: ") and line.endswith("fall: try a smaller learning rate")
