"""Numbers for Prometheus, under the names that vLLM gave them where it has them.

Counts of the engine are read when they are asked for; times of requests are noted as they end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from foretell.core.stats import Stats

LABEL = "model_name"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
COUNTS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
Numbers = Callable[[], dict[str, Any]]

# Name, what it is, and the key of Engine.status.
GAUGES = (
    ("vllm:num_requests_running", "Answers that are computed now.", "running"),
    ("vllm:num_requests_waiting", "Answers that wait for their turn.", "waiting"),
    ("foretell:cache_bytes", "Bytes of cache rows of running answers.", "cache_bytes"),
    ("foretell:prefix_bytes", "Bytes of cache rows kept for prompts to come.", "prefix_bytes"),
    ("foretell:learnt_bytes", "Bytes of what drafters have learnt, about.", "learnt_bytes"),
)
COUNTERS = (
    ("vllm:num_preemptions", "Answers that had to give their rows back.", "preempted"),
    ("vllm:prefix_cache_queries", "Tokens of prompts looked up.", "prefix_tokens_asked"),
    ("vllm:prefix_cache_hits", "Of these, tokens that were known.", "prefix_tokens_reused"),
    ("vllm:spec_decode_num_drafts", "Steps that had a draft.", "drafts"),
    ("vllm:spec_decode_num_draft_tokens", "Tokens drafted.", "drafted"),
    ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted.", "accepted"),
    ("foretell:steps", "Forwards of the target after prompts, of each answer.", "steps"),
)
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


class EngineNumbers(Collector):
    """The engine's own counts, read at every scrape."""

    def __init__(self, model: str, numbers: Numbers, gate: Any, sound: Callable[[], bool]):
        self.model = model
        self.numbers = numbers
        self.gate = gate
        self.sound = sound

    def describe(self) -> list[Any]:
        """Returns nothing: else the registry would read everything once to know the names."""
        return []

    def collect(self) -> Iterator[Any]:
        numbers = self.numbers()
        for name, description, key in GAUGES:
            yield self._make_gauge(name, description, numbers.get(key) or 0)
        row_limit = numbers.get("cache_limit")
        used_share = numbers["cache_bytes"] / row_limit if row_limit else 0.0
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            yield self._make_gauge(
                name, "Share of the limit of cache rows; 0 without one.", used_share
            )
        for name, description, key in COUNTERS:
            yield self._make_counter(name, description, numbers.get(key) or 0)
        per_position = CounterMetricFamily(
            PER_POSITION, "Drafted tokens accepted, by their depth.", labels=[LABEL, "position"]
        )
        for position, count in enumerate(numbers.get("accepted_per_position") or [0]):
            per_position.add_metric([self.model, str(position)], count)
        yield per_position
        yield self._make_gauge(
            "foretell:http_requests", "HTTP requests in flight.", self.gate.requests
        )
        yield self._make_gauge("foretell:draining", "1: the server is ending.", self.gate.draining)
        yield self._make_gauge("foretell:sound", "0: the last check found damage.", self.sound())

    def _make_gauge(self, name: str, description: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, description, labels=[LABEL])
        family.add_metric([self.model], float(value))
        return family

    def _make_counter(self, name: str, description: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, description, labels=[LABEL])
        family.add_metric([self.model], float(value))
        return family


class Metrics:
    """All numbers of one server."""

    def __init__(self, model: str, numbers: Numbers, gate: Any, sound: Callable[[], bool]):
        self.model = model
        self.registry = CollectorRegistry()
        self.registry.register(EngineNumbers(model, numbers, gate, sound))

        def counter(name: str, description: str, *labels: str) -> Counter:
            return Counter(name, description, [LABEL, *labels], registry=self.registry)

        def histogram(name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, description, [LABEL], buckets=buckets, registry=self.registry)

        self.prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts.")
        self.answer_tokens = counter("vllm:generation_tokens", "Tokens of answers.")
        self.ends = counter("vllm:request_success", "Answers by their end.", "finished_reason")
        self.responses = counter("foretell:http_responses", "HTTP answers by status.", "status")
        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "Until the first token of an answer.", SECONDS
        )
        self.between_tokens = histogram(
            "vllm:inter_token_latency_seconds",
            "Seconds a token after the first, the mean of each answer.",
            SHORT_SECONDS,
        )
        self.per_token = histogram(
            "vllm:time_per_output_token_seconds", "The same, by its older name.", SHORT_SECONDS
        )
        self.full_time = histogram(
            "vllm:e2e_request_latency_seconds", "Until an answer's end.", SECONDS
        )
        self.queue = histogram(
            "vllm:request_queue_time_seconds", "Until an answer's first forward.", SECONDS
        )
        self.prefill = histogram(
            "vllm:request_prefill_time_seconds", "From there to its first token.", SECONDS
        )
        self.decode = histogram(
            "vllm:request_decode_time_seconds", "From there to its end.", SECONDS
        )
        self.prompts = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", COUNTS)
        self.lengths = histogram("vllm:request_generation_tokens", "Tokens of an answer.", COUNTS)
        self.limits = histogram(
            "vllm:request_max_num_generation_tokens", "Tokens that an answer may have.", COUNTS
        )

    def note_prompt(self, tokens: int) -> None:
        """Counts a prompt that was taken in."""
        self.prompt_tokens.labels(self.model).inc(tokens)

    def note_answer(self, stats: Stats | None, reason: str, limit: int = 0) -> None:
        """Counts an answer that has ended: "stop", "length", "error", or "abort" where nobody waits
        for it. `limit`: tokens that it might have had.
        """
        self.ends.labels(self.model, reason).inc()
        if stats is None:
            return
        self.answer_tokens.labels(self.model).inc(stats.tokens)
        observed_values: list[tuple[Histogram, float]] = [
            (self.prompts, stats.prompt_tokens),
            (self.lengths, stats.tokens),
            (self.limits, limit),
        ]
        if stats.ttft_s:
            observed_values += [
                (self.first_token, stats.ttft_s),
                (self.queue, stats.queue_s),
                (self.prefill, stats.ttft_s - stats.queue_s),
                (self.decode, max(0.0, stats.total_s - stats.ttft_s)),
            ]
        if stats.tpot_s:
            observed_values += [(self.between_tokens, stats.tpot_s), (self.per_token, stats.tpot_s)]
        if stats.total_s:
            observed_values.append((self.full_time, stats.total_s))
        for histogram, value in observed_values:
            histogram.labels(self.model).observe(value)

    def note_response(self, status: int) -> None:
        self.responses.labels(self.model, str(status)).inc()

    def render_text(self) -> bytes:
        """Returns all numbers in Prometheus's format."""
        return generate_latest(self.registry)
