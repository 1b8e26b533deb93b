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
    """The server did not answer in time."""


class Refused(Exception):
    """The server answered that it cannot."""


class Connection:
    """A connection to one life of a server. Threads may share it, but for `ask`."""

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
        self.close = weakref.finalize(self, _end_process, self.process)
        self.request_number = 0
        self.versions: dict[str, int] = {}  # of open documents

    def ask(self, method: str, params: Any, limit: float) -> Any:
        """Returns the result of a request. Raises Late, Refused or Dead."""
        self.request_number += 1
        deadline = time.monotonic() + limit
        request = {"jsonrpc": "2.0", "id": self.request_number, "method": method, "params": params}
        self.inbox.expect_answer(self.request_number)
        self.inbox.send_message(request, deadline)
        try:
            answer = self.inbox.wait_answer(deadline)
        except Late:
            self.tell("$/cancelRequest", {"id": self.request_number}, limit)
            raise
        if "error" in answer:
            raise Refused(str(answer["error"]))
        return answer.get("result")

    def tell(self, method: str, params: Any, limit: float) -> None:
        """Sends a notification, which is not answered. Raises Dead."""
        notification = {"jsonrpc": "2.0", "method": method, "params": params}
        self.inbox.send_message(notification, time.monotonic() + limit)

    def initialize_server(self, root: Path) -> None:
        """Makes the server ready. Raises Dead."""
        root_uri = root.resolve().as_uri()
        client_info = {
            "processId": os.getpid(),
            "rootUri": root_uri,
            "workspaceFolders": [{"uri": root_uri, "name": root.name}],
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
            self.ask("initialize", client_info, STARTING)
        except (Late, Refused) as error:
            raise Dead("it did not begin") from error
        self.tell("initialized", {}, STARTING)
        # The first question makes it read what all others need, which may take longer than one may.
        warmup_uri = f"{root_uri}/warming_up.py"
        self.show_document(warmup_uri, '"".', STARTING)
        with suppress(Late, Refused):
            warmup_position = {
                "textDocument": {"uri": warmup_uri},
                "position": {"line": 0, "character": 3},
            }
            self.ask("textDocument/completion", warmup_position, STARTING)
        self.close_document(warmup_uri, STARTING)

    def show_document(self, uri: str, text: str, limit: float) -> None:
        """Makes `text` the content of a document."""
        version = self.versions.get(uri, 0) + 1
        document: dict[str, Any] = {"uri": uri, "version": version}
        if version == 1:
            document |= {"languageId": "python", "text": text}
            self.tell("textDocument/didOpen", {"textDocument": document}, limit)
        else:
            content_changes = [{"text": text}]
            params = {"textDocument": document, "contentChanges": content_changes}
            self.tell("textDocument/didChange", params, limit)
        self.versions[uri] = version

    def close_document(self, uri: str, limit: float) -> None:
        if self.versions.pop(uri, None) is not None:
            self.tell("textDocument/didClose", {"textDocument": {"uri": uri}}, limit)


class Inbox:
    """The two pipes of a server: a thread reads what the server writes, and ends with it."""

    def __init__(self, reader: IO[bytes], writer: IO[bytes]):
        self.reader, self.writer = reader, writer
        self.awaited_number = 0  # number of the question whose answer is waited for
        self.answer: dict[str, Any] | None = None
        self.end_reason = ""  # why nothing more will come
        self.news = threading.Condition()
        self.writing = threading.Lock()
        os.set_blocking(writer.fileno(), False)
        threading.Thread(target=self._read_messages, name="foretell-lsp", daemon=True).start()

    def send_message(self, message: dict[str, Any], deadline: float) -> None:
        """Sends a message. Raises Dead where the server does not take it."""
        message_body = json.dumps(message).encode()
        remaining_bytes = memoryview(
            b"Content-Length: %d\r\n\r\n" % len(message_body) + message_body
        )
        with self.writing:
            while remaining_bytes:
                try:
                    remaining_bytes = remaining_bytes[
                        os.write(self.writer.fileno(), remaining_bytes) :
                    ]
                except BlockingIOError:
                    remaining_seconds = deadline - time.monotonic()
                    if (
                        remaining_seconds <= 0
                        or not select.select([], [self.writer], [], remaining_seconds)[1]
                    ):
                        raise Dead("it reads nothing any more") from None
                except (OSError, ValueError) as error:
                    raise Dead("it has ended") from error

    def expect_answer(self, number: int) -> None:
        """Lets the answer to this question count from here on, and no other."""
        with self.news:
            self.awaited_number, self.answer = number, None

    def wait_answer(self, deadline: float) -> dict[str, Any]:
        """Waits for the answer to the expected question. Raises Late or Dead."""
        with self.news:
            while self.answer is None:
                if self.end_reason:
                    raise Dead(self.end_reason)
                remaining_seconds = deadline - time.monotonic()
                if remaining_seconds <= 0:
                    self.awaited_number = 0
                    raise Late
                self.news.wait(remaining_seconds)
            return self.answer

    def _read_messages(self) -> None:
        end_reason = "it has ended"
        try:
            while (message := self._next_message()) is not None:
                self._handle_message(message)
        except (ValueError, TypeError, AttributeError, RecursionError):
            end_reason = "what it writes is no message"
        except (OSError, Dead):
            pass
        self.reader.close()
        with self.news:
            self.end_reason = end_reason
            self.news.notify_all()

    def _next_message(self) -> dict[str, Any] | None:
        """The next message; None: there is none. Raises ValueError for other bytes."""
        body_size = -1
        while header_line := self.reader.readline(4096):
            if not header_line.strip():
                break
            header_name, colon, header_value = header_line.partition(b":")
            if not colon:
                raise ValueError(header_line)
            if header_name.strip().lower() == b"content-length":
                body_size = int(header_value)
        else:
            return None
        if not 0 <= body_size <= LONGEST:
            raise ValueError(body_size)
        message_body = self.reader.read(body_size)
        if len(message_body) < body_size:
            return None
        message = json.loads(message_body)
        if not isinstance(message, dict):
            raise ValueError(message)
        return message

    def _handle_message(self, message: dict[str, Any]) -> None:
        if "method" not in message:
            with self.news:
                if self.awaited_number and message.get("id") == self.awaited_number:
                    self.answer = message
                    self.news.notify_all()
            return
        if "id" in message:  # a question to us
            answer_result = None
            if message["method"] == "workspace/configuration":
                answer_result = [None] * len(message["params"]["items"])
            reply = {"jsonrpc": "2.0", "id": message["id"], "result": answer_result}
            self.send_message(reply, time.monotonic() + STARTING)


def _end_process(process: subprocess.Popen[bytes]) -> None:
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

    def complete_names(self, uri: str, text: str, following_text: str = "") -> tuple[set[str], str]:
        """Names that complete `text` at its end, which `following_text` follows in the document;
        and what became of the question: answered, empty, late, failed or unasked.

        Without an answer there are no names. Warns when the server is given up.
        """
        with self.turn:
            found_names, outcome = self._ask_names(uri, text, following_text)
            self.counts[outcome] += 1
        return found_names, outcome

    def _ask_names(self, uri: str, text: str, following_text: str) -> tuple[set[str], str]:
        while not self.given_up:
            try:
                connection = self.connection or self._start_connection()
                while self.unused:
                    connection.close_document(self.unused.popleft(), self.limit)
                connection.show_document(uri, text + following_text, self.limit)
                text_lines = LINE_END.split(text)
                utf16_units = len(text_lines[-1].encode("utf-16-le", "surrogatepass")) // 2
                params = {
                    "textDocument": {"uri": uri},
                    "position": {"line": len(text_lines) - 1, "character": utf16_units},
                    "context": {"triggerKind": 1},
                }
                result = connection.ask("textDocument/completion", params, self.limit)
                found_names = _completion_names(result)
            except Late:
                self.late += 1
                if self.late >= LATE:
                    self._drop_connection(f"{LATE} answers in a row were late")
                return set(), "late"
            except Refused:
                self.late = 0
                return set(), "failed"
            except Dead as error:
                self._drop_connection(str(error))
            else:
                self.late = 0
                return found_names, "answered" if found_names else "empty"
        return set(), "unasked"

    def _start_connection(self) -> Connection:
        connection = Connection(self.command, self.root)
        self.connection = connection
        connection.initialize_server(self.root)
        return connection

    def _drop_connection(self, reason: str) -> None:
        """Ends the connection; the next question starts the server again, if it may."""
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


def _completion_names(result: Any) -> set[str]:
    """The names among completions. Raises Dead for a result that is none."""
    try:
        completion_items = result.get("items", []) if isinstance(result, dict) else result or []
        name_items = [item for item in completion_items if item.get("kind") not in DROPPED]
        inserted_texts = [str(item.get("insertText") or item["label"]) for item in name_items]
    except (AttributeError, KeyError, TypeError) as error:
        raise Dead("its completions are none") from error
    return {text for text in inserted_texts if text.isidentifier()}
