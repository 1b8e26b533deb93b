"""The load test of a server: throughput, first tokens and time between tokens, by clients.

    foretell serve --model smollm2 --dtype int8 --port 8000
    python scripts/load.py http://127.0.0.1:8000 --clients 1,4,16 --json runs/load.json

Every client sends one streamed chat at a time and the next when it has its answer. All servers that
speak OpenAI's protocol can be measured; several URLs are measured in turn, level by level, so that
none has the machine's better minutes; so are requests with other fields, `--beside FIELDS`.
`--prefix N` puts the same N words before every question; `--long N` keeps one more client sending
prompts of N words meanwhile, whose answers do not count. `--keys FILE` uses another API key at
every level: a server that learns from what it wrote knows nothing of questions that come again.
The time between tokens is that between two pieces of a stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle, product
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from foretell.bench.prompts import Prompt, read_prompts
from foretell.errors import BadConfig
from foretell.ops.files import write_text

PROMPTS = Path(__file__).parents[1] / "foretell" / "assets" / "prompts"
WORDS = 120  # of a question at most: the sets have texts of very different lengths
SCHEMA = "foretell.load/1"


@dataclass
class Answer:
    """What came of one request; seconds from when it was sent."""

    first: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between two pieces of its stream
    seconds: float = 0.0
    tokens: int = 0
    text: str = ""
    error: str = ""


@dataclass
class Level:
    """All answers of one server under so many clients."""

    url: str
    fields: dict[str, Any]  # of its requests, beyond the usual ones
    clients: int
    seconds: float
    answers: list[Answer]

    def figures(self) -> dict[str, Any]:
        """Milliseconds; percentiles over all requests or all gaps."""
        good = [answer for answer in self.answers if not answer.error]
        gaps = [1e3 * gap for answer in good for gap in answer.gaps]
        firsts = [1e3 * answer.first for answer in good]
        tokens = sum(answer.tokens for answer in good)
        return {
            "url": self.url,
            "fields": self.fields,
            "clients": self.clients,
            "requests": len(good),
            "failed": len(self.answers) - len(good),
            "tokens": tokens,
            "seconds": self.seconds,
            "tokens_per_s": tokens / self.seconds,
            "first_token_ms": {"median": percentile(firsts, 50), "p99": percentile(firsts, 99)},
            "between_tokens_ms": {"median": percentile(gaps, 50), "p99": percentile(gaps, 99)},
        }


def percentile(values: Sequence[float], percent: int) -> float:
    if not values:
        return 0.0
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def questions(files: Sequence[Path], prefix: int, kind: str = "") -> Iterator[str]:
    """Questions for ever, each one different from all before."""
    texts = []
    for rows in zip(*(_shuffled(file) for file in files), strict=False):
        texts += [" ".join(text.split()[:WORDS]) for text in rows]
    beginning = " ".join(f"Rule {i} is as good as rule {i + 1}." for i in range(prefix // 8 + 1))
    for number, text in zip(count(), cycle(texts), strict=False):
        yield f"{beginning if prefix else ''} ({kind}{number}) {text}"


def _shuffled(file: Path) -> list[str]:
    return [_as_text(prompt) for prompt in read_prompts(file)]


def _as_text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return " ".join(str(message["content"]) for message in prompt)


async def ask(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Answer:
    answer = Answer()
    began = last = time.perf_counter()
    try:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                answer.error = f"{response.status_code}: {response.text[:200]}"
                return answer
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                last = _take(answer, json.loads(line[6:]), began, last)
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.seconds = time.perf_counter() - began
    if not answer.error and not answer.tokens:
        answer.error = "no usage at the end of the stream"
    return answer


def _take(answer: Answer, chunk: dict[str, Any], began: float, last: float) -> float:
    """Takes note of a chunk; returns when the last piece of text came."""
    now = time.perf_counter()
    if "error" in chunk:
        answer.error = str(chunk["error"])
    usage = chunk.get("usage")
    if usage:
        answer.tokens = int(usage["completion_tokens"])
    choices = chunk.get("choices")
    piece = choices[0].get("delta", {}).get("content") if choices else None
    if not piece:
        return last
    answer.text += piece
    if answer.first:
        answer.gaps.append(now - last)
    else:
        answer.first = now - began
    return now


def body_of(text: str, url: str, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": args.models[url],
        "messages": [{"role": "user", "content": text}],
        "max_tokens": args.tokens,
        "temperature": args.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        **args.body,
    }


async def level(url: str, clients: int, args: argparse.Namespace, kind: str) -> Level:
    """`args.requests` requests for each client, with the fields `args.body`."""
    texts = questions(args.files, args.prefix, kind)
    answers: list[Answer] = []
    # One connection a request: servers end idle ones at will, and that would be an error here.
    limits = httpx.Limits(max_connections=clients + 2, max_keepalive_connections=0)
    key = next(args.keys)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(timeout=args.timeout, limits=limits, headers=headers) as client:

        async def one() -> None:
            for _ in range(args.requests):
                answers.append(await ask(client, url, body_of(next(texts), url, args)))

        async def beside() -> None:
            for number in count():
                words = " ".join(f"{(number * 7 + i * 3) % 911}" for i in range(args.long))
                await ask(client, url, body_of(words, url, args) | {"max_tokens": 1})

        others = asyncio.create_task(beside()) if args.long else None
        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(clients)))
        seconds = time.perf_counter() - began
        if others is not None:
            others.cancel()
            await asyncio.gather(others, return_exceptions=True)
    return Level(url, args.body, clients, seconds, answers)


async def measure(args: argparse.Namespace, console: Console) -> list[Level]:
    levels = []
    for url in args.urls:  # what a server does once only should not count
        once = argparse.Namespace(**vars(args) | {"requests": 1, "body": args.bodies[0]})
        await level(url, min(2, max(args.clients)), once, "w")
    for turn, clients, url, body in product(
        range(args.rounds), args.clients, args.urls, args.bodies
    ):
        args.body = body
        found = await level(url, clients, args, f"{turn}.{clients}.")
        levels.append(found)
        speed = found.figures()["tokens_per_s"]
        console.print(f"{title(found)}, {clients} clients: {speed:.0f} tokens/s", highlight=False)
        for answer in found.answers:
            if answer.error:
                console.print(f"  failed: {answer.error}", highlight=False, markup=False)
                break
    return levels


def title(level: Level) -> str:
    """The server, and the fields by which its requests differ from others."""
    return f"{level.url} {json.dumps(level.fields)}" if level.fields else level.url


def table(levels: Sequence[Level]) -> Table:
    shown = Table(
        "server",
        "clients",
        "tokens/s",
        "first token, ms",
        "p99",
        "between tokens, ms",
        "p99",
        "failed",
    )
    for found in levels:
        f = found.figures()
        first, between = f["first_token_ms"], f["between_tokens_ms"]
        cells = [
            f["tokens_per_s"],
            first["median"],
            first["p99"],
            between["median"],
            between["p99"],
        ]
        shown.add_row(
            title(found), str(found.clients), *(f"{cell:.1f}" for cell in cells), str(f["failed"])
        )
    return shown


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("urls", nargs="+", help="of the servers, such as http://127.0.0.1:8000")
    add("--clients", default="1,4,16", help="how many at once, with commas")
    add("--requests", type=int, default=4, help="of each client")
    add("--tokens", type=int, default=64, help="of each answer at most")
    add("--rounds", type=int, default=1)
    add("--temperature", type=float, default=0.0)
    add("--prefix", type=int, default=0, help="words that all questions begin with")
    add("--long", type=int, default=0, help="words of the prompts that one more client sends")
    add("--model", default="smollm2", help="as the servers name it; or a name for each, commas")
    add("--key", default="", help="the servers' API key")
    add("--keys", type=Path, help="a file with an API key a line, of which every level has another")
    add("--body", default="{}", help="more fields of every request, as JSON")
    add("--beside", action="append", default=[], help="other such fields, measured in turn")
    add("--timeout", type=float, default=600.0, help="seconds of a request")
    add("--prompts", type=Path, default=PROMPTS, help="a folder of prompt files")
    add("--json", type=Path, help="where the figures go")
    args = parser.parse_args(given)
    args.clients = [int(number) for number in args.clients.split(",")]
    try:
        args.bodies = [dict(json.loads(text)) for text in (args.body, *args.beside)]
    except (TypeError, ValueError) as error:
        raise BadConfig(f"--body and --beside must be JSON objects: {error}") from None
    try:
        keys = args.keys.read_text("utf-8").split() if args.keys else [args.key]
    except (OSError, ValueError) as error:
        raise BadConfig(f"--keys: cannot be read: {error}") from None
    levels = len(args.urls) * (1 + args.rounds * len(args.clients) * len(args.bodies))
    if args.keys and len(keys) < levels:
        raise BadConfig(f"{args.keys}: has {len(keys)} keys for {levels} levels; write more")
    args.keys = cycle(keys)
    names = args.model.split(",")
    if len(names) not in (1, len(args.urls)):
        raise BadConfig(f"--model has {len(names)} names for {len(args.urls)} servers")
    args.models = dict(zip(args.urls, cycle(names), strict=False))
    args.files = sorted(args.prompts.glob("*.jsonl"))
    if not args.files:
        raise BadConfig(f"{args.prompts}: has no prompt files (*.jsonl); give another folder")
    return args


def main(given: Sequence[str] | None = None) -> int:
    console = Console(stderr=True)
    try:
        args = parsed(given)
        levels = asyncio.run(measure(args, console))
    except BadConfig as error:
        console.print(f"error: {error}", highlight=False, markup=False)
        return 2
    console.print(table(levels))
    if args.json:
        figures = [found.figures() for found in levels]
        write_text(args.json, json.dumps({"schema": SCHEMA, "levels": figures}, indent=1))
    return 1 if any(answer.error for found in levels for answer in found.answers) else 0


if __name__ == "__main__":
    raise SystemExit(main())
