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

PAIRS = [("a b c d e f", "u v w x y", 5.0), ("A B", "a c", 4.5), ("a b c d e", "v w x y z", 1.0)]


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


def test_edit_distance_counts_words():
    cases = [("", "", 0), ("a b c", "", 3), ("a b c d", "b c d", 1)]
    for first, second, expected in (*cases, ("the cat sat on the mat", "a cat sat there", 4)):
        assert analyze.edit_distance(first.split(), second.split()) == expected
        assert analyze.edit_distance(second.split(), first.split()) == expected


@pytest.fixture
def vectors(monkeypatch):
    """{sentence of PAIRS: vector}, which is what every model returns."""
    texts = [text for pair in PAIRS for text in pair[:2]]
    vectors = dict(zip(texts, random_unit_vectors(6, seed=0)))

    def unit_vectors(model, sentences):
        return np.array([vectors[sentence] for sentence in sentences])

    monkeypatch.setattr(analyze, "unit_vectors", unit_vectors)
    return vectors


def test_space_has_positives_above_4_and_each_sentence_once(vectors):
    again = [*PAIRS, ("A B", "a c", 1.0)]  # no new sentence, and no positive
    numbers, figure = analyze.space(["one"], again, plt)
    distances = [math.dist(vectors[a], vectors[b]) for a, b, _ in PAIRS[:2]]
    uniformity = analyze.uniformity(np.array(list(vectors.values())), 2)
    found = numbers["one"]["squared distances (IBKD)"]
    assert found["alignment"] == pytest.approx(sum(d**2 for d in distances) / 2)
    assert found["uniformity"] == pytest.approx(uniformity)
    [line] = figure.axes[0].lines
    assert line.get_xydata().tolist() == [[found["uniformity"], found["alignment"]]]
    found = numbers["one"]["distances (DistilCSE)"]
    assert found["alignment"] == pytest.approx(sum(distances) / 2)


def test_the_points_of_cosine_and_edits(vectors):
    cosines = [pytest.approx(float(vectors[a] @ vectors[b])) for a, b, _ in PAIRS]
    _, figure = analyze.cosine(["one"], PAIRS, plt)
    [points] = figure.axes[0].collections
    assert points.get_offsets().tolist() == list(map(list, zip((5, 4.5, 1), cosines)))
    numbers, figure = analyze.edits(["one"], PAIRS, plt)
    [points] = figure.axes[1].collections
    assert points.get_offsets().tolist() == list(map(list, zip(cosines, (6, 1, 5))))
    far, *near = points.get_facecolors().tolist()
    assert near[0] == near[1] != far
    assert numbers["gold score"] == pytest.approx(50)  # of the ranks 3 2 1 and 3 1 2


def test_covariance_is_nothing_for_independent_dimensions_and_all_for_copies(monkeypatch):
    independent = np.random.default_rng(0).normal(size=(12_000, 4))
    spaces = {"independent": independent, "copies": independent[:, [0, 0, 0]] * [1, 5, -2]}
    monkeypatch.setattr(analyze, "unit_vectors", lambda model, rows: spaces[model][rows])
    numbers, _ = analyze.covariance(spaces, (range(12_000), []), plt)
    assert numbers["independent"]["largest"] < 0.06
    assert numbers["copies"]["mean |correlation|"] == pytest.approx(1)


def write_run(folder, scores, **options):
    """A run with these dev scores, [(stage, step, dev)]."""
    folder.mkdir(parents=True)
    options = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    (folder / "args.json").write_text(json.dumps(options))
    lines = [json.dumps(dict(stage=s, step=n, dev=dev)) for s, n, dev in scores]
    lines.insert(1, json.dumps(dict(stage=scores[0][0], step=1, loss=0.5)))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_data_averages_runs_of_the_same_number(tmp_path):
    for size, queue, step, dev in ((64, 0, 200, 81.5), (64, 8, 50, 78), (32, 8, 100, 80)):
        scores = [("distill", 0, 50), ("distill", step // 2, dev), ("distill", step, dev - 1)]
        write_run(tmp_path / f"{dev}", scores, batch_size=size, queue_size=queue)
    numbers, figure = analyze.data([tmp_path], "sentences", plt)
    assert numbers == {tmp_path: {3200: [78, 80], 12800: [81.5]}}
    line, _, _ = figure.axes[0].containers[0].lines
    assert line.get_xydata().tolist() == [[3200, 79], [12800, 81.5]]
    numbers, _ = analyze.data([tmp_path], "queue-size", plt)
    assert numbers == {tmp_path: {0: [81.5], 8: [78, 80]}}
    write_run(tmp_path / "c", [("distill", 5, 1), ("finetune", 5, 2)], batch_size=2)
    with pytest.raises(common.UserError, match="only one stage"):
        analyze.best_scores(tmp_path, "sentences")


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


def test_neighbours_are_the_nearest_without_the_query(models_folder, files, call_main, tmp_path):
    model = str(models_folder / "mean")
    sentences = list(dict.fromkeys(common.read_sentences(files / "sentences.txt")))
    query = sentences.pop(5)
    options = ("--sentences", files / "sentences.txt", "--query", query)
    call_main(analyze, "neighbours", model, *options, "--output", tmp_path / "out")
    order = np.argsort(-cosines(model, [query] * len(sentences), sentences))
    expected = {str(rank): sentences[order[rank - 1]] for rank in (1, 5, 10)}
    assert json.loads((tmp_path / "out.json").read_text()) == {query: {model: expected}}
    assert not (tmp_path / "out.png").exists()
