"""eval_sts.py: the scores of the real data, a user's own files."""

import json

import pytest
from conftest import DEMO, cosine, demo_lines
from scipy.stats import spearmanr

import common
import eval_sts


@pytest.fixture
def scores_of(call_main, tmp_path):
    """scores_of(model, "--option", ...) -> the list of its scores, the last of which is printed."""

    def call(*options):
        printed = call_main(eval_sts, *options, "--json", tmp_path / "scores.json")
        (scores,) = json.loads((tmp_path / "scores.json").read_text()).values()
        scores = list(scores.values())
        assert printed.rstrip(" |\n").endswith(f" {scores[-1]:.2f}")
        return scores

    return call


def test_scores_of_senteval_are_those_measured_with_independent_code(scores_of, shared_data):
    data = ("--senteval", shared_data / "senteval", "--sets", "STS-B,STS13")
    scores = scores_of(common.MINILM, "--student-layers", "1,3,5", *data)
    assert scores == pytest.approx([69.76, 69.46, (69.76 + 69.46) / 2], abs=0.0101)


def test_own_pairs(scores_of, models_folder, files):
    rows = [line.split("\t") for line in demo_lines("dev.tsv", 60)]
    encoder = common.load_encoder(models_folder / "cls")
    *texts, gold = zip(*rows)
    sides = [common.encode(eval_sts.embed, encoder, side).tolist() for side in texts]
    expected = 100 * spearmanr([cosine(a, b) for a, b in zip(*sides)], list(map(float, gold)))[0]
    pairs = ("--pairs", files / "dev.tsv", "--pairs", DEMO / "test.tsv")
    first, second, average = scores_of(models_folder / "cls", *pairs)
    assert first == pytest.approx(expected, abs=1e-3)
    assert average == pytest.approx((first + second) / 2)
