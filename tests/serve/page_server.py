"""A server without a model, for tests of the page: it answers by the contract, from a script.

What a prompt says decides what happens: see `Handler.answer`. Everything is served with a policy
that lets a page load nothing from elsewhere and run no script of its own.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import foretell

PAGE = Path(foretell.__file__).parent / "serve" / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TARGET = "target"
# Each step: what was drafted, as (text, parent, source, accepted), below the last token; then
# the token that the model added itself.
Drafted = tuple[str, int, str, bool]
STEPS: list[tuple[list[Drafted], str]] = [
    ([], "The"),
    (
        [
            (" river", 0, "suffix", True),
            (" bends", 1, "suffix", True),
            (" city", 0, "token-recycling", False),
            (" runs", 1, "token-recycling", False),
            (" slowly", 3, "token-recycling", False),
        ],
        " east",
    ),
    ([(" past", 0, "approx", True), (" the", 1, "approx", True)], " mill"),
    ([(" and", 0, "token-recycling", False)], ","),
    (
        [
            (" where", 0, "suffix", True),
            (" the", 1, "suffix", True),
            (" water", 2, "token-recycling", True),
            (" weather", 2, "suffix", False),
            (" who", 0, "approx", False),
        ],
        " falls",
    ),
    ([(".", 0, "token-recycling", True)], "\n"),
]
TEXT = "".join("".join(d[0] for d in drafts if d[3]) + own for drafts, own in STEPS)


@dataclass
class Script:
    """What the server is to do, and what it saw."""

    keys: list[str] = field(default_factory=list)  # none: everybody may ask
    full: int = 0  # of the next requests so many are refused, as there are too many
    pause: float = 0.002  # seconds between chunks
    says: str = ""  # the answer to the prompt `said`, letter by letter in pairs
    asked: list[dict[str, Any]] = field(default_factory=list)  # bodies, in order
    paths: list[str] = field(default_factory=list)  # of everything that was asked for
    left: threading.Event = field(default_factory=threading.Event)  # a client went away


def plain(repeats: int) -> Iterator[dict[str, Any]]:
    """Of each chunk its field `foretell`: one token a step, nothing drafted."""
    for drafts, own in STEPS * repeats:
        for part in [*(d[0] for d in drafts if d[3]), own]:
            yield {"parts": [part], "sources": [TARGET], "tree": None}


def drafted(repeats: int) -> Iterator[dict[str, Any]]:
    """The same text in fewer steps."""
    last = "…"
    for drafts, own in STEPS * repeats:
        accepted = [i for i, d in enumerate(drafts, 1) if d[3]]
        parts = [drafts[i - 1][0] for i in accepted]
        yield {
            "parts": [*parts, own],
            "sources": [*(drafts[i - 1][2] for i in accepted), TARGET],
            "tree": {
                "tokens": [last, *(d[0] for d in drafts)],
                "parents": [-1, *(d[1] for d in drafts)],
                "sources": [TARGET, *(d[2] for d in drafts)],
                "accepted": accepted,
            },
        }
        last = own


def dictated(text: str) -> Iterator[dict[str, Any]]:
    """Of each two letters: a step that drafted one."""
    for i in range(0, len(text), 2):
        parts = list(text[i : i + 2])
        yield {"parts": parts, "sources": ["suffix", TARGET][-len(parts) :], "tree": None}


class Server(ThreadingHTTPServer):
    """Answers from a script, which may be changed at any time."""

    daemon_threads = True

    def __init__(self, script: Script):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = script
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(SimpleHTTPRequestHandler):
    """Files of the page, and the API."""

    protocol_version = "HTTP/1.1"
    server: Server

    def __init__(self, request: Any, client: Any, server: Server):
        super().__init__(request, client, server, directory=str(PAGE))

    def parse_request(self) -> bool:
        self.script = self.server.script  # of this request: a connection may serve several tests
        return super().parse_request()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", POLICY)
        super().end_headers()

    def do_GET(self) -> None:
        self.script.paths.append(self.path)
        if self.path == "/foretell/status":
            if self.allowed():
                self.send(200, self.status())
        else:
            super().do_GET()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.script.paths.append(self.path)
        self.script.asked.append(body)
        if self.allowed():
            self.answer(body)

    def allowed(self) -> bool:
        key = (self.headers["Authorization"] or "").removeprefix("Bearer ")
        if self.script.keys and key not in self.script.keys:
            self.refuse(401, "no such API key", None)
            return False
        return True

    def answer(self, body: dict[str, Any]) -> None:
        prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        if self.script.full:
            self.script.full -= 1
            self.refuse(429, "the server is full", None, {"Retry-After": "3"})
        elif prompt == "refused":
            self.refuse(400, "top_k: input should be at most 10", "top_k")
        elif prompt == "bad regex":
            self.refuse(400, "regex: a bracket is not closed", "regex")
        elif prompt == "fails":
            self.refuse(500, "internal error 1f2e", None)
        else:
            try:
                self.stream(body, prompt)
            except (BrokenPipeError, ConnectionResetError):
                self.script.left.set()
                self.close_connection = True

    def stream(self, body: dict[str, Any], prompt: str) -> None:
        """`slow`: goes on until the client leaves; `break`: ends without a word; `late error`: an
        error in the middle. Otherwise the script's text, `long` 12 times.
        """
        chat = self.path.endswith("chat/completions")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()
        accelerated = body.get("method") != "plain"
        make = drafted if accelerated else plain
        repeats = {"slow": 500, "long": 12}.get(prompt, 1)
        if chat:
            self.event(self.chunk(chat, {"role": "assistant", "content": ""}, None))
        steps = list(make(repeats))
        if prompt == "said":
            steps = list(dictated(self.script.says))
        for i, extra in enumerate(steps):
            if i == 3 and prompt == "break":
                return
            if i == 3 and prompt == "late error":
                self.event({"error": {"message": "the model failed", "param": None}})
                return
            text = "".join(extra["parts"])
            end = "stop" if i == len(steps) - 1 else None
            chunk = self.chunk(chat, {"content": text} if chat else text, end)
            chunk["foretell"] = dict(extra)
            if end:
                chunk["foretell"] |= self.summary(steps, accelerated)
            self.event(chunk)
            time.sleep(0.01 if prompt == "slow" else self.script.pause)
        tokens = sum(len(extra["parts"]) for extra in steps)
        self.event({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": tokens}})
        self.write(b"data: [DONE]\n\n")

    def chunk(self, chat: bool, said: Any, end: str | None) -> dict[str, Any]:
        choice = {"index": 0, "finish_reason": end, "delta" if chat else "text": said}
        return {"id": "x", "model": "scripted", "choices": [choice], "usage": None}

    def summary(self, steps: list[dict[str, Any]], accelerated: bool) -> dict[str, Any]:
        trees = [extra["tree"] for extra in steps if extra["tree"]]
        tokens = sum(len(extra["parts"]) for extra in steps)
        return {
            "method": "suffix+token-recycling" if accelerated else "plain",
            "guarantee": "exact",
            "steps": len(steps),
            "drafted": sum(len(tree["tokens"]) - 1 for tree in trees),
            "accepted": sum(len(tree["accepted"]) for tree in trees),
            "tokens_per_step": round(tokens / len(steps), 3),
            "computed_by": "script",
        }

    def status(self) -> dict[str, Any]:
        return {
            "model": "scripted",
            "method": "suffix",
            "methods": [
                {"name": "plain", "guarantee": "exact", "summary": "no drafts"},
                {"name": "suffix", "guarantee": "exact", "summary": "copies what came before"},
            ],
            "running": 1,
            "waiting": 2,
            "preempted": 0,
            "cache_bytes": 256_000_000,
            "cache_limit": 1_000_000_000,
            "prefix_tokens_asked": 400,
            "prefix_tokens_reused": 100,
            "steps": 40,
            "prompt_tokens": 80,
            "generation_tokens": 100,
            "drafted": 80,
            "accepted": 40,
            "accepted_per_position": [24, 12, 4],
            "drafts": 30,
        }

    def event(self, chunk: dict[str, Any]) -> None:
        data = f"data: {json.dumps(chunk, ensure_ascii=False)}\r\n\r\n".encode()
        middle = data.find("…".encode()) + 1 or len(data) // 2  # inside a letter where there is one
        self.write(data[:middle])
        self.write(data[middle:])

    def write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def refuse(
        self, code: int, message: str, param: str | None, headers: dict[str, str] | None = None
    ) -> None:
        self.send(code, {"error": {"message": message, "param": param}}, headers)

    def send(self, code: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(script: Script) -> Iterator[Server]:
    """A server on loopback; it ends with the block."""
    server = Server(script)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
