# SPDX-License-Identifier: MIT
"""ConGen: KornWtp/ConGen's main.py, with its own copy of sentence-transformers, and congen.py.

The set-up, which both runs share: two layers of all-MiniLM-L6-v2 teach one of its layers, a third
as wide, on two columns of demo/triplets.csv, where 30 sentences stand twice. Rows are drawn in our
order, the dense layer starts with our weights, and nothing is dropped out. Without a GPU, the
authors' fp16 is off.
"""

import csv
import os
import runpy
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from torch import nn

from extras.authors.harness import REAL, WIDTH, Program, demo_lines, our_order, renamed, run_ours
from extras.authors.harness import size, write_encoder, write_lines, write_small_encoder

REPOSITORY = "KornWtp/ConGen"
COMMIT = "82ffe36419f583e23997d86397e45e131db23b96"
LIBRARIES = (
    "torch==2.13.0 numpy==1.26.4 transformers==4.28.1 huggingface-hub==0.25.2 "
    "scipy scikit-learn nltk sentencepiece pillow safetensors"
)
ALONE = "sentence-transformers==2.2.2"  # its dependencies would bring another torch

PAIRS = size(614, 20_000)
REPEATED = 30  # of these, at the end, the first sentence is that of a pair at the start
EPOCHS = size(3, 1)
BATCH_SIZE = size(32, 64)
LEARNING_RATE = size(2e-3, 5e-4)
QUEUE_SIZE = size(120, 4096)  # in demo/, 134 pairs enter it: 14 more by their text
TEACHER_TEMPERATURE = 0.05
STUDENT_TEMPERATURE = 0.07
QUEUE_SEED = 16349  # a constant of the authors' program, which draws the queue's sentences with it


def prepare(work):
    """Write teacher, student, the start of the dense layer, pairs of sentences and the dev set."""
    torch.manual_seed(0)  # as congen.distill() seeds the dense layer, with --seed 0
    torch.save(nn.Linear(WIDTH, 384).state_dict(), work / "dense.pt")
    if REAL:
        rows = [line.split("\t")[:2] for line in demo_lines("pairs.tsv", PAIRS)]
    else:
        rows = [row[:2] for row in csv.reader(demo_lines("triplets.csv"))][1 : 1 + PAIRS]
    for at in range(REPEATED):
        rows[at - REPEATED][0] = rows[at][0]
    for row in rows[:: size(20, len(rows))]:
        row[0] = " ".join(12 * [row[0]])  # more than 128 tokens
    pairs = ["\t".join(row) for row in rows]
    while sum(~split(pairs)[1]) % BATCH_SIZE:  # theirs leaves out a smaller last batch
        pairs.pop(len(pairs) // 2)
    write_encoder(work / "teacher", "2,5")
    write_small_encoder(work / "student", "1", pairs + demo_lines("dev.tsv"))
    write_lines(work / "pairs.tsv", pairs)
    dev = demo_lines("dev.tsv", size(100, None))
    write_lines(work / "dev.tsv", dev)
    # The columns of STS-B: split, genre, file, year, number, score, two sentences.
    columns = partial(str.split, sep="\t")
    rows = [
        ["dev", "", "", "", "", score, first, second] for first, second, score in map(columns, dev)
    ]
    write_lines(work / "stsb.tsv", map("\t".join, rows))


def split(pairs):
    """Lines of two sentences -> which of them the authors' program draws for the queue, and which
    enter it, by their text: two arrays of booleans."""
    first = np.array([pair.split("\t")[0] for pair in pairs])
    drawn = np.random.RandomState(QUEUE_SEED).permutation(len(pairs))[:QUEUE_SIZE]
    return np.isin(np.arange(len(pairs)), drawn), np.isin(first, first[drawn])


def theirs(checkout, work):
    """Run main.py with its command line. It needs no change; the patches are the set-up."""
    import sentence_transformers.models

    # A constant for downloads, which today's huggingface-hub has elsewhere.
    hub = SimpleNamespace(REPO_ID_SEPARATOR="--")
    sys.modules["huggingface_hub.snapshot_download"] = hub
    sys.path.insert(0, str(checkout))
    from sentence_transformers_congen.losses.ConGenLoss import ConGenLoss

    losses = []
    forward = ConGenLoss.forward

    def keep_loss(model, *features):
        loss = forward(model, *features)
        losses.append(float(loss))
        return loss

    start = torch.load(work / "dense.pt", weights_only=True)
    dense = partial(
        sentence_transformers.models.Dense, init_weight=start["weight"], init_bias=start["bias"]
    )
    words = f"""main.py --model_save_path theirs --train_data_path pairs.tsv
        --dev_data_path stsb.tsv --teacher_model_name_or_path teacher
        --student_model_name_or_path student --train_batch_size {BATCH_SIZE} --num_epochs {EPOCHS}
        --learning_rate {LEARNING_RATE} --student_temp {STUDENT_TEMPERATURE}
        --teacher_temp {TEACHER_TEMPERATURE} --queue_size {QUEUE_SIZE}"""
    (work / "data").mkdir(exist_ok=True)  # for the teacher's embeddings
    os.chdir(work)
    with (
        mock.patch("sys.argv", words.split()),
        mock.patch.object(ConGenLoss, "forward", keep_loss),
        mock.patch("sentence_transformers.models.Dense", dense),
        mock.patch("torch.utils.data.RandomSampler.__iter__", our_order()),
    ):
        student = runpy.run_path(str(checkout / "main.py"), run_name="__main__")["student_model"]
    names = {"0.auto_model.": "model.", "2.linear.": "heads.0.0."}
    weights = renamed(student.state_dict(), names)
    with open(work / "theirs/eval/similarity_evaluation_sts-dev_results.csv") as file:
        *_, last = csv.DictReader(file)
    return dict(losses=losses, weights=weights, dev=100 * float(last["cosine_spearman"]))


class AdamW(torch.optim.AdamW):
    """The authors', that of transformers, as far as its departures are undone."""

    def __init__(self, groups, undone, fused, **options):
        super().__init__(groups, **options)
        self.undone = undone

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def update(self, p, group):
        m, v = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]  # as congen.py begins them
        m.lerp_(p.grad, 0.1)
        v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
        decay = 1 - group["lr"] * group["weight_decay"]
        if "decay" not in self.undone:
            p.mul_(decay)
        p.addcdiv_(m, v.sqrt() + group["eps"], value=-group["lr"])
        if "decay" in self.undone:
            p.mul_(decay)


class Queue:
    """Replaces congen.enqueue(), and calls it.

    start [K, D]: the first entries of the queue, the newest first, or None.
    """

    def __init__(self, start, size, undone):
        import congen

        self.start = start
        self.size = size
        self.undone = undone
        self.enqueue = congen.enqueue

    def __call__(self, queue, embeddings, size):
        queue = queue if self.start is None else self.start
        self.start = None
        if "order in the queue" in self.undone:
            embeddings = embeddings.flip(0)
        if "keys in a step" in self.undone:
            return self.enqueue(queue[: self.size], embeddings, self.size + len(embeddings))
        return self.enqueue(queue, embeddings, size)


def uncut_targets(embed, texts, dev_pairs, run, args):
    """As congen.teacher_targets(), of texts that are cut at the teacher's own maximum."""
    import common

    args = SimpleNamespace(**vars(args) | dict(max_length=None))
    return common.teacher_targets(embed, texts, dev_pairs, run, args)


def ours(work, undone):
    """Run congen.py with these departures undone.

    Where it trains on rows that theirs does not train on, these are further batches at the end of
    an epoch, and their losses are left out: the others are of the same sentences.
    """
    import common
    import congen

    pairs = np.array((work / "pairs.tsv").read_text("utf-8").splitlines())
    by_row, by_text = split(pairs)
    in_queue = by_text if "sentences that occur twice" in undone else by_row
    is_trained = ~in_queue if "training on the queue" in undone else np.full(len(pairs), True)
    further = pairs[is_trained & by_text]
    count = len(pairs) - sum(by_text)
    assert count % BATCH_SIZE == 0 and all(is_trained[~by_text])
    write_lines(work / "trained.tsv", [*pairs[~by_text], *further])

    def draw(batches, epoch):
        order = np.random.default_rng([0, epoch]).permutation(count)
        order = np.concatenate([order, np.arange(count, count + len(further))])
        return common.chunks(order, BATCH_SIZE)

    start = None
    if "sentences of the queue" in undone:
        teacher = common.load_encoder(work / "teacher")
        first = [pair.split("\t")[0] for pair in pairs[in_queue]]
        limit = None if "length of a text" in undone else 128
        embeddings = common.encode(congen.embed, teacher, first, limit)
        start = torch.tensor(embeddings).flip(0)
    size = sum(in_queue)
    replaced = {"congen.enqueue": Queue(start, size, undone), "common.Batches.draw": draw}
    replaced["torch.optim.AdamW"] = partial(AdamW, undone=undone)
    if "length of a text" in undone:
        replaced["congen.teacher_targets"] = uncut_targets
    options = f"""--teacher {work}/teacher --student {work}/student --pairs {work}/trained.tsv
        --dev {work}/dev.tsv --epochs {EPOCHS} --batch-size {BATCH_SIZE} --lr {LEARNING_RATE}
        --teacher-temperature {TEACHER_TEMPERATURE} --student-temperature {STUDENT_TEMPERATURE}
        --queue-size {size} --eval-steps 1000"""
    outcome = run_ours("congen", work, options.split(), replaced)
    of_epochs = np.split(np.array(outcome["losses"]), EPOCHS)
    losses = [loss for losses in of_epochs for loss in losses[: count // BATCH_SIZE].tolist()]
    return outcome | dict(losses=losses)


PROGRAMS = {
    "congen": Program(
        title="main.py",
        prepare=prepare,
        theirs=theirs,
        ours=ours,
        departures={
            "decay": "after the step; ours before it",
            "sentences of the queue": "K drawn from all sentences; ours from those of training",
            "training on the queue": "its sentences are left out; ours are trained on",
            "sentences that occur twice": "if one is drawn, all rows that have it enter the queue, "
            "which is then longer than K; ours: the drawn rows alone",
            "keys in a step": "K + N, the oldest leave after the loss; ours are K",
            "order in the queue": "a batch's first row leaves first; ours leaves last",
            "length of a text": "the teacher reads its own maximum; ours 128 tokens",
        },
    )
}
