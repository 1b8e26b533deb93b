"""The arithmetic of a plan: how many replicas, how much memory, and when tensor parallel ranks pay.

Pure functions of numbers that were measured or that stand on a data sheet. Sizes are in bytes,
times in seconds, speeds in a second; docs/scaling.md shows how they are put together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foretell.errors import BadConfig

STAGES = 3  # attention, the network, FFN: what a step passes through where the two are apart
THERE_AND_BACK = 3  # bytes an element: 1 (8 bits) to the FFN, 2 (16 bits) back


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder that decide the size of its cache."""

    layers: int
    kv_heads: int
    head_width: int
    element_bytes: int = 2  # bfloat16 and float16

    @property
    def row_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_width * self.element_bytes


@dataclass(frozen=True)
class Machine:
    """An accelerator and its share of the network, or a group of them and theirs."""

    flops: float  # operations a second, in the format the model is computed in
    bandwidth: float  # bytes a second from memory
    network: float = math.inf  # bytes a second to other machines


def shape_of(config: Mapping[str, Any], element_bytes: int = 2) -> Shape:
    """The shape of a model by its config.json. Raises BadConfig where it does not say."""
    config = config.get("text_config") or config
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim")
    if width is None and heads and config.get("hidden_size"):
        width = config["hidden_size"] // heads
    layers = config.get("num_hidden_layers")
    if not layers or not kv_heads or not width:
        raise BadConfig(
            "config.json: lacks num_hidden_layers, num_attention_heads or hidden_size; "
            "give the config.json of a transformer decoder"
        )
    return Shape(layers, kv_heads, width, element_bytes)


# --- memory


def fitting_requests(
    memory: float, weights: float, row_bytes: float, tokens: float, shared_tokens: float = 0
) -> int:
    """How many requests of `tokens` tokens fit beside the weights.

    The first `shared_tokens` tokens are the same in all of them, and their rows are kept once.
    """
    _check_positive(memory=memory, row_bytes=row_bytes, tokens=tokens)
    if not 0 <= shared_tokens < tokens:
        allowed = f"at least 0 and less than tokens={tokens:g}"
        raise BadConfig.field("shared_tokens", shared_tokens, allowed)
    free_bytes = memory - weights - shared_tokens * row_bytes
    return max(0, math.floor(free_bytes / ((tokens - shared_tokens) * row_bytes)))


def tensor_ranks(
    memory: float, weights: float, cache: float, kv_heads: int, reserve: float = 0.1
) -> int:
    """Into how many parts the model must be cut for weights and cache to fit into the memory of
    one device each; 1: it fits as it is.

    Ranks divide the key-value heads, since a rank computes whole heads. `reserve`: the share of a
    device's memory that is kept free. Raises BadConfig where even one head a rank does not fit.
    """
    _check_positive(memory=memory, weights=weights, kv_heads=kv_heads)
    usable = memory * (1 - reserve)
    for ranks in range(1, kv_heads + 1):
        if kv_heads % ranks == 0 and (weights + cache) / ranks <= usable:
            return ranks
    raise BadConfig(
        f"memory={memory:g}: {weights + cache:g} bytes do not fit into {kv_heads} devices, one for "
        "each key-value head; take larger devices, fewer bits or shorter requests"
    )


def all_reduce_seconds(
    tokens: int, width: int, layers: int, ranks: int, network: float, element_bytes: int = 2
) -> float:
    """Seconds that tensor parallelism adds to a forward of `tokens` tokens: two sums a layer on a
    ring.
    """
    _check_positive(network=network, ranks=ranks)
    sent_bytes = 2 * (ranks - 1) / ranks * tokens * width * element_bytes
    return 2 * layers * sent_bytes / network


# --- replicas


def in_flight(arrivals: float, seconds: float) -> float:
    """Little's law: requests in the system, of `arrivals` a second that stay `seconds` each."""
    return arrivals * seconds


def needed_replicas(
    arrivals: float, tokens: float, tokens_per_second: float, busy: float = 0.7
) -> int:
    """How many replicas serve `arrivals` requests a second of `tokens` new tokens each.

    `tokens_per_second`: what one replica was measured to give at the load it is to have. `busy`:
    the share of the time that it may be busy; near 1 queues grow without bound.
    """
    _check_positive(tokens=tokens, tokens_per_second=tokens_per_second)
    if not 0 < busy < 1:
        raise BadConfig.field("busy", busy, "between 0 and 1")
    return max(1, math.ceil(in_flight(arrivals, tokens / tokens_per_second) / busy))


def prefix_reuse(replicas: int, held_prefixes: float, prefixes: int, by_prefix: bool) -> float:
    """The share of requests that find the rows of their prefix, all prefixes being as frequent.

    `held_prefixes`: how many prefixes the memory of one replica holds. By prefix, every prefix
    lives on one replica; else every replica sees all of them, and holds the same few.
    """
    _check_positive(replicas=replicas, held_prefixes=held_prefixes, prefixes=prefixes)
    return min(1.0, (replicas if by_prefix else 1) * held_prefixes / prefixes)


# --- prefill and decoding apart


def phase_ratio(prompt: float, answer: float, prefill_speed: float, decode_speed: float) -> float:
    """Prefill instances for every decoding instance, so that neither waits for the other.

    `prompt`, `answer`: tokens of a request; the speeds are tokens a second of one instance.
    """
    _check_positive(prefill_speed=prefill_speed, decode_speed=decode_speed, answer=answer)
    return (prompt / prefill_speed) / (answer / decode_speed)


def handover_seconds(prompt: int, row_bytes: float, network: float) -> float:
    """How long the rows of a prompt take from the prefill instance to the decoding one."""
    _check_positive(network=network)
    return prompt * row_bytes / network


def handover_pays(prompt: int, row_bytes: float, network: float, prefill_speed: float) -> bool:
    """Whether sending the rows of a prompt is quicker than computing them again."""
    return handover_seconds(prompt, row_bytes, network) < prompt / prefill_speed


# --- attention and FFN apart, as in Step-3 (arXiv:2507.19427)


def stage_seconds(token_seconds: float, layers: int, stages: int = STAGES) -> float:
    """Seconds that attention, FFN and the network may each take in a layer, for a token every
    `token_seconds`.
    """
    _check_positive(token_seconds=token_seconds, layers=layers, stages=stages)
    return token_seconds / stages / layers


def full_batch(machine: Machine, weight_bytes: float = 1, sparsity: float = 1) -> float:
    """Tokens a forward must have for its products to be bound by arithmetic.

    A weight takes `weight_bytes` to read and two operations a token. `sparsity`: the share of the
    FFN that a token passes through, 1 where it is dense.
    """
    _check_positive(sparsity=sparsity)
    return machine.flops * weight_bytes / (2 * machine.bandwidth) / sparsity


def network_bytes(width: int, batch: float) -> float:
    """Bytes of a layer to an FFN instance and back: 8 bits an element there, 16 bits back."""
    return THERE_AND_BACK * width * batch


def least_sparsity(machine: Machine, width: int, layers: int, token_seconds: float) -> float:
    """Below this share of active FFN, the network cannot feed a batch that fills the machine.

    It is where the full batch's bytes take exactly a stage: H FLOPs L / (Net BW token_seconds 2/9).
    """
    _check_positive(network=machine.network)
    bytes_a_layer = network_bytes(width, full_batch(machine))
    return bytes_a_layer / (machine.network * stage_seconds(token_seconds, layers))


def idle_share(
    attention: float, there: float, ffn: float, back: float, batches: int = STAGES
) -> float:
    """The share of the time that the attention instances wait, with `batches` micro-batches.

    The arguments are seconds of a layer. An instance works on one micro-batch at a time, and a
    micro-batch's next layer begins when its FFN is back. With three the wait is 0 where no stage is
    longer than attention and there + ffn + back <= 2 attention: for ffn = attention, where there
    and back together take no longer than attention.
    """
    _check_positive(attention=attention, batches=batches)
    round_trip = attention + there + ffn + back
    period = max(round_trip, batches * max(attention, there, ffn, back))
    return 1 - batches * attention / period


def speculation_gain(mean_accepted: float, rows: float, ffn_bound: float) -> float:
    """Times as many tokens a second with drafts, where a share of a step is bound by arithmetic.

    `mean_accepted`: tokens a step, its own included. `rows`: tokens of a forward for each request.
    `ffn_bound`: the share of a plain step's time that grows with the rows, such as a saturated FFN;
    the rest is bound by memory and costs the same.
    """
    _check_positive(mean_accepted=mean_accepted, rows=rows)
    if not 0 <= ffn_bound <= 1:
        raise BadConfig.field("ffn_bound", ffn_bound, "between 0 and 1")
    return mean_accepted / (ffn_bound * rows + 1 - ffn_bound)


def _check_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not number > 0:
            raise BadConfig.field(name, number, "above 0")
