"""The network: a user's model called in one way, and its selected parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cudnn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_map

from whence.data.batches import Batch, Batches, Inputs, batch_size, check_finite, describe, take
from whence.display import listing
from whence.errors import InputError, NotDeterministicError, ShapeError, WhenceError, did_you_mean, first_line
from whence.jacobian.functionals import OutputFunctional
from whence.jacobian.rules.base import Arguments, Function, Intercept, Keywords, bind, substituted
from whence.jacobian.rules.channels_last import fast_relu
from whence.jacobian.rules.embeddings import BAG, TABLE, refuse_rescaling
from whence.runtime.model_state import settings, training_path

# Largest differences of outputs, relative to the largest output: between two calls (GPUs sum in any order), between an
# example alone and in its batch, and between machines.
REPEATED_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2}
SINGLE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 3e-2}
DEVICE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 3e-2}
COARSEST_TOLERANCE = 1e-1  # the same for bfloat16
CHECKED_EXAMPLES = 256  # examples of the first batch whose outputs are checked first
CHECKED_BATCHES = 32  # batches in which two examples are also run alone; later only in batches 2^i


class Network:
    """A user's model with one calling convention, whatever it takes and returns."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        first = next(model.parameters(), None)
        self.device = first.device if first is not None else torch.device("cpu")
        self._recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
        self._compiled = any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules())

        dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
        self._coarsest = max(dtypes, key=lambda one: torch.finfo(one).eps, default=torch.float32)

    @property
    def tolerance(self) -> float:
        """Largest relative difference to the outputs of the same model on another machine."""
        rounded = self.device.type != "cpu" and self._coarsest != torch.float64  # products, perhaps to TF32
        return max(DEVICE_TOLERANCE.get(self._coarsest, COARSEST_TOLERANCE), 1e-2 if rounded else 0.0)

    @property
    def repeated_tolerance(self) -> float:
        """Largest relative difference between two calls on the same inputs."""
        return REPEATED_TOLERANCE.get(self._coarsest, COARSEST_TOLERANCE)

    def precision(self, outputs: Tensor) -> torch.dtype:
        """The coarser type of weights and outputs: these may be computed in float32 and converted at the end."""
        return max(self._coarsest, outputs.dtype, key=lambda one: torch.finfo(one).eps)

    def __call__(self, inputs: Inputs, where: str = "this batch") -> Tensor:
        """Outputs (n, k) with positions flattened, or functionals of them."""
        if isinstance(inputs, OutputFunctional):
            return inputs.apply(self(inputs.inputs, where))
        return self.shaped(inputs, where).flatten(1)

    def shaped(self, inputs: Inputs, where: str = "this batch") -> Tensor:
        """Outputs (n, ..., k), with the axes of positions."""
        args, kwargs = arguments(inputs)
        if hasattr(self.model, "prepare_decoder_input_ids_from_labels") and len(args) < 3:
            _require_decoder_inputs(kwargs, where)
        try:
            with self._kernels(), training_path():
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
        return as_outputs(outputs, batch_size(inputs, where), where)

    def with_parameters(self, parameters: dict[str, Tensor], inputs: Inputs) -> Tensor:
        """Outputs (n, k) with some parameters replaced."""
        own = {name: id(parameter) for name, parameter in self.model.named_parameters()}
        with substituted({own[name]: value for name, value in parameters.items()}):
            return self(inputs)

    def _kernels(self) -> AbstractContextManager[Any]:
        """No cuDNN for gradients of recurrent layers (it has them only in training mode), and no compiled code."""
        if self._compiled and hasattr(torch.compiler, "set_stance"):  # torch 2.6 and later
            eagerly: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
            return eagerly
        wanted = self._recurrent and self.device.type == "cuda" and torch.is_grad_enabled()
        return settings(cudnn, enabled=False) if wanted else nullcontext()

    def check_repeatable(self, inputs: Inputs) -> list[str]:
        """Raise unless the first examples have the same outputs in two calls; return notes."""
        inputs = take(inputs, slice(0, CHECKED_EXAMPLES))
        with torch.no_grad():
            with Intercept(_without_rescaling):
                once = self(inputs, "batch 0")
            again = self(inputs, "batch 0")
        check_finite(once, "outputs of the model", "batch 0")
        gap = float((once - again).abs().max())
        if gap > REPEATED_TOLERANCE.get(self.precision(once), COARSEST_TOLERANCE) * float(once.abs().max()):
            raise NotDeterministicError(
                f"expected the same outputs from two calls on batch 0, got a difference of {gap:.3g}. "
                "The model draws random numbers or keeps state: make its forward deterministic in eval mode."
            )
        return [f"two calls of the model on the same batch differ by {gap:.2g}, as by rounding"] if gap else []

    def last_module(self, inputs: Inputs) -> str:
        """Name of the last module to start that has trainable parameters of its own (the model itself ends last)."""
        ran: list[str] = []
        handles = [
            module.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
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


class CheckedOutputs:
    """Outputs of one batch after another, checked: same shape, finite, and each example independent of the others.

    For the last, the most unusual example and another one of some batches are also run alone. The first batch is not
    enough: a layer that mixes examples may have no effect there (a closed gate, dead units).
    """

    def __init__(self, network: Network, same_positions: bool) -> None:
        self.network, self.same_positions = network, same_positions  # whether all batches must have the same positions
        self.shape = torch.Size()  # (..., k) of the outputs of an example in the first batch
        self.batches, self.scale = 0, 0.0
        self._single: Inputs = None  # the inputs of the last batch of one example

    def __call__(self, inputs: Inputs, where: str) -> Tensor:
        """Outputs (n, ..., k) without a graph, or an error."""
        with torch.no_grad():
            outputs = self.network.shaped(inputs, where).detach()
        here = outputs.shape[1:]
        self.shape = self.shape or here
        if here != self.shape and (self.same_positions or here[-1:] != self.shape[-1:] or len(here) != len(self.shape)):
            advice = (
                " Sequences of several lengths are padded to one, or reduced to a few mixtures of their outputs: "
                "fit(..., hessian_columns=16)."
            )
            raise ShapeError(
                f"expected {describe_outputs(self.shape)} as in batch 0, got {describe_outputs(here)} in {where}. Wrap "
                "the model in a module that returns the same number of outputs for every batch."
                + advice
                * self.same_positions
            )
        check_finite(outputs, "outputs of the model", where)
        self.batches += 1
        if not (self.batches > CHECKED_BATCHES and self.batches & (self.batches - 1)):
            flat = outputs.flatten(1)
            self.scale = max(self.scale, float(flat.abs().max()))
            if len(flat) == 1:
                self._check_pair(inputs, where)
                return outputs
            at, last = int((flat - flat.mean(0)).abs().amax(1).argmax()), len(flat) - 1
            for one in (0 if at == last else last, at):
                self._check_alone(inputs, flat, one, f"example {one} of {where}")
        return outputs

    def _check_pair(self, inputs: Inputs, where: str) -> None:
        """Run a batch of one example together with the last one of its kind, if the model takes both at once."""
        before, self._single = self._single, inputs
        if before is None:
            return
        try:
            pair = tree_map(lambda a, b: torch.cat([a, b]) if isinstance(a, Tensor) else a, before, inputs)
            with torch.no_grad():
                outputs = self.network(pair, where)
        except (ValueError, TypeError, RuntimeError):  # of another form, or two are too many
            return
        for at in range(2):
            self._check_alone(pair, outputs, at, f"an example of {where} or the batch before")

    def _check_alone(self, inputs: Inputs, outputs: Tensor, at: int, name: str) -> None:
        """Raise unless an example has the same outputs alone as in its batch, with outputs (n, k)."""
        with torch.no_grad():
            alone, together = self.network(take(inputs, slice(at, at + 1)), f"{name} alone")[0], outputs[at]
        gap = float((alone - together).abs().max()) if alone.shape == together.shape else float("inf")
        if not gap <= SINGLE_TOLERANCE.get(self.network.precision(together), COARSEST_TOLERANCE) * self.scale:
            raise NotDeterministicError(
                f"expected each example's outputs to be its own, got other outputs for {name} when it comes alone (a "
                f"difference of {gap:.3g} where outputs reach {self.scale:.3g}). The model mixes the examples of a "
                "batch: look for statistics over the batch, or for batch_first=False in attention and recurrent layers."
            )


def describe_outputs(shape: torch.Size) -> str:
    """A shape (..., k) of outputs, for messages."""
    return f"{shape[-1]} outputs" + (f" at {' x '.join(map(str, shape[:-1]))} positions" if len(shape) > 1 else "")


def _without_rescaling(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Make a call, but raise for `F.embedding` with `max_norm`, which would change the weight."""
    if function in (F.embedding, F.embedding_bag):
        refuse_rescaling(bind(TABLE if function is F.embedding else BAG, args, kwargs), ["max_norm"])
    return function(*args, **kwargs)


def arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for a model's forward."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def _require_decoder_inputs(given: Mapping[str, Any], where: str) -> None:
    """Raise without the decoder's words: a model of transformers takes them from labels, else from the source."""
    if not given.keys() & {"decoder_input_ids", "decoder_inputs_embeds"}:
        raise InputError(
            "expected decoder_input_ids among the inputs of an encoder-decoder model, got "
            f"{listing([*given]) or 'no names'} in {where}. In training the model makes them from the labels, which "
            "are no inputs here. Add them to every batch, also of inputs to predict: by "
            "DataCollatorForSeq2Seq(tokenizer, model=model), or by "
            'batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"]).'
        )


def as_outputs(outputs: Any, n: int, where: str) -> Tensor:
    """The tensor that a model returned (or its `logits`), as (n, k), or (n, ..., k) with positions.

    Shape (n,) becomes (n, 1), and (k,) from a `squeeze` of (1, k) becomes (1, k) again.
    """
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
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


def in_half(network: Network, few: Inputs | None = None) -> Callable[[Inputs], Tensor]:
    """The network with products in half precision: float16, which has as many digits as TF32, unlike bfloat16.

    On a GPU, a convolutional network gets its images with channels last in memory, which halves the time of backward
    passes, if it accepts the `few` inputs so: a `view` in its forward may not. On a CPU torch 2.13 may crash with that.

    Examples:
        >>> in_half(Network(nn.Linear(2, 3)))(torch.ones(5, 2)).dtype
        torch.float16
    """

    def call(inputs: Inputs) -> Tensor:
        with torch.autocast(network.device.type, torch.float16):
            return network(inputs)

    def channels_last(inputs: Inputs) -> Tensor:
        with Intercept(fast_relu):
            return call(tree_map(_channels_last, inputs))

    convolutional = any(isinstance(module, nn.Conv2d) for module in network.model.modules())
    if few is None or network.device.type != "cuda" or not convolutional:
        return call
    try:
        with torch.no_grad():
            channels_last(few)
    except WhenceError:
        return call
    return channels_last


def _channels_last(leaf: Any) -> Any:
    is_image = isinstance(leaf, Tensor) and leaf.dim() == 4 and leaf.is_floating_point()
    return leaf.contiguous(memory_format=torch.channels_last) if is_image else leaf


# --- Selected parameters ----------------------------------------------------------------------------------------------


Choice = str | Iterable[str] | Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True)
class Selection:
    """The selected parameters, in the order in which they are laid out in a flat vector of size d."""

    parameters: dict[str, nn.Parameter]

    @property
    def size(self) -> int:
        """The number d of selected weights."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    def flatten(self, tensors: dict[str, Tensor], leading: int = 0) -> Tensor:
        """Join tensors (..., *parameter.shape) with `leading` leading axes into one (..., d)."""
        return torch.cat([tensors[name].flatten(leading) for name in self.parameters], dim=-1)

    def unflatten(self, vector: Tensor, cast: bool = False) -> dict[str, Tensor]:
        """Split (..., d) into tensors of the parameters' shapes, and if `cast` of their dtypes."""
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        parts = vector.split(sizes, dim=-1)
        return {
            name: part.reshape(*vector.shape[:-1], *parameter.shape).to(parameter.dtype if cast else part.dtype)
            for (name, parameter), part in zip(self.parameters.items(), parts, strict=True)
        }

    def detached(self) -> dict[str, Tensor]:
        """The parameters without a graph, for a functional call."""
        return {name: p.detach() for name, p in self.parameters.items()}

    def weights(self, dtype: torch.dtype) -> Tensor:
        """The current weights as one flat vector."""
        return self.flatten(self.detached()).to(dtype)

    def norm(self) -> float:
        """Norm of the current weights, always above zero."""
        each = (torch.linalg.vector_norm(one, dtype=torch.float64) for one in self.detached().values())
        return max(math.hypot(*map(float, each)), torch.finfo(torch.float64).tiny)


def select(network: Network, choice: Choice, inputs: Inputs) -> Selection:
    """Pick parameters of a model that are not frozen; `inputs` show which layer runs last.

    The choice is "all", "last_layer", a name or a pattern such as "layer4.*" (`*` and `?`), several of them, or a
    function of name and parameter.

    Examples:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> list(select(Network(net), "last_layer", torch.ones(1, 3)).parameters)
        ['2.weight', '2.bias']
    """
    model = network.model
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if isinstance(choice, str) and choice == "all":
        picked = trainable
    elif isinstance(choice, str) and choice == "last_layer":
        owned = {id(p) for p in model.get_submodule(network.last_module(inputs)).parameters()}
        picked = {name: p for name, p in trainable.items() if id(p) in owned}
    elif callable(choice):
        picked = {name: p for name, p in trainable.items() if choice(name, p)}
    else:
        picked = _matching(model, trainable, choice)
    if not picked:
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        raise InputError(
            f"expected at least one selected parameter, got none with parameters={choice!r}. "
            f"Trainable: {_listing(trainable)}; frozen (requires_grad=False): {_listing(frozen)}. "
            'Use parameters="all", or call requires_grad_(True) on what should count.'
        )
    not_real = [name for name, p in picked.items() if not p.is_floating_point()]
    if not_real:
        raise InputError(
            f"expected real floating-point parameters, got {picked[not_real[0]].dtype} in {_listing(not_real)}. "
            "Select others, or call requires_grad_(False) on these."
        )
    return Selection(dict(picked))


def _matching(model: nn.Module, trainable: dict[str, nn.Parameter], choice: Any) -> dict[str, nn.Parameter]:
    """Trainable parameters with a name that matches a pattern; tied parameters have several names."""
    patterns = [choice] if isinstance(choice, str) or not isinstance(choice, Iterable) else [*choice]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise InputError(
            'expected parameters to be "all", "last_layer", names or patterns, or a function of name and parameter, '
            f"got {choice!r}."
        )
    named, chosen = list(model.named_parameters(remove_duplicate=False)), set[int]()
    for pattern in patterns:
        matches = [(name, p) for name, p in named if fnmatchcase(name, pattern)]
        if not any(p.requires_grad for _, p in matches):
            frozen = f"Frozen (requires_grad=False): {_listing(name for name, _ in matches)}. " if matches else ""
            raise InputError(
                f"expected every pattern of `parameters` to match a trainable parameter, got no match for {pattern!r}."
                f"{did_you_mean(pattern, [*trainable, 'all', 'last_layer'])} {frozen}"
                f"The model has: {_listing(trainable)}."
            )
        chosen.update(id(p) for _, p in matches)
    return {name: p for name, p in trainable.items() if id(p) in chosen}


def _listing(names: Iterable[str]) -> str:
    return listing(list(names), 12) or "none"


# --- Wrapped and sharded models ---------------------------------------------------------------------------------------


FSDP = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")  # in current and in older versions of torch


def unwrap(model: Any) -> Any:
    """The network inside `DistributedDataParallel` or `torch.compile`; for FSDP2, a copy with whole weights.

    For a sharded model all processes must call this together: each of them gets all weights.

    Examples:
        >>> inner = nn.Linear(1, 1)
        >>> unwrap(DataParallel(inner)) is inner
        True
    """
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        return unwrap(model.module)
    if isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
        return unwrap(compiled)
    modules = model.modules() if isinstance(model, nn.Module) else ()
    kinds = {kind.__name__ for module in modules for kind in type(module).__mro__ if _is_fsdp(kind)}
    if "FullyShardedDataParallel" in kinds:
        raise InputError(
            "expected a model that is whole, wrapped in DistributedDataParallel or sharded by fully_shard, got the "
            "older FullyShardedDataParallel. Load its full state dict into a plain copy of the model, and fit that."
        )
    return unsharded(model, {}) if kinds else model


def unsharded(part: Any, copies: dict[int, Any]) -> Any:
    """A module, or a parameter, before `fully_shard`, with its weights gathered in every process; the rest is shared.

    `copies` holds the copies made so far, by the identity of the original.
    """
    if part is None or id(part) in copies:
        return copies.get(id(part))
    if isinstance(part, nn.Parameter):
        values: Any = part.detach()
        whole = values.full_tensor() if hasattr(values, "full_tensor") else values  # of a DTensor
        copies[id(part)] = nn.Parameter(whole, part.requires_grad)
        return copies[id(part)]
    kind: Any = next(one for one in type(part).__mro__ if not _is_fsdp(one))
    found = copies[id(part)] = kind.__new__(kind)
    found.__dict__ = {name: copy(value) if isinstance(value, dict) else value for name, value in vars(part).items()}
    for hooks in (found._forward_pre_hooks, found._forward_hooks):
        for key in [key for key, hook in hooks.items() if _is_fsdp(hook)]:
            del hooks[key]
    for children in (found._parameters, found._modules):
        children.update({name: unsharded(one, copies) for name, one in children.items()})
    return found


def _is_fsdp(thing: Any) -> bool:
    """Whether a class or a hook is one of torch's FSDP."""
    kinds = thing.__mro__ if isinstance(thing, type) else (thing,)
    return any(getattr(kind, "__module__", "").startswith(FSDP) for kind in kinds)


# --- Labels of language models ----------------------------------------------------------------------------------------


IGNORED = -100  # label that Hugging Face's models leave out of their own loss


def next_labels(labels: Tensor, ignore_index: int) -> Tensor:
    """Labels (n, t) of the next position; the last position has none.

    Examples:
        >>> next_labels(torch.tensor([[3, 4, 5]]), -100)
        tensor([[   4,    5, -100]])
    """
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], ignore_index)], dim=1)


def follow_own_loss(network: Network, batches: Batches, first: Batch, ignore_index: int | None) -> None:
    """Shift labels by one if the model's own loss does, and add a note.

    A Hugging Face model that gets labels returns its loss. On the first batch, this loss is compared with the
    cross-entropy of the labels as they are and of the labels shifted by one: the model was trained with the one that
    agrees. `ignore_index` is the likelihood's; `None` if the likelihood does not take class indices.
    """
    labels = first.targets
    if ignore_index is None or labels.ndim != 2 or labels.is_floating_point() or labels.shape[1] < 2:
        return
    own = _own_loss(network, first)
    with torch.no_grad():
        outputs = network.shaped(first.inputs).double() if own is not None else labels
    if own is None or outputs.shape[:-1] != labels.shape:
        return
    plain, shifted = (
        float(F.cross_entropy(outputs.flatten(0, 1), one.reshape(-1).long(), ignore_index=IGNORED))
        for one in (labels, next_labels(labels, IGNORED))
    )
    near = 1e-3 * abs(own) + 1e-6
    if abs(shifted - own) <= near and abs(shifted - own) < abs(plain - own):
        batches.target_transform = lambda targets: next_labels(targets, ignore_index)
        batches.notes.append(
            "the model predicts the next token, as its own loss shows: outputs at a position were compared with the "
            "label of the next one"
        )
    elif abs(plain - own) > near:
        batches.notes.append(
            f"the model's own loss on the first batch ({own:.4g}) is neither the cross-entropy of the labels as they "
            f"stand ({plain:.4g}) nor of the next ones ({shifted:.4g}); they were taken as they stand"
        )


def _own_loss(network: Network, batch: Batch) -> float | None:
    """The mean loss that the model itself computes from labels; `None` if it does not."""
    try:
        with torch.no_grad(), training_path():
            answer = network.model(**batch.inputs, labels=batch.targets)
    except Exception:  # a model that takes no labels, or not of this kind
        return None
    loss = answer.get("loss") if isinstance(answer, Mapping) else getattr(answer, "loss", None)
    return float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 and bool(torch.isfinite(loss)) else None
