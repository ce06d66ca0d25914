"""extras/benchmark.py: each part with small models."""

import json
from types import SimpleNamespace

import pytest
import sentence_transformers
import torch

import common
from extras import benchmark, device


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

    def their_training(student, sentences, targets, folder, batch_size):
        found.append(common.read_json(folder / "ours" / "args.json")["dropout"])
        return train(student, sentences, targets, folder, batch_size)

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


def scores(printed):
    """The line for results/data -> its scores, which are also the table's."""
    *table, line = printed.splitlines()
    line = json.loads(line)
    assert list(line) == ["run", "command", "commit", "seed", "machine", "scores"]
    assert [row.strip("| ").split(" |")[0].rstrip() for row in table[2:]] == [*line["scores"]]
    return line["scores"]


@pytest.mark.slow
def test_everything_that_is_measured_on_a_gpu_runs_on_a_cpu(call_main):
    pytest.importorskip("datasets", reason="sentence-transformers' trainer needs it")
    found = scores(call_main(benchmark, "--only", "gpu", "--tiny"))
    training = ["tiny, batch 4, fp32", "tiny, batch 4, bf16, compiled"]
    training += ["tiny, batch 4, fp32, torchrun", "tiny, batch 4, fp32, sentence-transformers"]
    speeds = [*training, "tiny, encoding, fp32", "tiny, encoding, bf16"]
    checks = ["GPU against CPU", "SIGKILL and --resume"]
    assert {*found} == {"bf16 matrix product", *speeds, *checks}
    for name in speeds:
        assert 0 < found[name]["% of bf16 peak"] < 100
    for name in training[:3]:
        assert "peak, GB" in found[name]
    if device.DEVICE == "cpu":
        for name in checks:
            assert found[name] == {"loss, 1e-6": 0, "dev, 1e-6": 0}


@pytest.mark.slow
def test_a_cpu_is_measured_in_each_precision_with_and_without_compile(call_main):
    found = scores(call_main(benchmark, "--only", "cpu", "--tiny", "--rounds", 2))
    variants = ["fp32", "bf16", "fp32, compiled", "bf16, compiled"]
    assert list(found) == [
        f"tiny, {kind}, {v}" for kind in ("training", "encoding") for v in variants
    ]
    for row in found.values():
        assert 0 < row["smallest"] <= row["ratio"] <= row["largest"]
    assert found["tiny, encoding, fp32"]["ratio"] == 1


def test_operations_of_minilm_by_hand():
    """Queries, keys, values and output; two layers of four times the width; two normalizations."""
    width, tokens = 384, 1 + 3 + 1  # [CLS], words, [SEP]
    layer = 4 * (width + 1) * width + (width + 1) * 4 * width + (4 * width + 1) * width
    layer += 2 * 2 * width
    found = device.operations_per_sentence(device.GPU_SHAPES["MiniLM-L6"], ["one two three"])
    assert found == 2 * 6 * layer * tokens
    gpu = SimpleNamespace(sentences=["one two three"], shapes=device.GPU_SHAPES, peak=1e12)
    share = device.Gpu.speed(gpu, "MiniLM-L6", 1000, passes=3)["% of bf16 peak"]
    assert share == pytest.approx(100 * 1000 * 6 * 6 * layer * tokens / 1e12)


def test_a_generated_word_is_one_token(teacher):
    sentences = device.generated_sentences(50)
    lengths = common.Tokens(teacher, sentences).lengths
    assert lengths.tolist() == [len(text.split()) + 2 for text in sentences]


def test_without_a_gpu_one_line_says_so(fails, monkeypatch):
    monkeypatch.setattr(device, "DEVICE", "cpu")
    line = fails(benchmark, "--only", "gpu")
    assert line == "error: --only gpu: torch finds no GPU; --tiny tries it on the CPU"


def test_what_fails_is_only_noted(monkeypatch, capsys):
    def fail(*_):
        raise common.UserError("CUDA out of memory")

    monkeypatch.setattr(device.Gpu, "__init__", lambda *_: None)
    monkeypatch.setattr(device.Gpu, "measurements", lambda _: [("a", fail), ("b", dict)])
    assert device.measure_gpu(SimpleNamespace(tiny=True)) == {"b": {}}
    assert "a: CUDA out of memory\n" in capsys.readouterr().err
