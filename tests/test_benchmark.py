"""extras/benchmark.py: each part with small models."""

from types import SimpleNamespace

import pytest
import sentence_transformers
import torch

import common
from extras import benchmark


@pytest.fixture
def options(models_folder, files):
    data = ("--train", files / "sentences.txt", "--sentences", 60, "--batch-size", 2)
    model = ("--teacher", models_folder / "mean", "--student-layers", "0,2")
    return *model, *data, "--rounds", 1


def rows(printed):
    """A printed table -> {row: list of numbers}."""
    lines = [line.strip("| ").split("|") for line in printed.splitlines()[2:]]
    return {cells[0].strip(): [float(cell) for cell in cells[1:]] for cells in lines}


def test_a_ratio_is_the_median_of_the_rounds_with_the_smallest_and_the_largest():
    row = benchmark.compare([10.0, 30.0, 40.0], [5.0, 10.0, 40.0])
    assert row == {"ours": 30, "theirs": 10, "ratio": 2, "smallest": 1, "largest": 3}


@pytest.mark.slow
def test_training_is_compared_with_equal_dropout_and_defaults(call_main, options, monkeypatch):
    pytest.importorskip("datasets", reason="sentence-transformers' trainer needs it")
    found = []
    train, fit = benchmark.their_training, sentence_transformers.SentenceTransformerTrainer.train

    def their_training(args, sentences, targets, folder, dropout):
        found.append(common.read_json(folder / "ours" / "args.json")["dropout"])
        return train(args, sentences, targets, folder, dropout)

    def fit_theirs(trainer):
        parts = trainer.model.modules()
        found.extend({part.p for part in parts if isinstance(part, torch.nn.Dropout)})
        return fit(trainer)

    monkeypatch.setattr(benchmark, "their_training", their_training)
    monkeypatch.setattr(sentence_transformers.SentenceTransformerTrainer, "train", fit_theirs)
    defaults, without, equal = rows(call_main(benchmark, "--only", "train", *options)).values()
    assert found == [0.0, 0.0, 0.1, 0.1]
    assert defaults[:2] == [without[0], equal[1]]


def test_encoding_is_compared(call_main, options):
    table = rows(call_main(benchmark, "--only", "encode", *options))
    assert list(table)[1:] == ["encoding passages", "encoding one sentence at a time"]
    assert all(number > 0 for row in table.values() for number in row)


@pytest.mark.parametrize("random_weights", [False, True])
def test_the_factors_of_dse(models_folder, monkeypatch, random_weights):
    monkeypatch.setattr(benchmark, "DSE_SENTENCES", 50)
    monkeypatch.setattr(benchmark, "CATALOGUE_COPIES", 3)
    shape = dict(hidden_size=32, num_hidden_layers=5, num_attention_heads=4, intermediate_size=64)
    monkeypatch.setattr(benchmark, "BERT_LARGE", shape)
    args = dict(teacher=models_folder / "bert", student_layers="0,1", random_weights=random_weights)
    monkeypatch.setattr(benchmark, "seconds", lambda work, *inputs: (5.0, work(*inputs)))
    table_3, table_4 = benchmark.run_dse(SimpleNamespace(**args)).values()
    expected = {"psi, s": 5, "f, s": 5, "pairs": 2500, "cross-encoder, s": 250, "factor": 25}
    assert table_3 == expected | {"paper": 934}  # 50 pairs took the cross-encoder 5 s
    expected |= {"pairs": 150, "cross-encoder, s": 15, "factor": 1.5}
    assert table_4 == expected | {"paper": 13594}
