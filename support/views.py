"""ConGen's second views: every sentence again in other words (Table 6 of the paper).

They are given (--pairs: back-translations, translations or paraphrases), or made from the sentence
alone (--augment), afresh for every step.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers

from common import DataError, read_lines, read_pairs, resolve
from support.command_line import training_sentences
from support.encoder import load_encoder, load_pretrained

DELETION_RATE = 0.1  # of word deletion, Table 6
CROP_RATE = 0.1  # Table 6
SYNONYM_RATE = 0.1  # Table 6 gives none
MASK_RATE = 0.15  # Table 6
SHORTEST_REPLACED = 3  # letters; as a noun, WordNet takes the word "a" for an angstrom
PARTS_OF_SPEECH = ("noun", "verb", "adj", "adv")  # the files of WordNet's database


def add_view_options(parser):
    """--pairs, --augment, --wordnet, --masked-lm."""
    group = parser.add_argument_group("second views (Table 6)")
    add = group.add_argument
    add(
        "--pairs",
        help="both views: TSV of two columns, the second with back-translations, translations or "
        "paraphrases of the first; replaces --train and --augment",
    )
    ways = (*WORD_CHANGES, "synonym", "mlm")
    add("--augment", choices=ways, default="word-deletion", help="%(default)s")
    add(
        "--wordnet",
        default="/usr/share/wordnet",
        help="for synonym: folder of WordNet 3's database; %(default)s (Debian: wordnet-base)",
    )
    add(
        "--masked-lm",
        default="bert-base-uncased",
        help="for mlm: folder or Hub name of a masked language model; %(default)s",
    )
    return group


def load_views(args):
    """What the options name -> GivenViews or MadeViews. Raises DataError."""
    if args.pairs:
        return GivenViews(*read_pairs(args.pairs, ("first view", "second view")))
    return MadeViews(training_sentences(args.train), make_function(args))


class GivenViews:
    """Both views from a file: two lists of n str."""

    def __init__(self, sentences, others):
        self.sentences = sentences
        self.others = others

    def second(self, rows, seed):
        """Row numbers [N] -> list of N str. The seed has no effect."""
        return [self.others[row] for row in rows]


class MadeViews:
    """Second views made from the sentences, a list of n str.

    make(list of N str, numpy Generator) -> list of N str.
    """

    def __init__(self, sentences, make):
        self.sentences = sentences
        self.make = make

    def second(self, rows, seed):
        """Row numbers [N] -> list of N str, which depend on the seed, an int or a list of ints."""
        texts = [self.sentences[row] for row in rows]
        return self.make(texts, np.random.default_rng(seed))


def make_function(args):
    """The function that makes --augment's views. Raises DataError."""
    if args.augment == "mlm":
        model, tokenizer = load_masked_lm(args.masked_lm, args.device)
        return partial(fill_masks, model=model, tokenizer=tokenizer)
    if args.augment == "synonym":
        change = partial(replace_synonyms, synonyms=read_wordnet(args.wordnet))
    else:
        change = WORD_CHANGES[args.augment]
    return partial(change_words, change=change)


# --------------------------------------------------------------------------------------------------
# Changes of words: functions of a list of str and a numpy Generator
# --------------------------------------------------------------------------------------------------


def change_words(sentences, random, change):
    """Change the words between blanks; a sentence left without words stays as it is."""
    views = []
    for sentence in sentences:
        words = change(sentence.split(), random)
        views.append(" ".join(words) or sentence)
    return views


def delete_words(words, random):
    """Delete each word with probability 10 %."""
    return [word for word in words if random.random() >= DELETION_RATE]


def delete_one(words, random):
    """Delete one word."""
    position = random.integers(len(words))
    return words[:position] + words[position + 1 :]


def crop(words, random):
    """Keep a span of 90 % of the words."""
    removed = share(CROP_RATE, words)
    start = random.integers(removed + 1)
    return words[start : start + len(words) - removed]


def replace_synonyms(words, random, synonyms):
    """Replace 10 % of the words, as far as `synonyms` knows them; see read_wordnet."""
    known = []
    for position, word in enumerate(words):
        if len(word) >= SHORTEST_REPLACED and synonyms.get(word.lower()):
            known.append(position)
    words = list(words)
    for position in random.permutation(known)[: share(SYNONYM_RATE, words)]:
        words[position] = random.choice(synonyms[words[position].lower()])
    return words


def share(rate, words):
    """How many words a rate means, one at least."""
    return max(1, round(rate * len(words)))


WORD_CHANGES = {"word-deletion": delete_words, "delete-one": delete_one, "crop": crop}


# --------------------------------------------------------------------------------------------------
# WordNet
# --------------------------------------------------------------------------------------------------


def read_wordnet(folder):
    """WordNet 3's database folder (index.noun, data.noun, ...) -> {word: its synonyms}.

    The synonyms are the other words of the word's first sense, as the part of speech of which
    WordNet has seen the most senses in texts. A word that it has seen in no text has none.
    Raises DataError.
    """
    synonyms = {}
    most_seen = {}
    for part in PARTS_OF_SPEECH:
        synsets = read_synsets(Path(folder) / f"data.{part}")
        for word, seen, words in read_index(Path(folder) / f"index.{part}", synsets):
            synonyms.setdefault(word, [])
            if seen > most_seen.get(word, 0):
                most_seen[word] = seen
                synonyms[word] = [other for other in words if other.lower() != word]
    return synonyms


def read_synsets(path):
    """data.noun and its like -> {byte offset: words of the synset}. Raises DataError.

    A line: offset, file, part of speech, number of words, then each word and a digit, ...
    """
    synsets = {}
    for line, text in read_entries(path):
        try:
            offset, _, _, count, *fields = text.split()
            names = fields[: 2 * int(count, 16) : 2]
        except ValueError:
            raise not_wordnet(path, line, text) from None
        # An adjective may end in its position in a sentence: "large(p)".
        synsets[offset] = [name.split("(")[0].replace("_", " ") for name in names]
    return synsets


def read_index(path, synsets):
    """Yield (word, number of senses seen in texts, words of its first sense) of index.noun etc.

    A line: word, part of speech, number of senses, number of kinds of pointers, these kinds, number
    of senses, number of senses seen, offsets by frequency. Raises DataError.
    """
    for line, text in read_entries(path):
        try:
            word, _, _, kinds, *fields = text.split()
            _, seen, first, *_ = fields[int(kinds) :]
            entry = word, int(seen), synsets[first]
        except (KeyError, ValueError):
            raise not_wordnet(path, line, text) from None
        yield entry


def read_entries(path):
    """Yield (line number, text) without the licence, whose lines begin with a blank."""
    for line, text in read_lines(path):
        if not text.startswith(" "):
            yield line, text


def not_wordnet(path, line, text):
    return DataError(f"{path}:{line}: {text[:40]!r}, expected a line of WordNet 3's database")


# --------------------------------------------------------------------------------------------------
# Masked language model
# --------------------------------------------------------------------------------------------------


def load_masked_lm(name, device):
    """A folder or a name on the Hugging Face Hub -> (model, tokenizer). Raises DataError."""
    tokenizer = load_encoder(name).tokenizer  # this also checks that the folder is complete
    folder = resolve(name, model=True)
    load = load_pretrained(name, folder)
    model, report = load(transformers.AutoModelForMaskedLM, output_loading_info=True)
    expected = "expected a masked language model"
    if report["missing_keys"]:
        missing = min(report["missing_keys"])
        raise DataError(f"{name}: its weights lack {missing}, {expected}")
    if not tokenizer.mask_token:
        raise DataError(f"{name}: its tokenizer lacks a mask token, {expected}")
    return model.to(device).eval(), tokenizer


@torch.no_grad()
def fill_masks(sentences, random, model, tokenizer):
    """Mask each token with probability 15 %, then put the likeliest token in its place."""
    batch = tokenizer(
        sentences,
        padding=True,
        truncation=True,
        return_tensors="pt",
        return_special_tokens_mask=True,
    )
    ids = batch["input_ids"]  # [N, L]
    special = batch.pop("special_tokens_mask").bool()  # [CLS], [SEP] and padding
    masked = torch.from_numpy(random.random(ids.shape) < MASK_RATE) & ~special
    batch["input_ids"] = ids.masked_fill(masked, tokenizer.mask_token_id)
    likeliest = model(**batch.to(model.device)).logits.argmax(dim=-1).cpu()  # [N, L]
    filled = tokenizer.batch_decode(torch.where(masked, likeliest, ids), skip_special_tokens=True)
    return [text.strip() or sentence for text, sentence in zip(filled, sentences)]
