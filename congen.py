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
  - A student cut to --student-layers trains without dropout.
  - A batch has sentences of similar length (--shuffle: random ones).

  python congen.py --student bert-base-uncased         the paper's setting, with word deletion
  python congen.py --teacher MODEL --student-layers 1,3,5 --train my.txt --dev my.tsv
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

# ---- Losses --------------------------------------------------------------------------------------


def cosine(a, b):
    """sim of eq. 1, the cosine of all pairs of rows: [N, D], [K, D] -> [N, K], fp32 or fp64."""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return F.normalize(a.to(dtype), dim=-1) @ F.normalize(b.to(dtype), dim=-1).T


def similarity_distribution(z, queue, temperature):
    """Eq. 1: p_j = exp(sim(z, d_j) / tau) / sum_k exp(sim(z, d_k) / tau),  j = 1, ..., K

    z [N, D]; queue [K, D], the d_j; temperature tau > 0. Returns [N, K], rows that sum to 1.
    """
    return F.softmax(cosine(z, queue) / temperature, dim=1)


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
    detached here; queue D [K, D]; temperatures tau > 0; alpha from 0 to 1 (1 is SEED, Fang et al.
    2021). Returns the mean over the batch, a scalar >= 0.
    """
    reference = similarity_distribution(teacher_reference, queue, teacher_temperature)  # [N, K]
    # cross_entropy() takes the log of eq. 1 itself, which stays finite at low temperatures.
    control = F.cross_entropy(cosine(student_control, queue) / student_temperature, reference)
    generalize = F.cross_entropy(cosine(student_generalize, queue) / student_temperature, reference)
    return alpha * control + (1 - alpha) * generalize


# ---- Model ---------------------------------------------------------------------------------------


def embed(encoder, input_ids, attention_mask):
    """Token ids and mask, [N, L] each -> embeddings z [N, D] in float32.

    encoder: has `model`, a transformer; `pooling`, "mean", "cls" or "lasttoken"; `heads`, the dense
    layers after pooling; `normalize`. The same for teacher and student, in training and scoring,
    except that training leaves out the L2 normalization, which makes no difference to eq. 1.
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
    normalized = encoder.normalize and not encoder.training
    return F.normalize(embedding, dim=-1) if normalized else embedding


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


class InstanceQueue(nn.Module):
    """K teacher embeddings [K, D], first in, first out (section 3.2): a ring buffer.

    It is never cleared: eq. 1 compares with any sentences, and K stays the same.
    """

    def __init__(self, embeddings):
        super().__init__()
        self.register_buffer("ring", embeddings.detach().clone())
        self.enqueued = 0  # since the start

    def enqueue(self, embeddings):
        """Overwrite the N oldest entries with embeddings [N, D], detached, in the queue's dtype."""
        size = len(self.ring)
        newest = embeddings.detach()[max(0, len(embeddings) - size) :]
        slots = self.enqueued + torch.arange(len(newest), device=newest.device)
        self.ring[slots % size] = newest.to(self.ring.dtype)
        self.enqueued += len(newest)

    def embeddings(self):
        """[K, D]. The ring itself: enqueue() changes it, so call it before the loss."""
        return self.ring

    def get_extra_state(self):  # goes into the checkpoint with the ring
        return self.enqueued

    def set_extra_state(self, enqueued):
        self.enqueued = enqueued


# ---- Training. Everything above needs only torch and can be copied into other projects -----------

import numpy as np

from common import ArgumentParser, UserError, note, number, run_main
from common import evaluation_sets, read_sentences, read_text_pairs
from common import load_encoder, load_student, save_encoder, spearman, teacher_embeddings
from common import Run, Tokens, average_gradients, batches, gather, own_rows, step_seed, to_device
from common import write_card

DELETION_RATE = 0.1  # Table 6


def dev_score(student, dev_pairs):
    """100 x Spearman's correlation on the dev set, which chooses the best student."""
    return spearman(embed, student, {"dev": dev_pairs})["dev"]


def warmup_linear(step, total):
    """Factor of the learning rate: rises for a tenth of all steps (section 4.1), then falls."""
    warmup = math.ceil(total / 10)
    return min(step / warmup, (total + 1 - step) / (total + 1 - warmup))


def delete_words(sentence, random):
    """Delete each word with probability 10 %; a sentence left without words stays as it is."""
    words = [word for word in sentence.split() if random.random() >= DELETION_RATE]
    return " ".join(words) or sentence


class Views(NamedTuple):
    """Two views of n sentences."""

    first: list  # of str
    second: list | None  # None: words of the first are deleted

    def second_of(self, rows, seed):
        """Row numbers [N] -> list of N str. What is deleted depends on rows and seed alone."""
        if self.second is not None:
            return [self.second[row] for row in rows]
        random = np.random.default_rng(seed)
        return [delete_words(self.first[row], random) for row in rows]


def distill(student, views, targets, dev_pairs, run, args):
    """Section 3 -> the best step and the last.

    targets [n, D]: z_ref of n first views. The teacher is not in this loop: it is frozen, and
    main() has computed its embeddings once.
    """
    torch.manual_seed(args.seed)  # the head starts at random
    add_head(student, targets.shape[1], args.head)
    student.to(args.device).train()
    tokens = Tokens(student, views.first, args.max_length)
    epoch_steps = math.ceil(len(targets) / args.batch_size)
    total = min(args.epochs * epoch_steps, args.max_steps or math.inf)
    start = np.random.default_rng(args.seed).permutation(len(targets))[: args.queue_size]
    queue = InstanceQueue(to_device(targets[start], args.device))  # random sentences (section 4.1)
    tau_teacher = args.teacher_temperature
    tau_student = args.student_temperature
    modules = [student, queue]
    parameters = list(student.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, eps=1e-6, weight_decay=0.01, fused=True)
    best, best_step, step = run.resume("distill", total, modules, optimizer)  # or -inf, 0, 0
    for rows in batches(tokens.lengths, args.batch_size, args.seed, args.shuffle, skip=step):
        if step % args.eval_steps == 0 or step == total:  # also before the first step
            dev = dev_score(student, dev_pairs)
            if dev > best:
                best, best_step = dev, step
                save_encoder(student, args.output)
            run.checkpoint(best, best_step, step, modules, optimizer)
            run.log_dev(step, dev)
            stalled = step - best_step >= args.patience * epoch_steps > 0
            if step == total or stalled:
                break
        step += 1
        torch.manual_seed(step_seed(args.seed, step))  # so that --resume repeats the dropout
        lr = args.lr * warmup_linear(step, total)
        optimizer.param_groups[0]["lr"] = lr
        reference = to_device(targets[rows], args.device)  # z_ref [N, D], read from disk
        queue.enqueue(reference)  # before the loss, section 3.2
        with torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16"):
            local = embed(student, *tokens.batch(own_rows(rows), args.device))  # of this process
        control = gather(local, len(rows))  # z_con of all processes [N, D]
        generalize = control  # has no weight if alpha is 1
        if args.alpha < 1:
            second = Tokens(student, views.second_of(rows, [args.seed, step]), args.max_length)
            positions = own_rows(np.arange(len(rows)))  # in the batch
            with torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16"):
                local = embed(student, *second.batch(positions, args.device))
            generalize = gather(local, len(rows))  # z_gen of all processes [N, D]
        loss = congen_loss(
            control, generalize, reference, queue.embeddings(), tau_teacher, tau_student, args.alpha
        )
        optimizer.zero_grad()
        loss.backward()
        average_gradients(parameters)  # now those of one process with the whole batch
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        run.log(step, len(rows), loss=loss, lr=lr)
    return best_step, step


# ---- Command line --------------------------------------------------------------------------------


class Setting(NamedTuple):
    """A row of Table 7."""

    teacher_temperature: float  # tau^T
    student_temperature: float  # tau^S
    queue_size: int  # K
    lr: float
    millions: int  # of parameters, Tables 1 and 3


TABLE_7 = {
    "BERT-Tiny": Setting(0.05, 0.05, 16384, 5e-4, 4),
    "BERT-Mini": Setting(0.05, 0.07, 16384, 3e-4, 11),
    "Tiny-BERT-L4": Setting(0.05, 0.05, 65536, 1e-4, 14),
    "MiniLM-L3": Setting(0.05, 0.07, 16384, 5e-4, 17),
    "MiniLM-L6": Setting(0.05, 0.07, 65536, 3e-4, 22),
    "BERT-Small": Setting(0.05, 0.07, 65536, 3e-4, 29),
    "MiniLM-L12": Setting(0.05, 0.07, 16384, 5e-5, 33),
    "Tiny-BERT-L6": Setting(0.05, 0.07, 65536, 5e-5, 67),
    "BERT-base": Setting(0.05, 0.07, 65536, 5e-5, 109),
    "RoBERTa-base": Setting(0.1, 0.1, 1024, 5e-5, 125),
    "Multilingual-DistilBERT": Setting(0.05, 0.07, 65536, 3e-4, 134),
    "Multilingual-MiniLM-L12": Setting(0.05, 0.07, 65536, 3e-4, 117),
}

DEMO = dict(teacher="sentence-transformers/all-MiniLM-L6-v2", student_layers="1,3,5")
DEMO |= dict(train="demo/sentences.txt", dev="demo/dev.tsv")
DEMO |= dict(epochs=1, batch_size=64, eval_steps=50)


def parse_args():
    positive_int = number(int, 1)
    positive_float = number(float, 1e-9)
    parser = ArgumentParser(__doc__)
    parser.add_model_options("princeton-nlp/unsup-simcse-roberta-large")
    parser.add_data_options("nli_for_simcse.csv")
    views = "TSV with both views of each sentence, instead of --train (default: words are deleted)"
    start = "initial weights of the head (default: %(default)s; paper §4.1)"
    control = "weight of control; generalize has the rest (default: %(default)s; paper Table 5)"
    section = "(default: %(default)s; paper §4.1)"
    by_student = "(default: by the student's size; paper Table 7)"
    add = parser.add_argument_group("method").add_argument
    add("--pairs", help=views)
    add("--head", choices=("random", "identity"), default="random", help=start)
    add("--alpha", type=number(float, 0, 1), default=0.5, help=control)
    add("--epochs", type=positive_int, default=20, help=section)
    add("--batch-size", type=positive_int, default=128, help=section)
    add("--lr", type=positive_float, help=f"peak learning rate {by_student}")
    add("--teacher-temperature", type=positive_float, help=f"tau^T of eq. 2 {by_student}")
    names = ("--student-temperature", "--temperature")
    add(*names, type=positive_float, help=f"tau^S of eq. 2 {by_student}")
    add("--queue-size", type=positive_int, help=f"instance queue size K {by_student}")
    parser.add_run_options("runs/congen", max_length=128, eval_steps=512, patience=7)
    return parser.parse(DEMO)


def read_views(args):
    """--pairs or --train -> Views. Raises UserError."""
    if not args.pairs:
        return Views(read_sentences(args.train), None)
    first, second = zip(*read_text_pairs(args.pairs))
    return Views(list(first), list(second))


def resolve_defaults(args, student, sentences):
    """Fill missing options from the Table 7 row whose student is closest in size.

    Raises UserError if the queue does not hold a batch, or if the sentences do not fill it.
    """
    millions = sum(value.numel() for value in student.parameters()) / 1e6
    name = min(TABLE_7, key=lambda name: abs(TABLE_7[name].millions - millions))
    note(f"Options that are not given have the values of {name} in Table 7.")
    setting = TABLE_7[name]
    args.teacher_temperature = args.teacher_temperature or setting.teacher_temperature
    args.student_temperature = args.student_temperature or setting.student_temperature
    args.lr = args.lr or setting.lr
    args.queue_size = args.queue_size or min(setting.queue_size, sentences)
    smallest = max(2, min(args.batch_size, sentences))  # a batch; over one entry, the loss is 0
    if not smallest <= args.queue_size <= sentences:
        limits = f"from {smallest} (a batch, or 2) to {sentences} (all sentences)"
        raise UserError(f"a queue of {args.queue_size} entries: --queue-size must be {limits}")


def main():
    args = parse_args()
    sets = evaluation_sets(args)
    student = load_student(args)
    uncut = student.uncut_parameters
    views = read_views(args)
    teacher = load_encoder(args.teacher, args.teacher_pooling, device=args.device).eval()
    resolve_defaults(args, student, len(views.first))

    run = Run(args, teacher=teacher, student=student, dev=sets["dev"], train=views)
    if not run.scores:
        run.scores["teacher"] = spearman(embed, teacher, sets, encode=teacher_embeddings)
        run.scores["student before"] = spearman(embed, student, sets)
    if "distill" not in run.finished:
        targets = teacher_embeddings(embed, teacher, views.first, args.max_length, args.precision)
        steps = distill(student, views, targets, sets["dev"], run, args)
        run.finish(*steps, {"best student": spearman(embed, load_best(args), sets)})
    second = "given by --pairs" if args.pairs else "by word deletion"
    text = f"Distilled by `congen.py` (ConGen, Findings of EMNLP 2022), alpha {args.alpha}"
    write_card(run, args, load_best(args), uncut, f"{text}, second views {second}.")


def load_best(args):
    """The best student so far, which distill() has saved."""
    return load_encoder(args.output, device=args.device)


if __name__ == "__main__":
    run_main(main)
