"""Check a parallel program: its training on simulated ranks is compared with training on one device.

verify         the public function
program        running the program: build, distribute, train
recording      what a run computes, in order
rank_program   code for local tensors on simulated ranks; `rank_numbers` for the numbers of ranks
tolerance      how much of a difference is rounding
ranks          what ranks hold of a tensor, as a grid
distribution   which distribution explains what they hold
comparing      one tensor, compared
cause          the pattern of a difference: a factor, a missing reduction, ranks that differ, ...
finding        where differences begin
advice         what they usually come from, and what to write instead
report         the result
"""

from .report import Difference, Report
from .verify import verify

__all__ = ["verify", "Report", "Difference"]
