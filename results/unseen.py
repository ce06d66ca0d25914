"""Does a student of one half of a corpus search the other half better, too?

  python results/unseen.py lines BEIR GENERAL PREFIX [PROMPT]
  python results/unseen.py halves BEIR TEACHER GENERAL HALVES

lines: splits the passages into two halves and writes three training texts of as many lines each.
PREFIX-general.txt has the first lines of the file GENERAL. In PREFIX-a.txt and -b.txt, the second
half of these are lines of one half of the corpus: its passages, then some of their sentences, and
then the same again. PROMPT begins the corpus's lines, for a model with prompts.
halves: compares the students GENERAL-SEED, HALVES-a-SEED and HALVES-b-SEED. The gain over the
general student is "seen" where the answers of a query were in the training text, else "unseen".

Columns: scores x 100, the mean of three seeds; 95 % intervals, by bootstrap over queries.
"""

import json
import random
import re
import sys
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import encode, load_encoder, run_main, table
from eval_sts import embed
from extras.eval_retrieval import LEFT_OUT, metrics, read_split, read_texts, search, set_prompts

BLOCK = 100  # passages, as they follow in the file: an article of XQuAD-R is mostly in one
LINES = 3100  # of one half, which has at most as many passages; and as many general ones
TOKENS = 64  # of a text in the index, as in training: a "seen" passage is seen in full
SEEDS = (0, 1, 2)
SAMPLES = 10_000  # of the bootstrap
SCORES = ("nDCG@10", "MRR@10")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9])")  # as in commands.sh
NO_PROMPTS = SimpleNamespace(query_prompt=None, passage_prompt=None)  # take the folder's


def shuffled(items):
    items = sorted(items)
    random.Random(0).shuffle(items)
    return items


def halves_of(count):
    """-> integer array [count]: the half of each passage, 0 or 1."""
    half = np.zeros(count, int)
    blocks = shuffled(range(0, count, BLOCK))
    for start in blocks[: len(blocks) // 2]:
        half[start : start + BLOCK] = 1
    return half


def write_lines(beir, general, prefix, prompt=""):
    corpus = [" ".join(text.split()) for _, text in read_texts(beir, "corpus.jsonl")]
    general = Path(general).read_text("utf-8").splitlines()[: 2 * LINES]
    parts = []  # the lines of each half
    half = halves_of(len(corpus))
    for number in (0, 1):
        passages = {text for text, place in zip(corpus, half) if place == number}
        sentences = {part for text in passages for part in SENTENCE_END.split(text)}
        parts.append(shuffled(passages) + shuffled(sentences - passages))
    both = set(parts[0]).intersection(parts[1])
    files = {"general": general}
    for name, lines in zip("ab", parts):
        own = [prompt + line for line in lines if line not in both]
        files[name] = general[:LINES] + list(islice(cycle(own), LINES))
    for name, lines in files.items():
        Path(f"{prefix}-{name}.txt").write_text("\n".join(lines) + "\n", "utf-8")


def query_scores(model, beir):
    """A model's scores x 100 -> array [queries, SCORES]; kept in runs/ for other commands."""
    kept = Path("runs", f"{Path(model).name}.{Path(beir).name}.json")
    if not kept.exists():
        queries, answers = read_split(beir, "test")
        encoder = load_encoder(model)
        encoder.max_length = min(encoder.max_length, TOKENS)
        set_prompts(encoder, NO_PROMPTS)
        texts = [encoder.passage_prompt + text for _, text in read_texts(beir, "corpus.jsonl")]
        passages = encode(embed, encoder, texts)
        vectors = encode(embed, encoder, [encoder.query_prompt + text for text in queries])
        found = search(vectors, [passages], 11, "cosine", "cpu")
        rows = [metrics([ranking], [scores]) for ranking, scores in zip(found, answers)]
        kept.write_text(json.dumps([[row[key] for key in SCORES] for row in rows]))
    return np.array(json.loads(kept.read_text()))


def with_interval(statistic, gains):
    """A row of the table. gains: array [queries, ...]; statistic(gains) -> [SCORES]."""
    generator = np.random.default_rng(0)
    chosen = generator.integers(len(gains), size=(SAMPLES, len(gains)))
    low, high = np.percentile([statistic(gains[rows]) for rows in chosen], (2.5, 97.5), axis=0)
    row = {}
    for i, key in enumerate(SCORES):
        row |= {key: statistic(gains)[i], f"{key} from": low[i], f"{key} to": high[i]}
    return row


def row_of(scores):
    """Array [queries, SCORES] -> a row of the table, their means."""
    return dict(zip(SCORES, scores.mean(axis=0)))


def seeds_mean(run, beir, rows):
    """The mean of a run's seeds -> array [queries, SCORES]; adds a row of the table for each."""
    scores = np.array([query_scores(f"runs/{run}-{seed}", beir) for seed in SEEDS])
    rows |= {f"{run}-{seed}": row_of(scores[seed]) for seed in SEEDS}
    return scores.mean(axis=0)


def compare_halves(beir, teacher, general, halves):
    rows = {teacher: row_of(query_scores(teacher, beir))}
    # Of each student: [queries, SCORES].
    means = [seeds_mean(run, beir, rows) for run in (general, f"{halves}-a", f"{halves}-b")]
    half = halves_of(sum(1 for _ in read_texts(beir, "corpus.jsonl")))
    gains = []
    for i, answers in enumerate(read_split(beir, "test")[1]):
        places = {half[number] for number, score in answers.items() if score != LEFT_OUT}
        if len(places) == 1:  # no answer in the other half
            place = places.pop()
            own, other = means[1 + place][i], means[2 - place][i]
            gains.append([own - means[0][i], other - means[0][i]])
    gains = np.array(gains)  # [queries, seen and unseen, SCORES]
    rows["gain, seen"] = with_interval(lambda g: g.mean(0)[0], gains)
    rows["gain, unseen"] = with_interval(lambda g: g.mean(0)[1], gains)
    rows["seen - unseen"] = with_interval(lambda g: g.mean(0)[0] - g.mean(0)[1], gains)
    rows["queries"] = {SCORES[0]: len(gains)}
    print(table(rows))


def main():
    _, comparison, *arguments = sys.argv
    functions = dict(lines=write_lines, halves=compare_halves)
    functions[comparison](*arguments)


if __name__ == "__main__":
    run_main(main)
