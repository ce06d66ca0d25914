# SPDX-License-Identifier: MIT
"""Reduce a model's vocabulary to N tokens: those that your sentences use most.

In multilingual-e5-small, the embeddings of 250,000 tokens are four fifths of the weights. A word
whose token is removed is split into several, so that its sentence gets another vector
(results/multilingual.md).

    kept: special, added and unknown tokens; those of prompts; byte tokens; a token for each
    character of your sentences and of ASCII; then, up to N in all, your sentences' most frequent
    tokens, and the vocabulary's first

A character that your sentences lack may become unknown, and with WordPiece its whole word, unless
--all-characters is given. WordPiece (BERT, MPNet), Unigram (XLM-R, multilingual E5) and BPE
(RoBERTa, ModernBERT, Qwen3, Gemma) can be cut.

BPE builds a token by merging shorter ones, so a token stays only together with all pieces that it
is built of. If all tokens of a sentence stay, the sentence is still split into the same tokens.
BPE that writes unknown characters as bytes (all of the above) keeps the tokens of all bytes, and
nothing becomes unknown.

  python -m extras.trim my-encoder --train my-sentences.txt --tokens 20000 --output runs/trimmed
"""

import json
import re
import string
from itertools import pairwise
from pathlib import Path

import numpy as np
from torch import nn

from common import UserError, chunks, one_line_errors
from common import load_encoder, read_sentences, replacing, resolve_data, save_encoder
from common import positive_int, read_options, run_main, table


class Options:
    model: str  # folder, or name on the Hub
    train: str = None  # your sentences, or a .csv of triplets
    tokens: positive_int = 20_000  # how many to keep
    all_characters: bool = False  # also keep those that your sentences do not have
    output: str = "runs/trimmed"  # a new folder


def read_vocabulary(tokenizer):
    """tokenizer: the content of tokenizer.json -> {id: token}. Raises ValueError."""
    kind, vocabulary = tokenizer["model"]["type"], tokenizer["model"]["vocab"]
    if kind == "BPE":
        check_merges(tokenizer["model"])
    if kind in ("WordPiece", "BPE"):
        return {i: token for token, i in vocabulary.items()}
    if kind == "Unigram":
        if tokenizer["model"].get("unk_id") is None:
            raise ValueError("its tokenizer has no unknown token, which a smaller one needs")
        return {i: token for i, (token, _) in enumerate(vocabulary)}
    raise ValueError(f"its tokenizer is {kind}; only WordPiece, Unigram and BPE can be cut")


def check_merges(model):
    """Raise ValueError for a BPE whose tokens cannot be traced to the merges that form them."""
    if not model["merges"]:
        raise ValueError("its BPE tokenizer has no merges, so no token can be split")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise ValueError(f"its BPE tokenizer has {key} {model[key]!r}, which is not supported")


def pieces_of(model, tokens):
    """tokens: {id: token} -> {id: ids of the token and of all pieces that BPE merges into it}.

    BPE begins with characters, and merges the neighbors whose merge comes first in its list, until
    no merge is left. What it merges within a token does not depend on the text around. A token that
    no merges form, such as one of WordPiece or Unigram, has no pieces.
    """
    ids = {token: i for i, token in tokens.items()}
    ranks = {tuple(pair): rank for rank, pair in enumerate(model.get("merges", []))}
    pieces = {}
    for i, token in tokens.items():
        split = [*token]
        formed = {*split}
        while merges := [(ranks[p], at) for at, p in enumerate(pairwise(split)) if p in ranks]:
            _, at = min(merges)
            split[at : at + 2] = [split[at] + split[at + 1]]
            formed.add(split[at])
        pieces[i] = [i]
        if split == [token]:
            pieces[i] += [ids[piece] for piece in formed - {token}]
    return pieces


def needed(tokens, prefix, characters):
    """Yield the ids of tokens without which these characters cannot be written, and of bytes.

    tokens: {id: token}; prefix: marks a token inside a word, "" for Unigram. WordPiece takes the
    longest token first, so a character may need a longer token than its own.
    """
    known = set(tokens.values())
    for i, token in tokens.items():
        first = prefix if token.startswith(prefix) and token != prefix else ""
        text = token.removeprefix(first)
        spelled = [first + text[:1], *(prefix + character for character in text[1:])]
        # Its characters that no other token could write.
        alone = {c for c, other in zip(text, spelled) if other == token or other not in known}
        if alone & characters or token.startswith("<0x"):  # a byte of an unknown character
            yield i


def must_stay(encoder, tokenizer, tokens, counts, all_characters):
    """-> ids of special, added and unknown tokens, and of those of prompts, characters, bytes."""
    kept = {token["id"] for token in tokenizer["added_tokens"]}
    unknown = (tokenizer["model"].get("unk_token"), tokenizer["model"].get("unk_id"))
    kept.update(i for i, token in tokens.items() if token == unknown[0] or i == unknown[1])
    # RoBERTa and its kin count positions from the padding token's id, so it stays the same.
    embeddings = getattr(encoder.model, "embeddings", None)
    kept.update(range(getattr(embeddings, "padding_idx", -1) + 1))
    for text in filter(None, encoder.prompts.values()):
        kept.update(encoder.tokenizer(text).input_ids)
    steps = json.dumps([tokenizer["normalizer"], tokenizer["pre_tokenizer"]])
    is_byte_level = '"ByteLevel"' in steps  # the characters of its tokens are the 256 bytes
    spelled = tokens.keys() & np.flatnonzero(counts)
    if all_characters or is_byte_level:
        spelled = tokens
    characters = set(string.printable).union(*(tokens[i] for i in spelled))
    prefix = tokenizer["model"].get("continuing_subword_prefix") or ""
    return kept.union(needed(tokens, prefix, characters))


def choose(encoder, tokenizer, tokens, counts, args):
    """-> {old id: new id}, in the old order. counts: of ids in the sentences. UserError."""
    pieces = pieces_of(tokenizer["model"], tokens)
    kept = must_stay(encoder, tokenizer, tokens, counts, args.all_characters)
    kept.update(*[pieces.get(i, [i]) for i in kept])
    if args.tokens < len(kept):
        raise UserError(f"--tokens {args.tokens} is too few: {len(kept)} must stay; give as many")
    for i in np.argsort(-counts, kind="stable"):
        missing = {*pieces.get(i, [])} - kept
        if len(kept) + len(missing) <= args.tokens:
            kept |= missing
    return {int(old): new for new, old in enumerate(sorted(kept))}


def cut_tokenizer(tokenizer, tokens, new):
    """Keep the ids of `new`, {old id: new id}: in vocabulary, added tokens, template. In place."""
    model = tokenizer["model"]
    if model["type"] == "Unigram":
        model["vocab"] = [model["vocab"][old] for old in new if old in tokens]
        model["unk_id"] = new[model["unk_id"]]
    else:
        model["vocab"] = {tokens[old]: new[old] for old in new if old in tokens}
    if model["type"] == "BPE":
        known = model["vocab"].keys()
        model["merges"] = [pair for pair in model["merges"] if {*pair, "".join(pair)} <= known]
    for token in tokenizer["added_tokens"]:
        token["id"] = new[token["id"]]
    template = tokenizer["post_processor"] or {}
    for step in (template, *template.get("processors", [])):
        for special in step.get("special_tokens", {}).values():
            special["ids"] = [new[old] for old in special["ids"]]
        for name in {"cls", "sep"} & step.keys():  # of older templates: [token, id]
            step[name][1] = new[step[name][1]]
    tokenizer["padding"] = tokenizer["truncation"] = None  # each script sets its own


def cut_files(files, tokenizer, new):
    """Put the smaller tokenizer into encoder.files; other files with old ids go. In place."""
    for name in [*files]:
        if re.fullmatch(r"vocab.*|merges\.txt|added_tokens\.json|.*\.(model|spm|codes)", name):
            del files[name]
    settings = json.loads(files["tokenizer_config.json"])
    if added := settings.get("added_tokens_decoder"):  # an empty one would replace tokenizer.json's
        settings["added_tokens_decoder"] = {str(new[int(i)]): added[i] for i in added}
    files["tokenizer_config.json"] = json.dumps(settings, indent=2).encode()
    files["tokenizer.json"] = json.dumps(tokenizer).encode()


def cut_model(model, new):
    """Keep the rows of `new` in the word embeddings [V, D]; renumber the configuration's ids."""
    embeddings = model.get_input_embeddings()
    embeddings.weight = nn.Parameter(embeddings.weight.detach()[list(new)])
    embeddings.num_embeddings = model.config.vocab_size = len(new)
    settings = model.config.to_dict()
    for key in [key for key in settings if key.endswith("_token_id")]:
        value = settings[key]
        if isinstance(value, list):  # several tokens may end a text
            setattr(model.config, key, [new[old] for old in value if old in new])
        elif value is not None:
            setattr(model.config, key, new.get(value))


def all_ids(encoder, sentences):
    """The ids of all tokens of the sentences, also of those that the model is too short for."""
    ids = []
    for chunk in chunks(sentences, 10_000):
        texts = [(encoder.prompt or "") + text for text in chunk]
        ids += [np.array(tokens, np.int32) for tokens in encoder.tokenizer(texts).input_ids]
    return np.concatenate(ids)


class Count(int):
    """A number that table() prints as it is."""

    def __format__(self, _):
        return str(int(self))


def row_of(encoder, ids, sentences):
    """A row of the table. ids: of all tokens of the sentences."""
    vocabulary = encoder.tokenizer.get_vocab()
    model = encoder.tokenizer.backend_tokenizer.model
    unknown = getattr(model, "unk_token", encoder.tokenizer.unk_token)  # None in byte-level BPE
    return {
        "tokens": Count(encoder.model.config.vocab_size),
        "one-character tokens": Count(sum(len(x.removeprefix("##")) == 1 for x in vocabulary)),
        "unknown": Count(np.sum(ids == vocabulary.get(unknown, -1))),
        "MB, fp32": sum(value.numel() for value in encoder.parameters()) * 4 / 1e6,
        "tokens per sentence": len(ids) / len(sentences),
    }


def main():
    args = read_options(Options, __doc__)
    if not args.train:
        raise UserError("give --train, a file of your sentences")
    if Path(args.output).exists():
        raise UserError(f"{args.output}: exists already; choose another --output")
    sentences = read_sentences(resolve_data(args.train))
    encoder = load_encoder(args.model)
    with one_line_errors(args.model, "see --help"), replacing(Path(args.output)) as folder:
        tokenizer = json.loads(encoder.tokenizer.backend_tokenizer.to_str())
        tokens = read_vocabulary(tokenizer)
        ids = all_ids(encoder, sentences)
        rows = {"before": row_of(encoder, ids, sentences)}
        counts = np.bincount(ids, minlength=encoder.model.config.vocab_size)
        new = choose(encoder, tokenizer, tokens, counts, args)
        cut_tokenizer(tokenizer, tokens, new)
        cut_model(encoder.model, new)
        cut_files(encoder.files, tokenizer, new)
        save_encoder(encoder, folder)
    encoder = load_encoder(args.output)
    rows["after"] = row_of(encoder, all_ids(encoder, sentences), sentences)
    rows["after"]["% of tokens kept"] = 100 * counts[list(new)].sum() / len(ids)
    print(table(rows))


if __name__ == "__main__":
    run_main(main)
