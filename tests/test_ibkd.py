"""ibkd.py: its kernels and losses against plain loops, its runs from end to end, for both tasks."""

import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from test_retrieval import training_folder

import common
import ibkd
from support import demo, retrieval_training
from support import run as run_module
from support.encoder import LayerPooling, load_encoder
from support.teachers import Teachers

KERNELS = ("rbf", "imq", "linear")


def rows(count, dimension, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dimension, dtype=torch.float64, generator=generator)


# ---- losses


def cosine(u, v):
    norms = math.sqrt(sum(a * a for a in u) * sum(b * b for b in v))
    return sum(a * b for a, b in zip(u, v)) / norms


def kernel_value(name, u, v, gamma):
    distance = sum((a - b) ** 2 for a, b in zip(u, v))
    if name == "rbf":
        return math.exp(-gamma * distance)
    if name == "imq":
        return 1 / math.sqrt(distance + gamma)
    return cosine(u, v)


def gram_by_loops(name, z, gamma):
    return [[kernel_value(name, u, v, gamma) for v in z] for u in z]


@pytest.mark.parametrize("name", KERNELS)
def test_gram_matrix_is_equation_7(name):
    z = rows(7, 4, 1)
    expected = torch.tensor(gram_by_loops(name, z.tolist(), 0.3), dtype=torch.float64)
    assert (ibkd.gram_matrix(z, name, 0.3) - expected).abs().max() < 1e-10


def centered(gram):
    """H K H: each entry less the means of its row and its column, plus the mean of all."""
    l = len(gram)
    row_means = [sum(row) / l for row in gram]
    column_means = [sum(row[j] for row in gram) / l for j in range(l)]
    mean = sum(row_means) / l
    return [
        [gram[i][j] - row_means[i] - column_means[j] + mean for j in range(l)] for i in range(l)
    ]


@pytest.mark.parametrize("name", KERNELS)
def test_hsic_is_equation_6(name):
    l = 7
    x = rows(l, 4, 1)
    s = rows(l, 3, 2)
    gram_x = centered(gram_by_loops(name, x.tolist(), 0.5))
    gram_s = gram_by_loops(name, s.tolist(), 0.5)
    expected = sum(gram_x[i][j] * gram_s[j][i] for i in range(l) for j in range(l)) / l**2
    result = ibkd.hsic(ibkd.gram_matrix(x, name, 0.5), ibkd.gram_matrix(s, name, 0.5))
    assert result.item() == pytest.approx(expected, abs=1e-10)
    assert expected > 0


@pytest.mark.parametrize("name", KERNELS)
def test_hsic_tends_to_0_for_independent_samples_and_not_for_a_variable_with_itself(name):
    independent = []
    itself = []
    for l in (20, 200, 2000):
        x = ibkd.gram_matrix(rows(l, 3, l), name, 0.5)
        other = ibkd.gram_matrix(rows(l, 3, l + 1), name, 0.5)
        independent.append(ibkd.hsic(x, other).item())
        itself.append(ibkd.hsic(x, x).item())
    assert independent[0] > 3 * independent[1] > 9 * independent[2]
    assert itself[2] > 0.3 * itself[0]
    assert itself[2] > 50 * independent[2]


def test_info_nce_is_that_of_section_3_1():
    student, teacher, tau = rows(6, 5, 1), rows(6, 5, 2), 0.1
    total = 0.0
    for i, s in enumerate(student.tolist()):
        powers = [math.exp(cosine(s, t) / tau) for t in teacher.tolist()]
        total -= math.log(powers[i] / sum(powers)) / 6
    assert ibkd.info_nce(student, teacher, tau).item() == pytest.approx(total, abs=1e-10)


@pytest.mark.parametrize("batch_negatives", [False, True])
def test_supervised_info_nce_is_equation_10(batch_negatives):
    anchor, positive, tau = rows(4, 5, 1), rows(4, 5, 2), 0.1
    negatives = rows(12, 5, 3).view(4, 3, 5)
    total = 0.0
    for i, s in enumerate(anchor.tolist()):
        hard = negatives.flatten(0, 1) if batch_negatives else negatives[i]
        of_positives = [math.exp(cosine(s, t) / tau) for t in positive.tolist()]
        of_negatives = [math.exp(cosine(s, t) / tau) for t in hard.tolist()]
        total -= math.log(of_positives[i] / (sum(of_positives) + sum(of_negatives))) / 4
    result = ibkd.supervised_info_nce(anchor, positive, negatives, tau, batch_negatives)
    assert result.item() == pytest.approx(total, abs=1e-10)


def test_the_bottleneck_is_beta_hsic_of_embeddings_as_they_are_or_normalized():
    x, s = rows(6, 5, 1), rows(6, 4, 2)
    args = SimpleNamespace(kernel="imq", gamma=0.3, hsic_vectors="raw")
    grams = [ibkd.gram_matrix(z, "imq", 0.3) for z in (x, s)]
    assert torch.equal(ibkd.bottleneck(x, s, 0.7, args), 0.7 * ibkd.hsic(*grams))
    args.hsic_vectors = "unit"
    units = [z / z.norm(dim=1, keepdim=True) for z in (x, s)]
    expected = 0.7 * ibkd.hsic(*(ibkd.gram_matrix(z, "imq", 0.3) for z in units))
    assert ibkd.bottleneck(x, s, 0.7, args).item() == pytest.approx(expected.item(), abs=1e-12)


LOSSES = {
    "info_nce": lambda x: ibkd.info_nce(x, rows(4, 3, 2), 0.1),
    "supervised_info_nce": lambda x: ibkd.supervised_info_nce(
        x, rows(4, 3, 2), rows(8, 3, 3).view(4, 2, 3), 0.1
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_the_contrastive_losses(name):
    assert torch.autograd.gradcheck(LOSSES[name], rows(4, 3, 1).requires_grad_())


@pytest.mark.parametrize("name", KERNELS)
def test_gradients_of_hsic(name):
    gram = ibkd.gram_matrix(rows(4, 5, 2), name, 0.5)

    def loss(s):
        return ibkd.hsic(gram, ibkd.gram_matrix(s, name, 0.5))

    assert torch.autograd.gradcheck(loss, rows(4, 3, 1).requires_grad_())


# ---- student


@pytest.mark.parametrize("name", ["mean", "cls", "pooler", "roberta", "distilbert"])
@pytest.mark.parametrize("keep", [False, True])
def test_the_student_is_read_as_its_folder_will_be(models_folder, name, keep):
    """ibkd.Student and support's Encoder are written apart; what is trained must point in the
    direction of what is saved and scored."""
    encoder = load_encoder(models_folder / name).eval()
    student = ibkd.Student(encoder, 48, keep).eval()
    input_ids, mask = common.Tokens(encoder, demo.sentences(6)).batch(np.arange(6))
    x, s = student(input_ids, mask)
    trained = student.mapping(s) if keep else s
    directions = torch.nn.functional.cosine_similarity(trained, encoder(input_ids, mask))
    assert (directions - 1).abs().max() < 1e-6
    assert encoder.dimension == (48 if keep else 32)
    assert s.shape == (6, 32)

    output = encoder.model(input_ids, mask, output_hidden_states=True)
    states = output.hidden_states[0]
    for row in range(6):
        tokens = [states[row, i] for i in range(int(mask[row].sum()))]
        assert (x[row] - sum(tokens) / len(tokens)).abs().max() < 1e-6


def test_s_is_normalized_only_if_the_folder_says_so(models_folder):
    for name, normalized in (("mean", True), ("cls", False)):
        encoder = load_encoder(models_folder / name).eval()
        batch = common.Tokens(encoder, demo.sentences(4)).batch(np.arange(4))
        _, s = ibkd.Student(encoder)(*batch)
        assert torch.allclose(s.norm(dim=1), torch.ones(4), atol=1e-5) == normalized


def test_w_starts_as_the_identity_if_the_dimensions_agree(models_folder):
    encoder = load_encoder(models_folder / "mean")
    assert torch.equal(ibkd.Student(encoder, 32).mapping.weight, torch.eye(32))
    assert ibkd.Student(encoder, 48).mapping.weight.shape == (48, 32)


def test_without_a_teacher_there_is_no_w(models_folder):
    student = ibkd.Student(load_encoder(models_folder / "mean"))
    s = rows(3, 32, 0)
    assert torch.equal(student.mapping(s), s)


def test_the_projection_is_equation_11(models_folder):
    """It stands behind S, which stays as it was, and becomes the encoder's embedding."""
    for name in ("cls", "mean"):
        encoder = load_encoder(models_folder / name).eval()
        batch = common.Tokens(encoder, demo.sentences(4)).batch(np.arange(4))
        expected = encoder(*batch)
        student = ibkd.Student(encoder)
        ibkd.add_projection(student, 16)
        (head,) = encoder.heads
        assert student.mapping is head.linear
        assert encoder.dimension == 16
        assert head.linear.weight.shape == (16, 32)
        _, s = student(*batch)
        assert torch.allclose(s, expected, atol=1e-6)
        projected = expected @ head.linear.weight.T
        if encoder.normalize:
            projected = projected / projected.norm(dim=1, keepdim=True)
        assert torch.allclose(encoder(*batch), projected, atol=1e-6)


@pytest.mark.parametrize("layer", [0, 1, 4, -2])
def test_x_is_the_mean_of_a_layer(models_folder, layer):
    encoder = load_encoder(models_folder / "cls").eval()
    input_ids, mask = common.Tokens(encoder, demo.sentences(4)).batch(np.arange(4))
    x, _ = ibkd.Student(encoder, input_layer=layer)(input_ids, mask)
    states = encoder.model(input_ids, mask, output_hidden_states=True).hidden_states
    for row, length in enumerate(mask.sum(dim=1).tolist()):
        assert torch.allclose(x[row], states[layer][row, :length].mean(dim=0), atol=1e-6)


def test_texts_are_embedded_in_parts_and_come_back_in_their_order(models_folder, monkeypatch):
    monkeypatch.setattr(ibkd, "TEXTS_AT_A_TIME", 3)
    encoder = load_encoder(models_folder / "cls").eval()
    tokens = common.Tokens(encoder, demo.sentences(20))
    wanted = np.array([7, 0, 19, 7, 12, 3, 4, 15])
    student = ibkd.Student(encoder).eval()
    inputs, embeddings = ibkd.embed_by_length(student, tokens, wanted, "cpu")
    for row, text in enumerate(wanted):
        x, s = student(*tokens.batch(np.array([text])))
        assert (inputs[row] - x[0]).abs().max() < 1e-5
        assert (embeddings[row] - s[0]).abs().max() < 1e-5


# ---- settings


def parse(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["ibkd.py", "--student", "x", *map(str, options)])
    return ibkd.parse_args()


def test_table_1_and_defaults_are_the_papers(monkeypatch):
    args = parse(monkeypatch)
    assert (args.gamma, args.beta1, args.beta2) == (0.5, 1.0, 0.5)
    assert (args.hard_negatives, args.kernel) == (8, "rbf")
    assert (args.hsic_vectors, args.patience, args.max_length) == ("raw", 0, 128)
    assert (args.hsic_layer, args.hsic_texts) == (0, "anchor")
    assert (args.test_split, args.dev_queries, args.negatives) == ("test", 2000, None)
    assert (args.similarity, args.teacher_similarity) == ("cosine", "cosine")
    assert (args.lr, args.batch_size, args.epochs, args.temperature) == (1e-4, 256, 10, 0.1)
    assert (args.finetune_lr, args.finetune_batch_size) == (3e-5, 256)
    assert (args.finetune_epochs, args.finetune_temperature) == (3, 0.05)
    args = parse(monkeypatch, "--task", "dr", "--lr", 1, "--finetune-epochs", 7)
    assert (args.lr, args.batch_size, args.epochs, args.temperature) == (1, 128, 3, 0.1)
    assert (args.finetune_lr, args.finetune_batch_size) == (1e-5, 128)
    assert (args.finetune_epochs, args.finetune_temperature) == (7, 0.05)


def test_the_teacher_is_compared_as_the_student_unless_it_is_said(monkeypatch):
    args = parse(monkeypatch, "--similarity", "dot")
    assert (args.similarity, args.teacher_similarity) == ("dot", "dot")
    args = parse(monkeypatch, "--teacher-similarity", "dot")
    assert (args.similarity, args.teacher_similarity) == ("cosine", "dot")


def test_the_learning_rate_falls_from_its_peak_to_zero():
    rates = []
    for number in range(1, 51):
        step = SimpleNamespace(number=number, total=50)
        rates.append(ibkd.linear_decay(2.0, step))
    assert rates == pytest.approx([2 * (51 - number) / 50 for number in range(1, 51)])


# ---- runs

TINY = (
    *("--epochs", 2, "--batch-size", 32, "--lr", 1e-3, "--eval-steps", 4),
    *("--finetune-epochs", 1, "--finetune-batch-size", 32),
)


def options(models_folder, files, output, teacher="mean", *more):
    data = ("--train", files / "sentences.txt", "--triplets", files / "triplets.csv")
    data += ("--dev", files / "dev.tsv")
    return ("--teacher", models_folder / teacher, *data, "--output", output, *TINY, *more)


def metrics(folder):
    """The lines of metrics.jsonl, without the speed."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for entry in entries:
        entry.pop("sentences_per_second", None)
        entry.pop("peak_memory_mb", None)
    return entries


def weights(folder):
    paths = sorted(folder.rglob("model.safetensors"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def table_rows(printed):
    """The table at the end -> {model or "model": [cells]}."""
    table = {}
    for line in printed.splitlines():
        if line.startswith("|"):
            name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            table[name] = cells
    return table


SETTINGS = {
    "layers of the teacher": ("mean", "--student-layers", "0,2"),
    "projection": ("wide", "--student", "bert", "--kernel", "imq", "--dim", 16),
    "W kept, then projected": ("wide", "--student-layers", "1,3", "--keep-mapping", "--dim", 16),
    "W kept, square": ("mean", "--student-layers", 2, "--hsic-vectors", "unit", "--keep-mapping"),
    "pooler, CKD": ("wide", "--student", "pooler", "--beta1", 0, "--beta2", 0),
    "batch negatives": ("cls", "--student", "distilbert", "--batch-negatives"),
    "linear kernel": ("roberta", "--student-layers", "0,3", "--kernel", "linear"),
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_leaves_the_best_student(call_main, models_folder, files, tmp_path, setting):
    from sentence_transformers import SentenceTransformer

    teacher, *more = SETTINGS[setting]
    if "--student" in more:
        more[1] = models_folder / more[1]
    out = tmp_path / "out"
    printed = call_main(ibkd, *options(models_folder, files, out, teacher, *more))
    entries = metrics(out)
    starts = [entry["stage"] for entry in entries if entry["step"] == 0]
    assert starts == ["distill", "finetune"]
    for entry in entries:
        if entry["step"] > 0:
            assert math.isfinite(entry["loss"])
            total = entry["info_nce"] + entry["hsic"]
            assert entry["loss"] == pytest.approx(total, rel=1e-5)
            assert (entry["hsic"] > 0) == ("--beta1" not in more)
    encoder = load_encoder(out).eval()
    sets = {"dev": common.read_scored_pairs(files / "dev.tsv")}
    dev = common.spearman(encoder, sets)["dev"]
    finetuned = [entry["dev"] for entry in entries if entry["stage"] == "finetune"]
    assert dev == pytest.approx(max(finetuned), abs=1e-4)
    assert dev == pytest.approx(float(table_rows(printed)["student after stage 2"][0]), abs=0.006)
    kept_dimension = 48 if teacher == "wide" and "--keep-mapping" in more else 32
    assert encoder.dimension == (16 if "--dim" in more else kept_dimension)
    ours = common.encode_sentences(encoder, demo.sentences(20))
    theirs = SentenceTransformer(str(out), device="cpu").encode(demo.sentences(20))
    assert np.abs(theirs - ours).max() < 1e-5


@pytest.fixture
def search_folder(tmp_path):
    return training_folder(tmp_path / "beir", 200, 60)


@pytest.mark.slow
def test_a_retrieval_run(call_main, models_folder, search_folder, tmp_path):
    import eval_retrieval

    models = ("--teacher", models_folder / "wide", "--student-layers", "0,2")
    task = ("--task", "dr", "--beir", search_folder, "--output", tmp_path / "out")
    task += ("--teacher-dtype", "float16")  # read by the loop, and to mine hard negatives
    printed = call_main(ibkd, *task, *models, *TINY)
    table = table_rows(printed)
    assert table["model"][:2] == ["dev MRR@10", "MRR@10"]
    after = ("student after stage 1", "student after stage 2")
    assert {"teacher", "student before", *after} < set(table)
    card = ModelCard.load(tmp_path / "out" / "README.md").data.eval_results[0]
    assert (card.task_type, card.metric_type) == ("information-retrieval", "mrr@10")
    finetuned = [entry for entry in metrics(tmp_path / "out") if entry["stage"] == "finetune"]
    best = max(entry["dev"] for entry in finetuned)
    assert float(table[after[1]][0]) == pytest.approx(best, abs=0.006)
    check = call_main(eval_retrieval, tmp_path / "out", "--beir", search_folder)
    assert table_rows(check)[str(tmp_path / "out")][0] == table[after[1]][1]


def read_task(monkeypatch, models_folder, search_folder, stages, *more):
    """-> Task, and a teacher whose embeddings differ in norm."""
    more = ("--task", "dr", "--beir", search_folder, "--hard-negatives", 3, *more)
    args = parse(monkeypatch, *more)
    encoder = load_encoder(models_folder / "bert").eval()
    teacher = load_encoder(models_folder / "wide").eval()
    torch.manual_seed(0)
    teacher.add_head(torch.nn.Linear(48, 48), torch.nn.Identity())
    monkeypatch.setattr(ibkd, "load_teachers", lambda args: Teachers(["wide"], [teacher], [1.0]))
    return ibkd.retrieval_task(encoder, args, stages), teacher


def dot(u, v):
    return sum(a * b for a, b in zip(u, v))


def rows_of(tokens):
    """The token numbers of each text."""
    return [tuple(ids) for ids in np.split(tokens.ids, tokens.starts[1:-1])]


@pytest.mark.parametrize("value", [cosine, dot])
def test_the_teacher_mines_the_negatives_of_a_retrieval_task(
    monkeypatch, models_folder, search_folder, value
):
    more = ("--skip-test", "--teacher-similarity", value.__name__)
    task, teacher = read_task(monkeypatch, models_folder, search_folder, ("finetune",), *more)
    assert task.evaluation.similarity == "cosine"
    _, teacher_evaluation = task.teacher_scores.args
    assert teacher_evaluation.similarity == value.__name__
    labels = task.labels()
    assert labels.tokens is task.texts.of(task.teachers.first)
    assert len(labels.tokens) == 254  # of 60 queries six are for dev
    assert len(labels.anchors) == 2 * 54  # each has two positives
    assert labels.hard_negatives.shape == (108, 3)
    texts = [query["text"] for query in read_json_lines(search_folder / "queries.jsonl")]
    queries = [text for i, text in enumerate(texts, 1) if i % 10]
    expected = rows_of(common.Tokens(teacher, demo.sentences(200) + queries))
    assert rows_of(labels.tokens) == expected
    vectors = common.encode_sentences(teacher, demo.sentences(200) + queries).tolist()
    for row in (0, 1, 50, 107):
        query = vectors[labels.anchors[row]]
        own = set(labels.positives[labels.anchors == labels.anchors[row]].tolist())
        assert len(own) == 2
        values = [value(query, passage) for passage in vectors[:200]]
        others = [i for i in np.argsort([-value for value in values]) if i not in own]
        assert labels.hard_negatives[row].tolist() == others[:3]


def read_json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_negatives_are_mined_only_for_stage_2_and_read_where_they_are_given(
    monkeypatch, models_folder, search_folder, tmp_path
):
    path = tmp_path / "negatives.tsv"
    more = ("--skip-test", "--negatives", path)
    with monkeypatch.context() as patch:
        patch.setattr(retrieval_training, "cached_negatives", None)
        read_task(monkeypatch, models_folder, search_folder, ("distill",), *more)
        assert not path.exists()
    task, _ = read_task(monkeypatch, models_folder, search_folder, ("distill", "finetune"), *more)
    assert not path.exists()
    mined = task.labels()
    assert path.read_text().count("\n") == 54
    monkeypatch.setattr(retrieval_training, "cached_negatives", None)
    lines = path.read_text().splitlines()
    lines[0] = "q0\td101\td102\td103"
    path.write_text("\n".join(lines) + "\n")
    task, _ = read_task(monkeypatch, models_folder, search_folder, ("finetune",), *more)
    read = task.labels()
    assert read.hard_negatives[:2].tolist() == [[101, 102, 103]] * 2
    assert read.hard_negatives[2:].tolist() == mined.hard_negatives[2:].tolist()


def test_no_text_is_tokenized_twice(monkeypatch, models_folder, search_folder):
    """Teacher and student have one tokenizer here; both stages use the same tokens."""
    made = []
    make = common.Tokens

    def count_tokens(encoder, texts, limit):
        made.append(len(texts))
        return make(encoder, texts, limit)

    monkeypatch.setattr(retrieval_training, "Tokens", count_tokens)
    task, teacher = read_task(monkeypatch, models_folder, search_folder, ("distill", "finetune"))
    task.labels()
    for _ in range(3):
        task.evaluation.dev_score(teacher)
        _, teacher_evaluation = task.teacher_scores.args
        teacher_evaluation.dev_score(load_encoder(models_folder / "bert"))
    assert made == [254, 6, 200]


def test_the_test_queries_are_those_of_the_split(monkeypatch, models_folder, search_folder):
    judged = "query-id\tcorpus-id\tscore\nq7\td3\t1\nq8\td4\t1\n"
    (search_folder / "qrels" / "dev.tsv").write_text(judged)
    more = (("--test-split", "dev"), (), ("--skip-test",))
    counts = []
    for option in more:
        task, _ = read_task(monkeypatch, models_folder, search_folder, ("distill",), *option)
        counts.append(task.evaluation.test and len(task.evaluation.test.names))
    assert counts == [2, 60, None]


@pytest.mark.slow
@pytest.mark.parametrize("of", ["anchor", "all"])
def test_stage_2_compares_each_anchor_with_its_own_positive_and_negative(
    call_main, models_folder, files, tmp_path, of
):
    """One batch of all 100 triplets, no dropout, hardly any learning: the loss that is logged is
    that of the embeddings, with the texts in their own order. HSIC is of S before the projection,
    of the anchors or of all texts."""
    still = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.AutoModel.from_pretrained(models_folder / "bert", **still)
    model.save_pretrained(tmp_path / "still")
    tokenizer = transformers.AutoTokenizer.from_pretrained(models_folder / "bert")
    tokenizer.save_pretrained(tmp_path / "still")
    more = ("--stage", "finetune", "--student", tmp_path / "still", "--max-steps", 1)
    more += ("--finetune-batch-size", 100, "--finetune-lr", 1e-30, "--dim", 16)
    more += ("--hsic-texts", of, "--hsic-layer", -2, "--beta2", 2)
    call_main(ibkd, *options(models_folder, files, tmp_path / "out", "mean", *more))
    logged = metrics(tmp_path / "out")[-1]

    still = load_encoder(tmp_path / "still").eval()
    encoder = load_encoder(tmp_path / "out").eval()
    assert encoder.dimension == 16
    triplets = common.read_triplets(files / "triplets.csv")
    assert len({len(text.split()) for row in triplets for text in row}) > 3
    sides = [common.encode_sentences(encoder, side).tolist() for side in zip(*triplets)]
    anchors, positives, negatives = sides
    total = 0.0
    for i, (anchor, negative) in enumerate(zip(anchors, negatives)):
        powers = [math.exp(cosine(anchor, other) / 0.05) for other in [*positives, negative]]
        total -= math.log(powers[i] / sum(powers)) / len(anchors)
    assert logged["info_nce"] == pytest.approx(total, rel=1e-4)

    texts = [text for side in zip(*triplets) for text in side]
    x = common.encode_sentences(load_encoder(tmp_path / "still", layer_3()).eval(), texts)
    s = common.encode_sentences(still, texts)
    count = 100 if of == "anchor" else 300
    grams = [ibkd.gram_matrix(torch.from_numpy(z[:count]), "rbf", 0.5) for z in (x, s)]
    assert logged["hsic"] == pytest.approx(2 * ibkd.hsic(*grams).item(), rel=1e-3)


def layer_3():
    """The mean of the tokens in the last layer but one of four."""
    return LayerPooling((3,), "mean", False)


@pytest.mark.slow
def test_a_dozen_steps_improve_the_real_student(run, teacher, tmp_path):
    """all-MiniLM-L6-v2 into its layers 1,3,5 on 768 sentences: five points on the demo's test."""
    (tmp_path / "train.txt").write_text("\n".join(demo.sentences(768)), "utf-8")
    more = ("--stage", "distill", "--train", tmp_path / "train.txt", "--output", tmp_path / "out")
    process = run("ibkd.py", "--demo", *more, OMP_NUM_THREADS="2")
    assert process.returncode == 0, process.stderr[-2000:]
    table = table_rows(process.stdout)
    after = float(table["student after stage 1"][1])
    assert after > float(table["student before"][1]) + 5


@pytest.mark.slow
@pytest.mark.parametrize("dimension", [16, 32])
def test_interrupted_in_stage_2_hsic_is_still_of_the_embedding_before_the_projection(
    call_main, monkeypatch, models_folder, files, tmp_path, dimension
):
    """The student that stage 2 has saved ends in the projection, and a resumed run reads it."""
    evaluate = run_module.Run.evaluate

    def train(name, *more):
        more = ("--student", models_folder / "bert", "--dim", dimension, "--eval-steps", 2, *more)
        call_main(ibkd, *options(models_folder, files, tmp_path / name, "wide", *more))

    def interrupt_later(run, step, *arguments):
        score = evaluate(run, step, *arguments)
        if run.state["stage"] == "finetune" and step.number == 4:
            raise KeyboardInterrupt
        return score

    train("whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_module.Run, "evaluate", interrupt_later)
        train("killed")
    train("killed", "--resume")
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")


@pytest.mark.slow
def test_interrupted_between_the_stages_the_projection_starts_as_it_would_have(
    call_main, monkeypatch, models_folder, files, tmp_path
):
    """Stage 1 has drawn dropout by then, a resumed run has not."""

    def train(name, *more):
        more = ("--student", models_folder / "bert", "--dim", 16, *more)
        call_main(ibkd, *options(models_folder, files, tmp_path / name, "wide", *more))

    def interrupt(*_):
        raise KeyboardInterrupt

    train("whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ibkd, "finetune", interrupt)
        train("killed")
    train("killed", "--resume")
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


# ---- invalid input

INVALID = {
    "train": (("--train", "none.txt"), "none.txt: no such file or folder"),
    "beta": (("--beta1", -1), "--beta1: '-1' is not a number, 0 or more"),
    "gamma": (("--gamma", 0), "--gamma: '0' is not a number above 0"),
    "kernel": (("--kernel", "poly"), "--kernel: invalid choice: 'poly'"),
    "device": (("--device", "gpu"), "--device gpu"),
    "similarity": (("--similarity", "l2"), "--similarity: invalid choice: 'l2'"),
    "layer": (("--hsic-layer", 3), "--hsic-layer 3: expected a layer of the student, from -3 to 2"),
    "layer below": (("--hsic-layer", -4), "--hsic-layer -4: expected a layer"),
    "one a batch": (("--batch-size", 1), "--batch-size 1: expected 2 or more, to have negatives"),
    "objective": (("--objective", "crd"), "baselines.py --method crd"),
    "objective mse": (("--objective=mse",), "--protocol ibkd --reduction mean"),
    "objective ckd": (("--objective", "ckd"), "CKD is --beta1 0 --beta2 0"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_options_get_one_line_and_status_2(fails, models_folder, files, tmp_path, case):
    more, expected = INVALID[case]
    out = tmp_path / "out"
    base = options(models_folder, files, out, "mean", "--student-layers", "0,2")
    line = fails(ibkd, *base, *more)
    assert expected in line
    assert not out.exists()


def test_one_sentence_has_no_negatives(fails, models_folder, files, tmp_path):
    """Stage 1 contrasts within the batch; stage 2 has hard negatives."""
    out = tmp_path / "out"
    (tmp_path / "one.txt").write_text("A boy.\n")
    base = options(models_folder, files, out, "mean", "--student-layers", "0,2")
    line = fails(ibkd, *base, "--train", tmp_path / "one.txt")
    assert "1 text to train on, expected 2 or more, to have negatives" in line
    assert not out.exists()


def test_invalid_retrieval_data_gets_one_line_and_status_2(
    fails, models_folder, files, search_folder, tmp_path
):
    out = tmp_path / "out"
    base = options(models_folder, files, out, "mean", "--student-layers", "0,2")
    base += ("--task", "dr", "--beir", search_folder, "--skip-test")
    assert "too few for 200 hard negatives" in fails(ibkd, *base, "--hard-negatives", 200)
    missing = ("--negatives", tmp_path / "nowhere" / "negatives.tsv")
    assert "no such file, and no folder to write it to" in fails(ibkd, *base, *missing)
    (tmp_path / "negatives.tsv").write_text("q0\td1\td2\n")
    line = fails(ibkd, *base, "--negatives", tmp_path / "negatives.tsv")
    assert "negatives.tsv:1: 2 passage-ids, expected a query-id and 8 passage-ids or more" in line
    assert "qrels/none.tsv: no such file" in fails(ibkd, *base[:-1], "--test-split", "none")
    path = search_folder / "qrels" / "train.tsv"
    qrels = path.read_text()
    path.write_text("\n".join(qrels.splitlines()[:4]) + "\n")
    assert "3 training queries, expected 10 or more" in fails(ibkd, *base)
    path.write_text(qrels + "nobody\td1\t1\n")
    assert "query 'nobody' is unknown" in fails(ibkd, *base)
    path.unlink()
    assert "qrels/train.tsv: no such file" in fails(ibkd, *base)
    assert not out.exists()
