"""The clients of scripts/soak.py: what they ask, how they read what comes, and what is wrong with
it by itself.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

PROMPTS = 40  # that all clients choose from, so that answers can be compared
LONGEST = 300  # words of a prompt, of which each may be several tokens
OVERSIZE = 9 * 2**20  # bytes: above what a server takes
LATE = 2.0  # seconds that an answer may come after its deadline: a step, and the way back
PATIENCE = 120.0  # seconds within which a request without a deadline of its own is answered
METHODS = ("auto", "auto", "plain", "ngram", "suffix", "token-recycling:nodes=12")
TEXTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\n",
    "The capital of France is Paris. The capital of Spain is Madrid. The capital of Italy is ",
    "Once upon a time a fox and a dog lived at the edge of a wood. The fox was quick, ",
    "1. Wash the apples.\n2. Peel the apples.\n3. Cut the apples.\n4. ",
    '{"name": "Ada", "born": 1815}\n{"name": "Alan", "born": 1912}\n{"name": "Grace", "born": ',
    "Größe, naïve café, 漢字かな and 🙂. ",
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
DATE = r"[12][0-9]{3}-[01][0-9]"
WRONG: tuple[Any, ...] = (
    b"{",
    b"[]",
    b'{"prompt": "\xff"}',
    {"prompt": "x", "max_tokens": -1},
    {"prompt": "x", "max_tokens": "3"},
    {"prompt": "x", "temperature": 9},
    {"prompt": "x", "no_such_field": 1},
    {"prompt": "x", "method": "no-such-method"},
    {"prompt": "x", "model": "no-such-model"},
    {"prompt": {"a": 1}},
    {"prompt": [-5]},
    {"prompt": "x", "structured_outputs": {"regex": "("}},
    {"messages": []},
    {},
)


@dataclass
class Ask:
    """A request, and what would be right answers."""

    kind: str
    path: str
    body: Any  # a document, or bytes
    right: tuple[int, ...] = (200,)
    leaves_after: float | None = None  # seconds
    deadline: float | None = None  # seconds


@dataclass
class Answer:
    """What came. Without a status the client left, or the server closed the connection."""

    status: int | None = None
    seconds: float = 0.0
    text: str = ""
    tokens: list[str] | None = None  # where they were asked for
    count: int | None = None
    finish_reason: str | None = None
    problem: str = ""  # of the connection, or of a stream


@dataclass
class Tally:
    """What all clients met."""

    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    latest: float = -PATIENCE  # seconds after its deadline of the answer that was the latest
    # Of each greedy request that was answered its answers, by its body without what changes none.
    greedy: dict[str, list[tuple[str, Answer]]] = field(default_factory=dict)


# --- what is asked


class Dice:
    """Draws requests. Clients with the same seed ask the same."""

    def __init__(self, seed: int, context: int):
        self.random = random.Random(seed)
        pool = random.Random(0)
        longest = min(LONGEST, max(8, context // 8))
        preamble = " ".join((TEXTS[2] * 9).split()[: longest // 2])
        self.prompts = []
        for number in range(PROMPTS):
            words = "".join(pool.choices(TEXTS, k=40)).split(" ")
            text = " ".join(words[: int(longest ** pool.uniform(0.2, 1.0))])
            self.prompts.append(f"{preamble} {text}" if number % 4 == 0 else text)
        self.context = context
        self.kinds: dict[Callable[[], Ask], int] = {
            self.greedy: 40,
            self.sampled: 15,
            self.formed: 10,
            self.hurried: 10,
            self.leaving: 15,
            self.wrong: 6,
            self.oversize: 1,
            self.too_long: 3,
        }

    def ask(self) -> Ask:
        kinds = list(self.kinds)
        kind = self.random.choices(kinds, list(self.kinds.values()))[0]
        return kind()

    def base(self, most: int = 64) -> tuple[str, dict[str, Any]]:
        """The path and the body of a request that is in order."""
        dice = self.random
        prompt = dice.choice(self.prompts)
        body: dict[str, Any] = {"max_tokens": dice.choice((1, 7, 24, most))}
        path = dice.choice(("completions", "chat/completions"))
        if path == "completions":
            body["prompt"] = prompt
        else:
            body["messages"] = [{"role": "user", "content": prompt}]
        if dice.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if dice.random() < 0.5:
            body["method"] = dice.choice(METHODS)
        elif dice.random() < 0.2:
            body["speculation"] = "off"
        if dice.random() < 0.3:
            body["priority"] = dice.randint(-2, 2)
        return path, body

    def greedy(self) -> Ask:
        path, body = self.base()
        dice = self.random
        body["temperature"] = 0
        if dice.random() < 0.2:
            body["stop"] = dice.choice((["\n\n"], [". ", "e"]))
        elif dice.random() < 0.2:
            body["frequency_penalty"] = 0.5
        elif dice.random() < 0.5:
            body["logprobs"] = True if path.startswith("chat") else 0
        return Ask("greedy", path, body)

    def sampled(self) -> Ask:
        path, body = self.base()
        dice = self.random
        body |= {"temperature": dice.choice((0.3, 1.0, 1.5)), "seed": dice.randint(0, 9)}
        options = {"top_p": 0.9, "top_k": 20, "min_p": 0.05, "presence_penalty": 0.5, "n": 2}
        for name in dice.sample(sorted(options), dice.randint(0, 3)):
            body[name] = options[name]
        return Ask("sampled", path, body)

    def formed(self) -> Ask:
        path, body = self.base()
        form = self.random.choice(({"json": SCHEMA}, {"regex": DATE}))
        body |= {"structured_outputs": form, "temperature": 0.8, "seed": 1, "max_tokens": 64}
        return Ask("formed", path, body)

    def hurried(self) -> Ask:
        path, body = self.base()
        seconds = self.random.choice((0.02, 0.1, 0.5, 2.0))
        body |= {"timeout": seconds, "max_tokens": self.context // 2, "ignore_eos": True}
        return Ask("hurried", path, body, right=(200, 408), deadline=seconds)

    def leaving(self) -> Ask:
        path, body = self.base(most=self.context // 2)
        seconds = self.random.uniform(0.0, 1.0) ** 2
        return Ask("leaving", path, body, leaves_after=seconds)

    def wrong(self) -> Ask:
        body = self.random.choice(WRONG)
        return Ask("wrong", "completions", body, right=(400, 404, 422))

    def oversize(self) -> Ask:
        return Ask("oversize", "completions", b" " * OVERSIZE, right=(413,))

    def too_long(self) -> Ask:
        body = {"prompt": [1] * (self.context + self.random.randint(0, 100))}
        return Ask("too long", "completions", body, right=(400,))


# --- asking


async def perform(http: httpx.AsyncClient, ask: Ask) -> Answer:
    """Sends a request and reads what comes, until it ends or the client leaves."""
    body = ask.body if isinstance(ask.body, bytes) else json.dumps(ask.body).encode()
    answer = Answer()
    began = time.perf_counter()
    try:
        async with asyncio.timeout(ask.leaves_after):
            headers = {"Content-Type": "application/json"}
            async with http.stream("POST", ask.path, content=body, headers=headers) as response:
                if response.headers.get("content-type", "").startswith("text/event-stream"):
                    await _read_stream(response, answer)
                else:
                    _read_whole(json.loads(await response.aread()), answer)
                answer.status = answer.status or response.status_code
                if answer.status == 429:
                    await asyncio.sleep(float(response.headers["retry-after"]))
    except TimeoutError:
        answer.status = None
    except httpx.HTTPError as error:
        answer.problem = f"{type(error).__name__}: {error}"
    except (ValueError, KeyError, TypeError, IndexError) as error:
        answer.problem = f"an answer that cannot be read ({type(error).__name__}: {error})"
    answer.seconds = time.perf_counter() - began
    return answer


def _read_whole(document: Any, answer: Answer) -> None:
    if "error" in document:
        answer.problem = document["error"]["message"]
        return
    choice = document["choices"][0]
    _read_choice(choice, choice.get("message", choice), answer)
    answer.count = document["usage"]["completion_tokens"]


async def _read_stream(response: httpx.Response, answer: Answer) -> None:
    """Events until the last one. An error in a stream gives the answer its status."""
    ended = False
    async for data in events(response):
        if data == "[DONE]":
            ended = True
            continue
        document = json.loads(data)
        if "error" in document:
            answer.status = 408 if document["error"]["code"] == "timeout" else 500
            answer.problem = document["error"]["message"]
            continue
        for choice in document["choices"]:
            if choice["index"] == 0:
                _read_choice(choice, choice.get("delta", choice), answer)
        if document.get("usage"):
            answer.count = document["usage"]["completion_tokens"]
    if not ended:
        answer.problem = answer.problem or "the stream broke off"


async def events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of server-sent events. httpx's lines would also end inside of a text, at characters
    that separate lines in other scripts.
    """
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ").decode()


def _read_choice(choice: dict[str, Any], said: dict[str, Any], answer: Answer) -> None:
    answer.text += said.get("content") or said.get("text") or ""
    answer.finish_reason = choice["finish_reason"] or answer.finish_reason
    told = choice.get("logprobs")
    if told:
        entries = told["tokens"] if "tokens" in told else [e["token"] for e in told["content"]]
        answer.tokens = (answer.tokens or []) + entries


async def clients(url: str, count: int, seconds: float, seed: int, context: int) -> Tally:
    """So many clients, each with one request after the other, for so long."""
    tally = Tally()
    end = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None)
    timeout = httpx.Timeout(PATIENCE + LATE)
    async with httpx.AsyncClient(
        base_url=f"{url}/v1/", timeout=timeout, limits=limits, trust_env=False
    ) as http:

        async def client(number: int) -> None:
            dice = Dice(1000 * seed + number, context)
            while time.monotonic() < end:
                ask = dice.ask()
                note(tally, ask, await perform(http, ask))

        await asyncio.gather(*map(client, range(count)))
    return tally


def note(tally: Tally, ask: Ask, answer: Answer) -> None:
    """Counts an answer, and keeps what is wrong with it or is to be compared."""
    tally.kinds[ask.kind] += 1
    tally.statuses[str(answer.status or "left")] += 1
    late = answer.seconds - (ask.deadline or PATIENCE)
    tally.latest = max(tally.latest, late)
    fault = found_fault(ask, answer, late)
    if fault:
        tally.faults.append(f"{ask.kind} {ask.path}: {fault}")
    elif ask.kind == "greedy" and answer.status == 200:
        changing = ("stream", "stream_options", "method", "speculation", "priority", "logprobs")
        key = {name: value for name, value in ask.body.items() if name not in changing}
        how = str(ask.body.get("method") or ask.body.get("speculation") or "auto")
        tally.greedy.setdefault(json.dumps(key, sort_keys=True), []).append((how, answer))


def found_fault(ask: Ask, answer: Answer, late: float) -> str:
    """What is wrong with an answer by itself; empty: nothing."""
    if late > LATE:
        return f"answered {late:.1f} s after its deadline"
    if answer.status is None:
        # A server may close the connection on a body that it does not want to read.
        closed = ask.kind == "oversize" or ask.leaves_after is not None
        return "" if closed else f"no answer: {answer.problem or 'the connection was closed'}"
    if answer.status >= 500:
        return f"status {answer.status}: {answer.problem}"
    if answer.status == 429:
        return ""
    if answer.status not in ask.right:
        return f"status {answer.status}, not {ask.right}: {answer.problem} {str(ask.body)[:200]}"
    if answer.status == 200 and answer.problem:
        return answer.problem
    if ask.kind == "formed" and answer.finish_reason == "stop":
        form = ask.body["structured_outputs"]
        if not keeps_form(answer.text, form):
            return f"{answer.text!r} is not of the form {form}"
    return ""


def keeps_form(text: str, form: dict[str, Any]) -> bool:
    if "regex" in form:
        return re.fullmatch(form["regex"], text) is not None
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and set(value) == {"name", "old"}
