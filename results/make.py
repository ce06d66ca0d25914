"""Write the tables of results/*.md between their markers, and draw the pictures in figures/.

  python results/make.py       after results/runs.py

Everything comes from results/data/*.jsonl. A marker names the table: <!-- table: own-teacher -->.
"""

import json
import re
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import matplotlib.pyplot as plt
from scipy.stats import spearmanr

plt.switch_backend("agg")
plt.rcParams.update({"svg.hashsalt": "results", "axes.grid": True, "axes.axisbelow": True})
HERE = Path(__file__).parent
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
COLUMNS = ("avg", "dev", "STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R")
OWN = "KD CKD IBKD ConGen SEED PKD MetaKD L2 Dual-L2 SKD CRD HPD DistilFACE"
FAR = "KD-aligned CKD-aligned CKD ConGen IBKD KD SEED L2 Dual-L2 SKD CRD HPD PKD"

DEPTHS = dict(six="six (the teacher)", three="three (1,4,5)", two="two (0,5)", one="one (5)")
LAYERS = dict(six="six-layers", three="three-layers", two="two-layers", one="one-layer")
STUDENTS = dict(three="layers-1-4-5-50k", two="layers-0-5-50k", one="layer-5-50k")
TRAINED = 50_000  # sentences of these students
THREE_LAYERS = {
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
    "5,000 sentences": "KD-5k",
}
AMOUNTS = {5_000: "KD-5k", 20_000: "KD", 50_000: "KD-50k", 182_049: "KD-three-layers"}
CURVE_AMOUNTS = (20_000, 50_000, 182_049, 3 * 182_049)  # sentences in all epochs
CURVE = {  # student, teacher, loss: the runs with these amounts, or "-"
    "three layers, its own model, KD": "layers-1-4-5 layers-1-4-5-50k three-own-KD-182k -",
    "three layers, both teachers, KD": "three-both-0.3-20k - three-both-0.3-182k -",
    "three layers, the larger one, KD": "three-M-KD-20k three-M-KD-50k three-M-KD-182k "
    "three-M-KD-3x182k",
    "three layers, the larger one, CKD": "three-M-CKD-20k - - -",
}
CUTS = {  # runs that differ in the layers alone
    "all-MiniLM-L6-v2, three": "minilm-0-1-5 minilm-0-2-5 minilm-0-3-5 minilm-0-4-5 minilm-1-2-5 "
    "minilm-1-3-5 minilm-1-4-5 minilm-2-3-5 minilm-2-4-5 minilm-3-4-5",
    "all-MiniLM-L6-v2, two": "minilm-0-5 minilm-1-5 minilm-2-5 minilm-3-5 minilm-4-5",
    "all-mpnet-base-v2, three": "mpnet-0-7-11 mpnet-0-10-11 mpnet-1-4-11 mpnet-3-7-11 mpnet-4-9-11",
    "multilingual-e5-small, three": "e5-0-1-11 e5-0-4-11 e5-0-7-11 e5-0-8-11 e5-0-10-11 e5-1-3-11 "
    "e5-1-4-11 e5-1-7-11 e5-1-8-11 e5-3-7-11 e5-3-9-11 e5-4-9-11 e5-9-10-11",
    "multilingual-e5-small, six": "e5-six-0-1-2-9-10-11 e5-six-0-1-4-5-9-11 e5-six-0-1-4-9-10-11 "
    "e5-six-0-2-4-7-9-11 e5-six-0-4-5-9-10-11 e5-six-1-3-5-7-9-11",
}
OWN_TEXT = {  # title: run
    "general sentences alone": "text-general",
    "half SciFact's passages, sentences and questions": "text-own",
    "the same, 64 tokens": "text-own-64",
    "the same, 256 tokens": "text-own-256",
    "half SciFact's passages and sentences": "text-own-no-questions",
    "half SciFact's sentences": "text-own-sentences",
    "a quarter SciFact's passages": "text-own-passages",
    "SciFact's text alone": "text-own-all",
}
SEARCH_NAMES = ("SciFact", "QNLI", "XQuAD-R")
MIX = dict(three="three (1,4,5)", two="two (0,5), 20,000 tokens", one="one (5), 20,000 tokens")
AGREEMENT = {
    "general": "general sentences",
    "scifact": "SciFact's sentences",
    "qnli": "QNLI's passages",
    "xquad": "XQuAD-R's passages",
}
SEEDS = (0, 1, 2)
E5 = "intfloat/multilingual-e5-small"
E5_ROWS = {E5: "before", "runs/e5-20k": "after"}  # of the run of extras.trim
E5_STUDENTS = {"six": "six (0,1,2,9,10,11)", "three": "three (0,10,11)"}
OBJECTIVES = {  # loss: the runs, by temperature and learning rate
    "KD": "e5-KD-2e-4 e5-KD-4e-4 e5-KD-8e-4 e5-KD-16e-4",
    "CKD": "e5-CKD-0.02-4e-4 e5-CKD-0.05-2e-4 e5-CKD-0.05-4e-4 e5-CKD-0.05-8e-4 e5-CKD-0.1-4e-4",
    "ConGen": "e5-ConGen-0.02-4e-4 e5-ConGen-0.05-4e-4 e5-ConGen-0.1-4e-4 e5-ConGen-0.1-8e-4 "
    "e5-ConGen-0.2-4e-4 e5-ConGen-0.2-8e-4",
    "IBKD": "e5-IBKD-0.02-4e-4 e5-IBKD-0.05-4e-4 e5-IBKD-0.05-8e-4 e5-IBKD-0.1-4e-4 "
    "e5-IBKD-0.1-8e-4",
}
MORE = {
    "50,000, one epoch (batch 64, 8e-4)": "e5-CKD-0.05-8e-4",
    "300,000, one epoch (batch 256, 16e-4)": "e5-three-300k-one-epoch",
    "300,000, four epochs (batch 256, 16e-4)": "e5-three-300k",
}
TWO_LANGUAGES = ("STS-B: German", "English", "XQuAD-R: German", "English")
INDEX = (MINILM, "runs/mix-three-0")
INDEX_FORMATS = ("float", "int8", "sign")
SPEED_FORMATS = ("fp32, torch", "fp32, ONNX Runtime", "int8")  # rows of extras/quantize.py
FILES = {  # tokens: students, or the teacher
    "30,522": "six three two one",
    "20,000": "three-20k two-20k one-20k",
    "12,000": "three-12k two-12k one-12k",
    "20,000 *": "two-20k-182k",
    "17,000 *": "one-17k",
}
FOLDERS = dict(three="layers-1-4-5-50k", two="layers-0-5-50k-0", one="layer-5-50k-0")


def read_lines():
    """All lines of data/*.jsonl -> {run: line}."""
    texts = [file.read_text("utf-8") for file in sorted(HERE.glob("data/*.jsonl"))]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    return {line["run"]: line for line in lines}


LINES = read_lines()
RUNS = {run: line["scores"] for run, line in LINES.items()}  # {run: {row: {column: score}}}
TEACHER = RUNS["layers-1-4-5-50k"]["teacher"]


def final(run):
    """The last row of a run's table, and averages that were measured later."""
    later = RUNS["curve"] | RUNS["curve-seeds"]
    *_, last = RUNS[run].values()
    return later.get(f"runs/{run}", {}) | last


def scores(name, key):
    """The final score of each seed of a run: of NAME, or of NAME-0, NAME-1, ..."""
    runs = [run for run in RUNS if re.fullmatch(re.escape(name) + r"(-\d)?", run)]
    return [final(run)[key] for run in runs]


def trained_per_second(depth):
    """Sentences per second, the mean of two runs."""
    lines = [LINES[f"retrained-{LAYERS[depth]}-{seed}"] for seed in (1, 2)]
    return mean(line["sentences_per_second"] for line in lines)


def cell(value):
    """A text, a number, or the mean of a list of seeds, with the deviation of three or more."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.2f}"
    spread = f" ± {stdev(value):.2f}" if len(value) > 2 else ""
    return f"{mean(value):.2f}{spread}"


def markdown(header, rows):
    """Rows of cells, the first of which is text -> a Markdown table."""
    cells = [[cell(value) for value in row] for row in rows]
    dashes = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, dashes, *cells))


def student_table(title, references, students, order="avg"):
    """References {name: scores}, then students {name: run}, the best of a column first."""
    rows = []
    for name, row in references.items():
        found = [row[key] for key in COLUMNS]
        rows.append([name, *found, ""])
    ranked = sorted(students.items(), key=lambda item: -mean(scores(item[1], order)))
    for name, run in ranked:
        averages, dev, *sets = [scores(run, key) for key in COLUMNS]
        means = [mean(values) for values in sets]
        rows.append([name, averages, dev, *means, str(len(averages))])
    return markdown([title, "avg", "STS-B dev", *COLUMNS[2:], "seeds"], rows)


def plain_table(rows, title="model"):
    """{row: {column: value}} -> a Markdown table with the columns of the last row."""
    *_, last = rows.values()
    columns = [key for key in last if key not in ("dev", "test", "bytes")]
    cells = []
    for name, row in rows.items():
        cells.append([name, *[row.get(key, "") for key in columns]])
    return markdown([title, *columns], cells)


def curve():
    """STS average, and dev in brackets, of a larger teacher's students by number of sentences."""
    rows = []
    for title, runs in CURVE.items():
        row = [title]
        for run in runs.split():
            averages, dev = scores(run, "avg"), scores(run, "dev")
            row.append(f"{cell(averages)} ({cell(dev)})" if averages else "")
        rows.append(row)
    header = ["student, teacher, loss", "20,000", "50,000", "182,049", "3 x 182,049"]
    return markdown(header, rows)


def file_numbers(name):
    """A student's files in fp32, int8 and 4 bits -> {MB, dev, avg, QNLI, transfer} of each."""
    files = []
    for row in RUNS[f"dev-{name}"].values():
        files.append({"MB": row["MB"], "dev": row["Spearman"]})
    fp32, int8, four = files
    folder = f"runs/{FOLDERS.get(name, name)}"
    in_torch = RUNS["fp32"] | RUNS["fp32-more"] | {"runs/six": TEACHER}
    fp32["avg"] = mean(in_torch[folder][key] for key in COLUMNS[2:])
    four["avg"] = mean(RUNS[f"sts-{name}"]["4 bits"][key] for key in COLUMNS[2:])
    if name == "six":  # the teacher's file in 4 bits was scored on STS alone
        return fp32, int8, four | {"QNLI": "", "transfer": ""}
    tasks = RUNS["transfer-4-bits"][folder]
    four["transfer"] = mean(tasks[task] for task in ("CR", "TREC", "MRPC"))
    four["QNLI"] = RUNS["qnli-4-bits"][folder]["MRR@10"]
    return fp32, int8, four


def megabytes():
    """Megabytes and scores in fp32, int8 and 4 bits; a row per student."""
    rows = []
    for tokens, names in FILES.items():
        for name in names.split():
            fp32, int8, four = file_numbers(name)
            row = [DEPTHS[name.split("-")[0]], tokens]
            row += [f"{file['MB']:.1f}" for file in (fp32, int8, four)]
            row += [fp32["avg"], four["avg"], fp32["dev"], int8["dev"], four["dev"]]
            rows.append([*row, four["QNLI"], four["transfer"]])
    header = ["layers", "tokens", "MB: fp32", "int8", "4 bits", "avg: fp32", "4 bits"]
    header += ["dev: fp32", "int8", "4 bits", "QNLI", "transfer"]
    return markdown(header, rows)


def sizes():
    """README's table: megabytes, scores, speed, training time of the teacher and its students."""
    slowest = RUNS["int8-six-layers"]["fp32, torch"]["sentences/s"]
    trimmed = {"two-20k-182k": "two (0,5), 20,000 tokens", "one-17k": "one (5), 17,000 tokens"}
    rows = []
    for name, title in (DEPTHS | trimmed).items():
        fp32, int8, four = file_numbers(name)
        row = [title, f"{fp32['MB']:.0f}", f"{int8['MB']:.0f}", f"{four['MB']:.1f}"]
        speeds, time = [""] * 3, ""
        dev, average = fp32["dev"], fp32["avg"]
        if name in DEPTHS:
            onnx = RUNS[f"int8-{LAYERS[name]}"]
            speeds = [f"{onnx[key]['sentences/s'] / slowest:.1f}" for key in SPEED_FORMATS]
        if name in STUDENTS:
            dev = scores(STUDENTS[name], "dev")
            average = scores(STUDENTS[name], "avg")
            time = f"{TRAINED / trained_per_second(name) / 60:.1f} min"
        rows.append([*row, dev, average, four["avg"], *speeds, time])
    header = ["layers", "MB: fp32", "int8", "4 bits", "STS-B dev", "STS average", "in 4 bits"]
    header += ["speed: torch", "ONNX, fp32", "ONNX, int8", "training"]
    return markdown(header, rows)


def int8():
    """A row for each number of layers and format."""
    rows = []
    for depth, title in DEPTHS.items():
        for name, row in RUNS[f"int8-{LAYERS[depth]}"].items():
            rows.append([f"{title}, {name}", *row.values()])
    return markdown(["model", "MB", "STS-B test", "sentences/s"], rows)


def training_speed():
    """Sentences per second of KD's training, without scoring, and the peak memory."""
    rows = []
    for depth in STUDENTS:
        memory = LINES[f"speed-{LAYERS[depth]}"]["peak_memory_MB"] / 1000
        rows.append([DEPTHS[depth], f"{trained_per_second(depth):.0f}", memory])
    return markdown(["layers", "sentences/s", "peak memory, GB"], rows)


def parts(*compared):
    """Scores with and without something, three seeds each."""
    rows = []
    for part, name, without in compared:
        averages = [scores(name, "avg"), scores(without, "avg")]
        rows.append([part, *averages, scores(name, "dev"), scores(without, "dev")])
    header = ["part", "avg with it", "without", "STS-B dev with it", "without"]
    return markdown(header, rows)


def pairs(task):
    """Cross-encoders, and students with and without their logits."""
    *before, (_, teacher), (_, student) = RUNS[f"DSE-{task}"].items()
    rows = dict(before) | {"weak teacher": teacher, "weak teacher's student": student}
    rows["labels alone"] = final(f"DSE-{task}-labels")
    rows["strong teacher"] = RUNS[f"DSE-M-{task}"]["teacher"]
    rows["strong teacher's student"] = final(f"DSE-M-{task}")
    return plain_table(rows)


def language():
    """The English teacher, and its student before and after training on translations."""
    (before,) = RUNS["en-de-before"].values()
    teacher, student = RUNS["en-de-test"].values()
    rows = [["teacher", *teacher.values()], ["student before", *before.values()]]
    rows.append(["student", *student.values()])
    return markdown(["model", "English to German", "German to English"], rows)


def transfer():
    """Accuracies, and their mean; F1 is left out."""
    tasks = ("MR", "CR", "SUBJ", "MPQA", "TREC", "MRPC")
    rows = []
    for name, row in zip(("teacher", "KD", "CKD", "ConGen", "IBKD"), RUNS["transfer"].values()):
        accuracies = [row[task] for task in tasks]
        rows.append([name, *accuracies, mean(accuracies)])
    return markdown(["model", *tasks, "mean"], rows)


def cut_scores(runs):
    """{layers: STS-B dev before and after training}"""
    found = {}
    for run in runs.split():
        *_, layers = re.findall(r"--student-layers (\S+)", LINES[run]["command"])
        found[layers] = (RUNS[run]["student before"]["dev"], final(run)["dev"])
    return found


def layer_order():
    """STS-B dev before and after training, and the ranks, for cuts of three models."""
    rows = []
    for model, runs in CUTS.items():
        found = cut_scores(runs)
        orders = [sorted(found, key=lambda cut, i=i: -found[cut][i]) for i in (0, 1)]
        for layers in orders[0]:
            ranks = [str(1 + order.index(layers)) for order in orders]
            rows.append([f"{model}: {layers}", *found[layers], *ranks])
    header = ["model, how many: which", "dev, untrained", "trained", "rank, untrained", "trained"]
    return markdown(header, rows)


def layer_prediction():
    """How well the order before training predicts the one after."""
    rows = []
    for model, runs in CUTS.items():
        in_order = sorted(cut_scores(runs).values(), reverse=True)  # the best untrained first
        before, after = zip(*in_order)
        with_first = float(spearmanr(before, after).statistic)
        others = float(spearmanr(before[1:], after[1:]).statistic)
        count = str(len(in_order))
        rows.append([model, count, after[0], max(after), min(after), with_first, others])
    header = ["model, how many", "cuts", "first untrained", "best", "worst"]
    return markdown([*header, "rank correlation", "without the first"], rows)


SEARCHES = dict(scifact="nDCG@10", qnli="MRR@10", xquad="MRR@10")
SEARCH_HEADER = [f"{name} {key}" for name, key in zip(SEARCH_NAMES, SEARCHES.values())]


def found_in(tables, model, key):
    """A score of each seed of a model: in the rows runs/MODEL, runs/MODEL-1, ... of these runs."""
    pattern = re.compile(rf"runs/{model}(-\d)?")
    rows = [row for table in tables for row in RUNS.get(table, {}).items()]
    return [row[key] for name, row in rows if pattern.fullmatch(name)]


def search_scores(tables, model):
    """A model's scores on each data set, by seed; {} in the names of the tables is the data set."""
    return [
        found_in([name.format(task) for name in tables], model, key)
        for task, key in SEARCHES.items()
    ]


def teacher_searches():
    return [RUNS[f"text-{task}"][MINILM][key] for task, key in SEARCHES.items()]


def own_text():
    """SciFact, QNLI, XQuAD-R and STS-B dev by training text; QNLI and dev with three seeds."""
    scifact, qnli, xquad = teacher_searches()
    rows = [["(the teacher)", scifact, xquad, qnli, TEACHER["dev"]]]
    for title, run in OWN_TEXT.items():
        found = [
            (RUNS[f"text-{task}"] | RUNS[f"text-{task}-more"])[f"runs/{run}"][SEARCHES[task]]
            for task in ("scifact", "xquad")
        ]
        found.append([RUNS[f"text-qnli-{i}"][f"runs/{run}-{i}"]["MRR@10"] for i in SEEDS])
        found.append([final(f"{run}-{i}")["dev"] for i in SEEDS])
        rows.append([title, *found])
    names = [SEARCH_HEADER[i] for i in (0, 2, 1)]
    return markdown(["20,000 texts", *names, "STS-B dev"], rows)


def mix():
    """Students of three corpora in 4 bits."""
    size = f"{file_numbers('six')[0]['MB']:.0f}"
    rows = [["six (the teacher)", "", size, *teacher_searches(), TEACHER["avg"]]]
    tables = [f"mix-large-{{}}-4-bits-{seed}" for seed in SEEDS]
    for name, title in MIX.items():
        folder = "mix-three-0" if name == "three" else f"mix-{name}"
        file = RUNS[f"mix-{name}-4-bits"]["4 bits"]
        size = f"{file['MB']:.1f}"  # of all three: their shapes are the same
        average = mean(file[key] for key in COLUMNS[2:])
        found = search_scores(["mix-{}-4-bits"], folder)
        rows.append([title, "50,000, one epoch", size, *found, average])
        found = search_scores(tables, f"mix-{name}-large")
        averages = found_in([table.format("sts") for table in tables], f"mix-{name}-large", "avg")
        rows.append([title, "125,000, three epochs", size, *found, averages])
        if name == "two":
            found = search_scores(["mix-two-last-{}-4-bits-1"], "mix-two-last")
            last = RUNS["mix-two-last-4-bits-1"]["4 bits"]
            average = mean(last[key] for key in COLUMNS[2:])
            rows.append([title, "the same, the last step", size, *found, average])
    return markdown(["layers", "texts", "MB", *SEARCH_HEADER, "STS average"], rows)


def agreement():
    """Does agreement with the teacher predict scores? Rank correlations over the students."""
    tables = ("text-{}", "text-{}-more", "mix-{}")
    rows = []
    for text, title in AGREEMENT.items():
        students = RUNS[f"agreement-{text}"]
        known = {model: final(model.removeprefix("runs/"))["dev"] for model in students}
        columns = [list(known.values())]
        for task, key in SEARCHES.items():
            table = {}
            for name in tables:
                table |= RUNS[name.format(task)]
            columns.append([table[model][key] for model in students])
        for measure in ("Spearman", "ten nearest"):
            values = [row[measure] for row in students.values()]
            found = [float(spearmanr(values, column).statistic) for column in columns]
            rows.append([f"{title}: {measure}", *found])
    return markdown(["texts: agreement", "STS-B dev", *SEARCH_NAMES], rows)


def index():
    """Queries by the teacher and by a student, passages by the teacher, in smaller indexes."""
    tables = [RUNS["index-scifact"], RUNS["index-qnli"]]
    rows = []
    for basis, size, form in product(("first", "components"), (384, 256, 128), INDEX_FORMATS):
        if (basis, size) == ("components", 384) and form != "sign":
            continue  # a rotation, which changes nothing
        row = [f"{size} {basis}", form]
        keys = [f"{name}: {basis} {size} {form}" for name in INDEX]
        row.append(f"{tables[0][keys[0]]['bytes']:.0f}")
        for table, metric in zip(tables, ("nDCG@10", "MRR@10")):
            row += [table[key][metric] for key in keys]
        rows.append(row)
    names = ["SciFact: teacher", "student", "QNLI: teacher", "student"]
    return markdown(["dimensions", "format", "bytes", *names], rows)


def two_languages(model):
    """STS-B test, XQuAD-R's MRR@10: German and English -> four scores of the whole model."""
    found = [*RUNS["e5-sts-de"][model].values(), *RUNS["e5-sts-en"][model].values()]
    return found + [RUNS[f"e5-xquad-{language}"][model]["MRR@10"] for language in ("de", "en")]


def two_languages_by_seed(model, form=""):
    """The same of a student of 300,000 sentences, with a list of seeds for each."""
    found = []
    for task in ("sts-de", "sts-en", "xquad-de", "xquad-en"):
        file = f"data/german/stsb-{task[-2:]}-test.tsv"
        key = "MRR@10" if "xquad" in task else file
        found.append(found_in([f"e5-300k-{task}{form}-{seed}" for seed in SEEDS], model, key))
    return found


def cut_in_4_bits():
    """The row of the model with 20,000 tokens in 4 bits, not trained."""
    file = RUNS["e5-20k-4-bits"]["4 bits"]
    english, *_ = RUNS["e5-20k-sts-en-4-bits"]["runs/e5-20k"].values()
    search = [
        RUNS[f"e5-20k-xquad-{language}-4-bits"]["runs/e5-20k"]["MRR@10"]
        for language in ("de", "en")
    ]
    news = RUNS["e5-20k-news-4-bits"]["runs/e5-20k"].values()
    return ["12, 20,000", "4 bits", f"{file['MB']:.1f}", file["Spearman"], english, *search, *news]


def multilingual():
    """multilingual-e5-small, cut to two languages, and its students as they ship."""
    rows = []
    for title, model in {"12, all": E5, "12, 20,000": "runs/e5-20k"}.items():
        size = RUNS["e5-20k"][E5_ROWS[model]]["MB, fp32"]
        news = [*RUNS["e5-news"][model].values()]
        rows.append([title, "fp32", f"{size:.0f}", *two_languages(model), *news])
    rows.append(cut_in_4_bits())
    for depth, title in E5_STUDENTS.items():
        file = RUNS[f"e5-{depth}-300k-4-bits-0"]["4 bits"]
        model = f"e5-{depth}-300k-query"
        for form, suffix in (("fp32", ""), ("4 bits", "-4-bits")):
            size = f"{file['MB']:.1f}" if suffix else f"{4 * file['M parameters']:.0f}"
            tables = [f"e5-300k-news{suffix}-{seed}" for seed in SEEDS]
            news = [found_in(tables, model, way) for way in ("1 -> 2", "2 -> 1")]
            found = two_languages_by_seed(model, suffix)
            rows.append([f"{title}, 20,000", form, size, *found, *news])
    header = ["layers, tokens", "format", "MB", *TWO_LANGUAGES, "news: en to de", "de to en"]
    return markdown(header, rows)


def two_languages_sizes():
    """README's table of a multilingual model: as it is, and its students in 4 bits."""
    size = f"{RUNS['e5-20k']['before']['MB, fp32']:.0f}"
    rows = [["12, 250,037 tokens (the model)", size, *two_languages(E5)]]
    for depth in E5_STUDENTS:
        size = f"{RUNS[f'e5-{depth}-300k-4-bits-0']['4 bits']['MB']:.1f}"
        found = two_languages_by_seed(f"e5-{depth}-300k-query", "-4-bits")
        rows.append([f"{depth}, 20,000 tokens, 4 bits", size, *found])
    return markdown(["layers", "MB", *TWO_LANGUAGES], rows)


def two_languages_of_losses(run):
    """The same of a student of the table of losses."""
    sts = [
        found_in([f"e5-losses-sts-{language}"], run, f"runs/prompted-test-{language}.tsv")
        for language in ("de", "en")
    ]
    return sts + [
        found_in([f"e5-losses-xquad-{language}"], run, "MRR@10") for language in ("de", "en")
    ]


def objectives():
    """Three layers of multilingual-e5-small by loss, temperature and learning rate."""
    rows = []
    for loss, runs in OBJECTIVES.items():
        for run in runs.split():
            tested = [values or "" for values in two_languages_of_losses(run)]
            setting = run.removeprefix(f"e5-{loss}-").replace("-", ", ", 1)
            if loss == "KD":
                setting = run.removeprefix("e5-KD-")
            rows.append([f"{loss}, {setting}", scores(run, "dev"), *tested])
    return markdown(["loss, temperature, rate", "dev", *TWO_LANGUAGES], rows)


def more_sentences():
    """Three layers of multilingual-e5-small by number of sentences, in fp32."""
    rows = []
    for title, run in MORE.items():
        tested = two_languages_of_losses(run)
        if run == "e5-three-300k":
            tested = two_languages_by_seed("e5-three-300k-query")
        rows.append([title, scores(run, "dev"), *tested])
    return markdown(["sentences", "dev", *TWO_LANGUAGES], rows)


def all_tables():
    """{name in a marker: table}"""
    own = {name: name for name in OWN.split()}
    far = {name.replace("-aligned", " aligned"): f"M-{name}" for name in FAR.split()}
    layers = {DEPTHS[depth]: run for depth, run in STUDENTS.items()}
    teacher = {"teacher": TEACHER}
    before = {"student before": RUNS["KD-0"]["student before"]}
    aligned = RUNS["M-KD-aligned-0"]
    larger = {"teacher": RUNS["M-KD-0"]["teacher"], "aligned teacher": aligned["teacher"]}
    larger["student before"] = aligned["student before"]
    *before_1, (_, after_1) = RUNS["search-stage-1"].items()
    after = {"stage 1": after_1, "stages 1 and 2": final("search-stage-2")}
    of_ibkd = ("IBKD: HSIC", "IBKD", "IBKD-no-HSIC")
    of_kd = ("KD: dropout of 0.1", "KD-dropout", "KD")
    return {
        "own-teacher": student_table("model", teacher | before, own),
        "no-teacher": student_table("model", before, {"DistilFACE": "DistilFACE"}),
        "larger-teacher": student_table("model", larger, far),
        "how-small": student_table("layers", {DEPTHS["six"]: TEACHER}, layers),
        "three-layers": student_table("student", teacher, THREE_LAYERS, "dev"),
        "curve": curve(),
        "megabytes": megabytes(),
        "sizes": sizes(),
        "int8": int8(),
        "speed": plain_table(RUNS["speed-orders"], "order, batch, precision"),
        "bf16": parts(("bf16, two layers", "bf16-two-layers", "layers-0-5-50k")),
        "training-speed": training_speed(),
        "parts": parts(of_ibkd, of_kd),
        "search": plain_table(dict(before_1) | after),
        "language": language(),
        "transfer": transfer(),
        "layers": layer_order(),
        "prediction": layer_prediction(),
        "multilingual": multilingual(),
        "two-languages": two_languages_sizes(),
        "objectives": objectives(),
        "more-sentences": more_sentences(),
        "own-text": own_text(),
        "mix": mix(),
        "agreement": agreement(),
        "index": index(),
        "pairs-stsb": pairs("stsb"),
        "pairs-mrpc": pairs("mrpc"),
    }


def with_tables(text, tables):
    """A page, with the tables that its markers name."""
    marked = re.compile(r"(<!-- table: (\S+) -->).*?(<!-- end -->)", re.S)
    return marked.sub(lambda match: f"{match[1]}\n\n{tables[match[2]]}\n\n{match[3]}", text)


def with_deviations(found):
    """Lists of scores by seed -> their means, and their standard deviations (0 for one seed)."""
    deviations = [stdev(values) if len(values) > 1 else 0 for values in found]
    return list(map(mean, found)), deviations


def line_plot(lines, label, ticks):
    """Scores against amounts. lines: (label, style, [(amount, scores by seed), ...])"""
    _, axes = plt.subplots(figsize=(7, 4.5))
    for text, style, points in lines:
        amounts, found = zip(*points)
        axes.errorbar(amounts, *with_deviations(found), fmt=style, label=text)
    axes.set(xscale="log", xlabel=label)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.margins(x=0.15)
    return axes


def save(axes, name, score, label):
    """Write figures/NAME.svg, with a horizontal line and the legend below the picture."""
    axes.axhline(score, ls="--", color="black", label=label)
    axes.set_ylabel("Spearman x 100, mean of 7 sets")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=2, frameon=False)
    axes.figure.tight_layout()
    axes.figure.savefig(HERE / "figures" / f"{name}.svg", metadata={"Date": None})


def draw_speed():
    """README's table: STS average against encoding speed, one sentence at a time."""
    averages = [[TEACHER["avg"]], *[scores(run, "avg") for run in STUDENTS.values()]]
    lines = []
    for key, mark in zip(SPEED_FORMATS, "os^"):
        speeds = [RUNS[f"int8-{LAYERS[depth]}"][key]["sentences/s"] for depth in DEPTHS]
        lines.append((key, mark + "--", list(zip(speeds, averages))))
    axes = line_plot(lines, "sentences per second, one at a time", (100, 200, 500, 1000, 2000))
    for depth, speed, values in zip(DEPTHS, speeds, averages):
        axes.annotate(f"  {depth}", (speed, mean(values)), va="top")
    save(axes, "speed", TEACHER["avg"], "the teacher")


def draw_alignment():
    """KD and CKD of a larger teacher, as it is and aligned; bars begin at 0."""
    methods = ("KD", "KD-aligned", "CKD", "CKD-aligned")
    means, deviations = with_deviations([scores(f"M-{name}", "avg") for name in methods])
    _, axes = plt.subplots(figsize=(6, 3.6))
    bars = axes.bar(methods, means, yerr=deviations)
    axes.bar_label(bars, fmt="%.2f", label_type="center", color="white")
    save(axes, "alignment", RUNS["M-KD-0"]["teacher"]["avg"], "teacher")


def draw_sentences():
    """The score of a three-layer student against the number of sentences."""
    points = [(amount, scores(run, "avg")) for amount, run in AMOUNTS.items()]
    axes = line_plot([("three layers (1,3,5)", "o-", points)], "training sentences", list(AMOUNTS))
    save(axes, "sentences", TEACHER["avg"], "teacher, six layers")


def draw_curve():
    """STS average of the students of larger-teacher.md against the number of sentences."""
    lines = []
    for (title, runs), mark in zip(CURVE.items(), "os^v"):
        found = [scores(run, "avg") for run in runs.split()]
        points = [(amount, row) for amount, row in zip(CURVE_AMOUNTS, found) if row]
        lines.append((title, mark + "-", points))
    axes = line_plot(lines, "training sentences", CURVE_AMOUNTS)
    larger = RUNS["M-KD-aligned-0"]["teacher"]["avg"]
    save(axes, "curve", larger, "the larger teacher, aligned")


def draw_megabytes():
    """STS average of the files of how-many-megabytes.md against their megabytes."""
    lines = []
    for number, (tokens, names) in enumerate(FILES.items()):
        fp32_points, four_points = [], []
        for name in names.replace("six ", "").split():
            fp32, _, four = file_numbers(name)
            fp32_points.append((fp32["MB"], [fp32["avg"]]))
            four_points.append((four["MB"], [four["avg"]]))
        style = f"C{number}{'os^D*'[number]}"
        label = f"{tokens} tokens".replace(" * tokens", " tokens, 182,049 sentences")
        lines.append((label, style + "-", fp32_points))
        lines.append((None, style + "--", four_points))
    axes = line_plot(lines, "megabytes (dashed: in 4 bits)", (4, 6, 8, 10, 20, 40, 70))
    for depth in STUDENTS:
        fp32, _, four = file_numbers(depth)
        axes.annotate(f"  {depth}", (fp32["MB"], fp32["avg"]))
        axes.annotate(f"  {depth}", (four["MB"], four["avg"]))
    save(axes, "megabytes", TEACHER["avg"], "the teacher, 90 MB")


def main():
    tables = all_tables()
    for page in (HERE.parent / "README.md", *HERE.glob("*.md")):
        page.write_text(with_tables(page.read_text("utf-8"), tables), "utf-8")
    for draw in (draw_speed, draw_alignment, draw_sentences, draw_curve, draw_megabytes):
        draw()


if __name__ == "__main__":
    main()
