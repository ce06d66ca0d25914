"""Second views for ConGen by the other ways of Table 6: crop, delete-one, synonym, mlm.

Writes a file for congen.py --pairs: on each line the sentence, a tab, and the sentence with

    crop        a span of 90 % of its words
    delete-one  one word less
    synonym     10 % of its words replaced by synonyms from WordNet 3's database
    mlm         15 % of its tokens masked, and filled in by a masked language model

A sentence that would have no words left is its own second view. Words and tokens are drawn from
--seed. In such a file, a sentence has one second view for all epochs, whereas congen.py's word
deletion draws anew at every step, so that the student sees more wordings. The joined files of three
seeds, trained on for a third of the epochs, give three of them.

  python -m extras.views crop --train sentences.txt --output pairs.tsv
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from tqdm import tqdm

from common import ArgumentParser, UserError, number, one_line_errors, run_main
from common import load_encoder, read_rows, read_sentences, replace_file, resolve_model

CROP_RATE = 0.1  # Table 6
SYNONYM_RATE = 0.1  # Table 6 gives none
MASK_RATE = 0.15  # Table 6
SHORTEST_REPLACED = 3  # letters; as a noun, WordNet takes the word "a" for an angstrom
WORDNET = "WordNet 3's database has index.noun, data.noun, ... (Debian: wordnet-base)"
BATCH = 64  # sentences of which the masked language model fills the masks at a time


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
    views = [" ".join(change(sentence.split(), random)) for sentence in sentences]
    return [view or sentence for view, sentence in zip(views, sentences)]


def read_wordnet(folder):
    """WordNet 3's database folder -> {word: its synonyms, a list of str}. Raises UserError.

    The synonyms are the other words of the word's first sense, as the part of speech of which
    WordNet has seen the most senses in texts. A word that it has seen in no text has none.
    """
    synonyms = {}
    most_seen = {}
    for part in ("noun", "verb", "adj", "adv"):
        synsets = dict(read_rows(Path(folder) / f"data.{part}", read_synset, WORDNET))
        parse = partial(read_index, synsets=synsets)
        entries = read_rows(Path(folder) / f"index.{part}", parse, WORDNET)
        for word, seen, words in entries:
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


def load_masked_lm(name):
    """A folder or a name on the Hub -> (model, tokenizer). Raises UserError."""
    tokenizer = load_encoder(name).tokenizer
    with one_line_errors(
        name, "it must be a masked language model, with all weights and a mask token"
    ):
        load = transformers.AutoModelForMaskedLM.from_pretrained
        folder = resolve_model(name)
        model, report = load(folder, output_loading_info=True, trust_remote_code=False)
        if report["missing_keys"] or not tokenizer.mask_token:
            raise ValueError(f"it lacks {min(report['missing_keys'], default='a mask token')}")
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
    filled = tokenizer.batch_decode(torch.where(masked, likeliest, ids), skip_special_tokens=True)
    return [text.strip() or sentence for text, sentence in zip(filled, sentences)]


def make_views(args):
    """The function that WAY names: (list of n str, numpy Generator) -> list of n str."""
    if args.way == "mlm":
        model, tokenizer = load_masked_lm(args.masked_lm)
        return partial(fill_masks, model=model, tokenizer=tokenizer)
    change = crop if args.way == "crop" else delete_one
    if args.way == "synonym":
        change = partial(replace_synonyms, synonyms=read_wordnet(args.wordnet))
    return partial(change_words, change=change)


def parse_args():
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("way", choices=("crop", "delete-one", "synonym", "mlm"))
    add("--train", default="nli_for_simcse.csv", help="as for congen.py (default: %(default)s)")
    add("--output", required=True, help="a new file of pairs")
    folder = "for synonym: folder of WordNet 3's database (default: %(default)s)"
    add("--wordnet", default="/usr/share/wordnet", help=folder)
    model = "for mlm: folder or Hub name of a masked language model (default: %(default)s)"
    add("--masked-lm", default="bert-base-uncased", help=model)
    add("--seed", type=number(int, 0), default=0, help="(default: %(default)s)")
    return parser.parse_args()


def main():
    args = parse_args()
    if Path(args.output).exists():
        raise UserError(f"{args.output}: exists already; choose another --output")
    sentences = [" ".join(text.split()) for text in read_sentences(args.train)]
    make = make_views(args)
    random = np.random.default_rng(args.seed)
    lines = []
    for start in tqdm(range(0, len(sentences), BATCH), args.way):
        part = sentences[start : start + BATCH]
        lines += [f"{first}\t{second}\n" for first, second in zip(part, make(part, random))]
    replace_file(Path(args.output), lambda new: new.write_text("".join(lines), "utf-8"))


if __name__ == "__main__":
    run_main(main)
