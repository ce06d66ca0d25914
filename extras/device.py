"""How fast does this machine train and encode? `python -m extras.benchmark --only gpu`, or cpu.

The models have random weights in the shapes of known ones, BERT's vocabulary and no dropout. The
sentences are random words, each one token. Nothing is downloaded.

--only gpu has a row for each shape, batch size and precision, with and without torch.compile:
  sentences/s       `ckd.py --objective kd` as a process of its own, whose targets come from a model
                    in the first shape: the second of two epochs of the same batches, so that
                    kernels are loaded and compiled before.
  % of bf16 peak    floating-point operations per second, relative to those of a large product of
                    bf16 matrices in the same run. Two for each parameter of the transformer's
                    layers and each token: once forward, twice backward, that is
                    6 x parameters x tokens; once for encoding. Padding, embeddings, heads and
                    attention's products of tokens with tokens are not counted.
  peak, GB          GPU memory that torch has allocated at most while ckd.py trained.
  rest of step, ms  the time of a step besides the model: batch size / (sentences/s), minus the time
                    of forward and backward passes alone, over an epoch that is on the device.
  torchrun          one process that gathers embeddings and averages gradients, with NCCL on a GPU
                    and gloo on a CPU, as several processes do.
  GPU against CPU, SIGKILL and --resume: the largest difference of a loss, over all steps, and of a
                    dev score from those of an uninterrupted run in fp32, in millionths.

--only cpu: training steps (forward, backward, Adam) and common.encode in this process, with each
precision, with and without torch.compile, in turns. A ratio compares with fp32 in the same round.
"""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from statistics import harmonic_mean, median

import numpy as np
import torch
import transformers

import ckd
import common
from common import HERE, LOG_STEPS, MINILM, OOM, UserError, note, run_main, table
from common import Tokens, batches, encode, load_encoder, read_rows, resolve_model, save_encoder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_LENGTH = 64  # tokens, in training
LR = 1e-4
WORDS = (5, 45)  # of a generated sentence
EPOCH_STEPS = 2 * LOG_STEPS


def shape(hidden, layers, heads):
    """-> the arguments of a BertConfig."""
    options = dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads)
    return options | dict(intermediate_size=4 * hidden)


BERT_LARGE = shape(1024, 24, 16)
MINILM_AND_BASE = {"MiniLM-L6": shape(384, 6, 12), "BERT-base": shape(768, 12, 12)}
GPU_SHAPES = MINILM_AND_BASE | {"RoBERTa-large": BERT_LARGE}
CPU_SHAPES = {"MiniLM-L3": shape(384, 3, 12)} | MINILM_AND_BASE
CPU_STEPS = {"MiniLM-L3": 16, "MiniLM-L6": 8, "BERT-base": 2, "tiny": 2}  # some ten seconds
TINY = {"tiny": shape(32, 2, 2)}
PRECISIONS = ("fp32", "bf16")
GPU_SETTINGS = list(
    product((64, 512), PRECISIONS, (False, True))
)  # batch size, precision, compiled
TINY_SETTINGS = [(4, "fp32", False), (4, "bf16", True)]

# ---- Also for the other parts of benchmark.py ----------------------------------------------------


def seconds(work, *arguments):
    """Call work(*arguments) -> (how long it takes, its result)."""
    begin = time.perf_counter()
    result = work(*arguments)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin, result


def compare(ours, theirs, names=("ours", "theirs")):
    """Units per second, one number for each round -> a row of the table."""
    ratios = [a / b for a, b in zip(ours, theirs)]
    row = {names[0]: median(ours), names[1]: median(theirs), "ratio": median(ratios)}
    return row | {"smallest": min(ratios), "largest": max(ratios)}


def random_model(folder, shape, seed=0):
    """Save a BERT with random weights and BERT's own tokenizer -> its folder."""
    torch.manual_seed(seed)
    transformers.BertModel(transformers.BertConfig(**shape)).save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model(MINILM))
    tokenizer.save_pretrained(folder)
    return folder


def run_ckd(output, sentences, program=(HERE / "ckd.py",), status=0, flag="--overwrite", **options):
    """ckd.py --objective kd as a process of its own -> the rows of its metrics.jsonl.

    program: what Python runs; status: what it must exit with. Raises UserError.
    """
    train = output.with_suffix(".txt")
    train.write_text("\n".join(sentences) + "\n", "utf-8")
    options = dict(eval_steps=1_000_000, lr=LR, max_length=MAX_LENGTH) | options
    command = [sys.executable, *program, "--objective=kd", "--skip-test", f"--train={train}", flag]
    command += [f"--dev={HERE}/demo/dev.tsv", f"--output={output}"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != status:
        raise UserError(f"ckd.py: {(done.stderr.strip() or 'it failed').splitlines()[-1]}")
    return list(read_rows(output / "metrics.jsonl", json.loads, "it must be the log of a run"))


def their_training(student, sentences, targets, folder, batch_size):
    """sentence-transformers' trainer with its MSELoss -> sentences per second. targets [n, D]"""
    import sentence_transformers as theirs
    from datasets import Dataset

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its place depends on the version
        from sentence_transformers.losses import MSELoss

    save_encoder(student, folder / "student")
    model = theirs.SentenceTransformer(str(folder / "student"), device=DEVICE)
    model.max_seq_length = MAX_LENGTH
    data = Dataset.from_dict({"sentence": sentences, "label": targets.tolist()})
    arguments = theirs.SentenceTransformerTrainingArguments(
        output_dir=str(folder / "theirs"),
        num_train_epochs=1,
        per_device_train_batch_size=batch_size,
        learning_rate=LR,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=DEVICE == "cpu",
    )
    trainer = theirs.SentenceTransformerTrainer(model, arguments, data, loss=MSELoss(model))
    trainer.remove_callback(transformers.PrinterCallback)
    return len(sentences) / trainer.train().metrics["train_runtime"]


# ---- Models, sentences, passes -------------------------------------------------------------------


def generated_sentences(count):
    """Sentences of random words, the same ones each time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model(MINILM))
    words = sorted(token for token in tokenizer.get_vocab() if re.fullmatch("[a-z]+", token))
    random = np.random.default_rng(0)
    lengths = random.integers(*WORDS, count, endpoint=True)
    return [" ".join(random.choice(words, length)) for length in lengths]


def operations_per_sentence(shape, sentences):
    """Floating-point operations of a forward pass; see above."""
    with torch.device("meta"):
        layers = transformers.BertModel(transformers.BertConfig(**shape)).encoder
    tokens = sum(len(text.split()) + 2 for text in sentences)  # with [CLS] and [SEP]
    return 2 * sum(value.numel() for value in layers.parameters()) * tokens / len(sentences)


def matrix_product(size):
    """Floating-point operations per second of a product of bf16 matrices: the fastest of ten."""
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16, device=DEVICE)
    return 2 * size**3 / min(seconds(torch.matmul, a, b)[0] for _ in range(10))


def device_batches(encoder, sentences, batch_size):
    """-> an epoch of [(input_ids, attention_mask, target)], on the encoder's device."""
    tokens, device = Tokens(encoder, sentences, MAX_LENGTH), encoder.model.device
    epoch = zip(range(0, len(sentences), batch_size), batches(tokens.lengths, batch_size, seed=0))
    target = torch.randn(batch_size, encoder.dimension, device=device)
    return [(*tokens.batch(rows, device), target) for _, rows in epoch]


def run_passes(encoder, inputs, precision, optimizer=None):
    """Forward and backward passes of KD, and with an optimizer training steps."""
    encoder.train()
    for ids, mask, target in inputs:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=precision == "bf16"):
            embedding = ckd.embed(encoder, ids, mask)
        encoder.zero_grad()
        ckd.mse_loss(embedding, target).backward()
        if optimizer:
            optimizer.step()


def compile_model(encoder, tiny):
    """torch.compile, which keeps the names of the weights. In place."""
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # rather than run uncompiled
    encoder.model.compile(backend="eager" if tiny else "inductor")


# ---- --only gpu ----------------------------------------------------------------------------------

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--no-python")


class Alone(int):
    """1, but not equal to 1: a single process then does what common.py leaves out for one."""

    __hash__ = int.__hash__

    def __eq__(self, other):
        return False


def train(cache, compiled=False, tiny=False, log_steps=LOG_STEPS, kill_at=None, torchrun=False):
    """ckd.py's program, in the process that Gpu.run() starts.

    cache: folder for the teacher's embeddings; log_steps: steps between two lines of metrics.jsonl,
    which also have the memory; kill_at: the step after which the process kills itself.
    """
    common.CACHE, common.LOG_STEPS = Path(cache), log_steps
    load_student, log = ckd.load_student, common.Run.log

    def load_compiled(args, default):
        student = load_student(args, default)
        compile_model(student, tiny)
        return student

    def log_memory(run, step, rows, **values):
        if step == 1 and DEVICE == "cuda":  # leaves out what was scored and encoded before
            torch.cuda.reset_peak_memory_stats()
        if step % log_steps == 0:
            values["peak"] = torch.cuda.max_memory_allocated()  # 0 on a CPU
        log(run, step, rows, **values)
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    common.Run.log = log_memory
    if compiled:
        ckd.load_student = load_compiled
    if torchrun:
        both = "cpu:gloo,cuda:nccl"
        torch.distributed.init_process_group(both if DEVICE == "cuda" else "gloo")
        common.WORLD_SIZE = Alone(1)
    run_main(ckd.main)


class Gpu:
    """What --only gpu measures: each method returns a row, {column: number}."""

    def __init__(self, folder, shapes, tiny):
        self.folder, self.shapes, self.tiny = folder, shapes, tiny
        self.settings = TINY_SETTINGS if tiny else GPU_SETTINGS
        for name in shapes:
            random_model(folder / name, shapes[name])
        self.name, self.batch_size = next(iter(shapes)), self.settings[0][0]  # for single rows
        random_model(folder / "teacher", shapes[self.name], seed=1)
        largest = max(batch_size for batch_size, _, _ in self.settings)
        self.sentences = generated_sentences(EPOCH_STEPS * largest)
        self.peak = matrix_product(256 if tiny else 8192)

    def measurements(self):
        """-> [(name of the row, function)]"""
        rows = [("bf16 matrix product", lambda: {"TFLOP/s": self.peak / 1e12})]
        for name in self.shapes:
            for size, precision, compiled in self.settings:
                row = f"{name}, batch {size}, {precision}{', compiled' if compiled else ''}"
                rows.append((row, partial(self.training, name, size, precision, compiled)))
            for precision in PRECISIONS:
                row = f"{name}, encoding, {precision}"
                rows.append((row, partial(self.encoding, name, precision)))
        row, setting = f"{self.name}, batch {self.batch_size}, fp32", (self.name, self.batch_size)
        rows.append((f"{row}, torchrun", partial(self.training, *setting, "fp32", torchrun=True)))
        rows.append((f"{row}, sentence-transformers", partial(self.their_training, *setting)))
        rows.append(("GPU against CPU", self.against_cpu))
        return [*rows, ("SIGKILL and --resume", self.against_killed)]

    def training(self, name, batch_size, precision, compiled=False, torchrun=False):
        changes = dict(compiled=compiled, tiny=self.tiny, torchrun=torchrun)
        log = self.run("run", name, batch_size, precision, changes, epochs=2)
        log = [row for row in log if "loss" in row]  # each of LOG_STEPS steps
        speed = harmonic_mean([row["sentences_per_second"] for row in log[len(log) // 2 :]])
        row = self.speed(name, speed, passes=3)
        row["peak, GB"] = max(row["peak"] for row in log) / 1e9
        if not compiled:
            encoder = load_encoder(self.folder / name, "mean", dropout=0.0, device=DEVICE)
            inputs = device_batches(encoder, self.epoch(batch_size), batch_size)
            run_passes(encoder, inputs, precision)  # warms up
            model = seconds(run_passes, encoder, inputs, precision)[0] / len(inputs)
            row["rest of step, ms"] = 1000 * (batch_size / speed - model)
        return row

    def encoding(self, name, precision):
        encoder = load_encoder(self.folder / name, "mean", device=DEVICE)
        work = partial(encode, ckd.embed, encoder, self.sentences, MAX_LENGTH, precision)
        work()  # warms up
        return self.speed(name, len(self.sentences) / seconds(work)[0], passes=1)

    def their_training(self, name, batch_size):
        student = load_encoder(self.folder / name, "mean", dropout=0.0)
        targets = torch.randn(EPOCH_STEPS * batch_size, student.dimension)
        data = (self.epoch(batch_size), targets, self.folder, batch_size)
        their_training(student, *data)  # warms up
        return self.speed(name, their_training(student, *data), passes=3)

    @cached_property
    def uninterrupted(self):
        return self.check("uninterrupted")

    def against_cpu(self):
        return differences(self.uninterrupted, self.check("cpu", device="cpu"))

    def against_killed(self):
        self.check("killed", kill_at=30, status=-signal.SIGKILL)  # its checkpoint is of step 20
        return differences(self.uninterrupted, self.check("killed", flag="--resume"))

    def check(self, output, kill_at=None, **options):
        """60 steps in fp32 -> the log of every step."""
        options |= dict(epochs=2, max_steps=60, eval_steps=20)
        changes = dict(log_steps=1, kill_at=kill_at)
        return self.run(output, self.name, self.batch_size, "fp32", changes, **options)

    def run(self, output, name, batch_size, precision, changes, **options):
        """ckd.py with the changes that train() describes -> its log."""
        torch.cuda.empty_cache()  # leaves the memory to the other process
        code = f"import sys; sys.path.insert(0, {str(HERE)!r}); from extras.device import train; "
        program = ("-c", code + f"train({str(self.folder)!r}, **{changes!r})")
        if changes.get("torchrun"):
            program = (*TORCHRUN, sys.executable, *program)
        options |= dict(teacher=self.folder / "teacher", student=self.folder / name, dropout=0.0)
        options |= dict(pooling="mean", batch_size=batch_size, precision=precision)
        return run_ckd(self.folder / output, self.epoch(batch_size), program, **options)

    def epoch(self, batch_size):
        return self.sentences[: EPOCH_STEPS * batch_size]

    def speed(self, name, speed, passes):
        """Sentences per second -> the first columns of a row; passes: 1 forward, 2 backward."""
        operations = passes * operations_per_sentence(self.shapes[name], self.sentences)
        return {"sentences/s": speed, "% of bf16 peak": 100 * speed * operations / self.peak}


def differences(log, other):
    """The largest ones of two logs of the same steps -> a row."""
    row = {}
    for name in ("loss", "dev"):
        pairs = [(a[name], b[name]) for a, b in zip(log, other, strict=True) if name in a]
        row[f"{name}, 1e-6"] = 1e6 * max(abs(a - b) for a, b in pairs)
    return row


def measure_gpu(args):
    """-> {row: {column: number}}; what fails, for lack of memory or of a package, is only noted."""
    if DEVICE == "cpu" and not args.tiny:
        raise UserError("--only gpu: torch finds no GPU; --tiny tries it on the CPU")
    shapes = TINY if args.tiny else {name: GPU_SHAPES[name] for name in args.shapes}
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, measure in Gpu(Path(folder), shapes, args.tiny).measurements():
            try:
                rows[name] = measure()
                note(f"{name}: {rows[name]}")
            except (UserError, ImportError, OOM) as error:
                note(f"{name}: {error}")
    return rows


# ---- --only cpu ----------------------------------------------------------------------------------


def measure_cpu(args):
    """-> {row: {column: number}}"""
    rows = {}
    for name, shape in (TINY if args.tiny else CPU_SHAPES).items():
        sentences = generated_sentences(args.batch_size * CPU_STEPS[name])
        with tempfile.TemporaryDirectory() as folder:
            random_model(folder, shape)
            plain, compiled = [load_encoder(folder, "mean", dropout=0.0) for _ in range(2)]
        compile_model(compiled, args.tiny)
        inputs = device_batches(plain, sentences, args.batch_size)
        training, encoding = {}, {}
        for ending, encoder in {"": plain, ", compiled": compiled}.items():
            optimizer = torch.optim.Adam(encoder.parameters(), LR, fused=True)
            for precision in PRECISIONS:
                variant = precision + ending
                training[variant] = partial(run_passes, encoder, inputs, precision, optimizer)
                texts = (encoder, sentences, MAX_LENGTH, precision)
                encoding[variant] = partial(encode, ckd.embed, *texts)
        for kind, work in {"training": training, "encoding": encoding}.items():
            torch.compiler.reset()  # what was compiled before would count towards its limit
            speeds = take_turns(work, len(sentences), args.rounds)
            for variant in work:
                row = compare(speeds[variant], speeds["fp32"], ("sentences/s", "fp32"))
                rows[f"{name}, {kind}, {variant}"] = row
                note(f"{name}, {kind}, {variant}: {row}")
    return rows


def take_turns(work, amount, rounds):
    """{name: function} -> {name: amount per second, for each round}"""
    for call in work.values():
        call()  # warms up and compiles
    speeds = {name: [] for name in work}
    for _ in range(rounds):
        for name, call in work.items():
            speeds[name].append(amount / seconds(call)[0])
    return speeds


# ---- The output of both --------------------------------------------------------------------------


def machine():
    """What computed, in words."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    name = models[0] if models else platform.machine()
    capability = torch.backends.cpu.get_cpu_capability()
    threads = f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"
    gpu = f"{torch.cuda.get_device_name()}, " if DEVICE == "cuda" else ""
    return f"{gpu}{name}, {capability}, {threads}, torch {torch.__version__}"


def main(args):
    """Print the table, and a line for results/data."""
    rows = measure_gpu(args) if args.only == "gpu" else measure_cpu(args)
    print(table(rows))
    git = ["git", "-C", HERE, "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    command = " ".join(["python -m extras.benchmark", *sys.argv[1:]])
    line = dict(run=f"speed-{args.only}", command=command, commit=commit, seed=0, machine=machine())
    print(json.dumps(line | dict(scores=rows)))
