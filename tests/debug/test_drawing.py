"""Drawings for notebooks: who holds what, in colour; everything escaped; big meshes condensed."""

import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardwise import InterleavedShard, P, Partial, Replicate, Shard, distribute_tensor, plan
from shardwise.debug import load_ipython_extension, show
from shardwise.debug.drawing.markup import Markup, tag
from shardwise.errors import InputError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardwise.sharding.spec_parse import parse_spec
from tests.worlds import mesh_of

AXES = ("dp", "tp")


class Outline(HTMLParser):
    """The texts of a page by element; fails if elements do not close in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.texts, self.tags = [], [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in ("br", "input", "meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def cells(self):
        return [text for tag, text in self.texts if tag == "td"]


def test_a_tensor_draws_itself():
    with mesh_of(2, 2, names=AXES) as mesh:
        x = distribute_tensor(torch.zeros(4, 6), mesh, P("dp", "tp"))
        page = x._repr_html_()
        outline = Outline(page)
        assert outline.cells() == ["0", "1", "2", "3"]
        assert [text for tag, text in outline.texts if tag == "th"] == ["0:3", "3:6", "0:2", "2:4"]
        assert "f32[4@dp, 6@tp]" in page
        assert "96 B, 24 B per rank" in page
        assert len(set(re.findall(r"background:(hsla\([^)]*\))", page))) == 4  # a colour for each shard
        assert x.spec._repr_html_() == page.replace("DTensor ", "")
        assert nn.Parameter(x)._repr_html_() == page


@pytest.mark.parametrize(
    ("text", "cells", "says"),
    [
        ("f32[4, 6]", ["0-3"], "replicates"),
        ("f32[4, 6] sum(dp)", ["0,1 + 2,3"], "holds terms of a sum"),
        ("f32[4, 6@tp] max(dp)", ["max(0 | 2)", "max(1 | 3)"], "shards dim 1"),
        ("f32[3@(dp, tp)]", ["0", "1", "2"], "empty shards: 3"),
        ("f32[(2 4@tp)]", ["0,2", "1,3", "0,2", "1,3"], "shards dim 0"),
        ("f32[2, 4@tp, 3]", ["0,2", "[:, 0:2, :]", "1,3", "[:, 2:4, :]"], "shards dim 1"),
        ("f32[]", ["0-3", "[]"], "replicates"),
        ("f32[0, 4@tp]", ["0-3", "empty"], "0 B"),
    ],
)
def test_specs(text, cells, says):
    with mesh_of(2, 2, names=AXES) as mesh:
        page = parse_spec(text, mesh)._repr_html_()
    assert [cell for cell in Outline(page).cells() if cell] == cells
    assert says in page


def test_big_meshes_are_condensed():
    with mesh_of(16, 32, names=AXES) as mesh:
        pages = [
            parse_spec(text, mesh)._repr_html_()
            for text in ("f32[512@dp, 512@tp]", "f32[512@(dp, tp)]", "f32[16@dp, 32@tp, 4]", "f32[512@tp] sum(dp)")
        ]
        pages += [show(mesh)._repr_html_()]
    for page in pages:
        Outline(page)
        assert len(page) < 20_000
        assert "…" in page or "⋮" in page
    assert "511" in pages[0]  # the last shard is there
    assert "504 more" in pages[2]


def test_a_plan_draws_itself():
    with mesh_of(2, 2, names=AXES) as mesh:
        page = plan(parse_spec("f32[8, 8] sum(dp)", mesh), [Shard(0), Replicate()])._repr_html_()
    Outline(page)
    assert "reduce-scatter (sum)" in page
    assert "f32[8@dp, 8]" in page
    assert "by the cost model" in page


def test_meshes_and_modules_are_shown():
    with mesh_of(2, 2, names=AXES) as mesh:
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        drawn = show(model)
        page = drawn._repr_html_()
        Outline(page)
        assert "tp shards dim 0" in page
        assert "0.weight" in repr(drawn)
        assert Outline(show(mesh)._repr_html_()).cells() == ["0", "1", "2", "3"]
        assert repr(show(mesh)) == "mesh(dp=2, tp=2)\n[[0, 1], [2, 3]]"
    with mesh_of(2, 2, 2) as mesh:
        assert [text for tag, text in Outline(show(mesh).html).texts if tag == "caption"] == ["a 0", "a 1"]
    with mesh_of(3) as mesh:
        assert Outline(show(mesh).html).cells() == ["0", "1", "2"]


def test_everything_is_escaped():
    bad = "<script>alert(1)</script>"
    assert tag("b", bad, title='"><i>', class_=None) == (
        '<b title="&quot;&gt;&lt;i&gt;">&lt;script&gt;alert(1)&lt;/script&gt;</b>'
    )
    assert tag("b", Markup("<i></i>"), 3) == "<b><i></i>3</b>"
    with mesh_of(2, names=(bad,)) as mesh:
        model = nn.Module()
        model.register_parameter(bad, nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)])))
        values = [mesh, model, getattr(model, bad), plan(getattr(model, bad), [Replicate()])]
        for value in values:
            assert "script" not in Outline(show(value)._repr_html_()).tags


def test_a_notebook_draws_meshes_and_distributed_modules():
    drawers = {}
    formatter = SimpleNamespace(for_type=drawers.__setitem__)
    load_ipython_extension(SimpleNamespace(display_formatter=SimpleNamespace(formatters={"text/html": formatter})))
    with mesh_of(2, 2, names=AXES) as mesh:
        assert "shardwise-mesh" in drawers[type(mesh)](mesh)
        assert drawers[nn.Module](nn.Linear(2, 2)) is None  # as it was before
        model = parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())
        assert "shardwise-module" in drawers[nn.Module](model)


def test_other_values_are_refused():
    with pytest.raises(InputError, match="a list cannot be drawn"):
        show([1])


def test_interleaved_and_partial_specs_of_many_ranks_name_the_ranks():
    with mesh_of(32, 2, names=AXES) as mesh:
        x = distribute_tensor(torch.zeros(8, 8), mesh, [Partial(), InterleavedShard(1, 2)])
        assert "0, 2, …, 62 (32 ranks)" in x._repr_html_()
