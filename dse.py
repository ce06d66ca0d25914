"""DSE, distilled sentence embedding: a cross-encoder's judgement of sentence pairs, in embeddings that are computed once a sentence.

Barkan, Razin, Malkiel, Katz, Caciularu, Koenigstein: "Scalable Attentive Sentence-Pair Modeling via Distilled Sentence Embedding", AAAI 2020.

The teacher T reads both sentences of a pair at once. The student embeds each by itself, and a small network compares the two embeddings; it learns to
give T's logits and the labels. To compare a new sentence with a catalogue then takes one pass of the encoder, not one for each pair.

  eq. 2, 3.5  dse_loss
  eq. 3       pair_features, SimilarityHead
  3.3         CrossEncoder, fine-tuned on the task first where --teacher is a plain encoder, and kept in OUT/teacher
  3.4         pool_last_four, Student
  Table 1     --alpha, --freeze-encoder; metrics in glue.py
  Tables 3, 4 benchmark

Choices that the paper leaves open, or that this script makes otherwise:
  - A student of fewer than four layers gives as many vectors as it has layers: 1,152 dimensions of three layers of 384.
  - Eq. 3 has no biases, the authors' code has; as in the paper. Adam at a constant learning rate; the gradient norm is clipped at 1.
  - L2 is the squared distance, summed over the classes, averaged over the batch. STS-B's scores are taken as they are, 0 to 5.
  - W h falls into four blocks, one for each part of h. score_matrix computes those of u and v once a sentence; the sum is the same.
  - A frozen encoder runs without dropout. Where GLUE keeps the test labels to itself, dev is reported.
  - The teacher is fine-tuned by Adam for --teacher-epochs at --teacher-lr, the best on dev is kept; the paper leaves that to BERT's.

  python dse.py --task mrpc                                                       the paper's setting, from the hub
  python dse.py --task stsb --glue GLUE --teacher sentence-transformers/all-MiniLM-L6-v2 --student-layers 1,3,5
  python dse.py --demo, or --benchmark                                            five minutes on a CPU; Tables 3 and 4 on this machine
"""
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import common
import demo
import glue


def pool_last_four(hidden_states, attention_mask):
    """Sec. 3.4: the layers' outputs, each [N, L, H], and the mask [N, L] -> [N, 4 H], the mean over the tokens without [CLS] of each of the last
    four, side by side; of all where fewer are given."""
    mask = attention_mask.clone()
    mask[:, 0] = 0
    mask = mask.unsqueeze(-1)
    return torch.cat([(layer * mask).sum(dim=1) / mask.sum(dim=1) for layer in hidden_states[-4:]], dim=1)


POOLINGS = {"last_four": lambda states, mask: pool_last_four(states[1:], mask)}  # how common.Encoder reads a student; states[0] is the embeddings


def pair_features(u, v):
    """h of eq. 3: [N, D] twice -> [N, 4 D]: u, v, u o v, |u - v|."""
    return torch.cat([u, v, u * v, (u - v).abs()], dim=-1)


def dse_loss(student_logits, teacher_logits, labels, alpha, task):
    """Eq. 2: logits [N, C] twice, labels [N], class numbers or, for task "stsb", scores; alpha from 0 (labels) to 1 (teacher) -> scalar."""
    distillation = (student_logits - teacher_logits).square().sum(dim=1).mean()
    label = (student_logits[:, 0] - labels).square().mean() if task == "stsb" else F.cross_entropy(student_logits, labels)
    return alpha * distillation + (1 - alpha) * label


class SimilarityHead(nn.Module):
    """f of eq. 3: f(u, v) = w^T ReLU(W h), here for C classes at once. Embeddings have D dimensions."""

    def __init__(self, width, classes, hidden=512):
        super().__init__()
        self.W, self.w = nn.Linear(4 * width, hidden, bias=False), nn.Linear(hidden, classes, bias=False)

    def forward(self, u, v):
        """Pairs, row by row, as eq. 3 is written: [N, D] twice -> [N, C]."""
        return self.w(F.relu(self.W(pair_features(u, v))))

    @torch.no_grad()
    def score_pairs(self, u, v, memory=2**28):
        """forward() in blocks of pairs, about `memory` bytes at a time."""
        block = max(1, memory // (3 * 4 * self.W.in_features))  # h, and what it is made of
        return torch.cat([self(u[i:i + block], v[i:i + block]) for i in range(0, len(u), block)])

    @torch.no_grad()
    def score_matrix(self, u, v, memory=2**28):
        """All pairs: [N, D], [M, D] -> [N, M, C]. W_u u and W_v v once a sentence; beside the result about `memory` bytes are used."""
        w_u, w_v, w_product, w_difference = self.W.weight.chunk(4, dim=1)
        of_u, of_v = u @ w_u.T, v @ w_v.T
        scores = u.new_empty(len(u), len(v), self.w.out_features)
        block = max(1, memory // (4 * 4 * (u.shape[1] + len(w_u))))  # pairs at a time; four such rows of float32 for each
        for i in range(len(u)):
            for j in range(0, len(v), block):
                part = v[j:j + block]
                hidden = of_v[j:j + block] + part @ (w_product * u[i]).T  # W_p (u o v) = (W_p diag u) v
                hidden += (part - u[i]).abs() @ w_difference.T
                scores[i, j:j + block] = self.w(F.relu(hidden + of_u[i]))
        return scores

    def score_catalogue(self, query, catalogue, memory=2**28):
        """One query [D] against a catalogue [M, D] -> [M, C]."""
        return self.score_matrix(query[None], catalogue, memory)[0]


class Student(nn.Module):
    """psi and f: an encoder for both sentences (sec. 3.4), and a similarity head."""

    def __init__(self, encoder, classes):
        super().__init__()
        self.encoder, self.head = encoder, SimilarityHead(encoder.width, classes)

    def embed(self, input_ids, attention_mask):
        """psi: [N, L] twice -> [N, D]."""
        states = self.encoder.model(input_ids, attention_mask, output_hidden_states=True).hidden_states
        return pool_last_four(states[1:], attention_mask)

    def save(self, folder):
        """Write the encoder's folder, and head.safetensors beside it."""
        self.encoder.save(folder)
        save_file({name: value.cpu().contiguous() for name, value in self.head.state_dict().items()}, folder / ".head")
        common.replace(folder / ".head", folder / "head.safetensors")


def load_student(folder, device="cpu"):
    """A folder that a run left -> Student, in eval mode. Raises DataError."""
    encoder, file = common.load_encoder(folder), common.resolve(folder, model=True) / "head.safetensors"
    if not file.exists():
        raise common.DataError(f"{file}: no such file, expected the folder of a student that dse.py has trained")
    tensors = load_file(file)
    student = Student(encoder, len(tensors["w.weight"]))
    student.head.load_state_dict(tensors)
    return student.to(device).eval()


def embed(student, sentences, max_length=128):
    """n sentences, or their Tokens -> [n, D] on the student's device, for the scores of its head."""
    tokens = sentences if isinstance(sentences, common.Tokens) else common.Tokens(student.encoder, sentences, max_length)
    device = student.head.w.weight.device
    return torch.from_numpy(common.encode(student.eval().embed, tokens, device)).to(device)


class CrossEncoder(nn.Module):
    """T of sec. 3.3: a classifier that reads both sentences, [CLS] a [SEP] b [SEP]; `fresh` if a plain encoder to be fine-tuned. Raises DataError."""
    pooling, normalize = "cross-encoder", False  # part of the key of its cached logits

    def __init__(self, name, task, max_length):
        super().__init__()
        folder, classes = common.resolve(name, model=True), glue.TASKS[task][1] or ("score",)
        try:
            config = transformers.AutoConfig.from_pretrained(folder)
            stated, self.fresh = config.num_labels, not any("SequenceClassification" in kind for kind in config.architectures or [])
            self.model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(classes) if self.fresh else stated)
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise common.DataError(f"{name}: {' '.join(str(error).split())[:150]}; expected a whole model and its tokenizer") from None
        if not self.fresh and stated != len(classes):
            raise common.DataError(f"{name}: a classifier of {stated} labels, expected {len(classes)} for task {task}, or a plain encoder")
        numbers = {str(name).lower(): i for name, i in (config.label2id or {}).items()}
        self.order = [numbers.get(name, i) for i, name in enumerate(classes)]  # of the logits, as glue.TASKS has the classes
        self.max_length = min(max_length, config.max_position_embeddings - 2)
        self.segments = getattr(config, "type_vocab_size", 1) > 1 and "token_type_ids" in self.tokenizer.model_input_names

    def forward(self, input_ids, attention_mask):
        """[N, L] twice -> logits [N, C], in the order of glue.TASKS."""
        ends = (input_ids == self.tokenizer.sep_token_id).long()
        second = {"token_type_ids": ((ends.cumsum(1) - ends) > 0) * attention_mask} if self.segments else {}
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **second).logits[:, self.order]

    def save(self, folder):
        """Write a folder for AutoModelForSequenceClassification; every file appears whole or not at all."""
        new = folder.with_name(".teacher")
        self.model.save_pretrained(new), self.tokenizer.save_pretrained(new), folder.mkdir(exist_ok=True)
        for path in new.iterdir():
            common.replace(path, folder / path.name)


def train(model, stage, lengths, loss_of, dev, save, run, args, epochs, lr):
    """The loop of both stages: loss_of(rows) is the loss of a batch, dev() its scores, whose mean chooses the best model, which save() keeps."""
    dtype = dict(fp32=None, bf16=torch.bfloat16, fp16=torch.float16)[args.precision]
    total, state = min(epochs * math.ceil(len(lengths) / args.batch_size), args.max_steps or math.inf), run.state
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr, fused=True)
    scaler = torch.amp.GradScaler(args.device.split(":")[0], enabled=args.precision == "fp16")
    if state["stage"] == stage:
        run.restore(model, optimizer)
        scaler.load_state_dict(state["scaler"])
    else:
        state.update(stage=stage, step=0, best_step=0, best=dev()["mean"], scaler=scaler.state_dict())
        save()  # first: what a checkpoint calls the best is there
        run.checkpoint(model, optimizer)
    begin, step, losses, pairs, seconds = state["step"], 0, [], 0, 0.0
    bar = common.progress(total=total, initial=begin, desc=stage, unit="step")
    for epoch in range(epochs):
        for rows in common.batches(lengths, args.batch_size, [args.seed, epoch]):
            step += 1
            if step <= begin:  # what --resume finds done is passed over
                continue
            if step > total or step - state["best_step"] > args.patience * args.eval_steps:
                return bar.close()
            clock = time.perf_counter()
            torch.manual_seed(args.seed * 1_000_003 + step)  # dropout from seed and step alone: a resumed run is the same run
            model.train()
            with torch.autocast(args.device.split(":")[0], dtype, enabled=dtype is not None):
                loss = loss_of(rows)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
            pairs, seconds = pairs + len(rows), seconds + time.perf_counter() - clock
            evaluate = step % args.eval_steps == 0 or step == total
            score = dev()["mean"] if evaluate and math.isfinite(losses[-1]) else None
            if not math.isfinite(losses[-1]) or not math.isfinite(score or 0):
                bar.close()
                raise common.DataError(f"step {step} of stage {stage}: the loss is {losses[-1]}, the dev score {score}; stopped, "
                                       f"{run.folder} keeps the best ({state['best']:.2f}) and the checkpoint of step {state['step']}")
            if evaluate or step % 25 == 0:
                loss, losses = sum(losses) / len(losses), []
                run.log(stage=stage, step=step, loss=loss, lr=lr, pairs_per_second=round(pairs / seconds, 1), **{"dev": score} if evaluate else {})
            if evaluate:
                if score > state["best"]:
                    state |= dict(best=score, best_step=step)
                    save()
                state |= dict(step=step, scaler=scaler.state_dict())
                run.checkpoint(model, optimizer)
            bar.set_postfix_str(f"loss {loss:.4f}, {pairs / seconds:.0f} pairs/s, best dev {state['best']:.2f}", refresh=False)
            bar.update()
    bar.close()


def benchmark(student, teacher, device):
    """Tables 3 and 4 on this machine: seconds, cross-encoder against student; what is extrapolated from 500 pairs is marked."""
    def seconds(work, *arguments):
        begin, result = time.perf_counter(), work(*arguments)
        result.sum().item()  # waits for the device
        return time.perf_counter() - begin, result

    sentences = demo.sentences(1000)
    pairs = common.Tokens(teacher, list(zip(sentences[:500], sentences[500:])), 128)
    common.encode(teacher, pairs, device), embed(student, sentences[:100])  # warms up
    pair = seconds(common.encode, teacher, pairs, device)[0] / 500
    offline, vectors = seconds(embed, student, sentences)
    online = min(seconds(embed, student, sentences[i:i + 1])[0] for i in range(10))
    matrix = seconds(student.head.score_matrix, vectors, vectors)[0]
    catalogue = seconds(student.head.score_catalogue, vectors[0], vectors.repeat(100, 1))[0]
    rows = {}
    for title, count, psi, f in (("Table 3, 1000 x 1000", 10**6, offline, matrix), ("Table 4, 1 x 100,000", 10**5, online, catalogue)):
        rows[title] = {"cross-encoder, s (extrapolated)": count * pair, "psi, s": psi, "f, s": f, "factor": count * pair / (psi + f)}
        rows[title]["paper's factor"] = 934 if count == 10**6 else 13594
    print(common.table(rows))
    for name, model in (("cross-encoder", teacher.model), ("DSE's encoder", student.encoder.model)):
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        print(f"{name}: {model.config.num_hidden_layers} layers of {model.config.hidden_size}, {millions:.1f} million parameters")


def parse_args():
    parser = common.ArgumentParser(description="DSE: distil a cross-encoder into a sentence encoder. Defaults are the paper's; sections in brackets.")
    add, cuda = parser.add_argument, torch.cuda.is_available()
    add("--task", choices=tuple(glue.TASKS), default="mrpc", help="%(default)s")
    add("--glue", help="folder with GLUE's MRPC, STS-B, ...; without it the hub's SetFit data sets")
    add("--teacher", default="bert-large-uncased", help="a classifier, or a plain encoder, which is fine-tuned first; %(default)s (3.3)")
    add("--student", help="folder or hub name; the teacher's own before fine-tuning where it is not given (3.4)")
    add("--student-layers", help="keep these layers only, zero-based: 1,3,5")
    add("--alpha", type=float, default=0.5, help="weight of the teacher's logits, 1 less that of the labels (eq. 2); %(default)s")
    add("--freeze-encoder", action="store_true", help="train the similarity head alone (4.1.1)")
    add("--teacher-epochs", type=int, default=3, help="%(default)s")
    add("--teacher-lr", type=float, default=2e-5, help="%(default)s")
    add("--output", default="runs/dse", help="becomes the best student's folder; %(default)s")
    add("--epochs", type=int, default=8, help="%(default)s (4.1.1)")
    add("--batch-size", type=int, default=32, help="pairs; %(default)s (4.1.1)")
    add("--lr", type=float, help="2e-5, for stsb 1e-5 (4.1.1)")
    add("--max-steps", type=int, default=0, help="end a stage after so many steps; 0: no")
    add("--max-length", type=int, default=128, help="tokens that are read, of a pair or a sentence; %(default)s")
    add("--eval-steps", type=int, default=100, help="steps between dev scores, and checkpoints; %(default)s")
    add("--patience", type=int, default=20, help="end a stage after so many dev scores without progress; %(default)s")
    add("--seed", type=int, default=0, help="%(default)s")
    add("--device", default="cuda" if cuda else "cpu", help="%(default)s")
    add("--precision", choices=("fp32", "bf16", "fp16"), default="bf16" if cuda and torch.cuda.is_bf16_supported() else "fp32", help="%(default)s")
    add("--resume", action="store_true", help="go on with the run in --output, or begin it")
    add("--overwrite", action="store_true", help="throw away the run in --output")
    add("--benchmark", action="store_true", help="Tables 3 and 4 on this machine; all-MiniLM-L6-v2 and its layers 1,3,5 where nothing else is given")
    add("--demo", action="store_true", help="generated pairs, all-MiniLM-L6-v2 and its layers 1,3,5; five minutes on a CPU")
    known = parser.parse_known_args()[0]
    if known.demo or known.benchmark:
        parser.set_defaults(teacher=common.MINILM, student_layers="1,3,5")
    if known.demo:
        parser.set_defaults(task="stsb", glue="demo", output="runs/dse-demo", teacher_epochs=2, teacher_lr=1e-4, epochs=4, lr=2e-4, eval_steps=40)
    return parser.parse_args()


def main():
    args = parse_args()
    if args.precision != "fp32" if args.device == "cpu" else not (args.device.startswith("cuda") and torch.cuda.is_available()):
        raise common.DataError(f"--device {args.device} --precision {args.precision}: expected cpu and fp32, or cuda on a machine that has it")
    args.lr = args.lr or (1e-5 if args.task == "stsb" else 2e-5)
    run, classes = common.Run(args, ("seed", "max_steps", "alpha")) if not args.benchmark else None, len(glue.TASKS[args.task][1] or "1")
    if not args.alpha <= 1:
        raise common.DataError(f"--alpha {args.alpha}: expected a number from 0 to 1")
    torch.manual_seed(args.seed)  # the heads start at random, the student's first
    encoder = common.load_encoder(args.student or args.teacher, "dse.last_four", layers=args.student_layers)
    student = Student(encoder.requires_grad_(not args.freeze_encoder), classes).to(args.device)
    teacher = CrossEncoder(args.teacher, args.task, args.max_length).to(args.device).eval()
    if args.benchmark:
        return benchmark(student, teacher, args.device)
    sets = glue.read_task(args.glue, args.task)
    tokens = {name: [common.Tokens(encoder, side, args.max_length) for side in (pairs.first, pairs.second)] for name, pairs in sets.items()}
    joined = {name: common.Tokens(teacher, list(zip(pairs.first, pairs.second)), args.max_length) for name, pairs in sets.items()}
    labels = torch.from_numpy(sets.pop("train").labels).to(args.device)
    def table(logits_of, names=tuple(sets)):  # Table 1's metrics, and their mean, without dev's where there is a test set
        row = {f"{name} {metric}": value for name in names for metric, value in glue.metrics(logits_of(name), sets[name].labels, args.task).items()}
        return row | {"mean": float(np.mean([value for name, value in row.items() if len(names) == 1 or not name.startswith("dev ")]))}
    def of_teacher(name):
        return common.encode(teacher.eval(), joined[name], args.device)
    def of_student(name):
        return student.head.score_pairs(*(embed(student, side) for side in tokens[name])).cpu().numpy()
    def teacher_loss(rows):
        return dse_loss(teacher(*joined["train"].batch(rows, args.device)), 0, labels[rows], 0, args.task)
    def student_loss(rows):
        student.encoder.train(not args.freeze_encoder)
        u, v = (student.embed(*side.batch(rows, args.device)) for side in tokens["train"])
        return dse_loss(student.head(u, v), torch.from_numpy(targets[rows]).to(args.device), labels[rows], args.alpha, args.task)

    state = run.start()
    if not state:
        cosine = {name: F.cosine_similarity(*(embed(student, side) for side in tokens[name])).cpu().numpy() for name in sets}
        logits = glue.cosine_logits(cosine, sets["dev"].labels, args.task)
        state |= dict(stage="", scores={"untrained, cosine": table(logits.get)} if logits else {})
    if teacher.fresh:
        if state["stage"] in ("", "teacher"):
            train(teacher, "teacher", joined["train"].lengths, teacher_loss, lambda: table(of_teacher, ["dev"]),
                  lambda: teacher.save(run.folder / "teacher"), run, args, args.teacher_epochs, args.teacher_lr)
        teacher = CrossEncoder(run.folder / "teacher", args.task, args.max_length).to(args.device)
    if state["stage"] != "done":
        state["scores"]["teacher"] = table(of_teacher)
        targets = common.teacher_embeddings(teacher.eval(), teacher, joined["train"], args.device, "logits")
        train(student, "student", tokens["train"][0].lengths + tokens["train"][1].lengths, student_loss, lambda: table(of_student, ["dev"]),
              lambda: student.save(run.folder), run, args, args.epochs, args.lr)
        student = load_student(run.folder, args.device)
        state["scores"]["student"] = table(of_student)
        for scores in state["scores"].values():
            scores["degradation %"] = 100 * (1 - scores["mean"] / state["scores"]["teacher"]["mean"])
    state["stage"] = "done"
    run.checkpoint()
    run.card(args.student or args.teacher, args.teacher, state["scores"], f"Distilled by `dse.py` (DSE, AAAI 2020), task: {args.task}.",
             "text-classification", None, "transformers")
    print(common.table(state["scores"]))


if __name__ == "__main__":
    common.run_main(main)
