"""The one error of a model folder that cannot be served. Its text names the file, field or tensor and both values."""

from __future__ import annotations


class ModelError(ValueError):
    """A model folder that is incomplete, damaged or of a kind that is not served; the message is for the operator."""
