# SPDX-License-Identifier: MIT
"""Measure the speed of this project on this machine.

  train   ckd.py --objective kd against sentence-transformers' trainer with its MSELoss
  dse     DSE's Tables 3 and 4: pairs scored by a cross-encoder, and by embeddings and a head; the
          cross-encoder's time is extrapolated from 500 pairs
  gpu     sentences and tokens per second, share of the card's peak and memory of models with
          random weights (extras/gpu.py says of what), and of sentence-transformers' trainer with
          its MSELoss: as it comes, and with flash attention, where it does not pad (the package
          flash-attn); only with --only gpu

In train, both sides have the same student without dropout, sentences and batch size. Both
times include tokenization, and no scoring. A row has sentences per second of ours and theirs, the
medians of the rounds, in which both take turns, and of their ratio the median, the smallest and the
largest. ckd.py embeds a batch in parts of similar length: "padding" is in percent of the tokens
that a side computes, "tokens/s" counts the others, and "by padding" is what the ratio would be if
each computed token took the same time. The rest of a ratio, and all of bf16's gain, is not padding.

Batches are in random order, the default of both, or grouped by length: ours by --group-by-length,
theirs by transformers' LengthGroupedSampler, given to sentence-transformers 6.2 as batch_sampler
(it accepts train_sampling_strategy="group_by_length" of transformers' trainer, but ignores it).

  python -m extras.benchmark                            train and dse, half an hour on two cores
  python -m extras.benchmark --only dse --random-weights      DSE's own shapes, for times alone
  python -m extras.benchmark --only gpu --tiny                tries it, within a minute on a CPU
"""

import contextlib
import io
import itertools
import json
import math
import os
import platform
import re
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Literal
from unittest import mock

import numpy as np
import torch
import transformers

import ckd
import common
import distilface
import dse
from common import MINILM, in_range, note, one_line_errors, positive_int
from common import Batches, chunks, encode, similar_lengths, token_lengths
from common import load_encoder, resolve_model, save_encoder
from common import read_options, read_sentences, resolve_data, run_main, table
from eval_sts import embed
from extras import gpu

DEMO = Path(__file__).resolve().parent.parent / "demo"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_LENGTH = 64  # tokens, in training
LR = 1e-4
ORDERS = ("random", "grouped")
PRECISIONS = ("fp32", "bf16")
DSE_SENTENCES = 1000
DSE_PAIRS = 500  # that the cross-encoder reads
CATALOGUE_COPIES = 100  # of 1,000 sentences: Table 4 has a catalogue of 100,000
DSE_QUERIES = 10  # the fastest counts
BERT_LARGE = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16)
BERT_LARGE["intermediate_size"] = 4096


class Options:
    only: Literal["train", "dse", "gpu"] = None  # one part (default: train and dse)
    teacher: str = MINILM  # folder or Hub name
    student_layers: str = "1,3,5"  # of the teacher
    train: str = DEMO / "sentences.txt"  # sentences
    sentences: in_range(int, 2) = 6400  # how many of them
    batch_sizes: list = None  # (default: 64 512; gpu: 64 512 2048)
    rounds: positive_int = 3  # in which both sides take turns
    random_weights: bool = False  # dse: BERT-large's shape, for times alone
    tiny: bool = False  # gpu: a small model, as a test
    json: str = None  # gpu: a file, to which a line of JSON is appended for each row


def machine():
    """The processors and the version of torch, in words."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    name = models[0] if models else platform.machine()
    capability = torch.backends.cpu.get_cpu_capability()
    threads = f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"
    gpu = f"{torch.cuda.get_device_name()}, " if DEVICE == "cuda" else ""
    return f"{gpu}{name}, {capability}, {threads}, torch {torch.__version__}"


def seconds(work, *arguments):
    """Call work(*arguments) -> (how long it takes, its result)."""
    begin = time.perf_counter()
    result = work(*arguments)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin, result


def random_model(folder, shape):
    """Save a BERT with random weights and BERT's own tokenizer -> its folder."""
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**shape)).save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model(MINILM))
    tokenizer.save_pretrained(folder)
    return folder


def run_script(script, folder, sentences, timed_steps, *flags, **options):
    """Run the main() of ckd or distilface in this process, without its output.

    Returns sentences per second of the `timed_steps` steps before the last one, without scores.
    """
    train = folder / "train.txt"
    train.write_text("\n".join(sentences) + "\n", "utf-8")
    dev = folder / "dev.tsv"
    lines = (DEMO / "dev.tsv").read_text("utf-8").splitlines(keepends=True)
    dev.write_text("".join(lines[:50]), "utf-8")
    common.CACHE = folder / "cache"  # of teacher embeddings: the user's own keeps none of these
    common.LOG_STEPS = timed_steps  # a loss that is logged waits for the device
    options |= dict(train=train, dev=dev, lr=LR, max_length=MAX_LENGTH, eval_steps=1_000_000)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    draw, steps = Batches.__getitem__, []  # when each step begins, and its number of sentences

    def note_step(batches, step):
        rows = draw(batches, step)
        steps.append((time.perf_counter(), len(rows)))
        return rows

    silent = io.StringIO()
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
        stack.enter_context(mock.patch.object(Batches, "__getitem__", note_step))
        stack.enter_context(contextlib.redirect_stdout(silent))
        stack.enter_context(contextlib.redirect_stderr(silent))
        sys.argv = [f"{script.__name__}.py", *flags, *words, f"--output={output}"]
        script.main()
    *timed, (end, _) = steps[-1 - timed_steps :]
    return sum(size for _, size in timed) / (end - timed[0][0])


TINY = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)

# ---- train ---------------------------------------------------------------------------------------


def our_training(args, sentences, folder, order, batch_size, precision):
    """An epoch of ckd.py --objective kd -> sentences per second."""
    options = dict(teacher=args.teacher, student_layers=args.student_layers, dropout=0.0)
    options |= dict(objective="kd", epochs=2, batch_size=batch_size, precision=precision)
    steps = math.ceil(len(sentences) / batch_size)
    options["max_steps"] = steps + 1
    if order == "random":
        return run_script(ckd, folder, sentences, steps, **options)
    speed = run_script(ckd, folder, sentences, steps, "--group-by-length", **options)
    student = load_encoder(folder / "student")
    tokenizing, _ = seconds(lengths_of, student, sentences)  # before the first step
    return len(sentences) / (tokenizing + len(sentences) / speed)


def lengths_of(student, sentences):
    """Of n sentences, in tokens [n], as a script finds them for --group-by-length."""
    how = SimpleNamespace(group_by_length=True, max_length=MAX_LENGTH)
    return token_lengths(how, student, sentences)


def their_training(sentences, targets, lengths, folder, order, batch_size, precision, **model):
    """An epoch of sentence-transformers' trainer with its MSELoss -> sentences per second.

    targets [n, D]; lengths [n]: in tokens, for batches of similar length; model: transformers'
    options.
    """
    import sentence_transformers as theirs
    from datasets import Dataset
    from sentence_transformers.base.sampler import DefaultBatchSampler

    warnings.simplefilter("ignore", DeprecationWarning)  # its place depends on the version
    from sentence_transformers.losses import MSELoss

    def grouped_batches(dataset, **options):
        return DefaultBatchSampler(their_grouped_order(lengths, batch_size), **options)

    student = str(folder / "student")
    model = theirs.SentenceTransformer(student, device=DEVICE, model_kwargs=model)
    model.max_seq_length = MAX_LENGTH
    data = Dataset.from_dict({"sentence": sentences, "label": targets.tolist()})
    options = dict(num_train_epochs=1, per_device_train_batch_size=batch_size, learning_rate=LR)
    options |= dict(save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=DEVICE == "cpu")
    options |= dict(bf16=precision == "bf16")
    if order == "grouped":
        options["batch_sampler"] = grouped_batches
    arguments = theirs.SentenceTransformerTrainingArguments(str(folder / "theirs"), **options)
    trainer = theirs.SentenceTransformerTrainer(model, arguments, data, loss=MSELoss(model))
    trainer.remove_callback(transformers.PrinterCallback)
    return len(sentences) / trainer.train().metrics["train_runtime"]


def their_grouped_order(lengths, batch_size):
    from transformers.trainer_pt_utils import LengthGroupedSampler

    return LengthGroupedSampler(batch_size, lengths=lengths.tolist())


def padding(lengths, passes):
    """Percent of the tokens computed in forward passes, a list of row numbers each."""
    computed = sum(len(rows) * lengths[rows].max() for rows in passes)
    return 100 * (1 - lengths.sum() / computed)


def our_passes(lengths, order, batch_size, width):
    grouping = lengths if order == "grouped" else None
    batches = Batches(len(lengths), batch_size, 0, grouping).draw(0)
    parts = partial(similar_lengths, kind=DEVICE, width=width)
    return [rows[part] for rows in batches for part in parts(lengths[rows])]


def their_passes(lengths, order, batch_size):
    rows = np.random.default_rng(0).permutation(len(lengths))
    if order == "grouped":
        rows = np.array(list(their_grouped_order(lengths, batch_size)))
    return chunks(rows, batch_size)


def compare(ours, theirs):
    """Sentences per second, one number for each round -> a row of the table."""
    ratios = [a / b for a, b in zip(ours, theirs)]
    row = {"ours": median(ours), "theirs": median(theirs), "ratio": median(ratios)}
    return row | {"smallest": min(ratios), "largest": max(ratios)}


def compare_training(args, folder):
    """-> {row: {column: number}}"""
    sentences = read_sentences(resolve_data(args.train))[: args.sentences]
    targets = encode(embed, load_encoder(args.teacher, device=DEVICE), sentences)
    student = load_encoder(args.teacher, layers=args.student_layers, dropout=0.0)
    save_encoder(student, folder / "student")
    lengths = lengths_of(student, sentences)
    ours = defaultdict(list)
    theirs = defaultdict(list)
    for _ in range(args.rounds):
        for setting in itertools.product(ORDERS, args.batch_sizes, PRECISIONS):
            ours[setting].append(our_training(args, sentences, folder, *setting))
            speed = their_training(sentences, targets, lengths, folder, *setting)
            theirs[setting].append(speed)
            note(f"{setting}: {ours[setting][-1]:.0f} against {speed:.0f} sentences/s")

    rows = {}
    for order, batch_size in itertools.product(ORDERS, args.batch_sizes):
        our = padding(lengths, our_passes(lengths, order, batch_size, student.width))
        their = padding(lengths, their_passes(lengths, order, batch_size))
        for one, other in (("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")):
            row = compare(ours[order, batch_size, one], theirs[order, batch_size, other])
            row |= {"padding": our, "their padding": their}
            row["by padding"] = (100 - our) / (100 - their)
            row["tokens/s"] = row["ours"] * lengths.mean()
            row["their tokens/s"] = row["theirs"] * lengths.mean()
            precision = one if one == other else f"{one} against {other}"
            rows[f"{order}, {batch_size}, {precision}"] = row
    return rows


# ---- dse -----------------------------------------------------------------------------------------


def embed_sentences(student, sentences):
    """n sentences -> embeddings [n, D] on the student's device, for its head."""
    return torch.from_numpy(encode(dse.embed, student, sentences)).to(DEVICE)


def measure_dse(name, layers):
    """Section 4.3 of DSE: seconds, and the factor of the student -> {row: {column: number}}."""
    torch.manual_seed(0)
    student = dse.add_head(load_encoder(name, "mean", layers), classes=1).to(DEVICE).eval()
    teacher = dse.load_cross_encoder(name, "stsb", device=DEVICE).eval()
    sentences = read_sentences(DEMO / "sentences.txt")[:DSE_SENTENCES]
    pairs = list(zip(sentences[:DSE_PAIRS], sentences[-DSE_PAIRS:]))
    encode(dse.pair_logits, teacher, pairs[:100])  # warms up
    embed_sentences(student, sentences[:100])
    pair, _ = seconds(encode, dse.pair_logits, teacher, pairs)
    pair /= len(pairs)
    offline, vectors = seconds(embed_sentences, student, sentences)
    queries = [[text] for text in sentences[:DSE_QUERIES]]
    online = min(seconds(embed_sentences, student, query)[0] for query in queries)
    catalogue = vectors.repeat(CATALOGUE_COPIES, 1)
    score = student.head.score_pairs
    matrix, _ = seconds(lambda: [score(query, vectors) for query in vectors])
    row, _ = seconds(score, vectors[0], catalogue)
    rows = {
        "Table 3": {"pairs": len(vectors) ** 2, "psi, s": offline, "f, s": matrix, "paper": 934},
        "Table 4": {"pairs": len(catalogue), "psi, s": online, "f, s": row, "paper": 13594},
    }
    for row in rows.values():
        row["cross-encoder, s"] = row["pairs"] * pair
        row["factor"] = row["cross-encoder, s"] / (row["psi, s"] + row["f, s"])
    return rows


# ---- gpu -----------------------------------------------------------------------------------------

STEPS = 100  # of a training run, whose second half is timed
COLUMNS = ("sentences/s", "tokens/s", "% of peak", "GB", "passes", "padding")
COSTS = ("launches", "ms a pass", "us a launch")


def measure_gpu(args, folder):
    """Write a line of JSON as soon as a number is there; at the end, print a table per model."""
    sentences = read_sentences(resolve_data(args.train))[: args.sentences]
    measured = itertools.chain(
        gpu.measure(args, folder, sentences, machine()),
        gpu.measure_theirs(args, folder, sentences, machine(), their_training),
        measure_fp16(args, folder, sentences),
    )
    lines = []
    for line in measured:
        lines.append(line)
        note(json.dumps(line))
        if args.json:
            with open(args.json, "a") as file:
                file.write(json.dumps(line) + "\n")
    for name in {line["model"]: None for line in lines}:
        found = [line for line in lines if line["model"] == name and line["part"] == "gpu"]
        rows = {f"{line['work']}, {line['batch']}, {line['way']}": line for line in found}
        if rows:
            print(f"{name}:\n\n{table({key: pick(row, COLUMNS) for key, row in rows.items()})}\n")
    passes = [line for line in lines if line["part"] == "launches"]
    print(table({line["model"]: pick(line, COSTS) for line in passes}))
    for part in ("tokenization", "theirs"):
        found = [line for line in lines if line["part"] == part]
        names = [name for name in found[0] if "/s" in name or "%" in name]
        print(table({f"{line['model']}, {line['batch']}": pick(line, names) for line in found}))
    precisions = [line for line in lines if line["part"] == "fp16"]
    print(table({line["way"]: pick(line, COLUMNS) for line in precisions}))
    peak = next(line["peak_tflops"] for line in lines if "peak_tflops" in line)
    print(f"\nbf16 matrix product: {peak} TFLOP/s")


def measure_fp16(args, folder, sentences):
    """distilface.py in its three precisions (the paper's section 4.2): yield a line for each."""
    model = random_model(folder / "model", TINY if args.tiny else {})  # BERT-base's shape
    steps = 4 if args.tiny else STEPS
    for precision in distilface.DTYPES:
        options = dict(student=model, batch_size=128, precision=precision, steps=steps + 1)
        options |= dict(pooling="avg")
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        speed = round(run_script(distilface, folder, sentences, steps // 2, **options), 1)
        memory = torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else 0
        line = dict(part="fp16", model="distilface.py", way=precision, machine=machine())
        yield line | {"sentences/s": speed, "GB": round(memory, 3)}


def pick(line, names):
    return {name: line[name] for name in names if name in line}


# ---- Command line --------------------------------------------------------------------------------


def main():
    args = read_options(Options, __doc__)
    args.max_length = MAX_LENGTH
    sizes = args.batch_sizes or ([64, 512, 2048] if args.only == "gpu" else [64, 512])
    with one_line_errors("--batch-sizes", "each is a number from 2"):
        args.batch_sizes = [in_range(int, 2)(size) for size in sizes]
    chosen = [args.only] if args.only else ["train", "dse"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "train" in chosen:
            print(table(compare_training(args, folder)))
        if "dse" in chosen and args.random_weights:
            print(table(measure_dse(random_model(folder, BERT_LARGE), None)))
        elif "dse" in chosen:
            print(table(measure_dse(args.teacher, args.student_layers)))
        if "gpu" in chosen:
            measure_gpu(args, folder)
    print(f"\n{machine()}")


if __name__ == "__main__":
    run_main(main)
