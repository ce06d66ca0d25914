"""extras/eval_retrieval.py: search and metrics against plain loops, BEIR folders, the real data."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import cosine, demo_sentences, random_rows
from sentence_transformers import SentenceTransformer, util
from torch import nn

import ckd
import common
from extras import eval_retrieval as retrieval
from extras.eval_retrieval import LEFT_OUT


def write_json_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def without_two_words(text):
    return " ".join(text.split()[2:])


def replace_in(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.fixture
def beir(tmp_path):
    """A folder of 60 passages and 21 queries, passages of the demo without their first two words.

    Query i is answered by passage i (score 2) and passage i + 20 (score 1), in train and test;
    query 20 is in neither.
    """
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    texts = demo_sentences(60)
    corpus = [dict(_id=f"d{i}", title="", text=text) for i, text in enumerate(texts)]
    write_json_lines(folder / "corpus.jsonl", corpus)
    queries = [dict(_id=f"q{i}", text=without_two_words(texts[i])) for i in range(21)]
    write_json_lines(folder / "queries.jsonl", queries)
    lines = ["query-id\tcorpus-id\tscore"]
    lines += [f"q{i}\td{i}\t2" for i in range(20)]
    lines += [f"q{i}\td{i + 20}\t1" for i in range(20)]
    for split in ("train", "test"):
        (folder / f"qrels/{split}.tsv").write_text("\n".join([*lines, "q0\td50\t0"]) + "\n")
    return folder


TITLES = [("null", "a boy"), ("NaN", "a boy"), ('"On"', "On a boy"), ("3", None), ("true", None)]


@pytest.mark.parametrize("title, expected", TITLES)
def test_a_title_that_is_none_is_not_embedded(tmp_path, title, expected):
    """pandas writes a missing title as NaN."""
    row = f'{{"_id": "d", "title": {title}, "text": "a boy"}}\n'
    (tmp_path / "corpus.jsonl").write_text(row)
    if expected is None:
        with pytest.raises(common.UserError, match="corpus.jsonl:1: .* is not a string"):
            list(retrieval.read_texts(tmp_path, "corpus.jsonl"))
    else:
        assert list(retrieval.read_texts(tmp_path, "corpus.jsonl")) == [("d", expected)]


def test_the_title_of_a_query_is_no_part_of_it(tmp_path):
    """As BEIR's own loader reads it; it would cost four points."""
    row = '{"_id": "q", "title": "On boys", "text": "a boy"}\n'
    (tmp_path / "queries.jsonl").write_text(row)
    assert list(retrieval.read_texts(tmp_path, "queries.jsonl")) == [("q", "a boy")]


def test_queries_whose_answers_the_corpus_lacks_are_left_out_of_training(beir):
    """Otherwise the dev score would be NaN."""
    lines = (beir / "qrels/train.tsv").read_text().splitlines()
    lines = [line for line in lines if not line.startswith("q9\t")] + ["q9\tgone\t1"]
    (beir / "qrels/train.tsv").write_text("\n".join(lines) + "\n")
    _, queries, answers, (dev, dev_answers, _) = retrieval.read_training(beir, 5)
    assert (len(queries), len(dev)) == (18, 1)
    assert all(answers) and all(dev_answers)


def test_it_says_that_passages_are_longer_than_the_model_reads(
    models_folder, beir, call_main, monkeypatch
):
    """And which prompts are put before no text."""
    said = []
    monkeypatch.setattr(common, "note", said.append)
    monkeypatch.setattr(retrieval, "note", said.append)
    rows = [json.loads(line) for line in (beir / "corpus.jsonl").read_text().splitlines()]
    for row in rows[:7]:
        row["text"] = "word " * 200
    write_json_lines(beir / "corpus.jsonl", rows)
    encoder = common.load_encoder(models_folder / "mean")
    encoder.prompts = dict(passage="the dog ", other="no ")
    common.save_encoder(encoder, beir / "model")
    call_main(retrieval, beir / "model", "--beir", beir)
    longer = f"{beir / 'model'}: of a long text, it reads the first 128 tokens"
    assert {*said} == {
        longer,
        f"{beir / 'model'}: of its prompts ['other'], none is put before a text",
    }


def test_a_line_that_lacks_a_field_is_not_told_in_the_words_of_python_alone(beir):
    (beir / "queries.jsonl").write_text('{"_id": "q0", "query": "a boy"}\n')
    with pytest.raises(common.UserError, match=r":1: it is not as expected .*; each line must be"):
        retrieval.read_split(beir, "test")


def dot(u, v):
    return sum(a * b for a, b in zip(u, v))


@pytest.mark.parametrize("size, scores", [(7, 1), (100, 500), (1000, 10**6)])
@pytest.mark.parametrize("largest, depth", [(2, 333), (1000, 50)])
def test_search_finds_what_a_full_sort_finds(monkeypatch, size, scores, largest, depth):
    """Of equal scores, which small whole numbers often have, the first passage ranks first."""
    monkeypatch.setattr(retrieval, "SCORES", scores)
    random = np.random.default_rng(0)
    queries = random.integers(-largest, largest + 1, (9, 4)).astype(np.float32)
    passages = random.integers(-largest, largest + 1, (333, 4)).astype(np.float32)
    chunks = np.split(passages, range(size, 333, size))
    found = retrieval.search(queries, chunks, depth, "dot", "cpu")
    for query, numbers in zip(queries.tolist(), found):
        exact = [dot(query, passage) for passage in passages.tolist()]
        assert numbers == sorted(range(333), key=lambda i: (-exact[i], i))[:depth]


def test_metrics_by_hand():
    """The first query's own passage, 5, is left out of its ranking."""
    found = [[5, 4, 7, 2, *range(100, 1097)], [3, 9, 8, *range(100, 1097)]]
    gain = 3 / math.log2(3) + 1 / math.log2(4)
    ideal = 3 + 1 / math.log2(3) + 1 / math.log2(4)
    mrr, recall = 50 / 2, 100 * (2 / 3) / 2
    values = [mrr, 100 * gain / ideal / 2, recall, recall, 100 * (1 + 1) / 2]
    expected = dict(zip(("MRR@10", "nDCG@10", "Recall@10", "Recall@100", "Recall@1000"), values))
    answers = [{2: 1, 7: 3, 500: 1, 5: LEFT_OUT}, {999: 1}]
    assert retrieval.metrics(found, answers) == pytest.approx(expected, abs=1e-9)


def test_an_answer_that_the_corpus_lacks_counts_as_one_that_is_not_found(beir, capsys):
    """As in BEIR's ArguAna; it is no training example. Scores by the metrics' definitions."""
    for split in ("train", "test"):
        replace_in(beir / f"qrels/{split}.tsv", "q0\td50\t0\n", "q0\tnowhere\t3\n")
    _, answers = retrieval.read_split(beir, "test")
    assert answers[0] == {0: 2, 20: 1, -1: 3}
    assert "the corpus lacks 1 of its passages" in capsys.readouterr().err
    found = retrieval.metrics([[20, 0, *range(21, 60)]], answers[:1])
    gain = 1 + 2 / math.log2(3)
    ideal = 3 + 2 / math.log2(3) + 1 / 2
    assert found["nDCG@10"] == pytest.approx(100 * gain / ideal)
    assert (found["MRR@10"], found["Recall@100"]) == (100, pytest.approx(200 / 3))
    _, _, training, _ = retrieval.read_training(beir, 2000)
    assert training[0] == {0: 2, 20: 1}
    for passage in range(60):
        replace_in(beir / "corpus.jsonl", f'"d{passage}"', f'"other-{passage}"')
    with pytest.raises(common.UserError, match="corpus.jsonl has none of its passages"):
        retrieval.read_split(beir, "test")


def test_every_tenth_training_query_is_for_dev(beir, monkeypatch):
    """They search the first passages and those that answer them.

    d2 and d60 have the same text and are one passage; d50 is query d50's own; d60, thus d2, answers
    query 1.
    """
    monkeypatch.setattr(retrieval, "DEV_PASSAGES", 12)
    texts, dev = demo_sentences(60), [9, 19]
    with open(beir / "corpus.jsonl", "a") as corpus:
        corpus.write(json.dumps(dict(_id="d60", text=texts[2])) + "\n")
    replace_in(beir / "qrels/train.tsv", "q0\td50\t0\n", "q1\td60\t1\nq1\td2\t0\n")
    replace_in(beir / "qrels/train.tsv", "q0\t", "d50\t")
    replace_in(beir / "queries.jsonl", '"q0"', '"d50"')
    *training, (dev_queries, dev_answers, corpus) = retrieval.read_training(beir, 2000)
    passages, queries, answers = training
    assert passages == texts
    assert queries == [without_two_words(texts[i]) for i in range(20) if i not in dev]
    assert answers[0] == {0: 2, 20: 1, 50: LEFT_OUT}
    assert answers[1] == {1: 2, 21: 1, 2: 1}
    assert dev_queries == [without_two_words(texts[i]) for i in dev]
    assert corpus == [(i, texts[i]) for i in [*range(12), 19, 29, 39]]
    for i, row in zip(dev, dev_answers):
        named = {corpus[number][1]: score for number, score in row.items()}
        assert named == {texts[i]: 2, texts[i + 20]: 1}


@pytest.mark.parametrize("similarity", [cosine, dot])
def test_hard_negatives_are_the_nearest_passages_that_do_not_answer(beir, monkeypatch, similarity):
    monkeypatch.setattr(retrieval, "CHUNK", 25)
    *_, answers, _ = retrieval.read_training(beir, 2000)
    vectors = random_rows(78, 6).numpy() * np.random.default_rng(0).uniform(0.2, 5, size=(78, 1))
    answers[0][int(similarity_order(similarity, vectors, 60)[0])] = LEFT_OUT
    expected = []
    for query, row in enumerate(answers, 60):
        ranking = similarity_order(similarity, vectors, query)
        negatives = [i for i in ranking if i not in row][:4]
        expected += [[query, i, *negatives] for i in row if row[i] != LEFT_OUT]
    rows = retrieval.training_rows(vectors, answers, 4, similarity.__name__, "cpu")
    assert rows.tolist() == expected


def similarity_order(similarity, vectors, query):
    values = [similarity(vectors[query].tolist(), passage) for passage in vectors[:60].tolist()]
    return sorted(range(60), key=lambda i: -values[i])


def test_the_program_agrees_with_plain_loops(call_main, beir, models_folder, tmp_path):
    """MRR@10 of a model with a head that makes norms differ, and with prompts; all options."""
    bert, uneven, prompted = models_folder / "bert", tmp_path / "uneven", tmp_path / "prompted"
    encoder = common.load_encoder(bert)
    torch.manual_seed(0)
    encoder.heads.append(nn.Sequential(nn.Linear(32, 32), nn.Identity()))
    common.save_encoder(encoder, uneven)
    prompts = dict(query="a man is ", passage="the dog ", other="no ")
    encoder.prompts, encoder.settings = prompts, dict(default_prompt_name="other")
    common.save_encoder(encoder, prompted)
    texts = demo_sentences(60)
    queries = [without_two_words(text) for text in texts[:20]]
    plain, both = ("", ""), (prompts["query"], prompts["passage"])
    stating_dot = tmp_path / "dot"
    encoder = common.load_encoder(uneven)
    encoder.settings = dict(similarity_fn_name="dot")
    common.save_encoder(encoder, stating_dot)
    settings = {  # options, similarity, prompts
        (uneven,): (cosine, plain),
        (uneven, "--similarity", "dot"): (dot, plain),
        (stating_dot,): (dot, plain),
        (stating_dot, "--similarity", "cosine"): (cosine, plain),
        (bert, "--document-model", uneven): (cosine, plain),
        (prompted,): (cosine, both),
        (prompted, "--query-prompt", "one "): (cosine, ("one ", both[1])),
    }
    found = []
    for options, (similarity, (to_query, to_passage)) in settings.items():
        printed = call_main(retrieval, *options, "--beir", beir, "--json", tmp_path / "scores.json")
        (scores,) = json.loads((tmp_path / "scores.json").read_text()).values()
        encoders = [common.load_encoder(model) for model in (uneven, options[0])]
        encoders[1].prompt = ""
        passages = common.encode(ckd.embed, encoders[0], [to_passage + text for text in texts])
        vectors = common.encode(ckd.embed, encoders[1], [to_query + text for text in queries])
        total = 0
        for i, query in enumerate(vectors.tolist()):
            values = [similarity(query, passage) for passage in passages.tolist()]
            best = np.argsort(-np.array(values))[:10].tolist()
            total += max((1 / (1 + best.index(j)) for j in (i, i + 20) if j in best), default=0)
        assert scores["MRR@10"] == pytest.approx(100 * total / 20, abs=0.01)
        assert scores["bytes"] == 32 * 4
        assert f"{scores['MRR@10']:.2f}" in printed
        found.append(round(scores["MRR@10"], 3))
    assert len(set(found)) == 5  # each option makes a difference
    assert found[:2] == found[3:1:-1]  # a folder's similarity counts as the option does


def test_a_student_queries_the_index_of_its_teacher(
    call_main, fails, beir, models_folder, tmp_path
):
    """As with sentence-transformers; the teacher's vectors are made once."""
    teacher, student = models_folder / "mean", tmp_path / "student"
    common.save_encoder(common.load_encoder(teacher, layers="0,2"), student)
    texts = demo_sentences(60)
    index = SentenceTransformer(str(teacher), device="cpu").encode(texts)
    queries = [without_two_words(text) for text in texts[:20]]
    vectors = SentenceTransformer(str(student), device="cpu").encode(queries)
    total = 0
    for i, found in enumerate(util.semantic_search(vectors, index, top_k=10)):
        ranks = [rank for rank, hit in enumerate(found, 1) if hit["corpus_id"] in (i, i + 20)]
        total += 1 / ranks[0] if ranks else 0
    options = ("--document-model", teacher, "--beir", beir)
    call_main(retrieval, student, *options, "--json", tmp_path / "scores.json")
    (scores,) = json.loads((tmp_path / "scores.json").read_text()).values()
    assert scores["MRR@10"] == pytest.approx(100 * total / 20, abs=0.01) and total > 0
    assert "differ in dimension" in fails(retrieval, models_folder / "wide", *options)
