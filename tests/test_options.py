"""The command line: a class with one typed line for each option."""

import subprocess
import sys
from typing import Literal

import pytest
from conftest import ROOT

import common
from common import UserError, in_range, read_options


class Options:
    files: list  # words that belong to no option
    name: str = None  # a text
    size: in_range(int, 2, 9) = 4  # from 2 to 9
    kind: Literal["a", "b"] = "a"  # one of two
    fast: bool = False  # a flag
    more: list = None  # several words

    after_a_blank_line: in_range(float, 0) = 0.5  # it is one of them


class Wrapped:
    size: int = 4  # read
    kind: in_range(int, 2, 9) = (
        5  # what a formatter makes of a line that is too long, longer than a hundred columns
    )


def test_each_line_is_an_option():
    args = read_options(Options, "", ["x", "y"])
    assert vars(args) == dict(
        files=["x", "y"],
        name=None,
        size=4,
        kind="a",
        fast=False,
        more=None,
        after_a_blank_line=0.5,
    )
    words = "x --name n --size 9 --kind b --fast --more p q --more r --after-a-blank-line 2"
    args = read_options(Options, "", words.split())
    assert (args.files, args.name, args.size, args.kind) == (["x"], "n", 9, "b")
    assert (args.fast, args.more, args.after_a_blank_line) == (True, ["p", "q", "r"], 2.0)


@pytest.mark.parametrize(
    "words, said",
    [
        ("x --size 1", "--size: invalid number (int from 2 to 9)"),
        ("x --size nan", "--size: invalid number"),
        ("x --kind c", "--kind: invalid choice: 'c'"),
        ("x --siz 3", "unrecognized arguments: --siz 3"),
        ("", "required: files"),
    ],
)
def test_a_wrong_option_is_one_line(words, said):
    with pytest.raises(UserError) as error:
        read_options(Options, "", words.split())
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_line_that_cannot_be_read_fails_loudly():
    """No option is dropped in silence."""
    with pytest.raises(SyntaxError, match=r"Wrapped: there is no option in .*kind: .* = \("):
        read_options(Wrapped, "", [])


def test_a_file_of_options_and_later_words_replace_its_own(tmp_path):
    (tmp_path / "file.txt").write_text("# a comment\nx --size 3\n--name 'two words'\n")
    args = read_options(Options, "", [f"@{tmp_path}/file.txt", "--size", "5"])
    assert (args.files, args.size, args.name) == (["x"], 5, "two words")


def test_importing_the_file_changes_nothing_for_other_programs():
    """cuDNN's switch and transformers' bars are set when an encoder is loaded."""
    code = """
import torch, transformers
from transformers.utils import logging
before = torch.backends.cuda.cudnn_sdp_enabled(), logging.is_progress_bar_enabled()
import common
assert (torch.backends.cuda.cudnn_sdp_enabled(), logging.is_progress_bar_enabled()) == before
assert before == (True, True) and not torch.cuda.is_initialized()
common.load_encoder(common.MINILM)
assert not torch.backends.cuda.cudnn_sdp_enabled() and not logging.is_progress_bar_enabled()
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_words_of_a_file_are_no_lack_of_memory(tmp_path):
    file = tmp_path / "dev.tsv"
    file.write_text("A man eats.\t3.0\tI lost my memory.\n")
    with pytest.raises(UserError, match="dev.tsv:1: .*scored pairs are tab-separated"):
        common.read_scored_pairs(file)


def test_a_header_alone_is_nothing(tmp_path):
    (tmp_path / "t.csv").write_text("sent0,sent1,hard_neg\n")
    with pytest.raises(UserError, match="t.csv: there is nothing in it"):
        common.read_sentences(tmp_path / "t.csv")


def test_dev_pairs_are_a_file_or_sentevals_folder(senteval, files, fails):
    assert len(common.read_dev(files / "dev.tsv")) == 60
    pairs = common.read_dev(senteval.parent)
    assert pairs == common.read_scored_pairs(senteval / "STS/STSBenchmark/sts-dev.csv", (5, 6, 4))
