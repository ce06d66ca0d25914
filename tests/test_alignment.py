"""support/alignment.py and support/teachers.py against plain loops, and in runs of the scripts."""

import importlib
import json

import numpy as np
import pytest
import torch
from test_precision import places

import common
from support import demo
from support.alignment import align
from support.cache import TeacherEmbeddings
from support.encoder import load_encoder
from support.teachers import JoinedEmbeddings, ProjectedEmbeddings, Teachers, join


def random_rows(count, dimension, seed):
    return np.random.default_rng(seed).normal(size=(count, dimension))


def cosine(u, v):
    dot = sum(a * b for a, b in zip(u, v))
    lengths = sum(a * a for a in u) * sum(b * b for b in v)
    return dot / lengths**0.5


# ---- alignment


@pytest.mark.parametrize("teacher_dimension, student_dimension", [(6, 6), (9, 6), (4, 6)])
def test_a_rotated_student_is_found_again(teacher_dimension, student_dimension):
    """The teacher is the student, turned in a space of another dimension: nothing is lost."""
    shared = min(teacher_dimension, student_dimension)
    student = random_rows(50, student_dimension, 0)
    student[:, shared:] = 0
    turn, _ = np.linalg.qr(random_rows(teacher_dimension, teacher_dimension, 1))
    teacher = student[:, :shared] @ turn[:shared]
    matrix, kept = align(teacher, student)
    assert matrix.shape == (teacher_dimension, student_dimension)
    assert kept == pytest.approx(1)
    assert np.abs(teacher @ matrix - student).max() < 1e-5


def test_no_projection_of_this_rank_keeps_more_and_no_rotation_fits_better():
    teacher = random_rows(200, 8, 0) * np.linspace(3, 0.3, 8)
    student = random_rows(200, 5, 1) + teacher[:, :5]
    matrix, kept = align(teacher, student)
    assert np.abs(matrix.T @ matrix - np.eye(5)).max() < 1e-6  # orthonormal columns
    projected = teacher @ matrix
    assert kept == pytest.approx((projected**2).sum() / (teacher**2).sum())
    distance = ((projected - student) ** 2).sum()
    for seed in range(50):
        other, _ = np.linalg.qr(random_rows(8, 5, seed))
        assert ((teacher @ other) ** 2).sum() <= (projected**2).sum()
        turn, _ = np.linalg.qr(np.eye(5) + 0.1 * random_rows(5, 5, seed))
        turn = turn * np.sign(np.diag(turn))  # near to the identity
        assert ((projected @ turn - student) ** 2).sum() >= distance


def test_the_mean_counts():
    """Cosines are of the embeddings as they are: a common part of all of them is kept first."""
    teacher = random_rows(100, 4, 0) * [1, 1, 1, 0.01] + [0, 0, 0, 10]
    matrix, kept = align(teacher, random_rows(100, 1, 1))
    assert abs(matrix[3, 0]) > 0.99
    assert kept > 0.9


# ---- several teachers


def test_joined_embeddings_have_the_weighted_mean_of_the_cosines():
    first, second = random_rows(7, 4, 0), random_rows(7, 6, 1)
    joined = join([torch.from_numpy(first), torch.from_numpy(second)], [1, 3]).tolist()
    for i in range(7):
        assert sum(x * x for x in joined[i]) == pytest.approx(1)
        for j in range(7):
            expected = (cosine(first[i], first[j]) + 3 * cosine(second[i], second[j])) / 4
            assert cosine(joined[i], joined[j]) == pytest.approx(expected)


def test_rows_of_joined_and_projected_embeddings():
    arrays = [random_rows(9, size, size).astype(np.float32) for size in (3, 5)]
    members = [TeacherEmbeddings(array, "cpu") for array in arrays]
    joined = JoinedEmbeddings(members, [1.0, 1.0])
    assert (len(joined), joined.dimension) == (9, 8)
    rows = np.array([4, 0, 8])
    expected = join([torch.from_numpy(array[rows]) for array in arrays], [1, 1])
    assert torch.equal(joined[rows], expected)
    matrix = random_rows(8, 2, 0).astype(np.float32)
    projected = ProjectedEmbeddings(joined, matrix)
    assert torch.allclose(projected[rows], expected @ torch.from_numpy(matrix))
    scaled = ProjectedEmbeddings(joined, matrix, 3.0)[rows]
    assert torch.allclose(scaled.norm(dim=1), torch.full((3,), 3.0))
    assert (len(projected), projected.dimension) == (9, 2)


def test_scores_of_several_teachers(models_folder):
    """A row for each, and one of the mean of their cosines."""
    encoders = [load_encoder(models_folder / name).eval() for name in ("wide", "mean")]
    pairs = common.ScoredPairs(*demo.scored_pairs(40, seed=3))
    rows = {}
    teachers = Teachers(["a", "b"], encoders, [1.0, 2.0])

    class Evaluation:
        def scores_of(self, encode_all):
            return common.spearman_of(encode_all, {"dev": pairs})

    rows = teachers.scores(Evaluation())
    assert list(rows) == ["teacher a", "teacher b", "teachers together"]
    assert rows["teacher a"] == common.spearman(encoders[0], {"dev": pairs})
    values = []
    for first, second in zip(pairs.first, pairs.second):
        both = [common.encode_sentences(encoder, [first, second]) for encoder in encoders]
        values.append(cosine(*both[0]) + 2 * cosine(*both[1]))
    expected = common.spearmanr(values, pairs.scores).statistic
    assert rows["teachers together"]["dev"] == pytest.approx(100 * expected, abs=0.01)


# ---- runs


FOREIGN = ("--teacher", "wide", "--student", "bert", "--train", "sentences.txt")
CKD = ("ckd", "--stage", "distill", *FOREIGN, "--queue-size", 0)
RUNS = {
    "kd": ("baselines", "--method", "kd", *FOREIGN, "--align"),
    "kd, M starts aligned": ("baselines", "--method", "kd", *FOREIGN, "--align", "projection"),
    "kd, M fixed": ("baselines", "--method", "kd", *FOREIGN, "--align", "fixed"),
    "kd, kept": ("baselines", "--method", "kd", *FOREIGN, "--align", "--keep-projection"),
    "kd, M kept": ("baselines", "--method", "kd", *FOREIGN, "--keep-projection"),
    "ckd": (*CKD, "--align"),
    "ckd, kept": (*CKD, "--align", "--keep-projection"),
    "congen": ("congen", *FOREIGN, "--align", "--queue-size", 64),
    "ibkd": ("ibkd", "--stage", "distill", *FOREIGN, "--align"),
    "two teachers, kd": ("baselines", "--method", "kd", *FOREIGN, "--align", "--teacher", "mean"),
    "two teachers, ckd": (*CKD, "--teacher", "mean"),
    "two teachers, hpd": (
        *("baselines", "--method", "hpd", *FOREIGN),
        *("--dimension", 16, "--teacher", "mean"),
    ),
    "two teachers, congen": ("congen", *FOREIGN, "--queue-size", 64, "--teacher", "mean"),
    "two teachers, ibkd": (
        *("ibkd", "--stage", "distill", *FOREIGN),
        *("--teacher", "mean", "--teacher-weights", "1,2"),
    ),
}
IN_TEACHERS_SPACE = ("kd, kept", "kd, M kept", "ckd, kept")


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_student_of_a_foreign_teacher(call_main, models_folder, files, tmp_path, name):
    script, *words = RUNS[name]
    out = tmp_path / "out"
    options = ("--lr", 1e-3, "--epochs", 3, "--eval-steps", 9, "--batch-size", 32, "--dropout", 0)
    data = ("--dev", files / "dev.tsv", "--output", out)
    module = importlib.import_module(script)
    printed = call_main(module, *places(words, models_folder, files), *options, *data)
    encoder = load_encoder(out)
    assert encoder.dimension == dimension(name)
    card = (out / "README.md").read_text()
    assert ("Teachers: wide, mean." in card) == name.startswith("two teachers")
    assert ("teachers together" in printed) == name.startswith("two teachers")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[1]["loss"]


@pytest.mark.slow
def test_what_a_student_keeps_does_not_change_what_it_has_learned(
    call_main, models_folder, files, tmp_path
):
    """A has orthonormal columns: the cosines of e A^T are those of e, with nothing in between."""
    sentences = demo.sentences(40)
    cosines = []
    for name in ("kd", "kd, kept"):
        script, *words = RUNS[name]
        out = tmp_path / name
        options = ("--lr", 1e-3, "--max-steps", 9, "--eval-steps", 9, "--batch-size", 32)
        data = ("--dev", files / "dev.tsv", "--output", out)
        module = importlib.import_module(script)
        call_main(module, *places(words, models_folder, files), *options, *data)
        cosines.append(cosine_matrix(load_encoder(out).eval(), sentences))
    assert np.abs(cosines[0] - cosines[1]).max() < 1e-4


def cosine_matrix(encoder, sentences):
    vectors = common.encode_sentences(encoder, sentences)
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors @ vectors.T


def dimension(name):
    """Of the student's embedding: 32, the teacher's 48, HPD's 16, and of the heads of ConGen."""
    if name in IN_TEACHERS_SPACE:
        return 48
    return {"congen": 48, "two teachers, congen": 80, "two teachers, hpd": 16}.get(name, 32)


@pytest.mark.parametrize("name", ["kd, kept", "ckd, kept"])
def test_an_aligned_student_that_is_kept_in_the_teachers_space_matches_its_index(
    call_main, models_folder, files, tmp_path, name
):
    """A teacher that is the student, turned in more dimensions: both embed a sentence alike."""
    turned = load_encoder(models_folder / "bert")
    turn, _ = np.linalg.qr(random_rows(48, 32, 0))
    linear = torch.nn.Linear(32, 48, bias=False)
    linear.weight.data.copy_(torch.from_numpy(turn))
    turned.add_head(linear, torch.nn.Identity())
    turned.save(tmp_path / "turned")
    script, *words = RUNS[name]
    words = places(words, models_folder, files)
    words[words.index("--teacher") + 1] = tmp_path / "turned"
    options = ("--lr", 1e-30, "--max-steps", 2, "--dev", files / "dev.tsv", "--pooling", "mean")
    call_main(importlib.import_module(script), *words, *options, "--output", tmp_path / "out")
    sentences = demo.sentences(60)
    student = common.encode_sentences(load_encoder(tmp_path / "out").eval(), sentences)
    teacher = common.encode_sentences(load_encoder(tmp_path / "turned").eval(), sentences)
    for own, other in zip(student, teacher):
        assert cosine(own, other) == pytest.approx(1, abs=1e-4)


def test_several_teachers_and_alignments_that_make_no_sense(fails, models_folder, files, tmp_path):
    out = tmp_path / "out"
    wide, mean = models_folder / "wide", models_folder / "mean"
    base = ("--train", files / "sentences.txt", "--dev", files / "dev.tsv", "--output", out)
    base += ("--teacher", wide, "--student", models_folder / "bert")
    ckd, ibkd, baselines = map(importlib.import_module, ("ckd", "ibkd", "baselines"))
    line = fails(ckd, *base, "--teacher-weights", "1,2")
    assert "--teacher-weights 1,2: expected 1, one for each --teacher" in line
    assert "'0' is not a number above 0" in fails(ckd, *base, "--teacher-weights", "1,0")
    line = fails(baselines, *base, "--method", "pkd", "--teacher", mean)
    assert "expected one teacher, as PKD compares the layers of one" in line
    line = fails(baselines, *base, "--method", "crd", "--align")
    assert "--align: expected --method kd, not crd" in line
    line = fails(baselines, *base, "--method", "kd", "--align", "--head", "random")
    assert "--align: expected --head none, not random" in line
    assert not out.exists()


def test_a_run_that_never_beats_its_start_says_so(
    monkeypatch, models_folder, files, tmp_path, capsys
):
    """A learning rate that changes nothing."""
    script = importlib.import_module("ckd")
    words = places((*CKD[1:], "--lr", 1e-30, "--epochs", 1, "--max-steps", 4), models_folder, files)
    words += ["--dev", files / "dev.tsv", "--batch-size", 32, "--output", tmp_path / "out"]
    monkeypatch.setattr("sys.argv", ["ckd.py", *map(str, words)])
    script.main()
    log = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    start = json.loads(log[0])["dev"]
    errors = capsys.readouterr().err
    assert f"stage distill never beat the dev score of its start, {start:.2f}" in errors
    assert "--align" in errors
