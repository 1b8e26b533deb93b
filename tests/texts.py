"""Contexts whose text and limits tests set by hand."""

from __future__ import annotations

from collections.abc import Sequence

from foretell.core.context import Context


def set_text(ctx: Context, tokens: Sequence[int]) -> None:
    """The branch's text, prompt included, is now this."""
    branch = ctx.branches[ctx.branch]
    prompt = len(ctx.request.prompt)
    branch.tokens = list(tokens)
    branch.output = list(tokens[prompt:])


def set_limit(ctx: Context, limit: int) -> None:
    """The longest that the branch's text may become."""
    ctx.branches[ctx.branch].limit = limit
