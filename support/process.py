"""A process among others: signals that end it at a good moment, a folder that it alone writes."""

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import socket
import sys
import threading
import time
import weakref

from common import DataError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ONE_REQUEST = 0.5  # seconds
LOCK = ".lock"  # in the folder; it is gone when the process has ended
PR_SET_PDEATHSIG = 1  # of Linux's prctl
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


# ---- signals


class Interrupted(KeyboardInterrupt):
    """SIGTERM or Ctrl-C has ended the work. `status` is the exit status of that signal."""

    def __init__(self, number, message=""):
        super().__init__(message)
        self.status = 128 + number


def interrupt(number, frame):
    raise Interrupted(number)


@contextlib.contextmanager
def handling(handler):
    """SIGTERM and Ctrl-C call handler(number, frame), unless somebody lets them be ignored."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class Requests:
    """`signal` is the number of the first signal, 0 without one; another one ends the work.

    What comes with the first one is that one again: torchrun passes on the Ctrl-C that its
    processes have got from the terminal.
    """

    def __init__(self):
        self.signal = 0
        self.when = 0.0

    def note(self, number, frame):
        if not self.signal:
            self.signal = number
            self.when = time.monotonic()
        elif time.monotonic() > self.when + ONE_REQUEST:
            raise Interrupted(number)


@contextlib.contextmanager
def deferred_signals():
    """-> Requests. Who asks for them ends the work when a step is done.

    Raises Interrupted for one that came after the last time somebody asked.
    """
    requests = Requests()
    with handling(requests.note):
        yield requests
    if requests.signal:
        raise Interrupted(requests.signal)


def die_with_parent():
    """For the new process of a Popen: SIGKILL when its parent dies. Linux has this alone."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# ---- locks


def lock_file(file):
    """Lock an open file until it is closed -> False if another process has locked it.

    A file system without locks is as one that nobody else uses.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True


def this_process():
    return f"process {os.getpid()} on {socket.gethostname()}"


def lock_folder(folder):
    """Hold the lock of a folder until the returned file is closed or this process ends.

    The system releases the lock of a process that has died. Raises DataError, which names the
    process that holds it.
    """
    path = folder / LOCK
    while True:
        file = open(path, "a+")  # noqa: SIM115
        if not lock_file(file):
            refuse_if_held(folder, file)
            return file
        if path.exists() and os.path.samestat(os.stat(path), os.fstat(file.fileno())):
            break
        file.close()  # its holder has deleted it in this moment
    with contextlib.suppress(OSError):  # a full disk; the lock holds without a name
        file.truncate(0)
        file.write(this_process())
        file.flush()
    weakref.finalize(file, delete_lock, path, os.getpid())
    return file


def delete_lock(path, owner):
    """When the process ends, which it does before the system releases its lock."""
    if os.getpid() == owner:
        path.unlink(missing_ok=True)


def check_lock(folder):
    """Raises DataError if another process holds the lock of a folder."""
    path = folder / LOCK
    if path.exists():
        with open(path) as file:
            if not lock_file(file):
                refuse_if_held(folder, file)


def refuse_if_held(folder, file):
    """Raises DataError if the lock of an open file is another process's."""
    file.seek(0)
    holder = file.read() or "another process"
    if holder != this_process():
        expected = "wait for its end, or give another --output"
        raise DataError(f"{folder}: {holder} is writing into it; {expected}")
