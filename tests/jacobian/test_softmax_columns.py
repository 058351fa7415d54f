"""Columns of the Hessian of cross-entropy: the custom derivative against autograd and against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import jvp, vmap

from whence.jacobian import functionals
from whence.jacobian.functionals import Softmax, SoftmaxColumns

N, T, K, C = 3, 4, 7, 5


def view(seed: int = 0) -> tuple[SoftmaxColumns, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    outputs = 3.0 * torch.randn(N, T * K, generator=draw, dtype=torch.float64)
    classes = torch.randint(0, K, (N, T, C), generator=draw)
    weights, floors = torch.randn(2, N, T, C, generator=draw, dtype=torch.float64).unbind(0)
    return SoftmaxColumns(None, classes, weights, floors.abs() / 4), outputs


def defined(given: SoftmaxColumns, outputs: Tensor, fixed: Tensor) -> Tensor:
    """sum_t h (f_y - p . f) with p and h of outputs that are held fixed."""
    f, p = outputs.reshape(-1, T, K), fixed.reshape(-1, T, K).softmax(2)
    h = given.weights * torch.maximum(p.gather(2, given.classes), given.floors).sqrt()
    return (h * (f.gather(2, given.classes) - (p * f).sum(2, keepdim=True))).sum(1)


@pytest.mark.parametrize("chunk", [1, 2**20])
def test_values_and_derivatives(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(functionals.CHUNK, "cpu", chunk)
    given, outputs = view()
    f = outputs.clone().requires_grad_()
    seen, wanted = given.apply(f), defined(given, f, outputs)
    torch.testing.assert_close(seen, wanted)
    cotangents = torch.randn(6, N, C, dtype=torch.float64)
    each = [torch.autograd.grad(wanted, f, one, retain_graph=True)[0] for one in cotangents]
    ours = [torch.autograd.grad(seen, f, one, retain_graph=True)[0] for one in cotangents]
    torch.testing.assert_close(ours, each)
    together = torch.autograd.grad(seen, f, cotangents, is_grads_batched=True)[0]
    torch.testing.assert_close(together, torch.stack(each))


def test_forward_mode_and_vmap() -> None:
    given, outputs = view()
    along = torch.randn(2, *outputs.shape, dtype=torch.float64)
    wanted = torch.stack([defined(given, one, outputs) for one in along])
    found = vmap(lambda one: jvp(given.apply, (outputs,), (one,))[1])(along)
    torch.testing.assert_close(found, wanted)

    def single(classes: Tensor, weights: Tensor, floors: Tensor, f: Tensor) -> Tensor:
        one = SoftmaxColumns(None, *(each.unsqueeze(0) for each in (classes, weights, floors)))
        return one.apply(f.unsqueeze(0)).squeeze(0)

    mapped = vmap(single)(given.classes, given.weights, given.floors, outputs)
    torch.testing.assert_close(mapped, defined(given, outputs, outputs))


def test_inner_products_are_those_of_the_gradients() -> None:
    given, outputs = view(1)
    f = outputs.clone().requires_grad_()
    columns = torch.autograd.grad(
        given.apply(f), f, torch.eye(C, dtype=f.dtype).unsqueeze(1).expand(-1, N, -1), is_grads_batched=True
    )[0]
    values, gram = given.products(outputs.reshape(N, T, K))
    torch.testing.assert_close(gram, torch.einsum("cnk,dnk->ncd", columns, columns))
    torch.testing.assert_close(values, given.apply(outputs))


def test_probabilities_are_those_of_the_softmax() -> None:
    _, outputs = view()
    rows = outputs.reshape(-1, K)
    p = Softmax.of(rows)
    torch.testing.assert_close(p.rest, 1.0 - p.largest)
    torch.testing.assert_close(p.all(), rows.softmax(1))
    assert Softmax.of(rows.bfloat16()).others.dtype == torch.float32
