"""Models of hubs in the files of hubs: safetensors folders, read and written by all ranks, each its own shards.

load   build a model without memory, distribute it by a plan, and read the bytes of this rank's shards
save   write a folder that transformers' `from_pretrained` reads, every rank its own byte ranges, atomically

files        headers and indexes: which tensor is where in which file
mosaic       tensors that are put together from boxes of others, as arithmetic
conversions  what transformers calls weights in files, and how it stacks and splits them
state        parameters and buffers under the keys of the state dict
transfers    the intersections of shards with boxes of files, and who writes what several ranks hold
positioned   reads and writes at places in a file
build        parameters on the meta device, buffers with their values; `memory` allocates local shards
plans        what `plan=` may be
folder       written beside its place, and renamed
"""

from .loading import LoadReport, load, load_with_report
from .saving import save

__all__ = ["load", "save", "LoadReport", "load_with_report"]
