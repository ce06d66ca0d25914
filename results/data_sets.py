"""Build the folder of data for results/runs.py from public data sets.

  python results/data_sets.py FOLDER

| what                                  | from                                                     |
|---------------------------------------|----------------------------------------------------------|
| senteval/, without SNLI's train       | princeton-nlp/datasets-for-simcse: senteval.tar          |
| glue/stsb                             | STSBenchmark of senteval/                                |
| unlabeled.txt                         | Multi30k, task 2, train: captions; WikiSplit: tune,      |
|                                       | validation, test                                         |
| retrieval/qnli (a BEIR folder)        | SetFit/qnli: dev and test                                |
| retrieval/scifact (a BEIR folder)     | BeIR/scifact and BeIR/scifact-qrels                      |
| german/: STS-B, xquad-de, xquad-en    | stsb-multi-mt, XQuAD-R of LAReQA                         |
| german/sentences.{de,en}.txt          | Multi30k, task 2; unlabeled.txt; Tatoeba (manythings.org)|

QNLI and SciFact are on the Hub, the others on GitHub, each under its own licence. No sentence of
unlabeled.txt is in senteval/; normalized() says when two are the same. A table says which files are
those measured, by data/SHA256SUMS; Tatoeba changes. The downloads were not tried, without network.
"""

import csv
import gzip
import hashlib
import io
import json
import random
import re
import shutil
import sys
import urllib.request
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common

GITHUB = "https://raw.githubusercontent.com"
MULTI30K = f"{GITHUB}/multi30k/dataset/a3d2e0d26b56f3846f66a952536ffed4e401d05a/data"
WIKISPLIT = f"{GITHUB}/google-research-datasets/wiki-split/80f5bddf42d1a68201b7b107ee4b8d86d82e9fde"
STSB_MULTI = f"{GITHUB}/PhilipMay/stsb-multi-mt/30de0dec4ee199b7f42351d3f1a0b19592955385/data"
XQUAD = f"{GITHUB}/google-research-datasets/lareqa/9bc8c7fb6dd8d01d72a05a93c2cb96882b0d299c/xquad-r"
TATOEBA = "https://www.manythings.org/anki/deu-eng.zip"
GERMAN = (68_913, 81_087)  # captions, and sentences of Tatoeba
ENGLISH = (110_000, 40_000)  # of unlabeled.txt, and of Tatoeba
SHORTEST = 4  # words of a sentence
QNLI_TEST = 0.3  # of the questions
STSB_COLUMNS = (4, 5, 6)  # label, sentence, sentence
SUMS = Path(__file__).parent / "data" / "SHA256SUMS"  # of the files that were measured


# ---- From the lines of the sources to the lines of our files -------------------------------------


def normalized(sentence):
    """Two sentences are the same if they differ only in case and in spaces before a full stop."""
    return " ".join(sentence.lower().replace(" .", ".").split())


def shuffled(items):
    items = list(items)
    random.Random(0).shuffle(items)
    return items


def unlabeled_sentences(captions, wikisplit, evaluated):
    """All usable ones, each once, in random order."""
    sentences = sorted({*captions, *wikisplit_sentences(wikisplit)})
    enough = [text for text in sentences if len(text.split()) >= SHORTEST]
    return shuffled(text for text in enough if normalized(text) not in evaluated)


def wikisplit_sentences(lines):
    """Lines "sentence TAB first half <::::> second half" -> three sentences of each."""
    sentences = []
    for line in lines:
        texts = line.replace("<::::>", "\t").split("\t")
        sentences += [text.replace("''", '"').strip() for text in texts]
    return sentences


def json_pairs(lines):
    """STS-B's lines -> JSON lines, as the Hub has GLUE."""
    cells = [line.split("\t") for line in lines]
    rows = [[row[column] for column in STSB_COLUMNS] for row in cells]
    return [
        json.dumps(dict(text1=first, text2=second, label=json.loads(label)), ensure_ascii=False)
        for label, first, second in rows
    ]


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


def joined(text):
    """The text with one space where it has several, or others."""
    return " ".join(text.split())


def scored_pairs(lines):
    """CSV of sentence, sentence, score -> tab-separated lines."""
    return ["\t".join(map(joined, row)) for row in csv.reader(lines)]


def xquad(articles):
    """XQuAD-R's articles -> {file of a BEIR folder: lines}. Each sentence is a passage."""
    names = {}
    queries = []
    qrels = ["query-id\tcorpus-id\tscore"]
    for paragraph in [part for article in articles for part in article["paragraphs"]]:
        sentences = [joined(text) for text in paragraph["sentences"]]
        for text in sentences:
            names.setdefault(text, f"p{len(names)}")
        for question in paragraph["qas"]:
            start = question["answers"][0]["answer_start"]
            ends = [end for _, end in paragraph["sentence_breaks"]]
            sentence = next(text for text, end in zip(sentences, ends) if start < end)
            queries.append(dict(_id=question["id"], text=joined(question["question"])))
            qrels.append(f"{question['id']}\t{names[sentence]}\t1")
    corpus = [dict(_id=name, title="", text=text) for text, name in names.items()]
    rows = {"corpus.jsonl": corpus, "queries.jsonl": queries}
    files = {file: [json.dumps(row, ensure_ascii=False) for row in rows[file]] for file in rows}
    return files | {"qrels/test.tsv": qrels}


def mixed(sources, counts, evaluated):
    """Up to `count` random sentences of each source that are not in `evaluated`, shuffled."""
    chosen = []
    for lines, count in zip(sources, counts):
        usable = [text for text in sorted(set(lines)) if normalized(text) not in evaluated]
        chosen += shuffled(usable)[:count]
    return shuffled(chosen)


# ---- Downloads and files -------------------------------------------------------------------------


def lines_of(data):
    """UTF-8 -> its lines, without spaces at their ends, except empty lines."""
    lines = [line.strip() for line in data.decode("utf-8-sig").split("\n")]
    return [line for line in lines if line]


def download(url):
    request = urllib.request.Request(url, headers={"User-Agent": "Mozilla/5.0"})
    with common.one_line_errors(url, "the download failed; try again later"):
        data = urllib.request.urlopen(request, timeout=60).read()
        if url.endswith(".zip"):
            data = zipfile.ZipFile(io.BytesIO(data)).read("deu.txt")
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
    files = {}
    for name, split in dict(train="train", validation="dev", test="test").items():
        lines = lines_of((benchmark / f"sts-{split}.csv").read_bytes())
        files[f"glue/stsb/{name}.jsonl"] = json_pairs(lines)
    return files


def from_github(evaluated):
    """-> {file: lines} of what Multi30k and WikiSplit have."""
    captions = [download(f"{MULTI30K}/task2/raw/train.{part}.en.gz") for part in range(1, 6)]
    wikisplit = []
    for split in ("tune", "validation", "test"):
        wikisplit += download(f"{WIKISPLIT}/{split}.tsv")
    return {"unlabeled.txt": unlabeled_sentences(sum(captions, []), wikisplit, evaluated)}


def from_hub():
    """-> {file: lines} of what QNLI and SciFact have."""
    files = ("validation.jsonl", "test.jsonl")
    places = [common.download("SetFit/qnli", file) for file in files]
    files = qnli(*[lines_of(path.read_bytes()) for path in places])
    files = {f"retrieval/qnli/{name}": lines for name, lines in files.items()}
    for name in ("corpus.jsonl", "queries.jsonl"):
        packed = common.download("BeIR/scifact", f"{name}.gz").read_bytes()
        files[f"retrieval/scifact/{name}"] = lines_of(gzip.decompress(packed))
    for split in ("train", "test"):
        path = common.download("BeIR/scifact-qrels", f"{split}.tsv")
        files[f"retrieval/scifact/qrels/{split}.tsv"] = lines_of(path.read_bytes())
    return files


def of_two_languages(unlabeled):
    """-> {file: lines} of german/. unlabeled: the lines of unlabeled.txt."""
    files = {}
    for language in ("de", "en"):
        for split in ("dev", "test"):
            name = f"stsb-{language}-{split}"
            files[f"german/{name}.tsv"] = scored_pairs(download(f"{STSB_MULTI}/{name}.csv"))
        articles = json.loads(" ".join(download(f"{XQUAD}/{language}.json")))["data"]
        for name, lines in xquad(articles).items():
            files[f"german/xquad-{language}/{name}"] = lines
    lines = [line for file in files.values() for line in file]
    evaluated = {normalized(cell) for line in lines for cell in re.split(r'[\t"]', line)}
    captions = [download(f"{MULTI30K}/task2/raw/train.{part}.de.gz") for part in range(1, 6)]
    english, german = zip(*[line.split("\t")[:2] for line in download(TATOEBA)])
    sources = {"de": ((sum(captions, []), german), GERMAN), "en": ((unlabeled, english), ENGLISH)}
    for language, (texts, counts) in sources.items():
        files[f"german/sentences.{language}.txt"] = mixed(texts, counts, evaluated)
    return files


def write(folder, files):
    """Write {file: lines}, and print a row of the table for each."""
    measured = SUMS.read_text("utf-8").splitlines()
    for name, lines in files.items():
        data = "".join(f"{line}\n" for line in lines).encode()
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        same = f"{hashlib.sha256(data).hexdigest()}  {name}" in measured
        print(f"| {name} | {len(lines):,} | {'yes' if same else 'no'} |", flush=True)


class Options:
    folder: Path  # $DATA of the pages of results/


def main():
    args = common.read_options(Options, __doc__)
    folder = args.folder
    senteval = folder / "senteval"
    # SNLI's training pairs are not evaluated, and their premises are Multi30k's captions.
    ignore = shutil.ignore_patterns("*.train")
    tar = common.resolve_data("senteval.tar")
    shutil.copytree(tar, senteval, ignore=ignore, dirs_exist_ok=True)
    print("| file | lines | as measured |\n| --- | ---: | --- |")
    write(folder, from_senteval(senteval))
    write(folder, from_github(evaluation_sentences(senteval)))
    write(folder, from_hub())
    write(folder, of_two_languages(lines_of((folder / "unlabeled.txt").read_bytes())))


if __name__ == "__main__":
    common.run_main(main)
