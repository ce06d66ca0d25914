"""The papers' figures of an embedding space, for any encoders: PNG and SVG, and the numbers as JSON beside them. Needs matplotlib.

  space       alignment and uniformity (DistilCSE's Figure 2, IBKD's Figure 5), a point for each model
  covariance  between the first 16 dimensions (IBKD's Figure 4)
  cosine      against the gold score of STS-B dev (ConGen's Figure 3), Spearman in the title
  edits       edit distance in words against gold score and cosine (ConGen's appendix A.3, Figure 5)
  neighbours  of --query among --sentences, at ranks 1, 5 and 10 (ConGen's Table 12): a Markdown table, no figure
  curve       dev score by step, from the metrics.jsonl of one or several runs
  speed       average over the seven STS sets against sentences encoded in a second, on this machine

Alignment and uniformity are Wang and Isola's (2020): positives are STS-B dev pairs with a score above 4, data are all its sentences, embeddings have
unit length, lower is better. IBKD (eq. 12, 13) takes squared distances, DistilCSE (eq. 8) distances; both are drawn. DistilCSE prints a minus before
its alignment, under which lower would be worse, against its own text: it is left out here.

  python analyze.py space runs/ckd runs/ibkd sentence-transformers/all-MiniLM-L6-v2 --output figures/space
  python analyze.py curve runs/ckd runs/congen --output figures/curve
  python analyze.py neighbours runs/congen --sentences captions.txt --query "A dog runs."
"""
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr

import common
import demo

COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#999999")  # Okabe and Ito's, for colour-blind readers
MARKS = tuple((COLOURS[i % 8], "osD^vPX*<"[i % 9]) for i in range(72))  # the ninth differs from the first


def unit_vectors(encoder, sentences):
    """-> float64 [n, D], of unit length."""
    vectors = common.encode(encoder, common.Tokens(encoder, list(sentences)), next(encoder.parameters()).device).astype(np.float64)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def alignment(first, second, squared=True):
    """IBKD's eq. 12, or DistilCSE's eq. 8 without its minus: [n, D] twice, positive pairs row by row -> mean distance, squared or not, >= 0."""
    return float((np.linalg.norm(first - second, axis=1) ** (2 if squared else 1)).mean())


def uniformity(vectors, squared=True):
    """IBKD's eq. 13, or DistilCSE's eq. 8: [n, D] of unit length -> log of the mean of e^(-2 distance), squared or not, over pairs of rows, <= 0."""
    total = 0.0
    for i in range(len(vectors)):
        distance = np.sqrt(np.maximum(0, 2 - 2 * vectors[i + 1:] @ vectors[i]))
        total += np.exp(-2 * distance ** (2 if squared else 1)).sum()
    return float(np.log(total / (len(vectors) * (len(vectors) - 1) / 2)))


def edit_distance(first, second):
    """Levenshtein's, in words: lists of words -> how many must be put in, taken out or changed."""
    row = list(range(len(second) + 1))
    for i, word in enumerate(first, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(second, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1]


def scatter(axes, points):
    """{label: (x, y)}, each with a colour and a mark of its own."""
    for (label, (x, y)), (colour, mark) in zip(points.items(), MARKS):
        axes.scatter(x, y, s=60, color=colour, marker=mark, label=label)


def space(encoders, pairs, plt):
    """Alignment and uniformity of each model."""
    text = list(dict.fromkeys(pairs.first + pairs.second))
    row, numbers = {sentence: i for i, sentence in enumerate(text)}, {}
    first, second = ([row[sentence] for sentence, score in zip(side, pairs.scores) if score > 4] for side in (pairs.first, pairs.second))
    if not first:
        raise common.DataError("space: no pair with a score above 4, expected some: they are the positives")
    for name, encoder in encoders.items():
        vectors = unit_vectors(encoder, text)
        numbers[name] = {kind: {"alignment": alignment(vectors[first], vectors[second], squared), "uniformity": uniformity(vectors, squared)}
                         for kind, squared in (("squared distances (IBKD)", True), ("distances (DistilCSE)", False))}
    figure, both = plt.subplots(1, 2, figsize=(8.5, 3.4))
    for axes, kind in zip(both, numbers[name]):
        scatter(axes, {name: (row[kind]["uniformity"], row[kind]["alignment"]) for name, row in numbers.items()})
        axes.set(title=kind, xlabel="uniformity (lower is better)", ylabel="alignment (lower is better)")
    both[1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return numbers, figure


def covariance(encoders, sentences, plt, dimensions=16):
    """Of the first dimensions, each divided by its standard deviation so that scales compare: correlation, dark is large. Numbers: all dimensions."""
    figure, axes = plt.subplots(1, len(encoders), figsize=(2.7 * len(encoders) + 0.7, 3), squeeze=False)
    numbers = {}
    for (name, encoder), one in zip(encoders.items(), axes[0]):
        matrix = np.abs(np.corrcoef(unit_vectors(encoder, sentences), rowvar=False))
        off = matrix[~np.eye(len(matrix), dtype=bool)]
        numbers[name] = {"mean |correlation|": float(off.mean()), "largest": float(off.max()), "dimensions": len(matrix), "sentences": len(sentences)}
        image = one.imshow(matrix[:dimensions, :dimensions], cmap="Greys", vmin=0, vmax=1)
        one.set(title=f"{name}\nmean of all {len(matrix)}: {off.mean():.3f}", xticks=range(0, dimensions, 5), yticks=range(0, dimensions, 5))
        one.grid(False)
    figure.colorbar(image, ax=axes[0], label="|correlation|", shrink=0.8)
    return numbers, figure


def cosine(encoders, pairs, plt):
    """Cosine of each pair against its gold score."""
    figure, axes = plt.subplots(1, len(encoders), figsize=(2.8 * len(encoders) + 0.4, 3), squeeze=False, sharey=True)
    numbers = {}
    for (name, encoder), one in zip(encoders.items(), axes[0]):
        y = (unit_vectors(encoder, pairs.first) * unit_vectors(encoder, pairs.second)).sum(axis=1)
        numbers[name] = {"Spearman x 100": 100 * float(spearmanr(pairs.scores, y).statistic), "pairs": len(y)}
        one.scatter(pairs.scores, y, s=6, color=MARKS[5][0], alpha=0.35, linewidths=0)
        one.set(title=f"{name}\nSpearman {numbers[name]['Spearman x 100']:.2f}", xlabel="gold score")
    axes[0, 0].set_ylabel("cosine")
    return numbers, figure


def edits(encoders, pairs, plt):
    """Edit distance against the gold score and against each model's cosine. Triangles: pairs with 5 edits or fewer, the paper's red."""
    distance = np.array([edit_distance(a.lower().split(), b.lower().split()) for a, b in zip(pairs.first, pairs.second)])
    sides = {"gold score": np.array(pairs.scores)}
    sides |= {name: (unit_vectors(encoder, pairs.first) * unit_vectors(encoder, pairs.second)).sum(axis=1) for name, encoder in encoders.items()}
    figure, axes = plt.subplots(1, len(sides), figsize=(2.8 * len(sides) + 0.4, 3), squeeze=False, sharey=True)
    numbers, near = {}, distance <= 5
    for (name, x), one in zip(sides.items(), axes[0]):
        numbers[name] = {"Spearman x 100": 100 * float(spearmanr(x, distance).statistic), "pairs": len(x)}
        one.scatter(x[~near], distance[~near], s=6, color=MARKS[5][0], alpha=0.35, linewidths=0)
        one.scatter(x[near], distance[near], s=9, color=MARKS[4][0], marker="^", alpha=0.5, linewidths=0)
        one.set(title=f"{name}\nSpearman {numbers[name]['Spearman x 100']:.2f}", xlabel="similarity" if name == "gold score" else "cosine")
    axes[0, 0].set_ylabel("edit distance, words")
    return numbers, figure


def curve(runs, plt):
    """Dev score by step, one stage after the other. runs: {label: folder}."""
    figure, axes = plt.subplots(figsize=(6.5, 3.6))
    numbers = {}
    for (name, run), (colour, mark) in zip(runs.items(), MARKS):
        file, steps, scores, before, stage, step = Path(run) / "metrics.jsonl", [], [], 0, None, 0
        for line, text in common.read_lines(file):
            try:
                entry = json.loads(text)
                before, stage, step = before + (step if entry.get("stage") != stage else 0), entry.get("stage"), int(entry["step"])
                if "dev" in entry:
                    steps.append(before + step), scores.append(float(entry["dev"]))
            except (ValueError, KeyError, AttributeError, TypeError):
                raise common.DataError(f"{file}:{line}: {text[:60]!r}, expected JSON with a step") from None
        if not steps:
            raise common.DataError(f"{file}: no dev score in it, expected one or more")
        numbers[name] = {"step": steps, "dev": scores}
        axes.plot(steps, scores, color=colour, marker=mark, markersize=4, linewidth=1.2, label=name)
    axes.set(xlabel="step", ylabel="dev score")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return numbers, figure


def speed(encoders, sets, plt):
    """Average of the sets' scores against the sentences/s of scoring them: each distinct sentence tokenized, batched and encoded once."""
    numbers, count = {}, len({text for pairs in sets.values() for text in pairs.first + pairs.second})
    for name, encoder in encoders.items():
        common.spearman(encoder, {"warm-up": common.GradedPairs(("A dog.",) * 2, ("A cat.", "A dog."), (0, 5))})
        begin = time.perf_counter()
        scores = common.spearman(encoder, sets, title=name)
        numbers[name] = {"average": scores.get("avg", next(iter(scores.values()))), "sentences/s": count / (time.perf_counter() - begin),
                         "parameters": sum(p.numel() for p in encoder.parameters())}
    figure, axes = plt.subplots(figsize=(6.5, 3.6))
    scatter(axes, {name: (row["sentences/s"], row["average"]) for name, row in numbers.items()})
    axes.set(xlabel="sentences encoded in a second", ylabel="Spearman x 100" + f", average of {len(sets)} sets" * (len(sets) > 1), xlim=(0, None))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return numbers, figure


def neighbours(encoders, sentences, queries, ranks=(1, 5, 10)):
    """{query: {rank: {model: sentence}}}; the query itself is passed over."""
    sentences, found = list(dict.fromkeys(sentences)), {query: {rank: {} for rank in ranks} for query in queries}
    if len(sentences) <= max(ranks):
        raise common.DataError(f"neighbours: {len(sentences)} different sentences, expected more than {max(ranks)}")
    for name, encoder in encoders.items():
        vectors = unit_vectors(encoder, sentences)
        for query, vector in zip(queries, unit_vectors(encoder, queries)):
            order = [sentences[i] for i in np.argsort(-vectors @ vector, kind="stable")[:max(ranks) + 1] if sentences[i] != query]
            for rank in ranks:
                found[query][rank][name] = order[rank - 1]
    return found


def parse_args():
    parser = common.ArgumentParser(description="The papers' figures of an embedding space: PNG, SVG and JSON")
    add = parser.add_argument
    add("figure", choices=("space", "covariance", "cosine", "edits", "neighbours", "curve", "speed"))
    add("models", nargs="+", metavar="MODEL", help="folder or hub name; for curve the folders of runs")
    add("--output", help="path without its ending; figures/FIGURE")
    add("--pairs", help="graded pairs (TSV) instead of STS-B dev, for speed instead of the seven sets")
    add("--senteval", default="senteval.tar", help="SentEval's folder or tar, local or from the hub; %(default)s")
    add("--sentences", help="sentences, one a line, for covariance (the first 10,000) and neighbours; the demo's")
    add("--query", action="append", default=[], help="a sentence whose neighbours are wanted; may be given several times")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="%(default)s")
    return parser.parse_args()


def main():
    args = parse_args()
    if args.device != "cpu" and not (args.device.startswith("cuda") and torch.cuda.is_available()):
        raise common.DataError(f"--device {args.device}: expected cpu, or cuda on a machine that has it")
    if (args.figure == "neighbours") != bool(args.query):
        raise common.DataError("--query: expected with neighbours, a sentence whose neighbours are wanted, and with nothing else")
    plt, output = None, Path(args.output or f"figures/{args.figure}")
    if args.figure != "neighbours":
        try:
            import matplotlib
        except ImportError:
            raise common.DataError("this figure needs matplotlib, which is not installed: pip install matplotlib") from None
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
        plt.rcParams.update({"font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8, "axes.spines.top": False, "axes.spines.right": False,
                             "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3, "figure.constrained_layout.use": True})
    last = [Path(name).name for name in args.models]
    labels = {name if last.count(short) > 1 else short: name for name, short in zip(args.models, last)}
    if args.figure == "curve":
        numbers, figure = curve(labels, plt)
    else:
        if args.figure in ("covariance", "neighbours"):
            data = common.read_sentences(common.resolve(args.sentences)) if args.sentences else demo.sentences(10_000)
        else:
            data = {args.pairs: common.read_graded_pairs(args.pairs)} if args.pairs else \
                common.read_sts(common.resolve(args.senteval), "test" if args.figure == "speed" else "dev")
            data = data if args.figure == "speed" else next(iter(data.values()))
        encoders = {label: common.load_encoder(name).to(args.device).eval() for label, name in labels.items()}
        if args.figure == "neighbours":
            numbers = neighbours(encoders, data, args.query)
            for query, ranks in numbers.items():
                print(f"\n{query}\n\n| rank | {' | '.join(encoders)} |\n|---:|{'---|' * len(encoders)}")
                for rank, row in ranks.items():
                    print(f"| {rank} | {' | '.join(row.values())} |")
        else:
            draw = dict(space=space, covariance=covariance, cosine=cosine, edits=edits, speed=speed)[args.figure]
            numbers, figure = draw(encoders, data[:10_000] if args.figure == "covariance" else data, plt)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{output}.json").write_text(json.dumps(numbers, indent=2, ensure_ascii=False) + "\n", "utf-8")
        if plt:
            figure.savefig(f"{output}.png", dpi=200), figure.savefig(f"{output}.svg")
    except OSError as error:
        raise common.DataError(f"{output}: {error.strerror}, expected a path that can be written") from None
    print(f"wrote {output}.json{f', {output}.png, {output}.svg' if plt else ''}", file=sys.stderr)


if __name__ == "__main__":
    common.run_main(main)
