# SPDX-License-Identifier: MIT
"""Train with several processes, GPUs or hosts, at the losses of one process.

  torchrun --nproc-per-node 4 -m extras.distributed ckd.py @demo/ckd.txt
  torchrun --nproc-per-node 4 -m extras.distributed ibkd.py @demo/ibkd.txt

Every process runs the whole script and computes the loss of the whole batch. It embeds its share of
the texts, gathers the embeddings of all, and averages its gradients with those of the others. The
losses are those of one process, except that each process draws dropout of its own. Process 0 has
--output; the others work on a temporary copy. main() lists what is replaced to get there.
"""

import io
import math
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers

import common

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # torchrun sets them; LOCAL_RANK is that on a host
RANK, LOCAL_RANK, WORLD_SIZE = [int(os.environ[name]) for name in NAMES]
embed_texts, teacher_embeddings = common.embed_texts, common.teacher_embeddings
run_settings, begin = common.run_settings, common.Run.begin
backward = torch.Tensor.backward
trained = []  # parameters
copies = tempfile.TemporaryDirectory()


def gather(own, total):
    """Tensors [n, ...] of each process -> [total, ...] of all, with gradients for its own rows."""
    shares = [torch.empty_like(own) for _ in range(WORLD_SIZE)]
    dist.all_gather(shares, own.detach().contiguous())
    if own.requires_grad:
        own.register_hook(lambda gradient: WORLD_SIZE * gradient)  # a mean is taken later
    shares[RANK] = own
    return torch.cat(shares)[:total]


def embed_shared_texts(embed, encoder, texts, max_length=None):
    if not torch.is_grad_enabled():  # each process scores alone, as the teacher embeds
        return embed_texts(embed, encoder, texts, max_length)
    n = math.ceil(len(texts) / WORLD_SIZE)
    # The first texts repeat at the end, so that each process has n.
    positions = np.resize(np.arange(len(texts)), n * WORLD_SIZE)[RANK * n :][:n]
    if RANK > 0:
        seed = np.random.SeedSequence([torch.initial_seed(), RANK])  # dropout of its own
        torch.manual_seed(int(seed.generate_state(1)[0]))
    own = embed_texts(embed, encoder, [texts[i] for i in positions], max_length)
    return gather(own, len(texts))


def cached_teacher_embeddings(*arguments, **options):
    if LOCAL_RANK == 0:
        teacher_embeddings(*arguments, **options)
    dist.barrier()
    return teacher_embeddings(*arguments, **options)


def settings_elsewhere(args, *rest):
    if RANK > 0:
        if Path(args.output, "args.json").exists():
            shutil.copytree(args.output, copies.name, dirs_exist_ok=True)
        args.output = copies.name
    dist.barrier()  # until all have copied it
    return run_settings(args, *rest)


def begin_sharing(run, total, state, queue=None):
    optimizer = state[-1]
    trained[:] = [value for group in optimizer.param_groups for value in group["params"]]
    return begin(run, total, state, queue)


def backward_and_average(loss, *arguments, **options):
    backward(loss, *arguments, **options)
    for parameter in trained:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= WORLD_SIZE


def main():
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(LOCAL_RANK)  # "cuda" then means this process's own GPU
    long = timedelta(days=7)  # while one process embeds millions of sentences by the teacher
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=long)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `copies` is deleted
    common.embed_texts = embed_shared_texts
    common.teacher_embeddings = cached_teacher_embeddings
    common.run_settings = settings_elsewhere
    common.Run.begin = begin_sharing
    torch.Tensor.backward = backward_and_average
    transformers.PreTrainedModel.should_save_on_this_rank = lambda *_: True  # else only rank 0
    if RANK > 0:  # it prints errors only
        sys.stdout = io.StringIO()
        common.BAR["disable"] = True
        common.note = lambda text: None
    del sys.argv[0]
    try:
        if sys.argv[0].endswith(".py"):
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:  # common.read_options() reads the source of the module that is called __main__
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except RuntimeError:
        time.sleep(10)  # if another process has failed, torchrun ends this one meanwhile
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
