"""extras/trim.py: the same vectors from fewer tokens, and no text that can no longer be written."""

import json
from string import ascii_lowercase

import numpy as np
import pytest
import torch
import transformers
from conftest import demo_sentences
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


def save(tokenizer, kind, folder, **names):
    """A random model of two layers for this tokenizer, as a folder with modules.json."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64, **names
    )
    options = dict(vocab_size=len(tokenizer), hidden_size=32, num_attention_heads=4)
    options |= dict(num_hidden_layers=2, intermediate_size=64, max_position_embeddings=70)
    options |= dict(initializer_range=0.3, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **options)
    transformers.AutoModel.from_config(config).save_pretrained(folder / "plain")
    tokenizer.save_pretrained(folder / "plain")
    encoder = common.load_encoder(folder / "plain", "mean")
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
    return save(tokenizer, "xlm-roberta", tmp_path, mask_token="<mask>", cls_token="<s>", **names)


@pytest.fixture
def wordpiece(tmp_path):
    """As in BERT, with an older template. "##é" is missing, so "caf" + "##fé" cannot be cut."""
    tokens = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *ascii_lowercase,
        "é",
        "café",
        "##fé",
        "dog",
    ]
    tokens += [f"##{letter}" for letter in ascii_lowercase] + ["cat", "##s", "the"]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")
    return save(tokenizer, "bert", tmp_path, mask_token="[MASK]", **names)


def run(call_main, model, sentences, tokens, folder):
    """Trim to folder/trimmed -> the encoders before and after, what was printed."""
    file = folder / "sentences.txt"
    file.write_text("\n".join(sentences), "utf-8")
    options = ["--train", file, "--tokens", tokens, "--output", folder / "trimmed"]
    printed = call_main(trim, model, *options)
    return common.load_encoder(model), common.load_encoder(folder / "trimmed"), printed


def pieces(encoder, text):
    return encoder.tokenizer.convert_ids_to_tokens(encoder.tokenizer(text)["input_ids"])


def test_three_scripts_can_still_be_written(unigram, call_main, tmp_path):
    first = common.load_encoder(unigram)
    amount = len(first.tokenizer) - 8
    before, after, _ = run(call_main, unigram, [SCRIPTS[0]] * 3 + [SCRIPTS[2]], amount, tmp_path)
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


@pytest.mark.parametrize("name", ["unigram", "wordpiece"])
def test_tokens_that_stay_have_the_same_vectors(name, request, call_main, tmp_path):
    model = request.getfixturevalue(name)
    texts = [SCRIPTS[0], SCRIPTS[2]] if name == "unigram" else ["the cats", "café the cat dog"]
    amount = len(common.load_encoder(model).tokenizer) - (5 if name == "unigram" else 0)
    before, after, printed = run(call_main, model, texts, amount, tmp_path)
    vectors = [common.encode(embed, encoder, texts) for encoder in (before, after)]
    assert np.allclose(*vectors, atol=1e-6)
    assert "100.00" in printed.splitlines()[-1]


def test_sentence_transformers_reads_the_folder(unigram, call_main, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    amount = len(common.load_encoder(unigram).tokenizer) - 8
    _, after, _ = run(call_main, unigram, SCRIPTS[:2], amount, tmp_path)
    other = sentence_transformers.SentenceTransformer(str(tmp_path / "trimmed"), device="cpu")
    assert np.allclose(other.encode(list(SCRIPTS)), common.encode(embed, after, SCRIPTS), atol=1e-5)


def test_frequent_tokens_stay(wordpiece, call_main, tmp_path):
    """By hand: "the" is the most frequent word; "café" and "##fé" have no other spelling."""
    tokens = common.load_encoder(wordpiece).tokenizer.get_vocab()
    amount = len(tokens) - 2  # of the, cat, dog, one stays
    texts = ["the dog", "the cat", "the", "dogs"]
    before, after, printed = run(call_main, wordpiece, texts, amount, tmp_path)
    assert set(tokens) - set(after.tokenizer.get_vocab()) == {"cat", "dog"}
    assert pieces(after, "the café") == ["[CLS]", "the", "café", "[SEP]"]
    assert pieces(after, "dog") == ["[CLS]", "d", "##o", "##g", "[SEP]"]
    # [CLS], [SEP] (4 each), the (3), s (1) of 15 tokens stay; then 2 + 2 + 2 more
    before, after = [line.split("|")[4:6] for line in printed.splitlines()[2:]]
    assert float(before[0]) == 3.75 and [float(cell) for cell in after] == [5.25, 80.0]


def test_student_of_fewer_tokens(unigram, wordpiece, fails, tmp_path):
    file = tmp_path / "sentences.txt"
    file.write_text("the cat", "utf-8")
    options = ["--train", file, "--output", tmp_path / "trimmed", "--tokens"]
    assert "raise --tokens" in fails(trim, wordpiece, *options, 10)
    path = wordpiece / "tokenizer.json"
    bpe = json.loads(path.read_text("utf-8"))
    bpe["model"] = dict(type="BPE", vocab=bpe["model"]["vocab"], merges=[], unk_token="[UNK]")
    path.write_text(json.dumps(bpe), "utf-8")
    assert "BPE" in fails(trim, wordpiece, *options, 50)
    assert not (tmp_path / "trimmed").exists()


@pytest.mark.slow
def test_a_real_tokenizer_writes_every_token(call_main, tmp_path):
    """all-MiniLM-L6-v2: each of its 30,522 tokens, as a text, has no [UNK] afterwards."""
    texts = demo_sentences(500)
    before, after, _ = run(call_main, common.MINILM, texts, 4000, tmp_path)
    texts = list(before.tokenizer.get_vocab())
    for encoder in (before, after):
        encoder.unknown = [encoder.tokenizer.unk_token in pieces(encoder, text) for text in texts]
    assert after.unknown == before.unknown
