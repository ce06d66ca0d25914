"""extras/benchmark.py: each part with small models; of the GPU part, its numbers by hand."""

import pytest
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


@pytest.mark.slow
def test_everything_that_is_measured_on_a_gpu_runs_on_a_cpu(call_main, monkeypatch):
    monkeypatch.setattr(common, "LOG_STEPS", 2)
    monkeypatch.setattr(benchmark, "LOG_STEPS", 2)
    monkeypatch.setattr(benchmark, "STEPS", 8)
    first, *speeds, last = rows(call_main(benchmark, "--only", "gpu", "--tiny")).items()
    assert (first[0], len(speeds), last[0]) == ("bf16 matrix product", 12, "GPU against CPU")
    assert all(0 < numbers[1] < 100 for _, numbers in speeds)  # % of the peak
    assert last[1][1] < 1000 if torch.cuda.is_available() else last[1][1] == 0
