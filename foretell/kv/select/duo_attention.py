"""Some key heads see the first rows and the last ones alone; only the others keep all rows.

Heads that fetch what stands far back need all of a text; the others lose little where they see its
first rows, which draw attention, and what is near. Which are which was learned beforehand, as a
gate of each key head. Those of the lowest gates are streaming heads, in prompts too.

Paper: Xiao et al., DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming
Heads, arXiv:2410.10819
Guarantee: lossy: some heads give up rows; with drafts the text is the one without them
Cost: target 1
Needs: cache rows of every layer, of all of the text, and gates of the model's key heads
Trains: gates, by `foretell train gates`; some ship for smollm2
Try: --model smollm2 --kv duo-attention
Differs:
- a streaming head sees exactly its rows at every token, in prompts too; in the published code one
of a prompt sees all of the running piece
- rows leave the cache by `every`, and what is seen does not depend on it
- of heads with equal gates the first ones stream; the published code decides by noise
- gates that ship were learned on 16 texts of 640 to 896 tokens with two passkeys, in 64 steps; the
paper's have up to 32,000 tokens, ten passkeys and 2,000 steps
- torch or the C library computes it: OpenVINO shows every node all rows of a head, and is refused
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from foretell.core.settings import Range
from foretell.kv.base import KV
from foretell.kv.select.gates import streaming_of
from foretell.kv.select.ragged import Ragged

if TYPE_CHECKING:
    from foretell.core.model import Model


@dataclass(frozen=True)
class DuoAttention(KV):
    """Counts of rows, and the share of heads."""

    # share of the key heads that stream; 0: none, and no gates are read
    sparsity: Annotated[float, Range(0, 1)] = 0.5
    sinks: Annotated[int, Range(0)] = 128  # first rows that they see
    recent: Annotated[int, Range(1)] = 256  # last rows that they see
    every: Annotated[int, Range(1)] = 64  # rows that leave the cache at once
    gates: str = ""  # a file or a folder; else those that ship

    def build_policy(self, target: Model) -> Ragged:
        self.check_target(target)
        streaming_heads = streaming_of(target, self.sparsity, self.gates, "kv=duo-attention")
        return Ragged(self.sinks, self.recent, self.every, whole=False, streaming=streaming_heads)
