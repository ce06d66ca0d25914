"""Is a model's folder read right? Compare its vectors with those of sentence-transformers.

Both embed thirteen texts: too long ones, capitals, other scripts, texts without a letter, ... A row
has the lowest cosine of a text's two vectors: one row for what the folder does by default and, if
it states prompts, one without a prompt and one for each of them. If a cosine is below 0.9999, the
last line names the text, and the exit status is 2.

  python -m extras.check runs/ckd sentence-transformers/all-MiniLM-L6-v2
"""

import torch

from common import ArgumentParser, UserError, encode, one_line_errors, run_main
from common import read_json, resolve_model
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


def load_other(name):
    """The model as sentence-transformers loads it. Raises UserError."""
    folder = resolve_model(name)
    if "sentence_distillation." in str(read_json(folder / "modules.json", [])):
        raise UserError(f"{name}: sentence-transformers does not have its pooling")
    with one_line_errors("sentence-transformers", "pip install -r requirements-dev.txt"):
        from sentence_transformers import SentenceTransformer
    with one_line_errors(name, "sentence-transformers must be able to load it"):
        return SentenceTransformer(str(folder), device="cpu")


def check(name):
    """Print the rows of a model -> what is wrong, a list of str."""
    other = load_other(name)
    encoder, embed = load(name)
    rows = {"default": (encoder.prompt, {})}  # our prompt, and options for the same one of theirs
    stated = {key: prompt for key, prompt in encoder.prompts.items() if prompt}
    if stated:
        rows["no prompt"] = ("", dict(prompt=""))
    for key, prompt in stated.items():
        rows[f'prompt "{key}"'] = (prompt, dict(prompt_name=key))
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


def parse_args():
    parser = ArgumentParser(__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder or Hub name")
    return parser.parse_args()


def main():
    args = parse_args()
    print("| model | prompt | lowest cosine | texts |\n| --- | --- | ---: | ---: |")
    problems = [problem for name in args.models for problem in check(name)]
    if problems:
        raise UserError(problems[0])


if __name__ == "__main__":
    run_main(main)
