"""A language server: a process that knows a folder of code, asked which names complete a text.

It speaks the Language Server Protocol over its standard input and output. Of the protocol five
messages are needed, so they are written here rather than by a library: who has no server installed
then needs none of its packages, and a limit of time holds for every part of an answer.

A server that dies, that writes what is no message, or that is late several times in a row, is ended
and started again; after so many restarts it is given up, and everything is answered by nothing.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import threading
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from foretell.errors import ForetellWarning

STARTING = 30.0  # seconds that a server may take until it is ready
LATE = 3  # answers in a row that may be late; then it is as good as dead
LONGEST = 64 * 2**20  # bytes of a message
DROPPED = {1, 14, 15}  # kinds of completions that are no names: text, keyword, snippet
LINE_END = re.compile("\r\n|\n|\r")


class Dead(Exception):
    """The server is gone, or of no use."""


class Late(Exception):
    """It did not answer in time."""


class Refused(Exception):
    """It answered that it cannot."""


class Connection:
    """One life of a server. Threads may share it, but for `ask`."""

    def __init__(self, command: Sequence[str], root: Path):
        try:
            self.process = subprocess.Popen(
                command,
                cwd=root,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt is for us, not for it
            )
        except OSError as error:
            raise Dead(error.strerror or "it cannot be started") from error
        assert self.process.stdin and self.process.stdout
        self.inbox = Inbox(self.process.stdout, self.process.stdin)
        self.close = weakref.finalize(self, _end, self.process)
        self.number = 0
        self.versions: dict[str, int] = {}  # of open documents

    def ask(self, method: str, params: Any, limit: float) -> Any:
        """The result. Raises Late, Refused or Dead."""
        self.number += 1
        until = time.monotonic() + limit
        message = {"jsonrpc": "2.0", "id": self.number, "method": method, "params": params}
        self.inbox.want(self.number)
        self.inbox.send(message, until)
        try:
            answer = self.inbox.wait(until)
        except Late:
            self.tell("$/cancelRequest", {"id": self.number}, limit)
            raise
        if "error" in answer:
            raise Refused(str(answer["error"]))
        return answer.get("result")

    def tell(self, method: str, params: Any, limit: float) -> None:
        """Sends what is not answered. Raises Dead."""
        message = {"jsonrpc": "2.0", "method": method, "params": params}
        self.inbox.send(message, time.monotonic() + limit)

    def start(self, root: Path) -> None:
        """Makes it ready. Raises Dead."""
        uri = root.resolve().as_uri()
        about = {
            "processId": os.getpid(),
            "rootUri": uri,
            "workspaceFolders": [{"uri": uri, "name": root.name}],
            "capabilities": {
                "textDocument": {"completion": {"completionItem": {"snippetSupport": False}}},
                "workspace": {"configuration": True, "workspaceFolders": True},
            },
            # jedi-language-server's; others leave them aside.
            "initializationOptions": {
                "completion": {"disableSnippets": True, "resolveEagerly": False},
                "diagnostics": {"enable": False},
            },
        }
        try:
            self.ask("initialize", about, STARTING)
        except (Late, Refused) as error:
            raise Dead("it did not begin") from error
        self.tell("initialized", {}, STARTING)
        # The first question makes it read what all others need, which may take longer than one may.
        first = f"{uri}/warming_up.py"
        self.show(first, '"".', STARTING)
        with suppress(Late, Refused):
            place = {"textDocument": {"uri": first}, "position": {"line": 0, "character": 3}}
            self.ask("textDocument/completion", place, STARTING)
        self.forget(first, STARTING)

    def show(self, uri: str, text: str, limit: float) -> None:
        """Makes `text` the content of a document."""
        version = self.versions.get(uri, 0) + 1
        document: dict[str, Any] = {"uri": uri, "version": version}
        if version == 1:
            document |= {"languageId": "python", "text": text}
            self.tell("textDocument/didOpen", {"textDocument": document}, limit)
        else:
            changes = [{"text": text}]
            params = {"textDocument": document, "contentChanges": changes}
            self.tell("textDocument/didChange", params, limit)
        self.versions[uri] = version

    def forget(self, uri: str, limit: float) -> None:
        if self.versions.pop(uri, None) is not None:
            self.tell("textDocument/didClose", {"textDocument": {"uri": uri}}, limit)


class Inbox:
    """The two pipes of a server: what comes is read by a thread, which ends with the server."""

    def __init__(self, reader: IO[bytes], writer: IO[bytes]):
        self.reader, self.writer = reader, writer
        self.wanted = 0  # number of the question whose answer is waited for
        self.answer: dict[str, Any] | None = None
        self.ended = ""  # why nothing more will come
        self.news = threading.Condition()
        self.writing = threading.Lock()
        os.set_blocking(writer.fileno(), False)
        threading.Thread(target=self._read, name="foretell-lsp", daemon=True).start()

    def send(self, message: dict[str, Any], until: float) -> None:
        """Raises Dead where the server does not take it."""
        body = json.dumps(message).encode()
        data = memoryview(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        with self.writing:
            while data:
                try:
                    data = data[os.write(self.writer.fileno(), data) :]
                except BlockingIOError:
                    left = until - time.monotonic()
                    if left <= 0 or not select.select([], [self.writer], [], left)[1]:
                        raise Dead("it reads nothing any more") from None
                except (OSError, ValueError) as error:
                    raise Dead("it has ended") from error

    def want(self, number: int) -> None:
        """From here on the answer to this question counts, and no other."""
        with self.news:
            self.wanted, self.answer = number, None

    def wait(self, until: float) -> dict[str, Any]:
        """The answer to that question. Raises Late or Dead."""
        with self.news:
            while self.answer is None:
                if self.ended:
                    raise Dead(self.ended)
                left = until - time.monotonic()
                if left <= 0:
                    self.wanted = 0
                    raise Late
                self.news.wait(left)
            return self.answer

    def _read(self) -> None:
        reason = "it has ended"
        try:
            while (message := self._next()) is not None:
                self._take(message)
        except (ValueError, TypeError, AttributeError, RecursionError):
            reason = "what it writes is no message"
        except (OSError, Dead):
            pass
        self.reader.close()
        with self.news:
            self.ended = reason
            self.news.notify_all()

    def _next(self) -> dict[str, Any] | None:
        """The next message; None: there is none. Raises ValueError for what is none."""
        size = -1
        while line := self.reader.readline(4096):
            if not line.strip():
                break
            name, colon, value = line.partition(b":")
            if not colon:
                raise ValueError(line)
            if name.strip().lower() == b"content-length":
                size = int(value)
        else:
            return None
        if not 0 <= size <= LONGEST:
            raise ValueError(size)
        body = self.reader.read(size)
        if len(body) < size:
            return None
        message = json.loads(body)
        if not isinstance(message, dict):
            raise ValueError(message)
        return message

    def _take(self, message: dict[str, Any]) -> None:
        if "method" not in message:
            with self.news:
                if self.wanted and message.get("id") == self.wanted:
                    self.answer = message
                    self.news.notify_all()
            return
        if "id" in message:  # a question to us
            result = None
            if message["method"] == "workspace/configuration":
                result = [None] * len(message["params"]["items"])
            reply = {"jsonrpc": "2.0", "id": message["id"], "result": result}
            self.send(reply, time.monotonic() + STARTING)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a server and the processes that it has started."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(OSError):
        assert process.stdin
        process.stdin.close()
    process.wait()


class LanguageServer:
    """A server with its restarts. Threads may share it; their questions take turns.

    `limit`: seconds of an answer; `counts`: what became of all questions.
    """

    def __init__(self, command: Sequence[str], root: Path, limit: float, restarts: int):
        self.command = list(command)
        self.root = root
        self.limit = limit
        self.restarts = restarts  # that are left
        self.given_up = ""  # why, once it is
        self.counts: Counter[str] = Counter()
        self.connection: Connection | None = None
        self.late = 0  # answers in a row
        self.turn = threading.Lock()
        self.unused: deque[str] = deque()  # documents that may be closed

    def names(self, uri: str, text: str, behind: str = "") -> tuple[set[str], str]:
        """Names that complete `text` at its end, which `behind` follows in the document; and what
        became of the question: answered, empty, late, failed or unasked.

        Without an answer there are none. Warns when the server is given up.
        """
        with self.turn:
            found, what = self._names(uri, text, behind)
            self.counts[what] += 1
        return found, what

    def _names(self, uri: str, text: str, behind: str) -> tuple[set[str], str]:
        while not self.given_up:
            try:
                connection = self.connection or self._connect()
                while self.unused:
                    connection.forget(self.unused.popleft(), self.limit)
                connection.show(uri, text + behind, self.limit)
                lines = LINE_END.split(text)
                units = len(lines[-1].encode("utf-16-le", "surrogatepass")) // 2
                params = {
                    "textDocument": {"uri": uri},
                    "position": {"line": len(lines) - 1, "character": units},
                    "context": {"triggerKind": 1},
                }
                result = connection.ask("textDocument/completion", params, self.limit)
                found = _identifiers(result)
            except Late:
                self.late += 1
                if self.late >= LATE:
                    self._bury(f"{LATE} answers in a row were late")
                return set(), "late"
            except Refused:
                self.late = 0
                return set(), "failed"
            except Dead as error:
                self._bury(str(error))
            else:
                self.late = 0
                return found, "answered" if found else "empty"
        return set(), "unasked"

    def _connect(self) -> Connection:
        connection = Connection(self.command, self.root)
        self.connection = connection
        connection.start(self.root)
        return connection

    def _bury(self, reason: str) -> None:
        """Ends what is left of it; the next question starts it again, if it may."""
        self.late = 0
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if self.restarts:
            self.restarts -= 1
            self.counts["restarts"] += 1
            return
        self.given_up = reason
        warnings.warn(
            f"the language server {self.command[0]!r} was given up ({reason}): "
            "names are free from here on",
            ForetellWarning,
            stacklevel=2,
        )

    def close(self) -> None:
        """Ends the process; a later question would start it again."""
        with self.turn:
            if self.connection is not None:
                self.connection.close()
                self.connection = None


def _identifiers(result: Any) -> set[str]:
    """The names among completions. Raises Dead for what are none."""
    try:
        items = result.get("items", []) if isinstance(result, dict) else result or []
        named = [item for item in items if item.get("kind") not in DROPPED]
        texts = [str(item.get("insertText") or item["label"]) for item in named]
    except (AttributeError, KeyError, TypeError) as error:
        raise Dead("its completions are none") from error
    return {text for text in texts if text.isidentifier()}
