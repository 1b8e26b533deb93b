"""Pages of several servers as one."""

from __future__ import annotations

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from foretell.cluster.numbers import merge_metrics

PAGE = """# HELP asked_total Requests.
# TYPE asked_total counter
asked_total{model="m"} %d
# HELP seconds Of requests.
# TYPE seconds histogram
seconds_bucket{le="1.0"} 2
seconds_bucket{le="+Inf"} 3
seconds_sum 4
seconds_count 3
"""


def test_every_number_has_its_replica() -> None:
    page = merge_metrics({"a": PAGE % 3, "b": PAGE % 4}).decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert {name: family.type for name, family in families.items()} == {
        "asked": "counter",
        "seconds": "histogram",
    }
    asked = {sample.labels["replica"]: sample.value for sample in families["asked"].samples}
    assert asked == {"a": 3, "b": 4}
    assert families["asked"].samples[0].labels == {"model": "m", "replica": "a"}
    assert len(families["seconds"].samples) == 8
    assert page.count("# TYPE seconds histogram") == 1
