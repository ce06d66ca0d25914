"""CKD, contrastive knowledge distillation: the method of DistilCSE. And KD, what it improves on.

Gao, Wu, Wang, Wang, Zang, Wang, Hu: "DistilCSE: Effective Knowledge Distillation For Contrastive
Sentence Embeddings", arXiv:2112.05638.

Stage 1 (distill), on unlabeled sentences: from the student's embedding of a sentence, find the
frozen teacher's embedding of it among the teacher's embeddings of other sentences, those of the
batch and those of a memory bank. With --objective kd, come close to it in squared error instead.
Stage 2 (finetune), on NLI triplets, without the teacher: find the entailed sentence among all
entailed and contradicting sentences of the batch.

    sentence --> teacher (frozen) ----------------> h^T --> memory bank (teacher embeddings)
        |                                            |          |
        +-----> student --> h^S --> projection M --> InfoNCE <--+          stage 1, eq. 5 and 6
                                +-> squared error to h^T                   --objective kd, eq. 2, 3
    anchor, positive, hard negative --> student --> InfoNCE                stage 2, eq. 7

Departures that change results (docs/ckd.md has all of them, next to the authors' code):
  - tau is fixed at 0.05, which the paper does not state; --learn-temperature learns it.
  - A student cut to --student-layers trains without dropout; the teacher never has any.
  - A batch has sentences of similar length (--shuffle: random ones).
  - The bank is emptied when an epoch begins, as eq. 5 contrasts with other sentences.
  - KD averages over the batch (eq. 2: sum), unclipped, as the authors do; 128 tokens (theirs: 64).

  python ckd.py --student bert-base-uncased         the paper's setting, 110M parameters
  python ckd.py --objective kd --teacher MODEL --student-layers 1,3,5 --train my.txt --dev my.tsv
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

# ---- Losses --------------------------------------------------------------------------------------


def cosine(a, b):
    """f(u, v) of eq. 4, the cosine of all pairs of rows: [N, D], [M, D] -> [N, M]."""
    return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T


def mse_loss(student, teacher):
    """Eq. 2: L_KD = 1/N sum_i 1/D sum_d (h_id^S - h_id^T)^2

    The paper sums over i, without 1/N. Eq. 3 is the same with the projected student h_i^S M in the
    place of h_i^S. student, teacher [N, D]. Returns a scalar >= 0.
    """
    return (student - teacher).square().mean()


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


# ---- Model ---------------------------------------------------------------------------------------


def embed(encoder, input_ids, attention_mask):
    """Token ids and mask, [N, L] each -> embeddings [N, D] in float32.

    encoder: has `model`, a transformer; `pooling`, "mean", "cls" or "lasttoken"; `heads`, dense
    layers after it; `normalize`. The same for teacher and student, in training and scoring.
    """
    states = encoder.model(input_ids, attention_mask).last_hidden_state  # [N, L, H]
    if encoder.pooling == "cls":
        pooled = states[:, 0]
    elif encoder.pooling == "lasttoken":
        last = attention_mask.cumsum(dim=1).argmax(dim=1)  # of the tokens that are not padding
        pooled = states[torch.arange(len(states), device=states.device), last]
    else:
        mask = attention_mask.unsqueeze(-1)  # [N, L, 1]
        pooled = (states * mask).sum(dim=1) / mask.sum(dim=1)
    embedding = encoder.heads(pooled).float()  # [N, D]
    return F.normalize(embedding, dim=-1) if encoder.normalize else embedding


class Temperature(nn.Module):
    """tau of eq. 5 and 7: fixed, or learned through its logarithm."""

    def __init__(self, temperature, learned):
        super().__init__()
        self.fixed = temperature
        self.logarithm = nn.Parameter(torch.tensor(math.log(temperature))) if learned else None

    def forward(self):
        return self.fixed if self.logarithm is None else self.logarithm.exp()


class MemoryBank(nn.Module):
    """The teacher embeddings of the last `size` sentences (section 3.1): a ring buffer."""

    def __init__(self, size, dimension):
        super().__init__()
        self.register_buffer("keys", torch.zeros(size, dimension))
        self.enqueued = 0  # since the last clear()

    def enqueue(self, embeddings):
        """Overwrite the N oldest entries with embeddings [N, dimension]."""
        size = len(self.keys)
        newest = embeddings[max(0, len(embeddings) - size) :]
        slots = self.enqueued + torch.arange(len(newest), device=newest.device)
        self.keys[slots % size] = newest
        self.enqueued += len(newest)

    def embeddings(self):
        """[Q, dimension], Q <= size."""
        return self.keys[: self.enqueued]

    def clear(self):
        self.enqueued = 0

    def get_extra_state(self):  # goes into the checkpoint with the keys
        return self.enqueued

    def set_extra_state(self, enqueued):
        self.enqueued = int(enqueued)


# ---- Training ------------------------------------------------------------------------------------

import numpy as np

from common import ArgumentParser, DataError, count, count_or_none, positive, run_main
from common import add_data_options, add_model_options, add_run_options
from common import evaluation_sets, read_sentences, read_triplets, resolve
from common import encode, load_encoder, load_student, spearman, teacher_embeddings
from common import Run, Tokens, autocast, average_gradients, gather, note, own_rows
from common import step_seed, to_device


def align(teacher, student, device):
    """t A with A = P Q: principal components, then a rotation. No paper does this.

    P [D_T, D_S]: the directions along which the teacher's embeddings T [n, D_T] are longest, the
    first eigenvectors of T^T T; the mean is not subtracted. Q = argmin |T P Q - S|, Q orthogonal,
    is U V^T of U Sigma V^T = (T P)^T S (orthogonal Procrustes, Schoenemann 1966). It moves T to
    where the student's embeddings S [n, D_S] of the same sentences are. Returns A [D_T, D_S], and
    the mean length of the student's embeddings.
    """
    length = float(np.linalg.norm(student, axis=1).mean())
    teacher, student = teacher.astype(np.float64), student.astype(np.float64)
    eigenvalues, eigenvectors = np.linalg.eigh(teacher.T @ teacher)  # rising
    directions = eigenvectors[:, ::-1][:, : student.shape[1]]  # P [D_T, min(D_T, D_S)]
    left, _, right = np.linalg.svd((teacher @ directions).T @ student, full_matrices=False)
    kept = 100 * eigenvalues[-student.shape[1] :].sum() / eigenvalues.sum()
    note(f"alignment keeps {kept:.1f} % of the teacher's variance")
    matrix = (directions @ (left @ right)).astype(np.float32)
    return torch.from_numpy(matrix).to(device), length


def warmup_cosine(step, epoch_steps, total):
    """Share of the peak learning rate: rises for a tenth of an epoch, then falls as a cosine."""
    warmup = max(1, epoch_steps // 10)
    if step < warmup:
        return step / warmup
    return (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup))) / 2


def build_projection(encoder, sentences, targets, args):
    """-> M of eq. 3 and 6, or an identity; (A, length) of align() if KD has --align, or None."""
    torch.manual_seed(args.seed)  # M starts at random
    projection = nn.Linear(encoder.dimension, targets.shape[1]).to(args.device)  # M
    if not args.align:
        wanted = args.projection or targets.shape[1] != encoder.dimension
        return projection if wanted else nn.Identity(), None
    rows = np.random.default_rng(args.seed).permutation(len(sentences))[:ALIGNED]
    own = encode(embed, encoder, [sentences[row] for row in rows])
    matrix, length = align(targets[rows], own, args.device)
    if args.objective == "kd":
        return nn.Identity(), (matrix, length)
    nn.init.zeros_(projection.bias)
    projection.weight.data.copy_(matrix)
    return projection, None


def distill(encoder, sentences, targets, run, args):
    """Stage 1, section 3.1. targets [n, D_T]: the teacher's h^T of n sentences. Dev scores h^S."""
    projection, alignment = build_projection(encoder, sentences, targets, args)
    tokens = Tokens(encoder, sentences, args.max_length)
    epoch_steps, total = run.count_steps(len(targets), args.batch_size, args.epochs)
    bank = MemoryBank(args.queue_size, targets.shape[1]).to(args.device)
    temperature = Temperature(args.temperature, args.learn_temperature).to(args.device)
    parameters = [*encoder.parameters(), *projection.parameters(), *temperature.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=args.lr, betas=(0.9, 0.98), fused=True)
    encoder.train()
    run.begin("distill", total, [encoder, projection, temperature, bank], optimizer)
    for step, rows in run.batches(tokens.lengths, args.batch_size):
        if run.stalled(args.patience * epoch_steps):
            break
        if (step - 1) % epoch_steps == 0:
            bank.clear()
        torch.manual_seed(step_seed(args.seed, step))  # of dropout, whatever came before
        optimizer.param_groups[0]["lr"] = args.lr * warmup_cosine(step, epoch_steps, total)
        with autocast(args.device, args.precision):
            own = embed(encoder, *tokens.batch(own_rows(rows), args.device))  # [n, D]
        embedding = gather(own, len(rows))  # h^S of all processes [N, D]
        projected = projection(embedding)  # h^S M [N, D_T]
        target = to_device(targets[rows], args.device)  # h^T [N, D_T]
        if args.objective == "kd":
            if alignment:
                matrix, length = alignment
                target = length * F.normalize(target @ matrix, dim=1)  # as long as h^S was
            loss = mse_loss(projected, target)
        else:
            keys = bank.embeddings()
            loss = contrastive_distillation_loss(projected, target, keys, temperature())
        optimizer.zero_grad()
        loss.backward()
        average_gradients(parameters)
        if args.objective == "ckd":
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if args.objective == "ckd":
            bank.enqueue(target)
        run.log(step, len(rows), loss=loss, temperature=temperature())
        if step % args.eval_steps == 0 or step == total:
            run.evaluate(step)


def finetune(encoder, triplets, run, args):
    """Stage 2, section 3.2. triplets: n times an anchor, a positive and a hard negative."""
    triplets = [Tokens(encoder, texts, args.max_length) for texts in zip(*triplets)]
    lengths = sum(tokens.lengths for tokens in triplets)
    size = args.finetune_batch_size
    epoch_steps, total = run.count_steps(len(lengths), size, args.finetune_epochs)
    temperature = Temperature(args.finetune_temperature, args.learn_temperature).to(args.device)
    parameters = [*encoder.parameters(), *temperature.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=args.finetune_lr, betas=(0.9, 0.98), fused=True)
    encoder.train()
    run.begin("finetune", total, [encoder, temperature], optimizer)
    for step, rows in run.batches(lengths, size):
        torch.manual_seed(step_seed(args.seed, step))
        optimizer.param_groups[0]["lr"] = args.finetune_lr * warmup_cosine(step, epoch_steps, total)
        inputs = [tokens.batch(own_rows(rows), args.device) for tokens in triplets]
        with autocast(args.device, args.precision):
            own = [embed(encoder, *batch) for batch in inputs]  # [n, D] each
        anchor, positive, hard_negative = [gather(part, len(rows)) for part in own]  # [N, D]
        loss = supervised_contrastive_loss(anchor, positive, hard_negative, temperature())
        optimizer.zero_grad()
        loss.backward()
        average_gradients(parameters)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        run.log(step, len(rows), loss=loss, temperature=temperature())
        if step % args.eval_steps == 0 or step == total:
            run.evaluate(step)


# ---- Command line --------------------------------------------------------------------------------

NEWS_5M = "ffgcc/NEWS5M"  # of the Hugging Face Hub, section 4.1
QUEUE_SIZE = 65536  # section 4.2
ALIGNED = 10_000  # sentences that --align looks at


def parse_args():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser, "princeton-nlp/sup-simcse-roberta-large", pooling="pooler")
    add_data_options(parser, NEWS_5M)
    add = parser.add_argument_group("method (defaults with a section are the paper's)").add_argument
    add("--objective", choices=("ckd", "kd"), default="ckd", help="stage 1 (default: %(default)s)")
    stages = "1 (3.1), 2 (3.2) (default: both; distill for --train without --triplets)"
    add("--stage", choices=("distill", "finetune", "both"), help=stages)
    add("--align", action="store_true", help="bring the teacher into the student's space first")
    add("--projection", action="store_true", help="use M also where dimensions are equal")
    add("--temperature", type=positive, help="tau of eq. 5 (default: 0.05, or learned from 0.368)")
    add("--learn-temperature", action="store_true", help="learn tau, as the authors' code does")
    bank = "memory bank size; 0: none, eq. 4 (default: 65536, or what an epoch fills; 4.2)"
    add("--queue-size", type=count_or_none, help=bank)
    add("--epochs", type=count, default=20, help="stage 1 (default: %(default)s; 4.2)")
    add("--batch-size", type=count, default=512, help="stage 1 (default: %(default)s; 4.2)")
    add("--lr", type=positive, help="stage 1 (default: 2e-4 for 110M parameters, else 3e-4; 4.2)")
    add("--triplets", help="stage 2: CSV sent0,sent1,hard_neg (default: nli_for_simcse.csv; 4.1)")
    add("--finetune-temperature", type=positive, default=0.05, help="tau of eq. 7 (default: 0.05)")
    stage_2 = "stage 2 (default: %(default)s; 4.2)"
    add("--finetune-epochs", type=count, default=5, help=stage_2)
    add("--finetune-batch-size", type=count, default=128, help=stage_2)
    add("--finetune-lr", type=positive, help="stage 2 (default: 5e-5; 1e-5 at 52M parameters; 4.2)")
    add_run_options(parser, "runs/ckd", max_length=None, eval_steps=125, patience=3)
    args = parser.parse(lr=1e-4, finetune_lr=2e-5, eval_steps=100)
    if args.stage is None:
        args.stage = "distill" if args.train != NEWS_5M and not args.triplets else "both"
    args.triplets = args.triplets or "nli_for_simcse.csv"
    args.temperature = args.temperature or (math.exp(-1) if args.learn_temperature else 0.05)
    args.max_length = args.max_length or (64 if args.objective == "ckd" else 128)
    return args


def choose_learning_rates(args, encoder):
    """Section 4.2: they depend on the number of the student's parameters."""
    millions = sum(value.numel() for value in encoder.parameters()) / 1e6
    args.lr = args.lr or (2e-4 if millions > 80 else 3e-4)
    args.finetune_lr = args.finetune_lr or (1e-5 if 30 < millions <= 80 else 5e-5)


def choose_queue_size(args, sentences):
    """As many entries as an epoch can fill before its last batch; KD has none. Raises DataError."""
    full = (sentences - 1) // args.batch_size * args.batch_size
    if args.objective == "kd":
        args.queue_size = 0
        return
    if args.queue_size is None:
        args.queue_size = min(QUEUE_SIZE, full)
    if args.queue_size > full or min(sentences, args.batch_size) + args.queue_size < 2:
        found = f"{sentences} sentences fill at most {full}; batch and bank need two"
        raise DataError(f"--queue-size {args.queue_size}: {found}")


def main():
    args = parse_args()
    run = Run(args)
    sets = evaluation_sets(args)
    score = partial(spearman, embed, sets=sets)
    encoder = load_student(args, default="pooler")
    choose_learning_rates(args, encoder)
    teacher, sentences, triplets = None, [], []
    if args.stage != "finetune":
        sentences = read_sentences(args.train)
        teacher = load_encoder(args.teacher, args.teacher_pooling).to(args.device).eval()
        choose_queue_size(args, len(sentences))
    if args.stage != "distill":
        triplets = read_triplets(resolve(args.triplets))

    run.start(score, sets["dev"], train=sentences, teacher=teacher, triplets=triplets)
    if not run.scores:
        if teacher:
            run.scores["teacher"] = score(teacher, encode=teacher_embeddings)
        run.scores["student before"] = score(encoder)
    if teacher and "distill" not in run.finished:
        targets = teacher_embeddings(embed, teacher, sentences, args.max_length, args.precision)
        distill(encoder, sentences, targets, run, args)
        run.finish({"student after stage 1": score(run.best_student())})
    if args.stage == "both":
        encoder = run.best_student()
    if triplets and "finetune" not in run.finished:
        finetune(encoder, triplets, run, args)
        run.finish({"student after stage 2": score(run.best_student())})
    run.write_card(f"Trained by `ckd.py` (DistilCSE, arXiv:2112.05638), {args.objective}.")


if __name__ == "__main__":
    run_main(main)
