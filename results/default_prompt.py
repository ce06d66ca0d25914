"""Copy an encoder without its default prompt, so that a text may begin with any of its prompts.

python results/default_prompt.py MODEL OUTPUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import load_encoder, read_options, run_main, save_encoder


class Options:
    model: str  # folder or Hub name
    output: str  # folder of the copy


def main():
    args = read_options(Options, __doc__)
    encoder = load_encoder(args.model)
    encoder.settings |= dict(default_prompt_name=None)
    save_encoder(encoder, args.output)


if __name__ == "__main__":
    run_main(main)
