"""The process of a rank that follows: ``python -m serve.parallel``, started by rank 0 (serve/parallel/ranks.py).

It loads its part of the model by the same code as rank 0, then runs what rank 0 announces. It ends with rank 0; when it
fails it says why on its socket and ends, and rank 0 with it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import sys

from serve.config import ServeConfig
from serve.engine.__main__ import prepare_process
from serve.engine.build import StartError, rank_device, start_rank
from serve.logs import set_up_logging
from serve.parallel.follower import follower_of
from serve.parallel.ranks import join, meeting

log = logging.getLogger("serve.parallel")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m serve.parallel", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rank", type=int, required=True, help="this rank; 0 is the engine's")
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of the socket to rank 0")
    parser.add_argument("--store", type=int, required=True, help="file descriptor through which the ranks meet")
    parser.add_argument("--config", required=True, help="the server's settings as JSON")
    args = parser.parse_args()
    prepare_process()
    config = ServeConfig.from_json(args.config)
    set_up_logging(config.log_json)
    sock = socket.socket(fileno=args.fd)
    try:
        device = rank_device(config, args.rank)
        group = join(args.rank, config.tensor_parallel, device, meeting(args.store, config.tensor_parallel))
        _, ready = start_rank(config, device, group)
        follower_of(ready.runner).run(sock)
    except Exception as error:
        expected = isinstance(error, StartError | OSError | ValueError)
        if not expected:
            log.exception("rank %d failed", args.rank)
        reason = str(error) if expected else f"{type(error).__name__}: {str(error)[:500]}"
        with contextlib.suppress(OSError):
            sock.sendall(reason.encode())
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Threads of the math libraries and of NCCL may still be parked; nothing is left to clean up.
    os._exit(code)
