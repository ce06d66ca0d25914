"""IBKD, information bottleneck knowledge distillation, for similarity (--task sts) and dense retrieval (--task dr).

Zhang, Long, Li, Xie: "Text Representation Distillation via Information Bottleneck Principle", EMNLP 2023.

Stage 1 (distill): the student's embedding S of a text is to say what the teacher's embedding T says, and of the text X no more than that needs.
InfoNCE against the other texts of a batch bounds from below what S says of T; HSIC, a kernel measure of dependence, stands for what S says of X,
which is the mean of the student's own input embeddings. Stage 2 (finetune): the same with labels: an anchor, its positive, hard negatives.

  sec. 3.1   info_nce                  S mapped by W, Student.mapping, to the teacher's width
  eq. 6, 7   hsic, gram_matrix         kernels rbf, imq, linear
  eq. 8      distill                   InfoNCE + beta_1 HSIC(X, S)
  eq. 9, 10  finetune, supervised_info_nce
  eq. 11     --dim                     W_proj, a dense head of the student from stage 2 on
  Table 1    TABLE_1                   learning rate, batch size, epochs, temperature
  sec. 4.2   crd_loss, principal_components (HPD); CKD is beta_1 = beta_2 = 0

Choices that the paper leaves open, or that this script makes otherwise:
  - Eq. 7 is printed as exp(gamma |x - y|); the RBF kernel, and the authors' code, is exp(-gamma |x - y|^2). As there, IMQ is 1 / sqrt(|x - y|^2 +
    gamma), linear the cosine. The code divides HSIC by (l - 1)^2; here, as in eq. 6, by l^2.
  - Sec. 3.1 sums over "other samples": j != i, though its sum is printed over all; so the positive stands in the denominator once.
  - HSIC is taken, as printed, of X as it is and of S as its folder gives it, unit length where that ends in Normalize (--hsic-vectors unit: both).
  - Similarity is the cosine after W. W starts as the identity where the widths agree. S is read without W, as the widths in Table 2 say; the code
    keeps W in the student (--keep-mapping), which can then query an index that the teacher built.
  - Eq. 10 contrasts an anchor with its own hard negatives; the code with those of the whole batch (--batch-negatives).
  - Every tenth training query of a retrieval task chooses the best student, by MRR@10 among --dev-passages, and does not train.
  - CRD's negatives are those of the batch, not of a memory. As in the code: Adam, linear decay to zero, 128 tokens, gradient norm clipped at 1.

  python ibkd.py --student nreimers/MiniLM-L6-H384-uncased, or --demo             the paper's STS setting, or two minutes on a CPU
  python ibkd.py --task dr --teacher Luyu/co-condenser-marco-retriever --student nreimers/MiniLM-L6-H384-uncased              MS MARCO
"""
import math
import time
from collections import OrderedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import common
import demo
import eval_retrieval

TABLE_1 = {("sts", "distill"): (1e-4, 256, 10, 0.1), ("sts", "finetune"): (3e-5, 256, 3, 0.05),  # learning rate, batch size, epochs, temperature
           ("dr", "distill"): (1e-4, 128, 3, 0.1), ("dr", "finetune"): (1e-5, 128, 3, 0.05)}


def cosine(a, b):
    """For all pairs of rows: [N, D], [M, D] -> [N, M]."""
    return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T


def gram_matrix(z, kernel, gamma):
    """Eq. 7: [l, D] -> [l, l]; kernel rbf or imq, which read gamma > 0, or linear (the cosine)."""
    if kernel == "linear":
        return cosine(z, z)
    squares = z.square().sum(dim=1)
    distance = (squares[:, None] + squares - 2 * z @ z.T).clamp(min=0)  # |x - y|^2
    return torch.exp(-gamma * distance) if kernel == "rbf" else torch.rsqrt(distance + gamma)


def hsic(gram_x, gram_s):
    """Eq. 6: two Gram matrices [l, l] of l samples -> scalar >= 0, 0 where nothing in one tells of the other (l to infinity)."""
    centering = torch.eye(len(gram_x)).to(gram_x) - 1 / len(gram_x)  # H
    return torch.trace(gram_x @ centering @ gram_s @ centering) / len(gram_x) ** 2


def info_nce(student, teacher, temperature):
    """Sec. 3.1, as a loss, mean over the batch: student [N, D], mapped by W, teacher [N, D] of the same texts. Scalar >= 0."""
    return F.cross_entropy(cosine(student, teacher) / temperature, torch.arange(len(student), device=student.device))


def supervised_info_nce(anchor, positive, negatives, temperature, batch_negatives=False):
    """Eq. 10, as a loss, mean over the batch: anchor, positive [N, D], negatives [N, K, D], each anchor against its own K or all N K."""
    against = cosine(anchor, negatives.flatten(0, 1)) if batch_negatives else F.cosine_similarity(anchor.unsqueeze(1), negatives, dim=-1)
    logits = torch.cat([cosine(anchor, positive), against], dim=1) / temperature
    return F.cross_entropy(logits, torch.arange(len(anchor), device=anchor.device))


def crd_loss(student, teacher, temperature):
    """CRD (Tian et al. 2019): is a pair of one text or two? Odds e^(cos / tau) to N, the strangers of a batch. [N + 1, D] twice -> scalar."""
    logits = cosine(student, teacher) / temperature - math.log(max(1, len(student) - 1))
    return F.binary_cross_entropy_with_logits(logits, torch.eye(len(logits)).to(logits), reduction="none").sum(dim=1).mean()


def principal_components(vectors, dim):
    """HPD (Zhao et al. 2022): [n, D] -> mean [D] and the `dim` directions [D, dim] along which the vectors vary most."""
    directions = np.linalg.eigh(np.cov(vectors, rowvar=False)).eigenvectors[:, ::-1]  # by falling variance
    return vectors.mean(axis=0), directions[:, :dim].astype(np.float32)


def add_head(encoder, width):
    """A linear layer from the encoder's width to `width`, kept in it as a dense head."""
    linear = nn.Linear(encoder.width, width, bias=False)
    encoder.heads.append(nn.Sequential(OrderedDict(linear=linear, activation=nn.Identity())))
    encoder.width = width
    return linear


class Student(nn.Module):
    """An encoder, read as its folder states. For stage 1 also W (sec. 3.1), dropped afterwards, or `keep` as the encoder's last head."""

    def __init__(self, encoder, precision, width=None, keep=False):
        super().__init__()
        self.encoder, self.heads, same = encoder, encoder.heads[:], width == encoder.width  # the heads that make S
        self.dtype = dict(fp32=None, bf16=torch.bfloat16, fp16=torch.float16)[precision]
        self.mapping = nn.Identity() if not width else add_head(encoder, width) if keep else nn.Linear(encoder.width, width, bias=False)
        if width and same:
            nn.init.eye_(self.mapping.weight)

    def forward(self, input_ids, attention_mask):
        """[N, L] twice -> X [N, H], the mean of the embedding layer's output, and S [N, D], both fp32."""
        with torch.autocast(input_ids.device.type, self.dtype, enabled=self.dtype is not None):
            states, mask = self.encoder.model(input_ids, attention_mask, output_hidden_states=True).hidden_states, attention_mask.unsqueeze(-1)
            mean_first, mean_last = ((layer * mask).sum(1) / mask.sum(1) for layer in (states[0], states[-1]))
            s = self.heads(states[-1][:, 0] if self.encoder.pooling == "cls" else mean_last)
        return mean_first.float(), F.normalize(s.float(), dim=1) if self.encoder.normalize else s.float()


def distill(student, tokens, targets, run, args, dev):
    """Stage 1 on n texts: targets [n, D], the teacher's embedding of each (for HPD its principal components)."""
    def loss_of(rows):
        x, s = student(*tokens.batch(rows, args.device))
        teacher, mapped = torch.from_numpy(targets[rows]).to(args.device), student.mapping(s)
        if args.objective in ("mse", "hpd"):
            return {"mse": F.mse_loss(mapped, teacher)}
        if args.objective == "crd":
            return {"crd": crd_loss(mapped, teacher, args.temperature)}
        return {"info_nce": info_nce(mapped, teacher, args.temperature)} | bottleneck(args.beta1, x, s, args)

    train(student, "distill", tokens.lengths, loss_of, run, args, dev, args.epochs, args.batch_size, args.lr)


def finetune(student, anchors, others, positive, negatives, run, args, dev):
    """Stage 2 on n anchors: `others`, Tokens of the texts that they are compared with; positive [n], negatives [n, K], rows of `others`."""
    def loss_of(rows):
        x, s = student(*anchors.batch(rows, args.device))
        texts = np.concatenate([positive[rows], negatives[rows].ravel()])
        order = np.argsort(others.lengths[texts], kind="stable")  # in parts of like length, so that they need little padding
        parts = [student(*others.batch(texts[part], args.device))[1] for part in np.array_split(order, math.ceil(len(texts) / 32))]
        s_others = torch.cat(parts)[np.argsort(order)]
        s_positive, s_negative = s_others[:len(rows)], s_others[len(rows):].unflatten(0, (len(rows), -1))
        return {"info_nce": supervised_info_nce(s, s_positive, s_negative, args.finetune_temperature, args.batch_negatives)} \
            | bottleneck(args.beta2, x, s, args)

    train(student, "finetune", anchors.lengths, loss_of, run, args, dev, args.finetune_epochs, args.finetune_batch_size, args.finetune_lr)


def bottleneck(beta, x, s, args):
    """beta HSIC(X, S) of a batch, the second term of eq. 8 and 9: [l, H], [l, D] -> {name: scalar}."""
    x, s = (F.normalize(z, dim=1) if args.hsic_vectors == "unit" else z for z in (x, s))
    return {"hsic": beta * hsic(gram_matrix(x, args.kernel, args.gamma), gram_matrix(s, args.kernel, args.gamma))}


def train(student, stage, lengths, loss_of, run, args, dev, epochs, batch_size, peak_lr):
    """The loop of both stages: loss_of(rows) gives the terms of a batch's loss; the best encoder by the first of dev(encoder) is saved."""
    total, state = min(epochs * math.ceil(len(lengths) / batch_size), args.max_steps or math.inf), run.state
    optimizer = torch.optim.Adam([p for p in student.parameters() if p.requires_grad], lr=peak_lr, fused=True)
    scaler = torch.amp.GradScaler(args.device.split(":")[0], enabled=args.precision == "fp16")
    if state["stage"] == stage:
        run.restore(student, optimizer)
        scaler.load_state_dict(state["scaler"])
    else:
        state.update(stage=stage, step=0, best_step=0, best=next(iter(dev(student.encoder).values())), scaler=scaler.state_dict())
        run.checkpoint(student, optimizer)
    if not state["step"]:  # the best so far; with a new head it is another student than before
        student.encoder.save(run.folder)
    begin, step, losses, texts, seconds = state["step"], 0, [], 0, 0.0
    bar = common.progress(total=total, initial=begin, desc=stage, unit="step")
    student.train()
    for epoch in range(epochs):
        for rows in common.batches(lengths, batch_size, [args.seed, epoch]):
            step += 1
            if step <= begin:  # what --resume finds done is passed over
                continue
            if step > total or step - state["best_step"] > args.patience * args.eval_steps:
                return bar.close()
            clock = time.perf_counter()
            torch.manual_seed(args.seed * 1_000_003 + step)  # dropout from seed and step alone: a resumed run is the same run
            lr = optimizer.param_groups[0]["lr"] = peak_lr * (total + 1 - step) / total
            terms = loss_of(rows)
            loss = sum(terms.values())
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append([loss.item(), *(term.item() for term in terms.values())])
            texts, seconds = texts + len(rows), seconds + time.perf_counter() - clock
            evaluate = step % args.eval_steps == 0 or step == total
            score = next(iter(dev(student.encoder).values())) if evaluate and math.isfinite(losses[-1][0]) else None
            if not math.isfinite(losses[-1][0]) or not math.isfinite(score or 0):
                bar.close()
                raise common.DataError(f"step {step} of stage {stage}: the loss is {losses[-1][0]}, the dev score {score}; stopped, "
                                       f"{run.folder} keeps its best student ({state['best']:.2f}) and the checkpoint of step {state['step']}")
            if evaluate or step % 25 == 0:
                means, losses = dict(zip(("loss", *terms), np.mean(losses, axis=0))), []
                run.log(stage=stage, step=step, **means, lr=lr, sentences_per_second=round(texts / seconds, 1), **{"dev": score} if evaluate else {})
            if evaluate:
                if score > state["best"]:
                    state |= dict(best=score, best_step=step)
                    student.encoder.save(run.folder)
                state |= dict(step=step, scaler=scaler.state_dict())
                run.checkpoint(student, optimizer)
            bar.set_postfix_str(f"loss {loss:.4f}, lr {lr:.1e}, {texts / seconds:.0f} sentences/s, best dev {state['best']:.2f}", refresh=False)
            bar.update()
    bar.close()


def parse_args():
    parser = common.ArgumentParser(description="IBKD: distil a sentence encoder. Defaults are the paper's; sections and tables in brackets.")
    add, cuda, poolings = parser.add_argument, torch.cuda.is_available(), ("mean", "cls", "pooler")
    add("--task", choices=("sts", "dr"), default="sts", help="similarity, or dense retrieval; %(default)s")
    add("--teacher", default="princeton-nlp/sup-simcse-roberta-large", help="folder or hub name; %(default)s (4.2)")
    add("--student", help="folder or hub name; the teacher itself where only --student-layers is given")
    add("--student-layers", help="keep these layers only, zero-based: 1,3,5")
    add("--pooling", choices=poolings, help="how the student is read; as its folder says, else mean")
    add("--teacher-pooling", choices=poolings, help="how the teacher is read; as its folder says, else mean")
    add("--stage", choices=("distill", "finetune", "both"), default="both", help="stage 1, stage 2 (3.3); %(default)s")
    add("--objective", choices=("ibkd", "ckd", "mse", "crd", "hpd"), default="ibkd", help="loss of stage 1 (Tables 2 and 4); %(default)s")
    add("--kernel", choices=("rbf", "imq", "linear"), default="rbf", help="of HSIC (Table 4); %(default)s")
    add("--gamma", type=float, default=0.5, help="of the kernel; %(default)s (4.3)")
    add("--beta1", type=float, default=1.0, help="weight of HSIC in stage 1; %(default)s (4.3)")
    add("--beta2", type=float, default=0.5, help="weight of HSIC in stage 2; %(default)s (4.3)")
    add("--hsic-vectors", choices=("raw", "unit"), default="raw", help="HSIC of embeddings as they are, or of unit length; %(default)s")
    add("--dim", type=int, help="project to so many dimensions in stage 2 (3.4); for hpd in stage 1, 128")
    add("--keep-mapping", action="store_true", help="W stays in the student, which so embeds into the teacher's space")
    add("--batch-negatives", action="store_true", help="stage 2: against the hard negatives of the whole batch")
    add("--train", default="nli_for_simcse.csv", help="sts, stage 1: sentences, one a line, or triplets (.csv), taken apart; %(default)s (4.3)")
    add("--triplets", default="nli_for_simcse.csv", help="sts, stage 2: CSV, columns sent0,sent1,hard_neg; %(default)s (4.3)")
    add("--beir", default="BeIR/msmarco", help="dr: BEIR folder, or a data set on the hub; %(default)s (4.1)")
    add("--hard-negatives", type=int, default=8, help="dr: for each query; %(default)s (4.3)")
    add("--dev", help="sts: graded pairs (TSV) that choose the best student; STS-B dev of --senteval")
    add("--dev-passages", type=int, default=100_000, help="dr: passages searched for a dev score, the positives among them; %(default)s")
    add("--senteval", help="sts: SentEval's folder or tar; senteval.tar where --dev is not given")
    add("--skip-test", action="store_true", help="score dev only")
    add("--output", default="runs/ibkd", help="becomes the best student's folder; %(default)s")
    for prefix, stage in (("", "stage 1"), ("finetune-", "stage 2")):
        for name, kind in (("lr", float), ("batch-size", int), ("epochs", int), ("temperature", float)):
            add(f"--{prefix}{name}", type=kind, help=f"{stage}; by the task (Table 1)")
    add("--max-steps", type=int, default=0, help="end a stage after so many steps; 0: no")
    add("--max-length", type=int, default=128, help="tokens of a training text that are read; %(default)s")
    add("--eval-steps", type=int, default=500, help="steps between dev scores, and checkpoints; %(default)s")
    add("--patience", type=int, default=10, help="end a stage after so many dev scores without progress; %(default)s")
    add("--seed", type=int, default=0, help="%(default)s")
    add("--device", default="cuda" if cuda else "cpu", help="%(default)s")
    add("--precision", choices=("fp32", "bf16", "fp16"), default="bf16" if cuda and torch.cuda.is_bf16_supported() else "fp32", help="%(default)s")
    add("--resume", action="store_true", help="go on with the run in --output, or begin it")
    add("--overwrite", action="store_true", help="throw away the run in --output")
    add("--demo", action="store_true", help="generated data, all-MiniLM-L6-v2 and its layers 1,3,5; two minutes on a CPU")
    if parser.parse_known_args()[0].demo:
        parser.set_defaults(**demo.DEFAULTS, triplets="demo", output="runs/ibkd-demo", epochs=1, batch_size=64, lr=4e-4, eval_steps=50,
                            finetune_epochs=1, finetune_batch_size=64, finetune_lr=2e-5)
    return parser.parse_args()


def read_sts_task(args, stages):
    """-> texts of stage 1; anchors, others, positive, negatives of stage 2 (see finetune); functions that score an encoder on dev, on test."""
    senteval = common.resolve(args.senteval or "senteval.tar") if args.senteval or not args.dev else None
    test_sets = demo.test() if args.demo else common.read_sts(senteval) if senteval and not args.skip_test else {}
    dev_set = demo.dev() if args.dev == "demo" else {"dev": common.read_graded_pairs(args.dev)} if args.dev else common.read_sts(senteval, "dev")
    texts = triplets = []
    if "distill" in stages and args.train.endswith(".csv"):
        texts = list(dict.fromkeys(text for row in common.read_triplets(common.resolve(args.train)) for text in row))
    elif "distill" in stages:
        texts = demo.sentences(10_000) if args.train == "demo" else common.read_sentences(common.resolve(args.train))
    if "finetune" in stages:
        triplets = demo.triplets() if args.triplets == "demo" else common.read_triplets(common.resolve(args.triplets))
    n = np.arange(len(triplets))
    labels = [row[0] for row in triplets], [row[1] for row in triplets] + [row[2] for row in triplets], n, len(n) + n[:, None]
    return texts, labels, lambda encoder: common.spearman(encoder, dev_set), lambda encoder: common.spearman(encoder, test_sets) if test_sets else {}


def read_dr_task(args, teacher):
    """The same for retrieval. Texts are all passages, then the training queries. The teacher mines the negatives, 4.3: the passages that it ranks
    highest for a query, its positives left out."""
    queries = eval_retrieval.read_queries(args.beir)
    qrels, _ = eval_retrieval.read_qrels(args.beir, "train", queries)
    passages = [text for chunk in eval_retrieval.passages(args.beir) for text in chunk]
    if len(qrels) < 10:
        raise common.DataError(f"{args.beir}: {len(qrels)} training queries, expected 10 or more, every tenth of which is for dev")
    dev_queries, asked = list(qrels)[9::10], [query for i, query in enumerate(qrels) if i % 10 != 9]
    texts = passages + [queries[query] for query in asked]
    targets = common.teacher_embeddings(teacher, teacher, common.Tokens(teacher, texts, args.max_length), args.device)
    positives = [[number for number, grade in qrels[query].items() if grade] for query in asked]
    mined = eval_retrieval.hard_negatives(targets[len(passages):], targets[:len(passages)], positives, args.hard_negatives, args.device)
    rows = [(i, number) for i, numbers in enumerate(positives) for number in numbers]  # a query with two positives gives two rows
    labels = [texts[len(passages) + i] for i, _ in rows], passages, np.array([number for _, number in rows]), mined[[i for i, _ in rows]]
    near, dev_qrels = eval_retrieval.subset(passages, [qrels[query] for query in dev_queries], args.dev_passages)
    test_qrels = {} if args.skip_test else eval_retrieval.read_qrels(args.beir, "test", queries)[0]

    def dev(encoder):
        return {"dev MRR@10": eval_retrieval.evaluate(encoder, [queries[q] for q in dev_queries], dev_qrels, [near])[0]["MRR@10"]}
    def test(encoder):
        asked, grades, chunks = [queries[q] for q in test_qrels], list(test_qrels.values()), eval_retrieval.passages(args.beir)
        return eval_retrieval.evaluate(encoder, asked, grades, chunks)[0] if test_qrels else {}
    return texts, labels, dev, test


def main():
    args = parse_args()
    if not (args.student or args.student_layers):
        raise common.DataError("give --student, or --student-layers for a student made of layers of the teacher")
    if args.precision != "fp32" if args.device == "cpu" else not (args.device.startswith("cuda") and torch.cuda.is_available()):
        raise common.DataError(f"--device {args.device} --precision {args.precision}: expected cpu and fp32, or cuda on a machine that has it")
    for stage, prefix in (("distill", ""), ("finetune", "finetune_")):
        for name, value in zip(("lr", "batch_size", "epochs", "temperature"), TABLE_1[args.task, stage]):
            setattr(args, prefix + name, value if getattr(args, prefix + name) is None else getattr(args, prefix + name))
    args.dim = args.dim or (128 if args.objective == "hpd" else None)
    args.beta1, args.beta2 = (args.beta1, args.beta2) if args.objective == "ibkd" else (0.0, 0.0)
    run, stages = common.Run(args, ("seed", "max_steps", "beta1", "beta2")), ("distill", "finetune") if args.stage == "both" else (args.stage,)
    own = (args.student, args.pooling) if args.student else (args.teacher, args.pooling or args.teacher_pooling)
    encoder = common.load_encoder(*own, "mean", args.student_layers).to(args.device)
    teacher = common.load_encoder(args.teacher, args.teacher_pooling).to(args.device).eval() if "distill" in stages or args.task == "dr" else None
    texts, (anchors, others, positive, negatives), dev, test = read_dr_task(args, teacher) if args.task == "dr" else read_sts_task(args, stages)
    state = run.start()
    if not state:
        scores = {title: dev(model) | test(model) for title, model in (("teacher", teacher), ("student before", encoder)) if model}
        state |= dict(stage="", scores=scores)
        encoder.save(run.folder)
    torch.manual_seed(args.seed)  # W starts at random
    if "distill" in stages and state["stage"] in ("", "distill"):
        targets = common.teacher_embeddings(teacher, teacher, common.Tokens(teacher, texts, args.max_length), args.device)
        if args.objective == "hpd":
            mean, directions = principal_components(targets, args.dim)
            targets = (targets - mean) @ directions
        width = None if args.objective == "mse" and targets.shape[1] == encoder.width else targets.shape[1]
        student = Student(encoder, args.precision, width, args.keep_mapping or args.objective == "hpd").to(args.device)
        distill(student, common.Tokens(encoder, texts, args.max_length), targets, run, args, dev)
        encoder = common.load_encoder(run.folder).to(args.device)
        state["scores"]["student after stage 1"] = dev(encoder) | test(encoder)
    if "finetune" in stages and state["stage"] != "done":
        encoder = common.load_encoder(run.folder).to(args.device)
        if args.dim and encoder.width != args.dim:
            torch.manual_seed(args.seed), add_head(encoder, args.dim)  # whatever stage 1 has drawn: a resumed run is the same run
        tokens = [common.Tokens(encoder, side, args.max_length) for side in (anchors, others)]
        finetune(Student(encoder, args.precision).to(args.device), *tokens, positive, negatives, run, args, dev)
        encoder = common.load_encoder(run.folder).to(args.device)
        state["scores"]["student after stage 2"] = dev(encoder) | test(encoder)
    state["stage"] = "done"
    run.checkpoint()
    run.card(args.student or args.teacher, args.teacher, state["scores"],
             f"Distilled by `ibkd.py` (IBKD, EMNLP 2023), stages: {' and '.join(stages)}, objective: {args.objective}.",
             *(("information-retrieval", None) if args.task == "dr" else ()))
    print(common.table(state["scores"]))


if __name__ == "__main__":
    common.run_main(main)
