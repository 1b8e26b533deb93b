"""What travels between a strategy and the engine, and what a user asks for.

The glossary of shape letters, used in every comment of the project:

    B  requests in flight           L  tokens committed so far, prompt included
    N  nodes of a token tree        V  vocabulary
    H  attention heads              D  width of a head
    E  width of the hidden state    T  tokens packed in one forward

One vocabulary everywhere: `p` is the target's law, `q` a drafter's; a `tree` hangs below the last
committed token, its `row` i is the logits after node i, an `outcome` is what verification made of
it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foretell.errors import BadConfig

if TYPE_CHECKING:
    import torch

    from foretell.core.tree import TokenTree


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and when to stop. Every field is a function of the path, so it holds
    inside drafts too.
    """

    max_new_tokens: int = 64
    min_new_tokens: int = 0
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # over prompt and output, multiplicative
    presence_penalty: float = 0.0  # over the output, additive
    frequency_penalty: float = 0.0  # over the output, per occurrence
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[Sequence[int]] = ()  # token id sequences (texts are encoded on the way in)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int = 0
    n: int = 1
    # None: none; k: the emitted token's and the k best, of the unprocessed row
    logprobs: int | None = None
    logits_processors: Sequence[
        Any
    ] = ()  # transformers' (input_ids (1, L), scores (1, V)) -> scores

    def __post_init__(self) -> None:
        for name, (kind, low, high) in _RANGES.items():
            value = getattr(self, name)
            if name == "logprobs" and value is None:
                continue
            whole = isinstance(value, int) and not isinstance(value, bool)
            if (
                not (whole or (kind is float and isinstance(value, float)))
                or not low <= value <= high
            ):
                what = "a whole number" if kind is int else "a number"
                raise BadConfig.field(
                    name, value, f"{what} from {low}" + (f" to {high}" if high < HUGE else "")
                )
        if self.min_new_tokens > self.max_new_tokens:
            raise BadConfig(
                f"min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}"
            )
        for name in ("stop", "bad_words"):
            kinds: Any = str if name == "stop" else (list, tuple)
            if not all(isinstance(item, kinds) and item for item in getattr(self, name)):
                raise BadConfig.field(name, getattr(self, name), "a list without empty items")


HUGE = 2**62
_RANGES: dict[str, tuple[type, float, float]] = {
    "max_new_tokens": (int, 0, HUGE),
    "min_new_tokens": (int, 0, HUGE),
    "temperature": (float, 0, 100),
    "top_k": (int, 0, HUGE),
    "top_p": (float, 1e-6, 1),
    "min_p": (float, 0, 1),
    "typical_p": (float, 1e-6, 1),
    "repetition_penalty": (float, 0.001, 100),
    "presence_penalty": (float, -100, 100),
    "frequency_penalty": (float, -100, 100),
    "no_repeat_ngram_size": (int, 0, HUGE),
    "seed": (int, -HUGE, HUGE),
    "n": (int, 1, 4096),
    "logprobs": (int, 0, HUGE),
}


@dataclass(slots=True)
class Ask:
    """One forward over `tree`, whose node 0 is the branch's last committed token. Answered with a
    Reply.

    The engine prepends whatever committed tokens the model's cache lacks. Asking again with a tree
    that extends the last one (same leading nodes) computes the new nodes only, so a drafter grows
    its tree level by level. `rows`: nodes whose logits are wanted, None for all new ones. `taps`:
    hidden states wanted, i = entering layer i. `layers`: run only these, in order. `states` (new
    nodes, E): enter layers[0] with these instead of embeddings. A node whose state is no token's
    has token -1, so that its rows are never taken for those of a token.
    """

    tree: TokenTree
    model: str = "target"
    branch: int = 0
    rows: Sequence[int] | None = None
    taps: tuple[int, ...] = ()
    layers: tuple[int, ...] | None = None
    states: torch.Tensor | None = None


@dataclass(slots=True)
class Reply:
    """`logits` (rows asked, V) in float32 or wider; `hidden[i]` (new nodes, E); `nodes`: the rows'
    node ids.
    """

    logits: torch.Tensor
    hidden: dict[int, torch.Tensor]
    nodes: list[int]


@dataclass(slots=True)
class Commit:
    """These tokens are final on this branch. Answered with Kept; after a `reason` the branch takes
    no more.

    `rows` (tokens, V): read for logprobs only; `sources`: who proposed each token; `tested`:
    (depth, accepted).
    """

    tokens: list[int]
    rows: torch.Tensor
    branch: int = 0
    sources: Sequence[str] = ()
    drafted: int = 0
    tested: Sequence[tuple[int, bool]] = ()


@dataclass(slots=True)
class Kept:
    """`tokens`: what is left of a Commit after EOS, stops and lengths; `reason`: why the branch
    ended, or None.
    """

    tokens: list[int]
    reason: str | None


@dataclass(slots=True)
class Fork:
    """`n` more branches that start as copies of this one (rows are shared until written). Answered
    with handles.
    """

    branch: int = 0
    n: int = 1


@dataclass(slots=True)
class Drop:
    """The branch is not needed any more."""

    branch: int


@dataclass(slots=True)
class Finish:
    """The request is done, and this branch is its result. Not answered."""

    branch: int = 0
    reason: str = "stop"
    answers: Sequence[
        tuple[list[int], float, str]
    ] = ()  # all found: (tokens, score, reason), the result first


Message = Ask | Commit | Fork | Drop | Finish | list[Ask]
Steps = Generator[Message, Any, None]


@dataclass(slots=True)
class Outcome:
    """`path`: accepted nodes, root excluded; `token`: what the target says after them.

    `tested`: (node, accepted) for every node the rule looked at, which is all that acceptance may
    be learnt from.
    """

    path: list[int]
    token: int
    tested: list[tuple[int, bool]] = field(default_factory=list)
