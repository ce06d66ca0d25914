"""What the tests share: small models made on the spot, the demo's files."""

import atexit
import csv
import json
import math
import os
import shutil
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

# Before the other imports: no test reads or fills the user's own cache, asks the Hub, or has a GPU.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="distillation-tests-")
os.environ["HF_HUB_OFFLINE"] = "1"
# What they compare to the bit differs on a GPU: TESTS_ON_GPU=1 python -m pytest shows where. There,
# scripts train in fp32 by default, as the numbers computed by hand are exact.
ON_GPU = bool(os.environ.get("TESTS_ON_GPU"))
if not ON_GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Two processes with two threads each take three times as long on two cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

import common

if ON_GPU:
    torch.cuda.is_bf16_supported = lambda **_: False
DEMO = ROOT / "demo"
JUDGMENTS = ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",")
MODELS = dict(bert=32, wide=48, roberta=32, distilbert=32)  # folders, dimensions


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=1, help="SIGKILLs of each script in test_run.py")


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
    """metrics.jsonl of a run, its earlier stage's first -> list of dict, empty before it begins."""
    files = [Path(run_folder, stage, "metrics.jsonl") for stage in ("distill", "teacher", "")]
    return [json.loads(line) for file in files if file.exists() for line in file.open()]


def losses(run_folder):
    """{(stage, step): loss}"""
    return {(row["stage"], row["step"]): row["loss"] for row in rows(run_folder) if "loss" in row}


def dev_scores(run_folder):
    """{(stage, step): dev score}"""
    return {(row["stage"], row["step"]): row["dev"] for row in rows(run_folder) if "dev" in row}


def scores_in_order(numbers):
    """A spearman() that gives each student, known by its weights, the next of the numbers."""
    scores = {}

    def score(embed, encoder, pairs, vectors_of=None):
        weights = common.digest(value.cpu().numpy() for value in encoder.state_dict().values())
        if weights not in scores:
            scores[weights] = next(numbers)
        return scores[weights]

    return score


def cosine(a, b):
    """The cosine of two lists of numbers, in plain Python."""
    dot = sum(x * y for x, y in zip(a, b))
    return dot / (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5


def infonce(anchors, keys, tau, own_keys=None):
    """InfoNCE by loops; own_keys: for each anchor, further keys that it alone has."""
    total = 0.0
    for i, anchor in enumerate(anchors):
        all_keys = [*keys, *own_keys[i]] if own_keys else keys
        exponentials = [math.exp(cosine(anchor, key) / tau) for key in all_keys]
        total -= math.log(exponentials[i] / sum(exponentials))
    return total / len(anchors)


def random_rows(*shape, seed=0):
    """Normally distributed, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


class Adam:
    """Adam as its paper has it, or without `correction` of its moments' start at zero; gradients
    are clipped at norm 1, together or `each` tensor."""

    def __init__(
        self, parameters, betas=(0.9, 0.999), eps=1e-8, decay=0, each=False, correction=True
    ):
        self.parameters, self.betas, self.eps, self.decay = list(parameters), betas, eps, decay
        self.each, self.correction = each, correction
        self.moments = [[torch.zeros_like(x), torch.zeros_like(x)] for x in self.parameters]
        self.steps = 0

    def step(self, loss, lr):
        self.steps += 1
        gradients = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
        squares = [gradient.square().sum() for gradient in gradients]
        squares = squares if self.each else [sum(squares)] * len(squares)
        norms = [square.sqrt().clamp(min=1) for square in squares]
        assert max(norms) > 1 or self.steps > 2  # so that the clipping counts
        first, second = self.betas
        for value, gradient, norm, (m, v) in zip(self.parameters, gradients, norms, self.moments):
            m += (1 - first) * (gradient / norm - m)
            v += (1 - second) * ((gradient / norm) ** 2 - v)
            past = self.steps if self.correction else math.inf
            scale = (v / (1 - second**past)).sqrt() + self.eps
            decay = self.decay * (value.ndim > 1)  # biases and norms do not decay
            value.data -= lr * (decay * value + m / (1 - first**past) / scale)


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A folder of small data, the first lines of demo/'s."""
    root = tmp_path_factory.mktemp("files")
    counts = {"sentences.txt": 300, "dev.tsv": 60, "triplets.csv": 101, "pairs.tsv": 100}
    counts |= {f"stsb/{split}.jsonl": 100 for split in ("train", "validation", "test")}
    (root / "stsb").mkdir()
    for name, count in counts.items():
        (root / name).write_text("\n".join(demo_lines(name, count)) + "\n", "utf-8")
    return root


def alter(path, change):
    """Change a file of JSON or of tensors by a dict of new values, or by a function."""
    is_json = path.suffix == ".json"
    content = common.read_json(path, {}) if is_json else load_file(path)
    change(content) if callable(change) else content.update(change)
    if is_json:
        path.write_text(json.dumps(content))
    else:
        save_file(content, path, {"format": "pt"})


def write(path, lines, encoding="utf-8"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(line + "\n" for line in lines).encode(encoding))


@pytest.fixture
def senteval(tmp_path):
    """A small SentEval folder: a header, a byte order mark, Latin-1 and a blank line."""
    from extras import eval_transfer

    folder, texts = tmp_path / "data" / "downstream", demo_sentences(120)
    for task in ("MR", "CR", "SUBJ", "MPQA"):
        negative, positive = eval_transfer.LAYOUTS[task].files["train"]
        write(folder / negative, texts[40:80])
        write(folder / positive, [*texts[:40], ""])
    questions = [f"{('DESC', 'NUM', 'HUM')[i % 3]}:x {text} \xe9" for i, text in enumerate(texts)]
    write(folder / "TREC/train_5500.label", questions[:90], "latin-1")
    write(folder / "TREC/TREC_10.label", questions[90:], "latin-1")
    rows = [(a, a[::-1], i % 2, i % 11 / 2, JUDGMENTS[i % 3]) for i, a in enumerate(texts)]
    for split, sick in dict(train="train", dev="trial", test="test_annotated").items():
        lines = {
            f"MRPC/msr_paraphrase_{split}.txt": "{2}\t1\t2\t{0}\t{1}",
            f"SICK/SICK_{sick}.txt": "1\t{0}\t{1}\t{3}\t{4}\r",
            f"STS/STSBenchmark/sts-{split}.csv": "a\tb\tc\td\t{3}\t{0}\t{1}",
            f"SST/binary/sentiment-{split}": "{0}\t{2}",
            **{f"SNLI/s1.{split}": "{0}", f"SNLI/s2.{split}": "{1}"},
        }
        part = rows[:80] if split == "train" else rows[80:]
        for file, line in lines.items():
            header = ["\ufeffid\tfirst\tsecond\tscore\tjudgment"]
            header *= file.startswith(("MRPC", "SICK"))
            write(folder / file, header + [line.format(*row) for row in part])
        write(folder / f"SNLI/labels.{split}", [row[4].lower() for row in part])
    for year in range(12, 17):
        sts = folder / f"STS/STS{year}-en-test"
        write(sts / "STS.input.news.txt", [f"{row[0]}\t{row[1]}" for row in rows[year:80]])
        write(sts / "STS.gs.news.txt", [str(row[3]) for row in rows[year:80]])
    return folder


@pytest.fixture
def wordnet(tmp_path):
    """A small database of WordNet 3; "big" is also a noun that no text has."""
    files = {
        "data.noun": ["00000001 05 n 02 dog 0 domestic_dog 0", "00000002 05 n 02 dog 1 hound 0"],
        "index.noun": ["big n 1 0 1 0 00000002", "dog n 2 2 @ ~ 2 1 00000001 00000002"],
        "data.adj": ["00000001 00 a 02 big 0 large(p) 0 000 | of size"],
        "index.adj": ["big a 1 0 1 1 00000001", "large a 1 0 1 1 00000001"],
        "data.verb": ["00000001 30 v 01 run 0 000 00 | move"],
        "index.verb": ["run v 1 0 1 1 00000001"],
        "data.adv": ["00000001 02 r 01 soon 0 000 | in time"],
        "index.adv": ["soon r 1 0 1 1 00000001"],
    }
    for name, lines in files.items():
        text = "".join(f"{line}  \n" for line in ["  1 This software is provided to you", *lines])
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture(scope="session")
def shared_data():
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no ../shared/data beside the project: tests on real data need it")
    return folder


# ---- models


def word_tokenizer():
    """A BERT tokenizer whose vocabulary is the words of the demo's sentences."""
    words = set()
    for text in demo_sentences(3000):
        words.update(text.lower().rstrip(".").split())
    vocabulary = {word: i for i, word in enumerate([*SPECIAL_TOKENS, *sorted(words)])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    marks = dict(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1")
    marks["special_tokens"] = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(**marks)
    names = {f"{token[1:-1].lower()}_token": token for token in SPECIAL_TOKENS[:5]}
    names |= dict(tokenizer_object=tokenizer, model_max_length=128)
    return transformers.PreTrainedTokenizerFast(**names)


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory):
    """Small models of four layers: plain ones, and mean (normalized), cls and pooler, with
    modules.json."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = word_tokenizer()
    for name, size in MODELS.items():
        options = dict(vocab_size=len(tokenizer), hidden_size=size, pad_token_id=0)
        options |= dict(num_hidden_layers=4, num_attention_heads=4)
        more = dict(intermediate_size=2 * size, initializer_range=0.3)
        options |= dict(hidden_dim=2 * size) if name == "distilbert" else more
        # RoBERTa's positions begin after the number of its padding token.
        options |= dict(max_position_embeddings=128 + (name == "roberta"))
        torch.manual_seed(size)
        config = transformers.AutoConfig.for_model("bert" if name == "wide" else name, **options)
        transformers.AutoModel.from_config(config).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    for pooling in ("mean", "cls", "pooler"):
        encoder = common.load_encoder(root / "bert", pooling)
        encoder.normalize = pooling == "mean"
        common.save_encoder(encoder, root / pooling)
    return root


@pytest.fixture(scope="session")
def translators(models_folder, tmp_path_factory):
    """Two small random MarianMT models, and sentences. Marian's own tokenizer needs sentencepiece;
    this one is BERT's, of words."""
    root = tmp_path_factory.mktemp("translators")
    (root / "train.txt").write_text("\n".join(demo_sentences(40)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(models_folder / "bert")
    options = dict(vocab_size=len(tokenizer), d_model=32, max_position_embeddings=300, init_std=1.0)
    for side in ("encoder", "decoder"):
        options |= {f"{side}_layers": 1, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
    end = tokenizer.sep_token_id
    options |= dict(pad_token_id=0, decoder_start_token_id=0, eos_token_id=end)
    options |= dict(forced_eos_token_id=end, tie_word_embeddings=False, num_beams=4, max_length=512)
    for seed, name in enumerate(("there", "back")):
        torch.manual_seed(seed)
        model = transformers.MarianMTModel(transformers.MarianConfig(**options))
        model.final_logits_bias[0, end] = 9  # most translations end before their limit
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


# ---- programs


@pytest.fixture
def parse():
    """parse(ckd, "--option", ...) -> the values of its options."""
    return lambda script, *words: common.read_options(script.Options, "", list(map(str, words)))


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
    """fails(ckd, "--option", ...) -> the only error line of a script's main; status 2."""

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
    """A run's folder holds its best student, for everybody -> its vectors of 20 sentences."""
    from sentence_transformers import SentenceTransformer

    encoder = common.load_encoder(folder)
    dev = common.spearman(script.embed, encoder, common.read_scored_pairs(dev_file))
    assert dev == pytest.approx(best, abs=1e-4)
    assert f"{dev:.2f}" in printed.splitlines()[-1]
    assert f"{dev:.2f}" in (folder / "README.md").read_text()
    vectors = common.encode(script.embed, encoder, demo_sentences(20))
    theirs = SentenceTransformer(str(folder), device="cpu").encode(demo_sentences(20))
    assert np.abs(theirs - vectors).max() < 1e-5
    return vectors


def outcome(folder):
    """All that a run leaves: its log without times, its table, a digest of each other file."""
    log = [{k: v for k, v in row.items() if k != "seconds"} for row in rows(folder)]
    table = [line for line in (folder / "README.md").read_text().splitlines() if line[:1] == "|"]
    digests = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_file() and path.name not in ("README.md", "metrics.jsonl"):
            digests[name] = sha256(path.read_bytes()).hexdigest()
    assert {"model.safetensors", "modules.json", "args.json"} <= set(digests)
    return log, table, digests


@pytest.fixture
def one_part(monkeypatch):
    """A batch is one part, in its order: in parts, its texts would draw other dropout."""
    monkeypatch.setattr(common, "similar_lengths", lambda lengths, *_: [np.arange(len(lengths))])


@pytest.fixture
def check_resume(call_main, monkeypatch, tmp_path):
    """check_resume(ckd, "distill", 4, "--option", ...): nothing shows that a run was interrupted.

    It dies in this stage, after this step's dev score, and "before" or "after" the stage's first
    checkpoint; several moments: one after the other. The same command continues it each time.
    """

    def check(script, stage, moments, *options):
        moments = [*moments] if isinstance(moments, tuple) else [moments]
        begin, log = common.Run.begin, common.Run.log

        def die_at(run, moment):
            if run.stage == stage and moments[:1] == [moment]:
                del moments[0]
                raise KeyboardInterrupt

        def dying_begin(run, *rest):
            die_at(run, "before")
            progress = begin(run, *rest)
            die_at(run, "after")
            return progress

        def dying_log(run, step, **values):
            log(run, step, **values)
            if "dev" in values:
                die_at(run, step)

        monkeypatch.setattr(common, "LOG_STEPS", 1)
        monkeypatch.setattr(common, "CHECKPOINT_SECONDS", 0)
        table = call_main(script, *options, "--output", tmp_path / "whole")
        monkeypatch.setattr(common.Run, "begin", dying_begin)
        monkeypatch.setattr(common.Run, "log", dying_log)
        while moments:
            with pytest.raises(KeyboardInterrupt):
                call_main(script, *options, "--output", tmp_path / "stopped")
        assert call_main(script, *options, "--output", tmp_path / "stopped") == table
        assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")

    return check
