"""Ray Serve's router for replicas that keep what they computed of a prompt.

Its one idea: requests that begin alike go to the same replica as long as that one keeps up, so that
they find their first rows computed. `prefixes.py` says who begins alike.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from foretell.cluster.prefixes import preferred_order

BUSY = 16  # requests of a replica above which a prompt goes to the next one in its order


class PrefixRouter(RequestRouter):
    """Asks the replicas in the order that the request's key prefers; its first argument is the key.

    A replica with `busy` requests or more is passed over. Where all are that busy, and for a
    request without a key, the one with the fewest requests is asked.
    """

    def initialize_state(self, busy: int = BUSY, **_: Any) -> None:
        self.busy = busy

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, of which Ray Serve takes the first that has room."""
        everybody = list(candidate_replicas)
        key = str(pending_request.args[0]) if pending_request and pending_request.args else ""
        if not key:
            return [everybody]
        by_name = {replica.replica_id.unique_id: replica for replica in everybody}
        order = [by_name[name] for name in preferred_order(key, by_name)]
        return [*([replica] for replica in order if self.has_room(replica)), everybody]

    def has_room(self, replica: RunningReplica) -> bool:
        """Whether it has fewer than `busy` requests, as far as this router knows."""
        length = self.replica_queue_len_cache.get(replica.replica_id)
        return length is None or length < self.busy
