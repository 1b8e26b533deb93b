"""A model in a process of its own, asked over a pipe.

The process runs `python -m foretell.loading.model_worker`. It makes the model by a *recipe*, a
function of this package by name with arguments that JSON can hold (`{"make":
"foretell.testing.toy:Toy", "arguments": {"vocab": 8}}`), so it reads the same files and gets no
object of this process. Messages are JSON, rows of logits follow as their bytes; nothing is
unpickled. The process ends when its pipe is closed, so it outlives neither its Remote nor this
process.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from threading import Lock
from typing import IO, Any

import numpy as np
import torch

from foretell.core.model import Model
from foretell.core.types import Ask, Reply
from foretell.errors import RequestFailed, Unsupported

WORKER = "foretell.loading.model_worker"
HEAD = struct.Struct("<II")  # bytes of the JSON, bytes after it
LAST = 2000  # bytes of its standard error that are looked through for its last words
CLOSING = 5.0  # seconds that it has to end by itself

_known_remotes: weakref.WeakKeyDictionary[Model, weakref.ref[Remote]] = weakref.WeakKeyDictionary()
_finding = Lock()


def model_recipe(source: str, **options: Any) -> dict[str, Any]:
    """Recipe of a model that was loaded from `source` with these options of foretell.load."""
    if source.lower().endswith(".gguf"):
        options = {}  # it is run as it is, whatever the others are
    return {"make": f"{WORKER}:load_target", "arguments": {"source": source, **options}}


def send_message(pipe: IO[bytes], message: dict[str, Any], data: bytes = b"") -> None:
    text = json.dumps(message).encode()
    pipe.write(HEAD.pack(len(text), len(data)) + text + data)
    pipe.flush()


def receive_message(pipe: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """A message and the bytes after it; None: the other side is gone."""
    head = pipe.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    length, size = HEAD.unpack(head)
    text, data = pipe.read(length), pipe.read(size)
    if len(text) < length or len(data) < size:
        return None
    message: dict[str, Any] = json.loads(text)
    return message, data


class Worker:
    """The process. It begins to load at once; the first answer waits for that."""

    def __init__(self, model: str, made_by: dict[str, Any]):
        self.model = model
        self.turn = Lock()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by _end
        search_paths = os.pathsep.join(place or os.getcwd() for place in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**os.environ, "PYTHONPATH": search_paths},
        )
        self.close = weakref.finalize(self, _end_process, self.process, self.errors)
        self.loaded = False
        self.dropped: list[int] = []  # seats that it may forget
        first_message = {**made_by, "threads": torch.get_num_threads()}
        try:
            send_message(self._check_pipe(self.process.stdin), first_message)
        except OSError as error:
            raise self._describe_end() from error

    @property
    def alive(self) -> bool:
        return self.process.poll() is None and self.close.alive

    def ask(self, message: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Returns its answer. Raises RequestFailed where it reports an error, or has ended."""
        with self.turn:
            if not self.loaded:
                self._receive_answer()
                self.loaded = True
            try:
                send_message(self._check_pipe(self.process.stdin), message)
            except (OSError, ValueError) as error:  # ValueError: the pipe is closed
                raise self._describe_end() from error
            return self._receive_answer()

    def _receive_answer(self) -> tuple[dict[str, Any], bytes]:
        answer = receive_message(self._check_pipe(self.process.stdout))
        if answer is None:
            raise self._describe_end()
        if "error" in answer[0]:
            raise RequestFailed(f"the process that computes {self.model}: {answer[0]['error']}")
        return answer

    @staticmethod
    def _check_pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None, "both ends were asked for"
        return pipe

    def _describe_end(self) -> RequestFailed:
        try:
            code: int | str = self.process.wait(CLOSING)
        except subprocess.TimeoutExpired:
            code = "none"
        words = ""
        if not self.errors.closed:
            self.errors.seek(0, os.SEEK_END)
            self.errors.seek(max(0, self.errors.tell() - LAST))
            lines = self.errors.read().decode("utf-8", "replace").strip().splitlines()
            words = f": {lines[-1].strip()}" if lines else ""
        return RequestFailed(
            f"the process that computes {self.model} has ended (exit code {code}{words}); "
            "ask again, which starts another, or use lane=inline"
        )


def _end_process(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    """Closes the pipe, by which the process ends, and waits for that."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # it is gone already
                pipe.close()
    try:
        process.wait(CLOSING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    errors.close()


class Remote:
    """A model as another process computes it. Raises Unsupported where that cannot make it.

    It stands among a method's brought models (Drafter.bring) and lives as long as the last engine
    that has it. All methods share the one of a model.
    """

    feeds = ()
    reads_target = False
    learns = False

    def __init__(self, model: Model):
        if model.recipe is None or model.reads_target:
            raise Unsupported.missing_capability(
                "lane=process",
                model.name,
                "files that a process can load it from",
                "load it with foretell.load, or use lane=thread",
            )
        self.name = model.name
        self.recipe = dict(model.recipe)
        self.seats = count()
        self.starting = Lock()
        self.worker: Worker | None = None

    @classmethod
    def of(cls, model: Model) -> Remote:
        """The one of this model, which is made where there is none."""
        with _finding:
            known_remote = _known_remotes.get(model)
            remote = None if known_remote is None else known_remote()
            if remote is None:
                remote = cls(model)
                _known_remotes[model] = weakref.ref(remote)
            return remote

    def seat(self) -> RemoteSeat:
        """Place for one branch's rows, in a process that is started where there is none."""
        with self.starting:
            if self.worker is None or not self.worker.alive:
                self.worker = Worker(self.name, self.recipe)
            return RemoteSeat(self.worker, next(self.seats))


class RemoteSeat:
    """Rows of one branch in the process."""

    def __init__(self, worker: Worker, number: int):
        self.worker = worker
        self.number = number
        self.told: list[int] = []  # the branch's tokens as the process has them

    def answer(self, ask: Ask, tokens: Sequence[int]) -> Reply:
        if ask.taps or ask.states is not None or ask.features is not None:
            raise Unsupported.missing_capability(
                "lane=process", self.worker.model, "asks for logits alone", "use lane=thread"
            )
        same_count = len(self.told) if [*tokens[: len(self.told)]] == self.told else 0
        tree = ask.tree
        nodes = None if ask.rows is None else [*ask.rows]
        dropped, self.worker.dropped = self.worker.dropped, []
        message = {
            "drop": dropped,
            "seat": self.number,
            "same": same_count,
            "tokens": [*tokens[same_count:]],
            "tree": [tree.tokens, tree.parents],
            "rows": nodes,
            "layers": ask.layers,
        }
        self.told = [*tokens]
        reply_head, data = self.worker.ask(message)
        array = np.frombuffer(bytearray(data), dtype=reply_head["dtype"]).reshape(
            reply_head["shape"]
        )
        return Reply(torch.from_numpy(array), {}, reply_head["nodes"], reply_head["new"])

    def drop(self) -> None:
        """The process hears of it with the next ask: nobody waits for that here."""
        self.worker.dropped.append(self.number)
