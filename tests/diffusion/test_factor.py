"""What is committed together: see foretell/diffusion/factor.py."""

from __future__ import annotations

from tests.diffusion.worlds import check_bad, check_one_by_one, check_sure_together


def test_without_room_for_more_it_commits_one_token_a_step() -> None:
    check_one_by_one("factor:f=0", "confidence")


def test_sure_tokens_are_committed_together() -> None:
    check_sure_together("factor")


def test_bad_settings_are_named() -> None:
    check_bad("factor:f=-1")
