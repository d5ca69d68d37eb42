"""The mesh names at the path where programs for `torch.distributed` look for them."""

from .sharding.mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
