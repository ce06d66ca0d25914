"""dse.py: equations against plain loops, GLUE files, three steps by hand, runs from end to end."""

import math
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from conftest import Adam, demo_sentences, dev_scores, losses, random_rows
from sentence_transformers import SentenceTransformer

import common
import dse
import eval_sts

MRPC = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
NLI = "index\tgenre\tsentence1\tsentence2\tlabel1\tgold_label"


def features(a, b):
    """h of eq. 3 for two lists."""
    products = [x * y for x, y in zip(a, b)]
    return [*a, *b, *products, *(abs(x - y) for x, y in zip(a, b))]


def difference(a, b):
    a, b = [torch.as_tensor(x).detach().numpy() for x in (a, b)]
    return np.abs(a - b).max()


# ---- losses


@pytest.mark.parametrize("alpha", [0, 0.3, 1])
@pytest.mark.parametrize("task, classes", [("mrpc", 2), ("mnli", 3), ("stsb", 1)])
def test_dse_loss_is_equation_2(task, classes, alpha):
    student, teacher = random_rows(5, classes, seed=1), random_rows(5, classes, seed=2)
    labels = random_rows(5, seed=3) if task == "stsb" else torch.tensor([0, 1, 1, 0, classes - 1])
    total = 0.0
    for s, t, r in zip(student.tolist(), teacher.tolist(), labels.tolist()):
        distillation = sum((a - b) ** 2 for a, b in zip(s, t))
        if task == "stsb":
            label = (s[0] - r) ** 2
        else:
            label = -math.log(math.exp(s[r]) / sum(math.exp(a) for a in s))
        total += (alpha * distillation + (1 - alpha) * label) / 5

    def loss(logits):
        return dse.dse_loss(logits, teacher, labels, alpha, task)

    assert loss(student).item() == pytest.approx(total, abs=1e-10)
    assert torch.autograd.gradcheck(loss, student.requires_grad_())


# ---- pooling, features, head


@pytest.mark.parametrize("layers", [2, 4, 7])
def test_pool_last_four_is_that_of_section_3_4(layers):
    states = [random_rows(3, 6, 5, seed=layer) for layer in range(layers)]
    lengths = [6, 2, 4]
    mask = torch.tensor([[1] * length + [0] * (6 - length) for length in lengths])
    before = mask.clone()
    expected = []
    for i, length in enumerate(lengths):
        embedding = []
        for layer in states[-4:]:
            without_cls = layer[i, 1:length].tolist()
            embedding += [sum(column) / (length - 1) for column in zip(*without_cls)]
        expected.append(embedding)
    expected = torch.tensor(expected, dtype=torch.float64)
    assert difference(dse.pool_last_four(states, mask), expected) < 1e-10
    assert torch.equal(mask, before)  # the caller's mask is left as it was


def test_features_and_head_are_those_of_equation_3():
    head = dse.SimilarityHead(3, 2).double()
    assert head.W.weight.shape == (512, 12)
    assert head.W.bias is None and head.w.bias is None
    u, v = random_rows(4, 3, seed=1), random_rows(4, 3, seed=2)
    h = [features(a, b) for a, b in zip(u.tolist(), v.tolist())]
    assert difference(dse.pair_features(u, v), torch.tensor(h, dtype=torch.float64)) < 1e-12
    for row, logits in zip(h, head(u, v).tolist()):
        hidden = []
        for weights in head.W.weight.tolist():
            hidden.append(max(0.0, sum(w * x for w, x in zip(weights, row))))
        for weights, logit in zip(head.w.weight.tolist(), logits):
            assert logit == pytest.approx(sum(w * x for w, x in zip(weights, hidden)), abs=1e-10)


@pytest.mark.parametrize("block", [1, 5, 100])
def test_scores_in_blocks_are_those_of_every_pair(monkeypatch, block):
    monkeypatch.setattr(dse, "BLOCK", block)
    head = dse.SimilarityHead(8, 3).double()
    u, v = random_rows(23, 8, seed=1), random_rows(23, 8, seed=2)
    sizes = []
    head.W.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    pairs, catalogue = head.score_pairs(u, v), head.score_pairs(u[3], v)
    assert max(sizes) == min(block, 23)
    assert difference(pairs, head(u, v)) < 1e-12
    for item in range(23):
        assert difference(catalogue[item], head(u[3:4], v[item : item + 1])[0]) < 1e-12


# ---- models


LAYERS_READ = [("0,1,3", [1, 2, 3]), (None, [1, 2, 3, 4]), ("2", [1])]
STUDENTS = [(name, *case) for name in ("bert", "roberta", "distilbert") for case in LAYERS_READ]
STUDENTS.append((common.MINILM, None, [3, 4, 5, 6]))  # of its six layers


@pytest.mark.parametrize("name, layers, read", STUDENTS)
def test_a_saved_student_states_and_repeats_its_embedding(
    models_folder, tmp_path, name, layers, read
):
    """SentenceTransformer cannot concatenate layers. It must refuse the folder, not misread it."""
    name = name if name == common.MINILM else models_folder / name
    student = dse.add_head(common.load_encoder(name, "mean", layers), 2).eval()
    texts = demo_sentences(6)
    u = dse.embed_sentences(student, texts)
    dse.save_student(student, tmp_path)
    with pytest.raises(common.UserError, match="LayerPooling"):
        common.load_encoder(tmp_path)
    scored, embed = eval_sts.load(tmp_path)
    assert difference(torch.from_numpy(common.encode(embed, scored, texts)), u) < 1e-6
    model = transformers.AutoModel.from_pretrained(tmp_path).eval()
    for row, text in zip(u, texts):
        batch = student.tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        states = model(**batch, output_hidden_states=True).hidden_states
        expected = [states[layer][0, 1:].mean(dim=0) for layer in read]
        assert difference(row, torch.cat(expected)) < 1e-5
    again = dse.load_student(tmp_path)
    assert difference(dse.embed_sentences(again, texts), u) < 1e-6
    assert torch.equal(again.head(u, u.flip(0)), student.head(u, u.flip(0)))
    with pytest.raises(Exception, match="sentence_distillation|LayerPooling"):
        SentenceTransformer(str(tmp_path), device="cpu")


def classify(folder, pairs):
    """transformers' own logits of pairs [n, C]."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    batch = tokenizer(*map(list, zip(*pairs)), padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(**batch).logits


@pytest.mark.parametrize("name", [common.MINILM, "bert", "roberta", "distilbert"])
def test_the_cross_encoder_reads_pairs_as_transformers_does(models_folder, tmp_path, name):
    """The tokenizer of MiniLM, which is BERT's, numbers the two segments."""
    is_minilm = name == common.MINILM
    teacher = dse.load_cross_encoder(name if is_minilm else models_folder / name, "mnli")
    assert teacher.fresh
    assert is_minilm == ("token_type_ids" in teacher.tokenizer("a", "b"))
    common.save_encoder(teacher, tmp_path / "teacher")
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]
    pairs = list(zip(demo_sentences(10)[:5], demo_sentences(10)[5:]))
    again = dse.load_cross_encoder(tmp_path / "teacher", "mnli")
    assert not again.fresh
    expected = classify(tmp_path / "teacher", pairs)
    for model in (teacher, again):
        assert difference(dse.logits_of(model, pairs), expected) < 1e-5


def test_a_teachers_classes_are_put_in_the_tasks_order(models_folder, tmp_path):
    teacher = dse.load_cross_encoder(models_folder / "bert", "mnli")
    names = ("CONTRADICTION", "neutral", "entailment")
    teacher.model.config.label2id = {name: number for number, name in enumerate(names)}
    teacher.model.config.id2label = dict(enumerate(names))
    common.save_encoder(teacher, tmp_path / "teacher")
    teacher = dse.load_cross_encoder(tmp_path / "teacher", "mnli")
    assert not teacher.fresh
    pair = tuple(demo_sentences(2))
    expected = classify(tmp_path / "teacher", [pair])[:, [2, 1, 0]]
    assert difference(dse.logits_of(teacher, [pair]), expected) < 1e-5
    with pytest.raises(common.UserError, match="teacher: .*other classes.*predict 0, 1"):
        dse.load_cross_encoder(tmp_path / "teacher", "mrpc")


# ---- GLUE


def write(path, *lines):
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def write_mrpc(root, **splits):
    """Each split: rows (sentence, sentence, label)."""
    for split, rows in splits.items():
        lines = [f"{label}\t1\t2\t{first}\t{second}" for first, second, label in rows]
        write(root / f"MRPC/{split}.tsv", MRPC, *lines)


def test_allnli_joins_mnli_and_snli_without_pairs_that_annotators_disagree_on(tmp_path):
    files = {"MNLI/train": "neutral - contradiction", "MNLI/dev_matched": "entailment"}
    files |= {"MNLI/dev_mismatched": "contradiction", "SNLI/train": "contradiction entailment"}
    files |= {"SNLI/dev": "contradiction -", "SNLI/test": "neutral neutral"}
    for name, labels in files.items():
        rows = [f'0\tx\tA "boy" runs.\tIn {name}\tneutral\t{label}' for label in labels.split()]
        write(tmp_path / f"{name}.tsv", NLI, *rows)
    sets = dse.read_task(tmp_path, "allnli")
    found = {name: labels.tolist() for name, (_, labels) in sets.items()}
    assert found == dict(train=[1, 2, 2, 0], dev=[0, 2], test=[1, 1])
    assert sets["train"][0][0] == ('A "boy" runs.', "In MNLI/train")
    assert list(dse.read_task(tmp_path, "mnli")) == ["train", "dev", "mismatched"]


@pytest.mark.parametrize("test", [None, "#1 String\t#2 String\nA\tB"])
def test_a_test_set_that_is_missing_or_without_labels_is_left_out(tmp_path, test):
    rows = [("A", "B", 1), ("A", "C", 0)]
    write_mrpc(tmp_path, train=rows, dev=rows)
    if test:
        write(tmp_path / "MRPC/test.tsv", test)
    sets = dse.read_task(tmp_path, "mrpc")
    assert list(sets) == ["train", "dev"]
    for pairs, labels in sets.values():
        assert [(*pair, label) for pair, label in zip(pairs, labels.tolist())] == rows


def test_rows_without_two_sentences_are_left_out_and_counted(tmp_path, capsys):
    """A line end inside a question has broken some rows of QQP's train.tsv."""
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    rows = ["1\t2\t3\tA?\tB?\t1", "1\t2\t3\tA?\t\t0", "1\t2\t3\tA", "rest\tB?\t1", "1\t2\t3\tA\tB"]
    path = write(tmp_path / "train.tsv", header, *rows)
    assert dse.read_pairs(path, "qqp") == [(("A?", "B?"), 1)]
    assert "malformed rows left out: 4\n" in capsys.readouterr().err
    rows = [f'{{"text1": "A", "text2": {text}, "label": 0}}' for text in ("null", '"B"')]
    path = write(tmp_path / "a.jsonl", *rows)
    assert dse.read_pairs(path, "qqp") == [(("A", "B"), 0)]
    assert "malformed rows left out: 1\n" in capsys.readouterr().err


@pytest.mark.parametrize("task, label, expected", [("mnli", 2, 2), ("stsb", 3.5, 3.5)])
def test_the_hubs_json_lines_are_read(tmp_path, task, label, expected):
    path = write(tmp_path / "test.jsonl", f'{{"text1": " A", "text2": "B", "label": {label}}}')
    assert dse.read_pairs(path, task) == [(("A", "B"), expected)]
    write(path, '{"text1": "A", "text2": "B", "label": -1}')  # hidden
    assert dse.read_pairs(path, task) == []


@pytest.mark.parametrize(
    "task, name, lines, expected",
    [
        ("mrpc", "train.tsv", [MRPC, "1\t1\t2\tA\tB", "2\t1\t2\tA\tB"], "train.tsv:3: '2' is not"),
        ("mrpc", "train.tsv", [MRPC, "1\t1\t2\tA\tB\tC"], "train.tsv: no labeled rows"),
        ("mrpc", "train.tsv", [MRPC], "train.tsv: there is nothing in it; .*columns"),
        ("mrpc", "dev.tsv", ["a\tb", "A\tB"], "dev.tsv: no labeled rows; .*columns #1 String"),
        ("stsb", "a.tsv", ["sentence1\tsentence2\tscore", "A\tB\tnan"], "a.tsv:2: 'nan'"),
        ("stsb", "a.tsv", ["sentence1\tsentence2\tscore", "A\tB\t5.1"], "a.tsv:2: '5.1'"),
        ("mrpc", "a.jsonl", ["[1]"], "a.jsonl:1: .*JSON with text1"),
        ("mrpc", "a.jsonl", ['{"text1": "A", "text2": "B", "label": 7}'], "a.jsonl:1: '7' is not"),
    ],
)
def test_malformed_files_are_named_with_their_line(tmp_path, task, name, lines, expected):
    with pytest.raises(common.UserError, match=expected):
        dse.read_pairs(write(tmp_path / name, *lines), task)


def test_one_label_alone_is_refused(fails, models_folder, tmp_path):
    rows = [("A", "B", 1), ("C", "D", 1)]
    write_mrpc(tmp_path, train=rows, dev=[*rows, ("C", "E", 0)])
    line = fails(dse, "--glue", tmp_path, "--teacher", models_folder / "bert")
    assert "all labels of mrpc's training pairs are equal" in line


def test_metrics_are_those_counted_by_hand(monkeypatch):
    logits = np.array([[0, 1], [1, 0], [0, 1], [0, 1], [1, 0.0]])
    labels = np.array([1, 1, 0, 1, 0])  # true positives 2, false positive 1, false negative 1
    expected = {"accuracy": pytest.approx(60), "F1": pytest.approx(100 * 2 / 3)}
    assert dse.metrics(logits, labels, "mrpc") == expected
    assert dse.metrics(logits, labels, "qnli") == {"accuracy": pytest.approx(60)}
    monkeypatch.setattr(dse, "logits_of", lambda *_: logits)
    row = dse.scores(None, {"dev": ([], labels)}, "mrpc")
    assert row["dev F1"] == expected["F1"]
    assert row["dev"] == pytest.approx((60 + 200 / 3) / 2)
    gold, scores = np.array([0.0, 1, 2, 5]), np.array([[0.0], [3], [2], [9]])  # one inversion
    x, y = scores[:, 0] - scores.mean(), gold - gold.mean()
    pearson = 100 * (x * y).sum() / ((x**2).sum() * (y**2).sum()) ** 0.5
    expected = {"Pearson": pytest.approx(pearson), "Spearman": pytest.approx(80)}
    assert dse.metrics(scores, gold, "stsb") == expected
    assert math.isnan(dse.metrics(logits * np.nan, labels, "qnli")["accuracy"])


# ---- training


@pytest.fixture(scope="module")
def mrpc(tmp_path_factory):
    """A folder with 12 pairs in MRPC's layout."""
    root, texts = tmp_path_factory.mktemp("glue"), demo_sentences(24)
    rows = [(texts[2 * i], texts[2 * i + 1], int(i % 3 > 0)) for i in range(12)]
    write_mrpc(root, train=rows, dev=rows, test=rows)
    return root


def three_losses(model, loss, lr):
    """loss(1) to loss(3), each before a step of Adam."""
    adam, values = Adam(model.parameters()), []
    for step in (1, 2, 3):
        values.append(loss(step))
        adam.step(values[-1], lr)
    return [value.item() for value in values]


def test_three_steps_of_each_stage_are_those_computed_by_hand(
    call_main, monkeypatch, models_folder, mrpc, tmp_path
):
    monkeypatch.setattr(common, "LOG_STEPS", 1)
    out, name, seed, lr, alpha = tmp_path / "out", models_folder / "bert", 3, 2e-3, 0.3
    options = ("--glue", mrpc, "--teacher", name, "--output", out, "--seed", seed, "--shuffle")
    options += ("--lr", lr, "--teacher-lr", lr, "--alpha", alpha, "--batch-size", 5)
    call_main(dse, *options, "--max-steps", 3, "--dropout", 0.2)

    torch.manual_seed(seed)
    student = dse.add_head(common.load_encoder(name, "mean", dropout=0.2), 2)
    teacher = dse.load_cross_encoder(name, "mrpc")
    generator = np.random.default_rng([seed, 0])
    order = generator.permutation(12)
    batches = [order[start : start + 5] for start in (0, 5, 10)]
    batches = [batches[i] for i in generator.permutation(3)]
    pairs, labels = dse.read_task(mrpc, "mrpc")["train"]
    read = partial(teacher.tokenizer, padding=True, return_tensors="pt")

    def begin(step):
        torch.manual_seed(seed * 1_000_003 + step)  # of dropout
        rows = batches[step - 1]
        return *map(list, zip(*[pairs[row] for row in rows])), labels[rows].tolist()

    def label_losses(logits, labels):
        return -logits.log_softmax(dim=1)[range(len(labels)), labels]

    def teacher_loss(step):
        first, second, labels = begin(step)
        return label_losses(teacher.model(**read(first, second)).logits, labels).mean()

    def psi(texts):
        batch = read(texts)
        states = student.model(**batch, output_hidden_states=True).hidden_states
        mask = batch["attention_mask"][:, 1:, None]
        return torch.cat([(x[:, 1:] * mask).sum(dim=1) / mask.sum(dim=1) for x in states[1:]], 1)

    def student_loss(step):
        first, second, labels = begin(step)
        u, v = psi(first), psi(second)
        h = torch.cat([u, v, u * v, (u - v).abs()], dim=1)
        logits = (h @ student.head.W.weight.T).relu() @ student.head.w.weight.T
        targets = classify(out / "teacher", list(zip(first, second)))
        distillation = (logits - targets).square().sum(dim=1)
        return (alpha * distillation + (1 - alpha) * label_losses(logits, labels)).mean()

    student.train()
    expected = three_losses(teacher.train(), teacher_loss, lr)
    expected += three_losses(student, student_loss, lr)
    steps = [(stage, step) for stage in ("teacher", "student") for step in (1, 2, 3)]
    assert losses(out) == pytest.approx(dict(zip(steps, expected)), rel=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "task, more", [("mrpc", ("--alpha", 0, "--freeze-encoder")), ("stsb", ("--alpha", 1))]
)
def test_a_run_leaves_the_best_student(call_main, models_folder, files, mrpc, tmp_path, task, more):
    folder, out = mrpc if task == "mrpc" else files, tmp_path / "out"
    options = ("--task", task, "--glue", folder, "--teacher", models_folder / "bert")
    options += ("--student-layers", "0,2", "--output", out, "--batch-size", 10, "--lr", 5e-3)
    options += ("--max-length", 20)
    table = call_main(dse, *options, "--teacher-epochs", 1, "--epochs", 2, *more)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    dev = dev_scores(out)
    steps = 2 if task == "mrpc" else 10  # of an epoch, after which dev is scored by default
    scored = {step: score for (stage, step), score in dev.items() if stage == "student"}
    last = f"best student (step {max(scored, key=scored.get)} of {2 * steps})"
    names = [line[0] for line in lines[2:]]
    assert names == ["student before, cosine"] * (task == "stsb") + ["teacher", last]
    assert [step for _, step in dev] == [0, steps, 0, steps, 2 * steps]
    best, sets = dse.load_student(out), dse.read_task(folder, task)
    del sets["train"]
    row = dse.scores(best, sets, task)
    assert lines[-1][1:] == [f"{score:.2f}" for score in row.values()]
    assert best.max_length == 20
    assert row["dev"] == pytest.approx(max(scored.values()))
    if "--freeze-encoder" in more:
        plain = common.load_encoder(models_folder / "bert", "mean", "0,2").model.state_dict()
        assert all(map(torch.equal, plain.values(), best.model.state_dict().values()))


@pytest.mark.slow
def test_teacher_only_leaves_the_teacher_that_a_run_takes_as_it_is(
    call_main, models_folder, mrpc, tmp_path
):
    whole, alone, given = tmp_path / "whole", tmp_path / "alone", tmp_path / "given"
    options = ("--glue", mrpc, "--student", models_folder / "distilbert", "--batch-size", 6)
    options += ("--teacher-epochs", 2, "--epochs", 1, "--teacher-lr", 1e-3)
    plain = ("--teacher", models_folder / "bert")
    table = call_main(dse, *options, *plain, "--output", whole)
    plain = (*plain, "--output", alone, "--teacher-only")
    cells = " ".join(table.splitlines()[2].split())
    assert cells in " ".join(call_main(dse, *options, *plain).split())
    weights = "teacher/model.safetensors"
    assert (alone / weights).read_bytes() == (whole / weights).read_bytes()
    assert not (alone / "model.safetensors").exists()
    classifier = ("--teacher", alone / "teacher", "--output", given)
    assert table.splitlines()[2:] == call_main(dse, *options, *classifier).splitlines()[2:]
    assert {stage for stage, _ in dev_scores(given)} == {"student"}
    for name in ("model.safetensors", "head.safetensors"):
        assert (given / name).read_bytes() == (whole / name).read_bytes()
