"""The names of `torch.distributed.device_mesh`: DeviceMesh and init_device_mesh."""

from .sharding.mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
