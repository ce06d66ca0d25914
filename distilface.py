# SPDX-License-Identifier: MIT
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

from typing import Literal

from common import Batches, embed_texts, spearman, token_lengths
from common import read_dev, read_sentences, resolve_data
from common import load_encoder, save_encoder
from common import Device, in_range, positive_float, positive_int
from common import Run, UserError, read_options, run_main, run_settings, table

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# Each line is an option, and its comment the help text: read_options() of common.py reads both.
class Options:
    student: str = "distilbert-base-uncased"  # folder or Hub name; paper §4
    student_layers: str = None  # keep only these layers, counted from 0, as in 1,3,5
    pooling: Literal[tuple(LAYER_POOLINGS)] = "avg_last4"  # replaces the folder's; Table 3
    dropout: in_range(float, 0, 0.99) = None  # of the student (default: its folder's)

    train: str = "wiki1m_for_simcse.txt"  # sentences, or a .csv of triplets
    dev: str = None  # scored pairs (TSV) or senteval.tar; they choose the best (default: STS-B dev)

    temperature: positive_float = 0.05  # tau; Table 3
    batch_size: in_range(int, 2) = 128  # Table 3
    lr: positive_float = 1e-5  # falls to 0, as in the authors' code; Table 3
    steps: positive_int = 20_000  # paper §5.1

    output: str = "runs/distilface"  # folder for everything
    max_steps: positive_int = 10**9  # at most
    max_length: in_range(int, 3) = 32  # tokens of a training text; Table 3
    eval_steps: positive_int = 250  # steps between dev scores; the authors have none
    seed: in_range(int, 0) = 0  # of batches and dropout; a continued run repeats them
    group_by_length: bool = False  # batches of texts of similar length
    device: Device = None  # (default: cuda if there is one)
    precision: Literal[tuple(DTYPES)] = None  # (default: bf16 on a GPU that has it, else fp32)


def train(student, sentences, dev_pairs, run, args):
    """Section 3: unsupervised SimCSE; the best by dev score is kept."""
    lengths = token_lengths(args, student, sentences)
    batches = Batches(len(sentences), args.batch_size, args.seed, lengths)
    total = min(args.steps, args.max_steps)
    autocast = torch.autocast(args.device, DTYPES[args.precision], enabled=args.precision != "fp32")
    scaler = torch.amp.GradScaler(args.device, enabled=args.precision == "fp16")  # section 4.2

    parameters = list(student.parameters())
    optimizer = torch.optim.Adam(parameters, lr=args.lr, fused=True)
    student.train()

    state = [student, scaler, optimizer]
    start, _ = run.begin(total, state)  # from the last checkpoint, if there is one
    for step in range(start, total + 1):  # `step` steps are finished
        run.checkpoint(step, state)

        # Now and then, before the first step and after the last: score the student, keep the best.
        if step % args.eval_steps == 0 or step == total:
            if run.is_best(step, spearman(embed, student, dev_pairs)):
                save_student(student, run.folder)
            if step == total:
                return

        # One step.
        texts = [sentences[row] for row in batches[step]]
        torch.manual_seed(args.seed * 1_000_003 + step)
        lr = args.lr * (total - step) / total
        optimizer.param_groups[0]["lr"] = lr
        with autocast:  # each text of a forward pass has its own dropout
            views = embed_texts(embed, student, texts + texts, args.max_length)  # [2 N, D]
        first, second = views.chunk(2)  # h, h^+ [N, D]
        loss = simcse_loss(first, second, args.temperature)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)  # leaves the parameters as they are if fp16 has overflowed
        scaler.update()
        run.log(step + 1, loss=loss, lr=lr)


# ---- Model folders -------------------------------------------------------------------------------


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


def save_student(encoder, folder):
    """Write its folder, with encoder.pooling as modules of sentence-transformers.

    If several layers are pooled, modules.json has the pooling's name for eval_sts.py.
    """
    config = encoder.model.config
    depth, width = config.num_hidden_layers, config.hidden_size
    over_tokens = "cls" if encoder.pooling == "cls" else "mean"
    tokens = ("Pooling", dict(pooling_mode=over_tokens, word_embedding_dimension=width), {})
    if encoder.pooling in ("cls", "avg"):
        return save_encoder(encoder, folder, [tokens])
    combine, positions = LAYER_POOLINGS[encoder.pooling]
    further = dict(script="distilface", pooling=encoder.pooling)
    if combine != "mean":  # which sentence-transformers refuses
        further["type"] = "sentence_distillation.LayerPooling"
        return save_encoder(encoder, folder, [("LayerPooling", {}, {})], **further)
    layers = dict(embedding_dimension=width, num_hidden_layers=depth, layer_start=0)
    weights = torch.zeros(depth + 1)
    weights[positions] = 1
    average = ("WeightedLayerPooling", layers, dict(layer_weights=weights / weights.sum()))
    save_encoder(encoder, folder, [average, tokens], **further)


# ---- Command line --------------------------------------------------------------------------------


@torch.no_grad()
def views_are_equal(student, sentences, max_length):
    """True if no dropout changes these sentences' embeddings: there would be nothing to learn."""
    student.train()
    first, second = [embed_texts(embed, student, sentences, max_length) for _ in range(2)]
    return torch.allclose(first, second, rtol=1e-4)


def main():
    args = read_options(Options, __doc__)
    dev_pairs = read_dev(args.dev)
    sentences = read_sentences(resolve_data(args.train))
    run = Run(run_settings(args, [__file__], [dev_pairs, sentences]), args, "train")
    if not run.is_finished:
        options = (args.student_layers, args.dropout, args.device, args.precision)
        student = load_student(args.student, args.pooling, *options)
        if views_are_equal(student, sentences[:8], args.max_length):
            raise UserError(f"{args.student}: without dropout, both views are equal; see --dropout")
        run.scores["student before"] = {"dev": spearman(embed, student, dev_pairs)}
        train(student, sentences, dev_pairs, run, args)
        best = load_student(run.folder, args.pooling, device=args.device)
        run.finish("best student", {"dev": spearman(embed, best, dev_pairs)})
    print(table(run.scores))


if __name__ == "__main__":
    run_main(main)
