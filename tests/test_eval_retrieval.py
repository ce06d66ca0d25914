"""eval_retrieval.py: the reference figures on the real data, plain loops, what it refuses."""

import gzip
import json

import numpy as np
import pytest
import torch
from test_retrieval import beir, without_two_words, write_json_lines

import common
import eval_retrieval
from support import demo
from support.encoder import load_encoder


@pytest.mark.slow
def test_reference_figures(run, teacher, shared_data, tmp_path):
    options = ("--beir", shared_data / "retrieval/qnli", "--json", tmp_path / "scores.json")
    process = run("eval_retrieval.py", common.MINILM, *options, OMP_NUM_THREADS="2")
    assert process.returncode == 0, process.stderr[-2000:]
    (scores,) = json.loads((tmp_path / "scores.json").read_text()).values()
    expected = {"MRR@10": 68.57, "Recall@10": 86.68, "Recall@100": 97.16, "Recall@1000": 99.38}
    assert {name: scores[name] for name in expected} == pytest.approx(expected, abs=0.0101)
    assert scores["bytes"] == 4 * 384


def normalized(encoder, texts):
    vectors = []
    for vector in common.encode_sentences(encoder, texts).tolist():
        norm = sum(value * value for value in vector) ** 0.5
        vectors.append([value / norm for value in vector])
    return vectors


def reciprocal_rank_by_loops(embed, encoder, document, passages, queries, number):
    """MRR@10 where passages i and i + 24 answer query i of 24; number: the type of a passage's."""
    vectors = np.array(embed(document, passages)).astype(number).astype(float).tolist()
    total = 0
    for i, query in enumerate(embed(encoder, queries)):
        similarities = [sum(a * b for a, b in zip(query, vector)) for vector in vectors]
        best = np.argsort(-np.array(similarities))[:10].tolist()
        ranks = [rank for rank, j in enumerate(best, 1) if j in (i, i + 24)]
        total += 1 / ranks[0] if ranks else 0
    return 100 * total / len(queries)


def uneven_encoder(name, folder):
    """Save a model with a random head, so that its embeddings differ in norm."""
    encoder = load_encoder(name)
    torch.manual_seed(0)
    encoder.add_head(torch.nn.Linear(32, 32), torch.nn.Identity())
    encoder.save(folder)
    return folder


def test_the_program_agrees_with_plain_loops(call_main, models_folder, tmp_path):
    """With a gzipped corpus, passages in two bytes, a model of their own for passages, [CLS], inner
    products."""
    folder = beir(tmp_path / "beir", queries=24)
    corpus = folder / "corpus.jsonl"
    (folder / "corpus.jsonl.gz").write_bytes(gzip.compress(corpus.read_bytes()))
    corpus.unlink()
    passages = demo.sentences(60)
    queries = [without_two_words(text) for text in passages[:24]]
    bert, uneven = models_folder / "bert", tmp_path / "uneven"
    encoder = load_encoder(bert).eval()
    other = load_encoder(models_folder / "distilbert").eval()
    scaled = load_encoder(uneven_encoder(bert, uneven)).eval()
    cls = load_encoder(uneven, "cls").eval()
    settings = {
        (bert,): (encoder, encoder, normalized, 4),
        (bert, "--fp16"): (encoder, encoder, normalized, 2),
        (bert, "--document-model", models_folder / "distilbert"): (encoder, other, normalized, 4),
        (uneven,): (scaled, scaled, normalized, 4),
        (uneven, "--similarity", "dot"): (scaled, scaled, common.encode_sentences, 4),
        (uneven, "--pooling", "cls"): (cls, cls, normalized, 4),
    }
    report = tmp_path / "scores.json"
    found = set()
    for more, (asked, document, embed, bytes_a_number) in settings.items():
        printed = call_main(eval_retrieval, *more, "--beir", folder, "--json", report)
        (scores,) = json.loads(report.read_text()).values()
        number = np.float16 if bytes_a_number == 2 else np.float32
        expected = reciprocal_rank_by_loops(embed, asked, document, passages, queries, number)
        assert scores["MRR@10"] == pytest.approx(expected, abs=0.01)
        assert f"{scores['MRR@10']:.2f}" in printed
        assert scores["bytes"] == 32 * bytes_a_number
        assert scores["passages/s"] > 0
        if bytes_a_number == 4:
            found.add(round(expected, 3))
    assert len(found) == 5  # each makes a difference


def test_a_query_that_is_a_passage_does_not_find_itself(call_main, models_folder, tmp_path):
    """As in ArguAna: the queries are passages, under the same ids, answered by the next nearest."""
    folder = beir(tmp_path / "beir")
    texts = demo.sentences(60)
    vectors = normalized(load_encoder(models_folder / "bert").eval(), texts)
    nearest = []
    for i, query in enumerate(vectors[:12]):
        cosines = [sum(a * b for a, b in zip(query, vector)) for vector in vectors]
        nearest.append(max((j for j in range(60) if j != i), key=cosines.__getitem__))
    report = tmp_path / "scores.json"
    for prefix, expected in (("q", 50), ("d", 100)):
        queries = [dict(_id=f"{prefix}{i}", text=texts[i]) for i in range(12)]
        write_json_lines(folder / "queries.jsonl", queries)
        lines = [f"{prefix}{i}\td{nearest[i]}\t1\n" for i in range(12)]
        (folder / "qrels" / "test.tsv").write_text("".join(lines))
        call_main(eval_retrieval, models_folder / "bert", "--beir", folder, "--json", report)
        (scores,) = json.loads(report.read_text()).values()
        assert scores["MRR@10"] == pytest.approx(expected)


def test_bad_input_gets_one_line_and_status_2(fails, models_folder, tmp_path):
    folder = beir(tmp_path / "beir")
    wide = models_folder / "wide"
    base = (eval_retrieval, wide, "--beir", folder)
    assert "no such file" in fails(*base, "--split", "none")
    line = fails(*base, "--document-model", models_folder / "bert")
    assert "dimension 32, expected 48" in line
    assert "--memory: '0' is not a number above 0" in fails(*base, "--memory", 0)
    assert "--device tpu" in fails(*base, "--device", "tpu")
    assert "BEIR folder" in fails(eval_retrieval, wide, "--beir", tmp_path / "nowhere")
    (folder / "queries.jsonl").write_text("{no json\n")
    assert "queries.jsonl:1: '{no json'" in fails(*base)
