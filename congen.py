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
  - AdamW corrects the bias of its moments; the authors' does not, so its first steps are larger.
  - A student cut to --student-layers trains without dropout.

  python congen.py --student bert-base-uncased         the paper's student, with word deletion
  python congen.py --teacher MODEL --student-layers 1,3,5 --train my.txt --dev my.tsv
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

# ---- Losses: call them in fp32, outside autocast -------------------------------------------------


def cosine(a, b):
    """sim of eq. 1, the cosine of all pairs of rows: [N, D], [K, D] -> [N, K]."""
    a = F.normalize(a, dim=-1)
    b = F.normalize(b, dim=-1)
    return a @ b.T


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

import numpy as np

from common import ArgumentParser, in_range, parse_options, run_main
from common import add_data_options, add_embeddings_option, add_model_options, add_run_options
from common import evaluation_sets, read_embeddings, read_sentences, read_text_pairs
from common import load_encoder, load_untrained_student, save_encoder, spearman, teacher_embeddings
from common import Batches, Run, Tokens, embed_rows, run_settings, table, to_device

DELETION_RATE = 0.1  # Table 6
# A word, or a character of a script that has no spaces (Thai to Lao, Burmese, Khmer, Chinese,
# Japanese), and the spaces after it.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
WORD = re.compile(rf"(?:[{UNSPACED}]|[^\s{UNSPACED}]+)\s*")


def make_optimizer(parameters, lr):
    """AdamW (section 4.1). As in the authors' code, biases and norms do not decay."""
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim == 1]
    groups = [dict(params=matrices), dict(params=vectors, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=lr, eps=1e-6, weight_decay=0.01, fused=True)


def warmup_linear(step, total):
    """Factor of the learning rate in step 1, 2, ..., total: rises from 0, then falls linearly.

    The rise takes a tenth of all steps (section 4.1); the fall is that of the authors' code.
    """
    warmup = math.ceil(total / 10)
    done = step - 1
    if done < warmup:
        return done / warmup
    return (total - done) / (total - warmup)


def delete_words(sentence, random):
    """Delete each word with probability 10 %; a sentence left without words stays as it is."""
    kept = [word for word in WORD.findall(sentence) if random.random() >= DELETION_RATE]
    return "".join(kept).strip() or sentence


def second_views(first, second, rows, seed):
    """The second views of the rows: given ones, or the first with words deleted by this seed."""
    if second is not None:
        return [second[row] for row in rows]
    random = np.random.default_rng(seed)
    return [delete_words(first[row], random) for row in rows]


def embed_views(student, views, args):
    """N texts of this step alone -> z_gen [N, D]."""
    tokens = Tokens(student, views, args.max_length)
    return embed_rows(embed, student, tokens, np.arange(len(views)), args.device)


def distill(student, first, second, targets, dev_set, run, args):
    """Section 3 -> best dev score, its step, the last step.

    first: n sentences; second: their other views, or None, and words of the first are deleted;
    targets [n, D]: z_ref of the first. The teacher is not in this loop: it is frozen, and main()
    has computed its embeddings once.
    """
    tokens = Tokens(student, first, args.max_length)
    batches = Batches(tokens.lengths, args.batch_size, args.seed, args.group_by_length)
    total = min(args.epochs * batches.per_epoch, args.max_steps)
    patience = args.patience * batches.per_epoch if args.patience else math.inf  # in steps
    autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16")

    torch.manual_seed(args.seed)  # the head starts at random
    add_head(student, targets.shape[1], args.head)
    student.to(args.device).train()
    parameters = list(student.parameters())
    optimizer = make_optimizer(parameters, args.lr)
    # The queue starts with K random sentences (section 4.1). The 1 makes this draw differ from
    # every epoch's order: numpy ignores zeros at the end of a seed.
    random = np.random.default_rng([args.seed, 0, 1])
    queue = to_device(targets[random.permutation(len(targets))[: args.queue_size]], args.device)

    # begin() restores `state`, in place, and these values from the last checkpoint, if any.
    state = [student, optimizer]
    step, best, best_step, queue = run.begin(total, state, (0, -math.inf, 0, queue))
    while True:
        run.checkpoint(state, (step, best, best_step, queue))  # at most every five minutes

        # Now and then, before the first step and after the last: score the student, keep the best.
        if step % args.eval_steps == 0 or step == total:
            dev = spearman(embed, student, dev_set)["dev"]  # without dropout
            if dev > best:
                best, best_step = dev, step
                save_encoder(student, run.folder)
            run.log_dev(step, dev)
            if step == total or step - best_step >= patience:
                return best, best_step, step

        # One step. Above, `step` is the number of finished steps; below, that of the current one.
        rows = batches[step]  # row numbers [N]
        step += 1
        torch.manual_seed(args.seed * 1_000_003 + step)  # a continued run repeats its dropout
        lr = args.lr * warmup_linear(step, total)
        for group in optimizer.param_groups:
            group["lr"] = lr
        reference = to_device(targets[rows], args.device)  # z_ref [N, D], read from disk
        queue = enqueue(queue, reference, len(queue))  # [K, D], before the loss, section 3.2
        with autocast:
            control = embed_rows(embed, student, tokens, rows, args.device)  # z_con [N, D]
            generalize = control  # for --alpha 1, where its weight is 0
            if args.alpha < 1:
                views = second_views(first, second, rows, [args.seed, step])  # N texts
                generalize = embed_views(student, views, args)  # z_gen [N, D]
        loss = congen_loss(
            control,
            generalize,
            reference,
            queue,
            args.teacher_temperature,
            args.student_temperature,
            args.alpha,
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        run.log(step, len(rows), loss=loss, lr=lr)


# ---- Command line --------------------------------------------------------------------------------

NLI_TRIPLETS = "nli_for_simcse.csv"


def parse_args():
    positive_float = in_range(float, 1e-9)
    parser = ArgumentParser(__doc__)
    add_model_options(parser, "princeton-nlp/unsup-simcse-roberta-large")
    add_embeddings_option(parser)
    add_data_options(parser, NLI_TRIPLETS)
    views = "TSV with both views of each sentence, instead of --train (default: words are deleted)"
    start = "initial weights of the head (default: %(default)s; paper §4.1)"
    control = "weight of control; generalize has the rest (default: %(default)s; paper Table 5)"
    section = "(default: %(default)s; paper §4.1)"
    table_7 = "(default: %(default)s, BERT-base's in Table 7; docs/congen.md has the others)"
    add = parser.add_argument_group("method").add_argument
    add("--pairs", help=views)
    add("--head", choices=("random", "identity"), default="random", help=start)
    add("--alpha", type=in_range(float, 0, 1), default=0.5, help=control)
    add("--epochs", type=in_range(int, 1), default=20, help=section)
    add("--batch-size", type=in_range(int, 2), default=128, help=section)
    add("--lr", type=positive_float, default=5e-5, help=f"peak learning rate {table_7}")
    add("--teacher-temperature", type=positive_float, default=0.05, help=f"tau^T {table_7}")
    names = ("--student-temperature", "--temperature")
    add(*names, type=positive_float, default=0.07, help=f"tau^S {table_7}")
    add("--queue-size", type=in_range(int, 2), default=65536, help=f"K, at most all {table_7}")
    text = "end after this many epochs without a better dev score; 0: never (default: %(default)s)"
    add("--patience", type=in_range(int, 0), default=7, help=text)
    add_run_options(parser, output="runs/congen", max_length=128, eval_steps=512)
    args = parse_options(parser)
    args.train = args.train or NLI_TRIPLETS
    return args


def main():
    args = parse_args()
    sets = evaluation_sets(args)
    second = None
    if args.pairs:
        first, second = map(list, zip(*read_text_pairs(args.pairs)))
    else:
        first = read_sentences(args.train)
    settings = run_settings(args, [__file__], [*sets.values(), first, second or []])
    run = Run(settings, args, "distill")
    if not run.is_finished:
        student = load_untrained_student(args)
        if args.teacher_embeddings:
            targets = read_embeddings(args.teacher_embeddings, len(first))
        else:
            teacher = load_encoder(args.teacher, args.teacher_pooling, device=args.device)
            run.scores["teacher"] = spearman(embed, teacher, sets, teacher_embeddings)
            targets = teacher_embeddings(embed, teacher, first, args.max_length, args.precision)
            del teacher  # frees GPU memory
        run.scores["student before"] = spearman(embed, student, sets)
        dev_set = {"dev": sets["dev"]}
        outcome = distill(student, first, second, targets, dev_set, run, args)
        student = load_encoder(run.folder, device=args.device)  # the best one
        how = "given by --pairs" if args.pairs else "by word deletion"
        text = f"Distilled by `congen.py` (ConGen, Findings of EMNLP 2022), alpha {args.alpha}"
        text += f", second views {how}."
        run.finish(*outcome, {"best student": spearman(embed, student, sets)}, text)
    print(table(run.scores))


if __name__ == "__main__":
    run_main(main)
