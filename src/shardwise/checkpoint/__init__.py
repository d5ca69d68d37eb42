"""Checkpoints that are complete or not there: atomic, checked, written by all ranks, in the background if wanted.

    save        write a state as one folder: beside it first, renamed when all ranks are done
    async_save  the same in the background, after a copy of the data
    load        read a state on any mesh and with any placements; everything is checked before anything changes
    latest      the checkpoint in a folder that was completed last

The files are those of `torch.distributed.checkpoint`, whose tools read them; `shardwise.json` adds checksums.

    state       nested dicts, modules and optimizers as one dict by name
    held        which boxes of which tensors a rank holds
    spread      who writes what
    plan        what goes to which place of which file, kept between saves
    archive     what surrounds the elements of a tensor in a file
    blocks      files in blocks with checksums
    write       the file of one rank
    metadata    `.metadata`, read without pickle's power to call functions
    index       `shardwise.json`
    folders     names, renames, the pointer, retention
    stored      an opened checkpoint
    reads       what to read for a state, and whether it fits; `read` does it
    background  the thread and the staging memory of a save in the background; `snapshot` stages by a forked child
    ranks       processes, simulated ranks, or one process
"""

from ..errors import CheckpointError
from .background import Saving, release_staging_buffer
from .folders import latest
from .loading import load
from .saving import async_save, save

__all__ = ["save", "async_save", "load", "latest", "Saving", "release_staging_buffer", "CheckpointError"]
