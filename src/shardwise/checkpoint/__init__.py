"""Atomic checkpoints with checksums, written by all ranks, optionally in the background.

    save        write a state to a temporary folder, and rename it when all ranks have written their files
    async_save  save in the background, from a copy of the data
    load        read a state on any mesh and with any placements; all files are checked before the state changes
    latest      the most recently completed checkpoint in a folder

The files are those of `torch.distributed.checkpoint`, whose tools read them; `shardwise.json` adds checksums.

    state       nested dicts, modules and optimizers as one dict by name
    held        the boxes of tensors that a rank holds
    spread      which rank writes which boxes
    plan        the places of tensors in files, cached between saves
    archive     the bytes before and after the elements of a tensor in a file
    blocks      files in blocks with checksums
    write       the file of one rank
    metadata    `.metadata`, read without executing what is pickled in it
    index       `shardwise.json`
    folders     names, renames, the pointer, retention
    stored      an opened checkpoint
    reads       the parts of files to read for a state, and whether they fit it; `read` reads them
    optimizers  memory for the state of optimizers that have made no step
    background  the thread and the staging buffer of a save in the background
    staging     copies of the data of a background save; `snapshot` forks a child instead
    ranks       processes, simulated ranks, or one process
"""

from ..errors import CheckpointError
from .background import Saving, release_staging_buffer
from .folders import latest
from .loading import load
from .saving import async_save, save

__all__ = ["save", "async_save", "load", "latest", "Saving", "release_staging_buffer", "CheckpointError"]
