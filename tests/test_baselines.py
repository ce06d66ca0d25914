"""extras/baselines.py: losses and training steps, each computed a second time, step by step."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import check_student, cosine, demo_sentences, dev_scores, losses, random_rows, rows
from torch import nn
from torch.autograd import gradcheck

import common
import congen
from extras import baselines


def check_loss(loss, expected, inputs):
    """The value is the expected one, and so is the gradient of the first input."""
    assert loss(*inputs).item() == pytest.approx(expected, abs=1e-10)
    assert gradcheck(loss, (inputs[0].requires_grad_(), *inputs[1:]))


def test_patient_and_l2_loss_are_distances_of_normalized_vectors():
    student, teacher = random_rows(4, 3, 5, seed=1), random_rows(4, 3, 5, seed=2)
    pairs = list(zip(student.flatten(0, 1).tolist(), teacher.flatten(0, 1).tolist()))
    expected = [2 - 2 * cosine(u, v) for u, v in pairs]
    check_loss(baselines.patient_loss, sum(expected) / 5 / 4, [student, teacher])
    inputs = [student.detach()[:, 0], teacher[:, 0]]
    check_loss(baselines.l2_loss, sum(expected[::3]) / 4, inputs)


def test_metakd_loss_weights_the_errors_of_a_sentence():
    student, teacher, layers, theirs = (random_rows(4, 3, 5, seed=seed) for seed in range(4))
    student, teacher, weights = student[:, 0], teacher[:, 0], random_rows(4).abs()
    expected = 0.0
    for i in range(4):
        error = sum((student[i, d] - teacher[i, d]).item() ** 2 for d in range(5)) / 5
        for l in range(3):
            error += sum((layers[i, l, h] - theirs[i, l, h]).item() ** 2 for h in range(5)) / 5
        expected += weights[i].item() * error / 4
    check_loss(baselines.metakd_loss, expected, [student, teacher, layers, theirs, weights])


def test_expertise_weights_are_high_for_sentences_like_their_domain_and_others(monkeypatch):
    monkeypatch.setattr(baselines, "CHUNK", 4)
    embeddings, domains = random_rows(9, 3).numpy(), list("aabbbbccc")
    means = {}
    for domain in "abc":
        members = [row for row, name in zip(embeddings.tolist(), domains) if name == domain]
        means[domain] = [sum(column) / len(members) for column in zip(*members)]
    found = baselines.expertise_weights(embeddings, domains)
    for row, domain, weight in zip(embeddings.tolist(), domains, found):
        first, second = (means[name] for name in "abc" if name != domain)
        others = [(x + y) / 2 for x, y in zip(first, second)]
        score = (cosine(row, means[domain]) + cosine(row, others)) / 2
        assert weight == pytest.approx((1 + score) / (1 + math.exp(0)), abs=1e-10)


@pytest.mark.parametrize("size", [5, 1])
def test_crd_tells_the_teachers_embedding_of_a_sentence_from_those_of_others(size):
    student, teacher = random_rows(size, 4, seed=1), random_rows(size, 4, seed=2)
    expected = 0.0
    for i, s in enumerate(student.tolist()):
        for j, t in enumerate(teacher.tolist()):
            power = math.exp(cosine(s, t) / 0.2)
            p = power / (power + max(1, size - 1))
            expected -= math.log(p if i == j else 1 - p) / size
    check_loss(baselines.crd_loss, expected, [student, teacher, 0.2])


def test_principal_components_have_the_most_variance_of_the_normalized_embeddings():
    random = np.random.default_rng(0)
    embeddings = (random.normal(size=(500, 6)) * [5, 0.1, 3, 0.1, 1, 0.1] + 2).astype(np.float32)
    components = baselines.principal_components(embeddings, 3).numpy()
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    expected = np.linalg.svd(unit - unit.mean(axis=0))[2][:3].T  # [6, 3], by falling variance
    assert np.abs(np.abs((components * expected).sum(axis=0)) - 1).max() < 1e-5


SIZE = 75  # of a batch; four of them are all sentences
LR = 1e-2
DOMAINS = [str(row % 3) for row in range(4 * SIZE)]


def states_of(encoder, texts):
    """The mean over the tokens of every layer, the input embeddings first: a list of [N, H]."""
    batch = encoder.tokenizer(texts, padding=True, return_tensors="pt")
    mask = batch["attention_mask"].unsqueeze(-1)
    output = encoder.model(batch["input_ids"], mask[..., 0], output_hidden_states=True)
    return [(states * mask).sum(dim=1) / mask.sum(dim=1) for states in output.hidden_states]


def expected_losses(models_folder, method, rates):
    """Four steps, written down once more for each method."""
    student = common.load_encoder(models_folder / "mean", layers="0,2").eval()
    teacher = common.load_encoder(models_folder / "wide").eval()
    sentences = demo_sentences(4 * SIZE)
    with torch.no_grad():
        everything = states_of(teacher, sentences)
    components = baselines.principal_components(everything[-1].numpy(), 8)
    weights = torch.from_numpy(baselines.expertise_weights(everything[-1].numpy(), DOMAINS))
    torch.manual_seed(0)
    layer = nn.Linear(32, 8 if method == "hpd" else 48, bias=method != "crd")  # head, M or W
    of_layers = nn.Linear(32, 48)
    parameters = [*student.parameters(), *layer.parameters()]
    if method in ("pkd", "metakd"):
        parameters += of_layers.parameters()
        optimizer = torch.optim.Adam(parameters, betas=(0.9, 0.98))
    elif method in ("l2", "dual-l2", "skd"):
        vectors = [value for value in parameters if value.ndim == 1]  # they do not decay
        matrices = [value for value in parameters if value.ndim == 2]
        groups = [dict(params=matrices), dict(params=vectors, weight_decay=0)]
        optimizer = torch.optim.AdamW(groups, eps=1e-6, weight_decay=0.01)
        for value in parameters:  # as in ConGen's program: no correction of the moments
            optimizer.state[value] = dict(
                step=torch.tensor(1e6), exp_avg=0 * value.data, exp_avg_sq=0 * value.data
            )
    else:
        optimizer = torch.optim.Adam(parameters)
    values = []
    batches = common.Batches(len(sentences), SIZE, 0)
    for step in range(4):
        numbers = batches[step]
        texts = [sentences[number] for number in numbers]
        theirs = [states[numbers] for states in everything]
        target = theirs[-1]
        states = states_of(student, texts)
        head = layer(states[-1]).tanh()
        views = congen.delete_words(texts, np.random.default_rng([0, step + 1]))
        second = layer(states_of(student, views)[-1]).tanh()
        projected = layer(F.normalize(states[-1]))  # as "mean" states
        if method == "pkd":  # the student's layer 1 of 2, the teacher's 2 of 4
            layers = of_layers(states[1])[:, None], theirs[2][:, None]  # [N, 1, 48]
            loss = F.mse_loss(projected, target) + baselines.patient_loss(*layers)
        elif method == "metakd":
            errors = (projected - target).square().mean(dim=1)
            for number in range(3):
                error = of_layers(states[number]) - theirs[2 * number]
                errors = errors + error.square().mean(dim=1)
            loss = (weights[numbers] * errors).mean()
        elif method == "crd":
            loss = baselines.crd_loss(projected, target, 0.1)
        elif method == "hpd":
            loss = F.mse_loss(head, F.normalize(target) @ components)
        else:
            loss = baselines.l2_loss(head, target)
            loss = loss + (method != "l2") * baselines.l2_loss(second, target)
            loss = loss + (method == "skd") * baselines.l2_loss(head, second)
        optimizer.zero_grad()
        loss.backward()
        if method not in ("pkd", "metakd"):
            nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LR * rates[step]
        optimizer.step()
        values.append(loss.item())
    return values


@pytest.fixture
def options(models_folder, files):
    """Half of "mean", which normalizes, learns from "wide", which does not, in four steps."""
    models = ("--student", models_folder / "mean", "--teacher", models_folder / "wide")
    data = ("--train", files / "sentences.txt", "--dev", files / "dev.tsv", "--eval-steps", 2)
    steps = ("--epochs", 1, "--batch-size", SIZE, "--lr", LR, "--patience", 0, "--dimension", 8)
    return *models, *data, *steps, "--student-layers", "0,2"


@pytest.mark.parametrize("method", ["pkd", "metakd", "l2", "dual-l2", "skd", "crd", "hpd"])
def test_four_steps_are_those_of_the_paper(
    call_main, options, monkeypatch, models_folder, files, tmp_path, method
):
    rates = [1, 0.75, 0.5, 0.25]
    if method in ("l2", "dual-l2", "skd"):  # warm-up of one step
        rates = [0, 1, 2 / 3, 1 / 3]
    elif method in ("pkd", "metakd"):  # warm-up of 0.4 steps
        rates = [0, *[(1 + math.cos(math.pi * (step - 0.4) / 3.6)) / 2 for step in (1, 2, 3)]]
    expected = expected_losses(models_folder, method, rates)
    monkeypatch.setattr(common, "LOG_STEPS", 1)
    out = tmp_path / "out"
    if method == "metakd":
        lines = [f"{text}\t{domain}\n" for text, domain in zip(demo_sentences(4 * SIZE), DOMAINS)]
        (tmp_path / "labeled.tsv").write_text("".join(lines))
        options += ("--labeled", tmp_path / "labeled.tsv")
    printed = call_main(baselines, *options, "--method", method, "--output", out)
    found = list(losses(out).values())
    assert found[0] == pytest.approx(expected[0], rel=2e-6)
    assert found == pytest.approx(expected, rel=1e-4)  # at this rate, rounding grows step by step
    found = [row["lr"] / LR for row in rows(out) if "lr" in row]
    assert found == pytest.approx(rates, abs=1e-10)
    best = max(dev_scores(out).values())
    vectors = check_student(baselines, out, files / "dev.tsv", best, printed)
    assert vectors.shape == (20, {"pkd": 32, "metakd": 32, "crd": 32, "hpd": 8}.get(method, 48))
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-5  # as "mean" states


PAPERS = {  # epochs, batch size, rate, patience, max. length, steps between scores, teacher, data
    "metakd": (20, 512, None, 3, 64, 125, "sup", "news5m.en"),
    "skd": (20, 128, 5e-5, 7, 128, 512, "unsup", "nli_for_simcse.csv"),
    "hpd": (10, 256, 1e-4, 0, 128, 500, "sup", "nli_for_simcse.csv"),
}


@pytest.mark.parametrize("method", PAPERS)
def test_defaults_are_those_of_the_paper_that_compares_with_a_method(parse, method):
    *expected, teacher, train = PAPERS[method]
    names = ("epochs", "batch_size", "lr", "patience", "max_length", "eval_steps")
    args = parse(baselines, "--method", method, "--student", "x")
    baselines.choose_defaults(args)
    assert [getattr(args, name) for name in names] == expected
    assert (args.teacher, args.train) == (f"princeton-nlp/{teacher}-simcse-roberta-large", train)
    args = parse(baselines, "--method", method, "--student", "x", "--patience", 0, "--epochs", 5)
    baselines.choose_defaults(args)
    assert (args.patience, args.epochs, args.batch_size) == (0, 5, expected[1])


def test_a_method_must_be_given(fails, options):
    assert "give --method, one of pkd, " in fails(baselines, *options)


def test_a_labeled_sentence_without_its_domain_is_refused(fails, options, tmp_path):
    (tmp_path / "labeled.tsv").write_text("a boy\tsport\na girl\t\n")
    words = ("--method", "metakd", "--labeled", tmp_path / "labeled.tsv")
    line = fails(baselines, *options, *words, "--output", tmp_path / "out")
    assert "labeled.tsv:2: a column is empty; each line has two tab-separated columns" in line


def test_metakd_finds_the_same_clusters_when_it_is_continued(check_resume, options):
    check_resume(baselines, "distill", 4, *options, "--method", "metakd")
