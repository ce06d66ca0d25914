"""DistilFACE: unsupervised SimCSE on an encoder that is already distilled, with fourteen poolings.

Lim, Ng, Lim: "Distilling Contrastive Learning Models", Georgia Tech, 2022; on arXiv with the title
"Contrastive Learning in Distilled Models", arXiv:2401.12472.

Each sentence of a batch is encoded twice, with different dropout. From its first embedding, find
its second among those of the whole batch. There is no teacher: DistilBERT was distilled before.

    sentences --> student, dropout mask z  --> pool --> h   (queries) --+
        |                                                               +--> InfoNCE, section 3
        +-------> student, dropout mask z' --> pool --> h^+ (keys)    --+

Departures that change results (docs/distilface.md has all of them, next to the authors' code):
  - A batch has sentences of similar length (--shuffle: random ones); it is full, or left out.
  - STS-B dev chooses the best student; the paper chose the number of steps on the test sets.
  - Training is in bf16 on a GPU, else fp32; the paper's mixed precision is --precision fp16.
  - Each of several processes draws the dropout of its own sentences.

  python distilface.py                              the paper's setting, Table 3
  python distilface.py --student MODEL --student-layers 1,3,5 --train my.txt --dev my.tsv
"""

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
    """How a pooling joins layers, token by token, and which."""

    join: str  # "mean", "max" or "concat"
    layers: tuple | slice  # of hidden_states, which begin with the output of the embedding layer


ALL, ALL_BUT_EMBEDDING, LAST_4 = slice(None), slice(1, None), (-4, -3, -2, -1)
POOLINGS = {  # section 5.6, with the names of the authors' code
    "cls": Pooling("mean", (-1,)),  # the only one that takes one token
    "avg": Pooling("mean", (-1,)),
    "last_second_hidden": Pooling("mean", (-2,)),
    "avg_all_hidden": Pooling("mean", ALL),
    "avg_second_to_last_hidden": Pooling("mean", ALL_BUT_EMBEDDING),
    "avg_first_last": Pooling("mean", (0, -1)),
    "avg_last2": Pooling("mean", (-2, -1)),
    "avg_last4": Pooling("mean", LAST_4),
    "max_all_hidden": Pooling("max", ALL),
    "max_second_to_last_hidden": Pooling("max", ALL_BUT_EMBEDDING),
    "max_first_last": Pooling("max", (0, -1)),
    "max_last2": Pooling("max", (-2, -1)),
    "max_last4": Pooling("max", LAST_4),
    "concat_last4": Pooling("concat", LAST_4),
}


def layer_positions(pooling, depth):
    """The positions in hidden_states of the layers that a pooling joins, from 0 to depth, in order.

    Raises ValueError if it counts back to the embedding layer, as there are too few layers.
    """
    layers = POOLINGS[pooling].layers
    positions = range(depth + 1)
    if isinstance(layers, slice):
        return list(positions[layers])
    needed = -min(layers)
    if depth < needed:
        raise ValueError(f"pooling {pooling} needs {needed} layers, and there are {depth}")
    return [positions[layer] for layer in layers]


def pool(hidden_states, attention_mask, pooling):
    """Section 5.6: join layers token by token, then average the tokens that are not padding.

    hidden_states: the output of the embedding layer and of each layer, [N, L, H] each;
    attention_mask [N, L]; pooling: one of POOLINGS, of which "cls" is the last layer's state at
    [CLS]. Returns [N, H], or [N, 4 H] for concat_last4. Raises ValueError for too few layers.
    """
    if pooling == "cls":
        return hidden_states[-1][:, 0]
    layers = [hidden_states[i] for i in layer_positions(pooling, len(hidden_states) - 1)]
    join = POOLINGS[pooling].join
    if join == "concat":
        tokens = torch.cat(layers, dim=-1)  # [N, L, 4 H]
    elif join == "max":
        tokens = torch.stack(layers).amax(dim=0)  # [N, L, H]
    else:
        tokens = torch.stack(layers).mean(dim=0)  # [N, L, H]
    mask = attention_mask.unsqueeze(-1)  # [N, L, 1]
    return (tokens * mask).sum(dim=1) / mask.sum(dim=1)


def embed(encoder, input_ids, attention_mask):
    """Token ids and mask, [N, L] each -> embeddings [N, D] in float32.

    encoder: has `model`, a transformer, and `pooling`, one of POOLINGS. The same in training and
    scoring.
    """
    output = encoder.model(input_ids, attention_mask, output_hidden_states=True)
    hidden_states = [states.float() for states in output.hidden_states]  # [N, L, H] each
    return pool(hidden_states, attention_mask, encoder.pooling)


# ---- Training ------------------------------------------------------------------------------------

from functools import partial

from common import MINILM, ArgumentParser, DataError, add_data_options, add_run_options, run_main
from common import count, count_or_none, dropout_rate, positive
from common import evaluation_sets, read_sentences, reading
from common import load_encoder, pooling_module, save_encoder, set_dropout, spearman
from common import Run, Tokens, autocast, average_gradients, gather, own_rows, step_seed


def train(encoder, tokens, run, args):
    """Section 3. tokens of n sentences."""
    epoch_steps = len(tokens.lengths) // args.batch_size
    total = args.max_steps
    parameters = list(encoder.parameters())
    optimizer = torch.optim.Adam(parameters, lr=args.lr, fused=True)
    scaler = torch.amp.GradScaler(args.device, enabled=args.precision == "fp16")  # section 4.2
    encoder.train()
    save = partial(save_encoder, pooling=pooling_modules(encoder))
    run.begin("train", total, [encoder, scaler], optimizer, save)
    for step, rows in run.batches(tokens.lengths, args.batch_size, full=True):
        if run.stalled(args.patience * epoch_steps):
            break
        torch.manual_seed(step_seed(args.seed, step))  # of dropout, whatever came before
        optimizer.param_groups[0]["lr"] = args.lr * (1 - (step - 1) / total)
        input_ids, attention_mask = tokens.batch(own_rows(rows), args.device)  # [n, L]
        with autocast(args.device, args.precision):
            # One pass over both views, in which each row has dropout of its own.
            own = embed(encoder, input_ids.repeat(2, 1), attention_mask.repeat(2, 1))  # [2 n, D]
        first, second = [gather(view, len(rows)) for view in own.chunk(2)]  # h, h^+ [N, D]
        loss = simcse_loss(first, second, args.temperature)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        average_gradients(parameters)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)  # leaves the parameters as they are if fp16 has overflowed
        scaler.update()
        run.log(step, len(rows), loss=loss)
        if step % args.eval_steps == 0 or step == total:
            run.evaluate(step)


# ---- Command line --------------------------------------------------------------------------------


def parse_args():
    # An option that is added again replaces the one of add_run_options().
    parser = ArgumentParser(description=__doc__.splitlines()[0], conflict_handler="resolve")
    table_3 = "(default: %(default)s; paper Table 3)"
    add = parser.add_argument_group("model").add_argument
    student = "folder or Hub name (default: %(default)s; paper section 4)"
    add("--student", default="distilbert-base-uncased", help=student)
    add("--student-layers", help="keep only these layers, counted from 0, as in 1,3,5")
    add("--pooling", choices=POOLINGS, default="avg_last4", help=f"replaces the folder's {table_3}")
    add("--dropout", type=dropout_rate, help="of the student (default: its own)")
    add_data_options(parser, "wiki1m_for_simcse.txt")
    add = parser.add_argument_group("method").add_argument
    add("--temperature", type=positive, default=0.05, help=f"tau {table_3}")
    add("--batch-size", type=count, default=128, help=table_3)
    add("--lr", type=positive, default=1e-5, help=f"falls linearly to 0 {table_3}")
    precisions = ("fp32", "bf16", "fp16")  # fp16: with gradient scaling, section 4.2
    add_run_options(parser, "runs/distilface", 32, 250, patience=0, precisions=precisions)
    steps = f"length of training; 0: none, score and save the student {table_3}"
    add("--max-steps", type=count_or_none, default=20_000, help=steps)
    return parser.parse(student=MINILM, pooling="avg", max_steps=100, eval_steps=25)


def load_student(name, args, layers=None):
    """The encoder of a folder or a name on the Hub, pooled by --pooling alone. Raises DataError.

    A dense head or a normalization that its folder states is left out.
    """
    encoder = load_encoder(name, "mean", layers)
    encoder.pooling = args.pooling
    with reading(name, "choose another --pooling"):
        layer_positions(args.pooling, encoder.model.config.num_hidden_layers)
    # SentenceTransformer looks here for the layers that its WeightedLayerPooling averages.
    averages_layers = POOLINGS[args.pooling].join == "mean" and args.pooling not in ("cls", "avg")
    encoder.model.config.output_hidden_states = averages_layers
    return set_dropout(encoder, args.dropout).to(args.device)


def check_training(encoder, sentences, args):
    """Raises DataError if the loss would teach nothing, or an epoch would have no batch."""
    if not 2 <= args.batch_size <= sentences:
        needed = f"a batch has two or more texts, and at most the {sentences} of --train"
        raise DataError(f"--batch-size {args.batch_size}: {needed}")
    dropout = [part.p for part in encoder.modules() if isinstance(part, nn.Dropout)]
    if args.max_steps and not any(dropout):
        raise DataError(f"{args.student}: without dropout both views are equal; give --dropout")


def pooling_modules(encoder):
    """encoder.pooling as modules of sentence-transformers, which save_encoder() writes.

    The first also states a pooling of other layers than the last for this project.
    """
    tokens = pooling_module(encoder, "cls" if encoder.pooling == "cls" else "mean")
    if encoder.pooling in ("cls", "avg"):
        return [tokens]
    config = encoder.model.config
    depth = config.num_hidden_layers
    positions = layer_positions(encoder.pooling, depth)
    join = POOLINGS[encoder.pooling].join
    stated = dict(layers=positions, join=join, skip_first_token=False)
    if join != "mean":
        return [pooling_module(encoder, stated)]
    layers = dict(embedding_dimension=config.hidden_size, num_hidden_layers=depth, layer_start=0)
    weights = torch.zeros(depth + 1)
    weights[positions] = 1 / len(positions)
    average = ("WeightedLayerPooling", layers, dict(layer_weights=weights), dict(pooling=stated))
    return [average, tokens]


def main():
    args = parse_args()
    run = Run(args)
    sets = evaluation_sets(args)
    score = partial(spearman, embed, sets=sets)
    sentences = read_sentences(args.train)
    encoder = load_student(args.student, args, args.student_layers)
    check_training(encoder, len(sentences), args)

    run.start(score, sets["dev"], train=sentences)
    if not run.scores:
        run.scores["student before"] = score(encoder)
    if "train" not in run.finished:
        train(encoder, Tokens(encoder, sentences, args.max_length), run, args)
        run.finish({"student after": score(load_student(run.folder, args))})
    library = "sentence-transformers" if POOLINGS[args.pooling].join == "mean" else "transformers"
    run.write_card(f"Trained by `distilface.py` (DistilFACE), {args.pooling}.", library=library)


if __name__ == "__main__":
    run_main(main)
