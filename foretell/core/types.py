"""Messages that travel between a strategy and the engine, and what a user asks for.

The glossary of shape letters, used in every comment of the project:

    B  requests in flight           L  tokens committed so far, prompt included
    N  nodes of a token tree        V  vocabulary
    H  attention heads              D  width of a head
    E  width of the hidden state    T  tokens packed in one forward

One vocabulary everywhere: `p` is the target's law, `q` a drafter's; a `tree` hangs below the last
committed token, its `row` i is the logits after node i, an `outcome` is what verification made of
it. A *branch* is one text of a request: every request begins with branch 0.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foretell.core.sampling_options import Sampling as Sampling

if TYPE_CHECKING:
    import torch

    from foretell.core.tree import TokenTree


# --- what a strategy yields, and what it is answered with


@dataclass(slots=True)
class Ask:
    """A forward over `tree`, whose node 0 is the branch's last committed token.

    Answered with a Reply. The engine prepends whatever committed tokens the model's cache lacks.
    Asking again with a tree that extends the last one (same leading nodes) computes the new nodes
    only, so a drafter grows its tree level by level. What an ask means is up to the cache it goes
    to (cache.py); this is what an ordinary one makes of it.
    """

    tree: TokenTree
    model: str = "target"
    branch: int = 0
    rows: Sequence[int] | None = None  # nodes whose logits are wanted; None: all new ones
    taps: tuple[int, ...] = ()  # hidden states wanted, i = entering layer i
    # Run only these, in order; (i, "attention") and (i, "mlp") are the halves of layer i.
    layers: tuple[int | tuple[int, str], ...] | None = None
    lasting: bool = False  # later asks run no other layers either: accepted rows of these are kept
    # Levels below the last node of a chain that the model may go on by: see Reply.followed.
    follow: int = 0
    # (n, E): the last n nodes enter layers[0] with these instead of their embeddings; there may be
    # those of tokens before the tree among them. A node whose state is no token's has token -1, so
    # that its cache rows are never taken for a token's.
    states: torch.Tensor | None = None
    # (n, E): what a model that feeds on the target's hidden states reads beside the last n nodes'
    # tokens. Nodes before them read those the target kept. These are estimates: no row is kept.
    features: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Tokens to compute, when all of it is new."""
        return len(self.tree)


@dataclass(slots=True)
class Reply:
    """The answer to an Ask. Rows and hidden states lie in the order of `nodes` and `new`."""

    logits: torch.Tensor  # (rows asked, V), in float32 or wider
    hidden: dict[int, torch.Tensor]  # of each tap (new nodes, E)
    nodes: list[int]  # the tree's nodes whose rows these are
    # the tree's nodes whose hidden states these are; below 0: the text before it
    new: list[int] = field(default_factory=list)
    # What follows the last node, at most `follow` levels: (token, its probability, place of the one
    # it follows, -1 the last node), parents first. None, where the model takes one forward a level.
    followed: list[tuple[int, float, int]] = field(default_factory=list)
    seconds: float = 0.0  # this ask's share of the forward's time
    computed_by: str = "torch"


@dataclass(slots=True)
class Commit:
    """Makes tokens of a branch final. Answered with Kept; after a `reason` it takes no more.

    `rows` (tokens, V): read for logprobs only; `sources`: who proposed each token; `tested`:
    (depth, accepted) for every node that verification looked at.
    """

    tokens: list[int]
    rows: torch.Tensor
    branch: int = 0
    sources: Sequence[str] = ()
    drafted: int = 0
    tested: Sequence[tuple[int, bool]] = ()
    logprobs: Sequence[Any] = ()  # as of stats.row_logprobs, where the rows are gone


@dataclass(slots=True)
class Tell:
    """Tells who streams a branch what follows its text for now. Answered with None.

    `placed`: what changed, each (place after the prompt, token), None: it was taken back;
    `length`: places that there are, None: any number.
    """

    placed: Sequence[tuple[int, int | None]]
    length: int | None = None
    branch: int = 0


@dataclass(slots=True)
class Kept:
    """`tokens`: what is left of a Commit after EOS, stops and lengths; `reason`: why it ended."""

    tokens: list[int]
    reason: str | None


@dataclass(slots=True)
class Open:
    """Opens a branch with a text of its own. Answered with its handle.

    `tokens` is its prompt, for `model`, whose context it has to fit. A `quiet` one is a means only:
    it has no stops and no length limit but the context, and counts in no statistics.
    """

    tokens: Sequence[int]
    model: str = "target"
    quiet: bool = True


@dataclass(slots=True)
class Fork:
    """`n` more branches that start as copies of this one. Answered with their handles.

    Cache rows are shared until one of them writes. `quiet`: they are a means only, as of Open.
    """

    branch: int = 0
    n: int = 1
    quiet: bool = False


@dataclass(slots=True)
class Drop:
    """The branch is not needed any more. Answered with None."""

    branch: int


@dataclass(slots=True)
class Together:
    """Runs several generators of messages side by side. Answered with what each returned.

    `first`: with what the first to end returned, and None for the others, which are closed. What
    one of them raises is raised where this was yielded, and the others are closed.
    """

    steps: Sequence[Steps]
    first: bool = False


@dataclass(slots=True)
class Call:
    """Runs a slow function outside the engine's thread, and is answered with what it returns.

    Other requests go on meanwhile. What it raises is raised where it was yielded.
    """

    function: Callable[[], Any]


@dataclass(slots=True)
class Finish:
    """The request is done, and this branch is its result. Not answered."""

    branch: int = 0
    reason: str = "stop"
    # all texts found: (tokens, score, reason), the result first
    answers: Sequence[tuple[list[int], float, str]] = ()


Message = Ask | Commit | Tell | Open | Fork | Drop | Together | Call | Finish | list[Ask]
Steps = Generator[Message, Any, Any]


# --- what verification finds


@dataclass(slots=True)
class Outcome:
    """`path`: accepted nodes, root excluded; `token`: what the target says after them.

    `token` is None where the path's last node ends the text: nothing may be asked after an end.
    `tested`: (node, accepted) for every node the rule looked at, which is all that acceptance may
    be learnt from.
    """

    path: list[int]
    token: int | None
    tested: list[tuple[int, bool]] = field(default_factory=list)
