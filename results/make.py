"""Write the tables of README.md and results/*.md between their markers, and draw figures/.

  python results/make.py          after results/runs.py
  python results/make.py --full   print all tables with all rows and columns instead

Everything comes from results/data/*.jsonl. A marker names the table: <!-- table: own-teacher -->.
"""

import json
import re
import sys
from pathlib import Path
from statistics import mean, stdev

import matplotlib.pyplot as plt

plt.switch_backend("agg")
plt.rcParams.update({"svg.hashsalt": "results", "axes.grid": True, "axes.axisbelow": True})
HERE = Path(__file__).parent
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
MPNET = "sentence-transformers/all-mpnet-base-v2"
E5 = "intfloat/multilingual-e5-small"
SETS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
SEEDS = (0, 1, 2)
TEACHER_ROW = "six (the teacher)"

OWN = "KD ConGen CKD IBKD L2 MetaKD PKD Dual-L2 SEED SKD DistilFACE CRD HPD"
LARGER = "KD-aligned CKD-aligned CKD ConGen IBKD KD SEED CRD L2 Dual-L2 SKD HPD PKD"
DEPTHS = dict(three="three (1,4,5)", two="two (0,5)", one="one (5)")
ALL_DEPTHS = dict(six=TEACHER_ROW) | DEPTHS
AMOUNTS = (5_000, 20_000, 50_000, 182_049)  # sentences
BY_AMOUNT = {  # layers: the runs with these amounts, or "-"
    "three (1,3,5)": "KD-5k KD KD-50k KD-three-layers",
    "three (1,4,5)": "- layers-1-4-5 layers-1-4-5-50k three-own-KD-182k",
    "two (0,5)": "- - layers-0-5-50k KD-two-layers",
    "one (5)": "- - layer-5-50k KD-one-layer",
}
CURVE = {  # teacher and loss: the runs with these amounts
    "its own model, KD": "- layers-1-4-5 layers-1-4-5-50k three-own-KD-182k",
    "the larger one, aligned, KD": "- three-M-KD-20k three-M-KD-50k three-M-KD-182k",
}
CUTS = {  # (model, layers that are kept): the names of its runs begin so
    ("all-MiniLM-L6-v2", "three"): r"minilm-\d-\d-\d",
    ("all-MiniLM-L6-v2", "two"): r"minilm-\d-\d",
    ("all-mpnet-base-v2", "three"): r"mpnet-.*",
    ("multilingual-e5-small", "three"): r"e5-\d+-\d+-11",
    ("multilingual-e5-small", "six"): r"e5-six-(\d+-){5}11",
}
EVERY_FOURTH = "3,7,11"
LANGUAGE = ("model", "English to German", "German to English")
LANGUAGE_ROWS = ("teacher", "student", "student before")
UNSEEN = {"scifact": "SciFact", "qnli": "QNLI"}
ANSWERS = ("teacher", "student before", "stage 1", "(stage 1)", "both stages")
E5_STUDENTS = {"six": "six (0,1,2,9,10,11)", "three": "three (0,10,11)"}
LANGUAGES = ("STS-B: German", "English", "XQuAD-R: German", "English ")
LOSS = re.compile(r"e5-(KD|CKD|ConGen|IBKD)-(?:(0\.\d+)-)?(\d+e-4)(?:-0)?")


# ---- Scores --------------------------------------------------------------------------------------


def read_lines():
    """All lines of data/*.jsonl -> {run: line}."""
    texts = [file.read_text("utf-8") for file in sorted(HERE.glob("data/*.jsonl"))]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    return {line["run"]: line for line in lines}


LINES = read_lines()
RUNS = {run: line["scores"] for run, line in LINES.items()}  # {run: {row: {column: score}}}
BEFORE = RUNS.get("tests-before", {}).get(MINILM, {})  # of the student before training
TESTED = {}  # {model: {column: score}}, from eval_sts.py
for run in RUNS:
    if run in ("curve", "curve-seeds") or re.match("tests-(?!before)", run):
        TESTED |= RUNS[run]
TEACHER = TESTED.get(MINILM, {}) | RUNS["layers-1-4-5-50k"]["teacher"]
ALIGNED = TESTED.get("runs/M-aligned", {}) | RUNS["M-KD-aligned-0"]["teacher"]


def final(run):
    """The last row of a run's table, and its test scores."""
    *_, last = RUNS[run].values()
    return TESTED.get(f"runs/{run}", {}) | last


def scores(name, key):
    """The final score of each seed of a run: of NAME, or of NAME-0, NAME-1, ..."""
    runs = [run for run in RUNS if re.fullmatch(re.escape(name) + r"(-\d)?", run)]
    return [final(run)[key] for run in runs]


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


def pick(table, columns=None, rows=None):
    """Some columns by their names, and some rows by the texts of their first cells."""
    header, body = table
    places = [header.index(name) for name in columns or header]
    kept = [row for row in body if not rows or {row[0], f"{row[0]}, {row[1]}"} & {*rows}]
    return [header[place] for place in places], [[row[place] for place in places] for row in kept]


def plain(runs, title="model", names=None):
    """The tables that some runs have printed, as one; names: of their rows."""
    found = [item for run in runs.split() for item in RUNS[run].items()]
    columns = list(dict.fromkeys(key for _, row in found for key in row))
    rows = [[name, *(row.get(key, "") for key in columns)] for name, row in found]
    for row, name in zip(rows, names or ()):
        row[0] = name
    return [title, *columns], rows


def students(references, runs):
    """References {name: scores}, then students {name: run}, the best average first."""
    rows = []
    for name, row in references.items():
        rows.append([name, row["avg"], row["dev"], *[row[key] for key in SETS], ""])
    for name, run in sorted(runs.items(), key=lambda item: -mean(scores(item[1], "avg"))):
        averages = scores(run, "avg")
        sets = [mean(scores(run, key)) for key in SETS]
        rows.append([name, averages, scores(run, "dev"), *sets, str(len(averages))])
    return ["model", "STS average", "STS-B dev", *SETS, "seeds"], rows


def by_amount(runs_of, title):
    """STS average, and STS-B dev in brackets, by number of sentences."""
    rows = []
    for name, runs in runs_of.items():
        found = [(scores(run, "avg"), scores(run, "dev")) for run in runs.split()]
        rows.append([name, *(f"{cell(a)} ({mean(dev):.2f})" if a else "" for a, dev in found)])
    return [title, *(f"{amount:,}" for amount in AMOUNTS)], rows


AVERAGED = ("avg", "avg without overlap")


def sized(depth, form, column):
    """A score of the students of size.md, fp32 or 4 bits -> a list, one for each seed."""
    runs = [f"{set_}-{depth}{file}" for set_ in ("score", "scifact") for file in ("", "-q4")]
    return scored(runs, form, column)


def scored(runs, form, column):
    """What scores.py gave in a column of a form, of these runs and their seeds -> a list."""
    found = []
    for run in runs:
        for name in (run, *(f"{run}-{seed}" for seed in SEEDS)):
            row = RUNS.get(name, {}).get(form, {})
            found += [row[column]] if column in row else []
    return found


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
        found = [sized(depth, "fp32", key) for key in ("avg", "SciFact", "QNLI")]
        speed = RUNS[f"files-{depth}"]["fp32, torch"]["sentences/s"] / slowest
        time = "" if depth == "six" else f"{minutes(depth):.1f} min"
        rows.append([title, *megabytes, *found, f"{speed:.1f}", time])
    header = ["layers", "MB", "MB in 4 bits", "STS average", "SciFact", "QNLI"]
    return [*header, "speed", "training"], rows


INDEXES = [f"{task}{index}" for index in ("", ", teacher's index") for task in ("SciFact", "QNLI")]


def size():
    """Scores in fp32 and in 4 bits, with and without pairs that overlap, by either index."""
    rows = []
    for depth, title in ALL_DEPTHS.items():
        for form in ("fp32", "4 bits"):
            found = [sized(depth, form, key) for key in (*AVERAGED, *INDEXES)]
            rows.append([f"{title}, {form}", f"{sized(depth, form, 'MB')[0]:.1f}", *found])
    header = ["layers, file", "MB", "STS", "without overlap", "SciFact", "QNLI"]
    return [*header, "SciFact, teacher's index", "QNLI, teacher's index"], rows


TEXTS = {  # of three layers: (the runs of their scores, the form of the file)
    "20,000 general sentences": ("score-n20k-three", "fp32"),
    "50,000 general sentences": ("score-three scifact-three", "fp32"),
    "both corpora, one epoch, dev's step": ("score-own-dev", "fp32"),
    "both corpora, one epoch, last step": ("score-own-last", "fp32"),
    "both corpora, three epochs, dev's step": ("score-own3-dev", "fp32"),
    "both corpora, three epochs, last step": ("score-own3-last", "fp32"),
    "the last, in 4 bits": ("score-own3-q4", "4 bits"),
}


def search():
    """Three layers by their training texts and the step that is kept, by either index."""
    rows = [
        [TEACHER_ROW, *(sized("six", "fp32", key) for key in INDEXES), sized("six", "fp32", "avg")]
    ]
    for title, (runs, form) in TEXTS.items():
        found = [scored(runs.split(), form, key) for key in (*INDEXES, "avg")]
        rows.append([title, *found])
    header = ["training texts", *INDEXES]
    return [*header, "STS"], rows


def files():
    """A file of each depth in four formats: what it scores on STS-B test, and how fast it is."""
    slowest = RUNS["files-six"]["fp32, torch"]["sentences/s"]
    forms = ("fp32, torch", "fp32, ONNX Runtime", "int8", "4 bits")
    rows = []
    for depth, title in ALL_DEPTHS.items():
        found = RUNS[f"files-{depth}"]
        scores = [found[form]["Spearman"] for form in forms[1:]]
        speeds = [f"{found[form]['sentences/s'] / slowest:.1f}" for form in forms]
        rows.append([title, f"{found['int8']['MB']:.1f}", *scores, *speeds])
    header = ["layers", "MB, int8", "STS-B test, fp32", "int8", "4 bits"]
    return [*header, "speed: torch", "ONNX, fp32", "int8 ", "4 bits "], rows


def parts(*compared):
    """Scores with and without something, three seeds each."""
    rows = []
    for part, name, without in compared:
        found = [scores(run, key) for key in ("avg", "dev") for run in (name, without)]
        rows.append([part, *found])
    return ["part", "STS average with it", "without", "STS-B dev with it", "without "], rows


def pairs():
    """Cross-encoders, and students with and without their logits, on STS-B and MRPC."""
    found = {}
    for task in ("stsb", "mrpc"):
        *before, (_, teacher), (_, student) = RUNS[f"DSE-{task}"].items()
        rows = {"student before (cosine)": before[0][1]} if before else {}
        rows |= {"weak teacher": teacher, "weak teacher's student": student}
        rows["labels alone"] = final(f"DSE-{task}-labels")
        rows["strong teacher"] = RUNS[f"DSE-M-{task}"]["teacher"]
        rows["strong teacher's student"] = final(f"DSE-M-{task}")
        for name, row in rows.items():
            kept = {f"{task}: {key}": value for key, value in row.items() if " " in key}
            found.setdefault(name, {}).update(kept)
    columns = list(dict.fromkeys(key for row in found.values() for key in row))
    rows = [[name, *(row.get(key, "") for key in columns)] for name, row in found.items()]
    return ["model", *columns], rows


def transfer():
    """Accuracies, and their mean; F1 is left out."""
    tasks = ("MR", "CR", "SUBJ", "MPQA", "TREC", "MRPC")
    rows = []
    for name, row in zip(("teacher", "KD", "CKD", "ConGen", "IBKD"), RUNS["transfer"].values()):
        found = [row[task] for task in tasks]
        rows.append(
            [name, *found, mean(found), mean(row[task] for task in tasks if task != "TREC")]
        )
    return ["model", *tasks, "mean", "without TREC"], rows


def cut_scores(pattern):
    """{layers: STS-B dev before and after training}, the best untrained first."""
    found = {}
    for run in filter(re.compile(pattern).fullmatch, RUNS):
        *_, layers = re.findall(r"--student-layers (\S+)", LINES[run]["command"])
        found[layers] = (RUNS[run]["student before"]["dev"], final(run)["dev"])
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def cuts():
    rows = []
    for (model, kept), pattern in CUTS.items():
        for layers, found in cut_scores(pattern).items():
            rows.append([f"{model}, {kept}: {layers}", *found])
    return ["model, how many: which", "untrained", "trained"], rows


def prediction():
    """How far the cut that is the best untrained is from the best trained one."""
    rows = []
    for (model, kept), pattern in CUTS.items():
        after = [trained for _, trained in cut_scores(pattern).values()]
        rows.append([f"{model}, {kept}", str(len(after)), after[0], max(after), min(after)])
    return ["model, layers", "cuts", "scan's choice", "best", "worst"], rows


def interval(row, decimals=1):
    """A gain in nDCG@10 x 100 with its 95 % interval, as unseen.py prints it."""
    gain, low, high = [f"{row[f'nDCG@10{end}']:.{decimals}f}" for end in ("", " from", " to")]
    return f"{gain} ({low} to {high})"


def unseen():
    """The gain of a corpus's texts in training, for passages with and without them."""
    rows = []
    for task, title in UNSEEN.items():
        found = RUNS[f"unseen-{task}"]
        teacher, *general = [row["nDCG@10"] for row in found.values()][:4]
        gains = [interval(found[f"gain, {kind}"]) for kind in ("seen", "unseen")]
        rows.append([title, teacher, general, *gains, interval(found["seen - unseen"])])
    header = ["nDCG@10 x 100", "teacher", "general sentences", "gain, seen", "gain, unseen"]
    return [*header, "difference"], rows


def e5_scores(model, names):
    """STS-B test, XQuAD-R's MRR@10, news; names: of the runs' tables, {} is the task."""
    found = []
    for task in ("sts-de", "sts-en", "xquad-de", "xquad-en", "news"):
        rows = [RUNS[name.format(task)][model.format(seed)] for seed, name in enumerate(names)]
        key = "MRR@10" if "xquad" in task else next(iter(rows[0]))
        found.append([row[key] for row in rows])
    return found


def multilingual():
    """multilingual-e5-small, cut to two languages, and its students."""
    rows = []
    for title, model, side in (("12, all", E5, "before"), ("12, 20,000", "runs/e5-20k", "after")):
        size = f"{RUNS['e5-20k'][side]['MB, fp32']:.0f}"
        rows.append([title, "fp32", size, *e5_scores(model, ["e5-{}"])])
    four = RUNS["e5-20k-4-bits"]["4 bits"]
    others = [e5_scores_of_file(task) for task in ("sts-en", "xquad-de", "xquad-en", "news")]
    rows.append(["12, 20,000", "4 bits", f"{four['MB']:.1f}", four["Spearman"], *others])
    for depth, title in E5_STUDENTS.items():
        file = RUNS[f"e5-{depth}-300k-4-bits-0"]["4 bits"]
        for form, suffix in (("fp32", ""), ("4 bits", "-4-bits")):
            size = f"{file['MB']:.1f}" if suffix else f"{4 * file['M parameters']:.0f}"
            names = [f"e5-300k-{{}}{suffix}-{seed}" for seed in SEEDS]
            found = e5_scores(f"runs/e5-{depth}-300k-query-{{}}", names)
            rows.append([f"{title}, 20,000", form, size, *found])
    return ["layers, tokens", "format", "MB", *LANGUAGES, "news"], rows


def e5_scores_of_file(task):
    """A score of the model with 20,000 tokens in 4 bits, not trained."""
    (row,) = RUNS[f"e5-20k-{task}-4-bits"].values()
    return row.get("MRR@10", next(iter(row.values())))


def losses():
    """Three layers of multilingual-e5-small by loss, temperature and learning rate."""
    rows = []
    for run in RUNS:
        if not (setting := LOSS.fullmatch(run)):
            continue
        name = run.removesuffix("-0")
        tables = [(f"e5-losses-sts-{way}", f"runs/prompted-test-{way}.tsv") for way in ("de", "en")]
        tables += [(f"e5-losses-xquad-{way}", "MRR@10") for way in ("de", "en")]
        seeds = re.compile(rf"runs/{re.escape(name)}(-\d)?")
        tested = [
            [row[key] for model, row in RUNS[table].items() if seeds.fullmatch(model)]
            for table, key in tables
        ]
        title = ", ".join(filter(None, setting.groups()))
        rows.append([title, scores(name, "dev"), *tested])
    return ["loss, temperature, rate", "dev", *LANGUAGES], sorted(rows)


def full_tables():
    """{name: table with all rows and columns}"""
    before = {"student before": BEFORE | RUNS["KD-0"]["student before"]}
    larger = {"teacher": TESTED.get(MPNET, {}) | RUNS["M-KD-0"]["teacher"]}
    larger |= {"aligned teacher": ALIGNED} | before
    of_hsic = ("IBKD: HSIC", "IBKD", "IBKD-no-HSIC")
    of_dropout = ("KD: dropout of 0.1", "KD-dropout", "KD")
    tables = {
        "own-teacher": students({"teacher": TEACHER} | before, {n: n for n in OWN.split()}),
        "larger-teacher": students(larger, {n: f"M-{n}" for n in LARGER.split()}),
        "amounts": by_amount(BY_AMOUNT, "layers"),
        "curve": by_amount(CURVE, "teacher, loss"),
        "size": size(),
        "search": search(),
        "files": files(),
        "sizes": sizes(),
        "speed": plain("speed-orders", "order, batch, precision"),
        "bf16": parts(("bf16, two layers", "bf16-two-layers", "layers-0-5-50k")),
        "parts": parts(of_hsic, of_dropout),
        "answers": plain("search-stage-1 search-stage-2", names=ANSWERS),
        "language": (LANGUAGE, plain("en-de-test en-de-before", names=LANGUAGE_ROWS)[1]),
        "transfer": transfer(),
        "cuts": cuts(),
        "prediction": prediction(),
        "multilingual": multilingual(),
        "losses": losses(),
        "pairs": pairs(),
        "unseen": unseen(),
    }
    return tables


AVERAGES = ["model", "STS average", "STS-B dev", "seeds"]
SHOWN = {  # table of a page: what it shows of the full one (columns, rows)
    "own-teacher": (AVERAGES, "teacher;student before;KD;ConGen;CKD;IBKD;L2;PKD;SEED;CRD"),
    "no-teacher": (AVERAGES, "student before;KD;DistilFACE"),
    "larger-teacher": (
        AVERAGES,
        "teacher;aligned teacher;student before;KD-aligned;CKD-aligned;CKD;ConGen;IBKD;KD",
    ),
    "speed": (
        ["order, batch, precision", "ours", "theirs", "ratio", "smallest", "largest"],
        "random, 64, fp32;random, 64, bf16;random, 512, fp32;random, 512, bf16;grouped, 64, fp32;"
        "grouped, 64, bf16",
    ),
    "answers": (
        ["model", "MRR@10", "Recall@10"],
        "teacher;student before;stage 1;both stages",
    ),
    "transfer": (["model", "mean", "without TREC"], None),
    "multilingual": (
        ["layers, tokens", "format", "MB", *LANGUAGES],
        "12, all;12, 20,000;six (0,1,2,9,10,11), 20,000, 4 bits;three (0,10,11), 20,000, 4 bits",
    ),
    "losses": (None, "KD, 16e-4;CKD, 0.05, 8e-4;ConGen, 0.1, 8e-4;IBKD, 0.1, 4e-4"),
    "pairs": (
        ["model", "stsb: dev Spearman", "stsb: test Spearman"]
        + ["mrpc: dev accuracy", "mrpc: test accuracy"],
        None,
    ),
}


def page_tables():
    """{name in a marker: table of a page}"""
    tables = full_tables()
    shown = {}
    for name in {**tables, **SHOWN}:
        columns, rows = SHOWN.get(name, (None, None))
        table = tables["own-teacher" if name == "no-teacher" else name]
        shown[name] = markdown(*pick(table, columns, rows and rows.split(";")))
    return shown


def with_tables(text, tables):
    """A page, with the tables that its markers name."""
    marked = re.compile(r"(<!-- table: (\S+) -->).*?(<!-- end -->)", re.S)
    empty = "(not measured yet)"
    return marked.sub(lambda m: f"{m[1]}\n\n{tables.get(m[2], empty)}\n\n{m[3]}", text)


# ---- Pictures ------------------------------------------------------------------------------------


BELOW = dict(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=2, frameon=False)
BESIDE = dict(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def save(name, axes, score=None, label=None, ylabel="Spearman x 100, mean of 7 sets"):
    """Write figures/NAME.svg, with a horizontal line and the legend below the picture."""
    if score:
        axes.axhline(score, ls="--", color="black", label=label)
    axes.set_ylabel(ylabel)
    axes.legend(**(BESIDE if name == "losses" else BELOW))
    write_figure(axes.figure, name)


def write_figure(figure, name):
    figure.tight_layout()
    figure.savefig(HERE / "figures" / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def logarithmic(label, ticks, size=(7, 4.2)):
    axes = plt.figure(figsize=size).subplots()
    axes.set(xscale="log", xlabel=label)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.margins(x=0.15)
    return axes


def with_deviations(found):
    """Lists of scores by seed -> their means, and their standard deviations (0 for one seed)."""
    deviations = [stdev(values) if len(values) > 1 else 0 for values in found]
    return list(map(mean, found)), deviations


def draw_curve():
    """STS average against the number of sentences, by teacher."""
    axes = logarithmic("training sentences", AMOUNTS[1:])
    for (title, runs), mark in zip(CURVE.items(), "os"):
        found = [scores(run, "avg") for run in runs.split()[1:]]
        axes.errorbar(AMOUNTS[1:], *with_deviations(found), fmt=mark + "-", label=title)
    save("curve", axes, ALIGNED["avg"], "the larger teacher, aligned")


def draw_sizes():
    """STS average and search against megabytes, teacher included, in fp32 and in 4 bits."""
    panels = plt.figure(figsize=(10, 3.4)).subplots(1, 3)
    labels = ("STS, mean of 7 sets", "SciFact, nDCG@10", "QNLI, MRR@10")
    for axes, key, label in zip(panels, ("avg", "SciFact", "QNLI"), labels):
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


def draw_layers():
    """STS-B dev of all cuts, untrained against trained; a panel per model."""
    models = list(dict.fromkeys(model for model, _ in CUTS))
    panels = plt.figure(figsize=(10, 3.8)).subplots(1, len(models))
    for (model, kept), pattern in CUTS.items():
        axes = panels[models.index(model)]
        found = cut_scores(pattern)
        axes.set(title=model, xlabel="untrained")
        first, *_ = found.values()
        dots = axes.plot(*zip(*found.values()), "o", label=f"{kept} layers")
        axes.plot(*first, "o", ms=12, mfc="none", color=dots[0].get_color())
        if EVERY_FOURTH in found:
            axes.annotate(f"  {EVERY_FOURTH}", found[EVERY_FOURTH], va="center")
    for axes in panels:
        axes.legend(**BELOW)
        axes.margins(0.12)
    panels[0].set_ylabel("trained")
    write_figure(axes.figure, "layers")


def draw_losses():
    """STS-B dev of both languages against the learning rate, a line per loss and temperature."""
    axes = logarithmic("learning rate x 10,000", (2, 4, 8, 16))
    lines = {}
    for title, dev, *_ in losses()[1]:
        *setting, rate = title.split(", ")
        lines.setdefault(", ".join(setting), []).append((int(rate.removesuffix("e-4")), dev))
    colors = dict(KD="C0", CKD="C1", ConGen="C2", IBKD="C3")
    for number, (title, points) in enumerate(sorted(lines.items())):
        rates, found = zip(*sorted(points))
        style = dict(color=colors[title.split(",")[0]], marker="os^Dvp"[number % 6])
        axes.errorbar(rates, *with_deviations(found), label=title, **style)
    save("losses", axes, ylabel="Spearman x 100, STS-B dev")


def main():
    if "--full" in sys.argv:
        for name, table in full_tables().items():
            print(f"## {name}\n\n{markdown(*table)}\n")
        return
    tables = page_tables()
    for page in (HERE.parent / "README.md", *HERE.glob("*.md")):
        page.write_text(with_tables(page.read_text("utf-8"), tables), "utf-8")
    for draw in (draw_curve, draw_sizes, draw_layers, draw_losses):
        draw()


if __name__ == "__main__":
    main()
