"""Fitted curvatures in a file: one table with the fields, dtypes and shapes of every class, and their readers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, get_args

from whence.curvature import FittedCurvature, Groups, Meats, NewtonStep, Sandwich
from whence.curvature.accumulate import Features, LayerGradients, LayerSizes, TrainingRows
from whence.curvature.aligned import AlignmentSandwich, FittedDual, FittedIterative
from whence.curvature.base import RidgePath
from whence.curvature.kronecker import Spectrum
from whence.curvature.leaves import FittedLeaves, LeafFeatures, LeafSandwich
from whence.curvature.primal import FittedPrimal, PrimalSandwich, Projected, Whitening
from whence.curvature.rotation import Basis, DiagonalMoments, Weights
from whence.curvature.spectral import FittedSpectral, SpectralSandwich
from whence.curvature.two_bases import TwoBasisWeights
from whence.data.targets import Positions
from whence.errors import InputError
from whence.estimators import AdjustedResiduals
from whence.io.files import Draft, Saved
from whence.jacobian.gradients import Block
from whence.jacobian.jacobian import Jacobian
from whence.jacobian.leaves import LeafSum
from whence.jacobian.linearization import Linearization
from whence.jacobian.sketches import HessianSketch
from whence.runtime.execution import Precision

R = TypeVar("R")

COMMON: dict[str, Any] = {
    "ridge": "number 0",
    "notes": "texts",
    "leverage_blocks": "algebra n k k",
    "path": RidgePath | None,
}
PRIMAL = {**COMMON, "whiten": Whitening, "step": "algebra features", "change": "algebra n k"}
WEIGHTS = {"inside": "working estimators basis", "outside": "working estimators one one one", "rounded": "flag"}
RECORDS: dict[type, Mapping[str, Any]] = {
    Linearization: {
        "outputs": "algebra n k",
        "residuals": "algebra n k",
        "hessian_roots": "?algebra n k q",
        "sample_weights": "?algebra n",
        "gram": "?algebra n k k",
        "chunk_size": "?whole 1",
        "precision": f"text {' '.join(get_args(Precision))}",
    },
    Groups: {"total": "whole 2", "counted": "whole 2", "index": "index n"},
    Positions: {"shape": "wholes 1", "width": "whole 1", "weights": "?algebra n positions"},
    HessianSketch: {"columns": "whole 1", "width": "whole 1", "dense": "flag", "counted": "whole 0"},
    AdjustedResiduals: {"hec2": "algebra n k", "hec3": "algebra n k", "leverage": "algebra n k", "guarded": "whole 0"},
    NewtonStep: {"change": "algebra n k", "relative": "number 0", "direction": "?algebra parameters"},
    RidgePath: {"ridges": "float ridges", "errors": "float ridges"},
    Whitening: {"scale": "algebra features", "inverse": "algebra features features"},
    FittedPrimal: PRIMAL,
    FittedLeaves: PRIMAL,
    FittedDual: {**COMMON, "kernel": "algebra nk nk", "factor": "algebra nq nq", "inner_weights": "algebra n k"},
    FittedIterative: {**COMMON, "worst": "number 0", "tolerance": "number 0 1", "iterations": "whole 1"},
    FittedSpectral: {**COMMON, "noise": "algebra k k", "change": "algebra n k"},
    DiagonalMoments: {"inside": "double basis", "outside": "number 0"},
    Weights: WEIGHTS,
    TwoBasisWeights: {
        **WEIGHTS,
        "which": "wholes 0",
        "solved": "working rotated",
        "meats": "working chosen flipped",
    },
    LayerSizes: {"activations": "number 0", "gradients": "number 0", "workspace": "number 0"},
    Block: {
        "name": "text",
        "parameters": "texts",
        "kind": "text kronecker rows dense",
        "groups": "whole 1",
        "transposed": "flag",
    },
}
"""The saved fields of every class. A tensor has its dtype and the names of its axes; other fields have their kind with
bounds or choices, or another class. "?" marks fields that may be missing. All other fields follow from these."""


def write(draft: Draft, name: str, value: Any) -> Draft:
    """Write a value: an object of the table as its own part, a tensor, or a field; `None` is left out."""
    if type(value) not in RECORDS:
        draft.put(**{name: value})
        return draft
    part = draft.part(name)
    for field in RECORDS[type(value)]:
        write(part, field, getattr(value, field))
    return part


def read(saved: Saved, kind: type[R], **known: Any) -> R:
    """Read an object of the table, except for its `known` fields."""
    return kind(**known, **{name: _field(saved, name, how) for name, how in RECORDS[kind].items() if name not in known})


def _field(saved: Saved, name: str, how: Any) -> Any:
    if not isinstance(how, str):
        kind, *optional = get_args(how) or (how,)
        return None if optional and not saved.has(name) else read(saved.part(name), kind)
    what, *rest = how.removeprefix("?").split()
    if how.startswith("?") and not saved.has(name):
        return None
    if what in saved.dtypes:
        return saved.tensor(name, what, *rest)
    return getattr(saved, what)(name, *(int(one) if one.isdigit() else one for one in rest))


def _write_stream(draft: Draft, stream: LayerGradients) -> None:
    """Write the blocks found by the capture, their sizes and notes."""
    write(draft, "sizes", stream.sizes)
    draft.put(notes=stream.notes, blocks=len(stream.blocks))
    for at, block in enumerate(stream.blocks):
        write(draft, f"layer_{at}", block)


def _read_stream(saved: Saved, problem: Linearization) -> LayerGradients:
    """Layer gradients with the blocks of the first capture, verified on the training data if given."""
    count = saved.whole("blocks", 1, len(problem.selection.parameters))
    blocks = tuple(_read_block(saved.part(f"layer_{at}"), problem) for at in range(count))
    if sorted(name for block in blocks for name in block.parameters) != sorted(problem.selection.parameters):
        raise saved.wrong("blocks", "all selected parameters")
    stream = LayerGradients(problem, read(saved.part("sizes"), LayerSizes, blocks=blocks))
    stream.notes = saved.texts("notes")
    return stream


def _read_block(saved: Saved, problem: Linearization) -> Block:
    names, kind, groups = tuple(saved.texts("parameters")), saved.text("kind"), saved.whole("groups", 1)
    parameters = problem.selection.parameters
    if not names or any(name not in parameters for name in names):
        raise saved.wrong("parameters", "names of selected parameters")
    shapes = tuple(tuple(parameters[name].shape) for name in names)
    sound = len(names) == 1 or (kind == "kronecker" and len(names) == 2) or kind == "dense"
    sound = sound and (kind == "dense" or (bool(shapes[0]) and shapes[0][0] % groups == 0))
    block = read(saved, Block, parameters=names, shapes=shapes)
    if not sound or math.prod(block.matrix_shape) != block.numel:
        raise saved.wrong("kind", f"a form that parameters of shapes {shapes} can take")
    return block


BASES: dict[str, dict[str, tuple[str, ...]]] = {
    "kronecker": {"inputs": ("e", "i", "any"), "outputs": ("e", "o", "any")},
    "rows": {"inputs": ("i", "any")},
    "dense": {"inputs": ("i", "any")},
}
"""Sides of a basis that is not the identity, and their axes, for each kind of block."""


def _read_basis(saved: Saved, block: Block) -> Basis:
    """A basis of a block: both sides, or the identity."""
    axes = {name: BASES[block.kind].get(name, ()) for name in ("inputs", "outputs") if saved.has(name)}
    if axes not in ({}, BASES[block.kind]):
        raise saved.wrong("inputs", f"a basis of a {block.kind} block")
    full = (1, 1, *block.matrix_shape)[-3:]
    saved.sizes.update({name: (size,) for name, size in zip("eoi", full, strict=True)})
    basis = Basis(block, **{name: saved.tensor(name, "working", *named) for name, named in axes.items()})
    if any(not 1 <= mine <= whole for mine, whole in zip(basis.shape, block.matrix_shape, strict=True)):
        raise saved.wrong("inputs", "a basis with as many columns as rows, or fewer")
    return basis


def _read_features(saved: Saved, problem: Linearization, notes: list[str]) -> Features:
    if not saved.flag("projected"):
        return _jacobian(problem, notes)
    stream = _read_stream(saved, problem)
    parts = [saved.part(f"block_{at}") for at in range(len(stream.blocks))]
    bases = [_read_basis(part, block) for part, block in zip(parts, stream.blocks, strict=True)]
    pairs = zip(parts, bases, strict=True)
    indices = [part.index("index", "any", below=math.prod(basis.shape)) for part, basis in pairs]
    return Projected(stream, bases, indices, notes, saved.flag("orthonormal"))


def _jacobian(problem: Linearization, notes: list[str]) -> Jacobian:
    found = problem.jacobian()
    found.notes = notes
    return found


def _write_primal(draft: Draft, bread: FittedPrimal, sandwich: PrimalSandwich) -> None:
    """Write features (the gradients themselves, chosen coordinates of them, or leaves), and whitened meats."""
    features = bread.features
    if isinstance(features, LeafFeatures):
        draft.put(basis=features.basis, sums=features.sums)
    elif type(features) not in (Jacobian, Projected):
        raise InputError(f"expected features of whence itself to save, got {type(features).__name__}. Fit again.")
    else:
        part = draft.part("features")
        part.put(projected=isinstance(features, Projected))
        if isinstance(features, Projected):
            _write_stream(part, features.stream)
            part.put(orthonormal=features.orthonormal)
            for at, (basis, index) in enumerate(zip(features.bases, features.indices, strict=True)):
                part.part(f"block_{at}").put(inputs=basis.inputs, outputs=basis.outputs, index=index)
    meats = {f"meat_{one}": matrix for one, matrix in sandwich.matrices.items()}
    draft.put(meats=list(sandwich.matrices), total=sandwich.total, **meats)


def _read_primal(
    saved: Saved,
    problem: Linearization,
    meats: Meats,
    curvature: type[FittedPrimal] = FittedPrimal,
    sandwich: type[PrimalSandwich] = PrimalSandwich,
) -> tuple[FittedCurvature, Sandwich]:
    model, notes = problem.network.model, saved.texts("notes")
    features: Features
    if curvature is not FittedLeaves:
        features = _read_features(saved.part("features"), problem, notes)
    elif not isinstance(model, LeafSum):
        raise saved.wrong("basis", "a fit of trees")
    else:  # directions of the leaves
        saved.sizes["leaves"] = (len(model.scale),)
        basis = saved.tensor("basis", "algebra", "leaves", "directions")
        features = LeafFeatures(model, basis, saved.tensor("sums", "algebra", "leaves", "sums"), notes)
    saved.sizes["features"] = (features.size,)
    rows = TrainingRows(problem, features)
    bread = read(saved, curvature, problem=problem, notes=notes, features=features, rows=rows)
    if saved.texts("meats") != list(meats.roots):
        raise saved.wrong("meats", " and ".join(meats.roots))
    matrices = {name: saved.tensor(f"meat_{name}", "algebra", "features", "features") for name in meats.roots}
    return bread, sandwich(bread, matrices, saved.tensor("total", "algebra", "features"))


def _read_dual(saved: Saved, problem: Linearization, meats: Meats) -> tuple[FittedCurvature, Sandwich]:
    """Read the kernel and its factor. Predictions read the training data."""
    notes = saved.texts("notes")
    features = _jacobian(problem, notes)
    inner = problem.k if problem.hessian_roots is None else problem.hessian_roots.shape[2]
    saved.sizes.update({"nk": (problem.n * problem.k,), "nq": (problem.n * inner,)})
    rows = TrainingRows(problem, features)
    bread = read(saved, FittedDual, problem=problem, notes=notes, features=features, rows=rows)
    return bread, AlignmentSandwich(bread, meats)


def _read_iterative(saved: Saved, problem: Linearization, meats: Meats) -> tuple[FittedCurvature, Sandwich]:
    """Read tolerance and iterations of the solves. Predictions read the training data."""
    notes = saved.texts("notes")
    bread = read(saved, FittedIterative, problem=problem, notes=notes, jacobian=_jacobian(problem, notes))
    return bread, AlignmentSandwich(bread, meats)


def _write_spectral(draft: Draft, bread: FittedSpectral, sandwich: SpectralSandwich) -> None:
    """Write bases, spectra and weights, block by block."""
    _write_stream(draft.part("stream"), bread.stream)
    draft.put(estimators=sandwich.names)
    for at, (basis, rotation) in enumerate(zip(bread.bases, bread.rotations, strict=True)):
        part = draft.part(f"block_{bread.stream.blocks.index(basis.block)}")
        part.put(inputs=basis.inputs, outputs=basis.outputs)
        write(part, "curvature", bread.spectrum.curvature[at])
        write(part, "noise", bread.spectrum.noise[at])
        write(part, "weights", sandwich.weights[at])
        part.put(score=bread.spectrum.score[at], step=bread.step[at], rotated=rotation is not None)
        if rotation is not None:
            part.part("rotation").put(inputs=rotation.inputs, outputs=rotation.outputs)


def _read_spectral(saved: Saved, problem: Linearization, meats: Meats) -> tuple[FittedCurvature, Sandwich]:
    stream = _read_stream(saved.part("stream"), problem)
    names = saved.texts("estimators")
    if sorted(names) != sorted([*meats.roots, "jackknife", "laplace"]):
        raise saved.wrong("estimators", "those of this version")
    saved.sizes["estimators"] = (len(names),)
    bases, rotations, weights, moments, vectors = [], [], [], [], []
    for at, block in enumerate(stream.blocks):
        part = saved.part(f"block_{at}")
        basis = _read_basis(part, block)
        part.sizes.update({"basis": basis.shape, "matrix": block.matrix_shape})
        rotation = _read_rotation(part, basis) if part.flag("rotated") else None
        bases.append(basis)
        rotations.append(rotation)
        weighting = part.part("weights")
        if rotation is None:
            weights.append(read(weighting, Weights, basis=basis))
        else:
            which = weighting.wholes("which", 0, len(names) - 1)
            if len(set(which)) != len(which):
                raise weighting.wrong("which", "estimators")
            weighting.sizes["chosen"] = (len(which),)
            weights.append(read(weighting, TwoBasisWeights, basis=basis, rotation=rotation, which=which))
        moments.append([read(part.part(name), DiagonalMoments) for name in ("curvature", "noise")])
        vectors.append([part.tensor(name, "double", "matrix") for name in ("score", "step")])
    curvature, noise = map(list, zip(*moments, strict=True))
    score, step = map(list, zip(*vectors, strict=True))
    if problem.device.type == "cuda" and any(one.basis.outside and not one.rounded for one in weights):
        stream.problem = problem = replace(problem, precision="float32")  # these weights need exact products
    known: dict[str, Any] = {"problem": problem, "stream": stream, "bases": bases, "rotations": rotations, "step": step}
    bread = read(saved, FittedSpectral, spectrum=Spectrum(curvature, noise, score), **known)
    return bread, SpectralSandwich(bread, tuple(names), weights)


def _read_rotation(saved: Saved, basis: Basis) -> Basis:
    """The rotation from the leading coordinates in `basis` to those in the meats' own basis."""
    part, kind = saved.part("rotation"), basis.block.kind
    sides = [side for side in ("inputs", "outputs") if part.has(side)]
    if sides != list(BASES[kind]) or kind == "rows":
        raise saved.wrong("rotation", f"one of a {kind} block")
    lead = ["groups"] if kind == "kronecker" else []
    part.sizes["groups"] = basis.shape[:1]
    rotation = Basis(basis.block, *(part.tensor(side, "working", *lead, side, side) for side in sides))
    shape = rotation.shape
    if any(mine > whole for mine, whole in zip(shape, basis.shape, strict=True)):
        raise saved.wrong("rotation", f"one of a part of {basis.shape}")
    saved.sizes.update({"rotated": shape, "flipped": (*shape[:-2], *reversed(shape[-2:]))})
    return rotation


Writer = Callable[[Draft, Any, Any], None]
Reader = Callable[[Saved, Linearization, Meats], tuple[FittedCurvature, Sandwich]]
KINDS: dict[str, tuple[type[FittedCurvature], Writer | None, Reader]] = {
    "primal": (FittedPrimal, _write_primal, _read_primal),
    "leaves": (FittedLeaves, _write_primal, partial(_read_primal, curvature=FittedLeaves, sandwich=LeafSandwich)),
    "dual": (FittedDual, None, _read_dual),
    "matrix_free": (FittedIterative, None, _read_iterative),
    "spectral": (FittedSpectral, _write_spectral, _read_spectral),
}
"""Every fitted curvature of whence, with the writer and reader for everything beyond its table."""
