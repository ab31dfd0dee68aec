"""The class map as a value: what it says of each expert, what changes it, and its digest."""

from __future__ import annotations

from backbone.class_map import ClassMap
from backbone.provenance import class_map_digest

PLAIN = ClassMap.of_backbone("ours", {0: 2, 3: 3})


def test_without_workers_all_is_the_backbones() -> None:
    assert PLAIN.experts == {0: ("ours", "ours"), 3: ("ours", "ours", "ours")}
    assert PLAIN.digest == class_map_digest("ours", {0: ["ours"] * 2, 3: ["ours"] * 3})
    other = ClassMap.of_backbone("ours", {0: 2, 3: 3}, "ours kv-f16")
    assert other.experts == PLAIN.experts
    assert other.digest == class_map_digest("ours kv-f16", {0: ["ours"] * 2, 3: ["ours"] * 3})


def test_a_plan_gives_experts_to_other_classes() -> None:
    given = PLAIN.given({(0, 1): "a", (3, 0): "b"})
    assert given.experts == {0: ("ours", "a"), 3: ("b", "ours", "ours")}
    assert [given.of(*key) for key in ((0, 0), (0, 1), (3, 0))] == ["ours", "a", "b"]
    assert given.digest == class_map_digest("ours", given.experts) != PLAIN.digest


def test_what_is_taken_over_is_the_backbones() -> None:
    given = PLAIN.given({(0, 1): "a", (3, 0): "b"})
    assert given.taken_over([(3, 0), (3, 1)]) == PLAIN.given({(0, 1): "a"})
    assert given.taken_over([(0, 0), (3, 2)]) is given
    assert given.taken_over([(0, 1), (3, 0)]).digest == PLAIN.digest
