"""Clusters that are not there."""

from __future__ import annotations

import pytest

from foretell.cluster import cluster
from foretell.errors import BadConfig, Unsupported


def test_a_cluster_that_does_not_answer_is_one_line(free_port: int) -> None:
    pytest.importorskip("ray")
    for address in (f"127.0.0.1:{free_port}", f"ray://127.0.0.1:{free_port}", "nonsense"):
        with (
            pytest.raises(BadConfig, match=r"no Ray cluster answers there .*; start one with"),
            cluster.ray_cluster(address),
        ):
            pass


def test_ray_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"pip install 'foretell\[ray\]'"):
        cluster.check_installed()
