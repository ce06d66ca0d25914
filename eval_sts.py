"""Score sentence encoders on semantic textual similarity (STS): Spearman x 100 of the cosine.

By default: the seven STS test sets of SentEval and their average, in SimCSE's "all" setting, where
the subsets of a year are concatenated before one correlation is computed. A model is a folder or a
name on the Hugging Face Hub, pooled as its folder states, unless --pooling replaces that.

  python eval_sts.py runs/ckd sentence-transformers/all-MiniLM-L6-v2
  python eval_sts.py runs/ckd --split dev             STS-B dev, which chooses the students
  python eval_sts.py runs/ckd --pairs demo/test.tsv   your own scored pairs
  python eval_sts.py runs/distilface --sets STS12,STS13,STS14,STS15,STS-B   DistilFACE's Table 2
"""

from pathlib import Path

import torch
import torch.nn.functional as F

from common import POOLINGS, ArgumentParser, UserError, one_line_errors, run_main, table
from common import load_encoder, read_scored_pairs, read_sts, resolve_data, resolve_model, spearman
from common import read_json, write_json


def embed(encoder, input_ids, attention_mask):
    """Token ids and mask, [N, L] each, padded on the right -> embeddings [N, D] in float32."""
    states = encoder.model(input_ids, attention_mask=attention_mask).last_hidden_state  # [N, L, H]
    if encoder.pooling == "cls":
        pooled = states[:, 0]
    elif encoder.pooling == "lasttoken":
        last = attention_mask.sum(dim=1) - 1  # [N], since padding is on the right
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


def read_data(args):
    """The scored pairs that the options name -> {name: pairs}. Raises UserError."""
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
    add("--pooling", choices=POOLINGS, help="of all models (default: as a folder states, or mean)")
    add("--student-layers", help="keep only these layers of each model, as in 1,3,5")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=sorted({"cpu", device}), default=device, help=is_default)
    add("--json", metavar="FILE", help="write the scores as JSON")
    return parser.parse_args()


def main():
    args = parse_args()
    sets = read_data(args)
    rows = {}
    for name in args.models:
        encoder, embed_with = load(name, args.pooling, args.student_layers)
        rows[name] = spearman(embed_with, encoder.to(args.device), sets)
    print(table(rows))
    if args.json:
        write_json(Path(args.json), rows)


if __name__ == "__main__":
    run_main(main)
