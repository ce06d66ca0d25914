# SPDX-License-Identifier: MIT
"""Write a sentence encoder as an ONNX model for CPUs, in 4, 8 or 32 bits, and measure the cost.

MODEL is any folder that the other scripts read: transformer, pooling, dense heads and normalization
go into OUTPUT/onnx/model_int8.onnx (--bits 8), model_q4.onnx (4) or model.onnx (32). Each takes
input_ids and attention_mask [N, L] and returns sentence_embedding [N, D] and last_hidden_state
[N, L, H]. ONNX Runtime runs it without torch and transformers; sentence-transformers'
backend="onnx" reads the second output. A prompt that the folder states is not in the file: put it
before each text.

8 bits: the weights of linear layers (one scale per output) and of embedding layers are rounded now,
activations while the model runs. 4 bits: ONNX Runtime's MatMulNBits and GatherBlockQuantized, with
a scale for each group of --group-size weights, rounded by rounded_weights(); inputs of linear
layers are rounded to 8 bits, by rounded_inputs(). --layer-bits 8 leaves linear layers in 8 bits; in
2, only a student that `python -m extras.rounded` has trained with this rounding is of use.

With --pairs or --senteval, a table compares torch and ONNX Runtime: millions of parameters;
megabytes of the file, or of what torch.save writes; Spearman x 100; sentences per second, embedded
one at a time without tokenization: the median of --rounds, in which the models take turns. "Same in
batches" is the lowest cosine (x 100) of a text's vectors, embedded alone and in a batch of 128. In
8 bits, it is below 100, since activations are rounded by the largest one in the batch. --at-most 1
writes no file, and ends with status 2, if the file loses more than 1 point of Spearman x 100.

DistilFACE's Table 5 (arXiv:2401.12472) is the row "int8 but the embeddings, torch": its authors'
notebook quantizes the linear layers with torch's quantize_dynamic(). See docs/distilface.md.

  python -m extras.quantize runs/ckd
  python -m extras.quantize MODEL --bits 4 --pairs demo/test.tsv --output runs/four-bits
  python -m extras.quantize runs/ckd --bits 4 --pairs demo/test.tsv --at-most 1
  python -m extras.quantize MODEL --senteval senteval.tar --sets STS12,STS13,STS14,STS15,STS-B
"""

import contextlib
import importlib.util
import io
import logging
import shutil
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from common import UserError, chunks, note, one_line_errors, spearman, tokenize
from common import read_scored_pairs, replacing
from common import in_range, positive_int, read_options, run_main, table
from eval_sts import load, read_data

PACKAGES = ("onnx", "onnxscript", "onnxruntime")  # what this script alone needs
LINEAR = ["MatMul", "Gemm"]  # ONNX's operators of linear layers; Gather is that of embeddings
INPUTS = ["input_ids", "attention_mask"]
OUTPUTS = ["sentence_embedding", "last_hidden_state"]
ROWS = dict(fp32="fp32, ONNX Runtime", linear="int8 but the embeddings", int8="int8")
ROWS |= dict(q4="4 bits", q4_8="4 bits, linear layers 8 bits")
ROWS |= dict(q4_2="4 bits, linear layers 2 bits")
TORCH_ROWS = ("fp32, torch", "int8 but the embeddings, torch")
BATCH = 128  # texts
SHRINK = (1, 0.92, 0.84)  # factors of a group's scale, of which the best is taken
FILES = {"8": "model_int8.onnx", "4": "model_q4.onnx", "32": "model.onnx"}  # by --bits


class Options:
    model: str  # folder, or name on the Hub
    output: str = None  # folder that gets onnx/ (default: the model, if it is a folder)
    bits: Literal["4", "8", "32"] = "8"  # of a weight
    layer_bits: Literal["2", "4", "8"] = "4"  # of linear layers, with --bits 4
    group_size: Literal["16", "32", "64", "128"] = "32"  # weights with a common scale, --bits 4
    pairs: str = None  # scored pairs (TSV) to measure on (default: no table)
    senteval: str = None  # without --pairs: folder or tar file with the STS test sets
    sets: str = None  # of SentEval's, as in STS12,STS-B
    rows: list = None  # of the table, as in "int8" "4 bits" (default: all)
    rounds: positive_int = 5  # of timing
    at_most: in_range(float, 0, 200) = None  # write no file that loses more points on --pairs


# ---- The rounding of the file in 4 bits ----------------------------------------------------------


def in_groups(values, size):
    """[..., K] -> [..., groups, size], with zeros at the end of the last group."""
    return F.pad(values, (0, -values.shape[-1] % size)).unflatten(-1, (-1, size))


def rounded_weights(weights, size, bits=4):
    """Weights [..., K] -> the same shape: whole numbers from -8 to 7, times their group's scale.

    The scale is the largest weight divided by -8, times the factor of SHRINK that has the least
    squared error. It is a number of fp16, as the file keeps it. In 2 bits, -2 is for -8, 1 for 7.
    """
    low = -(2 ** (bits - 1))
    groups = in_groups(weights, size)
    largest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))
    best, least = groups, torch.full_like(largest, torch.inf)
    for factor in SHRINK:
        scale = (factor * largest / low).half().float()
        whole = (groups / scale).nan_to_num().round()  # 0 / 0 where all weights are 0
        new = whole.clamp(low, -low - 1) * scale
        error = (new - groups).square().sum(dim=-1, keepdim=True)
        best = torch.where(error < least, new, best)
        least = torch.minimum(error, least)
    return best.flatten(-2)[..., : weights.shape[-1]]


def rounded_inputs(inputs, size):
    """A linear layer's inputs [..., K], as ONNX Runtime rounds them to 8 bits -> the same shape."""
    groups = in_groups(inputs, size)
    scale = groups.abs().amax(dim=-1, keepdim=True) / 127
    new = (groups / scale).nan_to_num().round() * scale
    return new.flatten(-2)[..., : inputs.shape[-1]]


# ---- Files ---------------------------------------------------------------------------------------


def padded(encoder, token_ids):
    """N lists of token ids -> input_ids, attention_mask [N, L], padded on the right."""
    texts = [torch.tensor(ids) for ids in token_ids]
    mask = pad_sequence([torch.ones_like(ids) for ids in texts], batch_first=True)
    return pad_sequence(texts, True, encoder.tokenizer.pad_token_id or 0), mask


def export(encoder, embed, file):
    """Write the encoder as fp32 ONNX, for any batch size and length."""
    import onnx

    def forward(input_ids, attention_mask):
        output = encoder.model(input_ids, attention_mask=attention_mask, output_hidden_states=True)
        how = dict(pooling=encoder.pooling, heads=encoder.heads, normalize=encoder.normalize)
        done = SimpleNamespace(model=lambda *_, **__: output, **how)  # one pass for both outputs
        return embed(done, input_ids, attention_mask), output.last_hidden_state

    example = padded(encoder, tokenize(encoder, ["one example", "another example"]))
    axes = {0: "batch", 1: "length"}
    names = dict(input_names=INPUTS, output_names=OUTPUTS, dynamic_shapes=(axes, axes))
    encoder.forward = forward  # it is what torch exports of a module
    silent = io.StringIO()  # torch prints the whole graph of a model that it cannot export
    with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
        program = torch.onnx.export(encoder, example, **names, dynamo=True, verbose=False)
    model = program.model_proto
    # ONNX Runtime transposes the weights of dense heads, and fails where it is told their shapes.
    del model.graph.value_info[:]
    for node in model.graph.node:
        del node.metadata_props[:]  # which line of Python it comes from: half a megabyte
    onnx.save(model, file)


def onnx_model(file):
    """-> a function of input_ids and attention_mask that returns embeddings [N, D] in NumPy."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()  # as many as torch has
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    inputs = [tensor.name for tensor in session.get_inputs()]
    return lambda *batch: session.run(OUTPUTS[:1], dict(zip(inputs, [x.numpy() for x in batch])))[0]


def write_blockwise(source, file, operator, bits, group_size):
    """Round the weights of an operator, "MatMul" or "Gather", with a scale per group of them."""
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from onnxruntime.quantization.onnx_model import ONNXModel

    axes = dict(MatMul=0, Gather=1)  # along an output's weights, along a token's embedding
    options = dict(bits=bits, block_size=group_size, is_symmetric=True, quant_axes=axes.items())
    options |= dict(op_types_to_quantize=(operator,), accuracy_level=4)  # 4: int8 activations
    model = ONNXModel(onnx.load(source))
    model.replace_gemm_with_matmul()  # dense heads are exported as Gemm, which it leaves alone
    place = 1 if operator == "MatMul" else 0  # of the weights among a node's inputs
    read = {node.input[place] for node in model.nodes() if node.op_type == operator}
    for tensor in model.initializer():
        if bits < 8 and tensor.name in read and len(tensor.dims) == 2:
            weights = torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
            rows = weights.movedim(axes[operator], -1)
            new = rounded_weights(rows, group_size, bits).movedim(-1, axes[operator])
            tensor.CopyFrom(onnx.numpy_helper.from_array(new.numpy(), tensor.name))
    # Its scale maps the largest weight to -8 (-2), as ours: what is rounded stays as it is.
    quantizer = MatMulNBitsQuantizer(model.model, **options)
    quantizer.process()
    graph = quantizer.model.model.graph
    for tensor in [each for each in graph.initializer if each.name.endswith("_scales")]:
        name, half = tensor.name, f"{tensor.name}_fp16"  # cast when the file is loaded
        scales = onnx.numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(onnx.numpy_helper.from_array(scales, half))
        to = dict(to=onnx.TensorProto.FLOAT)
        graph.node.insert(0, onnx.helper.make_node("Cast", [half], [name], **to))
    quantizer.model.save_model_to_file(str(file))


def write_onnx(name, folder, group_size=32):
    """Export a model -> (encoder, embed(), {kind: file}), files in `folder`; kind: of ROWS."""
    from onnxruntime.quantization import quantize_dynamic

    encoder, embed = load(name)
    encoder.eval()
    files = {kind: Path(folder, f"{kind}.onnx") for kind in ROWS}
    with one_line_errors(name, "torch must be able to export it as an ONNX file below 2 GB"):
        note(f"{name}: exporting it, then rounding its weights; this takes about a minute")
        export(encoder, embed, files["fp32"])
        for kind, operators in (("linear", LINEAR), ("int8", [*LINEAR, "Gather"])):
            options = dict(per_channel=True, op_types_to_quantize=operators)
            quantize_dynamic(files["fp32"], files[kind], **options)
        words = Path(folder, "words.onnx")  # only words in 4 bits
        write_blockwise(files["fp32"], words, "Gather", 4, group_size)
        for kind, bits in (("q4", 4), ("q4_8", 8), ("q4_2", 2)):
            write_blockwise(words, files[kind], "MatMul", bits, group_size)
    return encoder, embed, files


def load_models(encoder, embed, files):
    """-> {row of the table: (megabytes, function of input_ids and attention_mask)}."""
    linear = torch.ao.quantization.quantize_dynamic(encoder, {torch.nn.Linear}, dtype=torch.qint8)
    models = {}
    for row, model in zip(TORCH_ROWS, (encoder, linear)):
        file = files["fp32"].with_suffix(".pt")
        torch.save(model.state_dict(), file)
        models[row] = (file.stat().st_size / 1e6, partial(embed, model))
    for kind, row in ROWS.items():
        models[row] = (files[kind].stat().st_size / 1e6, onnx_model(files[kind]))
    return models


@torch.no_grad()
def measure(encoder, models, sets, rounds):
    """models: of load_models(); sets {name: scored pairs} -> {row: {column: number}}."""
    texts = list({pair[side]: 0 for pairs in sets.values() for side in (0, 1) for pair in pairs})
    token_ids = tokenize(encoder, texts)
    inputs = [padded(encoder, [ids]) for ids in token_ids]
    batches = [padded(encoder, chunk) for chunk in chunks(token_ids, BATCH)]
    parameters = sum(value.numel() for value in encoder.parameters()) / 1e6
    seconds = {row: [] for row in models}
    scores = {}
    for _ in range(rounds):
        for row, (_, embed_batch) in models.items():
            embed_batch(*inputs[0])  # the first call is slower
            begin = time.perf_counter()
            vectors = [embed_batch(*one) for one in inputs]
            seconds[row].append(time.perf_counter() - begin)
            vectors = np.concatenate(vectors)
            scores[row] = scores_of(encoder, dict(zip(texts, vectors)), sets)
            others = np.concatenate([embed_batch(*batch) for batch in batches])
            same = torch.cosine_similarity(*map(torch.from_numpy, (vectors, others)))
            scores[row]["same in batches"] = 100 * same.min().item()
    rows = {}
    for row, (size, _) in models.items():
        speed = len(inputs) / median(seconds[row])
        rows[row] = {"M parameters": parameters, "MB": size, **scores[row], "sentences/s": speed}
    return rows


def scores_of(encoder, vector, sets):
    """vector {text: [D]}, sets {name: scored pairs} -> {name: Spearman x 100}, and their mean."""

    def known(embed, encoder, texts):
        return np.stack([vector[text] for text in texts])

    scores = {name: spearman(None, encoder, pairs, known) for name, pairs in sets.items()}
    if len(sets) > 1:
        scores["avg"] = sum(scores.values()) / len(sets)
    return scores


def check_loss(model, rows, file_row, at_most):
    """Raise UserError if the file's Spearman is more than `at_most` below that in fp32."""
    before, after = [rows[row]["Spearman"] for row in (TORCH_ROWS[0], file_row)]
    if before - after > at_most:
        found = f"loses {before - after:.2f} points ({before:.2f} to {after:.2f})"
        found = f"its file, {file_row}, {found}, more than --at-most {at_most:g}"
        raise UserError(f"{model}: {found}; no file was written")


def read_arguments():
    args = read_options(Options, __doc__)
    if args.at_most is not None and not args.pairs:
        raise UserError("--at-most needs --pairs")
    known = [*TORCH_ROWS, *ROWS.values()]
    if not {*known}.issuperset(args.rows or known):
        raise UserError(f"--rows {args.rows}: choose from {known}")
    if not all(map(importlib.util.find_spec, PACKAGES)):
        raise UserError(f"packages are missing; pip install {' '.join(PACKAGES)}")
    if not args.output and not Path(args.model).is_dir():
        raise UserError(f"{args.model}: is no folder here; give --output, where the file goes")
    return args


def main():
    args = read_arguments()
    output = Path(args.output or args.model, "onnx", FILES[args.bits])
    four = "q4" if args.layer_bits == "4" else f"q4_{args.layer_bits}"
    kind = {"8": "int8", "4": four, "32": "fp32"}[args.bits]
    sets = {"Spearman": read_scored_pairs(args.pairs)} if args.pairs else {}
    if args.senteval and not args.pairs:
        sets = read_data(SimpleNamespace(**vars(args), split="test"))
    warnings.simplefilter("ignore")  # of exporters about sound models, of what torch deprecates
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        encoder, embed, files = write_onnx(args.model, folder, int(args.group_size))
        if sets:
            models = load_models(encoder, embed, files)
            shown = args.rows or models
            if args.at_most is not None:
                shown = {TORCH_ROWS[0], ROWS[kind], *shown}
            models = {row: models[row] for row in models if row in shown}
            note(f"{args.model}: embedding all texts in {args.rounds} rounds, {len(models)} models")
            rows = measure(encoder, models, sets, args.rounds)
            print(table(rows))
            if args.at_most is not None:
                check_loss(args.model, rows, ROWS[kind], args.at_most)
        with replacing(output) as new:
            shutil.copy(files[kind], new)
        note(f"saved {output}: {output.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    run_main(main)
