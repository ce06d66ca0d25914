"""The pages of results/: commands and data belong together, and numbers in prose are the data's."""

import json
import os
import re
import shlex
import shutil
import sys
import threading
from itertools import combinations
from statistics import mean, median

import numpy as np
import pytest
import torch
from conftest import DEMO, ROOT
from scipy.stats import t as student_t
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


SIX, INT8, SIX_4 = [("six", form) for form in ("fp32", "int8", make.FOUR)]
THREE, THREE_INT8 = ("three", "fp32"), ("three", "int8")
FOUR = {depth: (f"{depth}-r", make.FOUR) for depth in ("three", "two", "own")}
FILES = [(model, form) for _, model, form in make.FILES]
KD_FIRST, KD_ANSWERS, IBKD_FIRST, IBKD_ANSWERS = [
    (f"{run}-{stage}", "fp32") for run in make.ANSWERS.values() for stage in (1, 2)
]
TWELVE = ("mpnet-own", "fp32"), ("mpnet", "fp32")  # six of its layers, and all
HALF = make.RUNS["mpnet-half"]  # what unseen.py says of its passages
LONGER = ("mpnet-longer", "fp32"), TWELVE[1]  # after three epochs
INDEX, QNLI_INDEX = "SciFact, teacher's index", "QNLI, teacher's index"


def score(model, key):
    """The mean of the seeds of a (model, form)."""
    return mean(make.scored(*model, key))


def loss(model, key, other=SIX):
    """How far a file is below another, or below the teacher in fp32."""
    return score(other, key) - score(model, key)


def by_index(model, task="SciFact"):
    """What the teacher's index adds to a file's own."""
    return score(model, f"{task}, teacher's index") - score(model, task)


def quicker(depth, form=make.FOUR, size="one"):
    """The speed of a file, in times of the same layers in torch."""
    return make.speed_of(depth, form, size) / make.speed_of(depth, "fp32", size)


def unseen(students, run="unseen-scifact"):
    """nDCG@10 of students of a text of unseen.py, at 64 tokens: the mean of their seeds."""
    return mean(make.RUNS[run][f"{students}-{seed}"]["nDCG@10"] for seed in make.SEEDS)


def with_passages(key):
    """What six of twelve layers lose that trained on the passages."""
    return loss(TWELVE[0], key, TWELVE[1])


def cut_against_six(model, key):
    """How far a cut of all-mpnet-base-v2 is ahead of the whole all-MiniLM-L6-v2."""
    return -loss((model, "fp32"), key)


DEV, STS = 2, 3  # columns of make.tried()
KD, L2, CKD, IBKD, CONGEN, SIMCSE = make.METHODS


def method(name, column=STS, other=None):
    """The mean of its seeds, or how far they are below those of another."""
    found = mean(make.tried(name, "")[column])
    return method(other, column) - found if other else found


def gain(name, key="avg"):
    """Over the cut before training."""
    (before,) = make.RUNS["score-035-before"].values()
    return mean(make.scored(name, "fp32", key)) - before[key]


def at(method, temperature, rate="4e-4"):
    """The dev score of a trial."""
    return make.trials(method)[f"lr={rate},temperature={temperature}"]


DSE, LABELS = "DSE-2e-5", "labels-2e-5"  # of pairs.md


def in_pairs(run, place):
    """On STS-B test; place: 0 is the cross-encoder, -1 the student."""
    return mean(make.pair_scores(run, place, "test Spearman"))


def cross_below(rate):
    """How far a cross-encoder's rate is below the best, 5e-5, on dev."""
    best, other = [make.RUNS[run]["teacher"]["dev"] for run in ("DSE-0", f"cross-{rate}")]
    return best - other


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
    return make.tried(f"E5-{method}", "")[2]


def on_two_cores(lines):
    """Hours: of two threads, one line at a time; of one thread, two lines."""
    at_a_time = [2 if ", 1 threads" in line["machine"] else 1 for line in lines]
    return sum(line["seconds"] / count for line, count in zip(lines, at_a_time)) / 3600


FEW = ("1,4,5; 20,000", "0,3,5; 20,000")
TRAINED = ("three", "three-r", "two-r")
COMMIT = "9ada09c"
# In results/README.md, by machine.
HOURS = {"Intel": "4.3", "AMD EPYC, AVX2": "7.5", "AMD EPYC, AVX512": "2.2"}


def lines_of(machine):
    """Those of COMMIT."""
    lines = [line for line in make.LINES.values() if line["commit"] == COMMIT]
    return [line for line in lines if line["machine"].startswith(machine)]


def claims():
    """{page: {number in prose: what it is}}; a number is compared as it is written."""
    (untrained,) = make.scored("six", "fp32", "STS-B")
    speeds = make.RUNS["speed-orders"]
    return {
        "size.md": [
            ("0.4", -with_passages("avg")),
            ("2.9", loss(FOUR["three"], "SICK-R")),
            ("1.3", -loss(FOUR["three"], "STS12")),
            ("2.7", with_passages("SICK-R")),
            ("3.8", with_passages("SciFact")),
            ("2.6", with_passages("QNLI")),
            ("1.5", -make.interval(*TWELVE, "SciFact")[1]),
            ("6.2", -make.interval(*TWELVE, "SciFact")[0]),
            ("2.8", -cut_against_six("mpnet-own", "SciFact")),
            ("2.8", loss(LONGER[0], "SciFact", LONGER[1])),
            ("0.8", -make.interval(*LONGER, "SciFact")[1]),
            ("4.8", -make.interval(*LONGER, "SciFact")[0]),
            ("1.05", loss(TWELVE[0], "SciFact", LONGER[0])),
            ("8.05", HALF["gain, seen"]["nDCG@10"]),
            ("6.44", HALF["gain, unseen"]["nDCG@10"]),
            ("0.28", HALF["seen - unseen"]["nDCG@10 from"]),
            ("2.97", HALF["seen - unseen"]["nDCG@10 to"]),
            ("0.17", -HALF["seen - unseen"]["MRR@10 from"]),
            ("3.00", HALF["seen - unseen"]["MRR@10 to"]),
            ("59.1", HALF["runs/mpnet-128"]["nDCG@10"]),
            ("47.3", unseen("mpnet-half-general", "mpnet-half")),
            ("54.2", unseen("mpnet-half-a", "mpnet-half")),
            ("54.9", unseen("mpnet-half-b", "mpnet-half")),
            ("87.65", make.RUNS["rates-mpnet"]["lr=2e-4 (runs: 1)"]["dev"]),
            ("87.66", make.RUNS["rates-mpnet"]["lr=4e-4 (runs: 1)"]["dev"]),
            ("2.1", cut_against_six("mpnet-own", "avg")),
            ("22.8", score(INT8, "MB")),
            ("12.9", score(SIX_4, "MB")),
            ("0.1", loss(INT8, "avg")),
            ("9.8", score(FOUR["three"], "MB")),
            ("0.4", loss(FOUR["three"], "avg")),
            ("5.8", loss(FOUR["three"], "SciFact")),
            ("3.5", loss(FOUR["three"], "QNLI")),
            ("0.8", loss(FOUR["three"], "QNLI", THREE_INT8)),
            ("0.2", loss(THREE_INT8, "avg")),
            ("5.5", loss(THREE_INT8, "SciFact")),
            ("2.7", loss(THREE_INT8, "QNLI")),
            ("0.8", loss(FOUR["two"], "avg", FOUR["three"])),
            ("4.2", loss(FOUR["two"], "SciFact", FOUR["three"])),
            ("1.6", loss(FOUR["two"], "QNLI", FOUR["three"])),
            ("3.7", by_index(FOUR["two"])),
            ("2.5", min(quicker(depth) for depth in make.TIMED)),
            ("2.8", max(quicker(depth) for depth in make.TIMED)),
            ("3.9", min(quicker(depth, "int8") for depth in make.TIMED)),
            ("4.2", max(quicker(depth, "int8") for depth in make.TIMED)),
            ("2.5", min(quicker(depth, make.KINDS[1]) for depth in make.TIMED)),
            ("3.0", max(quicker(depth, make.KINDS[1]) for depth in make.TIMED)),
            *[
                ("0.3", score(model, "avg") - score(model, "avg without overlap"))
                for model in FILES
            ],
        ],
        "search.md": [
            ("9.8", score(FOUR["own"], "MB")),
            ("0.6", loss(FOUR["own"], "SciFact")),
            ("2.5", -make.interval(FOUR["own"], SIX, "SciFact")[0]),
            ("5.8", loss(FOUR["three"], "SciFact")),
            ("0.8", loss(FOUR["own"], "QNLI")),
            ("3.5", loss(FOUR["three"], "QNLI")),
            ("5.2", loss(FOUR["three"], "SciFact", FOUR["own"])),
            ("2.7", loss(FOUR["three"], "QNLI", FOUR["own"])),
            ("0.3", loss(FOUR["own"], "avg")),
            ("1.5", score(SIX, "SciFact") - score(FOUR["own"], INDEX)),
            ("1.7", score(SIX, "QNLI") - score(FOUR["own"], QNLI_INDEX)),
            ("4.8", make.RUNS["unseen-scifact"]["gain, unseen"]["nDCG@10"]),
            ("5.4", make.RUNS["unseen-scifact"]["gain, seen"]["nDCG@10"]),
            ("8.05", HALF["gain, seen"]["nDCG@10"]),
            ("6.44", HALF["gain, unseen"]["nDCG@10"]),
            ("57.2", make.RUNS["unseen-scifact"][make.MINILM]["nDCG@10"]),
            ("47.3", unseen("unseen-general")),
            ("52.1", unseen("unseen-scifact-a")),
            ("52.8", unseen("unseen-scifact-b")),
            ("5.1", -loss(KD_ANSWERS, "QNLI")),
            ("5.5", -loss(IBKD_ANSWERS, "QNLI")),
            ("6.2", loss(KD_FIRST, "QNLI", KD_ANSWERS)),
            ("5.4", loss(IBKD_FIRST, "QNLI", IBKD_ANSWERS)),
            ("1.1", loss(KD_FIRST, "QNLI", IBKD_FIRST)),
            ("1.3", mean(make.dev("answers-ibkd-2")) - mean(make.dev("answers-kd-2"))),
            ("71.64", make.dev("answers-ibkd-1")[0]),
            ("70.91", make.dev("answers-ibkd-1-3.2")[0]),
        ],
        "methods.md": [
            ("0.2", method(CKD, DEV, KD)),
            ("0.3", method(IBKD, DEV, KD)),
            ("0.2", method(IBKD, STS, KD)),
            ("0.4", method(CKD, STS, L2)),
            ("0.7", at(CKD, "0.4") - at(CKD, "0.1")),
            ("0.7", at(IBKD, "0.4") - at(IBKD, "0.1")),
            ("0.4", at(CONGEN, "0.4", "2e-4") - at(CONGEN, "0.1", "2e-4")),
            ("0.1", at(CKD, "3.2") - at(CKD, "0.4")),
            ("0.1", at(IBKD, "3.2") - at(IBKD, "0.4")),
            ("0.2", method(CONGEN, DEV, KD)),
            ("0.5", gain(SIMCSE)),
            ("2.3", gain(KD)),
            ("1.2", -gain(SIMCSE, "SICK-R")),
            ("4.9", gain(KD, "SICK-R")),
            ("0.4", gain(CONGEN, "SICK-R") - gain(KD, "SICK-R")),
            ("84.21", make.RUNS["M-KD-1"]["student before"]["dev"]),
            ("88.11", make.RUNS["mpnet-own-0"]["teacher"]["dev"]),
            ("1.4", make.RUNS["mpnet-own-0"]["teacher"]["dev"] - make.methods()[1][0][2]),
            ("88.14", make.RUNS["M-KD-1"]["teacher"]["dev"]),
            ("1.7", make.scored("mpnet", "fp32", "avg")[0] - score(SIX, "avg")),
        ],
        "multilingual.md": [
            ("1.3", max(trimming("German"))),
            ("0.75", max(trimming("English"))),
            ("7.5", make.RUNS["files-E5"]["4 bits"]["MB"]),
            ("99.64", make.RUNS["e5-20k"]["after"]["% of tokens kept"]),
            ("6.9", min(e5_loss())),
            ("9.4", max(e5_loss())),
            ("1.9", min(ckd_over_kd())),
            ("4.4", max(ckd_over_kd())),
            ("1.1", mean(e5_dev("CKD")) - mean(e5_dev("KD"))),
        ],
        "pairs.md": [
            ("5.4", in_pairs(DSE, -1) - in_pairs(DSE, 0)),
            ("3.2", untrained - in_pairs(DSE, 0)),
            ("2.2", in_pairs(DSE, -1) - untrained),
            ("2.4", in_pairs(LABELS, -1) - untrained),
            ("0.1", cross_below("2e-5")),
            ("0.7", cross_below("1e-4")),
            ("2.5", cross_below("1e-5")),
            *[
                (number, make.RUNS[f"cross-{rate}"]["teacher"]["test Spearman"])
                for rate, number in {"2e-5": "79.83", "1e-5": "77.68", "1e-4": "74.42"}.items()
            ],
            ("77.72", make.pair_scores(DSE, 0, "test Spearman")[0]),
            ("3.9", make.dev(DSE)[0] - make.dev("DSE-0")[0]),
            ("3.6", make.dev(LABELS)[0] - make.dev("labels-0")[0]),
        ],
        "README.md": [
            ("9.8", score(FOUR["three"], "MB")),
            ("12.9", score(SIX_4, "MB")),
            ("1.5", score(SIX, "SciFact") - score(FOUR["own"], INDEX)),
            ("1.7", score(SIX, "QNLI") - score(FOUR["own"], QNLI_INDEX)),
            ("0.6", loss(FOUR["own"], "SciFact")),
            ("0.8", loss(FOUR["own"], "QNLI")),
            ("1.6", speeds["random, 64, fp32"]["smallest"]),
            ("2.2", speeds["random, 64, fp32"]["largest"]),
            ("1.2", speeds["grouped, 64, fp32"]["ratio"]),
            ("1.7", speeds["grouped, 64, bf16"]["ratio"]),
            ("0.07", 78.94 - score(SIX, "avg")),
            *[(number, on_two_cores(lines_of(machine))) for machine, number in HOURS.items()],
            ("4.0", make.speed_of("six", "int8")),
            ("7.8", make.speed_of("three", "int8")),
            ("4.2", 63.23 - score(THREE_INT8, "SciFact")),
            ("5.1", -loss(KD_ANSWERS, "QNLI")),
            ("5.5", -loss(IBKD_ANSWERS, "QNLI")),
            ("4.8", make.RUNS["unseen-scifact"]["gain, unseen"]["nDCG@10"]),
            ("5.4", make.RUNS["unseen-scifact"]["gain, seen"]["nDCG@10"]),
            ("6.9", min(e5_loss())),
            ("9.4", max(e5_loss())),
            ("3.8", with_passages("SciFact")),
            ("2.8", loss(LONGER[0], "SciFact", LONGER[1])),
        ],
        FRONT: [
            ("3.8", with_passages("SciFact")),
            ("12.9", score(SIX_4, "MB")),
            ("9.8", score(FOUR["three"], "MB")),
            ("5.8", loss(FOUR["three"], "SciFact")),
            ("0.6", loss(FOUR["own"], "SciFact")),
            ("0.3", max(loss(SIX_4, key) for key in make.TESTS)),
            ("2.5", make.speed_of("six", "fp32, ONNX Runtime")),
        ],
    }


# Settings, sizes of groups, versions, the demo's scores, and what papers and packages state.
QUOTED = {
    "search.md": "3.8 5.2 0.2 3.2 0.4 2.0 2.3 2.6 2.8 4.6",
    "methods.md": "83.7 83.8 1.6 6.4 71.37 76.02 76.28 76.36 78.15 78.33",
    "size.md": "4.2 1.5 1.8 10.3 0.5 0.2 1.2 0.4 0.9 2.9 0.6 0.7 2.8 7.1 4.9",
    "multilingual.md": "0.05 0.1 2.0 0.025 0.0125 0.4 0.7 0.98 0.99 74.39 79.97",
    "pairs.md": "3.4 88.5 88.6 4.6 87.74 84.22",
    "README.md": "0.01 0.1 6.2",
    FRONT: "0.05 90.29 73.14 89.43 91.21 6.2 1.4 3.8 4.0 5.4 2.0 "
    "2112.05638 2311.05472 1908.05161 2401.12472",
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
    assert len(README.split()) <= 1000 and README.count("\n") <= 125
    for page, text in PAGES.items():
        assert text.count("<!-- table:") <= 3, page
        for table in re.findall(r"<!-- table: \S+ -->(.*?)<!-- end -->", text, re.S):
            assert table.count("\n|") - 2 <= 10, page
    for answer in re.findall(r"^\| \[.*\) \| (.*) \|$", PAGES["README.md"], re.M):
        assert len(answer.split()) <= 25 and len(re.findall(r"[\d.,]*\d", answer)) <= 2, answer


def test_no_number_is_left_open():
    """NN stands in drafts for what is not measured yet."""
    for text in (README, *PAGES.values()):
        assert not re.search(r"\bNN", text)


@pytest.mark.parametrize(
    "found, others, word",
    [
        ([2.0, 2.1, 2.2], [1.0, 1.1, 1.2], "ahead"),
        ([1.0, 1.1, 1.2], [2.0, 2.1, 2.2], "behind"),
        ([2.0, 2.1, 1.0], [1.0, 1.1, 1.2], "level"),  # one seed is behind
        ([1.1, 1.2, 9.0], [1.0, 1.1, 1.2], "level"),  # the mean, 2.7, is below twice its error
        ([1.1, 1.2, 1.3], [1.0], "ahead"),  # of a model
        ([1.1], [1.2], "behind"),  # one model, and another
    ],
)
def test_the_words_for_differences(found, others, word):
    assert make.of_seeds(found, others) == word


def test_how_often_chance_alone_puts_one_of_two_equal_students_ahead():
    """The mean of three differences is above twice its error: |t| > 2, two degrees of freedom."""
    share = 200 * student_t.sf(2, 2)
    words = f"puts one of two equal students ahead in {share:.0f} % of comparisons"
    assert words in " ".join(PAGES["README.md"].split())


def test_a_difference_on_search_must_also_leave_out_chance_among_the_questions(monkeypatch):
    """Seeds agree; of 40 questions, all gain, or 21 gain as much as 19 lose."""
    rng = np.random.default_rng(1)
    noise = rng.normal(size=40)
    mixed = np.where(np.arange(40) < 21, 30.0, -30.0)
    tables = {}
    for name, gains in dict(a=noise * 0, b=noise + 9, c=mixed).items():
        for seed in make.SEEDS:
            row = {"QNLI": 50 + gains.mean() + 0.01 * seed, "avg": 50 + gains.mean() + 0.01 * seed}
            tables[f"score-{name}-{seed}"] = {
                "fp32": row | {"questions": {"QNLI": list(50 + gains)}}
            }
    monkeypatch.setattr(make, "RUNS", tables)
    a, b, c = [(name, "fp32") for name in "abc"]
    assert make.verdict(b, a, "QNLI") == "ahead" and make.verdict(a, b, "QNLI") == "behind"
    assert make.verdict(c, a, "QNLI") == "level" and make.verdict(c, a, "avg") == "ahead"
    low, high = make.interval(c, a, "QNLI")
    by_hand = [rng.choice(mixed, 40).mean() for _ in range(4000)]
    assert [low, high] == pytest.approx(np.percentile(by_hand, (2.5, 97.5)), abs=0.6)


def test_words_of_the_methods_page():
    """The cut 0,3,5: each method against each other, on dev and on the tests, and their trials."""
    words = {}
    for better, worse in combinations((KD, L2, CKD, IBKD, CONGEN, SIMCSE), 2):
        found = [make.tried(name, "")[DEV:] for name in (better, worse)]
        words[better, worse] = list(map(make.of_seeds, *found))
    assert words.pop((KD, L2)) == ["level"] * 3
    assert words.pop((CKD, IBKD)) == ["ahead", "behind", "behind"]
    assert words.pop((CKD, CONGEN)) == ["level"] * 3
    assert words.pop((IBKD, CONGEN)) == ["level", "ahead", "ahead"]
    assert set(map(tuple, words.values())) == {("ahead",) * 3}
    averages = {name: f"{method(name, STS, KD):.1f}" for name in (IBKD, CONGEN, CKD)}
    assert list(averages.values()) == ["0.2", "0.3", "0.4"]
    assert 0.2 < gain(SIMCSE) / gain(KD) < 0.25
    sick = [make.scored(name, "fp32", "SICK-R") for name in (CONGEN, KD)]
    assert make.of_seeds(*sick) == "ahead"
    on_sts12 = [make.scored(name, "fp32", "STS12") for name in (IBKD, KD, L2)]
    assert [make.of_seeds(on_sts12[0], other) for other in on_sts12[1:]] == ["ahead"] * 2
    assert [f"{mean(on_sts12[0]) - mean(other):.1f}" for other in on_sts12[1:]] == ["0.7"] * 2
    assert [len(make.trials(name)) for name in make.METHODS] == [6, 6, 9, 9, 10, 10]
    for name in make.METHODS:
        found = make.trials(name)
        settings = [dict(pair.split("=") for pair in text.split(",")) for text in found]
        rates = sorted({float(setting["lr"]) for setting in settings})
        assert rates[0] < float(settings[0]["lr"]) < rates[-1]  # the best rate is inside
        if name not in (KD, L2):
            temperatures = sorted(float(setting["temperature"]) for setting in settings)
            best = float(settings[0]["temperature"])
            assert temperatures[0] < best < temperatures[-1]
    assert all(at(name, "6.4") == at(name, "3.2") for name in (CKD, IBKD))


def test_words_of_e5_trials():
    """The best rates and temperature are inside; at 0.1, CKD is below the best KD."""
    ckd, kd = make.trials("E5-CKD"), make.trials("E5-KD")
    assert len(ckd) == 7 and len(kd) == 6
    rates = sorted(float(name.split("=")[1]) for name in kd)
    assert next(iter(kd)) == "lr=16e-4" and rates[0] < 16e-4 < rates[-1]
    at_8e4 = [f"temperature={value}" for value in ("0.0125", "0.025", "0.05", "0.1")]
    assert max(at_8e4, key=ckd.get) == "temperature=0.05" == next(iter(ckd))
    assert ckd["lr=4e-4"] == ckd["temperature=0.05"] > max(ckd["lr=2e-4"], ckd["lr=16e-4"])
    below = [round(max(kd.values()) - ckd[name], 1) for name in at_8e4]
    assert below == [2.0, 0.1, -0.8, 0.1]


def test_words_of_a_larger_teacher():
    """No trial rose above the untrained student on dev, whose score each of them has kept."""
    before = round(make.RUNS["M-KD-1"]["student before"]["dev"], 2)
    found = make.trials("M-KD"), make.trials("M-CKD")
    assert list(map(len, found)) == [4, 4]
    assert {score for trials in found for score in trials.values()} == {before}
    assert list(make.RUNS["M-KD-1"])[-1].endswith("(step 0 of 157)")
    older = PAGES[LOG].split("## A larger teacher")[1].split("\n## ")[0]
    quoted = "71.37 78.33 76.28 76.02 83.82 83.68 76.36 78.15"  # by methods.md
    assert set(quoted.split()) <= set(re.findall(r"\d+\.\d+", older))


def test_words_of_the_pairs_page():
    teacher, student = [make.pair_scores(DSE, place, "test Spearman") for place in (0, -1)]
    labels = make.pair_scores(LABELS, -1, "test Spearman")
    assert make.of_seeds(student, teacher) == "ahead"
    assert make.of_seeds(student, labels) == "level"
    assert make.of_seeds(labels, teacher) == "ahead"
    untrained = make.scored("six", "fp32", "STS-B")
    words = [make.of_seeds(found, untrained) for found in (teacher, student, labels)]
    assert words == ["behind", "ahead", "ahead"]
    header, rows = make.rates()
    for column in (1, 2):  # the best rate is inside
        assert max(rows, key=lambda row: row[column])[0] == "2e-5"


def test_words_of_the_multilingual_page():
    kd, ckd = e5(2), e5(3)
    assert all(make.of_seeds(ckd[test], kd[test]) == "ahead" for test in ckd)
    assert make.of_seeds(e5_dev("CKD"), e5_dev("KD")) == "ahead"
    table = make.RUNS["E5-CKD-1"]
    closed = mean(e5_dev("CKD")) - table["student before"]["dev"]
    assert round(100 * closed / (table["teacher"]["dev"] - table["student before"]["dev"])) == 45
    # Of the first four trials, two also embedded the texts by the teacher; the next three, none.
    first, rates = [make.LINES[f"try-E5-CKD{word}"]["seconds"] for word in ("", "-rates")]
    of_pass = (first - 4 * rates / 3) / 2
    assert [round(s / 60) for s in (make.LINES["E5-CKD-1"]["seconds"], of_pass)] == [5, 6]
    line = " ".join(PAGES[LOG].split()).split("three layers by KD had ")[1]
    older = [float(number) for number in re.findall(r"\d+\.\d+", line)[:8]]
    now = [mean(row[test]) for row in (kd, ckd) for test in kd]
    assert now == pytest.approx(older, abs=0.1)
    file = make.RUNS["files-E5"]
    assert file["4 bits"]["Spearman"] >= file["fp32, ONNX Runtime"]["Spearman"]


def test_words_of_the_size_page():
    """Files against the teacher in fp32; the scan's order; twelve layers."""
    words = {
        model: [make.verdict(model, SIX, key) for key in make.TESTS]
        for model in (THREE_INT8, FOUR["three"], FOUR["two"])
    }
    assert list(words.values()) == [["behind"] * 3] * 3
    cut = [make.verdict(FOUR["three"], THREE_INT8, key) for key in make.TESTS]
    assert cut == ["level", "level", "behind"]
    assert make.verdict(FOUR["three"], THREE_INT8, make.AVERAGED[1]) == "behind"
    assert [make.verdict(model, SIX, key) for model in (INT8, SIX_4) for key in make.TESTS[1:]] == [
        "level"
    ] * 4
    by_index = {
        (model, task): make.verdict(model, model, f"{task}, teacher's index", task)
        for model in (THREE_INT8, FOUR["three"], FOUR["two"])
        for task in make.TESTS[1:]
    }
    assert by_index.pop((FOUR["two"], "SciFact")) == "ahead"
    assert set(by_index.values()) == {"level"}
    two = [make.verdict(FOUR["two"], FOUR["three"], key) for key in make.TESTS]
    assert two == ["behind"] * 3
    for run, cut, cuts in (("scan-three", "0,3,5", 10), ("scan-two", "0,5", 5)):
        order = list(make.RUNS[run])
        assert (len(order), order[0]) == (cuts, cut)
    own = TWELVE[0]
    against = [make.verdict(*TWELVE, key) for key in make.TESTS]
    assert against == ["ahead", "behind", "behind"]
    assert [make.verdict(own, SIX, key) for key in ("avg", "QNLI")] == ["ahead", "level"]
    assert abs(make.interval(own, SIX, "SciFact")[1]) < 0.1  # more samples may turn its sign
    assert make.verdict(*TWELVE, "SICK-R") == "behind"
    sets = [("SICK-R", "STS15", "STS-B"), ("STS12", "STS13", "STS14")]
    words = [{make.verdict(FOUR["three"], SIX, key) for key in keys} for keys in sets]
    assert words == [{"behind"}, {"ahead"}]
    seven = (*sets[0], *sets[1], "STS16")
    for model in (THREE_INT8, FOUR["three"], FOUR["own"]):
        assert max(seven, key=lambda key: loss(model, key)) == "SICK-R"
    lost = {"391": [], "782": []}  # of each student of three layers, by the step that dev kept
    for run, form in (THREE_INT8, FOUR["three"]):
        for seed, found in enumerate(make.scored(run, form, "SICK-R")):
            (step,) = re.findall(r"step (\d+) of 782", list(make.RUNS[f"{run}-{seed}"])[-1])
            lost[step].append(f"{score(SIX, 'SICK-R') - found:.1f}")
    assert lost == {"391": ["3.6", "4.2", "2.8"], "782": ["1.5", "1.5", "1.8"]}
    assert [round(score(model, "MB")) for model in (own, SIX)] == [268, 91]
    assert next(iter(make.RUNS["scan-mpnet"])) == "0,2,4,8,10,11"
    minutes = [make.LINES["scan-mpnet"]["seconds"] / 60, make.seconds("mpnet-own") / 60]
    minutes.append(make.LINES["mpnet-own-0"]["seconds"] / 60 - minutes[1])
    minutes.append(make.LINES["mpnet-longer-0"]["seconds"] / 60)
    assert list(map(round, minutes)) == [18, 13, 9, 94]
    assert make.verdict(*LONGER, "SciFact") == "behind"
    both = [make.RUNS[run]["seen - unseen"] for run in ("unseen-scifact", "mpnet-half")]
    assert [row["nDCG@10 from"] > 0 for row in both] == [False, True]
    low, high = make.interval(LONGER[0], own, "SciFact")
    assert low < 0 < high
    page = " ".join(PAGES["size.md"].split())
    for words in ("over questions alone, it is 0.8 to 4.8", "lost 2.8 to 4.2", "lost 1.5 to 1.8"):
        assert words in page, words
    assert make.dev("mpnet-longer")[0] < min(make.dev("mpnet-own"))


def test_words_about_speed():
    """Fewer layers are faster in each format; int8 is the fastest; README's tokens and hours."""
    header, rows = make.speeds()
    for fewer, more in zip(rows[1:], rows):
        assert all(float(a) > float(b) for a, b in zip(fewer[1:], more[1:]))
    for row in rows:
        for start in (1, 5):
            assert max(map(float, row[start : start + 4])) == float(row[start + 2])
        assert float(row[8]) <= float(row[5])
    assert round(make.speed_of("three", make.FOUR) / make.speed_of("six", make.FOUR)) == 2
    slower = [100 - 100 * quicker(depth, size="batch") for depth in make.TIMED]
    assert [round(min(slower)), round(max(slower))] == [20, 29]
    kept = [list(make.RUNS[f"{run}-{seed}"])[-1] for run in TRAINED for seed in make.SEEDS]
    assert [row.count("step 391 of 782") for row in kept] == [1, 0, 0, 1, 1, 0, 0, 0, 0]
    speeds = {
        run: median(make.LINES[f"{run}-{seed}"]["sentences_per_second"] for seed in make.SEEDS)
        for run in ("three", "three-r")
    }
    tokens = 949_732 / 50_000  # of a sentence, cut at 64
    assert [round(speed * tokens, -2) for speed in speeds.values()] == [3300, 1900]
    # Of a token and layer, in seconds: training, and the teacher's pass.
    of_training = 1 / (speeds["three"] * tokens * 3)
    of_pass = (make.LINES["three-0"]["seconds"] - make.seconds("three")) / (949_732 * 6)
    hours = 60_000 * 300 / 3600
    assert [round(hours * 6 * of_training), round(hours * 12 * of_pass)] == [3, 1]
    # search.md: three epochs of 734,303 tokens, against half of the sentences' or all.
    ratios = [3 * 734_303 / (949_732 * share) for share in (1, 0.5)]
    assert [f"{ratio:.1f}" for ratio in ratios] == ["2.3", "4.6"]


def test_the_memory_that_readme_computes():
    """By the formula of docs/engineering.md, "One GPU"."""
    gigabytes = []
    for layers, width, batch in ((6, 384, 64 * 512), (12, 768, 64 * 128)):
        weights = layers * (12 * width**2 + 13 * width) + 30_522 * width
        gigabytes.append((18 * weights + 45 * layers * width * batch) / 1e9)
    assert [f"{value:.1f}" for value in gigabytes] == ["3.8", "5.4"]


def test_the_numbers_of_the_set_before():
    """What size.md and search.md say of it, by the log's table."""
    section = PAGES["log.md"].split("## The set before")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    table = [[re.findall(r"[\d.]+", cell)[:1] for cell in row[1:]] for row in rows[2:]]
    names = [row[0].strip() for row in rows[2:]]

    def row(beginning, column):
        return float(table[names.index(beginning)][column][0])

    many, few, scan = [f"{cut}; fp32" for cut in ("1,4,5; 50,000 general sentences", *FEW)]
    assert [f"{row(many, i) - row(few, i):.1f}" for i in (0, 2, 1)] == ["0.6", "0.7", "2.8"]
    assert [f"{row(few, i) - row(scan, i):.1f}" for i in (0, 2, 1)] == ["0.4", "0.9", "-2.9"]
    steps = [f"the same, three epochs, {step}" for step in ("last step", "dev's step")]
    assert f"{row(steps[0], 1) - row(steps[1], 1):.1f}" == "0.4"


def test_words_of_the_search_page():
    """Own texts against general ones, and against the teacher; by either index; answers."""
    own, general = FOUR["own"], FOUR["three"]
    assert [make.verdict(own, general, key) for key in make.TESTS] == ["level", "ahead", "ahead"]
    assert [make.verdict(own, SIX, key) for key in make.TESTS] == ["behind", "level", "level"]
    for task in make.TESTS[1:]:
        assert make.verdict(own, SIX, f"{task}, teacher's index", task) == "behind"
    both = [(model, task) for model in (general, own) for task in make.TESTS[1:]]
    indexes = [(model, model, f"{task}, teacher's index", task) for model, task in both]
    assert {make.verdict(*pair) for pair in indexes} == {"level"}
    lows, highs = zip(*[make.interval(*pair) for pair in indexes])
    assert [f"{-min(lows):.1f}", f"{max(highs):.1f}"] == ["2.6", "2.8"]
    for better, worse in ((KD_ANSWERS, SIX), (IBKD_ANSWERS, SIX), (IBKD_FIRST, KD_FIRST)):
        assert make.verdict(better, worse, "QNLI") == "ahead"
    older = " ".join(PAGES[LOG].split()).split("IBKD's two stages had ")[1]
    both = re.findall(r"([\d.]+) ± ", older)[:2]
    assert f"{float(both[0]) - float(both[1]):.1f}" == "1.7"
    begun = [
        [make.RUNS[f"{run}-2-{seed}"]["student before"]["dev"] for seed in make.SEEDS]
        for run in make.ANSWERS.values()
    ]
    assert make.of_seeds(*begun) == "level"
    assert make.of_seeds(make.dev("answers-ibkd-2"), make.dev("answers-kd-2")) == "ahead"
    for pair in ((IBKD_ANSWERS, KD_ANSWERS), (KD_FIRST, SIX), (IBKD_FIRST, SIX)):
        assert make.verdict(*pair, "QNLI") == "level"


def test_the_index_names_the_commit_machines_and_hours_of_all_lines():
    """And each page its minutes."""
    texts = {page: " ".join(text.split()) for page, text in PAGES.items()}
    older = [run for run, line in make.LINES.items() if line["commit"] != COMMIT]
    assert older == ["speed-orders"] and make.LINES[older[0]]["commit"] == "441f135"
    assert round(make.LINES[older[0]]["seconds"] / 60) == 4
    assert all(line["seconds"] > 0 for line in make.LINES.values())
    later = "mpnet-longer|mpnet-half|rates-mpnet"  # on an Intel Xeon, as the rest
    avx512 = "ConGen|SimCSE|mpnet-own|mpnet-128|scan-mpnet|speed-orders"
    avx2 = "035|M-|DSE|labels|cross|unseen|answers|mpnet|[eE]5"
    for run, line in make.LINES.items():
        kind = "AVX512" if re.search(avx512, run) else "AVX2" if re.search(avx2, run) else ""
        kind = "" if re.search(later, run) else kind
        assert line["machine"].startswith(f"AMD EPYC, {kind}" if kind else "Intel"), run
    words = [COMMIT, "441f135", "four minutes", *(f"{hours} hours" for hours in HOURS.values())]
    assert all(word in texts["README.md"] for word in words)
    for page in dict.fromkeys(page for page, *_ in runs.all_runs()):
        lines = [make.LINES[run] for name, run, *_ in runs.all_runs() if name == page]
        said = f"took {sum(line['seconds'] for line in lines) / 60:.0f} minutes"
        assert said in texts[f"{page}.md"], said


def test_the_gain_by_known_answers_is_not_that_of_answers_that_were_trained_on(shared_data):
    """search.md, over the teacher: questions with an answer of a training question, and others."""
    corpus = shared_data / "retrieval/qnli"
    _, _, trained, _ = eval_retrieval.read_training(corpus, dev_queries=2000)
    _, answers = eval_retrieval.read_split(corpus, "test")
    known = set().union(*trained)
    shared = np.array([not known.isdisjoint(row) for row in answers])
    assert (len(shared), shared.sum()) == (811, 160)
    gains = []
    for model in (KD_ANSWERS, IBKD_ANSWERS):
        gain = make.by_question(*model, "QNLI") - make.by_question(*SIX, "QNLI")
        gains += [f"{gain[shared].mean():.1f}", f"{gain[~shared].mean():.1f}"]
    assert gains == ["3.8", "5.5", "5.2", "5.5"]
    words = "gains 3.8 points on them and 5.5 on the others; IBKD's gains 5.2 and 5.5"
    assert words in " ".join(PAGES["search.md"].split())


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
