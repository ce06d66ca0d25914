"""The cache: what a frozen teacher says of the training sentences, computed once for all runs.

Each file is a .npy array that ends in the sha256 of all before it. It is written under another
name, renamed when it is complete, and read only if its checksum is right. Beyond --cache-limit,
what was not used for longest is removed.
"""

import contextlib
import functools
import hashlib
import io
import os
import time

import numpy as np
import torch

from common import FULL_PRECISION, ArrayInMemory, Cache, WriteError, encode, replace, writing
from support import distributed
from support.process import lock_file

PARTIAL_FILES_EXPIRE = 7 * 24 * 60 * 60  # seconds until what a crashed run left is deleted
SECONDS_BETWEEN_SAVES = 10  # of teacher embeddings that are being computed
LARGE = 10e9  # bytes of a cache whose size is said
DIGEST_BYTES = hashlib.sha256().digest_size
READ_BYTES = 2**20

in_use = set()  # the files that this process has read or written
complaints = []  # the errors of files that it could not write


# --------------------------------------------------------------------------------------------------
# Teacher embeddings
# --------------------------------------------------------------------------------------------------


class TeacherEmbeddings:
    """What a frozen teacher says of n sentences: rows of an array [n, D], a memory-mapped one."""

    def __init__(self, array, device):
        self.array = array
        self.device = device
        self.dimension = array.shape[1]

    def __len__(self):
        return len(self.array)

    def __getitem__(self, rows):
        """Row numbers [N] -> float32 tensor [N, D] on the device."""
        return torch.from_numpy(np.ascontiguousarray(self.array[rows])).to(self.device).float()


def teacher_embeddings(teacher, tokens, device, encode_batch=None, what="", dtype=FULL_PRECISION):
    """Encode every row of `tokens` by the teacher, once for all runs -> TeacherEmbeddings.

    They lie in the cache under a hash of the teacher's weights, its precision, how it is read
    (`what`, where `encode_batch` reads something else than the teacher's own embedding) and the
    tokens, which stand for the data, the tokenizer and the maximum length. dtype: of the numbers in
    the file, one of TEACHER_DTYPES. After a crash the next run continues; a run that finds another
    one writing them writes its own. All processes compute them, and one of each host writes them.
    Raises WriteError if several processes, which share the file, cannot write it.
    """
    key = distributed.from_main(embeddings_key, teacher, tokens, what, dtype)
    path = Cache.folder / f"teacher-{key}.npy"
    array = load_array(path)
    if not distributed.minimum(array is not None):
        encode_batch = in_its_precision(teacher, encode_batch or teacher)
        compute = functools.partial(encode, encode_batch, tokens, device, "teacher")
        if distributed.is_first_of_host():
            array = compute_and_write(path, compute, dtype)
        else:
            compute(NoArray())
        distributed.wait_for_all()
        if not distributed.is_first_of_host():
            array = np.load(path, mmap_mode="r")
    return TeacherEmbeddings(array, device)


def in_its_precision(teacher, encode_batch):
    """encode_batch, with the matrix products in bf16 if that is the teacher's `precision`."""
    if teacher.precision == "fp32":
        return encode_batch

    def encode_in_bf16(input_ids, attention_mask):
        with torch.autocast(input_ids.device.type, torch.bfloat16):
            return encode_batch(input_ids, attention_mask)

    return encode_in_bf16


def compute_and_write(path, compute, dtype):
    """What compute(store) computes -> array [n, D], in memory if it cannot be written to `path`.

    Raises WriteError: see teacher_embeddings().
    """
    try:
        with writing(path, "nothing half written is taken for whole"):
            Cache.folder.mkdir(parents=True, exist_ok=True)
            delete_old_partial_files()
            with open(path.with_suffix(".lock"), "w") as lock:
                partial = path.with_suffix(".partial")
                if not lock_file(lock):
                    partial = path.with_suffix(f".{os.getpid()}.partial")
                store = ArrayOnDisk(partial, dtype)
                compute(store)
                array = store.finish(path)
    except WriteError as error:
        if distributed.world_size() > 1:
            raise
        say_without_cache(error)
        return compute(ArrayInMemory())
    trim(path)
    return array


def embeddings_key(teacher, tokens, what, dtype=FULL_PRECISION):
    """The hash under which teacher embeddings are stored: 32 hexadecimal digits."""
    if dtype != FULL_PRECISION:
        what = f"{what} {dtype}"
    if teacher.precision != "fp32":
        what = f"{what} {teacher.precision}"
    digest = hashlib.sha256(f"{what} {teacher.pooling} {teacher.normalize}".encode())
    weights = [value.cpu().numpy() for value in teacher.state_dict().values()]
    for array in [*weights, tokens.ids, tokens.starts]:
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()[:32]


class NoArray(ArrayInMemory):
    """For a process that helps to compute vectors which another one stores."""

    def __init__(self):
        self.start = 2**63 - 1  # it has nothing to do again

    def write(self, rows, vectors, total):
        self.start += len(rows)


class ArrayOnDisk(ArrayInMemory):
    """Vectors in a .npy file of `dtype`, which continues where a crash left it.

    How many rows are done stands in a file beside it, which is written after the rows themselves.
    """

    def __init__(self, path, dtype=FULL_PRECISION):
        self.path = path
        self.dtype = np.dtype(dtype)
        self.progress = path.with_suffix(".progress")
        self.saved = time.monotonic()
        with contextlib.suppress(
            OSError, ValueError, EOFError
        ):  # there are none, or they were altered
            array = np.load(path, mmap_mode="r+")
            self.start = min(int(self.progress.read_text()), len(array))
            self.array = array

    def new_array(self, shape):
        try:
            array = np.lib.format.open_memmap(self.path, "w+", self.dtype, shape)
            reserve(self.path, array.offset + array.nbytes + DIGEST_BYTES)
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        return array

    def write(self, rows, vectors, total):
        super().write(rows, vectors, total)
        if time.monotonic() - self.saved > SECONDS_BETWEEN_SAVES:
            self.array.flush()
            with contextlib.suppress(OSError):  # without room there is less to continue from
                self.progress.write_text(str(self.start))
            self.saved = time.monotonic()

    def finish(self, path):
        """Add the checksum and put the file in the place of `path` -> the array."""
        self.array.flush()
        add_checksum(self.path, self.array.offset + self.array.nbytes)
        replace(self.path, path)
        self.progress.unlink(missing_ok=True)
        return self.array


def reserve(path, size):
    """Give a file with holes all its room on the disk, or raise OSError.

    Without it, the first write into the memory map of a file on a full disk kills the process.
    """
    if hasattr(os, "posix_fallocate"):  # macOS has no such call
        with open(path, "rb+") as file:
            os.posix_fallocate(file.fileno(), 0, size)


# --------------------------------------------------------------------------------------------------
# The files
# --------------------------------------------------------------------------------------------------


def load_array(path):
    """The array of a file, memory-mapped; None if there is none, or none that is whole."""
    if not path.exists():
        return None
    if not is_whole(path):
        distributed.note(f"{path}: cut or altered, its checksum is another; computed again")
        return None
    with contextlib.suppress(OSError):  # somebody else's
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))  # the time of its last use
    in_use.add(path)
    return np.load(path, mmap_mode="r")


def save_array(path, array):
    """Put an array into the cache. Without room for it, a line says so."""
    new = path.with_suffix(f".{os.getpid()}.partial")
    content = io.BytesIO()  # np.save() into a file does not say why it failed
    np.save(content, array)
    try:
        with writing(path):
            Cache.folder.mkdir(parents=True, exist_ok=True)
            new.write_bytes(content.getvalue())
            add_checksum(new, new.stat().st_size)
            replace(new, path)
        trim(path)
    except WriteError as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        say_without_cache(error)


def add_checksum(path, size):
    """Write the checksum of the first `size` bytes of a file behind them."""
    with open(path, "rb+") as file:
        checksum = sha256(file, size)
        file.seek(size)
        file.write(checksum)


def is_whole(path):
    """Does a file end in its checksum?"""
    size = path.stat().st_size - DIGEST_BYTES
    with open(path, "rb") as file:
        return size > 0 and sha256(file, size) == file.read()


def sha256(file, size):
    """Of the next `size` bytes."""
    digest = hashlib.sha256()
    while size > 0:
        part = file.read(min(size, READ_BYTES))
        digest.update(part)
        size -= len(part)
    return digest.digest()


def trim(new):
    """Remove files until the cache has --cache-limit, those first that were not used for longest.

    The file `new` and what else this process uses stay. Without a limit, say the size of a large
    cache.
    """
    in_use.add(new)
    sizes = {file: size_of(file) for file in sorted(Cache.folder.glob("*.npy"), key=last_use)}
    total = sum(sizes.values())
    if Cache.limit is None:
        if total > LARGE:
            text = f"{Cache.folder} has {total / 1e9:.1f} GB of teacher embeddings"
            distributed.note(f"{text}; --cache-limit 10 would keep it below 10 GB")
        return
    removed = 0
    for file, size in sizes.items():
        if total > Cache.limit and file not in in_use:
            file.unlink(missing_ok=True)
            total -= size
            removed += 1
    if removed > 0:
        text = f"{removed} files removed that were not used for longest"
        distributed.note(f"{Cache.folder}: {text} (--cache-limit)")


def last_use(file):
    """In seconds since 1970; 0 if another process has just removed it."""
    if not file.exists():
        return 0
    return max(file.stat().st_atime, file.stat().st_mtime)


def size_of(file):
    """In bytes; 0 if another process has just removed it."""
    return file.stat().st_size if file.exists() else 0


def delete_old_partial_files():
    for file in Cache.folder.glob("*.partial"):
        if time.time() - last_use(file) > PARTIAL_FILES_EXPIRE:
            file.unlink(missing_ok=True)
            file.with_suffix(".progress").unlink(missing_ok=True)


def say_without_cache(error):
    """Once for all files of this process. error: a WriteError of the cache."""
    if not complaints:
        distributed.note(f"{error.problem}, or --cache-dir; it goes on without the cache")
    complaints.append(error)
