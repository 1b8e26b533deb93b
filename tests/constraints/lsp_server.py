"""A language server for tests, run as a process: `python lsp_server.py [LOG]`.

The names after a text are drawn from the text. What else it does, words in the text say: `late`
(the answer comes after the next question), `die`, `garbage`, `list`, `huge`, `odd` (completions
that are none), `refuse`. It dies of a client that breaks the protocol.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from zlib import crc32

POOL = ("a", "ab", "abc", "b", "ba", "bca", "c", "cab", "a_1", "é", "ab2", "cc")


def drawn(text: str) -> list[str]:
    """The names after a text; one text in four has none."""
    number = crc32(text.encode("utf-8", "replace"))
    if number % 4 == 0:
        return []
    return [name for place, name in enumerate(POOL) if number >> (place + 4) & 1]


def before(text: str, position: dict[str, int]) -> str:
    """The text up to a position, whose characters are UTF-16's."""
    lines = text.split("\n")
    last = lines[position["line"]].encode("utf-16-le")[: 2 * position["character"]]
    return "\n".join([*lines[: position["line"]], last.decode("utf-16-le")])


class Server:
    def __init__(self, log: str | None):
        self.log = log
        self.texts: dict[str, str] = {}
        self.versions: dict[str, int] = {}
        self.held: list[dict[str, Any]] = []  # answers that are late
        self.asked = False  # a question to the client, which is answered before anything else is
        self.waiting: list[dict[str, Any]] = []

    def write(self, message: dict[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        sys.stdout.buffer.write(b"Content-Length: %d\r\nX: y\r\n\r\n%s" % (len(body), body))
        sys.stdout.buffer.flush()

    def raw(self, data: bytes) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def note(self, *what: Any) -> None:
        if self.log:
            with open(self.log, "a", encoding="utf-8") as file:
                file.write(json.dumps(what) + "\n")

    def run(self) -> None:
        while True:
            size = 0
            while (line := sys.stdin.buffer.readline()).strip():
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    size = int(value)
            if not line:
                return
            self.waiting.append(json.loads(sys.stdin.buffer.read(size)))
            answers = [message for message in self.waiting if "method" not in message]
            if answers:
                assert answers[0]["result"] == [None]
                self.asked = False
                self.waiting.remove(answers[0])
            while self.waiting and not self.asked:
                self.take(self.waiting.pop(0))

    def take(self, message: dict[str, Any]) -> None:
        method, params = message["method"], message.get("params")
        if method == "initialize":
            self.write({"id": message["id"], "result": {"capabilities": {}}})
        elif method == "initialized":
            wanted = {"items": [{"section": "x"}]}
            self.asked = True
            self.write({"id": "ours", "method": "workspace/configuration", "params": wanted})
        elif method == "textDocument/completion":
            self.complete(message["id"], params)
        elif params is not None and "textDocument" in params:
            document = params["textDocument"]
            uri, version = document["uri"], document.get("version")
            self.note(method, uri.rpartition("/")[2], version)
            if method.endswith("didOpen"):
                assert uri not in self.texts
                self.texts[uri] = document["text"]
            elif method.endswith("didChange"):
                assert uri in self.texts and version > self.versions[uri]
                self.texts[uri] = params["contentChanges"][0]["text"]
            else:
                del self.texts[uri]
            self.versions[uri] = version

    def complete(self, number: int, params: dict[str, Any]) -> None:
        text = before(self.texts[params["textDocument"]["uri"]], params["position"])
        for word, data in {
            "garbage": b"hello, world\n",
            "list": b"Content-Length: 2\r\n\r\n[]",
            "huge": b"Content-Length: 99999999999\r\n\r\n",
        }.items():
            if word in text:
                self.raw(data)
        if "die" in text:
            sys.exit(3)
        items: list[Any] = [{"label": name, "kind": 6} for name in drawn(text)]
        items += [{"label": "if", "kind": 14}, {"label": "no name", "kind": 6}]
        answer: dict[str, Any] = {"id": number, "result": {"isIncomplete": False, "items": items}}
        if "odd" in text:
            answer["result"] = [1, 2]
        if "refuse" in text:
            answer = {"id": number, "error": {"code": -32603, "message": "no"}}
        if "late" in text:
            self.held.append(answer)
            return
        while self.held:
            self.write(self.held.pop())
        self.write(answer)


if __name__ == "__main__":
    Server(sys.argv[1] if len(sys.argv) > 1 else None).run()
