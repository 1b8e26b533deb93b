"""Numbers for Prometheus, read as Prometheus reads them."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from foretell.core.stats import Stats
from tests.serve.asked import completion, stream
from tests.serve.live import NAME, Live, running

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


def samples(client: httpx.Client) -> dict[str, float]:
    """The sum of each name's samples."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            assert sample.labels["model_name"] == NAME
            if "le" not in sample.labels:
                sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums


def test_numbers_add_up() -> None:
    with running() as live, live.client() as client:
        for seed in range(3):
            completion(client, max_tokens=5, seed=seed, n=2, ignore_eos=True)
        found = samples(client)
        prompt = 3 * len(live.lm.encode("The quick brown fox jumps over"))
    assert found["vllm:prompt_tokens_total"] == prompt
    assert found["vllm:generation_tokens_total"] == 30
    assert found["vllm:request_success_total"] == 6
    for name in ("time_to_first_token", "e2e_request_latency", "inter_token_latency"):
        assert found[f"vllm:{name}_seconds_count"] == 6
        assert found[f"vllm:{name}_seconds_sum"] > 0
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert found["foretell:sound"] == 1 and found["foretell:draining"] == 0


# What vLLM's board examples/observability/prometheus_grafana/grafana.json reads.
BOARD_PARTS = ("queue", "prefill", "decode")
BOARD = [
    *(f"vllm:{name}_bucket" for name in ("request_prompt_tokens", "request_generation_tokens")),
    *(
        f"vllm:{name}_seconds_{part}"
        for name in ("e2e_request_latency", "inter_token_latency", "time_to_first_token")
        for part in ("bucket", "sum", "count")
    ),
    *(f"vllm:{name}_total" for name in ("prompt_tokens", "generation_tokens", "request_success")),
    *(f"vllm:{name}" for name in ("num_requests_running", "num_requests_waiting")),
    *(f"vllm:request_{part}_time_seconds_sum" for part in BOARD_PARTS),
    *("vllm:kv_cache_usage_perc", "vllm:request_max_num_generation_tokens_sum"),
]


def test_the_board_of_vllm_has_its_numbers() -> None:
    with running() as live, live.client() as client:
        completion(client, max_tokens=5, n=2, ignore_eos=True)
        stream(client, max_tokens=7, ignore_eos=True)
        text = client.get("/metrics").text
        prompt = len(live.lm.encode("The quick brown fox jumps over"))
    families = text_string_to_metric_families(text)
    found = {(one.name, one.labels.get("le")): one for family in families for one in family.samples}
    assert set(BOARD) <= {name for name, _ in found}
    assert found["vllm:request_success_total", None].labels["finished_reason"] == "length"
    value = {name: sample.value for (name, le), sample in found.items() if le in (None, "5.0")}
    assert value["vllm:request_prompt_tokens_sum"] == 3 * prompt
    assert value["vllm:request_generation_tokens_sum"] == 17
    assert value["vllm:request_generation_tokens_bucket"] == 2
    assert value["vllm:request_max_num_generation_tokens_sum"] == 17
    parts = (value[f"vllm:request_{part}_time_seconds_sum"] for part in BOARD_PARTS)
    assert sum(parts) == pytest.approx(value["vllm:e2e_request_latency_seconds_sum"])


def test_every_number_of_the_page_is_there(live: Live, client: httpx.Client) -> None:
    live.service.metrics.note_answer(Stats(tokens=1, ttft_s=0.1, total_s=0.2), "stop")
    completion(client, max_tokens=8, temperature=0)
    found = samples(client)
    text = PAGE.read_text("utf-8").partition("## Metrics")[2].partition("\n## ")[0]
    named = set(re.findall(r"`((?:vllm|foretell):\w+)`", text))
    named |= {f"vllm:spec_decode{part}" for part in re.findall(r"`(_num_\w+)`", text)}
    assert len(named) > 20
    for name in named:
        assert any(known in (name, f"{name}_sum") for known in found), name
