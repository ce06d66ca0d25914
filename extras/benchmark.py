"""Measure the speed of this project on this machine.

  train   ckd.py --objective kd against sentence-transformers' trainer with its MSELoss: the same
          student, sentences, targets and batch size; both times include tokenization
  dse     DSE's Tables 3 and 4: pairs scored by a cross-encoder, and by embeddings and a head; the
          cross-encoder's time is extrapolated from 500 pairs
  gpu     how fast ckd.py and distilface.py train and encode on a GPU, how much memory they take,
          and whether the losses are those of a CPU; it runs only with --only gpu

In train, both sides take turns. A ratio is the median over the rounds, next to the smallest and the
largest. Dropout takes time: ckd.py has none by default for a student cut to some layers, whereas
sentence-transformers keeps the model's own. The first row compares the defaults, the next two equal
dropout, and in the last one ckd.py also has --group-by-length.

  python -m extras.benchmark                       train and dse, some ten minutes on two cores
  python -m extras.benchmark --only dse --random-weights      DSE's own shapes, for times alone
  python -m extras.benchmark --only gpu --tiny                tries it, within a minute on a CPU
"""

import contextlib
import io
import json
import os
import platform
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import harmonic_mean, median

import numpy as np
import torch
import transformers

import ckd
import common
import distilface
import dse
from common import HERE, LOG_STEPS, MINILM, ArgumentParser, UserError, note, number, run_main, table
from common import Tokens, encode, load_encoder, read_rows, read_sentences, resolve_model
from common import save_encoder
from eval_sts import embed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_LENGTH = 64  # tokens, in training
LR = 1e-4
DROPOUTS = (0.0, 0.1)  # ours by default for a student that is cut, and BERT's own, which is theirs
DSE_SENTENCES = 1000
DSE_PAIRS = 500  # that the cross-encoder reads
CATALOGUE_COPIES = 100  # of 1,000 sentences: Table 4 has a catalogue of 100,000
DSE_QUERIES = 10  # the fastest counts


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


def compare(ours, theirs):
    """Units per second, one number for each round -> a row of the table."""
    ratios = [a / b for a, b in zip(ours, theirs)]
    row = {"ours": median(ours), "theirs": median(theirs), "ratio": median(ratios)}
    return row | {"smallest": min(ratios), "largest": max(ratios)}


def random_model(folder, shape):
    """Save a BERT with random weights and BERT's own tokenizer -> its folder."""
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**shape)).save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model(MINILM))
    tokenizer.save_pretrained(folder)
    return folder


def run_script(script, folder, sentences, *flags, **options):
    """Run the main() of ckd or distilface in this process -> the rows of its metrics.jsonl."""
    file = folder / "train.txt"
    file.write_text("\n".join(sentences) + "\n", "utf-8")
    common.CACHE = folder / "cache"  # of teacher embeddings: the user's own keeps none of these
    options |= dict(train=file, dev=HERE / "demo" / "dev.tsv")
    options |= dict(lr=LR, max_length=MAX_LENGTH, eval_steps=1_000_000)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    silent = io.StringIO()  # for its table, progress bar and notes
    with tempfile.TemporaryDirectory(dir=folder) as output:
        sys.argv = [f"{script.__name__}.py", *flags, *words, f"--output={output}"]
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            script.main()
        return list(read_rows(Path(output, "metrics.jsonl"), json.loads, "it must be a log"))


def speeds(log):
    """Rows of metrics.jsonl -> sentences per second, without scoring, of each LOG_STEPS steps."""
    return [row["sentences_per_second"] for row in log if "loss" in row]


# ---- train ---------------------------------------------------------------------------------------


def our_training(args, sentences, folder, dropout, *flags):
    """ckd.py --objective kd -> sentences per second, with tokenization and without dev scores."""
    options = dict(teacher=args.teacher, student_layers=args.student_layers, dropout=dropout)
    options |= dict(objective="kd", epochs=1, batch_size=args.batch_size, precision="fp32")
    log = run_script(ckd, folder, sentences, *flags, **options)
    training = len(sentences) / harmonic_mean(speeds(log))
    student = load_encoder(args.teacher, layers=args.student_layers)
    tokenizing, _ = seconds(Tokens, student, sentences, MAX_LENGTH)
    return len(sentences) / (tokenizing + training)


def their_training(student, sentences, targets, folder, batch_size):
    """sentence-transformers' trainer with its MSELoss -> sentences per second. targets [n, D]"""
    import sentence_transformers as theirs
    from datasets import Dataset

    warnings.simplefilter("ignore", DeprecationWarning)  # its place depends on the version
    from sentence_transformers.losses import MSELoss

    save_encoder(student, folder / "student")
    model = theirs.SentenceTransformer(str(folder / "student"), device=DEVICE)
    model.max_seq_length = MAX_LENGTH
    data = Dataset.from_dict({"sentence": sentences, "label": targets.tolist()})
    options = dict(num_train_epochs=1, per_device_train_batch_size=batch_size, learning_rate=LR)
    options |= dict(save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=DEVICE == "cpu")
    arguments = theirs.SentenceTransformerTrainingArguments(str(folder / "theirs"), **options)
    trainer = theirs.SentenceTransformerTrainer(model, arguments, data, loss=MSELoss(model))
    trainer.remove_callback(transformers.PrinterCallback)
    return len(sentences) / trainer.train().metrics["train_runtime"]


def compare_training(args, folder):
    """-> {row: {column: number}}"""
    sentences = read_sentences(args.train)[: args.sentences]
    if len(sentences) < LOG_STEPS * args.batch_size:
        raise UserError(f"{len(sentences)} sentences; give {LOG_STEPS} batches, or smaller ones")
    targets = encode(embed, load_encoder(args.teacher, device=DEVICE), sentences)
    ours = {dropout: [] for dropout in DROPOUTS}
    theirs = {dropout: [] for dropout in DROPOUTS}
    grouped = []
    for round_number in range(args.rounds):
        note(f"training, round {round_number + 1} of {args.rounds}")
        for dropout in DROPOUTS:
            ours[dropout].append(our_training(args, sentences, folder, dropout))
            student = load_encoder(args.teacher, layers=args.student_layers, dropout=dropout)
            data = (sentences, targets, folder, args.batch_size)
            theirs[dropout].append(their_training(student, *data))
        grouped.append(our_training(args, sentences, folder, DROPOUTS[0], "--group-by-length"))
    rows = {"training, the defaults": compare(ours[DROPOUTS[0]], theirs[DROPOUTS[1]])}
    for dropout in DROPOUTS:
        rows[f"training, dropout {dropout}"] = compare(ours[dropout], theirs[dropout])
    row = f"training, dropout {DROPOUTS[0]}, --group-by-length"
    return rows | {row: compare(grouped, theirs[DROPOUTS[0]])}


# ---- dse -----------------------------------------------------------------------------------------


def measure_dse(name, layers):
    """Section 4.3 of DSE: seconds, and the factor of the student -> {row: {column: number}}."""
    torch.manual_seed(0)
    student = dse.add_head(load_encoder(name, "mean", layers), classes=1).to(DEVICE).eval()
    teacher = dse.load_cross_encoder(name, "stsb", device=DEVICE).eval()
    sentences = read_sentences(HERE / "demo" / "sentences.txt")[:DSE_SENTENCES]
    pairs = list(zip(sentences[:DSE_PAIRS], sentences[-DSE_PAIRS:]))
    encode(dse.pair_logits, teacher, pairs[:100])  # warms up
    dse.embed_sentences(student, sentences[:100])
    pair, _ = seconds(encode, dse.pair_logits, teacher, pairs)
    pair /= len(pairs)
    offline, vectors = seconds(dse.embed_sentences, student, sentences)
    queries = [[text] for text in sentences[:DSE_QUERIES]]
    online = min(seconds(dse.embed_sentences, student, query)[0] for query in queries)
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


# ---- gpu: models with random weights, sentences of random words ----------------------------------


def shape(hidden, layers, heads):
    """-> the arguments of a BertConfig."""
    options = dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads)
    return options | dict(intermediate_size=4 * hidden)


BERT_LARGE = shape(1024, 24, 16)
SHAPES = {"MiniLM-L6": shape(384, 6, 12), "BERT-base": shape(768, 12, 12), "BERT-large": BERT_LARGE}
TINY = {"tiny": shape(32, 2, 2)}
STEPS = 4 * LOG_STEPS  # of a training run, whose second half is timed
WORDS = (5, 45)  # of a sentence
TRAINING = [(ckd, "fp32"), (ckd, "bf16")]
TRAINING += [(distilface, "fp32"), (distilface, "bf16"), (distilface, "fp16")]
PASSES = {ckd: 3, distilface: 6}  # a backward pass counts twice; distilface.py has two views


def generated_sentences(count):
    """Sentences of random words, each of them one token; the same ones each time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model(MINILM))
    words = sorted(token for token in tokenizer.get_vocab() if re.fullmatch("[a-z]+", token))
    random = np.random.default_rng(0)
    lengths = random.integers(*WORDS, count, endpoint=True)
    return [" ".join(random.choice(words, length)) for length in lengths]


def operations_per_sentence(shape, sentences):
    """Floating-point operations of a forward pass: 2 x the layers' parameters x tokens.

    Padding, embeddings, heads, and attention's products of tokens with tokens do not count.
    """
    with torch.device("meta"):
        layers = transformers.BertModel(transformers.BertConfig(**shape)).encoder
    tokens = sum(len(text.split()) + 2 for text in sentences)  # with [CLS] and [SEP]
    return 2 * sum(value.numel() for value in layers.parameters()) * tokens / len(sentences)


def matrix_product(size):
    """Floating-point operations per second of a product of bf16 matrices: the fastest of ten."""
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16, device=DEVICE)
    return 2 * size**3 / min(seconds(torch.matmul, a, b)[0] for _ in range(10))


def train_random_model(script, folder, model, sentences, **options):
    """STEPS steps of ckd.py or distilface.py -> its log and the GPU's peak memory in GB.

    The peak is that of the whole program: ckd.py's teacher is embedded before it trains.
    """
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    options |= dict(student=model, batch_size=len(sentences) // STEPS, max_steps=STEPS)
    if script is ckd:
        options |= dict(teacher=folder / "teacher", pooling="mean", dropout=0.0)
    else:
        options |= dict(pooling="avg")
    log = run_script(script, folder, sentences, **options)
    return log, torch.cuda.max_memory_allocated() / 1e9  # 0 on a CPU


def against_cpu(folder, model, sentences):
    """ckd.py's last loss on a CPU, and the largest difference to a GPU's over all logged steps.

    Both learn from the same teacher embeddings, which the first run leaves in the cache.
    """
    losses = []
    for device in (DEVICE, "cpu"):
        options = dict(device=device, precision="fp32")
        log, _ = train_random_model(ckd, folder, model, sentences, **options)
        losses.append([row["loss"] for row in log if "loss" in row])
    return {"loss": losses[1][-1], "difference, 1e-6": 1e6 * np.ptp(losses, axis=0).max()}


def measure_gpu(args, folder):
    """-> {row: {column: number}}; a model for which the memory is too small is only noted."""
    if DEVICE == "cpu" and not args.tiny:
        raise UserError("--only gpu: torch finds no GPU; --tiny tries it on the CPU")
    shapes = TINY if args.tiny else {name: SHAPES[name] for name in args.shapes}
    batch_sizes = (4, 8) if args.tiny else (64, 512)
    sentences = generated_sentences(STEPS * max(batch_sizes))
    peak = matrix_product(256 if args.tiny else 8192)
    random_model(folder / "teacher", next(iter(shapes.values())))
    rows = {"bf16 matrix product": {"TFLOP/s": peak / 1e12}}

    def add_row(name, speed, operations, **more):
        rows[name] = {"sentences/s": speed, "% of bf16 peak": 100 * speed * operations / peak}
        rows[name] |= more
        note(f"{name}: {speed:.0f} sentences/s")

    for name, sizes in shapes.items():
        model = random_model(folder / name, sizes)
        forward = operations_per_sentence(sizes, sentences)
        encoder = load_encoder(model, "mean", device=DEVICE)
        for precision in ("fp32", "bf16"):
            encode(ckd.embed, encoder, sentences, precision)  # warms up
            duration, _ = seconds(encode, ckd.embed, encoder, sentences, precision)
            add_row(f"{name}, encoding, {precision}", len(sentences) / duration, forward)
        del encoder
        for script, precision in TRAINING:
            for batch_size in batch_sizes:
                row = f"{name}, {script.__name__}.py, batch {batch_size}, {precision}"
                data = (folder, model, sentences[: STEPS * batch_size])
                try:
                    log, memory = train_random_model(script, *data, precision=precision)
                except torch.OutOfMemoryError as error:
                    note(f"{row}: {error}")
                    continue
                speed = harmonic_mean(speeds(log)[STEPS // LOG_STEPS // 2 :])
                add_row(row, speed, PASSES[script] * forward, **{"peak, GB": memory})
    model = folder / next(iter(shapes))
    rows["GPU against CPU"] = against_cpu(folder, model, sentences[: STEPS * min(batch_sizes)])
    return rows


# ---- Command line --------------------------------------------------------------------------------


def parse_args():
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("--only", choices=("train", "dse", "gpu"), help="one part (default: train and dse)")
    add("--teacher", default=MINILM, help="folder or Hub name (default: %(default)s)")
    add("--student-layers", default="1,3,5", help="of the teacher (default: %(default)s)")
    add("--train", default=f"{HERE}/demo/sentences.txt", help="sentences (default: %(default)s)")
    add("--sentences", type=number(int, 1), default=6400, help="how many (default: %(default)s)")
    add("--batch-size", type=number(int, 2), default=64, help="of training (default: %(default)s)")
    add("--rounds", type=number(int, 1), default=3, help="(default: %(default)s)")
    add("--random-weights", action="store_true", help="dse: BERT-large's shape, for times alone")
    shapes = dict(choices=SHAPES, default=[*SHAPES])
    add("--shapes", nargs="+", **shapes, help="gpu: shapes of the models (default: all)")
    add("--tiny", action="store_true", help="gpu: a small shape and small batches, as a test")
    return parser.parse_args()


def main():
    args = parse_args()
    parts = [args.only] if args.only else ["train", "dse"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "train" in parts:
            print(table(compare_training(args, folder)))
        if "dse" in parts and args.random_weights:
            print(table(measure_dse(random_model(folder, BERT_LARGE), None)))
        elif "dse" in parts:
            print(table(measure_dse(args.teacher, args.student_layers)))
        if "gpu" in parts:
            print(table(measure_gpu(args, folder)))
    print(f"\n{machine()}")


if __name__ == "__main__":
    run_main(main)
