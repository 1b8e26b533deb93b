"""The numbers of several servers as one page for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


class _Merged(Collector):
    def __init__(self, families: Mapping[str, Metric]):
        self.families = families

    def collect(self) -> Iterator[Metric]:
        yield from self.families.values()


def merge_metrics(pages: Mapping[str, str]) -> bytes:
    """Merges the pages of several servers by name: every number gets the label `replica`."""
    families: dict[str, Metric] = {}
    for replica, page in pages.items():
        for family in text_string_to_metric_families(page):
            new_family = Metric(family.name, family.documentation, family.type, family.unit)
            merged_family = families.setdefault(family.name, new_family)
            for sample in family.samples:
                merged_family.samples.append(
                    sample._replace(labels=sample.labels | {"replica": replica})
                )
    registry = CollectorRegistry()
    registry.register(_Merged(families))
    return generate_latest(registry)
