"""A program for `shardwise report`."""

import torch
from torch import nn

from shardwise import P, distribute_tensor, init_device_mesh, simulate
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def build(mesh):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    styles = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel(use_local_output=False)}
    return parallelize_module(model, mesh, styles)


def returns_a_step(mesh):
    model = build(mesh)
    x = distribute_tensor(torch.ones(4, 8), mesh, P("dp"))
    return lambda: model(x).sum().backward()


def runs(mesh):
    returns_a_step(mesh)()


def own_world():
    with simulate(2):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        returns_a_step(mesh)()


def partial(mesh):
    model = build(mesh)
    model.extra = nn.Linear(4, 4)
    return model


def needs_more(mesh, batch):
    raise AssertionError("not called")


not_a_function = 3
