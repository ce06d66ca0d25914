"""extras/benchmark.py: the table of a small training, padding by loops, the GPU's part on a CPU."""

import numpy as np
import pytest

import common
from extras import benchmark

LENGTHS = np.random.default_rng(0).integers(3, 30, 1000)


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """What the benchmark changes in common.py."""
    monkeypatch.setattr(common, "CACHE", common.CACHE)
    monkeypatch.setattr(common, "LOG_STEPS", common.LOG_STEPS)


def rows(printed):
    """A printed table -> {row: {column: number}}."""
    header, _, *lines = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in printed.splitlines()
        if "|" in line
    ]
    return {cells[0]: dict(zip(header[1:], map(float, cells[1:]))) for cells in lines}


def share(batches):
    """Percent of padding, token by token."""
    computed = sum(max(LENGTHS[i] for i in batch) for batch in batches for _ in batch)
    return 100 * (computed - sum(LENGTHS)) / computed


@pytest.mark.parametrize("order", benchmark.ORDERS)
def test_padding_is_that_of_the_batches(order):
    """Theirs is in whole batches, ours in parts of them; grouped batches have the least."""
    batches = common.Batches(LENGTHS, 64, 0, order == "grouped")
    whole = share([batches[step] for step in range(16)])
    our = benchmark.padding(LENGTHS, benchmark.our_passes(LENGTHS, order, 64))
    their = benchmark.padding(LENGTHS, benchmark.their_passes(LENGTHS, order, 64))
    if order == "random":
        assert their == pytest.approx(whole, abs=1)
    else:  # sorted within fewer rows than ours
        random = share(benchmark.their_passes(LENGTHS, "random", 64))
        assert whole < their < random - 10
    parts = []
    for step in range(16):
        rows = batches[step]
        parts += [rows[part] for part in common.similar_lengths(LENGTHS[rows], "cpu")]
    assert our == pytest.approx(share(parts))
    assert share(parts) <= whole


@pytest.mark.slow
def test_a_row_for_each_order_batch_size_and_precision(call_main, models_folder):
    options = ("--only", "train", "--teacher", models_folder / "mean", "--student-layers", "0,2")
    sizes = ("--sentences", 40, "--batch-sizes", 8, 16, "--rounds", 2)
    printed = rows(call_main(benchmark, *options, *sizes))
    names = ("fp32", "bf16", "bf16 against fp32")
    orders = benchmark.ORDERS
    assert list(printed) == [f"{a}, {b}, {c}" for a in orders for b in (8, 16) for c in names]
    for row in printed.values():
        assert 0 < row["smallest"] <= row["ratio"] <= row["largest"]
        by_padding = (100 - row["padding"]) / (100 - row["their padding"])
        assert row["by padding"] == pytest.approx(by_padding, abs=0.01)
        assert row["tokens/s"] / row["ours"] > 3  # tokens of a sentence


@pytest.mark.slow
def test_what_is_measured_on_a_gpu_runs_on_a_cpu(call_main, monkeypatch):
    monkeypatch.setattr(benchmark, "STEPS", 4)
    options = ("--only", "gpu", "--tiny", "--sentences", 64, "--batch-sizes", 8)
    printed = rows(call_main(benchmark, *options))
    scripts = ("ckd.py", "distilface.py")
    assert list(printed) == [f"{a}, 8, {b}" for a in scripts for b in benchmark.PRECISIONS]
    assert all(row["sentences/s"] > 0 for row in printed.values())
