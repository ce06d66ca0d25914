"""The folder of a run: what it keeps, what it refuses, how it goes on."""

import importlib
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import demo_lines, dev_scores, rows
from processes import SCRIPTS, small_options
from safetensors import SafetensorError

import ckd
import common
import congen

BASE = ["--student-layers", "0,2", "--max-steps", 6, "--eval-steps", 2, "--batch-size", 16]


@pytest.fixture
def options(models_folder, files, tmp_path):
    """The words of a small run, whose files are copies that a test may change."""
    for name in ("sentences.txt", "dev.tsv"):
        (tmp_path / name).write_bytes((files / name).read_bytes())
    data = ["--train", tmp_path / "sentences.txt", "--dev", tmp_path / "dev.tsv"]
    return ["--teacher", models_folder / "mean", *data, "--output", tmp_path / "out", *BASE]


def test_a_run_in_the_way_is_kept(call_main, fails, options, tmp_path, monkeypatch):
    """Unless it is to be overwritten, by a run whose input can be read and is not that run."""
    printed = call_main(ckd, *options)
    weights, log = tmp_path / "out" / "model.safetensors", tmp_path / "out" / "metrics.jsonl"
    before = weights.read_bytes(), log.read_bytes()
    assert call_main(ckd, *options, "--resume") == printed  # it is finished
    assert "--overwrite" in fails(ckd, *options)
    assert "missing.txt" in fails(ckd, *options, "--overwrite", "--train", "missing.txt")
    itself = ["--student", tmp_path / "out", "--student-layers", "0"]
    assert "--output" in fails(ckd, *options, "--overwrite", *itself)
    assert (weights.read_bytes(), log.read_bytes()) == before
    call_main(ckd, *options, "--overwrite", "--seed", 5)
    assert json.loads((tmp_path / "out" / "args.json").read_text())["seed"] == 5
    assert weights.read_bytes() != before[0]
    monkeypatch.delattr(common.Run, "resume")
    with pytest.raises(AttributeError):
        call_main(ckd, *options, "--overwrite")
    assert not weights.exists() and not (tmp_path / "out" / "README.md").exists()


@pytest.mark.parametrize("more", [[], ["--overwrite"], ["--resume"]])
def test_a_folder_that_no_run_wrote_is_never_touched(fails, options, tmp_path, more):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "args.json").write_text('{"of": "another program"}')
    (tmp_path / "out" / "model.safetensors").write_bytes(b"precious")
    assert "--output" in fails(ckd, *options, *more)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"precious"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_does_not_delete_what_it_reads(fails, models_folder, files, tmp_path, name):
    """A model inside --output, such as the teacher that dse.py has left there."""
    out = tmp_path / "out"
    shutil.copytree(models_folder / "bert", out / "teacher")
    common.write_json(out / "args.json", dict(program=common.PROGRAM))
    words = small_options(name, models_folder, files, out)
    line = fails(importlib.import_module(name), *words, "--student", out / "teacher", "--overwrite")
    assert f"contains {out / 'teacher'}, which would be overwritten" in line
    assert (out / "teacher" / "model.safetensors").exists()


def test_a_run_is_not_resumed_with_other_input(call_main, fails, options, tmp_path, models_folder):
    """The error names what is different: an option, or the content behind the same name."""
    teacher = common.load_encoder(models_folder / "mean")
    common.save_encoder(teacher, tmp_path / "teacher")
    options += ["--teacher", tmp_path / "teacher"]
    call_main(ckd, *options)
    resumed = [*options, "--resume"]
    assert "another lr" in fails(ckd, *resumed, "--lr", 0.5)
    for content, name in (("train", "sentences.txt"), ("dev", "dev.tsv")):
        text = (tmp_path / name).read_text()
        other = text.replace("a dog", "a cat").replace("A man", "A boy")  # as many tokens
        (tmp_path / name).write_text(other)
        assert f"another {content} (content)" in fails(ckd, *resumed)
        (tmp_path / name).write_text(text)
    assert "another teacher_pooling" in fails(ckd, *resumed, "--teacher-pooling", "cls")
    assert "another prompt" in fails(ckd, *resumed, "--prompt", "a ")
    assert "another student" in fails(ckd, *resumed, "--student", models_folder / "bert")
    bias = teacher.model.encoder.layer[0].output.dense.bias
    changes = (teacher, "normalize", False), (teacher, "prompt", "a "), (teacher, "pooling", "cls")
    for part, name, value in (*changes, (bias, "data", bias.data + 1)):
        before = getattr(part, name)
        setattr(part, name, value)
        common.save_encoder(teacher, tmp_path / "teacher")
        assert "another teacher (content)" in fails(ckd, *resumed)
        setattr(part, name, before)


def test_what_came_after_the_checkpoint_is_logged_once(call_main, options, tmp_path, monkeypatch):
    """A run that dies between two checkpoints goes on from the first of them."""
    monkeypatch.setattr(common, "LOG_STEPS", 1)
    steps = []
    loss = ckd.contrastive_distillation_loss

    def watched(*arguments):
        steps.append(len(steps) + 1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return loss(*arguments)

    common.write_json(tmp_path / "out" / ".args.json.new", {})  # it was killed before
    objective = ckd.OBJECTIVES["ckd"]._replace(loss=watched)
    monkeypatch.setitem(ckd.OBJECTIVES, "ckd", objective)
    with pytest.raises(KeyboardInterrupt):
        call_main(ckd, *options)
    assert [row["step"] for row in rows(tmp_path / "out")] == [0, 1, 2, 2, 3]
    call_main(ckd, *options, "--resume")
    assert [row["step"] for row in rows(tmp_path / "out") if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert len(steps) == 4 + 4  # step 3 and 4 again, then 5 and 6
    lines = rows(tmp_path / "out")
    assert all(row["sentences_per_second"] > 0 for row in lines if "loss" in row)


@pytest.mark.parametrize("script", [ckd, congen])
def test_patience_ends_a_stage(call_main, options, tmp_path, monkeypatch, script):
    """Dev scores that fall: the first that is two epochs or more after the best ends the stage."""
    falling = iter(range(100, 0, -1))
    monkeypatch.setattr(script, "spearman", lambda *_, **__: {"dev": float(next(falling))})
    text = "\n".join(demo_lines("sentences.txt", 32)) + "\n"
    (tmp_path / "sentences.txt").write_text(text)
    call_main(script, *options, "--max-steps", 0, "--epochs", 9, "--patience", 2, "--eval-steps", 5)
    assert max(step for _, step in dev_scores(tmp_path / "out")) == 5
    assert "dev" in (tmp_path / "out" / "README.md").read_text()


def test_a_full_disk_is_one_line_and_keeps_what_was_there(fails, tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"whole")

    def full(new):
        new.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(new))

    script = SimpleNamespace(__name__="script", main=lambda: common.replace_file(weights, full))
    assert "No space left" in fails(script)
    assert weights.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [weights]


def test_a_full_disk_in_other_words(fails, options, monkeypatch):
    def full(*_):  # safetensors and tokenizers do not raise OSError
        raise SafetensorError("No space left on device")

    model = transformers.PreTrainedModel
    parts = {"checkpoint could not be written": (torch, "save")}
    parts["model could not be saved"] = (model, "save_pretrained")
    for expected, part in parts.items():
        with monkeypatch.context() as patch:
            patch.setattr(*part, full)
            assert expected in fails(ckd, *options, "--overwrite")


@pytest.mark.parametrize("device, precision", [("cpu", "fp32"), ("cuda", "bf16")])
def test_bf16_is_the_default_on_a_gpu_that_has_it(parse, monkeypatch, device, precision):
    monkeypatch.setattr(common.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(common.torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert parse(ckd, "--demo", "--device", device).precision == precision
