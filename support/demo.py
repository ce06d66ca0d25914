"""Generated English sentences whose similarity is known by construction, for --demo and the tests.

A sentence says who does what to what, where and how: five slots. Each slot takes a concept, each
concept has several wordings, and each sentence has one of a few word orders. Two concepts have the
likeness 1 if they are the same, 0.5 if they are of one group (a boy and a girl), else 0. The
similarity of two sentences is the sum of their slots' likeness, weighted with WEIGHTS, times 5. The
wording says little about it, so an encoder must represent the meaning.

  python -m support.demo FOLDER     writes sentences.txt, pairs.tsv, dev.tsv, test.tsv, triplets.csv
"""

import argparse
import csv
import io
import random
from pathlib import Path
from typing import NamedTuple

from common import TRIPLET_HEADER, ScoredPairs, write_whole, writing

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
    """What a slot may take."""

    name: str
    group: str
    wordings: list


def list_concepts(groups):
    """{group: ["wording|wording", ...]} -> list of Concept, each named by its wordings."""
    concepts = []
    for group, members in groups.items():
        concepts += [Concept(words, group, words.split("|")) for words in members]
    return concepts


def list_actions():
    concepts = []
    for group, members in ACTION.items():
        concepts += [Concept(words, group, words.split("|")) for words, _ in members]
    return concepts


def list_things():
    concepts = []
    for group, members in THING.items():
        concepts += [Concept(name, group, words.split("|")) for name, words in members.items()]
    return concepts


SLOTS = {
    "who": list_concepts(WHO),
    "action": list_actions(),
    "thing": list_things(),
    "where": list_concepts(WHERE),
    "how": list_concepts(HOW),
}
CONCEPTS = {
    slot: {concept.name: concept for concept in concepts} for slot, concepts in SLOTS.items()
}
# action -> the things that it is done to
TAKES = {words: things for members in ACTION.values() for words, things in members}
ORDERS = (
    "{who} {action} {thing} {where} {how}",
    "{where} {who} {action} {thing} {how}",
    "{how} {who} {action} {thing} {where}",
    "{who} {action} {thing} {how} {where}",
)


def scene(rng):
    """A random meaning: {slot: name of a concept}."""
    meaning = {slot: rng.choice(concepts).name for slot, concepts in SLOTS.items()}
    return meaning | {"thing": rng.choice(TAKES[meaning["action"]])}


def wording(meaning, rng, unlike=""):
    """A sentence that says `meaning`, in words that are not in `unlike` wherever there are some.

    unlike: another sentence, in lower case.
    """
    words = {}
    for slot, name in meaning.items():
        wordings = CONCEPTS[slot][name].wordings
        fresh = [text for text in wordings if text not in unlike]
        words[slot] = rng.choice(fresh or wordings)
    text = rng.choice(ORDERS).format(**words)
    return text[0].upper() + text[1:] + "."


def similarity(first, second):
    """Of two meanings: 0 to 5."""
    total = 0.0
    for slot, weight in WEIGHTS.items():
        concept = CONCEPTS[slot][first[slot]]
        other = CONCEPTS[slot][second[slot]]
        if concept == other:
            total += weight
        elif concept.group == other.group:
            total += weight / 2
    return HIGHEST_SIMILARITY * total


def variant(meaning, keep, rng):
    """Another meaning that keeps each slot with probability `keep`."""
    other = scene(rng)
    other |= {slot: name for slot, name in meaning.items() if rng.random() < keep}
    possible = TAKES[other["action"]]
    if other["thing"] in possible:
        return other
    if meaning["thing"] in possible:
        other["thing"] = meaning["thing"]
    else:
        other["thing"] = rng.choice(possible)
    return other


def scored_pairs(count, seed):
    """`count` pairs of sentences with their similarity, 0 to 5 -> ScoredPairs."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        meaning = scene(rng)
        other = variant(meaning, rng.choice((0, 0.25, 0.5, 0.75, 0.9, 1)), rng)
        first = wording(meaning, rng)
        second = wording(other, rng, unlike=first.lower())
        rows.append((first, second, round(similarity(meaning, other), 3)))
    return ScoredPairs(*zip(*rows))


def dev():
    """{name: ScoredPairs}: the pairs that choose the best student."""
    return {"demo dev": scored_pairs(500, seed=1)}


def test():
    """{name: ScoredPairs}: the pairs that it is scored on."""
    return {"demo test": scored_pairs(1000, seed=2)}


def sentences(count=20_000):
    """`count` distinct sentences, none of them in dev or test."""
    known = set()
    for pairs in (*dev().values(), *test().values()):
        known.update(pairs.first + pairs.second)
    rng = random.Random(3)
    found = {}  # a dict keeps the order
    while len(found) < count:
        sentence = wording(scene(rng), rng)
        if sentence not in known:
            found[sentence] = None
    return list(found)


def triplets(count=2_000):
    """`count` lists [anchor, positive, hard negative].

    The positive says the same as the anchor in other words. The hard negative differs in action and
    thing, and has a similarity below 4.
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
            rows.append([anchor, positive, wording(changed, rng)])
    return rows


def write_rows(path, rows):
    """Tab-separated columns. Raises WriteError."""
    lines = ["\t".join(map(str, row)) + "\n" for row in rows]
    write_whole(path, "".join(lines))


def main():
    parser = argparse.ArgumentParser(description="Write the demo's data as files.")
    parser.add_argument("folder", nargs="?", type=Path, default="demo-data", help="%(default)s")
    folder = parser.parse_args().folder
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    rows = triplets()
    write_rows(folder / "sentences.txt", [[sentence] for sentence in sentences()])
    write_rows(folder / "pairs.tsv", [row[:2] for row in rows])
    write_rows(folder / "dev.tsv", zip(*dev()["demo dev"]))
    write_rows(folder / "test.tsv", zip(*test()["demo test"]))
    text = io.StringIO(newline="")
    csv.writer(text).writerows([TRIPLET_HEADER, *rows])
    write_whole(folder / "triplets.csv", text.getvalue())
    print(f"{folder}: sentences.txt, pairs.tsv, dev.tsv, test.tsv, triplets.csv")


if __name__ == "__main__":
    from support.command_line import run_main  # which imports this module

    run_main(main)
