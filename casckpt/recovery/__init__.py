"""Recovery: from a dead run to a continuation that was checked.

* `compare_lines`, `continuation`: steps that were committed twice, compared bit by bit;
* `bisect_check`: the first step at which a check of your own fails.

Sits on engine and store; whatever it changes, it changes through them.
"""

from casckpt.recovery.bisection import Bisection, bisect_check, command_check
from casckpt.store.lines import Divergence, LineComparison, compare_lines, continuation

__all__ = [
    "Bisection",
    "Divergence",
    "LineComparison",
    "bisect_check",
    "command_check",
    "compare_lines",
    "continuation",
]
