"""Tasks of the sort `lists`: things are to be named, each on a line of its own.

What is right is a closed set: countries and states, elements, months, numbers with a property, or
words of a list in the question. The first entries count, as many as were asked for; right is an
answer of which all these are different right ones. What can be known without the set is whether
there are so many different entries.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from foretell.bench.answer_tasks import KINDS
from foretell.bench.suites.search.tasks import Task, make_distinct

ENTRY = re.compile(r"^[ \t]*(?:\d+[.):]|[-*\u2022])[ \t]*(.*)$", re.MULTILINE)
ASIDE = re.compile(r"\s[-\u2013\u2014(:].*|[:(].*")  # what says more of an entry

EUROPE = """Albania Andorra Armenia Austria Azerbaijan Belarus Belgium Bosnia_and_Herzegovina
Bulgaria Croatia Cyprus Czechia Czech_Republic Denmark Estonia Finland France Georgia Germany Greece
Hungary Iceland Ireland Italy Kazakhstan Kosovo Latvia Liechtenstein Lithuania Luxembourg Malta
Moldova Monaco Montenegro Netherlands North_Macedonia Macedonia Norway Poland Portugal Romania
Russia San_Marino Serbia Slovakia Slovenia Spain Sweden Switzerland Turkey Ukraine United_Kingdom
Vatican_City"""
AFRICA = """Algeria Angola Benin Botswana Burkina_Faso Burundi Cameroon Cape_Verde Cabo_Verde
Central_African_Republic Chad Comoros Congo Democratic_Republic_of_the_Congo Republic_of_the_Congo
Djibouti Egypt Equatorial_Guinea Eritrea Eswatini Swaziland Ethiopia Gabon Gambia Ghana Guinea
Guinea-Bissau Ivory_Coast Kenya Lesotho Liberia Libya Madagascar Malawi Mali Mauritania Mauritius
Morocco Mozambique Namibia Niger Nigeria Rwanda Senegal Seychelles Sierra_Leone Somalia South_Africa
South_Sudan Sudan Tanzania Togo Tunisia Uganda Zambia Zimbabwe"""
ASIA = """Afghanistan Armenia Azerbaijan Bahrain Bangladesh Bhutan Brunei Cambodia China Cyprus
East_Timor Georgia India Indonesia Iran Iraq Israel Japan Jordan Kazakhstan Kuwait Kyrgyzstan Laos
Lebanon Malaysia Maldives Mongolia Myanmar Nepal North_Korea Oman Pakistan Palestine Philippines
Qatar Russia Saudi_Arabia Singapore South_Korea Sri_Lanka Syria Taiwan Tajikistan Thailand
Timor-Leste Turkey Turkmenistan United_Arab_Emirates Uzbekistan Vietnam Yemen"""
SOUTH_AMERICA = """Argentina Bolivia Brazil Chile Colombia Ecuador Guyana Paraguay Peru Suriname
Uruguay Venezuela"""
STATES = """Alabama Alaska Arizona Arkansas California Colorado Connecticut Delaware Florida Georgia
Hawaii Idaho Illinois Indiana Iowa Kansas Kentucky Louisiana Maine Maryland Massachusetts Michigan
Minnesota Mississippi Missouri Montana Nebraska Nevada New_Hampshire New_Jersey New_Mexico New_York
North_Carolina North_Dakota Ohio Oklahoma Oregon Pennsylvania Rhode_Island South_Carolina
South_Dakota Tennessee Texas Utah Vermont Virginia Washington West_Virginia Wisconsin Wyoming"""
ELEMENTS = """Hydrogen Helium Lithium Beryllium Boron Carbon Nitrogen Oxygen Fluorine Neon Sodium
Magnesium Aluminium Aluminum Silicon Phosphorus Sulfur Sulphur Chlorine Argon Potassium Calcium
Scandium Titanium Vanadium Chromium Manganese Iron Cobalt Nickel Copper Zinc Gallium Germanium
Arsenic Selenium Bromine Krypton Rubidium Strontium Yttrium Zirconium Niobium Molybdenum Technetium
Ruthenium Rhodium Palladium Silver Cadmium Indium Tin Antimony Tellurium Iodine Xenon Caesium Cesium
Barium Lanthanum Cerium Praseodymium Neodymium Promethium Samarium Europium Gadolinium Terbium
Dysprosium Holmium Erbium Thulium Ytterbium Lutetium Hafnium Tantalum Tungsten Rhenium Osmium
Iridium Platinum Gold Mercury Thallium Lead Bismuth Polonium Astatine Radon Francium Radium Actinium
Thorium Protactinium Uranium Neptunium Plutonium Americium Curium Berkelium Californium Einsteinium
Fermium Mendelevium Nobelium Lawrencium Rutherfordium Dubnium Seaborgium Bohrium Hassium Meitnerium
Darmstadtium Roentgenium Copernicium Nihonium Flerovium Moscovium Livermorium Tennessine
Oganesson"""
SETS = {
    "countries in Europe": EUROPE,
    "countries in Africa": AFRICA,
    "countries in Asia": ASIA,
    "countries in South America": SOUTH_AMERICA,
    "states of the United States": STATES,
    "chemical elements": ELEMENTS,
}


@dataclass(frozen=True)
class Listing(Task):
    """A task to name different things of a set."""

    entry_count: int
    right_entries: frozenset[str]  # as `plain_entry` writes them

    sort: ClassVar[str] = "lists"

    @property
    def opening(self) -> str:
        return "1."

    def score_answer(self, text: str) -> float:
        """Share of right entries among the first ones, each counted once."""
        return (
            len(self.right_entries.intersection(plain_entries(text)[: self.entry_count]))
            / self.entry_count
        )

    def public(self, text: str) -> float:
        """Share of different entries among the first ones, whatever stands there."""
        return (
            len({entry for entry in plain_entries(text)[: self.entry_count] if entry})
            / self.entry_count
        )

    def count_correct(self, answers: Sequence[str]) -> int:
        """Counts the right ones of all entries, beyond those asked for too."""
        named_entries = [entry for text in answers for entry in plain_entries(text)]
        return len(self.right_entries.intersection(named_entries))


def plain_entries(text: str) -> list[str]:
    """Entries of a list, one a line, as `plain_entry` writes them."""
    return [plain_entry(entry) for entry in ENTRY.findall(text)]


def plain_entry(entry: str) -> str:
    """An entry in small letters, without what is said of it, signs or an article."""
    words = re.sub(r"[^\w\s-]", " ", ASIDE.sub("", entry.replace("*", ""))).split()
    return " ".join(words).lower().removeprefix("the ")


def make_lists(count: int, seed: int) -> list[Listing]:
    """Makes `count` different lists. Raises BadConfig where there are fewer."""
    return make_distinct(FORMS, count, seed, "lists")


def _list_task(
    kind: str, question: str, entry_count: int, right_entries: Sequence[object]
) -> Listing:
    plain_entries = frozenset(plain_entry(str(entry).replace("_", " ")) for entry in right_entries)
    return Listing(kind, f"{question} Write a numbered list.", entry_count, plain_entries)


def _draw_named(generator: random.Random) -> Listing:
    set_name = generator.choice(sorted(SETS))
    entry_count = generator.randint(3, 10)
    return _list_task(
        "named", f"Name {entry_count} {set_name}.", entry_count, SETS[set_name].split()
    )


def _draw_lettered(generator: random.Random) -> Listing:
    set_name = generator.choice(sorted(name for name in SETS if SETS[name] != SOUTH_AMERICA))
    names_by_letter: dict[str, list[str]] = {}
    for name in SETS[set_name].split():
        names_by_letter.setdefault(name[0], []).append(name)
    letter = generator.choice(
        sorted(
            initial for initial, letter_names in names_by_letter.items() if len(letter_names) > 2
        )
    )
    entry_count = generator.randint(2, 3)
    question = f"Name {entry_count} {set_name} whose names begin with the letter {letter}."
    return _list_task("lettered", question, entry_count, names_by_letter[letter])


def _draw_multiples(generator: random.Random) -> Listing:
    factor, entry_count = generator.randint(2, 12), generator.randint(3, 8)
    right_numbers = range(factor, factor * 1000, factor)
    return _list_task(
        "multiples", f"Write {entry_count} multiples of {factor}.", entry_count, right_numbers
    )


def _draw_between(generator: random.Random) -> Listing:
    lower_bound, parity, entry_count = (
        generator.randint(1, 80),
        generator.randint(0, 1),
        generator.randint(3, 6),
    )
    upper_bound = lower_bound + 4 * entry_count
    right_numbers = [
        number for number in range(lower_bound, upper_bound + 1) if number % 2 == parity
    ]
    parity_word = "odd" if parity else "even"
    question = (
        f"Write {entry_count} {parity_word} numbers that lie between {lower_bound} and "
        f"{upper_bound}."
    )
    return _list_task("between", question, entry_count, right_numbers)


def _draw_picked(generator: random.Random) -> Listing:
    kind_name, other_kind = generator.sample(sorted(KINDS), 2)
    right_words = generator.sample(KINDS[kind_name], generator.randint(2, 3))
    words = [*right_words, *generator.sample(KINDS[other_kind], generator.randint(1, 3))]
    generator.shuffle(words)
    plural = "countries" if kind_name == "country" else f"{kind_name}s"
    question = f"Here are some words: {', '.join(words)}. Which of them are {plural}?"
    return _list_task("picked", question, len(right_words), right_words)


def _draw_first(generator: random.Random) -> Listing:
    words = generator.sample(sorted(word for kind in KINDS.values() for word in kind), 6)
    entry_count = generator.randint(2, 4)
    question = f"Here are some words: {', '.join(words)}. Write the first {entry_count} of them."
    return _list_task("first", question, entry_count, words[:entry_count])


FORMS: tuple[Callable[[random.Random], Listing], ...] = (
    _draw_named,
    _draw_lettered,
    _draw_multiples,
    _draw_between,
    _draw_picked,
    _draw_first,
)
