"""Copy an encoder, with another default prompt: one that its folder names, or none.

python results/default_prompt.py MODEL OUTPUT          no default prompt: texts have their own
python results/default_prompt.py MODEL OUTPUT query    the prompt "query" before every text
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import load_encoder, run_main, save_encoder


def main():
    model, output, *name = sys.argv[1:]
    encoder = load_encoder(model)
    encoder.stated = encoder.stated | dict(default_prompt_name=name[0] if name else None)
    save_encoder(encoder, output)


if __name__ == "__main__":
    run_main(main)
