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


def write_run(folder, stage, dev, **options):
    """What a run leaves of which analyze.best_scores() reads."""
    folder.mkdir(parents=True)
    lines = [dict(stage=stage, step=step, dev=score) for step, score in dev.items()]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (folder / "args.json").write_text(json.dumps(options))
    (folder / "README.md").write_text("the card of a finished run")


def test_best_scores_are_those_of_finished_runs_by_an_option_or_by_sentences(tmp_path):
    options = {"--batch-size": 32, "--lr": 1e-4}
    write_run(tmp_path / "a", "distill", {0: 50.0, 10: 70.0, 20: 60.0}, **options)
    write_run(tmp_path / "b", "distill", {0: 50.0, 10: 65.0}, **options)
    write_run(tmp_path / "broken", "distill", {0: 99.0}, **options)
    (tmp_path / "broken" / "README.md").unlink()
    assert analyze.best_scores(tmp_path, "lr") == {1e-4: [70.0, 65.0]}
    assert analyze.best_scores(tmp_path, "sentences") == {320: [65.0], 640: [70.0]}


@pytest.mark.parametrize("stage, has_first", [("finetune", False), ("distill", True)])
def test_sentences_are_not_counted_if_there_are_two_stages(stage, has_first, tmp_path):
    """Their batches differ in size."""
    write_run(tmp_path / "run", stage, {10: 70.0}, **{"--batch-size": 32})
    if has_first:
        (tmp_path / "run" / "teacher").mkdir()
    with pytest.raises(common.UserError, match="only one stage"):
        analyze.best_scores(tmp_path, "sentences")
