"""Asks for code whose logic is explained in comments, by a cue after the prompt.

Comments stand between the words of a task and the code that solves it: a model that writes one
first says what the next lines are to do. The cue is put after the prompt as if the answer began
with it, and the answer is what follows, by plain decoding or as the inner drafter speeds it up. The
processor `comments` goes with it, by which blocks of code open with a comment.

Paper: Chen et al., Comments as Natural Logic Pivots: Improve Code Generation via Comment
Perspective, arXiv:2404.07549
Guarantee: lossy: the answer is that to another prompt
Cost: target 1
Needs: a tokenizer whose tokens are pieces of the text; what the inner drafter needs
Trains: nothing; `foretell train mango` trains a target to prefer commented code to the same without
Differs:
- the cue is in words of ours; the paper tries five of its own, after a prompt of its own
- the cue is no part of the answer, nor does it count as its tokens
- an answer is told when it is whole, since it stands on another branch than the request began with
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.core.context import Context
from foretell.core.drafter import Drafter
from foretell.core.text import Written
from foretell.core.tokenizer_bytes import continue_tokens, words_of
from foretell.core.types import Drop, Finish, Open, Steps
from foretell.errors import Unsupported
from foretell.strategies.samples.samples import Samples

WINDOW = 8  # tokens of the prompt together with which the cue is divided into tokens


@dataclass(frozen=True)
class Mango(Samples):
    """Plain decoding with an empty cue, or what the inner drafter makes of it."""

    cue: Written = "Here is the Python code, with comments that explain its logic:\n"  # or @FILE
    inner: Drafter | None = None  # drafts for the answer

    def run(self, ctx: Context) -> Steps:
        """Raises Unsupported, before anything runs, where the prompt cannot be put differently."""
        if not self.cue:
            return self.draw_sample(ctx)
        target = ctx.models["target"]
        for input_name in ("source", "pictures"):
            if input_name in ctx.request.inputs:
                requirement = f"a prompt of text alone, and this request has {input_name}"
                raise Unsupported.missing_capability(
                    "mango", target.name, requirement, "write the cue yourself"
                )
        words = words_of(target, "mango")
        cue_tokens = continue_tokens(words, ctx.tokens, self.cue.encode(), WINDOW)
        return self._run_steps(ctx, [*ctx.tokens, *cue_tokens])

    def _run_steps(self, ctx: Context, prompt: list[int]) -> Steps:
        branch: int = yield Open(prompt, quiet=False)
        yield from self.draw_sample(ctx.on(branch))
        reason = ctx.branches[branch].reason
        yield Drop(ctx.branch)
        yield Finish(branch, reason or "stop")
