"""What a recording depends on is guarded: a change records again, or is an error, and never gives an old value."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise import CostModel, P, Replicate, distribute_tensor, erase
from shardwise.errors import EraseError, InputError, ShardwiseError
from shardwise.experimental import implicit_replication
from shardwise.sharding.mesh import mesh_info_of
from tests.erasing.steps import batch, model_on
from tests.worlds import mesh_of

FACTOR = 2.0


@pytest.fixture
def mesh():
    with mesh_of(2, 2) as mesh:
        yield mesh


def recorded_again(step, change, *args):
    """Whether a change makes the step record again; results are those of the step as written, before and after."""
    counts = []
    for _ in range(2):
        for _ in range(2):
            assert torch.equal(step(*args).full_tensor(), step.__wrapped__(*args).detach().full_tensor())
        counts.append(step.recordings)
        if len(counts) == 1:
            change()
    return counts[1] - counts[0] == 1


def test_specs_shapes_dtypes_and_values_of_arguments(mesh):
    step = erase(lambda x, scale: x * scale)
    x = batch(mesh, 0)
    calls = [
        (x, 2),
        (x, 3),
        (x, 2.0),
        (batch(mesh, 0, 8), 2),
        (x.redistribute(placements=P(None, "b")), 2),
        (x.double(), 2),
        (x.t().contiguous().t(), 2),
        (x.to_local(), 2),
        (x, x),
    ]
    for count, (value, scale) in enumerate(calls, 1):
        for _ in range(2):
            expected = step.__wrapped__(value, scale)
            assert torch.equal(*(_full(v) for v in (step(value, scale), expected)))
        assert step.recordings == count
    assert all(torch.equal(_full(step(*args)), _full(step.__wrapped__(*args))) for args in calls)
    assert step.recordings == len(calls), "recordings are kept by signature"


def _full(value):
    return value.full_tensor() if isinstance(value, shardwise.DTensor) else torch.stack(list(value.shards))


def test_recordings_are_bounded(mesh):
    step = erase(lambda x, scale: x * scale)
    for scale in range(40):
        step(batch(mesh, 0), scale)
    assert step.recordings == 40
    step(batch(mesh, 0), 39)
    assert step.recordings == 40
    step(batch(mesh, 0), 0)
    assert step.recordings == 41


def test_train_and_eval(mesh):
    model = model_on(mesh, dropout=0.0)
    model[0].dropout.p = 0.0
    assert recorded_again(erase(lambda x: model(x)), model.eval, batch(mesh, 0))


def test_an_option_of_a_module(mesh):
    model = model_on(mesh)
    step = erase(lambda x: model(x))
    assert recorded_again(step, lambda: setattr(model[0].norm, "eps", 0.5), batch(mesh, 0))


def test_a_parameter_is_replaced(mesh):
    model = model_on(mesh)

    def replace():
        model[0].up.weight = nn.Parameter(model[0].up.weight.detach() * 2)

    assert recorded_again(erase(lambda x: model(x)), replace, batch(mesh, 0))


def test_a_parameter_gets_other_data(mesh):
    model = model_on(mesh)

    def replace():
        model[0].up.weight.data = model[0].up.weight.detach() * 2

    assert recorded_again(erase(lambda x: model(x)), replace, batch(mesh, 0))


def test_a_parameter_is_written_in_place(mesh):
    model = model_on(mesh)

    def write():
        with torch.no_grad():
            model[0].up.weight.mul_(2)

    assert not recorded_again(erase(lambda x: model(x)), write, batch(mesh, 0))


def test_a_submodule_is_replaced(mesh):
    model = model_on(mesh)
    other = model_on(mesh)
    with torch.no_grad():
        other[0].up.weight.mul_(3)
    step = erase(lambda x: model(x))
    assert recorded_again(step, lambda: setattr(model, "0", other[0]), batch(mesh, 0))


def test_a_variable_of_the_closure(mesh):
    factor = 2.0

    def step(x):
        return x * factor

    def change():
        nonlocal factor
        factor = 5.0

    assert recorded_again(erase(step), change, batch(mesh, 0))


def test_a_tensor_of_the_closure(mesh):
    offset = batch(mesh, 1)

    def step(x):
        return x + offset

    def change():
        nonlocal offset
        offset = batch(mesh, 2)

    assert recorded_again(erase(step), change, batch(mesh, 0))


def test_a_global_variable(mesh, monkeypatch):
    def step(x):
        return x * FACTOR

    assert recorded_again(erase(step), lambda: monkeypatch.setitem(globals(), "FACTOR", 7.0), batch(mesh, 0))


def test_an_attribute_of_the_object(mesh):
    class Scale:
        factor = 1.0

        def __init__(self):
            self.factor = 2.0

        def step(self, x):
            return x * self.factor

    scale = Scale()
    assert recorded_again(erase(scale.step), lambda: setattr(scale, "factor", 3.0), batch(mesh, 0))


def test_grad_mode_autocast_and_our_modes(mesh):
    model = model_on(mesh)
    step = erase(lambda x: model(x) * 2)
    plain = torch.ones(8)
    mixed = erase(lambda x: x + plain)
    x = batch(mesh, 0)
    step(x)
    with torch.no_grad():
        step(x)
        assert step.recordings == 2
        step(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert step(x).dtype == model(x).dtype
    assert step.recordings == 3
    step(x)
    assert step.recordings == 3
    with implicit_replication():
        mixed(x)
        mixed(x)
    assert mixed.recordings == 1
    with pytest.raises(ShardwiseError, match="mixes distributed tensors"):
        mixed(x)


def test_gradients_there_or_not(mesh):
    model = model_on(mesh)
    step = erase(lambda x: model(x).square().mean().backward())
    expected = model_on(mesh)
    x = batch(mesh, 0)
    for clear in (False, False, True, False, True, True):
        step(x)
        expected(x).square().mean().backward()
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(p.grad.full_tensor(), q.grad.full_tensor())
            if clear:
                p.grad = q.grad = None
    assert step.recordings == 2


def test_a_parameter_group_is_added(mesh):
    model = model_on(mesh)
    opt = torch.optim.SGD(model[0].parameters(), lr=0.1)

    def run(x):
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        model.zero_grad()
        return loss.detach()

    step = erase(run)
    for _ in range(2):
        step(batch(mesh, 0))
    assert step.recordings == 1
    opt.add_param_group({"params": list(model[1].parameters())})
    before = model[1].up.weight.detach().full_tensor().clone()
    step(batch(mesh, 0))
    assert step.recordings == 2
    assert not torch.equal(before, model[1].up.weight.detach().full_tensor())


def test_rules_and_the_cost_model(mesh):
    step = erase(lambda x: x * 2)
    x = batch(mesh, 0)
    step(x)
    with shardwise.using_cost_model(CostModel()):
        step(x)
        assert step.recordings == 2


# ---- what cannot be recorded ----------------------------------------------------------------------------------------


def _if(x):
    return x * 2 if x.sum() > 0 else x  # the line


def _item(x):
    return x * x.sum().item()  # the line


def _tolist(x):
    return x * x.flatten().tolist()[0]  # the line


def _numpy(x):
    return x * float(x.full_tensor().numpy()[0, 0])  # the line


def _mask(x):
    return x[x > 0]  # the line


def _format(x):
    return x * float(f"{x.sum():.1f}")  # the line


@pytest.mark.parametrize("fn", [_if, _item, _tolist, _numpy, _mask, _format], ids=lambda fn: fn.__name__)
def test_python_that_depends_on_data_is_an_error_that_names_the_line(mesh, fn):
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "the line" in text and number > fn.__code__.co_firstlineno
    )
    x = batch(mesh, 0)
    with pytest.raises(EraseError, match=f"test_guards.py:{line}: .* reads a tensor.*torch.where"):
        erase(fn)(x)
    assert torch.equal((x + 1).full_tensor(), x.full_tensor() + 1), "recording has ended"


def test_a_number_is_returned(mesh):
    with pytest.raises(EraseError, match="returns the number 3"):
        erase(lambda x: (x, 3))(batch(mesh, 0))


def test_a_counter_is_changed(mesh):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    with pytest.raises(EraseError, match="changes calls from 0 to 1"):
        erase(Counting())(batch(mesh, 0))


def test_a_tensor_is_kept_each_time(mesh):
    kept = []

    def step(x):
        y = x * 2
        kept.append(y)
        return y + 1

    erased = erase(step)
    for i in range(2):
        assert torch.equal(erased(batch(mesh, i)).full_tensor(), batch(mesh, i).full_tensor() * 2 + 1)
    with pytest.raises(EraseError, match="keeps a tensor"):
        erased(batch(mesh, 2))


def test_a_cache_that_the_first_call_fills(mesh):
    class Cached(nn.Module):
        table = None

        def forward(self, x):
            if self.table is None:
                self.__dict__["table"] = x.new_ones(8) * 3
            return x + self.table

    step = erase(Cached())
    for i in range(4):
        x = batch(mesh, i)
        assert torch.equal(step(x).full_tensor(), x.full_tensor() + 3)
    assert step.recordings == 2


def test_a_closure_of_the_optimizer(mesh):
    model = model_on(mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    step = erase(lambda x: opt.step(lambda: model(x).mean()))
    with pytest.raises(EraseError, match="runs the model inside the optimizer"):
        step(batch(mesh, 0))


def test_seeding_inside(mesh):
    def step(x):
        torch.manual_seed(3)
        return F.dropout(x)

    with pytest.raises(EraseError, match="seeds a generator"):
        erase(step)(batch(mesh, 0))


def test_arguments_of_erase():
    with pytest.raises(InputError, match="passes"):
        erase(lambda x: x, passes=["speed"])
    with pytest.raises(InputError, match="backend"):
        erase(lambda x: x, backend="fast")
    with pytest.raises(InputError, match="erase got a int, which is not callable"):
        erase(3)
    with pytest.raises(EraseError, match="is not recorded yet"):
        print(erase(lambda x: x).code)


def test_an_error_while_recording_leaves_nothing_behind(mesh):
    model = model_on(mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    fail = [True]

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        if fail:
            raise ValueError("once")
        return loss.detach()

    erased = erase(step)
    hooks = dict(torch.nn.modules.module._global_forward_pre_hooks)
    with pytest.raises(ValueError, match="once"):
        erased(batch(mesh, 0))
    assert dict(torch.nn.modules.module._global_forward_pre_hooks) == hooks
    fail.clear()
    first = erased(batch(mesh, 0)).full_tensor()
    assert erased(batch(mesh, 0)).full_tensor() < first


def test_out_of_range_indices_are_found_in_replays(mesh):
    table = distribute_tensor(torch.randn(10, 4), mesh, P("a"))
    step = erase(lambda i: F.embedding(i, table))
    index = distribute_tensor(torch.tensor([1, 2, 9]), mesh, [Replicate(), Replicate()])
    for _ in range(2):
        assert torch.equal(step(index).full_tensor(), table.full_tensor()[[1, 2, 9]])
    with pytest.raises(IndexError, match="out of bounds"):
        step(index + 1)


def test_recordings_die_with_their_world():
    step = erase(lambda x: x * 2)
    with mesh_of(2, 2) as mesh:
        step(batch(mesh, 0))
        step(batch(mesh, 0))
        info = weakref.ref(mesh_info_of(mesh))
        del mesh
    gc.collect()
    assert info() is None
    with mesh_of(4) as mesh:
        x = distribute_tensor(torch.ones(4), mesh, P("a"))
        assert torch.equal(step(x).full_tensor(), torch.full((4,), 2.0))
