# The commands of the runs that the pages of results/ rest on; results/runs.py runs all of them.
#
# Paste the lines up to "## size" into bash, in the project's folder, then any command.
# "# KD: seeds 0, 1, 2" names the runs KD-0, KD-1 and KD-2: set SEED before each. A later option
# takes the place of an earlier one, those of @runs/NAME.txt included. GNU head and awk. Training
# sees STS-B dev alone; the runs tests-NAME have the test scores.

DATA=${DATA:-data}  # the folder that results/data_sets.py writes
T=${T:-sentence-transformers/all-MiniLM-L6-v2}
M=${M:-sentence-transformers/all-mpnet-base-v2}
E=${E:-intfloat/multilingual-e5-small}  # measured: E=$DATA/e5, see results/multilingual.md
FIRST5K=runs/first5k.txt
FIRST10K=runs/first10k.txt
FIRST20K=runs/first20k.txt
FIRST50K=runs/first50k.txt
EN_DE=runs/train.en-de.tsv
EN_DE_TEST=runs/test.en-de.tsv
STSB_DEV=runs/sts-b-dev.tsv
STSB_TEST=runs/sts-b-test.tsv
DE_EN_20K=runs/de-en-20k.txt
DE_EN_50K=runs/de-en-50k.txt
DE_EN_300K=runs/de-en-300k.txt
DE_EN_DEV=runs/de-en-dev.tsv
SEED=0

mkdir -p runs
head -n 5000 $DATA/unlabeled.txt > $FIRST5K
head -n 10000 $DATA/unlabeled.txt > $FIRST10K
head -n 20000 $DATA/unlabeled.txt > $FIRST20K
head -n 50000 $DATA/unlabeled.txt > $FIRST50K
head -n -1000 $DATA/pairs.en-de.tsv > $EN_DE
tail -n 1000 $DATA/pairs.en-de.tsv > $EN_DE_TEST
STSB=$(find -L $DATA/senteval -name STSBenchmark)
awk -F '\t' -v OFS='\t' '{ print $6, $7, $5 }' $STSB/sts-dev.csv > $STSB_DEV
awk -F '\t' -v OFS='\t' '{ print $6, $7, $5 }' $STSB/sts-test.csv > $STSB_TEST
head -q -n 10000 $DATA/german/sentences.{de,en}.txt > $DE_EN_20K
head -q -n 25000 $DATA/german/sentences.{de,en}.txt > $DE_EN_50K
cat $DATA/german/sentences.{de,en}.txt > $DE_EN_300K
cat $DATA/german/stsb-{de,en}-dev.tsv > $DE_EN_DEV
PROMPTED='{ print "query: " $1, "query: " $2, $3 }'
awk -F '\t' -v OFS='\t' "$PROMPTED" $DE_EN_DEV > runs/prompted-dev.tsv
for language in de en; do
    awk -F '\t' -v OFS='\t' "$PROMPTED" $DATA/german/stsb-$language-test.tsv \
        > runs/prompted-test-$language.tsv
done

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
# E5's two prompts by turns, and the passages of XQuAD-R.
for language in de en; do
    texts $DATA/german/xquad-$language | sed 's/^/passage: /'
done > runs/xquad-passages.txt
prompted() { awk '{ print (NR % 2 ? "query: " : "passage: ") $0 }' $1; }
prompted $DE_EN_50K | cat - runs/xquad-passages.txt > runs/prompted-50k.txt
five() { cat $1 $1 $1 $1 $1; }
prompted $DE_EN_300K | cat - <(five runs/xquad-passages.txt) > runs/prompted-300k.txt
# General sentences, and the passages of two corpora.
cat $FIRST10K runs/{scifact,qnli}-passages.txt > runs/own-two.txt

# Options that several commands share: @runs/NAME.txt.
options() { cat > runs/$1.txt; }
options sts <<END  # one epoch
--dev $STSB_DEV --epochs 1 --batch-size 64 --lr 4e-4
--max-length 64 --eval-steps 105 --group-by-length
END
options small <<END  # cut from all-MiniLM-L6-v2, and trained by its embeddings
--objective kd --teacher $T --dev $STSB_DEV --epochs 1 --batch-size 64 --lr 4e-4
--max-length 64 --eval-steps 391 --group-by-length --precision bf16
END
options own <<END  # three layers of all-MiniLM-L6-v2 from itself
--teacher $T --student-layers 1,3,5 --train $FIRST20K
--dev $STSB_DEV --epochs 1 --batch-size 64 --lr 4e-4
--max-length 64 --eval-steps 105 --group-by-length
END
options larger <<END  # the same student from all-mpnet-base-v2
--teacher $M --student $T --student-layers 1,3,5 --train $FIRST20K
--dev $STSB_DEV --epochs 1 --batch-size 64 --lr 4e-4
--max-length 64 --eval-steps 105 --group-by-length
END
options curve <<END  # layers 1,4,5 from all-mpnet-base-v2, aligned
--teacher runs/M-aligned-whole --student $T --student-layers 1,4,5
--dev $STSB_DEV --epochs 1 --batch-size 64 --lr 4e-4
--max-length 64 --eval-steps 105 --group-by-length --precision bf16
END
options cut <<END  # cuts of all-MiniLM-L6-v2
--teacher $T --train $FIRST20K --dev $STSB_DEV --epochs 1 --batch-size 64
--lr 4e-4 --max-length 64 --eval-steps 157 --group-by-length --precision bf16
END
options cut-mpnet <<END  # cuts of all-mpnet-base-v2
--teacher $M --train $FIRST10K --dev $STSB_DEV --epochs 1 --batch-size 64
--lr 2e-4 --max-length 64 --eval-steps 157 --group-by-length --precision bf16
END
options cut-e5 <<END  # cuts of multilingual-e5-small, with fewer tokens
--teacher $E --student runs/e5-20k --train $DE_EN_20K --dev $DE_EN_DEV
--epochs 1 --batch-size 64 --lr 4e-4 --max-length 64 --eval-steps 157
--group-by-length --precision bf16
END
options e5 <<END  # three layers of it, with both prompts
--teacher runs/e5-plain --student runs/e5-plain-20k --student-layers 0,10,11
--train runs/prompted-50k.txt --dev runs/prompted-dev.tsv --epochs 1
--batch-size 64 --lr 4e-4 --max-length 128 --eval-steps 410
--group-by-length --precision bf16
END
options e5-300k <<END  # its layers, 300,000 sentences
--teacher runs/e5-plain --student runs/e5-plain-20k --student-layers 0,10,11
--train runs/prompted-300k.txt --dev runs/prompted-dev.tsv --epochs 4
--batch-size 256 --lr 16e-4 --temperature 0.05 --queue-size 16384
--max-length 128 --eval-steps 610 --group-by-length --precision bf16
END
options e5-losses <<END  # the models of its table
runs/e5-KD-4e-4 runs/e5-KD-8e-4-0 runs/e5-KD-8e-4-1 runs/e5-KD-8e-4-2
runs/e5-KD-16e-4 runs/e5-CKD-0.05-8e-4-0 runs/e5-CKD-0.05-8e-4-1
runs/e5-CKD-0.05-8e-4-2 runs/e5-ConGen-0.1-4e-4 runs/e5-ConGen-0.1-8e-4
runs/e5-ConGen-0.2-4e-4 runs/e5-ConGen-0.2-8e-4 runs/e5-IBKD-0.02-4e-4
runs/e5-IBKD-0.05-4e-4 runs/e5-IBKD-0.1-4e-4 runs/e5-IBKD-0.05-8e-4
runs/e5-IBKD-0.1-8e-4
END
options files-dev <<END  # a model's files, on STS-B dev
--bits 4 --group-size 64 --pairs $STSB_DEV --rounds 2
END
options dse <<END  # cross-encoders and their students
--student $T --data $DATA/glue --epochs 3 --lr 1e-4 --group-by-length
END
options half <<END  # the last step; dev chooses nothing
--objective kd --teacher $T --student-layers 1,4,5 --dev runs/short-dev.tsv
--epochs 1 --batch-size 64 --lr 4e-4 --max-length 64
--eval-steps 1000 --group-by-length
END

options search <<END  # three layers, for search
--objective kd --teacher $T --student-layers 1,4,5 --dev $STSB_DEV --batch-size 64
--lr 4e-4 --max-length 64 --group-by-length --precision bf16
END

# Training texts with lines of one half of a corpus. The last step is kept, and dev chooses nothing.
python results/unseen.py lines $DATA/retrieval/scifact $DATA/unlabeled.txt runs/scifact
python results/unseen.py lines $DATA/retrieval/qnli $DATA/unlabeled.txt runs/qnli
head -n 150 $STSB_DEV > runs/short-dev.tsv

## size
# three: seeds 0, 1, 2
python ckd.py @runs/small.txt --student-layers 1,4,5 --train $FIRST50K --seed $SEED \
    --output runs/three-$SEED
# two: seeds 0, 1, 2
python ckd.py @runs/small.txt --student-layers 0,5 --train $FIRST50K --seed $SEED \
    --output runs/two-$SEED
# one: seeds 0, 1, 2
python ckd.py @runs/small.txt --student-layers 5 --train $FIRST50K --seed $SEED \
    --output runs/one-$SEED
# score-six
python results/scores.py $T --data $DATA --sets sts qnli --json runs/score-six.json
# score-three: seeds 0, 1, 2
python results/scores.py runs/three-$SEED --data $DATA --sets sts qnli --document-model $T \
    --json runs/score-three-$SEED.json
# score-two: seeds 0, 1, 2
python results/scores.py runs/two-$SEED --data $DATA --sets sts qnli --document-model $T \
    --json runs/score-two-$SEED.json
# score-one: seeds 0, 1, 2
python results/scores.py runs/one-$SEED --data $DATA --sets sts qnli --document-model $T \
    --json runs/score-one-$SEED.json
# files-six
python -m extras.quantize $T --pairs $STSB_TEST --bits 4 --group-size 64 --rounds 2 \
    --rows 'fp32, torch' 'fp32, ONNX Runtime' int8 '4 bits' --output runs/six
# files-three
python -m extras.quantize runs/three-0 --pairs $STSB_TEST --bits 4 --group-size 64 --rounds 2 \
    --rows 'fp32, torch' 'fp32, ONNX Runtime' int8 '4 bits'
# files-two
python -m extras.quantize runs/two-0 --pairs $STSB_TEST --bits 4 --group-size 64 --rounds 2 \
    --rows 'fp32, torch' 'fp32, ONNX Runtime' int8 '4 bits'
# files-one
python -m extras.quantize runs/one-0 --pairs $STSB_TEST --bits 4 --group-size 64 --rounds 2 \
    --rows 'fp32, torch' 'fp32, ONNX Runtime' int8 '4 bits'
# score-six-q4
python results/scores.py $T --data $DATA --sets sts qnli --files q4 --json runs/score-six-q4.json
# score-one-q4: seeds 0, 1, 2
python results/scores.py runs/one-$SEED --data $DATA --sets sts qnli --files q4 \
    --document-model $T --json runs/score-one-q4-$SEED.json
# score-two-q4: seeds 0, 1, 2
python results/scores.py runs/two-$SEED --data $DATA --sets sts qnli --files q4 \
    --document-model $T --json runs/score-two-q4-$SEED.json
# score-three-q4: seeds 0, 1, 2
python results/scores.py runs/three-$SEED --data $DATA --sets sts qnli --files q4 \
    --document-model $T --json runs/score-three-q4-$SEED.json
# scifact-six
python results/scores.py $T --data $DATA --sets scifact --files fp32 q4 \
    --json runs/scifact-six.json
# scifact-three: seeds 0, 1, 2
python results/scores.py runs/three-$SEED --data $DATA --sets scifact --files fp32 q4 \
    --document-model $T --json runs/scifact-three-$SEED.json
# scifact-two: seeds 0, 1, 2
python results/scores.py runs/two-$SEED --data $DATA --sets scifact --files fp32 q4 \
    --document-model $T --json runs/scifact-two-$SEED.json
# scifact-one: seeds 0, 1, 2
python results/scores.py runs/one-$SEED --data $DATA --sets scifact --files fp32 q4 \
    --document-model $T --json runs/scifact-one-$SEED.json
# n20k-three: seeds 0, 1, 2
python ckd.py @runs/small.txt --student-layers 1,4,5 --train $FIRST20K --seed $SEED \
    --output runs/n20k-three-$SEED

## own-teacher
# KD: seeds 0, 1, 2
python ckd.py @runs/own.txt --objective kd --seed $SEED --output runs/KD-$SEED
# KD-now: seeds 0, 1, 2
python ckd.py @runs/own.txt --objective kd --seed $SEED --output runs/KD-now-$SEED
# CKD: seeds 0, 1, 2
python ckd.py @runs/own.txt --temperature 0.2 --queue-size 16384 --seed $SEED \
    --output runs/CKD-$SEED
# ConGen: seeds 0, 1, 2
python congen.py @runs/own.txt --teacher-temperature 0.2 --student-temperature 0.2 \
    --queue-size 16384 --head identity --seed $SEED --output runs/ConGen-$SEED
# IBKD: seeds 0, 1, 2
python ibkd.py @runs/own.txt --stage distill --temperature 0.2 --seed $SEED \
    --output runs/IBKD-$SEED
# DistilFACE: seeds 0, 1, 2
python distilface.py --student $T --student-layers 1,3,5 --train $FIRST20K --temperature 0.2 \
    --dev $STSB_DEV --batch-size 64 --lr 3e-5 --pooling avg --steps 313 --eval-steps 78 \
    --group-by-length --seed $SEED --output runs/DistilFACE-$SEED
# PKD
python -m extras.baselines @runs/own.txt --method pkd --seed 0 --output runs/PKD
# MetaKD
python -m extras.baselines @runs/own.txt --method metakd --seed 0 --output runs/MetaKD
# L2
python -m extras.baselines @runs/own.txt --method l2 --head identity --seed 0 --output runs/L2
# Dual-L2
python -m extras.baselines @runs/own.txt --method dual-l2 --head identity --seed 0 \
    --output runs/Dual-L2
# SKD
python -m extras.baselines @runs/own.txt --method skd --head identity --seed 0 --output runs/SKD
# CRD
python -m extras.baselines @runs/own.txt --method crd --temperature 0.1 --seed 0 --output runs/CRD
# HPD
python -m extras.baselines @runs/own.txt --method hpd --seed 0 --output runs/HPD
# SEED
python congen.py @runs/own.txt --teacher-temperature 0.2 --student-temperature 0.2 \
    --queue-size 16384 --head identity --alpha 1 --seed 0 --output runs/SEED
# tests-own-teacher: seeds 0, 1, 2
python eval_sts.py runs/KD-$SEED runs/CKD-$SEED runs/ConGen-$SEED runs/IBKD-$SEED \
    runs/DistilFACE-$SEED --senteval $DATA/senteval
# tests-own-teacher
python eval_sts.py $T runs/PKD runs/MetaKD runs/L2 runs/Dual-L2 runs/SKD runs/CRD runs/HPD \
    runs/SEED --senteval $DATA/senteval
# tests-before
python eval_sts.py $T --student-layers 1,3,5 --senteval $DATA/senteval

## larger-teacher
# M-aligned
python -m extras.align --teacher $M --student $T --student-layers 1,3,5 --train $FIRST20K \
    --output runs/M-aligned
# M-KD-aligned: seeds 0, 1, 2
python ckd.py @runs/larger.txt --objective kd --teacher runs/M-aligned --seed $SEED \
    --output runs/M-KD-aligned-$SEED
# M-KD: seeds 0, 1, 2
python ckd.py @runs/larger.txt --objective kd --seed $SEED --output runs/M-KD-$SEED
# M-CKD: seeds 0, 1, 2
python ckd.py @runs/larger.txt --temperature 0.05 --queue-size 16384 --seed $SEED \
    --output runs/M-CKD-$SEED
# M-CKD-aligned: seeds 0, 1, 2
python ckd.py @runs/larger.txt --teacher runs/M-aligned --temperature 0.05 --queue-size 16384 \
    --seed $SEED --output runs/M-CKD-aligned-$SEED
# M-ConGen: seeds 0, 1, 2
python congen.py @runs/larger.txt --teacher-temperature 0.1 --student-temperature 0.1 \
    --queue-size 16384 --seed $SEED --output runs/M-ConGen-$SEED
# M-IBKD: seeds 0, 1, 2
python ibkd.py @runs/larger.txt --stage distill --temperature 0.1 --seed $SEED \
    --output runs/M-IBKD-$SEED
# M-SEED
python congen.py @runs/larger.txt --teacher-temperature 0.1 --student-temperature 0.1 \
    --queue-size 16384 --alpha 1 --seed 0 --output runs/M-SEED
# M-PKD
python -m extras.baselines @runs/larger.txt --method pkd --seed 0 --output runs/M-PKD
# M-CRD
python -m extras.baselines @runs/larger.txt --method crd --temperature 0.1 --seed 0 \
    --output runs/M-CRD
# M-L2
python -m extras.baselines @runs/larger.txt --method l2 --lr 8e-4 --seed 0 --output runs/M-L2
# M-Dual-L2
python -m extras.baselines @runs/larger.txt --method dual-l2 --lr 8e-4 --seed 0 \
    --output runs/M-Dual-L2
# M-SKD
python -m extras.baselines @runs/larger.txt --method skd --lr 8e-4 --seed 0 --output runs/M-SKD
# M-HPD
python -m extras.baselines @runs/larger.txt --method hpd --lr 8e-4 --seed 0 --output runs/M-HPD
# tests-larger-teacher: seeds 0, 1, 2
python eval_sts.py runs/M-KD-aligned-$SEED runs/M-KD-$SEED runs/M-CKD-$SEED \
    runs/M-CKD-aligned-$SEED runs/M-ConGen-$SEED runs/M-IBKD-$SEED --senteval $DATA/senteval
# tests-larger-teacher
python eval_sts.py $M runs/M-aligned runs/M-SEED runs/M-PKD runs/M-CRD runs/M-L2 runs/M-Dual-L2 \
    runs/M-SKD runs/M-HPD --senteval $DATA/senteval
# M-aligned-whole
python -m extras.align --teacher $M --student $T --train $FIRST20K --output runs/M-aligned-whole
# three-M-KD-20k
python ckd.py @runs/curve.txt --objective kd --train $FIRST20K --seed 0 \
    --output runs/three-M-KD-20k
# three-M-KD-50k
python ckd.py @runs/curve.txt --objective kd --train $FIRST50K --seed 0 \
    --output runs/three-M-KD-50k
# three-M-KD-182k
python ckd.py @runs/curve.txt --objective kd --train $DATA/unlabeled.txt --eval-steps 500 --seed 0 \
    --output runs/three-M-KD-182k
# three-M-KD-3x182k
python ckd.py @runs/curve.txt --objective kd --train $DATA/unlabeled.txt --epochs 3 \
    --eval-steps 500 --seed 0 --output runs/three-M-KD-3x182k
# three-M-CKD-20k
python ckd.py @runs/curve.txt --train $FIRST20K --temperature 0.05 --queue-size 16384 --seed 0 \
    --output runs/three-M-CKD-20k
# three-own-KD-182k
python ckd.py @runs/curve.txt --objective kd --teacher $T --train $DATA/unlabeled.txt \
    --eval-steps 500 --seed 0 --output runs/three-own-KD-182k
# three-own-KD-182k-1
python ckd.py @runs/curve.txt --objective kd --teacher $T --train $DATA/unlabeled.txt \
    --eval-steps 500 --seed 1 --output runs/three-own-KD-182k-1
# six-M-KD-20k
python ckd.py @runs/sts.txt --objective kd --teacher runs/M-aligned-whole --student $T \
    --train $FIRST20K --dropout 0 --precision bf16 --seed 0 --output runs/six-M-KD-20k
# six-M-KD-20k-slow
python ckd.py @runs/sts.txt --objective kd --teacher runs/M-aligned-whole --student $T \
    --train $FIRST20K --lr 5e-5 --dropout 0 --precision bf16 --seed 0 \
    --output runs/six-M-KD-20k-slow
# curve
python eval_sts.py runs/three-M-KD-20k runs/three-M-KD-50k runs/three-M-KD-182k \
    runs/three-M-CKD-20k runs/three-own-KD-182k runs/three-M-KD-3x182k runs/six-M-KD-20k \
    runs/six-M-KD-20k-slow --senteval $DATA/senteval
# curve-seeds
python eval_sts.py runs/three-own-KD-182k-1 --senteval $DATA/senteval

## layers
# KD-three-layers
python ckd.py @runs/own.txt --objective kd --train $DATA/unlabeled.txt --eval-steps 500 --seed 0 \
    --output runs/KD-three-layers
# KD-two-layers
python ckd.py @runs/own.txt --objective kd --student-layers 0,5 --train $DATA/unlabeled.txt \
    --eval-steps 500 --seed 0 --output runs/KD-two-layers
# KD-one-layer
python ckd.py @runs/own.txt --objective kd --student-layers 5 --train $DATA/unlabeled.txt \
    --eval-steps 500 --seed 0 --output runs/KD-one-layer
# layers-0-5-50k: seeds 0, 1, 2
python ckd.py @runs/own.txt --objective kd --student-layers 0,5 --train $FIRST50K --seed $SEED \
    --output runs/layers-0-5-50k-$SEED
# layer-5-50k: seeds 0, 1, 2
python ckd.py @runs/own.txt --objective kd --student-layers 5 --train $FIRST50K --seed $SEED \
    --output runs/layer-5-50k-$SEED
# layers-1-4-5-50k
python ckd.py @runs/own.txt --objective kd --student-layers 1,4,5 --train $FIRST50K --seed 0 \
    --output runs/layers-1-4-5-50k
# layers-1-4-5-50k: seeds 1, 2
python ckd.py @runs/own.txt --objective kd --student-layers 1,4,5 --train $FIRST50K --seed $SEED \
    --output runs/layers-1-4-5-50k-$SEED
# layers-1-4-5
python ckd.py @runs/own.txt --objective kd --student-layers 1,4,5 --seed 0 \
    --output runs/layers-1-4-5
# KD-5k
python ckd.py @runs/own.txt --objective kd --train $FIRST5K --seed 0 --output runs/KD-5k
# KD-50k
python ckd.py @runs/own.txt --objective kd --train $FIRST50K --seed 0 --output runs/KD-50k
# KD-50k: seeds 1, 2
python ckd.py @runs/own.txt --objective kd --train $FIRST50K --seed $SEED \
    --output runs/KD-50k-$SEED
# tests-layers
python eval_sts.py runs/KD-three-layers runs/KD-two-layers runs/KD-one-layer \
    runs/layers-0-5-50k-0 runs/layers-0-5-50k-1 runs/layers-0-5-50k-2 runs/layer-5-50k-0 \
    runs/layer-5-50k-1 runs/layer-5-50k-2 runs/layers-1-4-5-50k runs/layers-1-4-5-50k-1 \
    runs/layers-1-4-5-50k-2 runs/layers-1-4-5 runs/KD-5k runs/KD-50k runs/KD-50k-1 runs/KD-50k-2 \
    --senteval $DATA/senteval
# minilm-0-1-5
python ckd.py @runs/cut.txt --objective kd --student-layers 0,1,5 --seed 0 \
    --output runs/minilm-0-1-5
# minilm-0-2-5
python ckd.py @runs/cut.txt --objective kd --student-layers 0,2,5 --seed 0 \
    --output runs/minilm-0-2-5
# minilm-0-3-5
python ckd.py @runs/cut.txt --objective kd --student-layers 0,3,5 --seed 0 \
    --output runs/minilm-0-3-5
# minilm-0-4-5
python ckd.py @runs/cut.txt --objective kd --student-layers 0,4,5 --seed 0 \
    --output runs/minilm-0-4-5
# minilm-1-2-5
python ckd.py @runs/cut.txt --objective kd --student-layers 1,2,5 --seed 0 \
    --output runs/minilm-1-2-5
# minilm-1-3-5
python ckd.py @runs/cut.txt --objective kd --student-layers 1,3,5 --seed 0 \
    --output runs/minilm-1-3-5
# minilm-1-4-5
python ckd.py @runs/cut.txt --objective kd --student-layers 1,4,5 --seed 0 \
    --output runs/minilm-1-4-5
# minilm-2-3-5
python ckd.py @runs/cut.txt --objective kd --student-layers 2,3,5 --seed 0 \
    --output runs/minilm-2-3-5
# minilm-2-4-5
python ckd.py @runs/cut.txt --objective kd --student-layers 2,4,5 --seed 0 \
    --output runs/minilm-2-4-5
# minilm-3-4-5
python ckd.py @runs/cut.txt --objective kd --student-layers 3,4,5 --seed 0 \
    --output runs/minilm-3-4-5
# minilm-0-5
python ckd.py @runs/cut.txt --objective kd --student-layers 0,5 --seed 0 --output runs/minilm-0-5
# minilm-1-5
python ckd.py @runs/cut.txt --objective kd --student-layers 1,5 --seed 0 --output runs/minilm-1-5
# minilm-2-5
python ckd.py @runs/cut.txt --objective kd --student-layers 2,5 --seed 0 --output runs/minilm-2-5
# minilm-3-5
python ckd.py @runs/cut.txt --objective kd --student-layers 3,5 --seed 0 --output runs/minilm-3-5
# minilm-4-5
python ckd.py @runs/cut.txt --objective kd --student-layers 4,5 --seed 0 --output runs/minilm-4-5
# mpnet-0-7-11
python ckd.py @runs/cut-mpnet.txt --objective kd --student-layers 0,7,11 --seed 0 \
    --output runs/mpnet-0-7-11
# mpnet-0-10-11
python ckd.py @runs/cut-mpnet.txt --objective kd --student-layers 0,10,11 --seed 0 \
    --output runs/mpnet-0-10-11
# mpnet-3-7-11
python ckd.py @runs/cut-mpnet.txt --objective kd --student-layers 3,7,11 --seed 0 \
    --output runs/mpnet-3-7-11
# mpnet-1-4-11
python ckd.py @runs/cut-mpnet.txt --objective kd --student-layers 1,4,11 --seed 0 \
    --output runs/mpnet-1-4-11
# mpnet-4-9-11
python ckd.py @runs/cut-mpnet.txt --objective kd --student-layers 4,9,11 --seed 0 \
    --output runs/mpnet-4-9-11
# e5-20k
python -m extras.trim $E --train $DE_EN_300K --tokens 20000 --output runs/e5-20k
# e5-0-10-11
python ckd.py @runs/cut-e5.txt --objective kd --student-layers 0,10,11 --seed 0 \
    --output runs/e5-0-10-11
# e5-3-9-11
python ckd.py @runs/cut-e5.txt --objective kd --student-layers 3,9,11 --seed 0 \
    --output runs/e5-3-9-11
# e5-4-9-11
python ckd.py @runs/cut-e5.txt --objective kd --student-layers 4,9,11 --seed 0 \
    --output runs/e5-4-9-11
# e5-0-1-11
python ckd.py @runs/cut-e5.txt --objective kd --student-layers 0,1,11 --seed 0 \
    --output runs/e5-0-1-11
# e5-0-4-11
python ckd.py @runs/cut-e5.txt --objective kd --student-layers 0,4,11 --seed 0 \
    --output runs/e5-0-4-11
# e5-0-8-11
python ckd.py @runs/cut-e5.txt --objective kd --student-layers 0,8,11 --seed 0 \
    --output runs/e5-0-8-11
# e5-1-4-11
python ckd.py @runs/cut-e5.txt --objective kd --student-layers 1,4,11 --seed 0 \
    --output runs/e5-1-4-11
# e5-1-3-11
python ckd.py @runs/cut-e5.txt --objective kd --student-layers 1,3,11 --seed 0 \
    --output runs/e5-1-3-11
# e5-9-10-11
python ckd.py @runs/cut-e5.txt --objective kd --student-layers 9,10,11 --seed 0 \
    --output runs/e5-9-10-11
# e5-1-8-11
python ckd.py @runs/cut-e5.txt --objective kd --student-layers 1,8,11 --seed 0 \
    --output runs/e5-1-8-11
# e5-0-7-11
python ckd.py @runs/cut-e5.txt --objective kd --student-layers 0,7,11 --seed 0 \
    --output runs/e5-0-7-11
# e5-3-7-11
python ckd.py @runs/cut-e5.txt --objective kd --student-layers 3,7,11 --seed 0 \
    --output runs/e5-3-7-11
# e5-1-7-11
python ckd.py @runs/cut-e5.txt --objective kd --student-layers 1,7,11 --seed 0 \
    --output runs/e5-1-7-11
# e5-six-0-1-2-9-10-11
python ckd.py @runs/cut-e5.txt --student-layers 0,1,2,9,10,11 --temperature 0.05 \
    --queue-size 16384 --seed 0 --output runs/e5-six-0-1-2-9-10-11
# e5-six-0-1-4-9-10-11
python ckd.py @runs/cut-e5.txt --student-layers 0,1,4,9,10,11 --temperature 0.05 \
    --queue-size 16384 --seed 0 --output runs/e5-six-0-1-4-9-10-11
# e5-six-0-1-4-5-9-11
python ckd.py @runs/cut-e5.txt --student-layers 0,1,4,5,9,11 --temperature 0.05 --queue-size 16384 \
    --seed 0 --output runs/e5-six-0-1-4-5-9-11
# e5-six-0-2-4-7-9-11
python ckd.py @runs/cut-e5.txt --student-layers 0,2,4,7,9,11 --temperature 0.05 --queue-size 16384 \
    --seed 0 --output runs/e5-six-0-2-4-7-9-11
# e5-six-0-4-5-9-10-11
python ckd.py @runs/cut-e5.txt --student-layers 0,4,5,9,10,11 --temperature 0.05 \
    --queue-size 16384 --seed 0 --output runs/e5-six-0-4-5-9-10-11
# e5-six-1-3-5-7-9-11
python ckd.py @runs/cut-e5.txt --student-layers 1,3,5,7,9,11 --temperature 0.05 --queue-size 16384 \
    --seed 0 --output runs/e5-six-1-3-5-7-9-11
# scan-minilm
python -m extras.layers $T --keep 3 --dev $STSB_DEV
# scan-mpnet
python -m extras.layers $M --keep 3 --sample 100 --dev $STSB_DEV
# scan-e5
python -m extras.layers runs/e5-20k --keep 3 --dev $DE_EN_DEV
# scan-e5-six
python -m extras.layers runs/e5-20k --keep 6 --dev $DE_EN_DEV

## speed
# speed-three-layers
python ckd.py @runs/own.txt --objective kd --student-layers 1,4,5 --train $FIRST50K \
    --seed 0 --output runs/speed-three-layers
# speed-two-layers
python ckd.py @runs/own.txt --objective kd --student-layers 0,5 --train $FIRST50K \
    --seed 0 --output runs/speed-two-layers
# speed-one-layer
python ckd.py @runs/own.txt --objective kd --student-layers 5 --train $FIRST50K \
    --seed 0 --output runs/speed-one-layer
# speed-orders
python -m extras.benchmark --train $FIRST20K --sentences 3200 --rounds 2 --batch-sizes 64 512 \
    --only train
# bf16-two-layers: seeds 0, 1, 2
python ckd.py @runs/own.txt --objective kd --student-layers 0,5 --train $FIRST50K --precision bf16 \
    --seed $SEED --output runs/bf16-two-layers-$SEED
# tests-bf16
python eval_sts.py runs/bf16-two-layers-0 runs/bf16-two-layers-1 runs/bf16-two-layers-2 \
    --senteval $DATA/senteval

## search
# own-dev: seeds 0, 1, 2
python ckd.py @runs/search.txt --train runs/own-two.txt --epochs 1 --eval-steps 84 \
    --seed $SEED --output runs/own-dev-$SEED
# own-last: seeds 0, 1, 2
python ckd.py @runs/search.txt --train runs/own-two.txt --epochs 1 --eval-steps 99999 \
    --seed $SEED --output runs/own-last-$SEED
# own3-dev: seeds 0, 1, 2
python ckd.py @runs/search.txt --train runs/own-two.txt --epochs 3 --eval-steps 167 \
    --seed $SEED --output runs/own3-dev-$SEED
# own3-last: seeds 0, 1, 2
python ckd.py @runs/search.txt --train runs/own-two.txt --epochs 3 --eval-steps 99999 \
    --seed $SEED --output runs/own3-last-$SEED
# score-n20k-three: seeds 0, 1, 2
python results/scores.py runs/n20k-three-$SEED --data $DATA --sets sts scifact qnli \
    --document-model $T --json runs/score-n20k-three-$SEED.json
# score-own-dev: seeds 0, 1, 2
python results/scores.py runs/own-dev-$SEED --data $DATA --sets scifact qnli \
    --document-model $T --json runs/score-own-dev-$SEED.json
# score-own-last: seeds 0, 1, 2
python results/scores.py runs/own-last-$SEED --data $DATA --sets scifact qnli \
    --document-model $T --json runs/score-own-last-$SEED.json
# score-own3-dev: seeds 0, 1, 2
python results/scores.py runs/own3-dev-$SEED --data $DATA --sets scifact qnli \
    --document-model $T --json runs/score-own3-dev-$SEED.json
# score-own3-last: seeds 0, 1, 2
python results/scores.py runs/own3-last-$SEED --data $DATA --sets sts scifact qnli \
    --document-model $T --json runs/score-own3-last-$SEED.json
# score-own3-q4: seeds 0, 1, 2
python results/scores.py runs/own3-last-$SEED --data $DATA --sets scifact qnli --files q4 \
    --document-model $T --json runs/score-own3-q4-$SEED.json

## multilingual
# e5-plain
python results/default_prompt.py $E runs/e5-plain
# e5-plain-20k
python results/default_prompt.py runs/e5-20k runs/e5-plain-20k
# e5-KD-2e-4
python ckd.py @runs/e5.txt --objective kd --lr 2e-4 --seed 0 --output runs/e5-KD-2e-4
# e5-KD-4e-4
python ckd.py @runs/e5.txt --objective kd --seed 0 --output runs/e5-KD-4e-4
# e5-CKD-0.02-4e-4
python ckd.py @runs/e5.txt --temperature 0.02 --queue-size 16384 --seed 0 \
    --output runs/e5-CKD-0.02-4e-4
# e5-CKD-0.05-2e-4
python ckd.py @runs/e5.txt --lr 2e-4 --temperature 0.05 --queue-size 16384 --seed 0 \
    --output runs/e5-CKD-0.05-2e-4
# e5-CKD-0.05-4e-4
python ckd.py @runs/e5.txt --temperature 0.05 --queue-size 16384 --seed 0 \
    --output runs/e5-CKD-0.05-4e-4
# e5-CKD-0.1-4e-4
python ckd.py @runs/e5.txt --temperature 0.1 --queue-size 16384 --seed 0 \
    --output runs/e5-CKD-0.1-4e-4
# e5-ConGen-0.02-4e-4
python congen.py @runs/e5.txt --teacher-temperature 0.02 --student-temperature 0.02 \
    --queue-size 16384 --head identity --seed 0 --output runs/e5-ConGen-0.02-4e-4
# e5-ConGen-0.05-4e-4
python congen.py @runs/e5.txt --teacher-temperature 0.05 --student-temperature 0.05 \
    --queue-size 16384 --head identity --seed 0 --output runs/e5-ConGen-0.05-4e-4
# e5-ConGen-0.1-4e-4
python congen.py @runs/e5.txt --teacher-temperature 0.1 --student-temperature 0.1 \
    --queue-size 16384 --head identity --seed 0 --output runs/e5-ConGen-0.1-4e-4
# e5-IBKD-0.02-4e-4
python ibkd.py @runs/e5.txt --stage distill --temperature 0.02 --seed 0 \
    --output runs/e5-IBKD-0.02-4e-4
# e5-IBKD-0.05-4e-4
python ibkd.py @runs/e5.txt --stage distill --temperature 0.05 --seed 0 \
    --output runs/e5-IBKD-0.05-4e-4
# e5-IBKD-0.1-4e-4
python ibkd.py @runs/e5.txt --stage distill --temperature 0.1 --seed 0 \
    --output runs/e5-IBKD-0.1-4e-4
# e5-IBKD-0.05-8e-4
python ibkd.py @runs/e5.txt --stage distill --lr 8e-4 --temperature 0.05 --seed 0 \
    --output runs/e5-IBKD-0.05-8e-4
# e5-KD-16e-4
python ckd.py @runs/e5.txt --objective kd --lr 16e-4 --seed 0 --output runs/e5-KD-16e-4
# e5-KD-8e-4: seeds 0, 1, 2
python ckd.py @runs/e5.txt --objective kd --lr 8e-4 --seed $SEED --output runs/e5-KD-8e-4-$SEED
# e5-CKD-0.05-8e-4: seeds 0, 1, 2
python ckd.py @runs/e5.txt --lr 8e-4 --temperature 0.05 --queue-size 16384 --seed $SEED \
    --output runs/e5-CKD-0.05-8e-4-$SEED
# e5-ConGen-0.2-4e-4
python congen.py @runs/e5.txt --teacher-temperature 0.2 --student-temperature 0.2 \
    --queue-size 16384 --head identity --seed 0 --output runs/e5-ConGen-0.2-4e-4
# e5-ConGen-0.1-8e-4
python congen.py @runs/e5.txt --lr 8e-4 --teacher-temperature 0.1 --student-temperature 0.1 \
    --queue-size 16384 --head identity --seed 0 --output runs/e5-ConGen-0.1-8e-4
# e5-ConGen-0.2-8e-4
python congen.py @runs/e5.txt --lr 8e-4 --teacher-temperature 0.2 --student-temperature 0.2 \
    --queue-size 16384 --head identity --seed 0 --output runs/e5-ConGen-0.2-8e-4
# e5-IBKD-0.1-8e-4
python ibkd.py @runs/e5.txt --stage distill --lr 8e-4 --temperature 0.1 --seed 0 \
    --output runs/e5-IBKD-0.1-8e-4
# e5-losses-sts-de
python eval_sts.py @runs/e5-losses.txt --pairs runs/prompted-test-de.tsv
# e5-losses-xquad-de
python -m extras.eval_retrieval @runs/e5-losses.txt --beir $DATA/german/xquad-de
# e5-losses-sts-en
python eval_sts.py @runs/e5-losses.txt --pairs runs/prompted-test-en.tsv
# e5-losses-xquad-en
python -m extras.eval_retrieval @runs/e5-losses.txt --beir $DATA/german/xquad-en
# e5-six-300k: seeds 0, 1, 2
python ckd.py @runs/e5-300k.txt --student-layers 0,1,2,9,10,11 --lr 8e-4 --seed $SEED \
    --output runs/e5-six-300k-$SEED
# e5-six-300k-query: seeds 0, 1, 2
python results/default_prompt.py runs/e5-six-300k-$SEED runs/e5-six-300k-query-$SEED query
# e5-six-300k-4-bits: seeds 0, 1, 2
python -m extras.quantize runs/e5-six-300k-query-$SEED @runs/files-dev.txt \
    --pairs $DATA/german/stsb-de-test.tsv --rounds 1 --rows '4 bits'
# e5-three-300k: seeds 0, 1, 2
python ckd.py @runs/e5-300k.txt --seed $SEED --output runs/e5-three-300k-$SEED
# e5-three-300k-query: seeds 0, 1, 2
python results/default_prompt.py runs/e5-three-300k-$SEED runs/e5-three-300k-query-$SEED query
# e5-three-300k-4-bits: seeds 0, 1, 2
python -m extras.quantize runs/e5-three-300k-query-$SEED @runs/files-dev.txt \
    --pairs $DATA/german/stsb-de-test.tsv --rounds 1 --rows '4 bits'
# e5-300k-sts-de: seeds 0, 1, 2
python eval_sts.py runs/e5-six-300k-query-$SEED runs/e5-three-300k-query-$SEED \
    --pairs $DATA/german/stsb-de-test.tsv
# e5-300k-sts-en: seeds 0, 1, 2
python eval_sts.py runs/e5-six-300k-query-$SEED runs/e5-three-300k-query-$SEED \
    --pairs $DATA/german/stsb-en-test.tsv
# e5-300k-xquad-de: seeds 0, 1, 2
python -m extras.eval_retrieval runs/e5-six-300k-query-$SEED runs/e5-three-300k-query-$SEED \
    --beir $DATA/german/xquad-de
# e5-300k-xquad-en: seeds 0, 1, 2
python -m extras.eval_retrieval runs/e5-six-300k-query-$SEED runs/e5-three-300k-query-$SEED \
    --beir $DATA/german/xquad-en
# e5-300k-news: seeds 0, 1, 2
python -m extras.compare runs/e5-six-300k-query-$SEED runs/e5-three-300k-query-$SEED \
    --translations $DATA/german/news.en-de.tsv
# e5-300k-sts-de-4-bits: seeds 0, 1, 2
python results/onnx_scores.py model_q4.onnx eval_sts runs/e5-six-300k-query-$SEED \
    runs/e5-three-300k-query-$SEED --pairs $DATA/german/stsb-de-test.tsv
# e5-300k-sts-en-4-bits: seeds 0, 1, 2
python results/onnx_scores.py model_q4.onnx eval_sts runs/e5-six-300k-query-$SEED \
    runs/e5-three-300k-query-$SEED --pairs $DATA/german/stsb-en-test.tsv
# e5-300k-xquad-de-4-bits: seeds 0, 1, 2
python results/onnx_scores.py model_q4.onnx extras.eval_retrieval runs/e5-six-300k-query-$SEED \
    runs/e5-three-300k-query-$SEED --beir $DATA/german/xquad-de
# e5-300k-xquad-en-4-bits: seeds 0, 1, 2
python results/onnx_scores.py model_q4.onnx extras.eval_retrieval runs/e5-six-300k-query-$SEED \
    runs/e5-three-300k-query-$SEED --beir $DATA/german/xquad-en
# e5-300k-news-4-bits: seeds 0, 1, 2
python results/onnx_scores.py model_q4.onnx extras.compare runs/e5-six-300k-query-$SEED \
    runs/e5-three-300k-query-$SEED --translations $DATA/german/news.en-de.tsv
# e5-sts-de
python eval_sts.py $E runs/e5-20k --pairs $DATA/german/stsb-de-test.tsv
# e5-xquad-de
python -m extras.eval_retrieval $E runs/e5-20k --beir $DATA/german/xquad-de
# e5-xquad-de-query
python -m extras.eval_retrieval $E --beir $DATA/german/xquad-de --passage-prompt 'query: '
# e5-sts-en
python eval_sts.py $E runs/e5-20k --pairs $DATA/german/stsb-en-test.tsv
# e5-xquad-en
python -m extras.eval_retrieval $E runs/e5-20k --beir $DATA/german/xquad-en
# e5-news
python -m extras.compare $E runs/e5-20k --translations $DATA/german/news.en-de.tsv
# e5-20k-4-bits
python -m extras.quantize runs/e5-20k @runs/files-dev.txt --pairs $DATA/german/stsb-de-test.tsv \
    --rounds 1 --rows '4 bits'
# e5-20k-sts-en-4-bits
python results/onnx_scores.py model_q4.onnx eval_sts runs/e5-20k \
    --pairs $DATA/german/stsb-en-test.tsv
# e5-20k-xquad-de-4-bits
python results/onnx_scores.py model_q4.onnx extras.eval_retrieval runs/e5-20k \
    --beir $DATA/german/xquad-de
# e5-20k-xquad-en-4-bits
python results/onnx_scores.py model_q4.onnx extras.eval_retrieval runs/e5-20k \
    --beir $DATA/german/xquad-en
# e5-20k-news-4-bits
python results/onnx_scores.py model_q4.onnx extras.compare runs/e5-20k \
    --translations $DATA/german/news.en-de.tsv

## pairs
# DSE-stsb
python dse.py @runs/dse.txt --teacher $T --task stsb --teacher-lr 5e-5 --eval-steps 180 --seed 0 \
    --output runs/DSE-stsb
# DSE-stsb-labels
python dse.py @runs/dse.txt --task stsb --alpha 0 --eval-steps 180 --seed 0 \
    --output runs/DSE-stsb-labels
# DSE-mrpc
python dse.py @runs/dse.txt --teacher $T --task mrpc --teacher-lr 5e-5 --eval-steps 115 --seed 0 \
    --output runs/DSE-mrpc
# DSE-mrpc-labels
python dse.py @runs/dse.txt --task mrpc --alpha 0 --eval-steps 115 --seed 0 \
    --output runs/DSE-mrpc-labels
# DSE-M-stsb
python dse.py @runs/dse.txt --teacher $M --task stsb --teacher-lr 3e-5 --eval-steps 180 \
    --precision bf16 --seed 0 --output runs/DSE-M-stsb
# DSE-M-mrpc
python dse.py @runs/dse.txt --teacher $M --task mrpc --teacher-lr 3e-5 --eval-steps 115 \
    --precision bf16 --seed 0 --output runs/DSE-M-mrpc

## small-questions
# search-stage-1
python -m extras.ibkd_dr --stage distill --teacher $T --student-layers 1,3,5 \
    --beir $DATA/retrieval/qnli --temperature 0.2 --epochs 5 --batch-size 64 --lr 4e-4 \
    --eval-steps 122 --group-by-length --seed 0 --output runs/search-stage-1
# search-stage-2
python -m extras.ibkd_dr --stage finetune --teacher $T --student runs/search-stage-1 \
    --beir $DATA/retrieval/qnli --finetune-batch-size 32 --finetune-epochs 2 --finetune-lr 3e-5 \
    --dropout 0.1 --eval-steps 54 --group-by-length --seed 0 --output runs/search-stage-2
# KD-dropout: seeds 0, 1, 2
python ckd.py @runs/own.txt --objective kd --dropout 0.1 --seed $SEED \
    --output runs/KD-dropout-$SEED
# IBKD-no-HSIC: seeds 0, 1, 2
python ibkd.py @runs/own.txt --stage distill --temperature 0.2 --beta1 0 --seed $SEED \
    --output runs/IBKD-no-HSIC-$SEED
# tests-parts: seeds 0, 1, 2
python eval_sts.py runs/KD-dropout-$SEED runs/IBKD-no-HSIC-$SEED --senteval $DATA/senteval
# transfer
python -m extras.eval_transfer $T runs/KD-0 runs/CKD-0 runs/ConGen-0 runs/IBKD-0 \
    --senteval $DATA/senteval --tasks MR,CR,SUBJ,MPQA,TREC,MRPC
# en-de
python congen.py --teacher $T --student-layers 1,3,5 --pairs $EN_DE --queue-size 16384 \
    --head identity --dev $STSB_DEV --epochs 3 --batch-size 64 --lr 5e-4 \
    --eval-steps 415 --group-by-length --seed 0 --output runs/en-de
# en-de-test
python -m extras.compare $T runs/en-de --translations $EN_DE_TEST
# en-de-before
python -m extras.compare $T --student-layers 1,3,5 --translations $EN_DE_TEST

## unseen
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
# unseen-qnli-a: seeds 0, 1, 2
python ckd.py @runs/half.txt --train runs/qnli-a.txt --seed $SEED --output runs/unseen-qnli-a-$SEED
# unseen-qnli-b: seeds 0, 1, 2
python ckd.py @runs/half.txt --train runs/qnli-b.txt --seed $SEED --output runs/unseen-qnli-b-$SEED
# unseen-qnli
python results/unseen.py halves $DATA/retrieval/qnli $T unseen-general unseen-qnli
