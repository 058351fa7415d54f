"""Call any model with any inputs and get outputs of shape (n, k)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from whence.errors import (
    InputError,
    NotDeterministicError,
    ShapeError,
    UncapturedParameterError,
    UnsupportedLayerError,
    WhenceError,
)

from .batches import Inputs, batch_size, check_finite, describe, take
from .switches import plain_kernels, without_cudnn
from .views import View

ROUNDING = {torch.float64: 1e-10, torch.float16: 1e-2, torch.bfloat16: 1e-1}
"""Two calls may differ by this share of the largest output, as sums in random order on a GPU do; 1e-5 else."""

NEAR = {torch.float64: 1e-6, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""An example's outputs alone and in its batch must agree to this share of the largest output; to 1e-2 else."""


ELSEWHERE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Outputs of the same model on another machine must agree to this share of the largest, and on a GPU, where products
may be rounded to ten bits, to 1e-2 at best."""


CHECKED = 256
"""Examples whose outputs are computed twice before anything else."""


class _NoRescaling(TorchFunctionMode):
    """Refuses calls of `F.embedding` that would change the weight, before they do."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in (F.embedding, F.embedding_bag):
            limit = given.get("max_norm", args[3] if len(args) > 3 else None)
            if limit is not None:
                raise UnsupportedLayerError(
                    f"expected an embedding without max_norm, got F.embedding with max_norm={limit}, which changes the "
                    "weight in every forward pass. Shorten its rows once, and leave max_norm out before the fit."
                )
        return func(*args, **given)


class Network:
    """A user's model behind one way of calling it."""

    def __init__(self, model: nn.Module) -> None:
        """Remember the model; nothing is copied or changed."""
        self.model = model
        first = next(model.parameters(), None)
        self.device = first.device if first is not None else torch.device("cpu")
        self._recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
        self._places = places_of(model)

    @property
    def tolerance(self) -> float:
        """How far outputs may be from those of the same model on another machine, as a share of the largest."""
        coarsest = max(
            (p.dtype for p in self.model.parameters() if p.is_floating_point()),
            key=lambda one: torch.finfo(one).eps,
            default=torch.float32,
        )
        near = ELSEWHERE.get(coarsest, 1e-1)
        return near if self.device.type == "cpu" or coarsest == torch.float64 else max(near, 1e-2)

    def __call__(self, inputs: Inputs, where: str = "this batch") -> Tensor:
        """Outputs (n, k) of the model as it is, positions in a row; of a view, what it sees of them."""
        if isinstance(inputs, View):
            return inputs.see(self(inputs.inputs, where))
        return self.shaped(inputs, where).flatten(1)

    def shaped(self, inputs: Inputs, where: str = "this batch") -> Tensor:
        """Outputs (n, ..., k) of the model as it is, with the positions at which it answers."""
        args, kwargs = arguments(inputs)
        try:
            with self._kernels():
                outputs = self.model(*args, **kwargs)
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            if isinstance(error, WhenceError):
                raise
            raise InputError(
                f"expected inputs that the model accepts, got {type(error).__name__} from its forward on {where} "
                f"with inputs {describe(inputs)}: {first_line(error)}. Check their shapes, dtypes and names."
            ) from error
        return tidy(outputs, batch_size(inputs, where), where)

    def with_parameters(self, parameters: dict[str, Tensor], inputs: Inputs) -> Tensor:
        """Outputs (n, k) with some parameters replaced, as `torch.func` wants it."""
        if isinstance(inputs, View):
            return inputs.see(self.with_parameters(parameters, inputs.inputs))
        args, kwargs = arguments(inputs)
        placed = {place: value for name, value in parameters.items() for place in self._places[name]}
        with self._kernels():
            outputs = functional_call(self.model, placed, args, kwargs, tie_weights=False)
        return tidy(outputs, batch_size(inputs, "this batch"), "this batch").flatten(1)

    def _kernels(self) -> AbstractContextManager[None]:
        """Do without cuDNN where recurrent layers are differentiated: it can do so in training mode only."""
        wanted = self._recurrent and self.device.type == "cuda" and torch.is_grad_enabled()
        return without_cudnn() if wanted else nullcontext()

    def check_repeatable(self, inputs: Inputs) -> list[str]:
        """Make sure that neither chance nor the neighbours change the outputs on the first batch; return notes.

        Of a large batch a part is enough: chance and neighbours spare no 256 examples.
        """
        inputs = take(inputs, slice(0, min(batch_size(inputs, "batch 0"), CHECKED)))
        with torch.no_grad():
            with _NoRescaling():
                once = self(inputs, "batch 0")
            again = self(inputs, "batch 0")
            check_finite(once, "outputs of the model", "batch 0")
            gap = float((once - again).abs().max())
            if gap > ROUNDING.get(once.dtype, 1e-5) * float(once.abs().max()):
                raise NotDeterministicError(
                    f"expected the same outputs from two calls on batch 0, got a difference of {gap:.3g}. "
                    "The model draws random numbers or keeps state: make its forward deterministic in eval mode."
                )
        notes = self.check_separate(inputs, once)
        if gap:
            notes.append(f"two calls of the model on the same batch differ by {gap:.2g}, as by rounding")
        return notes

    def check_separate(self, inputs: Inputs, outputs: Tensor | None = None) -> list[str]:
        """Make sure that neighbours do not change the outputs of the first and the last of these examples; notes."""
        inputs = take(inputs, slice(0, min(batch_size(inputs, "batch 0"), CHECKED)))
        n = batch_size(inputs, "batch 0")
        if n == 1:
            return []
        with torch.no_grad():
            ends = {0: "the first example of batch 0", n - 1: "the last of the first examples"}
            alone = {at: self(take(inputs, slice(at, at + 1)), f"{name} alone") for at, name in ends.items()}
            try:
                outputs = self(inputs, "the first examples together") if outputs is None else outputs
            except (InputError, ShapeError) as error:  # batches of one example, as the model wants them
                return [f"the model takes one example at a time, not {n} at once ({first_line(error)})"]
            for at, name in ends.items():
                self._check_alone(alone[at], outputs, at, name)
        return []

    def _check_alone(self, alone: Tensor, outputs: Tensor, at: int, name: str) -> None:
        scale = float(outputs.abs().max())
        near = NEAR.get(outputs.dtype, 1e-2) * scale
        gap = float((alone[0] - outputs[at]).abs().max()) if alone.shape[1] == outputs.shape[1] else float("inf")
        if not gap <= near:
            raise NotDeterministicError(
                f"expected each example's outputs to be its own, got other outputs for {name} "
                f"when it comes alone (a difference of {gap:.3g} where outputs reach {scale:.3g}). The model mixes "
                "the examples of a batch: look for statistics over the batch, or for batch_first=False in attention "
                "and recurrent layers."
            )

    def check_connected(self, parameters: Mapping[str, Tensor], inputs: Inputs) -> list[str]:
        """The names of selected parameters that the outputs do not use; raise when that is all of them."""
        inputs = take(inputs, slice(0, 2))  # a few examples show the graph
        free = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        with torch.enable_grad(), plain_kernels():
            outputs = self.with_parameters(free, inputs)
            grads: Any = [None] * len(free)
            if outputs.requires_grad:
                grads = torch.autograd.grad(outputs.sum(), list(free.values()), allow_unused=True)
        unused = [name for name, grad in zip(free, grads, strict=True) if grad is None]
        if len(unused) == len(free):
            raise UncapturedParameterError(
                f"expected outputs that depend on the selected parameters, got none of the {len(free)} connected to "
                "them. Look for torch.no_grad, torch.inference_mode or .detach() in the model's forward, "
                "or select parameters that it uses."
            )
        return unused

    def last_module(self, inputs: Inputs) -> str:
        """The name of the module with trainable parameters of its own that starts last.

        The one that starts, not the one that ends: a model that holds bare parameters itself ends after its layers.
        """
        ran: list[str] = []

        def note(name: str) -> Any:
            return lambda *_: ran.append(name)

        handles = [
            module.register_forward_pre_hook(note(name))
            for name, module in self.model.named_modules()
            if any(p.requires_grad for p in module.parameters(recurse=False))
        ]
        try:
            with torch.no_grad():
                self(inputs, "batch 0")
        finally:
            for handle in handles:
                handle.remove()
        if not ran:
            raise InputError(
                'expected a module with trainable parameters for parameters="last_layer", got none that runs. '
                "Name the parameters instead, or call requires_grad_(True) on them."
            )
        return ran[-1]


def places_of(model: nn.Module) -> dict[str, list[str]]:
    """One name for every place that holds a parameter, by the parameter's first name.

    `functional_call` ties weights by all their names. Where one module goes by two names it then fills the same place
    twice, and puts the replacement back instead of the parameter.

    Examples:
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> places_of(nn.Sequential(layer, nn.Tanh(), layer))
        {'0.weight': ['0.weight']}
    """
    first: dict[int, str] = {}
    places: dict[str, list[str]] = {}
    seen = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, attribute = name.rpartition(".")
        known = first.setdefault(id(parameter), name)
        place = (id(model.get_submodule(path)), attribute)
        if place not in seen:
            seen.add(place)
            places.setdefault(known, []).append(name)
    return places


def arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for a model's forward."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def tidy(outputs: Any, n: int, where: str) -> Tensor:
    """Take the tensor out of what a model returned, as (n, k), or (n, ..., k) with positions.

    Tensors of shape (n,) become (n, 1), and what is left of (1, k) after a `squeeze` (1, k) again; of a Hugging Face
    output or a dict the `logits` are taken.
    """
    found = outputs
    if isinstance(found, Mapping):
        found = found.get("logits")
    elif hasattr(found, "logits"):
        found = found.logits
    if not isinstance(found, Tensor):
        raise ShapeError(
            f"expected the model to return a tensor, or something with `logits`, got {type(outputs).__name__} in "
            f"{where}. Wrap the model in a module that returns the tensor."
        )
    if not found.is_floating_point():
        raise InputError(
            f"expected floating-point outputs, got {found.dtype} in {where}. "
            "Return what the loss was computed from (for example logits), not decisions."
        )
    if found.ndim < 2:
        found = found.reshape(1, -1) if n == 1 else found.unsqueeze(-1)
    if len(found) != n:
        raise ShapeError(
            f"expected outputs of shape ({n}, k), one row for each of the {n} examples, got {tuple(found.shape)} in "
            f"{where}. Wrap the model in a module that returns one row an example; a single example goes in as a batch "
            "of one, x.unsqueeze(0)."
        )
    return found


def first_line(error: BaseException) -> str:
    """The first line of an error's message, cut to a length that fits into another message."""
    text = str(error).strip()
    return text.splitlines()[0][:160].rstrip(".") if text else type(error).__name__
