"""Passage retrieval: BEIR folders, exact search in bounded memory, metrics, hard negatives.

A BEIR folder contains these files, gzipped (.gz) or not:
  corpus.jsonl       {"_id": "d0", "title": "", "text": "..."}    a passage is its title and text
  queries.jsonl      {"_id": "q0", "text": "..."}
  qrels/SPLIT.tsv    query-id, corpus-id, score, with that header; a score above 0 is a positive
A name such as BeIR/msmarco is that data set on the Hugging Face Hub, with BeIR/msmarco-qrels.

Inside the programs a passage is its number: its position in the corpus. `qrels` says which passages
answer a query: {number of a passage: score}.
"""

import array
import hashlib
import json
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from huggingface_hub import hf_hub_download

from common import DataError, encode_sentences, progress, read_columns, read_lines

QRELS_COLUMNS = ("query-id", "corpus-id", "score")
DEPTH = 1000  # passages found for a query
CHUNK = 20_000  # passages in memory at a time
SEARCH_MEMORY = 2e9  # bytes
BYTES_PER_SCORE = 40  # while search compares: two floats and four keys of 8 bytes
RANKED = 10  # passages that MRR@10 and nDCG@10 look at
RECALL_DEPTHS = (10, 100, 1000)
DEV_INTERVAL = 10  # every tenth training query is for dev


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
            row = json.loads(text)
            yield line, str(row["_id"]), f"{row.get('title') or ''} {row['text']}".strip()
        except (ValueError, KeyError, TypeError, AttributeError):
            expected = 'JSON, {"_id": ..., "text": ...}'
            raise DataError(f"{path}:{line}: {text[:40]!r}, expected {expected}") from None


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
        if not score.isdecimal():
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


def read_qrels(beir, split, queries):
    """-> {query id: {number of a passage: score}}, and how many passages the corpus has.

    Reads the corpus once, for its ids. Raises DataError: an id that is unknown or used twice, a
    query without positives, a score that is not a whole number, 0 or more.
    """
    path = find(beir, f"qrels/{split}.tsv")
    corpus = find(beir, "corpus.jsonl")
    judgements = read_judgements(path, queries)
    numbers, count = number_passages(corpus, {row.passage for row in judgements})
    qrels = {}
    last_line = {}
    for line, query, passage, score in judgements:
        if passage not in numbers:
            expected = f"an id of {corpus.name}"
            raise DataError(f"{path}:{line}: passage {passage!r} is unknown, expected {expected}")
        qrels.setdefault(query, {})[numbers[passage]] = score
        last_line[query] = line
    for query, scores in qrels.items():
        if not any(scores.values()):
            problem = f"query {query!r} has no positive, expected one with a score above 0"
            raise DataError(f"{path}:{last_line[query]}: {problem}")
    return qrels, count


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

INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1


def in_order_of_floats(bits):
    """int32 with the bits of floats <-> int32 in the order of these floats. Its own inverse."""
    return torch.where(bits < 0, bits ^ INT32_MAX, bits)


def ranking_keys(scores, numbers):
    """float32 scores [Q, n], passage numbers [n] -> int64 keys [Q, n], no two of a query equal.

    A higher score has a higher key, and of equal scores the lower number has it.
    """
    order = in_order_of_floats(scores.view(torch.int32)).to(torch.int64)
    return order * 2**32 + (UINT32_MAX - numbers)


def read_keys(keys):
    """What ranking_keys has packed -> scores, passage numbers."""
    bits = in_order_of_floats((keys >> 32).to(torch.int32))
    return bits.view(torch.float32), UINT32_MAX - (keys & UINT32_MAX)


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
        numbers = start + torch.arange(len(chunk), device=device)
        queries_at_a_time = max(1, int(memory / (BYTES_PER_SCORE * (len(chunk) + depth))))
        kept = []
        for i in range(0, len(queries), queries_at_a_time):
            block = slice(i, i + queries_at_a_time)
            new = ranking_keys(queries[block].to(device) @ chunk.T, numbers)
            keys = torch.cat([best[block].to(device), new], dim=1)
            kept.append(keys.topk(min(depth, keys.shape[1])).values.cpu())
        best = torch.cat(kept)
        start += len(chunk)
    return read_keys(best)


def mine_hard_negatives(queries, passages, positives, count, device="cpu", memory=SEARCH_MEMORY):
    """The `count` passages most similar to each query, its positives left out -> numbers [Q, count]

    queries [Q, D], passages [P, D]: numpy arrays of embeddings, not normalized; positives: Q lists
    of passage numbers. Raises DataError if there are too few passages.
    """
    depth = count + max(map(len, positives))
    if len(passages) < depth:
        problem = f"too few for {count} hard negatives beside a query's positives"
        raise DataError(f"{len(passages)} passages: {problem}")
    chunks = (normalized(passages[i : i + CHUNK]) for i in range(0, len(passages), CHUNK))
    _, found = search(normalized(queries), chunks, depth, memory, device)
    negatives = []
    for ranking, known in zip(found.tolist(), positives):
        others = [number for number in ranking if number not in known]
        negatives.append(others[:count])
    return np.array(negatives)


def normalized(vectors):
    """numpy [n, D] -> L2-normalized tensor [n, D]."""
    return F.normalize(torch.from_numpy(vectors.copy()), dim=1)  # a memory map may be read-only


# --------------------------------------------------------------------------------------------------
# Scores
# --------------------------------------------------------------------------------------------------


def metrics(found, qrels):
    """Passage numbers found [Q, DEPTH], best first -> {metric: mean over the queries, 0 to 100}.

    qrels: Q times {number of a passage: score}.
    """
    totals = {}
    for ranking, scores in zip(found.tolist(), qrels):
        for name, value in query_metrics(ranking, scores).items():
            totals[name] = totals.get(name, 0.0) + value
    return {name: 100 * float(total) / len(qrels) for name, total in totals.items()}


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


def embed(encoder, texts, half=False):
    """-> L2-normalized embeddings [n, D] in float32, rounded to float16 before if `half`."""
    vectors = F.normalize(torch.from_numpy(encode_sentences(encoder, texts)), dim=1)
    return vectors.half().float() if half else vectors


class PassageEncoder:
    """Encodes chunks of passages, and counts the `seconds` that this takes."""

    def __init__(self, encoder, half=False):
        self.encoder = encoder
        self.half = half
        self.seconds = 0.0

    def embeddings(self, chunks, title):
        """Lists of texts -> yield tensors [n, D]. The time between two of them is not counted."""
        with progress(desc=title, unit=" passages", leave=False, disable=not title) as bar:
            for texts in chunks:
                clock = time.perf_counter()
                vectors = embed(self.encoder, texts, self.half)
                self.seconds += time.perf_counter() - clock
                bar.update(len(texts))
                yield vectors


def evaluate(
    encoder, queries, qrels, chunks, document=None, half=False, memory=SEARCH_MEMORY, title=""
):
    """Encode queries by `encoder`, passages by `document` or the same one; search; score.

    queries: Q texts; qrels: Q times {number of a passage: score}; chunks: lists of texts, the
    corpus in its order, read one at a time. Returns metrics(), and the seconds that the passages
    took to encode. The encoder stays in the mode (train or eval) that it is in.
    """
    device = next(encoder.parameters()).device
    training = encoder.training
    questions = embed(encoder.eval(), queries)
    encoded = PassageEncoder(document or encoder, half)
    _, found = search(questions, encoded.embeddings(chunks, title), DEPTH, memory, device)
    encoder.train(training)
    return metrics(found, qrels), encoded.seconds


# --------------------------------------------------------------------------------------------------
# Data of a training run
# --------------------------------------------------------------------------------------------------


class TrainingData(NamedTuple):
    """The corpus, and the queries to train on with the passages that answer them."""

    passages: list  # P texts
    queries: list  # Q texts
    positives: list  # Q lists of passage numbers


class JudgedQueries(NamedTuple):
    """Q queries, and which passages answer them."""

    texts: list
    qrels: list


class RetrievalSets(NamedTuple):
    """dev, among a part of the passages, chooses the best student; test is scored at the end."""

    dev: JudgedQueries
    dev_passages: list  # texts
    test: JudgedQueries
    beir: str

    def dev_score(self, encoder):
        """MRR@10 of the dev queries."""
        scores, _ = evaluate(encoder, self.dev.texts, self.dev.qrels, [self.dev_passages])
        return scores[f"MRR@{RANKED}"]

    def scores(self, encoder, title):
        """{metric: 0 to 100}, that of dev first."""
        scores = {f"dev MRR@{RANKED}": self.dev_score(encoder)}
        if self.test.texts:
            corpus = passages(self.beir)
            test, _ = evaluate(encoder, self.test.texts, self.test.qrels, corpus, title=title)
            scores |= test
        return scores


def read_training_data(beir, dev_size, skip_test=False):
    """A BEIR folder with qrels/train.tsv -> TrainingData, RetrievalSets.

    Every tenth training query is for dev, among the first `dev_size` passages and the positives.
    test is that of qrels/test.tsv. Raises DataError.
    """
    queries = read_queries(beir)
    qrels, _ = read_qrels(beir, "train", queries)
    if len(qrels) < DEV_INTERVAL:
        expected = f"{DEV_INTERVAL} or more, every tenth of which is for dev"
        raise DataError(f"{beir}: {len(qrels)} training queries, expected {expected}")
    names = list(qrels)
    dev_names = names[DEV_INTERVAL - 1 :: DEV_INTERVAL]
    train_names = [name for i, name in enumerate(names, 1) if i % DEV_INTERVAL != 0]
    test_qrels = {} if skip_test else read_qrels(beir, "test", queries)[0]
    corpus = [text for chunk in passages(beir) for text in chunk]

    train = judged_queries(train_names, queries, qrels)
    positives = []
    for scores in train.qrels:
        positives.append([number for number, score in scores.items() if score > 0])
    dev = judged_queries(dev_names, queries, qrels)
    dev_passages, dev_qrels = subset(corpus, dev.qrels, dev_size)
    sets = RetrievalSets(
        dev=JudgedQueries(dev.texts, dev_qrels),
        dev_passages=dev_passages,
        test=judged_queries(test_qrels, queries, test_qrels),
        beir=beir,
    )
    return TrainingData(corpus, train.texts, positives), sets


def training_rows(data, mined):
    """A row for every positive of a training query -> n anchors (texts), positives [n], hard
    negatives [n, K], which are numbers of passages.

    data: TrainingData; mined: the hard negatives of each query [Q, K].
    """
    repeats = [len(numbers) for numbers in data.positives]
    queries = np.repeat(np.arange(len(data.queries)), repeats)
    anchors = [data.queries[query] for query in queries]
    return anchors, np.concatenate(data.positives), mined[queries]


def judged_queries(names, queries, qrels):
    """The queries with these ids -> JudgedQueries."""
    return JudgedQueries([queries[name] for name in names], [qrels[name] for name in names])


def subset(texts, qrels, size):
    """The first `size` passages and all that qrels names -> their texts, qrels with new numbers."""
    kept = set(range(min(size, len(texts))))
    for scores in qrels:
        kept.update(scores)
    kept = sorted(kept)
    new_number = {number: position for position, number in enumerate(kept)}
    renumbered = []
    for scores in qrels:
        renumbered.append({new_number[number]: score for number, score in scores.items()})
    return [texts[number] for number in kept], renumbered
