# SPDX-License-Identifier: MIT
"""Score sentence encoders on semantic textual similarity (STS): Spearman x 100 of the cosine.

By default: the seven STS test sets of SentEval and their average, in SimCSE's "all" setting, where
the subsets of a year are concatenated before one correlation is computed. A model is a folder or a
name on the Hugging Face Hub, pooled as its folder states, unless --pooling replaces that.

  python eval_sts.py runs/ckd sentence-transformers/all-MiniLM-L6-v2
  python eval_sts.py runs/ckd --split dev             STS-B dev, which chooses the students
  python eval_sts.py runs/ckd --pairs demo/test.tsv   your own scored pairs
  python eval_sts.py runs/distilface --sets STS12,STS13,STS14,STS15,STS-B   DistilFACE's Table 2
"""

import math
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from tqdm import tqdm

from common import BAR, SENTEVAL, UserError, one_line_errors, read_lines, read_scored_pairs
from common import load_encoder, resolve_data, resolve_model, spearman
from common import Device, Pooling, read_json, read_options, run_main, table, write_json


class Options:
    models: list  # folders, or names on the Hub
    senteval: str = SENTEVAL  # its folder or tar file
    split: Literal["test", "dev"] = "test"  # dev: STS-B's
    sets: str = None  # of the test sets, as in STS12,STS-B
    pairs: list = None  # instead: files of scored pairs (TSV)
    pooling: Pooling = None  # of all models (default: as a folder states, or mean)
    student_layers: str = None  # keep only these layers of each model, as in 1,3,5
    device: Device = None  # (default: cuda if there is one)
    json: str = None  # a file for the scores


def embed(encoder, input_ids, attention_mask):
    """Token ids and mask, [N, L] each, padded on the right -> embeddings [N, D] in float32."""
    states = encoder.model(input_ids, attention_mask=attention_mask).last_hidden_state  # [N, L, H]
    if encoder.pooling == "cls":
        pooled = states[:, 0]
    elif encoder.pooling == "lasttoken":
        last = attention_mask.sum(dim=1) - 1  # [N], since padding is on the right
        pooled = states[torch.arange(states.shape[0], device=states.device), last]
    else:
        mask = attention_mask.unsqueeze(-1)  # [N, L, 1]
        pooled = (states * mask).sum(dim=1) / mask.sum(dim=1)
    embedding = encoder.heads(pooled).float()  # [N, D]
    return F.normalize(embedding, dim=-1) if encoder.normalize else embedding


# ---- Models --------------------------------------------------------------------------------------


def load(name, pooling=None, layers=None):
    """-> encoder, embed(). A student that pools several layers is loaded by its own script."""
    entries = read_json(resolve_model(name) / "modules.json", [])
    form = "modules.json must be as this project or sentence-transformers writes it"
    with one_line_errors(name, form):
        module = entries[1] if len(entries) > 1 and not pooling else {}  # after the transformer
        script = module.get("script")
    if layers and script:
        raise UserError(f"{name}: it pools several layers and cannot be cut; choose a --pooling")
    if script == "distilface":
        import distilface

        return distilface.load_student(name, module["pooling"]), distilface.embed
    if script == "dse":
        import dse

        return dse.load_student(name), dse.embed
    return load_encoder(name, pooling, layers), embed


# ---- Data ----------------------------------------------------------------------------------------


def read_sts(folder, split="test"):
    """SentEval's folder, or one above it -> {name: scored pairs}. Raises UserError.

    split "dev": STS-B's dev set; "test": STS12 to STS16, each with all of its subsets together
    (SimCSE's "all" setting) and without unscored pairs, then STS-B and SICK-R.
    """
    benchmark = min(Path(folder).rglob("STSBenchmark"), default=None)
    if benchmark is None:
        raise UserError(f"{folder}: no STS/STSBenchmark in it; give SentEval's folder or tar file")
    pairs = read_scored_pairs(benchmark / f"sts-{split}.csv", (5, 6, 4))
    if split == "dev":
        return {"dev": pairs}
    sets = {}
    no_sentences = {"ALL.txt", "SMT.txt"}  # SentEval has only their scores
    for year in ("STS12", "STS13", "STS14", "STS15", "STS16"):
        folder = benchmark.with_name(f"{year}-en-test")
        names = {path.name.split(".", 2)[2] for path in folder.glob("STS.*.txt")} - no_sentences
        sets[year] = [pair for name in sorted(names) for pair in read_sts_subset(folder, name)]
    sets["STS-B"] = pairs
    sick = benchmark.parents[1] / "SICK" / "SICK_test_annotated.txt"
    sets["SICK-R"] = read_scored_pairs(sick, (1, 2, 3))
    return sets


def read_sts_subset(folder, name):
    """STS.input.NAME and STS.gs.NAME of a year -> scored pairs. Raises UserError."""
    form = "STS.gs has one score, or none, for each line of STS.input"
    texts = list(read_lines(folder / f"STS.input.{name}", lambda line: line.split("\t")[:2], form))
    gold = folder / f"STS.gs.{name}"
    scores = list(read_lines(gold, lambda line: [float(line or math.nan)], form))
    if len(scores) != len(texts):
        raise UserError(f"{gold}: {len(scores)} lines, but {len(texts)} pairs of sentences; {form}")
    return [(*text, score) for text, (score,) in zip(texts, scores) if not math.isnan(score)]


# ---- Command line --------------------------------------------------------------------------------


def read_data(args):
    """The scored pairs that the options name -> {name: pairs}. Raises UserError."""
    if args.pairs:
        return {file: read_scored_pairs(file) for file in args.pairs}
    sets = read_sts(resolve_data(args.senteval), args.split)
    names = args.sets.split(",") if args.sets else [*sets]
    if not {*names} <= {*sets}:
        raise UserError(f"--sets {args.sets}: choose from {','.join(sets)}")
    return {name: sets[name] for name in names}


def main():
    args = read_options(Options, __doc__)
    sets = read_data(args)
    rows = {}
    for name in args.models:
        encoder, embed_with = load(name, args.pooling, args.student_layers)
        encoder.to(args.device)
        bar = tqdm(sets.items(), name, leave=False, delay=1, **BAR)
        rows[name] = {key: spearman(embed_with, encoder, pairs) for key, pairs in bar}
        if len(sets) > 1:
            rows[name]["avg"] = sum(rows[name].values()) / len(sets)
    if args.json:  # before anything that the terminal may not be able to show
        write_json(Path(args.json), rows)
    print(table(rows))


if __name__ == "__main__":
    run_main(main)
