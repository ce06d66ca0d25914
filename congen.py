"""ConGen, unsupervised control and generalization distillation.

Limkonchotiwat et al.: "ConGen: Unsupervised Control and Generalization Distillation For Sentence Representation", Findings of EMNLP 2022.

A sentence is seen in two views, the second in other words: a back-translation, a translation, a paraphrase, or some words gone. The frozen
teacher embeds the first view only, the student both. A softmax over an embedding's similarities to a queue of teacher embeddings of other
sentences is its similarity distribution. The student's distributions of both views are drawn to the teacher's: of the first to see what the
teacher sees (control), of the second to see it whatever the wording (generalize).

  eq. 1      similarity_distribution    softmax of the cosines to the queue
  eq. 2      congen_loss                alpha = 1: control only, which is SEED (Fang et al. 2021); alpha = 0: generalize only
  sec. 3.2   InstanceQueue              ring buffer of teacher embeddings
  sec. 4.2   l2_loss, contrastive_loss  the competitors L2, Dual-L2, SKD, CKD
  Table 6    augment, fill_masks        second views made from the sentence alone
  Table 7    TABLE_7                    learning rate, temperatures and queue size, by student

Choices that the paper leaves open, or that this script makes otherwise:
  - The paper's views, NLI sentences through Google's translator, are not on the hub. Without --pairs the first view is a sentence of SimCSE's NLI
    file as it stands; word deletion, of Table 6's ways without a translator the best, makes the second. One left without words is the first.
  - Table 6 gives no rate for synonyms: here a tenth of the words, if in their base form, by their first sense in WordNet.
  - The queue starts with random training sentences, which also train, and as in sec. 3.2 its oldest go before a batch is scored. The authors'
    code keeps the former out of training, and lets the latter go afterwards.
  - As in the authors' code: 128 tokens, linear decay after the warm-up, weight decay 0.01 (there not of biases and norms), gradient norm clipped at
    1, patience 7. Its AdamW keeps the moments' bias, torch's does not. In one public state of its loss, generalize never reads the second view.
  - The head starts at random; as the identity, with --head identity, it serves a student made of the teacher's layers better.
  - L2 is between unit vectors, as sec. 3.1 defines z. CKD's positive is the teacher's embedding in the queue, all else there a negative.
  - A student that Table 7 does not name, or that --student-layers cuts, gets the row of the student nearest in size.

  python congen.py --student bert-base-uncased                                        the paper's setting, with word deletion
  python congen.py --student distilbert-base-multilingual-cased --pairs en-de.tsv     a multilingual student of an English teacher
  python congen.py --demo                                                             two minutes on a CPU
"""
import math
import sys
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import common
import demo

TABLE_7 = {  # teacher temperature, student temperature, queue size, learning rate; millions of parameters (Tables 1 and 3); names on the hub
    "BERT-Tiny": (0.05, 0.05, 16384, 5e-4, 4, "bert_uncased_L-2_H-128_A-2 bert-tiny"),
    "BERT-Mini": (0.05, 0.07, 16384, 3e-4, 11, "bert_uncased_L-4_H-256_A-4 bert-mini"),
    "Tiny-BERT-L4": (0.05, 0.05, 65536, 1e-4, 14, "TinyBERT_General_4L_312D TinyBERT_L-4_H-312_v2"),
    "MiniLM-L3": (0.05, 0.07, 16384, 5e-4, 17, "MiniLM-L3-H384-uncased"),
    "MiniLM-L6": (0.05, 0.07, 65536, 3e-4, 22, "MiniLM-L6-H384-uncased"),
    "BERT-Small": (0.05, 0.07, 65536, 3e-4, 29, "bert_uncased_L-4_H-512_A-8 bert-small"),
    "MiniLM-L12": (0.05, 0.07, 16384, 5e-5, 33, "MiniLM-L12-H384-uncased"),
    "Tiny-BERT-L6": (0.05, 0.07, 65536, 5e-5, 67, "TinyBERT_General_6L_768D TinyBERT_L-6_H-768_v2"),
    "BERT-base": (0.05, 0.07, 65536, 5e-5, 109, "bert-base-uncased bert-base-cased"),
    "RoBERTa-base": (0.1, 0.1, 1024, 5e-5, 125, "roberta-base"),
    "Multilingual-DistilBERT": (0.05, 0.07, 65536, 3e-4, 134, "distilbert-base-multilingual-cased"),
    "Multilingual-MiniLM-L12": (0.05, 0.07, 65536, 3e-4, 117, "Multilingual-MiniLM-L12-H384"),
}


def cosine(a, b):
    """sim of eq. 1 for all pairs of rows: [N, D], [K, D] -> [N, K], from -1 to 1."""
    return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T


def similarity_distribution(z, queue, temperature):
    """Eq. 1: z [N, D], queue [K, D], temperature > 0 -> [N, K], each row probabilities that sum to 1."""
    return F.softmax(cosine(z, queue) / temperature, dim=1)


def congen_loss(student_control, student_generalize, teacher_reference, queue, teacher_temperature, student_temperature, alpha):
    """Eq. 2, mean over the batch: embeddings [N, D] each, queue [K, D], temperatures > 0, alpha from 0 to 1. Scalar >= 0."""
    reference = similarity_distribution(teacher_reference, queue, teacher_temperature)
    control = F.cross_entropy(cosine(student_control, queue) / student_temperature, reference)  # the log of the student's eq. 1 is taken inside
    generalize = F.cross_entropy(cosine(student_generalize, queue) / student_temperature, reference)
    return alpha * control + (1 - alpha) * generalize


def l2_loss(first, second):
    """Squared distance of unit vectors, sum over D, mean over the batch (sec. 4.2): [N, D] twice -> scalar from 0 to 4."""
    return (F.normalize(first, dim=-1) - F.normalize(second, dim=-1)).square().sum(dim=1).mean()


def contrastive_loss(student, queue, slots, temperature):
    """CKD (sec. 4.2), mean over the batch: student [N, D], queue [K, D] that has the teacher's embeddings of the batch at `slots` [N]."""
    return F.cross_entropy(cosine(student, queue) / temperature, slots)


class Student(nn.Module):
    """An encoder that ends in linear + tanh to the teacher's width (sec. 4.1); `head` says how the linear layer starts: random, identity."""

    def __init__(self, encoder, width, head, precision):
        super().__init__()
        if not (len(encoder.heads) and encoder.width == width):  # a dense layer of that width already stays
            linear = nn.Linear(encoder.width, width)
            if head == "identity":
                nn.init.eye_(linear.weight), nn.init.zeros_(linear.bias)
            encoder.heads.append(nn.Sequential(OrderedDict(linear=linear, activation=nn.Tanh())))
            encoder.width = width
        self.encoder, self.dtype = encoder, dict(fp32=None, bf16=torch.bfloat16, fp16=torch.float16)[precision]

    def forward(self, input_ids, attention_mask):
        """[N, L] twice -> [N, D] in fp32, not at unit length: every loss here reads directions only."""
        with torch.autocast(input_ids.device.type, self.dtype, enabled=self.dtype is not None):
            states, mask = self.encoder.model(input_ids, attention_mask).last_hidden_state, attention_mask.unsqueeze(-1)
            pooled = states[:, 0] if self.encoder.pooling == "cls" else (states * mask).sum(1) / mask.sum(1)  # the paper's: mean (4.1)
            return self.encoder.heads(pooled).float()


class InstanceQueue:
    """Teacher embeddings [K, D], the newest over the oldest: a ring buffer on the device (sec. 3.2)."""

    def __init__(self, embeddings):
        self.embeddings, self.next = embeddings, 0

    def enqueue(self, embeddings):
        """Put [N, D], N <= K, in the place of the N oldest -> their slots [N]."""
        slots = torch.arange(self.next, self.next + len(embeddings), device=embeddings.device) % len(self.embeddings)
        self.embeddings[slots], self.next = embeddings, (self.next + len(embeddings)) % len(self.embeddings)
        return slots


def augment(sentence, how, random, synonyms=None):
    """A second view of Table 6, made of the words between blanks; `random` is a numpy Generator, `synonyms` as of read_wordnet."""
    words = sentence.split()
    tenth = max(1, round(0.1 * len(words)))
    if how == "word-deletion":  # each with probability 10 %
        words = [word for word in words if random.random() >= 0.1]
    elif how == "delete-one":
        del words[random.integers(len(words))]
    elif how == "crop":  # a stretch of 90 %
        start = random.integers(tenth + 1)
        words = words[start:start + len(words) - tenth]
    elif how == "synonym":
        known = [i for i, word in enumerate(words) if len(word) > 2 and synonyms.get(word.lower())]  # "a" is an angstrom, too
        for i in random.permutation(known)[:tenth]:
            words[i] = random.choice(synonyms[words[i].lower()])
    return " ".join(words) or sentence


def read_wordnet(folder):
    """WordNet 3's database folder (index.noun, data.noun, ...) -> {word: the other words of its first sense}, as the part of speech of which
    WordNet has seen the most senses in texts; none for a word that it has not seen there. Raises DataError."""
    words, found = {}, {}  # part of speech, byte offset -> words; word -> senses seen, others
    for path in (Path(folder) / f"{name}.{part}" for part in ("noun", "verb", "adj", "adv") for name in ("data", "index")):
        for line, text in ((line, text) for line, text in common.read_lines(path) if not text.startswith(" ")):  # the licence
            fields = text.split()
            try:
                if path.stem == "data":  # offset, file, part, number of words, then each word and a digit
                    words[path.suffix, fields[0]] = [word.split("(")[0].replace("_", " ") for word in fields[4:4 + 2 * int(fields[3], 16):2]]
                else:  # word, part, senses, number of pointer kinds, these, senses, senses seen, offsets by frequency
                    seen, first = fields[5 + int(fields[3]):7 + int(fields[3])]
                    found[fields[0]] = max(found.get(fields[0], (0, [])), (int(seen), words[path.suffix, first]), key=lambda pair: pair[0])
            except (IndexError, KeyError, ValueError):
                raise common.DataError(f"{path}:{line}: {text[:40]!r}, expected a line of WordNet 3's database") from None
    return {word: [other for other in others if other.lower() != word] for word, (_, others) in found.items()}


def load_masked_lm(name, device):
    tokenizer = common.load_encoder(name).tokenizer  # which also checks that the folder is whole
    model, report = transformers.AutoModelForMaskedLM.from_pretrained(common.resolve(name, model=True), output_loading_info=True)
    if report["missing_keys"] or not tokenizer.mask_token:
        raise common.DataError(f"{name}: lacks a mask token or {sorted(report['missing_keys'])[:1]}, expected a masked language model")
    return model.to(device).eval(), tokenizer


@torch.no_grad()
def fill_masks(sentences, random, model, tokenizer):
    """MLM 15 % of Table 6: each token is masked with probability 15 %, then replaced by the likeliest."""
    batch = tokenizer(sentences, padding=True, truncation=True, return_tensors="pt", return_special_tokens_mask=True)
    masked = torch.from_numpy(random.random(batch["input_ids"].shape) < 0.15) & (batch.pop("special_tokens_mask") == 0)
    ids, batch["input_ids"] = batch["input_ids"], batch["input_ids"].masked_fill(masked, tokenizer.mask_token_id)
    ids[masked] = model(**batch.to(model.device)).logits.argmax(-1).cpu()[masked]
    return [text.strip() or sentence for text, sentence in zip(tokenizer.batch_decode(ids, skip_special_tokens=True), sentences)]


def distill(student, first, second, targets, dev_set, run, args):
    """Sec. 3.3 on n sentences: `first`, the Tokens of the first views, second(rows, random) -> input_ids, attention_mask of the second ones,
    targets [n, D], the teacher's embeddings of the first. The best encoder on dev is saved."""
    device, state = args.device, run.state
    total = min(args.epochs * math.ceil(len(targets) / args.batch_size), args.max_steps or math.inf)
    warmup = math.ceil(total / 10)
    optimizer = torch.optim.AdamW(student.parameters(), lr=args.lr, eps=1e-6, weight_decay=0.01, fused=True)
    scaler = torch.amp.GradScaler(device.split(":")[0], enabled=args.precision == "fp16")
    queue = InstanceQueue(torch.from_numpy(targets[np.random.default_rng(args.seed).permutation(len(targets))[:args.queue_size]]).to(device))
    two_views = args.objective in ("dual-l2", "skd") or args.objective == "congen" and args.alpha < 1
    if "step" in state:
        run.restore(student, optimizer)
        scaler.load_state_dict(state["scaler"])
    else:
        state |= dict(step=0, best_step=0, scaler=scaler.state_dict())
        run.checkpoint(student, optimizer)
    begin, step, losses, sentences, seconds = state["step"], 0, [], 0, 0.0
    bar = common.progress(total=total, initial=begin, desc="distill", unit="step")
    student.train()
    for epoch in range(args.epochs):
        for rows in common.batches(first.lengths, args.batch_size, [args.seed, epoch]):
            step += 1
            if step > total or step > begin and step - state["best_step"] > args.patience * args.eval_steps:
                return bar.close()
            clock = time.perf_counter()
            reference = torch.from_numpy(targets[rows]).to(device)  # z_ref; the teacher never sees the second view
            slots = queue.enqueue(reference)  # first out, then in: sec. 3.2; the one place where keys come together
            if step <= begin:  # what --resume finds done is passed over, but for what it left in the queue
                continue
            torch.manual_seed(args.seed * 1_000_003 + step)  # chance hangs on seed and step alone: a resumed run is the same run
            control = student(*first.batch(rows, device))
            generalize = student(*second(rows, np.random.default_rng([args.seed, step]))) if two_views else control
            if args.objective == "congen":
                loss = congen_loss(control, generalize, reference, queue.embeddings, args.teacher_temperature, args.student_temperature, args.alpha)
            elif args.objective == "ckd":
                loss = contrastive_loss(control, queue.embeddings, slots, args.student_temperature)
            else:  # sec. 4.2: L2 is the first term, Dual-L2 two, SKD all three
                terms = l2_loss(control, reference), l2_loss(generalize, reference), l2_loss(control, generalize)
                loss = sum(terms[:("l2", "dual-l2", "skd").index(args.objective) + 1])
            lr = optimizer.param_groups[0]["lr"] = args.lr * min(step / warmup, (total + 1 - step) / (total + 1 - warmup))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
            sentences, seconds = sentences + len(rows), seconds + time.perf_counter() - clock
            evaluate, score = step % args.eval_steps == 0 or step == total, None
            if evaluate and math.isfinite(losses[-1]):
                score, = common.spearman(student.encoder, dev_set).values()
            if not math.isfinite(losses[-1]) or not math.isfinite(score or 0):
                bar.close()
                raise common.DataError(f"step {step}: the loss is {losses[-1]}, the dev score {score}; stopped, {run.folder} keeps "
                                       f"its best student ({state['best']:.2f}) and the checkpoint of step {state['step']}")
            if evaluate or step % 25 == 0:
                loss = sum(losses) / len(losses)
                run.log(step=step, loss=loss, lr=lr, sentences_per_second=round(sentences / seconds, 1), **{"dev": score} if evaluate else {})
                losses = []
            if evaluate:
                if score > state["best"]:
                    state |= dict(best=score, best_step=step)
                    student.encoder.save(run.folder)
                state |= dict(step=step, scaler=scaler.state_dict())
                run.checkpoint(student, optimizer)
            bar.set_postfix_str(f"loss {loss:.4f}, lr {lr:.1e}, {sentences / seconds:.0f} sentences/s, best dev {state['best']:.2f}", refresh=False)
            bar.update()
    bar.close()


def parse_args():
    parser = common.ArgumentParser(description="ConGen: distil a sentence encoder. Defaults are the paper's; sections and tables in brackets.")
    add, cuda, poolings = parser.add_argument, torch.cuda.is_available(), ("mean", "cls", "pooler")
    add("--teacher", default="princeton-nlp/unsup-simcse-roberta-large", help="folder or hub name; %(default)s (4.1)")
    add("--student", help="folder or hub name; the teacher itself where only --student-layers is given")
    add("--student-layers", help="keep these layers only, zero-based: 1,3,5")
    add("--pooling", choices=poolings, help="how the student is read; as its folder says, else mean (4.1)")
    add("--teacher-pooling", choices=poolings, help="how the teacher is read; as its folder says, else mean")
    add("--head", choices=("random", "identity"), default="random", help="how the linear layer with tanh starts (4.1); %(default)s")
    add("--objective", choices=("congen", "l2", "dual-l2", "skd", "ckd"), default="congen", help="the methods of Table 1; %(default)s")
    add("--alpha", type=float, default=0.5, help="weight of control, 1 less that of generalize (Table 5); %(default)s")
    add("--pairs", help="both views: TSV of two columns, back-translations, paraphrases or translations, instead of --train and --augment")
    add("--train", default="nli_for_simcse.csv", help="sentences, one a line, .gz too, or triplets (.csv), taken apart; %(default)s")
    add("--augment", choices=("word-deletion", "delete-one", "crop", "synonym", "mlm"), default="word-deletion", help="(Table 6) %(default)s")
    add("--wordnet", default="/usr/share/wordnet", help="for synonym: folder of WordNet 3's database; %(default)s (Debian: wordnet-base)")
    add("--masked-lm", default="bert-base-uncased", help="for mlm: folder or hub name of a masked language model; %(default)s")
    add("--dev", help="graded pairs (TSV) that choose the best student; STS-B dev of --senteval")
    add("--senteval", help="SentEval's folder or tar; senteval.tar where --dev is not given")
    add("--skip-test", action="store_true", help="score dev only, not SentEval's seven test sets")
    add("--output", default="runs/congen", help="becomes the best student's folder; %(default)s")
    add("--epochs", type=int, default=20, help="%(default)s (4.1)")
    add("--batch-size", type=int, default=128, help="%(default)s (4.1)")
    add("--lr", type=float, help="highest learning rate; by the student (Table 7)")
    add("--teacher-temperature", type=float, help="tau^T of eq. 2; by the student (Table 7)")
    add("--student-temperature", "--temperature", type=float, help="tau^S of eq. 2, and of ckd; by the student (Table 7)")
    add("--queue-size", type=int, help="K; by the student (Table 7), or as many as there are sentences")
    add("--max-steps", type=int, default=0, help="end after so many steps; 0: no")
    add("--max-length", type=int, default=128, help="tokens of a training sentence that are read; %(default)s")
    add("--eval-steps", type=int, default=512, help="steps between dev scores, and checkpoints; %(default)s (A.1)")
    add("--patience", type=int, default=7, help="stop after so many dev scores without progress; %(default)s")
    add("--seed", type=int, default=0, help="%(default)s")
    add("--device", default="cuda" if cuda else "cpu", help="%(default)s")
    add("--precision", choices=("fp32", "bf16", "fp16"), default="bf16" if cuda and torch.cuda.is_bf16_supported() else "fp32", help="%(default)s")
    add("--resume", action="store_true", help="go on with the run in --output, or begin it")
    add("--overwrite", action="store_true", help="throw away the run in --output")
    add("--demo", action="store_true", help="generated data, all-MiniLM-L6-v2 and its layers 1,3,5; two minutes on a CPU")
    if parser.parse_known_args()[0].demo:
        parser.set_defaults(**demo.DEFAULTS, output="runs/congen-demo", epochs=1, batch_size=64, eval_steps=50)
    return parser.parse_args()


def main():
    args = parse_args()
    if not (args.student or args.student_layers):
        raise common.DataError("give --student, or --student-layers for a student made of layers of the teacher")
    if args.precision != "fp32" if args.device == "cpu" else not (args.device.startswith("cuda") and torch.cuda.is_available()):
        raise common.DataError(f"--device {args.device} --precision {args.precision}: expected cpu and fp32, or cuda on a machine that has it")
    senteval = common.resolve(args.senteval or "senteval.tar") if args.senteval or not args.dev else None
    test_sets = demo.test() if args.demo else common.read_sts(senteval) if senteval and not args.skip_test else {}
    dev_set = demo.dev() if args.dev == "demo" else {"dev": common.read_graded_pairs(args.dev)} if args.dev else common.read_sts(senteval, "dev")
    if args.pairs:
        sentences, others = map(list, zip(*(pair for _, pair in common.read_columns(args.pairs, ("first view", "second view")))))
    elif args.train.endswith(".csv"):
        sentences = list(dict.fromkeys(text for triplet in common.read_triplets(common.resolve(args.train)) for text in triplet))
    else:
        sentences = demo.sentences(10_000) if args.train == "demo" else common.read_sentences(common.resolve(args.train))
    own = (args.student, args.pooling) if args.student else (args.teacher, args.pooling or args.teacher_pooling)
    encoder = common.load_encoder(*own, "mean", args.student_layers).to(args.device)
    name, millions = "" if args.student_layers else Path(args.student).name.lower(), sum(p.numel() for p in encoder.parameters()) / 1e6
    nearest = min(TABLE_7, key=lambda row: abs(TABLE_7[row][4] - millions))
    row = next((row for row in TABLE_7 if name in TABLE_7[row][5].lower().split()), nearest)
    defaults = dict(zip(("teacher_temperature", "student_temperature", "queue_size", "lr"), TABLE_7[row]))
    defaults["queue_size"] = min(defaults["queue_size"], len(sentences))
    print(f"Table 7: what is not given is taken from {row}", file=sys.stderr)
    vars(args).update({key: value for key, value in defaults.items() if getattr(args, key) is None})
    run = common.Run(args, ("seed", "max_steps", "alpha"))  # writes nothing yet
    if not min(args.batch_size, len(sentences)) <= args.queue_size <= len(sentences) or args.alpha > 1:
        raise common.DataError(f"--queue-size {args.queue_size} --alpha {args.alpha}: expected a queue from a batch, {args.batch_size}, to all "
                               f"{len(sentences)} sentences, and an alpha from 0 to 1")
    teacher = common.load_encoder(args.teacher, args.teacher_pooling).to(args.device).eval()
    synonyms = read_wordnet(args.wordnet) if args.augment == "synonym" and not args.pairs else None
    masked_lm = load_masked_lm(args.masked_lm, args.device) if args.augment == "mlm" and not args.pairs else None

    def second(rows, random):  # the second views of a batch; those that are made are made afresh, so that each epoch has its own
        texts = [(others if args.pairs else sentences)[i] for i in rows]
        if not args.pairs:
            texts = fill_masks(texts, random, *masked_lm) if masked_lm else [augment(text, args.augment, random, synonyms) for text in texts]
        return common.Tokens(encoder, texts, args.max_length).batch(np.arange(len(rows)), args.device)

    def score(encoder, title):
        return common.spearman(encoder, dev_set, title) | (common.spearman(encoder, test_sets, title) if test_sets else {})

    state = run.start()
    if not state:
        scores = {"teacher": score(teacher, "teacher"), "student before": score(encoder, "student before")}
        state |= dict(scores=scores, best=next(iter(scores["student before"].values())))
        encoder.save(run.folder)
    if "student after" not in state["scores"]:
        targets = common.teacher_embeddings(teacher, teacher, common.Tokens(teacher, sentences, args.max_length), args.device)
        torch.manual_seed(args.seed)  # the head starts at random
        student = Student(encoder, teacher.width, args.head, args.precision).to(args.device)
        distill(student, common.Tokens(encoder, sentences, args.max_length), second, targets, dev_set, run, args)
        state["scores"]["student after"] = score(common.load_encoder(run.folder).to(args.device), "student after")
        run.checkpoint()
    run.card(args.student or args.teacher, args.teacher, state["scores"], "Distilled by `congen.py` (ConGen, Findings of EMNLP 2022), "
             f"objective: {args.objective}, second views: {'given' if args.pairs else args.augment}.")
    print(common.table(state["scores"]))


if __name__ == "__main__":
    common.run_main(main)
