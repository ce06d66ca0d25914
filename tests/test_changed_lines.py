"""Lines of the scripts that no comparison of losses on short texts would notice, if they changed:
where texts are cut, what is drawn with which seed, what batches are grouped by, when a run ends."""

import importlib
import json
import math

import numpy as np
import pytest
import torch
import transformers
from conftest import demo_sentences, losses, word_tokenizer
from processes import SCRIPTS, small_options

import ckd
import common
import congen
import dse
import ibkd

LIMIT = 8  # tokens, below the length of most of these texts
TEXTS = [f"{a} {b}" for a, b in zip(demo_sentences(60), demo_sentences(120)[60:])]


@pytest.fixture
def long_files(tmp_path):
    """Training data of texts that are longer than LIMIT, in each form; dev pairs, too."""
    root = tmp_path / "files"
    (root / "stsb").mkdir(parents=True)
    (root / "sentences.txt").write_text("\n".join(TEXTS) + "\n")
    columns = list(zip(TEXTS, TEXTS[1:] + TEXTS[:1], TEXTS[2:] + TEXTS[:2]))
    rows = [",".join(f'"{text}"' for text in row) for row in columns]
    (root / "triplets.csv").write_text("\n".join(["sent0,sent1,hard_neg", *rows]) + "\n")
    (root / "pairs.tsv").write_text("\n".join("\t".join(row[:2]) for row in columns) + "\n")
    pairs = [(f"{a} indeed", f"{b} indeed", i % 6) for i, (a, b, _) in enumerate(columns)]
    (root / "dev.tsv").write_text("\n".join("\t".join(map(str, pair)) for pair in pairs) + "\n")
    for split in ("train", "validation", "test"):
        mark = "" if split == "train" else " indeed"
        lines = [
            dict(text1=a + mark, text2=b + mark, label=i % 6) for i, (a, b, _) in enumerate(columns)
        ]
        (root / f"stsb/{split}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return root


@pytest.fixture
def cuts(monkeypatch, tmp_path):
    """[(depth of the encoder, stage, True in a training step, texts are of dev, longest)], a line
    for each call of tokenize(). The teacher has four layers, its student two."""
    found, stages = [], [None]
    tokenize, begin = common.tokenize, common.Run.begin

    def noted(encoder, texts, max_length=None):
        token_ids = tokenize(encoder, texts, max_length)
        depth = encoder.model.config.num_hidden_layers
        of_dev = "indeed" in f"{texts[0]}"
        longest = max(map(len, token_ids))
        found.append((depth, stages[-1], torch.is_grad_enabled(), of_dev, longest))
        return token_ids

    def began(run, *rest):
        stages.append(run.stage)
        return begin(run, *rest)

    monkeypatch.setattr(common, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(common, "tokenize", noted)
    monkeypatch.setattr(common.Run, "begin", began)
    return found


CASES = [(script, "") for script in SCRIPTS] + [("congen", "--pairs pairs.tsv")]
CALLS = dict(ckd=(1, 3), congen=(2,), ibkd=(1, 1), dse=(1, 2), distilface=(1,))  # in a step


@pytest.mark.parametrize("script, more", CASES)
def test_each_text_of_training_is_cut_at_max_length(
    script, more, call_main, models_folder, long_files, cuts, tmp_path
):
    """The teacher's and the student's, of each view and stage; texts of dev are not, except in
    dse.py, which saves the limit with the model."""
    words = small_options(script, models_folder, long_files, tmp_path / "out")
    words += ["--max-length", LIMIT, "--max-steps", 2]
    if more:
        words += ["--pairs", long_files / "pairs.tsv"]
    call_main(importlib.import_module(script), *words)
    trained = [line for line in cuts if not line[3]]
    assert {longest for *_, longest in trained} == {LIMIT}
    in_steps = [stage for _, stage, learns, *_ in trained if learns and stage]
    stages = list(dict.fromkeys(in_steps))
    assert [in_steps.count(stage) for stage in stages] == [2 * calls for calls in CALLS[script]]
    if script != "distilface":  # its teacher's pass
        assert any(depth == 4 and not learns for depth, _, learns, *_ in trained)
    scored = {longest for *_, of_dev, longest in cuts if of_dev}
    assert scored == {LIMIT} if script == "dse" else min(scored) > LIMIT


@pytest.mark.parametrize("script", SCRIPTS)
def test_batches_are_grouped_by_the_lengths_of_their_texts(
    script, call_main, models_folder, files, tmp_path, monkeypatch
):
    """Of all texts of an example, or of its anchor in ibkd.py; after they are cut."""
    module = importlib.import_module(script)
    found, batches = [], module.Batches

    def noted(count, batch_size, seed, lengths=None):
        found.append(lengths.tolist())
        return batches(count, batch_size, seed, lengths)

    monkeypatch.setattr(module, "Batches", noted)
    words = small_options(script, models_folder, files, tmp_path / "out")
    call_main(module, *words, "--group-by-length", "--max-steps", 1, "--max-length", LIMIT)
    tokenizer = transformers.AutoTokenizer.from_pretrained(models_folder / "bert")

    def count(*texts):
        return min(LIMIT, len(tokenizer(*texts).input_ids))

    sentences = common.read_sentences(files / "sentences.txt")
    triplets = common.read_triplets(files / "triplets.csv")
    lines = (files / "stsb/train.jsonl").read_text().splitlines()
    pairs = [(row["text1"], row["text2"]) for row in map(json.loads, lines)]
    plain = [count(text) for text in sentences]
    expected = dict(
        ckd=[plain, [sum(map(count, row)) for row in triplets]],
        congen=[plain],
        ibkd=[plain, [count(anchor) for anchor, *_ in triplets]],
        dse=[[count(*pair) for pair in pairs], [sum(map(count, pair)) for pair in pairs]],
        distilface=[plain],
    )
    assert found == expected[script]


@pytest.mark.parametrize("script", ["ckd", "congen", "ibkd", "dse"])
def test_what_starts_at_random_is_drawn_with_the_seed(
    script, call_main, models_folder, files, tmp_path, monkeypatch
):
    """M, the head, W and the output layers: whatever torch has drawn before."""
    monkeypatch.setattr(common, "LOG_STEPS", 1)
    found = []
    for number, (before, seed) in enumerate([(1, 0), (2, 0), (1, 5)]):
        folder = tmp_path / str(number)
        words = small_options(script, models_folder, files, folder)
        torch.manual_seed(before)
        call_main(importlib.import_module(script), *words, "--max-steps", 1, "--seed", seed)
        found.append(losses(folder))
    assert found[0] == found[1]
    assert all(found[2][key] != found[0][key] for key in found[0])


def test_a_map_between_equal_dimensions_starts_as_the_identity(models_folder):
    encoder = common.load_encoder(models_folder / "bert")
    assert torch.equal(ibkd.add_mapping(encoder, 32, keep=False).weight, torch.eye(32))
    assert not torch.equal(ibkd.add_mapping(encoder, 16, keep=False).weight, torch.eye(32)[:16])


@pytest.mark.parametrize("script, stage", [("ckd", "distill"), ("congen", "distill")])
@pytest.mark.parametrize("patience", [1, 2, 0])
def test_an_epoch_without_progress_ends_a_run(
    script, stage, patience, call_main, models_folder, files, tmp_path, monkeypatch
):
    """Of four epochs of ten steps each, with a dev score every five; 0: it goes on."""
    module = importlib.import_module(script)
    scores = iter([1.0, 2.0, *[0.5] * 99])
    monkeypatch.setattr(module, "spearman", lambda *_: next(scores))
    monkeypatch.setattr(module, "teacher_targets", lambda *_: np.random.rand(300, 48).astype("f"))
    monkeypatch.setattr(common.Run, "finish", lambda *_: None)
    words = small_options(script, models_folder, files, tmp_path)
    words += ["--epochs", 4, "--eval-steps", 5, "--patience", patience]
    words += ["--stage", "distill"] if script == "ckd" else []
    call_main(module, *words)
    rows = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    steps = [row["step"] for row in rows if "dev" in row]
    # The score before the first step is that of the student before, too, which takes the first.
    assert steps == list(range(0, 1 + (10 * patience if patience else 40), 5))


# ---- common.py -----------------------------------------------------------------------------------


def test_windows_of_100_batches_are_sorted_and_their_batches_shuffled():
    rng = np.random.default_rng(5)
    lengths = rng.integers(3, 60, 2000)
    batches = common.Batches(2000, 8, 3, lengths)
    order = np.random.default_rng([3, 0]).permutation(2000)  # of the rows, by seed and epoch
    drawn = [batches[step] for step in range(batches.per_epoch)]
    assert len(drawn) == 250
    for start in (0, 100, 200):
        window = drawn[start : start + 100]
        assert {*np.concatenate(window)} == {*order[8 * start : 8 * (start + 100)]}
        shortest = [lengths[rows].min() for rows in window]
        longest = [lengths[rows].max() for rows in window]
        assert sorted(longest) != longest  # in another order than by length
        pairs = sorted(zip(shortest, longest))
        assert all(a[1] <= b[0] for a, b in zip(pairs, pairs[1:]))  # but each batch is sorted


@pytest.mark.parametrize("shorter, parts", [(10, 2), (25, 1)])
def test_a_part_ends_before_a_text_of_less_than_seven_tenths(shorter, parts):
    lengths = np.array([30] * 8 + [shorter] * 8)
    assert len(common.similar_lengths(lengths, "cpu", 384)) == parts


def test_of_equal_dev_scores_the_earlier_student_is_kept(models_folder, files, parse, tmp_path):
    args = parse(ckd, *small_options("ckd", models_folder, files, tmp_path / "out"))
    run = common.Run(common.run_settings(args, [], []), args, "distill")
    run.begin(9, [])
    assert [run.is_best(step, dev) for step, dev in enumerate([1.0, 1.0, 2.0, 2.0], 1)] == [
        *[True, False, True, False]
    ]
    assert run.best_step == 3


@pytest.mark.parametrize("seed", [0, 5])
def test_the_queue_starts_with_rows_that_the_seed_draws(
    seed, call_main, models_folder, files, tmp_path, monkeypatch
):
    targets = np.random.default_rng(1).standard_normal((300, 48), np.float32)
    queues, enqueue = [], congen.enqueue

    def noted(queue, *rest):
        queues.append(queue.numpy().copy())
        return enqueue(queue, *rest)

    monkeypatch.setattr(congen, "teacher_targets", lambda *_: targets)
    monkeypatch.setattr(congen, "enqueue", noted)
    words = small_options("congen", models_folder, files, tmp_path)
    call_main(congen, *words, "--max-steps", 1, "--seed", seed)
    order = np.random.default_rng([seed, 0, 1]).permutation(300)
    assert np.array_equal(queues[0], targets[order[:100]])


def test_the_texts_of_triplets_are_read_once_each(tmp_path):
    (tmp_path / "t.csv").write_text("sent0,sent1,hard_neg\na,b,c\na,c,d\ne,a,b\n")
    assert common.read_sentences(tmp_path / "t.csv") == ["a", "b", "c", "d", "e"]


def test_all_rates_of_dropout_are_set(tmp_path):
    """GPT-2 calls them pdrop."""
    tokenizer = word_tokenizer()
    config = transformers.GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2)
    transformers.GPT2Model(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    found = common.load_encoder(tmp_path, dropout=0.3).model.config
    assert (found.embd_pdrop, found.resid_pdrop, found.attn_pdrop) == (0.3, 0.3, 0.3)
    found = common.load_encoder(tmp_path).model.config
    assert (found.embd_pdrop, found.resid_pdrop, found.attn_pdrop) == (0.1, 0.1, 0.1)


# ---- dse.py --------------------------------------------------------------------------------------


def test_f1_is_that_of_class_1():
    """Two pairs are predicted to be paraphrases, three are, one is both: 2 / (2 + 3)."""
    logits = np.eye(2, dtype=np.float32)[[1, 1, 0, 0, 0, 0]]
    found = dse.metrics(logits, np.array([1, 0, 1, 1, 0, 0]), "mrpc")
    assert found == dict(accuracy=pytest.approx(50), F1=pytest.approx(40))


@pytest.mark.parametrize("more", [[], ["--freeze-encoder"]])
def test_a_frozen_encoder_runs_without_dropout(
    more, call_main, models_folder, files, tmp_path, monkeypatch
):
    modes, embed_texts = set(), dse.embed_texts

    def noted(embed, encoder, texts, max_length=None):
        if torch.is_grad_enabled() and hasattr(encoder, "head"):
            modes.add(encoder.model.training)
        return embed_texts(embed, encoder, texts, max_length)

    monkeypatch.setattr(dse, "embed_texts", noted)
    words = small_options("dse", models_folder, files, tmp_path)
    call_main(dse, *words, "--max-steps", 2, *more)
    assert modes == {not more}


def test_teacher_and_student_have_their_own_rates_and_are_scored_when_asked(
    call_main, models_folder, files, tmp_path, monkeypatch
):
    """100 pairs are four steps an epoch, in two epochs of each stage."""
    monkeypatch.setattr(common, "LOG_STEPS", 1)
    words = small_options("dse", models_folder, files, tmp_path)
    call_main(dse, *words, "--lr", 1e-3, "--teacher-lr", 1e-4, "--eval-steps", 3)
    rates, scored = {}, {}
    for folder in (tmp_path / "teacher", tmp_path):
        for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
            into, key = (scored, "step") if "dev" in row else (rates, "lr")
            into.setdefault(row["stage"], []).append(row[key])
    total = 8
    progress = [step / total for step in range(total)]
    teacher = [1e-4 * (p / 0.1 if p < 0.1 else (1 - p) / 0.9) for p in progress]
    half = [p / 2 for p in progress]  # the authors' schedule of the student ends at 56 %
    student = [1e-3 * (p / 0.1 if p < 0.1 else (1 - p) / 0.9) for p in half]
    assert rates["teacher"] == pytest.approx(teacher, rel=1e-6)
    assert rates["student"] == pytest.approx(student, rel=1e-6)
    assert scored == dict(teacher=[0, 3, 6, 8], student=[0, 3, 6, 8])
    assert math.isclose(max(rates["student"]) / max(rates["teacher"]), 10, rel_tol=0.5)
