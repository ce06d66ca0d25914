"""What the tests share: small models made on the spot, the real teacher, the real data.

The teacher comes from its pip package, the data from ../shared/data where that folder is there.
"""

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Set before common is imported, so that no test reads or fills the user's own cache.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="distillation-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
# A shell ignores Ctrl-C for what it starts in the background, and so would what the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Two processes with two threads each take three times as long on two cores.
PARALLEL = "PYTEST_XDIST_WORKER" in os.environ
if PARALLEL:
    torch.set_num_threads(1)

from processes import Processes

import common
from support import command_line, demo
from support.encoder import load_encoder

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",")
LONGEST_INPUT = 128  # tokens
MODELS = (  # folder, kind, dimension
    ("bert", "bert", 32),
    ("wide", "bert", 48),
    ("roberta", "roberta", 32),
    ("distilbert", "distilbert", 32),
)


def pytest_addoption(parser):
    help = "changed files that test_fuzz.py reads, for each reader; 200"
    parser.addoption("--fuzz-examples", type=int, default=200, help=help)
    help = "SIGKILLs of test_soak.py, at least, over the scripts; 10"
    parser.addoption("--soak", type=int, default=10, help=help)
    help = "which moments test_soak.py takes; the time"
    parser.addoption("--soak-seed", type=int, default=int(time.time()), help=help)


@pytest.fixture(scope="session")
def shared_data():
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no ../shared/data beside the project: tests on real data need it")
    return folder


@pytest.fixture(scope="session")
def teacher():
    """all-MiniLM-L6-v2 from its pip package, as the README's test command installs it."""
    return load_encoder(common.MINILM).eval()


def word_tokenizer():
    """A BERT tokenizer whose vocabulary is the words of the demo's sentences."""
    words = set()
    for text in demo.sentences(3000):
        words.update(text.lower().rstrip(".").split())
    vocabulary = {word: i for i, word in enumerate([*SPECIAL_TOKENS, *sorted(words)])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=LONGEST_INPUT,
    )


def random_model(kind, vocabulary, size, layers):
    """A transformer of `kind` with random weights and `size` hidden dimensions."""
    if kind == "distilbert":
        config = DistilBertConfig(
            vocab_size=vocabulary,
            dim=size,
            n_layers=layers,
            n_heads=4,
            hidden_dim=2 * size,
            max_position_embeddings=LONGEST_INPUT,
        )
        return DistilBertModel(config)
    options = dict(
        vocab_size=vocabulary,
        hidden_size=size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * size,
        initializer_range=0.3,
        pad_token_id=0,
    )
    if kind == "roberta":  # its positions begin behind the number of its padding token
        return RobertaModel(RobertaConfig(max_position_embeddings=LONGEST_INPUT + 1, **options))
    return BertModel(BertConfig(max_position_embeddings=LONGEST_INPUT, **options))


def build(folder, kind, size=32, layers=4, seed=0):
    """Write a plain transformers folder with random weights -> its path, a str."""
    torch.manual_seed(seed)
    tokenizer = word_tokenizer()
    random_model(kind, len(tokenizer), size, layers).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory):
    """Folders of small models with four layers.

    Plain: bert (32 dimensions), wide (48), roberta, distilbert. In sentence-transformers' layout:
    mean (normalized), cls, pooler.
    """
    root = tmp_path_factory.mktemp("models")
    for name, kind, size in MODELS:
        build(root / name, kind, size, seed=size)
    for pooling in ("mean", "cls", "pooler"):
        encoder = load_encoder(root / "bert", pooling)
        encoder.normalize = pooling == "mean"
        encoder.save(root / pooling)
    return root


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A folder of the demo's data: sentences.txt (300), dev.tsv (60 pairs), triplets.csv (100), and
    STS-B in GLUE's layout."""
    root = tmp_path_factory.mktemp("files")
    (root / "sentences.txt").write_text("\n".join(demo.sentences(300)) + "\n", "utf-8")
    pairs = zip(*demo.scored_pairs(60, seed=7))
    lines = [f"{first}\t{second}\t{score}\n" for first, second, score in pairs]
    (root / "dev.tsv").write_text("".join(lines), "utf-8")
    rows = [common.TRIPLET_HEADER, *demo.triplets(100)]
    lines = [",".join(f'"{cell}"' for cell in row) + "\n" for row in rows]
    (root / "triplets.csv").write_text("".join(lines), "utf-8")
    (root / "STS-B").mkdir()
    for seed, split in enumerate(("train", "dev", "test"), 20):
        pairs = zip(*demo.scored_pairs(100, seed))
        lines = [f"{first}\t{second}\t{score}\n" for first, second, score in pairs]
        text = "".join(["sentence1\tsentence2\tscore\n", *lines])
        (root / "STS-B" / f"{split}.tsv").write_text(text, "utf-8")
    return root


@pytest.fixture(scope="session")
def processes(tmp_path_factory):
    """Programs as processes of their own, without the time to load torch: see processes.py."""
    server = Processes(tmp_path_factory.mktemp("processes"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def run():
    """run("ckd.py", "--option", ...) -> the finished process of its own.

    Options that are no str are turned into str; keyword arguments are environment variables.
    """

    def call(script, *options, **environment):
        variables = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment
        if PARALLEL:
            variables["OMP_NUM_THREADS"] = "1"
        return subprocess.run(
            [sys.executable, ROOT / script, *map(str, options)],
            capture_output=True,
            text=True,
            env=variables,
            cwd=ROOT,
        )

    return call


@pytest.fixture
def call_main(monkeypatch, capsys):
    """call_main(ckd, "--option", ...): the script's main in this process -> what it prints."""

    def call(script, *options):
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, options)])
        capsys.readouterr()
        script.main()
        return capsys.readouterr().out

    return call


@pytest.fixture
def fails(monkeypatch, capsys):
    """fails(ckd, "--option", ...) -> the error line of a script's main.

    It must be the only one, and the exit status must be 2.
    """

    def call(script, *options):
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, options)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            command_line.run_main(script.main)
        lines = capsys.readouterr().err.splitlines()
        assert exit.value.code == command_line.INVALID_INPUT
        assert lines[-1].startswith("error: "), lines
        assert sum("error" in line for line in lines) == 1, lines
        return lines[-1]

    return call


@pytest.fixture
def small_disk(tmp_path):
    """small_disk(megabytes) -> a folder that takes no more."""
    mounted = []

    def make(megabytes):
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", folder]
        if os.getuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("this machine lets the tests mount no file system")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)
