"""Passage retrieval in training: its options, queries for dev, hard negatives.

support/retrieval.py describes the files. Passages with one text are one passage here, whose number
is its position among the distinct texts. No text is tokenized twice by one tokenizer, and hard
negatives are mined once for all runs.
"""

import array
import hashlib
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from common import (
    Cache,
    DataError,
    Tokens,
    encode,
    read_lines,
    write_whole,
)
from support import distributed
from support.cache import embeddings_key, load_array, save_array, teacher_embeddings
from support.command_line import count
from support.retrieval import (
    CHUNK,
    NONE,
    RANKED,
    SEARCH_MEMORY,
    SIMILARITIES,
    JudgedQueries,
    comparable,
    evaluate,
    find,
    metrics,
    number_passages,
    passages,
    read_judged,
    read_queries,
    read_texts,
    search,
    unless_answer,
)

DEV_INTERVAL = 10  # every tenth training query is for dev, if these are not too many


def add_retrieval_options(parser):
    """--beir, --test-split, --dev-queries, --dev-passages, --similarity, --negatives, ..."""
    group = parser.add_argument_group("retrieval (--task dr)")
    add = group.add_argument
    add("--beir", default="BeIR/msmarco", help="BEIR folder, or Hub data set; %(default)s")
    add(
        "--test-split",
        default="test",
        help="test queries: qrels/SPLIT.tsv; MS MARCO's 6,980 are dev; %(default)s",
    )
    add("--dev-queries", type=count, default=2000, help="training queries for dev; %(default)s")
    add(
        "--dev-passages",
        type=count,
        default=100_000,
        help="passages searched for a dev score, and the positives; %(default)s",
    )
    add("--similarity", choices=SIMILARITIES, default="cosine", help="of a search; %(default)s")
    add(
        "--teacher-similarity",
        choices=SIMILARITIES,
        help="of the teacher's search and its hard negatives; by default --similarity",
    )
    add("--hard-negatives", type=count, default=8, help="of a query, stage 2; %(default)s (4.3)")
    add(
        "--negatives",
        metavar="FILE",
        help="hard negatives of stage 2, lines of query-id and passage-ids, tab-separated; the "
        "teacher's are written there if there is no such file",
    )
    return group


# --------------------------------------------------------------------------------------------------
# Data of a training run
# --------------------------------------------------------------------------------------------------


class TokenizedTexts:
    """Texts, tokenized once for all encoders that tokenize them alike."""

    def __init__(self, texts, max_length=None):
        self.texts = texts
        self.max_length = max_length
        self.tokens = {}

    def of(self, encoder):
        """-> Tokens, cut at `max_length` and at the encoder's own maximum."""
        limit = min(self.max_length or encoder.max_length, encoder.max_length)
        key = limit, tokenizer_content(encoder.tokenizer)
        if key not in self.tokens:
            self.tokens[key] = Tokens(encoder, self.texts, limit)
        return self.tokens[key]


def tokenizer_content(tokenizer):
    """What is equal for tokenizers that give the same tokens: a hash of all that they consist of,
    or the tokenizer itself where that is not known."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer
    content = json.loads(backend.to_str())
    del content["truncation"], content["padding"]  # they change with each call
    content["pad"] = tokenizer.pad_token_id
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class TrainingData(NamedTuple):
    """The queries to train on, and the passages that answer them."""

    numbers: np.ndarray  # of each passage of the corpus: which of the P distinct texts it has
    names: list  # Q ids of queries
    queries: list  # Q texts
    positives: list  # Q lists of numbers of passages
    known: list  # the same and the query's own passage: none of them is a hard negative


class RetrievalSets(NamedTuple):
    """dev, among a part of the passages, chooses the best student; test is scored at the end."""

    dev: JudgedQueries
    dev_queries: TokenizedTexts
    dev_passages: TokenizedTexts
    test: JudgedQueries | None
    beir: str
    similarity: str = "cosine"

    @torch.no_grad()
    def dev_score(self, encoder):
        """MRR@10 of the dev queries."""
        device = next(encoder.parameters()).device
        training = encoder.training
        encoder.eval()
        queries = comparable(encode(encoder, self.dev_queries.of(encoder), device), self.similarity)
        texts = comparable(encode(encoder, self.dev_passages.of(encoder), device), self.similarity)
        encoder.train(training)
        _, found = search(queries, texts.split(CHUNK), RANKED + 1, SEARCH_MEMORY, device)
        return metrics(found, self.dev)[f"MRR@{RANKED}"]

    def scores(self, encoder, title):
        """{metric: 0 to 100}, that of dev first."""
        scores = {f"dev MRR@{RANKED}": self.dev_score(encoder)}
        if self.test is not None:
            chunks = passages(self.beir)
            test, _ = evaluate(encoder, self.test, chunks, similarity=self.similarity, title=title)
            scores |= test
        return scores


def read_training_data(beir, dev_queries, dev_passages, test_split=None):
    """A BEIR folder with qrels/train.tsv -> the P distinct passages, TrainingData, RetrievalSets.

    dev: every tenth training query, or if these are more than `dev_queries`, fewer of them, evenly
    spread; searched among the first `dev_passages` passages and the positives. test is that of
    qrels/TEST_SPLIT.tsv. Raises DataError.
    """
    queries = read_queries(beir)
    judged, _ = read_judged(beir, "train", queries)
    if len(judged.names) < DEV_INTERVAL:
        expected = f"{DEV_INTERVAL} or more, every tenth of which is for dev"
        raise DataError(f"{beir}: {len(judged.names)} training queries, expected {expected}")
    test = read_judged(beir, test_split, queries)[0] if test_split else None
    texts, numbers = distinct_passages(beir)
    judged = renumber(judged, numbers)

    interval = max(DEV_INTERVAL, math.ceil(len(judged.names) / dev_queries))
    is_dev = np.arange(1, len(judged.names) + 1) % interval == 0
    dev = judged.pick(np.flatnonzero(is_dev))
    train = judged.pick(np.flatnonzero(~is_dev))
    kept = set(range(min(dev_passages, len(texts)))).union(*dev.qrels)
    kept = np.array(sorted(kept))
    new_numbers = np.full(len(texts), NONE)
    new_numbers[kept] = np.arange(len(kept))
    dev = renumber(dev, new_numbers)

    positives = []
    known = []
    for scores, own in zip(train.qrels, train.own):
        positives.append([number for number, score in scores.items() if score > 0])
        known.append(positives[-1] if own == NONE else [*positives[-1], own])
    sets = RetrievalSets(
        dev=dev,
        dev_queries=TokenizedTexts(dev.texts),
        dev_passages=TokenizedTexts([texts[number] for number in kept]),
        test=test,
        beir=beir,
    )
    return texts, TrainingData(numbers, train.names, train.texts, positives, known), sets


def distinct_passages(beir):
    """-> the distinct texts of a corpus, and which of them each of its passages has, [P]."""
    number_of = {}
    numbers = array.array("q")
    for chunk in passages(beir):
        for text in chunk:
            numbers.append(number_of.setdefault(text, len(number_of)))
    return list(number_of), np.frombuffer(numbers, np.int64)


def renumber(judged, new_numbers):
    """Give passage i the number new_numbers[i]; where two become one, the higher score counts."""
    qrels = []
    own = []
    for scores, number in zip(judged.qrels, judged.own):
        renumbered = {}
        for passage, score in scores.items():
            new = int(new_numbers[passage])
            renumbered[new] = max(score, renumbered.get(new, 0))
        qrels.append(renumbered)
        own.append(NONE if number == NONE else unless_answer(int(new_numbers[number]), renumbered))
    return judged._replace(qrels=qrels, own=own)


def training_rows(data, hard_negatives):
    """A row for every positive of a training query -> three arrays of numbers: queries [n], their
    positives [n], hard negatives [n, K].

    data: TrainingData; hard_negatives: of each query, [Q, K].
    """
    repeats = [len(numbers) for numbers in data.positives]
    queries = np.repeat(np.arange(len(data.queries)), repeats)
    return queries, np.concatenate(data.positives), hard_negatives[queries]


# --------------------------------------------------------------------------------------------------
# Hard negatives
# --------------------------------------------------------------------------------------------------


def mine_hard_negatives(
    queries, passages, known, count, similarity="cosine", device="cpu", memory=SEARCH_MEMORY
):
    """The `count` passages most similar to each query, all but the `known` ones -> [Q, count]

    queries [Q, D], passages [P, D]: numpy arrays of embeddings, not normalized; known: Q lists of
    passage numbers. Raises DataError if there are too few passages.
    """
    depth = check_depth(len(passages), known, count)
    chunks = (
        comparable(passages[i : i + CHUNK], similarity) for i in range(0, len(passages), CHUNK)
    )
    _, found = search(comparable(queries, similarity), chunks, depth, memory, device)
    negatives = np.empty((len(queries), count), np.int64)
    for row, (ranking, left_out) in enumerate(zip(found, known)):
        others = [number for number in ranking.tolist() if number not in left_out]
        negatives[row] = others[:count]
    return negatives


def check_depth(passages, known, count):
    """How many passages of a ranking contain `count` that are not known. Raises DataError."""
    depth = count + max(map(len, known))
    if passages < depth:
        problem = f"too few for {count} hard negatives beside a query's positives"
        raise DataError(f"{passages} passages: {problem}")
    return depth


def cached_negatives(key, vectors, data, count, similarity, device):
    """What mine_hard_negatives() finds for the training queries -> [Q, count], once for all runs.

    vectors [P + Q, D]: the teacher's embeddings of passages and queries; key: their hash. The hard
    negatives lie in the cache under a hash of all that decides them. Raises DataError.
    """
    digest = hashlib.sha256(f"{key} {count} {similarity} {data.known}".encode())
    path = Cache.folder / f"negatives-{digest.hexdigest()[:32]}.npy"
    negatives = load_array(path)
    if negatives is None:
        passages, queries = np.split(vectors, [len(vectors) - len(data.queries)])
        negatives = mine_hard_negatives(queries, passages, data.known, count, similarity, device)
        save_array(path, negatives)
    return negatives


def write_negatives(path, beir, data, hard_negatives):
    """Write [Q, K] as lines of query-id, then K passage-ids, tab-separated. Raises DataError."""
    wanted = set(hard_negatives.ravel().tolist())
    names = {}
    corpus = read_texts(find(beir, "corpus.jsonl"))
    for number, (_, name, _) in zip(data.numbers.tolist(), corpus):
        if number in wanted:
            names.setdefault(number, name)
    lines = []
    for query, numbers in zip(data.names, hard_negatives.tolist()):
        lines.append("\t".join([query, *(names[number] for number in numbers)]) + "\n")
    write_whole(path, "".join(lines))


def read_negative_lines(path, queries, count):
    """A file of negatives -> {query-id: (line, its first `count` passage-ids)}.

    queries: those that are wanted, a dict or a set. Raises DataError: fewer than `count`
    passages, a query without a line.
    """
    lines = {}
    for line, text in read_lines(path):
        query, *names = text.split("\t")
        if query not in queries:
            continue
        if len(names) < count or not all(names):
            expected = f"a query-id and {count} passage-ids or more, tab-separated"
            raise DataError(f"{path}:{line}: {len(names)} passage-ids, expected {expected}")
        lines[query] = line, names[:count]
    for query in queries:
        if query not in lines:
            problem = f"no line for query {query!r}, expected one for each training query"
            raise DataError(f"{path}: {problem}")
    return lines


def read_negatives(path, beir, data, count):
    """What write_negatives() has written, or somebody else -> the first `count` of each query.

    Lines of other queries are skipped. Returns [Q, count]. Raises DataError: as
    read_negative_lines, or a passage that is unknown or answers the query.
    """
    lines = read_negative_lines(path, dict.fromkeys(data.names), count)
    wanted = {name for _, names in lines.values() for name in names}
    numbers, _ = number_passages(find(beir, "corpus.jsonl"), wanted)
    negatives = np.empty((len(data.names), count), np.int64)
    for row, query in enumerate(data.names):
        line, names = lines[query]
        for column, name in enumerate(names):
            number = data.numbers[numbers[name]] if name in numbers else NONE
            if number == NONE or number in data.known[row]:
                expected = "the id of a passage that does not answer the query"
                problem = f"passage {name!r} of query {query!r}, expected {expected}"
                raise DataError(f"{path}:{line}: {problem}")
            negatives[row, column] = number
    return negatives


def mined_negatives(data, teacher, tokens, args):
    """The hard negatives of each training query [Q, K], which the teacher finds.

    tokens: the teacher's, of all passages and training queries. Raises DataError.
    """
    vectors = teacher_embeddings(teacher, tokens, args.device, dtype=args.teacher_dtype).array
    key = embeddings_key(teacher, tokens, "", args.teacher_dtype)
    settings = (args.hard_negatives, args.teacher_similarity, args.device)
    mined = distributed.from_main(cached_negatives, key, vectors, data, *settings)
    if args.negatives and distributed.is_main():
        write_negatives(args.negatives, args.beir, data, mined)
    return mined


def given_negatives(passages, data, args):
    """The content of --negatives [Q, K], or None where they are to be mined.

    passages: how many distinct ones there are. Raises DataError.
    """
    if args.negatives and distributed.from_main(Path(args.negatives).exists):
        return read_negatives(args.negatives, args.beir, data, args.hard_negatives)
    if args.negatives and not Path(args.negatives).parent.is_dir():
        raise DataError(f"{args.negatives}: no such file, and no folder to write it to")
    check_depth(passages, data.known, args.hard_negatives)
    return None
