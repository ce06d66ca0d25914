"""Whether training on split words repairs a vocabulary that extras/trim.py has cut.

python results/split_words.py rare MODEL CUT sentences.txt 50000 rare50k.txt
    the 50,000 sentences to which the tokenizer of CUT adds most tokens, compared with MODEL's
python results/split_words.py train SMALLER [options of ckd.py]
    ckd.py, whose student reads half of the sentences in the tokens of SMALLER, a folder of
    trim.py with fewer tokens than --student, so that more words are split
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ckd
from common import Tokens, load_encoder, read_sentences, run_main, table


def write_rare(model, cut, file, count, output):
    sentences = read_sentences(file)
    whole, split = [Tokens(load_encoder(name), sentences).lengths for name in (model, cut)]
    most = np.argsort(whole - split, kind="stable")[: int(count)]
    Path(output).write_text("\n".join(sentences[i] for i in sorted(most)) + "\n", "utf-8")
    longer = 100 * (split > whole)
    shares = {"% with more tokens": longer.mean(), "% of those chosen": longer[most].mean()}
    print(table({"sentences": shares}))


class HalfSplit(Tokens):
    """A random half of the texts is in tokens of SMALLER, as ids of `encoder`'s vocabulary."""

    def __init__(self, encoder, texts, max_length=None):
        super().__init__(encoder, texts, max_length)
        smaller = load_encoder(SMALLER)
        split = Tokens(smaller, texts, max_length)
        pieces = smaller.tokenizer.convert_ids_to_tokens(range(len(smaller.tokenizer)))
        numbers = np.array(encoder.tokenizer.convert_tokens_to_ids(pieces), np.int32)
        is_split = np.random.default_rng(0).random(len(texts)) < 0.5
        rows = [numbers[split.row(i)] if is_split[i] else self.row(i) for i in range(len(texts))]
        self.ids = np.concatenate(rows)
        self.lengths = np.array([len(row) for row in rows])
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])


if __name__ == "__main__":
    if sys.argv[1] == "rare":
        write_rare(*sys.argv[2:])
    else:
        SMALLER = sys.argv[2]
        del sys.argv[1:3]
        ckd.Tokens = HalfSplit
        run_main(ckd.main)
