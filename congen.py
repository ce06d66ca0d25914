# SPDX-License-Identifier: MIT
"""ConGen, unsupervised control and generalization distillation.

Limkonchotiwat, Ponwitayarat, Lowphansirikul, Udomcharoenchaikit, Chuangsuwanich, Nutanong: "ConGen:
Unsupervised Control and Generalization Distillation For Sentence Representation", Findings of
EMNLP 2022, aclanthology.org/2022.findings-emnlp.483.

Each sentence has two views; the second says the same in other words. The frozen teacher embeds the
first view only, the student embeds both. A similarity distribution is a softmax over the cosines of
an embedding with the teacher's embeddings in an instance queue. The student learns to reproduce the
teacher's distribution from both views: from the first, which the teacher has seen (control), and
from the second, so that the wording makes no difference (generalize).

    first view --> teacher (frozen) --> z_ref --> instance queue D (newest in, oldest out)
        |                                 +-----> P_ref = p(z_ref, D, tau^T)
        +--------> student --> z_con -----------> P_con = p(z_con, D, tau^S)        eq. 1
    second view -> student --> z_gen -----------> P_gen = p(z_gen, D, tau^S)
    loss = alpha CE(P_ref, P_con) + (1 - alpha) CE(P_ref, P_gen)                    eq. 2

Departures that change results (docs/congen.md has all of them, next to the authors' code):
  - Without --pairs, words are deleted for the second view; the paper's views are back-translations.
  - The default teacher is pooled at [CLS], as it was trained; the authors' command takes a mean.
  - The sentences that fill the queue at the start are also trained on.
  - AdamW's moments are not corrected for their start at zero, as in the authors' code.
  - A student cut to --student-layers trains without dropout.

  python congen.py --student bert-base-uncased         the paper's student, with word deletion
  python congen.py --teacher MODEL --student-layers 1,3,5 --train my.txt --dev my.tsv
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

# ---- Losses: call them in fp32, outside autocast -------------------------------------------------


def similarities(embeddings, queue):
    """sim of eq. 1: cosines of several z, [N, D] each, with the queue [K, D] -> [N, K] each."""
    keys = F.normalize(queue, dim=-1)  # once for all of them, since K is large
    return [F.normalize(z, dim=-1) @ keys.T for z in embeddings]


def similarity_distribution(z, queue, temperature):
    """Eq. 1: p_j = exp(sim(z, d_j) / tau) / sum_k exp(sim(z, d_k) / tau),  j = 1, ..., K

    z [N, D]; queue [K, D], the d_j; temperature tau > 0. Returns [N, K], rows that sum to 1.
    """
    (similarity,) = similarities([z], queue)
    return F.softmax(similarity / temperature, dim=1)


def congen_loss(
    student_control,
    student_generalize,
    teacher_reference,
    queue,
    teacher_temperature,
    student_temperature,
    alpha,
):
    """Eq. 2: L = alpha CE(P_ref, P_con) + (1 - alpha) CE(P_ref, P_gen)

    with CE(P, Q) = -sum_j P_j log Q_j and the distributions of eq. 1: P_ref = p(z_ref, D, tau^T) of
    the teacher's embedding of the first view, P_con = p(z_con, D, tau^S) and P_gen = p(z_gen, D,
    tau^S) of the student's embeddings of the first and the second view. Embeddings [N, D] each, not
    detached here; queue [K, D]; temperatures tau > 0; alpha from 0 to 1 (1 is SEED, Fang et al.
    2021). Returns the mean over the batch, a scalar >= 0.
    """
    embeddings = (teacher_reference, student_control, student_generalize)
    reference, control, generalize = similarities(embeddings, queue)  # [N, K] each
    p_ref = F.softmax(reference / teacher_temperature, dim=1)  # eq. 1
    # cross_entropy() takes the log of eq. 1 itself, which stays finite at low temperatures.
    control_loss = F.cross_entropy(control / student_temperature, p_ref)
    generalize_loss = F.cross_entropy(generalize / student_temperature, p_ref)
    return alpha * control_loss + (1 - alpha) * generalize_loss


# ---- Model ---------------------------------------------------------------------------------------


def embed(encoder, input_ids, attention_mask):
    """Token ids and mask, [N, L] each -> embeddings z [N, D] in float32.

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


def add_head(encoder, dimension, start="random"):
    """Append linear + tanh to the teacher's dimension (section 4.1), unless a head has it already.

    encoder: as in embed(), with its `dimension`. start: "random", or "identity", which suits a
    student that begins as layers of its teacher. The head stays in the student after training.
    """
    if encoder.heads and encoder.dimension == dimension:
        return
    linear = nn.Linear(encoder.dimension, dimension)
    if start == "identity":
        nn.init.eye_(linear.weight)
        nn.init.zeros_(linear.bias)
    encoder.heads.append(nn.Sequential(linear, nn.Tanh()))


def enqueue(queue, embeddings, size):
    """Section 3.2: the newest `size` rows of queue [K, D] and embeddings [N, D].

    Call it before the loss, in which a sentence then meets its own embedding, too.
    """
    return torch.cat([embeddings.detach(), queue])[:size]  # the newest come first


# ---- Training. Everything above needs only torch and can be copied into other projects -----------

import re
from typing import Literal

import numpy as np

from common import Batches, embed_texts, spearman, teacher_targets, token_lengths
from common import read_dev, read_lines, read_sentences, resolve_data
from common import load_encoder, load_untrained_student, save_encoder
from common import Device, Pooling, Precision, in_range, positive_float, positive_int
from common import Run, read_options, run_main, run_settings, table

DELETION_RATE = 0.1  # Table 6
# A word, or a character of a script that has no spaces (Thai to Lao, Burmese, Khmer, Chinese,
# Japanese), and the spaces after it.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
WORD = re.compile(rf"(?:[{UNSPACED}]|[^\s{UNSPACED}]+)\s*")


# Each line is an option, and its comment the help text: read_options() of common.py reads both.
class Options:
    teacher: str = "princeton-nlp/unsup-simcse-roberta-large"  # folder or Hub name
    teacher_embeddings: str = None  # instead: its embeddings of the training texts, .npy [n, D]
    teacher_pooling: Pooling = None  # (default: its folder's, else mean)
    student: str = None  # folder or Hub name (default: the teacher, cut to --student-layers)
    student_layers: str = None  # keep only these layers, counted from 0, as in 1,3,5
    pooling: Pooling = None  # of the student (default: the teacher's if cut, its folder's, or mean)
    dropout: in_range(float, 0, 0.99) = None  # of the student (default: its folder's; 0 if cut)

    train: str = "nli_for_simcse.csv"  # sentences, or a .csv of triplets
    pairs: str = None  # instead: TSV of both views of each sentence (default: words are deleted)
    dev: str = None  # scored pairs (TSV) or senteval.tar; they choose the best (default: STS-B dev)

    head: Literal["random", "identity"] = "random"  # initial weights of the head; paper §4.1
    alpha: in_range(float, 0, 1) = 0.5  # weight of control; generalize has the rest; Table 5
    epochs: positive_int = 20  # paper §4.1
    batch_size: in_range(int, 2) = 128  # paper §4.1
    lr: positive_float = 5e-5  # peak, BERT-base's in Table 7; docs/tables/congen.sh has the others
    teacher_temperature: positive_float = 0.05  # tau^T, BERT-base's in Table 7
    student_temperature: positive_float = 0.07  # tau^S, BERT-base's in Table 7
    queue_size: in_range(int, 2) = 65536  # K, at most all sentences; BERT-base's in Table 7
    patience: in_range(int, 0) = 7  # epochs without a better dev score that end training; 0: never

    output: str = "runs/congen"  # folder for everything
    max_steps: positive_int = 10**9  # at most
    max_length: in_range(int, 3) = 128  # tokens of a training text, as in the authors' code
    eval_steps: positive_int = 512  # steps between dev scores; paper, appendix A.1
    seed: in_range(int, 0) = 0  # of batches, head and dropout; a continued run repeats them
    group_by_length: bool = False  # batches of texts of similar length
    device: Device = None  # (default: cuda if there is one)
    precision: Precision = None  # of training (default: bf16 on a GPU that has it, else fp32)


def make_optimizer(parameters, lr):
    """AdamW (section 4.1). As in the authors' code, biases and norms do not decay, and the moments
    are not corrected for their start at zero, which makes the first steps larger."""
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups = [dict(params=matrices), dict(params=vectors, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=lr, eps=1e-6, weight_decay=0.01, fused=True)
    for parameter in parameters:
        late = torch.tensor(1e6, device=parameter.device)  # a step at which torch corrects nothing
        zeros = [torch.zeros_like(parameter) for _ in range(2)]
        optimizer.state[parameter] = dict(step=late, exp_avg=zeros[0], exp_avg_sq=zeros[1])
    return optimizer


def warmup_linear(step, total):
    """Factor of the learning rate after `step` of `total` steps: rises from 0, then falls linearly.

    The rise takes a tenth of all steps (section 4.1); the fall is that of the authors' code.
    """
    warmup = math.ceil(total / 10)
    if step < warmup:
        return step / warmup
    return (total - step) / (total - warmup)


def delete_words(sentences, rng):
    """Each word goes with probability 10 %; a sentence left without words stays as it is."""
    views = []
    for sentence in sentences:
        kept = [word for word in WORD.findall(sentence) if rng.random() >= DELETION_RATE]
        views.append("".join(kept).strip() or sentence)
    return views


def distill(student, first_views, second_views, targets, dev_pairs, run, args):
    """Section 3: the student learns from both views; the best by dev score is kept.

    first_views: n sentences; second_views: n others, or [], and words of the first are deleted;
    targets [n, D]: z_ref of the first. The teacher is not in this loop: it is frozen, and its
    embeddings are computed beforehand.
    """
    lengths = token_lengths(args, student, first_views)
    batches = Batches(len(first_views), args.batch_size, args.seed, lengths)
    total = min(args.epochs * batches.per_epoch, args.max_steps)
    patience = args.patience * batches.per_epoch if args.patience else math.inf  # in steps
    autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16")

    torch.manual_seed(args.seed)  # the head may start at random
    add_head(student, targets.shape[1], args.head)
    student.to(args.device).train()
    parameters = list(student.parameters())
    optimizer = make_optimizer(parameters, args.lr)
    # The queue starts with K random sentences (section 4.1). [seed, epoch] orders an epoch, and
    # numpy reads [seed, 0] as [seed, 0, 0]: hence the 1.
    order = np.random.default_rng([args.seed, 0, 1]).permutation(len(targets))
    queue = torch.from_numpy(targets[order[: args.queue_size]]).to(args.device)  # [K, D]

    state = [student, optimizer]  # changed in place; the queue is replaced
    start, queue = run.begin(total, state, queue)  # from the last checkpoint, if there is one
    for step in range(start, total + 1):  # `step` steps are finished
        run.checkpoint(step, state, queue)

        # Now and then, before the first step and after the last: score the student, keep the best.
        if step % args.eval_steps == 0 or step == total:
            if run.is_best(step, spearman(embed, student, dev_pairs)):
                save_encoder(student, run.folder)
            if step == total or step - run.best_step >= patience:
                return

        # One step.
        rows = batches[step]  # row numbers [N]
        first = [first_views[row] for row in rows]
        if second_views:
            second = [second_views[row] for row in rows]
        else:
            second = delete_words(first, np.random.default_rng([args.seed, step + 1]))
        torch.manual_seed(args.seed * 1_000_003 + step)
        lr = args.lr * warmup_linear(step, total)
        for group in optimizer.param_groups:
            group["lr"] = lr
        reference = torch.from_numpy(targets[rows]).to(args.device)  # z_ref [N, D], read from disk
        queue = enqueue(queue, reference, len(queue))  # [K, D], before the loss, section 3.2
        with autocast:
            control = embed_texts(embed, student, first, args.max_length)  # z_con [N, D]
            generalize = control  # for --alpha 1, which gives it no weight
            if args.alpha < 1:
                generalize = embed_texts(embed, student, second, args.max_length)  # z_gen [N, D]
        temperatures = (args.teacher_temperature, args.student_temperature)
        loss = congen_loss(
            control, generalize, reference, queue, *temperatures, args.alpha
        )  # eq. 2
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        run.log(step + 1, loss=loss, lr=lr)


# ---- Command line --------------------------------------------------------------------------------


def read_text_pairs(path):
    """A file of two tab-separated columns -> [[text, text]]. Raises UserError."""

    def parse(line):
        texts = [field.strip() for field in line.split("\t")]
        if len(texts) != 2 or not all(texts):
            raise ValueError(f"{len(texts)} tab-separated columns, or an empty one")
        return texts

    form = "each line has two tab-separated columns, two views or translations of a text"
    return list(read_lines(path, parse, form))


def main():
    args = read_options(Options, __doc__)
    dev_pairs = read_dev(args.dev)
    if args.pairs:
        first_views, second_views = zip(*read_text_pairs(args.pairs))
    else:
        first_views, second_views = read_sentences(resolve_data(args.train)), []
    settings = run_settings(args, [__file__], [dev_pairs, first_views, second_views])
    run = Run(settings, args, "distill")
    if not run.is_finished:
        student = load_untrained_student(args)
        targets = teacher_targets(embed, first_views, dev_pairs, run, args)
        run.scores["student before"] = {"dev": spearman(embed, student, dev_pairs)}
        distill(student, first_views, second_views, targets, dev_pairs, run, args)
        best = load_encoder(run.folder, device=args.device)
        run.finish("best student", {"dev": spearman(embed, best, dev_pairs)})
    print(table(run.scores))


if __name__ == "__main__":
    run_main(main)
