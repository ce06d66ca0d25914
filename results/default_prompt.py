"""Copy an encoder with another default prompt: one that its folder names, or none.

python results/default_prompt.py MODEL OUTPUT          no default prompt: texts begin with one
python results/default_prompt.py MODEL OUTPUT query    the prompt "query" before every text
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import UserError, load_encoder, run_main, save_encoder


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("output")
    parser.add_argument("prompt", nargs="?", help="its name (default: none)")
    return parser.parse_args()


def main():
    args = parse_args()
    encoder = load_encoder(args.model)
    if args.prompt not in (None, *encoder.prompts):
        raise UserError(f"{args.model}: its prompts are {', '.join(encoder.prompts) or 'none'}")
    encoder.stated = encoder.stated | dict(default_prompt_name=args.prompt)
    save_encoder(encoder, args.output)


if __name__ == "__main__":
    run_main(main)
