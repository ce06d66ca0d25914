"""eval_sts.py: DESIGN's reference numbers on the real data, a user's own files, what it refuses."""

import json

import pytest

import common
import eval_sts
from support import demo
from support.encoder import LayerPooling, load_encoder

# Measured with independent code; the first row agrees with the figures published for the model.
REFERENCE = {
    None: (72.37, 80.60, 75.59, 85.39, 78.99, 82.03, 77.15, 78.87),
    "1,3,5": (58.52, 69.46, 64.93, 78.44, 75.34, 69.76, 67.31, 69.11),
}


@pytest.mark.slow
@pytest.mark.parametrize("layers", [None, "1,3,5"])
def test_reference_rows(run, shared_data, tmp_path, layers):
    process = run(
        "eval_sts.py",
        common.MINILM,
        "--senteval",
        shared_data / "senteval/data/downstream",
        "--json",
        tmp_path / "scores.json",
        *(["--student-layers", layers] if layers else []),
        OMP_NUM_THREADS="2",
    )
    assert process.returncode == 0, process.stderr[-2000:]
    (report,) = json.loads((tmp_path / "scores.json").read_text()).values()
    rounded = [round(value, 2) for value in report["spearman"].values()]
    assert rounded == pytest.approx(REFERENCE[layers], abs=0.0101)
    assert report["pooling"] == "mean"
    assert report["normalize"]
    assert report["dimensions"] == 384
    assert f"{report['spearman']['avg']:.2f}" in process.stdout.splitlines()[-1]


@pytest.mark.slow
def test_dev_split(run, shared_data):
    options = ("--senteval", shared_data / "senteval", "--split", "dev")
    process = run("eval_sts.py", common.MINILM, *options, OMP_NUM_THREADS="2")
    assert "STS-B dev" in process.stdout
    assert "86.72" in process.stdout


def write_rows(path, rows):
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows), "utf-8")


@pytest.mark.slow
def test_own_pairs_several_models_one_row_each(run, models_folder, files, tmp_path):
    pairs = demo.scored_pairs(30, seed=5)
    scaled = tmp_path / "mine.tsv"
    write_rows(scaled, [(a, b, score / 5) for a, b, score in zip(*pairs)])
    models = [models_folder / "mean", models_folder / "pooler"]
    process = run("eval_sts.py", *models, "--pairs", scaled, "--pairs", files / "dev.tsv")
    assert process.returncode == 0, process.stderr
    header, _, *rows = process.stdout.splitlines()
    assert [cell.strip() for cell in header.split("|")[2:-1]] == ["mine", "dev", "avg"]
    assert len(rows) == 2
    for row, model in zip(rows, models):
        expected = common.spearman(load_encoder(model), {"mine": pairs})["mine"]
        assert float(row.split("|")[2]) == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--pairs", "{}/a.tsv", "--score-range", 0, 1], "a.tsv:2: score '3' is not a number"),
        (["--senteval", "{}"], "no STS/STSBenchmark"),
        (["--demo", "--student-layers", "7"], "expected different ones of its layers 0 to 3"),
        (["--translations", "{}/b.tsv"], "b.tsv:2: 1 tab-separated columns"),
        (["--demo", "--json", "{}"], "expected a file that can be written"),
    ],
)
def test_refusals(fails, models_folder, tmp_path, options, message):
    (tmp_path / "a.tsv").write_text("a\tb\t0.5\nc\td\t3\n")
    (tmp_path / "b.tsv").write_text("a boy\tein Junge\na girl\n", "utf-8")
    options = [str(option).format(tmp_path) for option in options]
    assert message in fails(eval_sts, models_folder / "mean", *options)


def test_refused_models(fails, tmp_path):
    assert "expected a complete model" in fails(eval_sts, tmp_path, "--demo")
    assert "MODEL" in fails(eval_sts)


def test_the_report_states_a_pooling_over_layers(models_folder):
    encoder = load_encoder(models_folder / "bert", pooling=LayerPooling((1, 2), "concat"))
    report = eval_sts.describe(encoder)
    assert report["pooling"] == {"layers": (1, 2), "join": "concat", "skip_first_token": False}
    assert report["dimensions"] == 64


def translation_accuracy_in_loops(vectors, answers, texts):
    """In percent; texts are those of the answers."""
    right = 0
    for i, query in enumerate(vectors):
        cosines = []
        for answer in answers:
            norms = (sum(query * query) * sum(answer * answer)) ** 0.5
            cosines.append(float(query @ answer) / norms)
        nearest = max(range(len(texts)), key=cosines.__getitem__)
        right += texts[nearest] == texts[i]
    return 100 * right / len(texts)


@pytest.mark.slow
def test_translation_accuracy_is_that_of_plain_loops(run, models_folder, tmp_path):
    pairs = [(text, " ".join(text.split()[2:])) for text in demo.sentences(60)]
    pairs += [("a boy", "a girl"), ("a lad", "a girl")]
    write_rows(tmp_path / "pairs.tsv", pairs)
    process = run(
        "eval_sts.py",
        models_folder / "mean",
        "--translations",
        tmp_path / "pairs.tsv",
        "--json",
        tmp_path / "scores.json",
    )
    assert process.returncode == 0, process.stderr
    (report,) = json.loads((tmp_path / "scores.json").read_text()).values()
    encoder = load_encoder(models_folder / "mean").eval()
    texts = list(zip(*pairs))
    first, second = (common.encode_sentences(encoder, side).astype(float) for side in texts)
    there = translation_accuracy_in_loops(first, second, texts[1])
    back = translation_accuracy_in_loops(second, first, texts[0])
    assert report["accuracy"] == {"1 -> 2": pytest.approx(there), "2 -> 1": pytest.approx(back)}
    assert 0 < there < 100
    assert 0 < back < 100
