"""DSE: a teacher is fine-tuned on scored pairs, and a student learns its logits.

The authors' programs have their own copy of BERT, which reads a folder's pytorch_model.bin. Both
run as they are, through their command lines. Before the student, their program for the teacher's
logits runs, too: ours computes its own. There is no dropout, and what begins at random is given.
436 pairs are 13 batches of 32 and a rest of 20, three times.
"""

import itertools
import shutil
import sys
from functools import partial

import torch

from extras.authors.harness import WIDTH, Program, demo_lines, run_ours, write_small_encoder

REPOSITORY = "microsoft/Distilled-Sentence-Embedding"
COMMIT = "7e3e87bf6d854c45fb9e5fde6695aa9524325ae7"
LIBRARIES = "torch==2.13.0 numpy<2 scipy scikit-learn boto3 requests matplotlib tqdm"

PAIRS, DEV_PAIRS = 436, 100
EPOCHS, STEPS = 3, 42
BATCH = 32
LR = 2e-4
STUDENT_LAYERS, TEACHER_LAYERS = "0,1,3,4,5", "2,5"
LENGTHS = dict(student=32, teacher=64)  # in tokens, to which theirs is padded; nothing is cut

# ---- What both runs read -------------------------------------------------------------------------


def prepare(work):
    """Write pairs in their form and in ours, their order, a student, a teacher and the starts."""
    import transformers

    torch.manual_seed(0)
    texts = []
    (work / "glue").mkdir(exist_ok=True)
    for split, name, count in (("train", "test", PAIRS), ("dev", "dev", DEV_PAIRS)):
        rows = demo_lines(f"{name}.tsv", count)
        texts += rows
        (work / f"{split}.tsv").write_text("\n".join(rows) + "\n")
        glue = ["\t" * 9, *("\t" * 7 + row for row in rows)]  # a header, seven further columns
        (work / "glue" / f"{split}.tsv").write_text("\n".join(glue) + "\n")
    torch.save([torch.randperm(PAIRS).tolist() for _ in range(EPOCHS)], work / "orders.pt")

    for folder, layers in (("student", STUDENT_LAYERS), ("plain", TEACHER_LAYERS)):
        write_small_encoder(work / folder, layers, texts)
        load = transformers.AutoModelForSequenceClassification.from_pretrained
        classifier = load(work / folder, num_labels=1)
        torch.save(classifier.state_dict(), work / folder / "pytorch_model.bin")
    shutil.copytree(work / "plain", work / "teacher", dirs_exist_ok=True)
    torch.nn.init.normal_(classifier.classifier.weight, std=0.3)  # so that logits differ
    classifier.save_pretrained(work / "teacher")
    torch.save(classifier.state_dict(), work / "teacher" / "pytorch_model.bin")

    linear = torch.nn.Linear
    head = torch.nn.Sequential(linear(4 * 4 * WIDTH, 512), linear(512, 1)).state_dict()
    output = linear(WIDTH, 1).state_dict()
    torch.save(dict(head=head, output=output), work / "starts.pt")


def named(head):
    """The state of the head, with numbers of layers -> with our names, W and w."""
    return {name.replace("0.", "W.").replace("1.", "w."): value for name, value in head.items()}


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


def run_program(module, folder, *flags, **options):
    """The main() of a program with the options that all of them have, and these."""
    options |= dict(task_name="sts-b", data_dir="glue", max_seq_length=LENGTHS[folder])
    words = [[f"--{name}", str(value)] for name, value in options.items()]
    sys.argv = [module.__name__, "--do_lower_case", *flags, *itertools.chain(*words)]
    module.main()


def theirs_student(checkout, work):
    losses = adapt(checkout, work)
    import dse_train_runner
    import run_distillation_logits_creator
    from configurable_trainers.dse_configurable_trainer import DSEModelFactory
    from evaluation.evaluators import DSEValidationEvaluator

    options = dict(train_features_path="features", bert_checkpoint_dir="teacher", output_dir=".")
    run_program(run_distillation_logits_creator, "teacher", **options)
    head = torch.load(work / "starts.pt")["head"]
    models, scores = [], []

    def begin(model):
        model.siamese_head.fc_layers.load_state_dict(head)

    DSEModelFactory.create_model = recorded(DSEModelFactory.create_model, models, begin)
    DSEValidationEvaluator.evaluate = recorded(DSEValidationEvaluator.evaluate, scores)
    options = dict(bert_model="student", distillation_logits_path="teacher_logits.pt")
    run_program(dse_train_runner, "student", lr=LR, epochs=EPOCHS, **options)

    head = models[0].siamese_head.fc_layers.state_dict()
    weights = {f"head.{name}": value for name, value in named(head).items()}
    encoder = models[0].dse_model.bert.bert.state_dict()
    weights |= {f"model.{name}": value for name, value in encoder.items()}
    # A step is two batches, whose losses have been divided by two.
    losses = [sum(pair) for pair in zip(losses[::2], losses[1::2], strict=True)]
    dev = 50 * float(scores[-1]["pearson"] + scores[-1]["spearman"])
    return dict(losses=losses, weights=weights, dev=dev)


def theirs_teacher(checkout, work):
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
    run_program(finetune_bert, "teacher", "--do_train", "--do_eval", eval_batch_size=64, **options)
    weights = {f"model.{name}": value for name, value in models[0].state_dict().items()}
    return dict(losses=losses, weights=weights, dev=100 * float(scores[-1]["corr"]))


# ---- Ours ----------------------------------------------------------------------------------------


class BertAdam(torch.optim.Optimizer):
    """Adam, with those of its authors' departures that are undone; called as torch.optim.Adam."""

    def __init__(self, parameters, lr, fused, undone):
        super().__init__(parameters, dict(lr=lr))
        self.undone, self.made = undone, 0

    @torch.no_grad()
    def step(self):
        lr = self.param_groups[0]["lr"]
        self.made += 1
        corrects = "bias correction" not in self.undone
        epsilon = 1e-6 if "epsilon" in self.undone else 1e-8
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            state = self.state[parameter]
            if not state:
                state |= dict(first=torch.zeros_like(gradient), second=torch.zeros_like(gradient))
            first = state["first"].mul_(0.9).add_(gradient, alpha=0.1)
            second = state["second"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            if corrects:
                first = first / (1 - 0.9**self.made)
                second = second / (1 - 0.999**self.made)
            change = first / (second.sqrt() + epsilon)
            is_matrix = parameter.ndim > 1  # neither a bias nor a weight of LayerNorm
            if is_matrix and "weight decay" in self.undone:
                change += 0.01 * parameter
            parameter -= lr * change


def replacements(work, undone):
    """What the two scripts of ours share, by name."""
    orders = torch.load(work / "orders.pt")

    def draw(batches, epoch):
        return [rows.numpy() for rows in torch.tensor(orders[epoch]).split(BATCH)]

    adam = partial(BertAdam, undone=undone)
    return {"common.Batches.draw": draw, "torch.optim.Adam": adam}


def ours_student(work, undone):
    import dse

    start = named(torch.load(work / "starts.pt")["head"])
    one_loss = dse.dse_loss

    class Head(dse.SimilarityHead):
        def __init__(self, dimension, classes):
            super().__init__(dimension, classes)
            if "biases of the head" in undone:
                self.W = torch.nn.Linear(4 * dimension, dse.HIDDEN)
                self.w = torch.nn.Linear(dse.HIDDEN, classes)
            self.load_state_dict({name: start[name] for name in self.state_dict()})

    def mean_of_halves(student, teacher, labels, *rest):
        halves = zip(*(rows.split(BATCH // 2) for rows in (student, teacher, labels)))
        losses = [one_loss(*half, *rest) for half in halves]
        return sum(losses) / len(losses)

    replaced = {"dse.SimilarityHead": Head, **replacements(work, undone)}
    if "two batches of 16" in undone:
        replaced["dse.dse_loss"] = mean_of_halves
    options = ["--teacher", work / "teacher", "--student", work / "student"]
    options += ["--train", work / "train.tsv", "--dev", work / "dev.tsv"]
    options += ["--epochs", EPOCHS, "--lr", LR]
    return run_ours("dse", work, options, replaced)


def ours_teacher(work, undone):
    import dse

    output = torch.load(work / "starts.pt")["output"]
    finetune = dse.finetune_teacher

    def begin(teacher, *rest):
        teacher.model.classifier.load_state_dict(output)
        return finetune(teacher, *rest)

    replaced = {"dse.finetune_teacher": begin, **replacements(work, undone)}
    options = ["--teacher-only", "--teacher", work / "plain"]
    options += ["--train", work / "train.tsv", "--dev", work / "dev.tsv"]
    options += ["--teacher-epochs", EPOCHS, "--teacher-lr", LR]
    return run_ours("dse", work, options, replaced, "load_cross_encoder")


ADAM = {
    "bias correction": "BertAdam does not correct the bias of its moments; Adam does",
    "epsilon": "1e-6; 1e-8",
    "weight decay": "0.01, except for biases and LayerNorm; none",
}
STUDENT = {
    "biases of the head": "W and w have biases; none",
    "two batches of 16": "a step averages the means of two batches, the last of which may be "
    "smaller; one batch of 32",
}
PROGRAMS = {
    "dse": Program(
        "dse_train_runner.py", prepare, theirs_student, ours_student, {**STUDENT, **ADAM}
    ),
    "dse-teacher": Program("finetune_bert.py", prepare, theirs_teacher, ours_teacher, ADAM),
}
