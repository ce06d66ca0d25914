# SPDX-License-Identifier: MIT
"""Is a model's folder read right? Compare its vectors with those of sentence-transformers.

Both embed thirteen texts: too long ones, capitals, other scripts, texts without a letter, ... A row
has the lowest cosine of a text's two vectors: one row for what the folder does by default and, if
it has prompts, one without a prompt and one for each of them. If a cosine is below 0.9999, the
last line names the text, and the exit status is 2. It is 2, too, if the vector of a text changes
with the padding beside it, or if the tokenizer does not add a token that its settings ask for. Of
a classifier, the encoder is compared, and the logits of pairs, which dse.py reads, are only tried
beside padding.

  python -m extras.check runs/ckd sentence-transformers/all-MiniLM-L6-v2
"""

import json

import torch

import dse
from common import OTHER_WAY, UserError, embed_texts, encode, one_line_errors, tokenize
from common import read_json, read_options, resolve_model, run_main
from eval_sts import load

LOWEST = 0.9999  # by rounding alone, two programs differ by 1e-6
TEXTS = (
    "A man plays the guitar.",
    "WHERE IS THE STATION? NASA, McDonald",
    "café naïve Straße ÅNGSTRÖM ﬁne",  # accents, and a ligature
    "Собака бежит по снегу. Η γάτα κοιμάται.",
    "東京は日本の首都です。 대한민국 北京欢迎你",
    "القط ينام على الأريكة हिन्दी में लिखा ภาษาไทย",
    "one\ttab, two  spaces,\na new line\r\nand another ",
    "x",
    "...",
    "🙂👩‍👩‍👧🇫🇷",
    "3.14 + 2 = 5,14 € <b>&amp;</b> [MASK] user@example.com",
    " ".join(f"word{i}" for i in range(300)),
    "longer than every maximum of tokens " * 2000,
)
ROUNDING = 1e-3  # the largest relative difference beside padding
LONGER = "b c d e f g h"  # beside which the text "a" is padded


class Options:
    models: list  # folders, or names on the Hub


def load_other(name):
    """The model as sentence-transformers loads it. Raises UserError."""
    folder = resolve_model(name)
    if "sentence_distillation." in str(read_json(folder / "modules.json", [])):
        raise UserError(f"{name}: sentence-transformers does not have its pooling")
    with one_line_errors("sentence-transformers", "pip install -r requirements-dev.txt"):
        from sentence_transformers import SentenceTransformer
    with one_line_errors(name, "sentence-transformers must be able to load it"):
        return SentenceTransformer(str(folder), device="cpu")


@torch.no_grad()
def changes_with_padding(encoder, embed, short="a", longer=LONGER):
    """True if the vector of `short` alone is another than beside a longer text, as in FNet."""
    alone, padded = [embed_texts(embed, encoder, texts)[0] for texts in ([short], [short, longer])]
    return not (padded - alone).abs().max() <= ROUNDING * alone.abs().max()  # also NaN


def check_logits(name, config):
    """Raise UserError if a classifier's logits of a pair change with the padding beside it."""
    task = {1: "stsb", 2: "mrpc", 3: "mnli"}.get(config.num_labels)
    if task is None:  # dse.py reads no such classifier
        return
    with one_line_errors(name, "it must score a pair, alone and beside a longer one"):
        teacher = dse.load_cross_encoder(name, task)
        if changes_with_padding(teacher, dse.pair_logits, ("a", "b"), ("a", LONGER)):
            raise UserError(f"{name}: the logits of a pair change with the padding beside it")


def check_alone(name, encoder, embed):
    """Raise UserError for what no script notices on loading, and changes vectors."""
    config = encoder.model.config
    if "ForSequenceClassification" in f"{config.architectures}":
        check_logits(name, config)
    ids = tokenize(encoder, ["a"])[0]
    special = {*encoder.tokenizer.all_special_ids} - {encoder.tokenizer.unk_token_id}
    settings = json.loads(encoder.files.get("tokenizer_config.json", "{}"))
    for key, place in dict(add_bos_token=0, add_eos_token=-1).items():
        if settings.get(key) and ids[place] not in special:
            found = f"tokenizer_config.json has {key}, but its tokenizer adds no such token"
            raise UserError(f"{name}: {found}; {OTHER_WAY}")
    with one_line_errors(name, "it must embed a short text, alone and beside a longer one"):
        if changes_with_padding(encoder, embed):
            found = "the vector of a text changes with the padding beside it"
            raise UserError(f"{name}: {found}; {OTHER_WAY}")


def check(name):
    """Print the rows of a model -> what is wrong, a list of str."""
    encoder, embed = load(name)
    prompts = {key: prompt for key, prompt in encoder.prompts.items() if prompt}
    rows = {"default": (encoder.prompt, {})}  # our prompt, and options for the same one of theirs
    if prompts:
        rows["no prompt"] = ("", dict(prompt=""))
    for key, prompt in prompts.items():
        rows[f'prompt "{key}"'] = (prompt, dict(prompt_name=key))
    encoder.prompt, encoder.prompts = "", {}  # each row puts its own before the texts
    check_alone(name, encoder, embed)
    other = load_other(name)
    problems = []
    for row, (encoder.prompt, options) in rows.items():
        with one_line_errors(f"{name}, {row}", "both must embed all texts, in the same dimension"):
            ours = torch.from_numpy(encode(embed, encoder, TEXTS))
            theirs = other.encode(list(TEXTS), convert_to_tensor=True, **options)
            lowest, number = torch.cosine_similarity(ours, theirs).min(dim=0)
        print(f"| {name} | {row} | {lowest:.6f} | {len(TEXTS)} |", flush=True)
        if not lowest >= LOWEST:  # also NaN
            found = f"the two vectors of {TEXTS[number]!r:.60} have a cosine of {lowest:.6f}"
            problems.append(f"{name}, {row}: {found}; sentence-transformers reads it differently")
    return problems


def main():
    args = read_options(Options, __doc__)
    print("| model | prompt | lowest cosine | texts |\n| --- | --- | ---: | ---: |")
    problems = [problem for name in args.models for problem in check(name)]
    if problems:
        raise UserError(problems[0])


if __name__ == "__main__":
    run_main(main)
