"""What stands around a block is not computed again."""

from __future__ import annotations

from tests.kv.test_canvas import counted


def test_the_block_alone_is_computed() -> None:
    ours = [computed for computed, _, _ in counted("dual", "confidence:block=4", 8)]
    assert ours == [9, 4, 4, 4, 9, 4, 4, 4]
