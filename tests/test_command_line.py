"""support/command_line.py: options and their ranges, the data that options name, error lines."""

import ctypes
import errno
import json
import os
import resource
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

import common
from common import DataError
from support import command_line, demo
from support.command_line import (
    ArgumentParser,
    add_data_options,
    add_model_options,
    add_run_options,
    evaluation_sets,
    load_student,
    load_teachers,
    run_main,
    training_sentences,
    training_triplets,
)
from support.encoder import LayerPooling, load_encoder

HEADER = "sent0,sent1,hard_neg\n"


def write(path, text):
    path.write_text(text, "utf-8")
    return path


def make_parser(**moved):
    parser = ArgumentParser("a script", moved={f"--{name}": text for name, text in moved.items()})
    add_model_options(parser, "the/teacher")
    add_data_options(parser, "train.txt")
    add_run_options(parser, "runs/x", max_length=64, eval_steps=125, patience=3)
    return parser


@pytest.fixture
def parse(monkeypatch):
    """parse("--option", ..., demo_defaults=...) -> the arguments of a parser with all groups."""

    def call(*options, demo_defaults=None, **moved):
        monkeypatch.setattr(sys, "argv", ["x.py", *map(str, options)])
        return make_parser(**moved).parse(demo_defaults)

    return call


# ---- numbers


@pytest.mark.parametrize(
    "kind, good, bad, expected",
    [
        (
            "count",
            ("1", "70000"),
            ("0", "9" * 30, "-1", "1.5", "", "nan"),
            "a whole number, 1 or more, up to 2147483647",
        ),
        (
            "count_or_none",
            ("0", "3"),
            ("-1", "0.5", "inf"),
            "a whole number, 0 or more, up to 2147483647",
        ),
        ("positive", ("1e-9", "3"), ("0", "-1", "nan", "inf", "high"), "a number above 0"),
        ("weight", ("0", "0.5", "100"), ("-0.1", "nan", "inf"), "a number, 0 or more"),
        ("fraction", ("0", "0.5", "1"), ("-0.1", "1.1", "nan"), "a number from 0 to 1"),
    ],
)
def test_ranges_of_numbers(monkeypatch, kind, good, bad, expected):
    parser = ArgumentParser("a script")
    parser.add_argument("--x", type=getattr(command_line, kind))
    for text in good:
        assert parser.parse_args(["--x", text]).x == float(text)
    for text in bad:
        message = f"argument --x: '{text}' is not {expected} (--help lists the options)"
        with pytest.raises(DataError) as error:
            parser.parse_args([f"--x={text}"])
        assert str(error.value) == message


@pytest.mark.parametrize(
    "option, values",
    [
        ("--max-length", ("0", "2", "-1", "many")),
        ("--max-steps", ("-1", "0.5")),
        ("--eval-steps", ("-1", "x")),
        ("--patience", ("-1", "1.5")),
        ("--seed", ("-1", "nan")),
    ],
)
def test_numbers_of_the_shared_options_have_ranges(parse, option, values):
    for value in values:
        with pytest.raises(DataError, match=f"argument {option}: '{value}' is not a whole number"):
            parse(f"{option}={value}")


def test_huge_numbers_are_refused_as_others_are(parse):
    """The largest int has no float, and torch's seeds have 64 bits."""
    for value in ("9" * 400, "9" * 15):
        with pytest.raises(DataError, match="--seed"):
            parse("--seed", value)


@pytest.mark.parametrize("option", ["--teacher", "--student", "--dev", "--output", "--train"])
def test_an_empty_value_is_not_one_that_is_left_out(parse, option):
    with pytest.raises(DataError, match="'': expected a value, or the option left out"):
        parse(option, "")


# ---- memory


FAULTS = """
import resource, torch
from support.command_line import keep_freed_memory

keep_freed_memory()
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(2**26, dtype=torch.uint8)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_freed_memory_is_kept_for_the_next_batch():
    """The system gives out no page again. Otherwise it does, for each of them.

    In a process of its own, as a program calls it before all else.
    """
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert min(map(int, done.stdout.split())) < 2**26 / resource.getpagesize() / 10


# ---- errors


def test_an_unknown_option_is_one_line(parse):
    with pytest.raises(DataError, match=r"unrecognized arguments: --no \(--help lists the options"):
        parse("--no")


@pytest.mark.parametrize("words", [("--old", "value"), ("--old=value",), ("--old",)])
def test_an_option_that_moved_says_where_it_went(parse, words):
    expected = "--old is not an option of this script any longer: other.py does it"
    for more in ((), ("--demo",)):
        with pytest.raises(DataError, match=expected):
            parse(*words, *more, old="other.py does it", demo_defaults={"lr": 1})


def test_an_option_that_moved_is_in_no_help_and_no_arguments(parse):
    assert "--old" not in make_parser(old="other.py does it").format_help()
    assert not hasattr(parse(old="other.py does it"), "old")


def test_main_prints_one_line_and_exits_with_the_status_of_the_reason(capsys):
    def refuse():
        raise DataError("a.txt:3: wrong")

    def interrupt():
        raise KeyboardInterrupt

    def terminate():
        os.kill(os.getpid(), signal.SIGTERM)

    def full_disk():
        raise OSError(errno.ENOSPC, "No space left on device", "a.txt")

    def library():
        raise Exception("I/O error: No space left on device (os error 28)")

    def no_memory():
        raise MemoryError("cannot allocate 1 GB")

    interrupted = "error: interrupted; the same command with --resume continues\n"
    for main, line, status in (
        (refuse, "error: a.txt:3: wrong\n", 2),
        (interrupt, interrupted, 130),
        (terminate, interrupted, 143),
        (full_disk, "error: a.txt: No space left on device\n", 2),
        (library, "error: standard output or another stream: No space left on device\n", 2),
        (no_memory, "error: out of memory; cannot allocate 1 GB\n", 2),
    ):
        with pytest.raises(SystemExit) as exit:
            run_main(main)
        assert exit.value.code == status
        assert capsys.readouterr().err == line
    run_main(lambda: None)  # no error, no exit


def test_a_mistake_in_the_code_keeps_its_traceback():
    def mistake():
        raise KeyError("x")

    with pytest.raises(KeyError):
        run_main(mistake)


def test_a_pipe_that_nobody_reads_ends_quietly(capsys):
    def closed():
        raise BrokenPipeError

    with pytest.raises(SystemExit) as exit:
        run_main(closed)
    assert exit.value.code == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "options, expected",
    [
        (("--device", "gpu"), "--device gpu: expected cpu, or cuda"),
        (("--precision", "int4"), "--precision"),
    ],
)
def test_devices_and_precisions_that_are_not_there(parse, options, expected):
    with pytest.raises(DataError, match=expected):
        parse(*options)


def test_no_cuda_where_there_is_none(parse, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DataError, match="--device cuda"):
        parse("--device", "cuda")


# ---- defaults


def test_demo_changes_defaults_and_not_what_is_given(parse):
    defaults = dict(command_line.DEMO, patience=9)
    args = parse("--demo", "--train", "mine.txt", demo_defaults=defaults)
    assert (args.teacher, args.student_layers) == (common.MINILM, "1,3,5")
    assert (args.train, args.dev, args.patience) == ("mine.txt", "demo", 9)
    args = parse(demo_defaults=defaults)
    assert (args.teacher, args.student_layers) == ("the/teacher", None)
    assert (args.train, args.dev, args.patience) == ("train.txt", None, 3)


# ---- models


def model_arguments(**options):
    defaults = dict(
        teacher=None,
        student=None,
        student_layers=None,
        pooling=None,
        teacher_pooling=None,
        other_teachers=[],
        teacher_weights=None,
        teacher_dtype="float32",
        teacher_precision="fp32",
        dropout=None,
        device="cpu",
    )
    return SimpleNamespace(**(defaults | options))


def how_it_reads(encoder):
    return encoder.pooling, len(encoder.heads), encoder.model.config.num_hidden_layers


def test_the_student_is_a_model_or_layers_of_one(models_folder):
    bert, pooler = str(models_folder / "bert"), str(models_folder / "pooler")
    for options, default, expected in (
        (dict(student=bert), "mean", ("mean", 0, 4)),
        (dict(student=bert), "pooler", ("cls", 1, 4)),
        (dict(student=bert, student_layers="0,2"), "pooler", ("cls", 1, 2)),
        (dict(student=bert, pooling="cls"), "mean", ("cls", 0, 4)),
        (dict(student=pooler, teacher=bert, student_layers="1"), "mean", ("cls", 1, 1)),
        # Layers of the teacher are read as the teacher is, whatever the script's default.
        (dict(teacher=bert, student_layers="1"), "pooler", ("mean", 0, 1)),
        (dict(teacher=bert, teacher_pooling="cls", student_layers="1"), "mean", ("cls", 0, 1)),
        (dict(teacher=pooler, pooling="mean", student_layers="1"), "mean", ("mean", 0, 1)),
    ):
        student = load_student(model_arguments(**options), default)
        assert how_it_reads(student) == expected, options


def test_a_student_that_nobody_names(models_folder):
    with pytest.raises(DataError, match="give --student, or --student-layers"):
        load_student(model_arguments(teacher=str(models_folder / "bert")))


def test_a_student_that_reads_several_layers_is_refused(models_folder, tmp_path):
    """A script's own model reads the last layer alone, so it would train what is not saved."""
    load_encoder(models_folder / "bert", LayerPooling((1, 4))).save(tmp_path / "layers")
    name = str(tmp_path / "layers")
    with pytest.raises(
        DataError, match="a student with pooling LayerPooling.*expected mean or cls"
    ):
        load_student(model_arguments(student=name))
    assert load_student(model_arguments(student=name, pooling="mean")).pooling == "mean"
    teacher = load_teachers(model_arguments(teacher=name)).first  # a teacher may have it
    assert teacher.pooling == LayerPooling((1, 4))
    assert not teacher.training


def test_dropout_is_the_students_own_unless_given(models_folder):
    def rates(**options):
        student = load_student(model_arguments(student=str(models_folder / "bert"), **options))
        modules = student.modules()
        return {module.p for module in modules if isinstance(module, torch.nn.Dropout)}

    assert rates() == rates(dropout=None) == {0.1}
    assert rates(dropout=0.0) == {0.0}
    assert rates(dropout=0.3) == {0.3}


# ---- data


def test_triplets_as_sentences_are_taken_apart(tmp_path):
    path = write(tmp_path / "a.csv", HEADER + 'a,"b, c",d\na,e,"b, c"\n')
    assert training_sentences(str(path)) == ["a", "b, c", "d", "e"]  # each once


def test_sentences_are_lines_of_any_other_file(tmp_path):
    path = write(tmp_path / "a.txt", "a,b,c\n\nd\n")
    assert training_sentences(str(path)) == ["a,b,c", "d"]
    assert len(training_sentences("demo")) == command_line.DEMO_SENTENCES


def test_a_csv_with_another_header_is_refused(tmp_path):
    path = write(tmp_path / "a.csv", "premise,hypothesis,label\na,b,c\n")
    with pytest.raises(DataError, match="a.csv:1: 'premise,hypothesis,label'.*expected the header"):
        training_sentences(str(path))
    with pytest.raises(DataError, match="a.csv:1: "):
        training_triplets(str(path))


def test_triplets_are_three_lists(tmp_path):
    path = write(tmp_path / "a.csv", HEADER + "a,b,c\nd,e,f\n")
    assert training_triplets(str(path)) == (["a", "d"], ["b", "e"], ["c", "f"])
    assert [list(row) for row in zip(*training_triplets("demo"))] == demo.triplets()


def evaluation_arguments(**options):
    defaults = dict(dev=None, senteval=None, skip_test=False, demo=False)
    return SimpleNamespace(**(defaults | options))


def test_dev_of_a_file_needs_no_senteval(files):
    sets = evaluation_sets(evaluation_arguments(dev=str(files / "dev.tsv")))
    assert list(sets.dev) == ["dev"]
    assert sets.test == {}


def test_dev_and_test_of_senteval(shared_data, files):
    senteval = str(shared_data / "senteval")
    sets = evaluation_sets(evaluation_arguments(senteval=senteval))
    assert list(sets.dev) == ["STS-B dev"]
    assert len(sets.test) == 7
    sets = evaluation_sets(evaluation_arguments(senteval=senteval, skip_test=True))
    assert sets.test == {}
    sets = evaluation_sets(evaluation_arguments(senteval=senteval, dev=str(files / "dev.tsv")))
    assert list(sets.dev) == ["dev"]
    assert len(sets.test) == 7


def test_scores_have_dev_first(models_folder):
    sets = evaluation_sets(evaluation_arguments(dev="demo", demo=True))
    encoder = load_encoder(models_folder / "bert").eval()
    scores = sets.scores(encoder, "")
    assert list(scores) == ["demo dev", "demo test"]
    assert scores["demo dev"] == sets.dev_score(encoder)


# ---- reports


def test_a_report_is_json_with_all_digits(tmp_path):
    command_line.write_report(None, {"a": 1})
    command_line.write_report(tmp_path / "a.json", {"é": 1 / 3})
    assert json.loads((tmp_path / "a.json").read_text("utf-8")) == {"é": 1 / 3}
    with pytest.raises(DataError, match="expected a file that can be written"):
        command_line.write_report(tmp_path / "a.json" / "b.json", {})
    command_line.write_report(tmp_path / "new" / "a.json", {})
    assert (tmp_path / "new" / "a.json").read_text() == "{}\n"
    command_line.write_report(tmp_path / "nan.json", {"a": [float("nan"), 1.5], "b": ("x", 2)})
    text = (tmp_path / "nan.json").read_text()
    assert json.loads(text) == {"a": [None, 1.5], "b": ["x", 2]}
