"""Passage retrieval: BEIR folders, exact search in bounded memory, metrics.

A BEIR folder contains these files, gzipped (.gz) or not:
  corpus.jsonl       {"_id": "d0", "title": "", "text": "..."}    a passage is its title and text
  queries.jsonl      {"_id": "q0", "text": "..."}
  qrels/SPLIT.tsv    query-id, corpus-id, score, with that header; a score above 0 is a positive
A name such as BeIR/msmarco is that data set on the Hugging Face Hub, with BeIR/msmarco-qrels.

Inside the programs a passage is its number: its position in the corpus. `qrels` says which passages
answer a query: {number of a passage: score}.

As in BEIR, the passage with a query's own id is left out of the query's ranking, unless the qrels
say that it is an answer.
"""

import array
import hashlib
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from huggingface_hub import hf_hub_download

from common import (
    DataError,
    encode_sentences,
    parse_json,
    progress,
    read_columns,
    read_lines,
)

QRELS_COLUMNS = ("query-id", "corpus-id", "score")
LONGEST_SCORE = 9  # digits
DEPTH = 1000  # passages found for a query
CHUNK = 20_000  # passages in memory at a time
SEARCH_MEMORY = 2e9  # bytes
BYTES_PER_SCORE = 40  # while search compares: two floats and four keys of 8 bytes
RANKED = 10  # passages that MRR@10 and nDCG@10 look at
RECALL_DEPTHS = (10, 100, 1000)
SIMILARITIES = ("cosine", "dot")
NONE = -1  # the number of no passage


# --------------------------------------------------------------------------------------------------
# BEIR folders
# --------------------------------------------------------------------------------------------------


def find(beir, name):
    """A file of a BEIR folder, or of a data set on the Hub -> its path. Raises DataError."""
    for path in (Path(beir) / name, Path(beir) / f"{name}.gz"):
        if path.exists():
            return path
    if Path(beir).exists() or beir.count("/") != 1:
        expected = "a BEIR folder: corpus.jsonl, queries.jsonl, qrels/"
        raise DataError(f"{Path(beir) / name}: no such file, expected {expected}")
    if name.startswith("qrels/"):
        repository, file = f"{beir}-qrels", Path(name).name
    else:
        repository, file = beir, f"{name}.gz"
    try:
        return Path(hf_hub_download(repository, file, repo_type="dataset"))
    except Exception as error:  # the client's errors have no base class
        reason = " ".join(str(error).split())[:150]
        raise DataError(
            f"{repository}/{file}: no local path, and the Hugging Face Hub did not provide it "
            f"({reason}); download it from huggingface.co/datasets/{repository} into a BEIR folder "
            "and give that folder"
        ) from None


def read_texts(path):
    """Yield (line, id, text) of a corpus.jsonl or queries.jsonl. Raises DataError."""
    for line, text in read_lines(path):
        try:
            row = parse_json(text)
            name, title, passage = row["_id"], row.get("title"), row["text"]
            title = "" if title is None else title
            is_name = isinstance(name, (str, int)) and not isinstance(name, bool)
            if not is_name or not isinstance(title, str) or not isinstance(passage, str):
                raise ValueError("a number where text belongs")
        except (ValueError, KeyError):
            expected = 'JSON, {"_id": ..., "text": ...}'
            raise DataError(f"{path}:{line}: {text[:40]!r}, expected {expected}") from None
        yield line, str(name), f"{title} {passage}".strip()


def refuse_repeated_id(path, line, name):
    raise DataError(f"{path}:{line}: id {name!r} is used above, expected unique ids")


def read_queries(beir):
    """-> {query id: text}. Raises DataError, also for an id that is used twice."""
    path = find(beir, "queries.jsonl")
    queries = {}
    for line, name, text in read_texts(path):
        if name in queries:
            refuse_repeated_id(path, line, name)
        queries[name] = text
    return queries


class Judgement(NamedTuple):
    """A line of qrels/SPLIT.tsv."""

    line: int
    query: str  # id
    passage: str  # id
    score: int


def read_judgements(path, queries):
    """-> list of Judgement. Raises DataError."""
    judgements = []
    for line, (query, passage, score) in read_columns(path, QRELS_COLUMNS):
        if line == 1 and score == "score":
            continue
        if query not in queries:
            expected = "an id of queries.jsonl"
            raise DataError(f"{path}:{line}: query {query!r} is unknown, expected {expected}")
        if not score.isdecimal() or len(score) > LONGEST_SCORE:
            raise DataError(f"{path}:{line}: score {score[:40]!r} is not a whole number, 0 or more")
        judgements.append(Judgement(line, query, passage, int(score)))
    if not judgements:
        expected = ", ".join(QRELS_COLUMNS)
        raise DataError(f"{path}: no line but the header, expected {expected}")
    return judgements


def number_passages(corpus, names):
    """The numbers of the passages with these ids -> {id: number}, and how many passages there are.

    Raises DataError for an id that is used twice. Ids are remembered by 8 bytes of a hash, since
    those of a large corpus do not fit into memory.
    """
    numbers = {}
    hashes = array.array("q")
    for number, (_, name, _) in enumerate(read_texts(corpus)):
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        hashes.append(int.from_bytes(digest, "little", signed=True))
        if name in names:
            numbers[name] = number
    refuse_repeated_ids(corpus, hashes)
    return numbers, len(hashes)


def refuse_repeated_ids(corpus, hashes):
    """hashes: of the ids of the corpus, in its order. Raises DataError if two ids are equal."""
    values, counts = np.unique(np.frombuffer(hashes, np.int64), return_counts=True)
    if len(values) == len(hashes):
        return
    repeated = set(values[counts > 1].tolist())
    seen = set()  # two ids may have one hash by chance, so the ids themselves decide
    for (line, name, _), value in zip(read_texts(corpus), hashes):
        if value not in repeated:
            continue
        if name in seen:
            refuse_repeated_id(corpus, line, name)
        seen.add(name)


class JudgedQueries(NamedTuple):
    """Q queries, and which passages answer them."""

    names: list  # ids
    texts: list
    qrels: list  # {number of a passage: score}
    own: list  # the passage with the query's id, which is not an answer; NONE if there is none

    def pick(self, positions):
        """Those at these positions."""
        return JudgedQueries(*([column[i] for i in positions] for column in self))


def read_judged(beir, split, queries):
    """-> JudgedQueries of qrels/SPLIT.tsv, and how many passages the corpus has.

    queries: {id: text}. Reads the corpus once, for its ids. Raises DataError: an id that is unknown
    or used twice, a query without positives, a score that is not a whole number, 0 or more.
    """
    path = find(beir, f"qrels/{split}.tsv")
    corpus = find(beir, "corpus.jsonl")
    judgements = read_judgements(path, queries)
    wanted = {name for row in judgements for name in (row.query, row.passage)}
    numbers, count = number_passages(corpus, wanted)
    qrels = {}
    last_line = {}
    for line, query, passage, score in judgements:
        if passage not in numbers:
            expected = f"an id of {corpus.name}"
            raise DataError(f"{path}:{line}: passage {passage!r} is unknown, expected {expected}")
        qrels.setdefault(query, {})[numbers[passage]] = score
        last_line[query] = line
    own = []
    for query, scores in qrels.items():
        if not any(scores.values()):
            problem = f"query {query!r} has no positive, expected one with a score above 0"
            raise DataError(f"{path}:{last_line[query]}: {problem}")
        own.append(unless_answer(numbers.get(query, NONE), scores))
    texts = [queries[query] for query in qrels]
    return JudgedQueries(list(qrels), texts, list(qrels.values()), own), count


def unless_answer(number, scores):
    """The number of a passage, or NONE if it answers the query that has these scores."""
    return NONE if scores.get(number) else number


def passages(beir, size=CHUNK):
    """Yield lists of `size` texts: the corpus in its order. Raises DataError."""
    texts = []
    for _, _, text in read_texts(find(beir, "corpus.jsonl")):
        texts.append(text)
        if len(texts) == size:
            yield texts
            texts = []
    if texts:
        yield texts


# --------------------------------------------------------------------------------------------------
# Exact search
# --------------------------------------------------------------------------------------------------

BLOCK = 16  # scores
INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1


def in_order_of_floats(bits):
    """int32 with the bits of floats <-> int32 in the order of these floats. Its own inverse."""
    return torch.where(bits < 0, bits ^ INT32_MAX, bits)


def ranking_keys(scores, numbers):
    """float32 scores [Q, n], passage numbers [n] or [Q, n] -> int64 keys [Q, n], unequal in a row.

    A higher score has a higher key, and of equal scores the lower number has it.
    """
    order = in_order_of_floats(scores.view(torch.int32)).to(torch.int64)
    return order * 2**32 + (UINT32_MAX - numbers)


def read_keys(keys):
    """What ranking_keys has packed -> scores, passage numbers."""
    bits = in_order_of_floats((keys >> 32).to(torch.int32))
    return bits.view(torch.float32), UINT32_MAX - (keys & UINT32_MAX)


def blocks_with_the_best(scores, depth):
    """Scores [Q, n] -> positions [Q, m], among which are those of the `depth` best of each query.

    Only `depth` of the blocks of BLOCK successive scores can contain them: those whose own best
    are highest, of equal ones the first. Of each other block, `depth` scores rank before its best.
    """
    blocks = scores[:, : len(scores[0]) // BLOCK * BLOCK].unflatten(1, (-1, BLOCK))
    block_numbers = torch.arange(blocks.shape[1], device=scores.device)
    best = ranking_keys(blocks.amax(dim=2), block_numbers).topk(depth).indices
    inside = best[..., None] * BLOCK + torch.arange(BLOCK, device=scores.device)
    rest = torch.arange(blocks.shape[1] * BLOCK, scores.shape[1], device=scores.device)
    return torch.cat([inside.flatten(1), rest.expand(len(scores), -1)], dim=1)


def search(queries, chunks, depth, memory, device="cpu"):
    """The `depth` passages most similar to each query, found exactly and in bounded memory.

    queries [Q, D]; chunks: tensors [n, D], all passages one chunk after the other; memory: bytes
    for the comparison. Returns scores [Q, depth] and passage numbers [Q, depth], best first; of
    equal scores the passage that comes first in the corpus ranks first.
    """
    best = torch.empty(len(queries), 0, dtype=torch.int64)  # keys of the passages found so far
    start = 0
    for chunk in chunks:
        chunk = chunk.to(device)
        queries_at_a_time = max(1, int(memory / (BYTES_PER_SCORE * (len(chunk) + depth))))
        kept = []
        for i in range(0, len(queries), queries_at_a_time):
            block = slice(i, i + queries_at_a_time)
            scores = queries[block].to(device) @ chunk.T
            if len(chunk) > 2 * BLOCK * depth:
                positions = blocks_with_the_best(scores, depth)
                scores = scores.gather(1, positions)
            else:
                positions = torch.arange(len(chunk), device=device)
            keys = ranking_keys(scores, start + positions)
            keys = torch.cat([best[block].to(device), keys], dim=1)
            kept.append(keys.topk(min(depth, keys.shape[1])).values.cpu())
        best = torch.cat(kept)
        start += len(chunk)
    return read_keys(best)


def comparable(vectors, similarity):
    """numpy [n, D] -> tensor [n, D] whose inner products are the similarity: cosine or dot."""
    # A copy, since a memory map may be read-only. It may also contain float16.
    tensor = torch.from_numpy(vectors.astype(np.float32))
    return F.normalize(tensor, dim=1) if similarity == "cosine" else tensor


# --------------------------------------------------------------------------------------------------
# Scores
# --------------------------------------------------------------------------------------------------


def metrics(found, judged):
    """Passage numbers found [Q, DEPTH + 1], best first -> {metric: mean over Q, 0 to 100}.

    judged: JudgedQueries. A query's own passage is left out of its ranking.
    """
    totals = {}
    for ranking, scores, own in zip(found, judged.qrels, judged.own):
        ranking = [number for number in ranking.tolist() if number != own]
        for name, value in query_metrics(ranking[:DEPTH], scores).items():
            totals[name] = totals.get(name, 0.0) + value
    return {name: 100 * float(total) / len(found) for name, total in totals.items()}


def query_metrics(ranking, scores):
    """The metrics of one query, 0 to 1."""
    gains = [scores.get(number, 0) for number in ranking]
    ideal = sorted(scores.values(), reverse=True)
    positives = count_positives(ideal)
    values = {
        f"MRR@{RANKED}": reciprocal_rank(gains[:RANKED]),
        f"nDCG@{RANKED}": discounted_gain(gains[:RANKED]) / discounted_gain(ideal[:RANKED]),
    }
    for depth in RECALL_DEPTHS:
        values[f"Recall@{depth}"] = count_positives(gains[:depth]) / positives
    return values


def count_positives(gains):
    return sum(gain > 0 for gain in gains)


def reciprocal_rank(gains):
    """1 / rank of the first positive, 0 where there is none."""
    ranks = (rank for rank, gain in enumerate(gains, 1) if gain > 0)
    first = next(ranks, None)
    return 0.0 if first is None else 1 / first


def discounted_gain(gains):
    """DCG: sum over ranks of gain / log2(rank + 1)."""
    return sum(gain / np.log2(rank + 1) for rank, gain in enumerate(gains, 1))


class PassageEncoder:
    """Encodes chunks of passages, and counts the `seconds` that this takes.

    half: round the vectors to float16.
    """

    def __init__(self, encoder, similarity="cosine", half=False):
        self.encoder = encoder
        self.similarity = similarity
        self.half = half
        self.seconds = 0.0

    def embed(self, texts):
        """-> float32 [n, D]"""
        vectors = comparable(encode_sentences(self.encoder, texts), self.similarity)
        return vectors.half().float() if self.half else vectors

    def embeddings(self, chunks, title):
        """Lists of texts -> yield tensors [n, D]. The time between two of them is not counted."""
        with progress(desc=title, unit=" passages", leave=False, disable=not title) as bar:
            for texts in chunks:
                clock = time.perf_counter()
                vectors = self.embed(texts)
                self.seconds += time.perf_counter() - clock
                bar.update(len(texts))
                yield vectors


def evaluate(
    encoder,
    judged,
    chunks,
    document=None,
    similarity="cosine",
    half=False,
    memory=SEARCH_MEMORY,
    title="",
):
    """Encode queries by `encoder`, passages by `document` or the same one; search; score.

    judged: JudgedQueries; chunks: lists of texts, the corpus in its order, read one at a time.
    Returns metrics(), and the seconds that the passages took to encode. The encoder stays in the
    mode (train or eval) that it is in.
    """
    device = next(encoder.parameters()).device
    training = encoder.training
    questions = comparable(encode_sentences(encoder.eval(), judged.texts), similarity)
    encoded = PassageEncoder(document or encoder, similarity, half)
    _, found = search(questions, encoded.embeddings(chunks, title), DEPTH + 1, memory, device)
    encoder.train(training)
    return metrics(found, judged), encoded.seconds
