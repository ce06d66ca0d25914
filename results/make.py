"""Write the tables of results/*.md between their markers, and draw the pictures in figures/.

  python results/make.py       after results/runs.py

Everything comes from results/data/*.jsonl. A marker names the table: <!-- table: own-teacher -->.
"""

import itertools
import json
import re
from pathlib import Path
from statistics import mean, stdev

HERE = Path(__file__).parent
COLUMNS = ("avg", "dev", "STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
TITLES = ("avg", "STS-B dev", *COLUMNS[2:])
OWN_ROWS = (
    "KD",
    "CKD",
    "IBKD",
    "ConGen",
    "SEED",
    "PKD",
    "MetaKD",
    "L2",
    "Dual-L2",
    "SKD",
    "CRD",
    "HPD",
)
FAR_ROWS = ("KD aligned", "CKD aligned", "CKD", "ConGen", "IBKD", "KD")
FAR_ROWS += ("SEED", "L2", "Dual-L2", "SKD", "CRD", "HPD", "PKD")
SIZES = {"three (1,4,5)": "layers-1-4-5-50k", "two (0,5)": "layers-0-5-50k"}
SIZES |= {"one (5)": "layer-5-50k"}
ONNX = {"six (the teacher)": "int8-six-layers", "three (1,4,5)": "int8-three-layers"}
ONNX |= {"two (0,5)": "int8-two-layers", "one (5)": "int8-one-layer"}
SPEEDS = {"three (1,4,5)": "speed-three-layers", "two (0,5)": "speed-two-layers"}
SPEEDS |= {"one (5)": "speed-one-layer"}
RETRAINED = {"three (1,4,5)": "retrained-three-layers", "two (0,5)": "retrained-two-layers"}
RETRAINED |= {"one (5)": "retrained-one-layer"}
TRAINED = 50_000  # sentences of these students
FORMATS = ("fp32, torch", "fp32, ONNX Runtime", "int8")
SMALL = {
    "all sentences": "KD-three-layers",
    "all sentences, three epochs": "KD-three-epochs",
    "all sentences, then NLI": "own-then-NLI",
    "50,000 sentences": "KD-50k",
    "50,000 sentences, layers 0, 3, 5": "layers-0-3-5-50k",
    "50,000 sentences, layers 1, 4, 5": "layers-1-4-5-50k",
    "20,000 sentences": "KD",
    "20,000 sentences, mean of three students' weights": "mean-of-seeds",
    "20,000 sentences, layers 0, 3, 5": "layers-0-3-5",
    "20,000 sentences, layers 1, 4, 5": "layers-1-4-5",
    "20,000 sentences, layers 2, 4, 5": "layers-2-4-5",
}
GROUPED = "training, dropout 0.0, --group-by-length"
PARTS = {  # part: with it, without it
    "IBKD: HSIC": ("IBKD", "IBKD-no-HSIC"),
    "KD: dropout of 0.1": ("KD-dropout", "KD"),
}
DEPTHS = {
    "six": "six (the teacher)",
    "three": "three (1,4,5)",
    "two": "two (0,5)",
    "one": "one (5)",
}
BITS = ("fp32, ONNX Runtime", "int8", "4 bits")  # rows of extras/quantize.py
TOKENS = {"": "30,522", "-20k": "20,000", "-12k": "12,000"}
TOKENS |= {"-20k-182k": "20,000 *", "-17k": "17,000 *"}
ALL_TOKENS = {"six": "sentence-transformers/all-MiniLM-L6-v2", "three": "runs/layers-1-4-5-50k"}
ALL_TOKENS |= {"two": "runs/layers-0-5-50k-0", "one": "runs/layer-5-50k-0"}
CURVE = {  # student, teacher, loss: {sentences in all epochs: run}
    "three layers, its own model, KD": {
        20_000: "layers-1-4-5",
        50_000: "layers-1-4-5-50k",
        182_049: "three-own-KD-182k",
    },
    "three layers, both teachers, KD": {
        20_000: "three-both-0.3-20k",
        182_049: "three-both-0.3-182k",
    },
    "three layers, the larger one, KD": {
        20_000: "three-M-KD-20k",
        50_000: "three-M-KD-50k",
        182_049: "three-M-KD-182k",
        3 * 182_049: "three-M-KD-3x182k",
    },
    "three layers, the larger one, CKD": {20_000: "three-M-CKD-20k"},
}
CURVE_AMOUNTS = {20_000: "20,000", 50_000: "50,000", 182_049: "182,049"}
CURVE_AMOUNTS |= {3 * 182_049: "3 x 182,049"}
AMOUNTS = {5_000: "KD-5k", 20_000: "KD", 50_000: "KD-50k", 182_049: "KD-three-layers"}


def read_lines():
    """All lines of data/*.jsonl -> {run: line}."""
    texts = [file.read_text("utf-8") for file in sorted(HERE.glob("data/*.jsonl"))]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    return {line["run"]: line for line in lines}


def read_runs():
    """{run: {row: {column: score}}}"""
    return {run: line["scores"] for run, line in read_lines().items()}


LINES = read_lines()
RUNS = read_runs()


def runs_of(name):
    """NAME, or NAME-0, NAME-1, ...: those that were run."""
    return [run for run in RUNS if re.fullmatch(re.escape(name) + r"(-\d)?", run)]


def seeds_of(name):
    """The final tables of runs_of(name)."""
    return [RUNS[run] for run in runs_of(name)]


def last_row(scores):
    return list(scores.values())[-1]


def cell(values):
    """The mean, with the standard deviation of three seeds or more."""
    spread = f" ± {stdev(values):.2f}" if len(values) > 2 else ""
    return f"{mean(values):.2f}{spread}"


def markdown(header, rows):
    """Rows of cells, the first of which is text -> a Markdown table."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def score_row(name, runs):
    """Name, mean of the seven test sets, dev, the sets, number of seeds. runs: one per seed."""
    finals = [last_row(run) for run in runs]
    cells = [f"{mean(row[key] for row in finals):.2f}" for key in COLUMNS]
    for place in (0, 1):
        cells[place] = cell([row[COLUMNS[place]] for row in finals])
    return [name, *cells, str(len(runs))]


def score_table(title, references, found, order):
    """References {name: scores} without a seed, then rows of {name: runs}, the best first."""
    rows = [[name, *[f"{row[key]:.2f}" for key in COLUMNS], ""] for name, row in references.items()]
    ranked = sorted(found, key=lambda name: -mean(last_row(run)[order] for run in found[name]))
    rows += [score_row(name, found[name]) for name in ranked]
    return markdown([title, *TITLES, "seeds"], rows)


def methods(prefix, names, more=None):
    """A row per method; the best mean of the test sets comes first. more: rows above them."""
    found = {name: seeds_of(prefix + name.replace(" ", "-")) for name in names}
    found = {name: runs for name, runs in found.items() if runs}
    any_run = next(iter(found.values()))[0]
    before = {name: any_run[name] for name in ("teacher", "student before") if name in any_run}
    return score_table("model", before if more is None else more | before | more, found, "avg")


def own_teacher():
    return methods("", (*OWN_ROWS, "DistilFACE"))


def no_teacher():
    return methods("", ("DistilFACE",))


def larger_teacher():
    """With the teacher as it is, and aligned."""
    runs = {"teacher": "M-KD-0", "aligned teacher": "M-KD-aligned-0"}
    return methods("M-", FAR_ROWS, {name: RUNS[run]["teacher"] for name, run in runs.items()})


def curve_scores(name):
    """The final rows of a run of CURVE, one per seed; some averages have a line of their own."""
    averages = RUNS["curve"] | RUNS["curve-seeds"]
    return [averages.get(f"runs/{run}", {}) | last_row(RUNS[run]) for run in runs_of(name)]


def curve():
    """STS average, and dev in brackets, of a larger teacher's students by number of sentences."""
    rows = []
    for title, runs in CURVE.items():
        cells = []
        for amount in CURVE_AMOUNTS:
            found = curve_scores(runs[amount]) if amount in runs else []
            scores = [cell([row[key] for row in found]) for key in ("avg", "dev") if found]
            cells.append(f"{scores[0]} ({scores[1]})" if found else "")
        rows.append([title, *cells])
    return markdown(["student, teacher, loss", *CURVE_AMOUNTS.values()], rows)


def how_small():
    """The teacher and the students of SIZES, in this order."""
    teacher = RUNS["layers-1-4-5-50k"]["teacher"]
    rows = [["six (the teacher)", *[f"{teacher[key]:.2f}" for key in COLUMNS], ""]]
    rows += [score_row(title, seeds_of(name)) for title, name in SIZES.items()]
    return markdown(["layers", *TITLES, "seeds"], rows)


def sizes():
    """README's table: megabytes, scores, speed, training time of the teacher and its students."""
    teacher = RUNS["layers-1-4-5-50k"]["teacher"]
    slowest = RUNS["int8-six-layers"]["fp32, torch"]["sentences/s"]
    found = compressed()
    rows = []
    for (title, run), name in zip(ONNX.items(), DEPTHS):
        onnx = RUNS[run]
        finals = [last_row(run) for run in seeds_of(SIZES[title])] if title in SIZES else [teacher]
        scores = [cell([row[key] for row in finals]) for key in ("dev", "avg")]
        speeds = [f"{onnx[row]['sentences/s'] / slowest:.1f}" for row in FORMATS]
        time = f"{TRAINED / trained_per_second(title) / 60:.1f} min" if title in SIZES else ""
        four = found[name, "", BITS[2]]
        rows.append([title, *sizes_of(name), *scores, f"{four['avg']:.2f}", *speeds, time])
    for depth, tokens in (("two", "-20k-182k"), ("one", "-17k")):
        fp32, _, four = [found[depth, tokens, bits] for bits in BITS]
        scores = [f"{score:.2f}" for score in (fp32["dev"], fp32["avg"], four["avg"])]
        title = f"{DEPTHS[depth]}, {TOKENS[tokens][:6]} tokens"
        rows.append([title, *sizes_of(depth + tokens), *scores, "", "", "", ""])
    header = ["layers", "MB: fp32", "int8", "4 bits", "STS-B dev", "STS average", "in 4 bits"]
    header += ["speed: torch", "ONNX, fp32", "ONNX, int8", "training"]
    return markdown(header, rows)


def sizes_of(name):
    """The megabytes of a student's ONNX files."""
    row = RUNS[f"dev-{name}"]
    return [f"{row[bits]['MB']:.0f}" for bits in BITS[:2]] + [f"{row[BITS[2]]['MB']:.1f}"]


def compressed():
    """The files of how-many-megabytes.md -> {(depth, tokens, row of quantize.py): numbers}."""
    teacher = RUNS["layers-1-4-5-50k"]["teacher"]
    torch_scores = {ALL_TOKENS["six"]: teacher} | RUNS["fp32"] | RUNS["fp32-more"]
    found = {}
    for tokens, depth in itertools.product(TOKENS, DEPTHS):
        name = f"{depth}{tokens}"
        if f"dev-{name}" not in RUNS:
            continue
        folder = f"runs/{name}" if tokens else ALL_TOKENS[depth]
        scores = {BITS[0]: torch_scores[folder]} | RUNS[f"sts-{name}"]
        for bits, row in RUNS[f"dev-{name}"].items():
            numbers = dict(mb=row["MB"], dev=row["Spearman"])
            if bits in scores:
                numbers["avg"] = mean(scores[bits][key] for key in COLUMNS[2:])
            found[depth, tokens, bits] = numbers
        if depth != "six":  # the teacher's file in 4 bits was scored on STS alone
            tasks = RUNS["transfer-4-bits"][folder]
            numbers["search"] = RUNS["qnli-4-bits"][folder]["MRR@10"]
            numbers["transfer"] = mean(tasks[task] for task in ("CR", "TREC", "MRPC"))
    return found


def megabytes():
    """Megabytes and scores in fp32, int8 and 4 bits; a row per student."""
    found = compressed()
    rows = []
    for depth, tokens in dict.fromkeys(key[:2] for key in found):
        fp32, int8, four = [found[depth, tokens, bits] for bits in BITS]
        cells = [DEPTHS[depth], TOKENS[tokens]]
        cells += [f"{file['mb']:.1f}" for file in (fp32, int8, four)]
        cells += [f"{file['avg']:.2f}" for file in (fp32, four)]
        cells += [f"{file['dev']:.2f}" for file in (fp32, int8, four)]
        cells += [f"{four[key]:.2f}" if key in four else "" for key in ("search", "transfer")]
        rows.append(cells)
    header = ["layers", "tokens", "MB: fp32", "int8", "4 bits", "avg: fp32", "4 bits"]
    header += ["dev: fp32", "int8", "4 bits", "QNLI", "transfer"]
    return markdown(header, rows)


def how_much_data():
    rows = []
    for amount, name in AMOUNTS.items():
        finals = [last_row(run) for run in seeds_of(name)]
        if finals:
            scores = [cell([row[key] for row in finals]) for key in ("dev", "avg")]
            rows.append([f"{amount:,}", str(len(finals)), *scores])
    return markdown(["sentences", "seeds", "STS-B dev", "avg"], rows)


def small():
    """What may bring a three-layer student past its teacher, the best on dev first."""
    teacher = {"teacher": RUNS["KD-three-layers"]["teacher"]}
    found = {title: seeds_of(name) for title, name in SMALL.items()}
    return score_table("student", teacher, found, "dev")


def as_table(rows, title="model"):
    """{row: {column: score}} -> a Markdown table with the columns of the last row."""
    columns = [key for key in last_row(rows) if key not in ("dev", "test", "bytes")]
    cells = [
        [name, *[f"{row[key]:.2f}" if key in row else "" for key in columns]]
        for name, row in rows.items()
    ]
    return markdown([title, *columns], cells)


def search():
    first, second = RUNS["search-stage-1"], RUNS["search-stage-2"]
    *before, (_, after_1) = first.items()
    return as_table(dict(before) | {"stage 1": after_1, "stages 1 and 2": last_row(second)})


def pairs(task):
    """Cross-encoders, and students with and without their logits."""
    *before, (_, teacher), (_, student) = RUNS[f"DSE-{task}"].items()
    rows = dict(before) | {"weak teacher": teacher, "weak teacher's student": student}
    rows["labels alone"] = last_row(RUNS[f"DSE-{task}-labels"])
    strong = RUNS[f"DSE-M-{task}"]
    rows |= {"strong teacher": strong["teacher"], "strong teacher's student": last_row(strong)}
    return as_table(rows)


def language():
    """The English teacher, and its student before and after training on translations."""
    (before,) = RUNS["en-de-before"].values()
    teacher, student = RUNS["en-de-test"].values()
    rows = {"teacher": teacher, "student before": before, "student": student}
    titles = {"1 -> 2": "English to German", "2 -> 1": "German to English"}
    return as_table({name: {titles[key]: row[key] for key in titles} for name, row in rows.items()})


def transfer():
    """Accuracies, and their mean; F1 is left out."""
    names = ("teacher", "KD", "CKD", "ConGen", "IBKD")
    rows = {}
    for name, scores in zip(names, RUNS["transfer"].values()):
        accuracies = {task: score for task, score in scores.items() if task != "MRPC F1"}
        rows[name] = accuracies | {"mean": mean(accuracies.values())}
    return as_table(rows)


def int8():
    """A row for each number of layers and format."""
    rows = []
    for title, run in ONNX.items():
        for name, row in RUNS[run].items():
            rows.append([f"{title}, {name}", *[f"{value:.2f}" for value in row.values()]])
    return markdown(["model", "MB", "STS-B test", "sentences/s"], rows)


def parts():
    """Scores with and without a part of a method, three seeds each."""
    rows = []
    for part, (name, name_without) in PARTS.items():
        finals = [last_row(scores) for scores in seeds_of(name)]
        others = [last_row(scores) for scores in seeds_of(name_without)]
        cells = [
            cell([row[key] for row in side]) for key in COLUMNS[:2] for side in (finals, others)
        ]
        rows.append([part, *cells])
    header = ["part", "avg with it", "without", "STS-B dev with it", "without"]
    return markdown(header, rows)


def trained_per_second(title):
    """Sentences per second, the mean of the two runs of RETRAINED."""
    return mean(LINES[f"{RETRAINED[title]}-{seed}"]["sentences_per_second"] for seed in (1, 2))


def training_speed():
    """Sentences per second of KD's training, without scoring, and the peak memory."""
    rows = []
    for title, run in SPEEDS.items():
        memory = LINES[run]["peak_memory_MB"] / 1000
        rows.append([title, f"{trained_per_second(title):.0f}", f"{memory:.2f}"])
    return markdown(["layers", "sentences/s", "peak memory, GB"], rows)


def speed():
    """Training against sentence-transformers.

    All batches of ours had similar length when the rows without GROUPED were measured; of these,
    the page has the one that the command still measures.
    """
    rows = RUNS["speed-training"]
    if GROUPED not in rows:
        rows = {GROUPED: rows["training, dropout 0.0"]}
    return as_table(rows, title="")


TABLES = {
    "own-teacher": own_teacher,
    "larger-teacher": larger_teacher,
    "curve": curve,
    "megabytes": megabytes,
    "sizes": sizes,
    "how-small": how_small,
    "how-much-data": how_much_data,
    "small": small,
    "int8": int8,
    "parts": parts,
    "training-speed": training_speed,
    "speed": speed,
    "no-teacher": no_teacher,
    "search": search,
    "language": language,
    "transfer": transfer,
    "pairs-stsb": lambda: pairs("stsb"),
    "pairs-mrpc": lambda: pairs("mrpc"),
}


def with_tables(text):
    """A page, with the tables that its markers name."""

    def fill(match):
        return f"{match[1]}\n\n{TABLES[match[2]]()}\n\n{match[3]}"

    return re.sub(r"(<!-- table: (\S+) -->).*?(<!-- end -->)", fill, text, flags=re.S)


def draw():
    """The pictures of README.md and of the pages."""
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    plt.rcParams.update({"svg.hashsalt": "results", "font.size": 11, "axes.grid": True})
    plt.rcParams.update({"axes.axisbelow": True})
    draw_speed(plt)
    draw_alignment(plt)
    draw_amounts(plt)
    draw_curve(plt)
    draw_megabytes(plt)


def save(figure, name):
    figure.tight_layout()
    figure.savefig(HERE / "figures" / f"{name}.svg", metadata={"Date": None})


def draw_speed(plt):
    """README's table: STS average against encoding speed, one sentence at a time."""
    figure, axes = plt.subplots(figsize=(7, 4.2))
    teacher = RUNS["layers-1-4-5-50k"]["teacher"]
    averages = [[teacher["avg"]]]
    averages += [[last_row(run)["avg"] for run in seeds_of(name)] for name in SIZES.values()]
    means = [mean(values) for values in averages]
    for row, mark in zip(FORMATS, "os^"):
        speeds = [RUNS[run][row]["sentences/s"] for run in ONNX.values()]
        axes.plot(speeds, means, mark + "--", label=row)
    spreads = [stdev(values) if len(values) > 1 else 0 for values in averages]
    axes.errorbar(speeds, means, spreads, fmt="none", ecolor="gray", capsize=3)
    for title, speed, score in zip(("six (teacher)", "three", "two", "one"), speeds, means):
        below = -16 if title == "six (teacher)" else 0  # its line goes to the right
        axes.annotate(title, (speed, score), textcoords="offset points", xytext=(8, below))
    axes.set_xscale("log")
    ticks = (100, 200, 500, 1000, 2000)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("sentences per second, one at a time, two threads")
    axes.set_ylabel("Spearman x 100, mean of 7 sets")
    axes.legend(frameon=False, loc="lower left")
    axes.margins(x=0.2, y=0.15)
    save(figure, "speed")


def draw_alignment(plt):
    """KD and CKD of a larger teacher, as it is and aligned; bars begin at 0."""
    figure, axes = plt.subplots(figsize=(6, 3.6))
    for place, method in enumerate(("KD", "CKD")):
        for shift, suffix, color in ((-0.2, "", "tab:gray"), (0.2, "-aligned", "tab:blue")):
            scores = [last_row(run)["avg"] for run in seeds_of(f"M-{method}{suffix}")]
            label = ("aligned teacher" if suffix else "teacher as it is") if place == 0 else None
            spread = stdev(scores) if len(scores) > 1 else 0
            axes.bar(place + shift, mean(scores), 0.38, yerr=spread, color=color, label=label)
            axes.text(place + shift, mean(scores) + 1, f"{mean(scores):.2f}", ha="center")
    axes.set(xticks=(0, 1), xticklabels=("KD", "CKD"), ylim=(0, 95))
    axes.axhline(69.11, ls=":", color="black", label="student before training")
    axes.axhline(80.53, ls="--", color="black", label="teacher")
    axes.set_ylabel("Spearman x 100, mean of 7 sets")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncol=2, frameon=False)
    axes.grid(axis="x", visible=False)
    save(figure, "alignment")


def draw_curve(plt):
    """STS average of the students of larger-teacher.md against the number of sentences."""
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for (title, runs), mark in zip(CURVE.items(), "os^vD"):
        scores = [mean(row["avg"] for row in curve_scores(run)) for run in runs.values()]
        axes.plot(list(runs), scores, mark + "-", label=title)
    teacher = RUNS["M-KD-aligned-0"]["teacher"]["avg"]
    axes.axhline(teacher, ls="--", color="black", label="the larger teacher, aligned")
    axes.set_xscale("log")
    axes.set(xlabel="training sentences", ylabel="Spearman x 100, mean of 7 sets")
    axes.set_xticks(list(CURVE_AMOUNTS), CURVE_AMOUNTS.values())
    axes.minorticks_off()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=2, frameon=False)
    save(figure, "curve")


def draw_megabytes(plt):
    """STS average of the files of how-many-megabytes.md against their megabytes."""
    figure, axes = plt.subplots(figsize=(7, 5))
    found = compressed()
    for number, (tokens, mark) in enumerate(zip(TOKENS, "os^D*")):
        for bits, line in ((BITS[2], "--"), (BITS[0], "-")):
            points = [found[key] for key in found if key[1:] == (tokens, bits) and key[0] != "six"]
            label = f"{TOKENS[tokens]} tokens".replace(" * tokens", " tokens, 182,049 sentences")
            sizes, scores = zip(*[(point["mb"], point["avg"]) for point in points])
            label = label if bits == BITS[0] else None
            axes.plot(sizes, scores, mark + line, color=f"C{number}", label=label)
    places = dict(va="center", xytext=(8, 0), textcoords="offset points")
    for depth, bits in itertools.product(("three", "two", "one"), (BITS[0], BITS[2])):
        point = found[depth, "", bits]
        label = f"{depth} layer{'' if depth == 'one' else 's'}, {bits.split(',')[0]}"
        axes.annotate(label, (point["mb"], point["avg"]), **places)
    teacher = found["six", "", BITS[0]]
    label = f"the teacher, {teacher['mb']:.0f} MB"
    axes.axhline(teacher["avg"], ls=":", color="black", label=label)
    axes.set_xscale("log")
    axes.set_xlim(3.4, 200)
    ticks = (4, 6, 8, 10, 20, 40, 70)
    axes.set_xticks(ticks, map(str, ticks))
    axes.minorticks_off()
    axes.set(xlabel="megabytes of the file", ylabel="Spearman x 100, mean of 7 sets")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=2, frameon=False)
    save(figure, "megabytes")


def draw_amounts(plt):
    """The score of a three-layer student against the number of sentences."""
    figure, axes = plt.subplots(figsize=(6, 3.6))
    amounts = [amount for amount, name in AMOUNTS.items() if seeds_of(name)]
    finals = [[last_row(run)["avg"] for run in seeds_of(AMOUNTS[amount])] for amount in amounts]
    spreads = [stdev(scores) if len(scores) > 1 else 0 for scores in finals]
    axes.errorbar(amounts, [mean(scores) for scores in finals], spreads, fmt="o-", capsize=3)
    axes.axhline(78.87, ls="--", color="black", label="teacher, six layers")
    axes.set_xscale("log")
    axes.set(xlabel="training sentences", ylabel="Spearman x 100, mean of 7 sets")
    axes.set_xticks(amounts, [f"{amount:,}" for amount in amounts])
    axes.minorticks_off()
    axes.legend(frameon=False)
    save(figure, "sentences")


def main():
    for page in (HERE.parent / "README.md", *HERE.glob("*.md")):
        page.write_text(with_tables(page.read_text("utf-8")), "utf-8")
    draw()


if __name__ == "__main__":
    main()
