"""IBKD for dense retrieval (DR): ibkd.py's two stages on the passages and queries of a BEIR folder.

Stage 1 learns from all passages and training queries. In stage 2, the hard negatives of a query are
the passages that the teacher finds for it and that do not answer it. Every tenth training query is
kept for dev: its MRR@10 (mean reciprocal rank x 100) chooses the best student. Losses, model and
loops are those of ibkd.py; the defaults are those of retrieval in the paper's Table 1.
extras.eval_retrieval scores students on the test queries.

  python -m extras.ibkd_dr --beir my-beir-folder --teacher MODEL --student-layers 1,3,5
  python -m extras.ibkd_dr --teacher Luyu/co-condenser-marco-retriever --teacher-pooling cls
      --teacher-similarity dot --student nreimers/MiniLM-L6-H384-uncased        the paper's setting
"""

import numpy as np

import ibkd
from common import ArgumentParser, Run, in_range, note, run_main, run_settings
from common import load_encoder, load_untrained_student, teacher_embeddings
from extras import eval_retrieval
from ibkd import embed

CARD = "Trained by `extras/ibkd_dr.py` (IBKD, arXiv:2311.05472); dev is MRR@10."


class Retrieval:
    """The data of a BEIR folder: what a student learns from, and how an encoder is scored."""

    def __init__(self, args):
        self.args = args
        self.read = eval_retrieval.read_training(args.beir, args.dev_queries)
        self.passages, self.queries, self.answers, self.dev = self.read

    def texts(self, encoder):
        """P passages, then Q queries, with the prompts of this encoder."""
        eval_retrieval.set_prompts(encoder, self.args)
        passages = [encoder.passage_prompt + text for text in self.passages]
        return passages + [encoder.query_prompt + text for text in self.queries]

    def similarity(self, encoder):
        is_teacher = encoder.name == self.args.teacher
        given = self.args.teacher_similarity if is_teacher else self.args.similarity
        return eval_retrieval.similarity_of(encoder, given)

    def examples(self, teacher, targets):
        """targets [P + Q, D], of the teacher -> examples [n, 2 + K] for ibkd.finetune()."""
        how = (self.args.hard_negatives, self.similarity(teacher), self.args.device)
        rows = eval_retrieval.training_rows(targets, self.answers, *how)
        shared = np.zeros(len(rows), bool)
        for column in rows.T[:2]:  # queries, answers
            _, places, counts = np.unique(column, return_inverse=True, return_counts=True)
            shared |= counts[places] > 1
        if shared.any():
            found = f"{shared.sum()} of {len(rows)} training rows share their query or answer"
            note(f"{found}: of queries with several answers, one may be a negative in a batch")
        return rows

    def dev_score(self, encoder):
        """MRR@10 of the dev queries."""
        eval_retrieval.set_prompts(encoder, self.args)
        encoders = [encoder, encoder]  # of queries and of passages
        similarity = self.similarity(encoder)
        found = eval_retrieval.evaluate(embed, encoders, *self.dev, similarity, depth=10)
        return found["MRR@10"]


def parse_args():
    parser = ArgumentParser(__doc__)
    add = parser.add_argument_group("data").add_argument
    shown = "(default: %(default)s)"
    add("--beir", default="BeIR/msmarco", help=f"BEIR folder, or data set on the Hub {shown}")
    add("--dev-queries", type=in_range(int, 1), default=2000, help=f"at most {shown}")
    stages = ("distill", "finetune", "both")
    add("--stage", choices=stages, default="both", help=f"1, 2, or both {shown}")
    text = "text before each {} (default: the prompt of this name in a model's folder)"
    add("--query-prompt", help=text.format("query"))
    add("--passage-prompt", help=text.format("passage"))
    text = "ranks passages (default: what a model's folder states, or cosine)"
    add("--similarity", choices=eval_retrieval.MEASURES, help=text)
    text = "(default: --similarity)"
    add("--teacher-similarity", choices=eval_retrieval.MEASURES, help=text)
    text = "passages per answer (default: %(default)s; paper §4.3)"
    add("--hard-negatives", type=in_range(int, 1), default=8, help=text)
    ibkd.add_options(parser)
    parser.set_defaults(epochs=3, batch_size=128, finetune_batch_size=128, finetune_lr=1e-5)
    parser.set_defaults(output="runs/ibkd-dr")
    args = parser.parse()
    args.teacher_similarity = args.teacher_similarity or args.similarity
    return args


def run_distill(task, teacher, targets, run, args):
    """Stage 1 as a run: scores, trains, and returns at once if the run has its card."""
    if run.is_finished:
        return
    student = load_untrained_student(args)
    run.scores["teacher"] = {"dev": task.dev_score(teacher)}
    run.scores["student before"] = {"dev": task.dev_score(student)}
    teacher.to("cpu")  # frees GPU memory
    outcome = ibkd.distill(student, task.texts(student), targets, task.dev_score, run, args)
    best = load_encoder(run.folder, device=args.device)
    run.finish(*outcome, "best of stage 1", {"dev": task.dev_score(best)}, CARD)


def run_finetune(first, task, teacher, targets, run, args):
    """Stage 2 as a run, from the student of the run `first`, or from --student if that is None."""
    if run.is_finished:
        return
    teacher.to("cpu")  # frees GPU memory
    if first:
        run.scores |= first.scores
        student = load_encoder(first.folder, device=args.device, precision=args.precision)
    else:
        student = load_untrained_student(args)
        run.scores["student before"] = {"dev": task.dev_score(student)}
    examples = task.examples(teacher, targets)
    data = (task.texts(student), examples, task.dev_score)
    outcome = ibkd.finetune(student, *data, run, args)
    best = load_encoder(run.folder, device=args.device)
    run.finish(*outcome, "best of stage 2", {"dev": task.dev_score(best)}, CARD)


def main():
    args = parse_args()
    task = Retrieval(args)
    settings = run_settings(args, [__file__, ibkd.__file__, eval_retrieval.__file__], task.read)
    run = Run(settings, args, args.stage if args.stage != "both" else "finetune")
    first = Run(settings, args, "distill", is_last=False) if args.stage == "both" else None
    if not run.is_finished:
        teacher = load_encoder(args.teacher, args.teacher_pooling, device=args.device)
        texts = task.texts(teacher)
        targets = teacher_embeddings(embed, teacher, texts, args.max_length, args.precision)
        if args.stage != "finetune":
            run_distill(task, teacher, targets, first or run, args)
        if args.stage != "distill":
            run_finetune(first, task, teacher, targets, run, args)
    print(run.table())


if __name__ == "__main__":
    run_main(main)
