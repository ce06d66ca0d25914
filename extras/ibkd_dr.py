"""IBKD for dense retrieval (DR): ibkd.py's two stages on the passages and queries of a BEIR folder.

Stage 1 learns from all passages and training queries. In stage 2, the hard negatives of a query are
the passages that the teacher finds for it and that do not answer it. Every tenth training query is
kept for dev: its MRR@10 (mean reciprocal rank x 100) chooses the best student. Losses, model and
loops are those of ibkd.py; the defaults are those of retrieval in the paper's Table 1.

  python -m extras.ibkd_dr --beir my-beir-folder --teacher MODEL --student-layers 1,3,5
  python -m extras.ibkd_dr --teacher Luyu/co-condenser-marco-retriever --teacher-pooling cls
      --teacher-similarity dot --test-split dev --student nreimers/MiniLM-L6-H384-uncased
                                                                            the paper's setting
"""

import ibkd
from common import ArgumentParser, in_range, parse_options, run_main
from common import Run, load_encoder, load_untrained_student, run_settings, table
from common import add_model_options, add_run_options, teacher_embeddings
from extras import eval_retrieval
from ibkd import embed


class Retrieval:
    """The data of a BEIR folder: what a student learns from, and how an encoder is scored."""

    def __init__(self, args):
        self.args = args
        training = eval_retrieval.read_training(args.beir, args.dev_queries)
        self.passages, self.queries, self.answers, self.dev = training
        self.test = []
        if not args.skip_test:
            self.test = eval_retrieval.read_split(args.beir, args.test_split)
        self.read = [self.passages, self.queries, self.answers, self.dev, self.test]

    def texts(self, encoder):
        """P passages, then Q queries, with the prompts of this encoder."""
        eval_retrieval.set_prompts(encoder, self.args)
        passages = [encoder.passage_prompt + text for text in self.passages]
        return passages + [encoder.query_prompt + text for text in self.queries]

    def similarity(self, encoder):
        is_teacher = encoder.name == self.args.teacher
        given = self.args.teacher_similarity if is_teacher else self.args.similarity
        return eval_retrieval.similarity_of(encoder, given)

    def examples(self, teacher, vectors):
        """vectors [P + Q, D], the teacher's -> stage 2's rows, for ibkd.finetune(): [n, 2 + K]."""
        how = (self.args.hard_negatives, self.similarity(teacher), self.args.device)
        return eval_retrieval.training_rows(vectors, self.answers, *how)

    def search(self, encoder, *data, depth=1000):
        eval_retrieval.set_prompts(encoder, self.args)
        similarity = self.similarity(encoder)
        return eval_retrieval.evaluate(embed, [encoder, encoder], *data, similarity, depth)

    def dev_score(self, encoder):
        return self.search(encoder, *self.dev, depth=10)["MRR@10"]

    def scores(self, encoder):
        row = {"dev MRR@10": self.dev_score(encoder)}
        if self.test:
            corpus = eval_retrieval.read_texts(self.args.beir, "corpus.jsonl")
            row |= self.search(encoder, *self.test, corpus)
        return row


def parse_args():
    parser = ArgumentParser(__doc__)
    add_model_options(parser, "princeton-nlp/sup-simcse-roberta-large")
    ibkd.add_method_options(parser)
    parser.set_defaults(epochs=3, batch_size=128, finetune_batch_size=128, finetune_lr=1e-5)
    add = parser.add_argument_group("retrieval").add_argument
    is_default = "(default: %(default)s)"
    add("--stage", choices=("distill", "finetune", "both"), default="both", help=is_default)
    add("--beir", default="BeIR/msmarco", help=f"BEIR folder, or data set on the Hub {is_default}")
    add("--test-split", default="test", help="qrels/TEST_SPLIT.tsv (default: test; paper: dev)")
    add("--skip-test", action="store_true", help="score dev only")
    add("--dev-queries", type=in_range(int, 1), default=2000, help=f"at most {is_default}")
    prompt = "text before each {} (default: the prompt of this name in a model's folder)"
    add("--query-prompt", help=prompt.format("query"))
    add("--passage-prompt", help=prompt.format("passage"))
    measures = eval_retrieval.MEASURES
    ranks = "ranks passages (default: what a model's folder states, or cosine)"
    add("--similarity", choices=measures, help=ranks)
    add("--teacher-similarity", choices=measures, help="(default: --similarity)")
    negatives = "passages per answer (default: %(default)s; paper §4.3)"
    add("--hard-negatives", type=in_range(int, 1), default=8, help=negatives)
    add_run_options(parser, output="runs/ibkd-dr", max_length=128, eval_steps=500)
    args = parse_options(parser)
    args.teacher_similarity = args.teacher_similarity or args.similarity
    return args


def main():
    args = parse_args()
    task = Retrieval(args)
    settings = run_settings(args, [__file__, ibkd.__file__, eval_retrieval.__file__], task.read)
    first = Run(settings, args, "distill", is_last=args.stage == "distill")
    last = Run(settings, args, "finetune") if args.stage != "distill" else first
    text = "Trained by `extras/ibkd_dr.py` (IBKD, arXiv:2311.05472)."
    if last.is_finished:
        print(table(last.scores))
        return
    student = load_untrained_student(args)
    teacher = load_encoder(args.teacher, args.teacher_pooling, device=args.device)
    texts = task.texts(teacher)
    targets = teacher_embeddings(embed, teacher, texts, args.max_length, args.precision)

    if args.stage != "finetune" and not first.is_finished:
        first.scores["teacher"] = task.scores(teacher)
        first.scores["student before"] = task.scores(student)
        teacher.to("cpu")  # frees GPU memory
        texts = task.texts(student)
        outcome = ibkd.distill(student, texts, targets, task.dev_score, first, args)
        student = load_encoder(first.folder, device=args.device)  # the best one
        first.finish(*outcome, {"best of stage 1": task.scores(student)}, text)
    if args.stage != "distill":
        if args.stage == "both":
            student = load_encoder(first.folder, device=args.device)
            last.scores |= first.scores
        else:
            last.scores["student before"] = task.scores(student)
        examples = task.examples(teacher, targets)
        data = (task.texts(student), examples, task.dev_score)
        outcome = ibkd.finetune(student, *data, last, args)
        student = load_encoder(last.folder, device=args.device)
        last.finish(*outcome, {"best of stage 2": task.scores(student)}, text)
    print(table(last.scores))


if __name__ == "__main__":
    run_main(main)
