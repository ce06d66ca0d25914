"""Small models made on the spot, the real teacher where its pip package is installed, and the real data where ../shared/data is."""
import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel, PreTrainedTokenizerFast, RobertaConfig, RobertaModel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="distillation-tests-")  # before common is imported
PARALLEL = "PYTEST_XDIST_WORKER" in os.environ  # two processes with two threads each on two cores take three times as long
if PARALLEL:
    torch.set_num_threads(1)
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

import common  # noqa: E402
import demo  # noqa: E402


@pytest.fixture(scope="session")
def shared_data():
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no ../shared/data beside the project: tests on real data need it")
    return folder


@pytest.fixture(scope="session")
def teacher():
    """all-MiniLM-L6-v2 from its pip package, as the README's test command installs it."""
    return common.load_encoder(common.MINILM).eval()


def word_tokenizer():
    words = sorted({word for text in demo.sentences(3000) for word in text.lower().rstrip(".").split()})
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",", *words])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
                                   mask_token="[MASK]", model_max_length=128)


def build(folder, kind, size=32, layers=4, seed=0):
    """A plain transformers folder with random weights."""
    torch.manual_seed(seed)
    tokenizer = word_tokenizer()
    if kind == "distilbert":
        model = DistilBertModel(DistilBertConfig(vocab_size=len(tokenizer), dim=size, n_layers=layers, n_heads=4, hidden_dim=2 * size,
                                                 max_position_embeddings=128))
    else:
        config, model_class = dict(bert=(BertConfig, BertModel), roberta=(RobertaConfig, RobertaModel))[kind]
        model = model_class(config(vocab_size=len(tokenizer), hidden_size=size, num_hidden_layers=layers, num_attention_heads=4,
                                   intermediate_size=2 * size, initializer_range=0.3, pad_token_id=0, max_position_embeddings=128 + (kind == "roberta")))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory):
    """Plain folders bert (width 32, four layers), wide (48), roberta, distilbert, and sentence-transformers folders mean, cls, pooler."""
    root = tmp_path_factory.mktemp("models")
    for name, kind, size in (("bert", "bert", 32), ("wide", "bert", 48), ("roberta", "roberta", 32), ("distilbert", "distilbert", 32)):
        build(root / name, kind, size, seed=size)
    for pooling in ("mean", "cls", "pooler"):
        encoder = common.load_encoder(root / "bert", pooling)
        encoder.normalize = pooling == "mean"
        (root / pooling).mkdir()
        encoder.save(root / pooling)
    return root


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """sentences.txt, dev.tsv, triplets.csv of the demo, small."""
    root = tmp_path_factory.mktemp("files")
    (root / "sentences.txt").write_text("\n".join(demo.sentences(300)) + "\n", "utf-8")
    pairs = demo.graded(60, seed=7)
    (root / "dev.tsv").write_text("".join(f"{a}\t{b}\t{score}\n" for a, b, score in zip(*pairs)), "utf-8")
    rows = [["sent0", "sent1", "hard_neg"], *demo.triplets(100)]
    (root / "triplets.csv").write_text("".join(",".join(f'"{cell}"' for cell in row) + "\n" for row in rows), "utf-8")
    return root


@pytest.fixture(scope="session")
def run():
    """run("ckd.py", "--option", …) -> the finished process; options that are no str are turned into str."""
    def call(script, *options, **environment):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment | ({"OMP_NUM_THREADS": "1"} if PARALLEL else {})
        return subprocess.run([sys.executable, ROOT / script, *map(str, options)], capture_output=True, text=True, env=environment, cwd=ROOT)
    return call


@pytest.fixture
def fails(monkeypatch, capsys):
    """fails(ckd, "--option", …): calls the script's main, which must end with status 2 and one line of error -> that line."""
    def call(script, *options):
        monkeypatch.setattr(sys, "argv", [script.__name__ + ".py", *map(str, options)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            common.run_main(script.main)
        lines = capsys.readouterr().err.splitlines()
        assert exit.value.code == 2 and lines[-1].startswith("error: ") and sum("error" in line for line in lines) == 1, lines
        return lines[-1]
    return call
