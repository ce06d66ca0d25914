"""The baselines that three papers compare their methods with: PKD, L2, Dual-L2, SKD, CRD and HPD.

DistilCSE (arXiv:2112.05638) compares with PKD, ConGen (Findings of EMNLP 2022) with L2, Dual-L2 and
SKD, IBKD (arXiv:2311.05472) with CRD and HPD; KD, or MSE, is ckd.py --objective kd. All bring the
student's embedding of a sentence close to the frozen teacher's. PKD also compares layers; Dual-L2
and SKD give the student a second view of the sentence; CRD contrasts it with the other sentences of
the batch; HPD reduces the dimension. A paper trains its baselines as it trains its own method.

    sentence --> teacher (frozen) --> h^T --> principal components (HPD) --+
        |                 +--> layers, pooled (PKD) -----------------------+--> loss
        +-----> student --> h^S --> projection M (PKD), W (CRD) -----------+
        |           +--> layers, pooled --> projection (PKD) --------------+
        +-> second view --> student (Dual-L2, SKD) ------------------------+

Departures that change results (others: patient_loss, crd_loss, principal_components):
  - PKD is the mean over the batch without clipping, as KD is in DistilCSE's code, which has no PKD;
    eq. 2 has the sum, whose gradient norm is far above 1. MetaKD, for labeled domains, is left out.
  - Without --pairs, a second view is the sentence without a tenth of its words, as in congen.py.
  - As in ConGen and in HPD's code, the student of L2, Dual-L2, SKD and HPD ends in linear + tanh.
  - A student cut to --student-layers has no dropout; a batch has sentences of similar length.
Stage 2 of DistilCSE or IBKD: ckd.py or ibkd.py --stage finetune --student OUTPUT.

  python -m extras.baselines --method pkd --student bert-base-uncased       as in DistilCSE
  python -m extras.baselines --method skd --demo                            two minutes on a CPU
"""

import math
from collections import namedtuple
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import ckd
import common
import congen

# ---- Losses and model ----------------------------------------------------------------------------


def patient_loss(student, teacher):
    """DistilCSE, section 4.1: L_PT = 1/(N H) sum_i sum_l |s_il / |s_il| - t_il / |t_il||^2

    of PKD (Sun et al. 2019, arXiv:1908.09355), which adds it to eq. 2. student, teacher [N, k, H]:
    all layers but the last, pooled and projected. Returns a scalar >= 0. DistilCSE does not state
    how: here as the last one is pooled (Sun et al.: at [CLS]), with 1/H so that both terms balance.
    """
    errors = F.normalize(student, dim=-1) - F.normalize(teacher, dim=-1)
    return errors.square().mean(dim=-1).sum(dim=1).mean()


def l2_loss(student, teacher):
    """ConGen, section 4.2: L2 = 1/N sum_i |z_i^S / |z_i^S| - z_i^T / |z_i^T||^2

    Section 3.1 defines z as L2-normalized. student, teacher [N, D]. Returns a scalar from 0 to 4.
    """
    errors = F.normalize(student, dim=-1) - F.normalize(teacher, dim=-1)
    return errors.square().sum(dim=1).mean()


def dual_l2_loss(control, generalize, reference):
    """ConGen, section 4.2: Dual-L2 = L2(z_con^S, z_ref^T) + L2(z_gen^S, z_ref^T)

    control, generalize [N, D]: the student's embeddings of the first and the second view;
    reference [N, D]: the teacher's of the first. Returns a scalar from 0 to 8.
    """
    return l2_loss(control, reference) + l2_loss(generalize, reference)


def skd_loss(control, generalize, reference):
    """ConGen, section 4.2: SKD = Dual-L2 + L2(z_con^S, z_gen^S), a scalar from 0 to 12."""
    return dual_l2_loss(control, generalize, reference) + l2_loss(control, generalize)


def crd_loss(student, teacher, temperature):
    """CRD (Tian et al., arXiv:1910.10699): -log p(s_i, t_i) - sum_{j != i} log(1 - p(s_i, t_j))

    with p(s, t) = e(s, t) / (e(s, t) + N - 1) and e(s, t) = exp(cos(s, t) / tau). student [N, D],
    projected by W; teacher [N, D]; temperature tau > 0. Returns the mean over i, a scalar >= 0.
    Departures (IBKD does not describe its CRD): the N - 1 negatives are those of the batch, where
    CRD draws N of all M training examples and has N / M in p; one direction, where CRD's code sums
    two, the other with -log p(t_i, s_i) and so on; no linear layer after the teacher; e is not
    divided by a constant; tau is 0.1, that of IBKD's own loss, as IBKD states none for CRD, whose
    code has 0.07.
    """
    similarity = F.normalize(student, dim=-1) @ F.normalize(teacher, dim=-1).T  # [N, N]
    negatives = max(1, len(student) - 1)  # the last batch of an epoch may have a single sentence
    logits = similarity / temperature - math.log(negatives)
    positives = torch.eye(len(logits)).to(logits)
    losses = F.binary_cross_entropy_with_logits(logits, positives, reduction="none")
    return losses.sum(dim=1).mean()


def principal_components(embeddings, dimension, seed=0):
    """P of HPD (Zhao et al. 2022, arXiv:2203.07687): the student learns t_i P, where |t_i| = 1.

    embeddings: the teacher's of n sentences, array [n, D]. Returns P, tensor [D, dimension]: the
    orthonormal directions of most variance of the L2-normalized embeddings of 40,000 sentences.
    As in HPD's code, where SimCSE's encode() normalizes by default and gives both what PCA sees and
    what P maps, the targets are normalized too, and PCA's mean is not subtracted from them.
    """
    rows = np.random.default_rng(seed).permutation(len(embeddings))[:40_000]
    sample = np.asarray(embeddings[np.sort(rows)])
    sample = sample / np.linalg.norm(sample, axis=1, keepdims=True)
    eigenvectors = np.linalg.eigh(np.cov(sample, rowvar=False)).eigenvectors  # by rising variance
    return torch.from_numpy(eigenvectors[:, ::-1][:, :dimension].astype(np.float32))


def embed(encoder, input_ids, attention_mask, layers=(), normalize=True):
    """Token ids and mask, [N, L] each -> embeddings [N, D] in float32.

    encoder: as in ckd.embed. The same for teacher and student, in training and scoring. layers: the
    numbers of k layers, whose pooled states [N, k H] then follow the embedding; 0: the input
    embeddings. normalize=False leaves out the L2 normalization that the encoder may end in.
    """
    output = encoder.model(input_ids, attention_mask, output_hidden_states=len(layers) > 0)
    chosen = [output.last_hidden_state, *[output.hidden_states[layer] for layer in layers]]
    states = torch.stack(chosen)  # [1 + k, N, L, H]
    if encoder.pooling == "cls":
        pooled = states[:, :, 0]
    elif encoder.pooling == "lasttoken":
        last = attention_mask.cumsum(dim=1).argmax(dim=1)  # of the tokens that are not padding
        pooled = states[:, torch.arange(len(last), device=states.device), last]
    else:
        mask = attention_mask.unsqueeze(-1)  # [N, L, 1]
        pooled = (states * mask).sum(dim=2) / mask.sum(dim=1)  # [1 + k, N, H]
    embedding = encoder.heads(pooled[0]).float()  # [N, D]
    if encoder.normalize and normalize:
        embedding = F.normalize(embedding, dim=-1)
    return torch.cat([embedding, *pooled[1:].float()], dim=1)


# ---- Training ------------------------------------------------------------------------------------

# How a paper trains its own method, and here the baselines that it compares with.
Paper = namedtuple("Paper", "teacher train epochs batch_size max_length eval_steps patience")
SUPERVISED = "princeton-nlp/sup-simcse-roberta-large"
UNSUPERVISED = "princeton-nlp/unsup-simcse-roberta-large"
DISTILCSE = Paper(SUPERVISED, "ffgcc/NEWS5M", 20, 512, 64, 125, 3)
CONGEN = Paper(UNSUPERVISED, "nli_for_simcse.csv", 20, 128, 128, 512, 7)
IBKD = Paper(SUPERVISED, "nli_for_simcse.csv", 10, 256, 128, 500, 0)
PAPERS = dict(pkd=DISTILCSE, l2=CONGEN, skd=CONGEN, crd=IBKD, hpd=IBKD) | {"dual-l2": CONGEN}
OPTIMIZERS = {
    DISTILCSE: partial(torch.optim.Adam, betas=(0.9, 0.98), fused=True),
    CONGEN: partial(torch.optim.AdamW, eps=1e-6, weight_decay=0.01, fused=True),
    IBKD: partial(torch.optim.Adam, fused=True),
}
SCHEDULES = {  # functions of step, steps of an epoch, all steps -> share of the peak learning rate
    DISTILCSE: ckd.warmup_cosine,
    CONGEN: lambda step, _, total: congen.warmup_linear(step, total),
    IBKD: lambda step, _, total: (total + 1 - step) / total,
}
MAX_NORMS = {DISTILCSE: math.inf, CONGEN: 1.0, IBKD: 1.0}  # of all gradients together
PEAKS = {  # functions of millions of parameters of the student -> peak learning rate
    DISTILCSE: lambda size: 2e-4 if size > 80 else 3e-4,  # section 4.2
    CONGEN: lambda size: min(congen.TABLE_7.values(), key=lambda row: abs(row.millions - size)).lr,
    IBKD: lambda size: 1e-4,  # Table 1
}


def embed_rows(encoder, tokens, rows, layers, args):
    """Embeddings of a batch by all processes, [N, D_S + k H_S], as the loss needs them."""
    batch = tokens.batch(common.own_rows(rows), args.device)
    normalize = args.method in ("pkd", "crd")  # not for HPD, whose targets are shorter than 1
    with torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16"):
        local = embed(encoder, *batch, layers, normalize)
    return common.gather(local, len(rows))


def embed_second(encoder, views, rows, step, args):
    """Embeddings of the second views of a batch by all processes, [N, D_S]."""
    texts = views.second_of(rows, [args.seed, step])
    tokens = common.Tokens(encoder, texts, args.max_length)
    return embed_rows(encoder, tokens, np.arange(len(rows)), [], args)


def distill(student, views, targets, layers, components, dev_pairs, run, args):
    """views of n sentences; targets [n, D_T + k H_T], k > 0 for PKD's `layers`; components: P.

    Returns the best step and the last.
    """
    paper = PAPERS[args.method]
    encoder = student.encoder
    tokens = common.Tokens(encoder, views.first, args.max_length)
    epoch_steps = math.ceil(len(targets) / args.batch_size)
    total = min(args.epochs * epoch_steps, args.max_steps or math.inf)
    parameters = list(student.parameters())
    optimizer = OPTIMIZERS[paper](parameters, lr=args.lr)
    student.train()
    best, best_step, step = run.resume("distill", total, [student], optimizer)
    order = partial(common.batches, tokens.lengths, args.batch_size, args.seed, args.shuffle)
    for rows in order(skip=step):
        if step % args.eval_steps == 0 or step == total:  # also before the first step
            dev = ckd.dev_score(encoder, dev_pairs)
            if dev > best:
                best, best_step = dev, step
                common.save_encoder(encoder, args.output)
            run.checkpoint(best, best_step, step, [student], optimizer)
            run.log_dev(step, dev)
            stalled = step - best_step >= args.patience * epoch_steps > 0
            if step == total or stalled:
                break
        step += 1
        torch.manual_seed(common.step_seed(args.seed, step))  # of dropout
        lr = args.lr * SCHEDULES[paper](step, epoch_steps, total)
        optimizer.param_groups[0]["lr"] = lr
        outputs = embed_rows(encoder, tokens, rows, layers, args)
        embedding, pooled = outputs.tensor_split([encoder.dimension], dim=1)
        projected = student.projection(embedding)  # h^S M, S W [N, D_T]; otherwise the same
        target = common.to_device(targets[rows], args.device)
        match args.method:
            case "pkd":
                pooled = student.layer_projection(pooled.unflatten(1, (len(layers), -1)))
                target, theirs = target.tensor_split([projected.shape[1]], dim=1)
                theirs = theirs.unflatten(1, (len(layers), -1))  # [N, k, H_T]
                loss = ckd.mse_loss(projected, target) + patient_loss(pooled, theirs)
            case "l2":
                loss = l2_loss(projected, target)
            case "dual-l2":
                generalize = embed_second(encoder, views, rows, step, args)
                loss = dual_l2_loss(projected, generalize, target)
            case "skd":
                generalize = embed_second(encoder, views, rows, step, args)
                loss = skd_loss(projected, generalize, target)
            case "crd":
                loss = crd_loss(projected, target, args.temperature)
            case "hpd":
                loss = ckd.mse_loss(projected, F.normalize(target, dim=1) @ components)
        optimizer.zero_grad()
        loss.backward()
        common.average_gradients(parameters)
        nn.utils.clip_grad_norm_(parameters, MAX_NORMS[paper])
        optimizer.step()
        run.log(step, len(rows), loss=loss, lr=lr)
    return best_step, step


# ---- Command line --------------------------------------------------------------------------------


def parse_args():
    first = common.ArgumentParser(__doc__, add_help=False)
    first.add_argument("--method", choices=PAPERS, default="pkd")
    paper = PAPERS[first.parse_known_args()[0].method]
    parser = common.ArgumentParser(__doc__)
    parser.add_model_options(paper.teacher, "the paper's")
    parser.add_data_options(paper.train)
    add = parser.add_argument_group("method (default: the paper's)").add_argument
    shown = "with --help: show the defaults of its paper (else PKD's)"
    add("--method", choices=PAPERS, required=True, help=shown)
    pairs = "both views of each sentence (TSV of two columns), instead of --train"
    add("--pairs", help=f"{pairs} (default: words are deleted; ConGen, Table 6)")
    starts = "l2, dual-l2, skd, hpd: how the linear layer of the head starts (default: %(default)s)"
    add("--head", choices=("random", "identity"), default="random", help=starts)
    tau = "crd: tau (default: %(default)s; IBKD states none for CRD, CRD's code has 0.07)"
    add("--temperature", type=common.number(float, 1e-9), default=0.1, help=tau)
    dimension = "hpd: dimension of the student (default: %(default)s; IBKD, Table 2)"
    add("--dimension", type=common.number(int, 1), default=128, help=dimension)
    is_default = "(default: %(default)s)"
    add("--epochs", type=common.number(int, 1), default=paper.epochs, help=is_default)
    add("--batch-size", type=common.number(int, 1), default=paper.batch_size, help=is_default)
    peak = "peak learning rate (default: of the paper's student nearest in size)"
    add("--lr", type=common.number(float, 1e-9), help=peak)
    parser.add_run_options("runs/baselines", paper.max_length, paper.eval_steps, paper.patience)
    return parser.parse(congen.DEMO | dict(lr=4e-4))


def check_settings(args, encoder, teacher, sentences):
    """Raises UserError where the method is not possible."""
    most = min(teacher.dimension, sentences - 1)
    if args.method == "hpd" and args.dimension > most:
        found = f"--dimension {args.dimension}: only {most} principal components exist"
        raise common.UserError(f"{found}; give at most so many")
    if args.method == "crd" and min(sentences, args.batch_size) < 2:
        raise common.UserError("CRD needs at least two sentences in a batch; see --batch-size")
    if args.method == "pkd" and encoder.model.config.num_hidden_layers < 2:
        raise common.UserError("PKD leaves out the last layer; give a student of at least two")


def build_student(encoder, teacher, args):
    """-> a module with the encoder and what the method needs, for PKD a projection of layers."""
    torch.manual_seed(args.seed)  # head and projections start at random
    student = nn.Module()
    student.encoder = encoder
    student.projection = nn.Identity()
    if args.method == "pkd":  # M, and the same for the layers, where dimensions differ
        source, target = [part.model.config.hidden_size for part in (encoder, teacher)]
        student.layer_projection = nn.Identity()
        if encoder.dimension != teacher.dimension:
            student.projection = nn.Linear(encoder.dimension, teacher.dimension)
        if source != target:
            student.layer_projection = nn.Linear(source, target)
    elif args.method == "crd":  # W, at first the identity where dimensions agree
        student.projection = nn.Linear(encoder.dimension, teacher.dimension, bias=False)
        if encoder.dimension == teacher.dimension:
            nn.init.eye_(student.projection.weight)
    else:  # section 4.1 of ConGen; HPD's code
        dimension = args.dimension if args.method == "hpd" else teacher.dimension
        congen.add_head(encoder, dimension, args.head)
    return student.to(args.device)


def run_distill(encoder, teacher, views, sets, run, args):
    """Distillation from data to scores. The cache has 4 (D_T + k H_T) bytes for each sentence: with
    PKD, RoBERTa-large and a student of 12 layers, 49 GB for a million."""
    depth, teacher_depth = [part.model.config.num_hidden_layers for part in (encoder, teacher)]
    layers = range(1, depth) if args.method == "pkd" else []  # all but the last one
    theirs = [layer * teacher_depth // depth for layer in layers]
    teach = partial(common.teacher_embeddings, partial(embed, layers=theirs), teacher)
    what = f"layers {theirs}" if theirs else ""
    targets = teach(views.first, args.max_length, args.precision, what)
    components = None
    if args.method == "hpd":
        components = principal_components(targets, args.dimension, args.seed).to(args.device)
    student = build_student(encoder, teacher, args)
    steps = distill(student, views, targets, layers, components, sets["dev"], run, args)
    best = congen.load_best(args)
    run.finish(*steps, {"best student": common.spearman(ckd.embed, best, sets)})


def main():
    args = parse_args()
    sets = common.evaluation_sets(args)
    paper = PAPERS[args.method]
    encoder = common.load_student(args, "pooler" if paper is DISTILCSE else "mean")
    uncut = encoder.uncut_parameters
    millions = sum(value.numel() for value in encoder.parameters()) / 1e6
    args.lr = args.lr or PEAKS[paper](millions)
    views = congen.read_views(args)
    teacher = common.load_encoder(args.teacher, args.teacher_pooling, device=args.device)
    teacher.eval()
    check_settings(args, encoder, teacher, len(views.first))

    run = common.Run(args, teacher=teacher, student=encoder, dev=sets["dev"], train=views)
    if not run.scores:
        run.scores["teacher"] = common.spearman(embed, teacher, sets, common.teacher_embeddings)
        run.scores["student before"] = common.spearman(ckd.embed, encoder, sets)
    if "distill" not in run.finished:
        run_distill(encoder, teacher, views, sets, run, args)
    text = f"Distilled by `extras/baselines.py`, method {args.method}."
    common.write_card(run, args, congen.load_best(args), uncut, text)


if __name__ == "__main__":
    common.run_main(main)
