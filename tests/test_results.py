"""The pages of results/: commands and data belong together, and numbers in prose are the data's."""

import json
import os
import re
import shlex
import shutil
import sys
import threading
from statistics import mean

import pytest
import torch
from conftest import DEMO, ROOT
from test_docs import accept

sys.path.insert(0, str(ROOT / "results"))
import files as results_files
import scores

import eval_sts
import make
import runs
from extras import eval_retrieval

PAGES = {path.name: path.read_text("utf-8") for path in ROOT.glob("results/*.md")}
README = (ROOT / "README.md").read_text("utf-8")
FRONT = "../README.md"  # the project's, by its path from results/


def test_each_command_has_its_line_and_each_line_its_command():
    commands = {run: command for _, run, _, command in runs.all_runs()}
    assert {run: line["command"] for run, line in make.LINES.items()} == commands


def test_a_command_has_options_that_its_script_has(parse, tmp_path):
    for _, run, _, command in runs.all_runs():
        words = runs.expand(command, tmp_path)[1:]
        if words[0] == "results/unseen.py":  # it has no options
            continue
        args = accept(parse, shlex.join(["python", *words]))
        if "--seed" in words:
            assert args.output == f"runs/{run}"  # where runs.py looks for scores and speed


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


def six_as(form):
    """The speed of the teacher's file, in times of torch."""
    found = make.RUNS["files-six"]
    return found[form]["sentences/s"] / found["fp32, torch"]["sentences/s"]


def four_bits_on_search(depth, task="QNLI"):
    fp32, four = [make.sized(depth, form, task) for form in ("fp32", "4 bits")]
    return [a - b for a, b in zip(fp32, four, strict=True)]


THREE = ("score-three scifact-three", "score-n20k-three")
INDEX, QNLI_INDEX = "SciFact, teacher's index", "QNLI, teacher's index"


def searched(run, key="SciFact"):
    return mean(make.scored([f"score-{run}"], "fp32", key))


def of_twelve(key):
    """What six and four of twelve layers lose."""
    models = ("mpnet", "mpnet-six", "mpnet-four")
    teacher, *students = [mean(make.sized(model, "fp32", key)) for model in models]
    return [teacher - student for student in students]


def cut_against_six(model, key):
    """How far a cut of all-mpnet-base-v2 is ahead of the whole all-MiniLM-L6-v2."""
    return mean(make.sized(model, "fp32", key)) - make.sized("six", "fp32", key)[0]


def by_layers(key):
    """What 0,3,5 bring over 1,4,5, after 20,000 sentences."""
    found = [mean(make.sized(run, "fp32", key)) for run in ("cut-0-3-5", "n20k-three")]
    return found[0] - found[1]


def more_sentences(key):
    """What 50,000 bring three layers over 20,000."""
    found = [make.scored(runs.split(), "fp32", key) for runs in THREE]
    return mean(found[0]) - mean(found[1])


def four_bits_cost(key):
    """Of the student of three epochs, the last step."""
    return searched("own3-last", key) - mean(make.scored(["score-own3-q4"], "4 bits", key))


def by_teachers_index(task):
    """What that student loses in 4 bits by the teacher's index."""
    keys = (task, f"{task}, teacher's index")
    own, theirs = [mean(make.scored(["score-own3-q4"], "4 bits", key)) for key in keys]
    return own - theirs


def before_answers(way):
    """MRR@10 on dev, before stage 2."""
    runs_of = [make.RUNS[f"answers-{way}-2-{seed}"] for seed in make.SEEDS]
    return mean(run["student before"]["dev"] for run in runs_of)


def steps(last, dev):
    """By seed, how far dev's step is below the last one on SciFact."""
    found = [make.scored([f"score-{run}"], "fp32", "SciFact") for run in (last, dev)]
    return [a - b for a, b in zip(*found, strict=True)]


DEV, STS = 2, 3  # columns of make.tried()


def method(name, column=STS):
    return mean(make.tried(name)[column])


def speed(run):
    """Sentences per second of seeds 1 and 2."""
    return mean(make.LINES[f"{run}-{seed}"]["sentences_per_second"] for seed in (1, 2))


def gain(name, key="avg"):
    """Over the cut before training."""
    (before,) = make.RUNS["score-before"].values()
    return mean(make.scored([f"score-{name}"], "fp32", key)) - before[key]


def rise(name, rate, low="0.1", high="0.2"):
    """Of dev, from one temperature to another."""
    low, high = [make.trials(name)[f"lr={rate},temperature={at}"] for at in (low, high)]
    return high - low


def in_pairs(run, place):
    """On STS-B test; place: 0 is the cross-encoder, -1 the student."""
    return mean(make.pair_scores(run, place, "test Spearman"))


def e5(row):
    """{test: scores of each seed} of a row of multilingual.md's table."""
    header, rows = make.multilingual()
    names = ("STS-B: German", "STS-B: English", "XQuAD-R: German", "XQuAD-R: English")
    return dict(zip(names, rows[row][1:]))


def trimming(language):
    """What 20,000 tokens cost."""
    before, after = e5(0), e5(1)
    return [before[test][0] - after[test][0] for test in before if language in test]


def e5_loss():
    """How far the students by CKD are behind twelve layers with all tokens."""
    return [e5(0)[test][0] - mean(e5(3)[test]) for test in e5(3)]


def ckd_over_kd():
    return [mean(e5(3)[test]) - mean(e5(2)[test]) for test in e5(3)]


def e5_dev(method):
    """The best trial, which is seed 0, and two more seeds."""
    return make.tried(f"E5-{method}")[2]


ORDERS = ("random, 64", "grouped, 64")


def ours(row):
    return make.RUNS["speed-orders"][row]["ours"]


def peak_memory(run):
    """In GB."""
    return make.LINES[run]["peak_memory_MB"] / 1000


def hours(threads):
    """Of all runs that had 1 or 2 threads."""
    lines = [line for line in make.LINES.values() if f", {threads} threads" in line["machine"]]
    return sum(line["seconds"] for line in lines) / 3600


def on_two_cores():
    return hours(2) + hours(1) / 2


def claims():
    """{page: {number in prose: what it is}}; a number is compared as it is written."""
    (teacher,) = make.sized("six", "fp32", "SciFact")
    (untrained,) = make.sized("six", "fp32", "STS-B")
    speeds = make.RUNS["speed-orders"]
    return {
        "size.md": [
            ("0.4", from_teacher("avg")[0]),
            ("3.5", -from_teacher("avg")[2]),
            ("1.8", -from_teacher("QNLI")[0]),
            ("0.8", -by_index()[0]),
            ("6.3", -from_teacher("SciFact")[0]),
            ("2.2", by_index("SciFact")[0]),
            ("6.6", by_index("SciFact")[2]),
            ("3.0", mean(four_bits_on_search("three", "SciFact"))),
            ("1.4", mean(four_bits_on_search("two", "SciFact"))),
            ("1.0", mean(four_bits_on_search("two"))),
            ("0.5", mean(four_bits_on_search("one"))),
            ("0.4", -four_bits_on_search("six", "SciFact")[0]),
            ("2.2", four_bits_on_search("six")[0]),
            ("0.9", of_twelve("avg")[0]),
            ("10.3", of_twelve("SciFact")[0]),
            ("0.8", cut_against_six("mpnet-six", "avg")),
            ("82.50", make.RUNS["scan-three"]["0,3,5"]["dev, untrained"]),
            ("76.70", make.RUNS["scan-three"]["1,4,5"]["dev, untrained"]),
            ("0.1", mean(make.dev("cut-0-3-5")) - mean(make.dev("n20k-three"))),
            ("2.9", by_layers("SciFact")),
            ("0.4", -by_layers("avg")),
            ("0.9", -by_layers("QNLI")),
            ("0.6", more_sentences("avg")),
            ("2.8", more_sentences("SciFact")),
            ("0.7", more_sentences("QNLI")),
            *[
                ("0.3", a - b)
                for depth in make.ALL_DEPTHS
                for a, b in zip(*[make.sized(depth, "fp32", key) for key in make.AVERAGED])
            ],
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
            ("6.9", make.RUNS["unseen-scifact"]["gain, unseen"]["nDCG@10"]),
            ("7.4", make.RUNS["unseen-scifact"]["gain, seen"]["nDCG@10"]),
            ("4.7", searched("answers-plain-2", "QNLI") - make.sized("six", "fp32", "QNLI")[0]),
            ("6.4", searched("answers-ibkd-2", "QNLI") - make.sized("six", "fp32", "QNLI")[0]),
            ("1.7", searched("answers-ibkd-2", "QNLI") - searched("answers-plain-2", "QNLI")),
            ("1.1", before_answers("ibkd") - before_answers("plain")),
            ("0.6", before_answers("ibkd") - make.RUNS["answers-ibkd-1-0"]["teacher"]["dev"]),
            ("1.8", -by_teachers_index("SciFact")),
            ("1.1", by_teachers_index("QNLI")),
        ],
        "methods.md": [
            ("0.3", method("KD") - method("CKD")),
            ("0.6", method("L2") - method("ConGen")),
            ("1.8", method("KD") - method("SimCSE")),
            ("0.1", method("L2") - method("KD")),
            ("0.1", method("KD", DEV) - method("ConGen", DEV)),
            ("0.7", method("KD", DEV) - method("SimCSE", DEV)),
            ("0.2", rise("ConGen", "4e-4")),
            ("0.4", rise("ConGen", "8e-4")),
            ("0.4", speed("ConGen") / speed("KD")),
            ("0.4", speed("SimCSE") / speed("KD")),
            ("7.7", gain("KD", "SICK-R")),
            ("0.4", gain("SimCSE", "SICK-R")),
            ("2.1", method("KD") - method("M-KD")),
            ("1.6", method("CKD") - method("M-CKD")),
            ("0.3", method("M-CKD") - method("M-KD")),
            ("1.9", make.larger()[1][0][3][0] - make.sized("six", "fp32", "avg")[0]),
            ("0.3", method("SimCSE") - method("M-KD")),
            ("0.2", make.larger()[1][0][3][0] - make.sized("mpnet", "fp32", "avg")[0]),
            ("80.53", make.sized("mpnet", "fp32", "avg")[0]),
            ("0.01", rise("M-CKD", "4e-4", "0.1", "0.05")),
            ("5.8", gain("M-KD", "SICK-R") - gain("SimCSE", "SICK-R")),
            ("4.0", gain("M-CKD", "SICK-R") - gain("SimCSE", "SICK-R")),
            ("2.2", gain("SimCSE", "STS-B") - gain("M-KD", "STS-B")),
            ("3.5", gain("SimCSE", "STS-B") - gain("M-CKD", "STS-B")),
        ],
        "multilingual.md": [
            ("1.3", max(trimming("German"))),
            ("0.7", max(trimming("English"))),
            ("7.5", make.RUNS["files-E5"]["4 bits"]["MB"]),
            ("99.64", make.RUNS["e5-20k"]["after"]["% of tokens kept"]),
            ("6.9", min(e5_loss())),
            ("9.4", max(e5_loss())),
            ("1.8", min(ckd_over_kd())),
            ("4.4", max(ckd_over_kd())),
            ("1.1", mean(e5_dev("CKD")) - mean(e5_dev("KD"))),
        ],
        "pairs.md": [
            ("3.4", in_pairs("DSE", -1) - in_pairs("DSE", 0)),
            ("3.3", in_pairs("labels", -1) - in_pairs("DSE", 0)),
            ("1.3", untrained - in_pairs("DSE", 0)),
            ("2.1", in_pairs("DSE", -1) - untrained),
            ("81.9", make.pair_scores("labels", -1, "test Spearman")[2]),
        ],
        "README.md": [
            ("3.5", -from_teacher("avg")[2]),
            ("2.9", by_layers("SciFact")),
            ("9.8", make.sized("three", "4 bits", "MB")[0]),
            ("12.9", make.sized("six", "4 bits", "MB")[0]),
            ("1.0", teacher - searched("own-last")),
            ("1.6", make.sized("six", "fp32", "QNLI")[0] - searched("own-last", "QNLI")),
            ("4.7", searched("answers-plain-2", "QNLI") - make.sized("six", "fp32", "QNLI")[0]),
            ("6.4", searched("answers-ibkd-2", "QNLI") - make.sized("six", "fp32", "QNLI")[0]),
            ("6.9", min(e5_loss())),
            ("9.4", max(e5_loss())),
            ("2.1", method("KD") - method("M-KD")),
            ("1.6", method("CKD") - method("M-CKD")),
            ("13.4", hours(1) + hours(2)),
            ("7.2", on_two_cores()),
            ("1.6", speeds["random, 64, fp32"]["smallest"]),
            ("2.2", speeds["random, 64, fp32"]["largest"]),
            ("0.9", of_twelve("avg")[0]),
            ("10.3", of_twelve("SciFact")[0]),
        ],
        FRONT: [
            ("22.9", make.RUNS["files-six"]["int8"]["MB"]),
            ("5.2", six_as("int8")),
            ("0.1", made_by_files("int8")[0]),
            ("3.0", mean(four_bits_on_search("three", "SciFact"))),
            ("63.5", searched("own-last")),
            ("2.4", max(peak_memory(f"three-{seed}") for seed in make.SEEDS)),
            ("10.3", of_twelve("SciFact")[0]),
            ("9.1", teacher - searched("n20k-three")),
            ("1.0", teacher - searched("own-last")),
            ("1.6", speeds["random, 64, fp32"]["smallest"]),
            ("2.2", speeds["random, 64, fp32"]["largest"]),
            ("1.2", speeds["grouped, 64, fp32"]["ratio"]),
        ],
        "speed.md": [
            ("1.6", speeds["random, 64, fp32"]["smallest"]),
            ("2.2", speeds["random, 64, fp32"]["largest"]),
            ("1.2", speeds["grouped, 64, fp32"]["ratio"]),
            ("1.7", speeds["grouped, 64, bf16"]["ratio"]),
            ("1.23", speeds["grouped, 64, fp32"]["by padding"]),
            ("2.24", speeds["random, 64, fp32"]["by padding"]),
            *[("1.5", ours(f"{order}, bf16") / ours(f"{order}, fp32")) for order in ORDERS],
            ("0.1", max(made_by_files("int8"))),
            ("0.5", max(loss for d in make.ALL_DEPTHS for loss in four_bits_on_search(d, "STS-B"))),
        ],
    }


# Settings, sizes of groups, versions, the demo's scores, and what papers and packages state.
QUOTED = {
    "search.md": "2.0",
    "methods.md": "0.05",
    "size.md": "0.2 0.8 1.2",
    "multilingual.md": "0.05 0.1 0.4 0.7 0.98 0.99 74.39 79.97",
    "pairs.md": "4.6 87.74 84.22",
    "speed.md": "6.2",
    FRONT: "90.29 73.14 89.43 91.21 0.05 2.0 4.0 2112.05638 2311.05472 1908.05161 2401.12472",
}
LOG = "log.md"  # its numbers are of the code of their day
DECIMAL = re.compile(r"(?<![\w.,])\d+\.\d+(?![\w.]*\d)")


def prose(text):
    """A page without code, tables, comments and the targets of links."""
    text = re.sub(r"```.*?```|<!--.*?-->", " ", text, flags=re.S)
    return re.sub(r"^\|.*$|\]\([^)]*\)|`[^`]*`", " ", text, flags=re.M)


@pytest.mark.parametrize("page", sorted({*PAGES, FRONT} - {LOG}))
def test_a_number_in_prose_is_in_a_table_or_computed_from_the_data(page):
    text = README if page == FRONT else PAGES[page]
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
        assert text.count("<!-- table:") <= 2, page
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


def test_words_of_the_methods_page():
    """KD against each other method, on dev and on the tests, with and without overlap."""
    found = {name: make.tried(name)[2:] for name in make.METHODS}
    words = {name: list(map(make.verdict, found["KD"], found[name])) for name in make.METHODS[1:]}
    assert words.pop("L2") == ["level", "behind", "behind"]
    assert set(words) == {"CKD", "ConGen", "IBKD", "SimCSE"}
    assert all(word == ["ahead"] * 3 for word in words.values())
    by_l2 = [make.verdict(found["L2"][1], found[name][1]) for name in ("CKD", "ConGen", "IBKD")]
    assert by_l2 == ["ahead"] * 3
    for name in ("CKD", "IBKD"):
        against = list(map(make.verdict, found["ConGen"], found[name]))
        assert against == ["ahead", "behind", "behind"]
        on_sts12 = [make.scored([f"score-{run}"], "fp32", "STS12") for run in (name, "KD", "L2")]
        assert [make.verdict(on_sts12[0], other) for other in on_sts12[1:]] == ["ahead"] * 2
    on_sts16 = [make.scored([f"score-{run}"], "fp32", "STS16") for run in ("SimCSE", "KD", "L2")]
    assert [make.verdict(on_sts16[0], other) for other in on_sts16[1:]] == ["ahead"] * 2
    e5 = make.trials("E5-CKD"), make.trials("E5-KD")
    at_01 = [score for name, score in e5[0].items() if "temperature=0.1" in name]
    assert max(at_01) < max(e5[1].values())
    assert all(0.45 < rise(name, "4e-4") < 0.6 for name in ("CKD", "IBKD"))
    assert 0.7 < gain("SimCSE") / gain("KD") < 0.8


def test_words_of_a_larger_teacher():
    """Its students against each other, against SimCSE, and against their own model's."""

    def words(name, other):
        keys = ("avg", *make.SETS)
        pairs = [
            [make.scored([f"score-{run}"], "fp32", key) for run in (name, other)] for key in keys
        ]
        return {key: make.verdict(*pair) for key, pair in zip(keys, pairs)}

    assert set(words("KD", "M-KD").values()) == {"ahead"}
    by_ckd = words("CKD", "M-CKD")
    assert by_ckd.pop("STS13") == "level" and set(by_ckd.values()) == {"ahead"}
    against_kd = words("M-CKD", "M-KD")
    behind = {key for key, word in against_kd.items() if word == "behind"}
    assert behind == {"STS15", "STS-B", "SICK-R"}
    assert "level" not in against_kd.values()
    for name, average in (("M-KD", "behind"), ("M-CKD", "level")):
        found = words(name, "SimCSE")
        assert (found["avg"], found["SICK-R"], found["STS-B"]) == (average, "ahead", "behind")
    assert make.RUNS["M-KD-1"]["teacher"]["dev"] > make.RUNS["mpnet-six"]["teacher"]["dev"]
    aligned = make.scored(["score-M-aligned"], "fp32", "avg")
    assert aligned > make.sized("mpnet", "fp32", "avg")


def test_words_of_the_pairs_page():
    teacher, student = [make.pair_scores("DSE", place, "test Spearman") for place in (0, -1)]
    labels = make.pair_scores("labels", -1, "test Spearman")
    assert make.verdict(student, teacher) == "ahead"
    assert make.verdict(student, labels) == "level"
    assert make.verdict(labels, teacher) == "ahead"
    untrained = make.sized("six", "fp32", "STS-B")
    words = [make.verdict(found, untrained) for found in (teacher, student, labels)]
    assert words == ["behind", "ahead", "level"]
    assert all(84.5 < score < 85.5 for score in labels[:2])
    assert list(make.RUNS["labels-2"]) == ["best student (step 180 of 360)"]


def test_words_of_the_multilingual_page():
    kd, ckd = e5(2), e5(3)
    assert all(make.verdict(ckd[test], kd[test]) == "ahead" for test in ckd)
    assert make.verdict(e5_dev("CKD"), e5_dev("KD")) == "ahead"
    table = make.RUNS["E5-CKD-1"]
    closed = mean(e5_dev("CKD")) - table["student before"]["dev"]
    assert round(100 * closed / (table["teacher"]["dev"] - table["student before"]["dev"])) == 45
    file = make.RUNS["files-E5"]
    assert file["4 bits"]["Spearman"] >= file["fp32, ONNX Runtime"]["Spearman"]


def test_words_of_the_size_page():
    """Three layers: ahead on average, on some sets; behind on two, and on search."""

    def words(key, other=None):
        teacher = make.sized("six", "fp32", other or key)
        return [make.verdict(make.sized(depth, "fp32", key), teacher) for depth in make.DEPTHS]

    for key in make.AVERAGED:
        assert words(key) == ["ahead", "behind", "behind"]
    for key in ("avg", "SciFact", "QNLI"):
        found = [make.scored(runs.split(), "fp32", key) for runs in THREE]
        assert make.verdict(*found) == "ahead"
    assert make.verdict(make.dev("cut-0-3-5"), make.dev("n20k-three")) == "ahead"
    for key, word in dict(SciFact="ahead", avg="behind", QNLI="behind").items():
        cuts = [make.sized(run, "fp32", key) for run in ("cut-0-3-5", "n20k-three")]
        assert make.verdict(*cuts) == word
    ahead = [cut_against_six("mpnet-six", key) > 0 for key in make.TESTS]
    assert ahead == [True, False, False]
    assert all(cut_against_six("mpnet-four", key) < 0 for key in make.TESTS)
    for six, four in map(of_twelve, make.TESTS):
        assert 0 < six < four
    sizes = [make.sized(model, "fp32", "MB")[0] for model in ("mpnet-six", "mpnet-four", "six")]
    assert list(map(round, sizes)) == [268, 211, 91]
    order = list(make.RUNS["scan-three"])
    assert (len(order), order[0], order[7]) == (10, "0,3,5", "1,4,5")
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
    (ibkd, plain), qnli = [
        [make.scored([f"score-answers-{way}-2"], "fp32", "QNLI") for way in ("ibkd", "plain")],
        make.sized("six", "fp32", "QNLI"),
    ]
    assert make.verdict(ibkd, plain) == make.verdict(plain, qnli) == "ahead"
    chosen = [
        re.search(r"step (\d+) of", list(make.RUNS[f"{run}-dev-{seed}"])[-1])[1]
        for run in ("own", "own3")
        for seed in make.SEEDS
    ]
    assert chosen == ["333", "168", "252", "501", "835", "668"]


def test_all_lines_are_of_one_commit_and_one_machine():
    lines = make.LINES.values()
    assert len({line["commit"] for line in lines}) == 1
    assert len({re.sub(r"\d threads", "", line["machine"]) for line in lines}) == 1
    assert all(line["seconds"] > 0 for line in lines)
    texts = {page: " ".join(text.split()) for page, text in PAGES.items()}
    (commit,) = {line["commit"] for line in lines}
    assert on_two_cores() < 8  # hours: a night
    assert f"The data are of commit {commit}.**" in texts["README.md"]
    for page in dict.fromkeys(page for page, *_ in runs.all_runs()):
        spent = [make.LINES[run]["seconds"] for name, run, *_ in runs.all_runs() if name == page]
        said = f"took {sum(spent) / 60:.0f} minutes"
        assert said in texts[f"{page}.md"], said


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
    by_set = {name: sum(line in sentences[name] for line in general) for name in sts}
    assert set(sorted(by_set, key=by_set.get)[-2:]) == {"STS15", "SICK-R"}
    kept = scores.without_overlap(shared_data)
    gone = {name: len(sts[name]) - len(kept[name]) for name in sts}
    found += [sum(gone.values()), sum(map(len, sts.values()))]
    assert set(sorted(gone, key=gone.get)[-3:]) == {"STS15", "STS12", "SICK-R"}
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
    assert mean(row["questions"]["QNLI"]) == pytest.approx(search, abs=0.01)


@pytest.mark.slow
def test_files_of_models_are_timed_in_turns(models_folder, files, call_main, monkeypatch):
    """Two rounds, in each of which two models embed 40 sentences in eight ways each."""
    calls = []

    def speed(embed_batch, batches, sentences):
        calls.append([len(ids) for ids, _ in batches])
        return 10.0 * len(calls)

    monkeypatch.setattr(results_files, "speed", speed)
    models = [str(models_folder / name) for name in ("bert", "mean")]
    words = ("--pairs", files / "dev.tsv", "--sentences", 40, "--rounds", 2)
    table = runs.tables(call_main(results_files, *models, *words))
    assert list(table) == [f"{name}, {kind}" for name in models for kind in results_files.KINDS]
    both = [[1] * 40, [32, 8]]
    for turn in (calls[:16], calls[16:]):
        assert len(turn) == 16 and all(turn.count(sizes) == 8 for sizes in both)
    assert calls[:16] != calls[16:]
    for row in table.values():
        for label in results_files.SIZES:
            low, high = row[f"{label}, lowest"], row[f"{label}, highest"]
            assert 10 <= low <= 160 < high <= 320 and row[label] == (low + high) / 2


def test_the_speed_of_training_is_that_between_two_losses(tmp_path):
    """By hand: 25 steps of 64 in 10, 8 and 5 s; not with a dev score, or after another start."""
    times = [(25, "loss", 30.0), (50, "loss", 40.0), (75, "loss", 48.0), (75, "dev", 60.0)]
    times += [(100, "loss", 70.0), (125, "loss", 3.0), (150, "loss", 8.0)]
    lines = [dict(stage="distill", step=n, seconds=s) | {key: 1.0} for n, key, s in times]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "args.json").write_text('{"--batch-size": 64, "--finetune-batch-size": 32}')
    assert runs.training_speed(tmp_path) == 200
    lines = [line | dict(stage="finetune") for line in lines]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert runs.training_speed(tmp_path) == 100
    (tmp_path / "metrics.jsonl").write_text(json.dumps(lines[0]))
    assert runs.training_speed(tmp_path) is None


def test_runs_wait_for_those_that_they_need_and_speed_is_measured_alone(tmp_path, monkeypatch):
    """A student and another run side by side; its score after it; then a benchmark, alone."""
    running, seen, together = set(), {}, threading.Barrier(2)

    def execute(run, words):
        running.add(run)
        if run in ("student", "other"):  # each waits until the other runs, too
            together.wait(60)
        seen[run] = (set(running), set(seen), os.environ["OMP_NUM_THREADS"])
        if run in ("student", "other"):
            together.wait(60)
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
