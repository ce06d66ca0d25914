"""What the tests share: small models made on the spot, the demo's files, the real teacher and data.

The teacher comes from its pip package, the data from ../shared/data where that folder is there.
"""

import atexit
import csv
import io
import json
import math
import os
import shutil
import sys
import tarfile
import tempfile
import time
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Set before common is imported, so that no test reads or fills the user's own cache.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="distillation-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
# Two processes with two threads each take three times as long on two cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

import common

DEMO = ROOT / "demo"
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",")
LONGEST_INPUT = 128  # tokens
MODELS = (  # folder, kind, dimension
    ("bert", "Bert", 32),
    ("wide", "Bert", 48),
    ("roberta", "Roberta", 32),
    ("distilbert", "DistilBert", 32),
)


def pytest_addoption(parser):
    help = "changed files that test_fuzz.py reads, for each reader; 100"
    parser.addoption("--fuzz-examples", type=int, default=100, help=help)
    parser.addoption("--soak", type=int, default=5, help="SIGKILLs of test_soak.py; 5")
    help = "which moments test_soak.py takes; the time"
    parser.addoption("--soak-seed", type=int, default=int(time.time()), help=help)


# ---- files


def demo_lines(name, count=None):
    """The first lines of a file of demo/, without line ends."""
    return (DEMO / name).read_text("utf-8").splitlines()[:count]


def demo_sentences(count):
    return demo_lines("sentences.txt", count)


def demo_triplets(count):
    """-> three lists of `count` texts: anchors, positives, hard negatives."""
    rows = list(csv.reader(demo_lines("triplets.csv", count + 1)))[1:]
    return [list(column) for column in zip(*rows)]


def rows(run_folder):
    """metrics.jsonl of a run -> list of dict."""
    return [json.loads(line) for line in (Path(run_folder) / "metrics.jsonl").open()]


def losses(run_folder):
    """The losses that a run has logged -> {(stage, step): loss}."""
    return {(row["stage"], row["step"]): row["loss"] for row in rows(run_folder) if "loss" in row}


def dev_scores(run_folder):
    """{(stage, step): dev score}"""
    return {(row["stage"], row["step"]): row["dev"] for row in rows(run_folder) if "dev" in row}


def cosine(a, b):
    """The cosine of two lists of numbers, in plain Python."""
    dot = sum(x * y for x, y in zip(a, b))
    return dot / (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5


def infonce(anchors, keys, tau, own_keys=None):
    """The mean of -log( exp(cos(a_i, k_i) / tau) / sum_j exp(cos(a_i, k_j) / tau) ), by loops.

    own_keys: for each anchor, further keys that it alone is contrasted with.
    """
    total = 0.0
    for i, anchor in enumerate(anchors):
        all_keys = [*keys, *own_keys[i]] if own_keys else keys
        exponentials = [math.exp(cosine(anchor, key) / tau) for key in all_keys]
        total -= math.log(exponentials[i] / sum(exponentials))
    return total / len(anchors)


def random_rows(*shape, seed=0):
    """Normally distributed numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


class Adam:
    """Adam as its paper has it, with all gradients together clipped at norm 1."""

    def __init__(self, parameters, betas=(0.9, 0.999), eps=1e-8, decay=0):
        self.parameters, self.betas, self.eps, self.decay = list(parameters), betas, eps, decay
        self.moments = [[torch.zeros_like(x), torch.zeros_like(x)] for x in self.parameters]
        self.steps = 0

    def step(self, loss, lr):
        self.steps += 1
        gradients = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
        norm = sum(gradient.square().sum() for gradient in gradients).sqrt().clamp(min=1)
        assert norm > 1 or self.steps > 2  # so that the clipping counts
        first, second = self.betas
        for value, gradient, (m, v) in zip(self.parameters, gradients, self.moments):
            m += (1 - first) * (gradient / norm - m)
            v += (1 - second) * ((gradient / norm) ** 2 - v)
            scale = (v / (1 - second**self.steps)).sqrt() + self.eps
            value.data -= lr * (self.decay * value + m / (1 - first**self.steps) / scale)


def tar_of(name, data):
    """A tar file with one file in it, as bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A folder of small data: sentences.txt (300), dev.tsv (60 pairs), triplets.csv (100 rows),
    pairs.tsv (100), and STS-B/ in GLUE's layout (100 pairs each)."""
    root = tmp_path_factory.mktemp("files")
    counts = {"sentences.txt": 300, "dev.tsv": 60, "triplets.csv": 101, "pairs.tsv": 100}
    counts |= {f"STS-B/{split}.tsv": 101 for split in ("train", "dev", "test")}
    (root / "STS-B").mkdir()
    for name, count in counts.items():
        source = f"glue/{name}" if "/" in name else name
        (root / name).write_text("\n".join(demo_lines(source, count)) + "\n", "utf-8")
    return root


@pytest.fixture(scope="session")
def shared_data():
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no ../shared/data beside the project: tests on real data need it")
    return folder


# ---- models


@pytest.fixture(scope="session")
def teacher():
    """all-MiniLM-L6-v2 from its pip package, as the README's test command installs it."""
    return common.load_encoder(common.MINILM).eval()


def word_tokenizer():
    """A BERT tokenizer whose vocabulary is the words of the demo's sentences."""
    words = set()
    for text in demo_sentences(3000):
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
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=LONGEST_INPUT,
    )


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory):
    """Folders of small models with four layers.

    Plain: bert (32 dimensions), wide (48), roberta, distilbert. In sentence-transformers' layout:
    mean (normalized), cls, pooler.
    """
    root = tmp_path_factory.mktemp("models")
    tokenizer = word_tokenizer()
    for name, kind, size in MODELS:
        options = dict(vocab_size=len(tokenizer), hidden_size=size, pad_token_id=0)
        options |= dict(num_hidden_layers=4, num_attention_heads=4)
        if kind == "DistilBert":
            options |= dict(hidden_dim=2 * size)
        else:
            options |= dict(intermediate_size=2 * size, initializer_range=0.3)
        # RoBERTa's positions begin after the number of its padding token.
        options |= dict(max_position_embeddings=LONGEST_INPUT + (kind == "Roberta"))
        torch.manual_seed(size)
        config = getattr(transformers, f"{kind}Config")(**options)
        transformers.AutoModel.from_config(config).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    for pooling in ("mean", "cls", "pooler"):
        encoder = common.load_encoder(root / "bert", pooling)
        encoder.normalize = pooling == "mean"
        common.save_encoder(encoder, root / pooling)
    return root


# ---- programs


@pytest.fixture
def parse(monkeypatch):
    """parse(ckd, "--option", ...) -> what a script makes of its options."""

    def call(script, *options):
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, options)])
        return script.parse_args()

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
def fails(call_main, capsys):
    """fails(ckd, "--option", ...) -> the error line of a script's main.

    It must be the only one, and the exit status must be 2.
    """

    def call(script, *options):
        with pytest.raises(SystemExit) as exit:
            common.run_main(lambda: call_main(script, *options))
        lines = capsys.readouterr().err.splitlines()
        assert exit.value.code == 2
        assert lines[-1].startswith("error: "), lines
        assert sum("error:" in line for line in lines) == 1, lines
        return lines[-1]

    return call


def check_student(script, folder, dev_file, best, printed):
    """A run's folder holds its best student, for everybody -> its vectors of 20 sentences.

    It has the best dev score, the table's last line and the card state it, and SentenceTransformer
    computes the same vectors.
    """
    from sentence_transformers import SentenceTransformer

    encoder = common.load_encoder(folder)
    sets = {"dev": common.read_scored_pairs(dev_file)}
    dev = common.spearman(script.embed, encoder, sets)["dev"]
    assert dev == pytest.approx(best, abs=1e-4)
    assert f"{dev:.2f}" in printed.splitlines()[-1]
    assert f"{dev:.2f}" in (folder / "README.md").read_text()
    vectors = common.encode(script.embed, encoder, demo_sentences(20))
    theirs = SentenceTransformer(str(folder), device="cpu").encode(demo_sentences(20))
    assert np.abs(theirs - vectors).max() < 1e-5
    return vectors


def outcome(run_folder):
    """All that a run's training gives: losses, dev scores, and a digest of each file of weights."""
    digests = {}
    for path in run_folder.rglob("*.safetensors"):
        if path.parent.name != "checkpoint":
            name = str(path.relative_to(run_folder))
            digests[name] = sha256(path.read_bytes()).hexdigest()
    assert digests
    return losses(run_folder), dev_scores(run_folder), digests


@pytest.fixture
def check_resume(call_main, monkeypatch, tmp_path):
    """check_resume(ckd, "distill", 4, "--option", ...): nothing shows that a run was interrupted.

    Stopped after this step's dev score and resumed, it prints the same table, logs the same losses
    and dev scores, and writes the same bytes as a run that was left alone.
    """

    def check(script, stage, step, *options):
        whole, stopped = tmp_path / "whole", tmp_path / "stopped"
        monkeypatch.setattr(common, "LOG_STEPS", 1)
        table = call_main(script, *options, "--output", whole)
        log_dev = common.Run.log_dev

        def stop(run, number, score):
            log_dev(run, number, score)
            if (run.stage, number) == (stage, step):
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(common.Run, "log_dev", stop)
            call_main(script, *options, "--output", stopped)
        assert call_main(script, *options, "--output", stopped, "--resume") == table
        assert outcome(stopped) == outcome(whole)

    return check
