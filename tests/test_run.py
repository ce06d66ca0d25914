"""The folder of a run: the same command continues it, to the same bytes, or prints its table."""

import importlib
import itertools
import math
import random
import re
import shutil
import time
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from conftest import (
    ROOT,
    alter,
    check_student,
    demo_lines,
    dev_scores,
    losses,
    outcome,
    rows,
    scores_in_order,
)
from processes import SCRIPTS, finish, small_options, start
from safetensors import SafetensorError
from sentence_transformers import SentenceTransformer

import ckd
import common
import congen

BASE = ["--student-layers", "0,2", "--max-steps", 6, "--eval-steps", 2, "--batch-size", 16]


@pytest.fixture
def options(models_folder, files, tmp_path):
    """The words of a small run, whose files are copies that a test may change."""
    for name in ("sentences.txt", "dev.tsv"):
        shutil.copy(files / name, tmp_path)
    data = ["--train", tmp_path / "sentences.txt", "--dev", tmp_path / "dev.tsv"]
    return ["--teacher", models_folder / "mean", *data, "--output", tmp_path / "out", *BASE]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_that_is_killed_at_any_moment_ends_as_one_that_was_not(
    name, models_folder, files, tmp_path, request
):
    """By SIGKILL, `--kills` times; each time, the same command again."""
    seed = time.time_ns()
    print("the seed of the moments is", seed)
    moments = random.Random(seed)
    whole, killed, log = tmp_path / "whole", tmp_path / "killed", tmp_path / "log"
    more = ["--learn-temperature", "--queue-size", 64] if name == "ckd" else []
    finish(start(name, small_options(name, models_folder, files, whole) + more, log), log)
    lines = len(rows(whole))
    words = small_options(name, models_folder, files, killed) + more
    for kill in range(request.config.getoption("--kills")):
        process = start(name, words, log)
        after = moments.randrange(lines * kill // 10, lines * 9 // 10)
        while process.is_alive() and len(rows(killed)) <= after:
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.05))
        process.kill()
        process.join()
        assert process.exitcode == -9
    finish(start(name, words, log), log)
    assert outcome(killed) == outcome(whole)


TWO_STAGES = [("ckd", "", "finetune"), ("ibkd", "--dim 16", "finetune"), ("dse", "", "student")]


@pytest.mark.parametrize("name, more, second", TWO_STAGES)
def test_a_run_that_dies_between_its_stages_loses_neither(
    check_resume, models_folder, files, name, more, second
):
    """Before stage 2's first checkpoint, after it, and after stage 2 has saved its student."""
    words = [*small_options(name, models_folder, files, ""), *more.split()]
    check_resume(importlib.import_module(name), second, ("before", "after", 0), *words)


def test_a_finished_run_prints_its_table_and_loads_no_model(
    call_main, options, tmp_path, monkeypatch
):
    """It has saved no checkpoint, of 1.6 GB for BERT-base: it was short. ckd.py loads its student,
    on which the learning rates depend, and neither trains nor scores it."""
    saved, save = [], torch.save
    monkeypatch.setattr(torch, "save", lambda *both: (saved.append(both), save(*both)))
    for script, name in ((congen, "load_untrained_student"), (ckd, "spearman")):
        with monkeypatch.context() as patch:
            table = call_main(script, *options)
            assert not saved
            before = contents(tmp_path / "out")
            patch.setattr(script, name, None)
            patch.setattr(script, "load_encoder", None)
            assert call_main(script, *options) == table
            assert contents(tmp_path / "out") == before
        shutil.rmtree(tmp_path / "out")


def test_a_folder_that_is_not_what_was_trained_is_no_finished_run(
    fails, options, tmp_path, monkeypatch
):
    """At its end, a run scores what it loads: it must have the dev score that was logged."""
    monkeypatch.setattr(ckd, "spearman", scores_in_order(itertools.count(9.0, -1)))

    def spoil(encoder, folder):
        common.save_encoder(encoder, folder)
        alter(folder / "model.safetensors", double_first)

    monkeypatch.setattr(ckd, "save_encoder", spoil)
    line = fails(ckd, *options, "--eval-steps", 1)
    assert not (tmp_path / "out/README.md").exists()
    assert re.search(r"has a dev score of .*, and .* when it was saved; it collapsed", line)


def test_a_save_that_is_read_as_another_model_replaces_nothing(
    models_folder, tmp_path, monkeypatch
):
    encoder = common.load_encoder(models_folder / "mean")
    common.save_encoder(encoder, tmp_path / "out")
    before = contents(tmp_path / "out")
    save = transformers.PreTrainedModel.save_pretrained

    def save_another(model, folder):
        save(model, folder)
        alter(folder / "model.safetensors", double_first)

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", save_another)
    with pytest.raises(common.UserError, match="out: .*another model than was saved"):
        common.save_encoder(encoder, tmp_path / "out")
    after = contents(tmp_path / "out")
    assert {path: after[path] for path in before} == before


def double_first(tensors):
    tensors["embeddings.LayerNorm.weight"] *= 2


def test_a_log_that_a_power_cut_has_left_shorter_is_not_padded(options, parse, tmp_path):
    args = parse(ckd, *options)
    run = common.Run(common.run_settings(args, [], []), args, "distill")
    run.folder.mkdir()
    (run.folder / "metrics.jsonl").write_text('{"step": 25}\n')
    torch.save([(50, 1.0, 25, 26, None)], run.folder / "checkpoint.pt")
    assert run.begin(99, []) == (50, None)
    assert (run.best, run.best_step) == (1.0, 25)
    assert (run.folder / "metrics.jsonl").read_text() == '{"step": 25}\n'


def test_a_disk_that_is_full_names_the_log_and_what_to_do(options, parse, tmp_path):
    args = parse(ckd, *options)
    run = common.Run(common.run_settings(args, [], []), args, "distill")
    run.begin(99, [])
    log = run.folder / "metrics.jsonl"
    log.unlink()
    log.symlink_to("/dev/full")
    with pytest.raises(common.UserError) as error:
        run.log(25, loss=1.0)
    assert f"{log}: " in f"{error.value}" and "No space left on device" in f"{error.value}"
    assert "--output" in f"{error.value}" and "free disk space" in f"{error.value}"


def card_head(folder):
    """{key: value} of the YAML head of a card, as the Hub reads it."""
    return huggingface_hub.metadata_load(folder / "README.md")


SOURCE_CARDS = {  # of the student's source, and what the student's card then says of it
    "license: apache-2.0\nbase_model: some/model\n": dict(
        license="apache-2.0", base_model="some/model"
    ),
    "language: en\nbase_model:\n- some/model\nlicense: mit": dict(
        license="mit", base_model="some/model"
    ),
    "tags: [x]": {},
    None: {},
}


@pytest.mark.parametrize("head", SOURCE_CARDS)
def test_a_card_names_licence_and_base_model_as_its_source_does(
    options, parse, models_folder, tmp_path, head
):
    source = shutil.copytree(models_folder / "mean", tmp_path / "source")
    if head:
        (source / "README.md").write_text(f"---\n{head}\n---\n# A model. license: none\n")
    args = parse(ckd, *options, "--teacher", source)
    run = common.Run(common.run_settings(args, [], []), args, "distill")
    run.begin(1, [])
    run.write_card()
    found = card_head(run.folder)
    assert found.pop("tags") == ["sentence-similarity", "feature-extraction"]
    assert found == SOURCE_CARDS[head]


def test_a_card_names_a_base_model_of_the_Hub(options, parse, tmp_path):
    args = parse(ckd, *options, "--teacher", common.MINILM)
    run = common.Run(common.run_settings(args, [], []), args, "distill")
    run.begin(1, [])
    run.write_card()
    assert card_head(run.folder)["base_model"] == common.MINILM


def test_another_run_is_refused_and_nothing_is_touched(
    call_main, fails, options, tmp_path, monkeypatch
):
    """The line names the first option that differs, or that the texts or the code have changed."""
    call_main(ckd, *options)
    out = tmp_path / "out"
    before = contents(out)
    assert f"{out}: has other files, or a run with --seed 0, not 5; choose" in fails(
        ckd, *options, "--seed", 5
    )
    for module in (ckd, common):
        edited = tmp_path / f"{module.__name__}.py"
        edited.write_text(Path(module.__file__).read_text("utf-8") + "# another loss\n")
        with monkeypatch.context() as patch:
            patch.setattr(module, "__file__", str(edited))
            assert "or a run with its code: " in fails(ckd, *options)
    text = (tmp_path / "dev.tsv").read_text()
    (tmp_path / "dev.tsv").write_text(text + "a boy\ta lad\t4\n")
    assert "or a run with its texts: " in fails(ckd, *options)
    assert contents(out) == before


@pytest.mark.parametrize("owner", [torch, transformers.PreTrainedModel])
def test_a_disk_that_is_full_for_a_while_loses_nothing(
    call_main, fails, options, tmp_path, monkeypatch, owner
):
    """The third write fails; with space again, the same command ends with the same student."""
    name = "save" if owner is torch else "save_pretrained"
    write, writes = getattr(owner, name), []
    monkeypatch.setattr(common, "CHECKPOINT_SECONDS", 0)
    monkeypatch.setattr(common, "LOG_STEPS", 2)
    monkeypatch.setattr(ckd, "spearman", scores_in_order(itertools.count(1.0)))
    call_main(ckd, *options, "--output", tmp_path / "whole")

    def write_until_full(*arguments, **further):
        writes.append(arguments)
        if len(writes) == 3:
            raise SafetensorError("No space left on device")  # which is no OSError
        write(*arguments, **further)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, write_until_full)
        assert "No space left on device; " in fails(ckd, *options)
    call_main(ckd, *options)
    assert outcome(tmp_path / "out")[2] == outcome(tmp_path / "whole")[2]


def test_without_progress_a_stage_ends_and_keeps_its_start(
    call_main, options, models_folder, tmp_path, monkeypatch
):
    """Dev scores that fall: the first that is two epochs or more after the best ends the stage."""
    said = []
    monkeypatch.setattr(ckd, "spearman", scores_in_order(itertools.count(100.0, -1)))
    monkeypatch.setattr(common, "note", said.append)
    (tmp_path / "sentences.txt").write_text("\n".join(demo_lines("sentences.txt", 32)))
    more = ["--max-steps", 99, "--epochs", 9, "--patience", 2, "--eval-steps", 5]
    assert "(step 0 of 5)" in call_main(ckd, *options, *more)
    assert max(step for _, step in dev_scores(tmp_path / "out")) == 5
    found, start = common.load_encoder(tmp_path / "out"), models_folder / "mean"
    expected = common.load_encoder(start, layers="0,2")
    assert all(map(torch.equal, found.parameters(), expected.parameters()))
    (line,) = [line for line in said if "no step improved" in line]
    assert line == "distill: no step improved the dev score; docs/engineering.md has advice"
    page = (ROOT / "docs/engineering.md").read_text("utf-8")
    assert "\n## When no step improved the dev score\n" in page


DATA = "--train sentences.txt --dev dev.tsv --epochs 2 --batch-size 32 --eval-steps 4 --lr 1e-3"
STAGE_2 = "--triplets triplets.csv --finetune-epochs 1 --finetune-batch-size 32"
TRAINED = [  # script, its options, dimension of the student; the teacher is "mean" unless given
    ("ckd", "--student-layers 0,2 --objective kd", 32),
    ("ckd", "--teacher wide --student mean --learn-temperature --group-by-length", 32),
    ("ckd", "--teacher wide --student pooler --student-layers 1", 32),
    ("ckd", "--teacher roberta --student roberta --pooling lasttoken", 32),
    ("ckd", f"{STAGE_2} --student-layers 0,2 --queue-size 0 --precision bf16", 32),
    ("congen", "--teacher wide --student bert --pairs pairs.tsv", 48),
    ("congen", "--teacher wide --student distilbert --alpha 1 --queue-size 50", 48),
    ("ibkd", f"{STAGE_2} --teacher wide --student bert --kernel imq --dim 16", 16),
    ("ibkd", f"{STAGE_2} --teacher wide --student-layers 1,3 --keep-mapping --dim 16", 16),
    ("ibkd", f"{STAGE_2} --student distilbert --batch-negatives --kernel linear", 32),
]


@pytest.mark.parametrize("name, more, dimension", TRAINED)
def test_a_run_leaves_the_best_student_for_everybody(
    call_main, models_folder, files, tmp_path, name, more, dimension
):
    """dse.py's and distilface.py's students are in their own tests."""
    paths = {path.name: path for path in (*models_folder.iterdir(), *files.iterdir())}
    words = [paths.get(word, word) for word in f"--teacher mean {DATA} {more}".split()]
    out, script = tmp_path / "out", importlib.import_module(name)
    printed = call_main(script, *words, "--output", out)
    scores = dev_scores(out)
    expected = [("distill", step) for step in range(0, 9 if "--pairs" in more else 21, 4)]
    if STAGE_2 in more:
        expected += [("finetune", 0), ("finetune", 4)]
    assert list(scores) == expected
    assert all(math.isfinite(loss) for loss in losses(out).values())
    best = max(score for (stage, _), score in scores.items() if stage == expected[-1][0])
    vectors = check_student(script, out, files / "dev.tsv", best, printed)
    assert vectors.shape[1] == dimension


@pytest.mark.parametrize(
    "name, dtype", [("ckd", np.float64), ("congen", np.float32), ("ibkd", np.float16)]
)
def test_embeddings_of_another_program_train_as_the_teacher_itself(
    call_main, models_folder, files, tmp_path, monkeypatch, name, dtype
):
    """The same losses; the teacher is neither loaded nor in the table."""
    monkeypatch.setattr(common, "LOG_STEPS", 1)
    script = importlib.import_module(name)
    data = ["--train", files / "sentences.txt", "--dev", files / "dev.tsv", "--max-steps", 4]
    data += ["--student", models_folder / "bert", "--batch-size", 16]
    call_main(script, *data, "--teacher", models_folder / "mean", "--output", tmp_path / "teacher")
    theirs = SentenceTransformer(str(models_folder / "mean"), device="cpu")
    file = tmp_path / "embeddings.npy"
    np.save(file, theirs.encode(demo_lines("sentences.txt", 300)).astype(dtype))
    options = ["--teacher-embeddings", file, "--output", tmp_path / "file"]
    assert "| teacher" not in call_main(script, *data, "--teacher", "nowhere", *options)
    tolerance = 1e-2 if dtype == np.float16 else 1e-5
    expected = pytest.approx(losses(tmp_path / "teacher"), abs=tolerance)
    assert losses(tmp_path / "file") == expected
