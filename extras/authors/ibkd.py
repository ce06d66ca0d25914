# SPDX-License-Identifier: MIT
"""IBKD: Alibaba-NLP/IBKD's train_unsup.py and train_sup.py, and the two stages of ibkd.py.

The set-up, which both runs share: layers of all-MiniLM-L6-v2, a third as wide, rows drawn in our
order, the start of the new linear layer, no dropout, and gamma 0.1, a constant in train_sup.py. As
published, stage 1 calls a function that only the file of stage 2 defines, with this gamma. What
stage 1 defines under another name computes the same, with the gamma that is given.
"""

import csv
import importlib
import os
import runpy
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from torch import nn

from extras.authors.harness import WIDTH, Program, StandIn, TheirAdam, demo_lines, our_order, size
from extras.authors.harness import renamed, run_ours, write_encoder, write_lines
from extras.authors.harness import write_small_encoder

REPOSITORY = "Alibaba-NLP/IBKD"
COMMIT = "bb1d7b88f356a20fc2d6a88ba3317d6c82d6bd19"
LIBRARIES = (
    "torch==2.13.0 numpy==1.26.4 transformers==4.28.1 huggingface-hub==0.25.2 "
    "datasets==2.14.7 pyarrow==19.0.1 pandas==2.2.3 safetensors scipy"
)

SENTENCES, BATCH_1 = size(470, 20_000), size(32, 64)  # stage 1: 15 steps an epoch, the last of 22
TRIPLETS, BATCH_2 = size(160, 3256), size(12, 64)  # stage 2: 14 steps an epoch, the last of 12
EPOCHS = size(3, 1)
LR_1, LR_2 = 2e-4, 1e-4
TEMPERATURE_1, TEMPERATURE_2 = 0.1, 0.05
GAMMA = 0.1
BETA_1, BETA_2 = 1.0, 10.0  # the weight of HSIC; stage 2's shows which layers HSIC reads
DIMENSION = 128  # of the projection in stage 2, a constant of the authors


def prepare_distill(work):
    """Stage 1: write the student, sentences, the teacher's embeddings, W and the dev set."""
    import common
    import ibkd

    sentences = demo_lines("sentences.txt", SENTENCES)
    write_encoder(work / "teacher", "2,5")
    write_small_encoder(work / "student", "1", sentences + demo_lines("dev.tsv"))
    write_lines(work / "train.txt", sentences)
    write_lines(work / "dev.tsv", demo_lines("dev.tsv", size(100, None)))
    embeddings = common.encode(ibkd.embed, common.load_encoder(work / "teacher"), sentences)
    np.save(work / "teacher.npy", embeddings)
    torch.save(torch.tensor(embeddings), work / "teacher.pt")
    torch.manual_seed(0)  # as ibkd.distill() seeds W, with --seed 0
    start = nn.Linear(WIDTH, 384, bias=False).weight.detach()
    torch.save(torch.eye(384) if WIDTH == 384 else start, work / "mapping.pt")


def prepare_finetune(work):
    """Stage 2: write the student, triplets, the start of the projection and the dev set."""
    rows = list(csv.reader(demo_lines("triplets.csv")))[: 1 + TRIPLETS]  # with the header
    texts = demo_lines("triplets.csv", 1 + TRIPLETS) + demo_lines("dev.tsv")
    write_small_encoder(work / "student", "1,4", texts)
    with open(work / "train.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    write_lines(work / "dev.tsv", demo_lines("dev.tsv", size(100, None)))
    torch.manual_seed(0)  # as ibkd.finetune() seeds it, with --seed 0
    start = nn.Linear(WIDTH, DIMENSION, bias=False).weight.detach()
    torch.save(torch.eye(DIMENSION) if WIDTH == DIMENSION else start, work / "mapping.pt")


class DevScores:
    """Replaces SentEval's engine: scores our dev set as its STS-B, and nothing else."""

    def __init__(self, params, batcher, prepare):
        self.batcher = batcher

    def eval(self, tasks):
        from scipy.stats import spearmanr

        rows = Path("dev.tsv").read_text("utf-8").splitlines()
        first, second, gold = zip(*[row.split("\t") for row in rows])
        vectors = [self.batcher({}, [text.split(" ") for text in side]) for side in (first, second)]
        cosine = nn.functional.cosine_similarity(*vectors).numpy()
        found = dict(spearman=[spearmanr(cosine, [float(score) for score in gold])[0]])
        return {task: dict(dev=found, devacc=0.0) for task in tasks}


def recording(trainer, losses, scores, models):
    """Methods in the place of the authors' trainer's: they keep losses, dev scores and the model.

    The linear layer begins as ours, with a bias of 0. As transformers 4.28 has it otherwise than
    4.2, `use_amp` is gone, and a method has one more argument.
    """
    train, training_step, evaluate = trainer.train, trainer.training_step, trainer.evaluate
    log_save_evaluate = trainer._maybe_log_save_evaluate

    def begin(self, **options):
        models.append(self.model)
        with torch.no_grad():
            self.model.decoder.weight.copy_(torch.load("mapping.pt", weights_only=True))
            self.model.decoder.bias.zero_()
        return train(self, **options)

    def keep_loss(self, *rest):
        loss = training_step(self, *rest)
        losses.append(float(loss))
        return loss

    def keep_score(self, *rest, **options):
        metrics = evaluate(self, *rest, **options)
        scores.append(100 * float(metrics["eval_stsb_spearman"]))
        return metrics

    def log(self, *rest):
        log_save_evaluate(self, *rest, None)

    methods = dict(train=begin, training_step=keep_loss, evaluate=keep_score)
    return dict(methods, _maybe_log_save_evaluate=log, use_amp=False)


def theirs(program, stage, options, checkout, work):
    """Run an authors' program with its command line. stage: their file of models."""
    import transformers

    transformers.file_utils.torch_required = lambda function: function  # gone since 4.2
    sys.modules["senteval"] = SimpleNamespace(engine=SimpleNamespace(SE=DevScores))
    sys.path.insert(0, str(checkout))
    trainer = importlib.import_module("simcse.trainers").CLTrainer
    if stage == "models_unsup":  # what it calls has this name only in the file of stage 2
        module = importlib.import_module(f"simcse.{stage}")
        module.corr_loss_new = module.corr_loss
    losses, scores, models = [], [], []
    os.chdir(work)
    words = f"""{program} --model_name_or_path student --output_dir theirs --overwrite_output_dir
        --num_train_epochs {EPOCHS} --max_seq_length 128 --pooler_type avg --do_train --do_eval
        {options}"""
    methods = recording(trainer, losses, scores, models)
    with (
        mock.patch("sys.argv", words.split()),
        mock.patch.multiple(trainer, create=True, **methods),
        mock.patch("torch.utils.data.RandomSampler.__iter__", our_order()),
    ):
        runpy.run_path(str(checkout / program), run_name="__main__")
    weights = renamed(models[0].state_dict(), {"bert.": "model.", "decoder.": "heads.0.0."})
    return dict(losses=losses, weights=weights, dev=scores[-1])


def their_distill(checkout, work):
    options = f"""--train_file train.txt --teacher_emb_path teacher.pt --lambdas2 0
        --student_emb_dim {WIDTH} --teacher_emb_dim 384 --mlp_only_train
        --per_device_train_batch_size {BATCH_1} --learning_rate {LR_1} --temp {TEMPERATURE_1}
        --lambdas {BETA_1} --gamma {GAMMA}"""
    return theirs("train_unsup.py", "models_unsup", options, checkout, work)


def their_finetune(checkout, work):
    options = f"""--train_file train.csv --per_device_train_batch_size {BATCH_2}
        --learning_rate {LR_2} --temp {TEMPERATURE_2} --lambdas {BETA_2}"""
    return theirs("train_sup.py", "models_sup", options, checkout, work)


def embed_last_but_one(encoder, *inputs, embed, **options):
    """ibkd.embed(), which finds the output of the last layer but one in the place of X's layer."""

    def model(*tokens, **flags):
        output = encoder.model(*tokens, **flags)
        if output.hidden_states:
            output.hidden_states = output.hidden_states[-2:]
        return output

    return embed(StandIn(encoder, model=model), *inputs, **options)


def ours(stage, work, undone):
    """Run a stage of ibkd.py with these departures undone."""
    import ibkd

    add_mapping = ibkd.add_mapping

    def add_mapping_with_bias(encoder, dimension, keep):
        mapping = add_mapping(encoder, dimension, keep)
        mapping.bias = nn.Parameter(torch.zeros(dimension))
        return mapping

    hsic = ibkd.hsic

    def hsic_of_theirs(gram_x, gram_s):
        l = len(gram_x)
        return hsic(gram_x, gram_s) * (l / (l - 1)) ** 2

    replaced = {}
    if "scale of HSIC" in undone:
        replaced["ibkd.hsic"] = hsic_of_theirs
    if "X" in undone:
        replaced["ibkd.embed"] = partial(embed_last_but_one, embed=ibkd.embed)
    if "bias" in undone:
        replaced["ibkd.add_mapping"] = add_mapping_with_bias
    if "epsilon" in undone:
        replaced["torch.optim.Adam"] = TheirAdam
    options = f"""--student {work}/student --dev {work}/dev.tsv --gamma {GAMMA} --eval-steps 1000"""
    if stage == 1:
        options += f""" --stage distill --train {work}/train.txt --epochs {EPOCHS}
            --teacher-embeddings {work}/teacher.npy --keep-mapping --batch-size {BATCH_1}
            --lr {LR_1} --temperature {TEMPERATURE_1} --beta1 {BETA_1}"""
    else:
        options += f""" --stage finetune --triplets {work}/train.csv --dim {DIMENSION}
            --finetune-epochs {EPOCHS} --finetune-batch-size {BATCH_2} --finetune-lr {LR_2}
            --finetune-temperature {TEMPERATURE_2} --beta2 {BETA_2}"""
    if "hard negatives" in undone:
        options += " --batch-negatives"
    return run_ours("ibkd", work, options.split(), replaced)


BOTH = {
    "scale of HSIC": "1 / (l - 1)^2; ours is 1 / l^2, as in the paper",
    "bias": "the new linear layer has a bias; ours has none",
    "epsilon": "Adam adds it to the root before its correction; ours after it",
}
PROGRAMS = {
    "ibkd-1": Program(
        title="train_unsup.py",
        prepare=prepare_distill,
        theirs=their_distill,
        ours=partial(ours, 1),
        departures=BOTH,
    ),
    "ibkd-2": Program(
        title="train_sup.py",
        prepare=prepare_finetune,
        theirs=their_finetune,
        ours=partial(ours, 2),
        departures={
            **BOTH,
            "X": "the last layer but one; ours is the embedding layer",
            "hard negatives": "those of the batch; ours are an anchor's own",
        },
    ),
}
