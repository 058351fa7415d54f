"""The model, and everything around it, is the same before and after; also when an error or an interrupt flies."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import whence
from doubles import Breaking, Counting, Wrapped, batches, fit, inputs_and_targets

STRUCTURES = (whence.Exact("primal"), whence.Exact("dual"), whence.Exact("matrix_free", tolerance=1e-3))


def belongings(model: nn.Module) -> dict[str, Any]:
    """All that hangs on a model, in things that can be compared: objects by identity, tensors by value too."""
    seen: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            seen[f"{path}.{name}"] = id(value)
            if isinstance(value, dict):
                seen[f"{path}.{name} inside"] = [(key, id(item)) for key, item in value.items()]
            if isinstance(value, list):
                seen[f"{path}.{name} inside"] = [id(item) for item in value]
            if isinstance(value, bool | int | str):
                seen[f"{path}.{name} value"] = value
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        grad = None if tensor.grad is None else (id(tensor.grad), tensor.grad.tolist())
        seen[f"tensor {name}"] = (id(tensor), tensor.data_ptr(), tensor.tolist(), tensor.requires_grad, grad)
        seen[f"hooks {name}"] = [list(tensor._backward_hooks or {}), list(tensor._post_accumulate_grad_hooks or {})]
    return seen


def surroundings() -> dict[str, Any]:
    """Random states, and the switches of torch that a tangent may need otherwise."""
    backends = torch.backends
    return {
        "torch": torch.get_rng_state().tolist(),
        "cuda": [state.tolist() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),  # noqa: NPY002
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
        "attention": (
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
            backends.mha.get_fastpath_enabled(),
        ),
        "cudnn": (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        "warnings": [str(one) for one in warnings.filters if "SymPy" not in str(one)],  # imported by torch, late
    }


class Restless(Counting):
    """Also draws random numbers of every kind, though its outputs do not depend on them."""

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(2)
        torch.rand(2, device=x.device)
        random.random()
        np.random.rand()  # noqa: NPY002
        return super().forward(x)


class Mixed(nn.Module):
    """Submodules in different modes, dropout and batch norm, a frozen part, gradients, hooks, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4)
        self.third.weight = self.second.weight
        self.head = nn.Linear(4, 2)
        self.double().eval()
        self.second.train()
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.drop(self.norm(self.first(x))))
        return self.head(torch.tanh(self.third(self.second(hidden))))


def prepare(model: nn.Module, device: torch.device) -> tuple[nn.Module, list[int]]:
    """Give it gradients and hooks of the user's own, which count their calls."""
    model.to(device)
    calls = [0, 0]

    def count(at: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            calls[at] += 1

        return hook

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
            parameter.register_post_accumulate_grad_hook(count(1))
    model.register_forward_hook(count(0))
    model.register_forward_pre_hook(count(0))
    return model, calls


def check_same(before: tuple[Any, Any], model: nn.Module) -> None:
    for old, new in zip(before, (belongings(model), surroundings()), strict=True):
        assert old.keys() == new.keys()
        changed = [name for name in old if old[name] != new[name]]
        assert not changed


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda one: one.road)
@pytest.mark.parametrize("kind", [Mixed, Counting, Restless])
@pytest.mark.parametrize("parameters", ["all", "last_layer"])
def test_after_fit_and_predict(
    kind: type[nn.Module], structure: whence.Exact, parameters: str, device: torch.device
) -> None:
    model, calls = prepare(kind(), device)
    x, _ = inputs_and_targets()
    before = belongings(model), surroundings()
    tracer = fit(model, batches(), structure=structure, parameters=parameters, recenter=True)
    check_same(before, model)
    tracer.predict([x, x[:2]])
    check_same(before, model)
    assert calls[0] > 0, "the user's forward hooks are called"
    assert calls[1] == 0, "nothing is accumulated into the user's gradients"


@pytest.mark.parametrize(
    ("at", "error"),
    [
        *((at, ValueError("broken")) for at in (1, 2, 3, 4, 5, 7)),
        *((at, KeyboardInterrupt()) for at in (1, 4, 6, 8, 9, 10, 20)),  # also while differentiating
        (2, KeyError("broken")),
        (8, SystemExit(1)),
    ],
)
def test_after_an_error_in_the_model_during_fit(at: int, error: BaseException, device: torch.device) -> None:
    model, _ = prepare(Breaking(at, error), device)
    before = belongings(model), surroundings()
    with pytest.raises((type(error), whence.InputError)):
        fit(model, batches(), structure=STRUCTURES[2])
    check_same(before, model)


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda one: one.road)
def test_after_an_error_in_the_model_during_predict(
    structure: whence.Exact, error: BaseException, device: torch.device
) -> None:
    class Armed(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 5:
                torch.rand(2)
                raise error
            outputs: Tensor = self.net(x)
            return outputs

    x, _ = inputs_and_targets()
    model, _ = prepare(Armed(), device)
    tracer = fit(model, batches(), structure=structure)
    before = belongings(model), surroundings()
    with pytest.raises((type(error), whence.InputError)):
        tracer.predict([x, x[:5]])
    check_same(before, model)
    assert len(tracer.predict(x)) == 8, "the tracer still works"


@pytest.mark.parametrize("at", [0, 1, 4, 7])
@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
def test_after_an_error_in_the_loader(at: int, error: BaseException, device: torch.device) -> None:
    class Torn:
        given = 0

        def __iter__(self) -> Iterator[Any]:
            for batch in batches():
                if self.given == at:
                    raise error
                self.given += 1
                yield batch

    model, _ = prepare(Restless(), device)
    before = belongings(model), surroundings()
    with pytest.raises(type(error)):
        fit(model, Torn(), structure=STRUCTURES[2])
    check_same(before, model)


def test_after_an_error_in_the_algebra(device: torch.device) -> None:
    model, _ = prepare(Restless(), device)
    before = belongings(model), surroundings()
    with pytest.raises(whence.SingularCurvatureError):
        fit(model, batches(), ridge=0.0)
    with pytest.raises(whence.TooLargeError):
        fit(model, batches(), execution=whence.Execution(max_memory=10))
    with pytest.raises(ZeroDivisionError):
        fit(model, batches(), parameters=lambda name, parameter: 1 / 0)
    check_same(before, model)


def test_a_hook_that_raises_leaves_none_of_ours() -> None:
    class TiredError(Exception):
        pass

    def tired(*_: Any) -> None:
        raise TiredError

    model = Mixed()
    model.head.register_forward_pre_hook(tired)
    before = belongings(model), surroundings()
    with pytest.raises(TiredError):
        fit(model, batches(), parameters="last_layer")
    check_same(before, model)


@pytest.mark.parametrize("structure", ["ekfac", "core", "sketch", "kfac", "diagonal"])
@pytest.mark.parametrize("kind", [Mixed, Counting, Restless])
def test_after_every_other_structure(kind: type[nn.Module], structure: str, device: torch.device) -> None:
    model, calls = prepare(kind(), device)
    x, _ = inputs_and_targets()
    before = belongings(model), surroundings()
    tracer = fit(model, batches(), structure=structure)
    check_same(before, model)
    tracer.predict([x, x[:2]])
    check_same(before, model)
    assert calls[1] == 0, "nothing is accumulated into the user's gradients"


@pytest.mark.parametrize("at", [1, 4, 5, 6, 8, 9, 10, 11, 12, 13])
@pytest.mark.parametrize("structure", ["ekfac", "core"])
def test_after_an_interrupt_in_every_other_structure(structure: str, at: int, device: torch.device) -> None:
    model, _ = prepare(Breaking(at, KeyboardInterrupt()), device)
    before = belongings(model), surroundings()
    with pytest.raises(KeyboardInterrupt):
        fit(model, batches(), structure=structure)
    check_same(before, model)


def test_results_do_not_depend_on_the_random_state() -> None:
    x, _ = inputs_and_targets()
    torch.manual_seed(1)
    first = fit(Restless(), batches()).predict(x)
    torch.manual_seed(2)
    second = fit(Restless(), batches()).predict(x)
    assert torch.equal(first.hec3, second.hec3)
