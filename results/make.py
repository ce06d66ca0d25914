"""Write the tables of README.md and results/*.md between their markers, and draw figures/.

  python results/make.py          after results/runs.py

Everything comes from results/data/*.jsonl. A marker names the table: <!-- table: size -->.
"""

import json
import re
from itertools import starmap
from pathlib import Path
from statistics import mean, stdev

import matplotlib.pyplot as plt
import numpy as np

plt.switch_backend("agg")
plt.rcParams.update({"svg.hashsalt": "results", "axes.grid": True, "axes.axisbelow": True})
HERE = Path(__file__).parent
SEEDS = (0, 1, 2)
SETS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
TESTS = ("avg", "SciFact", "QNLI")  # of README's table
AVERAGED = ("avg", "avg without overlap")
INDEXES = [f"{task}{index}" for index in ("", ", teacher's index") for task in ("SciFact", "QNLI")]
FOUR = "4 bits"  # extras.rounded trains these students, except for the teacher
DEPTHS = {  # of size.md: (layers, runs of the scores, form of the file)
    ("six (the teacher)", "six"): ("fp32", "int8", FOUR),
    ("three (0,3,5)", "three"): ("int8",),
    ("three (0,3,5)", "three-r"): (FOUR,),
    ("two (0,5)", "two-r"): (FOUR,),
}
FILES = [(title, model, form) for (title, model), forms in DEPTHS.items() for form in forms]
DEPLOYED = {  # of README's table: (model, form)
    "six layers, fp32": ("six", "fp32"),
    "six, int8": ("six", "int8"),
    "six, 4 bits": ("six", FOUR),
    "three, int8": ("three", "int8"),
    "three, 4 bits": ("three-r", FOUR),
    "the same, passages in training": ("own-r", FOUR),  # trained on the passages that it searches
}
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
TIMED = {  # by results/files.py: the speed of a file depends on its layers alone
    "six": MINILM,
    **dict.fromkeys(("three", "three-r", "own-r"), "runs/three-r-0"),
    "two-r": "runs/two-r-0",
}
KINDS = ("fp32, torch", "fp32, ONNX Runtime", "int8", FOUR)  # rows of results/files.py
TEXTS = {  # of the teacher, and of three layers: (model, form)
    "six (the teacher), fp32": ("six", "fp32"),
    "six (the teacher), 4 bits": ("six", FOUR),
    "50,000 general sentences": ("three-r", FOUR),
    "both corpora and 10,000 general sentences": ("own-r", FOUR),
}
ANSWERS = {  # of three layers: the runs of both stages, without their numbers
    "three (0,3,5), by KD": "answers-kd",
    "three (0,3,5), by IBKD's stage 1": "answers-ibkd",
}
TWELVE = {  # of size.md's second table: {model: the run that trains it}
    "all-mpnet-base-v2, twelve layers": "mpnet",
    "six (0,2,4,8,10,11), one epoch, 2e-4": "mpnet-own",
    "six, three epochs, 4e-4, fp32, one seed": "mpnet-longer",
}
SAMPLES = 10_000  # of a bootstrap over questions
TRIED = ("best trial", "STS-B dev", "STS", "without overlap")  # of methods.md's table
METHODS = {f"035-{name}": name for name in ("KD", "L2", "CKD", "IBKD", "ConGen", "SimCSE")}
E5_MODELS = {  # of multilingual.md: the models, seed by seed
    "twelve layers, all tokens": ["runs/e5-plain"],
    "twelve layers, 20,000 tokens": ["runs/e5-plain-20k"],
    "three (0,10,11), 20,000, KD": ["runs/try-E5-KD/lr=16e-4", "runs/E5-KD-1", "runs/E5-KD-2"],
    "the same, CKD": ["runs/try-E5-CKD/temperature=0.05", "runs/E5-CKD-1", "runs/E5-CKD-2"],
}
E5_TESTS = {  # column: the run that has its scores
    "STS-B: German": "e5-sts-de",
    "English": "e5-sts-en",
    "XQuAD-R: German": "e5-xquad-de",
    "English ": "e5-xquad-en",
}
TABLES = ("score", "sts")  # beginnings of the names of runs of scores.py


# ---- Scores --------------------------------------------------------------------------------------


def read_lines():
    """All lines of data/*.jsonl -> {run: line}."""
    texts = [file.read_text("utf-8") for file in sorted(HERE.glob("data/*.jsonl"))]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    return {line["run"]: line for line in lines}


LINES = read_lines()
RUNS = {run: line["scores"] for run, line in LINES.items()}  # {run: {row: {column: score}}}


def named(run):
    """Those of RUN and RUN-0, RUN-1, RUN-2 that are there."""
    return [name for name in (run, *(f"{run}-{seed}" for seed in SEEDS)) if name in RUNS]


def dev(run):
    """The dev score of a trained student, of each seed."""
    return [list(RUNS[name].values())[-1]["dev"] for name in named(run)]


def scored(model, form, column):
    """What scores.py gave in a column, for a form of a model -> a list, one for each seed."""
    found = [RUNS[name].get(form, {}) for table in TABLES for name in named(f"{table}-{model}")]
    return [row[column] for row in found if column in row]


def by_question(model, form, column):
    """The mean of the seeds for each question -> array [questions], or None for other tests."""
    kept = [RUNS[name][form].get("questions", {}) for name in named(f"score-{model}")]
    return np.mean([found[column] for found in kept], 0) if column in kept[0] else None


def interval(model, other, column, others_column=None):
    """Of the difference of two (model, form): 95 %, by bootstrap over questions -> low, high."""
    gains = by_question(*model, column) - by_question(*other, others_column or column)
    chosen = np.random.default_rng(0).integers(len(gains), size=(SAMPLES, len(gains)))
    return np.percentile(gains[chosen].mean(1), (2.5, 97.5))


def of_seeds(found, others):
    """How three seeds compare with three others, or with one model.

    "ahead" or "behind" if all three differences have this sign and their mean is above twice its
    standard error; else "level". One model and another: the sign of their difference.
    """
    others = others * (len(found) // len(others))
    differences = [a - b for a, b in zip(found, others, strict=True)]
    error = stdev(differences) / 3**0.5 if len(found) > 1 else 0
    if abs(mean(differences)) > 2 * error and min(differences) * max(differences) > 0:
        return "ahead" if differences[0] > 0 else "behind"
    return "level"


def verdict(model, other, column, others_column=None):
    """The word for the difference of two (model, form) (results/README.md).

    That of their seeds; and where the questions' scores are kept, it is "level" unless the
    interval over questions leaves out zero, too.
    """
    word = of_seeds(scored(*model, column), scored(*other, others_column or column))
    if by_question(*model, column) is None:
        return word
    low, high = interval(model, other, column, others_column)
    return word if low > 0 or high < 0 else "level"


# ---- Tables: a header, and rows of texts, numbers and lists of seeds -----------------------------


def cell(value):
    """A text, a number, or the mean of a list of seeds, with the deviation of three or more."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.2f}"
    if not value:
        return ""
    spread = f" ± {stdev(value):.2f}" if len(value) > 2 else ""
    return f"{mean(value):.2f}{spread}"


def markdown(header, rows):
    cells = [[cell(value) for value in row] for row in rows]
    dashes = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join(f"| {' | '.join(line)} |" for line in (map(str.strip, header), dashes, *cells))


def minutes(model):
    """Of training on one thread, with scores on dev and the teacher's pass over the sentences."""
    paid = "own-r" if model == "own-r" else "three"  # seed 0 embeds them, for all later runs
    of_pass = LINES[f"{paid}-0"]["seconds"] - seconds(paid)
    return (seconds(model) + of_pass) / 60


def seconds(model):
    """The quicker of the two seeds that find the teacher's embeddings."""
    return min(LINES[f"{model}-{seed}"]["seconds"] for seed in SEEDS[1:])


def speed_of(model, form, size="one"):
    """Sentences per second of a file, in times of the teacher in torch."""
    kind = KINDS[0] if form == "fp32" else form
    table = RUNS["files"]
    return table[f"{TIMED[model]}, {kind}"][size] / table[f"{MINILM}, {KINDS[0]}"][size]


def sizes():
    """README's table: what to deploy, by the means of the seeds."""
    rows = []
    for title, (model, form) in DEPLOYED.items():
        row = [title, f"{scored(model, form, 'MB')[0]:.1f}", f"{speed_of(model, form):.1f}"]
        row += [mean(scored(model, form, key)) for key in TESTS]
        rows.append([*row, "" if model == "six" else f"{minutes(model):.0f}"])
    return ["layers, file", "MB", "speed", "STS", "SciFact", "QNLI", "minutes"], rows


def size():
    """Each file, with and without pairs that overlap, by either index."""
    rows = []
    for title, model, form in FILES:
        found = [scored(model, form, key) for key in (*AVERAGED, *INDEXES)]
        rows.append([f"{title}, {form}", f"{scored(model, form, 'MB')[0]:.1f}", *found])
    header = ["layers, file", "MB", "STS", "without overlap", "SciFact", "QNLI"]
    return [*header, "SciFact, teacher's index", "QNLI, teacher's index"], rows


def speeds():
    """Each depth by format, in times of the teacher in torch."""
    rows = []
    for depth, model in dict(six="six", three="three-r", two="two-r").items():
        found = [speed_of(model, kind, size) for size in ("one", "batch") for kind in KINDS]
        rows.append([depth, *(f"{value:.1f}" for value in found)])
    header = [f"{start}{kind}" for start in ("one: ", "32: ") for kind in KINDS]
    return ["layers", *header], rows


def twelve():
    """A teacher of twelve layers, and a student of six."""
    teacher = RUNS["mpnet-own-0"]["teacher"]["dev"]
    rows = [
        [title, dev(run) or teacher, *(scored(run, "fp32", key) for key in TESTS)]
        for title, run in TWELVE.items()
    ]
    return ["layers", "STS-B dev", "STS", "SciFact", "QNLI"], rows


def search():
    """Three layers in 4 bits by their training texts, by either index."""
    columns = (*INDEXES, "avg")
    rows = [[title, *(scored(*model, key) for key in columns)] for title, model in TEXTS.items()]
    return ["training texts", *INDEXES, "STS"], rows


def answers():
    """Three layers, before and after they learned the answers to QNLI's training questions."""
    rows = [["six (the teacher)", scored("six", "fp32", "QNLI"), ""]]
    for title, runs in ANSWERS.items():
        rows.append([title, *(scored(f"{runs}-{stage}", "fp32", "QNLI") for stage in (1, 2))])
    return ["layers, in fp32", "QNLI before the answers", "after"], rows


def left_out():
    """The gain of SciFact's texts in training, for passages with and without them."""
    rows = []
    for name in ("gain, seen", "gain, unseen", "seen - unseen"):
        row = RUNS["unseen-scifact"][name]
        low, high = [f"{row[f'nDCG@10 {end}']:.2f}" for end in ("from", "to")]
        rows.append([name, row["nDCG@10"], f"{low} to {high}"])
    return ["questions' answers in training", "nDCG@10 x 100", "95 % interval"], rows


def trials(method):
    """The dev score of each trial of a method -> {setting: score}, the best first."""
    found = {}
    for run, table in RUNS.items():
        if match := re.fullmatch(rf"try-{method}(-[a-z]+|-([\d.]+))?", run):
            temperature = f",temperature={match[2]}" if match[2] else ""
            for name, row in table.items():
                found[name.replace(" (runs: 1)", "") + temperature] = row["dev"]
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def tried(name, title):
    """The row of a method: its best trial, which is seed 0, and two more seeds."""
    setting, best = next(iter(trials(name).items()))
    devs = [best, *(dev(f"{name}-{seed}")[0] for seed in SEEDS[1:])]
    found = [scored(name, "fp32", key) for key in AVERAGED]
    return [title, setting.replace(",", ", ").replace("=", " "), devs, *found]


def methods():
    """Each loss by the best of its trials on dev, three seeds, the best average first."""
    (before,) = (row["avg"] for row in RUNS["score-035-before"].values())
    teacher, untrained = [RUNS["035-KD-1"][row]["dev"] for row in ("teacher", "student before")]
    rows = [
        ["teacher", "", teacher, *(scored("six", "fp32", key) for key in AVERAGED)],
        ["student before", "", untrained, before, ""],
        *sorted(starmap(tried, METHODS.items()), key=lambda row: -mean(row[3])),
    ]
    return ["method", *TRIED], rows


def speed():
    """Training, beside sentence-transformers."""
    columns = ("ours", "theirs", "ratio", "smallest", "largest")
    rows = []
    for name, row in RUNS["speed-orders"].items():
        if " against " not in name:
            rows.append([name, *(row[column] for column in columns)])
    return ["order, batch, precision", *columns], rows


def multilingual():
    """multilingual-e5-small, with all tokens and with 20,000, and its students."""
    rows = []
    for title, models in E5_MODELS.items():
        found = []
        for run in E5_TESTS.values():
            key = "MRR@10" if "xquad" in run else f"runs/prompted-test-{run[-2:]}.tsv"
            found.append([RUNS[run][model][key] for model in models])
        rows.append([title, *found])
    return ["model", *E5_TESTS], rows


def pairs():
    """STS-B by a cross-encoder, by its students, and by students of the labels alone."""
    teacher = RUNS["035-KD-1"]["teacher"]["dev"]
    rows = [["its embeddings' cosine, as it is", teacher, scored("six", "fp32", "STS-B")[0]]]
    for title, run, place in (
        ("cross-encoder", "DSE-2e-5", 0),
        ("the cross-encoder's student", "DSE-2e-5", -1),
        ("labels alone", "labels-2e-5", -1),
    ):
        keys = ("dev Spearman", "test Spearman")
        rows.append([title, *(pair_scores(run, place, key) for key in keys)])
    return ["all-MiniLM-L6-v2 as", "STS-B dev", "STS-B test"], rows


def pair_scores(run, place, key):
    """Of each seed, in the first or the last row of a run of dse.py."""
    return [list(RUNS[name].values())[place][key] for name in named(run)]


def rates():
    """The students' dev score by learning rate, seed 0."""
    runs = {"1e-5": "1e-5", "2e-5": "2e-5", "5e-5": "5e-5", "1e-4": "0"}  # DSE-0
    rows = [
        [rate, *(dev(f"{way}-{run}")[0] for way in ("DSE", "labels"))] for rate, run in runs.items()
    ]
    return ["rate", "the cross-encoder's student", "labels alone"], rows


def with_tables(text, tables):
    """A page, with the tables that its markers name."""
    marked = re.compile(r"(<!-- table: (\S+) -->).*?(<!-- end -->)", re.S)
    return marked.sub(lambda m: f"{m[1]}\n\n{markdown(*tables[m[2]])}\n\n{m[3]}", text)


# ---- Pictures ------------------------------------------------------------------------------------


def write_figure(figure, name):
    figure.tight_layout()
    figure.savefig(HERE / "figures" / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def draw_sizes():
    """STS average and search against megabytes: fp32, int8 and 4 bits."""
    panels = plt.figure(figsize=(10, 3.4)).subplots(1, 3)
    labels = ("STS, mean of 7 sets", "SciFact, nDCG@10", "QNLI, MRR@10")
    for axes, key, label in zip(panels, TESTS, labels):
        for form, mark in (("fp32", "o-"), ("int8", "^-."), (FOUR, "s--")):
            models = [model for _, model, its_form in FILES if its_form == form]
            found = [scored(model, form, key) for model in models]
            means = list(map(mean, found))
            deviations = [stdev(values) if len(values) > 1 else 0 for values in found]
            megabytes = [scored(model, form, "MB")[0] for model in models]
            axes.errorbar(megabytes, means, deviations, fmt=mark, label=form)
            for model, x, y in zip(models, megabytes, means):
                place = (8, -3) if model == "six" else (5, -12)
                axes.annotate(model.removesuffix("-r"), (x, y), place, textcoords="offset points")
        axes.set(xscale="log", xlabel="megabytes", title=label)
        axes.set_xticks((10, 20, 40, 80), ("10", "20", "40", "80"))
        axes.minorticks_off()
        axes.margins(0.2, 0.1)
    panels[0].legend(loc="lower right", frameon=False)
    write_figure(axes.figure, "sizes")


def draw_trials():
    """STS-B dev of trials by rate, and by temperature; the other has its most frequent value."""
    panels = plt.figure(figsize=(9, 3.4)).subplots(1, 2, sharey=True)
    for number, (name, title) in enumerate(METHODS.items()):
        found = trials(name)
        settings = [dict(pair.split("=") for pair in text.split(",")) for text in found]
        for axes, key in zip(panels, settings[0]):
            others = [{**setting, key: 0} for setting in settings]
            points = [
                (float(setting[key]), score)
                for setting, other, score in zip(settings, others, found.values())
                if other == max(others, key=others.count)
            ]
            axes.plot(*zip(*sorted(points)), "o-", color=f"C{number}", label=title)
            axes.set(xscale="log", xlabel=key)
    panels[0].set_ylabel("STS-B dev, Spearman x 100")
    panels[0].legend(frameon=False)
    write_figure(axes.figure, "trials")


def page_tables():
    """{name in a marker: (header, rows)}"""
    functions = (sizes, size, speeds, speed, twelve, search, left_out, answers)
    functions += (methods, multilingual, pairs, rates)
    return {function.__name__: function() for function in functions}


def main():
    tables = page_tables()
    for page in (HERE.parent / "README.md", *HERE.glob("*.md")):
        page.write_text(with_tables(page.read_text("utf-8"), tables), "utf-8")
    draw_sizes()
    draw_trials()


if __name__ == "__main__":
    main()
