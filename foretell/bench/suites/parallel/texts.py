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
    "The {how} {what} after the {where} belongs to the {who}.",
    "The {who} left the {how} {what} near the {where}.",
    "Near the {where}, the {who} found the {how} {what}.",
)
RARE_FORMS = (
    "The {one} of the {a} reflects the {two} of the {b}.",
    "Neither the {one} nor the {two} explains the {a} after the {b}.",
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
ACCEPTING = ("Gladly!", "Yes, why not.", "I would love to.")
REGRETTING = ("Sorry", "I am afraid not", "What a pity")
PARTING = ("Have fun!", "Thank you for asking.", "Yes, next time.")
EXCUSES = ("has to work", "is ill", "has an exam", "is visiting family", "has no money left")


def easy_sentence(generator: random.Random) -> tuple[tuple[str, ...], str]:
    """Four words of one theme, and a sentence."""
    chosen_words = [generator.choice(part.split()) for part in generator.choice(THEMES).split("|")]
    words_by_role = dict(zip(("who", "does", "what", "where"), chosen_words, strict=True))
    return _shuffle_words(generator, chosen_words), generator.choice(EASY_FORMS).format(
        **words_by_role
    )


def medium_sentence(generator: random.Random) -> tuple[tuple[str, ...], str]:
    """Four common words of no theme, and a sentence."""
    chosen_words = [generator.choice(part.split()) for part in PLAIN]
    chosen_words.append(generator.choice(generator.choice(THEMES).split("|")[0].split()))
    words_by_role = dict(zip(("how", "what", "where", "who"), chosen_words, strict=True))
    return _shuffle_words(generator, chosen_words), generator.choice(PLAIN_FORMS).format(
        **words_by_role
    )


def hard_sentence(generator: random.Random) -> tuple[tuple[str, ...], str]:
    """Four rare words, and a sentence."""
    chosen_words = [word for part in RARE for word in generator.sample(part.split(), 2)]
    words_by_role = dict(zip(("one", "two", "a", "b"), chosen_words, strict=True))
    return _shuffle_words(generator, chosen_words), generator.choice(RARE_FORMS).format(
        **words_by_role
    )


def _shuffle_words(generator: random.Random, chosen_words: list[str]) -> tuple[str, ...]:
    return tuple(generator.sample(chosen_words, len(chosen_words)))


def draw_paraphrase(generator: random.Random) -> tuple[str, tuple[str, ...]]:
    """A sentence, and others that say the same."""
    friend, day = generator.choice(FRIENDS), generator.choice(DAYS)
    verbs, adjectives, goods, places = (
        generator.choice(pairs) for pairs in (DID, HOW, GOODS, WHERE)
    )
    source = f"{friend} {verbs[0]} the {adjectives[0]} {goods[0]} at the {places[0]} on {day}."
    paraphrases = (
        f"On {day}, {friend} {verbs[1]} the {adjectives[1]} {goods[1]} at the {places[1]}.",
        f"At the {places[1]}, {friend} {verbs[1]} the {adjectives[1]} {goods[1]} on {day}.",
        f"It was on {day} that {friend} {verbs[1]} the {adjectives[1]} {goods[1]} "
        f"at the {places[1]}.",
    )
    return source, paraphrases


def draw_conversation(generator: random.Random) -> tuple[str, str]:
    """A conversation of two people, and its summary in one sentence."""
    speaker, listener = generator.sample(FRIENDS, 2)
    (plan, location), day = generator.choice(PLANS), generator.choice(DAYS)
    hour = generator.randint(2, 9)
    opening_line = generator.choice(
        (
            f"{speaker}: Hi {listener}, do you want to {plan} with me on {day}?",
            f"{speaker}: Are you free on {day}? I would like to {plan}.",
            f"{speaker}: {listener}, shall we {plan} on {day}?",
        )
    )
    if generator.random() < 0.5:
        lines = (
            opening_line,
            f"{listener}: {generator.choice(ACCEPTING)} When?",
            f"{speaker}: At {hour}, we meet at {location}.",
            f"{listener}: {generator.choice(('See you there.', 'Perfect.', 'I will be there.'))}",
        )
        summary = f"{speaker} and {listener} will {plan} at {location} on {day} at {hour}."
    else:
        excuse = generator.choice(EXCUSES)
        own_excuse = excuse.replace("has", "have").replace("is ", "am ")
        lines = (
            opening_line,
            f"{listener}: {generator.choice(REGRETTING)}, I {own_excuse}.",
            f"{speaker}: {generator.choice(('Another time then.', 'Maybe next week.', 'I see.'))}",
            f"{listener}: {generator.choice(PARTING)}",
        )
        summary = f"{listener} cannot {plan} with {speaker} on {day} because {listener} {excuse}."
    return "\n".join(lines), summary
