"""docs/teaching.md: ckd.py still has the line that an exercise changes, and its losses change."""

import importlib.util
import math
import sys

import pytest
from conftest import ROOT, demo_sentences, losses

import common

sys.path.insert(0, str(ROOT / "docs"))
import lesson

# Of each exercise, the first step whose loss is not the unchanged script's; an epoch has four.
FIRST_STEPS = (2, 1, 5, 1, 1, 3, 1, 2)  # the first step has learning rate 0


@pytest.fixture
def losses_of(call_main, models_folder, files, tmp_path, monkeypatch):
    """losses_of("No bank") -> the losses of two epochs of four steps with the changed script."""
    monkeypatch.setattr(common, "LOG_STEPS", 1)
    (tmp_path / "train.txt").write_text("\n".join(demo_sentences(32)) + "\n", "utf-8")

    def run(title):
        script = tmp_path / f"{title}.py"
        script.write_text(lesson.changed_script(title), "utf-8")
        spec = importlib.util.spec_from_file_location("exercise", script)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "exercise", module)  # whose options are read as text
        spec.loader.exec_module(module)
        options = ["--teacher", models_folder / "mean", "--student-layers", "0,2"]
        options += ["--train", tmp_path / "train.txt", "--dev", files / "dev.tsv"]
        options += ["--output", tmp_path / title, "--group-by-length", "--lr", 1e-3]
        call_main(module, *options, "--epochs", 2, "--batch-size", 8, "--eval-steps", 8)
        return [loss for _, loss in sorted(losses(tmp_path / title).items())]

    return run


def test_an_exercise_changes_the_loss_from_the_step_on_at_which_it_should(losses_of):
    """It fails if ckd.py no longer has the line that the page changes."""
    unchanged, *titles = lesson.EXERCISES
    unchanged = losses_of(unchanged)
    assert len(unchanged) == 8
    for title, step in zip(titles, FIRST_STEPS, strict=True):
        found = losses_of(title)
        assert found[: step - 1] == unchanged[: step - 1], title
        assert abs(found[step - 1] - unchanged[step - 1]) > 1e-5, title
        if title == "Enqueue before the loss":  # each key is there twice
            assert found[0] - unchanged[0] == pytest.approx(math.log(2), abs=1e-5)


def test_results_are_those_of_the_data():
    page = lesson.PAGE.read_text("utf-8")
    assert lesson.filled(page) == page
