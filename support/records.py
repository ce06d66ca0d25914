"""What a run leaves beside its student, and reads again: the checkpoint and metrics.jsonl.

A file that was cut or altered is named, and nothing of it is used.
"""

import hashlib
import json

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from common import DataError, parse_json, read_lines, replacing

LARGEST_INT = 2**63
LARGEST_SCORE = 10**6
# The state of a checkpoint: what is always there, and what may be.
ALWAYS = {"stage": str, "finished": list, "scores": dict, "metrics_bytes": int}
SOMETIMES = {
    "step": int,
    "data": str,
    "best": (int, float),
    "best_step": int,
    "scaler": dict,
    "meter": list,
    "heads": int,
}


def write_checkpoint(path, tensors, state):
    """Write {name: tensor} and a dict in the place of the old checkpoint. Raises WriteError."""
    text = json.dumps(state)
    tensors = {name: value.cpu().contiguous() for name, value in tensors.items()}
    with replacing(path) as new:
        save_file(tensors, new, {"state": text, "sha256": digest(tensors, text)})


def read_checkpoint(path):
    """-> ({name: tensor}, the state, a dict). Raises DataError if it is not as it was written."""
    expected = "a checkpoint as it was written; --overwrite begins the run again"
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = metadata["state"]
        if metadata["sha256"] != digest(tensors, text):
            raise ValueError("it was altered, its checksum is another")
        state = parse_json(text)
        check_state(state)
    except KeyError as error:
        raise DataError(f"{path}: no {error} in its header, expected {expected}") from None
    except Exception as error:  # of safetensors, of the system, or a ValueError from above
        raise DataError(f"{path}: {' '.join(str(error).split())}, expected {expected}") from None
    return tensors, state


def digest(tensors, text):
    """The sha256 of names, types, shapes and values of tensors, and of a text."""
    names = sorted(tensors)
    header = [[name, str(tensors[name].dtype), list(tensors[name].shape)] for name in names]
    result = hashlib.sha256(json.dumps([text, header]).encode())
    for name in names:
        result.update(tensors[name].reshape(-1).view(torch.uint8).numpy())
    return result.hexdigest()


def check_state(state):
    """Raises ValueError for a state that no run has written."""
    for name, kind in (ALWAYS | SOMETIMES).items():
        if name in state or name in ALWAYS:
            value = state.get(name)
            is_no_number = kind in (int, (int, float)) and not is_number(value)
            if not isinstance(value, kind) or is_no_number:
                raise ValueError(f"{name} of its state is {json.dumps(value)[:40]}")
    for row in state["scores"].values():
        if not isinstance(row, dict) or not all(map(is_number, row.values())):
            raise ValueError("the scores of its state are no numbers")


def is_number(value):
    """Is it a float, or an int that is no longer than one? JSON has longer ones, and true."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < LARGEST_INT
    return isinstance(value, float)


def read_metrics(path):
    """Yield (line number, entry) of a metrics.jsonl: dicts with step, stage if known, perhaps dev.

    Raises DataError.
    """
    for line, text in read_lines(path):
        try:
            entry = parse_json(text)
            check_entry(entry)
        except (ValueError, KeyError) as error:
            problem = f"no {error}" if isinstance(error, KeyError) else error
            raise DataError(f"{path}:{line}: {problem}, expected JSON with a step") from None
        yield line, entry


def check_entry(entry):
    """Raises KeyError or ValueError for a line that no run has written."""
    if not isinstance(entry["step"], int) or not is_number(entry["step"]):
        raise ValueError(f"step {json.dumps(entry['step'])[:40]} is not a whole number")
    if not isinstance(entry.get("stage", ""), str):
        raise ValueError(f"stage {json.dumps(entry['stage'])[:40]} is not text")
    if not is_number(entry.get("dev", 0)) or abs(entry.get("dev", 0)) > LARGEST_SCORE:
        raise ValueError(f"dev {json.dumps(entry['dev'])[:40]} is not a score")
