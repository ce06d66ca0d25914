"""DSE, distilled sentence embedding: a cross-encoder's scores of sentence pairs, from embeddings.

Barkan, Razin, Malkiel, Katz, Caciularu, Koenigstein: "Scalable Attentive Sentence-Pair Modeling via
Distilled Sentence Embedding", AAAI 2020, arXiv:1908.05161.

The teacher, a cross-encoder, reads both sentences of a pair at once. The student embeds each
sentence on its own, and a small network compares the two embeddings. Encoder and network together
learn the teacher's logits and the labels. The embeddings of a catalogue are computed once, so that
a new sentence takes one pass of the encoder instead of one pass per pair. A teacher that is a plain
encoder is first fine-tuned on the task, and saved in OUTPUT/teacher; with --alpha 0 there is none.

    y, z --> teacher (cross-encoder) -----------> logits T_yz ----+
                                                                  v
    y --> encoder psi --> u --+                              loss (eq. 2) <-- label R_yz
                              +--> head f (eq. 3) --> S_yz -------^
    z --> encoder psi --> v --+

Departures that change results (docs/dse.md has all of them, next to the authors' code):
  - A student of fewer than four layers concatenates as many vectors as it has layers.
  - On a GPU that has bf16, training and the teacher's logits use it; --precision fp32 does not.
  - Adam corrects the bias of its moments; the authors' does not, so its first steps are larger.
  - The teacher that is kept is the best on dev; in the authors' code, it is the last.
  - A frozen encoder (--freeze-encoder) runs without dropout.

  python dse.py --task mrpc                         the paper's setting, data from the Hub
  python dse.py --task stsb --data FOLDER --teacher MODEL --student-layers 1,3,5
"""

import torch
import torch.nn.functional as F
from torch import nn

# ---- Losses: call them in fp32, outside autocast -------------------------------------------------


def label_loss(logits, labels, task):
    """Section 3.5: l_lbl = -log softmax(S)_R for classes, (S - R)^2 for scores (task "stsb")

    logits S [N, C], C = 1 for scores; labels R [N], class numbers or scores. Returns the mean over
    the batch, a scalar >= 0. The teacher is fine-tuned with the same loss, of T and R, as in the
    authors' code; 3.3 names none.
    """
    if task == "stsb":
        return F.mse_loss(logits[:, 0], labels)
    return F.cross_entropy(logits, labels)


def dse_loss(student_logits, teacher_logits, labels, alpha, task):
    """Eq. 2: L_yz = alpha ||S_yz - T_yz||^2 + (1 - alpha) l_lbl(S_yz, R_yz)

    student_logits S, teacher_logits T [N, C]; labels R [N]; l_lbl, task: see label_loss(); alpha
    from 0 (labels only) to 1 (teacher only). Returns the mean over the batch, a scalar >= 0.
    """
    errors = F.mse_loss(student_logits, teacher_logits, reduction="none")  # [N, C]
    distillation = errors.sum(dim=1).mean()
    return alpha * distillation + (1 - alpha) * label_loss(student_logits, labels, task)


# ---- Model ---------------------------------------------------------------------------------------

LAYERS_POOLED = 4  # section 3.4
HIDDEN = 512  # rows of W in eq. 3
BLOCK = 2048  # pairs scored at a time: 0.4 GB for embeddings of 4,096 dimensions


def pool_last_four(hidden_states, attention_mask):
    """Section 3.4: psi(y) = [mean_t h_t of layer L-3, ..., mean_t h_t of layer L], t not [CLS]

    hidden_states: the outputs of the layers, each [N, L, H], without the embedding layer's; fewer
    than four are all used. attention_mask [N, L]. Returns [N, 4 H]: for each layer the mean over
    the tokens that are not padding, [SEP] included and [CLS] left out.
    """
    mask = attention_mask.unsqueeze(-1).clone()  # [N, L, 1]
    has_one_token = mask.sum(dim=1) == 1  # [N, 1]; it is then not left out
    mask[:, 0] = has_one_token
    count = mask.sum(dim=1)  # [N, 1]
    means = [(layer * mask).sum(dim=1) / count for layer in hidden_states[-LAYERS_POOLED:]]
    return torch.cat(means, dim=1)


def embed(encoder, input_ids, attention_mask):
    """psi of eq. 1: token ids and mask, [N, L] each -> embeddings [N, D] in float32."""
    output = encoder.model(input_ids, attention_mask=attention_mask, output_hidden_states=True)
    layers = output.hidden_states[1:]  # the first is the embedding layer's output
    return pool_last_four(layers, attention_mask).float()


def pair_logits(teacher, input_ids, attention_mask):
    """T of section 3.3: token ids and mask of [CLS] y [SEP] z [SEP], [N, L] each -> logits [N, C].

    teacher: has `model`, a classifier; `order` [C], where its logits have the task's classes;
    `has_sigmoid`, if its folder states one for scores from 0 to 1; `tokenizer`.
    """
    inputs = dict(input_ids=input_ids, attention_mask=attention_mask)
    if "token_type_ids" in teacher.tokenizer.model_input_names:
        is_separator = (input_ids == teacher.tokenizer.sep_token_id).long()
        separators_before = is_separator.cumsum(dim=1) - is_separator  # [N, L]
        inputs["token_type_ids"] = (separators_before > 0) * attention_mask
    logits = teacher.model(**inputs).logits[:, teacher.order].float()
    return 5 * logits.sigmoid() if teacher.has_sigmoid else logits  # scores from 0 to 5


def pair_features(u, v):
    """Eq. 3: h = [u, v, u o v, |u - v|], o the elementwise product. [N, D] twice -> [N, 4 D]."""
    return torch.cat([u, v, u * v, (u - v).abs()], dim=-1)


class SimilarityHead(nn.Module):
    """Eq. 3: f(u, v) = w^T ReLU(W h), u and v of `dimension` D, w with a row for each class."""

    def __init__(self, dimension, classes):
        super().__init__()
        self.W = nn.Linear(4 * dimension, HIDDEN, bias=False)
        self.w = nn.Linear(HIDDEN, classes, bias=False)

    def forward(self, u, v):
        """Embeddings of N pairs, [N, D] twice -> logits [N, C]."""
        return self.w(F.relu(self.W(pair_features(u, v))))

    @torch.no_grad()
    def score_pairs(self, u, v):
        """u [N, D], or one query [D], and v [N, D] -> logits [N, C], without gradients."""
        u = u.expand_as(v)
        return torch.cat([self(*block) for block in zip(u.split(BLOCK), v.split(BLOCK))])


def add_head(encoder, classes):
    """The student: psi, one encoder for both sentences, and its `head` f. Returns the encoder."""
    config = encoder.model.config
    encoder.width = min(LAYERS_POOLED, config.num_hidden_layers) * config.hidden_size  # D
    encoder.head = SimilarityHead(encoder.width, classes)
    return encoder


# ---- Training. Everything above needs only torch and can be copied into other projects -----------

import json
import math
from pathlib import Path

import numpy as np
import transformers
from safetensors.torch import load_file, save
from scipy.stats import pearsonr, spearmanr

from common import Batches, Tokens, UserError, embed_rows, encode, to_device
from common import gold_score, note, one_line_errors, read_rows, read_scored_pairs
from common import Encoder, check_saved, load_encoder, load_transformer, save_encoder
from common import teacher_embeddings
from common import ArgumentParser, Run, download, in_range, read_json, replacing, run_main
from common import run_settings


def warmup_linear(step, total):
    """Factor of the learning rate after `step` steps: rises from 0, then falls linearly to 0.

    As in the authors' code; the paper has no schedule. The rise takes a tenth of `total` steps.
    """
    progress = step / total
    return progress / 0.1 if progress < 0.1 else (1 - progress) / 0.9


def clip_each(parameters):
    """Divide each tensor's gradient by its own norm if that is above 1, as the authors' code does.

    In place, by three calls for all tensors: a loop over them takes as long as the forward pass.
    """
    gradients = [value.grad for value in parameters if value.grad is not None]
    norms = torch._foreach_norm(gradients)
    torch._foreach_clamp_min_(norms, 1.0)
    torch._foreach_div_(gradients, norms)


def finetune_teacher(teacher, pairs, labels, dev_set, run, args):
    """Section 3.3: the teacher learns the labels R [P] of P pairs.

    Returns the best dev score, its step, and the last step.
    """
    tokens = Tokens(teacher, pairs)
    batches = Batches(tokens.lengths, args.batch_size, args.seed, args.group_by_length)
    total = min(args.teacher_epochs * batches.per_epoch, args.max_steps)
    eval_steps = args.eval_steps or batches.per_epoch
    autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16")

    parameters = list(teacher.parameters())
    optimizer = torch.optim.Adam(parameters, lr=args.teacher_lr, fused=True)
    teacher.train()

    # begin() restores `state`, in place, and these values from the last checkpoint, if any.
    state = [teacher, optimizer]
    start, best, best_step = run.begin(total, state, (0, -math.inf, 0))
    for step in range(start, total + 1):  # `step` steps are finished
        run.checkpoint(state, (step, best, best_step))  # at most every five minutes

        # Now and then, before the first step and after the last: score the teacher, keep the best.
        if step % eval_steps == 0 or step == total:
            dev = dev_score(teacher, dev_set, args.task)  # without dropout
            if dev > best:
                best, best_step = dev, step
                save_encoder(teacher, run.folder)
            run.log(step, dev=dev)
            if step == 0:  # before hours of training: can the teacher be read again?
                saved = load_cross_encoder(run.folder, args.task, args.max_length, args.device)
                check_saved(pair_logits, teacher, saved, pairs[:20])
                del saved  # frees memory
            if step == total:
                return best, best_step, step

        # One step.
        rows = batches[step]  # row numbers [N]
        torch.manual_seed(args.seed * 1_000_003 + step)  # a continued run repeats its dropout
        lr = args.teacher_lr * warmup_linear(step, total)
        optimizer.param_groups[0]["lr"] = lr
        with autocast:
            logits = embed_rows(pair_logits, teacher, tokens, rows, args.device)  # T [N, C]
        label = to_device(labels[rows], args.device)  # R [N]
        loss = label_loss(logits, label, args.task)
        optimizer.zero_grad()
        loss.backward()
        clip_each(parameters)
        optimizer.step()
        run.log(step + 1, len(rows), loss=loss, lr=lr)


def distill(student, pairs, labels, targets, dev_set, run, args):
    """Section 3.2: the student learns the labels R [P] and the teacher's logits T [P, C].

    The teacher is not in this loop: it is frozen, and main() has computed T once. With --alpha 0
    there is no teacher: T is zeros, and has no weight. Returns what finetune_teacher() returns.
    """
    first, second = [Tokens(student, sentences) for sentences in zip(*pairs)]
    lengths = first.lengths + second.lengths
    batches = Batches(lengths, args.batch_size, args.seed, args.group_by_length)
    total = min(args.epochs * batches.per_epoch, args.max_steps)
    eval_steps = args.eval_steps or batches.per_epoch
    autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16")

    parameters = list(student.parameters())
    optimizer = torch.optim.Adam(parameters, lr=args.lr, fused=True)
    student.train(not args.freeze_encoder)

    state = [student, optimizer]
    start, best, best_step = run.begin(total, state, (0, -math.inf, 0))
    for step in range(start, total + 1):  # `step` steps are finished
        run.checkpoint(state, (step, best, best_step))  # at most every five minutes

        # Now and then, before the first step and after the last: score the student, keep the best.
        if step % eval_steps == 0 or step == total:
            dev = dev_score(student, dev_set, args.task)
            if dev > best:
                best, best_step = dev, step
                save_student(student, run.folder)
            run.log(step, dev=dev)
            if step == 0:
                saved = load_student(run.folder, args.device)
                check_saved(embed, student, saved, [first for first, _ in pairs[:20]])
                del saved  # frees memory
            if step == total:
                return best, best_step, step

        # One step.
        rows = batches[step]
        torch.manual_seed(args.seed * 1_000_003 + step)
        # The authors' schedule counts batches of 16, two of which make a step: it ends at 56 %.
        lr = args.lr * warmup_linear(step, 2 * total)
        optimizer.param_groups[0]["lr"] = lr
        with autocast:
            u = embed_rows(embed, student, first, rows, args.device)  # psi(y) [N, D]
            v = embed_rows(embed, student, second, rows, args.device)  # psi(z) [N, D]
            logits = student.head(u, v).float()  # S of eq. 1 [N, C]
        target = to_device(targets[rows], args.device)  # T [N, C]
        label = to_device(labels[rows], args.device)  # R [N]
        loss = dse_loss(logits, target, label, args.alpha, args.task)
        optimizer.zero_grad()
        loss.backward()
        clip_each(parameters)
        optimizer.step()
        run.log(step + 1, len(rows), loss=loss, lr=lr)


# ---- Scores --------------------------------------------------------------------------------------


def embed_sentences(student, sentences):
    """n sentences -> embeddings [n, D] on the student's device, for its head."""
    vectors = encode(embed, student, sentences)
    return torch.from_numpy(vectors).to(student.head.w.weight.device)


def logits_of(model, pairs):
    """The logits of a teacher or student for n pairs of sentences: array [n, C]."""
    if not hasattr(model, "head"):
        return encode(pair_logits, model, pairs)
    u, v = [embed_sentences(model, sentences) for sentences in zip(*pairs)]
    return model.head.score_pairs(u, v).cpu().numpy()


def metrics(logits, labels, task):
    """The metrics that Table 1 reports for a task: logits [n, C], labels [n] -> {name: x 100}.

    Pearson and Spearman for scores, accuracy for classes, and F1 of class 1 for MRPC and QQP. All
    are NaN if a logit is not finite.
    """
    if task == "stsb":
        values = {"Pearson": pearsonr(logits.ravel(), labels).statistic}
        values["Spearman"] = spearmanr(logits.ravel(), labels).statistic
    else:
        predicted = logits.argmax(axis=1)
        values = {"accuracy": (predicted == labels).mean()}
    if task in ("mrpc", "qqp"):
        both = (predicted & labels).sum()
        values["F1"] = 2 * both / max(1, predicted.sum() + labels.sum())
    is_finite = np.isfinite(logits).all()
    return {name: 100 * float(value) if is_finite else math.nan for name, value in values.items()}


def scores(model, sets, task):
    """{set: (pairs, R)} -> {"dev accuracy": x 100, ..., "dev": their mean}."""
    row = {}
    for name, (pairs, labels) in sets.items():
        values = metrics(logits_of(model, pairs), labels, task)
        row |= {f"{name} {metric}": value for metric, value in values.items()}
        row[name] = sum(values.values()) / len(values)
    return row


def dev_score(model, dev_set, task):
    """The mean of the task's metrics on the dev set, which chooses the best model."""
    return scores(model, {"dev": dev_set}, task)["dev"]


# ---- Models --------------------------------------------------------------------------------------


def load_cross_encoder(name, task, max_length=512, device="cpu", precision="fp32"):
    """A folder or a name on the Hub -> the teacher, a classifier of pairs; see pair_logits().

    A plain encoder gets a random output layer and is `fresh`: it needs fine-tuning. Raises
    UserError, also for a classifier whose classes are not those of the task.
    """
    teacher = Encoder(name, "mean")
    classes = CLASSES[task]
    with one_line_errors(name, f"it must be a plain encoder, or predict {', '.join(classes)}"):
        stated = read_json(teacher.folder / "config_sentence_transformers.json", {})
        teacher.set_prompts(stated)
        teacher.prompt = teacher.unused = ""  # a prompt is for one text, not for a pair
        modules = read_json(teacher.folder / "modules.json", [dict(path="")])
        place = teacher.folder / modules[0]["path"]
        kind = transformers.AutoModelForSequenceClassification
        report = load_transformer(teacher, place, None, kind, len(classes))
        config = teacher.model.config
        position = {label.lower(): at for label, at in config.label2id.items()}
        order = [position.get(label, at) for at, label in enumerate(classes)]
        if report["mismatched_keys"] or len({*order}) < len(classes):
            raise ValueError("it is a classifier with other classes")
    teacher.max_length = min(max_length, teacher.max_length)  # saved in its folder, too
    teacher.tokenizer.split_special_tokens = True  # "[SEP]" in a sentence is no separator
    teacher.register_buffer("order", torch.tensor(order))
    teacher.fresh = bool(report["missing_keys"])
    if not teacher.fresh and len(classes) > 2 and not position.keys() & set(classes):
        note(f"{name}: its classes have no names; they are taken as {', '.join(classes)}")
    # Where CrossEncoder of sentence-transformers 6, 4 and 2 states the function of its score.
    functions = [stated.get("activation_fn"), getattr(config, "sentence_transformers", "")]
    functions.append(getattr(config, "sbert_ce_default_activation_function", ""))
    teacher.has_sigmoid = task == "stsb" and "Sigmoid" in str(functions)
    if precision == "bf16" and device == "cpu":
        teacher.model.set_attn_implementation("eager")  # whose backward pass is faster there
    return teacher.to(device).eval()


def save_student(student, folder):
    """Write the encoder's folder, with head.safetensors in it."""
    with replacing(folder / "head.safetensors") as new:
        new.write_bytes(save(student.head.state_dict()))
    # sentence-transformers refuses a folder with this module; eval_sts.py calls load_student().
    entry = dict(type="sentence_distillation.LayerPooling", script="dse")
    save_encoder(student, folder, [("LayerPooling", {}, {})], entry)


def load_student(folder, device="cpu"):
    """A folder that a run has written -> the student, in eval mode. Raises UserError."""
    student = load_encoder(folder, "mean")
    file = student.folder / "head.safetensors"
    with one_line_errors(file, "the folder must be a student that dse.py has trained"):
        weights = load_file(file)
        add_head(student, classes=len(weights["w.weight"]))
        student.head.load_state_dict(weights)
    return student.to(device).eval()


# ---- Data ----------------------------------------------------------------------------------------

NLI_CLASSES = ["entailment", "neutral", "contradiction"]
CLASSES = {  # of GLUE's tasks and AllNLI (MNLI and SNLI), in the order of labels and logits
    "mrpc": ["0", "1"],
    "stsb": ["0 to 5"],  # scores
    "qqp": ["0", "1"],
    "qnli": ["entailment", "not_entailment"],
    "mnli": NLI_CLASSES,
    "allnli": NLI_CLASSES,
}
MATCHED = "mnli/validation"
FILES = {  # of tasks that have other sets than train, validation and test
    "mnli": dict(train=["mnli/train"], dev=[MATCHED], mismatched=["mnli_mm/validation"]),
    "allnli": dict(
        train=["mnli/train", "snli/train"], dev=[MATCHED, "snli/validation"], test=["snli/test"]
    ),
}


def read_sets(args):
    """-> {"train": (n pairs of sentences, R [n]), "dev": ..., and the test sets that have labels}.

    From --train and --dev, or the task's files in --data or on the Hub. Raises UserError.
    """
    task = args.task
    files = dict(train=[f"{task}/train"], dev=[f"{task}/validation"], test=[f"{task}/test"])
    sets = {}
    for name, parts in FILES.get(task, files).items():
        if args.train:
            paths = dict(train=[args.train], dev=[args.dev]).get(name, [])
        else:
            paths = [find_file(args.data, part) for part in parts]
        pairs = [pair for path in paths for pair in read_labeled_pairs(path, task)]
        if pairs:
            first, second, labels = zip(*pairs)
            array = np.array(labels, np.float32 if task == "stsb" else np.int64)
            sets[name] = list(zip(first, second)), array
        elif name in ("train", "dev"):
            raise UserError(f"{paths[0]}: it has no labels")
    for name in ("train", "dev"):
        if np.ptp(sets[name][1]) == 0:
            raise UserError(f"{task}: all labels of the {name} pairs are equal")
    return sets


def find_file(folder, part):
    """TASK/SPLIT -> its path in --data, or in SetFit's data sets on the Hub."""
    task, split = part.split("/")
    return Path(folder, f"{part}.jsonl") if folder else download(f"SetFit/{task}", f"{split}.jsonl")


def read_labeled_pairs(path, task):
    """A file of pairs -> [(sentence, sentence, label)], without unlabeled ones. Raises UserError.

    A name ending in .tsv: scored pairs, tab-separated. Any other: a line of JSON each, with text1,
    text2 and label, a class number or a score from 0 to 5; -1 where there is none. A test set may
    be missing.
    """
    if str(path).endswith((".tsv", ".tsv.gz")):
        if task != "stsb":
            raise UserError(f"{path}: scored pairs are for --task stsb; {task} needs JSON lines")
        return read_scored_pairs(path)
    if Path(path).stem == "test" and not Path(path).exists():
        return []
    classes = CLASSES[task]

    def parse(line):
        row = json.loads(line)
        first, second, label = row["text1"].strip(), row["text2"].strip(), row["label"]
        if label == -1 or not first or not second:
            return ()
        if task == "stsb":
            return first, second, gold_score(label)
        if label not in range(len(classes)):
            raise ValueError(f"{label!r} is no class from 0 to {len(classes) - 1}")
        return first, second, label

    form = f"each line is JSON with text1, text2 and label, of {', '.join(classes)}"
    return [row for row in read_rows(path, parse, form) if row]


# ---- Command line --------------------------------------------------------------------------------


def parse_args():
    positive_int = in_range(int, 1)
    positive_float = in_range(float, 1e-9)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shown = "(default: %(default)s)"
    section = "(default: %(default)s; paper §4.1.1)"
    finetuning = "teacher fine-tuning (default: %(default)s; the authors' README)"
    parser = ArgumentParser(__doc__)

    add = parser.add_argument_group("models").add_argument
    text = "a classifier, or a plain encoder to fine-tune (default: %(default)s; paper §3.3)"
    add("--teacher", default="bert-large-uncased", help=text)
    add("--student", help="folder or Hub name (default: --teacher; paper §3.4)")
    add("--student-layers", help="keep only these layers, counted from 0, as in 1,3,5")
    add("--dropout", type=in_range(float, 0, 0.99), help="student dropout (default: its folder's)")

    add = parser.add_argument_group("data").add_argument
    add("--task", choices=CLASSES, help="allnli: MNLI + SNLI (default: mrpc; stsb for --train)")
    text = "folder with mrpc/train.jsonl, ... (default: SetFit's data sets on the Hugging Face Hub)"
    add("--data", help=text)
    text = "pairs instead of a task's: scored pairs (.tsv), or JSON lines as in --data"
    add("--train", help=text)
    add("--dev", help="pairs that choose the best student, with --train")

    add = parser.add_argument_group("method").add_argument
    add("--alpha", type=in_range(float, 0, 1), default=0.5, help=f"weight of the teacher {section}")
    add("--freeze-encoder", action="store_true", help="train only the similarity head (§4.1.1)")
    add("--teacher-only", action="store_true", help="fine-tune and score the teacher (Table 1)")
    add("--teacher-epochs", type=positive_int, default=3, help=finetuning)
    add("--teacher-lr", type=positive_float, default=2e-5, help=finetuning)
    add("--epochs", type=positive_int, default=8, help=section)
    add("--batch-size", type=positive_int, default=32, help=f"in pairs {section}")
    add("--lr", type=positive_float, help="(default: 1e-5 for stsb, else 2e-5; paper §4.1.1)")

    add = parser.add_argument_group("run").add_argument
    add("--output", default="runs/dse", help=f"folder for everything {shown}")
    add("--max-steps", type=positive_int, default=10**9, help="at most, in each stage")
    add("--max-length", type=in_range(int, 3), default=128, help=f"of a text, in tokens {shown}")
    add("--eval-steps", type=positive_int, help="steps between dev scores (default: an epoch)")
    add("--seed", type=in_range(int, 0), default=0, help=shown)
    add("--group-by-length", action="store_true", help="batches of texts of similar length")
    add("--device", choices=sorted({"cpu", device}), default=device, help=f"where to run {shown}")
    text = "(default: bf16 on a GPU that has it, else fp32)"
    add("--precision", choices=("fp32", "bf16"), help=text)

    args = parser.parse()
    if bool(args.train) != bool(args.dev):
        parser.error("give both --train and --dev, or neither")
    args.task = args.task or ("stsb" if args.train else "mrpc")
    args.lr = args.lr or (1e-5 if args.task == "stsb" else 2e-5)
    return args


def load_untrained_student(args):
    """--student, or --teacher without it, cut to --student-layers, with its new head."""
    name = args.student or args.teacher
    options = dict(dropout=args.dropout, precision=args.precision)
    student = load_encoder(name, "mean", args.student_layers, **options)
    student.requires_grad_(not args.freeze_encoder)
    student.max_length = min(args.max_length, student.max_length)  # saved in its folder, too
    return add_head(student, len(CLASSES[args.task])).to(args.device)


def run_teacher(train_set, sets, settings, args):
    """Section 3.3 -> the teacher: a classifier as it is, or a plain encoder that is fine-tuned.

    Fine-tuning is a run with a folder of its own, OUTPUT/teacher.
    """
    options = (args.task, args.max_length, args.device, args.precision)
    teacher = load_cross_encoder(args.teacher, *options)
    if not teacher.fresh:
        return teacher
    run = Run(settings, args, "teacher", is_last=False)
    if not run.is_finished:
        outcome = finetune_teacher(teacher, *train_set, sets["dev"], run, args)
        teacher = load_cross_encoder(run.folder, *options)
        row = scores(teacher, sets, args.task)
        run.finish(*outcome, "teacher", row, card(args), "transformers")
    return load_cross_encoder(run.folder, *options)


def card(args):
    return f"Trained by `dse.py` (DSE, arXiv:1908.05161), task {args.task}."


def main():
    args = parse_args()
    sets = read_sets(args)
    everything = [[pairs, labels.tolist()] for pairs, labels in sets.values()]
    settings = run_settings(args, [__file__], everything)
    run = Run(settings, args, "student")
    if run.is_finished:
        print(run.table())
        return
    pairs, labels = sets.pop("train")
    torch.manual_seed(args.seed)  # both output layers start at random, the student's first
    student = load_untrained_student(args)
    targets = np.zeros((len(pairs), len(CLASSES[args.task])), np.float32)

    if args.alpha > 0 or args.teacher_only:
        teacher = run_teacher((pairs, labels), sets, settings, args)
        run.scores["teacher"] = scores(teacher, sets, args.task)
        if args.teacher_only:
            run.write_card(card(args), "transformers")
            print(run.table())
            return
        key = str(teacher.has_sigmoid)
        targets = teacher_embeddings(pair_logits, teacher, pairs, None, args.precision, key)
        if args.task == "stsb":
            means = f"{targets.mean():.1f}, and of the labels {labels.mean():.1f}"
            note(f"the mean of the teacher's scores is {means}; they should be on one scale")
        teacher.to("cpu")  # frees GPU memory
    outcome = distill(student, pairs, labels, targets, sets["dev"], run, args)
    best = load_student(run.folder, args.device)
    row = scores(best, sets, args.task)
    run.finish(*outcome, "best student", row, card(args), "transformers")
    print(run.table())


if __name__ == "__main__":
    run_main(main)
