"""Valid files with some bytes or JSON values changed at random: every reader either reads them, or
raises UserError that names the file. `--fuzz-examples 5000` tries more of them."""

import gzip
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import tar_of
from hypothesis import given, settings
from hypothesis import strategies as st

import common
import dse
import eval_retrieval

HYPOTHESIS = dict(deadline=None, database=None, derandomize=True)
PIECES = (
    *(b"", b"\0", b"\n", b"\r", b"\t", b'"', b",", b":", b"{", b"}", b"[", b"]", b"-", b"0"),
    *("\u2028".encode(), "\ufeff".encode(), b"\xff", b"\xed\xa0\x80", b"\\ud800", b"1e999", b"NaN"),
    *(b"9" * 5000, b"[" * 100_000, b"\n" * 5000, b"\t" * 5000, b"x" * 100_000),
)
VALUES = (
    *(None, True, False, 0, -1, 1, 1.5, 1e308, float("nan"), "", "text", "5", "\ud800", "../.."),
    *([], [1, "a", None], {}, {"a": 1}, [[[]]], "x" * 10_000, -(2**63), "\0"),
)


@st.composite
def other_bytes(draw, data):
    """data, of which parts are removed, repeated, replaced or inserted, at one to three places."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        end = start + draw(st.integers(0, 60))
        flipped = bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in data[start : start + 1])
        piece = draw(st.sampled_from((data[start:end], flipped, *PIECES)))
        data = data[:start] + piece + data[draw(st.sampled_from((start, start + 1, end))) :]
    return data


def places(document, path=()):
    """The paths to all values of a JSON document."""
    yield path
    if isinstance(document, (dict, list)):
        for key in document if isinstance(document, dict) else range(len(document)):
            yield from places(document[key], (*path, key))


@st.composite
def other_values(draw, data):
    """A JSON document with a value of another type, or without a value, as bytes."""
    document = {"root": json.loads(data)}
    *parents, last = draw(st.sampled_from(list(places(document))[1:]))
    parent = document
    for key in parents:
        parent = parent[key]
    if parents and draw(st.booleans()):
        del parent[last]
    else:
        parent[last] = draw(st.sampled_from(VALUES))
    return json.dumps(document["root"]).encode()


def changed(name, data):
    """Changes of the bytes of a file, and of the values of its JSON, as (name, data)."""
    ways = other_bytes(data)
    if ".json" in name:
        document = data if name.endswith(".json") else data.splitlines()[0]
        ways |= other_values(document).map(lambda other: data.replace(document, other))
    return st.tuples(st.just(name), ways)


@pytest.fixture
def fuzz(request, tmp_path):
    """fuzz({name: content}, read, check): change one file at a time, check what read() gives."""

    def call(files, read, check):
        def write_all():
            for name, data in files.items():
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_bytes(data)

        write_all()
        check(read())

        @settings(max_examples=request.config.getoption("--fuzz-examples"), **HYPOTHESIS)
        @given(st.one_of([changed(name, data) for name, data in files.items()]))
        def check_one(example):
            write_all()
            (tmp_path / example[0]).write_bytes(example[1])
            try:
                check(read())
            except common.UserError as error:
                assert str(tmp_path) in str(error)

        check_one()

    return call


def is_sound(content):
    """Texts are not blank and can be encoded, numbers are from 0 to 5, nothing is empty."""
    if isinstance(content, str):
        assert content.strip().encode()
    elif isinstance(content, (int, float)):
        assert 0 <= content <= 5
    else:
        assert content
        for part in content:
            is_sound(part)


SENTENCES = "\ufeffA boy runs.\r\n\nA girl eats \u2028 an apple.\n\U0001f600\n"
TRIPLETS = 'sent0,sent1,hard_neg\n"a, b","say ""hi""",it\'s\n\nx,"two\nlines",\U0001f600\n'
SCORED = "sentence1\tsentence2\tscore\nA boy runs.\tA lad \u00e9\t4.5\nIt's 'x'\t\U0001f600\t0\n"


@pytest.mark.parametrize("name", ["sentences", "sentences.gz", "triplets", "scored_pairs"])
def test_texts(fuzz, tmp_path, name):
    kind = name.removesuffix(".gz")
    data = dict(sentences=SENTENCES, triplets=TRIPLETS, scored_pairs=SCORED)[kind].encode()
    data = gzip.compress(data, mtime=0) if name.endswith(".gz") else data
    fuzz({name: data}, lambda: getattr(common, f"read_{kind}")(tmp_path / name), is_sound)


def test_sts(fuzz, tmp_path):
    rows = b"g\tf\ty\t1\t4.5\tA boy.\tA lad \xc3\xa9\ng\tf\ty\t2\t0\tA girl.\tA dog.\n"
    files = {f"data/STS/STSBenchmark/sts-{split}.csv": rows for split in ("dev", "test")}
    for year in range(12, 17):
        files[f"data/STS/STS{year}-en-test/STS.input.x.txt"] = b"a\tb\nc\td\ne\tf\n"
        files[f"data/STS/STS{year}-en-test/STS.gs.x.txt"] = b"1\n\n2.5\n"
    sick = b"pair_ID\tA\tB\trelatedness_score\n1\ta b\tc\t1.5\n"
    files["data/SICK/SICK_test_annotated.txt"] = sick
    read = common.read_sts
    fuzz(files, lambda: [*read(tmp_path).values(), *read(tmp_path, "dev").values()], is_sound)


@pytest.mark.parametrize("task", ["mrpc", "stsb", "mnli"])
def test_glue(fuzz, tmp_path, task):
    paths, columns, classes = dse.TASKS[task]
    high, low, *_ = ("4.5", "0") if task == "stsb" else classes
    rows = [columns, ("A boy \u00e9.", "A lad.", high), ("It's", "\U0001f600 eats", low)]
    table = "\n".join(map("\t".join, rows)).encode()
    files = {f"{name}.tsv": table for names in paths.values() for name in names.split()}
    lines = [dict(text1=a, text2=b, label=number) for number, (a, b, _) in enumerate(rows[1:])]
    hub = tmp_path / "train.jsonl"
    files[hub.name] = "\n".join(map(json.dumps, lines)).encode()

    def read():
        sets = dse.read_task(tmp_path, task).values()
        return dse.read_pairs(hub, task), [(pairs, labels.tolist()) for pairs, labels in sets]

    fuzz(files, read, is_sound)


def test_beir(fuzz, tmp_path):
    texts = b"\n".join(b'{"_id": "%d", "title": "a", "text": "text"}' % i for i in range(5))
    qrels = b"query-id\tcorpus-id\tscore\n0\t1\t1\n1\t3\t2\n1\t4\t0\n"

    def read():
        passages = [text for _, text in eval_retrieval.read_texts(tmp_path, "corpus.jsonl")]
        return passages, *eval_retrieval.read_split(tmp_path, "test")

    def check(found):
        passages, queries, answers = found
        assert len(queries) == len(answers)
        assert "".join([*passages, *queries]).encode()
        for scores in answers:
            assert max(scores.values()) > 0 and set(scores) <= set(range(len(passages)))

    fuzz({"corpus.jsonl": texts, "queries.jsonl": texts, "qrels/test.tsv": qrels}, read, check)


def test_tar_files(fuzz, tmp_path, monkeypatch):
    monkeypatch.setattr(common.tempfile, "tempdir", str(tmp_path))

    def check(folder):
        names = {path.name for path in tmp_path.iterdir()} - {"a.tar"}
        assert folder.name in names and all(name.startswith(common.PROGRAM) for name in names)

    tar = tmp_path / "a.tar"
    fuzz({"a.tar": tar_of("STS/a.txt", b"")}, lambda: common.resolve_data(str(tar)), check)


SETTINGS = ["sentence_bert_config.json", "config_sentence_transformers.json"]
MODULES = ["modules.json", "1_Pooling/config.json", "2_Dense/config.json"]
WEIGHTS = ["model.safetensors", "2_Dense/model.safetensors"]
PICKLED = ["2_Dense/pytorch_model.bin"]


@pytest.mark.parametrize("parts", [["config.json"], SETTINGS, MODULES, WEIGHTS, PICKLED])
def test_models(fuzz, models_folder, tmp_path, monkeypatch, parts):
    shutil.copytree(models_folder / "pooler", tmp_path, dirs_exist_ok=True)
    prompts = dict(prompts=dict(query="find: "), default_prompt_name="query")
    common.write_json(tmp_path / SETTINGS[1], prompts)
    if parts == PICKLED:
        torch.save(common.load_file(tmp_path / WEIGHTS[1]), tmp_path / PICKLED[0])
        (tmp_path / WEIGHTS[1]).unlink()
    if parts in (SETTINGS, MODULES, PICKLED):  # the transformer is loaded once
        transformer = common.load_transformer(tmp_path)
        monkeypatch.setattr(common, "load_transformer", lambda *_: transformer)

    def check(encoder):
        assert encoder.dimension > 0 and 3 <= encoder.max_length <= 128
        assert encoder.pooling in ("mean", "cls", "lasttoken")
        assert isinstance(encoder.prompt, str)
        assert all(value.isfinite().all() for value in encoder.parameters())

    files = {name: (tmp_path / name).read_bytes() for name in parts}
    fuzz(files, lambda: common.load_encoder(tmp_path), check)


def test_runs(fuzz, tmp_path):
    args = dict(output=str(tmp_path), resume=True, overwrite=False, student=None, layers=[1], lr=1)

    def resume():
        run = common.Run(SimpleNamespace(**args), dev=[], texts=["a", "b"])
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        run.resume("distill", 4, [model], optimizer)
        return run, model, optimizer

    run, model, optimizer = resume()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    run.checkpoint(50.0, 1, 1, [model], optimizer)
    files = {name: (tmp_path / name).read_bytes() for name in ("args.json", common.CHECKPOINT)}
    fuzz(files, resume, lambda found: common.table(found[0].scores))
