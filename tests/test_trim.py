"""extras/trim.py: kept tokens have the same vectors, and every text can still be written."""

import json
import re
from string import ascii_lowercase

import numpy as np
import pytest
import torch
import transformers
from conftest import alter, demo_sentences
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

import common
from eval_sts import embed
from extras import trim

SCRIPTS = (  # Latin, Cyrillic, Greek; the last sentence has a letter that the tokenizer lacks
    "the cat sat on the mat",
    "a dog ran to the old house",
    "кот сидел на окне",
    "собака бежала к старому дому",
    "η γάτα κάθεται στο σπίτι",
    "ο σκύλος τρέχει γρήγορα",
    "the cat щ on the mat",
)


def save(tokenizer, kind, name, folder, **names):
    """A random model of two layers for this tokenizer, as a folder with modules.json.

    name: of the tokenizer's class, by which transformers reads it.
    """
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64, **names
    )
    size = max(tokenizer.get_vocab().values()) + 1
    options = dict(vocab_size=size, hidden_size=32, num_attention_heads=4)
    options |= dict(num_hidden_layers=2, intermediate_size=64, max_position_embeddings=70)
    options |= dict(initializer_range=0.3, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **options)
    transformers.AutoModel.from_config(config).save_pretrained(folder / "plain")
    tokenizer.save_pretrained(folder / "plain")
    stated = common.read_json(folder / "plain" / "tokenizer_config.json", {})
    common.write_json(
        folder / "plain" / "tokenizer_config.json", stated | dict(tokenizer_class=name)
    )
    encoder = common.load_encoder(folder / "plain", "mean")
    assert type(encoder.tokenizer).__name__ == name
    common.save_encoder(encoder, folder / "model")
    return folder / "model"


@pytest.fixture
def unigram(tmp_path):
    """As in XLM-R: <pad> is token 1, <mask> the last; words as pieces, each letter but щ."""
    words = sorted({f"▁{word}" for text in SCRIPTS for word in text.split()} - {"▁щ"})
    letters = sorted({letter for word in words for letter in word})
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(word, -5.0) for word in words if len(word) > 1]
    pieces += [(letter, -9.0) for letter in letters] + [("<mask>", 0.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = dict(bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    return save(
        tokenizer,
        "xlm-roberta",
        "XLMRobertaTokenizer",
        tmp_path,
        mask_token="<mask>",
        cls_token="<s>",
        **names,
    )


@pytest.fixture
def wordpiece(tmp_path):
    """As in BERT, with an older template; "##ß" is missing, so "cafß" and "##fß" must stay."""
    tokens = ["aa", "[PAD]", "bb", "[UNK]", "[CLS]", "[SEP]", "cc", "[MASK]", *ascii_lowercase]
    tokens += ["ß", "cafß", "##fß", "dog", "cat", "the"]
    tokens += [f"##{letter}" for letter in ascii_lowercase]
    vocabulary = {token: i + (i > 9) for i, token in enumerate(tokens)}  # 10 is no token's
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 5), ("[CLS]", 4))
    names = dict(unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")
    return save(tokenizer, "bert", "BertTokenizer", tmp_path, mask_token="[MASK]", **names)


def run(call_main, model, sentences, tokens, folder, *more):
    """Trim to folder/trimmed -> the encoders before and after, what was printed."""
    file = folder / "sentences.txt"
    file.write_text("\n".join(sentences), "utf-8")
    options = ["--train", file, "--tokens", tokens, "--output", folder / "trimmed", *more]
    printed = call_main(trim, model, *options)
    return common.load_encoder(model), common.load_encoder(folder / "trimmed"), printed


def pieces(encoder, text):
    return encoder.tokenizer.convert_ids_to_tokens(encoder.tokenizer(text)["input_ids"])


def test_three_scripts_can_still_be_written(unigram, call_main, tmp_path):
    first = common.load_encoder(unigram)
    amount = len(first.tokenizer) - 8
    sentences = [SCRIPTS[0]] * 3 + [SCRIPTS[2]]
    options = (unigram, sentences, amount, tmp_path, "--all-characters")
    before, after, _ = run(call_main, *options)
    assert len(after.tokenizer) == amount == after.model.config.vocab_size
    assert after.tokenizer.pad_token_id == before.tokenizer.pad_token_id  # positions count from it
    assert pieces(after, SCRIPTS[0]) == pieces(before, SCRIPTS[0])
    assert pieces(after, SCRIPTS[5]) != pieces(before, SCRIPTS[5])
    assert after.tokenizer.convert_tokens_to_ids("<mask>") == amount - 1
    for text in SCRIPTS:
        unknown = [pieces(encoder, text).count("<unk>") for encoder in (before, after)]
        assert unknown == [text.count("щ")] * 2
        written = "".join(pieces(after, text)[1:-1]).replace("▁", " ").strip()
        assert written == text.replace("щ", "<unk>")


def test_only_characters_of_the_sentences_stay(unigram, call_main, tmp_path):
    """By hand: Latin and Cyrillic letters stay; a Greek word becomes one unknown token."""
    tokens = common.load_encoder(unigram).tokenizer.get_vocab()
    in_use = 5 + len({word for text in SCRIPTS[:4] for word in text.split()})
    amount = in_use + len(set("".join(SCRIPTS[:4])))  # "▁" for the space
    before, after, printed = run(call_main, unigram, SCRIPTS[:4], amount, tmp_path)
    letters = {token for token in tokens if len(token) == 1}
    gone = letters - set(after.tokenizer.get_vocab())
    assert gone == {letter for letter in letters if "α" <= letter <= "ω" or letter in "άέήίόύώ"}
    assert pieces(after, "γάτα mat γάτα") == ["<s>", "▁", "<unk>", "▁mat", "▁", "<unk>", "</s>"]
    counts = [[cell.strip() for cell in line.split("|")[2:5]] for line in printed.splitlines()]
    assert counts[0][1] == "one-character tokens" and counts[0][2] == "unknown"
    assert int(float(counts[2][1])) - int(float(counts[3][1])) == len(gone)
    assert float(counts[2][2]) == float(counts[3][2]) == 0
    assert np.isfinite(common.encode(embed, after, SCRIPTS)).all()


def test_words_beyond_the_models_length_are_counted(wordpiece, call_main, tmp_path):
    """The sentence has 80 tokens, the model 64 positions, and "dog" comes last."""
    text = " ".join(["a"] * 79 + ["dog"])
    amount = len(common.load_encoder(wordpiece).tokenizer) - 5
    _, after, _ = run(call_main, wordpiece, [text], amount, tmp_path)
    assert pieces(after, "dog cat") == ["[CLS]", "dog", "c", "##a", "##t", "[SEP]"]


def test_an_unknown_piece_that_is_no_added_token_stays(unigram, call_main, fails, tmp_path):
    def forget(content):
        content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] != "<unk>"]

    alter(unigram / "tokenizer.json", forget)
    amount = len(common.load_encoder(unigram).tokenizer) - 8
    _, after, _ = run(call_main, unigram, SCRIPTS[:4], amount, tmp_path)
    assert "<unk>" in pieces(after, SCRIPTS[6])
    alter(unigram / "tokenizer.json", lambda content: content["model"].update(unk_id=None))
    alter(unigram / "tokenizer_config.json", dict(tokenizer_class="PreTrainedTokenizerFast"))
    line = fails(
        trim,
        unigram,
        "--train",
        tmp_path / "sentences.txt",
        "--tokens",
        50,
        "--output",
        tmp_path / "x",
    )
    assert "unknown token" in line


def test_positions_that_begin_after_the_padding_token_stay(unigram, call_main, fails, tmp_path):
    """Of padding token 6, RoBERTa's positions begin at 7; no text has token 4 or 5, a word."""
    tokens = {i: token for token, i in common.load_encoder(unigram).tokenizer.get_vocab().items()}
    alter(unigram / "config.json", dict(pad_token_id=6))
    alter(unigram / "tokenizer_config.json", dict(pad_token=tokens[6]))
    words = {tokens[4].strip("▁"), tokens[5].strip("▁")}
    texts = [text for text in SCRIPTS if not words & {*text.split()}]
    (tmp_path / "sentences.txt").write_text("\n".join(texts), "utf-8")
    options = ["--train", tmp_path / "sentences.txt", "--output", tmp_path / "trimmed"]
    line = fails(trim, unigram, *options, "--tokens", 1)
    amount = int(re.search(r"(\d+) must stay", line)[1])
    before, after, _ = run(call_main, unigram, texts, amount, tmp_path)
    assert before.tokenizer.pad_token_id == after.tokenizer.pad_token_id == 6
    assert np.isfinite(common.encode(embed, after, texts)).all()


@pytest.mark.parametrize("name", ["unigram", "wordpiece"])
def test_tokens_that_stay_have_the_same_vectors(name, request, call_main, tmp_path):
    model = request.getfixturevalue(name)
    texts = [SCRIPTS[0], SCRIPTS[2]] if name == "unigram" else ["the cats", "cafß the cat"]
    amount = len(common.load_encoder(model).tokenizer) - 4
    before, after, printed = run(call_main, model, texts, amount, tmp_path)
    vectors = [common.encode(embed, encoder, texts) for encoder in (before, after)]
    assert np.allclose(*vectors, atol=1e-6)
    assert "100.00" in printed.splitlines()[-1] and len(after.tokenizer) == amount


def test_sentence_transformers_reads_the_folder(unigram, call_main, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    amount = len(common.load_encoder(unigram).tokenizer) - 8
    _, after, _ = run(call_main, unigram, SCRIPTS[:2], amount, tmp_path)
    other = sentence_transformers.SentenceTransformer(str(tmp_path / "trimmed"), device="cpu")
    assert np.allclose(other.encode(list(SCRIPTS)), common.encode(embed, after, SCRIPTS), atol=1e-5)


def test_frequent_tokens_stay(wordpiece, call_main, tmp_path):
    """By hand: "the" is the most frequent word; "cafß" and "##fß" have no other spelling."""
    tokens = common.load_encoder(wordpiece).tokenizer.get_vocab()
    amount = len(tokens) - 5  # aa, bb, cc and, of the, cat, dog, all but one
    texts = ["the dog", "the cat", "the", "dogs"]
    options = (wordpiece, texts, amount, tmp_path, "--all-characters")
    before, after, printed = run(call_main, *options)
    assert set(tokens) - set(after.tokenizer.get_vocab()) == {"aa", "bb", "cc", "cat", "dog"}
    assert pieces(after, "the cafß") == ["[CLS]", "the", "cafß", "[SEP]"]
    assert pieces(after, "dog") == ["[CLS]", "d", "##o", "##g", "[SEP]"]
    # [CLS], [SEP] (4 each), the (3), s (1) of 15 tokens stay; then 2 + 2 + 2 more
    before, after = [line.split("|")[4:8] for line in printed.splitlines()[2:]]
    assert float(before[2]) == 3.75 and [float(cell) for cell in after[2:]] == [5.25, 80.0]


def test_what_cannot_be_cut(unigram, wordpiece, fails, tmp_path):
    file = tmp_path / "sentences.txt"
    file.write_text("the cat", "utf-8")
    options = ["--train", file, "--output", tmp_path / "trimmed", "--tokens"]
    assert "too few" in fails(trim, wordpiece, *options, 10)
    path = wordpiece / "tokenizer.json"
    bpe = json.loads(path.read_text("utf-8"))
    stated = common.read_json(wordpiece / "tokenizer_config.json", {})
    stated["tokenizer_class"] = "PreTrainedTokenizerFast"
    common.write_json(wordpiece / "tokenizer_config.json", stated)
    bpe["model"] = dict(type="BPE", vocab=bpe["model"]["vocab"], merges=[], unk_token="[UNK]")
    path.write_text(json.dumps(bpe), "utf-8")
    assert "BPE" in fails(trim, wordpiece, *options, 50)
    assert not (tmp_path / "trimmed").exists()


@pytest.mark.slow
def test_a_real_tokenizer(call_main, tmp_path):
    """all-MiniLM-L6-v2: no token becomes [UNK], at the beginning of a word or inside it."""
    texts = demo_sentences(500)
    options = (common.MINILM, texts, 4000, tmp_path, "--all-characters")
    before, after, _ = run(call_main, *options)
    vectors = [common.encode(embed, encoder, texts) for encoder in (before, after)]
    assert np.allclose(*vectors, atol=1e-6)
    special = {*before.tokenizer.all_special_tokens}
    for token in {*before.tokenizer.get_vocab()} - special:
        text = f"x{token[2:]}" if token.startswith("##") else token
        assert "[UNK]" not in pieces(after, text), token
