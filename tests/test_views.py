"""support/views.py: ConGen's second views, their rates, WordNet and the masked language model."""

import argparse
import os

import numpy as np
import pytest
import torch
import transformers

from common import DataError
from support import demo, views

WORD_CHANGES = {
    **views.WORD_CHANGES,
    "synonym": lambda words, random: views.replace_synonyms(words, random, {"abc": ["x", "y"]}),
}


def write_wordnet(folder):
    """A small database of WordNet 3.

    big and large are one adjective synset; "big" is also a noun that no text has. "hound" is in the
    second sense of "dog", "domestic dog" in the first.
    """
    folder.mkdir()
    files = {
        "data.noun": [
            "00000001 05 n 02 dog 0 domestic_dog 0 000 | a pet",
            "00000002 05 n 02 dog 1 hound 0 000 | a hunter",
        ],
        "index.noun": [
            "big n 1 0 1 0 00000002",
            "dog n 2 2 @ ~ 2 1 00000001 00000002",
            "domestic_dog n 1 0 1 0 00000001",
            "hound n 1 0 1 1 00000002",
        ],
        "data.adj": ["00000001 00 a 02 big 0 large(p) 0 000 | of size"],
        "index.adj": ["big a 1 0 1 1 00000001", "large a 1 0 1 1 00000001"],
        "data.verb": ["00000001 30 v 01 run 0 000 00 | move"],
        "index.verb": ["run v 1 0 1 1 00000001"],
        "data.adv": ["00000001 02 r 01 soon 0 000 | in time"],
        "index.adv": ["soon r 1 0 1 1 00000001"],
    }
    licence = "  1 This software and database is being provided to you"
    for name, lines in files.items():
        text = "".join(f"{line}  \n" for line in [licence, *lines])
        (folder / name).write_text(text)
    return folder


def write_masked_lm(folder, bert):
    """A BertForMaskedLM with random weights, of the size and with the tokenizer of `bert`."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(bert)
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(folder)
    return folder


def load(*options, train="demo"):
    """What load_views makes of these options."""
    parser = argparse.ArgumentParser()
    views.add_view_options(parser)
    parser.set_defaults(train=train, device="cpu")
    return views.load_views(parser.parse_args([str(option) for option in options]))


# ---- words


def test_word_deletion_deletes_a_tenth_of_the_words():
    sentence = " ".join(f"word{i}" for i in range(40))
    rng = np.random.default_rng(0)
    texts = views.change_words([sentence] * 500, rng, views.delete_words)
    kept = [len(text.split()) for text in texts]
    assert 35.7 < sum(kept) / 500 < 36.3
    assert len(set(kept)) > 5


def test_delete_one_deletes_any_one_word():
    words = [f"word{i}" for i in range(40)]
    rng = np.random.default_rng(0)
    results = [views.delete_one(words, rng) for _ in range(500)]
    gone = set()
    for result in results:
        (word,) = set(words) - set(result)
        gone.add(word)
        assert result == [other for other in words if other != word]
    assert gone == set(words)


def test_crop_keeps_a_span_of_nine_tenths():
    words = [f"word{i}" for i in range(40)]
    rng = np.random.default_rng(0)
    crops = {" ".join(views.crop(words, rng)) for _ in range(200)}
    assert crops == {" ".join(words[start : start + 36]) for start in range(5)}


def test_a_tenth_of_the_words_is_replaced_by_synonyms():
    words = [f"word{i}" for i in range(40)]
    rng = np.random.default_rng(0)
    synonyms = {"word3": ["x"], "word7": ["y", "z"], "word8": []}
    changed = {" ".join(views.replace_synonyms(words, rng, synonyms)) for _ in range(50)}
    once = " ".join(words).replace("word3 ", "x ")
    assert changed == {once.replace("word7 ", f"{other} ") for other in "yz"}

    many = {word: ["x"] for word in words}
    for _ in range(20):
        assert views.replace_synonyms(words, rng, many).count("x") == 4


def test_short_words_have_no_synonyms_and_case_does_not_matter():
    rng = np.random.default_rng(0)
    synonyms = {"boy": ["male child"], "is": ["be"]}
    words = ["Boy", "is", "running"]
    assert views.replace_synonyms(words, rng, synonyms) == ["male child", "is", "running"]
    assert words[0] == "Boy"


@pytest.mark.parametrize("how", sorted(WORD_CHANGES))
def test_a_view_without_words_is_the_sentence_itself(how):
    rng = np.random.default_rng(0)
    texts = views.change_words(["Stop!"] * 50, rng, WORD_CHANGES[how])
    assert set(texts) == {"Stop!"}


# ---- given and made views


@pytest.mark.parametrize("how", ["word-deletion", "delete-one", "crop", "synonym"])
def test_made_views_depend_on_the_seed_and_the_rows_alone(tmp_path, how):
    sentences = tmp_path / "sentences.txt"
    sentences.write_text("a big dog can run\nthe hound is large\nlarge dogs run soon\n")
    wordnet = write_wordnet(tmp_path / "wordnet")
    made = load("--augment", how, "--wordnet", wordnet, train=str(sentences))
    assert made.sentences[1] == "the hound is large"
    rows = np.array([2, 0, 1])
    steps = [made.second(rows, [7, step]) for step in range(30)]
    assert steps == [made.second(rows, [7, step]) for step in range(30)]
    assert len({tuple(texts) for texts in steps}) > 1
    for texts in steps:
        originals = [made.sentences[row] for row in rows]
        assert all(text != "" for text in texts)
        if how == "delete-one":
            lengths = [len(text.split()) for text in texts]
            assert lengths == [len(original.split()) - 1 for original in originals]


def test_given_views_are_the_second_column(tmp_path):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("a boy\tein Junge\na girl\tein Mädchen\n", "utf-8")
    given = load("--pairs", pairs, "--augment", "mlm", "--masked-lm", "none")
    assert given.sentences == ["a boy", "a girl"]
    assert given.second(np.array([1, 0, 1]), [0, 1]) == ["ein Mädchen", "ein Junge", "ein Mädchen"]


def test_without_pairs_the_first_views_are_the_training_sentences():
    assert load().sentences == demo.sentences(10_000)


# ---- WordNet


def test_wordnet_gives_the_words_of_the_first_sense(tmp_path):
    synonyms = views.read_wordnet(write_wordnet(tmp_path / "wordnet"))
    assert synonyms["dog"] == ["domestic dog"]
    assert synonyms["hound"] == ["dog"]
    assert synonyms["big"] == ["large"]
    assert synonyms["large"] == ["big"]
    assert synonyms["run"] == []


def test_the_part_of_speech_seen_most_often_gives_the_synonyms(tmp_path):
    folder = write_wordnet(tmp_path / "wordnet")
    (folder / "index.verb").write_text("dog v 1 0 1 3 00000001\n")
    assert views.read_wordnet(folder)["dog"] == ["run"]
    (folder / "index.verb").write_text("dog v 1 0 1 1 00000001\n")
    assert views.read_wordnet(folder)["dog"] == ["domestic dog"]


def test_a_word_that_no_text_has_gets_no_synonyms(tmp_path):
    folder = write_wordnet(tmp_path / "wordnet")
    (folder / "index.adj").write_text("large a 1 0 1 0 00000001\n")
    assert views.read_wordnet(folder)["large"] == []


@pytest.mark.parametrize(
    "name, text",
    [
        ("index.verb", "run v 1\n"),
        ("index.verb", "run v 1 0 1 many 00000001\n"),
        ("index.verb", "run v 1 0 1 1 00000009\n"),
        ("data.verb", "00000001 30 v\n"),
        ("data.verb", "00000001 30 v no run 0 000 00\n"),
    ],
)
def test_a_broken_database_is_refused(tmp_path, name, text):
    folder = write_wordnet(tmp_path / "wordnet")
    (folder / name).write_text(text)
    with pytest.raises(DataError, match=f"{name}:1: .*expected a line of WordNet 3's database"):
        views.read_wordnet(folder)


def test_debians_wordnet():
    if not os.path.exists("/usr/share/wordnet/data.noun"):
        pytest.skip("no WordNet in /usr/share/wordnet (Debian: wordnet-base)")
    synonyms = views.read_wordnet("/usr/share/wordnet")
    assert {"auto", "automobile"} <= set(synonyms["car"])
    assert "truck" not in synonyms["car"]
    assert not synonyms["he"]
    assert len([word for word in synonyms if synonyms[word]]) > 10_000


# ---- masked language model


@pytest.fixture(scope="module")
def masked_lm(models_folder, tmp_path_factory):
    return write_masked_lm(tmp_path_factory.mktemp("mlm"), models_folder / "bert")


def test_masks_are_filled_at_15_percent_by_the_likeliest_token(masked_lm):
    model, tokenizer = views.load_masked_lm(masked_lm, "cpu")
    sentences = demo.sentences(200)
    made = views.fill_masks(sentences, np.random.default_rng(1), model, tokenizer)
    ids = tokenizer(sentences)["input_ids"]
    random_numbers = np.random.default_rng(1).random((200, max(map(len, ids))))
    changed = 0
    total = 0
    for i, (row, view) in enumerate(zip(ids, made)):
        masked = [j for j in range(1, len(row) - 1) if random_numbers[i, j] < 0.15]
        inputs = [tokenizer.mask_token_id if j in masked else token for j, token in enumerate(row)]
        best = model(torch.tensor([inputs])).logits[0].argmax(-1).tolist()
        filled = [best[j] if j in masked else token for j, token in enumerate(row)]
        assert view == tokenizer.decode(filled, skip_special_tokens=True)
        changed += len(masked)
        total += len(row) - 2
    assert 0.12 < changed / total < 0.18


def test_masks_depend_on_the_seed_alone(masked_lm):
    made = load("--augment", "mlm", "--masked-lm", masked_lm)
    rows = np.arange(20)
    assert made.second(rows, [0, 1]) == made.second(rows, [0, 1])
    assert made.second(rows, [0, 1]) != made.second(rows, [0, 2])


def test_a_model_that_fills_no_masks_is_refused(models_folder):
    with pytest.raises(DataError, match="weights lack cls.*expected a masked language model"):
        load("--augment", "mlm", "--masked-lm", models_folder / "bert")


def test_a_tokenizer_without_a_mask_token_is_refused(masked_lm, models_folder, tmp_path):
    folder = write_masked_lm(tmp_path / "mlm", models_folder / "bert")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.mask_token = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(DataError, match="lacks a mask token, expected a masked language model"):
        load("--augment", "mlm", "--masked-lm", folder)
