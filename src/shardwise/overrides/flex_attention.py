"""`flex_attention` of distributed tensors: each rank computes its queries, and calls the user's functions.

Keys and values are gathered along their positions, or an all-to-all shards all three by heads; see `ops/flex_layouts`.
A `BlockMask` is that of the global sequence, and `score_mod` and `mask_mod` get global indices. The tensors that these
functions capture may be distributed; plain ones, like the mask, must be the same on all ranks.

>>> mask = create_block_mask(lambda b, h, q, k: documents[q] == documents[k], None, None, 2267, 2267, device="cpu")
>>> flex_attention(q, k, v, block_mask=mask)           # q, k, v: f32[1, 4, 2267@cp, 16]
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from torch.nn.attention import flex_attention as pytorch

from .._torch.python_functions import Function, Place, holders
from ..comm.redistribute import redistribute_local
from ..errors import InputError, MixedTensorError, ShapeError
from ..ops.captured_tensors import captured_tensors, with_captured
from ..sharding.base import DTensorBase
from ..world import RankTensor, common
from .flex_call import FlexOptions, flex_of_distributed, flex_of_ranks
from .replaced import Replaced

_replaced = Replaced()


def install_flex_attention() -> None:
    """Wrap the functions of `torch.nn.attention.flex_attention` to take distributed tensors.

    They are replaced in all modules that have imported them before, too.
    """
    for name, wrapped in (("flex_attention", _attending), ("create_block_mask", _gathering_captured)):
        if Place(pytorch, name) not in _replaced:
            _replaced.replace(holders(getattr(pytorch, name)), wrapped)


def uninstall_flex_attention() -> None:
    """Put the original functions back."""
    _replaced.restore()


def _attending(original: Function) -> Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def flex_attention(query: Tensor, *args: object, **kwargs: object) -> object:
        if not isinstance(query, (DTensorBase, RankTensor)) and not _is_for_rank(query, args, kwargs):
            return original(query, *args, **kwargs)
        bound = signature.bind(query, *args, **kwargs)
        bound.apply_defaults()
        return _flex_attention(**bound.arguments)

    return flex_attention


class RankBlockMask(pytorch.BlockMask):
    """A block mask for the queries of one rank and all keys.

    With such a mask, attention of plain tensors on a CPU has gradients, unlike PyTorch's.
    """


def _is_for_rank(query: Tensor, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    mask = kwargs.get("block_mask") if len(args) < 4 else args[3]
    return type(mask) is RankBlockMask and query.device.type == "cpu"


def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: pytorch.BlockMask | None,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: object = None,
    return_aux: pytorch.AuxRequest | None = None,
) -> object:
    _check(query, key, value, block_mask, enable_gqa)
    lse, max_scores = (return_lse, False) if return_aux is None else (return_aux.lse, return_aux.max_scores)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    options = FlexOptions(score_mod, block_mask, scale, (True, lse, max_scores))
    run = flex_of_distributed if isinstance(query, DTensorBase) else flex_of_ranks
    found = run(query, key, value, options)
    if return_aux is not None:
        aux = pytorch.AuxOutput(
            lse=found.logsumexp if lse else None, max_scores=found.max_scores if max_scores else None
        )
        return found.output, aux
    return (found.output, found.logsumexp) if return_lse else found.output


def _check(query: Tensor, key: Tensor, value: Tensor, block_mask: pytorch.BlockMask | None, enable_gqa: bool) -> None:
    """Raise an error for arguments that are errors on one device, too."""
    given = {"query": query, "key": key, "value": value}
    if not all(isinstance(tensor, DTensorBase) == isinstance(query, DTensorBase) for tensor in given.values()):
        plain = [name for name, tensor in given.items() if not isinstance(tensor, DTensorBase)]
        raise MixedTensorError(
            f"flex_attention got DTensors, but plain tensors as {' and '.join(plain)}",
            "distribute all three on one mesh: distribute_tensor(x, mesh, placements)",
        )
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in given.items())
    if not query.dim() == key.dim() == value.dim() == 4:
        raise ShapeError(f"flex_attention of {shapes}", "pass [batch, heads, positions, features] each")
    heads, shared = query.shape[1], key.shape[1]
    fits = (
        key.shape[:3] == value.shape[:3]
        and key.shape[3] == query.shape[3]
        and key.shape[0] in (1, query.shape[0])
        and (heads == shared or (shared > 0 and heads % shared == 0))
    )
    if not fits:
        raise ShapeError(
            f"flex_attention of {shapes}",
            "keys and values must have the same positions, queries and keys the same features, and the number of "
            "heads of keys must divide that of queries",
        )
    if heads != shared and not enable_gqa:
        raise ShapeError(f"flex_attention of {shapes}, whose heads differ", "pass enable_gqa=True")
    if query.dtype != key.dtype or query.dtype != value.dtype:
        raise ShapeError(
            f"flex_attention of {query.dtype} queries, {key.dtype} keys and {value.dtype} values",
            "use one dtype: key.to(query.dtype)",
        )
    lengths = query.shape[2], key.shape[2]
    if block_mask is not None and isinstance(query, DTensorBase) and tuple(block_mask.seq_lengths) != lengths:
        raise ShapeError(
            f"flex_attention of {shapes} with a block mask for {tuple(block_mask.seq_lengths)} queries and keys",
            f"create it for the global lengths: create_block_mask(mask_mod, B, H, {lengths[0]}, {lengths[1]})",
        )


# ---- masks ----------------------------------------------------------------------------------------------------------


def _gathering_captured(original: Function) -> Function:
    """Wrap `create_block_mask`: distributed tensors that a mask function captures are gathered."""

    @functools.wraps(original)
    def create_block_mask(mask_mod: Callable[..., Tensor], *args: object, **kwargs: object) -> object:
        if any(isinstance(tensor, (DTensorBase, RankTensor)) for tensor in captured_tensors(mask_mod)):
            mask_mod = with_captured(mask_mod, _full)
        return original(mask_mod, *args, **kwargs)

    return create_block_mask


def _full(tensor: Tensor) -> Tensor:
    """Return the global tensor as a plain one, equal on all ranks."""
    if isinstance(tensor, DTensorBase):
        spec = tensor._spec
        if spec.mesh_info.outside:
            raise InputError(
                f"create_block_mask with a mask function that captures {spec!r}, on a rank outside of its mesh",
                "call it on the ranks of the mesh only: if mesh.get_coordinate() is not None: ...",
            )
        tensor = redistribute_local(tensor._local_shard, spec, spec.replicated())
    return common(tensor.detach()) if isinstance(tensor, RankTensor) else tensor
