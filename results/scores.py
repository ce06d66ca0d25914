"""Score a model on STS and search in one process: in fp32, and as ONNX files in int8 and 4 bits.

  python results/scores.py runs/three-0 --data FOLDER --sets sts qnli --files fp32 int8 q4
      --document-model sentence-transformers/all-MiniLM-L6-v2 --json runs/score-three-0.json

FOLDER is written by data_sets.py. Columns: megabytes of the weights; the seven test sets of STS and
their average (Spearman x 100), and the average without pairs that overlap with what chooses or
trains a student; nDCG@10 x 100 on SciFact, MRR@10 x 100 on QNLI, each with the model's own index
and with that of --document-model in fp32, which a student of the same dimensions can search. --json
also has the score of each question.
"""

import re
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import UserError, encode, read_options, run_main, spearman, table, write_json
from eval_sts import load, read_sts
from extras.eval_retrieval import metrics, read_split, read_texts, search, set_prompts
from extras.quantize import onnx_model, write_onnx

FILES = dict(fp32="fp32", int8="int8", q4="4 bits", q4_2="4 and 2 bits")  # names of rows
CORPORA = dict(scifact=("SciFact", "nDCG@10"), qnli=("QNLI", "MRR@10"))
NO_PROMPTS = SimpleNamespace(query_prompt=None, passage_prompt=None)  # take the folder's


class Options:
    model: str  # folder or Hub name
    data: str = "data"  # the folder that data_sets.py writes
    sets: list = None  # of sts, scifact, qnli (default: sts)
    files: list = None  # of fp32, int8, q4, q4_2 (default: fp32)
    document_model: str = None  # its index is searched, too
    json: str = None  # a file for the unrounded numbers


def plain(text):
    """The letters and digits of a text, in lower case: what counts as the same sentence."""
    return re.sub(r"[\W_]+", "", text.lower())


def without_overlap(data):
    """-> {test set: its pairs without those in STS-B dev, or with a general sentence}."""
    senteval = Path(data, "senteval")
    dev = {frozenset((plain(a), plain(b))) for a, b, _ in read_sts(senteval, "dev")["dev"]}
    lines = Path(data, "unlabeled.txt").read_text("utf-8").splitlines()
    general = {plain(line) for line in lines}
    kept = {}
    for name, pairs in read_sts(senteval).items():
        texts = [(plain(a), plain(b)) for a, b, _ in pairs]
        kept[name] = [
            pair
            for pair, both in zip(pairs, texts)
            if frozenset(both) not in dev and not general.intersection(both)
        ]
    return kept


def embed_by_file(run, encoder, input_ids, attention_mask):
    """embed() by the ONNX file that run() runs."""
    return torch.from_numpy(run(input_ids, attention_mask))


def sts_scores(embed, encoder, data):
    sets = read_sts(Path(data, "senteval"))
    texts = sorted({text for pairs in sets.values() for pair in pairs for text in pair[:2]})
    vector = dict(zip(texts, encode(embed, encoder, texts)))

    def known(embed, encoder, texts):
        return np.stack([vector[text] for text in texts])

    row = {name: spearman(embed, encoder, pairs, known) for name, pairs in sets.items()}
    rest = [spearman(embed, encoder, pairs, known) for pairs in without_overlap(data).values()]
    return row | {"avg": mean(row.values()), "avg without overlap": mean(rest)}


def index_of(embed, encoder, beir):
    set_prompts(encoder, NO_PROMPTS)
    passages = [encoder.passage_prompt + text for _, text in read_texts(beir, "corpus.jsonl")]
    return encode(embed, encoder, passages)


def search_scores(embed, encoder, beir, indexes):
    """indexes {name: vectors [P, D]} -> {name: metrics() of each query of the test split}."""
    queries, answers = read_split(beir, "test")
    set_prompts(encoder, NO_PROMPTS)
    vectors = encode(embed, encoder, [encoder.query_prompt + text for text in queries])
    scores = {}
    for name, passages in indexes.items():
        found = search(vectors, [passages], 11, "cosine", "cpu")
        scores[name] = [metrics([ranking], [known]) for ranking, known in zip(found, answers)]
    return scores


def teachers_index(name, beir):
    """Vectors of --document-model, kept in runs/ for other models."""
    kept = Path("runs", f"index-{Path(name).name}-{Path(beir).name}.npy")
    if not kept.exists():
        encoder, embed = load(name)
        np.save(kept, index_of(embed, encoder, beir))
    return np.load(kept)


def score(args, embed, encoder):
    """-> a row of the table, {column of search: the score of each question}."""
    row, questions = {}, {}
    for name in args.sets:
        if name == "sts":
            row |= sts_scores(embed, encoder, args.data)
            continue
        beir = Path(args.data, "retrieval", name)
        title, key = CORPORA[name]
        indexes = {title: index_of(embed, encoder, beir)}
        if args.document_model:
            indexes[f"{title}, teacher's index"] = teachers_index(args.document_model, beir)
        found = search_scores(embed, encoder, beir, indexes)
        by_question = {column: [one[key] for one in rows] for column, rows in found.items()}
        row |= {column: mean(values) for column, values in by_question.items()}
        for column, values in by_question.items():
            questions[column] = [round(value, 2) for value in values]
    return row, questions


def main():
    args = read_options(Options, __doc__)
    args.sets, args.files = args.sets or ["sts"], args.files or ["fp32"]
    if unknown := {*args.sets} - {"sts", *CORPORA} | {*args.files} - {*FILES}:
        raise UserError(f"{min(unknown)}: choose --sets and --files from those of --help")
    encoder, embed = load(args.model)
    rows, questions = {}, {}

    def add(kind, megabytes, embed):
        row, questions[FILES[kind]] = score(args, embed, encoder)
        rows[FILES[kind]] = {"MB": megabytes} | row

    if "fp32" in args.files:
        add("fp32", sum(value.numel() for value in encoder.parameters()) * 4 / 1e6, embed)
    if rounded := [kind for kind in args.files if kind != "fp32"]:
        with tempfile.TemporaryDirectory() as folder:
            encoder, _, files = write_onnx(args.model, folder)
            for kind in rounded:
                run = onnx_model(files[kind])
                add(kind, files[kind].stat().st_size / 1e6, partial(embed_by_file, run))
    if args.json:
        found = {name: row | {"questions": questions[name]} for name, row in rows.items()}
        write_json(Path(args.json), found)
    print(table(rows))


if __name__ == "__main__":
    run_main(main)
