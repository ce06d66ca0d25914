"""Every training loop on CUDA without a GPU: FakeTensorMode computes shapes and devices alone.

A tensor that stays on the CPU, or a value that a step fetches from the device, raises. Autograd's
backward pass does not run here. Needs a CUDA build of torch:

  pip install 'torch===2.13.0'
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import DEMO, demo_sentences, demo_triplets
from torch import nn

import ckd
import common
import congen
import distilface
import dse
import ibkd

try:
    from torch._subclasses.fake_tensor import FakeTensorMode
except ImportError:
    FakeTensorMode = None

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None or FakeTensorMode is None,
    reason="this torch is a CPU build; FakeTensorMode needs one with CUDA",
)
WIDE = 48  # dimension of the teacher
SENTENCES = 40


class Steps:
    """In the place of common.Run: checks the device of what a step logs, and counts the steps."""

    folder = Path("unused")
    count = 0

    def resume(self, stage, total, modules, optimizer):
        assert total == 3
        return 0.0, 0, 0  # no dev score is better

    def checkpoint(self, *_):
        pass

    def log_dev(self, step, score):
        pass

    def log(self, step, rows, **values):
        self.count += 1
        assert values["loss"].device.type == "cuda"


def move(module, device):
    """What nn.Module.to() does, which cannot swap fake parameters."""
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None:
                part._parameters[name] = nn.Parameter(value.detach().to(device))
        for name, value in part._buffers.items():
            part._buffers[name] = value.to(device)
    return module


@pytest.fixture
def train(models_folder, monkeypatch):
    """train(loop, module, *command line) calls loop(encoder, args, run) on fake CUDA."""
    monkeypatch.setattr(nn.Module, "to", move)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # not implemented
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: None)
    monkeypatch.setattr(torch.optim.Optimizer, "step", lambda self: None, raising=False)

    def dev_score(*_):
        return 0.0

    def call(loop, module, *words):
        if module is not ibkd:
            monkeypatch.setattr(module, "dev_score", dev_score)
        data = ("--train", DEMO / "sentences.txt", "--dev", DEMO / "dev.tsv", "--batch-size", 8)
        words = [f"{module.__name__}.py", *(() if module is dse else data), *words]
        monkeypatch.setattr(sys, "argv", [*map(str, words)])
        args = module.parse_args()
        args.device, args.max_steps, args.precision = "cuda", 3, "bf16"
        encoder = common.load_encoder(models_folder / "mean")
        run = Steps()
        with FakeTensorMode(allow_non_fake_inputs=True):
            encoder.model = type(encoder.model)(encoder.model.config).to("cuda")  # fake weights
            loop(encoder, args, run)
        assert run.count == 3

    return call


def targets_of(count):
    return np.zeros((count, WIDE), np.float32)


@pytest.mark.parametrize("more", ["--queue-size 16", "--learn-temperature", "--objective kd"])
def test_ckd_stage_1(train, more):
    def loop(encoder, args, run):
        ckd.resolve_defaults(args, encoder, SENTENCES)
        ckd.distill(encoder, demo_sentences(SENTENCES), targets_of(SENTENCES), [], run, args)

    train(loop, ckd, "--student", "any", *more.split())


def test_ckd_stage_2(train):
    def loop(encoder, args, run):
        args.finetune_lr = 1e-4
        ckd.finetune(encoder, list(zip(*demo_triplets(SENTENCES))), [], run, args)

    train(loop, ckd, "--student", "any", "--stage", "finetune", "--finetune-batch-size", 8)


def test_congen(train):
    def loop(encoder, args, run):
        args.teacher_temperature = args.student_temperature = 0.1
        args.lr = 1e-4
        views = congen.Views(demo_sentences(SENTENCES), None)
        congen.distill(encoder, views, targets_of(SENTENCES), [], run, args)

    train(loop, congen, "--student", "any", "--queue-size", 16)


@pytest.mark.parametrize("stage", [ibkd.distill, ibkd.finetune])
def test_ibkd(train, stage):
    def loop(encoder, args, run):
        texts = sum(demo_triplets(SENTENCES), [])
        labels = np.arange(len(texts)).reshape(3, -1).T
        data = targets_of(len(texts)) if stage is ibkd.distill else labels
        stage(encoder, texts, data, lambda encoder: 0.0, run, args)

    train(loop, ibkd, "--student", "any", "--stage", "both", "--dim", WIDE)


@pytest.mark.parametrize("pooling", distilface.POOLINGS)
def test_distilface(train, pooling):
    def loop(encoder, args, run):
        encoder.pooling = args.pooling
        tokens = common.Tokens(encoder, demo_sentences(SENTENCES))
        distilface.train(encoder, tokens, [], run, args)

    train(loop, distilface, "--pooling", pooling)


class Teacher(nn.Module):
    """A cross-encoder, with the part of dse.load_cross_encoder() that a forward pass takes."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.tokenizer = encoder.tokenizer
        self.max_length = encoder.max_length
        self.prompt = ""
        self.order = [1, 0]
        self.output = nn.Linear(32, 2)

    def model(self, input_ids, attention_mask, token_type_ids=None):
        states = self.encoder.model(input_ids, attention_mask, token_type_ids).last_hidden_state
        return SimpleNamespace(logits=self.output(states[:, 0]))


@pytest.mark.parametrize("stage", ["teacher", "student"])
def test_dse(train, stage):
    def loop(encoder, args, run):
        texts = demo_sentences(SENTENCES)
        pairs, labels = list(zip(texts, reversed(texts))), np.ones(SENTENCES, np.int64)
        if stage == "teacher":
            dse.finetune(Teacher(encoder).to("cuda"), pairs, labels, None, run, args)
        else:
            student = dse.add_head(encoder, 2).to("cuda")
            targets = np.zeros((SENTENCES, 2), np.float32)
            dse.distill(student, pairs, labels, targets, None, run, args)

    train(loop, dse, "--student", "any", "--batch-size", 8, "--eval-steps", 100)
