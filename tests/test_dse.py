"""dse.py: features, pooling, loss and scores against plain loops in float64, runs from end to
end."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import common
import dse
from support import demo, glue
from support.encoder import LayerPooling, load_encoder

MRPC = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
STSB = "index\tsentence1\tsentence2\tscore\n"
ROOT = Path(dse.__file__).parent


def rows(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def features(a, b):
    """h of eq. 3 for two lists."""
    product = [x * y for x, y in zip(a, b)]
    difference = [abs(x - y) for x, y in zip(a, b)]
    return [*a, *b, *product, *difference]


def difference(a, b):
    return (a - b).abs().max().item()


# ---- losses


@pytest.mark.parametrize("alpha", [0, 0.3, 1])
@pytest.mark.parametrize("task", ["mrpc", "mnli", "stsb"])
def test_dse_loss_is_equation_2(alpha, task):
    classes = glue.TASKS[task].outputs
    student, teacher = rows(5, classes, seed=1), rows(5, classes, seed=2)
    labels = rows(5, seed=3) if task == "stsb" else torch.tensor([0, 1, 1, 0, classes - 1])
    total = 0.0
    for s, t, y in zip(student.tolist(), teacher.tolist(), labels.tolist()):
        distillation = sum((a - b) ** 2 for a, b in zip(s, t))
        if task == "stsb":
            label = (s[0] - y) ** 2
        else:
            label = -math.log(math.exp(s[y]) / sum(math.exp(a) for a in s))
        total += (alpha * distillation + (1 - alpha) * label) / 5

    def loss(logits):
        return dse.dse_loss(logits, teacher, labels, alpha, task)

    assert loss(student).item() == pytest.approx(total, abs=1e-10)
    assert torch.autograd.gradcheck(loss, student.requires_grad_())


# ---- features, pooling, scores


def test_pair_features_are_those_of_equation_3():
    u, v = rows(4, 3, seed=1), rows(4, 3, seed=2)
    expected = [features(a, b) for a, b in zip(u.tolist(), v.tolist())]
    expected = torch.tensor(expected, dtype=torch.float64)
    assert difference(dse.pair_features(u, v), expected) < 1e-12


@pytest.mark.parametrize("layers", [2, 4, 7])
def test_pool_last_four_is_that_of_section_3_4(layers):
    states = [rows(3, 6, 5, seed=layer) for layer in range(layers)]
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


def test_the_head_is_equation_3():
    torch.manual_seed(0)
    head = dse.SimilarityHead(3, 2, hidden=7).double()
    assert head.W.weight.shape == (7, 12)
    assert head.W.bias is None and head.w.bias is None
    assert dse.SimilarityHead(3, 2).w.in_features == 512
    u, v = rows(4, 3, seed=1), rows(4, 3, seed=2)
    for a, b, scores in zip(u.tolist(), v.tolist(), head(u, v).tolist()):
        h = features(a, b)
        hidden = []
        for weights in head.W.weight.tolist():
            hidden.append(max(0.0, sum(w * x for w, x in zip(weights, h))))
        for weights, score in zip(head.w.weight.tolist(), scores):
            assert score == pytest.approx(sum(w * x for w, x in zip(weights, hidden)), abs=1e-10)


@pytest.mark.parametrize("memory", [1, 10_000, 2**28])
@pytest.mark.parametrize("classes", [1, 3])
def test_factored_scores_are_those_of_every_pair(memory, classes):
    torch.manual_seed(0)
    head = dse.SimilarityHead(96, classes)
    u, v = rows(5, 96, seed=1).float(), rows(23, 96, seed=2).float()
    expected = torch.stack([head(a.expand(23, -1), v) for a in u]).detach()  # [5, 23, C]

    def assert_close(scores, expected):
        assert scores.shape == expected.shape
        assert difference(scores, expected) < 1e-5 * expected.abs().max()

    assert_close(head.score_matrix(u, v, memory), expected)
    assert_close(head.score_catalogue(u[3], v, memory), expected[3])
    four_times = u.repeat(4, 1)
    assert_close(head.score_pairs(four_times, v[:20], memory), head(four_times, v[:20]).detach())


@pytest.mark.slow
def test_scores_stay_within_the_memory_they_are_given():
    """100,000 embeddings, one query, 64 MB: the features alone would take 1.2 GB. The peak is that
    of a fresh process."""
    program = """
import resource, torch, dse
head, catalogue = dse.SimilarityHead(768, 2), torch.randn(100_000, 768)
head.score_catalogue(catalogue[0], catalogue[:1000])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
scores = head.score_catalogue(catalogue[0], catalogue, 2**26)
print(scores.shape[0], (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT
    )
    count, peak = process.stdout.split()
    products = 100_000 * 512 * 4  # W_v v, once for each sentence
    assert int(count) == 100_000
    assert int(peak) < products + 2**27


# ---- the models


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
@pytest.mark.parametrize("layers, read", [("0,1,3", (1, 2, 3)), (None, (1, 2, 3, 4)), ("2", (1,))])
def test_encoder_and_student_agree(models_folder, tmp_path, name, layers, read):
    """Student and support.encoder are written apart: what is trained is what eval_sts.py reads."""
    encoder = dse.new_encoder(models_folder / name, layers).eval()
    assert encoder.pooling == LayerPooling(read, join="concat", skip_first_token=True)
    assert encoder.dimension == 32 * len(read)
    student = dse.Student(encoder, 2)
    batch = common.Tokens(encoder, demo.sentences(6)).batch(np.arange(6))
    embeddings = student.embed(*batch)
    assert difference(embeddings, encoder(*batch)) < 1e-6
    dse.save_student(student, tmp_path)
    assert difference(load_encoder(tmp_path).eval()(*batch), embeddings) < 1e-6
    again = dse.load_student(tmp_path)
    u = dse.embed(again, demo.sentences(6))
    assert difference(u, embeddings) < 1e-5
    assert difference(again.head(u, u.flip(0)), student.head(u, u.flip(0))) < 1e-6


def test_more_than_four_layers_give_the_last_four(teacher):
    """all-MiniLM-L6-v2 has six layers."""
    encoder = dse.new_encoder(common.MINILM, None)
    assert encoder.pooling.layers == (3, 4, 5, 6)
    assert encoder.dimension == 4 * teacher.dimension


def test_sentence_transformers_refuses_a_student(models_folder, tmp_path):
    """It has no module that concatenates layers, and must not take a mean instead."""
    from sentence_transformers import SentenceTransformer

    dse.save_student(dse.Student(dse.new_encoder(models_folder / "bert", None), 2), tmp_path)
    with pytest.raises(Exception, match="sentence_distillation|LayerPooling"):
        SentenceTransformer(str(tmp_path), device="cpu")


@pytest.mark.parametrize("name", [common.MINILM, "roberta", "distilbert"])
def test_the_cross_encoder_reads_pairs_as_transformers_does(models_folder, tmp_path, name):
    torch.manual_seed(0)
    is_minilm = name == common.MINILM
    teacher = dse.CrossEncoder(name if is_minilm else models_folder / name, "mnli", 64).eval()
    assert teacher.fresh
    sentences = demo.sentences(10)
    pairs = glue.Pairs(sentences[:5], sentences[5:], None)
    batch = teacher.tokenizer(pairs.first, pairs.second, padding=True, return_tensors="pt")
    if name == "distilbert":  # it has no segments, whatever its tokenizer says
        batch.pop("token_type_ids", None)
    if is_minilm:
        assert teacher.segments
        assert batch["token_type_ids"].sum() > 20
    expected = teacher.model(**batch).logits.detach().numpy()
    assert np.abs(teacher.score_pairs(pairs) - expected).max() < 1e-5
    teacher.save(tmp_path / "teacher")
    again = dse.CrossEncoder(tmp_path / "teacher", "mnli", 64)
    assert not again.fresh
    assert np.abs(again.score_pairs(pairs) - expected).max() < 1e-5
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]


def test_a_teachers_classes_are_put_in_the_tasks_order(models_folder, tmp_path):
    names = ["contradiction", "neutral", "entailment"]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        models_folder / "bert",
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
    ).eval()
    model.save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(models_folder / "bert")
    tokenizer.save_pretrained(tmp_path)
    teacher = dse.CrossEncoder(tmp_path, "mnli", 64)
    pairs = glue.Pairs(demo.sentences(2), demo.sentences(4)[2:], None)
    batch = tokenizer(pairs.first, pairs.second, padding=True, return_tensors="pt")
    expected = model(**batch).logits.detach().numpy()[:, [2, 1, 0]]
    assert np.abs(teacher.score_pairs(pairs) - expected).max() < 1e-5


# ---- the command line


def parse(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["dse.py", *options])
    return dse.parse_args()


def test_defaults_are_the_papers(monkeypatch):
    args = parse(monkeypatch)
    assert (args.epochs, args.batch_size, args.lr, args.alpha) == (8, 32, 2e-5, 0.5)
    assert (args.teacher, args.student) == ("bert-large-uncased", None)
    assert not args.eval_steps  # dev is scored after each epoch
    assert args.patience == 0
    assert parse(monkeypatch, "--task", "stsb").lr == 1e-5


def test_the_demo_has_a_small_teacher(monkeypatch):
    args = parse(monkeypatch, "--demo")
    assert (args.teacher, args.student_layers, args.task) == (common.MINILM, "1,3,5", "stsb")
    assert (args.epochs, args.lr, args.eval_steps) == (4, 2e-4, 40)


def test_no_other_model_is_cut_to_the_layers_of_the_small_one(monkeypatch):
    assert parse(monkeypatch, "--demo", "--teacher", "bert-large-uncased").student_layers is None
    assert parse(monkeypatch, "--demo", "--student", "mine").student_layers is None
    args = parse(monkeypatch, "--demo", "--teacher", "mine", "--student-layers", "0,1")
    assert (args.teacher, args.student_layers) == ("mine", "0,1")


# ---- runs


@pytest.fixture(scope="session")
def glue_folder(tmp_path_factory):
    """MRPC and STS-B of the demo's pairs, in GLUE's own layout."""
    root = tmp_path_factory.mktemp("glue")
    (root / "MRPC").mkdir()
    (root / "STS-B").mkdir()
    for seed, (split, count) in enumerate((("train", 200), ("dev", 60), ("test", 60))):
        mrpc, stsb = [MRPC], [STSB]
        for a, b, score in zip(*demo.scored_pairs(count, seed=20 + seed)):
            mrpc.append(f"{int(score > 2.5)}\t1\t2\t{a}\t{b}\n")
            stsb.append(f"0\t{a}\t{b}\t{score}\n")
        (root / "MRPC" / f"{split}.tsv").write_text("".join(mrpc), "utf-8")
        (root / "STS-B" / f"{split}.tsv").write_text("".join(stsb), "utf-8")
    return root


def options(models_folder, glue_folder, output, *more):
    data = ("--teacher", models_folder / "wide", "--glue", glue_folder, "--output", output)
    training = ("--epochs", 2, "--teacher-epochs", 1, "--batch-size", 20, "--lr", 1e-3)
    return (*data, *training, "--eval-steps", 5, *more)


def read_table(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def read_log(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "student, more",
    [
        (None, ("--student-layers", "0,1,3")),
        ("bert", ("--task", "stsb", "--alpha", 1)),
        ("distilbert", ("--freeze-encoder", "--alpha", 0)),
    ],
)
def test_a_run_leaves_the_best_student(
    run, models_folder, glue_folder, files, tmp_path, student, more
):
    if student:
        more = (*more, "--student", models_folder / student)
    out = tmp_path / "out"
    process = run("dse.py", *options(models_folder, glue_folder, out, *more))
    assert process.returncode == 0, process.stderr[-3000:]

    header, _, *scored = read_table(process.stdout)
    assert [row[0] for row in scored] == ["student before, cosine", "teacher", "student"]
    assert header[-1] == "degradation %"
    assert scored[1][-1] == "0.00"

    task = "stsb" if "stsb" in more else "mrpc"
    test = glue.read_task(glue_folder, task)["test"]
    best = dse.load_student(out)
    u, v = dse.embed(best, test.first), dse.embed(best, test.second)
    scores = glue.metrics(best.head.score_pairs(u, v).numpy(), test.labels, task)
    assert [f"{value:.2f}" for value in scores.values()] == scored[2][3:5]

    dev = [entry["stage"] for entry in read_log(out) if "dev" in entry]
    assert dev == ["teacher"] * 3 + ["student"] * 5  # of 10 and 20 steps, and before the first
    assert "pairs_per_second" in read_log(out)[-1]

    sts = run("eval_sts.py", out, "--pairs", files / "dev.tsv")
    assert sts.returncode == 0, sts.stderr[-2000:]
    from huggingface_hub import ModelCard

    card = ModelCard.load(out / "README.md")
    assert card.data.library_name == "transformers"
    assert str(models_folder) not in str(card)
    if "--freeze-encoder" in more:
        plain = dse.new_encoder(models_folder / "distilbert", None).state_dict().values()
        assert all(map(torch.equal, plain, best.encoder.state_dict().values()))


@pytest.mark.slow
def test_dev_is_scored_after_each_epoch_by_default(run, models_folder, glue_folder, tmp_path):
    command = list(options(models_folder, glue_folder, tmp_path / "out", "--student-layers", "0"))
    position = command.index("--eval-steps")
    del command[position : position + 2]
    process = run("dse.py", *command)
    assert process.returncode == 0, process.stderr[-2000:]
    steps = [(entry["stage"], entry["step"]) for entry in read_log(tmp_path / "out")]
    assert steps == [
        ("teacher", 0),
        ("teacher", 10),
        ("student", 0),
        ("student", 10),
        ("student", 20),
    ]


def test_a_run_without_a_better_dev_score_takes_all_epochs(
    call_main, models_folder, glue_folder, tmp_path
):
    """DSE's paper and code know no early stopping; --patience is for who wants it."""
    out = tmp_path / "out"
    command = ("--teacher-epochs", 4, "--teacher-lr", 1e-12, "--eval-steps", 0, "--teacher-only")
    call_main(dse, *options(models_folder, glue_folder, out, *command))
    dev = {entry["step"]: entry["dev"] for entry in read_log(out) if "dev" in entry}
    assert list(dev) == [0, 10, 20, 30, 40]
    assert len(set(dev.values())) == 1
    stopped = tmp_path / "stopped"
    call_main(dse, *options(models_folder, glue_folder, stopped, *command, "--patience", 2))
    assert read_log(stopped)[-1]["step"] < 40


@pytest.mark.slow
def test_teacher_only_leaves_the_teacher_of_the_whole_run(
    call_main, models_folder, glue_folder, tmp_path
):
    whole, alone, given = tmp_path / "whole", tmp_path / "alone", tmp_path / "given"
    student = ("--student", models_folder / "bert")
    expected = read_table(call_main(dse, *options(models_folder, glue_folder, whole, *student)))
    command = options(models_folder, glue_folder, alone, *student, "--teacher-only")
    scored = read_table(call_main(dse, *command))
    assert [row[0] for row in scored[2:]] == ["teacher"]
    assert scored[2] == expected[3][:-1]  # without the column of degradation
    weights = "teacher/model.safetensors"
    assert (alone / weights).read_bytes() == (whole / weights).read_bytes()
    assert {entry["stage"] for entry in read_log(alone)} == {"teacher"}
    assert not (alone / "model.safetensors").exists()
    assert read_table(call_main(dse, *command, "--resume")) == scored
    ready = ("--teacher", whole / "teacher", "--teacher-only")
    assert read_table(call_main(dse, *options(models_folder, glue_folder, given, *ready))) == scored
    assert read_log(given) == []


def write_scores(folder, task, **means):
    folder.mkdir()
    rows = {name: {"mean": mean} for name, mean in means.items()}
    (folder / glue.SCORES).write_text(json.dumps({task: rows}))


def test_the_average_over_tasks_is_that_of_table_1(call_main, tmp_path):
    """Numbers of the paper's Table 1, BERT-Large and alpha = 0.5; MRPC has a row more."""
    teacher = dict(mnli=86.3, qqp=80.7, qnli=92.7, mrpc=87.35, stsb=87.05)
    student = dict(mnli=80.65, qqp=77.7, qnli=86.0, mrpc=83.7, stsb=86.1)
    runs = []
    for task in teacher:
        runs.append(tmp_path / task)
        more = {"student before, cosine": 1.0} if task == "mrpc" else {}
        write_scores(runs[-1], task, teacher=teacher[task], student=student[task], **more)
    header, _, first, second = read_table(call_main(dse, "--average", *runs))
    assert header == ["model", *teacher, "mean", "degradation %"]
    assert (first[0], second[0]) == ("teacher", "student")
    assert (first[-2], second[-2]) == ("86.82", "82.83")
    assert second[-1] == "4.60"


def test_a_run_writes_the_scores_of_its_table(call_main, models_folder, glue_folder, tmp_path):
    out = tmp_path / "out"
    command = ("--teacher-only", "--max-steps", 1)
    printed = read_table(call_main(dse, *options(models_folder, glue_folder, out, *command)))
    averaged = read_table(call_main(dse, "--average", out))
    assert averaged[0] == ["model", "mrpc", "mean", "degradation %"]
    assert averaged[2][1] == printed[2][-1]


@pytest.mark.slow
def test_a_fine_tuned_teacher_is_used_as_it_is_and_its_logits_are_cached(
    run, models_folder, glue_folder, tmp_path
):
    first, second = tmp_path / "first", tmp_path / "second"
    student = ("--student", models_folder / "bert")
    cache = dict(XDG_CACHE_HOME=str(tmp_path))

    def cached_logits():
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("teacher-*.npy")}

    process = run("dse.py", *options(models_folder, glue_folder, first, *student), **cache)
    assert process.returncode == 0, process.stderr[-2000:]
    kept = cached_logits()
    assert len(kept) == 1
    again = (*student, "--teacher", first / "teacher")
    process = run("dse.py", *options(models_folder, glue_folder, second, *again), **cache)
    assert process.returncode == 0, process.stderr[-2000:]
    assert cached_logits() == kept
    for name in ("model.safetensors", "head.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


@pytest.mark.slow
def test_a_killed_and_resumed_run_ends_as_an_undisturbed_one(
    run, models_folder, glue_folder, tmp_path
):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    more = ("--student-layers", "0,2", "--eval-steps", 2)
    process = run("dse.py", *options(models_folder, glue_folder, whole, *more))
    assert process.returncode == 0, process.stderr[-2000:]
    arguments = options(models_folder, glue_folder, killed, *more)
    command = [sys.executable, "dse.py", *map(str, arguments), "--resume"]
    where = dict(env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=ROOT)
    state = killed / "checkpoint" / "state.safetensors"

    def checkpoint_time():
        return state.stat().st_mtime_ns if state.exists() else 0

    for kill in range(4):
        before = checkpoint_time()
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **where
        )
        while process.poll() is None and checkpoint_time() == before:
            time.sleep(0.002)
        time.sleep(0.15 * kill)
        assert process.poll() is None, "the run ended before it was killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert subprocess.run(command, capture_output=True, **where).returncode == 0
    for name in ("teacher/model.safetensors", "head.safetensors", "model.safetensors"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes(), name


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (("--benchmark",), "--benchmark is not an option of this script any longer: benchmark.py"),
        (
            ("--average", "none"),
            "none/scores.json: no such file, expected the folder of a finished",
        ),
        (("--average", "RUN", "RUN"), "scores.json: another run of task mrpc, expected one for"),
    ],
)
def test_what_is_done_instead_of_training_checks_its_arguments(
    fails, tmp_path, arguments, expected
):
    transformers.BertConfig(vocab_size=99).save_pretrained(tmp_path / "words")
    write_scores(tmp_path / "run", "mrpc", teacher=80.0)
    folders = {"FEW_WORDS": tmp_path / "words", "RUN": tmp_path / "run"}
    line = fails(dse, *[folders.get(argument, argument) for argument in arguments])
    assert expected in line


@pytest.fixture(scope="session")
def three_classes(models_folder, tmp_path_factory):
    """A classifier of three classes."""
    folder = tmp_path_factory.mktemp("three")
    dse.CrossEncoder(models_folder / "bert", "mnli", 64).save(folder)
    return folder


@pytest.mark.parametrize(
    "option, value, expected",
    [
        ("--teacher", "three_classes", "a classifier of 3 labels, expected 2 for task mrpc"),
        ("--teacher", "none", "no local path"),
        ("--task", "qnli", "QNLI/train.tsv: no such file"),
        ("--task", "rte", "argument --task: invalid choice: 'rte'"),
        ("--glue", "none", "MRPC/train.tsv: no such file"),
        ("--glue", "demo", "--task mrpc: the demo has scored pairs, expected --task stsb"),
        ("--alpha", 1.5, "argument --alpha: '1.5' is not a number from 0 to 1"),
        ("--student-layers", "9", "layers 9"),
        ("--device", "gpu", "--device gpu"),
        ("--lr", -1, "argument --lr: '-1' is not a number above 0"),
    ],
)
def test_invalid_input_prints_one_error_line_and_exits_with_status_2(
    fails, models_folder, glue_folder, three_classes, tmp_path, option, value, expected
):
    out = tmp_path / "out"
    if value == "three_classes":
        value = three_classes
    line = fails(dse, *options(models_folder, glue_folder, out), option, value)
    assert expected in line
    assert not out.exists()


def test_a_folder_without_a_complete_head_is_no_student(models_folder, tmp_path):
    with pytest.raises(common.DataError, match="head.safetensors: no such file"):
        dse.load_student(models_folder / "bert")
    student = dse.Student(dse.new_encoder(models_folder / "bert", None), 2)
    dse.save_student(student, tmp_path)
    head = tmp_path / "head.safetensors"
    head.write_bytes(head.read_bytes()[:-10])
    with pytest.raises(common.DataError, match="head.safetensors: .*expected a complete file"):
        dse.load_student(tmp_path)
