"""demo.py: the sentences are many, their similarity is what it is said to be, and a real encoder sees it where a cut one does not."""
import csv
import subprocess
import sys

import common
import demo


def test_sentences_are_many_distinct_and_kept_apart_from_the_pairs():
    sentences = demo.sentences()
    assert len(sentences) == len(set(sentences)) >= 20_000
    scored = {text for sets in (demo.dev(), demo.test()) for pairs in sets.values() for text in pairs.first + pairs.second}
    assert not scored & set(sentences) and demo.sentences(5) == sentences[:5]


def test_similarity_by_construction():
    first = dict(who="a boy|a young lad", action="plays|is performing on", thing="guitar", where="in the kitchen|next to the stove", how="alone|without company")
    assert set(demo.WEIGHTS) == set(first) and abs(sum(demo.WEIGHTS.values()) - 1) < 1e-12
    assert demo.similarity(first, first) == 5
    girl = first | {"who": demo.WHO["child"][1]}  # of the same group: half of the slot's weight goes
    assert abs(demo.similarity(first, girl) - 5 * (1 - 0.25 / 2)) < 1e-12 and demo.similarity(first, girl) == demo.similarity(girl, first)
    soldier = first | {"who": demo.WHO["uniform"][0]}
    assert abs(demo.similarity(first, soldier) - 5 * (1 - 0.25)) < 1e-12
    for pairs in (demo.dev()["demo dev"], demo.test()["demo test"]):
        assert min(pairs.scores) < 0.5 and max(pairs.scores) == 5 and len(set(pairs.scores)) > 20


def test_triplets_say_the_same_and_something_else():
    for anchor, positive, negative in demo.triplets(50):
        assert anchor != positive and len({anchor, positive, negative}) == 3


def test_all_minilm_agrees_and_its_untrained_layers_far_less(teacher):
    whole = common.spearman(teacher, demo.test())["demo test"]
    cut = common.spearman(common.load_encoder(common.MINILM, layers="1,3,5"), demo.test())["demo test"]
    assert whole >= 75 and cut < whole - 10, (whole, cut)


def test_the_files_are_what_the_readers_read(tmp_path):
    subprocess.run([sys.executable, demo.__file__, tmp_path / "data"], check=True, capture_output=True)
    assert common.read_sentences(tmp_path / "data" / "sentences.txt") == demo.sentences()
    assert common.read_graded_pairs(tmp_path / "data" / "test.tsv") == demo.test()["demo test"]
    assert common.read_triplets(tmp_path / "data" / "triplets.csv") == demo.triplets()
    assert [pair for _, pair in common.read_columns(tmp_path / "data" / "pairs.tsv", ("first", "second"))] == [row[:2] for row in demo.triplets()]
    assert next(csv.reader(open(tmp_path / "data" / "triplets.csv"))) == ["sent0", "sent1", "hard_neg"]
