"""Score sentence encoders on passage retrieval: MRR@10, nDCG@10, Recall@10/100/1000 in percent, encoding speed and size of an embedding.

The data is a folder as BEIR lays it out, .gz or not:
  corpus.jsonl        {"_id": "d0", "title": "", "text": "..."}     a passage is its title, a blank, its text
  queries.jsonl       {"_id": "q0", "text": "..."}
  qrels/SPLIT.tsv     query-id, corpus-id, score, with that header; a score above 0 is a positive, and nDCG's gain
or the hub's: --beir BeIR/msmarco takes corpus and queries from that data set and the qrels from BeIR/msmarco-qrels.

Search is exact, by cosine similarity. The corpus is read, encoded, compared with all queries and forgotten in chunks of 20,000 passages, so that
the comparison stays within --memory whatever the size of the corpus; beside it stand the model, one chunk with its embeddings, 8 bytes a passage
to find double ids and 8 KB a query for its best 1000. Of equal scores the passage that comes first in the corpus ranks first.

  python eval_retrieval.py runs/ibkd sentence-transformers/all-MiniLM-L6-v2 --beir my-beir-folder
  python eval_retrieval.py runs/ibkd --beir my-beir-folder --document-model TEACHER     an index that the teacher built, queries by the student
"""
import array
import hashlib
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from huggingface_hub import hf_hub_download

import common

DEPTH, CHUNK = 1000, 20_000  # passages kept for a query, passages in memory at a time


def find(beir, name):
    """A file of a BEIR folder or of a data set on the hub -> its path. Raises DataError."""
    for path in (Path(beir) / name, Path(beir) / (name + ".gz")):
        if path.exists():
            return path
    if Path(beir).exists() or beir.count("/") != 1:
        raise common.DataError(f"{Path(beir) / name}: no such file, expected a BEIR folder: corpus.jsonl, queries.jsonl, qrels/")
    try:
        where = (beir + "-qrels", Path(name).name) if name.startswith("qrels/") else (beir, name + ".gz")
        return Path(hf_hub_download(*where, repo_type="dataset"))
    except Exception as error:  # the client's errors have no base class
        raise common.DataError(f"{'/'.join(where)}: not to be had from the hub ({' '.join(str(error).split())[:150]}); download it from "
                               f"huggingface.co/datasets/{where[0]} into a BEIR folder, and give that") from None


def read_texts(path):
    """Yield (line, id, text) of a corpus.jsonl or queries.jsonl. Raises DataError."""
    for line, text in common.read_lines(path):
        try:
            row = json.loads(text)
            yield line, str(row["_id"]), f"{row.get('title') or ''} {row['text']}".strip()
        except (ValueError, KeyError, TypeError, AttributeError):
            raise common.DataError(f'{path}:{line}: {text[:40]!r}, expected JSON, {{"_id": ..., "text": ...}}') from None


def read_queries(beir):
    """-> {query id: text}. Raises DataError for a double id too."""
    path, queries = find(beir, "queries.jsonl"), {}
    for line, name, text in read_texts(path):
        if name in queries:
            raise common.DataError(f"{path}:{line}: id {name!r} has been used above, expected ids of their own")
        queries[name] = text
    return queries


def read_qrels(beir, split, queries):
    """-> {query id: {number of the passage in the corpus: score}}, and how many passages there are. Reads the corpus once, for its ids.
    Raises DataError: an id that is unknown or used twice, a query without positives, a score that is no whole number >= 0."""
    path, corpus, rows = find(beir, f"qrels/{split}.tsv"), find(beir, "corpus.jsonl"), []
    for line, (query, passage, score) in common.read_columns(path, ("query-id", "corpus-id", "score")):
        if line == 1 and score == "score":
            continue
        if query not in queries:
            raise common.DataError(f"{path}:{line}: query {query!r} is unknown, expected an id of queries.jsonl")
        if not score.isdigit():
            raise common.DataError(f"{path}:{line}: score {score[:40]!r}, expected a whole number, 0 or more")
        rows.append((line, query, passage, int(score)))
    if not rows:
        raise common.DataError(f"{path}: no line but the header, expected query-id, corpus-id, score")
    number, hashes = {passage: None for _, _, passage, _ in rows}, array.array("q")
    for i, (_, name, _) in enumerate(read_texts(corpus)):
        hashes.append(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True))
        if name in number:
            number[name] = i
    values, counts = np.unique(np.frombuffer(hashes, np.int64), return_counts=True)
    if len(values) < len(hashes):
        double, seen = set(values[counts > 1].tolist()), set()
        for (line, name, _), value in zip(read_texts(corpus), hashes):
            if value in double and name in seen:
                raise common.DataError(f"{corpus}:{line}: id {name!r} has been used above, expected ids of their own")
            seen |= {name} if value in double else set()
    qrels, last = {}, {}
    for line, query, passage, score in rows:
        if number[passage] is None:
            raise common.DataError(f"{path}:{line}: passage {passage!r} is unknown, expected an id of {corpus.name}")
        qrels.setdefault(query, {})[number[passage]] = score
        last[query] = line
    for query, grades in qrels.items():
        if not any(grades.values()):
            raise common.DataError(f"{path}:{last[query]}: query {query!r} has no positive, expected one with a score above 0")
    return qrels, len(hashes)


def passages(beir, size=CHUNK):
    """Yield lists of `size` texts, the corpus in its order."""
    texts = []
    for _, _, text in read_texts(find(beir, "corpus.jsonl")):
        texts.append(text)
        if len(texts) == size:
            yield texts
            texts = []
    if texts:
        yield texts


def embed(encoder, texts, half=False):
    """-> unit vectors [n, D], float32, through float16 if `half`."""
    vectors = torch.from_numpy(common.encode(encoder, common.Tokens(encoder, texts), next(encoder.parameters()).device))
    vectors = F.normalize(vectors, dim=1)
    return vectors.half().float() if half else vectors


def search(queries, chunks, depth, memory, device="cpu"):
    """The `depth` passages most similar to each query, exactly: queries [Q, D], chunks of passages [n, D] one after the other
    -> scores [Q, depth] and passage numbers [Q, depth], best first; of equal scores the lower number first. `memory`: bytes to work in."""
    best, start = torch.empty(len(queries), 0, dtype=torch.int64), 0
    for chunk in chunks:
        chunk, kept = chunk.to(device), []
        block = max(1, int(memory / (40 * (len(chunk) + depth))))  # queries at a time; 40 bytes a score: two floats, four 8-byte keys
        falling = 2**32 - 1 - torch.arange(start, start + len(chunk), device=device)
        for i in range(0, len(queries), block):
            bits = (queries[i:i + block].to(device) @ chunk.T).view(torch.int32)
            order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)  # whole numbers in the order of the floats
            keys = torch.cat([best[i:i + block].to(device), order * 2**32 + falling], dim=1)  # no two are equal: ties are settled
            kept.append(keys.topk(min(depth, keys.shape[1])).values.cpu())
        best, start = torch.cat(kept), start + len(chunk)
    bits = (best >> 32).to(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32), 2**32 - 1 - (best & (2**32 - 1))


def hard_negatives(queries, passages, positives, count, device="cpu", memory=2e9):
    """The `count` passages most similar to each query but for its positives: queries [Q, D], passages [P, D], numpy, positives: Q lists of
    passage numbers -> numbers [Q, count]. Raises DataError where there are too few."""
    if len(passages) < count + max(map(len, positives)):
        raise common.DataError(f"{len(passages)} passages: too few for {count} hard negatives beside a query's positives")
    chunks = (F.normalize(torch.from_numpy(passages[i:i + CHUNK].copy()), dim=1) for i in range(0, len(passages), CHUNK))
    vectors = F.normalize(torch.from_numpy(queries.copy()), dim=1)
    found = search(vectors, chunks, count + max(map(len, positives)), memory, device)[1].tolist()
    return np.array([[number for number in ranking if number not in known][:count] for ranking, known in zip(found, positives)])


def subset(texts, qrels, size):
    """The first `size` passages and all that qrels names -> their texts, and qrels with the numbers that they have there."""
    kept = sorted({number for grades in qrels for number in grades} | set(range(min(size, len(texts)))))
    place = {number: i for i, number in enumerate(kept)}
    return [texts[number] for number in kept], [{place[number]: grade for number, grade in grades.items()} for grades in qrels]


def metrics(found, qrels):
    """found [Q, DEPTH], passage numbers best first, qrels a list of Q {number: grade} -> {metric: mean over the queries, 0 to 100}."""
    totals = dict.fromkeys(("MRR@10", "nDCG@10", "Recall@10", "Recall@100", "Recall@1000"), 0.0)
    for ranking, grades in zip(found.tolist(), qrels):
        gains = [grades.get(passage, 0) for passage in ranking]
        ideal = sorted(grades.values(), reverse=True)
        positives = sum(grade > 0 for grade in ideal)
        totals["MRR@10"] += next((1 / rank for rank, gain in enumerate(gains[:10], 1) if gain), 0)
        totals["nDCG@10"] += sum(gain / np.log2(rank + 1) for rank, gain in enumerate(gains[:10], 1)) \
            / sum(gain / np.log2(rank + 1) for rank, gain in enumerate(ideal[:10], 1))
        for k in (10, 100, 1000):
            totals[f"Recall@{k}"] += sum(gain > 0 for gain in gains[:k]) / positives
    return {name: 100 * float(total) / len(qrels) for name, total in totals.items()}


def evaluate(encoder, queries, qrels, chunks, document=None, half=False, memory=2e9, title=""):
    """Encode queries by `encoder`, passages by `document` or the same, search, score. queries: Q texts, qrels: Q times {number of a passage:
    grade}, chunks: lists of texts, the corpus in its order, read one at a time -> metrics(), and the seconds that the passages took to encode."""
    device, seconds = next(encoder.parameters()).device, 0.0
    training, document = encoder.training, document or encoder
    questions = embed(encoder.eval(), queries)

    def encoded():
        nonlocal seconds
        with common.progress(desc=title, unit=" passages", leave=False, disable=not title) as bar:
            for texts in chunks:
                clock = time.perf_counter()
                vectors = embed(document, texts, half)
                seconds += time.perf_counter() - clock  # before the search, which goes on while this waits
                bar.update(len(texts))
                yield vectors

    scores = metrics(search(questions, encoded(), DEPTH, memory, device)[1], qrels)
    encoder.train(training)
    return scores, seconds


def parse_args():
    parser = common.ArgumentParser(description="MRR@10, nDCG@10 and Recall of sentence encoders on a BEIR folder, by exact search")
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="folder or hub name")
    add("--beir", required=True, help="BEIR folder, or a data set on the hub: BeIR/msmarco")
    add("--split", default="test", help="qrels/SPLIT.tsv; %(default)s")
    add("--document-model", metavar="M", help="encode the passages with this model, the queries with each MODEL")
    add("--fp16", action="store_true", help="store passages in two bytes a number")
    add("--memory", type=float, default=2, help="GB for search, beside the models; %(default)s")
    add("--json", metavar="FILE", help="write the scores, unrounded")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="%(default)s")
    return parser.parse_args()


def main():
    args = parse_args()
    if args.device != "cpu" and not (args.device.startswith("cuda") and torch.cuda.is_available()):
        raise common.DataError(f"--device {args.device}: expected cpu, or cuda on a machine that has it")
    if not args.memory > 0:
        raise common.DataError(f"--memory {args.memory}: expected a number of GB above 0")
    texts = read_queries(args.beir)
    qrels, count = read_qrels(args.beir, args.split, texts)
    rows = {}
    for name in args.models:
        encoder = common.load_encoder(name).to(args.device).eval()
        document = common.load_encoder(args.document_model).to(args.device).eval() if args.document_model else encoder
        if document.width != encoder.width:
            raise common.DataError(f"--document-model {args.document_model}: width {document.width}, expected {encoder.width} as of {name}")
        scores, seconds = evaluate(encoder, [texts[query] for query in qrels], list(qrels.values()), passages(args.beir), document, args.fp16,
                                   args.memory * 1e9, name)
        rows[name] = scores | {"passages/s": count / seconds, "bytes": document.width * (2 if args.fp16 else 4)}
    print(common.table(rows))
    if args.json:
        try:
            Path(args.json).write_text(json.dumps(rows, indent=2) + "\n", "utf-8")
        except OSError as error:
            raise common.DataError(f"{args.json}: {error.strerror}, expected a file that can be written") from None


if __name__ == "__main__":
    common.run_main(main)
