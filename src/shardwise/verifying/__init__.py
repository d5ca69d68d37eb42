"""Check a parallel program: its training on simulated ranks is compared with training on one device.

verify         the public function
program        runs the program: build, distribute, train
recording      the tensors that a run computes, in order
rank_program   runs code for local tensors on simulated ranks; `rank_numbers` makes `get_rank()` each rank's own
tolerance      the largest difference that rounding explains, for each tensor
ranks          what ranks hold of a tensor, as a grid of one tensor per rank
distribution   which placements reproduce the reference from that grid
comparing      compares one tensor
cause          the pattern of a difference: a factor, a missing reduction, ranks that differ, ...
finding        where differences begin
advice         what a pattern usually comes from, and what to write instead
report         the result
"""

from .report import Difference, Report
from .verify import verify

__all__ = ["verify", "Report", "Difference"]
