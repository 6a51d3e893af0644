"""The page books: every page is free, held or cached at all times, and only equal text is ever shared."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serve.engine.pages import PagePool, root_hash

PAGE = 4


def fill(pool: PagePool, tokens: list[int], salt: str = "") -> list[int]:
    """Allocate and register all full pages of ``tokens``, as a finished prefill does."""
    pages = pool.allocate(pool.pages_for(len(tokens)))
    assert pages is not None
    parent = root_hash(salt)
    for index in range(len(tokens) // PAGE):
        parent = pool.register(pages[index], parent, tokens[index * PAGE : (index + 1) * PAGE])
    return pages


def test_a_released_prompt_is_found_again_except_for_its_last_token() -> None:
    pool = PagePool(8, PAGE)
    tokens = list(range(8))
    pages = fill(pool, tokens)
    pool.release(pages)
    assert [p.page_id for p in pool.match(tokens, "")] == pages[:1]
    assert [p.page_id for p in pool.match([*tokens, 99], "")] == pages
    assert pool.num_available == 8


def test_a_different_salt_or_an_earlier_difference_shares_nothing() -> None:
    pool = PagePool(8, PAGE)
    fill(pool, list(range(8)))
    assert pool.match([*range(8), 9], "other key") == []
    assert pool.match([7, *range(1, 8), 9], "") == []


def test_equal_page_text_at_another_place_is_not_shared() -> None:
    pool = PagePool(8, PAGE)
    fill(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    assert pool.match([5, 6, 7, 8, 9], "") == []


def test_eviction_takes_the_least_recently_released_and_the_tail_of_a_chain_first() -> None:
    pool = PagePool(4, PAGE)
    old = fill(pool, list(range(8)))
    pool.release(old)
    new = fill(pool, list(range(100, 108)))
    pool.release(new)
    assert pool.allocate(1) == [old[1]]
    assert [p.page_id for p in pool.match([*range(8), 9], "")] == old[:1]
    assert len(pool.match([*range(100, 108), 9], "")) == 2


def test_allocation_is_all_or_nothing() -> None:
    pool = PagePool(3, PAGE)
    assert pool.allocate(2) is not None
    assert pool.allocate(2) is None
    assert pool.num_available == 1


def test_releasing_more_often_than_held_is_refused() -> None:
    pool = PagePool(2, PAGE)
    pages = pool.allocate(1)
    assert pages is not None
    pool.release(pages)
    with pytest.raises(ValueError, match="released more often"):
        pool.release(pages)


def test_switched_off_reuse_finds_nothing() -> None:
    pool = PagePool(4, PAGE, reuse=False)
    pool.release(fill(pool, list(range(8))))
    assert pool.match([*range(8), 9], "") == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.lists(st.integers(0, 3), min_size=1, max_size=30))
@settings(max_examples=200, deadline=None)
def test_a_match_is_exactly_the_common_full_pages(first: list[int], second: list[int]) -> None:
    pool = PagePool(16, PAGE)
    fill(pool, first)
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    expected = min(common // PAGE, (len(second) - 1) // PAGE)
    assert len(pool.match(second, "")) == expected


class Pool(RuleBasedStateMachine):
    """Random holders of random texts over a small pool; the books must balance after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12, PAGE)
        self.holders: list[tuple[list[int], list[int]]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24))
    def admit(self, tokens: list[int]) -> None:
        matched = self.pool.match(tokens, "")
        for index, page in enumerate(matched):
            assert list(page.token_ids) == tokens[index * PAGE : (index + 1) * PAGE]
        before = self.pool.num_available
        self.pool.hold(matched)
        fresh = self.pool.allocate(self.pool.pages_for(len(tokens)) - len(matched))
        if fresh is None:
            self.pool.release([p.page_id for p in matched])
            assert self.pool.num_available == before
            return
        pages = [p.page_id for p in matched] + fresh
        parent = matched[-1].chain_hash if matched else root_hash("")
        for index in range(len(matched), len(tokens) // PAGE):
            parent = self.pool.register(pages[index], parent, tokens[index * PAGE : (index + 1) * PAGE])
        self.holders.append((tokens, pages))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        _, pages = self.holders.pop(index)
        self.pool.release(pages)

    @rule()
    def forget(self) -> None:
        self.pool.forget()

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def forget_a_page(self, data: st.DataObject) -> None:
        tokens, pages = data.draw(st.sampled_from(self.holders))
        found = self.pool.match([*tokens, 9], "")
        if not found:
            return
        index = data.draw(st.integers(0, len(found) - 1))
        own = found[index].page_id == pages[index]
        self.pool.forget_pages([(pages[index], found[index].chain_hash)])
        assert len(self.pool.match([*tokens, 9], "")) == (index if own else len(found))

    @invariant()
    def books_balance(self) -> None:
        self.pool.check([pages for _, pages in self.holders])


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
