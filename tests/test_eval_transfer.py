"""extras/eval_transfer.py: its protocols against plain loops, its readers, the whole script."""

import json

import numpy as np
import pytest
import torch
from conftest import demo_sentences, write
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold

from extras import eval_transfer
from extras.eval_transfer import Split, fit_pytorch, read_task, score

STRENGTHS = [0.25, 0.5, 1, 2, 4, 8]  # SentEval's values of C


def problem(n, seed):
    """Vectors [n, 6] and two classes of labels [n] that no plane separates."""
    random = np.random.default_rng(seed)
    vectors = (random.normal(size=(n, 6)) * np.linspace(0.05, 1, 6) + 0.3).astype(np.float32)
    return vectors, np.where(vectors @ random.normal(size=6) + random.normal(size=n) > 0.5, 1, 0)


def splits_of(labels, parts, distance=None):
    """Sentences are row numbers of vectors; the second of a pair is `distance` rows on."""
    return {
        name: Split(rows, [i + distance if distance else "" for i in rows], labels[list(rows)])
        for name, rows in parts.items()
    }


def fit(x, y, strength, held_out=None):
    return LogisticRegression(C=strength, max_iter=1000).fit(x, y).predict


def right(predict, x, y):
    return 100 * np.mean(predict(x) == y)


def folds_of(x, y, k):
    for a, b in StratifiedKFold(k, shuffle=True, random_state=1111).split(y, y):
        yield (x[a], y[a]), (x[b], y[b])


def best_of_folds(x, y, penalties, k, fit=fit):
    def sum_of_folds(penalty):
        return sum(right(fit(*a, penalty, b), *b) for a, b in folds_of(x, y, k))

    return fit(x, y, max(penalties, key=sum_of_folds))


CASES = ["SST-2 4 sklearn", "SST-2 6 sklearn", "SST-2 4 pytorch", "SNLI 2 sklearn"]
FITS = dict(sklearn=(4, STRENGTHS, fit), pytorch=(2, [1e-5, 1e-4, 1e-3, 1e-2], fit_pytorch))


@pytest.mark.parametrize("classifier", FITS)
def test_the_outer_fold_takes_no_part_in_the_choice_of_the_penalty(classifier):
    x, y = problem(240, seed=4)
    k, penalties, fit = FITS[classifier]
    pairs = folds_of(x, y, k)
    expected = np.mean([right(best_of_folds(*a, penalties, k, fit), *b) for a, b in pairs])
    splits = splits_of(y, dict(train=range(240)))
    assert score("MR", splits, x, k, classifier) == {"MR": pytest.approx(expected)}


def test_pairs_are_compared_by_difference_and_product_and_mrpc_has_f1():
    vectors, _ = problem(800, seed=9)
    x = np.hstack([np.abs(vectors[:400] - vectors[400:]), vectors[:400] * vectors[400:]])
    noise = np.random.default_rng(9).normal(size=400) / 12
    labels = np.where(x[:, :6].sum(axis=1) + noise < 3, 1, 0)
    predicted = best_of_folds(x[:300], labels[:300], [0.5, 1, 2, 4, 8, 16, 32], 5)(x[300:])
    y = labels[300:]
    f1 = 2 * sum(predicted * y) / (sum(predicted) + sum(y))
    splits = splits_of(labels, dict(train=range(300), test=range(300, 400)), distance=400)
    expected = {"MRPC": 100 * np.mean(predicted == y), "MRPC F1": 100 * f1}
    assert score("MRPC", splits, vectors, 5) == pytest.approx(expected)


@pytest.mark.parametrize("case", CASES)
def test_the_dev_set_chooses_the_penalty_except_for_snli(case):
    task, seed, classifier = case.split()
    x, y = problem(600, int(seed))
    parts = dict(train=range(100), dev=range(100, 300), test=range(300, 500))
    splits = splits_of(y, parts, distance=100 if task == "SNLI" else None)
    scores, (_, penalties, fit) = score(task, splits, x, 10, classifier), FITS[classifier]
    if task == "SNLI":
        u, v = x[:500], x[100:]
        x, penalties = np.hstack([u, v, u * v, np.abs(u - v)]), [1e9]
    train, dev = (x[:100], y[:100]), (x[100:300], y[100:300])
    best = max((fit(*train, c, dev) for c in penalties), key=lambda model: right(model, *dev))
    assert scores == {task: pytest.approx(right(best, x[300:500], y[300:500]))}


def test_a_regression_is_a_loop_over_batches_with_shares_as_targets():
    random, order, n = np.random.default_rng(3), np.random.RandomState(1111), 150
    x, y = random.normal(size=(n, 4)).astype(np.float32), random.uniform(0, 5, n).round(1)
    y[:4] = [0, 0.4, 3.3, 5]
    corners = [([k - 1, k, k + 1], [0, 1, 0]) for k in range(1, 6)]
    targets = np.array([[np.interp(score, *corner) for corner in corners] for score in y])
    assert targets[1:3] == pytest.approx(np.array([[0.4, 0, 0, 0, 0], [0, 0, 0.7, 0.3, 0]]))
    torch.manual_seed(1111)
    layer = torch.nn.Linear(4, 5).double()
    optimizer = torch.optim.Adam(layer.parameters(), weight_decay=0.01)
    for rows in (rows for _ in range(40) for rows in np.split(order.permutation(n), [64, 128])):
        shares = layer(torch.from_numpy(x[rows]).double()).softmax(dim=1)
        optimizer.zero_grad()
        (shares - torch.from_numpy(targets[rows])).square().mean().backward()
        optimizer.step()
    shares = layer(torch.from_numpy(x).double()).softmax(dim=1).detach().numpy()
    expected = [sum(row * [1, 2, 3, 4, 5]) for row in shares]
    assert fit_pytorch(x, y, 0.01, (x, y), 1, 40)(x) == pytest.approx(expected, abs=1e-4)


def test_stalls_are_counted_over_the_whole_training_and_the_best_round_is_kept(monkeypatch):
    x, y = problem(120, seed=4)

    def run(script, stalls=0):
        monkeypatch.setattr(eval_transfer, "pearson", lambda _, y: len(y) == 6 and script.pop(0))
        return fit_pytorch(x, y.astype(float), 0, None, len(script), 3, stalls)(x)

    kept = run(script := [-50, -60, -40, -40, -45, -30, -30, 99], stalls=3)
    assert script == [99]  # the fourth stall ended the training
    assert (kept == run([*range(6)])).all() and (kept != run([*range(5)])).any()


def test_the_second_mean_is_that_of_dses_table(monkeypatch):
    names = [*eval_transfer.TASKS, "MRPC F1", "SICK-R", "SICK-E", "STS-B", "STS-B Spearman"]
    bert_large = [83.5, 88.8, 95.5, 89.1, 87.1, 93.2, 76.4, 83.5, 83.8, 82.2, 68.4, 68.3]
    monkeypatch.setattr(eval_transfer, "score", lambda *_: dict(zip(names, bert_large)))
    monkeypatch.setattr(eval_transfer, "encode", lambda *_: [])
    scores = eval_transfer.score_model("", None, None, {"MR": {}}, 10, "sklearn")
    assert scores["DSE avg"] == pytest.approx(85.15)  # printed: 85.1
    assert scores["avg"] == pytest.approx(sum(bert_large[:7]) / 7)


def test_the_readers_keep_sentevals_order_and_name_a_wrong_file(senteval, fails):
    write(senteval / "SUBJ/subj.subjective", ["a b c", "d", ""])
    write(senteval / "SUBJ/subj.objective", ["e f", "g", "h  i", "j k l"])
    first, _, labels = read_task(senteval, "SUBJ")["train"]  # by length, then label
    assert first == [".", "d", "g", "e f", "h i", "a b c", "j k l"]
    assert labels.tolist() == [0, 0, 1, 1, 1, 0, 1]
    expected = {"TREC": [1, 5, 3], "MRPC": [0, 1, 0], "SICK-E": [0, 1, 2]}
    expected |= dict.fromkeys(["SICK-R", "STS-B"], [0, 0.5, 1])
    for task, labels in expected.items():
        train = read_task(senteval, task)["train"]
        label = dict(zip((text.removesuffix(" \xe9") for text in train.first), train.labels))
        assert [label[text] for text in demo_sentences(3)] == labels
    for name, lines in dict(s1=["a", "b c"], s2=["d e", ""], labels=["neutral"] * 2).items():
        write(senteval / f"SNLI/{name}.dev", lines)
    assert read_task(senteval, "SNLI")["dev"][:2] == (["b c", "a"], [".", "d e"])
    command = (eval_transfer, "no-model", "--senteval", senteval, "--tasks")
    write(senteval / "SNLI/s2.dev", ["one line"])
    assert "labels.dev" in fails(*command, "SNLI")
    (senteval / "SNLI/s1.train").unlink()
    assert "no SNLI/s1.train in it; " in fails(*command, "all")
    write(senteval / "STS/STSBenchmark/sts-dev.csv", ["a\tb\tc\td\t5.5\te\tf"])
    assert "sts-dev.csv:1: 5.5 is not a score from 0 to 5" in fails(*command, "STS-B")


@pytest.mark.slow
def test_all_tasks_are_scored_and_averaged(senteval, models_folder, tmp_path, call_main):
    options = ("--senteval", senteval.parent, "--folds", 2, "--json", tmp_path / "scores.json")
    call_main(eval_transfer, models_folder / "bert", "--device", "cpu", "--tasks", "all", *options)
    (scores,) = json.loads((tmp_path / "scores.json").read_text()).values()
    assert {*eval_transfer.LAYOUTS, "MRPC F1", "avg", "DSE avg"} < set(scores)
