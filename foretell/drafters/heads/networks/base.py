"""What all heads have in common: what they read of the target, and what they give."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import nn

from foretell.cache.buffers import Shape
from foretell.cache.cache import Cache
from foretell.drafters.heads.networks.layers import Attend, LayerShape
from foretell.errors import BadConfig

MOST_SHOWN = 8  # numbers of a list, in an error

# Normed states (m, E) -> (m,) which token the output matrix finds the likeliest
Best = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a target that a head has to know."""

    hidden: int  # E
    layers: int
    vocab: int
    heads: int
    kv_heads: int
    width: int  # of a head
    intermediate: int
    theta: float
    eps: float

    def layer_shape(self) -> LayerShape:
        """A layer of the same build."""
        return LayerShape(
            self.hidden,
            self.heads,
            self.kv_heads,
            self.width,
            self.intermediate,
            self.theta,
            self.eps,
        )


@dataclass(frozen=True)
class HeadConfig:
    """A head's settings; `options` are those of its kind."""

    kind: str
    target: TargetShape
    options: dict[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_json(), sort_keys=True))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> HeadConfig:
        return cls(data["kind"], TargetShape(**data["target"]), dict(data.get("options", {})))


@dataclass
class Texts:
    """A batch of texts with the target's states, for training: B texts of n tokens.

    `embedded` (B, n, E) is what the target makes of the tokens, `features` (B, n, F) the taps of
    the token `Head.lag` before each, side by side; before the first stand zeros. `finals` (B, n,
    E): the target's normed last state at each token itself, which its output matrix reads. `shown`
    (B, n) bool: the rows that are told what they should find, see `Head.glance`.
    """

    ids: torch.Tensor  # (B, n)
    embedded: torch.Tensor
    features: torch.Tensor
    finals: torch.Tensor
    shown: torch.Tensor | None = None

    def shift_left(self, tensor: torch.Tensor, shift: int) -> torch.Tensor:
        """(B, n, ...) moved to the left: row i has what stood at i + shift; at the end zeros."""
        if not shift:
            return tensor
        shifted_rows = torch.zeros_like(tensor)
        shifted_rows[:, :-shift] = tensor[:, shift:]
        return shifted_rows


@dataclass
class Drafted:
    """A head's drafts at one depth, for every place of a batch of texts.

    Row i is drafted after token i + depth, of which the texts' own are taken: `states` (B, n, E)
    are read by the output matrix and speak of token i + depth + 1. `feature` (B, n, E): the head's
    estimate of the target's normed last state at token i + depth, where it makes one. Depth 0 is
    drafted from the newest token. `anchors` (n,) bool: the rows that were drafted; None: all.
    """

    depth: int
    states: torch.Tensor
    feature: torch.Tensor | None = None
    anchors: torch.Tensor | None = None


@dataclass
class Nodes:
    """New nodes to draft after: of the text, or below it.

    The last three are there for heads that ask for them: `by_depth`, `reach`, `remembers`.
    """

    embedded: torch.Tensor  # (n, E) of their tokens
    features: torch.Tensor  # (n, F) of the token `Head.lag` before each
    drafted: torch.Tensor  # (n,) whether these were given with the draft, and not kept of the text
    positions: torch.Tensor  # (n,) in the text
    depths: torch.Tensor | None = None  # (n,) below the text's last token; 0 in the text
    # (n, reach, E) of the tokens before, the nearest first; before the first stands that one again
    earlier: torch.Tensor | None = None
    # Nodes of the text that follow one another, and (F,) what was handed on at the token before the
    # first of them; zeros where there is none.
    runs: Sequence[tuple[slice, torch.Tensor]] = ()
    ids: torch.Tensor | None = None  # (n,), for heads with tables of their own


class Head(nn.Module):
    """A network that drafts. Its output matrix is `matrix`, of several the one of a state's depth,
    or else the target's, cut down to some tokens.

    In training `unroll_depths` gives every depth; in drafting `step` computes new nodes.
    """

    kind: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}  # names and defaults of what `config.options` may hold
    trained: ClassVar[tuple[str, ...]] = ()  # those that training builds; published heads have all
    layers = 1  # that keep cache rows
    lag = 1  # how far before its own token the one is whose state a row reads
    cache: type[Cache] = Cache  # of its rows
    by_depth = False  # whether nodes are told how deep they are
    reach = 0  # tokens before its own that a node reads
    remembers = False  # whether nodes of the text read what the node before them handed on
    laws = 1  # of how many depths a row gives logits, side by side, unless options say otherwise
    block = 1  # nodes that it is asked about at once
    depths = 5  # that it is trained for
    deepest = 64  # that it can draft
    decay = 0.8  # of the loss from one depth to the next
    regression = 0.0  # weight of the distance between estimated and true features
    agreement = 1.0  # weight of the divergence of the distributions
    noise = 0.0  # added to the features in training, at 512 tokens a text
    reads_normed = False  # whether it reads its taps through the target's last norm
    sees_first = True  # whether rows see that of the first token, before which no state stands
    bound = False  # whether what it says is not verified: with other weights it is refused
    # By depth and rank, how often its token of that rank was the target's; (): not measured.
    ranks: Sequence[Sequence[float]] = ()

    blank: nn.Parameter | None  # (E,) what stands for a node that has no token
    # Its own output matrix, from what `step` gives to the tokens that it drafts; a ModuleList: one
    # a depth.
    matrix: nn.Module | None

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = config
        self.blank = None
        self.matrix = None

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Raises BadConfig for options that its kind has not, or of another type than theirs."""
        unknown = sorted(options.keys() - cls.options.keys())
        if unknown:
            known_options = ", ".join(sorted(cls.options)) or "nothing"
            raise BadConfig(f"{cls.kind}: has no option {unknown[0]!r}; it takes {known_options}")
        for name, value in options.items():
            option_type: Any = type(cls.options[name])
            is_list = option_type is tuple and type(value) is list
            if not is_list and type(value) is not option_type:
                expectation = (
                    "a list of numbers"
                    if option_type is tuple
                    else f"of type {option_type.__name__}"
                )
                raise BadConfig.field(f"{cls.kind}:{name}", value, expectation)

    def option(self, name: str) -> Any:
        return self.config.options.get(name, self.options[name])

    def whole_option(self, name: str, minimum: int, maximum: int) -> int:
        """An option that is a whole number in this range. Raises BadConfig."""
        value = self.option(name)
        if type(value) is not int or not minimum <= value <= maximum:
            raise BadConfig.field(f"{self.kind}:{name}", value, f"between {minimum} and {maximum}")
        return value

    @property
    def shape(self) -> LayerShape:
        """Its layers' shape: the target's, but for the fields that an option `layer` names."""
        layer_fields = self.option("layer") if "layer" in self.options else {}
        target_layer = self.config.target.layer_shape()
        field_names = {part.name for part in fields(target_layer)} - {"hidden"}
        if unknown := sorted(layer_fields.keys() - field_names):
            raise BadConfig.field(f"{self.kind}:layer", unknown[0], f"of {sorted(field_names)}")
        return replace(target_layer, **layer_fields)

    def own_rows(self) -> int:
        """The option `own_matrix`: tokens that output matrices of its own have rows for, 0: it has
        none. Raises BadConfig.
        """
        return self.whole_option("own_matrix", 0, self.config.target.vocab)

    def chosen_taps(self) -> tuple[int, ...]:
        """The option `taps`. Raises BadConfig for numbers of layers that the target has not."""
        layer_numbers, layer_count = tuple(self.option("taps")), self.config.target.layers
        are_layers = all(
            type(layer_number) is int and 0 <= layer_number <= layer_count
            for layer_number in layer_numbers
        )
        if not are_layers or len(layer_numbers) > layer_count + 1:
            expectation = f"numbers from 0 to {layer_count}, the target's layers"
            raise BadConfig.field(
                f"{self.kind}:taps", list(layer_numbers)[:MOST_SHOWN], expectation
            )
        return layer_numbers

    @property
    def layout(self) -> tuple[Shape, ...]:
        """Shapes of the keys and values that each of its layers stores a row."""
        return ((self.shape.kv_heads, self.shape.width, self.shape.width),) * self.layers

    @property
    def taps(self) -> tuple[int, ...]:
        """States of the target that it reads: i is what enters layer i, `layers` what leaves the
        last.
        """
        raise NotImplementedError

    @torch.no_grad()
    def take_weights(self, target: Any) -> None:
        """Takes over of the target's weights what training is to begin with."""

    def glance(
        self, texts: Texts, answers: torch.Tensor, likeliest: Best, progress: float
    ) -> torch.Tensor | None:
        """Rows (B, n) bool that are shown the truth at this step of training; None: none are.

        answers (B, n) bool: the tokens that are learnt. `progress`: the share of training that is
        over.
        """
        return None

    def unroll_depths(self, texts: Texts, depths: int) -> Iterator[Drafted]:
        raise NotImplementedError

    def step(self, nodes: Nodes, attend: Attend) -> tuple[torch.Tensor, torch.Tensor]:
        """States (n, E) of new nodes for the output matrix, and (n, F) what nodes below them are
        given as features. For a head that drafts all depths at once states (n, K, E).
        """
        raise NotImplementedError

    def depths_of(self, nodes: Nodes) -> torch.Tensor:
        """Whole numbers (n,) or (n, K): the depth at which each state of `step` is drafted."""
        return torch.zeros_like(nodes.positions)
