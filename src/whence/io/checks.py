"""Whether objects that were read from a file belong together, beyond the types and shapes of their fields."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from whence.curvature import FittedCurvature, Meats, NewtonStep
from whence.curvature.accumulate import LayerGradients, working_precision
from whence.curvature.aligned import FittedIterative
from whence.curvature.primal import FittedPrimal, Projected
from whence.curvature.rotation import Basis, Weights
from whence.curvature.spectral import FittedSpectral
from whence.curvature.two_bases import TwoBasisWeights
from whence.estimators import LeaveOneOut
from whence.io.objects import Reader
from whence.jacobian.gradients import Block
from whence.jacobian.linearization import Linearization
from whence.likelihoods import Bernoulli, Categorical


def check_problem(reader: Reader, problem: Linearization) -> None:
    """Check chunks, positions and sampled labels."""
    n, k, units, sketch, roots = problem.n, problem.k, problem.units, problem.sketch, problem.hessian_roots
    reader.sizes |= {"nk": n * k, "nq": n * roots.shape[2]}
    reader.require(problem.chunk_size is None or problem.chunk_size > 0, "chunk_size", "a number of examples")
    known = isinstance(problem.likelihood, (Bernoulli, Categorical)) and sketch is None
    reader.require(problem.class_targets is not None or not known, "class_targets", "there for classes")
    whole = min(units.shape, default=1) > 0 and (sketch is not None or units.positions * units.width == k)
    reader.require(whole, "units", f"positions of {k} outputs")
    reader.check("units.weights", units.weights, n, units.positions)
    reader.require((sketch is None) == (problem.gram is None), "gram", "there for a fit of some columns alone")
    reader.check("gram", problem.gram, n, k, k)
    if sketch is not None:
        reader.require(sketch.labels is not None and sketch.columns + 1 == k, "sketch", f"one of {k - 1} columns")
        classes = sketch.labels.classes  # type: ignore[union-attr]  # required above
        reader.check("classes", classes, "n", "s", sketch.columns, dtype=torch.int32)
        known = bool(((classes >= -1) & (classes < sketch.width)).all())
        reader.require(known, "classes", f"classes below {sketch.width}, or -1")


def check_fields(
    reader: Reader,
    meats: Meats,
    loo: LeaveOneOut,
    step: NewtonStep,
    sigma: Tensor,
    held_out: Tensor | None,
    **_: object,
) -> None:
    """Check the units that are left out, the noise and the step."""
    problem, groups, roots = loo.problem, loo.groups, meats.roots["ho"]
    width = problem.width if problem.sketch is None else 1
    reader.check("sigma", sigma, width, width)
    reader.check("noise_roots", roots, 1 if len(roots) == 1 else "n", "k", "columns")
    reader.require((step.direction is not None) == loo.recenter, "step.direction", "there for a recentered fit alone")
    reader.require(held_out is None or held_out.shape == (problem.n,), "held_out", f"{problem.n} errors")
    if groups is not None:
        reader.require(2 <= groups.counted <= groups.total, "groups", "two groups or more")
        _check_index(reader, "groups", groups.index, groups.total, "n")


def _check_index(reader: Reader, name: str, index: Tensor, below: int, axis: str | int) -> None:
    reader.check(name, index, axis, dtype=torch.int64)
    reader.require(bool(((index >= 0) & (index < below)).all()), name, f"positions below {below}")


def check_curvature(reader: Reader, bread: FittedCurvature, sandwich: Any, meats: Meats) -> None:
    """Check a curvature, and that its sandwich has all estimators."""
    reader.require(bread.ridge >= 0 and math.isfinite(bread.ridge), "ridge", "a number not below zero")
    if isinstance(bread, FittedPrimal):
        if isinstance(bread.features, Projected):
            _check_features(reader, bread.features)
        reader.require(bread.features.size == reader.sizes["r"], "features", "as many as directions")
        reader.require(sandwich.matrices.keys() == meats.roots.keys(), "matrices", " and ".join(meats.roots))
    elif isinstance(bread, FittedIterative):
        reader.require(0 <= bread.tolerance <= 1 <= bread.iterations, "tolerance", "at most one")
    elif isinstance(bread, FittedSpectral):
        estimators = sorted([*meats.roots, "jackknife", "laplace"])
        reader.require(sorted(sandwich.names) == estimators, "names", "those of this version")
        _check_blocks(reader, bread.gradients)
        each = zip(bread.gradients.blocks, bread.blocks, sandwich.weights, bread.step, strict=True)
        for block, spectrum, weights, step in each:
            basis = spectrum.basis
            _check_basis(reader, basis, block)
            whole = block.kind == "rows" or (block.kind == "dense" and weights.rounded)
            reader.require(not (whole and basis.missing), "basis", "one that spans the block")
            _check_weights(reader, weights, basis, spectrum.rotation, len(sandwich.names))
            for moments in (spectrum.curvature, spectrum.noise):
                reader.check("spectrum", moments.inside, *basis.shape, dtype=torch.float64)
            for matrix in (spectrum.score, step):
                reader.check("step", matrix, *block.matrix_shape, dtype=torch.float64)


def _check_features(reader: Reader, features: Projected) -> None:
    _check_blocks(reader, features.gradients)
    for block, basis, index in zip(features.gradients.blocks, features.bases, features.indices, strict=True):
        _check_basis(reader, basis, block)
        _check_index(reader, "indices", index, math.prod(basis.shape), len(index))


def _check_blocks(reader: Reader, gradients: LayerGradients) -> None:
    """Check that blocks have forms that the parameters of the model can have."""
    parameters = gradients.problem.selection.parameters
    names = [name for block in gradients.blocks for name in block.parameters]
    reader.require(sorted(names) == sorted(parameters), "blocks", "all selected parameters")
    for block in gradients.blocks:
        shapes = tuple(tuple(parameters[name].shape) for name in block.parameters)
        most = {"kronecker": 2, "rows": 1, "dense": len(names)}[block.kind]
        fine = block.shapes == shapes and 1 <= len(shapes) <= most
        if block.kind != "dense":
            fine = fine and len(shapes[0]) > 0 and block.groups > 0 and shapes[0][0] % block.groups == 0
        fine = fine and math.prod(block.matrix_shape) == block.numel
        reader.require(fine, "blocks", f"a form that parameters of shapes {shapes} can take")


def _check_basis(reader: Reader, basis: Basis, block: Block) -> None:
    """Check that a basis is the identity, or has as many columns as rows or fewer."""
    shape, working = block.matrix_shape, working_precision(reader.live[Linearization])
    sides = {"inputs": shape[-1], "outputs": shape[-2]} if block.kind == "kronecker" else {"inputs": shape[-1]}
    there = [name for name in ("inputs", "outputs") if getattr(basis, name) is not None]
    reader.require(basis.block == block and there in ([], list(sides)), "basis", f"one of a {block.kind} block")
    for name in there:
        columns = getattr(basis, name).shape[-1]
        reader.check(name, getattr(basis, name), *shape[:-2], sides[name], columns, dtype=working)
        reader.require(1 <= columns <= sides[name], name, "a basis with as many columns as rows, or fewer")


def _check_weights(reader: Reader, weights: Weights, basis: Basis, rotation: Basis | None, estimators: int) -> None:
    working = working_precision(reader.live[Linearization])
    two = isinstance(weights, TwoBasisWeights)
    reader.require(weights.basis is basis and two == (rotation is not None), "weights", "those of the basis")
    reader.check("weights.inside", weights.inside, estimators, *basis.shape, dtype=working)
    reader.check("weights.outside", weights.outside, estimators, 1, 1, 1, dtype=working)
    if isinstance(weights, TwoBasisWeights):
        turned, kind = weights.rotation, basis.block.kind
        fine = turned is rotation and turned.block == basis.block and kind != "rows"
        reader.require(fine and len(turned.tensors) == 1 + (kind == "kronecker"), "rotation", f"one of a {kind} block")
        for matrix in turned.tensors:
            reader.check("rotation", matrix, *basis.shape[:-2], matrix.shape[-1], matrix.shape[-1], dtype=working)
        shape = turned.shape
        fine = all(mine <= whole for mine, whole in zip(shape, basis.shape, strict=True))
        reader.require(fine, "rotation", f"one of a part of {basis.shape}")
        which = [at for at in {*weights.which} if 0 <= at < estimators]
        reader.require(len(which) == len(weights.which), "which", "estimators")
        reader.check("weights.solved", weights.solved, *shape, dtype=working)
        reader.check("weights.meats", weights.meats, len(which), *shape[:-2], *reversed(shape[-2:]), dtype=working)
