"""results/data_sets.py: what it makes of small texts in the formats of its sources.

And, from the files of ../shared/data, the files themselves. Nothing is downloaded.
"""

import gzip
import io
import json
import sys
from pathlib import Path

from conftest import ROOT

import common

sys.path.insert(0, str(ROOT / "results"))
import data_sets
import runs

CAPTIONS = ["A dog runs in the snow.", "Two dogs play .", "A man, a plan, a canal.", "A tall man."]
WIKISPLIT = [
    "He sang '' Yes '' and he left early .\tHe sang '' Yes '' now . <::::> He then left early .",
    "It is a town , and it has a mill .\tIt is a small town . <::::> It has a mill .",
]


def test_unlabeled_sentences_are_distinct_long_enough_and_not_evaluated():
    """Two are the same up to case and the space before a full stop."""
    assert data_sets.normalized("a man, and") != data_sets.normalized("a man , and")
    evaluated = {data_sets.normalized("a dog  RUNS in the snow .")}
    found = data_sets.unlabeled_sentences(CAPTIONS + CAPTIONS, WIKISPLIT, evaluated)
    wikisplit = [
        'He sang " Yes " and he left early .',
        'He sang " Yes " now .',
        "He then left early .",
    ]
    wikisplit += ["It is a town , and it has a mill .", "It is a small town .", "It has a mill ."]
    expected = ["A man, a plan, a canal.", "Two dogs play .", *wikisplit]
    assert sorted(found) == sorted(expected) != found
    assert found == data_sets.unlabeled_sentences(CAPTIONS[::-1], WIKISPLIT[::-1], evaluated)


def test_pairs_are_left_out_with_an_evaluated_sentence():
    others = ["A dog is out.", "Dogs are at play.", "A man and a canal.", "A man stands here."]
    evaluated = {data_sets.normalized(others[0])}
    pairs = ["Two dogs play .\tDogs are at play.", "A man, a plan, a canal.\tA man and a canal."]
    assert data_sets.caption_pairs(CAPTIONS, others, evaluated) == pairs  # "A tall man.": 3 words
    german = ["Ein Hund", "Zwei Hunde", "Ein Mann", "Ein großer Mann"]
    translated = data_sets.translations(CAPTIONS, german, {data_sets.normalized(CAPTIONS[0])})
    assert translated == [f"{a}\t{b}" for a, b in zip(CAPTIONS[1:], german[1:])]


def test_a_triplet_has_one_premise_and_its_labels(tmp_path):
    premises = ["A", "A", "A", 'B, "b"', 'B, "b"', "A", "C"]
    labels = ["entailment", "neutral", "contradiction", "contradiction", *3 * ["entailment"]]
    lines = data_sets.nli_triplets(premises, "1234567", labels)
    (tmp_path / "triplets.csv").write_text("\n".join(lines) + "\n")
    rows = common.read_triplets(tmp_path / "triplets.csv")
    assert sorted(rows) == [["A", "1", "3"], ["A", "6", "3"], ['B, "b"', "5", "4"]]


def test_the_corpus_of_qnli_is_all_sentences_and_its_queries_are_answered():
    rows = [("Who?", "He did.", 0), ("When?", "It is a town.", 1), ("Where?", "Here.", 0)]
    rows += [("Why?", "He did.", 0), ("How?", "By car.", 1)]
    lines = [json.dumps(dict(text1=a, text2=b, label=c)) for a, b, c in rows]
    files = data_sets.qnli(lines[:4], lines[3:])
    corpus = [json.loads(line)["text"] for line in files["corpus.jsonl"]]
    assert corpus == ["He did.", "It is a town.", "Here.", "By car."]
    queries = [json.loads(line)["text"] for line in files["queries.jsonl"]]
    assert queries == ["Who?", "Where?", "Why?"]
    train, test = files["qrels/train.tsv"][1:], files["qrels/test.tsv"][1:]
    assert sorted(train + test) == ["q0\td0\t1", "q1\td2\t1", "q2\td0\t1"]
    assert len(test) == 1  # three tenths


def senteval(folder):
    """A small folder as senteval.tar unpacks it."""
    row = "news\tMSRpar\t2012\t4\t4.5\tA dog runs in the snow .\tA hound.\n"
    texts = {f"STS/STSBenchmark/sts-{split}.csv": row for split in ("train", "dev", "test")}
    for split in ("train", "test"):
        pairs = "".join(f"1\t{i}\t{i}\ta\tb\n" for i in range(data_sets.MRPC_DEV + 5))
        texts[f"MRPC/msr_paraphrase_{split}.txt"] = f"\ufeffQuality\t#1 ID\n{pairs}"
    texts |= {"SNLI/labels.dev": "entailment\ncontradiction\n", "SNLI/labels.train": "neutral\n"}
    texts |= {"SNLI/s1.dev": "A dog . \nA dog . \n", "SNLI/s2.dev": "An animal .\nA cat .\n"}
    texts["SNLI/s1.train"] = "Two dogs play .\n"
    for name, text in texts.items():
        path = folder / "data" / "downstream" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return folder


def test_the_folder_has_all_files_that_the_runs_need(call_main, monkeypatch, tmp_path):
    """With every download replaced by a small text."""
    asked = []

    def urlopen(url, timeout):
        asked.append(url)
        if url.endswith(".tsv"):
            return io.BytesIO("\n".join(WIKISPLIT).encode())
        return io.BytesIO(gzip.compress("\n".join([*CAPTIONS, ""]).encode()))

    def download(repository, file):
        asked.append(file)
        (tmp_path / file).write_text(json.dumps(dict(text1="Who?", text2="He did.", label=0)))
        return tmp_path / file

    monkeypatch.setattr(data_sets.urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(common, "resolve_data", lambda name: senteval(tmp_path / "tar"))
    monkeypatch.setattr(common, "download", download)
    folder = tmp_path / "data"
    printed = call_main(data_sets, folder)
    assert len(asked) == len(set(asked)) == 12
    lines = {name: (folder / name).read_text("utf-8").splitlines() for name in data_sets.MEASURED}
    assert all(f"| {name} |" in printed for name in lines)
    assert "A dog runs in the snow." not in lines["unlabeled.txt"]  # STSBenchmark has it
    assert "Two dogs play ." in lines["unlabeled.txt"]  # of SNLI, only train has it
    assert not list(folder.rglob("*.train"))
    header, row = [line.split("\t") for line in lines["glue/STS-B/dev.tsv"]]
    assert dict(zip(header, row, strict=True))["score"] == "4.5"
    assert (row[0], row[-3:]) == ("0", ["A dog runs in the snow .", "A hound.", "4.5"])
    counts = [len(lines[f"glue/MRPC/{split}.tsv"]) for split in ("train", "dev")]
    assert counts == [1 + 5, 1 + data_sets.MRPC_DEV]  # with headers
    monkeypatch.chdir(tmp_path)
    runs.write_parts(folder)
    assert Path("runs/first20k.txt").read_bytes() == (folder / "first20k.txt").read_bytes()


def test_the_recipe_makes_and_states_the_measured_files(shared_data, tmp_path, capsys):
    """Its sentences, sorted and shuffled again, are themselves; none is an evaluation file's."""
    data_sets.write(tmp_path, data_sets.from_senteval(shared_data / "senteval"))
    assert capsys.readouterr().out.count("| yes |") == 7
    files = {}
    for name in set(data_sets.MEASURED) - {f"first{n}k.txt" for n in (5, 20, 50)}:
        files[name] = (shared_data / name).read_text("utf-8").split("\n")[:-1]
    data_sets.write(tmp_path, files)
    assert " no |" not in capsys.readouterr().out
    evaluated = data_sets.evaluation_sentences(shared_data / "senteval")
    sentences = files["unlabeled.txt"]
    assert data_sets.unlabeled_sentences(sentences, [], evaluated) == sentences
    spaceless = {"".join(text.split()) for text in evaluated}
    near = ["".join(data_sets.normalized(text).split()) in spaceless for text in sentences]
    assert sum(near) == 1149  # differ in case and spaces only, as in "a man , a plan"
