"""Downloads by the real huggingface_hub client, from a local server that answers like the Hub."""

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import common

# Each test starts Python anew, some of them several times.
pytestmark = pytest.mark.slow

DATA = "datasets/princeton-nlp/datasets-for-simcse"
COMMIT = "a" * 40
NOT_PROVIDED = "no local path, and the Hugging Face Hub did not provide it ("
API = re.compile(r"/api/(models|datasets)/(.+?)(?:/(?:revision|tree)/[^/]+)?")


class Hub(BaseHTTPRequestHandler):
    """Serves `server.repositories`, {repository: {path: bytes}}.

    `server.broken`, {path: "short" or "other bytes"}, spoils some of them.
    """

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET(head=True)

    def do_GET(self, head=False):
        path = self.path.split("?")[0]
        self.server.requests.append((self.command, path))
        if match := API.fullmatch(path):
            self.answer_api(match[1], match[2], "/tree/" in path, head)
        else:
            self.answer_file(path, head)

    def answer(self, data, headers, head, cut=False, status=200):
        self.send_response(status)
        for name, value in {"Content-Length": len(data), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if not head:
            self.wfile.write(data[: len(data) // 2] if cut else data)
            self.close_connection = True

    def answer_api(self, kind, name, is_tree, head):
        repository = f"datasets/{name}" if kind == "datasets" else name
        files = self.server.repositories.get(repository)
        if files is None:
            data = b'{"error": "Repository not found"}'
            self.answer(data, {"X-Error-Code": "RepoNotFound"}, head, status=404)
            return
        if is_tree:
            content = []
            for path, data in files.items():
                oid = hashlib.sha1(data).hexdigest()
                content.append({"type": "file", "path": path, "size": len(data), "oid": oid})
        else:
            siblings = [{"rfilename": path, "size": len(data)} for path, data in files.items()]
            content = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False}
        self.answer(json.dumps(content).encode(), {"Content-Type": "application/json"}, head)

    def answer_file(self, path, head):
        repository, _, rest = path.strip("/").partition("/resolve/")
        file = rest.partition("/")[2]  # behind the revision
        data = self.server.repositories.get(repository, {}).get(file)
        if data is None:
            self.answer(b"", {"X-Error-Code": "EntryNotFound"}, head, status=404)
            return
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        broken = self.server.broken.get(file)
        if broken == "other bytes":
            data = bytes(len(data))
        self.answer(data, headers, head, cut=broken == "short")


def senteval_tar():
    rows = []
    for i in range(9):
        rows.append(f"g\tf\ty\t{i}\t{i % 5}.5\tA boy plays a guitar.\tA cook eats {i} apples.\n")
    data = "".join(rows).encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("STS/STSBenchmark/sts-dev.csv")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def read_folder(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def hub(models_folder):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    not_wanted = {"onnx/model.onnx": b"big", "pytorch_model.bin": b"also big"}
    server.repositories = {
        DATA: {
            "wiki1m_for_simcse.txt": b"A boy plays a guitar.\nA cook eats an apple.\n" * 300,
            "senteval.tar": senteval_tar(),
            "nli_for_simcse.csv": b"sent0,sent1,hard_neg\na boy plays,a lad plays,a cook eats\n",
        },
        "someone/model": read_folder(models_folder / "mean") | not_wanted,
        "princeton-nlp/sup-simcse-tiny": read_folder(models_folder / "bert"),
        "princeton-nlp/unsup-simcse-tiny": read_folder(models_folder / "bert"),
    }
    server.broken = {}
    server.requests = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def downloads(hub):
    """The paths of the files that have been downloaded."""
    return [path for command, path in hub.requests if command == "GET" and "/resolve/" in path]


@pytest.fixture
def ask(hub, tmp_path):
    """ask(expression, imports) in a new process -> (status, its last line).

    Its Hub is the server, its caches are empty at first. `imports` are modules of the project.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(tmp_path / "hf"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HUB_DOWNLOAD_TIMEOUT": "5",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
    }

    def call(expression, imports="common"):
        code = (
            f"import {imports}\n"
            "from support.command_line import run_main\n"
            f"run_main(lambda: print({expression}))\n"
        )
        process = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env=environment,
            cwd=Path(common.__file__).parent,
            timeout=300,
        )
        output = process.stdout if process.returncode == 0 else process.stderr
        lines = output.strip().splitlines()
        return process.returncode, lines[-1] if lines else ""

    return call


def test_sts_nli_and_wiki_are_downloaded_once(ask, hub):
    sentences = 'len(common.read_sentences(common.resolve("wiki1m_for_simcse.txt")))'
    triplets = 'common.read_triplets(common.resolve("nli_for_simcse.csv"))'
    senteval = 'common.read_sts(common.resolve("senteval.tar"), "dev")'
    assert ask(sentences) == (0, "600")
    assert ask(triplets) == (0, "[['a boy plays', 'a lad plays', 'a cook eats']]")
    assert ask(f'len({senteval}["STS-B dev"].scores)') == (0, "9")
    before = downloads(hub)
    assert len(before) == 3
    assert ask(sentences) == (0, "600")
    assert downloads(hub) == before


def test_a_data_set_is_downloaded_by_its_name(ask, hub):
    """OWNER/NAME where it has one file of data, OWNER/NAME:FILE where it has several."""
    lines = b"A boy plays.\nA cook eats.\n"
    about = {"README.md": b"about it", ".gitattributes": b""}
    hub.repositories["datasets/ffgcc/NEWS5M"] = about | {"news5m.en": lines}
    hub.repositories["datasets/some/two"] = about | {"a.txt": lines, "b/c.txt": lines * 2}
    read = 'len(common.read_sentences(common.resolve("{}")))'
    assert ask(read.format("ffgcc/NEWS5M")) == (0, "2")
    assert ask(read.format("some/two:b/c.txt")) == (0, "4")
    status, line = ask(read.format("some/two"))
    assert status == 2
    assert line == "error: some/two: 2 files (a.txt, b/c.txt); expected some/two:FILE"
    status, line = ask(read.format("some/none"))
    assert status == 2
    assert "huggingface.co/datasets/some/none" in line


def test_a_model_is_downloaded_with_its_pooling(ask, hub):
    how = "(lambda e: (e.pooling, e.normalize, e.dimension))"
    encoder = 'support.encoder.load_encoder("someone/model")'
    assert ask(f"{how}({encoder})", "support.encoder") == (0, "('mean', True, 32)")
    names = {path.rpartition("/")[2] for path in downloads(hub)}
    assert "model.safetensors" in names
    assert not names & {"pytorch_model.bin", "model.onnx"}


@pytest.mark.parametrize(
    "name, expected", [("sup-simcse-tiny", "('cls', 1)"), ("unsup-simcse-tiny", "('cls', 0)")]
)
def test_simcse_of_the_hub_is_read_at_cls(ask, name, expected):
    """These models have no modules.json; their authors read them so."""
    how = "(lambda e: (e.pooling, len(e.heads)))"
    encoder = f'support.encoder.load_encoder("princeton-nlp/{name}")'
    assert ask(f"{how}({encoder})", "support.encoder") == (0, expected)


@pytest.mark.parametrize("how", ["short", "other bytes"])
@pytest.mark.parametrize("file", ["wiki1m_for_simcse.txt", "senteval.tar"])
def test_a_broken_download_is_reported_and_not_kept(ask, hub, file, how):
    hub.broken[file] = how
    status, line = ask(f'common.resolve("{file}")')
    assert status == 2
    assert line.startswith(f"error: {file}: {NOT_PROVIDED}"), line
    assert f"put it at ./{file}" in line
    assert "princeton-nlp/datasets-for-simcse" in line
    hub.broken.clear()
    status, line = ask(f'common.resolve("{file}")')
    assert status == 0
    if file.endswith(".txt"):
        assert Path(line).read_bytes() == hub.repositories[DATA][file]
    else:
        assert (Path(line) / "STS" / "STSBenchmark" / "sts-dev.csv").exists()


def test_no_hub_no_such_model_no_such_file(ask, hub):
    status, line = ask('support.encoder.load_encoder("someone/nothing")', "support.encoder")
    assert status == 2
    assert line.startswith(f"error: someone/nothing: {NOT_PROVIDED}"), line
    assert "huggingface.co/someone/nothing" in line
    assert ask('common.resolve("mine.txt")') == (2, "error: mine.txt: no such file or folder")
    hub.server_close()
    hub.shutdown()
    status, line = ask('common.resolve("nli_for_simcse.csv")')
    assert status == 2
    assert NOT_PROVIDED in line
    assert "put it at ./nli_for_simcse.csv" in line


def test_glue_is_downloaded(ask, hub):
    same = {"text1": "A boy runs.", "text2": "A lad runs.", "label": 1, "idx": 0}
    other = {"text1": "A boy runs.", "text2": "It rains.", "label": 0, "idx": 1}
    rows = "".join(json.dumps(row) + "\n" for row in (same, other)).encode()
    unlabeled = "".join(json.dumps(row | {"label": -1}) + "\n" for row in (same, other)).encode()
    hub.repositories["datasets/SetFit/mrpc"] = {
        "train.jsonl": rows * 2,
        "validation.jsonl": rows,
        "test.jsonl": unlabeled,
    }
    labels = "{name: pairs.labels.tolist() for name, pairs in sets.items()}"
    mrpc = 'support.glue.read_task(None, "mrpc")'
    expected = "{'train': [1, 0, 1, 0], 'dev': [1, 0]}"
    assert ask(f"(lambda sets: {labels})({mrpc})", "support.glue") == (0, expected)
    status, line = ask('support.glue.read_task(None, "qnli")', "support.glue")
    assert status == 2
    assert "SetFit/qnli" in line
    assert "the Hugging Face Hub did not provide it (" in line
    assert "QNLI/train.tsv" in line


def test_beir_is_downloaded(ask, hub):
    corpus = (
        b'{"_id": "p", "title": "", "text": "A boy."}\n'
        b'{"_id": "q", "title": "T", "text": "Rain."}\n'
    )
    queries = b'{"_id": "1", "text": "Who?"}\n'
    hub.repositories["datasets/BeIR/small"] = {
        "corpus.jsonl.gz": gzip.compress(corpus),
        "queries.jsonl.gz": gzip.compress(queries),
    }
    qrels = b"query-id\tcorpus-id\tscore\n1\tq\t1\n"
    hub.repositories["datasets/BeIR/small-qrels"] = {"test.tsv": qrels}
    module = "support.retrieval"
    name = '"BeIR/small"'
    read = f'{module}.read_judged({name}, "test", {module}.read_queries({name}))[0].qrels'
    assert ask(read, module) == (0, "[{1: 1}]")
    assert ask(f"list({module}.passages({name}))", module) == (0, "[['A boy.', 'T Rain.']]")
