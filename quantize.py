"""Write the int8 ONNX model of a sentence encoder, for CPUs, and measure what it costs.

MODEL is any folder that the other programs read: transformer, pooling, dense heads and
normalization are all exported. The file takes input_ids and attention_mask [N, L] and returns
sentence_embedding [N, D]; ONNX Runtime needs neither torch nor transformers to run it.
The weights of the linear layers (one scale for each output) and of the embeddings become int8 now,
the activations while the model runs.

A table compares four models: megabytes of weights or file, Spearman x 100 on pairs of sentences,
and the seconds to embed both sides of these pairs, one sentence at a time, without tokenizing.
DistilFACE (section 4.2, Tables 4 and 5) keeps the embeddings in fp32, a third of DistilBERT, so its
int8 model has half the size. Here they become int8 as well.

  python quantize.py runs/ckd                       measured on STS-B test
  python quantize.py runs/ckd --pairs my-pairs.tsv --output ckd_int8.onnx
"""

import contextlib
import importlib.util
import logging
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr

from common import (
    DataError,
    Tokens,
    check_target,
    is_device,
    read_scored_pairs,
    read_sts,
    replace,
    resolve,
    table,
    writing,
)
from support import demo
from support.command_line import ArgumentParser, run_main
from support.encoder import load_encoder

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
MEGABYTE = 1e6
LARGEST = 2e9  # bytes of an ONNX file, which is one protocol buffer
LINEAR = ["MatMul", "Gemm"]  # the operators of linear layers
EMBEDDING = ["Gather"]  # the operator of embedding layers
INPUTS = ["input_ids", "attention_mask"]
OUTPUT = "sentence_embedding"


def parse_args():
    parser = ArgumentParser("Write an int8 ONNX model of a sentence encoder, and measure it.")
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder, or with --output a Hub name")
    add("--output", metavar="FILE", help="of int8; MODEL/onnx/model_int8.onnx")
    data = parser.add_mutually_exclusive_group().add_argument
    data("--pairs", metavar="FILE", help="measure on these scored pairs (TSV)")
    data(
        "--senteval",
        default="senteval.tar",
        help="SentEval's folder or tar, for STS-B test; %(default)s from the Hub",
    )
    data("--demo", action="store_true", help="measure on generated pairs")
    return parser.parse_args()


def check_packages():
    """Raises DataError if a package that this program alone needs is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        raise DataError(f"quantize.py needs {names}: pip install {' '.join(missing)}")


def output_file(args):
    """Where int8 goes. Raises DataError."""
    if args.output:
        return Path(args.output)
    if not Path(args.model).is_dir():
        raise DataError(f"{args.model}: not a folder here, expected one, or --output FILE")
    return Path(args.model, "onnx", "model_int8.onnx")


def check_file(output):
    """Raises DataError if it cannot be a file."""
    check_target(output)
    if is_device(output):
        raise DataError(f"{output}: it is not a file, expected one")


def measured_pairs(args):
    """The pairs on which Spearman and time are measured -> ScoredPairs. Raises DataError."""
    if args.pairs:
        return read_scored_pairs(args.pairs)
    if args.demo:
        (pairs,) = demo.test().values()
        return pairs
    return read_sts(resolve(args.senteval))["STS-B"]


@contextlib.contextmanager
def quiet():
    """Without the warnings that both exporters print on sound models."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def export(encoder, tokens, file):
    """Write the whole encoder as fp32 ONNX. tokens: any two rows, to trace it with.

    Raises DataError for a model that torch cannot export.
    """
    import onnx

    batch_and_length = {0: "batch", 1: "length"}
    try:
        program = torch.onnx.export(
            encoder,
            tokens.batch(np.array([0, 1])),
            input_names=INPUTS,
            output_names=[OUTPUT],
            dynamic_shapes=(batch_and_length, batch_and_length),
            dynamo=True,
            verbose=False,
        )
    except Exception as error:  # torch's errors of many kinds have no base class
        reason = " ".join(str(error).split())[:150]
        kind = type(encoder.model).__name__
        raise DataError(f"torch cannot export this {kind} to ONNX: {reason}") from None
    model = program.model_proto
    # ONNX Runtime transposes the weights of dense heads, and fails where their shapes are stated.
    del model.graph.value_info[:]
    onnx.save(model, file)


def onnx_encoder(file):
    """An ONNX file -> a function like Encoder.forward."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])

    def encode_batch(input_ids, attention_mask):
        inputs = dict(zip(INPUTS, (input_ids.numpy(), attention_mask.numpy())))
        return torch.from_numpy(session.run([OUTPUT], inputs)[0])

    return encode_batch


def measure(encode_batch, tokens, pairs, size):
    """tokens: the first sides of `pairs`, then the second; size in bytes -> {column: number}."""
    encode_batch(*tokens.batch(np.array([0])))  # the first call is slower
    begin = time.perf_counter()
    vectors = [encode_batch(*tokens.batch(np.array([row]))) for row in range(len(tokens))]
    seconds = time.perf_counter() - begin
    first, second = F.normalize(torch.cat(vectors), dim=1).chunk(2)
    correlation = spearmanr((first * second).sum(dim=1), pairs.scores).statistic
    return {"MB": size / MEGABYTE, "Spearman": 100 * float(correlation), "seconds": seconds}


@torch.no_grad()
def quantize(encoder, pairs, output, folder):
    """Write `output`, by way of files in `folder` -> {model: {column: number}}, the table."""
    from onnxruntime.quantization import quantize_dynamic

    tokens = Tokens(encoder, pairs.first + pairs.second)
    fp32, linear, int8 = (folder / f"{name}.onnx" for name in ("fp32", "linear", "int8"))
    with quiet():
        export(encoder, tokens, fp32)
        quantize_dynamic(fp32, linear, per_channel=True, op_types_to_quantize=LINEAR)
        quantize_dynamic(fp32, int8, per_channel=True, op_types_to_quantize=LINEAR + EMBEDDING)
    rows = {"fp32, torch": measure(encoder, tokens, pairs, bytes_of(encoder))}
    files = {"fp32, ONNX Runtime": fp32, "int8 but the embeddings": linear, "int8": int8}
    for name, file in files.items():
        rows[name] = measure(onnx_encoder(file), tokens, pairs, file.stat().st_size)
    replace(int8, output)
    return rows


def bytes_of(encoder):
    return sum(value.numel() * value.element_size() for value in encoder.parameters())


def main():
    args = parse_args()
    check_packages()
    output = output_file(args)
    check_file(output)
    pairs = measured_pairs(args)
    encoder = load_encoder(args.model).eval()
    if bytes_of(encoder) > LARGEST:
        megabytes = f"{bytes_of(encoder) / MEGABYTE:.0f} MB of weights"
        raise DataError(f"{args.model}: {megabytes}, expected {LARGEST / MEGABYTE:.0f} at most")
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        # Beside the output, so that the finished file takes its place at once or not at all.
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=".quantize-") as folder:
            rows = quantize(encoder, pairs, output, Path(folder))
    print(table(rows))


if __name__ == "__main__":
    run_main(main)
