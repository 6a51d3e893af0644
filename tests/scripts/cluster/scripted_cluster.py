"""A real Ray cluster on this machine, its replicas with the scripted engine: a server for the API tests."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from tests.serve.api.live_server import HERE, ROOT, LiveServer, ServerProcess, eventually, make_model_dir

LAUNCH = """
import sys
from scripts.cluster.__main__ import main
at = sys.argv.index("--")
sys.exit(main(sys.argv[at + 1:], [sys.executable, *sys.argv[1:at]]))
"""


class ScriptedCluster(LiveServer):
    """Two replicas and a front; talked to and asked as a LiveServer is."""

    def __init__(self, folder: Path, port: int, *arguments: str, environ: dict[str, str] | None = None) -> None:
        self.model_dir = make_model_dir(folder / "tiny-model")
        self.record = folder / "messages.jsonl"
        self.record.touch()
        command = [
            *(sys.executable, "-c", LAUNCH, str(HERE / "scripted_engine.py"), str(self.record), "ready", "--"),
            *(
                "--model-dir",
                str(self.model_dir),
                "--port",
                str(port),
                "--cluster-cpus",
                "2",
                "--cpus",
                "0.5",
                *arguments,
            ),
        ]
        private = {
            # The cluster's own secret, so that none is left in the home folder.
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        ServerProcess.__init__(self, command, {**private, **(environ or {})}, 240)

    def __enter__(self) -> ScriptedCluster:
        return self

    def replicas(self) -> dict[str, float]:
        """Answered requests by replica, of the replicas that are there."""
        with self.client() as http:
            lines = http.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith("vllm:request_prompt_tokens_count{")]
        return {line.split('replica="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in found}

    def wait_for_two(self) -> dict[str, float]:
        eventually(lambda: len(self.replicas()) == 2, 60)
        return self.replicas()
