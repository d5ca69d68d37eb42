"""Load and save models in the format of model hubs: each rank reads and writes its own shards of safetensors files.

load   build a model without memory, distribute it by a plan, and read the bytes of this rank's shards
save   write a folder that transformers' `from_pretrained` reads, every rank its own byte ranges, atomically

loading      `load`
saving       `save`
files        headers and indexes: which tensor is where in which file
mosaic       tensors without data that are assembled from boxes of other tensors
conversions  transformers' own renames, stacks, splits and reshapes of weights
state        parameters and buffers under the keys of the state dict
transfers    the intersections of local shards with stored tensors, and which replica writes what
positioned   reads and writes at byte offsets of a file
build        a model with parameters on the meta device and initialized buffers; `memory` allocates local shards
plans        the values that `plan=` takes
folder       a temporary folder that replaces the target when it is complete
"""

from .loading import LoadReport, load, load_with_report
from .saving import save

__all__ = ["load", "save", "LoadReport", "load_with_report"]
