"""Score sentence encoders on semantic textual similarity (STS): Spearman x 100 of the cosine.

By default: the seven STS test sets of SentEval and their average, in SimCSE's "all" setting, where
the subsets of a year are concatenated before one correlation is computed. A model is a folder or a
name on the Hugging Face Hub, pooled as its folder states, unless --pooling replaces that.

  python eval_sts.py runs/ckd sentence-transformers/all-MiniLM-L6-v2
  python eval_sts.py runs/ckd --split dev             STS-B dev, which chooses the students
  python eval_sts.py runs/ckd --pairs demo/test.tsv   your own scored pairs
  python eval_sts.py runs/distilface --sets STS12,STS13,STS14,STS15,STS-B   DistilFACE's Table 2
  python eval_sts.py runs/congen --translations en-de.tsv
  python eval_sts.py TEACHER runs/ckd --agreement my-texts.txt   how alike; no scores needed
"""

import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr

from common import POOLINGS, ArgumentParser, UserError, one_line_errors, run_main, table
from common import read_scored_pairs, read_sentences, read_sts, read_text_pairs, resolve_data
from common import encode, load_encoder, resolve_model, spearman
from common import read_json, write_json

SAMPLE = 2000  # texts of --agreement, at most
NEAREST = 10


def embed(encoder, input_ids, attention_mask):
    """Token ids and mask, [N, L] each -> embeddings [N, D] in float32, as ckd.embed() does."""
    states = encoder.model(input_ids, attention_mask=attention_mask).last_hidden_state  # [N, L, H]
    if encoder.pooling == "cls":
        pooled = states[:, 0]
    elif encoder.pooling == "lasttoken":
        positions = torch.arange(states.shape[1], device=states.device)  # [L]
        last = (positions * attention_mask).argmax(dim=1)  # [N], the last token that is not padding
        pooled = states[torch.arange(states.shape[0], device=states.device), last]
    else:
        mask = attention_mask.unsqueeze(-1)  # [N, L, 1]
        pooled = (states * mask).sum(dim=1) / mask.sum(dim=1)
    embedding = encoder.heads(pooled).float()  # [N, D]
    return F.normalize(embedding, dim=-1) if encoder.normalize else embedding


def load(name, pooling=None, layers=None):
    """-> encoder, embed(). A student that pools several layers is loaded by its own script."""
    entries = read_json(resolve_model(name) / "modules.json", [])
    form = "modules.json must be as this project or sentence-transformers writes it"
    with one_line_errors(name, form):
        module = entries[1] if len(entries) > 1 and not pooling else {}  # after the transformer
        script = module.get("script")
    if layers and script:
        raise UserError(f"{name}: it pools several layers and cannot be cut; choose a --pooling")
    if script == "distilface":
        import distilface

        return distilface.load_student(name, module["pooling"]), distilface.embed
    if script == "dse":
        import dse

        return dse.load_student(name), dse.embed
    return load_encoder(name, pooling, layers), embed


def translation_accuracy(embed, encoder, pairs):
    """Percentage of texts whose nearest neighbor by cosine is their own translation.

    pairs: n of [text, translation]. Returns {"1 -> 2": 0 to 100, "2 -> 1": 0 to 100}. Where a
    translation occurs in several pairs, any of them is right.
    """
    texts = [np.array(side, dtype=object) for side in zip(*pairs)]
    arrays = [encode(embed, encoder, side.tolist()) for side in texts]
    vectors = [F.normalize(torch.from_numpy(array)) for array in arrays]
    accuracy = {}
    for query, answer in ((0, 1), (1, 0)):
        parts = vectors[query].split(1000)  # a matrix [n, n] may be too large
        nearest = torch.cat([(part @ vectors[answer].T).argmax(dim=1) for part in parts])
        found = texts[answer][nearest.numpy()] == texts[answer]
        accuracy[f"{query + 1} -> {answer + 1}"] = 100 * float(found.mean())
    return accuracy


def cosines(embed, encoder, texts):
    """n texts -> the cosines of all pairs [n, n]."""
    vectors = F.normalize(torch.from_numpy(encode(embed, encoder, texts)))
    return vectors @ vectors.T


def agreement(student, teacher):
    """How well two models agree on n texts; both: their cosines of all pairs [n, n], n > 10.

    Returns {"Spearman": -100 to 100, over all pairs; "ten nearest": 0 to 100, the percentage of a
    text's ten nearest others by the teacher that are among its ten nearest by the student}.
    """
    first, second = torch.triu_indices(*student.shape, offset=1)
    correlation = spearmanr(student[first, second], teacher[first, second]).statistic
    itself = torch.eye(len(student), dtype=torch.bool)
    found, right = [
        matrix.masked_fill(itself, -torch.inf).topk(NEAREST).indices
        for matrix in (student, teacher)
    ]
    shared = (found.unsqueeze(2) == right.unsqueeze(1)).any(dim=2)  # [n, 10]
    return {"Spearman": 100 * float(correlation), "ten nearest": 100 * float(shared.float().mean())}


def sample_texts(args):
    """The texts of --agreement, at most SAMPLE of them. Raises UserError."""
    texts = read_sentences(args.agreement)
    if len(texts) <= NEAREST or len(args.models) < 2:
        needs = f"a teacher, then students, and more than {NEAREST} texts"
        raise UserError(f"--agreement {args.agreement}: needs {needs}")
    return random.Random(0).sample(texts, min(SAMPLE, len(texts)))


def read_data(args):
    """The scored pairs that the options name -> {name: pairs}; translations. Raises UserError."""
    if args.translations:
        return read_text_pairs(args.translations)
    if args.pairs:
        return {file: read_scored_pairs(file) for file in args.pairs}
    sets = read_sts(resolve_data(args.senteval), args.split)
    with one_line_errors("--sets", f"choose from {','.join(sets)}"):
        return {name: sets[name] for name in args.sets or sets}


def parse_args():
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    is_default = "(default: %(default)s)"
    add("models", nargs="+", metavar="MODEL", help="folder or Hub name")
    add("--senteval", default="senteval.tar", help=f"its folder or tar file {is_default}")
    add_one = parser.add_mutually_exclusive_group().add_argument
    add_one("--split", choices=("test", "dev"), default="test", help=f"dev: STS-B's {is_default}")
    add_one("--sets", type=lambda text: text.split(","), help="of the test sets, as in STS12,STS-B")
    add_one("--pairs", action="append", metavar="FILE", help="scored pairs (TSV); repeat for more")
    add_one("--translations", metavar="FILE", help="TSV: accuracy of nearest neighbors, both ways")
    add_one("--agreement", metavar="FILE", help="texts: each MODEL's agreement with the first one")
    add("--pooling", choices=POOLINGS, help="of all models (default: as a folder states, or mean)")
    add("--student-layers", help="keep only these layers of each model, as in 1,3,5")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=sorted({"cpu", device}), default=device, help=is_default)
    add("--json", metavar="FILE", help="write the scores as JSON")
    return parser.parse_args()


def main():
    args = parse_args()
    data = sample_texts(args) if args.agreement else read_data(args)
    score = translation_accuracy if args.translations else spearman
    score = cosines if args.agreement else score
    rows = {}
    for name in args.models:
        encoder, embed_with = load(name, args.pooling, args.student_layers)
        encoder.to(args.device)
        rows[name] = score(embed_with, encoder, data)
    if args.agreement:
        teacher = rows[args.models[0]]
        rows = {name: agreement(rows[name], teacher) for name in args.models[1:]}
    print(table(rows))
    if args.json:
        write_json(Path(args.json), rows)


if __name__ == "__main__":
    run_main(main)
