# The tables of DSE (docs/dse.md has their status). Run the lines that you need, from the project's
# folder. A run prints each metric of each set and, under the set's own name, their mean.

# Table 1, for MRPC; replace mrpc with mnli, qqp, qnli and stsb. For MNLI, take the mean of "dev",
# its matched set, and "mismatched". Without --student, the student starts as the fine-tuned teacher
# BERT-Base, BERT-Large
python dse.py --task mrpc --teacher-only --teacher bert-base-uncased \
    --output runs/bert-base-mrpc
python dse.py --task mrpc --teacher-only --output runs/bert-large-mrpc
# DSE with alpha 0.5, 1 and 0, and with a frozen encoder
python dse.py --task mrpc --teacher runs/bert-large-mrpc/teacher \
    --student bert-large-uncased --output runs/dse-mrpc
python dse.py --task mrpc --teacher runs/bert-large-mrpc/teacher \
    --student bert-large-uncased --alpha 1 --output runs/dse-mrpc-1
python dse.py --task mrpc --student bert-large-uncased --alpha 0 --output runs/dse-mrpc-0
python dse.py --task mrpc --teacher runs/bert-large-mrpc/teacher \
    --student bert-large-uncased --alpha 1 --freeze-encoder --output runs/dse-mrpc-frozen

# Table 2. DSE with alpha 0.5 and 0, and BERT-Large without training, read as DSE reads it: the last
# four layers, each averaged over all tokens but [CLS], and concatenated (3.4, 4.2.1), 4,096
# dimensions. Its head stays random and is not used. The columns are MR, CR, SUBJ, MPQA, SST, TREC,
# MRPC, SICK-R, SICK-E and STS-B; "DSE avg" is the paper's AVG
python dse.py --task allnli --output runs/dse-allnli
python dse.py --task allnli --alpha 0 --student bert-large-uncased --output runs/dse-allnli-0
python -c 'from dse import *
student = add_head(load_encoder("bert-large-uncased", "mean"), classes=3)
save_student(student, Path("runs/bert-large"))'
python -m extras.eval_transfer runs/bert-large runs/dse-allnli runs/dse-allnli-0 \
    --tasks MR,CR,SUBJ,MPQA,SST-2,TREC,MRPC,SICK-R,SICK-E,STS-B --classifier pytorch
# Spearman of the embeddings' cosine, which is in no table of the paper
python eval_sts.py runs/bert-large runs/dse-allnli

# Tables 3 and 4; --random-weights has BERT-Large's shape
python -m extras.benchmark --only dse
python -m extras.benchmark --only dse --random-weights
