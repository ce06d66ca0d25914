"""extras/layers.py: each score is that of the student which --student-layers would cut."""

from itertools import combinations

import pytest
import transformers
from conftest import DEMO

import common
from eval_sts import embed
from extras import layers


def printed_scores(printed):
    rows = [line.split("|")[1:3] for line in printed.splitlines()[2:]]
    return {name.strip(): float(score) for name, score in rows}


@pytest.mark.slow
def test_all_cuts_of_a_real_model(call_main):
    options = ["--keep", 2, "--dev", DEMO / "dev.tsv", "--sample", 1000]
    found = printed_scores(call_main(layers, common.MINILM, *options))
    pairs = common.read_scored_pairs(DEMO / "dev.tsv")
    expected = {}
    for layer in range(5):
        encoder = common.load_encoder(common.MINILM, layers=f"{layer},5")
        expected[f"{layer},5"] = round(common.spearman(embed, encoder, pairs), 2)
    assert found == expected
    assert list(found.values()) == sorted(found.values(), reverse=True)


@pytest.mark.slow
def test_one_at_a_time(call_main, monkeypatch):
    """With few cuts allowed, three of six: first one of five is removed, then one of four."""
    scored = []
    score = layers.score_cuts

    def score_cuts(encoder, cuts, pairs):
        found = score(encoder, cuts, pairs)
        scored.append(found)
        return found

    monkeypatch.setattr(layers, "score_cuts", score_cuts)
    monkeypatch.setattr(layers, "MOST_CUTS", 3)
    options = ["--keep", 3, "--dev", DEMO / "dev.tsv", "--sample", 50]
    found = printed_scores(call_main(layers, common.MINILM, *options))
    assert [len(cuts) for cuts in scored] == [5, 4, 3]
    best = range(6)
    for cuts in scored:
        assert set(cuts) == {(*kept, 5) for kept in combinations(best[:-1], len(best) - 2)}
        best = max(cuts, key=cuts.get)
    assert next(iter(found)) == ",".join(map(str, best))


def test_models_that_cannot_be_cut(fails, models_folder, tmp_path):
    """Too few layers, and ALBERT, whose layers share their weights."""
    options = ["--dev", DEMO / "dev.tsv", "--keep"]
    assert "has 6 layers" in fails(layers, common.MINILM, *options, 6)
    tokenizer = common.load_encoder(models_folder / "bert").tokenizer
    sizes = dict(hidden_size=32, embedding_size=16, num_attention_heads=4, intermediate_size=64)
    config = transformers.AlbertConfig(vocab_size=len(tokenizer), num_hidden_layers=4, **sizes)
    transformers.AlbertModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert "cannot be cut" in fails(layers, tmp_path, *options, 1)
