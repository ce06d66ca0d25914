# The tables of DistilCSE (docs/ckd.md has their status). Run the lines that you need, from the
# project's folder. A training run prints dev scores; eval_sts.py prints those of the test sets.
BERT=bert-base-uncased             # or nreimers/TinyBERT_L-6_H-768_v2
L4=nreimers/TinyBERT_L-4_H-312_v2

# Table 2, the students. "distill" in a run's folder is the student after stage 1
python ckd.py --student $BERT --output runs/CKD
python ckd.py --objective kd --student $BERT --output runs/KD
python -m extras.baselines --method pkd --student $BERT --output runs/PKD
python ckd.py --stage finetune --student runs/PKD --output runs/PKD-2
python -m extras.baselines --method metakd --student $BERT --output runs/MetaKD
python ckd.py --stage finetune --student runs/MetaKD --output runs/MetaKD-2
python eval_sts.py runs/CKD/distill runs/CKD runs/KD/distill runs/KD
python eval_sts.py runs/PKD runs/PKD-2 runs/MetaKD runs/MetaKD-2
# Table 2, SimCSE: length, batch, epochs and learning rate of its run_sup_example.sh, and the
# schedule of DistilCSE
python ckd.py --stage finetune --finetune-epochs 3 --finetune-batch-size 512 \
    --finetune-lr 5e-5 --max-length 32 --student $L4 --output runs/SimCSE
SIM=princeton-nlp/sup-simcse
python eval_sts.py runs/SimCSE $SIM-roberta-large $SIM-roberta-base $SIM-bert-base-uncased

# Table 3; a small student may also be nreimers/TinyBERT_L-6_H-768_v2
python ckd.py --student princeton-nlp/sup-simcse-bert-base-uncased --output runs/CKD-from-base
python ckd.py --student runs/SimCSE --output runs/CKD-from-SimCSE

# Table 4
python ckd.py --objective kd --train nli_for_simcse.csv --student $BERT --output runs/KD-NLI
python -m extras.baselines --method pkd --train nli_for_simcse.csv --student $BERT \
    --output runs/PKD-NLI
python -m extras.baselines --method metakd --train nli_for_simcse.csv --student $BERT \
    --output runs/MetaKD-NLI
python eval_sts.py runs/KD-NLI runs/PKD-NLI runs/MetaKD-NLI

# Table 5
python -m extras.eval_transfer runs/CKD runs/SimCSE --classifier pytorch

# Figure 2
python -m extras.analyze space runs/CKD runs/KD runs/PKD-2 runs/MetaKD-2

# Figure 3. The files are the first lines of news5m.en (head -n 1000000, ...)
python -m extras.sweep ckd.py \
    "train=news-1m.txt,news-2m.txt,news-3m.txt,news-4m.txt,news-5m.txt" \
    --output runs/news -- --stage both --student $BERT
