"""Score sentence encoders on passage retrieval: MRR@10, nDCG@10 and Recall@10/100/1000 in percent,
encoding speed, and the size of an embedding.

The data is a BEIR folder (corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv, gzipped or not), or a data
set on the Hugging Face Hub, such as BeIR/msmarco. support/retrieval.py describes the files.

Search is exact, by cosine similarity or inner product (--similarity dot). The corpus is read,
encoded and compared with all queries in chunks of 20,000 passages, so that the comparison needs no
more than --memory, however large the corpus is. Beside it, memory contains the model, one chunk
with its embeddings, 8 bytes a passage to find repeated ids, and 8 KB a query for its best 1000
passages. Of equal scores the passage that comes first in the corpus ranks first. The passage that
has a query's own id is left out of its ranking, unless the qrels say that it is an answer.

IBKD's 6,980 test queries of MS MARCO are --split dev; its test.tsv is TREC-DL 2019, 43 queries.
coCondenser and RetroMAE are read at [CLS] and compared by inner product, which their folders do not
state: --pooling cls --similarity dot.

  python eval_retrieval.py runs/ibkd sentence-transformers/all-MiniLM-L6-v2 --beir my-beir-folder
  python eval_retrieval.py runs/ibkd --beir my-beir-folder --document-model TEACHER
                                    the teacher encodes the passages, the student the queries
  python eval_retrieval.py Luyu/co-condenser-marco-retriever --beir BeIR/msmarco --split dev
      --pooling cls --similarity dot
"""

from common import DataError, table
from support.command_line import (
    ArgumentParser,
    add_evaluation_options,
    run_main,
    up_to_million,
    write_report,
)
from support.encoder import POOLING_NAMES, load_encoder
from support.retrieval import SIMILARITIES, evaluate, passages, read_judged, read_queries

GIGABYTE = 1e9
BYTES_FP16 = 2
BYTES_FP32 = 4


def parse_args():
    parser = ArgumentParser(
        "MRR@10, nDCG@10 and Recall of sentence encoders on a BEIR folder, by exact search"
    )
    add_evaluation_options(parser)
    add = parser.add_argument
    add("--beir", required=True, help="BEIR folder, or a data set on the Hub: BeIR/msmarco")
    add("--split", default="test", help="which qrels/SPLIT.tsv; %(default)s")
    add("--pooling", choices=POOLING_NAMES, help="read every model so, whatever its folder states")
    add("--similarity", choices=SIMILARITIES, default="cosine", help="%(default)s")
    add(
        "--document-model",
        metavar="M",
        help="encode the passages with this model, the queries with each MODEL",
    )
    add("--fp16", action="store_true", help="store passages with two bytes a number")
    add("--memory", type=up_to_million, default=2, help="GB for the search; %(default)s")
    return parser.parse()


def load_pair(name, args):
    """The encoder of queries and that of passages -> two Encoders, the same one by default.

    Raises DataError if their embeddings cannot be compared.
    """
    encoder = load_encoder(name, args.pooling).to(args.device).eval()
    if args.document_model is None:
        return encoder, encoder
    document = load_encoder(args.document_model, args.pooling).to(args.device).eval()
    if document.dimension != encoder.dimension:
        raise DataError(
            f"--document-model {args.document_model}: dimension {document.dimension}, "
            f"expected {encoder.dimension}, that of {name}"
        )
    return encoder, document


def main():
    args = parse_args()
    judged, count = read_judged(args.beir, args.split, read_queries(args.beir))
    rows = {}
    for name in args.models:
        encoder, document = load_pair(name, args)
        scores, seconds = evaluate(
            encoder,
            judged,
            passages(args.beir),
            document,
            args.similarity,
            args.fp16,
            args.memory * GIGABYTE,
            name,
        )
        size = document.dimension * (BYTES_FP16 if args.fp16 else BYTES_FP32)
        rows[name] = scores | {"passages/s": count / seconds, "bytes": size}
    print(table(rows))
    write_report(args.json, rows)


if __name__ == "__main__":
    run_main(main)
