"""Runs programs that nobody has read: a fresh interpreter for each, after the kernel's walls.

A program is loaded and some of its functions are called; what they give comes back as plain data.
Who asked compares: what a call should give never enters the program's process, so a program cannot
forge a verdict. It may print that it has passed, end itself, change the code around it or write to
every pipe: all it can do to be right about a call is to give the right value.

A program reads the interpreter's libraries and nothing else, writes into an empty folder that is
removed, starts no process and no thread, and reaches no network: see `sandbox_inside.py`. Its time,
memory, output and files are limited. Which walls a machine allows is found out once, by trying them
with a program that pushes against each. Where they cannot be had nothing is run: Unsupported.

Two things hold only where user namespaces are allowed: that a program learns nothing of other
files, and that its files never take more than their limit. After Landlock alone it can ask for
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
from foretell.rewards.sandbox_inside import FILES, MACHINES, SHOWN, WALLS, pack_value, unpack_value

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
    """The limits of one program with all its calls."""

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


def run_program(
    program: str, calls: Sequence[FunctionCall], limits: Limits = Limits()
) -> list[Answer]:
    """Returns what each call gives, in order, in one process. After a fault that ends it, all have
    that.

    Raises Unsupported where this machine has no walls, and TypeError for arguments that are no
    plain data.
    """
    return _run_behind(find_walls(), program, calls, limits)


@cache
def find_walls() -> str:
    """Returns the kind of walls that this machine allows, tried once. Raises Unsupported."""
    cure = "run it on Linux 5.13 or newer, in a container that allows Landlock or user namespaces"
    machine = platform.machine()
    if sys.platform != "linux" or machine not in MACHINES or not sys.executable:
        actual_system = f"{platform.system()} on {machine or 'an unknown machine'}"
        known_machines = " or ".join(MACHINES)
        raise Unsupported(
            f"the sandbox needs Linux on {known_machines}, and this is {actual_system}; {cure}"
        )
    reasons = []
    for wall_kind in WALLS:
        leak_text = find_leaks(wall_kind)
        if not leak_text:
            return wall_kind
        reasons.append(f"{wall_kind}: {leak_text}")
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


def find_leaks(wall_kind: str) -> str:
    """Says what walls of this kind do not keep out here, or why they cannot be had; "": nothing."""
    with tempfile.TemporaryDirectory(prefix="foretell-") as folder:
        secret_file = Path(folder) / "secret"
        secret_file.write_text("known to nobody", "utf-8")
        try:
            (answer,) = _run_behind(
                wall_kind, PROBE, [FunctionCall("held", (str(secret_file),))], PATIENT
            )
        except Unsupported as error:
            return str(error)
    if answer.fault:
        return str(answer)
    return f"open to {', '.join(answer.value)}" if answer.value else ""


def _run_behind(
    wall_kind: str, program: str, calls: Sequence[FunctionCall], limits: Limits
) -> list[Answer]:
    counted_limits = ("cpu", "memory", "disk", "answer")
    request = {
        "program": program,
        "calls": [
            [
                function_call.name,
                pack_value(function_call.args),
                pack_value(dict(function_call.named)),
            ]
            for function_call in calls
        ],
        "limits": {name: getattr(limits, name) for name in counted_limits},
        "parent": os.getpid(),
    }
    with (
        tempfile.TemporaryDirectory(prefix="foretell-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as request_file,
    ):
        for name in ("own", "root"):
            (Path(folder) / name).mkdir()
        program_folder = Path(folder) / "own"
        request_file.write(json.dumps(request).encode())
        request_file.seek(0)
        read_end, write_end = os.pipe()
        try:
            # As -I, but with strings that hash alike in every run, so that results come again.
            process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-B", str(JAIL), wall_kind, str(write_end)],
                stdin=request_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(write_end,),
                cwd=program_folder,
                env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"},
                start_new_session=True,
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        process_watch = _Watch(process, read_end, program_folder, limits, len(calls))
        try:
            return process_watch.read_answers()
        finally:
            process_watch.close()


class _Watch:
    """Reads what a process answers, and ends it where it goes beyond its limits."""

    def __init__(
        self, process: subprocess.Popen[bytes], pipe: int, folder: Path, limits: Limits, calls: int
    ):
        self.process = process
        self.pipe = pipe
        self.folder = folder
        self.limits = limits
        self.call_count = calls
        self.pending = b""  # of a line that is not complete
        self.lines: list[dict[str, Any]] = []
        self.printed_bytes = 0
        self.deadline = time.monotonic() + START
        self.device = folder.stat().st_dev

    def read_answers(self) -> list[Answer]:
        """Reads the answer of each call. Raises Unsupported where the walls did not stand."""
        fault = self._watch_pipes()
        if self.lines and "refused" in self.lines[0]:
            raise Unsupported(str(self.lines[0]["refused"]))
        if not self.lines:
            raise Unsupported(f"the interpreter did not start ({fault})")
        call_answers = [self._parse_answer(line) for line in self.lines[2:]]
        assert fault is not None or len(call_answers) == self.call_count
        missing_count = self.call_count - len(call_answers)
        return call_answers if fault is None else [*call_answers, *[fault] * missing_count]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        os.close(self.pipe)

    def _parse_answer(self, line: dict[str, Any]) -> Answer:
        if "fault" in line:
            return _fault_answer(*line["fault"])
        return Answer(unpack_value(line["value"]))

    def _watch_pipes(self) -> Answer | None:
        """Reads until all calls are answered (None) or no more answers can come."""
        assert self.process.stdout is not None
        output_pipe = self.process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(self.pipe, selectors.EVENT_READ)
            selector.register(output_pipe, selectors.EVENT_READ)
            while True:
                remaining_seconds = self.deadline - time.monotonic()
                if remaining_seconds <= 0:
                    return _fault_answer("time", f"it ran for more than {self.limits.seconds:g} s")
                if fault := self._check_disk():
                    return fault
                for ready_pipe, _ in selector.select(min(TICK, remaining_seconds)):
                    new_bytes = os.read(ready_pipe.fd, 1 << 16)
                    if ready_pipe.fd == output_pipe:
                        self.printed_bytes += len(new_bytes)
                        if not new_bytes:
                            selector.unregister(output_pipe)
                        if self.printed_bytes > self.limits.output:
                            max_bytes = self.limits.output
                            return _fault_answer(
                                "output", f"it printed more than {max_bytes} bytes"
                            )
                    elif not new_bytes:
                        return self._exit_fault()
                    elif fault := self._take_lines(new_bytes):
                        return fault
                    elif len(self.lines) == 2 + self.call_count:
                        return None

    def _take_lines(self, new_bytes: bytes) -> Answer | None:
        """Takes in what was written to the pipe of answers; a fault where it cannot be one."""
        *full_lines, self.pending = (self.pending + new_bytes).split(b"\n")
        for line in full_lines:
            line_number = len(self.lines)
            try:
                parsed_line = json.loads(line)
                check_line(parsed_line, line_number)
            except (ValueError, TypeError, KeyError, RecursionError):
                return _fault_answer("garbage")
            if line_number == 0:
                self.deadline = time.monotonic() + self.limits.seconds
            elif line_number == 1 and "fault" in parsed_line:
                return _fault_answer(*parsed_line["fault"])
            self.lines.append(parsed_line)
            if len(self.lines) > 2 + self.call_count:
                return _fault_answer("garbage")
        return _fault_answer("garbage") if len(self.pending) > 2 * self.limits.answer else None

    def _check_disk(self) -> Answer | None:
        """Returns a fault where the program's files take too much, deleted ones that it holds
        included.
        """
        total_bytes = file_count = 0
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                file_count += 1
                total_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
        for size in unnamed_file_sizes(self.process.pid, self.device).values():
            file_count += 1
            total_bytes += size
        if total_bytes > self.limits.disk or file_count > FILES:
            disk_limits = f"{FILES} files or {self.limits.disk} bytes"
            return _fault_answer("disk", f"it wrote more than {disk_limits}")
        return None

    def _exit_fault(self) -> Answer:
        """Returns the fault of a process that has closed its pipe."""
        try:
            exit_code = self.process.wait(1)
        except subprocess.TimeoutExpired:
            return _fault_answer("ended", "it closed the pipe of answers")
        if exit_code == -24:  # SIGXCPU
            return _fault_answer("cpu", f"it computed for more than {self.limits.cpu} s")
        if exit_code < 0:
            return _fault_answer("killed", f"its process was ended by signal {-exit_code}")
        return _fault_answer("ended", f"its process ended with code {exit_code} before it answered")


def unnamed_file_sizes(process: int, device: int) -> dict[int, int]:
    """Returns the bytes of each file on this device that a process holds and that has no name any
    more, by its number: those that it takes, or as many as are mapped.
    """
    file_sizes: dict[int, int] = {}
    process_folder = Path(f"/proc/{process}")
    with contextlib.suppress(OSError):
        for line in (process_folder / "maps").read_text("utf-8", "replace").splitlines():
            address_range, _, _, device_number, inode, *_ = line.split(maxsplit=5)
            major, _, minor = device_number.partition(":")
            if line.endswith("(deleted)") and os.makedev(int(major, 16), int(minor, 16)) == device:
                range_start, _, range_end = address_range.partition("-")
                mapped_size = int(range_end, 16) - int(range_start, 16)
                file_sizes[int(inode)] = file_sizes.get(int(inode), 0) + mapped_size
        for entry in (process_folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                stat = entry.stat()
                if stat.st_dev == device and not stat.st_nlink:
                    file_sizes[stat.st_ino] = stat.st_blocks * 512
    return file_sizes


def check_line(line: Any, line_number: int) -> None:
    """Raises ValueError, TypeError or KeyError for a line that does not belong at this position."""
    if line_number == 0:
        if line not in ({"ready": True},) and set(line) != {"refused"}:
            raise ValueError("neither ready nor refused")
        return
    if "fault" in line:
        fault_kind, detail = line["fault"]
        if fault_kind not in FAULTS or not isinstance(detail, str):
            raise ValueError("no fault of ours")
    elif line_number > 1:
        unpack_value(line["value"])
    elif line != {"loaded": True}:
        raise ValueError("not loaded")
    if line_number > 1 and line["call"] != line_number - 2:
        raise ValueError("another call's answer")


def _fault_answer(kind: str, detail: str = "") -> Answer:
    printable_detail = "".join(letter if letter.isprintable() else " " for letter in detail)
    return Answer(None, kind, printable_detail[:SHOWN])
