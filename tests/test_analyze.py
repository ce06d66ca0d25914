"""extras/analyze.py: its numbers against plain loops, what its figures show, its files."""

import json
import math

import numpy as np
import pytest
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer

import common
from extras import analyze

plt = pytest.importorskip("matplotlib.pyplot")
plt.switch_backend("agg")


def random_unit_vectors(n, seed):
    vectors = np.random.default_rng(seed).normal(size=(n, 4))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def cosines(folder, first, second):
    """As sentence-transformers computes them."""
    model = SentenceTransformer(str(folder), device="cpu")
    vectors = model.encode([*first, *second], normalize_embeddings=True).astype(float)
    return (vectors[: len(first)] * vectors[len(first) :]).sum(1)


@pytest.mark.parametrize("power", [1, 2])
def test_alignment_and_uniformity_are_those_of_the_papers(power):
    """Eq. 8 of DistilCSE, eq. 12 and 13 of IBKD, in plain loops."""
    first, second = random_unit_vectors(7, seed=0), random_unit_vectors(7, seed=1)
    expected = sum(math.dist(a, b) ** power for a, b in zip(first, second)) / 7
    assert analyze.alignment(first, second, power) == pytest.approx(expected, abs=1e-10)
    distances = [math.dist(first[i], first[j]) for i in range(7) for j in range(i)]
    terms = [math.exp(-2 * value**power) for value in distances]
    expected = math.log(sum(terms) / len(terms))
    assert analyze.uniformity(first, power) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("figure", ["space", "covariance", "cosine", "edits"])
def test_a_figure_and_its_numbers(figure, models_folder, files, call_main, tmp_path):
    models = [str(models_folder / "bert"), str(models_folder / "mean")]
    data = ("--dev", files / "dev.tsv", "--sentences", files / "sentences.txt")
    call_main(analyze, figure, *models, *data, "--output", tmp_path / "out")
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (tmp_path / "out.svg").read_text()
    numbers = json.loads((tmp_path / "out.json").read_text())
    assert list(numbers)[-2:] == models
    found = numbers[models[1]]
    first, second, gold = zip(*common.read_scored_pairs(files / "dev.tsv"))
    similarity = cosines(models[1], first, second)
    if figure == "space":
        expected = np.mean([2 - 2 * c for c, score in zip(similarity, gold) if score > 4])
        found = found["squared distances (IBKD)"]["alignment"]
        assert found == pytest.approx(expected, abs=1e-5)
    if figure == "cosine":
        assert found == pytest.approx(100 * spearmanr(similarity, gold).statistic)
