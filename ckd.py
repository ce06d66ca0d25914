"""Contrastive knowledge distillation (CKD), the method of DistilCSE, and its baseline, plain KD.

Gao, Wu, Wang, Wang, Zang, Wang, Hu: "DistilCSE: Effective Knowledge Distillation For Contrastive
Sentence Embeddings", arXiv:2112.05638.

Stage 1 (distill), on unlabeled sentences: given the student's embedding of a sentence, pick out
the frozen teacher's embedding of the same sentence among its embeddings of other sentences, those
of the batch and of a memory bank. With --objective kd, minimize the squared error to the teacher's
embedding instead. Stage 2 (finetune), on NLI (natural language inference) triplets, without the
teacher: pick out the entailed sentence among all entailed and contradicting ones of the batch.

    sentence --> teacher (frozen) ----------------> h^T --> memory bank (teacher embeddings)
        |                                            |          |
        +-----> student --> h^S --> projection M --> InfoNCE <--+          stage 1, eq. 5 and 6
                                +-> squared error to h^T                   --objective kd, eq. 2, 3
    anchor, positive, hard negative --> student --> InfoNCE                stage 2, eq. 7

Departures that change results (docs/ckd.md has all of them, next to the authors' code):
  - tau is fixed at 0.05; the paper gives no value; --learn-temperature learns it.
  - The optimizer's betas and the schedule of the learning rate are those of the authors' code.
  - A student cut to --student-layers trains without dropout; the teacher never has any.
  - A batch has sentences of similar length (--shuffle: random ones).
  - The bank is cleared at the start of an epoch, so that no embedding of the same sentence is left.
  - KD averages over the batch (eq. 2: sum) and is unclipped, as in the authors' code.
  - KD cuts texts at 128 tokens (authors' code: 64), in both stages.

  python ckd.py --student bert-base-uncased         the paper's student of 110M
  python ckd.py --objective kd --teacher MODEL --student-layers 1,3,5 --train my.txt --dev my.tsv
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

# ---- Losses --------------------------------------------------------------------------------------


def cosine(a, b):
    """f(u, v) of eq. 4, the cosine of all pairs of rows: [N, D], [M, D] -> [N, M], fp32 or fp64."""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return F.normalize(a.to(dtype), dim=-1) @ F.normalize(b.to(dtype), dim=-1).T


def mse_loss(student, teacher):
    """Eq. 2: L_KD = 1/N sum_i 1/D sum_d (h_id^S - h_id^T)^2

    Eq. 3 has the projected student h_i^S M instead of h_i^S. The paper sums over i, without 1/N.
    student, teacher [N, D]. Returns a scalar >= 0.
    """
    return (student - teacher).square().mean()


def contrastive_distillation_loss(student, teacher, queue, temperature):
    """Eq. 5: L_i = -log( exp(f(h_i^S, h_i^T) / tau) / sum_j exp(f(h_i^S, k_j) / tau) )

    The keys k_j are the teacher's embeddings of the batch and of the memory bank (eq. 4: no bank).
    Eq. 6 has the projected student h_i^S M instead of h_i^S. student, teacher [N, D], of the same
    sentences, the teacher's detached; queue [Q, D], the bank, or None; temperature tau > 0. Returns
    the mean over the batch, a scalar >= 0.
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


# ---- Model ---------------------------------------------------------------------------------------


def embed(encoder, input_ids, attention_mask):
    """Token ids and mask, [N, L] each -> embeddings [N, D] in float32.

    encoder: has `model`, a transformer; `pooling`, "mean", "cls" or "lasttoken"; `heads`, the dense
    layers after pooling; `normalize`. The same for teacher and student, in training and scoring.
    """
    states = encoder.model(input_ids, attention_mask).last_hidden_state  # [N, L, H]
    if encoder.pooling == "cls":
        pooled = states[:, 0]
    elif encoder.pooling == "lasttoken":
        last = attention_mask.cumsum(dim=1).argmax(dim=1)  # of the tokens that are not padding
        pooled = states[torch.arange(states.shape[0], device=states.device), last]
    else:
        mask = attention_mask.unsqueeze(-1)  # [N, L, 1]
        pooled = (states * mask).sum(dim=1) / mask.sum(dim=1)
    embedding = encoder.heads(pooled).float()  # [N, D]
    return F.normalize(embedding, dim=-1) if encoder.normalize else embedding


class Temperature(nn.Module):
    """tau of eq. 4 to 7: fixed, or learned through its logarithm."""

    def __init__(self, temperature, learned):
        super().__init__()
        self.fixed = temperature
        self.logarithm = nn.Parameter(torch.tensor(math.log(temperature))) if learned else None

    def forward(self):
        return self.fixed if self.logarithm is None else self.logarithm.exp()


class MemoryBank(nn.Module):
    """The teacher's embeddings of up to `size` sentences since clear(): a ring buffer (3.1).

    clear() it when an epoch begins: an embedding left from the previous epoch may belong to a
    sentence of the batch, which would then be its own negative.
    """

    def __init__(self, size, dimension):
        super().__init__()
        self.register_buffer("ring", torch.zeros(size, dimension))
        self.enqueued = 0  # since the last clear()

    def enqueue(self, embeddings):
        """Add embeddings [N, D], detached, in the bank's dtype; when full, overwrite the oldest.

        Call it after the loss; otherwise, each embedding of the batch is a key twice.
        """
        size = len(self.ring)
        newest = embeddings.detach()[max(0, len(embeddings) - size) :]
        slots = self.enqueued + torch.arange(len(newest), device=newest.device)
        self.ring[slots % size] = newest.to(self.ring.dtype)
        self.enqueued += len(newest)

    def embeddings(self):
        """[Q, D], Q <= size: a view of the ring, which enqueue() changes; copy it to keep it."""
        return self.ring[: self.enqueued]

    def clear(self):
        self.enqueued = 0

    def get_extra_state(self):  # goes into the checkpoint with the ring
        return self.enqueued

    def set_extra_state(self, enqueued):
        self.enqueued = enqueued


# ---- Training. Everything above needs only torch and can be copied into other projects -----------


from common import ArgumentParser, UserError, number, run_main
from common import evaluation_sets, read_sentences, read_triplets
from common import load_encoder, load_student, save_encoder, spearman, teacher_embeddings
from common import Run, Tokens, average_gradients, batches, gather, own_rows, step_seed, to_device
from common import write_card


def kd_loss(student, teacher, queue, temperature):
    """Eq. 2 and 3 with the arguments of eq. 5 and 6."""
    return mse_loss(student, teacher)


class Objective(NamedTuple):
    """What --objective sets."""

    loss: Callable  # takes the arguments of contrastive_distillation_loss()
    has_bank: bool  # whether the loss uses the bank and the temperature
    max_norm: float  # of all gradients together
    max_length: int  # of training texts in both stages, in tokens


OBJECTIVES = {
    "ckd": Objective(contrastive_distillation_loss, has_bank=True, max_norm=1.0, max_length=64),
    "kd": Objective(kd_loss, has_bank=False, max_norm=math.inf, max_length=128),
}


def dev_score(student, dev_pairs):
    """100 x Spearman's correlation on the dev set, which chooses the best student."""
    return spearman(embed, student, {"dev": dev_pairs})["dev"]


def warmup_cosine(step, epoch_steps, total):
    """Factor of the learning rate: rises for a tenth of an epoch, then falls to 0 as a cosine."""
    warmup = max(1, epoch_steps // 10)
    if step < warmup:
        return step / warmup
    return (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup))) / 2


def distill(student, sentences, targets, dev_pairs, run, args):
    """Stage 1, section 3.1 -> the best step and the last. Dev scores use h^S, without M.

    targets [n, D_T]: h^T of n sentences. The teacher is not in this loop: it is frozen, and main()
    has computed its embeddings once.
    """
    objective = OBJECTIVES[args.objective]
    tokens = Tokens(student, sentences, args.max_length)  # tokenized once; .lengths [n]
    epoch_steps = math.ceil(len(sentences) / args.batch_size)
    total = min(args.epochs * epoch_steps, args.max_steps or math.inf)
    torch.manual_seed(args.seed)  # M starts at random
    projection = nn.Identity()  # eq. 2 and 5
    if student.dimension != targets.shape[1] or args.projection:
        projection = nn.Linear(student.dimension, targets.shape[1])  # M of eq. 3 and 6, with a bias
    projection.to(args.device)
    learned = args.learn_temperature and objective.has_bank
    temperature = Temperature(args.temperature, learned).to(args.device)
    bank = MemoryBank(args.queue_size, targets.shape[1]).to(args.device)
    modules = [student, projection, temperature, bank]
    parameters = [value for module in modules for value in module.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=args.lr, betas=(0.9, 0.98), fused=True)
    student.train()
    # --resume loads modules and optimizer in place; a new stage begins with -inf, 0, 0.
    best, best_step, step = run.resume("distill", total, modules, optimizer)
    # Row numbers [N], epoch after epoch, without end: the break below ends the loop.
    for rows in batches(tokens.lengths, args.batch_size, args.seed, args.shuffle, skip=step):
        if step % args.eval_steps == 0 or step == total:  # also before the first step
            dev = dev_score(student, dev_pairs)
            if dev > best:
                best, best_step = dev, step
                save_encoder(student, args.output)
            # The checkpoint comes first: --resume scores and logs this step once more.
            run.checkpoint(best, best_step, step, modules, optimizer)
            run.log_dev(step, dev)
            stalled = step - best_step >= args.patience * epoch_steps > 0  # never for patience 0
            if step == total or stalled:
                break
        if step % epoch_steps == 0:
            bank.clear()
        step += 1
        torch.manual_seed(step_seed(args.seed, step))  # so that --resume repeats the dropout
        lr = args.lr * warmup_cosine(step, epoch_steps, total)
        optimizer.param_groups[0]["lr"] = lr
        ids, mask = tokens.batch(own_rows(rows), args.device)  # this process's share, [n, L] each
        with torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16"):
            local = embed(student, ids, mask)  # h^S [n, D]
        projected = projection(gather(local, len(rows)))  # h^S M of all processes [N, D_T]
        target = to_device(targets[rows], args.device)  # h^T [N, D_T], read from disk
        loss = objective.loss(projected, target, bank.embeddings(), temperature())
        optimizer.zero_grad()
        loss.backward()
        average_gradients(parameters)  # now those of one process with the whole batch
        nn.utils.clip_grad_norm_(parameters, objective.max_norm)
        optimizer.step()
        filled = len(bank.embeddings()) if objective.has_bank else None  # more keys, larger loss
        run.log(step, len(rows), loss=loss, lr=lr, temperature=temperature(), bank=filled)
        bank.enqueue(target)  # after the loss
    return best_step, step


def finetune(student, triplets, dev_pairs, run, args):
    """Stage 2, section 3.2 -> the best step and the last.

    triplets: n lists [anchor, positive, hard negative] of texts. The student at the start is also a
    candidate: it is kept if stage 2 makes it worse.
    """
    columns = [Tokens(student, texts, args.max_length) for texts in zip(*triplets)]
    lengths = sum(tokens.lengths for tokens in columns)  # [n], of all three texts
    epoch_steps = math.ceil(len(lengths) / args.finetune_batch_size)
    total = min(args.finetune_epochs * epoch_steps, args.max_steps or math.inf)
    temperature = Temperature(args.finetune_temperature, args.learn_temperature).to(args.device)
    modules = [student, temperature]
    parameters = [value for module in modules for value in module.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=args.finetune_lr, betas=(0.9, 0.98), fused=True)
    student.train()
    best, best_step, step = run.resume("finetune", total, modules, optimizer)  # as in distill()
    for rows in batches(lengths, args.finetune_batch_size, args.seed, args.shuffle, skip=step):
        if step % args.eval_steps == 0 or step == total:
            dev = dev_score(student, dev_pairs)
            if dev > best:
                best, best_step = dev, step
                save_encoder(student, args.output)
            run.checkpoint(best, best_step, step, modules, optimizer)
            run.log_dev(step, dev)
            if step == total:
                break
        step += 1
        torch.manual_seed(step_seed(args.seed, step))
        lr = args.finetune_lr * warmup_cosine(step, epoch_steps, total)
        optimizer.param_groups[0]["lr"] = lr
        inputs = [tokens.batch(own_rows(rows), args.device) for tokens in columns]
        with torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16"):
            local = [embed(student, *batch) for batch in inputs]  # [n, D] each
        anchor, positive, hard_negative = [gather(part, len(rows)) for part in local]  # [N, D]
        loss = supervised_contrastive_loss(anchor, positive, hard_negative, temperature())
        optimizer.zero_grad()
        loss.backward()
        average_gradients(parameters)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        run.log(step, len(rows), loss=loss, lr=lr, temperature=temperature())
    return best_step, step


# ---- Command line --------------------------------------------------------------------------------

NEWS_5M = "ffgcc/NEWS5M"  # of the Hugging Face Hub, section 4.1
NLI = "nli_for_simcse.csv"
QUEUE_SIZE = 65536  # section 4.2
STAGE_2_OPTIONS = ["triplets", "finetune_epochs", "finetune_batch_size"]
STAGE_2_OPTIONS += ["finetune_lr", "finetune_temperature"]
DEMO = dict(teacher="sentence-transformers/all-MiniLM-L6-v2", student_layers="1,3,5")
DEMO |= dict(train="demo/sentences.txt", dev="demo/dev.tsv", triplets="demo/triplets.csv")
DEMO |= dict(epochs=1, batch_size=64, lr=1e-4, eval_steps=100)
DEMO |= dict(finetune_epochs=1, finetune_batch_size=64, finetune_lr=2e-5)


def parse_args():
    positive_int = number(int, 1)
    positive_float = number(float, 1e-9)
    parser = ArgumentParser(__doc__)
    parser.add_model_options("princeton-nlp/sup-simcse-roberta-large", pooling="pooler")
    parser.add_data_options(NEWS_5M)
    stages = "1, 2, or both (default: both; distill for --train without --triplets; paper §3)"
    stage_1 = "stage 1 (default: %(default)s; paper §4.2)"
    stage_2 = "stage 2 (default: %(default)s; paper §4.2)"
    keys = "memory bank size; 0: none, eq. 4 (default: 65536, or what an epoch fills; paper §4.2)"
    add = parser.add_argument_group("method").add_argument
    add("--objective", choices=OBJECTIVES, default="ckd", help="loss of stage 1 (default: ckd)")
    add("--stage", choices=("distill", "finetune", "both"), help=stages)
    add("--projection", action="store_true", help="use M even if the dimensions are equal")
    add("--temperature", type=positive_float, help="tau (default: 0.05; learned: starts at 0.368)")
    add("--learn-temperature", action="store_true", help="learn tau, as the authors' code does")
    add("--queue-size", type=number(int, 0), help=keys)
    add("--epochs", type=positive_int, default=20, help=stage_1)
    add("--batch-size", type=positive_int, default=512, help=stage_1)
    add("--lr", type=positive_float, help="stage 1 (default: 2e-4 above 80M parameters, else 3e-4)")
    add("--triplets", help=f"stage 2: CSV sent0,sent1,hard_neg (default: {NLI}; paper §4.1)")
    add("--finetune-temperature", type=positive_float, default=0.05, help="tau (default: 0.05)")
    add("--finetune-epochs", type=positive_int, default=5, help=stage_2)
    add("--finetune-batch-size", type=positive_int, default=128, help=stage_2)
    add("--finetune-lr", type=positive_float, help="stage 2 (default: 5e-5; 1e-5 for 30M to 80M)")
    parser.add_run_options("runs/ckd", max_length=None, eval_steps=125, patience=3, stage="stage 1")
    args = parser.parse(DEMO)
    if args.stage is None:
        args.stage = "distill" if args.train != NEWS_5M and not args.triplets else "both"
    if args.stage == "distill":
        parser.leave_out(args, STAGE_2_OPTIONS, "this run has no stage 2")
    else:
        args.triplets = args.triplets or NLI
    if not OBJECTIVES[args.objective].has_bank:
        unused = ["queue_size", "temperature"]
        if args.stage == "distill":
            unused.append("learn_temperature")
        parser.leave_out(args, unused, f"--objective {args.objective} does not use it")
    return args


def resolve_defaults(args, student, sentences):
    """Fill in missing options. Raises UserError for a bank that an epoch does not fill."""
    objective = OBJECTIVES[args.objective]
    args.max_length = args.max_length or objective.max_length
    millions = sum(value.numel() for value in student.parameters()) / 1e6  # rates: section 4.2
    args.lr = args.lr or (2e-4 if millions > 80 else 3e-4)
    if args.stage != "distill":  # the paper's student of 52M has 67M with its embeddings
        args.finetune_lr = args.finetune_lr or (1e-5 if 30 < millions <= 80 else 5e-5)
    if not objective.has_bank:
        args.queue_size = 0
        return
    full = (sentences - 1) // args.batch_size * args.batch_size  # before an epoch's last batch
    if args.temperature is None:
        args.temperature = math.exp(-1) if args.learn_temperature else 0.05
    if args.queue_size is None:
        args.queue_size = max(0, min(QUEUE_SIZE, full))
    if args.stage == "finetune":
        return
    if args.queue_size > full:
        raise UserError(f"--queue-size {args.queue_size}: an epoch fills only {full}; give {full}")
    if min(sentences, args.batch_size) + args.queue_size < 2:
        raise UserError(f"{args.train}: a contrastive loss needs two texts in batch and bank")


def main():
    args = parse_args()
    sets = evaluation_sets(args)
    student = load_student(args, default="pooler")
    uncut = student.uncut_parameters
    teacher, sentences, triplets = None, [], []
    if args.stage != "finetune":
        sentences = read_sentences(args.train)
        teacher = load_encoder(args.teacher, args.teacher_pooling, device=args.device).eval()
    if args.stage != "distill":
        triplets = read_triplets(args.triplets)
    resolve_defaults(args, student, len(sentences))

    data = dict(dev=sets["dev"], train=sentences, triplets=triplets)
    run = Run(args, teacher=teacher, student=student, **data)
    if not run.scores:
        if teacher:
            run.scores["teacher"] = spearman(embed, teacher, sets, encode=teacher_embeddings)
        run.scores["student before"] = spearman(embed, student, sets)
    if args.stage != "finetune" and "distill" not in run.finished:
        targets = teacher_embeddings(embed, teacher, sentences, args.max_length, args.precision)
        steps = distill(student, sentences, targets, sets["dev"], run, args)
        run.finish(*steps, {"best of stage 1": spearman(embed, load_best(args), sets)})
    if args.stage != "distill" and "finetune" not in run.finished:
        if args.stage == "both":
            student = load_best(args)
        steps = finetune(student, triplets, sets["dev"], run, args)
        run.finish(*steps, {"best of stage 2": spearman(embed, load_best(args), sets)})
    text = f"Trained by `ckd.py` (DistilCSE, arXiv:2112.05638), objective {args.objective}."
    write_card(run, args, load_best(args), uncut, text)


def load_best(args):
    """The best student so far, which distill() or finetune() has saved."""
    return load_encoder(args.output, device=args.device)


if __name__ == "__main__":
    run_main(main)
