"""Wrong input: one line on stderr, which says what is wrong and where; nothing is written."""

import gzip
import importlib
import io
import math
import re
import shutil

import numpy as np
import pytest
import torch
from conftest import DEMO, alter
from processes import small_options

import ckd
import common


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(array):
    file = io.BytesIO()
    np.savez(file, array)
    return file.getvalue()


class Code:
    """What runs where it is unpickled."""

    def __reduce__(self):
        return print, ("unpickled",)


FILES = {
    "empty.txt": b"",
    "latin.txt": b"a boy\ncaf\xe9\n",
    "cut.gz": gzip.compress(b"a boy\n" * 99)[:-9],
    "header.csv": b"premise,hypothesis,label\na,b,c\n",
    "two.csv": b"sent0,sent1,hard_neg\na,b\n",
    "gap.csv": b"sent0,sent1,hard_neg\na,,c\n",
    "two.tsv": b"a\tb\t1\na\tb\n",
    "word.tsv": b"a\tb\t1\na\tb\tgood\n",
    "nan.tsv": b"a\tb\t1\na\tb\tnan\n",
    "far.tsv": b"a\tb\t1\na\tb\t7\n",
    "equal.tsv": b"a\tb\t1\nc\td\t1\n",
    "one.tsv": b"a boy\n",
    "broken.tar": b"no tar",
    "json.txt": b'{"text": "a boy"}\n{"text": "a man"}\na boy\ta man\t4.5\n',
    "short.npy": npy(np.ones((2, 4), np.float32)),
    "objects.npy": npy(np.array([{}, []], object)),
    "archive.npz": npz(np.ones((2, 4), np.float32)),
    "nan.npy": npy(np.full((6400, 4), np.nan)),
    "zero.npy": npy(np.float32([[5, row] for row in range(3200)] + 3200 * [[0, 0]])),
    "large.npy": npy(np.full((6400, 4), 1e300)),
    "quote.csv": b'sent0,sent1,hard_neg\na,b,c\n"a,b,c\nd,e,f\n',
    "space.txt": "a boy\n\u200b\n".encode(),
    "page.txt": b"<!DOCTYPE html>\n<body>\n<p>a boy</p>\n</body>\n",
}
WORDS, LAYER_1 = "embeddings.word_embeddings.weight", "encoder.layer.1.output.dense.weight"
WEIGHTS, POOLING = "model.safetensors", "1_Pooling/config.json"
PROMPTS = "config_sentence_transformers.json"


def older(config, *names):
    """A pooling as older versions of sentence-transformers wrote it, by flags."""
    del config["pooling_mode"]
    flags = dict(cls="pooling_mode_cls_token", mean="pooling_mode_mean_tokens")
    config.update({flags[name]: True for name in names})


MODELS = {  # what is changed in the folder "pooler", what the error must say
    "missing-tensor": (WEIGHTS, lambda tensors: tensors.pop(LAYER_1), LAYER_1),
    "not-a-number": (WEIGHTS, lambda tensors: tensors[WORDS].fill_(math.nan), "embedding of '"),
    "own-module": ("modules.json", lambda entries: entries[2].update(type="my.Gate"), "Gate"),
    "activation": ("2_Dense/config.json", dict(activation_function="torch.nn.Sinc"), "Sinc"),
    "two-poolings": (POOLING, lambda content: older(content, "cls", "mean"), "cls+mean"),
    "another-pooling": (POOLING, dict(pooling_mode="weightedmean"), "weightedmean"),
    "unknown-prompt": (PROMPTS, dict(prompts={}, default_prompt_name="query"), "query"),
    "no-JSON": ("config.json", None, "config.json"),
    "no-weights": (WEIGHTS, None, "model.safetensors"),
}
ADVICE = ("trust_remote_code", "allow_pickle")  # of libraries
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
POINTERS = {"pointer-weights": WEIGHTS, "pointer-words": "tokenizer.json"}
OTHER_MODELS = {  # what is changed in the folder "bert"
    "unknown-kind": ("config.json", dict(model_type="new", auto_map=dict(AutoConfig="new.Config"))),
    "no-marks": ("tokenizer.json", lambda content: content.update(post_processor=None)),
}
TRAIN = f"--train {DEMO}/sentences.txt"
DEV = f"--dev {DEMO}/dev.tsv"
CUT = "--teacher {bert} --student-layers 0,2"
CKD = f"{TRAIN} {DEV} {CUT}"
BEIR = f"--beir {DEMO}/beir"
FACE = f"{TRAIN} {DEV} --student {{bert}}"
# (script, command line, fragment of the error). {x} is a file of FILES, or a folder of a model; a
# later option takes the place of an earlier one.
TABLE = [
    # options
    ("ckd", f"{CKD} --lr 0", "--lr"),
    ("ckd", f"{CKD} --lr nan", "--lr"),
    ("ckd", f"{CKD} --max-steps 0", "--max-steps"),
    ("ckd", f"{CKD} --dropout 1", "--dropout"),
    ("ckd", f"{TRAIN} {DEV} --teacher {{bert}}", "--student"),
    ("ckd", f"{CKD} --student-layers 0,9", "0,9: choose each once from [0, "),
    ("ckd", f"{CKD} --output {{bert}}", "bert: has other files, or a run with --teacher None"),
    ("ckd", f"{CKD} --teacher {{distilbert}} --teacher-pooling pooler", "pooler"),
    ("dse", f"--teacher {{bert}} {DEV}", "--train and --dev"),
    ("distilface", f"{FACE} --dropout 0", "dropout"),
    ("distilface", f"{FACE} --student-layers 0,2", "avg_last4 needs 4 layers, and it has 2"),
    # files that are not there
    ("ckd", f"{CKD} --teacher no/such", "huggingface.co/no/such"),
    ("ckd", f"{CKD} --train {{missing.txt}}", "missing.txt: No such file or directory"),
    ("ckd", f"{CKD} --train missing.txt", "missing.txt: No such file or directory"),
    ("ckd", f"{CKD} --teacher {DEMO}/no", "demo/no: "),
    ("ckd", f"{CKD} --train {{json.txt}}", "json.txt: 3 of 3 lines are no sentences"),
    ("ckd", f"{CKD} --student {{bert}} --teacher-embeddings {{empty.txt}}", "empty.txt: "),
    (
        "ckd",
        f"{CKD} --student {{bert}} --teacher-embeddings {{short.npy}}",
        "float32 (2, 4) for 6400 texts",
    ),
    *(
        (
            "congen",
            f"{CKD} --student {{bert}} --teacher-embeddings {{{name}.npy}}",
            f"{name}.npy: an",
        )
        for name in ("nan", "zero", "large")
    ),
    ("ckd", f"{CKD} --train {{space.txt}} --teacher {{no-marks}}", "no token in '\\u200b'"),
    ("eval_sts", f"{{bert}} --senteval {DEMO}", "STSBenchmark"),
    ("extras.ibkd_dr", f"{CUT} --beir {{bert}}", "corpus.jsonl"),
    ("extras.eval_retrieval", "{bert} --beir nowhere/at/all", "nowhere"),
    ("extras.eval_retrieval", f"{{bert}} {BEIR} --split none", "none.tsv"),
    # files that Git LFS has not fetched
    ("ckd", f"{CKD} --train {{pointer.txt}}", "no sentences, such as 'version https://git-lfs"),
    ("ckd", f"{CKD} --dev {{pointer.txt}}", "pointer.txt:1: "),
    ("ckd", f"{CKD} --student {{bert}} --teacher-embeddings {{pointer.txt}}", "pointer.txt: "),
    (
        "eval_sts",
        f"{{pointer-weights}} --pairs {DEMO}/dev.tsv",
        "pointer-weights: ",
    ),
    (
        "eval_sts",
        f"{{pointer-words}} --pairs {DEMO}/dev.tsv",
        "pointer-words: ",
    ),
    ("ckd", f"{CKD} --student {{bert}} --teacher-embeddings {{archive.npz}}", "magic string"),
    ("ckd", f"{CKD} --student {{bert}} --teacher-embeddings {{objects.npy}}", "Python objects"),
    (
        "eval_sts",
        f"{{pickled}} --pairs {DEMO}/dev.tsv",
        "pickled: ",
    ),
    (
        "eval_sts",
        f"{{unknown-kind}} --pairs {DEMO}/dev.tsv",
        "unknown-kind/config.json: auto_map is not supported",
    ),
    ("eval_sts", f"{{bert}} --senteval {DEMO} --sets STS99", "STSBenchmark"),
    # lines of a file
    ("ckd", f"{CKD} --train {{page.txt}}", "page.txt: 4 of 4 lines are no sentences"),
    ("ckd", f"{CKD} --train {{empty.txt}}", "empty.txt: "),
    ("ckd", f"{CKD} --train {{latin.txt}}", "latin.txt:2: "),
    ("ckd", f"{CKD} --train {{cut.gz}}", "cut.gz"),
    ("ckd", f"{CKD} --train {{header.csv}}", "header.csv:2: "),
    ("ckd", f"{CKD} --triplets {{quote.csv}}", "quote.csv: unexpected end of data"),
    *(("ckd", f"{CKD} --triplets {{{name}.csv}}", f"{name}.csv:2: ") for name in ("two", "gap")),
    *(
        ("ckd", f"{CKD} --dev {{{name}.tsv}}", f"{name}.tsv:2: ")
        for name in ("two", "word", "nan", "far")
    ),
    ("ckd", f"{CKD} --dev {{equal.tsv}}", "of all pairs are equal"),
    ("eval_sts", "{bert} --senteval {broken.tar}", "broken.tar"),
    ("congen", f"{CKD} --pairs {{one.tsv}}", "one.tsv:1: "),
    ("ckd", f"{CKD} --train {{one.tsv}}", "there is one training example"),
    # models; embeddings that are no direction name a text
    *(("eval_sts", f"{{{name}}} --pairs {DEMO}/dev.tsv", MODELS[name][2]) for name in MODELS),
    # training that diverges
    ("ckd", f"{CKD} --lr 1e8 --max-steps 3", "use a smaller --lr"),
]


@pytest.fixture(scope="module")
def places(models_folder, tmp_path_factory):
    """{name: path} of FILES and of models, sound ones and MODELS."""
    root = tmp_path_factory.mktemp("wrong")
    for name, content in FILES.items():
        (root / name).write_bytes(content)
    for name, (part, change, _) in MODELS.items():
        folder = shutil.copytree(models_folder / "pooler", root / name)
        if change:
            alter(folder / part, change)
        elif part == WEIGHTS:
            (folder / part).unlink()
        else:
            (folder / part).write_text("{")
    (root / "pointer.txt").write_text(POINTER)
    for name, part in POINTERS.items():
        (shutil.copytree(models_folder / "bert", root / name) / part).write_text(POINTER)
    for name, (part, change) in OTHER_MODELS.items():
        alter(shutil.copytree(models_folder / "bert", root / name) / part, change)
    (shutil.copytree(models_folder / "bert", root / "pickled") / WEIGHTS).unlink()
    torch.save({WORDS: Code()}, root / "pickled" / "pytorch_model.bin")
    paths = (*root.iterdir(), *models_folder.iterdir(), root / "missing.txt")
    return {path.name: path for path in paths}


@pytest.mark.parametrize("script, words, fragment", TABLE, ids=lambda value: str(value)[-40:])
def test_one_line_and_status_2(script, words, fragment, fails, places, tmp_path):
    out = tmp_path / "out"
    run = [] if "eval" in script else ["--output", out]
    words = [re.sub("{(.*)}", lambda name: str(places[name[1]]), word) for word in words.split(" ")]
    line = fails(importlib.import_module(script), *run, *words)
    assert fragment in line, line
    assert not any(words in line for words in ADVICE)
    assert not (out / "README.md").exists()


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_best_student(
    fails, models_folder, files, tmp_path, monkeypatch
):
    monkeypatch.setattr(common, "LOG_STEPS", 1)
    monkeypatch.setattr(ckd, "contrastive_distillation_loss", lambda x, *_: x.sum() * math.nan)
    line = fails(ckd, *small_options("ckd", models_folder, files, tmp_path))
    folder = tmp_path / "distill"  # of stage 1
    assert f"{folder}: loss is nan at step 1; lower --lr" in line
    assert common.load_encoder(folder).dimension == 32
