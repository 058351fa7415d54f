"""Leaving a model as it was found: fingerprints of its weights, settings of torch, locks between threads, checks."""

from __future__ import annotations

import hashlib
import os
import random
import re
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
    return found.resolve_conj().resolve_neg().contiguous().reshape(-1)


def fingerprint(model: nn.Module) -> dict[str, int]:
    """A checksum of each parameter and buffer, which changes when its bits do."""
    with locked(model):
        tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: checksum(one) if one.is_cuda else zlib.crc32(as_bytes(one)) for name, one in tensors.items()}


ADDRESS = re.compile(r"0x[0-9a-fA-F]+")  # in printed options, different in every process


def describe_model(model: nn.Module) -> dict[str, list[list[str]]]:
    """A model in words: what a file says about the model that it belongs to.

    Modules are described by name, class and options as printed, which may differ between versions of torch; parameters
    and buffers by name, first name of the same tensor, shape, dtype and checksum.
    """
    modules = model.named_modules(remove_duplicate=False)
    first: dict[int, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        "modules": [[name, type(one).__name__, ADDRESS.sub("0x", one.extra_repr())] for name, one in modules],
        "tensors": [
            [name, first.setdefault(id(one), name), str(tuple(one.shape)), str(one.dtype), _sha256(one)]
            for name, one in tensors
        ],
    }


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(as_bytes(tensor)).hexdigest()


def check_same_model(described: Mapping[str, Any], model: nn.Module, same_torch: bool = True) -> None:
    """Raise unless a model has this description; options of modules are compared for the same version of torch."""
    here, compared = describe_model(model), 3 if same_torch else 2
    modules = here["modules"], described["modules"]
    for mine, saved in zip(*modules, strict=False):
        if mine[:compared] != saved[:compared]:
            got, was = (f"{row[0] or 'the model'}: {row[1]}({row[2]})" for row in (mine, saved))
            raise other_model(f"{got} where {was} was")
    if len(modules[0]) != len(modules[1]):
        raise other_model(f"{len(modules[0])} modules instead of {len(modules[1])}")
    tensors = here["tensors"], described["tensors"]
    names, wanted = ([row[0] for row in rows] for rows in tensors)
    if names != wanted:
        odd = [name for name in [*names, *wanted] if (name in names) != (name in wanted)] or names
        raise other_model(f"another set of parameters and buffers ({listing(odd)})")
    changed = []
    for (name, owner, shape, *rest), (_, other, saved_shape, *saved) in zip(*tensors, strict=True):
        if owner != other:
            raise other_model(f"{name}, which shared its weights with {other} and now shares them with {owner}")
        if shape != saved_shape:
            raise other_model(f"{name} of shape {shape} instead of {saved_shape}")
        if rest != saved:
            changed.append(name)
    if changed:
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


# --- Settings of torch, shared by threads -----------------------------------------------------------------------------


def after_fork(reset: Callable[[], None]) -> None:
    """Call `reset` in forked processes, which do not inherit the threads."""
    if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
        os.register_at_fork(after_in_child=reset)


class SharedSetting:
    """A change of settings, made when the first thread enters and undone when the last one leaves.

    Threads may enter with a wish. The change is made anew, for all wishes, whenever there are others.

    Examples:
        >>> @SharedSetting
        ... @contextmanager
        ... def door(wishes):
        ...     print("open")
        ...     yield
        ...     print("closed")
        >>> with door(), door():
        ...     print("two inside")
        open
        two inside
        closed
    """

    def __init__(self, change: Callable[[set[bool | None]], AbstractContextManager[object]]) -> None:
        self._change = change
        self._undo = ExitStack()
        self._reset()
        after_fork(self._reset)

    def _reset(self) -> None:
        self._undo.close()
        self._lock = threading.Lock()
        self._wishes: list[bool | None] = []
        self._made_for: set[bool | None] = set()

    @contextmanager
    def __call__(self, wish: bool | None = None) -> Iterator[None]:
        """Enter and leave."""
        with self._lock:
            self._wishes.append(wish)
            self._update()
        try:
            yield
        finally:
            with self._lock:
                if wish in self._wishes:  # not so in a process forked meanwhile
                    self._wishes.remove(wish)
                self._update()

    def _update(self) -> None:
        wishes = set(self._wishes)
        if wishes != self._made_for:
            self._undo.close()
            if wishes:
                self._undo.enter_context(self._change(wishes))
            self._made_for = wishes


@SharedSetting
@contextmanager
def plain_kernels(_: object) -> Iterator[None]:
    """Use kernels that support every kind of differentiation, without torch's warnings about them."""
    fast = mha.get_fastpath_enabled()
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script.* is deprecated", category=Warning)
        warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
        mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            mha.set_fastpath_enabled(fast)


@SharedSetting
@contextmanager
def without_cudnn(_: object) -> Iterator[None]:
    """Disable cuDNN: its recurrent networks can be differentiated only in training mode."""
    before = cudnn.enabled
    cudnn.enabled = False
    try:
        yield
    finally:
        cudnn.enabled = before


@SharedSetting
@contextmanager
def same_draws(_: object) -> Iterator[None]:
    """Restore the random states of torch's CPU generator, numpy and Python afterwards."""
    ours, theirs = random.getstate(), np.random.get_state()  # noqa: NPY002  the global state is what is restored
    with torch.random.fork_rng(devices=()):
        try:
            yield
        finally:
            random.setstate(ours)
            np.random.set_state(theirs)  # noqa: NPY002


@SharedSetting
@contextmanager
def rounded_products(wishes: set[bool | None]) -> Iterator[None]:
    """Allow a GPU to round single-precision products to TF32, which is several times faster, or forbid it.

    `None` keeps the setting of the caller. While any thread forbids it, nothing is rounded.
    """
    products, convolutions = torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32
    rounded = all(products if wish is None else wish for wish in wishes)
    torch.backends.cuda.matmul.allow_tf32 = cudnn.allow_tf32 = rounded
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32 = products, convolutions


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


# --- One thread at a time ---------------------------------------------------------------------------------------------


class _ModelLocks:
    """Which thread uses which modules, and how often it has locked them."""

    def __init__(self) -> None:
        self._reset()
        after_fork(self._reset)

    def _reset(self) -> None:
        self._released = threading.Condition()
        self._owners: dict[int, list[int]] = {}  # for each module in use, its thread once per lock

    @contextmanager
    def locked(self, model: nn.Module) -> Iterator[None]:
        """Lock a model and all its submodules, once no other thread uses any of them through whence.

        A thread may lock again what it has already locked.

        Examples:
            >>> body = nn.Linear(3, 4)
            >>> with locked(nn.Sequential(body, nn.ReLU())), locked(body):
            ...     print("mine")
            mine
        """
        if not isinstance(model, nn.Module):
            raise InputError(f"expected a torch.nn.Module as model, got {type(model).__name__}.")
        keys = {id(module) for module in model.modules()}
        me = threading.get_ident()
        with self._released:
            self._released.wait_for(lambda: all(me in self._owners.get(key, (me,)) for key in keys))
            for key in keys:
                self._owners.setdefault(key, []).append(me)
        try:
            yield
        finally:
            with self._released:
                for key in keys & self._owners.keys():
                    self._owners[key].pop()
                    if not self._owners[key]:
                        del self._owners[key]
                self._released.notify_all()


locked = _ModelLocks().locked


# --- A model left as it was found -------------------------------------------------------------------------------------


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore on exit everything that a forward pass may change, also after errors and interrupts.

    That is: gradients, `requires_grad`, values of buffers, attributes of every submodule (mode, hooks, caches), and the
    random states of torch, numpy and Python. Inside, the caller's inference mode and autocast are off, and no graph is
    built by default. Other threads that use the model, or another model that shares a submodule, wait.
    """
    with ExitStack() as stack:
        stack.enter_context(locked(model))
        # attributes of modules, and contents of their dicts and lists (parameters, buffers, hooks, caches)
        own = [vars(module) for module in model.modules()]
        held = [*own, *(one for each in own for one in each.values() if isinstance(one, (dict, list)))]
        contents = [(one, one.copy()) for one in held]
        parameters = [(p, p.grad, p.requires_grad) for p in model.parameters()]
        devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
        stack.enter_context(same_draws())
        stack.enter_context(torch.random.fork_rng(devices=devices, enabled=bool(devices)))
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
