"""Requests that nobody would write, made from the server's own description of what it takes.

A few dozen here; `scripts/fuzz.py` makes as many as are asked for.
"""

from __future__ import annotations

import httpx

from scripts.fuzz import fuzz
from tests.serve.live import Live


def test_no_request_makes_the_server_fail(live: Live, client: httpx.Client) -> None:
    report = fuzz(live.url, client.get("/openapi.json").json(), cases=20, seed=1)
    assert report.sent >= 20
    assert not report.faults, report.faults[0]
    assert 200 in report.statuses and 400 in report.statuses
    assert live.service.gate.requests == 0 and live.service.gate.answers == 0
