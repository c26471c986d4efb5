"""The engine: tensors, parameters and index sets.  It knows no pixels and no tokens."""

from common.base.registry import METHODS
from common.methods import catalogue

__all__ = ["METHODS", "catalogue"]
