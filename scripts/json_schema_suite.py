"""How much of the official JSON Schema test suite holds: `python scripts/json_schema_suite.py
FOLDER`, the suite's folder of one draft, such as tests/draft2020-12.

Every schema is compiled as a request's would be. Of those that are, each answer of the suite is
written in every order of its properties, compactly, and read byte by byte. It is accepted if one of
these texts is. A schema that no value has is refused, which is right where its answers are all
invalid. Nothing is fetched: a reference to another document is refused.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from foretell.constraints.compiling import build_matcher, form_text
from foretell.errors import BadConfig

ORDERS = 200  # of the properties of one answer


@dataclass
class Counts:
    """Of one part of the suite."""

    schemas: int = 0
    compiled: int = 0
    empty: int = 0  # refused, since no value is of them
    answers: Counter[tuple[bool, bool]] = field(default_factory=Counter)  # valid, accepted
    refusals: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def lines(self, name: str) -> Iterator[str]:
        valid, invalid = (self.answers[kind, True] for kind in (True, False))
        yield (
            f"{name}: {self.compiled} of {self.schemas} schemas compile, and {self.empty} are of "
            f"no value; valid answers accepted: {valid} of {valid + self.answers[True, False]}; "
            f"invalid answers accepted: {invalid} of {invalid + self.answers[False, False]}"
        )
        for reason, count in self.refusals.most_common():
            yield f"  refused {count:3}  {reason}"
        yield from (f"  {line}" for line in self.wrong)


def texts(value: Any, orders: int = ORDERS) -> Iterator[str]:
    """The compact texts of a value, by the orders of its properties."""
    if isinstance(value, dict):
        for some in islice(permutations(value.items()), orders):
            for inner in islice(product(*(list(texts(one, 20)) for _, one in some)), orders):
                names = [json.dumps(key, ensure_ascii=False) for key, _ in some]
                pairs = zip(names, inner, strict=True)
                yield "{" + ",".join(f"{key}:{one}" for key, one in pairs) + "}"
    elif isinstance(value, list):
        for inner in islice(product(*(list(texts(one, 20)) for one in value)), orders):
            yield f"[{','.join(inner)}]"
    else:
        yield json.dumps(value, ensure_ascii=False)


def takes(start: LLMatcher, text: str) -> bool:
    matcher = start.deep_copy()
    return all(
        matcher.try_consume_tokens([byte]) for byte in text.encode("utf-8", "surrogatepass")
    ) and bool(matcher.is_accepting())


def measured(folder: Path) -> dict[str, Counts]:
    """The suite's main part and its optional one."""
    tokens = LLTokenizer("byte")
    found = {"main": Counts(), "optional": Counts()}
    for path in sorted(folder.rglob("*.json")):
        counts = found["optional" if "optional" in path.parts else "main"]
        for group in json.loads(path.read_text(encoding="utf-8")):
            counts.schemas += 1
            where = f"{path.stem}: {group['description']}"
            try:
                schema = {"not": {}} if group["schema"] is False else group["schema"]
                source = form_text("json_schema", schema)
                matcher = build_matcher("json_schema", source, tokens)
            except BadConfig as error:
                if not any(test["valid"] for test in group["tests"]):
                    counts.empty += "no value" in str(error)
                    counts.refusals[f"{where}: {error}"] += "no value" not in str(error)
                else:
                    counts.refusals[str(error).partition("; ")[0]] += 1
                continue
            counts.compiled += 1
            for test in group["tests"]:
                accepted = any(takes(matcher, text) for text in texts(test["data"]))
                counts.answers[test["valid"], accepted] += 1
                if accepted != test["valid"]:
                    kind = "valid, refused" if test["valid"] else "INVALID, ACCEPTED"
                    counts.wrong.append(f"{kind}: {where}: {test['description']}")
    for counts in found.values():
        counts.refusals = +counts.refusals
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="the official JSON Schema test suite")
    parser.add_argument("folder", type=Path, help="of one draft, such as tests/draft2020-12")
    options = parser.parse_args(arguments)
    for name, counts in measured(options.folder).items():
        print("\n".join(counts.lines(name)))


if __name__ == "__main__":
    main()
