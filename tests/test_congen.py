"""congen.py: its losses and queue against plain loops, Table 7, its runs from end to end."""

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
from test_views import write_masked_lm, write_wordnet

import common
import congen
from support import demo, views
from support.encoder import load_encoder

TINY = ("--epochs", 2, "--batch-size", 32, "--eval-steps", 4, "--lr", 1e-3)


def rows(count, dimension, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dimension, dtype=torch.float64, generator=generator)


def cosine(u, v):
    dot = sum(a * b for a, b in zip(u, v))
    return dot / math.sqrt(sum(a * a for a in u) * sum(b * b for b in v))


def distribution(z, queue, tau):
    """Eq. 1 for one embedding, in plain Python."""
    powers = [math.exp(cosine(z, d) / tau) for d in queue.tolist()]
    return [power / sum(powers) for power in powers]


def cross_entropy(p, q):
    return -sum(p_j * math.log(q_j) for p_j, q_j in zip(p, q))


# ---- losses


def test_similarity_distribution_is_equation_1():
    z = rows(6, 5, 1)
    queue = rows(11, 5, 2)
    result = congen.similarity_distribution(z, queue, 0.07)
    loops = [distribution(row, queue, 0.07) for row in z.tolist()]
    assert result.shape == (6, 11)
    assert (result - torch.tensor(loops, dtype=torch.float64)).abs().max() < 1e-10
    assert (result.sum(1) - 1).abs().max() < 1e-12


@pytest.mark.parametrize("alpha", [0, 0.25, 0.5, 1])
def test_congen_loss_is_equation_2(alpha):
    control = rows(6, 5, 1)
    generalize = rows(6, 5, 2)
    reference = rows(6, 5, 3)
    queue = rows(11, 5, 4)
    total = 0.0
    for con, gen, ref in zip(control.tolist(), generalize.tolist(), reference.tolist()):
        p_ref = distribution(ref, queue, 0.05)
        p_con = distribution(con, queue, 0.07)
        p_gen = distribution(gen, queue, 0.07)
        total += alpha * cross_entropy(p_ref, p_con) + (1 - alpha) * cross_entropy(p_ref, p_gen)
    loss = congen.congen_loss(control, generalize, reference, queue, 0.05, 0.07, alpha)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(total / 6, abs=1e-10)


def test_congen_loss_is_least_where_the_student_is_the_teacher():
    reference = rows(6, 8, 1)
    queue = rows(20, 8, 2)

    def loss(control):
        return congen.congen_loss(control, reference, reference, queue, 0.1, 0.1, 0.5).item()

    for seed in range(10, 15):
        assert loss(reference + 0.1 * rows(6, 8, seed)) > loss(3 * reference)


def test_congen_loss_is_finite_at_sharp_temperatures():
    reference = rows(6, 8, 1).float()
    queue = rows(20, 8, 2).float()
    loss = congen.congen_loss(-reference, -reference, reference, queue, 0.001, 0.001, 0.5).item()
    assert 100 < loss < math.inf  # the log of a softmax that underflows would be infinite


def test_gradients():
    reference = rows(3, 4, 2)
    queue = rows(5, 4, 3)

    def loss(x):
        return congen.congen_loss(x, x.flip(0), reference, queue, 0.05, 0.1, 0.3)

    assert torch.autograd.gradcheck(loss, rows(3, 4, 1).requires_grad_())


# ---- queue, student, settings


def numbered(numbers):
    """Embeddings [N, 2] that show their number."""
    return torch.tensor([[x, -x] for x in numbers], dtype=torch.float32)


def test_the_queue_contains_exactly_the_last_embeddings_whatever_the_batches():
    rng = np.random.default_rng(0)
    past = list(range(13))
    queue = congen.InstanceQueue(numbered(past))
    for size in [*rng.integers(1, 14, 60), 13, 1, 12]:
        new = list(range(len(past), len(past) + size))
        before = queue.embeddings[:, 0].tolist()
        oldest = sorted(range(13), key=before.__getitem__)[:size]
        queue.enqueue(numbered(new))
        past += new
        assert queue.embeddings[oldest, 0].tolist() == new  # the newest are where the oldest were
        assert sorted(queue.embeddings[:, 0].tolist()) == past[-13:]
        assert torch.equal(queue.embeddings[:, 0], -queue.embeddings[:, 1])


def test_a_queue_continues_from_its_buffers():
    queue = congen.InstanceQueue(numbered(range(5)))
    queue.enqueue(numbered([5, 6, 7]))
    copy = congen.InstanceQueue(numbered([0] * 5))
    copy.load_state_dict(queue.state_dict())
    for restored in (queue, copy):
        restored.enqueue(numbered([8, 9, 10]))
        assert restored.embeddings[:, 0].tolist() == [10, 6, 7, 8, 9]


@pytest.mark.parametrize("name", ["mean", "cls", "pooler", "roberta", "distilbert"])
@pytest.mark.parametrize("head", ["random", "identity"])
def test_the_student_is_read_as_its_folder_will_be(models_folder, name, head):
    """congen.Student and Encoder are written apart; what is trained must have the direction of
    what is saved and scored."""
    encoder = load_encoder(models_folder / name).eval()
    plain = load_encoder(models_folder / name).eval()
    dimension = 32 if head == "identity" else 48
    student = congen.Student(encoder, dimension, head).eval()
    batch = common.Tokens(encoder, demo.sentences(6)).batch(np.arange(6), "cpu")
    directions = torch.nn.functional.cosine_similarity(student(*batch), encoder(*batch))
    assert (directions - 1).abs().max() < 1e-6
    assert encoder.dimension == dimension == student(*batch).shape[1]
    # A pooler of the teacher's dimension is such a head already.
    added = name != "pooler" or head == "random"
    assert len(encoder.heads) == len(plain.heads) + added
    if head == "identity" and name == "roberta":
        assert torch.allclose(encoder(*batch), plain(*batch).tanh(), atol=1e-6)


def test_pooling_equals_loops_and_padding_never_counts():
    states = rows(12, 6, 1).view(3, 4, 6)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    for row, length in enumerate((4, 2, 1)):
        mean = sum(states[row, i] for i in range(length)) / length
        assert (congen.pool(states, mask, "mean")[row] - mean).abs().max() < 1e-10
        assert torch.equal(congen.pool(states, mask, "cls")[row], states[row, 0])


def test_table_7_is_that_of_the_paper():
    assert len(congen.TABLE_7) == 12
    assert congen.TABLE_7["RoBERTa-base"] == (0.1, 0.1, 1024, 5e-5, 125)
    assert congen.TABLE_7["BERT-Tiny"] == (0.05, 0.05, 16384, 5e-4, 4)
    assert congen.TABLE_7["BERT-base"] == (0.05, 0.07, 65536, 5e-5, 109)
    assert set(congen.HUB_NAMES.values()) == set(congen.TABLE_7)
    assert all(name == name.lower() for name in congen.HUB_NAMES)


def test_defaults_are_the_papers(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["congen.py", "--student", "bert-base-uncased"])
    args = congen.parse_args()
    assert (args.epochs, args.batch_size, args.eval_steps, args.alpha) == (20, 128, 512, 0.5)
    assert args.teacher == "princeton-nlp/unsup-simcse-roberta-large"
    assert (args.head, args.augment, args.patience) == ("random", "word-deletion", 7)


def test_the_learning_rate_rises_for_a_tenth_of_the_steps_then_falls_to_zero():
    class Step:
        total = 95

    shares = []
    for Step.number in range(1, 96):
        shares.append(congen.warmup_linear(Step))
    assert shares[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert shares[9:] == pytest.approx([i / 86 for i in range(86, 0, -1)])


# ---- runs


@pytest.fixture(scope="session")
def pairs(files):
    """The folder of `files` with pairs.tsv, the demo's paraphrases."""
    lines = [f"{anchor}\t{positive}\n" for anchor, positive, _ in demo.triplets(300)]
    (files / "pairs.tsv").write_text("".join(lines), "utf-8")
    return files


@pytest.fixture(scope="module")
def masked_lm(models_folder, tmp_path_factory):
    return write_masked_lm(tmp_path_factory.mktemp("mlm"), models_folder / "bert")


def options(models_folder, files, output, teacher="mean", *more):
    data = ("--train", files / "sentences.txt", "--dev", files / "dev.tsv")
    return ("--teacher", models_folder / teacher, *data, "--output", output, *TINY, *more)


def metrics(folder):
    """The lines of metrics.jsonl, without the speed."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for entry in entries:
        entry.pop("sentences_per_second", None)
        entry.pop("peak_memory_mb", None)
    return entries


def losses(folder):
    return [entry["loss"] for entry in metrics(folder) if "loss" in entry]


SETTINGS = {
    "layers of the teacher": ("mean", "--student-layers", "0,2"),
    "given pairs": ("wide", "--student", "bert", "--pairs", "pairs.tsv"),
    "crop": ("mean", "--student", "pooler", "--augment", "crop"),
    "masked language model": ("wide", "--student", "distilbert", "--augment", "mlm"),
    "synonyms": ("mean", "--student-layers", 1, "--augment", "synonym", "--head", "identity"),
    "generalize only": (
        *("cls", "--student", "roberta", "--augment", "delete-one"),
        *("--alpha", 0, "--queue-size", 50),
    ),
    "control only": ("mean", "--student-layers", "1,3", "--alpha", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_leaves_the_best_student(run, models_folder, pairs, masked_lm, tmp_path, setting):
    from huggingface_hub import ModelCard
    from sentence_transformers import SentenceTransformer

    teacher, *more = SETTINGS[setting]
    folders = {"--student": models_folder, "--pairs": pairs}
    for position, option in enumerate(more):
        if option in folders:
            more[position + 1] = folders[option] / more[position + 1]
    more += ["--wordnet", write_wordnet(tmp_path / "wordnet"), "--masked-lm", masked_lm]
    out = tmp_path / "out"
    process = run("congen.py", *options(models_folder, pairs, out, teacher, *more))
    assert process.returncode == 0, process.stderr[-3000:]

    entries = metrics(out)
    assert (entries[0]["stage"], entries[0]["step"]) == ("distill", 0)
    assert entries[-1]["step"] == 20
    assert all(math.isfinite(loss) for loss in losses(out))
    encoder = load_encoder(out).eval()
    sets = {"dev": common.read_scored_pairs(pairs / "dev.tsv")}
    dev = common.spearman(encoder, sets)["dev"]
    rows_of_table = [line.split("|") for line in process.stdout.splitlines()]
    (last,) = [cells for cells in rows_of_table if "student after" in "".join(cells)]
    assert dev == pytest.approx(float(last[2]), abs=0.006)
    assert dev >= max(entry["dev"] for entry in entries if "dev" in entry) - 1e-4
    sentences = demo.sentences(20)
    theirs = SentenceTransformer(str(out), device="cpu").encode(sentences)
    assert np.abs(theirs - common.encode_sentences(encoder, sentences)).max() < 1e-5
    card = ModelCard.load(out / "README.md")
    assert card.data.eval_results[0].metric_value == pytest.approx(dev, abs=0.006)
    assert str(models_folder) not in str(card)
    args = json.loads((out / "args.json").read_text())
    assert args["teacher_temperature"] == 0.05
    assert args["queue_size"] in (50, 300)


@pytest.mark.slow
def test_the_head_is_saved_and_read_again_once(run, models_folder, files, tmp_path):
    more = ("--student", models_folder / "bert", "--lr", 3e-3, "--epochs", 6)
    process = run("congen.py", *options(models_folder, files, tmp_path / "out", "wide", *more))
    assert process.returncode == 0, process.stderr[-2000:]
    encoder = load_encoder(tmp_path / "out")
    assert encoder.dimension == 48
    assert len(encoder.heads) == 1
    assert isinstance(encoder.heads[0].activation, torch.nn.Tanh)
    more = ("--student", tmp_path / "out")
    process = run("congen.py", *options(models_folder, files, tmp_path / "again", "wide", *more))
    assert process.returncode == 0, process.stderr[-2000:]
    assert len(load_encoder(tmp_path / "again").heads) == 1


@pytest.mark.slow
def test_a_dozen_steps_improve_the_real_student(run, teacher, tmp_path):
    """all-MiniLM-L6-v2 into its layers 1,3,5 on 768 sentences: five points on the demo's test."""
    (tmp_path / "train.txt").write_text("\n".join(demo.sentences(768)), "utf-8")
    more = ("--train", tmp_path / "train.txt", "--head", "identity", "--output", tmp_path / "out")
    process = run("congen.py", "--demo", *more, OMP_NUM_THREADS="2")
    assert process.returncode == 0, process.stderr[-2000:]
    scores = {}
    for line in process.stdout.splitlines():
        if line.startswith("| student"):
            _, name, _, test, _ = line.split("|")
            scores[name.strip()] = float(test)
    assert scores["student after"] > scores["student before"] + 5


def weights(folder):
    paths = sorted(folder.rglob("model.safetensors"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def changed_at(path):
    return path.stat().st_mtime_ns if path.exists() else 0


@pytest.mark.slow
def test_killed_and_resumed_it_ends_as_if_never_interrupted(run, models_folder, files, tmp_path):
    """SIGKILL at five random moments; weights bit for bit, and the metrics but for the speed. The
    queue is that of the checkpoint, and the views depend on the step."""
    more = ("--student-layers", "0,2", "--queue-size", 100, "--epochs", 12, "--patience", 100)
    more += ("--eval-steps", 3)
    whole = run("congen.py", *options(models_folder, files, tmp_path / "whole", "wide", *more))
    assert whole.returncode == 0, whole.stderr[-2000:]
    arguments = options(models_folder, files, tmp_path / "killed", "wide", *more, "--resume")
    command = [sys.executable, "congen.py", *map(str, arguments)]
    where = dict(env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=os.path.dirname(congen.__file__))
    rng = random.Random(0)
    steps = set()
    state = tmp_path / "killed" / "checkpoint" / "state.safetensors"
    for _ in range(5):
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before = changed_at(state)
        process = subprocess.Popen(command, **quiet, **where)
        while process.poll() is None and changed_at(state) == before:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.3))
        assert process.poll() is None, "the run ended before it was killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        steps.add(json.loads(safe_open(state, "np").metadata()["state"])["step"])
    assert len(steps) > 3  # it was killed in different places
    assert subprocess.run(command, capture_output=True, **where).returncode == 0
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")


@pytest.mark.slow
def test_each_epoch_makes_new_views(run, models_folder, pairs, tmp_path):
    """One batch an epoch, hardly any learning, no dropout: without new views the losses of the
    epochs would be the same."""
    no_dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.AutoModel.from_pretrained(models_folder / "bert", **no_dropout)
    model.save_pretrained(tmp_path / "still")
    tokenizer = transformers.AutoTokenizer.from_pretrained(models_folder / "bert")
    tokenizer.save_pretrained(tmp_path / "still")
    more = ("--student", tmp_path / "still", "--batch-size", 300, "--epochs", 3)
    more += ("--lr", 1e-30, "--eval-steps", 1)
    spread = {}
    for name, extra in (("made", ()), ("given", ("--pairs", pairs / "pairs.tsv"))):
        out = tmp_path / name
        process = run("congen.py", *options(models_folder, pairs, out, "mean", *more, *extra))
        assert process.returncode == 0, process.stderr[-2000:]
        spread[name] = max(losses(out)) - min(losses(out))
    assert spread["given"] < 1e-5
    assert spread["made"] > 1e-3


@pytest.mark.slow
def test_the_teachers_embeddings_are_shared_with_ckd(run, models_folder, files, tmp_path):
    more = ("--max-steps", 1, "--max-length", 64, "--student-layers", "0,2")
    more += ("--teacher-dtype", "float16")
    base = options(models_folder, files, tmp_path / "out", "mean", *more)
    cache = dict(XDG_CACHE_HOME=str(tmp_path))

    def stored():
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("teacher-*.npy")}

    assert run("ckd.py", *base, "--stage", "distill", **cache).returncode == 0
    kept = stored()
    kinds = {str(np.load(path).dtype): len(np.load(path)) for path in kept}
    assert kinds == {"float16": 300, "float32": 120}  # of training, and of dev, for the scores
    assert run("congen.py", *base, "--overwrite", **cache).returncode == 0
    assert stored() == kept


def call(monkeypatch, *arguments):
    """congen.main() in this process."""
    monkeypatch.setattr(sys, "argv", ["congen.py", *map(str, arguments)])
    congen.main()


@pytest.mark.parametrize(
    "student, row",
    [
        ("bert-base-uncased", "BERT-base"),
        ("roberta-base", "RoBERTa-base"),
        ("MiniLM-L12-H384-uncased", "MiniLM-L12"),
        ("other", "BERT-Tiny"),
    ],
)
def test_table_7_by_the_students_name_unless_options_are_given(
    monkeypatch, capsys, models_folder, files, tmp_path, student, row
):
    (tmp_path / student).symlink_to(models_folder / "bert")
    call(
        monkeypatch,
        *("--teacher", models_folder / "mean", "--student", tmp_path / student),
        *("--train", files / "sentences.txt", "--dev", files / "dev.tsv"),
        *("--output", tmp_path / "out", "--max-steps", 1, "--batch-size", 20),
        *("--student-temperature", 0.2),
    )
    args = json.loads((tmp_path / "out" / "args.json").read_text())
    expected = congen.TABLE_7[row]
    assert args["teacher_temperature"] == expected.teacher_temperature
    assert args["student_temperature"] == 0.2
    assert args["lr"] == expected.lr
    assert args["queue_size"] == 300  # as many as there are sentences
    assert row in capsys.readouterr().err


def test_layers_of_a_student_are_not_the_student_that_table_7_names(monkeypatch, models_folder):
    arguments = ["congen.py", "--student", "bert-base-uncased", "--student-layers", "0,2"]
    monkeypatch.setattr(sys, "argv", arguments)
    args = congen.parse_args()
    encoder = load_encoder(models_folder / "bert")
    assert congen.row_of_table_7(args, encoder) == "BERT-Tiny"
    args.student_layers = None
    assert congen.row_of_table_7(args, encoder) == "BERT-base"


def test_alpha_1_needs_no_second_view(monkeypatch, models_folder, files, tmp_path):
    class Called(Exception):
        pass

    def second(self, rows, seed):
        raise Called

    monkeypatch.setattr(views.MadeViews, "second", second)
    more = ("--student-layers", "0,2", "--max-steps", 2)
    out = tmp_path / "out"
    call(monkeypatch, *options(models_folder, files, out, "mean", *more, "--alpha", 1))
    assert metrics(out)[-1]["step"] == 2
    more += ("--alpha", 0.99, "--overwrite")
    with pytest.raises(Called):
        call(monkeypatch, *options(models_folder, files, out, "mean", *more))


def test_over_a_queue_of_one_the_loss_is_0_whatever_the_student():
    z = rows(6, 5, 1)
    assert congen.congen_loss(z, -z, rows(6, 5, 2), rows(1, 5, 3), 0.05, 0.07, 0.5).item() == 0


def test_the_best_score_starts_from_the_student_with_its_new_head(
    monkeypatch, models_folder, files, tmp_path
):
    more = ("--student", models_folder / "bert", "--max-steps", 1)
    call(monkeypatch, *options(models_folder, files, tmp_path / "out", "wide", *more))
    encoder = load_encoder(models_folder / "bert")
    sets = {"dev": common.read_scored_pairs(files / "dev.tsv")}
    headless = common.spearman(encoder, sets)["dev"]
    torch.manual_seed(0)
    congen.Student(encoder, 48)
    with_head = common.spearman(encoder, sets)["dev"]
    assert metrics(tmp_path / "out")[0]["dev"] == pytest.approx(with_head, abs=1e-4)
    assert abs(with_head - headless) > 0.01


def test_patience_is_in_epochs_not_in_dev_scores(monkeypatch, models_folder, files, tmp_path):
    """300 sentences are ten batches of 32; the student does not move, so that no score is better
    than the first."""
    more = ("--student-layers", "0,2", "--lr", 1e-30, "--eval-steps", 2, "--epochs", 5)
    base = options(models_folder, files, tmp_path / "out", "mean", *more, "--patience", 2)
    call(monkeypatch, *base)
    assert metrics(tmp_path / "out")[-1]["step"] == 20


def test_the_queue_of_the_checkpoint_is_the_teachers(monkeypatch, models_folder, files, tmp_path):
    """After a step, K - N random embeddings and those of the batch in the first N slots."""

    class Stopped(Exception):
        pass

    def finish(self, stage, scores):
        raise Stopped  # the checkpoint of a finished stage contains no queue

    monkeypatch.setattr(congen.Run, "finish", finish)
    more = ("--student-layers", "0,2", "--max-steps", 1, "--queue-size", 40)
    with pytest.raises(Stopped):
        call(monkeypatch, *options(models_folder, files, tmp_path / "out", "mean", *more))
    tensors = load_file(tmp_path / "out" / "checkpoint" / "state.safetensors")
    teacher = load_encoder(models_folder / "mean").eval()
    sentences = common.read_sentences(files / "sentences.txt")
    targets = common.encode_sentences(teacher, sentences)
    lengths = common.Tokens(teacher, sentences, 128).lengths
    batch = next(common.batches(lengths, 32, [0, 0]))
    first = np.random.default_rng(0).permutation(300)[:40]
    expected = np.concatenate([targets[batch], targets[first[32:]]])
    assert np.abs(tensors["module1.embeddings"].numpy() - expected).max() < 1e-5
    assert tensors["module1.next_slot"].item() == 32


# ---- invalid input


def test_invalid_input_prints_one_error_line(fails, models_folder, files, tmp_path):
    out = tmp_path / "out"
    base = options(models_folder, files, out, "mean", "--student-layers", "0,2")
    texts = {
        "one.tsv": "a boy\tein Junge\na girl\n",
        "empty.tsv": "",
        "hole.tsv": "a boy\t\n",
        "blank.txt": "\n \n",
        "two.csv": "sent0,sent1,hard_neg\na,b\n",
        "one.txt": "a boy\n",
        "pair.tsv": "a boy\tein Junge\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, "utf-8")
    broken = write_wordnet(tmp_path / "wordnet")
    (broken / "index.verb").write_text("run v 1\n")

    def check(expected, *extra):
        line = fails(congen, *base, *extra)
        assert expected in line
        assert not out.exists()

    columns = "one.tsv:2: 1 tab-separated columns, expected first view, second view"
    check(columns, "--pairs", tmp_path / "one.tsv")
    check("none.tsv: No such file", "--pairs", tmp_path / "none.tsv")
    check("the file is empty", "--pairs", tmp_path / "empty.tsv")
    check("hole.tsv:1", "--pairs", tmp_path / "hole.tsv")
    check("every line is blank", "--train", tmp_path / "blank.txt")
    check("two.csv:2", "--train", tmp_path / "two.csv")
    check("none.txt: no such file", "--train", tmp_path / "none.txt")
    synonym = ("--augment", "synonym", "--wordnet")
    check("data.noun: No such file", *synonym, tmp_path / "none")
    check("index.verb:1", *synonym, broken)
    mlm = ("--augment", "mlm", "--masked-lm")
    check("no local path", *mlm, tmp_path / "none")
    check("expected a masked language model", *mlm, models_folder / "bert")
    check("argument --alpha: '1.5' is not a number from 0 to 1", "--alpha", 1.5)
    check("argument --alpha: '-0.5' is not", "--alpha", -0.5)
    temperature = "argument --student-temperature/--temperature: '0' is not a number above 0"
    check(temperature, "--student-temperature", 0)
    check("argument --teacher-temperature: 'nan'", "--teacher-temperature", "nan")
    size = "--queue-size 301: expected 32 (a batch, or 2) to 300 (all sentences)"
    check(size, "--queue-size", 301)
    check("--queue-size 31", "--queue-size", 31)
    size = "--queue-size 1: expected 2 (a batch, or 2) to 300 (all sentences)"
    check(size, "--queue-size", 1, "--batch-size", 1)
    one = "1 sentence to train on, expected 2 or more, as a similarity distribution over one"
    check(one, "--train", tmp_path / "one.txt")
    check(one, "--pairs", tmp_path / "pair.tsv")
    check("--device gpu", "--device", "gpu")
    check("--augment", "--augment", "shuffle")


@pytest.mark.parametrize("objective", ["congen", "l2", "dual-l2", "skd", "ckd"])
def test_objective_says_where_it_went(fails, objective):
    line = fails(congen, "--student", "x", "--objective", objective)
    assert "--objective is not an option of this script any longer" in line
    assert "baselines.py --method l2, dual-l2 and skd" in line
    assert "--alpha 1 is SEED" in line


def test_a_student_must_be_given(fails, models_folder, files, tmp_path):
    line = fails(congen, *options(models_folder, files, tmp_path / "out"))
    assert "--student" in line


def test_a_run_in_the_output_folder_is_kept(monkeypatch, fails, models_folder, files, tmp_path):
    more = ("--student-layers", "0,2", "--max-steps", 4)
    base = options(models_folder, files, tmp_path / "out", "mean", *more)
    call(monkeypatch, *base)
    before = weights(tmp_path / "out")
    assert "already contains a run" in fails(congen, *base)
    line = fails(congen, *base, "--resume", "--alpha", 0.1)
    assert "--alpha 0.1: the run to resume" in line
    assert weights(tmp_path / "out") == before


def test_a_loss_that_becomes_nan_stops_the_run_and_keeps_the_best_student(
    fails, models_folder, files, tmp_path
):
    more = ("--student-layers", "0,2", "--lr", 1e38)
    line = fails(congen, *options(models_folder, files, tmp_path / "out", "mean", *more))
    assert line.startswith("error: step ")
    assert "the loss is nan" in line
    assert "keeps its best student" in line
    for value in load_file(tmp_path / "out" / "model.safetensors").values():
        assert torch.isfinite(value).all()
