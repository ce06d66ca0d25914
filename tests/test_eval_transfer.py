"""extras/eval_transfer.py: its protocols against plain loops, its readers, the whole script."""

import json

import numpy as np
import pytest
from conftest import demo_sentences
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold

from extras import eval_transfer
from extras.eval_transfer import Split

STRENGTHS = [0.25, 0.5, 1, 2, 4, 8]  # SentEval's values of C
STRENGTHS_OF_TRAINING_FOLDS = [0.5, 1, 2, 4, 8, 16, 32]
QUESTIONS = ("DESC", "NUM", "HUM")


def problem(n, seed):
    """Vectors [n, 6] and two classes of labels [n] that no plane separates."""
    random = np.random.default_rng(seed)
    vectors = random.normal(size=(n, 6)).astype(np.float32) * np.linspace(0.05, 1, 6) + 0.3
    scores = vectors @ random.normal(size=6) + random.normal(size=n)
    return vectors, np.where(scores > 0.5, "1", "0")


def splits_of(labels, parts, distance=None):
    """Sentences are row numbers of vectors; the second of a pair is `distance` rows on."""
    splits = {}
    for name, rows in parts.items():
        second = [i + distance for i in rows] if distance else [""] * len(rows)
        splits[name] = Split(rows, second, labels[list(rows)])
    return splits


def fit(x, y, strength):
    return LogisticRegression(C=strength, max_iter=1000).fit(x, y)


def folds_of(y, k):
    return StratifiedKFold(k, shuffle=True, random_state=1111).split(y, y)


def best_of_folds(x, y, strengths, k):
    """SentEval's inner loop."""
    right = [[fit(x[a], y[a], c).score(x[b], y[b]) for a, b in folds_of(y, k)] for c in strengths]
    return fit(x, y, strengths[int(np.mean(right, axis=1).argmax())])


def test_the_outer_fold_takes_no_part_in_the_choice_of_c():
    vectors, labels = problem(240, seed=4)
    right = []
    for a, b in folds_of(labels, 4):
        model = best_of_folds(vectors[a], labels[a], STRENGTHS, 4)
        right.append(model.score(vectors[b], labels[b]))
    scores = eval_transfer.score("MR", splits_of(labels, dict(train=range(240))), vectors, 4)
    assert scores == {"MR": pytest.approx(100 * np.mean(right))}


def test_pairs_are_compared_by_difference_and_product_and_mrpc_has_f1():
    vectors, _ = problem(800, seed=9)
    u, v = vectors[:400], vectors[400:]
    x = np.hstack([np.abs(u - v), u * v])
    noise = np.random.default_rng(9).normal(size=400)
    labels = np.where(x[:, :6].sum(axis=1) + noise < 3, "1", "0")
    y = labels[300:]
    model = best_of_folds(x[:300], labels[:300], STRENGTHS_OF_TRAINING_FOLDS, 5)
    predicted = model.predict(x[300:])
    f1 = 2 * sum((predicted == "1") & (y == "1")) / (sum(predicted == "1") + sum(y == "1"))
    expected = {"MRPC": 100 * np.mean(predicted == y), "MRPC F1": 100 * f1}
    splits = splits_of(labels, dict(train=range(300), test=range(300, 400)), distance=400)
    assert eval_transfer.score("MRPC", splits, vectors, 5) == pytest.approx(expected)


@pytest.mark.parametrize("seed", [4, 11])  # the best C is at either end
def test_the_dev_set_of_sst_chooses_c(seed):
    vectors, labels = problem(500, seed)
    models = [fit(vectors[:100], labels[:100], strength) for strength in STRENGTHS]
    best = max(models, key=lambda model: model.score(vectors[100:300], labels[100:300]))
    expected = best.score(vectors[300:], labels[300:])
    parts = dict(train=range(100), dev=range(100, 300), test=range(300, 500))
    scores = eval_transfer.score("SST-2", splits_of(labels, parts), vectors, 10)
    assert scores == {"SST-2": pytest.approx(100 * expected)}


def write(path, lines, encoding="utf-8"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(line + "\n" for line in lines).encode(encoding))


@pytest.fixture
def senteval(tmp_path):
    """A small SentEval folder: a header, a byte order mark, Latin-1 and a blank line."""
    folder, texts = tmp_path / "data" / "downstream", demo_sentences(120)
    for negative in ("MR/rt-polarity.neg", "CR/custrev.neg", "MPQA/mpqa.neg"):
        write(folder / negative, texts[40:80])
        write(folder / negative.replace("neg", "pos"), [*texts[:40], ""])
    write(folder / "SUBJ/subj.subjective", texts[40:80])
    write(folder / "SUBJ/subj.objective", texts[:40])
    for split, part in dict(train=texts[:80], dev=texts[80:100], test=texts[100:]).items():
        lines = [f"{text}\t{i % 2}" for i, text in enumerate(part)]
        write(folder / f"SST/binary/sentiment-{split}", lines)
    questions = [f"{QUESTIONS[i % 3]}:x {text} \xe9" for i, text in enumerate(texts)]
    write(folder / "TREC/train_5500.label", questions[:90], "latin-1")
    write(folder / "TREC/TREC_10.label", questions[90:], "latin-1")
    rows = [f"{i % 2}\t1\t2\t{text}\t{text[::-1]}" for i, text in enumerate(texts)]
    for split, part in dict(train=rows[:80], test=rows[80:]).items():
        write(folder / f"MRPC/msr_paraphrase_{split}.txt", ["\ufeffQuality\t#1 ID\t...", *part])
    return folder


def test_the_readers_keep_sentevals_order_latin_1_and_no_header(senteval):
    write(senteval / "SUBJ/subj.subjective", ["a b c", "d", ""])
    write(senteval / "SUBJ/subj.objective", ["e f", "g", "h  i", "j k l"])
    train = eval_transfer.read_task(senteval, "SUBJ")["train"]
    assert train.first == [".", "d", "g", "e f", "h  i", "a b c", "j k l"]  # by length, then label
    assert train.labels.tolist() == list("0011101")
    train = eval_transfer.read_task(senteval, "TREC")["train"]
    label = dict(zip(train.first, train.labels))
    assert [label[f"{text} \xe9"] for text in demo_sentences(3)] == list(QUESTIONS)
    train = eval_transfer.read_task(senteval, "MRPC")["train"]
    assert sorted(train.second) == sorted(text[::-1] for text in demo_sentences(80))


@pytest.mark.slow
def test_all_tasks_are_scored_and_averaged(senteval, models_folder, tmp_path, call_main):
    output = tmp_path / "scores.json"
    options = ("--senteval", senteval.parent, "--folds", 2, "--device", "cpu", "--json", output)
    printed = call_main(eval_transfer, models_folder / "bert", models_folder / "cls", *options)
    assert len(printed.splitlines()) == 4
    first, second = json.loads(output.read_text()).values()
    assert list(first) == [*eval_transfer.TASKS, "MRPC F1", "avg"]
    assert first["avg"] == pytest.approx(np.mean([first[task] for task in eval_transfer.TASKS]))
    assert first != second
