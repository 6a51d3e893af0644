"""``python -m serve``: settings from the command line and the environment, then the server."""

from __future__ import annotations

import sys

from serve.api.server import run_server
from serve.config import parse_config

if __name__ == "__main__":
    sys.exit(run_server(parse_config()))
