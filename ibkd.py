"""IBKD, information bottleneck knowledge distillation, for similarity and for dense retrieval.

Zhang, Long, Li, Xie: "Text Representation Distillation via Information Bottleneck Principle",
EMNLP 2023, arXiv:2311.05472.

The student's embedding S of a text X keeps what the teacher's embedding T says, and forgets the
rest of X: eq. 1, L = -I(S, T) + beta I(X, S). InfoNCE with in-batch negatives is a lower bound of
I(S, T). HSIC, a kernel measure of dependence, stands for I(X, S). X is the mean of the student's
own input embeddings. Stage 1 (distill) needs texts alone. Stage 2 (finetune) replaces the teacher
by labels: anchors with their positives and hard negatives. --dim projects S to S' there.

    text --> teacher (frozen) ------> T --------------> InfoNCE --------+
      |                                                    |            |
      +----> student --> X, S --+--> S --> mapping W ------+            +--> loss    stage 1, eq. 8
                                +--> kernels --> beta_1 HSIC(X, S) -----+
    positive, hard negatives --> student --> S --> S' --> supervised InfoNCE --+
    anchor --> student --> X, S --+--> S' ------------------------^            +--> loss    eq. 9
                                  +--> kernels --> beta_2 HSIC(X, S) ----------+

What the paper leaves open, and where this script differs from the paper or the authors' code:
  - Eq. 7 is printed as exp(gamma |x - y|). The RBF kernel, also in the authors' code, is
    exp(-gamma |x - y|^2). As in that code, IMQ is 1 / sqrt(|x - y|^2 + gamma), linear the cosine.
  - The code divides HSIC by (l - 1)^2. Here, as in eq. 6, it is divided by l^2.
  - Section 3.1 contrasts with "other samples", though its sum is printed over all j. The positive
    stands in the denominator once.
  - HSIC is taken of X as it is, and of S as its folder states it: L2-normalized only if the folder
    ends in Normalize. --hsic-vectors unit normalizes both.
  - Stage 1 of the code: gamma 1, beta_1 0.2, tau 1. Here: the paper's 0.5, 1 and 0.1.
  - Stage 2 of the code takes HSIC of anchors, positives and negatives, X from the last layer but
    one, gamma 0.1, beta_2 1, learning rate 1e-6. Here: the anchors, the input embeddings, and the
    paper's numbers. --hsic-texts all --hsic-layer -2 --gamma 0.1 --beta2 1 follow the code.
  - Eq. 8 and 10 print inner products. As in the code, both are the cosine, of W s and of S'. W
    starts as the identity if the dimensions agree. S is read without W, as the dimensions in Table
    2 say. The code keeps W in the student (--keep-mapping), whose queries then match an index that
    the teacher built. --align starts W from the data. Several --teacher are distilled together.
  - Eq. 10 contrasts an anchor with its own hard negatives, the code with those of the whole batch
    (--batch-negatives).
  - Stage 1 of the paper is on 3,590,265 sentences: NLI, and the same by WordNet and by back
    translation (4.3, A.1). The default here is NLI alone; --train names others.
  - A batch has texts of similar length, so that in-batch negatives and the samples of HSIC are
    alike in it. --shuffle draws them at random.
  - A student cut to --student-layers trains without dropout, which is better there (RESULTS.md),
    a whole one with its own, as in the paper. --dropout sets it.
  - As in the code: Adam, linear decay to zero, 128 tokens, gradient norm clipped at 1. Scores are
    of texts at the model's own maximum.
  - Retrieval: the code has none. The teacher mines hard negatives, once, which are kept in the
    cache; --negatives FILE gives or keeps them. Passages with one text are one passage. Every
    tenth training query, up to --dev-queries, does not train: these choose the best student, by
    MRR@10 among --dev-passages. A query's own passage (the same id) is no answer, as in BEIR.
  - CoCondenser and RetroMAE are read at [CLS] and compared by inner product. A student is trained
    by the cosine and compared by it; --similarity dot compares both by inner product.
  - The paper's baselines (MSE, CRD, HPD) are in baselines.py. CKD (Table 4) is --beta1 0 --beta2 0.

  python ibkd.py --student nreimers/MiniLM-L6-H384-uncased      the paper's setting for similarity
  python ibkd.py --task dr --student nreimers/MiniLM-L6-H384-uncased --test-split dev
      --teacher Luyu/co-condenser-marco-retriever --teacher-pooling cls --teacher-similarity dot
                                                                the paper's setting for retrieval
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
    which does not use gamma > 0. The paper prints exp(gamma |z_i - z_j|), which grows with the
    distance. z [l, D] -> [l, l].
    """
    if kernel == "linear":
        return cosine(z, z)
    squares = z.square().sum(dim=1)  # [l]
    distance = (squares[:, None] + squares - 2 * z @ z.T).clamp(min=0)  # |z_i - z_j|^2, [l, l]
    if kernel == "rbf":
        return torch.exp(-gamma * distance)
    return torch.rsqrt(distance + gamma)


def hsic(gram_x, gram_s):
    """Eq. 6: HSIC(X, S) = tr(K_X H K_S H) / l^2, with H = I - 1 1^T / l

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
    """An encoder, which gives S, and a matrix behind S: in stage 1 W of section 3.1, in stage 2
    W_proj (see add_projection), or none.

    encoder: has `model`, a transformer; `pooling`, "cls" or "mean"; `heads`, dense layers behind
    it; `normalize`; `dimension`, that of S; add_head(linear, activation).
    mapped_dimension: the teacher's dimension, or None for no W. W is dropped after stage 1, or with
    keep_mapping it becomes the encoder's last head.
    input_layer: X is read from here; 0 is the embedding layer, -2 the last layer but one.
    """

    def __init__(self, encoder, mapped_dimension=None, keep_mapping=False, input_layer=0):
        super().__init__()
        self.encoder = encoder
        self.heads = encoder.heads[:]  # those that make S
        self.input_layer = input_layer
        self.mapping = nn.Identity()
        if mapped_dimension is None:
            return
        self.mapping = nn.Linear(encoder.dimension, mapped_dimension, bias=False)  # W
        if mapped_dimension == encoder.dimension:
            nn.init.eye_(self.mapping.weight)
        if keep_mapping:
            encoder.add_head(self.mapping, nn.Identity())

    @torch.no_grad()
    def start_mapping(self, alignment):
        """Start W as the transpose of a matrix A [D_T, D], which maps teacher to student."""
        self.mapping.weight.copy_(alignment)

    def forward(self, input_ids, attention_mask):
        """[N, L], [N, L] -> X [N, H], the mean of the input embeddings, and S [N, D]; float32."""
        output = self.encoder.model(input_ids, attention_mask, output_hidden_states=True)
        x = mean_over_tokens(output.hidden_states[self.input_layer], attention_mask)
        token_states = output.hidden_states[-1]  # [N, L, H]
        if self.encoder.pooling == "cls":
            pooled = token_states[:, 0]
        else:
            pooled = mean_over_tokens(token_states, attention_mask)
        s = self.heads(pooled).float()
        if self.encoder.normalize:
            s = F.normalize(s, dim=1)
        return x.float(), s


def add_projection(student, dimension):
    """Eq. 11: S' = W_proj S; the encoder's embedding is then S', of this dimension.

    W_proj starts as the identity if the dimensions agree.
    """
    student.mapping = nn.Linear(student.encoder.dimension, dimension, bias=False)
    if dimension == student.encoder.dimension:
        nn.init.eye_(student.mapping.weight)
    student.encoder.add_head(student.mapping, nn.Identity())


# --------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------

from collections.abc import Callable

import numpy as np

from common import DataError, Tokens, table
from support.alignment import align_by_sample
from support.command_line import (
    DEMO,
    ArgumentParser,
    EvaluationSets,
    add_data_options,
    add_model_options,
    add_run_options,
    check_negatives,
    check_only_teacher,
    count,
    evaluation_sets,
    load_student,
    load_teachers,
    positive,
    reload_student,
    run_main,
    training_sentences,
    training_triplets,
    weight,
)
from support.retrieval_training import (
    RetrievalSets,
    TokenizedTexts,
    add_retrieval_options,
    given_negatives,
    mined_negatives,
    read_training_data,
    training_rows,
)
from support.run import Run, set_learning_rate
from support.teachers import Teachers

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
        input_ids, attention_mask = texts.batch(step.own_rows, run.device)  # [n, L]
        teacher = targets[step.rows]  # T [N, D_T]
        with run.autocast():
            x, s = student(input_ids, attention_mask)  # X [n, H], S [n, D]
        x, s = step.gather(x, s)  # of all processes, [N, H], [N, D]
        mapped = student.mapping(s)  # W S [N, D_T]
        contrast = info_nce(mapped, teacher, args.temperature)
        dependence = bottleneck(x, s, args.beta1, args)
        loss = contrast + dependence  # eq. 8
        run.backward(loss, optimizer)
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        run.step(optimizer)
        step.log(loss=loss, info_nce=contrast, hsic=dependence)


def finetune(student, labels, evaluation, run, args):
    """Eq. 9: L = L_nce^sup + beta_2 HSIC(X, S)

    Stage 2, with L_nce^sup of eq. 10 to minimize, of S' where there is one. X and S are those of
    the anchors, or with --hsic-texts all those of every text.
    """
    optimizer = torch.optim.Adam(student.parameters(), lr=args.finetune_lr, fused=True)
    student.train()
    for step in run.steps(
        "finetune",
        labels.tokens.lengths[labels.anchors],
        [student],
        optimizer,
        dev_score=partial(evaluation.dev_score, student.encoder),
        save=partial(student.encoder.save, run.folder),
        epochs=args.finetune_epochs,
        batch_size=args.finetune_batch_size,
        patience=args.patience,
    ):
        set_learning_rate(optimizer, linear_decay(args.finetune_lr, step))
        positives = labels.positives[step.own_rows]  # [n]
        hard_negatives = labels.hard_negatives[step.own_rows]  # [n, K]
        compared = np.concatenate([positives, hard_negatives.ravel()])  # [n + n K]
        with run.autocast():
            anchors = labels.tokens.batch(labels.anchors[step.own_rows], run.device)
            x, s = student(*anchors)  # X [n, H], S [n, D]
            x_compared, s_compared = embed_by_length(student, labels.tokens, compared, run.device)
        n = len(x)
        x, s, x_positive, s_positive, x_negatives, s_negatives = step.gather(
            x, s, x_compared[:n], s_compared[:n], x_compared[n:], s_compared[n:]
        )  # of all processes: twice [N, H], [N, D], then [N K, H], [N K, D]
        s_compared = torch.cat([s_positive, s_negatives])  # [N + N K, D]
        mapped = student.mapping(s)  # S' [N, D']
        mapped_compared = student.mapping(s_compared)  # [N + N K, D']
        s_positive = mapped_compared[: len(s)]
        s_negatives = mapped_compared[len(s) :].unflatten(0, (len(s), -1))  # [N, K, D']
        contrast = supervised_info_nce(
            mapped, s_positive, s_negatives, args.finetune_temperature, args.batch_negatives
        )
        if args.hsic_texts == "all":
            x = torch.cat([x, x_positive, x_negatives])
            s = torch.cat([s, s_compared])
        dependence = bottleneck(x, s, args.beta2, args)
        loss = contrast + dependence  # eq. 9
        run.backward(loss, optimizer)
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        run.step(optimizer)
        step.log(loss=loss, info_nce=contrast, hsic=dependence)


def embed_by_length(student, tokens, rows, device):
    """X and S of these rows [M] of `tokens` -> [M, H], [M, D]; texts of similar length need little
    padding."""
    order = np.argsort(tokens.lengths[rows], kind="stable")
    inputs = []
    embeddings = []
    for part in np.array_split(order, math.ceil(len(rows) / TEXTS_AT_A_TIME)):
        x, s = student(*tokens.batch(rows[part], device))
        inputs.append(x)
        embeddings.append(s)
    position = np.argsort(order)
    return torch.cat(inputs)[position], torch.cat(embeddings)[position]


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
    add_retrieval_options(parser)
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
    add(
        "--hsic-layer",
        type=int,
        default=0,
        help="X is from this layer of the student; 0: its input embeddings; -2: the last but one; "
        "%(default)s",
    )
    texts = ("anchor", "all")
    add("--hsic-texts", choices=texts, default="anchor", help="stage 2: of HSIC; %(default)s")
    add(
        "--keep-mapping",
        "--keep-projection",
        action="store_true",
        help="W stays: the student uses the teacher's space",
    )
    add(
        "--align",
        action="store_true",
        help="start W by principal components and a rotation; see support/alignment.py",
    )
    add("--dim", type=count, help="stage 2: project the embedding to this dimension (3.4)")
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
    """What is not given is the paper's; the teacher's similarity is that of the student."""
    args.teacher_similarity = args.teacher_similarity or args.similarity
    for stage, prefix in (("distill", ""), ("finetune", "finetune_")):
        for name, value in TABLE_1[args.task, stage]._asdict().items():
            if getattr(args, prefix + name) is None:
                setattr(args, prefix + name, value)


class Labels(NamedTuple):
    """Of stage 2: each of n anchors has a positive and K hard negatives, rows of `tokens`."""

    tokens: Tokens
    anchors: np.ndarray  # [n]
    positives: np.ndarray  # [n]
    hard_negatives: np.ndarray  # [n, K]


class Task(NamedTuple):
    """What a student learns from, and how it and its teacher are scored."""

    teachers: Teachers  # None where nothing needs them
    texts: TokenizedTexts  # of stage 1, None without it
    labels: Callable  # () -> Labels, when stage 2 begins
    evaluation: EvaluationSets | RetrievalSets
    teacher_scores: Callable  # () -> {row: {set: score}}


def similarity_task(encoder, args, stages):
    """Section 4.3, STS: sentences, and triplets of NLI. Raises DataError."""
    evaluation = evaluation_sets(args)
    texts = labels = teachers = None
    if "distill" in stages:
        texts = TokenizedTexts(training_sentences(args.train), args.max_length)
        check_negatives(len(texts.texts), args.batch_size)
        teachers = load_teachers(args)
    if "finetune" in stages:
        labels = partial(label_triplets, encoder, training_triplets(args.triplets), args.max_length)
    return Task(teachers, texts, labels, evaluation, partial(scores_of, teachers, evaluation))


def scores_of(teachers, evaluation):
    """{row: {set: score}} of the teachers, if the run has any."""
    return {} if teachers is None else teachers.scores(evaluation)


def label_triplets(encoder, triplets, max_length):
    """Anchors, positives and hard negatives, n texts each -> Labels."""
    anchors, positives, hard_negatives = triplets
    tokens = Tokens(encoder, anchors + positives + hard_negatives, max_length)
    rows = np.arange(len(tokens)).reshape(3, -1)
    return Labels(tokens, rows[0], rows[1], rows[2][:, None])


def retrieval_task(encoder, args, stages):
    """Section 4.3, DR: all passages and training queries. Raises DataError."""
    test_split = None if args.skip_test else args.test_split
    passages, data, sets = read_training_data(
        args.beir, args.dev_queries, args.dev_passages, test_split
    )
    texts = TokenizedTexts(passages + data.queries, args.max_length)
    if "distill" in stages:
        check_negatives(len(texts.texts), args.batch_size)
    given = given_negatives(len(passages), data, args) if "finetune" in stages else None
    mines = "finetune" in stages and given is None
    teachers = None
    if mines or "distill" in stages:
        check_only_teacher(args, "it searches among passages")
        teachers = load_teachers(args)
    labels = partial(label_queries, data, given, texts, encoder, teachers, args)
    evaluation = sets._replace(similarity=args.similarity)
    teacher_evaluation = sets._replace(similarity=args.teacher_similarity)
    return Task(
        teachers, texts, labels, evaluation, partial(search_scores, teachers, teacher_evaluation)
    )


def search_scores(teachers, evaluation):
    """{row: {metric: score}} of the teacher, if the run has one."""
    return {} if teachers is None else {"teacher": evaluation.scores(teachers.first, "teacher")}


def label_queries(data, given, texts, encoder, teachers, args):
    """Training queries, their positives, and hard negatives that are given or mined -> Labels.

    The teacher mines them: the passages most similar to a query, its positives left out.
    """
    negatives = given
    if given is None:
        negatives = mined_negatives(data, teachers.first, texts.of(teachers.first), args)
    queries, positives, negatives = training_rows(data, negatives)
    tokens = texts.of(encoder)
    passages = len(tokens) - len(data.queries)
    return Labels(tokens, passages + queries, positives, negatives)


TASKS = {"sts": similarity_task, "dr": retrieval_task}


def run_stage_1(encoder, task, run, args):
    """Distill the teacher into the encoder, score the result."""
    targets = task.teachers.embeddings(task.texts.of, args.device)
    if args.align:
        alignment = align_by_sample(targets, encoder, task.texts.texts, args.seed)
    torch.manual_seed(args.seed)  # W starts at random
    student = Student(encoder, targets.dimension, args.keep_mapping, args.hsic_layer)
    if args.align:
        student.start_mapping(torch.from_numpy(alignment.matrix))
    texts = task.texts.of(encoder)
    distill(student.to(args.device), texts, targets, task.evaluation, run, args)
    run.state["heads"] = len(encoder.heads)  # those of stage 1, for a stage 2 that is interrupted
    title = "student after stage 1"
    run.finish("distill", {title: task.evaluation.scores(reload_student(run.folder, args), title)})


def run_stage_2(encoder, task, run, args):
    """Fine-tune the encoder on labels, score the result."""
    while run.finished("distill") and len(encoder.heads) > run.state["heads"]:
        encoder.remove_head()  # W_proj, which an interrupted stage 2 has saved with its student
    student = Student(encoder, input_layer=args.hsic_layer)
    if args.dim:
        torch.manual_seed(args.seed)  # W_proj starts the same in a run that was interrupted
        add_projection(student, args.dim)
    finetune(student.to(args.device), task.labels(), task.evaluation, run, args)
    title = "student after stage 2"
    run.finish("finetune", {title: task.evaluation.scores(reload_student(run.folder, args), title)})


def check_layer(encoder, layer):
    """Raises DataError if the student has no such --hsic-layer."""
    depth = encoder.model.config.num_hidden_layers
    if not -depth - 1 <= layer <= depth:
        expected = f"a layer of the student, from {-depth - 1} to {depth}"
        raise DataError(f"--hsic-layer {layer}: expected {expected}")


def check_settings(encoder, teachers, stages, args):
    """Raises DataError for numbers that make no sense together."""
    check_layer(encoder, args.hsic_layer)
    keeps = args.keep_mapping and "distill" in stages
    dimension = teachers.dimension if keeps else encoder.dimension
    if args.dim is not None and args.dim > dimension:
        raise DataError(f"--dim {args.dim}: expected at most {dimension}, that of the embedding")
    uses_hsic = args.beta2 > 0 and args.hsic_texts == "anchor"
    if "finetune" in stages and uses_hsic and args.finetune_batch_size < 2:
        expected = "2 or more, as HSIC of one sample is 0, or --beta2 0"
        raise DataError(f"--finetune-batch-size {args.finetune_batch_size}: expected {expected}")


def main():
    args = parse_args()
    run = Run(args)
    stages = ("distill", "finetune") if args.stage == "both" else (args.stage,)
    encoder = load_student(args)
    task = TASKS[args.task](encoder, args, stages)
    check_settings(encoder, task.teachers, stages, args)

    run.start()
    if run.is_new():
        run.scores.update(task.teacher_scores())
        run.scores["student before"] = task.evaluation.scores(encoder, "student before")
    if "distill" in stages:
        if not run.finished("distill"):
            run_stage_1(encoder, task, run, args)
        encoder = reload_student(run.folder, args)
    if "finetune" in stages and not run.finished("finetune"):
        run_stage_2(encoder, task, run, args)
    run.write_card(
        f"Distilled by `ibkd.py` (IBKD, arXiv:2311.05472), stages: {' and '.join(stages)}.",
        student=args.student or args.teacher,
        teachers=[args.teacher, *args.other_teachers],
        **CARDS[args.task],
    )
    print(table(run.scores))


if __name__ == "__main__":
    run_main(main)
