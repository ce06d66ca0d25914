"""Measure the speed of this project against what people use instead, on this machine.

  train   ckd.py --objective kd against sentence-transformers' trainer with its MSELoss: the same
          student, sentences, targets and batch size; tokenizing counts on both sides
  encode  common.encode against SentenceTransformer.encode: sentences, passages, one at a time
  dse     DSE's Tables 3 and 4: pairs scored by a cross-encoder, and by embeddings and a head; the
          cross-encoder's time is extrapolated from 500 pairs

Both sides take turns. A ratio is the median over the rounds, with the smallest and the largest.
Dropout costs time. ckd.py has none by default if the student is cut to some layers, whereas
sentence-transformers keeps the model's own, so both equal dropout and the defaults are compared.

  python -m extras.benchmark                       all of it, some ten minutes on two cores
  python -m extras.benchmark --only dse --random-weights      DSE's own shapes, for times alone
"""

import json
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median

import torch
import transformers

import dse
from common import HERE, LOG_STEPS, MINILM, ArgumentParser, UserError, note, number, run_main, table
from common import read_rows, read_sentences, resolve_model
from common import Tokens, encode, load_encoder, save_encoder
from eval_sts import embed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_LENGTH = 64  # tokens, in training
LR = 1e-4
DROPOUTS = (0.0, 0.1)  # our default for a student that is cut, and BERT's own, which is theirs
PASSAGE = 8  # sentences
SINGLE_SENTENCES = 100  # that are encoded one at a time
DSE_SENTENCES = 1000
DSE_PAIRS = 500  # that the cross-encoder reads
CATALOGUE_COPIES = 100  # of 1,000 sentences: Table 4 has a catalogue of 100,000
DSE_QUERIES = 10  # the fastest counts
BERT_LARGE = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16)
BERT_LARGE |= dict(intermediate_size=4096)


def seconds(work, *arguments):
    """Call work(*arguments) -> (how long it takes, its result)."""
    begin = time.perf_counter()
    result = work(*arguments)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin, result


def compare(ours, theirs):
    """Units per second, one number for each round -> a row of the table."""
    ratios = [a / b for a, b in zip(ours, theirs)]
    row = {"ours": median(ours), "theirs": median(theirs), "ratio": median(ratios)}
    return row | {"smallest": min(ratios), "largest": max(ratios)}


def our_training(args, sentences, folder, dropout):
    """ckd.py as a process of its own -> sentences per second, without its dev scores."""
    train = folder / "sentences.txt"
    train.write_text("\n".join(sentences) + "\n", "utf-8")
    command = [sys.executable, HERE / "ckd.py", "--objective=kd", "--epochs=1", "--skip-test"]
    command += [f"--teacher={args.teacher}", f"--student-layers={args.student_layers}"]
    command += [f"--train={train}", f"--dev={HERE}/demo/dev.tsv", f"--output={folder}/ours"]
    command += [f"--batch-size={args.batch_size}", f"--lr={LR}", f"--max-length={MAX_LENGTH}"]
    command += [f"--dropout={dropout}", "--precision=fp32", "--eval-steps=1000000", "--overwrite"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"ckd.py: {done.stderr.strip().splitlines()[-1]}")
    log = read_rows(folder / "ours" / "metrics.jsonl", json.loads, "it must be the log of a run")
    speeds = [row["sentences_per_second"] for row in log if "loss" in row]
    training = sum(len(sentences) / len(speeds) / speed for speed in speeds)
    student = load_encoder(args.teacher, layers=args.student_layers)
    tokenizing, _ = seconds(Tokens, student, sentences, MAX_LENGTH)
    return len(sentences) / (tokenizing + training)


def their_training(args, sentences, targets, folder, dropout):
    """sentence-transformers' trainer -> sentences per second. targets [n, D]"""
    import sentence_transformers as theirs
    from datasets import Dataset

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its place depends on the version
        from sentence_transformers.losses import MSELoss

    student = load_encoder(args.teacher, layers=args.student_layers, dropout=dropout)
    save_encoder(student, folder / "student")
    model = theirs.SentenceTransformer(str(folder / "student"), device=DEVICE)
    model.max_seq_length = MAX_LENGTH
    data = Dataset.from_dict({"sentence": sentences, "label": targets.tolist()})
    arguments = theirs.SentenceTransformerTrainingArguments(
        output_dir=str(folder / "theirs"),
        num_train_epochs=1,
        per_device_train_batch_size=args.batch_size,
        learning_rate=LR,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=DEVICE == "cpu",
    )
    trainer = theirs.SentenceTransformerTrainer(model, arguments, data, loss=MSELoss(model))
    trainer.remove_callback(transformers.PrinterCallback)
    return len(sentences) / trainer.train().metrics["train_runtime"]


def compare_training(args, sentences):
    """-> {row: {column: number}}"""
    if len(sentences) < LOG_STEPS * args.batch_size:
        raise UserError(f"{len(sentences)} sentences; give {LOG_STEPS} batches, or smaller ones")
    targets = encode(embed, load_encoder(args.teacher).to(DEVICE), sentences, MAX_LENGTH)
    ours = {dropout: [] for dropout in DROPOUTS}
    theirs = {dropout: [] for dropout in DROPOUTS}
    with tempfile.TemporaryDirectory() as name:
        for number in range(args.rounds):
            for dropout in DROPOUTS:
                note(f"training, round {number + 1} of {args.rounds}, dropout {dropout}")
                run = (Path(name), dropout)
                ours[dropout].append(our_training(args, sentences, *run))
                theirs[dropout].append(their_training(args, sentences, targets, *run))
    rows = {"training, the defaults": compare(ours[DROPOUTS[0]], theirs[DROPOUTS[1]])}
    for dropout in DROPOUTS:
        rows[f"training, dropout {dropout}"] = compare(ours[dropout], theirs[dropout])
    return rows


def compare_encoding(args, sentences):
    """-> {row: {column: number}}"""
    from sentence_transformers import SentenceTransformer

    encoder = load_encoder(args.teacher).to(DEVICE)
    model = SentenceTransformer(str(resolve_model(args.teacher)), device=DEVICE)

    def ours(calls):
        for texts in calls:
            encode(embed, encoder, texts)

    def theirs(calls):
        for texts in calls:
            model.encode(texts, show_progress_bar=False)

    starts = range(0, len(sentences) // 2, PASSAGE)
    passages = [" ".join(sentences[start : start + PASSAGE]) for start in starts]
    single = [[text] for text in sentences[:SINGLE_SENTENCES]]
    rows = {}
    work = {"sentences": [sentences], "passages": [passages], "one sentence at a time": single}
    for name, calls in work.items():
        ours(single[:10])  # warms up
        theirs(single[:10])
        times = [(seconds(ours, calls)[0], seconds(theirs, calls)[0]) for _ in range(args.rounds)]
        total = sum(map(len, calls))
        rows[f"encoding {name}"] = compare(*([total / t for t in side] for side in zip(*times)))
    return rows


def measure_dse(name, layers):
    """Section 4.3 of DSE: seconds, and the factor of the student -> {row: {column: number}}."""
    torch.manual_seed(0)
    student = dse.add_head(load_encoder(name, "mean", layers), classes=1).to(DEVICE).eval()
    teacher = dse.load_cross_encoder(name, "stsb", device=DEVICE).eval()
    sentences = read_sentences(HERE / "demo" / "sentences.txt")[:DSE_SENTENCES]
    pairs = list(zip(sentences[:DSE_PAIRS], sentences[-DSE_PAIRS:]))
    encode(dse.pair_logits, teacher, pairs[:100])  # warms up
    dse.embed_sentences(student, sentences[:100])
    pair, _ = seconds(encode, dse.pair_logits, teacher, pairs)
    pair /= len(pairs)
    offline, vectors = seconds(dse.embed_sentences, student, sentences)
    queries = [[text] for text in sentences[:DSE_QUERIES]]
    online = min(seconds(dse.embed_sentences, student, query)[0] for query in queries)
    catalogue = vectors.repeat(CATALOGUE_COPIES, 1)
    score = student.head.score_pairs
    matrix, _ = seconds(lambda: [score(query, vectors) for query in vectors])
    row, _ = seconds(score, vectors[0], catalogue)
    rows = {
        "Table 3": {"pairs": len(vectors) ** 2, "psi, s": offline, "f, s": matrix, "paper": 934},
        "Table 4": {"pairs": len(catalogue), "psi, s": online, "f, s": row, "paper": 13594},
    }
    for row in rows.values():
        row["cross-encoder, s"] = row["pairs"] * pair
        row["factor"] = row["cross-encoder, s"] / (row["psi, s"] + row["f, s"])
    return rows


def run_dse(args):
    """Measure --teacher, or with --random-weights a model of BERT-Large's shape, as the paper's."""
    if not args.random_weights:
        return measure_dse(args.teacher, args.student_layers)
    with tempfile.TemporaryDirectory() as folder:
        config = transformers.BertConfig(**BERT_LARGE)
        transformers.BertModel(config).save_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model(MINILM))
        tokenizer.save_pretrained(folder)  # which is BERT's
        return measure_dse(folder, None)


def parse_args():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", choices=("train", "encode", "dse"), help="one part (default: all)")
    add("--teacher", default=MINILM, help="folder or Hub name (default: %(default)s)")
    add("--student-layers", default="1,3,5", help="of the teacher (default: %(default)s)")
    add("--train", default=f"{HERE}/demo/sentences.txt", help="sentences (default: %(default)s)")
    add("--sentences", type=number(int, 1), default=6400, help="how many (default: %(default)s)")
    add("--batch-size", type=number(int, 1), default=64, help="of training (default: %(default)s)")
    add("--rounds", type=number(int, 1), default=3, help="(default: %(default)s)")
    add("--random-weights", action="store_true", help="dse: BERT-Large's shape, for times alone")
    return parser.parse_args()


def main():
    args = parse_args()
    sentences = read_sentences(args.train)[: args.sentences]
    if args.only in (None, "train"):
        print(table(compare_training(args, sentences)))
    if args.only in (None, "encode"):
        print(table(compare_encoding(args, sentences)))
    if args.only in (None, "dse"):
        print(table(run_dse(args)))


if __name__ == "__main__":
    run_main(main)
