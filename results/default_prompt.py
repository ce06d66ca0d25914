"""Copy an encoder without its default prompt: a text may then begin with any of its prompts.

python results/default_prompt.py MODEL OUTPUT [--max-length TOKENS]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import load_encoder, positive_int, read_options, run_main, save_encoder


class Options:
    model: str  # folder or Hub name
    output: str  # folder of the copy
    max_length: positive_int = None  # tokens of a text (default: the model's)


def main():
    args = read_options(Options, __doc__)
    encoder = load_encoder(args.model)
    encoder.settings |= dict(default_prompt_name=None)
    encoder.max_length = args.max_length or encoder.max_length
    save_encoder(encoder, args.output)


if __name__ == "__main__":
    run_main(main)
