"""PLDR-LLM, whose attention has a metric for each head, and the G-cache that keeps it.

Where the metric lies in the weights the model is an ordinary decoder. Where nets infer it of a text
that is done once, of the prompt in one piece, before the text's first forward: the metric G of
every layer and head is kept beside the text's rows and never changes with what follows. Then a
layer costs what ordinary attention costs, and one product of a query with G; trees, chunks, batches
and cache policies see ordinary queries, and drafts that are rejected never touched G.

A prompt is therefore read twice, the first time without keeping rows: Q^T Q is of all its tokens,
so no piece of it has the right queries before the metrics of the layers below are known. Rows of
two texts that begin alike differ, and are not shared. The whole cache of metrics takes L H D D
numbers for a text, however long it is.

Source: Gokden, "PLDR-LLMs Learn A Generalizable Tensor Operator That Can Replace Its Own Deep
Neural Net At Inference" (arXiv 2502.13502).
Differs: A_LM is not kept beside G, since nothing reads it once G is there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.cache.policy import Segment
from foretell.core.types import Ask
from foretell.errors import Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.own import check_torch_alone
from foretell.models.decoder.pldr_model import (
    PldrForCausalLM,
    check_settings,
    fixed_metrics,
    infer_metrics,
    metrics_from,
)
from foretell.ops.threads import one_at_a_time, torch_threads

if TYPE_CHECKING:
    from foretell.core.request import Request

Known = list[tuple[tuple[int, ...], torch.Tensor | None]]  # texts, and their metrics once inferred


class MetricCache(Cache):
    """Rows of a text and the metrics (L, H, D, D) under which they were computed."""

    sharable = False
    metric: torch.Tensor | None = None
    find_metric: Callable[[Sequence[int], Known], torch.Tensor]

    def use_finder(
        self, find_metric: Callable[[Sequence[int], Known], torch.Tensor]
    ) -> MetricCache:
        """Tells a new cache who infers metrics."""
        self.find_metric = find_metric
        self.known_texts: Known = []  # of the request: shared by all its caches of this model
        return self

    def prepare(self, ask: Ask, tokens: Sequence[int], chunk: int) -> tuple[Job, bool]:
        if self.metric is None:
            self.metric = self.find_metric(tokens, self.known_texts)
        return super().prepare(ask, tokens, chunk)

    def adopt_segment(self, segment: Segment) -> bool:
        """Returns False: rows of others were computed under other metrics."""
        return False

    @property
    def bytes(self) -> int:
        metric_bytes = (
            0 if self.metric is None else self.metric.numel() * self.metric.element_size()
        )
        return super().bytes + metric_bytes


class MetricDecoder(Decoder):
    """A PLDR-LLM whose nets infer the metrics of a text."""

    def __init__(self, hf_model: Any, model_name: str):
        self.texts: dict[int, Known] = {}  # by the identity of requests in flight
        super().__init__(hf_model, model_name)
        config = self.config
        number_count = config.num_hidden_layers * config.num_attention_heads * config.head_dim**2
        self.state_bytes = number_count * self.dtype.itemsize

    def cache_type(self, *shape: Any) -> MetricCache:  # type: ignore[override]
        return MetricCache(*shape).use_finder(self.metric_of)

    def prepare_cache(self, cache: Cache, request: Request | None, beside: Cache | None) -> Cache:
        cache = super().prepare_cache(cache, request, beside)
        if request is not None and isinstance(cache, MetricCache):
            request_key = id(request)
            if request_key not in self.texts:
                self.texts[request_key] = [(tuple(request.prompt), None)]
                weakref.finalize(request, self.texts.pop, request_key, None)
            cache.known_texts = self.texts[request_key]
        return cache

    @one_at_a_time
    def metric_of(self, tokens: Sequence[int], known_texts: Known) -> torch.Tensor:
        """The metrics (L, H, D, D) of a text: those of the longest known one that it begins with,
        else its own.

        A request knows its prompt, so that a text which is computed again after its prompt has
        the metrics that it had.
        """
        text_ids = tuple(tokens)
        matching_texts = [entry for entry in known_texts if text_ids[: len(entry[0])] == entry[0]]
        longest_text, metrics = max(
            matching_texts, key=lambda entry: len(entry[0]), default=(text_ids, None)
        )
        if metrics is None:
            token_ids = torch.tensor(longest_text, device=self.device)
            with torch_threads(self._thread_count()):
                metrics = infer_metrics(self.hf, token_ids)
            known_texts[:] = [entry for entry in known_texts if entry[0] != longest_text] + [
                (longest_text, metrics)
            ]
        return metrics

    def self_test(self) -> None:
        """Tests itself as any decoder, where the model alone has the metrics of the same text."""
        with metrics_from(fixed_metrics(self.metric_of(self.probe_ids, []))):
            super().self_test()

    # --- what makes other models of it, whose caches would have no metrics

    def _refuse_method(self, method_name: str) -> NoReturn:
        need = "a metric that no text changes"
        cure = "freeze it (foretell train pldr writes OUT/frozen) and use that"
        raise Unsupported.missing_capability(method_name, self.name, need, cure)

    def layer_parallel(self, size: int) -> NoReturn:
        self._refuse_method("easyspec")

    def retrieving_model(self, budget: int, chunk: int) -> NoReturn:
        self._refuse_method("triforce")

    def learning(self, row_tokens: torch.Tensor | None = None) -> NoReturn:
        self._refuse_method("a draft model that learns")

    def adapted(self, folder: str) -> NoReturn:
        self._refuse_method("LoRA weights")


def model_class(raw_settings: Mapping[str, Any]) -> type[PldrForCausalLM]:
    """The class that loads a folder with these settings. Raises BadModel."""
    check_settings(raw_settings)
    return PldrForCausalLM


def make_adapter(
    hf_model: Any, model_name: str, exact_bits: bool, dtype: str, backend: str
) -> MetricDecoder | None:
    """Makes the adapter, see own.py. Torch alone computes the nets, and metrics that they infer."""
    if hf_model.config.custom_G_type is not None:
        return None
    need = "a metric that no text changes"
    cure = "leave it out, or freeze the metric (foretell train pldr writes OUT/frozen)"
    check_torch_alone(model_name, exact_bits, dtype, backend, need, cure)
    return MetricDecoder(hf_model, model_name)
