"""Plans: which modules they match, the names of styles, and their errors."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed.tensor.parallel as theirs
from torch import nn

from shardwise import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from shardwise.errors import InputError, MeshError, PlacementError
from shardwise.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from tests.parallel.models import Half, Mlp, first, line_of, made


@pytest.fixture
def mesh():
    with line_of(4) as mesh:
        yield mesh


def model() -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList(Half(Mlp()) for _ in range(12)), "head": nn.Linear(16, 8)})


def cut(module: nn.Module) -> set[str]:
    return {name for name, p in module.named_parameters() if isinstance(p, DTensor) and p.placements != (Replicate(),)}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("head", {"head"}),
        ("layers.0.inner.up", {"layers.0.inner.up"}),
        ("layers.*.inner.up", {f"layers.{i}.inner.up" for i in range(12)}),
        ("layers.[0-2].inner.up", {f"layers.{i}.inner.up" for i in range(3)}),
        ("layers.1?.inner.u*", {"layers.10.inner.up", "layers.11.inner.up"}),
        ("*.3.*.up", {"layers.3.inner.up"}),
    ],
)
def test_paths_with_wildcards(mesh, pattern, names) -> None:
    parallelized = parallelize_module(model(), mesh, {pattern: ColwiseParallel()})
    assert cut(parallelized) == {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}


def test_a_style_or_an_empty_path_is_for_the_module_itself(mesh) -> None:
    for plan in (RowwiseParallel(), {"": RowwiseParallel()}, {"": "rowwise"}, "rowwise"):
        assert cut(parallelize_module(nn.Linear(8, 8), mesh, plan)) == {"weight"}


def test_the_mesh_of_the_context(mesh) -> None:
    with mesh:
        assert cut(parallelize_module(nn.Linear(8, 8), parallelize_plan=RowwiseParallel())) == {"weight"}


def test_a_missing_plan_and_entries_without_a_match_are_warned_about(mesh) -> None:
    with pytest.warns(UserWarning, match="no plan"):
        parallelize_module(model(), mesh)
    text = r"'layers.\*.inner.upp' matches no module: in 'layers.0.inner' there is no 'upp' among down, up; .*skipped"
    with pytest.warns(UserWarning, match=text):
        assert cut(parallelize_module(model(), mesh, {"layers.*.inner.upp": "colwise"})) == set()
    with pytest.warns(UserWarning, match="in the ModuleDict there is no 'heat' among head, layers"):
        assert cut(parallelize_module(model(), mesh, {"heat": "colwise", "head": "rowwise"})) == {"head.weight"}
    with pytest.warns(UserWarning, match="weight is a parameter, and this style applies to modules"):
        parallelize_module(model(), mesh, {"head.weight": ColwiseParallel()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize_module(model(), mesh, {})


def test_an_unsupported_module_is_named_with_its_type_and_the_supported_ones(mesh) -> None:
    with pytest.raises(
        InputError, match=r"'layers.0.norm': ColwiseParallel cannot be applied to a LayerNorm: it supports"
    ):
        parallelize_module(model(), mesh, {"layers.*.norm": "colwise"})
    with pytest.raises(InputError, match="module 'layers': RowwiseParallel cannot be applied to a ModuleList: it supp"):
        parallelize_module(model(), mesh, {"layers": RowwiseParallel()})
    with pytest.raises(InputError, match="RowwiseParallel cannot be applied to a MultiheadAttention"):
        parallelize_module(nn.MultiheadAttention(8, 2), mesh, "rowwise")


def test_dims_that_cannot_be_sharded(mesh) -> None:
    with pytest.raises(PlacementError, match=r"RowwiseParallel cannot shard the in_channels of a Conv2d with groups=2"):
        parallelize_module(nn.Conv2d(4, 4, 3, groups=2), mesh, RowwiseParallel())
    with pytest.raises(PlacementError, match=r"out_channels of a ConvTranspose1d with groups=2"):
        parallelize_module(nn.ConvTranspose1d(4, 4, 3, groups=2), mesh, ColwiseParallel())
    linear = parallelize_module(nn.Linear(8, 8), mesh, ColwiseParallel(output_layouts=Shard(3)))
    with pytest.raises(PlacementError, match=r"Shard\(dim=3\)"):
        linear(distribute_tensor(torch.randn(2, 8), mesh, [Replicate()]))


def test_entries_that_are_not_styles(mesh) -> None:
    known = "colwise, colwise_rep, colwise_gather_output, packed_colwise, rowwise, rowwise_rep"
    with pytest.raises(InputError, match=f"there is no style named 'columns': use a ParallelStyle, or one of {known}"):
        parallelize_module(model(), mesh, {"head": "columns"})
    with pytest.raises(InputError, match=r"import the styles from shardwise\.parallel"):
        parallelize_module(model(), mesh, {"head": theirs.ColwiseParallel()})
    with pytest.raises(InputError, match="give a ParallelStyle, or the name of one"):
        parallelize_module(model(), mesh, {"head": 3})


def test_layouts_that_do_not_pair() -> None:
    with pytest.raises(InputError, match="give both"):
        PrepareModuleInput(input_layouts=Shard(0))
    with pytest.raises(InputError, match="give both"):
        PrepareModuleOutput(output_layouts=(Shard(0), None), desired_output_layouts=(Shard(1),))
    with pytest.raises(InputError, match="name the same arguments"):
        PrepareModuleInput(input_kwarg_layouts={"x": Shard(0)}, desired_input_kwarg_layouts={"y": Shard(0)})


def test_layouts_that_do_not_fit_the_call(mesh) -> None:
    x = distribute_tensor(torch.randn(2, 8), mesh, [Replicate()])
    style = PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Shard(0), None))
    with pytest.raises(InputError, match="1 positional arguments for input_layouts"):
        parallelize_module(nn.Identity(), mesh, style)(x)
    style = PrepareModuleOutput(output_layouts=(Shard(0), None), desired_output_layouts=(Shard(0), None))
    with pytest.raises(InputError, match="1 outputs for output_layouts"):
        parallelize_module(nn.Identity(), mesh, style)(x)


# What each name of a hub makes of the feed-forward part of a model, as its plans have it.
HUB_PLANS = {
    "usual": {"up": "colwise", "down": "rowwise"},
    "gathered between": {"up": "colwise_rep", "down": "rowwise_rep"},
    "the same, newer names": {"up": "colwise_gather_output", "down": "rowwise_split_input"},
    "summed at the end": {"up": "local_colwise", "down": "local_rowwise", "": "gather"},
    "replicated": {"up": "replicate", "down": "replicate"},
    "gathered, then cut": {"up": "colwise_rep", "down": "replicate"},
}


@pytest.mark.parametrize("name", HUB_PLANS)
def test_plans_as_hubs_write_them(mesh, name) -> None:
    x = torch.randn(2, 3, 16)
    mlp = parallelize_module(made(Mlp), mesh, HUB_PLANS[name])
    out = mlp(distribute_tensor(x, mesh, [Replicate()]).to_local())
    assert not isinstance(out, DTensor)
    torch.testing.assert_close(first(out), made(Mlp)(x).detach())


def test_an_embedding_by_its_vocabulary(mesh) -> None:
    embedding = parallelize_module(nn.Embedding(10, 4), mesh, "embedding_rowwise")
    assert embedding.weight.placements == (Shard(0),)


def test_a_style_of_ones_own_and_the_source_of_data() -> None:
    class Note(ParallelStyle):
        def _apply(self, module, device_mesh):
            module.note = (self.src_data_rank, device_mesh.size())
            return module

    with line_of(4) as mesh:
        assert parallelize_module(nn.Identity(), mesh, Note(), src_data_rank=None).note == (None, 4)
        assert parallelize_module(nn.Identity(), mesh, Note()).note == (0, 4)


def test_axes_of_a_larger_mesh() -> None:
    with simulate(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "model"))
        with pytest.raises(MeshError, match=r"on the axis 'tp', and .* has none of that name: .*style.over\('model'\)"):
            parallelize_module(nn.Linear(8, 8), mesh, ColwiseParallel())
        linear = parallelize_module(nn.Linear(8, 8), mesh, ColwiseParallel().over("model"))
        assert linear.weight.placements == (Replicate(), Shard(0))
