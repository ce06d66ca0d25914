"""common.py: files, batches and their parts, sentences to vectors, cache, scores."""

import copy
import gzip
import os
import shutil
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import alter, cosine, demo_lines, demo_sentences
from scipy.stats import rankdata

import ckd
import common
import dse
import eval_sts
import ibkd
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
    sets = eval_sts.read_sts(tmp_path)
    assert list(sets) == ["STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R"]
    assert sets["STS14"] == [("a", "b", 1.0), ("e", "f", 3.0), ("g", "14", 5.0)]
    assert sets["STS-B"] == [("A test.", "It's", 4.5)]
    assert sets["SICK-R"] == [("a b", "c", 1.5)]


@pytest.mark.parametrize("pairs", [False, True])
def test_what_reaches_the_model_is_the_tokenizers_batch(bert, pairs):
    """Parts of similar length, padded to their longest, of texts that are cut."""
    texts = demo_sentences(40) + ["word " * 300]
    if pairs:
        texts = list(zip(texts, demo_sentences(41)))
    seen = []

    def embed(encoder, input_ids, attention_mask):
        seen.append((input_ids, attention_mask))
        return input_ids.sum(dim=1, keepdim=True).double()

    common.embed_texts(embed, bert, [texts[i] for i in (7, 40, 3)], 30)
    (ids, mask), *others = seen
    assert not others
    options = dict(padding=True, truncation=True, max_length=30, return_tensors="pt")
    expected = bert.tokenizer([texts[i] for i in (40, 7, 3)], **options)  # by length
    assert torch.equal(ids, expected["input_ids"])
    assert torch.equal(mask, expected["attention_mask"])
    (whole,) = common.tokenize(bert, texts[40:], 9999)
    assert len(whole) == bert.max_length == 128


def test_lengths_are_counted_for_grouping_alone(bert):
    args = SimpleNamespace(group_by_length=False, max_length=9)
    texts, others = demo_sentences(40), demo_sentences(41)[1:]
    assert common.token_lengths(args, bert, texts) is None
    args.group_by_length = True
    counts = [
        [len(bert.tokenizer(text).input_ids[:9]) for text in column] for column in (texts, others)
    ]
    assert common.token_lengths(args, bert, texts).tolist() == counts[0]
    both = [a + b for a, b in zip(*counts)]
    assert common.token_lengths(args, bert, texts, others).tolist() == both


@pytest.mark.parametrize("grouped", [False, True])
def test_an_epoch_visits_every_row_once_in_an_order_of_seed_and_epoch(grouped):
    """In whatever order steps are asked for."""
    lengths = np.random.default_rng(0).integers(3, 60, 1000)
    options = (lengths,) if grouped else ()
    batches = common.Batches(1000, 16, 5, *options)
    rows = [batches[step].tolist() for step in range(126)]
    assert sorted(map(len, rows[: batches.per_epoch])) == [8] + [16] * 62
    epochs = sum(rows[:63], []), sum(rows[63:], [])
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(1000))
    assert epochs[0] != epochs[1]
    anew = common.Batches(1000, 16, 5, *options)
    for step in (70, 3, 62, 125, 0):
        assert anew[step].tolist() == rows[step]
    assert common.Batches(1000, 16, 6, *options)[0].tolist() != rows[0]
    padded = sum(lengths[row].max() * len(row) for row in rows)
    padding = padded / (2 * lengths.sum())
    assert padding < 1.15 if grouped else padding > 1.6


@pytest.mark.parametrize("longest", [4, 60, 5000])
def test_parts_of_similar_length(longest):
    """They are a partition without much padding, and only a single text is ever above the limit."""
    random = np.random.default_rng(1)
    for count in (1, 2, 7, 64, 300):
        lengths = random.integers(3, longest, count)
        parts = common.similar_lengths(lengths, "cpu", 32)
        assert sorted(np.concatenate(parts).tolist()) == list(range(count))
        sizes = [lengths[part].max() * len(part) for part in parts]
        for size, part in zip(sizes, parts):
            assert size <= common.PART_TOKENS["cpu"] or len(part) == 1
        maxima = [lengths[part].max() for part in parts]
        assert maxima == sorted(maxima, reverse=True)
        if count == 300:
            assert sum(sizes) < 1.2 * lengths.sum()


EMBED_BOTH = partial(ibkd.embed, with_input=True)


@pytest.mark.parametrize("embed", [ckd.embed, EMBED_BOTH], ids=["one", "both"])
def test_a_batch_in_parts_is_a_padded_batch(bert, embed):
    """Vectors in the rows' order, and gradients; a row may be there twice."""
    texts = [" ".join(["run fast", *demo_sentences(i % 9)]) for i in range(40)]
    rows = np.random.default_rng(2).permutation(np.arange(40).repeat(2))[:70]
    texts = [texts[row] for row in rows]
    lengths = np.array([len(ids) for ids in common.tokenize(bert, texts)])
    assert len(common.similar_lengths(lengths, "cpu", 32)) > 3
    encoder = copy.deepcopy(bert).double()
    options = dict(padding=True, truncation=True, max_length=128, return_tensors="pt")
    batch = bert.tokenizer(texts, **options)
    found = []
    for output in (
        common.embed_texts(embed, encoder, texts),
        embed(encoder, batch["input_ids"], batch["attention_mask"]),
    ):
        loss = ckd.mse_loss(output, output.detach().flip(0))
        gradients = torch.autograd.grad(loss, encoder.parameters(), allow_unused=True)
        found.append([output, *(gradient for gradient in gradients if gradient is not None)])
    assert len(found[0]) > 60
    for ours, padded in zip(*found, strict=True):
        assert (ours - padded).abs().max() < 1e-6


def test_encoding_many_gives_each_text_its_own_vector_without_dropout(bert):
    texts = demo_sentences(30) + ["word " * 300]
    bert.train()
    vectors = common.encode(ckd.embed, bert, texts)
    assert bert.training  # it stays in the mode that it was in
    assert (vectors.dtype, vectors.shape) == (np.float32, (31, 32))
    for text, vector in zip(texts, vectors):
        (alone,) = common.encode(ckd.embed, bert.eval(), [text])
        assert np.abs(alone - vector).max() < 1e-5
    cut = common.encode(ckd.embed, bert, texts, max_length=5)
    assert np.abs(cut[30] - common.encode(ckd.embed, bert, ["word " * 3])[0]).max() < 1e-5
    rounded = common.encode(ckd.embed, bert, texts, precision="bf16")
    assert not np.array_equal(rounded, vectors)
    assert min(map(cosine, rounded.tolist(), vectors.tolist())) > 0.999


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "CACHE", tmp_path / "cache")
    return lambda: sorted(common.CACHE.glob("*"))


def test_teacher_embeddings_are_computed_once_and_never_half(bert, cache, monkeypatch):
    texts, calls = demo_sentences(100), []
    expected = common.encode(ckd.embed, bert, texts)
    chunks = common.chunks
    monkeypatch.setattr(common, "chunks", lambda texts, size: chunks(texts, 30))

    def counted(*batch):
        calls.append(batch)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return ckd.embed(*batch)

    with pytest.raises(KeyboardInterrupt):
        common.teacher_embeddings(counted, bert, texts)
    assert cache() == []
    found = common.teacher_embeddings(counted, bert, texts)
    assert np.abs(found - expected).max() < 1e-5
    del calls[:]
    assert np.array_equal(common.teacher_embeddings(counted, bert, texts), found)
    assert calls == []


def test_missing_weights_have_the_same_order_in_each_process(models_folder, tmp_path):
    """transformers names them in a set; the name of the file of teacher_embeddings() follows."""
    teacher = common.load_encoder(models_folder / "bert")
    teacher.model.pooler = None
    common.save_encoder(teacher, tmp_path / "bert")
    missing = ["pooler.dense.bias", "pooler.dense.weight"]
    assert common.load_encoder(tmp_path / "bert").missing == missing


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


def test_teacher_embeddings_follow_all_that_they_depend_on(models_folder, cache, tmp_path):
    """A file that was computed with other settings or by another folder must never be read."""
    teacher, texts = common.load_encoder(models_folder / "pooler").eval(), demo_sentences(20)
    embeddings = partial(common.teacher_embeddings, texts=texts)
    first = embeddings(ckd.embed, teacher)
    assert np.array_equal(embeddings(changed_embed, teacher), 2 * first)
    for further in (dict(max_length=4), dict(precision="bf16")):
        embeddings(ckd.embed, teacher, **further)
    assert len(cache()) == 4
    for number, change in enumerate(CHANGES.values(), 5):
        other = copy.deepcopy(teacher)
        change(other)
        other.settings, other.prompts = dict(default_prompt_name="a"), dict(a=other.prompt or "")
        common.save_encoder(other, tmp_path / str(number))
        other = common.load_encoder(tmp_path / str(number))
        other.name = teacher.name
        found = embeddings(ckd.embed, other)
        assert np.array_equal(found, common.encode(ckd.embed, other, texts))
        assert len(cache()) == number
    assert np.array_equal(embeddings(ckd.embed, teacher), first)


def test_the_cache_knows_what_pair_logits_reads_of_the_tokenizer(models_folder, cache, tmp_path):
    """Two teachers that differ in tokenizer_config.json alone: with and without token types."""
    pairs = list(zip(demo_sentences(20), demo_sentences(40)[20:]))
    torch.manual_seed(0)
    teacher = dse.load_cross_encoder(models_folder / "bert", "stsb")
    common.save_encoder(teacher, tmp_path / "types")
    shutil.copytree(tmp_path / "types", tmp_path / "no-types")
    for name, inputs in (("types", ["token_type_ids"]), ("no-types", [])):
        names = ["input_ids", *inputs, "attention_mask"]
        alter(tmp_path / name / "tokenizer_config.json", dict(model_input_names=names))
    found = []
    for name in ("types", "no-types"):
        teacher = dse.load_cross_encoder(tmp_path / name, "stsb")
        teacher.name = "the same"
        found.append(common.teacher_embeddings(dse.pair_logits, teacher, pairs))
        assert np.array_equal(found[-1], common.encode(dse.pair_logits, teacher, pairs))
        assert len(cache()) == len(found)
    assert not np.allclose(*found)


NO_SENTENCES = {
    "objects": ['{ "text" : "a boy" }', '{ "text" : "a girl" }'],
    "an array": ["[", '  "a boy runs",', '  "a girl"', "]"],
    "indented": ["[", "  {", '    "text": "a boy"', "  }", "]"],
    "quoted": ['"a boy"', '"a girl runs",'],
    "a table": ["a boy\ta lad\t4", "a girl\ta cook\t1"],
    "a pointer": ["version https://git-lfs.github.com/spec/v1", "oid sha256:0", "size 1"],
}


@pytest.mark.parametrize("lines", NO_SENTENCES.values(), ids=NO_SENTENCES)
def test_what_is_no_file_of_sentences_is_refused(tmp_path, lines):
    (tmp_path / "texts.txt").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match="texts.txt: .* lines are no sentences, such as"):
        common.read_sentences(tmp_path / "texts.txt")


def test_sentences_of_any_look_are_sentences(tmp_path):
    texts = ["<html> is a tag.", '"Hello," he said.', "[sic] a boy", "a boy"]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    assert common.read_sentences(tmp_path / "texts.txt") == texts


@pytest.mark.parametrize("reader", ["sentences", "triplets", "scored_pairs"])
def test_a_pipe_is_read_whole(tmp_path, reader):
    """It can be opened once, and has no end to return from."""
    lines = [f"a boy {i}" for i in range(20_000)]
    if reader == "triplets":
        lines = ["sent0,sent1,hard_neg"] + [f"{line},b,c" for line in lines]
    elif reader == "scored_pairs":
        lines = [f"{line}\tb\t1" for line in lines]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("\n".join(lines) + "\n",))
    writer.start()
    found = getattr(common, f"read_{reader}")(pipe)
    writer.join()
    assert len(found) == 20_000


def test_lines_may_end_as_on_windows(tmp_path):
    (tmp_path / "texts.txt").write_bytes("one\r\ntwo\r\nthré\n".encode("utf-8-sig"))
    assert common.read_sentences(tmp_path / "texts.txt") == ["one", "two", "thré"]


def test_spearman_is_the_correlation_of_ranks(bert):
    lines = [line.split("\t") for line in demo_lines("dev.tsv", 50)]
    pairs = [(first, second, float(score)) for first, second, score in lines]
    encode = partial(common.encode, ckd.embed, bert)
    for part in (pairs[:30], pairs[20:]):
        cosines = [cosine(*encode(row[:2]).tolist()) for row in part]
        ranks = rankdata(cosines), rankdata([score for *_, score in part])
        expected = 100 * np.corrcoef(*ranks)[0, 1]
        assert common.spearman(ckd.embed, bert, part) == pytest.approx(expected, abs=1e-6)
    with pytest.raises(UserError, match="equal"):
        common.spearman(ckd.embed, bert, [("a", "a", 1), ("a", "a", 2)])
