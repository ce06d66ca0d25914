"""How much the training sentences share with the tests and with one another, for README.md.

  python results/overlap.py DATA          DATA: the folder of data_sets.py; two minutes

Two sentences are near if they share at least a part of their words: the Jaccard index of their sets
of words, in lower case.
"""

import math
import re
import sys
from collections import defaultdict
from pathlib import Path

SAMPLE = 4000  # sentences that are compared with all


def read_columns(path, columns=(0,)):
    """The distinct texts of some tab-separated columns."""
    rows = [line.split("\t") for line in path.read_text("utf-8").splitlines()]
    return list(dict.fromkeys(row[column] for row in rows for column in columns))


def words(text):
    return frozenset(re.findall(r"\w+", text.lower()))


def share_with_neighbor(texts, others, least):
    """Percentage of texts near one of the others that is not the text itself."""
    sets = list(map(words, others))
    places = defaultdict(list)  # of a word
    for place, found in enumerate(sets):
        for word in found:
            places[word].append(place)
    near = 0
    for text in texts:
        own = words(text)
        # Two near sets share all but so many words; so they share one of the rarest of these.
        rarest = sorted(own, key=lambda word: len(places[word]))
        rarest = rarest[: len(own) - math.ceil(least * len(own)) + 1]
        candidates = {place for word in rarest for place in places[word] if others[place] != text}
        near += any(
            len(own & sets[place]) >= least * len(own | sets[place]) for place in candidates
        )
    return 100 * near / len(texts)


def main():
    data = Path(sys.argv[1])
    sentences = read_columns(data / "unlabeled.txt")
    captions = set(read_columns(data / "pairs.tsv", (0, 1)))
    print(f"captions of Flickr30k: {len(captions.intersection(sentences))} of {len(sentences)}")
    (sts,) = data.rglob("STSBenchmark")
    images = read_columns(sts.with_name("STS15-en-test") / "STS.input.images.txt", (0, 1))
    sick = read_columns(sts.parents[1] / "SICK" / "SICK_test_annotated.txt", (1, 2))
    for name, texts in (("STS15's images", images), ("SICK-R", sick)):
        found = share_with_neighbor(texts, sentences, 0.8)
        print(f"{name}: {found:.1f} % have a training sentence with 0.8 of the words")
    first = sentences[:20_000]
    found = share_with_neighbor(first, first, 0.5)
    print(f"the first 20,000: {found:.1f} % have another one with half of the words")
    found = share_with_neighbor(sentences[:SAMPLE], sentences, 0.5)
    print(f"all, by a sample of {SAMPLE}: {found:.1f} %")


if __name__ == "__main__":
    main()
