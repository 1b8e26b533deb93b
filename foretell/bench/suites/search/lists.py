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
from foretell.bench.suites.search.tasks import Task, different

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
    """So many different things of a set are to be named."""

    wanted: int
    right: frozenset[str]  # as `plain` writes them

    sort: ClassVar[str] = "lists"

    @property
    def opening(self) -> str:
        return "1."

    def score(self, text: str) -> float:
        """The share of those wanted that are among the first entries, each counted once."""
        return len(self.right.intersection(entries(text)[: self.wanted])) / self.wanted

    def public(self, text: str) -> float:
        """The same of whatever stands there."""
        return len({one for one in entries(text)[: self.wanted] if one}) / self.wanted

    def found(self, answers: Sequence[str]) -> int:
        """Of all entries, beyond those wanted too."""
        named = [one for text in answers for one in entries(text)]
        return len(self.right.intersection(named))


def entries(text: str) -> list[str]:
    """Those of a list, one a line, as `plain` writes them."""
    return [plain(one) for one in ENTRY.findall(text)]


def plain(entry: str) -> str:
    """An entry in small letters, without what is said of it, signs or an article."""
    words = re.sub(r"[^\w\s-]", " ", ASIDE.sub("", entry.replace("*", ""))).split()
    return " ".join(words).lower().removeprefix("the ")


def lists(count: int, seed: int) -> list[Listing]:
    """Raises BadConfig where there are fewer."""
    return different(FORMS, count, seed, "lists")


def _task(kind: str, question: str, wanted: int, right: Sequence[object]) -> Listing:
    known = frozenset(plain(str(one).replace("_", " ")) for one in right)
    return Listing(kind, f"{question} Write a numbered list.", wanted, known)


def _named(draw: random.Random) -> Listing:
    what = draw.choice(sorted(SETS))
    wanted = draw.randint(3, 10)
    return _task("named", f"Name {wanted} {what}.", wanted, SETS[what].split())


def _lettered(draw: random.Random) -> Listing:
    what = draw.choice(sorted(name for name in SETS if SETS[name] != SOUTH_AMERICA))
    by_letter: dict[str, list[str]] = {}
    for name in SETS[what].split():
        by_letter.setdefault(name[0], []).append(name)
    letter = draw.choice(sorted(one for one, names in by_letter.items() if len(names) > 2))
    wanted = draw.randint(2, 3)
    question = f"Name {wanted} {what} whose names begin with the letter {letter}."
    return _task("lettered", question, wanted, by_letter[letter])


def _multiples(draw: random.Random) -> Listing:
    factor, wanted = draw.randint(2, 12), draw.randint(3, 8)
    right = range(factor, factor * 1000, factor)
    return _task("multiples", f"Write {wanted} multiples of {factor}.", wanted, right)


def _between(draw: random.Random) -> Listing:
    low, odd, wanted = draw.randint(1, 80), draw.randint(0, 1), draw.randint(3, 6)
    high = low + 4 * wanted
    right = [number for number in range(low, high + 1) if number % 2 == odd]
    what = "odd" if odd else "even"
    question = f"Write {wanted} {what} numbers that lie between {low} and {high}."
    return _task("between", question, wanted, right)


def _picked(draw: random.Random) -> Listing:
    what, other = draw.sample(sorted(KINDS), 2)
    right = draw.sample(KINDS[what], draw.randint(2, 3))
    words = [*right, *draw.sample(KINDS[other], draw.randint(1, 3))]
    draw.shuffle(words)
    plural = "countries" if what == "country" else f"{what}s"
    question = f"Here are some words: {', '.join(words)}. Which of them are {plural}?"
    return _task("picked", question, len(right), right)


def _first(draw: random.Random) -> Listing:
    words = draw.sample(sorted(word for kind in KINDS.values() for word in kind), 6)
    wanted = draw.randint(2, 4)
    question = f"Here are some words: {', '.join(words)}. Write the first {wanted} of them."
    return _task("first", question, wanted, words[:wanted])


FORMS: tuple[Callable[[random.Random], Listing], ...] = (
    _named,
    _lettered,
    _multiples,
    _between,
    _picked,
    _first,
)
