"""Hostile clients beside honest ones against a live server for a minute: who waits how long?

    python scripts/siege.py --model smollm2                 # calm for 15 seconds, then a minute
    python scripts/siege.py --model demo --seconds 10 --calm 5

Starts `foretell serve` on loopback. Honest clients ask for short answers, one after the other, and
one asks `/health` ten times a second: first alone, then beside others, in a process of their own:
two that send bodies of 8 MB (a text that cannot fit, lists of ids, unknown fields), 36 that send
grammars that are dear to compile, each with a timeout of a second, and 64 that send bodies byte by
byte. At the end it sends SIGTERM in the middle of that. Prints one JSON document; exit code 1 where
`/health` took .1 s or more (99 % of the time), 99 % of honest answers took more than twice as long
as alone, or the server outlived its drain.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from soak import server  # noqa: E402

SIZE = 8 * 2**20 - 4096  # bytes of a large body
GRAMMARS, SLOW, LARGE, HONEST = 36, 64, 2, 4
DRAIN = 2.0  # seconds that the server has at its end
STEP = 0.1  # seconds between two tries of who is not waiting for an answer
LATE = 1.5  # seconds beyond its drain that a process may take to end
JSON = {"Content-Type": "application/json"}


# --- hostile clients


def bodies() -> list[bytes]:
    """Large ones, each costly in another way."""
    fields = b",".join(b'"f%07d":%d' % (k, k) for k in range(SIZE // 19))
    return [
        b'{"prompt":"' + b"word " * (SIZE // 5) + b'"}',
        b'{"prompt":"' + b"a" * SIZE + b'"}',
        b'{"prompt":[' + b"[1]," * (SIZE // 4) + b"[1]]}",
        b'{"prompt":[' + b"1," * (SIZE // 2) + b"1]}",
        b'{"prompt":"a",' + fields + b"}",
        b'{"messages":[{"role":"user","content":"' + b"\\u00e9 " * (SIZE // 7) + b'"}]}',
    ]


def grammar(number: int) -> str:
    """One that no other request has, with many ways on at each place."""
    rules = [
        f'r{k}: "{number}x{k}" | r{(k * 7 + 1) % 900} r{(k * 3 + 2) % 900}' for k in range(900)
    ]
    return "start: r0 r1 r2\n" + "\n".join(rules)


async def large(http: httpx.AsyncClient, end: float) -> None:
    kinds = bodies()
    number = 0
    while time.monotonic() < end:
        body = kinds[number % len(kinds)]
        path = "/v1/chat/completions" if b'"messages"' in body[:20] else "/v1/completions"
        with suppress(httpx.HTTPError):
            await http.post(path, content=body, headers=JSON)
        number += 1


async def forms(http: httpx.AsyncClient, end: float, client: int) -> None:
    number = 0
    while time.monotonic() < end:
        form = {"grammar": grammar(1000 * client + number)}
        body = {"prompt": "a", "max_tokens": 8, "timeout": 1, "structured_outputs": form}
        with suppress(httpx.HTTPError):
            await http.post("/v1/completions", json=body)
        number += 1


async def slow(url: str, end: float) -> None:
    host, port = urlsplit(url).hostname, urlsplit(url).port
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    while time.monotonic() < end:
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(f"{head}Content-Length: 1000000\r\n\r\n".encode())
            while time.monotonic() < end and not reader.at_eof():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.5)
            writer.close()
        await asyncio.sleep(STEP)


async def attack(url: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, limits=limits) as http:
        parts: list[Any] = [large(http, end) for _ in range(LARGE)]
        parts += [forms(http, end, client) for client in range(GRAMMARS)]
        parts += [slow(url, end) for _ in range(SLOW)]
        await asyncio.gather(*parts)


# --- honest clients


class Waits:
    """Seconds that answers took, and their statuses."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.statuses: Counter[str] = Counter()

    async def ask(self, http: httpx.AsyncClient, path: str, body: Any = None) -> None:
        began = time.monotonic()
        try:
            answer = await (http.get(path) if body is None else http.post(path, json=body))
            self.statuses[str(answer.status_code)] += 1
        except httpx.HTTPError as error:
            self.statuses[type(error).__name__] += 1
        self.seconds.append(time.monotonic() - began)

    def document(self) -> dict[str, Any]:
        ordered = sorted(self.seconds)

        def share(part: float) -> float:
            return round(ordered[min(len(ordered) - 1, int(part * len(ordered)))], 4)

        times = {"p50": share(0.5), "p99": share(0.99), "worst": share(1.0)}
        return {"asked": len(ordered), "statuses": dict(self.statuses), "seconds": times}


async def honest(url: str, seconds: float) -> dict[str, Any]:
    """How long honest clients wait, and who asks after the server's health."""
    end = time.monotonic() + seconds
    health, answers = Waits(), Waits()

    async def watch(http: httpx.AsyncClient) -> None:
        while time.monotonic() < end:
            await health.ask(http, "/health")
            await asyncio.sleep(STEP)

    async def ask(http: httpx.AsyncClient, client: int) -> None:
        number = 0
        while time.monotonic() < end:
            prompt = f"Client {client} counts to {number}: one, two,"
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
            await answers.ask(http, "/v1/completions", body)
            await asyncio.sleep(STEP)
            number += 1

    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        await asyncio.gather(watch(http), *(ask(http, client) for client in range(HONEST)))
    return {"health": health.document(), "answers": answers.document()}


# --- all of it


def siege(arguments: argparse.Namespace) -> dict[str, Any]:
    options = ["--drain-seconds", str(DRAIN), *arguments.server.split()]
    with server(arguments.model, options) as (url, process, log):
        asyncio.run(honest(url, 3))  # what is measured or compiled once
        calm = asyncio.run(honest(url, arguments.calm))
        command = [sys.executable, __file__, "--attack", url]
        attackers = subprocess.Popen([*command, "--seconds", str(arguments.seconds + 30)])
        try:
            time.sleep(2)
            under = asyncio.run(honest(url, arguments.seconds))
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(120)
            ended = time.monotonic() - began
        finally:
            attackers.kill()
            attackers.wait()
        size = log.seek(0, 2)
    checks = {
        "health answers at once": under["health"]["seconds"]["p99"] < 0.1,
        "honest answers take at most twice as long": under["answers"]["seconds"]["p99"]
        <= 2 * calm["answers"]["seconds"]["p99"],
        "honest requests are answered": set(under["answers"]["statuses"]) == {"200"},
        "the server ends within its drain": ended <= DRAIN + LATE,
    }
    return {
        "schema": "foretell.siege/1",
        "arguments": vars(arguments),
        "alone": calm,
        "beside": under,
        "end_s": round(ended, 2),
        "log_bytes": size,
        "checks": checks,
        "passed": all(checks.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--calm", type=float, default=15.0, help="seconds before it")
    parser.add_argument("--server", default="", help="more options of foretell serve, as one text")
    parser.add_argument("--attack", metavar="URL", help="be the hostile clients of that server")
    arguments = parser.parse_args()
    if arguments.attack:
        asyncio.run(attack(arguments.attack, arguments.seconds))
        return 0
    document = siege(arguments)
    print(json.dumps(document, indent=1))
    return 0 if document["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
