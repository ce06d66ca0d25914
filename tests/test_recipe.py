"""results/data_sets.py: what it makes of small texts in the formats of its sources.

And, from the files of ../shared/data, the files themselves. Nothing is downloaded.
"""

import sys

from conftest import ROOT

sys.path.insert(0, str(ROOT / "results"))
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
    files = data_sets.from_senteval(shared_data / "senteval")
    data_sets.write(tmp_path, files)
    assert capsys.readouterr().out.count("| yes |") == 3
    names = [line.split()[1] for line in data_sets.SUMS.read_text("utf-8").splitlines()]
    for name in set(names) - set(files):
        files[name] = (shared_data / name).read_text("utf-8").split("\n")[:-1]
    data_sets.write(tmp_path, files)
    assert " no |" not in capsys.readouterr().out
    evaluated = data_sets.evaluation_sentences(shared_data / "senteval")
    sentences = files["unlabeled.txt"]
    assert data_sets.unlabeled_sentences(sentences, [], evaluated) == sentences
    spaceless = {"".join(text.split()) for text in evaluated}
    near = ["".join(data_sets.normalized(text).split()) in spaceless for text in sentences]
    assert sum(near) == 1149  # differ in case and spaces only, as in "a man , a plan"


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
