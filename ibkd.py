# SPDX-License-Identifier: MIT
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

    with_input: -> X and S side by side, [N, H + D]; X is the mean over the tokens in the output of
    the embedding layer. num_dense: S is the output of the first num_dense of encoder.heads, or of
    all. encoder: has `model`, a transformer; `pooling`, "mean", "cls" or "lasttoken"; `heads`, the
    dense layers after pooling; `normalize`. The same for teacher and student, in training and
    scoring. Padding is on the right.
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
    x = (output.hidden_states[0] * mask).sum(dim=1) / mask.sum(dim=1)  # [N, H]
    return torch.cat([x.float(), s], dim=1)


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
from typing import Literal

import numpy as np

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
    pooling: Pooling = None  # of the student (default: the teacher's if cut, its folder's, or mean)
    dropout: in_range(float, 0, 0.99) = None  # of the student (default: its folder's; 0 if cut)

    train: str = None  # sentences, or a .csv of triplets (default: nli_for_simcse.csv)
    triplets: str = None  # stage 2: CSV sent0,sent1,hard_neg (default: nli_for_simcse.csv; §4.3)
    dev: str = None  # scored pairs (TSV) or senteval.tar; they choose the best (default: STS-B dev)

    stage: Literal["distill", "finetune", "both"] = None  # (default: both; --train alone: distill)
    kernel: Literal["rbf", "imq", "linear"] = "rbf"  # of HSIC; paper §3.2
    gamma: positive_float = 0.5  # of the kernel; paper §4.3 (the code: 1, stage 2: 0.1)
    beta1: in_range(float, 0) = 1.0  # weight of HSIC, stage 1; paper §4.3 (the code: 0.2)
    beta2: in_range(float, 0) = 0.5  # weight of HSIC, stage 2; paper §4.3 (the code: 1)
    keep_mapping: bool = False  # W stays: the student uses the teacher's space
    dim: positive_int = None  # dimension of S' (default: no projection; paper §3.4)
    batch_negatives: bool = False  # stage 2: hard negatives of the whole batch, as in the code
    epochs: positive_int = 10  # stage 1; Table 1
    batch_size: in_range(int, 2) = 256  # stage 1; Table 1
    lr: positive_float = 1e-4  # stage 1; Table 1
    temperature: positive_float = 0.1  # stage 1; Table 1 (the code: 1)
    finetune_epochs: positive_int = 3  # stage 2; Table 1
    finetune_batch_size: in_range(int, 2) = 256  # stage 2; Table 1 (the code: 128)
    finetune_lr: positive_float = 3e-5  # stage 2; Table 1 (the code: 1e-6)
    finetune_temperature: positive_float = 0.05  # stage 2; Table 1

    output: str = "runs/ibkd"  # folder for everything
    max_steps: positive_int = 10**9  # at most, in each stage
    max_length: in_range(int, 3) = 128  # tokens of a training text, as in the authors' code
    eval_steps: positive_int = 500  # steps between dev scores (the code: 2,000, stage 2: 125)
    seed: in_range(int, 0) = 0  # of batches, W and dropout; a continued run repeats them
    group_by_length: bool = False  # batches of texts of similar length
    device: Device = None  # (default: cuda if there is one)
    precision: Precision = None  # of training (default: bf16 on a GPU that has it, else fp32)


def distill(student, texts, targets, dev_score, run, args):
    """Stage 1, eq. 8: minimize L = L_nce(S, T) + beta_1 HSIC(X, S).

    Eq. 8 prints -(L_nce - beta_1 HSIC), with eq. 3's L_nce, a bound to maximize. Section 3.1 ends
    with the opposite sign, a loss to minimize, which is info_nce(). targets [n, D_T]: T of n texts.
    The teacher is not in this loop: it is frozen, and its embeddings are computed beforehand.
    dev_score(encoder) -> the number that chooses the best student.
    """
    lengths = token_lengths(args, student, texts)
    batches = Batches(len(texts), args.batch_size, args.seed, lengths)
    total = min(args.epochs * batches.per_epoch, args.max_steps)
    autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16")

    torch.manual_seed(args.seed)  # W starts at random
    embed_both = partial(embed, with_input=True, num_dense=len(student.heads))  # X and S, without W
    mapping = add_mapping(student, targets.shape[1], args.keep_mapping)
    model = nn.ModuleList([student, mapping]).to(args.device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)

    state = [model, optimizer]
    start, _ = run.begin(total, state)  # from the last checkpoint, if there is one
    for step in range(start, total + 1):  # `step` steps are finished
        run.checkpoint(step, state)

        # Now and then, before the first step and after the last: score the student, keep the best.
        if step % args.eval_steps == 0 or step == total:
            if run.is_best(step, dev_score(student)):
                save_encoder(student, run.folder)
            if step == total:
                return

        # One step.
        rows = batches[step]  # row numbers [N]
        batch = [texts[row] for row in rows]
        torch.manual_seed(args.seed * 1_000_003 + step)
        lr = args.lr * (total - step) / total
        optimizer.param_groups[0]["lr"] = lr
        with autocast:
            both = embed_texts(embed_both, student, batch, args.max_length)
        x, s = both[:, : student.width], both[:, student.width :]  # [N, H], [N, D]
        target = torch.from_numpy(targets[rows]).to(args.device)  # T [N, D_T], read from disk
        contrast = info_nce(mapping(s), target, args.temperature)
        gram_x = gram_matrix(x, args.kernel, args.gamma)  # K_X [N, N]
        gram_s = gram_matrix(s, args.kernel, args.gamma)  # K_S [N, N]
        dependence = hsic(gram_x, gram_s)  # eq. 6
        loss = contrast + args.beta1 * dependence  # eq. 8
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.log(step + 1, loss=loss, info_nce=contrast, hsic=dependence, lr=lr)


def finetune(student, texts, examples, dev_score, run, args):
    """Stage 2, eq. 9: minimize L = L_nce^sup(S') + beta_2 HSIC(X, S).

    Eq. 9 prints -(L_nce^sup - beta_2 HSIC), and eq. 10 its L_nce^sup without a minus, which is the
    same loss. X and S are those of all texts of a batch, as in the authors' code. examples
    [n, 2 + K]: positions in texts of an anchor, its positive and its K hard negatives. The student
    at the start is scored, too, and kept if no step improves on it. A positive that two anchors of
    a batch share is a negative of both.
    """
    lengths = token_lengths(args, student, [texts[number] for number in examples[:, 0]])
    batches = Batches(len(examples), args.finetune_batch_size, args.seed, lengths)
    total = min(args.finetune_epochs * batches.per_epoch, args.max_steps)
    autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16")

    torch.manual_seed(args.seed)  # W_proj starts at random
    embed_both = partial(embed, with_input=True, num_dense=len(student.heads))  # X and S
    mapping = add_mapping(student, args.dim, keep=True)  # embed() now returns S'
    student.to(args.device).train()
    optimizer = torch.optim.Adam(student.parameters(), lr=args.finetune_lr, fused=True)

    state = [student, optimizer]
    start, _ = run.begin(total, state)
    for step in range(start, total + 1):  # `step` steps are finished
        run.checkpoint(step, state)

        # Now and then, before the first step and after the last: score the student, keep the best.
        if step % args.eval_steps == 0 or step == total:
            if run.is_best(step, dev_score(student)):
                save_encoder(student, run.folder)
            if step == total:
                return

        # One step.
        numbers = examples[batches[step]]  # of an anchor, its positive, K hard negatives [N, 2 + K]
        batch = [texts[number] for number in numbers.ravel()]
        torch.manual_seed(args.seed * 1_000_003 + step)
        lr = args.finetune_lr * (total - step) / total
        optimizer.param_groups[0]["lr"] = lr
        with autocast:
            both = embed_texts(embed_both, student, batch, args.max_length)
        x, s = both[:, : student.width], both[:, student.width :]  # [N (2 + K), H or D]
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
        run.log(step + 1, loss=loss, info_nce=contrast, hsic=dependence, lr=lr)


# ---- Command line --------------------------------------------------------------------------------


def main():
    args = read_options(Options, __doc__)
    args.stage = args.stage or ("distill" if args.train and not args.triplets else "both")
    args.train = args.train or "nli_for_simcse.csv"
    args.triplets = args.triplets or "nli_for_simcse.csv"
    stages = ["distill", "finetune"] if args.stage == "both" else [args.stage]
    dev_pairs = read_dev(args.dev)
    dev_score = partial(spearman, embed, pairs=dev_pairs)  # of an encoder
    sentences = read_sentences(resolve_data(args.train)) if "distill" in stages else []
    triplets = read_triplets(resolve_data(args.triplets)) if "finetune" in stages else []
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
                student = load_untrained_student(args)
                run.scores["student before"] = {"dev": dev_score(student)}
            if stage == "distill":
                distill(student, sentences, targets, dev_score, run, args)
            else:
                texts = [text for triplet in triplets for text in triplet]
                examples = np.arange(len(texts)).reshape(-1, 3)
                finetune(student, texts, examples, dev_score, run, args)
            best = load_encoder(run.folder, device=args.device)
            run.finish(f"best of {stage}", {"dev": dev_score(best)})
        previous = run
    print(table(run.scores))


if __name__ == "__main__":
    run_main(main)
