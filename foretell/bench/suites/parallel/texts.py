"""Scenes for the text tasks of parallel decoding: words with a sentence that has them, sentences in
several wordings, conversations with a summary. All of it is made here, from small word lists.
"""

from __future__ import annotations

import random

# Of a theme: who, does (and an s), what, where.
THEMES = (
    "baker cook waiter|stir taste warm serve|soup sauce stew broth|kitchen cellar",
    "farmer shepherd neighbour|feed count guard lead|goat sheep donkey calf|meadow barn valley",
    "sailor captain fisherman|paint repair moor clean|canoe ferry raft yacht|harbour dock bay",
    "teacher pupil tutor|explain repeat spell check|lesson answer riddle poem|classroom library",
    "nurse doctor surgeon|clean bandage treat examine|wound elbow ankle wrist|clinic ward hospital",
    "gardener florist botanist|plant water trim pick|rose tulip hedge daisy|garden greenhouse",
    "drummer singer pianist|play record hear practise|tune anthem ballad waltz|studio theatre hall",
    "carpenter joiner builder|saw sand glue measure|plank shelf beam ladder|workshop attic shed",
    "goalkeeper striker coach|kick throw defend save|goal penalty corner trophy|stadium pitch",
    "postman clerk courier|sort deliver weigh stamp|parcel envelope telegram crate|depot lobby",
    "tailor weaver knitter|mend fold iron sew|shirt jacket scarf blanket|boutique parlour mill",
    "climber hiker ranger|visit map photograph explore|glacier cave ridge gorge|reserve park",
)
PLAIN = (  # adjectives and things that have nothing to do with each other
    "quiet rusty narrow bright heavy wooden gentle empty frozen hollow silver dusty",
    "bucket candle hammer lantern pillow umbrella button ladder mirror basket kettle needle",
    "bridge tunnel chimney fountain balcony orchard lighthouse tower windmill cellar gate quarry",
)
RARE = (
    "entropy paradox tyranny symmetry inertia nostalgia sovereignty erosion resonance hierarchy "
    "ambiguity osmosis rhetoric jurisprudence inflation metaphor",
    "archipelago isotope tapestry pendulum mosaic labyrinth parchment obelisk catalyst glacier "
    "satellite membrane cathedral manuscript telescope sediment",
)
EASY_FORMS = (
    "The {who} {does}s the {what} in the {where}.",
    "In the {where}, the {who} {does}s the {what}.",
    "The {who} in the {where} {does}s the {what} every morning.",
    "Every evening, the {who} {does}s the {what} in the {where}.",
)
PLAIN_FORMS = (
    "The {how} {what} behind the {where} belongs to the {who}.",
    "The {who} left the {how} {what} near the {where}.",
    "Near the {where}, the {who} found the {how} {what}.",
)
RARE_FORMS = (
    "The {one} of the {a} reflects the {two} of the {b}.",
    "Neither the {one} nor the {two} explains the {a} behind the {b}.",
    "The {a} and the {b} show how the {one} leads to the {two}.",
)
FRIENDS = "Alma Bo Clio Dag Edda Finn Gil Hedda Ilse Jarl Kaja Lovis Milo Nell Odin Pia".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
# Pairs of words that say the same.
DID = (("bought", "purchased"), ("found", "came across"), ("sold", "parted with"))
HOW = (("old", "antique"), ("small", "little"), ("cheap", "inexpensive"), ("lovely", "beautiful"))
GOODS = (("bicycle", "bike"), ("picture", "painting"), ("couch", "sofa"), ("coat", "jacket"))
WHERE = (("market", "fair"), ("shop", "store"), ("harbour", "port"), ("station", "terminal"))
PLANS = (  # what to do, and where
    ("watch a film", "the cinema"),
    ("play chess", "the library"),
    ("eat noodles", "the new restaurant"),
    ("go swimming", "the lake"),
    ("look at paintings", "the museum"),
    ("bake a cake", "the community kitchen"),
    ("repair the boat", "the harbour"),
    ("listen to the band", "the town hall"),
)
EXCUSES = ("has to work", "is ill", "has an exam", "is visiting family", "has no money left")


def easy(draw: random.Random) -> tuple[tuple[str, ...], str]:
    """Four words of one theme, and a sentence."""
    parts = [draw.choice(part.split()) for part in draw.choice(THEMES).split("|")]
    names = dict(zip(("who", "does", "what", "where"), parts, strict=True))
    return _mixed(draw, parts), draw.choice(EASY_FORMS).format(**names)


def medium(draw: random.Random) -> tuple[tuple[str, ...], str]:
    """Four common words of no theme, and a sentence."""
    parts = [draw.choice(part.split()) for part in PLAIN]
    parts.append(draw.choice(draw.choice(THEMES).split("|")[0].split()))
    names = dict(zip(("how", "what", "where", "who"), parts, strict=True))
    return _mixed(draw, parts), draw.choice(PLAIN_FORMS).format(**names)


def hard(draw: random.Random) -> tuple[tuple[str, ...], str]:
    """Four rare words, and a sentence."""
    parts = [word for part in RARE for word in draw.sample(part.split(), 2)]
    names = dict(zip(("one", "two", "a", "b"), parts, strict=True))
    return _mixed(draw, parts), draw.choice(RARE_FORMS).format(**names)


def _mixed(draw: random.Random, parts: list[str]) -> tuple[str, ...]:
    return tuple(draw.sample(parts, len(parts)))


def paraphrase(draw: random.Random) -> tuple[str, tuple[str, ...]]:
    """A sentence, and others that say the same."""
    name, day = draw.choice(FRIENDS), draw.choice(DAYS)
    did, how, what, where = (draw.choice(pairs) for pairs in (DID, HOW, GOODS, WHERE))
    source = f"{name} {did[0]} the {how[0]} {what[0]} at the {where[0]} on {day}."
    others = (
        f"On {day}, {name} {did[1]} the {how[1]} {what[1]} at the {where[1]}.",
        f"At the {where[1]}, {name} {did[1]} the {how[1]} {what[1]} on {day}.",
        f"It was on {day} that {name} {did[1]} the {how[1]} {what[1]} at the {where[1]}.",
    )
    return source, others


def conversation(draw: random.Random) -> tuple[str, str]:
    """A conversation of two people, and its summary in one sentence."""
    one, other = draw.sample(FRIENDS, 2)
    (what, where), day = draw.choice(PLANS), draw.choice(DAYS)
    hour = draw.randint(2, 9)
    opening = draw.choice(
        (
            f"{one}: Hi {other}, do you want to {what} with me on {day}?",
            f"{one}: Are you free on {day}? I would like to {what}.",
            f"{one}: {other}, shall we {what} on {day}?",
        )
    )
    if draw.random() < 0.5:
        lines = (
            opening,
            f"{other}: {draw.choice(('Gladly!', 'Yes, why not.', 'I would love to.'))} When?",
            f"{one}: At {hour}, we meet at {where}.",
            f"{other}: {draw.choice(('See you there.', 'Perfect.', 'I will be there.'))}",
        )
        summary = f"{one} and {other} will {what} at {where} on {day} at {hour}."
    else:
        excuse = draw.choice(EXCUSES)
        said = excuse.replace("has", "have").replace("is ", "am ")
        lines = (
            opening,
            f"{other}: {draw.choice(('Sorry', 'I am afraid not', 'What a pity'))}, I {said}.",
            f"{one}: {draw.choice(('Another time then.', 'Maybe next week.', 'I see.'))}",
            f"{other}: {draw.choice(('Have fun!', 'Thank you for asking.', 'Yes, next time.'))}",
        )
        summary = f"{other} cannot {what} with {one} on {day} because {other} {excuse}."
    return "\n".join(lines), summary
