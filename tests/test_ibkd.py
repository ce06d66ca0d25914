"""ibkd.py: its losses against plain loops, three steps of each stage by hand, runs of both tasks.

test_ckd.py tests its pooling, too.
"""

import json
import math
import shutil
import sys
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import DEMO, Adam, cosine, demo_sentences, demo_triplets, infonce, losses, random_rows
from processes import small_options
from torch.autograd import gradcheck

import ckd
import common
import ibkd
from extras import eval_retrieval, ibkd_dr

# ---- losses


def kernel_value(name, u, v, gamma):
    distance = sum((a - b) ** 2 for a, b in zip(u, v))
    if name == "rbf":
        return math.exp(-gamma * distance)
    return 1 / math.sqrt(distance + gamma) if name == "imq" else cosine(u, v)


def hsic_by_loops(gram_x, gram_s):
    """tr(K_X H K_S H) / l^2; H K H is K minus the means of row and column, plus that of all."""
    l = len(gram_x)
    means = [sum(row) / l for row in gram_x]  # of rows, and by symmetry of columns
    total = 0.0
    for i in range(l):
        for j in range(l):
            total += (gram_x[i][j] - means[i] - means[j] + sum(means) / l) * gram_s[j][i]
    return total / l**2


@pytest.mark.parametrize("name", ["rbf", "imq", "linear"])
def test_gram_matrices_and_hsic_are_equations_7_and_6(name):
    x, s = random_rows(7, 4, seed=1), random_rows(7, 3, seed=2)
    grams = [ibkd.gram_matrix(z, name, 0.3) for z in (x, s)]
    loops = []
    for gram, z in zip(grams, (x.tolist(), s.tolist())):
        loops.append([[kernel_value(name, u, v, 0.3) for v in z] for u in z])
        assert (gram - torch.tensor(loops[-1], dtype=torch.float64)).abs().max() < 1e-10
    expected = hsic_by_loops(*loops)
    assert ibkd.hsic(*grams).item() == pytest.approx(expected, abs=1e-10)
    assert expected > 0

    def loss(z):
        return ibkd.hsic(grams[0], ibkd.gram_matrix(z, name, 0.3))

    assert gradcheck(loss, s.requires_grad_())


def test_info_nce_is_that_of_section_3_1():
    student, teacher = random_rows(6, 5, seed=1), random_rows(6, 5, seed=2)
    expected = infonce(student.tolist(), teacher.tolist(), 0.1)
    loss = partial(ibkd.info_nce, teacher=teacher, temperature=0.1)
    assert loss(student).item() == pytest.approx(expected, abs=1e-10)
    assert gradcheck(loss, student.requires_grad_())


@pytest.mark.parametrize("of_the_batch", [False, True])
def test_supervised_info_nce_is_equation_10(of_the_batch):
    anchor, positive = random_rows(4, 5, seed=1), random_rows(4, 5, seed=2)
    hard = random_rows(4, 3, 5, seed=3)
    lists = [hard.flatten(0, 1).tolist()] * 4 if of_the_batch else hard.tolist()
    expected = infonce(anchor.tolist(), positive.tolist(), 0.1, own_keys=lists)
    loss = partial(ibkd.supervised_info_nce, temperature=0.1, batch_negatives=of_the_batch)
    sides = [side.requires_grad_() for side in (anchor, positive, hard)]
    assert loss(*sides).item() == pytest.approx(expected, abs=1e-10)
    assert gradcheck(loss, sides)


# ---- three steps of each stage, by hand


def dropless_copy(models_folder):
    """-> transformer, function (texts) -> X and S, each text encoded alone, with gradients."""
    encoder = common.load_encoder(models_folder / "bert", layers="0,2").eval()

    def one(text):
        inputs = encoder.tokenizer(text, return_tensors="pt")
        states = encoder.model(**inputs, output_hidden_states=True).hidden_states
        return states[0][0].mean(dim=0), states[-1][0].mean(dim=0)

    return encoder.model, lambda texts: [torch.stack(z) for z in zip(*map(one, texts))]


def three_losses(parameters, loss_of, rows):
    """The losses of three steps of Adam with falling rates, on 20 rows each."""
    adam, losses = Adam(parameters), []
    order = np.random.default_rng([0, 0]).permutation(rows).tolist()
    for start, rate in ((0, 3e-3), (20, 2e-3), (40, 1e-3)):
        loss = loss_of(order[start : start + 20])
        losses.append(loss.item())
        adam.step(loss, rate)
    return losses


def plain_hsic(x, s):
    grams = [torch.exp(-0.5 * (z[:, None] - z).square().sum(dim=2)) for z in (x, s)]
    gram_x, gram_s = [gram - gram.mean(dim=0) for gram in grams]
    return (gram_x * gram_s.T).sum() / len(x) ** 2


@pytest.fixture
def logged(call_main, monkeypatch, models_folder, files, tmp_path):
    """logged("--option", ...) -> the losses of three steps."""
    monkeypatch.setattr(common, "LOG_STEPS", 1)

    def call(*options):
        words = small_options("ibkd", models_folder, files, tmp_path)
        call_main(ibkd, *words, "--dropout", 0, "--max-steps", 3, "--eval-steps", 3, *options)
        return list(losses(tmp_path).values())

    return call


@pytest.mark.parametrize("keep", [False, True])
def test_three_steps_of_stage_1_by_hand(logged, models_folder, tmp_path, keep):
    """W, from 32 to 48 dimensions, is no part of the student that is left, unless it is kept."""
    texts = demo_sentences(300)
    model, encode = dropless_copy(models_folder)
    teacher = common.load_encoder(models_folder / "wide").eval()
    target = torch.from_numpy(common.encode(ckd.embed, teacher, texts))
    torch.manual_seed(0)
    mapping = torch.nn.Linear(32, 48, bias=False)

    def loss(batch):
        x, s = encode([texts[row] for row in batch])
        logits = F.normalize(mapping(s)) @ F.normalize(target[batch]).T / 0.01
        return F.cross_entropy(logits, torch.arange(len(batch))) + 20 * plain_hsic(x, s)

    expected = three_losses([*model.parameters(), *mapping.parameters()], loss, len(texts))
    options = ("--stage", "distill", "--beta1", 20, "--temperature", 0.01, "--batch-size", 20)
    options += ("--lr", 3e-3, *("--keep-mapping",) * keep)
    assert logged(*options) == pytest.approx(expected, rel=1e-4)
    assert common.load_encoder(tmp_path).dimension == (48 if keep else 32)


def test_three_steps_of_stage_2_by_hand(logged, models_folder):
    """With W_proj: InfoNCE is of S', HSIC of S. 60 texts are two parts."""
    sides = demo_triplets(100)
    model, encode = dropless_copy(models_folder)
    torch.manual_seed(0)
    mapping = torch.nn.Linear(32, 16, bias=False)

    def loss(batch):
        x, s = encode([side[row] for side in sides for row in batch])
        anchor, positive, negative = F.normalize(mapping(s)).chunk(3)
        own = (anchor * negative).sum(dim=1, keepdim=True)
        logits = torch.cat([anchor @ positive.T, own], dim=1) / 0.005
        contrast = F.cross_entropy(logits, torch.arange(20))
        return contrast + 20 * plain_hsic(x, s)

    expected = three_losses([*model.parameters(), *mapping.parameters()], loss, 100)
    options = ("--stage", "finetune", "--dim", 16, "--finetune-batch-size", 20, "--beta2", 20)
    options += ("--finetune-temperature", 0.005, "--finetune-lr", 3e-3)
    assert logged(*options) == pytest.approx(expected, rel=1e-4)


# ---- options, runs


def test_defaults_are_those_of_table_1_and_section_4_3(parse):
    names = ("epochs", "batch_size", "finetune_batch_size", "finetune_lr")
    for script, expected in {
        ibkd: (10, 256, 256, 3e-5),
        ibkd_dr: (3, 128, 128, 1e-5),
    }.items():
        args = parse(script, "--student", "x")
        assert tuple(getattr(args, name) for name in names) == expected
        assert (args.lr, args.temperature, args.finetune_temperature) == (1e-4, 0.1, 0.05)
        assert (args.kernel, args.gamma, args.beta1, args.beta2) == ("rbf", 0.5, 1, 0.5)
        assert (args.finetune_epochs, args.max_length) == (3, 128)
        assert (args.stage or "both", args.dim) == ("both", None)
        assert args.teacher == "princeton-nlp/sup-simcse-roberta-large"
    assert args.similarity is args.teacher_similarity is None  # what a folder states, or cosine
    assert args.hard_negatives == 8


def test_the_default_files_of_both_stages(call_main, monkeypatch):
    asked = []
    monkeypatch.setattr(ibkd, "resolve_data", lambda name: asked.append(name) or name)
    for name in ("read_dev", "read_sentences", "read_triplets"):
        monkeypatch.setattr(ibkd, name, lambda path: [])
    monkeypatch.setattr(ibkd, "run_settings", lambda *_: sys.exit())
    with pytest.raises(SystemExit):
        call_main(ibkd, "--student", "x")
    assert asked == ["nli_for_simcse.csv"] * 2


@pytest.mark.slow
def test_the_scores_of_a_retrieval_run_are_those_of_eval_retrieval(
    call_main, models_folder, tmp_path
):
    """On the dev queries, every tenth training query: here as a split of their own."""
    words = ("--teacher", models_folder / "wide", "--student-layers", "0,2")
    words += ("--beir", DEMO / "beir", "--max-steps", 8, "--eval-steps", 4)
    printed = call_main(ibkd_dr, *words, "--output", tmp_path / "out")
    shutil.copytree(DEMO / "beir", tmp_path / "beir")
    header, *lines = (DEMO / "beir/qrels/train.tsv").read_text().splitlines()
    (tmp_path / "beir/qrels/dev.tsv").write_text("\n".join([header, *lines[9::10]]) + "\n")
    options = ("--beir", tmp_path / "beir", "--split", "dev", "--json", tmp_path / "scores.json")
    call_main(eval_retrieval, tmp_path / "out", *options)
    (scores,) = json.loads((tmp_path / "scores.json").read_text()).values()
    *_, table = [line for line in printed.splitlines() if line.startswith("|")]
    assert float(table.split("|")[2]) == pytest.approx(scores["MRR@10"], abs=0.006)
