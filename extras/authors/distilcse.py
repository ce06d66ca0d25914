# SPDX-License-Identifier: MIT
"""DistilCSE's ckd_contrastive.py, kd_distillation.py and nli_finetune.py, against ckd.py.

Set-up: one process with gloo on a CPU instead of eight GPUs, so fp32; models without dropout; M
starts from the same numbers in both; the batches of the first epoch are the authors'. Their
SentEval scores STS-B dev, which is the demo's dev set here.
"""

import contextlib
import math
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import torch
from torch import distributed, nn

from extras.authors import harness
from extras.authors.harness import Program, StandIn, TheirAdam, size, write_lines

REPOSITORY = "caskcsg/sentemb"
COMMIT = "5eeec55103c1da738761bf8c6a9c085c6ad1c9a1"
LIBRARIES = "torch==2.13.0 numpy<2 transformers==4.36.2 scipy scikit-learn"

DIMENSION = 384
SENTENCES = size(700, 20_000)  # 22 batches of 32, the last of 28
BATCH = size(32, 64)
EPOCHS = size(2, 1)
STEPS = EPOCHS * math.ceil(SENTENCES / BATCH)
LR = 3e-4
BANK = size(200, 8192)  # overflows in the seventh step
TRIPLETS = size(140, 3256)  # with the header, 9 batches of 16, the last of 13
NLI_BATCH = size(16, 64)
NLI_EPOCHS = 5  # a constant of nli_finetune.py
NLI_STEPS = NLI_EPOCHS * math.ceil((TRIPLETS + 1) / NLI_BATCH)
NLI_LR = 1e-4  # nli_run.sh has 5e-5, at which 45 steps hardly change the temperature


# ---- The start -----------------------------------------------------------------------------------


def prepare(work, layers):
    """Write both models, M, the texts, and the dev set in SentEval's layout."""
    harness.write_encoder(work / "teacher")
    harness.write_encoder(work / "student", layers)
    torch.manual_seed(0)
    torch.save(nn.Linear(DIMENSION, DIMENSION).state_dict(), work / "projection.pt")

    # The authors' programs look up this name, to name what they save.
    write_lines(work / "5mwmt.en", harness.demo_lines("sentences.txt", SENTENCES))
    write_lines(work / "data/nli_for_simcse.csv", harness.demo_lines("triplets.csv", TRIPLETS + 1))
    dev = harness.demo_lines("dev.tsv", size(200, None))
    write_lines(work / "dev.tsv", dev)
    columns = [line.split("\t") for line in dev]
    for split in ("train", "dev", "test"):
        rows = [f"a\tb\tc\td\t{score}\t{first}\t{second}" for first, second, score in columns]
        write_lines(work / f"senteval/downstream/STS/STSBenchmark/sts-{split}.csv", rows)
    for split in ("train", "trial", "test_annotated"):
        rows = [f"1\t{first}\t{second}\t{score}\tNEUTRAL" for first, second, score in columns[:20]]
        write_lines(work / f"senteval/downstream/SICK/SICK_{split}.txt", ["header", *rows])


def projection(work):
    """M, a linear layer from and to DIMENSION, as both programs start with it."""
    linear = nn.Linear(DIMENSION, DIMENSION)
    linear.load_state_dict(torch.load(work / "projection.pt", weights_only=True))
    return linear


# ---- Theirs --------------------------------------------------------------------------------------


def theirs(checkout, work, file, arguments):
    """Run one of their three programs -> outcome. arguments: what its command line would give."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    losses, scores, students = [], [], []

    class Scaler(torch.amp.GradScaler):
        """Theirs without fp16: it scales nothing, and keeps the loss that it is given."""

        def __init__(self):
            super().__init__("cpu", enabled=False)

        def scale(self, loss):
            losses.append(loss.item())
            return loss

    def linear(width, dimension):  # of 768 or 312, 1024
        return projection(work)

    def parallel(model, device_ids, **options):
        return nn.parallel.DistributedDataParallel(model, **options)

    def loader(num_workers, **options):
        return torch.utils.data.DataLoader(**options)

    def from_pretrained(kind):
        def call(name, **options):
            is_teacher = name == "princeton-nlp/sup-simcse-roberta-large"
            return kind.from_pretrained(work / ("teacher" if is_teacher else "student"), **options)

        return StandIn(kind, from_pretrained=call)

    def evaluate(model, *rest, **options):
        results = score(model, *rest, **options)
        scores.append(100 * float(results["eval_stsb_spearman"]))
        students.append({name: value.clone() for name, value in model.state_dict().items()})
        return results

    sys.path.insert(0, str(checkout / "DistilCSE/SentEval"))
    (work / "saved").mkdir(exist_ok=True)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    module = harness.load(
        checkout / "DistilCSE" / file,
        torch=StandIn(
            torch,
            device=lambda name: torch.empty(0).device,  # the CPU
            cuda=StandIn(torch.cuda, set_device=lambda rank: None),
            distributed=StandIn(distributed, init_process_group=lambda **options: None),
            nn=StandIn(
                nn,
                Linear=linear,
                parallel=StandIn(nn.parallel, DistributedDataParallel=parallel),
            ),
        ),
        clip=ModuleType("clip"),
        pandas=ModuleType("pandas"),
        prefetch_generator=SimpleNamespace(BackgroundGenerator=iter),
        tensorboardX=SimpleNamespace(SummaryWriter=None),
    )
    score = module.evaluate
    module.evaluate = evaluate
    module.PATH_TO_DATA = str(work / "senteval")
    module.autocast = contextlib.nullcontext
    module.GradScaler = Scaler
    if file.startswith("my_finetune_nli"):
        module.DataLoader = loader  # it has ten workers
    module.AutoConfig = from_pretrained(AutoConfig)
    module.AutoModel = from_pretrained(AutoModel)
    module.AutoTokenizer = from_pretrained(AutoTokenizer)
    module.main(SimpleNamespace(**arguments, local_rank=0, seed=1111, save_model_path="saved"))
    return dict(losses=losses, dev=scores[-1], weights=our_names(students[-1]))


def our_names(state):
    """Weights of their student -> by the names of ckd.py's."""
    pooler = {"pooler.dense.weight": "heads.0.0.weight", "pooler.dense.bias": "heads.0.0.bias"}
    return {pooler.get(name, f"model.{name}"): value for name, value in state.items()}


def theirs_ckd(checkout, work):
    options = dict(data_path=str(work / "5mwmt.en"), batch_size=BATCH, num_workers=0, lr=LR)
    options |= dict(queue_len=BANK, temp=1.0, temp_exp=1, epochs=EPOCHS, early_stop=EPOCHS)
    options |= dict(pooler_type="cls", num_hidden_layers=12, gather=0, seval=0, mse=0)
    options |= dict(start_model="student", eval_steps=STEPS - 1)  # counted from 0
    return theirs(checkout, work, "ckd_contrastive.py", options)


def theirs_kd(checkout, work):
    options = dict(data_dir=str(work / "5mwmt.en"), batch_size=BATCH, num_workers=0, lr=LR)
    options |= dict(epochs=EPOCHS, early_stop=EPOCHS, pooler_type="cls", num_hidden_layers=4)
    return theirs(checkout, work, "kd_distillation.py", options | dict(eval_step=STEPS))


def theirs_nli(checkout, work):
    from transformers import AutoModel

    start = work / "student-nhl4.pth"
    torch.save(AutoModel.from_pretrained(work / "student").state_dict(), start)
    options = dict(model_path=str(start), batch_size=NLI_BATCH, lr=NLI_LR, temp=20.0, queue_len=0)
    options |= dict(mx_len=64, student_eval=0, gpu_type="cpu", eval_step=NLI_STEPS - 1)
    return theirs(checkout, work, "my_finetune_nli/nli_finetune.py", options)


# ---- Ours ----------------------------------------------------------------------------------------


def their_order(count):
    """The rows of every epoch, as DistributedSampler draws them without set_epoch()."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


def replaced(undone):
    """What all runs of ours replace for theirs: {name: value}."""
    import common

    draw = common.Batches.draw

    def draw_theirs(batches, epoch):
        if epoch > 0 and "order" not in undone:
            return draw(batches, epoch)
        count = batches.count
        order = their_order(count)
        if count == TRIPLETS:  # the header, which is their row 0, is left out
            order = their_order(count + 1)
            order = order[order > 0] - 1
        return common.chunks(order.numpy(), batches.batch_size)

    found = {"common.Batches.draw": draw_theirs}
    if "epsilon" in undone:
        found["torch.optim.Adam"] = TheirAdam
    return found


def ours_distill(work, undone, objective):
    """Stage 1 of ckd.py -> outcome."""
    import ckd

    names = replaced(undone)
    names["ckd.nn"] = StandIn(nn, Linear=lambda width, dimension: projection(work))
    if "bank" in undone:  # this one is never cleared
        bank = [torch.empty(0, DIMENSION)]
        loss, enqueue = ckd.contrastive_distillation_loss, ckd.enqueue

        def loss_with_bank(student, teacher, queue, temperature):
            return loss(student, teacher, bank[0], temperature)

        def enqueue_in_bank(queue, embeddings, size):
            bank[0] = enqueue(bank[0], embeddings, size)
            return queue

        names["ckd.contrastive_distillation_loss"] = loss_with_bank
        names["ckd.enqueue"] = enqueue_in_bank
    options = ["--stage", "distill", "--objective", objective, "--train", work / "5mwmt.en"]
    options += ["--teacher", work / "teacher", "--teacher-pooling", "pooler"]
    options += ["--batch-size", BATCH, "--epochs", EPOCHS, "--lr", LR, "--queue-size", BANK]
    options += ["--patience", 0, "--eval-steps", STEPS, *common_options(work)]
    if "projection" in undone:
        options.append("--projection")
    if "temperature" in undone:
        options.append("--learn-temperature")
    return harness.run_ours("ckd", work, options, names)


def common_options(work):
    return ["--student", work / "student", "--pooling", "pooler", "--dev", work / "dev.tsv"]


class InverseTemperature(nn.Module):
    """In the place of log tau: 1 / tau is what nli_finetune.py learns, from 20."""

    def __init__(self, log_tau, requires_grad):
        super().__init__()
        self.scale = nn.Parameter((-log_tau).exp(), requires_grad)

    def exp(self):
        return 1 / self.scale


def ours_nli(work, undone):
    """Stage 2 of ckd.py -> outcome."""
    import ckd

    names = replaced(undone)
    if "header" in undone:
        read = ckd.read_triplets
        names["ckd.read_triplets"] = lambda path: [["sent0", "sent1", "hard_neg"], *read(path)]
    if "parametrization" in undone:
        names["ckd.nn"] = StandIn(nn, Parameter=InverseTemperature)
    options = ["--stage", "finetune", "--triplets", work / "data/nli_for_simcse.csv"]
    options += ["--finetune-batch-size", NLI_BATCH, "--finetune-epochs", NLI_EPOCHS]
    options += ["--finetune-lr", NLI_LR, "--eval-steps", NLI_STEPS, *common_options(work)]
    if "temperature" in undone:
        options.append("--learn-temperature")
    return harness.run_ours("ckd", work, options, names)


# ---- Programs ------------------------------------------------------------------------------------

BOTH_STAGES = dict(
    epsilon="it is added to the root of Adam's second moment before its correction; ours after it",
    order="each epoch has that of the first, since set_epoch() is not called; ours has a new one",
)
PROJECTION = "M also where the dimensions are equal; ours only where they differ"

PROGRAMS = {
    "ckd": Program(
        "ckd_contrastive.py",
        partial(prepare, layers="1,4"),
        theirs_ckd,
        partial(ours_distill, objective="ckd"),
        BOTH_STAGES
        | dict(
            bank="the memory bank is kept at the start of an epoch; ours is cleared",
            temperature="log(1 / tau) is learned, from 1; ours is fixed at 0.05",
            projection=PROJECTION,
        ),
    ),
    "kd": Program(
        "kd_distillation.py",
        partial(prepare, layers="0,1,3,5"),  # 4, 6 or 12 layers are what it takes
        theirs_kd,
        partial(ours_distill, objective="kd"),
        BOTH_STAGES | dict(projection=PROJECTION),
    ),
    "nli": Program(
        "nli_finetune.py",
        partial(prepare, layers="2"),
        theirs_nli,
        ours_nli,
        BOTH_STAGES
        | dict(
            header="the CSV's header is a triplet; ours is none",
            temperature="it is learned; ours is fixed at 0.05",
            parametrization="what is learned is 1 / tau, from 20; ours is log tau",
        ),
    ),
}
