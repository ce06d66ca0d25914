"""common.py: files in, tokens, batches, sentences to vectors, their cache, scores."""

import copy
import gzip
from functools import partial

import numpy as np
import pytest
import torch
from conftest import cosine, demo_lines, demo_sentences
from scipy.stats import rankdata

import ckd
import common
from common import UserError


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


@pytest.fixture(scope="module")
def bert(models_folder):
    return common.load_encoder(models_folder / "bert").eval()


ODD = ["It's 'quoted'", "a\ttab", "\U0001f600", "a\u2028separator"]
HEADER = "sent0,sent1,hard_neg\n"
TRIPLETS = HEADER + '"a, b","say ""hi""",it\'s\nx,"two\nlines",y\n'
READ = [  # reader, content, what is read
    ("sentences", "\ufeff" + "\n \n".join([*ODD, ODD[0]]) + "\r\n", [*ODD, ODD[0]]),
    ("triplets", TRIPLETS, [["a, b", 'say "hi"', "it's"], ["x", "two\nlines", "y"]]),
    ("scored_pairs", "a b\tc\tscore\nd\t e f\t4.5\n", [("d", "e f", 4.5)]),
]


@pytest.mark.parametrize("name", ["a.txt", "a.gz"])
@pytest.mark.parametrize("reader, text, expected", READ, ids=[row[0] for row in READ])
def test_files_are_read(tmp_path, reader, text, expected, name):
    data = gzip.compress(text.encode()) if name == "a.gz" else text
    assert getattr(common, f"read_{reader}")(write(tmp_path / name, data)) == expected


def test_sentevals_folder_is_read(tmp_path):
    """A year has all of its subsets together, and a score or none for each pair."""
    sts = tmp_path / "data/downstream/STS"
    for split in ("dev", "test"):
        write(sts / f"STSBenchmark/sts-{split}.csv", f"g\tf\ty\t1\t4.5\tA {split}.\tIt's\tx\n")
    for year in range(12, 17):
        folder = sts / f"STS{year}-en-test"
        write(folder / "STS.input.a.b.txt", "a\tb\nc\td\ne\tf\tcolumns beyond two\n")
        write(folder / "STS.gs.a.b.txt", "1\n\n3\n")
        write(folder / "STS.input.c.txt", f"g\t{year}\n")
        write(folder / "STS.gs.c.txt", "5\n")
        write(folder / "STS.gs.ALL.txt", "1\n")  # SentEval has no such sentences
    rows = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tX\n1\ta b\tc\t1.5\tNEUTRAL\n"
    write(sts.parent / "SICK/SICK_test_annotated.txt", rows)
    sets = common.read_sts(tmp_path)
    assert list(sets) == ["STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R"]
    assert sets["STS14"] == [("a", "b", 1.0), ("e", "f", 3.0), ("g", "14", 5.0)]
    assert sets["STS-B"] == [("A test.", "It's", 4.5)]
    assert sets["SICK-R"] == [("a b", "c", 1.5)]


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
    assert common.Tokens(bert, texts, 9999).lengths[40] == bert.max_length == 128


@pytest.mark.parametrize("grouped", [False, True])
def test_an_epoch_visits_every_row_once_in_an_order_of_seed_and_epoch(grouped):
    lengths = np.random.default_rng(0).integers(3, 60, 1000)
    steps, rows = zip(*common.batches(lengths, 16, 0, grouped, 0, 126))
    assert steps == tuple(range(1, 127))
    order = np.concatenate(rows).tolist()
    assert sorted(order[:1000]) == sorted(order[1000:]) == list(range(1000))
    assert order[:1000] != order[1000:]
    continued = list(common.batches(lengths, 16, 0, grouped, 70, 126))
    assert [step for step, _ in continued] == list(steps[70:])
    assert all(map(np.array_equal, [part for _, part in continued], rows[70:]))
    parts = [lengths[part] for part in rows]
    padding = sum(part.max() * len(part) for part in parts) / sum(map(sum, parts))
    assert padding < 1.15 if grouped else padding > 1.6
    whole = [part for _, part in common.batches(lengths, 16, 0, grouped, 0, 124, drop_last=True)]
    assert set(map(len, whole)) == {16}
    assert len(set(np.concatenate(whole[:62]).tolist())) == 992


def test_encoding_many_gives_each_text_its_own_vector_without_dropout(bert):
    texts = demo_sentences(30) + ["word " * 300]
    bert.train()
    vectors = common.encode(ckd.embed, bert, texts)
    assert bert.training  # it stays in the mode that it was in
    assert (vectors.dtype, vectors.shape) == (np.float32, (31, 32))
    for text, vector in zip(texts, vectors):
        (alone,) = common.encode(ckd.embed, bert.eval(), [text])
        assert np.abs(alone - vector).max() < 1e-5
    some = common.encode(ckd.embed, bert, common.Tokens(bert, texts), rows=np.array([30, 2]))
    assert np.abs(some - vectors[[30, 2]]).max() < 1e-5
    rounded = common.encode(ckd.embed, bert, texts, precision="bf16")
    assert not np.array_equal(rounded, vectors)
    assert min(map(cosine, rounded.tolist(), vectors.tolist())) > 0.999


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "CACHE", tmp_path / "cache")
    return lambda: sorted(common.CACHE.glob("*.npy"))


def test_teacher_embeddings_are_computed_once_and_never_half(bert, cache, monkeypatch):
    texts, calls = demo_sentences(100), []
    expected = common.encode(ckd.embed, bert, texts)
    monkeypatch.setattr(common, "CHUNK", 30)

    def counted(*batch):
        calls.append(batch)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return ckd.embed(*batch)

    with pytest.raises(KeyboardInterrupt):
        common.teacher_embeddings(counted, bert, texts)
    assert cache() == []
    found = common.teacher_embeddings(counted, bert, texts)
    assert isinstance(found, np.memmap)
    assert np.abs(found - expected).max() < 1e-5
    del calls[:]
    assert np.array_equal(common.teacher_embeddings(counted, bert, texts), found)
    assert calls == []


def changed_embed(encoder, input_ids, attention_mask):
    return 2 * ckd.embed(encoder, input_ids, attention_mask)


CHANGES = {  # of a teacher, after each of which its embeddings are computed anew
    "normalization": lambda teacher: setattr(teacher, "normalize", True),
    "prompt": lambda teacher: setattr(teacher, "prompt", "a "),
    "pooling": lambda teacher: setattr(teacher, "pooling", "mean"),
    "length": lambda teacher: setattr(teacher, "max_length", 5),
    "activation": lambda teacher: setattr(teacher.heads[0], "1", torch.nn.ReLU()),
    "weight": lambda teacher: teacher.heads[0][0].bias.data.add_(1),
    "heads of attention": lambda teacher: setattr(teacher.model.config, "num_attention_heads", 2),
    "rope_theta": lambda teacher: setattr(teacher.model.config, "rope_theta", 5.0),
}


def test_teacher_embeddings_follow_all_that_they_depend_on(models_folder, cache):
    """A file that was computed with other settings must never be read."""
    teacher, texts = common.load_encoder(models_folder / "pooler").eval(), demo_sentences(20)
    embeddings = partial(common.teacher_embeddings, texts=texts)
    first = embeddings(ckd.embed, teacher)
    assert np.array_equal(embeddings(changed_embed, teacher), 2 * first)
    for further in (dict(max_length=4), dict(precision="bf16"), dict(key="other")):
        embeddings(ckd.embed, teacher, **further)
    assert len(cache()) == 5
    for number, change in enumerate(CHANGES.values(), 6):
        other = copy.deepcopy(teacher)
        change(other)
        found = embeddings(ckd.embed, other)
        assert np.array_equal(found, common.encode(ckd.embed, other, texts))
        assert len(cache()) == number
    assert np.array_equal(embeddings(ckd.embed, teacher), first)


def test_spearman_is_the_correlation_of_ranks(bert):
    lines = [line.split("\t") for line in demo_lines("dev.tsv", 50)]
    pairs = [(first, second, float(score)) for first, second, score in lines]
    encode = partial(common.encode, ckd.embed, bert)
    sets = dict(one=pairs[:30], two=pairs[20:])
    scores = common.spearman(ckd.embed, bert, sets)
    for name, part in sets.items():
        cosines = [cosine(*encode(row[:2]).tolist()) for row in part]
        ranks = rankdata(cosines), rankdata([score for *_, score in part])
        assert scores[name] == pytest.approx(100 * np.corrcoef(*ranks)[0, 1], abs=1e-6)
    assert scores["avg"] == pytest.approx((scores["one"] + scores["two"]) / 2)
    with pytest.raises(UserError, match="mine: "):
        common.spearman(ckd.embed, bert, {"mine": [("a", "a", 1), ("a", "a", 2)]})
