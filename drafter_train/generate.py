"""Writes the target's own responses to a token store: ``python -m drafter_train.generate --config RECIPE``.

Every prompt is answered once per pass of the recipe. Token ids are stored as the target chose them. Run it again after
a kill and it goes on with what is missing; ``--shard 2/8`` takes every eighth prompt, for job arrays. SIGTERM and
SIGUSR1 end it at the next finished response: what is written is kept and the exit status is 3, as for --max-seconds.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafter_train.backends import Backend, EngineBackend, UrlBackend, write_through
from drafter_train.chat import ChatTokenizer
from drafter_train.folder_lock import FolderBusy, only_writer
from drafter_train.progress import say
from drafter_train.prompts import is_text, read_lines
from drafter_train.recipe import PassConfig, Recipe, add_recipe_arguments, recipe_from
from drafter_train.rollout import Job, roll_out
from drafter_train.target import Target, read_target_config
from drafter_train.tokens import Response, TokenStore

FLUSH_RESPONSES = 20_000
FLUSH_SECONDS = 300.0
# Jobs, what to do with each response, and when to stop (in time.monotonic seconds); False when stopped.
Write = Callable[[Sequence[Job], Callable[[Response], None], float], bool]


class Stopped(Exception):
    """Asked to end; raised between two responses, so that no file is left half written."""


def read_prompts(path: str | Path, limit: int = 0) -> list[dict[str, Any]]:
    """Prompt records of a JSONL file (.gz too): ``prompt`` (one user turn) or ``messages``, with optional ``id`` and
    ``category``. Raises ValueError naming the line."""
    path = Path(path)
    records: list[dict[str, Any]] = []
    for number, record in read_lines(path):
        if limit and len(records) == limit:
            break
        if not isinstance(record, dict):
            raise ValueError(f"{path} line {number}: needs a JSON object with prompt or messages")
        messages = record.get("messages") or [{"role": "user", "content": record.get("prompt")}]
        if not isinstance(messages, list) or not all(
            isinstance(turn, dict) and isinstance(turn.get("role"), str) and is_text(turn.get("content"))
            for turn in messages
        ):
            raise ValueError(
                f"{path} line {number}: needs prompt, a text, or messages, a list of objects with role and content; "
                "python -m drafter_train.prompts makes such a file of most others"
            )
        records.append(
            {"id": str(record.get("id", number)), "category": str(record.get("category", "all")), "messages": messages}
        )
    if not records:
        raise ValueError(f"{path} holds no prompt")
    return records


def open_store(
    recipe: Recipe, prompts_path: str, folder: str, passes: tuple[PassConfig, ...], limit: int
) -> TokenStore:
    """Tokenise the prompts into a store (or open the store that already holds exactly these)."""
    chat = ChatTokenizer(recipe.target, recipe.data.thinking)
    records = read_prompts(prompts_path, limit)
    ids = chat.encode_prompts([record["messages"] for record in records])
    kept = [i for i, row in enumerate(ids) if 0 < len(row) <= recipe.data.max_prompt_tokens]
    if len(kept) < len(ids):
        limit = recipe.data.max_prompt_tokens
        say(f"{len(ids) - len(kept)} of {len(ids)} prompts are longer than {limit} tokens: left out")
    meta = {
        "fingerprint": chat.fingerprint.to_json(),
        "target": Path(recipe.target).name,
        "passes": [[list(p.sampled_tokens), p.temperature, p.top_p, p.top_k, p.share] for p in passes],
        "max_new_tokens": recipe.data.max_new_tokens,
        "ids": [records[i]["id"] for i in kept],
        "categories": [records[i]["category"] for i in kept],
    }
    return TokenStore.create(folder, [ids[i] for i in kept], meta)


def jobs_of(
    store: TokenStore, passes: tuple[PassConfig, ...], max_new: int, shard: tuple[int, int]
) -> Iterator[list[Job]]:
    """What is still to write, pass by pass, so that a run cut short has whole passes."""
    done = {(item.prompt, item.pass_index) for item in store.responses()}
    index, count = shard

    def make(pass_index: int, prompt: int) -> Job:
        settings = passes[pass_index]
        low, high = settings.sampled_tokens
        draw = np.random.default_rng((17, pass_index, prompt)).integers(low, high + 1)
        return Job(
            prompt=prompt,
            pass_index=pass_index,
            ids=store.prompt(prompt),
            max_new_tokens=max_new,
            sampled_tokens=int(draw),
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
        )

    mine = range(index, store.num_prompts, count)
    wanted = [
        [p for p in mine if p < settings.share * store.num_prompts and (p, i) not in done]
        for i, settings in enumerate(passes)
    ]
    for i, prompts in enumerate(wanted):
        yield [make(i, p) for p in prompts]


def generate(
    recipe: Recipe,
    write: Write,
    store: TokenStore,
    passes: tuple[PassConfig, ...],
    args: argparse.Namespace,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Write what is missing; False when the time ran out or ``stop`` said so first."""
    started = time.monotonic()
    deadline = started + args.max_seconds if args.max_seconds else float("inf")
    shard = parse_shard(args.shard)
    tag = tag_of(args.shard)
    buffer: list[Response] = []
    totals = {"responses": 0, "tokens": 0, "said": started, "flushed": started}

    def flush() -> None:
        if buffer:
            path = store.append(buffer, tag)
            say(f"wrote {path.name}: {len(buffer)} responses, {path.stat().st_size / 1e6:.1f} MB")
            buffer.clear()
            totals["flushed"] = time.monotonic()

    def emit(response: Response) -> None:
        buffer.append(response)
        totals["responses"] += 1
        totals["tokens"] += len(response.ids)
        now = time.monotonic()
        if now - totals["said"] > 5:
            totals["said"] = now
            rate = totals["tokens"] / (now - started)
            say(f"{totals['responses']} responses, {totals['tokens']} tokens, {rate:,.0f} tokens/s")
        if len(buffer) >= FLUSH_RESPONSES or now - totals["flushed"] > FLUSH_SECONDS:
            flush()
        if stop():
            raise Stopped

    complete = True
    try:
        for jobs in jobs_of(store, passes, recipe.data.max_new_tokens, shard):
            say(f"{len(jobs)} responses to write")
            complete = write(jobs, emit, deadline)
            flush()
            if not complete:
                break
    except Stopped:
        complete = False
    finally:
        flush()
    seconds = time.monotonic() - started
    say(
        f"{'done' if complete else 'stopped, run the same command again for the rest'}: "
        f"{totals['responses']} responses, {totals['tokens']} tokens in {seconds:.0f} s"
    )
    return complete


def open_writer(recipe: Recipe, args: argparse.Namespace) -> Write:
    """What ``--through`` asks for. Raises ValueError or OSError."""
    if args.through == "rollout":
        torch.manual_seed(1000 + parse_shard(args.shard)[0])
        dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
        target = Target.load(recipe.target, args.device, dtype)
        return lambda jobs, emit, deadline: roll_out(target, jobs, emit, slots=args.slots, deadline=deadline)
    backend: Backend
    if args.through == "engine":
        weights = "auto" if args.device.startswith("cuda") else "fp32"
        backend = EngineBackend(recipe.target, weights, args.device, min(args.slots, 256))
    elif args.through.startswith(("http://", "https://")):
        model = args.model or Path(recipe.target).name
        backend = UrlBackend(args.through, model, min(args.slots, 256), os.environ.get("OPENAI_API_KEY"))
    else:
        raise ValueError(f"--through must be rollout, engine or a URL, got {args.through!r}")
    ends = read_target_config(recipe.target).eos_token_ids
    return lambda jobs, emit, deadline: write_through(backend, jobs, ends, emit, together=args.slots, deadline=deadline)


def parse_shard(text: str) -> tuple[int, int]:
    """``"2/8"`` -> (2, 8), counted from 0. Raises ValueError."""
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 0 <= int(index) < int(count)):
        raise ValueError(f"--shard wants INDEX/COUNT with INDEX from 0 to COUNT-1, got {text!r}")
    return int(index), int(count)


def tag_of(shard: str) -> str:
    """``"2/8"`` -> "002of008", as in the names of its files."""
    return "{:03d}of{:03d}".format(*parse_shard(shard))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m drafter_train.generate", description=__doc__)
    add_recipe_arguments(parser)
    parser.add_argument("--split", choices=("train", "eval"), default="train", help="eval answers greedily, once")
    parser.add_argument("--shard", default="0/1", help="INDEX/COUNT: every COUNT-th prompt from INDEX (default: 0/1)")
    parser.add_argument("--limit", type=int, default=0, help="use only the first N prompts (0: all)")
    parser.add_argument("--slots", type=int, default=1024, help="responses written at the same time (default: 1024)")
    parser.add_argument(
        "--through",
        default="rollout",
        help="who writes: rollout (fastest, the default), engine (the server's, in this process), or the base URL of "
        "an OpenAI-compatible server of exactly this target that returns token ids, e.g. http://host:8000/v1 (its key: "
        "env OPENAI_API_KEY)",
    )
    parser.add_argument("--model", help="model name at that URL (default: the target folder's name)")
    parser.add_argument("--max-seconds", type=float, default=0, help="stop in time; run again to go on (0: no limit)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    recipe = recipe_from(args, parser)
    if args.slots < 1 or args.limit < 0 or args.max_seconds < 0:
        parser.error(
            f"--slots must be 1 or more, --limit and --max-seconds 0 or more: {args.slots}, {args.limit}, "
            f"{args.max_seconds:g}"
        )
    train = args.split == "train"
    passes = recipe.data.passes if train else (PassConfig(),)
    try:
        parse_shard(args.shard)
        store = open_store(
            recipe,
            recipe.data.prompts if train else recipe.data.eval_prompts,
            recipe.data.tokens if train else recipe.data.eval_tokens,
            passes,
            args.limit,
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    asked: list[int] = []

    def ask(received: int, _frame: object) -> None:
        asked.append(received)

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGUSR1)}
    say(f"{store.num_prompts} prompts in {store.folder}; target {recipe.target}, through {args.through}")
    try:
        # Shards of one store are written at the same time, each by one process.
        with only_writer(store.folder, f".lock-{tag_of(args.shard)}"):
            write = open_writer(recipe, args)
            return 0 if generate(recipe, write, store, passes, args, stop=lambda: bool(asked)) else 3
    except FolderBusy as error:
        say(f"generation not started: {error}")
        return 1
    except (OSError, ValueError) as error:
        say(f"generation stopped: {error}; run the same command again for the rest")
        return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
