"""Our losses are the authors', step by step, once the departures of docs/authors.md are undone.

Theirs are recorded in tests/authors/: `python -m extras.authors NAME --checkout FOLDER --record`.
"""

import importlib
import json

import pytest
from conftest import ON_GPU, ROOT

import ckd
from extras.authors import harness
from extras.authors.__main__ import MODULES

pytestmark = pytest.mark.skipif(ON_GPU, reason="the recorded losses are a CPU's")
RECORDED = {path.stem: json.loads(path.read_text()) for path in ROOT.glob("tests/authors/*.json")}
TOLERANCE = 1e-5  # relative, of a loss


def run(name, folder, left_in=()):
    """Our script with all departures undone, but those left in -> our outcome."""
    program = importlib.import_module(f"extras.authors.{MODULES[name]}").PROGRAMS[name]
    assert set(left_in) <= set(program.departures)
    program.prepare(folder)
    return program.ours(folder, set(program.departures) - set(left_in))


def largest_difference(name, outcome):
    """The largest relative difference of a loss from the authors'."""
    assert len(outcome["losses"]) == len(RECORDED[name]["losses"]) >= 40
    return harness.loss_difference(outcome, RECORDED[name])[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RECORDED))
def test_losses_are_the_authors_in_every_step(name, tmp_path):
    outcome = run(name, tmp_path)
    assert largest_difference(name, outcome) <= TOLERANCE
    # A score counts ranks, and rounding exchanges pairs of almost equal cosines.
    assert outcome["dev"] == pytest.approx(RECORDED[name]["dev"], abs=0.1)


LEFT_IN = [("ckd", "bank"), ("nli", "header"), ("congen", "keys in a step")]
LEFT_IN += [("congen", "sentences that occur twice"), ("dse-mnli", "odd number of batches")]


@pytest.mark.slow
@pytest.mark.parametrize("name, departure", LEFT_IN)
def test_a_departure_left_in_is_found(name, departure, tmp_path):
    outcome = run(name, tmp_path, left_in=[departure])
    assert largest_difference(name, outcome) > 10 * TOLERANCE


@pytest.mark.slow
def test_a_loss_changed_by_one_per_cent_is_found(tmp_path, monkeypatch):
    loss = ckd.supervised_contrastive_loss
    monkeypatch.setattr(ckd, "supervised_contrastive_loss", lambda *rows: 1.01 * loss(*rows))
    assert largest_difference("nli", run("nli", tmp_path)) == pytest.approx(0.01, rel=0.1)


def test_lists_of_different_lengths_are_not_compared():
    with pytest.raises(ValueError, match="zip"):
        harness.loss_difference(dict(losses=[1.0, 2.0]), dict(losses=[1.0]))
