"""How fast this project is, beside what people use instead, on this machine.

  train    our training loop (baselines.py --method kd) and sentence-transformers' trainer with its
           MSELoss: same model, sentences, targets, batch size and dropout
  encode   common.encode_sentences and SentenceTransformer.encode: short sentences, passages, one
           sentence at a time
  search   the exact search of support/retrieval.py and faiss' flat index
  dse      Tables 3 and 4 of DSE: pairs scored by a cross-encoder, and by embeddings and a head
  growth   time and memory of training and encoding 10, 40 and 160 thousand generated sentences, by
           a random model so small that what surrounds it counts; not part of the default

Both sides of a comparison take turns. A ratio is the median over the rounds, with the smallest and
the largest. The limit is the speed of the model's matrix products alone: products of the same
shapes, forward and backward, timed in the same rounds. Seconds differ from machine to machine,
ratios hardly.

  python benchmark.py                              all of it, some ten minutes on two cores
  python benchmark.py --only encode,search
  python benchmark.py --only growth --figure figures/growth.png
  python benchmark.py --only dse --random-weights bert-large      DSE's own shapes, for times alone
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import transformers

import dse
from common import (
    MINILM,
    DataError,
    Tokens,
    batches,
    check_target,
    encode,
    encode_sentences,
    read_sentences,
    resolve,
    table,
    writing,
)
from support import demo, glue
from support.cache import teacher_embeddings
from support.command_line import (
    ArgumentParser,
    add_device_option,
    count,
    run_main,
    set_dropout,
    write_report,
)
from support.encoder import load_encoder, load_pretrained
from support.retrieval import search

HERE = Path(__file__).resolve().parent
PARTS = ("train", "encode", "search", "dse", "growth")
DEFAULT_PARTS = "train,encode,search,dse"
PEERS = {  # the packages that a part compares with
    "train": ("sentence_transformers", "datasets", "accelerate"),
    "encode": ("sentence_transformers",),
    "search": ("faiss",),
    "dse": (),
    "growth": (),
}
PIP_NAMES = {"sentence_transformers": "sentence-transformers", "faiss": "faiss-cpu"}
SMALL_LAYERS = "1,3,5"  # the student's, of all-MiniLM-L6-v2
MAX_LENGTH = 64  # tokens, in training
DROPOUTS = (0.0, 0.1)  # of both trainers: our default of a student that is cut, and BERT's own
PASSAGE = 8  # sentences
SINGLE_SENTENCES = 100  # encoded one at a time
SEARCHED = 100_000  # vectors
QUERIES = 1000
DEPTH = 100
SEARCH_MEMORY = 2**30  # bytes
CHUNK = 20_000  # vectors
FORWARD_AND_BACKWARD = 3  # matrix products for one of the forward pass
PEAK_FLOPS = {"fp32": 67e12, "bf16": 989e12, "fp16": 989e12}  # of an H100, dense, for --device cuda
FIGURE_FORMATS = (".png", ".svg", ".pdf")
GROWTH = (10_000, 40_000, 160_000)  # sentences
TINY = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
)  # BERT's shape for it
BERT_LARGE = dict(
    hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
)


class Comparison(NamedTuple):
    """Two ways to do one thing, in units a second, a number for each round."""

    ours: list
    theirs: list
    limit: list  # of the matrix products alone; empty where there are none

    def row(self):
        """The columns of the table."""
        ratios = [ours / theirs for ours, theirs in zip(self.ours, self.theirs)]
        row = {
            "ours": statistics.median(self.ours),
            "theirs": statistics.median(self.theirs),
            "ratio": statistics.median(ratios),
            "smallest": min(ratios),
            "largest": max(ratios),
        }
        if self.limit:
            shares = [100 * ours / limit for ours, limit in zip(self.ours, self.limit)]
            row["% of the limit"] = statistics.median(shares)
        return row


def seconds(work, *arguments):
    """Call work(*arguments) -> how long it takes."""
    begin = time.perf_counter()
    work(*arguments)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


# --------------------------------------------------------------------------------------------------
# The limit: the model's matrix products alone
# --------------------------------------------------------------------------------------------------


def product_shapes(model, rows, length):
    """The matrix products of a forward pass of [rows, length] tokens, [(times, m, k, n)].

    Those of the linear layers, and for each attention head its scores and its weighted mean.
    """
    config = model.config
    shapes = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.startswith("pooler"):
            shapes.append((1, rows * length, module.in_features, module.out_features))
    heads = config.num_attention_heads
    size = config.hidden_size // heads
    for _ in range(config.num_hidden_layers):
        shapes.append((rows * heads, length, size, length))
        shapes.append((rows * heads, length, length, size))
    return shapes


def flops(shapes):
    """Of these products: a multiplication and an addition for each of their terms."""
    return sum(2 * times * m * k * n for times, m, k, n in shapes)


def multiply(shapes, backward, device):
    """Compute these products, and with `backward` the two others that each needs there."""
    for times, m, k, n in shapes:
        a = torch.ones(times, m, k, device=device)
        b = torch.ones(times, k, n, device=device)
        c = a @ b
        if backward:
            c @ b.mT  # the gradient of a
            a.mT @ c  # the gradient of b


def product_seconds(model, lengths, batch_size, backward, device):
    """How long the products of one batch of average length take, less filling their inputs."""
    longest = [lengths[rows].max() for rows in batches(lengths, batch_size, seed=0)]
    shapes = product_shapes(model, batch_size, round(float(np.mean(longest))))
    multiply(shapes, backward, device)  # warms up
    with_products = seconds(multiply, shapes, backward, device)
    inputs = seconds(fill, shapes, device)
    return with_products - inputs


def fill(shapes, device):
    for times, m, k, n in shapes:
        torch.ones(times, m, k, device=device)
        torch.ones(times, k, n, device=device)


# --------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------


def our_training(args, sentences_file, folder, dropout):
    """baselines.py as a process of its own -> sentences a second, and its peak memory in MB.

    Without its dev scores.
    """
    options = ["--method", "kd", "--teacher", args.teacher, "--student", args.teacher]
    if args.student_layers:
        options += ["--student-layers", args.student_layers]
    steps = str(args.sentences // args.batch_size)
    options += ["--train", sentences_file, "--dev", "demo", "--epochs", "1", "--skip-test"]
    options += ["--batch-size", str(args.batch_size), "--lr", "1e-4", "--eval-steps", steps]
    options += ["--dropout", str(dropout), "--precision", args.precision, "--device", args.device]
    options += ["--max-length", str(MAX_LENGTH), "--output", folder, "--overwrite"]
    command = [sys.executable, HERE / "baselines.py", *options]
    # What is measured is not kept in the user's cache of teacher embeddings.
    environment = os.environ | {"XDG_CACHE_HOME": str(Path(folder).parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise DataError(f"baselines.py: {done.stderr.strip().splitlines()[-1]}")
    lines = (Path(folder) / "metrics.jsonl").read_text("utf-8").splitlines()
    last = json.loads(lines[-1])
    return last["sentences_per_second"], last["peak_memory_mb"]


def their_training(args, sentences, targets, folder, dropout):
    """sentence-transformers' trainer -> sentences a second."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its place changes with the version
        from sentence_transformers.losses import MSELoss

    load_encoder(args.teacher, layers=args.student_layers).save(Path(folder) / "student")
    model = SentenceTransformer(str(Path(folder) / "student"), device=args.device)
    model.max_seq_length = MAX_LENGTH
    set_dropout(model, SimpleNamespace(dropout=dropout))
    data = Dataset.from_dict({"sentence": sentences, "label": targets.tolist()})
    arguments = Arguments(
        output_dir=str(Path(folder) / "theirs"),
        num_train_epochs=1,
        per_device_train_batch_size=args.batch_size,
        learning_rate=1e-4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=args.device == "cpu",
    )
    trainer = SentenceTransformerTrainer(model, arguments, data, loss=MSELoss(model))
    trainer.remove_callback(transformers.PrinterCallback)
    return len(sentences) / trainer.train().metrics["train_runtime"]


def compare_training(args):
    """-> {row: Comparison}"""
    sentences = training_sentences(args)
    teacher = load_encoder(args.teacher).to(args.device).eval()
    tokens = Tokens(teacher, sentences, MAX_LENGTH)
    targets = np.array(teacher_embeddings(teacher, tokens, args.device).array)
    student = load_encoder(args.teacher, layers=args.student_layers)
    ours = {dropout: [] for dropout in DROPOUTS}
    theirs = {dropout: [] for dropout in DROPOUTS}
    limit = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sentences.txt"
        file.write_text("\n".join(sentences) + "\n", "utf-8")
        for number in range(args.rounds):
            for dropout in DROPOUTS:
                speed, memory = our_training(args, str(file), folder + "/run", dropout)
                ours[dropout].append(speed)
                theirs[dropout].append(their_training(args, sentences, targets, folder, dropout))
            products = product_seconds(
                student.model, tokens.lengths, args.batch_size, True, args.device
            )
            limit.append(args.batch_size / products)
            print(f"training, round {number + 1} of {args.rounds}", file=sys.stderr)
    if args.device != "cpu":
        print_peak_share(args, student, tokens.lengths, ours[DROPOUTS[0]], memory)
    return {
        f"training with dropout {dropout:g}, sentences/s": Comparison(
            ours[dropout], theirs[dropout], limit
        )
        for dropout in DROPOUTS
    }


def print_peak_share(args, student, lengths, speeds, memory):
    """The share of the card's peak that training reaches (MFU), and its memory."""
    longest = [lengths[rows].max() for rows in batches(lengths, args.batch_size, seed=0)]
    shapes = product_shapes(student.model, args.batch_size, round(float(np.mean(longest))))
    steps_per_second = statistics.median(speeds) / args.batch_size
    reached = FORWARD_AND_BACKWARD * flops(shapes) * steps_per_second
    share = 100 * reached / PEAK_FLOPS[args.precision]
    print(f"{args.precision}: {share:.1f} % of an H100's peak, {memory} MB at most")


def training_sentences(args):
    """--sentences of --train. Raises DataError."""
    if args.train == "demo":
        return demo.sentences(args.sentences)
    sentences = read_sentences(args.train)[: args.sentences]
    if len(sentences) < args.sentences:
        found = f"{len(sentences)} sentences"
        raise DataError(f"{args.train}: {found}, expected {args.sentences} (--sentences)")
    return sentences


# --------------------------------------------------------------------------------------------------
# Encoding
# --------------------------------------------------------------------------------------------------


def one_at_a_time(encode_list, texts):
    for text in texts:
        encode_list([text])


def compare_encoding(args):
    """-> {row: Comparison}"""
    from sentence_transformers import SentenceTransformer

    encoder = load_encoder(args.teacher).to(args.device).eval()
    model = SentenceTransformer(str(resolve(args.teacher, model=True)), device=args.device)
    sentences = training_sentences(args)
    passages = [
        " ".join(sentences[i : i + PASSAGE]) for i in range(0, len(sentences) // 2, PASSAGE)
    ]
    single = sentences[:SINGLE_SENTENCES]

    def ours(texts):
        return encode_sentences(encoder, texts)

    def theirs(texts):
        return model.encode(texts, show_progress_bar=False)

    work = {
        "encoding, sentences/s": (sentences, ours, theirs),
        "encoding, passages/s": (passages, ours, theirs),
        "encoding one at a time, sentences/s": (
            single,
            lambda texts: one_at_a_time(ours, texts),
            lambda texts: one_at_a_time(theirs, texts),
        ),
    }
    return {name: compare(args.rounds, *sides) for name, sides in work.items()}


def compare(rounds, items, ours, theirs):
    """Both sides in turns, on the same items -> Comparison, in items a second."""
    ours(items[:10])
    theirs(items[:10])
    speeds = Comparison([], [], [])
    for _ in range(rounds):
        speeds.ours.append(len(items) / seconds(ours, items))
        speeds.theirs.append(len(items) / seconds(theirs, items))
    return speeds


# --------------------------------------------------------------------------------------------------
# Exact search
# --------------------------------------------------------------------------------------------------


def compare_search(args):
    """-> {row: Comparison}, for random vectors of unit length."""
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    dimension = load_encoder(args.teacher).dimension
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(SEARCHED, dimension, generator=generator)
    vectors = torch.nn.functional.normalize(vectors, dim=1)
    queries = vectors[:QUERIES] + 0.1 * vectors[-QUERIES:]
    index = faiss.IndexFlatIP(dimension)
    index.add(vectors.numpy())

    def ours(queries):
        return search(queries, vectors.split(CHUNK), DEPTH, SEARCH_MEMORY, args.device)

    def theirs(queries):
        return index.search(queries.numpy(), DEPTH)

    found, (_, expected) = ours(queries[:10])[1], theirs(queries[:10])
    if not np.array_equal(found[:, 0].cpu().numpy(), expected[:, 0]):
        raise DataError("the two searches disagree, expected the same nearest vector")
    name = f"search among {SEARCHED:,}, queries/s"
    return {name: compare(args.rounds, queries, ours, theirs)}


# --------------------------------------------------------------------------------------------------
# DSE, section 4.3
# --------------------------------------------------------------------------------------------------

DSE_SENTENCES = 1000
DSE_PAIRS = 500  # that the cross-encoder reads; the rest of its time is extrapolated
CATALOGUE_COPIES = 100  # of 1000 sentences: Table 4 has a catalogue of 100,000
DSE_QUERIES = 10  # the fastest counts


def save_random_model(shape, folder):
    """Write a model with random weights and all-MiniLM-L6-v2's tokenizer, which is BERT's.

    shape: "bert-large", or a folder with a config.json. Raises DataError.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve(MINILM, model=True))
    if shape == "bert-large":
        config = transformers.BertConfig(**BERT_LARGE)
    elif (Path(shape) / "config.json").exists():
        config = load_pretrained(shape, Path(shape))(transformers.AutoConfig)
    else:
        expected = "bert-large, or a folder with a config.json"
        raise DataError(f"--random-weights {shape}: no such shape, expected {expected}")
    vocabulary = getattr(config, "vocab_size", 0)
    if vocabulary < len(tokenizer):
        found = f"a vocabulary of {vocabulary}"
        raise DataError(f"{shape}: {found}, expected {len(tokenizer)} or more, as BERT's")
    try:
        transformers.AutoModel.from_config(config).save_pretrained(folder)
    except Exception as error:  # of many kinds, by what is wrong with the shape
        raise DataError(f"{shape}: {' '.join(str(error).split())[:150]}") from None
    tokenizer.save_pretrained(folder)


def load_dse(name, layers, args):
    """-> DSE's Student and CrossEncoder. Raises DataError."""
    torch.manual_seed(0)
    student = dse.Student(dse.new_encoder(name, layers), classes=1)
    teacher = dse.CrossEncoder(name, "stsb", dse.MAX_LENGTH)
    return student.to(args.device).eval(), teacher.to(args.device).eval()


def measure(work, *arguments):
    """Call work(*arguments) -> (seconds, its result)."""
    begin = time.perf_counter()
    result = work(*arguments)
    result.sum().item()  # waits for the device
    return time.perf_counter() - begin, result


def speed_row(pairs, pair_seconds, psi_seconds, f_seconds, paper):
    """The time of `pairs` pairs, cross-encoder against student, and the paper's factor."""
    cross_encoder = pairs * pair_seconds
    return {
        "cross-encoder, s (extrapolated)": cross_encoder,
        "psi, s": psi_seconds,
        "f, s": f_seconds,
        "factor": cross_encoder / (psi_seconds + f_seconds),
        "paper's factor": paper,
    }


def measure_dse(student, teacher):
    """Tables 3 and 4 of DSE, measured on this machine -> {row: {column: number}}; prints them."""
    sentences = demo.sentences(DSE_SENTENCES)
    pairs = glue.Pairs(sentences[:DSE_PAIRS], sentences[-DSE_PAIRS:], None)
    teacher_tokens = teacher.tokens(pairs)
    device = teacher.model.device
    encode(teacher, teacher_tokens, device)  # warms up
    dse.embed(student, sentences[:100])
    pair, _ = measure(encode, teacher, teacher_tokens, device)
    pair /= DSE_PAIRS
    offline, vectors = measure(dse.embed, student, sentences)
    online = min(measure(dse.embed, student, [text])[0] for text in sentences[:DSE_QUERIES])
    matrix, _ = measure(student.head.score_matrix, vectors, vectors)
    vectors = vectors.repeat(CATALOGUE_COPIES, 1)
    catalogue, _ = measure(student.head.score_catalogue, vectors[0], vectors)
    rows = {
        "Table 3, 1000 x 1000": speed_row(1_000_000, pair, offline, matrix, paper=934),
        "Table 4, 1 x 100,000": speed_row(100_000, pair, online, catalogue, paper=13594),
    }
    print(table(rows))
    for name, model in (("cross-encoder", teacher.model), ("DSE's encoder", student.encoder.model)):
        layers, dimension = model.config.num_hidden_layers, model.config.hidden_size
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        print(f"{name}: {layers} layers of {dimension}, {millions:.1f} million parameters")
    return rows


def run_dse(args):
    """Measure --teacher, or --random-weights. Raises DataError."""
    if not args.random_weights:
        return measure_dse(*load_dse(args.teacher, args.student_layers, args))
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(args.random_weights, folder)
        all_layers = None
        rows = measure_dse(*load_dse(folder, all_layers, args))
    print("The weights are random (--random-weights): these are times, and nothing else.")
    return rows


# --------------------------------------------------------------------------------------------------
# Growth
# --------------------------------------------------------------------------------------------------


def save_tiny_model(folder):
    """Write a BERT of TINY's shape with random weights and all-MiniLM-L6-v2's tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve(MINILM, model=True))
    config = transformers.BertConfig(vocab_size=len(tokenizer), **TINY)
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measure_growth(args):
    """-> {row: {column: number}}, a row for each number of sentences."""
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model(folder + "/model")
        encoder = load_encoder(folder + "/model").to(args.device).eval()
        file = Path(folder) / "sentences.txt"
        for number in GROWTH:
            sentences = demo.sentences(number)
            file.write_text("\n".join(sentences) + "\n", "utf-8")
            tiny = dict(teacher=folder + "/model", student_layers=None, sentences=number)
            options = SimpleNamespace(**(vars(args) | tiny))
            speed, memory = our_training(options, str(file), folder + "/run", 0.0)
            rows[f"{number:,} sentences"] = {
                "training, s": number / speed,
                "encoding, s": seconds(encode_sentences, encoder, sentences),
                "peak memory, MB": memory,
                "bytes of tokens a sentence": Tokens(encoder, sentences).ids.nbytes / number,
            }
    print(table(rows))
    if args.figure:
        draw_growth(rows, args.figure)
    return rows


def draw_growth(rows, path):
    """Time and memory against the number of sentences. Raises DataError."""
    try:
        import matplotlib
    except ImportError:
        raise DataError("--figure: expected matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (time_axis, memory_axis) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    thousands = [number / 1000 for number in GROWTH]
    for column in ("training, s", "encoding, s"):
        values = [row[column] for row in rows.values()]
        time_axis.plot(thousands, values, marker="o", label=column.removesuffix(", s"))
    memory = [row["peak memory, MB"] for row in rows.values()]
    memory_axis.plot(thousands, memory, marker="o", color="black")
    time_axis.set(xlabel="thousand sentences", ylabel="seconds", ylim=(0, None), xlim=(0, None))
    memory_axis.set(xlabel="thousand sentences", ylabel="MB at most, training")
    memory_axis.set_ylim(0, 1.1 * max(memory))
    memory_axis.set_xlim(0, None)
    time_axis.legend(frameon=False)
    with writing(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------


def parse_args():
    parser = ArgumentParser("How fast training, encoding and search are, beside their peers.")
    add = parser.add_argument
    add("--only", default=DEFAULT_PARTS, help="parts, separated by commas; %(default)s; growth")
    add("--teacher", default=MINILM, help="folder or Hub name; %(default)s")
    add("--student-layers", help="of the teacher, the student: 1,3,5; all of another teacher")
    add("--train", default="demo", help="sentences, one a line; generated ones by default")
    add("--sentences", type=count, default=6400, help="how many; %(default)s")
    add("--batch-size", type=count, default=64, help="of training; %(default)s")
    add("--rounds", type=count, default=3, help="%(default)s")
    add("--precision", choices=PEAK_FLOPS, default="fp32", help="of our training; %(default)s")
    add(
        "--random-weights",
        metavar="SHAPE",
        help="dse: bert-large, or a folder with a config.json, instead of --teacher; random "
        "weights, for times alone",
    )
    add("--figure", metavar="FILE", help="growth: draw it, as PNG, SVG or PDF")
    add("--json", metavar="FILE", help="write the numbers, unrounded")
    add_device_option(parser)
    args = parser.parse()
    check_parts(args)
    if args.student_layers is None and args.teacher == MINILM:
        args.student_layers = SMALL_LAYERS
    return args


def is_installed(package):
    return importlib.util.find_spec(package) is not None


def check_parts(args):
    """Raises DataError for an unknown part, and for a peer that is not installed."""
    args.only = args.only.split(",")
    unknown = sorted(set(args.only) - set(PARTS))
    if unknown:
        raise DataError(f"--only {unknown[0]}: expected {', '.join(PARTS)}")
    for part in args.only:
        missing = [PIP_NAMES.get(peer, peer) for peer in PEERS[part] if not is_installed(peer)]
        if missing:
            names = " ".join(missing)
            raise DataError(f"--only {part}: expected what it compares with: pip install {names}")
    if args.random_weights and args.only != ["dse"]:
        raise DataError("--random-weights: expected --only dse with it, for times alone")
    if args.figure:
        check_figure(args)
    if args.sentences < max(2, args.batch_size):
        raise DataError(f"--sentences {args.sentences}: expected a batch, {args.batch_size}")


def check_figure(args):
    """Raises DataError for a figure that could not be drawn after the measurement."""
    if "growth" not in args.only:
        raise DataError("--figure: expected --only growth with it")
    if Path(args.figure).suffix.lower() not in FIGURE_FORMATS:
        raise DataError(f"--figure {args.figure}: expected {', '.join(FIGURE_FORMATS)}")
    check_target(args.figure)


def main():
    args = parse_args()
    compared = {}
    measured = {}
    if "train" in args.only:
        compared |= compare_training(args)
    if "encode" in args.only:
        compared |= compare_encoding(args)
    if "search" in args.only:
        compared |= compare_search(args)
    if compared:
        print(table({name: comparison.row() for name, comparison in compared.items()}))
    if "dse" in args.only:
        measured = run_dse(args)
    growth = measure_growth(args) if "growth" in args.only else {}
    rounds = {name: comparison._asdict() for name, comparison in compared.items()}
    threads = torch.get_num_threads()
    report = {"threads": threads, "rounds": rounds, "dse": measured, "growth": growth}
    write_report(args.json, report)


if __name__ == "__main__":
    run_main(main)
