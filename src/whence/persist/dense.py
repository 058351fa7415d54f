"""Curvatures of the exact algebra: on matrices of features, on the kernel, and without a matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from whence.curvature import Bread, Meats, Sandwich
from whence.curvature.base import RidgePath
from whence.curvature.dual import DualBread, DualSandwich
from whence.curvature.features import Features, TrainingRows
from whence.curvature.kronecker.projected import Projected
from whence.curvature.matrix_free import MatrixFreeBread, MatrixFreeSandwich
from whence.curvature.primal import PrimalBread, PrimalSandwich
from whence.errors import InputError
from whence.tangents.jacobian import Jacobian
from whence.tangents.linearization import Linearization

from .layers import read_basis, read_stream, write_basis, write_stream
from .problem import Given, read_budget
from .record import Draft, Saved


def write_bread(draft: Draft, bread: Any) -> None:
    """What every curvature has."""
    draft.note(
        ridge=bread.ridge,
        freedom=bread.degrees_of_freedom,
        facts=list(bread.facts),
        tf32=bread.tf32,
        limit=bread.problem.budget.limit,
    )
    draft.put("hats", bread.hats)
    if bread.path is not None:
        draft.put("path_ridges", bread.path.ridges)
        draft.put("path_errors", bread.path.errors)


def read_bread(saved: Saved, bread: Any, problem: Linearization, given: Given) -> None:
    """Put back what every curvature has."""
    bread.problem = replace(problem, budget=read_budget(saved, given, problem.device))
    bread.ridge = saved.number("ridge", 0.0)
    bread.degrees_of_freedom = saved.number("freedom", 0.0)
    bread.facts = saved.texts("facts")
    bread.tf32 = saved.flag("tf32")
    bread.hats = saved.algebra("hats", problem.n, problem.k, problem.k)
    bread.path = None
    if saved.has("path_ridges"):
        sizes = saved.sizes("path_ridges", 1)
        bread.path = RidgePath(_path(saved, "path_ridges", sizes), _path(saved, "path_errors", sizes))


def _path(saved: Saved, name: str, sizes: tuple[int, ...]) -> Tensor:
    dtype = saved.container.entries[saved.name + name].dtype if saved.has(name) else torch.float64
    return saved.tensor(name, sizes, dtype, dtype)


def write_primal(draft: Draft, bread: PrimalBread, sandwich: PrimalSandwich) -> None:
    """Features, factor, and meats in whitened coordinates."""
    write_bread(draft, bread)
    write_features(draft.part("features"), bread.features)
    for name in ("scale", "inverse", "step"):
        draft.put(name, getattr(bread, name))
    draft.put("change", bread._change)
    draft.note(meats=list(sandwich.matrices))
    for name, matrix in sandwich.matrices.items():
        draft.put(f"meat_{name}", matrix)
    draft.put("total", sandwich.total)


def read_primal(saved: Saved, problem: Linearization, meats: Meats, given: Given) -> tuple[Bread, Sandwich]:
    """The same, put together again."""
    bread = PrimalBread.__new__(PrimalBread)
    read_bread(saved, bread, problem, given)
    bread.features = read_features(saved.part("features"), bread.problem, bread.facts)
    bread.facts = bread.features.notes
    bread.rows = TrainingRows(bread.problem, bread.features)
    size = bread.features.size
    bread.scale, bread.step = saved.algebra("scale", size), saved.algebra("step", size)
    bread.inverse = saved.algebra("inverse", size, size)
    bread._change = saved.algebra("change", problem.n, problem.k)
    names = saved.texts("meats")
    if names != list(meats.roots):
        raise saved.wrong("meats", " and ".join(meats.roots))
    matrices = {name: saved.algebra(f"meat_{name}", size, size) for name in names}
    return bread, PrimalSandwich(bread, matrices, saved.algebra("total", size))


def write_dual(draft: Draft, bread: DualBread, sandwich: DualSandwich) -> None:
    """The kernel and its factor."""
    write_bread(draft, bread)
    _check_features(bread.features, Jacobian)
    for name in ("kernel", "inner_weights", "factor"):
        draft.put(name, getattr(bread, name))


def read_dual(saved: Saved, problem: Linearization, meats: Meats, given: Given) -> tuple[Bread, Sandwich]:
    """The same, put together again. Predictions read the training data."""
    bread = DualBread.__new__(DualBread)
    read_bread(saved, bread, problem, given)
    bread.features = _jacobian(bread.problem, bread.facts)
    bread.rows = TrainingRows(bread.problem, bread.features)
    size = problem.n * problem.k
    roots = problem.hessian_roots
    inner = size if roots is None else problem.n * roots.shape[2]
    bread.kernel, bread.factor = saved.algebra("kernel", size, size), saved.algebra("factor", inner, inner)
    bread.inner_weights = saved.algebra("inner_weights", problem.n, problem.k)
    return bread, DualSandwich(bread, meats)


def write_free(draft: Draft, bread: MatrixFreeBread, sandwich: MatrixFreeSandwich) -> None:
    """How solves stop."""
    write_bread(draft, bread)
    draft.note(tolerance=bread.tolerance, iterations=bread.iterations, worst=bread.worst)


def read_free(saved: Saved, problem: Linearization, meats: Meats, given: Given) -> tuple[Bread, Sandwich]:
    """The same, put together again. Predictions read the training data."""
    bread = MatrixFreeBread.__new__(MatrixFreeBread)
    read_bread(saved, bread, problem, given)
    bread.jacobian = _jacobian(bread.problem, bread.facts)
    bread.tolerance = max(saved.number("tolerance", 0.0, 1.0), 4 * bread.jacobian.precision)
    bread.iterations = saved.whole("iterations", 1)
    bread.worst = saved.number("worst", 0.0)
    return bread, MatrixFreeSandwich(bread, meats)


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
