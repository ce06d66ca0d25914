"""Write the tables of README.md and results/*.md between their markers, and draw figures/.

  python results/make.py          after results/runs.py

Everything comes from results/data/*.jsonl. A marker names the table: <!-- table: size -->.
"""

import json
import re
from pathlib import Path
from statistics import mean, stdev

import matplotlib.pyplot as plt

plt.switch_backend("agg")
plt.rcParams.update({"svg.hashsalt": "results", "axes.grid": True, "axes.axisbelow": True})
HERE = Path(__file__).parent
SEEDS = (0, 1, 2)
SETS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
TESTS = ("avg", "SciFact", "QNLI")  # of README's table, and of size.md's second
AVERAGED = ("avg", "avg without overlap")
INDEXES = [f"{task}{index}" for index in ("", ", teacher's index") for task in ("SciFact", "QNLI")]
TEACHER_ROW = "six (the teacher)"
DEPTHS = dict(three="three (1,4,5)", two="two (0,5)", one="one (5)")
ALL_DEPTHS = dict(six=TEACHER_ROW) | DEPTHS
CHOICES = {  # of size.md's second table: {model: the run that trains it}
    "three (1,4,5), 50,000 sentences": "three",
    "three (1,4,5), 20,000": "n20k-three",
    "three (0,3,5), 20,000": "cut-0-3-5",
    "all-mpnet-base-v2, twelve layers": "mpnet",
    "six (0,2,4,6,9,11), 5,000": "mpnet-six",
    "four (0,4,8,11), 5,000": "mpnet-four",
}
TEXTS = {  # of three layers: (the runs of their scores, the form of the file)
    "20,000 general sentences": ("score-n20k-three", "fp32"),
    "50,000 general sentences": ("score-three scifact-three", "fp32"),
    "both corpora, one epoch, dev's step": ("score-own-dev", "fp32"),
    "both corpora, one epoch, last step": ("score-own-last", "fp32"),
    "both corpora, three epochs, dev's step": ("score-own3-dev", "fp32"),
    "both corpora, three epochs, last step": ("score-own3-last", "fp32"),
    "that student in 4 bits": ("score-own3-q4", "4 bits"),
    "three epochs, last step, then QNLI's answers": ("score-answers-plain-2", "fp32"),
    "IBKD: QNLI's passages and questions, then its answers": ("score-answers-ibkd-2", "fp32"),
}
TRIED = ("best of four trials", "STS-B dev", "STS", "without overlap")  # of methods.md's tables
METHODS = ("KD", "L2", "CKD", "ConGen", "IBKD", "SimCSE")
LARGER = {  # the students of methods.md's second table, two of them of all-mpnet-base-v2
    "M-KD": "its student by KD",
    "M-CKD": "its student by CKD",
    "KD": "own model's student by KD",
    "CKD": "own model's student by CKD",
    "SimCSE": "SimCSE, no teacher",
}
E5_MODELS = {  # of multilingual.md: the models, seed by seed
    "twelve layers, all tokens": ["runs/e5-plain"],
    "twelve layers, 20,000 tokens": ["runs/e5-plain-20k"],
    "three (0,10,11), 20,000, KD": ["runs/try-E5-KD/lr=16e-4", "runs/E5-KD-1", "runs/E5-KD-2"],
    "the same, CKD": ["runs/try-E5-CKD/lr=8e-4,temperature=0.05", "runs/E5-CKD-1", "runs/E5-CKD-2"],
}
E5_TESTS = {  # column: the run that has its scores
    "STS-B: German": "e5-sts-de",
    "English": "e5-sts-en",
    "XQuAD-R: German": "e5-xquad-de",
    "English ": "e5-xquad-en",
}
PARTS = ("dev", "test")
FORMS = ("fp32, torch", "fp32, ONNX Runtime", "int8", "4 bits")  # rows of extras/quantize.py


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


def scored(runs, form, column):
    """What scores.py gave in a column of a form, of these runs and their seeds -> a list."""
    found = [RUNS[name].get(form, {}) for run in runs for name in named(run)]
    return [row[column] for row in found if column in row]


def sized(model, form, column):
    """A score of a model of size.md, fp32 or 4 bits -> a list, one for each seed."""
    tables = ("sts", "score", "scifact")
    runs = [f"{table}-{model}{file}" for table in tables for file in ("", "-q4")]
    return scored(runs, form, column)


def verdict(found, others):
    """How three seeds compare with three others, or with one model (results/README.md).

    "ahead" or "behind" if all three differences have this sign and their mean is above twice its
    standard error; else "level".
    """
    differences = [a - b for a, b in zip(found, others * (3 // len(others)), strict=True)]
    error = stdev(differences) / 3**0.5
    if abs(mean(differences)) > 2 * error and min(differences) * max(differences) > 0:
        return "ahead" if differences[0] > 0 else "behind"
    return "level"


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


def minutes(depth):
    """Of training, with scores on dev, but without the teacher's pass, which three-0 pays."""
    return mean(LINES[f"{depth}-{seed}"]["seconds"] for seed in SEEDS[1:]) / 60


def sizes():
    """README's table: scores in fp32 of the teacher and its students."""
    slowest = RUNS["files-six"]["fp32, torch"]["sentences/s"]
    rows = []
    for depth, title in ALL_DEPTHS.items():
        megabytes = [
            f"{sized(depth, 'fp32', 'MB')[0]:.0f}",
            f"{sized(depth, '4 bits', 'MB')[0]:.1f}",
        ]
        found = [sized(depth, "fp32", key) for key in TESTS]
        speed = RUNS[f"files-{depth}"]["fp32, torch"]["sentences/s"] / slowest
        time = "" if depth == "six" else f"{minutes(depth):.1f} min"
        rows.append([title, *megabytes, *found, f"{speed:.1f}", time])
    header = ["layers", "MB", "MB in 4 bits", "STS average", "SciFact", "QNLI"]
    return [*header, "speed", "training"], rows


def size():
    """Scores in fp32 and in 4 bits, with and without pairs that overlap, by either index."""
    rows = []
    for depth, title in ALL_DEPTHS.items():
        for form in ("fp32", "4 bits"):
            found = [sized(depth, form, key) for key in (*AVERAGED, *INDEXES)]
            rows.append([f"{title}, {form}", f"{sized(depth, form, 'MB')[0]:.1f}", *found])
    header = ["layers, file", "MB", "STS", "without overlap", "SciFact", "QNLI"]
    return [*header, "SciFact, teacher's index", "QNLI, teacher's index"], rows


def choices():
    """Students by their layers and the number of sentences, and a teacher of twelve layers."""
    teacher = RUNS["mpnet-six"]["teacher"]["dev"]
    rows = [
        [title, dev(run) or teacher, *(sized(run, "fp32", key) for key in TESTS)]
        for title, run in CHOICES.items()
    ]
    return ["layers, sentences", "STS-B dev", "STS", "SciFact", "QNLI"], rows


def search():
    """Three layers by their training texts and the step that is kept, by either index."""
    rows = [[TEACHER_ROW, *(sized("six", "fp32", key) for key in (*INDEXES, "avg"))]]
    for title, (runs, form) in TEXTS.items():
        rows.append([title, *(scored(runs.split(), form, key) for key in (*INDEXES, "avg"))])
    return ["training texts", *INDEXES, "STS"], rows


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
        if re.fullmatch(rf"try-{method}(-[\d.]+)?", run):
            temperature = run.removeprefix(f"try-{method}").replace("-", ",temperature=")
            for name, row in table.items():
                found[name.replace(" (runs: 1)", "") + temperature] = row["dev"]
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def tried(name, title=None):
    """The row of a method: its best trial, which is seed 0, and two more seeds."""
    setting, best = next(iter(trials(name).items()))
    devs = [best, *(dev(f"{name}-{seed}")[0] for seed in SEEDS[1:])]
    found = [scored([f"score-{name}"], "fp32", key) for key in AVERAGED]
    return [title or name, setting.replace(",", ", ").replace("=", " "), devs, *found]


def methods():
    """Each loss by the best of its four trials on dev, three seeds, the best average first."""
    (before,) = (row["avg"] for row in RUNS["score-before"].values())
    teacher, untrained = [RUNS["KD-1"][row]["dev"] for row in ("teacher", "student before")]
    rows = [
        ["teacher", "", teacher, *(sized("six", "fp32", key) for key in AVERAGED)],
        ["student before", "", untrained, before, ""],
        *sorted(map(tried, METHODS), key=lambda row: -mean(row[3])),
    ]
    return ["method", *TRIED], rows


def larger():
    """KD and CKD by all-mpnet-base-v2, aligned, beside those by the student's own model."""
    teacher = RUNS["M-KD-1"]["teacher"]["dev"]
    found = [scored(["score-M-aligned"], "fp32", key) for key in AVERAGED]
    rows = [
        ["all-mpnet-base-v2, aligned", "", teacher, *found],
        *(tried(name, title) for name, title in LARGER.items()),
    ]
    return ["teacher, student", *TRIED], rows


def files():
    """A file of each depth in four formats: what it scores on STS-B test, and how fast it is."""
    slowest = RUNS["files-six"]["fp32, torch"]["sentences/s"]
    rows = []
    for depth, title in ALL_DEPTHS.items():
        found = RUNS[f"files-{depth}"]
        scores = [found[form]["Spearman"] for form in FORMS[1:]]
        speeds = [f"{found[form]['sentences/s'] / slowest:.1f}" for form in FORMS]
        rows.append([title, f"{found['int8']['MB']:.1f}", *scores, *speeds])
    header = ["layers", "MB, int8", "STS-B test, fp32", "int8", "4 bits"]
    return [*header, "speed: torch", "ONNX, fp32", "int8 ", "4 bits "], rows


def speed():
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
    teacher = RUNS["KD-1"]["teacher"]["dev"]
    rows = [["its embeddings' cosine, untrained", teacher, sized("six", "fp32", "STS-B")[0]]]
    for title, run, place in (
        ("cross-encoder", "DSE", 0),
        ("the cross-encoder's student", "DSE", -1),
        ("labels alone", "labels", -1),
    ):
        rows.append([title, *(pair_scores(run, place, f"{split} Spearman") for split in PARTS)])
    return ["all-MiniLM-L6-v2 as", "STS-B dev", "STS-B test"], rows


def pair_scores(run, place, key):
    """Of each seed, in the first or the last row of a run of dse.py."""
    return [list(RUNS[name].values())[place][key] for name in named(run)]


def with_tables(text, tables):
    """A page, with the tables that its markers name."""
    marked = re.compile(r"(<!-- table: (\S+) -->).*?(<!-- end -->)", re.S)
    return marked.sub(lambda m: f"{m[1]}\n\n{markdown(*tables[m[2]])}\n\n{m[3]}", text)


# ---- Pictures ------------------------------------------------------------------------------------


def write_figure(figure, name):
    figure.tight_layout()
    figure.savefig(HERE / "figures" / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def with_deviations(found):
    """Lists of scores by seed -> their means, and their standard deviations (0 for one seed)."""
    deviations = [stdev(values) if len(values) > 1 else 0 for values in found]
    return list(map(mean, found)), deviations


def draw_sizes():
    """STS average and search against megabytes, teacher included, in fp32 and in 4 bits."""
    panels = plt.figure(figsize=(10, 3.4)).subplots(1, 3)
    labels = ("STS, mean of 7 sets", "SciFact, nDCG@10", "QNLI, MRR@10")
    for axes, key, label in zip(panels, TESTS, labels):
        for form, mark in (("fp32", "o-"), ("4 bits", "s--")):
            means, deviations = with_deviations([sized(depth, form, key) for depth in ALL_DEPTHS])
            megabytes = [sized(depth, form, "MB")[0] for depth in ALL_DEPTHS]
            axes.errorbar(megabytes, means, deviations, fmt=mark, label=form)
            for depth, x, y in zip(ALL_DEPTHS, megabytes, means):
                place = (
                    dict(xytext=(8, -3)) if depth == "six" else dict(xytext=(-8, -3), ha="right")
                )
                axes.annotate(depth, (x, y), textcoords="offset points", **place)
        axes.set(xscale="log", xlabel="megabytes", title=label)
        axes.set_xticks((10, 20, 40, 80), ("10", "20", "40", "80"))
        axes.minorticks_off()
        axes.margins(0.2, 0.1)
    panels[0].legend(loc="center", frameon=False)
    write_figure(axes.figure, "sizes")


def draw_trials():
    """STS-B dev of every trial of every method, the best one as a ring."""
    axes = plt.figure(figsize=(8, 3.4)).subplots()
    for method in (*METHODS, "M-KD", "M-CKD"):
        best, *others = trials(method).values()
        label = method.replace("M-", "larger\nteacher,\n")
        axes.plot([label] * len(others), others, "o", color="C0")
        axes.plot([label], [best], "o", ms=10, mfc="none", color="C1")
    axes.set_ylabel("STS-B dev, Spearman x 100")
    write_figure(axes.figure, "trials")


def page_tables():
    """{name in a marker: (header, rows)}"""
    tables = dict(sizes=sizes(), size=size(), choices=choices(), search=search())
    tables |= {"left-out": left_out(), "multilingual": multilingual()}
    tables |= dict(methods=methods(), larger=larger(), pairs=pairs(), speed=speed(), files=files())
    return tables


def main():
    tables = page_tables()
    for page in (HERE.parent / "README.md", *HERE.glob("*.md")):
        page.write_text(with_tables(page.read_text("utf-8"), tables), "utf-8")
    draw_sizes()
    draw_trials()


if __name__ == "__main__":
    main()
