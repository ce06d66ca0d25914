"""IBKD, information bottleneck knowledge distillation, for similarity and for dense retrieval.

Zhang, Long, Li, Xie: "Text Representation Distillation via Information Bottleneck Principle",
EMNLP 2023, arXiv:2311.05472.

The student's embedding S of a text X keeps what the teacher's embedding T says, and forgets the
rest of X: eq. 1, L = -I(S, T) + beta I(X, S). InfoNCE with in-batch negatives is a lower bound of
I(S, T). HSIC, a kernel measure of dependence, stands for I(X, S). X is the mean of the student's
own input embeddings. Stage 1 (distill) needs texts alone. Stage 2 (finetune) replaces the teacher
by labels: anchors with their positives and hard negatives.

    text --> teacher (frozen) ------> T --------------> InfoNCE --------+
      |                                                    |            |
      +----> student --> X, S --+--> S --> mapping W ------+            +--> loss    stage 1, eq. 8
                                +--> kernels --> beta_1 HSIC(X, S) -----+
    anchor, positive, hard negatives --> student --> S --> supervised InfoNCE --+
    anchor --> student --> X, S --> kernels --> beta_2 HSIC(X, S) --------------+--> loss    eq. 9

What the paper leaves open, and where this script differs from the paper or the authors' code:
  - Eq. 7 is printed as exp(gamma |x - y|). The RBF kernel, also in the authors' code, is
    exp(-gamma |x - y|^2). As in that code, IMQ is 1 / sqrt(|x - y|^2 + gamma), linear the cosine.
  - The code divides HSIC by (l - 1)^2. Here, as in eq. 6, it is divided by l^2.
  - Section 3.1 contrasts with "other samples", though its sum is printed over all j. The positive
    stands in the denominator once.
  - HSIC is taken of X as it is, and of S as its folder states it: L2-normalized only if the folder
    ends in Normalize. --hsic-vectors unit normalizes both.
  - Similarity is the cosine after W. W starts as the identity if the dimensions agree. S is read
    without W, as the dimensions in Table 2 say. The code keeps W in the student (--keep-mapping),
    whose queries then match an index that the teacher built.
  - Eq. 10 contrasts an anchor with its own hard negatives, the code with those of the whole batch
    (--batch-negatives).
  - Retrieval: every tenth training query does not train; it chooses the best student, by MRR@10
    among --dev-passages. The teacher mines the hard negatives: the passages nearest to a query.
  - As in the code: Adam, linear decay to zero, 128 tokens, gradient norm clipped at 1.
  - The paper's baselines (MSE, CRD, HPD) are in baselines.py. CKD (Table 4) is --beta1 0 --beta2 0.

  python ibkd.py --student nreimers/MiniLM-L6-H384-uncased      the paper's setting for similarity
  python ibkd.py --task dr --beir my-beir-folder --teacher MODEL --student-layers 1,3,5
  python ibkd.py --demo                                         two minutes on a CPU
"""

import math
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

# --------------------------------------------------------------------------------------------------
# Losses
# --------------------------------------------------------------------------------------------------


def cosine(a, b):
    """The cosine of all pairs of rows: [N, D], [M, D] -> [N, M]."""
    return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T


def gram_matrix(z, kernel, gamma):
    """Eq. 7: K_ij = exp(-gamma |z_i - z_j|^2)

    for the kernel "rbf"; 1 / sqrt(|z_i - z_j|^2 + gamma) for "imq"; cos(z_i, z_j) for "linear",
    which does not use gamma > 0. z [l, D] -> [l, l].
    """
    if kernel == "linear":
        return cosine(z, z)
    squares = z.square().sum(dim=1)  # [l]
    distance = (squares[:, None] + squares - 2 * z @ z.T).clamp(min=0)  # |z_i - z_j|^2, [l, l]
    if kernel == "rbf":
        return torch.exp(-gamma * distance)
    return torch.rsqrt(distance + gamma)


def hsic(gram_x, gram_s):
    """Eq. 6: HSIC(X, S) = tr(K_X H K_S H) / l^2, with H = I - 1/l

    gram_x, gram_s: Gram matrices [l, l] of the same l samples. Returns a scalar >= 0, which tends
    to 0 for independent X and S as l grows.
    """
    l = len(gram_x)
    centering = torch.eye(l).to(gram_x) - 1 / l  # H
    return torch.trace(gram_x @ centering @ gram_s @ centering) / l**2


def info_nce(student, teacher, temperature):
    """Section 3.1: -log( exp(cos(W s_i, t_i) / tau) / sum_j exp(cos(W s_i, t_j) / tau) )

    student [N, D], already mapped by W; teacher [N, D], of the same texts; temperature tau > 0.
    Returns the mean over the batch, a scalar >= 0.
    """
    logits = cosine(student, teacher) / temperature  # [N, N]
    positives = torch.arange(len(student), device=student.device)
    return F.cross_entropy(logits, positives)


def supervised_info_nce(anchor, positive, negatives, temperature, batch_negatives=False):
    """Eq. 10: -log( e(s_i, s_i^+) / (sum_j e(s_i, s_j^+) + sum_k e(s_i, s_ik^-)) )

    with e(u, v) = exp(cos(u, v) / tau). anchor, positive [N, D]; negatives [N, K, D], the hard
    negatives of each anchor; with batch_negatives each anchor is contrasted with all N K of them;
    temperature tau > 0. Returns the mean over the batch, a scalar >= 0.
    """
    if batch_negatives:
        hard = cosine(anchor, negatives.flatten(0, 1))  # [N, N K]
    else:
        hard = F.cosine_similarity(anchor.unsqueeze(1), negatives, dim=-1)  # [N, K]
    logits = torch.cat([cosine(anchor, positive), hard], dim=1) / temperature
    positives = torch.arange(len(anchor), device=anchor.device)
    return F.cross_entropy(logits, positives)


# --------------------------------------------------------------------------------------------------
# Model
# --------------------------------------------------------------------------------------------------


def mean_over_tokens(token_states, attention_mask):
    """[N, L, H], [N, L] -> [N, H]"""
    mask = attention_mask.unsqueeze(-1)  # [N, L, 1]
    return (token_states * mask).sum(dim=1) / mask.sum(dim=1)


class Student(nn.Module):
    """An encoder, which gives S, and in stage 1 the matrix W of section 3.1.

    encoder: has `model`, a transformer; `pooling`, "cls" or "mean"; `heads`, dense layers behind
    it; `normalize`; `dimension`, that of S; add_head(linear, activation).
    mapped_dimension: the teacher's dimension, or None for no W. W is dropped after stage 1, or with
    keep_mapping it becomes the encoder's last head.
    """

    def __init__(self, encoder, mapped_dimension=None, keep_mapping=False):
        super().__init__()
        self.encoder = encoder
        self.heads = encoder.heads[:]  # those that make S, without W
        self.mapping = nn.Identity()
        if mapped_dimension is None:
            return
        self.mapping = nn.Linear(encoder.dimension, mapped_dimension, bias=False)  # W
        if mapped_dimension == encoder.dimension:
            nn.init.eye_(self.mapping.weight)
        if keep_mapping:
            encoder.add_head(self.mapping, nn.Identity())

    def forward(self, input_ids, attention_mask):
        """[N, L], [N, L] -> X [N, H], the mean of the input embeddings, and S [N, D]; float32."""
        output = self.encoder.model(input_ids, attention_mask, output_hidden_states=True)
        x = mean_over_tokens(output.hidden_states[0], attention_mask)
        token_states = output.hidden_states[-1]  # [N, L, H]
        if self.encoder.pooling == "cls":
            pooled = token_states[:, 0]
        else:
            pooled = mean_over_tokens(token_states, attention_mask)
        s = self.heads(pooled).float()
        if self.encoder.normalize:
            s = F.normalize(s, dim=1)
        return x.float(), s


def add_projection(encoder, dimension):
    """Eq. 11: S' = W_proj S; the encoder's embedding is then S', of this dimension."""
    encoder.add_head(nn.Linear(encoder.dimension, dimension, bias=False), nn.Identity())


# --------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------

import numpy as np

from common import Tokens, table, teacher_embeddings
from support.command_line import (
    DEMO,
    ArgumentParser,
    EvaluationSets,
    add_data_options,
    add_model_options,
    add_run_options,
    count,
    evaluation_sets,
    load_student,
    load_teacher,
    positive,
    reload_student,
    run_main,
    training_sentences,
    training_triplets,
    weight,
)
from support.retrieval import RetrievalSets, mine_hard_negatives, read_training_data, training_rows
from support.run import Run, set_learning_rate

TEXTS_AT_A_TIME = 32  # in stage 2, of the positives and hard negatives of a batch


def linear_decay(lr, step):
    """The learning rate of a Step: `lr` at the first, then falling to 0 behind the last."""
    return lr * (step.total + 1 - step.number) / step.total


def bottleneck(x, s, beta, args):
    """beta HSIC(X, S), the second term of eq. 8 and 9. [l, H], [l, D] -> scalar."""
    if args.hsic_vectors == "unit":
        x = F.normalize(x, dim=1)
        s = F.normalize(s, dim=1)
    gram_x = gram_matrix(x, args.kernel, args.gamma)
    gram_s = gram_matrix(s, args.kernel, args.gamma)
    return beta * hsic(gram_x, gram_s)


def distill(student, texts, targets, evaluation, run, args):
    """Eq. 8: L = L_nce(S, T) + beta_1 HSIC(X, S)

    Stage 1. The paper prints -(L_nce - beta_1 HSIC), where L_nce is the bound to maximize; here
    L_nce is info_nce, to minimize. texts: Tokens of n; targets: the teacher's embedding T of each.
    """
    optimizer = torch.optim.Adam(student.parameters(), lr=args.lr, fused=True)
    student.train()
    for step in run.steps(
        "distill",
        texts.lengths,
        [student],
        optimizer,
        dev_score=partial(evaluation.dev_score, student.encoder),
        save=partial(student.encoder.save, run.folder),
        epochs=args.epochs,
        batch_size=args.batch_size,
        patience=args.patience,
    ):
        set_learning_rate(optimizer, linear_decay(args.lr, step))
        input_ids, attention_mask = texts.batch(step.rows, run.device)  # [N, L]
        teacher = targets[step.rows]  # T [N, D_T]
        with run.autocast():
            x, s = student(input_ids, attention_mask)  # X [N, H], S [N, D]
        mapped = student.mapping(s)  # W S [N, D_T]
        contrast = info_nce(mapped, teacher, args.temperature)
        dependence = bottleneck(x, s, args.beta1, args)
        loss = contrast + dependence  # eq. 8
        run.backward(loss, optimizer)
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        run.step(optimizer)
        step.log(loss=loss, info_nce=contrast, hsic=dependence)


def finetune(student, anchors, others, task, run, args):
    """Eq. 9: L = L_nce^sup + beta_2 HSIC(X, S)

    Stage 2, with L_nce^sup of eq. 10 to minimize, and X and S of the anchors.
    anchors, others: Tokens of these texts of the task.
    """
    optimizer = torch.optim.Adam(student.parameters(), lr=args.finetune_lr, fused=True)
    student.train()
    for step in run.steps(
        "finetune",
        anchors.lengths,
        [student],
        optimizer,
        dev_score=partial(task.evaluation.dev_score, student.encoder),
        save=partial(student.encoder.save, run.folder),
        epochs=args.finetune_epochs,
        batch_size=args.finetune_batch_size,
        patience=args.patience,
    ):
        set_learning_rate(optimizer, linear_decay(args.finetune_lr, step))
        positives = task.positives[step.rows]  # [N]
        hard_negatives = task.hard_negatives[step.rows]  # [N, K]
        compared = np.concatenate([positives, hard_negatives.ravel()])  # [N + N K]
        with run.autocast():
            x, s = student(*anchors.batch(step.rows, run.device))  # X [N, H], S [N, D]
            s_compared = embed_by_length(student, others, compared, run.device)  # [N + N K, D]
        s_positive = s_compared[: len(s)]
        s_negatives = s_compared[len(s) :].unflatten(0, (len(s), -1))  # [N, K, D]
        contrast = supervised_info_nce(
            s, s_positive, s_negatives, args.finetune_temperature, args.batch_negatives
        )
        dependence = bottleneck(x, s, args.beta2, args)
        loss = contrast + dependence  # eq. 9
        run.backward(loss, optimizer)
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        run.step(optimizer)
        step.log(loss=loss, info_nce=contrast, hsic=dependence)


def embed_by_length(student, tokens, rows, device):
    """S of these rows [M] of `tokens` -> [M, D]; texts of similar length need little padding."""
    order = np.argsort(tokens.lengths[rows], kind="stable")
    embeddings = []
    for part in np.array_split(order, math.ceil(len(rows) / TEXTS_AT_A_TIME)):
        _, s = student(*tokens.batch(rows[part], device))
        embeddings.append(s)
    return torch.cat(embeddings)[np.argsort(order)]


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------


class Settings(NamedTuple):
    """A column of Table 1."""

    lr: float
    batch_size: int
    epochs: int
    temperature: float


TABLE_1 = {  # by task and stage
    ("sts", "distill"): Settings(1e-4, 256, 10, 0.1),
    ("sts", "finetune"): Settings(3e-5, 256, 3, 0.05),
    ("dr", "distill"): Settings(1e-4, 128, 3, 0.1),
    ("dr", "finetune"): Settings(1e-5, 128, 3, 0.05),
}
CARDS = {"sts": {}, "dr": {"task": "information-retrieval", "metric": None}}  # of the models


def parse_args():
    parser = ArgumentParser(
        "IBKD: distill a sentence encoder. Defaults are the paper's.",
        moved={
            "--objective": "baselines.py --method crd, --method hpd and --method kd --protocol "
            "ibkd --reduction mean (MSE) are the paper's baselines; CKD is --beta1 0 --beta2 0"
        },
    )
    add_model_options(parser, "princeton-nlp/sup-simcse-roberta-large")
    data = add_data_options(parser, "nli_for_simcse.csv").add_argument
    data(
        "--triplets",
        default="nli_for_simcse.csv",
        help="sts, stage 2: CSV with the columns sent0,sent1,hard_neg; %(default)s (4.3)",
    )
    data("--beir", default="BeIR/msmarco", help="dr: BEIR folder, or Hub data set; %(default)s")
    data(
        "--dev-passages",
        type=count,
        default=100_000,
        help="dr: passages searched for a dev score, and the positives; %(default)s",
    )
    group = parser.add_argument_group("method (sections of the paper in brackets)")
    add = group.add_argument
    add("--task", choices=("sts", "dr"), default="sts", help="similarity or dense retrieval")
    stages = ("distill", "finetune", "both")
    add("--stage", choices=stages, default="both", help="stage 1 or stage 2 (3.3); %(default)s")
    kernels = ("rbf", "imq", "linear")
    add("--kernel", choices=kernels, default="rbf", help="of HSIC (Table 4); %(default)s")
    add("--gamma", type=positive, default=0.5, help="of the kernel; %(default)s (4.3)")
    add("--beta1", type=weight, default=1.0, help="weight of HSIC, stage 1; %(default)s (4.3)")
    add("--beta2", type=weight, default=0.5, help="weight of HSIC, stage 2; %(default)s (4.3)")
    add(
        "--hsic-vectors",
        choices=("raw", "unit"),
        default="raw",
        help="HSIC of X and S as they are, or L2-normalized; %(default)s",
    )
    add("--keep-mapping", action="store_true", help="W stays: the student uses the teacher's space")
    add("--dim", type=count, help="stage 2: project the embedding to this dimension (3.4)")
    add("--hard-negatives", type=count, default=8, help="dr: of a query; %(default)s (4.3)")
    add("--batch-negatives", action="store_true", help="stage 2: hard negatives of the batch")
    for prefix, stage in (("", "stage 1"), ("finetune-", "stage 2")):
        source = f"{stage}; by the task (Table 1)"
        add(f"--{prefix}lr", type=positive, help=source)
        add(f"--{prefix}batch-size", type=count, help=source)
        add(f"--{prefix}epochs", type=count, help=source)
        add(f"--{prefix}temperature", type=positive, help=source)
    add_run_options(parser, "runs/ibkd", max_length=128, eval_steps=500, patience=0)
    args = parser.parse(
        demo_defaults=dict(
            **DEMO,
            triplets="demo",
            output="runs/ibkd-demo",
            epochs=1,
            batch_size=64,
            lr=4e-4,
            eval_steps=50,
            finetune_epochs=1,
            finetune_batch_size=64,
            finetune_lr=2e-5,
        )
    )
    apply_table_1(args)
    return args


def apply_table_1(args):
    """What is not given is the paper's."""
    for stage, prefix in (("distill", ""), ("finetune", "finetune_")):
        for name, value in TABLE_1[args.task, stage]._asdict().items():
            if getattr(args, prefix + name) is None:
                setattr(args, prefix + name, value)


class Task(NamedTuple):
    """What a student learns from, and how it is scored.

    In stage 2 each of n anchors is compared with texts among m others.
    """

    texts: list  # of stage 1
    anchors: list  # n texts
    others: list  # m texts
    positives: np.ndarray  # [n], rows of others
    hard_negatives: np.ndarray  # [n, K], rows of others
    evaluation: EvaluationSets | RetrievalSets


def similarity_task(args, stages):
    """Section 4.3, STS: sentences, and triplets of NLI. Raises DataError."""
    evaluation = evaluation_sets(args)
    texts = anchors = positives = negatives = []
    if "distill" in stages:
        texts = training_sentences(args.train)
    if "finetune" in stages:
        anchors, positives, negatives = training_triplets(args.triplets)
    rows = np.arange(len(anchors))
    negative_rows = len(rows) + rows[:, None]  # [n, 1]
    return Task(texts, anchors, positives + negatives, rows, negative_rows, evaluation)


def retrieval_task(args, teacher):
    """Section 4.3, DR: all passages and training queries. Raises DataError.

    The teacher mines the hard negatives: the passages nearest to a query, its positives left out.
    """
    data, evaluation = read_training_data(args.beir, args.dev_passages, args.skip_test)
    texts = data.passages + data.queries
    tokens = Tokens(teacher, texts, args.max_length)
    vectors = teacher_embeddings(teacher, tokens, args.device).array
    passages, queries = np.split(vectors, [len(data.passages)])
    mined = mine_hard_negatives(queries, passages, data.positives, args.hard_negatives, args.device)
    anchors, positives, negatives = training_rows(data, mined)
    return Task(texts, anchors, data.passages, positives, negatives, evaluation)


def run_stage_1(encoder, task, teacher, run, args):
    """Distill the teacher into the encoder, score the result."""
    teacher_tokens = Tokens(teacher, task.texts, args.max_length)
    targets = teacher_embeddings(teacher, teacher_tokens, args.device)
    torch.manual_seed(args.seed)  # W starts at random
    student = Student(encoder, targets.dimension, args.keep_mapping).to(args.device)
    tokens = Tokens(encoder, task.texts, args.max_length)
    distill(student, tokens, targets, task.evaluation, run, args)
    title = "student after stage 1"
    run.finish("distill", {title: task.evaluation.scores(reload_student(run.folder, args), title)})


def run_stage_2(encoder, task, run, args):
    """Fine-tune the encoder on labels, score the result."""
    if args.dim and args.dim != encoder.dimension:
        torch.manual_seed(args.seed)  # W_proj starts the same in a run that was interrupted
        add_projection(encoder, args.dim)
    student = Student(encoder).to(args.device)
    anchors = Tokens(encoder, task.anchors, args.max_length)
    others = Tokens(encoder, task.others, args.max_length)
    finetune(student, anchors, others, task, run, args)
    title = "student after stage 2"
    run.finish("finetune", {title: task.evaluation.scores(reload_student(run.folder, args), title)})


def main():
    args = parse_args()
    run = Run(args)
    stages = ("distill", "finetune") if args.stage == "both" else (args.stage,)
    encoder = load_student(args)
    needs_teacher = "distill" in stages or args.task == "dr"
    teacher = load_teacher(args) if needs_teacher else None
    task = retrieval_task(args, teacher) if args.task == "dr" else similarity_task(args, stages)

    run.start()
    if run.is_new():
        if teacher is not None:
            run.scores["teacher"] = task.evaluation.scores(teacher, "teacher")
        run.scores["student before"] = task.evaluation.scores(encoder, "student before")
    if "distill" in stages:
        if not run.finished("distill"):
            run_stage_1(encoder, task, teacher, run, args)
        encoder = reload_student(run.folder, args)
    if "finetune" in stages and not run.finished("finetune"):
        run_stage_2(encoder, task, run, args)
    run.write_card(
        f"Distilled by `ibkd.py` (IBKD, arXiv:2311.05472), stages: {' and '.join(stages)}.",
        student=args.student or args.teacher,
        teacher=args.teacher,
        **CARDS[args.task],
    )
    print(table(run.scores))


if __name__ == "__main__":
    run_main(main)
