"""Faults injected from outside: what is left after them, and that a run goes on as if there had
been none.

The disk is full by a real limit (RLIMIT_FSIZE), by a real small disk, or it is /dev/full.
"""

import contextlib
import io
import os
import signal
import stat
import tarfile

import numpy as np
import pytest
from processes import SCRIPTS, largest_file, metrics, result, small_run

import analyze
import common
import dse
import ibkd
from common import WriteError
from support import demo, retrieval_training
from support.command_line import write_report
from support.encoder import load_encoder
from support.run import Run

pytestmark = pytest.mark.slow
FULL = "/dev/full"
FILE_SIZES = (0, 100, 1000, 5000, 20_000, 100_000)  # bytes; a small model has 200 kB


def content(folder):
    """{path: bytes or None for a folder} of all that is in a folder, hidden files too."""
    found = {}
    for path in sorted(folder.rglob("*")):
        found[str(path.relative_to(folder))] = path.read_bytes() if path.is_file() else None
    return found


@pytest.fixture(scope="session")
def untouched(processes, models_folder, files, tmp_path_factory):
    """untouched(script) -> the result of a small run that nothing happens to."""
    results = {}

    def run(script):
        if script not in results:
            folder = tmp_path_factory.mktemp(script) / "out"
            options = small_run(script, models_folder, files)
            process = processes.run(script, *options, "--output", folder)
            assert process.returncode == 0, process.errors
            results[script] = result(folder)
        return results[script]

    return run


def error_of(process):
    """The line of a process that invalid input or the system has ended."""
    assert process.returncode == 2, (process.returncode, process.errors)
    errors = [line for line in process.errors if "error" in line.lower()]
    assert errors == process.errors[-1:], process.errors
    return errors[0].removeprefix("error: ")


# ---- a disk that is full


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_without_room_keeps_what_it_has_and_goes_on(
    processes, untouched, models_folder, files, tmp_path, script
):
    folder = tmp_path / "out"
    options = (*small_run(script, models_folder, files), "--output", folder, "--resume")
    process = processes.start(script, *options)
    process.wait_for_step(folder, 6)
    process.limit_file_size(5000)
    line = error_of(process.wait())
    assert "File too large, expected a file that can be written" in line
    assert str(folder) in line
    assert f"{folder} keeps its best student (dev " in line
    assert line.endswith("; --resume continues once there is room")
    assert not [path for path in folder.rglob(".*") if path.name != ".lock"], "half written"
    assert processes.run(script, *options).returncode == 0
    assert result(folder) == untouched(script)


def test_a_small_disk_that_is_full_then_not(processes, untouched, models_folder, files, small_disk):
    disk = small_disk(megabytes=3)
    folder = disk / "out"
    options = (*small_run("ckd", models_folder, files), "--output", folder, "--resume")
    process = processes.start("ckd", *options)
    process.wait_for_step(folder, 6)
    with contextlib.suppress(OSError), open(disk / "other", "wb", buffering=0) as other:
        while other.write(b"x" * 10_000):
            pass
    line = error_of(process.wait())
    assert "No space left on device" in line
    assert line.endswith("; --resume continues once there is room")
    assert error_of(processes.run("ckd", *options))  # still full
    (disk / "other").unlink()
    assert processes.run("ckd", *options).returncode == 0
    assert result(folder) == untouched("ckd")


def test_a_folder_that_cannot_be_made_is_found_before_anything_is_computed(
    processes, models_folder, files, tmp_path
):
    (tmp_path / "file").write_text("mine")
    options = small_run("distilface", models_folder, files)
    process = processes.run("distilface", *options, "--output", tmp_path / "file" / "out")
    assert f"{tmp_path}/file/out/" in error_of(process)
    assert "Not a directory" in error_of(process)
    assert (tmp_path / "file").read_text() == "mine"


def test_standard_output_that_takes_nothing(processes, models_folder, files, tmp_path):
    model = models_folder / "mean"
    process = processes.run("eval_sts", model, "--pairs", files / "dev.tsv", output=FULL)
    assert error_of(process).startswith("standard output")
    assert "No space left on device" in error_of(process)
    options = (*small_run("distilface", models_folder, files), "--output", tmp_path / "out")
    process = processes.run("distilface", *options, output=FULL)
    assert "No space left on device" in error_of(process)
    assert (tmp_path / "out" / "README.md").exists()  # all but the table is done


def test_a_device_is_written_to_and_not_replaced(processes, models_folder, files):
    model = models_folder / "mean"
    process = processes.run("eval_sts", model, "--pairs", files / "dev.tsv", "--json", FULL)
    assert error_of(process).startswith(f"{FULL}: No space left on device")
    assert "Spearman" in process.output.read_text() or "dev" in process.output.read_text()
    process = processes.run("quantize", model, "--pairs", files / "dev.tsv", "--output", FULL)
    assert error_of(process) == f"{FULL}: it is not a file, expected one"
    assert stat.S_ISCHR(os.stat(FULL).st_mode)


@pytest.mark.parametrize("program", ["eval_sts", "analyze", "quantize"])
def test_a_report_that_cannot_be_written_is_found_first(
    processes, models_folder, files, tmp_path, program
):
    (tmp_path / "file").write_text("mine")
    target = tmp_path / "file" / "x.json"
    options = {
        "eval_sts": (models_folder / "mean", "--json", target),
        "analyze": ("space", models_folder / "mean", "--output", target),
        "quantize": (models_folder / "mean", "--output", target),
    }[program]
    # There is no such file, which would be found later.
    process = processes.run(program, *options, "--pairs", tmp_path / "none.tsv")
    assert "Not a directory, expected a file that can be written" in error_of(process)


def test_a_model_is_saved_whole_or_not_at_all(models_folder, tmp_path):
    """Weights, tokenizer and heads are written by three libraries."""
    encoder = load_encoder(models_folder / "pooler")
    encoder.save(tmp_path / "old")
    before = content(tmp_path / "old")
    encoder.add_head(encoder.heads[0].linear, encoder.heads[0].activation)
    for size in FILE_SIZES:
        with largest_file(size), pytest.raises(WriteError) as error:
            encoder.save(tmp_path / "old")
        assert str(error.value).startswith(f"{tmp_path}/old: File too large")
        assert content(tmp_path / "old") == before
        with largest_file(size), pytest.raises(WriteError):
            encoder.save(tmp_path / "new")
        assert content(tmp_path / "new") == {}


def test_a_pair_student_is_saved_whole_or_not_at_all(models_folder, tmp_path):
    student = dse.Student(dse.new_encoder(models_folder / "bert", "0,1"), classes=2)
    teacher = dse.CrossEncoder(models_folder / "wide", "mrpc", 64)
    dse.save_student(student, tmp_path)
    teacher.save(tmp_path / "teacher")
    before = content(tmp_path)
    student.head.w.weight.data.zero_()
    student.encoder.model.embeddings.word_embeddings.weight.data.zero_()
    for size in FILE_SIZES:
        with largest_file(size), pytest.raises(WriteError, match="File too large"):
            dse.save_student(student, tmp_path)
        with largest_file(size), pytest.raises(WriteError, match="File too large"):
            teacher.save(tmp_path / "teacher")
        assert content(tmp_path) == before


def test_reports_and_figures_are_written_whole_or_not_at_all(tmp_path):
    plt = analyze.load_matplotlib()
    figure, axes = plt.subplots()
    axes.plot([1, 2])
    numbers = {str(number): number for number in range(1000)}
    analyze.write(tmp_path / "x", numbers, figure)
    write_report(tmp_path / "link.json", {})
    (tmp_path / "y.json").symlink_to(tmp_path / "link.json")
    before = content(tmp_path)
    for size in FILE_SIZES[:4]:
        with largest_file(size), pytest.raises(WriteError, match="the old one is whole"):
            write_report(tmp_path / "y.json", numbers)
        with largest_file(size), pytest.raises(WriteError, match="x.png: File too large"):
            analyze.write(tmp_path / "x", numbers, figure)
        with largest_file(size), pytest.raises(WriteError, match="nothing was written"):
            demo.write_rows(tmp_path / "rows", [["text"]] * 10_000)
    assert content(tmp_path) == before
    write_report(tmp_path / "y.json", {"a": 1})
    assert (tmp_path / "y.json").is_symlink()
    assert "a" in (tmp_path / "link.json").read_text()


def test_the_cache_without_room(models_folder, tmp_path, monkeypatch):
    """Neither a tar file nor embeddings are taken for whole when they are not."""
    monkeypatch.setattr(common.Cache, "folder", tmp_path / "cache")
    with tarfile.open(tmp_path / "data.tar", "w") as archive:
        info = tarfile.TarInfo("STS/a.txt")
        info.size = 50_000
        archive.addfile(info, io.BytesIO(b"x" * 50_000))
    with largest_file(20_000), pytest.raises(WriteError, match="File too large.*nothing was unpac"):
        common.resolve(tmp_path / "data.tar")
    assert content(tmp_path / "cache") == {}
    assert (common.resolve(tmp_path / "data.tar") / "STS" / "a.txt").stat().st_size == 50_000


def test_negatives_are_written_whole_or_not_at_all(tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"_id": "d0", "text": "a passage"}\n')
    data = retrieval_training.TrainingData(np.array([0]), ["q" * 3000], ["a query"], [[0]], [[0]])
    file = tmp_path / "negatives.tsv"
    with largest_file(1000), pytest.raises(WriteError, match="negatives.tsv: File too large"):
        retrieval_training.write_negatives(file, tmp_path, data, np.array([[0]]))
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


# ---- signals and company


@pytest.mark.parametrize("script", SCRIPTS)
def test_sigterm_and_ctrl_c_end_a_step_and_the_run_goes_on_bit_by_bit(
    processes, untouched, models_folder, files, tmp_path, script
):
    folder = tmp_path / "out"
    options = (*small_run(script, models_folder, files), "--output", folder, "--resume")
    for number, status, new in ((signal.SIGTERM, 143, 2), (signal.SIGINT, 130, 2)):
        # New lines say that it has begun to train, and minds signals.
        lines = len(metrics(folder)) + new
        process = processes.start(script, *options)
        process.wait_until(lambda lines=lines: len(metrics(folder)) >= lines)
        process.send_signal(number)
        code = process.wait().returncode
        assert code == status, (number, lines, metrics(folder), process.errors)
        line = process.errors[-1]
        if number == signal.SIGTERM:  # the other one may come between two stages
            assert f"interrupted; {folder} has the checkpoint of step " in line
        assert line.startswith("error: interrupted; ")
        assert line.endswith("; the same command with --resume continues")
        assert sum("error" in line for line in process.errors) == 1
    assert processes.run(script, *options).returncode == 0
    assert result(folder) == untouched(script)


@pytest.mark.parametrize("stage", ["teacher", "student"])
def test_ctrl_c_behind_the_last_step_of_a_stage_is_not_lost(
    call_main, monkeypatch, untouched, models_folder, files, tmp_path, stage
):
    """While its checkpoint is written, when the step has asked for signals already."""
    options = (*small_run("dse", models_folder, files), "--output", tmp_path / "out", "--resume")
    log = untouched("dse")[1]
    last_step = max(line["step"] for line in log if line["stage"] == stage)
    checkpoint = Run.checkpoint

    def then_ctrl_c(run, *arguments):
        checkpoint(run, *arguments)
        if (run.state["stage"], run.state["step"]) == (stage, last_step):
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "checkpoint", then_ctrl_c)
        with pytest.raises(KeyboardInterrupt) as error:
            call_main(dse, *options)
    assert error.value.status == 130
    call_main(dse, *options)
    assert result(tmp_path / "out") == untouched("dse")


def test_two_runs_do_not_write_into_one_folder(
    processes, untouched, models_folder, files, tmp_path
):
    folder = tmp_path / "out"
    options = (*small_run("distilface", models_folder, files), "--output", folder)
    first = processes.start("distilface", *options)
    first.wait_for_step(folder, 3)
    first.send_signal(signal.SIGSTOP)
    for more in ("--resume", "--overwrite"):
        line = error_of(processes.run("distilface", *options, more))
        assert line.startswith(f"{folder}: process {first.pid} on ")
        assert "is writing into it; wait for its end" in line
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert str(first.pid) in (folder / ".lock").read_text()
    assert processes.run("distilface", *options, "--resume").returncode == 0
    assert result(folder) == untouched("distilface")
    assert not (folder / ".lock").exists()


def test_a_closed_pipe_ends_quietly(processes, models_folder, files, tmp_path):
    """As `| head -1` closes it."""
    os.mkfifo(tmp_path / "pipe")
    pairs = ("--pairs", files / "dev.tsv")
    process = processes.start("eval_sts", models_folder / "mean", *pairs, output=tmp_path / "pipe")
    os.close(os.open(tmp_path / "pipe", os.O_RDONLY))  # waits for the process to open it
    assert process.wait().returncode == 128 + signal.SIGPIPE
    assert process.errors == []


def test_a_kill_between_the_stages_leaves_the_projection_of_stage_2_once(
    call_main, untouched, models_folder, files, tmp_path, monkeypatch
):
    """ibkd.py --dim: its first student is saved, and the checkpoint does not say so yet."""
    folder = tmp_path / "out"
    options = (*small_run("ibkd", models_folder, files), "--output", folder, "--resume")
    checkpoint = Run.checkpoint

    def kill(run, *arguments):
        if run.state["stage"] == "finetune":
            raise KeyboardInterrupt
        checkpoint(run, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "checkpoint", kill)
        call_main(ibkd, *options)
    call_main(ibkd, *options)
    assert result(folder) == untouched("ibkd")
