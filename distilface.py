"""DistilFACE: unsupervised SimCSE on an encoder that is already distilled, fourteen ways to read a sentence off it, and int8 for the edge.

Lim, Ng, Lim: "Distilling Contrastive Learning Models", Georgia Tech, 2022. Code: github.com/kennethlimjf/contrastive-learning-in-distilled-models.

A batch is encoded twice; dropout makes two embeddings of each sentence that differ. Each of the first is to find its twin among all the second.
There is no teacher: the distillation lies behind the student, in distilbert-base-uncased.

  sec. 3                 simcse_loss
  sec. 5.6               pool
  sec. 5, Table 3        grid, the defaults
  sec. 4.2, Tables 4, 5  --precision (fp16 with gradient scaling, or bf16), quantize

Choices that the paper leaves open, or that this script makes otherwise:
  - Both encodings come from one pass over a batch doubled, as in the authors' code: each row has dropout of its own, so that this is the same.
  - "First" in first_last, and one of all_hidden, is the output of the embedding layer, as in the code; "second to last" is every layer but that one,
    and last_second_hidden the layer before the last. Tokens are averaged in each of them, padding never.
  - As in the code: the learning rate falls linearly to 0, the gradient norm is clipped at 1. An epoch's last batch, if short, is left out.
    Unlike there, a batch holds sentences of about one length (common.batches), and so do its negatives.
  - The paper chose hyper-parameters and the number of steps by the test sets (5.1, Figure 2). Here STS-B dev chooses, all that --grid looks at.
  - The paper's int8 model (Table 5) is half of fp32: its linear layers shrank, its embeddings, a third of DistilBERT, did not. Here they shrink too.
    ONNX Runtime does it. Torch's own eager quantization is deprecated, torchao, its heir, needs torch; an ONNX file is a standard's and runs without.

  python distilface.py                                                            the paper's setting, from the hub
  python distilface.py --student my-encoder --train my.txt --dev my-pairs.tsv --grid "lr=1e-5,3e-5 temperature=0.05,0.1 pooling=avg,cls"
  python distilface.py --demo --quantize                                          two minutes on a CPU
"""
import argparse
import importlib.util
import itertools
import json
import logging
import math
import shutil
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from scipy.stats import spearmanr
from torch import nn

import common
import demo

POOLING_NAMES = ("cls", "avg", "last_second_hidden", "avg_all_hidden", "avg_second_to_last_hidden", "avg_first_last", "avg_last2", "avg_last4",
                 "max_all_hidden", "max_second_to_last_hidden", "max_first_last", "max_last2", "max_last4", "concat_last4",
                 "mean")  # is avg, by the other scripts' name for it
ZERO_ALLOWED = ("seed", "max_steps", "patience")  # of the options that are numbers


def pool(hidden_states, attention_mask, pooling):
    """Sec. 5.6. hidden_states: the embedding layer's output and that of each layer, [N, L, H] each; attention_mask [N, L] -> [N, H], by concat_last4
    [N, 4 H]. Layers are joined token by token, then the tokens are averaged. `pooling` is one of POOLING_NAMES. Raises ValueError: too few layers."""
    how, _, which = pooling.partition("_")
    layers = {"": hidden_states[-1:], "second_hidden": hidden_states[-2:-1], "all_hidden": hidden_states, "second_to_last_hidden": hidden_states[1:],
              "first_last": (hidden_states[0], hidden_states[-1]), "last2": hidden_states[-2:], "last4": hidden_states[-4:]}[which]
    needed = {"second_hidden": 2, "last2": 2, "last4": 4}.get(which, 1)
    if len(hidden_states) - 1 < needed:
        raise ValueError(f"pooling {pooling} needs {needed} layers, the encoder has {len(hidden_states) - 1}")
    if how == "cls":
        return hidden_states[-1][:, 0]
    if how == "concat":
        tokens = torch.cat(tuple(layers), dim=-1)
    elif how == "max":
        tokens = torch.stack(tuple(layers)).amax(dim=0)
    else:
        tokens = torch.stack(tuple(layers)).mean(dim=0)
    mask = attention_mask.unsqueeze(-1)
    return (tokens * mask).sum(dim=1) / mask.sum(dim=1)


POOLINGS = {name: partial(pool, pooling=name) for name in POOLING_NAMES}  # how common.Encoder reads a student


def simcse_loss(first, second, temperature):
    """Sec. 3, mean over the batch: two embeddings of each of N sentences, [N, D] twice; temperature > 0. Scalar >= 0."""
    similarity = F.normalize(first, dim=1) @ F.normalize(second, dim=1).T  # [N, N]
    return F.cross_entropy(similarity / temperature, torch.arange(len(first), device=first.device))


class Student(nn.Module):
    """An encoder, read by one of the fourteen poolings."""

    def __init__(self, encoder, pooling, precision):
        super().__init__()
        self.encoder, self.pooling = encoder, pooling
        self.dtype = dict(fp32=None, bf16=torch.bfloat16, fp16=torch.float16)[precision]

    def forward(self, input_ids, attention_mask):
        """[N, L] twice -> two embeddings of each row, [N, D] twice, in fp32, from one pass over the doubled batch."""
        input_ids, attention_mask = input_ids.repeat(2, 1), attention_mask.repeat(2, 1)
        with torch.autocast(input_ids.device.type, self.dtype, enabled=self.dtype is not None):
            states = self.encoder.model(input_ids, attention_mask, output_hidden_states=True).hidden_states
        return pool([layer.float() for layer in states], attention_mask, self.pooling).chunk(2)

    def save(self, folder):
        """Write the encoder's folder. An average of layers SentenceTransformer can take as well: modules.json, written last, says how. The pooling is
        linear in the layers, so that their weights are what it makes of unit vectors."""
        config, averages = self.encoder.model.config, self.pooling.startswith(("avg_", "last_"))
        config.output_hidden_states = averages  # SentenceTransformer looks there
        self.encoder.save(folder)
        if averages:
            layers, width, modules = config.num_hidden_layers, config.hidden_size, json.loads((folder / "modules.json").read_text())[:1]
            weights = pool(torch.eye(layers + 1)[:, None, None].unbind(), torch.ones(1, 1), self.pooling)[0]
            for kind, content in (("WeightedLayerPooling", dict(embedding_dimension=width, num_hidden_layers=layers, layer_start=0)),
                                  ("Pooling", dict(word_embedding_dimension=width, pooling_mode_mean_tokens=True))):
                i, path = len(modules), f"{len(modules)}_{kind}"
                modules.append(dict(idx=i, name=str(i), path=path, type=f"sentence_transformers.models.{kind}", pooling=self.encoder.pooling))
                (folder / path).mkdir(exist_ok=True), (folder / path / "config.json").write_text(json.dumps(content))
            save_file({"layer_weights": weights}, folder / "1_WeightedLayerPooling" / "model.safetensors")
            (folder / ".modules").write_text(json.dumps(modules, indent=2)), common.replace(folder / ".modules", folder / "modules.json")


def load_student(args):
    """The student where training begins -> Student. Raises DataError: no such encoder, too few layers for the pooling."""
    try:
        own = {"cls": "cls", "avg": "mean", "mean": "mean"}.get(args.pooling, f"distilface.{args.pooling}")  # the first are common's
        return Student(common.load_encoder(args.student, own, layers=args.student_layers), args.pooling, args.precision).to(args.device)
    except ValueError as error:
        raise common.DataError(f"{args.student}: {error}") from None


def train(student, tokens, dev_set, run, args):
    """Sec. 3 on n sentences; the best student on dev is saved."""
    state, total = run.state, args.max_steps
    optimizer = torch.optim.Adam(student.parameters(), lr=args.lr, fused=True)
    scaler = torch.amp.GradScaler(args.device.split(":")[0], enabled=args.precision == "fp16")
    if state["step"]:
        run.restore(student, optimizer)
        scaler.load_state_dict(state["scaler"])
    begin, step, losses, sentences, seconds = state["step"], 0, [], 0, 0.0
    bar = common.progress(total=total, initial=begin, desc="train", unit="step")
    student.train()
    for epoch in itertools.count():
        for rows in common.batches(tokens.lengths, args.batch_size, [args.seed, epoch]):
            if len(rows) < args.batch_size:
                continue
            step += 1
            if step > total or step - state["best_step"] > args.patience * args.eval_steps > 0:
                return bar.close()
            if step <= begin:  # what --resume finds done is passed over
                continue
            clock = time.perf_counter()
            torch.manual_seed(args.seed * 1_000_003 + step)  # dropout from seed and step alone: a resumed run is the same run
            lr = optimizer.param_groups[0]["lr"] = args.lr * (1 - (step - 1) / total)
            loss = simcse_loss(*student(*tokens.batch(rows, args.device)), args.temperature)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
            sentences, seconds = sentences + len(rows), seconds + time.perf_counter() - clock
            evaluate, score = step % args.eval_steps == 0 or step == total, None
            if evaluate and math.isfinite(losses[-1]):
                score, = common.spearman(student.encoder, dev_set).values()
            if not math.isfinite(losses[-1]) or not math.isfinite(score or 0):
                bar.close()
                raise common.DataError(f"step {step}: the loss is {losses[-1]}, the dev score {score}; stopped, {run.folder} keeps its best student "
                                       f"({state['best']:.2f}) and the checkpoint of step {state['step']}")
            if evaluate or step % 25 == 0:
                loss, losses = sum(losses) / len(losses), []
                run.log(step=step, loss=loss, lr=lr, sentences_per_second=round(sentences / seconds, 1), **{"dev": score} if evaluate else {})
            if evaluate:
                if score > state["best"]:
                    state |= dict(best=score, best_step=step)
                    student.save(run.folder)
                state |= dict(step=step, scaler=scaler.state_dict())
                run.checkpoint(student, optimizer)
            bar.set_postfix_str(f"loss {loss:.4f}, lr {lr:.1e}, {sentences / seconds:.0f} sentences/s, best dev {state['best']:.2f}", refresh=False)
            bar.update()


def train_setting(args, tokens, dev_set):
    """One setting, from its start or from where it was interrupted -> its Run; the folder holds the best student on dev, the start included."""
    run, student = common.Run(args, ZERO_ALLOWED), load_student(args)
    state = run.start()
    if not state:
        before, = common.spearman(student.encoder, dev_set).values()
        student.save(run.folder)
        state |= dict(step=0, before=before, best=before, best_step=0, done=False)
        run.log(step=0, dev=before)
        run.checkpoint(student)
    if not state["done"]:
        train(student, tokens, dev_set, run, args)
        state["done"] = True
        run.checkpoint()
    return run


def read_grid(args):
    """--grid "lr=1e-5,3e-5 pooling=avg,cls" -> {"lr=1e-05,pooling=avg": args with these, ...}, every combination. Raises DataError."""
    kinds, axes = dict(lr=float, temperature=float, batch_size=int, pooling=str, seed=int), {}
    for part in args.grid.split():
        name, _, values = part.partition("=")
        name = name.replace("-", "_")
        try:
            axes[name] = [kinds[name](value) for value in values.split(",")]
            if not all(value in POOLING_NAMES if name == "pooling" else 0 < value < math.inf or name == "seed" for value in axes[name]):
                raise ValueError
        except (KeyError, ValueError):
            raise common.DataError(f"--grid {part}: expected {', '.join(kinds)}, each with its values, as in lr=1e-5,3e-5") from None
    settings = [dict(zip(axes, values)) for values in itertools.product(*axes.values())]
    names = [",".join(f"{key}={value}" for key, value in setting.items()) for setting in settings]
    return {name: argparse.Namespace(**vars(args) | setting | dict(grid=None, output=f"{args.output}/{name}", overwrite=False, resume=True))
            for name, setting in zip(names, settings)}


def grid(settings, run, tokens, dev_set):
    """Sec. 5: train every setting; the best on dev becomes the student in run.folder. A line each in metrics.jsonl -> the name of the best."""
    state = run.start()
    if not state:
        state["rows"] = {}
        [shutil.rmtree(one.output, ignore_errors=True) for one in settings.values()]  # of a grid that is written over
    rows = state["rows"]
    for name, one in settings.items():
        if name in rows:
            continue
        print(f"{len(rows) + 1} of {len(settings)}: {name}", file=sys.stderr)
        try:
            inner, why = train_setting(one, tokens, dev_set).state, {}
        except common.DataError as error:  # a loss that is no number ends its setting, not the grid
            inner, why = common.Run(one, ZERO_ALLOWED).start(), {"stopped": str(error)}
        if inner["best"] > max((row["dev"] for row in rows.values()), default=-math.inf):
            Student(common.load_encoder(one.output), one.pooling, "fp32").save(run.folder)
        rows[name] = {"before": inner["before"], "dev": inner["best"], "step": inner["best_step"]}
        run.log(setting=name, **rows[name], **why)
        run.checkpoint()
        shutil.rmtree(f"{one.output}/checkpoint")  # of each setting args.json and metrics.jsonl are kept
        Path(one.output, "model.safetensors").unlink()
    state["rows"] = rows = dict(sorted(rows.items(), key=lambda row: -row[1]["dev"]))
    print(common.table({name: {"dev before": row["before"], "dev": row["dev"]} for name, row in rows.items()}))
    return next(iter(rows))


def quantize(folder, pairs):
    """Sec. 4.2: write folder/onnx/model_int8.onnx, input_ids and attention_mask [N, L] -> sentence_embedding [N, D]. Weights of the linear layers
    (a scale for each output) and of the embeddings become int8 now, activations when they are computed.
    Returns Tables 4 and 5: megabytes on disk, Spearman on `pairs`, seconds to embed both sides of them one by one, tokenizing left out."""
    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic
    encoder, rows = common.load_encoder(folder).eval(), {}
    tokens = common.Tokens(encoder, pairs.first + pairs.second)

    def measure(name, file, encode_one):
        encode_one(*tokens.batch(np.array([0]), "cpu"))  # warms up
        begin = time.perf_counter()
        vectors = torch.cat([encode_one(*tokens.batch(np.array([row]), "cpu")) for row in range(len(tokens.lengths))])
        seconds = time.perf_counter() - begin
        first, second = F.normalize(vectors, dim=1).chunk(2)
        correlation = spearmanr((first * second).sum(dim=1), pairs.scores).statistic
        rows[name] = {"MB": file.stat().st_size / 1e6, "Spearman": 100 * float(correlation), "seconds": seconds}

    def session(file):
        run = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]).run
        return lambda ids, mask: torch.from_numpy(run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0])

    with torch.no_grad(), tempfile.TemporaryDirectory(dir=folder, prefix=".") as temporary, warnings.catch_warnings():
        measure("fp32, torch", folder / "model.safetensors", encoder)
        warnings.simplefilter("ignore"), logging.disable(logging.WARNING)  # both exporters talk
        fp32, linear, full = (Path(temporary, f"{name}.onnx") for name in ("fp32", "linear", "full"))
        names, shapes = dict(input_names=["input_ids", "attention_mask"], output_names=["sentence_embedding"]), ({0: "batch", 1: "length"},) * 2
        torch.onnx.export(encoder, tokens.batch(np.array([0, 1]), "cpu"), fp32, **names, dynamic_shapes=shapes, dynamo=True, external_data=False,
                          verbose=False)
        quantize_dynamic(fp32, linear, per_channel=True, op_types_to_quantize=["MatMul", "Gemm"])
        quantize_dynamic(fp32, full, per_channel=True, op_types_to_quantize=["MatMul", "Gemm", "Gather"])  # Gather: the embeddings
        logging.disable(logging.NOTSET)
        for name, file in (("fp32, ONNX Runtime", fp32), ("int8 but the embeddings", linear), ("int8", full)):
            measure(name, file, session(file))
        (folder / "onnx").mkdir(exist_ok=True)
        common.replace(full, folder / "onnx" / "model_int8.onnx")
    return rows


def parse_args():
    parser = common.ArgumentParser(description="DistilFACE: unsupervised SimCSE. Defaults are the paper's; sections and tables in brackets.")
    add, cuda = parser.add_argument, torch.cuda.is_available()
    add("--student", default="distilbert-base-uncased", help="folder or hub name; %(default)s (4)")
    add("--student-layers", help="keep these layers only, zero-based: 1,3,5")
    add("--pooling", choices=POOLING_NAMES, default="avg_last4", help="how the student is read, whatever its folder says; %(default)s (5.6, Table 3)")
    add("--train", default="wiki1m_for_simcse.txt", help="sentences, one a line, .gz too; %(default)s (3.1)")
    add("--dev", help="graded pairs (TSV) that choose the best student; STS-B dev of --senteval")
    add("--senteval", help="SentEval's folder or tar; senteval.tar where --dev is not given")
    add("--skip-test", action="store_true", help="score dev only, not SentEval's seven test sets")
    add("--grid", help='train every combination of lr, temperature, batch-size, pooling, seed: "lr=1e-5,3e-5 pooling=avg,cls" (5.1)')
    add("--quantize", action="store_true", help="int8 of the student, its size, score and time beside fp32's (4.2); after a run with --resume")
    add("--output", default="runs/distilface", help="becomes the best student's folder; %(default)s")
    add("--batch-size", type=int, default=128, help="%(default)s (Table 3)")
    add("--lr", type=float, default=1e-5, help="%(default)s (Table 3)")
    add("--temperature", type=float, default=0.05, help="%(default)s (Table 3)")
    add("--max-steps", type=int, default=20_000, help="%(default)s (Table 3); 0: no training")
    add("--max-length", type=int, default=32, help="tokens of a training sentence that are read; %(default)s (Table 3)")
    add("--eval-steps", type=int, default=250, help="steps between dev scores, and checkpoints; %(default)s")
    add("--patience", type=int, default=0, help="stop after so many dev scores without progress; 0: never")
    add("--seed", type=int, default=0, help="%(default)s")
    add("--device", default="cuda" if cuda else "cpu", help="%(default)s")
    add("--precision", choices=("fp32", "bf16", "fp16"), default="bf16" if cuda and torch.cuda.is_bf16_supported() else "fp32", help="%(default)s")
    add("--resume", action="store_true", help="go on with the run in --output, or begin it")
    add("--overwrite", action="store_true", help="throw away the run in --output")
    add("--demo", action="store_true", help="generated data, layers 1,3,5 of all-MiniLM-L6-v2; two minutes on a CPU")
    if parser.parse_known_args()[0].demo:
        parser.set_defaults(student=common.MINILM, student_layers="1,3,5", train="demo", dev="demo", pooling="avg", output="runs/distilface-demo",
                            batch_size=64, max_steps=100, eval_steps=25)
    return parser.parse_args()


def main():
    args = parse_args()
    quantized = args.__dict__.pop("quantize")  # no part of a run: it may come later
    if args.precision != "fp32" if args.device == "cpu" else not (args.device.startswith("cuda") and torch.cuda.is_available()):
        raise common.DataError(f"--device {args.device} --precision {args.precision}: expected cpu and fp32, or cuda on a machine that has it")
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if quantized and not importlib.util.find_spec(name)]
    if missing:
        raise common.DataError(f"--quantize needs {', '.join(missing)}: pip install {' '.join(missing)}")
    run, settings = common.Run(args, ZERO_ALLOWED), read_grid(args) if args.grid else {"": args}
    senteval = common.resolve(args.senteval or "senteval.tar") if args.senteval or not args.dev else None
    test_sets = demo.test() if args.demo else common.read_sts(senteval) if senteval and not args.skip_test else {}
    dev_set = demo.dev() if args.dev == "demo" else {"dev": common.read_graded_pairs(args.dev)} if args.dev else common.read_sts(senteval, "dev")
    sentences = demo.sentences(10_000) if args.train == "demo" else common.read_sentences(common.resolve(args.train))
    for one in {(one.pooling, one.batch_size): one for one in settings.values()}.values():
        encoder = load_student(one).encoder  # before anything is trained: are there layers enough for the pooling
        if not 2 <= one.batch_size <= len(sentences):
            raise common.DataError(f"--batch-size {one.batch_size}: expected 2 (a batch's others are negatives) to {len(sentences)}, all there are")
    tokens = common.Tokens(encoder, sentences, args.max_length)

    if args.grid:
        args = settings[grid(settings, run, tokens, dev_set)]
    else:
        run = train_setting(args, tokens, dev_set)
    scores = {}
    for name, encoder in (("student before", load_student(args).encoder), ("student after", common.load_encoder(run.folder).to(args.device))):
        scores[name] = common.spearman(encoder, dev_set, name) | (common.spearman(encoder, test_sets, name) if test_sets else {})
    readable = not args.pooling.startswith(("max", "concat"))
    note = "" if readable else " SentenceTransformer cannot express it: `common.load_encoder` reads this folder."
    run.card(args.student, "none", scores, f"Trained by `distilface.py` (DistilFACE), pooling: {args.pooling}.{note}",
             library="sentence-transformers" if readable else "transformers")
    print(common.table(scores))
    if quantized:
        print(common.table(quantize(run.folder, test_sets.get("STS-B") or next(iter((test_sets or dev_set).values())))))


if __name__ == "__main__":
    common.run_main(main)
