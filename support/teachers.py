"""One teacher or several, all frozen: their embeddings of the training sentences, their scores.

Several teachers are joined so that the cosine of two joined embeddings is the weighted mean of the
teachers' cosines. Each teacher's embeddings are computed once and kept in the cache.
"""

import functools
import math

import numpy as np
import torch

from common import FULL_PRECISION, Tokens
from support.cache import TeacherEmbeddings, teacher_embeddings


def join(embeddings, weights):
    """t = [sqrt(w_1) t_1 / |t_1|, ..., sqrt(w_k) t_k / |t_k|], with weights that sum to 1

    so that cos(t, t') = sum_k w_k cos(t_k, t_k'). embeddings: k tensors [N, D_k] of the same
    sentences; weights: k numbers above 0. Returns [N, D_1 + ... + D_k].
    """
    total = sum(weights)
    parts = []
    for vectors, weight in zip(embeddings, weights):
        unit = torch.nn.functional.normalize(vectors, dim=1)
        parts.append(math.sqrt(weight / total) * unit)
    return torch.cat(parts, dim=1)


class JoinedEmbeddings:
    """Rows of several TeacherEmbeddings of the same sentences, joined when they are read."""

    def __init__(self, members, weights):
        self.members = members
        self.weights = weights
        self.device = members[0].device
        self.dimension = sum(member.dimension for member in members)

    def __len__(self):
        return len(self.members[0])

    def __getitem__(self, rows):
        """Row numbers [N] -> tensor [N, D] on the device."""
        return join([member[rows] for member in self.members], self.weights)


class ProjectedEmbeddings:
    """Rows of teacher embeddings times a matrix [D, D'], computed when they are read.

    length: of each row of the result, or None to leave it as it is.
    """

    def __init__(self, targets, matrix, length=None):
        self.targets = targets
        self.matrix = torch.from_numpy(matrix).to(targets.device)
        self.length = length
        self.device = targets.device
        self.dimension = matrix.shape[1]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, rows):
        """Row numbers [N] -> tensor [N, D'] on the device."""
        projected = self.targets[rows] @ self.matrix
        if self.length is None:
            return projected
        return self.length * torch.nn.functional.normalize(projected, dim=1)


class Teachers:
    """The frozen encoders that --teacher names, in eval mode, and their weights."""

    def __init__(self, names, encoders, weights, dtype=FULL_PRECISION):
        self.names = names
        self.encoders = encoders
        self.weights = weights
        self.dtype = dtype  # of the cached embeddings of training sentences
        self.dimension = sum(encoder.dimension for encoder in encoders)

    @property
    def first(self):
        return self.encoders[0]

    def embeddings(self, tokenize, device):
        """Of every training sentence -> TeacherEmbeddings, or JoinedEmbeddings of several teachers.

        tokenize(encoder) -> Tokens of the sentences.
        """
        return self.cached(tokenize, device, self.dtype)

    def cached(self, tokenize, device, dtype):
        """The same, in a file of this dtype."""
        members = []
        for encoder in self.encoders:
            members.append(teacher_embeddings(encoder, tokenize(encoder), device, dtype=dtype))
        if len(members) == 1:
            return members[0]
        return JoinedEmbeddings(members, self.weights)

    def scores(self, evaluation):
        """Of EvaluationSets -> {row: {set: Spearman x 100}}: each teacher, and all together."""
        if len(self.encoders) == 1:
            return {"teacher": evaluation.scores_of(self.encode)}
        rows = {}
        # Two folders may have one name.
        names = [f"{name} ({i})" for i, name in enumerate(self.names, 1)]
        if len(set(self.names)) == len(self.names):
            names = self.names
        for name, encoder, weight in zip(names, self.encoders, self.weights):
            alone = Teachers([name], [encoder], [weight])
            rows[f"teacher {name}"] = evaluation.scores_of(alone.encode)
        rows["teachers together"] = evaluation.scores_of(self.encode)
        return rows

    def encode(self, sentences):
        """List of n sentences, of any length -> float32 array [n, D], from the cache if there."""
        device = next(self.first.parameters()).device
        tokenize = functools.partial(Tokens, sentences=sentences)
        targets = self.cached(tokenize, device, FULL_PRECISION)
        if isinstance(targets, TeacherEmbeddings):
            return targets.array
        return targets[np.arange(len(targets))].cpu().numpy()
