"""ckd.py with two teachers: the targets are the weighted mean of their embeddings.

  python results/two_teachers.py SECOND WEIGHT [options of ckd.py]

SECOND is a model whose embeddings are in the space of --teacher's (extras/align.py), WEIGHT its
share, 0 to 1. The squared error to the weighted mean has the gradient of the weighted sum of the
two squared errors. The row "teacher" has the scores of the mean. The output folder does not state
SECOND and WEIGHT: let its name do so.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ckd
from common import load_encoder, run_main, teacher_embeddings


def embeddings_of_two(embed, teacher, *args, **kwargs):
    first = teacher_embeddings(embed, teacher, *args, **kwargs)
    second = teacher_embeddings(embed, load_encoder(SECOND), *args, **kwargs)
    return (1 - WEIGHT) * first + WEIGHT * second


if __name__ == "__main__":
    SECOND, WEIGHT = sys.argv[1], float(sys.argv[2])
    del sys.argv[1:3]
    ckd.teacher_embeddings = embeddings_of_two
    run_main(ckd.main)
