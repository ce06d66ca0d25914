"""Build the folder of data for results/runs.py from public data sets.

  python results/data_sets.py FOLDER

| what                                    | from                                               |
|-----------------------------------------|----------------------------------------------------|
| senteval/, without SNLI's train         | princeton-nlp/datasets-for-simcse: senteval.tar    |
| unlabeled.txt, first20k.txt ...         | Multi30k, task 2, train: captions; WikiSplit: tune,|
|                                         | validation, test                                   |
| pairs.tsv (two captions of one image)   | Multi30k, task 2, train                            |
| pairs.en-de.tsv (translations)          | Multi30k, task 1, train                            |
| nli_triplets.csv, glue/mrpc, glue/stsb   | SNLI dev, MRPC, STSBenchmark of senteval/          |
| retrieval/qnli (a BEIR folder)          | SetFit/qnli: dev and test                          |
| retrieval/scifact (a BEIR folder)       | BeIR/scifact and BeIR/scifact-qrels                |
| german/: STS-B, news, xquad-de, -en     | stsb-multi-mt, NTREX-128, XQuAD-R of LAReQA        |
| german/sentences.{de,en}.txt            | Multi30k, task 2, train; unlabeled.txt; Tatoeba, by|
|                                         | way of manythings.org                              |

QNLI and SciFact are on the Hub, Tatoeba on manythings.org, the others on GitHub; the licences are
the data sets' own. german/sentences.* cannot be the same as ours: Tatoeba's file changes.
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
NTREX = f"{GITHUB}/MicrosoftTranslator/NTREX/8561f6a622db9edad1217683e5c83daefd8bb2bf/NTREX-128"
XQUAD = f"{GITHUB}/google-research-datasets/lareqa/9bc8c7fb6dd8d01d72a05a93c2cb96882b0d299c/xquad-r"
TATOEBA = "https://www.manythings.org/anki/deu-eng.zip"
GERMAN = (68_913, 81_087)  # captions, and sentences of Tatoeba
ENGLISH = (110_000, 40_000)  # of unlabeled.txt, and of Tatoeba
SHORTEST = 4  # words of a sentence
MRPC_DEV = 408  # pairs
QNLI_TEST = 0.3  # of the questions
MEASURED = {  # file: the first digits of its sha256
    "unlabeled.txt": "f1f721ea10ef",
    "first5k.txt": "0286ae22bdae",
    "first20k.txt": "905fb2b3205c",
    "first50k.txt": "52755863a540",
    "pairs.tsv": "3effe4aada18",
    "pairs.en-de.tsv": "7ab9ae5acb3e",
    "nli_triplets.csv": "1cdb319785ef",
    "glue/mrpc/train.jsonl": "f9a55ace10f6",
    "glue/mrpc/validation.jsonl": "286079e2cf20",
    "glue/mrpc/test.jsonl": "42b219ce43fd",
    "glue/stsb/train.jsonl": "a881bf42afdb",
    "glue/stsb/validation.jsonl": "13ef938c5836",
    "glue/stsb/test.jsonl": "f4fd6f367a55",
    "retrieval/qnli/corpus.jsonl": "666173ed4e8f",
    "retrieval/qnli/queries.jsonl": "b4d23b2ee86b",
    "retrieval/qnli/qrels/train.tsv": "cc0148192019",
    "retrieval/qnli/qrels/test.tsv": "ee75ab22fd1f",
    "retrieval/scifact/corpus.jsonl": "f0d32db0d156",
    "retrieval/scifact/queries.jsonl": "9db7df096f74",
    "retrieval/scifact/qrels/train.tsv": "ac0902d9b1cb",
    "retrieval/scifact/qrels/test.tsv": "68c0ac63f1c2",
    "german/stsb-de-dev.tsv": "a7ee1f552653",
    "german/stsb-de-test.tsv": "95211d0852a1",
    "german/stsb-en-dev.tsv": "a5a9077d9d6c",
    "german/stsb-en-test.tsv": "39aefddbedb8",
    "german/news.en-de.tsv": "a1f8875f74be",
    "german/xquad-de/corpus.jsonl": "e3c76c1f3690",
    "german/xquad-de/queries.jsonl": "f04a7c389848",
    "german/xquad-de/qrels/test.tsv": "661437dcd76a",
    "german/xquad-en/corpus.jsonl": "0b1278489385",
    "german/xquad-en/queries.jsonl": "46f07c0a9ee8",
    "german/xquad-en/qrels/test.tsv": "25c3090cb84e",
    "german/sentences.de.txt": "39beec3bad4f",
    "german/sentences.en.txt": "f44847ef77e5",
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
    """MRPC's training pairs -> lines of train and dev. GLUE's dev set has other pairs."""
    pairs = shuffled(train)
    return pairs[MRPC_DEV:], pairs[:MRPC_DEV]


def labeled_pairs(table, first, second, label):
    """Tab-separated lines, and the numbers of three columns -> JSON lines, as in SetFit/mrpc."""
    lines = []
    for row in table:
        cells = [cell.strip() for cell in row.split("\t")]
        pair = dict(text1=cells[first], text2=cells[second], label=json.loads(cells[label]))
        lines.append(json.dumps(pair, ensure_ascii=False))
    return lines


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


def news(english, german):
    return [f"{joined(first)}\t{joined(second)}" for first, second in zip(english, german)]


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
    downstream = benchmark.parent.parent

    def read(name):
        return lines_of((downstream / name).read_bytes())

    train, validation = mrpc(read("MRPC/msr_paraphrase_train.txt")[1:])
    test = read("MRPC/msr_paraphrase_test.txt")[1:]
    files = {}
    for split, table in dict(train=train, validation=validation, test=test).items():
        files[f"glue/mrpc/{split}.jsonl"] = labeled_pairs(table, 3, 4, 0)
    for split, ours in dict(train="train", dev="validation", test="test").items():
        table = read(f"STS/STSBenchmark/sts-{split}.csv")
        files[f"glue/stsb/{ours}.jsonl"] = labeled_pairs(table, 5, 6, 4)
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
    sides = ("src.eng", "ref.deu")
    files["german/news.en-de.tsv"] = news(
        *[download(f"{NTREX}/newstest2019-{side}.txt") for side in sides]
    )
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
    write(folder, of_two_languages(lines_of((folder / "unlabeled.txt").read_bytes())))


if __name__ == "__main__":
    common.run_main(main)
