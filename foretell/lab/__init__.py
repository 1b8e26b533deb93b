"""`foretell lab`: what ways to draft and rules to verify accept on a model's own distributions,
beside the most that any rule could.

At places of the target's texts the distributions of the target and of a draft model are taken as
they are, and the acceptance of every pair of drafting and verification is computed from them: in
closed form where there is one, else as a mean over draws, whose standard error is told. So pairs
are compared on the same places without the noise of generating. Nothing here prints.
"""

from foretell.lab.report import Report
from foretell.lab.runner import lab
from foretell.lab.settings import Settings

__all__ = ["Report", "Settings", "lab"]
