"""analyze.py: its numbers against plain loops, its figures as files, its table."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import analyze
import common
from common import ScoredPairs
from support.encoder import load_encoder

pytest.importorskip("matplotlib")

ROOT = Path(analyze.__file__).parent
PAIRS = ScoredPairs(  # 6, 1 and 5 edits
    ("a b c d e f", "A B", "a b c d e"),
    ("u v w x y", "a c", "v w x y z"),
    (5.0, 4.5, 1.0),
)


@pytest.fixture
def plt():
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


def random_unit_vectors(n, d, seed):
    vectors = np.random.default_rng(seed).normal(size=(n, d))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def distance(a, b):
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b)))


def cosines(folder, pairs):
    """As sentence-transformers computes them."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    first = model.encode(list(pairs.first), normalize_embeddings=True).astype(float)
    second = model.encode(list(pairs.second), normalize_embeddings=True).astype(float)
    return (first * second).sum(1)


# --------------------------------------------------------------------------------------------------
# Numbers
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("squared, power", [(True, 2), (False, 1)])
def test_alignment_is_that_of_the_papers(squared, power):
    first, second = random_unit_vectors(7, 4, 0), random_unit_vectors(7, 4, 1)
    expected = sum(distance(a, b) ** power for a, b in zip(first, second)) / 7
    assert analyze.alignment(first, second, squared) == pytest.approx(expected, abs=1e-10)
    assert analyze.alignment(first, first, squared) == 0


@pytest.mark.parametrize("squared, power", [(True, 2), (False, 1)])
def test_uniformity_is_that_of_the_papers(squared, power):
    vectors = random_unit_vectors(7, 4, 0)
    terms = []
    for i in range(7):
        for j in range(i + 1, 7):
            terms.append(math.exp(-2 * distance(vectors[i], vectors[j]) ** power))
    expected = math.log(sum(terms) / len(terms))
    assert analyze.uniformity(vectors, squared) == pytest.approx(expected, abs=1e-7)
    equal = np.repeat(vectors[:1], 5, 0)
    assert analyze.uniformity(equal, squared) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "first, second, expected",
    [
        ("", "", 0),
        ("a b c", "a b c", 0),
        ("a b c", "", 3),
        ("a b c", "a x c", 1),
        ("a b c d", "b c d", 1),
        ("the cat sat on the mat", "a cat sat there", 4),
    ],
)
def test_edit_distance_counts_words(first, second, expected):
    assert analyze.edit_distance(first.split(), second.split()) == expected
    assert analyze.edit_distance(second.split(), first.split()) == expected


def test_covariance_is_nothing_for_independent_dimensions_and_all_for_copies(monkeypatch, plt):
    vectors = np.random.default_rng(0).normal(size=(5000, 4))
    copies = vectors[:, [0, 0, 0]] * [1, 5, -2]
    monkeypatch.setattr(analyze, "unit_vectors", lambda encoder, sentences: encoder)
    encoders = {"independent": vectors, "copies": copies}
    numbers, _ = analyze.covariance(encoders, range(5000), plt)
    assert numbers["independent"]["largest"] < 0.06
    assert numbers["copies"]["mean |correlation|"] == pytest.approx(1)


# --------------------------------------------------------------------------------------------------
# Figures
# --------------------------------------------------------------------------------------------------


def draw(run, figure, models, files, output):
    """Run the script -> its numbers."""
    if figure == "covariance":
        data = ["--sentences", files / "sentences.txt"]
    else:
        data = ["--pairs", files / "dev.tsv"]
    done = run("analyze.py", figure, *models, *data, "--output", output)
    assert done.returncode == 0, done.stderr
    assert Path(f"{output}.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in Path(f"{output}.svg").read_text()
    return json.loads(Path(f"{output}.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("figure", ["space", "cosine", "edits", "covariance", "speed"])
def test_a_figure_and_its_numbers(figure, models_folder, files, run, tmp_path):
    models = [models_folder / "bert", models_folder / "mean"]
    numbers = draw(run, figure, models, files, tmp_path / "new" / "a.b")
    pairs = common.read_scored_pairs(files / "dev.tsv")
    similarity = cosines(models[1], pairs)
    names = ["bert", "mean"]
    if figure == "edits":
        names = ["gold score", *names]
        edits = [analyze.edit_distance(*words) for words in lower_case_words(pairs)]
        expected = 100 * spearmanr(edits, pairs.scores).statistic
        assert numbers["gold score"]["Spearman x 100"] == pytest.approx(expected)
        expected = 100 * spearmanr(edits, similarity).statistic
        assert numbers["mean"]["Spearman x 100"] == pytest.approx(expected, abs=0.01)
    elif figure == "covariance":
        found = numbers["mean"]
        assert found["dimensions"] == 32
        assert 0 < found["mean |correlation|"] < found["largest"] <= 1
    elif figure == "space":
        above = [1 - cosine for cosine, score in zip(similarity, pairs.scores) if score > 4]
        found = numbers["mean"]["squared distances (IBKD)"]["alignment"]
        assert found == pytest.approx(2 * np.mean(above), abs=1e-5)
    else:
        column = "Spearman x 100" if figure == "cosine" else "average"
        expected = 100 * spearmanr(similarity, pairs.scores).statistic
        assert numbers["mean"][column] == pytest.approx(expected, abs=0.01)
    assert list(numbers) == names


def lower_case_words(pairs):
    return [(a.lower().split(), b.lower().split()) for a, b in zip(pairs.first, pairs.second)]


@pytest.fixture
def pair_vectors(monkeypatch):
    """{sentence of PAIRS: vector}, which is what every encoder returns."""
    texts = PAIRS.first + PAIRS.second
    vectors = dict(zip(texts, random_unit_vectors(6, 4, 0)))

    def unit_vectors(encoder, sentences):
        return np.array([vectors[sentence] for sentence in sentences])

    monkeypatch.setattr(analyze, "unit_vectors", unit_vectors)
    return vectors


def points(axes):
    return [collection.get_offsets().tolist() for collection in axes.collections]


def test_the_points_of_space(pair_vectors, plt):
    numbers, figure = analyze.space({"one": None}, PAIRS, plt)
    assert len(figure.axes) == 2
    for axes, values in zip(figure.axes, numbers["one"].values()):
        assert points(axes) == [[[values["uniformity"], values["alignment"]]]]
        assert axes.get_xlabel().startswith("uniformity")
        assert axes.get_ylabel().startswith("alignment")


def test_the_points_of_cosine_and_edits(pair_vectors, plt):
    cosine = []
    for a, b in zip(PAIRS.first, PAIRS.second):
        cosine.append(pytest.approx(float(pair_vectors[a] @ pair_vectors[b])))
    _, figure = analyze.cosine({"one": None}, PAIRS, plt)
    assert points(figure.axes[0]) == [[[score, c] for score, c in zip(PAIRS.scores, cosine)]]
    _, figure = analyze.edits({"one": None}, PAIRS, plt)
    far, near = points(figure.axes[1])
    assert far == [[cosine[0], 6]]
    assert near == [[cosine[1], 1], [cosine[2], 5]]
    labels = [axes.get_xlabel() for axes in figure.axes]
    assert labels == ["similarity", "cosine"]


def test_speed_is_drawn_with_the_average_of_the_sets(models_folder, plt):
    more = ScoredPairs(PAIRS.second, PAIRS.first[::-1], PAIRS.scores)
    encoder = load_encoder(models_folder / "bert").eval()
    numbers, figure = analyze.speed({"one": encoder}, {"x": PAIRS, "y": more}, plt)
    scores = [common.spearman(encoder, {"z": pairs})["z"] for pairs in (PAIRS, more)]
    found = numbers["one"]
    assert found["average"] == pytest.approx(np.mean(scores))
    assert points(figure.axes[0]) == [[[found["sentences/s"], found["average"]]]]


@pytest.mark.parametrize(
    "figure, splits, data",
    [
        ("space", ["dev"], PAIRS),
        ("cosine", ["dev"], PAIRS),
        ("edits", ["dev"], PAIRS),
        ("speed", ["test"], {"test": PAIRS}),
        ("covariance", [], analyze.sample([str(i) for i in range(12_000)], seed=3)),
    ],
)
def test_what_is_read_for_a_figure(monkeypatch, plt, tmp_path, figure, splits, data):
    drawn, read = [], []

    def draw(encoders, data, plt):
        drawn.append(data)
        return {}, plt.figure()

    def read_sts(folder, split):
        read.append(split)
        return {split: PAIRS}

    monkeypatch.setattr(analyze, figure, draw)
    monkeypatch.setattr(analyze, "resolve", lambda name: name)
    monkeypatch.setattr(analyze, "read_sts", read_sts)
    many = [str(i) for i in range(12_000)]
    monkeypatch.setattr(analyze, "training_sentences", lambda name: many)
    monkeypatch.setattr(analyze, "load_encoder", lambda name: torch.nn.Identity())
    options = ["--output", str(tmp_path / "figure")]
    if figure == "covariance":
        options += ["--sentences", "many.txt", "--seed", "3"]
    monkeypatch.setattr("sys.argv", ["analyze.py", figure, "model", *options])
    analyze.main()
    assert read == splits
    assert drawn == [data]


def test_the_covariance_is_of_sentences_at_random():
    sentences = [str(i) for i in range(40_000)]
    drawn = [int(text) for text in analyze.sample(sentences, seed=0)]
    assert len(set(drawn)) == 10_000
    assert drawn == sorted(drawn)
    assert np.mean(drawn) == pytest.approx(20_000, abs=500)  # of the first 10,000 it is 5,000
    assert analyze.sample(sentences, seed=0) == [str(i) for i in drawn]
    assert analyze.sample(sentences, seed=1) != [str(i) for i in drawn]
    assert analyze.sample(sentences[:10_000], seed=0) == sentences[:10_000]


def test_nli_triplets_are_taken_apart(monkeypatch, files):
    options = ["covariance", "model", "--sentences", str(files / "triplets.csv")]
    monkeypatch.setattr("sys.argv", ["analyze.py", *options])
    sentences = analyze.read_data(analyze.parse_args())
    triplets = common.read_triplets(files / "triplets.csv")
    assert set(sentences) == {text for triplet in triplets for text in triplet}


def test_models_are_labeled_by_the_last_part_of_their_name_unless_two_share_it():
    labels = analyze.label_models(["a/bert", "b/bert", "c/mean"])
    assert labels == {"a/bert": "a/bert", "b/bert": "b/bert", "mean": "c/mean"}


@pytest.mark.slow
def test_a_curve_goes_on_where_a_stage_ends(run, tmp_path):
    for name, stages in (("one", ["distill", "finetune"]), ("two", [None])):
        lines = []
        for stage in stages:
            for step in (1, 2, 3, 4):
                entry = {"step": step}
                if stage:
                    entry["stage"] = stage
                if step % 2 == 0:
                    entry["dev"] = 50 + step
                lines.append(json.dumps(entry) + "\n")
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    output = tmp_path / "curve"
    done = run("analyze.py", "curve", tmp_path / "one", tmp_path / "two", "--output", output)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "curve.json").read_text()) == {
        "one": {"step": [2, 4, 6, 8], "dev": [52, 54, 52, 54]},
        "two": {"step": [2, 4], "dev": [52, 54]},
    }


def test_a_stage_begins_at_the_last_step_of_the_one_before(tmp_path):
    entries = [("distill", 0, 50), ("distill", 4, 52), ("finetune", 0, 52), ("finetune", 3, 54)]
    lines = [json.dumps(dict(stage=s, step=n, dev=dev)) + "\n" for s, n, dev in entries]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    steps, scores = analyze.read_dev_scores(tmp_path / "metrics.jsonl")
    assert steps == [0, 4, 4, 7]
    assert scores == [50, 52, 52, 54]


def write_run(folder, batch_size, dev):
    """A run with these dev scores, {step: score}."""
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps({"batch_size": batch_size}))
    lines = [json.dumps({"step": step, "dev": score}) + "\n" for step, score in dev.items()]
    (folder / "metrics.jsonl").write_text("".join(lines))


def test_the_lines_of_data(plt, call_main, tmp_path):
    """Best scores by sentences seen, in their order, runs of equally many averaged."""
    write_run(tmp_path / "CKD" / "a", 64, {0: 50, 100: 81.5, 200: 80})
    write_run(tmp_path / "CKD" / "b-0", 64, {0: 50, 50: 78})
    write_run(tmp_path / "CKD" / "b-1", 32, {0: 50, 100: 80})
    write_run(tmp_path / "KD" / "a", 8, {0: 60, 10: 55})
    (tmp_path / "CKD" / "sweep.json").write_text("[]")
    folders = [tmp_path / "CKD", tmp_path / "KD"]
    call_main(analyze, "data", *folders, "--output", tmp_path / "out")
    assert json.loads((tmp_path / "out.json").read_text()) == {
        "CKD": {"3200": [78, 80], "12800": [81.5]},
        "KD": {"80": [60]},
    }
    _, figure = analyze.data({"CKD": folders[0], "KD": folders[1]}, plt)
    (axes,) = figure.axes
    figure.canvas.draw()
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert {"100", "2,000", "5,000"} <= set(labels)
    ckd, kd = (container.lines for container in axes.containers)
    assert ckd[0].get_xydata().tolist() == [[3200, 79], [12800, 81.5]]
    assert kd[0].get_xydata().tolist() == [[80, 60]]
    (bars,) = ckd[2]
    ends = [bar[:, 1].tolist() for bar in bars.get_segments()]
    assert ends == [pytest.approx([79 - 2**0.5, 79 + 2**0.5]), [81.5, 81.5]]


def test_data_needs_runs(fails, tmp_path):
    write_run(tmp_path / "runs" / "a", 64, {0: 50})
    assert "expected a folder of runs" in fails(analyze, "data", tmp_path / "runs" / "a")
    (tmp_path / "runs" / "a" / "args.json").write_text("{}")
    line = fails(analyze, "data", tmp_path / "runs")
    assert "args.json: no batch_size, expected that of a run" in line


def test_data_counts_no_sentences_of_two_stages(fails, tmp_path):
    write_run(tmp_path / "runs" / "a", 64, {0: 50, 5: 60})
    log = tmp_path / "runs" / "a" / "metrics.jsonl"
    lines = [dict(stage=stage, step=5, dev=60) for stage in ("distill", "finetune")]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "metrics.jsonl: 2 stages, expected a run of one" in fails(
        analyze, "data", tmp_path / "runs"
    )


# --------------------------------------------------------------------------------------------------
# Table
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_neighbours_are_the_nearest_without_the_query_itself(models_folder, files, run, tmp_path):
    file = files / "sentences.txt"
    mean = models_folder / "mean"
    sentences = common.read_sentences(file)
    query = sentences[5]
    options = ["--sentences", file, "--query", query, "--output", tmp_path / "n"]
    done = run("analyze.py", "neighbours", mean, *options)
    assert done.returncode == 0, done.stderr
    assert f"\n{query}\n" in done.stdout
    assert not (tmp_path / "n.png").exists()
    table = json.loads((tmp_path / "n.json").read_text())[query]
    others = [sentence for sentence in dict.fromkeys(sentences) if sentence != query]
    similarity = cosines(mean, ScoredPairs([query] * len(others), others, []))
    ranked = [others[i] for i in np.argsort(-similarity)]
    found = [table[rank]["mean"] for rank in ("1", "5", "10")]
    assert found == [ranked[0], ranked[4], ranked[9]]


# --------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------

REFUSALS = [
    (["neighbours"], "--query: expected with neighbours"),
    (["cosine", "--pairs", "{}/low.tsv", "--query", "a"], "--query: expected with neighbours"),
    (
        ["neighbours", "--sentences", "{}/few.txt", "--query", "A dog."],
        "2 different sentences, exp",
    ),
    (["space", "--pairs", "{}/low.tsv"], "no pair with a score above 4"),
    (["cosine", "--pairs", "{}/low.tsv", "--output", "{}/low.tsv/x"], "a file that can be written"),
    (["cosine", "--pairs", "{}/low.tsv", "--output", "{}/taken"], "taken.png: Is a directory"),
    (["cosine", "--pairs", "{}/low.tsv", "--device", "tpu"], "expected cpu, or cuda"),
]


@pytest.mark.parametrize("given, message", REFUSALS)
def test_bad_input_is_one_line(models_folder, fails, tmp_path, given, message):
    (tmp_path / "taken.png").mkdir()
    (tmp_path / "few.txt").write_text("A dog.\nA cat.\n")
    (tmp_path / "low.tsv").write_text("A dog.\tA cat.\t1\nA dog.\tA bird.\t2\n")
    figure, *options = [text.format(tmp_path) for text in given]
    assert message in fails(analyze, figure, models_folder / "bert", *options)


@pytest.mark.parametrize(
    "lines, message",
    [
        ('{"step": 1, "loss": 2}\n', "metrics.jsonl: no dev score in it"),
        ('{"step": 1}\n[]\n', "metrics.jsonl:2: '[]' is not an object, expected JSON with a step"),
    ],
)
def test_a_bad_log_is_one_line(fails, tmp_path, lines, message):
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert message in fails(analyze, "curve", tmp_path)


def run_without_matplotlib(*options):
    code = "import sys; sys.modules['matplotlib'] = None; sys.path.insert(0, '.'); "
    code += "import analyze; analyze.run_main(analyze.main)"
    command = [sys.executable, "-c", code, *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
def test_matplotlib_is_asked_for_by_name_and_only_for_figures(models_folder, files, tmp_path):
    bert = models_folder / "bert"
    done = run_without_matplotlib("cosine", bert, "--pairs", files / "dev.tsv")
    assert done.returncode == 2
    problem = "this figure needs matplotlib, which is not installed"
    assert done.stderr.splitlines()[-1] == f"error: {problem}: pip install matplotlib"
    options = ["--sentences", files / "sentences.txt", "--query", "A dog."]
    done = run_without_matplotlib("neighbours", bert, *options, "--output", tmp_path / "n")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "n.json").exists()
