from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval import gate
from eval.gate import (
    DATA,
    LETTERS,
    Kept,
    Question,
    build_set,
    judge,
    letter_of,
    load_questions,
    load_set,
    main,
    prompt,
    save_set,
)
from eval.letters import letters_of
from tests.eval.stub_server import running_stub

EXAMPLES = load_questions(DATA / "gate_examples.jsonl")
SMALL = load_questions(DATA / "gate_small.jsonl")


def answering(**wrong: str) -> dict[str, Any]:
    """A stub that knows every small question, except for the ids given with another answer."""
    answers = {}
    for item in SMALL:
        letter = wrong.get(item.id.replace("-", "_"), LETTERS[item.answer])
        answers[f"{item.block()}"] = letter
    return {"answers": answers}


def test_the_set_keeps_what_the_reference_answers_alike_under_every_order() -> None:
    with running_stub(**answering(small_03="no idea", small_04="A")) as (url, state):
        kept = asyncio.run(build_set(url, SMALL, EXAMPLES))
        right = asyncio.run(build_set(url, SMALL, EXAMPLES, only_correct=True, limit=5))
    assert len(kept) == 19
    assert {item.question.id for item in kept} == {item.id for item in SMALL} - {"small-03"}
    assert len(right) == 5
    assert all(item.expected == LETTERS[item.question.answer] for item in right)
    prompts = {body["messages"][0]["content"] for body in state.bodies if SMALL[0].question in str(body)}
    assert len(prompts) == 3
    assert all(body["temperature"] == 0 for body in state.bodies)


@pytest.mark.parametrize(("wrong", "passed", "warned"), [(0, True, False), (1, True, True), (2, False, True)])
def test_verdict_at_the_limits(wrong: int, passed: bool, warned: bool) -> None:
    with running_stub(**answering()) as (url, _):
        kept = asyncio.run(build_set(url, SMALL, EXAMPLES))
    changed = {f"small_{index:02d}": "J" for index in range(1, wrong + 1)}
    with running_stub(**answering(**changed)) as (url, _):
        verdict = asyncio.run(judge(url, kept, EXAMPLES))
    assert (verdict.passed, verdict.warned) == (passed, warned)
    assert verdict.agreed == 20 - wrong
    assert verdict.unparsed == wrong
    assert verdict.interval.low < verdict.interval.value or wrong == 0


def test_failed_requests_count_against_the_server_and_stop_a_reference() -> None:
    with running_stub(**answering()) as (url, _):
        kept = asyncio.run(build_set(url, SMALL[:3], EXAMPLES))
    with running_stub(failure=500) as (url, _):
        verdict = asyncio.run(judge(url, kept, EXAMPLES))
        assert (verdict.failed, verdict.agreed, verdict.passed) == (3, 0, False)
        with pytest.raises(RuntimeError, match="reference failed on small-01"):
            asyncio.run(build_set(url, SMALL[:3], EXAMPLES))


@pytest.mark.parametrize(
    ("text", "letter"),
    [("B", "B"), (" b.", "B"), ("(C) because", "C"), ("Answer: D", "D"), ("**A**", "A"), ("The answer", None),
     ("Because", None), ("", None), ("E", None), ("A fish", "A")],
)  # fmt: skip
def test_letters_are_read_from_the_beginning_of_an_answer(text: str, letter: str | None) -> None:
    assert letter_of(text, 4) == letter


def test_prompt_shows_examples_with_answers_and_ends_where_the_letter_belongs() -> None:
    text = prompt(SMALL[0], EXAMPLES)
    assert text.count("Answer:") == len(EXAMPLES) + 1
    assert text.endswith("Answer:")


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "not JSON"), ('{"question": "q", "choices": ["a", "b"]}', "'answer'"),
     ("[1]", "must be an object"), ('{"question": "q", "choices": ["a"], "answer": 0}', "2 to 10"),
     ('{"question": "q", "choices": ["a", "b"], "answer": 2}', "index into choices")],
)  # fmt: skip
def test_bad_question_files_name_line_and_field(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message) as fault:
        load_questions(path)
    assert "q.jsonl line 1" in str(fault.value)


def test_sets_survive_a_round_trip_and_the_command_line_uses_them(tmp_path: Path) -> None:
    path, out = tmp_path / "set.jsonl", tmp_path / "verdict.json"
    with running_stub(**answering()) as (url, _):
        kept = asyncio.run(build_set(url, SMALL, EXAMPLES))
        save_set(path, kept)
        assert load_set(path) == kept
        assert main(["--url", url, "--set", str(path), "--json", str(out)]) == 0
    assert json.loads(out.read_text())["agreed"] == 20


def test_questions_alone_are_no_set_and_the_first_failure_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"question": "q", "choices": ["a", "b"], "answer": 0}\n')
    assert main(["--url", "http://127.0.0.1:9", "--set", str(path)]) == 1
    assert "its lines need 'expected'" in capsys.readouterr().err
    save_set(path, [Kept(SMALL[0], "A")])
    with running_stub(failure=429) as (url, _):
        assert main(["--url", url, "--set", str(path)]) == 1
    assert "the first failed request: Client error '429" in capsys.readouterr().err


def test_without_a_set_or_a_reference_the_command_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--url", "http://127.0.0.1:9"])
    assert "--reference-url" in capsys.readouterr().err


def test_own_questions_are_well_formed_and_spread_over_the_letters() -> None:
    assert len({item.id for item in SMALL + EXAMPLES}) == len(SMALL) + len(EXAMPLES)
    assert {item.answer for item in SMALL} == {0, 1, 2, 3}
    assert isinstance(SMALL[0], Question)


def fixed_letter(letter: str) -> dict[str, Any]:
    """A stub that says one letter whatever is asked."""
    return {"answers": {"Question:": letter}}


def test_a_server_with_one_letter_agrees_with_itself_and_the_verdict_says_what_that_is_worth() -> None:
    with running_stub(**fixed_letter("B")) as (url, _):
        kept = asyncio.run(build_set(url, SMALL, EXAMPLES))
        verdict = asyncio.run(judge(url, kept, EXAMPLES))
        rotated = asyncio.run(build_set(url, SMALL, EXAMPLES, rotate=True))
    assert verdict.agreed == len(SMALL)
    assert verdict.letters.constant == 1.0
    assert verdict.letters.kappa is None
    text = "\n".join(verdict.lines())
    assert "WARNING: letter bias" in text
    assert "not answer better than its letters" in text
    assert rotated == []


def test_an_empty_set_is_said_and_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "set.jsonl"
    with running_stub(**fixed_letter("B")) as (url, _):
        assert main(["--reference-url", url, "--set", str(path), "--candidates", "3", "--rotate"]) == 1
    told = capsys.readouterr().err
    assert "options moved by 1 of 3: 0 of 3 are left" in told
    assert "the question set is empty, and was not written" in told
    assert not path.exists()


def test_rotation_keeps_what_is_known_and_evens_out_the_letters() -> None:
    with running_stub(knows={item.question: item.choices[item.answer] for item in SMALL}) as (url, _):
        kept = asyncio.run(build_set(url, SMALL, EXAMPLES, rotate=True))
        verdict = asyncio.run(judge(url, kept, EXAMPLES))
    assert len(kept) == len(SMALL)
    assert all(item.expected == LETTERS[item.question.answer] for item in kept)
    assert verdict.agreed == verdict.correct == len(kept)
    assert verdict.letters.kappa == 1.0
    assert not verdict.letters.biased
    assert "WARNING" not in "\n".join(verdict.lines())


def test_two_questions_of_one_id_are_judged_each_by_its_own_answers() -> None:
    known, guessed = replace(SMALL[0], id="same"), replace(SMALL[1], id="same")
    answers = {known.question: known.choices[known.answer]}
    with running_stub(knows=answers, answers={guessed.question: "B"}) as (url, _):
        kept = asyncio.run(build_set(url, [guessed, known], EXAMPLES, rotate=True))
    assert [item.question.question for item in kept] == [known.question]
    assert kept[0].expected == LETTERS[kept[0].question.answer]


def test_rotations_move_every_option_and_the_answer_with_them() -> None:
    question = Question("q", "which", ("w", "x", "y", "z"), 1)
    assert question.rotated(1) == Question("q", "which", ("z", "w", "x", "y"), 2)
    assert question.rotated(4) == question


def test_figures_of_letters_by_hand() -> None:
    found = letters_of(list("AABB"), list("AAAB"), list("ABBB"))
    assert found.reference == {"A": 2, "B": 2}
    assert found.served == {"A": 3, "B": 1}
    # 3 of 4 agree; by chance 2/4 * 3/4 + 2/4 * 1/4 = 1/2.
    assert found.kappa == pytest.approx(0.5)
    assert found.balanced == pytest.approx(0.75)
    assert (found.constant, found.reference_correct) == (0.5, 3)
    # Of the six ways to shuffle AABB three put an A where the right answer is A, which is all it takes.
    assert found.accuracy_p == pytest.approx(0.5, abs=0.05)


def test_an_interrupted_judgement_is_of_the_answers_that_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = [Question(f"q{n}", "Which?", ("one", "two"), 0) for n in range(5)]
    kept = tmp_path / "set.jsonl"
    save_set(kept, [Kept(question, "A") for question in questions])

    async def two_then_ctrl_c(*args: Any, answers: dict[int, Any], **more: Any) -> None:
        answers[3], answers[0] = "B", "A"
        raise KeyboardInterrupt

    monkeypatch.setattr(gate, "ask", two_then_ctrl_c)
    out = tmp_path / "verdict.json"
    assert gate.main(["--url", "http://u", "--set", str(kept), "--json", str(out)]) == 130
    told = json.loads(out.read_text())
    assert (told["asked"], told["agreed"], told["set"], told["different"]) == (2, 1, 5, ["q3"])
    assert "2 of 5 answers are judged" in capsys.readouterr().err
