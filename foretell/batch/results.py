"""The file of results, which grows line by line and is all that a batch remembers.

Every line is whole or is not there. Its id names the requests' file, the model and the line that it
answers:

    batch_req_2c26b46b68ffc68ff99b453c_17
              requests    model        line

So a run that was killed goes on where it was, and results of two files or two models never mix.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from foretell.batch.requests import Item, Refused
from foretell.errors import BadFile
from foretell.ops.parsing import parse_json
from foretell.serve.errors import ApiError

PART = 12  # digits of a digest in an id
ID = re.compile(r"batch_req_([0-9a-f]{12})([0-9a-f]{12})_([0-9]+)")
BEGINNING = b'{"id": "batch_req_'  # of every line
SYNC = 1.0  # seconds for which results may lie in the system's memory only
CURE = "free some space and run the same command again, which goes on from there"


@dataclass(frozen=True)
class Run:
    """Digests (hex) of what results belong to: the file of requests, and model and settings."""

    requests: str
    model: str

    def id_of(self, line: int) -> str:
        return f"batch_req_{self.requests[:PART]}{self.model[:PART]}_{line}"


class Results:
    """A file of results, open for more of them. Made by `opened`."""

    def __init__(self, path: Path, run: Run):
        self.path = path
        self.run = run
        self.lines: set[int] = set()  # of the file of requests, those that have a result
        self.failed = 0  # of these
        self.torn = False  # whether the last line was not whole, and is removed
        self._file = -1
        self._unsynced = False
        self._synced = 0.0

    def read_results(self) -> None:
        """Takes note of the results there are. Raises BadFile where they are of something else."""
        complete_bytes = 0  # bytes of whole lines
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    self.torn = self._is_torn(number, line)
                    break
                self._note(number, line)
                complete_bytes += len(line)
        if self.torn:
            os.truncate(self.path, complete_bytes)

    def _is_torn(self, number: int, line: bytes) -> bool:
        """True for the beginning of a line of ours, which may end in what a crash left there."""
        text = line.rstrip(b"\0")
        if not text.startswith(BEGINNING) and not BEGINNING.startswith(text):
            raise self._foreign_line(number)
        return True

    def _note(self, number: int, line: bytes) -> None:
        try:
            document = parse_json(line)
            id_match = ID.fullmatch(document["id"])
            failed = document["error"] is not None
        except (ValueError, TypeError, KeyError):
            raise self._foreign_line(number) from None
        if id_match is None:
            raise self._foreign_line(number)
        requests, model, answered_line = id_match.groups()
        if requests != self.run.requests[:PART]:
            raise BadFile(
                f"{self.path}: it holds results of another file of requests; "
                "name another file for these, or delete it"
            )
        if model != self.run.model[:PART]:
            raise BadFile(
                f"{self.path}: its results are of another model or other settings; "
                "run it with those, name another file, or delete it"
            )
        if int(answered_line) in self.lines:
            raise BadFile(
                f"{self.path}, line {number}: a second result of line {answered_line}; "
                "delete one of them"
            )
        self.lines.add(int(answered_line))
        self.failed += failed

    def _foreign_line(self, number: int) -> BadFile:
        return BadFile(
            f"{self.path}, line {number}: no result of a batch; name another file, or delete it"
        )

    # --- writing

    def write_answer(self, item: Item, body: Mapping[str, Any]) -> None:
        """Writes an answer."""
        self._write(item.line, item.custom_id, 200, body, None)

    def write_refused(self, refused_line: Refused) -> None:
        """Writes that a line cannot be used."""
        self._write(refused_line.line, refused_line.custom_id, None, None, refused_line.error)

    def broken(self, item: Item, error: ApiError) -> None:
        """Writes that a request failed, as a server would have said it."""
        self._write(item.line, item.custom_id, error.status, error.json_body(), error)

    def _write(
        self,
        line: int,
        custom_id: str | None,
        status: int | None,
        body: Mapping[str, Any] | None,
        error: ApiError | None,
    ) -> None:
        key = self.run.id_of(line)
        response = fault = None
        if status is not None:
            request_id = key.removeprefix("batch_")
            response = {"status_code": status, "request_id": request_id, "body": body}
        if error is not None:
            fault = {
                "code": error.code,
                "message": f"line {line}: {error.message}",
                "param": error.param,
                "line": line,
            }
            self.failed += 1
        document = {"id": key, "custom_id": custom_id, "response": response, "error": fault}
        self._append(f"{json.dumps(document, allow_nan=False)}\n".encode())
        self.lines.add(line)

    def _append(self, data: bytes) -> None:
        """Hands data to the system at once, so that they outlive this process."""
        with self._refusals():
            while data:
                data = data[os.write(self._file, data) :]
        self._unsynced = True
        if time.monotonic() - self._synced > SYNC:
            self.sync()

    def sync(self) -> None:
        """Waits until all results are on the disk, so that they outlive the system."""
        if self._unsynced:
            with self._refusals():
                os.fsync(self._file)
            self._unsynced = False
        self._synced = time.monotonic()

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BadFile(f"{self.path}: {error.strerror or error}; {CURE}") from error

    @contextmanager
    def opened(self) -> Iterator[Results]:
        """Reads what there is, and takes more. Raises BadFile where another process does that."""
        if self.path.exists() and not self.path.is_file():
            raise BadFile(f"{self.path}: no ordinary file, so no run could go on; name another")
        with self._exclusive_lock():
            with self._refusals():
                self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                with self._refusals():
                    self.read_results()
                yield self
            except BaseException:
                with contextlib.suppress(BadFile):  # what came before says more
                    self.sync()
                raise
            else:
                self.sync()
            finally:
                os.close(self._file)

    @contextmanager
    def _exclusive_lock(self) -> Iterator[None]:
        """Holds the lock of these results. A process that dies lets go of it."""
        lock = FileLock(self.path.with_name(f".{self.path.name}.lock"))
        with self._refusals():
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise BadFile(
                    f"{self.path}: another process is writing it; "
                    "wait for that, or name another file"
                ) from None
        try:
            yield
        finally:
            lock.release()
