"""Lets a part of a prompt's tokens go on half way, and keeps as many rows of every layer.

All tokens of a prompt pass the first layers. There the last `window` tokens vote: of the others
those go on that they attend to the most, with their own positions, and the window. Then of every
layer's rows those are kept that the window attends to the most in it; what is generated stays too.
So the prompt takes about half the time, and decoding reads a tenth of the rows, the same number in
every layer.

Paper: Jo et al., FastKV: Decoupling of Context Reduction and KV Cache Compression for Prefill-
Decoding Acceleration, arXiv:2502.01068
Guarantee: lossy: rows of the prompt are given up; with drafts the text is the one without them
Cost: target 1
Needs: layers that can be run one by one; cache rows of every layer, of all of the text
Trains: nothing
Differs:
- `layers` 0 is half of them; the paper's setting is 16 of 32, its layer 15 the last one
- query heads that share a key head vote by their mean; the order of the rows is that of their sum
- all layers keep the same number of rows, where the published code may keep one less of some
- a prompt too short for a window and a row beside it in its tenth keeps as many as that
- a token that leaves out layers has in them, for who reads hidden states, the state that it left
with
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch

from foretell.core.model import Computed
from foretell.core.settings import Odd, Range
from foretell.errors import BadConfig
from foretell.kv.base import KV, top_rows
from foretell.kv.evict.layer_skipping import PIECE, Run, Skipping, check_layers, piece_of
from foretell.kv.voting import Voted

if TYPE_CHECKING:
    from foretell.core.model import Model


@dataclass(frozen=True)
class Fastkv(KV):
    """Shares of a prompt's tokens, and counts of layers, rows and tokens."""

    settles = True

    tsp: Annotated[float, Range(0, 1, open_low=True)] = 0.2  # share of the tokens that go on
    # share of the rows that stay of every layer
    retain: Annotated[float, Range(0, 1, open_low=True)] = 0.1
    layers: Annotated[int, Range(0)] = 0  # first ones, which all tokens pass; 0: half of them
    budget: int = 0  # rows that stay of a layer's head in place of `retain`; 0: that share
    length: int = 0  # tokens that go on in place of `tsp`; 0: that share
    window: Annotated[int, Range(1)] = 8  # last tokens, which vote, go on and stay
    kernel: Annotated[int, Odd(1)] = 7  # neighbours that a vote is smoothed over

    def __post_init__(self) -> None:
        super().__post_init__()
        min_rows = self.window + 1
        if self.budget and self.budget < min_rows:
            reserved_rows = f"a window of {self.window} and a row beside it"
            raise BadConfig.field(
                "fastkv:budget", self.budget, f"0, or at least {min_rows}, for {reserved_rows}"
            )
        if self.length and self.length < max(min_rows, self.budget):
            allowed_values = (
                f"0, or at least {max(min_rows, self.budget)}, as rows that stay are theirs"
            )
            raise BadConfig.field("fastkv:length", self.length, allowed_values)
        if not (self.length or self.budget) and self.retain > self.tsp:
            allowed_values = f"at most {self.tsp}, the share of the tokens that go on"
            raise BadConfig.field("fastkv:retain", self.retain, allowed_values)

    def build_policy(self, target: Model) -> Halfway:
        self.check_target(target)
        layer_count = check_layers("fastkv", target)
        if self.layers >= layer_count:
            allowed_values = f"below {layer_count}, the layers of {target.name}"
            raise BadConfig.field("fastkv:layers", self.layers, allowed_values)
        cut_layer = self.layers or layer_count // 2
        return Halfway(
            0,
            0,
            window=self.window,
            kernel=self.kernel,
            pool="mean",
            cut_layer=cut_layer,
            layers=layer_count,
            settings=self,
        )

    def count_rows(self, prompt: int) -> int:
        """How many stay of a prompt of so many tokens."""
        rows = self.budget or max(int(prompt * self.retain), self.window + 1)
        return min(prompt, rows)

    def count_going(self, prompt: int) -> int:
        """How many of its tokens go on."""
        return min(prompt, max(self.length or int(prompt * self.tsp), self.count_rows(prompt)))


@dataclass
class Halfway(Skipping, Voted):
    settings: Fastkv = Fastkv()
    going: int = 0  # tokens of the prompt that go on

    def begin_text(self, prompt: int) -> None:
        self.budget, self.going = (
            self.settings.count_rows(prompt),
            self.settings.count_going(prompt),
        )
        self.prompt = prompt
        super().begin_text(prompt)

    def fork(self) -> Halfway:
        twin = super().fork()
        assert isinstance(twin, Halfway)
        return twin

    def room_of(self, length: int, prompt: int) -> int:
        if prompt == self.prompt:
            return self.room_left(length)
        twin = self.fork()
        twin.begin_text(prompt)
        return twin.room_left(length)

    @property
    def leaves_out(self) -> bool:
        return self.going < self.prompt

    def goes_on(self, job: Any, taps: Sequence[int], run: Run) -> Computed:
        assert self.waiting is not None
        going_tokens = self.choose_tokens()
        token_positions = going_tokens.tolist()
        going_states = self.waiting.read_states((self.cut_layer,), 0, self.prompt)[going_tokens]
        window_start = self.going - self.window
        upper_layers = range(self.cut_layer, self.layers)
        total_width = 0
        for piece_start in range(0, window_start, PIECE):
            piece_range = slice(piece_start, min(window_start, piece_start + PIECE))
            total_width += run(
                [
                    piece_of(
                        job,
                        piece_start,
                        token_positions[piece_range],
                        going_states[piece_range],
                        upper_layers,
                    )
                ],
                (),
            ).width
        window_job = piece_of(
            job,
            window_start,
            token_positions[window_start:],
            going_states[window_start:],
            upper_layers,
            watcher=self,
        )
        window_job.rows = [self.window - 1] if job.rows else []
        window_forward = run([window_job], taps)
        window_states = {
            tap: going_states[self.window - len(job.tokens) :]
            for tap, going_states in window_forward.hidden.items()
        }
        return Computed(
            window_forward.logits,
            window_states,
            window_forward.computed_by,
            total_width + window_forward.width,
        )

    def choose_tokens(self) -> torch.Tensor:
        """The tokens (going,) that go on: the window, and those it attends to in the last layer
        that all have passed.
        """
        last_layer = self.cut_layer - 1
        given_scores = [
            note_store[last_layer]
            for note_store in (self.received, self.pending)
            if last_layer in note_store
        ]
        given_scores += self.nodes[last_layer].values()
        padded_scores = [
            torch.nn.functional.pad(part, (0, self.prompt - part.shape[1])) for part in given_scores
        ]
        token_votes = self.smooth_votes(torch.stack(padded_scores).sum(0)).sum(0)
        voted_tokens = top_rows(token_votes, self.going - self.window).sort().values
        window_tokens = torch.arange(
            self.prompt - self.window, self.prompt, device=voted_tokens.device
        )
        return torch.cat([voted_tokens, window_tokens])

    def choose_rows(self, cache: Any, layer: int, received: torch.Tensor) -> torch.Tensor:
        row_count = self.going if layer >= self.cut_layer else self.prompt
        return super().choose_rows(cache, layer, received[:, :row_count])

    def evict_rows(self, cache: Any) -> None:
        super().evict_rows(cache)
        self.waiting = None
