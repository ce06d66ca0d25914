"""Score sentence encoders on SentEval's transfer tasks: a linear model on frozen embeddings, by SentEval's protocol, in percent.

  MR, CR, SUBJ, MPQA     accuracy; 10 folds, within each 10 more that choose C; the mean over the outer folds
  TREC, MRPC             accuracy, MRPC also F1; 10 folds of the training set choose C
  SST-2, SICK-E, SNLI    accuracy; the dev set chooses C, for SNLI there is no penalty; SNLI only where its train files are
  SICK-R, STS-B          Pearson x 100; SentEval's relatedness: a softmax over the scores, the squared error, Adam, stopped by dev

Pairs are read as |u - v|, u o v, SNLI's as u, v, u o v, |u - v|. "avg" is that of SimCSE and the papers here: MR, CR, SUBJ, MPQA, SST-2, TREC, MRPC.

The classifier is SentEval's with usepytorch off, scikit-learn's logistic regression with its values of C: here in torch, all folds and all C at once.
With usepytorch on, SentEval takes the same model, but stops its training early and chooses among other penalties. --fast takes 5 folds instead of 10,
as SentEval's prototyping configuration does; the rest of that, a cruder optimizer for fewer epochs, means nothing to a fit that reaches its minimum.
Folds and the order of rows that they are drawn from are SentEval's own: on CR another shuffle moves the score by half a point.

  python eval_transfer.py runs/ckd sentence-transformers/all-MiniLM-L6-v2
  python eval_transfer.py runs/ckd --tasks MR,TREC --fast
"""
import json
import re
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import pearsonr
from torch import nn

import common

TASKS = ("MR", "CR", "SUBJ", "MPQA", "SST-2", "TREC", "MRPC", "SICK-E", "SICK-R", "STS-B", "SNLI")
AVERAGE = TASKS[:7]
FILES = {  # {split: file}, the layout of a line in words, and as a pattern
    "SST-2": ({split: f"SST/binary/sentiment-{split}" for split in ("train", "dev", "test")},
              "sentence, tab, 0 or 1", r"(?P<first>[^\t]*)\t(?P<label>[01])"),
    "TREC": (dict(train="TREC/train_5500.label", test="TREC/TREC_10.label"),
             "CLASS:kind question", r"(?P<label>ABBR|DESC|ENTY|HUM|LOC|NUM):\S+ (?P<first>.*)"),
    "MRPC": (dict(train="MRPC/msr_paraphrase_train.txt", test="MRPC/msr_paraphrase_test.txt"),
             "0 or 1, two numbers, two sentences, tab-separated", r"(?P<label>[01])\t\d+\t\d+\t(?P<first>[^\t]*)\t(?P<second>[^\t]*)"),
    "SICK-E": (dict(train="SICK/SICK_train.txt", dev="SICK/SICK_trial.txt", test="SICK/SICK_test_annotated.txt"),
               "number, two sentences, score, ENTAILMENT, NEUTRAL or CONTRADICTION, tab-separated",
               r"\d+\t(?P<first>[^\t]*)\t(?P<second>[^\t]*)\t[\d.]+\t(?P<label>ENTAILMENT|NEUTRAL|CONTRADICTION)"),
}


def read_lines(path):
    """SentEval's files as they come -> list of str: UTF-8, but for a few lines of Latin-1; a line of MR and the like may be empty."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise common.DataError(f"{path}: {error.strerror}, expected SentEval's file") from None

    def decode(line):
        try:
            return line.decode("utf-8-sig").strip()
        except UnicodeDecodeError:
            return line.decode("latin-1").strip()
    return [decode(line) for line in lines[:-1] + lines[-1:] * bool(lines[-1])]


def by_length(first, second, labels):
    """SentEval's order of rows, on which its folds depend: by the number of words, then by label."""
    order = sorted(range(len(labels)), key=lambda i: (len(first[i].split()), len(second[i].split()) if second else 0, labels[i]))
    return [first[i] for i in order], second and [second[i] for i in order], labels[order]


def read_task(root, task):
    """-> {split: (first, second or None, labels [n])}; splits "train" and, where the task has them, "dev" and "test". Raises DataError."""
    if task in ("MR", "CR", "SUBJ", "MPQA"):
        names = dict(MR="rt-polarity.neg rt-polarity.pos", CR="custrev.neg custrev.pos", MPQA="mpqa.neg mpqa.pos",
                     SUBJ="subj.subjective subj.objective")
        negative, positive = (read_lines(root / task / name) for name in names[task].split())
        return {"train": by_length(negative + positive, None, np.repeat([0, 1], [len(negative), len(positive)]))}
    if task in ("SICK-R", "STS-B"):
        files = dict(train="SICK_train", dev="SICK_trial", test="SICK_test_annotated")
        sets = {split: common.read_graded_pairs(root / f"SICK/{name}.txt", at=(1, 2, 3)) if task == "SICK-R" else
                common.read_graded_pairs(root / f"STS/STSBenchmark/sts-{split}.csv", at=(5, 6, 4)) for split, name in files.items()}
        return {split: (pairs.first, pairs.second, np.array(pairs.scores)) for split, pairs in sets.items()}
    splits = {}
    if task == "SNLI":
        for split in ("train", "dev", "test"):
            first, second, labels = (read_lines(root / f"SNLI/{part}.{split}") for part in ("s1", "s2", "labels"))
            wrong = [line for line, label in enumerate(labels, 1) if label not in ("entailment", "neutral", "contradiction")]
            if wrong or not len(first) == len(second) == len(labels):
                raise common.DataError(f"{root}/SNLI/labels.{split}:{(wrong + [len(labels)])[0]}: expected entailment, neutral or contradiction, "
                                       f"one for each line of s1.{split} and s2.{split}")
            splits[split] = first, second, labels
    else:
        files, layout, pattern = FILES[task]
        for split, name in files.items():
            found = [re.fullmatch(pattern, text) for text in read_lines(root / name)]
            found = found[1:] if task in ("MRPC", "SICK-E") else found  # their header
            if None in found or not found:
                line = (found + [None]).index(None) + 1 + (task in ("MRPC", "SICK-E"))
                raise common.DataError(f"{root / name}:{line}: expected {layout}")
            splits[split] = tuple([match[part] if part in match.groupdict() else None for match in found] for part in ("first", "second", "label"))
    names = sorted(set(splits["train"][2]))
    return {split: by_length(first, None if second[0] is None else second, np.array([names.index(label) for label in labels]))
            for split, (first, second, labels) in splits.items()}


def logistic_regression(features, labels, rows, strengths):
    """P problems at once. features [n, D]; labels [n], class numbers; rows [n, P], 1 where a problem trains on a row, else 0; strengths, P values of
    scikit-learn's C -> weights [K, D, P], intercepts [K, 1, P]; K is the number of classes, for two it is 1. Each minimizes
    C sum(cross-entropy) + |w|^2 / 2."""
    share = torch.bincount(labels) / len(labels)
    share = (share[1:] if len(share) == 2 else share)[:, None, None]  # [K, 1, 1]
    strengths, scale, index = torch.tensor(strengths, device=features.device), 1 / rows.sum(dim=0), torch.arange(len(labels), device=labels.device)
    # L-BFGS needs few steps where the curvature is about one in all directions: so features along their principal axes, each divided by the root of
    # about its second derivative, the variance times p (1 - p) of the class, and the penalty's own. The minimum stays where it is.
    mean = features.mean(dim=0)
    variance, axes = torch.linalg.eigh((features - mean).T @ (features - mean) / len(features))
    x, unit = (features - mean) @ axes, (variance.clamp(min=0)[:, None] * share * (1 - share) + scale / strengths).rsqrt()  # [n, D], [K, D, P]
    scaled = torch.zeros_like(unit, requires_grad=True)
    scaled_bias = torch.zeros_like(unit[:, :1], requires_grad=True)
    optimizer = torch.optim.LBFGS([scaled, scaled_bias], max_iter=500, history_size=20, tolerance_grad=1e-5, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        weights = unit * scaled
        scores = x @ weights + scaled_bias * (share * (1 - share)).rsqrt()  # [K, n, P]
        losses = F.softplus((1 - 2 * labels[:, None]) * scores[0]) if len(scores) == 1 else scores.logsumexp(dim=0) - scores[labels, index]
        each = scale * ((rows * losses).sum(dim=0) + weights.square().sum(dim=(0, 1)) / (2 * strengths))  # [P]
        total = each.double().sum()  # in float32 the sum would hide the last progress of a single one
        total.backward()
        return total
    optimizer.step(closure)
    weights, bias = axes @ (unit * scaled).detach(), (scaled_bias * (share * (1 - share)).rsqrt()).detach()
    return weights, bias - (mean @ weights)[:, None]


def predict(features, weights, bias):
    """-> [n, P], class numbers."""
    scores = features @ weights + bias
    return (scores[0] > 0).long() if len(scores) == 1 else scores.argmax(dim=0)


def accuracy(predicted, labels):
    """[n, P], [n] -> [P], percent."""
    return 100 * (predicted == labels[:, None]).float().mean(dim=0)


def folds(labels, k, seed=1111):
    """scikit-learn's StratifiedKFold(k, shuffle=True, random_state=seed): -> [n], the fold of each row, 0 to k - 1."""
    random, fold = np.random.RandomState(seed), np.zeros(len(labels), int)
    classes = list(dict.fromkeys(labels.tolist()))  # in the order in which they appear
    counts = np.bincount([classes.index(label) for label in labels.tolist()])
    dealt = np.arange(len(classes)).repeat(counts)  # row by row, sorted by class, to fold 0, 1, ...: so many of each class does a fold get
    for c, label in enumerate(classes):
        share = np.arange(k).repeat([np.count_nonzero(dealt[i::k] == c) for i in range(k)])
        random.shuffle(share)
        fold[labels == label] = share
    return fold


def chosen_by_folds(features, labels, strengths, k):
    """Weights and intercept, trained on all rows at the strength that is best on average over k folds, to two decimals as in
    SentEval; the smallest of equals."""
    R, fold = len(strengths), torch.from_numpy(folds(labels.cpu().numpy(), k)).to(labels.device)
    rows = torch.stack([fold != i for i in range(k + 1) for _ in strengths], dim=1).float()  # [n, (k + 1) R]; fold k is empty: all rows
    weights, bias = logistic_regression(features, labels, rows, strengths * (k + 1))
    predicted = predict(features, weights, bias).split(R, dim=1)
    means = torch.stack([accuracy(predicted[i][fold == i], labels[fold == i]) for i in range(k)]).mean(dim=0)
    best = k * R + int(means.round(decimals=2).argmax())
    return weights[..., best:best + 1], bias[..., best:best + 1]


def relatedness(features, scores, seed=1111):
    """SentEval's SICK-R and STS-B: {split: [n, D]}, {split: [n], 0 to 5} -> Pearson x 100 on test. A score is spread over its two neighbours among
    1 to 5 (Tai et al., 2015). Adam, batch 64; after every 50 epochs dev is scored, and the fourth time without progress ends it, or epoch 1,050."""
    torch.manual_seed(seed)
    grades = torch.arange(1, 6, device=features["train"].device)
    target = (1 - (torch.tensor(scores["train"], device=grades.device)[:, None] - grades).abs()).clamp(min=0).float()  # [n, 5]
    model = nn.Sequential(nn.Linear(features["train"].shape[1], 5), nn.Softmax(dim=1)).to(grades.device)
    optimizer, best, idle = torch.optim.Adam(model.parameters(), fused=True), {"dev": -1, "test": float("nan")}, 0

    def pearson(split):
        with torch.no_grad():
            return 100 * pearsonr((model(features[split]) @ grades.float()).cpu().numpy(), scores[split]).statistic
    for epoch in range(1, 1051):
        for rows in torch.randperm(len(target), device=grades.device).split(64):
            optimizer.zero_grad()
            F.mse_loss(model(features["train"][rows]), target[rows]).backward()
            optimizer.step()
        if epoch % 50 == 0:
            dev = pearson("dev")
            best, idle = ({"dev": dev, "test": pearson("test")}, idle) if dev > best["dev"] else (best, idle + 1)
            if idle == 4:
                break
    return best["test"]


def score(task, splits, embed, k):
    """One task: splits of read_task(), embed(list of sentences) -> [n, D], k folds -> {name: percent}."""
    inputs, labels = {}, {split: values for split, (*_, values) in splits.items()}
    for split, (first, second, _) in splits.items():
        u, v = embed(first), None if second is None else embed(second)
        inputs[split] = u if second is None else torch.cat([u, v, u * v, (u - v).abs()] if task == "SNLI" else [(u - v).abs(), u * v], dim=1)
    if task in ("SICK-R", "STS-B"):
        return {task: float(relatedness(inputs, labels))}
    x, y = inputs["train"], torch.from_numpy(labels["train"]).to(inputs["train"].device)
    if set(splits) == {"train"}:  # MR, CR, SUBJ, MPQA
        results, fold = [], torch.from_numpy(folds(labels["train"], k)).to(y.device)
        for i in range(k):
            model = chosen_by_folds(x[fold != i], y[fold != i], [2.0**t for t in range(-2, 4)], k)
            results.append(accuracy(predict(x[fold == i], *model), y[fold == i]))
        return {task: float(torch.stack(results).mean())}
    if "dev" in splits:  # SST-2, SICK-E, SNLI
        strengths = [1e9] if task == "SNLI" else [2.0**t for t in range(-2, 4)]
        weights, bias = logistic_regression(x, y, torch.ones(len(y), len(strengths), device=y.device), strengths)
        best = int(accuracy(predict(inputs["dev"], weights, bias), torch.from_numpy(labels["dev"]).to(y.device)).argmax())
        model = weights[..., best:best + 1], bias[..., best:best + 1]
    else:  # TREC, MRPC
        model = chosen_by_folds(x, y, [2.0**t for t in range(-1, 6)], k)
    predicted, truth = predict(inputs["test"], *model), torch.from_numpy(labels["test"]).to(y.device)
    result = {task: float(accuracy(predicted, truth))}
    if task == "MRPC":
        hits = int(((predicted[:, 0] == 1) & (truth == 1)).sum())
        result["MRPC F1"] = 200 * hits / int((predicted == 1).sum() + (truth == 1).sum())
    return result


def parse_args():
    parser = common.ArgumentParser(description="SentEval's transfer tasks: a linear model on frozen embeddings, in percent")
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="folder or hub name")
    add("--senteval", default="senteval.tar", help="SentEval's folder or tar, local or from the hub; %(default)s")
    add("--tasks", help=f"some of {','.join(TASKS)}; all, SNLI where its train files are")
    add("--fast", action="store_true", help="5 folds instead of 10")
    add("--pooling", choices=("mean", "cls", "pooler"), help="read every model so, whatever its folder says")
    add("--json", metavar="FILE", help="write the scores, unrounded")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="%(default)s")
    return parser.parse_args()


def main():
    args = parse_args()
    if args.device != "cpu" and not (args.device.startswith("cuda") and torch.cuda.is_available()):
        raise common.DataError(f"--device {args.device}: expected cpu, or cuda on a machine that has it")
    if args.tasks and set(args.tasks.split(",")) - set(TASKS):
        raise common.DataError(f"--tasks {args.tasks}: expected some of {','.join(TASKS)}")
    folder = common.resolve(args.senteval)
    root = next((found.parent.parent for found in sorted(Path(folder).rglob("STSBenchmark"))), None)
    if root is None:
        raise common.DataError(f"{folder}: no STS/STSBenchmark below it, expected SentEval's folder (senteval.tar unpacked)")
    tasks = args.tasks.split(",") if args.tasks else TASKS[:10 + (root / "SNLI/s1.train").exists()]
    data = {task: read_task(root, task) for task in tasks}
    sides = [side for splits in data.values() for split in splits.values() for side in split[:2] if side is not None]
    row, table = {text: i for i, text in enumerate(dict.fromkeys(text or "." for side in sides for text in side))}, {}
    for name in args.models:
        begin, encoder = time.perf_counter(), common.load_encoder(name, args.pooling).to(args.device).eval()
        vectors = torch.from_numpy(common.encode(encoder, common.Tokens(encoder, list(row)), args.device, name)).to(args.device)
        scores, encoded = {}, time.perf_counter() - begin
        for task, splits in common.progress(data.items(), desc=f"{name}: classifiers", leave=False):
            scores |= score(task, splits, lambda side: vectors[[row[text or "."] for text in side]], 5 if args.fast else 10)
        if set(AVERAGE) <= set(scores):
            scores["avg"] = float(np.mean([scores[task] for task in AVERAGE]))
        table[name] = scores | {"encoding, s": encoded, "in all, s": time.perf_counter() - begin}
    print(common.table(table))
    if args.json:
        try:
            Path(args.json).write_text(json.dumps(table, indent=2) + "\n", "utf-8")
        except OSError as error:
            raise common.DataError(f"{args.json}: {error.strerror}, expected a file that can be written") from None


if __name__ == "__main__":
    common.run_main(main)
