"""extras/views.py: the ways of Table 6, their rates, WordNet and the masked language model."""

from functools import partial

import numpy as np
import pytest
import torch
import transformers
from conftest import demo_sentences

import common
from extras import views

WORDS = [f"word{i}" for i in range(40)]
SYNONYMS = {"word3": ["x"], "word7": ["y", "z"], "word8": []}
CHANGES = {
    "crop": views.crop,
    "delete-one": views.delete_one,
    "synonym": partial(views.replace_synonyms, synonyms=SYNONYMS),
}


@pytest.fixture
def wordnet(tmp_path):
    """A small database of WordNet 3; "big" is also a noun that no text has."""
    files = {
        "data.noun": ["00000001 05 n 02 dog 0 domestic_dog 0", "00000002 05 n 02 dog 1 hound 0"],
        "index.noun": ["big n 1 0 1 0 00000002", "dog n 2 2 @ ~ 2 1 00000001 00000002"],
        "data.adj": ["00000001 00 a 02 big 0 large(p) 0 000 | of size"],
        "index.adj": ["big a 1 0 1 1 00000001", "large a 1 0 1 1 00000001"],
        "data.verb": ["00000001 30 v 01 run 0 000 00 | move"],
        "index.verb": ["run v 1 0 1 1 00000001"],
        "data.adv": ["00000001 02 r 01 soon 0 000 | in time"],
        "index.adv": ["soon r 1 0 1 1 00000001"],
    }
    for name, lines in files.items():
        text = "".join(f"{line}  \n" for line in ["  1 This software is provided to you", *lines])
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture(scope="module")
def masked_lm(models_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlm")
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(models_folder / "bert")
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(models_folder / "bert").save_pretrained(folder)
    return folder


def many(how):
    """The different results of a change of WORDS, each a str."""
    rng = np.random.default_rng(0)
    return {" ".join(CHANGES[how](WORDS, rng)) for _ in range(500)}


def test_crop_keeps_any_span_of_nine_tenths_and_delete_one_deletes_any_one_word():
    assert many("crop") == {" ".join(WORDS[start : start + 36]) for start in range(5)}
    assert many("delete-one") == {" ".join(WORDS[:i] + WORDS[i + 1 :]) for i in range(40)}


def test_a_tenth_of_the_known_words_is_replaced_by_any_of_their_synonyms():
    once = " ".join(WORDS).replace("word3 ", "x ")
    assert many("synonym") == {once.replace("word7 ", f"{other} ") for other in "yz"}
    replace = partial(views.replace_synonyms, random=np.random.default_rng(0))
    assert replace(WORDS, synonyms={word: ["x"] for word in WORDS}).count("x") == 4
    synonyms = {"boy": ["male child"], "is": ["be"]}
    assert replace(["Boy", "is"], synonyms=synonyms) == ["male child", "is"]


def test_a_view_without_words_is_the_sentence_itself():
    assert views.change_words(["Go!"], np.random.default_rng(0), views.delete_one) == ["Go!"]


def test_wordnet_gives_the_first_sense_of_the_part_of_speech_seen_most_often(wordnet):
    synonyms = views.read_wordnet(wordnet)
    assert synonyms["dog"] == ["domestic dog"]
    assert (synonyms["big"], synonyms["large"]) == (["large"], ["big"])
    assert not synonyms["run"]
    (wordnet / "index.verb").write_text("dog v 1 0 1 3 00000001\n")
    (wordnet / "index.adj").write_text("large a 1 0 1 0 00000001\n")
    synonyms = views.read_wordnet(wordnet)
    assert synonyms["dog"] == ["run"]
    assert not synonyms.get("large")  # seen in no text


def test_masks_are_filled_at_15_percent_by_the_likeliest_token(masked_lm):
    model, tokenizer = views.load_masked_lm(masked_lm)
    sentences = demo_sentences(100)
    made = views.fill_masks(sentences, np.random.default_rng(1), model, tokenizer)
    ids = tokenizer(sentences)["input_ids"]
    drawn = np.random.default_rng(1).random((100, max(map(len, ids))))
    for numbers, row, view in zip(drawn, ids, made):
        masked = [j for j in range(1, len(row) - 1) if numbers[j] < 0.15]
        inputs = [tokenizer.mask_token_id if j in masked else token for j, token in enumerate(row)]
        best = model(torch.tensor([inputs]).to(model.device)).logits[0].argmax(-1).tolist()
        filled = [best[j] if j in masked else token for j, token in enumerate(row)]
        assert view == tokenizer.decode(filled, skip_special_tokens=True)
    assert made != sentences


@pytest.mark.parametrize("way", ["crop", "delete-one", "synonym", "mlm"])
def test_the_file_has_the_sentences_and_their_views(call_main, wordnet, masked_lm, files, way):
    options = [way, "--train", files / "sentences.txt", "--wordnet", wordnet]
    options += ["--masked-lm", masked_lm]
    for name in ("a", "b"):
        call_main(views, *options, "--output", wordnet / name)
    assert (wordnet / "a").read_bytes() == (wordnet / "b").read_bytes()  # a seed's views
    first, second = map(list, zip(*common.read_text_pairs(wordnet / "a")))
    assert first == demo_sentences(300)
    assert second != first
