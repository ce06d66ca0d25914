"""CKD, contrastive knowledge distillation, the method of DistilCSE.

Gao, Wu, Wang, Wang, Zang, Wang, Hu: "DistilCSE: Effective Knowledge Distillation For Contrastive Sentence Embeddings", arXiv:2112.05638.

Stage 1 (distill): on unlabelled sentences the student learns to find, by its own embedding of a sentence, the frozen teacher's
embedding of it among the teacher's embeddings of other sentences, those of the batch and of a memory bank of the batches before.
Stage 2 (finetune): on NLI triplets the student learns to find the entailed sentence among all entailed and contradicting ones.

  eq. 2, 3    mse_loss                            KD, the baseline of Table 2
  eq. 4 to 6  contrastive_distillation_loss       CKD; M of eq. 3 and 6 is Student.projection
  eq. 7       supervised_contrastive_loss         stage 2
  sec. 3.1    MemoryBank                          ring buffer of teacher embeddings
  Table 2     patient_loss                        PKD, the other baseline (Sun et al. 2019, arXiv:1908.09355): KD plus L_PT

Choices that the paper leaves open, or that this script makes otherwise:
  - The paper gives no temperature. Here it is fixed, 0.05 in both stages; the authors' code learns it in stage 1 (--learn-temperature).
  - News-5m was not released; --train is Wikipedia's 1M sentences of SimCSE unless you name your own.
  - As in the authors' code: Adam's betas 0.9, 0.98, gradient norm clipped at 1, cosine decay after a warm-up of a tenth of an epoch,
    64 tokens, M with a bias, a plain student read at [CLS] through its own pooler. The student is scored and saved without M.
  - The bank is emptied when an epoch begins: eq. 5 contrasts a sentence with other sentences, and what the last epoch left of the
    same sentence is none of them. So the bank holds at most an epoch's sentences less a batch.
  - The best student on dev is kept over both stages, the start of a stage included: one that stage 2 makes worse is not kept.
  - PKD pools hidden states as the student pools its last layer (Sun et al.: [CLS]), takes every (T/S)-th layer of the teacher, and a mean
    over H as eq. 2 does, so that its two parts weigh alike.
  - MetaKD, the third baseline, is left out: it needs labelled classes of several domains.

  python ckd.py --student bert-base-uncased                       the paper's setting: SimCSE-RoBERTa-large into 110M parameters
  python ckd.py --teacher MODEL --student-layers 1,3,5 --train my.txt --dev my-pairs.tsv --stage distill      shrink a model of your own
  python ckd.py --demo                                            two minutes on a CPU
"""
import math
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import common
import demo


def cosine(a, b):
    """f(u, v) of eq. 4 for all pairs of rows: [N, D], [M, D] -> [N, M]."""
    return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T


def contrastive_distillation_loss(student, teacher, queue, temperature):
    """Eq. 5 (eq. 6 when `student` is already mapped by M; eq. 4 when `queue` is None), mean over the batch.

    student [N, D] and teacher [N, D] embed the same N sentences, queue [Q, D] others, by the teacher; temperature > 0. Scalar >= 0.
    """
    keys = teacher if queue is None else torch.cat([teacher, queue])  # [N + Q, D]; the one place where keys come together
    return F.cross_entropy(cosine(student, keys) / temperature, torch.arange(len(student), device=student.device))


def mse_loss(student, teacher):
    """Eq. 2 (eq. 3 when `student` is mapped by M): squared error, mean over D, sum over the batch. [N, D] twice -> scalar."""
    return (student - teacher).square().mean(dim=1).sum()


def patient_loss(student, teacher):
    """PKD's L_PT (Sun et al.): hidden states of unit length, squared error, mean over H, sum over S layers and N. [N, S, H] twice -> scalar."""
    return (F.normalize(student, dim=-1) - F.normalize(teacher, dim=-1)).square().mean(dim=-1).sum()


def supervised_contrastive_loss(anchor, positive, hard_negative, temperature):
    """Eq. 7, mean over the batch: [N, D] each, all by the student; temperature > 0. Scalar >= 0."""
    return F.cross_entropy(cosine(anchor, torch.cat([positive, hard_negative])) / temperature,  # [N, 2N]
                           torch.arange(len(anchor), device=anchor.device))


def pool(states, attention_mask, pooling):
    """[N, L, H], [N, L] -> [N, H]: "cls", the state at [CLS], or "mean", the mean over the tokens that are not padding."""
    if pooling == "cls":
        return states[:, 0]
    mask = attention_mask.unsqueeze(-1)
    return (states * mask).sum(1) / mask.sum(1)


class Student(nn.Module):
    """An encoder, read as its folder states (a pooler is a head: dense and tanh on [CLS]); for stage 1 the map M, and the temperature."""

    def __init__(self, encoder, args, width=None, patient_width=None):
        super().__init__()
        self.encoder, hidden = encoder, encoder.model.config.hidden_size
        mapped = width and (args.projection or width != encoder.width)
        self.projection = nn.Linear(encoder.width, width) if mapped else nn.Identity()  # M of eq. 3 and 6
        self.patient_projection = nn.Linear(hidden, patient_width) if patient_width not in (None, hidden) else nn.Identity()
        self.log_temperature = nn.Parameter(torch.tensor(math.log(args.temperature)), requires_grad=args.learn_temperature)
        self.dtype = dict(fp32=None, bf16=torch.bfloat16, fp16=torch.float16)[args.precision]

    def forward(self, input_ids, attention_mask):
        """[N, L] twice -> embedding [N, D] in fp32, and the token states of every layer, a tuple of [N, L, H]."""
        with torch.autocast(input_ids.device.type, self.dtype, enabled=self.dtype is not None):
            output = self.encoder.model(input_ids, attention_mask, output_hidden_states=True)
            embedding = self.encoder.heads(pool(output.last_hidden_state, attention_mask, self.encoder.pooling)).float()
        return F.normalize(embedding, dim=-1) if self.encoder.normalize else embedding, output.hidden_states


class MemoryBank:
    """The last `size` teacher embeddings [size, width], newest over oldest: a ring buffer on the device."""

    def __init__(self, size, width, device):
        self.buffer, self.count = torch.zeros(size, width, device=device), 0

    def enqueue(self, embeddings):
        embeddings = embeddings[-len(self.buffer):]
        slots = torch.arange(self.count, self.count + len(embeddings), device=self.buffer.device) % len(self.buffer)
        self.buffer[slots] = embeddings
        self.count += len(embeddings)

    def embeddings(self):
        """[Q, width], Q <= size; None while empty."""
        return self.buffer[:min(self.count, len(self.buffer))] if self.count else None

    def clear(self):
        self.count = 0


def patient_states(hidden_states, layers, attention_mask, pooling):
    """The pooled token states of some layers (0 is the embedding layer), one after the other: [N, len(layers) * H]."""
    return torch.cat([pool(hidden_states[i], attention_mask, pooling).float() for i in layers], dim=1)


def read_teacher(teacher, layers):
    """What the teacher is asked for, once a sentence: its embedding [N, D], and behind it, for PKD, the patient states of `layers`."""
    def read(input_ids, attention_mask):
        states = teacher.model(input_ids, attention_mask, output_hidden_states=True).hidden_states
        return torch.cat([teacher(input_ids, attention_mask), patient_states(states, layers, attention_mask, teacher.pooling)], dim=1)
    return read if layers else teacher


def distill(student, tokens, targets, width, dev_set, run, args):
    """Stage 1 on n sentences. targets [n, width + P]: the teacher's embedding of each, and for PKD its patient states behind it."""
    device, depth = args.device, student.encoder.model.config.num_hidden_layers
    bank = MemoryBank(args.queue_size, width, device) if args.queue_size else None

    def teach(rows):
        return torch.from_numpy(targets[rows]).to(device)  # [N, width + P]

    def loss_of(rows):
        input_ids, mask = tokens.batch(rows, device)
        embedding, states = student(input_ids, mask)
        student_embedding, target = student.projection(embedding), teach(rows)  # h^S M, h^T
        if args.objective == "ckd":
            temperature = student.log_temperature.exp().clamp(min=min(0.01, args.temperature))  # a floor for a learned one
            return contrastive_distillation_loss(student_embedding, target, bank and bank.embeddings(), temperature)
        if args.objective == "kd" or depth == 1:  # PKD leaves out the last layer: of one layer KD is left
            return mse_loss(student_embedding, target)
        patient, teacher_patient = patient_states(states, range(1, depth), mask, student.encoder.pooling), target[:, width:]
        patient = student.patient_projection(patient.unflatten(1, (depth - 1, -1)))  # [N, S - 1, H of the teacher]
        return mse_loss(student_embedding, target[:, :width]) + patient_loss(patient, teacher_patient.unflatten(1, (depth - 1, -1)))

    train(student, "distill", tokens.lengths, loss_of, dev_set, run, args, args.epochs, args.batch_size, args.lr, bank, teach)


def finetune(student, triplets, dev_set, run, args):
    """Stage 2 on n NLI triplets: the Tokens of the anchors, the positives and the hard negatives."""
    def loss_of(rows):
        anchor, positive, hard_negative = (student(*tokens.batch(rows, args.device))[0] for tokens in triplets)
        return supervised_contrastive_loss(anchor, positive, hard_negative, args.finetune_temperature)

    train(student, "finetune", sum(tokens.lengths for tokens in triplets), loss_of, dev_set, run, args,
          args.finetune_epochs, args.finetune_batch_size, args.finetune_lr)


def train(student, stage, lengths, loss_of, dev_set, run, args, epochs, batch_size, peak_lr, bank=None, teach=None):
    """The loop of both stages: loss_of(rows) is the loss of a batch, teach(rows) what it leaves in the bank. The best encoder is saved."""
    epoch_steps = math.ceil(len(lengths) / batch_size)
    total, warmup = min(epochs * epoch_steps, args.max_steps or math.inf), max(1, epoch_steps // 10)
    optimizer = torch.optim.Adam([p for p in student.parameters() if p.requires_grad], lr=peak_lr, betas=(0.9, 0.98), fused=True)
    scaler, state = torch.amp.GradScaler(args.device.split(":")[0], enabled=args.precision == "fp16"), run.state
    if state["stage"] == stage:
        run.restore(student, optimizer)
        scaler.load_state_dict(state["scaler"])
    else:
        state.update(stage=stage, step=0, best_step=0, scaler=scaler.state_dict())
        run.checkpoint(student, optimizer)
    begin, step, losses, sentences, seconds = state["step"], 0, [], 0, 0.0
    bar = common.progress(total=total, initial=begin, desc=stage, unit="step")
    student.train()
    for epoch in range(epochs):
        if bank:
            bank.clear()
        for rows in common.batches(lengths, batch_size, [args.seed, epoch]):
            step += 1
            if step > begin:  # what --resume finds done is passed over, but for what it left in the bank
                if step > total or step - state["best_step"] > args.patience * epoch_steps:
                    return bar.close()
                clock = time.perf_counter()
                torch.manual_seed(args.seed * 1_000_003 + step)  # dropout from seed and step alone: a resumed run is the same run
                decay = (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup))) / 2
                lr = optimizer.param_groups[0]["lr"] = peak_lr * (step / warmup if step < warmup else decay)
                loss = loss_of(rows)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(student.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                losses.append(loss.item())
                sentences, seconds = sentences + len(rows), seconds + time.perf_counter() - clock
            if bank:
                bank.enqueue(teach(rows))
            if step <= begin:
                continue
            evaluate, score = step % args.eval_steps == 0 or step == total, None
            if evaluate and math.isfinite(losses[-1]):
                score, = common.spearman(student.encoder, dev_set).values()
            if not math.isfinite(losses[-1]) or not math.isfinite(score or 0):
                bar.close()
                raise common.DataError(f"step {step} of stage {stage}: the loss is {losses[-1]}, the dev score {score}; stopped, "
                                       f"{run.folder} keeps its best student ({state['best']:.2f}) and the checkpoint of step {state['step']}")
            if evaluate or step % 25 == 0:
                loss = sum(losses) / len(losses)
                run.log(stage=stage, step=step, loss=loss, lr=lr, temperature=student.log_temperature.exp().item(),
                        sentences_per_second=round(sentences / seconds, 1), **{"dev": score} if evaluate else {})
                losses = []
            if evaluate:
                if score > state["best"]:
                    state |= dict(best=score, best_step=step)
                    student.encoder.save(run.folder)
                state |= dict(step=step, scaler=scaler.state_dict())
                run.checkpoint(student, optimizer)
            shown = f"loss {loss:.4f}, lr {lr:.1e}, {sentences / seconds:.0f} sentences/s, best dev {state['best']:.2f}"
            bar.set_postfix_str(shown, refresh=False)
            bar.update()
    bar.close()


def parse_args():
    parser = common.ArgumentParser(description="CKD (DistilCSE): distil a sentence encoder. Defaults are the paper's; sections in brackets.")
    add, cuda, poolings = parser.add_argument, torch.cuda.is_available(), ("mean", "cls", "pooler")
    add("--teacher", default="princeton-nlp/sup-simcse-roberta-large", help="folder or hub name; %(default)s (4.2)")
    add("--student", help="folder or hub name; the teacher itself where only --student-layers is given")
    add("--student-layers", help="keep these layers only, zero-based: 1,3,5")
    add("--pooling", choices=poolings, help="how the student is read; as its folder says, else pooler")
    add("--teacher-pooling", choices=poolings, help="how the teacher is read; as its folder says, else mean")
    add("--projection", action="store_true", help="map the student by M (eq. 6) also where it is as wide as the teacher")
    add("--stage", choices=("distill", "finetune", "both"), default="both", help="stage 1 (3.1), stage 2 (3.2); %(default)s")
    add("--objective", choices=("ckd", "kd", "pkd"), default="ckd", help="loss of stage 1, the rows of Table 2; %(default)s")
    add("--train", default="wiki1m_for_simcse.txt", help="stage 1: sentences, one a line, .gz too; %(default)s")
    add("--triplets", default="nli_for_simcse.csv", help="stage 2: CSV, columns sent0,sent1,hard_neg; %(default)s")
    add("--dev", help="graded pairs (TSV) that choose the best student; STS-B dev of --senteval")
    add("--senteval", help="SentEval's folder or tar; senteval.tar where --dev is not given")
    add("--skip-test", action="store_true", help="score dev only, not SentEval's seven test sets")
    add("--output", default="runs/ckd", help="becomes the best student's folder; %(default)s")
    add("--epochs", type=int, default=20, help="stage 1; %(default)s (4.2)")
    add("--batch-size", type=int, default=512, help="stage 1; %(default)s (4.2)")
    add("--lr", type=float, help="stage 1; 2e-4 for 110M parameters, 3e-4 for fewer (4.2)")
    add("--temperature", type=float, default=0.05, help="stage 1, tau of eq. 5; %(default)s")
    add("--learn-temperature", action="store_true", help="learn it, as the authors' code does")
    add("--queue-size", type=int, help="memory bank; 65536 (4.2), or what an epoch can fill; 0: none, eq. 4")
    add("--finetune-epochs", type=int, default=5, help="stage 2; %(default)s (4.2)")
    add("--finetune-batch-size", type=int, default=128, help="stage 2; %(default)s (4.2)")
    add("--finetune-lr", type=float, help="stage 2; 1e-5 for 52M parameters, else 5e-5 (4.2)")
    add("--finetune-temperature", type=float, default=0.05, help="stage 2, tau of eq. 7; %(default)s")
    add("--dropout", type=float, help="the student's; its own")
    add("--max-steps", type=int, default=0, help="end a stage after so many steps; 0: no")
    add("--max-length", type=int, default=64, help="tokens of a training sentence that are read; %(default)s")
    add("--eval-steps", type=int, default=125, help="steps between dev scores, and checkpoints; %(default)s (4.2)")
    add("--patience", type=int, default=3, help="stop after so many epochs without progress on dev; %(default)s (4.2)")
    add("--seed", type=int, default=0, help="%(default)s")
    add("--device", default="cuda" if cuda else "cpu", help="%(default)s")
    bf16 = cuda and torch.cuda.is_bf16_supported()
    add("--precision", choices=("fp32", "bf16", "fp16"), default="bf16" if bf16 else "fp32", help="%(default)s")
    add("--resume", action="store_true", help="go on with the run in --output, or begin it")
    add("--overwrite", action="store_true", help="throw away the run in --output")
    add("--demo", action="store_true", help="generated data, all-MiniLM-L6-v2 and its layers 1,3,5; two minutes on a CPU")
    if parser.parse_known_args()[0].demo:
        parser.set_defaults(**demo.DEFAULTS, triplets="demo", output="runs/ckd-demo", epochs=1, batch_size=64, lr=1e-4, eval_steps=100,
                            finetune_epochs=1, finetune_batch_size=64, finetune_lr=2e-5)
    return parser.parse_args()


def main():
    args = parse_args()
    if not (args.student or args.student_layers):
        raise common.DataError("give --student, or --student-layers for a student made of layers of the teacher")
    if (args.dropout or 0) >= 1:
        raise common.DataError(f"--dropout {args.dropout}: expected a number from 0 to below 1")
    if args.precision != "fp32" if args.device == "cpu" else not (args.device.startswith("cuda") and torch.cuda.is_available()):
        raise common.DataError(f"--device {args.device} --precision {args.precision}: expected cpu and fp32, or cuda on a machine that has it")
    run, stages = common.Run(args), ("distill", "finetune") if args.stage == "both" else (args.stage,)  # writes nothing yet

    senteval = common.resolve(args.senteval or "senteval.tar") if args.senteval or not args.dev else None
    test_sets = demo.test() if args.demo else common.read_sts(senteval) if senteval and not args.skip_test else {}
    if args.dev:
        dev_set = demo.dev() if args.dev == "demo" else {"dev": common.read_graded_pairs(args.dev)}
    else:
        dev_set = common.read_sts(senteval, "dev")

    def load_student(*how):
        encoder = common.load_encoder(*how).to(args.device)
        for module in encoder.modules():
            if isinstance(module, nn.Dropout) and args.dropout is not None:
                module.p = args.dropout
        return encoder

    def score(encoder, title):
        return common.spearman(encoder, dev_set, title) | (common.spearman(encoder, test_sets, title) if test_sets else {})

    own = (args.student, args.pooling, "pooler") if args.student else (args.teacher, args.pooling or args.teacher_pooling, "mean")
    encoder = load_student(*own, args.student_layers)
    millions = sum(p.numel() for p in encoder.parameters()) / 1e6
    args.lr = args.lr or (2e-4 if millions > 80 else 3e-4)
    args.finetune_lr = args.finetune_lr or (1e-5 if 30 < millions <= 80 else 5e-5)
    if "distill" in stages:
        sentences = demo.sentences(10_000) if args.train == "demo" else common.read_sentences(common.resolve(args.train))
        teacher = common.load_encoder(args.teacher, args.teacher_pooling).to(args.device).eval()
        fits = max(0, len(sentences) - args.batch_size)
        if args.objective == "ckd" and (args.queue_size or 0) > fits:
            raise common.DataError(f"--queue-size {args.queue_size}: {len(sentences)} sentences, less a batch, fill {fits} in an epoch")
        if args.objective != "ckd":
            args.queue_size = 0
        elif args.queue_size is None:
            args.queue_size = min(65536, fits)
            print(f"memory bank of {args.queue_size} embeddings{', all that an epoch fills' * (args.queue_size == fits)}", file=sys.stderr)
    if "finetune" in stages:
        rows = demo.triplets() if args.triplets == "demo" else common.read_triplets(common.resolve(args.triplets))
        triplets = [common.Tokens(encoder, column, args.max_length) for column in zip(*rows)]

    state = run.start()
    if not state:
        scores = {"teacher": score(teacher, "teacher")} if "distill" in stages else {}
        scores["student before"] = score(encoder, "student before")
        state |= dict(stage="", scores=scores, best=next(iter(scores["student before"].values())))
        encoder.save(run.folder)
    if "distill" in stages and state["stage"] in ("", "distill"):
        depth, teacher_depth = encoder.model.config.num_hidden_layers, teacher.model.config.num_hidden_layers
        patient = [layer * teacher_depth // depth for layer in range(1, depth)] if args.objective == "pkd" else []
        targets = common.teacher_embeddings(teacher, read_teacher(teacher, patient), common.Tokens(teacher, sentences, args.max_length),
                                            args.device, f"layers {patient}" if patient else "")
        torch.manual_seed(args.seed)  # M starts at random
        student = Student(encoder, args, teacher.width, teacher.model.config.hidden_size if patient else None).to(args.device)
        distill(student, common.Tokens(encoder, sentences, args.max_length), targets, teacher.width, dev_set, run, args)
        state["scores"]["student after stage 1"] = score(load_student(run.folder), "student after stage 1")
    if "finetune" in stages and state["stage"] != "done":
        finetune(Student(load_student(run.folder), args).to(args.device), triplets, dev_set, run, args)
        state["scores"]["student after stage 2"] = score(load_student(run.folder), "student after stage 2")
    state["stage"] = "done"
    run.checkpoint()
    run.card(args.student or args.teacher, args.teacher, state["scores"],
             f"Distilled by `ckd.py` (DistilCSE, arXiv:2112.05638), stages: {' and '.join(stages)}, objective: {args.objective}.")
    print(common.table(state["scores"]))


if __name__ == "__main__":
    common.run_main(main)
