# SPDX-License-Identifier: MIT
"""Second views for ConGen by the ways of Table 6: translate, crop, delete-one, synonym, mlm.

Writes a file for congen.py --pairs: on each line the sentence, a tab, and the sentence

    translate   translated into another language by --there, and back by --back
    crop        cut to a span of 90 % of its words
    delete-one  without one of its words
    synonym     with 10 % of its words replaced by synonyms from WordNet 3's database
    mlm         with 15 % of its tokens masked, and filled in by a masked language model

A sentence of which nothing would be left is its own second view. Words and tokens are drawn from
--seed. In such a file, a sentence has one second view for all epochs, whereas congen.py's word
deletion draws anew at every step. Join the files of three seeds for three second views.

translate is the paper's own way, by Google's translator. Here, models translate that transformers'
AutoModelForSeq2SeqLM loads (docs/tables/congen.sh has mBART); the defaults need `pip install
sentencepiece sacremoses`. The same command continues an interrupted one.

  python -m extras.views translate --train my-sentences.txt --output pairs.tsv
"""

import hashlib
import os
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import transformers
from tqdm import tqdm

from common import BAR, UserError, chunks, one_line_errors
from common import read_lines, read_sentences, resolve_data, resolve_model
from common import in_range, positive_int, read_options, run_main

CROP_RATE = 0.1  # Table 6
SYNONYM_RATE = 0.1  # Table 6 gives none
MASK_RATE = 0.15  # Table 6
SHORTEST_REPLACED = 3  # letters; as a noun, WordNet takes the word "a" for an angstrom
WORDNET = "WordNet 3's database has index.noun, data.noun, ... (Debian: wordnet-base)"
LONGEST = 128  # tokens of a sentence that are translated
CHUNK = 8  # batches that are sorted by length together, and kept together


class Options:
    way: Literal["translate", "crop", "delete-one", "synonym", "mlm"]  # see above
    train: str = "nli_for_simcse.csv"  # as for congen.py
    output: str = "pairs.tsv"  # a new file of pairs
    there: str = "Helsinki-NLP/opus-mt-en-de"  # for translate: folder, or name on the Hub
    back: str = "Helsinki-NLP/opus-mt-de-en"  # for translate: folder, or name on the Hub
    beams: positive_int = 1  # for translate; 1 is greedy
    batch_size: positive_int = 64  # of a model
    wordnet: str = "/usr/share/wordnet"  # for synonym: folder of WordNet 3's database
    masked_lm: str = "bert-base-uncased"  # for mlm: folder, or name on the Hub
    seed: in_range(int, 0) = 0  # of words and tokens


def delete_one(words, random):
    """Delete one word of n, n >= 1. random: a numpy Generator."""
    position = random.integers(len(words))
    return words[:position] + words[position + 1 :]


def crop(words, random):
    """Keep a span of 90 % of the words."""
    removed = share(CROP_RATE, words)
    start = random.integers(removed + 1)
    return words[start : start + len(words) - removed]


def replace_synonyms(words, random, synonyms):
    """Replace 10 % of the words, as far as `synonyms` has them; see read_wordnet()."""
    known = []
    for position, word in enumerate(words):
        if len(word) >= SHORTEST_REPLACED and synonyms.get(word.lower()):
            known.append(position)
    words = list(words)
    for position in random.permutation(known)[: share(SYNONYM_RATE, words)]:
        words[position] = random.choice(synonyms[words[position].lower()])
    return words


def share(rate, words):
    """How many words a rate means, at least one."""
    return max(1, round(rate * len(words)))


def change_words(sentences, random, change):
    """Apply change(words, random) to each sentence: list of n str -> list of n str."""
    return [" ".join(change(sentence.split(), random)) for sentence in sentences]


def read_wordnet(folder):
    """WordNet 3's database folder -> {word: its synonyms, a list of str}. Raises UserError.

    The synonyms are the other words of the word's first sense, as the part of speech of which
    WordNet has seen the most senses in texts. A word that it has seen in no text has none.
    """
    synonyms = {}
    most_seen = {}
    for kind in ("noun", "verb", "adj", "adv"):
        synsets = dict(read_lines(Path(folder) / f"data.{kind}", read_synset, WORDNET))
        parse = partial(read_index, synsets=synsets)
        for word, seen, words in read_lines(Path(folder) / f"index.{kind}", parse, WORDNET):
            if seen > most_seen.get(word, 0):
                most_seen[word] = seen
                synonyms[word] = [other for other in words if other.lower() != word]
    return synonyms


def read_synset(text):
    """A line of data.noun etc. -> (byte offset, words); None for a line of the licence.

    The line has: offset, file, part of speech, number of words, then each word and a digit, ...
    """
    if text.startswith(" "):
        return None
    offset, _, _, count, *fields = text.split()
    names = fields[: 2 * int(count, 16) : 2]
    # An adjective may end in its position in a sentence: "large(p)".
    return offset, [name.split("(")[0].replace("_", " ") for name in names]


def read_index(text, synsets):
    """A line of index.noun etc. -> (word, number of its senses seen in texts, words of the first).

    The line has: word, part of speech, number of senses, number of kinds of pointers, these kinds,
    number of senses, number of senses seen, offsets by frequency. None for a line of the licence.
    """
    if text.startswith(" "):
        return None
    word, _, _, kinds, *fields = text.split()
    _, seen, first, *_ = fields[int(kinds) :]
    return word, int(seen), synsets[first]


def load_model(name, kind, form):
    """A folder or a name on the Hub, a class of transformers -> model, tokenizer, or UserError."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with one_line_errors(name, form):
        folder = resolve_model(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        options = dict(dtype=torch.float32, output_loading_info=True, trust_remote_code=False)
        model, report = kind.from_pretrained(folder, **options)
        if report["missing_keys"]:
            raise ValueError(f"its weights lack {min(report['missing_keys'])}")
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


@torch.no_grad()
def fill_masks(sentences, random, model, tokenizer):
    """Mask each token with probability 15 %, then put the likeliest token in its place."""
    options = dict(padding=True, truncation=True, return_special_tokens_mask=True)
    batch = tokenizer(sentences, return_tensors="pt", **options)
    ids = batch["input_ids"]  # [N, L]
    special = batch.pop("special_tokens_mask").bool()  # [CLS], [SEP] and padding
    masked = torch.from_numpy(random.random(ids.shape) < MASK_RATE) & ~special
    batch["input_ids"] = ids.masked_fill(masked, tokenizer.mask_token_id)
    likeliest = model(**batch.to(model.device)).logits.argmax(dim=-1).cpu()  # [N, L]
    return tokenizer.batch_decode(torch.where(masked, likeliest, ids), skip_special_tokens=True)


def load_translator(name, beams, batch_size):
    """A folder or a name on the Hub -> translate() by this model. Raises UserError."""
    form = "it must be a translator, with all weights; Marian's tokenizer needs sentencepiece"
    model, tokenizer = load_model(name, transformers.AutoModelForSeq2SeqLM, form)
    return partial(translate, model, tokenizer, beams, batch_size)


def translate(model, tokenizer, beams, batch_size, texts):
    """list of n str -> list of n str, in their order. beams: width of the search; 1 is greedy."""
    translations = {"": ""}
    order = sorted(filter(None, dict.fromkeys(texts)), key=len)  # little padding
    for chunk in chunks(order, batch_size):
        cut = dict(padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
        batch = tokenizer(chunk, **cut).to(model.device)
        limit = 2 * batch["input_ids"].shape[1] + 10  # for a translation that repeats itself
        ids = model.generate(**batch, num_beams=beams, do_sample=False, max_new_tokens=limit)
        translations |= zip(chunk, tokenizer.batch_decode(ids, skip_special_tokens=True))
    return [translations[text].strip() for text in texts]


def make_views(args):
    """The function that WAY names: (list of n str, numpy Generator) -> list of n str."""
    if args.way == "translate":
        there = load_translator(args.there, args.beams, args.batch_size)
        back = load_translator(args.back, args.beams, args.batch_size)
        return lambda sentences, random: back(there(sentences))
    if args.way == "mlm":
        form = "it must be a masked language model, with all weights and a mask token"
        model, tokenizer = load_model(args.masked_lm, transformers.AutoModelForMaskedLM, form)
        if not tokenizer.mask_token:
            raise UserError(f"{args.masked_lm}: it lacks a mask token; {form}")
        return partial(fill_masks, model=model, tokenizer=tokenizer)
    change = crop if args.way == "crop" else delete_one
    if args.way == "synonym":
        change = partial(replace_synonyms, synonyms=read_wordnet(args.wordnet))
    return partial(change_words, change=change)


def write_views(args, sentences, make):
    """Write --output, chunk by chunk, under a hidden name until it is complete.

    That name has a hash of all that the lines depend on, so that the same command finds it.
    """
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(repr((vars(args), sentences)).encode()).hexdigest()[:16]
    unfinished = output.with_name(f".{output.name}.{digest}")
    size = args.batch_size * (CHUNK if args.way == "translate" else 1)
    with open(unfinished, "a+b") as file:
        file.seek(0)
        lines = file.readlines()
        done = sum(line.endswith(b"\n") for line in lines) // size * size  # of whole chunks
        file.truncate(sum(map(len, lines[:done])))
        bar = tqdm(total=len(sentences), initial=done, desc=args.way, unit=" sentences", **BAR)
        for start in range(done, len(sentences), size):
            chunk = sentences[start : start + size]
            views = make(chunk, np.random.default_rng([args.seed, start]))
            for sentence, view in zip(chunk, views):
                file.write(f"{sentence}\t{' '.join(view.split()) or sentence}\n".encode())
            file.flush()
            bar.update(len(chunk))
        bar.close()
    os.replace(unfinished, output)


def main():
    args = read_options(Options, __doc__)
    if Path(args.output).exists():
        raise UserError(f"{args.output}: exists already; choose another --output")
    texts = read_sentences(resolve_data(args.train))
    sentences = [" ".join(text.split()) for text in texts]
    write_views(args, sentences, make_views(args))


if __name__ == "__main__":
    run_main(main)
