"""The scripts of results/: the recipe of the data, and what no command of the project measures.

data_sets.py is given small texts in the formats of its sources and, from ../shared/data, the files
themselves. Nothing is downloaded.
"""

import csv
import json
import shutil
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, demo_sentences

import ckd
import common
from extras import quantize

sys.path.insert(0, str(ROOT / "results"))
import onnx_scores
import two_teachers

import data_sets

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


def test_the_recipe_makes_and_states_the_measured_files(shared_data, tmp_path, capsys):
    """Its sentences, sorted and shuffled again, are themselves; none is an evaluation file's."""
    data_sets.write(tmp_path, data_sets.from_senteval(shared_data / "senteval"))
    assert capsys.readouterr().out.count("| yes |") == 7
    files = {}
    for name in set(data_sets.MEASURED) - {f"first{n}k.txt" for n in (5, 20, 50)}:
        if name.startswith("glue/"):  # JSON lines, which shared/data has as GLUE's tables
            continue
        files[name] = (shared_data / name).read_text("utf-8").split("\n")[:-1]
    data_sets.write(tmp_path, files)
    assert " no |" not in capsys.readouterr().out
    evaluated = data_sets.evaluation_sentences(shared_data / "senteval")
    sentences = files["unlabeled.txt"]
    assert data_sets.unlabeled_sentences(sentences, [], evaluated) == sentences
    spaceless = {"".join(text.split()) for text in evaluated}
    near = ["".join(data_sets.normalized(text).split()) in spaceless for text in sentences]
    assert sum(near) == 1149  # differ in case and spaces only, as in "a man , a plan"


GLUE = {  # the names of a task's sets and columns in GLUE's tables
    "mrpc": ("MRPC", "#1 String", "#2 String", "Quality"),
    "stsb": ("STS-B", "sentence1", "sentence2", "score"),
}


@pytest.mark.parametrize("task", GLUE)
def test_the_json_lines_of_a_task_have_the_pairs_of_glues_tables(shared_data, task):
    written = data_sets.from_senteval(shared_data / "senteval")
    folder, *columns = GLUE[task]
    for split, name in dict(train="train", validation="dev", test="test").items():
        rows = [json.loads(line) for line in written[f"glue/{task}/{split}.jsonl"]]
        with open(
            shared_data / f"glue/{folder}/{name}.tsv", encoding="utf-8", newline="\n"
        ) as file:
            table = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
        assert len(table) > 400
        for row, cells in zip(rows, table, strict=True):
            first, second, label = [cells[column].strip() for column in columns]
            assert (row["text1"], row["text2"], row["label"]) == (first, second, float(label))


def test_xquad_becomes_a_folder_of_sentences():
    """By hand: the second question's answer begins in the second sentence; "Yes." occurs twice."""
    first = dict(
        sentences=["Yes.", "It  is red."],
        sentence_breaks=[[0, 5], [5, 15]],
        qas=[
            dict(id="a", question="Is it?", answers=[dict(answer_start=0)]),
            dict(id="b", question="Which colour?", answers=[dict(answer_start=12)]),
        ],
    )
    second = dict(
        sentences=["No.", "Yes."],
        sentence_breaks=[[0, 4], [4, 8]],
        qas=[dict(id="c", question="Über?", answers=[dict(answer_start=4)])],
    )
    files = data_sets.xquad([dict(paragraphs=[first]), dict(paragraphs=[second])])
    texts = ["Yes.", "It is red.", "No."]
    corpus = [f'{{"_id": "p{i}", "title": "", "text": "{text}"}}' for i, text in enumerate(texts)]
    assert files["corpus.jsonl"] == corpus
    assert files["queries.jsonl"][2] == '{"_id": "c", "text": "Über?"}'
    assert files["qrels/test.tsv"] == [
        "query-id\tcorpus-id\tscore",
        "a\tp0\t1",
        "b\tp1\t1",
        "c\tp0\t1",
    ]


def test_german_sentences_are_drawn_from_both_sources_and_are_no_evaluation_sentences():
    captions, others = ["Ein Hund .", "Eine Katze.", "Drei."], ["Ja.", "Nein.", "Ja."]
    found = data_sets.mixed((captions, others), (3, 1), {data_sets.normalized("ein hund.")})
    assert {"Eine Katze.", "Drei."} < set(found) and len(found) == 3
    assert set(found) & {"Ja.", "Nein."}
    assert data_sets.scored_pairs(['"A  b, c",d,5.0']) == ["A b, c\td\t5.0"]
    assert data_sets.news(["A\u00a0b"], ["c"]) == ["A b\tc"]


def test_two_teachers(models_folder, monkeypatch):
    """The targets are the weighted mean of both teachers' embeddings."""
    texts = demo_sentences(5)
    first, second = [common.load_encoder(models_folder / name) for name in ("mean", "cls")]
    monkeypatch.setattr(two_teachers, "SECOND", models_folder / "cls", raising=False)
    monkeypatch.setattr(two_teachers, "WEIGHT", 0.3, raising=False)
    found = two_teachers.embeddings_of_two(ckd.embed, first, texts)
    parts = [common.encode(ckd.embed, encoder, texts) for encoder in (first, second)]
    assert np.allclose(found, 0.7 * parts[0] + 0.3 * parts[1], atol=1e-6)


@pytest.mark.slow
def test_onnx_scores(models_folder, call_main, monkeypatch, tmp_path):
    """The embeddings are those of the file, not of the folder's weights."""
    pytest.importorskip("onnxscript")
    folder = tmp_path / "model"
    shutil.copytree(models_folder / "mean", folder)
    call_main(quantize, folder, "--bits", 32)
    monkeypatch.setattr(onnx_scores, "FILE", "model.onnx", raising=False)
    encoder = onnx_scores.load_file(folder)
    expected = common.encode(ckd.embed, encoder, demo_sentences(4))
    for value in encoder.model.parameters():
        torch.nn.init.zeros_(value.data)
    found = common.encode(onnx_scores.embed, encoder, demo_sentences(4))
    assert np.allclose(found, expected, atol=1e-5)
