"""What may follow a text of code, against looking at every token with every dot."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.constraints.completing import Completing, Documents, Names, Vocabulary
from foretell.constraints.members import NAME_BYTES, find_member_dots
from foretell.constraints.stems import Stems
from foretell.core.constraint import Guide, Prompted
from foretell.core.tokenizer_bytes import Words
from tests.constraints.lsp_server import drawn

URI = "file:///x/text.py"
LETTERS = [bytes([letter]) for letter in b"abcx_12.(')# \n="]
# Dots with names after them, twice the same, halves of a character, and no bytes at all.
JOINED = [
    *LETTERS, b".a", b".ab", b".a(", b".ab.", b".a.b", b"..", b". ", b"x.a", b"x.", b").b", b"ab",
    b"ab", b"b(", b"c.x", b"\xc3", b"\xa9", b"a\xc3", None, b"", b"'.a", b".a", b"...",
]  # fmt: skip
PLAIN = [*LETTERS, b"._", b"..", b").", b"x._a", b"ab", b"bc", b"a)", b".)", b"x.(", None]


class Asked:
    """A server without a process."""

    def __init__(self) -> None:
        self.unused: list[str] = []
        self.asked: list[str] = []

    def complete_names(self, uri: str, text: str, behind: str = "") -> tuple[set[str], str]:
        self.asked.append(text + behind)
        found = set(drawn(text + behind))
        return found, "answered" if found else "empty"


def constraint(pieces: list[bytes | None], before: bytes) -> tuple[Completing, Asked]:
    server: Any = Asked()
    documents = Documents(server, Path("/x/text.py"))
    prompted = Prompted((), Words(pieces), len(pieces), {})
    return Completing(documents, before, prompted), server


def names_at(text: bytes) -> set[bytes]:
    """What follows this dot: asked again with closed brackets where there is no name."""
    shown = text.decode("utf-8", "replace")
    found = drawn(shown)
    if not found:
        closing = {"(": ")", "[": "]"}
        opened = find_member_dots(text)[0].brackets[::-1].decode()
        found = drawn(shown + opened) if opened else []
        assert not set(opened) - set(closing.values())
    return {name.encode() for name in found}


def may_follow(pieces: list[bytes | None], text: bytes, token: int) -> bool:
    """By every dot of the whole text, one after the other."""
    piece = pieces[token] or b""
    joined = any(p and len(p) > 1 and p[:1] == b"." and p[1:2].isalpha() for p in pieces)
    whole, start, end = text + piece, len(text), len(text + piece)
    for dot in find_member_dots(whole)[1]:
        run = dot + 1
        while run < end and whole[run] in NAME_BYTES:
            run += 1
        if dot < start:
            if run < start or (run == start and not piece and run < start):
                continue  # that name ended before
            typed = text[dot + 1 : start]
            if any(byte not in NAME_BYTES for byte in typed):
                continue
        elif dot == end - 1:
            continue  # nothing follows it yet
        elif dot > start or not joined:
            return False
        else:
            typed = b""
        names = {name for name in names_at(whole[: dot + 1]) if name.startswith(typed)}
        if not names:
            continue
        written = whole[dot + 1 : run]
        if not piece:
            return False
        fits = written in names if run < end else any(n.startswith(written) for n in names)
        if not fits:
            return False
    return True


def texts(pieces: list[bytes | None], count: int, seed: int) -> list[tuple[list[int], Names]]:
    """Random outputs, each a walk of its own in what is allowed."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        before = draw.choice([b"", b"x = a\nx.", b"f(x.a", b"x", b"# a", b"(x", b"'x"])
        made, _ = constraint(pieces, before)
        tracker = made.track()
        output: list[int] = []
        for _ in range(draw.randint(0, 12)):
            allowed = tracker.allowed(output).nonzero()[:, 0].tolist()
            dots = [token for token in allowed if b"." in (pieces[token] or b"")]
            output.append(draw.choice(dots if dots and draw.random() < 0.4 else allowed))
        assert tracker.permits(output)
        found.append((output, tracker))
    return found


@pytest.mark.parametrize("pieces", [LETTERS, JOINED, PLAIN], ids=["letters", "joined", "plain"])
def test_masks_are_those_of_a_look_at_each_token(pieces: list[bytes | None]) -> None:
    forbidden = free = 0
    for output, tracker in texts(pieces, 120, seed=1):
        text = bytes(tracker.text)
        mask = tracker.allowed(output)
        wanted = [may_follow(pieces, text, token) for token in range(len(pieces))]
        wrong = [pieces[i] for i in range(len(pieces)) if wanted[i] != bool(mask[i])]
        assert not wrong, (text, wrong)
        forbidden += not all(wanted)
        free += all(wanted)
        for token in range(len(pieces)):
            assert tracker.permits([*output, token]) == wanted[token]
    assert forbidden > 20 and free > 20


def test_a_text_may_end_where_no_name_is_begun() -> None:
    ends = set()
    for output, tracker in texts(LETTERS, 150, seed=2):
        text = bytes(tracker.text)
        dots = find_member_dots(text)[1]
        whole = True
        if dots and all(byte in NAME_BYTES for byte in text[dots[-1] + 1 :]):
            typed = text[dots[-1] + 1 :]
            names = {n for n in names_at(text[: dots[-1] + 1]) if n.startswith(typed)}
            whole = not names or typed in names
        assert tracker.whole(output) == whole
        guide = Guide(tracker, [len(LETTERS) - 1])
        assert bool(guide.masked(torch.zeros(len(LETTERS)), output)[-1] == 0) == (
            whole or may_follow(LETTERS, text, len(LETTERS) - 1)
        )
        assert not guide.complete(output)
        ends.add(whole)
    assert ends == {True, False}


@pytest.mark.parametrize("pieces", [JOINED, PLAIN], ids=["joined", "plain"])
def test_a_tracker_is_a_function_of_the_path(pieces: list[bytes | None]) -> None:
    """In any order, with what is forbidden and what was looked up ahead in between."""
    draw = random.Random(7)
    made, _ = constraint(pieces, b"x = a\nx.")
    tracker = copy.deepcopy(made.track())
    known: list[list[int]] = [[]]
    for _ in range(150):
        output = draw.choice(known[-12:])
        if draw.random() < 0.3:
            strange = [draw.randrange(len(pieces)) for _ in range(3)]
            tracker.unknown([[*output, *strange[:1]], [*output, *strange]])
            tracker.knows([*output, *strange])
        allowed = tracker.allowed(output)
        fresh = made.track()
        assert torch.equal(allowed, fresh.allowed(output))
        assert tracker.whole(output) == fresh.whole(output)
        bad = (~allowed).nonzero()[:, 0].tolist()
        if bad:
            refused = [*output, draw.choice(bad)]
            tracker.unknown([refused])
            assert not tracker.permits(refused) and not tracker.permits([*refused, 0])
            assert not tracker.allowed(refused).any()
        known.append([*output, draw.choice(allowed.nonzero()[:, 0].tolist())])


def test_a_text_is_asked_about_once_and_nothing_waits_after_asking_ahead() -> None:
    for pieces in (LETTERS, JOINED):
        made, server = constraint(pieces, b"x = (a")
        tracker = made.track()
        dot, a = pieces.index(b"."), pieces.index(b"a")
        outputs = [[], [dot], [dot, a], [dot, a, dot]]
        assert not tracker.knows([dot, a]) and not server.asked
        assert Guide(tracker, ()).may_draft([dot, a]), "a draft is not waited for"
        call = tracker.unknown(outputs)
        assert call is not None and not server.asked
        call()
        asked = list(server.asked)
        assert asked and tracker.unknown(outputs) is None and tracker.knows([dot, a, dot])
        for output in outputs:
            tracker.allowed(output)
            made.track().permits(output)
        assert server.asked == asked and len(set(asked)) == len(asked)
        assert sum(made.counts.values()) == len(made.documents.answers)


def test_a_dot_that_no_name_may_follow_is_free() -> None:
    text = next(f"y{i}." for i in range(99) if not drawn(f"y{i}."))
    made, _ = constraint(LETTERS, text.encode())
    assert made.track().allowed([]).all() and made.track().whole([])
    assert made.counts == {"empty": 1}


def test_names_that_no_tokens_write_are_none() -> None:
    pieces = [b"a", b"b", b"(", b"."]
    text = next(f"y{i}." for i in range(99) if drawn(f"y{i}.") == ["c"] or "cc" in drawn(f"y{i}."))
    mask = constraint(pieces, text.encode())[0].track().allowed([])
    wanted = [name.encode() for name in drawn(text) if not set(name) - set("ab")]
    assert mask.tolist() == [
        any(name.startswith(letter) for name in wanted) if wanted else True for letter in pieces
    ]


def one_id(stems: Stems) -> None:
    """Of tokens with the same bytes one is known."""
    for found in (stems.whole, stems.broken):
        found.update({piece: ids[:1] for piece, ids in found.items()})


def last_byte(vocabulary: Vocabulary) -> None:
    """Dots are looked for at the end of a token only."""
    vocabulary.first[:] = False


def no_break(vocabulary: Vocabulary) -> None:
    """A name may be followed by anything."""
    vocabulary.stems.breaks[:] = True


def no_inner(vocabulary: Vocabulary) -> None:
    """Dots further inside are overlooked."""
    vocabulary.dotted_tokens = []


@pytest.mark.parametrize(
    "slip", [lambda v: one_id(v.stems), last_byte, no_break, no_inner], ids=range(4)
)
def test_a_slip_is_caught(slip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Vocabulary.__init__

    def wrong(self: Vocabulary, pieces: list[bytes | None]) -> None:
        right(self, pieces)
        slip(self)

    monkeypatch.setattr(Vocabulary, "__init__", wrong)
    with pytest.raises(AssertionError):
        test_masks_are_those_of_a_look_at_each_token(JOINED)


def test_what_is_not_checked_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that was only looked up ahead counts as allowed."""

    def trusting(self: Names, output: list[int]) -> bool:
        self._rewind_to(output)
        for token in output[len(self.path) :]:
            if not self._current_mask()[token]:
                return False
            self._push_token(token)
        return True

    monkeypatch.setattr(Names, "permits", trusting)
    with pytest.raises(AssertionError):
        test_a_tracker_is_a_function_of_the_path(JOINED)
