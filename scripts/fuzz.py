"""Sends a server requests made from its own OpenAPI description, right ones and wrong.

    foretell serve --model demo --max-tokens 16 &
    python scripts/fuzz.py http://127.0.0.1:8000 --cases 2000

No answer may have a status from 500 on, and every refusal must have OpenAI's shape. Needs the extra
`dev`.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the libraries that it is made of
    import schemathesis
    from schemathesis import GenerationMode

SECONDS = 60.0  # that an answer may take
SHAPE = {"message", "type", "param", "code"}
BODIES = 0.9  # share of the requests that have a body
SHOWN = 2000  # characters of a request that is reported


class Report:
    """What was sent, and what was wrong with the answers."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.faults: list[str] = []

    def add(self, case: Any, answer: Any) -> None:
        """Notes an answer."""
        status = int(answer.status_code)
        self.statuses[status] += 1
        fault = ""
        if status >= 500:
            fault = f"status {status}"
        elif status >= 400 and status != 404:
            fault = _misshapen(answer)
        if fault:
            text = f"{fault}: {case.as_curl_command()[:SHOWN]}\n  {answer.text[:SHOWN]}"
            self.faults.append(text)

    @property
    def sent(self) -> int:
        return self.statuses.total()


def _misshapen(answer: Any) -> str:
    """What a refusal lacks of OpenAI's shape; "": nothing."""
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return "a refusal that is no error in JSON"
    if not isinstance(error, dict) or set(error) != SHAPE or not error["message"]:
        return f"an error without {sorted(SHAPE)}"
    return ""


def fuzz(url: str, description: Any, cases: int, seed: int = 0) -> Report:
    """Sends at least so many requests to the operations of an OpenAPI description."""
    report = Report()
    schema: Any = schemathesis.openapi.from_dict(description)
    operations = [result.ok() for result in schema.get_all_operations()]
    posts = [one for one in operations if one.body]
    plain = [one for one in operations if not one.body]
    for group, share in ((plain, 1 - BODIES), (posts, BODIES)):
        # What is exhausted early is made up for by those that follow.
        wanted = cases * share if group is plain else cases - report.sent
        for place, operation in enumerate(group):
            modes = list(GenerationMode) if operation.body else [GenerationMode.POSITIVE]
            count = max(1, round(wanted / len(group) / len(modes) + 0.5))
            for mode in modes:
                _send(url, operation, mode, count, seed + place, report)
    return report


def _send(url: str, operation: Any, mode: Any, count: int, seed: int, report: Report) -> None:
    """Sends so many requests of one kind."""

    @seeded(seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        report.add(case, case.call(base_url=url, timeout=SECONDS))

    send()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    import httpx

    description = httpx.get(f"{options.url}/openapi.json", trust_env=False).json()
    report = fuzz(options.url, description, options.cases, options.seed)
    for fault in report.faults:
        print(fault)
    counts = ", ".join(f"{count} of {status}" for status, count in sorted(report.statuses.items()))
    print(f"{report.sent} requests: {counts}; {len(report.faults)} faults")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
