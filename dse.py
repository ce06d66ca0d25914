"""DSE, distilled sentence embedding: a cross-encoder's scores of sentence pairs, from embeddings.

Barkan, Razin, Malkiel, Katz, Caciularu, Koenigstein: "Scalable Attentive Sentence-Pair Modeling via
Distilled Sentence Embedding", AAAI 2020, arXiv:1908.05161.

The teacher, a cross-encoder, reads both sentences of a pair at once. The student embeds each
sentence on its own, and a small network compares the two embeddings. Encoder and network together
learn the teacher's logits and the labels. The embeddings of a catalogue are computed once, so that
a new sentence takes one pass of the encoder instead of one pass per pair. A teacher that is a plain
encoder is first fine-tuned on the task, and saved in OUTPUT/teacher.

    y, z --> teacher (cross-encoder) -----------> logits T_yz ----+
                                                                  v
    y --> encoder psi --> u --+                              loss (eq. 2) <-- label R_yz
                              +--> head f (eq. 3) --> S_yz -------^
    z --> encoder psi --> v --+

Departures that change results (docs/dse.md has all of them, next to the authors' code):
  - A student of fewer than four layers concatenates as many vectors as it has layers.
  - On a GPU that has bf16, training and the teacher's logits use it (--precision fp32).
  - The learning rate is constant; in the authors' code it rises, then falls, for both models.
  - The teacher, too, is the best on dev, and all gradients together are clipped at norm 1.
  - A frozen encoder (--freeze-encoder) runs without dropout.
  - A batch has pairs of similar length (--shuffle: random ones).

  python dse.py --task mrpc                         the paper's setting, data from the Hub
  python dse.py --task stsb --glue FOLDER --teacher MODEL --student-layers 1,3,5
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

# ---- Losses --------------------------------------------------------------------------------------


def dse_loss(student_logits, teacher_logits, labels, alpha, task):
    """Eq. 2: L_yz = alpha ||S_yz - T_yz||^2 + (1 - alpha) l_lbl(S_yz, R_yz)

    with section 3.5's l_lbl = -log softmax(S)_R for classes, (S - R)^2 for scores (task "stsb").
    student_logits S and teacher_logits T [N, C], C = 1 for scores; labels R [N], class numbers or
    scores; alpha from 0, the labels alone, to 1, the teacher alone. Returns the mean over the
    batch, a scalar >= 0.
    """
    distillation = (student_logits - teacher_logits).square().sum(dim=1).mean()
    if task == "stsb":
        label = (student_logits[:, 0] - labels).square().mean()
    else:
        label = F.cross_entropy(student_logits, labels)
    return alpha * distillation + (1 - alpha) * label


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
    mask[:, 0] = 0
    tokens = mask.sum(dim=1)  # [N, 1]
    means = [(layer * mask).sum(dim=1) / tokens for layer in hidden_states[-LAYERS_POOLED:]]
    return torch.cat(means, dim=1)


def embed(encoder, input_ids, attention_mask):
    """psi of eq. 1: token ids and mask, [N, L] each -> embeddings [N, D] in float32."""
    output = encoder.model(input_ids, attention_mask, output_hidden_states=True)
    layers = output.hidden_states[1:]  # the first is the embedding layer's output
    return pool_last_four(layers, attention_mask).float()


def pair_logits(teacher, input_ids, attention_mask):
    """T of section 3.3: token ids and mask of [CLS] y [SEP] z [SEP], [N, L] each -> logits [N, C].

    teacher: has `model`, a classifier; `order`, the task's classes among its logits; `tokenizer`.
    """
    inputs = dict(input_ids=input_ids, attention_mask=attention_mask)
    if "token_type_ids" in teacher.tokenizer.model_input_names:
        is_separator = input_ids == teacher.tokenizer.sep_token_id
        in_second = is_separator.cumsum(dim=1) > is_separator  # a [SEP] precedes the token
        inputs["token_type_ids"] = in_second * attention_mask
    return teacher.model(**inputs).logits[:, teacher.order].float()


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
    layers = range(1, config.num_hidden_layers + 1)[-LAYERS_POOLED:]  # 0: the embedding layer
    encoder.pooling = dict(layers=[*layers], join="concat", skip_first_token=True)
    encoder.head = SimilarityHead(len(layers) * config.hidden_size, classes)
    return encoder


# ---- Training ------------------------------------------------------------------------------------

import json
from pathlib import Path

import huggingface_hub
import numpy as np
import transformers
from safetensors.torch import load_file, save_file
from scipy.stats import pearsonr, spearmanr

from common import ArgumentParser, DataError, add_run_options, run_main
from common import count, dropout_rate, fraction, positive
from common import gold_score, read_rows, reading, replace_file, resolve
from common import encode, load_encoder, save_encoder, set_dropout, teacher_embeddings
from common import Run, Tokens, autocast, average_gradients, gather, note, own_rows
from common import step_seed, to_device


def finetune(teacher, pairs, labels, run, args):
    """Section 3.3: the teacher learns the labels R [P] of P pairs."""
    tokens = Tokens(teacher, pairs)
    epoch_steps, total = run.count_steps(len(labels), args.batch_size, args.teacher_epochs)
    parameters = list(teacher.parameters())
    optimizer = torch.optim.Adam(parameters, lr=args.teacher_lr, fused=True)
    teacher.train()
    run.begin("teacher", total, [teacher], optimizer, save_teacher)
    for step, rows in run.batches(tokens.lengths, args.batch_size):
        if run.stalled(args.patience * epoch_steps):
            break
        torch.manual_seed(step_seed(args.seed, step))  # of dropout, whatever came before
        with autocast(args.device, args.precision):
            own = pair_logits(teacher, *tokens.batch(own_rows(rows), args.device))  # [n, C]
        logits = gather(own, len(rows))  # T of all processes [N, C]
        label = to_device(labels[rows], args.device)  # R [N]
        loss = dse_loss(logits, logits, label, alpha=0, task=args.task)  # of the labels alone
        optimizer.zero_grad()
        loss.backward()
        average_gradients(parameters)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        run.log(step, len(rows), loss=loss)
        if step % (args.eval_steps or epoch_steps) == 0 or step == total:
            run.evaluate(step)


def distill(student, pairs, labels, targets, run, args):
    """Section 3.2: the student learns P pairs' labels R [P] and the teacher's logits [P, C]."""
    tokens = [Tokens(student, side) for side in zip(*pairs)]
    epoch_steps, total = run.count_steps(len(labels), args.batch_size, args.epochs)
    parameters = list(student.parameters())
    optimizer = torch.optim.Adam(parameters, lr=args.lr, fused=True)
    student.train(not args.freeze_encoder)
    run.begin("student", total, [student], optimizer, save_student)
    lengths = sum(side.lengths for side in tokens)
    for step, rows in run.batches(lengths, args.batch_size):
        if run.stalled(args.patience * epoch_steps):
            break
        torch.manual_seed(step_seed(args.seed, step))
        with autocast(args.device, args.precision):
            u, v = [embed(student, *side.batch(own_rows(rows), args.device)) for side in tokens]
            own = student.head(u, v).float()  # S of eq. 1 [n, C], from psi(y), psi(z) [n, D]
        logits = gather(own, len(rows))  # of all processes [N, C]
        target = to_device(targets[rows], args.device)  # T [N, C]
        label = to_device(labels[rows], args.device)  # R [N]
        loss = dse_loss(logits, target, label, args.alpha, args.task)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(parameters)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        run.log(step, len(rows), loss=loss)
        if step % (args.eval_steps or epoch_steps) == 0 or step == total:
            run.evaluate(step)


def embed_sentences(student, sentences):
    """n sentences -> [n, D] on the student's device, what its head compares."""
    vectors = encode(embed, student, sentences)
    return torch.from_numpy(vectors).to(student.head.w.weight.device)


def logits_of(model, pairs, compare=None):
    """The logits of a teacher or student for n pairs of sentences: array [n, C].

    compare(u, v) -> [n] or [n, C] replaces the student's head.
    """
    if not hasattr(model, "head"):
        return encode(pair_logits, model, pairs)
    u, v = [embed_sentences(model, side) for side in zip(*pairs)]
    return (compare or model.head.score_pairs)(u, v).cpu().numpy()


def metrics(logits, labels, task):
    """The metrics that Table 1 has of a task: logits [n, C], labels [n] -> {name: x 100}.

    Pearson and Spearman for scores, accuracy for classes, and F1 of class 1 for MRPC and QQP.
    """
    if task == "stsb":
        values = {"Pearson": pearsonr(logits.ravel(), labels).statistic}
        values["Spearman"] = spearmanr(logits.ravel(), labels).statistic
    else:
        predicted = logits.argmax(axis=1)
        values = {"accuracy": (predicted == labels).mean() + 0 * logits.sum()}  # NaN stays NaN
    if task in ("mrpc", "qqp"):
        both = (predicted & labels).sum()
        values["F1"] = 2 * both / max(1, predicted.sum() + labels.sum())
    return {name: 100 * float(value) for name, value in values.items()}


def scores(model, sets, task, compare=None):
    """{set: (pairs, R)} -> {"dev accuracy": x 100, ..., "dev": their mean}; see logits_of()."""
    row = {}
    for name, (pairs, labels) in sets.items():
        values = metrics(logits_of(model, pairs, compare), labels, task)
        row |= {f"{name} {metric}": value for metric, value in values.items()}
        row[name] = sum(values.values()) / len(values)
    return row


def load_cross_encoder(name, task):
    """A classifier of pairs, from a folder or the Hub -> the teacher that pair_logits() describes.

    A plain encoder gets a random output layer and is `fresh`: it needs fine-tuning. Raises
    DataError, also for a classifier with other classes than the task.
    """
    teacher = load_encoder(name, "mean")  # which checks all but the output layer
    teacher.prompt = ""
    classes = TASKS[task].classes
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    options = dict(num_labels=len(classes), ignore_mismatched_sizes=True)
    with reading(name, f"it must be a plain encoder, or predict {', '.join(classes)}"):
        model, report = load(resolve(name, model=True), output_loading_info=True, **options)
        labels = {label.lower(): at for label, at in model.config.label2id.items()}
        teacher.order = [labels.get(label, at) for at, label in enumerate(classes)]
        if report["mismatched_keys"] or len({*teacher.order}) < len(classes):
            raise ValueError("it is a classifier with other classes")
    teacher.model = model.float()
    teacher.fresh = bool(report["missing_keys"])
    return teacher


def save_teacher(teacher, folder):
    save_encoder(teacher, folder / "teacher")


def save_student(student, folder):
    """Write the encoder's folder, and head.safetensors in it."""
    replace_file(folder / "head.safetensors", partial(save_file, student.head.state_dict()))
    save_encoder(student, folder)


def load_student(folder, device="cpu"):
    """A folder that a run has written -> the student, in eval mode. Raises DataError."""
    student = load_encoder(folder, several=True)
    file = resolve(folder, model=True) / "head.safetensors"
    with reading(file, "the folder must be a student that dse.py has trained"):
        weights = load_file(file)
        add_head(student, classes=len(weights["w.weight"]))
        student.head.load_state_dict(weights)
    return student.to(device).eval()


HUB_COLUMNS = ["text1", "text2", "label"]  # of SetFit's data sets, JSON lines
NO_LABEL = ("", "-", "-1", "-1.0")  # "-": the annotators do not agree; -1: hidden


class Task(NamedTuple):
    """One of GLUE's tasks, or AllNLI (MNLI and SNLI)."""

    files: dict  # {set: its files in GLUE's folder, without .tsv, separated by spaces}
    columns: list  # of the first sentence, the second sentence, and the label
    classes: list  # names in the order of the logits; for scores one, their range


def splits(folder):
    return {split: f"{folder}/{split}" for split in ("train", "dev", "test")}


BINARY = ["0", "1"]
NLI = ["entailment", "neutral", "contradiction"]
QNLI = ["entailment", "not_entailment"]
NLI_COLUMNS = ["sentence1", "sentence2", "gold_label"]
MNLI = dict(train="MNLI/train", dev="MNLI/dev_matched", mismatched="MNLI/dev_mismatched")
ALLNLI = dict(train="MNLI/train SNLI/train", dev="MNLI/dev_matched SNLI/dev", test="SNLI/test")
TASKS = {
    "mrpc": Task(splits("MRPC"), ["#1 String", "#2 String", "Quality"], BINARY),
    "stsb": Task(splits("STS-B"), ["sentence1", "sentence2", "score"], ["0 to 5"]),
    "qqp": Task(splits("QQP"), ["question1", "question2", "is_duplicate"], BINARY),
    "qnli": Task(splits("QNLI"), ["question", "sentence", "label"], QNLI),
    "mnli": Task(MNLI, NLI_COLUMNS, NLI),
    "allnli": Task(ALLNLI, NLI_COLUMNS, NLI),
}


def read_task(folder, task):
    """-> {"train": (n pairs of sentences, R [n]), "dev": ..., and the test sets that have labels}.

    R: class numbers or scores. folder: GLUE's, which has MRPC/train.tsv and so on, or None for the
    Hub. Raises DataError.
    """
    sets = {}
    for split, names in TASKS[task].files.items():
        rows = []
        for name in names.split():
            rows += read_pairs(glue_file(folder, name), task)
        if rows:
            pairs, labels = zip(*rows)
            kind = np.float32 if task == "stsb" else np.int64
            sets[split] = pairs, np.array(labels, kind)
    if np.ptp(sets["train"][1]) == 0:
        raise DataError(f"{folder or 'the Hub'}: all labels of {task}'s training pairs are equal")
    return sets


def glue_file(folder, name):
    """A file of GLUE's folder, or the Hub's copy as JSON lines -> Path. Raises DataError."""
    if folder:
        return Path(folder, f"{name}.tsv")
    task, split = name.lower().replace("-", "").split("/")
    repository = f"SetFit/{task}_mm" if split == "dev_mismatched" else f"SetFit/{task}"
    split = "validation" if split.startswith("dev") else split
    with reading(repository, f"download GLUE and give its folder, which has {name}.tsv, as --glue"):
        file = huggingface_hub.hf_hub_download(repository, f"{split}.jsonl", repo_type="dataset")
    return Path(file)


def read_pairs(path, task):
    """A file of a task -> rows (pair of sentences, class number or score).

    Rows without two sentences and a label, or with another number of columns, are left out. A test
    set may have no label at all, or be missing. DataError, also for a class that `task` lacks.
    """
    is_test = path.stem in ("test", "dev_mismatched")
    if is_test and not path.exists():
        return []
    _, columns, classes = TASKS[task]
    form = f"it must have columns {', '.join(columns)}, labels {', '.join(classes)}"
    if path.suffix == ".jsonl":
        header, columns, classes = None, HUB_COLUMNS, [*map(str, range(len(classes)))]
        form = "a line must be JSON with text1, text2 and label"
    else:
        header = next(read_rows(path, str, form)).split("\t")
    rows = list(read_rows(path, partial(parse, header, columns, classes), form))
    labeled = [row for row in rows if row[1] is not None]
    if not labeled and path.stem != "test":
        raise DataError(f"{path}: no labeled rows; {form}")
    if len(labeled) < len(rows):
        note(f"{path}: incomplete or malformed rows left out: {len(rows) - len(labeled)}")
    return labeled


def parse(header, columns, classes, text):
    """A line -> (pair, class number or score), (pair, None) to leave it out, None for the header.

    header: of a table, None for JSON; classes: as in the file. Raises ValueError.
    """
    cells = text.split("\t")
    if cells == header:
        return None
    row = dict(zip(header, cells)) if header else json.loads(text)
    values = [row.get(name) for name in columns]
    first, second, label = ["" if value is None else str(value).strip() for value in values]
    is_broken = header and len(cells) != len(header)  # by a tab or a line end in a sentence
    if is_broken or label in NO_LABEL or not first or not second:
        return (first, second), None
    (first + second).encode()  # refuses half of a surrogate pair, as in "\ud800"
    value = classes.index(label) if len(classes) > 1 else gold_score(label)
    return (first, second), value


# ---- Command line --------------------------------------------------------------------------------


def parse_args():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument_group("models and data").add_argument
    add("--task", choices=TASKS, default="mrpc", help="allnli: MNLI + SNLI (default: %(default)s)")
    add("--glue", help="folder with MRPC/train.tsv, ... (default: from the Hugging Face Hub)")
    teacher = "a classifier, or a plain encoder to fine-tune (default: %(default)s; 3.3)"
    add("--teacher", default="bert-large-uncased", help=teacher)
    add("--student", help="folder or Hub name (default: --teacher as it is given; 3.4)")
    add("--student-layers", help="keep only these layers, counted from 0, as in 1,3,5")
    add("--dropout", type=dropout_rate, help="of the student (default: its own)")
    add = parser.add_argument_group("method (defaults with a section are the paper's)").add_argument
    alpha = "weight of the teacher's logits in eq. 2, from 0 to 1 (default: %(default)s; 4.1.1)"
    add("--alpha", type=fraction, default=0.5, help=alpha)
    add("--freeze-encoder", action="store_true", help="train only the similarity head (4.1.1)")
    add("--teacher-only", action="store_true", help="fine-tune and score the teacher (Table 1)")
    finetuning = "of the teacher's fine-tuning (default: %(default)s; the authors' README)"
    add("--teacher-epochs", type=count, default=3, help=finetuning)
    add("--teacher-lr", type=positive, default=2e-5, help=finetuning)
    add("--epochs", type=count, default=8, help="(default: %(default)s; 4.1.1)")
    add("--batch-size", type=count, default=32, help="in pairs (default: %(default)s; 4.1.1)")
    add("--lr", type=positive, help="(default: 1e-5 for stsb, else 2e-5; 4.1.1)")
    add_run_options(parser, "runs/dse", max_length=128, eval_steps=None, patience=0)
    demo = dict(task="stsb", batch_size=32, epochs=4, lr=2e-4, eval_steps=40)
    args = parser.parse(**demo, teacher_epochs=2, teacher_lr=1e-4)
    if args.lr is None:
        args.lr = 1e-5 if args.task == "stsb" else 2e-5
    return args


def main():
    args = parse_args()
    run = Run(args)
    sets = read_task(args.glue, args.task)
    pairs, labels = sets.pop("train")
    torch.manual_seed(args.seed)  # both output layers start at random, the student's first
    encoder = load_encoder(args.student or args.teacher, "mean", args.student_layers)
    set_dropout(encoder, args.dropout).requires_grad_(not args.freeze_encoder)
    student = add_head(encoder, len(TASKS[args.task].classes)).to(args.device)
    teacher = load_cross_encoder(args.teacher, args.task).to(args.device)
    for model in (student, teacher):
        model.max_length = min(args.max_length, model.max_length)  # their folders state it, too
    score = partial(scores, task=args.task)
    run.start(score, sets["dev"], teacher=teacher, train=[pairs, labels])
    if args.task == "stsb" and not run.scores and not args.teacher_only:
        run.scores["student before, cosine"] = score(student, sets, compare=F.cosine_similarity)
    if teacher.fresh:
        if "teacher" not in run.finished:
            finetune(teacher, pairs, labels, run, args)
            run.finish()
        teacher = load_cross_encoder(run.folder / "teacher", args.task).to(args.device)
    if "student" not in run.finished:
        run.scores["teacher"] = score(teacher, sets)
        if not args.teacher_only:
            settings = dict(precision=args.precision, what=f"logits {teacher.order}")
            targets = teacher_embeddings(pair_logits, teacher, pairs, **settings)
            distill(student, pairs, labels, targets, run, args)
            run.finish({"student": score(load_student(run.folder, args.device), sets)})
    text = f"Trained by `dse.py` (DSE, arXiv:1908.05161), task: {args.task}."
    run.write_card(text, "text-classification", "transformers")


if __name__ == "__main__":
    run_main(main)
