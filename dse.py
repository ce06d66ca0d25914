"""DSE, distilled sentence embedding: a cross-encoder's scores of sentence pairs, from embeddings.

Barkan, Razin, Malkiel, Katz, Caciularu, Koenigstein: "Scalable Attentive Sentence-Pair Modeling via
Distilled Sentence Embedding", AAAI 2020, arXiv:1908.05161.

The teacher, a cross-encoder, reads both sentences of a pair at once. The student embeds each
sentence by itself, and a small network compares the two embeddings. It learns to give the teacher's
logits and the labels. The embeddings of a catalogue are computed once, so that a new sentence
takes one pass of the encoder instead of one pass for each pair. A teacher that is a plain encoder
is fine-tuned on the task first, and saved in OUTPUT/teacher.

    y, z --> teacher (cross-encoder) -----------> logits T_yz ----+
                                                                  v
    y --> encoder psi --> u --+                              loss (eq. 2) <-- label R_yz
                              +--> head f (eq. 3) --> S_yz -------^
    z --> encoder psi --> v --+

What the paper leaves open, and where this script differs from the paper or the authors' code:
  - A student of fewer than four layers concatenates as many vectors as it has layers: three layers
    of 384 dimensions give embeddings of 1,152.
  - Eq. 3 has no biases, and an embedding no dropout of its own, as in the paper. The authors' code
    has biases, and a dropout of 10 % on each embedding.
  - Two classes have two logits and a softmax, as in section 3.5. In the authors' code the student
    has one logit there, which learns the difference of the teacher's two.
  - Adam has a constant learning rate and no weight decay, and the norm of all gradients together is
    clipped at 1. The authors' BertAdam decays weights by 0.01, has no bias correction, and clips
    each tensor by itself. Its learning rate rises for a fifth of the steps and then falls linearly
    to 56 %: the schedule counts batches of 16, of which two make a step.
  - As in the authors' code, the L2 loss is summed over the classes and averaged over the batch,
    STS-B's scores are used as they are, 0 to 5, and 128 tokens are the maximum of each of the
    student's sentences and of the teacher's pair.
  - A frozen encoder (--freeze-encoder, section 4.1.1) runs without dropout, there with it.
  - Dev is scored after each epoch, by the mean of the task's metrics, and the model before training
    takes part. There F1 decides for two classes (QNLI's too), Pearson for STS-B, else accuracy.
  - The paper leaves the teacher's fine-tuning to BERT's. As in the authors' README, it takes 3
    epochs at 2e-5; here by the same Adam, and the best on dev is kept, there the last. Teacher and
    student are BERT-Large, as in the paper; there bert-large-uncased-whole-word-masking.
  - A batch contains pairs of similar length, there random ones (--shuffle). On a GPU training is in
    bf16 by default, there in fp32 (--precision).
  - Where GLUE's test labels are not public, dev is reported. QQP's rows without two questions are
    left out; the authors' code keeps those with an empty one.
  - Of several processes (torchrun), each draws the dropout of its own pairs in the teacher's
    fine-tuning. The student has none then, unless --dropout is given.

  python dse.py --task mrpc                         the paper's setting, data from the Hub
  python dse.py --task stsb --glue FOLDER --teacher MODEL --student-layers 1,3,5
  python dse.py --demo                              three minutes on a CPU

Table 1: a run for each task, and their average (last columns). --alpha and --freeze-encoder give
the other rows of DSE, --teacher-only --teacher bert-base-uncased that of BERT-Base.
  for task in mnli qqp qnli mrpc stsb; do python dse.py --task $task --output runs/dse-$task; done
  python dse.py --average runs/dse-mnli runs/dse-qqp runs/dse-qnli runs/dse-mrpc runs/dse-stsb
  python dse.py --task mrpc --teacher-only --output runs/bert-mrpc       the teacher alone
Table 2: AllNLI's embeddings in SentEval's tasks, BERT-Large's row, and Spearman of their cosine.
  python dse.py --task allnli --output runs/dse-allnli
  python eval_transfer.py runs/dse-allnli
  python eval_transfer.py bert-large-uncased --pooling concat_last4_no_cls
  python eval_sts.py runs/dse-allnli
Tables 3 and 4, measured on this machine: all-MiniLM-L6-v2, or BERT-Large's shape.
  python benchmark.py --only dse
  python benchmark.py --only dse --random-weights bert-large
"""

import json
import shutil
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

# --------------------------------------------------------------------------------------------------
# Losses
# --------------------------------------------------------------------------------------------------


def label_loss(logits, labels, task):
    """Section 3.5: l_lbl = -log softmax(S)_R for classes, (S - R)^2 for scores (task "stsb").

    logits S [N, C], C = 1 for scores; labels R [N], class numbers or scores. Returns the mean over
    the batch, a scalar >= 0.
    """
    if task == "stsb":
        return (logits[:, 0] - labels).square().mean()
    return F.cross_entropy(logits, labels)


def dse_loss(student_logits, teacher_logits, labels, alpha, task):
    """Eq. 2: L_yz = alpha ||S_yz - T_yz||^2 + (1 - alpha) l_lbl(S_yz, R_yz)

    with the L2 loss on logits and the label loss of section 3.5. student_logits S and
    teacher_logits T [N, C]; labels R [N], class numbers or, for task "stsb", scores; alpha from 0,
    the labels alone, to 1, the teacher alone. Returns the mean over the batch, a scalar >= 0.
    """
    distillation = (student_logits - teacher_logits).square().sum(dim=1).mean()
    label = label_loss(student_logits, labels, task)
    return alpha * distillation + (1 - alpha) * label


# --------------------------------------------------------------------------------------------------
# Model
# --------------------------------------------------------------------------------------------------

LAYERS_POOLED = 4  # section 3.4
HIDDEN = 512  # rows of W in eq. 3
MEMORY = 2**28  # bytes that scoring uses at a time, beside its result
FLOAT_BYTES = 4


def pool_last_four(hidden_states, attention_mask):
    """Section 3.4: psi(y) = [mean_t h_t of layer L-3, ..., mean_t h_t of layer L], t not [CLS]

    hidden_states: the layers' outputs, each [N, L, H], without the embedding layer's; where they
    are fewer than four, all are used. attention_mask [N, L]. Returns [N, 4 H]: of each layer the
    mean over the real tokens, [SEP] included and [CLS] left out.
    """
    mask = attention_mask.clone()
    mask[:, 0] = 0
    mask = mask.unsqueeze(-1)  # [N, L, 1]
    tokens = mask.sum(dim=1)  # [N, 1]
    means = [(layer * mask).sum(dim=1) / tokens for layer in hidden_states[-LAYERS_POOLED:]]
    return torch.cat(means, dim=1)


def pair_features(u, v):
    """Eq. 3: h = [u, v, u o v, |u - v|], o the product by element. [N, D] twice -> [N, 4 D]."""
    return torch.cat([u, v, u * v, (u - v).abs()], dim=-1)


class SimilarityHead(nn.Module):
    """Eq. 3: f(u, v) = w^T ReLU(W h), with C rows in w for the logits of C classes.

    dimension: D, that of an embedding.
    """

    def __init__(self, dimension, classes, hidden=HIDDEN):
        super().__init__()
        self.W = nn.Linear(4 * dimension, hidden, bias=False)
        self.w = nn.Linear(hidden, classes, bias=False)

    def forward(self, u, v):
        """Embeddings of N pairs, [N, D] twice -> logits [N, C]."""
        return self.w(F.relu(self.W(pair_features(u, v))))

    @torch.no_grad()
    def score_pairs(self, u, v, memory=MEMORY):
        """forward() without gradients, in blocks of pairs that take about `memory` bytes."""
        rows = 3  # h, and the parts that it is concatenated of
        block = max(1, memory // (rows * FLOAT_BYTES * self.W.in_features))
        scores = [self(u[i : i + block], v[i : i + block]) for i in range(0, len(u), block)]
        return torch.cat(scores)

    @torch.no_grad()
    def score_matrix(self, u, v, memory=MEMORY):
        """All pairs of [N, D] and [M, D] -> [N, M, C], with about `memory` bytes beside the result.

        W h is the sum of four products, one for each part of h. Those of u and v are computed once
        for each sentence, and W_p (u o v) is (W_p diag(u)) v.
        """
        w_u, w_v, w_product, w_difference = self.W.weight.chunk(4, dim=1)  # each [hidden, D]
        from_u = u @ w_u.T  # [N, hidden]
        from_v = v @ w_v.T  # [M, hidden]
        scores = u.new_empty(len(u), len(v), self.w.out_features)
        rows = 4  # as many embeddings and hidden rows a pair of the block takes below
        block = max(1, memory // (rows * FLOAT_BYTES * (u.shape[1] + len(w_u))))
        for i in range(len(u)):
            for j in range(0, len(v), block):
                part = v[j : j + block]
                hidden = from_v[j : j + block] + part @ (w_product * u[i]).T
                hidden += (part - u[i]).abs() @ w_difference.T
                scores[i, j : j + block] = self.w(F.relu(hidden + from_u[i]))
        return scores

    def score_catalogue(self, query, catalogue, memory=MEMORY):
        """A query [D] and a catalogue [M, D] -> [M, C]."""
        return self.score_matrix(query[None], catalogue, memory)[0]


class Student(nn.Module):
    """S of eq. 1: f(psi(y), psi(z)), one encoder for both sentences, and the similarity head.

    encoder: has `model`, a transformer, and `dimension`, that of what pool_last_four returns.
    """

    def __init__(self, encoder, classes):
        super().__init__()
        self.encoder = encoder
        self.head = SimilarityHead(encoder.dimension, classes)

    def embed(self, input_ids, attention_mask):
        """psi: [N, L], [N, L] -> [N, D]."""
        output = self.encoder.model(input_ids, attention_mask, output_hidden_states=True)
        layers = output.hidden_states[1:]  # the first is the embedding layer's output
        return pool_last_four(layers, attention_mask)


# --------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------

import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common import (
    MINILM,
    DataError,
    Tokens,
    encode,
    replacing,
    resolve,
    table,
    writing,
)
from support import glue
from support.cache import teacher_embeddings
from support.command_line import (
    ArgumentParser,
    add_dropout_option,
    add_run_options,
    count,
    fraction,
    pair_length,
    positive,
    run_main,
    set_dropout,
)
from support.encoder import Encoder, LayerPooling, load_encoder, load_pretrained, move_files
from support.run import Run

MAX_LENGTH = 128  # tokens


def make_optimizer(model, lr):
    parameters = [value for value in model.parameters() if value.requires_grad]
    return torch.optim.Adam(parameters, lr=lr, fused=True)


def finetune(teacher, pairs, labels, evaluation, run, args):
    """Fine-tune the teacher, section 3.3.

    pairs: Tokens of n, both sentences in each row; labels [n] on the device.
    """
    optimizer = make_optimizer(teacher, args.teacher_lr)
    for step in run.steps(
        "teacher",
        pairs.lengths,
        [teacher],
        optimizer,
        dev_score=partial(evaluation.dev_score, teacher.score_pairs),
        save=partial(teacher.save, run.folder / "teacher"),
        epochs=args.teacher_epochs,
        batch_size=args.batch_size,
        patience=args.patience,
    ):
        teacher.train()  # a dev score leaves it in eval mode
        input_ids, attention_mask = pairs.batch(step.own_rows, run.device)  # [n, L]
        with run.autocast():
            logits = teacher(input_ids, attention_mask)  # T [n, C]
        logits = step.gather(logits.float())  # of all processes, [N, C]
        loss = label_loss(logits, labels[step.rows], args.task)
        run.backward(loss, optimizer)
        nn.utils.clip_grad_norm_(teacher.parameters(), 1.0)
        run.step(optimizer)
        step.log(loss=loss)


def distill(student, first, second, targets, labels, evaluation, run, args):
    """Train the student, section 3.2.

    first, second: Tokens of n sentences y and z; targets: the teacher's logits of each pair;
    labels [n] on the device.
    """
    optimizer = make_optimizer(student, args.lr)
    logits_of = partial(score_pairs, student, max_length=args.max_length)
    for step in run.steps(
        "student",
        first.lengths + second.lengths,
        [student],
        optimizer,
        dev_score=partial(evaluation.dev_score, logits_of),
        save=partial(save_student, student, run.folder),
        epochs=args.epochs,
        batch_size=args.batch_size,
        patience=args.patience,
    ):
        student.encoder.train(not args.freeze_encoder)  # a dev score leaves it in eval mode
        with run.autocast():
            u = student.embed(*first.batch(step.own_rows, run.device))  # psi(y) [n, D]
            v = student.embed(*second.batch(step.own_rows, run.device))  # psi(z) [n, D]
            logits = student.head(u, v)  # S [n, C]
        logits = step.gather(logits.float())  # of all processes, [N, C]
        loss = dse_loss(logits, targets[step.rows], labels[step.rows], args.alpha, args.task)
        run.backward(loss, optimizer)
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        run.step(optimizer)
        step.log(loss=loss)


NEW_OUTPUT = ("classifier", "pre_classifier", "score", "pooler")  # what fine-tuning begins with


class CrossEncoder(nn.Module):
    """T of section 3.3: a classifier that reads both sentences of a pair, [CLS] y [SEP] z [SEP].

    name: a folder or a name on the Hub. A plain encoder gets a random output layer and is `fresh`:
    it needs fine-tuning. Raises DataError, also for a classifier with other classes than the task.
    """

    pooling = "cross-encoder"  # these three name its cached logits
    normalize = False
    precision = "fp32"

    def __init__(self, name, task, max_length):
        super().__init__()
        folder = resolve(name, model=True)
        outputs = glue.TASKS[task].outputs
        load = load_pretrained(name, folder)
        config = load(transformers.AutoConfig)
        kinds = " ".join(config.architectures or [])
        self.fresh = "SequenceClassification" not in kinds
        labels = outputs if self.fresh else config.num_labels
        kind = transformers.AutoModelForSequenceClassification
        self.model, report = load(kind, num_labels=labels, output_loading_info=True)
        check_weights(name, report["missing_keys"], self.fresh)
        self.tokenizer = load(transformers.AutoTokenizer)
        if not self.fresh and config.num_labels != outputs:
            found = f"a classifier of {config.num_labels} labels"
            expected = f"{outputs} for task {task}, or a plain encoder"
            raise DataError(f"{name}: {found}, expected {expected}")
        self.order = glue.class_positions(task, config.label2id)
        if sorted(self.order) != list(range(outputs)):
            expected = f"the numbers 0 to {outputs - 1}, each once"
            raise DataError(f"{name}: label2id of its config.json, expected {expected}")
        self.max_length = min(max_length, config.max_position_embeddings - 2)
        names = self.tokenizer.model_input_names
        self.segments = getattr(config, "type_vocab_size", 1) > 1 and "token_type_ids" in names

    def forward(self, input_ids, attention_mask):
        """[N, L], [N, L] -> logits [N, C], in the order of the task's classes."""
        inputs = dict(input_ids=input_ids, attention_mask=attention_mask)
        if self.segments:
            separators = (input_ids == self.tokenizer.sep_token_id).long()
            separators_before = separators.cumsum(dim=1) - separators
            inputs["token_type_ids"] = (separators_before > 0) * attention_mask
        return self.model(**inputs).logits[:, self.order]

    def tokens(self, pairs):
        """glue.Pairs of n -> Tokens of n, both sentences in each row."""
        return Tokens(self, list(zip(pairs.first, pairs.second)), self.max_length)

    def score_pairs(self, pairs):
        """glue.Pairs of n -> logits, float32 array [n, C]."""
        return encode(self.eval(), self.tokens(pairs), self.model.device)

    def save(self, folder):
        """Write a folder for AutoModelForSequenceClassification. No file is left half written."""
        new = folder.with_name(f".{folder.name}")
        with writing(folder, "the model that was there is whole"):
            try:
                self.model.save_pretrained(new)
                self.tokenizer.save_pretrained(new)
                folder.mkdir(exist_ok=True)
                move_files(new, folder)
            finally:
                shutil.rmtree(new, ignore_errors=True)


def check_weights(name, missing, fresh):
    """Raises DataError if weights are missing: of a plain encoder, others than its new output's."""
    for key in sorted(missing):
        is_output = any(part in NEW_OUTPUT for part in key.split("."))
        if not (fresh and is_output):
            raise DataError(f"{name}: its weights lack {key}, expected a complete model")


def new_encoder(name, layers):
    """A folder or a name on the Hub -> Encoder that reads a sentence as pool_last_four does.

    Its saved folder states this pooling, so that load_encoder and eval_sts.py read it in the same
    way. layers: "1,3,5" keeps these alone. Raises DataError.
    """
    encoder = load_encoder(name, "mean", layers=layers)
    positions = range(1, encoder.model.config.num_hidden_layers + 1)  # 0 is the embedding layer
    last_four = tuple(positions[-LAYERS_POOLED:])
    pooling = LayerPooling(last_four, join="concat", skip_first_token=True)
    return Encoder(encoder.model, encoder.tokenizer, pooling, [], False, encoder.max_length)


def save_student(student, folder):
    """Write the encoder's folder, and head.safetensors in it."""
    weights = {name: value.cpu().contiguous() for name, value in student.head.state_dict().items()}
    with replacing(folder / "head.safetensors") as new:
        save_file(weights, new)
        student.encoder.save(folder)  # inside, so that a full disk leaves the old ones of both


def load_student(folder, device="cpu"):
    """A folder that a run has written -> Student, in eval mode. Raises DataError."""
    file = resolve(folder, model=True) / "head.safetensors"
    if not file.exists():
        expected = "the folder of a student that dse.py has trained"
        raise DataError(f"{file}: no such file, expected {expected}")
    try:
        weights = load_file(file)
        student = Student(load_encoder(folder), classes=len(weights["w.weight"]))
        student.head.load_state_dict(weights)
    except (SafetensorError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:150]
        raise DataError(f"{file}: {reason}, expected a complete file of this student") from None
    return student.to(device).eval()


def embed(student, sentences, max_length=MAX_LENGTH):
    """n sentences -> [n, D] on the student's device, what the scores of its head are made from."""
    device = student.head.w.weight.device
    tokens = Tokens(student.encoder, sentences, max_length)
    return torch.from_numpy(encode(student.eval().embed, tokens, device)).to(device)


def embed_pairs(student, pairs, max_length):
    """glue.Pairs of n -> u, v [n, D]."""
    return embed(student, pairs.first, max_length), embed(student, pairs.second, max_length)


def score_pairs(student, pairs, max_length):
    """glue.Pairs of n -> logits, float32 array [n, C]."""
    u, v = embed_pairs(student, pairs, max_length)
    return student.head.score_pairs(u, v).cpu().numpy()


def cosine_pairs(student, pairs, max_length):
    """glue.Pairs of n -> cosine similarity, without the head, float32 array [n]."""
    u, v = embed_pairs(student, pairs, max_length)
    return F.cosine_similarity(u, v).cpu().numpy()


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------

SMALL_LAYERS = "1,3,5"  # the student's, where --demo takes all-MiniLM-L6-v2


def parse_args():
    parser = ArgumentParser(
        "DSE: distill a cross-encoder. Defaults are the paper's.",
        moved={"--benchmark": "benchmark.py --only dse measures Tables 3 and 4"},
    )
    models = parser.add_argument_group("models and data")
    add = models.add_argument
    add("--task", choices=tuple(glue.TASKS), default="mrpc", help="%(default)s")
    add("--glue", help="folder that contains GLUE's MRPC, STS-B, ...; by default from the Hub")
    add(
        "--teacher",
        default="bert-large-uncased",
        help="a classifier, or a plain encoder, which is fine-tuned first; %(default)s (3.3)",
    )
    add(
        "--student",
        help="folder or Hub name; by default --teacher as it is before fine-tuning (3.4)",
    )
    add("--student-layers", help="keep only these layers, counted from 0: 1,3,5")
    add_dropout_option(models)
    add = parser.add_argument_group("method (sections of the paper in brackets)").add_argument
    add(
        "--alpha",
        type=fraction,
        default=0.5,
        help="weight of the teacher's logits in eq. 2, the rest for the labels; %(default)s",
    )
    add("--freeze-encoder", action="store_true", help="train the similarity head alone (4.1.1)")
    add(
        "--teacher-only",
        action="store_true",
        help="fine-tune the teacher and score it, without a student (Table 1)",
    )
    add("--teacher-epochs", type=count, default=3, help="of its fine-tuning; %(default)s")
    add("--teacher-lr", type=positive, default=2e-5, help="%(default)s")
    add("--epochs", type=count, default=8, help="%(default)s (4.1.1)")
    add("--batch-size", type=count, default=32, help="in pairs; %(default)s (4.1.1)")
    add("--lr", type=positive, help="2e-5, for stsb 1e-5 (4.1.1)")
    add = parser.add_argument_group("instead of training").add_argument
    add(
        "--average",
        nargs="+",
        metavar="RUN",
        help="print Table 1 of the tasks of these runs, with its average",
    )
    add_run_options(
        parser,
        "runs/dse",
        max_length=MAX_LENGTH,
        eval_steps=0,
        patience=0,
        demo_minutes="three",
        length=pair_length,
    )
    args = parser.parse(
        demo_defaults=dict(
            teacher=MINILM,
            task="stsb",
            glue="demo",
            output="runs/dse-demo",
            teacher_epochs=2,
            teacher_lr=1e-4,
            epochs=4,
            lr=2e-4,
            eval_steps=40,
        )
    )
    if args.lr is None:
        args.lr = 1e-5 if args.task == "stsb" else 2e-5
    if args.demo and args.teacher == MINILM and not (args.student or args.student_layers):
        args.student_layers = SMALL_LAYERS
    return args


def load_models(args):
    """--student, --teacher -> Student, CrossEncoder. Raises DataError."""
    torch.manual_seed(args.seed)  # both output layers start at random, the student's first
    encoder = new_encoder(args.student or args.teacher, args.student_layers)
    set_dropout(encoder, args)
    encoder.requires_grad_(not args.freeze_encoder)
    student = Student(encoder, glue.TASKS[args.task].outputs)
    teacher = CrossEncoder(args.teacher, args.task, args.max_length)
    return student.to(args.device), teacher.to(args.device).eval()


def prepare_teacher(teacher, train, labels, evaluation, run, args):
    """The teacher, fine-tuned if it is fresh -> CrossEncoder in eval mode.

    train: glue.Pairs of n; labels [n] on the device.
    """
    if not teacher.fresh:
        return teacher
    if not run.finished("teacher"):
        finetune(teacher, teacher.tokens(train), labels, evaluation, run, args)
        run.finish("teacher")
    best = CrossEncoder(run.folder / "teacher", args.task, args.max_length)
    return best.to(args.device).eval()


def train_student(student, teacher, train, labels, evaluation, run, args):
    """Distill the teacher, and score the best student. The arguments are as above."""
    targets = teacher_embeddings(teacher, teacher.tokens(train), args.device, what="logits")
    first = Tokens(student.encoder, train.first, args.max_length)
    second = Tokens(student.encoder, train.second, args.max_length)
    distill(student, first, second, targets, labels, evaluation, run, args)
    student = load_student(run.folder, args.device)
    logits_of = partial(score_pairs, student, max_length=args.max_length)
    run.scores["student"] = evaluation.scores(logits_of)
    glue.add_degradation(run.scores, of="teacher")
    run.finish("student")


def score_before(student, evaluation, run, args):
    """The row of the student before training, where cosine can say something of the task."""
    cosine_of = partial(cosine_pairs, student, max_length=args.max_length)
    before = evaluation.cosine_scores(cosine_of)
    if before:
        run.scores["student before, cosine"] = before


def main():
    args = parse_args()
    if args.average:
        print(table(glue.average(glue.read_scores(args.average))))
        return
    run = Run(args, unit="pairs")
    sets = glue.read_task(args.glue, args.task)
    train = sets.pop("train")
    evaluation = glue.Evaluation(args.task, sets)
    student, teacher = load_models(args)
    labels = torch.from_numpy(train.labels).to(args.device)

    run.start()
    if run.is_new():
        (run.folder / glue.SCORES).unlink(missing_ok=True)
        if not args.teacher_only:
            score_before(student, evaluation, run, args)
    teacher = prepare_teacher(teacher, train, labels, evaluation, run, args)
    if not run.finished("student"):
        run.scores["teacher"] = evaluation.scores(teacher.score_pairs)
        if not args.teacher_only:
            train_student(student, teacher, train, labels, evaluation, run, args)
    run.write(glue.SCORES, json.dumps({args.task: run.scores}, indent=2))
    if not args.teacher_only:
        run.write_card(
            f"Distilled by `dse.py` (DSE, arXiv:1908.05161), task: {args.task}.",
            student=args.student or args.teacher,
            teachers=[args.teacher],
            task="text-classification",
            metric=None,
            library="transformers",
        )
    print(table(run.scores))


if __name__ == "__main__":
    run_main(main)
