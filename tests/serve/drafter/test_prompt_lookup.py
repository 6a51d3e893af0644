"""Prompt lookup: the longest, latest match is continued, loops go on, the index never outlives its request."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from serve.drafter.base import DraftRequest
from serve.drafter.prompt_lookup import LONGEST_MATCH, MAX_PLACES, LookupDraft, PromptLookup


def look(
    tokens: list[int], max_length: int = 4, proposer: PromptLookup | None = None, request_id: str = "a"
) -> LookupDraft:
    return (proposer or PromptLookup()).lookup(DraftRequest(request_id, tokens, max_length))


def test_continues_what_followed_the_same_tokens_before() -> None:
    found = look([5, 6, 7, 8, 9, 1, 5, 6], 3)
    assert found == LookupDraft((7, 8, 9), 2)
    assert found.source == "lookup:2"


def test_a_longer_match_beats_a_later_one_and_the_latest_wins_among_equals() -> None:
    tokens = [1, 2, 3, 70, 9, 2, 3, 80, 1, 2, 3]
    assert look(tokens, 1) == LookupDraft((70,), 3)
    assert look([2, 3, 70, 9, 2, 3, 80, 2, 3], 1) == LookupDraft((80,), 2)


def test_nothing_to_go_by_gives_nothing() -> None:
    for tokens in ([], [1], [1, 1], [1, 2, 3, 4, 5]):
        assert look(tokens) == LookupDraft()
        assert PromptLookup().propose([DraftRequest("a", tokens, 4)]) == [[]]


def test_a_loop_is_continued_past_its_own_end() -> None:
    assert look([1, 2, 3, 1, 2, 3], 7).token_ids == (1, 2, 3, 1, 2, 3, 1)
    assert look([4, 4, 4], 5).token_ids == (4, 4, 4, 4, 4)


def test_long_matches_are_capped_and_have_their_own_source() -> None:
    tokens = [*range(40), *range(40)]
    found = look(tokens[:70], 3)
    assert found.match_length == LONGEST_MATCH
    assert found.token_ids == (30, 31, 32)
    assert found.source == "lookup:10"


def naive(tokens: list[int], max_length: int) -> LookupDraft:
    best = LookupDraft()
    places = [p for p in range(len(tokens) - 1, 1, -1) if tokens[p - 2 : p] == tokens[-2:]][:MAX_PLACES]
    for place in places:
        length = 2
        while length < LONGEST_MATCH and length < place and tokens[place - length - 1] == tokens[-length - 1]:
            length += 1
        if length > best.match_length:
            copied = list(tokens[place:])
            while len(copied) < max_length:
                copied.append(copied[-(len(tokens) - place)])
            best = LookupDraft(tuple(copied[:max_length]), length)
    return best


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), max_size=80),
    steps=st.lists(st.integers(1, 9), max_size=12),
    max_length=st.integers(1, 9),
)
def test_growing_step_by_step_equals_a_search_from_scratch(
    tokens: list[int], steps: list[int], max_length: int
) -> None:
    proposer = PromptLookup()
    length = 0
    for step in [*steps, len(tokens)]:
        length = min(len(tokens), length + step)
        seen = tokens[:length]
        assert look(seen, max_length, proposer) == naive(seen, max_length)
        # The same tokens once more (a resumed request) change nothing.
        assert look(seen, max_length, proposer) == naive(seen, max_length)


def test_a_reused_request_id_does_not_see_the_old_text() -> None:
    proposer = PromptLookup()
    look([1, 2, 50, 51, 1, 2], 2, proposer)
    assert look([1, 2, 60, 61, 1, 2, 60, 62, 1, 2], 2, proposer).token_ids == (60, 62)
    assert look([7, 8, 9, 7, 8], 1, proposer).token_ids == (9,)  # shorter: cannot be a continuation


def test_requests_do_not_share_and_release_forgets() -> None:
    proposer = PromptLookup()
    look([1, 2, 3, 1, 2], 1, proposer, "a")
    assert look([1, 2], 1, proposer, "b") == LookupDraft()
    assert set(proposer._indexes) == {"a", "b"}
    proposer.release("a")
    proposer.release("a")
    assert set(proposer._indexes) == {"b"}
