"""English sentences made from slots, so that the similarity of any two is known by construction: for --demo and the tests, no download.

A sentence says who does what to what, where and how. Each slot takes a concept, each concept has several wordings, each sentence one of a
few word orders. Two concepts are alike by 1 if they are the same, by 0.5 if they are of one group (a boy, a girl), else by 0; two sentences
by the slots' likeness, weighted with WEIGHTS, from 0 to 5. So the wording says little and the meaning all: a good encoder sees through it.

  python demo.py FOLDER      writes sentences.txt, pairs.tsv, dev.tsv, test.tsv, triplets.csv, in the formats that the scripts read
"""
import csv
import random
import sys
from pathlib import Path

from common import MINILM, GradedPairs

DEFAULTS = dict(teacher=MINILM, student_layers="1,3,5", train="demo", dev="demo")
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
    "eat": [("eats|is having a bite of", ["apple", "sandwich", "cake", "fish"]), ("cooks|is preparing", ["soup", "cake", "fish"])],
    "look": [("reads|is looking through", ["book", "newspaper", "letter"]), ("watches|is looking at", ["film", "match", "bird", "horse"]),
             ("photographs|is taking a picture of", ["bridge", "bird", "horse", "mountain"])],
    "clean": [("washes|is cleaning", ["car", "dishes", "window", "dog"])],
    "make": [("repairs|is fixing", ["bicycle", "car", "roof", "radio"]), ("builds|is constructing", ["house", "bridge", "boat"]),
             ("paints|is putting a coat of color on", ["fence", "house", "boat"])],
    "move": [("carries|is lifting", ["box", "suitcase", "ladder", "dog"]), ("throws|is tossing", ["ball", "stone"]),
             ("pushes|is shoving", ["bicycle", "car", "box"])],
    "travel": [("rides|is traveling on", ["bicycle", "horse", "motorcycle"])],
    "trade": [("buys|is purchasing", ["apple", "book", "flowers", "shoes", "car"]),
              ("sells|is offering at a good price", ["fish", "flowers", "shoes", "newspaper"])],
    "care": [("feeds|is giving something to eat to", ["dog", "cat", "bird", "horse"]), ("strokes|is petting", ["dog", "cat", "horse"])],
    "destroy": [("cuts|is slicing", ["cake", "apple", "fish"]), ("burns|is setting fire to", ["letter", "newspaper", "house"])],
}
THING = {
    "music": dict(guitar="a guitar|an acoustic six-string", violin="a violin|a fiddle", piano="a piano|a keyboard", drums="the drums|a percussion set"),
    "food": dict(apple="an apple|a piece of fruit", sandwich="a sandwich|a burger", soup="some soup|a broth", cake="a cake|a sweet pastry",
                 fish="a fish|a trout"),
    "print": dict(book="a book|a novel", newspaper="a newspaper|the daily press", letter="a letter|some handwritten mail"),
    "show": dict(film="a film|a movie", match="a football match|a soccer game"),
    "animal": dict(dog="a dog|a puppy", cat="a cat|a kitten", bird="a bird|a sparrow", horse="a horse|a pony"),
    "vehicle": dict(bicycle="a bicycle|a bike", car="a car|an automobile", motorcycle="a motorcycle|a Harley", boat="a boat|a small ship"),
    "building": dict(house="a house|a home", bridge="a bridge|a river crossing", roof="a roof|the shingles", fence="a fence|a wooden barrier",
                     window="a window|the glass panes"),
    "nature": dict(mountain="a mountain|a rocky peak", stone="a stone|a rock", flowers="flowers|a bouquet of roses"),
    "goods": dict(box="a box|a carton", suitcase="a suitcase|some luggage", ladder="a ladder|a set of steps", ball="a ball|a round toy",
                  shoes="shoes|a pair of sneakers", radio="a radio|a wireless receiver", dishes="the dishes|dirty plates"),
}
WHERE = {
    "green": ["in the park|on a public lawn", "in the garden|out in the backyard"],
    "home": ["in the kitchen|next to the stove", "in the living room|beside the sofa"],
    "city": ["on the street|along the road", "at the market|among the stalls of a bazaar", "in a shop|inside a store"],
    "water": ["on the beach|by the sea", "near the river|beside a stream"],
    "work": ["in a hospital|at the clinic", "in an office|at the workplace", "in a factory|at an industrial plant"],
    "wild": ["in the forest|among the trees", "in the desert|between sand dunes", "in the snow|on icy ground"],
}
HOW = {
    "mood": ["happily|with a smile", "angrily|full of rage", "sadly|with tears in the eyes"],
    "pace": ["quickly|in a hurry", "slowly|without haste"],
    "time": ["at night|after dark", "in the morning|early in the day"],
    "company": ["alone|without company", "with friends|together with some buddies"],
}
SLOTS = {  # slot -> [(concept, group, wordings)]
    "who": [(words, group, words.split("|")) for group, concepts in WHO.items() for words in concepts],
    "action": [(words, group, words.split("|")) for group, concepts in ACTION.items() for words, _ in concepts],
    "thing": [(name, group, words.split("|")) for group, concepts in THING.items() for name, words in concepts.items()],
    "where": [(words, group, words.split("|")) for group, concepts in WHERE.items() for words in concepts],
    "how": [(words, group, words.split("|")) for group, concepts in HOW.items() for words in concepts],
}
TAKES = {words: things for concepts in ACTION.values() for words, things in concepts}
GROUP = {slot: {concept: group for concept, group, _ in concepts} for slot, concepts in SLOTS.items()}
WORDINGS = {slot: {concept: wordings for concept, _, wordings in concepts} for slot, concepts in SLOTS.items()}
ORDERS = ("{who} {action} {thing} {where} {how}", "{where} {who} {action} {thing} {how}", "{how} {who} {action} {thing} {where}",
          "{who} {action} {thing} {how} {where}")


def scene(rng):
    """A random meaning: {slot: concept}."""
    meaning = {slot: rng.choice(concepts)[0] for slot, concepts in SLOTS.items()}
    return meaning | {"thing": rng.choice(TAKES[meaning["action"]])}


def wording(meaning, rng, unlike=""):
    """One of the sentences that say `meaning`; in other words than the sentence `unlike` wherever there are others."""
    words = {}
    for slot, concept in meaning.items():
        fresh = [text for text in WORDINGS[slot][concept] if text not in unlike]
        words[slot] = rng.choice(fresh or WORDINGS[slot][concept])
    text = rng.choice(ORDERS).format(**words)
    return text[0].upper() + text[1:] + "."


def similarity(first, second):
    """Of two meanings, 0 to 5."""
    return 5 * sum(weight if first[slot] == second[slot] else weight / 2 * (GROUP[slot][first[slot]] == GROUP[slot][second[slot]])
                   for slot, weight in WEIGHTS.items())


def variant(meaning, keep, rng):
    """Another meaning that keeps each slot with probability `keep`."""
    other = scene(rng)
    other |= {slot: concept for slot, concept in meaning.items() if rng.random() < keep}
    if other["thing"] not in TAKES[other["action"]]:
        other["thing"] = meaning["thing"] if meaning["thing"] in TAKES[other["action"]] else rng.choice(TAKES[other["action"]])
    return other


def graded(count, seed):
    rng, rows = random.Random(seed), []
    for _ in range(count):
        first = scene(rng)
        second = variant(first, rng.choice((0, 0.25, 0.5, 0.75, 0.9, 1)), rng)
        text = wording(first, rng)
        rows.append((text, wording(second, rng, unlike=text.lower()), round(similarity(first, second), 3)))
    return GradedPairs(*zip(*rows))


def dev():
    return {"demo dev": graded(500, seed=1)}


def test():
    return {"demo test": graded(1000, seed=2)}


def sentences(count=20_000):
    """`count` distinct sentences, none of them in dev or test."""
    rng, seen = random.Random(3), {}
    known = {sentence for pairs in (*dev().values(), *test().values()) for sentence in pairs.first + pairs.second}
    while len(seen) < count:
        sentence = wording(scene(rng), rng)
        if sentence not in known:
            seen[sentence] = None
    return list(seen)


def triplets(count=2_000):
    """[anchor, the same in other words, one that shares all but two slots with it]."""
    rng, rows = random.Random(4), []
    while len(rows) < count:
        meaning = scene(rng)
        other = meaning | {slot: concept for slot, concept in scene(rng).items() if slot in ("action", "thing")}
        if similarity(meaning, other) < 4:
            anchor = wording(meaning, rng)
            rows.append([anchor, wording(meaning, rng, unlike=anchor.lower()), wording(other, rng)])
    return rows


def main():
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "demo-data")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sentences.txt").write_text("".join(sentence + "\n" for sentence in sentences()), "utf-8")
    (folder / "pairs.tsv").write_text("".join(f"{anchor}\t{positive}\n" for anchor, positive, _ in triplets()), "utf-8")
    for name, pairs in (("dev", dev()["demo dev"]), ("test", test()["demo test"])):
        (folder / f"{name}.tsv").write_text("".join(f"{a}\t{b}\t{score}\n" for a, b, score in zip(*pairs)), "utf-8")
    with open(folder / "triplets.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["sent0", "sent1", "hard_neg"], *triplets()])
    print(f"{folder}: sentences.txt, pairs.tsv, dev.tsv, test.tsv, triplets.csv")


if __name__ == "__main__":
    main()
