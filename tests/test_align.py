"""extras/align.py: its two equations against plain NumPy, the folder that it writes, KD with it."""

import numpy as np
import pytest
from conftest import demo_sentences
from sentence_transformers import SentenceTransformer

import ckd
import common
from extras import align


def test_components_and_rotation_bring_a_rotated_space_back():
    """A teacher that is the student's embeddings, rotated into more dimensions."""
    random = np.random.default_rng(0)
    student = random.normal(size=(50, 4))
    rotation = np.linalg.qr(random.normal(size=(7, 4)))[0]  # orthonormal columns
    teacher = student @ rotation.T
    components, kept = align.principal_components(teacher, 4)
    assert kept == pytest.approx(1)
    reduced = teacher @ components
    found = reduced @ align.rotation(reduced, student)
    assert np.abs(found - student).max() < 1e-9


@pytest.mark.parametrize("student", ["mean", "cls"])  # normalized, and not
def test_the_folder_is_a_teacher_in_the_students_space(call_main, models_folder, tmp_path, student):
    """Its embeddings are as long as the student's, and as close to them as P Q makes them."""
    texts = demo_sentences(300)
    (tmp_path / "train.txt").write_text("\n".join(texts))
    models = ("--teacher", models_folder / "wide", "--student", models_folder / student)
    out = tmp_path / "aligned"
    call_main(align, *models, "--train", tmp_path / "train.txt", "--output", out)
    teacher = common.load_encoder(models_folder / "wide")
    goal = common.encode(ckd.embed, common.load_encoder(models_folder / student), texts)
    found = common.encode(ckd.embed, common.load_encoder(out), texts)
    assert found.shape == (300, 32)
    theirs = SentenceTransformer(str(out), device="cpu").encode(texts)
    assert np.abs(found - theirs).max() < 1e-5 * np.abs(found).max()
    lengths = [np.linalg.norm(vectors, axis=1).mean() for vectors in (found, goal)]
    assert lengths[0] == pytest.approx(lengths[1], rel=1e-4)
    original = common.encode(ckd.embed, teacher, texts)
    components, _ = align.principal_components(original.astype(np.float64), 32)
    turned = original @ components @ align.rotation(original @ components, goal)
    unit = [v / np.linalg.norm(v, axis=1, keepdims=True) for v in (found, turned, goal)]
    # Dimensions of a layer norm's output sum to 0: Q may turn what is left of T either way there.
    cosines = [(vectors * unit[2]).sum(axis=1) for vectors in unit[:2]]
    assert np.abs(cosines[0] - cosines[1]).max() < 1e-4
