# SPDX-License-Identifier: MIT
"""DSE: a teacher is fine-tuned on pairs with scores or classes, and a student learns its logits.

The authors' programs have their own copy of BERT, which reads a folder's pytorch_model.bin. Both
run as they are, through their command lines, with the settings of their README: a step has two
batches of 16. Before the student, their program for the teacher's logits runs, too: ours computes
its own. There is no dropout, and what begins at random is given. Losses are those of batches of 16.

STS-B: 436 pairs are 28 batches of 16, the last of four pairs, three times. MNLI: 424 pairs are 27
batches, of which theirs keeps the last one's gradient for the first step of the next epoch.
"""

import itertools
import json
import math
import shutil
import sys
from functools import partial
from typing import NamedTuple

import torch

from extras.authors.harness import (
    REAL,
    WIDTH,
    Program,
    cut_pairs,
    demo_lines,
    run_ours,
    size,
    write_lines,
    write_small_encoder,
)

REPOSITORY = "microsoft/Distilled-Sentence-Embedding"
COMMIT = "7e3e87bf6d854c45fb9e5fde6695aa9524325ae7"
LIBRARIES = "torch==2.13.0 numpy<2 scipy scikit-learn boto3 requests matplotlib tqdm"


class Task(NamedTuple):
    """A task of GLUE, in their words and in ours."""

    name: str  # theirs
    ours: str
    pairs: int
    dev: str  # their name of the dev set
    columns: int  # of their table, before the two sentences
    classes: tuple  # theirs
    order: tuple  # of our classes in theirs


STSB = Task("sts-b", "stsb", size(436, 5749), "dev", 7, classes=("score",), order=(0,))
NLI = ("contradiction", "entailment", "neutral")
PAIRS = size(424, 5736)
MNLI = Task("mnli", "mnli", PAIRS, "dev_matched", 8, classes=NLI, order=(1, 2, 0))
DEV_PAIRS = size(100, 1500)
EPOCHS = size(3, 1)
BATCH, SMALL_BATCH = 32, 16
LR = size(2e-4, 1e-4)
ALPHA = 0.3  # of the teacher's logits; at 0.5, exchanged terms would have the same loss
STUDENT_LAYERS, TEACHER_LAYERS = size("0,1,3,4,5", "0,1,3,5"), "2,5"
# In tokens, to which theirs is padded; of the three, only the second cuts texts of demo/.
LENGTHS = dict(student=size(32, 80), plain=size(24, 128), teacher=size(64, 128))

# ---- What both runs read -------------------------------------------------------------------------


def label_of(score, task):
    """The label of a pair in their table: its score, or a class for low, middle or high ones."""
    if task == STSB or REAL:  # of real data, SNLI's labels
        return score
    return "contradiction" if float(score) < 2 else "neutral" if float(score) < 4 else "entailment"


def prepare(work, task):
    """Write pairs in their form and in ours, their order, a student, a teacher and the starts."""
    import transformers

    import dse

    torch.manual_seed(0)
    texts = []
    files = ("snli-dev", "snli-test") if REAL and task == MNLI else ("test", "dev")
    counts = (task.pairs, DEV_PAIRS)
    for name, file, count in zip(("train", "dev"), files, counts):
        rows = [row.split("\t") for row in demo_lines(f"{file}.tsv", count)]
        texts += [text for row in rows for text in row[:2]]
        glue, lines = [""], []  # a header
        for first, second, score in rows:
            label = label_of(score, task)
            glue.append("\t".join([*[""] * task.columns, first, second, label]))
            value = float(score) if task == STSB else dse.CLASSES["mnli"].index(label)
            lines.append(json.dumps(dict(text1=first, text2=second, label=value)))
        split = dict(train="train", dev="validation")[name]
        write_lines(work / "glue" / f"{task.dev if name == 'dev' else name}.tsv", glue)
        write_lines(work / task.ours / f"{split}.jsonl", lines)
        if task == MNLI and name == "dev":
            write_lines(work / "glue" / "dev_mismatched.tsv", glue)
            write_lines(work / "mnli_mm" / "validation.jsonl", lines)
    torch.save([torch.randperm(task.pairs).tolist() for _ in range(EPOCHS)], work / "orders.pt")

    classes = len(task.classes)
    for folder, layers in (("student", STUDENT_LAYERS), ("plain", TEACHER_LAYERS)):
        write_small_encoder(work / folder, layers, texts)
        load = transformers.AutoModelForSequenceClassification.from_pretrained
        classifier = load(work / folder, num_labels=classes)
        torch.save(classifier.state_dict(), work / folder / "pytorch_model.bin")
    shutil.copytree(work / "plain", work / "teacher", dirs_exist_ok=True)
    torch.nn.init.normal_(classifier.classifier.weight, std=0.3)  # so that logits differ
    if task == MNLI:
        classifier.config.id2label = dict(enumerate(NLI))
        classifier.config.label2id = {name: at for at, name in enumerate(NLI)}
    classifier.save_pretrained(work / "teacher")
    torch.save(classifier.state_dict(), work / "teacher" / "pytorch_model.bin")

    linear = torch.nn.Linear
    head = torch.nn.Sequential(linear(4 * 4 * WIDTH, 512), linear(512, classes)).state_dict()
    output = linear(WIDTH, classes).state_dict()
    torch.save(dict(head=head, output=output), work / "starts.pt")


def our_head(head, task):
    """The state of the head, with numbers of layers -> with our names, W and w, and our classes."""
    named = {name.replace("0.", "W.").replace("1.", "w."): value for name, value in head.items()}
    ordered = {name: named[name][list(task.order)] for name in named if name.startswith("w.")}
    return named | ordered


# ---- Theirs --------------------------------------------------------------------------------------


def adapt(checkout, work):
    """Import from the checkout, fix the order of pairs -> list to which every loss is appended."""
    sys.path.insert(0, str(checkout))
    orders = iter(torch.load(work / "orders.pt"))
    torch.utils.data.RandomSampler.__iter__ = lambda sampler: iter(next(orders))
    losses = []
    backward = torch.Tensor.backward

    def record(loss):
        losses.append(loss.item())
        backward(loss)

    torch.Tensor.backward = record
    return losses


def recorded(function, results, change=lambda result: None):
    """A function that changes the result in place and appends it to `results`."""

    def call(*rest, **options):
        result = function(*rest, **options)
        change(result)
        results.append(result)
        return result

    return call


def run_program(module, task, folder, *flags, **options):
    """The main() of a program with the options that all of them have, and these."""
    options |= dict(task_name=task.name, data_dir="glue", max_seq_length=LENGTHS[folder])
    words = [[f"--{name}", str(value)] for name, value in options.items()]
    sys.argv = [module.__name__, "--do_lower_case", *flags, *itertools.chain(*words)]
    module.main()


def made(losses):
    """Without the loss of a last batch that no step takes: steps take two."""
    return losses[: len(losses) // 2 * 2]


def theirs_student(checkout, work, task):
    losses = adapt(checkout, work)
    import dse_train_runner
    import run_distillation_logits_creator
    from configurable_trainers.dse_configurable_trainer import DSEModelFactory
    from evaluation.evaluators import DSEValidationEvaluator
    from evaluation.metrics import TopKAccuracyWithLogits

    def accuracy(metric, logits, labels):  # theirs calls a method of tensors on arrays, and fails
        return (logits.argmax(axis=1) == labels).mean().item(), len(labels)

    TopKAccuracyWithLogits._calc_metric = accuracy
    options = dict(train_features_path="features", bert_checkpoint_dir="teacher", output_dir=".")
    run_program(run_distillation_logits_creator, task, "teacher", **options)
    head = torch.load(work / "starts.pt")["head"]
    models, scores = [], []

    def begin(model):
        model.siamese_head.fc_layers.load_state_dict(head)

    DSEModelFactory.create_model = recorded(DSEModelFactory.create_model, models, begin)
    DSEValidationEvaluator.evaluate = recorded(DSEValidationEvaluator.evaluate, scores)
    options = dict(bert_model="student", distillation_logits_path="teacher_logits.pt")
    options |= dict(lr=LR, epochs=EPOCHS, distillation_coeff=ALPHA)
    sizes = ["--fc_dims", "512", str(len(task.classes))]
    run_program(dse_train_runner, task, "student", *sizes, **options)

    head = models[0].siamese_head.fc_layers.state_dict()
    weights = {f"head.{name}": value for name, value in our_head(head, task).items()}
    encoder = models[0].dse_model.bert.bert.state_dict()
    weights |= {f"model.{name}": value for name, value in encoder.items()}
    metrics = ["pearson", "spearman"] if task == STSB else ["mm_accuracy"]
    dev = 100 * sum(float(scores[-1][name]) for name in metrics) / len(metrics)
    # A step is two batches, whose losses have been divided by two.
    return dict(losses=[2 * loss for loss in made(losses)], weights=weights, dev=dev)


def theirs_teacher(checkout, work, task):
    losses = adapt(checkout, work)
    import finetune_bert
    from finetune_bert import BertForSequenceClassification as Classifier

    output = torch.load(work / "starts.pt")["output"]
    models, scores = [], []

    def begin(model):
        model.classifier.load_state_dict(output)

    Classifier.from_pretrained = recorded(Classifier.from_pretrained, models, begin)
    finetune_bert.compute_metrics = recorded(finetune_bert.compute_metrics, scores)
    options = dict(bert_model="plain", learning_rate=LR, num_train_epochs=EPOCHS, output_dir="out")
    options |= dict(train_batch_size=BATCH, gradient_accumulation_steps=2, eval_batch_size=64)
    run_program(finetune_bert, task, "plain", "--do_train", "--do_eval", **options)
    weights = {}
    for name, value in models[0].state_dict().items():
        is_output = name.startswith("classifier.")
        weights[f"model.{name}"] = value[list(task.order)] if is_output else value
    dev = 100 * float(scores[-1]["corr" if task == STSB else "acc"])
    return dict(losses=[2 * loss for loss in made(losses)], weights=weights, dev=dev)


# ---- Ours ----------------------------------------------------------------------------------------


class DecayingAdam(torch.optim.Adam):
    """BertAdam's decay of all weights but biases and those of LayerNorm; called as Adam."""

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        matrices = [each for each in group["params"] if each.grad is not None and each.ndim > 1]
        before = [each.clone() for each in matrices]
        super().step()
        # As a factor 1 - rate * 0.01, in fp32, the decay would be inexact by some per cent.
        for parameter, old in zip(matrices, before):
            parameter.sub_(old, alpha=0.01 * group["lr"])


class Losses:
    """Replaces dse.label_loss() or dse.dse_loss(), and calls it; keeps the losses of batches."""

    def __init__(self, loss, undone):
        self.loss, self.undone = loss, undone
        self.kept = []

    def __call__(self, *inputs):
        count = len(inputs[0])
        left_over = max(0, count - BATCH)  # from the last epoch
        starts = sorted({0, *range(left_over, count, SMALL_BATCH)})
        batches = []
        for start, end in itertools.pairwise([*starts, count]):
            rows = [value[start:end] if torch.is_tensor(value) else value for value in inputs]
            batches.append(self.loss(*rows))
        self.kept += [loss.item() for loss in batches]
        if left_over:
            return sum(batches) / 2
        if "two batches of 16" in self.undone:
            return sum(batches) / len(batches)
        return self.loss(*inputs)


def replacements(work, task, undone):
    """What the two scripts of ours share, by name."""
    import common

    orders = torch.load(work / "orders.pt")
    small_batches = math.ceil(task.pairs / SMALL_BATCH)  # of an epoch
    carries = "odd number of batches" in undone

    class Batches(common.Batches):
        def __init__(self, *rest):
            super().__init__(*rest)
            if carries:
                self.per_epoch = small_batches // 2

        def draw(self, epoch):
            batches = list(torch.tensor(orders[epoch]).split(BATCH))
            if carries:
                *batches, _ = batches
            if carries and epoch > 0:
                left_over = torch.tensor(orders[epoch - 1]).split(BATCH)[-1]
                batches[0] = torch.cat([left_over, batches[0]])
            return [rows.numpy() for rows in batches]

    decaying = {"torch.optim.Adam": DecayingAdam} if "weight decay" in undone else {}
    return {"dse.Batches": Batches, **decaying}


def ours_student(work, undone, task):
    import dse

    start = our_head(torch.load(work / "starts.pt")["head"], task)

    class Head(dse.SimilarityHead):
        def __init__(self, dimension, classes):
            super().__init__(dimension, classes)
            if "biases of the head" in undone:
                self.W = torch.nn.Linear(4 * dimension, dse.HIDDEN)
                self.w = torch.nn.Linear(dse.HIDDEN, classes)
            self.load_state_dict({name: start[name] for name in self.state_dict()})

    losses = Losses(dse.dse_loss, undone)
    replaced = {"dse.SimilarityHead": Head, "dse.dse_loss": losses}
    replaced |= replacements(work, task, undone)
    if "odd number of batches" in undone:
        small_batches = EPOCHS * math.ceil(task.pairs / SMALL_BATCH)
        schedule = dse.warmup_linear
        replaced["dse.warmup_linear"] = lambda step, total: schedule(step, small_batches)
    options = ["--task", task.ours, "--data", work, "--alpha", ALPHA]
    options += ["--teacher", work / "teacher", "--student", work / "student"]
    options += ["--epochs", EPOCHS, "--lr", LR]
    outcome = run_ours("dse", work, options, replaced)
    return outcome | dict(losses=made(losses.kept))


def ours_teacher(work, undone, task):
    import dse

    output = torch.load(work / "starts.pt")["output"]
    output = {name: value[list(task.order)] for name, value in output.items()}
    finetune = dse.finetune_teacher

    def begin(teacher, *rest):
        teacher.model.classifier.load_state_dict(output)
        return finetune(teacher, *rest)

    losses = Losses(dse.label_loss, undone)
    replaced = {"dse.finetune_teacher": begin, "dse.label_loss": losses}
    replaced |= replacements(work, task, undone)
    options = ["--task", task.ours, "--data", work, "--teacher-only", "--teacher", work / "plain"]
    options += ["--teacher-epochs", EPOCHS, "--teacher-lr", LR, "--max-length", LENGTHS["plain"]]
    if "cut of a pair" in undone:
        replaced["common.tokenize"] = cut_pairs
    outcome = run_ours("dse", work, options, replaced, "load_cross_encoder")
    return outcome | dict(losses=made(losses.kept))


SHARED = {
    "weight decay": "0.01, except for biases and LayerNorm; none",
}
HALVES = {
    "two batches of 16": "a step averages the means of two batches, the last of which may be "
    "smaller; one batch of 32",
}
ODD = {
    "odd number of batches": "an epoch's last batch waits for the next epoch's first step, and is "
    "half a step of the schedule; it is a step of its own",
}
CUT = {
    "cut of a pair": "of two cut texts, the first keeps the odd token; the second does",
}
BIASES = {"biases of the head": "W and w have biases; none"}


def program(title, task, theirs, ours, *departures):
    functions = [partial(function, task=task) for function in (prepare, theirs, ours)]
    found = {name: what for group in departures for name, what in group.items()}
    return Program(title, *functions, found)


STUDENT = "dse_train_runner.py", theirs_student, ours_student
TEACHER = "finetune_bert.py", theirs_teacher, ours_teacher
PROGRAMS = {
    "dse": program(STUDENT[0], STSB, *STUDENT[1:], BIASES, HALVES, SHARED),
    "dse-teacher": program(TEACHER[0], STSB, *TEACHER[1:], HALVES, CUT, SHARED),
    "dse-mnli": program(STUDENT[0], MNLI, *STUDENT[1:], BIASES, ODD, SHARED),
    "dse-mnli-teacher": program(TEACHER[0], MNLI, *TEACHER[1:], ODD, CUT, SHARED),
}
