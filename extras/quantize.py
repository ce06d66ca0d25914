"""Write the int8 ONNX model of a sentence encoder, for CPUs, and measure what it costs.

MODEL is any folder that the other scripts read: transformer, pooling, dense heads and normalization
go into OUTPUT/onnx/model_int8.onnx, which takes input_ids and attention_mask [N, L] and returns
sentence_embedding [N, D]. ONNX Runtime needs neither torch nor transformers to run it. The weights
of linear layers (one scale per output) and of embedding layers become int8 now, activations while
the model runs. A prompt that the folder states is not in the file: put it before each text.

The table compares four models: megabytes of weights or file, Spearman x 100 on scored pairs, and
the seconds to embed their texts, one at a time, without tokenization. DistilFACE (arXiv:2401.12472,
section 4.2, Tables 4 and 5) leaves the embedding layer in fp32, as the third row does.

  python -m extras.quantize runs/ckd                        measured on STS-B test
  python -m extras.quantize MODEL --pairs demo/test.tsv --output runs/int8
"""

import importlib.util
import logging
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch

from common import ArgumentParser, UserError, one_line_errors, run_main, table
from common import read_scored_pairs, read_sts, refuse_overwriting, replace_file, resolve_data
from common import Tokens, spearman
from eval_sts import load

PACKAGES = ("onnx", "onnxscript", "onnxruntime")  # what this script alone needs
LINEAR = ["MatMul", "Gemm"]  # ONNX's operators of linear layers; Gather is that of embeddings
INPUTS = ["input_ids", "attention_mask"]
OUTPUT = "sentence_embedding"


def export(encoder, embed, file):
    """Write the encoder as fp32 ONNX, for any batch size and length."""
    import onnx

    example = Tokens(encoder, ["one example", "another example"]).batch(np.array([0, 1]))
    axes = {0: "batch", 1: "length"}
    names = dict(input_names=INPUTS, output_names=[OUTPUT], dynamic_shapes=(axes, axes))
    encoder.forward = partial(embed, encoder)  # it is what torch exports of a module
    program = torch.onnx.export(encoder, example, **names, dynamo=True, verbose=False)
    model = program.model_proto
    # ONNX Runtime transposes the weights of dense heads, and fails where their shapes are stated.
    del model.graph.value_info[:]
    onnx.save(model, file)


def onnx_model(file):
    """-> a function of input_ids and attention_mask that returns embeddings [N, D] in NumPy."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda *batch: session.run([OUTPUT], dict(zip(INPUTS, [x.numpy() for x in batch])))[0]


def measure(embed_batch, size, encoder, pairs):
    """A model of `size` bytes -> {column: number}. embed_batch(input_ids, attention_mask)."""
    seconds = []

    def encode(embed_batch, encoder, texts):
        tokens = Tokens(encoder, texts)
        inputs = [tokens.batch(np.array([row])) for row in range(len(texts))]
        embed_batch(*inputs[0])  # the first call is slower
        begin = time.perf_counter()
        vectors = [embed_batch(*batch) for batch in inputs]
        seconds.append(time.perf_counter() - begin)
        return np.concatenate(vectors)

    score = spearman(embed_batch, encoder, {"pairs": pairs}, encode)["pairs"]
    return {"MB": size / 1e6, "Spearman": score, "seconds": seconds[0]}


@torch.no_grad()
def quantize(name, pairs, output):
    """Write a model's int8 file `output` -> {row: {column: number}}. Raises UserError."""
    from onnxruntime.quantization import quantize_dynamic

    encoder, embed = load(name)
    encoder.eval()
    size = sum(value.numel() * value.element_size() for value in encoder.parameters())
    rows = {"fp32, torch": measure(partial(embed, encoder), size, encoder, pairs)}
    with tempfile.TemporaryDirectory() as folder:
        fp32, linear, int8 = (Path(folder, f"{part}.onnx") for part in ("fp32", "linear", "int8"))
        with one_line_errors(name, "torch must be able to export it as an ONNX file below 2 GB"):
            export(encoder, embed, fp32)
            quantize_dynamic(fp32, linear, per_channel=True, op_types_to_quantize=LINEAR)
            quantize_dynamic(fp32, int8, per_channel=True, op_types_to_quantize=[*LINEAR, "Gather"])
        files = {"fp32, ONNX Runtime": fp32, "int8 but the embeddings": linear, "int8": int8}
        for row, file in files.items():
            rows[row] = measure(onnx_model(file), file.stat().st_size, encoder, pairs)
        replace_file(output, lambda new: new.write_bytes(int8.read_bytes()))
    return rows


def parse_args():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or Hub name")
    add("--output", help="gets onnx/model_int8.onnx (default: MODEL, if it is a folder)")
    add("--pairs", metavar="FILE", help="scored pairs (TSV) to measure on (default: STS-B test)")
    add("--senteval", default="senteval.tar", help="its folder or tar file (default: %(default)s)")
    return parser.parse_args()


def main():
    args = parse_args()
    if not all(map(importlib.util.find_spec, PACKAGES)):
        raise UserError(f"packages are missing; pip install {' '.join(PACKAGES)}")
    if not args.output and not Path(args.model).is_dir():
        raise UserError(f"{args.model}: is no folder here; say with --output where the file goes")
    output = Path(args.output or args.model, "onnx", "model_int8.onnx")
    source = args.pairs or args.senteval
    refuse_overwriting(output, source)
    pairs = read_scored_pairs(source) if args.pairs else read_sts(resolve_data(source))["STS-B"]
    warnings.simplefilter("ignore")  # both exporters warn about sound models
    logging.disable(logging.WARNING)
    print(table(quantize(args.model, pairs, output)))


if __name__ == "__main__":
    run_main(main)
