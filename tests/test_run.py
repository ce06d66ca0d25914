"""support/run.py: the output folder, and the bookkeeping of a loop around a small model."""

import errno
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import common
from common import DataError
from support import process
from support.process import Interrupted
from support.run import LOG_STEPS, Order, Run, set_learning_rate

ROOT = Path(__file__).resolve().parent.parent
ROWS = 50
BATCH_SIZE = 8
EPOCH_STEPS = 7  # with a batch that is not full
LENGTHS = np.random.default_rng(0).integers(3, 20, ROWS)
INPUTS = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))


def arguments(folder, **options):
    defaults = dict(
        output=str(folder),
        resume=False,
        overwrite=False,
        device="cpu",
        precision="fp32",
        lr=0.1,
        seed=0,
        shuffle=False,
        name="x",
        max_steps=0,
        eval_steps=3,
    )
    return SimpleNamespace(**(defaults | options))


class Queue(nn.Module):
    """The last four inputs, and how many there have been."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(4, 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def enqueue(self, rows):
        self.rows = torch.cat([self.rows, rows])[-4:]
        self.count += len(rows)


class Training:
    """What a script has: a model, a queue, an optimizer, a loop; `dev` are the scores it gets."""

    def __init__(self, args, dev=None, start=0, stage="stage"):
        self.run = Run(args, unit="pairs")
        self.run.start()
        torch.manual_seed(start)
        self.model = nn.Linear(3, 1)
        self.dropout = nn.Dropout(0.5)
        self.queue = Queue()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1, fused=True)
        self.dev = itertools.chain(dev or (), itertools.repeat(0.0))
        self.stage = stage
        self.steps = []
        self.draws = []
        self.saved = []

    def dev_score(self):
        return float(next(self.dev))

    def save(self):
        self.saved.append(self.model.weight.detach().clone())

    def train(self, until=math.inf, signal_at=None, lengths=LENGTHS, **options):
        """The loop of a script, cut off after the step `until`; signal_at: (signal, step)."""
        options = dict(epochs=3, batch_size=BATCH_SIZE) | options
        steps = self.run.steps(
            self.stage,
            lengths,
            [self.model, self.queue],
            self.optimizer,
            self.dev_score,
            self.save,
            **options,
        )
        for step in steps:
            set_learning_rate(self.optimizer, 0.1 / step.number)
            batch = INPUTS[step.rows]
            error = self.model(self.dropout(batch)) - self.queue.rows.mean()
            loss = error.square().mean()
            self.run.backward(loss, self.optimizer)
            self.run.step(self.optimizer)
            self.queue.enqueue(batch)
            self.steps.append((step.number, step.starts_epoch, step.rows.tolist()))
            self.draws.append(float(torch.rand(())))
            step.log(loss=loss, count=self.queue.count)
            if signal_at and step.number == signal_at[1]:
                os.kill(os.getpid(), signal_at[0])
            if step.number == until:
                steps.close()  # as a kill does it: nothing after the yield is run
        return self

    def result(self):
        tensors = dict(self.model.state_dict()) | dict(self.queue.state_dict())
        return {name: value.tolist() for name, value in tensors.items()}


def metrics(folder):
    """The lines of metrics.jsonl without speed and memory, which are others in every run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("pairs_per_second", None)
        line.pop("peak_memory_mb", None)
    return lines


# ---- the folder


def test_a_folder_in_use_is_left_alone(tmp_path):
    Run(arguments(tmp_path / "new"))
    assert not (tmp_path / "new").exists()  # it only looked
    Run(arguments(tmp_path / "new")).start()
    expected = "already contains a run; use --resume, --overwrite or another --output"
    with pytest.raises(DataError, match=expected):
        Run(arguments(tmp_path / "new"))
    (tmp_path / "mine.txt").write_text("mine")
    for resume, overwrite in ((False, False), (True, False), (False, True)):
        with pytest.raises(DataError, match="is not empty and contains no run"):
            Run(arguments(tmp_path, resume=resume, overwrite=overwrite))
    with pytest.raises(DataError, match="is not empty and contains no run"):
        Run(arguments(tmp_path / "mine.txt"))


def test_a_run_is_resumed_with_its_own_arguments(tmp_path):
    Run(arguments(tmp_path / "a")).start()
    expected = "--lr 0.2: the run to resume in .* has 0.1"
    with pytest.raises(DataError, match=expected):
        Run(arguments(tmp_path / "a", resume=True, lr=0.2)).start()
    (tmp_path / "a").rename(tmp_path / "b")  # another folder or another device may continue it
    Run(arguments(tmp_path / "b", resume=True, device="cuda")).start()


def test_resume_of_a_folder_that_is_not_there_begins_the_run(tmp_path):
    training = Training(arguments(tmp_path / "out", resume=True))
    assert training.run.is_new()
    training.train()
    assert not training.run.is_new()


def test_overwrite_deletes_the_old_run(tmp_path):
    Training(arguments(tmp_path)).train()
    (tmp_path / "model.safetensors").write_text("the old model")
    again = Run(arguments(tmp_path, overwrite=True, lr=0.5))
    assert (tmp_path / "model.safetensors").exists()  # it only looked
    again.start()
    assert again.is_new()
    assert metrics(tmp_path) == []
    assert not (tmp_path / "model.safetensors").exists()
    assert json.loads((tmp_path / "args.json").read_text())["lr"] == 0.5


# ---- the loop


def test_every_epoch_has_every_row_once(tmp_path):
    training = Training(arguments(tmp_path)).train()
    assert [number for number, _, _ in training.steps] == list(range(1, 3 * EPOCH_STEPS + 1))
    starts = [number for number, starts, _ in training.steps if starts]
    assert starts == [1, 1 + EPOCH_STEPS, 1 + 2 * EPOCH_STEPS]
    epochs = []
    for first in range(0, 3 * EPOCH_STEPS, EPOCH_STEPS):
        steps = training.steps[first : first + EPOCH_STEPS]
        epochs.append([row for _, _, rows in steps for row in rows])
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    "max_steps, epochs, expected", [(5, 3, 5), (5, None, 5), (0, 2, 14), (99, 2, 14)]
)
def test_a_stage_ends_after_its_epochs_or_max_steps(tmp_path, max_steps, epochs, expected):
    training = Training(arguments(tmp_path, max_steps=max_steps)).train(epochs=epochs)
    assert len(training.steps) == expected
    assert metrics(tmp_path)[-1]["step"] == expected
    assert "dev" in metrics(tmp_path)[-1]


def test_a_stage_logs_step_0(tmp_path):
    training = Training(arguments(tmp_path), dev=[12.5]).train()
    assert metrics(tmp_path)[0] == {"stage": "stage", "step": 0, "dev": 12.5}
    assert len(training.saved) == 1  # the student at the start is the best so far


def test_a_line_of_the_log(tmp_path):
    training = Training(arguments(tmp_path)).train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        names = [
            "stage",
            "step",
            "loss",
            "count",
            "lr",
            "pairs_per_second",
            "peak_memory_mb",
            "dev",
        ]
        assert list(line) == names
        assert 50 < line["peak_memory_mb"] < 100_000
        assert line["lr"] == 0.1 / line["step"]
    # The terms are means over the steps since the last line.
    counts = np.cumsum([len(rows) for _, _, rows in training.steps])
    assert lines[1]["count"] == pytest.approx(counts[:3].mean())
    assert lines[2]["count"] == pytest.approx(counts[3:6].mean())


def test_a_log_between_two_dev_scores(tmp_path):
    steps = 2 * LOG_STEPS + 3
    args = arguments(tmp_path, eval_steps=1000, max_steps=steps)
    Training(args).train(epochs=None)
    assert [line["step"] for line in metrics(tmp_path)] == [0, LOG_STEPS, 2 * LOG_STEPS, steps]
    assert [("dev" in line) for line in metrics(tmp_path)] == [True, False, False, True]


@pytest.mark.parametrize("eval_steps", [0, None])
def test_no_eval_steps_mean_an_epoch(tmp_path, eval_steps):
    Training(arguments(tmp_path, eval_steps=eval_steps)).train()
    assert [line["step"] for line in metrics(tmp_path)] == [0, 7, 14, 21]


def test_the_best_student_of_a_stage_is_saved(tmp_path):
    training = Training(arguments(tmp_path), dev=[3, 2, 4, 4, 3.9, 5, 1]).train(epochs=2)
    # Steps 0, 3, 6, 9, 12, 14: better at 6 and 14, not at 9, where it is the same.
    assert training.run.state["best"] == 5
    assert training.run.state["best_step"] == 14
    assert len(training.saved) == 3


def test_patience_is_in_epochs(tmp_path):
    """The best score is at step 3; two epochs later, after step 17, the stage ends."""
    training = Training(arguments(tmp_path), dev=[1, 2]).train(epochs=10, patience=2)
    assert training.steps[-1][0] == 3 + 2 * EPOCH_STEPS
    assert training.run.state["best_step"] == 3


def test_patience_0_never_ends_a_stage(tmp_path):
    training = Training(arguments(tmp_path), dev=[9]).train(epochs=10)
    assert len(training.steps) == 10 * EPOCH_STEPS


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_stops_the_run(tmp_path, value):
    training = Training(arguments(tmp_path), dev=[7.125])
    steps = training.run.steps(
        "stage",
        LENGTHS,
        [training.model],
        training.optimizer,
        training.dev_score,
        training.save,
        epochs=1,
        batch_size=8,
    )
    with pytest.raises(DataError) as error:
        for step in steps:
            step.log(loss=value if step.number == 5 else 1.0)
    message = str(error.value)
    assert message.startswith(f"step 5 of stage stage: the loss is {value}; stopped. {tmp_path}")
    assert message.endswith("keeps its best student (dev 7.12) and the checkpoint of step 3")
    assert json.loads(json.dumps(training.run.state))["step"] == 3
    tensors = load_file(tmp_path / "checkpoint" / "state.safetensors")
    assert all(torch.isfinite(value).all() for value in tensors.values())


def test_a_dev_score_that_is_no_number_stops_the_run(tmp_path):
    training = Training(arguments(tmp_path), dev=[7.0, 8.0, math.nan])
    with pytest.raises(DataError, match="step 6 of stage stage: the dev score is nan; stopped"):
        training.train()
    assert training.run.state["best"] == 8


def test_a_dev_score_that_is_no_number_at_the_start_stops_the_run(tmp_path):
    """No score is better than NaN, so the run would never save what it trains."""
    training = Training(arguments(tmp_path), dev=[math.nan, 50.0])
    with pytest.raises(DataError, match="the dev score at the start of stage stage is nan"):
        training.train()


# ---- resuming


DEV = [1, 5, 2, 6, 3, 3, 9, 1, 1, 1, 1]  # at steps 0, 3, 6, ...


def resume(folder, start):
    """What the next process does: everything new, but for the folder."""
    training = Training(arguments(folder, resume=True), start=start)
    if not training.run.is_new():
        training.dev = iter(DEV[training.run.state["step"] // 3 + 1 :])
    else:
        training.dev = iter(DEV)
    return training


@pytest.mark.parametrize("kills", [(1,), (3,), (4,), (7, 8), (2, 11, 20), (21,)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_run_that_is_killed_ends_like_one_that_is_not(tmp_path, kills, drop_last):
    """Parameters, moments, queue, dropout, order, log: all the same, wherever it stops."""
    options = dict(epochs=4, drop_last=drop_last)
    whole = Training(arguments(tmp_path / "whole"), DEV).train(**options)
    folder = tmp_path / "killed"
    for start, kill in enumerate(kills):
        assert resume(folder, start).train(until=kill, **options).steps[-1][0] == kill
    last = resume(folder, start=99)
    done = last.run.state["step"]
    assert done == (kills[-1] - 1) // 3 * 3
    last.train(**options)
    assert last.steps == whole.steps[done:]
    assert last.result() == whole.result()
    assert metrics(folder) == metrics(tmp_path / "whole")
    assert last.run.state == whole.run.state | {"metrics_bytes": last.run.state["metrics_bytes"]}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("ends", [(1,), (3,), (4,), (7, 8), (2, 11, 20), (28,)])
def test_a_run_that_a_signal_ends_goes_on_at_the_next_step(tmp_path, number, ends):
    """Between two lines of the log, too: their means are of all steps before them."""
    options = dict(epochs=4)
    whole = Training(arguments(tmp_path / "whole"), DEV).train(**options)
    folder = tmp_path / "ended"
    done = 0
    for start, end in enumerate(ends):
        training = resume(folder, start)
        with pytest.raises(Interrupted) as error:
            training.train(signal_at=(number, end), **options)
        assert error.value.status == 128 + number
        assert f"has the checkpoint of step {end} of stage stage; the same" in str(error.value)
        assert [step for step, _, _ in training.steps] == list(range(done + 1, end + 1))
        done = end
    last = resume(folder, start=99)
    last.train(**options)
    assert last.steps == whole.steps[done:]
    assert last.result() == whole.result()
    assert metrics(folder) == metrics(tmp_path / "whole")
    assert last.run.state == whole.run.state | {"metrics_bytes": last.run.state["metrics_bytes"]}
    assert signal.getsignal(number) != signal.SIG_DFL or number == signal.SIGTERM


def test_a_second_signal_ends_a_run_at_once(tmp_path):
    training = Training(arguments(tmp_path))
    steps = training.run.steps(
        *("stage", LENGTHS, [training.model], training.optimizer),
        *(training.dev_score, training.save),
        **dict(epochs=1, batch_size=BATCH_SIZE),
    )
    next(steps)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)  # with the first one
    time.sleep(process.ONE_REQUEST)
    with pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    steps.close()
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    assert training.run.stored["step"] == 0


def test_a_line_of_the_log_is_whole_or_absent(tmp_path):
    """A disk that is nearly full takes a part of a line, and says nothing."""

    class NearlyFull:
        def __init__(self, file, room):
            self.file = file
            self.room = room

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            part = data[: self.room]
            self.room -= len(part)
            return self.file.write(part)

    run = Run(arguments(tmp_path))
    run.start()
    run.log(step=1)
    run.metrics = NearlyFull(run.metrics, room=5)
    with pytest.raises(DataError, match="metrics.jsonl: No space left on device.*has no student"):
        run.log(step=2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


# ---- other processes


def test_a_folder_belongs_to_one_process(tmp_path):
    """The lock goes with its process, however that ends."""
    code = (
        "import sys, pathlib; sys.path[0] = sys.argv[2]\n"
        "from support import process\n"
        "lock = process.lock_folder(pathlib.Path(sys.argv[1]))\n"
        "print(process.this_process(), flush=True); input()\n"
    )
    command = [sys.executable, "-c", code, tmp_path, ROOT]
    for end in ("", "kill"):
        other = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)
        name = other.stdout.readline().strip()
        assert name.startswith(f"process {other.pid} on ")
        for options in (dict(), dict(resume=True), dict(overwrite=True)):
            with pytest.raises(DataError, match=f"{name} is writing into it; wait for its end"):
                Run(arguments(tmp_path, **options))
        before = sorted(tmp_path.iterdir())
        assert [path.name for path in before] == [".lock"]
        other.kill() if end else other.communicate("\n")
        other.wait()
        assert (tmp_path / ".lock").exists() == bool(end)
    run = Run(arguments(tmp_path))
    run.start()
    assert (tmp_path / ".lock").read_text() == process.this_process()
    Run(arguments(tmp_path, resume=True)).start()  # it is ours
    del run


def test_the_queue_is_restored_and_not_replayed(tmp_path):
    """The checkpoint holds it: the loop sees only the steps that come after."""
    whole = Training(arguments(tmp_path / "whole", max_steps=9)).train()
    Training(arguments(tmp_path / "cut", max_steps=9)).train(until=8)
    again = Training(arguments(tmp_path / "cut", resume=True, max_steps=9))
    again.train()
    assert [number for number, _, _ in again.steps] == [7, 8, 9]
    enqueued = sum(len(rows) for _, _, rows in whole.steps)
    assert int(again.queue.count) == int(whole.queue.count) == enqueued
    assert torch.equal(again.queue.rows, whole.queue.rows)


def test_a_run_is_not_resumed_with_other_training_data(tmp_path):
    """The name of the file is the same, so that the arguments don't tell."""
    Training(arguments(tmp_path)).train(until=7)
    checkpoint = (tmp_path / "checkpoint" / "state.safetensors").read_bytes()
    longer, more = LENGTHS.copy(), [*LENGTHS, 5]
    longer[-1] += 1
    for lengths in (longer, more, LENGTHS[::-1]):
        training = Training(arguments(tmp_path, resume=True))
        with pytest.raises(DataError, match="stage stage began with other training data"):
            training.train(lengths=lengths)
        assert not training.steps
        assert (tmp_path / "checkpoint" / "state.safetensors").read_bytes() == checkpoint
    again = Training(arguments(tmp_path, resume=True)).train(lengths=LENGTHS.copy())
    assert again.steps[0][0] == 7


def test_the_next_stage_has_training_data_of_its_own(tmp_path):
    first = Training(arguments(tmp_path), stage="one").train(epochs=1)
    first.run.finish("one")
    (tmp_path / "model.safetensors").touch()
    Training(arguments(tmp_path, resume=True), stage="two").train(until=4, lengths=LENGTHS[:40])
    last = Training(arguments(tmp_path, resume=True), stage="two").train(lengths=LENGTHS[:40])
    assert last.steps[0][0] == 4


def test_a_stage_that_has_ended_by_patience_ends_again_when_resumed(tmp_path):
    options = dict(epochs=10, patience=1)
    Training(arguments(tmp_path), dev=[1]).train(**options)
    before = metrics(tmp_path)
    again = Training(arguments(tmp_path, resume=True)).train(**options)
    assert [number for number, _, _ in again.steps] == [7]  # the last dev score was at step 6
    assert metrics(tmp_path) == before


def test_stages_follow_each_other_and_are_not_repeated(tmp_path):
    first = Training(arguments(tmp_path), dev=[1, 9], stage="one").train(epochs=1)
    first.run.finish("one", {"after one": {"dev": 9.0}})
    with pytest.raises(DataError, match="its run is over, and model.safetensors is gone"):
        Training(arguments(tmp_path, resume=True))
    (tmp_path / "model.safetensors").touch()
    second = Training(arguments(tmp_path, resume=True), dev=[5, 4, 6], stage="two")
    assert second.run.finished("one")
    assert not second.run.finished("two")
    second.train(epochs=1)
    assert second.run.state["best"] == 6  # of this stage
    second.run.finish("two", {"after two": {"dev": 6.0}})
    last = Run(arguments(tmp_path, resume=True))
    last.start()
    assert last.finished("one")
    assert last.finished("two")
    assert last.scores == {"after one": {"dev": 9.0}, "after two": {"dev": 6.0}}
    lines = metrics(tmp_path)
    assert [line["stage"] for line in lines] == ["one"] * 4 + ["two"] * 4
    assert [line["step"] for line in lines] == [0, 3, 6, 7] * 2


def test_dropout_depends_on_seed_and_step_alone(tmp_path):
    def draws(name, seed, start):
        training = Training(arguments(tmp_path / name, seed=seed), start=start)
        return training.train(epochs=1).draws

    first = draws("a", seed=0, start=7)
    assert first == draws("b", seed=0, start=8)
    assert first != draws("c", seed=1, start=7)
    assert len(set(first)) == EPOCH_STEPS


def test_checkpoint_has_state_moments_and_the_place_in_the_metrics(tmp_path):
    def parts(seed):
        torch.manual_seed(seed)
        module = nn.Linear(3, 2)
        return module, torch.optim.Adam(module.parameters(), lr=0.1, fused=True)

    run = Run(arguments(tmp_path))
    run.start()
    module, optimizer = parts(0)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    run.log(step=1)
    run.state.update(step=1)
    run.checkpoint([module], optimizer)
    run.log(step=2)

    again = Run(arguments(tmp_path, resume=True))
    again.start()
    other, its_optimizer = parts(1)
    assert again.state["step"] == 1
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    again.restore([other], its_optimizer)
    for each, its in ((module, optimizer), (other, its_optimizer)):
        each.zero_grad()
        each(torch.ones(1, 3)).square().sum().backward()
        its.step()
    assert torch.equal(module.weight, other.weight)
    assert torch.equal(module.bias, other.bias)
    assert not (tmp_path / "checkpoint" / "state.new").exists()


# ---- the order of batches


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_continue_exactly_where_they_stopped(drop_last):
    epoch_steps = ROWS // BATCH_SIZE if drop_last else EPOCH_STEPS

    def first(count, done):
        batches = Order(LENGTHS, BATCH_SIZE, 3, True, drop_last).batches_after(done)
        return [(number, rows.tolist()) for number, rows in itertools.islice(batches, count)]

    whole = first(4 * epoch_steps, done=0)
    assert [number for number, _ in whole] == list(range(1, 4 * epoch_steps + 1))
    for done in range(3 * epoch_steps):
        assert first(5, done) == whole[done : done + 5]


def test_shuffle_draws_batches_of_any_length(tmp_path):
    """Every row once an epoch, in the same order for the same seed, and not sorted by length."""
    lengths = np.repeat(np.arange(1, 51), 8)

    def epoch(by_length, seed=3):
        batches = Order(lengths, 8, seed, by_length, False).batches_after(0)
        return [rows for _, rows in itertools.islice(batches, 50)]

    shuffled = epoch(by_length=False)
    assert sorted(np.concatenate(shuffled)) == list(range(400))
    assert all(np.array_equal(a, b) for a, b in zip(shuffled, epoch(by_length=False)))
    assert not np.array_equal(shuffled[0], epoch(by_length=False, seed=4)[0])
    spread = [lengths[rows].std() for rows in shuffled]
    assert np.mean(spread) > 10 > 1 > np.mean([lengths[rows].std() for rows in epoch(True)])


def test_drop_last_leaves_out_the_batch_that_is_not_full(tmp_path):
    training = Training(arguments(tmp_path)).train(epochs=2, drop_last=True)
    assert len(training.steps) == 2 * (ROWS // BATCH_SIZE)
    assert {len(rows) for _, _, rows in training.steps} == {BATCH_SIZE}
    assert [number for number, starts, _ in training.steps if starts] == [1, 7]
    Training(arguments(tmp_path / "all")).train(epochs=1)


def test_fewer_rows_than_a_batch_that_must_be_full_are_refused(tmp_path):
    training = Training(arguments(tmp_path))
    with pytest.raises(DataError):
        training.train(batch_size=ROWS + 1, drop_last=True)


# ---- the model card


def test_the_card_has_the_last_row_of_the_scores(tmp_path):
    from huggingface_hub import ModelCard

    run = Run(arguments(tmp_path / "out"))
    run.start()
    run.scores["student before"] = {"STS-B dev": 50.0}
    run.scores["student"] = {"STS-B dev": 80.126, "avg": 70.0}
    (tmp_path / "mine").mkdir()
    run.write_card("How it was made.", student=str(tmp_path / "mine"), teachers=["some/teacher"])
    card = ModelCard.load(tmp_path / "out" / "README.md")
    results = {result.dataset_name: result.metric_value for result in card.data.eval_results}
    assert results == {"STS-B dev": 80.13, "avg": 70.0}
    assert card.data.base_model == "mine"
    assert str(tmp_path) not in str(card)  # no path of this machine
    assert "Teacher: some/teacher. Student initialized from: mine." in str(card)
    assert common.table(run.scores) in str(card)


def test_overwrite_does_not_delete_the_model_that_it_starts_from(tmp_path):
    out = tmp_path / "out"
    Training(arguments(out), dev=[1, 9]).train(epochs=1)
    (out / "config.json").write_text("{}")
    before = sorted(path.name for path in out.rglob("*"))
    for option in (dict(student=str(out)), dict(teacher="x", other_teachers=[f"{out}/../out"])):
        with pytest.raises(DataError, match="--overwrite: it would delete .*out, expected another"):
            Run(arguments(out, overwrite=True, **option))
    assert sorted(path.name for path in out.rglob("*")) == before
    Run(arguments(out, overwrite=True, student=str(tmp_path)))
