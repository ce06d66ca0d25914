"""eval_sts.py: the scores of the real data, a user's own files, translations."""

import json
import tracemalloc

import numpy as np
import pytest
from conftest import DEMO, cosine, demo_lines, demo_sentences
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


def test_translation_accuracy_is_that_of_plain_loops(scores_of, models_folder, tmp_path):
    pairs = [(text, " ".join(text.split()[2:])) for text in demo_sentences(60)]
    pairs += [("a boy", "a girl"), ("a lad", "a girl")]  # either "a girl" is right
    (tmp_path / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    texts = list(zip(*pairs))
    encoder = common.load_encoder(models_folder / "mean")
    sides = [common.encode(eval_sts.embed, encoder, side).tolist() for side in texts]
    expected = []
    for query, answer in ((0, 1), (1, 0)):
        right = 0
        for vector, own in zip(sides[query], texts[answer]):
            cosines = [cosine(vector, other) for other in sides[answer]]
            right += texts[answer][cosines.index(max(cosines))] == own
        assert 0 < right < len(pairs)
        expected.append(pytest.approx(100 * right / len(pairs)))
    assert scores_of(models_folder / "mean", "--translations", tmp_path / "pairs.tsv") == expected


def test_agreement_is_that_of_plain_loops(scores_of, models_folder, tmp_path):
    texts = demo_sentences(40)
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    pairs, shared = [], 0
    vectors = []
    for name in ("wide", "mean"):
        encoder = common.load_encoder(models_folder / name)
        vectors.append(common.encode(eval_sts.embed, encoder, texts).tolist())
    for i in range(len(texts)):
        others = [j for j in range(len(texts)) if j != i]
        scores = [{j: cosine(of[i], of[j]) for j in others} for of in vectors]
        pairs += [[of[j] for of in scores] for j in others if j > i]
        nearest = [sorted(others, key=of.get)[-10:] for of in scores]
        shared += len(set(nearest[0]) & set(nearest[1]))
    correlation = spearmanr(*zip(*pairs)).statistic
    assert 40 < shared < 380  # of 400: neither none nor all
    expected = [pytest.approx(100 * correlation, abs=1e-2), pytest.approx(shared / 4)]
    models = models_folder / "wide", models_folder / "mean"
    assert scores_of(*models, "--agreement", tmp_path / "texts.txt") == expected


def test_one_long_text_among_translations_takes_its_own_memory_only(monkeypatch):
    """Of 300 texts in an array of fixed width, each would take as much as the longest."""
    pairs = [(f"text {i}", f"Text {i}") for i in range(299)] + [("long " * 20_000, "Lang")]
    monkeypatch.setattr(eval_sts, "encode", lambda embed, encoder, texts: np.eye(len(texts)))
    tracemalloc.start()
    assert eval_sts.translation_accuracy(None, None, pairs) == {"1 -> 2": 100, "2 -> 1": 100}
    assert tracemalloc.get_traced_memory()[1] < 20e6  # fixed width: 120e6
    tracemalloc.stop()
