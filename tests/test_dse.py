"""dse.py and glue.py: features, pooling, loss and scores against plain loops, readers, runs from end to end."""
import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import transformers

import common
import demo
import dse
import glue


def rows(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ---- features, pooling, loss, scores

def test_pair_features_are_those_of_equation_3():
    u, v = rows(4, 3, seed=1), rows(4, 3, seed=2)
    expected = [[*a, *b, *(x * y for x, y in zip(a, b)), *(abs(x - y) for x, y in zip(a, b))] for a, b in zip(u.tolist(), v.tolist())]
    assert (dse.pair_features(u, v) - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-12


@pytest.mark.parametrize("layers", [2, 4, 7])
def test_pool_last_four_is_that_of_section_3_4(layers):
    states, lengths = [rows(3, 6, 5, seed=layer) for layer in range(layers)], [6, 2, 4]
    mask = torch.tensor([[1] * length + [0] * (6 - length) for length in lengths])
    before = mask.clone()
    expected = [[sum(layer[i][t][d] for t in range(1, lengths[i])) / (lengths[i] - 1) for layer in [s.tolist() for s in states][-4:] for d in range(5)]
                for i in range(3)]
    assert (dse.pool_last_four(states, mask) - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-10
    assert torch.equal(mask, before)  # the caller's mask is left as it was


@pytest.mark.parametrize("alpha", [0, 0.3, 1])
@pytest.mark.parametrize("task", ["mrpc", "mnli", "stsb"])
def test_dse_loss_is_equation_2(alpha, task):
    classes = dict(mrpc=2, mnli=3, stsb=1)[task]
    student, teacher = rows(5, classes, seed=1), rows(5, classes, seed=2)
    labels = rows(5, seed=3) if task == "stsb" else torch.tensor([0, 1, 1, 0, classes - 1])
    total = 0.0
    for s, t, y in zip(student.tolist(), teacher.tolist(), labels.tolist()):
        distillation = sum((a - b) ** 2 for a, b in zip(s, t))
        label = (s[0] - y) ** 2 if task == "stsb" else -math.log(math.exp(s[y]) / sum(math.exp(a) for a in s))
        total += (alpha * distillation + (1 - alpha) * label) / 5
    assert dse.dse_loss(student, teacher, labels, alpha, task).item() == pytest.approx(total, abs=1e-10)
    assert torch.autograd.gradcheck(lambda s: dse.dse_loss(s, teacher, labels, alpha, task), student.requires_grad_())


def test_the_head_is_equation_3():
    torch.manual_seed(0)
    head = dse.SimilarityHead(3, 2, hidden=7).double()
    assert head.W.weight.shape == (7, 12) and head.W.bias is None and head.w.bias is None and dse.SimilarityHead(3, 2).w.in_features == 512
    u, v = rows(4, 3, seed=1), rows(4, 3, seed=2)
    for a, b, scores in zip(u.tolist(), v.tolist(), head(u, v).tolist()):
        h = [*a, *b, *(x * y for x, y in zip(a, b)), *(abs(x - y) for x, y in zip(a, b))]
        hidden = [max(0.0, sum(w * x for w, x in zip(line, h))) for line in head.W.weight.tolist()]
        assert scores == pytest.approx([sum(w * x for w, x in zip(line, hidden)) for line in head.w.weight.tolist()], abs=1e-10)


@pytest.mark.parametrize("memory", [1, 10_000, 2**28])
@pytest.mark.parametrize("classes", [1, 3])
def test_factored_scores_are_the_naive_ones(memory, classes):
    torch.manual_seed(0)
    head, u, v = dse.SimilarityHead(96, classes), rows(5, 96, seed=1).float(), rows(23, 96, seed=2).float()
    naive = torch.stack([head(a.expand(23, -1), v) for a in u]).detach()
    for scores, expected in ((head.score_matrix(u, v, memory), naive), (head.score_catalogue(u[3], v, memory), naive[3]),
                             (head.score_pairs(u.repeat(4, 1), v[:20], memory), head(u.repeat(4, 1), v[:20]).detach())):
        assert scores.shape == expected.shape and ((scores - expected).abs().max() / expected.abs().max()).item() < 1e-5


def test_scores_stay_within_the_memory_they_are_given():
    """100,000 embeddings, one query, 64 MB: naive features alone would take 1.2 GB. The peak is that of a fresh process."""
    program = ("import resource, torch, dse\n"
               "head, catalogue = dse.SimilarityHead(768, 2), torch.randn(100_000, 768)\n"
               "head.score_catalogue(catalogue[0], catalogue[:1000])\n"
               "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
               "scores = head.score_catalogue(catalogue[0], catalogue, 2**26)\n"
               "print(scores.shape[0], (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)")
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=os.path.dirname(dse.__file__)).stdout.split()
    assert int(output[0]) == 100_000 and int(output[1]) < 100_000 * 512 * 4 + 2**27  # W_v v, once for each sentence, and the blocks


# ---- the models

@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_the_student_is_read_as_its_folder_will_be(models_folder, tmp_path, name):
    """dse.Student and common.Encoder are written apart; what is trained is what eval_sts.py reads, and SentenceTransformer refuses."""
    encoder = common.load_encoder(models_folder / name, "dse.last_four", layers="0,1,3").eval()
    student = dse.Student(encoder, 2)
    batch = common.Tokens(encoder, demo.sentences(6)).batch(np.arange(6), "cpu")
    assert encoder.width == 96 and (student.embed(*batch) - encoder(*batch)).abs().max() < 1e-6
    student.save(tmp_path)
    again = dse.load_student(tmp_path)
    u = dse.embed(again, demo.sentences(6))
    assert (u - student.embed(*batch)).abs().max() < 1e-5 and (again.head(u, u.flip(0)) - student.head(u, u.flip(0))).abs().max() < 1e-6
    from sentence_transformers import SentenceTransformer
    with pytest.raises(Exception):
        SentenceTransformer(str(tmp_path), device="cpu")


def test_the_cross_encoder_reads_pairs_as_transformers_does(models_folder, tmp_path):
    torch.manual_seed(0)
    for name in (common.MINILM, models_folder / "roberta", models_folder / "distilbert"):
        teacher = dse.CrossEncoder(name, "mnli", 64).eval()
        assert teacher.fresh
        pairs = list(zip(demo.sentences(10)[:5], demo.sentences(10)[5:]))
        ours = common.encode(teacher, common.Tokens(teacher, pairs, 64), "cpu")
        batch = teacher.tokenizer([a for a, _ in pairs], [b for _, b in pairs], padding=True, return_tensors="pt")
        if "distilbert" in str(name):  # has no segments, whatever the tokenizer says
            batch.pop("token_type_ids", None)
        assert name != common.MINILM or teacher.segments and batch["token_type_ids"].sum() > 20
        assert np.abs(teacher.model(**batch).logits.detach().numpy() - ours).max() < 1e-5
    (tmp_path / "teacher").mkdir()
    teacher.save(tmp_path / "teacher")
    assert not dse.CrossEncoder(tmp_path / "teacher", "mnli", 64).fresh


def test_a_teachers_classes_are_put_in_the_tasks_order(models_folder, tmp_path):
    names = ["contradiction", "neutral", "entailment"]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        models_folder / "bert", id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)})
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(models_folder / "bert").save_pretrained(tmp_path)
    assert dse.CrossEncoder(tmp_path, "mnli", 64).order == [2, 1, 0]


# ---- GLUE's files

MRPC = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"


@pytest.fixture(scope="session")
def glue_folder(tmp_path_factory):
    """MRPC and STS-B of the demo's pairs, in GLUE's own layout."""
    root = tmp_path_factory.mktemp("glue")
    (root / "MRPC").mkdir()
    (root / "STS-B").mkdir()
    for seed, (split, count) in enumerate((("train", 200), ("dev", 60), ("test", 60))):
        pairs = list(zip(*demo.graded(count, seed=20 + seed)))
        (root / "MRPC" / f"{split}.tsv").write_text(MRPC + "".join(f"{int(score > 2.5)}\t1\t2\t{a}\t{b}\n" for a, b, score in pairs), "utf-8")
        (root / "STS-B" / f"{split}.tsv").write_text("index\tsentence1\tsentence2\tscore\n" + "".join(f"{i}\t{a}\t{b}\t{score}\n" for i, (a, b, score) in enumerate(pairs)))
    return root


def test_glues_files_are_read_by_their_headers(tmp_path):
    (tmp_path / "MNLI").mkdir()
    (tmp_path / "SNLI").mkdir()
    header = "index\tgenre\tsentence1\tsentence2\tlabel1\tgold_label\n"
    for path, labels in (("MNLI/train.tsv", ("neutral", "-")), ("MNLI/dev_matched.tsv", ("entailment",)), ("MNLI/dev_mismatched.tsv", ("contradiction",)),
                         ("SNLI/train.tsv", ("contradiction",)), ("SNLI/test.tsv", ("neutral", "neutral"))):
        (tmp_path / path).write_text(header + "".join(f"0\tx\tA \"boy\" runs.\tHe's in {path}\tneutral\t{label}\n" for label in labels), "utf-8")
    sets = glue.read_task(tmp_path, "mnli")
    assert set(sets) == {"train", "dev", "matched", "mismatched"} and sets["train"].labels.tolist() == [1] and sets["mismatched"].labels.tolist() == [2]
    sets = glue.read_task(tmp_path, "allnli")
    assert sets["train"].labels.tolist() == [1, 2] and sets["train"].second == ["He's in MNLI/train.tsv", "He's in SNLI/train.tsv"] and len(sets["snli"].first) == 2
    (tmp_path / "QNLI").mkdir()
    for split in ("train", "dev"):
        (tmp_path / "QNLI" / f"{split}.tsv").write_text("index\tquestion\tsentence\tlabel\n0\tWho?\tHe.\tnot_entailment\n")
    (tmp_path / "QNLI" / "test.tsv").write_text("index\tquestion\tsentence\n0\tWho?\tHe.\n")
    sets = glue.read_task(tmp_path, "qnli")
    assert set(sets) == {"train", "dev"} and sets["dev"].labels.tolist() == [1]


def test_the_hubs_json_lines_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text1": "A", "text2": "B", "label": 2}\n{"text1": "C", "text2": "D", "label": 0}\n')
    assert glue.read_pairs(tmp_path / "a.jsonl", "mnli").labels.tolist() == [2, 0]
    (tmp_path / "b.jsonl").write_text('{"text1": "A", "text2": "B", "label": 3.5}\n')
    assert glue.read_pairs(tmp_path / "b.jsonl", "stsb").labels.tolist() == [3.5]
    (tmp_path / "c.jsonl").write_text('{"text1": "A", "text2": "B", "label": -1}\n')
    assert glue.read_pairs(tmp_path / "c.jsonl", "qqp") is None


@pytest.mark.parametrize("task, name, text, expected", [
    ("mrpc", "train.tsv", MRPC.replace("Quality", "label") + "1\t1\t2\tA\tB\n", "train.tsv:1: no column 'Quality', expected a header with #1 String"),
    ("mrpc", "train.tsv", MRPC + "1\t1\t2\tA\tB\n2\t1\t2\tA\tB\n", "train.tsv:3: label '2', expected two sentences and 0 or 1"),
    ("mrpc", "train.tsv", MRPC + "1\t1\t2\tA\n", "train.tsv:2: 4 tab-separated columns, expected 5"),
    ("mrpc", "train.tsv", MRPC + "1\t1\t2\tA\t\n", "an empty sentence"), ("mrpc", "train.tsv", MRPC, "no pairs"),
    ("stsb", "train.tsv", "sentence1\tsentence2\tscore\nA\tB\tnan\n", "train.tsv:2: score 'nan'"), ("mrpc", "a.jsonl", "{\n", "a.jsonl:1: '{', expected JSON"),
    ("mrpc", "a.jsonl", '{"text1": "A", "text2": "B", "label": 7}\n', "a.jsonl:1: label '7'")])
def test_bad_files_are_named_with_their_line(tmp_path, task, name, text, expected):
    (tmp_path / name).write_text(text)
    with pytest.raises(common.DataError) as error:
        glue.read_pairs(tmp_path / name, task)
    assert expected in str(error.value)


def test_metrics_against_sklearns_formulas(shared_data):
    """Accuracy and F1 counted by hand; Spearman of MiniLM's published STS-B test score from GLUE's own files, by cosine."""
    scores, labels = np.array([[0, 1], [1, 0], [0, 1], [0, 1], [1, 0.0]]), np.array([1, 1, 0, 1, 0])
    result = glue.metrics(scores, labels, "mrpc")
    precision, recall = 2 / 3, 2 / 3
    assert result["accuracy"] == pytest.approx(60) and result["F1"] == pytest.approx(100 * 2 * precision * recall / (precision + recall))
    assert glue.metrics(scores, labels, "qnli") == {"accuracy": pytest.approx(60)}
    sets = glue.read_task(shared_data / "glue", "stsb")
    encoder = common.load_encoder(common.MINILM).eval()
    u, v = (common.encode(encoder, common.Tokens(encoder, side), "cpu") for side in sets["test"][:2])
    assert glue.metrics((u * v).sum(1, keepdims=True), sets["test"].labels, "stsb")["Spearman"] == pytest.approx(82.03, abs=0.01)
    assert {name: len(pairs.first) for name, pairs in glue.read_task(shared_data / "glue", "mrpc").items()} == {"train": 3668, "dev": 408, "test": 1725}


# ---- runs

def options(models_folder, glue_folder, output, *more):
    return ("--teacher", models_folder / "wide", "--glue", glue_folder, "--output", output, "--epochs", 2, "--teacher-epochs", 1, "--batch-size", 20,
            "--lr", 1e-3, "--eval-steps", 5, *more)


@pytest.mark.parametrize("more", [("--student-layers", "0,1,3"), ("--task", "stsb", "--student", "bert", "--alpha", 1), ("--student", "distilbert", "--freeze-encoder", "--alpha", 0)])
def test_a_run_leaves_the_best_student(run, models_folder, glue_folder, tmp_path, more):
    more = [models_folder / word if before == "--student" else word for before, word in zip(("", *more), more)]
    out = tmp_path / "out"
    process = run("dse.py", *options(models_folder, glue_folder, out, *more))
    assert process.returncode == 0, process.stderr[-3000:]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in process.stdout.splitlines()]
    assert [row[0] for row in table[2:]] == ["untrained, cosine", "teacher", "student"] and table[0][-1] == "degradation %" and table[3][-1] == "0.00"
    task = "stsb" if "stsb" in more else "mrpc"
    student, test = dse.load_student(out), glue.read_task(glue_folder, task)["test"]
    u, v = dse.embed(student, test.first), dse.embed(student, test.second)
    scores = glue.metrics(student.head.score_pairs(u, v).numpy(), test.labels, task)
    assert [f"{value:.2f}" for value in scores.values()] == table[4][3:5]
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [entry["stage"] for entry in entries if "dev" in entry] == ["teacher"] * 2 + ["student"] * 4
    sts = run("eval_sts.py", out, "--pairs", "none")  # the folder is read by its own pooling; the pairs are not there
    assert "none: No such file" in sts.stderr
    from huggingface_hub import ModelCard
    card = ModelCard.load(out / "README.md")
    assert card.data.library_name == "transformers" and str(models_folder) not in str(card)
    if "--freeze-encoder" in more:
        plain = common.load_encoder(models_folder / "distilbert", "dse.last_four")
        assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), student.encoder.state_dict().values()))


def test_a_fine_tuned_teacher_is_used_as_it_is_and_its_logits_are_kept(run, models_folder, glue_folder, tmp_path):
    base = options(models_folder, glue_folder, tmp_path / "first", "--student", models_folder / "bert")
    assert run("dse.py", *base, XDG_CACHE_HOME=str(tmp_path)).returncode == 0
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("teacher-*.npy")}
    again = options(models_folder, glue_folder, tmp_path / "second", "--student", models_folder / "bert", "--teacher", tmp_path / "first" / "teacher")
    process = run("dse.py", *again, XDG_CACHE_HOME=str(tmp_path))
    assert process.returncode == 0 and len(kept) == 1 and {path: path.stat().st_mtime_ns for path in tmp_path.rglob("teacher-*.npy")} == kept
    assert all((tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes() for name in ("model.safetensors", "head.safetensors"))


def test_killed_and_resumed_it_ends_as_if_nobody_had_touched_it(run, models_folder, glue_folder, tmp_path):
    more = ("--student-layers", "0,2", "--eval-steps", 2)
    assert run("dse.py", *options(models_folder, glue_folder, tmp_path / "whole", *more)).returncode == 0
    command = [sys.executable, "dse.py", *map(str, options(models_folder, glue_folder, tmp_path / "killed", *more)), "--resume"]
    where = dict(env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=os.path.dirname(dse.__file__))
    state = tmp_path / "killed" / "checkpoint" / "state.safetensors"
    for kill in range(4):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **where)
        before = state.stat().st_mtime_ns if state.exists() else 0
        while process.poll() is None and (state.stat().st_mtime_ns if state.exists() else 0) == before:
            time.sleep(0.002)
        time.sleep(0.15 * kill)
        assert process.poll() is None, "the run ended before it was killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert subprocess.run(command, capture_output=True, **where).returncode == 0
    for name in ("teacher/model.safetensors", "head.safetensors", "model.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes(), name


def test_the_benchmark_prints_both_tables(run, models_folder):
    process = run("dse.py", "--benchmark", "--teacher", models_folder / "bert", "--student-layers", "0,1")
    assert process.returncode == 0, process.stderr[-2000:]
    lines = process.stdout.splitlines()
    assert "extrapolated" in lines[0] and "934.00" in lines[2] and "13594.00" in lines[3] and lines[4].startswith("cross-encoder: 4 layers of 32")


def test_bad_input_gets_one_line_and_status_2(fails, models_folder, glue_folder, tmp_path):
    out = tmp_path / "out"
    base = options(models_folder, glue_folder, out)
    wrong = tmp_path / "three"
    dse.CrossEncoder(models_folder / "bert", "mnli", 64).model.save_pretrained(wrong)
    transformers.AutoTokenizer.from_pretrained(models_folder / "bert").save_pretrained(wrong)
    for extra, expected in ((("--teacher", wrong), "a classifier of 3 labels, expected 2 for task mrpc"), (("--task", "qnli"), "QNLI/train.tsv: no such file"),
                            (("--glue", tmp_path / "none"), "MRPC/train.tsv: no such file"), (("--alpha", 1.5), "--alpha 1.5"), (("--teacher", tmp_path / "none"), "not a local path"),
                            (("--student-layers", "9"), "layers 9"), (("--device", "gpu"), "--device gpu"), (("--lr", -1), "--lr -1.0"), (("--task", "rte"), "--task")):
        line = fails(dse, *base, *extra)
        assert expected in line and not out.exists(), line
    with pytest.raises(common.DataError, match="head.safetensors: no such file"):
        dse.load_student(models_folder / "bert")
