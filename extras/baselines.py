"""The baselines that three papers compare with: PKD, MetaKD, L2, Dual-L2, SKD, MSE, CRD and HPD.

DistilCSE (arXiv:2112.05638) compares with PKD and MetaKD, ConGen (Findings of EMNLP 2022) with L2,
Dual-L2 and SKD, IBKD (arXiv:2311.05472) with MSE, CRD and HPD; KD is ckd.py --objective kd. All
bring the student's embedding of a sentence close to the frozen teacher's. PKD and MetaKD compare
layers, too; MetaKD weights sentences by their domain; Dual-L2 and SKD give the student a second
view; CRD contrasts a sentence with the others of the batch; HPD reduces the dimension. Each is
trained with the settings of the paper that compares with it; ConGen and IBKD state none for their
baselines. With --beir, texts and dev score are those of ibkd.py --task dr.

    sentence --> teacher (frozen) --> h^T --> principal components (HPD) --+
        |                 |            +----> domains, weights (MetaKD) ---+
        |                 +--> layers, pooled (PKD, MetaKD) ---------------+--> loss
        +-----> student --> h^S --> projection M (PKD, MetaKD), W (CRD) ---+
        |           +--> layers, pooled --> projection (PKD, MetaKD) ------+
        +-> second view --> student (Dual-L2, SKD) ------------------------+

Departures that change results (others: patient_loss, metakd_loss, crd_loss, principal_components):
  - PKD is the mean over the batch without clipping, as KD is in DistilCSE's code, which has no PKD;
    eq. 2 has the sum, whose gradient norm is far above 1. MetaKD is trained likewise.
  - Without --pairs, a second view is the sentence without a tenth of its words, as in congen.py.
  - As in ConGen and in HPD's code, the student of L2, Dual-L2, SKD and HPD ends in linear + tanh.
  - A student cut to --student-layers trains without dropout.
Stage 2 of DistilCSE or IBKD: ckd.py or ibkd.py --stage finetune --student OUTPUT.

  python -m extras.baselines --method pkd --student bert-base-uncased       as in DistilCSE
  python -m extras.baselines --method skd --demo                            two minutes on a CPU
"""

import inspect
import math
import sys
from collections import namedtuple
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from scipy.cluster.vq import kmeans2, vq
from torch import nn

import ckd
import congen
import ibkd
from common import CACHE, ArgumentParser, UserError, note, number, parse, run_main
from common import CHUNK, cut, read_rows, read_sentences, read_text_pairs, split_columns
from common import Run, Tokens, average_gradients, batches, gather, own_rows, step_seed, to_device
from common import add_data_options, add_model_options, add_run_options, evaluation_sets
from common import load_encoder, load_student, save_encoder, spearman, teacher_embeddings
from common import write_card

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
    """MetaKD (Pan et al. 2020, arXiv:2012.01266), as far as it applies to embeddings:

    L = 1/N sum_i lambda_i (1/D |h_i^S M - h_i^T|^2 + sum_l 1/H |s_il W - t_il|^2)

    student h^S M, teacher h^T [N, D]; student_layers s W, teacher_layers t [N, k, H]: the input
    embeddings and all layers, pooled; M and W where dimensions differ; weights lambda [N]. Returns
    a scalar >= 0. Left out: attention maps (of another size where the tokenizer is another), the
    representation that hides the domain (the teacher is not trained here), labels. Pan et al.
    compare states token by token, and their code fits the layers first, then the unweighted output.
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
    for rows in cut(np.arange(len(embeddings)), CHUNK):
        scores = (unit(embeddings[rows]) * prototypes[numbers[rows]]).sum(axis=1)
        weights.append((1 + scores) / 2)
    return np.concatenate(weights)


def cluster(embeddings, count, seed=0):
    """Domains where none are stated: k-means of L2-normalized embeddings [n, D] -> array [n]."""
    centers = kmeans2(unit_sample(embeddings, seed), count, minit="++", seed=seed)[0]
    parts = cut(np.arange(len(embeddings)), CHUNK)
    return np.concatenate([vq(unit(embeddings[rows]), centers)[0] for rows in parts])


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
    Departures (IBKD does not describe its CRD): the N - 1 negatives are those of the batch, where
    CRD draws N of all M training examples and has N / M in p; one direction, where CRD's code sums
    two; no linear layer after the teacher; e is not divided by a constant; tau is 0.1, that of
    IBKD's own loss, where CRD's code has 0.07.
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
Paper = namedtuple("Paper", "teacher train epochs batch_size max_length eval_steps patience lr")
NEWS_5M, NLI = "ffgcc/NEWS5M", "nli_for_simcse.csv"
DISTILCSE = Paper("princeton-nlp/sup-simcse-roberta-large", NEWS_5M, 20, 512, 64, 125, 3, 2e-4)
CONGEN = Paper("princeton-nlp/unsup-simcse-roberta-large", NLI, 20, 128, 128, 512, 7, 5e-5)
IBKD = Paper("princeton-nlp/sup-simcse-roberta-large", NLI, 10, 256, 128, 500, 0, 1e-4)
PAPERS = dict(pkd=DISTILCSE, metakd=DISTILCSE, l2=CONGEN, skd=CONGEN, crd=IBKD, hpd=IBKD)
PAPERS |= dict(mse=IBKD)
PAPERS["dual-l2"] = CONGEN
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
ONE_VIEW = dict(l2=l2_loss, mse=ckd.mse_loss)
TWO_VIEWS = {"dual-l2": dual_l2_loss, "skd": skd_loss}


def embed_rows(encoder, tokens, rows, layers, args):
    """Embeddings of a batch by all processes, [N, D_S + k H_S], as the loss needs them."""
    batch = tokens.batch(own_rows(rows), args.device)
    normalize = args.method in ("pkd", "metakd", "crd")  # not for HPD, whose targets are shorter
    with torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16"):
        local = embed(encoder, *batch, layers, normalize)
    return gather(local, len(rows))


def distill(student, first, second, targets, layers, fixed, dev_score, run, args):
    """Train on n sentences -> the best step and the last.

    first, second: as in congen.distill; targets [n, D_T + k H_T], k > 0 if the method compares
    `layers`; fixed: what it needs besides, of HPD the matrix P, of MetaKD the weights [n].
    """
    paper = PAPERS[args.method]
    encoder = student.encoder
    tokens = Tokens(encoder, first, args.max_length)
    epoch_steps = math.ceil(len(targets) / args.batch_size)
    total = min(args.epochs * epoch_steps, args.max_steps or math.inf)
    patience_steps = args.patience * epoch_steps or math.inf  # 0: never end early
    parameters = list(student.parameters())
    optimizer = OPTIMIZERS[paper](parameters, lr=args.lr)
    student.train()

    # An interrupted run goes on from its last checkpoint, a new one from these values.
    state = [student, optimizer]
    step, best, best_step = run.begin("distill", total, state, (0, -math.inf, 0))
    if step == 0:  # the student before training is the first candidate
        best = dev_score(encoder)
        save_encoder(encoder, args.output)
        run.log_dev(0, best)

    order = batches(tokens.lengths, args.batch_size, args.seed, args.group_by_length, step, total)
    for step, rows in order:  # row numbers [N]
        torch.manual_seed(step_seed(args.seed, step))  # of dropout
        lr = args.lr * SCHEDULES[paper](step, epoch_steps, total)
        optimizer.param_groups[0]["lr"] = lr

        outputs = embed_rows(encoder, tokens, rows, layers, args)
        embedding, pooled = split(outputs, encoder.dimension, layers)
        projected = student.projection(embedding)  # h^S M, S W [N, D_T]; otherwise the same
        target = to_device(targets[rows], args.device)
        target, theirs = split(target, student.teacher_dimension, layers)
        pooled = student.layer_projection(pooled)  # [N, k, H_T], as theirs
        match args.method:
            case "pkd":
                loss = ckd.mse_loss(projected, target) + patient_loss(pooled, theirs)
            case "metakd":
                weights = to_device(fixed[rows], args.device)
                loss = metakd_loss(projected, target, pooled, theirs, weights)
            case "l2" | "mse":
                loss = ONE_VIEW[args.method](projected, target)
            case "dual-l2" | "skd":
                texts = congen.second_views(first, second, rows, [args.seed, step])
                views = Tokens(encoder, texts, args.max_length)
                generalize = embed_rows(encoder, views, np.arange(len(rows)), [], args)
                loss = TWO_VIEWS[args.method](projected, generalize, target)
            case "crd":
                loss = crd_loss(projected, target, args.temperature)
            case "hpd":
                loss = ckd.mse_loss(projected, F.normalize(target, dim=1) @ fixed)

        optimizer.zero_grad()
        loss.backward()
        average_gradients(parameters)  # now those of one process with the whole batch
        nn.utils.clip_grad_norm_(parameters, MAX_NORMS[paper])
        optimizer.step()
        run.log(step, len(rows), loss=loss, lr=lr)

        # Once in a while, and at the end: score the student, and keep the best.
        if step % args.eval_steps == 0 or step == total:
            dev = dev_score(encoder)
            if dev > best:
                best, best_step = dev, step
                save_encoder(encoder, args.output)
            run.log_dev(step, dev)
            if step - best_step >= patience_steps:
                break
            run.checkpoint(state, (step, best, best_step))
    return best_step, step


def split(outputs, dimension, layers):
    """[N, D + k H] -> [N, D], [N, k, H]; the second is None without layers."""
    embedding, pooled = outputs.tensor_split([dimension], dim=1)
    return embedding, pooled.unflatten(1, (len(layers), -1)) if layers else None


# ---- Command line --------------------------------------------------------------------------------


def parse_args():
    first = ArgumentParser(__doc__)
    first.add_argument("--method", choices=PAPERS, default="pkd")
    options = [option for option in sys.argv[1:] if option not in ("-h", "--help")]
    paper = PAPERS[first.parse_known_args(options)[0].method]
    parser = ArgumentParser(__doc__)
    add_model_options(parser, paper.teacher, "pooler" if paper is DISTILCSE else "mean")
    add_data_options(parser, paper.train)
    add = parser.add_argument_group("method (default: the paper's)").add_argument
    default = "(default: %(default)s"
    shown = "with --help: show the defaults of its paper (else PKD's)"
    add("--method", choices=PAPERS, required=True, help=shown)
    add("--pairs", help="TSV with both views of each sentence, instead of --train")
    beir = "BEIR folder or data set: its passages and training queries, instead of --train"
    add("--beir", help=f"{beir}; MRR@10 on its dev queries chooses the student")
    add("--test-split", default="test", help="of --beir: qrels/TEST_SPLIT.tsv (default: test)")
    parser.set_defaults(dev_queries=2000, query_prompt=None)
    parser.set_defaults(passage_prompt=None, similarity="cosine", teacher_similarity="cosine")
    add("--labeled", help="metakd: TSV with a sentence and its domain, instead of --train")
    clusters = f"metakd without --labeled: clusters of sentences {default}, as MNLI has genres)"
    add("--domains", type=number(int, 2), default=5, help=clusters)
    starts = f"l2, dual-l2, skd, hpd: how the linear layer of the head starts {default})"
    add("--head", choices=("random", "identity"), default="random", help=starts)
    tau = f"crd: tau {default}; IBKD states none for CRD, CRD's code has 0.07)"
    add("--temperature", type=number(float, 1e-9), default=0.1, help=tau)
    dimension = f"hpd: dimension of the student {default}; IBKD, Table 2)"
    add("--dimension", type=number(int, 1), default=128, help=dimension)
    add("--epochs", type=number(int, 1), default=paper.epochs, help=f"{default})")
    add("--batch-size", type=number(int, 2), default=paper.batch_size, help=f"{default})")
    peak = (
        f"peak rate (default: {paper.lr:g}{'; 3e-4 up to 80M parameters' * (paper is DISTILCSE)})"
    )
    add("--lr", type=number(float, 1e-9), help=peak)
    text = f"end after this many epochs without a better dev score; 0: never {default})"
    add("--patience", type=number(int, 0), default=paper.patience, help=text)
    add_run_options(parser, "runs/baselines", paper.max_length, paper.eval_steps)
    return parse(parser, congen.DEMO | dict(lr=4e-4))


class Sts:
    """Dev and test sets of semantic textual similarity, with the methods of ibkd.Retrieval."""

    def __init__(self, args):
        self.sets = evaluation_sets(args)
        self.read = self.sets.values()

    def dev_score(self, encoder):
        return spearman(ckd.embed, encoder, {"dev": self.sets["dev"]})["dev"]

    def scores(self, encoder):
        return spearman(ckd.embed, encoder, self.sets)


def read_data(args):
    """-> n sentences; their second views, or None; their domains, or None. Raises UserError."""
    if args.pairs:
        return *map(list, zip(*read_text_pairs(args.pairs))), None
    if args.labeled:
        form = "each line has two tab-separated columns, a sentence and its domain"
        rows = list(read_rows(args.labeled, partial(split_columns, positions=(0, 1)), form))
        return [text for text, _ in rows], None, [domain for _, domain in rows]
    return read_sentences(args.train), None, None


def check(args, encoder, teacher, n, domains):
    """Raises UserError where the method is not possible with n sentences."""
    most = min(teacher.dimension, n - 1)
    if args.method == "hpd" and args.dimension > most:
        raise UserError(f"--dimension {args.dimension}: only {most} principal components exist")
    if args.method == "metakd" and (len(set(domains)) if domains else n // args.domains) < 2:
        raise UserError("MetaKD needs two domains; see --labeled, or give fewer --domains")
    if args.method == "pkd" and encoder.model.config.num_hidden_layers < 2:
        raise UserError("PKD leaves out the last layer; give a student of at least two")


def build_student(encoder, teacher, args):
    """-> a module with the encoder and what the method needs, e.g. a projection of layers."""
    torch.manual_seed(args.seed)  # head and projections start at random
    student = nn.Module()
    student.encoder = encoder
    student.teacher_dimension = teacher.dimension
    student.projection = nn.Identity()
    student.layer_projection = nn.Identity()
    if args.method in ("pkd", "metakd"):  # M, and the same for layers, where dimensions differ
        if encoder.dimension != teacher.dimension:
            student.projection = nn.Linear(encoder.dimension, teacher.dimension)
        if encoder.width != teacher.width:
            student.layer_projection = nn.Linear(encoder.width, teacher.width)
    elif args.method in ("crd", "mse"):  # W, at first the identity where dimensions agree
        student.projection = nn.Linear(encoder.dimension, teacher.dimension, bias=False)
        if encoder.dimension == teacher.dimension:
            nn.init.eye_(student.projection.weight)
    else:  # section 4.1 of ConGen; HPD's code
        dimension = args.dimension if args.method == "hpd" else teacher.dimension
        congen.add_head(encoder, dimension, args.head)
    return student.to(args.device)


def matched_layers(encoder, teacher, method):
    """-> the student's layers that the method compares, and the teacher's at the same height."""
    depth, teacher_depth = [part.model.config.num_hidden_layers for part in (encoder, teacher)]
    # PKD: all but the last one; MetaKD: all, and the input embeddings, which have number 0.
    layers = dict(pkd=range(1, depth), metakd=range(depth + 1)).get(method, [])
    return layers, [layer * teacher_depth // depth for layer in layers]


def main():
    args = parse_args()
    files = [__file__, ckd.__file__, congen.__file__]
    if args.beir:
        task = ibkd.Retrieval(args)
        first, second, domains = task.passages + task.queries, None, None
    else:
        task = Sts(args)
        first, second, domains = read_data(args)
    run = Run(args, files, [*task.read, first, second or [], domains or []])
    if run.is_complete():
        return
    if not run.finished:
        paper = PAPERS[args.method]
        encoder = load_student(args, "pooler" if paper is DISTILCSE else "mean")
        millions = sum(value.numel() for value in encoder.parameters()) / 1e6  # rates: section 4.2
        args.lr = args.lr or (3e-4 if paper is DISTILCSE and millions <= 80 else paper.lr)
        teacher = load_encoder(args.teacher, args.teacher_pooling, device=args.device)
        check(args, encoder, teacher, len(first), domains)
        run.scores["teacher"] = task.scores(teacher)
        run.scores["student before"] = task.scores(encoder)
        layers, theirs = matched_layers(encoder, teacher, args.method)

        def embed_layers(encoder, input_ids, attention_mask):
            return embed(encoder, input_ids, attention_mask, theirs)

        size = teacher.dimension + len(theirs) * teacher.width
        if layers:
            gigabytes = 4 * size * len(first) / 1e9
            note(f"the teacher's embeddings and layers need {gigabytes:.2f} GB in {CACHE}")
        key = f"{inspect.getsource(embed)} layers {theirs}"  # embed_layers' source has neither
        options = (args.max_length, args.precision, key)
        teacher_texts = first
        if args.beir:  # with the prompts of each model, as they are scored
            first, teacher_texts = task.texts(encoder), task.texts(teacher)
        targets = teacher_embeddings(embed_layers, teacher, teacher_texts, *options)
        fixed = None
        if args.method == "hpd":
            fixed = principal_components(targets, args.dimension, args.seed).to(args.device)
        elif args.method == "metakd":
            vectors = targets[:, : teacher.dimension]
            domains = domains or cluster(vectors, args.domains, args.seed)
            fixed = expertise_weights(vectors, domains)
        student = build_student(encoder, teacher, args)
        del teacher  # from a GPU's memory
        data = (first, second, targets, layers, fixed, task.dev_score)
        steps = distill(student, *data, run, args)
        best = load_encoder(args.output, device=args.device)
        run.finish(*steps, {"best student": task.scores(best)})
    text = f"Distilled by `extras/baselines.py`, method {args.method}."
    write_card(run, args, load_encoder(args.output), text)


if __name__ == "__main__":
    run_main(main)
