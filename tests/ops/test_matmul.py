"""Matrix products and what decomposes into them; decompositions of matrices; Fourier transforms."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, linalg

from shardwise import DTensor, InterleavedShard, Partial, Replicate, Shard
from tests.ops.helpers import check_case, communication, no_communication, on, r, ranks, table, whole

z = r(5, dtype=torch.complex64)
integers = r(5, 4, dtype=torch.int64), r(4, 3, dtype=torch.int64)
matrices = r(3, 4, 4)
definite = matrices @ matrices.mT + 4 * torch.eye(4)

PRODUCTS: list[Any] = [
    ("linear", F.linear, (r(2, 5, 4), r(3, 4), r(3))),
    ("linear without bias", F.linear, (r(2, 5, 4), r(3, 4))),
    ("linear of a vector", F.linear, (r(4), r(3, 4), r(3))),
    ("mm", torch.mm, (r(5, 4), r(4, 3))),
    ("mm of integers", torch.mm, integers),
    ("mm of nothing", torch.mm, (r(5, 0), r(0, 3))),
    ("bmm", torch.bmm, (r(2, 5, 4), r(2, 4, 3))),
    ("addmm", lambda a, b, c: torch.addmm(a, b, c, beta=0.5, alpha=2), (r(3), r(5, 4), r(4, 3))),
    ("addmm in place", lambda a, b, c: a.addmm_(b, c), (r(5, 3), r(5, 4), r(4, 3))),
    ("addmm of nothing", torch.addmm, (r(3), r(5, 0), r(0, 3))),
    ("baddbmm", torch.baddbmm, (r(2, 1, 3), r(2, 5, 4), r(2, 4, 3))),
    ("addbmm", torch.addbmm, (r(5, 3), r(2, 5, 4), r(2, 4, 3))),
    ("addmv", torch.addmv, (r(5), r(5, 4), r(4))),
    ("addr", torch.addr, (r(5, 4), r(5), r(4))),
    ("mv", torch.mv, (r(5, 4), r(4))),
    ("dot", torch.dot, (r(5), r(5))),
    ("vdot", torch.vdot, (z, z)),
    ("matmul 3 by 2", torch.matmul, (r(2, 5, 4), r(4, 3))),
    ("matmul 4 by 3", torch.matmul, (r(3, 1, 5, 4), r(2, 4, 3))),
    ("matmul 1 by 3", torch.matmul, (r(4), r(2, 4, 3))),
    ("einsum", lambda a, b: torch.einsum("bsd,dhe->bshe", a, b), (r(2, 5, 4), r(4, 3, 2))),
    ("einsum of heads", lambda a, b: torch.einsum("bshd,bthd->bhst", a, b), (r(2, 5, 3, 4), r(2, 3, 3, 4))),
    ("tensordot", lambda a, b: torch.tensordot(a, b, dims=2), (r(2, 5, 4), r(5, 4, 3))),
    ("outer", torch.outer, (r(5), r(4))),
    ("kron", torch.kron, (r(2, 3), r(3, 2))),
    ("inner", torch.inner, (r(2, 4), r(3, 4))),
    ("multi_dot", lambda *m: linalg.multi_dot(m), (r(5, 4), r(4, 3), r(3, 2))),
    ("cdist", torch.cdist, (r(2, 5, 4), r(2, 3, 4, seed=1))),
    ("bilinear", F.bilinear, (r(5, 4), r(5, 3), r(2, 4, 3), r(2))),
]


@table(PRODUCTS)
def test_products(fn: Any, args: Any) -> None:
    check_case(fn, args, limit=6, meshes=((2,), (4,), (2, 2)))


@table(PRODUCTS)
def test_products_of_replicated_operands(fn: Any, args: Any) -> None:
    def inferred(*tensors: Tensor) -> Any:
        with torch.inference_mode():
            return fn(*tensors)

    check_case(inferred, args, limit=4, grad=False, meshes=((4,), (2, 2)))


MATRICES: list[Any] = [
    ("inv", linalg.inv, (definite,)),
    ("solve", linalg.solve, (definite, r(3, 4, 2))),
    ("solve for vectors", linalg.solve, (definite, r(3, 4))),
    ("det", linalg.det, (definite,)),
    ("slogdet", linalg.slogdet, (definite,)),
    ("cholesky", lambda a: linalg.cholesky(a.detach()), (definite,)),
    ("eigvalsh", linalg.eigvalsh, (definite,)),
    ("svdvals", linalg.svdvals, (matrices,)),
    ("qr", lambda a: linalg.qr(a.detach()), (matrices,)),
    ("lu", lambda a: linalg.lu(a.detach()), (definite,)),
    ("pinv", lambda a: linalg.pinv(a.detach()), (definite,)),
    ("matrix_exp", linalg.matrix_exp, (matrices * 0.1,)),
    ("solve_triangular", lambda a, b: linalg.solve_triangular(a, b, upper=True), (definite, r(3, 4, 2))),
    ("cross", linalg.cross, (r(4, 3), r(4, 3, seed=1))),
    ("fft", torch.fft.fft, (r(3, 4, 5),)),
    ("ifft", torch.fft.ifft, (r(3, 4, 5),)),
    ("rfft", torch.fft.rfft, (r(3, 4, 5),)),
    ("irfft", torch.fft.irfft, (r(3, 4, 5, dtype=torch.complex64),)),
    ("fft2", torch.fft.fft2, (r(3, 4, 5),)),
    ("hfft along another dim", lambda a: torch.fft.hfft(a, dim=1), (r(3, 4, 5),)),
]


@table(MATRICES)
def test_batches_of_matrices_and_transforms(fn: Any, args: Any) -> None:
    check_case(fn, args, limit=4, meshes=((2,), (2, 2)), partial=(), rtol=1e-3, atol=1e-3)


def test_cut_batches_of_matrices_stay_where_they_are() -> None:
    with ranks(2) as mesh, no_communication():
        a = on(mesh, definite, Shard(0))
        assert linalg.eigvalsh(a).placements == (Shard(0),)
        assert torch.fft.fft(on(mesh, r(3, 4), Shard(0))).placements == (Shard(0),)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("batch", "length", "size"), [(2, 8, 4), (2, 5, 4), (3, 7, 2), (1, 5, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_on_a_cut_sequence_is_local(
    mode: type[AbstractContextManager[None]], batch: int, length: int, size: int, bias: bool
) -> None:
    inputs, weight, add = r(batch, length, 6), r(3, 6), r(3)
    with ranks(size) as mesh:
        x = on(mesh, inputs, Shard(1), grad=True)
        w, b = on(mesh, weight, Replicate()), on(mesh, add, Replicate()) if bias else None
        with mode(), no_communication():
            result = F.linear(x, w, b)
        assert result.placements == (Shard(1),)
        torch.testing.assert_close(whole(result), F.linear(inputs, weight, add if bias else None))
        if mode is torch.enable_grad:
            with no_communication():
                result.backward(torch.ones_like(result))
            assert x.grad is not None
            assert x.grad.placements == (Shard(1),)
            torch.testing.assert_close(whole(x.grad), weight.sum(0).expand(batch, length, 6))


def test_tensor_parallel_products_are_local() -> None:
    with ranks(4) as mesh:
        x, up, down = on(mesh, r(5, 8), Replicate()), on(mesh, r(8, 12), Shard(1)), on(mesh, r(12, 8), Shard(0))
        with no_communication():
            hidden = x @ up
            result = hidden.relu() @ down
        assert hidden.placements == (Shard(1),)
        assert result.placements == (Partial(),)


def test_a_bias_is_added_once() -> None:
    with ranks(4) as mesh:
        x, w, bias = on(mesh, r(5, 3), Shard(1)), on(mesh, r(3, 2), Shard(0)), on(mesh, r(2), Replicate())
        assert not communication(lambda: torch.addmm(bias, x, w))
        torch.testing.assert_close(whole(torch.addmm(bias, x, w)), torch.addmm(r(2), r(5, 3), r(3, 2)))


def test_an_op_without_results_goes_by_its_rule() -> None:
    """`linalg.inv` ends in an op that returns nothing and writes nothing."""
    check = torch.ops.aten._linalg_check_errors.default
    with ranks(3) as mesh:
        with DTensor._op_dispatcher.recording() as plans:
            inverse = linalg.inv(on(mesh, definite, Shard(0)))
        torch.testing.assert_close(whole(inverse), linalg.inv(definite))
        found = [plan for op, plan, *_ in plans if op.func is check]
        assert found
        assert None not in found


def test_a_number_as_bias_of_an_empty_shard() -> None:
    """PyTorch's addmv of a matrix without columns returns the bias unexpanded."""
    with ranks(4) as mesh:
        matrix, vector = (on(mesh, r(*shape), InterleavedShard(dim, 2)) for dim, shape in ((1, (5, 10)), (0, (10,))))
        found = torch.addmv(on(mesh, torch.tensor(2.0), Partial()), matrix, vector)
        torch.testing.assert_close(whole(found), torch.addmv(torch.tensor(2.0), r(5, 10), r(10)))
