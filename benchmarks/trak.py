"""TRAK (Park et al. 2023) in a few lines: attribution from projected gradients of the log-odds of the right class.

    score(x, i) = phi(x)^T (Phi^T Phi)^-1 phi_i (1 - p_i)

with phi the gradient of log p / (1 - p) of the label, projected by random numbers. The score estimates how far example
i raises the log-odds of x; several checkpoints are averaged. `traker`, the authors' package, is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

AT_ONCE = 100


def log_odds(outputs: Tensor, label: Tensor) -> Tensor:
    """Of the right class, from logits (k,)."""
    own = torch.arange(len(outputs), device=outputs.device) == label
    return (outputs * own).sum() - outputs.masked_fill(own, -torch.inf).logsumexp(0)


def gradients(network: nn.Module, inputs: Tensor, labels: Tensor) -> Iterator[dict[str, Tensor]]:
    """Gradients of the log-odds of each example in all weights, some examples at a time."""
    found = by_layers if inputs.ndim == 4 and all(map(simple, network.modules())) else by_examples
    for some, said in zip(inputs.split(AT_ONCE), labels.split(AT_ONCE), strict=True):
        yield found(network, some, said)


def by_examples(network: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """For any network."""
    weights = {name: value.detach() for name, value in network.named_parameters()}
    buffers = dict(network.named_buffers())

    def output(given: dict[str, Tensor], x: Tensor, label: Tensor) -> Tensor:
        return log_odds(functional_call(network, (given, buffers), (x.unsqueeze(0),))[0], label)

    found: dict[str, Tensor] = vmap(grad(output), in_dims=(None, 0, 0))(weights, inputs, labels)
    return found


def simple(module: nn.Module) -> bool:
    """Whether `by_layers` is right for a module: one without weights of its own, or of a kind that it knows."""
    if getattr(module, "inplace", False):
        return False
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and not isinstance(module.padding, str) and module.padding_mode == "zeros"
    known = isinstance(module, nn.Linear) or (isinstance(module, nn.BatchNorm2d) and not module.training)
    return known or not list(module.parameters(recurse=False))


def by_layers(network: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The same for networks of simple layers: gradients at their outputs, times their inputs. Quicker on a GPU."""
    seen: list[tuple[str, nn.Module, Tensor, Tensor]] = []

    def watch(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        return module.register_forward_hook(
            lambda module, given, made: seen.append((name, module, given[0].detach(), made))
        )

    layers = {name: module for name, module in network.named_modules() if list(module.parameters(recurse=False))}
    hooks = [watch(name, module) for name, module in layers.items()]
    try:
        with torch.enable_grad():
            total = vmap(log_odds)(network(inputs), labels).sum()
    finally:
        for hook in hooks:
            hook.remove()
    slopes = torch.autograd.grad(total, [made for *_, made in seen])
    found: dict[str, Tensor] = {}
    for (name, module, given, _), slope in zip(seen, slopes, strict=True):
        for own, value in of_layer(module, given, slope).items():
            key = f"{name}.{own}" if name else own
            found[key] = found[key] + value if key in found else value
    return {name: found[name] for name, _ in network.named_parameters()}


def of_layer(module: nn.Module, given: Tensor, slope: Tensor) -> dict[str, Tensor]:
    """Gradients of each example in a layer's weights, from its inputs (n, ...) and the gradients at its outputs."""
    if isinstance(module, nn.Linear):
        found = {"weight": slope.unsqueeze(2) * given.unsqueeze(1), "bias": slope}
    elif isinstance(module, nn.Conv2d):
        assert not isinstance(module.padding, str)
        columns = F.unfold(given, module.kernel_size, module.dilation, module.padding, module.stride)
        weight = (slope.flatten(2) @ columns.mT).reshape(len(given), *module.weight.shape)
        found = {"weight": weight, "bias": slope.sum((2, 3))}
    else:
        assert isinstance(module, nn.BatchNorm2d)
        standard = F.batch_norm(given, module.running_mean, module.running_var, eps=module.eps)
        found = {"weight": (slope * standard).sum((2, 3)), "bias": slope.sum((2, 3))}
    return {name: found[name] for name, _ in module.named_parameters(recurse=False)}


def projected(network: nn.Module, inputs: Tensor, labels: Tensor, size: int, seed: int) -> Tensor:
    """(n, size) gradients times normal numbers, the same in every call with the same seed."""
    draw = torch.Generator(inputs.device).manual_seed(seed)
    weights = dict(network.named_parameters())
    options = {"generator": draw, "device": inputs.device, "dtype": inputs.dtype}
    maps = {name: torch.randn(value.numel(), size, **options) / size**0.5 for name, value in weights.items()}
    rows = [
        sum(values.flatten(1) @ maps[name] for name, values in found.items())
        for found in gradients(network, inputs, labels)
    ]
    return torch.cat(rows)


@torch.no_grad()
def surprise(network: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """(n,) 1 - p of the label."""
    p = torch.cat([network(some) for some in inputs.split(500)]).softmax(1)
    found: Tensor = 1 - p.gather(1, labels.unsqueeze(1)).squeeze(1)
    return found


def scores(networks: list[nn.Module], known: tuple[Tensor, Tensor], asked: tuple[Tensor, Tensor], size: int) -> Tensor:
    """(m, n) how far each training example raises the log-odds of each test example; the mean over checkpoints."""
    *_, found = running_scores(networks, known, asked, size)
    return found


def running_scores(
    networks: list[nn.Module], known: tuple[Tensor, Tensor], asked: tuple[Tensor, Tensor], size: int
) -> Iterator[Tensor]:
    """The scores from the first checkpoint, from the first two, and so on.

    Args:
        networks: checkpoints, in evaluation mode.
        known: inputs and labels of the training set.
        asked: those of the test points.
        size: of the projection.
    """
    total, weight = torch.zeros((), device=known[0].device), torch.zeros((), device=known[0].device)
    inputs, labels = (torch.cat(some) for some in zip(known, asked, strict=True))
    for seed, network in enumerate(networks):
        found = projected(network, inputs, labels, size, seed).double()
        phi, tests = found.split([len(known[0]), len(asked[0])])
        total = total + tests @ torch.linalg.solve(phi.T @ phi, phi.T)
        weight = weight + surprise(network, *known)
        yield (total * weight.double() / (seed + 1) ** 2).cpu()
