"""Make local results have the strides of their specs.

The strides of a spec are those of PyTorch's meta kernel for the global tensors. The code that runs on the local shards
may return other strides: a kernel of ours, or an op whose meta kernel and real kernel differ. The first run of a plan
shows it, and all later runs of that plan then copy their results into the order of the spec. Other plans cost nothing
more.
"""

from __future__ import annotations

from torch import Tensor

from ..sharding.memory_order import has_memory_order_of
from ..sharding.spec import DTensorSpec
from ..world import RankTensor
from .call_plan import CallPlan
from .local_call import ordered_as, tensors_in


class FirstRun:
    """The first run of a plan's local code, after which `plan` is the one for later runs."""

    def __init__(self, plan: CallPlan) -> None:
        self.plan = plan

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Return the results of the local code with the strides of their specs."""
        result = self.plan.run_local(*args, **kwargs)
        specs = self.plan.results
        if type(specs) is DTensorSpec:
            if _has_memory_order_of(result, specs):
                return result
            specs = [specs]
        else:
            specs = [spec for spec in specs or () if isinstance(spec, DTensorSpec)]
            if all(map(_has_memory_order_of, tensors_in(result), specs)):
                return result
        self.plan = self.plan._replace(run_local=ordered_as(specs, self.plan.run_local))
        return ordered_as(specs, lambda: result)()


def makes_results(plan: CallPlan) -> bool:
    """Return whether a plan creates new local tensors, rather than writes or views of its arguments."""
    return not plan.writes and not plan.local_view


def _has_memory_order_of(local: Tensor, spec: DTensorSpec) -> bool:
    if isinstance(local, RankTensor):
        return all(has_memory_order_of(shard, spec.tensor_meta) for shard in local.shards)
    return has_memory_order_of(local, spec.tensor_meta)
