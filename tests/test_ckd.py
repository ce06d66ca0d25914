"""ckd.py: its losses and memory bank against plain loops in float64, its runs from end to end."""

import json
import math
import sys
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import ckd
import common
from common import encode_sentences
from support import demo
from support.encoder import LayerPooling, load_encoder
from support.run import Step

TINY = {
    "--epochs": 2,
    "--batch-size": 32,
    "--finetune-epochs": 1,
    "--finetune-batch-size": 32,
    "--eval-steps": 4,
    "--lr": 1e-3,
}


def words(options):
    """{"--option": value} -> the words of a command line; True is an option without a value."""
    result = []
    for option, value in options.items():
        result += [option] if value is True else [option, str(value)]
    return result


def rows(count, dimension, seed):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, dimension, dtype=torch.float64, generator=random)


def cosine(u, v):
    product = sum(a * b for a, b in zip(u, v))
    return product / math.sqrt(sum(a * a for a in u) * sum(b * b for b in v))


# ---- losses


@pytest.mark.parametrize("queue_size", [0, 1, 11])
def test_contrastive_distillation_is_equation_5(queue_size):
    student, teacher, queue = rows(6, 5, 1), rows(6, 5, 2), rows(queue_size, 5, 3)
    tau = 0.07
    total = 0.0
    for i, h in enumerate(student.tolist()):
        batch = [math.exp(cosine(h, t) / tau) for t in teacher.tolist()]
        bank = [math.exp(cosine(h, q) / tau) for q in queue.tolist()]
        total -= math.log(batch[i] / (sum(batch) + sum(bank)))
    loss = ckd.contrastive_distillation_loss(student, teacher, queue if queue_size else None, tau)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(total / 6, abs=1e-10)


def test_a_student_equal_to_its_teacher_loses_nothing_as_temperature_falls():
    teacher, queue = rows(8, 16, 1), rows(20, 16, 2)
    losses = []
    for tau in (1, 0.1, 0.01):
        losses.append(ckd.contrastive_distillation_loss(3 * teacher, teacher, queue, tau).item())
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < 1e-10


def test_only_the_direction_of_embeddings_counts():
    a, b, queue = rows(4, 5, 1), rows(4, 5, 2), rows(7, 5, 3)
    loss = ckd.contrastive_distillation_loss(a, b, queue, 0.1).item()
    scaled = ckd.contrastive_distillation_loss(9 * a, b / 9, 2 * queue, 0.1).item()
    assert scaled == pytest.approx(loss, abs=1e-12)


def test_supervised_contrast_is_equation_7():
    anchor, positive, hard_negative = rows(6, 5, 1), rows(6, 5, 2), rows(6, 5, 3)
    tau = 0.05
    total = 0.0
    for i, h in enumerate(anchor.tolist()):
        p = [math.exp(cosine(h, x) / tau) for x in positive.tolist()]
        n = [math.exp(cosine(h, x) / tau) for x in hard_negative.tolist()]
        total -= math.log(p[i] / (sum(p) + sum(n)))
    loss = ckd.supervised_contrastive_loss(anchor, positive, hard_negative, tau)
    assert loss.item() == pytest.approx(total / 6, abs=1e-10)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: ckd.contrastive_distillation_loss(x, rows(3, 4, 2), rows(5, 4, 3), 0.1),
        lambda x: ckd.contrastive_distillation_loss(x, rows(3, 4, 2), None, 0.1),
        lambda x: ckd.supervised_contrastive_loss(x, 2 * x.flip(1), x.flip(0), 0.1),
    ],
)
def test_gradients(loss):
    assert torch.autograd.gradcheck(loss, rows(3, 4, 1).requires_grad_())


# ---- memory bank


def test_the_bank_holds_the_last_embeddings_whatever_the_batches():
    random = np.random.default_rng(0)
    bank = ckd.MemoryBank(13, 2)
    past = []
    assert bank.embeddings() is None
    for size in [*random.integers(1, 13, 40), 13, 14, 40, 3]:
        batch = torch.arange(len(past), len(past) + size, dtype=torch.float32)
        bank.enqueue(torch.stack([batch, -batch], 1))
        past += batch.tolist()
        held = bank.embeddings()
        assert sorted(held[:, 0].tolist()) == past[-13:]
        assert torch.equal(held[:, 0], -held[:, 1])


def test_the_newest_embedding_stands_where_the_oldest_stood():
    bank = ckd.MemoryBank(5, 1)
    bank.enqueue(torch.arange(7.0)[:, None])
    oldest = bank.embeddings()[:, 0].argmin()
    bank.enqueue(torch.tensor([[-7.0]]))
    assert bank.embeddings()[oldest, 0] == -7
    bank.clear()
    assert bank.embeddings() is None


def test_a_bank_of_size_0_stays_empty():
    bank = ckd.MemoryBank(0, 3)
    bank.enqueue(torch.ones(4, 3))
    assert bank.embeddings() is None


def test_the_bank_is_saved_and_restored_as_buffers():
    bank, other = ckd.MemoryBank(5, 2), ckd.MemoryBank(5, 2)
    bank.enqueue(torch.randn(7, 2))
    other.load_state_dict(bank.state_dict())
    for each in (bank, other):
        each.enqueue(torch.full((2, 2), 9.0))
    assert torch.equal(bank.embeddings(), other.embeddings())


# ---- student


def test_pooling_equals_loops_and_padding_never_counts():
    states = rows(12, 6, 1).view(3, 4, 6)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    for row, length in enumerate((4, 2, 1)):
        mean = sum(states[row, i] for i in range(length)) / length
        assert (ckd.pool(states, mask, "mean")[row] - mean).abs().max() < 1e-10
        assert torch.equal(ckd.pool(states, mask, "cls")[row], states[row, 0])
    noise = states.masked_fill(mask[..., None] == 0, 1e3)
    assert torch.equal(ckd.pool(noise, mask, "mean"), ckd.pool(states, mask, "mean"))


@pytest.mark.parametrize("name", ["mean", "cls", "pooler", "roberta", "distilbert"])
def test_the_student_is_read_as_its_folder_will_be(models_folder, name):
    """ckd.Student and support.encoder are written apart; what is trained must be what is saved."""
    encoder = load_encoder(models_folder / name).eval()
    student = ckd.Student(encoder, projected_dimension=48).eval()
    batch = common.Tokens(encoder, demo.sentences(6)).batch(np.arange(6))
    assert torch.equal(student(*batch), encoder(*batch))
    assert student.projection(student(*batch)).shape == (6, 48)


def test_without_a_projection_there_is_none(models_folder):
    encoder = load_encoder(models_folder / "bert")
    student = ckd.Student(encoder)
    assert list(student.projection.parameters()) == []


def test_a_learned_temperature_does_not_stick_at_its_floor():
    """The parameter itself is limited, so its gradient is there when the loss asks for more."""
    temperature = ckd.Temperature(1.5 * ckd.LOWEST_TEMPERATURE, learned=True)
    optimizer = torch.optim.Adam(temperature.parameters(), lr=0.1)

    def train(embeddings, teacher, steps):
        temperatures = []
        for _ in range(steps):
            loss = ckd.contrastive_distillation_loss(embeddings, teacher, None, temperature())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            temperature.limit()
            temperatures.append(temperature().item())
        return temperatures

    teacher = 1 + 0.2 * rows(6, 5, 1)  # embeddings that are much alike
    falling = train(teacher, teacher, 40)
    assert falling[-1] == pytest.approx(ckd.LOWEST_TEMPERATURE)
    assert min(falling) == pytest.approx(ckd.LOWEST_TEMPERATURE)
    rising = train(teacher.roll(1, 0), teacher, 40)  # each near to another one's embedding
    assert rising[-1] > 2 * ckd.LOWEST_TEMPERATURE


def test_a_temperature_that_is_not_learned_stays():
    temperature = ckd.Temperature(0.001, learned=False)
    temperature.limit()
    assert temperature() == 0.001
    assert list(temperature.parameters()) == []


# ---- options and schedule


@pytest.fixture
def parse(monkeypatch):
    def call(*options):
        monkeypatch.setattr(sys, "argv", ["ckd.py", *map(str, options)])
        return ckd.parse_args()

    return call


def test_defaults_are_the_papers(parse):
    args = parse("--student", "bert-base-uncased")
    assert (args.epochs, args.batch_size, args.eval_steps, args.patience) == (20, 512, 125, 3)
    assert (args.finetune_epochs, args.finetune_batch_size) == (5, 128)
    assert args.teacher == "princeton-nlp/sup-simcse-roberta-large"
    assert args.train == "ffgcc/NEWS5M"
    assert args.temperature == 0.05
    assert parse("--student", "x", "--temperature", 0.1).temperature == 0.1
    assert args.triplets == "nli_for_simcse.csv"
    assert args.stage == "both"
    assert args.max_length == 64


def test_a_learned_temperature_starts_as_in_the_authors_code(parse):
    assert parse("--student", "x", "--learn-temperature").temperature == pytest.approx(
        0.368, abs=1e-3
    )
    assert parse("--student", "x", "--learn-temperature").finetune_temperature == 1 / 20


def test_the_learning_rate_rises_for_a_tenth_of_an_epoch_and_falls_as_a_cosine():
    """Steps of 3 epochs of 40: 4 up, then half a cosine down."""
    rates = [ckd.warmup_cosine(Step(number, 120, 40, [])) for number in range(1, 121)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[61] == pytest.approx(0.5)
    assert rates[-1] == pytest.approx(0, abs=1e-9)
    assert all(a > b for a, b in zip(rates[3:], rates[4:]))
    # An epoch of less than ten steps has no warm-up.
    assert ckd.warmup_cosine(Step(1, 8, 4, [])) == 1


@pytest.mark.parametrize(
    "millions, lr, finetune_lr", [(110, 2e-4, 5e-5), (52, 3e-4, 1e-5), (14, 3e-4, 5e-5)]
)
def test_learning_rates_depend_on_the_size_of_the_student(parse, millions, lr, finetune_lr):
    encoder = torch.nn.ParameterList([torch.empty(millions * 1_000_000, device="meta")])
    args = parse("--student", "x")
    ckd.choose_learning_rates(args, encoder)
    assert (args.lr, args.finetune_lr) == (lr, finetune_lr)
    args = parse("--student", "x", "--lr", 1, "--finetune-lr", 2)
    ckd.choose_learning_rates(args, encoder)
    assert (args.lr, args.finetune_lr) == (1, 2)


def test_the_memory_bank_is_no_larger_than_what_an_epoch_fills(parse):
    for sentences, expected in ((1_000_000, ckd.QUEUE_SIZE), (3000, 2488), (100, 0)):
        args = parse("--student", "x")
        ckd.choose_queue_size(args, sentences)
        assert args.queue_size == expected


# ---- runs


def options(models_folder, files, output, teacher="mean", **more):
    """The words of a small run; more: student_layers="0,2" for --student-layers 0,2."""
    defaults = {
        "--teacher": models_folder / teacher,
        "--train": files / "sentences.txt",
        "--triplets": files / "triplets.csv",
        "--dev": files / "dev.tsv",
        "--output": output,
        "--device": "cpu",
        **TINY,
    }
    given = {"--" + name.replace("_", "-"): value for name, value in more.items()}
    return words(defaults | given)


def metrics(folder):
    """The lines of metrics.jsonl without speed and memory, which are others in every run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    varying = ("sentences_per_second", "peak_memory_mb")
    return [{key: value for key, value in line.items() if key not in varying} for line in lines]


def weights(folder):
    tensors = load_file(folder / "model.safetensors")
    return {name: value.numpy().tobytes() for name, value in tensors.items()}


def check_best_student(folder, output, files, models_folder):
    """`output`, the table of a run, and the card show the score of the student in `folder`."""
    from huggingface_hub import ModelCard

    encoder = load_encoder(folder).eval()
    dev = common.spearman(encoder, {"dev": common.read_scored_pairs(files / "dev.tsv")})["dev"]
    (last,) = [line.split("|") for line in output.splitlines() if "after stage 2" in line]
    assert dev == pytest.approx(float(last[2]), abs=0.006)
    assert dev >= max(line["dev"] for line in metrics(folder) if "dev" in line) - 1e-4
    card = ModelCard.load(folder / "README.md")
    assert card.data.eval_results[0].metric_value == pytest.approx(dev, abs=0.006)
    assert str(models_folder) not in str(card)


def check_folder_is_readable(folder):
    from sentence_transformers import SentenceTransformer

    sentences = demo.sentences(20)
    ours = encode_sentences(load_encoder(folder).eval(), sentences)
    theirs = SentenceTransformer(str(folder), device="cpu").encode(sentences)
    assert np.abs(theirs - ours).max() < 1e-5
    _, report = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "teacher, more",
    [
        ("wide", dict(student="bert")),
        ("mean", dict(student_layers="1", projection=True, learn_temperature=True)),
        slow("mean", dict(student_layers="0,2")),
        slow("wide", dict(student_layers="2", temperature=0.005)),
        slow("wide", dict(student="pooler")),
        slow("cls", dict(student="distilbert", queue_size=0)),
        slow("roberta", dict(student="roberta", student_layers="0,3", pooling="cls", dropout=0)),
    ],
)
def test_a_run_leaves_the_best_student(call_main, models_folder, files, tmp_path, teacher, more):
    if "student" in more:
        more = more | dict(student=models_folder / more["student"])
    out = tmp_path / "out"
    output = call_main(ckd, *options(models_folder, files, out, teacher, **more))
    lines = metrics(out)
    assert {line["stage"] for line in lines} == {"distill", "finetune"}
    assert all(math.isfinite(line["loss"]) for line in lines if line["step"] > 0)
    assert [line["step"] for line in lines if line["stage"] == "distill"] == [0, 4, 8, 12, 16, 20]
    assert [line["step"] for line in lines if line["stage"] == "finetune"] == [0, 4]
    check_best_student(out, output, files, models_folder)
    check_folder_is_readable(out)
    assert json.loads((out / "args.json").read_text())["epochs"] == 2


def test_a_teacher_may_read_several_layers_and_a_student_may_not(
    call_main, fails, models_folder, files, tmp_path
):
    layers = tmp_path / "layers"
    load_encoder(models_folder / "bert", LayerPooling((1, 3, 4), "concat")).save(layers)
    base = partial(options, models_folder, files, tmp_path / "out", layers)
    line = fails(ckd, *base(student_layers="0,1,2,3"))
    assert "a student with pooling LayerPooling" in line
    assert not (tmp_path / "out").exists()
    more = dict(student=models_folder / "bert", stage="distill", max_steps=4)
    call_main(ckd, *base(**more))
    check_folder_is_readable(tmp_path / "out")


def test_sentences_of_triplets_train_stage_1(call_main, models_folder, files, tmp_path):
    more = dict(student_layers="0", stage="distill", train=files / "triplets.csv", epochs=1)
    call_main(ckd, *options(models_folder, files, tmp_path / "out", **more))
    rows = common.read_triplets(files / "triplets.csv")
    distinct = {text for row in rows for text in row}
    epoch_steps = math.ceil(len(distinct) / TINY["--batch-size"])
    assert metrics(tmp_path / "out")[-1]["step"] == epoch_steps


def test_stage_2_alone_needs_no_teacher(call_main, models_folder, files, tmp_path):
    more = dict(student=models_folder / "bert", stage="finetune")
    call_main(ckd, *options(models_folder, files, tmp_path / "out", "nowhere", **more))
    assert {line["stage"] for line in metrics(tmp_path / "out")} == {"finetune"}


@pytest.mark.slow
def test_odd_but_good_data_trains(call_main, models_folder, files, tmp_path):
    lines = [
        "It's 'quoted' \"twice\"",
        "tab\tinside",
        "emoji \U0001f600 \u4e2d\u6587",
        "a boy " * 5000,
        "a\u2028b",
    ]
    (tmp_path / "odd.txt").write_text("\n".join(lines * 10) + "\n", "utf-8")
    more = dict(student_layers="0,2", train=tmp_path / "odd.txt")
    call_main(ckd, *options(models_folder, files, tmp_path / "out", **more))
    assert metrics(tmp_path / "out")[-1]["stage"] == "finetune"


def test_a_loss_that_becomes_nan_stops_the_run_and_keeps_the_best_student(
    fails, models_folder, files, tmp_path
):
    out = tmp_path / "out"
    more = dict(student_layers="0,2", stage="distill", lr=1e38)
    line = fails(ckd, *options(models_folder, files, out, **more))
    assert line.startswith("error: step ")
    assert "of stage distill: the loss is nan" in line
    assert "keeps its best student" in line
    for file in ("model.safetensors", "checkpoint/state.safetensors"):
        tensors = load_file(out / file)
        assert tensors
        assert all(torch.isfinite(value).all() for value in tensors.values())


@pytest.mark.slow
def test_a_dozen_steps_bring_the_real_student_five_points_nearer(run, tmp_path):
    """all-MiniLM-L6-v2 into its layers 1,3,5, on the demo's sentences.

    Both the score on the demo's test pairs and the embeddings of other sentences.
    """
    out = tmp_path / "out"
    given = {"--stage": "distill", "--max-steps": 12, "--output": out}
    process = run("ckd.py", "--demo", *words(given), OMP_NUM_THREADS="2")
    assert process.returncode == 0, process.stderr[-2000:]
    table = {}
    for line in process.stdout.splitlines():
        if line.startswith("| student"):
            _, name, _, test, *_ = line.split("|")
            table[name.strip()] = float(test)
    assert table["student after stage 1"] > table["student before"] + 5
    sentences = demo.sentences(10_100)[10_000:]
    teacher = encode_sentences(load_encoder(common.MINILM).eval(), sentences)
    before = encode_sentences(load_encoder(common.MINILM, layers="1,3,5").eval(), sentences)
    after = encode_sentences(load_encoder(out).eval(), sentences)
    assert (teacher * after).sum(1).mean() > (teacher * before).sum(1).mean() + 0.1


# ---- resuming

RESUMED = dict(
    student_layers="0,2",
    queue_size=100,
    epochs=20,
    patience=20,
    finetune_epochs=4,
    eval_steps=3,
)


class Killed(BaseException):
    """Ends a run in this process as SIGKILL does: nothing catches it."""


def test_a_killed_run_has_the_same_memory_bank_and_replays_nothing(
    call_main, models_folder, files, tmp_path, monkeypatch
):
    """Killed in the middle of an epoch, which the bank's content depends on."""
    banks, enqueued = [], []
    kill_at = None

    class WatchedBank(ckd.MemoryBank):
        def __init__(self, size, dimension):
            super().__init__(size, dimension)
            banks.append(self)

        def enqueue(self, embeddings):
            super().enqueue(embeddings)
            enqueued.append(len(embeddings))
            if len(enqueued) == kill_at:
                raise Killed

    monkeypatch.setattr(ckd, "MemoryBank", WatchedBank)
    more = RESUMED | dict(stage="distill", max_steps=17)  # 10 steps are an epoch
    call_main(ckd, *options(models_folder, files, tmp_path / "whole", **more))
    assert len(enqueued) == 17

    killed = options(models_folder, files, tmp_path / "killed", resume=True, **more)
    enqueued.clear()
    kill_at = 16
    with pytest.raises(Killed):
        call_main(ckd, *killed)
    enqueued.clear()
    kill_at = None
    call_main(ckd, *killed)
    assert len(enqueued) == 2  # steps 16 and 17; the checkpoint is that of step 15
    whole, _, resumed = banks
    assert int(whole.enqueued) == int(resumed.enqueued) > 100  # the ring went round
    assert torch.equal(whole.embeddings(), resumed.embeddings())
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")


# ---- invalid input


def test_invalid_input_prints_one_line_and_exits_with_status_2(
    fails, models_folder, files, tmp_path
):
    out = tmp_path / "out"
    texts = {
        "empty.txt": b"",
        "single.txt": b"a boy\n",
        "blank.txt": b"\n \n",
        "latin.txt": b"caf\xe9\n",
        "two.csv": b"sent0,sent1,hard_neg\na,b\n",
        "other.csv": b"premise,hypothesis,label\na,b,c\n",
        "word.tsv": b"a\tb\t1\na\tb\tgood\n",
        "nan.tsv": b"a\tb\t1\na\tb\tnan\n",
        "far.tsv": b"a\tb\t1\na\tb\t7\n",
    }
    for name, data in texts.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "noweights").mkdir()
    for more, expected in (
        (dict(train=tmp_path / "none.txt"), "no such file"),
        (dict(train=tmp_path / "empty.txt"), "the file is empty"),
        (dict(train=tmp_path / "blank.txt"), "every line is blank"),
        (dict(train=tmp_path / "latin.txt"), "latin.txt:1: byte 4"),
        (dict(train=tmp_path / "other.csv"), "other.csv:1: 'premise,hypothesis,label'"),
        (dict(triplets=tmp_path / "two.csv"), "two.csv:2"),
        (dict(dev=tmp_path / "word.tsv"), "word.tsv:2: score 'good' is not a number from 0 to 5"),
        (dict(dev=tmp_path / "nan.tsv"), "nan.tsv:2: score 'nan'"),
        (dict(dev=tmp_path / "far.tsv"), "far.tsv:2: score '7'"),
        (dict(student_layers="0,9"), "layers 0,9"),
        (dict(teacher=tmp_path / "noweights"), "expected a complete model and its tokenizer"),
        (
            dict(queue_size=300),
            "--queue-size 300: 300 sentences without a batch fill 268 in an epoch",
        ),
        (dict(train=tmp_path / "single.txt"), "1 text to train on, expected 2 or more"),
        (dict(batch_size=1, queue_size=0), "--batch-size 1: expected 2 or more"),
        (dict(queue_size=-1), "argument --queue-size: '-1' is not a whole number, 0 or more"),
        (dict(temperature=0), "argument --temperature: '0' is not a number above 0"),
        (dict(finetune_temperature="nan"), "argument --finetune-temperature: 'nan'"),
        (dict(lr=0), "argument --lr: '0' is not a number above 0 (--help lists the options)"),
        (dict(batch_size="many"), "argument --batch-size: 'many'"),
        (dict(finetune_epochs=0), "argument --finetune-epochs: '0'"),
        (dict(dropout=-0.1), "argument --dropout: '-0.1'"),
        (dict(device="gpu"), "--device gpu"),
        (dict(stage="x"), "--stage"),
    ):
        base = options(models_folder, files, out, **(dict(student_layers="0,2") | more))
        if "teacher" in more:
            base += ["--teacher", str(more["teacher"])]
        line = fails(ckd, *base)
        assert expected in line, line
        assert not out.exists(), line


def test_dropout_leaves_something_of_a_sentence(fails, models_folder, files, tmp_path):
    base = options(models_folder, files, tmp_path / "out", student_layers="0,2", dropout=1)
    assert "argument --dropout: '1' is not" in fails(ckd, *base)


def test_objective_says_where_it_went(fails, tmp_path):
    for words in (("--objective", "kd"), ("--objective=pkd",), ("--demo", "--objective", "ckd")):
        line = fails(ckd, *words, "--output", tmp_path / "out")
        assert "--objective is not an option of this script any longer" in line
        assert "baselines.py --method kd" in line


def test_no_student_is_one_line(fails, models_folder, files, tmp_path):
    line = fails(ckd, *options(models_folder, files, tmp_path / "out"))
    assert "give --student, or --student-layers" in line


def test_a_run_in_the_way_is_kept(call_main, fails, models_folder, files, tmp_path):
    base = options(
        models_folder,
        files,
        tmp_path / "out",
        student_layers="0,2",
        stage="distill",
        max_steps=4,
    )
    call_main(ckd, *base)
    before = weights(tmp_path / "out")
    assert "already contains a run; use --resume" in fails(ckd, *base)
    assert "--lr 0.5: the run to resume" in fails(ckd, *base, "--resume", "--lr", 0.5)
    assert "no such file" in fails(ckd, *base, "--overwrite", "--train", tmp_path / "none")
    assert weights(tmp_path / "out") == before
    call_main(ckd, *base, "--overwrite", "--seed", 5)
    assert json.loads((tmp_path / "out" / "args.json").read_text())["seed"] == 5
    assert weights(tmp_path / "out") != before


@pytest.mark.slow
def test_a_script_of_its_own_process(run, models_folder, files, tmp_path):
    """What the tests above call in this process: status, one error line, no traceback."""
    process = run("ckd.py", *options(models_folder, files, tmp_path / "out", lr=0))
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.startswith("error: argument --lr")
    assert len(process.stderr.splitlines()) == 1
