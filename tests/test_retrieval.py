"""support/retrieval.py: BEIR folders, search and metrics against plain loops, the memory bound."""

import json
import math
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT

from common import DataError
from support import demo, retrieval
from support.encoder import load_encoder


def beir(folder, passages=60, queries=12):
    """A small BEIR folder: passages of the demo, each query a passage without its first two words.

    Query i is answered by passage i (score 2) and passage i + `queries` (score 1).
    """
    texts = demo.sentences(passages)
    (folder / "qrels").mkdir(parents=True)
    corpus = [dict(_id=f"d{i}", title="", text=text) for i, text in enumerate(texts)]
    write_json_lines(folder / "corpus.jsonl", corpus)
    asked = [dict(_id=f"q{i}", text=without_two_words(texts[i])) for i in range(queries)]
    write_json_lines(folder / "queries.jsonl", asked)
    rows = [("query-id", "corpus-id", "score")]
    rows += [(f"q{i}", f"d{i}", 2) for i in range(queries)]
    rows += [(f"q{i}", f"d{i + queries}", 1) for i in range(queries)]
    rows += [("q0", "d50", 0)]
    lines = [f"{query}\t{passage}\t{score}\n" for query, passage, score in rows]
    (folder / "qrels" / "test.tsv").write_text("".join(lines))
    return folder


def write_json_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def without_two_words(text):
    return " ".join(text.split()[2:])


def unit_rows(count, dimension, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(count, dimension, generator=generator), dim=1)


def cosine(u, v):
    norms = math.sqrt(sum(a * a for a in u) * sum(b * b for b in v))
    return sum(a * b for a, b in zip(u, v)) / norms


# ---- search


@pytest.mark.parametrize("memory", [1, 1e5, 1e9])
@pytest.mark.parametrize("size", [7, 100, 1000])
def test_search_finds_what_a_full_sort_finds(memory, size):
    queries = unit_rows(9, 8, 1)
    passages = unit_rows(333, 8, 2)
    scores, found = retrieval.search(queries, passages.split(size), 50, memory)
    expected = (queries @ passages.T).sort(dim=1, descending=True, stable=True)
    assert torch.equal(found, expected.indices[:, :50])
    assert torch.allclose(scores, expected.values[:, :50], atol=1e-6)


@pytest.mark.parametrize("size", [1, 5, 64])
def test_of_equal_scores_the_first_passage_wins_whatever_the_chunks(size):
    """Whole numbers, so that equal scores are exactly equal: many ties, negative scores, zeros."""
    random = np.random.default_rng(0)
    queries = torch.tensor(random.integers(-2, 3, (6, 4)), dtype=torch.float32)
    passages = torch.tensor(random.integers(-2, 3, (40, 4)), dtype=torch.float32)
    scores, found = retrieval.search(queries, passages.split(size), 40, 1e6)
    for query, numbers, values in zip(queries.tolist(), found.tolist(), scores.tolist()):
        exact = [sum(a * b for a, b in zip(query, passage)) for passage in passages.tolist()]
        assert numbers == sorted(range(40), key=lambda i: (-exact[i], i))
        assert values == [exact[i] for i in numbers]


def test_fewer_passages_than_asked_for():
    _, found = retrieval.search(unit_rows(3, 8, 1), [unit_rows(5, 8, 2)], 1000, 1e6)
    assert found.shape == (3, 5)


MILLION = """
import resource, sys, torch
sys.path.insert(0, sys.argv[1])
from support.retrieval import search
torch.set_num_threads(2)

def chunks():
    for seed in range(100):
        vectors = torch.randn(10_000, 128, generator=torch.Generator().manual_seed(seed))
        yield torch.nn.functional.normalize(vectors, dim=1)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

queries = torch.cat([next(chunks())[:10], torch.randn(190, 128)])
search(queries[:1], [next(chunks())], 1000, 2e8)
before = peak()
scores, found = search(queries, chunks(), 1000, 2e8)
print(peak() - before, found[:10, 0].tolist(), int(found.max()) > 990_000)
"""


@pytest.mark.slow
def test_a_million_passages_in_bounded_memory():
    """The peak memory of the process: a million vectors of 128 numbers are 512 MB, the bound is
    200 MB."""
    command = [sys.executable, "-c", MILLION, str(ROOT)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    peak, rest = process.stdout.split(" ", 1)
    assert int(peak) < 2e8
    assert rest.strip() == f"{list(range(10))} True", process.stdout


def test_hard_negatives_are_the_nearest_passages_but_for_the_positives():
    random = np.random.default_rng(0)
    queries = random.normal(size=(5, 6)).astype(np.float32)
    passages = random.normal(size=(50, 6)).astype(np.float32)
    similarity = queries @ passages.T / np.linalg.norm(passages, axis=1)
    positives = [[int(row.argmax()), 7] for row in similarity]
    found = retrieval.mine_hard_negatives(queries, passages, positives, 4)
    assert found.shape == (5, 4)
    for query, known, numbers in zip(queries.tolist(), positives, found.tolist()):
        cosines = [cosine(query, passage) for passage in passages.tolist()]
        ranking = sorted(range(50), key=lambda i: -cosines[i])
        assert numbers == [i for i in ranking if i not in known][:4]


# ---- metrics


def test_metrics_by_hand():
    found = torch.tensor([[4, 7, 2, *range(100, 1097)], [3, 9, 8, *range(100, 1097)]])
    qrels = [{2: 1, 7: 3, 500: 1}, {999: 1, 5: 0}]
    gain = 3 / math.log2(3) + 1 / math.log2(4)
    ideal = 3 + 1 / math.log2(3) + 1 / math.log2(4)
    expected = {
        "MRR@10": 50 / 2,
        "nDCG@10": 100 * gain / ideal / 2,
        "Recall@10": 100 * (2 / 3) / 2,
        "Recall@100": 100 * (2 / 3) / 2,
        "Recall@1000": 100 * (1 + 1) / 2,
    }
    assert retrieval.metrics(found, qrels) == pytest.approx(expected, abs=1e-9)


def test_speed_is_that_of_encoding_without_the_search(models_folder, monkeypatch):
    search = retrieval.search

    def slow_chunks(chunks):
        for chunk in chunks:
            time.sleep(1)
            yield chunk

    def slow_search(queries, chunks, *rest):
        return search(queries, slow_chunks(chunks), *rest)

    monkeypatch.setattr(retrieval, "search", slow_search)
    texts = demo.sentences(20)
    encoder = load_encoder(models_folder / "bert")
    qrels = [{i: 1} for i in range(5)]
    scores, seconds = retrieval.evaluate(encoder, texts[:5], qrels, [texts[:10], texts[10:]])
    assert 0 < seconds < 1
    assert scores["MRR@10"] == pytest.approx(100)


def test_an_encoder_stays_in_its_mode(models_folder):
    encoder = load_encoder(models_folder / "bert")
    texts = demo.sentences(3)
    for training in (True, False):
        encoder.train(training)
        retrieval.evaluate(encoder, texts[:1], [{0: 1}], [texts])
        assert encoder.training == training


# ---- BEIR folders


def test_chunks_give_the_corpus_in_its_order(tmp_path):
    folder = beir(tmp_path / "beir")
    assert [len(texts) for texts in retrieval.passages(folder, 25)] == [25, 25, 10]
    assert len(next(retrieval.passages(folder, 60))) == 60
    assert sum(retrieval.passages(folder, 7), []) == demo.sentences(60)


def test_a_passage_is_its_title_and_its_text(tmp_path):
    rows = [dict(_id="a", title="Rain", text="It rains."), dict(_id="b", text="A boy.")]
    write_json_lines(tmp_path / "corpus.jsonl", rows)
    assert list(retrieval.passages(tmp_path)) == [["Rain It rains.", "A boy."]]


def test_qrels_name_passages_by_their_numbers(tmp_path):
    folder = beir(tmp_path / "beir")
    qrels, count = retrieval.read_qrels(folder, "test", retrieval.read_queries(folder))
    assert count == 60
    assert qrels["q0"] == {0: 2, 12: 1, 50: 0}
    assert qrels["q11"] == {11: 2, 23: 1}


def test_ids_with_one_hash_are_two_ids(tmp_path, monkeypatch):
    """blake2b is replaced by a hash that gives all ids the same value."""

    class Digest:
        def digest(self):
            return bytes(8)

    folder = beir(tmp_path / "beir")
    queries = retrieval.read_queries(folder)
    expected = retrieval.read_qrels(folder, "test", queries)
    monkeypatch.setattr(retrieval.hashlib, "blake2b", lambda name, digest_size: Digest())
    assert retrieval.read_qrels(folder, "test", queries) == expected


def test_training_data_leaves_every_tenth_query_for_dev(tmp_path):
    folder = beir(tmp_path / "beir", passages=100, queries=25)
    judged = (folder / "qrels" / "test.tsv").read_text()
    (folder / "qrels" / "train.tsv").write_text(judged)
    texts = demo.sentences(100)
    data, sets = retrieval.read_training_data(folder, dev_size=20)
    dev = [9, 19]
    train = [i for i in range(25) if i not in dev]
    assert data.passages == texts
    assert data.queries == [without_two_words(texts[i]) for i in train]
    assert data.positives == [[i, i + 25] for i in train]  # q0's passage of score 0 is none
    assert sets.dev.texts == [without_two_words(texts[i]) for i in dev]
    for i, qrels in zip(dev, sets.dev.qrels):
        named = {sets.dev_passages[number]: score for number, score in qrels.items()}
        assert named == {texts[i]: 2, texts[i + 25]: 1}
    assert sets.dev_passages == [*texts[:20], texts[34], texts[44]]
    assert len(sets.test.texts) == 25
    _, without_test = retrieval.read_training_data(folder, dev_size=20, skip_test=True)
    assert without_test.test.texts == []


def test_a_query_with_two_positives_gives_two_training_rows():
    data = retrieval.TrainingData(["a", "b", "c", "d"], ["x", "y"], [[2, 0], [1]])
    mined = np.array([[1, 3], [0, 2]])
    anchors, positives, negatives = retrieval.training_rows(data, mined)
    assert anchors == ["x", "x", "y"]
    assert positives.tolist() == [2, 0, 1]
    assert negatives.tolist() == [[1, 3], [1, 3], [0, 2]]


# file, old text, new text, error
BROKEN = {
    "unknown query": (
        *("qrels/test.tsv", "q3\td3\t2", "q99\td3\t2"),
        "test.tsv:5: query 'q99' is unknown, expected an id of queries.jsonl",
    ),
    "unknown passage": (
        *("qrels/test.tsv", "q3\td3\t2", "q3\td99\t2"),
        "test.tsv:5: passage 'd99' is unknown, expected an id of corpus.jsonl",
    ),
    "score in words": (
        *("qrels/test.tsv", "q3\td3\t2", "q3\td3\tyes"),
        "test.tsv:5: score 'yes' is not a whole number, 0 or more",
    ),
    "score in superscript": (
        *("qrels/test.tsv", "q3\td3\t2", "q3\td3\t²"),
        "test.tsv:5: score '²' is not a whole number, 0 or more",
    ),
    "no score": (
        *("qrels/test.tsv", "q3\td3\t2", "q3\td3"),
        "test.tsv:5: 2 tab-separated columns",
    ),
    "repeated passage": (
        *("corpus.jsonl", '"d7"', '"d6"'),
        "corpus.jsonl:8: id 'd6' is used above, expected unique ids",
    ),
    "repeated query": (
        *("queries.jsonl", '"q7"', '"q6"'),
        "queries.jsonl:8: id 'q6' is used above, expected unique ids",
    ),
    "no JSON": ("corpus.jsonl", '{"_id": "d7"', '{"_id": "d7', "corpus.jsonl:8:"),
    "no id": ("corpus.jsonl", '{"_id": "d7"', '{"id": "d7"', "corpus.jsonl:8:"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused(tmp_path, case):
    name, old, new, expected = BROKEN[case]
    folder = beir(tmp_path / "beir")
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))
    with pytest.raises(DataError) as error:
        retrieval.read_qrels(folder, "test", retrieval.read_queries(folder))
    assert expected in str(error.value)


def test_a_query_without_positives_is_refused(tmp_path):
    folder = beir(tmp_path / "beir")
    path = folder / "qrels" / "test.tsv"
    kept = [line for line in path.read_text().splitlines() if not line.startswith("q5\t")]
    path.write_text("\n".join([*kept, "q5\td50\t0"]) + "\n")
    expected = f"test.tsv:{len(kept) + 1}: query 'q5' has no positive"
    with pytest.raises(DataError, match=expected):
        retrieval.read_qrels(folder, "test", retrieval.read_queries(folder))


def test_qrels_without_a_line_are_refused(tmp_path):
    folder = beir(tmp_path / "beir")
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n")
    with pytest.raises(DataError, match="test.tsv: no line but the header"):
        retrieval.read_qrels(folder, "test", retrieval.read_queries(folder))
