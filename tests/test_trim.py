"""extras/trim.py: kept tokens have the same vectors, and every text can still be written."""

import json
import re
from string import ascii_lowercase

import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, alter, demo_sentences
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

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
    options |= dict(initializer_range=0.3)
    if kind in ("qwen3", "gemma3_text"):
        options |= dict(head_dim=8, num_key_value_heads=2)
    if kind == "qwen3":
        options["vocab_size"] += 7  # rows without a token, as in the real ones
    for key, token in tokenizer.special_tokens_map.items():
        options[f"{key}_id"] = tokenizer.convert_tokens_to_ids(token)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **options)
    transformers.AutoModel.from_config(config).save_pretrained(folder / "plain")
    tokenizer.save_pretrained(folder / "plain")
    alter(folder / "plain" / "tokenizer_config.json", dict(tokenizer_class=name))
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


def trained(tokenizer, lines, size, **options):
    """-> the vocabulary {token: id} and the merges {token: (a, b)} of BPE that the lines train.

    A token has only its first merge here; the trainer may find two, as in 0 + 00 and 00 + 0.
    """
    trainer = BpeTrainer(vocab_size=size, show_progress=False, **options)
    tokenizer.train_from_iterator(lines, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = {}
    for a, b in model["merges"]:
        merges.setdefault(a + b, (a, b))
    return model["vocab"], merges


def page_lines():
    """Text with many rare words: what the project's pages say."""
    files = sorted((ROOT / "docs").glob("*.md"))
    lines = [line.strip() for file in files for line in file.read_text("utf-8").splitlines()]
    return [line for line in lines if line]


def byte_level(lines, size):
    """-> a tokenizer with byte-level BPE, and its vocabulary and merges; see trained()."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return tokenizer, *trained(tokenizer, lines, size, initial_alphabet=alphabet)


def numbered(*lists):
    """Tokens, some of them twice -> {token: id}, in the order of the lists."""
    return {token: i for i, token in enumerate(dict.fromkeys(sum(map(list, lists), [])))}


@pytest.fixture
def roberta(tmp_path):
    """<pad> is token 1, <mask> the last; merges as older files have them; no unknown token."""
    tokenizer, vocabulary, merges = byte_level(page_lines(), 4000)
    vocabulary = numbered(["<s>", "<pad>", "</s>", "<unk>"], vocabulary, ["<mask>"])
    tokenizer.model = models.BPE(vocabulary, [*merges.values()])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    names = dict(bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    names |= dict(cls_token="<s>", sep_token="</s>", mask_token="<mask>")
    folder = save(tokenizer, "roberta", "RobertaTokenizer", tmp_path, **names)

    def join(content):
        content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]

    alter(folder / "tokenizer.json", join)
    return folder


@pytest.fixture
def modernbert(tmp_path):
    """Special tokens come last, outside of the vocabulary."""
    tokenizer, vocabulary, merges = byte_level(page_lines(), 4000)
    tokenizer.model = models.BPE(vocabulary, [*merges.values()])
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    tokenizer.add_special_tokens(special)
    start = len(vocabulary)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", start + 1), ("[SEP]", start + 2)]
    )
    names = {f"{token[1:-1].lower()}_token": token for token in special}
    names |= dict(bos_token="[CLS]", eos_token="[SEP]")
    return save(tokenizer, "modernbert", "TokenizersBackend", tmp_path, **names)


@pytest.fixture
def qwen3(tmp_path):
    """One special token for the end and for padding; a spare one; rows without a token."""
    tokenizer, vocabulary, merges = byte_level(page_lines(), 4000)
    end = "<|endoftext|>"
    tokenizer.model = models.BPE(vocabulary, [*merges.values()])
    tokenizer.add_special_tokens([end, "<|spare|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, len(vocabulary))]
    )
    return save(tokenizer, "qwen3", "Qwen2Tokenizer", tmp_path, pad_token=end, eos_token=end)


@pytest.fixture
def gemma(tmp_path):
    """As in SentencePiece: "▁" for a space, bytes for unknown characters, and a merge for each
    two tokens that together are a token."""
    lines = [line.replace(" ", "▁") for line in page_lines()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    vocabulary, _ = trained(tokenizer, lines, 4000)
    merges = [
        (token[:place], token[place:])
        for token in vocabulary
        for place in range(1, len(token))
        if token[:place] in vocabulary and token[place:] in vocabulary
    ]
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    written = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = numbered(special, written, vocabulary, ["<mask>"])
    options = dict(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer.model = models.BPE(vocabulary, merges, **options)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 2), ("<eos>", 1)]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    names = {f"{token[1:-1]}_token": token for token in [*special, "<mask>"]}
    folder = save(tokenizer, "gemma3_text", "GemmaTokenizer", tmp_path, **names)
    alter(folder / "config.json", dict(eos_token_id=[1, vocabulary["<mask>"]]))
    return folder


BPE = ("roberta", "modernbert", "qwen3", "gemma")


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
    assert int(counts[2][1]) - int(counts[3][1]) == len(gone)
    assert counts[2][2] == counts[3][2] == "0"  # whole numbers, without decimals
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
    alter(wordpiece / "tokenizer_config.json", dict(tokenizer_class="PreTrainedTokenizerFast"))
    bpe["model"] = dict(type="BPE", vocab=bpe["model"]["vocab"], merges=[], unk_token="[UNK]")
    path.write_text(json.dumps(bpe), "utf-8")
    assert "BPE" in fails(trim, wordpiece, *options, 50)
    assert not (tmp_path / "trimmed").exists()


def cells(printed):
    """The printed table -> its rows, before and after: {column: number}."""
    lines = [[cell.strip() for cell in line.split("|")[2:-1]] for line in printed.splitlines()]
    names, _, *rows = lines
    return [{name: float(cell) for name, cell in zip(names, row) if cell} for row in rows]


def merges_of(folder):
    """{token: [(a, b)]} of a folder's tokenizer: a and b are merged into the token."""
    found = {}
    for pair in json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]["merges"]:
        a, b = pair.split(" ") if isinstance(pair, str) else pair
        found.setdefault(a + b, []).append((a, b))
    return found


def with_pieces(token, merges):
    """The token, and the pieces of all merges that end in it."""
    inner = [with_pieces(piece, merges) for pair in merges.get(token, []) for piece in pair]
    return {token}.union(*inner)


@pytest.mark.parametrize("name", BPE)
def test_bpe_keeps_the_tokens_of_the_sentences(name, request, call_main, tmp_path):
    """And nothing else, where a token has one merge: with a token less, a sentence changes."""
    model = request.getfixturevalue(name)
    texts = page_lines()[100:160]
    before = common.load_encoder(model)
    merges = merges_of(model)
    expected = {*before.tokenizer.all_special_tokens, *before.tokenizer.get_added_vocab()}
    expected.update(
        *[with_pieces(piece, merges) for text in texts for piece in pieces(before, text)]
    )
    if name == "gemma":
        characters = {*"".join(texts), *map(chr, range(128))}
        expected.update(f"<0x{byte:02X}>" for byte in range(256))
    else:
        characters = set(pre_tokenizers.ByteLevel.alphabet())
    expected |= characters & before.tokenizer.get_vocab().keys()
    _, after, printed = run(call_main, model, texts, len(expected), tmp_path)
    kept = after.tokenizer.get_vocab()
    assert len(kept) == len(expected) < len(before.tokenizer) / 2
    assert name == "gemma" or {*kept} == expected
    for text in texts:
        assert pieces(after, text) == pieces(before, text)
    vectors = [common.encode(embed, encoder, texts) for encoder in (before, after)]
    assert np.allclose(*vectors, atol=1e-6)
    first, second = cells(printed)
    lengths = [len(before.tokenizer(text).input_ids) for text in texts]
    assert first["tokens per sentence"] == pytest.approx(np.mean(lengths), abs=0.005)
    assert second["tokens per sentence"] == first["tokens per sentence"]
    assert first["unknown"] == second["unknown"] == 0
    assert second["% of tokens kept"] == 100
    assert second["tokens"] == len(expected)
    removed = before.model.config.vocab_size - len(expected)
    saved = first["MB, fp32"] - second["MB, fp32"]
    assert saved == pytest.approx(removed * 32 * 4 / 1e6, abs=0.011)  # rounded to 0.01 twice

    (tmp_path / "trimmed").rename(tmp_path / "first")
    if name != "gemma":
        _, smaller, _ = run(call_main, model, texts, len(expected) - 1, tmp_path)
        assert any(pieces(smaller, text) != pieces(before, text) for text in texts)


@pytest.mark.parametrize("name", BPE)
def test_bpe_special_tokens_and_other_texts(name, request, call_main, tmp_path):
    """Every text can be decoded, and a token that stays is still formed from the same string."""
    model = request.getfixturevalue(name)
    before, after, _ = run(call_main, model, page_lines()[100:160], 1500, tmp_path)
    assert len(after.tokenizer) == after.model.config.vocab_size == 1500
    first, second = [encoder.tokenizer for encoder in (before, after)]
    assert first.special_tokens_map == second.special_tokens_map
    assert name != "roberta" or second.pad_token_id == 1
    for key in [key for key in before.model.config.to_dict() if key.endswith("_token_id")]:
        old, new = [getattr(encoder.model.config, key) for encoder in (before, after)]
        if old is not None and (isinstance(old, list) or old < len(first)):
            assert first.convert_ids_to_tokens(old) == second.convert_ids_to_tokens(new), key
    others = ["Grüße, 世界! 🙂🙃", "Ж\tzyzzyva  qoph\n", "naïve ∑ Ωμέγα"]
    for text in others:
        assert second.decode(second(text).input_ids, skip_special_tokens=True) == text
    cut, whole = [tokenizer.backend_tokenizer.model for tokenizer in (second, first)]
    for token in second.get_vocab():
        if [part.value for part in whole.tokenize(token)] == [token]:
            assert [part.value for part in cut.tokenize(token)] == [token]
    from sentence_transformers import SentenceTransformer

    texts = [*others, *demo_sentences(20)]
    theirs = SentenceTransformer(str(tmp_path / "trimmed"), device="cpu").encode(texts)
    assert np.allclose(theirs, common.encode(embed, after, texts), atol=1e-5)


@pytest.fixture
def letters(tmp_path):
    """BPE of a few letters; "abc" is first in the vocabulary, and two merges end in it."""
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "abc", *"abcd", "ab", "bc", "abd", "dab"]
    merges = [("a", "b"), ("b", "c"), ("a", "bc"), ("ab", "c"), ("ab", "d")]
    options = dict(unk_token="<unk>", ignore_merges=True)
    tokenizer = Tokenizer(models.BPE(numbered(tokens), merges, **options))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    return save(tokenizer, "roberta", "TokenizersBackend", tmp_path, **names)


@pytest.mark.parametrize(
    "texts, amount, merges, split",
    [
        # abc is the most frequent, and needs ab, but not bc: a + b is merged before b + c.
        (["abc abd", "abc bc"], 1, ["b c"], "a bc | a b d | bc | d a b"),
        (["abc abd", "abc bc"], 2, ["a b", "ab c"], "abc | ab d | b c | d ab"),
        (["abc abd", "abc bc"], 3, ["a b", "b c", "a bc", "ab c"], "abc | ab d | bc | d ab"),
        # No merge ends in dab, which is a token only as a whole word.
        (["dab dab", "dab"], 1, [], "a b c | a b d | b c | dab"),
        # No sentence has a token of several letters: the vocabulary's first that fit with pieces.
        (["a b"], 1, ["a b"], "ab c | ab d | b c | d ab"),
        (["a b"], 2, ["a b", "ab c"], "abc | ab d | b c | d ab"),
        (["a b"], 3, ["a b", "b c", "a bc", "ab c"], "abc | ab d | bc | d ab"),
    ],
)
def test_bpe_by_hand(texts, amount, merges, split, letters, call_main, tmp_path):
    _, after, _ = run(call_main, letters, texts, 8 + amount, tmp_path)
    found = json.loads((tmp_path / "trimmed" / "tokenizer.json").read_text("utf-8"))
    assert [" ".join(pair) for pair in found["model"]["merges"]] == merges
    words = ["abc", "abd", "bc", "dab"]
    assert " | ".join(" ".join(pieces(after, word)) for word in words) == split


def test_bpe_that_cannot_be_cut(letters, fails, tmp_path):
    file = tmp_path / "sentences.txt"
    file.write_text("abc", "utf-8")
    options = ["--train", file, "--output", tmp_path / "trimmed", "--tokens"]
    assert " 8 must stay" in fails(trim, letters, *options, 7)
    prompts = letters / "config_sentence_transformers.json"
    alter(prompts, dict(prompts=dict(query="abc ")))  # the prompt's token needs ab
    assert " 10 must stay" in fails(trim, letters, *options, 9)
    alter(letters / "tokenizer.json", lambda content: content["model"].update(dropout=0.1))
    assert "dropout" in fails(trim, letters, *options, 10)
    assert not (tmp_path / "trimmed").exists()


@pytest.mark.slow
def test_bpe_of_real_sentences(shared_data, call_main, tmp_path):
    """From 30,000 tokens to 8,000: sentences without a removed token do not change."""
    lines = (shared_data / "unlabeled.txt").read_text("utf-8").splitlines()
    tokenizer, vocabulary, _ = byte_level(lines[:60_000], 30_000)
    assert len(vocabulary) == 30_000
    tokenizer.add_special_tokens(["<|endoftext|>"])
    names = dict(pad_token="<|endoftext|>", eos_token="<|endoftext|>")
    model = save(tokenizer, "qwen3", "Qwen2Tokenizer", tmp_path, **names)
    texts = lines[:5000]
    before, after, printed = run(call_main, model, texts, 8000, tmp_path)
    first, second = [[pieces(encoder, text) for text in texts] for encoder in (before, after)]
    kept = after.tokenizer.get_vocab().keys()
    same = [old == new for old, new in zip(first, second)]
    assert same == [kept >= {*row} for row in first]
    assert 0.5 < np.mean(same) < 1
    for text, row in zip(texts, second):
        assert after.tokenizer.convert_tokens_to_string(row) == text
    printed = cells(printed)
    assert [row["tokens"] for row in printed] == [30_008, 8000]
    means = [np.mean([len(row) for row in side]) for side in (first, second)]
    found = [row["tokens per sentence"] for row in printed]
    assert found == pytest.approx(means, abs=0.005)
    share = np.mean([piece in kept for row in first for piece in row])
    assert printed[1]["% of tokens kept"] == pytest.approx(100 * share, abs=0.005)


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
