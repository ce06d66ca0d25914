"""benchmark.py: its arithmetic against hand counts, each part with small models."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers

import benchmark
from support.encoder import load_encoder


def test_a_ratio_is_the_median_of_the_rounds_with_the_smallest_and_the_largest():
    comparison = benchmark.Comparison([10.0, 30.0, 40.0], [5.0, 10.0, 40.0], [20.0, 40.0, 80.0])
    assert comparison.row() == {
        "ours": 30,
        "theirs": 10,
        "ratio": 2,
        "smallest": 1,
        "largest": 3,
        "% of the limit": 50,
    }
    assert "% of the limit" not in comparison._replace(limit=[]).row()


def test_the_matrix_products_are_those_of_the_layers(models_folder):
    """4 layers of 32 dimensions, 64 inside, 4 heads of 8; 3 rows of 5 tokens."""
    model = load_encoder(models_folder / "bert").model
    shapes = benchmark.product_shapes(model, rows=3, length=5)
    linear = 4 * 32 * 32 + 2 * 32 * 64  # query, key, value, output; up and down
    attention = 2 * 5 * 5 * 8 * 4 * 3  # scores and means, of each head of each row
    assert benchmark.flops(shapes) == 4 * 2 * (3 * 5 * linear + attention)


def test_products_of_the_backward_pass_have_its_shapes():
    """Twice those of the forward pass, and nothing that does not fit."""
    calls = []

    class Counted(torch.Tensor):
        def __matmul__(self, other):
            calls.append((*self.shape, other.shape[-1]))
            return super().__matmul__(other)

    ones = torch.ones
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "ones", lambda *a, **k: ones(*a, **k).as_subclass(Counted))
        benchmark.multiply([(2, 3, 4, 5)], True, "cpu")
    assert calls == [(2, 3, 4, 5), (2, 3, 5, 4), (2, 4, 3, 5)]


@pytest.mark.slow
def test_training_encoding_and_search_are_compared(call_main, models_folder, files, tmp_path):
    pytest.importorskip("faiss", reason="no faiss-cpu: benchmark.py compares its search with it")
    pytest.importorskip("datasets", reason="no datasets: sentence-transformers' trainer needs it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "SEARCHED", 2000)
        options = (
            "--teacher",
            models_folder / "mean",
            "--student-layers",
            "0,2",
            "--device",
            "cpu",
        )
        data = ("--train", files / "sentences.txt", "--sentences", 64, "--rounds", 1)
        parts = ("--only", "train,encode,search", "--json", tmp_path / "out.json")
        printed = call_main(benchmark, *options, *data, *parts)
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 2 + 3 + 1
    report = json.loads((tmp_path / "out.json").read_text())
    for name, rounds in report["rounds"].items():
        assert len(rounds["ours"]) == len(rounds["theirs"]) == 1
        assert all(value > 0 for value in rounds["ours"] + rounds["theirs"]), name
        assert len(rounds["limit"]) == (1 if name.startswith("training") else 0)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_their_trainer_has_the_dropout_of_ours(models_folder, monkeypatch, tmp_path, dropout):
    pytest.importorskip("datasets", reason="no datasets: sentence-transformers' trainer needs it")
    rates = []

    class Trainer:
        def __init__(self, model, arguments, data, loss):
            dropouts = [m for m in model.modules() if isinstance(m, torch.nn.Dropout)]
            rates.extend(module.p for module in dropouts)

        def remove_callback(self, callback):
            pass

        def train(self):
            return SimpleNamespace(metrics={"train_runtime": 2.0})

    monkeypatch.setattr("sentence_transformers.SentenceTransformerTrainer", Trainer)
    args = SimpleNamespace(
        teacher=models_folder / "mean", student_layers="0,2", device="cpu", batch_size=2
    )
    targets = torch.zeros(4, 8).numpy()
    speed = benchmark.their_training(args, ["A dog."] * 4, targets, tmp_path, dropout)
    assert speed == 2.0
    assert len(rates) > 2 and set(rates) == {dropout}


@pytest.mark.slow
def test_growth_has_a_row_a_size_and_a_figure(call_main, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="no matplotlib: the figure needs it")
    monkeypatch.setattr(benchmark, "GROWTH", (100, 200))
    figure, report = tmp_path / "new" / "growth.png", tmp_path / "out.json"
    printed = call_main(benchmark, "--only", "growth", "--figure", figure, "--json", report)
    assert "100 sentences" in printed and "200 sentences" in printed
    assert figure.read_bytes().startswith(b"\x89PNG")
    first, second = json.loads(report.read_text())["growth"].values()
    assert 20 < first["bytes of tokens a sentence"] < 200
    assert min(second.values()) > 0


@pytest.mark.slow
def test_dse_with_a_given_model_and_with_random_weights(
    call_main, monkeypatch, models_folder, tmp_path
):
    """The latter as --random-weights bert-large does, with a small shape. All layers are kept."""
    monkeypatch.setattr(benchmark, "DSE_SENTENCES", 100)
    monkeypatch.setattr(benchmark, "DSE_PAIRS", 50)
    given = ("--only", "dse", "--teacher", models_folder / "bert", "--student-layers", "0,1")
    lines = call_main(benchmark, *given).splitlines()
    assert "extrapolated" in lines[0]
    assert "934.00" in lines[2]
    assert "13594.00" in lines[3]
    assert lines[4].startswith("cross-encoder: 4 layers of 32")
    assert lines[5].startswith("DSE's encoder: 2 layers of 32")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=5, num_attention_heads=4, intermediate_size=64
    )
    config.save_pretrained(tmp_path)
    lines = call_main(benchmark, "--only", "dse", "--random-weights", tmp_path).splitlines()
    assert lines[4].startswith("cross-encoder: 5 layers of 32")
    assert lines[5].startswith("DSE's encoder: 5 layers of 32")
    assert "weights are random" in lines[6]


def test_bert_large_has_the_papers_shape(monkeypatch, tmp_path):
    """24 layers (3.3) of 1,024 (3.4), 335 million parameters. Built without memory for them."""
    built = []

    def build(config):
        built.append(config)
        return transformers.BertModel(transformers.BertConfig(num_hidden_layers=1, hidden_size=12))

    monkeypatch.setattr(transformers.AutoModel, "from_config", build)
    benchmark.save_random_model("bert-large", tmp_path)
    with torch.device("meta"):
        model = transformers.BertModel(built[0])
    assert len(model.encoder.layer) == 24
    assert model.config.hidden_size == 1024
    assert sum(value.numel() for value in model.parameters()) == 335_141_888
    assert model.encoder.layer[0].attention.self.num_attention_heads == 16


@pytest.mark.parametrize(
    "options, expected",
    [
        (("--only", "train,fly"), "--only fly: expected train, encode, search, dse, growth"),
        (("--random-weights", "bert-large"), "--random-weights: expected --only dse with it"),
        (
            ("--only", "dse", "--random-weights", "bert-huge"),
            "--random-weights bert-huge: no such shape, expected bert-large, or a folder with",
        ),
        (("--only", "dse", "--random-weights", "FEW_WORDS"), "of 99, expected 30522 or more"),
        (("--sentences", 10), "--sentences 10: expected a batch, 64"),
        (("--only", "train", "--train", "FEW"), "expected 6400 (--sentences)"),
        (("--rounds", 0), "argument --rounds"),
    ],
)
def test_invalid_options_get_one_line(fails, monkeypatch, tmp_path, options, expected):
    transformers.BertConfig(vocab_size=99).save_pretrained(tmp_path / "shape")
    (tmp_path / "few.txt").write_text("A boy.\nA girl.\n")
    places = {"FEW_WORDS": tmp_path / "shape", "FEW": tmp_path / "few.txt"}
    monkeypatch.setattr(benchmark, "is_installed", lambda name: True)
    assert expected in fails(benchmark, *[places.get(word, word) for word in options])


def test_a_peer_that_is_missing_is_named(fails, monkeypatch):
    monkeypatch.setattr(benchmark, "is_installed", lambda name: False)
    line = fails(benchmark, "--only", "search")
    assert "--only search: expected what it compares with: pip install faiss-cpu" in line
