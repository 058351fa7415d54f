"""`whence`: how sure is a trained network, and whence comes its doubt?"""

from ._version import __version__
from .api import fit
from .curvature import EKFAC, KFAC, Core, Diagonal, Exact, RidgePath, Sketch, Structure
from .errors import (
    CorruptArtifactError,
    FormatError,
    InputError,
    LoaderError,
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
from .estimation import Estimate, estimate
from .likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Noise, one_hot
from .loading import load
from .results import Diagnostics, Finding, Uncertainty
from .ridge import ridge_from_weight_decay
from .together import gather
from .tracer import Tracer
from .tracing import Attribution, Check, Explanation, GroupShares, Shares, Suggestion, Trust, WhatIf
from .tracing.sources import Sources
from .tracing.split import Split

__all__ = [
    "EKFAC",
    "KFAC",
    "Attribution",
    "Bernoulli",
    "Categorical",
    "Check",
    "Core",
    "CorruptArtifactError",
    "Diagnostics",
    "Diagonal",
    "Estimate",
    "Exact",
    "Explanation",
    "Finding",
    "FormatError",
    "Gaussian",
    "GroupShares",
    "InputError",
    "Likelihood",
    "LoaderError",
    "Noise",
    "NotDeterministicError",
    "ProcessError",
    "RidgePath",
    "ShapeError",
    "Shares",
    "SingularCurvatureError",
    "Sketch",
    "Sources",
    "Split",
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
