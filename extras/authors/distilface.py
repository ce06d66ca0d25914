# SPDX-License-Identifier: MIT
"""DistilFACE: the notebook of the final model, against distilface.py.

The notebook's cells run as they are, up to the 20,000 steps of its first training, which are STEPS
here. Its constants are set after the cell that has them; the names of the model and of the text
file are found in the working folder. SentEval is replaced by the demo's dev set, embedded by the
notebook's own function.

Dropout is the method, so both programs drop the same values: see Masks. The student is a DistilBERT
with weights of all-MiniLM-L6-v2, as distilface.py refuses fewer layers than avg_last4 averages.
"""

import json
import math
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

from extras.authors.dse import adapt
from extras.authors.harness import (
    WIDTH,
    Program,
    TheirAdam,
    demo_lines,
    run_ours,
    size,
    write_small_encoder,
)

REPOSITORY = "kennethlimjf/contrastive-learning-in-distilled-models"
COMMIT = "764914fc2dda11db5bf6ef42e8d1800101892ef3"
LIBRARIES = "torch==2.13.0 numpy<2 transformers==4.17.0 tokenizers==0.13.3 huggingface_hub<0.26"
LIBRARIES += " datasets<4 pyarrow<20 pandas scipy"

NOTEBOOK = "notebooks/training/cl-distilbert_tuning_v1_ms_runall.ipynb"
LAYERS = "0,1,3,5"
SENTENCES = size(436, 9_988)  # 13 batches of 32 and a rest of 20, three times
EPOCHS = size(3, 1)
BATCH = 32
STEPS = EPOCHS * math.ceil(SENTENCES / BATCH)
LR = 2e-5
MAX_LENGTH = size(16, 32)  # in tokens; of demo/, about half of the sentences are cut
# Parts of the names of BERT's weights, in the order of replacement, and DistilBERT's.
NAMES = {
    "encoder.": "transformer.",
    "self.query": "q_lin",
    "self.key": "k_lin",
    "self.value": "v_lin",
    "attention.output.dense": "attention.out_lin",
    "attention.output.LayerNorm": "sa_layer_norm",
    "intermediate.dense": "ffn.lin1",
    "output.dense": "ffn.lin2",
    "output.LayerNorm": "output_layer_norm",
}


class Masks:
    """Dropout in both programs: a mask depends on step, layer, sentence, view and position alone.

    Replaces torch.nn.functional.dropout. Theirs embeds the two views of a batch's sentence i as
    rows 2 i and 2 i + 1, ours in parts of similar length; `rows`: those of this forward pass.
    """

    def __init__(self):
        self.step = 0
        self.begin_part(slice(None))  # for the pass in which distilface.py looks for dropout

    def begin_part(self, rows):
        self.rows, self.layer = rows, 0

    def __call__(self, states, p=0.5, training=True, inplace=False):
        """states [n, L, H], or attention [n, heads, L, L]."""
        if not training:
            return states
        seed = 100 * self.step + self.layer
        self.layer += 1
        is_attention = states.ndim == 4
        last = MAX_LENGTH if is_attention else states.shape[-1]
        shape = [2 * BATCH, *states.shape[1:-2], MAX_LENGTH, last]
        kept = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) >= p
        kept = kept[self.rows][tuple(slice(size) for size in states.shape)]
        return states * kept / (1 - p)


def prepare(work):
    """Write the sentences, their order, the dev set, and the student with the notebook's name."""
    import transformers

    for folder in ("data/training", "logs"):
        (work / folder).mkdir(parents=True, exist_ok=True)
    sentences = demo_lines("sentences.txt", SENTENCES)
    dev = demo_lines("dev.tsv", size(100, None))
    for file, lines in (("data/training/wiki1m_for_simcse.txt", sentences), ("dev.tsv", dev)):
        (work / file).write_text("".join(line + "\n" for line in lines), "utf-8")
    torch.manual_seed(0)
    torch.save([torch.randperm(SENTENCES).tolist() for _ in range(EPOCHS)], work / "orders.pt")

    folder = work / "distilbert-base-uncased"
    write_small_encoder(folder, LAYERS, sentences + dev)
    bert = transformers.AutoModel.from_pretrained(folder)
    weights = bert.state_dict()
    types = weights.pop("embeddings.token_type_embeddings.weight")
    weights["embeddings.word_embeddings.weight"] += types[0]  # DistilBERT has no types
    for old, new in NAMES.items():
        weights = {name.replace(old, new): value for name, value in weights.items()}
    weights = {name: value for name, value in weights.items() if "pooler" not in name}
    sizes = dict(
        dim=WIDTH, hidden_dim=4 * WIDTH, n_heads=size(4, 12), n_layers=len(LAYERS.split(","))
    )
    config = transformers.DistilBertConfig(vocab_size=bert.config.vocab_size, **sizes)
    student = transformers.DistilBertModel(config)
    student.load_state_dict(weights)
    student.save_pretrained(folder)
    weights = {f"distilbert.{name}": value for name, value in weights.items()}
    torch.save(weights, folder / "pytorch_model.bin")
    tokenizer = dict(tokenizer_class="DistilBertTokenizer", do_lower_case=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))


def theirs(checkout, work):
    losses = adapt(checkout / "src", work)
    import transformers
    from scipy.stats import spearmanr

    masks, scores = Masks(), []
    torch.nn.functional.dropout = masks
    settings = dict(batch_size=BATCH, learning_rate=LR, max_len=MAX_LENGTH)
    steps = dict(max_steps=STEPS, save_steps=STEPS)
    arguments = transformers.TrainingArguments
    transformers.TrainingArguments = lambda **options: arguments(**{**options, **steps})
    pairs = [line.split("\t") for line in (work / "dev.tsv").read_text("utf-8").splitlines()]

    def evaluate(parameters, batcher, prepare):
        first, second, gold = zip(*pairs)
        u, v = [batcher(parameters, [text.split() for text in texts]) for texts in (first, second)]
        cosine = torch.cosine_similarity(u, v)
        scores.append(100 * float(spearmanr(cosine, [float(score) for score in gold]).statistic))
        return mock.MagicMock()  # has all that the notebook prints

    sys.modules["senteval"] = SimpleNamespace(engine=SimpleNamespace(SE=evaluate))

    def begin_step(*_):
        masks.step += 1
        masks.begin_part(slice(None))

    names = {}
    for cell in json.loads((checkout / NOTEBOOK).read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or "%cd" in source:  # the cell that enters a folder
            continue
        if "trainer.train()" in source:
            names["model"].distilbert.register_forward_pre_hook(begin_step)
        exec(source, names)
        names.update(settings)
        if scores:
            break
    weights = {
        f"model.{name}": value for name, value in names["model"].distilbert.named_parameters()
    }
    return dict(losses=losses, weights=weights, dev=scores[0])


def ours(work, undone):
    import common

    orders = torch.load(work / "orders.pt")
    masks = Masks()

    def draw(batches, epoch):
        return [rows.numpy() for rows in torch.tensor(orders[epoch]).split(BATCH)]

    def embed_texts(embed, student, texts, max_length):
        if not torch.is_grad_enabled():  # distilface.py looks for dropout
            return common.embed_texts(embed, student, texts, max_length)
        masks.step += 1
        student.model.set_attn_implementation("eager")  # others have their own dropout
        size = len(texts) // 2
        lengths = np.array([len(ids) for ids in common.tokenize(student, texts, max_length)])
        parts = iter(common.similar_lengths(lengths, "cpu", WIDTH))

        def embed_part(*inputs):
            part = torch.tensor(next(parts))  # of 0 to 2 size - 1, first all of the one view
            masks.begin_part(2 * (part % size) + part // size)
            return embed(*inputs)

        return common.embed_texts(embed_part, student, texts, max_length)

    replaced = {"common.Batches.draw": draw, "distilface.embed_texts": embed_texts}
    replaced["torch.nn.functional.dropout"] = masks
    if "epsilon" in undone:
        replaced["torch.optim.Adam"] = TheirAdam
    options = ["--student", work / "distilbert-base-uncased", "--dev", work / "dev.tsv"]
    options += ["--train", work / "data/training/wiki1m_for_simcse.txt"]
    options += ["--max-length", MAX_LENGTH, "--batch-size", BATCH, "--lr", LR, "--steps", STEPS]
    return run_ours("distilface", work, options, replaced, "load_student")


EPSILON = "AdamW of transformers adds it before the correction of the bias; after it"
PROGRAMS = {
    "distilface": Program(NOTEBOOK, prepare, theirs, ours, {"epsilon": EPSILON}),
}
