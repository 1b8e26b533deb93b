"""The arithmetic of docs/scaling.md, against published numbers and against simulations."""

from __future__ import annotations

import random
from collections import deque

import pytest

from foretell.cluster.plan import (
    Machine,
    Shape,
    all_reduce_seconds,
    fitting_requests,
    full_batch,
    handover_pays,
    handover_seconds,
    idle_share,
    in_flight,
    least_sparsity,
    needed_replicas,
    network_bytes,
    phase_ratio,
    prefix_reuse,
    shape_of,
    speculation_gain,
    stage_seconds,
    tensor_ranks,
)
from foretell.errors import BadConfig

SMOLLM2 = Shape(layers=30, kv_heads=3, head_width=64)
STEP3 = {"width": 7168, "layers": 61, "token_seconds": 0.05}
# FLOPS in 8 bits (in 16 where there is no such unit) and bandwidth of one, network of a server.
MACHINES = {
    "H800": (Machine(1979e12, 3.35e12, 400e9), 0.058),
    "H20": (Machine(296e12, 4.0e12, 400e9), 0.007),
    "A800": (Machine(312e12, 2.0e12, 200e9), 0.031),
    "910B": (Machine(280e12, 1.6e12, 200e9), 0.034),
}


# --- memory


def test_a_row_of_smollm2_takes_23040_bytes() -> None:
    assert SMOLLM2.row_bytes == 23_040
    config = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
    }
    assert shape_of(config) == SMOLLM2
    assert shape_of({"text_config": config | {"head_dim": 64}}, element_bytes=4).row_bytes == 46_080


def test_a_config_without_the_numbers_is_refused() -> None:
    with pytest.raises(BadConfig, match=r"config\.json: lacks .*; give"):
        shape_of({"num_hidden_layers": 2})


def test_the_formula_is_the_size_of_a_real_cache() -> None:
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
    )
    cache = DynamicCache()
    tokens = torch.arange(11)[None]
    LlamaForCausalLM(config)(tokens, past_key_values=cache, use_cache=True)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == 11 * shape_of(config.to_dict(), element_bytes=4).row_bytes


def test_requests_fit_until_the_memory_is_full() -> None:
    rows = SMOLLM2.row_bytes
    assert fitting_requests(memory=10 * 100 * rows, weights=0, row_bytes=rows, tokens=100) == 10
    assert fitting_requests(memory=10 * 100 * rows - 1, weights=0, row_bytes=rows, tokens=100) == 9
    assert fitting_requests(memory=rows, weights=2 * rows, row_bytes=rows, tokens=1) == 0
    # 64 requests that share 2,000 of 2,100 tokens take the memory of 4 that share nothing.
    memory = (2000 + 64 * 100) * rows
    assert fitting_requests(memory, 0, rows, 2100, shared_tokens=2000) == 64
    assert fitting_requests(memory, 0, rows, 2100) == 4
    with pytest.raises(BadConfig, match="shared_tokens=5: must be"):
        fitting_requests(1, 0, 1, 5, shared_tokens=5)


def test_ranks_divide_the_heads() -> None:
    assert tensor_ranks(memory=80e9, weights=16e9, cache=40e9, kv_heads=8) == 1
    assert tensor_ranks(memory=80e9, weights=140e9, cache=40e9, kv_heads=8) == 4
    assert tensor_ranks(memory=80e9, weights=140e9, cache=3e9, kv_heads=3) == 3
    with pytest.raises(BadConfig, match="do not fit into 2 devices"):
        tensor_ranks(memory=80e9, weights=140e9, cache=40e9, kv_heads=2)


def test_a_ring_sends_twice_its_share() -> None:
    assert all_reduce_seconds(1, 4096, 32, ranks=1, network=1e9) == 0
    two = all_reduce_seconds(1, 4096, 32, ranks=2, network=400e9)
    assert two == pytest.approx(2 * 32 * 4096 * 2 / 400e9)


# --- replicas


def test_littles_law_counts_requests_in_flight() -> None:
    """Against a simulation of arrivals at random and stays of different lengths."""
    draw = random.Random(0)
    now = 0.0
    stays = []
    for _ in range(20_000):
        now += draw.expovariate(5.0)
        stays.append((now, now + draw.uniform(0, 4)))
    seen = 0
    looks = [draw.uniform(10, now - 10) for _ in range(300)]
    for look in looks:
        seen += sum(start <= look < end for start, end in stays)
    assert seen / len(looks) == pytest.approx(in_flight(5.0, 2.0), rel=0.05)


def test_replicas_by_measured_speed() -> None:
    assert needed_replicas(arrivals=1, tokens=100, tokens_per_second=412) == 1
    assert (
        needed_replicas(arrivals=10, tokens=200, tokens_per_second=412) == 7
    )  # 4.85 busy ones / 0.7
    assert needed_replicas(arrivals=10, tokens=200, tokens_per_second=412, busy=0.99) == 5
    with pytest.raises(BadConfig, match=r"busy=1\.0: must be between 0 and 1"):
        needed_replicas(1, 1, 1, busy=1.0)
    with pytest.raises(BadConfig, match="tokens_per_second=0: must be above 0"):
        needed_replicas(1, 1, 0)


def test_requests_by_prefix_find_more_rows() -> None:
    assert prefix_reuse(replicas=4, held_prefixes=10, prefixes=40, by_prefix=True) == 1
    assert prefix_reuse(replicas=4, held_prefixes=10, prefixes=40, by_prefix=False) == 0.25
    assert prefix_reuse(replicas=4, held_prefixes=10, prefixes=5, by_prefix=False) == 1


# --- prefill and decoding apart


def test_prefill_instances_for_a_decoding_one() -> None:
    assert phase_ratio(2000, 200, prefill_speed=20_000, decode_speed=2_000) == pytest.approx(1)
    assert phase_ratio(4000, 200, prefill_speed=20_000, decode_speed=2_000) == pytest.approx(2)


def test_rows_are_handed_over_where_sending_is_quicker_than_computing() -> None:
    assert handover_seconds(2000, SMOLLM2.row_bytes, 1.25e9) == pytest.approx(0.036864)
    assert handover_pays(2000, SMOLLM2.row_bytes, 1.25e9, prefill_speed=1959)
    assert not handover_pays(2000, SMOLLM2.row_bytes, 1.25e7, prefill_speed=1959)


# --- attention and FFN apart


def test_a_stage_of_step3_has_272_microseconds() -> None:
    """The report rounds 50 ms / 3 / 61 = 273.2 us down."""
    assert stage_seconds(0.05, 61) == pytest.approx(272e-6, abs=2e-6)
    assert stage_seconds(0.05, 61, stages=4) * 61 == pytest.approx(12.5e-3)


@pytest.mark.parametrize("name", MACHINES)
def test_least_sparsity_is_that_of_the_report(name: str) -> None:
    machine, published = MACHINES[name]
    bound = least_sparsity(machine, **STEP3)
    assert bound == pytest.approx(published, abs=6e-4)
    # H FLOPs L / (Net BW 11.1 ms), as the report writes it
    written = 7168 * machine.flops * 61 / (machine.network * machine.bandwidth * 11.1e-3)
    assert bound == pytest.approx(written, rel=2e-3)
    # At the bound a full batch's bytes take exactly a stage.
    batch = full_batch(machine, sparsity=bound)
    seconds = network_bytes(7168, batch) / machine.network
    assert seconds == pytest.approx(stage_seconds(0.05, 61))


def test_a_full_batch_reads_weights_as_long_as_it_computes() -> None:
    machine = Machine(flops=1000.0, bandwidth=10.0)
    assert full_batch(machine) == 50  # 8 bits: FLOPs / (2 BW)
    assert full_batch(machine, weight_bytes=2) == 100
    assert full_batch(machine, sparsity=0.1) == pytest.approx(500)
    assert network_bytes(7168, 10) == 3 * 7168 * 10


def simulated_idle(stages: list[float], batches: int, layers: int = 400) -> float:
    """Micro-batches that go round four servers, each of which serves one at a time, in order."""
    free = [0.0] * len(stages)  # when each server is free
    ready = deque((0.0, 0) for _ in range(batches))  # (when, next stage)
    ends: list[float] = []
    while len(ends) < layers * batches:
        when, stage = min(ready)
        ready.remove((when, stage))
        end = max(when, free[stage]) + stages[stage]
        free[stage] = end
        if stage == 0:
            ends.append(end)
        ready.append((end, (stage + 1) % len(stages)))
    half = len(ends) // 2  # after the start
    busy = (len(ends) - 1 - half) * stages[0]
    return 1 - busy / (ends[-1] - ends[half])


@pytest.mark.parametrize("seed", range(12))
def test_the_pipeline_waits_as_in_a_simulation(seed: int) -> None:
    draw = random.Random(seed)
    stages = [draw.choice([1.0, 2.0, 3.0, 4.0]) for _ in range(4)]
    batches = draw.choice([1, 2, 3, 4])
    expected = simulated_idle(stages, batches)
    assert idle_share(*stages, batches=batches) == pytest.approx(expected, abs=0.01)


def test_no_bubbles_where_the_network_takes_no_longer_than_attention() -> None:
    """The published condition for balanced stages: there + back <= attention."""
    assert idle_share(attention=4, there=2, ffn=4, back=2) == 0
    assert idle_share(attention=4, there=2.1, ffn=4, back=2.1) > 0
    assert idle_share(attention=4, there=1, ffn=5, back=1) == pytest.approx(0.2)


def test_drafts_cost_a_saturated_ffn() -> None:
    assert speculation_gain(mean_accepted=2.5, rows=4, ffn_bound=0) == 2.5
    assert speculation_gain(mean_accepted=2.5, rows=4, ffn_bound=1) < 1
    assert speculation_gain(mean_accepted=1.0, rows=1, ffn_bound=0.5) == 1
    # A drafted token doubles the rows of a full FFN whatever the acceptance (Step-3, on MTP).
    assert speculation_gain(mean_accepted=1.85, rows=2, ffn_bound=1) == pytest.approx(0.925)
    with pytest.raises(BadConfig, match="ffn_bound=2: must be"):
        speculation_gain(1, 1, 2)
