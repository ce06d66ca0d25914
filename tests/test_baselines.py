"""extras/baselines.py: losses and training steps, each computed a second time, step by step."""

import math
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import check_student, cosine, demo_sentences, dev_scores, losses, random_rows, rows
from torch import nn
from torch.autograd import gradcheck

import ckd
import common
from extras import baselines


def test_patient_loss_is_the_distance_of_normalized_layers():
    student, teacher = random_rows(4, 3, 5, seed=1), random_rows(4, 3, 5, seed=2)
    expected = 0.0
    for sentence in range(4):
        for layer in range(3):
            u, v = student[sentence, layer].tolist(), teacher[sentence, layer].tolist()
            expected += (2 - 2 * cosine(u, v)) / 5 / 4
    assert baselines.patient_loss(student, teacher).item() == pytest.approx(expected, abs=1e-10)
    assert gradcheck(baselines.patient_loss, (student.requires_grad_(), teacher))


def test_l2_dual_l2_and_skd_add_a_term_each():
    control, generalize, reference = (random_rows(6, 5, seed=seed) for seed in (1, 2, 3))
    terms = [0.0, 0.0, 0.0]
    for con, gen, ref in zip(control.tolist(), generalize.tolist(), reference.tolist()):
        terms[0] += (2 - 2 * cosine(con, ref)) / 6
        terms[1] += (2 - 2 * cosine(gen, ref)) / 6
        terms[2] += (2 - 2 * cosine(con, gen)) / 6
    found = [
        baselines.l2_loss(control, reference).item(),
        baselines.dual_l2_loss(control, generalize, reference).item(),
        baselines.skd_loss(control, generalize, reference).item(),
    ]
    assert found == pytest.approx([terms[0], terms[0] + terms[1], sum(terms)], abs=1e-10)
    inputs = control.requires_grad_(), generalize.requires_grad_(), reference
    assert gradcheck(baselines.skd_loss, inputs)


@pytest.mark.parametrize("size", [5, 1])
def test_crd_tells_the_teachers_embedding_of_a_sentence_from_those_of_others(size):
    student, teacher = random_rows(size, 4, seed=1), random_rows(size, 4, seed=2)
    negatives = max(1, size - 1)
    expected = 0.0
    for i, s in enumerate(student.tolist()):
        for j, t in enumerate(teacher.tolist()):
            power = math.exp(cosine(s, t) / 0.2)
            p = power / (power + negatives)
            expected -= math.log(p if i == j else 1 - p) / size
    assert baselines.crd_loss(student, teacher, 0.2).item() == pytest.approx(expected, abs=1e-10)
    assert gradcheck(baselines.crd_loss, (student.requires_grad_(), teacher, 0.2))


def test_principal_components_have_the_most_variance_of_the_normalized_embeddings():
    random = np.random.default_rng(0)
    embeddings = (random.normal(size=(500, 6)) * [5, 0.1, 3, 0.1, 1, 0.1] + 2).astype(np.float32)
    components = baselines.principal_components(embeddings, 3).numpy()
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    expected = np.linalg.svd(unit - unit.mean(axis=0))[2][:3].T  # [6, 3], by falling variance
    assert np.abs(np.abs((components * expected).sum(axis=0)) - 1).max() < 1e-5


@pytest.mark.parametrize("name", ["mean", "cls", "pooler", "roberta", "distilbert"])
def test_embeddings_are_those_of_ckd_and_layers_follow_them(models_folder, name):
    encoder = common.load_encoder(models_folder / name).eval()
    ids, mask = common.Tokens(encoder, demo_sentences(6)).batch(np.arange(6))
    with torch.no_grad():
        states = encoder.model(ids, mask, output_hidden_states=True).hidden_states
        embedding = ckd.embed(encoder, ids, mask)
        assert (baselines.embed(encoder, ids, mask) - embedding).abs().max() < 1e-6
        joined = baselines.embed(encoder, ids, mask, [0, 2], normalize=False)
    assert (F.normalize(joined[:, :32]) - F.normalize(embedding)).abs().max() < 1e-6
    assert (joined[:, :32].norm(dim=1) - 1).abs().min() > 0.01
    for row in range(6):
        tokens = range(1 if encoder.pooling == "cls" else int(mask[row].sum()))
        for place, layer in enumerate((0, 2), 1):
            mean = sum(states[layer][row, token] for token in tokens) / len(tokens)
            assert (joined[row, 32 * place : 32 * (place + 1)] - mean).abs().max() < 1e-5


SIZE = 75  # of a batch; files/sentences.txt has four of them
LR = 1e-2
DECAY = [1, 0.75, 0.5, 0.25]  # the share of the peak learning rate at steps 1 to 4
METHODS = dict(pkd=[1, 0.75, 0.25, 0], l2=DECAY, skd=DECAY, crd=DECAY, hpd=DECAY)
METHODS["dual-l2"] = DECAY


@pytest.fixture
def options(models_folder, files):
    """Four steps: half of "mean", which normalizes, learns from "wide", which does not."""
    models = ("--student", models_folder / "mean", "--teacher", models_folder / "wide")
    data = ("--train", files / "sentences.txt", "--dev", files / "dev.tsv", "--eval-steps", 2)
    steps = ("--epochs", 1, "--batch-size", SIZE, "--lr", LR, "--patience", 0, "--dimension", 8)
    return *models, *data, *steps, "--student-layers", "0,2"


def states_of(encoder, texts):
    """The mean over the tokens of every layer, the input embeddings first: a list of [N, H]."""
    batch = encoder.tokenizer(texts, padding=True, return_tensors="pt")
    mask = batch["attention_mask"].unsqueeze(-1)
    output = encoder.model(batch["input_ids"], mask[..., 0], output_hidden_states=True)
    return [(states * mask).sum(dim=1) / mask.sum(dim=1) for states in output.hidden_states]


def without_words(texts, step):
    random = np.random.default_rng([0, step])
    kept = [[word for word in text.split() if random.random() >= 0.1] for text in texts]
    return [" ".join(words) for words in kept]


def expected_losses(models_folder, method):
    """The four steps of train(), written down once more for each method."""
    student = common.load_encoder(models_folder / "mean", layers="0,2").eval()
    teacher = common.load_encoder(models_folder / "wide").eval()
    sentences = demo_sentences(4 * SIZE)
    with torch.no_grad():
        everything = states_of(teacher, sentences)
    components = baselines.principal_components(everything[-1].numpy(), 8)
    torch.manual_seed(0)
    layer = nn.Linear(32, 8 if method == "hpd" else 48, bias=method != "crd")  # head, M or W
    of_layers = nn.Linear(32, 48)
    parameters = [*student.parameters(), *layer.parameters()]
    if method == "pkd":
        parameters += of_layers.parameters()
        optimizer = torch.optim.Adam(parameters, betas=(0.9, 0.98))
    elif method in ("l2", "dual-l2", "skd"):
        optimizer = torch.optim.AdamW(parameters, eps=1e-6, weight_decay=0.01)
    else:
        optimizer = torch.optim.Adam(parameters)
    values = []
    lengths = common.Tokens(student, sentences).lengths
    for step, numbers in enumerate(islice(common.batches(lengths, SIZE, 0), 4), 1):
        texts = [sentences[number] for number in numbers]
        target = everything[-1][numbers]
        states = states_of(student, texts)
        head = layer(states[-1]).tanh()
        second = layer(states_of(student, without_words(texts, step))[-1]).tanh()
        projected = layer(F.normalize(states[-1]))
        if method == "pkd":  # the student's layer 1 of 2, the teacher's 2 of 4
            layers = of_layers(states[1])[:, None], everything[2][numbers][:, None]  # [N, 1, 48]
            loss = F.mse_loss(projected, target) + baselines.patient_loss(*layers)
        elif method == "crd":
            loss = baselines.crd_loss(projected, target, 0.1)
        elif method == "hpd":
            loss = F.mse_loss(head, F.normalize(target) @ components)
        elif method == "l2":
            loss = baselines.l2_loss(head, target)
        elif method == "dual-l2":
            loss = baselines.dual_l2_loss(head, second, target)
        else:
            loss = baselines.skd_loss(head, second, target)
        optimizer.zero_grad()
        loss.backward()
        if method != "pkd":
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.param_groups[0]["lr"] = LR * METHODS[method][step - 1]
        optimizer.step()
        values.append(loss.item())
    return values


@pytest.mark.parametrize("method", METHODS)
def test_four_steps_are_those_of_the_paper(
    call_main, options, monkeypatch, models_folder, files, tmp_path, method
):
    expected = expected_losses(models_folder, method)
    if method == "pkd":
        assert baselines.MAX_NORMS[baselines.PAPERS["pkd"]] == math.inf  # which clips nothing
    monkeypatch.setattr(common, "LOG_STEPS", 1)
    out = tmp_path / "out"
    printed = call_main(baselines, *options, "--method", method, "--output", out)
    assert list(losses(out).values()) == pytest.approx(expected, rel=2e-5)
    rates = [row["lr"] for row in rows(out) if "lr" in row]
    assert rates == pytest.approx([LR * share for share in METHODS[method]], abs=1e-12)
    best = max(dev_scores(out).values())
    vectors = check_student(baselines, out, files / "dev.tsv", best, printed)
    assert vectors.shape == (20, {"pkd": 32, "crd": 32, "hpd": 8}.get(method, 48))
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-5  # as "mean" states


def test_w_starts_as_the_identity_and_m_is_left_out_where_dimensions_agree(models_folder):
    encoder = common.load_encoder(models_folder / "bert")
    projections = []
    for method in ("pkd", "crd"):
        args = SimpleNamespace(method=method, seed=0, device="cpu")
        projections.append(baselines.build_student(encoder, encoder, args).projection)
    m, w = projections
    assert isinstance(m, nn.Identity)
    assert torch.equal(w.weight, torch.eye(32)) and w.bias is None


DEFAULTS = [
    ("pkd", "sup-simcse-roberta-large", [20, 512, 64, 125, 3, 3e-4]),
    ("skd", "unsup-simcse-roberta-large", [20, 128, 128, 512, 7, 3e-4]),
    ("hpd", "sup-simcse-roberta-large", [10, 256, 128, 500, 0, 1e-4]),
]


@pytest.mark.parametrize("method, teacher, numbers", DEFAULTS)
def test_defaults_are_those_of_the_methods_paper(parse, method, teacher, numbers):
    args = parse(baselines, "--method", method, "--student", "x")
    assert args.teacher == f"princeton-nlp/{teacher}"
    found = [args.epochs, args.batch_size, args.max_length, args.eval_steps, args.patience]
    assert [*found, baselines.PEAKS[baselines.PAPERS[method]](23)] == numbers
