"""What code under test may set for its whole process: kept while a test runs, and put back behind it.

Loggers (set_up_logging makes INFO lines out of none), signal handlers, the environment, the working folder, torch's
threads and gradients, the garbage collector. The random numbers of torch and numpy begin anew, so that a test draws the
same ones whatever ran before it; those of Python do not, as libraries choose ports by them. It knows nothing of threads
and open files, which a test has to end itself.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

OURS = ("serve", "verify", "eval", "drafter_train", "scripts")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Whatever is set inside is set back at the end."""
    np.random.seed(0)
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        for keep in (_loggers, _signals, _surroundings, _torch, _collector):
            stack.enter_context(keep())
        yield


@contextlib.contextmanager
def _loggers() -> Iterator[None]:
    before = {one: (one.level, one.propagate, one.disabled, one.handlers[:], one.filters[:]) for one in _all_loggers()}
    disabled = logging.root.manager.disable
    yield
    logging.disable(disabled)
    for one in _all_loggers():
        if one in before:
            level, one.propagate, one.disabled, one.handlers, one.filters = before[one]
            one.setLevel(level)
        elif one.name.partition(".")[0] in OURS:  # a library that was first imported keeps the loggers it set up
            one.setLevel(logging.NOTSET)


def _all_loggers() -> list[logging.Logger]:
    made = list(logging.root.manager.loggerDict.values())
    return [logging.root, *(one for one in made if isinstance(one, logging.Logger))]


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    if threading.current_thread() is threading.main_thread():
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextlib.contextmanager
def _surroundings() -> Iterator[None]:
    environment, folder = dict(os.environ), Path.cwd()
    yield
    if Path.cwd() != folder:
        os.chdir(folder)
    for name in os.environ.keys() - environment.keys():
        if name != "PYTEST_CURRENT_TEST":  # pytest's own, another in every phase of a test
            del os.environ[name]
    for name, value in environment.items():
        if name != "PYTEST_CURRENT_TEST" and os.environ.get(name) != value:
            os.environ[name] = value


@contextlib.contextmanager
def _torch() -> Iterator[None]:
    threads, dtype, grad = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    torch.use_deterministic_algorithms(deterministic)


@contextlib.contextmanager
def _collector() -> Iterator[None]:
    threshold, enabled = gc.get_threshold(), gc.isenabled()
    yield
    gc.set_threshold(*threshold)
    (gc.enable if enabled else gc.disable)()
