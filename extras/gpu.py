"""What one GPU does in a step: the measurement behind `python -m extras.benchmark --only gpu`.

Models with random weights (BERT with three and six layers of 384, and BERT-base's twelve of 768)
embed sentences of real lengths, N at a time, in bf16, and train on the squared error to random
targets, as ckd.py --objective kd does. Three ways to make the forward pass: `padded`, N texts to
the longest; `parts`, common.embed_rows(); `one row`, extras/one_row.py.

  sentences/s, tokens/s   without padding; batches are on the host when a step begins
  % of peak               floating-point operations of the tokens that are not padding, against a
                          product of two bf16 matrices of 8,192 x 8,192 on the same card
  GB                      peak memory that torch has allocated
  passes                  forward passes of a step; "padding" is in percent of their tokens
"""

import time
from collections import defaultdict
from functools import partial

import numpy as np
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import ckd
import common
from common import Batches, Tokens, encode, load_encoder, similar_lengths, to_device
from extras.one_row import embed_in_one_row

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {  # layers, width, heads
    "3 layers of 384": (3, 384, 12),
    "6 layers of 384": (6, 384, 12),
    "12 layers of 768": (12, 768, 12),
}
TINY = {"2 layers of 32": (2, 32, 2)}
WAYS = ("padded", "parts", "one row")
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


def embed_padded(embed, encoder, tokens, rows, device):
    return embed(encoder, *tokens.batch(rows, device))


def passes_of(way, lengths, width):
    """The forward passes over texts of these lengths -> row numbers of each."""
    if way == "parts":
        return similar_lengths(lengths, DEVICE, width)
    return [np.arange(len(lengths))]


def training_step(encoder, tokens, batches, way):
    """-> a function that makes the next step of ckd.py --objective kd."""
    embed_rows = dict(zip(WAYS, (embed_padded, common.embed_rows, embed_in_one_row)))[way]
    width = encoder.dimension
    targets = np.random.default_rng(0).standard_normal((len(tokens.lengths), width), np.float32)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-5, fused=True)
    autocast = torch.autocast(DEVICE, torch.bfloat16)
    encoder.train()
    step = 0

    def work():
        nonlocal step
        rows = batches[step % (len(tokens.lengths) // batches.batch_size)]  # whole batches
        step += 1
        with autocast:
            embedding = embed_rows(ckd.embed, encoder, tokens, rows, DEVICE)
        loss = ckd.mse_loss(embedding, to_device(targets[rows], DEVICE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return work


def encoding_step(encoder, tokens, batches, way):
    """-> a function that embeds the next N sentences and brings their vectors to the host."""
    embed_rows = dict(zip(WAYS, (embed_padded, None, embed_in_one_row)))[way]
    encoder.eval()
    step = 0

    @torch.no_grad()
    def work():
        nonlocal step
        rows = batches[step % (len(tokens.lengths) // batches.batch_size)]
        step += 1
        if way == "parts":
            return encode(ckd.embed, encoder, tokens, "bf16", rows)
        with torch.autocast(DEVICE, torch.bfloat16):
            return embed_rows(ckd.embed, encoder, tokens, rows, DEVICE).cpu().numpy()

    return work


WARM_UP = 20  # steps: kernels are loaded and memory is taken when a shape is met for the first time
STEPS = {"training": training_step, "encoding": encoding_step}


def measure(args, folder, sentences, machine):
    """Yield a line for each setting: its model, work, batch and way, and the numbers measured."""
    tiny = args.tiny
    peak = peak_flops(256 if tiny else 8192)
    for name, shape in (TINY if tiny else SHAPES).items():
        encoder = random_encoder(folder / name.replace(" ", "-"), shape)
        tokens = Tokens(encoder, sentences, args.max_length)
        for work in STEPS:
            for size in args.batch_sizes:
                for way in WAYS:
                    line = dict(part="gpu", model=name, work=work, batch=size)
                    line |= dict(way=way, machine=machine, peak_tflops=round(peak / 1e12, 1))
                    yield line | measure_one(encoder, tokens, work, size, way, peak, tiny)
        yield measure_launches(encoder, tokens, name, machine)
        del encoder


def measure_one(encoder, tokens, work, size, way, peak, tiny):
    """-> the numbers of a setting, none if the card's memory is too small."""
    batches = Batches(tokens.lengths, size, 0, False)
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = STEPS[work](encoder, tokens, batches, way)
    at_least, warm_up = (0.05, 1) if tiny else (0.6, WARM_UP)
    try:
        step_seconds = seconds_of(step, at_least, warm_up)
    except torch.OutOfMemoryError:
        return {}
    memory = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    whole = [rows for rows in batches.draw(0) if len(rows) == size]
    lengths = tokens.lengths[np.concatenate(whole)]
    flops = forward_flops(encoder.model, lengths) * (3 if work == "training" else 1) / len(whole)
    width = encoder.dimension
    passes = [
        tokens.lengths[rows][part]
        for rows in whole
        for part in passes_of(way, tokens.lengths[rows], width)
    ]
    computed = sum(len(part) * part.max() for part in passes)
    if way == "one row":
        computed = lengths.sum()
    return {
        "sentences/s": round(size / step_seconds, 1),
        "tokens/s": round(lengths.sum() / len(whole) / step_seconds),
        "% of peak": round(100 * flops / step_seconds / peak, 2),
        "GB": round(memory / 1e9, 3),
        "passes": round(len(passes) / len(whole), 2),
        "padding": round(100 * (1 - lengths.sum() / computed), 1),
    }


def measure_launches(encoder, tokens, name, machine):
    """What a further forward and backward pass of two short texts costs -> a line.

    Its work is nearly nothing, so that its time is that of starting it. Operations are counted on a
    CPU, where the backward pass runs in the thread that counts.
    """
    encoder.train()
    short = np.argsort(tokens.lengths)[:2]

    def step(passes, device=DEVICE):
        with torch.autocast(device, torch.bfloat16):
            outputs = [embed_padded(ckd.embed, encoder, tokens, short, device) for _ in passes]
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
