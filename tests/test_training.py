"""Small runs of every script: they leave the best student, and can be interrupted."""

import importlib
import math

import pytest
from conftest import check_student, dev_scores, losses
from processes import small_options

import common
import congen

DATA = "--train sentences.txt --dev dev.tsv --epochs 2 --batch-size 32 --eval-steps 4 --lr 1e-3"
STAGE_2 = "--triplets triplets.csv --finetune-epochs 1 --finetune-batch-size 32"
TRAINED = [  # script, its options, dimension of the student; the teacher is "mean" unless given
    ("ckd", "--student-layers 0,2", 32),
    ("ckd", "--student-layers 0,2 --objective kd", 32),
    ("ckd", "--student-layers 0,2 --objective kd --teacher wide --student bert", 32),
    ("ckd", "--teacher wide --student mean --learn-temperature", 32),
    ("ckd", "--teacher wide --student pooler --student-layers 1", 32),
    ("ckd", "--teacher cls --student distilbert --queue-size 0", 32),
    ("ckd", "--teacher roberta --student roberta --pooling lasttoken", 32),
    ("ckd", f"{STAGE_2} --student-layers 0,2", 32),
    ("congen", "--student-layers 0,2", 32),
    ("congen", "--teacher wide --student bert --pairs pairs.tsv", 48),
    ("congen", "--teacher cls --student roberta --head identity --alpha 0", 32),
    ("congen", "--teacher wide --student distilbert --alpha 1 --queue-size 50", 48),
    ("ibkd", f"{STAGE_2} --student-layers 0,2", 32),
    ("ibkd", f"{STAGE_2} --teacher wide --student bert --kernel imq --dim 16", 16),
    ("ibkd", f"{STAGE_2} --teacher wide --student-layers 1,3 --keep-mapping --dim 16", 16),
    ("ibkd", f"{STAGE_2} --student-layers 2 --keep-mapping", 32),
    ("ibkd", f"{STAGE_2} --teacher wide --student pooler --beta1 0 --beta2 0", 32),
    ("ibkd", f"{STAGE_2} --student distilbert --batch-negatives --kernel linear", 32),
]


MARKS = {"ckd": ()}  # the others are slow


@pytest.mark.parametrize(
    "name, more, dimension",
    [pytest.param(*row, marks=MARKS.get(row[0], pytest.mark.slow)) for row in TRAINED],
)
def test_a_run_leaves_the_best_student_for_everybody(
    call_main, models_folder, files, tmp_path, monkeypatch, name, more, dimension
):
    if "--alpha 1" in more:  # no second view is computed, as it would have no weight
        monkeypatch.setattr(congen.Views, "second_of", None)
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


RESUMED = [  # script, options, the stage and step where it stops
    ("ckd", "--learn-temperature --queue-size 64", "distill", 3),
    ("ckd", "--learn-temperature --queue-size 64", "finetune", 3),
    ("congen", "", "distill", 6),
    ("ibkd", "", "distill", 20),  # the end of stage 1
    ("ibkd", "--dim 32", "distill", 20),
    ("ibkd", "", "finetune", 3),  # whose best student ends in W_proj already
    ("ibkd", "--dim 32", "finetune", 3),
    ("dse", "", "teacher", 3),
    ("dse", "", "student", 3),
    ("extras.baselines", "--method pkd", "distill", 3),
    ("extras.baselines", "--method skd", "distill", 3),
    ("extras.baselines", "--method hpd", "distill", 3),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, more, stage, step", RESUMED)
def test_a_resumed_run_is_the_same_run(check_resume, models_folder, files, name, more, stage, step):
    """Also with what no student's folder has: projection, temperature, queue, moments, dropout."""
    script = importlib.import_module(name)
    words = small_options(name, models_folder, files, "")
    check_resume(script, stage, step, *words, *more.split())


def test_a_loss_that_becomes_nan_stops_the_run_and_keeps_the_best_student(
    fails, models_folder, files, tmp_path
):
    script = importlib.import_module("ckd")
    line = fails(script, *small_options("ckd", models_folder, files, tmp_path), "--lr", 1e8)
    assert f"{tmp_path}: the embedding of" in line and "--lr" in line
    assert common.load_encoder(tmp_path).dimension == 32
