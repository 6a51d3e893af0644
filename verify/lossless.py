"""The losslessness audit: speculative decoding must write exactly the tokens that plain decoding writes.

    python -m verify.lossless --model-dir D [--drafter-dir D] --prompts N --max-new M

Every prompt is decoded greedily by the real engine: first plainly, one request at a time, from a cold cache (the
reference); then in every other arm: plain and speculative, one and eight requests at a time, cold and warm prefix
cache, requests preempted again and again, block lengths chosen by the controller, at random, and drafts that
are the reference with random faults (so that every acceptance length occurs). Ids are compared one by one. The last
line is one JSON object; the exit status is 1 on a mismatch, each shown with the margin between the two best tokens, and
2 where nothing could be audited.

This command sits above the engine that it audits; nothing in ``serve`` imports it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

from serve.api.chat import ChatTemplateError, load_chat_renderer
from serve.config import PROPOSERS, WEIGHT_FORMATS, ServeConfig
from serve.drafter.base import DraftRequest
from serve.engine.build import StartError, build_engine
from serve.engine.engine import Engine
from serve.protocol import SamplingParams
from verify.block_length import BlockLengthController, Candidate

Answers = list[tuple[int, ...]]
PREEMPT_EVERY = 7
"""Steps between forced preemptions of the newest request."""

SUBJECTS = (
    "the water cycle", "a lighthouse keeper", "bubble sort", "the French Revolution", "photosynthesis", "a lost dog",
    "binary numbers", "making bread", "the moon landing", "a train journey", "prime numbers", "coral reefs",
    "the printing press", "a job interview", "gravity", "an old violin", "recycling", "the Silk Road", "chess openings",
    "a rainy Sunday",
)  # fmt: skip
TASKS = (
    "Explain {0} to a child.",
    "Write a short poem about {0}.",
    "List five facts about {0}.",
    "Write a Python function that has something to do with {0}.",
    "Repeat this sentence four times: I know a lot about {0}.",
    "Translate into French: I would like to learn about {0}.",
    "Summarize in one sentence: {0} is a subject that many people find interesting, and {0} can be studied for years.",
    "Count from 1 to 30 and then say one thing about {0}.",
    "Write an e-mail that invites a friend to a talk about {0}.",
    "What is {0}? Answer with a JSON object with the keys name and description.",
)


@dataclass(frozen=True)
class Arm:
    """One way to decode all prompts. ``lengths``: "plain", "auto" (the served controller), "random" or "rehearsed"."""

    name: str
    lengths: str
    batch: int
    warm: bool = False
    preempt: bool = False


ARMS = (
    Arm("plain, batch 1, cold", "plain", 1),
    Arm("plain, batch 8, warm", "plain", 8, warm=True),
    Arm("plain, batch 8, preempted", "plain", 8, preempt=True),
    Arm("auto, batch 1, cold", "auto", 1),
    Arm("auto, batch 8, warm", "auto", 8, warm=True),
    Arm("random lengths, batch 8, preempted", "random", 8, preempt=True),
    Arm("rehearsed drafts, batch 1, warm", "rehearsed", 1, warm=True),
    Arm("rehearsed drafts, batch 8, preempted", "rehearsed", 8, preempt=True),
)


@dataclass
class Mismatch:
    arm: str
    prompt: int
    position: int
    reference: int | None
    got: int | None
    margin: float | None


@dataclass
class Audit:
    """What was compared; ``report`` is the last line of the command."""

    compared: int = 0
    tokens: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)
    acceptance: dict[str, float] = field(default_factory=dict)
    preemptions: int = 0
    prefix_hits: int = 0


class RandomLengths(BlockLengthController):
    """Lengths drawn at random, 0 and the longest included, so that every shape of a round occurs."""

    def __init__(self, like: BlockLengthController) -> None:
        super().__init__(like.costs, like.max_length)
        self._random = random.Random(20260)

    def plan(
        self,
        candidates: Sequence[Candidate],
        plain_rows: int,
        plain_tokens: int | None = None,
        row_limit: int | None = None,
    ) -> list[int]:
        room = (row_limit or 1 << 30) - plain_rows - len(candidates)
        lengths = []
        for candidate in candidates:
            length = max(0, min(self._random.randint(0, candidate.max_length), room))
            room -= length
            lengths.append(length)
        return lengths


class RehearsedDrafts:
    """Stands in for the block drafter: the known answer, each token spoilt with probability ``fault``."""

    name = "block"

    def __init__(self, answers: dict[tuple[int, ...], tuple[int, ...]], vocab_size: int, fault: float = 0.2) -> None:
        self._answers = answers
        self._vocab_size = vocab_size
        self._fault = fault
        self._random = random.Random(4711)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        drafts = []
        for request in requests:
            prompt = next(p for p in self._answers if tuple(request.token_ids[: len(p)]) == p)
            done = len(request.token_ids) - len(prompt)
            known = self._answers[prompt][done : done + request.max_length]
            drafts.append(
                [t if self._random.random() > self._fault else self._random.randrange(self._vocab_size) for t in known]
            )
        return drafts


def builtin_prompts() -> Iterator[str]:
    """Different prompts without end: ten tasks over twenty subjects, then numbered variants."""
    for index in count():
        subject = SUBJECTS[(index // len(TASKS)) % len(SUBJECTS)]
        again = index // (len(TASKS) * len(SUBJECTS))
        suffix = f" (variant {again + 1})" if again else ""
        yield TASKS[index % len(TASKS)].format(subject) + suffix


def read_prompts(path: Path) -> Iterator[str]:
    """The values of "prompt" in a JSONL file; lines that are blank are none. ValueError for what is no such file."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path} line {number} is not JSON: {error}") from None
            if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
                raise ValueError(f'{path} line {number} has no text in the field "prompt"')
            yield entry["prompt"]


def decode_all(engine: Engine, prompts: Sequence[Sequence[int]], arm: Arm, max_new: int) -> Answers:
    """Decode every prompt greedily with at most ``arm.batch`` requests alive; the answers in the prompts' order."""
    if not arm.warm:
        engine.scheduler.pool.forget()
    answers: list[list[int]] = [[] for _ in prompts]
    params = SamplingParams(max_tokens=max_new)
    queue = list(range(len(prompts)))[::-1]
    alive = steps = 0
    last_report = time.monotonic()
    while queue or alive:
        while queue and alive < arm.batch:
            index = queue.pop()
            engine.add(str(index), prompts[index], params)
            alive += 1
        steps += 1
        if arm.preempt and steps % PREEMPT_EVERY == 0 and engine.scheduler.running:
            engine.scheduler.preempt(max(engine.scheduler.running, key=lambda s: s.order))
            if steps % (2 * PREEMPT_EVERY) == 0:
                engine.scheduler.pool.forget()  # and nothing of it is found again: all is recomputed
        for output in engine.step():
            answers[int(output.id)] += output.token_ids
            if output.finish_reason == "error":
                raise RuntimeError(f"prompt {output.id} failed: {output.error}")
            alive -= output.finish_reason is not None
        if time.monotonic() - last_report > 20:
            last_report = time.monotonic()
            print(f"  {len(prompts) - len(queue) - alive}/{len(prompts)} prompts", flush=True)
    engine.check()
    return [tuple(answer) for answer in answers]


def margin_at(engine: Engine, token_ids: Sequence[int]) -> float | None:
    """Difference of the target's two best log-probabilities for the token after ``token_ids``; None where the engine
    could not say."""
    engine.scheduler.pool.forget()
    engine.add("margin", token_ids, SamplingParams(max_tokens=1, logprobs=2, ignore_eos=True))
    margin = None
    while engine.has_work:
        for output in engine.step():
            if output.logprobs:
                top = output.logprobs[0].top
                margin = top[0][1] - top[1][1]
    return margin


def audit(config: ServeConfig, texts: Sequence[str], max_new: int, arms: Sequence[Arm] = ARMS) -> Audit:
    """Decode ``texts`` (one at least) in every arm and compare with the first, which must be plain. Raises StartError,
    also where a prompt and its answer do not fit the context, and ChatTemplateError."""
    result = Audit()
    engine, info = build_engine(config)
    print(f"{info['weights']} weights, {info['kernel_path']}, proposer {info['proposer']}", flush=True)
    renderer = load_chat_renderer(Path(config.model_dir), engine.tokenizer)
    prompts = [tuple(renderer.encode([{"role": "user", "content": text}])) for text in texts]
    longest = max(map(len, prompts))
    if longest + max_new > engine.max_model_len:
        raise StartError(
            f"--max-new {max_new}: with the longest prompt ({longest}) it must be at most the context of "
            f"{engine.max_model_len} tokens"
        )
    reference: Answers = []
    served = (engine.controller, engine.lookup, engine.block)
    for arm in arms:
        started = time.monotonic()
        engine.controller, engine.lookup, engine.block = served
        _set_up(engine, arm, prompts, reference)
        before = engine.stats()
        answers = decode_all(engine, prompts, arm, max_new)
        after = engine.stats()
        reference = reference or answers
        _compare(result, engine, arm, prompts, reference, answers)
        drafts = after.drafts - before.drafts
        accepted = after.accepted_tokens - before.accepted_tokens
        preemptions = after.preemptions - before.preemptions
        result.preemptions += preemptions
        result.prefix_hits += after.prefix_hits - before.prefix_hits
        if drafts:
            result.acceptance[arm.name] = round(1 + accepted / drafts, 3)
        print(
            f"{arm.name}: {len(prompts)} prompts, {sum(map(len, answers))} tokens, {drafts} drafts, "
            f"{accepted} accepted, {preemptions} preemptions, {len(result.mismatches)} mismatches so far, "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
    return result


def _set_up(engine: Engine, arm: Arm, prompts: Sequence[tuple[int, ...]], reference: Answers) -> None:
    if arm.lengths == "plain":
        engine.lookup = engine.block = None
    elif arm.lengths == "random":
        engine.controller = RandomLengths(engine.controller)
    elif arm.lengths == "rehearsed":
        engine.controller = RandomLengths(engine.controller)
        engine.lookup = None
        known = dict(zip(prompts, reference, strict=True))
        engine.block = RehearsedDrafts(known, engine.runner.model.config.vocab_size)


def _compare(
    result: Audit, engine: Engine, arm: Arm, prompts: Sequence[tuple[int, ...]], reference: Answers, answers: Answers
) -> None:
    for index, (expected, got) in enumerate(zip(reference, answers, strict=True)):
        result.compared += 1
        result.tokens += len(expected)
        if expected == got:
            continue
        length = min(len(expected), len(got))
        position = next((i for i in range(length) if expected[i] != got[i]), length)
        margin = margin_at(engine, [*prompts[index], *expected[:position]]) if len(result.mismatches) < 50 else None
        mismatch = Mismatch(
            arm.name,
            index,
            position,
            expected[position] if position < len(expected) else None,
            got[position] if position < len(got) else None,
            margin,
        )
        result.mismatches.append(mismatch)
        print(f"MISMATCH {mismatch}", flush=True)


def report(result: Audit, prompts: int, max_new: int, weights: str) -> dict[str, Any]:
    return {
        "prompts": prompts,
        "max_new": max_new,
        "weights": weights,
        "compared": result.compared,
        "tokens": result.tokens,
        "mismatches": len(result.mismatches),
        "preemptions": result.preemptions,
        "prefix_hit_tokens": result.prefix_hits,
        "acceptance_length": result.acceptance,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m verify.lossless", description="Compare speculative with plain ids."
    )
    parser.add_argument("--model-dir", required=True, help="folder of the target model")
    parser.add_argument("--drafter-dir", help="folder of a block drafter; prompt lookup alone when not given")
    parser.add_argument("--prompts", type=int, default=200, help="number of prompts (default: 200)")
    parser.add_argument("--first", type=int, default=0, help="number of the first prompt, to share the work out")
    parser.add_argument(
        "--prompts-file", type=Path, help='JSONL with a "prompt" field; built-in prompts when not given'
    )
    parser.add_argument("--max-new", type=int, default=128, help="tokens per answer at most (default: 128)")
    parser.add_argument("--weights", default="fp32", choices=WEIGHT_FORMATS, help="weight format (default: fp32)")
    parser.add_argument("--proposer", default="auto", choices=PROPOSERS, help="proposer of the auto and random arms")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 is every core")
    args = parser.parse_args(argv)
    if args.prompts < 1 or args.max_new < 1:
        parser.error("--prompts and --max-new must be at least 1")
    if args.first < 0:
        parser.error("--first must not be negative")
    source = read_prompts(args.prompts_file) if args.prompts_file else builtin_prompts()
    try:
        texts = list(islice(source, args.first, args.first + args.prompts))
    except (OSError, ValueError) as error:
        parser.error(f"--prompts-file: {error}")
    if not texts:
        parser.error(f"--prompts-file {args.prompts_file} has no prompt from number {args.first} on: nothing to audit")
    config = ServeConfig(
        model_dir=args.model_dir,
        drafter_dir=args.drafter_dir,
        weights=args.weights,
        proposer=args.proposer,
        device=args.device,
        threads=args.threads,
        max_num_seqs=8,
    )
    try:
        result = audit(config, texts, args.max_new)
    except (StartError, ChatTemplateError) as error:
        print(f"cannot start: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report(result, len(texts), args.max_new, args.weights)))
    return 1 if result.mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
