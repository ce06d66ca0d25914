"""Several processes that train one model, as torchrun starts them on the GPUs of one or more hosts.

Each process computes its part of a step's rows, gather() puts the parts together, and what follows
is the same on every process. Gradients are averaged, and the main process alone writes and prints.
With one process every function here does nothing. This file imports nothing of the project, so that
all of the project can import it.
"""

import contextlib
import os
import signal
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

INVALID_INPUT = 2  # exit statuses; this one is also that of a run which another process has ended
CRASHED = 1
TERMINATED = 128 + signal.SIGTERM
ANSWER = timedelta(minutes=10)  # in which every process takes part in a step
ANY_TIME = timedelta(days=30)  # for what the main process does alone, such as mining
END_OF_ALL = 30  # seconds, until the end of one process has ended the others
ENDED = "\nerror: another process of this run has ended; the same command with --resume continues"
STOPPED = "\nerror: stopped by torchrun; the same command with --resume continues"  # by SIGTERM


class Shared:
    """What start() makes, for a run of several processes."""

    store = None  # in which they count their errors
    waiting = None  # the group of those that wait for the main process, or for their neighbor's end
    watch = None  # the thread that does the latter
    failing = threading.RLock()  # held by the thread that ends this process


# --------------------------------------------------------------------------------------------------
# Which process this is
# --------------------------------------------------------------------------------------------------


def rank():
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    """How many processes there are, on all hosts."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main():
    """Does this process write the run's folder, and print?"""
    return rank() == 0


def is_first_of_host():
    """Does this process write what each host keeps for itself?"""
    return world_size() == 1 or os.environ["LOCAL_RANK"] == "0"


def note(text):
    """A line on stderr, printed once for all processes."""
    if is_main():
        print(text, file=sys.stderr)


# --------------------------------------------------------------------------------------------------
# Beginning and end of a process
# --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def all_processes():
    """Around a program: the processes begin and finish together."""
    start()
    try:
        yield
    except SystemExit:  # --help
        finish()
        raise
    finish()


def start():
    """Join the other processes, if torchrun has started several.

    Each listens to the one before it, in a ring: its connection closes when it ends, whatever it or
    this one is doing. The backend alone would not notice that before the next exchange, and NCCL
    not even then.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    store, own, processes = next(dist.rendezvous("env://", timeout=ANSWER))
    # --max-restarts starts new processes, which may meet the store of those before.
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", ""), store)
    dist.init_process_group(backend, store=store, rank=own, world_size=processes, timeout=ANSWER)
    Shared.store = store
    Shared.waiting = dist.new_group(backend="gloo", timeout=ANY_TIME)
    Shared.watch = threading.Thread(target=listen, daemon=True)
    Shared.watch.start()
    sys.excepthook = crash
    signal.signal(signal.SIGTERM, lambda number, frame: fail(STOPPED, TERMINATED))
    if own > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def listen():
    """Wait until the process before this one finishes; end this one if it ends in another way."""
    before = (rank() - 1) % world_size()
    try:
        dist.recv(torch.empty(1), before, group=Shared.waiting)
    except RuntimeError:
        fail(ENDED, INVALID_INPUT)


def finish():
    """Tell the process behind this one, wait for the one before it, and leave."""
    if world_size() == 1:
        return
    with together():
        dist.send(torch.zeros(1), (rank() + 1) % world_size(), group=Shared.waiting)
    Shared.watch.join()
    dist.destroy_process_group()


def fail(message, status):
    """Print the message, if it is the first error of all processes, and end this process.

    What the others print later would follow from the first error, or repeat it.
    """
    if world_size() == 1:
        with contextlib.suppress(OSError):  # a terminal that is gone
            print(message, file=sys.stderr)
        sys.exit(status)
    with Shared.failing:
        if is_first_error():
            print(message, file=sys.stderr)
        leave(status)


def crash(kind, error, trace):
    """What becomes of an exception that nothing catches: as fail(), with a traceback."""
    with Shared.failing:
        if is_first_error():
            sys.__excepthook__(kind, error, trace)
        leave(CRASHED)


def is_first_error():
    """Is it the first error of all processes?"""
    try:
        return Shared.store.add("errors", 1) == 1
    except RuntimeError:  # the store has ended with its host
        return True


def leave(status):
    """End at once: an orderly end would wait for the watch, and for exchanges under way."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# --------------------------------------------------------------------------------------------------
# Exchanges, in which all processes take part
# --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def together():
    """Around an exchange. Where it fails since another process has ended, the watch says so."""
    try:
        yield
    except RuntimeError:
        Shared.watch.join(END_OF_ALL)
        raise


def split(rows):
    """How many of so many rows each process gets: whole numbers that differ by 1 at most."""
    processes = world_size()
    return [(rows + number) // processes for number in reversed(range(processes))]


def own_part(sizes):
    """The slice of all rows that is this process's; row 0 if it gets none, to compute something."""
    start = sum(sizes[: rank()])
    size = sizes[rank()]
    return slice(start, start + size) if size > 0 else slice(0, 1)


def gather(own, sizes):
    """Rows of this process [n, ...] -> those of all processes, in order, [sum(sizes), ...].

    sizes: the n of each process. Every process has the same loss of what is returned. Then the mean
    of the processes' gradients is the gradient of that loss: see Gather.
    """
    if world_size() == 1:
        return own
    return Gather.apply(own[: sizes[rank()]], sizes)


class Gather(torch.autograd.Function):
    """gather() and its gradient.

    A parameter behind it gets the same gradient on every process, which the mean leaves as it is. A
    parameter before it gets that of the own rows alone, and the mean divides their sum by the
    number of processes, so it is multiplied by this number here.
    """

    @staticmethod
    def forward(context, own, sizes):
        context.sizes = sizes
        padded = own.new_zeros(max(sizes), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in sizes]
        with together():
            dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes)])

    @staticmethod
    def backward(context, gradient):
        return world_size() * gradient.split(context.sizes)[rank()], None


@torch.no_grad()
def average(tensors):
    """Replace each tensor by its mean over the processes, in one exchange for all of them."""
    if world_size() == 1:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    with together():
        dist.all_reduce(flat)
    means = (flat / world_size()).split([tensor.numel() for tensor in tensors])
    for tensor, mean in zip(tensors, means):
        tensor.copy_(mean.view_as(tensor))


@torch.no_grad()
def copy_from_main(tensors):
    """Replace each tensor by the main process's."""
    if world_size() == 1:
        return
    for tensor in tensors:
        with together():
            dist.broadcast(tensor, 0)


def minimum(number):
    """The smallest whole number, or truth value, of all processes."""
    if world_size() == 1:
        return number
    value = torch.tensor(int(number))
    with together():
        dist.all_reduce(value, dist.ReduceOp.MIN)
    return int(value)


def largest(number):
    """The largest whole number of all processes."""
    return -minimum(-number)


def share(value):
    """The main process's value, for which the others wait."""
    if world_size() == 1:
        return value
    values = [value]
    with together():
        dist.broadcast_object_list(values, 0, group=Shared.waiting)
    return values[0]


def from_main(function, *arguments):
    """The result of function(*arguments), which the main process alone calls."""
    return share(function(*arguments) if is_main() else None)


def wait_for_all():
    """Go on when every process has come this far."""
    if world_size() == 1:
        return
    with together():
        dist.barrier(group=Shared.waiting)
