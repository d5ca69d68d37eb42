"""Random numbers that do not depend on sharding: each is a function of the generator's state and its global index.

The stream is the user's generator: `torch.manual_seed`, `torch.get_rng_state` and `generator=` act as on plain tensors,
and a call advances the generator by the same amount on all ranks, whatever they hold.

>>> torch.manual_seed(0)
>>> x = shardwise.randn(4096, 4096, device_mesh=mesh, placements=P("dp"))    # the same numbers on any mesh
>>> with shardwise.random.exact():                                            # those of plain torch, on a CPU
...     y = shardwise.randn(4096, 4096, device_mesh=mesh, placements=P(None, "tp"))

    draw         one call: draws the global tensor, or a key from which every rank computes its shard
    agreement    whether all ranks' generators are in the same state
    box          which global indices a rank holds
    bits         from an index to random bits
    fill         from bits to the numbers of each distribution; `normal` for normal numbers
    triton_fill  `fill` on a GPU in one pass, with the kernels in `triton_kernels`
"""

from .agreement import manual_seed, set_generator_check
from .draw import GLOBAL_DRAW_LIMIT, Draw, exact, is_exact

__all__ = ["GLOBAL_DRAW_LIMIT", "Draw", "exact", "is_exact", "manual_seed", "set_generator_check"]
