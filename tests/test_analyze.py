"""analyze.py: its numbers against plain loops, its figures as files, its table."""
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import analyze
import common

pytest.importorskip("matplotlib")


def unit(n, d, seed):
    vectors = np.random.default_rng(seed).normal(size=(n, d))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("squared", [True, False])
def test_alignment_and_uniformity_are_those_of_the_papers(squared):
    first, second, power = unit(7, 4, 0), unit(7, 4, 1), 2 if squared else 1

    def distance(a, b):
        return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b))) ** power
    expected = sum(distance(a, b) for a, b in zip(first.tolist(), second.tolist())) / 7
    assert analyze.alignment(first, second, squared) == pytest.approx(expected, abs=1e-10)
    pairs = [(a, b) for i, a in enumerate(first.tolist()) for b in first.tolist()[i + 1:]]
    expected = math.log(sum(math.exp(-2 * distance(a, b)) for a, b in pairs) / len(pairs))
    assert analyze.uniformity(first, squared) == pytest.approx(expected, abs=1e-7)
    assert analyze.alignment(first, first, squared) == 0 and analyze.uniformity(np.repeat(first[:1], 5, 0), squared) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("first, second, expected", [("", "", 0), ("a b c", "a b c", 0), ("a b c", "", 3), ("a b c", "a x c", 1),
                                                     ("a b c d", "b c d", 1), ("the cat sat on the mat", "a cat sat there", 4)])
def test_edit_distance_counts_words(first, second, expected):
    assert analyze.edit_distance(first.split(), second.split()) == analyze.edit_distance(second.split(), first.split()) == expected


def cosines(folder, pairs):
    """In sentence-transformers' own way."""
    from sentence_transformers import SentenceTransformer
    model = SentenceTransformer(folder, device="cpu")
    first, second = (model.encode(list(side), normalize_embeddings=True).astype(float) for side in (pairs.first, pairs.second))
    return (first * second).sum(1)


@pytest.mark.parametrize("figure", ["space", "cosine", "edits", "covariance", "speed"])
def test_a_figure_and_its_numbers(figure, models_folder, files, run, tmp_path):
    data = ["--sentences", files / "sentences.txt"] if figure == "covariance" else ["--pairs", files / "dev.tsv"]
    models = [models_folder / "bert", models_folder / "mean"]
    done = run("analyze.py", figure, *models, *data, "--output", tmp_path / "new" / "a.b")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "new/a.b.png").read_bytes()[:4] == b"\x89PNG" and "<svg" in (tmp_path / "new/a.b.svg").read_text()
    numbers, pairs = json.loads((tmp_path / "new/a.b.json").read_text()), common.read_graded_pairs(files / "dev.tsv")
    assert list(numbers) == [*["gold score"] * (figure == "edits"), "bert", "mean"]
    if figure in ("cosine", "speed"):
        expected = 100 * spearmanr(cosines(str(models[1]), pairs), pairs.scores).statistic
        assert numbers["mean"]["Spearman x 100" if figure == "cosine" else "average"] == pytest.approx(expected, abs=0.01)
    if figure == "edits":
        distance = [analyze.edit_distance(a.lower().split(), b.lower().split()) for a, b in zip(pairs.first, pairs.second)]
        assert numbers["gold score"]["Spearman x 100"] == pytest.approx(100 * spearmanr(distance, pairs.scores).statistic)
        assert numbers["mean"]["Spearman x 100"] == pytest.approx(100 * spearmanr(distance, cosines(str(models[1]), pairs)).statistic, abs=0.01)
    if figure == "covariance":
        assert numbers["mean"]["dimensions"] == 32 and 0 < numbers["mean"]["mean |correlation|"] < numbers["mean"]["largest"] <= 1
    if figure == "space":
        positive = [1 - c for c, score in zip(cosines(str(models[1]), pairs), pairs.scores) if score > 4]
        assert numbers["mean"]["squared distances (IBKD)"]["alignment"] == pytest.approx(2 * np.mean(positive), abs=1e-5)


def test_covariance_is_nothing_for_independent_dimensions_and_all_for_copies(monkeypatch):
    import matplotlib.pyplot as plt
    vectors = np.random.default_rng(0).normal(size=(5000, 4))
    monkeypatch.setattr(analyze, "unit_vectors", lambda encoder, sentences: encoder)
    numbers, _ = analyze.covariance({"independent": vectors, "copies": vectors[:, [0, 0, 0]] * [1, 5, -2]}, range(5000), plt)
    assert numbers["independent"]["largest"] < 0.06 and numbers["copies"]["mean |correlation|"] == pytest.approx(1)


PAIRS = common.GradedPairs(("a b c d e f", "A B", "a b c d e"), ("u v w x y", "a c", "v w x y z"), (5.0, 4.5, 1.0))  # 6, 1 and 5 edits


def test_what_the_points_are(monkeypatch):
    import matplotlib.pyplot as plt
    vectors = {text: row for text, row in zip(PAIRS.first + PAIRS.second, unit(6, 4, 0))}
    monkeypatch.setattr(analyze, "unit_vectors", lambda encoder, sentences: np.array([vectors[sentence] for sentence in sentences]))
    cosine = [float(vectors[a] @ vectors[b]) for a, b in zip(*PAIRS[:2])]
    numbers, figure = analyze.space({"one": None}, PAIRS, plt)
    for axes, values in zip(figure.axes, numbers["one"].values()):
        assert axes.collections[0].get_offsets().tolist() == [[values["uniformity"], values["alignment"]]]
        assert axes.get_xlabel().startswith("uniformity") and axes.get_ylabel().startswith("alignment")
    _, figure = analyze.edits({"one": None}, PAIRS, plt)
    far, near = (points.get_offsets().tolist() for points in figure.axes[1].collections)
    assert far == [[pytest.approx(cosine[0]), 6]] and near == [[pytest.approx(cosine[1]), 1], [pytest.approx(cosine[2]), 5]]
    _, figure = analyze.cosine({"one": None}, PAIRS, plt)
    assert figure.axes[0].collections[0].get_offsets().tolist() == [[score, pytest.approx(c)] for score, c in zip(PAIRS.scores, cosine)]


def test_speed_is_drawn_with_the_average_of_the_sets(models_folder):
    import matplotlib.pyplot as plt
    more = common.GradedPairs(PAIRS.second, PAIRS.first[::-1], PAIRS.scores)
    encoder = common.load_encoder(models_folder / "bert").eval()
    numbers, figure = analyze.speed({"one": encoder}, {"x": PAIRS, "y": more}, plt)
    expected = np.mean([list(common.spearman(encoder, {"z": pairs}).values())[0] for pairs in (PAIRS, more)])
    assert numbers["one"]["average"] == pytest.approx(expected)
    assert figure.axes[0].collections[0].get_offsets().tolist() == [[numbers["one"]["sentences/s"], numbers["one"]["average"]]]


@pytest.mark.parametrize("figure", ["space", "cosine", "edits", "speed", "covariance"])
def test_what_is_read_for_a_figure_and_how_models_are_called(monkeypatch, figure, models_folder, tmp_path):
    import matplotlib.pyplot as plt
    seen, splits = [], []
    (tmp_path / "bert").symlink_to(models_folder / "bert")
    monkeypatch.setattr(analyze, figure, lambda encoders, data, plt: seen.extend([list(encoders), data]) or ({}, plt.figure()))
    monkeypatch.setattr(common, "resolve", lambda name, model=False: name)
    monkeypatch.setattr(common, "read_sts", lambda folder, split: splits.append(split) or {split: PAIRS})
    monkeypatch.setattr(common, "read_sentences", lambda name: ["a"] * 10_001)
    models = [str(models_folder / "bert"), str(tmp_path / "bert"), str(models_folder / "mean")]
    options = ["--sentences", "many.txt"] if figure == "covariance" else []
    monkeypatch.setattr(common, "load_encoder", lambda name: torch.nn.Identity())
    monkeypatch.setattr("sys.argv", ["analyze.py", figure, *models, *options, "--output", str(tmp_path / "figure")])
    analyze.main()
    plt.close("all")
    assert seen[0] == [models[0], models[1], "mean"]  # two have the same last name
    assert splits == ([] if figure == "covariance" else ["test" if figure == "speed" else "dev"])
    assert seen[1] == (["a"] * 10_000 if figure == "covariance" else {"test": PAIRS} if figure == "speed" else PAIRS)


def test_a_curve_goes_on_where_a_stage_ends(run, tmp_path):
    for name, stages in (("one", ["distill", "finetune"]), ("two", [None])):
        (tmp_path / name).mkdir()
        lines = [{"stage": stage, "step": step} | ({"dev": 50 + step} if step % 2 == 0 else {}) for stage in stages for step in (1, 2, 3, 4)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps({k: v for k, v in line.items() if v}) + "\n" for line in lines))
    done = run("analyze.py", "curve", tmp_path / "one", tmp_path / "two", "--output", tmp_path / "curve")
    assert done.returncode == 0, done.stderr
    numbers = json.loads((tmp_path / "curve.json").read_text())
    assert numbers == {"one": {"step": [2, 4, 6, 8], "dev": [52, 54, 52, 54]}, "two": {"step": [2, 4], "dev": [52, 54]}}


def test_neighbours_are_the_nearest_without_the_query_itself(models_folder, files, run, tmp_path):
    sentences, mean = common.read_sentences(files / "sentences.txt"), models_folder / "mean"
    query = sentences[5]
    done = run("analyze.py", "neighbours", mean, "--sentences", files / "sentences.txt", "--query", query, "--output", tmp_path / "n")
    assert done.returncode == 0 and f"\n{query}\n" in done.stdout and not (tmp_path / "n.png").exists(), done.stderr
    table = json.loads((tmp_path / "n.json").read_text())[query]
    others = [sentence for sentence in dict.fromkeys(sentences) if sentence != query]
    ranked = sorted(zip(cosines(str(mean), common.GradedPairs([query] * len(others), others, [0] * len(others))), others), reverse=True)
    assert [table[rank]["mean"] for rank in ("1", "5", "10")] == [ranked[i][1] for i in (0, 4, 9)]


def test_bad_input_is_one_line(models_folder, files, fails, tmp_path):
    bert, pairs = models_folder / "bert", ["--pairs", files / "dev.tsv"]
    assert "--query: expected with neighbours" in fails(analyze, "neighbours", bert)
    assert "--query: expected with neighbours" in fails(analyze, "cosine", bert, *pairs, "--query", "a")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n')
    assert "no dev score in it" in fails(analyze, "curve", tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n[]\n')
    assert "metrics.jsonl:2: '[]', expected JSON with a step" in fails(analyze, "curve", tmp_path)
    (tmp_path / "few.txt").write_text("A dog.\nA cat.\n")
    few = ["--sentences", tmp_path / "few.txt", "--query", "A dog."]
    assert "2 different sentences, expected more than 10" in fails(analyze, "neighbours", bert, *few)
    (tmp_path / "low.tsv").write_text("A dog.\tA cat.\t1\nA dog.\tA bird.\t2\n")
    assert "no pair with a score above 4" in fails(analyze, "space", bert, "--pairs", tmp_path / "low.tsv")
    assert "expected a path that can be written" in fails(analyze, "cosine", bert, *pairs, "--output", tmp_path / "low.tsv" / "x")


def test_matplotlib_is_asked_for_by_name_and_only_for_figures(models_folder, files, tmp_path):
    def without(*options):
        code = "import sys; sys.modules['matplotlib'] = None; sys.path.insert(0, '.'); import analyze, common; common.run_main(analyze.main)"
        return subprocess.run([sys.executable, "-c", code, *map(str, options)], capture_output=True, text=True, cwd=analyze.__file__[:-10])
    done = without("cosine", models_folder / "bert", "--pairs", files / "dev.tsv")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "error: this figure needs matplotlib, which is not installed: pip install matplotlib"
    done = without("neighbours", models_folder / "bert", "--sentences", files / "sentences.txt", "--query", "A dog.", "--output", tmp_path / "n")
    assert done.returncode == 0 and (tmp_path / "n.json").exists(), done.stderr
