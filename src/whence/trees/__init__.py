"""Fitted ensembles of trees: linear in their leaf values, so that all that whence computes applies to them."""

from whence.trees.ensemble import TreeEnsemble
from whence.trees.registry import read

__all__ = ["TreeEnsemble", "read"]
