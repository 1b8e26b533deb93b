"""Models made for laws: their logits are a hash of exactly what a node sees.

Any wrong mask, position, kept or lost row changes the answer, which a transformer would blur.

    Toy            sees tokens and positions; cache rows hold both
    ToyParallel    is rough in drafts, as a model with parallel layers
    ToyRetrieving  reads a part of a target's rows
    ToyHead        a head on a target's hidden states: sees a feature (2 numbers) a token as well
    ToyRecurrent   has a state in place of rows, which it cannot take back

One more, whose layers can be run one by one, is in toy_layers.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.cache.states import NO_STATES
from foretell.core.model import STEP, Computed, Model
from foretell.core.tokenizer_bytes import letter_words
from foretell.core.types import Ask, Reply
from foretell.drafters.heads.networks.folder import head_kinds
from foretell.errors import Unsupported
from foretell.kv.select.base import Selecting as Selection
from foretell.models.decoder.parallel import distrust_drafts
from foretell.models.decoder.retrieved import RetrievedCache, Selecting
from foretell.ops.attention import Attention
from foretell.ops.row_attention import Listed
from foretell.testing.toy_hashes import (
    GOLDEN,
    RELATIVE,
    feature_hash,
    fed_key,
    hidden_state,
    kept_spread,
    logits_of,
    mix_bits,
    path_key,
    spread_numbers,
)
from foretell.verification.judge_model import LinearJudge

if TYPE_CHECKING:
    from foretell.core.request import Request

TAP = 7919  # what each tap adds to it
ROUGH = 2.0**20  # what a rough node's position in the cache is moved by


def stack_rows(rows: Sequence[np.ndarray], width: int) -> torch.Tensor:
    """Stacks R rows to (R, width), also none."""
    return torch.from_numpy(np.stack(rows) if rows else np.zeros((0, width)))


def _selection_mask(
    job: Job,
    layer: int,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """The mask (n, rows) of nodes that see what a policy selects for them alone, in this layer."""
    policy = job.cache.policy
    assert isinstance(policy, Selection), "toys attend to nothing"
    selection = policy.select_rows(job, Attention(layer, q, keys, values, mask, 1.0))
    selection = selection.mask_rows(keys.shape[1]) if isinstance(selection, Listed) else selection
    is_seen = (
        q.new_ones(q.shape[1], keys.shape[1], dtype=torch.bool)
        if selection is None
        else selection[0]
    )
    additive_mask = torch.where(is_seen, 0.0, -torch.inf).double()
    return additive_mask if mask is None else additive_mask + mask


class Toy(Model):
    """`sharpness`: spread of the logits. `window`: positions a node sees back, itself included;
    None: all.

    `noise` makes a relative that agrees in part: a draft model. `copy` makes texts that repeat: the
    probability mass of the token that followed the same token before grows. `hidden[0]`,
    `hidden[1]` and `hidden[2]`, (T, 2) float64, are hashes of what each node sees, as logits are.
    """

    caps = Model.caps | {"taps"}
    layers = 2  # they store the same, so that a layer left out is noticed

    def __init__(
        self,
        vocab: int = 4,
        seed: int = 0,
        noise: float = 0.0,
        sharpness: float = 4.0,
        context: int = 4096,
        copy: float = 0.0,
        window: int | None = None,
        name: str = "toy",
    ):
        self.name = name
        self.vocab = vocab
        self.tokenizer = letter_words(vocab)
        self.context = context
        self.seed = seed
        self.noise = noise
        self.sharpness = sharpness
        self.copy = copy
        self.window = window
        self.layout = ((1, 1, 1),) * self.layers
        self.dtype = torch.float64
        self.device = torch.device("cpu")

    @property
    def mask_token(self) -> int:
        """The id that stands for a masked token where a block is to be filled in."""
        return self.vocab - 1

    @property
    def recipe(self) -> Mapping[str, Any] | None:  # type: ignore[override]
        """The recipe of a class of this file: what others need is not known here."""
        if type(self).__module__ != __name__:
            return None
        fields = inspect.signature(type(self).__init__).parameters
        arguments = {name: getattr(self, name) for name in fields if name != "self"}
        return {"make": f"{__name__}:{type(self).__name__}", "arguments": arguments}

    @property
    def row_layers(self) -> list[int]:
        """The layers that keep rows."""
        return [layer for layer, shape in enumerate(self.layout) if shape is not None]

    def row(self, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Logits (V,) of a node that sees these tokens at these positions, the newest last in
        position.
        """
        seen_bytes = (np.float64(tokens).tobytes(), np.float64(positions).tobytes())
        hash_settings = (self.vocab, self.seed, self.sharpness, self.copy, self.noise)
        return logits_of(*seen_bytes, *hash_settings).copy()

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        row_indices: torch.Tensor,
        first_job: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        row_numbers = row_indices.tolist()
        wanted_nodes = set(row_numbers)
        logits: dict[int, np.ndarray] = {}
        states: dict[int, list[np.ndarray]] = {tap: [] for tap in taps}
        first_node = 0
        for job in STEP.get():
            end_node = first_node + len(job.tokens)
            keys = token_ids[:, first_node:end_node, None].double()
            values = self._node_values(job, positions[:, first_node:end_node, None].double())
            for layer in self.row_layers:
                all_keys, all_values = job.write(layer, keys, values)
            mask = job.mask(self.window, torch.float64)
            if job.cache.segments:
                all_keys, all_values, mask = self._with_prefix(
                    job, all_keys, all_values, mask, self.row_layers[-1]
                )
            if job.watched:
                mask = _selection_mask(job, self.row_layers[-1], keys, all_keys, all_values, mask)
            every_token, every_value = all_keys[0, :, 0].numpy(), all_values[0].numpy()
            visible = None if mask is None else (mask == 0).numpy()
            for node in range(len(job.tokens)):
                if first_node + node not in wanted_nodes and not taps:
                    continue
                visible_rows = slice(None) if visible is None else visible[node]
                seen_tokens, seen_values = every_token[visible_rows], every_value[visible_rows]
                if first_node + node in wanted_nodes:
                    logits[first_node + node] = self._row_logits(seen_tokens, seen_values)
                for tap in taps:
                    path_hash = self._path_hash(seen_tokens, seen_values)
                    states[tap].append(hidden_state(path_hash, self.seed + TAP * (tap + 1)))
            first_node = end_node
        tapped_states = {tap: torch.from_numpy(np.stack(states[tap])) for tap in taps}
        return stack_rows(
            [logits[row_number] for row_number in row_numbers], self.vocab
        ), tapped_states

    def _with_prefix(
        self,
        job: Job,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        layer: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows of shared prefixes and then these, and which of them the new nodes see."""
        if mask is None:
            mask = torch.zeros(len(job.tokens), keys.shape[1], dtype=torch.float64)
        for segment in reversed(job.cache.segments):
            prefix_mask = job.prefix_mask(segment.start, segment.end, self.window, torch.float64)
            if prefix_mask is None:
                prefix_mask = mask.new_zeros(len(mask), len(segment.tokens))
            keys = torch.cat([segment.k[layer], keys], 1)
            values = torch.cat([segment.v[layer], values], 1)
            mask = torch.cat([prefix_mask, mask], 1)
        return keys, values, mask

    def layer_parallel(self, group_size: int) -> ToyParallel:
        return ToyParallel(self, group_size)

    def retrieving_model(self, max_rows: int, chunk_size: int) -> ToyRetrieving:
        return ToyRetrieving(self, max_rows, chunk_size)

    def build_head(self, method: str, kind: str, folder: str, shape: Any) -> Model:
        head_settings = (self.vocab, self.seed, 0.3, self.sharpness, self.context, "head")
        head = ToyHead(*head_settings, head_kinds()[kind].laws, kind)
        head.plain.copy = self.copy
        return head

    def judge(self) -> LinearJudge:
        return LinearJudge(torch.tensor([9.0, 0.0]), torch.tensor(2.0))

    # --- what a node's value is (ToyHead has more in it), and what is made of the values it sees

    def _node_values(self, job: Job, positions: torch.Tensor) -> torch.Tensor:
        """Values (1, n, W) of the job's new nodes."""
        return positions

    def _path_hash(self, tokens: np.ndarray, values: np.ndarray) -> np.uint64:
        """The hash of all that a node sees: tokens (n,), values (n, W)."""
        return path_key(tokens, values[:, 0])

    def _row_logits(self, tokens: np.ndarray, values: np.ndarray) -> np.ndarray:
        return self.row(tokens, values[:, 0])


class ToyParallel(Toy):
    """A Toy that is rough below the root of a tree, for laws (models/decoder/parallel.py has real
    ones).

    What a rough node writes to the cache says so, and every row that sees it is another.
    """

    rough = 0.2  # noise of rows that see rough nodes
    recipe = None  # type: ignore[assignment]

    def __init__(self, toy: Toy, group_size: int):
        vars(self).update(vars(toy))
        self.name = f"{toy.name}[groups of {group_size}]"
        self.size = group_size
        self.caps = toy.caps - {"taps", "layers"}

    def _node_values(self, job: Job, positions: torch.Tensor) -> torch.Tensor:
        return positions + ROUGH if self.size > 1 and job.first > 0 else positions

    def _row_logits(self, tokens: np.ndarray, values: np.ndarray) -> np.ndarray:
        row = self.row(tokens, values[:, 0] % ROUGH)
        if self.size == 1 or values.max() < ROUGH:
            return row
        relative_logits = spread_numbers(
            self._path_hash(tokens, values), self.seed + RELATIVE, self.vocab
        )
        return row + self.rough * self.sharpness * relative_logits

    def forward(self, jobs: Sequence[Job]) -> list[Reply]:
        replies = super().forward(jobs)
        for job in jobs if self.size > 1 else ():
            distrust_drafts(job)
        return replies


class ToyRetrieving(Toy):
    """A Toy over retrieved rows of its own, for laws (models/decoder/retrieving.py has real ones).

    A hash of a chunk's tokens and of the last one says how near they are.
    """

    copies_rows = True
    recipe = None  # type: ignore[assignment]

    def __init__(self, toy: Toy, max_rows: int, chunk_size: int):
        vars(self).update(vars(toy))
        self.base = toy
        self.name = f"{toy.name}[{max_rows} retrieved rows]"
        self.budget, self.chunk = max_rows, chunk_size
        self.caps = toy.caps - {"taps", "layers", "parts"}

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        cache = RetrievedCache(self.layout, self.dtype, self.device, self.budget, self.chunk)
        return self.prepare_cache(cache, request, beside)

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        for job in jobs:
            if isinstance(job, Selecting):
                for layer in self.row_layers:
                    self._select_chunks(job, layer)
        other_jobs = [job for job in jobs if not isinstance(job, Selecting)]
        if other_jobs:
            return super().compute(other_jobs, taps)
        return Computed(torch.zeros(0, self.vocab, dtype=self.dtype), width=len(jobs))

    def _select_chunks(self, job: Selecting, layer: int) -> None:
        keys, _ = job.cache.rows_beside(layer)
        chunks = job.cache.chunks
        chunk_size = chunks.size
        scores = []
        for first_row in range(0, chunks.chunk_count * chunk_size, chunk_size):
            tokens = keys[0, first_row : first_row + chunk_size, 0].numpy()
            chunk_hash = path_key(np.append(tokens, job.tokens[-1]), np.arange(len(tokens) + 1.0))
            scores.append(spread_numbers(chunk_hash, self.seed + layer, 1)[0])
        job.select(layer, torch.tensor([scores]))


class ToyHead(Toy):
    """A drafter's head on the target's hidden states, for laws.

    A node reads its token and a feature (2,), from `job.features` (n, 2) of the job's new nodes;
    None: they have none. Cache rows hold token, position and the feature's hash. Its logits are
    those of a Toy with the same seed, plus `noise` times a hash of every (token, position, feature)
    it sees: it agrees with its target in part, and any wrong or missing feature changes its answer.
    Its own hidden states, (T, 2), may be the features of nodes that follow. A row holds `laws` laws
    side by side; those after the first agree by chance. `kind`: of the head whose cache it has.
    """

    feeds = (2,)  # the taps of the target that its nodes read

    def __init__(
        self,
        vocab: int = 4,
        seed: int = 0,
        noise: float = 0.5,
        sharpness: float = 4.0,
        context: int = 4096,
        name: str = "head",
        laws: int = 1,
        kind: str = "eagle3",
    ):
        super().__init__(vocab, seed, noise, sharpness, context, name=name)
        self.plain = Toy(vocab, seed, 0.0, sharpness, context)
        self.laws = laws
        self.layout = ((1, 1, 2),) * self.layers
        self.kind = kind
        self.lag = head_kinds()[kind].lag
        self.block = head_kinds()[kind].options.get("block", 1)

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        head_cache = head_kinds()[self.kind].cache(self.layout, self.dtype, self.device)
        return self.prepare_cache(head_cache, request, beside)

    def _node_values(self, job: Job, positions: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor | None = job.features  # type: ignore[attr-defined]
        if features is None:
            hashes = torch.zeros_like(positions)
        else:
            hashes = torch.from_numpy(feature_hash(features.double().numpy()))[None, :, None]
        return torch.cat([positions, hashes], -1)

    def _path_hash(self, tokens: np.ndarray, values: np.ndarray) -> np.uint64:
        return fed_key(tokens, values, self.vocab)

    def _row_logits(self, tokens: np.ndarray, values: np.ndarray) -> np.ndarray:
        is_token = tokens >= 0  # others are masks in a block
        logits = self.plain.row(tokens[is_token], values[is_token, 0])
        path_hash = self._path_hash(tokens, values)
        relative_logits = kept_spread(path_hash, self.seed + RELATIVE, self.vocab)
        first_law = logits + self.noise * self.sharpness * relative_logits
        later_laws = [
            self.sharpness * kept_spread(path_hash, self.seed + RELATIVE + law_index, self.vocab)
            for law_index in range(1, self.laws)
        ]
        return np.concatenate([first_law, *later_laws])


class RecurrentCache(Cache):
    """The states of one text: `committed`, after the committed tokens, and `ahead`, after the
    scratch as well.

    There are none in between, so a part of the scratch can neither be kept nor built on: then the
    state after the committed tokens is the one to go on from, and the tokens after it are computed
    again. `next_state` is what the running forward found, which `finish` makes `ahead`.
    """

    def __init__(self, first_state: np.uint64):
        super().__init__((), torch.float64, torch.device("cpu"))
        self.start = first_state
        self.committed = first_state
        self.ahead = first_state
        self.next_state = first_state

    def forget(self) -> None:
        super().forget()
        self.committed = self.start

    def keep_nodes(self, nodes: Sequence[int]) -> int:
        """Keeps the state after these scratch rows, a path; returns how many: all or none."""
        if not nodes or len(nodes) < len(self.tokens):
            return 0
        self.committed = self.ahead
        return len(nodes)

    def prepare(self, ask: Ask, tokens: Sequence[int], chunk: int) -> tuple[Job, bool]:
        self.sync(tokens)
        scratch_count = len(self.tokens)
        job, is_complete = super().prepare(ask, tokens, chunk)
        if job.start - self.base not in (0, scratch_count):
            self.tokens = []
            self.parents = []
            job, is_complete = super().prepare(ask, tokens, chunk)
        return job, is_complete

    def entry_state(self, job: Job) -> np.uint64:
        """The state in front of the job's first new node."""
        return self.committed if job.start == self.base else self.ahead

    def finish(self, hidden: Mapping[int, torch.Tensor] = NO_STATES) -> None:
        super().finish(hidden)
        self.ahead = self.next_state


class ToyRecurrent(Model):
    """A recurrent model for laws: its logits are a hash of a state, which each token changes.

    It takes chains only: a job with branches raises Unsupported. `noise` makes a relative that
    agrees in part.
    """

    caps = Model.caps - {"tree", "rollback"}

    def __init__(
        self,
        vocab: int = 4,
        seed: int = 0,
        noise: float = 0.0,
        sharpness: float = 4.0,
        context: int = 4096,
        name: str = "recurrent",
    ):
        self.name = name
        self.vocab = vocab
        self.tokenizer = letter_words(vocab)
        self.context = context
        self.seed = seed
        self.noise = noise
        self.sharpness = sharpness
        self.layout = ()
        self.dtype = torch.float64
        self.device = torch.device("cpu")

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        return self.prepare_cache(RecurrentCache(GOLDEN), request, beside)

    @staticmethod
    def step(state: np.uint64, token: int) -> np.uint64:
        """The state after one more token."""
        with np.errstate(over="ignore"):
            return np.uint64(mix_bits(np.array(state * GOLDEN + np.uint64(token + 1))))

    def row(self, state: np.uint64) -> np.ndarray:
        """Logits (V,) in this state."""
        logits = self.sharpness * spread_numbers(state, self.seed, self.vocab)
        relative_logits = spread_numbers(state, self.seed + RELATIVE, self.vocab)
        return logits + self.noise * self.sharpness * relative_logits

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        row_indices: torch.Tensor,
        first_job: Job,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        all_rows = []
        for job in STEP.get():
            if job.seen is not None:
                raise Unsupported.missing_capability(
                    "a tree", self.name, "a cache that can go back", "use a chain of drafts"
                )
            cache: RecurrentCache = job.cache  # type: ignore[assignment]
            state = cache.entry_state(job)
            for token in job.tokens:
                state = self.step(state, token)
                all_rows.append(self.row(state))
            cache.next_state = state
        return stack_rows(
            [all_rows[row_index] for row_index in row_indices.tolist()], self.vocab
        ), {}
