"""Numbers that make no sense, alone or together, are refused before anything is computed."""

import importlib

import pytest
from processes import SCRIPTS, small_run

import common

# Of every script: where an option is declared, its range is.
OF_ALL = {
    ("--max-length", "2"): "argument --max-length: '2' is not a whole number, ",
    ("--max-length", "9" * 30): "is not a whole number, ",
    ("--batch-size", "0"): "argument --batch-size: '0' is not a whole number, 1",
    ("--batch-size", "-4"): "argument --batch-size: '-4' is not a whole number, 1",
    ("--max-steps", "-1"): "argument --max-steps: '-1' is not a whole number, 0",
    ("--eval-steps", "1.5"): "argument --eval-steps: '1.5' is not a whole number, 0",
    ("--patience", "nan"): "argument --patience: 'nan' is not a whole number, 0",
    ("--seed", "-1"): "argument --seed: '-1' is not a whole number from 0 to 4294967295",
    ("--lr", "0"): "argument --lr: '0' is not a number above 0",
    ("--lr", "inf"): "argument --lr: 'inf' is not a number above 0",
    ("--dropout", "1"): "argument --dropout: '1' is not a number from 0 to below 1",
    ("--student", ""): "--student '': expected a value, or the option left out",
    ("--output", ""): "--output '': expected a value, or the option left out",
}
TOGETHER = [
    ("ckd", ("--resume", "--overwrite"), "--resume and --overwrite: expected one of them"),
    ("ckd", ("--device", "cuda:x"), "--device cuda:x: expected cpu, or cuda"),
    ("baselines", ("--protocol",), "argument --protocol: expected one argument"),
    (
        "baselines",
        ("--method", "kd", "--align", "--projection"),
        "--projection: expected without --align",
    ),
    ("ckd", ("--train", "one.txt"), "1 text to train on, expected 2 or more, to have negatives"),
    ("ckd", ("--queue-size", 0, "--batch-size", 1), "--batch-size 1: expected 2 or more"),
    ("ckd", ("--queue-size", 269), "--queue-size 269: 300 sentences without a batch fill 268"),
    ("ckd", ("--queue-size", -1), "'-1' is not a whole number, 0"),
    ("ckd", ("--temperature", 0), "'0' is not a number above 0"),
    ("ckd", ("--finetune-batch-size", 0), "'0' is not a whole number, 1"),
    ("congen", ("--train", "one.txt"), "1 sentence to train on, expected 2 or more"),
    ("congen", ("--queue-size", 0), "'0' is not a whole number, 1"),
    ("congen", ("--queue-size", 301), "--queue-size 301: expected 32 (a batch, or 2) to 300"),
    ("congen", ("--queue-size", 31), "--queue-size 31: expected 32 (a batch, or 2) to 300"),
    ("congen", ("--alpha", 1.1), "'1.1' is not a number from 0 to 1"),
    ("congen", ("--student-temperature", 0), "'0' is not a number above 0"),
    ("ibkd", ("--train", "one.txt"), "1 text to train on, expected 2 or more, to have negatives"),
    ("ibkd", ("--batch-size", 1), "--batch-size 1: expected 2 or more"),
    ("ibkd", ("--dim", 0), "'0' is not a whole number, 1"),
    ("ibkd", ("--dim", 33), "--dim 33: expected at most 32, that of the embedding"),
    ("ibkd", ("--dim", 49, "--keep-mapping"), "--dim 49: expected at most 48"),
    ("ibkd", ("--finetune-batch-size", 1), "expected 2 or more, as HSIC of one sample is 0"),
    ("ibkd", ("--gamma", 0), "'0' is not a number above 0"),
    ("ibkd", ("--beta1", -1), "'-1' is not a number, 0 or more"),
    ("ibkd", ("--hsic-layer", 5), "--hsic-layer 5: expected a layer of the student, from -5 to 4"),
    ("distilface", ("--train", "one.txt"), "1 text to train on, expected 2 or more"),
    ("distilface", ("--batch-size", 1), "--batch-size 1: expected 2 or more"),
    ("distilface", ("--batch-size", 301), "--batch-size 301: expected at most 300"),
    ("baselines", ("--method", "crd", "--train", "one.txt"), "1 text to train on"),
    ("baselines", ("--method", "crd", "--batch-size", 1), "--batch-size 1: expected 2 or more"),
    (
        "baselines",
        ("--method", "hpd", "--dimension", 49),
        "expected at most the teacher's, 48",
    ),
    (
        "baselines",
        ("--method", "hpd", "--dimension", 2, "--train", "one.txt"),
        "at most 1, the number of sentences",
    ),
    (
        *("baselines", ("--method", "hpd", "--dimension", 1, "--train", "one.txt")),
        "one sentence to train on, expected 2 or more",
    ),
    ("baselines", ("--max-norm", -1), "'-1' is not a number, 0 or more"),
    ("baselines", ("--teacher-weights", "0"), "'0' is not a number above 0 up to 1000000"),
    ("dse", ("--max-length", 4), "'4' is not a whole number, 5"),
    ("dse", ("--glue", "."), "one score alone, expected two different ones"),
    ("dse", ("--alpha", "nan"), "'nan' is not a number from 0 to 1"),
]
PROGRAMS = [
    ("eval_sts", ("--score-range", 5, 0), "--score-range 5 0: expected a lower one"),
    ("eval_sts", ("--score-range", 0, 0), "--score-range 0 0: expected a lower one"),
    ("eval_sts", ("--score-range", "nan", 5), "'nan' is not a number"),
    ("eval_sts", ("--translations", "one.tsv"), "one.tsv: one pair, expected others"),
    ("eval_retrieval", ("--beir", ".", "--memory", 0), "'0' is not a number"),
    ("eval_retrieval", ("--beir", ".", "--memory", "1e300"), "'1e300' is not a number"),
    ("eval_transfer", ("--senteval", "", "--fast"), "expected a value"),
]


@pytest.fixture
def refuses(fails, models_folder, files, tmp_path, monkeypatch):
    """refuses(script, "--option", ...) -> the error line of a small run with these options."""

    def compute(*_, **__):
        raise AssertionError("something was computed")

    (tmp_path / "one.txt").write_text("A single sentence.\n")
    (tmp_path / "one.tsv").write_text("A single pair.\tOf sentences.\n")
    (tmp_path / "STS-B").mkdir()
    for split in ("train", "dev", "test"):
        rows = "sentence1\tsentence2\tscore\na\tb\t3\nc\td\t3\n"
        (tmp_path / "STS-B" / f"{split}.tsv").write_text(rows)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "encode", compute)

    def call(script, *options):
        module = importlib.import_module(script)
        if script in SCRIPTS:
            options = (*small_run(script, models_folder, files), "--output", "out", *options)
        else:
            options = (models_folder / "bert", *options)
        line = fails(module, *options)
        assert not (tmp_path / "out").exists()
        return line

    return call


@pytest.mark.parametrize("script", SCRIPTS)
def test_ranges_are_those_of_every_script(refuses, script):
    for options, expected in OF_ALL.items():
        assert expected in refuses(script, *options), options


@pytest.mark.parametrize("script, options, expected", [*TOGETHER, *PROGRAMS])
def test_numbers_that_make_no_sense_together(refuses, script, options, expected):
    assert expected in refuses(script, *options)


def test_the_covariance_of_one_sentence(fails, models_folder, tmp_path):
    import analyze

    (tmp_path / "one.txt").write_text("A single sentence.\n")
    model = models_folder / "bert"
    options = ("--sentences", tmp_path / "one.txt", "--output", tmp_path / "x")
    assert "one sentence, expected two" in fails(analyze, "covariance", model, *options)
