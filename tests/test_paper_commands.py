"""Every command of a paper's page, then of its file in docs/tables, runs, in this order.

Commands stay as they are printed, but for SMALL and the grids of sweeps. A name of the Hub leads
to a small random model, and each file that is named is a small one of its format.
"""

import contextlib
import glob
import importlib
import io
import json
import re
import shlex
import shutil
import string
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import transformers
from conftest import DEMO, demo_sentences
from processes import SCRIPTS
from test_docs import PROGRAM, TABLES, blocks, commands

import common
from extras import benchmark, sweep, views

SMALL = dict(max_steps=2, batch_size=8, finetune_batch_size=8, queue_size=16, eval_steps=2)
SMALL |= dict(folds=2, rounds=1, dimension=8)
SMALL_GRID = {"steps": "1,2", "batch-size": "4,8", "queue-size": "16,32"}
NUMBERS = [  # part of a command, what it prints: the last column of its table, or a file's name
    (r"--translations", r"2 -> 1 \|"),
    (r"eval_transfer .*SICK-R", r"DSE avg \|"),
    (r"eval_\w+ .*--tasks", r"SNLI \|"),
    (r"eval_retrieval", r"MRR@10 .*\|"),
    (r"quantize|benchmark --only gpu", r"sentences/s .*\|"),
    (r"benchmark", r"factor \|"),
    (r"analyze (\w+)", r"figures/\1.json"),
    (r"eval_sts.*--pairs (my-\S+)", r"\1 .*\|"),
    (r"eval_", r"avg .*\|"),
    (r"\.py|sweep|baselines|ibkd_dr", r"dev .*\|"),
]
DSE_TASKS = ("mrpc", "mnli", "snli")
SENTENCES = ["my-sentences.txt", "wiki1m_for_simcse.txt", "news5m.en", "flickr30k-captions.txt"]
SENTENCES += [f"news-{n}m.txt" for n in range(1, 6)]
TEXT_PAIRS = ["en-de.tsv", "en-de-test.tsv", "back_translated_nli.txt", "nli-translations.tsv"]
SCORED_PAIRS = ["my-pairs.tsv", "my-dev-pairs.tsv", "my-test-pairs.tsv"]
SCORED_PAIRS += [f"STS2017-extended/STS.{pair}.txt" for pair in ("ar-ar", "en-ar", "en-de")]


@pytest.fixture
def reader(models_folder, translators, senteval, files, wordnet, tmp_path, monkeypatch):
    """The working folder: all files that the pages name, and a Hub of small models."""
    root = tmp_path / "reader"
    for names, source in [
        (SENTENCES, files / "sentences.txt"),
        (TEXT_PAIRS, files / "pairs.tsv"),
        (SCORED_PAIRS, files / "dev.tsv"),
        (["nli_for_simcse.csv"], files / "triplets.csv"),
    ]:
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, root / name)
    with tarfile.open(root / "senteval.tar", "w") as file:
        file.add(senteval.parent.parent, "data")
    for name in ("my-beir-folder", "BeIR/msmarco"):
        shutil.copytree(DEMO / "beir", root / name)
        shutil.copy(DEMO / "beir/qrels/test.tsv", root / name / "qrels/dev.tsv")
    rows = [dict(text1=a, text2=a[::-1], label=i % 2) for i, a in enumerate(demo_sentences(64))]
    for task in DSE_TASKS:
        for split in ("train", "validation", "test"):
            (root / "SetFit" / task).mkdir(parents=True, exist_ok=True)
            path = root / "SetFit" / task / f"{split}.jsonl"
            path.write_text("\n".join(map(json.dumps, rows)))
    deep = root / "my-encoder"  # six layers, for --student-layers 1,4,5
    shutil.copytree(models_folder / "mean", deep)
    torch.manual_seed(6)
    config = transformers.AutoConfig.from_pretrained(deep, num_hidden_layers=6)
    transformers.AutoModel.from_config(config).save_pretrained(deep)
    shutil.copytree(translators / "there", root / "facebook/mbart-large-50-many-to-many-mmt")

    def snapshot(name, **_):
        if name.startswith("Helsinki-NLP/opus-mt-"):
            return translators / ("there" if name.startswith("opus-mt-en", 13) else "back")
        kinds = [kind for kind in ("distilbert", "roberta") if kind in name]
        return models_folder / [*kinds, "bert"][0]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    resolve = common.resolve_model

    def resolve_model(name):  # also runs/NAME, which another command would have written
        return resolve(name) if Path(name).exists() else snapshot(str(name))

    monkeypatch.setattr(common, "resolve_model", resolve_model)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *at, **_: root / at[0] / at[1])
    tiny = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    monkeypatch.setattr(benchmark, "BERT_LARGE", tiny)
    monkeypatch.setattr(common, "LOG_STEPS", 2)
    monkeypatch.setattr(benchmark, "STEPS", 4)
    monkeypatch.setattr(benchmark, "DSE_SENTENCES", 60)
    monkeypatch.setattr(benchmark, "DSE_PAIRS", 30)
    monkeypatch.setattr(common, "CACHE", common.CACHE)  # the benchmark changes it
    monkeypatch.chdir(root)
    return root


def run_main(module, words):
    """What a program prints that is given SMALL, too, and a small grid."""
    small = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module.__name__, *words])
        if module is sweep:
            words[1] = cut_grid(words[1])
            patch.setattr(sweep.subprocess, "run", run_words)
        else:
            options = module.Options.__annotations__
            small = {name: value for name, value in SMALL.items() if name in options}
        if module is benchmark:
            small |= dict(teacher="my-encoder", sentences=64, batch_sizes=8)
        if module is views:
            small["wordnet"] = "../"
        extra = [f"--{name.replace('_', '-')}={value}" for name, value in small.items()]
        extra += ["--tiny"] * (module is benchmark)
        patch.setattr(sys, "argv", [module.__name__, *words, *extra])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            module.main()
    return printed.getvalue()


def cut_grid(grid):
    """Two values of the first option, and one of each other."""
    parts = []
    for part in grid.split():
        option, _, values = part.partition("=")
        kept = SMALL_GRID.get(option, values).split(",")[: 1 if parts else 2]
        parts.append(f"{option}={','.join(kept)}")
    return " ".join(parts)


def run_words(words, stdout, stderr):
    """subprocess.run() of a sweep, in this process."""
    run(shlex.join(["python", *words[1:]]))
    return SimpleNamespace(returncode=0)


def run(command):
    """A line of a page -> what it prints."""
    if code := re.match("python -c (.*)", command, re.S):
        exec(shlex.split(code[1])[0], {})
        return ""
    if found := PROGRAM.match(command):
        module = importlib.import_module(found[1] or found[2])
        words = [glob.glob(word) or [word] for word in shlex.split(command[found.end() :])]
        return run_main(module, sum(words, []))
    return subprocess.check_output(["bash", "-c", command], text=True)


def lines_of(script):
    """The commands of the page's blocks, those of its file in docs/tables, those in its text."""
    page, file = f"docs/{script}.md", f"docs/tables/{script}.sh"
    lines = []
    for block in [block for place, block in blocks("sh") if place == page] + [TABLES[file]]:
        block = block.replace("\\\n", "").replace(" CUT", " 1,3,5")  # what extras.layers prints
        variables = dict(re.findall(r'^(\w+)="?([^"\n#]*?)"?(?: +#.*)?$', block, re.M))
        block = string.Template(block).safe_substitute(variables)
        found = re.findall(r"""^python -c (?:'[^']*'|"[^"]*")|^(?!#|\w+=)\S.*""", block, re.M)
        lines += [line.split("  #")[0] for line in found]
    inline = [command.replace(" CUT", " 1,3,5") for place, command in commands() if place == page]
    squeezed = [" ".join(line.split()) for line in lines]
    return lines + [line for line in inline if " ".join(line.split()) not in squeezed]


def numbers_of(command):
    """What the first row of NUMBERS that fits a command expects in its output."""
    for part, expected in NUMBERS:
        if found := re.search(part, command):
            return found.expand(expected)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_each_command_of_a_paper_prints_its_numbers(script, reader):
    for line in lines_of(script):
        print(f"+ {line}")  # pytest -s: to be looked at
        printed = run(line)
        print(printed)
        if PROGRAM.match(line):
            assert re.search(numbers_of(line), printed), line
            written = re.search(r"--output ([\w./-]+)", line)
            assert not written or (reader / written[1]).exists()
