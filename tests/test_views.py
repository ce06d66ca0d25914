"""extras/views.py: the ways of Table 6, their rates, WordNet, the models, interrupted commands."""

import shutil
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from conftest import alter, demo_sentences

import congen
from extras import views

WORDS = [f"word{i}" for i in range(40)]
SYNONYMS = {"word3": ["x"], "word7": ["y", "z"], "word8": []}
CHANGES = {
    "crop": views.crop,
    "delete-one": views.delete_one,
    "synonym": partial(views.replace_synonyms, synonyms=SYNONYMS),
}


@pytest.fixture(scope="module")
def masked_lm(models_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlm")
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(models_folder / "bert")
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(models_folder / "bert").save_pretrained(folder)
    return folder


def translate_command(folder, output):
    """Three chunks, of 16, 16 and 8 sentences."""
    models = [f"--{name}={folder / name}" for name in ("there", "back")]
    data = ["--train", folder / "train.txt", "--output", output]
    return ["translate", *models, *data, "--batch-size", 2]


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


def test_a_view_without_words_is_the_sentence_itself(call_main, tmp_path):
    (tmp_path / "train.txt").write_text("Go!\n Run \t fast\n")
    call_main(views, "delete-one", f"--train={tmp_path}/train.txt", f"--output={tmp_path}/pairs")
    first, second = (tmp_path / "pairs").read_text().splitlines()
    assert first == "Go!\tGo!"
    assert second in ("Run fast\tRun", "Run fast\tfast")


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
    model, tokenizer = views.load_model(masked_lm, transformers.AutoModelForMaskedLM, "")
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


def greedy(model, tokenizer, sentence):
    """A sentence's translation, alone and token by token."""
    ids = tokenizer(sentence, return_tensors="pt").input_ids.to(model.device)
    made = [model.config.decoder_start_token_id]
    for _ in range(2 * ids.shape[1] + 10):
        inputs = torch.tensor([made], device=model.device)
        logits = model(ids, decoder_input_ids=inputs).logits[0, -1]
        made.append(int(logits.argmax()))
        if made[-1] == model.config.eos_token_id:
            break
    return tokenizer.decode(made, skip_special_tokens=True)


@torch.no_grad()
def test_translations_are_greedy_in_order_and_independent_of_their_batch(translators):
    sentences = [*demo_sentences(12), "A boy.", "", "A boy."]
    translate = views.load_translator(translators / "there", beams=1, batch_size=5)
    made = translate(sentences)
    for sentence, translation in zip(sentences, made):
        alone = greedy(*translate.args[:2], sentence).split() if sentence else []
        words = translation.split()
        # One that does not end is cut at the limit of its batch's longest sentence.
        assert len(words) >= len(alone) - 2 and (sentence or not words)
        assert all(one == other for one, other in zip(words, alone))
    assert len(set(made)) > 6
    wide = views.load_translator(translators / "there", beams=3, batch_size=5)
    assert wide(sentences) != made


def test_back_translation_goes_there_and_back(call_main, translators, tmp_path):
    call_main(views, *translate_command(translators, tmp_path / "pairs"))
    first, second = map(list, zip(*congen.read_text_pairs(tmp_path / "pairs")))
    sentences = demo_sentences(40)
    assert first == sentences
    texts = sentences[:16]  # one chunk: batches are formed in it
    for name in ("there", "back"):
        texts = views.load_translator(translators / name, beams=1, batch_size=2)(texts)
    assert second[:16] == [text or sentence for text, sentence in zip(texts, sentences)]
    assert len(set(second)) > 20
    assert list(tmp_path.iterdir()) == [tmp_path / "pairs"]


@pytest.mark.parametrize("name", ["there", "back"])
def test_where_a_translation_is_blank_the_sentence_is_its_own_view(
    call_main, translators, tmp_path, name
):
    shutil.copytree(translators, tmp_path, dirs_exist_ok=True)

    def end_at_once(tensors):
        tensors["final_logits_bias"][0, 3] = 1e6

    alter(tmp_path / name / "model.safetensors", end_at_once)
    call_main(views, *translate_command(tmp_path, tmp_path / "pairs"))
    assert all(first == second for first, second in congen.read_text_pairs(tmp_path / "pairs"))


@pytest.mark.slow
def test_an_interrupted_command_continues_to_the_same_bytes(
    call_main, fails, translators, tmp_path, monkeypatch
):
    command = translate_command(translators, tmp_path / "pairs")
    call_main(views, *command)
    expected = (tmp_path / "pairs").read_bytes()
    assert "exists already" in fails(views, *command)
    (tmp_path / "pairs").unlink()

    translate, calls = views.translate, []

    def dying_translate(*args):
        calls.append(args)
        if len(calls) == 4:  # on the way back, in the second chunk
            raise KeyboardInterrupt
        return translate(*args)

    monkeypatch.setattr(views, "translate", dying_translate)
    assert "the same command" in fails(views, *command)
    (kept,) = tmp_path.iterdir()
    assert kept.read_bytes() == b"".join(expected.splitlines(True)[:16])
    with kept.open("ab") as file:
        file.write(b"".join(expected.splitlines(True)[16:20]) + b"half a li")  # killed in a write
    call_main(views, *command)
    assert len(calls) == 4 + 2 * 2
    assert (tmp_path / "pairs").read_bytes() == expected
    assert list(tmp_path.iterdir()) == [tmp_path / "pairs"]


def test_what_another_command_has_kept_is_not_used(call_main, fails, files, tmp_path, monkeypatch):
    command = ["crop", "--train", files / "sentences.txt", "--output", tmp_path / "pairs"]
    make_views = views.make_views

    def make_one(args):
        def make(sentences, random):
            if calls:
                raise KeyboardInterrupt
            calls.append(sentences)
            return make_views(args)(sentences, random)

        return make

    calls = []
    monkeypatch.setattr(views, "make_views", make_one)
    fails(views, *command)
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 1
    call_main(views, *command, "--seed", 1)
    made = (tmp_path / "pairs").read_bytes()
    assert len(made.splitlines()) == 300
    call_main(views, *command[:-1], tmp_path / "fresh", "--seed", 1)
    assert (tmp_path / "fresh").read_bytes() == made


def test_a_model_that_cannot_do_it_is_refused(fails, translators, masked_lm, tmp_path):
    shutil.copytree(translators, tmp_path, dirs_exist_ok=True)
    removed = "model.encoder.layers.0.fc1.weight"
    alter(tmp_path / "back" / "model.safetensors", lambda tensors: tensors.pop(removed))
    command = translate_command(tmp_path, tmp_path / "pairs")
    assert f"back: its weights lack {removed}" in fails(views, *command)
    assert "it must be a translator" in fails(views, *command, "--there", masked_lm)
    assert not list(tmp_path.glob(".pairs*"))


@pytest.mark.parametrize("way", ["crop", "delete-one", "synonym", "mlm"])
def test_the_file_has_the_sentences_and_their_views(call_main, wordnet, masked_lm, files, way):
    options = [way, "--train", files / "sentences.txt", "--wordnet", wordnet]
    options += ["--masked-lm", masked_lm]
    for name in ("a", "b"):
        call_main(views, *options, "--output", wordnet / name)
    assert (wordnet / "a").read_bytes() == (wordnet / "b").read_bytes()  # a seed's views
    first, second = map(list, zip(*congen.read_text_pairs(wordnet / "a")))
    assert first == demo_sentences(300)
    assert second != first
