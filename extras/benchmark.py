"""Measure the speed of this project against what people use instead, on this machine.

  train   ckd.py --objective kd against sentence-transformers' trainer with its MSELoss: the same
          student, sentences, targets and batch size; tokenizing counts on both sides
  encode  common.encode against SentenceTransformer.encode: sentences, passages, one at a time
  dse     DSE's Tables 3 and 4: pairs scored by a cross-encoder, and by embeddings and a head; the
          cross-encoder's time is extrapolated from 500 pairs
  gpu     ckd.py and common.encode on a GPU, and whether they give the same results there
  cpu     training and encoding in bf16, and with torch.compile, against fp32 on a CPU
          extras/device.py says how these two, which only --only names, are measured

Both sides take turns. A ratio is the median over the rounds, with the smallest and the largest.
Dropout costs time. ckd.py has none by default if the student is cut to some layers, whereas
sentence-transformers keeps the model's own, so both equal dropout and the defaults are compared.

  python -m extras.benchmark                       all of it, some ten minutes on two cores
  python -m extras.benchmark --only dse --random-weights      DSE's own shapes, for times alone
  python -m extras.benchmark --only gpu --tiny                tries it, within a minute on a CPU
"""

import tempfile
from pathlib import Path
from statistics import harmonic_mean

import torch

import dse
from common import HERE, LOG_STEPS, MINILM, ArgumentParser, UserError, note, number, run_main, table
from common import Tokens, encode, load_encoder, read_sentences, resolve_model
from eval_sts import embed
from extras import device
from extras.device import BERT_LARGE, DEVICE, GPU_SHAPES, MAX_LENGTH
from extras.device import compare, random_model, run_ckd, seconds, their_training

DROPOUTS = (0.0, 0.1)  # our default for a student that is cut, and BERT's own, which is theirs
PASSAGE = 8  # sentences
SINGLE_SENTENCES = 100  # that are encoded one at a time
DSE_SENTENCES = 1000
DSE_PAIRS = 500  # that the cross-encoder reads
CATALOGUE_COPIES = 100  # of 1,000 sentences: Table 4 has a catalogue of 100,000
DSE_QUERIES = 10  # the fastest counts


def our_training(args, sentences, folder, dropout):
    """ckd.py as a process of its own -> sentences per second, without its dev scores."""
    options = dict(teacher=args.teacher, student_layers=args.student_layers, dropout=dropout)
    options |= dict(epochs=1, batch_size=args.batch_size, precision="fp32")
    log = run_ckd(folder / "ours", sentences, **options)
    speeds = [row["sentences_per_second"] for row in log if "loss" in row]
    training = len(sentences) / harmonic_mean(speeds)
    student = load_encoder(args.teacher, layers=args.student_layers)
    tokenizing, _ = seconds(Tokens, student, sentences, MAX_LENGTH)
    return len(sentences) / (tokenizing + training)


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
                folder = Path(name)
                ours[dropout].append(our_training(args, sentences, folder, dropout))
                student = load_encoder(args.teacher, layers=args.student_layers, dropout=dropout)
                data = (sentences, targets, folder, args.batch_size)
                theirs[dropout].append(their_training(student, *data))
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
        return measure_dse(random_model(folder, BERT_LARGE), None)


def parse_args():
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    parts = ("train", "encode", "dse", "gpu", "cpu")
    add("--only", choices=parts, help="one part (default: train, encode and dse)")
    add("--teacher", default=MINILM, help="folder or Hub name (default: %(default)s)")
    add("--student-layers", default="1,3,5", help="of the teacher (default: %(default)s)")
    add("--train", default=f"{HERE}/demo/sentences.txt", help="sentences (default: %(default)s)")
    add("--sentences", type=number(int, 1), default=6400, help="how many (default: %(default)s)")
    add("--batch-size", type=number(int, 1), default=64, help="of training (default: %(default)s)")
    add("--rounds", type=number(int, 1), default=3, help="(default: %(default)s)")
    add("--random-weights", action="store_true", help="dse: BERT-Large's shape, for times alone")
    shapes = dict(choices=GPU_SHAPES, default=[*GPU_SHAPES])
    add("--shapes", nargs="+", **shapes, help="gpu: shapes of the models (default: all)")
    add("--tiny", action="store_true", help="gpu, cpu: small shapes and few steps, as a test")
    return parser.parse_args()


def main():
    args = parse_args()
    if args.only in ("gpu", "cpu"):
        device.main(args)
        return
    sentences = read_sentences(args.train)[: args.sentences]
    if args.only in (None, "train"):
        print(table(compare_training(args, sentences)))
    if args.only in (None, "encode"):
        print(table(compare_encoding(args, sentences)))
    if args.only in (None, "dse"):
        print(table(run_dse(args)))


if __name__ == "__main__":
    run_main(main)
