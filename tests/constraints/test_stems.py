"""Which tokens go on a name, against looking at every token."""

from __future__ import annotations

import random

import torch

from foretell.constraints.stems import Stems

LETTERS = [b"a", b"b", b"c", b"_", b"(", b"."]
# Without `c`, and twice with the same bytes.
SPARSE = [b"a", b"ab", b"ca", b"b(", b"ab", None, b"", b"b", b"cb.", b"(", b"a_", b"ac(x"]
NAMES = [b"a", b"ab", b"abc", b"cab", b"c", b"bcb", b"a_a", b"cc", b"aca"]


def name_part(piece: bytes) -> bytes:
    end = next((i for i, byte in enumerate(piece) if byte in b"(."), len(piece))
    return piece[:end]


def writable(rest: bytes, pieces: list[bytes | None]) -> bool:
    """Whether tokens write this to its end, the last one perhaps with more after it."""
    if not rest:
        return True
    for piece in pieces:
        part = name_part(piece) if piece else b""
        if part and piece != part and part == rest:
            return True
        if part and piece == part and rest.startswith(part) and writable(rest[len(part) :], pieces):
            return True
    return False


def looked_at(pieces: list[bytes | None], names: list[bytes], typed: bytes) -> list[bool] | None:
    rests = [name[len(typed) :] for name in names if name.startswith(typed)]
    rests = [rest for rest in rests if writable(rest, pieces)]
    if not rests:
        return None
    found = []
    for piece in pieces:
        part = name_part(piece) if piece else b""
        if not piece:
            found.append(False)
        elif part == piece:
            left = [rest[len(part) :] for rest in rests if rest.startswith(part)]
            found.append(any(writable(rest, pieces) for rest in left))
        else:
            found.append(part in rests)
    return found


def test_tokens_that_follow_are_those_that_a_look_at_each_finds() -> None:
    draw = random.Random(3)
    for pieces in (LETTERS, SPARSE):
        stems = Stems(pieces)
        kinds = set()
        for _ in range(300):
            names = draw.sample(NAMES, draw.randint(0, 5))
            chosen = draw.choice(NAMES)
            typed = chosen[: draw.randint(0, len(chosen))]
            mask, wanted = stems.tokens_after(names, typed), looked_at(pieces, names, typed)
            assert (mask is None) == (wanted is None), (names, typed)
            if mask is not None:
                assert mask.tolist() == wanted, (names, typed)
            kinds.add(mask is None)
        assert kinds == {True, False}


def test_all_ids_of_one_text_follow() -> None:
    mask = Stems(SPARSE).tokens_after([b"ab"], b"")
    assert mask is not None and mask[1] and mask[4]
    assert torch.equal(mask.nonzero()[:, 0], torch.tensor([0, 1, 4]))
