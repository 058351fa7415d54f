"""Curvatures layer by layer: blocks, bases, spectra, weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from whence.curvature import FittedCurvature, Meats, Sandwich
from whence.curvature.accumulate import Features, LayerGradients, LayerSizes, TrainingRows
from whence.curvature.base import AlignmentSandwich, RidgePath
from whence.curvature.dual import FittedDual
from whence.curvature.iterative import FittedIterative, IterativeSolver
from whence.curvature.kronecker import DiagonalMoments, Spectrum
from whence.curvature.primal import FittedPrimal, PrimalSandwich, Projected, Whitening
from whence.curvature.rotation import Basis, Weights
from whence.curvature.spectral import FittedSpectral, SpectralSandwich
from whence.curvature.two_bases import MeatRotation, TwoBasisWeights
from whence.errors import InputError
from whence.io.files import Draft, Saved
from whence.io.problem import Given, read_budget
from whence.jacobian.gradients import Block
from whence.jacobian.jacobian import Jacobian
from whence.jacobian.linearization import Linearization


def write_stream(draft: Draft, stream: LayerGradients) -> None:
    """What the capture found out about the model."""
    sizes = stream.sizes
    each = {"activations": sizes.activations, "gradients": sizes.gradients, "workspace": sizes.workspace}
    draft.note(**each, notes=list(stream.notes), blocks=len(sizes.blocks))
    for at, block in enumerate(sizes.blocks):
        draft.part(f"layer_{at}").note(
            name=block.name,
            parameters=list(block.parameters),
            shapes=[list(shape) for shape in block.shapes],
            kind=block.kind,
            groups=block.groups,
            transposed=block.transposed,
        )


def read_stream(saved: Saved, problem: Linearization) -> LayerGradients:
    """A stream that knows what the first capture found, and is proved on the training data where they are given."""
    count = saved.whole("blocks", 1, len(problem.selection.parameters))
    blocks = tuple(_read_block(saved.part(f"layer_{at}"), problem) for at in range(count))
    if sorted(name for block in blocks for name in block.parameters) != sorted(problem.selection.parameters):
        raise saved.wrong("blocks", "all selected parameters")
    each = (saved.number(name, 0.0) for name in ("activations", "gradients", "workspace"))
    stream = LayerGradients(problem, LayerSizes(blocks, *each))
    stream.notes = saved.texts("notes")
    return stream


def _read_block(saved: Saved, problem: Linearization) -> Block:
    names = saved.texts("parameters")
    parameters = problem.selection.parameters
    if not names or any(name not in parameters for name in names):
        raise saved.wrong("parameters", "names of selected parameters")
    shapes = tuple(tuple(parameters[name].shape) for name in names)
    if saved.fields.get("shapes") != [list(shape) for shape in shapes]:
        raise saved.wrong("shapes", f"the model's, {shapes}")
    kind: Any = saved.text("kind", "kronecker", "rows", "dense")
    groups, transposed = saved.whole("groups", 1), saved.flag("transposed")
    fits = len(names) == 1 or (kind == "kronecker" and len(names) == 2) or kind == "dense"
    if not fits or (kind != "dense" and (not shapes[0] or shapes[0][0] % groups)):
        raise saved.wrong("kind", f"a form that parameters of shapes {shapes} can take")
    block = Block(saved.text("name"), tuple(names), shapes, kind, groups, transposed)
    if math.prod(block.matrix_shape) != block.numel:
        raise saved.wrong("kind", f"a form that parameters of shapes {shapes} can take")
    return block


def write_basis(draft: Draft, basis: Basis) -> None:
    """Both sides, where they are not the identity."""
    draft.put("inputs", basis.inputs)
    draft.put("outputs", basis.outputs)


def read_basis(saved: Saved, block: Block) -> Basis:
    """The same, put together again."""
    full = block.matrix_shape
    inputs = outputs = None
    if saved.has("inputs"):
        lead = full[:1] if block.kind == "kronecker" else ()
        columns = saved.sizes("inputs", len(lead) + 2)[-1]
        inputs = saved.working("inputs", *lead, full[-1], _at_most(saved, columns, full[-1]))
    if saved.has("outputs"):
        lead, size = (full[:1], full[1]) if block.kind == "kronecker" else ((1,), full[-1])
        columns = saved.sizes("outputs", 3)[-1]
        outputs = saved.working("outputs", *lead, size, _at_most(saved, columns, size))
    odd = (block.kind == "rows" and inputs is not None) or (block.kind == "dense" and outputs is not None)
    if odd or (block.kind == "kronecker" and (inputs is None) != (outputs is None)):
        raise saved.wrong("inputs", f"a basis of a {block.kind} block")
    return Basis(block, inputs, outputs)


def _at_most(saved: Saved, columns: int, rows: int) -> int:
    if not 1 <= columns <= rows:
        raise saved.wrong("inputs", "a basis with as many columns as rows, or fewer")
    return columns


def write_squares(draft: Draft, name: str, squares: DiagonalMoments) -> None:
    """Sums of squares, inside and outside of the basis."""
    draft.put(name, squares.inside)
    draft.note(**{f"{name}_outside": squares.outside})


def read_squares(saved: Saved, name: str, basis: Basis) -> DiagonalMoments:
    """The same, put together again."""
    return DiagonalMoments(saved.double(name, *basis.shape), saved.number(f"{name}_outside", 0.0))


def write_turn(draft: Draft, turn: MeatRotation) -> None:
    """A basis of the meats, and the rotation to it."""
    write_basis(draft.part("basis"), turn.basis)
    draft.put("inputs", turn.inputs)
    draft.put("outputs", turn.outputs)


def read_turn(saved: Saved, basis: Basis) -> MeatRotation:
    """The same, put together again: leading coordinates of `basis`, as many as the rotation has."""
    turned = read_basis(saved.part("basis"), basis.block)
    shape = turned.shape
    if any(mine > whole for mine, whole in zip(shape, basis.shape, strict=True)) or turned.inputs is None:
        raise saved.wrong("basis", f"a part of {basis.shape}")
    if turned.outputs is None:
        return MeatRotation(turned, saved.working("inputs", shape[-1], shape[-1]), None)
    e, o, i = shape
    return MeatRotation(turned, saved.working("inputs", e, i, i), saved.working("outputs", e, o, o))


def write_weights(draft: Draft, weights: Weights) -> None:
    """Weights of the directions in each estimator."""
    draft.put("inside", weights.inside)
    draft.put("outside", weights.outside)
    draft.note(rounded=weights.rounded)
    if isinstance(weights, TwoBasisWeights):
        draft.note(which=list(weights.which))
        draft.put("solved", weights.solved)
        draft.put("meats", weights.meats)


def read_weights(saved: Saved, basis: Basis, turn: MeatRotation | None, count: int) -> Weights:
    """The same, put together again, for `count` estimators."""
    inside = saved.working("inside", count, *basis.shape)
    plain = Weights(basis, inside, saved.working("outside", count, 1, 1, 1), saved.flag("rounded"))
    if turn is None:
        return plain
    which = saved.wholes("which", 0, count - 1)
    if len(set(which)) != len(which):
        raise saved.wrong("which", "estimators")
    shape = turn.basis.shape
    flipped = shape if turn.outputs is None else (shape[0], shape[2], shape[1])
    solved, meats = saved.working("solved", *turn.shape), saved.working("meats", len(which), *flipped)
    return TwoBasisWeights(basis, inside, plain.outside, plain.rounded, turn, which, solved, meats)


def rounded(weights: Weights, device: torch.device, tf32: bool) -> bool:
    """Whether products may be rounded on this device: weights made for exact products do not bear it."""
    return tf32 and (device.type != "cuda" or weights.rounded or not weights.basis.outside)


def write_bread(draft: Draft, bread: Any) -> None:
    """What every curvature has."""
    draft.note(
        ridge=bread.ridge,
        freedom=bread.degrees_of_freedom,
        notes=list(bread.notes),
        tf32=bread.tf32,
        limit=bread.problem.budget.limit,
    )
    draft.put("leverage_blocks", bread.leverage_blocks)
    if bread.path is not None:
        draft.put("path_ridges", bread.path.ridges)
        draft.put("path_errors", bread.path.errors)


def read_bread(saved: Saved, problem: Linearization, given: Given) -> dict[str, Any]:
    """What every curvature has, by the names of its fields."""
    path = None
    if saved.has("path_ridges"):
        sizes = saved.sizes("path_ridges", 1)
        path = RidgePath(_path(saved, "path_ridges", sizes), _path(saved, "path_errors", sizes))
    return {
        "problem": replace(problem, budget=read_budget(saved, given, problem.device)),
        "ridge": saved.number("ridge", 0.0),
        "degrees_of_freedom": saved.number("freedom", 0.0),
        "notes": saved.texts("notes"),
        "tf32": saved.flag("tf32"),
        "leverage_blocks": saved.algebra("leverage_blocks", problem.n, problem.k, problem.k),
        "path": path,
    }


def _path(saved: Saved, name: str, sizes: tuple[int, ...]) -> Tensor:
    dtype = saved.container.entries[saved.name + name].dtype if saved.has(name) else torch.float64
    return saved.tensor(name, sizes, dtype, dtype)


def write_primal(draft: Draft, bread: FittedPrimal, sandwich: PrimalSandwich) -> None:
    """Features, factor, and meats in whitened coordinates."""
    write_bread(draft, bread)
    write_features(draft.part("features"), bread.features)
    draft.put("scale", bread.whiten.scale)
    draft.put("inverse", bread.whiten.inverse)
    draft.put("step", bread.step)
    draft.put("change", bread.change)
    draft.note(meats=list(sandwich.matrices))
    for name, matrix in sandwich.matrices.items():
        draft.put(f"meat_{name}", matrix)
    draft.put("total", sandwich.total)


def read_primal(saved: Saved, problem: Linearization, meats: Meats, given: Given) -> tuple[FittedCurvature, Sandwich]:
    """The same, put together again."""
    common = read_bread(saved, problem, given)
    features = read_features(saved.part("features"), common["problem"], common["notes"])
    size = features.size
    bread = FittedPrimal(
        **{**common, "notes": features.notes},
        features=features,
        rows=TrainingRows(common["problem"], features),
        whiten=Whitening(saved.algebra("scale", size), saved.algebra("inverse", size, size)),
        step=saved.algebra("step", size),
        change=saved.algebra("change", problem.n, problem.k),
    )
    names = saved.texts("meats")
    if names != list(meats.roots):
        raise saved.wrong("meats", " and ".join(meats.roots))
    matrices = {name: saved.algebra(f"meat_{name}", size, size) for name in names}
    return bread, PrimalSandwich(bread, matrices, saved.algebra("total", size))


def write_dual(draft: Draft, bread: FittedDual, sandwich: AlignmentSandwich) -> None:
    """The kernel and its factor."""
    write_bread(draft, bread)
    _check_features(bread.features, Jacobian)
    for name in ("kernel", "inner_weights", "factor"):
        draft.put(name, getattr(bread, name))


def read_dual(saved: Saved, problem: Linearization, meats: Meats, given: Given) -> tuple[FittedCurvature, Sandwich]:
    """The same, put together again. Predictions read the training data."""
    common = read_bread(saved, problem, given)
    features = _jacobian(common["problem"], common["notes"])
    size = problem.n * problem.k
    roots = problem.hessian_roots
    inner = size if roots is None else problem.n * roots.shape[2]
    bread = FittedDual(
        **common,
        features=features,
        rows=TrainingRows(common["problem"], features),
        kernel=saved.algebra("kernel", size, size),
        factor=saved.algebra("factor", inner, inner),
        inner_weights=saved.algebra("inner_weights", problem.n, problem.k),
    )
    return bread, AlignmentSandwich(bread, meats)


def write_free(draft: Draft, bread: FittedIterative, sandwich: AlignmentSandwich) -> None:
    """How solves stop."""
    write_bread(draft, bread)
    draft.note(tolerance=bread.solver.tolerance, iterations=bread.solver.iterations, worst=bread.worst)


def read_free(saved: Saved, problem: Linearization, meats: Meats, given: Given) -> tuple[FittedCurvature, Sandwich]:
    """The same, put together again. Predictions read the training data."""
    common = read_bread(saved, problem, given)
    jacobian = _jacobian(common["problem"], common["notes"])
    tolerance = max(saved.number("tolerance", 0.0, 1.0), 4 * jacobian.precision)
    iterations = saved.whole("iterations", 1)
    solver = IterativeSolver(common["problem"], jacobian, common["ridge"], tolerance, iterations)
    bread = FittedIterative(**common, solver=solver, worst=saved.number("worst", 0.0))
    return bread, AlignmentSandwich(bread, meats)


def write_features(draft: Draft, features: Features) -> None:
    """The tangents themselves, or chosen coordinates of them."""
    _check_features(features, Jacobian, Projected)
    draft.note(kind="projected" if isinstance(features, Projected) else "tangents")
    if not isinstance(features, Projected):
        return
    draft.note(orthonormal=features.orthonormal)
    write_stream(draft, features.stream)
    for at, (basis, index) in enumerate(zip(features.bases, features.indices, strict=True)):
        part = draft.part(f"block_{at}")
        write_basis(part, basis)
        part.put("index", index)
    draft.put("sizes", features.sizes)


def read_features(saved: Saved, problem: Linearization, notes: list[str]) -> Features:
    """The same, put together again."""
    if saved.text("kind", "projected", "tangents") == "tangents":
        return _jacobian(problem, notes)
    stream = read_stream(saved, problem)
    bases, indices = [], []
    for at, block in enumerate(stream.blocks):
        part = saved.part(f"block_{at}")
        basis = read_basis(part, block)
        index = part.tensor("index", part.sizes("index", 1), torch.int64, torch.int64)
        most = block.numel - basis.outside
        if not saved.target.empty and bool(((index < 0) | (index >= most)).any()):
            raise part.wrong("index", f"positions below {most}")
        bases.append(basis)
        indices.append(index)
    count = sum(len(index) for index in indices)
    sizes = saved.double("sizes", count) if saved.has("sizes") else None
    return Projected(stream, bases, indices, sizes, notes, saved.flag("orthonormal"))


def _jacobian(problem: Linearization, notes: list[str]) -> Jacobian:
    found = problem.jacobian()
    found.notes = notes
    return found


def _check_features(features: Features, *known: type) -> None:
    if type(features) not in known:
        raise InputError(f"expected features of whence itself to save, got {type(features).__name__}. Fit again.")


def write_spectral(draft: Draft, bread: FittedSpectral, sandwich: SpectralSandwich) -> None:
    """Bases, spectra and weights, block by block; a block is called by its place among those of all processes."""
    write_bread(draft, bread)
    write_stream(draft.part("stream"), bread.stream)
    draft.note(estimators=list(sandwich.names))
    draft.put("noise", bread.noise)
    draft.put("change", bread.change)
    for at, (basis, turn) in enumerate(zip(bread.bases, bread.rotations, strict=True)):
        part = draft.part(f"block_{bread.stream.blocks.index(basis.block)}")
        write_basis(part.part("basis"), basis)
        write_squares(part, "curvature", bread.spectrum.curvature[at])
        write_squares(part, "noise", bread.spectrum.noise[at])
        part.put("score", bread.spectrum.score[at])
        part.put("step", bread.step[at])
        part.note(turned=turn is not None)
        if turn is not None:
            write_turn(part.part("turn"), turn)
        write_weights(part.part("weights"), sandwich.weights[at])


def read_spectral(saved: Saved, problem: Linearization, meats: Meats, given: Given) -> tuple[FittedCurvature, Sandwich]:
    """The same, put together again."""
    common = read_bread(saved, problem, given)
    stream = read_stream(saved.part("stream"), common["problem"])
    names = saved.texts("estimators")
    if sorted(names) != sorted([*meats.roots, "jackknife", "laplace"]):
        raise saved.wrong("estimators", "those of this version")
    parts = [saved.part(f"block_{at}") for at in range(len(stream.blocks))]
    bases = [read_basis(part.part("basis"), block) for part, block in zip(parts, stream.blocks, strict=True)]
    pairs = list(zip(parts, bases, strict=True))
    turns = [read_turn(part.part("turn"), basis) if part.flag("turned") else None for part, basis in pairs]
    weights = [
        read_weights(part.part("weights"), basis, turn, len(names))
        for (part, basis), turn in zip(pairs, turns, strict=True)
    ]
    common |= {
        "tf32": all(rounded(one, problem.device, common["tf32"]) for one in weights),
        "stream": stream,
        "bases": bases,
        "spectrum": Spectrum(
            [read_squares(part, "curvature", basis) for part, basis in pairs],
            [read_squares(part, "noise", basis) for part, basis in pairs],
            [part.double("score", *basis.block.matrix_shape) for part, basis in pairs],
        ),
        "noise": saved.algebra("noise", problem.k, problem.k),
        "step": [part.double("step", *basis.block.matrix_shape) for part, basis in pairs],
        "change": saved.algebra("change", problem.n, problem.k),
    }
    bread = FittedSpectral(**common, rotations=turns)
    return bread, SpectralSandwich(bread, tuple(names), weights)
