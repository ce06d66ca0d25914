"""extras/benchmark.py: the table of a small training, padding by loops, the GPU's part on a CPU."""

import json

import numpy as np
import pytest
import torch
import transformers

import common
from extras import benchmark, gpu

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
    grouping = LENGTHS if order == "grouped" else None
    batches = common.Batches(len(LENGTHS), 64, 0, grouping)
    whole = share([batches[step] for step in range(16)])
    our = benchmark.padding(LENGTHS, benchmark.our_passes(LENGTHS, order, 64, width=384))
    their = benchmark.padding(LENGTHS, benchmark.their_passes(LENGTHS, order, 64))
    if order == "random":
        assert their == pytest.approx(whole, abs=1)
    else:  # sorted within fewer rows than ours
        random = share(benchmark.their_passes(LENGTHS, "random", 64))
        assert whole < their < random - 10
    parts = []
    for step in range(16):
        rows = batches[step]
        parts += [rows[part] for part in common.similar_lengths(LENGTHS[rows], "cpu", 384)]
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
def test_what_is_measured_on_a_gpu_runs_on_a_cpu(call_main, tmp_path):
    options = ("--only", "gpu", "--tiny", "--sentences", 64, "--batch-sizes", 8)
    printed = call_main(benchmark, *options, "--json", tmp_path / "gpu.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").open()]
    settings = [(line["work"], line["way"]) for line in lines if line["part"] == "gpu"]
    assert settings == [(work, way) for work in gpu.STEPS for way in gpu.WAYS]
    assert [line["way"] for line in lines if line["part"] == "fp16"] == ["fp32", "bf16", "fp16"]
    (ahead,) = [line for line in lines if line["part"] == "tokenization"]
    assert min(ahead["sentences/s, in the step"], ahead["sentences/s, ahead"]) > 0
    assert 0 < ahead["tokenizing, %"] < 100
    (theirs,) = [line for line in lines if line["part"] == "theirs"]
    assert theirs["sentences/s, as it comes"] > 0
    (cost,) = [line for line in lines if line["part"] == "launches"]
    assert cost["launches"] > 100
    for line in lines:
        assert line.get("sentences/s", 1) > 0 and line["machine"] in printed


def test_floating_point_operations_by_hand():
    """Two layers of width 4, feed-forward 8: 2 (4 x 16 + 2 x 32) weights; 3 and 5 tokens."""
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=4, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8
    )
    weights = 2 * (4 * 16 + 2 * 32)
    expected = 2 * weights * (3 + 5) + 2 * 2 * 2 * 4 * (3**2 + 5**2)
    model = transformers.BertModel(config)
    assert gpu.forward_flops(model, np.array([3, 5])) == expected


def test_launches_leave_out_views():
    with gpu.Launches() as counted:
        a = torch.ones(2, 3)
        (a.T @ a).sum()
    assert counted.launches() == 3  # ones, mm, sum


@pytest.mark.parametrize("pass_work, parts", [(0, 3), (30 * 10**2, 2), (10**9, 1)])
def test_on_a_gpu_a_part_ends_where_it_is_worth_a_pass(monkeypatch, pass_work, parts):
    """Texts of 30, 10 and 3 tokens at width 10: the first part has 30 tokens, the second 10."""
    monkeypatch.setattr(common, "PASS_WORK", pass_work)
    assert len(common.similar_lengths(np.array([3, 30, 10]), "cuda", 10)) == parts
