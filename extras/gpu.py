# SPDX-License-Identifier: MIT
"""What one GPU does in a step: the measurement behind `python -m extras.benchmark --only gpu`.

Models with random weights (BERT with three and six layers of 384, and BERT-base's twelve of 768)
embed sentences of real lengths, N at a time, in bf16, and train on the squared error to random
targets, as ckd.py --objective kd does. Three ways to make the forward pass: `padded`, N texts to
the longest; `parts`, common.embed_texts(); `one row`, extras/one_row.py.

  sentences/s, tokens/s   without padding; all sentences are tokenized before a step begins
  % of peak               floating-point operations of the tokens that are not padding, against a
                          product of two bf16 matrices of 8,192 x 8,192 on the same card
  GB                      peak memory that torch has allocated
  passes                  forward passes of a step; "padding" is in percent of their tokens

A line of part "tokenization" has steps with real tokenization, in parts: in the step, as the
scripts make it, and of the next batch, meanwhile, by another thread; "tokenizing, %" is the share
of tokenization alone in a step of the first kind.
"""

import importlib.util
import itertools
import shutil
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import ckd
import common
from common import Batches, embed_texts, encode, load_encoder, note, tokenize
from extras.one_row import embed_in_one_row

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {  # layers, width, heads
    "3 layers of 384": (3, 384, 12),
    "6 layers of 384": (6, 384, 12),
    "12 layers of 768": (12, 768, 12),
}
TINY = {"2 layers of 32": (2, 32, 2)}
VIEWS = ("view", "transpose", "permute", "expand", "slice", "select", "detach", "unsqueeze", "t.")


class Launches(TorchDispatchMode):
    """Counts operations that start work on a device: all but views, and what waits for it."""

    def __init__(self):
        super().__init__()
        self.counts = defaultdict(int)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))

    def launches(self):
        return sum(
            count
            for name, count in self.counts.items()
            if not any(name.startswith(f"aten.{view}") for view in VIEWS)
        )


def seconds_of(work, at_least, warm_up=3):
    """Call work() until `at_least` seconds have passed, after `warm_up` calls -> seconds a call."""
    for _ in range(warm_up):
        work()
    synchronize()
    calls = 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < at_least:
        for _ in range(5):
            work()
        synchronize()
        calls += 5
    return (time.perf_counter() - begin) / calls


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def peak_flops(size):
    """Floating-point operations per second of a product of two bf16 matrices [size, size]."""
    a = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)
    b = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)
    return 2 * size**3 / seconds_of(lambda: a @ b, 0.5)


def forward_flops(model, lengths):
    """Floating-point operations of a forward pass over texts of these lengths, without padding.

    A multiplication and an addition for each weight of a layer and each token, and for each pair of
    tokens of a text, once for the weights of attention and once for its values.
    """
    layers = model.encoder.layer
    weights = sum(value.numel() for value in layers.parameters() if value.ndim == 2)
    pairs = (lengths.astype(np.int64) ** 2).sum()
    return 2 * weights * lengths.sum() + 4 * len(layers) * model.config.hidden_size * pairs


def random_encoder(folder, shape):
    """A BERT of this shape with random weights and a real tokenizer -> Encoder on the device."""
    layers, width, heads = shape
    torch.manual_seed(0)
    sizes = dict(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads)
    config = transformers.BertConfig(intermediate_size=4 * width, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(common.resolve_model(common.MINILM))
    tokenizer.save_pretrained(folder)
    return load_encoder(folder, "mean", dropout=0.0, device=DEVICE)


class KnownTexts:
    """In the place of an encoder's tokenizer: what that one makes of n texts, tokenized once."""

    def __init__(self, encoder, texts, max_length):
        self.pad_token_id = encoder.tokenizer.pad_token_id
        self.token_ids = dict(zip(texts, tokenize(encoder, texts, max_length)))

    def __call__(self, texts, **options):
        return SimpleNamespace(input_ids=[self.token_ids[text] for text in texts])


class AheadTexts:
    """In the place of a tokenizer: tokenizes the batch after this one while the step goes on."""

    def __init__(self, encoder, batches, max_length):
        self.tokenizer = encoder.tokenizer
        self.pad_token_id = encoder.tokenizer.pad_token_id
        self.options = dict(truncation=True, max_length=max_length)
        self.batches = itertools.cycle(batches)
        self.thread = ThreadPoolExecutor(1)
        self.begin_next()

    def begin_next(self):
        self.next = self.thread.submit(self.tokenizer, next(self.batches), **self.options)

    def __call__(self, texts, **options):
        done = self.next.result()
        self.begin_next()
        return done


def embed_padded(embed, encoder, texts, max_length=None):
    """embed() of a batch in one part, padded to its longest text."""
    part = np.arange(len(texts))
    with mock.patch.object(common, "similar_lengths", lambda *_: [part]):
        return embed_texts(embed, encoder, texts, max_length)


WAYS = {"padded": embed_padded, "parts": embed_texts, "one row": embed_in_one_row}


def embed_batch(embed, encoder, texts, work, way):
    """embed() of N texts -> [N, D], on the device for training, on the host for encoding."""
    if work == "training":
        with torch.autocast(DEVICE, torch.bfloat16):
            return WAYS[way](embed, encoder, texts)
    if way == "parts":
        return encode(embed, encoder, texts, precision="bf16")
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        return WAYS[way](embed, encoder, texts).cpu().numpy()


def passes_of(encoder, texts, work, way):
    """The forward passes that embed_batch() makes -> their numbers of tokens, with padding."""
    computed = []

    def count(encoder, input_ids, attention_mask):
        computed.append(input_ids.numel() if way != "one row" else attention_mask.sum().item())
        return torch.ones(len(input_ids), 1, device=input_ids.device)

    embed_batch(count, encoder, texts, work, way)
    return computed


def training_step(encoder, batches, way):
    """batches: of texts, all of one size -> a function that makes the next step of KD by ckd.py."""
    random, shape = np.random.default_rng(0), (len(batches[0]), encoder.dimension)
    targets = [random.standard_normal(shape, np.float32) for _ in batches]
    examples = itertools.cycle(zip(batches, targets))
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-5, fused=True)
    encoder.train()

    def work():
        texts, target = next(examples)
        embedding = embed_batch(ckd.embed, encoder, texts, "training", way)
        loss = ckd.mse_loss(embedding, torch.from_numpy(target).to(DEVICE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return work


def encoding_step(encoder, batches, way):
    """-> a function that embeds the next batch of texts and brings their vectors to the host."""
    examples = itertools.cycle(batches)
    encoder.eval()
    return lambda: embed_batch(ckd.embed, encoder, next(examples), "encoding", way)


WARM_UP = 20  # steps: kernels are loaded and memory is taken when a shape is met for the first time
STEPS = {"training": training_step, "encoding": encoding_step}


def measure(args, folder, sentences, machine):
    """Yield a line for each setting: its model, work, batch and way, and the numbers measured."""
    tiny = args.tiny
    peak = peak_flops(256 if tiny else 8192)
    for name, shape in (TINY if tiny else SHAPES).items():
        encoder = random_encoder(folder / name.replace(" ", "-"), shape)
        yield from measure_tokenization(args, encoder, sentences, name, machine)
        encoder.tokenizer = KnownTexts(encoder, sentences, args.max_length)
        for work in STEPS:
            for size in args.batch_sizes:
                drawn = Batches(len(sentences), size, 0).draw(0)
                whole = [[sentences[row] for row in rows] for rows in drawn if len(rows) == size]
                for way in WAYS:
                    line = dict(part="gpu", model=name, work=work, batch=size)
                    line |= dict(way=way, machine=machine, peak_tflops=round(peak / 1e12, 1))
                    yield line | measure_one(encoder, whole, work, way, peak, tiny)
        yield measure_launches(encoder, name, machine)
        del encoder


def measure_tokenization(args, encoder, sentences, name, machine):
    """Yield a line for each batch size: steps of training with tokenization in them and ahead."""
    tokenizer, limit = encoder.tokenizer, args.max_length
    encoder.max_length = limit
    at_least, warm_up = (0.05, 1) if args.tiny else (0.6, WARM_UP)
    for size in args.batch_sizes:
        drawn = Batches(len(sentences), size, 0).draw(0)
        batches = [[sentences[row] for row in rows] for rows in drawn if len(rows) == size]
        texts = itertools.cycle(batches)
        alone = seconds_of(lambda texts=texts: tokenize(encoder, next(texts)), at_least)
        spent = {}
        for way in ("in the step", "ahead"):
            if way == "ahead":
                encoder.tokenizer = AheadTexts(encoder, batches, limit)
            spent[way] = seconds_of(training_step(encoder, batches, "parts"), at_least, warm_up)
        encoder.tokenizer = tokenizer
        line = dict(part="tokenization", model=name, batch=size, machine=machine)
        line |= {f"sentences/s, {way}": round(size / spent[way], 1) for way in spent}
        yield line | {"tokenizing, %": round(100 * alone / spent["in the step"], 1)}


def measure_theirs(args, folder, sentences, machine, their_training):
    """sentence-transformers' trainer on the models of measure(), in bf16: yield lines."""
    has_flash = importlib.util.find_spec("flash_attn") and DEVICE == "cuda"
    if not has_flash:
        note("sentence-transformers with flash attention: skipped; pip install flash-attn")
    ways = {"as it comes": {}}
    ways |= {"flash": dict(attn_implementation="flash_attention_2")} if has_flash else {}
    for name, (_, width, _) in (TINY if args.tiny else SHAPES).items():
        place = folder / "theirs" / name
        shutil.copytree(folder / name.replace(" ", "-"), place / "student")
        targets = np.random.default_rng(0).standard_normal((len(sentences), width), np.float32)
        for size in args.batch_sizes:
            line = dict(part="theirs", model=name, batch=size, machine=machine)
            for way, model in ways.items():
                setting = (sentences, targets, None, place, "random", size, "bf16")
                line[f"sentences/s, {way}"] = round(their_training(*setting, **model), 1)
            yield line


def measure_one(encoder, batches, work, way, peak, tiny):
    """batches: of texts, all of one size -> the numbers, none if the card's memory is too small."""
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = STEPS[work](encoder, batches, way)
    at_least, warm_up = (0.05, 1) if tiny else (0.6, WARM_UP)
    try:
        step_seconds = seconds_of(step, at_least, warm_up)
    except torch.OutOfMemoryError:
        return {}
    memory = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    token_ids = encoder.tokenizer.token_ids
    lengths = np.array([len(token_ids[text]) for texts in batches for text in texts])
    flops = forward_flops(encoder.model, lengths) * (3 if work == "training" else 1)
    passes = [size for texts in batches for size in passes_of(encoder, texts, work, way)]
    return {
        "sentences/s": round(len(batches[0]) / step_seconds, 1),
        "tokens/s": round(lengths.sum() / len(batches) / step_seconds),
        "% of peak": round(100 * flops / len(batches) / step_seconds / peak, 2),
        "GB": round(memory / 1e9, 3),
        "passes": round(len(passes) / len(batches), 2),
        "padding": round(100 * (1 - lengths.sum() / sum(passes)), 1),
    }


def measure_launches(encoder, name, machine):
    """What a further forward and backward pass of two short texts costs -> a line.

    Its work is nearly nothing, so that its time is that of starting it. Operations are counted on a
    CPU, where the backward pass runs in the thread that counts.
    """
    encoder.train()
    shortest = min(encoder.tokenizer.token_ids.values(), key=len)
    ids = torch.tensor([shortest, shortest])

    def step(passes, device=DEVICE):
        with torch.autocast(device, torch.bfloat16):
            outputs = [
                ckd.embed(encoder, ids.to(device), torch.ones_like(ids).to(device)) for _ in passes
            ]
        torch.cat(outputs).sum().backward()

    spent = [seconds_of(partial(step, range(passes)), 0.5) for passes in (1, 5)]
    encoder.to("cpu")
    launches = []
    for passes in (1, 5):
        with Launches() as counted:
            step(range(passes), "cpu")
        launches.append(counted.launches())
    one_pass = (spent[1] - spent[0]) / 4
    count = (launches[1] - launches[0]) / 4
    line = dict(part="launches", model=name, machine=machine)
    line |= {"launches": count, "ms a pass": round(one_pass * 1000, 3)}
    return line | {"us a launch": round(one_pass * 1e6 / count, 2)}
