"""DistilFACE: unsupervised SimCSE on an encoder that is already distilled, with fourteen poolings.

Lim, Ng, Lim: "Distilling Contrastive Learning Models", Georgia Tech, 2022; on arXiv with the title
"Contrastive Learning in Distilled Models", arXiv:2401.12472.

Each sentence of a batch is encoded twice, with different dropout. Given its first embedding, pick
out its second among those of the whole batch. There is no teacher: DistilBERT was distilled before.

    sentences --> student, dropout mask z  --> pool --> h   (queries) --+
        |                                                               +--> InfoNCE, section 3
        +-------> student, dropout mask z' --> pool --> h^+ (keys)    --+

Departures that change results (docs/distilface.md has all of them, next to the authors' code):
  - STS-B dev chooses the best student; the paper chose the number of steps on the test sets.
  - A GPU that has bf16 trains in it; the paper's mixed precision is --precision fp16.

  python distilface.py                              the paper's setting, Table 3
  python distilface.py --student MODEL --student-layers 1,3,5 --train my.txt --dev my.tsv
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

# ---- Losses: call them in fp32, outside autocast -------------------------------------------------


def simcse_loss(first, second, temperature):
    """Section 3: l_i = -log( exp(sim(h_i, h_i^+) / tau) / sum_j exp(sim(h_i, h_j^+) / tau) )

    sim is the cosine. first: h [N, D]; second: h^+ [N, D], of the same sentences with another
    dropout mask; temperature tau > 0. Returns the mean over the batch, a scalar >= 0.
    """
    similarity = F.normalize(first, dim=1) @ F.normalize(second, dim=1).T  # [N, N]
    positives = torch.arange(len(first), device=first.device)  # key i belongs to sentence i
    return F.cross_entropy(similarity / temperature, positives)


# ---- Model ---------------------------------------------------------------------------------------


# Section 5.6, with the names of the authors' code: how layers are combined at each token, and which
# ones, as positions in hidden_states, where 0 is the embedding layer.
LAYER_POOLINGS = {
    "cls": ("mean", [-1]),  # at the first token; the others average all tokens
    "avg": ("mean", [-1]),
    "last_second_hidden": ("mean", [-2]),
    "avg_all_hidden": ("mean", slice(None)),
    "avg_second_to_last_hidden": ("mean", slice(1, None)),
    "avg_first_last": ("mean", [0, -1]),
    "avg_last2": ("mean", slice(-2, None)),
    "avg_last4": ("mean", slice(-4, None)),
    "max_all_hidden": ("max", slice(None)),
    "max_second_to_last_hidden": ("max", slice(1, None)),
    "max_first_last": ("max", [0, -1]),
    "max_last2": ("max", slice(-2, None)),
    "max_last4": ("max", slice(-4, None)),
    "concat_last4": ("concat", slice(-4, None)),
}


def pool(hidden_states, attention_mask, pooling):
    """Section 5.6: combine layers at each token, then average the tokens that are not padding.

    The order is that of the authors' code; the paper does not say over what it takes a maximum.

    hidden_states: the output of the embedding layer and of each layer, [N, L, H] each;
    attention_mask [N, L]; pooling: one of LAYER_POOLINGS, of which "cls" is the last layer's state
    at [CLS]. Returns [N, H], or [N, 4 H] for concat_last4.
    """
    if pooling == "cls":
        return hidden_states[-1][:, 0]
    combine, positions = LAYER_POOLINGS[pooling]
    layers = torch.stack(hidden_states)[positions]  # [k, N, L, H]
    if combine == "concat":
        tokens = torch.cat([*layers], dim=-1)  # [N, L, 4 H]
    elif combine == "max":
        tokens = layers.amax(dim=0)  # [N, L, H]
    else:
        tokens = layers.mean(dim=0)  # [N, L, H]
    mask = attention_mask.unsqueeze(-1)  # [N, L, 1]
    return (tokens * mask).sum(dim=1) / mask.sum(dim=1)


def embed(encoder, input_ids, attention_mask):
    """Token ids and mask, [N, L] each -> embeddings [N, D] in float32.

    encoder: has `model`, a transformer, and `pooling`. The same in training and scoring.
    """
    output = encoder.model(input_ids, attention_mask=attention_mask, output_hidden_states=True)
    hidden_states = [states.float() for states in output.hidden_states]  # [N, L, H] each
    return pool(hidden_states, attention_mask, encoder.pooling)


# ---- Training. Everything above needs only torch and can be copied into other projects -----------

import numpy as np

from common import Batches, Tokens, embed_rows, spearman
from common import read_dev, read_sentences, resolve_data
from common import check_saved, load_encoder, pooling_module, save_encoder
from common import ArgumentParser, Run, UserError, in_range, run_main, run_settings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def train(student, sentences, dev_pairs, run, args):
    """Section 3 -> best dev score, its step, the last step."""
    tokens = Tokens(student, sentences, args.max_length)
    batches = Batches(tokens.lengths, args.batch_size, args.seed, args.group_by_length)
    total = min(args.steps, args.max_steps)
    autocast = torch.autocast(args.device, DTYPES[args.precision], enabled=args.precision != "fp32")
    scaler = torch.amp.GradScaler(args.device, enabled=args.precision == "fp16")  # section 4.2

    parameters = list(student.parameters())
    optimizer = torch.optim.Adam(parameters, lr=args.lr, fused=True)
    student.train()

    # begin() restores `state`, in place, and these values from the last checkpoint, if any.
    state = [student, scaler, optimizer]
    start, best, best_step = run.begin(total, state, (0, -math.inf, 0))
    for step in range(start, total + 1):  # `step` steps are finished
        run.checkpoint(state, (step, best, best_step))  # at most every five minutes

        # Now and then, before the first step and after the last: score the student, keep the best.
        if step % args.eval_steps == 0 or step == total:
            dev = spearman(embed, student, dev_pairs)  # without dropout
            if dev > best:
                best, best_step = dev, step
                save_encoder(student, run.folder, *pooling_modules(student))
            if step == 0:  # before hours of training: can the student be read again?
                saved = load_student(run.folder, args.pooling, device=args.device)
                check_saved(embed, student, saved, sentences[:20])
                del saved  # frees memory
            run.log(step, dev=dev)
            if step == total:
                return best, best_step, step

        # One step.
        rows = batches[step]  # row numbers [N]
        torch.manual_seed(args.seed * 1_000_003 + step)  # a continued run repeats its dropout
        lr = args.lr * (total - step) / total
        optimizer.param_groups[0]["lr"] = lr
        twice = np.concatenate([rows, rows])  # each row of a forward pass has its own dropout
        with autocast:
            views = embed_rows(embed, student, tokens, twice, args.device)  # [2 N, D]
        first, second = views.chunk(2)  # h, h^+ [N, D]
        loss = simcse_loss(first, second, args.temperature)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)  # leaves the parameters as they are if fp16 has overflowed
        scaler.update()
        run.log(step + 1, len(rows), loss=loss, lr=lr)


# ---- Command line --------------------------------------------------------------------------------


def parse_args():
    positive_int = in_range(int, 1)
    positive_float = in_range(float, 1e-9)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shown = "(default: %(default)s)"
    table_3 = "(default: %(default)s; paper Table 3)"
    parser = ArgumentParser(__doc__)

    add = parser.add_argument_group("model").add_argument
    text = "folder or Hub name (default: %(default)s; paper §4)"
    add("--student", default="distilbert-base-uncased", help=text)
    add("--student-layers", help="keep only these layers, counted from 0, as in 1,3,5")
    text = f"replaces the folder's {table_3}"
    add("--pooling", choices=LAYER_POOLINGS, default="avg_last4", help=text)
    add("--dropout", type=in_range(float, 0, 0.99), help="student dropout (default: its folder's)")

    add = parser.add_argument_group("data").add_argument
    text = f"sentences or a .csv of triplets {shown}"
    add("--train", default="wiki1m_for_simcse.txt", help=text)
    add("--dev", help="scored pairs (TSV) that choose the best student (default: STS-B dev)")

    add = parser.add_argument_group("method").add_argument
    add("--temperature", type=positive_float, default=0.05, help=f"tau {table_3}")
    add("--batch-size", type=in_range(int, 2), default=128, help=table_3)
    add("--lr", type=positive_float, default=1e-5, help=f"falls to 0 as in the code {table_3}")
    add("--steps", type=positive_int, default=20_000, help="(default: %(default)s; paper §5.1)")

    add = parser.add_argument_group("run").add_argument
    add("--output", default="runs/distilface", help=f"folder for everything {shown}")
    add("--max-steps", type=positive_int, default=10**9, help="at most")
    add("--max-length", type=in_range(int, 3), default=32, help=f"of a training text {shown}")
    add("--eval-steps", type=positive_int, default=250, help=f"steps between dev scores {shown}")
    add("--seed", type=in_range(int, 0), default=0, help=shown)
    add("--group-by-length", action="store_true", help="batches of texts of similar length")
    add("--device", choices=sorted({"cpu", device}), default=device, help=f"where to run {shown}")
    text = "(default: bf16 on a GPU that has it, else fp32)"
    add("--precision", choices=DTYPES, help=text)
    return parser.parse()


def load_student(name, pooling, layers=None, dropout=None, device="cpu", precision="fp32"):
    """A folder or a name on the Hub -> Encoder with one of LAYER_POOLINGS. Raises UserError."""
    # A given pooling, "mean", makes load_encoder() leave out dense heads and normalization.
    options = dict(dropout=dropout, device=device, precision=precision)
    encoder = load_encoder(name, "mean", layers, **options)
    encoder.pooling = pooling
    depth = encoder.model.config.num_hidden_layers
    for ending, needed in dict(last_second_hidden=2, last2=2, last4=4).items():
        if pooling.endswith(ending) and depth < needed:
            found = f"pooling {pooling} needs {needed} layers, and it has {depth}"
            raise UserError(f"{name}: {found}; choose another --pooling")
    if pooling == "concat_last4":
        encoder.width *= 4
    # SentenceTransformer looks here for the layers that its WeightedLayerPooling averages.
    averages_layers = LAYER_POOLINGS[pooling][0] == "mean" and pooling not in ("cls", "avg")
    encoder.model.config.output_hidden_states = averages_layers
    return encoder


def pooling_modules(encoder):
    """encoder.pooling as modules of sentence-transformers, and what the first one states.

    If several layers are pooled, it states the pooling's name for eval_sts.py.
    """
    tokens = pooling_module(encoder, "cls" if encoder.pooling == "cls" else "mean")
    if encoder.pooling in ("cls", "avg"):
        return [tokens], {}
    combine, positions = LAYER_POOLINGS[encoder.pooling]
    entry = dict(script="distilface", pooling=encoder.pooling)
    if combine != "mean":  # which sentence-transformers refuses
        entry["type"] = "sentence_distillation.LayerPooling"
        return [("LayerPooling", {}, {})], entry
    config = encoder.model.config
    depth = config.num_hidden_layers
    layers = dict(embedding_dimension=config.hidden_size, num_hidden_layers=depth, layer_start=0)
    weights = torch.zeros(depth + 1)
    weights[positions] = 1
    average = ("WeightedLayerPooling", layers, dict(layer_weights=weights / weights.sum()))
    return [average, tokens], entry


@torch.no_grad()
def views_are_equal(student, sentences, max_length):
    """True if no dropout changes these sentences' embeddings: there would be nothing to learn."""
    batch = Tokens(student, sentences, max_length).batch(np.arange(len(sentences)))
    batch = [part.to(student.model.device) for part in batch]
    student.train()
    first, second = embed(student, *batch), embed(student, *batch)
    return torch.allclose(first, second, rtol=1e-4)


def run_train(sentences, dev_pairs, run, args):
    """The run: loads, trains and scores."""
    options = (args.student_layers, args.dropout, args.device, args.precision)
    student = load_student(args.student, args.pooling, *options)
    if views_are_equal(student, sentences[:8], args.max_length):
        raise UserError(f"{args.student}: without dropout, both views are equal; see --dropout")
    run.scores["student before"] = {"dev": spearman(embed, student, dev_pairs)}
    outcome = train(student, sentences, dev_pairs, run, args)
    best = load_student(run.folder, args.pooling, device=args.device)
    is_average = LAYER_POOLINGS[args.pooling][0] == "mean"
    library = "sentence-transformers" if is_average else "transformers"
    card = f"Trained by `distilface.py` (DistilFACE), pooling {args.pooling}."
    row = {"dev": spearman(embed, best, dev_pairs)}
    run.finish(*outcome, "best student", row, card, library)


def main():
    args = parse_args()
    dev_pairs = read_dev(args.dev)
    sentences = read_sentences(resolve_data(args.train))
    run = Run(run_settings(args, [__file__], [dev_pairs, sentences]), args, "train")
    if not run.is_finished:
        run_train(sentences, dev_pairs, run, args)
    print(run.table())


if __name__ == "__main__":
    run_main(main)
