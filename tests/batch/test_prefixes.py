"""Groups of prompts: the best choice there is, checked against every choice."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.batch.prefixes import Group, Node, build_prefix_tree, group_prompts

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=9)


def nodes(root: Node) -> list[Node]:
    found = []
    for child in root.children:
        found += [child, *nodes(child)]
    return found


def saved_by(root: Node, opened: set[int], worth: dict[int, int]) -> int:
    """What a set of open nodes saves: the definition, not the recursion."""

    def below(node: Node, deepest: int) -> int:
        if id(node) in opened:
            deepest = worth[id(node)]
        own = len(node.ends) * deepest
        return own + sum(below(child, deepest) for child in node.children)

    return below(root, 0) - sum(worth[key] for key in opened)


def best(prompts: list[list[int]], block: int = 1, least: int = 1) -> int:
    """The most that any set of open nodes saves, by trying all of them."""
    root = build_prefix_tree(prompts)
    worth = {id(node): node.depth // block * block for node in nodes(root)}
    # A node on which fewer than two prompts lie saves nothing, whatever else is open.
    usable = [key for key in worth if worth[key] >= least and _below(root, key) > 1]
    choices = []
    for count in range(len(usable) + 1):
        choices += [saved_by(root, set(some), worth) for some in combinations(usable, count)]
    return max(choices)


def _below(root: Node, key: int) -> int:
    node = next(node for node in nodes(root) if id(node) == key)
    return len(node.ends) + sum(len(inner.ends) for inner in nodes(node))


def all_or_nothing(prompts: list[list[int]]) -> int:
    """The rule that all prompts below a node share it, or none does: not the best."""

    def value(node: Node) -> int:
        count = len(node.ends) + sum(len(inner.ends) for inner in nodes(node))
        apart = sum(map(value, node.children)) + max(len(node.ends) - 1, 0) * node.depth
        return max((count - 1) * node.depth, apart)

    return value(build_prefix_tree(prompts))


def greedy(prompts: list[list[int]]) -> int:
    """The published rule: from the leaves upwards a grandchild g moves beside its parent c, with
    c's tokens in front, where (leaves(g) - 1) len(g) > len(c). Each child of the root is a group.
    """

    def leaves(item: list) -> int:
        return item[2] + sum(leaves(child) for child in item[1])

    def convert(node: Node, start: int) -> list:  # [own tokens, children, 1 for a leaf]
        children = [convert(child, node.depth) for child in node.children]
        own = [[0, [], 1] for _ in node.ends]
        if not children and len(own) == 1:
            return [node.depth - start, [], 1]
        return settle([node.depth - start, children + own, 0])

    def settle(item: list) -> list:
        moved = []
        for child in list(item[1]):
            for grand in list(child[1]):
                if grand[1] and (leaves(grand) - 1) * grand[0] > child[0]:
                    child[1].remove(grand)
                    grand[0] += child[0]
                    moved.append(grand)
            if len(child[1]) == 1 and child[1][0][1]:  # one way on: its tokens follow
                grand = child[1][0]
                child[0], child[1] = child[0] + grand[0], grand[1]
            if not child[1] and not child[2]:
                item[1].remove(child)
        item[1] += moved
        return item

    root = convert(build_prefix_tree(prompts), 0)
    return sum((leaves(item) - 1) * item[0] for item in root[1] if leaves(item) > 1)


def total(groups: list[Group]) -> int:
    return sum(one.saved for one in groups)


@given(PROMPTS, st.sampled_from([1, 2]), st.sampled_from([1, 2, 3]))
def test_no_choice_of_prefixes_saves_more(prompts: list[list[int]], block: int, least: int) -> None:
    assert total(group_prompts(prompts, block, least)) == best(prompts, block, least)


@given(PROMPTS, st.sampled_from([1, 2, 3]))
def test_every_request_is_in_one_group_and_has_its_prefix(
    prompts: list[list[int]], block: int
) -> None:
    groups = group_prompts(prompts, block)
    members = [member for one in groups for member in one.group_members]
    assert sorted(members) == list(range(len(prompts)))
    for one in groups:
        first = prompts[one.group_members[0]][: one.prefix]
        assert one.prefix % block == 0 and len(first) == one.prefix
        for member in one.group_members:
            assert prompts[member][: one.prefix] == first
            assert len(prompts[member]) > one.prefix, "something of its own is left to compute"
        assert len(one.group_members) > 1 or not one.prefix, "a prefix nobody shares is none"


@given(PROMPTS)
def test_the_simpler_rules_never_save_more(prompts: list[list[int]]) -> None:
    found = total(group_prompts(prompts))
    assert found >= all_or_nothing(prompts)
    assert found >= greedy(prompts)


def test_the_simpler_rules_save_less_at_times() -> None:
    few = [[1] * 4 + [5 + i, 0] for i in range(6)]
    longer = [[1] * 4 + [2] * 6 + [5 + i, 0] for i in range(3)]
    assert total(group_prompts(few + longer)) == 5 * 4 + 2 * 10
    assert all_or_nothing(few + longer) == 8 * 4
    pairs = [[2, 6, 8, 0], [2, 6, 9, 0], [2, 1, 2, 0], [2, 1, 4, 0]]
    assert total(group_prompts(pairs)) == 2 + 2
    assert greedy(pairs) == 3 * 1


def test_a_prefix_is_open_within_another() -> None:
    long = list(range(100, 120))
    prompts = [[*long[:8], i] for i in range(3)] + [[*long, i] for i in range(3)]
    groups = group_prompts(prompts)
    assert groups == [Group(8, (0, 1, 2)), Group(20, (3, 4, 5))]
    assert total(groups) == 2 * 8 + 2 * 20


def test_equal_prompts_share_all_but_the_last_token() -> None:
    assert group_prompts([[3, 4, 5]] * 3) == [Group(2, (0, 1, 2))]
    assert group_prompts([[7], [7]]) == [Group(0, (0,)), Group(0, (1,))]
    assert group_prompts([]) == []


def test_tokens_of_any_size_are_ordered_by_value() -> None:
    prompts = [[1, 256, 9, 0], [1, 65_536, 2, 0], [1, 256, 9, 1], [1, 65_536, 2, 3]]
    assert group_prompts(prompts) == [Group(3, (0, 2)), Group(3, (1, 3))]


def test_a_long_chain_of_prompts_is_no_recursion() -> None:
    """As of conversations that grow: each prompt begins with the one before."""
    prompts = [list(range(n)) for n in range(1, 1500)]
    groups = group_prompts(prompts)
    assert sum(len(one.group_members) for one in groups) == len(prompts)
    assert total(groups) > 0


@pytest.mark.parametrize("least", [1, 5, 100])
def test_short_prefixes_are_left_alone(least: int) -> None:
    groups = group_prompts([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7]], min_tokens=least)
    assert groups == ([Group(5, (0, 1))] if least <= 5 else [Group(0, (0,)), Group(0, (1,))])
