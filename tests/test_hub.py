"""Downloads by the real huggingface_hub client, from a local server that answers like the Hub."""

import gzip
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from conftest import ROOT

DATA = "datasets/princeton-nlp/datasets-for-simcse"
WIKI, NLI, SENTEVAL = "wiki1m_for_simcse.txt", "nli_for_simcse.csv", "senteval.tar"
TRIPLETS = b"sent0,sent1,hard_neg\na boy plays,a lad plays,a cook eats\n"
BEIR = gzip.compress(b'{"_id": "0", "text": "a boy"}\n{"_id": "1", "text": "a lad"}\n')
API = re.compile(r"/api/(models|datasets)/(.+?)(?:/(?:revision|tree)/[^/]+)?")


class Hub(BaseHTTPRequestHandler):
    """Serves `server.repositories`, {repository: {path: bytes}}."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        path = self.path.split("?")[0]
        match = API.fullmatch(path)
        repository, _, rest = path.strip("/").partition("/resolve/")
        if match:
            repository = "datasets/" + match[2] if match[1] == "datasets" else match[2]
        files = self.server.repositories.get(repository, {})
        data = files.get(rest.partition("/")[2])  # after the revision
        if match and files:
            self.answer(json.dumps(listed(match[2], files, "/tree/" in path)).encode())
        elif data is None:
            self.answer(b"", 404, X_Error_Code="RepoNotFound" if match else "EntryNotFound")
        else:
            if self.command == "GET":
                self.server.downloads.append(path)
            self.answer(data, ETag=f'"{sha1(data).hexdigest()}"', X_Repo_Commit="a" * 40)

    do_HEAD = do_GET

    def answer(self, data, status=200, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(data), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


def listed(name, files, is_tree):
    """The files of a repository, as the Hub's two listings have them."""
    sizes = {path: len(data) for path, data in files.items()}
    if is_tree:
        return [dict(type="file", path=path, size=sizes[path], oid="b" * 40) for path in files]
    siblings = [dict(rfilename=path, size=sizes[path]) for path in files]
    return dict(id=name, sha="a" * 40, siblings=siblings, private=False)


def read_folder(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def repositories(models_folder):
    lines = b"A boy plays a guitar.\nA cook eats an apple.\n"
    sts, pairs = io.BytesIO(), b"g\tf\ty\t1\t4.5\tA boy.\tA cook.\n" * 9
    with tarfile.open(fileobj=sts, mode="w") as tar:
        info = tarfile.TarInfo("STS/STSBenchmark/sts-dev.csv")
        info.size = len(pairs)
        tar.addfile(info, io.BytesIO(pairs))
    not_wanted = {"onnx/model.onnx": b"big", "pytorch_model.bin": b"also big"}
    content = {
        "datasets/ffgcc/NEWS5M": {"news5m.en": lines * 100},
        DATA: {WIKI: lines * 300, SENTEVAL: sts.getvalue(), NLI: TRIPLETS},
        "datasets/some/beir": {"corpus.jsonl.gz": BEIR, "queries.jsonl.gz": BEIR},
        "datasets/some/beir-qrels": {"dev.tsv": b"query-id\tcorpus-id\tscore\n1\t0\t2\n"},
        "someone/model": read_folder(models_folder / "mean") | not_wanted,
    }
    for owner in ("princeton-nlp/unsup", "princeton-nlp/sup", "someone/sup"):
        content[f"{owner}-simcse-tiny"] = read_folder(models_folder / "bert")
    return content


CODE = """
from extras import eval_retrieval
from common import *
from eval_sts import read_sts
def pooled(name):
    encoder = load_encoder(name)
    return encoder.pooling, len(encoder.heads), encoder.normalize
for expression in sys.argv[1:]:
    try:
        print(eval(expression))
    except UserError as error:
        print("error:", *str(error).split())
"""
DATA_SETS = [
    (f'len(read_sentences(resolve_data("{WIKI}")))', "600"),
    ('len(read_sentences(resolve_data("news5m.en")))', "200"),
    (f'len(read_sts(resolve_data("{SENTEVAL}"), "dev")["dev"])', "9"),
    (f'read_triplets(resolve_data("{NLI}"))', "[['a boy plays', 'a lad plays', 'a cook eats']]"),
    ('eval_retrieval.read_split("some/beir", "dev")', "(['a lad'], [{0: 2, 1: 0}])"),
]
DOWNLOADS = [  # what is asked for, and its value or a pattern of its error
    *DATA_SETS,
    *DATA_SETS,
    (
        'eval_retrieval.read_split("some/none", "dev")',
        "error: queries.jsonl.gz of huggingface.co/datasets/some/none: .*; give a folder to --beir",
    ),
    # SimCSE's models have no modules.json; they are read as their authors do
    ('pooled("princeton-nlp/sup-simcse-tiny")', "('cls', 1, False)"),
    ('pooled("princeton-nlp/unsup-simcse-tiny")', "('cls', 0, False)"),
    ('pooled("someone/sup-simcse-tiny")', "('mean', 0, False)"),
    ('pooled("someone/model")', "('mean', 0, True)"),
    ('pooled("someone/nothing")', "error: someone/nothing: .*huggingface.co/someone/nothing"),
]


def test_data_and_models_are_downloaded_by_name_and_once(models_folder, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.repositories = repositories(models_folder)
    server.downloads = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= dict(HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}")
    environment |= dict(HF_HOME=str(tmp_path / "hf"), XDG_CACHE_HOME=str(tmp_path / "cache"))
    environment |= dict(HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_XET="1")
    command = [sys.executable, "-c", CODE, *(expression for expression, _ in DOWNLOADS)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    server.shutdown()
    assert done.returncode == 0, done.stderr
    for (expression, expected), line in zip(DOWNLOADS, done.stdout.splitlines(), strict=True):
        if expected.startswith("error: "):
            assert re.match(expected, line), expression
        else:
            assert line == expected, expression
    assert len(server.downloads) == len(set(server.downloads))
    files = {path.rpartition("/")[2] for path in server.downloads}
    assert "model.safetensors" in files
    assert not files & {"pytorch_model.bin", "model.onnx"}
