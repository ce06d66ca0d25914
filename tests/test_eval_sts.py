"""eval_sts.py: the reference numbers on the real data, a user's own files, every pooling."""

import json
import os

import numpy as np
import pytest
import torch
import transformers
from conftest import DEMO, cosine, demo_lines, demo_sentences
from scipy.stats import spearmanr

import common
import eval_sts

# Measured with independent code; the first row agrees with the figures published for the model.
REFERENCE = {
    (): (72.37, 80.60, 75.59, 85.39, 78.99, 82.03, 77.15, 78.87),
    ("--student-layers", "1,3,5", "--sets", "STS-B,STS13"): (69.76, 69.46, (69.76 + 69.46) / 2),
    ("--student-layers", "1,3,5", "--split", "dev"): (76.11,),
}


@pytest.fixture
def scores_of(call_main, tmp_path):
    """scores_of(model, "--option", ...) -> the list of its scores, the last of which is printed."""

    def call(*options):
        printed = call_main(eval_sts, *options, "--json", tmp_path / "scores.json")
        (scores,) = json.loads((tmp_path / "scores.json").read_text()).values()
        scores = list(scores.values())
        assert printed.endswith(f" {scores[-1]:.2f} |\n")
        return scores

    return call


@pytest.mark.slow
@pytest.mark.parametrize("options", REFERENCE)
def test_reference_numbers(scores_of, shared_data, options):
    scores = scores_of(common.MINILM, "--senteval", shared_data / "senteval", *options)
    assert tuple(scores) == pytest.approx(REFERENCE[options], abs=0.0101)


def test_the_pooler_is_the_models_own(models_folder):
    """How the others pool is tested in test_ckd.py, test_distilface.py and test_dse.py."""
    encoder = common.load_encoder(models_folder / "bert", "pooler").eval()
    model = transformers.AutoModel.from_pretrained(models_folder / "bert").eval()
    batch = encoder.tokenizer(demo_sentences(5), padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(**batch).pooler_output.numpy()
    assert np.abs(common.encode(eval_sts.embed, encoder, demo_sentences(5)) - expected).max() < 1e-5


def test_own_pairs(scores_of, models_folder, files):
    rows = [line.split("\t") for line in demo_lines("dev.tsv", 60)]
    encoder = common.load_encoder(models_folder / "cls")
    *texts, gold = zip(*rows)
    sides = [common.encode(eval_sts.embed, encoder, side).tolist() for side in texts]
    expected = 100 * spearmanr([cosine(a, b) for a, b in zip(*sides)], list(map(float, gold)))[0]
    pairs = ("--pairs", files / "dev.tsv", "--pairs", DEMO / "test.tsv")
    first, second, average = scores_of(models_folder / "cls", *pairs)
    assert first == pytest.approx(expected, abs=1e-3)
    assert average == pytest.approx((first + second) / 2)


def test_json_is_written_through_a_link_and_a_pipe(call_main, models_folder, files, tmp_path):
    link, pipe, file = tmp_path / "link", tmp_path / "pipe", tmp_path / "scores.json"
    link.symlink_to(file)
    os.mkfifo(pipe)  # for /dev/null, which a failure would replace
    reader = os.open(pipe, os.O_RDWR)
    for path in (link, pipe):
        call_main(eval_sts, models_folder / "cls", "--pairs", files / "dev.tsv", "--json", path)
    assert json.loads(os.read(reader, 10_000)) == json.loads(file.read_text())
    assert link.is_symlink() and pipe.is_fifo()
    os.close(reader)


def test_json_is_written_to_standard_output_in_a_pipe(call_main, models_folder, files):
    """As `--json /dev/stdout | cat`: a link of /proc to a pipe, which has no path of its own."""
    reader, writer = os.pipe()
    options = ("--pairs", files / "dev.tsv", "--json", f"/proc/self/fd/{writer}")
    call_main(eval_sts, models_folder / "cls", *options)
    assert len(json.loads(os.read(reader, 10_000))) == 1


def test_options_replace_what_a_folder_states(scores_of, models_folder, files, tmp_path):
    mean, cls, pairs = models_folder / "mean", models_folder / "cls", ("--pairs", files / "dev.tsv")
    plain = scores_of(mean, *pairs)
    assert scores_of(mean, *pairs, "--pooling", "cls") == scores_of(cls, *pairs) != plain
    lines = [line.split("\t") for line in demo_lines("dev.tsv", 60)]
    prompted = tmp_path / "prompted.tsv"
    prompted.write_text("".join(f"the man {a}\tthe man {b}\t{score}\n" for a, b, score in lines))
    by_option = scores_of(mean, *pairs, "--prompt", "the man ")
    assert by_option == scores_of(mean, "--pairs", prompted) != plain
    common.save_encoder(common.load_encoder(mean, layers="0,2"), tmp_path / "cut")
    by_option = scores_of(mean, *pairs, "--student-layers", "0,2")
    assert by_option == scores_of(tmp_path / "cut", *pairs) != plain


def test_translation_accuracy_is_that_of_plain_loops(scores_of, models_folder, tmp_path):
    pairs = [(text, " ".join(text.split()[2:])) for text in demo_sentences(60)]
    pairs += [("a boy", "a girl"), ("a lad", "a girl")]  # either "a girl" is right
    (tmp_path / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    texts = list(zip(*pairs))
    encoder = common.load_encoder(models_folder / "mean")
    sides = [common.encode(eval_sts.embed, encoder, side).tolist() for side in texts]
    expected = []
    for query, answer in ((0, 1), (1, 0)):
        right = 0
        for vector, own in zip(sides[query], texts[answer]):
            cosines = [cosine(vector, other) for other in sides[answer]]
            right += texts[answer][cosines.index(max(cosines))] == own
        assert 0 < right < len(pairs)
        expected.append(pytest.approx(100 * right / len(pairs)))
    assert scores_of(models_folder / "mean", "--translations", tmp_path / "pairs.tsv") == expected
