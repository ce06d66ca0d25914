# SPDX-License-Identifier: MIT
"""DSE, distilled sentence embedding: a cross-encoder's scores of sentence pairs, from embeddings.

Barkan, Razin, Malkiel, Katz, Caciularu, Koenigstein: "Scalable Attentive Sentence-Pair Modeling via
Distilled Sentence Embedding", AAAI 2020, arXiv:1908.05161.

The teacher, a cross-encoder, reads both sentences of a pair at once. The student embeds each
sentence on its own, and a small network compares the two embeddings: a catalogue is embedded once.
Encoder and network together learn the teacher's logits and the labels. A teacher that is a plain
encoder is first fine-tuned, and saved in OUTPUT/teacher; with --alpha 0 there is none.

    y, z --> teacher (cross-encoder) -----------> logits T_yz ----+
                                                                  v
    y --> encoder psi --> u --+                              loss (eq. 2) <-- label R_yz
                              +--> head f (eq. 3) --> S_yz -------^
    z --> encoder psi --> v --+

Departures that change results (docs/dse.md has all of them, next to the authors' code):
  - A student of fewer than four layers concatenates as many vectors as it has layers.
  - On a GPU that has bf16, training and the teacher's logits use it; --precision fp32 does not.
  - Adam's moments are not corrected for their start at zero, as in the authors' code.
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
from typing import Literal

import numpy as np
from safetensors.torch import load_file, save
from scipy.stats import pearsonr, spearmanr
from transformers import AutoModelForSequenceClassification as Classifier

from common import Batches, UserError, embed_texts, encode, teacher_embeddings, token_lengths
from common import download, one_line_errors, read_lines, read_scored_pairs
from common import Encoder, load_encoder, replacing, save_encoder
from common import Device, Precision, in_range, positive_float, positive_int
from common import Run, read_options, run_main, run_settings, table

NLI_CLASSES = ["entailment", "neutral", "contradiction"]
CLASSES = {  # of GLUE's tasks and AllNLI (MNLI and SNLI), in the order of labels and logits
    "mrpc": ["0", "1"],
    "stsb": ["0 to 5"],  # scores
    "qqp": ["0", "1"],
    "qnli": ["entailment", "not_entailment"],
    "mnli": NLI_CLASSES,
    "allnli": NLI_CLASSES,
}


# Each line is an option, and its comment the help text: read_options() of common.py reads both.
class Options:
    teacher: str = "bert-large-uncased"  # classifier, or plain encoder to fine-tune; paper §3.3
    student: str = None  # folder or Hub name (default: --teacher; paper §3.4)
    student_layers: str = None  # keep only these layers, counted from 0, as in 1,3,5
    dropout: in_range(float, 0, 0.99) = None  # of the student (default: its folder's)

    task: Literal[tuple(CLASSES)] = None  # allnli: MNLI + SNLI (default: mrpc; stsb for --train)
    data: str = None  # folder with mrpc/train.jsonl, ... (default: SetFit's data sets on the Hub)
    train: str = None  # pairs instead of a task's: scored pairs (.tsv), or JSON lines as in --data
    dev: str = None  # pairs that choose the best student, with --train

    alpha: in_range(float, 0, 1) = 0.5  # weight of the teacher; paper §4.1.1
    freeze_encoder: bool = False  # train only the similarity head; paper §4.1.1
    teacher_only: bool = False  # fine-tune and score the teacher; Table 1
    teacher_epochs: positive_int = 3  # of the teacher's fine-tuning; the authors' README
    teacher_lr: positive_float = 2e-5  # of the teacher's fine-tuning; the authors' README
    epochs: positive_int = 8  # paper §4.1.1 (the code: 5)
    batch_size: positive_int = 32  # pairs; paper §4.1.1 (the code: two batches of 16)
    lr: positive_float = None  # (default: 1e-5 for stsb, else 2e-5; paper §4.1.1)

    output: str = "runs/dse"  # folder for everything
    max_steps: positive_int = 10**9  # at most, in each stage
    max_length: in_range(int, 3) = 128  # tokens of a text, or of a teacher's pair, as in the code
    eval_steps: positive_int = None  # steps between dev scores (default: an epoch, as in the code)
    seed: in_range(int, 0) = 0  # of batches, outputs and dropout; a continued run repeats them
    group_by_length: bool = False  # batches of texts of similar length
    device: Device = None  # (default: cuda if there is one)
    precision: Precision = None  # of training (default: bf16 on a GPU that has it, else fp32)


def uncorrected_adam(parameters, lr):
    """Adam (section 4.1.1), but as in the authors' code: m and v are not divided by 1 - beta^t."""
    optimizer = torch.optim.Adam(parameters, lr=lr, eps=1e-6, fused=True)
    for parameter in parameters:
        late = torch.tensor(1e6, device=parameter.device)  # a step at which torch corrects nothing
        zeros = [torch.zeros_like(parameter) for _ in range(2)]
        optimizer.state[parameter] = dict(step=late, exp_avg=zeros[0], exp_avg_sq=zeros[1])
    return optimizer


def warmup_linear(step, total):
    """Factor of the learning rate after `step` steps: rises from 0, then falls linearly to 0.

    As in the authors' code; the paper has no schedule. The rise takes a tenth of `total` steps.
    """
    progress = step / total
    return progress / 0.1 if progress < 0.1 else (1 - progress) / 0.9


def clip_each(parameters):
    """As in the authors' code: divide each tensor's gradient by its own norm if that is above 1."""
    gradients = [value.grad for value in parameters if value.grad is not None]
    norms = torch._foreach_norm(gradients)  # a loop would take as long as the forward pass
    torch._foreach_clamp_min_(norms, 1.0)
    torch._foreach_div_(gradients, norms)


def finetune_teacher(teacher, pairs, labels, dev_score, run, args):
    """Section 3.3: the teacher learns the labels R [P] of P pairs. dev_score(teacher) -> number."""
    lengths = token_lengths(args, teacher, pairs)
    batches = Batches(len(pairs), args.batch_size, args.seed, lengths)
    total = min(args.teacher_epochs * batches.per_epoch, args.max_steps)
    eval_steps = args.eval_steps or batches.per_epoch
    autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16")

    parameters = list(teacher.parameters())
    optimizer = uncorrected_adam(parameters, args.teacher_lr)
    teacher.train()

    state = [teacher, optimizer]
    start, _ = run.begin(total, state)  # from the last checkpoint, if there is one
    for step in range(start, total + 1):  # `step` steps are finished
        run.checkpoint(step, state)

        # Now and then, before the first step and after the last: score the teacher, keep the best.
        if step % eval_steps == 0 or step == total:
            if run.is_best(step, dev_score(teacher)):
                save_encoder(teacher, run.folder)
            if step == total:
                return

        # One step.
        rows = batches[step]  # row numbers [N]
        torch.manual_seed(args.seed * 1_000_003 + step)
        lr = args.teacher_lr * warmup_linear(step, total)
        optimizer.param_groups[0]["lr"] = lr
        with autocast:
            logits = embed_texts(pair_logits, teacher, [pairs[row] for row in rows])  # T [N, C]
        label = torch.from_numpy(labels[rows]).to(args.device)  # R [N]
        loss = label_loss(logits, label, args.task)
        optimizer.zero_grad()
        loss.backward()
        clip_each(parameters)
        optimizer.step()
        run.log(step + 1, loss=loss, lr=lr)


def distill(student, pairs, labels, targets, dev_score, run, args):
    """Section 3.2: the student learns the labels R [P] and the teacher's logits T [P, C].

    The teacher is not in this loop: it is frozen, and main() has computed T once. With --alpha 0
    there is no teacher: T is zeros, and has no weight.
    """
    lengths = token_lengths(args, student, *zip(*pairs))
    batches = Batches(len(pairs), args.batch_size, args.seed, lengths)
    total = min(args.epochs * batches.per_epoch, args.max_steps)
    eval_steps = args.eval_steps or batches.per_epoch
    autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16")

    parameters = list(student.parameters())
    optimizer = uncorrected_adam(parameters, args.lr)
    student.train(not args.freeze_encoder)

    state = [student, optimizer]
    start, _ = run.begin(total, state)
    for step in range(start, total + 1):  # `step` steps are finished
        run.checkpoint(step, state)

        # Now and then, before the first step and after the last: score the student, keep the best.
        if step % eval_steps == 0 or step == total:
            if run.is_best(step, dev_score(student)):
                save_student(student, run.folder)
            if step == total:
                return

        # One step.
        rows = batches[step]
        first, second = zip(*[pairs[row] for row in rows])  # y and z, N sentences each
        torch.manual_seed(args.seed * 1_000_003 + step)
        # The authors' schedule counts batches of 16, two of which make a step: it ends at 56 %.
        lr = args.lr * warmup_linear(step, 2 * total)
        optimizer.param_groups[0]["lr"] = lr
        with autocast:
            u = embed_texts(embed, student, first)  # psi(y) [N, D]
            v = embed_texts(embed, student, second)  # psi(z) [N, D]
            logits = student.head(u, v).float()  # S of eq. 1 [N, C]
        target = torch.from_numpy(targets[rows]).to(args.device)  # T [N, C]
        label = torch.from_numpy(labels[rows]).to(args.device)  # R [N]
        loss = dse_loss(logits, target, label, args.alpha, args.task)
        optimizer.zero_grad()
        loss.backward()
        clip_each(parameters)
        optimizer.step()
        run.log(step + 1, loss=loss, lr=lr)


# ---- Scores --------------------------------------------------------------------------------------


def logits_of(model, pairs):
    """The logits of a teacher or student for n pairs of sentences: array [n, C]."""
    if not hasattr(model, "head"):
        return encode(pair_logits, model, pairs)
    vectors = [encode(embed, model, sentences) for sentences in zip(*pairs)]
    u, v = [torch.from_numpy(array).to(model.model.device) for array in vectors]
    return model.head.score_pairs(u, v).cpu().numpy()


def metrics(logits, labels, task):
    """Table 1's, NaN if a logit is not finite: logits [n, C], labels [n] -> {name: x 100}."""
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
    """{set: (pairs, R)} -> {"dev accuracy": x 100, ..., "dev": their mean, which chooses}."""
    row = {}
    for name, (pairs, labels) in sets.items():
        values = metrics(logits_of(model, pairs), labels, task)
        row |= {f"{name} {metric}": value for metric, value in values.items()}
        row[name] = sum(values.values()) / len(values)
    return row


# ---- Models --------------------------------------------------------------------------------------


def load_cross_encoder(name, task, max_length=512, device="cpu"):
    """A folder or a name on the Hub -> the teacher, a classifier of pairs; see pair_logits().

    A plain encoder gets a random output layer and is `fresh`: it needs fine-tuning.
    """
    classes = CLASSES[task]
    with one_line_errors(name, f"it must be a plain encoder, or predict {', '.join(classes)}"):
        teacher = Encoder(name, Classifier, num_labels=len(classes))
        config = teacher.model.config
        position = {label.lower(): at for label, at in config.label2id.items()}
        order = [position.get(label, at) for at, label in enumerate(classes)]
        if len({*order}) < len(classes):
            raise ValueError("it is a classifier with other classes")
    teacher.pooling = "mean"  # for save_encoder(); the logits have none
    teacher.prompt, teacher.prompts = "", {}  # a prompt is for one text, not for a pair
    teacher.max_length = min(max_length, teacher.max_length)  # saved in its folder, too
    teacher.tokenizer.split_special_tokens = True  # "[SEP]" in a sentence is no separator
    teacher.register_buffer("order", torch.tensor(order))
    teacher.fresh = bool(teacher.missing)
    # Where CrossEncoder of sentence-transformers 6, 4 and 2 states the function of its score.
    functions = [teacher.settings.get("activation_fn"), config.to_dict()]
    teacher.has_sigmoid = task == "stsb" and "Sigmoid" in str(functions)
    return teacher.to(device).eval()


def save_student(student, folder):
    """Write the encoder's folder, with head.safetensors in it."""
    # sentence-transformers refuses a folder with this module; eval_sts.py calls load_student().
    further = dict(type="sentence_distillation.LayerPooling", script="dse")
    save_encoder(student, folder, [("LayerPooling", {}, {})], **further)
    with replacing(folder / "head.safetensors") as new:
        new.write_bytes(save(student.head.state_dict()))


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

MATCHED = "mnli/validation"
FILES = {  # of tasks that have other sets than train, validation and test
    "mnli": dict(train=["mnli/train"], dev=[MATCHED], mismatched=["mnli_mm/validation"]),
    "allnli": dict(
        train=["mnli/train", "snli/train"], dev=[MATCHED, "snli/validation"], test=["snli/test"]
    ),
}


def read_sets(args):
    """-> {"train": (n pairs of sentences, R [n]), "dev": ..., and test sets that have labels}."""
    task = args.task
    files = dict(train=[f"{task}/train"], dev=[f"{task}/validation"], test=[f"{task}/test"])
    sets = {}
    for name, parts in FILES.get(task, files).items():
        if args.train:
            paths = dict(train=[args.train], dev=[args.dev]).get(name, [])
        elif args.data:
            paths = [Path(args.data, f"{part}.jsonl") for part in parts]
        else:
            splits = map(Path, parts)  # TASK/SPLIT
            advice = "give --data, or --train and --dev"
            paths = [download(f"SetFit/{x.parent}", f"{x.name}.jsonl", advice) for x in splits]
        pairs = [pair for path in paths for pair in read_labeled_pairs(path, task)]
        if pairs:
            first, second, labels = zip(*pairs)
            array = np.array(labels, np.float32 if task == "stsb" else np.int64)
            sets[name] = list(zip(first, second)), array
        elif name in ("train", "dev"):
            raise UserError(f"{paths[0]}: it has no labels")
        if name in ("train", "dev") and np.ptp(sets[name][1]) == 0:
            raise UserError(f"{paths[0]}: all labels are equal")
    return sets


def read_labeled_pairs(path, task):
    """A file of pairs -> [(sentence, sentence, label)], without unlabeled ones. Raises UserError.

    .tsv: scored pairs. Any other: JSON lines with text1, text2 and label, a class number, a score
    from 0 to 5, or -1 where there is none. A test set may be missing.
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
        if not 0 <= label <= (5 if task == "stsb" else len(classes) - 1):
            raise ValueError(f"{label!r} is no label")
        return first, second, label

    form = f"each line is JSON with text1, text2 and label, of {', '.join(classes)}"
    return [pair for pair in read_lines(path, parse, form) if pair]


# ---- Command line --------------------------------------------------------------------------------


def load_untrained_student(args):
    """--student, or --teacher without it, cut to --student-layers, with its new head."""
    name = args.student or args.teacher
    options = dict(dropout=args.dropout, device=args.device, precision=args.precision)
    student = load_encoder(name, "mean", args.student_layers, **options)
    student.requires_grad_(not args.freeze_encoder)
    student.max_length = min(args.max_length, student.max_length)  # saved in its folder, too
    return add_head(student, len(CLASSES[args.task])).to(args.device)


def run_teacher(train_set, sets, dev_score, settings, args):
    """Section 3.3 -> a classifier as it is, or a plain encoder, fine-tuned by a run of its own."""
    options = (args.task, args.max_length, args.device)
    teacher = load_cross_encoder(args.teacher, *options)
    if not teacher.fresh:
        return teacher
    run = Run(settings, args, "teacher", is_last=False)
    if not run.is_finished:
        finetune_teacher(teacher, *train_set, dev_score, run, args)
        run.finish("teacher", scores(load_cross_encoder(run.folder, *options), sets, args.task))
    return load_cross_encoder(run.folder, *options)


def main():
    args = read_options(Options, __doc__)
    if bool(args.train) != bool(args.dev):
        raise UserError("give both --train and --dev, or neither")
    args.task = args.task or ("stsb" if args.train else "mrpc")
    args.lr = args.lr or (1e-5 if args.task == "stsb" else 2e-5)
    sets = read_sets(args)
    texts = [[*pairs, *labels.tolist()] for pairs, labels in sets.values()]
    settings = run_settings(args, [__file__], texts)
    run = Run(settings, args, "student")
    pairs, labels = train_set = sets.pop("train")

    def dev_score(model):  # chooses the best
        return scores(model, {"dev": sets["dev"]}, args.task)["dev"]

    if not run.is_finished:
        torch.manual_seed(args.seed)  # both output layers start at random, the student's first
        student = load_untrained_student(args)
        targets = np.zeros((len(pairs), len(CLASSES[args.task])), np.float32)
        if args.alpha > 0 or args.teacher_only:
            teacher = run_teacher(train_set, sets, dev_score, settings, args)
            run.scores["teacher"] = scores(teacher, sets, args.task)
            targets = teacher_embeddings(pair_logits, teacher, pairs, None, args.precision)
            del teacher
        if args.teacher_only:
            run.write_card()
        else:
            distill(student, pairs, labels, targets, dev_score, run, args)
            best = load_student(run.folder, args.device)
            run.finish("best student", scores(best, sets, args.task))
    print(table(run.scores))


if __name__ == "__main__":
    run_main(main)
