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

import common
from common import DataError
from support import demo, retrieval, retrieval_training
from support.encoder import load_encoder
from support.retrieval import NONE, JudgedQueries


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


def judge(texts, qrels, own=None):
    """Queries with these texts or names."""
    return JudgedQueries(texts, texts, qrels, own or [NONE] * len(qrels))


def read(folder, split="test"):
    judged, _ = retrieval.read_judged(folder, split, retrieval.read_queries(folder))
    return judged


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


@pytest.mark.parametrize("size", [300, 307, 1000])
@pytest.mark.parametrize("depth", [1, 3, 9])
def test_blocks_without_the_best_are_left_out_of_long_chunks(size, depth):
    """Many ties, also at the borders of blocks and chunks."""
    random = np.random.default_rng(depth)
    passages = torch.tensor(random.integers(-2, 3, (1000, 4)), dtype=torch.float32)
    passages[[0, 15, 16, 299, 300, 306, 999]] = 3.0
    queries = torch.tensor(random.integers(-2, 3, (50, 4)), dtype=torch.float32)
    assert size > 2 * retrieval.BLOCK * depth
    scores, found = retrieval.search(queries, passages.split(size), depth, 1e6)
    exact = (queries.double() @ passages.double().T).numpy()
    for row, numbers, values in zip(exact, found.tolist(), scores.tolist()):
        assert numbers == sorted(range(1000), key=lambda i: (-row[i], i))[:depth]
        assert values == [row[i] for i in numbers]


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


def dot(u, v):
    return sum(a * b for a, b in zip(u, v))


@pytest.mark.parametrize("similarity", [cosine, dot])
def test_hard_negatives_are_the_nearest_passages_but_for_the_known_ones(similarity):
    random = np.random.default_rng(0)
    queries = random.normal(size=(5, 6)).astype(np.float32)
    passages = random.normal(size=(50, 6)).astype(np.float32)
    passages *= random.uniform(0.2, 5, size=(50, 1)).astype(np.float32)
    name = similarity.__name__
    known = [[int((passages @ query).argmax()), 7] for query in queries]
    found = retrieval_training.mine_hard_negatives(queries, passages, known, 4, name)
    assert found.shape == (5, 4)
    for query, left_out, numbers in zip(queries.tolist(), known, found.tolist()):
        values = [similarity(query, passage) for passage in passages.tolist()]
        ranking = sorted(range(50), key=lambda i: -values[i])
        assert numbers == [i for i in ranking if i not in left_out][:4]


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
    judged = judge(["a", "b"], qrels)
    assert retrieval.metrics(found, judged) == pytest.approx(expected, abs=1e-9)


def test_a_query_does_not_find_itself():
    """As in BEIR: the passage with the query's id is left out of its ranking, and of no other."""
    found = torch.tensor([[4, 7, 2, 9], [4, 7, 2, 9]])
    qrels = [{7: 1}, {7: 1}]
    assert retrieval.metrics(found, judge(["a", "b"], qrels))["MRR@10"] == 50
    assert retrieval.metrics(found, judge(["a", "b"], qrels, [4, NONE]))["MRR@10"] == 75


def test_the_passage_behind_the_querys_own_counts_for_recall_at_1000(models_folder):
    """A thousand others remain when its own passage is left out."""
    texts = demo.sentences(1100)
    encoder = load_encoder(models_folder / "bert").eval()
    vectors = torch.from_numpy(common.encode_sentences(encoder, texts))
    order = torch.nn.functional.cosine_similarity(vectors[0], vectors).argsort(descending=True)
    assert order[0] == 0
    judged = judge(texts[:1], [{int(order[1000]): 1}], [0])
    scores, _ = retrieval.evaluate(encoder, judged, [texts])
    assert scores["Recall@1000"] == 100


def uneven(folder):
    """An encoder whose embeddings differ in norm."""
    encoder = load_encoder(folder / "cls").eval()
    torch.manual_seed(0)
    encoder.add_head(torch.nn.Linear(32, 6), torch.nn.Identity())
    return encoder


def test_scores_by_inner_product(models_folder):
    encoder = uneven(models_folder)
    texts = demo.sentences(60)
    vectors = common.encode_sentences(encoder, texts).tolist()
    first = {}
    for name, value in (("cosine", cosine), ("dot", dot)):
        first[name] = [
            max(range(60), key=lambda i: value(vectors[q], vectors[i])) for q in range(9)
        ]
        judged = judge(texts[:9], [{number: 1} for number in first[name]])
        scores, _ = retrieval.evaluate(encoder, judged, [texts], similarity=name)
        assert scores["MRR@10"] == pytest.approx(100)
    assert first["cosine"] == list(range(9))
    assert first["dot"] != first["cosine"]


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
    judged = judge(texts[:5], [{i: 1} for i in range(5)])
    scores, seconds = retrieval.evaluate(encoder, judged, [texts[:10], texts[10:]])
    assert 0 < seconds < 1
    assert scores["MRR@10"] == pytest.approx(100)


def test_an_encoder_stays_in_its_mode(models_folder):
    encoder = load_encoder(models_folder / "bert")
    texts = demo.sentences(3)
    for training in (True, False):
        encoder.train(training)
        retrieval.evaluate(encoder, judge(texts[:1], [{0: 1}]), [texts])
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
    judged, count = retrieval.read_judged(folder, "test", retrieval.read_queries(folder))
    assert count == 60
    assert judged.names == [f"q{i}" for i in range(12)]
    assert judged.texts[11] == without_two_words(demo.sentences(60)[11])
    assert judged.qrels[0] == {0: 2, 12: 1, 50: 0}
    assert judged.qrels[11] == {11: 2, 23: 1}
    assert judged.own == [NONE] * 12


def test_a_passage_with_the_querys_id_is_its_own_unless_it_is_an_answer(tmp_path):
    """As in ArguAna, where a query is a passage; and as where query 3 is answered by passage 3."""
    folder = beir(tmp_path / "beir")
    for name in ("queries.jsonl", "qrels/test.tsv"):
        text = (folder / name).read_text()
        text = text.replace('"q2"', '"d20"').replace('"q3"', '"d3"')
        (folder / name).write_text(text.replace("q2\t", "d20\t").replace("q3\t", "d3\t"))
    judged = read(folder)
    assert judged.names[2:4] == ["d20", "d3"]
    assert judged.own == [NONE, NONE, 20, *[NONE] * 9]


def test_ids_with_one_hash_are_two_ids(tmp_path, monkeypatch):
    """blake2b is replaced by a hash that gives all ids the same value."""

    class Digest:
        def digest(self):
            return bytes(8)

    folder = beir(tmp_path / "beir")
    expected = read(folder)
    monkeypatch.setattr(retrieval.hashlib, "blake2b", lambda name, digest_size: Digest())
    assert read(folder) == expected


# ---- data of a training run


def training_folder(folder, passages=100, queries=25):
    """beir() whose test queries are also those to train on."""
    beir(folder, passages, queries)
    judged = (folder / "qrels" / "test.tsv").read_text()
    (folder / "qrels" / "train.tsv").write_text(judged)
    return folder


def test_training_data_leaves_every_tenth_query_for_dev(tmp_path):
    folder = training_folder(tmp_path / "beir")
    texts = demo.sentences(100)
    passages, data, sets = retrieval_training.read_training_data(folder, 2000, 20, "test")
    dev = [9, 19]
    train = [i for i in range(25) if i not in dev]
    assert passages == texts
    assert data.names == [f"q{i}" for i in train]
    assert data.queries == [without_two_words(texts[i]) for i in train]
    assert data.positives == [[i, i + 25] for i in train]  # q0's passage of score 0 is none
    assert data.known == data.positives
    assert sets.dev.texts == sets.dev_queries.texts == [without_two_words(texts[i]) for i in dev]
    for i, qrels in zip(dev, sets.dev.qrels):
        named = {sets.dev_passages.texts[number]: score for number, score in qrels.items()}
        assert named == {texts[i]: 2, texts[i + 25]: 1}
    assert sets.dev_passages.texts == [*texts[:20], texts[34], texts[44]]
    assert len(sets.test.texts) == 25
    *_, without_test = retrieval_training.read_training_data(folder, 2000, 20)
    assert without_test.test is None


@pytest.mark.parametrize(
    ("most", "expected"), [(100, [9, 19, 29, 39]), (3, [14, 29, 44]), (1, [44])]
)
def test_dev_queries_are_spread_over_the_training_queries(tmp_path, most, expected):
    folder = training_folder(tmp_path / "beir", 100, 45)
    _, data, sets = retrieval_training.read_training_data(folder, most, 20)
    assert sets.dev.names == [f"q{position}" for position in expected]
    assert len(data.names) == 45 - len(expected)


def test_passages_with_one_text_are_one_passage(tmp_path):
    """d2, d60 and d61 are one; d50 is query 0's own; d61 answers query 1, and so does d2 then."""
    folder = training_folder(tmp_path / "beir", 60, 20)
    texts = demo.sentences(60)
    with open(folder / "corpus.jsonl", "a") as corpus:
        for name in ("d60", "d61"):
            corpus.write(json.dumps(dict(_id=name, text=texts[2])) + "\n")
    path = folder / "qrels" / "train.tsv"
    path.write_text(path.read_text() + "q1\td61\t1\nq1\td2\t0\n")
    for file in (path, folder / "queries.jsonl"):
        file.write_text(file.read_text().replace("q0\t", "d50\t").replace('"q0"', '"d50"'))
    passages, data, _ = retrieval_training.read_training_data(folder, 2000, 20)
    assert passages == texts
    assert data.numbers.tolist() == [*range(60), 2, 2]
    assert data.positives[:3] == [[0, 20], [1, 21, 2], [2, 22]]
    assert data.known[:3] == [[0, 20, 50], [1, 21, 2], [2, 22]]


def test_texts_are_tokenized_once_for_tokenizers_that_are_equal(models_folder, monkeypatch):
    made = []

    def count_tokens(encoder, texts, limit):
        made.append(limit)
        return common.Tokens(encoder, texts, limit)

    monkeypatch.setattr(retrieval_training, "Tokens", count_tokens)
    encoders = [load_encoder(models_folder / name) for name in ("bert", "wide", "bert")]
    texts = retrieval_training.TokenizedTexts(demo.sentences(20), 16)
    first = texts.of(encoders[0])
    encoders[0].tokenizer(["a"], truncation=True, padding=True, max_length=4)
    assert all(texts.of(encoder) is first for encoder in encoders)
    assert made == [16]
    encoders[1].max_length = 8
    assert texts.of(encoders[1]).lengths.max() == 8
    encoders[2].tokenizer.add_tokens(["guitar"])
    texts.of(encoders[2])
    assert made == [16, 8, 16]


def test_dev_is_mrr_at_10_and_tokenized_once(models_folder, tmp_path, monkeypatch):
    folder = training_folder(tmp_path / "beir", 60, 20)
    *_, sets = retrieval_training.read_training_data(folder, 2000, 30)
    encoder = uneven(models_folder)
    for name in ("cosine", "dot"):
        texts = sets.dev_passages.texts
        expected, _ = retrieval.evaluate(encoder, sets.dev, [texts], similarity=name)
        score = sets._replace(similarity=name).dev_score(encoder)
        assert score == pytest.approx(expected["MRR@10"])
    monkeypatch.setattr(retrieval_training, "Tokens", None)
    assert sets._replace(similarity="dot").dev_score(encoder) == score


def test_a_query_with_two_positives_gives_two_training_rows():
    numbers = np.arange(4)
    positives = [[2, 0], [1]]
    data = retrieval_training.TrainingData(numbers, ["x", "y"], ["x", "y"], positives, positives)
    mined = np.array([[1, 3], [0, 2]])
    queries, positives, negatives = retrieval_training.training_rows(data, mined)
    assert queries.tolist() == [0, 0, 1]
    assert positives.tolist() == [2, 0, 1]
    assert negatives.tolist() == [[1, 3], [1, 3], [0, 2]]


# ---- hard negatives


@pytest.fixture
def training_data(tmp_path):
    folder = training_folder(tmp_path / "beir", 60, 20)
    _, data, _ = retrieval_training.read_training_data(folder, 2000, 20)
    return folder, data


def test_hard_negatives_are_mined_once(training_data, monkeypatch, tmp_path):
    """Once for the same embeddings, labels, similarity and count; else again."""
    monkeypatch.setattr(common.Cache, "folder", tmp_path)
    _, data = training_data
    vectors = np.random.default_rng(0).normal(size=(60 + len(data.names), 8)).astype(np.float32)
    find = retrieval_training.cached_negatives
    first = find("key", vectors, data, 3, "cosine", "cpu")
    mine = retrieval_training.mine_hard_negatives
    again = mine(vectors[60:], vectors[:60], data.known, 3)
    assert first.tolist() == again.tolist()
    for row, known in zip(first.tolist(), data.known):
        assert not set(row) & set(known)
    with monkeypatch.context() as patch:
        patch.setattr(retrieval_training, "mine_hard_negatives", None)
        assert find("key", vectors, data, 3, "cosine", "cpu").tolist() == first.tolist()
    assert find("other", -vectors[:-1], data, 3, "cosine", "cpu").tolist() != first.tolist()
    assert find("key", vectors, data, 4, "cosine", "cpu").shape == (18, 4)
    find("key", vectors, data, 3, "dot", "cpu")
    find("key", vectors, data._replace(known=[[1]] * 18), 3, "cosine", "cpu")
    assert len(list(tmp_path.glob("negatives-*.npy"))) == 5


def test_hard_negatives_are_written_and_read(training_data, tmp_path):
    folder, data = training_data
    negatives = np.array([[(i + 40) % 60, (i + 47) % 60, (i + 51) % 60] for i in range(18)])
    path = tmp_path / "negatives.tsv"
    retrieval_training.write_negatives(path, folder, data, negatives)
    lines = path.read_text().splitlines()
    assert lines[1] == "q1\td41\td48\td52"
    path.write_text("\n".join(["another\td1", *reversed(lines)]) + "\n")
    read = retrieval_training.read_negatives(path, folder, data, 2)
    assert read.tolist() == negatives[:, :2].tolist()


# old text, new text, error
WRONG_NEGATIVES = {
    "too few": ("q1\td41\td48", "q1\td41", ":2: 1 passage-ids, expected a query-id and 2"),
    "an empty one": ("q1\td41\td48", "q1\t\td48", ":2: 2 passage-ids, expected a query-id and 2"),
    "an unknown passage": ("q1\td41", "q1\td99", ":2: passage 'd99' of query 'q1'"),
    "an answer": ("q1\td41", "q1\td21", ":2: passage 'd21' of query 'q1', expected the id of a"),
    "no line": ("q1\td41\td48\n", "", ": no line for query 'q1'"),
}


@pytest.mark.parametrize("case", WRONG_NEGATIVES)
def test_wrong_hard_negatives_are_refused(training_data, tmp_path, case):
    old, new, expected = WRONG_NEGATIVES[case]
    folder, data = training_data
    negatives = np.array([[(i + 40) % 60, (i + 47) % 60] for i in range(18)])
    path = tmp_path / "negatives.tsv"
    retrieval_training.write_negatives(path, folder, data, negatives)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(DataError) as error:
        retrieval_training.read_negatives(path, folder, data, 2)
    assert f"{path}{expected}" in str(error.value)


# ---- broken folders

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
        read(folder)
    assert expected in str(error.value)


def test_a_query_without_positives_is_refused(tmp_path):
    folder = beir(tmp_path / "beir")
    path = folder / "qrels" / "test.tsv"
    kept = [line for line in path.read_text().splitlines() if not line.startswith("q5\t")]
    path.write_text("\n".join([*kept, "q5\td50\t0"]) + "\n")
    expected = f"test.tsv:{len(kept) + 1}: query 'q5' has no positive"
    with pytest.raises(DataError, match=expected):
        read(folder)


def test_qrels_without_a_line_are_refused(tmp_path):
    folder = beir(tmp_path / "beir")
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n")
    with pytest.raises(DataError, match="test.tsv: no line but the header"):
        read(folder)
