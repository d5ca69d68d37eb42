"""Replace `torch.distributed.tensor`: its import paths under `shardwise`, and take-over of the module itself.

    table            where each name of `torch.distributed.tensor` and its submodules lives in shardwise
    modules          makes the modules of the table when a program imports them
    install          puts shardwise in the place of `torch.distributed.tensor` in this process
    attention, attention_style, load_balancers    context parallel
    shapes, tensors, data_parallel, strategies, random_state    other private functions that programs import

>>> import shardwise
>>> shardwise.install()
>>> from torch.distributed.tensor import DTensor       # shardwise.DTensor
"""

from .install import install, installed, uninstall
from .modules import find_table_modules, table_module

__all__ = ["find_table_modules", "install", "installed", "table_module", "uninstall"]
