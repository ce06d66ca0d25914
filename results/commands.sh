# The commands of the runs that the pages of results/ rest on; results/runs.py runs all of them.
#
# Paste the lines up to "## size" into bash, in the project's folder, then any command. "# KD: seeds
# 0, 1, 2" names the runs KD-0, KD-1 and KD-2: set SEED before each. A later option takes the place
# of an earlier one, those of @runs/NAME.txt included. GNU head and awk. Training sees STS-B dev
# alone; no run that trains sees a test set.

DATA=${DATA:-data}  # the folder that results/data_sets.py writes
T=${T:-sentence-transformers/all-MiniLM-L6-v2}
M=${M:-sentence-transformers/all-mpnet-base-v2}
E=${E:-intfloat/multilingual-e5-small}  # measured: a copy, see results/multilingual.md
FIRST5K=runs/first5k.txt
FIRST10K=runs/first10k.txt
FIRST20K=runs/first20k.txt
FIRST50K=runs/first50k.txt
STSB_DEV=runs/sts-b-dev.tsv
STSB_TEST=runs/sts-b-test.tsv
DE_EN_DEV=runs/prompted-dev.tsv
SEED=0

mkdir -p runs
head -n 5000 $DATA/unlabeled.txt > $FIRST5K
head -n 10000 $DATA/unlabeled.txt > $FIRST10K
head -n 20000 $DATA/unlabeled.txt > $FIRST20K
head -n 50000 $DATA/unlabeled.txt > $FIRST50K
STSB=$(find -L $DATA/senteval -name STSBenchmark)
awk -F '\t' -v OFS='\t' '{ print $6, $7, $5 }' $STSB/sts-dev.csv > $STSB_DEV
awk -F '\t' -v OFS='\t' '{ print $6, $7, $5 }' $STSB/sts-test.csv > $STSB_TEST

# A BEIR folder's passages, one per line.
texts() {
    python - $1/corpus.jsonl <<'END'
import json, sys

for line in open(sys.argv[1], encoding="utf-8"):
    row = json.loads(line)
    print(" ".join([row.get("title", ""), row["text"]]).strip())
END
}
texts $DATA/retrieval/scifact > runs/scifact-passages.txt  # 5,183
texts $DATA/retrieval/qnli > runs/qnli-passages.txt  # 6,102
# General sentences, and the passages of two corpora.
cat $FIRST10K runs/{scifact,qnli}-passages.txt > runs/own-two.txt
# QNLI's passages and training questions, without those of dev: what extras.ibkd_dr's stage 1 reads.
python - $DATA/retrieval/qnli > runs/qnli-texts.txt <<'END'
import sys
from extras.eval_retrieval import read_training

passages, questions, *_ = read_training(sys.argv[1], dev_queries=2000)
print(*passages, *questions, sep="\n")
END
cat $DATA/german/sentences.{de,en}.txt > runs/de-en.txt
# German and English: sentences, and the passages of XQuAD-R, each with both of E5's prompts.
for language in de en; do
    head -n 2500 $DATA/german/sentences.$language.txt
    texts $DATA/german/xquad-$language
done | awk '{ print "query: " $0; print "passage: " $0 }' > runs/prompted.txt
PROMPTED='{ print "query: " $1, "query: " $2, $3 }'
cat $DATA/german/stsb-{de,en}-dev.tsv | awk -F '\t' -v OFS='\t' "$PROMPTED" > $DE_EN_DEV
for language in de en; do
    awk -F '\t' -v OFS='\t' "$PROMPTED" $DATA/german/stsb-$language-test.tsv \
        > runs/prompted-test-$language.tsv
done
# Training texts with lines of one half of a corpus.
python results/unseen.py lines $DATA/retrieval/scifact $DATA/unlabeled.txt runs/scifact
head -n 150 $STSB_DEV > runs/short-dev.tsv  # chooses nothing: the last step is kept

# Options that several commands share: @runs/NAME.txt.
options() { cat > runs/$1.txt; }
options small <<END  # cut from all-MiniLM-L6-v2, and trained by its embeddings
--objective kd --teacher $T --dev $STSB_DEV --epochs 1 --batch-size 64 --lr 4e-4
--max-length 64 --eval-steps 391 --group-by-length --precision bf16
END
options half <<END  # the last step; dev chooses nothing
--objective kd --teacher $T --student-layers 0,3,5 --dev runs/short-dev.tsv
--epochs 1 --batch-size 64 --lr 4e-4 --max-length 64
--eval-steps 1000 --group-by-length
END
options answers <<END  # questions with known answers
--teacher $T --beir $DATA/retrieval/qnli --batch-size 64 --lr 4e-4 --temperature 0.2
--finetune-batch-size 32 --finetune-epochs 1 --finetune-lr 3e-5 --hard-negatives 4
--eval-steps 99999 --group-by-length
END
options grids <<END  # every loss: a cut of all-MiniLM-L6-v2 by the scan, 10,000 sentences
--teacher $T --student-layers 0,3,5 --train $FIRST10K --dev $STSB_DEV --epochs 1
--batch-size 64 --max-length 64 --eval-steps 99999 --group-by-length
END
options views <<END  # the same for SimCSE, which has no teacher, and counts steps
--student $T --student-layers 0,3,5 --train $FIRST10K --dev $STSB_DEV --steps 157
--pooling avg --batch-size 64 --max-length 64 --eval-steps 99999 --group-by-length
END
options e5 <<END  # three layers of multilingual-e5-small, with fewer tokens
--teacher runs/e5-plain --student runs/e5-plain-20k --student-layers 0,10,11
--train runs/prompted.txt --dev $DE_EN_DEV --epochs 1 --batch-size 64
--max-length 64 --eval-steps 99999 --group-by-length
END
options e5-models <<END  # teachers and students
runs/e5-plain runs/e5-plain-20k runs/try-E5-KD/lr=16e-4 runs/E5-KD-1 runs/E5-KD-2
runs/try-E5-CKD/temperature=0.05 runs/E5-CKD-1 runs/E5-CKD-2
END
options dse <<END  # cross-encoders and their students
--student $T --data $DATA/glue --task stsb --epochs 2 --lr 1e-4 --eval-steps 180
--group-by-length
END

## size
# scan-three
python -m extras.layers $T --keep 3 --dev $STSB_DEV
# scan-two
python -m extras.layers $T --keep 2 --dev $STSB_DEV
# three: seeds 0, 1, 2
python ckd.py @runs/small.txt --student-layers 0,3,5 --train $FIRST50K --seed $SEED \
    --output runs/three-$SEED
# three-r: seeds 0, 1, 2
python -m extras.rounded ckd.py @runs/small.txt --student-layers 0,3,5 --train $FIRST50K \
    --seed $SEED --output runs/three-r-$SEED
# two-r: seeds 0, 1, 2
python -m extras.rounded ckd.py @runs/small.txt --student-layers 0,5 --train $FIRST50K \
    --seed $SEED --output runs/two-r-$SEED
# score-six
python results/scores.py $T --data $DATA --sets sts scifact qnli --files fp32 int8 q4 \
    --json runs/score-six.json
# score-three: seeds 0, 1, 2
python results/scores.py runs/three-$SEED --data $DATA --sets sts scifact qnli \
    --files int8 --document-model $T --json runs/score-three-$SEED.json
# score-three-r: seeds 0, 1, 2
python results/scores.py runs/three-r-$SEED --data $DATA --sets sts scifact qnli --files q4 \
    --document-model $T --json runs/score-three-r-$SEED.json
# score-two-r: seeds 0, 1, 2
python results/scores.py runs/two-r-$SEED --data $DATA --sets sts scifact qnli --files q4 \
    --document-model $T --json runs/score-two-r-$SEED.json
# files
python results/files.py $T runs/three-r-0 runs/two-r-0 --pairs $STSB_TEST
# speed-orders
python -m extras.benchmark --train $FIRST20K --sentences 1536 --rounds 2 --batch-sizes 64 \
    --only train
# A limit of 128 tokens changes nothing here: training cuts texts at 64, and those of dev are shorter.
# mpnet-128
python results/default_prompt.py $M runs/mpnet-128 --max-length 128
# scan-mpnet
python -m extras.layers runs/mpnet-128 --keep 6 --dev $STSB_DEV
# mpnet-own: seeds 0, 1, 2
python ckd.py @runs/small.txt --teacher runs/mpnet-128 --student-layers 0,2,4,8,10,11 \
    --train runs/own-two.txt --lr 2e-4 --eval-steps 99999 --seed $SEED --output runs/mpnet-own-$SEED
# long-mpnet-own: seeds 0, 1, 2
python results/default_prompt.py runs/mpnet-own-$SEED runs/mpnet-own-384-$SEED --max-length 384
# score-mpnet-own: seeds 0, 1, 2
python results/scores.py runs/mpnet-own-384-$SEED --data $DATA --sets scifact qnli \
    --json runs/score-mpnet-own-$SEED.json
# sts-mpnet-own: seeds 0, 1, 2
python results/scores.py runs/mpnet-own-384-$SEED --data $DATA --sets sts \
    --json runs/sts-mpnet-own-$SEED.json
# rates-mpnet
python -m extras.sweep ckd.py "lr=4e-4,2e-4" --output runs/rates-mpnet -- @runs/small.txt \
    --precision fp32 --teacher runs/mpnet-128 --student-layers 0,2,4,8,10,11 --train $FIRST10K \
    --eval-steps 99999
# mpnet-longer: seeds 0
python ckd.py @runs/small.txt --precision fp32 --teacher runs/mpnet-128 \
    --student-layers 0,2,4,8,10,11 --train runs/own-two.txt --epochs 3 --eval-steps 99999 \
    --seed $SEED --output runs/mpnet-longer-$SEED
# long-mpnet-longer: seeds 0
python results/default_prompt.py runs/mpnet-longer-$SEED runs/mpnet-longer-384-$SEED --max-length 384
# score-mpnet-longer: seeds 0
python results/scores.py runs/mpnet-longer-384-$SEED --data $DATA --sets scifact \
    --json runs/score-mpnet-longer-$SEED.json
# mpnet-half-general: seeds 0, 1, 2
python ckd.py @runs/half.txt --teacher runs/mpnet-128 --student-layers 0,2,4,8,10,11 \
    --train runs/scifact-general.txt --seed $SEED --output runs/mpnet-half-general-$SEED
# mpnet-half-a: seeds 0, 1, 2
python ckd.py @runs/half.txt --teacher runs/mpnet-128 --student-layers 0,2,4,8,10,11 \
    --train runs/scifact-a.txt --seed $SEED --output runs/mpnet-half-a-$SEED
# mpnet-half-b: seeds 0, 1, 2
python ckd.py @runs/half.txt --teacher runs/mpnet-128 --student-layers 0,2,4,8,10,11 \
    --train runs/scifact-b.txt --seed $SEED --output runs/mpnet-half-b-$SEED
# mpnet-half
python results/unseen.py halves $DATA/retrieval/scifact runs/mpnet-128 mpnet-half-general mpnet-half
# score-mpnet
python results/scores.py $M --data $DATA --sets scifact qnli --json runs/score-mpnet.json
# sts-mpnet
python results/scores.py $M --data $DATA --sets sts --json runs/sts-mpnet.json

## search
# own-r: seeds 0, 1, 2
python -m extras.rounded ckd.py @runs/small.txt --student-layers 0,3,5 --train runs/own-two.txt \
    --epochs 3 --eval-steps 99999 --seed $SEED --output runs/own-r-$SEED
# score-own-r: seeds 0, 1, 2
python results/scores.py runs/own-r-$SEED --data $DATA --sets sts scifact qnli --files q4 \
    --document-model $T --json runs/score-own-r-$SEED.json
# unseen-general: seeds 0, 1, 2
python ckd.py @runs/half.txt --train runs/scifact-general.txt --seed $SEED \
    --output runs/unseen-general-$SEED
# unseen-scifact-a: seeds 0, 1, 2
python ckd.py @runs/half.txt --train runs/scifact-a.txt --seed $SEED \
    --output runs/unseen-scifact-a-$SEED
# unseen-scifact-b: seeds 0, 1, 2
python ckd.py @runs/half.txt --train runs/scifact-b.txt --seed $SEED \
    --output runs/unseen-scifact-b-$SEED
# unseen-scifact
python results/unseen.py halves $DATA/retrieval/scifact $T unseen-general unseen-scifact
# answers-kd-1: seeds 0, 1, 2
python ckd.py --objective kd --teacher $T --student-layers 0,3,5 --train runs/qnli-texts.txt \
    --dev $STSB_DEV --epochs 3 --batch-size 64 --lr 4e-4 --max-length 128 --eval-steps 99999 \
    --group-by-length --seed $SEED --output runs/answers-kd-1-$SEED
# answers-ibkd-1: seeds 0, 1, 2
python -m extras.ibkd_dr @runs/answers.txt --stage distill --student-layers 0,3,5 --epochs 3 \
    --seed $SEED --output runs/answers-ibkd-1-$SEED
# At another temperature; 0.2 was better on dev.
# answers-ibkd-1-3.2
python -m extras.ibkd_dr @runs/answers.txt --stage distill --student-layers 0,3,5 --epochs 3 \
    --temperature 3.2 --seed 0 --output runs/answers-ibkd-1-3.2
# answers-kd-2: seeds 0, 1, 2
python -m extras.ibkd_dr @runs/answers.txt --stage finetune --student runs/answers-kd-1-$SEED \
    --beta2 0 --seed $SEED --output runs/answers-kd-2-$SEED
# answers-ibkd-2: seeds 0, 1, 2
python -m extras.ibkd_dr @runs/answers.txt --stage finetune --student runs/answers-ibkd-1-$SEED \
    --seed $SEED --output runs/answers-ibkd-2-$SEED
# score-answers-kd-1: seeds 0, 1, 2
python results/scores.py runs/answers-kd-1-$SEED --data $DATA --sets qnli \
    --json runs/score-answers-kd-1-$SEED.json
# score-answers-ibkd-1: seeds 0, 1, 2
python results/scores.py runs/answers-ibkd-1-$SEED --data $DATA --sets qnli \
    --json runs/score-answers-ibkd-1-$SEED.json
# score-answers-kd-2: seeds 0, 1, 2
python results/scores.py runs/answers-kd-2-$SEED --data $DATA --sets qnli \
    --json runs/score-answers-kd-2-$SEED.json
# score-answers-ibkd-2: seeds 0, 1, 2
python results/scores.py runs/answers-ibkd-2-$SEED --data $DATA --sets qnli \
    --json runs/score-answers-ibkd-2-$SEED.json

## methods
# try-035-KD
python -m extras.sweep ckd.py "lr=1e-4,2e-4,4e-4,8e-4,16e-4,32e-4" --output runs/try-035-KD -- \
    @runs/grids.txt --objective kd
# try-035-L2
python -m extras.sweep extras.baselines "lr=25e-6,5e-5,1e-4,2e-4,4e-4,8e-4" \
    --output runs/try-035-L2 -- @runs/grids.txt --method l2 --head identity
# try-035-CKD
python -m extras.sweep ckd.py "lr=4e-4 temperature=0.1,0.2,0.4,0.8" --output runs/try-035-CKD -- \
    @runs/grids.txt --queue-size 8192
# try-035-CKD-more
python -m extras.sweep ckd.py "lr=4e-4 temperature=1.6" --output runs/try-035-CKD -- \
    @runs/grids.txt --queue-size 8192
# try-035-CKD-rates
python -m extras.sweep ckd.py "lr=2e-4,8e-4 temperature=1.6" --output runs/try-035-CKD -- \
    @runs/grids.txt --queue-size 8192
# try-035-CKD-limit
python -m extras.sweep ckd.py "lr=4e-4 temperature=3.2" --output runs/try-035-CKD -- \
    @runs/grids.txt --queue-size 8192
# try-035-CKD-highest
python -m extras.sweep ckd.py "lr=4e-4 temperature=6.4" --output runs/try-035-CKD -- \
    @runs/grids.txt --queue-size 8192
# try-035-IBKD
python -m extras.sweep ibkd.py "lr=4e-4 temperature=0.1,0.2,0.4,0.8" --output runs/try-035-IBKD \
    -- @runs/grids.txt --stage distill
# try-035-IBKD-more
python -m extras.sweep ibkd.py "lr=4e-4 temperature=1.6" --output runs/try-035-IBKD \
    -- @runs/grids.txt --stage distill
# try-035-IBKD-rates
python -m extras.sweep ibkd.py "lr=2e-4,8e-4 temperature=1.6" --output runs/try-035-IBKD \
    -- @runs/grids.txt --stage distill
# try-035-IBKD-limit
python -m extras.sweep ibkd.py "lr=4e-4 temperature=3.2" --output runs/try-035-IBKD \
    -- @runs/grids.txt --stage distill
# try-035-IBKD-highest
python -m extras.sweep ibkd.py "lr=4e-4 temperature=6.4" --output runs/try-035-IBKD \
    -- @runs/grids.txt --stage distill
# try-035-ConGen-0.1
python -m extras.sweep congen.py "lr=2e-4,8e-4" --output runs/try-035-ConGen-0.1 -- \
    @runs/grids.txt --queue-size 8192 --head identity --teacher-temperature 0.1 \
    --student-temperature 0.1
# try-035-ConGen-0.2
python -m extras.sweep congen.py "lr=2e-4,8e-4" --output runs/try-035-ConGen-0.2 -- \
    @runs/grids.txt --queue-size 8192 --head identity --teacher-temperature 0.2 \
    --student-temperature 0.2
# try-035-ConGen-0.4
python -m extras.sweep congen.py "lr=1e-4,2e-4,4e-4,8e-4" --output runs/try-035-ConGen-0.4 -- \
    @runs/grids.txt --queue-size 8192 --head identity --teacher-temperature 0.4 \
    --student-temperature 0.4
# try-035-ConGen-0.8
python -m extras.sweep congen.py "lr=2e-4,8e-4" --output runs/try-035-ConGen-0.8 -- \
    @runs/grids.txt --queue-size 8192 --head identity --teacher-temperature 0.8 \
    --student-temperature 0.8
# try-035-SimCSE
python -m extras.sweep distilface.py "lr=3e-5 temperature=0.1,0.2,0.4,0.8" \
    --output runs/try-035-SimCSE -- @runs/views.txt
# try-035-SimCSE-more
python -m extras.sweep distilface.py "lr=15e-6 temperature=0.05,0.2" \
    --output runs/try-035-SimCSE -- @runs/views.txt
# try-035-SimCSE-limit
python -m extras.sweep distilface.py "lr=75e-7 temperature=0.1" --output runs/try-035-SimCSE -- \
    @runs/views.txt
# try-035-SimCSE-rates
python -m extras.sweep distilface.py "lr=15e-6,6e-5 temperature=0.1" \
    --output runs/try-035-SimCSE -- @runs/views.txt
# try-035-SimCSE-lowest
python -m extras.sweep distilface.py "lr=375e-8 temperature=0.1" --output runs/try-035-SimCSE -- \
    @runs/views.txt
# score-035-before
python eval_sts.py $T --student-layers 0,3,5 --senteval $DATA/senteval \
    --json runs/score-035-before.json
# 035-KD: seeds 1, 2
python ckd.py @runs/grids.txt --objective kd --lr 4e-4 --seed $SEED --output runs/035-KD-$SEED
# score-035-KD-0
python results/scores.py "runs/try-035-KD/lr=4e-4" --data $DATA --sets sts \
    --json runs/score-035-KD-0.json
# score-035-KD: seeds 1, 2
python results/scores.py runs/035-KD-$SEED --data $DATA --sets sts \
    --json runs/score-035-KD-$SEED.json
# 035-L2: seeds 1, 2
python -m extras.baselines @runs/grids.txt --method l2 --head identity --lr 1e-4 --seed $SEED \
    --output runs/035-L2-$SEED
# score-035-L2-0
python results/scores.py "runs/try-035-L2/lr=1e-4" --data $DATA --sets sts \
    --json runs/score-035-L2-0.json
# score-035-L2: seeds 1, 2
python results/scores.py runs/035-L2-$SEED --data $DATA --sets sts \
    --json runs/score-035-L2-$SEED.json
# 035-CKD: seeds 1, 2
python ckd.py @runs/grids.txt --queue-size 8192 --lr 4e-4 --temperature 3.2 --seed $SEED \
    --output runs/035-CKD-$SEED
# score-035-CKD-0
python results/scores.py "runs/try-035-CKD/lr=4e-4,temperature=3.2" --data $DATA --sets sts \
    --json runs/score-035-CKD-0.json
# score-035-CKD: seeds 1, 2
python results/scores.py runs/035-CKD-$SEED --data $DATA --sets sts \
    --json runs/score-035-CKD-$SEED.json
# 035-IBKD: seeds 1, 2
python ibkd.py @runs/grids.txt --stage distill --lr 4e-4 --temperature 3.2 --seed $SEED \
    --output runs/035-IBKD-$SEED
# score-035-IBKD-0
python results/scores.py "runs/try-035-IBKD/lr=4e-4,temperature=3.2" --data $DATA --sets sts \
    --json runs/score-035-IBKD-0.json
# score-035-IBKD: seeds 1, 2
python results/scores.py runs/035-IBKD-$SEED --data $DATA --sets sts \
    --json runs/score-035-IBKD-$SEED.json
# 035-ConGen: seeds 1, 2
python congen.py @runs/grids.txt --queue-size 8192 --head identity --lr 2e-4 \
    --teacher-temperature 0.4 --student-temperature 0.4 --seed $SEED --output runs/035-ConGen-$SEED
# score-035-ConGen-0
python results/scores.py "runs/try-035-ConGen-0.4/lr=2e-4" --data $DATA --sets sts \
    --json runs/score-035-ConGen-0.json
# score-035-ConGen: seeds 1, 2
python results/scores.py runs/035-ConGen-$SEED --data $DATA --sets sts \
    --json runs/score-035-ConGen-$SEED.json
# 035-SimCSE: seeds 1, 2
python distilface.py @runs/views.txt --lr 75e-7 --temperature 0.1 --seed $SEED \
    --output runs/035-SimCSE-$SEED
# score-035-SimCSE-0
python results/scores.py "runs/try-035-SimCSE/lr=75e-7,temperature=0.1" --data $DATA --sets sts \
    --json runs/score-035-SimCSE-0.json
# score-035-SimCSE: seeds 1, 2
python results/scores.py runs/035-SimCSE-$SEED --data $DATA --sets sts \
    --json runs/score-035-SimCSE-$SEED.json
# M-aligned
python -m extras.align --teacher $M --student $T --student-layers 0,3,5 --train $FIRST5K \
    --output runs/M-aligned
# try-M-KD
python -m extras.sweep ckd.py "lr=1e-4,2e-4,4e-4,8e-4" --output runs/try-M-KD -- @runs/grids.txt \
    --teacher runs/M-aligned --student $T --objective kd
# try-M-CKD
python -m extras.sweep ckd.py "lr=4e-4 temperature=0.05,0.1,0.2,0.4" --output runs/try-M-CKD -- \
    @runs/grids.txt --teacher runs/M-aligned --student $T --queue-size 8192
# M-KD-1
python ckd.py @runs/grids.txt --teacher runs/M-aligned --student $T --objective kd --lr 4e-4 \
    --seed 1 --output runs/M-KD-1

## multilingual
# e5-20k
python -m extras.trim $E --train runs/de-en.txt --tokens 20000 --output runs/e5-20k
# e5-plain
python results/default_prompt.py $E runs/e5-plain
# e5-plain-20k
python results/default_prompt.py runs/e5-20k runs/e5-plain-20k
# try-E5-KD
python -m extras.sweep ckd.py "lr=2e-4,4e-4,8e-4,16e-4,32e-4,64e-4" \
    --output runs/try-E5-KD -- @runs/e5.txt --objective kd
# try-E5-CKD
python -m extras.sweep ckd.py "temperature=0.0125,0.025,0.05,0.1" \
    --output runs/try-E5-CKD -- @runs/e5.txt --queue-size 8192 --lr 8e-4
# try-E5-CKD-rates
python -m extras.sweep ckd.py "lr=2e-4,4e-4,16e-4" --output runs/try-E5-CKD-rates -- \
    @runs/e5.txt --queue-size 8192 --temperature 0.05
# E5-KD: seeds 1, 2
python ckd.py @runs/e5.txt --objective kd --lr 16e-4 --seed $SEED --output runs/E5-KD-$SEED
# E5-CKD: seeds 1, 2
python ckd.py @runs/e5.txt --queue-size 8192 --lr 8e-4 --temperature 0.05 --seed $SEED \
    --output runs/E5-CKD-$SEED
# e5-sts-de
python eval_sts.py @runs/e5-models.txt --pairs runs/prompted-test-de.tsv --json runs/e5-sts-de.json
# e5-sts-en
python eval_sts.py @runs/e5-models.txt --pairs runs/prompted-test-en.tsv --json runs/e5-sts-en.json
# e5-xquad-de
python -m extras.eval_retrieval @runs/e5-models.txt --beir $DATA/german/xquad-de \
    --json runs/e5-xquad-de.json
# e5-xquad-en
python -m extras.eval_retrieval @runs/e5-models.txt --beir $DATA/german/xquad-en \
    --json runs/e5-xquad-en.json
# files-E5
python -m extras.quantize runs/E5-CKD-1 --pairs runs/prompted-test-de.tsv --bits 4 --rounds 1 \
    --rows 'fp32, ONNX Runtime' '4 bits'

## pairs
# Four rates of the students (DSE-0 and labels-0: 1e-4), and of the cross-encoder, on dev.
# DSE-0
python dse.py @runs/dse.txt --teacher $T --teacher-lr 5e-5 --seed 0 --output runs/DSE-0
# labels-0
python dse.py @runs/dse.txt --alpha 0 --seed 0 --output runs/labels-0
# DSE-5e-5
python dse.py @runs/dse.txt --teacher runs/DSE-0/teacher --lr 5e-5 --seed 0 --output runs/DSE-5e-5
# labels-5e-5
python dse.py @runs/dse.txt --alpha 0 --lr 5e-5 --seed 0 --output runs/labels-5e-5
# DSE-2e-5
python dse.py @runs/dse.txt --teacher runs/DSE-0/teacher --lr 2e-5 --seed 0 --output runs/DSE-2e-5
# labels-2e-5
python dse.py @runs/dse.txt --alpha 0 --lr 2e-5 --seed 0 --output runs/labels-2e-5
# DSE-1e-5
python dse.py @runs/dse.txt --teacher runs/DSE-0/teacher --lr 1e-5 --seed 0 --output runs/DSE-1e-5
# labels-1e-5
python dse.py @runs/dse.txt --alpha 0 --lr 1e-5 --seed 0 --output runs/labels-1e-5
# cross-2e-5
python dse.py @runs/dse.txt --teacher $T --teacher-only --teacher-lr 2e-5 --output runs/cross-2e-5
# cross-1e-5
python dse.py @runs/dse.txt --teacher $T --teacher-only --teacher-lr 1e-5 --output runs/cross-1e-5
# cross-1e-4
python dse.py @runs/dse.txt --teacher $T --teacher-only --teacher-lr 1e-4 --output runs/cross-1e-4
# DSE-2e-5: seeds 1, 2
python dse.py @runs/dse.txt --teacher $T --teacher-lr 5e-5 --lr 2e-5 --seed $SEED \
    --output runs/DSE-2e-5-$SEED
# labels-2e-5: seeds 1, 2
python dse.py @runs/dse.txt --alpha 0 --lr 2e-5 --seed $SEED --output runs/labels-2e-5-$SEED
