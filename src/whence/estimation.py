"""What a fit would take: memory by stage, time by step, and what else there is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from whence.api import LIKELIHOODS, STRUCTURES
from whence.curvature import EKFAC, KFAC, Auto, Core, Diagonal, Exact, Sketch, Structure
from whence.curvature.accumulate import (
    CHUNK_WORKSPACE,
    LayerGradients,
    decomposition_bytes,
    examples_bytes,
    factor_bytes,
    sums_bytes,
    working_precision,
)
from whence.curvature.auto import choose
from whence.curvature.core import primal_bytes
from whence.curvature.exact import Road
from whence.curvature.primal import CACHE_SHARE, QR_SIZE
from whence.data.batches import Batch, Batches, Inputs, batch_size, split, take
from whence.display import count
from whence.errors import InputError
from whence.fitting import check_columns, named
from whence.jacobian.gradients import Block
from whence.jacobian.linearization import Linearization, linearize
from whence.jacobian.network import Choice, Network, select
from whence.likelihoods import Likelihood
from whence.runtime.execution import Execution
from whence.runtime.memory import Budget, readable
from whence.runtime.model_state import check_model, preserved
from whence.runtime.progress import Progress, clock


@dataclass(frozen=True)
class Alternative:
    """Another structure for the same problem.

    Attributes:
        structure: its name.
        memory: bytes at its peak.
        seconds: of its fit.
    """

    structure: str
    memory: float
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """Memory and time of a fit, from sizes and from a small batch that was measured.

    Attributes:
        structure: what would be fitted.
        examples: training examples.
        outputs: of the network.
        parameters: selected weights.
        stages: bytes held at once in each stage of the fit, beside the model and the data.
        bounded: whether the memory is an upper bound, since the structure chooses its size from the data.
        limit: bytes that may be taken.
        steps: seconds of each part of the fit.
        prediction: seconds for a thousand predictions.
        alternatives: the other structures.
        one_layer: whether all selected weights belong to one layer.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 50).unsqueeze(1)
        >>> found = whence.estimate(torch.nn.Linear(1, 1), [(x, 2 * x)])
        >>> found.structure, found.parameters, found.fits
        ('exact (primal road)', 2, True)
    """

    structure: str
    examples: int
    outputs: int
    parameters: int
    stages: Mapping[str, float]
    bounded: bool
    limit: int
    steps: Mapping[str, float]
    prediction: float
    alternatives: tuple[Alternative, ...]
    one_layer: bool = False

    @property
    def memory(self) -> float:
        """Bytes at the peak, beside the model and the data."""
        return max(self.stages.values())

    @property
    def seconds(self) -> float:
        """Of the whole fit."""
        return sum(self.steps.values())

    @property
    def fits(self) -> bool:
        """Whether the peak is within the limit."""
        return self.memory <= self.limit

    def __str__(self) -> str:
        """A few lines."""
        about = "at most " if self.bounded else "about "
        verdict = "fits" if self.fits else "does NOT fit"
        lines = [
            f"{self.structure}: {count(self.examples, 'example')}, {count(self.outputs, 'output')}, "
            f"{count(self.parameters, 'parameter')}",
            f"  memory   {about}{readable(self.memory)}, {verdict} in {readable(self.limit)}",
            *(f"    {stage:<24} {readable(size):>10}" for stage, size in self.stages.items()),
            f"  time     about {duration(self.seconds)}; {duration(self.prediction)} for a thousand predictions",
            *(f"    {step:<24} {duration(spent):>10}" for step, spent in self.steps.items()),
            "  instead",
        ]
        lines += [
            f"    {one.structure:<24} {readable(one.memory):>10}{' ' if one.memory <= self.limit else '!'} "
            f"{duration(one.seconds):>10}"
            for one in self.alternatives
        ]
        if any(one.memory > self.limit for one in self.alternatives):
            lines.append("    ! does not fit")
        if not self.fits:
            fewer = "" if self.one_layer else 'parameters="last_layer", '
            few = "fewer columns (hessian_columns=...), " if self.outputs > 1 else ""
            lines.append(f"  or: {fewer}{few}a smaller chunk_size, fewer examples, a larger max_memory")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """One line."""
        about = "at most" if self.bounded else "about"
        return (
            f"Estimate({self.structure}: {about} {readable(self.memory)} of {readable(self.limit)}, about "
            f"{duration(self.seconds)})"
        )


def duration(seconds: float) -> str:
    """Seconds for people, the small ones too.

    Examples:
        >>> duration(0.012), duration(3.21), duration(125)
        ('12 ms', '3.2 s', '2 min 05 s')
    """
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.0005 else "0 ms"
    return f"{seconds:.1f} s" if seconds < 10 else clock(seconds)


SAMPLE = 32
"""Examples that are run to measure."""


@dataclass(frozen=True)
class ProblemSizes:
    """What memory and time depend on.

    Attributes:
        n: training examples.
        k: outputs.
        q: columns of the roots of the loss's Hessian; 0 for squared error.
        d: selected weights.
        item: bytes of a number of the algebra.
        working: bytes of a number of the gradients.
        batch: examples in the largest batch.
        chunk: examples whose rows are held at once.
        piece: examples whose layers are held at once.
        work: bytes that are computed on the way from the layers of one example.
        layers: bytes of an example's activations and output gradients, all cotangents together.
        graph: bytes that a forward pass keeps for an example.
        blocks: of parameters.
    """

    n: int
    k: int
    q: int
    d: int
    item: int
    working: int
    batch: int
    chunk: int
    piece: int
    work: float
    layers: float
    graph: float
    blocks: tuple[Block, ...]

    @property
    def numbers(self) -> int:
        """Residuals in all, n k."""
        return self.n * self.k


def measure_sizes(problem: Linearization, stream: LayerGradients, first: Inputs, n: int, batch: int) -> ProblemSizes:
    """Sizes of a problem of n examples, from one of a few."""
    roots = problem.hessian_roots
    k = problem.k
    return ProblemSizes(
        n=n,
        k=k,
        q=0 if roots is None else roots.shape[2],
        d=problem.selection.size,
        item=problem.outputs.element_size(),
        working=torch.finfo(working_precision(problem)).bits // 8,
        batch=batch,
        chunk=min(problem.jacobian().chunk(k), batch),
        piece=min(stream.chunk_size(k, batch), batch),
        work=k * stream.sizes.workspace,
        layers=stream.sizes.example(k),
        graph=graph_bytes(problem, first),
        blocks=stream.blocks,
    )


def graph_bytes(problem: Linearization, inputs: Inputs) -> float:
    """Bytes that a forward pass keeps for an example, to be differentiated."""
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    few = take(inputs, slice(0, SAMPLE))
    own = {p.untyped_storage().data_ptr() for p in problem.network.model.parameters()}
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        problem.network(few)
    return sum(size for place, size in held.items() if place not in own) / batch_size(few, "this batch")


def count_examples(batches: Batches) -> tuple[int, int]:
    """Training examples, and examples in the largest batch. Data that know their length are not read."""
    given = batches.loader
    if isinstance(given, DataLoader) and given.batch_size and isinstance(given.dataset, Sized):
        size = len(given.dataset)
        whole = size - size % given.batch_size if given.drop_last else size
        return whole, min(given.batch_size, whole)
    sizes = [batch_size(split(raw, f"batch {at}")[0], f"batch {at}") for at, raw in enumerate(given)]
    return sum(sizes), max(sizes)


Stages = dict[str, float]


def of_examples(sizes: ProblemSizes) -> float:
    """Residuals, leverages and weights of the training examples."""
    return examples_bytes(sizes.n, sizes.k, sizes.q, sizes.item)


def layers_bytes(sizes: ProblemSizes) -> float:
    """A piece of a batch with the gradients of all its layers."""
    return sizes.piece * (CHUNK_WORKSPACE * sizes.layers + sizes.graph + sizes.work)


def rows_bytes(sizes: ProblemSizes) -> float:
    """A chunk of rows of the Jacobian, and the passes that make it."""
    return (
        sizes.chunk * sizes.k * sizes.d * (sizes.working + 2.0 * sizes.item)
        + sizes.chunk * (1.0 + sizes.k) * sizes.graph
    )


def road_of(structure: Exact, sizes: ProblemSizes) -> str:
    """The road that "auto" takes."""
    if structure.road != "auto":
        return structure.road
    return "primal" if sizes.d <= sizes.numbers else "dual"


def core_size(structure: Core | Sketch, sizes: ProblemSizes, limit: float) -> int:
    """Features, at most."""
    if isinstance(structure, Sketch):
        return min(structure.size, sizes.d)
    affordable = int((limit / primal_bytes(1)) ** 0.5)
    return min(structure.size or min(structure.largest, affordable), sizes.d)


def keeps_rows(rows: float, limit: float) -> bool:
    """Whether rows of the training set stay in memory."""
    return rows <= CACHE_SHARE * max(limit, 0.0)


def stages_of(structure: Structure, sizes: ProblemSizes, limit: float) -> tuple[Stages, bool]:
    """Bytes of every stage, and whether they are an upper bound."""
    if isinstance(structure, Exact):
        road = road_of(structure, sizes)
        if road == "matrix_free":
            solves = 8.0 * sizes.chunk * sizes.k * sizes.d * sizes.item
            return {"solves": solves + rows_bytes(sizes) + of_examples(sizes)}, False
        return (_primal if road == "primal" else _dual)(sizes, limit), False
    if isinstance(structure, (Core, Sketch)):
        return _projected(structure, sizes, limit), isinstance(structure, Core)
    return _spectral(structure, sizes), isinstance(structure, EKFAC) and structure.tolerance > 0


def _primal(sizes: ProblemSizes, limit: float) -> Stages:
    square = float(sizes.d) ** 2 * sizes.item
    rows = float(sizes.numbers) * sizes.d * sizes.item
    kept = keeps_rows(rows, limit - 9.0 * square)
    return dense(sizes.d, square, rows if kept else 0.0, sizes, rows_bytes(sizes))


def dense(r: int, square: float, rows: float, sizes: ProblemSizes, passing: float) -> Stages:
    """Stages of the algebra on r features: `rows` bytes of them stay in memory, if any."""
    tall = (sizes.n * (sizes.q or sizes.k) + r) * float(r) * sizes.item
    factor = 2.6 * tall + 3.0 * square if rows and r <= QR_SIZE else 6.0 * square
    examples = of_examples(sizes)
    return {
        "rows and curvature": rows + 2.0 * square + passing,
        "factor": rows + factor,
        "leverages and meats": rows + 7.0 * square + passing + examples,
    }


def _dual(sizes: ProblemSizes, limit: float) -> Stages:
    inner = float(sizes.n * max(sizes.k, sizes.q)) ** 2 * sizes.item
    rows = float(sizes.numbers) * sizes.d * sizes.item
    passing = rows_bytes(sizes)
    kept = keeps_rows(rows, limit - 5.0 * inner)
    assembling = 2.0 * rows if kept else 2.0 * 0.2 * limit
    held = rows if kept else 0.0
    return {
        "rows and kernel": max(assembling, held + passing) + inner,
        "factor and leverages": held + (10.5 if sizes.q else 5.0) * inner + of_examples(sizes),
    }


def _spectral(structure: Structure, sizes: ProblemSizes) -> Stages:
    passing, examples = layers_bytes(sizes), of_examples(sizes)
    sums = sums_bytes(sizes.d, sizes.d, sizes.working)
    if isinstance(structure, Diagonal):
        return {"sums and weights": sums + passing + examples}
    exact = structure.largest_exact if isinstance(structure, (EKFAC, KFAC)) else 0
    factors = factor_bytes(sizes.blocks, exact)[0]
    bases = factors * sizes.working / 8
    if isinstance(structure, EKFAC) and structure.meat == "two_bases" and structure.corner is None:
        bases, sums = 3.0 * bases, sums + 8.0 * 4 * sizes.d
    return {
        "factors": factors + passing,
        "eigenvectors": decomposition_bytes(sizes.blocks, exact),
        "sums and weights": bases + sums + passing + examples,
    }


def _projected(structure: Core | Sketch, sizes: ProblemSizes, limit: float) -> Stages:
    r = core_size(structure, sizes, limit)
    square = float(r) ** 2 * sizes.item
    rows = float(sizes.numbers) * r * sizes.working
    held = rows if keeps_rows(float(sizes.numbers) * r * sizes.item, limit - primal_bytes(r)) else 0.0
    passing = layers_bytes(sizes) + 3.0 * sizes.piece * sizes.k * r * sizes.working
    found: Stages = {}
    if isinstance(structure, Core):
        total = factor_bytes(sizes.blocks, structure.largest_exact)[0]
        bases = total * sizes.working / 8
        found = {
            "factors": total + layers_bytes(sizes),
            "eigenvectors": decomposition_bytes(sizes.blocks, structure.largest_exact),
            "eigenvalues": bases + 10.0 * 8 * sizes.d + layers_bytes(sizes),
        }
    else:
        bases = sum(math.sqrt(block.numel) for block in sizes.blocks) * math.sqrt(r) * sizes.working
    return {**found, **{name: bases + size for name, size in dense(r, square, held, sizes, passing).items()}}


Steps = dict[str, float]

PRODUCT = 384
"""Size of the matrices whose products and eigenvectors are timed."""


@dataclass(frozen=True)
class Speed:
    """What this machine does with this model.

    Attributes:
        reading: seconds to read an example.
        forward: seconds of a forward pass for an example.
        layers: seconds to get the tangents of an example, layer by layer, all outputs.
        rows: seconds to get its rows of the Jacobian.
        algebra: operations a second in the dtype of the algebra.
        working: operations a second in the dtype of the gradients.
        eigen: seconds for eigenvectors, over the cube of the size.
    """

    reading: float
    forward: float
    layers: float
    rows: float
    algebra: float
    working: float
    eigen: float


def measure_speed(problem: Linearization, stream: LayerGradients, inputs: Inputs, reading: float) -> Speed:
    """Run a few examples, and a few products of matrices."""
    few = take(inputs, slice(0, SAMPLE))
    size = batch_size(few, "this batch")
    k, jacobian = problem.k, problem.jacobian()

    def pull() -> None:
        for _, tangents, _ in stream.of(few, 0, stream.identity(), k):
            for tangent in tangents:
                tangent.materialize() if tangent.block.kind == "dense" else None

    def rows() -> None:
        for _ in jacobian.rows(take(few, slice(0, 8)), k):
            pass

    eye = torch.eye(PRODUCT, dtype=torch.float64, device=problem.device)
    other = eye + eye.roll(1, 0) + eye.roll(1, 1)
    return Speed(
        reading=reading,
        forward=clocked(lambda: problem.network(few), problem.device) / size,
        layers=clocked(pull, problem.device) / size,
        rows=clocked(rows, problem.device) / min(size, 8),
        algebra=_rate(other.to(problem.dtype)),
        working=_rate(other.to(working_precision(problem))),
        eigen=clocked(lambda: torch.linalg.eigh(other), problem.device) / PRODUCT**3,
    )


def clocked(work: Callable[[], object], device: torch.device, times: int = 3) -> float:
    """Seconds, the best of a few, after one for warming up."""
    best = float("inf")
    for _ in range(times + 1):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rate(matrix: torch.Tensor) -> float:
    return 2.0 * PRODUCT**3 / clocked(lambda: matrix @ matrix, matrix.device)


def steps_of(structure: Structure, sizes: ProblemSizes, speed: Speed, limit: float) -> tuple[Steps, float]:
    """Seconds of every step of the fit, and for a thousand predictions."""
    outputs = sizes.n * (speed.reading + speed.forward)
    if isinstance(structure, Exact):
        road = road_of(structure, sizes)
        if road == "matrix_free":
            each = 50.0 * sizes.n * (speed.reading + 2.0 * speed.rows)  # a solve takes tens of passes over the data
            return {"outputs": outputs, "solves": sizes.numbers * each / sizes.chunk}, 1000.0 * sizes.k * each
        found, each = (_primal_seconds if road == "primal" else _dual_seconds)(sizes, speed, limit)
    elif isinstance(structure, (Core, Sketch)):
        found, each = _projected_seconds(structure, sizes, speed, limit)
    else:
        found, each = _spectral_seconds(structure, sizes, speed)
    return {"outputs": outputs, **found}, 1000.0 * each


def _passes(count: int, each: float, sizes: ProblemSizes, speed: Speed) -> float:
    return count * sizes.n * (speed.reading + each)


def dense_seconds(r: int, sizes: ProblemSizes, rate: float) -> float:
    """Seconds of the algebra on r features, beside the rows."""
    tall = 2.0 * sizes.numbers * float(r) ** 2
    weighted = (sizes.k + 3.0) / sizes.k
    return (tall * (5.0 + weighted) + 2.0 * float(r) ** 3) / rate


def _primal_seconds(sizes: ProblemSizes, speed: Speed, limit: float) -> tuple[Steps, float]:
    kept = keeps_rows(float(sizes.numbers) * sizes.d * sizes.item, limit - 9.0 * float(sizes.d) ** 2 * sizes.item)
    found = {
        "rows": _passes(1 if kept else 4, speed.rows, sizes, speed),
        "algebra": dense_seconds(sizes.d, sizes, speed.algebra),
    }
    return found, speed.rows + speed.forward + 12.0 * sizes.k * float(sizes.d) ** 2 / speed.algebra


def _dual_seconds(sizes: ProblemSizes, speed: Speed, limit: float) -> tuple[Steps, float]:
    inner = float(sizes.n * max(sizes.k, sizes.q))
    kept = keeps_rows(float(sizes.numbers) * sizes.d * sizes.item, limit - 5.0 * inner**2 * sizes.item)
    blocks = 1.0 if kept else max(1.0, sizes.numbers * sizes.d * sizes.item / (0.2 * limit))
    found = {
        "rows": _passes(1, speed.rows, sizes, speed) * (1.0 if kept else 1.0 + blocks),
        "kernel": 2.0 * sizes.numbers**2 * sizes.d / speed.algebra,
        "algebra": (3.0 if not sizes.q else 8.0) * inner**3 / speed.algebra,
    }
    reading = 0.0 if kept else sizes.n * (speed.rows + speed.reading) / 100.0  # a pass for a hundred predictions or so
    each = 2.0 * sizes.k * sizes.numbers * (sizes.d + 2.0 * inner) / speed.algebra
    return found, speed.rows + speed.forward + reading + each


def _rotations(sizes: ProblemSizes) -> float:
    """Operations to bring the tangents of an example into a basis."""
    total = 0.0
    for block in sizes.blocks:
        if block.kind == "kronecker":
            e, o, i = block.matrix_shape
            total += 2.0 * e * (i * i + sizes.k * o * o)
    return total


def _spectral_seconds(structure: Structure, sizes: ProblemSizes, speed: Speed) -> tuple[Steps, float]:
    turned = 0.0 if isinstance(structure, Diagonal) else _rotations(sizes)
    squares = 2.0 * sizes.k * sizes.d
    exact = structure.largest_exact if isinstance(structure, (EKFAC, KFAC)) else 0
    found: Steps = {}
    if not isinstance(structure, Diagonal):
        found["factors"] = _passes(1, speed.layers, sizes, speed) + sizes.n * turned / speed.working
        found["eigenvectors"] = _decomposing(sizes, exact, speed)
    for name, sets in (("eigenvalues", 2.0), ("leverages and meats", 1.0 + 3.0 / sizes.k)):
        work = sizes.n * (turned + sets * squares) / speed.working
        found[name] = _passes(1, speed.layers, sizes, speed) + work
    return found, speed.layers + (turned + 7.0 * squares) / speed.working


def _decomposing(sizes: ProblemSizes, exact: int, speed: Speed) -> float:
    each = []
    for block in sizes.blocks:
        shape = block.matrix_shape
        if block.kind == "kronecker":
            each += [shape[0] * float(shape[1]) ** 3, shape[0] * float(shape[2]) ** 3]
        elif block.kind == "rows" or block.numel <= exact:
            each.append(float(shape[-1]) ** 3)
    return speed.eigen * sum(each)


def _projected_seconds(
    structure: Core | Sketch, sizes: ProblemSizes, speed: Speed, limit: float
) -> tuple[Steps, float]:
    r = core_size(structure, sizes, limit)
    turned = _rotations(sizes)
    rows = speed.layers + (turned + 2.0 * sizes.k * sizes.d) / speed.working
    kept = keeps_rows(float(sizes.numbers) * r * sizes.item, limit - primal_bytes(r))
    found: Steps = {}
    if isinstance(structure, Core):
        found["factors"] = _passes(1, speed.layers, sizes, speed) + sizes.n * turned / speed.working
        found["eigenvectors"] = _decomposing(sizes, structure.largest_exact, speed)
        found["eigenvalues"] = _passes(1, rows, sizes, speed)
    found["rows"] = _passes(1 if kept else 4, rows, sizes, speed)
    found["algebra"] = dense_seconds(r, sizes, speed.algebra)
    return found, rows + 12.0 * sizes.k * float(r) ** 2 / speed.algebra


KNOWN = (Auto, Exact, EKFAC, KFAC, Diagonal, Core, Sketch)


def estimate(
    model: nn.Module,
    train_loader: Iterable[Any],
    likelihood: str | Likelihood = "gaussian",
    structure: str | Structure = "auto",
    parameters: Choice = "all",
    *,
    hessian_columns: Literal["auto", "all"] | int = "auto",
    execution: Execution | None = None,
) -> Estimate:
    """Tell what memory and time `whence.fit` would take, without fitting.

    A few examples of the first batch are run to measure; everything else is counted. The data are not read beyond that
    where their loader knows how many there are. Memory is that of the fit, beside the model and the data; structures
    that choose their size from the data (EKFAC with a tolerance, the core) are told at their largest. Times are good to
    a factor of two or three, on a machine with nothing else to do.

    Args:
        model: as for `whence.fit`.
        train_loader: as for `whence.fit`.
        likelihood: as for `whence.fit`.
        structure: as for `whence.fit`; the others are told beside it.
        parameters: as for `whence.fit`.
        hessian_columns: as for `whence.fit`.
        execution: as for `whence.fit`.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
        >>> net = torch.nn.Linear(1, 1, dtype=torch.float64)
        >>> found = whence.estimate(net, [(x, 2 * x + 1)], execution=whence.Execution(max_memory=2**30))
        >>> found.fits, found.examples, found.parameters
        (True, 20, 2)
    """
    loss: Likelihood = named(likelihood, LIKELIHOODS, Likelihood, "likelihood")
    chosen: Structure = named(structure, STRUCTURES, Structure, "structure")
    if not isinstance(chosen, KNOWN):
        raise InputError(
            f"expected a structure of whence itself, got {type(chosen).__name__}, whose needs only its author knows."
        )
    execution = execution or Execution()
    columns = check_columns(hessian_columns)
    check_model(model)
    with preserved(model):
        network = Network(model)
        quiet = Progress(enabled=False)
        batches = Batches(train_loader, network.device, quiet)
        start = time.perf_counter()
        first = next(batches.read(None))
        reading = (time.perf_counter() - start) / first.size
        selection = select(model, parameters, lambda: network.last_module(first.inputs))
        small = linearize(
            network,
            selection,
            Batches([_few(first)], network.device, quiet),
            loss,
            dtype=execution.dtype,
            budget=Budget(network.device, execution.max_memory),
            progress=quiet,
            chunk_size=execution.chunk_size,
            columns=columns,
        )
        n, batch = count_examples(batches)
        stream = LayerGradients(small)
        seen = next(iter(small.batches)).inputs  # with the mixtures that are looked at, where not all outputs are
        sizes = measure_sizes(small, stream, first.inputs, n, batch)
        return _estimate(chosen, small, sizes, measure_speed(small, stream, seen, reading))


def _few(first: Batch) -> tuple[Any, ...]:
    few = slice(0, SAMPLE)
    pair = take(first.inputs, few), first.targets[few]
    return pair if first.weights is None else (*pair, first.weights[few])


def _estimate(chosen: Structure, problem: Linearization, sizes: ProblemSizes, speed: Speed) -> Estimate:
    limit = problem.budget.limit
    if isinstance(chosen, Auto):

        def memory(road: Road) -> float:
            return max(stages_of(Exact(road), sizes, limit)[0].values())

        chosen, _ = choose(sizes.numbers, sizes.d, memory, limit, problem.device)
    stages, bounded = stages_of(chosen, sizes, limit)
    steps, prediction = steps_of(chosen, sizes, speed, limit)
    return Estimate(
        structure=_name(chosen, sizes),
        examples=sizes.n,
        outputs=problem.width,
        parameters=sizes.d,
        stages=stages,
        bounded=bounded,
        limit=limit,
        steps=steps,
        prediction=prediction,
        alternatives=tuple(_alternatives(chosen, sizes, speed, limit)),
        one_layer=problem.selection.one_layer,
    )


def _alternatives(chosen: Structure, sizes: ProblemSizes, speed: Speed, limit: int) -> Iterable[Alternative]:
    others: tuple[Structure, ...] = (Exact("primal"), Exact("dual"), Core(), EKFAC(), Sketch(), KFAC(), Diagonal())
    here = _name(chosen, sizes)
    for other in others:
        name = _name(other, sizes)
        if name != here:
            stages, _ = stages_of(other, sizes, limit)
            seconds = sum(steps_of(other, sizes, speed, limit)[0].values())
            yield Alternative(name, max(stages.values()), seconds)


def _name(structure: Structure, sizes: ProblemSizes) -> str:
    if isinstance(structure, Exact):
        return f"exact ({road_of(structure, sizes).replace('_', '-')} road)"
    return structure.name
