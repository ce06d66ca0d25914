"""The baselines that three papers compare their methods with: KD, PKD, L2, Dual-L2, SKD, CRD, HPD.

DistilCSE (arXiv:2112.05638) compares with KD and PKD, ConGen (Findings of EMNLP 2022) with L2,
Dual-L2 and SKD, IBKD (EMNLP 2023) with MSE, which is KD, and with CRD and HPD. All of them bring
the student's embedding of a sentence close to the frozen teacher's. PKD also compares layers;
Dual-L2 and SKD give the student a second view of the sentence; CRD contrasts it with other
sentences; HPD reduces the dimension. A paper trains its own method and its baselines in one loop,
which is called its protocol here (--protocol, see PROTOCOLS).

    sentence --> teacher (frozen) --> h^T --> principal components (HPD) --+
        |                  +--> every (T/S)-th layer (PKD) ----------------+--> loss
        +-----> student --> head (ConGen) --> h^S --> projection M, W -----+
        |           +-----> its layers (PKD) ------------------------------+
        +-> second view --> student (Dual-L2, SKD) ------------------------+

What the papers leave open, and where this script differs from the original methods:
  - KD and PKD take the mean over the batch and do not clip the gradient, as the authors' code of
    DistilCSE. Eq. 2 prints a sum over the batch, whose gradient is far above a norm of 1 at 512
    sentences: --reduction sum --max-norm 1 clips nearly every step.
  - PKD pools its layers as the student pools its last one (Sun et al.: [CLS]), and takes a mean
    over H as eq. 2 does, so that its two terms weigh alike. It leaves out the last layer: with a
    student of one layer it is KD.
  - L2 is between L2-normalized embeddings, as section 3.1 of ConGen defines them.
  - CRD's negatives are those of the batch (in-batch negatives), not of a memory.
  - HPD's head, dense + tanh with a bias, stays in the student, and the teacher's mean is not
    subtracted, as in HPD's code. The principal components are those of 40,000 embeddings, as there.
    M and W are dropped after training.
  - PKD caches the teacher's layers: 49 GB for a million sentences of a RoBERTa-large and a student
    of 12 layers. The script says how much before it writes.
  - A student cut to --student-layers trains without dropout, which is better there (RESULTS.md),
    a whole one with its own, as in the paper. --dropout sets it.
  - Learning rates follow the size of the student: section 4.2 of DistilCSE, Table 7 of ConGen.
  - --align is none of the papers': KD on the teacher's embeddings, which principal components and a
    rotation bring into the student's space, without M. Several --teacher are distilled together.
  - Left out: MetaKD, which needs labeled data of several domains. ConGen's CKD is ckd.py.
Stage 2 of DistilCSE or IBKD is ckd.py or ibkd.py with --stage finetune --student OUTPUT.

  python baselines.py --method kd --student bert-base-uncased             as in DistilCSE
  python baselines.py --method kd --protocol ibkd --reduction mean --student MODEL    IBKD's MSE
  python baselines.py --method skd --demo                                 two minutes on a CPU
"""

import math
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

# --------------------------------------------------------------------------------------------------
# Losses
# --------------------------------------------------------------------------------------------------


def mse_loss(student, teacher, reduction="sum"):
    """Eq. 2: L_KD = sum_i 1/D sum_d (h_id^S - h_id^T)^2

    of DistilCSE; eq. 3 is the same with the projected student h_i^S M in the place of h_i^S.
    student, teacher [N, D]; reduction "sum" or "mean" over the batch. Returns a scalar >= 0.
    """
    errors = (student - teacher).square()
    return errors.mean() if reduction == "mean" else errors.mean(dim=1).sum()


def patient_loss(student, teacher, reduction="sum"):
    """Section 4.1: L_PT = sum_i sum_l 1/H sum_d (s_ild / |s_il| - t_ild / |t_il|)^2

    of DistilCSE's baseline PKD (Sun et al. 2019, arXiv:1908.09355), which adds it to eq. 2.
    student, teacher [N, S, H]: S layers of each, pooled and projected; reduction "sum" or "mean"
    over the batch. Returns a scalar >= 0.
    """
    errors = (F.normalize(student, dim=-1) - F.normalize(teacher, dim=-1)).square().mean(dim=-1)
    return errors.sum(dim=1).mean() if reduction == "mean" else errors.sum()


def l2_loss(student, teacher):
    """Section 4.2: L2 = 1/N sum_i |z_i^S / |z_i^S| - z_i^T / |z_i^T||^2

    of ConGen. student, teacher [N, D]. Returns a scalar from 0 to 4.
    """
    errors = (F.normalize(student, dim=-1) - F.normalize(teacher, dim=-1)).square()
    return errors.sum(dim=1).mean()


def dual_l2_loss(control, generalize, reference):
    """Section 4.2: Dual-L2 = L2(z_con^S, z_ref^T) + L2(z_gen^S, z_ref^T)

    of ConGen. control, generalize [N, D]: the student's embeddings of the first and second view;
    reference [N, D]: the teacher's of the first. Returns a scalar from 0 to 8.
    """
    return l2_loss(control, reference) + l2_loss(generalize, reference)


def skd_loss(control, generalize, reference):
    """Section 4.2: SKD = Dual-L2 + L2(z_con^S, z_gen^S)

    of ConGen (Limkonchotiwat et al. 2022). Arguments as of dual_l2_loss. A scalar from 0 to 12.
    """
    return dual_l2_loss(control, generalize, reference) + l2_loss(control, generalize)


def crd_loss(student, teacher, temperature):
    """Section 4.2: L_i = -log p(s_i, t_i) - sum_{j != i} log(1 - p(s_i, t_j))

    of IBKD's baseline CRD (Tian et al. 2019): p(s, t) = e(s, t) / (e(s, t) + N - 1), with
    e(s, t) = exp(cos(s, t) / tau), is the probability that s and t are of one sentence.
    student [N, D], projected; teacher [N, D]; temperature tau > 0. Returns the mean, a scalar >= 0.
    """
    similarity = F.normalize(student, dim=-1) @ F.normalize(teacher, dim=-1).T  # [N, N]
    negatives = max(1, len(student) - 1)  # a batch of one has none
    logits = similarity / temperature - math.log(negatives)
    positives = torch.eye(len(logits)).to(logits)
    losses = F.binary_cross_entropy_with_logits(logits, positives, reduction="none")
    return losses.sum(dim=1).mean()


# --------------------------------------------------------------------------------------------------
# Model
# --------------------------------------------------------------------------------------------------


def pool(token_states, attention_mask, pooling):
    """[N, L, H], [N, L] -> [N, H]: "cls", the state at [CLS], or "mean", over the real tokens."""
    if pooling == "cls":
        return token_states[:, 0]
    mask = attention_mask.unsqueeze(-1)  # [N, L, 1]
    return (token_states * mask).sum(dim=1) / mask.sum(dim=1)


def pool_layers(hidden_states, layers, attention_mask, pooling):
    """Pooled states of k layers, for PKD; layer 0 is the embedding layer -> [N, k, H]."""
    pooled = [pool(hidden_states[layer], attention_mask, pooling).float() for layer in layers]
    return torch.stack(pooled, dim=1)


def random_projection(source, target):
    """M of DistilCSE's eq. 3."""
    return nn.Linear(source, target)


def aligned_projection(alignment):
    """A projection without bias that starts as the transpose of A [D_T, D] (--align projection)."""
    linear = nn.Linear(alignment.shape[1], alignment.shape[0], bias=False)
    linear.weight.data.copy_(alignment)
    return linear


def identity_projection(source, target):
    """W of IBKD's section 3.1, without bias: the identity at first, where dimensions agree."""
    linear = nn.Linear(source, target, bias=False)
    if source == target:
        nn.init.eye_(linear.weight)
    return linear


def add_head(encoder, dimension, start):
    """The dense + tanh head of ConGen's section 4.1, which stays in the encoder.

    start: "random" or "identity". A last dense head of this dimension takes its place.
    """
    if len(encoder.heads) > 0 and encoder.dimension == dimension:
        return
    linear = nn.Linear(encoder.dimension, dimension)
    if start == "identity":
        nn.init.eye_(linear.weight)
        nn.init.zeros_(linear.bias)
    encoder.add_head(linear, nn.Tanh())


class Student(nn.Module):
    """An encoder, and the projections that only the loss needs (nn.Identity() for none).

    encoder: has `model`, a transformer; `pooling`, "cls" or "mean"; `heads`, dense layers behind
    it. normalize: L2-normalize the embeddings. patient_projection: of PKD's layers.
    """

    def __init__(self, encoder, normalize, projection, patient_projection):
        super().__init__()
        self.encoder = encoder
        self.normalize = normalize
        self.heads = encoder.heads[:]  # without the projection, also where the encoder keeps it
        self.projection = projection
        self.patient_projection = patient_projection

    def forward(self, input_ids, attention_mask):
        """[N, L], [N, L] -> h^S [N, D] in float32, and the token states of every layer."""
        output = self.encoder.model(input_ids, attention_mask, output_hidden_states=True)
        pooled = pool(output.last_hidden_state, attention_mask, self.encoder.pooling)  # [N, H]
        embedding = self.heads(pooled).float()  # [N, D]
        if self.normalize:
            embedding = F.normalize(embedding, dim=-1)
        return embedding, output.hidden_states


# --------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------

import numpy as np

from common import DataError, Tokens, table
from support import distributed
from support.alignment import align_by_sample
from support.cache import teacher_embeddings
from support.command_line import (
    DEMO,
    ArgumentParser,
    add_data_options,
    add_model_options,
    add_run_options,
    check_negatives,
    check_only_teacher,
    count,
    evaluation_sets,
    load_student,
    load_teachers,
    positive,
    reload_student,
    run_main,
    weight,
)
from support.run import Run, set_learning_rate
from support.teachers import ProjectedEmbeddings
from support.views import add_view_options, load_views

WARMUP = 10  # the learning rate rises for a tenth: of an epoch (DistilCSE), of all steps (ConGen)


def cosine_decay(peak, step):
    """DistilCSE's learning rate: a linear rise over a tenth of an epoch, then half a cosine."""
    warmup = max(1, step.epoch_steps // WARMUP)
    if step.number < warmup:
        return peak * (step.number / warmup)
    angle = math.pi * (step.number - warmup) / max(1, step.total - warmup)
    return peak * ((1 + math.cos(angle)) / 2)


def linear_rise_and_decay(peak, step):
    """ConGen's learning rate: a linear rise over a tenth of all steps, then a linear decay."""
    warmup = math.ceil(step.total / WARMUP)
    rise = step.number / warmup
    decay = (step.total + 1 - step.number) / (step.total + 1 - warmup)
    return peak * min(rise, decay)


def linear_decay(peak, step):
    """IBKD's learning rate: it decays from the peak, without a warm-up."""
    return peak * (step.total + 1 - step.number) / step.total


class Protocol(NamedTuple):
    """How a paper trains: three functions, and defaults of options."""

    optimizer: object  # optimizer(parameters, lr)
    learning_rate: object  # learning_rate(peak, step) -> that of the step
    projection: object  # projection(source dimension, target dimension) -> nn.Linear
    max_norm: float  # of the gradient, which is clipped; 0 for no clipping
    peaks: dict  # {millions of parameters of a student: its peak learning rate}
    defaults: dict


SUPERVISED_TEACHER = "princeton-nlp/sup-simcse-roberta-large"
UNSUPERVISED_TEACHER = "princeton-nlp/unsup-simcse-roberta-large"
PROTOCOLS = {
    "distilcse": Protocol(
        optimizer=partial(torch.optim.Adam, betas=(0.9, 0.98), fused=True),
        learning_rate=cosine_decay,
        projection=random_projection,
        max_norm=0,
        peaks={14: 3e-4, 52: 3e-4, 110: 2e-4},  # section 4.2
        defaults=dict(
            teacher=SUPERVISED_TEACHER,
            student_pooling="pooler",
            head="none",
            train="ffgcc/NEWS5M",
            epochs=20,
            batch_size=512,
            max_length=64,
            eval_steps=125,
            patience=3,
        ),
    ),
    "congen": Protocol(
        optimizer=partial(torch.optim.AdamW, eps=1e-6, weight_decay=0.01, fused=True),
        learning_rate=linear_rise_and_decay,
        projection=random_projection,
        max_norm=1.0,
        peaks={  # Table 7, with the sizes of Tables 1 and 3
            4: 5e-4,
            11: 3e-4,
            14: 1e-4,
            17: 5e-4,
            22: 3e-4,
            29: 3e-4,
            33: 5e-5,
            67: 5e-5,
            109: 5e-5,
            117: 3e-4,
            125: 5e-5,
            134: 3e-4,
        },
        defaults=dict(
            teacher=UNSUPERVISED_TEACHER,
            student_pooling="mean",
            head="random",
            train="nli_for_simcse.csv",
            epochs=20,
            batch_size=128,
            max_length=128,
            eval_steps=512,
            patience=7,
        ),
    ),
    "ibkd": Protocol(
        optimizer=partial(torch.optim.Adam, fused=True),
        learning_rate=linear_decay,
        projection=identity_projection,
        max_norm=1.0,
        peaks={14: 1e-4, 23: 1e-4},  # Table 1
        defaults=dict(
            teacher=SUPERVISED_TEACHER,
            student_pooling="mean",
            head="none",
            train="nli_for_simcse.csv",
            epochs=10,
            batch_size=256,
            max_length=128,
            eval_steps=500,
            patience=0,
        ),
    ),
}
PROTOCOL_OF_METHOD = {
    "kd": "distilcse",
    "pkd": "distilcse",
    "l2": "congen",
    "dual-l2": "congen",
    "skd": "congen",
    "crd": "ibkd",
    "hpd": "ibkd",
}
TWO_VIEWS = ("dual-l2", "skd")
# Training does not normalize the embeddings of these: their loss does, or HPD's target is shorter.
NOT_NORMALIZED = ("l2", "dual-l2", "skd", "hpd")
PROJECTED = ("crd",)  # methods that project also where dimensions agree
PCA_SAMPLE = 40_000  # teacher embeddings, as in HPD's code; all of MS MARCO would take 57 GB


def distill(student, sentences, views, targets, evaluation, run, args):
    """sentences: Tokens of n; views: their second views; targets: the teacher's side of each.

    A target is the teacher's embedding h^T or its principal components, [D], for PKD followed by
    the teacher's pooled layers, [k, H].
    """
    protocol = PROTOCOLS[args.protocol]
    encoder = student.encoder
    layers = patient_layers(encoder, args)
    optimizer = protocol.optimizer(student.parameters(), lr=args.lr)
    student.train()
    for step in run.steps(
        "distill",
        sentences.lengths,
        [student],
        optimizer,
        dev_score=partial(evaluation.dev_score, encoder),
        save=partial(encoder.save, run.folder),
        epochs=args.epochs,
        batch_size=args.batch_size,
        patience=args.patience,
    ):
        set_learning_rate(optimizer, protocol.learning_rate(args.lr, step))
        input_ids, attention_mask = sentences.batch(step.own_rows, run.device)  # [n, L]
        with run.autocast():
            embedding, hidden_states = student(input_ids, attention_mask)  # h^S [n, D_S]
            if args.method in TWO_VIEWS:
                generalize, _ = student(*second_view(views, step, encoder, args))
                generalize = step.gather(generalize)  # [N, D_S]
        embedding = step.gather(embedding)  # of all processes, [N, D_S]
        projected = student.projection(embedding)  # h^S M or S W [N, D]
        target = targets[step.rows]  # [N, D], for PKD [N, D + k H]
        teacher = target[:, : projected.shape[1]]
        match args.method:
            case "pkd" if layers:
                teacher_layers = target[:, projected.shape[1] :].unflatten(1, (len(layers), -1))
                pooled = pool_layers(hidden_states, layers, attention_mask, encoder.pooling)
                student_layers = student.patient_projection(step.gather(pooled))  # [N, k, H]
                loss = mse_loss(projected, teacher, args.reduction)
                loss = loss + patient_loss(student_layers, teacher_layers, args.reduction)
            case "kd" | "pkd":
                loss = mse_loss(projected, teacher, args.reduction)
            case "hpd":
                loss = mse_loss(projected, teacher, "mean")
            case "l2":
                loss = l2_loss(projected, teacher)
            case "dual-l2":
                loss = dual_l2_loss(projected, student.projection(generalize), teacher)
            case "skd":
                loss = skd_loss(projected, student.projection(generalize), teacher)
            case "crd":
                loss = crd_loss(projected, teacher, args.temperature)
        run.backward(loss, optimizer)
        if args.max_norm:
            nn.utils.clip_grad_norm_(student.parameters(), args.max_norm)
        run.step(optimizer)
        step.log(loss=loss)


def second_view(views, step, encoder, args):
    """input_ids, attention_mask [n, L] of the second views of a step's own rows."""
    texts = views.second(step.rows, [args.seed, step.number])[step.own]
    return Tokens(encoder, texts, args.max_length).batch(np.arange(len(texts)), args.device)


def patient_layers(encoder, args):
    """The layers of the student that PKD compares: all but the last one."""
    if args.method != "pkd":
        return []
    return list(range(1, encoder.model.config.num_hidden_layers))


def embed_with_layers(input_ids, attention_mask, teacher, layers):
    """[N, L], [N, L] -> [N, D + k H]: the teacher's embedding, behind it k of its layers."""
    output = teacher.model(input_ids, attention_mask, output_hidden_states=True)
    pooled = pool_layers(output.hidden_states, layers, attention_mask, teacher.pooling)
    return torch.cat([teacher(input_ids, attention_mask), pooled.flatten(1)], dim=1)


def make_targets(teachers, encoder, sentences, args):
    """The student's target for every sentence: rows of teacher embeddings, or of what a method
    makes of them."""
    tokenize = partial(Tokens, sentences=sentences, max_length=args.max_length)
    layers = teacher_layers(teachers.first, encoder, args)
    if layers:
        return embeddings_with_layers(teachers.first, tokenize(teachers.first), layers, args)
    targets = teachers.embeddings(tokenize, args.device)
    if args.method == "hpd":
        directions = principal_components(targets, args.dimension, args.seed)
        return ProjectedEmbeddings(targets, directions)
    if args.align == "targets":
        alignment = align_by_sample(targets, encoder, sentences, args.seed)
        return ProjectedEmbeddings(targets, alignment.matrix, alignment.length)
    return targets


def teacher_layers(teacher, encoder, args):
    """The layers of the teacher that PKD's student is compared with, layer by layer."""
    depth = encoder.model.config.num_hidden_layers
    teacher_depth = teacher.model.config.num_hidden_layers
    return [layer * teacher_depth // depth for layer in patient_layers(encoder, args)]


def embeddings_with_layers(teacher, tokens, layers, args):
    """What embed_with_layers() says of every sentence -> TeacherEmbeddings."""
    numbers = teacher.dimension + len(layers) * teacher.model.config.hidden_size
    gigabytes = len(tokens) * numbers * np.dtype(args.teacher_dtype).itemsize / 1e9
    distributed.note(f"teacher embeddings and layers: {gigabytes:.2f} GB in the cache")
    encode_batch = partial(embed_with_layers, teacher=teacher, layers=layers)
    what = f"layers {layers}"
    return teacher_embeddings(teacher, tokens, args.device, encode_batch, what, args.teacher_dtype)


def principal_components(vectors, dimension, seed=0):
    """Section 4.2: t_i^HPD = t_i P, what the student of HPD is to say

    of IBKD's baseline HPD (Zhao et al. 2022). The loss is mse_loss, with a mean over the batch.
    vectors: n teacher embeddings [n, D] -> P, array [D, dimension]: the directions along which a
    sample of PCA_SAMPLE vectors varies most, L2-normalized and orthogonal, by falling variance. The
    mean decides the directions and is not subtracted from t_i, as in the authors' code.
    """
    rows = np.random.default_rng(seed).permutation(len(vectors))[:PCA_SAMPLE]
    sample = np.asarray(vectors[np.sort(rows)])
    eigenvectors = np.linalg.eigh(np.cov(sample, rowvar=False)).eigenvectors  # by rising variance
    return eigenvectors[:, ::-1][:, :dimension].astype(np.float32)


def make_projection(encoder, targets, dimension, sentences, args):
    """The projection of the student's embeddings to the teacher's dimension, or none."""
    if args.align in ("projection", "fixed"):
        alignment = align_by_sample(targets, encoder, sentences, args.seed)
        projection = aligned_projection(torch.from_numpy(alignment.matrix))
        return projection.requires_grad_(args.align == "projection")
    is_projected = isinstance(targets, ProjectedEmbeddings)
    keeps_m = args.keep_projection and not is_projected  # otherwise it keeps A of the targets
    wanted = args.projection or keeps_m or args.method in PROJECTED
    if wanted or encoder.dimension != dimension:
        if keeps_m:
            return nn.Linear(encoder.dimension, dimension, bias=False)
        return PROTOCOLS[args.protocol].projection(encoder.dimension, dimension)
    return nn.Identity()


def build_student(encoder, teachers, targets, sentences, args):
    """Add to the encoder what the protocol and the method ask for -> Student."""
    dimension = targets.dimension if args.align == "targets" else teachers.dimension
    if args.method == "hpd":
        dimension = args.dimension
    torch.manual_seed(args.seed)  # heads and projections start at random
    head = "random" if args.method == "hpd" else args.head
    if head != "none":
        add_head(encoder, dimension, head)
    projection = make_projection(encoder, targets, dimension, sentences, args)
    patient_projection = nn.Identity()
    hidden = encoder.model.config.hidden_size
    teacher_hidden = teachers.first.model.config.hidden_size
    if args.method == "pkd" and hidden != teacher_hidden:
        patient_projection = nn.Linear(hidden, teacher_hidden)
    normalize = encoder.normalize and args.method not in NOT_NORMALIZED
    student = Student(encoder, normalize, projection, patient_projection)
    if args.keep_projection:
        keep_projection(encoder, projection, targets)
    return student.to(args.device)


def keep_projection(encoder, projection, targets):
    """The encoder answers in the teacher's space, through a last dense head."""
    if isinstance(targets, ProjectedEmbeddings):  # the student learns t A, and t is nearly t A A^T
        projection = aligned_projection(targets.matrix)
        projection.requires_grad_(False)
    encoder.add_head(projection, nn.Identity())


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------


def chosen_protocol():
    """The name of the protocol that --method and --protocol say; the first where they do not."""
    parser = ArgumentParser("", add_help=False)
    parser.add_argument("--method")
    parser.add_argument("--protocol")
    chosen, _ = parser.parse_known_args()
    if chosen.protocol in PROTOCOLS:
        return chosen.protocol
    return PROTOCOL_OF_METHOD.get(chosen.method, next(iter(PROTOCOLS)))


def parse_args():
    protocol = chosen_protocol()
    defaults = PROTOCOLS[protocol].defaults
    parser = ArgumentParser(
        "Baselines of DistilCSE, ConGen and IBKD. Defaults are those of the --protocol, "
        f"{protocol} here; --method METHOD --help shows those of another method."
    )
    add_model_options(parser, defaults["teacher"], defaults["student_pooling"])
    add_data_options(parser, defaults["train"])
    add_view_options(parser)
    group = parser.add_argument_group("method (tables and sections of its paper in brackets)")
    add = group.add_argument
    add("--method", choices=PROTOCOL_OF_METHOD, required=True, help="the loss")
    add(
        "--protocol",
        choices=PROTOCOLS,
        default=protocol,
        help="the paper whose optimizer, schedule and defaults are used; by the method",
    )
    add(
        "--head",
        choices=("none", "random", "identity"),
        default=defaults["head"],
        help="ConGen's dense + tanh (4.1), which stays, and how it starts; %(default)s",
    )
    add("--projection", action="store_true", help="M or W also where dimensions are equal")
    add(
        "--align",
        nargs="?",
        choices=("targets", "projection", "fixed"),
        const="targets",
        help="kd: bring the teacher's embeddings into the student's space by principal components "
        "and a rotation, without M; projection: start M there; fixed: and leave it there; see "
        "support/alignment.py",
    )
    add(
        "--keep-projection",
        action="store_true",
        help="the student answers in the teacher's space, through M as a last dense head",
    )
    add(
        "--reduction",
        choices=("sum", "mean"),
        default="mean",
        help="of kd and pkd over the batch: eq. 2 has the sum, the authors' code the mean",
    )
    add(
        "--max-norm",
        type=weight,
        help="clip the gradient to this norm, 0: no; by the protocol: 0 for distilcse, else 1",
    )
    add("--dimension", type=count, default=128, help="of an embedding, for hpd; %(default)s")
    add("--temperature", type=positive, default=0.1, help="tau of crd; %(default)s (Table 1)")
    add("--epochs", type=count, default=defaults["epochs"], help="by the protocol; %(default)s")
    add(
        "--batch-size",
        type=count,
        default=defaults["batch_size"],
        help="by the protocol; %(default)s",
    )
    add("--lr", type=positive, help="peak learning rate; the paper's for a student of this size")
    add_run_options(
        parser,
        "runs/baselines",
        max_length=defaults["max_length"],
        eval_steps=defaults["eval_steps"],
        patience=defaults["patience"],
    )
    args = parser.parse(
        demo_defaults=dict(
            **DEMO,
            output="runs/baselines-demo",
            epochs=1,
            batch_size=64,
            lr=4e-4,
            eval_steps=50,
        )
    )
    if args.max_norm is None:
        args.max_norm = PROTOCOLS[args.protocol].max_norm
    return args


def choose_learning_rate(args, encoder):
    """Without --lr, that of the student in the paper that is nearest in size."""
    if args.lr is not None:
        return
    peaks = PROTOCOLS[args.protocol].peaks
    millions = sum(value.numel() for value in encoder.parameters()) / 1e6
    nearest = min(peaks, key=lambda size: abs(size - millions))
    args.lr = peaks[nearest]


def check_settings(teachers, sentences, args):
    """Raises DataError for options that make no sense together."""
    if args.method == "crd":
        check_negatives(sentences, args.batch_size)
    if args.method == "pkd":
        check_only_teacher(args, "PKD compares the layers of one")
    if args.method == "hpd":
        check_dimension(teachers, sentences, args)
    if args.align:
        check_alignment(args)


def check_dimension(teachers, sentences, args):
    """Raises DataError if so many principal components cannot be."""
    if args.dimension > teachers.dimension:
        expected = f"at most the teacher's, {teachers.dimension}"
        raise DataError(f"--dimension {args.dimension}: expected {expected}")
    if args.dimension > sentences:
        expected = f"at most {sentences}, the number of sentences"
        raise DataError(f"--dimension {args.dimension}: expected {expected}")
    if sentences < 2:
        raise DataError("one sentence to train on, expected 2 or more, which can differ")


def check_alignment(args):
    """Raises DataError for options that contradict --align."""
    if args.method != "kd":
        raise DataError(f"--align: expected --method kd, not {args.method}")
    if args.align == "targets" and args.projection:
        raise DataError("--projection: expected without --align, whose targets need none")
    if args.align == "targets" and args.head != "none":
        raise DataError(f"--align: expected --head none, not {args.head}, as it needs no head")


def main():
    args = parse_args()
    run = Run(args)
    evaluation = evaluation_sets(args)
    encoder = load_student(args, PROTOCOLS[args.protocol].defaults["student_pooling"])
    choose_learning_rate(args, encoder)
    views = load_views(args)
    teachers = load_teachers(args)
    check_settings(teachers, len(views.sentences), args)

    run.start()
    if run.is_new():
        run.scores.update(teachers.scores(evaluation))
        run.scores["student before"] = evaluation.scores(encoder, "student before")
    if not run.finished("distill"):
        targets = make_targets(teachers, encoder, views.sentences, args)
        student = build_student(encoder, teachers, targets, views.sentences, args)
        tokens = Tokens(encoder, views.sentences, args.max_length)
        distill(student, tokens, views, targets, evaluation, run, args)
        title = "student after"
        run.finish("distill", {title: evaluation.scores(reload_student(run.folder, args), title)})
    run.write_card(
        f"Distilled by `baselines.py`, method: {args.method}, protocol: {args.protocol}.",
        student=args.student or args.teacher,
        teachers=[args.teacher, *args.other_teachers],
    )
    print(table(run.scores))


if __name__ == "__main__":
    run_main(main)
