"""eval_retrieval.py: the reference figures on the real data, plain loops, what it refuses."""

import gzip
import json

import numpy as np
import pytest
from test_retrieval import beir, without_two_words

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


def reciprocal_rank_by_loops(encoder, document, passages, queries):
    """MRR@10 where passages i and i + 12 answer query i."""
    vectors = normalized(document, passages)
    total = 0
    for i, query in enumerate(normalized(encoder, queries)):
        cosines = [sum(a * b for a, b in zip(query, vector)) for vector in vectors]
        best = np.argsort(-np.array(cosines))[:10].tolist()
        ranks = [rank for rank, j in enumerate(best, 1) if j in (i, i + 12)]
        total += 1 / ranks[0] if ranks else 0
    return 100 * total / len(queries)


def test_the_program_agrees_with_plain_loops(call_main, models_folder, tmp_path):
    """With a gzipped corpus, with passages in two bytes, with a model of their own for passages."""
    folder = beir(tmp_path / "beir")
    corpus = folder / "corpus.jsonl"
    (folder / "corpus.jsonl.gz").write_bytes(gzip.compress(corpus.read_bytes()))
    corpus.unlink()
    passages = demo.sentences(60)
    queries = [without_two_words(text) for text in passages[:12]]
    encoder = load_encoder(models_folder / "bert").eval()
    other = load_encoder(models_folder / "distilbert").eval()
    settings = {
        (): (encoder, 4),
        ("--fp16",): (encoder, 2),
        ("--document-model", models_folder / "distilbert"): (other, 4),
    }
    report = tmp_path / "scores.json"
    found = set()
    for more, (document, bytes_a_number) in settings.items():
        options = ("--beir", folder, "--json", report, *more)
        printed = call_main(eval_retrieval, models_folder / "bert", *options)
        (scores,) = json.loads(report.read_text()).values()
        expected = reciprocal_rank_by_loops(encoder, document, passages, queries)
        assert scores["MRR@10"] == pytest.approx(expected, abs=0.01)
        assert f"{scores['MRR@10']:.2f}" in printed
        assert scores["bytes"] == 32 * bytes_a_number
        assert scores["passages/s"] > 0
        found.add(round(expected, 3))
    assert len(found) == 2  # the other model for passages makes a difference


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
