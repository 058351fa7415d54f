"""Training in few launches: on a GPU a whole step is one CUDA graph, and all that it takes lies there beforehand.

Small steps leave a GPU waiting for the next launch. Here the order of the examples, the learning rates and the shifts
of the images are drawn ahead (`Plan`), and a step reads its row of them; so it can be captured once and replayed, also
for other first weights, labels and examples of the same shape. Without a GPU the same steps run one after the other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor], Tensor]
"""(b,) losses of examples, from outputs (b, k) and targets (b, ...)."""

WARM = 3
"""Steps before the capture, in which libraries choose their kernels; they count as training."""


@dataclass(frozen=True)
class Plan:
    """What each step of a training takes.

    Attributes:
        index: (steps, b) examples.
        weight: (steps, b) ones, and zeros where a batch is filled up.
        rates: (steps,) learning rates.
        momenta: (steps,) of the running mean of gradients.
        moves: (steps, 3, b) whether an image is mirrored, and how far it is shifted down and to the right.
    """

    index: Tensor
    weight: Tensor
    rates: Tensor
    momenta: Tensor
    moves: Tensor | None = None

    @property
    def steps(self) -> int:
        """How many."""
        return len(self.index)


def in_batches(n: int, epochs: int, batch: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Index and weight of a plan: every epoch in a new order, its last batch filled up by examples that do not count.

    Not for networks with batch norm, which would see those too.

    Examples:
        >>> index, weight = in_batches(5, 1, 3, torch.Generator().manual_seed(0))
        >>> sorted(index.flatten()[weight.flatten() > 0].tolist()), weight.tolist()
        ([0, 1, 2, 3, 4], [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    """
    steps = -(-n // batch)
    index = torch.zeros(epochs, steps * batch, dtype=torch.int64)
    weight = torch.zeros(epochs, steps * batch)
    for row in index:
        row[:n] = torch.randperm(n, generator=draw)
    weight[:, :n] = 1.0
    return index.reshape(-1, batch), weight.reshape(-1, batch)


def in_a_stream(n: int, epochs: int, batch: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Index and weight of a plan: new orders one after the other, cut into full batches; the last rest is left out.

    Examples:
        >>> index, weight = in_a_stream(5, 2, 3, torch.Generator().manual_seed(0))
        >>> sorted(index.flatten()[:5].tolist()), index.shape, bool(weight.all())
        ([0, 1, 2, 3, 4], torch.Size([3, 3]), True)
    """
    order = torch.cat([torch.randperm(n, generator=draw) for _ in range(epochs)])
    size = min(batch, len(order))
    index = order[: len(order) // size * size].reshape(-1, size)
    return index, torch.ones(index.shape)


def drawn_moves(index: Tensor, shift: int, draw: torch.Generator) -> Tensor:
    """Moves of a plan: half of the images are mirrored, all are shifted by up to `shift` pixels, each by itself."""
    steps, batch = index.shape
    mirrored = torch.randint(2, (steps, 1, batch), generator=draw)
    return torch.cat([mirrored, torch.randint(2 * shift + 1, (steps, 2, batch), generator=draw)], dim=1)


def one_cycle(peak: float, steps: int) -> tuple[Tensor, Tensor]:
    """Rates and momenta of torch's `OneCycleLR` for Adam: the rate rises and falls, the momentum falls and rises."""
    optimiser = torch.optim.Adam([nn.Parameter(torch.zeros(()))], lr=peak)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, peak, total_steps=steps)
    found = []
    for step in range(steps):
        (group,) = optimiser.param_groups
        found.append((group["lr"], group["betas"][0]))
        optimiser.step()
        if step + 1 < steps:
            schedule.step()
    rates, momenta = torch.tensor(found, dtype=torch.float64).unbind(1)
    return rates, momenta


def constant(rate: float, momentum: float, steps: int) -> tuple[Tensor, Tensor]:
    """Rates and momenta that stay as they are."""
    return torch.full((steps,), rate, dtype=torch.float64), torch.full((steps,), momentum, dtype=torch.float64)


@dataclass(frozen=True)
class Adam:
    """Adam; with a decay, AdamW.

    Attributes:
        decay: of the weights, decoupled.
    """

    decay: float = 0.0
    squares: float = 0.999
    eps: float = 1e-8
    buffers: int = field(default=2, init=False)

    def table(self, plan: Plan) -> Tensor:
        """(steps, 5) the numbers that a step takes, from double precision."""
        past = torch.arange(1, plan.steps + 1, dtype=torch.float64)
        columns = [
            1 - plan.rates * self.decay,
            plan.momenta,
            1 - plan.momenta,
            plan.rates / (1 - plan.momenta**past),
            (1 - self.squares**past).sqrt(),
        ]
        return torch.stack(columns, 1).float()

    def step(self, weights: list[Tensor], gradients: list[Tensor], state: Sequence[list[Tensor]], row: Tensor) -> None:
        """Change the weights and the state in place."""
        kept, momentum, rest, rate, scale = row.unbind()
        mean, square = state
        torch._foreach_mul_(mean, momentum)
        torch._foreach_add_(mean, torch._foreach_mul(gradients, rest))
        torch._foreach_mul_(square, self.squares)
        torch._foreach_addcmul_(square, gradients, gradients, 1 - self.squares)
        size = torch._foreach_sqrt(square)
        torch._foreach_div_(size, scale)
        torch._foreach_add_(size, self.eps)
        change = torch._foreach_div(mean, size)
        torch._foreach_mul_(change, rate)
        if self.decay:
            torch._foreach_mul_(weights, kept)
        torch._foreach_sub_(weights, change)


@dataclass(frozen=True)
class Momentum:
    """Stochastic gradient descent with momentum, as torch's `SGD`."""

    buffers: int = field(default=1, init=False)

    def table(self, plan: Plan) -> Tensor:
        """(steps, 2) momentum and rate."""
        return torch.stack([plan.momenta, plan.rates], 1).float()

    def step(self, weights: list[Tensor], gradients: list[Tensor], state: Sequence[list[Tensor]], row: Tensor) -> None:
        """Change the weights and the state in place."""
        momentum, rate = row.unbind()
        (mean,) = state
        torch._foreach_mul_(mean, momentum)
        torch._foreach_add_(mean, gradients)
        torch._foreach_sub_(weights, torch._foreach_mul(mean, rate))


Rule = Adam | Momentum


@dataclass(frozen=True)
class Trainer:
    """Trains networks in place, all by the same rule; of each kind of network one is captured, and used again.

    Attributes:
        rule: the optimiser.
        loss: of each example; the weighted mean over a batch is minimised.
        half: products in bfloat16 on a GPU, weights stay in single precision.
        shift: how far images are shifted at most; a plan has moves where this is not zero.
        graphs: whether steps are captured on a GPU.

    Examples:
        >>> network, draw = nn.Linear(1, 1), torch.Generator().manual_seed(0)
        >>> x = torch.randn(64, 1, generator=draw)
        >>> plan = Plan(*in_batches(64, 50, 16, draw), *constant(0.05, 0.9, 200))
        >>> Trainer(Momentum(), lambda outputs, y: (outputs - y).square().sum(1))(network, x, 3 * x, plan)
        >>> round(network.weight.item(), 3)
        3.0
    """

    rule: Rule
    loss: Loss
    half: bool = False
    shift: int = 0
    graphs: bool = True
    kinds: dict[tuple[object, ...], Kind] = field(default_factory=dict, repr=False)

    def __call__(self, network: nn.Module, inputs: Tensor, targets: Tensor, plan: Plan) -> None:
        """Train; the network is left on the device of the inputs, without gradients.

        Args:
            network: is changed.
            inputs: (n, ...).
            targets: (n, ...), as the loss takes them.
            plan: which examples, and how far, at each step.
        """
        if (plan.moves is not None) != bool(self.shift):
            raise ValueError(f"expected moves in the plan if and only if shift is not zero, got shift {self.shift}.")
        network.to(inputs.device)
        shapes = tuple((name, tuple(value.shape)) for name, value in network.state_dict().items())
        asked = (repr(network), network.training, shapes, inputs.shape[1:], targets.shape[1:], plan.index.shape[1])
        kind = self.kinds.get(asked)
        if kind is None or not kind.holds(inputs, plan):
            self.kinds.pop(asked, None)
            kind = self.kinds[asked] = Kind(self, network, inputs, targets, plan)
        kind.run(network, inputs, targets, plan)


class Kind:
    """Memory of its own for a network, its state, its data and its plan, which a captured step reads and writes."""

    def __init__(self, trainer: Trainer, network: nn.Module, inputs: Tensor, targets: Tensor, plan: Plan) -> None:
        self.trainer, device = trainer, inputs.device
        self.network = deepcopy(network)
        self.half = trainer.half and inputs.is_cuda
        if self.half and inputs.ndim == 4:
            for weight in self.network.parameters():
                if weight.ndim == 4:  # quicker in half precision
                    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        trained = [weight for weight in self.network.parameters() if weight.requires_grad]
        self.parameters, self.weights = trained, [weight.detach() for weight in trained]
        self.state = [[torch.zeros_like(weight) for weight in self.weights] for _ in range(trainer.rule.buffers)]
        self.inputs = torch.empty((len(inputs), *self._stored(inputs[:1]).shape[1:]), dtype=inputs.dtype, device=device)
        self.targets = torch.empty(targets.shape, dtype=targets.dtype, device=device)
        self.index = torch.zeros_like(plan.index, device=device)
        self.weight = torch.zeros_like(plan.weight, device=device)
        self.table = torch.zeros(trainer.rule.table(plan).shape, device=device)
        self.moves = None if plan.moves is None else torch.zeros_like(plan.moves, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.captures = trainer.graphs and inputs.is_cuda

    def holds(self, inputs: Tensor, plan: Plan) -> bool:
        """Whether its memory is large enough."""
        return len(inputs) <= len(self.inputs) and plan.steps <= len(self.index) and inputs.device == self.at.device

    def run(self, network: nn.Module, inputs: Tensor, targets: Tensor, plan: Plan) -> None:
        """Train a network of this kind."""
        self._load(network, inputs, targets, plan)
        steps = plan.steps
        if self.captures and self.graph is None and steps > WARM:
            steps -= self._capture()
        step = self._step if self.graph is None else self.graph.replay
        for _ in range(steps):
            step()
        with torch.no_grad():
            for own, given in zip(self._values(self.network), self._values(network), strict=True):
                given.copy_(own)
        for weight in network.parameters():
            weight.grad = None

    def _capture(self) -> int:
        """Capture a step; how many were made on the way. Where it fails, which is said, steps are not captured."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        for weight in self.parameters:
            weight.grad = None  # the capture makes new ones in memory of its own
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=side):
                self._step()  # is noted down, not made
            self.graph = graph
        except RuntimeError as error:
            self.captures = False
            warnings.warn(f"steps are made one by one, since they could not be captured: {error}", stacklevel=4)
        return WARM

    def _step(self) -> None:
        """One step; nothing in it waits for the GPU, and its place in the plan lies there too."""
        chosen, weight = (part.index_select(0, self.at).squeeze(0) for part in (self.index, self.weight))
        row = self.table.index_select(0, self.at).squeeze(0)
        with torch.autocast(self.at.device.type, torch.bfloat16, enabled=self.half, cache_enabled=False):
            outputs = self.network(self._inputs(chosen))
        losses = self.trainer.loss(outputs.float(), self.targets.index_select(0, chosen))
        for parameter in self.parameters:
            parameter.grad = None
        ((losses * weight).sum() / weight.sum()).backward()
        with torch.no_grad():
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            assert len(gradients) == len(self.weights)
            self.trainer.rule.step(self.weights, gradients, self.state, row)
            self.at.add_(1)

    def _inputs(self, chosen: Tensor) -> Tensor:
        if self.moves is None:
            return self.inputs.index_select(0, chosen)
        mirrored, down, right = self.moves.index_select(0, self.at).squeeze(0).unsqueeze(2).unbind()  # (b, 1) each
        side = torch.arange(self.inputs.shape[1] - 2 * self.trainer.shift, device=chosen.device)
        rows = down + side
        columns = right + torch.where(mirrored > 0, side.flip(0), side)
        images = self.inputs[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]
        return images.permute(0, 3, 1, 2)  # channels last in memory

    def _stored(self, inputs: Tensor) -> Tensor:
        """Inputs as they are kept: images that are shifted have a frame of zeros, and channels last."""
        if not self.trainer.shift:
            return inputs
        return F.pad(inputs, 4 * (self.trainer.shift,)).permute(0, 2, 3, 1)

    def _load(self, network: nn.Module, inputs: Tensor, targets: Tensor, plan: Plan) -> None:
        with torch.no_grad():
            for own, given in zip(self._values(self.network), self._values(network), strict=True):
                own.copy_(given)
            for buffer in self.state:
                torch._foreach_zero_(buffer)
            n, steps = len(inputs), plan.steps
            for low in range(0, n, 10_000):
                part = slice(low, min(low + 10_000, n))
                self.inputs[part].copy_(self._stored(inputs[part]))
            self.targets[:n].copy_(targets)
            self.index[:steps].copy_(plan.index)
            self.weight[:steps].copy_(plan.weight)
            self.table[:steps].copy_(self.trainer.rule.table(plan))
            if self.moves is not None and plan.moves is not None:
                self.moves[:steps].copy_(plan.moves)
            self.at.zero_()

    @staticmethod
    def _values(network: nn.Module) -> list[Tensor]:
        """Parameters and buffers, also those that are not saved."""
        return [*(weight.detach() for weight in network.parameters()), *network.buffers()]
