"""What is installed on this machine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

OLDEST_TORCH = (2, 11)


def machine() -> dict[str, object]:
    """Return versions, backends and devices. CUDA is not initialised: ranks are forked from this process."""
    return {
        "shardwise": _version("shardwise"),
        "torch": torch.__version__,
        "torch_is_supported": torch_is_supported(),
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "cpus": os.cpu_count(),
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "backends": backends(),
    }


def backends() -> dict[str, bool]:
    """Return which backends of torch.distributed this PyTorch is built with."""
    if not dist.is_available():
        return {}
    return {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
        "xccl": dist.is_xccl_available(),
    }


def torch_is_supported() -> bool:
    """Return whether PyTorch is not older than the oldest version that shardwise runs with."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= OLDEST_TORCH


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout
        return "not installed"
