"""The auditor: what a method claims, checked on the model, device and number format at hand.

It knows which experiment proves which claim and what counts as proof; it knows no method. The
checks, each in the file that is named:

- *greedy* (checks.py): the tokens of plain decoding, in float32 and in the model's own format. At
  the first difference the logits of the two tokens are compared, from a forward of one row. They
  are a tie if they differ by no more than rounding, since a forward of several rows sums in another
  order than a forward of one. A tie fails no claim.
- *seeds* (checks.py): the tokens plain decoding samples with the same seed, where that is claimed.
- *law* (law.py): on a toy model every outcome of every draw is enumerated, so the probability of
  each output is computed, not estimated.
- *ends* (law.py): the same with a logits processor that raises when it is asked about a text that
  has already ended, as a grammar does.
- *samples* (samples.py): tokens sampled from the real model against the probabilities it gives
  them, by an exact Monte Carlo test (statistics.py) whose power is reported.
- *exact bits* (checks.py), of models loaded with them: the logits of random chunks, trees, batches
  and forks equal those of single steps to the last bit. Greedy comparisons then allow no tie.
- *cache* (checks.py): the rows a generation leaves in the cache against those of a fresh prefill.

A check passes only if something was drafted; else it is untested, and the audit has not held.
"""

from foretell.audit.auditor import PROMPTS, audit
from foretell.audit.report import Check, MethodReport, Report

__all__ = ["PROMPTS", "Check", "MethodReport", "Report", "audit"]
