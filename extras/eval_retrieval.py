# SPDX-License-Identifier: MIT
"""Score sentence encoders on passage retrieval, with exact search, in chunks of the corpus.

Prints MRR@10 (mean reciprocal rank), nDCG@10 (normalized discounted cumulative gain) and
Recall@10/100/1000 in percent, the bytes of a passage embedding, and how many passages are encoded
per second (IBKD, Table 3), measured on the first 1,000.

The data is a folder in the format of BEIR (arXiv:2104.08663), whose files may be gzipped:
  corpus.jsonl       {"_id": "d0", "title": "", "text": "..."}; a passage is its title and its text
  queries.jsonl      {"_id": "q0", "text": "..."}
  qrels/SPLIT.tsv    query-id, corpus-id, score, with this header; a score above 0 is an answer
or a data set on the Hugging Face Hub: BeIR/msmarco, whose qrels are in BeIR/msmarco-qrels. BEIR
leaves out the passage with the query's own id from the ranking, and so does this script, unless
that passage is an answer. The IBKD paper's 6,980 queries of MS MARCO are --split dev; --split test
has those of TREC-DL 2019.

  python -m extras.eval_retrieval runs/ibkd MODEL --beir my-beir-folder
  python -m extras.eval_retrieval runs/ckd --document-model TEACHER --beir my-beir-folder
      the teacher's index is kept, and its student embeds the queries
  python -m extras.eval_retrieval Luyu/co-condenser-marco-retriever --beir BeIR/msmarco --split dev
      --pooling cls --similarity dot                  its folder states neither
"""

import json
import math
import time
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from common import BAR, UserError, download, encode, load_encoder, note, read_lines
from common import Device, Pooling, read_options, run_main, table, write_json
from eval_sts import embed
from extras.trim import Count

MEASURES = ("cosine", "dot")
METRICS = ("MRR@10", "nDCG@10", "Recall@10", "Recall@100", "Recall@1000")
CHUNK = 5000  # passages in memory
SCORES = 20_000_000  # of a query and a passage, in memory
DEV_PASSAGES = 100_000
DISCOUNTS = np.log2(range(2, 12))  # of ranks 1 to 10
TIMED = 1000  # passages that are encoded once more, to see how fast
LEFT_OUT = 0  # the score of the passage with a query's own id


class Options:
    models: list  # folders, or names on the Hub
    beir: str = None  # BEIR folder, or data set on the Hub, as BeIR/msmarco
    split: str = "test"  # qrels/SPLIT.tsv
    pooling: Pooling = None  # of all models (default: what their folders state)
    similarity: Literal[MEASURES] = None  # (default: what a model states, or cosine)
    query_prompt: str = None  # before each query (default: a model's "query", or its default one)
    passage_prompt: str = None  # (default: a model's "passage" or "document", or its default one)
    document_model: str = None  # encodes the passages, and each of the models the queries
    device: Device = None  # (default: cuda if there is one)
    json: str = None  # a file for the unrounded numbers


# ---- BEIR folders --------------------------------------------------------------------------------


def find(beir, name):
    """A file of a BEIR folder or of a data set on the Hub -> Path. Raises UserError."""
    if not Path(beir).exists():
        folder, _, file = name.rpartition("/")
        repository, file = (f"{beir}-{folder}", file) if folder else (beir, f"{file}.gz")
        return download(repository, file, "give a folder to --beir")
    path, gzipped = Path(beir, name), Path(beir, f"{name}.gz")
    return gzipped if gzipped.exists() and not path.exists() else path


def read_texts(beir, name):
    """Yield (id, text) of each line of a .jsonl file. UserError, also for a repeated id.

    The text of a passage begins with its title; a query has none, as BEIR reads it.
    """
    seen = set()

    def parse(line):
        row = json.loads(line)
        key = str(row["_id"])
        if key in seen:
            raise ValueError(f"id {key!r} is used above")
        seen.add(key)
        title, text = row.get("title") if name == "corpus.jsonl" else "", row["text"]
        title = "" if title is None or title != title else title  # NaN, as pandas writes it
        if not isinstance(title, str) or not isinstance(text, str):
            raise ValueError(f"the title {title!r} or the text {text!r:.60} is not a string")
        text = f"{title} {text.strip()}".strip()
        return key, text.encode().decode()  # refuses half of a surrogate pair, as in "\ud800"

    form = 'each line must be JSON, {"_id": "...", "text": "..."}, with an id of its own'
    return read_lines(find(beir, name), parse, form)


def read_split(beir, split, numbers=None):
    """qrels/SPLIT.tsv -> the texts of Q queries, their answers: Q of {passage number: score}.

    numbers {passage id: number}; by default, a passage's number is its position in the corpus.
    Scores are above 0, or LEFT_OUT. Where passages have the same number, the highest score counts.
    An answer that the corpus lacks has a number below 0: it cannot be found, and counts in recall
    and ideal gain, as in BEIR. Raises UserError, also where the corpus has none of the answers.
    """
    known = dict(read_texts(beir, "queries.jsonl"))
    if numbers is None:
        numbers = {name: i for i, (name, _) in enumerate(read_texts(beir, "corpus.jsonl"))}

    def parse(line):
        query, passage, score = filter(None, map(str.strip, line.split("\t")))
        if score == "score":  # as in the header
            return None
        number = numbers.get(passage)
        if number is None:
            number = absent.setdefault(passage, -1 - len(absent))
        return query, known[query], number, int(score)

    absent = {}  # {id: number}
    path = find(beir, f"qrels/{split}.tsv")
    form = "a line is query-id (of queries.jsonl), corpus-id and a whole score, with tabs"
    answers = {}
    for query, text, number, score in read_lines(path, parse, form):
        scores = answers.setdefault((query, text), {})
        if score > 0:
            scores[number] = max(score, scores.get(number, 0))
    for (query, _), scores in answers.items():
        if not scores:
            raise UserError(f"{path}: query {query!r} has no score above 0; remove its lines")
        if query in numbers:
            scores.setdefault(numbers[query], LEFT_OUT)
    if absent:
        note(f"{path}: the corpus lacks {len(absent)} of its passages, which are never found")
    if not any(number >= 0 for scores in answers.values() for number in scores):
        raise UserError(f"{path}: corpus.jsonl has none of its passages")
    return [text for _, text in answers], list(answers.values())


def read_training(beir, dev_queries):
    """qrels/train.tsv -> P passages, Q queries, their answers, and what evaluate() reads for dev.

    Passages with the same text are one passage. The dev queries are every tenth query, or fewer,
    evenly spread, if that would be more than dev_queries. They search the first DEV_PASSAGES
    passages and their own answers. Raises UserError.
    """
    number_of = {}  # {text: number}
    corpus = read_texts(beir, "corpus.jsonl")
    numbers = {name: number_of.setdefault(text, len(number_of)) for name, text in corpus}
    passages = list(number_of)
    queries, answers = read_split(beir, "train", numbers)
    answers = [{n: score for n, score in row.items() if n >= 0} for row in answers]
    # Queries whose answers the corpus lacks teach nothing, and have no score.
    answered = [i for i, row in enumerate(answers) if {*row.values()} - {LEFT_OUT}]
    queries = [queries[i] for i in answered]
    answers = [answers[i] for i in answered]
    if len(queries) < 10:
        raise UserError(f"{beir}: {len(queries)} training queries; it must have ten or more")
    interval = max(10, math.ceil(len(queries) / dev_queries))
    is_dev = slice(interval - 1, None, interval)
    dev, dev_answers = queries[is_dev], answers[is_dev]
    del queries[is_dev], answers[is_dev]
    relevant = [number for row in dev_answers for number in row if row[number] != LEFT_OUT]
    searched = sorted({*range(len(passages))[:DEV_PASSAGES], *relevant})
    place = {number: position for position, number in enumerate(searched)}
    placed = [{place[n]: row[n] for n in row if n in place} for row in dev_answers]
    corpus = [(number, passages[number]) for number in searched]
    return passages, queries, answers, (dev, placed, corpus)


# ---- Search --------------------------------------------------------------------------------------


def set_prompts(encoder, args):
    """Set `query_prompt` and `passage_prompt`: given options, or the folder's prompts."""
    prompts = {name: text or "" for name, text in encoder.prompts.items()}
    default = prompts.get(encoder.settings.get("default_prompt_name"), "")
    query = prompts.get("query", default)
    passage = prompts.get("passage", prompts.get("document", default))
    encoder.query_prompt = query if args.query_prompt is None else args.query_prompt
    encoder.passage_prompt = passage if args.passage_prompt is None else args.passage_prompt
    encoder.prompt = ""  # these replace it
    used = (encoder.query_prompt, encoder.passage_prompt)
    unused = [name for name, text in prompts.items() if text and text not in used]
    if unused:
        note(f"{encoder.name}: of its prompts {unused}, none is put before a text")


def similarity_of(encoder, given=None):
    """What compares its embeddings: the given option, or what its folder states, or the cosine."""
    similarity = given or encoder.settings.get("similarity_fn_name") or "cosine"
    if similarity not in MEASURES:
        raise UserError(f"{encoder.name}: its similarity is {similarity}; give --similarity")
    return similarity


def search(queries, chunks, depth, similarity, device):
    """Exact search -> Q lists of the `depth` most similar passages' numbers, best first.

    queries: array [Q, D]; chunks: arrays [n, D] with the passages in their order. Passages with the
    same score rank in this order; any of those that tie at the last rank may be left out.
    """

    def comparable(vectors):
        tensor = torch.from_numpy(np.array(vectors)).to(device)
        return F.normalize(tensor, dim=1) if similarity == "cosine" else tensor

    queries = comparable(queries)
    best = queries.new_empty(len(queries), 0)  # scores
    numbers = best.long()  # of their passages
    start = 0
    for chunk in chunks:
        for passages in comparable(chunk).split(SCORES // len(queries) + 1):
            scores = queries @ passages.T  # [Q, n]
            found = scores.topk(min(depth, len(passages))).indices.sort().values  # in their order
            best = torch.cat([best, scores.gather(1, found)], dim=1)
            numbers = torch.cat([numbers, start + found], dim=1)
            order = best.argsort(dim=1, descending=True, stable=True)[:, :depth]
            best = best.gather(1, order)
            numbers = numbers.gather(1, order)
            start += len(passages)
    return numbers.tolist()


def training_rows(vectors, answers, count, similarity, device):
    """One row [query, answer, *hard negatives] for each answer -> integer array [rows, 2 + count].

    A row has positions in texts: P passages, then Q queries. Hard negatives: the `count` passages
    most similar to the query, without its answers. vectors: array [P + Q, D], the teacher's
    embeddings of the texts; answers: Q of {passage number: score}. UserError: too few passages.
    """
    depth = count + max(map(len, answers))
    passages, queries = np.split(vectors, [-len(answers)])
    if len(passages) < depth:
        raise UserError(f"{len(passages)} passages are too few for {count} hard negatives")
    chunks = np.array_split(passages, len(passages) // CHUNK + 1)
    found = search(queries, chunks, depth, similarity, device)
    rows = []
    for query, (ranking, scores) in enumerate(zip(found, answers), len(passages)):
        negatives = [number for number in ranking if number not in scores][:count]
        positives = [number for number, score in scores.items() if score != LEFT_OUT]
        rows += [(query, positive, *negatives) for positive in positives]
    return np.array(rows)


def dcg(gains):
    """Discounted cumulative gain at 10: the sum over ranks of gain / log2(rank + 1)."""
    return sum(gain / discount for gain, discount in zip(gains, DISCOUNTS))


def metrics(found, answers):
    """Q rankings of passage numbers, Q dicts {passage number: score} -> {metric: 0 to 100}."""
    values = []  # of each query
    for ranking, scores in zip(found, answers):
        gains = [scores.get(number, 0) for number in ranking if scores.get(number) != LEFT_OUT]
        ideal = sorted(scores.values(), reverse=True)
        ranks = np.flatnonzero(gains) + 1  # of answers
        reciprocal = 1 / ranks[0] if any(gains[:10]) else 0.0
        counts = [np.sum(ranks <= depth) for depth in (10, 100, 1000)]
        recalls = np.array(counts) / np.count_nonzero(ideal)
        values.append([reciprocal, dcg(gains) / dcg(ideal), *recalls])
    means = 100 * np.sum(values, axis=0) / len(values)
    return dict(zip(METRICS, means.tolist()))


def encode_passages(embed, encoder, corpus):
    """Yield the embeddings of CHUNK passages at a time [n, D]."""
    texts = (encoder.passage_prompt + text for _, text in corpus)
    with tqdm(desc=encoder.name, unit=" passages", leave=False, delay=1, **BAR) as bar:
        while chunk := list(islice(texts, CHUNK)):
            yield encode(embed, encoder, chunk)
            bar.update(len(chunk))


def evaluate(embed, encoders, queries, answers, corpus, similarity, depth=1000):
    """Encode, search, score -> metrics(); recall beyond rank `depth` is too low.

    encoders: of queries and of passages, after set_prompts(); queries, answers: what read_split()
    returns; corpus: yields (name, text) of each passage; similarity: "cosine" or "dot".
    """
    query_encoder, passage_encoder = encoders
    chunks = encode_passages(embed, passage_encoder, corpus)
    vectors = encode(embed, query_encoder, [query_encoder.query_prompt + text for text in queries])
    device = query_encoder.model.device
    return metrics(search(vectors, chunks, depth + 1, similarity, device), answers)


def passages_per_second(encoder, beir):
    corpus = islice(read_texts(beir, "corpus.jsonl"), TIMED)
    texts = [encoder.passage_prompt + text for _, text in corpus]
    begin = time.perf_counter()
    encode(embed, encoder, texts)
    return len(texts) / (time.perf_counter() - begin)


# ---- Command line --------------------------------------------------------------------------------


def main():
    args = read_options(Options, __doc__)
    if not args.beir:
        raise UserError("give --beir, a folder or a data set on the Hub")
    queries, answers = read_split(args.beir, args.split)
    passage_encoder = None
    if args.document_model:
        passage_encoder = load_encoder(args.document_model, args.pooling, device=args.device)
        set_prompts(passage_encoder, args)
    rows = {}
    for name in args.models:
        encoder = load_encoder(name, args.pooling, device=args.device)
        set_prompts(encoder, args)
        encoders = [encoder, passage_encoder or encoder]
        if encoder.dimension != encoders[1].dimension:
            raise UserError(f"{name}: its embeddings and --document-model's differ in dimension")
        corpus = read_texts(args.beir, "corpus.jsonl")
        similarity = similarity_of(encoder, args.similarity)
        scores = evaluate(embed, encoders, queries, answers, corpus, similarity)
        speed = passages_per_second(encoders[1], args.beir)
        rows[name] = scores | {"bytes": Count(4 * encoder.dimension), "passages/s": speed}
    if args.json:
        write_json(Path(args.json), rows)
    print(table(rows))


if __name__ == "__main__":
    run_main(main)
