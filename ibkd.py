"""IBKD, information bottleneck knowledge distillation, for similarity and for dense retrieval.

Zhang, Long, Li, Xie: "Text Representation Distillation via Information Bottleneck Principle",
EMNLP 2023, arXiv:2311.05472.

The student's embedding S of a text X keeps what the teacher's embedding T states, and forgets the
rest of X: eq. 1, L = -I(S, T) + beta I(X, S). Minimizing InfoNCE raises a lower bound of I(S, T).
HSIC (Hilbert-Schmidt independence criterion, a kernel measure of dependence) replaces I(X, S); X is
the mean of the student's own input embeddings. Stage 1 (distill) needs texts alone. Stage 2
(finetune) needs anchors with positives and hard negatives, which in retrieval the teacher finds.

    text --> teacher (frozen) ----> T --------> InfoNCE --+--> stage 1, eq. 8
      +----> student --> S --> mapping W --------^        |
                +------> X, S --> beta_1 HSIC(X, S) ------+
    anchor, positive, negatives --> student --> S --> S' --> InfoNCE --+--> stage 2, eq. 9
    anchor --> student --> X, S --> beta_2 HSIC(X, S) -----------------+    (S' = S without --dim)

Departures that change results (docs/ibkd.md has all of them, next to the authors' code):
  - The RBF kernel of eq. 7 is exp(-gamma |x - y|^2); the paper prints neither minus nor square.
  - InfoNCE compares by the cosine, as in the authors' code; the paper prints inner products.
  - W is dropped after stage 1 (--keep-mapping keeps it). The default data are NLI, not augmented.
  - A student cut to --student-layers trains without dropout.

  python ibkd.py --student nreimers/MiniLM-L6-H384-uncased       the paper's setting, similarity
  python ibkd.py --task dr --beir my-beir-folder --teacher MODEL --student-layers 1,3,5
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

# ---- Losses --------------------------------------------------------------------------------------


def cosine(a, b):
    """The cosine of all pairs of rows: [N, D], [M, D] -> [N, M]."""
    a = F.normalize(a, dim=-1)
    b = F.normalize(b, dim=-1)
    return a @ b.T


def gram_matrix(z, kernel, gamma):
    """Eq. 7: K_ij = exp(-gamma |z_i - z_j|^2)

    for the kernel "rbf"; 1 / sqrt(|z_i - z_j|^2 + gamma) for "imq"; cos(z_i, z_j) for "linear". The
    paper prints exp(gamma |z_i - z_j|), which grows with the distance. z [l, D]; gamma > 0, ignored
    by "linear". Returns [l, l].
    """
    if kernel == "linear":
        return cosine(z, z)
    squares = z.square().sum(dim=1)  # [l]
    distance = (squares[:, None] + squares - 2 * z @ z.T).clamp(min=0)  # |z_i - z_j|^2, [l, l]
    if kernel == "imq":
        return torch.rsqrt(distance + gamma)
    return torch.exp(-gamma * distance)


def hsic(gram_x, gram_s):
    """Eq. 6: HSIC(X, S) = tr(K_X H K_S H) / l^2, with H = I - 1 1^T / l

    gram_x, gram_s: Gram matrices [l, l] of the same l samples. Returns a scalar >= 0, which tends
    to 0 for independent X and S as l grows.
    """
    l = len(gram_x)
    centering = torch.eye(l, dtype=gram_x.dtype, device=gram_x.device) - 1 / l  # H
    return torch.trace(gram_x @ centering @ gram_s @ centering) / l**2


def info_nce(student, teacher, temperature):
    """Section 3.1: L_i = -log( exp(cos(W s_i, t_i) / tau) / sum_j exp(cos(W s_i, t_j) / tau) )

    student [N, D], already mapped by W; teacher [N, D], of the same texts; temperature tau > 0.
    Returns the mean over the batch, a scalar >= 0.
    """
    logits = cosine(student, teacher) / temperature  # [N, N]
    positives = torch.arange(len(student), device=student.device)
    return F.cross_entropy(logits, positives)


def supervised_info_nce(anchor, positive, negatives, temperature, batch_negatives=False):
    """Eq. 10: L_i = -log( e(s_i, s_i^+) / (sum_j e(s_i, s_j^+) + sum_k e(s_i, s_ik^-)) )

    with e(u, v) = exp(cos(u, v) / tau). The paper prints L_i without the minus. anchor, positive
    [N, D]; negatives [N, K, D], the hard negatives of each anchor; with batch_negatives, each
    anchor is contrasted with all N K of them; temperature tau > 0. Returns the mean over the batch,
    a scalar >= 0.
    """
    if batch_negatives:
        hard = cosine(anchor, negatives.flatten(0, 1))  # [N, N K]
    else:
        hard = F.cosine_similarity(anchor.unsqueeze(1), negatives, dim=-1)  # [N, K]
    logits = torch.cat([cosine(anchor, positive), hard], dim=1) / temperature
    positives = torch.arange(len(anchor), device=anchor.device)
    return F.cross_entropy(logits, positives)


# ---- Model ---------------------------------------------------------------------------------------


def embed(encoder, input_ids, attention_mask, with_input=False, num_heads=None):
    """Token ids and mask, [N, L] each -> S, the embeddings [N, D] in float32.

    with_input: -> X [N, H], S, where X is the mean over the tokens in the output of the embedding
    layer. num_heads: S is the output of the first num_heads layers of encoder.heads (default: all).
    encoder: has `model`, a transformer; `pooling`, "mean", "cls" or "lasttoken"; `heads`, the dense
    layers after pooling; `normalize`. The same for teacher and student, in training and scoring.
    """
    output = encoder.model(input_ids, attention_mask, output_hidden_states=with_input)
    states = output.last_hidden_state  # [N, L, H]
    mask = attention_mask.unsqueeze(-1)  # [N, L, 1]
    if encoder.pooling == "cls":
        pooled = states[:, 0]
    elif encoder.pooling == "lasttoken":
        last = attention_mask.cumsum(dim=1).argmax(dim=1)  # of the tokens that are not padding
        pooled = states[torch.arange(states.shape[0], device=states.device), last]
    else:
        pooled = (states * mask).sum(dim=1) / mask.sum(dim=1)
    s = encoder.heads[:num_heads](pooled).float()  # [N, D]
    s = F.normalize(s, dim=-1) if encoder.normalize else s
    if not with_input:
        return s
    x = (output.hidden_states[0] * mask).sum(dim=1) / mask.sum(dim=1)
    return x.float(), s


def add_mapping(encoder, dimension, keep):
    """W of section 3.1, stage 1, or W_proj of eq. 11, stage 2 (S' = W_proj S): [N, D] -> [N, D'].

    It starts as the identity if D = dimension. dimension None: no map. keep: append it to
    encoder.heads, so that the student is scored and saved with it.
    """
    if dimension is None:
        return nn.Identity()
    mapping = nn.Linear(encoder.dimension, dimension, bias=False)
    if dimension == encoder.dimension:
        nn.init.eye_(mapping.weight)
    if keep:
        encoder.heads.append(nn.Sequential(mapping, nn.Identity()))
    return mapping


# ---- Training. Everything above needs only torch and can be copied into other projects -----------

import numpy as np

from common import DEMO_FOLDER, MINILM, ArgumentParser, number, parse, run_main
from common import add_data_options, add_model_options, add_run_options
from common import evaluation_sets, read_sentences, read_triplets
from common import load_encoder, load_student, save_encoder, spearman, teacher_embeddings
from common import Run, Tokens, average_gradients, batches, gather, own_rows, step_seed, to_device
from common import write_card


def distill(encoder, texts, targets, dev_score, run, args):
    """Stage 1, eq. 8: L = L_nce(S, T) + beta_1 HSIC(X, S) -> the best step and the last

    The paper prints -(L_nce - beta_1 HSIC), which is right for eq. 3's L_nce, a bound to maximize.
    Section 3.1 then prints L_nce with a minus, as a loss: that is info_nce(), and is minimized.
    targets [P, D_T]: T of P texts. The teacher is not in this loop: it is frozen, and main() has
    computed its embeddings once.
    """
    tokens = Tokens(encoder, texts, args.max_length)
    torch.manual_seed(args.seed)  # W starts at random
    num_heads = len(encoder.heads)  # that make S
    mapping = add_mapping(encoder, targets.shape[1], args.keep_mapping).to(args.device)
    epoch_steps = math.ceil(len(targets) / args.batch_size)
    total = min(args.epochs * epoch_steps, args.max_steps or math.inf)
    modules = nn.ModuleList([encoder, mapping])
    optimizer = torch.optim.Adam(modules.parameters(), lr=args.lr, fused=True)
    encoder.train()

    # begin() restores `state`, in place, and these values from the last checkpoint, if any.
    state = [modules, optimizer]
    step, best, best_step = run.begin("distill", total, state, (0, -math.inf, 0))
    if step == 0:  # the student before training is the first candidate
        best = dev_score(encoder)
        save_encoder(encoder, args.output)
        run.log_dev(0, best)

    order = batches(tokens.lengths, args.batch_size, args.seed, args.group_by_length, step, total)
    for step, rows in order:  # row numbers [N]
        torch.manual_seed(step_seed(args.seed, step))  # of dropout, another in each process
        lr = args.lr * (total + 1 - step) / total
        optimizer.param_groups[0]["lr"] = lr

        inputs = tokens.batch(own_rows(rows), args.device)
        with torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16"):
            local = embed(encoder, *inputs, with_input=True, num_heads=num_heads)  # [n, H], [n, D]
        x, s = [gather(part, len(rows)) for part in local]  # of all processes [N, H], [N, D]
        target = to_device(targets[rows], args.device)  # T [N, D_T], read from disk
        contrast = info_nce(mapping(s), target, args.temperature)
        gram_x = gram_matrix(x, args.kernel, args.gamma)  # K_X [N, N]
        gram_s = gram_matrix(s, args.kernel, args.gamma)  # K_S [N, N]
        bottleneck = args.beta1 * hsic(gram_x, gram_s)
        loss = contrast + bottleneck

        optimizer.zero_grad()
        loss.backward()
        average_gradients(modules.parameters())  # now those of one process with the whole batch
        nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
        optimizer.step()
        run.log(step, len(rows), loss=loss, info_nce=contrast, hsic=bottleneck, lr=lr)

        # Now and then, and at the end: score the student, and keep the best.
        if step % args.eval_steps == 0 or step == total:
            dev = dev_score(encoder)
            if dev > best:
                best, best_step = dev, step
                save_encoder(encoder, args.output)
            run.log_dev(step, dev)
            run.checkpoint(state, (step, best, best_step))
    return best_step, step


def embed_in_parts(encoder, tokens, rows, num_heads, device):
    """Rows [n] of tokens -> S [n, D], in parts of similar length, which need little padding."""
    order = np.argsort(tokens.lengths[rows], kind="stable")
    size = 32 if device == "cpu" else 512
    parts = np.array_split(rows[order], math.ceil(len(rows) / size))
    inputs = [tokens.batch(part, device) for part in parts]
    s = torch.cat([embed(encoder, *batch, num_heads=num_heads) for batch in inputs])
    return s[to_device(np.argsort(order), device)]  # in the order of rows


def finetune(encoder, texts, examples, dev_score, run, args):
    """Stage 2, eq. 9: L = L_nce^sup(S') + beta_2 HSIC(X, S)

    The paper prints -(L_nce^sup - beta_2 HSIC) with an eq. 10 without a minus, which is the same.

    X and S are those of the anchors. examples [n, 2 + K]: positions in texts of an anchor, its
    positive and its K hard negatives. The student at the start is also a candidate: it is kept if
    stage 2 makes it worse. Returns the best step and the last.
    """
    tokens = Tokens(encoder, texts, args.max_length)
    torch.manual_seed(args.seed)  # W_proj starts at random
    num_heads = len(encoder.heads)  # that make S
    mapping = add_mapping(encoder, args.dim, keep=True).to(args.device)
    batch_size = args.finetune_batch_size
    epoch_steps = math.ceil(len(examples) / batch_size)
    total = min(args.finetune_epochs * epoch_steps, args.max_steps or math.inf)
    modules = nn.ModuleList([encoder, mapping])
    optimizer = torch.optim.Adam(modules.parameters(), lr=args.finetune_lr, fused=True)
    encoder.train()

    state = [modules, optimizer]
    step, best, best_step = run.begin("finetune", total, state, (0, -math.inf, 0))
    if step == 0:
        best = dev_score(encoder)
        save_encoder(encoder, args.output)
        run.log_dev(0, best)

    lengths = tokens.lengths[examples[:, 0]]  # of the anchors
    order = batches(lengths, batch_size, args.seed, args.group_by_length, step, total)
    for step, rows in order:
        torch.manual_seed(step_seed(args.seed, step))
        lr = args.finetune_lr * (total + 1 - step) / total
        optimizer.param_groups[0]["lr"] = lr

        local = examples[own_rows(rows)]  # of this process [n, 2 + K]
        others = np.concatenate([local[:, 1], local[:, 2:].ravel()])  # n positives, n K negatives
        inputs = tokens.batch(local[:, 0], args.device)
        with torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16"):
            x, s = embed(encoder, *inputs, with_input=True, num_heads=num_heads)  # [n, H], [n, D]
            s_others = embed_in_parts(encoder, tokens, others, num_heads, args.device)
        positive, negatives = mapping(s_others).tensor_split([len(local)])  # S' [n, D'], [n K, D']
        negatives = negatives.unflatten(0, (len(local), -1))  # [n, K, D']
        parts = (x, s, positive, negatives)
        x, s, positive, negatives = [gather(part, len(rows)) for part in parts]  # [N, ...]
        tau = args.finetune_temperature
        contrast = supervised_info_nce(mapping(s), positive, negatives, tau, args.batch_negatives)
        gram_x = gram_matrix(x, args.kernel, args.gamma)
        gram_s = gram_matrix(s, args.kernel, args.gamma)
        bottleneck = args.beta2 * hsic(gram_x, gram_s)
        loss = contrast + bottleneck

        optimizer.zero_grad()
        loss.backward()
        average_gradients(modules.parameters())
        nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
        optimizer.step()
        run.log(step, len(rows), loss=loss, info_nce=contrast, hsic=bottleneck, lr=lr)

        if step % args.eval_steps == 0 or step == total:
            dev = dev_score(encoder)
            if dev > best:
                best, best_step = dev, step
                save_encoder(encoder, args.output)
            run.log_dev(step, dev)
            run.checkpoint(state, (step, best, best_step))
    return best_step, step


# ---- The two tasks of section 4.3: what a student learns from, and how encoders are scored -------


class Similarity:
    """STS (semantic textual similarity)."""

    code = ()  # further files that make the results

    def __init__(self, args):
        self.sets = evaluation_sets(args)
        self.unlabeled = read_sentences(args.train) if args.stage != "finetune" else []
        triplets = read_triplets(args.triplets) if args.stage != "distill" else []
        self.labeled = [text for row in triplets for text in row]
        self.read = [*self.sets.values(), self.unlabeled, self.labeled]

    def texts(self, encoder):
        """Of stage 1, as an encoder reads them."""
        return self.unlabeled

    def examples(self, student, teacher):
        """Of stage 2: its texts, and positions in them [n, 3]; see finetune()."""
        return self.labeled, np.arange(len(self.labeled)).reshape(-1, 3)

    def dev_score(self, encoder):
        return spearman(embed, encoder, {"dev": self.sets["dev"]})["dev"]

    def scores(self, encoder):
        return spearman(embed, encoder, self.sets)


class Retrieval:
    """DR (dense retrieval): stage 1 learns from all passages and training queries."""

    def __init__(self, args):
        import eval_retrieval

        self.retrieval = eval_retrieval
        self.code = [eval_retrieval.__file__]
        self.args = args
        training = eval_retrieval.read_training(args.beir, args.dev_queries)
        self.passages, self.queries, self.answers, self.dev = training
        self.test = []
        if not args.skip_test:
            self.test = eval_retrieval.read_split(args.beir, args.test_split)
        self.read = [self.passages, self.queries, self.answers, self.dev, self.test]

    def texts(self, encoder):
        self.retrieval.set_prompts(encoder, self.args)
        passages = [encoder.passage_prompt + text for text in self.passages]
        return passages + [encoder.query_prompt + text for text in self.queries]

    def examples(self, student, teacher):
        """As above, [n, 2 + K]: queries, answers, and the hard negatives that the teacher finds."""
        args, texts = self.args, self.texts(teacher)
        vectors = teacher_embeddings(embed, teacher, texts, args.max_length, args.precision)
        how = (args.hard_negatives, args.teacher_similarity, args.device)
        return self.texts(student), self.retrieval.training_rows(vectors, self.answers, *how)

    def search(self, encoder, *data, depth=1000):
        self.retrieval.set_prompts(encoder, self.args)
        args = self.args
        similarity = args.teacher_similarity if encoder.name == args.teacher else args.similarity
        return self.retrieval.evaluate(embed, [encoder, encoder], *data, similarity, depth)

    def dev_score(self, encoder):
        return self.search(encoder, *self.dev, depth=10)["MRR@10"]

    def scores(self, encoder):
        row = {"dev MRR@10": self.dev_score(encoder)}
        if self.test:
            corpus = self.retrieval.read_texts(self.args.beir, "corpus.jsonl")
            row |= self.search(encoder, *self.test, corpus)
        return row


# ---- Command line --------------------------------------------------------------------------------

NLI = "nli_for_simcse.csv"
TASKS = {"sts": Similarity, "dr": Retrieval}
TABLE_1 = {  # what differs between the tasks
    "sts": dict(epochs=10, batch_size=256, finetune_batch_size=256, finetune_lr=3e-5),
    "dr": dict(epochs=3, batch_size=128, finetune_batch_size=128, finetune_lr=1e-5),
}
DEMO = dict(teacher=MINILM, student_layers="1,3,5", triplets=f"{DEMO_FOLDER}/triplets.csv")
DEMO |= dict(train=f"{DEMO_FOLDER}/sentences.txt", dev=f"{DEMO_FOLDER}/dev.tsv")
DEMO |= dict(epochs=1, batch_size=64, lr=4e-4, eval_steps=50, beir=f"{DEMO_FOLDER}/beir")
DEMO |= dict(finetune_epochs=1, finetune_batch_size=64, group_by_length=True)


def parse_args():
    positive_int = number(int, 1)
    positive_float = number(float, 1e-9)
    two = number(int, 2)  # a contrastive loss needs two texts
    parser = ArgumentParser(__doc__)
    add_model_options(parser, "princeton-nlp/sup-simcse-roberta-large")
    add_data_options(parser, NLI)
    section = "(default: %(default)s; paper §4.3)"
    stage_1 = "stage 1 (default: %(default)s; paper Table 1)"
    stage_2 = "stage 2 (default: %(default)s; paper Table 1)"
    stages = "1, 2, or both (default: both; distill for --train without --triplets; paper §3.3)"
    add = parser.add_argument_group("method").add_argument
    add("--task", choices=TASKS, default="sts", help="similarity, or dense retrieval")
    add("--stage", choices=("distill", "finetune", "both"), help=stages)
    add("--triplets", help=f"sts, stage 2: CSV sent0,sent1,hard_neg (default: {NLI}; paper §4.3)")
    kernels = ("rbf", "imq", "linear")
    add("--kernel", choices=kernels, default="rbf", help="HSIC kernel (default: rbf; paper §3.2)")
    add("--gamma", type=positive_float, default=0.5, help=f"kernel parameter {section}")
    add("--beta1", type=number(float, 0), default=1.0, help=f"HSIC weight, stage 1 {section}")
    add("--beta2", type=number(float, 0), default=0.5, help=f"HSIC weight, stage 2 {section}")
    add("--keep-mapping", action="store_true", help="W stays: the student uses the teacher's space")
    add("--dim", type=positive_int, help="dimension of S' (default: no projection; paper §3.4)")
    add("--batch-negatives", action="store_true", help="stage 2: hard negatives of the whole batch")
    add("--epochs", type=positive_int, help="stage 1 (default: 10; dr: 3; paper Table 1)")
    add("--batch-size", type=two, help="stage 1 (default: 256; dr: 128; paper Table 1)")
    add("--lr", type=positive_float, default=1e-4, help=stage_1)
    add("--temperature", type=positive_float, default=0.1, help=stage_1)
    add("--finetune-epochs", type=positive_int, default=3, help=stage_2)
    add("--finetune-batch-size", type=two, help="stage 2 (default: 256; dr: 128; paper Table 1)")
    add("--finetune-lr", type=positive_float, help="stage 2 (default: 3e-5; dr: 1e-5; Table 1)")
    add("--finetune-temperature", type=positive_float, default=0.05, help=stage_2)
    add = parser.add_argument_group("retrieval (--task dr)").add_argument
    measures = ("cosine", "dot")
    beir = "BEIR folder, or data set on the Hub (default: %(default)s)"
    add("--beir", default="BeIR/msmarco", help=beir)
    add("--test-split", default="test", help="qrels/TEST_SPLIT.tsv (default: test; paper: dev)")
    add("--dev-queries", type=positive_int, default=2000, help="at most this many (default: 2000)")
    prompt = "text before each {} (default: the prompt of this name in a model's folder)"
    add("--query-prompt", help=prompt.format("query"))
    add("--passage-prompt", help=prompt.format("passage"))
    add("--similarity", choices=measures, default="cosine", help="ranks passages (default: cosine)")
    add("--teacher-similarity", choices=measures, help="(default: --similarity)")
    add("--hard-negatives", type=positive_int, default=8, help=f"passages per answer {section}")
    add_run_options(parser, "runs/ibkd", max_length=128, eval_steps=500)
    args = parse(parser, DEMO)
    if args.stage is None:
        only_texts = args.task == "sts" and args.train != NLI and not args.triplets
        args.stage = "distill" if only_texts else "both"
    args.triplets = args.triplets or NLI
    args.teacher_similarity = args.teacher_similarity or args.similarity
    for name, value in TABLE_1[args.task].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main():
    args = parse_args()
    task = TASKS[args.task](args)
    run = Run(args, [__file__, *task.code], task.read)
    if run.is_complete():
        return
    student = load_student(args)
    num_heads = len(student.heads)
    begins = args.stage != "finetune" and "distill" not in run.finished
    teacher = None
    if begins or args.task == "dr":  # where it finds the hard negatives
        teacher = load_encoder(args.teacher, args.teacher_pooling, device=args.device)

    if begins:
        run.scores["teacher"] = task.scores(teacher)
        run.scores["student before"] = task.scores(student)
        texts = task.texts(teacher)
        targets = teacher_embeddings(embed, teacher, texts, args.max_length, args.precision)
        teacher.to("cpu")  # it leaves a GPU's memory to the student
        steps = distill(student, task.texts(student), targets, task.dev_score, run, args)
        best = load_encoder(args.output, device=args.device)
        run.finish(*steps, {"best of stage 1": task.scores(best)})
    if args.stage != "distill" and "finetune" not in run.finished:
        if args.stage == "both":
            student = load_encoder(args.output, device=args.device)
            kept = num_heads + 1 if args.keep_mapping else num_heads
            del student.heads[kept:]  # W_proj, if stage 2 had begun
        else:
            run.scores["student before"] = task.scores(student)
        examples = task.examples(student, teacher)
        del teacher
        steps = finetune(student, *examples, task.dev_score, run, args)
        best = load_encoder(args.output, device=args.device)
        run.finish(*steps, {"best of stage 2": task.scores(best)})
    text = f"Trained by `ibkd.py` (IBKD, arXiv:2311.05472), task {args.task}."
    write_card(run, args, load_encoder(args.output), text)


if __name__ == "__main__":
    run_main(main)
