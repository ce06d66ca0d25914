"""Build the folder of data for results/runs.py from public data sets.

  python results/data_sets.py FOLDER

| what                                    | from                                               |
|-----------------------------------------|----------------------------------------------------|
| senteval/, without SNLI's train         | princeton-nlp/datasets-for-simcse: senteval.tar    |
| unlabeled.txt, first20k.txt ...         | Multi30k, task 2, train: captions; WikiSplit: tune,|
|                                         | validation, test                                   |
| pairs.tsv (two captions of one image)   | Multi30k, task 2, train                            |
| pairs.en-de.tsv (translations)          | Multi30k, task 1, train                            |
| nli_triplets.csv, glue/MRPC, glue/STS-B | SNLI dev, MRPC, STSBenchmark of senteval/          |
| retrieval/qnli (a BEIR folder)          | SetFit/qnli: dev and test                          |

Multi30k and WikiSplit are on GitHub, the others on the Hub; the licences are the data sets' own.
No sentence of unlabeled.txt and pairs.tsv is in senteval/; normalized() says when two are the same.
A table at the end says which files have the same bytes as those that results/ was measured with.
The downloads could not be tried: there was no network.
"""

import argparse
import csv
import gzip
import hashlib
import io
import json
import random
import shutil
import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common

GITHUB = "https://raw.githubusercontent.com"
MULTI30K = f"{GITHUB}/multi30k/dataset/a3d2e0d26b56f3846f66a952536ffed4e401d05a/data"
WIKISPLIT = f"{GITHUB}/google-research-datasets/wiki-split/80f5bddf42d1a68201b7b107ee4b8d86d82e9fde"
SHORTEST = 4  # words of a sentence
MRPC_DEV = 408  # pairs
QNLI_TEST = 0.3  # of the questions
STSB_COLUMNS = "index genre filename year old_index source1 source2 sentence1 sentence2 score"
MEASURED = {  # file: the first digits of its sha256
    "unlabeled.txt": "f1f721ea10ef",
    "first5k.txt": "0286ae22bdae",
    "first20k.txt": "905fb2b3205c",
    "first50k.txt": "52755863a540",
    "pairs.tsv": "3effe4aada18",
    "pairs.en-de.tsv": "7ab9ae5acb3e",
    "nli_triplets.csv": "1cdb319785ef",
    "glue/MRPC/train.tsv": "8d3c6ff96860",
    "glue/MRPC/dev.tsv": "247a004f5955",
    "glue/MRPC/test.tsv": "150077ee6d6c",
    "glue/STS-B/train.tsv": "d400c5e3ac5a",
    "glue/STS-B/dev.tsv": "e71ae4a77500",
    "glue/STS-B/test.tsv": "65e2560ff407",
    "retrieval/qnli/corpus.jsonl": "666173ed4e8f",
    "retrieval/qnli/queries.jsonl": "b4d23b2ee86b",
    "retrieval/qnli/qrels/train.tsv": "cc0148192019",
    "retrieval/qnli/qrels/test.tsv": "ee75ab22fd1f",
}


# ---- From the lines of the sources to the lines of our files -------------------------------------


def normalized(sentence):
    """Two sentences are the same if they differ only in case and in spaces before a full stop."""
    return " ".join(sentence.lower().replace(" .", ".").split())


def is_usable(sentence, evaluated):
    return len(sentence.split()) >= SHORTEST and normalized(sentence) not in evaluated


def shuffled(items):
    items = list(items)
    random.Random(0).shuffle(items)
    return items


def unlabeled_sentences(captions, wikisplit, evaluated):
    """All usable ones, each once, in random order."""
    sentences = sorted({*captions, *wikisplit_sentences(wikisplit)})
    return shuffled(text for text in sentences if is_usable(text, evaluated))


def wikisplit_sentences(lines):
    """Lines "sentence TAB first half <::::> second half" -> three sentences of each."""
    sentences = []
    for line in lines:
        texts = line.replace("<::::>", "\t").split("\t")
        sentences += [text.replace("''", '"').strip() for text in texts]
    return sentences


def caption_pairs(first, second, evaluated):
    """Two captions of each image, if both are usable."""
    pairs = zip(first, second)
    return ["\t".join(pair) for pair in pairs if all(is_usable(text, evaluated) for text in pair)]


def translations(english, german, evaluated):
    pairs = zip(english, german)
    return ["\t".join(pair) for pair in pairs if normalized(pair[0]) not in evaluated]


def nli_triplets(premises, hypotheses, labels):
    """Each hypothesis that a premise entails, with each that contradicts it -> lines of CSV."""
    groups = {}
    for premise, hypothesis, label in zip(premises, hypotheses, labels):
        groups.setdefault(premise, {}).setdefault(label, []).append(hypothesis)
    rows = []
    for premise, group in groups.items():
        for positive in group.get("entailment", []):
            rows += [[premise, positive, text] for text in group.get("contradiction", [])]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(shuffled(rows))
    return ["sent0,sent1,hard_neg", *text.getvalue().splitlines()]


def mrpc(train):
    """MRPC's training pairs -> lines of train.tsv and dev.tsv. GLUE's dev set has other pairs."""
    header, *pairs = train
    pairs = shuffled(pairs)
    return [header, *pairs[MRPC_DEV:]], [header, *pairs[:MRPC_DEV]]


def stsb(lines):
    """STSBenchmark's genre, file, year, number, score and two sentences -> GLUE's table."""
    table = [STSB_COLUMNS.replace(" ", "\t")]
    for index, line in enumerate(lines):
        *source, score, first, second = line.split("\t")[:7]
        table.append("\t".join([str(index), *source, "none", "none", first, second, score]))
    return table


def qnli(dev, test):
    """QNLI as JSON lines -> {file of a BEIR folder: lines}.

    The corpus is every sentence. A query is a question of dev that its sentence answers (label 0).
    """
    dev, test = [[json.loads(line) for line in lines] for lines in (dev, test)]
    texts = dict.fromkeys(row["text2"] for row in dev + test)
    names = {text: f"d{number}" for number, text in enumerate(texts)}
    answered = [row for row in dev if row["label"] == 0]
    corpus = [dict(_id=names[text], title="", text=text) for text in texts]
    queries = [dict(_id=f"q{i}", text=row["text1"]) for i, row in enumerate(answered)]
    qrels = [f"q{i}\t{names[row['text2']]}\t1" for i, row in enumerate(answered)]
    is_test = set(random.Random(0).sample(qrels, round(QNLI_TEST * len(qrels))))
    header = "query-id\tcorpus-id\tscore"
    return {
        "corpus.jsonl": [json.dumps(row) for row in corpus],
        "queries.jsonl": [json.dumps(row) for row in queries],
        "qrels/train.tsv": [header, *(line for line in qrels if line not in is_test)],
        "qrels/test.tsv": [header, *(line for line in qrels if line in is_test)],
    }


# ---- Downloads and files -------------------------------------------------------------------------


def lines_of(data):
    """UTF-8 -> its lines, without spaces at their ends, except empty lines."""
    lines = [line.strip() for line in data.decode("utf-8-sig").split("\n")]
    return [line for line in lines if line]


def download(url):
    with common.one_line_errors(url, "it is downloaded from GitHub"):
        data = urllib.request.urlopen(url, timeout=60).read()
        return lines_of(gzip.decompress(data) if url.endswith(".gz") else data)


def evaluation_sentences(folder):
    """All cells of the tables in SentEval's folder, normalized."""
    sentences = set()
    for path in Path(folder).rglob("*"):
        if path.is_file():
            text = path.read_bytes().decode("utf-8", "replace")  # MR is in Latin-1
            sentences.update(map(normalized, text.replace("\t", "\n").splitlines()))
    return sentences


def from_senteval(folder):
    """-> {file: lines} of what SentEval's folder has."""
    benchmark = min(Path(folder).rglob("STSBenchmark"))
    downstream = benchmark.parent.parent

    def read(name):
        return lines_of((downstream / name).read_bytes())

    train, dev = mrpc(read("MRPC/msr_paraphrase_train.txt"))
    test = read("MRPC/msr_paraphrase_test.txt")
    files = {"glue/MRPC/train.tsv": train, "glue/MRPC/dev.tsv": dev, "glue/MRPC/test.tsv": test}
    for split in ("train", "dev", "test"):
        files[f"glue/STS-B/{split}.tsv"] = stsb(read(f"STS/STSBenchmark/sts-{split}.csv"))
    snli = [read(f"SNLI/{part}.dev") for part in ("s1", "s2", "labels")]
    return files | {"nli_triplets.csv": nli_triplets(*snli)}


def from_github(evaluated):
    """-> {file: lines} of what Multi30k and WikiSplit have."""
    captions = [download(f"{MULTI30K}/task2/raw/train.{part}.en.gz") for part in range(1, 6)]
    wikisplit = []
    for split in ("tune", "validation", "test"):
        wikisplit += download(f"{WIKISPLIT}/{split}.tsv")
    english, german = [download(f"{MULTI30K}/task1/raw/train.{name}.gz") for name in ("en", "de")]
    unlabeled = unlabeled_sentences(sum(captions, []), wikisplit, evaluated)
    files = {f"first{n}k.txt": unlabeled[: 1000 * n] for n in (5, 20, 50)}
    files |= {"unlabeled.txt": unlabeled, "pairs.tsv": caption_pairs(*captions[:2], evaluated)}
    return files | {"pairs.en-de.tsv": translations(english, german, evaluated)}


def from_hub():
    """-> {file: lines} of what QNLI has."""
    files = ("validation.jsonl", "test.jsonl")
    places = [common.download("SetFit/qnli", file) for file in files]
    files = qnli(*[lines_of(path.read_bytes()) for path in places])
    return {f"retrieval/qnli/{name}": lines for name, lines in files.items()}


def write(folder, files):
    """Write {file: lines}, and print a row of the table for each."""
    for name, lines in files.items():
        data = "".join(f"{line}\n" for line in lines).encode()
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        same = hashlib.sha256(data).hexdigest().startswith(MEASURED[name])
        print(f"| {name} | {len(lines):,} | {'yes' if same else 'no'} |", flush=True)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="$DATA of the pages of results/")
    return parser.parse_args()


def main():
    folder = parse_args().folder
    senteval = folder / "senteval"
    # SNLI's training pairs are not evaluated, and their premises are Multi30k's captions.
    ignore = shutil.ignore_patterns("*.train")
    tar = common.resolve_data("senteval.tar")
    shutil.copytree(tar, senteval, ignore=ignore, dirs_exist_ok=True)
    print("| file | lines | as measured |\n| --- | ---: | --- |")
    write(folder, from_senteval(senteval))
    write(folder, from_github(evaluation_sentences(senteval)))
    write(folder, from_hub())


if __name__ == "__main__":
    common.run_main(main)
