"""Programs that push against the sandbox: each is stopped or fails, and is told by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.errors import Unsupported
from foretell.rewards import sandbox
from foretell.rewards import sandbox_inside as jail
from foretell.rewards.sandbox import FAULTS, Answer, FunctionCall, Limits, find_leaks, run_program

ASKED = [FunctionCall("f", (20,))]
QUICK = Limits(seconds=0.5)


def one(program: str, limits: Limits | None = None) -> Answer:
    """What f(20) gives."""
    (answer,) = run_program(program, ASKED, limits or Limits())
    return answer


# --- what works


def test_functions_are_called_and_give_plain_data() -> None:
    program = """
import collections, itertools, re, math
class Box:
    @staticmethod
    def doubled(n): return 2 * n
def f(n): return (n, [math.sqrt(16.0)], {"a": {1, 2}}, None, b"x", True)
def g(*, word): return re.sub("a", "b", word)
def h(pairs): return collections.Counter(pairs)
"""
    calls = [*ASKED, FunctionCall("g", named={"word": "banana"}), FunctionCall("Box.doubled", (4,)),
             FunctionCall("h", ([(1, 2), (1, 2)],))]  # fmt: skip
    values = [answer.value for answer in run_program(program, calls)]
    assert values == [(20, [4.0], {"a": {1, 2}}, None, b"x", True), "bbnbnb", 8, {(1, 2): 2}]
    assert type(values[0]) is tuple and run_program(program, []) == []


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
        | st.frozensets(st.text(), max_size=3)
        | st.sets(st.integers() | st.tuples(st.text()), max_size=3)
        | st.binary()
    ),
    max_leaves=8,
)


def shown(value: Any) -> Any:
    """With the types of all that is in it; the order of sets is nobody's choice."""
    if isinstance(value, set | frozenset):
        return type(value), sorted(str(shown(one)) for one in value)
    if isinstance(value, list | tuple):
        return type(value), [shown(one) for one in value]
    if isinstance(value, dict):
        return [(shown(key), shown(one)) for key, one in value.items()]
    return type(value), repr(value)


@settings(max_examples=60)
@given(plain)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    import json

    back = jail.unpack_value(json.loads(json.dumps(jail.pack_value(value))))
    assert back == value and shown(back) == shown(value)


def test_a_program_can_use_files_of_its_own() -> None:
    program = "def f(n):\n open('x', 'w').write('y' * n); return open('x').read()"
    assert one(program).value == "y" * 20


def test_strings_hash_alike_in_every_run() -> None:
    program = "def f(n): return list({str(k) for k in range(n)})"
    assert one(program) == one(program) and not one(program).fault


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    before = os.listdir("/proc/self/fd")
    one("open('own', 'w').write('x')\ndef f(n): return n")
    one("def f(n):\n while True: pass", QUICK)
    assert not list(tmp_path.iterdir()) and os.listdir("/proc/self/fd") == before


# --- what is stopped

WRONG = {
    "no Python": ("def f(n: return n", "syntax", "SyntaxError"),
    "an exception": ("def f(n): return n / 0", "raised", "ZeroDivisionError: division by zero"),
    "no function": ("g = 1", "missing", "there is no function f"),
    "no plain data": ("def f(n): return object()", "opaque", "object"),
    "a long value": ("def f(n): return 'x' * 10**6", "opaque", "too long"),
    "a deep value": (
        "def f(n):\n x = []\n for _ in range(10**5): x = [x]\n return x", "opaque", "Recursion",
    ),
    "deep recursion": ("def f(n): return f(n)", "raised", "RecursionError"),
    "reading a file": ("def f(n): return open('/etc/passwd').read()", "raised", "/etc/passwd"),
    "writing in /tmp": ("def f(n): open('/tmp/mine', 'w')", "raised", "/tmp/mine"),
    "a socket": ("import socket\ndef f(n): socket.socket()", "raised", "PermissionError"),
    "a process": ("import os\ndef f(n): os.fork()", "raised", "PermissionError"),
    "a command": ("import os\ndef f(n): return 1 / (os.system('true') == 0)", "raised", "Zero"),
    "a thread": (
        "import threading\ndef f(n): threading.Thread(target=int).start()", "raised", "thread",
    ),
    "killing the parent": ("import os\ndef f(n): os.kill(os.getppid(), 9)", "raised", "Permission"),
    "a signal by fcntl": (
        "import fcntl, os\ndef f(n): fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())",
        "raised", "PermissionError",
    ),
    "more memory at once": ("def f(n): return len(bytearray(1 << 40))", "memory", "MemoryError"),
    "more and more memory": ("def f(n):\n x = [0]\n while x: x += x", "memory", "MemoryError"),
    "printing that it passed": ("print('passed')", "missing", "no function f"),
    "ending with 0": ("import os\nos._exit(0)", "ended", "code 0"),
    "ending later": ("import os\ndef f(n): os._exit(0)", "ended", "code 0"),
    "sys.exit": ("import sys\ndef f(n): sys.exit(0)", "raised", "SystemExit: 0"),
    "SystemExit at once": ("raise SystemExit", "raised", "SystemExit"),
    "an error whose text fails": (
        "class E(Exception):\n def __str__(self): raise SystemExit\ndef f(n): raise E",
        "raised", "E",
    ),
    "crashing": ("import ctypes\ndef f(n): ctypes.string_at(0)", "killed", "signal 11"),
    "closing all pipes": ("import os\ndef f(n): os.closerange(0, 64)", "ended", ""),
    "garbage in all pipes": (
        "import os\ndef f(n):\n for d in range(64):\n  try: os.write(d, b'passed\\n')\n"
        "  except OSError: pass\n return n",
        "garbage", "",
    ),
    "the answer of another call": (
        "import os\ndef f(n):\n for d in range(3, 64):\n"
        "  try: os.write(d, b'{\"call\": 1, \"value\": 20}\\n')\n  except OSError: pass",
        "garbage", "",
    ),
    "a fault of its own making": (
        "import os\ndef f(n):\n for d in range(3, 64):\n"
        "  try: os.write(d, b'{\"call\": 0, \"fault\": [\"passed\", \"\"]}\\n')\n"
        "  except OSError: pass",
        "garbage", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_fault_is_told_by_its_name(name: str) -> None:
    program, fault, detail = WRONG[name]
    answer = one(program, Limits(memory=256 << 20))
    assert (answer.fault, detail in answer.detail) == (fault, True), str(answer)
    assert fault in FAULTS and answer.value is None and str(answer).startswith(fault)
    assert not Path("/tmp/mine").exists()


LONG = {
    "time": ("def f(n):\n while True: pass", QUICK),
    "cpu": ("def f(n):\n while True: pass", Limits(seconds=60, cpu=1)),
    "output": ("def f(n):\n while True: print('x' * 1000)", Limits()),
    "disk": ("def f(n):\n while True: open(str(n), 'w').write('x' * n); n += 1", Limits()),
}


@pytest.mark.parametrize("fault", LONG)
def test_what_does_not_end_is_ended(fault: str) -> None:
    program, limits = LONG[fault]
    assert one(program, limits).fault == fault


def test_sleeping_ignoring_signals_is_ended() -> None:
    program = """
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
def f(n): time.sleep(1000)
"""
    assert one(program, QUICK).fault == "time"


def test_a_fork_bomb_starts_nothing() -> None:
    program = """
import ctypes, os
def f(n):
    started = 0
    libc = ctypes.CDLL(None)
    for _ in range(100):
        for begin in (os.fork, libc.fork, libc.vfork, lambda: libc.syscall(57)):
            try:
                started += begin() >= 0
            except OSError:
                pass
    return started
"""
    assert one(program).value == 0


def test_a_fault_that_ends_the_process_is_that_of_the_calls_behind_it() -> None:
    program = "import os\ndef f(n): return n\ndef g(): os._exit(3)"
    first, *others = run_program(program, [*ASKED, FunctionCall("g"), *ASKED])
    assert first.value == 20 and [answer.fault for answer in others] == ["ended"] * 2
    calls = [*ASKED, FunctionCall("f", (0,)), *ASKED]
    first, second, third = run_program("def f(n): return 1 / n", calls)
    assert (first.value, second.fault, third.value) == (0.05, "raised", 0.05)


def test_changing_the_code_around_it_gives_no_other_verdict_than_its_values() -> None:
    """What it tells is compared elsewhere, with what is not in its process."""
    program = """
import gc, json, sys
main = sys.modules["__main__"]
def told(*a, **b): return {"value": True, "passed": True}
def f(n):
    main.answered = told
    json.dumps = lambda line: '{"call": 0, "value": true, "passed": true}'
    return [one for one in gc.get_objects() if isinstance(one, dict) and "expected" in one]
"""
    first, second = run_program(program, [*ASKED, *ASKED])
    assert first.value is True and second.fault == "garbage"  # a value like any other


# --- the walls themselves


@pytest.mark.parametrize("way", jail.WALLS)
def test_walls_of_each_kind_hold_or_say_why_not(way: str) -> None:
    why = find_leaks(way)
    assert "open to" not in why
    if not why:
        (answer,) = sandbox._run_behind(way, "def f(n): return n", ASKED, Limits())
        assert answer.value == 20


HELD = {
    "open": """
import os, time
def f(n):
    held = []
    for number in range(40):
        held.append(open(str(number), "wb"))
        os.unlink(str(number))
        held[-1].write(b"x" * (8 << 20))
        held[-1].flush()
    time.sleep(1)
""",
    "mapped": """
import mmap, os, time
def f(n):
    held = []
    for number in range(40):
        with open(str(number), "w+b") as file:
            file.truncate(8 << 20)
            held.append(mmap.mmap(file.fileno(), 8 << 20))
        os.unlink(str(number))
        held[-1].write(b"x" * (8 << 20))
    time.sleep(1)
""",
}


@pytest.mark.parametrize("how", HELD)
@pytest.mark.parametrize("way", jail.WALLS)
def test_files_without_a_name_count(way: str, how: str) -> None:
    if find_leaks(way):
        pytest.skip(f"{way} cannot be had here")
    (answer,) = sandbox._run_behind(way, HELD[how], ASKED, Limits())
    # Where the folder is memory of that size, a mapped page that finds no room ends the process.
    memory = way == "namespaces" and how == "mapped"
    assert answer.fault == ("killed" if memory else "disk"), str(answer)


def test_of_files_elsewhere_nothing_is_told_behind_namespaces() -> None:
    if find_leaks("namespaces"):
        pytest.skip("namespaces cannot be had here")
    program = """
import os
def f(n):
    found = []
    for path in ("/etc/passwd", "/etc/hostname", "/proc/self"):
        found.append(os.access(path, os.F_OK))
        try: found.append(os.stat(path))
        except OSError: pass
    return any(found)
"""
    (answer,) = sandbox._run_behind("namespaces", program, ASKED, Limits())
    assert answer.value is False


def test_keys_that_share_a_hash_are_no_answer() -> None:
    """Each would be compared with all others, outside of any limit."""
    for made in (
        "{k * (2**61 - 1) for k in range(100)}",
        "{k * (2**61 - 1): k for k in range(100)}",
    ):
        assert one(f"def f(n): return [{made}]").fault == "garbage"
    assert one("def f(n): return {k * (2**61 - 1) for k in range(9)} | {-1, -2}").fault == ""


WALL = 'WALLS[way](machine, os.getcwd(), request["limits"]["disk"])'


def broken(monkeypatch: pytest.MonkeyPatch, folder: Path, line: str) -> None:
    """Takes a line out of the jail."""
    text = Path(jail.__file__).read_text("utf-8")
    assert text.count(line) == 1
    path = folder / "jail.py"
    path.write_text(text.replace(line, "pass"), "utf-8")
    monkeypatch.setattr(sandbox, "JAIL", path)


@pytest.mark.parametrize(
    ("line", "open_to"),
    [
        ("filter_calls(machine)", "emptying|sockets, processes, programs, threads, signals"),
        (WALL, "reading, listing, writing, new files"),
    ],
)
def test_a_missing_wall_is_noticed(
    line: str, open_to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = sandbox.find_walls()
    broken(monkeypatch, tmp_path, line)
    why = find_leaks(way)
    assert "open to" in why and any(names in why for names in open_to.split("|")), why


def test_without_walls_nothing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sandbox.find_walls.cache_clear()
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "riscv64")
    with pytest.raises(
        Unsupported, match=r"needs Linux on x86_64 or aarch64, and this is .*riscv64"
    ):
        run_program("def f(n): return n", ASKED)
    monkeypatch.undo()
    broken(monkeypatch, tmp_path, WALL)
    with pytest.raises(
        Unsupported, match=r"finds no walls here .*open to reading.*; run it on Linux"
    ):
        run_program("def f(n): return n", ASKED)
    monkeypatch.undo()
    assert one("def f(n): return n").value == 20


def decided(machine: str, number: int, args: dict[int, int], mark: int | None = None) -> int:
    """What the filter says of a call, instruction by instruction."""
    own, _, _ = jail.MACHINES[machine]
    data = {0: number, 4: own if mark is None else mark}
    data |= {16 + 8 * place: value for place, value in args.items()}
    code, at, held = jail.seccomp_filter(machine), 0, 0
    while True:
        kind, yes, no, operand = code[at]
        at += 1
        if kind == jail.LOAD:
            held = data.get(operand, 0)
        elif kind == jail.AND:
            held &= operand
        elif kind == jail.EQUAL:
            at += yes if held == operand else no
        elif kind == jail.ANY:
            at += yes if held & operand else no
        else:
            assert kind == jail.RETURN
            return operand


# Calls such as clone, execve, socket, kill, ptrace, io_uring_setup, prctl, mount.
FORBIDDEN = {
    "x86_64": (56, 57, 58, 59, 435, 322, 41, 62, 234, 101, 425, 157, 310, 302, 165, 90, 76, 438),
    "aarch64": (220, 435, 221, 281, 198, 129, 131, 117, 425, 167, 270, 261, 40, 53, 45, 438),
}


@pytest.mark.parametrize("machine", jail.MACHINES)
def test_the_filter_lets_through_what_is_listed_alone(machine: str) -> None:
    _, place, numbers = jail.MACHINES[machine]
    listed = {both[place] for both in jail.PERMITTED.values()} - {None}
    looked_into = {numbers[name] for name in ("fcntl", "open", "openat") if name in numbers}
    for number in range(1200):
        expected = jail.ALLOW if number in listed else jail.REFUSE
        if number not in looked_into:
            assert decided(machine, number, {}) == expected
        assert decided(machine, number | 0x40000000, {}) == jail.REFUSE  # of the x32 interface
        assert decided(machine, number, {}, mark=0x40000003) == jail.KILL
    assert not listed & set(FORBIDDEN[machine]) and not looked_into & listed
    for command in range(1100):
        right = jail.ALLOW if command in jail.FCNTL else jail.REFUSE
        assert decided(machine, numbers["fcntl"], {1: command}) == right


@pytest.mark.parametrize("machine", jail.MACHINES)
def test_the_filter_opens_no_file_to_empty_it_unless_it_is_written(machine: str) -> None:
    numbers = jail.MACHINES[machine][2]
    for name, place in (("open", 1), ("openat", 2)):
        for mode in range(4):
            for emptied in (0, jail.O_TRUNC):
                for nameless in (0, jail.O_TMPFILE):
                    flags = mode | emptied | nameless | os.O_CREAT | os.O_CLOEXEC
                    good = mode < 3 and not nameless and not (emptied and mode == 0)
                    if name in numbers:
                        found = decided(machine, numbers[name], {place: flags})
                        assert found == (jail.ALLOW if good else jail.REFUSE)
