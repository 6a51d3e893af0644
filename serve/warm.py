"""``python -m serve.warm``: what a first start would compile, done before it, so that the start itself is quick.

On a CPU that is the C layers, into the user's cache. On a CUDA card the engine is built once as the server would build
it (env MODEL_DIR, the server's own options), which compiles every kernel it uses into Triton's cache, and writes the
packed weights where they are to be kept (--weights-cache or env FORETOKEN_WEIGHTS_CACHE). Nothing needs it: a server
that finds no cache makes its own. Prints one line for each thing; exit code 0 also when there was nothing to do, 1 when
something that should have worked did not, 2 for options that the server would not take. It knows no HTTP.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from serve.config import ServeConfig, parse_config


def say(text: str) -> None:
    print(f"warm: {text}", flush=True)


def warm_cpu() -> None:
    """Compile and try the C layers. Without a compiler there is nothing to warm, and that is said."""
    from serve.kernels.native.build import NativeUnavailable
    from serve.model.native_check import checked_library

    try:
        checked_library()
        say("native layers compiled and tried")
    except NativeUnavailable as reason:
        say(f"no native layers here: {reason}")


def warm_cuda(config: ServeConfig) -> None:
    """Build the engine once and let it go. Raises StartError."""
    from serve.engine.build import build_engine

    _, facts = build_engine(config)
    say(f"kernels compiled for {facts['device']}: {facts['kernel_path']}, drafter {facts['drafter'] or 'none'}")


def main(argv: Sequence[str] | None = None) -> int:
    started = time.monotonic()
    config = parse_config(argv) if argv or os.environ.get("MODEL_DIR") else None
    import torch

    from serve.engine.build import StartError

    if not torch.cuda.is_available():
        warm_cpu()
    elif config is None:
        say("MODEL_DIR is not set: the kernels depend on the model, so the first start compiles them")
    else:
        try:
            warm_cuda(config)
        except StartError as error:
            say(f"not warmed: {error}")
            return 1
    say(f"done in {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
