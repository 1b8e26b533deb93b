"""Runs programs that nobody has read: a fresh interpreter for each, behind the kernel's walls.

A program is loaded and some of its functions are called; what they give comes back as plain data.
Who asked compares: what a call should give never enters the program's process, so a program cannot
forge a verdict. It may print that it has passed, end itself, change the code around it or write to
every pipe: all it can do to be right about a call is to give the right value.

A program reads the interpreter's libraries and nothing else, writes into an empty folder that is
removed, starts no process and no thread, and reaches no network: see `sandbox_inside.py`. Its time,
memory, output and files are limited. Which walls a machine allows is found out once, by trying them
with a program that pushes against each. Where they cannot be had nothing is run: Unsupported.

Two things hold only where user namespaces are allowed: that a program learns nothing of other
files, and that its files never take more than their limit. Behind Landlock alone it can ask for
names, sizes and times (`stat`), never for contents, and what its files take is counted 20 times a
second, with those that it has deleted and holds open: in between it may go over.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from foretell.errors import Unsupported
from foretell.rewards.sandbox_inside import FILES, MACHINES, SHOWN, WALLS, packed, unpacked

JAIL = Path(__file__).with_name("sandbox_inside.py")
START = 60.0  # seconds that the interpreter may take until its walls stand
TICK = 0.05  # seconds between two looks at what it has written
MEGABYTE = 1 << 20
# What goes wrong with a call, besides a wrong value.
FAULTS = {
    "syntax": "the program is no Python",
    "raised": "an exception",
    "missing": "no such function",
    "opaque": "a value that is no plain data, or a very long one",
    "time": "it ran too long",
    "cpu": "it computed too long",
    "memory": "it needed too much memory",
    "output": "it printed too much",
    "disk": "it wrote too much",
    "ended": "its process ended before it answered",
    "killed": "its process was ended by a signal",
    "garbage": "it wrote something else where answers belong",
}


@dataclass(frozen=True)
class Limits:
    """Of one program with all its calls."""

    seconds: float = 10.0  # on the clock
    cpu: int = 10  # seconds of computing
    memory: int = 512 * MEGABYTE  # bytes of address space
    output: int = MEGABYTE // 16  # bytes that it prints
    answer: int = MEGABYTE // 16  # bytes of a value
    disk: int = 16 * MEGABYTE  # bytes of its files


@dataclass(frozen=True)
class FunctionCall:
    """A function of the program, with arguments that are plain data."""

    name: str
    args: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """The value of a call; or, where there is none, the `fault`, a key of FAULTS, and `detail`."""

    value: Any = None
    fault: str = ""
    detail: str = ""

    def __str__(self) -> str:
        if not self.fault:
            return repr(self.value)
        return f"{self.fault}: {self.detail or FAULTS[self.fault]}"


def run(program: str, calls: Sequence[FunctionCall], limits: Limits = Limits()) -> list[Answer]:
    """What each call gives, in order, in one process. After a fault that ends it, all have that.

    Raises Unsupported where this machine has no walls, and TypeError for arguments that are no
    plain data.
    """
    return _run(walls(), program, calls, limits)


@cache
def walls() -> str:
    """The kind of walls that this machine allows, tried once. Raises Unsupported."""
    cure = "run it on Linux 5.13 or newer, in a container that allows Landlock or user namespaces"
    machine = platform.machine()
    if sys.platform != "linux" or machine not in MACHINES or not sys.executable:
        have = f"{platform.system()} on {machine or 'an unknown machine'}"
        known = " or ".join(MACHINES)
        raise Unsupported(f"the sandbox needs Linux on {known}, and this is {have}; {cure}")
    reasons = []
    for way in WALLS:
        why = leaks(way)
        if not why:
            return way
        reasons.append(f"{way}: {why}")
    raise Unsupported(f"the sandbox finds no walls here ({'; '.join(reasons)}); {cure}")


PATIENT = Limits(seconds=60.0, cpu=60)  # however busy the machine is
PROBE = """
import os, socket, threading

def programs():
    try:
        os.execv("/none", ["none"])
    except FileNotFoundError:
        pass  # it was looked for

def held(secret):
    attempts = {
        "reading": lambda: open(secret).read(),
        "listing": lambda: os.listdir(os.path.dirname(secret)),
        "writing": lambda: open(secret, "a"),
        "emptying": lambda: os.open(secret, os.O_TRUNC),
        "new files": lambda: open(secret + ".new", "x"),
        "sockets": socket.socket,
        "processes": lambda: os.fork() or os._exit(0),
        "programs": programs,
        "threads": threading.Thread(target=int).start,
        "signals": lambda: os.kill(os.getppid(), 0),
    }
    open_ones = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except (OSError, RuntimeError):
            continue
        open_ones.append(name)
    with open("own", "w") as file:
        file.write("x")
    return open_ones
"""


def leaks(way: str) -> str:
    """What walls of this kind do not keep out here, or why they cannot be had; "": nothing."""
    with tempfile.TemporaryDirectory(prefix="foretell-") as folder:
        secret = Path(folder) / "secret"
        secret.write_text("known to nobody", "utf-8")
        try:
            (answer,) = _run(way, PROBE, [FunctionCall("held", (str(secret),))], PATIENT)
        except Unsupported as error:
            return str(error)
    if answer.fault:
        return str(answer)
    return f"open to {', '.join(answer.value)}" if answer.value else ""


def _run(way: str, program: str, calls: Sequence[FunctionCall], limits: Limits) -> list[Answer]:
    counted = ("cpu", "memory", "disk", "answer")
    request = {
        "program": program,
        "calls": [[one.name, packed(one.args), packed(dict(one.named))] for one in calls],
        "limits": {name: getattr(limits, name) for name in counted},
        "parent": os.getpid(),
    }
    with (
        tempfile.TemporaryDirectory(prefix="foretell-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as file,
    ):
        for name in ("own", "root"):
            (Path(folder) / name).mkdir()
        own = Path(folder) / "own"
        file.write(json.dumps(request).encode())
        file.seek(0)
        answers, end = os.pipe()
        try:
            # As -I, but with strings that hash alike in every run, so that results come again.
            process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-B", str(JAIL), way, str(end)],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(end,),
                cwd=own,
                env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"},
                start_new_session=True,
            )
        except BaseException:
            os.close(answers)
            raise
        finally:
            os.close(end)
        watch = _Watch(process, answers, own, limits, len(calls))
        try:
            return watch.answers()
        finally:
            watch.close()


class _Watch:
    """Reads what a process answers, and ends it where it goes beyond its limits."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        pipe: int,
        folder: Path,
        limits: Limits,
        calls: int,
    ):
        self.process = process
        self.pipe = pipe
        self.folder = folder
        self.limits = limits
        self.calls = calls
        self.pending = b""  # of a line that is not complete
        self.lines: list[dict[str, Any]] = []
        self.printed = 0
        self.deadline = time.monotonic() + START
        self.device = folder.stat().st_dev

    def answers(self) -> list[Answer]:
        """Of each call. Raises Unsupported where the walls did not stand."""
        fault = self._fault()
        if self.lines and "refused" in self.lines[0]:
            raise Unsupported(str(self.lines[0]["refused"]))
        if not self.lines:
            raise Unsupported(f"the interpreter did not start ({fault})")
        found = [self._answer(line) for line in self.lines[2:]]
        assert fault is not None or len(found) == self.calls
        missing = self.calls - len(found)
        return found if fault is None else [*found, *[fault] * missing]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        os.close(self.pipe)

    def _answer(self, line: dict[str, Any]) -> Answer:
        if "fault" in line:
            return _fault(*line["fault"])
        return Answer(unpacked(line["value"]))

    def _fault(self) -> Answer | None:
        """Reads until all calls are answered (None) or no more answers can come."""
        assert self.process.stdout is not None
        printed = self.process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(self.pipe, selectors.EVENT_READ)
            selector.register(printed, selectors.EVENT_READ)
            while True:
                left = self.deadline - time.monotonic()
                if left <= 0:
                    return _fault("time", f"it ran for more than {self.limits.seconds:g} s")
                if fault := self._disk():
                    return fault
                for key, _ in selector.select(min(TICK, left)):
                    read = os.read(key.fd, 1 << 16)
                    if key.fd == printed:
                        self.printed += len(read)
                        if not read:
                            selector.unregister(printed)
                        if self.printed > self.limits.output:
                            most = self.limits.output
                            return _fault("output", f"it printed more than {most} bytes")
                    elif not read:
                        return self._ended()
                    elif fault := self._read(read):
                        return fault
                    elif len(self.lines) == 2 + self.calls:
                        return None

    def _read(self, read: bytes) -> Answer | None:
        """Takes in what was written to the pipe of answers; a fault where it cannot be one."""
        *whole, self.pending = (self.pending + read).split(b"\n")
        for line in whole:
            place = len(self.lines)
            try:
                found = json.loads(line)
                checked(found, place)
            except (ValueError, TypeError, KeyError, RecursionError):
                return _fault("garbage")
            if place == 0:
                self.deadline = time.monotonic() + self.limits.seconds
            elif place == 1 and "fault" in found:
                return _fault(*found["fault"])
            self.lines.append(found)
            if len(self.lines) > 2 + self.calls:
                return _fault("garbage")
        return _fault("garbage") if len(self.pending) > 2 * self.limits.answer else None

    def _disk(self) -> Answer | None:
        """What its files take, those too that it has deleted and still holds."""
        total = count = 0
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                count += 1
                total += entry.stat(follow_symlinks=False).st_blocks * 512
        for size in held(self.process.pid, self.device).values():
            count += 1
            total += size
        if total > self.limits.disk or count > FILES:
            most = f"{FILES} files or {self.limits.disk} bytes"
            return _fault("disk", f"it wrote more than {most}")
        return None

    def _ended(self) -> Answer:
        """The pipe was closed."""
        try:
            code = self.process.wait(1)
        except subprocess.TimeoutExpired:
            return _fault("ended", "it closed the pipe of answers")
        if code == -24:  # SIGXCPU
            return _fault("cpu", f"it computed for more than {self.limits.cpu} s")
        if code < 0:
            return _fault("killed", f"its process was ended by signal {-code}")
        return _fault("ended", f"its process ended with code {code} before it answered")


def held(process: int, device: int) -> dict[int, int]:
    """Of each file on this device that a process holds and that has no name any more, by its
    number, the bytes that it takes, or as many as are mapped.
    """
    found: dict[int, int] = {}
    about = Path(f"/proc/{process}")
    with contextlib.suppress(OSError):
        for line in (about / "maps").read_text("utf-8", "replace").splitlines():
            place, _, _, where, inode, *_ = line.split(maxsplit=5)
            major, _, minor = where.partition(":")
            if line.endswith("(deleted)") and os.makedev(int(major, 16), int(minor, 16)) == device:
                first, _, end = place.partition("-")
                size = int(end, 16) - int(first, 16)
                found[int(inode)] = found.get(int(inode), 0) + size
        for entry in (about / "fd").iterdir():
            with contextlib.suppress(OSError):
                stat = entry.stat()
                if stat.st_dev == device and not stat.st_nlink:
                    found[stat.st_ino] = stat.st_blocks * 512
    return found


def checked(line: Any, place: int) -> None:
    """Raises ValueError, TypeError or KeyError for a line that does not belong at this place."""
    if place == 0:
        if line not in ({"ready": True},) and set(line) != {"refused"}:
            raise ValueError("neither ready nor refused")
        return
    if "fault" in line:
        kind, detail = line["fault"]
        if kind not in FAULTS or not isinstance(detail, str):
            raise ValueError("no fault of ours")
    elif place > 1:
        unpacked(line["value"])
    elif line != {"loaded": True}:
        raise ValueError("not loaded")
    if place > 1 and line["call"] != place - 2:
        raise ValueError("another call's answer")


def _fault(kind: str, detail: str = "") -> Answer:
    shown = "".join(letter if letter.isprintable() else " " for letter in detail)
    return Answer(None, kind, shown[:SHOWN])
