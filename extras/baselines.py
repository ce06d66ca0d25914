# SPDX-License-Identifier: MIT
"""The baselines that three papers compare with: PKD, MetaKD, L2, Dual-L2, SKD, MSE, CRD and HPD.

DistilCSE (arXiv:2112.05638) compares with PKD and MetaKD, ConGen (Findings of EMNLP 2022) with L2,
Dual-L2 and SKD, IBKD (arXiv:2311.05472) with MSE, CRD and HPD; KD is ckd.py --objective kd. All
bring the student's embedding of a sentence close to the frozen teacher's. PKD and MetaKD compare
layers, too; MetaKD weights sentences by their domain; Dual-L2 and SKD give the student a second
view; CRD contrasts a sentence with the others of the batch; HPD reduces the dimension. Each is
trained with the settings of the paper that compares with it; ConGen and IBKD state none for their
baselines. With --beir, texts and dev score are those of extras.ibkd_dr.

    sentence --> teacher (frozen) --> h^T --> principal components (HPD) --+
        |                 |            +----> domains, weights (MetaKD) ---+
        |                 +--> layers, pooled (PKD, MetaKD) ---------------+--> loss
        +-----> student --> h^S --> projection M (PKD, MetaKD), W (CRD) ---+
        |           +--> layers, pooled --> projection (PKD, MetaKD) ------+
        +-> second view --> student (Dual-L2, SKD) ------------------------+

Departures that change results (docs/baselines.md has those of MetaKD, CRD and HPD):
  - PKD is the mean over the batch without clipping, as KD is in DistilCSE's code, which has no PKD;
    eq. 2 has the sum, whose gradient norm is far above 1. MetaKD is trained likewise.
  - Without --pairs, a second view is the sentence without a tenth of its words, as in congen.py.
  - As in ConGen and in HPD's code, the student of L2, Dual-L2, SKD and HPD ends in linear + tanh.
  - A student cut to --student-layers trains without dropout.
Stage 2 of DistilCSE or IBKD: ckd.py or ibkd.py --stage finetune --student OUTPUT.

  python -m extras.baselines --method pkd --student bert-base-uncased       as in DistilCSE
  python -m extras.baselines --method skd @demo/baselines.txt               two minutes on a CPU
"""

import math
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from scipy.cluster.vq import kmeans2, vq
from torch import nn

import ckd
import congen
from common import CACHE, UserError, chunks, note
from common import Batches, embed_texts, spearman, teacher_embeddings, token_lengths
from common import read_dev, read_lines, read_sentences, resolve_data
from common import load_encoder, load_untrained_student, save_encoder
from common import Device, Pooling, Precision, in_range, positive_float, positive_int
from common import Run, read_options, run_main, run_settings, table
from extras.ibkd_dr import Retrieval

CHUNK = 100_000  # embeddings in memory
DISTILCSE, CONGEN, IBKD = ("pkd", "metakd"), ("l2", "dual-l2", "skd"), ("mse", "crd", "hpd")
PAPERS = {  # that compare with these methods: their defaults
    DISTILCSE: dict(epochs=20, batch_size=512, max_length=64, eval_steps=125, patience=3),
    CONGEN: dict(epochs=20, batch_size=128, max_length=128, eval_steps=512, patience=7, lr=5e-5),
    IBKD: dict(epochs=10, batch_size=256, max_length=128, eval_steps=500, patience=0, lr=1e-4),
}


class Options:
    method: Literal[DISTILCSE + CONGEN + IBKD] = None  # by paper: of DistilCSE; of ConGen; of IBKD
    teacher: str = None  # folder or Hub name (by paper: SimCSE's, sup; unsup; sup)
    teacher_pooling: Pooling = None  # (default: its folder's, else mean)
    student: str = None  # folder or Hub name (default: the teacher, cut to --student-layers)
    student_layers: str = None  # keep only these layers, counted from 0, as in 1,3,5
    pooling: Pooling = None  # of the student (default: the teacher's if cut, its folder's, paper's)
    dropout: in_range(float, 0, 0.99) = None  # of the student (default: its folder's; 0 if cut)

    train: str = None  # sentences, or a .csv of triplets (by paper: News-5m; NLI; NLI)
    pairs: str = None  # instead: TSV of both views of each sentence
    labeled: str = None  # metakd, instead: TSV of a sentence and its domain
    beir: str = None  # instead: BEIR folder or data set; MRR@10 on its dev queries is the dev score
    dev: str = None  # scored pairs (TSV) that choose the best student (default: STS-B dev)

    domains: in_range(int, 2) = 5  # metakd without --labeled: clusters of sentences
    head: Literal["random", "identity"] = "random"  # l2, dual-l2, skd, hpd: its initial weights
    temperature: positive_float = 0.1  # crd: tau; IBKD states none for CRD, CRD's code has 0.07
    dimension: positive_int = 128  # hpd: of the student; Table 2 of IBKD
    epochs: positive_int = None  # (by paper: 20; 20; 10)
    batch_size: in_range(int, 2) = None  # (by paper: 512; 128; 256)
    lr: positive_float = None  # (by paper: 2e-4, up to 80M parameters 3e-4; 5e-5; 1e-4)
    patience: in_range(int, 0) = None  # epochs without a better score; 0: any (by paper: 3; 7; 0)

    output: str = "runs/baselines"  # folder for everything
    max_steps: positive_int = 10**9  # at most
    max_length: in_range(int, 3) = None  # tokens of a training text (by paper: 64; 128; 128)
    eval_steps: positive_int = None  # steps between dev scores (by paper: 125; 512; 500)
    seed: in_range(int, 0) = 0  # of batches, new layers, dropout, which a continued run repeats
    group_by_length: bool = False  # batches of texts of similar length
    device: Device = None  # (default: cuda if there is one)
    precision: Precision = None  # of training (default: bf16 on a GPU that has it, else fp32)


# ---- Losses and model ----------------------------------------------------------------------------


def patient_loss(student, teacher):
    """DistilCSE, section 4.1: L_PT = 1/(N H) sum_i sum_l |s_il / |s_il| - t_il / |t_il||^2

    of PKD (Sun et al. 2019, arXiv:1908.09355), which adds it to eq. 2. student, teacher [N, k, H]:
    all layers but the last, pooled and projected. Returns a scalar >= 0. DistilCSE does not state
    how: here as the last one is pooled (Sun et al.: at [CLS]), with 1/H so that both terms balance.
    """
    errors = F.normalize(student, dim=-1) - F.normalize(teacher, dim=-1)
    return errors.square().mean(dim=-1).sum(dim=1).mean()


def metakd_loss(student, teacher, student_layers, teacher_layers, weights):
    """MetaKD: L = 1/N sum_i lambda_i (1/D |h_i^S M - h_i^T|^2 + sum_l 1/H |s_il W - t_il|^2)

    (Pan et al. 2020, arXiv:2012.01266, as far as it applies to embeddings.) student h^S M, teacher
    h^T [N, D]; student_layers s W, teacher_layers t [N, k, H]: the input embeddings and all layers,
    pooled; M and W where dimensions differ; weights lambda [N]. Returns a scalar >= 0. Pan et al.'s
    code compares states token by token, and fits the layers first, then the unweighted output.
    """
    output = (student - teacher).square().mean(dim=1)  # [N]
    layers = (student_layers - teacher_layers).square().mean(dim=2).sum(dim=1)  # [N]
    return (weights * (output + layers)).mean()


def expertise_weights(embeddings, domains):
    """MetaKD's weights: lambda_i = (1 + t_i) / (1 + exp((p_i - 1)^2)) = (1 + t_i) / 2

    p_i, the probability that the teacher gives to the right label, is 1 here: its own embedding is
    what is right. t_i = (cos(h_i, c_d) + cos(h_i, o_d)) / 2, the prototype score of a sentence of
    domain d, is high if it resembles both the mean embedding c_d of its domain and o_d, the mean of
    the others' c. embeddings h [n, D]: the teacher's; domains: n labels, at least two different
    ones. Returns array [n], from 0 to 1.
    """
    numbers = np.unique(domains, return_inverse=True)[1]  # [n], from 0
    kinds = range(numbers.max() + 1)
    centers = np.stack([embeddings[numbers == d].mean(axis=0) for d in kinds])  # c [K, D]
    others = (centers.sum(axis=0) - centers) / (len(centers) - 1)  # o [K, D]
    prototypes = (unit(centers) + unit(others)) / 2
    weights = []
    for rows in chunks(np.arange(len(embeddings)), CHUNK):
        resemblance = (unit(embeddings[rows]) * prototypes[numbers[rows]]).sum(axis=1)  # t
        weights.append((1 + resemblance) / 2)
    return np.concatenate(weights)


def cluster(embeddings, count, seed=0):
    """Domains where none are given: k-means of L2-normalized embeddings [n, D] -> array [n]."""
    centers = kmeans2(unit_sample(embeddings, seed), count, minit="++", seed=seed)[0]
    numbers = chunks(np.arange(len(embeddings)), CHUNK)  # of rows
    return np.concatenate([vq(unit(embeddings[rows]), centers)[0] for rows in numbers])


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def unit_sample(embeddings, seed):
    """40,000 random embeddings, or all, L2-normalized."""
    rows = np.random.default_rng(seed).permutation(len(embeddings))[:40_000]
    return unit(np.asarray(embeddings[np.sort(rows)]))


def l2_loss(student, teacher):
    """ConGen, section 4.2: L2 = 1/N sum_i |z_i^S / |z_i^S| - z_i^T / |z_i^T||^2

    The paper gives no formula: square and mean are ours. Section 3.1 defines z as L2-normalized.
    student, teacher [N, D]. Returns a scalar from 0 to 4.
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
    The N - 1 negatives are those of the batch, where CRD draws N of all M training examples and has
    N / M in p. One direction, where CRD's code sums two; no linear layer after the teacher.
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
    sample = unit_sample(embeddings, seed)
    eigenvectors = np.linalg.eigh(np.cov(sample, rowvar=False)).eigenvectors  # by rising variance
    return torch.from_numpy(eigenvectors[:, ::-1][:, :dimension].astype(np.float32))


def embed(encoder, input_ids, attention_mask, normalize=True):
    """Token ids and mask, [N, L] each -> embeddings [N, D] in float32.

    encoder: as in ckd.embed; the same for teacher and student, in training and scoring. If it has
    `layers`, such as "1 2", the pooled states [N, k H] of these k layers follow the embedding; 0:
    the input embeddings. normalize=False leaves out the encoder's own L2 normalization.
    """
    output = encoder.model(input_ids, attention_mask=attention_mask, output_hidden_states=True)
    numbers = map(int, getattr(encoder, "layers", "").split())
    layers = [output.hidden_states[number] for number in numbers]
    states = torch.stack([output.last_hidden_state, *layers])  # [1 + k, N, L, H]
    if encoder.pooling == "cls":
        pooled = states[:, :, 0]
    elif encoder.pooling == "lasttoken":
        last = attention_mask.sum(dim=1) - 1  # [N], since padding is on the right
        pooled = states[:, torch.arange(len(last), device=states.device), last]
    else:
        mask = attention_mask.unsqueeze(-1)  # [N, L, 1]
        pooled = (states * mask).sum(dim=2) / mask.sum(dim=1)  # [1 + k, N, H]
    embedding = encoder.heads(pooled[0]).float()  # [N, D]
    if encoder.normalize and normalize:
        embedding = F.normalize(embedding, dim=-1)
    return torch.cat([embedding, *pooled[1:].float()], dim=1)


# ---- Training. Each method is trained as the paper which compares with it trains its own ---------


def make_optimizer(parameters, args):
    if args.method in CONGEN:
        return congen.make_optimizer(parameters, args.lr)
    betas = (0.9, 0.98) if args.method in DISTILCSE else (0.9, 0.999)
    return torch.optim.Adam(parameters, lr=args.lr, betas=betas, fused=True)


def schedule(method, step, epoch_steps, total):
    """Factor of the learning rate after `step` steps."""
    if method in DISTILCSE:
        return ckd.warmup_cosine(step, epoch_steps, total)
    if method in CONGEN:
        return congen.warmup_linear(step, total)
    return (total - step) / total


def other_views(first, second_views, rows, seed):
    """The second views of a batch, as in congen.py. first: its first views."""
    if second_views:
        return [second_views[row] for row in rows]
    return congen.delete_words(first, np.random.default_rng(seed))


def distill(model, first_views, second_views, targets, layer_targets, dev_score, run, args):
    """Train on n sentences. dev_score(encoder) -> the number that chooses the best student.

    model: of run_distill(); first_views: n sentences; second_views: n others, or None, and words of
    the first are deleted; targets [n, D_T], layer_targets [n, k, H_T]: the teacher's.
    """
    student = model.student
    lengths = token_lengths(args, student, first_views)
    batches = Batches(len(first_views), args.batch_size, args.seed, lengths)
    total = min(args.epochs * batches.per_epoch, args.max_steps)
    patience = args.patience * batches.per_epoch if args.patience else math.inf  # in steps
    autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16")
    # HPD's targets are shorter than 1, MSE's W ends in no norm; ConGen's baselines normalize.
    embed_student = partial(embed, normalize=args.method in ("pkd", "metakd", "crd"))

    parameters = list(model.parameters())
    optimizer = make_optimizer(parameters, args)
    max_norm = math.inf if args.method in DISTILCSE else 1.0  # of all gradients together
    model.train()

    state = [model, optimizer]
    start, _ = run.begin(total, state)  # from the last checkpoint, if there is one
    for step in range(start, total + 1):  # `step` steps are finished
        run.checkpoint(step, state)

        # Now and then, before the first step and after the last: score the student, keep the best.
        if step % args.eval_steps == 0 or step == total:
            if run.is_best(step, dev_score(student)):
                save_encoder(student, run.folder)
            if step == total or step - run.best_step >= patience:
                return

        # One step.
        rows = batches[step]  # row numbers [N]
        first = [first_views[row] for row in rows]
        torch.manual_seed(args.seed * 1_000_003 + step)
        lr = args.lr * schedule(args.method, step, batches.per_epoch, total)
        for group in optimizer.param_groups:
            group["lr"] = lr
        with autocast:
            output = embed_texts(embed_student, student, first, args.max_length)
        embedding, pooled = output.tensor_split([student.dimension], dim=1)  # [N, D], [N, k H]
        projected = model.projection(embedding)  # h^S M or W [N, D_T]; otherwise h^S
        layers = pooled.view(len(rows), layer_targets.shape[1], student.width)  # [N, k, H]
        layers = model.layer_projection(layers)  # [N, k, H_T]
        target = torch.from_numpy(targets[rows]).to(args.device)  # h^T [N, D_T], read from disk
        their_layers = torch.from_numpy(layer_targets[rows]).to(args.device)  # [N, k, H_T]
        if args.method == "pkd":
            loss = ckd.mse_loss(projected, target) + patient_loss(layers, their_layers)
        elif args.method == "metakd":
            weight = torch.from_numpy(model.weights[rows]).to(args.device)  # lambda [N]
            loss = metakd_loss(projected, target, layers, their_layers, weight)
        elif args.method == "l2":
            loss = l2_loss(projected, target)
        elif args.method == "mse":
            loss = ckd.mse_loss(projected, target)
        elif args.method == "crd":
            loss = crd_loss(projected, target, args.temperature)
        elif args.method == "hpd":
            loss = ckd.mse_loss(projected, F.normalize(target, dim=1) @ model.components)
        else:  # dual-l2 and skd have a second view of each sentence
            second = other_views(first, second_views, rows, [args.seed, step + 1])
            with autocast:
                generalize = embed_texts(embed_student, student, second, args.max_length)
            loss_of_views = skd_loss if args.method == "skd" else dual_l2_loss
            loss = loss_of_views(projected, generalize, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
        run.log(step + 1, loss=loss, lr=lr)


def build_model(student, teacher, args):
    """-> a module of all that is trained: the student, and the method's own layers."""
    torch.manual_seed(args.seed)  # head and projections start at random
    model = nn.Module()
    model.student, model.projection, model.layer_projection = student, nn.Identity(), nn.Identity()
    student.layers, teacher.layers = matched_layers(student, teacher, args.method)
    if args.method in DISTILCSE:  # M, and the same for layers, where dimensions differ
        if student.dimension != teacher.dimension:
            model.projection = nn.Linear(student.dimension, teacher.dimension)
        if student.width != teacher.width:
            model.layer_projection = nn.Linear(student.width, teacher.width)
    elif args.method in ("crd", "mse"):  # W, at first the identity where dimensions agree
        model.projection = nn.Linear(student.dimension, teacher.dimension, bias=False)
        if student.dimension == teacher.dimension:
            nn.init.eye_(model.projection.weight)
    elif args.method == "hpd":  # as in HPD's code
        congen.add_head(student, args.dimension, args.head)
    else:  # section 4.1 of ConGen
        congen.add_head(student, teacher.dimension, args.head)
    return model.to(args.device)


def matched_layers(student, teacher, method):
    """-> the student's layers that the method compares, and the teacher's at the same height."""
    depth, teacher_depth = [each.model.config.num_hidden_layers for each in (student, teacher)]
    layers = []
    if method == "pkd":
        layers = range(1, depth)  # all but the last one
    elif method == "metakd":
        layers = range(depth + 1)  # all, and the input embeddings, which have number 0
    theirs = [layer * teacher_depth // depth for layer in layers]
    return [" ".join(map(str, numbers)) for numbers in (layers, theirs)]  # see embed()


# ---- Command line --------------------------------------------------------------------------------


def choose_defaults(args):
    """Set what is not given as in the paper that compares with the method."""
    (paper,) = [paper for methods, paper in PAPERS.items() if args.method in methods]
    for name, value in paper.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    teacher = "unsup" if args.method in CONGEN else "sup"
    args.teacher = args.teacher or f"princeton-nlp/{teacher}-simcse-roberta-large"
    train = "news5m.en" if args.method in DISTILCSE else "nli_for_simcse.csv"
    args.train = args.train or train
    # What extras/ibkd_dr.py has options for:
    args.dev_queries, args.query_prompt, args.passage_prompt = 2000, None, None
    args.similarity = args.teacher_similarity = None


def read_data(args):
    """-> n sentences; their second views, or None; their domains, or None. Raises UserError."""
    if args.pairs:
        first_views, second_views = map(list, zip(*congen.read_text_pairs(args.pairs)))
        return first_views, second_views, None
    if args.labeled:

        def parse(line):
            sentence, domain = map(str.strip, line.split("\t"))
            if not (sentence and domain):
                raise ValueError("a column is empty")
            return sentence, domain

        form = "each line has two tab-separated columns, a sentence and its domain"
        sentences, domains = map(list, zip(*read_lines(args.labeled, parse, form)))
        return sentences, None, domains
    return read_sentences(resolve_data(args.train)), None, None


def check(args, student, teacher, n, domains):
    """Raises UserError where the method is not possible with n sentences."""
    most = min(teacher.dimension, n - 1)
    if args.method == "hpd" and args.dimension > most:
        raise UserError(f"--dimension {args.dimension}: only {most} principal components exist")
    count = len(set(domains)) if domains else n // args.domains
    if args.method == "metakd" and count < 2:
        raise UserError("MetaKD needs two domains; see --labeled, or give fewer --domains")
    if args.method == "pkd" and student.model.config.num_hidden_layers < 2:
        raise UserError("PKD leaves out the last layer; give a student of at least two")


def embed_teacher(teacher, texts, args):
    """The teacher's embeddings [n, D_T] and pooled layers [n, k, H_T] of n texts."""
    count = len(teacher.layers.split())
    if count:
        gigabytes = 4 * (teacher.dimension + count * teacher.width) * len(texts) / 1e9
        note(f"the teacher's embeddings and layers need {gigabytes:.2f} GB in {CACHE}")
    both = teacher_embeddings(embed, teacher, texts, args.max_length, args.precision)
    pooled = both[:, teacher.dimension :].reshape(len(texts), count, teacher.width)
    return both[:, : teacher.dimension], pooled  # views of the file


def run_distill(student, data, task, dev_score, run, args):
    """Train and score. data: of read_data(); task: Retrieval, or None."""
    first_views, second_views, domains = data
    teacher = load_encoder(args.teacher, args.teacher_pooling, device=args.device)
    check(args, student, teacher, len(first_views), domains)
    run.scores["teacher"] = {"dev": dev_score(teacher)}
    run.scores["student before"] = {"dev": dev_score(student)}
    teacher_texts = first_views
    if task:  # with the prompts of each model, as they are scored
        first_views, teacher_texts = task.texts(student), task.texts(teacher)
    model = build_model(student, teacher, args)
    targets, layer_targets = embed_teacher(teacher, teacher_texts, args)
    del teacher  # from a GPU's memory
    if args.method == "hpd":
        components = principal_components(targets, args.dimension, args.seed)
        model.register_buffer("components", components.to(args.device))  # P
    elif args.method == "metakd":
        domains = domains or cluster(targets, args.domains, args.seed)
        model.weights = expertise_weights(targets, domains)  # lambda [n]
    distill(model, first_views, second_views, targets, layer_targets, dev_score, run, args)
    best = load_encoder(run.folder, device=args.device)
    run.finish("best student", {"dev": dev_score(best)})


def main():
    args = read_options(Options, __doc__)
    if not args.method:
        raise UserError(f"give --method, one of {', '.join(DISTILCSE + CONGEN + IBKD)}")
    choose_defaults(args)
    task = Retrieval(args) if args.beir else None
    if task:
        dev_score, read = task.dev_score, task.read
        data = (task.passages + task.queries, None, None)
    else:
        dev_pairs = read_dev(args.dev)
        dev_score = partial(spearman, ckd.embed, pairs=dev_pairs)  # of an encoder
        data = read_data(args)
        read = [dev_pairs, *(texts or [] for texts in data)]
    student = load_untrained_student(args, "pooler" if args.method in DISTILCSE else "mean")
    millions = sum(value.numel() for value in student.parameters()) / 1e6
    args.lr = args.lr or (2e-4 if millions > 80 else 3e-4)  # DistilCSE, section 4.2
    settings = run_settings(args, [__file__, ckd.__file__, congen.__file__], read)
    run = Run(settings, args, "distill")
    if not run.is_finished:
        run_distill(student, data, task, dev_score, run, args)
    print(table(run.scores))


if __name__ == "__main__":
    run_main(main)
