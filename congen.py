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


def similarities(embeddings, queue):
    """sim of eq. 1: cosines of each z [N, D] of several with the queue [K, D] -> [N, K] each."""
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
    detached here; queue D [K, D]; temperatures tau > 0; alpha from 0 to 1 (1 is SEED, Fang et al.
    2021). Returns the mean over the batch, a scalar >= 0.
    """
    embeddings = (teacher_reference, student_control, student_generalize)
    reference, control, generalize = similarities(embeddings, queue)  # [N, K] each
    p_ref = F.softmax(reference / teacher_temperature, dim=1)  # similarity_distribution()
    # cross_entropy() takes the log of eq. 1 itself, which stays finite at low temperatures.
    control_loss = F.cross_entropy(control / student_temperature, p_ref)
    generalize_loss = F.cross_entropy(generalize / student_temperature, p_ref)
    return alpha * control_loss + (1 - alpha) * generalize_loss


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
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from common import Batches, Tokens, embed_rows, spearman, to_device
from common import read_dev, read_embeddings, read_rows, read_sentences, resolve_data
from common import load_encoder, load_untrained_student, teacher_embeddings
from common import check_saved, save_encoder
from common import ArgumentParser, Run, in_range, run_main, run_settings

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
    """Factor of the learning rate after `step` of `total` steps: rises from 0, then falls linearly.

    The rise takes a tenth of all steps (section 4.1); the fall is that of the authors' code.
    """
    warmup = math.ceil(total / 10)
    if step < warmup:
        return step / warmup
    return (total - step) / (total - warmup)


def delete_words(sentence, random):
    """Delete each word with probability 10 %; a sentence left without words stays as it is."""
    kept = [word for word in WORD.findall(sentence) if random.random() >= DELETION_RATE]
    return "".join(kept).strip() or sentence


def deleted_views(sentences, rows, seed):
    """Second views: the sentences of these rows, with words deleted by this seed."""
    random = np.random.default_rng(seed)
    return [delete_words(sentences[row], random) for row in rows]


def distill(student, first_views, second_views, targets, dev_pairs, run, args):
    """Section 3 -> best dev score, its step, the last step.

    first_views: n sentences; second_views: n others, or None, and words of the first are deleted;
    targets [n, D]: z_ref of the first. The teacher is not in this loop: it is frozen, and its
    embeddings are computed beforehand.
    """
    tokens = Tokens(student, first_views, args.max_length)
    second_tokens = Tokens(student, second_views, args.max_length) if second_views else None
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

    def prepare_views(step):
        """The second views of a step -> Tokens, and their row numbers [N] in these."""
        if args.alpha == 1:  # their weight is 0
            return None
        if second_tokens:
            return second_tokens, batches[step]
        texts = deleted_views(first_views, batches[step], [args.seed, step + 1])
        return Tokens(student, texts, args.max_length), np.arange(len(texts))

    # begin() restores `state`, in place, and these values from the last checkpoint, if any.
    state = [student, optimizer]
    start, best, best_step, queue = run.begin(total, state, (0, -math.inf, 0, queue))
    views = prepare_views(start)
    worker = ThreadPoolExecutor(max_workers=1)
    for step in range(start, total + 1):  # `step` steps are finished
        run.checkpoint(state, (step, best, best_step, queue))  # at most every five minutes

        # Now and then, before the first step and after the last: score the student, keep the best.
        if step % args.eval_steps == 0 or step == total:
            dev = spearman(embed, student, dev_pairs)  # without dropout
            if dev > best:
                best, best_step = dev, step
                save_encoder(student, run.folder)
            if step == 0:  # before hours of training: can the student be read again?
                saved = load_encoder(run.folder, device=args.device)
                check_saved(embed, student, saved, first_views[:20])
                del saved  # frees memory
            run.log(step, dev=dev)
            if step == total or step - best_step >= patience:
                return best, best_step, step

        # One step. Meanwhile, a thread deletes words for the next one.
        rows = batches[step]  # row numbers [N]
        next_views = worker.submit(prepare_views, step + 1)
        torch.manual_seed(args.seed * 1_000_003 + step)  # a continued run repeats its dropout
        lr = args.lr * warmup_linear(step, total)
        for group in optimizer.param_groups:
            group["lr"] = lr
        reference = to_device(targets[rows], args.device)  # z_ref [N, D], read from disk
        queue = enqueue(queue, reference, len(queue))  # [K, D], before the loss, section 3.2
        with autocast:
            control = embed_rows(embed, student, tokens, rows, args.device)  # z_con [N, D]
            generalize = control  # for --alpha 1
            if views:
                generalize = embed_rows(embed, student, *views, args.device)  # z_gen [N, D]
        temperatures = (args.teacher_temperature, args.student_temperature)
        loss = congen_loss(
            control, generalize, reference, queue, *temperatures, args.alpha
        )  # eq. 2
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        run.log(step + 1, len(rows), loss=loss, lr=lr)
        views = next_views.result()  # before any score: a tokenizer serves one thread at a time


# ---- Command line --------------------------------------------------------------------------------

POOLINGS = ("mean", "cls", "lasttoken", "pooler")


def parse_args():
    positive_int = in_range(int, 1)
    positive_float = in_range(float, 1e-9)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shown = "(default: %(default)s)"
    section = "(default: %(default)s; paper §4.1)"
    table_7 = "(default: %(default)s, BERT-base's in Table 7; docs/tables/congen.sh has the others)"
    parser = ArgumentParser(__doc__)

    add = parser.add_argument_group("models").add_argument
    teacher = "princeton-nlp/unsup-simcse-roberta-large"
    add("--teacher", default=teacher, help=f"folder or Hub name {shown}")
    text = "instead of --teacher: its embeddings of the training texts, .npy of floats [n, D]"
    add("--teacher-embeddings", metavar="FILE", help=text)
    add("--student", help="folder or Hub name (default: the teacher, cut to --student-layers)")
    add("--student-layers", help="keep only these layers, counted from 0, as in 1,3,5")
    text = "student pooling (default: the teacher's if cut from it, else its folder's, else mean)"
    add("--pooling", choices=POOLINGS, help=text)
    add("--teacher-pooling", choices=POOLINGS, help="(default: its folder's, else mean)")
    text = "of the student (default: its folder's; 0 if it is cut)"
    add("--dropout", type=in_range(float, 0, 0.99), help=text)

    add = parser.add_argument_group("data").add_argument
    text = f"sentences or a .csv of triplets {shown}"
    add("--train", default="nli_for_simcse.csv", help=text)
    text = "TSV with both views of each sentence, instead of --train (default: words are deleted)"
    add("--pairs", help=text)
    add("--dev", help="scored pairs (TSV) that choose the best student (default: STS-B dev)")

    add = parser.add_argument_group("method").add_argument
    starts = ("random", "identity")
    add("--head", choices=starts, default="random", help=f"initial weights of the head {section}")
    text = "weight of control; generalize has the rest (default: %(default)s; paper Table 5)"
    add("--alpha", type=in_range(float, 0, 1), default=0.5, help=text)
    add("--epochs", type=positive_int, default=20, help=section)
    add("--batch-size", type=in_range(int, 2), default=128, help=section)
    add("--lr", type=positive_float, default=5e-5, help=f"peak learning rate {table_7}")
    add("--teacher-temperature", type=positive_float, default=0.05, help=f"tau^T {table_7}")
    names = ("--student-temperature", "--temperature")
    add(*names, type=positive_float, default=0.07, help=f"tau^S {table_7}")
    add("--queue-size", type=in_range(int, 2), default=65536, help=f"K, at most all {table_7}")
    text = "epochs without a better dev score that end training; 0: never (default: %(default)s)"
    add("--patience", type=in_range(int, 0), default=7, help=text)

    add = parser.add_argument_group("run").add_argument
    add("--output", default="runs/congen", help=f"folder for everything {shown}")
    add("--max-steps", type=positive_int, default=10**9, help="at most")
    add("--max-length", type=in_range(int, 3), default=128, help=f"of a training text {shown}")
    add("--eval-steps", type=positive_int, default=512, help=f"steps between dev scores {shown}")
    add("--seed", type=in_range(int, 0), default=0, help=shown)
    add("--group-by-length", action="store_true", help="batches of texts of similar length")
    add("--device", choices=sorted({"cpu", device}), default=device, help=f"where to run {shown}")
    text = "(default: bf16 on a GPU that has it, else fp32)"
    add("--precision", choices=("fp32", "bf16"), help=text)
    return parser.parse()


def read_text_pairs(path):
    """A file of two tab-separated columns -> [[text, text]]. Raises UserError."""

    def parse(line):
        texts = [field.strip() for field in line.split("\t")]
        if len(texts) != 2 or not all(texts):
            raise ValueError(f"{len(texts)} tab-separated columns, or an empty one")
        return texts

    form = "each line has two tab-separated columns, two views or translations of a text"
    return list(read_rows(path, parse, form))


def run_distill(first_views, second_views, dev_pairs, run, args):
    """The run: loads, trains and scores."""
    student = load_untrained_student(args)
    if args.teacher_embeddings:
        targets = read_embeddings(args.teacher_embeddings, len(first_views))
    else:
        teacher = load_encoder(args.teacher, args.teacher_pooling, device=args.device)
        run.scores["teacher"] = {"dev": spearman(embed, teacher, dev_pairs, teacher_embeddings)}
        targets = teacher_embeddings(embed, teacher, first_views, args.max_length, args.precision)
        del teacher  # frees GPU memory
    run.scores["student before"] = {"dev": spearman(embed, student, dev_pairs)}
    outcome = distill(student, first_views, second_views, targets, dev_pairs, run, args)
    best = load_encoder(run.folder, device=args.device)
    how = "given by --pairs" if args.pairs else "by word deletion"
    card = f"Distilled by `congen.py` (ConGen, Findings of EMNLP 2022), alpha {args.alpha}, "
    card += f"second views {how}."
    run.finish(*outcome, "best student", {"dev": spearman(embed, best, dev_pairs)}, card)


def main():
    args = parse_args()
    dev_pairs = read_dev(args.dev)
    if args.pairs:
        first_views, second_views = map(list, zip(*read_text_pairs(args.pairs)))
    else:
        first_views, second_views = read_sentences(resolve_data(args.train)), None
    texts = [dev_pairs, first_views, second_views or []]
    run = Run(run_settings(args, [__file__], texts), args, "distill")
    if not run.is_finished:
        run_distill(first_views, second_views, dev_pairs, run, args)
    print(run.table())


if __name__ == "__main__":
    run_main(main)
