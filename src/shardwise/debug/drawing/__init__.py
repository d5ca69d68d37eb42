"""Tensors, specs, plans, meshes and modules drawn as HTML, for notebooks and for the report.

markup     elements and escaped text
colours    colours that can be read on light and on dark ground
spec       which ranks hold which shards, and what each mesh axis does
mesh       the ranks of a mesh
plan       the steps of a redistribution
module     how the parameters of a module are sharded
show       any of these as a value that a notebook displays
"""

from .show import Drawing, load_ipython_extension, show

__all__ = ["Drawing", "load_ipython_extension", "show"]
