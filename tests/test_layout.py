"""The rule of the house: a script stands on common.py alone, and its upper part on torch alone."""

import re
import shutil
import subprocess
import sys

import pytest
from conftest import DEMO, ROOT, cosine, demo_lines, dev_scores
from processes import SCRIPTS, finish, small_options, start
from scipy.stats import spearmanr

OTHERS = {"eval_sts": {"distilface", "dse"}}  # inside functions, for the folders that these save


def test_a_script_imports_common_alone():
    at_the_top = {path.stem for path in ROOT.glob("*.py")}
    assert at_the_top == {*SCRIPTS, "common", "eval_sts"}
    for script in at_the_top:
        text = (ROOT / f"{script}.py").read_text("utf-8")
        found = re.findall(r"^( *)(?:import|from) (\w+)", text, re.M)
        own = {(name, bool(indent)) for indent, name in found if name in {*at_the_top, "extras"}}
        expected = {("common", False)} if script != "common" else set()
        assert own == expected | {(name, True) for name in OTHERS.get(script, ())}, script


def test_losses_and_model_need_torch_alone(tmp_path):
    """The parts above the ruler "Training" run in an empty folder without the other packages."""
    for script in SCRIPTS:
        source = (ROOT / f"{script}.py").read_text("utf-8")
        upper, _, _ = source.partition("\n# ---- Training")
        assert upper != source
        (tmp_path / f"{script}.py").write_text(upper, "utf-8")
    blocked = dict.fromkeys(("common", "transformers", "numpy", "scipy", "tqdm"))
    code = f"import sys\nsys.modules.update({blocked})\nimport {', '.join(SCRIPTS)}"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


SCORE = """
import sys
sys.modules.update(dict.fromkeys(("transformers", "huggingface_hub", "safetensors", "tokenizers")))
import torch, upper

class Tokenizer:
    pad_token_id = 0
    def __call__(self, texts, truncation, max_length):
        self.input_ids = [[ord(character) % 128 for character in text] for text in texts]
        return self

class Letters(torch.nn.Module):  # an encoder that embeds a text as the counts of its letters
    name, prompt, unused, max_length, tokenizer = "letters", "", "", 100, Tokenizer()
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding.from_pretrained(torch.eye(128))
        self.model = torch.nn.Module()
        self.model.config = type("Config", (), dict(hidden_size=128))

def embed(encoder, ids, mask):
    return (encoder.table(ids) * mask.unsqueeze(-1)).sum(dim=1)

pairs = upper.read_scored_pairs(sys.argv[1])
print(upper.spearman(embed, Letters(), pairs))
"""


def test_the_part_above_the_ruler_scores_without_transformers(tmp_path):
    """Spearman's correlation of common letters, against scipy's on counts of letters."""
    source = (ROOT / "common.py").read_text("utf-8")
    upper, _, lower = source.partition("\n# ====")
    assert "def spearman" in upper and "def load_encoder" in lower
    assert upper.count("\n") < 366
    (tmp_path / "upper.py").write_text(upper, "utf-8")
    (tmp_path / "score.py").write_text(SCORE, "utf-8")
    command = [sys.executable, "score.py", DEMO / "dev.tsv"]
    found = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    cosines, gold = [], []
    for line in demo_lines("dev.tsv"):
        *texts, score = line.split("\t")
        letters = sorted(set("".join(texts)))
        cosines.append(cosine(*[[text.count(letter) for letter in letters] for text in texts]))
        gold.append(float(score))
    # Equal cosines are rounded differently here and there, which exchanges their ranks.
    assert float(found.stdout) == pytest.approx(100 * spearmanr(cosines, gold).statistic, abs=0.5)


def test_the_shared_file_and_what_a_script_takes_from_it_stop_growing():
    """CONTRIBUTING.md: what is outside the common cases is refused or checked, not supported."""
    source = (ROOT / "common.py").read_text("utf-8")
    assert len(re.findall(r"^(?:def|class) ", source, re.M)) <= 51
    for script in SCRIPTS:
        text = (ROOT / f"{script}.py").read_text("utf-8")
        lines = re.findall(r"^from common import (.*)$", text, re.M)
        names = [name for line in lines for name in line.split(", ")]
        assert 10 < len(names) <= NAMES.get(script, 20), (script, names)


NAMES = dict(dse=27)  # which loads two kinds of models, and has data and scores of its own


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_copied_with_common_alone_trains_two_steps(script, models_folder, files, tmp_path):
    """In an empty folder, from which nothing of the project can be imported."""
    for file in (f"{script}.py", "common.py"):
        shutil.copy(ROOT / file, tmp_path)
    (tmp_path / "main.py").write_text(
        f"import os, runpy, sys\nos.chdir({str(tmp_path)!r})\nsys.path[:] = "
        f"[{str(tmp_path)!r}] + [p for p in sys.path if p not in ({str(ROOT)!r}, '')]\n"
        f"runpy.run_path({script + '.py'!r}, run_name='__main__')\n"
    )
    words = [*small_options(script, models_folder, files, "out"), "--max-steps", 2]
    main, log, cache = tmp_path / "main.py", tmp_path / "log", tmp_path / "cache"
    finish(start(str(main), words, log, XDG_CACHE_HOME=str(cache)), log)
    stages = {stage for stage, step in dev_scores(tmp_path / "out") if step == 2}
    assert len(stages) == (2 if script in ("ckd", "ibkd", "dse") else 1)
