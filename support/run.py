"""A training run: its output folder, and the bookkeeping of its loop.

The loop itself stands in the script: learning rate, forward, loss, backward, step, enqueue. Here is
what surrounds it: order of batches, resuming, timing, log, dev score, best student, checkpoint,
early stopping, a loss that is not a number, the model card. And what several processes need
(support/distributed.py), so that a loop is written as if there were one.
"""

import copy
import functools
import hashlib
import itertools
import json
import math
import os
import resource
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from huggingface_hub import EvalResult, ModelCardData

from common import (
    DataError,
    WriteError,
    batches,
    check_target,
    progress,
    table,
    write_whole,
    writing,
)
from support import distributed
from support.encoder import public_name, read_json
from support.process import Interrupted, check_lock, deferred_signals, lock_folder
from support.records import read_checkpoint, write_checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOG_STEPS = 25  # steps between two lines of metrics.jsonl
WHAT_TO_TRY = (
    "Try another --lr, more --epochs or sentences, and, where the teacher is of another dimension "
    "than the student, --align or a contrastive loss (ckd.py)."
)
SEED_STRIDE = 1_000_003  # between the random states of one seed's steps and the next seed's
# Between those of one process and the next. A CPU's generator takes 32 bits of a seed, in which the
# multiples of this number, 2**32 divided by the golden ratio, lie far apart.
PROCESS_STRIDE = 2_654_435_769
# Arguments that may change on --resume.
NOT_COMPARED = ("resume", "overwrite", "device", "output", "cache_dir", "cache_limit")
FILES_OF_A_RUN = (
    "checkpoint/state.safetensors",
    "metrics.jsonl",
    "model.safetensors",
    "modules.json",
    "README.md",
    "onnx/model_int8.onnx",
)


def set_learning_rate(optimizer, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr


def fingerprint(lengths):
    """What stands for the training data in a checkpoint: a hash of the lengths, [n] in tokens."""
    return hashlib.sha256(np.array(lengths, np.int64).tobytes()).hexdigest()


class Step:
    """One step of a stage: what the script needs to know of it, and what it says of it.

    With several processes, each encodes its own rows of the batch, and gather() puts the embeddings
    together. What follows is of the whole batch, and the same on every process: targets, queue,
    loss. It must not draw random numbers, since those of each process are its own.
    """

    def __init__(self, number, total, epoch_steps, rows):
        self.number = number  # from 1 to total
        self.total = total
        self.epoch_steps = epoch_steps
        self.rows = rows  # numbers of the batch's rows, [N]
        self.sizes = distributed.split(len(rows))  # the n of each process, N together
        self.own = distributed.own_part(self.sizes)  # the slice of the batch, for lists of N
        self.own_rows = rows[self.own]  # of these this process computes embeddings, [n]
        self.starts_epoch = (number - 1) % epoch_steps == 0
        self.values = {}

    def gather(self, *own):
        """One or several tensors [n, ...] of the own rows -> the same of the batch, [N, ...].

        A tensor may also be [n K, ...], with K rows in succession for each own row.
        """
        gathered = []
        for tensor in own:
            times = len(tensor) // len(self.own_rows)  # K
            gathered.append(distributed.gather(tensor, [times * size for size in self.sizes]))
        return gathered if len(gathered) > 1 else gathered[0]

    def log(self, **values):
        """loss=..., and its terms: scalar tensors or numbers."""
        self.values = values


def says_what_is_whole(method):
    """For the methods of Run that write: an error says what is still whole, and how to go on."""

    @functools.wraps(method)
    def call(run, *arguments, **options):
        try:
            with writing(run.folder):
                return method(run, *arguments, **options)
        except WriteError as error:
            raise DataError(f"{error.problem}; {run.whole()}") from None

    return call


class Run:
    """The output folder of a training run, the only place that writes into it, and its loop.

    Run(args) only looks, and raises DataError if the folder may not be written. start() writes:
    call it when all input has been read and `args` has its final values. Of several processes the
    main one writes, and all of them read: on several hosts, the folder is one that they share.
    `state`, which a checkpoint stores as JSON:
        stage, step         where training stands
        data                the fingerprint of the stage's training data
        best, best_step     the best dev score of the stage and its step
        finished            the stages that are over
        scores              {model: {set: score}}, the table at the end
        scaler              of the gradients, in fp16
        metrics_bytes       the length of metrics.jsonl
        heads               how many dense heads a student has behind stage 1 (ibkd.py)
        meter               what the steps since its last line have logged
    """

    def __init__(self, args, unit="sentences"):
        self.args = args
        self.unit = unit  # of the speed in the log
        self.folder = Path(args.output)
        self.file = self.folder / "checkpoint" / "state.safetensors"
        self.device = torch.device(args.device)
        self.dtype = DTYPES[args.precision]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=args.precision == "fp16")
        self.state = {}
        self.stored = {}  # the state of the checkpoint that is on the disk
        distributed.from_main(self.check_folder)

    def check_folder(self):
        """Raises DataError if the folder may not be written."""
        check_lock(self.folder)
        if self.args.resume and self.args.overwrite:
            raise DataError("--resume and --overwrite: expected one of them")
        if self.args.overwrite:
            self.check_sources()
        if (self.folder / "args.json").exists():
            if not self.args.resume and not self.args.overwrite:
                advice = "use --resume, --overwrite or another --output"
                raise DataError(f"{self.folder}: already contains a run; {advice}")
        elif self.folder.is_file() or any(self.folder.glob("[!.]*")):
            problem = "is not empty and contains no run"
            raise DataError(f"{self.folder}: {problem}, expected a new folder for --output")
        check_target(self.folder / ".new")

    def check_sources(self):
        """Raises DataError if --overwrite would delete a model that the run starts from."""
        given = vars(self.args)
        sources = [given.get("student"), given.get("teacher"), *given.get("other_teachers", [])]
        for name in filter(None, sources):
            is_model = (self.folder / "config.json").exists()
            if is_model and Path(name).resolve() == self.folder.resolve():
                raise DataError(f"--overwrite: it would delete {name}, expected another --output")

    @says_what_is_whole
    def start(self):
        """Begin the run, or continue it from its last checkpoint.

        Raises DataError if the run to continue had other arguments.
        """
        arguments = {
            key: value for key, value in vars(self.args).items() if key not in NOT_COMPARED
        }
        before = distributed.from_main(read_json, self.folder / "args.json")
        goes_on = before is not None and self.args.resume
        if goes_on:
            self.check_arguments(arguments, before)
        distributed.from_main(self.claim, before)
        if not goes_on:
            distributed.from_main(self.clear_folder, arguments)
        self.state = distributed.from_main(self.read_state)
        self.check_student()
        self.stored = copy.deepcopy(self.state)
        if distributed.is_main():
            self.metrics = open(self.folder / "metrics.jsonl", "ab", buffering=0)  # noqa: SIM115
            self.cut_metrics(self.state["metrics_bytes"])  # the rest is written again
        if not (self.folder / "args.json").exists():
            raise DataError(f"{self.folder}: expected a folder that all hosts share, for --output")
        distributed.wait_for_all()  # until everybody has read all input

    def claim(self, before):
        """Hold the lock of the folder, whose args.json has been read. Raises DataError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = lock_folder(self.folder)
        if read_json(self.folder / "args.json") != before:
            raise DataError(f"{self.folder}: another run has begun in it meanwhile; start again")

    def clear_folder(self, arguments):
        """Delete an old run, and write the new one's arguments."""
        # In this order: after a crash the folder still contains the old run, or none.
        for name in FILES_OF_A_RUN:
            (self.folder / name).unlink(missing_ok=True)
        self.write("args.json", json.dumps(arguments, indent=2))

    def read_state(self):
        """The state of the last checkpoint, or that of a new run."""
        self.file.parent.mkdir(exist_ok=True)
        for path in self.file.parent.iterdir():
            if path != self.file and path.is_file():
                path.unlink()  # a checkpoint that a kill has cut short
        if self.file.exists():
            _, state = read_checkpoint(self.file)
            return state
        return dict(stage="", finished=[], scores={}, metrics_bytes=0)

    def check_student(self):
        """Raises DataError if a stage is over, and the student that it left is gone."""
        is_over = set(self.state["finished"]) - {"teacher"}
        if is_over and not (self.folder / "model.safetensors").exists():
            problem = "its run is over, and model.safetensors is gone"
            raise DataError(f"{self.folder}: {problem}; --overwrite begins again")

    def cut_metrics(self, size):
        """Cut metrics.jsonl where the checkpoint was written. Raises DataError if it is shorter."""
        found = self.metrics.seek(0, os.SEEK_END)
        if found < size:
            expected = f"{size} or more, which the checkpoint beside it has seen"
            raise DataError(f"{self.folder / 'metrics.jsonl'}: {found} bytes, expected {expected}")
        self.metrics.truncate(size)

    def check_arguments(self, arguments, before):
        for key, value in arguments.items():
            if before.get(key) != value:
                option = f"--{key.replace('_', '-')}"
                problem = f"the run to resume in {self.folder} has {str(before.get(key))[:200]}"
                raise DataError(f"{option} {value}: {problem}")

    @property
    def scores(self):
        return self.state["scores"]

    def is_new(self):
        """Has no stage begun yet?"""
        return not self.state["stage"]

    def finished(self, stage):
        return stage in self.state["finished"]

    def finish(self, stage, scores=None):
        """A stage is over; scores: {row of the table at the end: {set: score}}."""
        if self.state["best_step"] == 0:
            self.report_no_gain(stage)
        self.state["finished"].append(stage)
        self.scores.update(scores or {})
        self.checkpoint()

    def report_no_gain(self, stage):
        """Say that the student is still the one that the stage began with, and what to try."""
        distributed.note(
            f"{self.folder}: stage {stage} never beat the dev score of its start, "
            f"{self.state['best']:.2f}; the student is unchanged. {WHAT_TO_TRY}"
        )

    # ---- the loop

    def steps(
        self,
        stage,
        lengths,
        modules,
        optimizer,
        dev_score,
        save,
        *,
        epochs,
        batch_size,
        patience=0,
        drop_last=False,
    ):
        """Yield every Step of a stage, from where the last checkpoint stands.

        lengths [n]: tokens of each row. modules: what is trained, and what is saved with it, such
        as a queue. dev_score() scores the student and save() writes it: at the start of the stage,
        and whenever it is the best so far. epochs: None for as many as --max-steps takes. patience:
        epochs without a better dev score that end the stage, 0 for never. drop_last: leave out the
        batch of an epoch that is not full. Raises DataError if the loss is not a finite number.
        """
        order = Order(lengths, batch_size, self.args.seed, not self.args.shuffle, drop_last)
        epoch_steps = order.epoch_steps()
        if epoch_steps == 0:
            raise DataError(f"{len(lengths)} rows do not fill a batch of {batch_size}")
        total = self.count_steps(epochs, epoch_steps)
        eval_steps = self.args.eval_steps or epoch_steps
        longest_idle = patience * epoch_steps or math.inf
        self.begin_stage(stage, fingerprint(lengths), modules, optimizer, dev_score, save)
        done = self.state["step"]
        meter = Meter(self.state["meter"])
        bar = progress(total=total, initial=done, desc=stage, unit="step")
        with bar, deferred_signals() as requests:
            for number, rows in order.batches_after(done):
                if number > total or number - self.state["best_step"] > longest_idle:
                    return
                # Dropout depends on seed and step alone: a resumed run is the same run. Several
                # processes draw different masks, for different rows.
                state = self.args.seed * SEED_STRIDE + number
                torch.manual_seed(state + distributed.rank() * PROCESS_STRIDE)
                step = Step(number, total, epoch_steps, rows)
                clock = time.perf_counter()
                yield step
                meter.add(step, clock)
                self.check_finite("loss", meter.loss, step)
                entry = meter.entry(self.unit, optimizer)
                if number % eval_steps == 0 or number == total:
                    entry["dev"] = self.evaluate(step, dev_score, save)
                if "dev" in entry or number % LOG_STEPS == 0:
                    self.log(stage=stage, step=number, **entry)
                    meter.clear()
                end = distributed.largest(requests.signal)
                if "dev" in entry or end:
                    self.state.update(step=number, meter=list(meter.values))
                    self.checkpoint(modules, optimizer)
                if end:
                    distributed.wait_for_all()  # for the checkpoint
                    raise Interrupted(end, self.where())
                bar.set_postfix_str(meter.describe(entry, self.unit, self.state["best"]), False)
                bar.update()

    def count_steps(self, epochs, epoch_steps):
        """How many steps a stage takes."""
        if epochs is None:
            return self.args.max_steps
        return min(epochs * epoch_steps, self.args.max_steps or math.inf)

    def begin_stage(self, stage, data, modules, optimizer, dev_score, save):
        """Restore the last checkpoint if it is of this stage; else score and save the student.

        data: the fingerprint() of the training data. Raises DataError if the stage began with
        others, or if the student's score is no number.
        """
        if self.state["stage"] == stage:
            if self.state.setdefault("data", data) != data:
                problem = f"stage {stage} began with other training data than those given now"
                raise DataError(f"{self.folder}: {problem}; --overwrite begins again")
            self.restore(modules, optimizer)
            self.state.setdefault("meter", [])
            return
        distributed.copy_from_main([value.detach() for _, value in named_tensors(modules)])
        best = distributed.share(dev_score())
        if not math.isfinite(best):
            raise DataError(f"the dev score at the start of stage {stage} is {best}; stopped")
        self.save(save)  # before the checkpoint, which says that it is there
        self.state.update(stage=stage, data=data, step=0, best=best, best_step=0, meter=[])
        self.log(stage=stage, step=0, dev=best)
        self.checkpoint(modules, optimizer)

    def evaluate(self, step, dev_score, save):
        """Score the student, and save it if it is the best of the stage -> its dev score."""
        score = distributed.share(dev_score())
        self.check_finite("dev score", score, step)
        if score > self.state["best"]:
            self.save(save)
            self.state.update(best=score, best_step=step.number)
        return score

    def check_finite(self, name, value, step):
        if not math.isfinite(value):
            state = self.state
            raise DataError(
                f"step {step.number} of stage {state['stage']}: the {name} is {value}; stopped. "
                f"{self.folder} keeps its best student (dev {state['best']:.2f}) and the "
                f"checkpoint of step {state['step']}"
            )

    def autocast(self):
        """The context of a forward pass in --precision."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def backward(self, loss, optimizer):
        """Fresh gradients of the loss, in their own scale, the same on every process."""
        optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        parameters = [value for group in optimizer.param_groups for value in group["params"]]
        distributed.average([value.grad for value in parameters if value.grad is not None])
        self.scaler.unscale_(optimizer)

    def step(self, optimizer):
        """Update the parameters, unless fp16 has overflowed."""
        self.scaler.step(optimizer)
        self.scaler.update()

    # ---- files

    def whole(self):
        """What an error while writing says at its end."""
        if "best" not in self.stored:
            return f"{self.folder} has no student yet; --resume begins again once there is room"
        best, step, stage = (self.stored[key] for key in ("best", "step", "stage"))
        return (
            f"{self.folder} keeps its best student (dev {best:.2f}) and the checkpoint of step "
            f"{step} of stage {stage}; --resume continues once there is room"
        )

    def where(self):
        """What a run says that a signal ends."""
        step = f"step {self.state['step']} of stage {self.state['stage']}"
        advice = "the same command with --resume continues"
        return f"interrupted; {self.folder} has the checkpoint of {step}; {advice}"

    @says_what_is_whole
    def log(self, **values):
        """Append a line to metrics.jsonl. After an error, nothing of it is there."""
        if not distributed.is_main():
            return
        line = json.dumps(values).encode() + b"\n"
        end = self.metrics.seek(0, os.SEEK_END)
        with writing(self.folder / "metrics.jsonl"):
            try:
                written = 0
                while written < len(line):  # a disk that is nearly full takes a part
                    written += self.metrics.write(line[written:])
            except OSError:
                self.metrics.truncate(end)
                raise

    @says_what_is_whole
    def write(self, name, text):
        """Write a file of the folder."""
        if distributed.is_main():
            write_whole(self.folder / name, text)

    @says_what_is_whole
    def save(self, save):
        """Call save(), which writes the best student."""
        distributed.from_main(save)

    @says_what_is_whole
    def checkpoint(self, modules=(), optimizer=None):
        """Save the state, the modules' parameters and buffers, and the optimizer's moments.

        One safetensors file, which is replaced as a whole.
        """
        if not distributed.is_main():
            return
        tensors = {name: value.detach() for name, value in named_tensors(modules)}
        moments = optimizer.state_dict()["state"] if optimizer else {}
        for parameter, values in moments.items():
            for name, value in values.items():
                tensors[f"optimizer.{parameter}.{name}"] = value
        self.state["scaler"] = self.scaler.state_dict()
        os.fsync(self.metrics)  # the checkpoint says how long it is
        self.state["metrics_bytes"] = self.metrics.seek(0, os.SEEK_END)
        write_checkpoint(self.file, tensors, self.state)
        self.stored = copy.deepcopy(self.state)

    @torch.no_grad()
    def restore(self, modules, optimizer):
        """Load the tensors of the last checkpoint into where checkpoint() took them from."""
        tensors, _ = read_checkpoint(self.file)
        for name, value in named_tensors(modules):
            if name not in tensors or tensors[name].shape != value.shape:
                problem = f"no {name} of shape {list(value.shape)}"
                expected = "the models that the run began with"
                raise DataError(f"{self.file}: {problem}, expected {expected}")
            value.copy_(tensors[name])
        moments = {}
        for key, value in tensors.items():
            kind, parameter, *name = key.split(".")
            if kind == "optimizer":
                moments.setdefault(int(parameter), {})[name[0]] = value
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.scaler.load_state_dict(self.state["scaler"])

    def write_card(
        self,
        text,
        student,
        teachers=(),
        task="sts",
        metric="spearman_cosine",
        library="sentence-transformers",
    ):
        """Write README.md, a model card with the Hub's model-index; the last row of the scores is
        the student's. metric: None if the columns name their own."""
        student = public_name(student)
        name = self.folder.name
        *_, own = self.scores.values()
        results = []
        for data_set, score in own.items():
            result = EvalResult(
                task_type=task,
                dataset_type=data_set.lower().replace(" ", "-"),
                dataset_name=data_set,
                metric_type=metric or data_set.split()[-1].lower(),
                metric_value=round(score, 2),
            )
            results.append(result)
        data = ModelCardData(
            language="en",
            library_name=library,
            pipeline_tag="sentence-similarity",
            base_model=student,
            tags=[library, "knowledge-distillation"],
            model_name=name,
            eval_results=results,
        )
        names = ", ".join(map(public_name, teachers)) or "none"
        noun = "Teachers" if len(teachers) > 1 else "Teacher"
        origin = f"{noun}: {names}. Student initialized from: {student}."
        what = "Spearman x 100 of cosine similarity:\n\n" if metric else ""
        self.write(
            "README.md",
            f"---\n{data.to_yaml()}\n---\n\n# {name}\n\n{text} {origin} Arguments: `args.json`.\n\n"
            f"{what}{table(self.scores)}\n",
        )


class Order(NamedTuple):
    """The order of a stage's batches, which depends on the seed alone."""

    lengths: np.ndarray  # tokens of each row
    batch_size: int
    seed: int
    by_length: bool
    drop_last: bool  # leave out the batch of an epoch that is not full

    def epoch_steps(self):
        """How many batches an epoch has."""
        if self.drop_last:
            return len(self.lengths) // self.batch_size
        return math.ceil(len(self.lengths) / self.batch_size)

    def batches_after(self, done):
        """Yield (step, row numbers) without end, from the step after `done`."""
        first_epoch = done // self.epoch_steps()
        number = first_epoch * self.epoch_steps()
        for epoch in itertools.count(first_epoch):
            seed = [self.seed, epoch]
            for rows in batches(self.lengths, self.batch_size, seed, self.by_length):
                if self.drop_last and len(rows) < self.batch_size:
                    continue
                number += 1
                if number > done:
                    yield number, rows


def named_tensors(modules):
    """Yield (name, parameter or buffer) of each module, shared ones once."""
    for position, module in enumerate(modules):
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            yield f"module{position}.{name}", value


def peak_memory_mb():
    """The most memory that this process has held so far: of the GPU, or of the machine."""
    if torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 2**20)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(kilobytes / 2**10)


class Meter:
    """Means since the last line of the log, and the speed since the stage began or went on.

    values: what the steps since that line have logged, where a run goes on.
    """

    def __init__(self, values=()):
        self.rows = 0
        self.seconds = 0.0
        self.values = list(values)

    def clear(self):
        self.values = []

    def add(self, step, clock):
        """What a Step has logged; `clock`, the time when it began."""
        # float() waits for the device, so that the time is that of the whole step.
        values = {name: torch.as_tensor(value).detach() for name, value in step.values.items()}
        self.values.append({name: float(value) for name, value in values.items()})
        self.loss = self.values[-1]["loss"]
        self.rows += len(step.rows)
        self.seconds += time.perf_counter() - clock

    def entry(self, unit, optimizer):
        """The numbers of a line of the log."""
        means = {}
        for name in self.values[-1]:
            means[name] = sum(values[name] for values in self.values) / len(self.values)
        return {
            **means,
            "lr": optimizer.param_groups[0]["lr"],
            f"{unit}_per_second": round(self.rows / self.seconds, 1),
            "peak_memory_mb": peak_memory_mb(),
        }

    def describe(self, entry, unit, best):
        """The same for the progress bar."""
        speed = entry[f"{unit}_per_second"]
        loss, lr = entry["loss"], entry["lr"]
        return f"loss {loss:.4f}, lr {lr:.1e}, {speed:.0f} {unit}/s, best dev {best:.2f}"
