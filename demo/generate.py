"""Generate English sentences whose similarity is known by construction: the data in this folder.

A sentence says who does what to what, where and how. These are five slots, and each slot holds a
concept. A concept has several wordings, and a sentence has one of four word orders. The meaning of
a sentence is the choice of its five concepts.

Two concepts have a likeness of 1 if they are the same, of 0.5 if they differ but belong to one
group (a boy and a girl), and of 0 otherwise. The similarity of two sentences is the mean likeness
of their slots, weighted by WEIGHTS, times 5. It therefore lies between 0 and 5. The wording says
little about it, so an encoder has to represent the meaning.

  python demo/generate.py [FOLDER]      writes these files, the same bytes every time:

  sentences.txt                         6,400 distinct sentences, one per line
  dev.tsv, test.tsv                     500 pairs each: sentence, sentence, similarity
  triplets.csv                          1,000 rows: sentence, rewording, hard negative
  pairs.tsv                             the first two columns of 500 triplets
  stsb/{train,validation,test}.jsonl    1,200, 250 and 250 scored pairs, as SetFit/stsb on the Hub
  beir/                                 600 passages, 200 train and 60 test queries, as in BEIR
"""

import argparse
import csv
import json
import random
from pathlib import Path
from typing import NamedTuple

HIGHEST_SIMILARITY = 5
WEIGHTS = dict(who=0.25, action=0.25, thing=0.25, where=0.15, how=0.10)

# group -> concepts; a concept is a list of wordings, separated by "|"
WHO = {
    "child": ["a boy|a young lad", "a girl|a little lady in a school dress", "a toddler|an infant"],
    "adult": ["a man|a guy", "a woman|a lady", "a husband and his wife|two newlyweds"],
    "old": ["an old man|a grandfather", "an old woman|an elderly lady|a grandmother"],
    "medic": ["a doctor|a physician", "a nurse|a hospital caregiver"],
    "uniform": ["a soldier|an army man", "a police officer|a cop", "a firefighter|a fireman"],
    "school": ["a teacher|a professor", "a student|a pupil"],
    "kitchen": ["a chef|a cook", "a waiter|a restaurant server"],
    "sport": ["an athlete|a sportsman", "a soccer player|a footballer"],
    "stage": ["a singer|a vocalist", "a dancer|a ballerina", "a clown|a jester"],
    "trade": ["a farmer|a rancher", "a carpenter|a woodworker", "a mechanic|a repairman"],
}
# group -> (wordings of the action, the things it is done to)
ACTION = {
    "play": [("plays|is performing on", ["guitar", "violin", "piano", "drums"])],
    "eat": [
        ("eats|is having a bite of", ["apple", "sandwich", "cake", "fish"]),
        ("cooks|is preparing", ["soup", "cake", "fish"]),
    ],
    "look": [
        ("reads|is looking through", ["book", "newspaper", "letter"]),
        ("watches|is looking at", ["film", "match", "bird", "horse"]),
        ("photographs|is taking a picture of", ["bridge", "bird", "horse", "mountain"]),
    ],
    "clean": [("washes|is cleaning", ["car", "dishes", "window", "dog"])],
    "make": [
        ("repairs|is fixing", ["bicycle", "car", "roof", "radio"]),
        ("builds|is constructing", ["house", "bridge", "boat"]),
        ("paints|is putting a coat of color on", ["fence", "house", "boat"]),
    ],
    "move": [
        ("carries|is lifting", ["box", "suitcase", "ladder", "dog"]),
        ("throws|is tossing", ["ball", "stone"]),
        ("pushes|is shoving", ["bicycle", "car", "box"]),
    ],
    "travel": [("rides|is traveling on", ["bicycle", "horse", "motorcycle"])],
    "trade": [
        ("buys|is purchasing", ["apple", "book", "flowers", "shoes", "car"]),
        ("sells|is offering at a good price", ["fish", "flowers", "shoes", "newspaper"]),
    ],
    "care": [
        ("feeds|is giving something to eat to", ["dog", "cat", "bird", "horse"]),
        ("strokes|is petting", ["dog", "cat", "horse"]),
    ],
    "destroy": [
        ("cuts|is slicing", ["cake", "apple", "fish"]),
        ("burns|is setting fire to", ["letter", "newspaper", "house"]),
    ],
}
THING = {
    "music": dict(
        guitar="a guitar|an acoustic six-string",
        violin="a violin|a fiddle",
        piano="a piano|a keyboard",
        drums="the drums|a percussion set",
    ),
    "food": dict(
        apple="an apple|a piece of fruit",
        sandwich="a sandwich|a burger",
        soup="some soup|a broth",
        cake="a cake|a sweet pastry",
        fish="a fish|a trout",
    ),
    "print": dict(
        book="a book|a novel",
        newspaper="a newspaper|the daily press",
        letter="a letter|some handwritten mail",
    ),
    "show": dict(film="a film|a movie", match="a football match|a soccer game"),
    "animal": dict(
        dog="a dog|a puppy", cat="a cat|a kitten", bird="a bird|a sparrow", horse="a horse|a pony"
    ),
    "vehicle": dict(
        bicycle="a bicycle|a bike",
        car="a car|an automobile",
        motorcycle="a motorcycle|a Harley",
        boat="a boat|a small ship",
    ),
    "building": dict(
        house="a house|a home",
        bridge="a bridge|a river crossing",
        roof="a roof|the shingles",
        fence="a fence|a wooden barrier",
        window="a window|the glass panes",
    ),
    "nature": dict(
        mountain="a mountain|a rocky peak",
        stone="a stone|a rock",
        flowers="flowers|a bouquet of roses",
    ),
    "goods": dict(
        box="a box|a carton",
        suitcase="a suitcase|some luggage",
        ladder="a ladder|a set of steps",
        ball="a ball|a round toy",
        shoes="shoes|a pair of sneakers",
        radio="a radio|a wireless receiver",
        dishes="the dishes|dirty plates",
    ),
}
WHERE = {
    "green": ["in the park|on a public lawn", "in the garden|out in the backyard"],
    "home": ["in the kitchen|next to the stove", "in the living room|beside the sofa"],
    "city": [
        "on the street|along the road",
        "at the market|among the stalls of a bazaar",
        "in a shop|inside a store",
    ],
    "water": ["on the beach|by the sea", "near the river|beside a stream"],
    "work": [
        "in a hospital|at the clinic",
        "in an office|at the workplace",
        "in a factory|at an industrial plant",
    ],
    "wild": [
        "in the forest|among the trees",
        "in the desert|between sand dunes",
        "in the snow|on icy ground",
    ],
}
HOW = {
    "mood": ["happily|with a smile", "angrily|full of rage", "sadly|with tears in the eyes"],
    "pace": ["quickly|in a hurry", "slowly|without haste"],
    "time": ["at night|after dark", "in the morning|early in the day"],
    "company": ["alone|without company", "with friends|together with some buddies"],
}


class Concept(NamedTuple):
    """What a slot can hold."""

    group: str
    wordings: list


def concepts(groups):
    """Return the concepts of a slot, as {name: Concept}.

    A group is {name: "wording|wording"}, or a list of wordings, which are then the names as well.
    """
    found = {}
    for group, members in groups.items():
        named = members if isinstance(members, dict) else dict(zip(members, members))
        for name, words in named.items():
            found[name] = Concept(group, words.split("|"))
    return found


# the things that each action is done to
TAKES = {words: things for members in ACTION.values() for words, things in members}
# slot -> {name of a concept: Concept}
SLOTS = {
    "who": concepts(WHO),
    "action": concepts(
        {group: [words for words, _ in members] for group, members in ACTION.items()}
    ),
    "thing": concepts(THING),
    "where": concepts(WHERE),
    "how": concepts(HOW),
}
ORDERS = (
    "{who} {action} {thing} {where} {how}",
    "{where} {who} {action} {thing} {how}",
    "{how} {who} {action} {thing} {where}",
    "{who} {action} {thing} {how} {where}",
)


def scene(rng):
    """Return a random meaning, as {slot: name of a concept}, whose thing suits its action."""
    meaning = {slot: rng.choice(list(names)) for slot, names in SLOTS.items()}
    return meaning | {"thing": rng.choice(TAKES[meaning["action"]])}


def wording(meaning, rng, unlike=""):
    """Return a sentence with this meaning.

    `unlike` is another sentence, in lower case. Wordings that it contains are avoided, except for a
    concept that has no other.
    """
    words = {}
    for slot, name in meaning.items():
        wordings = SLOTS[slot][name].wordings
        fresh = [text for text in wordings if text not in unlike]
        words[slot] = rng.choice(fresh or wordings)
    text = rng.choice(ORDERS).format(**words)
    return text[0].upper() + text[1:] + "."


def similarity(first, second):
    """Return the similarity of two meanings, from 0 to 5."""
    total = 0.0
    for slot, weight in WEIGHTS.items():
        concept = SLOTS[slot][first[slot]]
        other = SLOTS[slot][second[slot]]
        if concept == other:
            total += weight
        elif concept.group == other.group:
            total += weight / 2
    return HIGHEST_SIMILARITY * total


def variant(meaning, keep, rng):
    """Return another meaning, which keeps each slot with probability `keep` (0 to 1).

    The thing changes nevertheless if it does not suit the action.
    """
    other = scene(rng)
    other |= {slot: name for slot, name in meaning.items() if rng.random() < keep}
    possible = TAKES[other["action"]]
    if other["thing"] not in possible:
        former = meaning["thing"]
        other["thing"] = former if former in possible else rng.choice(possible)
    return other


def scored_pairs(count, seed):
    """Return `count` rows (sentence, sentence, similarity from 0 to 5)."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        meaning = scene(rng)
        other = variant(meaning, rng.choice((0, 0.25, 0.5, 0.75, 0.9, 1)), rng)
        first = wording(meaning, rng)
        second = wording(other, rng, unlike=first.lower())
        rows.append((first, second, round(similarity(meaning, other), 3)))
    return rows


def sentences(count, held_out):
    """Return `count` distinct sentences, none of which occurs in the scored pairs `held_out`."""
    known = {sentence for first, second, _ in held_out for sentence in (first, second)}
    rng = random.Random(3)
    found = {}  # a dict keeps the order
    while len(found) < count:
        sentence = wording(scene(rng), rng)
        if sentence not in known:
            found[sentence] = None
    return list(found)


def triplets(count):
    """Return `count` rows (anchor, positive, hard negative).

    The positive says the same as the anchor in other words. The hard negative has another action,
    another thing, or both, and its similarity to the anchor is below 4.
    """
    rng = random.Random(4)
    rows = []
    while len(rows) < count:
        meaning = scene(rng)
        another = scene(rng)
        changed = meaning | {"action": another["action"], "thing": another["thing"]}
        if similarity(meaning, changed) < 4:
            anchor = wording(meaning, rng)
            positive = wording(meaning, rng, unlike=anchor.lower())
            rows.append((anchor, positive, wording(changed, rng)))
    return rows


def retrieval(passage_count, query_count):
    """Return the passages, a list of texts, and the queries, a list of (text, passage number).

    No two passages have the same meaning. A query says the same as its passage in other words, and
    each passage has at most one query.
    """
    rng = random.Random(6)
    meanings = []
    while len(meanings) < passage_count:
        meaning = scene(rng)
        if meaning not in meanings:
            meanings.append(meaning)
    passages = [wording(meaning, rng) for meaning in meanings]
    queries = []
    for number in rng.sample(range(passage_count), query_count):
        query = wording(meanings[number], rng, unlike=passages[number].lower())
        queries.append((query, number))
    return passages, queries


def write(path, lines):
    """Write lines of text as UTF-8, and create the folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())


def write_columns(path, rows):
    """Write rows of tab-separated columns."""
    write(path, ["\t".join(map(str, row)) for row in rows])


def write_beir(folder, passages, queries, train_count):
    """Write a BEIR folder, in which the first `train_count` queries are the training set."""
    corpus = [dict(_id=f"p{i}", title="", text=text) for i, text in enumerate(passages)]
    asked = [dict(_id=f"q{i}", text=text) for i, (text, _) in enumerate(queries)]
    write(folder / "corpus.jsonl", map(json.dumps, corpus))
    write(folder / "queries.jsonl", map(json.dumps, asked))
    header = ("query-id", "corpus-id", "score")
    qrels = [(f"q{i}", f"p{number}", 1) for i, (_, number) in enumerate(queries)]
    write_columns(folder / "qrels/train.tsv", [header, *qrels[:train_count]])
    write_columns(folder / "qrels/test.tsv", [header, *qrels[train_count:]])


def main():
    parser = argparse.ArgumentParser(description="Write the generated data as files.")
    here = Path(__file__).resolve().parent
    parser.add_argument("folder", nargs="?", type=Path, default=here, help="%(default)s")
    folder = parser.parse_args().folder

    dev = scored_pairs(500, seed=1)
    test = scored_pairs(500, seed=2)
    write_columns(folder / "dev.tsv", dev)
    write_columns(folder / "test.tsv", test)
    write(folder / "sentences.txt", sentences(6_400, held_out=dev + test))

    rows = triplets(1000)
    with open(folder / "triplets.csv", "w", encoding="utf-8", newline="") as file:
        header = ("sent0", "sent1", "hard_neg")
        csv.writer(file, lineterminator="\n").writerows([header, *rows])
    write_columns(folder / "pairs.tsv", [row[:2] for row in rows[:500]])

    splits = dict(train=scored_pairs(1200, seed=5), validation=dev[:250], test=test[:250])
    for name, pairs in splits.items():
        rows = [dict(text1=first, text2=second, label=score) for first, second, score in pairs]
        write(folder / f"stsb/{name}.jsonl", map(json.dumps, rows))

    passages, queries = retrieval(600, query_count=260)
    write_beir(folder / "beir", passages, queries, train_count=200)


if __name__ == "__main__":
    main()
