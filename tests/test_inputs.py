"""Wrong input: one line on stderr, which says what is wrong and where; nothing is written."""

import importlib

import pytest
from conftest import DEMO

FILES = {
    "empty.txt": b"",
    "blank.txt": b"\n \n",
    "single.txt": b"a boy\n",
    "latin.txt": b"a boy\ncaf\xe9\n",
    "header.csv": b"premise,hypothesis,label\na,b,c\n",
    "two.csv": b"sent0,sent1,hard_neg\na,b\n",
    "two.tsv": b"a\tb\t1\na\tb\n",
    "word.tsv": b"a\tb\t1\na\tb\tgood\n",
    "nan.tsv": b"a\tb\t1\na\tb\tnan\n",
    "far.tsv": b"a\tb\t1\na\tb\t7\n",
    "equal.tsv": b"a\tb\t1\nc\td\t1\n",
    "one.tsv": b"a boy\n",
    "four.tsv": b"a boy\ta girl\t3\t5\n",
    "broken.tar": b"no tar",
    "pointer.txt": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "page.txt": b"<html>\n<body>\n<p>text</p>\n",
    "utf16.txt": "a boy\na girl\n".encode("utf-16-le"),
}
TRAIN = f"--train {DEMO}/sentences.txt"
DEV = f"--dev {DEMO}/dev.tsv"
CUT = "--teacher {bert} --student-layers 0,2"
CKD = f"{TRAIN} {DEV} {CUT}"
# (script, command line, fragment of the error). {x} is a file of FILES or a folder of a model; a
# later option takes the place of an earlier one.
TABLE = [
    # what every training script shares
    ("ckd", f"{CKD} --lr 0", "--lr"),
    ("ckd", f"{CKD} --dropout 1", "--dropout"),
    ("ckd", f"{TRAIN} {DEV} --teacher {{bert}}", "--student"),
    ("ckd", f"{TRAIN} {DEV} --teacher {{bert}} --student-layers 0,9", "0,9"),
    ("ckd", f"{TRAIN} {DEV} --teacher no/such --student-layers 0", "no/such"),
    ("ckd", f"{TRAIN} {DEV} --teacher {{empty.txt}} --student-layers 0", "empty.txt"),
    ("ckd", f"{CKD} --train {{missing.txt}}", "missing.txt"),
    ("ckd", f"{CKD} --train {{empty.txt}}", "empty.txt"),
    ("ckd", f"{CKD} --train {{blank.txt}}", "blank.txt"),
    ("ckd", f"{CKD} --train {{single.txt}}", "two"),
    ("ckd", f"{CKD} --train {{latin.txt}}", "latin.txt"),
    ("ckd", f"{CKD} --train {{header.csv}}", "header.csv:1"),
    ("ckd", f"{CKD} --triplets {{two.csv}}", "two.csv:2"),
    ("ckd", f"{CKD} --dev {{two.tsv}}", "two.tsv:2"),
    ("ckd", f"{CKD} --dev {{word.tsv}}", "word.tsv:2"),
    ("ckd", f"{CKD} --dev {{nan.tsv}}", "nan.tsv:2"),
    ("ckd", f"{CKD} --dev {{far.tsv}}", "far.tsv:2"),
    ("ckd", f"{CKD} --dev {{equal.tsv}}", "all equal"),
    ("ckd", f"{TRAIN} {CUT} --senteval {{broken.tar}}", "broken.tar"),
    ("ckd", f"{TRAIN} {CUT} --senteval {DEMO}", "STSBenchmark"),
    ("ckd", f"{CKD} --queue-size 99999", "99999"),
    ("ckd", f"{CKD} --output {{bert}}", "bert"),
    ("ckd", f"{CKD} --train {DEMO}/beir/corpus.jsonl", "corpus.jsonl"),
    ("ckd", f"{CKD} --train {DEMO}/dev.tsv", "dev.tsv"),
    ("ckd", f"{CKD} --train {{pointer.txt}}", "pointer.txt"),
    ("ckd", f"{CKD} --train {{page.txt}}", "page.txt"),
    ("ckd", f"{CKD} --train {{utf16.txt}}", "utf16.txt"),
    # congen.py
    ("congen", f"{CKD} --queue-size 1", "queue"),
    ("congen", f"{CKD} --pairs {{one.tsv}}", "one.tsv:1"),
    ("congen", f"{CKD} --pairs {DEMO}/dev.tsv", "dev.tsv:1"),
    ("ckd", f"{CKD} --dev {{four.tsv}}", "four.tsv:1: 4 tab-separated columns"),
    ("congen", f"{CKD} --train {{single.txt}}", "queue"),
    # ibkd.py and eval_retrieval.py
    ("ibkd", f"{CKD} --beir {DEMO}/beir", "--task dr"),
    ("ibkd", f"{CUT} --task dr --beir {{bert}}", "corpus.jsonl"),
    ("ibkd", f"{CKD} --task dr --beir {DEMO}/beir", "--train"),
    ("eval_retrieval", "{bert} --beir nowhere/at/all", "nowhere"),
    ("eval_retrieval", f"{{bert}} --beir {DEMO}/beir --split none", "none"),
    ("eval_retrieval", f"{{bert}} --beir {DEMO}/beir --json {DEMO}/beir/corpus.jsonl", "corpus"),
    ("eval_sts", f"{{bert}} --pairs {DEMO}/dev.tsv --json {DEMO}/dev.tsv", "dev.tsv"),
    # dse.py
    ("dse", "--teacher {bert} --glue {bert}", "train.tsv"),
    ("distilface", f"{TRAIN} {DEV} --student {{bert}} --dropout 0", "dropout"),
    ("distilface", f"--train {{single.txt}} {DEV} --student {{bert}}", "--batch-size"),
    ("eval_sts", f"{{empty.txt}} --pairs {DEMO}/test.tsv", "empty.txt"),
    ("extras.sweep", "ckd.py lr=1,1", "lr"),
]


@pytest.mark.parametrize("script, words, fragment", TABLE, ids=lambda value: str(value)[-40:])
def test_one_line_and_status_2(script, words, fragment, fails, models_folder, tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    places = {path.name: path for path in (*tmp_path.iterdir(), *models_folder.iterdir())}
    places["missing.txt"] = tmp_path / "missing.txt"
    for name, place in places.items():
        words = words.replace("{" + name + "}", str(place))
    out = tmp_path / "out"
    run = [] if script.startswith(("eval", "extras")) else ["--output", out, "--max-steps", 1]
    line = fails(importlib.import_module(script), *run, *words.split())
    assert fragment in line, line
    assert not (out / "model.safetensors").exists()
