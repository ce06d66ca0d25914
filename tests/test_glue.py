"""support/glue.py: its readers on files in GLUE's and the Hub's layout, its metrics against counts
by hand."""

import numpy as np
import pytest

import common
from support import glue

MRPC = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"


# ---- files


def write_nli(path, labels):
    header = "index\tgenre\tsentence1\tsentence2\tlabel1\tgold_label\n"
    lines = [f'0\tx\tA "boy" runs.\tHe\'s in {path.name}\tneutral\t{label}\n' for label in labels]
    path.parent.mkdir(exist_ok=True)
    path.write_text(header + "".join(lines), "utf-8")


@pytest.fixture
def nli_folder(tmp_path):
    write_nli(tmp_path / "MNLI" / "train.tsv", ["neutral", "-"])
    write_nli(tmp_path / "MNLI" / "dev_matched.tsv", ["entailment"])
    write_nli(tmp_path / "MNLI" / "dev_mismatched.tsv", ["contradiction"])
    write_nli(tmp_path / "SNLI" / "train.tsv", ["contradiction"])
    write_nli(tmp_path / "SNLI" / "dev.tsv", ["contradiction", "-"])
    write_nli(tmp_path / "SNLI" / "test.tsv", ["neutral", "neutral"])
    return tmp_path


def test_nli_is_read_by_its_header_without_pairs_that_annotators_disagree_on(nli_folder):
    sets = glue.read_task(nli_folder, "mnli")
    assert set(sets) == {"train", "dev", "matched", "mismatched"}
    assert sets["train"].labels.tolist() == [1]
    assert sets["train"].first == ['A "boy" runs.']
    assert sets["mismatched"].labels.tolist() == [2]


def test_allnli_joins_mnli_and_snli(nli_folder):
    (nli_folder / "SNLI" / "train.tsv").unlink()
    write_nli(nli_folder / "SNLI" / "train.tsv", ["contradiction", "entailment"])
    sets = glue.read_task(nli_folder, "allnli")
    assert sets["train"].labels.tolist() == [1, 2, 0]
    assert sets["train"].second == ["He's in train.tsv"] * 3
    assert len(sets["snli"].first) == 2
    assert sets["dev"].labels.tolist() == [0, 2]  # of both, as in the authors' code
    assert sets["matched"].labels.tolist() == [0]


def test_a_test_set_without_labels_is_left_out(tmp_path):
    (tmp_path / "QNLI").mkdir()
    header = "index\tquestion\tsentence"
    for split in ("train", "dev"):
        text = f"{header}\tlabel\n0\tWho?\tHe.\tnot_entailment\n"
        (tmp_path / "QNLI" / f"{split}.tsv").write_text(text)
    (tmp_path / "QNLI" / "test.tsv").write_text(f"{header}\n0\tWho?\tHe.\n")
    sets = glue.read_task(tmp_path, "qnli")
    assert set(sets) == {"train", "dev"}
    assert sets["dev"].labels.tolist() == [1]


def test_only_qqps_broken_rows_are_skipped(tmp_path, capsys):
    path = tmp_path / "train.tsv"
    path.write_text("question1\tquestion2\tis_duplicate\nA\nA?\tB?\t1\n")
    assert glue.read_pairs(path, "qqp").first == ["A?"]
    assert capsys.readouterr().err.endswith("rows left out, without two questions: 1\n")
    path.write_text("sentence1\tsentence2\tscore\nA\nA?\tB?\t1\n")
    with pytest.raises(common.DataError, match="train.tsv:2: 1 tab-separated columns, expected 3"):
        glue.read_pairs(path, "stsb")


def test_qqps_rows_with_an_empty_question_are_skipped_and_counted(tmp_path, capsys):
    """GLUE's train.tsv has such rows: "How can I develop android app?" beside nothing."""
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    rows = ["1\t2\t3\tA?\tB?\t1\n", "1\t2\t3\tA?\t\t0\n", "1\t2\t3\t \tB?\t0\n", "1\t2\t3\tA\n"]
    path = tmp_path / "train.tsv"
    path.write_text(header + "".join(rows))
    pairs = glue.read_pairs(path, "qqp")
    assert (pairs.first, pairs.second, pairs.labels.tolist()) == (["A?"], ["B?"], [1])
    printed = capsys.readouterr().err
    assert printed == f"{path}: rows left out, without two questions: 3\n"
    path.write_text(header + rows[0])
    glue.read_pairs(path, "qqp")
    assert capsys.readouterr().err == ""


def test_the_hubs_rows_of_qqp_with_an_empty_question_too(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text1": "A?", "text2": "", "label": 0}\n'
        '{"text1": null, "text2": "B?", "label": 0}\n'
        '{"text1": "A?", "text2": "B?", "label": 0}\n'
    )
    assert glue.read_pairs(path, "qqp").first == ["A?"]
    assert "without two questions: 2" in capsys.readouterr().err
    with pytest.raises(common.DataError, match="a.jsonl:1: label '0' and an empty sentence"):
        glue.read_pairs(path, "mrpc")


def test_the_hubs_json_lines_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text1": "A", "text2": "B", "label": 2}\n{"text1": "C", "text2": "D", "label": 0}\n'
    )
    pairs = glue.read_pairs(path, "mnli")
    assert pairs.labels.tolist() == [2, 0]
    assert (pairs.first, pairs.second) == (["A", "C"], ["B", "D"])
    path.write_text('{"text1": "A", "text2": "B", "label": 3.5}\n')
    assert glue.read_pairs(path, "stsb").labels.tolist() == [3.5]
    path.write_text('{"text1": "A", "text2": "B", "label": -1}\n')
    assert glue.read_pairs(path, "qqp") is None


@pytest.mark.parametrize(
    "task, name, text, expected",
    [
        (
            "mrpc",
            "train.tsv",
            MRPC.replace("Quality", "label") + "1\t1\t2\tA\tB\n",
            "train.tsv:1: no column 'Quality', expected a header with #1 String",
        ),
        (
            "mrpc",
            "train.tsv",
            MRPC + "1\t1\t2\tA\tB\n2\t1\t2\tA\tB\n",
            "train.tsv:3: label '2', expected two sentences and 0 or 1",
        ),
        (
            "mrpc",
            "train.tsv",
            MRPC + "1\t1\t2\tA\n",
            "train.tsv:2: 4 tab-separated columns, expected 5",
        ),
        ("mrpc", "train.tsv", MRPC + "1\t1\t2\tA\t\n", "label '1' and an empty sentence"),
        ("mrpc", "train.tsv", MRPC, "no pairs"),
        (
            "stsb",
            "train.tsv",
            "sentence1\tsentence2\tscore\nA\tB\tnan\n",
            "train.tsv:2: score 'nan' is not a number from 0 to 5",
        ),
        ("mrpc", "a.jsonl", "{\n", "a.jsonl:1: '{', expected JSON"),
        ("mrpc", "a.jsonl", "[1]\n", "a.jsonl:1: '[1]', expected JSON"),
        (
            "mrpc",
            "a.jsonl",
            '{"text1": "A", "text2": "B", "label": 7}\n',
            "a.jsonl:1: label '7'",
        ),
    ],
)
def test_invalid_files_are_named_with_their_line(tmp_path, task, name, text, expected):
    (tmp_path / name).write_text(text)
    with pytest.raises(common.DataError) as error:
        glue.read_pairs(tmp_path / name, task)
    assert expected in str(error.value)


def test_a_missing_file_is_named_and_the_demo_has_scores_alone(tmp_path):
    with pytest.raises(common.DataError, match="MRPC/train.tsv: no such file, expected a folder"):
        glue.read_task(tmp_path, "mrpc")
    with pytest.raises(common.DataError, match="--task mrpc: the demo has scored pairs"):
        glue.read_task("demo", "mrpc")
    sets = glue.read_task("demo", "stsb")
    assert {name: len(pairs.first) for name, pairs in sets.items()} == {
        "train": glue.DEMO_PAIRS,
        "dev": 500,
        "test": 1000,
    }
    assert sets["dev"].labels.dtype == np.float32


def test_a_classifiers_labels_are_put_in_the_tasks_order():
    names = {"CONTRADICTION": 0, "neutral": 1, "entailment": 2}
    assert glue.class_positions("mnli", names) == [2, 1, 0]
    assert glue.class_positions("mnli", {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}) == [0, 1, 2]
    assert glue.class_positions("stsb", None) == [0]


# ---- metrics


def test_metrics_are_those_counted_by_hand():
    logits = np.array([[0, 1], [1, 0], [0, 1], [0, 1], [1, 0.0]])
    labels = np.array([1, 1, 0, 1, 0])  # true positives 2, false positive 1, false negative 1
    precision = recall = 2 / 3
    result = glue.metrics(logits, labels, "mrpc")
    assert result["accuracy"] == pytest.approx(60)
    assert result["F1"] == pytest.approx(100 * 2 * precision * recall / (precision + recall))
    assert glue.metrics(logits, labels, "qnli") == {"accuracy": pytest.approx(60)}


def test_correlations_are_those_of_their_formulas():
    labels = np.array([0.0, 1.0, 2.0, 5.0])
    logits = np.array([[0.0], [3.0], [2.0], [9.0]])  # one inversion of four ranks: rho = 0.8
    result = glue.metrics(logits, labels, "stsb")
    assert result["Spearman"] == pytest.approx(80)
    x, y = logits[:, 0] - logits.mean(), labels - labels.mean()
    pearson = (x * y).sum() / ((x**2).sum() * (y**2).sum()) ** 0.5
    assert result["Pearson"] == pytest.approx(100 * pearson)


@pytest.mark.slow
def test_the_published_score_of_minilm_from_glues_own_files(shared_data, teacher):
    """The Spearman correlation of its cosine on STS-B's test set is 82.03."""
    sets = glue.read_task(shared_data / "glue", "stsb")
    u = common.encode_sentences(teacher, sets["test"].first)
    v = common.encode_sentences(teacher, sets["test"].second)
    cosine = (u * v).sum(axis=1, keepdims=True)
    scores = glue.metrics(cosine, sets["test"].labels, "stsb")
    assert scores["Spearman"] == pytest.approx(82.03, abs=0.01)


def test_mrpc_has_as_many_pairs_as_its_authors_say(shared_data):
    sets = glue.read_task(shared_data / "glue", "mrpc")
    counts = {name: len(pairs.first) for name, pairs in sets.items()}
    assert counts == {"train": 3668, "dev": 408, "test": 1725}


def labeled(labels):
    texts = [str(number) for number in range(len(labels))]
    return glue.Pairs(texts, texts, np.array(labels))


def test_the_cosine_threshold_is_the_best_on_dev_for_every_set():
    dev = np.array([0.1, 0.2, 0.3, 0.6, 0.7, 0.8])
    logits = glue.cosine_logits(
        {"dev": dev, "test": np.array([0.25, 0.65])}, np.array([0, 0, 0, 1, 1, 1]), "mrpc"
    )
    assert logits["dev"].argmax(axis=1).tolist() == [0, 0, 0, 1, 1, 1]
    assert logits["test"].argmax(axis=1).tolist() == [0, 1]
    assert glue.cosine_logits({"dev": dev}, np.zeros(6, int), "qnli") == {}
    assert glue.cosine_logits({"dev": dev}, None, "stsb")["dev"].tolist() == dev[:, None].tolist()


def test_the_mean_is_that_of_the_test_sets_or_else_of_dev():
    right = labeled([1, 1, 0, 0])
    wrong_once = labeled([1, 1, 1, 0])

    def predict(pairs):
        return np.array([[0, 1], [0, 1], [1, 0], [1, 0.0]])

    both = glue.Evaluation("qnli", {"dev": wrong_once, "test": right})
    assert both.scores(predict) == {"dev accuracy": 75, "test accuracy": 100, "mean": 100}
    assert both.dev_score(predict) == 75
    dev_alone = glue.Evaluation("qnli", {"dev": wrong_once})
    assert dev_alone.scores(predict) == {"dev accuracy": 75, "mean": 75}
    assert dev_alone.cosine_scores(lambda pairs: np.ones(4)) == {}


def test_degradation_is_the_share_of_the_teachers_mean_that_is_lost():
    scores = {"teacher": {"mean": 80.0}, "student": {"mean": 76.0}}
    glue.add_degradation(scores, of="teacher")
    assert scores["teacher"]["degradation %"] == 0
    assert scores["student"]["degradation %"] == pytest.approx(5)


def test_the_average_over_tasks_has_the_rows_that_every_task_has():
    mrpc = {"before": {"mean": 50.0}, "teacher": {"mean": 80.0}, "student": {"mean": 76.0}}
    qnli = {"teacher": {"mean": 90.0}, "student": {"mean": 77.0}}
    result = glue.average({"mrpc": mrpc, "qnli": qnli})
    assert list(result) == ["teacher", "student"]
    student = {"mrpc": 76, "qnli": 77, "mean": 76.5, "degradation %": pytest.approx(10)}
    assert result["student"] == student
    no_teacher = glue.average({"mrpc": {"student": {"mean": 76.0}}})
    assert no_teacher == {"student": {"mrpc": 76, "mean": 76}}
