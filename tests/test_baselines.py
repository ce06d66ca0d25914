"""baselines.py: its losses against plain loops in float64, its runs from end to end."""

import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import baselines
import common
from support import demo
from support.encoder import load_encoder
from support.run import Step
from support.teachers import Teachers

METHODS = tuple(baselines.PROTOCOL_OF_METHOD)
TINY = ("--epochs", 2, "--batch-size", 32, "--eval-steps", 4, "--lr", 1e-3)


def rows(count, dimension, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dimension, dtype=torch.float64, generator=generator)


def norm(u):
    return math.sqrt(sum(a * a for a in u))


def cosine(u, v):
    return sum(a * b for a, b in zip(u, v)) / (norm(u) * norm(v))


def squared_distance(u, v):
    """Of two vectors after L2 normalization."""
    return sum((a / norm(u) - b / norm(v)) ** 2 for a, b in zip(u, v))


# ---- losses


@pytest.mark.parametrize("reduction, batch", [("sum", 1), ("mean", 6)])
def test_mse_is_equation_2(reduction, batch):
    student, teacher = rows(6, 5, 1), rows(6, 5, 2)
    expected = 0.0
    for u, v in zip(student.tolist(), teacher.tolist()):
        expected += sum((a - b) ** 2 for a, b in zip(u, v)) / 5 / batch
    loss = baselines.mse_loss(student, teacher, reduction)
    assert loss.shape == () and loss.item() == pytest.approx(expected, abs=1e-10)


def test_mse_sums_over_the_batch_unless_told_otherwise():
    student, teacher = rows(6, 5, 1), rows(6, 5, 2)
    both = baselines.mse_loss(student, teacher)
    parts = baselines.mse_loss(student[:2], teacher[:2]) + baselines.mse_loss(
        student[2:], teacher[2:]
    )
    assert both.item() == pytest.approx(parts.item(), abs=1e-10)


@pytest.mark.parametrize("reduction, batch", [("sum", 1), ("mean", 4)])
def test_patient_loss_is_that_of_pkd(reduction, batch):
    student, teacher = rows(12, 5, 1).view(4, 3, 5), rows(12, 5, 2).view(4, 3, 5)
    expected = 0.0
    for sentence in range(4):
        for layer in range(3):
            u, v = student[sentence, layer].tolist(), teacher[sentence, layer].tolist()
            expected += squared_distance(u, v) / 5 / batch
    loss = baselines.patient_loss(student, teacher, reduction)
    assert loss.shape == () and loss.item() == pytest.approx(expected, abs=1e-10)


def test_l2_dual_l2_and_skd_add_a_term_each():
    control, generalize, reference = (rows(6, 5, seed) for seed in (1, 2, 3))
    terms = [0.0, 0.0, 0.0]
    for con, gen, ref in zip(control.tolist(), generalize.tolist(), reference.tolist()):
        terms[0] += squared_distance(con, ref) / 6
        terms[1] += squared_distance(gen, ref) / 6
        terms[2] += squared_distance(con, gen) / 6
    l2 = baselines.l2_loss(control, reference)
    dual = baselines.dual_l2_loss(control, generalize, reference)
    skd = baselines.skd_loss(control, generalize, reference)
    assert l2.item() == pytest.approx(terms[0], abs=1e-10)
    assert dual.item() == pytest.approx(terms[0] + terms[1], abs=1e-10)
    assert skd.item() == pytest.approx(sum(terms), abs=1e-10)


def test_l2_runs_from_0_to_4():
    z = rows(6, 5, 1)
    assert baselines.l2_loss(3 * z, z).item() == pytest.approx(0, abs=1e-12)
    assert baselines.l2_loss(-z, 2 * z).item() == pytest.approx(4, abs=1e-12)


def test_crd_loss_against_loops():
    student, teacher, tau = rows(5, 4, 1), rows(5, 4, 2), 0.2
    total = 0.0
    for i, s in enumerate(student.tolist()):
        for j, t in enumerate(teacher.tolist()):
            power = math.exp(cosine(s, t) / tau)
            p = power / (power + 4)  # one positive, and four negatives in the batch
            total -= math.log(p if i == j else 1 - p) / 5
    assert baselines.crd_loss(student, teacher, tau).item() == pytest.approx(total, abs=1e-10)
    alone = baselines.crd_loss(student[:1], teacher[:1], tau).item()
    power = math.exp(cosine(student[0].tolist(), teacher[0].tolist()) / tau)
    assert alone == pytest.approx(-math.log(power / (power + 1)), abs=1e-10)


LOSSES = {
    "mse": lambda x: baselines.mse_loss(x, rows(4, 3, 2)),
    "mse mean": lambda x: baselines.mse_loss(x, rows(4, 3, 2), "mean"),
    "patient": lambda x: baselines.patient_loss(x[:, None], rows(4, 3, 2)[:, None]),
    "l2": lambda x: baselines.l2_loss(x, rows(4, 3, 2)),
    "dual-l2": lambda x: baselines.dual_l2_loss(x, 2 * x.flip(1), rows(4, 3, 2)),
    "skd": lambda x: baselines.skd_loss(x, x.flip(1), rows(4, 3, 2)),
    "crd": lambda x: baselines.crd_loss(x, rows(4, 3, 2), 0.2),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name):
    assert torch.autograd.gradcheck(LOSSES[name], rows(4, 3, 1).requires_grad_())


# ---- HPD's components, learning rates


def test_principal_components_keep_the_most_variance():
    random = np.random.default_rng(0)
    scale = [5, 0.1, 3, 0.1, 1, 0.1]
    vectors = (random.normal(size=(500, 6)) * scale + 2).astype(np.float32)
    directions = baselines.principal_components(vectors, 3)
    assert np.abs(directions).argmax(axis=0).tolist() == [0, 2, 4]  # by falling variance
    assert np.abs(directions.T @ directions - np.eye(3)).max() < 1e-5


def learning_rates(protocol, total, epoch_steps):
    function = baselines.PROTOCOLS[protocol].learning_rate
    steps = [Step(number, total, epoch_steps, []) for number in range(1, total + 1)]
    return [function(2.0, step) for step in steps]


def test_distilcse_warms_up_for_a_tenth_of_an_epoch_then_follows_a_cosine():
    rates = learning_rates("distilcse", total=110, epoch_steps=100)
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[59] == pytest.approx(1)  # half of the way from step 10 to step 110
    assert rates[34] == pytest.approx(1 + math.cos(math.pi / 4))
    assert rates[-1] == pytest.approx(0)


def test_congen_warms_up_for_a_tenth_of_all_steps_then_decays_linearly():
    rates = learning_rates("congen", total=100, epoch_steps=30)
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[10:] == pytest.approx([2 * (101 - step) / 91 for step in range(11, 101)])


def test_ibkd_decays_linearly_from_the_start():
    rates = learning_rates("ibkd", total=50, epoch_steps=10)
    assert rates == pytest.approx([2 * (51 - step) / 50 for step in range(1, 51)])


# ---- student


def arguments(method, **changes):
    protocol = baselines.PROTOCOL_OF_METHOD[method]
    values = dict(
        method=method,
        protocol=protocol,
        head=baselines.PROTOCOLS[protocol].defaults["head"],
        projection=False,
        align=None,
        teacher_dtype="float32",
        keep_projection=False,
        dimension=16,
        max_length=64,
        seed=0,
        device="cpu",
    )
    return SimpleNamespace(**values | changes)


def only(teacher):
    return Teachers(["the teacher"], [teacher.eval()], [1.0])


def build(models_folder, name, args, teacher="wide"):
    encoder = load_encoder(models_folder / name).eval()
    teachers = only(load_encoder(models_folder / teacher))
    sentences = demo.sentences(60)
    targets = baselines.make_targets(teachers, encoder, sentences, args)
    return baselines.build_student(encoder, teachers, targets, sentences, args).eval()


@pytest.mark.parametrize("name", ["mean", "cls", "pooler", "roberta", "distilbert"])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_trained_points_where_what_is_saved_points(models_folder, name, method):
    """baselines.Student and support.encoder.Encoder are written apart."""
    student = build(models_folder, name, arguments(method))
    encoder = student.encoder
    batch = common.Tokens(encoder, demo.sentences(6)).batch(np.arange(6))
    embedding, _ = student(*batch)
    similarity = torch.nn.functional.cosine_similarity(embedding, encoder(*batch))
    assert (similarity - 1).abs().max() < 1e-6
    dimension = {"congen": 48, "distilcse": 32, "ibkd": 16 if method == "hpd" else 32}
    assert encoder.dimension == dimension[baselines.PROTOCOL_OF_METHOD[method]]


def test_losses_that_do_not_normalize_see_the_embeddings_as_they_are_saved(models_folder):
    student = build(models_folder, "mean", arguments("kd"))
    batch = common.Tokens(student.encoder, demo.sentences(6)).batch(np.arange(6))
    assert torch.equal(student(*batch)[0], student.encoder(*batch))


def test_m_has_a_bias_and_stands_only_where_it_is_needed(models_folder):
    equal = build(models_folder, "bert", arguments("kd"), teacher="mean")
    assert isinstance(equal.projection, torch.nn.Identity)
    asked = build(models_folder, "bert", arguments("kd", projection=True), teacher="mean")
    assert asked.projection.weight.shape == (32, 32) and asked.projection.bias is not None
    needed = build(models_folder, "bert", arguments("kd"))
    assert needed.projection.weight.shape == (48, 32)


def test_w_has_no_bias_and_starts_as_the_identity_where_dimensions_agree(models_folder):
    equal = build(models_folder, "bert", arguments("crd"), teacher="mean").projection
    assert torch.equal(equal.weight, torch.eye(32)) and equal.bias is None
    assert build(models_folder, "bert", arguments("crd")).projection.weight.shape == (48, 32)
    mse = build(models_folder, "bert", arguments("kd", protocol="ibkd"), teacher="mean")
    assert isinstance(mse.projection, torch.nn.Identity)


@pytest.mark.parametrize("start", ["random", "identity"])
def test_congens_head_is_dense_and_tanh_and_stays(models_folder, start):
    plain = load_encoder(models_folder / "bert").eval()
    encoder = build(models_folder, "bert", arguments("l2", head=start), "mean").encoder
    batch = common.Tokens(plain, demo.sentences(6)).batch(np.arange(6))
    head = encoder.heads[-1]
    assert isinstance(head.activation, torch.nn.Tanh) and head.linear.bias is not None
    is_identity = torch.allclose(encoder(*batch), plain(*batch).tanh(), atol=1e-6)
    assert is_identity == (start == "identity")


def test_a_dense_head_of_the_teachers_dimension_takes_the_place_of_congens(models_folder):
    encoder = build(models_folder, "pooler", arguments("l2"), teacher="mean").encoder
    assert len(encoder.heads) == 1
    encoder = build(models_folder, "pooler", arguments("l2"), teacher="wide").encoder
    assert len(encoder.heads) == 2


def test_pkd_reads_every_other_layer_of_a_teacher_twice_as_deep(models_folder, tmp_path):
    """The targets: the teacher's embedding, behind it its pooled states, without the last layer."""
    teacher = load_encoder(models_folder / "wide").eval()
    encoder = load_encoder(models_folder / "bert", layers="0,2")
    sentences = demo.sentences(8)
    args = arguments("pkd")
    targets = baselines.make_targets(only(teacher), encoder, sentences, args)[np.arange(8)]
    input_ids, mask = common.Tokens(teacher, sentences).batch(np.arange(8))
    with torch.no_grad():
        output = teacher.model(input_ids, mask, output_hidden_states=True)
        embedding = teacher(input_ids, mask)
    assert targets.shape == (8, 48 + 48)
    assert (targets[:, :48] - embedding).abs().max() < 1e-5
    for row in range(8):
        length = int(mask[row].sum())
        mean = sum(output.hidden_states[2][row, token] for token in range(length)) / length
        assert (targets[row, 48:] - mean).abs().max() < 1e-5


def test_principal_components_are_those_of_a_sample(monkeypatch):
    vectors = np.random.default_rng(0).normal(size=(500, 6)).astype(np.float32)
    whole = baselines.principal_components(vectors, 2)
    monkeypatch.setattr(baselines, "PCA_SAMPLE", 100)
    sample = baselines.principal_components(vectors, 2)
    assert np.abs(sample - whole).max() > 0.01
    assert np.array_equal(sample, baselines.principal_components(vectors, 2))


def test_hpds_targets_are_projections_of_the_teachers_embeddings(models_folder):
    """As in HPD's code, the mean is not subtracted."""
    teacher = load_encoder(models_folder / "wide").eval()
    sentences = demo.sentences(60)
    targets = baselines.make_targets(only(teacher), teacher, sentences, arguments("hpd"))
    embeddings = common.encode_sentences(teacher, sentences)
    directions = baselines.principal_components(embeddings, 16)
    assert targets.dimension == 16 and len(targets) == 60
    expected = embeddings.astype(np.float64) @ directions
    assert np.abs(targets[np.arange(60)].numpy() - expected).max() < 1e-4
    assert np.abs(expected.mean(axis=0)).max() > 0.1


def test_hpds_head_is_dense_and_tanh_with_a_bias(models_folder):
    student = build(models_folder, "mean", arguments("hpd"))
    (head,) = student.encoder.heads
    assert head.linear.bias is not None and isinstance(head.activation, torch.nn.Tanh)
    assert not student.normalize and student.encoder.normalize


@pytest.mark.parametrize("method, norm", [("kd", 0), ("pkd", 0), ("l2", 1), ("crd", 1)])
def test_gradients_are_clipped_as_in_the_papers_code(monkeypatch, method, norm):
    assert parse(monkeypatch, "--method", method, "--student", "x").max_norm == norm
    assert parse(monkeypatch, "--method", method, "--student", "x", "--max-norm", 2).max_norm == 2


# ---- command line


def parse(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["baselines.py", *map(str, options)])
    return baselines.parse_args()


@pytest.mark.parametrize(
    "method, protocol, epochs, batch_size, max_length, patience, head",
    [
        ("kd", "distilcse", 20, 512, 64, 3, "none"),
        ("pkd", "distilcse", 20, 512, 64, 3, "none"),
        ("l2", "congen", 20, 128, 128, 7, "random"),
        ("dual-l2", "congen", 20, 128, 128, 7, "random"),
        ("skd", "congen", 20, 128, 128, 7, "random"),
        ("crd", "ibkd", 10, 256, 128, 0, "none"),
        ("hpd", "ibkd", 10, 256, 128, 0, "none"),
    ],
)
def test_defaults_are_those_of_the_methods_paper(
    monkeypatch, method, protocol, epochs, batch_size, max_length, patience, head
):
    args = parse(monkeypatch, "--method", method, "--student", "x")
    assert (args.protocol, args.epochs, args.batch_size) == (protocol, epochs, batch_size)
    assert (args.max_length, args.patience, args.head) == (max_length, patience, head)
    unsupervised = args.teacher == "princeton-nlp/unsup-simcse-roberta-large"
    assert unsupervised == (protocol == "congen") and args.reduction == "mean"


def test_a_protocol_that_is_given_brings_its_defaults(monkeypatch):
    args = parse(monkeypatch, "--method=kd", "--protocol=ibkd", "--student", "x")
    assert (args.protocol, args.epochs, args.max_length) == ("ibkd", 10, 128)
    args = parse(monkeypatch, "--method", "kd", "--protocol", "congen", "--demo", "--lr", 1)
    assert (args.head, args.epochs, args.train, args.lr) == ("random", 1, "demo", 1.0)


@pytest.mark.parametrize(
    "protocol, millions, expected",
    [
        ("distilcse", 109, 2e-4),
        ("distilcse", 67, 3e-4),
        ("congen", 17.4, 5e-4),
        ("congen", 22.7, 3e-4),
        ("congen", 109.5, 5e-5),
        ("congen", 134.7, 3e-4),
        ("ibkd", 22.7, 1e-4),
    ],
)
def test_the_learning_rate_follows_the_students_size(protocol, millions, expected):
    parameter = SimpleNamespace(numel=lambda: int(millions * 1e6))
    encoder = SimpleNamespace(parameters=lambda: [parameter])
    args = SimpleNamespace(protocol=protocol, lr=None)
    baselines.choose_learning_rate(args, encoder)
    assert args.lr == expected
    args.lr = 0.5
    baselines.choose_learning_rate(args, encoder)
    assert args.lr == 0.5


# ---- runs


@pytest.fixture(scope="session")
def views(files):
    """pairs.tsv, the demo's paraphrases, beside the other files."""
    lines = [f"{anchor}\t{positive}\n" for anchor, positive, _ in demo.triplets(300)]
    (files / "pairs.tsv").write_text("".join(lines), "utf-8")
    return files


def options(models_folder, views, output, teacher, *more):
    folders = {"--student": models_folder, "--pairs": views}
    given = []
    for before, word in zip(("", *more), more):
        given.append(folders[before] / word if before in folders else word)
    return (
        *("--teacher", models_folder / teacher),
        *("--train", views / "sentences.txt"),
        *("--dev", views / "dev.tsv"),
        *("--output", output),
        *TINY,
        *given,
    )


RUNS = {
    "kd": ("mean", "--student-layers", "1,3"),
    "kd with M": ("mean", "--method", "kd", "--student-layers", "1", "--projection"),
    "kd, another dimension": ("wide", "--method", "kd", "--student", "bert"),
    "kd as IBKD's MSE": (
        *("mean", "--method", "kd", "--student-layers", "2"),
        *("--protocol", "ibkd", "--reduction", "mean"),
    ),
    "kd in ConGen's loop": ("wide", "--method", "kd", "--student", "cls", "--protocol", "congen"),
    "pkd": ("wide", "--student-layers", "1,3", "--teacher-dtype", "float16"),
    "pkd, another dimension": (
        *("wide", "--method", "pkd", "--student", "pooler", "--reduction", "mean"),
    ),
    "pkd, one layer": ("wide", "--method", "pkd", "--student-layers", "2"),
    "l2": ("wide", "--student-layers", "1,3"),
    "l2 with M": (
        *("wide", "--method", "l2", "--student", "mean", "--head", "none"),
        *("--protocol", "distilcse"),
    ),
    "dual-l2": ("mean", "--student-layers", "1,3", "--augment", "crop"),
    "skd": ("mean", "--student-layers", "1,3", "--pairs", "pairs.tsv"),
    "crd": ("wide", "--student", "pooler"),
    "hpd": (
        *("wide", "--student", "distilbert", "--dimension", 16),
        *("--teacher-dtype", "float16"),
    ),
}


def table_of(process, column):
    """The last lines of a run's output -> {row of the table: its number in a column}."""
    rows_of_students = [
        line.split("|") for line in process.stdout.splitlines() if "student" in line
    ]
    return {cells[1].strip(): float(cells[column]) for cells in rows_of_students}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_leaves_the_best_student(run, models_folder, views, tmp_path, name):
    teacher, *more = RUNS[name]
    if "--method" not in more:
        more = ["--method", name, *more]
    out = tmp_path / "out"
    process = run("baselines.py", *options(models_folder, views, out, teacher, *more))
    assert process.returncode == 0, process.stderr[-3000:]
    entries = metrics(out)
    assert {entry["stage"] for entry in entries} == {"distill"}
    assert entries[0]["step"] == 0 and entries[-1]["step"] == 20
    assert all(math.isfinite(entry["loss"]) for entry in entries[1:])
    encoder = load_encoder(out).eval()
    assert encoder.dimension == 16 or name != "hpd"
    pairs = common.read_scored_pairs(views / "dev.tsv")
    dev = common.spearman(encoder, {"dev": pairs})["dev"]
    assert dev == pytest.approx(table_of(process, column=2)["student after"], abs=0.006)
    assert dev >= max(entry["dev"] for entry in entries if "dev" in entry) - 1e-4
    check_folder(out, encoder, dev, models_folder)


def check_folder(folder, encoder, dev, models_folder):
    """SentenceTransformer reads the folder as we do; the card states the score and no path."""
    from huggingface_hub import ModelCard
    from sentence_transformers import SentenceTransformer

    sentences = demo.sentences(20)
    ours = common.encode_sentences(encoder, sentences)
    theirs = SentenceTransformer(str(folder), device="cpu").encode(sentences)
    assert np.abs(theirs - ours).max() < 1e-5
    card = ModelCard.load(folder / "README.md")
    assert card.data.eval_results[0].metric_value == pytest.approx(dev, abs=0.006)
    assert str(models_folder) not in str(card)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["kd", "skd", "crd"])
def test_a_dozen_steps_bring_the_real_student_nearer(run, tmp_path, method):
    """all-MiniLM-L6-v2 into its layers 1,3,5, 768 of the demo's sentences: the demo test pairs."""
    (tmp_path / "train.txt").write_text("\n".join(demo.sentences(768)), "utf-8")
    process = run(
        "baselines.py",
        *("--demo", "--method", method, "--head", "none", "--train", tmp_path / "train.txt"),
        *("--output", tmp_path / "out"),
        OMP_NUM_THREADS="2",
    )
    assert process.returncode == 0, process.stderr[-2000:]
    table = table_of(process, column=3)
    assert table["student after"] > table["student before"] + 5


def weights(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("model.safetensors"))
    }


def metrics(folder):
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for entry in entries:
        entry.pop("sentences_per_second", None)
        entry.pop("peak_memory_mb", None)
    return entries


@pytest.mark.slow
def test_a_run_that_is_in_the_way_stays(run, fails, models_folder, views, tmp_path):
    more = ("--method", "kd", "--student-layers", "0,2", "--max-steps", 4)
    base = options(models_folder, views, tmp_path / "out", "mean", *more)
    assert run("baselines.py", *base).returncode == 0
    before = weights(tmp_path / "out")
    assert "already contains a run" in fails(baselines, *base)
    line = fails(baselines, *base, "--resume", "--method", "pkd")
    assert "--method pkd: the run to resume" in line
    assert weights(tmp_path / "out") == before


@pytest.mark.slow
def test_a_loss_that_becomes_nan_stops_the_run_and_keeps_the_best_student(
    run, models_folder, views, tmp_path
):
    more = ("--method", "kd", "--student-layers", "0,2", "--lr", 1e38)
    process = run("baselines.py", *options(models_folder, views, tmp_path / "out", "mean", *more))
    assert process.returncode == 2 and "Traceback" not in process.stderr
    line = process.stderr.splitlines()[-1]
    assert line.startswith("error: step ") and "the loss is nan" in line
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.isfinite(value).all() for value in saved.values())


# ---- invalid input


def test_invalid_input_prints_one_line_and_exits_with_status_2(
    fails, models_folder, views, tmp_path
):
    out = tmp_path / "out"
    base = options(models_folder, views, out, "mean", "--student-layers", "0,2")
    (tmp_path / "one.tsv").write_text("a boy\tein Junge\na girl\n", "utf-8")
    (tmp_path / "blank.txt").write_text("\n \n", "utf-8")
    kd = ("--method", "kd")
    cases = (
        ((), "--method"),
        (("--method", "x"), "argument --method: invalid choice: 'x'"),
        ((*kd, "--protocol", "x"), "argument --protocol: invalid choice: 'x'"),
        ((*kd, "--head", "x"), "--head"),
        ((*kd, "--reduction", "x"), "--reduction"),
        ((*kd, "--train", tmp_path / "none.txt"), "no such file"),
        ((*kd, "--train", tmp_path / "blank.txt"), "every line is blank"),
        ((*kd, "--student-layers", "0,9"), "layers 0,9"),
        ((*kd, "--batch-size", 0), "argument --batch-size: '0' is not a whole number, 1 or more"),
        ((*kd, "--lr", 0), "argument --lr: '0' is not a number above 0"),
        (("--method", "crd", "--temperature", 0), "--temperature: '0' is not a number above 0"),
        (("--method", "hpd", "--dimension", 33), "--dimension 33: expected at most the teacher's"),
        (("--method", "skd", "--pairs", tmp_path / "one.tsv"), "one.tsv:2"),
        (("--method", "skd", "--augment", "synonym", "--wordnet", tmp_path / "none"), "data.noun"),
        ((*kd, "--device", "gpu"), "--device gpu"),
    )
    for extra, expected in cases:
        line = fails(baselines, *base, *extra)
        assert expected in line and not out.exists(), line
