"""DistilFACE: unsupervised SimCSE on an encoder that is already distilled, with fourteen poolings.

Lim, Ng, Lim: "Distilling Contrastive Learning Models", Georgia Tech, 2022; on arXiv with the title
"Contrastive Learning in Distilled Models", arXiv:2401.12472.

Each sentence of a batch is encoded twice, with different dropout. Given its first embedding, pick
out its second among those of the whole batch. There is no teacher: DistilBERT was distilled before.

    sentences --> student, dropout mask z  --> pool --> h   (queries) --+
        |                                                               +--> InfoNCE, section 3
        +-------> student, dropout mask z' --> pool --> h^+ (keys)    --+

Departures that change results (docs/distilface.md has all of them, next to the authors' code):
  - An epoch's last batch is left out if it is smaller.
  - STS-B dev chooses the best student; the paper chose the number of steps on the test sets.
  - Training is in bf16 on a GPU, else fp32; the paper's mixed precision is --precision fp16.
  - Each of several processes draws the dropout of its own sentences.

  python distilface.py                              the paper's setting, Table 3
  python distilface.py --student MODEL --student-layers 1,3,5 --train my.txt --dev my.tsv
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

# ---- Losses --------------------------------------------------------------------------------------


def simcse_loss(first, second, temperature):
    """Section 3: l_i = -log( exp(sim(h_i, h_i^+) / tau) / sum_j exp(sim(h_i, h_j^+) / tau) )

    sim is the cosine. first: h [N, D]; second: h^+ [N, D], of the same sentences with another
    dropout mask; temperature tau > 0. Returns the mean over the batch, a scalar >= 0.
    """
    similarity = F.normalize(first, dim=1) @ F.normalize(second, dim=1).T  # [N, N]
    positives = torch.arange(len(first), device=first.device)  # key i belongs to sentence i
    return F.cross_entropy(similarity / temperature, positives)


# ---- Model ---------------------------------------------------------------------------------------


class Pooling(NamedTuple):
    """Which layers a pooling uses, and how it combines them at each token."""

    combine: str  # "mean", "max" or "concat"
    layers: Callable  # number of layers -> positions in hidden_states; 0 is the embedding layer
    needed: int = 1  # number of layers


POOLINGS = {  # section 5.6, with the names of the authors' code
    "cls": Pooling("mean", lambda depth: [depth]),  # the only one that takes one token
    "avg": Pooling("mean", lambda depth: [depth]),
    "last_second_hidden": Pooling("mean", lambda depth: [depth - 1], needed=2),
    "avg_all_hidden": Pooling("mean", lambda depth: range(depth + 1)),
    "avg_second_to_last_hidden": Pooling("mean", lambda depth: range(1, depth + 1)),
    "avg_first_last": Pooling("mean", lambda depth: [0, depth]),
    "avg_last2": Pooling("mean", lambda depth: [depth - 1, depth], needed=2),
    "avg_last4": Pooling("mean", lambda depth: range(depth - 3, depth + 1), needed=4),
    "max_all_hidden": Pooling("max", lambda depth: range(depth + 1)),
    "max_second_to_last_hidden": Pooling("max", lambda depth: range(1, depth + 1)),
    "max_first_last": Pooling("max", lambda depth: [0, depth]),
    "max_last2": Pooling("max", lambda depth: [depth - 1, depth], needed=2),
    "max_last4": Pooling("max", lambda depth: range(depth - 3, depth + 1), needed=4),
    "concat_last4": Pooling("concat", lambda depth: range(depth - 3, depth + 1), needed=4),
}


def layer_positions(pooling, depth):
    """The positions in hidden_states of the layers that a pooling uses, in order.

    Raises ValueError if there are too few layers; the embedding layer does not count as a last one.
    """
    needed = POOLINGS[pooling].needed
    if depth < needed:
        raise ValueError(f"pooling {pooling} needs {needed} layers, and there are {depth}")
    return list(POOLINGS[pooling].layers(depth))


def pool(hidden_states, attention_mask, pooling):
    """Section 5.6: combine layers at each token, then average the tokens that are not padding.

    The order is that of the authors' code; the paper does not say over what it takes a maximum.

    hidden_states: the output of the embedding layer and of each layer, [N, L, H] each;
    attention_mask [N, L]; pooling: one of POOLINGS; "cls" returns the last layer's state at [CLS].
    Returns [N, H], or [N, 4 H] for concat_last4. Raises ValueError for too few layers.
    """
    if pooling == "cls":
        return hidden_states[-1][:, 0]
    layers = [hidden_states[i] for i in layer_positions(pooling, len(hidden_states) - 1)]
    combine = POOLINGS[pooling].combine
    if combine == "concat":
        tokens = torch.cat(layers, dim=-1)  # [N, L, 4 H]
    elif combine == "max":
        tokens = torch.stack(layers).amax(dim=0)  # [N, L, H]
    else:
        tokens = torch.stack(layers).mean(dim=0)  # [N, L, H]
    mask = attention_mask.unsqueeze(-1)  # [N, L, 1]
    return (tokens * mask).sum(dim=1) / mask.sum(dim=1)


def embed(encoder, input_ids, attention_mask):
    """Token ids and mask, [N, L] each -> embeddings [N, D] in float32.

    encoder: has `model`, a transformer, and `pooling`. The same in training and scoring.
    """
    output = encoder.model(input_ids, attention_mask, output_hidden_states=True)
    hidden_states = [states.float() for states in output.hidden_states]  # [N, L, H] each
    return pool(hidden_states, attention_mask, encoder.pooling)


# ---- Training. Everything above needs only torch and can be copied into other projects -----------

from common import DEMO_FOLDER, MINILM, ArgumentParser, UserError, number, parse, run_main
from common import add_data_options, add_run_options, evaluation_sets, read_sentences
from common import load_encoder, one_line_errors, pooling_module, save_encoder, spearman
from common import Run, Tokens, average_gradients, batches, gather, own_rows, step_seed
from common import write_card

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def train(encoder, sentences, dev_set, run, args):
    """Section 3 -> the best step and the last."""
    tokens = Tokens(encoder, sentences, args.max_length)
    total = args.max_steps
    parameters = list(encoder.parameters())
    optimizer = torch.optim.Adam(parameters, lr=args.lr, fused=True)
    scaler = torch.amp.GradScaler(args.device, enabled=args.precision == "fp16")  # section 4.2
    encoder.train()

    # begin() restores `state`, in place, and these values from the last checkpoint, if any.
    state = [encoder, scaler, optimizer]
    step, best, best_step = run.begin("train", total, state, (0, -math.inf, 0))
    if step == 0:  # the student before training is the first candidate
        best = spearman(embed, encoder, dev_set)["dev"]
        save_encoder(encoder, args.output, pooling_modules(encoder))
        run.log_dev(0, best)

    options = (args.batch_size, args.seed, args.group_by_length, step, total)
    for step, rows in batches(tokens.lengths, *options, drop_last=True):  # row numbers [N]
        torch.manual_seed(step_seed(args.seed, step))  # of dropout, another in each process
        lr = args.lr * (1 - (step - 1) / total)
        optimizer.param_groups[0]["lr"] = lr

        input_ids, attention_mask = tokens.batch(own_rows(rows), args.device)  # [n, L]
        with torch.autocast(args.device, DTYPES[args.precision], enabled=args.precision != "fp32"):
            # One pass over both views: dropout differs in every row.
            local = embed(encoder, input_ids.repeat(2, 1), attention_mask.repeat(2, 1))  # [2 n, D]
        first, second = [gather(view, len(rows)) for view in local.chunk(2)]  # h, h^+ [N, D]
        loss = simcse_loss(first, second, args.temperature)

        optimizer.zero_grad()
        scaler.scale(loss).backward()
        average_gradients(parameters)  # now those of one process with the whole batch
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)  # leaves the parameters as they are if fp16 has overflowed
        scaler.update()
        run.log(step, len(rows), loss=loss, lr=lr)

        # Now and then, and at the end: score the student, and keep the best.
        if step % args.eval_steps == 0 or step == total:
            dev = spearman(embed, encoder, dev_set)["dev"]
            if dev > best:
                best, best_step = dev, step
                save_encoder(encoder, args.output, pooling_modules(encoder))
            run.log_dev(step, dev)
            run.checkpoint(state, (step, best, best_step))
    return best_step, step


# ---- Command line --------------------------------------------------------------------------------

DEMO = dict(student=MINILM, student_layers="1,3,5")
DEMO |= dict(train=f"{DEMO_FOLDER}/sentences.txt", dev=f"{DEMO_FOLDER}/dev.tsv")
DEMO |= dict(pooling="avg", max_steps=100, eval_steps=25, group_by_length=True)
USAGE = """import eval_sts  # sentence-transformers cannot load it

student, embed = eval_sts.load("{folder}")
vectors = eval_sts.encode(embed, student, ["A man plays the guitar."])"""


def parse_args():
    positive_float = number(float, 1e-9)
    parser = ArgumentParser(__doc__)
    table_3 = "(default: %(default)s; paper Table 3)"
    add = parser.add_argument_group("model").add_argument
    student = "folder or Hub name (default: %(default)s; paper §4)"
    add("--student", default="distilbert-base-uncased", help=student)
    add("--student-layers", help="keep only these layers, counted from 0, as in 1,3,5")
    add("--pooling", choices=POOLINGS, default="avg_last4", help=f"replaces the folder's {table_3}")
    add("--dropout", type=number(float, 0, 0.99), help="student dropout (default: its folder's)")
    add_data_options(parser, "wiki1m_for_simcse.txt")
    add = parser.add_argument_group("method").add_argument
    add("--temperature", type=positive_float, default=0.05, help=f"tau {table_3}")
    add("--batch-size", type=number(int, 2), default=128, help=table_3)
    add("--lr", type=positive_float, default=1e-5, help=f"falls to 0 as in the code {table_3}")
    options = dict(max_length=32, eval_steps=250, max_steps=20_000, precisions=["fp16"])
    add_run_options(parser, "runs/distilface", **options)
    return parse(parser, DEMO)


def load_student(name, pooling, layers=None, dropout=None, device="cpu"):
    """A folder or a name on the Hub -> Encoder with one of POOLINGS. Raises UserError."""
    # A given pooling, "mean", makes load_encoder() leave out dense heads and normalization.
    encoder = load_encoder(name, "mean", layers, dropout=dropout, device=device)
    encoder.pooling = pooling
    with one_line_errors(name, "choose another --pooling"):
        positions = layer_positions(pooling, encoder.model.config.num_hidden_layers)
    if pooling == "concat_last4":
        encoder.width *= len(positions)
    # SentenceTransformer looks here for the layers that its WeightedLayerPooling averages.
    averages_layers = POOLINGS[pooling].combine == "mean" and pooling not in ("cls", "avg")
    encoder.model.config.output_hidden_states = averages_layers
    return encoder


def pooling_modules(encoder):
    """encoder.pooling as modules of sentence-transformers, which save_encoder() writes.

    If several layers are pooled, the first module states the pooling's name for eval_sts.py.
    """
    tokens = pooling_module(encoder, "cls" if encoder.pooling == "cls" else "mean")
    if encoder.pooling in ("cls", "avg"):
        return [tokens]
    stated = dict(script="distilface", pooling=encoder.pooling)
    if POOLINGS[encoder.pooling].combine != "mean":  # which sentence-transformers refuses
        refused = dict(type="sentence_distillation.LayerPooling")
        return [("LayerPooling", {}, {}, refused | stated)]
    config = encoder.model.config
    depth = config.num_hidden_layers
    layers = dict(embedding_dimension=config.hidden_size, num_hidden_layers=depth, layer_start=0)
    positions = layer_positions(encoder.pooling, depth)
    weights = torch.zeros(depth + 1)
    weights[positions] = 1 / len(positions)
    average = ("WeightedLayerPooling", layers, dict(layer_weights=weights), stated)
    return [average, tokens]


def main():
    args = parse_args()
    sets = evaluation_sets(args)
    sentences = read_sentences(args.train)
    if len(sentences) < args.batch_size:
        raise UserError(f"{args.train}: {len(sentences)} sentences; reduce --batch-size to that")
    run = Run(args, [__file__], [*sets.values(), sentences])
    if run.is_complete():
        return
    if not run.finished:
        cut = (args.student_layers, args.dropout)
        student = load_student(args.student, args.pooling, *cut, device=args.device)
        if not any(part.p for part in student.modules() if isinstance(part, nn.Dropout)):
            raise UserError(f"{args.student}: without dropout, both views are equal; see --dropout")
        run.scores["student before"] = spearman(embed, student, sets)
        steps = train(student, sentences, {"dev": sets["dev"]}, run, args)
        best = load_student(args.output, args.pooling, device=args.device)
        run.finish(*steps, {"best student": spearman(embed, best, sets)})
    best = load_student(args.output, args.pooling)
    text = f"Trained by `distilface.py` (DistilFACE), pooling {args.pooling}."
    usage = {} if POOLINGS[args.pooling].combine == "mean" else dict(usage=USAGE)
    write_card(run, args, best, text, **usage)


if __name__ == "__main__":
    run_main(main)
