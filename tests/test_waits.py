"""A training step does not wait for the device: what would is counted on a CPU."""

import importlib
from collections import defaultdict

import pytest
import transformers
from processes import SCRIPTS, small_options
from torch.utils._python_dispatch import TorchDispatchMode

import common

# item(), bool() and float() of a tensor; shapes that depend on values; copies between devices
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "copy_to_host")


class Waits(TorchDispatchMode):
    """Counts, for each stage and step, the operations that would wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.counts = defaultdict(list)
        self.place = None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in WAITS:
            self.counts[self.place].append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_step_waits_for_the_device(
    script, models_folder, files, tmp_path, call_main, monkeypatch
):
    """Between two steps that are logged. Transformers' own look at the mask, which no script can
    turn off, is left out."""
    monkeypatch.setattr(
        transformers.masking_utils, "_ignore_bidirectional_mask_sdpa", lambda *_, **__: False
    )
    log = common.Run.log
    waits = Waits()
    steps = []

    def logged(run, step, *sentences, **values):
        log(run, step, *sentences, **values)
        if "dev" not in values:
            waits.place = run.stage, step  # what comes next belongs to the step after this
            steps.append(waits.place)

    monkeypatch.setattr(common.Run, "log", logged)
    words = small_options(script, models_folder, files, tmp_path / "out")
    with waits:
        call_main(importlib.import_module(script), *words, "--eval-steps", 1000, "--max-steps", 5)
    stages = {stage for stage, _ in steps}
    assert len(stages) == (2 if script in ("ckd", "ibkd", "dse") else 1)
    assert any(waits.counts.values())  # scoring does wait: the count works
    for stage in stages:
        assert [waits.counts[stage, step] for step in range(1, 5)] == [[]] * 4
