"""Cut a model's word embeddings to the N tokens that your sentences use most.

Worth it where they are most of the model: a multilingual one has 250,000 tokens, four fifths of its
weights. No vector changes. A word that is no longer one token becomes several, so texts of another
kind than FILE lose most (results/how-many-megabytes.md).

    kept: special and added tokens; single characters, as the first of a word and inside it; tokens
    with a character that is not itself a token; and, up to N in all, the most frequent in FILE

So every text that could be written before still can. WordPiece (BERT, MPNet) and Unigram (XLM-R,
multilingual E5) can be cut; BPE cannot, since its tokens are merges of other tokens.

  python -m extras.trim my-encoder --train my-sentences.txt --tokens 20000 --output runs/trimmed
  python ckd.py --objective kd --teacher my-encoder --student runs/trimmed --student-layers 1,4,5
"""

import json
from pathlib import Path

import numpy as np
from torch import nn

from common import ArgumentParser, Tokens, UserError, load_encoder, number, one_line_errors
from common import read_sentences, run_main, save_encoder, table


def read_vocabulary(tokenizer):
    """tokenizer: that of tokenizer.json -> its tokens in the order of their ids. ValueError."""
    kind, vocabulary = tokenizer["model"]["type"], tokenizer["model"]["vocab"]
    if kind == "WordPiece":
        return sorted(vocabulary, key=vocabulary.get)
    if kind == "Unigram":
        return [token for token, _ in vocabulary]
    raise ValueError(f"its tokenizer is {kind}; only WordPiece and Unigram can be cut")


def needed(tokens, prefix):
    """Yield the ids without which some text could not be written. prefix: of a token in a word."""
    known = set(tokens)
    for i, token in enumerate(tokens):
        inside = prefix and token.startswith(prefix) and token != prefix
        first = prefix if inside else ""
        text = token.removeprefix(first)
        characters = [first + text[:1], *(prefix + character for character in text[1:])]
        is_byte = token.startswith("<0x")  # of a character that Unigram does not know
        if len(text) == 1 or is_byte or not known.issuperset(characters):
            yield i


def choose(tokenizer, tokens, counts, amount):
    """-> {old id: new id}, in the old order. counts: of ids in the sentences. ValueError."""
    kept = {token["id"] for token in tokenizer["added_tokens"]}
    kept.update(needed(tokens, tokenizer["model"].get("continuing_subword_prefix", "")))
    if amount < len(kept):
        raise ValueError(f"special tokens and characters alone are {len(kept)}; raise --tokens")
    frequent = [i for i in np.argsort(-counts, kind="stable")[: len(tokens)] if i not in kept]
    kept.update(frequent[: amount - len(kept)])
    return {int(old): new for new, old in enumerate(sorted(kept))}


def cut_tokenizer(tokenizer, tokens, new):
    """Keep the ids of `new`, {old id: new id}: in vocabulary, added tokens, template. In place."""
    model = tokenizer["model"]
    template = tokenizer["post_processor"] or {}
    if model["type"] == "WordPiece":
        model["vocab"] = {tokens[old]: new[old] for old in new if old < len(tokens)}
    else:
        model["vocab"] = [model["vocab"][old] for old in new if old < len(tokens)]
        model["unk_id"] = new.get(model["unk_id"])
    for token in tokenizer["added_tokens"]:
        token["id"] = new[token["id"]]
    for special in template.get("special_tokens", {}).values():
        special["ids"] = [new[old] for old in special["ids"]]
    for name in {"cls", "sep"} & template.keys():  # of older templates: [token, id]
        template[name][1] = new[template[name][1]]
    tokenizer["padding"] = tokenizer["truncation"] = None  # the scripts state their own


def cut_model(model, new):
    """Keep the rows of `new` in the word embeddings [V, D]; renumber the configuration's ids."""
    embeddings = model.get_input_embeddings()
    embeddings.weight = nn.Parameter(embeddings.weight.detach()[list(new)])
    embeddings.num_embeddings = model.config.vocab_size = len(new)
    for key, value in model.config.to_dict().items():
        if key.endswith("_token_id") and value in new:
            setattr(model.config, key, new[value])


def row(encoder, ids, sentences):
    """A row of the table. ids: of all tokens of the sentences."""
    size = sum(value.numel() for value in encoder.parameters()) * 4 / 1e6
    known = encoder.model.config.vocab_size
    return {"tokens": known, "MB, fp32": size, "tokens per sentence": len(ids) / len(sentences)}


def main():
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or Hub name")
    add("--train", metavar="FILE", required=True, help="your sentences, or a .csv of triplets")
    add("--tokens", metavar="N", required=True, type=number(int, 1), help="how many are kept")
    add("--output", required=True, help="a new folder")
    args = parser.parse_args()
    if Path(args.output).exists():
        raise UserError(f"{args.output}: exists already; choose another --output")
    sentences = read_sentences(args.train)
    encoder = load_encoder(args.model)
    ids = Tokens(encoder, sentences).ids
    rows = {"before": row(encoder, ids, sentences)}
    with one_line_errors(args.model, "see --help"):
        tokenizer = json.loads(encoder.tokenizer.backend_tokenizer.to_str())
        tokens = read_vocabulary(tokenizer)
        counts = np.bincount(ids, minlength=encoder.model.config.vocab_size)
        new = choose(tokenizer, tokens, counts, args.tokens)
    cut_tokenizer(tokenizer, tokens, new)
    cut_model(encoder.model, new)
    save_encoder(encoder, args.output)
    Path(args.output, "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    encoder = load_encoder(args.output)
    rows["after"] = row(encoder, Tokens(encoder, sentences).ids, sentences)
    rows["after"]["% that stay whole"] = 100 * counts[list(new)].sum() / len(ids)
    print(table(rows))


if __name__ == "__main__":
    run_main(main)
