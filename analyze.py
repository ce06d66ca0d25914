"""The papers' figures of an embedding space, for any encoders: PNG, SVG, and the numbers as JSON.

  space       alignment and uniformity, a point for each model
              (DistilCSE's Figure 2, IBKD's Figure 5)
  covariance  between the first 16 dimensions (IBKD's Figure 4), over 10,000 of --sentences that
              --seed draws at random; the paper's are of its NLI data
  cosine      against the gold score of STS-B dev, Spearman in the title (ConGen's Figure 3)
  edits       edit distance in words against gold score and cosine (ConGen's appendix A.3, Figure 5)
  neighbours  of --query among --sentences, at ranks 1, 5 and 10: a Markdown table, no figure
              (ConGen's Table 12)
  curve       dev score by step, from the metrics.jsonl of one or several runs
  data        best dev score against the training sentences seen: each line is a folder of runs,
              such as one that sweep.py leaves; runs of equally many are averaged (seeds)
  speed       average over the seven STS sets against sentences encoded in a second, on this machine

The figures need matplotlib. Alignment and uniformity are those of Wang and Isola (2020): positives
are the STS-B dev pairs with a score above 4, the data are all its sentences, embeddings are
L2-normalized, and lower is better. IBKD (eq. 12, 13) takes squared distances, DistilCSE (eq. 8)
distances; both are drawn. DistilCSE prints a minus sign before its alignment. With it lower would
be worse, which contradicts the paper's text, so it is left out here.

  python analyze.py space runs/ckd runs/ibkd sentence-transformers/all-MiniLM-L6-v2
  python analyze.py covariance runs/ckd runs/ibkd --sentences nli_for_simcse.csv
  python analyze.py curve runs/ckd runs/congen --output figures/curve
  python analyze.py data runs/ckd-sizes runs/congen-sizes
  python analyze.py neighbours runs/congen --sentences captions.txt --query "A dog runs."
"""

import io
import sys
import time
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from common import (
    DataError,
    ScoredPairs,
    check_target,
    encode_sentences,
    read_scored_pairs,
    read_sts,
    resolve,
    spearman,
    write_whole,
    writing,
)
from support.command_line import (
    ArgumentParser,
    add_device_option,
    run_main,
    seed,
    training_sentences,
    write_report,
)
from support.encoder import load_encoder, read_json
from support.records import read_metrics

FIGURES = ("space", "covariance", "cosine", "edits", "neighbours", "curve", "data", "speed")
FIGURES_OF_SENTENCES = ("covariance", "neighbours")  # the others need scored pairs
SENTENCES = 10_000  # for the covariance
POSITIVE_SCORE = 4  # pairs with a higher score are positives
DIMENSIONS_DRAWN = 16
NEAR_EDITS = 5  # the paper's red points
RANKS = (1, 5, 10)
DISTANCES = {"squared distances (IBKD)": True, "distances (DistilCSE)": False}  # squared or not

COLORS = (  # Okabe and Ito's, for color-blind readers
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#D55E00",
    "#0072B2",
    "#CC79A7",
    "#999999",
)
SHAPES = "osD^vPX*<"  # the ninth model has the first one's color in another shape
MARKS = tuple((COLORS[i % len(COLORS)], SHAPES[i % len(SHAPES)]) for i in range(72))
POINTS = dict(s=6, color="#0072B2", alpha=0.35, linewidths=0)
NEAR_POINTS = dict(s=9, color="#D55E00", alpha=0.5, linewidths=0, marker="^")
STYLE = {
    "font.size": 9,
    "text.parse_math": False,  # a $ in a model's name is a $
    "axes.titlesize": 9,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "figure.constrained_layout.use": True,
}

# --------------------------------------------------------------------------------------------------
# Numbers
# --------------------------------------------------------------------------------------------------


def unit_vectors(encoder, sentences):
    """List of n sentences -> float64 [n, D], L2-normalized."""
    vectors = encode_sentences(encoder, sentences).astype(np.float64)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def pair_cosines(encoder, pairs):
    """ScoredPairs of n -> [n], -1 to 1."""
    first = unit_vectors(encoder, pairs.first)
    second = unit_vectors(encoder, pairs.second)
    return (first * second).sum(axis=1)


def alignment(first, second, squared=True):
    """IBKD's eq. 12: mean |x - y|^2 of positive pairs; DistilCSE's eq. 8: mean |x - y|.

    first, second [n, D], positive pairs row by row; returns a number >= 0.
    """
    power = 2 if squared else 1
    return float((np.linalg.norm(first - second, axis=1) ** power).mean())


def uniformity(vectors, squared=True):
    """IBKD's eq. 13: log mean e^(-2 |x - y|^2); DistilCSE's eq. 8: log mean e^(-2 |x - y|).

    vectors [n, D], L2-normalized; the mean is over all pairs of rows; returns a number <= 0.
    """
    power = 2 if squared else 1
    total = 0.0
    for i in range(len(vectors)):
        squares = np.maximum(0, 2 - 2 * vectors[i + 1 :] @ vectors[i])
        total += np.exp(-2 * np.sqrt(squares) ** power).sum()
    pairs = len(vectors) * (len(vectors) - 1) / 2
    return float(np.log(total / pairs))


def edit_distance(first, second):
    """Levenshtein's, in words: lists of words -> insertions, deletions and substitutions."""
    row = list(range(len(second) + 1))
    for i, word in enumerate(first, 1):
        diagonal = row[0]
        row[0] = i
        for j, other in enumerate(second, 1):
            substitution = diagonal + (word != other)
            diagonal = row[j]
            row[j] = min(row[j] + 1, row[j - 1] + 1, substitution)
    return row[-1]


def pair_edits(pairs):
    """ScoredPairs of n -> edit distances [n], of lower-case words."""
    distances = []
    for first, second in zip(pairs.first, pairs.second):
        distances.append(edit_distance(first.lower().split(), second.lower().split()))
    return np.array(distances)


def read_dev_scores(file):
    """metrics.jsonl -> steps, counted over all stages, and the dev score at each.

    Raises DataError.
    """
    steps, scores = [], []
    stage = None
    step = 0
    earlier_stages = 0  # their steps
    for _, entry in read_metrics(file):
        if entry.get("stage") != stage:
            earlier_stages += step
            stage = entry.get("stage")
        step = entry["step"]
        if "dev" in entry:
            scores.append(float(entry["dev"]))
            steps.append(earlier_stages + step)
    if not steps:
        raise DataError(f"{file}: no dev score in it, expected one or more")
    return steps, scores


def read_best_scores(folder):
    """A folder of runs -> {sentences seen: [best dev score of each run that saw so many]}.

    A batch counts as full, and a sentence once in each epoch. Raises DataError, also for a run of
    several stages: each has its own data and batches.
    """
    found = {}
    for log in sorted(Path(folder).glob("*/metrics.jsonl")):
        stages = {entry.get("stage") for _, entry in read_metrics(log)}
        if len(stages) > 1:
            raise DataError(f"{log}: {len(stages)} stages, expected a run of one, as --stage gives")
        steps, scores = read_dev_scores(log)
        batch_size = (read_json(log.parent / "args.json") or {}).get("batch_size")
        if not isinstance(batch_size, int):
            raise DataError(f"{log.parent / 'args.json'}: no batch_size, expected that of a run")
        found.setdefault(steps[-1] * batch_size, []).append(max(scores))
    if not found:
        raise DataError(f"{folder}: expected a folder of runs, each with a metrics.jsonl")
    return dict(sorted(found.items()))


# --------------------------------------------------------------------------------------------------
# Figures: each returns its numbers and the figure
# --------------------------------------------------------------------------------------------------


def scatter(axes, points):
    """{label: (x, y)}, each with a color and a shape of its own."""
    for (label, (x, y)), (color, shape) in zip(points.items(), MARKS):
        axes.scatter(x, y, s=60, color=color, marker=shape, label=label)


def add_legend(axes):
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def row_of_axes(plt, count, width, margin, **options):
    """A figure with `count` axes side by side, each `width` inches wide."""
    size = (width * count + margin, 3)
    figure, axes = plt.subplots(1, count, figsize=size, squeeze=False, **options)
    return figure, axes[0]


def space(encoders, pairs, plt):
    """Alignment and uniformity of each model."""
    row = {sentence: i for i, sentence in enumerate(dict.fromkeys(pairs.first + pairs.second))}
    first, second = [], []
    for a, b, score in zip(*pairs):
        if score > POSITIVE_SCORE:
            first.append(row[a])
            second.append(row[b])
    if not first:
        problem = f"no pair with a score above {POSITIVE_SCORE}"
        raise DataError(f"space: {problem}, expected some: they are the positives")
    numbers = {}
    for name, encoder in encoders.items():
        vectors = unit_vectors(encoder, list(row))
        numbers[name] = {}
        for title, squared in DISTANCES.items():
            numbers[name][title] = {
                "alignment": alignment(vectors[first], vectors[second], squared),
                "uniformity": uniformity(vectors, squared),
            }
    figure, both = plt.subplots(1, len(DISTANCES), figsize=(8.5, 3.4))
    for axes, title in zip(both, DISTANCES):
        points = {}
        for name, values in numbers.items():
            points[name] = (values[title]["uniformity"], values[title]["alignment"])
        scatter(axes, points)
        axes.set(
            title=title,
            xlabel="uniformity (lower is better)",
            ylabel="alignment (lower is better)",
        )
    add_legend(both[-1])
    return numbers, figure


def covariance(encoders, sentences, plt, dimensions=DIMENSIONS_DRAWN):
    """Absolute correlation of the first dimensions, dark where it is large.

    Covariances are divided by the standard deviations, so that models can be compared. The numbers
    are of all dimensions.
    """
    figure, row = row_of_axes(plt, len(encoders), width=2.7, margin=0.7)
    numbers = {}
    ticks = range(0, dimensions, 5)
    for (name, encoder), axes in zip(encoders.items(), row):
        vectors = unit_vectors(encoder, sentences)
        if vectors.shape[1] < 2:
            raise DataError(f"{name}: embeddings of one dimension, expected two or more to compare")
        matrix = np.abs(np.corrcoef(vectors, rowvar=False))
        off_diagonal = matrix[~np.eye(len(matrix), dtype=bool)]
        mean = float(off_diagonal.mean())
        numbers[name] = {
            "mean |correlation|": mean,
            "largest": float(off_diagonal.max()),
            "dimensions": len(matrix),
            "sentences": len(sentences),
        }
        image = axes.imshow(matrix[:dimensions, :dimensions], cmap="Greys", vmin=0, vmax=1)
        title = f"{name}\nmean of all {len(matrix)}: {mean:.3f}"
        axes.set(title=title, xticks=ticks, yticks=ticks)
        axes.grid(False)
    figure.colorbar(image, ax=row, label="|correlation|", shrink=0.8)
    return numbers, figure


def correlation(x, y):
    return {"Spearman x 100": 100 * float(spearmanr(x, y).statistic), "pairs": len(x)}


def title_with_correlation(name, numbers):
    return f"{name}\nSpearman {numbers['Spearman x 100']:.2f}"


def cosine(encoders, pairs, plt):
    """Cosine of each pair against its gold score."""
    figure, row = row_of_axes(plt, len(encoders), width=2.8, margin=0.4, sharey=True)
    numbers = {}
    for (name, encoder), axes in zip(encoders.items(), row):
        cosines = pair_cosines(encoder, pairs)
        numbers[name] = correlation(pairs.scores, cosines)
        axes.scatter(pairs.scores, cosines, **POINTS)
        axes.set(title=title_with_correlation(name, numbers[name]), xlabel="gold score")
    row[0].set_ylabel("cosine")
    return numbers, figure


def edits(encoders, pairs, plt):
    """Edit distance against the gold score and against each model's cosine.

    Triangles: pairs with NEAR_EDITS or fewer.
    """
    distance = pair_edits(pairs)
    near = distance <= NEAR_EDITS
    similarities = {"gold score": np.array(pairs.scores)}
    for name, encoder in encoders.items():
        similarities[name] = pair_cosines(encoder, pairs)
    figure, row = row_of_axes(plt, len(similarities), width=2.8, margin=0.4, sharey=True)
    numbers = {}
    for (name, similarity), axes in zip(similarities.items(), row):
        numbers[name] = correlation(similarity, distance)
        axes.scatter(similarity[~near], distance[~near], **POINTS)
        axes.scatter(similarity[near], distance[near], **NEAR_POINTS)
        axes.set(title=title_with_correlation(name, numbers[name]), xlabel="cosine")
    row[0].set_xlabel("similarity")
    row[0].set_ylabel("edit distance, words")
    return numbers, figure


def curve(runs, plt):
    """Dev score by step, one stage after the other. runs: {label: folder}."""
    figure, axes = plt.subplots(figsize=(6.5, 3.6))
    numbers = {}
    for (name, folder), (color, shape) in zip(runs.items(), MARKS):
        steps, scores = read_dev_scores(Path(folder) / "metrics.jsonl")
        numbers[name] = {"step": steps, "dev": scores}
        line = dict(color=color, marker=shape, markersize=4, linewidth=1.2)
        axes.plot(steps, scores, label=name, **line)
    axes.set(xlabel="step", ylabel="dev score")
    add_legend(axes)
    return numbers, figure


def data(folders, plt):
    """Best dev score against the sentences seen, a line for each {label: folder of runs}.

    Bars: the standard deviation (n - 1) over runs of equally many sentences.
    """
    figure, axes = plt.subplots(figsize=(6.5, 3.6))
    numbers = {}
    for (name, folder), (color, shape) in zip(folders.items(), MARKS):
        scores = read_best_scores(folder)
        numbers[name] = scores
        means = [np.mean(values) for values in scores.values()]
        spreads = [np.std(values, ddof=1) if len(values) > 1 else 0 for values in scores.values()]
        line = dict(color=color, marker=shape, markersize=4, linewidth=1.2, capsize=2)
        axes.errorbar(list(scores), means, spreads, label=name, **line)
    axes.set(xscale="log", xlabel="training sentences seen", ylabel="best dev score")
    axes.xaxis.get_major_locator().set_params(subs=(1, 2, 5))  # 1,000, 2,000, 5,000, 10,000
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.minorticks_off()
    add_legend(axes)
    return numbers, figure


WARM_UP = ScoredPairs(("A dog.", "A dog."), ("A cat.", "A dog."), (0, 5))


def speed(encoders, sets, plt):
    """Average of the sets' scores against the sentences a second of scoring them.

    The time is that of tokenizing, batching and encoding each distinct sentence once.
    """
    distinct = {text for pairs in sets.values() for text in pairs.first + pairs.second}
    numbers = {}
    for name, encoder in encoders.items():
        spearman(encoder, {"warm-up": WARM_UP})
        begin = time.perf_counter()
        scores = spearman(encoder, sets, title=name)
        seconds = time.perf_counter() - begin
        numbers[name] = {
            "average": scores.get("avg", next(iter(scores.values()))),
            "sentences/s": len(distinct) / seconds,
            "parameters": sum(value.numel() for value in encoder.parameters()),
        }
    figure, axes = plt.subplots(figsize=(6.5, 3.6))
    scatter(axes, {name: (row["sentences/s"], row["average"]) for name, row in numbers.items()})
    label = "Spearman x 100"
    if len(sets) > 1:
        label += f", average of {len(sets)} sets"
    axes.set(xlabel="sentences encoded in a second", ylabel=label, xlim=(0, None))
    add_legend(axes)
    return numbers, figure


# --------------------------------------------------------------------------------------------------
# Table
# --------------------------------------------------------------------------------------------------


def neighbours(encoders, sentences, queries, ranks=RANKS):
    """Nearest neighbors by cosine, without the query itself -> {query: {rank: {model: sentence}}}.

    Raises DataError if there are fewer different sentences than ranks.
    """
    sentences = list(dict.fromkeys(sentences))
    last = max(ranks)
    if len(sentences) <= last:
        problem = f"{len(sentences)} different sentences"
        raise DataError(f"neighbours: {problem}, expected more than {last}")
    found = {query: {rank: {} for rank in ranks} for query in queries}
    for name, encoder in encoders.items():
        vectors = unit_vectors(encoder, sentences)
        for query, vector in zip(queries, unit_vectors(encoder, queries)):
            nearest = np.argsort(-vectors @ vector, kind="stable")[: last + 1]
            others = [sentences[i] for i in nearest if sentences[i] != query]
            for rank in ranks:
                found[query][rank][name] = others[rank - 1]
    return found


def print_neighbours(found, models):
    """A Markdown table for each query."""
    for query, ranks in found.items():
        print(f"\n{query}\n")
        print(f"| rank | {' | '.join(models)} |")
        print(f"|---:|{'---|' * len(models)}")
        for rank, row in ranks.items():
            print(f"| {rank} | {' | '.join(row.values())} |")


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------


def parse_args():
    parser = ArgumentParser("The papers' figures of an embedding space: PNG, SVG and JSON.")
    add = parser.add_argument
    add("figure", choices=FIGURES)
    add(
        "models",
        nargs="+",
        metavar="MODEL",
        help="folder or Hub name; for curve the folders of runs, for data folders of such folders",
    )
    add("--output", help="path without its ending; figures/FIGURE")
    add("--pairs", help="scored pairs (TSV) instead of STS-B dev, for speed of the seven test sets")
    add(
        "--senteval",
        default="senteval.tar",
        help="SentEval's folder or tar, local or from the Hub; %(default)s",
    )
    add(
        "--sentences",
        default="demo",
        help="one a line, or NLI triplets (.csv), taken apart, for covariance (a random "
        f"{SENTENCES:,}) and neighbours; %(default)s",
    )
    add("--seed", type=seed, default=0, help="of the random sentences; %(default)s")
    add(
        "--query",
        action="append",
        default=[],
        help="a sentence whose nearest neighbors are printed; may be given several times",
    )
    add_device_option(parser)
    args = parser.parse()
    if (args.figure == "neighbours") != bool(args.query):
        expected = "expected with neighbours, which needs a sentence, and with no other figure"
        raise DataError(f"--query: {expected}")
    return args


def load_matplotlib():
    """-> matplotlib.pyplot, which draws into files only. Raises DataError if it is missing."""
    try:
        import matplotlib
    except ImportError:
        problem = "this figure needs matplotlib, which is not installed"
        raise DataError(f"{problem}: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(STYLE)
    return plt


def label_models(names):
    """-> {label: name}: the last part of a name, or the whole where two have the same last part."""
    last = [Path(name).name for name in names]
    labels = {}
    for name, short in zip(names, last):
        label = short if last.count(short) == 1 else name
        labels[label] = name
    return labels


def read_data(args):
    """What the figure needs: sentences, ScoredPairs, or for speed {name: ScoredPairs}.

    Raises DataError.
    """
    if args.figure in FIGURES_OF_SENTENCES:
        sentences = training_sentences(args.sentences)
        if len(sentences) < 2:
            raise DataError(f"{args.sentences}: one sentence, expected two or more to compare")
        return sample(sentences, args.seed) if args.figure == "covariance" else sentences
    if args.pairs:
        sets = {args.pairs: read_scored_pairs(args.pairs)}
    else:
        split = "test" if args.figure == "speed" else "dev"
        sets = read_sts(resolve(args.senteval), split)
    if args.figure == "speed":
        return sets
    (pairs,) = sets.values()
    return pairs


def sample(sentences, seed):
    """SENTENCES of them at random, none twice, in their order; all where there are fewer."""
    if len(sentences) <= SENTENCES:
        return sentences
    rows = np.random.default_rng(seed).choice(len(sentences), SENTENCES, replace=False)
    return [sentences[row] for row in sorted(rows)]


def make_figure(args, labels, plt):
    """-> numbers, figure."""
    if args.figure == "curve":
        return curve(labels, plt)
    if args.figure == "data":
        return data(labels, plt)
    texts = read_data(args)
    encoders = load_encoders(labels, args.device)
    figures = dict(space=space, covariance=covariance, cosine=cosine, edits=edits, speed=speed)
    return figures[args.figure](encoders, texts, plt)


def load_encoders(labels, device):
    return {label: load_encoder(name).to(device).eval() for label, name in labels.items()}


def draw(figure, format, **options):
    """A figure as the bytes of a file."""
    content = io.BytesIO()
    figure.savefig(content, format=format, **options)
    return content.getvalue()


def write(output, numbers, figure=None):
    """OUTPUT.json and, of a figure, OUTPUT.png and OUTPUT.svg. Raises DataError."""
    files = [f"{output}.json"]
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    if figure is not None:
        files += [f"{output}.png", f"{output}.svg"]
        write_whole(f"{output}.png", draw(figure, "png", dpi=200))
        write_whole(f"{output}.svg", draw(figure, "svg"))
    write_report(f"{output}.json", numbers)
    print(f"wrote {', '.join(files)}", file=sys.stderr)


def main():
    args = parse_args()
    output = Path(args.output or f"figures/{args.figure}")
    for ending in ("json", "png", "svg"):
        check_target(f"{output}.{ending}")
    labels = label_models(args.models)
    if args.figure == "neighbours":
        sentences = read_data(args)
        found = neighbours(load_encoders(labels, args.device), sentences, args.query)
        print_neighbours(found, list(labels))
        write(output, found)
    else:
        numbers, figure = make_figure(args, labels, load_matplotlib())
        write(output, numbers, figure)


if __name__ == "__main__":
    run_main(main)
