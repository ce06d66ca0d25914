"""ckd.py: its losses and bank against plain loops in float64, its runs from end to end."""
import json
import math
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

import ckd
import common
import demo

TINY = ("--epochs", 2, "--batch-size", 32, "--finetune-epochs", 1, "--finetune-batch-size", 32, "--eval-steps", 4, "--lr", 1e-3)


def rows(count, width, seed):
    return torch.randn(count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cosine(u, v):
    return sum(a * b for a, b in zip(u, v)) / math.sqrt(sum(a * a for a in u) * sum(b * b for b in v))


# ---- losses

@pytest.mark.parametrize("queue_size", [0, 1, 11])
def test_contrastive_distillation_is_equation_5(queue_size):
    student, teacher, queue, tau = rows(6, 5, 1), rows(6, 5, 2), rows(queue_size, 5, 3), 0.07
    total = 0.0
    for i, h in enumerate(student.tolist()):
        batch = [math.exp(cosine(h, t) / tau) for t in teacher.tolist()]
        bank = [math.exp(cosine(h, q) / tau) for q in queue.tolist()]
        total -= math.log(batch[i] / (sum(batch) + sum(bank)))
    loss = ckd.contrastive_distillation_loss(student, teacher, queue if queue_size else None, tau)
    assert loss.shape == () and loss.item() == pytest.approx(total / 6, abs=1e-10)


def test_a_student_equal_to_its_teacher_loses_nothing_as_temperature_falls():
    teacher = rows(8, 16, 1)
    losses = [ckd.contrastive_distillation_loss(3 * teacher, teacher, rows(20, 16, 2), tau).item() for tau in (1, 0.1, 0.01)]
    assert losses[0] > losses[1] > losses[2] and losses[2] < 1e-10


def test_only_the_direction_of_embeddings_counts():
    a, b, queue = rows(4, 5, 1), rows(4, 5, 2), rows(7, 5, 3)
    loss = ckd.contrastive_distillation_loss(a, b, queue, 0.1)
    assert ckd.contrastive_distillation_loss(9 * a, b / 9, 2 * queue, 0.1).item() == pytest.approx(loss.item(), abs=1e-12)


def test_mse_is_equation_2():
    student, teacher = rows(6, 5, 1), rows(6, 5, 2)
    expected = sum(sum((s - t) ** 2 for s, t in zip(hs, ht)) / 5 for hs, ht in zip(student.tolist(), teacher.tolist()))
    assert ckd.mse_loss(student, teacher).item() == pytest.approx(expected, abs=1e-10)


def test_patient_loss_is_that_of_pkd():
    student, teacher = rows(12, 5, 1).view(4, 3, 5), rows(12, 5, 2).view(4, 3, 5)
    expected = 0.0
    for sentence in range(4):
        for layer in range(3):
            s, t = student[sentence, layer].tolist(), teacher[sentence, layer].tolist()
            ns, nt = math.sqrt(sum(x * x for x in s)), math.sqrt(sum(x * x for x in t))
            expected += sum((x / ns - y / nt) ** 2 for x, y in zip(s, t)) / 5
    assert ckd.patient_loss(student, teacher).item() == pytest.approx(expected, abs=1e-10)


def test_supervised_contrast_is_equation_7():
    anchor, positive, hard, tau = rows(6, 5, 1), rows(6, 5, 2), rows(6, 5, 3), 0.05
    total = 0.0
    for i, h in enumerate(anchor.tolist()):
        p = [math.exp(cosine(h, x) / tau) for x in positive.tolist()]
        n = [math.exp(cosine(h, x) / tau) for x in hard.tolist()]
        total -= math.log(p[i] / (sum(p) + sum(n)))
    assert ckd.supervised_contrastive_loss(anchor, positive, hard, tau).item() == pytest.approx(total / 6, abs=1e-10)


@pytest.mark.parametrize("loss", [
    lambda x: ckd.contrastive_distillation_loss(x, rows(3, 4, 2), rows(5, 4, 3), 0.1), lambda x: ckd.mse_loss(x, rows(3, 4, 2)),
    lambda x: ckd.supervised_contrastive_loss(x, 2 * x.flip(1), x.flip(0), 0.1), lambda x: ckd.patient_loss(x[:, None], rows(3, 4, 2)[:, None])])
def test_gradients(loss):
    assert torch.autograd.gradcheck(loss, rows(3, 4, 1).requires_grad_())


# ---- memory bank, pooling, student

def test_the_bank_holds_the_last_embeddings_whatever_the_batches():
    rng, bank, past = np.random.default_rng(0), ckd.MemoryBank(13, 2, "cpu"), []
    assert bank.embeddings() is None
    for size in [*rng.integers(1, 13, 40), 13, 14, 40, 3]:
        batch = torch.arange(len(past), len(past) + size, dtype=torch.float32)
        bank.enqueue(torch.stack([batch, -batch], 1))
        past += batch.tolist()
        held = bank.embeddings()
        assert sorted(held[:, 0].tolist()) == past[-13:] and torch.equal(held[:, 0], -held[:, 1])
    oldest = min(range(13), key=lambda slot: bank.embeddings()[slot, 0].item())
    bank.enqueue(torch.tensor([[-7.0, 7.0]]))
    assert bank.embeddings()[oldest, 0] == -7  # the new one stands where the oldest stood
    bank.clear()
    assert bank.embeddings() is None


def test_pooling_equals_loops_and_padding_never_counts():
    states, mask = rows(12, 6, 1).view(3, 4, 6), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    for row, length in enumerate((4, 2, 1)):
        mean = sum(states[row, i] for i in range(length)) / length
        assert (ckd.pool(states, mask, "mean")[row] - mean).abs().max() < 1e-10
        assert torch.equal(ckd.pool(states, mask, "cls")[row], states[row, 0])
    noise = states.masked_fill(mask[..., None] == 0, 1e3)
    assert torch.equal(ckd.pool(noise, mask, "mean"), ckd.pool(states, mask, "mean"))


@pytest.mark.parametrize("name", ["mean", "cls", "pooler", "roberta", "distilbert"])
def test_the_student_is_read_as_its_folder_will_be(models_folder, monkeypatch, name):
    """ckd.Student and common.Encoder are written apart; what is trained must be what is saved and scored."""
    monkeypatch.setattr(sys, "argv", ["ckd.py", "--student", "x"])
    encoder = common.load_encoder(models_folder / name).eval()
    student = ckd.Student(encoder, ckd.parse_args(), width=48).eval()
    batch = common.Tokens(encoder, demo.sentences(6)).batch(np.arange(6), "cpu")
    assert torch.equal(student(*batch)[0], encoder(*batch)) and student.projection.out_features == 48


def test_defaults_are_the_papers(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ckd.py", "--student", "bert-base-uncased"])
    args = ckd.parse_args()
    assert (args.epochs, args.batch_size, args.eval_steps, args.patience) == (20, 512, 125, 3)
    assert (args.finetune_epochs, args.finetune_batch_size) == (5, 128)
    assert "roberta-large" in args.teacher and args.stage == "both" and args.objective == "ckd"


# ---- runs

def options(models_folder, files, output, teacher="mean", *more):
    return ("--teacher", models_folder / teacher, "--train", files / "sentences.txt", "--triplets", files / "triplets.csv",
            "--dev", files / "dev.tsv", "--output", output, *TINY, *more)


@pytest.mark.parametrize("teacher, more", [
    ("mean", ("--student-layers", "0,2")), ("wide", ("--student-layers", "2", "--objective", "pkd", "--temperature", 0.005)), ("mean", ("--student-layers", "1,3", "--objective", "kd")),
    ("wide", ("--student-layers", "1,3", "--objective", "pkd")), ("mean", ("--student-layers", "1", "--projection", "--learn-temperature")),
    ("wide", ("--student", "bert")), ("wide", ("--student", "pooler", "--objective", "pkd")), ("cls", ("--student", "distilbert", "--queue-size", 0)),
    ("roberta", ("--student", "roberta", "--student-layers", "0,3", "--pooling", "cls", "--dropout", 0))])
def test_a_run_leaves_the_best_student(run, models_folder, files, tmp_path, teacher, more):
    from sentence_transformers import SentenceTransformer
    more = [models_folder / word if before == "--student" else word for before, word in zip(("", *more), more)]
    out = tmp_path / "out"
    process = run("ckd.py", *options(models_folder, files, out, teacher, *more))
    assert process.returncode == 0, process.stderr[-3000:]
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    scores = [entry["dev"] for entry in entries if "dev" in entry]
    assert {entry["stage"] for entry in entries} == {"distill", "finetune"} and all(math.isfinite(entry["loss"]) for entry in entries)
    assert [entry["step"] for entry in entries if entry["stage"] == "distill"][-1] == 20
    encoder = common.load_encoder(out).eval()
    dev = common.spearman(encoder, {"dev": common.read_graded_pairs(files / "dev.tsv")})["dev"]
    last = [line.split("|") for line in process.stdout.splitlines() if "after stage 2" in line][0]
    assert dev == pytest.approx(float(last[2]), abs=0.006) and dev >= max(scores) - 1e-4
    sentences = demo.sentences(20)
    ours = common.encode(encoder, common.Tokens(encoder, sentences), "cpu")
    assert np.abs(SentenceTransformer(str(out), device="cpu").encode(sentences) - ours).max() < 1e-5
    assert not transformers.AutoModel.from_pretrained(out, output_loading_info=True)[1]["missing_keys"]
    from huggingface_hub import ModelCard
    card = ModelCard.load(out / "README.md")
    assert card.data.eval_results[0].metric_value == pytest.approx(dev, abs=0.006) and str(models_folder) not in str(card)
    assert json.loads((out / "args.json").read_text())["epochs"] == 2


@pytest.mark.parametrize("objective", ["ckd", "kd"])
def test_a_dozen_steps_bring_the_real_student_five_points_nearer(run, tmp_path, objective):
    """all-MiniLM-L6-v2 into its layers 1,3,5 on the demo's sentences: the demo test pairs, and the embeddings of other sentences."""
    process = run("ckd.py", "--demo", "--stage", "distill", "--objective", objective, "--max-steps", 12, "--output", tmp_path / "out", OMP_NUM_THREADS="2")
    assert process.returncode == 0, process.stderr[-2000:]
    table = {line.split("|")[1].strip(): float(line.split("|")[3]) for line in process.stdout.splitlines() if line.startswith("| student")}
    assert table["student after stage 1"] > table["student before"] + 5
    encoders = [common.load_encoder(name, layers=layers).eval() for name, layers in ((common.MINILM, None), (tmp_path / "out", None), (common.MINILM, "1,3,5"))]
    teacher, after, before = (common.encode(e, common.Tokens(e, demo.sentences(10_100)[10_000:]), "cpu") for e in encoders)
    assert (teacher * after).sum(1).mean() > (teacher * before).sum(1).mean() + 0.1


def weights(folder):
    return {name: value.numpy().tobytes() for name, value in load_file(folder / "model.safetensors").items()}


def test_killed_ten_times_and_resumed_it_ends_as_if_nobody_had_touched_it(run, models_folder, files, tmp_path):
    """SIGKILL at ten random moments; weights bit for bit, and the metrics but for the speed."""
    more = ("--student-layers", "0,2", "--queue-size", 100, "--epochs", 20, "--patience", 20, "--finetune-epochs", 4, "--eval-steps", 3)
    whole = run("ckd.py", *options(models_folder, files, tmp_path / "whole", "mean", *more))
    assert whole.returncode == 0, whole.stderr[-2000:]
    command = [sys.executable, "ckd.py", *map(str, options(models_folder, files, tmp_path / "killed", "mean", *more)), "--resume"]
    environment, rng, kills, steps = os.environ | {"OMP_NUM_THREADS": "1"}, random.Random(0), 0, set()
    state = tmp_path / "killed" / "checkpoint" / "state.safetensors"
    while kills < 10:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=os.path.dirname(ckd.__file__))
        before = state.stat().st_mtime_ns if state.exists() else 0
        if kills % 3:  # wait until this life has written a checkpoint, so that not all ten are spent on start-up
            while process.poll() is None and (state.stat().st_mtime_ns if state.exists() else 0) == before:
                time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.2) if kills % 3 else rng.uniform(1, 4))
        assert process.poll() is None, "the run ended before it was killed ten times"
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        if state.exists():
            steps.add(json.loads(safe_open(state, "np").metadata()["state"])["step"])
    assert len(steps) > 3  # it was killed in different places
    assert subprocess.run(command, env=environment, capture_output=True, cwd=os.path.dirname(ckd.__file__)).returncode == 0
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")

    def metrics(name):
        return [{key: value for key, value in json.loads(line).items() if key != "sentences_per_second"}
                for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    assert metrics("killed") == metrics("whole")
    again = run("ckd.py", *options(models_folder, files, tmp_path / "killed", "mean", *more), "--resume")
    assert again.returncode == 0 and "after stage 2" in again.stdout and weights(tmp_path / "killed") == weights(tmp_path / "whole")


# ---- what bad input gets

def test_bad_input_gets_one_line_and_status_2(fails, models_folder, files, tmp_path):
    out = tmp_path / "out"
    base = options(models_folder, files, out, "mean", "--student-layers", "0,2")
    texts = {"empty.txt": b"", "blank.txt": b"\n \n", "latin.txt": b"caf\xe9\n", "two.csv": b"sent0,sent1,hard_neg\na,b\n",
             "word.tsv": b"a\tb\t1\na\tb\tgood\n", "nan.tsv": b"a\tb\t1\na\tb\tnan\n", "far.tsv": b"a\tb\t1\na\tb\t7\n"}
    for name, data in texts.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "noweights").mkdir()
    for extra, expected in ((("--train", tmp_path / "none.txt"), "no such file"), (("--train", tmp_path / "empty.txt"), "the file is empty"),
                            (("--train", tmp_path / "blank.txt"), "every line is blank"), (("--train", tmp_path / "latin.txt"), "latin.txt:1: byte 4"),
                            (("--triplets", tmp_path / "two.csv"), "two.csv:2"), (("--dev", tmp_path / "word.tsv"), "word.tsv:2: score 'good'"),
                            (("--dev", tmp_path / "nan.tsv"), "nan.tsv:2"), (("--dev", tmp_path / "far.tsv"), "far.tsv:2"),
                            (("--student-layers", "0,9"), "layers 0,9"), (("--teacher", tmp_path / "noweights"), "whole model"),
                            (("--queue-size", 300), "--queue-size 300: 300 sentences, less a batch, fill 268"), (("--temperature", 0), "--temperature 0.0"),
                            (("--batch-size", "many"), "--batch-size"), (("--precision", "fp16", "--device", "cpu"), "expected cpu and fp32"),
                            (("--device", "gpu"), "--device gpu"), (("--dropout", 1), "--dropout 1.0"), (("--stage", "x"), "--stage")):
        line = fails(ckd, *base, *extra)
        assert expected in line and not out.exists(), line


def test_a_run_in_the_way_is_kept(run, fails, models_folder, files, tmp_path):
    base = options(models_folder, files, tmp_path / "out", "mean", "--student-layers", "0,2", "--stage", "distill", "--max-steps", 4)
    assert run("ckd.py", *base).returncode == 0
    before = weights(tmp_path / "out")
    assert "holds a run" in fails(ckd, *base)
    assert "--lr 0.5: the run to resume" in fails(ckd, *base, "--resume", "--lr", 0.5)
    assert "no such file" in fails(ckd, *base, "--overwrite", "--train", tmp_path / "none")
    assert weights(tmp_path / "out") == before
    assert run("ckd.py", *base, "--overwrite", "--seed", 5).returncode == 0
    assert json.loads((tmp_path / "out" / "args.json").read_text())["seed"] == 5


def test_a_loss_that_becomes_nan_stops_the_run_and_keeps_the_best_student(run, models_folder, files, tmp_path):
    base = options(models_folder, files, tmp_path / "out", "mean", "--student-layers", "0,2", "--stage", "distill", "--lr", 1e38)
    process = run("ckd.py", *base)
    assert process.returncode == 2 and "Traceback" not in process.stderr
    line = process.stderr.splitlines()[-1]
    assert line.startswith("error: step ") and "of stage distill: the loss is nan" in line and "keeps its best student" in line
    assert all(torch.isfinite(value).all() for value in load_file(tmp_path / "out" / "model.safetensors").values())
    checkpoint = load_file(tmp_path / "out" / "checkpoint" / "state.safetensors")
    assert checkpoint and all(torch.isfinite(value).all() for value in checkpoint.values())


def test_odd_but_good_data_trains(run, models_folder, files, tmp_path):
    lines = ["It's 'quoted' \"twice\"", "tab\tinside", "emoji \U0001f600 \u4e2d\u6587", "a boy " * 5000, "a\u2028b"]
    (tmp_path / "odd.txt").write_text("\n".join(lines * 10) + "\n", "utf-8")
    process = run("ckd.py", *options(models_folder, files, tmp_path / "out", "mean", "--student-layers", "0,2", "--train", tmp_path / "odd.txt"))
    assert process.returncode == 0, process.stderr[-2000:]
