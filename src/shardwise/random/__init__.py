"""Random numbers that do not know about sharding: each is a function of the generator's state and its global index.

The stream is the user's generator: `torch.manual_seed`, `torch.get_rng_state` and `generator=` act as on plain tensors,
and a call advances the generator by the same amount on all ranks, whatever they hold.

>>> torch.manual_seed(0)
>>> x = shardwise.randn(4096, 4096, device_mesh=mesh, placements=[Shard(0)])    # the same numbers on any mesh
>>> with shardwise.random.exact():                                               # those of plain torch, on a CPU
...     y = shardwise.randn(4096, 4096, device_mesh=mesh, placements=[Shard(1)])

`bits` turns counters into bits, `box` says which counters a rank needs, `fill` makes numbers of them, `triton_fill` the
same on a GPU in one pass, `draw` chooses between that and drawing whole, `agreement` compares the ranks' generators.
"""

from .agreement import manual_seed, set_generator_check
from .draw import WHOLE_UP_TO, Draw, exact, is_exact

__all__ = ["WHOLE_UP_TO", "Draw", "exact", "is_exact", "manual_seed", "set_generator_check"]
