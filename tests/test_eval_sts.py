"""eval_sts.py: DESIGN's reference numbers on the real data, a user's own pairs, what it refuses."""
import json

import pytest

import common
import demo
import eval_sts

REFERENCE = {  # measured with independent code; the first row agrees with the figures published for the model
    None: (72.37, 80.60, 75.59, 85.39, 78.99, 82.03, 77.15, 78.87), "1,3,5": (58.52, 69.46, 64.93, 78.44, 75.34, 69.76, 67.31, 69.11)}


@pytest.mark.parametrize("layers", [None, "1,3,5"])
def test_reference_rows(run, shared_data, tmp_path, layers):
    more = ("--student-layers", layers) if layers else ()
    process = run("eval_sts.py", common.MINILM, "--senteval", shared_data / "senteval/data/downstream", "--json", tmp_path / "scores.json", *more,
                  OMP_NUM_THREADS="2")
    assert process.returncode == 0, process.stderr[-2000:]
    (report,) = json.loads((tmp_path / "scores.json").read_text()).values()
    assert [round(value, 2) for value in report["spearman"].values()] == pytest.approx(REFERENCE[layers], abs=0.0101)
    assert report["pooling"] == "mean" and report["normalize"] and report["dimensions"] == 384
    assert f"{report['spearman']['avg']:.2f}" in process.stdout.splitlines()[-1]


def test_dev_split(run, shared_data):
    process = run("eval_sts.py", common.MINILM, "--senteval", shared_data / "senteval", "--split", "dev", OMP_NUM_THREADS="2")
    assert "STS-B dev" in process.stdout and "86.72" in process.stdout


def test_own_pairs_several_models_one_row_each(run, models_folder, files, tmp_path):
    scaled = tmp_path / "mine.tsv"
    pairs = demo.graded(30, seed=5)
    scaled.write_text("".join(f"{a}\t{b}\t{score / 5}\n" for a, b, score in zip(*pairs)), "utf-8")
    process = run("eval_sts.py", models_folder / "mean", models_folder / "pooler", "--pairs", scaled, "--pairs", files / "dev.tsv")
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert len(lines) == 4 and all(name in lines[0] for name in ("mine", "dev", "avg"))
    for line, name in zip(lines[2:], ("mean", "pooler")):
        expected = common.spearman(common.load_encoder(models_folder / name), {"mine": pairs})["mine"]
        assert float(line.split("|")[2]) == pytest.approx(expected, abs=0.006)


def test_refusals(fails, models_folder, tmp_path):
    (tmp_path / "a.tsv").write_text("a\tb\t0.5\nc\td\t3\n")
    assert "a.tsv:2: score '3', expected a number from 0 to 1" in fails(eval_sts, models_folder / "mean", "--pairs", tmp_path / "a.tsv", "--score-range", 0, 1)
    assert "expected a whole model" in fails(eval_sts, tmp_path, "--demo")
    assert "no STS/STSBenchmark" in fails(eval_sts, models_folder / "mean", "--senteval", tmp_path)
    assert "MODEL" in fails(eval_sts)
    assert "expected different ones of its layers 0 to 3" in fails(eval_sts, models_folder / "mean", "--demo", "--student-layers", "7")


def test_translation_accuracy_is_that_of_plain_loops(run, models_folder, tmp_path):
    pairs = [(text, " ".join(text.split()[2:])) for text in demo.sentences(60)] + [("a boy", "a girl"), ("a lad", "a girl")]
    (tmp_path / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs), "utf-8")
    process = run("eval_sts.py", models_folder / "mean", "--translations", tmp_path / "pairs.tsv", "--json", tmp_path / "scores.json")
    assert process.returncode == 0, process.stderr
    (report,) = json.loads((tmp_path / "scores.json").read_text()).values()
    encoder = common.load_encoder(models_folder / "mean").eval()
    first, second = (common.encode(encoder, common.Tokens(encoder, side), "cpu").astype(float) for side in map(list, zip(*pairs)))
    for (name, value), (queries, answers, side) in zip(report["accuracy"].items(), ((first, second, 1), (second, first, 0))):
        right = 0
        for i, query in enumerate(queries):
            cosines = [float(query @ answer) / (sum(query * query) * sum(answer * answer)) ** 0.5 for answer in answers]
            right += pairs[max(range(len(pairs)), key=cosines.__getitem__)][side] == pairs[i][side]
        assert value == pytest.approx(100 * right / len(pairs)) and 0 < value < 100, name


def test_a_translation_file_with_one_column(fails, models_folder, tmp_path):
    (tmp_path / "pairs.tsv").write_text("a boy\tein Junge\na girl\n", "utf-8")
    assert "pairs.tsv:2: 1 tab-separated columns" in fails(eval_sts, models_folder / "mean", "--translations", tmp_path / "pairs.tsv")
