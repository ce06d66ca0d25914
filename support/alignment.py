"""A teacher of another dimension brought into the student's own space, before training.

None of the papers does this. Where a student is not made of its teacher, they put a projection
between the two that starts at random. Here it is computed from a sample of sentences.
"""

from typing import NamedTuple

import numpy as np

from common import encode_sentences
from support import distributed

SAMPLE = 10_000  # sentences


class Alignment(NamedTuple):
    """What align() finds."""

    matrix: np.ndarray  # A [D_T, D_S]
    kept: float  # share of the teacher's squared lengths that A keeps, from 0 to 1


def align(teacher, student):
    """A = P Q, which brings teacher embeddings into the student's space: t A.

    P: the D_S directions along which the teacher's embeddings T are longest, the eigenvectors of
    T^T T with the largest eigenvalues. The mean is not subtracted, so that T P P^T has, of all
    matrices of this rank, the inner products nearest to those of T (principal components).
    Q = argmin |T P Q - S|^2 over Q with orthonormal rows or columns: Q = U V^T, where
    U Sigma V^T = (T P)^T S is a singular value decomposition (orthogonal Procrustes, Schoenemann
    1966). A rotation changes no inner product: it moves T to where the student already is.
    teacher T [n, D_T], student S [n, D_S], of the same n sentences -> Alignment. Where the student
    has more dimensions than the teacher, P is the identity, in another basis.
    """
    teacher = np.asarray(teacher, np.float64)
    student = np.asarray(student, np.float64)
    eigenvalues, eigenvectors = np.linalg.eigh(teacher.T @ teacher)  # rising
    directions = eigenvectors[:, ::-1][:, : student.shape[1]]  # P [D_T, min(D_T, D_S)]
    kept = eigenvalues[::-1][: student.shape[1]].sum() / eigenvalues.sum()
    left, _, right = np.linalg.svd((teacher @ directions).T @ student, full_matrices=False)
    rotation = left @ right  # Q
    return Alignment((directions @ rotation).astype(np.float32), float(kept))


class Aligned(NamedTuple):
    """What align_by_sample() finds."""

    matrix: np.ndarray  # A [D_T, D_S]
    length: float  # of the student's own embeddings, on average


def align_by_sample(targets, encoder, sentences, seed):
    """Align the teacher embeddings of n sentences to the encoder's own -> Aligned.

    From a random sample; prints how much of the teacher's variance is kept.
    """
    rows = np.random.default_rng(seed).permutation(len(sentences))[:SAMPLE]
    training = encoder.training
    own = encode_sentences(encoder.eval(), [sentences[row] for row in rows], "alignment")
    encoder.train(training)
    matrix, kept = align(targets[rows].cpu().numpy(), own)
    distributed.note(
        f"alignment: {100 * kept:.1f} % of the teacher's variance is kept, "
        f"{matrix.shape[0]} -> {matrix.shape[1]} dimensions, from {len(rows)} sentences"
    )
    return Aligned(matrix, float(np.linalg.norm(own, axis=1).mean()))
