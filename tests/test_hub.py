"""Downloads by the real huggingface_hub client, from a local server that answers like the Hub."""

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
import torch
from conftest import ROOT
from safetensors.torch import load

# Each test starts Python anew, some of them several times.
pytestmark = pytest.mark.slow

DATA = "datasets/princeton-nlp/datasets-for-simcse"
WIKI, NLI, SENTEVAL = "wiki1m_for_simcse.txt", "nli_for_simcse.csv", "senteval.tar"
TRIPLETS = b"sent0,sent1,hard_neg\na boy plays,a lad plays,a cook eats\n"
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


def senteval_tar():
    data = b"g\tf\ty\t1\t4.5\tA boy plays.\tA cook eats.\n" * 9
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("STS/STSBenchmark/sts-dev.csv")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


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
    server.repositories = {
        DATA: {WIKI: lines * 300, SENTEVAL: senteval_tar(), NLI: TRIPLETS},
        "datasets/some/one": {"README.md": b"", ".gitattributes": b"", "news.en": lines},
        "datasets/some/two": {"README.md": b"", "a.txt": lines, "b/c.txt": lines * 2},
        "someone/model": read_folder(models_folder / "mean") | not_wanted,
        "someone/old": pickled(models_folder / "pooler"),
        "princeton-nlp/sup-simcse-tiny": read_folder(models_folder / "bert"),
        "princeton-nlp/unsup-simcse-tiny": read_folder(models_folder / "bert"),
    }
    server.broken, server.requests = set(), []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def downloads(hub):
    return [path for command, path in hub.requests if command == "GET" and "/resolve/" in path]


CODE = """
import time
from common import *
time.sleep = lambda seconds: None  # between the client's retries
for expression in sys.argv[1:]:
    try:
        print(eval(expression))
    except DataError as error:
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


def test_sts_nli_and_wiki_are_downloaded_once(ask, hub):
    expressions = [
        f'len(read_sentences(resolve("{WIKI}")))',
        f'len(read_sts(resolve("{SENTEVAL}"), "dev")["dev"])',
        f'read_triplets(resolve("{NLI}"))',
    ]
    expected = ["600", "9", "[['a boy plays'], ['a lad plays'], ['a cook eats']]"]
    assert ask(*expressions) == expected
    before = downloads(hub)
    assert len(before) == 3
    assert ask(*expressions) == expected
    assert downloads(hub) == before


def test_a_data_set_is_downloaded_by_its_name(ask):
    """OWNER/NAME where it has one file of data, OWNER/NAME:FILE where it has several."""
    names = ("some/one", "some/two:b/c.txt", "some/two", "some/two:d.txt", "some/none", "mine.txt")
    *sizes, several, no_file, no_repository, no_data = ask(
        *(f'len(training_sentences("{name}"))' for name in names)
    )
    assert sizes == ["2", "4"]
    assert several.startswith("error: some/two: ")
    assert "some/two:FILE" in several
    assert no_file.startswith("error: some/two:d.txt: ")
    assert no_repository.startswith("error: some/none: ")
    assert "huggingface.co/datasets/some/none" in no_repository
    assert no_data.startswith("error: mine.txt: ")


def encoder(name):
    return f'(lambda e: (e.pooling, len(e.heads), e.normalize))(load_encoder("{name}"))'


def test_models_are_downloaded_with_their_pooling(ask, hub):
    """Those of SimCSE have no modules.json; they are read as their authors do."""
    names = ("princeton-nlp/sup-simcse-tiny", "princeton-nlp/unsup-simcse-tiny", "someone/model")
    expected = ["('cls', 1, False)", "('cls', 0, False)", "('mean', 0, True)"]
    assert ask(*map(encoder, names)) == expected
    files = {path.rpartition("/")[2] for path in downloads(hub)}
    assert "model.safetensors" in files
    assert not files & {"pytorch_model.bin", "model.onnx"}


def test_pickled_weights_are_downloaded_where_there_are_no_others(ask):
    assert ask(encoder("someone/old")) == ["('cls', 1, False)"]


def test_a_broken_download_is_reported_and_not_kept(ask, hub):
    hub.broken |= {WIKI, SENTEVAL}
    expressions = [f'resolve("{name}")' for name in (WIKI, SENTEVAL)]
    for name, line in zip((WIKI, SENTEVAL), ask(*expressions)):
        assert line.startswith(f"error: {name}: "), line
        assert "huggingface.co/datasets/princeton-nlp/datasets-for-simcse" in line
    hub.broken.clear()
    wiki, senteval = map(Path, ask(*expressions))
    assert wiki.read_bytes() == hub.repositories[DATA][WIKI]
    assert (senteval / "STS" / "STSBenchmark" / "sts-dev.csv").exists()


def test_no_such_model_and_no_hub(ask, hub):
    (line,) = ask('load_encoder("someone/nothing")')
    assert line.startswith("error: someone/nothing: ")
    assert "huggingface.co/someone/nothing" in line
    hub.shutdown()
    hub.server_close()
    (line,) = ask(f'resolve("{NLI}")')
    assert line.startswith(f"error: {NLI}: ")
    assert "huggingface.co/datasets/princeton-nlp/datasets-for-simcse" in line
