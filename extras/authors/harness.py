# SPDX-License-Identifier: MIT
"""What the modules of extras.authors share: the start, the run of theirs, the run of ours.

The authors' program runs in another interpreter, with the libraries of its time. This file is
imported there, too: what needs our own libraries is imported inside functions.
"""

import contextlib
import importlib
import importlib.util
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
REAL = os.environ.get("AUTHORS_DATA")  # --epoch: a folder of real data, for whole epochs of them


def size(small, real):
    """The size of a run of some steps on demo/, or of one of whole epochs of real data."""
    return real if REAL else small


WIDTH = size(128, 384)  # of a small encoder


class Program(NamedTuple):
    """A training program of the authors, and the run of our script that must equal it.

    An outcome is dict(losses=[one per step, or per batch of a step], weights={our name: tensor},
    dev=the last dev score), at full precision, of the end of the run.
    """

    title: str  # the authors' file
    prepare: Callable  # (work): write what both runs read, into this folder
    theirs: Callable  # (checkout, work) -> outcome; runs in the authors' environment
    ours: Callable  # (work, undone) -> outcome; undone: the set of departures that are undone
    departures: dict  # {name: what theirs does; what ours does}


# ---- The start, in our environment ---------------------------------------------------------------

# Of demo/, and real data in their place.
FILES = {"sentences.txt": "unlabeled.txt", "triplets.csv": "nli_triplets.csv"}
FILES |= {"pairs.tsv": "pairs.tsv"}
STS_B = {"dev.tsv": "sts-dev.csv", "test.tsv": "sts-train.csv"}


def demo_lines(name, count=None):
    """The first lines of a file in demo/, or of real data of the same form -> list of str."""
    file = ROOT / "demo" / name
    if REAL and name.startswith("snli"):
        split = name.removesuffix(".tsv").removeprefix("snli-")
        folder = Path(REAL, "senteval/data/downstream/SNLI")
        files = [(folder / f"{part}.{split}").read_text("utf-8") for part in ("s1", "s2", "labels")]
        return list(map("\t".join, zip(*map(str.splitlines, files))))[:count]
    if REAL and name in STS_B:
        file = Path(REAL, "senteval/data/downstream/STS/STSBenchmark", STS_B[name])
        rows = [line.split("\t") for line in file.read_text("utf-8").splitlines()]
        return ["\t".join([row[5], row[6], row[4]]) for row in rows[:count]]
    if REAL:
        file = Path(REAL, FILES[name])
    return file.read_text("utf-8").splitlines()[:count]


def write_encoder(folder, layers=None):
    """all-MiniLM-L6-v2 without dropout, or only its layers "1,3,5", as a plain folder.

    The tokenizer's files are the original ones, since older libraries must read them.
    """
    import transformers

    import common

    source = common.resolve_model(common.MINILM)
    model = transformers.AutoModel.from_pretrained(source, dtype=torch.float32)
    model.config.hidden_dropout_prob = 0.0
    model.config.attention_probs_dropout_prob = 0.0
    if layers:
        common.keep_layers(model, layers)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(source / file, folder)


def write_small_encoder(folder, layers, texts):
    """all-MiniLM-L6-v2's layers, as "1,3,5", a third as wide, with the tokens of `texts` alone.

    A run of ours then takes seconds: each of its sizes is cut to the first third. Of real data,
    all tokens and the whole width.
    """
    if REAL:
        return write_encoder(folder, layers)
    import transformers

    from extras import trim

    write_encoder(folder, layers)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    tokens = trim.read_vocabulary(content)
    used = {token["id"] for token in content["added_tokens"]}
    used.update(*tokenizer(texts).input_ids)
    new = {old: number for number, old in enumerate(sorted(used))}
    trim.cut_tokenizer(content, tokens, new)
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    (folder / "vocab.txt").write_text("".join(tokens[old] + "\n" for old in new), "utf-8")

    model = transformers.AutoModel.from_pretrained(folder)
    trim.cut_model(model, new)
    thirds = {3 * WIDTH: WIDTH, 12 * WIDTH: 4 * WIDTH}
    weights = {}
    for name, value in model.state_dict().items():
        weights[name] = value[tuple(slice(thirds.get(size, size)) for size in value.shape)]
    config = model.config
    config.hidden_size, config.intermediate_size, config.num_attention_heads = WIDTH, 4 * WIDTH, 4
    model = type(model)(config)
    model.load_state_dict(weights)
    model.save_pretrained(folder)


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", "utf-8")


# ---- Their run -----------------------------------------------------------------------------------


class StandIn:
    """A module or class of which some names are replaced, for one file of the authors or ours."""

    def __init__(self, original, **replaced):
        self.__dict__.update(replaced)
        self.__dict__["original"] = original

    def __getattr__(self, name):
        return getattr(self.original, name)


def load(path, **modules):
    """Import a file of the authors. modules: what it gets when it imports these names."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    spec = importlib.util.spec_from_file_location(f"theirs_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules.update(before)
    return module


def our_order():
    """What replaces RandomSampler.__iter__: in each epoch, the order of common.Batches."""
    epochs = itertools.count()

    def draw(sampler):
        random = np.random.default_rng([0, next(epochs)])
        return iter(random.permutation(len(sampler.data_source)).tolist())

    return draw


def renamed(weights, names):
    """Weights under our names. names: {their prefix: ours}; what has none of them is left out."""
    found = {}
    for name, value in weights.items():
        for prefix, our_prefix in names.items():
            # The numbers of positions are a constant, and no weight.
            if name.startswith(prefix) and not name.endswith("position_ids"):
                found[our_prefix + name.removeprefix(prefix)] = value
    return found


def run_theirs(python, module, name, checkout, work):
    """Run the authors' program with this interpreter -> its outcome. Raises UserError."""
    from common import UserError

    python = os.path.abspath(python) if os.sep in python else python  # it runs in `work`
    words = [python, "-m", "extras.authors.harness", module, name, checkout.resolve(), work]
    environment = os.environ | dict(PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    with open(work / "theirs.log", "w") as log:
        streams = dict(stdout=log, stderr=subprocess.STDOUT)
        done = subprocess.run([*map(str, words)], cwd=work, env=environment, **streams)
    if done.returncode:
        *_, last = (work / "theirs.log").read_text().splitlines() or [""]
        raise UserError(f"the authors' program failed: {last}; --work FOLDER keeps its log")
    return torch.load(work / "theirs.pt", weights_only=True)


# ---- Our run -------------------------------------------------------------------------------------

SEED = [0]  # of the next run


def run_ours(script, work, options, replaced, loader="load_untrained_student"):
    """Run our script through its command line -> its outcome, with every loss that it logs, and
    the `model` that it has trained.

    replaced {"ckd.warmup_cosine": value}: what else is put in the place of a name. loader: the
    script's function whose first result is the encoder that the run trains.
    """
    import common

    module = importlib.import_module(script)
    losses, scores, students = [], [], []
    log, load = common.Run.log, getattr(module, loader)

    def keep_numbers(run, step, **values):
        if "dev" in values:
            scores.append(values["dev"])
        else:
            losses.append(values["loss"].item())
        log(run, step, **values)

    def keep_student(*rest, **options):
        students.append(load(*rest, **options))
        return students[-1]

    shutil.rmtree(work / "ours", ignore_errors=True)
    words = [*options, "--output", work / "ours", "--device", "cpu", "--precision", "fp32"]
    words += ["--seed", SEED[0]]
    if SEED[0]:  # another order of batches than theirs
        replaced = {name: replaced[name] for name in replaced if "Batches" not in name}
    replaced = {
        "sys.argv": [f"{script}.py", *map(str, words)],
        "common.CACHE": work / "cache",
        "common.Run.log": keep_numbers,
        f"{script}.{loader}": keep_student,
        **replaced,
    }
    with contextlib.ExitStack() as stack, open(work / "ours.log", "w") as printed:
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(contextlib.redirect_stderr(printed))
        for target, value in replaced.items():
            stack.enter_context(mock.patch(target, value))
        module.main()
    weights = {key: value.detach().clone() for key, value in students[0].state_dict().items()}
    return dict(losses=losses, weights=weights, dev=scores[-1], model=students[0].eval())


def cut_pairs(encoder, pairs, max_length=None):
    """As common.tokenize(), of pairs, which are cut as DSE's program does it.

    The longer text loses its last token, the second one if both have as many.
    """
    tokenizer = encoder.tokenizer
    found = []
    for pair in pairs:
        first, second = [tokenizer(text, add_special_tokens=False).input_ids for text in pair]
        while len(first) + len(second) > encoder.max_length - 3:
            (first if len(first) > len(second) else second).pop()
        end = tokenizer.sep_token_id
        found.append([tokenizer.cls_token_id, *first, end, *second, end])
    return found


class TheirAdam(torch.optim.Adam):
    """The AdamW of transformers, without decay: p -= rate m / (sqrt(v) + eps).

    Adam corrects v before it adds epsilon. To correct it afterwards is to enlarge epsilon.
    """

    steps = 0

    def step(self):
        self.steps += 1
        for group in self.param_groups:
            group["eps"] = 1e-8 / math.sqrt(1 - group["betas"][1] ** self.steps)
        super().step()


# ---- Comparison ----------------------------------------------------------------------------------


def loss_difference(ours, theirs):
    """Two outcomes -> the largest relative difference of a loss, and its step, from 1."""
    pairs = zip(ours["losses"], theirs["losses"], strict=True)
    relative = [abs(a - b) / abs(b) for a, b in pairs]
    largest = max(relative)
    return largest, 1 + relative.index(largest)


def weight_difference(ours, theirs):
    """Two outcomes -> the largest difference of a weight that both have."""
    weights = theirs["weights"]
    return max(float((ours["weights"][name] - weights[name]).abs().max()) for name in weights)


if __name__ == "__main__":  # in the authors' environment
    module, name, checkout, work = sys.argv[1:]
    program = importlib.import_module(f"extras.authors.{module}").PROGRAMS[name]
    torch.save(program.theirs(Path(checkout), Path(work)), Path(work, "theirs.pt"))
