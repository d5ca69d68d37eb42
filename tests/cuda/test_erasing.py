"""Erased steps on a GPU: replayed op by op, as CUDA graphs, and compiled."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise import P, distribute_module, distribute_tensor, erase, init_device_mesh
from tests.worlds import fake_group

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Net(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(64, 256), nn.Linear(256, 64), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(x))))


def losses(backend, rows, dropout, plain):
    with fake_group(1):
        mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        model = nn.Sequential(Net(dropout), Net(dropout)).cuda()
        model = model if plain else distribute_module(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = erase(step, backend=backend) if backend else step
        found = []
        torch.manual_seed(3)
        for i in range(6):
            x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(i)).cuda()
            found.append(run(x if plain else distribute_tensor(x, mesh, P())))
            scheduler.step()
        sums = [p.detach().sum() for p in model.parameters()]
        return torch.stack([value if plain else value.full_tensor() for value in (*found, *sums)])


@pytest.mark.parametrize("plain", [False, True], ids=["distributed", "plain"])
@pytest.mark.parametrize("rows", [16, 2048], ids=["drawn as global tensor", "drawn by index"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("backend", ["eager", "cudagraph"])
def test_same_numbers(backend, dropout, rows, plain):
    assert torch.equal(losses(backend, rows, dropout, plain), losses(None, rows, dropout, plain))


@pytest.mark.filterwarnings("ignore")
def test_compiled():
    torch.testing.assert_close(losses("inductor", 16, 0.0, False), losses(None, 16, 0.0, False), rtol=1e-4, atol=1e-4)
