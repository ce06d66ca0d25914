"""Valid files with some bytes or JSON values changed at random: every reader either reads them, or
raises DataError that names the file. `--fuzz-examples 5000` tries more of them."""

import copy
import gzip
import json
import resource
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import analyze
import common
import eval_sts
import eval_transfer
import sweep
from common import DataError
from support import encoder, glue, retrieval, retrieval_training
from support.records import digest, read_checkpoint, read_metrics, write_checkpoint
from support.run import Run
from support.views import read_wordnet

LONGEST_TIME = 2.0  # seconds to read one file
LARGEST_MEMORY = 300  # MB that a reader may take in all examples together
CHANGES = ("flip", "remove", "double", "insert")
PIECES = (
    *(b"\0", b"\n", b"\r", b"\t", b'"', b",", b":", b"{", b"}", b"[", b"]", b"\xff", b"-", b"0"),
    *("\u2028".encode(), "\ufeff".encode(), b"\xed\xa0\x80", b"\\ud800", b"1e999", b"NaN"),
    *(b"9" * 5000, b"[" * 100_000, b"\n" * 5000, b"\t" * 5000, b"x" * 100_000),
)
VALUES = (
    *(None, True, False, 0, -1, 1, 1.5, 10**400, 1e308, float("nan"), "", "text", "5", "\ud800"),
    *([], [1, "a", None], {}, {"a": 1}, [[[]]], "x" * 10_000, -(2**63), "\0", "../.."),
)


# ---- what is changed


@st.composite
def other_bytes(draw, data):
    """data with one to three changes."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        change = draw(st.sampled_from(CHANGES))
        start = draw(st.integers(0, max(0, len(data) - 1)))
        end = start + draw(st.integers(1, 60))
        if change == "flip" and data:
            data[start] ^= 1 << draw(st.integers(0, 7))
        elif change == "remove":
            del data[start:end]
        elif change == "double":
            data[start:start] = data[start:end]
        else:
            data[start:start] = draw(st.sampled_from(PIECES))
    return bytes(data)


def places(document, path=()):
    """The paths to all values of a JSON document."""
    yield path
    if isinstance(document, dict):
        for key, value in document.items():
            yield from places(value, (*path, key))
    elif isinstance(document, list):
        for number, value in enumerate(document):
            yield from places(value, (*path, number))


@st.composite
def other_types(draw, document):
    """A JSON document with one or two values of another type, or with a key less or more."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(list(places(document))))
        value = copy.deepcopy(draw(st.sampled_from(VALUES)))
        if not path:
            return value
        parent = document
        for key in path[:-1]:
            parent = parent[key]
        if draw(st.integers(0, 3)) == 0:
            if isinstance(parent, dict):
                del parent[path[-1]]
            else:
                parent.insert(path[-1], value)
        else:
            parent[path[-1]] = value
        if not isinstance(document, (dict, list)):
            break
    return document


@st.composite
def other_lines(draw, documents):
    """Lines of JSON, in one of which there is a value of another type."""
    documents = list(documents)
    number = draw(st.integers(0, len(documents) - 1))
    documents[number] = draw(other_types(documents[number]))
    return "".join(json.dumps(document) + "\n" for document in documents).encode()


def changed(name, data):
    """Changes of the bytes of a file, and of the values of its JSON."""
    ways = other_bytes(data)
    if name.endswith(".json"):
        document = json.loads(data)
        ways |= other_types(document).map(lambda value: json.dumps(value).encode())
    elif name.endswith(".jsonl"):
        ways |= other_lines([json.loads(line) for line in data.splitlines()])
    return ways


# ---- the check


@pytest.fixture
def fuzz(request):
    """fuzz(folder, files, read, check): change one of the files at a time, and read the folder.

    read() returns what check() accepts, or raises DataError, which names the file or its folder.
    """

    def call(folder, files, read, check):
        examples = request.config.getoption("--fuzz-examples")
        whole = {name: (folder / name).read_bytes() for name in files}
        check(read())
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        one_of = st.sampled_from(list(files)).flatmap(
            lambda name: st.tuples(st.just(name), changed(name, whole[name]))
        )

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=examples <= DEFAULT_EXAMPLES,
            suppress_health_check=list(HealthCheck),
        )
        @given(one_of)
        def check_one(example):
            name, data = example
            (folder / name).write_bytes(data)
            begin = time.process_time()
            try:
                check(read())
            except DataError as error:
                message = str(error)
                assert "\n" not in message
                assert len(message) < 2000
                assert str(folder) in message
            finally:
                (folder / name).write_bytes(whole[name])
            assert time.process_time() - begin < LONGEST_TIME

        check_one()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
        assert grown < LARGEST_MEMORY * 1024

    return call


DEFAULT_EXAMPLES = 200


def are_texts(values):
    assert all(isinstance(value, str) and value.strip() and value.encode() for value in values)


def is_scored(pairs):
    are_texts(pairs.first + pairs.second)
    assert len(pairs.first) == len(pairs.second) == len(pairs.scores) > 0
    assert all(0 <= score <= 5 for score in pairs.scores)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


ROWS = [
    ("A boy runs.", "A lad runs \u00e9.", 4.5),
    ("A girl eats.", "\U0001f600 eats", 0),
    ("It's 'x'", 'a "b"', 2.25),
]


# ---- the readers of common.py


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_sentences(fuzz, tmp_path, name):
    data = "\ufeffA boy runs.\r\n\nA girl eats \u2028 an apple.\n\U0001f600\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    fuzz(tmp_path, [name], lambda: common.read_sentences(tmp_path / name), are_texts)


def test_pairs(fuzz, tmp_path):
    write(tmp_path / "a.tsv", "".join(f"{a}\t{b}\n" for a, b, _ in ROWS))

    def check(sides):
        first, second = sides
        assert len(first) == len(second) > 0
        are_texts(first + second)

    fuzz(tmp_path, ["a.tsv"], lambda: common.read_pairs(tmp_path / "a.tsv"), check)


def test_triplets(fuzz, tmp_path):
    rows = '"a, b","say ""hi""",it\'s\n\nx,"two\nlines",\U0001f600\n'
    write(tmp_path / "a.csv", "sent0,sent1,hard_neg\n" + rows)

    def check(triplets):
        assert all(len(row) == 3 for row in triplets)
        are_texts([text for row in triplets for text in row])

    fuzz(tmp_path, ["a.csv"], lambda: common.read_triplets(tmp_path / "a.csv"), check)


def test_scored_pairs(fuzz, tmp_path):
    rows = "".join(f"{a}\t{b}\t{score}\n" for a, b, score in ROWS)
    write(tmp_path / "a.tsv", "sentence1\tsentence2\tscore\n" + rows)
    fuzz(tmp_path, ["a.tsv"], lambda: common.read_scored_pairs(tmp_path / "a.tsv"), is_scored)


def test_scored_pairs_of_two_files(fuzz, tmp_path):
    files = {"STS.input.x.txt": "a\tb\nc\td\ne\tf\n", "STS.gs.x.txt": "1\n\n2.5\n"}
    for name, text in files.items():
        write(tmp_path / name, text)
    paths = tmp_path / "STS.input.x.txt", tmp_path / "STS.gs.x.txt"
    fuzz(tmp_path, files, lambda: eval_sts.read_sts_task(*paths, 0, 5), is_scored)


# ---- SentEval


def senteval(root):
    """A small folder of SentEval -> the names of its files."""
    files = {}
    for split in ("train", "dev", "test"):
        rows = [f"g\tf\ty\t{i}\t{score}\t{a}\t{b}\n" for i, (a, b, score) in enumerate(ROWS)]
        files[f"STS/STSBenchmark/sts-{split}.csv"] = "".join(rows)
        files[f"SST/binary/sentiment-{split}"] = "good\t1\nbad\t0\n"
        files[f"SNLI/s1.{split}"] = files[f"SNLI/s2.{split}"] = "a b\nc\n"
        files[f"SNLI/labels.{split}"] = "entailment\nneutral\n"
    for year in common.STS_YEARS:
        files[f"STS/{year}-en-test/STS.input.x.txt"] = "a\tb\nc\td\n"
        files[f"STS/{year}-en-test/STS.gs.x.txt"] = "1\n2.5\n"
    labels = ("NEUTRAL", "ENTAILMENT", "CONTRADICTION")
    sick = [f"{i}\ta b\tc\t{i}.5\t{label}\n" for i, label in enumerate(labels)]
    for name in eval_transfer.SICK_FILES.values():
        files[name] = "pair_ID\tA\tB\trelatedness_score\tentailment_judgment\n" + "".join(sick)
    for task, names in eval_transfer.POLARITY_FILES.items():
        files |= {f"{task}/{name}": f"{name} a\nb\n" for name in names}
    for name in eval_transfer.LAYOUTS["TREC"].files.values():
        files[name] = "NUM:count How many ?\nHUM:ind Who ?\n"
    for name in eval_transfer.LAYOUTS["MRPC"].files.values():
        files[name] = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t1\t2\ta\tb\n0\t3\t4\tc\td\n"
    for name, text in files.items():
        write(root / name, text)
    return files


def test_senteval_similarity(fuzz, tmp_path):
    files = senteval(tmp_path)
    names = [name for name in files if name.startswith(("STS/", "SICK/SICK_test"))]

    def read():
        return [*common.read_sts(tmp_path).values(), *common.read_sts(tmp_path, "dev").values()]

    def check(sets):
        for pairs in sets:
            is_scored(pairs)

    fuzz(tmp_path, names, read, check)


def test_senteval_transfer(fuzz, tmp_path):
    files = senteval(tmp_path)

    def read():
        return {task: eval_transfer.read_task(tmp_path, task) for task in eval_transfer.TASKS}

    def check(data):
        for splits in data.values():
            for split in splits.values():
                assert len(split.first) == len(split.labels) > 0
                assert split.second is None or len(split.second) == len(split.first)
        eval_transfer.number_sentences(data)

    fuzz(tmp_path, files, read, check)


# ---- GLUE and BEIR


@pytest.mark.parametrize("task", glue.TASKS)
def test_glue(fuzz, tmp_path, task):
    names, classes = glue.TASKS[task][:3], glue.TASKS[task].classes
    files = {}
    for number, (a, b, score) in enumerate(ROWS):
        label = classes[number % len(classes)] if classes else score
        for paths in glue.FILES[task].values():
            for path in paths:
                header = "\t".join(["index", *names]) + "\n"
                row = f"{number}\t{a}\t{b}\t{label}\n"
                files[path] = files.get(path, header) + row
    for path, text in files.items():
        write(tmp_path / path, text.replace('"', ""))

    def check(sets):
        assert {"train", "dev"} <= set(sets)
        for pairs in sets.values():
            are_texts(pairs.first + pairs.second)
            assert len(pairs.first) == len(pairs.second) == len(pairs.labels)
            limit = len(classes) - 1 if classes else 5
            assert ((pairs.labels >= 0) & (pairs.labels <= limit)).all()

    fuzz(tmp_path, files, lambda: glue.read_task(tmp_path, task), check)


def test_glue_of_the_hub(fuzz, tmp_path):
    lines = [dict(text1=a, text2=b, label=number % 2) for number, (a, b, _) in enumerate(ROWS)]
    write(tmp_path / "train.jsonl", "".join(json.dumps(line) + "\n" for line in lines))

    def check(pairs):
        if pairs is not None:  # a label of -1 stands for none
            are_texts(pairs.first + pairs.second)
            assert set(pairs.labels) <= {0, 1}

    path = tmp_path / "train.jsonl"
    fuzz(tmp_path, ["train.jsonl"], lambda: glue.read_pairs(path, "mrpc"), check)


def beir(root):
    corpus = [dict(_id=f"d{i}", title="a title", text=f"passage {i}") for i in range(5)]
    queries = [dict(_id=f"q{i}", text=f"query {i}") for i in range(3)]
    qrels = "query-id\tcorpus-id\tscore\nq0\td0\t1\nq1\td3\t2\nq1\td4\t0\n"
    for name, rows in (("corpus", corpus), ("queries", queries)):
        write(root / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write(root / "qrels" / "test.tsv", qrels)
    write(root / "negatives.tsv", "q0\td1\td2\nq1\td1\td2\td0\n")
    return ["corpus.jsonl", "queries.jsonl", "qrels/test.tsv"]


def test_beir(fuzz, tmp_path):
    files = beir(tmp_path)

    def read():
        judged, count = retrieval.read_judged(tmp_path, "test", retrieval.read_queries(tmp_path))
        texts = [text for chunk in retrieval.passages(tmp_path, 2) for text in chunk]
        assert len(texts) == count
        return judged

    def check(judged):
        assert len(judged.names) == len(judged.texts) == len(judged.qrels) == len(judged.own) > 0
        for text in judged.texts:
            assert isinstance(text, str)
            text.encode()
        found = torch.zeros(len(judged.names), 3, dtype=torch.long)
        assert all(np.isfinite(value) for value in retrieval.metrics(found, judged).values())

    fuzz(tmp_path, files, read, check)


def test_hard_negatives(fuzz, tmp_path):
    beir(tmp_path)
    numbers = np.arange(5)
    data = retrieval_training.TrainingData(numbers, ["q0", "q1"], ["", ""], [[0], [3]], [[0], [3]])
    path = tmp_path / "negatives.tsv"

    def check(negatives):
        assert negatives.shape == (2, 2)
        assert set(negatives.ravel().tolist()) <= set(range(5))

    def read():
        return retrieval_training.read_negatives(path, tmp_path, data, 2)

    fuzz(tmp_path, ["negatives.tsv", "corpus.jsonl"], read, check)


# ---- models


@pytest.mark.parametrize("pickled", [False, True])
def test_modules(fuzz, models_folder, tmp_path, monkeypatch, pickled):
    """modules.json and its parts; the transformer itself is loaded once."""
    folder = tmp_path / "model"
    shutil.copytree(models_folder / "pooler", folder)
    transformer = encoder.load_transformer("model", folder)[:2]
    monkeypatch.setattr(encoder, "load_transformer", lambda *_: (*transformer, None))
    parts = ["modules.json", "sentence_bert_config.json"]
    parts += ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
    if pickled:
        dense = folder / "2_Dense"
        torch.save(load_file(dense / "model.safetensors"), dense / "pytorch_model.bin")
        (dense / "model.safetensors").unlink()
        parts = ["2_Dense/pytorch_model.bin"]

    def check(found):
        assert found.dimension >= 1
        assert found.max_length >= encoder.SHORTEST_INPUT
        assert found.pooling in ("mean", "cls") or found.pooling.layers

    fuzz(folder, parts, lambda: encoder.load_encoder(folder), check)


def test_modules_of_a_layer_pooling(fuzz, models_folder, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    encoder.load_encoder(models_folder / "bert", encoder.LayerPooling((1, 4), "max")).save(folder)
    transformer = encoder.load_transformer("model", folder)
    monkeypatch.setattr(encoder, "load_transformer", lambda *_: transformer)

    def check(found):
        assert found.dimension >= 1

    fuzz(folder, ["modules.json"], lambda: encoder.load_encoder(folder), check)


# ---- runs and sweeps


def arguments(folder):
    return SimpleNamespace(
        **dict(output=str(folder), resume=True, overwrite=False, device="cpu", precision="fp32"),
        **dict(seed=0, lr=0.1, teacher_layers=[1, 2], name="x", pooling=None),
    )


def a_run(folder):
    run = Run(arguments(folder))
    run.start()
    for step in range(4):
        run.log(stage="distill", step=step, loss=0.5, dev=50.0 + step)
    run.state.update(stage="distill", step=3, best=53.0, best_step=3, meter=[{"loss": 1.0}])
    run.scores["student before"] = {"dev": 50.0}
    run.checkpoint([torch.nn.Linear(2, 2)])
    return run


def test_arguments(fuzz, tmp_path):
    a_run(tmp_path)

    def read():
        run = Run(arguments(tmp_path))
        run.start()
        return run

    def check(run):
        assert not run.is_new()

    fuzz(tmp_path, ["args.json"], read, check)


def test_checkpoint(fuzz, tmp_path):
    a_run(tmp_path)
    file = "checkpoint/state.safetensors"
    tensors, state = read_checkpoint(tmp_path / file)

    def check(found):
        assert found[1] == state
        assert all(torch.equal(found[0][name], tensors[name]) for name in tensors)

    fuzz(tmp_path, [file], lambda: read_checkpoint(tmp_path / file), check)


def test_state_of_a_checkpoint(fuzz, tmp_path):
    """Its JSON has other types, and the checksum is right."""
    _, state = read_checkpoint(a_run(tmp_path).file)
    write(tmp_path / "state.json", json.dumps(state))

    def read():
        text = (tmp_path / "state.json").read_text("utf-8", "replace")
        tensors = {"a": torch.ones(2)}
        save_file(tensors, tmp_path / "x", {"state": text, "sha256": digest(tensors, text)})
        return read_checkpoint(tmp_path / "x")[1]

    def check(state):
        write_checkpoint(tmp_path / "y", {}, state)
        common.table(state["scores"])

    fuzz(tmp_path, ["state.json"], read, check)


def test_metrics(fuzz, tmp_path):
    a_run(tmp_path)
    path = tmp_path / "metrics.jsonl"

    def read():
        return list(read_metrics(path)), analyze.read_dev_scores(path), sweep.best_dev(tmp_path)

    def check(found):
        entries, (steps, scores), (dev, _) = found
        assert entries
        assert len(steps) == len(scores) > 0
        assert dev is None or isinstance(dev, (int, float))
        json.dumps(steps + scores)

    fuzz(tmp_path, ["metrics.jsonl"], read, check)


def test_sweeps(fuzz, tmp_path):
    command = dict(script="x.py", settings="lr=1,2", arguments=["--demo"])
    write(tmp_path / "sweep.json", json.dumps(command))
    lines = []
    for lr, error in (("1", None), ("2", "the loss is nan")):
        result = sweep.Result(f"lr={lr}", {"lr": lr}, 1.0, 3, error, 2.5)
        lines.append(json.dumps(result._asdict()) + "\n")
    write(tmp_path / "sweep.jsonl", "".join(lines))

    def read():
        lock, results = sweep.open_folder(tmp_path, command, overwrite=False)
        lock.close()
        return list(results.values())

    def check(results):
        sweep.markdown(sweep.make_rows(results), [])

    fuzz(tmp_path, ["sweep.json", "sweep.jsonl"], read, check)


def test_scores_of_runs(fuzz, tmp_path):
    rows = {"teacher": {"dev": 90.0, "mean": 80.0}, "student": {"dev": 85.0, "mean": 70.0}}
    write(tmp_path / glue.SCORES, json.dumps({"mrpc": rows}))

    def check(tables):
        if tables:
            common.table(glue.average(tables))

    fuzz(tmp_path, [glue.SCORES], lambda: glue.read_scores([tmp_path]), check)


# ---- WordNet


def test_wordnet(fuzz, tmp_path):
    files = []
    for part in ("noun", "verb", "adj", "adv"):
        data = "  1 licence\n00000001 03 n 02 dog 0 hound 0 000 | an animal\n"
        write(tmp_path / f"data.{part}", data)
        write(tmp_path / f"index.{part}", "  1 licence\ndog n 1 1 @ 1 1 00000001\n")
        files += [f"data.{part}", f"index.{part}"]

    def check(synonyms):
        assert all(isinstance(word, str) for words in synonyms.values() for word in words)

    fuzz(tmp_path, files, lambda: read_wordnet(tmp_path), check)
