# SPDX-License-Identifier: MIT
"""Write a teacher whose embeddings are in the student's space, as a folder for --teacher.

A larger teacher from another model family has other dimensions, and more of them. This script adds
one dense layer A to it, which is in no paper: principal components to the student's dimension, then
the rotation to where the student's own embeddings of the same sentences are. The student must
already embed sentences; a model from pre-training alone has nothing to rotate to. Fewer sentences
than the teacher has dimensions are refused.

    sentence --> teacher --> t --> A = P Q --> L2 normalization, if the student ends in one
    A from 10,000 sentences: P by eq. 1 (principal components), Q by eq. 2 (Procrustes)

  python -m extras.align --teacher sentence-transformers/all-mpnet-base-v2 --student my-encoder
      --student-layers 1,3,5 --train my-sentences.txt --output runs/aligned
  python ckd.py --objective kd --teacher runs/aligned --student my-encoder --student-layers 1,3,5
      --train my-sentences.txt
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from tqdm import tqdm

from common import BAR, UserError, chunks, encode, note
from common import load_encoder, read_sentences, resolve_data, save_encoder
from common import read_options, run_main
from eval_sts import embed

SENTENCES = 10_000  # that A is fitted on, drawn at random


class Options:
    teacher: str = None  # folder, or name on the Hub
    student: str = None  # folder, or name on the Hub
    student_layers: str = None  # keep only these layers of the student, as in 1,3,5
    train: str = None  # sentences, or a .csv of triplets
    output: str = "runs/aligned"  # a new folder for the aligned teacher


def principal_components(teacher, dimension):
    """Eq. 1: T^T T = V diag(l) V^T;  P = the columns of V with the largest l

    teacher: T [n, D_T], float64. The mean is not subtracted, since a cosine depends on it. Returns
    P [D_T, min(dimension, D_T)] and the share of the sum of squares that it keeps, 0 to 1.
    """
    values, vectors = np.linalg.eigh(teacher.T @ teacher)  # ascending
    return vectors[:, ::-1][:, :dimension], values[-dimension:].sum() / values.sum()


def rotation(source, target):
    """Eq. 2: Q = argmin |source Q - target|, Q orthogonal  =  U V^T of U S V^T = source^T target

    Orthogonal Procrustes (Schoenemann 1966). source [n, K], target [n, D], K <= D. Returns [K, D].
    """
    left, _, right = np.linalg.svd(source.T @ target, full_matrices=False)
    return left @ right


def vectors_of(encoder, sentences):
    """-> [n, D], float64"""
    bar = tqdm(chunks(sentences, 1024), encoder.name, leave=False, delay=1, **BAR)
    return np.concatenate([encode(embed, encoder, chunk) for chunk in bar]).astype(np.float64)


def align(teacher, student, sentences):
    """Append A [D_T, D_S] to the teacher's heads, and normalize as the student does. In place."""
    if len(sentences) < teacher.dimension:  # then T says nothing of some dimensions
        found = f"{len(sentences)} sentences are fewer than the teacher's dimensions"
        raise UserError(f"--train: {found}, {teacher.dimension}; better give {SENTENCES}")
    teacher_vectors = vectors_of(teacher, sentences)  # T [n, D_T]
    student_vectors = vectors_of(student, sentences)  # S [n, D_S]
    components, kept = principal_components(teacher_vectors, student.dimension)
    note(f"principal components keep {100 * kept:.1f} % of the teacher's sum of squares")
    matrix = components @ rotation(teacher_vectors @ components, student_vectors)  # A
    linear = nn.Linear(*matrix.shape, bias=False)
    linear.weight.data.copy_(torch.from_numpy(matrix.T))
    teacher.heads.append(nn.Sequential(linear, nn.Identity()).to(teacher.model.device))
    teacher.normalize = student.normalize
    if not student.normalize:  # then their mean length is the student's
        lengths = np.linalg.norm(encode(embed, teacher, sentences[:1000]), axis=1)
        linear.weight.data *= np.linalg.norm(student_vectors, axis=1).mean() / lengths.mean()


def main():
    args = read_options(Options, __doc__)
    if not (args.teacher and args.student and args.train):
        raise UserError("give --teacher, --student and --train (--help lists the options)")
    if Path(args.output).exists():
        raise UserError(f"{args.output}: exists already; choose another --output")
    sentences = list(dict.fromkeys(read_sentences(resolve_data(args.train))))  # distinct ones
    rows = np.random.default_rng(0).permutation(len(sentences))[:SENTENCES]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher = load_encoder(args.teacher, device=device)
    student = load_encoder(args.student, layers=args.student_layers, device=device)
    align(teacher, student, [sentences[row] for row in rows])
    save_encoder(teacher, args.output)


if __name__ == "__main__":
    run_main(main)
