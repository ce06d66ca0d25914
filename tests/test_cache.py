"""support/cache.py: teacher embeddings are computed once, whole files are read, room is kept."""

import os
import sys
import time

import numpy as np
import pytest
import torch
from processes import largest_file

import common
from common import Cache, DataError
from support import cache, command_line, demo
from support.encoder import load_encoder
from support.process import lock_file


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """The test's folder is the cache, without a limit."""
    monkeypatch.setattr(Cache, "folder", tmp_path)
    monkeypatch.setattr(Cache, "limit", None)
    monkeypatch.setattr(cache, "in_use", set())
    monkeypatch.setattr(cache, "complaints", [])


def write(path, text):
    path.write_text(text)
    return path


class Teacher:
    """An encoder that counts the rows it encodes and can be interrupted."""

    def __init__(self, encoder):
        self.encoder = encoder
        self.calls = []
        self.interrupt_at = None

    def __call__(self, input_ids, attention_mask):
        self.calls.append(len(input_ids))
        if len(self.calls) == self.interrupt_at:
            raise KeyboardInterrupt
        return self.encoder(input_ids, attention_mask)


def counted(folder):
    """A small model, the same as a Teacher, and 400 sentences in its tokens."""
    encoder = load_encoder(folder).eval()
    return encoder, Teacher(encoder), common.Tokens(encoder, demo.sentences(400))


def test_teacher_embeddings_are_made_once_and_never_half(models_folder, tmp_path):
    encoder, counting, tokens = counted(models_folder / "mean")
    counting.interrupt_at = 2
    with pytest.raises(KeyboardInterrupt):
        cache.teacher_embeddings(encoder, tokens, "cpu", counting)
    assert not list(tmp_path.glob("*.npy"))

    counting.interrupt_at = None
    counting.calls.clear()
    first = cache.teacher_embeddings(encoder, tokens, "cpu", counting)
    assert sum(counting.calls) == 400
    assert isinstance(first.array, np.memmap)
    assert np.array_equal(first.array, common.encode(encoder, tokens, "cpu"))
    again = cache.teacher_embeddings(encoder, tokens, "cpu", counting)
    assert sum(counting.calls) == 400
    assert np.array_equal(first.array, again.array)


def test_teacher_embeddings_continue_where_a_crash_left_them(models_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "SECONDS_BETWEEN_SAVES", -1)  # after every batch
    encoder, counting, tokens = counted(models_folder / "mean")
    counting.interrupt_at = 3
    with pytest.raises(KeyboardInterrupt):
        cache.teacher_embeddings(encoder, tokens, "cpu", counting)
    done = sum(counting.calls[:2])
    assert 0 < done < 400

    counting.interrupt_at = None
    counting.calls.clear()
    targets = cache.teacher_embeddings(encoder, tokens, "cpu", counting)
    assert sum(counting.calls) == 400 - done
    assert np.array_equal(targets.array, common.encode(encoder, tokens, "cpu"))
    assert not list(tmp_path.glob("*.partial"))
    assert not list(tmp_path.glob("*.progress"))


def test_two_runs_at_once_do_not_write_one_file(models_folder, tmp_path):
    """While another one writes the partial file, which its lock shows, it stays as it is."""
    encoder = load_encoder(models_folder / "mean").eval()
    tokens = common.Tokens(encoder, demo.sentences(40))
    name = f"teacher-{cache.embeddings_key(encoder, tokens, '')}"
    partial = write(tmp_path / f"{name}.partial", "another run's")
    with open(tmp_path / f"{name}.lock", "w") as lock:
        assert lock_file(lock)
        targets = cache.teacher_embeddings(encoder, tokens, "cpu")
    assert np.array_equal(targets.array, common.encode(encoder, tokens, "cpu"))
    assert partial.read_text() == "another run's"


def test_teacher_embeddings_have_a_file_each_for_all_they_depend_on(models_folder, tmp_path):
    encoder = load_encoder(models_folder / "mean").eval()
    tokens = common.Tokens(encoder, demo.sentences(20))
    shorter = common.Tokens(encoder, demo.sentences(20), 5)
    cache.teacher_embeddings(encoder, tokens, "cpu")
    cache.teacher_embeddings(encoder, shorter, "cpu")
    cache.teacher_embeddings(encoder, tokens, "cpu", what="something else is read off it")
    cache.teacher_embeddings(encoder, tokens, "cpu", dtype="float16")
    encoder.pooling = "cls"
    cache.teacher_embeddings(encoder, tokens, "cpu")
    with torch.no_grad():
        encoder.model.embeddings.word_embeddings.weight[5] += 1
    cache.teacher_embeddings(encoder, tokens, "cpu")
    assert len(list(tmp_path.glob("*.npy"))) == 6
    assert not list(tmp_path.glob("*.partial"))


def test_teacher_embeddings_are_read_by_row(models_folder):
    encoder = load_encoder(models_folder / "wide").eval()
    sentences = demo.sentences(10)
    targets = cache.teacher_embeddings(encoder, common.Tokens(encoder, sentences), "cpu")
    assert (len(targets), targets.dimension) == (10, 48)
    rows = targets[np.array([7, 2, 2])]
    expected = common.encode_sentences(encoder, sentences)[[7, 2, 2]]
    assert torch.equal(rows, torch.from_numpy(expected))


def test_teacher_embeddings_in_half_precision_are_half_as_large(models_folder, monkeypatch):
    """They are given back as float32. A crash in between changes nothing."""
    monkeypatch.setattr(cache, "SECONDS_BETWEEN_SAVES", -1)  # after every batch
    encoder, counting, tokens = counted(models_folder / "wide")
    counting.interrupt_at = 3
    with pytest.raises(KeyboardInterrupt):
        cache.teacher_embeddings(encoder, tokens, "cpu", counting, dtype="float16")
    counting.interrupt_at = None
    half = cache.teacher_embeddings(encoder, tokens, "cpu", counting, dtype="float16")
    full = cache.teacher_embeddings(encoder, tokens, "cpu")
    assert half.array.nbytes * 2 == full.array.nbytes
    rows = np.array([7, 2, 2])
    assert half[rows].dtype == full[rows].dtype == torch.float32
    assert torch.equal(half[rows], full[rows].half().float())
    assert not torch.equal(half[rows], full[rows])


def test_what_a_crash_left_a_week_ago_is_deleted(tmp_path):
    old = write(tmp_path / "teacher-a.1.partial", "old")
    new = write(tmp_path / "teacher-b.2.partial", "new")
    long_ago = time.time() - cache.PARTIAL_FILES_EXPIRE - 60
    os.utime(old, (long_ago, long_ago))
    cache.delete_old_partial_files()
    assert not old.exists()
    assert new.exists()


# ---- what is in it is whole


def altered(path, position):
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("fault", ["first byte", "a number", "last byte", "cut", "empty", "old"])
def test_what_is_not_as_it_was_written_is_computed_again(models_folder, tmp_path, capfd, fault):
    encoder = load_encoder(models_folder / "mean").eval()
    tokens = common.Tokens(encoder, demo.sentences(40))
    expected = np.array(cache.teacher_embeddings(encoder, tokens, "cpu").array)
    (path,) = tmp_path.glob("*.npy")
    data = path.read_bytes()
    positions = {"first byte": 0, "a number": 500, "last byte": len(data) - 1}
    lengths = {"cut": len(data) // 2, "empty": 0, "old": len(data) - cache.DIGEST_BYTES}
    if fault in positions:
        altered(path, positions[fault])
    else:
        path.write_bytes(data[: lengths[fault]])
    assert np.array_equal(cache.teacher_embeddings(encoder, tokens, "cpu").array, expected)
    assert path.read_bytes() == data
    line = f"{path}: cut or altered, its checksum is another; computed again\n"
    assert capfd.readouterr().err.count(line) == 1


def test_its_files_are_arrays_that_numpy_reads(models_folder, tmp_path):
    encoder = load_encoder(models_folder / "mean").eval()
    tokens = common.Tokens(encoder, demo.sentences(40))
    targets = cache.teacher_embeddings(encoder, tokens, "cpu")
    cache.save_array(tmp_path / "negatives.npy", np.arange(6).reshape(2, 3))
    (path,) = tmp_path.glob("teacher-*.npy")
    assert np.array_equal(np.load(path), targets.array)
    assert np.load(tmp_path / "negatives.npy").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert cache.load_array(tmp_path / "negatives.npy").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert cache.load_array(tmp_path / "others.npy") is None


@pytest.mark.parametrize("left", ["text", "-", ""])
def test_what_a_crash_left_altered_is_begun_again(models_folder, tmp_path, left):
    encoder = load_encoder(models_folder / "mean").eval()
    tokens = common.Tokens(encoder, demo.sentences(40))
    name = f"teacher-{cache.embeddings_key(encoder, tokens, '')}"
    write(tmp_path / f"{name}.partial", left)
    write(tmp_path / f"{name}.progress", "30")
    targets = cache.teacher_embeddings(encoder, tokens, "cpu")
    assert np.array_equal(targets.array, common.encode(encoder, tokens, "cpu"))


# ---- room


def test_a_full_disk_costs_the_cache_and_nothing_else(models_folder, small_disk, capfd):
    Cache.folder = small_disk(megabytes=1) / "cache"
    encoder = load_encoder(models_folder / "wide").eval()
    tokens = common.Tokens(encoder, demo.sentences(6000))
    counting = Teacher(encoder)
    targets = cache.teacher_embeddings(encoder, tokens, "cpu", counting)
    assert np.array_equal(targets.array, common.encode(encoder, tokens, "cpu"))
    assert sum(counting.calls) == 6000 + counting.calls[0]  # the room is missed at the first batch
    assert [file.suffix for file in Cache.folder.iterdir()] == [".lock"]
    assert capfd.readouterr().err.count("No space left on device") == 1


def test_a_cache_that_nobody_may_write(models_folder, tmp_path, capfd):
    encoder = load_encoder(models_folder / "mean").eval()
    tokens = common.Tokens(encoder, demo.sentences(40))
    Cache.folder = write(tmp_path / "file", "no folder") / "cache"
    targets = cache.teacher_embeddings(encoder, tokens, "cpu")
    assert np.array_equal(targets.array, common.encode(encoder, tokens, "cpu"))
    cache.save_array(Cache.folder / "negatives.npy", np.arange(3))
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "without" in line]
    assert line.endswith(
        ".npy: Not a directory, expected a file that can be written, or --cache-dir; "
        "it goes on without the cache"
    )


def test_negatives_that_find_no_room_leave_nothing(tmp_path, capfd):
    with largest_file(1000):
        cache.save_array(tmp_path / "negatives.npy", np.arange(1000))
    assert list(tmp_path.iterdir()) == []
    assert "negatives.npy: File too large" in capfd.readouterr().err


def test_a_memory_map_has_its_room_before_it_is_written(small_disk):
    """On a full disk, writing into a hole of a file would kill the process (SIGBUS)."""
    store = cache.ArrayOnDisk(small_disk(megabytes=1) / "a.partial")
    with pytest.raises(OSError, match="No space left"):
        store.write(np.arange(10), np.ones((10, 1000), np.float32), total=10_000)
    assert not store.path.exists()


def fill(tmp_path, ages):
    """Files of about 1 kB, last used so many days ago."""
    for name, days in ages.items():
        path = tmp_path / f"{name}.npy"
        path.write_bytes(b" " * 1000)
        then = time.time() - days * 24 * 60 * 60
        os.utime(path, (then, then))


def names(tmp_path):
    return sorted(path.stem for path in tmp_path.glob("*.npy"))


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        (10_000, "a b c d new"),
        (5000, "a b c d new"),
        (4999, "a c d new"),
        (2500, "c new"),
        (1, "new"),
    ],
)
def test_beyond_its_limit_what_was_not_used_for_longest_goes(tmp_path, capfd, limit, left):
    fill(tmp_path, {"a": 3, "b": 4, "c": 1, "d": 2})
    Cache.limit = limit
    cache.save_array(tmp_path / "new.npy", np.zeros(1000 - 128 - 32, np.int8))
    assert names(tmp_path) == left.split()
    removed = 5 - len(left.split())
    lines = capfd.readouterr().err.splitlines()
    if removed == 0:
        assert lines == []
    else:
        text = f"{removed} files removed that were not used for longest (--cache-limit)"
        assert lines == [f"{tmp_path}: {text}"]


def test_what_this_run_uses_stays_and_reading_is_use(tmp_path):
    cache.save_array(tmp_path / "read.npy", np.zeros(1000))
    cache.save_array(tmp_path / "mine.npy", np.zeros(1000))
    fill(tmp_path, {"other": 5})
    cache.in_use.clear()  # as in the next process
    for name in ("read", "mine"):
        then = time.time() - 10 * 24 * 60 * 60
        os.utime(tmp_path / f"{name}.npy", (then, then))
    cache.load_array(tmp_path / "read.npy")
    cache.in_use.clear()
    cache.load_array(tmp_path / "mine.npy")
    Cache.limit = 9000 + 8000
    cache.save_array(tmp_path / "new.npy", np.zeros(1))
    assert names(tmp_path) == ["mine", "new", "read"]  # the oldest but those was used 5 days ago
    Cache.limit = 1
    cache.save_array(tmp_path / "last.npy", np.zeros(1))
    assert names(tmp_path) == ["last", "mine", "new"]


def test_a_large_cache_says_its_size_once_a_file(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(cache, "LARGE", 3000)
    cache.save_array(tmp_path / "a.npy", np.zeros(100))
    assert capfd.readouterr().err == ""
    cache.save_array(tmp_path / "b.npy", np.zeros(1000))
    advice = "--cache-limit 10 would keep it below 10 GB"
    size = "0.0 GB of teacher embeddings"
    assert capfd.readouterr().err == f"{tmp_path} has {size}; {advice}\n"
    cache.load_array(tmp_path / "b.npy")
    assert capfd.readouterr().err == ""


def test_the_command_line_chooses_folder_and_limit(tmp_path, monkeypatch):
    parser = command_line.ArgumentParser("a program")
    command_line.add_run_options(parser, "runs/x", 32, 10, 0)
    options = ["--cache-dir", str(tmp_path / "other"), "--cache-limit", "1.5"]
    monkeypatch.setattr(sys, "argv", ["program.py", *options])
    parser.parse()
    assert Cache.folder == tmp_path / "other"
    assert Cache.limit == 1_500_000_000
    file = write(tmp_path / "file", "no folder")
    monkeypatch.setattr(sys, "argv", ["program.py", "--cache-dir", str(file)])
    with pytest.raises(DataError, match="file: it is a file, expected a folder"):
        parser.parse()


def test_a_teacher_in_bf16_has_a_file_of_its_own_and_nearly_the_same_embeddings(models_folder):
    encoder = load_encoder(models_folder / "wide").eval()
    tokens = common.Tokens(encoder, demo.sentences(100))
    exact = cache.teacher_embeddings(encoder, tokens, "cpu").array
    encoder.precision = "bf16"
    rounded = cache.teacher_embeddings(encoder, tokens, "cpu").array
    assert rounded.dtype == np.float32
    assert not np.array_equal(rounded, exact)
    lengths = np.linalg.norm(rounded, axis=1) * np.linalg.norm(exact, axis=1)
    assert ((rounded * exact).sum(1) / lengths).min() > 0.999
