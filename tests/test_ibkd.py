"""ibkd.py: its kernels and losses against plain loops, its runs from end to end, for both tasks."""
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
from safetensors import safe_open

import common
import demo
import ibkd
from test_eval_retrieval import beir


def rows(count, width, seed):
    return torch.randn(count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cosine(u, v):
    return sum(a * b for a, b in zip(u, v)) / math.sqrt(sum(a * a for a in u) * sum(b * b for b in v))


def kernel(name, u, v, gamma):
    distance = sum((a - b) ** 2 for a, b in zip(u, v))
    return {"rbf": math.exp(-gamma * distance), "imq": 1 / math.sqrt(distance + gamma), "linear": cosine(u, v)}[name]


@pytest.mark.parametrize("name", ["rbf", "imq", "linear"])
def test_gram_matrix_is_equation_7(name):
    z = rows(7, 4, 1)
    gram = ibkd.gram_matrix(z, name, 0.3)
    expected = [[kernel(name, u, v, 0.3) for v in z.tolist()] for u in z.tolist()]
    assert (gram - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["rbf", "imq", "linear"])
def test_hsic_is_equation_6(name):
    """tr(K_X H K_S H) / l^2, the centring written out: each entry of K_X less the means of its row and its column, plus the mean of all."""
    l, x, s = 7, rows(7, 4, 1).tolist(), rows(7, 3, 2).tolist()
    k, m = ([[kernel(name, u, v, 0.5) for v in z] for u in z] for z in (x, s))

    def centred(k):
        row, column = [sum(r) / l for r in k], [sum(r[j] for r in k) / l for j in range(l)]
        return [[k[i][j] - row[i] - column[j] + sum(row) / l for j in range(l)] for i in range(l)]
    expected = sum(centred(k)[i][j] * m[j][i] for i in range(l) for j in range(l)) / l ** 2
    result = ibkd.hsic(ibkd.gram_matrix(torch.tensor(x, dtype=torch.float64), name, 0.5), ibkd.gram_matrix(torch.tensor(s, dtype=torch.float64), name, 0.5))
    assert result.item() == pytest.approx(expected, abs=1e-10) and expected > 0


@pytest.mark.parametrize("name", ["rbf", "imq", "linear"])
def test_hsic_of_independent_samples_tends_to_0_and_of_a_variable_with_itself_does_not(name):
    def value(l, same):
        x = rows(l, 3, l)
        gram = ibkd.gram_matrix(x, name, 0.5)
        return ibkd.hsic(gram, gram if same else ibkd.gram_matrix(rows(l, 3, l + 1), name, 0.5)).item()
    apart, same = [value(l, False) for l in (20, 200, 2000)], [value(l, True) for l in (20, 200, 2000)]
    assert apart[0] > 3 * apart[1] > 9 * apart[2] and same[2] > 0.3 * same[0] and same[2] > 50 * apart[2]


def test_info_nce_is_that_of_section_3_1():
    student, teacher, tau = rows(6, 5, 1), rows(6, 5, 2), 0.1
    total = 0.0
    for i, s in enumerate(student.tolist()):
        powers = [math.exp(cosine(s, t) / tau) for t in teacher.tolist()]
        total -= math.log(powers[i] / sum(powers)) / 6
    assert ibkd.info_nce(student, teacher, tau).item() == pytest.approx(total, abs=1e-10)


@pytest.mark.parametrize("batch_negatives", [False, True])
def test_supervised_info_nce_is_equation_10(batch_negatives):
    anchor, positive, negatives, tau = rows(4, 5, 1), rows(4, 5, 2), rows(12, 5, 3).view(4, 3, 5), 0.1
    total = 0.0
    for i, s in enumerate(anchor.tolist()):
        others = negatives.flatten(0, 1).tolist() if batch_negatives else negatives[i].tolist()
        p, n = [math.exp(cosine(s, t) / tau) for t in positive.tolist()], [math.exp(cosine(s, t) / tau) for t in others]
        total -= math.log(p[i] / (sum(p) + sum(n))) / 4
    assert ibkd.supervised_info_nce(anchor, positive, negatives, tau, batch_negatives).item() == pytest.approx(total, abs=1e-10)


def test_crd_loss_against_loops():
    student, teacher, tau = rows(5, 4, 1), rows(5, 4, 2), 0.2
    total = 0.0
    for i, s in enumerate(student.tolist()):
        for j, t in enumerate(teacher.tolist()):
            power = math.exp(cosine(s, t) / tau)
            h = power / (power + 4)  # the posterior of "one text": e^g is the ratio of the densities, 4 to 1 the prior against it
            total -= math.log(h if i == j else 1 - h) / 5
    assert ibkd.crd_loss(student, teacher, tau).item() == pytest.approx(total, abs=1e-10)


def test_principal_components_keep_the_most_variance():
    random = np.random.default_rng(0)
    vectors = (random.normal(size=(500, 6)) * [5, 0.1, 3, 0.1, 1, 0.1] + 2).astype(np.float32)
    mean, directions = ibkd.principal_components(vectors, 3)
    assert np.abs(mean - vectors.mean(0)).max() < 1e-5 and np.abs(np.abs(directions).argmax(0) - [0, 2, 4]).max() == 0
    assert np.abs(directions.T @ directions - np.eye(3)).max() < 1e-5


@pytest.mark.parametrize("loss", [
    lambda x: ibkd.info_nce(x, rows(4, 3, 2), 0.1), lambda x: ibkd.supervised_info_nce(x, rows(4, 3, 2), rows(8, 3, 3).view(4, 2, 3), 0.1),
    lambda x: ibkd.crd_loss(x, rows(4, 3, 2), 0.2),
    *(lambda x, name=name: ibkd.hsic(ibkd.gram_matrix(rows(4, 5, 2), name, 0.5), ibkd.gram_matrix(x, name, 0.5)) for name in ("rbf", "imq", "linear"))])
def test_gradients(loss):
    assert torch.autograd.gradcheck(loss, rows(4, 3, 1).requires_grad_())


# ---- student, mining, table

@pytest.mark.parametrize("name", ["mean", "cls", "pooler", "roberta", "distilbert"])
@pytest.mark.parametrize("keep", [False, True])
def test_the_student_is_read_as_its_folder_will_be(models_folder, name, keep):
    """ibkd.Student and common.Encoder are written apart; what is trained must point where what is saved and scored points."""
    encoder = common.load_encoder(models_folder / name).eval()
    student = ibkd.Student(encoder, "fp32", 48, keep).eval()
    batch = common.Tokens(encoder, demo.sentences(6)).batch(np.arange(6), "cpu")
    x, s = student(*batch)
    expected = student.mapping(s) if keep else s
    assert (torch.nn.functional.cosine_similarity(expected, encoder(*batch)) - 1).abs().max() < 1e-6 and encoder.width == (48 if keep else 32)
    states, mask = encoder.model(*batch, output_hidden_states=True).hidden_states[0], batch[1]
    for row in range(6):
        tokens = [states[row, i] for i in range(int(mask[row].sum()))]
        assert (x[row] - sum(tokens) / len(tokens)).abs().max() < 1e-6


def test_w_starts_as_the_identity_where_the_widths_agree(models_folder):
    encoder = common.load_encoder(models_folder / "mean")
    assert torch.equal(ibkd.Student(encoder, "fp32", 32).mapping.weight, torch.eye(32))
    assert ibkd.Student(encoder, "fp32", 48).mapping.weight.shape == (48, 32)


def test_negatives_are_the_nearest_passages_but_for_the_positives(tmp_path):
    random = np.random.default_rng(0)
    queries, passages = (random.normal(size=(count, 6)).astype(np.float32) for count in (5, 50))
    positives = [[int((queries[i] @ passages.T / np.linalg.norm(passages, axis=1)).argmax()), 7] for i in range(5)]
    found = ibkd.eval_retrieval.hard_negatives(queries, passages, positives, 4)
    for query, known, numbers in zip(queries, positives, found.tolist()):
        ranking = sorted(range(50), key=lambda i: -cosine(query.tolist(), passages[i].tolist()))
        assert numbers == [i for i in ranking if i not in known][:4]


def test_table_1_and_defaults_are_the_papers(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ibkd.py", "--student", "x"])
    args = ibkd.parse_args()
    assert (args.gamma, args.beta1, args.beta2, args.hard_negatives, args.kernel) == (0.5, 1.0, 0.5, 8, "rbf")
    assert ibkd.TABLE_1["sts", "distill"] == (1e-4, 256, 10, 0.1) and ibkd.TABLE_1["dr", "finetune"] == (1e-5, 128, 3, 0.05)


# ---- runs

TINY = ("--epochs", 2, "--batch-size", 32, "--finetune-epochs", 1, "--finetune-batch-size", 32, "--eval-steps", 4, "--lr", 1e-3)


def options(models_folder, files, output, teacher="mean", *more):
    return ("--teacher", models_folder / teacher, "--train", files / "sentences.txt", "--triplets", files / "triplets.csv",
            "--dev", files / "dev.tsv", "--output", output, *TINY, *more)


@pytest.mark.parametrize("teacher, more", [
    ("mean", ("--student-layers", "0,2")), ("wide", ("--student-layers", "1,3", "--objective", "hpd", "--dim", 16)),
    ("wide", ("--student", "bert", "--kernel", "imq", "--dim", 16)), ("mean", ("--student-layers", "2", "--objective", "mse", "--keep-mapping")),
    ("wide", ("--student", "pooler", "--objective", "crd", "--keep-mapping")), ("cls", ("--student", "distilbert", "--objective", "ckd", "--batch-negatives")),
    ("roberta", ("--student-layers", "0,3", "--kernel", "linear", "--hsic-vectors", "raw"))])
def test_a_run_leaves_the_best_student(run, models_folder, files, tmp_path, teacher, more):
    from sentence_transformers import SentenceTransformer
    more = [models_folder / word if before == "--student" else word for before, word in zip(("", *more), more)]
    out = tmp_path / "out"
    process = run("ibkd.py", *options(models_folder, files, out, teacher, *more))
    assert process.returncode == 0, process.stderr[-3000:]
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert {entry["stage"] for entry in entries} == {"distill", "finetune"} and all(math.isfinite(entry["loss"]) for entry in entries)
    encoder = common.load_encoder(out).eval()
    dev = common.spearman(encoder, {"dev": common.read_graded_pairs(files / "dev.tsv")})["dev"]
    last = [line.split("|") for line in process.stdout.splitlines() if "after stage 2" in line][0]
    assert dev == pytest.approx(float(last[2]), abs=0.006) and (encoder.width == 16 or 16 not in more)
    ours = common.encode(encoder, common.Tokens(encoder, demo.sentences(20)), "cpu")
    assert np.abs(SentenceTransformer(str(out), device="cpu").encode(demo.sentences(20)) - ours).max() < 1e-5


def test_a_retrieval_run(run, models_folder, tmp_path):
    folder = beir(tmp_path / "beir", 200, 60)
    (folder / "qrels" / "train.tsv").write_text((folder / "qrels" / "test.tsv").read_text())
    process = run("ibkd.py", "--task", "dr", "--beir", folder, "--teacher", models_folder / "wide", "--student-layers", "0,2", "--output", tmp_path / "out", *TINY)
    assert process.returncode == 0, process.stderr[-3000:]
    lines = {line.split("|")[1].strip(): line.split("|")[2:] for line in process.stdout.splitlines()}
    assert "dev MRR@10" in lines["model"][0] and "MRR@10" in lines["model"][1] and {"teacher", "student before", "student after stage 1", "student after stage 2"} <= set(lines)
    from huggingface_hub import ModelCard
    card = ModelCard.load(tmp_path / "out" / "README.md").data.eval_results[0]
    assert (card.task_type, card.metric_type) == ("information-retrieval", "mrr@10")
    check = run("eval_retrieval.py", tmp_path / "out", "--beir", folder)
    assert check.stdout.splitlines()[-1].split("|")[2].strip() == lines["student after stage 2"][1].strip()


def test_stage_2_compares_each_anchor_with_its_own_positive_and_negative(run, models_folder, files, tmp_path):
    """One batch of all 100 triplets, no dropout, no learning to speak of: the loss that is logged is that of the embeddings, texts in their own order."""
    model = transformers.AutoModel.from_pretrained(models_folder / "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model.save_pretrained(tmp_path / "still")
    transformers.AutoTokenizer.from_pretrained(models_folder / "bert").save_pretrained(tmp_path / "still")
    process = run("ibkd.py", "--stage", "finetune", "--student", tmp_path / "still", "--triplets", files / "triplets.csv", "--dev", files / "dev.tsv",
                  "--output", tmp_path / "out", "--finetune-batch-size", 100, "--max-steps", 1, "--finetune-lr", 1e-30)
    assert process.returncode == 0, process.stderr[-2000:]
    logged = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])["info_nce"]
    encoder, triplets, total = common.load_encoder(tmp_path / "still").eval(), common.read_triplets(files / "triplets.csv"), 0.0
    anchors, positives, negatives = (common.encode(encoder, common.Tokens(encoder, list(side)), "cpu").tolist() for side in zip(*triplets))
    for i, (anchor, negative) in enumerate(zip(anchors, negatives)):
        powers = [math.exp(cosine(anchor, other) / 0.05) for other in [*positives, negative]]
        total -= math.log(powers[i] / sum(powers)) / len(anchors)
    assert len({len(text.split()) for row in triplets for text in row}) > 3 and logged == pytest.approx(total, rel=1e-4)


def test_a_dozen_steps_bring_the_real_student_nearer(run, tmp_path):
    """all-MiniLM-L6-v2 into its layers 1,3,5 on 768 of the demo's sentences: the demo test pairs, five points."""
    (tmp_path / "train.txt").write_text("\n".join(demo.sentences(768)), "utf-8")
    more = ("--demo", "--stage", "distill", "--train", tmp_path / "train.txt", "--output", tmp_path / "out")
    process = run("ibkd.py", *more, OMP_NUM_THREADS="2")
    assert process.returncode == 0, process.stderr[-2000:]
    table = {line.split("|")[1].strip(): float(line.split("|")[3]) for line in process.stdout.splitlines() if line.startswith("| student")}
    assert table["student after stage 1"] > table["student before"] + 5


def test_interrupted_and_resumed_it_ends_as_if_nobody_had_touched_it(run, models_folder, files, tmp_path):
    """SIGKILL at four moments, over both stages, with a projection: weights bit for bit."""
    more = ("--student", models_folder / "bert", "--dim", 16, "--eval-steps", 2)
    assert run("ibkd.py", *options(models_folder, files, tmp_path / "whole", "wide", *more)).returncode == 0
    command = [sys.executable, "ibkd.py", *map(str, options(models_folder, files, tmp_path / "killed", "wide", *more)), "--resume"]
    where = dict(env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=os.path.dirname(ibkd.__file__))
    state, stages = tmp_path / "killed" / "checkpoint" / "state.safetensors", set()
    for kill in range(4):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **where)
        before = state.stat().st_mtime_ns if state.exists() else 0
        while process.poll() is None and (state.stat().st_mtime_ns if state.exists() else 0) == before:
            time.sleep(0.002)
        time.sleep(0.25 * kill)
        assert process.poll() is None, "the run ended before it was killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        stages.add(json.loads(safe_open(state, "np").metadata()["state"])["stage"])
    assert "distill" in stages
    assert subprocess.run(command, capture_output=True, **where).returncode == 0
    for name in [str(path.relative_to(tmp_path / "whole")) for path in (tmp_path / "whole").rglob("model.safetensors")]:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes(), name


def test_interrupted_between_the_stages_the_projection_starts_as_it_would_have(monkeypatch, models_folder, files, tmp_path):
    """Stage 1 has drawn dropout by then, a resumed run has not."""
    def run(name, *more):
        given = options(models_folder, files, tmp_path / name, "wide", "--student", models_folder / "bert", "--dim", 16, *more)
        monkeypatch.setattr(sys, "argv", ["ibkd.py", *map(str, given)])
        ibkd.main()

    def interrupt(*_):
        raise KeyboardInterrupt
    run("whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ibkd, "finetune", interrupt)
        run("killed")
    run("killed", "--resume")
    for name in [str(path.relative_to(tmp_path / "whole")) for path in (tmp_path / "whole").rglob("model.safetensors")]:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes(), name


# ---- what bad input gets

def test_bad_input_gets_one_line_and_status_2(fails, models_folder, files, tmp_path):
    out, folder = tmp_path / "out", beir(tmp_path / "beir")
    base = options(models_folder, files, out, "mean", "--student-layers", "0,2")
    dr = (*base, "--task", "dr", "--beir", folder, "--skip-test")
    for extra, expected in (((*base, "--train", tmp_path / "none.txt"), "no such file"), ((*base, "--beta1", -1), "--beta1 -1.0"), ((*base, "--gamma", 0), "--gamma 0.0"),
                            ((*base, "--kernel", "poly"), "--kernel"), ((*base, "--device", "gpu"), "--device gpu"), (dr, "qrels/train.tsv: no such file")):
        line = fails(ibkd, *extra)
        assert expected in line and not out.exists(), line
    qrels = (folder / "qrels" / "test.tsv").read_text()
    corpus = (folder / "corpus.jsonl").read_text()
    for name, text, expected in (("qrels/train.tsv", qrels + "nobody\td1\t1\n", "query 'nobody' is unknown"), ("qrels/train.tsv", qrels + "q0\tnone\t1\n", "passage 'none' is unknown"),
                                 ("qrels/train.tsv", qrels + "q1\td1\tx\n", "score 'x'"), ("corpus.jsonl", corpus + "{no json\n", "corpus.jsonl:61: '{no json'"),
                                 ("corpus.jsonl", corpus + corpus.splitlines()[0] + "\n", "has been used above"),
                                 ("qrels/train.tsv", "\n".join(qrels.splitlines()[:4]) + "\n", "3 training queries, expected 10 or more")):
        (folder / "qrels" / "train.tsv").write_text(qrels)
        (folder / "corpus.jsonl").write_text(corpus)
        (folder / name).write_text(text)
        line = fails(ibkd, *dr)
        assert expected in line and not out.exists(), line
    (folder / "qrels" / "train.tsv").write_text(qrels)
    assert "too few for 80 hard negatives" in fails(ibkd, *dr, "--hard-negatives", 80)
