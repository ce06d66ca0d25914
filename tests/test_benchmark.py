"""extras/benchmark.py: each part with small models; of the GPU part, its numbers by hand."""

from types import SimpleNamespace

import pytest
import sentence_transformers
import torch

import common
from extras import benchmark


@pytest.fixture(autouse=True)
def cache(monkeypatch):
    monkeypatch.setattr(common, "CACHE", common.CACHE)  # restored after the test


def rows(printed):
    """A printed table -> {row: list of numbers}."""
    lines = [line.strip("| ").split("|") for line in printed.splitlines()[2:] if "|" in line]
    return {
        cells[0].strip(): [float(cell) for cell in cells[1:] if cell.strip()] for cells in lines
    }


def test_a_ratio_is_the_median_of_the_rounds_with_the_smallest_and_the_largest():
    row = benchmark.compare([10.0, 30.0, 40.0], [5.0, 10.0, 40.0])
    assert row == {"ours": 30, "theirs": 10, "ratio": 2, "smallest": 1, "largest": 3}


@pytest.mark.slow
def test_training_is_compared_with_equal_dropout_and_defaults(
    call_main, models_folder, files, monkeypatch
):
    pytest.importorskip("datasets", reason="sentence-transformers' trainer needs it")
    ours, theirs = [], []
    run, fit = benchmark.run_script, sentence_transformers.SentenceTransformerTrainer.train

    def run_ours(script, *data, **options):
        ours.append((options["dropout"], "--group-by-length" in data))
        return run(script, *data, **options)

    def fit_theirs(trainer):
        parts = trainer.model.modules()
        theirs.extend({part.p for part in parts if isinstance(part, torch.nn.Dropout)})
        return fit(trainer)

    monkeypatch.setattr(benchmark, "run_script", run_ours)
    monkeypatch.setattr(sentence_transformers.SentenceTransformerTrainer, "train", fit_theirs)
    options = ("--teacher", models_folder / "mean", "--student-layers", "0,2", "--rounds", 1)
    options += ("--train", files / "sentences.txt", "--sentences", 60, "--batch-size", 2)
    found = rows(call_main(benchmark, "--only", "train", *options))
    defaults, without, equal, grouped = found.values()
    assert ours == [(0.0, False), (0.1, False), (0.0, True)]
    assert theirs == [0.0, 0.1]
    assert defaults[:2] == [without[0], equal[1]]
    assert grouped[1] == without[1]


def test_the_factors_of_dse(models_folder, monkeypatch):
    monkeypatch.setattr(benchmark, "DSE_SENTENCES", 50)
    monkeypatch.setattr(benchmark, "CATALOGUE_COPIES", 3)
    monkeypatch.setattr(benchmark, "seconds", lambda work, *inputs: (5.0, work(*inputs)))
    table_3, table_4 = benchmark.measure_dse(models_folder / "bert", "0,1").values()
    expected = {"psi, s": 5, "f, s": 5, "pairs": 2500, "cross-encoder, s": 250, "factor": 25}
    assert table_3 == expected | {"paper": 934}  # 50 pairs took the cross-encoder 5 s
    expected |= {"pairs": 150, "cross-encoder, s": 15, "factor": 1.5}
    assert table_4 == expected | {"paper": 13594}


@pytest.mark.slow
def test_everything_that_is_measured_on_a_gpu_runs_on_a_cpu(call_main, monkeypatch):
    monkeypatch.setattr(common, "LOG_STEPS", 2)
    monkeypatch.setattr(benchmark, "LOG_STEPS", 2)
    monkeypatch.setattr(benchmark, "STEPS", 8)
    found = rows(call_main(benchmark, "--only", "gpu", "--tiny"))
    training = [
        f"tiny, {script}.py, batch {batch_size}, {precision}"
        for script, precisions in dict(ckd="fp32 bf16", distilface="fp32 bf16 fp16").items()
        for precision in precisions.split()
        for batch_size in (4, 8)
    ]
    speeds = ["tiny, encoding, fp32", "tiny, encoding, bf16", *training]
    assert list(found) == ["bf16 matrix product", *speeds, "GPU against CPU"]
    for name in speeds:
        assert 0 < found[name][1] < 100  # % of the peak
    _, difference = found["GPU against CPU"]
    assert difference < 1000 if torch.cuda.is_available() else difference == 0


def test_operations_of_minilm_by_hand():
    """Queries, keys, values and output; two layers of four times the width; two normalizations."""
    width, tokens = 384, 1 + 3 + 1  # [CLS], words, [SEP]
    layer = 4 * (width + 1) * width + (width + 1) * 4 * width + (4 * width + 1) * width
    layer += 2 * 2 * width
    found = benchmark.operations_per_sentence(benchmark.SHAPES["MiniLM-L6"], ["one two three"])
    assert found == 2 * 6 * layer * tokens


def test_a_generated_word_is_one_token(teacher):
    sentences = benchmark.generated_sentences(50)
    lengths = common.Tokens(teacher, sentences).lengths
    assert lengths.tolist() == [len(text.split()) + 2 for text in sentences]


def test_without_a_gpu_one_line_says_so(monkeypatch):
    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    with pytest.raises(common.UserError, match="torch finds no GPU; --tiny tries it on the CPU"):
        benchmark.measure_gpu(SimpleNamespace(tiny=False), None)
