"""Downloads by the real huggingface_hub client, from a local server that answers like the Hub."""

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from conftest import ROOT, tar_of
from safetensors.torch import load

# Each test starts Python anew, some of them several times.
pytestmark = pytest.mark.slow

DATA = "datasets/princeton-nlp/datasets-for-simcse"
WIKI, NLI, SENTEVAL = "wiki1m_for_simcse.txt", "nli_for_simcse.csv", "senteval.tar"
TRIPLETS = b"sent0,sent1,hard_neg\na boy plays,a lad plays,a cook eats\n"
BEIR = gzip.compress(b'{"_id": "0", "text": "a boy"}\n{"_id": "1", "text": "a lad"}\n')
COMMIT = "a" * 40
API = re.compile(r"/api/(models|datasets)/(.+?)(?:/(?:revision|tree)/[^/]+)?")


class Hub(BaseHTTPRequestHandler):
    """Serves `server.repositories`, {repository: {path: bytes}}; half, if in `broken`."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        path = self.path.split("?")[0]
        self.server.requests.append((self.command, path))
        if match := API.fullmatch(path):
            self.answer_api(match[1], match[2], is_tree="/tree/" in path)
        else:
            self.answer_file(path)

    do_HEAD = do_GET

    def answer(self, data, status=200, cut=False, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(data), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[: len(data) // 2] if cut else data)
            self.close_connection = True

    def answer_api(self, kind, name, is_tree):
        files = self.server.repositories.get(f"datasets/{name}" if kind == "datasets" else name)
        if files is None:
            self.answer(b"{}", 404, X_Error_Code="RepoNotFound")
            return
        siblings = [{"rfilename": path, "size": len(data)} for path, data in files.items()]
        content = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False}
        if is_tree:
            content = [
                dict(type="file", path=path, size=len(data), oid=hashlib.sha1(data).hexdigest())
                for path, data in files.items()
            ]
        self.answer(json.dumps(content).encode(), Content_Type="application/json")

    def answer_file(self, path):
        repository, _, rest = path.strip("/").partition("/resolve/")
        file = rest.partition("/")[2]  # after the revision
        data = self.server.repositories.get(repository, {}).get(file)
        if data is None:
            self.answer(b"", 404, X_Error_Code="EntryNotFound")
            return
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        cut = file in self.server.broken
        self.answer(data, cut=cut, ETag=etag, X_Repo_Commit=COMMIT)


def read_folder(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def pickled(folder):
    """The files of a model, whose own weights are pickled, as in older repositories."""
    files, weights = read_folder(folder), io.BytesIO()
    torch.save(load(files.pop("model.safetensors")), weights)
    return files | {"pytorch_model.bin": weights.getvalue()}


@pytest.fixture
def hub(models_folder):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    not_wanted = {"onnx/model.onnx": b"big", "pytorch_model.bin": b"also big"}
    lines = b"A boy plays a guitar.\nA cook eats an apple.\n"
    sts = tar_of("STS/STSBenchmark/sts-dev.csv", b"g\tf\ty\t1\t4.5\tA boy.\tA cook.\n" * 9)
    server.repositories = {
        DATA: {WIKI: lines * 300, SENTEVAL: sts, NLI: TRIPLETS},
        "datasets/some/one": {"README.md": b"", ".gitattributes": b"", "news.en": lines},
        "datasets/some/two": {"README.md": b"", "a.txt": lines, "b/c.txt": lines * 2},
        "datasets/some/beir": {"corpus.jsonl.gz": BEIR, "queries.jsonl.gz": BEIR},
        "datasets/some/beir-qrels": {"dev.tsv": b"query-id\tcorpus-id\tscore\n1\t0\t2\n"},
        "someone/model": read_folder(models_folder / "mean") | not_wanted,
        "someone/old": pickled(models_folder / "pooler"),
    }
    for owner in ("princeton-nlp/unsup", "princeton-nlp/sup", "someone/sup"):
        server.repositories[f"{owner}-simcse-tiny"] = read_folder(models_folder / "bert")
    server.broken, server.requests = set(), []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def downloads(hub):
    return [path for command, path in hub.requests if command == "GET" and "/resolve/" in path]


CODE = """
import time
import eval_retrieval
from common import *
time.sleep = lambda seconds: None  # between the client's retries
for expression in sys.argv[1:]:
    try:
        print(eval(expression))
    except UserError as error:
        print("error:", *str(error).split())
"""


@pytest.fixture
def ask(hub, tmp_path):
    """ask(*expressions) in a new process, with the server as its Hub -> their values or errors."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(tmp_path / "hf"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HUB_DOWNLOAD_TIMEOUT": "5",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
    }

    def call(*expressions):
        command = [sys.executable, "-c", CODE, *expressions]
        options = dict(capture_output=True, text=True, timeout=300)
        process = subprocess.run(command, env=environment, cwd=ROOT, **options)
        assert process.returncode == 0, process.stderr
        return process.stdout.splitlines()

    return call


def test_sts_nli_and_wiki_are_downloaded_once_and_whole(ask, hub):
    """An error names the page to download from, and a broken download leaves nothing behind."""
    readers = {
        WIKI: f'len(read_sentences(resolve_data("{WIKI}")))',
        SENTEVAL: f'len(read_sts(resolve_data("{SENTEVAL}"), "dev")["dev"])',
        NLI: f'read_triplets(resolve_data("{NLI}"))',
    }
    hub.broken |= {WIKI, SENTEVAL, NLI}
    for name, line in zip(readers, ask(*readers.values())):
        assert line.startswith(f"error: {name}: "), line
        assert f"huggingface.co/{DATA}" in line
    hub.broken.clear()
    hub.requests.clear()
    expected = ["600", "9", "[['a boy plays', 'a lad plays', 'a cook eats']]"]
    assert ask(*readers.values()) == expected
    before = downloads(hub)
    assert len(before) == 3
    assert ask(*readers.values()) == expected
    assert downloads(hub) == before


def encoder(name):
    return f'(lambda e: (e.pooling, len(e.heads), e.normalize))(load_encoder("{name}"))'


# What is asked for, and its value or the parts of its error.
DOWNLOADS = {
    # OWNER/NAME where a data set has one file, OWNER/NAME:FILE where it has several
    'len(read_sentences("some/one"))': "2",
    'len(read_sentences("some/two:b/c.txt"))': "4",
    'read_sentences("some/two")': ("error: some/two: ", "some/two:FILE"),
    'read_sentences("some/two:d.txt")': ("error: some/two:d.txt: ",),
    'read_sentences("some/none")': ("error: some/none: ", "huggingface.co/datasets/some/none"),
    'read_sentences("mine.txt")': ("error: mine.txt: ",),
    'eval_retrieval.read_split("some/beir", "dev")': "(['a lad'], [{0: 2, 1: 0}])",
    # SimCSE's models have no modules.json; they are read as their authors do
    encoder("princeton-nlp/sup-simcse-tiny"): "('cls', 1, False)",
    encoder("princeton-nlp/unsup-simcse-tiny"): "('cls', 0, False)",
    encoder("someone/sup-simcse-tiny"): "('mean', 0, False)",
    encoder("someone/model"): "('mean', 0, True)",
    encoder("someone/old"): "('cls', 1, False)",
    encoder("someone/nothing"): ("error: someone/nothing: ", "huggingface.co/someone/nothing"),
}


def test_data_and_models_are_downloaded_by_name(ask, hub):
    """Pickled weights are downloaded only where there are no others."""
    for (expression, expected), line in zip(DOWNLOADS.items(), ask(*DOWNLOADS)):
        if isinstance(expected, str):
            assert line == expected, expression
        else:
            assert line.startswith(expected[0]) and expected[-1] in line, expression
    paths = [path for path in downloads(hub) if not path.startswith("/someone/old/")]
    files = {path.rpartition("/")[2] for path in paths}
    assert "model.safetensors" in files
    assert not files & {"pytorch_model.bin", "model.onnx"}
