"""Show anything that can be drawn in a notebook.

A DTensor, a spec and a plan draw themselves. `DeviceMesh` and `nn.Module` are PyTorch's classes, so `show(mesh)` and
`show(module)` draw them. After `%load_ext shardwise.debug` a notebook draws them by itself, modules if distributed.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...comm.plan import SpecPlan
from ...errors import InputError
from ...sharding.drawn import draw_in_notebooks
from ...sharding.mesh import mesh_info_of
from ...sharding.spec import DTensorSpec
from ...tensor.dtensor import DTensor
from ..picture import draw
from .markup import Markup
from .mesh import mesh_html
from .module import module_html
from .plan import plan_html
from .spec import spec_html

Drawable = DTensor | DTensorSpec | SpecPlan | DeviceMesh | nn.Module


class Drawing:
    """A drawing: HTML in a notebook, text elsewhere.

    >>> str(show(x)) == draw(x)
    True
    """

    def __init__(self, html: str, text: str) -> None:
        self.html, self.text = html, text

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def show(value: Drawable) -> Drawing:
    """Return a drawing of a tensor, spec, plan, mesh or module: which rank holds what. Nothing is communicated.

    >>> show(x)
    """
    if isinstance(value, (DTensor, DTensorSpec, nn.Module)):
        return Drawing(html_of(value), draw(value))
    if isinstance(value, DeviceMesh):
        return Drawing(html_of(value), f"{mesh_info_of(value)!r}\n{value.mesh.tolist()}")
    return Drawing(html_of(value), str(value))


def html_of(value: object) -> Markup:
    """Return the drawing of a value as HTML."""
    if isinstance(value, DTensor):
        return spec_html(value.spec, title="DTensor")
    if isinstance(value, DTensorSpec):
        return spec_html(value)
    if isinstance(value, SpecPlan):
        return plan_html(value)
    if isinstance(value, DeviceMesh):
        return mesh_html(value)
    if isinstance(value, nn.Module):
        return module_html(value)
    raise InputError(f"a {type(value).__name__} cannot be drawn", "pass a DTensor, a spec, a plan, a mesh or a module")


def load_ipython_extension(ipython: Any) -> None:
    """Draw meshes and distributed modules in this notebook: `%load_ext shardwise.debug`."""
    formatter = ipython.display_formatter.formatters["text/html"]
    formatter.for_type(DeviceMesh, mesh_html)
    formatter.for_type(nn.Module, _module_if_distributed)


def _module_if_distributed(module: nn.Module) -> str | None:
    return module_html(module) if any(isinstance(p, DTensor) for p in module.parameters()) else None


draw_in_notebooks(html_of)
