"""extras/compare.py: the accuracy of translations against plain loops."""

import json
import tracemalloc

import numpy as np
import pytest
from conftest import cosine, demo_sentences

import common
import eval_sts
from extras import compare


@pytest.fixture
def scores_of(call_main, tmp_path):
    """scores_of(model, "--option", ...) -> the list of its scores, the last of which is printed."""

    def call(*options):
        printed = call_main(compare, *options, "--json", tmp_path / "scores.json")
        (scores,) = json.loads((tmp_path / "scores.json").read_text()).values()
        scores = list(scores.values())
        assert printed.rstrip(" |\n").endswith(f" {scores[-1]:.2f}")
        return scores

    return call


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


def test_one_long_text_among_translations_takes_its_own_memory_only(monkeypatch):
    """Of 300 texts in an array of fixed width, each would take as much as the longest."""
    pairs = [(f"text {i}", f"Text {i}") for i in range(299)] + [("long " * 20_000, "Lang")]
    monkeypatch.setattr(compare, "encode", lambda embed, encoder, texts: np.eye(len(texts)))
    tracemalloc.start()
    assert compare.translation_accuracy(None, None, pairs) == {"1 -> 2": 100, "2 -> 1": 100}
    assert tracemalloc.get_traced_memory()[1] < 20e6  # fixed width: 120e6
    tracemalloc.stop()
