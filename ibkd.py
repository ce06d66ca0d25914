"""IBKD, information bottleneck knowledge distillation, for similarity and for dense retrieval.

Zhang, Long, Li, Xie: "Text Representation Distillation via Information Bottleneck Principle",
EMNLP 2023, arXiv:2311.05472.

The student's embedding S of a text X keeps what the teacher's embedding T states, and forgets the
rest of X: eq. 1, L = -I(S, T) + beta I(X, S). Minimizing InfoNCE raises a lower bound of I(S, T).
HSIC (Hilbert-Schmidt independence criterion, a kernel measure of dependence) replaces I(X, S); X is
the mean of the student's own input embeddings. Stage 1 (distill) needs texts alone. Stage 2
(finetune) needs anchors with positives and hard negatives, which in retrieval the teacher finds.

    text --> teacher (frozen) ----> T --------> InfoNCE --+--> stage 1, eq. 8
      +----> student --> S --> mapping W --------^        |
                +------> X, S --> beta_1 HSIC(X, S) ------+
    anchor, positive, negatives --> student --> S --> S' --> InfoNCE --+--> stage 2, eq. 9
    all of these texts --> student --> X, S --> beta_2 HSIC(X, S) -----+    (S' = S without --dim)

Departures that change results (docs/ibkd.md has all of them, next to the authors' code):
  - The RBF kernel of eq. 7 is exp(-gamma |x - y|^2); the paper prints neither minus nor square.
  - InfoNCE compares by the cosine, as in the authors' code; the paper prints inner products.
  - W is dropped after stage 1 (--keep-mapping keeps it). The default data are NLI, not augmented.
  - A student cut to --student-layers trains without dropout.

  python ibkd.py --student nreimers/MiniLM-L6-H384-uncased       the paper's setting, similarity
  python -m extras.ibkd_dr --beir my-beir-folder --teacher MODEL --student-layers 1,3,5
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

# ---- Losses: call them in fp32, outside autocast -------------------------------------------------


def cosine(a, b):
    """The cosine of all pairs of rows: [N, D], [M, D] -> [N, M]."""
    a = F.normalize(a, dim=-1)
    b = F.normalize(b, dim=-1)
    return a @ b.T


def gram_matrix(z, kernel, gamma):
    """Eq. 7: K_ij = exp(-gamma |z_i - z_j|^2)

    for the kernel "rbf"; 1 / sqrt(|z_i - z_j|^2 + gamma) for "imq"; cos(z_i, z_j) for "linear". The
    paper prints exp(gamma |z_i - z_j|), which grows with the distance. z [l, D]; gamma > 0, ignored
    by "linear". Returns [l, l].
    """
    if kernel == "linear":
        return cosine(z, z)
    squares = z.square().sum(dim=1)  # [l]
    distance = (squares[:, None] + squares - 2 * z @ z.T).clamp(min=0)  # |z_i - z_j|^2, [l, l]
    if kernel == "imq":
        return torch.rsqrt(distance + gamma)
    return torch.exp(-gamma * distance)


def hsic(gram_x, gram_s):
    """Eq. 6: HSIC(X, S) = tr(K_X H K_S H) / l^2, with H = I - 1 1^T / l

    gram_x, gram_s: Gram matrices [l, l] of the same l samples. Returns a scalar >= 0, which tends
    to 0 for independent X and S as l grows.
    """
    l = len(gram_x)
    centering = torch.eye(l, dtype=gram_x.dtype, device=gram_x.device) - 1 / l  # H
    return torch.trace(gram_x @ centering @ gram_s @ centering) / l**2


def info_nce(student, teacher, temperature):
    """Section 3.1: L_i = -log( exp(cos(W s_i, t_i) / tau) / sum_j exp(cos(W s_i, t_j) / tau) )

    student [N, D], already mapped by W; teacher [N, D], of the same texts; temperature tau > 0.
    Returns the mean over the batch, a scalar >= 0.
    """
    logits = cosine(student, teacher) / temperature  # [N, N]
    positives = torch.arange(len(student), device=student.device)
    return F.cross_entropy(logits, positives)


def supervised_info_nce(anchor, positive, negatives, temperature, batch_negatives=False):
    """Eq. 10: L_i = -log( e(s_i, s_i^+) / (sum_j e(s_i, s_j^+) + sum_k e(s_i, s_ik^-)) )

    with e(u, v) = exp(cos(u, v) / tau). The paper prints L_i without the minus. anchor, positive
    [N, D]; negatives [N, K, D], the hard negatives of each anchor; with batch_negatives, each
    anchor is contrasted with all N K of them; temperature tau > 0. Returns the mean over the batch,
    a scalar >= 0.
    """
    if batch_negatives:
        hard = cosine(anchor, negatives.flatten(0, 1))  # [N, N K]
    else:
        hard = F.cosine_similarity(anchor.unsqueeze(1), negatives, dim=-1)  # [N, K]
    logits = torch.cat([cosine(anchor, positive), hard], dim=1) / temperature
    positives = torch.arange(len(anchor), device=anchor.device)
    return F.cross_entropy(logits, positives)


# ---- Model ---------------------------------------------------------------------------------------


def embed(encoder, input_ids, attention_mask, with_input=False, num_dense=None):
    """Token ids and mask, [N, L] each -> S, the embeddings [N, D] in float32.

    with_input: -> X [N, H], S, where X is the mean over the tokens in the output of the embedding
    layer. num_dense: S is the output of the first num_dense of encoder.heads (default: of all).
    encoder: has `model`, a transformer; `pooling`, "mean", "cls" or "lasttoken"; `heads`, the dense
    layers after pooling; `normalize`. The same for teacher and student, in training and scoring.
    Padding is on the right, as Tokens.batch() puts it.
    """
    output = encoder.model(
        input_ids, attention_mask=attention_mask, output_hidden_states=with_input
    )
    states = output.last_hidden_state  # [N, L, H]
    mask = attention_mask.unsqueeze(-1)  # [N, L, 1]
    if encoder.pooling == "cls":
        pooled = states[:, 0]
    elif encoder.pooling == "lasttoken":
        last = attention_mask.sum(dim=1) - 1  # [N], since padding is on the right
        pooled = states[torch.arange(states.shape[0], device=states.device), last]
    else:
        pooled = (states * mask).sum(dim=1) / mask.sum(dim=1)
    s = encoder.heads[:num_dense](pooled).float()  # [N, D]
    s = F.normalize(s, dim=-1) if encoder.normalize else s
    if not with_input:
        return s
    x = (output.hidden_states[0] * mask).sum(dim=1) / mask.sum(dim=1)
    return x.float(), s


def add_mapping(encoder, dimension, keep):
    """W of section 3.1, stage 1, or W_proj of eq. 11, stage 2 (S' = W_proj S): [N, D] -> [N, D'].

    It starts as the identity if D = dimension. dimension None: no map. keep: append it to
    encoder.heads, so that the student is scored and saved with it.
    """
    if dimension is None:
        return nn.Identity()
    mapping = nn.Linear(encoder.dimension, dimension, bias=False)
    if dimension == encoder.dimension:
        nn.init.eye_(mapping.weight)
    if keep:
        encoder.heads.append(nn.Sequential(mapping, nn.Identity()))
    return mapping


# ---- Training. Everything above needs only torch and can be copied into other projects -----------

from functools import partial

import numpy as np

from common import Batches, Tokens, embed_rows, spearman, to_device
from common import read_dev, read_embeddings, read_sentences, read_triplets, resolve_data
from common import load_encoder, load_untrained_student, teacher_embeddings
from common import check_saved, save_encoder
from common import ArgumentParser, Run, in_range, run_main, run_settings


def distill(student, texts, targets, dev_score, run, args):
    """Stage 1, eq. 8: minimize L = L_nce(S, T) + beta_1 HSIC(X, S).

    Eq. 8 prints -(L_nce - beta_1 HSIC), with eq. 3's L_nce, a bound to maximize. Section 3.1 ends
    with the opposite sign, a loss to minimize, which is info_nce(). targets [n, D_T]: T of n texts.
    The teacher is not in this loop: it is frozen, and its embeddings are computed beforehand.
    dev_score(encoder) -> the number that chooses the best student. Returns the best dev score, its
    step, and the last step.
    """
    tokens = Tokens(student, texts, args.max_length)
    batches = Batches(tokens.lengths, args.batch_size, args.seed, args.group_by_length)
    total = min(args.epochs * batches.per_epoch, args.max_steps)
    autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16")

    torch.manual_seed(args.seed)  # W starts at random
    embed_both = partial(embed, with_input=True, num_dense=len(student.heads))  # X and S, without W
    mapping = add_mapping(student, targets.shape[1], args.keep_mapping)
    model = nn.ModuleList([student, mapping]).to(args.device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)

    # begin() restores `state`, in place, and these values from the last checkpoint, if any.
    state = [model, optimizer]
    start, best, best_step = run.begin(total, state, (0, -math.inf, 0))
    for step in range(start, total + 1):  # `step` steps are finished
        run.checkpoint(state, (step, best, best_step))  # at most every five minutes

        # Now and then, before the first step and after the last: score the student, keep the best.
        if step % args.eval_steps == 0 or step == total:
            dev = dev_score(student)  # without dropout
            if dev > best:
                best, best_step = dev, step
                save_encoder(student, run.folder)
            if step == 0:  # before hours of training: can the student be read again?
                saved = load_encoder(run.folder, device=args.device)
                saved.prompt = student.prompt  # which extras/ibkd_dr.py may have changed
                check_saved(embed, student, saved, texts[:20])
                del saved  # frees memory
            run.log(step, dev=dev)
            if step == total:
                return best, best_step, step

        # One step.
        rows = batches[step]  # row numbers [N]
        torch.manual_seed(args.seed * 1_000_003 + step)  # a continued run repeats its dropout
        lr = args.lr * (total - step) / total
        optimizer.param_groups[0]["lr"] = lr
        with autocast:
            x, s = embed_rows(embed_both, student, tokens, rows, args.device)  # [N, H], [N, D]
        target = to_device(targets[rows], args.device)  # T [N, D_T], read from disk
        contrast = info_nce(mapping(s), target, args.temperature)
        gram_x = gram_matrix(x, args.kernel, args.gamma)  # K_X [N, N]
        gram_s = gram_matrix(s, args.kernel, args.gamma)  # K_S [N, N]
        dependence = hsic(gram_x, gram_s)  # eq. 6
        loss = contrast + args.beta1 * dependence  # eq. 8
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.log(step + 1, len(rows), loss=loss, info_nce=contrast, hsic=dependence, lr=lr)


def finetune(student, texts, examples, dev_score, run, args):
    """Stage 2, eq. 9: minimize L = L_nce^sup(S') + beta_2 HSIC(X, S).

    Eq. 9 prints -(L_nce^sup - beta_2 HSIC), and eq. 10 its L_nce^sup without a minus, which is the
    same loss. X and S are those of all texts of a batch, as in the authors' code. examples
    [n, 2 + K]: positions in texts of an anchor, its positive and its K hard negatives. The student
    at the start is scored, too, and kept if no step improves on it. A positive that two anchors of
    a batch share is a negative of both. Returns what distill() returns.
    """
    tokens = Tokens(student, texts, args.max_length)
    lengths = tokens.lengths[examples[:, 0]]  # of the anchors
    batches = Batches(lengths, args.finetune_batch_size, args.seed, args.group_by_length)
    total = min(args.finetune_epochs * batches.per_epoch, args.max_steps)
    autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16")

    torch.manual_seed(args.seed)  # W_proj starts at random
    embed_both = partial(embed, with_input=True, num_dense=len(student.heads))  # X and S
    mapping = add_mapping(student, args.dim, keep=True)  # embed() now returns S'
    student.to(args.device).train()
    optimizer = torch.optim.Adam(student.parameters(), lr=args.finetune_lr, fused=True)

    state = [student, optimizer]
    start, best, best_step = run.begin(total, state, (0, -math.inf, 0))
    for step in range(start, total + 1):  # `step` steps are finished
        run.checkpoint(state, (step, best, best_step))  # at most every five minutes

        # Now and then, before the first step and after the last: score the student, keep the best.
        if step % args.eval_steps == 0 or step == total:
            dev = dev_score(student)
            if dev > best:
                best, best_step = dev, step
                save_encoder(student, run.folder)
            if step == 0:  # before hours of training: can the student be read again?
                saved = load_encoder(run.folder, device=args.device)
                saved.prompt = student.prompt  # which extras/ibkd_dr.py may have changed
                check_saved(embed, student, saved, texts[:20])
                del saved  # frees memory
            run.log(step, dev=dev)
            if step == total:
                return best, best_step, step

        # One step.
        rows = batches[step]
        torch.manual_seed(args.seed * 1_000_003 + step)
        lr = args.finetune_lr * (total - step) / total
        optimizer.param_groups[0]["lr"] = lr
        numbers = examples[rows]  # of an anchor, its positive, K hard negatives [N, 2 + K]
        with autocast:  # X [N (2 + K), H], S [N (2 + K), D]
            x, s = embed_rows(embed_both, student, tokens, numbers.ravel(), args.device)
        mapped = mapping(s).view(*numbers.shape, -1)  # S' of eq. 11 [N, 2 + K, D']
        anchor, positive, negatives = mapped[:, 0], mapped[:, 1], mapped[:, 2:]
        contrast = supervised_info_nce(
            anchor, positive, negatives, args.finetune_temperature, args.batch_negatives
        )
        gram_x = gram_matrix(x, args.kernel, args.gamma)
        gram_s = gram_matrix(s, args.kernel, args.gamma)
        dependence = hsic(gram_x, gram_s)
        loss = contrast + args.beta2 * dependence  # eq. 9
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        run.log(step + 1, len(rows), loss=loss, info_nce=contrast, hsic=dependence, lr=lr)


# ---- Command line --------------------------------------------------------------------------------

CARD = "Trained by `ibkd.py` (IBKD, arXiv:2311.05472)."
NLI_TRIPLETS = "nli_for_simcse.csv"
POOLINGS = ("mean", "cls", "lasttoken", "pooler")


def add_options(parser):
    """All options except those of the data. extras/ibkd_dr.py has them, too."""
    positive_int = in_range(int, 1)
    positive_float = in_range(float, 1e-9)
    two = in_range(int, 2)  # a contrastive loss needs two texts
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shown = "(default: %(default)s)"
    section = "(default: %(default)s; paper §4.3)"
    stage_1 = "stage 1 (default: %(default)s; paper Table 1)"
    stage_2 = "stage 2 (default: %(default)s; paper Table 1)"

    add = parser.add_argument_group("models").add_argument
    teacher = "princeton-nlp/sup-simcse-roberta-large"
    add("--teacher", default=teacher, help=f"folder or Hub name {shown}")
    add("--student", help="folder or Hub name (default: the teacher, cut to --student-layers)")
    add("--student-layers", help="keep only these layers, counted from 0, as in 1,3,5")
    text = "student pooling (default: the teacher's if cut from it, else its folder's, else mean)"
    add("--pooling", choices=POOLINGS, help=text)
    add("--teacher-pooling", choices=POOLINGS, help="(default: its folder's, else mean)")
    text = "of the student (default: its folder's; 0 if it is cut)"
    add("--dropout", type=in_range(float, 0, 0.99), help=text)

    add = parser.add_argument_group("method").add_argument
    kernels = ("rbf", "imq", "linear")
    add("--kernel", choices=kernels, default="rbf", help="HSIC kernel (default: rbf; paper §3.2)")
    add("--gamma", type=positive_float, default=0.5, help=f"kernel parameter {section}")
    add("--beta1", type=in_range(float, 0), default=1.0, help=f"HSIC weight, stage 1 {section}")
    add("--beta2", type=in_range(float, 0), default=0.5, help=f"HSIC weight, stage 2 {section}")
    add("--keep-mapping", action="store_true", help="W stays: the student uses the teacher's space")
    add("--dim", type=positive_int, help="dimension of S' (default: no projection; paper §3.4)")
    add("--batch-negatives", action="store_true", help="stage 2: hard negatives of the whole batch")
    add("--epochs", type=positive_int, default=10, help=stage_1)
    add("--batch-size", type=two, default=256, help=stage_1)
    add("--lr", type=positive_float, default=1e-4, help=stage_1)
    add("--temperature", type=positive_float, default=0.1, help=stage_1)
    add("--finetune-epochs", type=positive_int, default=3, help=stage_2)
    add("--finetune-batch-size", type=two, default=256, help=stage_2)
    add("--finetune-lr", type=positive_float, default=3e-5, help=stage_2)
    add("--finetune-temperature", type=positive_float, default=0.05, help=stage_2)

    add = parser.add_argument_group("run").add_argument
    add("--output", default="runs/ibkd", help=f"folder for everything {shown}")
    add("--max-steps", type=positive_int, default=10**9, help="at most, in each stage")
    add("--max-length", type=in_range(int, 3), default=128, help=f"of a training text {shown}")
    add("--eval-steps", type=positive_int, default=500, help=f"steps between dev scores {shown}")
    add("--seed", type=in_range(int, 0), default=0, help=shown)
    add("--group-by-length", action="store_true", help="batches of texts of similar length")
    add("--device", choices=sorted({"cpu", device}), default=device, help=f"where to run {shown}")
    text = "(default: bf16 on a GPU that has it, else fp32)"
    add("--precision", choices=("fp32", "bf16"), help=text)


def parse_args():
    parser = ArgumentParser(__doc__)
    add = parser.add_argument_group("data").add_argument
    add("--train", help=f"sentences or a .csv of triplets (default: {NLI_TRIPLETS})")
    text = f"stage 2: CSV sent0,sent1,hard_neg (default: {NLI_TRIPLETS}; paper §4.3)"
    add("--triplets", help=text)
    text = "1, 2, or both (default: both; distill for --train without --triplets; paper §3.3)"
    add("--stage", choices=("distill", "finetune", "both"), help=text)
    text = "instead of --teacher: its embeddings of the training texts, .npy of floats [n, D]"
    add("--teacher-embeddings", metavar="FILE", help=text)
    add("--dev", help="scored pairs (TSV) that choose the best student (default: STS-B dev)")
    add_options(parser)
    args = parser.parse()
    if args.stage is None:
        args.stage = "distill" if args.train and not args.triplets else "both"
    args.train = args.train or NLI_TRIPLETS
    args.triplets = args.triplets or NLI_TRIPLETS
    return args


def run_distill(sentences, dev_score, run, args):
    """Stage 1 as a run: loads, trains and scores, and returns at once if the run has its card."""
    if run.is_finished:
        return
    student = load_untrained_student(args)
    if args.teacher_embeddings:
        targets = read_embeddings(args.teacher_embeddings, len(sentences))
    else:
        teacher = load_encoder(args.teacher, args.teacher_pooling, device=args.device)
        run.scores["teacher"] = {"dev": dev_score(teacher, vectors_of=teacher_embeddings)}
        targets = teacher_embeddings(embed, teacher, sentences, args.max_length, args.precision)
        del teacher  # frees GPU memory
    run.scores["student before"] = {"dev": dev_score(student)}
    outcome = distill(student, sentences, targets, dev_score, run, args)
    best = load_encoder(run.folder, device=args.device)
    run.finish(*outcome, "best of stage 1", {"dev": dev_score(best)}, CARD)


def run_finetune(first, triplets, dev_score, run, args):
    """Stage 2 as a run, from the student of the run `first`, or from --student if that is None."""
    if run.is_finished:
        return
    if first:
        run.scores |= first.scores
        student = load_encoder(first.folder, device=args.device, precision=args.precision)
    else:
        student = load_untrained_student(args)
        run.scores["student before"] = {"dev": dev_score(student)}
    texts = [text for triplet in triplets for text in triplet]
    examples = np.arange(len(texts)).reshape(-1, 3)
    outcome = finetune(student, texts, examples, dev_score, run, args)
    best = load_encoder(run.folder, device=args.device)
    run.finish(*outcome, "best of stage 2", {"dev": dev_score(best)}, CARD)


def main():
    args = parse_args()
    dev_pairs = read_dev(args.dev)
    sentences = read_sentences(resolve_data(args.train)) if args.stage != "finetune" else []
    triplets = read_triplets(resolve_data(args.triplets)) if args.stage != "distill" else []
    settings = run_settings(args, [__file__], [dev_pairs, sentences, triplets])
    dev_score = partial(spearman, embed, pairs=dev_pairs)  # of an encoder
    # A stage is a run with a folder of its own; the last one has --output itself.
    run = Run(settings, args, args.stage if args.stage != "both" else "finetune")
    first = Run(settings, args, "distill", is_last=False) if args.stage == "both" else None
    if args.stage != "finetune":
        run_distill(sentences, dev_score, first or run, args)
    if args.stage != "distill":
        run_finetune(first, triplets, dev_score, run, args)
    print(run.table())


if __name__ == "__main__":
    run_main(main)
