"""eval_sts.py: DESIGN's reference numbers on the real data, a user's own files, what it refuses."""

import json

import numpy as np
import pytest
from scipy.stats import spearmanr

import common
import distilface
import eval_sts
from support import demo
from support.encoder import POOLING_NAMES, LayerPooling, load_encoder, named_poolings

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
        (["--demo", "--sets", "STS12"], "--sets: expected with SentEval's test sets"),
        (["--pairs", "{}/a.tsv", "--sets", "STS12"], "--sets: expected with SentEval's test"),
        (["--split", "dev", "--sets", "STS12"], "--sets: expected with SentEval's test sets"),
        (["--sets", "STS12,STS17"], "--sets: 'STS12,STS17', expected some of STS12,STS13,STS14"),
        (["--pairs", "{}/STS.input.x.txt"], "STS.input.x.txt: no scores, expected them in"),
        (["--pairs", "{}/STS.input.y.txt"], "y.txt: 2 lines, expected 1 as in STS.gs.y.txt"),
        (["--pairs", "{}/STS.input.z.txt"], "STS.gs.z.txt:2: score '6' is not a number from 0"),
        (["--pairs", "{}/STS.input.same.txt"], "STS.gs.same.txt: expected two different scores"),
        (
            ["--demo", "--student-layers", "0,2", "--pooling", "avg_last4"],
            "pooling avg_last4, expected one for 2 layers: mean, cls, avg, ",
        ),
        (["--demo", "--pooling", "last"], "argument --pooling: invalid choice: 'last'"),
    ],
)
def test_refusals(fails, models_folder, tmp_path, options, message):
    (tmp_path / "a.tsv").write_text("a\tb\t0.5\nc\td\t3\n")
    for name, scores in dict(x=None, y="1\n", z="5\n6\n", same="1\n1\n").items():
        (tmp_path / f"STS.input.{name}.txt").write_text("a\tb\nc\td\n")
        if scores:
            (tmp_path / f"STS.gs.{name}.txt").write_text(scores)
    (tmp_path / "b.tsv").write_text("a boy\tein Junge\na girl\n", "utf-8")
    options = [str(option).format(tmp_path) for option in options]
    assert message in fails(eval_sts, models_folder / "mean", *options)


def test_refused_models(fails, tmp_path):
    assert "expected a complete model" in fails(eval_sts, tmp_path, "--demo")
    assert "MODEL" in fails(eval_sts)


@pytest.mark.parametrize("depth", range(1, 13))
def test_the_names_of_poolings_are_distilfaces(depth):
    """support/encoder.py and distilface.py are written apart. Of a single layer distilface.py
    calls the mean over it "mean"."""
    ours = named_poolings(depth)
    for name in distilface.POOLINGS:
        try:
            theirs = distilface.encoder_pooling(name, depth)
        except ValueError:
            assert name not in ours
            continue
        if depth > 1 or theirs != "mean":
            assert ours[name] == theirs
        assert name in ours
    assert set(POOLING_NAMES) == {*distilface.POOLINGS, "concat_last4_no_cls", "pooler"}


@pytest.mark.parametrize("name", ["avg_first_last", "max_last2", "concat_last4", "cls"])
@pytest.mark.parametrize("folder", ["bert", "pooler"])
def test_a_model_is_read_by_any_pooling_whatever_its_folder_states(
    call_main, models_folder, files, tmp_path, folder, name
):
    given = ("--pairs", files / "dev.tsv", "--pooling", name, "--json", tmp_path / "scores.json")
    call_main(eval_sts, models_folder / folder, *given)
    (report,) = json.loads((tmp_path / "scores.json").read_text()).values()
    encoder = load_encoder(models_folder / "bert").eval()

    def encode(input_ids, attention_mask):
        states = encoder.model(input_ids, attention_mask, output_hidden_states=True).hidden_states
        return distilface.pool(states, attention_mask, name)

    pairs = common.read_scored_pairs(files / "dev.tsv")
    sides = [common.Tokens(encoder, list(side)) for side in (pairs.first, pairs.second)]
    first, second = (common.encode(encode, tokens, "cpu") for tokens in sides)
    cosine = (first * second).sum(1) / np.linalg.norm(first, axis=1)
    cosine = cosine / np.linalg.norm(second, axis=1)
    expected = 100 * spearmanr(cosine, pairs.scores).statistic
    assert report["spearman"]["dev"] == pytest.approx(expected, abs=0.02)
    assert report["dense_heads"] == 0


def write_sts_2017(folder, gold_folder, pairs):
    """Track 5 of STS-2017, with a byte order mark as a Windows editor leaves it."""
    lines = [f"{first}\t{second}\r\n" for first, second in zip(pairs.first, pairs.second)]
    folder.mkdir()
    path = folder / "STS.input.track5.en-en.txt"
    path.write_text("\ufeff" + "".join(lines), "utf-8")
    gold_folder.mkdir(exist_ok=True)
    scores = "".join(f"{score}\n" for score in pairs.scores)
    (gold_folder / "STS.gs.track5.en-en.txt").write_text(scores)
    return path


@pytest.mark.parametrize("gold_folder", ["STS2017.eval.v1.1", "STS2017.gs"])
def test_sts_2017_is_read_with_its_scores(call_main, models_folder, tmp_path, gold_folder):
    pairs = demo.scored_pairs(30, seed=5)
    path = write_sts_2017(tmp_path / "STS2017.eval.v1.1", tmp_path / gold_folder, pairs)
    write_rows(tmp_path / "three.tsv", zip(*pairs))
    given = ("--pairs", path, "--pairs", tmp_path / "three.tsv")
    output = call_main(eval_sts, models_folder / "mean", *given)
    header, _, row = [line.split("|")[2:-1] for line in output.splitlines()]
    assert [cell.strip() for cell in header] == ["track5.en-en", "three", "avg"]
    assert row[0].strip() == row[1].strip()
    expected = common.spearman(load_encoder(models_folder / "mean"), {"mine": pairs})["mine"]
    assert float(row[0]) == pytest.approx(expected, abs=0.006)


def test_pairs_of_a_task_without_a_score_are_left_out(tmp_path):
    (tmp_path / "STS.input.a.txt").write_text("a\tb\nc\td\te\nf\tg\n")
    (tmp_path / "STS.gs.a.txt").write_text("1\n\n3.5\n")
    name, pairs = eval_sts.read_own_pairs(tmp_path / "STS.input.a.txt", 0, 5)
    assert name == "a"
    assert pairs == (("a", "f"), ("b", "g"), (1.0, 3.5))


def test_some_sets_have_an_average_of_their_own(monkeypatch, call_main, models_folder):
    sets = {name: demo.scored_pairs(30, seed) for seed, name in enumerate(eval_sts.TEST_SETS)}
    monkeypatch.setattr(eval_sts, "resolve", lambda name: name)
    monkeypatch.setattr(eval_sts, "read_sts", lambda folder, split: sets)
    five = ["STS12", "STS13", "STS14", "STS15", "STS-B"]  # DistilFACE's Table 2
    output = call_main(eval_sts, models_folder / "mean", "--sets", ",".join(five))
    header, _, row = [line.split("|")[2:-1] for line in output.splitlines()]
    assert [cell.strip() for cell in header] == [*five, "avg"]
    scores = common.spearman(load_encoder(models_folder / "mean"), sets)
    mean = sum(scores[name] for name in five) / 5
    assert float(row[-1]) == pytest.approx(mean, abs=0.006)
    assert mean != pytest.approx(scores["avg"], abs=0.05)


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
