"""DistilFACE: unsupervised SimCSE on an encoder that is already distilled, with fourteen poolings.

Lim, Ng, Lim: "Distilling Contrastive Learning Models", Georgia Tech, 2022. Code of the authors:
github.com/kennethlimjf/contrastive-learning-in-distilled-models.

Every sentence of a batch is encoded twice. Dropout makes the two embeddings differ. From the first
embedding of a sentence, find its second embedding among the second embeddings of the whole batch.
There is no teacher: the distillation happened before, in distilbert-base-uncased.

    sentences --> student, dropout mask z  --> pool --> h   (queries)  --+
        |                                                                +--> InfoNCE, section 3
        +-------> student, dropout mask z' --> pool --> h^+ (keys)     --+

What the paper leaves open, and where this script differs from the paper or the authors' code:
  - As in the authors' code: both embeddings come from one pass over a doubled batch, in which every
    row has its own dropout; the learning rate falls linearly to 0; the gradient norm is clipped
    at 1; a sentence has at most 32 tokens in training, and as many as the model takes in scoring.
  - Unlike there, a batch contains sentences of similar length, and so do its in-batch negatives
    (--shuffle: random sentences), and an epoch's last batch is left out if it is not full.
  - As in the authors' code, the first of `first_last` and of `all_hidden` is the output of the
    embedding layer, and `second_to_last_hidden` is every layer but that one. `last_second_hidden`
    is the layer before the last.
  - The paper chose its hyperparameters and the number of steps on the test sets (5.1, Figure 2).
    Here STS-B dev chooses the best student; sweep.py searches the hyperparameters on dev as well.
  - Mixed precision (4.2) is --precision fp16, with gradient scaling, or bf16, the default on a GPU.
    The authors' last notebooks, which train the final model, are in fp32: --precision fp32.
  - The average at the end is that of seven test sets. Table 2 has five, without STS16 and SICK-R:
    eval_sts.py --sets STS12,STS13,STS14,STS15,STS-B. Quantization (4.2, Table 5) is quantize.py.
  - Each of several processes (torchrun) draws the dropout of its own sentences. So their number
    changes the draws, and with them the losses.

  python distilface.py                              the paper's setting
  python distilface.py --student my-encoder --pooling avg --train my.txt --dev my-pairs.tsv
  python distilface.py --max-steps 0 --pooling avg_first_last --output runs/distilbert
      Trains nothing: scores the student, read by this pooling, and saves it (Table 2's DistilBERT).
      eval_sts.py distilbert-base-uncased --pooling avg_first_last gives the scores alone.
  python distilface.py --demo                       two minutes on a CPU
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

# --------------------------------------------------------------------------------------------------
# Losses
# --------------------------------------------------------------------------------------------------


def simcse_loss(first, second, temperature):
    """Section 3: l_i = -log( exp(sim(h_i, h_i^+) / tau) / sum_j exp(sim(h_i, h_j^+) / tau) )

    sim is the cosine. first: h [N, D]; second: h^+ [N, D], of the same sentences with another
    dropout mask; temperature tau > 0. Returns the mean over the batch, a scalar >= 0.
    """
    similarity = F.normalize(first, dim=1) @ F.normalize(second, dim=1).T  # [N, N]
    positives = torch.arange(len(first), device=first.device)  # key i belongs to sentence i
    return F.cross_entropy(similarity / temperature, positives)


# --------------------------------------------------------------------------------------------------
# Model
# --------------------------------------------------------------------------------------------------


class Pooling(NamedTuple):
    """Which layers a pooling reads, and how it joins them, token by token."""

    layers: str  # a key of `positions` in layer_positions
    join: str  # "mean", "max" or "concat"


POOLINGS = {  # section 5.6, the names of the authors' code
    "cls": Pooling("last", "mean"),  # the only one that does not average the tokens
    "avg": Pooling("last", "mean"),
    "last_second_hidden": Pooling("before_last", "mean"),
    "avg_all_hidden": Pooling("all", "mean"),
    "avg_second_to_last_hidden": Pooling("all_but_embedding", "mean"),
    "avg_first_last": Pooling("first_and_last", "mean"),
    "avg_last2": Pooling("last_2", "mean"),
    "avg_last4": Pooling("last_4", "mean"),
    "max_all_hidden": Pooling("all", "max"),
    "max_second_to_last_hidden": Pooling("all_but_embedding", "max"),
    "max_first_last": Pooling("first_and_last", "max"),
    "max_last2": Pooling("last_2", "max"),
    "max_last4": Pooling("last_4", "max"),
    "concat_last4": Pooling("last_4", "concat"),
    "mean": Pooling("last", "mean"),  # the name that the other scripts have for avg
}
LAYERS_NEEDED = {"before_last": 2, "last_2": 2, "last_4": 4}  # of a transformer; otherwise 1


def layer_positions(pooling, depth):
    """The positions in hidden_states, of `depth` layers, that a pooling reads.

    0 is the output of the embedding layer, `depth` that of the last layer. Raises ValueError if
    there are too few layers.
    """
    layers = POOLINGS[pooling].layers
    needed = LAYERS_NEEDED.get(layers, 1)
    if depth < needed:
        raise ValueError(f"pooling {pooling} needs {needed} layers, the encoder has {depth}")
    positions = {
        "last": [depth],
        "before_last": [depth - 1],
        "all": range(depth + 1),
        "all_but_embedding": range(1, depth + 1),
        "first_and_last": [0, depth],
        "last_2": range(depth - 1, depth + 1),
        "last_4": range(depth - 3, depth + 1),
    }
    return list(positions[layers])


def pool(hidden_states, attention_mask, pooling):
    """Section 5.6: join layers token by token, then average the tokens that are not padding.

    "cls" alone takes the last layer's state at [CLS] instead. second_to_last is every layer from
    the second (the first is the embedding layer's) to the last.
    hidden_states: the output of the embedding layer and of each layer, [N, L, H] each;
    attention_mask [N, L]; pooling: a key of POOLINGS. Returns [N, H], or [N, 4 H] for concat_last4.
    Raises ValueError if there are too few layers.
    """
    if pooling == "cls":
        return hidden_states[-1][:, 0]
    positions = layer_positions(pooling, len(hidden_states) - 1)
    layers = [hidden_states[position] for position in positions]
    join = POOLINGS[pooling].join
    if join == "concat":
        tokens = torch.cat(layers, dim=-1)  # [N, L, 4 H]
    elif join == "max":
        tokens = torch.stack(layers).amax(dim=0)  # [N, L, H]
    else:
        tokens = torch.stack(layers).mean(dim=0)
    mask = attention_mask.unsqueeze(-1)  # [N, L, 1]
    return (tokens * mask).sum(dim=1) / mask.sum(dim=1)


class Student(nn.Module):
    """An encoder, which has `model`, a transformer, and one of the poolings."""

    def __init__(self, encoder, pooling):
        super().__init__()
        self.encoder = encoder
        self.pooling = pooling

    def forward(self, input_ids, attention_mask):
        """[N, L], [N, L] -> h, h^+: two embeddings of each row, [N, D] each, in float32."""
        input_ids = input_ids.repeat(2, 1)  # [2 N, L], a dropout mask for each row
        attention_mask = attention_mask.repeat(2, 1)
        output = self.encoder.model(input_ids, attention_mask, output_hidden_states=True)
        hidden_states = [layer.float() for layer in output.hidden_states]
        return pool(hidden_states, attention_mask, self.pooling).chunk(2)


# --------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------

from functools import partial

from common import MINILM, DataError, Tokens, table
from support.command_line import (
    ArgumentParser,
    add_data_options,
    add_dropout_option,
    add_run_options,
    check_negatives,
    count,
    evaluation_sets,
    positive,
    reload_student,
    run_main,
    set_dropout,
    training_sentences,
)
from support.encoder import Encoder, LayerPooling, load_encoder
from support.run import Run, set_learning_rate


def linear_decay(step):
    """The learning rate of a Step, as a share of its peak: from 1 down to 0."""
    return 1 - (step.number - 1) / step.total


def train(student, sentences, evaluation, run, args):
    """Section 3. sentences: Tokens of n."""
    optimizer = torch.optim.Adam(student.parameters(), lr=args.lr, fused=True)
    student.train()
    for step in run.steps(
        "train",
        sentences.lengths,
        [student],
        optimizer,
        dev_score=partial(evaluation.dev_score, student.encoder),
        save=partial(student.encoder.save, run.folder),
        epochs=None,  # --max-steps is the length
        batch_size=args.batch_size,
        patience=args.patience,
        drop_last=True,
    ):
        set_learning_rate(optimizer, args.lr * linear_decay(step))
        input_ids, attention_mask = sentences.batch(step.own_rows, run.device)  # [n, L]
        with run.autocast():
            first, second = student(input_ids, attention_mask)  # h, h^+ [n, D]
        first, second = step.gather(first, second)  # of all processes, [N, D]
        loss = simcse_loss(first, second, args.temperature)
        run.backward(loss, optimizer)
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        run.step(optimizer)
        step.log(loss=loss)


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------

MAX_STEPS = 20_000  # Table 3


def parse_args():
    parser = ArgumentParser(
        "DistilFACE: unsupervised SimCSE, without a teacher. Defaults are the paper's (Table 3); "
        f"--max-steps is the length of training: {MAX_STEPS}, or 0 for none.",
        moved={
            "--grid": 'sweep.py distilface.py "lr=1e-5,3e-5" -- OPTIONS tries every combination',
            "--quantize": "quantize.py OUTPUT writes and measures the int8 model",
        },
    )
    model = parser.add_argument_group("model")
    add = model.add_argument
    add("--student", default="distilbert-base-uncased", help="folder or Hub name; %(default)s (4)")
    add("--student-layers", help="keep only these layers, counted from 0: 1,3,5")
    add(
        "--pooling",
        choices=POOLINGS,
        default="avg_last4",
        help="how the student is read, whatever its folder states; %(default)s (5.6, Table 3)",
    )
    add_dropout_option(model)
    add_data_options(parser, "wiki1m_for_simcse.txt")
    add = parser.add_argument_group("method (tables of the paper in brackets)").add_argument
    add("--temperature", type=positive, default=0.05, help="tau; %(default)s (Table 3)")
    add("--batch-size", type=count, default=128, help="%(default)s (Table 3)")
    add("--lr", type=positive, default=1e-5, help="%(default)s (Table 3)")
    add_run_options(parser, "runs/distilface", max_length=32, eval_steps=250, patience=0)
    parser.set_defaults(max_steps=MAX_STEPS)
    return parser.parse(
        demo_defaults=dict(
            student=MINILM,
            student_layers="1,3,5",
            pooling="avg",
            train="demo",
            dev="demo",
            output="runs/distilface-demo",
            batch_size=64,
            max_steps=100,
            eval_steps=25,
        ),
        needs_dropout=True,
    )


def encoder_pooling(pooling, depth):
    """One of POOLINGS, as the folder of an encoder with `depth` layers states it.

    Raises ValueError if there are too few layers.
    """
    if pooling == "cls":
        return "cls"
    positions = layer_positions(pooling, depth)
    if positions == [depth]:
        return "mean"
    return LayerPooling(tuple(positions), POOLINGS[pooling].join)


def load_student(args):
    """The encoder of --student and --student-layers, read by --pooling alone.

    A dense head or a normalization that its folder states is left out. Raises DataError.
    """
    encoder = load_encoder(args.student, "mean", layers=args.student_layers)
    depth = encoder.model.config.num_hidden_layers
    try:
        pooling = encoder_pooling(args.pooling, depth)
    except ValueError as error:
        raise DataError(f"{args.student}: {error}") from None
    no_heads, normalize = [], False
    encoder = Encoder(
        encoder.model, encoder.tokenizer, pooling, no_heads, normalize, encoder.max_length
    )
    set_dropout(encoder, args)
    return encoder.to(args.device)


def check_full_batch(args, sentences):
    """Raises DataError if an epoch has no full batch."""
    if args.batch_size > sentences:
        expected = f"at most {sentences}, the number of sentences"
        raise DataError(f"--batch-size {args.batch_size}: expected {expected}")


def write_card(run, args):
    """The model card, which says whether SentenceTransformer has this pooling."""
    text = f"Trained by `distilface.py` (DistilFACE), pooling: {args.pooling}."
    library = "sentence-transformers"
    if POOLINGS[args.pooling].join != "mean":
        text += " SentenceTransformer has no such pooling; `load_encoder` of this project reads it."
        library = "transformers"
    run.write_card(text, student=args.student, library=library)


def main():
    args = parse_args()
    run = Run(args)
    evaluation = evaluation_sets(args)
    sentences = training_sentences(args.train)
    encoder = load_student(args)
    check_negatives(len(sentences), args.batch_size)
    check_full_batch(args, len(sentences))
    tokens = Tokens(encoder, sentences, args.max_length)

    run.start()
    if run.is_new():
        run.scores["student before"] = evaluation.scores(encoder, "student before")
    if not run.finished("train"):
        train(Student(encoder, args.pooling), tokens, evaluation, run, args)
        after = evaluation.scores(reload_student(run.folder, args), "student after")
        run.finish("train", {"student after": after})
    write_card(run, args)
    print(table(run.scores))


if __name__ == "__main__":
    run_main(main)
