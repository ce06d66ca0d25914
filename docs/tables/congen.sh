# The tables of ConGen (docs/congen.md has their status). Run the lines that you need, from the
# project's folder. A training run prints dev scores; eval_sts.py prints those of the test sets.
VIEWS=back_translated_nli.txt                 # two columns; without --pairs, words are deleted
TINY=nreimers/BERT-Tiny_L-2_H-128_A-2         # BERT-Tiny; other students and their values: Table 7
ROW="--lr 5e-4 --student-temperature 0.05 --queue-size 16384"

# Table 1. CKD trains as DistilCSE does. SimCSE has the length, batch, epochs and learning rate of
# its scripts, but not the unsupervised script's MLP on [CLS]; supervised SimCSE has the schedule
# of DistilCSE.
python congen.py --pairs $VIEWS --student $TINY $ROW --output runs/ConGen
python -m extras.baselines --method l2 --pairs $VIEWS --student $TINY --lr 5e-4 --output runs/L2
python -m extras.baselines --method dual-l2 --pairs $VIEWS --student $TINY --lr 5e-4 \
    --output runs/Dual-L2
python -m extras.baselines --method skd --pairs $VIEWS --student $TINY --lr 5e-4 --output runs/SKD
python ckd.py --stage distill --teacher princeton-nlp/unsup-simcse-roberta-large \
    --pooling mean --train nli_for_simcse.csv --student $TINY --output runs/CKD-NLI
python ckd.py --stage finetune --finetune-epochs 3 --finetune-batch-size 512 \
    --finetune-lr 5e-5 --max-length 32 --student $TINY --output runs/sup-SimCSE
python distilface.py --pooling cls --batch-size 64 --lr 3e-5 --steps 15625 --student $TINY \
    --output runs/unsup-SimCSE
python eval_sts.py runs/ConGen runs/L2 runs/Dual-L2 runs/SKD runs/CKD-NLI runs/sup-SimCSE \
    runs/unsup-SimCSE

# Tables 2, 10 and 11
python -m extras.eval_transfer runs/ConGen runs/L2 --classifier pytorch
python -m extras.eval_transfer runs/ConGen runs/L2 --tasks SICK-E,SNLI --classifier pytorch

# Table 4: ConSERT's or BSL's folder
python congen.py --teacher FOLDER --teacher-pooling mean --student bert-base-uncased \
    --output runs/other-teacher

# Table 5
python -m extras.sweep congen.py "alpha=1,0.75,0.5,0.25,0 seed=0,1,2" --output runs/alpha -- \
    --pairs $VIEWS --student $TINY $ROW
python eval_sts.py runs/alpha/*/

# Table 6: likewise delete-one, synonym, mlm, translate; without --pairs, words are deleted
python -m extras.views crop --output crop.tsv
# pip install sentencepiece sacremoses: by Marian, English to German and back
python -m extras.views translate --output nli-views.tsv
# Section 3.1: the first view through German, the second through French
python -m extras.views translate --there Helsinki-NLP/opus-mt-en-fr \
    --back Helsinki-NLP/opus-mt-fr-en --output french.tsv
paste <(cut -f2 nli-views.tsv) <(cut -f2 french.tsv) > nli-views-3.1.tsv
# mBART, whose folder must name both languages
python -c "import transformers
name = 'facebook/mbart-large-50-many-to-many-mmt'
model = transformers.AutoModelForSeq2SeqLM.from_pretrained(name)
tokenizer = transformers.AutoTokenizer.from_pretrained(name)
for first, second in (('en_XX', 'de_DE'), ('de_DE', 'en_XX')):
    tokenizer.src_lang = first
    model.generation_config.forced_bos_token_id = tokenizer.convert_tokens_to_ids(second)
    for part in (model, tokenizer):
        part.save_pretrained(f'runs/mbart-{first}')"
python -m extras.views translate --there runs/mbart-en_XX --back runs/mbart-de_DE \
    --output mbart.tsv
python congen.py --pairs crop.tsv --student $TINY $ROW --output runs/crop
python eval_sts.py runs/crop

# Table 7, the search (README.md:78 of the authors' code)
python -m extras.sweep congen.py "lr=3e-4,5e-4,1e-4,3e-5,5e-5,1e-5 \
    queue-size=262144,131072,65536,16384,1024 \
    teacher-temperature=0.01,0.03,0.05,0.07,0.09,0.1 \
    student-temperature=0.01,0.03,0.05,0.07,0.09,0.1" \
    --output runs/search -- --pairs $VIEWS --student $TINY
# Table 7, its rows. The defaults are BERT-base's: --teacher-temperature 0.05
# --student-temperature 0.07 --queue-size 65536 --lr 5e-5. The paper names no folders; these are
# the ones that the authors' code names (train_congen.sh:8, notebook/SentEval STS-EMNLP2022.ipynb)
python congen.py --student nreimers/BERT-Tiny_L-2_H-128_A-2 --lr 5e-4 \
    --student-temperature 0.05 --queue-size 16384 --output runs/BERT-Tiny
python congen.py --student nreimers/BERT-Mini_L-4_H-256_A-4 --lr 3e-4 \
    --queue-size 16384 --output runs/BERT-Mini
python congen.py --student nreimers/TinyBERT_L-4_H-312_v2 --lr 1e-4 \
    --student-temperature 0.05 --output runs/TinyBERT-L4
python congen.py --student nreimers/MiniLM-L3-H384-uncased --lr 5e-4 \
    --queue-size 16384 --output runs/MiniLM-L3
python congen.py --student nreimers/MiniLM-L6-H384-uncased --lr 3e-4 --output runs/MiniLM-L6
python congen.py --student nreimers/BERT-Small-L-4_H-512_A-8 --lr 3e-4 --output runs/BERT-Small
python congen.py --student microsoft/MiniLM-L12-H384-uncased --queue-size 16384 \
    --output runs/MiniLM-L12
python congen.py --student nreimers/TinyBERT_L-6_H-768_v2 --output runs/TinyBERT-L6
python congen.py --student bert-base-uncased --output runs/BERT-base
python congen.py --student roberta-base --teacher-temperature 0.1 \
    --student-temperature 0.1 --queue-size 1024 --output runs/RoBERTa-base
python congen.py --pairs nli-translations.tsv --student distilbert-base-multilingual-cased \
    --lr 3e-4 --output runs/Multilingual-DistilBERT
python congen.py --pairs nli-translations.tsv --lr 3e-4 \
    --student microsoft/Multilingual-MiniLM-L12-H384 --output runs/Multilingual-MiniLM-L12

# Table 3: the last two students of Table 7; also baselines l2 and dual-l2, and five other files
python eval_sts.py runs/Multilingual-DistilBERT runs/Multilingual-MiniLM-L12 \
    --pairs STS2017-extended/STS.ar-ar.txt STS2017-extended/STS.en-ar.txt \
    STS2017-extended/STS.en-de.txt

# Table 8
python -m extras.sweep congen.py \
    "teacher-temperature=0.1,0.05,0.01 student-temperature=0.1,0.09,0.07,0.05" \
    --output runs/temperatures -- --pairs $VIEWS --student $TINY $ROW

# Table 12: SimCSE, control alone, both terms; --query takes several captions
python -m extras.analyze neighbours runs/unsup-SimCSE runs/alpha/alpha=1,seed=0 runs/ConGen \
    --sentences flickr30k-captions.txt \
    --query "A brown dog and a gray dog are playing in the snow ."

# Figures 3 and 5
python -m extras.analyze cosine runs/ConGen
python -m extras.analyze edits runs/ConGen

# Figure 4: 12 runs for BERT-base; likewise with roberta-base and its row of Table 7
python -m extras.sweep congen.py "queue-size=128,1024,16384,65536 seed=0,1,2" \
    --output runs/queue -- --pairs $VIEWS --student bert-base-uncased
python -m extras.analyze data runs/queue --against queue-size
