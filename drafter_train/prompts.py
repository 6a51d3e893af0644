"""Collects prompts: ``python -m drafter_train.prompts --config RECIPE SOURCE ...`` fills the recipe's prompt files.

A source is ``file:PATH`` (JSONL, .gz too, or Parquet), ``hub:DATASET[:SPLIT[:CONFIG]]`` (streamed), ``vary:TIMES:PATH``
(TIMES variants of every prompt of a file, see ``vary.py``) or ``self:COUNT`` (the target writes the user turns itself,
from its own chat template's prefix: no data set needed). Prompts are filtered
by length, deduplicated by their normalised text, and held out by its hash, so that a prompt is on the same side in
every run and machine. Run it again after a kill: what is there is kept and not collected twice.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from drafter_train.progress import say
from drafter_train.recipe import Recipe, add_recipe_arguments, recipe_from
from drafter_train.vary import vary

FIELDS = ("messages", "conversations", "prompt", "instruction", "question", "text")
ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}


@dataclass
class Counts:
    """What became of the records."""

    read: int = 0
    train: int = 0
    held_out: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def drop(self, why: str) -> None:
        self.dropped[why] = self.dropped.get(why, 0) + 1


def messages_of(record: dict[str, Any], name: str | None = None) -> list[dict[str, str]] | None:
    """The conversation up to its last user turn, from the field ``name`` or the first known one that is there; None
    when there is no text in it."""
    value = record.get(name) if name else next((record[f] for f in FIELDS if record.get(f)), None)
    if isinstance(value, str):
        turns = [{"role": "user", "content": value.strip()}]
    elif isinstance(value, list):
        turns = []
        for item in value:
            role = ROLES.get(str(item.get("role") or item.get("from"))) if isinstance(item, dict) else None
            content = (item.get("content") or item.get("value")) if isinstance(item, dict) else None
            if role == "system" and not content:
                continue  # many data sets have an empty one in every record
            if role is None or not isinstance(content, str):
                return None
            turns.append({"role": role, "content": content.strip()})
        while turns and turns[-1]["role"] != "user":
            turns.pop()
    else:
        return None
    return turns if turns and all(is_text(turn["content"]) for turn in turns) else None


def is_text(value: object) -> bool:
    """Text that can be written and tokenised: not blank, and without half a surrogate pair, which JSON can spell."""
    if not isinstance(value, str) or not value.strip():
        return False
    return not any("\ud800" <= character <= "\udfff" for character in value)


def normalised(messages: list[dict[str, str]]) -> str:
    """What two copies of a prompt have in common: letters and digits of all turns, lower case."""
    text = unicodedata.normalize("NFKC", "\n".join(turn["content"] for turn in messages)).lower()
    return re.sub(r"[\W_]+", " ", text).strip()


def place_of(text: str) -> tuple[str, float]:
    """A short id and a number in [0, 1), both functions of the text alone."""
    digest = hashlib.sha256(text.encode()).digest()
    return digest[:8].hex(), int.from_bytes(digest[8:16], "big") / 2**64


def read_file(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a JSONL or Parquet file. Raises ValueError naming the line."""
    if path.suffix == ".parquet":
        from pyarrow import parquet  # type: ignore[import-untyped]

        for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):
            yield from batch.to_pylist()
        return
    for number, record in read_lines(path):
        if not isinstance(record, dict):
            raise ValueError(f"{path} line {number} must be an object, got {type(record).__name__}")
        yield record


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Number (from 1) and value of every line of a JSONL file (.gz too) that is not blank. Raises ValueError naming the
    line that is not JSON or not UTF-8."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path} line {number} is not JSON in UTF-8: {error}") from None
            yield number, value


def read_hub(name: str) -> Iterator[dict[str, Any]]:
    """Records of a hub data set, streamed; ``DATASET[:SPLIT[:CONFIG]]``. Raises ValueError when it cannot be opened."""
    from datasets import load_dataset

    dataset, split, config = [*name.split(":"), "", ""][:3]
    try:
        stream = load_dataset(dataset, config or None, split=split or "train", streaming=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"hub data set {dataset}: {next(iter(str(error).splitlines()), type(error).__name__)}"
        ) from error
    yield from stream


def write_self(recipe: Recipe, count: int, seed: int, device: str, slots: int) -> Iterator[dict[str, Any]]:
    """User turns sampled from the target, which is shown its chat template up to where a user's words begin."""
    import torch

    from drafter_train.chat import ChatTokenizer
    from drafter_train.rollout import Job, roll_out
    from drafter_train.target import Target
    from drafter_train.tokens import Response

    chat = ChatTokenizer(recipe.target, recipe.data.thinking)
    marker = "\u2603prompt\u2603"
    before, found, after = chat.render([{"role": "user", "content": marker}]).partition(marker)
    if not found:
        raise ValueError(f"{recipe.target}: the chat template does not show the user's words")
    # What closes the turn, cut to its first token: "<|im_end|>" in ChatML.
    end = after.split("\n")[0]
    prefix = np.array(chat.encode_text(before))
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    torch.manual_seed(seed)
    target = Target.load(recipe.target, device, dtype)
    room = min(256, recipe.data.max_prompt_tokens)
    answers: list[Response] = []
    for start in range(0, count, slots):
        jobs = [
            Job(i, 0, prefix, room, sampled_tokens=room, temperature=1.0, top_p=0.95, top_k=64)
            for i in range(start, min(start + slots, count))
        ]
        answers.clear()
        roll_out(target, jobs, answers.append, slots=slots)
        for answer in sorted(answers, key=lambda item: item.prompt):
            text = chat.decode(answer.ids.tolist())
            text, closed, _ = text.partition(end) if end else (text, "", "")
            # A turn that never ends is not one a user would send.
            yield {"prompt": text if closed or answer.ended else "", "category": "self"}


class Collector:
    """Keeps what passes the filter, once, on the side its hash says."""

    def __init__(self, train: TextIO, held_out: TextIO, args: argparse.Namespace, seen: set[str]) -> None:
        self._files = (train, held_out)
        self._args, self._seen = args, seen
        self.counts = Counts()

    def take(self, record: dict[str, Any], category: str) -> None:
        self.counts.read += 1
        messages = messages_of(record, self._args.field)
        if messages is None:
            return self.counts.drop("no text")
        length = sum(len(turn["content"]) for turn in messages)
        if length < self._args.min_chars:
            return self.counts.drop("too short")
        if length > self._args.max_chars:
            return self.counts.drop("too long")
        name, place = place_of(normalised(messages))
        if name in self._seen:
            return self.counts.drop("duplicate")
        self._seen.add(name)
        line = {"id": name, "category": str(record.get("category") or category), "messages": messages}
        held_out = place < self._args.hold_out
        self._files[held_out].write(json.dumps(line, ensure_ascii=False) + "\n")
        if held_out:
            self.counts.held_out += 1
        else:
            self.counts.train += 1
        return None


def known_ids(*paths: Path) -> set[str]:
    """Ids of whole lines; a last line that a kill cut short is taken off its file."""
    found: set[str] = set()
    for path in paths:
        if not path.exists():
            continue
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            path.write_bytes(whole)
        found.update(json.loads(line)["id"] for line in whole.splitlines())
    return found


def records_of(source: str, recipe: Recipe, args: argparse.Namespace) -> tuple[Iterable[dict[str, Any]], str]:
    """Records of one source, and the category of those that name none. Raises ValueError for an unknown source."""
    kind, _, name = source.partition(":")
    if kind == "file":
        return read_file(Path(name)), Path(name).name.split(".")[0]
    if kind == "hub" and name:
        return read_hub(name), name.split(":")[0].split("/")[-1]
    if kind == "self" and name.isdigit() and int(name):
        return write_self(recipe, int(name), args.seed, args.device, args.slots), "self"
    times, _, path = name.partition(":")
    if kind == "vary" and times.isdigit() and path:
        return vary(read_file(Path(path)), int(times)), "varied"
    raise ValueError(
        f"source must be file:PATH, hub:DATASET[:SPLIT[:CONFIG]], vary:TIMES:PATH or self:COUNT, got {source!r}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m drafter_train.prompts", description=__doc__)
    add_recipe_arguments(parser)
    parser.add_argument("sources", nargs="+", metavar="SOURCE")
    parser.add_argument("--field", help=f"record field with the prompt (default: the first of {', '.join(FIELDS)})")
    parser.add_argument("--hold-out", type=float, default=0.02, help="share kept for evaluation (default: 0.02)")
    parser.add_argument("--min-chars", type=int, default=12)
    parser.add_argument("--max-chars", type=int, default=6000)
    parser.add_argument("--limit", type=int, default=0, help="read at most N records of each source (0: all)")
    parser.add_argument("--seed", type=int, default=0, help="of self-written prompts")
    parser.add_argument("--slots", type=int, default=256, help="self-written prompts at the same time (default: 256)")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    recipe = recipe_from(args, parser)
    if not 0 <= args.hold_out < 1:
        parser.error(f"--hold-out must be at least 0 and below 1, got {args.hold_out}")
    if args.slots < 1 or args.limit < 0:
        parser.error(f"--slots must be 1 or more, --limit 0 or more: {args.slots}, {args.limit}")
    train, held_out = Path(recipe.data.prompts), Path(recipe.data.eval_prompts)
    for path in (train, held_out):
        if path.suffix == ".gz":
            parser.error(f"{path}: prompts are appended to plain JSONL; drop .gz from the recipe")
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        seen = known_ids(train, held_out)
        if seen:
            say(f"{len(seen)} prompts are there already")
        with train.open("a", encoding="utf-8") as a, held_out.open("a", encoding="utf-8") as b:
            collector = Collector(a, b, args, seen)
            for source in args.sources:
                records, category = records_of(source, recipe, args)
                for number, record in enumerate(records):
                    if args.limit and number >= args.limit:
                        break
                    collector.take(record, category)
                    if number % 10_000 == 9_999:
                        say(f"{source}: {number + 1} read, {collector.counts.train} kept")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    counts = collector.counts
    dropped = ", ".join(f"{n} {why}" for why, n in sorted(counts.dropped.items())) or "none"
    say(f"{counts.read} read; {counts.train} to {train}, {counts.held_out} to {held_out}; dropped: {dropped}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
