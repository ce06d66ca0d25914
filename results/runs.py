"""The runs that the pages of results/ rest on. Runs what is missing, and keeps a line of each.

  python results/runs.py --data FOLDER                     all of them: a day on two cores
  python results/runs.py --data FOLDER --only KD-0 KD-1    some of them

FOLDER has unlabeled.txt, pairs.en-de.tsv, and the folders senteval, glue and retrieval/qnli. A run
has its folder in runs/, and its line in results/data/PAGE.jsonl: name, command, commit, seed,
machine, peak memory in MB, the table of scores that it has printed, and for training the sentences
per second, without scoring. A run that has a line is not run again; one that has none has not been
run yet. Speeds count only if nothing else runs on the machine. Linux only.
"""

import argparse
import json
import os
import re
import shlex
import string
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import harmonic_mean

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from extras.benchmark import machine

DATA = Path(__file__).parent / "data"
THREE, ONE = (0, 1, 2), (0,)  # seeds

# $T and $M are the teachers, $DATA the folder of the data; $FIRST5K, $FIRST20K, $FIRST50K its first
# sentences, $EN_DE_TEST the last 1,000 lines of its translations, $EN_DE the others;
# $STSB_DEV, $STSB_TEST: STS-B's dev and test sets as scored pairs.
T = "sentence-transformers/all-MiniLM-L6-v2"
M = "sentence-transformers/all-mpnet-base-v2"
SORTED = "--group-by-length"  # as in all measured runs
STS = f"--senteval $DATA/senteval --epochs 1 --batch-size 64 --max-length 64 --lr 4e-4 {SORTED}"
CUT = "--teacher $T --student-layers 1,3,5"
OWN = f"{CUT} {STS} --train $FIRST20K --eval-steps 105"
MORE = f"{CUT} {STS} --train $FIRST50K --eval-steps 105"
FAR = f"--teacher $M --student $T --student-layers 1,3,5 {STS} --train $FIRST20K --eval-steps 105"
NEAR = FAR.replace("$M", "runs/M-aligned")
ALIGN = (
    "python -m extras.align --teacher $M --student $T --student-layers 1,3,5 --train $FIRST20K "
    "--output runs/M-aligned"
)
ALIGN_WHOLE = (
    "python -m extras.align --teacher $M --student $T --train $FIRST20K "
    "--output runs/M-aligned-whole"
)
BF16 = "--precision bf16"
FAST = f"--student $T {STS} {BF16} --skip-test"
CURVE = f"{FAST} --student-layers 1,4,5 --teacher"
CURVE_M = f"{CURVE} runs/M-aligned-whole"
SIX = f"{FAST} --dropout 0 --teacher runs/M-aligned-whole"  # cut students have none
K20, K50 = "--train $FIRST20K --eval-steps 105", "--train $FIRST50K --eval-steps 105"
K182 = "--train $DATA/unlabeled.txt --eval-steps 500"
BOTH = "python results/two_teachers.py runs/M-aligned-whole"
TRIM = "python -m extras.trim $T --train $DATA/unlabeled.txt"
NLI = (
    "python ckd.py --stage finetune --student runs/KD-three-layers --dropout 0 --eval-steps 10 "
    "--triplets $DATA/nli_triplets.csv --finetune-epochs 1 --finetune-lr 5e-5 "
    f"--senteval $DATA/senteval {SORTED}"
)
WHOLE = f"--train $DATA/unlabeled.txt --eval-steps 500 {STS}"
BASELINE = "python -m extras.baselines --method"
CONGEN = "python congen.py --queue-size 16384 --teacher-temperature"
SIMCSE = (
    "python distilface.py --student $T --student-layers 1,3,5 --pooling avg --lr 3e-5 "
    f"--temperature 0.2 --batch-size 64 {SORTED} --senteval $DATA/senteval --train"
)
KD = "python ckd.py --objective kd"
FEW = f"{KD} {MORE} --skip-test --student runs/tokens"  # that are kept
RARE = (
    "python results/split_words.py rare $T runs/tokens-12k $DATA/unlabeled.txt 50000 "
    "runs/rare50k.txt"
)
RARE_KD = f"{FEW}-12k --train runs/rare50k.txt"
SPLIT_KD = f"{FEW}-12k".replace("ckd.py", "results/split_words.py train runs/tokens-4k")
CKD = "python ckd.py --queue-size 16384 --temperature"
IBKD = "python ibkd.py --stage distill --temperature"
DSE = f"python dse.py --glue $DATA/glue --epochs 3 --lr 1e-4 {SORTED} --task"
STSB, MRPC = f"{DSE} stsb --eval-steps 180", f"{DSE} mrpc --eval-steps 115"
LABELS = "--alpha 0 --student $T"
WEAK = "--teacher $T --student $T --teacher-lr 5e-5"
STRONG = "--teacher $M --student $T --teacher-lr 3e-5 --precision bf16"
ONNX = "python -m extras.quantize --pairs $STSB_TEST"
BENCHMARK = "python -m extras.benchmark --train $FIRST20K --sentences 3200 --rounds 2"
SEARCH = f"python ibkd.py --task dr --beir $DATA/retrieval/qnli {SORTED} --teacher $T"
STAGE_1 = "--epochs 5 --batch-size 64 --lr 4e-4 --temperature 0.2 --eval-steps 122"
STAGE_2 = (
    "--finetune-batch-size 32 --finetune-epochs 2 --finetune-lr 3e-5 --eval-steps 54 --dropout 0.1"
)

# Students of larger teachers that were trained with --skip-test.
NAMES = ["three-M-KD-20k", "three-M-KD-50k", "three-M-KD-182k", "three-M-CKD-20k"]
NAMES += ["three-both-0.3-20k", "three-both-0.5-20k", "three-both-0.3-182k", "three-own-KD-182k"]
NAMES += ["three-M-KD-3x182k", "six-M-KD-20k", "six-M-KD-20k-slow"]
STUDENTS = " ".join(f"runs/{name}" for name in NAMES)
SEEDS = " ".join(f"runs/three-{name}-182k-1" for name in ("both-0.3", "own-KD"))
# Students of how-many-megabytes: layers and tokens, and their folders.
FILES = {"three": "runs/layers-1-4-5-50k", "two": "runs/layers-0-5-50k-0"}
FILES |= {"one": "runs/layer-5-50k-0"}
FILES |= {
    f"{depth}-{tokens}": f"runs/{depth}-{tokens}"
    for tokens in ("20k", "12k")
    for depth in ("three", "two", "one")
}
FILES |= {"one-17k": "runs/one-17k"}
FIRST_FOLDERS = " ".join(FILES.values())
FILES |= {"two-20k-182k": "runs/two-20k-182k"}
FOLDERS = " ".join(FILES.values())
MORE_FOLDERS = "runs/two-20k-182k runs/one-12k-rare runs/one-12k-split"
SOME_FOLDERS = "$T runs/layers-1-4-5-50k runs/three-20k"
SETS = "--senteval $DATA/senteval"
BLOCKS = "python -m extras.quantize --bits 4 --group-size 64 --rows"
SHRUNK = f"{BLOCKS} 'fp32, ONNX Runtime' int8 '4 bits' --rounds 2 --pairs $STSB_DEV"
TESTED = f"{BLOCKS} '4 bits' --rounds 1 --senteval $DATA/senteval"
QNLI = "--beir $DATA/retrieval/qnli"
TASKS = f"{SETS} --tasks CR,TREC,MRPC"
GROUPED = "--rows '4 bits' '4 bits, linear layers 8 bits' --rounds 1 --pairs $STSB_DEV"
FOUR_BITS = "python results/onnx_scores.py model_q4.onnx"

# A run of one seed has the bare name; seeds 1 and 2 that came later have a row of their own.
RUNS = [  # page, name, seeds, command
    ("own-teacher", "KD", THREE, f"{KD} {OWN}"),
    ("own-teacher", "CKD", THREE, f"{CKD} 0.2 {OWN}"),
    (
        "own-teacher",
        "ConGen",
        THREE,
        f"{CONGEN} 0.2 --student-temperature 0.2 --head identity {OWN}",
    ),
    ("own-teacher", "IBKD", THREE, f"{IBKD} 0.2 {OWN}"),
    ("larger-teacher", "M-aligned", ONE, ALIGN),
    ("larger-teacher", "M-KD-aligned", THREE, f"{KD} {NEAR}"),
    ("larger-teacher", "M-KD", THREE, f"{KD} {FAR}"),
    ("larger-teacher", "M-CKD", THREE, f"{CKD} 0.05 {FAR}"),
    ("larger-teacher", "M-CKD-aligned", THREE, f"{CKD} 0.05 {NEAR}"),
    ("larger-teacher", "M-ConGen", THREE, f"{CONGEN} 0.1 --student-temperature 0.1 {FAR}"),
    ("larger-teacher", "M-IBKD", THREE, f"{IBKD} 0.1 {FAR}"),
    ("own-teacher", "DistilFACE", THREE, f"{SIMCSE} $FIRST20K --max-steps 313 --eval-steps 78"),
    ("own-teacher", "PKD", ONE, f"{BASELINE} pkd {OWN}"),
    ("own-teacher", "MetaKD", ONE, f"{BASELINE} metakd {OWN}"),
    ("own-teacher", "L2", ONE, f"{BASELINE} l2 --head identity {OWN}"),
    ("own-teacher", "Dual-L2", ONE, f"{BASELINE} dual-l2 --head identity {OWN}"),
    ("own-teacher", "SKD", ONE, f"{BASELINE} skd --head identity {OWN}"),
    ("own-teacher", "CRD", ONE, f"{BASELINE} crd --temperature 0.1 {OWN}"),
    ("own-teacher", "HPD", ONE, f"{BASELINE} hpd {OWN}"),
    (
        "own-teacher",
        "SEED",
        ONE,
        f"{CONGEN} 0.2 --student-temperature 0.2 --head identity --alpha 1 {OWN}",
    ),
    ("how-small", "KD-three-layers", ONE, f"{KD} --teacher $T --student-layers 1,3,5 {WHOLE}"),
    ("how-small", "KD-two-layers", ONE, f"{KD} --teacher $T --student-layers 0,5 {WHOLE}"),
    ("how-small", "KD-one-layer", ONE, f"{KD} --teacher $T --student-layers 5 {WHOLE}"),
    ("how-small", "layers-0-5", ONE, f"{KD} {OWN} --student-layers 0,5 --skip-test"),
    ("how-small", "layers-1-5", ONE, f"{KD} {OWN} --student-layers 1,5 --skip-test"),
    ("how-small", "layers-2-5", ONE, f"{KD} {OWN} --student-layers 2,5 --skip-test"),
    ("how-small", "layers-0-5-50k", THREE, f"{KD} {MORE} --student-layers 0,5"),
    ("how-small", "layer-5-50k", THREE, f"{KD} {MORE} --student-layers 5"),
    (
        "small",
        "KD-three-epochs",
        ONE,
        f"{KD} --teacher $T --student-layers 1,3,5 {WHOLE} --epochs 3",
    ),
    ("small", "layers-0-3-5-50k", ONE, f"{KD} {MORE} --student-layers 0,3,5"),
    ("small", "layers-1-4-5-50k", ONE, f"{KD} {MORE} --student-layers 1,4,5"),
    ("small", "layers-1-4-5-50k", (1, 2), f"{KD} {MORE} --student-layers 1,4,5"),
    ("small", "layers-0-3-5", ONE, f"{KD} {OWN} --student-layers 0,3,5"),
    ("small", "layers-1-4-5", ONE, f"{KD} {OWN} --student-layers 1,4,5"),
    ("small", "layers-2-4-5", ONE, f"{KD} {OWN} --student-layers 2,4,5"),
    ("small", "own-then-NLI", ONE, NLI),
    ("search", "search-stage-1", ONE, f"{SEARCH} --student-layers 1,3,5 --stage distill {STAGE_1}"),
    (
        "search",
        "search-stage-2",
        ONE,
        f"{SEARCH} --stage finetune --student runs/search-stage-1 {STAGE_2}",
    ),
    ("pairs", "DSE-stsb", ONE, f"{STSB} {WEAK}"),
    ("pairs", "DSE-stsb-labels", ONE, f"{STSB} {LABELS}"),
    ("pairs", "DSE-mrpc", ONE, f"{MRPC} {WEAK}"),
    ("pairs", "DSE-mrpc-labels", ONE, f"{MRPC} {LABELS}"),
    ("larger-teacher", "M-SEED", ONE, f"{CONGEN} 0.1 --student-temperature 0.1 --alpha 1 {FAR}"),
    ("larger-teacher", "M-PKD", ONE, f"{BASELINE} pkd {FAR}"),
    ("larger-teacher", "M-CRD", ONE, f"{BASELINE} crd --temperature 0.1 {FAR}"),
    ("larger-teacher", "M-L2", ONE, f"{BASELINE} l2 {FAR} --lr 8e-4"),
    ("larger-teacher", "M-Dual-L2", ONE, f"{BASELINE} dual-l2 {FAR} --lr 8e-4"),
    ("larger-teacher", "M-SKD", ONE, f"{BASELINE} skd {FAR} --lr 8e-4"),
    ("larger-teacher", "M-HPD", ONE, f"{BASELINE} hpd {FAR} --lr 8e-4"),
    ("how-much-data", "KD-5k", ONE, f"{KD} {CUT} {STS} --train $FIRST5K --eval-steps 105"),
    ("how-much-data", "KD-50k", ONE, f"{KD} {MORE}"),
    ("how-much-data", "KD-50k", (1, 2), f"{KD} {MORE}"),
    ("speed", "speed-training", ONE, f"{BENCHMARK} --only train"),
    ("speed", "speed-three-layers", ONE, f"{KD} {MORE} --student-layers 1,4,5 --skip-test"),
    ("speed", "speed-two-layers", ONE, f"{KD} {MORE} --student-layers 0,5 --skip-test"),
    ("speed", "speed-one-layer", ONE, f"{KD} {MORE} --student-layers 5 --skip-test"),
    ("speed", "retrained-three-layers", (1, 2), f"{KD} {MORE} --student-layers 1,4,5"),
    ("speed", "retrained-two-layers", (1, 2), f"{KD} {MORE} --student-layers 0,5"),
    ("speed", "retrained-one-layer", (1, 2), f"{KD} {MORE} --student-layers 5"),
    ("int8", "int8-six-layers", ONE, f"{ONNX} $T --output runs/int8-six-layers"),
    ("int8", "int8-three-layers", ONE, f"{ONNX} runs/speed-three-layers"),
    ("int8", "int8-two-layers", ONE, f"{ONNX} runs/speed-two-layers"),
    ("int8", "int8-one-layer", ONE, f"{ONNX} runs/speed-one-layer"),
    ("parts", "KD-dropout", THREE, f"{KD} {OWN} --dropout 0.1"),
    ("parts", "IBKD-no-HSIC", THREE, f"{IBKD} 0.2 --beta1 0 {OWN}"),
    (
        "transfer",
        "transfer",
        ONE,
        "python -m extras.eval_transfer $T runs/KD-0 runs/CKD-0 runs/ConGen-0 runs/IBKD-0 "
        "--senteval $DATA/senteval --tasks MR,CR,SUBJ,MPQA,TREC,MRPC",
    ),
    (
        "language",
        "en-de",
        ONE,
        f"python congen.py {CUT} --head identity --pairs $EN_DE --epochs 3 --batch-size 64 "
        f"--lr 5e-4 --queue-size 16384 {SORTED} --eval-steps 415 --senteval $DATA/senteval "
        "--skip-test",
    ),
    ("language", "en-de-test", ONE, "python eval_sts.py $T runs/en-de --translations $EN_DE_TEST"),
    (
        "language",
        "en-de-before",
        ONE,
        "python eval_sts.py $T --student-layers 1,3,5 --translations $EN_DE_TEST",
    ),
    ("pairs", "DSE-M-stsb", ONE, f"{STSB} {STRONG}"),
    ("pairs", "DSE-M-mrpc", ONE, f"{MRPC} {STRONG}"),
    ("larger-teacher", "M-aligned-whole", ONE, ALIGN_WHOLE),
    ("larger-teacher", "three-M-KD-20k", ONE, f"{KD} {CURVE_M} {K20}"),
    ("larger-teacher", "three-M-KD-50k", ONE, f"{KD} {CURVE_M} {K50}"),
    ("larger-teacher", "three-M-KD-182k", ONE, f"{KD} {CURVE_M} {K182}"),
    ("larger-teacher", "three-M-KD-3x182k", ONE, f"{KD} {CURVE_M} {K182} --epochs 3"),
    ("larger-teacher", "three-M-CKD-20k", ONE, f"{CKD} 0.05 {CURVE_M} {K20}"),
    ("larger-teacher", "three-own-KD-182k", ONE, f"{KD} {CURVE} $T {K182}"),
    ("larger-teacher", "three-both-0.5-20k", ONE, f"{BOTH} 0.5 --objective kd {CURVE} $T {K20}"),
    ("larger-teacher", "three-both-0.3-20k", ONE, f"{BOTH} 0.3 --objective kd {CURVE} $T {K20}"),
    ("larger-teacher", "three-both-0.3-182k", ONE, f"{BOTH} 0.3 --objective kd {CURVE} $T {K182}"),
    (
        "larger-teacher",
        "three-both-0.3-182k",
        (1, 2),
        f"{BOTH} 0.3 --objective kd {CURVE} $T {K182}",
    ),
    ("larger-teacher", "three-own-KD-182k", (1, 2), f"{KD} {CURVE} $T {K182}"),
    ("larger-teacher", "six-M-KD-20k", ONE, f"{KD} {SIX} {K20}"),
    ("larger-teacher", "six-M-KD-20k-slow", ONE, f"{KD} {SIX} {K20} --lr 5e-5"),
    ("larger-teacher", "curve", ONE, f"python eval_sts.py {STUDENTS} {SETS}"),
    ("larger-teacher", "curve-seeds", ONE, f"python eval_sts.py {SEEDS} {SETS}"),
    ("how-many-megabytes", "tokens-20k", ONE, f"{TRIM} --tokens 20000 --output runs/tokens-20k"),
    ("how-many-megabytes", "tokens-12k", ONE, f"{TRIM} --tokens 12000 --output runs/tokens-12k"),
    ("how-many-megabytes", "three-20k", ONE, f"{FEW}-20k --student-layers 1,4,5"),
    ("how-many-megabytes", "three-12k", ONE, f"{FEW}-12k --student-layers 1,4,5"),
    ("how-many-megabytes", "two-20k", ONE, f"{FEW}-20k --student-layers 0,5"),
    ("how-many-megabytes", "two-12k", ONE, f"{FEW}-12k --student-layers 0,5"),
    ("how-many-megabytes", "one-20k", ONE, f"{FEW}-20k --student-layers 5"),
    ("how-many-megabytes", "one-12k", ONE, f"{FEW}-12k --student-layers 5"),
    ("how-many-megabytes", "tokens-4k", ONE, f"{TRIM} --tokens 4000 --output runs/tokens-4k"),
    ("how-many-megabytes", "rare", ONE, RARE),
    ("how-many-megabytes", "one-12k-rare", ONE, f"{RARE_KD} --student-layers 5"),
    ("how-many-megabytes", "one-12k-split", ONE, f"{SPLIT_KD} --student-layers 5"),
    ("how-many-megabytes", "tokens-17k", ONE, f"{TRIM} --tokens 17000 --output runs/tokens-17k"),
    ("how-many-megabytes", "one-17k", ONE, f"{FEW}-17k --student-layers 5 {K182} {BF16}"),
    ("how-many-megabytes", "two-20k-182k", ONE, f"{FEW}-20k --student-layers 0,5 {K182} {BF16}"),
    ("how-many-megabytes", "dev-six", ONE, f"{SHRUNK} $T --output runs/six"),
    ("how-many-megabytes", "sts-six", ONE, f"{TESTED} $T --output runs/six"),
    *[("how-many-megabytes", f"dev-{name}", ONE, f"{SHRUNK} {run}") for name, run in FILES.items()],
    *[
        (
            "how-many-megabytes",
            f"groups-of-{size}",
            ONE,
            f"python -m extras.quantize {FILES['three']} --output runs/groups --bits 4 "
            f"--group-size {size} {GROUPED}",
        )
        for size in (32, 64, 128)
    ],
    *[("how-many-megabytes", f"sts-{name}", ONE, f"{TESTED} {run}") for name, run in FILES.items()],
    ("how-many-megabytes", "fp32", ONE, f"python eval_sts.py {FIRST_FOLDERS} {SETS}"),
    ("how-many-megabytes", "fp32-more", ONE, f"python eval_sts.py {MORE_FOLDERS} {SETS}"),
    ("how-many-megabytes", "qnli", ONE, f"python eval_retrieval.py {SOME_FOLDERS} {QNLI}"),
    ("how-many-megabytes", "qnli-4-bits", ONE, f"{FOUR_BITS} eval_retrieval {FOLDERS} {QNLI}"),
    (
        "how-many-megabytes",
        "transfer-fp32",
        ONE,
        f"python -m extras.eval_transfer {SOME_FOLDERS} {TASKS}",
    ),
    (
        "how-many-megabytes",
        "transfer-4-bits",
        ONE,
        f"{FOUR_BITS} extras.eval_transfer {FOLDERS} {TASKS}",
    ),
]

FIRST = dict(FIRST5K=5_000, FIRST20K=20_000, FIRST50K=50_000)
PARTS = {name: f"runs/{name.lower()}.txt" for name in FIRST}
PARTS |= dict(EN_DE="runs/train.en-de.tsv", EN_DE_TEST="runs/test.en-de.tsv")
PARTS |= dict(STSB_DEV="runs/sts-b-dev.tsv", STSB_TEST="runs/sts-b-test.tsv")
TRAINED_BY = r"(?!eval_)\w+\.py|results/(two_teachers|split_words)\.py (?!rare)"
TRAINS = re.compile(rf"python ({TRAINED_BY}|-m extras\.baselines)")


def all_runs():
    """Yield page, run, seed, command for each run of RUNS."""
    for page, name, seeds, command in RUNS:
        for seed in seeds:
            run = f"{name}-{seed}" if len(seeds) > 1 else name
            trains = TRAINS.match(command)
            options = f" --seed {seed} --output runs/{run}" if trains else ""
            yield page, run, seed, command + options


def expand(command, data):
    """The words of a command, with $T, $M, $DATA and the files of write_parts() replaced."""
    places = dict(T=os.environ.get("T", T), M=os.environ.get("M", M), DATA=data)
    words = shlex.split(string.Template(command).substitute(places | PARTS))
    return [sys.executable if word == "python" else word for word in words]


def write_parts(data):
    """Write the files of PARTS from those of the folder `data`."""
    Path("runs").mkdir(exist_ok=True)
    sentences = read_lines(f"{data}/unlabeled.txt")
    for name, amount in FIRST.items():
        write_lines(PARTS[name], sentences[:amount])
    translations = read_lines(f"{data}/pairs.en-de.tsv")
    write_lines(PARTS["EN_DE"], translations[:-1000])
    write_lines(PARTS["EN_DE_TEST"], translations[-1000:])
    (stsb,) = Path(data).rglob("STSBenchmark")
    for split in ("dev", "test"):
        rows = [line.rstrip(b"\r\n").split(b"\t") for line in read_lines(stsb / f"sts-{split}.csv")]
        pairs = [b"\t".join([row[5], row[6], row[4]]) + b"\n" for row in rows]
        write_lines(PARTS[f"STSB_{split.upper()}"], pairs)


def read_lines(path):
    return Path(path).read_bytes().splitlines(keepends=True)


def write_lines(path, lines):
    Path(path).write_bytes(b"".join(lines))


def scores_of(run):
    """The final table of a run that trains, from its checkpoint -> {row: {column: score}}."""
    return torch.load(run / "checkpoint.pt", "cpu")["scores"]


def tables(printed):
    """The rows of all Markdown tables in a text -> {row: {column: number}}."""
    rows = {}
    header = None
    for line in printed.splitlines():
        if not line.startswith("|"):
            header = None
            continue
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if header is None:
            header = cells
        elif not re.fullmatch("[- :]*", name) or not name:
            rows[name] = {key: float(cell) for key, cell in zip(header, cells) if cell}
    return rows


def training_speed(run):
    """Sentences per second of all stages of a run, without scoring."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    speeds = [line["sentences_per_second"] for line in lines if "loss" in line]
    return round(harmonic_mean(speeds), 1)


def execute(run, command, words):
    """Run it, or continue it -> what its line states of the outcome, or None if it has failed."""
    trains = bool(TRAINS.match(command))
    with tempfile.TemporaryFile("w+") as printed:
        child = subprocess.Popen(words, stdout=printed)
        _, status, usage = os.wait4(child.pid, 0)
        printed.seek(0)
        text = printed.read()
    print(text)
    if status != 0:
        return None
    outcome = dict(peak_memory_MB=usage.ru_maxrss // 1000)
    if not trains:
        return outcome | dict(scores=tables(text))
    folder = Path("runs") / run
    speed = training_speed(folder)
    return outcome | dict(sentences_per_second=speed, scores=scores_of(folder))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of the data")
    parser.add_argument("--only", nargs="+", metavar="RUN", help="names of runs")
    args = parser.parse_args()
    write_parts(args.data)
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    DATA.mkdir(exist_ok=True)
    for page, run, seed, command in all_runs():
        path = DATA / f"{page}.jsonl"
        done = path.read_text("utf-8") if path.exists() else ""
        if f'"run": "{run}"' in done or (args.only and run not in args.only):
            continue
        print(command, flush=True)
        outcome = execute(run, command, expand(command, args.data))
        if outcome is None:
            print(f"{run}: failed", file=sys.stderr)
            continue
        line = dict(run=run, command=command, commit=commit, seed=seed, machine=machine())
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line | outcome) + "\n")


if __name__ == "__main__":
    main()
