"""congen.py: its losses, queue and views against plain loops, its table, its runs from end to end."""
import json
import math
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

import common
import congen
import demo

TINY = ("--epochs", 2, "--batch-size", 32, "--eval-steps", 4, "--lr", 1e-3)


def rows(count, width, seed):
    return torch.randn(count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cosine(u, v):
    return sum(a * b for a, b in zip(u, v)) / math.sqrt(sum(a * a for a in u) * sum(b * b for b in v))


def distribution(z, queue, tau):
    """Eq. 1 for one embedding, in plain Python."""
    powers = [math.exp(cosine(z, d) / tau) for d in queue.tolist()]
    return [power / sum(powers) for power in powers]


# ---- losses

def test_similarity_distribution_is_equation_1():
    z, queue = rows(6, 5, 1), rows(11, 5, 2)
    result = congen.similarity_distribution(z, queue, 0.07)
    expected = torch.tensor([distribution(row, queue, 0.07) for row in z.tolist()], dtype=torch.float64)
    assert result.shape == (6, 11) and (result - expected).abs().max() < 1e-10 and (result.sum(1) - 1).abs().max() < 1e-12


@pytest.mark.parametrize("alpha", [0, 0.25, 0.5, 1])
def test_congen_loss_is_equation_2(alpha):
    control, generalize, reference, queue = rows(6, 5, 1), rows(6, 5, 2), rows(6, 5, 3), rows(11, 5, 4)
    total = 0.0
    for con, gen, ref in zip(control.tolist(), generalize.tolist(), reference.tolist()):
        p_ref, p_con, p_gen = distribution(ref, queue, 0.05), distribution(con, queue, 0.07), distribution(gen, queue, 0.07)
        total -= alpha * sum(p * math.log(q) for p, q in zip(p_ref, p_con)) + (1 - alpha) * sum(p * math.log(q) for p, q in zip(p_ref, p_gen))
    loss = congen.congen_loss(control, generalize, reference, queue, 0.05, 0.07, alpha)
    assert loss.shape == () and loss.item() == pytest.approx(total / 6, abs=1e-10)


def test_congen_loss_is_least_where_the_student_is_the_teacher_and_survives_sharp_temperatures():
    reference, queue = rows(6, 8, 1), rows(20, 8, 2)
    least = congen.congen_loss(3 * reference, reference, reference, queue, 0.1, 0.1, 0.5).item()
    assert all(congen.congen_loss(reference + 0.1 * rows(6, 8, seed), reference, reference, queue, 0.1, 0.1, 0.5).item() > least for seed in range(10, 15))
    sharp = congen.congen_loss(-reference.float(), -reference.float(), reference.float(), queue.float(), 0.001, 0.001, 0.5)
    assert math.isfinite(sharp.item()) and sharp.item() > 100  # the log of a softmax that underflows would be infinite


def test_l2_and_contrastive_loss_against_loops():
    first, second, queue = rows(6, 5, 1), rows(6, 5, 2), rows(11, 5, 3)
    expected = 0.0
    for u, v in zip(first.tolist(), second.tolist()):
        nu, nv = math.sqrt(sum(x * x for x in u)), math.sqrt(sum(x * x for x in v))
        expected += sum((x / nu - y / nv) ** 2 for x, y in zip(u, v)) / 6
    assert congen.l2_loss(first, second).item() == pytest.approx(expected, abs=1e-10)
    slots = [4, 0, 10, 7, 2, 3]
    expected = -sum(math.log(distribution(z, queue, 0.07)[slot]) for z, slot in zip(first.tolist(), slots)) / 6
    assert congen.contrastive_loss(first, queue, torch.tensor(slots), 0.07).item() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("loss", [
    lambda x: congen.congen_loss(x, x.flip(0), rows(3, 4, 2), rows(5, 4, 3), 0.05, 0.1, 0.3), lambda x: congen.l2_loss(x, rows(3, 4, 2)),
    lambda x: congen.contrastive_loss(x, rows(5, 4, 3), torch.tensor([1, 4, 0]), 0.1)])
def test_gradients(loss):
    assert torch.autograd.gradcheck(loss, rows(3, 4, 1).requires_grad_())


# ---- queue, student, views, table

def test_the_queue_holds_exactly_the_last_embeddings_whatever_the_batches():
    rng, past = np.random.default_rng(0), list(range(13))
    queue = congen.InstanceQueue(torch.tensor([[x, -x] for x in past], dtype=torch.float32))
    for size in [*rng.integers(1, 14, 60), 13, 1, 12]:
        new = list(range(len(past), len(past) + size))
        oldest = sorted(range(13), key=lambda slot: queue.embeddings[slot, 0].item())[:size]
        slots = queue.enqueue(torch.tensor([[x, -x] for x in new], dtype=torch.float32))
        past += new
        assert slots.tolist() == oldest and queue.embeddings[slots, 0].tolist() == new  # newest replaces oldest
        assert sorted(queue.embeddings[:, 0].tolist()) == past[-13:] and torch.equal(queue.embeddings[:, 0], -queue.embeddings[:, 1])


@pytest.mark.parametrize("name", ["mean", "cls", "pooler", "roberta", "distilbert"])
@pytest.mark.parametrize("head", ["random", "identity"])
def test_the_student_is_read_as_its_folder_will_be(models_folder, name, head):
    """congen.Student and common.Encoder are written apart; what is trained must point where what is saved and scored points."""
    encoder = common.load_encoder(models_folder / name).eval()
    plain, heads = common.load_encoder(models_folder / name).eval(), len(encoder.heads)
    student = congen.Student(encoder, 32 if head == "identity" else 48, head, "fp32").eval()
    batch = common.Tokens(encoder, demo.sentences(6)).batch(np.arange(6), "cpu")
    assert (torch.nn.functional.cosine_similarity(student(*batch), encoder(*batch)) - 1).abs().max() < 1e-6
    assert len(encoder.heads) == heads + (name != "pooler" or head == "random")  # a pooler as wide as the teacher is such a head already
    if head == "identity" and name == "roberta":
        assert torch.allclose(encoder(*batch), plain(*batch).tanh(), atol=1e-6)


def test_views_drop_or_replace_at_table_6s_rates():
    words = [f"word{i}" for i in range(40)]
    sentence, rng = " ".join(words), np.random.default_rng(0)
    kept = [len(congen.augment(sentence, "word-deletion", rng).split()) for _ in range(500)]
    assert 35.7 < sum(kept) / 500 < 36.3 and len(set(kept)) > 5
    gone = {next(iter(set(words) - set(congen.augment(sentence, "delete-one", rng).split()))) for _ in range(500)}
    assert gone == set(words)
    crops = {congen.augment(sentence, "crop", rng) for _ in range(200)}
    assert crops == {" ".join(words[start:start + 36]) for start in range(5)}
    synonyms = {"word3": ["x"], "word7": ["y", "z"], "word8": []}
    changed = {congen.augment(sentence, "synonym", rng, synonyms) for _ in range(50)}
    assert changed == {sentence.replace("word3 ", "x ").replace("word7 ", f"{other} ") for other in "yz"}
    assert congen.augment("Boy is running", "synonym", rng, {"boy": ["male child"], "is": ["be"]}) == "male child is running"


@pytest.mark.parametrize("how", ["word-deletion", "delete-one", "crop", "synonym"])
def test_a_view_without_words_is_the_sentence_itself(how):
    rng = np.random.default_rng(0)
    assert {congen.augment("Stop!", how, rng, {}) for _ in range(50)} == {"Stop!"}
    assert [congen.augment("abc b c d e f", how, np.random.default_rng([7, step]), {"abc": ["x", "y"]}) for step in range(9)] \
        == [congen.augment("abc b c d e f", how, np.random.default_rng([7, step]), {"abc": ["x", "y"]}) for step in range(9)]


def wordnet(folder):
    """A small database: big, large (one adjective synset; "big" is also a noun nobody has seen), dog, domestic dog; "hound" in dog's second sense."""
    folder.mkdir()
    files = {"data.noun": "00000001 05 n 02 dog 0 domestic_dog 0 000 | a pet  \n00000002 05 n 02 dog 1 hound 0 000 | a hunter  \n",
             "index.noun": "big n 1 0 1 0 00000002  \ndog n 2 2 @ ~ 2 1 00000001 00000002  \ndomestic_dog n 1 0 1 0 00000001  \nhound n 1 0 1 1 00000002  \n",
             "data.adj": "00000001 00 a 02 big 0 large(p) 0 000 | of size  \n", "index.adj": "big a 1 0 1 1 00000001  \nlarge a 1 0 1 1 00000001  \n",
             "data.verb": "00000001 30 v 01 run 0 000 00 | move  \n", "index.verb": "run v 1 0 1 1 00000001  \n",
             "data.adv": "00000001 02 r 01 soon 0 000 | in time  \n", "index.adv": "soon r 1 0 1 1 00000001  \n"}
    for name, text in files.items():
        (folder / name).write_text("  1 This software and database is being provided to you  \n" + text)
    return folder


def test_wordnet_gives_the_words_of_the_first_sense(tmp_path):
    synonyms = congen.read_wordnet(wordnet(tmp_path / "wordnet"))
    assert synonyms["dog"] == ["domestic dog"] and synonyms["hound"] == ["dog"]
    assert synonyms["big"] == ["large"] and synonyms["large"] == ["big"] and synonyms["run"] == []


def test_debians_wordnet():
    if not os.path.exists("/usr/share/wordnet/data.noun"):
        pytest.skip("no WordNet in /usr/share/wordnet (Debian: wordnet-base)")
    synonyms = congen.read_wordnet("/usr/share/wordnet")
    assert "auto" in synonyms["car"] and "automobile" in synonyms["car"] and "truck" not in synonyms["car"] and not synonyms["he"]
    assert len([word for word in synonyms if synonyms[word]]) > 10_000


@pytest.fixture(scope="session")
def masked_lm(models_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlm")
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(models_folder / "bert")
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(models_folder / "bert").save_pretrained(folder)
    return folder


def test_masks_are_filled_at_15_percent_by_the_likeliest_token(masked_lm):
    model, tokenizer = congen.load_masked_lm(masked_lm, "cpu")
    sentences = demo.sentences(200)
    views = congen.fill_masks(sentences, np.random.default_rng(1), model, tokenizer)
    assert views == congen.fill_masks(sentences, np.random.default_rng(1), model, tokenizer)
    assert views != congen.fill_masks(sentences, np.random.default_rng(2), model, tokenizer)
    ids, changed, total = tokenizer(sentences)["input_ids"], 0, 0
    random_numbers = np.random.default_rng(1).random((200, max(map(len, ids))))
    for i, (row, view) in enumerate(zip(ids, views)):
        masked = [j for j in range(1, len(row) - 1) if random_numbers[i, j] < 0.15]
        inputs = torch.tensor([[tokenizer.mask_token_id if j in masked else token for j, token in enumerate(row)]])
        best = model(inputs).logits[0].argmax(-1).tolist()
        assert view == tokenizer.decode([best[j] if j in masked else token for j, token in enumerate(row)], skip_special_tokens=True)
        changed, total = changed + len(masked), total + len(row) - 2
    assert 0.12 < changed / total < 0.18


def test_table_7_stands_as_in_the_paper():
    assert len(congen.TABLE_7) == 12 and congen.TABLE_7["RoBERTa-base"][:4] == (0.1, 0.1, 1024, 5e-5)
    assert congen.TABLE_7["BERT-Tiny"][:4] == (0.05, 0.05, 16384, 5e-4) and congen.TABLE_7["BERT-base"][:4] == (0.05, 0.07, 65536, 5e-5)


def test_defaults_are_the_papers(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["congen.py", "--student", "bert-base-uncased"])
    args = congen.parse_args()
    assert (args.epochs, args.batch_size, args.eval_steps, args.alpha, args.objective) == (20, 128, 512, 0.5, "congen")
    assert args.teacher == "princeton-nlp/unsup-simcse-roberta-large" and args.head == "random"


# ---- runs

@pytest.fixture(scope="session")
def views(files):
    """pairs.tsv, the demo's paraphrases, beside the other files."""
    (files / "pairs.tsv").write_text("".join(f"{anchor}\t{positive}\n" for anchor, positive, _ in demo.triplets(300)), "utf-8")
    return files


def options(models_folder, views, output, teacher="mean", *more):
    return ("--teacher", models_folder / teacher, "--train", views / "sentences.txt", "--dev", views / "dev.tsv", "--output", output, *TINY, *more)


@pytest.mark.parametrize("teacher, more", [
    ("mean", ("--student-layers", "0,2")), ("wide", ("--student", "bert", "--pairs", "pairs.tsv")), ("mean", ("--student", "pooler", "--augment", "crop")),
    ("wide", ("--student", "distilbert", "--augment", "mlm")), ("mean", ("--student-layers", "1", "--augment", "synonym", "--head", "identity")),
    ("cls", ("--student", "roberta", "--augment", "delete-one", "--alpha", 0, "--queue-size", 50)), ("mean", ("--student-layers", "1,3", "--alpha", 1)),
    ("wide", ("--student-layers", "1,3", "--objective", "l2")), ("mean", ("--student-layers", "1,3", "--objective", "dual-l2")),
    ("mean", ("--student-layers", "1,3", "--objective", "skd", "--pairs", "pairs.tsv")), ("mean", ("--student-layers", "1,3", "--objective", "ckd"))])
def test_a_run_leaves_the_best_student(run, models_folder, views, masked_lm, tmp_path, teacher, more):
    from sentence_transformers import SentenceTransformer
    folder = {"--student": models_folder, "--pairs": views}
    more = [folder[before] / word if before in folder else word for before, word in zip(("", *more), more)]
    more += ["--wordnet", wordnet(tmp_path / "wordnet"), "--masked-lm", masked_lm]
    out = tmp_path / "out"
    process = run("congen.py", *options(models_folder, views, out, teacher, *more))
    assert process.returncode == 0, process.stderr[-3000:]
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert entries[-1]["step"] == 20 and all(math.isfinite(entry["loss"]) for entry in entries)
    encoder = common.load_encoder(out).eval()
    dev = common.spearman(encoder, {"dev": common.read_graded_pairs(views / "dev.tsv")})["dev"]
    last = [line.split("|") for line in process.stdout.splitlines() if "student after" in line][0]
    assert dev == pytest.approx(float(last[2]), abs=0.006) and dev >= max(entry["dev"] for entry in entries if "dev" in entry) - 1e-4
    ours = common.encode(encoder, common.Tokens(encoder, demo.sentences(20)), "cpu")
    assert np.abs(SentenceTransformer(str(out), device="cpu").encode(demo.sentences(20)) - ours).max() < 1e-5
    from huggingface_hub import ModelCard
    card = ModelCard.load(out / "README.md")
    assert card.data.eval_results[0].metric_value == pytest.approx(dev, abs=0.006) and str(models_folder) not in str(card)
    args = json.loads((out / "args.json").read_text())
    assert args["teacher_temperature"] == 0.05 and args["queue_size"] in (50, 300)


def test_the_head_is_saved_and_read_again_once(run, models_folder, views, tmp_path):
    more = ("--student", models_folder / "bert", "--lr", 3e-3, "--epochs", 6)
    process = run("congen.py", *options(models_folder, views, tmp_path / "out", "wide", *more))
    assert process.returncode == 0, process.stderr[-2000:]
    encoder = common.load_encoder(tmp_path / "out")
    assert encoder.width == 48 and len(encoder.heads) == 1 and isinstance(encoder.heads[0].activation, torch.nn.Tanh)
    process = run("congen.py", *options(models_folder, views, tmp_path / "again", "wide", "--student", tmp_path / "out"))
    assert process.returncode == 0 and len(common.load_encoder(tmp_path / "again").heads) == 1


def test_a_dozen_steps_bring_the_real_student_nearer(run, tmp_path):
    """all-MiniLM-L6-v2 into its layers 1,3,5 on 768 of the demo's sentences: the demo test pairs, five points."""
    (tmp_path / "train.txt").write_text("\n".join(demo.sentences(768)), "utf-8")
    more = ("--demo", "--train", tmp_path / "train.txt", "--head", "identity")
    process = run("congen.py", *more, "--output", tmp_path / "out", OMP_NUM_THREADS="2")
    assert process.returncode == 0, process.stderr[-2000:]
    table = {line.split("|")[1].strip(): float(line.split("|")[3]) for line in process.stdout.splitlines() if line.startswith("| student")}
    assert table["student after"] > table["student before"] + 5


def weights(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("model.safetensors"))}


def test_killed_and_resumed_it_ends_as_if_nobody_had_touched_it(run, models_folder, views, tmp_path):
    """SIGKILL at five random moments; weights bit for bit, and the metrics but for the speed. The views are drawn afresh by step."""
    more = ("--student-layers", "0,2", "--queue-size", 100, "--epochs", 12, "--patience", 100, "--eval-steps", 3)
    whole = run("congen.py", *options(models_folder, views, tmp_path / "whole", "wide", *more))
    assert whole.returncode == 0, whole.stderr[-2000:]
    command = [sys.executable, "congen.py", *map(str, options(models_folder, views, tmp_path / "killed", "wide", *more)), "--resume"]
    where = dict(env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=os.path.dirname(congen.__file__))
    rng, steps, state = random.Random(0), set(), tmp_path / "killed" / "checkpoint" / "state.safetensors"
    for kill in range(5):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **where)
        before = state.stat().st_mtime_ns if state.exists() else 0
        while process.poll() is None and (state.stat().st_mtime_ns if state.exists() else 0) == before:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.3))
        assert process.poll() is None, "the run ended before it was killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        steps.add(json.loads(safe_open(state, "np").metadata()["state"])["step"])
    assert len(steps) > 3  # it was killed in different places
    assert subprocess.run(command, capture_output=True, **where).returncode == 0
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")

    def metrics(name):
        return [{key: value for key, value in json.loads(line).items() if key != "sentences_per_second"}
                for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    assert metrics("killed") == metrics("whole")


def test_each_epoch_draws_its_views_anew(run, models_folder, views, tmp_path):
    """One batch an epoch, no learning to speak of, no dropout: without fresh views the losses of the epochs would be the same."""
    model = transformers.AutoModel.from_pretrained(models_folder / "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model.save_pretrained(tmp_path / "still")
    transformers.AutoTokenizer.from_pretrained(models_folder / "bert").save_pretrained(tmp_path / "still")
    losses = {}
    for name, more in (("fresh", ()), ("given", ("--pairs", views / "pairs.tsv"))):
        process = run("congen.py", *options(models_folder, views, tmp_path / name, "mean", "--student", tmp_path / "still", "--batch-size", 300, "--epochs", 3,
                                            "--lr", 1e-30, "--eval-steps", 1, *more))
        assert process.returncode == 0, process.stderr[-2000:]
        losses[name] = [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    assert max(losses["given"]) - min(losses["given"]) < 1e-5 and max(losses["fresh"]) - min(losses["fresh"]) > 1e-3


def test_the_teachers_embeddings_are_shared_with_ckd(run, models_folder, views, tmp_path):
    more = ("--max-steps", 1, "--max-length", 64, "--student-layers", "0,2")
    base = options(models_folder, views, tmp_path / "out", "mean", *more)
    assert run("ckd.py", *base, "--stage", "distill", XDG_CACHE_HOME=str(tmp_path)).returncode == 0
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("teacher-*")}
    assert run("congen.py", *base, "--overwrite", XDG_CACHE_HOME=str(tmp_path)).returncode == 0
    assert len(kept) == 1 and {path: path.stat().st_mtime_ns for path in tmp_path.rglob("teacher-*")} == kept


@pytest.mark.parametrize("student, row", [("bert-base-uncased", "BERT-base"), ("roberta-base", "RoBERTa-base"), ("minilm-l12-h384-uncased", "MiniLM-L12"), ("other", "BERT-Tiny")])
def test_the_students_name_picks_its_row_of_table_7_and_flags_override(run, models_folder, views, tmp_path, student, row):
    (tmp_path / student).symlink_to(models_folder / "bert")
    process = run("congen.py", "--teacher", models_folder / "mean", "--student", tmp_path / student, "--train", views / "sentences.txt", "--dev", views / "dev.tsv",
                  "--output", tmp_path / "out", "--max-steps", 1, "--batch-size", 20, "--student-temperature", 0.2)
    assert process.returncode == 0, process.stderr[-2000:]
    args, expected = json.loads((tmp_path / "out" / "args.json").read_text()), congen.TABLE_7[row]
    assert (args["teacher_temperature"], args["student_temperature"], args["lr"]) == (expected[0], 0.2, expected[3]) and row in process.stderr


# ---- what bad input gets

def test_bad_input_gets_one_line_and_status_2(fails, models_folder, views, tmp_path):
    out = tmp_path / "out"
    base = options(models_folder, views, out, "mean", "--student-layers", "0,2")
    texts = {"one.tsv": "a boy\tein Junge\na girl\n", "empty.tsv": "", "hole.tsv": "a boy\t\n", "blank.txt": "\n \n", "two.csv": "sent0,sent1,hard_neg\na,b\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, "utf-8")
    broken = wordnet(tmp_path / "wordnet")
    (broken / "index.verb").write_text("run v 1\n")
    for extra, expected in ((("--pairs", tmp_path / "one.tsv"), "one.tsv:2: 1 tab-separated columns, expected first view, second view"),
                            (("--pairs", tmp_path / "none.tsv"), "none.tsv: No such file"), (("--pairs", tmp_path / "empty.tsv"), "the file is empty"),
                            (("--pairs", tmp_path / "hole.tsv"), "hole.tsv:1"), (("--train", tmp_path / "blank.txt"), "every line is blank"),
                            (("--train", tmp_path / "two.csv"), "two.csv:2"), (("--train", tmp_path / "none.txt"), "no such file"),
                            (("--augment", "synonym", "--wordnet", tmp_path / "none"), "data.noun: No such file"),
                            (("--augment", "synonym", "--wordnet", broken), "index.verb:1"),
                            (("--augment", "mlm", "--masked-lm", tmp_path / "none"), "not a local path"),
                            (("--augment", "mlm", "--masked-lm", models_folder / "bert"), "expected a masked language model"),
                            (("--alpha", 1.5), "--alpha 1.5: expected a queue"), (("--alpha", -0.5), "--alpha -0.5"), (("--student-temperature", 0), "--student-temperature 0.0"),
                            (("--queue-size", 301), "--queue-size 301 --alpha 0.5: expected a queue from a batch, 32, to all 300 sentences"), (("--queue-size", 31), "--queue-size 31"),
                            (("--device", "gpu"), "--device gpu"), (("--augment", "shuffle"), "--augment")):
        line = fails(congen, *base, *extra)
        assert expected in line and not out.exists(), line


def test_a_run_in_the_way_is_kept(run, fails, models_folder, views, tmp_path):
    base = options(models_folder, views, tmp_path / "out", "mean", "--student-layers", "0,2", "--max-steps", 4)
    assert run("congen.py", *base).returncode == 0
    before = weights(tmp_path / "out")
    assert "holds a run" in fails(congen, *base) and "--alpha 0.1: the run to resume" in fails(congen, *base, "--resume", "--alpha", 0.1)
    assert weights(tmp_path / "out") == before


def test_a_loss_that_becomes_nan_stops_the_run_and_keeps_the_best_student(run, models_folder, views, tmp_path):
    process = run("congen.py", *options(models_folder, views, tmp_path / "out", "mean", "--student-layers", "0,2", "--lr", 1e38))
    assert process.returncode == 2 and "Traceback" not in process.stderr
    line = process.stderr.splitlines()[-1]
    assert line.startswith("error: step ") and "the loss is nan" in line and "keeps its best student" in line
    assert all(torch.isfinite(value).all() for value in load_file(tmp_path / "out" / "model.safetensors").values())
