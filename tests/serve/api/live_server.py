"""A real server process over HTTP whose engine is the scripted one, and the tiny model folder it serves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
LAUNCH = """
import sys
from serve.api.server import run_server
from serve.config import parse_config
at = sys.argv.index("--")
sys.exit(run_server(parse_config(sys.argv[at + 1:]), [sys.executable, *sys.argv[1:at]]))
"""
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in printable]
    return {**{chr(b): b for b in printable}, **{chr(256 + i): b for i, b in enumerate(hidden)}}


def make_model_dir(folder: Path, generation_config: dict[str, Any] | None = None) -> Path:
    """A folder with a tokenizer in which token id b is byte b, 256 <|im_start|> and 257 <|im_end|>."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"},
        "config.json": {"model_type": "llama", "eos_token_id": 257},
        "generation_config.json": {"eos_token_id": 257, **(generation_config or {})},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


class ServerProcess:
    """A server and what it writes; ``base`` is its URL once ready. Leave by ``stop`` (a context manager does it)."""

    def __init__(self, command: Sequence[str], environ: dict[str, str] | None = None, wait_ready: float = 30) -> None:
        self.lines: list[str] = []
        self.errors: list[str] = []
        clean = {k: v for k, v in os.environ.items() if k not in ("MODEL_DIR", "PORT", "DRAFTER_BYO_DIR")}
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**clean, **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._threads = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in ((self.process.stdout, self.lines), (self.process.stderr, self.errors))
        ]
        for thread in self._threads:
            thread.start()
        self.base = ""
        if wait_ready:
            eventually(lambda: len(self.lines) > 1 or self.process.poll() is not None, wait_ready)
            found = re.search(r"http://\S+", "".join(self.lines))
            assert found, f"no ready line; stderr: {''.join(self.errors)}"
            self.base = found[0]

    @staticmethod
    def _read(stream: Any, lines: list[str]) -> None:
        for line in stream:
            lines.append(line)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.base, timeout=20, trust_env=False, **options)

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1
        return int(children[0])

    def wait(self, seconds: float = 15) -> int:
        """Its exit code, once its output has been read to the end."""
        code = self.process.wait(seconds)
        for thread in self._threads:
            thread.join(5)
        return code

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class LiveServer(ServerProcess):
    """``python -c LAUNCH`` with arguments: the real API process, the scripted engine."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        start: str = "ready",
        wait_ready: bool = True,
        environ: dict[str, str] | None = None,
        generation_config: dict[str, Any] | None = None,
    ) -> None:
        self.model_dir = make_model_dir(folder / "tiny-model", generation_config)
        self.record = folder / "messages.jsonl"
        self.record.touch()
        chosen = () if "--port" in arguments else ("--port", "0")
        command = [
            *(sys.executable, "-c", LAUNCH, str(HERE / "scripted_engine.py"), str(self.record), start, "--"),
            *("--model-dir", str(self.model_dir), *chosen, *arguments),
        ]
        super().__init__(command, environ, 30 if wait_ready else 0)

    def messages(self, kind: str) -> list[dict[str, Any]]:
        """What the engine has been sent."""
        found = [json.loads(line) for line in self.record.read_text().splitlines()]
        return [message for message in found if message["type"] == kind]

    def __enter__(self) -> LiveServer:
        return self


def eventually(condition: Any, seconds: float = 10) -> None:
    """Wait until ``condition()`` holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not become true in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def events(text: str) -> list[dict[str, Any]]:
    """The JSON events of an SSE body whose last frame is [DONE]."""
    frames = [frame for frame in text.split("\n\n") if frame]
    assert all(frame.startswith("data: ") for frame in frames)
    assert frames[-1] == "data: [DONE]"
    assert frames.count("data: [DONE]") == 1
    return [json.loads(frame[6:]) for frame in frames[:-1]]


def chat(text: str, **fields: Any) -> dict[str, Any]:
    """A chat body with one user message."""
    return {"messages": [{"role": "user", "content": text}], **fields}
