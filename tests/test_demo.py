"""support/demo.py: many sentences, similarity by construction, which a good encoder sees."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

import common
from support import demo
from support.encoder import load_encoder

ROOT = Path(demo.__file__).parent.parent
DIGEST = "99b8af5e98c6924ede9eb8871ad3c2c7a7ff244ca538951b4576b65064e51322"
MEANING = dict(
    who="a boy|a young lad",
    action="plays|is performing on",
    thing="guitar",
    where="in the kitchen|next to the stove",
    how="alone|without company",
)


def test_sentences_are_many_distinct_and_kept_apart_from_the_pairs():
    sentences = demo.sentences()
    scored = set()
    for pairs in (*demo.dev().values(), *demo.test().values()):
        scored.update(pairs.first + pairs.second)
    assert len(sentences) == len(set(sentences)) >= 20_000
    assert not scored & set(sentences)
    assert demo.sentences(5) == sentences[:5]


def test_the_data_stay_those_that_the_measured_scores_rest_on():
    """After a change of the slots on purpose, all --demo scores have to be measured again."""
    rows = [*zip(*demo.dev()["demo dev"]), *zip(*demo.test()["demo test"]), *demo.triplets()]
    text = "\n".join([*demo.sentences(), *map(str, map(list, rows))])
    assert hashlib.sha256(text.encode()).hexdigest() == DIGEST


def test_similarity_by_construction():
    assert set(demo.WEIGHTS) == set(MEANING)
    assert sum(demo.WEIGHTS.values()) == pytest.approx(1)
    assert demo.similarity(MEANING, MEANING) == 5


def test_a_concept_of_the_same_group_costs_half_the_weight_of_its_slot():
    girl = MEANING | {"who": demo.WHO["child"][1]}
    assert demo.similarity(MEANING, girl) == pytest.approx(5 * (1 - 0.25 / 2))
    assert demo.similarity(girl, MEANING) == demo.similarity(MEANING, girl)


def test_a_concept_of_another_group_costs_all_of_it():
    soldier = MEANING | {"who": demo.WHO["uniform"][0]}
    assert demo.similarity(MEANING, soldier) == pytest.approx(5 * (1 - 0.25))


@pytest.mark.parametrize("sets", [demo.dev, demo.test])
def test_scores_cover_the_range(sets):
    (pairs,) = sets().values()
    assert min(pairs.scores) < 0.5
    assert max(pairs.scores) == 5
    assert len(set(pairs.scores)) > 20


def test_triplets_are_three_different_sentences():
    for triplet in demo.triplets(50):
        assert len(set(triplet)) == 3


@pytest.mark.slow
def test_the_teacher_agrees_and_a_student_initialized_from_its_layers_far_less(teacher):
    cut = load_encoder(common.MINILM, layers="1,3,5")
    whole = common.spearman(teacher, demo.test())["demo test"]
    assert whole >= 75
    assert common.spearman(cut, demo.test())["demo test"] < whole - 10


def test_the_files_are_what_the_readers_read(tmp_path):
    folder = tmp_path / "data"
    command = [sys.executable, "-m", "support.demo", folder]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    triplets = demo.triplets()
    anchors, positives, _ = map(list, zip(*triplets))
    assert common.read_sentences(folder / "sentences.txt") == demo.sentences()
    assert common.read_scored_pairs(folder / "dev.tsv") == demo.dev()["demo dev"]
    assert common.read_scored_pairs(folder / "test.tsv") == demo.test()["demo test"]
    assert common.read_triplets(folder / "triplets.csv") == triplets
    assert common.read_pairs(folder / "pairs.tsv") == (anchors, positives)
