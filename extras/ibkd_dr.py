# SPDX-License-Identifier: MIT
"""IBKD for dense retrieval (DR): ibkd.py's two stages on the passages and queries of a BEIR folder.

Stage 1 learns from all passages and training queries. In stage 2, the hard negatives of a query are
the passages that the teacher finds for it and that do not answer it. A tenth of the training
queries, at most --dev-queries, is kept for dev: its MRR@10 (mean reciprocal rank x 100) chooses the
best student. Losses, model and loops are those of ibkd.py; the defaults are those of retrieval in
the paper's Table 1. extras.eval_retrieval scores students on the test queries.

  python -m extras.ibkd_dr --beir my-beir-folder --teacher MODEL --student-layers 1,3,5
  python -m extras.ibkd_dr --teacher Luyu/co-condenser-marco-retriever --teacher-pooling cls
      --teacher-similarity dot --student nreimers/MiniLM-L6-H384-uncased        the paper's setting
"""

from typing import Literal

import numpy as np

import ibkd
from common import Device, Pooling, Precision, in_range, positive_float, positive_int
from common import Run, note, read_options, run_main, run_settings, table
from common import load_encoder, load_untrained_student, teacher_embeddings
from extras import eval_retrieval
from ibkd import embed

Similarity = Literal[tuple(eval_retrieval.MEASURES)]


class Options:
    teacher: str = "princeton-nlp/sup-simcse-roberta-large"  # folder or Hub name
    teacher_pooling: Pooling = None  # (default: its folder's, else mean)
    student: str = None  # folder or Hub name (default: the teacher, cut to --student-layers)
    student_layers: str = None  # keep only these layers, counted from 0, as in 1,3,5
    pooling: Pooling = None  # of the student (default: the teacher's if cut, its folder's, or mean)
    dropout: in_range(float, 0, 0.99) = None  # of the student (default: its folder's; 0 if cut)

    beir: str = "BeIR/msmarco"  # BEIR folder, or data set on the Hub
    dev_queries: positive_int = 2000  # at most
    query_prompt: str = None  # (default: the folder's "query", or its default prompt)
    passage_prompt: str = None  # (default: the folder's "passage" or "document", or its default)
    similarity: Similarity = None  # ranks passages (default: what a model's folder states, cosine)
    teacher_similarity: Similarity = None  # (default: --similarity)

    stage: Literal["distill", "finetune", "both"] = "both"  # stage 1, 2, or both
    hard_negatives: positive_int = 8  # passages per answer; paper §4.3
    kernel: Literal["rbf", "imq", "linear"] = "rbf"  # of HSIC; paper §3.2
    gamma: positive_float = 0.5  # of the kernel; paper §4.3
    beta1: in_range(float, 0) = 1.0  # weight of HSIC, stage 1; paper §4.3
    beta2: in_range(float, 0) = 0.5  # weight of HSIC, stage 2; paper §4.3
    keep_mapping: bool = False  # W stays: the student uses the teacher's space
    dim: positive_int = None  # dimension of S' (default: no projection; paper §3.4)
    batch_negatives: bool = False  # stage 2: hard negatives of the whole batch
    epochs: positive_int = 3  # stage 1; Table 1
    batch_size: in_range(int, 2) = 128  # stage 1; Table 1
    lr: positive_float = 1e-4  # stage 1; Table 1
    temperature: positive_float = 0.1  # stage 1; Table 1
    finetune_epochs: positive_int = 3  # stage 2; Table 1
    finetune_batch_size: in_range(int, 2) = 128  # stage 2; Table 1
    finetune_lr: positive_float = 1e-5  # stage 2; Table 1
    finetune_temperature: positive_float = 0.05  # stage 2; Table 1

    output: str = "runs/ibkd-dr"  # folder for everything
    max_steps: positive_int = 10**9  # at most, in each stage
    max_length: in_range(int, 3) = 128  # tokens of a training text, as in the authors' code
    eval_steps: positive_int = 500  # steps between dev scores
    seed: in_range(int, 0) = 0  # of batches, W, and dropout, which a continued run repeats
    group_by_length: bool = False  # batches of texts of similar length
    device: Device = None  # (default: cuda if there is one)
    precision: Precision = None  # of training (default: bf16 on a GPU that has it, else fp32)


class Retrieval:
    """The data of a BEIR folder: what a student learns from, and how an encoder is scored."""

    def __init__(self, args):
        self.args = args
        self.read = eval_retrieval.read_training(args.beir, args.dev_queries)
        self.passages, self.queries, self.answers, self.dev = self.read

    def texts(self, encoder):
        """P passages, then Q queries, with the prompts of this encoder."""
        eval_retrieval.set_prompts(encoder, self.args)
        passages = [encoder.passage_prompt + text for text in self.passages]
        return passages + [encoder.query_prompt + text for text in self.queries]

    def similarity(self, encoder, is_student=False):
        given = self.args.similarity if is_student else self.args.teacher_similarity
        return eval_retrieval.similarity_of(encoder, given)

    def examples(self, teacher, targets):
        """targets [P + Q, D], of the teacher -> examples [n, 2 + K] for ibkd.finetune()."""
        how = (self.args.hard_negatives, self.similarity(teacher), self.args.device)
        examples = eval_retrieval.training_rows(targets, self.answers, *how)
        shared = np.zeros(len(examples), bool)
        for column in examples.T[:2]:  # queries, answers
            _, places, counts = np.unique(column, return_inverse=True, return_counts=True)
            shared |= counts[places] > 1
        if shared.any():
            found = f"{shared.sum()} of {len(examples)} training rows share their query or answer"
            note(f"{found}: of queries with several answers, one may be a negative in a batch")
        return examples

    def dev_score(self, encoder, is_student=True):
        """MRR@10 of the dev queries."""
        eval_retrieval.set_prompts(encoder, self.args)
        encoders = [encoder, encoder]  # of queries and of passages
        similarity = self.similarity(encoder, is_student)
        found = eval_retrieval.evaluate(embed, encoders, *self.dev, similarity, depth=10)
        return found["MRR@10"]


def learn_from_teacher(task, run, args):
    """-> its embeddings of all texts, for stage 1, or examples with what it finds, for stage 2."""
    teacher = load_encoder(args.teacher, args.teacher_pooling, device=args.device)
    texts = task.texts(teacher)
    targets = teacher_embeddings(embed, teacher, texts, args.max_length, args.precision)
    if run.stage == "finetune":
        return task.examples(teacher, targets)
    run.scores["teacher"] = {"dev": task.dev_score(teacher, is_student=False)}
    return targets


def main():
    args = read_options(Options, __doc__)
    args.teacher_similarity = args.teacher_similarity or args.similarity
    stages = ["distill", "finetune"] if args.stage == "both" else [args.stage]
    task = Retrieval(args)
    settings = run_settings(args, [__file__, ibkd.__file__, eval_retrieval.__file__], task.read)
    previous = None
    for stage in stages:  # each is a run with a folder of its own
        run = Run(settings, args, stage, is_last=stage == stages[-1])
        if not run.is_finished:
            learned = learn_from_teacher(task, run, args)
            if previous:
                run.scores |= previous.scores
                student = load_encoder(
                    previous.folder, device=args.device, precision=args.precision
                )
            else:
                student = load_untrained_student(args)
                run.scores["student before"] = {"dev": task.dev_score(student)}
            train = ibkd.distill if stage == "distill" else ibkd.finetune
            train(student, task.texts(student), learned, task.dev_score, run, args)
            best = load_encoder(run.folder, device=args.device)
            run.finish(f"best of {stage}", {"dev": task.dev_score(best)})
        previous = run
    print(table(run.scores))


if __name__ == "__main__":
    run_main(main)
