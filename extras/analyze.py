# SPDX-License-Identifier: MIT
"""Draw the papers' figures of embedding spaces: PNG, SVG, and the numbers as JSON.

  space       alignment and uniformity (DistilCSE's Figure 2, IBKD's Figure 5)
  covariance  absolute correlation of dimensions, over 10,000 random --sentences (IBKD's Figure 4)
  cosine      cosine against the gold score of STS-B dev (ConGen's Figure 3)
  edits       edit distance in words against gold score and cosine (ConGen's Figure 5)
  neighbours  of each --query among --sentences, as JSON only (ConGen's Table 12)
  data        best dev score by training sentences seen, or by an option of the runs (--against
              queue-size: ConGen's Figure 4); a model is a folder of runs, as of extras.sweep

Alignment and uniformity (Wang and Isola, 2020): lower is better. Positives are the pairs with a
score above 4, our choice, as neither paper states one. IBKD (eq. 12, 13) squares the distances,
DistilCSE (eq. 8) does not; both are drawn. DistilCSE prints its alignment with a minus sign,
against its own text; it is left out here.

  python -m extras.analyze space runs/ckd runs/ibkd sentence-transformers/all-MiniLM-L6-v2
  python -m extras.analyze data runs/sweep --against queue-size --output figures/queue
"""

import json
import os
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from scipy.spatial.distance import pdist
from scipy.stats import spearmanr
from tqdm import tqdm

from common import BAR, UserError, chunks, encode, one_line_errors
from common import read_dev, read_lines, read_sentences, resolve_data
from common import read_json, read_options, run_main, write_json
from eval_sts import load

DEMO = Path(__file__).resolve().parent.parent / "demo"
SENTENCES = 10_000  # for the covariance
POSITIVE_SCORE = 4  # pairs with a higher score are positives
DIMENSIONS = 16  # that are drawn, as in IBKD's Figure 4
NEAR_EDITS = 5  # the red points of ConGen's Figure 5
RANKS = (1, 5, 10)  # of ConGen's Table 12
DISTANCES = {"squared distances (IBKD)": 2, "distances (DistilCSE)": 1}  # their power
# Okabe and Ito's colors, which color-blind readers can tell apart.
COLORS = ["#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#999999"]
MARKERS = list("osD^vPX*<")  # the ninth model has the first one's color and another marker
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Options:
    figure: Literal["space", "covariance", "cosine", "edits", "neighbours", "data"]  # see above
    models: list  # folders, or names on the Hub; for data, folders of runs
    output: str = None  # path without its ending (default: figures/FIGURE)
    dev: str = None  # scored pairs (TSV) (default: STS-B dev)
    sentences: str = DEMO / "sentences.txt"  # as --train
    query: list = None  # of neighbours, one or several (default: the first sentence)
    against: str = "sentences"  # data: an option of the runs


def unit_vectors(model, sentences):
    """A model's name and n sentences -> float64 [n, D], L2-normalized."""
    encoder, embed = load(model)
    encoder.to(DEVICE)
    bar = tqdm(chunks(sentences, 1024), model, leave=False, delay=1, **BAR)
    vectors = np.concatenate([encode(embed, encoder, chunk) for chunk in bar]).astype(np.float64)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def pair_cosines(model, pairs):
    """n scored pairs -> cosines [n], -1 to 1."""
    first, second, _ = zip(*pairs)
    vectors = unit_vectors(model, first + second)
    return (vectors[: len(pairs)] * vectors[len(pairs) :]).sum(axis=1)


def alignment(first, second, power):
    """IBKD's eq. 12 with power 2, DistilCSE's eq. 8 with power 1: mean |x - y|^power

    first, second [n, D], positive pairs row by row. Returns a number >= 0.
    """
    return (np.linalg.norm(first - second, axis=1) ** power).mean()


def uniformity(vectors, power):
    """IBKD's eq. 13 with power 2, DistilCSE's eq. 8 with power 1: log mean e^(-2 |x - y|^power)

    vectors [n, D], L2-normalized; the mean is over all pairs of rows. Returns a number <= 0.
    """
    return np.log(np.exp(-2 * pdist(vectors) ** power).mean())


def edit_distance(first, second):
    """Levenshtein's: how many words to insert, delete or replace. first, second: lists of words."""
    row = range(len(second) + 1)
    for i, word in enumerate(first, 1):
        above, row = row, [i]
        for j, other in enumerate(second, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (word != other)))
    return row[-1]


def best_scores(folder, against):
    """A folder of runs -> {number: best dev scores of the finished runs with it}, by rising number.

    against: "sentences", where a batch counts as full and a sentence once per epoch, or the name of
    an option. Raises UserError; sentences of several stages differ, and are not counted.
    """
    found = {}
    for path in sorted(Path(folder).glob("*/README.md")):  # a finished run's card
        options = read_json(path.with_name("args.json"), None)
        log = list(read_lines(path.with_name("metrics.jsonl"), json.loads, "it must be a log"))
        stage = log[-1]["stage"]
        dev = {row["step"]: row["dev"] for row in log if "dev" in row and row["stage"] == stage}
        advice = f"a run needs a number of {against}; of sentences, only one stage"
        with one_line_errors(path, advice):
            if stage != "finetune" and not path.with_name("teacher").exists():  # dse.py's
                options["--sentences"] = max(dev) * options["--batch-size"]
            number = float(options[f"--{against}"])
        found.setdefault(number, []).append(max(dev.values()))
    if not found:
        raise UserError(f"{folder}: no run in it; give a folder of runs, as extras.sweep writes it")
    return dict(sorted(found.items()))


# ---- Figures: (names of models, texts, matplotlib.pyplot) -> numbers and figure ------------------


def space(models, pairs, plt):
    """Alignment and uniformity of each model."""
    firsts, seconds, _ = zip(*pairs)
    rows = {sentence: row for row, sentence in enumerate(dict.fromkeys(firsts + seconds))}
    first = [rows[a] for a, _, score in pairs if score > POSITIVE_SCORE]
    second = [rows[b] for _, b, score in pairs if score > POSITIVE_SCORE]
    if not first:
        raise UserError(f"no pair has a score above {POSITIVE_SCORE}; such pairs are the positives")
    numbers = {name: {} for name in models}
    figure, both = plt.subplots(1, 2)
    for name in models:
        vectors = unit_vectors(name, list(rows))
        for axes, (title, power) in zip(both, DISTANCES.items()):
            x = uniformity(vectors, power)
            y = alignment(vectors[first], vectors[second], power)
            numbers[name][title] = {"alignment": y, "uniformity": x}
            axes.plot(x, y, linestyle="", label=name)
            axes.set(title=title, xlabel="uniformity (lower is better)")
    both[0].set_ylabel("alignment (lower is better)")
    return numbers, figure


def covariance(models, texts, plt):
    """Absolute correlation: covariances depend on a model's scale. The numbers are of all D."""
    sentences, _ = texts
    rows = np.random.default_rng(0).choice(len(sentences), min(len(sentences), SENTENCES), False)
    sentences = [sentences[row] for row in sorted(rows)]
    figure, row = plt.subplots(1, len(models), squeeze=False)
    numbers = {}
    for name, axes in zip(models, row[0]):
        matrix = np.abs(np.corrcoef(unit_vectors(name, sentences), rowvar=False))
        others = matrix[~np.eye(len(matrix), dtype=bool)]
        numbers[name] = {"mean |correlation|": others.mean(), "largest": others.max()}
        image = axes.imshow(matrix[:DIMENSIONS, :DIMENSIONS], cmap="Greys", vmin=0, vmax=1)
        axes.set_title(f"{name}\nmean of all {len(matrix)}: {others.mean():.3f}")
        axes.grid(False)
    figure.colorbar(image, ax=row, label="|correlation|", shrink=0.8)
    return numbers, figure


def correlations(panels, color, labels, plt):
    """Two measures of each pair. panels {title: (x, y)}, [n] both; color: of all, or of each."""
    figure, row = plt.subplots(1, len(panels), squeeze=False, sharey=True)
    numbers = {}
    for (title, (x, y)), axes in zip(panels.items(), row[0]):
        numbers[title] = 100 * spearmanr(x, y).statistic
        axes.scatter(x, y, s=6, c=color, alpha=0.35, linewidths=0)
        axes.set(title=f"{title}\nSpearman {numbers[title]:.2f}", xlabel=labels[0])
    row[0, 0].set_ylabel(labels[1])
    return numbers, figure


def cosine(models, pairs, plt):
    """Cosine of each pair against its gold score."""
    gold = [score for _, _, score in pairs]
    panels = {name: (gold, pair_cosines(name, pairs)) for name in models}
    return correlations(panels, "#0072B2", ("gold score", "cosine"), plt)


def edits(models, pairs, plt):
    """Edit distance of each pair against gold score and cosine; red: NEAR_EDITS or fewer."""
    distances = [edit_distance(a.lower().split(), b.lower().split()) for a, b, _ in pairs]
    colors = ["#D55E00" if distance <= NEAR_EDITS else "#0072B2" for distance in distances]
    panels = {"gold score": ([score for _, _, score in pairs], distances)}
    for name in models:
        panels[name] = (pair_cosines(name, pairs), distances)
    return correlations(panels, colors, ("similarity", "edit distance, words"), plt)


def data(folders, against, plt):
    """Best dev score by a number; bars: the standard deviation (n - 1) of runs with the same."""
    figure, axes = plt.subplots()
    numbers = {name: best_scores(name, against) for name in folders}
    for name, scores in numbers.items():
        means = [np.mean(values) for values in scores.values()]
        spreads = [np.std(values, ddof=1) if len(values) > 1 else 0 for values in scores.values()]
        axes.errorbar(list(scores), means, spreads, label=name, capsize=2)
    axes.set(xlabel=against, ylabel="best dev score")
    axes.set_xscale("symlog")  # a logarithm that has a place for 0
    axes.set_xticks(sorted(set().union(*numbers.values())))
    axes.xaxis.set_major_formatter("{x:,g}")
    return numbers, figure


def neighbours(models, texts, _):
    """Nearest by cosine, without the query -> {query: {model: {rank: sentence}}}, no figure."""
    sentences, queries = texts
    found = {query: {} for query in queries}
    for name in models:
        vectors = unit_vectors(name, sentences + queries)
        for query, vector in zip(queries, vectors[len(sentences) :]):
            order = np.argsort(-vectors[: len(sentences)] @ vector, kind="stable")
            nearest = dict.fromkeys(sentences[row] for row in order)
            others = [sentence for sentence in nearest if sentence != query]
            found[query][name] = {rank: others[rank - 1] for rank in RANKS if rank <= len(others)}
    return found, None


# ---- Command line --------------------------------------------------------------------------------

FIGURES = dict(space=space, covariance=covariance, cosine=cosine, edits=edits)
FIGURES |= dict(neighbours=neighbours, data=data)


def read_texts(args):
    """What the figure needs except the models. Raises UserError."""
    if args.figure == "data":
        return args.against
    if args.figure in ("covariance", "neighbours"):
        sentences = read_sentences(resolve_data(args.sentences))
        return sentences, args.query or sentences[:1]
    return read_dev(args.dev)


def main():
    args = read_options(Options, __doc__)
    os.environ["MPLBACKEND"] = "agg"  # a notebook may have set another one
    with one_line_errors("matplotlib", "figures need it: pip install matplotlib"):
        import matplotlib.pyplot as plt
    marks = plt.cycler(color=COLORS * 9, marker=MARKERS * 8)
    plt.rc("axes", titlesize=8, grid=True, prop_cycle=marks)
    plt.rc("figure", figsize=(9, 4))
    plt.rc("figure.constrained_layout", use=True)
    output = args.output or f"figures/{args.figure}"
    numbers, figure = FIGURES[args.figure](args.models, read_texts(args), plt)
    write_json(f"{output}.json", numbers)
    if figure:
        labels = figure.axes[-1].get_legend_handles_labels()
        figure.legend(*labels, loc="outside lower center", frameon=False)
        figure.savefig(f"{output}.png", dpi=200)
        figure.savefig(f"{output}.svg")
    print(f"{output}.json")


if __name__ == "__main__":
    run_main(main)
