"""eval_transfer.py: its classifier and protocols against scikit-learn in plain loops, its readers.

scikit-learn is what SentEval itself uses.
"""

import json

import numpy as np
import pytest
import torch
from scipy.stats import rankdata
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.model_selection import StratifiedKFold

import common
import eval_transfer
from eval_transfer import Split
from support import demo
from support.encoder import load_encoder

STRENGTHS = [2.0**power for power in range(-2, 4)]
STRENGTHS_OF_TRAINING_FOLDS = [2.0**power for power in range(-1, 6)]


def problem(n, d, classes, seed=0):
    """Features and labels that no plane separates."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(n, d)) * np.linspace(0.05, 1, d) + 0.3
    scores = features @ random.normal(size=(d, classes))
    scores = scores + 0.7 * random.normal(size=(n, classes)) + np.linspace(0, 1, classes)
    return features.astype(np.float32), scores.argmax(1)


def look_up(vectors):
    """The `embed` of score(), for sentences that are row numbers."""
    return lambda rows: torch.tensor(vectors[list(rows)])


# --------------------------------------------------------------------------------------------------
# SentEval's loops, with scikit-learn
# --------------------------------------------------------------------------------------------------


def scikit(features, labels, strength):
    return LogisticRegression(C=strength, max_iter=5000, tol=1e-9).fit(features, labels)


def scikit_folds(labels, k):
    fold = np.zeros(len(labels), int)
    split = StratifiedKFold(k, shuffle=True, random_state=1111).split(labels, labels)
    for i, (_, rows) in enumerate(split):
        fold[rows] = i
    return fold


def best_strength(features, labels, strengths, k, fit=scikit):
    """SentEval's inner loop."""
    fold = scikit_folds(labels, k)
    means = []
    for strength in strengths:
        scores = []
        for i in range(k):
            model = fit(features[fold != i], labels[fold != i], strength)
            scores.append(model.score(features[fold == i], labels[fold == i]))
        means.append(round(100 * np.mean(scores), 2))
    return strengths[int(np.argmax(means))]


# --------------------------------------------------------------------------------------------------
# The classifier
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 4])
def test_logistic_regression_is_scikit_learns(classes):
    """Three problems at once, each with its own rows and its own C."""
    features, labels = problem(600, 20, classes)
    rows = np.random.default_rng(1).random((600, 3)) < 0.7
    strengths = [0.25, 1.0, 32.0]
    weights, bias = eval_transfer.logistic_regression(
        torch.tensor(features), torch.tensor(labels), torch.tensor(rows).float(), strengths
    )
    predicted = eval_transfer.predict(torch.tensor(features), weights, bias).numpy()
    for i, strength in enumerate(strengths):
        theirs = scikit(features[rows[:, i]], labels[rows[:, i]], strength)
        tolerance = 0.02 * np.abs(theirs.coef_).max()
        assert np.allclose(weights[:, :, i].numpy(), theirs.coef_, atol=tolerance)
        intercept = bias[:, 0, i].numpy()
        expected = theirs.intercept_
        if classes > 2:  # only their differences matter
            intercept = intercept - intercept.mean()
            expected = expected - expected.mean()
        assert np.allclose(intercept, expected, atol=0.02)
        assert (predicted[:, i] == theirs.predict(features)).mean() > 0.995


def test_repeated_features_and_a_constant_one_are_no_problem():
    features, labels = problem(300, 6, 2)
    features = np.hstack([features, features, np.ones((300, 1), np.float32)])
    weights, _ = eval_transfer.logistic_regression(
        torch.tensor(features), torch.tensor(labels), torch.ones(300, 1), [8.0]
    )
    expected = scikit(features, labels, 8.0).coef_[0]
    assert np.allclose(weights[0, :, 0].numpy(), expected, atol=0.02)


@pytest.mark.parametrize(
    "k, counts",
    [
        (5, [50, 23, 7]),
        (10, [100, 131]),
        (10, [86, 1162, 1250, 1223, 835, 896]),
        (3, [3, 4]),
    ],
)
def test_folds_are_scikit_learns_row_by_row(k, counts):
    """Also where the classes do not appear in the order of their numbers."""
    labels = np.random.default_rng(k).permutation(np.arange(len(counts)).repeat(counts))
    assert eval_transfer.folds(labels, k).tolist() == scikit_folds(labels, k).tolist()


def test_c_is_chosen_by_accuracy_to_two_decimals(monkeypatch):
    """Equal to two decimals, so the smaller C.

    One hit more in a fold of 151 rows is 0.002 points of the mean behind one more in a fold of 150.
    """
    labels = torch.tensor([0] * 150 + [1] * 151)
    fold = eval_transfer.folds(labels.numpy(), 2)
    sizes = np.bincount(fold)
    assert sorted(sizes) == [150, 151]
    in_large = np.flatnonzero(fold == sizes.argmax())[0]
    in_small = np.flatnonzero(fold == sizes.argmin())[0]
    predicted = 1 - labels[:, None].repeat(1, 6)  # all wrong: [n, 3 fits of 2 strengths]
    predicted[in_large, ::2] = labels[in_large]
    predicted[in_small, 1::2] = labels[in_small]
    numbers = torch.arange(6)[None, None]
    monkeypatch.setattr(eval_transfer, "logistic_regression", lambda *_: (numbers, numbers))
    monkeypatch.setattr(eval_transfer, "predict", lambda *_: predicted)
    weights, _ = eval_transfer.chosen_by_folds(torch.zeros(301, 1), labels, [1.0, 2.0], 2)
    assert weights.item() == 4  # the fit to all rows, the first strength


# --------------------------------------------------------------------------------------------------
# The protocols
# --------------------------------------------------------------------------------------------------


def test_folds_within_folds():
    """MR, CR, SUBJ, MPQA: the outer test fold takes no part in the choice of C."""
    features, labels = problem(240, 6, 2, seed=3)
    fold = scikit_folds(labels, 4)
    scores = []
    for i in range(4):
        x, y = features[fold != i], labels[fold != i]
        model = scikit(x, y, best_strength(x, y, STRENGTHS, 4))
        scores.append(model.score(features[fold == i], labels[fold == i]))
    splits = {"train": Split(range(240), None, labels)}
    ours = eval_transfer.score("MR", splits, look_up(features), 4)
    assert ours == {"MR": pytest.approx(100 * np.mean(scores), abs=0.5)}


def test_pairs_with_a_test_set_and_f1():
    """MRPC: |u - v|, u o v; folds of the training set choose C."""
    vectors, _ = problem(800, 5, 2)
    u, v = vectors[:400], vectors[400:]
    noise = np.random.default_rng(0).normal(size=400)
    labels = (np.abs(u - v).sum(1) + noise < 3).astype(int)
    x = np.hstack([np.abs(u - v), u * v])
    strength = best_strength(x[:300], labels[:300], STRENGTHS_OF_TRAINING_FOLDS, 5)
    theirs = scikit(x[:300], labels[:300], strength).predict(x[300:])
    splits = {
        "train": Split(range(300), range(400, 700), labels[:300]),
        "test": Split(range(300, 400), range(700, 800), labels[300:]),
    }
    ours = eval_transfer.score("MRPC", splits, look_up(vectors), 5)
    expected = 100 * (theirs == labels[300:]).mean()
    assert ours["MRPC"] == pytest.approx(expected, abs=1.01)  # one pair of a hundred
    assert ours["MRPC F1"] == pytest.approx(100 * f1_score(labels[300:], theirs), abs=1.5)


@pytest.mark.parametrize("task", ["SST-2", "SNLI"])
def test_a_dev_set_chooses_c_and_test_is_scored_once(task):
    vectors, labels = problem(500, 6, 3)
    rows = {"train": range(300), "dev": range(300, 400), "test": range(400, 500)}
    x, y, splits = {}, {}, {}
    for split, first in rows.items():
        second = first[::-1]
        u, v = vectors[list(first)], vectors[list(second)]
        y[split] = labels[list(first)]
        if task == "SNLI":
            x[split] = np.hstack([u, v, u * v, np.abs(u - v)])
            splits[split] = Split(first, second, y[split])
        else:
            x[split] = u
            splits[split] = Split(first, None, y[split])
    strengths = [1e9] if task == "SNLI" else STRENGTHS
    models = [scikit(x["train"], y["train"], strength) for strength in strengths]
    best = models[int(np.argmax([model.score(x["dev"], y["dev"]) for model in models]))]
    ours = eval_transfer.score(task, splits, look_up(vectors), 10)
    assert ours == {task: pytest.approx(100 * best.score(x["test"], y["test"]), abs=1.01)}


@pytest.mark.parametrize(
    "task, names, strengths",
    [
        ("MR", "train", STRENGTHS),
        ("CR", "train", STRENGTHS),
        ("SST-2", "train dev test", STRENGTHS),
        ("SICK-E", "train dev test", STRENGTHS),
        ("TREC", "train test", STRENGTHS_OF_TRAINING_FOLDS),
        ("MRPC", "train test", STRENGTHS_OF_TRAINING_FOLDS),
        ("SNLI", "train dev test", [1e9]),
    ],
)
def test_the_values_of_c_are_sentevals(monkeypatch, task, names, strengths):
    vectors, labels = problem(60, 4, 2)
    fit = eval_transfer.logistic_regression
    tried = set()

    def watched(features, labels, rows, strengths):
        tried.update(strengths)
        return fit(features, labels, rows, strengths)

    monkeypatch.setattr(eval_transfer, "logistic_regression", watched)
    second = range(60) if task in ("SICK-E", "MRPC", "SNLI") else None
    splits = {name: Split(range(60), second, labels) for name in names.split()}
    eval_transfer.score(task, splits, look_up(vectors), 3)
    assert tried == set(strengths)


class RelatednessInNumpy:
    """SentEval's loop in float64: the softmax's gradient, Adam and the stopping rule by hand."""

    def __init__(self, dimension):
        start = torch.nn.Linear(dimension, 5)
        weight = start.weight.detach().double().numpy()
        bias = start.bias.detach().double().numpy()
        self.w = np.hstack([weight, bias[:, None]])
        self.m = np.zeros_like(self.w)
        self.v = np.zeros_like(self.w)
        self.step = 0

    def probabilities(self, x):
        scores = np.exp(np.hstack([x, np.ones((len(x), 1))]) @ self.w.T)
        return scores / scores.sum(1, keepdims=True)

    def update(self, x, target):
        p = self.probabilities(x)
        d = 2 * (p - target) / p.size
        d = p * (d - (d * p).sum(1, keepdims=True))
        gradient = d.T @ np.hstack([x, np.ones((len(x), 1))])
        self.step += 1
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient**2
        root = np.sqrt(self.v / (1 - 0.999**self.step)) + 1e-8
        self.w = self.w - 0.001 * (self.m / (1 - 0.9**self.step)) / root

    def pearson(self, x, y):
        return 100 * np.corrcoef(self.probabilities(x) @ np.arange(1, 6), y)[0, 1]

    def spearman(self, x, y):
        """Pearson of the ranks."""
        predicted = self.probabilities(x) @ np.arange(1, 6)
        return 100 * np.corrcoef(predicted.argsort().argsort(), rankdata(y))[0, 1]

    def train(self, x, y):
        """-> the test scores that count, the number of epochs."""
        target = spread(y["train"])
        idle, best, test, epochs = 0, -1, None, 0
        while idle < 4 and epochs <= 1000:
            for _ in range(50):
                for rows in torch.randperm(len(target)).split(64):
                    self.update(x["train"][rows], target[rows])
            epochs += 50
            dev = self.pearson(x["dev"], y["dev"])
            if dev > best:
                best = dev
                test = self.pearson(x["test"], y["test"]), self.spearman(x["test"], y["test"])
            else:
                idle += 1
        return test, epochs


def spread(scores):
    """Tai et al.: score y is y - floor(y) of grade floor(y) + 1, the rest of floor(y)."""
    target = np.zeros((len(scores), 5))
    for i, score in enumerate(scores):
        floor = int(np.floor(score))
        if floor + 1 <= 5:
            target[i, floor] = score - floor
        if floor >= 1:
            target[i, floor - 1] = floor - score + 1
    return target


@pytest.mark.slow
@pytest.mark.parametrize("dimension, last", [(4, 1050), (12, 450)])  # ended by its limit, by dev
def test_relatedness_is_sentevals_loop(monkeypatch, dimension, last):
    random = np.random.default_rng(1)
    x, y = {}, {}
    for split, n in dict(train=100, dev=30, test=40).items():
        x[split] = random.normal(size=(n, dimension))
    for split, rows in x.items():
        score = 2.5 + rows[:, 0] - 0.7 * rows[:, 1] + random.normal(size=len(rows))
        y[split] = np.clip(score, 0, 5)
    torch.manual_seed(1111)
    expected, epochs = RelatednessInNumpy(dimension).train(x, y)
    orders = []
    randperm = torch.randperm

    def watched(*given, **named):
        orders.append(given)
        return randperm(*given, **named)

    monkeypatch.setattr(torch, "randperm", watched)
    features = {split: torch.tensor(rows).float() for split, rows in x.items()}
    assert eval_transfer.relatedness(features, y) == pytest.approx(expected, abs=1e-3)
    assert len(orders) == epochs == last


# --------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------

ENTAILMENT = ("ENTAILMENT", "NEUTRAL", "CONTRADICTION")
QUESTIONS = ("DESC", "NUM", "HUM")


def write(path, lines, encoding="utf-8"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(line + "\n" for line in lines).encode(encoding))


def write_single_sentences(root, sentences):
    for name in ("MR/rt-polarity", "CR/custrev", "MPQA/mpqa"):
        write(root / f"{name}.pos", sentences[:40] + [""])
        write(root / f"{name}.neg", sentences[40:80])
    write(root / "SUBJ/subj.objective", sentences[:40])
    write(root / "SUBJ/subj.subjective", sentences[40:80])
    splits = dict(train=sentences[:80], dev=sentences[80:100], test=sentences[100:])
    for split, part in splits.items():
        lines = [f"{text}\t{i % 2}" for i, text in enumerate(part)]
        write(root / f"SST/binary/sentiment-{split}", lines)
    questions = [f"{QUESTIONS[i % 3]}:x {text}" for i, text in enumerate(sentences)]
    latin = [f"{question} \xe9" for question in questions[:90]]
    write(root / "TREC/train_5500.label", latin, "latin-1")
    write(root / "TREC/TREC_10.label", questions[90:])


def write_pairs(root, pairs):
    for split, part in dict(train=pairs[:40], test=pairs[40:]).items():
        lines = ["\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
        lines += [f"{int(score > 2.5)}\t1\t2\t{a}\t{b}" for a, b, score in part]
        write(root / f"MRPC/msr_paraphrase_{split}.txt", lines)
    splits = dict(train=pairs[:30], dev=pairs[30:40], test=pairs[40:])
    sick_names = dict(train="train", dev="trial", test="test_annotated")
    for split, part in splits.items():
        sick = ["pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment"]
        benchmark, labels = [], []
        for i, (a, b, score) in enumerate(part):
            sick.append(f"{i}\t{a}\t{b}\t{score}\t{ENTAILMENT[i % 3]}")
            benchmark.append(f"x\tx\t2017\t{i}\t{score}\t{a}\t{b}")
            labels.append(ENTAILMENT[i % 3].lower())
        write(root / f"SICK/SICK_{sick_names[split]}.txt", sick)
        write(root / f"STS/STSBenchmark/sts-{split}.csv", benchmark)
        write(root / f"SNLI/s1.{split}", [a for a, _, _ in part])
        write(root / f"SNLI/s2.{split}", [b for _, b, _ in part])
        write(root / f"SNLI/labels.{split}", labels)


@pytest.fixture
def senteval(tmp_path):
    """A small SentEval folder with SNLI's training set, laid out as the real one.

    It has headers, a byte order mark, Latin-1 and empty lines.
    """
    write_single_sentences(tmp_path, demo.sentences(120))
    write_pairs(tmp_path, list(zip(*demo.scored_pairs(60, seed=3))))
    return tmp_path


def test_readers_keep_latin_1_and_number_the_classes_alike_in_all_splits(senteval):
    trec = eval_transfer.read_task(senteval, "TREC")
    label = {}
    for split in trec.values():
        label.update(zip(split.first, split.labels))
    sentences = demo.sentences(120)
    expected = [0, 2, 1]  # DESC, NUM, HUM
    assert [label[f"{text} \xe9"] for text in sentences[:3]] == expected
    assert [label[text] for text in sentences[90:93]] == expected


def test_a_header_is_no_row(senteval):
    assert len(eval_transfer.read_task(senteval, "MRPC")["train"].first) == 40


def test_rows_come_by_length_then_by_label(tmp_path):
    write(tmp_path / "SUBJ/subj.subjective", ["a b c", "d", ""])
    write(tmp_path / "SUBJ/subj.objective", ["e f", "g", "h  i", "j k l"])
    train = eval_transfer.read_task(tmp_path, "SUBJ")["train"]
    assert train.first == ["", "d", "g", "e f", "h  i", "a b c", "j k l"]
    assert train.labels.tolist() == [0, 0, 1, 1, 1, 0, 1]


def test_rows_of_pairs_come_by_both_lengths(tmp_path):
    lines = ["header", "1\t1\t1\ta b\tc d", "1\t1\t1\ta b\tc", "0\t1\t1\te f\tg h"]
    for split in ("train", "test"):
        write(tmp_path / f"MRPC/msr_paraphrase_{split}.txt", lines)
    train = eval_transfer.read_task(tmp_path, "MRPC")["train"]
    assert train.first == ["a b", "e f", "a b"]
    assert train.second == ["c", "g h", "c d"]


@pytest.mark.parametrize(
    "name, line, text, expected",
    [
        ("TREC/train_5500.label", 3, "WHO is this", ":3: expected CLASS:kind question"),
        ("SST/binary/sentiment-dev", 2, "no label", ":2: expected sentence, tab, 0 or 1"),
        ("MRPC/msr_paraphrase_test.txt", 4, "1\t2\t3\tonly one", ":4: expected 0 or 1, two num"),
        (
            "SICK/SICK_trial.txt",
            5,
            "9\ta\tb\t3\tMAYBE",
            ":5: expected number, two sentences, score",
        ),
        ("SNLI/labels.dev", 6, "-", ":6: expected entailment, neutral or contradiction"),
    ],
)
def test_a_bad_line_is_named(senteval, models_folder, fails, name, line, text, expected):
    lines = (senteval / name).read_bytes().split(b"\n")
    lines[line - 1] = text.encode()
    (senteval / name).write_bytes(b"\n".join(lines))
    message = fails(eval_transfer, models_folder / "bert", "--senteval", senteval)
    assert f"{senteval / name}{expected}" in message


def test_files_of_unequal_length(senteval):
    write(senteval / "SNLI/s2.test", ["one line"])
    expected = "labels.test:20: expected entailment, neutral or contradiction, one for each line"
    with pytest.raises(common.DataError, match=expected):
        eval_transfer.read_task(senteval, "SNLI")


def test_a_file_without_rows_or_without_a_file(senteval):
    write(senteval / "MRPC/msr_paraphrase_train.txt", ["header"])
    with pytest.raises(common.DataError, match="msr_paraphrase_train.txt: no rows, expected 0 or"):
        eval_transfer.read_task(senteval, "MRPC")
    (senteval / "CR/custrev.pos").unlink()
    expected = "custrev.pos: No such file or directory, expected SentEval's file"
    with pytest.raises(common.DataError, match=expected):
        eval_transfer.read_task(senteval, "CR")


# --------------------------------------------------------------------------------------------------
# The script
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_script_scores_every_task_that_is_there(senteval, models_folder, run, tmp_path):
    output = tmp_path / "scores.json"
    options = ["--senteval", senteval, "--fast"]
    models = [models_folder / "bert", models_folder / "mean"]
    done = run("eval_transfer.py", *models, *options, "--json", output)
    assert done.returncode == 0, done.stderr
    for row in json.loads(output.read_text()).values():
        more = ("MRPC F1", "SICK-R Spearman", "STS-B Spearman")
        columns = {*eval_transfer.TASKS, *more, "avg", "avg of 10", "encoding, s", "in all, s"}
        assert set(row) == columns
        # Undefined where all predictions for these few pairs are equal.
        assert row["STS-B"] is None or row["STS-B"] != row["STS-B Spearman"]
        names = ("MR", "CR", "SUBJ", "MPQA", "SST-2", "TREC", "MRPC")
        averaged = [row[task] for task in names]
        assert row["avg"] == pytest.approx(np.mean(averaged))
        assert all(0 <= score <= 100 for score in averaged)
    lines = done.stdout.splitlines()
    assert lines[0].split("|")[2].strip() == "MR"
    assert len(lines) == 4
    (senteval / "SNLI/s1.train").unlink()
    done = run("eval_transfer.py", models_folder / "bert", *options)
    assert done.returncode == 0, done.stderr
    assert "SICK-R" in done.stdout
    assert "SNLI" not in done.stdout


@pytest.mark.parametrize(
    "row, expected",
    [
        ((82.5, 87.7, 94.0, 90.9, 83.2, 93.0, 84.4, 78.6, 88.8, 87.8, 78.9, 78.6), 86.8),
        ((83.6, 90.2, 93.6, 89.8, 91.0, 91.8, 83.8, 77.9, 85.6, 86.7, 70.7, 71.4), 86.4),
        ((83.5, 88.8, 95.5, 89.1, 87.1, 93.2, 83.5, 76.4, 83.8, 82.2, 68.4, 68.3), 85.1),
    ],
)
def test_the_average_of_10_is_that_of_dses_table_2(row, expected):
    """GenSen, DSE and BERT-Large as the paper prints them."""
    names = "MR,CR,SUBJ,MPQA,SST-2,TREC,MRPC F1,MRPC,SICK-R,SICK-E,STS-B,STS-B Spearman"
    scores = dict(zip(names.split(","), row))
    averages = eval_transfer.averages(scores)
    assert averages["avg of 10"] == pytest.approx(expected, abs=0.06)  # the row is rounded
    seven = [scores[name] for name in eval_transfer.AVERAGE]
    assert averages["avg"] == pytest.approx(np.mean(seven))
    del scores["SICK-E"]
    assert list(eval_transfer.averages(scores)) == ["avg"]
    del scores["MR"]
    assert eval_transfer.averages(scores) == {}


@pytest.mark.parametrize("name, layers", [("avg_last2", 1), ("concat_last4_no_cls", 4)])
def test_every_pooling_can_be_scored(senteval, models_folder, monkeypatch, call_main, name, layers):
    found = []

    def score(task, splits, embed, k):
        found.append(embed(["."]).shape)
        return {task: 50.0}

    monkeypatch.setattr(eval_transfer, "score", score)
    given = ("--senteval", senteval, "--tasks", "CR", "--pooling", name)
    call_main(eval_transfer, models_folder / "bert", *given)
    assert found == [(1, 32 * layers)]


def test_fast_is_five_folds(senteval, models_folder, monkeypatch):
    folds = []

    def score(task, splits, embed, k):
        folds.append(k)
        return {task: 50.0}

    monkeypatch.setattr(eval_transfer, "score", score)
    command = ["eval_transfer.py", str(models_folder / "bert"), "--senteval", str(senteval)]
    for fast in ([], ["--fast"]):
        monkeypatch.setattr("sys.argv", [*command, "--tasks", "CR,TREC", *fast])
        eval_transfer.main()
    assert folds == [10, 10, 5, 5]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--tasks", "MR,CoLA"], "argument --tasks: 'MR,CoLA', expected some of MR,CR"),
        (["--device", "tpu"], "expected cpu, or cuda"),
    ],
)
def test_bad_arguments(senteval, models_folder, fails, options, message):
    given = ["--senteval", senteval, *options]
    assert message in fails(eval_transfer, models_folder / "bert", *given)


def test_a_folder_that_is_not_sentevals(models_folder, fails):
    given = ["--senteval", models_folder]
    assert "no STS/STSBenchmark below it" in fails(eval_transfer, models_folder / "bert", *given)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["TREC", "MRPC"])
def test_real_data_against_sentevals_loops_in_scikit_learn(shared_data, task):
    """The last layer of all-MiniLM-L6-v2, within half a point."""
    encoder = load_encoder(common.MINILM, layers="5").eval()
    splits = eval_transfer.read_task(shared_data / "senteval/data/downstream", task)
    numbers = eval_transfer.number_sentences({task: splits})
    vectors = common.encode_sentences(encoder, numbers)

    def features(split):
        u = vectors[[numbers[text] for text in split.first]]
        if split.second is None:
            return u
        v = vectors[[numbers[text] for text in split.second]]
        return np.hstack([np.abs(u - v), u * v])

    def fit(x, y, strength):
        return LogisticRegression(C=strength, max_iter=1000).fit(x, y)

    x, y = features(splits["train"]), splits["train"].labels
    strength = best_strength(x, y, STRENGTHS_OF_TRAINING_FOLDS, 3, fit)
    # SentEval's tolerance of 1e-4 leaves three of TREC's 500 questions undecided.
    best = LogisticRegression(C=strength, max_iter=5000, tol=1e-6).fit(x, y)
    theirs = best.score(features(splits["test"]), splits["test"].labels)

    def embed(side):
        return torch.from_numpy(vectors[[numbers[text] for text in side]])

    ours = eval_transfer.score(task, splits, embed, 3)
    assert ours[task] == pytest.approx(100 * theirs, abs=0.5)
