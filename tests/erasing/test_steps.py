"""Erased steps compute what the steps compute as written, bit by bit, and leave the same state."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import (
    CostModel,
    DTensor,
    P,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    erase,
    using_cost_model,
)
from tests.erasing.steps import Layer, batch, compare, model_on
from tests.worlds import mesh_of

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.1),
}


def training(mesh, optimizer="AdamW foreach", dropout=0.0, zero_first=False, schedule=False, **options):
    """A full training step: forward, loss, backward, clipping, optimizer, zero_grad."""

    def setup():
        model = model_on(mesh, dropout=dropout, **options)
        opt = OPTIMIZERS[optimizer](list(model.parameters()))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)

        def step(x, y):
            if zero_first:
                opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            if not zero_first:
                opt.zero_grad()
            return loss, norm

        setup.scheduler = scheduler
        return step, [model]

    setup.between = lambda i: setup.scheduler.step() if schedule else None
    return setup


def pairs(mesh, steps=4, rows=6):
    return [(batch(mesh, i, rows), batch(mesh, 100 + i, rows)) for i in range(steps)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(optimizer):
    with mesh_of(2, 2) as mesh:
        setup = training(mesh, optimizer, schedule=True)
        step = compare(setup, pairs(mesh), setup.between)
        # Muon takes matrices alone: the gradients of the other parameters are there from the second step on.
        assert step.recordings == (2 if optimizer == "Muon" else 1)


@pytest.mark.parametrize("passes", [(), ("dead",), ("duplicates", "views"), ("copies",), ("overlap",), ("buckets",)])
def test_every_pass_can_be_switched_off(passes):
    with mesh_of(2, 2) as mesh:
        compare(training(mesh), pairs(mesh, 3), passes=passes)


@pytest.mark.parametrize("zero_first", [False, True])
def test_gradients_dropped_before_or_after(zero_first):
    with mesh_of(2, 2) as mesh:
        step = compare(training(mesh, zero_first=zero_first), pairs(mesh))
        assert step.recordings == 1


def test_an_odd_number_of_rows_over_two_ranks():
    """Where a copy is made of memory that is larger on some ranks and not on others, it stays."""
    with mesh_of(2, 2) as mesh:

        def setup():
            model = model_on(mesh)

            def step(x):
                loss = model(x).square().mean()
                loss.backward()
                return loss.detach()

            return step, [model]

        compare(setup, [(batch(mesh, seed, rows=7),) for seed in range(3)])


def test_uneven_rows_and_three_axes():
    with mesh_of(2, 3) as mesh:
        compare(training(mesh), pairs(mesh, 3, rows=5))


@pytest.mark.parametrize(
    "model", [CostModel(p2p_latency=10.0), CostModel(latency=10.0, p2p_latency=0.0)], ids=["padded", "exact"]
)
def test_a_vocabulary_that_does_not_divide(model):
    # The scores of 13 words over 2 x 2 ranks: uneven gathers and reductions, and a loss over sharded classes.
    with mesh_of(2, 2) as mesh, using_cost_model(model):

        def setup():
            torch.manual_seed(0)
            words = nn.Embedding(13, 8)
            words.weight = nn.Parameter(distribute_tensor(words.weight.detach(), mesh, P("b")))
            opt = torch.optim.SGD(words.parameters(), lr=0.1)

            def step(tokens, target):
                table = words.weight.redistribute(placements=P())
                scores = F.linear(F.embedding(tokens, table), words.weight)
                loss = F.cross_entropy(scores, target)
                loss.backward()
                opt.step()
                opt.zero_grad()
                return loss

            return step, [words]

        batches = [[distribute_tensor(torch.randint(0, 13, (6,)), mesh, P("a")) for _ in range(2)] for _ in range(3)]
        step = compare(setup, [tuple(pair) for pair in batches])
        assert step.recordings == 1


def test_dropout_continues_the_generator():
    with mesh_of(2, 2) as mesh:
        compare(training(mesh, dropout=0.5), pairs(mesh))


def test_dropout_of_large_tensors_takes_a_new_key_each_time(monkeypatch):
    monkeypatch.setattr(shardwise.random.draw, "GLOBAL_DRAW_LIMIT", 16)
    with mesh_of(2, 2) as mesh:
        compare(training(mesh, dropout=0.5), pairs(mesh))


def test_local_outputs_between_modules():
    with mesh_of(1, 4) as mesh:
        tp = mesh["b"]

        def setup():
            model = model_on(tp, dropout=0.3, local=True)

            def step(x):
                loss = model(x).square().mean()
                loss.backward()
                return loss.detach()

            return step, [model]

        rows = [(distribute_tensor(torch.randn(4, 8), tp, [Replicate()]).to_local(),) for _ in range(3)]
        compare(setup, rows)


def test_activation_checkpointing_draws_the_same_mask_twice():
    with mesh_of(2, 2) as mesh:

        def setup():
            torch.manual_seed(0)
            model = distribute_module(nn.ModuleList([Layer(0.5), Layer(0.5)]), mesh)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)

            def step(x):
                for layer in model:
                    x = checkpoint(layer, x, use_reentrant=False)
                loss = x.square().mean()
                loss.backward()
                opt.step()
                opt.zero_grad()
                return loss.detach()

            return step, [model]

        compare(setup, [(batch(mesh, i),) for i in range(3)])


def test_forward_alone():
    with mesh_of(2, 2) as mesh:
        model = model_on(mesh)
        step = erase(lambda x: model(x))
        with torch.no_grad():
            for i in range(3):
                x = batch(mesh, i)
                torch.testing.assert_close(step(x).full_tensor(), model(x).full_tensor(), rtol=0, atol=0)
        assert step.recordings == 1


def test_a_module_is_erased_as_it_is():
    with mesh_of(2, 2) as mesh, torch.inference_mode():
        model = model_on(mesh)
        step = erase(model)
        for i in range(2):
            x = batch(mesh, i)
            torch.testing.assert_close(step(x).full_tensor(), model(x).full_tensor(), rtol=0, atol=0)


def test_forward_and_backward_with_the_optimizer_outside():
    with mesh_of(2, 2) as mesh:

        def setup():
            model = model_on(mesh)
            opt = torch.optim.AdamW(model.parameters(), lr=0.1)

            def forward_backward(x, y):
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            setup.opt = opt
            return forward_backward, [model]

        def between(i):
            setup.opt.step()
            setup.opt.zero_grad()

        step = compare(setup, pairs(mesh), between)
        assert step.recordings == 1


def test_gradients_are_accumulated():
    with mesh_of(2, 2) as mesh:

        def setup():
            model = model_on(mesh)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            setup.opt = opt

            def forward_backward(x, y):
                F.mse_loss(model(x), y).backward()

            return forward_backward, [model]

        def between(i):
            if i % 2:
                setup.opt.step()
                setup.opt.zero_grad()

        step = compare(setup, pairs(mesh, 6), between)
        assert step.recordings == 2  # with and without gradients to add to


def test_gradients_set_to_zero_in_place():
    with mesh_of(2, 2) as mesh:

        def setup():
            model = model_on(mesh)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)

            def step(x, y):
                opt.zero_grad(set_to_none=False)
                F.mse_loss(model(x), y).backward()
                opt.step()

            return step, [model]

        compare(setup, pairs(mesh, 5))


def test_buffers_are_updated():
    with mesh_of(2, 2) as mesh:

        def setup():
            torch.manual_seed(0)
            model = distribute_module(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), mesh)

            def step(x):
                loss = model(x).square().mean()
                loss.backward()
                for p in model.parameters():
                    p.grad = None
                return loss.detach()

            return step, [model]

        compare(setup, [(batch(mesh, i),) for i in range(3)])


def test_state_is_saved_and_loaded_between_steps():
    with mesh_of(2, 2) as mesh:
        saved = {}

        def setup():
            model = model_on(mesh)
            opt = torch.optim.AdamW(model.parameters(), lr=0.1)
            setup.both = model, opt

            def step(x, y):
                loss = F.mse_loss(model(x), y)
                loss.backward()
                opt.step()
                opt.zero_grad()
                return loss.detach()

            return step, [model]

        def between(i):
            model, opt = setup.both
            if i == 1:
                saved["model"] = {k: v.clone() for k, v in model.state_dict().items()}
                saved["optimizer"] = __import__("copy").deepcopy(opt.state_dict())
            if i == 3:
                model.load_state_dict(saved["model"])
                opt.load_state_dict(saved["optimizer"])

        compare(setup, pairs(mesh, 6), between)


def test_params_sharded_by_placement():
    """Sharded data parallel by placement: parameters are gathered where they are used."""
    with mesh_of(4) as mesh:

        def setup():
            torch.manual_seed(0)
            model = nn.Sequential(Layer(), Layer())
            distribute_module(model, mesh, lambda name, module, mesh: shard_parameters(module, mesh))
            opt = torch.optim.AdamW(model.parameters(), lr=0.1)

            def step(x):
                loss = model(x).square().mean()
                loss.backward()
                opt.step()
                opt.zero_grad()
                return loss.detach()

            return step, [model]

        def shard_parameters(module, mesh):
            for name, p in module.named_parameters(recurse=False):
                module.register_parameter(name, nn.Parameter(distribute_tensor(p.data, mesh, [Shard(0)])))

        compare(setup, [(batch(mesh, i, 8),) for i in range(3)])


def test_several_results_and_nested_arguments():
    with mesh_of(2, 2) as mesh:

        def step(inputs, *, scale):
            return {"sum": inputs["x"] + inputs["y"][0], "product": [inputs["x"] * scale, None]}

        erased = erase(step)
        for i in range(3):
            inputs = {"x": batch(mesh, i), "y": [batch(mesh, 10 + i)]}
            found, expected = erased(inputs, scale=2.0), step(inputs, scale=2.0)
            assert found["product"][1] is None
            for one, other in [(found["sum"], expected["sum"]), (found["product"][0], expected["product"][0])]:
                assert isinstance(one, DTensor)
                assert one.placements == other.placements
                assert torch.equal(one.full_tensor(), other.full_tensor())
        assert erased.recordings == 1


def test_as_a_decorator_of_a_method():
    class Trainer:
        def __init__(self, mesh):
            self.model = model_on(mesh)

        @erase
        def predict(self, x):
            with torch.no_grad():
                return self.model(x)

    with mesh_of(2, 2) as mesh:
        one, other = Trainer(mesh), Trainer(mesh)
        with torch.no_grad():
            other.model[0].up.weight.mul_(2)
        x = batch(mesh, 0)
        for _ in range(2):
            for trainer in (one, other):
                with torch.no_grad():
                    expected = trainer.model(x).full_tensor()
                assert torch.equal(trainer.predict(x).full_tensor(), expected)


def test_redistribution_and_creation_inside():
    with mesh_of(2, 2) as mesh:

        def step(x):
            y = x.redistribute(placements=P(None, "b")) @ shardwise.ones(8, 3, device_mesh=mesh)
            return y + shardwise.rand(6, 3, device_mesh=mesh), torch.randn_like(y)

        erased = erase(step)
        for i in range(3):
            x = batch(mesh, i)
            torch.manual_seed(i)
            expected = [value.full_tensor() for value in step(x)]
            torch.manual_seed(i)
            assert all(map(torch.equal, expected, [value.full_tensor() for value in erased(x)]))
