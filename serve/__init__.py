"""The server of Foretoken: HTTP API, engine, models, drafters, kernels."""

__version__ = "0.1.0"
