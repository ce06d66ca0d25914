"""CKD, contrastive knowledge distillation: the method of DistilCSE.

Gao, Wu, Wang, Wang, Zang, Wang, Hu: "DistilCSE: Effective Knowledge Distillation For Contrastive
Sentence Embeddings", arXiv:2112.05638.

Stage 1 (distill), on unlabeled sentences: from the student's embedding of a sentence, find the
frozen teacher's embedding of it among the teacher's embeddings of other sentences, those of the
batch and those of a memory bank. Stage 2 (finetune), on NLI triplets, without the teacher: find the
entailed sentence among all entailed and contradicting sentences of the batch.

    sentence --> teacher (frozen) ----------------> h^T --> memory bank (teacher embeddings)
        |                                            |          |
        +-----> student --> h^S --> projection M --> InfoNCE <--+          stage 1, eq. 5 and 6
    anchor, positive, hard negative --> student --> InfoNCE                stage 2, eq. 7

What the paper leaves open, and where this script differs from the paper or the authors' code:
  - The paper gives no temperature. Here it is fixed at 0.05 in both stages. --learn-temperature
    learns it as the authors' code does, from 1/e in stage 1 and from 1/20 in stage 2 on; there
    stage 2 learns the scale 1/tau itself, here its logarithm.
  - As in the authors' code: Adam with betas 0.9 and 0.98, gradient norm clipped at 1, cosine decay
    after a warm-up of a tenth of an epoch, 64 tokens in training (the model's own maximum in
    scoring), M with a bias, and a plain student read at [CLS] through its own pooler. The student
    is scored and saved without M.
  - The authors train on 8 GPUs with 512 sentences each in stage 1, and on 4 GPUs with 128 triplets
    each, gathered, in stage 2. --batch-size is all of a step here, and by default 512 and 128.
  - A student cut to --student-layers trains without dropout, which is better there (RESULTS.md),
    a whole one with its own, as in the paper. --dropout sets it.
  - The teacher is in eval mode. The authors' code leaves its dropout on.
  - A batch holds sentences of similar length, which saves padding, so its in-batch negatives are
    of similar length, too. --shuffle draws plain random batches.
  - The bank is emptied when an epoch begins. Eq. 5 contrasts a sentence with other sentences, and
    an embedding that the last epoch left behind may be of the same sentence.
  - The student with the best dev score is kept over both stages. If stage 2 makes it worse, the
    student of stage 1 is the result. Stage 1 ends after --patience epochs without progress, stage 2
    trains all its epochs, as in the authors' code.
  - M starts at random. --align starts it from principal components and a rotation, and
    --keep-projection keeps it, which no paper does. Several --teacher are distilled together.
  - The TinyBERT students are the second general version, on the Hub nreimers/TinyBERT_L-4_H-312_v2
    and nreimers/TinyBERT_L-6_H-768_v2.
  - The paper's baselines are in baselines.py, except for MetaKD, which needs labeled data of
    several domains.

  python ckd.py --student bert-base-uncased         the paper's setting, 110M parameters
  python ckd.py --teacher MODEL --student-layers 1,3,5 --train my.txt --dev my-pairs.tsv
  python ckd.py --demo                              two minutes on a CPU
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

# --------------------------------------------------------------------------------------------------
# Losses
# --------------------------------------------------------------------------------------------------


def cosine(a, b):
    """f(u, v) of eq. 4, the cosine of all pairs of rows: [N, D], [M, D] -> [N, M]."""
    return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T


def contrastive_distillation_loss(student, teacher, queue, temperature):
    """Eq. 5: L_i = -log( exp(f(h_i^S, h_i^T) / tau) / sum_j exp(f(h_i^S, k_j) / tau) )

    The keys k_j are the teacher's embeddings of the batch and of the memory bank. Eq. 6 is the same
    with the projected student h_i^S M in the place of h_i^S. Eq. 4 has no memory bank.
    student [N, D], projected; teacher [N, D], of the same sentences; queue [Q, D] or None;
    temperature tau > 0. Returns the mean over the batch, a scalar >= 0.
    """
    keys = teacher if queue is None else torch.cat([teacher, queue])  # [N + Q, D]
    logits = cosine(student, keys) / temperature  # [N, N + Q]
    positives = torch.arange(len(student), device=student.device)  # key i belongs to sentence i
    return F.cross_entropy(logits, positives)


def supervised_contrastive_loss(anchor, positive, hard_negative, temperature):
    """Eq. 7: L_i = -log( e(h_i, h_i^+) / sum_j (e(h_i, h_j^+) + e(h_i, h_j^-)) )

    with e(u, v) = exp(f(u, v) / tau). All embeddings [N, D] are the student's; temperature tau > 0.
    Returns the mean over the batch, a scalar >= 0.
    """
    keys = torch.cat([positive, hard_negative])  # [2 N, D]
    logits = cosine(anchor, keys) / temperature  # [N, 2 N]
    positives = torch.arange(len(anchor), device=anchor.device)
    return F.cross_entropy(logits, positives)


# --------------------------------------------------------------------------------------------------
# Model
# --------------------------------------------------------------------------------------------------


def pool(token_states, attention_mask, pooling):
    """[N, L, H], [N, L] -> [N, H]: "cls", the state at [CLS], or "mean", over the real tokens."""
    if pooling == "cls":
        return token_states[:, 0]
    mask = attention_mask.unsqueeze(-1)  # [N, L, 1]
    return (token_states * mask).sum(dim=1) / mask.sum(dim=1)


class Student(nn.Module):
    """An encoder, and the projection M of eq. 3 and 6.

    encoder: has `model`, a transformer; `pooling`, "cls" or "mean"; `heads`, dense layers behind it
    (a model's own pooler is one); `normalize`; `dimension`, that of an embedding.
    add_head(linear, activation).
    projected_dimension: the teacher's dimension D_T, or None for no projection. M is dropped after
    stage 1, or with keep_projection it has no bias and becomes the encoder's last head.
    """

    def __init__(self, encoder, projected_dimension=None, keep_projection=False):
        super().__init__()
        self.encoder = encoder
        self.heads = encoder.heads[:]  # without M
        self.projection = nn.Identity()
        if projected_dimension is None:
            return
        bias = not keep_projection
        self.projection = nn.Linear(encoder.dimension, projected_dimension, bias)  # M
        if keep_projection:
            encoder.add_head(self.projection, nn.Identity())

    @torch.no_grad()
    def start_projection(self, alignment):
        """Start M as the transpose of a matrix A [D_T, D], which maps teacher to student."""
        self.projection.weight.copy_(alignment)
        if self.projection.bias is not None:
            self.projection.bias.zero_()

    def forward(self, input_ids, attention_mask):
        """[N, L], [N, L] -> h^S [N, D], in float32."""
        token_states = self.encoder.model(input_ids, attention_mask).last_hidden_state  # [N, L, H]
        pooled = pool(token_states, attention_mask, self.encoder.pooling)  # [N, H]
        embedding = self.heads(pooled).float()  # [N, D]
        if self.encoder.normalize:
            embedding = F.normalize(embedding, dim=-1)
        return embedding


LOWEST_TEMPERATURE = 0.01  # as in the authors' code


class Temperature(nn.Module):
    """tau of eq. 5 and 7: fixed, or learned through its logarithm."""

    def __init__(self, temperature, learned):
        super().__init__()
        self.fixed = temperature
        if learned:
            self.logarithm = nn.Parameter(torch.tensor(math.log(temperature)))
        else:
            self.logarithm = None

    def forward(self):
        """tau, a number or a scalar tensor."""
        return self.fixed if self.logarithm is None else self.logarithm.exp()

    @torch.no_grad()
    def limit(self):
        """Keep a learned tau above the lowest one, by moving the parameter itself."""
        if self.logarithm is not None:
            self.logarithm.clamp_(min=math.log(LOWEST_TEMPERATURE))


# --------------------------------------------------------------------------------------------------
# Memory bank
# --------------------------------------------------------------------------------------------------


class MemoryBank(nn.Module):
    """The teacher embeddings of the last `size` sentences (section 3.1): a ring buffer."""

    def __init__(self, size, dimension):
        super().__init__()
        self.register_buffer("keys", torch.zeros(size, dimension))
        self.register_buffer("enqueued", torch.zeros((), dtype=torch.long))  # since the last clear

    def enqueue(self, embeddings):
        """Put [N, dimension] in the place of the oldest."""
        newest = max(0, len(embeddings) - len(self.keys))
        embeddings = embeddings[newest:]
        slots = self.enqueued + torch.arange(len(embeddings), device=self.keys.device)
        self.keys[slots % len(self.keys)] = embeddings
        self.enqueued += len(embeddings)

    def embeddings(self):
        """[Q, dimension], Q <= size; None while the bank is empty."""
        filled = min(int(self.enqueued), len(self.keys))
        return self.keys[:filled] if filled > 0 else None

    def clear(self):
        self.enqueued.zero_()


# --------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------

from common import DataError, Tokens, table
from support import distributed
from support.alignment import align_by_sample
from support.command_line import (
    DEMO,
    ArgumentParser,
    add_alignment_options,
    add_data_options,
    add_model_options,
    add_run_options,
    check_negatives,
    count,
    count_or_none,
    evaluation_sets,
    load_student,
    load_teachers,
    positive,
    reload_student,
    run_main,
    training_sentences,
    training_triplets,
)
from support.run import Run, set_learning_rate

WARMUP = 10  # the learning rate rises for an epoch's steps divided by this


def warmup_cosine(step):
    """The learning rate of a Step, as a share of its peak: a linear rise, then half a cosine."""
    warmup = max(1, step.epoch_steps // WARMUP)
    if step.number < warmup:
        return step.number / warmup
    angle = math.pi * (step.number - warmup) / max(1, step.total - warmup)
    return (1 + math.cos(angle)) / 2


def make_optimizer(parameters, lr):
    return torch.optim.Adam(parameters, lr=lr, betas=(0.9, 0.98), fused=True)


def distill(student, sentences, targets, evaluation, run, args):
    """Stage 1, section 3.1. sentences: Tokens of n; targets: the teacher's embedding of each."""
    bank = MemoryBank(args.queue_size, targets.dimension).to(run.device)
    temperature = Temperature(args.temperature, args.learn_temperature).to(run.device)
    parameters = [*student.parameters(), *temperature.parameters()]
    optimizer = make_optimizer(parameters, args.lr)
    student.train()
    for step in run.steps(
        "distill",
        sentences.lengths,
        [student, temperature, bank],
        optimizer,
        dev_score=partial(evaluation.dev_score, student.encoder),
        save=partial(student.encoder.save, run.folder),
        epochs=args.epochs,
        batch_size=args.batch_size,
        patience=args.patience,
    ):
        if step.starts_epoch:
            bank.clear()
        set_learning_rate(optimizer, args.lr * warmup_cosine(step))
        input_ids, attention_mask = sentences.batch(step.own_rows, run.device)  # [n, L]
        teacher = targets[step.rows]  # h^T [N, D_T]
        with run.autocast():
            embedding = student(input_ids, attention_mask)  # h^S [n, D]
        embedding = step.gather(embedding)  # of all processes, [N, D]
        projected = student.projection(embedding)  # h^S M [N, D_T]
        loss = contrastive_distillation_loss(projected, teacher, bank.embeddings(), temperature())
        run.backward(loss, optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        run.step(optimizer)
        temperature.limit()
        bank.enqueue(teacher)
        step.log(loss=loss, temperature=temperature())


def finetune(student, triplets, evaluation, run, args):
    """Stage 2, section 3.2. triplets: Tokens of n anchors, positives and hard negatives."""
    anchors, positives, hard_negatives = triplets
    temperature = Temperature(args.finetune_temperature, args.learn_temperature).to(run.device)
    parameters = [*student.parameters(), *temperature.parameters()]
    optimizer = make_optimizer(parameters, args.finetune_lr)
    student.train()
    for step in run.steps(
        "finetune",
        anchors.lengths + positives.lengths + hard_negatives.lengths,
        [student, temperature],
        optimizer,
        dev_score=partial(evaluation.dev_score, student.encoder),
        save=partial(student.encoder.save, run.folder),
        epochs=args.finetune_epochs,
        batch_size=args.finetune_batch_size,
    ):
        set_learning_rate(optimizer, args.finetune_lr * warmup_cosine(step))
        with run.autocast():
            anchor = student(*anchors.batch(step.own_rows, run.device))  # [n, D]
            positive = student(*positives.batch(step.own_rows, run.device))
            hard_negative = student(*hard_negatives.batch(step.own_rows, run.device))
        anchor, positive, hard_negative = step.gather(anchor, positive, hard_negative)  # [N, D]
        loss = supervised_contrastive_loss(anchor, positive, hard_negative, temperature())
        run.backward(loss, optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        run.step(optimizer)
        temperature.limit()
        step.log(loss=loss, temperature=temperature())


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------

QUEUE_SIZE = 65536  # section 4.2
TEMPERATURE = 0.05
LEARNED_TEMPERATURE = math.exp(-1)  # where the authors' code starts in stage 1
NEWS_5M = "ffgcc/NEWS5M"  # of the Hugging Face Hub, section 4.1


def parse_args():
    parser = ArgumentParser(
        "CKD (DistilCSE): distill a sentence encoder. Defaults are the paper's.",
        moved={
            "--objective": "baselines.py --method kd and --method pkd are the paper's baselines"
        },
    )
    add_model_options(parser, "princeton-nlp/sup-simcse-roberta-large", student_pooling="pooler")
    data = add_data_options(parser, NEWS_5M).add_argument
    data(
        "--triplets",
        default="nli_for_simcse.csv",
        help="stage 2: CSV with the columns sent0,sent1,hard_neg; %(default)s",
    )
    group = parser.add_argument_group("method (sections of the paper in brackets)")
    add = group.add_argument
    stages = ("distill", "finetune", "both")
    add("--stage", choices=stages, default="both", help="stage 1 (3.1), stage 2 (3.2); %(default)s")
    add("--projection", action="store_true", help="use M (eq. 6) also where dimensions are equal")
    add_alignment_options(add, "start M (eq. 6) by principal components and a rotation")
    add("--temperature", type=positive, help="tau of eq. 5; 0.05, or learned from 0.368 on")
    add("--learn-temperature", action="store_true", help="learn tau, as the authors' code does")
    add(
        "--queue-size",
        type=count_or_none,
        help=f"of the memory bank; {QUEUE_SIZE} (4.2), or what an epoch fills; 0: none, eq. 4",
    )
    add("--epochs", type=count, default=20, help="stage 1; %(default)s (4.2)")
    add("--batch-size", type=count, default=512, help="stage 1; %(default)s (4.2)")
    add("--lr", type=positive, help="stage 1; 2e-4 for 110M parameters, 3e-4 for fewer (4.2)")
    add("--finetune-temperature", type=positive, default=0.05, help="tau of eq. 7; %(default)s")
    add("--finetune-epochs", type=count, default=5, help="stage 2; %(default)s (4.2)")
    add("--finetune-batch-size", type=count, default=128, help="stage 2; %(default)s (4.2)")
    add("--finetune-lr", type=positive, help="stage 2; 1e-5 for 52M parameters, else 5e-5 (4.2)")
    add_run_options(parser, "runs/ckd", max_length=64, eval_steps=125, patience=3)
    args = parser.parse(
        demo_defaults=dict(
            **DEMO,
            triplets="demo",
            output="runs/ckd-demo",
            epochs=1,
            batch_size=64,
            lr=1e-4,
            eval_steps=100,
            finetune_epochs=1,
            finetune_batch_size=64,
            finetune_lr=2e-5,
        )
    )
    if args.temperature is None:
        args.temperature = LEARNED_TEMPERATURE if args.learn_temperature else TEMPERATURE
    return args


def choose_learning_rates(args, encoder):
    """Section 4.2: they depend on the number of the student's parameters."""
    millions = sum(value.numel() for value in encoder.parameters()) / 1e6
    if args.lr is None:
        args.lr = 2e-4 if millions > 80 else 3e-4
    if args.finetune_lr is None:
        args.finetune_lr = 1e-5 if 30 < millions <= 80 else 5e-5


def choose_queue_size(args, sentences):
    """An epoch fills the bank with all sentences but the last batch. Raises DataError."""
    filled = max(0, sentences - args.batch_size)
    if args.queue_size is None:
        args.queue_size = min(QUEUE_SIZE, filled)
        distributed.note(f"memory bank: {args.queue_size} embeddings")
    elif args.queue_size > filled:
        problem = f"{sentences} sentences without a batch fill {filled} in an epoch"
        raise DataError(f"--queue-size {args.queue_size}: {problem}")
    if args.queue_size == 0:
        check_negatives(sentences, args.batch_size)


def build_student(encoder, sentences, targets, args):
    """The student of stage 1, with M where the dimensions differ or an option asks for it."""
    asked_for = args.projection or args.align or args.keep_projection
    if not asked_for and targets.dimension == encoder.dimension:
        return Student(encoder)
    if args.align:
        alignment = align_by_sample(targets, encoder, sentences, args.seed)
    torch.manual_seed(args.seed)  # M starts at random
    student = Student(encoder, targets.dimension, args.keep_projection)
    if args.align:
        student.start_projection(torch.from_numpy(alignment.matrix))
    return student


def run_stage_1(encoder, sentences, teachers, evaluation, run, args):
    """Distill the teacher into the encoder, score the result."""
    tokenize = partial(Tokens, sentences=sentences, max_length=args.max_length)
    targets = teachers.embeddings(tokenize, args.device)
    student = build_student(encoder, sentences, targets, args)
    tokens = Tokens(encoder, sentences, args.max_length)
    distill(student.to(args.device), tokens, targets, evaluation, run, args)
    title = "student after stage 1"
    run.finish("distill", {title: evaluation.scores(reload_student(run.folder, args), title)})


def run_stage_2(encoder, triplets, evaluation, run, args):
    """Fine-tune the encoder on triplets of sentences, score the result."""
    tokens = [Tokens(encoder, sentences, args.max_length) for sentences in triplets]
    student = Student(encoder).to(args.device)
    finetune(student, tokens, evaluation, run, args)
    title = "student after stage 2"
    run.finish("finetune", {title: evaluation.scores(reload_student(run.folder, args), title)})


def main():
    args = parse_args()
    run = Run(args)
    stages = ("distill", "finetune") if args.stage == "both" else (args.stage,)
    evaluation = evaluation_sets(args)
    encoder = load_student(args, default_pooling="pooler")
    choose_learning_rates(args, encoder)
    if "distill" in stages:
        sentences = training_sentences(args.train)
        choose_queue_size(args, len(sentences))
        teachers = load_teachers(args)
    if "finetune" in stages:
        triplets = training_triplets(args.triplets)

    run.start()
    if run.is_new():
        if "distill" in stages:
            run.scores.update(teachers.scores(evaluation))
        run.scores["student before"] = evaluation.scores(encoder, "student before")
    if "distill" in stages and not run.finished("distill"):
        run_stage_1(encoder, sentences, teachers, evaluation, run, args)
    if "distill" in stages:
        encoder = reload_student(run.folder, args)
    if "finetune" in stages and not run.finished("finetune"):
        run_stage_2(encoder, triplets, evaluation, run, args)
    run.write_card(
        f"Distilled by `ckd.py` (DistilCSE, arXiv:2112.05638), stages: {' and '.join(stages)}.",
        student=args.student or args.teacher,
        teachers=[args.teacher, *args.other_teachers],
    )
    print(table(run.scores))


if __name__ == "__main__":
    run_main(main)
