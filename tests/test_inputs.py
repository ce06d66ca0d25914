"""Wrong input: one line on stderr, which says what is wrong and where; nothing is written."""

import gzip
import importlib
import re
import sys

import pytest
from conftest import DEMO
from processes import start
from torch import nn

import ckd
import common
import eval_sts

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
    "mac.txt": b"a boy\ra girl\ra lad\r",
    "mac.tsv": b"a boy\ta girl\t3\ra lad\ta cook\t2\r",
    "cut.gz": gzip.compress(b"a boy\n" * 99)[:-9],
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
    ("ckd", f"{TRAIN} {DEV} --teacher no/such --student-layers 0", "huggingface.co/no/such"),
    ("ckd", f"{CKD} --train no/such", "huggingface.co/datasets/no/such"),
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
    ("ckd", f"{CKD} --train {{mac.txt}}", "mac.txt: is not plain text"),
    ("ckd", f"{CKD} --dev {{mac.tsv}}", "mac.tsv:1"),
    ("ckd", f"{CKD} --train {{cut.gz}}", "cut.gz"),
    ("ckd", f"{CKD} --prompt caf\udce9", "--prompt"),  # a byte of Latin-1
    ("ckd", f"{CKD} --objective kd --queue-size 8", "--queue-size: --objective kd"),
    ("ckd", f"{CKD} --objective kd --temperature 1", "--temperature: --objective kd"),
    ("ckd", f"{CKD} --objective kd --learn-temperature", "--learn-temperature: --objective kd"),
    ("ckd", f"{CKD} --stage distill --triplets {{two.csv}}", "--triplets: this run has no stage 2"),
    ("ckd", f"{CKD} --finetune-epochs 1", "--finetune-epochs: this run has no stage 2"),
    ("ckd", f"{CKD} --finetune-batch-size 8", "--finetune-batch-size: this run has no stage 2"),
    ("ckd", f"{CKD} --finetune-lr 1", "--finetune-lr: this run has no stage 2"),
    ("ckd", f"{CKD} --finetune-temperature 1", "--finetune-temperature: this run has no stage 2"),
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
    ("eval_sts", f"{{bert}} --pairs {DEMO}/test.tsv --json ", "'' is a folder"),
    ("extras.align", f"{TRAIN} --teacher {{wide}} --student {{bert}} --output {{bert}}", "exists"),
    ("extras.sweep", "ckd.py lr=1,1", "lr"),
    ("extras.analyze", "neighbours {bert} --sentences {mac.txt} --query \udce9", "--query"),
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
    line = fails(importlib.import_module(script), *run, *words.split(" "))
    assert fragment in line, line
    assert not (out / "model.safetensors").exists()


@pytest.fixture(scope="module")
def broken_models(models_folder, tmp_path_factory):
    """Folders of finite weights: all embeddings are zero, or those of some texts, or NaN."""
    root = tmp_path_factory.mktemp("broken")
    encoder = common.load_encoder(models_folder / "bert")
    for name, weight in (("zero", 0), ("partly", 1), ("nan", 3e38)):
        linear = nn.Linear(32, 32, bias=False)
        nn.init.constant_(linear.weight, weight)
        encoder.heads = nn.Sequential(nn.Sequential(linear, nn.ReLU()))
        encoder.normalize = name == "nan"  # infinity / infinity
        common.save_encoder(encoder, root / name)
    return root


NO_NUMBERS = [  # {} is the model
    ("eval_sts", f"{{}} --pairs {DEMO}/test.tsv --json scores.json"),
    ("eval_sts", f"{{}} --translations {DEMO}/pairs.tsv"),
    ("eval_retrieval", f"{{}} --beir {DEMO}/beir"),
    ("extras.analyze", f"space {{}} --dev {DEMO}/dev.tsv"),
    ("extras.eval_transfer", "{} --tasks CR --folds 2 --senteval senteval"),
    ("ckd", f"{TRAIN} {DEV} --teacher {{}} --student-layers 0,2 --output out"),
    ("extras.align", f"{TRAIN} --teacher {{}} --student {{}} --output out"),
]


@pytest.mark.parametrize("kind", ["zero", "partly", "nan"])
@pytest.mark.parametrize("script, words", NO_NUMBERS)
def test_embeddings_that_are_no_direction_are_refused(
    script, words, kind, fails, broken_models, tmp_path, monkeypatch
):
    """The line names the model and a text."""
    monkeypatch.chdir(tmp_path)
    for name in ("custrev.neg", "custrev.pos"):
        (tmp_path / "senteval/CR").mkdir(parents=True, exist_ok=True)
        (tmp_path / "senteval/CR" / name).write_bytes(b"A boy runs.\nA cook eats.\n" * 4)
    model = broken_models / kind
    line = fails(importlib.import_module(script), *words.replace("{}", str(model)).split())
    assert f"{model}: the embedding of '" in line
    assert {path.name for path in tmp_path.iterdir()} <= {"senteval", "out"}
    assert not list(tmp_path.glob("out/*.safetensors"))


# ---- surroundings


SURROUNDINGS = [  # environment variables, what the last line must have
    ("RANK=1", "| "),
    ("RANK=1 WORLD_SIZE=", "| "),
    ("RANK=1 WORLD_SIZE=two", "| "),
    ("RANK=0 WORLD_SIZE=1", "| "),
    ("RANK=0 WORLD_SIZE=2", "error: .*LOCAL_RANK.*torchrun"),  # as Kubernetes sets them
    ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0", "error: .*MASTER_ADDR.*torchrun"),
]


@pytest.mark.slow
@pytest.mark.parametrize("variables, expected", SURROUNDINGS)
def test_half_of_torchruns_variables(variables, expected, models_folder, files, tmp_path):
    """One process, or one line."""
    log = tmp_path / "log"
    variables = dict(word.split("=") for word in variables.split())
    words = [models_folder / "bert", "--pairs", files / "dev.tsv"]
    process = start("eval_sts.py", words, log, **variables)
    process.join(300)
    lines = log.read_text().splitlines()
    assert re.match(expected, lines[-1])
    assert (process.exitcode, len(lines)) == ((2, 1) if "error" in expected else (0, 3))


def test_standard_output_may_be_closed(models_folder, files, tmp_path, monkeypatch):
    out = tmp_path / "scores.json"
    words = [models_folder / "bert", "--pairs", files / "dev.tsv", "--json", out]
    monkeypatch.setattr(sys, "argv", ["eval_sts.py", *map(str, words)])
    monkeypatch.setattr(sys, "stdout", None)  # what Python makes of it
    common.run_main(eval_sts.main)
    assert len(common.read_json(out)) == 1


def test_a_working_directory_that_is_gone_is_one_line(fails, models_folder, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    models = ("--teacher", models_folder / "bert", "--student-layers", "0,2")
    assert "No such file" in fails(ckd, *models, *f"{TRAIN} {DEV}".split(), "--output", "out")
    assert not list(tmp_path.iterdir())


def test_a_file_whose_name_is_in_latin_1_is_read(call_main, models_folder, files, tmp_path):
    train = tmp_path / "caf\udce9.txt"
    train.write_bytes((files / "sentences.txt").read_bytes())
    words = ("--teacher", models_folder / "bert", "--student-layers", "0,2", *DEV.split())
    words += ("--max-steps", 1, "--train", train, "--output", tmp_path / "out")
    assert "best" in call_main(ckd, *words)
    for name in ("args.json", "README.md"):
        assert "/caf\\udce9.txt" in (tmp_path / "out" / name).read_text("utf-8")
