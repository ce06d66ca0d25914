"""Run a scoring script with ONNX Runtime instead of torch.

  python results/onnx_scores.py FILE extras.eval_retrieval MODEL ... [options of the script]
  python results/onnx_scores.py model_q4.onnx extras.eval_transfer runs/small --tasks CR

Each MODEL is scored by FILE in its folder's onnx/, or in runs/NAME/onnx/ for a name on the Hub.
model_q4.onnx is written if it is missing, with groups of 64 weights.
"""

import importlib
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import load_encoder, run_main
from extras.quantize import onnx_model


def embed(encoder, input_ids, attention_mask):
    return torch.from_numpy(encoder.run(input_ids, attention_mask))


def load_file(name, *args, **kwargs):
    encoder = load_encoder(name, *args, **kwargs)
    folder = Path(name) if Path(name).is_dir() else Path("runs", Path(name).name)
    file = folder / "onnx" / FILE
    if not file.exists():
        quantize = [sys.executable, "-m", "extras.quantize", name, "--output", folder]
        subprocess.run([*quantize, "--bits", "4", "--group-size", "64"], check=True)
    encoder.run = onnx_model(file)
    return encoder


if __name__ == "__main__":
    _, FILE, module, *sys.argv[1:] = sys.argv
    script = importlib.import_module(module)
    script.embed, script.load_encoder = embed, load_file  # of extras.eval_retrieval
    script.load = lambda *args, **kwargs: (load_file(*args, **kwargs), embed)  # of the others
    run_main(script.main)
