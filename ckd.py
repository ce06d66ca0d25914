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
    of the same sentence, from the last epoch, would count as its negative.
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
    """f(u, v) of eq. 4, the cosine of all pairs of rows: [N, D], [M, D] -> [N, M]."""
    a = F.normalize(a, dim=-1)
    b = F.normalize(b, dim=-1)
    return a @ b.T


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
    Padding is on the right, as Tokens.batch() puts it.
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

from common import Batches, Tokens, embed_rows, spearman, to_device
from common import read_dev, read_embeddings, read_sentences, read_triplets, resolve_data
from common import load_encoder, load_untrained_student, check_saved, save_encoder
from common import teacher_embeddings
from common import ArgumentParser, Run, in_range, run_main, run_settings


def warmup_cosine(step, epoch_steps, total):
    """Factor of the learning rate after `step` steps: rises from 0, then falls as a cosine.

    As in the authors' code; the paper has no schedule. The rise takes a tenth of an epoch.
    """
    warmup = epoch_steps / 10
    if step < warmup:
        return step / max(1, warmup)
    progress = (step - warmup) / max(1, total - warmup)  # 0 to 1
    return (1 + math.cos(math.pi * progress)) / 2


def distill(student, sentences, targets, dev_pairs, run, args):
    """Stage 1, section 3.1. Returns the best dev score, its step, and the last step.

    targets [n, D_T]: h^T of n sentences. The teacher is not in this loop: it is frozen, and
    run_distill() obtains its embeddings beforehand. Dev scores are of h^S, without M.
    """
    tokens = Tokens(student, sentences, args.max_length)
    batches = Batches(tokens.lengths, args.batch_size, args.seed, args.group_by_length)
    total = min(args.epochs * batches.per_epoch, args.max_steps)
    patience = args.patience * batches.per_epoch if args.patience else math.inf  # in steps
    autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16")

    torch.manual_seed(args.seed)  # M is initialized at random
    model = nn.Module()  # everything that is trained
    model.student = student
    model.projection = nn.Identity()  # eq. 2 and 5
    if student.dimension != targets.shape[1] or args.projection:
        model.projection = nn.Linear(student.dimension, targets.shape[1])  # M of eq. 3 and 6
    log_tau = torch.tensor(math.log(args.temperature))
    model.log_tau = nn.Parameter(log_tau, requires_grad=args.learn_temperature)
    model.to(args.device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.98), fused=True)
    bank = torch.empty(0, targets.shape[1], device=args.device)  # [Q, D_T]

    # begin() restores `state`, in place, and these values from the last checkpoint, if any.
    state = [model, optimizer]
    start, best, best_step, bank = run.begin(total, state, (0, -math.inf, 0, bank))
    for step in range(start, total + 1):  # `step` steps are finished
        run.checkpoint(state, (step, best, best_step, bank))  # at most every five minutes

        # Now and then, before the first step and after the last: score the student, keep the best.
        if step % args.eval_steps == 0 or step == total:
            dev = spearman(embed, student, dev_pairs)  # without dropout
            if dev > best:
                best, best_step = dev, step
                save_encoder(student, run.folder)
            if step == 0:  # before hours of training: does the saved student load?
                saved = load_encoder(run.folder, device=args.device)
                check_saved(embed, student, saved, sentences[:20])
                del saved  # frees memory
            run.log(step, dev=dev)
            if step == total or step - best_step >= patience:
                return best, best_step, step

        # An epoch begins: clear the bank. It may hold embeddings of the sentences that come next.
        if step % batches.per_epoch == 0:
            bank = bank[:0]

        # One step.
        rows = batches[step]  # row numbers [N]
        torch.manual_seed(args.seed * 1_000_003 + step)  # a resumed run draws the same dropout
        lr = args.lr * warmup_cosine(step, batches.per_epoch, total)
        optimizer.param_groups[0]["lr"] = lr
        with autocast:
            embedding = embed_rows(embed, student, tokens, rows, args.device)  # h^S [N, D]
        projected = model.projection(embedding)  # h^S M [N, D_T]
        target = to_device(targets[rows], args.device)  # h^T [N, D_T], read from disk
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
        run.log(step + 1, len(rows), loss=loss, lr=lr, temperature=temperature, bank=len(bank))
        bank = enqueue(bank, target, args.queue_size)  # after the loss; for KD, it stays empty


def finetune(student, triplets, dev_pairs, run, args):
    """Stage 2, section 3.2: as distill(), without teacher, bank and early stopping.

    triplets: n lists [anchor, positive, hard negative] of texts.
    """
    columns = [Tokens(student, texts, args.max_length) for texts in zip(*triplets)]
    lengths = sum(tokens.lengths for tokens in columns)  # [n], of all three texts
    batches = Batches(lengths, args.finetune_batch_size, args.seed, args.group_by_length)
    total = min(args.finetune_epochs * batches.per_epoch, args.max_steps)
    autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16")

    model = nn.Module()
    model.student = student
    log_tau = torch.tensor(math.log(args.finetune_temperature))
    model.log_tau = nn.Parameter(log_tau, requires_grad=args.learn_temperature)
    model.to(args.device).train()
    peak = args.finetune_lr
    optimizer = torch.optim.Adam(model.parameters(), lr=peak, betas=(0.9, 0.98), fused=True)

    state = [model, optimizer]
    start, best, best_step = run.begin(total, state, (0, -math.inf, 0))
    for step in range(start, total + 1):  # `step` steps are finished
        run.checkpoint(state, (step, best, best_step))  # at most every five minutes

        # Now and then, before the first step and after the last: score the student, keep the best.
        if step % args.eval_steps == 0 or step == total:
            dev = spearman(embed, student, dev_pairs)
            if dev > best:
                best, best_step = dev, step
                save_encoder(student, run.folder)
            if step == 0:
                saved = load_encoder(run.folder, device=args.device)
                check_saved(embed, student, saved, triplets[0])
                del saved  # frees memory
            run.log(step, dev=dev)
            if step == total:
                return best, best_step, step

        # One step.
        rows = batches[step]
        torch.manual_seed(args.seed * 1_000_003 + step)
        lr = peak * warmup_cosine(step, batches.per_epoch, total)
        optimizer.param_groups[0]["lr"] = lr
        with autocast:  # [N, D] each
            anchor, positive, hard_negative = [
                embed_rows(embed, student, tokens, rows, args.device) for tokens in columns
            ]
        temperature = model.log_tau.exp()
        loss = supervised_contrastive_loss(anchor, positive, hard_negative, temperature)  # eq. 7
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.log(step + 1, len(rows), loss=loss, lr=lr, temperature=temperature)


# ---- Command line --------------------------------------------------------------------------------

NEWS_5M = "ffgcc/NEWS5M"  # of the Hugging Face Hub, section 4.1
NLI_TRIPLETS = "nli_for_simcse.csv"
POOLINGS = ("mean", "cls", "lasttoken", "pooler")


def parse_args():
    positive_int = in_range(int, 1)
    positive_float = in_range(float, 1e-9)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shown = "(default: %(default)s)"
    stage_1 = "stage 1 (default: %(default)s; paper §4.2)"
    stage_2 = "stage 2 (default: %(default)s; paper §4.2)"
    parser = ArgumentParser(__doc__)

    add = parser.add_argument_group("models").add_argument
    teacher = "princeton-nlp/sup-simcse-roberta-large"
    add("--teacher", default=teacher, help=f"folder or Hub name {shown}")
    text = "instead of --teacher: its embeddings of the training texts, .npy of floats [n, D]"
    add("--teacher-embeddings", metavar="FILE", help=text)
    add("--student", help="folder or Hub name (default: the teacher, cut to --student-layers)")
    add("--student-layers", help="keep only these layers, counted from 0, as in 1,3,5")
    text = "student pooling (default: the teacher's if cut from it, else its folder's, else pooler)"
    add("--pooling", choices=POOLINGS, help=text)
    add("--teacher-pooling", choices=POOLINGS, help="(default: its folder's, else mean)")
    text = "of the student (default: its folder's; 0 if it is cut)"
    add("--dropout", type=in_range(float, 0, 0.99), help=text)

    add = parser.add_argument_group("data").add_argument
    add("--train", help=f"sentences or a .csv of triplets (default: {NEWS_5M})")
    text = f"stage 2: CSV sent0,sent1,hard_neg (default: {NLI_TRIPLETS}; paper §4.1)"
    add("--triplets", help=text)
    add("--dev", help="scored pairs (TSV) that choose the best student (default: STS-B dev)")

    add = parser.add_argument_group("method").add_argument
    add("--objective", choices=("ckd", "kd"), default="ckd", help=f"loss of stage 1 {shown}")
    text = "distill: 1; finetune: 2 (default: both; distill for --train without --triplets)"
    add("--stage", choices=("distill", "finetune", "both"), help=text)
    add("--projection", action="store_true", help="use M even if the dimensions are equal")
    add("--temperature", type=positive_float, help="tau, stage 1 (default: 0.05; 0.368 if learned)")
    add("--learn-temperature", action="store_true", help="learn log(tau), in both stages")
    add("--queue-size", type=in_range(int, 0), default=65536, help=f"memory bank size, {stage_1}")
    text = "epochs without a better dev score that end stage 1; 0: never (default: %(default)s)"
    add("--patience", type=in_range(int, 0), default=3, help=text)
    add("--epochs", type=positive_int, default=20, help=stage_1)
    add("--batch-size", type=in_range(int, 2), default=512, help=stage_1)
    add("--lr", type=positive_float, help="stage 1 (default: 2e-4 above 80M parameters, else 3e-4)")
    add(
        "--finetune-temperature",
        type=positive_float,
        default=0.05,
        help="tau, stage 2 (default: 0.05)",
    )
    add("--finetune-epochs", type=positive_int, default=5, help=stage_2)
    add("--finetune-batch-size", type=in_range(int, 2), default=128, help=stage_2)
    add("--finetune-lr", type=positive_float, help="stage 2 (default: 5e-5; 1e-5 for 30M to 80M)")

    add = parser.add_argument_group("run").add_argument
    add("--output", default="runs/ckd", help=f"folder for everything {shown}")
    add("--max-steps", type=positive_int, default=10**9, help="at most, in each stage")
    add("--max-length", type=in_range(int, 3), default=64, help=f"of a training text {shown}")
    add("--eval-steps", type=positive_int, default=125, help=f"steps between dev scores {shown}")
    add("--seed", type=in_range(int, 0), default=0, help=shown)
    add("--group-by-length", action="store_true", help="batches of texts of similar length")
    add("--device", choices=sorted({"cpu", device}), default=device, help=f"where to run {shown}")
    text = "(default: bf16 on a GPU that has it, else fp32)"
    add("--precision", choices=("fp32", "bf16"), help=text)

    args = parser.parse()
    if args.stage is None:
        args.stage = "distill" if args.train and not args.triplets else "both"
    args.train = args.train or NEWS_5M
    args.triplets = args.triplets or NLI_TRIPLETS
    if args.temperature is None:  # the authors' code: log(1 / tau) starts at 1
        args.temperature = math.exp(-1) if args.learn_temperature else 0.05
    if args.objective != "ckd":
        args.queue_size = 0  # no bank
    return args


def run_distill(sentences, dev_pairs, run, args):
    """Stage 1 as a run: load, train, score. Returns at once if it is finished."""
    if run.is_finished:
        return
    student = load_untrained_student(args, default="pooler")
    choose_rates(args, student)
    if args.teacher_embeddings:
        targets = read_embeddings(args.teacher_embeddings, len(sentences))
    else:
        teacher = load_encoder(args.teacher, args.teacher_pooling, device=args.device)
        run.scores["teacher"] = {
            "dev": spearman(embed, teacher, dev_pairs, vectors_of=teacher_embeddings)
        }
        targets = teacher_embeddings(embed, teacher, sentences, args.max_length, args.precision)
        del teacher  # frees GPU memory
    run.scores["student before"] = {"dev": spearman(embed, student, dev_pairs)}
    outcome = distill(student, sentences, targets, dev_pairs, run, args)
    best = load_encoder(run.folder, device=args.device)
    run.finish(*outcome, "best of stage 1", {"dev": spearman(embed, best, dev_pairs)}, card(args))


def run_finetune(first, triplets, dev_pairs, run, args):
    """Stage 2 as a run, from the student of the run `first`, or --student if that is None."""
    if run.is_finished:
        return
    if first:
        run.scores |= first.scores
        student = load_encoder(first.folder, device=args.device, precision=args.precision)
    else:
        student = load_untrained_student(args, default="pooler")
        run.scores["student before"] = {"dev": spearman(embed, student, dev_pairs)}
    choose_rates(args, student)
    outcome = finetune(student, triplets, dev_pairs, run, args)
    best = load_encoder(run.folder, device=args.device)
    run.finish(*outcome, "best of stage 2", {"dev": spearman(embed, best, dev_pairs)}, card(args))


def choose_rates(args, student):
    """Set learning rates that are not given, by the student's size: section 4.2."""
    millions = sum(value.numel() for value in student.parameters()) / 1e6
    args.lr = args.lr or (2e-4 if millions > 80 else 3e-4)
    # The student that the paper counts as 52M has 67M here.
    args.finetune_lr = args.finetune_lr or (1e-5 if 30 < millions <= 80 else 5e-5)


def card(args):
    return f"Trained by `ckd.py` (DistilCSE, arXiv:2112.05638), objective {args.objective}."


def main():
    args = parse_args()
    dev_pairs = read_dev(args.dev)
    sentences = read_sentences(resolve_data(args.train)) if args.stage != "finetune" else []
    triplets = read_triplets(resolve_data(args.triplets)) if args.stage != "distill" else []
    settings = run_settings(args, [__file__], [dev_pairs, sentences, triplets])
    # Each stage is a run. The last one writes to --output, an earlier one to a folder inside it.
    run = Run(settings, args, args.stage if args.stage != "both" else "finetune")
    first = Run(settings, args, "distill", is_last=False) if args.stage == "both" else None
    if args.stage != "finetune":
        run_distill(sentences, dev_pairs, first or run, args)
    if args.stage != "distill":
        run_finetune(first, triplets, dev_pairs, run, args)
    print(run.table())


if __name__ == "__main__":
    run_main(main)
