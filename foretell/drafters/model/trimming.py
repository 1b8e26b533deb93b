"""A decoder whose head computes the rows of some tokens only: a cheaper draft model.

A draft model's head is a large part of its forward, and most of its tokens are hardly ever drafted.
`trim_head` cuts the head down to the tokens that are kept (see drafters/model/vocabulary.py); what
enters the model stays as it is, so it reads any text. Its rows have the whole vocabulary again: a
token that was left out has the logit NEVER, which is probability 0 at any temperature. It is a
finite number, so that a distribution exists even where a grammar allows no other token.

Source: "VocabTrim: Vocabulary Pruning for Efficient Speculative Decoding in LLMs"
(arXiv 2506.22694).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.core.model import Computed, Model
from foretell.core.types import Reply
from foretell.drafters.heads.networks.output import cut_head
from foretell.errors import BadConfig, Unsupported
from foretell.models import backend_registry as registry
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.learning import cannot_learn
from foretell.models.decoder.packed import PackedLinear, weight_count
from foretell.models.decoder.parallel import distrust_drafts
from foretell.models.online import Learner

if TYPE_CHECKING:
    from foretell.core.request import Request

NEVER = -1e30  # the logit of a token that is left out


class Trimmed(Model):
    """A model whose `base` gives rows of `kept` alone, in ascending order: rows of all `vocab`
    tokens. Caches, hidden states and backends are the base's.

    Raises BadConfig for ids that are no tokens of the model, or not in ascending order.
    """

    def __init__(self, base: Any, kept_tokens: Sequence[int], vocab: int):
        ordered_tokens = list(kept_tokens)
        if (
            not ordered_tokens
            or ordered_tokens != sorted({*ordered_tokens})
            or not 0 <= ordered_tokens[0] <= ordered_tokens[-1]
        ):
            raise BadConfig("kept tokens: must be ids, at least one, each once and in order")
        if ordered_tokens[-1] >= vocab:
            raise BadConfig(
                f"kept tokens: {ordered_tokens[-1]} is beyond the vocabulary (0 to {vocab - 1})"
            )
        self.base = base
        self.name = f"{base.name}[{len(ordered_tokens)} of {vocab} tokens]"
        self.vocab = vocab
        self.kept = torch.tensor(ordered_tokens, device=base.device)
        self.context = base.context
        self.layout = base.layout
        self.dtype = base.dtype
        self.device = base.device
        self.caps = base.caps
        self.feeds = base.feeds
        self.hf: nn.Module | None = getattr(base, "hf", None)
        self.matrices: str | None = getattr(base, "matrices", None)

    @property
    def backend(self) -> Any:
        return getattr(self.base, "backend", None)

    @property
    def exact_bits(self) -> bool:
        return bool(getattr(self.base, "exact_bits", False))

    @property
    def usual_backend(self) -> str:  # type: ignore[override]
        return str(self.base.usual_backend)

    @property
    def most_jobs(self) -> int:  # type: ignore[override]
        return int(self.base.most_jobs)

    @property
    def weight_bytes(self) -> int:  # type: ignore[override]
        return int(self.base.weight_bytes)

    @property
    def reads_segments(self) -> bool:  # type: ignore[override]
        return bool(self.base.reads_segments)

    @property
    def threads_wanted(self) -> int:  # type: ignore[override]
        return int(self.base.threads_wanted)

    @threads_wanted.setter
    def threads_wanted(self, threads: int) -> None:
        self.base.threads_wanted = threads

    def cache(self, request: Request | None = None, beside: Cache | None = None) -> Cache:
        cache: Cache = self.base.cache(request, beside)
        return cache

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        embedded: torch.Tensor = self.base.embed(tokens)
        return embedded

    def compute(self, jobs: Sequence[Job], taps: Sequence[int]) -> Computed:
        computed: Computed = self.base.compute(jobs, taps)
        kept_rows = computed.logits
        if kept_rows.dtype != torch.float64:
            kept_rows = kept_rows.float()
        full_rows = kept_rows.new_full((len(kept_rows), self.vocab), NEVER)
        computed.logits = full_rows.index_copy_(1, self.kept, kept_rows)
        return computed

    def layer_parallel(self, size: int) -> TrimmedParallel:
        """Returns Decoder.layer_parallel of the base, trimmed. Raises Unsupported."""
        make_rough = getattr(self.base, "layer_parallel", None)
        if make_rough is None:
            need = "layers whose attention can be computed by itself"
            raise Unsupported.missing_capability(
                "easyspec", self.name, need, "use the method draft"
            )
        rough_model = TrimmedParallel(make_rough(size), self.kept.tolist(), self.vocab)
        rough_model.tokenizer = self.tokenizer
        return rough_model

    def learning(self) -> TrimmedLearning:
        """Returns Decoder.learning of the base, trimmed. Raises Unsupported."""
        make_learning = getattr(self.base, "learning", None)
        if make_learning is None:
            raise cannot_learn(self.name)
        learning = TrimmedLearning(make_learning(self.kept), self.kept.tolist(), self.vocab)
        learning.tokenizer = self.tokenizer
        return learning


class TrimmedLearning(Trimmed):
    """A trimmed decoder that learns, see learning.py: its `base` is a Learning."""

    learns = True

    def learning(self) -> TrimmedLearning:
        """Returns itself: it learns already."""
        return self

    def begin(self, request: Request, weights: Model | None) -> None:
        self.base.begin(request, weights)

    def learner(self, every: int, rate: float | None = None) -> Learner:
        learner: Learner = self.base.learner(every, rate)
        return learner


class TrimmedParallel(Trimmed):
    """A trimmed decoder that is rough below the root of a tree: its `base` is a LayerParallel."""

    def forward(self, jobs: Sequence[Job]) -> list[Reply]:
        replies = super().forward(jobs)
        if self.base.size > 1:
            for job in jobs:
                distrust_drafts(job)
        return replies


def trim_head(decoder: Decoder, kept_tokens: Sequence[int]) -> Trimmed:
    """Cuts the decoder's head, in place, down to these tokens, and has its backends compute it so.

    Raises BadConfig for wrong ids, Unsupported where the head is no plain matrix.
    """
    trimmed = Trimmed(decoder, kept_tokens, decoder.vocab)
    head = cut_head(decoder, trimmed.kept)
    decoder.hf.set_output_embeddings(head)
    decoder.head = head
    decoder.vocab = decoder.row_size = len(kept_tokens)
    if decoder.loop is not None:
        decoder.loop.head = head
        decoder.loop.kept = trimmed.kept
    backends = registry.fallback_order(decoder.backend)
    decoder.backend = None
    try:
        for name in backends:
            decoder.use(partial(registry.load_backend(name).make_backend, fallback=decoder.backend))
    except LookupError as error:
        need = f"what it takes ({error})"
        cure = "leave the trimmed vocabulary out, or use backend='torch'"
        raise Unsupported.missing_capability(
            f"a trimmed vocabulary on {backends[-1]}", decoder.name, need, cure
        ) from error
    return trimmed


def head_share(decoder: Decoder) -> float:
    """The share of a forward's products that one token's row takes, by the numbers of weights."""
    state_width = int(decoder.config.hidden_size)
    embedding: Any = decoder.hf.get_input_embeddings()
    head = decoder.head
    other_weights = weight_count(decoder.hf)
    is_tied = False
    if isinstance(embedding, nn.Embedding):
        other_weights -= embedding.weight.numel()
        is_tied = not isinstance(head, PackedLinear) and head.weight is embedding.weight
    if isinstance(head, PackedLinear):
        other_weights -= head.packed.outputs * head.packed.inputs
    elif not is_tied:
        other_weights -= head.weight.numel()
    return state_width / (other_weights + state_width * decoder.vocab)
