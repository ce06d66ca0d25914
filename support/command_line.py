"""The command line that all scripts share, and the data sets that it names.

A script adds the groups of options that it needs, each with its own defaults. Ranges stand where an
option is declared. Invalid input prints one error line and exits with status 2.
"""

import argparse
import ctypes
import json
import math
import os
import re
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from common import (
    FULL_PRECISION,
    MINILM,
    TEACHER_DTYPES,
    Cache,
    DataError,
    check_target,
    read_scored_pairs,
    read_sentences,
    read_sts,
    read_triplets,
    resolve,
    spearman,
    spearman_of,
    system_reason,
    write_whole,
    writing,
)
from support import demo, distributed
from support.distributed import INVALID_INPUT
from support.encoder import SHORTEST_INPUT, load_encoder, public_name
from support.process import handling, interrupt
from support.teachers import Teachers

CLOSED_PIPE = 128 + signal.SIGPIPE  # exit status
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
KEPT_BYTES = 2**30
GIGABYTE = 10**9
POOLINGS = ("mean", "cls", "pooler")
TEACHER_PRECISIONS = ("fp32", "bf16")
DEMO = dict(teacher=MINILM, student_layers="1,3,5", train="demo", dev="demo")
DEMO_SENTENCES = 10_000


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, with errors as DataError. `moved`: {option: where its work is done now}."""

    def __init__(self, description, moved=None, add_help=True):
        super().__init__(description=description, add_help=add_help)
        for option, advice in (moved or {}).items():
            self.add_argument(option, nargs="?", action=Moved, advice=advice)

    def parse_args(self, *arguments):
        """argparse's. Raises DataError, also for an empty text, which is no value.

        And for a name that is no text: not UTF-8, it could not be written into a file.
        """
        for word in sys.argv[1:]:
            if not is_text(word):
                raise DataError(f"{word!r}: it is not UTF-8, expected text")
        args = super().parse_args(*arguments)
        for name, value in vars(args).items():
            if value == "" or (isinstance(value, list) and "" in value):
                option = "--" + name.replace("_", "-")
                raise DataError(f"{option} '': expected a value, or the option left out")
        return args

    def error(self, message):
        raise DataError(f"{message} (--help lists the options)")

    def parse(self, demo_defaults=None, needs_dropout=False):
        """The arguments, with `demo_defaults` where --demo is given. Raises DataError.

        needs_dropout: the method rests on it, so that several processes have it, too.
        """
        if demo_defaults and self.parse_known_args()[0].demo:
            self.set_defaults(**demo_defaults)
        args = self.parse_args()
        check_device(args)
        choose_cache(args)
        choose_teachers(args)
        choose_dropout(args)
        if distributed.world_size() > 1 and not needs_dropout:
            switch_off_dropout(args)
        if getattr(args, "json", None) is not None:
            check_target(args.json)
        return args


def is_text(word):
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def choose_cache(args):
    """--cache-dir and --cache-limit, where they are given. Raises DataError."""
    if getattr(args, "cache_dir", None) is not None:
        Cache.folder = Path(args.cache_dir)
        if Cache.folder.exists() and not Cache.folder.is_dir():
            raise DataError(f"--cache-dir {args.cache_dir}: it is a file, expected a folder")
    if getattr(args, "cache_limit", None) is not None:
        Cache.limit = args.cache_limit * GIGABYTE


def choose_teachers(args):
    """The teachers that are given take the place of the default one. Raises DataError."""
    if not hasattr(args, "teachers"):
        return
    if args.teachers:
        args.teacher, *args.other_teachers = args.teachers
    del args.teachers
    if args.teacher_weights is None:
        return
    teachers = 1 + len(args.other_teachers)
    if len(args.teacher_weights) != teachers:
        given = ",".join(f"{value:g}" for value in args.teacher_weights)
        raise DataError(f"--teacher-weights {given}: expected {teachers}, one for each --teacher")


def choose_dropout(args):
    """No dropout, if it is not given, where a teacher's embeddings train a model cut to few layers.

    It is faster and scores better there (RESULTS.md). A student that is whole keeps its own, as in
    the papers.
    """
    is_distilled = hasattr(args, "other_teachers")
    if is_distilled and args.student_layers and args.dropout is None:
        args.dropout = 0.0


class Moved(argparse.Action):
    """An option that another script has taken over."""

    def __init__(self, *args, advice, **kwargs):
        super().__init__(*args, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **kwargs)
        self.advice = advice

    def __call__(self, parser, namespace, value, option=None):
        raise DataError(f"{option} is not an option of this script any longer: {self.advice}")


def keep_freed_memory():
    """Let glibc keep the memory that one batch has freed for the next one.

    Otherwise large blocks go back to the system, which clears them before it gives them out again:
    a few percent of a training step on a CPU at best. Without glibc, nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def run_main(main):
    """Call main(). For invalid input print one line and exit with status 2.

    The same for what the system refuses, such as a full disk. SIGTERM and Ctrl-C end it with one
    line and their own status, a closed pipe ends it quietly.
    """
    keep_freed_memory()
    try:
        with handling(interrupt), distributed.all_processes():
            try:
                main()
            finally:
                flush_output()
    except KeyboardInterrupt as error:
        message = str(error) or "interrupted; the same command with --resume continues"
        fail(message, getattr(error, "status", 128 + signal.SIGINT))
    except BrokenPipeError:  # of `| head`
        sys.exit(CLOSED_PIPE)
    except Exception as error:
        message = one_line(error)
        if message is None:
            raise
        fail(message, INVALID_INPUT)


def fail(message, status):
    distributed.fail(f"error: {' '.join(message.splitlines())}", status)


def one_line(error):
    """What to say of an exception: None if it is a mistake in the code, which needs a traceback."""
    if isinstance(error, DataError):
        return str(error)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return f"out of memory; {' '.join(str(error).split())[:150]}"
    reason = system_reason(error)
    if reason is None:
        return None
    return f"{getattr(error, 'filename', None) or 'standard output or another stream'}: {reason}"


def flush_output():
    """Write what was printed. Raises BrokenPipeError where nobody reads it, or DataError."""
    if sys.stdout is None:  # it was closed from the start
        return
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python flushes once more at its end, and would complain again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise DataError(f"standard output: {error.strerror}, expected room for it") from None


# --------------------------------------------------------------------------------------------------
# Ranges of numbers, for `type=`
# --------------------------------------------------------------------------------------------------


LARGEST_INT = 2**31 - 1  # what it counts would fit into no memory, and what it multiplies is finite


def number(kind, accepts, expected):
    """A function that reads an int or a float for which accepts(value) is true."""

    def read(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan  # in no range
        if not accepts(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
        return value

    return read


def at_least(low):
    """A function that reads a whole number from `low` on."""
    expected = f"a whole number, {low} or more, up to {LARGEST_INT}"
    return number(int, lambda value: low <= value <= LARGEST_INT, expected)


count = at_least(1)
count_or_none = at_least(0)
length = at_least(SHORTEST_INPUT)  # of a sentence in tokens
pair_length = at_least(SHORTEST_INPUT + 2)  # of two sentences: one more of them, one more [SEP]
positive = number(float, lambda value: 0 < value < math.inf, "a number above 0")
weight = number(float, lambda value: 0 <= value < math.inf, "a number, 0 or more")
fraction = number(float, lambda value: 0 <= value <= 1, "a number from 0 to 1")
probability = number(float, lambda value: 0 <= value < 1, "a number from 0 to below 1")
up_to_million = number(float, lambda value: 0 < value <= 1e6, "a number above 0 up to 1000000")
seed = number(  # Run multiplies it, and torch takes 64 bits
    int, lambda value: 0 <= value < 2**32, f"a whole number from 0 to {2**32 - 1}"
)


def positive_numbers(text):
    """Numbers above 0, separated by commas. Their sum is finite."""
    return [up_to_million(part) for part in text.split(",")]


# --------------------------------------------------------------------------------------------------
# Groups of options
# --------------------------------------------------------------------------------------------------


def add_model_options(parser, teacher, student_pooling="mean"):
    """--teacher, --student, --student-layers, --pooling, --teacher-precision, --dropout, ...

    In the arguments, `teacher` is the first one and `other_teachers` are the rest.
    """
    group = parser.add_argument_group("models")
    add = group.add_argument
    add(
        "--teacher",
        action="append",
        dest="teachers",
        help=f"folder or Hub name; {teacher}; given several times, these teachers together",
    )
    add(
        "--teacher-weights",
        type=positive_numbers,
        help="of several teachers' cosines in their weighted mean: 1,2; by default all equal",
    )
    parser.set_defaults(teacher=teacher, other_teachers=[])
    add(
        "--student",
        help="folder or Hub name; by default the teacher itself, cut to --student-layers",
    )
    add("--student-layers", help="keep only these layers, counted from 0: 1,3,5")
    stated = "by default as its folder states"
    add(
        "--pooling",
        choices=POOLINGS,
        help=f"how the student is read; {stated}, else {student_pooling}",
    )
    add("--teacher-pooling", choices=POOLINGS, help=f"how the teacher is read; {stated}, else mean")
    add(
        "--teacher-dtype",
        choices=TEACHER_DTYPES,
        default=FULL_PRECISION,
        help="of the cached teacher embeddings: float16 takes half the space; %(default)s",
    )
    add(
        "--teacher-precision",
        choices=TEACHER_PRECISIONS,
        default="fp32",
        help="of the teacher's pass over the sentences: bf16 is several times as fast where the "
        "machine multiplies it by itself; %(default)s",
    )
    add_dropout_option(group, "by default 0 for a student cut to --student-layers, else its own")
    return group


def add_alignment_options(add, what):
    """--align, --keep-projection. add: a parser's add_argument; what: what --align does."""
    add("--align", action="store_true", help=f"{what}; see support/alignment.py")
    add(
        "--keep-projection",
        action="store_true",
        help="the student answers in the teacher's space, through a last dense head",
    )


def add_dropout_option(parser, default="by default its own"):
    parser.add_argument(
        "--dropout",
        type=probability,
        help=f"of the student in training; {default}; of several processes 0, since they do not "
        "draw the masks of one (but in distilface.py)",
    )


def add_data_options(parser, train):
    """--train, --dev, --senteval, --skip-test."""
    group = parser.add_argument_group("data")
    add = group.add_argument
    add(
        "--train",
        default=train,
        help="sentences, one a line, or NLI triplets (.csv), taken apart: a file, or a data set on "
        "the Hub as OWNER/NAME:FILE; %(default)s",
    )
    add("--dev", help="scored pairs (TSV) that choose the best student; STS-B dev of --senteval")
    add(
        "--senteval",
        help="SentEval's folder or tar; senteval.tar from the Hub where --dev is not given",
    )
    add("--skip-test", action="store_true", help="score dev only, not the seven STS test sets")
    return group


def add_run_options(
    parser, output, max_length, eval_steps, patience, demo_minutes="two", length=length
):
    """--output, --max-steps, --max-length, --eval-steps, --patience, --seed, --device, ...

    length: the type of --max-length.
    """
    group = parser.add_argument_group("run")
    add = group.add_argument
    add("--output", default=output, help="becomes the best student's folder; %(default)s")
    add("--max-steps", type=count_or_none, default=0, help="end a stage after these steps; 0: no")
    add("--max-length", type=length, default=max_length, help="in tokens, training; %(default)s")
    add(
        "--eval-steps",
        type=count_or_none,
        default=eval_steps,
        help="steps between dev scores, and checkpoints; 0: an epoch; %(default)s",
    )
    add(
        "--patience",
        type=count_or_none,
        default=patience,
        help="end a stage after so many epochs without a better dev score; 0: never; %(default)s",
    )
    add("--seed", type=seed, default=0, help="%(default)s")
    add(
        "--shuffle",
        action="store_true",
        help="batches of random sentences, instead of sentences of similar length",
    )
    add_device_option(group)
    bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    add(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        default="bf16" if bf16 else "fp32",
        help="of training; %(default)s on this machine",
    )
    add(
        "--cache-dir",
        metavar="FOLDER",
        help="of teacher embeddings; sentence-distillation in $XDG_CACHE_HOME or ~/.cache",
    )
    add(
        "--cache-limit",
        type=up_to_million,
        metavar="GB",
        help="remove what was not used for longest beyond it; by default nothing",
    )
    add("--resume", action="store_true", help="continue the run in --output, or begin it")
    add("--overwrite", action="store_true", help="delete the run in --output and begin again")
    add(
        "--demo",
        action="store_true",
        help=f"generated data and all-MiniLM-L6-v2; {demo_minutes} minutes on a CPU",
    )
    return group


def add_device_option(parser):
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cpu or cuda; %(default)s here")


def add_evaluation_options(parser):
    """MODEL..., --json, --device of the programs that score encoders."""
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder or Hub name")
    parser.add_argument("--json", metavar="FILE", help="write the numbers, unrounded")
    add_device_option(parser)


def check_device(args):
    """Raises DataError for a device that is not there."""
    name = re.fullmatch(r"cuda(?::(\d+))?", args.device)
    if name and torch.cuda.is_available() and int(name[1] or 0) < torch.cuda.device_count():
        check_gpus(args)
        return
    if args.device != "cpu":
        raise DataError(f"--device {args.device}: expected cpu, or cuda on a machine that has it")


def check_gpus(args):
    """Raises DataError if there is no GPU for each of several processes."""
    if distributed.world_size() == 1:
        return
    if args.device != "cuda":
        expected = "cuda, as each of several processes has its own GPU"
        raise DataError(f"--device {args.device}: expected {expected}")
    if int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
        found = f"{torch.cuda.device_count()} GPUs on this host"
        raise DataError(f"{found}, expected one for each process of torchrun's --nproc-per-node")


def switch_off_dropout(args):
    """--dropout 0, where it is not given: several processes do not draw the masks of one."""
    if "dropout" in args and args.dropout is None:
        args.dropout = 0.0
        distributed.note("several processes: --dropout 0, so that they train as one process does")


# --------------------------------------------------------------------------------------------------
# What the options name
# --------------------------------------------------------------------------------------------------


def load_student(args, default_pooling="mean"):
    """The encoder that --student and --student-layers describe. Raises DataError."""
    if args.student:
        name, pooling = args.student, args.pooling
    elif args.student_layers:
        name, pooling = args.teacher, args.pooling or args.teacher_pooling
        default_pooling = "mean"
    else:
        raise DataError("give --student, or --student-layers to cut the student from the teacher")
    encoder = load_encoder(name, pooling, default_pooling, args.student_layers)
    if encoder.pooling not in ("mean", "cls"):
        expected = "mean or cls, or --pooling to read it so"
        raise DataError(f"{name}: a student with pooling {encoder.pooling}, expected {expected}")
    set_dropout(encoder, args)
    return encoder.to(args.device)


def reload_student(folder, args):
    """The best student so far, which a run has saved."""
    encoder = load_encoder(folder).to(args.device)
    set_dropout(encoder, args)
    return encoder


def set_dropout(encoder, args):
    """--dropout, where it is given, instead of the encoder's own."""
    if args.dropout is None:
        return
    for module in encoder.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = args.dropout


def load_teachers(args):
    """The frozen encoders that --teacher describes -> Teachers. Raises DataError."""
    names = [args.teacher, *args.other_teachers]
    encoders = []
    for name in names:
        encoder = load_encoder(name, args.teacher_pooling).to(args.device).eval()
        encoder.precision = args.teacher_precision
        encoders.append(encoder)
    shares = args.teacher_weights or [1.0] * len(names)
    names = [public_name(name) for name in names]
    return Teachers(names, encoders, shares, args.teacher_dtype)


def check_only_teacher(args, reason):
    """Raises DataError, with the reason, if several teachers are given."""
    if args.other_teachers:
        raise DataError(f"--teacher {args.other_teachers[0]}: expected one teacher, as {reason}")


def training_sentences(name):
    """--train -> list of str, of triplets (.csv) every distinct sentence. Raises DataError."""
    if name == "demo":
        return demo.sentences(DEMO_SENTENCES)
    path = resolve(name)
    if path.name.endswith((".csv", ".csv.gz")):
        triplets = read_triplets(path)
        return list(dict.fromkeys(text for triplet in triplets for text in triplet))
    return read_sentences(path)


def training_triplets(name):
    """--triplets -> anchors, positives, hard negatives: three lists. Raises DataError."""
    rows = demo.triplets() if name == "demo" else read_triplets(resolve(name))
    anchors, positives, hard_negatives = zip(*rows)
    return list(anchors), list(positives), list(hard_negatives)


def check_negatives(texts, batch_size):
    """In-batch negatives need two texts in a batch. Raises DataError."""
    if batch_size < 2:
        raise DataError(f"--batch-size {batch_size}: expected 2 or more, to have negatives")
    if texts < 2:
        raise DataError(f"{texts} text to train on, expected 2 or more, to have negatives")


class EvaluationSets(NamedTuple):
    """{name: ScoredPairs}: dev chooses the best student, test is scored before and after."""

    dev: dict
    test: dict

    def dev_score(self, encoder):
        """Spearman x 100 on dev."""
        (score,) = spearman(encoder, self.dev).values()
        return score

    def scores(self, encoder, title):
        """{set: Spearman x 100}, dev first."""
        scores = spearman(encoder, self.dev, title)
        if self.test:
            scores |= spearman(encoder, self.test, title)
        return scores

    def scores_of(self, encode_all):
        """The same of any vectors: encode_all(list of n sentences) -> array [n, D]."""
        scores = spearman_of(encode_all, self.dev)
        if self.test:
            scores |= spearman_of(encode_all, self.test)
        return scores


def evaluation_sets(args):
    """--dev, --senteval, --skip-test, --demo -> EvaluationSets. Raises DataError."""
    senteval = None
    if args.senteval or not args.dev:
        senteval = resolve(args.senteval or "senteval.tar")
    if args.dev == "demo":
        dev = demo.dev()
    elif args.dev:
        dev = {"dev": read_scored_pairs(args.dev)}
    else:
        dev = read_sts(senteval, "dev")
    if args.demo:
        test = demo.test()
    elif senteval and not args.skip_test:
        test = read_sts(senteval)
    else:
        test = {}
    return EvaluationSets(dev, test)


def without_nan(content):
    """The same with null for each number that JSON does not have: a score that is undefined."""
    if isinstance(content, dict):
        return {key: without_nan(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [without_nan(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content


def write_report(path, content):
    """Write `content` as JSON to `path`, if one is given. Raises DataError."""
    if path is None:
        return
    text = json.dumps(without_nan(content), indent=2, ensure_ascii=False)
    with writing(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text + "\n")
