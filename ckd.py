# SPDX-License-Identifier: MIT
"""Contrastive knowledge distillation (CKD), the method of DistilCSE, and its baseline, plain KD.

Gao, Wu, Wang, Wang, Zang, Wang, Hu: "DistilCSE: Effective Knowledge Distillation For Contrastive
Sentence Embeddings", arXiv:2112.05638.

Stage 1 (distill), on unlabeled sentences: the student's embedding of a sentence must identify the
frozen teacher's embedding of the same sentence among the teacher's embeddings of the batch and of a
memory bank (InfoNCE). --objective kd minimizes the squared error to it instead. Stage 2 (finetune),
on NLI (natural language inference) triplets, without the teacher: the anchor must identify its
entailed sentence among all entailed and contradicting sentences of the batch.

    sentence --> teacher (frozen) ----------------> h^T --> memory bank (teacher embeddings)
        |                                            |          |
        +-----> student --> h^S --> projection M --> InfoNCE <--+          stage 1, eq. 5 and 6
                                                 +-> squared error to h^T  --objective kd, eq. 2, 3
    anchor, positive, hard negative --> student --> InfoNCE                stage 2, eq. 7

Departures that change results, and choices where the paper is silent (docs/ckd.md has all of them):
  - tau is fixed at 0.05, as the paper gives no value; --learn-temperature learns it.
  - Betas, schedule, the bias of M and clipping of the gradient's norm at 1 are the authors' code's.
  - A student cut to --student-layers trains without dropout; the teacher never has any.
  - The bank is cleared at the start of an epoch (paper: only its oldest entries go): an embedding
    of the same sentence, from the previous epoch, would count as its negative.
  - KD averages over the batch (eq. 2: sum) and does not clip gradients, as in the authors' code.

  python ckd.py --student bert-base-uncased         the paper's student of 110M parameters
  python ckd.py --objective kd --teacher MODEL --student-layers 1,3,5 --train my.txt --dev my.tsv
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

# ---- Losses: call them in fp32, outside autocast -------------------------------------------------


def cosine(a, b):
    """f(u, v) of eq. 4, the cosine of all pairs of rows: [N, D], [K, D] -> [N, K]."""
    a = F.normalize(a, dim=-1)
    b = F.normalize(b, dim=-1)
    return a @ b.T


def mse_loss(student, teacher):
    """Eq. 2: L_KD = sum_i 1/D sum_d (h_id^S - h_id^T)^2, divided by N here

    Eq. 3 has the projected student h_i^S M instead of h_i^S. student, teacher [N, D]. Returns a
    scalar >= 0.
    """
    return (student - teacher).square().mean()


def contrastive_distillation_loss(student, teacher, queue, temperature):
    """Eq. 5: L_i = -log( exp(f(h_i^S, h_i^T) / tau) / sum_j exp(f(h_i^S, k_j) / tau) )

    The keys k_j are the teacher's embeddings of the batch and of the memory bank (eq. 4: none).
    Eq. 6 has the projected student h_i^S M instead of h_i^S. student, teacher [N, D], of the same
    sentences, the teacher's detached; queue [Q, D], the bank, or None; temperature tau > 0. Returns
    the mean over the batch, a scalar >= 0.
    """
    keys = teacher if queue is None else torch.cat([teacher, queue])  # [N + Q, D]
    logits = cosine(student, keys) / temperature  # [N, N + Q]
    labels = torch.arange(len(student), device=student.device)  # key i belongs to sentence i
    return F.cross_entropy(logits, labels)


def supervised_contrastive_loss(anchor, positive, hard_negative, temperature):
    """Eq. 7: L_i = -log( e(h_i, h_i^+) / sum_j (e(h_i, h_j^+) + e(h_i, h_j^-)) )

    with e(u, v) = exp(f(u, v) / tau). All embeddings [N, D] are the student's; temperature tau > 0.
    Returns the mean over the batch, a scalar >= 0.
    """
    keys = torch.cat([positive, hard_negative])  # [2 N, D]
    logits = cosine(anchor, keys) / temperature  # [N, 2 N]
    labels = torch.arange(len(anchor), device=anchor.device)  # key i is the positive of anchor i
    return F.cross_entropy(logits, labels)


# ---- Model ---------------------------------------------------------------------------------------


def embed(encoder, input_ids, attention_mask):
    """Token ids and mask, [N, L] each -> embeddings [N, D] in float32.

    encoder: has `model`, a transformer; `pooling`, "mean", "cls" or "lasttoken"; `heads`, the dense
    layers after pooling; `normalize`. The same for teacher and student, in training and scoring.
    Padding is on the right.
    """
    states = encoder.model(input_ids, attention_mask=attention_mask).last_hidden_state  # [N, L, H]
    if encoder.pooling == "cls":
        pooled = states[:, 0]
    elif encoder.pooling == "lasttoken":
        last = attention_mask.sum(dim=1) - 1  # [N], since padding is on the right
        pooled = states[torch.arange(states.shape[0], device=states.device), last]
    else:
        mask = attention_mask.unsqueeze(-1)  # [N, L, 1]
        pooled = (states * mask).sum(dim=1) / mask.sum(dim=1)
    embedding = encoder.heads(pooled).float()  # [N, D]
    return F.normalize(embedding, dim=-1) if encoder.normalize else embedding


def enqueue(queue, embeddings, size):
    """Section 3.1, the memory bank: the newest `size` rows of queue [Q, D] and embeddings [N, D].

    Call it after the loss; otherwise, each embedding of the batch is a key twice.
    """
    return torch.cat([embeddings.detach(), queue])[:size]  # the newest come first


# ---- Training. Everything above needs only torch and can be copied into other projects -----------

from typing import Literal

from common import Batches, embed_texts, spearman, teacher_targets, token_lengths
from common import read_dev, read_sentences, read_triplets, resolve_data
from common import load_encoder, load_untrained_student, save_encoder
from common import Device, Pooling, Precision, in_range, positive_float, positive_int
from common import Run, read_options, run_main, run_settings, table


# Each line is an option, and its comment the help text: read_options() of common.py reads both.
class Options:
    teacher: str = "princeton-nlp/sup-simcse-roberta-large"  # folder or Hub name
    teacher_embeddings: str = None  # instead: its embeddings of the training texts, .npy [n, D]
    teacher_pooling: Pooling = None  # (default: its folder's, else mean)
    student: str = None  # folder or Hub name (default: the teacher, cut to --student-layers)
    student_layers: str = None  # keep only these layers, counted from 0, as in 1,3,5
    pooling: Pooling = None  # of the student (default: the teacher's if cut, its folder's, pooler)
    dropout: in_range(float, 0, 0.99) = None  # of the student (default: its folder's; 0 if cut)

    train: str = None  # sentences, or a .csv of triplets (default: news5m.en of the Hub; §4.1)
    triplets: str = None  # stage 2: CSV sent0,sent1,hard_neg (default: nli_for_simcse.csv; §4.1)
    dev: str = None  # scored pairs (TSV) or senteval.tar; they choose the best (default: STS-B dev)

    objective: Literal["ckd", "kd"] = "ckd"  # loss of stage 1
    stage: Literal["distill", "finetune", "both"] = None  # (default: both; --train alone: distill)
    projection: bool = False  # use M even if the dimensions are equal
    temperature: positive_float = None  # tau, stage 1 (default: 0.05; 0.368 if it is learned)
    learn_temperature: bool = False  # learn log(tau), in both stages
    queue_size: in_range(int, 0) = 65536  # of the memory bank, stage 1; paper §4.2
    patience: in_range(int, 0) = 3  # epochs without a better dev score that end stage 1; 0: never
    epochs: positive_int = 20  # stage 1; paper §4.2
    batch_size: in_range(int, 2) = 512  # stage 1; paper §4.2 (the code: 512 on each of 8 GPUs)
    lr: positive_float = None  # stage 1 (default: 2e-4 above 80M parameters, else 3e-4; §4.2)
    finetune_temperature: positive_float = 0.05  # tau, stage 2
    finetune_epochs: positive_int = 5  # stage 2; paper §4.2
    finetune_batch_size: in_range(int, 2) = 128  # stage 2; paper §4.2 (code: on each of 4 GPUs)
    finetune_lr: positive_float = None  # stage 2 (default: 5e-5; 1e-5 for 30M to 80M; paper §4.2)

    output: str = "runs/ckd"  # folder for everything
    max_steps: positive_int = 10**9  # at most, in each stage
    max_length: in_range(int, 3) = 64  # tokens of a training text, as in the authors' code
    eval_steps: positive_int = 125  # steps between dev scores; paper §4.2
    seed: in_range(int, 0) = 0  # of batches, M and dropout; a continued run repeats them
    group_by_length: bool = False  # batches of texts of similar length
    device: Device = None  # (default: cuda if there is one)
    precision: Precision = None  # of training (default: bf16 on a GPU that has it, else fp32)


def choose_defaults(args, student):
    """Set what is not given; KD has no bank. Learning rates depend on the size (section 4.2)."""
    millions = sum(value.numel() for value in student.parameters()) / 1e6
    args.lr = args.lr or (2e-4 if millions > 80 else 3e-4)
    # The student that the paper counts as 52M has 67M here.
    args.finetune_lr = args.finetune_lr or (1e-5 if 30 < millions <= 80 else 5e-5)
    # The authors' code learns log(1 / tau) from 1.
    args.temperature = args.temperature or (math.exp(-1) if args.learn_temperature else 0.05)
    if args.objective == "kd":
        args.queue_size = 0  # no bank


def warmup_cosine(step, epoch_steps, total):
    """Factor of the learning rate after `step` steps: rises from 0, then falls as a cosine.

    As in the authors' code; the paper has no schedule. The rise takes a tenth of an epoch.
    """
    warmup = epoch_steps / 10
    if step < warmup:
        return step / warmup
    progress = (step - warmup) / (total - warmup)  # 0 to 1
    return (1 + math.cos(math.pi * progress)) / 2


def distill(student, sentences, targets, dev_pairs, run, args):
    """Stage 1, section 3.1. Dev scores are of h^S, without M.

    targets [n, D_T]: h^T of n sentences. The teacher is not in this loop: it is frozen, and its
    embeddings are computed beforehand.
    """
    lengths = token_lengths(args, student, sentences)
    batches = Batches(len(sentences), args.batch_size, args.seed, lengths)
    total = min(args.epochs * batches.per_epoch, args.max_steps)
    patience = args.patience * batches.per_epoch if args.patience else math.inf  # in steps
    autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16")

    torch.manual_seed(args.seed)  # M is initialized at random
    model = nn.Module()  # everything that is trained
    model.student = student
    model.projection = nn.Identity()  # eq. 2 and 5
    if student.dimension != targets.shape[1] or args.projection:
        model.projection = nn.Linear(student.dimension, targets.shape[1])  # M of eq. 3 and 6
    log_tau = torch.tensor(math.log(args.temperature))  # trained with --learn-temperature alone
    model.log_tau = nn.Parameter(log_tau, requires_grad=args.learn_temperature)
    model.to(args.device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.98), fused=True)
    bank = torch.empty(0, targets.shape[1], device=args.device)  # [Q, D_T]

    state = [model, optimizer]  # changed in place; the bank is replaced
    start, bank = run.begin(total, state, bank)  # from the last checkpoint, if there is one
    for step in range(start, total + 1):  # `step` steps are finished
        run.checkpoint(step, state, bank)

        # Now and then, before the first step and after the last: score the student, keep the best.
        if step % args.eval_steps == 0 or step == total:
            if run.is_best(step, spearman(embed, student, dev_pairs)):
                save_encoder(student, run.folder)
            if step == total or step - run.best_step >= patience:
                return

        # An epoch begins: clear the bank. It may hold embeddings of the sentences that come next.
        if step % batches.per_epoch == 0:
            bank = bank[:0]

        # One step.
        rows = batches[step]  # row numbers [N]
        texts = [sentences[row] for row in rows]
        torch.manual_seed(args.seed * 1_000_003 + step)
        lr = args.lr * warmup_cosine(step, batches.per_epoch, total)
        optimizer.param_groups[0]["lr"] = lr
        with autocast:
            embedding = embed_texts(embed, student, texts, args.max_length)  # h^S [N, D]
        projected = model.projection(embedding)  # h^S M [N, D_T], in fp32 as the loss
        target = torch.from_numpy(targets[rows]).to(args.device)  # h^T [N, D_T], read from disk
        temperature = model.log_tau.exp()
        if args.objective == "kd":
            loss = mse_loss(projected, target)  # eq. 2 and 3
        else:
            loss = contrastive_distillation_loss(projected, target, bank, temperature)  # eq. 5, 6
        optimizer.zero_grad()
        loss.backward()
        if args.objective == "ckd":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # The size of the bank is logged, since the loss grows with the number of keys.
        run.log(step + 1, loss=loss, lr=lr, temperature=temperature, bank=len(bank))
        bank = enqueue(bank, target, args.queue_size)  # after the loss; for KD, it stays empty


def finetune(student, triplets, dev_pairs, run, args):
    """Stage 2, section 3.2: as distill(), without teacher, bank and early stopping.

    triplets: n lists [anchor, positive, hard negative] of texts.
    """
    lengths = token_lengths(args, student, *zip(*triplets))
    batches = Batches(len(triplets), args.finetune_batch_size, args.seed, lengths)
    total = min(args.finetune_epochs * batches.per_epoch, args.max_steps)
    autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16")

    model = nn.Module()
    model.student = student
    log_tau = torch.tensor(math.log(args.finetune_temperature))
    model.log_tau = nn.Parameter(log_tau, requires_grad=args.learn_temperature)
    model.to(args.device).train()
    rate = args.finetune_lr
    optimizer = torch.optim.Adam(model.parameters(), rate, betas=(0.9, 0.98), fused=True)

    state = [model, optimizer]
    start, _ = run.begin(total, state)
    for step in range(start, total + 1):  # `step` steps are finished
        run.checkpoint(step, state)

        # Now and then, before the first step and after the last: score the student, keep the best.
        if step % args.eval_steps == 0 or step == total:
            if run.is_best(step, spearman(embed, student, dev_pairs)):
                save_encoder(student, run.folder)
            if step == total:
                return

        # One step.
        columns = zip(*[triplets[row] for row in batches[step]])  # N texts each
        torch.manual_seed(args.seed * 1_000_003 + step)
        lr = rate * warmup_cosine(step, batches.per_epoch, total)
        optimizer.param_groups[0]["lr"] = lr
        with autocast:  # [N, D] each
            anchor, positive, hard_negative = [
                embed_texts(embed, student, texts, args.max_length) for texts in columns
            ]
        temperature = model.log_tau.exp()
        loss = supervised_contrastive_loss(anchor, positive, hard_negative, temperature)  # eq. 7
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.log(step + 1, loss=loss, lr=lr, temperature=temperature)


# ---- Command line --------------------------------------------------------------------------------


def main():
    args = read_options(Options, __doc__)
    args.stage = args.stage or ("distill" if args.train and not args.triplets else "both")
    args.train = args.train or "news5m.en"
    args.triplets = args.triplets or "nli_for_simcse.csv"
    stages = ["distill", "finetune"] if args.stage == "both" else [args.stage]
    dev_pairs = read_dev(args.dev)
    sentences = read_sentences(resolve_data(args.train)) if "distill" in stages else []
    triplets = read_triplets(resolve_data(args.triplets)) if "finetune" in stages else []
    student = load_untrained_student(args, otherwise="pooler")
    choose_defaults(args, student)
    settings = run_settings(args, [__file__], [dev_pairs, sentences, triplets])
    previous = None
    for stage in stages:  # each is a run with a folder of its own
        run = Run(settings, args, stage, is_last=stage == stages[-1])
        if not run.is_finished:
            if stage == "distill":
                targets = teacher_targets(embed, sentences, dev_pairs, run, args)
            if previous:
                run.scores |= previous.scores
                student = load_encoder(
                    previous.folder, device=args.device, precision=args.precision
                )
            else:
                run.scores["student before"] = {"dev": spearman(embed, student, dev_pairs)}
            if stage == "distill":
                distill(student, sentences, targets, dev_pairs, run, args)
            else:
                finetune(student, triplets, dev_pairs, run, args)
            best = load_encoder(run.folder, device=args.device)
            run.finish(f"best of {stage}", {"dev": spearman(embed, best, dev_pairs)})
        previous = run
    print(table(run.scores))


if __name__ == "__main__":
    run_main(main)
