"""What people have: said in one line, obeyed, or written as its neighbours are."""

import importlib
import os
import shutil
import subprocess
import sys
from collections import Counter
from statistics import mean

import pytest
import transformers
from conftest import DEMO, ROOT, alter, demo_sentences
from sentence_transformers import SentenceTransformer

import common
import distilface
import eval_sts
from extras import align, eval_retrieval, ibkd_dr, trim

PAIRS = ("--pairs", DEMO / "dev.tsv")
QWEN = dict(vocab_size=2000, hidden_size=32, num_hidden_layers=4, num_attention_heads=4)
QWEN |= dict(num_key_value_heads=2, head_dim=8, intermediate_size=64, attention_dropout=0.1)


@pytest.fixture
def qwen(models_folder, tmp_path):
    """A small decoder whose only dropout is that of attention."""
    folder = tmp_path / "qwen"
    transformers.Qwen3Model(transformers.Qwen3Config(**QWEN)).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(models_folder / "bert").save_pretrained(folder)
    return folder


@pytest.fixture
def fixed(models_folder, tmp_path):
    """all-MiniLM-L6-v2's kind of folder: its tokenizer.json cuts and pads to a fixed length."""
    folder = common.load_encoder(models_folder / "mean")
    common.save_encoder(folder, tmp_path / "fixed")
    truncation = dict(direction="Right", max_length=16, strategy="LongestFirst", stride=0)
    padding = dict(strategy=dict(Fixed=16), direction="Right", pad_to_multiple_of=None)
    padding |= dict(pad_id=0, pad_type_id=0, pad_token="[PAD]")
    change = dict(truncation=truncation, padding=padding)
    alter(tmp_path / "fixed" / "tokenizer.json", change)
    alter(tmp_path / "fixed" / "sentence_bert_config.json", dict(max_seq_length=24))
    return tmp_path / "fixed"


def trimmed(folder, out, call_main):
    words = ("--train", DEMO / "sentences.txt", "--tokens", 286, "--output", out)
    call_main(trim, folder, *words)


def aligned(folder, out, call_main):
    train = ("--train", DEMO / "sentences.txt")
    call_main(align, "--teacher", folder, "--student", folder, *train, "--output", out)


def saved(folder, out, call_main):
    common.save_encoder(common.load_encoder(folder), out)


@pytest.mark.parametrize("write", [saved, trimmed, aligned])
def test_a_folder_has_the_length_that_its_source_states(fixed, tmp_path, call_main, write):
    """sentence-transformers and these scripts read it; what tokenizer.json states stays there."""
    out = tmp_path / "out"
    write(fixed, out, call_main)
    assert common.read_json(out / "sentence_bert_config.json", {}) == {"max_seq_length": 24}
    assert common.load_encoder(out).max_length == 24
    assert SentenceTransformer(str(out), device="cpu").max_seq_length == 24
    if write is not trimmed:  # which makes a tokenizer of its own
        assert (out / "tokenizer.json").read_bytes() == (fixed / "tokenizer.json").read_bytes()


CUT = (  # what is changed in a folder, what the error says
    ("config.json", dict(num_hidden_layers=2), "its weights and its config.json differ in"),
    (
        "config.json",
        dict(quantization_config=dict(quant_method="gptq")),
        "quantization_config is not supported",
    ),
    ("tokenizer_config.json", dict(auto_map=dict(AutoTokenizer=["t.T", None])), "auto_map"),
    ("tokenizer.json", None, "it has no tokenizer"),
)


@pytest.mark.parametrize("file, change, said", CUT)
def test_a_folder_that_would_be_read_as_another_model(
    models_folder, tmp_path, fails, file, change, said
):
    folder = shutil.copytree(models_folder / "bert", tmp_path / "folder")
    if change:
        alter(folder / file, change)
    else:
        (folder / file).unlink()
        alter(folder / "tokenizer_config.json", dict(tokenizer_class="BertTokenizer"))
    assert said in fails(eval_sts, folder, *PAIRS)


def test_the_repeats_of_the_pages_are_those_of_real_data(shared_data):
    """docs/ibkd.md: training rows of SciFact that share a query or an answer, and in a batch."""
    _, _, answers, _ = eval_retrieval.read_training(shared_data / "retrieval" / "scifact", 2000)
    rows = [(i, n) for i, row in enumerate(answers) for n in row if row[n]]
    queries, passages = [Counter(column) for column in zip(*rows)]
    shared = sum(queries[i] > 1 or passages[n] > 1 for i, n in rows)
    met = {}
    for size in (32, 128):
        batches = common.Batches(len(rows), size, 0)
        found = []
        for step in range(700):
            batch = [rows[place] for place in batches[step]]
            others = [{n for j, (_, n) in enumerate(batch) if j != k} for k in range(len(batch))]
            hits = [bool(others[k] & answers[i].keys()) for k, (i, _) in enumerate(batch)]
            found += [sum(hits)] if len(batch) == size else []
        met[size] = round(mean(found))
    text = " ".join((ROOT / "docs" / "ibkd.md").read_text("utf-8").split())
    assert f"{shared} of {len(rows)} in SciFact. In random batches there" in text
    assert f"there, {met[32]} of 32 rows, or {met[128]} of 128, have an answer" in text


def test_prompts_that_are_not_used_are_said_once(fixed, call_main, monkeypatch):
    said = []
    monkeypatch.setattr(common, "note", said.append)
    change = dict(prompts=dict(query="q: ", passage="p: ", other=""))
    alter(fixed / "config_sentence_transformers.json", change)
    call_main(eval_sts, fixed, *PAIRS)
    assert said[0] == (
        f"{fixed}: of its prompts ['query', 'passage', 'other'], none is put before a text"
    )
    del said[:]
    call_main(eval_retrieval, fixed, "--beir", DEMO / "beir")  # puts them there
    alter(fixed / "config_sentence_transformers.json", dict(default_prompt_name="query"))
    call_main(eval_sts, fixed, *PAIRS)
    assert not [line for line in said if "its prompts" in line]


def test_distilface_finds_dropout_of_attention_alone(qwen, call_main, fails, tmp_path):
    train = ("--train", DEMO / "sentences.txt", "--dev", DEMO / "dev.tsv", "--max-steps", 1)
    call_main(distilface, "--student", qwen, *train, "--output", tmp_path / "out")
    words = ("--student", qwen, *train, "--dropout", 0, "--output", tmp_path / "other")
    assert "without dropout, both views are equal; see --dropout" in fails(distilface, *words)


def test_ibkd_dr_says_where_answers_may_be_negatives(models_folder, tmp_path, monkeypatch):
    """Of rows (0, 1), (0, 2), (3, 1), two are of query 0, and two have answer 1."""
    said = []
    monkeypatch.setattr(ibkd_dr, "note", said.append)
    rows = [[0, 1, 9], [0, 2, 9], [3, 1, 9]]
    monkeypatch.setattr(eval_retrieval, "training_rows", lambda *_: ibkd_dr.np.array(rows))
    task = object.__new__(ibkd_dr.Retrieval)
    task.args = type("Args", (), dict(hard_negatives=1, device="cpu"))
    task.answers, task.similarity = None, lambda encoder: "cosine"
    task.examples(None, None)
    assert (
        "3 of 3 training rows share their query or answer: of queries with several answers"
        in said[0]
    )


def test_align_refuses_fewer_sentences_than_dimensions(models_folder, fails, tmp_path):
    (tmp_path / "train.txt").write_text("\n".join(demo_sentences(20)))
    models = ("--teacher", models_folder / "wide", "--student", models_folder / "mean")
    words = (*models, "--train", tmp_path / "train.txt", "--output", tmp_path / "out")
    assert "20 sentences are fewer than the teacher's dimensions, 48" in fails(align, *words)


@pytest.mark.parametrize(
    "error",
    [
        common.torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError("Unable to allocate 9 GiB for an array"),
    ],
    ids=["CUDA", "numpy"],
)
def test_a_lack_of_memory_is_one_line(error, fails, monkeypatch):
    def load(*_):
        raise error

    monkeypatch.setattr(eval_sts, "load_encoder", load)
    line = fails(eval_sts, DEMO, *PAIRS)
    assert "out of memory" in line and "smaller batch" in line and "wrong" not in line


def test_a_fault_of_the_project_keeps_its_traceback(fails, monkeypatch):
    monkeypatch.setattr(eval_sts, "load_encoder", lambda *_: [][0])
    with pytest.raises(IndexError):
        fails(eval_sts, DEMO, *PAIRS)


def run(words, **environment):
    environment = {key: value for key, value in (os.environ | environment).items() if value}
    options = dict(cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    return subprocess.run([sys.executable, *map(str, words)], **options)


def test_help_needs_no_home(tmp_path):
    """A user without a name and without HOME, as in a container."""
    code = (
        "import os, runpy, sys; os.path.expanduser = lambda path: path; sys.argv[1:] = ['--help']"
    )
    done = run(["-c", f"{code}; runpy.run_path('ckd.py', run_name='__main__')"])
    assert done.returncode == 0, done.stderr


def test_a_cache_that_cannot_be_written_names_the_variable(models_folder, fails, tmp_path):
    (tmp_path / "file").write_text("")
    common_cache = tmp_path / "file" / "cache"
    script = importlib.import_module("ckd")
    words = ("--teacher", models_folder / "mean", "--student-layers", 1)
    words += ("--train", DEMO / "sentences.txt", "--dev", DEMO / "dev.tsv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "CACHE", common_cache)
        line = fails(script, *words, "--output", tmp_path / "out")
    assert "Not a directory" in line and "XDG_CACHE_HOME" in line
