"""`whence`: how sure is a trained network, and whence comes its doubt?"""

from whence._version import __version__
from whence.api import Estimate, estimate, fit, gather, load, ridge_from_weight_decay
from whence.curvature import EKFAC, KFAC, Core, Diagonal, Exact, Sketch, Structure
from whence.errors import (
    CorruptArtifactError,
    FormatError,
    InputError,
    LoaderError,
    MissingFileError,
    NotDeterministicError,
    ProcessError,
    ShapeError,
    SingularCurvatureError,
    StaleModelError,
    TargetError,
    TooLargeError,
    UncapturedParameterError,
    UnsupportedLayerError,
    WhenceError,
)
from whence.influence import Attribution, Explanation, Suggestion, WhatIf
from whence.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, one_hot
from whence.results import Diagnostics, Uncertainty
from whence.runtime.execution import Execution
from whence.tracer import Tracer
from whence.trust import Trust

__all__ = [
    "EKFAC",
    "KFAC",
    "Attribution",
    "Bernoulli",
    "Categorical",
    "Core",
    "CorruptArtifactError",
    "Diagnostics",
    "Diagonal",
    "Estimate",
    "Exact",
    "Execution",
    "Explanation",
    "FormatError",
    "Gaussian",
    "InputError",
    "Likelihood",
    "LoaderError",
    "MissingFileError",
    "NotDeterministicError",
    "ProcessError",
    "ShapeError",
    "SingularCurvatureError",
    "Sketch",
    "StaleModelError",
    "Structure",
    "Suggestion",
    "TargetError",
    "TooLargeError",
    "Tracer",
    "Trust",
    "UncapturedParameterError",
    "Uncertainty",
    "UnsupportedLayerError",
    "WhatIf",
    "WhenceError",
    "__version__",
    "estimate",
    "fit",
    "gather",
    "load",
    "one_hot",
    "ridge_from_weight_decay",
]
