"""Model folders in and out: a transformer, its tokenizer, and how a sentence is read off it.

A folder states its own pooling, dense heads and normalization in modules.json, in the layout of
sentence-transformers, so that training, evaluation and SentenceTransformer(folder) all read it
alike. Nothing here knows a method or a script.
"""

import json
import re
import shutil
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from common import DataError, Tokens, parse_json, replace, resolve, sync, writing

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

# Models of the Hugging Face Hub that have no modules.json and are not read by a mean.
HUB_POOLINGS = {
    "princeton-nlp/unsup-simcse-": "cls",
    "princeton-nlp/sup-simcse-": "pooler",
}
ACTIVATIONS = {"Tanh": nn.Tanh, "Identity": nn.Identity, "ReLU": nn.ReLU, "GELU": nn.GELU}
MODULES = "sentence_transformers.models"
JOINS = ("mean", "max", "concat")  # of layers
SHORTEST_INPUT = 3  # tokens: [CLS], one of the sentence, [SEP]
LONGEST_PLACE = 200  # characters, of a module's folder
LARGEST_JSON = 2**24  # bytes
# SentenceTransformer has no module that joins layers by a maximum or side by side. It must refuse
# such a folder instead of taking a mean, so its type is a module that does not exist.
LAYER_POOLING_TYPE = "sentence_distillation.LayerPooling"


class LayerPooling(NamedTuple):
    """A pooling that reads several layers: the layers are joined, then the tokens are averaged."""

    layers: tuple  # positions in hidden_states; 0 is the embedding layer
    join: str = "mean"  # "mean", "max" (token by token) or "concat"
    skip_first_token: bool = False  # leave [CLS] out of the mean over tokens


def named_poolings(depth):
    """The poolings with a name, as an encoder with `depth` layers states them -> {name: pooling}.

    Names and layers are those of the code of Lim et al. (2022, section 5.6): `all_hidden` and
    `first_last` begin with the output of the embedding layer, `second_to_last_hidden` with that of
    the first layer. concat_last4_no_cls is that of Barkan et al. (2020, section 3.4). A name for
    which there are too few layers is absent.
    """
    states = tuple(range(depth + 1))
    poolings = {"mean": "mean", "cls": "cls", "avg": "mean"}
    layers = {
        "all_hidden": states,
        "second_to_last_hidden": states[1:],
        "first_last": (0, depth),
    }
    if depth >= 2:
        poolings["last_second_hidden"] = LayerPooling((depth - 1,))
        layers["last2"] = states[-2:]
    if depth >= 4:
        poolings["concat_last4"] = LayerPooling(states[-4:], "concat")
        poolings["concat_last4_no_cls"] = LayerPooling(states[-4:], "concat", True)
        layers["last4"] = states[-4:]
    for name, positions in layers.items():
        poolings[f"avg_{name}"] = LayerPooling(positions)
        poolings[f"max_{name}"] = LayerPooling(positions, "max")
    return poolings


POOLING_NAMES = (*named_poolings(depth=4), "pooler")


def pool(hidden_states, attention_mask, pooling):
    """Every layer's token states, each [N, L, H], and the mask [N, L] -> [N, H].

    pooling: "mean", over the tokens that are not padding, "cls", the state at [CLS], or a
    LayerPooling; with "concat" of k layers the result is [N, k H].
    """
    if pooling == "cls":
        return hidden_states[-1][:, 0]
    if pooling == "mean":
        return mean_over_tokens(hidden_states[-1], attention_mask)
    layers = [hidden_states[position] for position in pooling.layers]
    if pooling.join == "concat":
        states = torch.cat(layers, dim=-1)
    elif pooling.join == "max":
        states = torch.stack(layers).amax(dim=0)
    else:
        states = torch.stack(layers).mean(dim=0)
    if pooling.skip_first_token:
        attention_mask = attention_mask.clone()
        attention_mask[:, 0] = 0
    return mean_over_tokens(states, attention_mask)


def mean_over_tokens(states, attention_mask):
    mask = attention_mask.unsqueeze(-1)
    return (states * mask).sum(dim=1) / mask.sum(dim=1)


def dense_head(linear, activation):
    """A dense head; "linear" is sentence-transformers' name for its layer."""
    return nn.Sequential(OrderedDict(linear=linear, activation=activation))


class Encoder(nn.Module):
    """A transformer, its tokenizer, and how it is read.

    pooling (see pool), then the dense `heads`, then L2 normalization if `normalize`.
    `max_length` is in tokens, `dimension` is that of an embedding. `precision` is that of a frozen
    teacher (support/cache.py).
    """

    precision = "fp32"

    def __init__(self, model, tokenizer, pooling, heads, normalize, max_length):
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.heads = nn.Sequential(*heads)
        self.normalize = normalize
        self.max_length = max_length
        self.dimension = self.measure_dimension()

    def measure_dimension(self):
        config = self.model.config
        states = [torch.zeros(1, 2, config.hidden_size)] * (config.num_hidden_layers + 1)
        mask = torch.ones(1, 2, dtype=torch.long)
        return self.heads(pool(states, mask, self.pooling)).shape[1]

    def add_head(self, linear, activation):
        """Append a dense head: an nn.Linear from `dimension` to another one, and its activation."""
        self.heads.append(dense_head(linear, activation))
        self.dimension = linear.out_features

    def remove_head(self):
        """Take away the last dense head."""
        del self.heads[-1]
        self.dimension = self.measure_dimension()

    def forward(self, input_ids, attention_mask):
        """[N, L], [N, L] -> [N, dimension]"""
        output = self.model(input_ids, attention_mask, output_hidden_states=True)
        embedding = self.heads(pool(output.hidden_states, attention_mask, self.pooling))
        if self.normalize:
            embedding = F.normalize(embedding, dim=-1)
        return embedding

    def save(self, folder):
        """Write `folder` for AutoModel and SentenceTransformer.

        Each file is complete or absent, and modules.json, which says how to read the others, comes
        last.
        """
        folder = Path(folder)
        new = folder / ".saving"
        with writing(folder, "the model that was there is whole"):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(new, ignore_errors=True)
                new.mkdir()
                modules = self.save_files(new)
                move_files(new, folder)
                for entry in modules:
                    (folder / entry["path"]).mkdir(exist_ok=True)
            finally:
                shutil.rmtree(new, ignore_errors=True)

    def save_files(self, folder):
        """Write all files into an empty folder -> the entries of modules.json."""
        # SentenceTransformer looks here for the states that a WeightedLayerPooling averages.
        self.model.config.output_hidden_states = averages_layers(self.pooling)
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        limits = dict(max_seq_length=self.max_length, do_lower_case=False)
        write_json(folder / "sentence_bert_config.json", limits)
        modules = [module(0, "", "Transformer"), *self.save_pooling(folder)]
        for head in self.heads:
            modules.append(save_head(head, folder, len(modules)))
        if self.normalize:
            modules.append(module(len(modules), f"{len(modules)}_Normalize", "Normalize"))
            (folder / modules[-1]["path"]).mkdir()
        write_json(folder / "modules.json", modules)
        return modules

    def save_pooling(self, folder):
        """Write what modules.json's pooling entries need -> these entries."""
        hidden = self.model.config.hidden_size
        if not isinstance(self.pooling, LayerPooling):
            how = dict(
                word_embedding_dimension=hidden,
                pooling_mode_cls_token=self.pooling == "cls",
                pooling_mode_mean_tokens=self.pooling == "mean",
            )
            return [save_module(folder, 1, "Pooling", how)]
        # Our own statement of it stands in the entry of the first pooling module.
        stated = dict(pooling=self.pooling._asdict())
        if not averages_layers(self.pooling):
            entry = module(1, "1_LayerPooling", "LayerPooling")
            (folder / entry["path"]).mkdir()
            return [entry | stated | dict(type=LAYER_POOLING_TYPE)]
        depth = self.model.config.num_hidden_layers
        how = dict(embedding_dimension=hidden, num_hidden_layers=depth, layer_start=0)
        weighted = save_module(folder, 1, "WeightedLayerPooling", how) | stated
        weights = torch.zeros(depth + 1)
        weights[list(self.pooling.layers)] = 1 / len(self.pooling.layers)
        save_file(dict(layer_weights=weights), folder / weighted["path"] / "model.safetensors")
        how = dict(word_embedding_dimension=hidden, pooling_mode_mean_tokens=True)
        return [weighted, save_module(folder, 2, "Pooling", how)]


def move_files(source, target):
    """Move all files of a folder into another, modules.json last.

    All of them are on the disk before the first one takes its place, so that a full disk leaves
    `target` as it was.
    """
    files = [path for path in source.rglob("*") if path.is_file()]
    for path in files:
        sync(path)
    for path in sorted(files, key=lambda path: path.name == "modules.json"):
        place = target / path.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        replace(path, place)


def averages_layers(pooling):
    """Is it a mean over layers, which SentenceTransformer can express?"""
    if not isinstance(pooling, LayerPooling):
        return False
    return pooling.join == "mean" and not pooling.skip_first_token


def module(position, path, kind):
    """An entry of modules.json."""
    return dict(idx=position, name=str(position), path=path, type=f"{MODULES}.{kind}")


def save_module(folder, position, kind, config):
    """Write a module's folder with its config.json -> its entry of modules.json."""
    entry = module(position, f"{position}_{kind}", kind)
    (folder / entry["path"]).mkdir()
    write_json(folder / entry["path"] / "config.json", config)
    return entry


def save_head(head, folder, position):
    config = dict(
        in_features=head.linear.in_features,
        out_features=head.linear.out_features,
        bias=head.linear.bias is not None,
        activation_function=f"torch.nn.{type(head.activation).__name__}",
    )
    entry = save_module(folder, position, "Dense", config)
    tensors = {name: value.cpu().contiguous() for name, value in head.state_dict().items()}
    save_file(tensors, folder / entry["path"] / "model.safetensors")
    return entry


def write_json(path, content):
    path.write_text(json.dumps(content, indent=2), "utf-8")


def read_json(path, default=None, kind=dict):
    """The content of a JSON file, of this type, or `default` where there is none.

    Raises DataError.
    """
    try:
        if not path.exists():
            return default
        if not path.is_file() or path.stat().st_size > LARGEST_JSON:
            raise ValueError(f"not a file of {LARGEST_JSON:,} bytes or less")
        return parse_json(path.read_text("utf-8"), kind)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}, expected JSON") from None
    except ValueError as error:
        raise DataError(f"{path}: {error}, expected JSON") from None


def public_name(model):
    """A model's name without the folders of this machine."""
    return Path(model).name if Path(model).exists() else model


def load_encoder(name, pooling=None, default="mean", layers=None):
    """A folder or a name on the Hugging Face Hub -> Encoder.

    pooling: one of POOLING_NAMES ("pooler" is the model's own dense + tanh on [CLS]), or a
    LayerPooling; without it the folder's modules.json says how to read it, and where there is none
    `default` does, except for the SimCSE models of the Hub, see HUB_POOLINGS. layers: "1,3,5" keeps
    these layers only. Raises DataError: weights that are missing, truncated or incomplete; a
    pooling or a head that is unknown; no such layer.
    """
    folder = resolve(name, model=True)
    model, tokenizer, pooler = load_transformer(name, folder)
    if layers is not None:
        keep_layers(name, model, layers)
    heads, normalize = [], False
    if pooling in POOLING_NAMES and pooling != "pooler":
        pooling = find_pooling(name, pooling, model.config.num_hidden_layers)
    if pooling is None:
        stated = read_modules(folder, pooler)
        if stated is not None:
            pooling, heads, normalize = stated
        else:
            pooling = default_pooling(name, default, pooler)
    if pooling == "pooler" and pooler is not None:
        pooling = "cls"
        heads = [dense_head(pooler, nn.Tanh())]
    check_pooling(name, model, pooling)
    max_length = longest_input(folder, model, tokenizer)
    try:
        encoder = Encoder(model, tokenizer, pooling, heads, normalize, max_length)
    except RuntimeError as error:  # of torch: the shapes of two layers
        raise DataError(f"{name}: {error}, expected heads that fit its layers") from None
    check_encoder(name, encoder)
    check_lower_case(folder, tokenizer)
    return encoder


def check_lower_case(folder, tokenizer):
    """Raises DataError if sentences are to be lower-cased, and the tokenizer does not do it."""
    path = folder / "sentence_bert_config.json"
    wanted = read_json(path, {}).get("do_lower_case")
    if wanted and tokenizer("A B")["input_ids"] != tokenizer("a b")["input_ids"]:
        expected = "a tokenizer that lower-cases by itself"
        raise DataError(f"{path}: do_lower_case is {str(wanted)[:40]}, expected {expected}")


def check_encoder(name, encoder):
    """Raises DataError unless its weights are finite, and it encodes two sentences."""
    for key, value in encoder.state_dict().items():
        if not torch.isfinite(value).all():
            raise DataError(f"{name}: {key} has values that are not finite, expected numbers")
    expected = "an encoder like BERT and its tokenizer"
    try:
        if len(encoder.tokenizer) > encoder.model.get_input_embeddings().num_embeddings:
            raise ValueError(f"{len(encoder.tokenizer)} tokens, more than the model knows")
        tokens = Tokens(encoder, ["a b", "a, b"])
        with torch.no_grad():
            embeddings = encoder(*tokens.batch(np.arange(2), encoder.model.device))
        if embeddings.shape != (2, encoder.dimension):
            raise ValueError(f"embeddings of shape {tuple(embeddings.shape)}")
    except Exception as error:  # of torch, numpy and transformers, by what is wrong
        reason = " ".join(str(error).split())[:150] or type(error).__name__
        raise DataError(f"{name}: {reason}; expected {expected}") from None


def find_pooling(name, pooling, depth):
    """One of POOLING_NAMES -> "mean", "cls" or a LayerPooling. Raises DataError."""
    poolings = named_poolings(depth)
    if pooling not in poolings:
        expected = f"one for {depth} layers: {', '.join(poolings)}"
        raise DataError(f"{name}: pooling {pooling}, expected {expected}")
    return poolings[pooling]


def load_transformer(name, folder):
    """-> the model in float32, its tokenizer, its pooler's dense layer or None.

    Raises DataError.
    """
    load = load_pretrained(name, folder)
    model, report = load(transformers.AutoModel, output_loading_info=True)
    tokenizer = load(transformers.AutoTokenizer)
    for key in ("hidden_size", "num_hidden_layers", "max_position_embeddings"):
        value = getattr(model.config, key, None)
        if not isinstance(value, int) or value < 1:
            raise DataError(f"{name}: no {key} in its config.json, expected an encoder like BERT")
    missing = sorted({*report["missing_keys"], *report["mismatched_keys"]})
    for key in missing:
        if not key.startswith("pooler."):
            expected = f"all of a {type(model).__name__}"
            raise DataError(f"{name}: its weights lack {key}, expected {expected}")
    for key in sorted(report["unexpected_keys"]):
        if re.search(r"\blayer\.\d+\.", key):
            expected = f"the {model.config.num_hidden_layers} layers of its config.json"
            raise DataError(f"{name}: its weights have {key}, expected {expected}")
    pooler = None
    if not missing:
        pooler = getattr(getattr(model, "pooler", None), "dense", None)
    return model.float(), tokenizer, pooler


def load_pretrained(name, folder):
    """-> load(class of transformers, **options), which loads from a folder and runs no code of it.

    Raises DataError, and so does load().
    """
    for file in ("config.json", "tokenizer_config.json"):
        if asks_for_code(read_json(folder / file, {})):
            problem = "it asks for code of its own, which is never run"
            raise DataError(f"{folder / file}: {problem}, expected a model that transformers knows")

    def load(kind, **options):
        try:
            return kind.from_pretrained(folder, trust_remote_code=False, **options)
        except Exception as error:  # of many kinds, by what is wrong with which file
            reason = " ".join(str(error).split())[:150]
            expected = "expected a complete model and its tokenizer"
            raise DataError(f"{name}: {reason}; {expected}") from None

    return load


def asks_for_code(config):
    """Does a config.json, or a part of it, name classes of its own, or a kernel on the Hub?"""
    for key, value in config.items():
        if key == "auto_map" and value:
            return True
        if key.endswith("_implementation") and "/" in str(value):
            return True
        if isinstance(value, dict) and value.get("auto_map"):
            return True
    return False


def keep_layers(name, model, layers):
    """Remove all transformer layers but `layers`, such as "1,3,5", in that order. In place.

    Raises DataError.
    """
    depth = model.config.num_hidden_layers
    stacks = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    stack = next((part for part in stacks if len(part) == depth), ())
    by_number = {str(number): layer for number, layer in enumerate(stack)}
    numbers = layers.split(",")
    if len(set(numbers)) < len(numbers) or not set(numbers) <= set(by_number):
        expected = f"different ones of its layers 0 to {depth - 1}, as in 1,3,5"
        raise DataError(f"{name}: layers {layers}, expected {expected}")
    kept = [by_number[number] for number in numbers]
    stack.extend(kept)
    del stack[:depth]
    model.config.num_hidden_layers = len(kept)


def read_modules(folder, pooler):
    """What modules.json states -> (pooling, heads, normalize), or None where it states nothing.

    A head with the pooler's weights becomes the pooler itself, so that training moves both.
    Raises DataError.
    """
    entries = read_entries(folder / "modules.json")
    if len(entries) < 2:
        return None
    kinds = [entry["type"].split(".")[-1] for entry in entries]
    is_layer_pooling = entries[1]["type"] == LAYER_POOLING_TYPE
    if kinds[1] not in ("Pooling", "WeightedLayerPooling") and not is_layer_pooling:
        expected = "a pooling behind the transformer"
        raise DataError(f"{folder / 'modules.json'}: {kinds[1][:60]}, expected {expected}")
    check_settings(folder)
    stated = entries[1].get("pooling")
    if stated is None:
        pooling = read_pooling(folder / entries[1]["path"])
        rest = 2
    else:
        pooling = read_layer_pooling(folder / "modules.json", stated)
        rest = 3 if kinds[1] == "WeightedLayerPooling" else 2
    normalize = kinds[-1] == "Normalize"
    if normalize:
        entries.pop()
    heads = []
    for entry, kind in zip(entries[rest:], kinds[rest:]):
        heads.append(read_head(folder / entry["path"], kind))
    if heads and pooler is not None and torch.equal(heads[0].linear.weight, pooler.weight):
        heads[0].linear = pooler
    return pooling, heads, normalize


def check_settings(folder):
    """Raises DataError for a setting that sentence-transformers obeys and this project does not."""
    path = folder / "config_sentence_transformers.json"
    prompt = read_json(path, {}).get("default_prompt_name")
    if prompt is not None:
        found = f"default_prompt_name {str(prompt)[:40]!r}"
        raise DataError(f"{path}: {found}, expected none, as prompts are not read")


def read_entries(path):
    """modules.json -> its entries, a transformer first. Raises DataError."""
    entries = read_json(path, [], list)
    for number, entry in enumerate(entries):
        texts = [entry.get(key) for key in ("type", "path")] if isinstance(entry, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            expected = "an object with the texts type and path"
            raise DataError(f"{path}: entry {number} is {str(entry)[:40]!r}, expected {expected}")
        kind, place = texts
        known = kind.startswith("sentence_transformers.") or kind == LAYER_POOLING_TYPE
        if not known or (number == 0) != (kind.split(".")[-1] == "Transformer"):
            expected = "a module of sentence-transformers, the Transformer first"
            raise DataError(f"{path}: entry {number} is a {kind[:60]}, expected {expected}")
        is_outside = Path(place).is_absolute() or ".." in Path(place).parts
        if is_outside or len(place) > LONGEST_PLACE:
            raise DataError(f"{path}: path {place[:40]!r}, expected a folder beside the file")
    return entries


def read_layer_pooling(path, stated):
    """Our own statement of a pooling of several layers -> LayerPooling. Raises DataError."""
    try:
        layers, join, skip = (stated[name] for name in LayerPooling._fields)
        numbers = [type(layer) is int and layer >= 0 for layer in layers]
        if not numbers or not all(numbers) or join not in JOINS or not isinstance(skip, bool):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        expected = f"layers, join ({', '.join(JOINS)}) and skip_first_token"
        raise DataError(f"{path}: pooling {str(stated)[:60]!r}, expected {expected}") from None
    return LayerPooling(tuple(layers), join, skip)


def read_pooling(folder):
    """sentence-transformers' Pooling module -> "mean", "cls", or another name of it."""
    config = read_json(folder / "config.json", {})
    if config.get("pooling_mode") is not None:
        return config["pooling_mode"]
    prefix = "pooling_mode_"
    modes = [key for key, value in config.items() if key.startswith(prefix) and value]
    for mode in modes:
        if config[mode] is not True:
            found = f"{mode} is {str(config[mode])[:40]!r}"
            raise DataError(f"{folder / 'config.json'}: {found}, expected true or false")
    names = [mode.removeprefix(prefix).split("_token")[0] for mode in modes]
    return "+".join(names) or "none"


def read_head(folder, kind):
    """A module folder -> a dense head. Raises DataError if it is of another kind or incomplete."""
    config = read_json(folder / "config.json", {})
    activation = str(config.get("activation_function", "")).split(".")[-1]
    reads_tokens = config.get("module_input_name", "sentence_embedding") != "sentence_embedding"
    if kind != "Dense" or activation not in ACTIVATIONS or reads_tokens:
        expected = f"Dense with {', '.join(ACTIVATIONS)}"
        raise DataError(f"{folder}: {kind} {activation[:40]}, expected {expected}")
    tensors = read_weights(folder)
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
    stated = [config.get("out_features"), config.get("in_features")]
    parts = {"linear.weight": stated}
    if config.get("bias", True):
        parts["linear.bias"] = stated[:1]
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if found != parts:
        raise DataError(f"{folder}: its weights are {str(found)[:80]}, its config says {parts}")
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    linear.load_state_dict({name.removeprefix("linear."): tensors[name] for name in parts})
    return dense_head(linear, ACTIVATIONS[activation]())


def read_weights(folder):
    """{name: tensor} of model.safetensors, or as older models have it of pytorch_model.bin.

    That is a pickle, of which tensors are read alone: code in it is refused and never run.
    Raises DataError.
    """
    path = folder / "model.safetensors"
    try:
        if path.exists():
            return load_file(path)
        path = folder / "pytorch_model.bin"
        if not path.exists():
            raise ValueError("no such file")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        if not all(isinstance(value, torch.Tensor) for value in tensors.values()):
            raise ValueError("not all of it are tensors")
        return tensors
    except Exception as error:  # of safetensors, pickle, zipfile, torch
        reason = " ".join(str(error).split())[:80]
        expected = "model.safetensors, or a pytorch_model.bin that contains tensors alone"
        raise DataError(f"{path}: {reason}, expected {expected}") from None


def default_pooling(name, default, pooler):
    """How a folder without modules.json is read; a model without a pooler at [CLS] instead."""
    if not Path(name).exists():
        for prefix, pooling in HUB_POOLINGS.items():
            if str(name).startswith(prefix):
                default = pooling
    if default == "pooler" and pooler is None:
        return "cls"
    return default


def check_pooling(name, model, pooling):
    """Raises DataError if the pooling is unknown, or reads layers that the model does not have."""
    if pooling in ("mean", "cls"):
        return
    if not isinstance(pooling, LayerPooling):
        expected = "mean or cls, or pooler for a model that has the weights of one"
        raise DataError(f"{name}: pooling {pooling!r}, expected {expected}")
    depth = model.config.num_hidden_layers
    if max(pooling.layers) > depth:
        expected = f"its layers up to {depth}"
        raise DataError(
            f"{name}: its pooling reads layer {max(pooling.layers)}, expected {expected}"
        )


def longest_input(folder, model, tokenizer):
    """How many tokens the encoder reads at most."""
    positions = model.config.max_position_embeddings
    padding = getattr(getattr(model, "embeddings", None), "padding_idx", None)
    if padding is not None:  # RoBERTa's positions begin behind the number of its padding token
        positions -= padding + 1
    path, key = folder / "sentence_bert_config.json", "max_seq_length"
    stated = read_json(path, {}).get(key)
    if stated is None:
        path, key = folder / "tokenizer_config.json", "model_max_length"
        stated = tokenizer.model_max_length
        if isinstance(stated, float) and stated.is_integer():  # 1e30 is without a limit
            stated = int(stated)
    if type(stated) is not int or stated < SHORTEST_INPUT:
        expected = f"a whole number, {SHORTEST_INPUT} or more"
        raise DataError(f"{path}: {key} is {str(stated)[:40]!r}, expected {expected}")
    if positions < SHORTEST_INPUT:
        expected = f"{SHORTEST_INPUT} or more"
        raise DataError(f"{folder}: {positions} positions in its config.json, expected {expected}")
    return min(positions, stated)
