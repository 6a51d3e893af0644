"""``python -m eval.gate``: does the served model still answer like the unquantised one?

Few-shot, direct-answer, greedy multiple choice through the chat API. The question set is made of those questions that
the reference answers with the same letter however the examples are ordered (and, with ``--only-correct``, rightly), so
that a changed answer means a changed model. 200 questions with 95 % agreement pass the real gate, so below 98.5 % there
is a warning. Needs httpx only; it knows no scenario and no timing.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from eval.client import open_client, served_model
from eval.json_report import write_report
from eval.letters import Letters, letters_of
from eval.options import new_file, positive
from eval.stats import Interval, binomial_at_least, exact_binomial

DATA = Path(__file__).resolve().parent / "data"
LETTERS = "ABCDEFGHIJ"
PASS_SHARE, WARN_SHARE = 0.95, 0.985
HIDDEN_QUESTIONS = 200
EMPTY = (
    "the question set is empty, and was not written: the reference answered nothing consistently. Give more questions, "
    "or ask for less (without --rotate, without --only-correct)"
)


@dataclass(frozen=True)
class Question:
    """One multiple-choice question; ``answer`` is an index into ``choices``."""

    id: str
    question: str
    choices: tuple[str, ...]
    answer: int

    def block(self) -> str:
        options = "\n".join(f"{LETTERS[index]}. {choice}" for index, choice in enumerate(self.choices))
        return f"Question: {self.question}\n{options}\nAnswer:"

    def rotated(self, by: int) -> Question:
        """The same question with every option ``by`` places further on, around the end."""
        size = len(self.choices)
        moved = tuple(self.choices[(place - by) % size] for place in range(size))
        return Question(self.id, self.question, moved, (self.answer + by) % size)


@dataclass(frozen=True)
class Kept:
    """A question of the set with the letter the reference gives."""

    question: Question
    expected: str


Answer = str | Exception | None
"""A letter, the exception of a request that failed, or None for an answer without a letter."""


@dataclass(frozen=True)
class Verdict:
    """Agreement with the reference. ``chance`` is the probability to pass 200 hidden questions at this agreement."""

    asked: int
    agreed: int
    correct: int
    unparsed: int
    failed: int
    interval: Interval
    chance: float
    different: tuple[str, ...]
    letters: Letters

    @property
    def passed(self) -> bool:
        return self.agreed >= PASS_SHARE * self.asked

    @property
    def warned(self) -> bool:
        return self.agreed < WARN_SHARE * self.asked

    def lines(self) -> list[str]:
        state = "PASS" if self.passed else "FAIL"
        text = [
            f"gate: {state}  agreement {self.agreed}/{self.asked} = {self.interval.value:.2%} "
            f"(95 % interval {self.interval.low:.2%} .. {self.interval.high:.2%}), pass at {PASS_SHARE:.0%}",
            f"right answers {self.correct}/{self.asked}; no letter in {self.unparsed}; failed requests {self.failed}",
            f"chance to pass {HIDDEN_QUESTIONS} hidden questions at this agreement: {self.chance:.2%}",
            *self.letters.lines(),
        ]
        if self.passed and self.warned:
            text.append(f"WARNING: below {WARN_SHARE:.1%}; aim higher before a graded run")
        return text


def load_questions(path: Path) -> list[Question]:
    """Questions of a JSONL file (gzip by its name). ValueError names the line and the field that is wrong."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    questions: list[Question] = []
    with opener(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                questions.append(_parse(line, f"{path.name} line {number}"))
    if not questions:
        raise ValueError(f"{path}: no questions")
    return questions


def _parse(line: str, where: str) -> Question:
    try:
        row = json.loads(line)
    except ValueError as fault:
        raise ValueError(f"{where}: not JSON") from fault
    if not isinstance(row, dict):
        raise ValueError(f"{where}: must be an object, got {type(row).__name__}")
    for name, kind in (("question", str), ("choices", list), ("answer", int)):
        if not isinstance(row.get(name), kind):
            raise ValueError(f"{where}: field {name!r} must be a {kind.__name__}")
    if not 2 <= len(row["choices"]) <= len(LETTERS):
        raise ValueError(f"{where}: field 'choices' must have 2 to {len(LETTERS)} entries")
    if not 0 <= row["answer"] < len(row["choices"]):
        raise ValueError(f"{where}: field 'answer' must be an index into choices, got {row['answer']}")
    choices = tuple(str(choice) for choice in row["choices"])
    return Question(str(row.get("id", where)), row["question"], choices, row["answer"])


def prompt(question: Question, examples: Sequence[Question]) -> str:
    """The few-shot prompt of one question."""
    head = "Answer each multiple-choice question with the letter of the right choice only.\n\n"
    shots = "".join(f"{item.block()} {LETTERS[item.answer]}\n\n" for item in examples)
    return head + shots + question.block()


def letter_of(text: str, choices: int) -> str | None:
    """The letter an answer begins with: "B", "B.", "(b)", "Answer: B"; None when there is none."""
    match = re.match(r"\s*(?:answer\s*(?:is|:)?\s*)?[(\[*\"']*([A-Ja-j])(?![A-Za-z])", text, re.IGNORECASE)
    if match is None:
        return None
    letter = match.group(1).upper()
    return letter if LETTERS.index(letter) < choices else None


async def ask(
    url: str,
    questions: Sequence[Question],
    examples: Sequence[Question],
    at_once: int = 8,
    max_tokens: int = 4,
    title: str = "asked",
    answers: dict[int, Answer] | None = None,
) -> list[Answer]:
    """The letter for every question: None for an answer without one, the exception of a request that failed. Each tenth
    of the way is told on stderr under ``title``. ``answers`` gets each answer under its question's place when it comes,
    so that an interrupted caller has those."""
    step, done = max(1, len(questions) // 10), 0
    found: dict[int, Answer] = {} if answers is None else answers
    async with open_client(url) as client:
        model = await served_model(client)
        gate = asyncio.Semaphore(at_once)

        async def one(place: int, question: Question) -> None:
            nonlocal done
            body = {
                "model": model,
                "messages": [{"role": "user", "content": prompt(question, examples)}],
                "max_tokens": max_tokens,
                "temperature": 0,
            }
            async with gate:
                try:
                    response = await client.post("/v1/chat/completions", json=body)
                    response.raise_for_status()
                    text = response.json()["choices"][0]["message"]["content"] or ""
                    found[place] = letter_of(text, len(question.choices))
                except (httpx.HTTPError, ValueError, LookupError) as fault:
                    found[place] = fault
                done += 1
                if done % step == 0:
                    print(f"{title}: {done} of {len(questions)}", file=sys.stderr, flush=True)

        await asyncio.gather(*(one(place, question) for place, question in enumerate(questions)))
        return [found[place] for place in range(len(questions))]


async def build_set(
    url: str,
    questions: Sequence[Question],
    examples: Sequence[Question],
    only_correct: bool = False,
    limit: int | None = None,
    at_once: int = 8,
    rotate: bool = False,
) -> list[Kept]:
    """Questions the reference answers with one letter under three orders of the examples; with ``rotate`` also with
    one option wherever it stands, each then kept at one of its rotations, in turn, so that letters come out even.

    RuntimeError when a request fails: a set built on failures would blame the wrong server.
    """
    orders = [list(examples), list(examples)[::-1], random.Random(0).sample(list(examples), len(examples))]
    kept = [Kept(question, "") for question in questions]
    for index, order in enumerate(orders, 1):
        title = f"reference, order {index} of {len(orders)}"
        kept = _alike(kept, await ask(url, [item.question for item in kept], order, at_once, title=title))
        print(f"{title}: {len(kept)} of {len(questions)} are left", file=sys.stderr, flush=True)
    if rotate:
        turns = max((len(item.question.choices) for item in kept), default=1)
        for by in range(1, turns):
            moved = [Kept(item.question.rotated(by), LETTERS[_moved(item, by)]) for item in kept]
            title = f"reference, options moved by {by} of {turns - 1}"
            answers = await ask(url, [item.question for item in moved], orders[0], at_once, title=title)
            # Moved back, not looked up by id: files put together may give one id to two questions.
            kept = [Kept(item.question.rotated(-by), LETTERS[_moved(item, -by)]) for item in _alike(moved, answers)]
            print(f"{title}: {len(kept)} of {len(questions)} are left", file=sys.stderr, flush=True)
    if only_correct:
        kept = [item for item in kept if item.expected == LETTERS[item.question.answer]]
    if rotate:
        kept = [Kept(item.question.rotated(by), LETTERS[_moved(item, by)]) for by, item in enumerate(kept)]
    return kept[:limit]


def _moved(item: Kept, by: int) -> int:
    """Where the expected option stands after a rotation."""
    return (LETTERS.index(item.expected) + by) % len(item.question.choices)


def _alike(kept: Sequence[Kept], answers: Sequence[Answer]) -> list[Kept]:
    """Those whose answer is a letter, and the expected one where there is one already."""
    found: list[Kept] = []
    for item, answer in zip(kept, answers, strict=True):
        if isinstance(answer, Exception):
            raise RuntimeError(f"the reference failed on {item.question.id}: {answer}")
        if isinstance(answer, str) and item.expected in ("", answer):
            found.append(Kept(item.question, answer))
    return found


async def judge(url: str, kept: Sequence[Kept], examples: Sequence[Question], at_once: int = 8) -> Verdict:
    """Asks the server under test and compares. A failed request counts as a disagreement."""
    if not kept:
        raise ValueError(EMPTY)
    return verdict_of(kept, await ask(url, [item.question for item in kept], examples, at_once))


def verdict_of(kept: Sequence[Kept], answers: Sequence[Answer]) -> Verdict:
    """The comparison alone, of at least one question; ``answers`` as ``ask`` gives them."""
    agreed = [answer == item.expected for answer, item in zip(answers, kept, strict=True)]
    share = exact_binomial(sum(agreed), len(kept))
    return Verdict(
        asked=len(kept),
        agreed=sum(agreed),
        correct=sum(a == LETTERS[item.question.answer] for a, item in zip(answers, kept, strict=True)),
        unparsed=sum(answer is None for answer in answers),
        failed=sum(isinstance(answer, Exception) for answer in answers),
        interval=share,
        chance=binomial_at_least(round(PASS_SHARE * HIDDEN_QUESTIONS), HIDDEN_QUESTIONS, share.value),
        different=tuple(item.question.id for item, same in zip(kept, agreed, strict=True) if not same),
        letters=letters_of(
            [item.expected for item in kept],
            [answer if isinstance(answer, str) else "-" for answer in answers],
            [LETTERS[item.question.answer] for item in kept],
        ),
    )


def save_set(path: Path, kept: Sequence[Kept]) -> None:
    """Writes a question set that ``load_set`` reads: a question line with the reference's letter."""
    lines = [json.dumps({**asdict(item.question), "expected": item.expected}) for item in kept]
    path.write_text("\n".join(lines) + "\n")


def load_set(path: Path) -> list[Kept]:
    """Reads a set written by ``save_set``. ValueError for a file that is none, or a file of questions alone."""
    questions = load_questions(path)
    rows = [json.loads(line).get("expected") for line in path.read_text().splitlines() if line.strip()]
    if not all(isinstance(letter, str) for letter in rows):
        raise ValueError(f"{path} is no question set: its lines need 'expected', the letter that the reference gave")
    return [Kept(question, expected) for question, expected in zip(questions, rows, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.gate", description=__doc__)
    parser.add_argument("--url", help="server to judge; without it the set is only built")
    parser.add_argument("--questions", type=Path, default=DATA / "gate_small.jsonl", help="JSONL (or .gz) of questions")
    parser.add_argument("--examples", type=Path, default=DATA / "gate_examples.jsonl", help="the few-shot examples")
    parser.add_argument("--set", type=Path, help="question set file: read if it is there, else built and written")
    parser.add_argument("--reference-url", help="running unquantised reference that the set is built from")
    parser.add_argument("--reference-model", type=Path, help="model folder to serve unquantised as the reference")
    parser.add_argument("--only-correct", action="store_true", help="keep only what the reference answers rightly")
    parser.add_argument("--rotate", action="store_true", help="keep only questions whose answer the reference gives "
                        "wherever it stands among the options")  # fmt: skip
    parser.add_argument("--candidates", type=positive, help="use the first N questions only")
    parser.add_argument("--limit", type=positive, help="keep at most N questions in the set")
    parser.add_argument("--at-once", type=positive, default=8, help="requests in flight (default: 8)")
    parser.add_argument("--json", type=new_file, help="write the verdict here")
    args = parser.parse_args(argv)
    try:
        return _run(parser, args)
    except (OSError, ValueError, RuntimeError) as fault:
        print(fault, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: the question set is not whole and was not written", file=sys.stderr)
        return 130


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    examples = load_questions(args.examples)
    if args.set and args.set.is_file():
        kept = load_set(args.set)
    else:
        kept = _build(parser, args, examples)
        if not kept:
            raise ValueError(EMPTY)
        print(f"question set: {len(kept)} questions that the reference answers consistently", file=sys.stderr)
        if args.set:
            save_set(args.set, kept)
    if not args.url:
        return 0
    answers: dict[int, Answer] = {}
    try:
        asyncio.run(ask(args.url, [item.question for item in kept], examples, args.at_once, answers=answers))
    except KeyboardInterrupt:
        print(f"interrupted: {len(answers)} of {len(kept)} answers are judged", file=sys.stderr)
        if not answers:
            return 130
    places = sorted(answers)
    verdict = verdict_of([kept[place] for place in places], [answers[place] for place in places])
    print("\n".join(verdict.lines()))
    fault = next((answers[place] for place in places if isinstance(answers[place], Exception)), None)
    if fault is not None:
        print(f"the first failed request: {fault}", file=sys.stderr)
    if args.json:
        report = {**asdict(verdict), "passed": verdict.passed, "warned": verdict.warned, "set": len(kept)}
        write_report(args.json, report)
    return 130 if len(places) < len(kept) else 0 if verdict.passed else 1


def _build(parser: argparse.ArgumentParser, args: argparse.Namespace, examples: Sequence[Question]) -> list[Kept]:
    questions = load_questions(args.questions)[: args.candidates]
    options: tuple[bool, int | None, int, bool] = (args.only_correct, args.limit, args.at_once, args.rotate)
    if args.reference_url:
        return asyncio.run(build_set(args.reference_url, questions, examples, *options))
    if args.reference_model:
        from eval.servers import end_on_sigterm, naive_server

        end_on_sigterm()

        with naive_server(args.reference_model) as server:
            return asyncio.run(build_set(server.url, questions, examples, *options))
    return parser.error("there is no question set yet: give --reference-url or --reference-model to build it")


if __name__ == "__main__":
    sys.exit(main())
