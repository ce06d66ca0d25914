"""ConGen, unsupervised control and generalization distillation.

Limkonchotiwat, Ponwitayarat, Lowphansirikul, Udomcharoenchaikit, Chuangsuwanich, Nutanong: "ConGen:
Unsupervised Control and Generalization Distillation For Sentence Representation", Findings of
EMNLP 2022.

Every sentence has two views, the second in other words: a back-translation, a translation, a
paraphrase, or the sentence without some of its words. The frozen teacher embeds the first view
only, the student embeds both. An embedding's similarity distribution is a softmax over its cosines
to an instance queue, which contains the teacher's embeddings of this and earlier batches. The
student learns to give both views the distribution that the teacher gives the first one: the first
view, to see what the teacher sees (control), and the second, to see it whatever the wording
(generalize).

    first view --> teacher (frozen) --> z_ref --> instance queue D (newest in, oldest out)
        |                                 |
        |                                 +--> P_ref = p(z_ref, D, tau^T)
        +--------> student --> z_con --------> P_con = p(z_con, D, tau^S)        eq. 1
    second view -> student --> z_gen --------> P_gen = p(z_gen, D, tau^S)
    loss = alpha CE(P_ref, P_con) + (1 - alpha) CE(P_ref, P_gen)                 eq. 2

What the paper leaves open, and where this script differs from the paper or the authors' code:
  - The views of the paper, NLI sentences through Google's translator, are not on the Hub. The
    authors' page links a file of pairs, which --pairs reads. Without it the first view is a
    sentence of SimCSE's NLI file as it stands, and word deletion, the best way of Table 6 that
    needs no translator, makes the second, afresh at every step. A second view that has no words
    left is the first view.
  - Table 6 gives no rate of synonym replacement. Here it is a tenth of the words, if they stand in
    their base form, and WordNet's first sense gives the synonyms.
  - The queue starts with random training sentences. Here they are also trained on, and the oldest
    embeddings leave the queue before a batch is scored (section 3.2). The authors' code keeps these
    sentences out of the training data and removes the oldest after the batch is scored.
  - The default teacher is read at [CLS], as it was trained. The authors' train_congen.sh passes its
    name to sentence-transformers, which takes a mean: --teacher-pooling mean.
  - As in the authors' code: linear decay after the warm-up, AdamW with weight decay 0.01 (there
    without biases and norms), gradient norm clipped at 1. The authors' AdamW does not correct the
    bias of its moments, torch's does; their first step has a learning rate of 0, here it has that
    of their second. They train in fp16 with the loss in it, here the loss is in float32.
  - Training reads 128 tokens, of teacher and student alike, and scoring the model's own maximum.
    In the authors' code the student is also scored at 128, and the teacher reads its own maximum.
  - The dev score is Spearman's of the cosine. In the authors' code it is the best of four: cosine,
    dot product, Euclidean and Manhattan distance. Both score every 512 steps; there the steps are
    counted anew in every epoch, whose end is scored, too.
  - Training ends after 7 epochs (--patience) without a better dev score, wherever in an epoch the
    best one was. In the authors' code the scores at the ends of epochs alone count for that.
  - The best dev score starts from that of the student with its new head, not of the headless
    encoder ("student before" in the table at the end), and in the authors' code from nothing.
  - A batch holds sentences of similar length, which saves padding. --shuffle draws plain random
    batches, as the authors' code does.
  - A student cut to --student-layers trains without dropout, which is better there (RESULTS.md),
    a whole one with its own, as in the paper. --dropout sets it.
  - In one public version of the authors' code, generalize does not read the second view.
  - The head, linear + tanh, starts at random. --head identity starts it as the identity matrix,
    which is better for a student initialized from teacher layers, and --align from the data, for a
    teacher of another dimension. A student that ends in a dense layer of the teacher's dimension
    already gets no other. Several --teacher are distilled together.
  - A student that Table 7 does not name, or that --student-layers cuts, takes the settings of the
    student nearest in size.
  - alpha = 1, control only, is SEED (Fang et al. 2021), and computes no second view. The baselines
    L2, Dual-L2 and SKD are in baselines.py, and ckd.py is CKD.

  python congen.py --student bert-base-uncased         the paper's setting, with word deletion
  python congen.py --student distilbert-base-multilingual-cased --pairs en-de.tsv    multilingual
  python sweep.py congen.py "queue-size=128,1024,16384,65536" -- --student bert-base-uncased
      Figure 4; the scores on test are at the end of each setting's log
  python congen.py --demo                              two minutes on a CPU
"""

import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

# --------------------------------------------------------------------------------------------------
# Losses
# --------------------------------------------------------------------------------------------------


def cosine(a, b):
    """sim of eq. 1, the cosine of all pairs of rows: [N, D], [K, D] -> [N, K]."""
    return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T


def similarity_distribution(z, queue, temperature):
    """Eq. 1: p_j = exp(sim(z, d_j) / tau) / sum_k exp(sim(z, d_k) / tau),  j = 1, ..., K

    z [N, D]; queue [K, D], the d_j; temperature tau > 0. Returns [N, K], rows that sum to 1.
    """
    return F.softmax(cosine(z, queue) / temperature, dim=1)


def congen_loss(
    student_control,
    student_generalize,
    teacher_reference,
    queue,
    teacher_temperature,
    student_temperature,
    alpha,
):
    """Eq. 2: L = alpha CE(P_ref, P_con) + (1 - alpha) CE(P_ref, P_gen)

    with CE(P, Q) = -sum_j P_j log Q_j, P_ref = p(z_ref, D, tau^T) of the teacher's embedding of the
    first view, P_con = p(z_con, D, tau^S) and P_gen = p(z_gen, D, tau^S) of the student's
    embeddings of the first and the second view, p of eq. 1.
    Embeddings [N, D] each; queue D [K, D]; temperatures tau > 0; alpha from 0 to 1. Returns the
    mean over the batch, a scalar >= 0.
    """
    reference = similarity_distribution(teacher_reference, queue, teacher_temperature)  # [N, K]
    # cross_entropy() takes the log of eq. 1 itself, which stays finite at low temperatures.
    control = F.cross_entropy(cosine(student_control, queue) / student_temperature, reference)
    generalize = F.cross_entropy(cosine(student_generalize, queue) / student_temperature, reference)
    return alpha * control + (1 - alpha) * generalize


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
    """An encoder that ends in linear + tanh to the teacher's dimension (section 4.1).

    encoder: has `model`, a transformer; `pooling`, "cls" or "mean" (the paper's); `heads`, dense
    layers behind it; `dimension`, that of an embedding; add_head(linear, activation). If its last
    head has the teacher's dimension already, it stays as it is.
    dimension: the teacher's. head: how the linear layer starts, "random", "identity", or from
    `alignment`, a matrix A [D_T, D] that maps the teacher's embeddings to the student's.
    """

    def __init__(self, encoder, dimension, head="random", alignment=None):
        super().__init__()
        if len(encoder.heads) == 0 or encoder.dimension != dimension:
            linear = nn.Linear(encoder.dimension, dimension)
            if head == "identity":
                nn.init.eye_(linear.weight)
                nn.init.zeros_(linear.bias)
            if alignment is not None:
                linear.weight.data.copy_(alignment)
                nn.init.zeros_(linear.bias)
            encoder.add_head(linear, nn.Tanh())
        self.encoder = encoder

    def forward(self, input_ids, attention_mask):
        """[N, L], [N, L] -> z^S [N, D] in float32, not L2-normalized: eq. 1 takes cosines."""
        token_states = self.encoder.model(input_ids, attention_mask).last_hidden_state  # [N, L, H]
        pooled = pool(token_states, attention_mask, self.encoder.pooling)  # [N, H]
        return self.encoder.heads(pooled).float()  # [N, D]


# --------------------------------------------------------------------------------------------------
# Instance queue
# --------------------------------------------------------------------------------------------------


class InstanceQueue(nn.Module):
    """K teacher embeddings [K, D], first in, first out (section 3.2): a ring buffer."""

    def __init__(self, embeddings):
        super().__init__()
        self.register_buffer("embeddings", embeddings)
        next_slot = torch.zeros((), dtype=torch.long, device=embeddings.device)
        self.register_buffer("next_slot", next_slot)  # that of the oldest embedding

    def enqueue(self, embeddings):
        """Put [N, D], N <= K, in the place of the N oldest."""
        size = len(self.embeddings)
        slots = self.next_slot + torch.arange(len(embeddings), device=embeddings.device)
        self.embeddings[slots % size] = embeddings
        self.next_slot = (self.next_slot + len(embeddings)) % size


# --------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------

import numpy as np

from common import DataError, Tokens, table
from support import distributed
from support.alignment import align_by_sample
from support.command_line import (
    DEMO,
    ArgumentParser,
    add_data_options,
    add_model_options,
    add_run_options,
    count,
    evaluation_sets,
    fraction,
    load_student,
    load_teachers,
    positive,
    reload_student,
    run_main,
)
from support.run import Run, set_learning_rate
from support.views import add_view_options, load_views

WARMUP = 10  # the learning rate rises for all steps divided by this (section 4.1)


def warmup_linear(step):
    """The learning rate of a Step, as a share of its peak: a linear rise, then a linear fall."""
    warmup = math.ceil(step.total / WARMUP)
    left = step.total + 1 - step.number
    return min(step.number / warmup, left / (step.total + 1 - warmup))


def first_queue(targets, args):
    """The teacher's embeddings of K random training sentences (section 4.1)."""
    order = np.random.default_rng(args.seed).permutation(len(targets))
    return InstanceQueue(targets[order[: args.queue_size]])


def distill(student, views, targets, evaluation, run, args):
    """Section 3.3. views: the two views of n sentences; targets: z_ref of each."""
    encoder = student.encoder
    first_views = Tokens(encoder, views.sentences, args.max_length)
    queue = first_queue(targets, args)
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=args.lr, eps=1e-6, weight_decay=0.01, fused=True
    )
    student.train()
    for step in run.steps(
        "distill",
        first_views.lengths,
        [student, queue],
        optimizer,
        dev_score=partial(evaluation.dev_score, encoder),
        save=partial(encoder.save, run.folder),
        epochs=args.epochs,
        batch_size=args.batch_size,
        patience=args.patience,
    ):
        set_learning_rate(optimizer, args.lr * warmup_linear(step))
        reference = targets[step.rows]  # z_ref [N, D]: the teacher never sees the second view
        queue.enqueue(reference)  # before the loss, section 3.2
        with run.autocast():
            control = student(*first_views.batch(step.own_rows, run.device))  # z_con [n, D]
        generalize = control  # without a second view if its weight, 1 - alpha, is 0
        if args.alpha < 1:
            texts = views.second(step.rows, [args.seed, step.number])
            second_views = Tokens(encoder, texts[step.own], args.max_length)
            own = range(len(second_views))
            with run.autocast():
                generalize = student(*second_views.batch(own, run.device))  # z_gen [n, D]
        control, generalize = step.gather(control, generalize)  # of all processes, [N, D]
        loss = congen_loss(
            control,
            generalize,
            reference,
            queue.embeddings,
            args.teacher_temperature,
            args.student_temperature,
            args.alpha,
        )
        run.backward(loss, optimizer)
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        run.step(optimizer)
        step.log(loss=loss)


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------


SMALLEST_QUEUE = 2


class Setting(NamedTuple):
    """A row of Table 7."""

    teacher_temperature: float  # tau^T
    student_temperature: float  # tau^S
    queue_size: int  # K
    lr: float
    millions: int  # of parameters, Tables 1 and 3


TABLE_7 = {
    "BERT-Tiny": Setting(0.05, 0.05, 16384, 5e-4, 4),
    "BERT-Mini": Setting(0.05, 0.07, 16384, 3e-4, 11),
    "Tiny-BERT-L4": Setting(0.05, 0.05, 65536, 1e-4, 14),
    "MiniLM-L3": Setting(0.05, 0.07, 16384, 5e-4, 17),
    "MiniLM-L6": Setting(0.05, 0.07, 65536, 3e-4, 22),
    "BERT-Small": Setting(0.05, 0.07, 65536, 3e-4, 29),
    "MiniLM-L12": Setting(0.05, 0.07, 16384, 5e-5, 33),
    "Tiny-BERT-L6": Setting(0.05, 0.07, 65536, 5e-5, 67),
    "BERT-base": Setting(0.05, 0.07, 65536, 5e-5, 109),
    "RoBERTa-base": Setting(0.1, 0.1, 1024, 5e-5, 125),
    "Multilingual-DistilBERT": Setting(0.05, 0.07, 65536, 3e-4, 134),
    "Multilingual-MiniLM-L12": Setting(0.05, 0.07, 65536, 3e-4, 117),
}
HUB_NAMES = {  # the end of a model's name on the Hub, lowercase -> its row of Table 7
    "bert_uncased_l-2_h-128_a-2": "BERT-Tiny",
    "bert-tiny": "BERT-Tiny",
    "bert_uncased_l-4_h-256_a-4": "BERT-Mini",
    "bert-mini": "BERT-Mini",
    "tinybert_general_4l_312d": "Tiny-BERT-L4",
    "tinybert_l-4_h-312_v2": "Tiny-BERT-L4",
    "minilm-l3-h384-uncased": "MiniLM-L3",
    "minilm-l6-h384-uncased": "MiniLM-L6",
    "bert_uncased_l-4_h-512_a-8": "BERT-Small",
    "bert-small": "BERT-Small",
    "minilm-l12-h384-uncased": "MiniLM-L12",
    "tinybert_general_6l_768d": "Tiny-BERT-L6",
    "tinybert_l-6_h-768_v2": "Tiny-BERT-L6",
    "bert-base-uncased": "BERT-base",
    "bert-base-cased": "BERT-base",
    "roberta-base": "RoBERTa-base",
    "distilbert-base-multilingual-cased": "Multilingual-DistilBERT",
    "multilingual-minilm-l12-h384": "Multilingual-MiniLM-L12",
}


def parse_args():
    parser = ArgumentParser(
        "ConGen: distill a sentence encoder. Defaults are the paper's.",
        moved={
            "--objective": "baselines.py --method l2, dual-l2 and skd are the paper's baselines, "
            "ckd.py is CKD, and --alpha 1 is SEED"
        },
    )
    add_model_options(parser, "princeton-nlp/unsup-simcse-roberta-large")
    add_data_options(parser, "nli_for_simcse.csv")
    add_view_options(parser)
    add = parser.add_argument_group("method (sections of the paper in brackets)").add_argument
    heads = ("random", "identity")
    add("--head", choices=heads, default="random", help="how it starts (4.1); %(default)s")
    add(
        "--align",
        action="store_true",
        help="start the head by principal components and a rotation; see support/alignment.py",
    )
    alpha_help = "weight of control; 1 - alpha is that of generalize (Table 5); %(default)s"
    add("--alpha", type=fraction, default=0.5, help=alpha_help)
    add("--epochs", type=count, default=20, help="%(default)s (4.1)")
    add("--batch-size", type=count, default=128, help="%(default)s (4.1)")
    by_student = "by default that of the student in Table 7"
    add("--lr", type=positive, help=f"highest learning rate; {by_student}")
    add("--teacher-temperature", type=positive, help=f"tau^T of eq. 2; {by_student}")
    add(
        "--student-temperature",
        "--temperature",
        type=positive,
        help=f"tau^S of eq. 2; {by_student}",
    )
    add("--queue-size", type=count, help=f"K; {by_student}, or the number of sentences")
    add_run_options(parser, "runs/congen", max_length=128, eval_steps=512, patience=7)
    return parser.parse(
        demo_defaults=dict(
            **DEMO, output="runs/congen-demo", epochs=1, batch_size=64, eval_steps=50
        )
    )


def row_of_table_7(args, encoder):
    """The row that names the student, else that of the student nearest in size."""
    name = Path(args.student or "").name.lower()
    if name in HUB_NAMES and not args.student_layers:
        return HUB_NAMES[name]
    millions = sum(value.numel() for value in encoder.parameters()) / 1e6
    return min(TABLE_7, key=lambda row: abs(TABLE_7[row].millions - millions))


def choose_settings(args, encoder, sentences):
    """Take from Table 7 what is not given.

    Raises DataError if the queue cannot be filled, or has a single entry: over one entry every
    similarity distribution is the same, and the loss is 0.
    """
    if sentences < SMALLEST_QUEUE:
        expected = "2 or more, as a similarity distribution over one is constant"
        raise DataError(f"{sentences} sentence to train on, expected {expected}")
    row = row_of_table_7(args, encoder)
    setting = TABLE_7[row]
    distributed.note(f"Table 7: options that are not given have the values of {row}")
    if args.teacher_temperature is None:
        args.teacher_temperature = setting.teacher_temperature
    if args.student_temperature is None:
        args.student_temperature = setting.student_temperature
    if args.lr is None:
        args.lr = setting.lr
    if args.queue_size is None:
        args.queue_size = min(setting.queue_size, sentences)
    smallest = max(SMALLEST_QUEUE, min(args.batch_size, sentences))
    if not smallest <= args.queue_size <= sentences:
        expected = f"{smallest} (a batch, or 2) to {sentences} (all sentences)"
        raise DataError(f"--queue-size {args.queue_size}: expected {expected}")


def run_distill(encoder, views, teachers, evaluation, run, args):
    """Distill the teacher into the encoder, score the result."""
    tokenize = partial(Tokens, sentences=views.sentences, max_length=args.max_length)
    targets = teachers.embeddings(tokenize, args.device)
    alignment = None
    if args.align:
        aligned = align_by_sample(targets, encoder, views.sentences, args.seed)
        alignment = torch.from_numpy(aligned.matrix)
    torch.manual_seed(args.seed)  # the head starts at random
    student = Student(encoder, targets.dimension, args.head, alignment).to(args.device)
    distill(student, views, targets, evaluation, run, args)
    title = "student after"
    run.finish("distill", {title: evaluation.scores(reload_student(run.folder, args), title)})


def main():
    args = parse_args()
    run = Run(args)
    evaluation = evaluation_sets(args)
    encoder = load_student(args)
    views = load_views(args)
    choose_settings(args, encoder, len(views.sentences))
    teachers = load_teachers(args)

    run.start()
    if run.is_new():
        run.scores.update(teachers.scores(evaluation))
        run.scores["student before"] = evaluation.scores(encoder, "student before")
    if not run.finished("distill"):
        run_distill(encoder, views, teachers, evaluation, run, args)
    second_views = "given" if args.pairs else args.augment
    run.write_card(
        "Distilled by `congen.py` (ConGen, Findings of EMNLP 2022), "
        f"alpha: {args.alpha}, second views: {second_views}.",
        student=args.student or args.teacher,
        teachers=[args.teacher, *args.other_teachers],
    )
    print(table(run.scores))


if __name__ == "__main__":
    run_main(main)
