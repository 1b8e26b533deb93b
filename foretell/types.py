"""What travels between a strategy and the engine, and what a user asks for.

The glossary of shape letters, used in every comment of the project:

    B  requests in flight           L  tokens committed so far, prompt included
    N  nodes of a token tree        V  vocabulary
    H  attention heads              D  width of a head
    E  width of the hidden state    T  tokens packed in one forward

One vocabulary everywhere: `p` is the target's law, `q` a drafter's; a `tree` hangs below the last committed token,
its `row` i is the logits after node i, an `outcome` is what verification made of it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foretell.errors import BadConfig

if TYPE_CHECKING:
    import torch

    from foretell.tree import TokenTree


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and when to stop: the same names in Python, on the command line and over HTTP.

    Every field is a function of the path, so it holds inside drafts as well. Raises BadConfig out of range.
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
    logprobs: int | None = None  # None: none; k: the emitted token's and the k best, of the unprocessed row
    logits_processors: Sequence[Any] = ()  # transformers' (input_ids (1, L), scores (1, V)) -> scores

    def __post_init__(self) -> None:
        checks: list[tuple[str, bool, str]] = [
            ("max_new_tokens", _whole(self.max_new_tokens, 0), "a whole number, 0 or more"),
            ("min_new_tokens", _whole(self.min_new_tokens, 0), "a whole number, 0 or more"),
            ("temperature", _real(self.temperature, 0, 100), "between 0 and 100"),
            ("top_k", _whole(self.top_k, 0), "a whole number, 0 (off) or more"),
            ("top_p", _real(self.top_p, 0, 1) and self.top_p > 0, "above 0 and at most 1"),
            ("min_p", _real(self.min_p, 0, 1), "between 0 and 1"),
            ("typical_p", _real(self.typical_p, 0, 1) and self.typical_p > 0, "above 0 and at most 1"),
            ("repetition_penalty", _real(self.repetition_penalty, 1e-3, 100), "between 0.001 and 100 (1 is off)"),
            ("presence_penalty", _real(self.presence_penalty, -100, 100), "between -100 and 100"),
            ("frequency_penalty", _real(self.frequency_penalty, -100, 100), "between -100 and 100"),
            ("no_repeat_ngram_size", _whole(self.no_repeat_ngram_size, 0), "a whole number, 0 (off) or more"),
            ("seed", _whole(self.seed, -(2**63)), "a whole number"),
            ("n", _whole(self.n, 1), "a whole number, 1 or more"),
            ("logprobs", self.logprobs is None or _whole(self.logprobs, 0), "None or a whole number, 0 or more"),
        ]
        for name, good, allowed in checks:
            if not good:
                raise BadConfig.field(name, getattr(self, name), allowed)
        if self.min_new_tokens > self.max_new_tokens:
            raise BadConfig(f"min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}")
        if not all(isinstance(s, str) and s for s in self.stop):
            raise BadConfig.field("stop", self.stop, "non-empty texts")
        if not all(len(w) for w in self.bad_words):
            raise BadConfig.field("bad_words", self.bad_words, "non-empty")


def _whole(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _real(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


@dataclass(slots=True)
class Ask:
    """One forward over `tree`, whose node 0 is the branch's last committed token. Answered with a Reply.

    The engine prepends whatever committed tokens the model's cache lacks. Asking again with a tree that extends the
    last one (same leading nodes) computes the new nodes only, so a drafter grows its tree level by level.
    `rows`: nodes whose logits are wanted, None for all new ones. `taps`: hidden states wanted, i = entering layer i.
    `layers`: run only these, in order. `states` (new nodes, E): enter layers[0] with these instead of embeddings.
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
    """`logits` (rows asked, V) in float32 or wider; `hidden[i]` (new nodes, E); `nodes`: the rows' node ids."""

    logits: torch.Tensor
    hidden: dict[int, torch.Tensor]
    nodes: list[int]


@dataclass(slots=True)
class Commit:
    """These tokens are final on this branch. Answered with Kept; after a `reason` the branch takes no more.

    `rows` (len(tokens), V) are the target's, for logprobs. `sources`: who proposed each token. `tested`: (depth,
    accepted) of the nodes verification looked at, and `drafted` how many there were, for the numbers.
    """

    tokens: list[int]
    rows: torch.Tensor
    branch: int = 0
    sources: Sequence[str] = ()
    drafted: int = 0
    tested: Sequence[tuple[int, bool]] = ()


@dataclass(slots=True)
class Kept:
    """`tokens`: what is left of a Commit after EOS, stops and lengths; `reason`: why the branch ended, or None."""

    tokens: list[int]
    reason: str | None


@dataclass(slots=True)
class Fork:
    """`n` more branches that start as copies of this one (rows are shared until written). Answered with handles."""

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


Message = Ask | Commit | Fork | Drop | Finish | list[Ask]
Steps = Generator[Message, Any, None]


@dataclass(slots=True)
class Outcome:
    """`path`: accepted nodes, root excluded; `token`: what the target says after them.

    `tested`: (node, accepted) for every node the rule looked at, which is all that acceptance may be learnt from.
    """

    path: list[int]
    token: int
    tested: list[tuple[int, bool]] = field(default_factory=list)


@dataclass(slots=True)
class Stats:
    """The numbers of one request. Seconds are wall clock; a forward shared by a batch counts in full for each."""

    prompt_tokens: int = 0
    tokens: int = 0
    first_tokens: int = 0  # committed by the forward that ended the prefill
    steps: int = 0  # target forwards after that one
    drafted: int = 0
    accepted: int = 0
    by_depth: list[list[int]] = field(default_factory=list)  # [tested, accepted] at draft depth 1, 2, ...
    calls: dict[str, int] = field(default_factory=dict)  # forwards by model
    draft_s: float = 0.0
    target_s: float = 0.0
    host_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0

    @property
    def mat(self) -> float:
        """Tokens committed a step, over all steps after prefill; plain decoding = 1.0."""
        return (self.tokens - self.first_tokens) / self.steps if self.steps else 1.0

    @property
    def tokens_per_s(self) -> float:
        """After prefill."""
        later = self.tokens - self.first_tokens
        return later / max(self.total_s - self.ttft_s, 1e-9) if later else 0.0

    @property
    def tpot_s(self) -> float:
        """Seconds a token after prefill."""
        return 1 / self.tokens_per_s if self.tokens_per_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self.__slots__}
        return {**own, "MAT": self.mat, "tokens_per_s": self.tokens_per_s, "tpot_s": self.tpot_s}
