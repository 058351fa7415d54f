"""Leaving a model as it was found: fingerprints of its weights, a lock for threads, settings of torch, checks."""

from __future__ import annotations

import os
import random
import re
import threading
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.backends import cudnn, mha
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from whence.display import listing
from whence.errors import InputError, NotDeterministicError, StaleModelError, printable

# --- Fingerprints -----------------------------------------------------------------------------------------------------

PIECE = {"cpu": 2**16, "cuda": 2**22}  # words summed at once, for a CPU's cache or a GPU's memory
GOLDEN = -0x61C8864680B583EB  # its multiples have no pattern


def checksum(tensor: Tensor) -> int:
    """A number that changes if a bit of the tensor changes, or if two elements are swapped.

    The sum of its words, each times an odd number. Integers wrap around and are never rounded, so the result is the
    same on every device.

    Examples:
        >>> a, b = checksum(torch.tensor([1.0, 2.0])), checksum(torch.tensor([2.0, 1.0]))
        >>> a == b, a == checksum(torch.tensor([1.0, 2.0]))
        (False, True)
    """
    numbers = _in_a_row(tensor)
    words, total = numbers.view(torch.int32 if numbers.element_size() % 4 == 0 else torch.uint8), 0
    multiples = _multiples(numbers.device)
    for number, piece in enumerate(words.split(len(multiples))):
        odd = multiples[: len(piece)] + signed(number * len(multiples) * GOLDEN) | 1
        total += int(odd.mul_(piece).sum())
    return signed(total)


@cache
def _multiples(device: torch.device) -> Tensor:
    return torch.arange(PIECE.get(device.type, PIECE["cpu"]), device=device) * GOLDEN


def signed(word: int) -> int:
    """The last 64 bits of an integer, as a signed number."""
    return (word + 2**63) % 2**64 - 2**63


def row_checksums(tensor: Tensor) -> Tensor:
    """A checksum for each row of a tensor (n, ...): (n,).

    Examples:
        >>> one, two = row_checksums(torch.tensor([[1.0, 2.0], [2.0, 1.0]])).tolist()
        >>> one == two, [one] == row_checksums(torch.tensor([[1.0, 2.0]])).tolist()
        (False, True)
    """
    return torch.tensor([zlib.crc32(row) for row in as_bytes(tensor).reshape(len(tensor), -1)], device="cpu")


def as_bytes(tensor: Tensor) -> Any:
    """The bytes of a tensor, in the order of its axes, as an array of uint8."""
    return _in_a_row(tensor).cpu().view(torch.uint8).numpy()


def _in_a_row(tensor: Tensor) -> Tensor:
    """All numbers of a tensor in one dense axis, with pending signs and conjugates resolved."""
    found = tensor.detach()
    found = found if found.layout == torch.strided else found.to_dense()
    found = found.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return found.as_strided(found.shape, (1,))  # a single number may have any stride


def fingerprint(model: nn.Module) -> dict[str, int]:
    """A checksum of each parameter and buffer, which changes when its bits do."""
    with locked(model):
        tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: checksum(one) if one.is_cuda else zlib.crc32(as_bytes(one)) for name, one in tensors.items()}


ADDRESS = re.compile(r"0x[0-9a-fA-F]+")  # in printed options, different in every process


def describe_model(model: nn.Module) -> dict[str, dict[str, Any]]:
    """A model in words, for the file of a fit: what its modules print, and form and checksum of its tensors."""
    first: dict[int, str] = {}
    return {
        "modules": {
            name: f"{type(one).__name__}({ADDRESS.sub('0x', one.extra_repr())})"
            for name, one in model.named_modules(remove_duplicate=False)
        },
        "tensors": {
            name: [first.setdefault(id(one), name), str(tuple(one.shape)), str(one.dtype), checksum(one)]
            for named in (model.named_parameters, model.named_buffers)
            for name, one in named(remove_duplicate=False)
        },
    }


def check_same_model(described: Mapping[str, Any], model: nn.Module, same_torch: bool = True) -> None:
    """Raise unless a model has this description; options of modules are compared for the same version of torch."""
    here = describe_model(model)
    modules, saved = here["modules"], described["modules"]
    for name in dict.fromkeys([*modules, *saved]):
        got, was = (each.get(name, "nothing") for each in (modules, saved))
        if (got if same_torch else got.partition("(")[0]) != (was if same_torch else was.partition("(")[0]):
            raise other_model(f"{name or 'the model'}: {got} where {name or 'the model'}: {was} was")
    tensors, saved = here["tensors"], described["tensors"]
    if odd := [name for name in [*tensors, *saved] if (name in tensors) != (name in saved)]:
        raise other_model(f"another set of parameters and buffers ({listing(odd)})")
    for name, (owner, shape, *_) in tensors.items():
        if owner != saved[name][0]:
            shared = f"shared its weights with {saved[name][0]} and now shares them with {owner}"
            raise other_model(f"{name}, which {shared}")
        if shape != saved[name][1]:
            raise other_model(f"{name} of shape {shape} instead of {saved[name][1]}")
    if changed := [name for name, row in tensors.items() if row != saved[name]]:
        raise StaleModelError(
            f"expected the weights and buffers that were fitted, got changes in {listing(changed)}. "
            "Load the fitted weights into the model, in the same dtype, or fit and save again."
        )


def other_model(got: str) -> StaleModelError:
    """The error for a model that is not the one that was fitted."""
    return StaleModelError(
        f"expected the model that was fitted, got {printable(got, 500)}. Build the same model, and load the fitted "
        "weights."
    )


# --- One thread at a time ---------------------------------------------------------------------------------------------

LOCKS = [threading.RLock()]  # the only one, which forked processes replace: they do not inherit the threads
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=lambda: LOCKS.__setitem__(0, threading.RLock()))


@contextmanager
def locked(model: nn.Module) -> Iterator[None]:
    """Let no other thread use a model through whence, nor change settings and random states, which threads share.

    A thread may lock again what it has already locked.

    Examples:
        >>> with locked(nn.Linear(3, 4)), locked(nn.ReLU()):
        ...     print("mine")
        mine
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module as model, got {type(model).__name__}.")
    with LOCKS[0]:
        yield


# --- Settings of torch ------------------------------------------------------------------------------------------------


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Use kernels that support every kind of differentiation, without torch's warnings about them."""
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script.* is deprecated", category=Warning)
        warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
        yield


@contextmanager
def training_path() -> Iterator[None]:
    """Run `nn.TransformerEncoder` as in training: torch's fast path for inference writes zeros at padded positions.

    Examples:
        >>> with training_path():
        ...     print(mha.get_fastpath_enabled())
        False
    """
    fast = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(fast)


@contextmanager
def settings(owner: Any, **wanted: Any) -> Iterator[None]:
    """Set attributes of an object, such as those of `torch.backends.cudnn`, and restore them afterwards."""
    before = {name: getattr(owner, name) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def rounded_products(allowed: bool | None) -> Iterator[None]:
    """Allow a GPU to round single-precision products to TF32, which is several times faster, or forbid it.

    `None` keeps the setting of the caller, for convolutions too.

    Examples:
        >>> with rounded_products(True), rounded_products(False):
        ...     print(torch.backends.cuda.matmul.allow_tf32)
        False
    """
    products = torch.backends.cuda.matmul
    wanted = products.allow_tf32 if allowed is None else allowed
    with settings(products, allow_tf32=wanted), settings(cudnn, allow_tf32=wanted):
        yield


@contextmanager
def preserved_random_states(devices: Sequence[int]) -> Iterator[None]:
    """Restore the random states of torch on the CPU and these GPUs, of numpy and Python afterwards."""
    ours, theirs = random.getstate(), np.random.get_state()  # noqa: NPY002  the global state is what is restored
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(ours)
            np.random.set_state(theirs)  # noqa: NPY002


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Let torch use a single thread if `wanted`, and only when called from Python's main thread.

    Torch stores the number for each calling thread, but a thread whose first computation happens meanwhile inherits it.
    Threads of a service, where others may start at any time, are therefore left alone.
    """
    before = torch.get_num_threads()
    if not wanted or before == 1 or threading.current_thread() is not threading.main_thread():
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- A model left as it was found -------------------------------------------------------------------------------------


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore on exit everything that a forward pass may change, also after errors and interrupts.

    That is: gradients, `requires_grad`, values of buffers, attributes of every submodule (mode, hooks, caches), and the
    random states of torch, numpy and Python. Inside, the caller's inference mode and autocast are off, and no graph is
    built by default. Other threads wait.
    """
    with ExitStack() as stack:
        stack.enter_context(locked(model))
        # attributes of modules, and contents of their dicts and lists (parameters, buffers, hooks, caches)
        own = [vars(module) for module in model.modules()]
        held = [*own, *(one for each in own for one in each.values() if isinstance(one, (dict, list)))]
        contents = [(one, one.copy()) for one in held]
        parameters = [(p, p.grad, p.requires_grad) for p in model.parameters()]
        devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
        stack.enter_context(preserved_random_states(devices))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for kind in {"cpu", *(p.device.type for p in model.parameters())}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        try:
            yield
        finally:
            for now, before in contents:
                if _ids(now) != _ids(before):
                    now.clear()
                    now.extend(before) if isinstance(now, list) else now.update(before)
            for parameter, grad, requires_grad in parameters:
                if parameter.grad is not grad:
                    parameter.grad = grad
                if parameter.requires_grad != requires_grad:
                    parameter.requires_grad_(requires_grad)
            for buffer, values in buffers:
                if checksum(buffer) != checksum(values):
                    buffer.copy_(values)


def _ids(held: Any) -> Any:
    """Identities of the objects in a dict or a list."""
    return list(map(id, held)) if isinstance(held, list) else {key: id(value) for key, value in held.items()}


# --- What a model must be ---------------------------------------------------------------------------------------------


def check_model(model: nn.Module) -> None:
    """Raise for a model whose outputs are random or depend on the batch, or whose weights are missing or not finite."""
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            "expected a module of Python, got one compiled by torch.jit, whose layers cannot be intercepted. "
            "Pass the module it was made from, with the same weights."
        )
    with locked(model):
        check_evaluation_mode(model)
        devices = {tensor.device for tensor in model.parameters()}
        if len(devices) > 1 or any(device.type == "meta" for device in devices):
            raise InputError(
                f"expected all weights on one device, got {', '.join(sorted(map(str, devices)))}. "
                "Move the model to one device with model.to(...)."
            )
        for name, parameter in model.named_parameters():
            if is_lazy(parameter):
                raise InputError(
                    f"expected initialised weights, got the lazy parameter {name} without a shape. "
                    "Call the model once on a batch, and train it."
                )
            if parameter.is_inference():
                raise InputError(
                    f"expected weights that can be differentiated, got {name} made under torch.inference_mode(). "
                    "Build or load the model outside of it."
                )
            if not bool(torch.isfinite(parameter).all()):
                raise InputError(f"expected finite weights, got NaN or infinity in {name}. The training has diverged.")


def check_evaluation_mode(model: nn.Module) -> None:
    """Raise for a model with active dropout, or with batch normalisation by batch statistics."""
    modules = [(name or type(module).__name__, module) for name, module in model.named_modules()]
    training = [name for name, module in modules if module.training and _depends_on_mode(module)]
    if training:
        raise NotDeterministicError(
            "expected a model in evaluation mode, got training mode with dropout or batch normalisation in: "
            f"{listing(training, 8)}. Call model.eval() first."
        )
    mixing = [name for name, module in modules if isinstance(module, _BatchNorm) and module.running_mean is None]
    if mixing:
        raise NotDeterministicError(
            "expected outputs that do not depend on the other examples of a batch, got batch normalisation without "
            f"running statistics in: {listing(mixing, 8)}. Use track_running_stats=True, or another normalisation."
        )


def _depends_on_mode(module: nn.Module) -> bool:
    """Whether a module behaves differently in training mode and in evaluation mode."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, _NormBase):
        return isinstance(module, _BatchNorm) or module.track_running_stats
    return isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout > 0
