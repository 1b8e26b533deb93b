"""Traces: each step of a generation as text, and where two generations part.

For the question "why do my tokens differ?": `foretell trace` prints it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretell.core.tree import TokenTree
    from foretell.core.types import Outcome, Reply

Decode = Callable[[Sequence[int]], str]
LEGEND = "+ accepted   - tested and refused   . not tested"


@dataclass(frozen=True, slots=True)
class TraceStep:
    """A commit of a branch.

    `position` counts the tokens before it, the prompt's included. `tree` is what was drafted below
    the last of them, `tested` the nodes that verification looked at, each with whether it was
    accepted, `path` the accepted nodes from the root's child down. `tokens` became final; beside
    each stand its source (a drafter, or "target") and its margin, the difference between the two
    best logits there. `backend` computed the forward; `seconds` is the step's wall-clock time.
    """

    position: int
    tree: TokenTree
    tested: list[tuple[int, bool]]
    path: list[int]
    tokens: list[int]
    sources: list[str]
    margins: list[float]
    backend: str
    seconds: float


class Steps(deque[TraceStep]):
    """The steps of a request that were not told of yet; called with each new one."""

    __call__ = deque.append


def trace_step(
    position: int,
    tree: TokenTree,
    reply: Reply,
    outcome: Outcome,
    tokens: list[int],
    sources: Sequence[str],
) -> TraceStep:
    """The step in which `reply` answered `tree`, `outcome` was found, and `tokens` were kept."""
    rows = reply.logits[[0, *outcome.path]][: len(tokens)]
    best_logits = rows.topk(2).values
    margins = (best_logits[:, 0] - best_logits[:, 1]).tolist()
    return TraceStep(
        position=position,
        tree=tree,
        tested=outcome.tested,
        path=outcome.path,
        tokens=tokens,
        sources=list(sources[: len(tokens)]),
        margins=margins,
        backend=reply.computed_by,
        seconds=reply.seconds,
    )


def to_dict(step: TraceStep) -> dict[str, Any]:
    """A step as JSON has it. Node 0 of the tree is the last token before the step."""
    tree = step.tree
    return {
        "position": step.position,
        "tree": {"tokens": tree.tokens, "parents": tree.parents, "sources": tree.sources},
        "tested": step.tested,
        "path": step.path,
        "tokens": step.tokens,
        "sources": step.sources,
        "margins": step.margins,
        "executor": step.backend,
        "seconds": step.seconds,
    }


@dataclass(frozen=True, slots=True)
class Place:
    """A committed token and where it was committed."""

    step: int  # from 0
    position: int  # tokens before it, the prompt's included
    token: int
    source: str
    margin: float


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token in which two generations differ. A side is None where its output has ended.

    `index` counts output tokens from 0.
    """

    index: int
    left: Place | None
    right: Place | None


def list_places(steps: Sequence[TraceStep]) -> list[Place]:
    """Every committed token in order."""
    listed_places = []
    for number, step in enumerate(steps):
        committed = zip(step.tokens, step.sources, step.margins, strict=True)
        for offset, (token, source, margin) in enumerate(committed):
            listed_places.append(Place(number, step.position + offset, token, source, margin))
    return listed_places


def first_divergence(
    left_steps: Sequence[TraceStep], right_steps: Sequence[TraceStep]
) -> Divergence | None:
    """The first difference between the tokens of two traces; None if they are identical."""
    left_places = list_places(left_steps)
    right_places = list_places(right_steps)
    for index in range(max(len(left_places), len(right_places))):
        left_place = left_places[index] if index < len(left_places) else None
        right_place = right_places[index] if index < len(right_places) else None
        if left_place is None or right_place is None or left_place.token != right_place.token:
            return Divergence(index, left_place, right_place)
    return None


def render_steps(steps: Sequence[TraceStep], decode: Decode) -> str:
    """Every step as a paragraph: its tree, indented, and what was committed."""
    parts = [LEGEND] if any(len(step.tree) > 1 for step in steps) else []
    for number, step in enumerate(steps, 1):
        parts.append("\n".join(_step_lines(number, step, decode)))
    return "\n\n".join(parts)


def render_divergence(
    divergence: Divergence | None, count: int, method: str, decode: Decode
) -> str:
    """The comparison of a method (left) with plain decoding (right) in words.

    `count`: the number of output tokens.
    """
    if divergence is None:
        return f"identical to plain decoding: {count} tokens"
    side = divergence.left or divergence.right
    assert side is not None, "one of the two has a token there"
    location = f"output token {divergence.index + 1}, position {side.position}"
    if divergence.left is not None:
        location += f", step {divergence.left.step + 1}"
    lines = [f"first divergence from plain decoding: {location}"]
    names = {method: divergence.left, "plain": divergence.right}
    width = max(len(name) for name in names)
    for name, place in names.items():
        if place is None:
            lines.append(f"  {name:<{width}}  has ended")
        else:
            text = f"{_quote_token(place.token, decode)} from {place.source}"
            lines.append(f"  {name:<{width}}  {text}, margin {place.margin:.3g}")
    lines.append(
        "A margin near 0 is a tie, which rounding decides; a large one is an error of the method. "
        f"`foretell audit --method {method}` tells them apart."
    )
    return "\n".join(lines)


def _step_lines(number: int, step: TraceStep, decode: Decode) -> Iterator[str]:
    drafted = len(step.tree) - 1
    yield (
        f"step {number} at position {step.position}: {drafted} drafted, {len(step.tested)} tested, "
        f"{len(step.path)} accepted; {step.backend}, {1000 * step.seconds:.1f} ms"
    )
    accepted = set(step.path)
    tested = {node for node, _ in step.tested}
    for node in _depth_first(step.tree):
        mark = "+" if node in accepted else "-" if node in tested else "."
        indent = "  " * step.tree.depths[node]
        drafted_token = _quote_token(step.tree.tokens[node], decode)
        yield f"{indent}{mark} {drafted_token} {step.tree.sources[node]}".rstrip()
    for token, source, margin in zip(step.tokens, step.sources, step.margins, strict=True):
        yield f"  committed {_quote_token(token, decode)} from {source}, margin {margin:.3g}"


def _depth_first(tree: TokenTree) -> Iterator[int]:
    """The nodes below the root, each before its children, children in the order of their tries."""
    waiting = list(reversed(dict.fromkeys(tree.tries[0])))
    while waiting:
        node = waiting.pop()
        yield node
        waiting += reversed(dict.fromkeys(tree.tries[node]))


def _quote_token(token: int, decode: Decode) -> str:
    """A token as text in quotes, with its id: a token may be a part of a character."""
    return f"{decode([token])!r} ({token})"
