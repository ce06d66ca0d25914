"""The hub path, with the real huggingface_hub client against a server on 127.0.0.1 that answers as the hub does."""
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

DATA, COMMIT = "datasets/princeton-nlp/datasets-for-simcse", "a" * 40


class Hub(BaseHTTPRequestHandler):
    """Files of `server.repositories` {repository: {path: bytes}}; `server.broken` {path: "short" or "other bytes"} spoils them."""

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET(head=True)

    def answer(self, data, headers=(), head=False, cut=False, status=200):
        self.send_response(status)
        for name, value in {"Content-Length": len(data), **dict(headers)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if not head:
            self.wfile.write(data[:len(data) // 2] if cut else data)
            self.close_connection = True

    def do_GET(self, head=False):
        path = self.path.split("?")[0]
        self.server.requests.append((self.command, path))
        info = re.fullmatch(r"/api/(models|datasets)/(.+?)(?:/(?:revision|tree)/[^/]+)?", path)
        if info:
            name = ("datasets/" if info[1] == "datasets" else "") + info[2]
            files = self.server.repositories.get(name)
            if files is None:
                return self.answer(b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, head, status=404)
            if "/tree/" in path:
                tree = [{"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()} for file, data in files.items()]
                return self.answer(json.dumps(tree).encode(), {"Content-Type": "application/json"}, head)
            siblings = [{"rfilename": file, "size": len(data)} for file, data in files.items()]
            return self.answer(json.dumps({"id": info[2], "sha": COMMIT, "siblings": siblings, "private": False}).encode(),
                               {"Content-Type": "application/json"}, head)
        repository, _, file = path.strip("/").partition("/resolve/")
        file = file.partition("/")[2]
        data = self.server.repositories.get(repository, {}).get(file)
        if data is None:
            return self.answer(b"", {"X-Error-Code": "EntryNotFound"}, head, status=404)
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        broken = self.server.broken.get(file)
        self.answer(bytes(len(data)) if broken == "other bytes" else data, headers, head, cut=broken == "short")


@pytest.fixture
def hub(models_folder):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("STS/STSBenchmark/sts-dev.csv")
        rows = b"".join(b"g\tf\ty\t%d\t%d.5\tA boy plays a guitar.\tA cook eats %d apples.\n" % (i, i % 5, i) for i in range(9))
        info.size = len(rows)
        archive.addfile(info, io.BytesIO(rows))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    model = {str(path.relative_to(models_folder / "mean")): path.read_bytes() for path in (models_folder / "mean").rglob("*") if path.is_file()}
    server.repositories = {
        DATA: {"wiki1m_for_simcse.txt": b"A boy plays a guitar.\nA cook eats an apple.\n" * 300, "senteval.tar": buffer.getvalue(),
               "nli_for_simcse.csv": b"sent0,sent1,hard_neg\na boy plays,a lad plays,a cook eats\n" * 1},
        "someone/model": model | {"onnx/model.onnx": b"big", "pytorch_model.bin": b"also big"}}
    server.broken, server.requests = {}, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


@pytest.fixture
def ask(hub, tmp_path):
    """ask(expression of common) in a new process whose hub is the server and whose caches are empty at first -> (status, last line)."""
    def call(expression):
        code = f"import common\ncommon.run_main(lambda: print({expression}))"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | {
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "HF_HUB_DOWNLOAD_TIMEOUT": "5", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=Path(common.__file__).parent, timeout=300)
        output = process.stdout if process.returncode == 0 else process.stderr
        return process.returncode, output.strip().splitlines()[-1] if output.strip() else ""
    return call


def test_sts_nli_and_wiki_are_found(ask, hub):
    assert ask('len(common.read_sentences(common.resolve("wiki1m_for_simcse.txt")))') == (0, "600")
    assert ask('common.read_triplets(common.resolve("nli_for_simcse.csv"))') == (0, "[['a boy plays', 'a lad plays', 'a cook eats']]")
    assert ask('len(common.read_sts(common.resolve("senteval.tar"), "dev")["STS-B dev"].scores)') == (0, "9")
    downloads = [path for command, path in hub.requests if command == "GET" and "/resolve/" in path]
    assert len(downloads) == 3
    assert ask('len(common.read_sentences(common.resolve("wiki1m_for_simcse.txt")))') == (0, "600")
    assert [path for command, path in hub.requests if command == "GET" and "/resolve/" in path] == downloads  # once for all


def test_a_model_is_found_with_its_pooling(ask, hub, models_folder):
    status, line = ask('(lambda e: (e.pooling, e.normalize, e.width))(common.load_encoder("someone/model"))')
    assert (status, line) == (0, "('mean', True, 32)")
    fetched = {path.rpartition("/")[2] for command, path in hub.requests if command == "GET" and "/resolve/" in path}
    assert "model.safetensors" in fetched and not fetched & {"pytorch_model.bin", "model.onnx"}


@pytest.mark.parametrize("how", ["short", "other bytes"])
@pytest.mark.parametrize("file", ["wiki1m_for_simcse.txt", "senteval.tar"])
def test_a_broken_download_is_reported_and_not_kept(ask, hub, tmp_path, file, how):
    hub.broken[file] = how
    status, line = ask(f'common.resolve("{file}")')
    assert status == 2 and line.startswith(f"error: {file}: not a local path, and not to be had from the hub"), line
    assert f"put it at ./{file}" in line and "princeton-nlp/datasets-for-simcse" in line
    hub.broken.clear()
    status, line = ask(f'common.resolve("{file}")')
    assert status == 0
    if file.endswith(".txt"):
        assert Path(line).read_bytes() == hub.repositories[DATA][file]
    else:
        assert (Path(line) / "STS" / "STSBenchmark" / "sts-dev.csv").exists()


def test_no_hub_no_such_model_no_such_file(ask, hub):
    status, line = ask('common.load_encoder("someone/nothing")')
    assert status == 2 and "not to be had from the hub" in line and "huggingface.co/someone/nothing" in line
    assert ask('common.resolve("mine.txt")') == (2, "error: mine.txt: no such file or folder")
    hub.server_close()
    hub.shutdown()
    status, line = ask('common.resolve("nli_for_simcse.csv")')
    assert status == 2 and "not to be had from the hub" in line and "put it at ./nli_for_simcse.csv" in line


def test_glue_and_beir_are_found(ask, hub):
    rows = b'{"text1": "A boy runs.", "text2": "A lad runs.", "label": 1, "idx": 0}\n{"text1": "A boy runs.", "text2": "It rains.", "label": 0, "idx": 1}\n'
    hub.repositories["datasets/SetFit/mrpc"] = {"train.jsonl": rows * 2, "validation.jsonl": rows, "test.jsonl": rows.replace(b": 1,", b": -1,").replace(b": 0,", b": -1,")}
    assert ask('{name: pairs.labels.tolist() for name, pairs in __import__("glue").read_task(None, "mrpc").items()}') \
        == (0, "{'train': [1, 0, 1, 0], 'dev': [1, 0]}")  # the hub's test set has no labels here
    status, line = ask('__import__("glue").read_task(None, "qnli")')
    assert status == 2 and "SetFit/qnli: not to be had from the hub" in line and "QNLI/train.tsv" in line
    corpus = b'{"_id": "p", "title": "", "text": "A boy."}\n{"_id": "q", "title": "T", "text": "Rain."}\n'
    hub.repositories["datasets/BeIR/small"] = {"corpus.jsonl.gz": gzip.compress(corpus), "queries.jsonl.gz": gzip.compress(b'{"_id": "1", "text": "Who?"}\n')}
    hub.repositories["datasets/BeIR/small-qrels"] = {"test.tsv": b"query-id\tcorpus-id\tscore\n1\tq\t1\n"}
    assert ask('(lambda r: (r.read_qrels("BeIR/small", "test", r.read_queries("BeIR/small")), list(r.passages("BeIR/small"))))(__import__("eval_retrieval"))') \
        == (0, "(({'1': {1: 1}}, 2), [['A boy.', 'T Rain.']])")
