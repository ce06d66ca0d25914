"""The pages of results/: commands and data belong together, and numbers in prose are the data's."""

import ast
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from statistics import mean, stdev

import pytest
import torch
from conftest import DEMO, ROOT

sys.path.insert(0, str(ROOT / "results"))
import scores

import eval_sts
import make
import runs
from extras import eval_retrieval

PAGES = {path.name: path.read_text("utf-8") for path in ROOT.glob("results/*.md")}
README = (ROOT / "README.md").read_text("utf-8")
RENAMED = {"--max-steps": "--steps", "--glue": "--data"}
# Defaults of older commits; STS-B dev, which --senteval had.
LATER = {"--group-by-length": "", "--queue-size": "", "--lr": "", "--dev": "$STSB_DEV"}
# Of ibkd.py; of students of labels alone; test sets, which a run no longer sees.
GONE = {"--task": "dr", "--teacher": "/teacher", "--senteval": "/senteval", "--skip-test": ""}


def test_each_command_has_its_line_and_each_line_its_command():
    """Recorded lines of training have test scores, which now have commands of their own."""
    commands = {run for _, run, *_ in runs.all_runs()}
    assert set(make.LINES) <= commands
    assert all(run.startswith("tests-") for run in commands - set(make.LINES))


def options(command):
    """{option: its words}; a later one wins."""
    found = {}
    for word in shlex.split(command):
        if word.startswith("--"):
            words = found[RENAMED.get(word, word)] = []
        elif found:
            words.append(word)
    return found


def test_a_training_command_has_the_options_of_its_line():
    compared = 0
    for _, run, _, command in runs.all_runs():
        if "--seed" not in command:
            continue
        now, then = options(command), options(make.LINES[run]["command"])
        for name in {*now, *then}:
            if now.get(name) != then.get(name):
                added = name not in then and " ".join(now[name]).endswith(LATER[name])
                gone = name not in now and " ".join(then[name]).endswith(GONE[name])
                assert added or gone, (run, name)
        compared += 1
    assert compared > 150


def test_a_command_has_options_that_its_script_has(parse, tmp_path):
    for _, run, _, command in runs.all_runs():
        words = runs.expand(command, tmp_path)[1:]
        if words[0].startswith("results/") and words[0] != "results/scores.py":
            continue
        words[0] = words[0].removeprefix("results/")
        name = words.pop(0).removesuffix(".py")
        script = importlib.import_module(words.pop(0) if name == "-m" else name)
        args = parse(script, *words)
        if "--seed" in words:
            assert args.output == f"runs/{run}"  # where runs.py looks for scores and speed


def spread(runs_of, key="dev"):
    return stdev(make.final(run)[key] for run in runs_of)


def below_best(pattern, layers):
    found = make.cut_scores(pattern)
    return max(after for _, after in found.values()) - found[layers][1]


def scan_loss(pattern):
    """How far the cut that is the best untrained ends below the best."""
    return below_best(pattern, next(iter(make.cut_scores(pattern))))


def average(name, key="avg"):
    return mean(make.scores(name, key))


def listed(value):
    return value if isinstance(value, list) else [value] if isinstance(value, float) else []


def kept(form, column):
    """Per cent of the uncut model's score that three layers of E5 keep, or six."""
    header, rows = make.multilingual()
    place = header.index(column)
    of = {(row[0], row[1]): mean(listed(row[place])) for row in rows}
    students = [f"{make.E5_STUDENTS[depth]}, 20,000" for depth in ("three", "six")]
    return [100 * of[student, form] / of["12, all", "fp32"] for student in students]


def from_teacher(key):
    """How far three, two and one layers are from their teacher, in fp32."""
    (teacher,) = make.sized("six", "fp32", key)
    return [mean(make.sized(depth, "fp32", key)) - teacher for depth in make.DEPTHS]


def by_index(task="QNLI"):
    """What the teacher's index adds to the students' own, by depth."""
    keys = (f"{task}, teacher's index", task)
    pairs = [[make.sized(depth, "fp32", key) for key in keys] for depth in make.DEPTHS]
    return [mean(theirs) - mean(own) for theirs, own in pairs]


def made_by_files(form):
    """What a file's format costs on STS-B test, by depth."""
    files = [make.RUNS[f"files-{depth}"] for depth in make.ALL_DEPTHS]
    return [file["fp32, torch"]["Spearman"] - file[form]["Spearman"] for file in files]


def four_bits_on_search(depth, task="QNLI"):
    fp32, four = [make.sized(depth, form, task) for form in ("fp32", "4 bits")]
    return [a - b for a, b in zip(fp32, four, strict=True)]


INDEX, QNLI_INDEX = "SciFact, teacher's index", "QNLI, teacher's index"


def searched(run, key="SciFact"):
    return mean(make.scored([f"score-{run}"], "fp32", key))


def four_bits_cost(key):
    """Of the student of three epochs, the last step."""
    return searched("own3-last", key) - mean(make.scored(["score-own3-q4"], "4 bits", key))


def steps(last, dev):
    """By seed, how far dev's step is below the last one on SciFact."""
    found = [make.scored([f"score-{run}"], "fp32", "SciFact") for run in (last, dev)]
    return [a - b for a, b in zip(*found, strict=True)]


SQUARED = ("PKD", "MetaKD", "L2", "Dual-L2", "SKD")
OWN_50K = "layers-1-4-5-50k"
MPNET, E5 = [make.CUTS[model, "three"] for model in ("all-mpnet-base-v2", "multilingual-e5-small")]


def claims():
    """{page: {number in prose: what it is}}; a number is compared as it is written."""
    gain = average("three-own-KD-182k") - average(OWN_50K)
    dev_loss = average(OWN_50K, "dev") - average("three-own-KD-182k", "dev")
    passed = average(OWN_50K) - make.TEACHER["avg"]
    kd = average("KD", "dev")
    (teacher,) = make.sized("six", "fp32", "SciFact")
    speed = make.RUNS["speed-orders"]
    bf16 = [
        speed[f"{key}, bf16"]["ours"] / speed[f"{key}, fp32"]["ours"]
        for key in ("random, 64", "random, 512", "grouped, 64")
    ]
    hsic = [
        abs(make.final(f"IBKD-{i}")[key] - make.final(f"IBKD-no-HSIC-{i}")[key])
        for i in make.SEEDS
        for key in ("avg", "dev", *make.SETS)
    ]
    by_seed = [
        abs(make.final(f"bf16-two-layers-{i}")[key] - make.final(f"layers-0-5-50k-{i}")[key])
        for i in make.SEEDS
        for key in ("avg", "dev")
    ]
    query = make.RUNS["e5-xquad-de-query"][make.E5]["MRR@10"]
    losses = {row[0]: row[1] for row in make.losses()[1]}
    return {
        "layers.md": [
            ("0.08", spread(f"n20k-three-{i}" for i in make.SEEDS)),
            ("0.21", max(scan_loss(pattern) for pattern in make.CUTS.values())),
            ("2.0", below_best(MPNET, make.EVERY_FOURTH)),
            ("2.7", below_best(E5, make.EVERY_FOURTH)),
            ("0.2", gain),
            ("0.1", dev_loss),
            ("0.8", average("KD-two-layers") - average("layers-0-5-50k")),
            ("1.2", average("KD-one-layer") - average("layer-5-50k")),
            ("0.4", passed),
            ("78.87", make.TEACHER["avg"]),
            ("86.72", make.TEACHER["dev"]),
        ],
        "size.md": [
            ("0.4", from_teacher("avg")[0]),
            ("3.5", -from_teacher("avg")[2]),
            ("1.8", -from_teacher("QNLI")[0]),
            ("0.8", -by_index()[0]),
            ("0.1", max(made_by_files("int8"))),
            ("6.3", -from_teacher("SciFact")[0]),
            ("2.2", by_index("SciFact")[0]),
            ("6.6", by_index("SciFact")[2]),
            ("3.0", mean(four_bits_on_search("three", "SciFact"))),
            ("1.4", mean(four_bits_on_search("two", "SciFact"))),
            ("1.0", mean(four_bits_on_search("two"))),
            ("0.5", mean(four_bits_on_search("one"))),
            ("0.5", max(loss for d in make.ALL_DEPTHS for loss in four_bits_on_search(d, "STS-B"))),
            ("0.4", -four_bits_on_search("six", "SciFact")[0]),
            ("2.2", four_bits_on_search("six")[0]),
            *[
                ("0.3", a - b)
                for depth in make.ALL_DEPTHS
                for a, b in zip(*[make.sized(depth, "fp32", key) for key in make.AVERAGED])
            ],
        ],
        "own-teacher.md": [
            ("0.1", max(abs(average(n, "dev") - kd) for n in SQUARED)),
            ("0.08", spread(f"n20k-three-{i}" for i in make.SEEDS)),
            ("0.1", kd - average("ConGen", "dev")),
            ("0.3", kd - average("CKD", "dev")),
            ("0.4", kd - average("IBKD", "dev")),
        ],
        "larger-teacher.md": [
            ("78.44", make.final("three-M-KD-3x182k")["avg"]),
            ("0.2", average("M-KD-aligned") - average("M-CKD-aligned")),
            ("75.90", average("DistilFACE")),
        ],
        "search.md": [
            ("1.0", teacher - searched("own-last")),
            ("9.1", teacher - searched("n20k-three")),
            ("1.6", make.sized("six", "fp32", "QNLI")[0] - searched("own-last", "QNLI")),
            ("2.5", searched("n20k-three", INDEX) - searched("n20k-three")),
            ("0.7", searched("own3-last", "QNLI") - searched("own3-last", QNLI_INDEX)),
            ("1.0", searched("own-last", "QNLI") - searched("own-last", QNLI_INDEX)),
            ("2.6", max(steps("own-last", "own-dev"))),
            ("0.4", mean(steps("own3-last", "own3-dev"))),
            ("0.5", -min(steps("own-last", "own-dev"))),
            ("1.3", searched("own3-last", INDEX) - searched("own-last", INDEX)),
            ("0.6", searched("own-last") - searched("own-last", INDEX)),
            ("1.6", four_bits_cost("SciFact")),
            ("0.7", four_bits_cost(QNLI_INDEX)),
            ("0.5", teacher - mean(make.scored(["score-own3-q4"], "4 bits", INDEX))),
            ("9.8", make.sized("three", "4 bits", "MB")[0]),
        ],
        "multilingual.md": [
            ("99.64", make.RUNS["e5-20k"]["after"]["% of tokens kept"]),
            ("94", kept("4 bits", "STS-B: German")[0]),
            ("96", kept("4 bits", "XQuAD-R: German")[0]),
            ("4.6", make.RUNS["e5-xquad-de"][make.E5]["MRR@10"] - query),
            ("0.4", mean(losses["CKD, 0.05, 8e-4"]) - losses["KD, 16e-4"][0]),
        ],
        "speed.md": [
            ("1.5", speed["random, 64, fp32"]["ratio"]),
            ("3.4", speed["random, 512, fp32"]["ratio"]),
            ("1.1", speed["grouped, 64, fp32"]["ratio"]),
            ("1.4", min(bf16)),
            ("1.7", max(bf16)),
            ("0.009", max(by_seed)),
            ("2.25", speed["random, 64, fp32"]["by padding"]),
        ],
        "small-questions.md": [
            ("0.3", kd - average("KD-dropout", "dev")),
            ("0.006", max(hsic)),
            ("83.60", make.final("en-de")["dev"]),
        ],
        "README.md": [
            ("3.5", -from_teacher("avg")[2]),
            ("9.8", make.sized("three", "4 bits", "MB")[0]),
            ("12.9", make.sized("six", "4 bits", "MB")[0]),
            ("1.0", make.sized("six", "fp32", "SciFact")[0] - searched("own-last")),
            ("1.6", make.sized("six", "fp32", "QNLI")[0] - searched("own-last", "QNLI")),
            ("7.5", make.RUNS["e5-three-300k-4-bits-0"]["4 bits"]["MB"]),
            ("94", min(kept("4 bits", column)[0] for column in make.LANGUAGES)),
            ("0.3", kd - average("KD-dropout", "dev")),
            ("86.49", average("KD-now", "dev")),
            ("86.50", kd),
        ],
    }


# Settings, sizes of groups, versions, and what papers and packages state.
QUOTED = {
    "own-teacher.md": "0.2 0.1",
    "larger-teacher.md": "0.05 0.1 80.43 83.05",
    "search.md": "2.0",
    "multilingual.md": "0.98 0.99 0.7",
    "pairs.md": "4.6",
    "speed.md": "6.2",
    "small-questions.md": "0.1 0.2 0.6",
}
LOG = "log.md"  # its numbers are of the code of their day
DECIMAL = re.compile(r"(?<![\w.,])\d+\.\d+(?![\w.]*\d)")


def prose(text):
    """A page without code, tables, comments and the targets of links."""
    text = re.sub(r"```.*?```|<!--.*?-->", " ", text, flags=re.S)
    return re.sub(r"^\|.*$|\]\([^)]*\)|`[^`]*`", " ", text, flags=re.M)


@pytest.mark.parametrize("page", sorted({*PAGES} - {LOG}))
def test_a_number_in_prose_is_in_a_table_or_computed_from_the_data(page):
    text = PAGES[page]
    claimed = claims().get(page, [])
    for number, value in claimed:
        decimals = len(number.partition(".")[2])
        assert f"{value:.{decimals}f}" == number, (page, number, value)
        assert re.search(rf"(?<![\d.]){re.escape(number)}\b", prose(text) + answers(text)), number
    tables = re.findall(r"<!-- table: \S+ -->(.*?)<!-- end -->", text, re.S)
    known = set(re.findall(r"\d+\.\d+", "".join(tables))) | {number for number, _ in claimed}
    known |= set(QUOTED.get(page, "").split())
    assert set(DECIMAL.findall(prose(text) + answers(text))) <= known, page


def answers(text):
    """The answers of results/README.md, which are a table's cells."""
    return " ".join(re.findall(r"^\| \[.*\) \| (.*) \|$", text, re.M))


def test_pages_are_short():
    """Facts are counted: a page has few tables, of at most ten rows."""
    assert len(README.split()) <= 1340 and README.count("\n") <= 140
    for page, text in PAGES.items():
        assert text.count("<!-- table:") <= (5 if page == "small-questions.md" else 2), page
        for table in re.findall(r"<!-- table: \S+ -->(.*?)<!-- end -->", text, re.S):
            assert table.count("\n|") - 2 <= 10, page
    for answer in re.findall(r"^\| \[.*\) \| (.*) \|$", PAGES["README.md"], re.M):
        assert len(answer.split()) <= 25 and len(re.findall(r"[\d.,]*\d", answer)) <= 2, answer


@pytest.mark.parametrize(
    "found, others, word",
    [
        ([2.0, 2.1, 2.2], [1.0, 1.1, 1.2], "ahead"),
        ([1.0, 1.1, 1.2], [2.0, 2.1, 2.2], "behind"),
        ([2.0, 2.1, 1.0], [1.0, 1.1, 1.2], "level"),  # one seed is behind
        ([1.1, 1.2, 9.0], [1.0, 1.1, 1.2], "level"),  # the mean, 2.7, is below twice its error
        ([1.1, 1.2, 1.3], [1.0], "ahead"),  # of a model
    ],
)
def test_the_words_for_differences(found, others, word):
    assert make.verdict(found, others) == word


def test_words_that_pages_use():
    """KD against the others, three seeds each."""
    words = {
        name: [
            make.verdict(make.scores("KD", key), make.scores(name, key)) for key in ("avg", "dev")
        ]
        for name in ("ConGen", "IBKD", "CKD")
    }
    assert words == dict(ConGen=["level", "ahead"], IBKD=["level", "ahead"], CKD=["ahead", "ahead"])
    aligned = [make.scores(f"M-{name}-aligned", "avg") for name in ("KD", "CKD")]
    assert make.verdict(*aligned) == "ahead"
    assert make.verdict(make.scores("layers-1-4-5-50k", "avg"), [make.TEACHER["avg"]]) == "ahead"


def test_words_of_the_size_page():
    """Three layers: ahead on average, on some sets; behind on two, and on search."""

    def words(key, other=None):
        teacher = make.sized("six", "fp32", other or key)
        return [make.verdict(make.sized(depth, "fp32", key), teacher) for depth in make.DEPTHS]

    for key in make.AVERAGED:
        assert words(key) == ["ahead", "behind", "behind"]
    by_set = {key: words(key)[0] for key in make.SETS}
    assert {key for key in by_set if by_set[key] == "ahead"} == {"STS12", "STS14", "STS16"}
    assert {key for key in by_set if by_set[key] == "behind"} == {"STS-B", "SICK-R"}
    found = {}
    for task in ("SciFact", "QNLI"):
        assert words(task) == ["behind"] * 3
        for name, other in (("index", f"{task}, teacher's index"), ("4 bits", task)):
            forms = ("fp32", "4 bits" if name == "4 bits" else "fp32")
            pairs = [
                (make.sized(depth, forms[1], other), make.sized(depth, forms[0], task))
                for depth in make.DEPTHS
            ]
            found[task, name] = [make.verdict(*pair) for pair in pairs]
    assert found["SciFact", "index"] == ["ahead"] * 3
    assert found["QNLI", "index"] == ["behind", "ahead", "ahead"]
    assert found["SciFact", "4 bits"] == ["behind", "behind", "level"]
    assert found["QNLI", "4 bits"] == ["level", "behind", "behind"]
    in_4_bits = [make.sized(depth, "4 bits", "QNLI") for depth in ("three", "six")]
    assert make.verdict(*in_4_bits) == "level"


NEW = ("size", "search")  # pages whose lines are of the new set


def new_lines():
    return [make.LINES[run] for page, run, *_ in runs.all_runs() if page in NEW]


def test_words_of_the_search_page():
    """Own texts against general ones, by either index; dev's step against the last; epochs."""

    def words(run, other, key):
        return make.verdict(*[make.scored([f"score-{name}"], "fp32", key) for name in (run, other)])

    epochs = dict(SciFact="ahead", QNLI="level")
    general = make.sized("three", "fp32", "QNLI")
    assert make.verdict(make.scored(["score-own-last"], "fp32", "QNLI"), general) == "level"
    for key in ("SciFact", "QNLI"):
        assert words("own-last", "n20k-three", key) == "ahead"
        assert words("own3-last", "n20k-three", key) == "ahead"
        assert words("own3-last", "own-last", key) == "level"
        assert words("own3-last", "own-last", f"{key}, teacher's index") == epochs[key]
        assert words("own-dev", "own-last", key) == "level"
    assert words("own3-dev", "own3-last", "SciFact") == "behind"
    assert words("own3-dev", "own3-last", "QNLI") == "level"
    by_index = {
        run: [
            make.verdict(*[make.scored([f"score-{run}"], "fp32", key) for key in both])
            for both in ((INDEX, "SciFact"), (QNLI_INDEX, "QNLI"))
        ]
        for run in ("n20k-three", "own-last", "own3-last")
    }
    assert by_index == {
        "n20k-three": ["ahead", "level"],
        "own-last": ["behind", "behind"],
        "own3-last": ["level", "behind"],
    }
    in_4_bits = {"SciFact": "behind", INDEX: "level", "QNLI": "level", QNLI_INDEX: "behind"}
    for key, word in in_4_bits.items():
        four = make.scored(["score-own3-q4"], "4 bits", key)
        assert make.verdict(four, make.scored(["score-own3-last"], "fp32", key)) == word
    teacher = make.sized("six", "fp32", "SciFact")
    assert make.verdict(make.scored(["score-own-last"], "fp32", "SciFact"), teacher) == "behind"
    chosen = [
        re.search(r"step (\d+) of", list(make.RUNS[f"{run}-dev-{seed}"])[-1])[1]
        for run in ("own", "own3")
        for seed in make.SEEDS
    ]
    assert chosen == ["333", "168", "252", "501", "835", "668"]


def test_the_lines_of_the_new_set_are_of_one_commit_and_one_machine():
    lines = new_lines()
    assert len({line["commit"] for line in lines}) == 1
    assert len({re.sub(r"\d threads", "", line["machine"]) for line in lines}) == 1
    assert all(line["seconds"] > 0 for line in lines)
    for page in NEW:
        spent = [make.LINES[run]["seconds"] for name, run, *_ in runs.all_runs() if name == page]
        said = f"took {sum(spent) / 60:.0f} minutes"
        assert said in " ".join(PAGES[f"{page}.md"].split()), said


def program(source):
    """What a file does, apart from comments, f-strings, and texts of several words."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name, value in ast.iter_fields(node):
            values = value if isinstance(value, list) else [value]
            texts = [
                isinstance(part, ast.JoinedStr)
                or (isinstance(part, ast.Constant) and " " in str(part.value))
                for part in values
            ]
            kept = [ast.Constant("") if text else part for part, text in zip(values, texts)]
            setattr(node, name, kept if isinstance(value, list) else kept[0])
    return ast.dump(tree)


def test_the_code_of_the_new_set_is_this_code_apart_from_comments_and_messages():
    (commit,) = {line["commit"] for line in new_lines()}
    git = ["git", "-C", str(ROOT)]
    tree = [*git, "ls-tree", "-r", "--name-only", commit]
    found = subprocess.run(tree, capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"this clone has no commit {commit}")
    code = re.compile(r"\w+\.py|extras/.*\.py|results/(scores|unseen)\.py")
    names = list(filter(code.fullmatch, found.stdout.split()))
    assert "ckd.py" in names and "results/scores.py" in names and "extras/sweep.py" in names
    for name in names:
        then = subprocess.check_output([*git, "show", f"{commit}:{name}"], text=True)
        assert program(then) == program((ROOT / name).read_text("utf-8")), name


def test_the_overlaps_that_the_index_states(shared_data):
    """Pairs of STS-B dev among the tests' pairs, general sentences among theirs, what is left."""
    sts = scores.read_sts(shared_data / "senteval")
    dev = scores.read_sts(shared_data / "senteval", "dev")["dev"]
    pairs, sentences = {}, {}
    for name, rows in sts.items():
        texts = [[scores.plain(text) for text in row[:2]] for row in rows]
        pairs[name] = {frozenset(both) for both in texts}
        sentences[name] = {text for both in texts for text in both}
    of_dev = [frozenset(map(scores.plain, row[:2])) for row in dev]
    years = set().union(*[pairs[name] for name in sts if name.startswith("STS1")])
    general = (shared_data / "unlabeled.txt").read_text("utf-8").splitlines()
    general = [scores.plain(line) for line in general]
    anywhere = set().union(*sentences.values())
    found = [sum(pair in years for pair in of_dev), len(dev), len(general)]
    found += [sum(line in anywhere for line in lines) for lines in (general, general[:50_000])]
    for name in ("STS15", "SICK-R", "STS-B", "STS12"):
        found.append(sum(line in sentences[name] for line in general))
    kept = scores.without_overlap(shared_data)
    gone = {name: len(sts[name]) - len(kept[name]) for name in sts}
    found += [sum(gone.values()), sum(map(len, sts.values()))]
    found += [gone[name] for name in ("STS15", "STS12", "SICK-R")]
    assert sum(pair in pairs["STS-B"] for pair in of_dev) == 3
    text = " ".join(PAGES["README.md"].split())
    for number in found:
        assert re.search(rf"(?<![\d,]){number:,}(?![\d,])", text), number


def test_scores_are_those_of_the_scripts(models_folder, senteval, tmp_path, call_main):
    """In fp32, by eval_sts.py and extras.eval_retrieval; its own index serves as the teacher's."""
    data = tmp_path / "data"
    (data / "retrieval").mkdir(parents=True)
    shutil.copytree(senteval, data / "senteval")
    shutil.copytree(DEMO / "beir", data / "retrieval" / "qnli")
    (data / "unlabeled.txt").write_text("nothing in common\n")
    (tmp_path / "runs").mkdir()
    model, file = models_folder / "mean", tmp_path / "scores.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(scores, "without_overlap", lambda data: scores.read_sts(senteval))
        words = ("--sets", "sts", "qnli", "--document-model", model, "--json", file)
        call_main(scores, model, "--data", data, *words)
    row = json.loads(file.read_text())["fp32"]
    call_main(eval_sts, model, "--senteval", senteval, "--json", file)
    theirs = json.loads(file.read_text())[str(model)]
    assert {key: row[key] for key in theirs} == pytest.approx(theirs, abs=1e-4)
    assert row["avg without overlap"] == row["avg"]
    call_main(eval_retrieval, model, "--beir", DEMO / "beir", "--json", file)
    search = json.loads(file.read_text())[str(model)]["MRR@10"]
    assert row["QNLI"] == pytest.approx(search) == pytest.approx(row["QNLI, teacher's index"])


def test_runs_wait_for_those_that_they_need_and_speed_is_measured_alone(tmp_path, monkeypatch):
    """A student and another run side by side; its score after it; then a benchmark, alone."""
    running, seen = set(), {}

    def execute(run, words):
        running.add(run)
        time.sleep(0.2)
        seen[run] = (set(running), set(seen), os.environ["OMP_NUM_THREADS"])
        running.discard(run)
        return dict(seconds=1)

    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setattr(runs, "DATA", tmp_path)
    monkeypatch.setattr(runs, "execute", execute)
    monkeypatch.setattr(runs.os, "cpu_count", lambda: 4)
    commands = {"student": "python ckd.py --output runs/student", "other": "python ckd.py"}
    commands |= {"score": "python eval_sts.py runs/student", "speed": "python -m extras.benchmark"}
    waiting = [("page", run, 0, command) for run, command in commands.items()]
    runs.run_all(waiting, 2, tmp_path, "abc")
    torch.set_num_threads(threads)
    assert seen["student"][0] == {"student", "other"} and seen["student"][2] == "2"
    assert "student" in seen["score"][1]
    assert seen["speed"] == ({"speed"}, {"student", "other", "score"}, "4")
    assert len((tmp_path / "page.jsonl").read_text().splitlines()) == 4
