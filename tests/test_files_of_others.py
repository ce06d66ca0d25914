"""Files that parse, but are not what they claim: one line, and no code of theirs is ever run."""

import json
import pickle
import shutil
import struct
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import benchmark
import dse
import eval_sts
import eval_transfer
import sweep
from common import DataError
from support import glue, retrieval
from support.encoder import dense_head, load_encoder, read_json
from support.records import read_checkpoint, read_metrics, write_checkpoint
from support.run import Run
from support.views import load_masked_lm


def copy(source, target):
    shutil.copytree(source, target)
    return target


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# ---- code in a file


class Payload:
    """Leaves a mark where it is unpickled by somebody who runs what a pickle says."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return exec, (f"open({str(self.mark)!r}, 'w').close()",)


def test_the_payload_of_these_tests_is_live(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()
    (tmp_path / "mark").unlink()
    torch.save({"x": Payload(tmp_path / "mark")}, tmp_path / "x.bin")
    torch.load(tmp_path / "x.bin", weights_only=False)
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_weights_run_no_code(models_folder, tmp_path, zipped):
    mark = tmp_path / "mark"
    options = dict(_use_new_zipfile_serialization=zipped)
    plain = copy(models_folder / "bert", tmp_path / "plain")
    tensors = load_file(plain / "model.safetensors")
    (plain / "model.safetensors").unlink()
    torch.save(tensors | {"x": Payload(mark)}, plain / "pytorch_model.bin", **options)
    with pytest.raises(DataError, match="expected a complete model"):
        load_encoder(plain)
    with pytest.raises(DataError, match="expected a complete model"):
        dse.CrossEncoder(plain, "mrpc", 64)

    headed = copy(models_folder / "pooler", tmp_path / "headed")
    (dense,) = headed.glob("*_Dense")
    tensors = load_file(dense / "model.safetensors")
    (dense / "model.safetensors").unlink()
    torch.save(tensors | {"x": Payload(mark)}, dense / "pytorch_model.bin", **options)
    with pytest.raises(DataError, match="expected model.safetensors, or a pytorch_model.bin that"):
        load_encoder(headed)
    assert not mark.exists()


def test_a_pickled_dense_head_of_an_older_model_is_read(models_folder, tmp_path):
    expected = load_encoder(models_folder / "pooler").heads[0].linear
    folder = copy(models_folder / "pooler", tmp_path / "old")
    (dense,) = folder.glob("*_Dense")
    torch.save(load_file(dense / "model.safetensors"), dense / "pytorch_model.bin")
    (dense / "model.safetensors").unlink()
    found = load_encoder(folder).heads[0].linear
    assert torch.equal(found.weight, expected.weight)
    assert torch.equal(found.bias, expected.bias)
    (dense / "pytorch_model.bin").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(DataError, match="pytorch_model.bin"):
        load_encoder(folder)


CODE = """
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
open({mark!r}, "w").close()
class Model(BertModel): pass
class Config(BertConfig): model_type = "own"
class Words(PreTrainedTokenizerFast): pass
"""
OWN = {"AutoConfig": "own.Config", "AutoModel": "own.Model", "AutoModelForMaskedLM": "own.Model"}


@pytest.mark.parametrize(
    "file, values",
    [
        ("config.json", {"auto_map": OWN, "model_type": "own"}),
        ("config.json", {"auto_map": OWN}),
        ("config.json", {"text_config": {"auto_map": OWN}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "own.Words"]}}),
        ("config.json", {"_attn_implementation": "someone/kernel"}),
    ],
)
def test_a_folder_with_code_of_its_own_is_refused(
    models_folder, tmp_path, monkeypatch, file, values
):
    folder = copy(models_folder / "bert", tmp_path / "own")
    mark = tmp_path / "mark"
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    change(folder / file, **values)
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # to whoever asks
    readers = (
        lambda: load_encoder(folder),
        lambda: dse.CrossEncoder(folder, "mrpc", 64),
        lambda: load_masked_lm(str(folder), "cpu"),
        lambda: benchmark.save_random_model(str(folder), tmp_path / "random"),
    )
    for read in readers[: 4 if file == "config.json" else 3]:
        with pytest.raises(DataError, match=f"{file}: it asks for code of its own"):
            read()
    assert not mark.exists()


# ---- a checkpoint


def make_checkpoint(folder):
    state = dict(stage="distill", finished=[], scores={}, metrics_bytes=0, step=3, best=1.5)
    tensors = {"a": torch.randn(3, 4), "n": torch.zeros((), dtype=torch.long)}
    tensors |= {"h": torch.ones(2).bfloat16(), "empty": torch.zeros(0, 3)}
    write_checkpoint(folder / "state.safetensors", tensors, state)
    return folder / "state.safetensors", tensors, state


def test_a_checkpoint_is_read_as_it_was_written(tmp_path):
    path, tensors, state = make_checkpoint(tmp_path)
    found, found_state = read_checkpoint(path)
    assert found_state == state
    assert set(found) == set(tensors)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_every_altered_byte_of_a_checkpoint_is_noticed(tmp_path):
    path, _, _ = make_checkpoint(tmp_path)
    whole = path.read_bytes()
    for position in range(0, len(whole), 3):
        altered = bytearray(whole)
        altered[position] ^= 1
        path.write_bytes(altered)
        with pytest.raises(
            DataError, match="state.safetensors: .*--overwrite begins the run again"
        ):
            read_checkpoint(path)
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match="state.safetensors"):
            read_checkpoint(path)
    path.write_bytes(struct.pack("<Q", 2**62) + whole[8:])  # a header that is larger than the file
    with pytest.raises(DataError, match="state.safetensors"):
        read_checkpoint(path)


def test_a_checkpoint_without_its_checksum_is_not_loaded(tmp_path):
    path, tensors, state = make_checkpoint(tmp_path)
    save_file(tensors, path, {"state": json.dumps(state)})
    with pytest.raises(DataError, match="no 'sha256' in its header"):
        read_checkpoint(path)


def arguments(folder, **options):
    defaults = dict(output=str(folder), resume=True, overwrite=False, device="cpu")
    return SimpleNamespace(**(defaults | dict(precision="fp32", seed=0) | options))


def test_a_run_with_an_altered_checkpoint_stops_before_it_writes(tmp_path):
    run = Run(arguments(tmp_path))
    run.start()
    model = nn.Linear(3, 1)
    run.state.update(stage="distill", step=1, best=1.0, best_step=1)
    run.log(step=1)
    run.checkpoint([model], None)
    path = tmp_path / "checkpoint" / "state.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"x")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(DataError, match="it was altered, its checksum is another"):
        Run(arguments(tmp_path)).start()
    assert {path: path.read_bytes() for path in before} == before

    path.write_bytes(whole)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-3])
    with pytest.raises(DataError, match=r"metrics.jsonl: 9 bytes, expected 12 or more"):
        Run(arguments(tmp_path)).start()


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    run = Run(arguments(tmp_path))
    run.start()
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    run.state.update(stage="distill", step=1, best=1.0, best_step=1)
    run.checkpoint([model], optimizer)
    for other in (nn.Linear(4, 1), nn.Sequential(nn.Linear(3, 1))):
        with pytest.raises(DataError, match="expected the models that the run began with"):
            run.restore([other], torch.optim.Adam(other.parameters()))


# ---- JSON of another type


OTHER_JSON = ("[]", "3", '"text"', "null", "{}", '{"a": [', "[" * 100_000, "9" * 5000, "\ud800")


def test_json_of_another_type_is_one_line(tmp_path):
    path = tmp_path / "x.json"
    for text in OTHER_JSON:
        path.write_text(text, "utf-8", errors="surrogatepass")
        for kind in (dict, list):
            try:
                assert isinstance(read_json(path, None, kind), kind)
            except DataError as error:
                assert str(error).startswith(f"{path}: ")
                assert "\n" not in str(error)


PARTS = {
    "modules.json": ([{}], [[]], [1, 2], [{"type": 1, "path": ""}], [{"type": "x"}] * 2),
    "1_Pooling/config.json": ({"pooling_mode_mean_tokens": "false"}, {"pooling_mode": 7}),
    "sentence_bert_config.json": (
        *({"max_seq_length": value} for value in ("many", 0, -1, 1.5, [], True)),
    ),
    "2_Dense/config.json": (
        {"in_features": 32, "out_features": 10**12, "activation_function": "torch.nn.Tanh"},
        {"in_features": "32", "out_features": 32, "activation_function": "torch.nn.Tanh"},
        {"in_features": 32, "out_features": 32, "activation_function": 3},
    ),
    "config.json": ({}, {"model_type": 3}, {"model_type": "bert", "hidden_size": "many"}),
    "tokenizer.json": ({}, {"version": "1.0", "model": 3}),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_model_with_other_types_is_one_line(models_folder, tmp_path, part):
    for number, content in enumerate(PARTS[part]):
        folder = copy(models_folder / "pooler", tmp_path / str(number))
        (folder / part).write_text(json.dumps(content))
        with pytest.raises(DataError) as error:
            load_encoder(folder)
        assert str(folder) in str(error.value)
        assert "\n" not in str(error.value)
    for text in OTHER_JSON[:4]:
        (folder / part).write_text(text)
        if not (part == "modules.json" and text == "[]"):  # which states nothing
            with pytest.raises(DataError):
                load_encoder(folder)


def test_modules_of_somebody_else_are_refused(models_folder, tmp_path):
    folder = copy(models_folder / "pooler", tmp_path / "other")
    whole = json.loads((folder / "modules.json").read_text())
    for entry, values, expected in (
        (0, {"type": "own_code.Transformer"}, "entry 0 is a own_code.Transformer"),
        (0, {"type": "sentence_transformers.models.CLIPModel"}, "the Transformer first"),
        (1, {"type": "own_code.Pooling"}, "entry 1 is a own_code.Pooling"),
        (2, {"path": "../../2_Dense"}, "expected a folder beside the file"),
        (2, {"path": "/etc"}, "expected a folder beside the file"),
        (1, {"path": "9" * 5000}, "expected a folder beside the file"),
        (1, {"pooling": {"layers": [], "join": "mean", "skip_first_token": False}}, "pooling"),
        (1, {"pooling": {"layers": [-1], "join": "mean", "skip_first_token": False}}, "pooling"),
        (1, {"pooling": {"layers": [1], "join": "sum", "skip_first_token": False}}, "pooling"),
    ):
        entries = json.loads(json.dumps(whole))
        entries[entry] |= values
        (folder / "modules.json").write_text(json.dumps(entries))
        with pytest.raises(DataError, match=expected):
            load_encoder(folder)


def test_heads_that_do_not_fit_are_refused(models_folder, tmp_path):
    encoder = load_encoder(models_folder / "bert")
    encoder.heads.append(dense_head(nn.Linear(7, 3), nn.Tanh()))
    encoder.save(tmp_path / "other")
    with pytest.raises(DataError, match="expected heads that fit its layers"):
        load_encoder(tmp_path / "other")


def test_lines_with_numbers_where_text_belongs_are_refused(tmp_path):
    texts = tmp_path / "corpus.jsonl"
    for values in ({"text": 5}, {"title": 5}, {"_id": True}, {"_id": None}, {"_id": ["d"]}):
        texts.write_text(json.dumps({"_id": "d0", "title": "", "text": "a passage"} | values))
        with pytest.raises(DataError, match="corpus.jsonl:1: .*expected JSON"):
            list(retrieval.read_texts(texts))
    qrels = tmp_path / "test.tsv"
    for score in ("9" * 5000, "-1", "1.5", "nan"):
        qrels.write_text(f"q0\td0\t{score}\n")
        with pytest.raises(DataError, match="test.tsv:1: score"):
            retrieval.read_judgements(qrels, {"q0": "a query"})
    pairs = tmp_path / "train.jsonl"
    for values in ({"text1": 5}, {"text2": ["x"]}, {"label": {}}):
        line = {"text1": "a text", "text2": "another", "label": 1} | values
        pairs.write_text(json.dumps(line))
        with pytest.raises(DataError, match="train.jsonl:1: .*expected JSON"):
            glue.read_pairs(pairs, "mrpc")


def test_metrics_of_somebody_else_are_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for text in (
        "[1]",
        "3",
        '{"stage": "x"}',
        '{"step": 1e999}',
        '{"step": "1"}',
        '{"step": true}',
    ):
        path.write_text(f'{{"step": 0, "stage": "x"}}\n{text}\n')
        with pytest.raises(DataError, match="metrics.jsonl:2: .*expected JSON with a step"):
            list(read_metrics(path))
    for dev in ('"5"', "[]", "true"):
        path.write_text(f'{{"step": 0, "dev": {dev}}}\n')
        with pytest.raises(DataError, match="metrics.jsonl:1: dev"):
            list(read_metrics(path))


def test_a_sweep_of_somebody_else_is_refused(tmp_path):
    command = dict(script="x.py", settings="lr=1", arguments=[])
    for content in ([], {}, {"settings": 3}):
        (tmp_path / "sweep.json").write_text(json.dumps(content))
        with pytest.raises(DataError, match="sweep.json: "):
            sweep.open_folder(tmp_path, command, overwrite=True)
    (tmp_path / "sweep.json").write_text(json.dumps(command))
    good = dict(name="lr=1", setting={"lr": "1"}, dev=1.0, step=3, error=None, seconds=1.0)
    for values in ({"dev": "1"}, {"name": 3}, {"dev": None}, {"other": 1}, {"setting": []}):
        (tmp_path / "sweep.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(good | values))
        with pytest.raises(DataError, match="sweep.jsonl:2: .*expected a line of a sweep"):
            sweep.open_folder(tmp_path, command, overwrite=False)


def test_arguments_of_somebody_else_are_refused(tmp_path):
    (tmp_path / "args.json").write_text("[1, 2]")
    with pytest.raises(DataError, match="args.json: .*is not an object, expected JSON"):
        Run(arguments(tmp_path)).start()


def test_scores_of_somebody_else_are_refused(tmp_path):
    for content in ([], {"mrpc": 3}, {"mrpc": {"student": {"mean": "high"}}}, {"mrpc": {"a": {}}}):
        (tmp_path / glue.SCORES).write_text(json.dumps(content))
        with pytest.raises(DataError, match="scores.json: .*expected JSON"):
            glue.read_scores([tmp_path])


def test_a_label_that_only_the_test_set_has_is_refused(tmp_path):
    (tmp_path / "TREC").mkdir()
    train = "NUM:count How many ?\nHUM:ind Who ?\n"
    (tmp_path / "TREC" / "train_5500.label").write_text(train * 10)
    (tmp_path / "TREC" / "TREC_10.label").write_text("LOC:city Where ?\n")
    with pytest.raises(DataError, match="TREC_10.label: label 'LOC', expected one of the training"):
        eval_transfer.read_task(tmp_path, "TREC")
    (tmp_path / "TREC" / "train_5500.label").write_text("LOC:city Where ?\n")
    with pytest.raises(DataError, match="train_5500.label: one class alone"):
        eval_transfer.read_task(tmp_path, "TREC")


def test_two_files_of_pairs_with_one_name_are_two_rows(tmp_path):
    for folder, score in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "dev.tsv").write_text(f"a\tb\t{score}\nc\td\t5\n")
    (tmp_path / "other.tsv").write_text("a\tb\t0\nc\td\t5\n")
    files = [str(tmp_path / name) for name in ("a/dev.tsv", "b/dev.tsv", "other.tsv")]
    sets = eval_sts.read_all_pairs(files, 0, 5)
    assert list(sets) == [files[0], files[1], "other"]
    assert [pairs.scores[0] for pairs in sets.values()] == [1, 2, 0]


# ---- models that are not what they say


def change_weights(folder, alter):
    tensors = load_file(folder / "model.safetensors")
    alter(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def no_numbers(tensors):
    tensors["embeddings.word_embeddings.weight"][3] = float("nan")


def smaller_vocabulary(tensors):
    name = "embeddings.word_embeddings.weight"
    tensors[name] = tensors[name][:40].clone()


BROKEN = {
    "nan": ("weights", no_numbers, "word_embeddings.weight has values that are not finite"),
    "deeper": ("config.json", {"num_hidden_layers": 2}, "layer.2.* expected the 2 layers"),
    "no layers": ("config.json", {"num_hidden_layers": 0}, "no num_hidden_layers in its config"),
    "tuple": ("config.json", {"return_dict": False}, "expected an encoder like BERT and its token"),
    "short": ("config.json", {"max_position_embeddings": 2}, "complete model and its tokenizer"),
    "no padding": ("tokenizer_config.json", {"pad_token": None}, "expected an encoder like BERT"),
    "length": ("tokenizer_config.json", {"model_max_length": "many"}, "model_max_length is 'many'"),
    "negative": ("tokenizer_config.json", {"model_max_length": -5}, "model_max_length is '-5'"),
    "two tokens": ("tokenizer_config.json", {"model_max_length": 2}, "model_max_length is '2'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_model_that_is_not_what_it_says_is_refused_when_it_is_loaded(
    models_folder, tmp_path, name
):
    file, values, expected = BROKEN[name]
    folder = copy(models_folder / "bert", tmp_path / "other")
    if file == "weights":
        change_weights(folder, values)
    else:
        change(folder / file, **values)
    with pytest.raises(DataError, match=expected.replace("*", ".*")):
        load_encoder(folder)


def test_a_tokenizer_with_more_words_than_the_model(models_folder, tmp_path):
    folder = copy(models_folder / "bert", tmp_path / "other")
    change_weights(folder, smaller_vocabulary)
    change(folder / "config.json", vocab_size=40)
    with pytest.raises(DataError, match="tokens, more than the model knows"):
        load_encoder(folder)


@pytest.mark.parametrize("lost", ["classifier.weight", "bert.encoder.layer.1.output.dense.bias"])
def test_a_cross_encoder_that_lacks_weights_is_refused(models_folder, tmp_path, lost):
    dse.CrossEncoder(models_folder / "bert", "mnli", 64).save(tmp_path)
    dse.CrossEncoder(tmp_path, "mnli", 64)
    change_weights(tmp_path, lambda tensors: tensors.pop(lost))
    with pytest.raises(DataError, match=f"its weights lack {lost}, expected a complete model"):
        dse.CrossEncoder(tmp_path, "mnli", 64)


def test_settings_of_sentence_transformers_that_are_not_obeyed_are_refused(models_folder, tmp_path):
    folder = copy(models_folder / "pooler", tmp_path / "other")
    (folder / "config_sentence_transformers.json").write_text('{"default_prompt_name": "query"}')
    with pytest.raises(DataError, match="default_prompt_name 'query', expected none"):
        load_encoder(folder)
    (folder / "config_sentence_transformers.json").unlink()
    change(folder / "2_Dense" / "config.json", module_input_name="token_embeddings")
    with pytest.raises(DataError, match="expected Dense with"):
        load_encoder(folder)
    change(folder / "2_Dense" / "config.json", module_input_name="sentence_embedding")
    change(folder / "sentence_bert_config.json", do_lower_case=True)
    load_encoder(folder)  # its tokenizer lower-cases by itself
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    change(folder / "tokenizer_config.json", do_lower_case=False)
    with pytest.raises(DataError, match="expected a tokenizer that lower-cases by itself"):
        load_encoder(folder)
