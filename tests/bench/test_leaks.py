"""Which growth of memory from step to step is a leak."""

from __future__ import annotations

from shardkit.bench._largest import _leak
from shardkit.bench._trials import Trial

KIB = 1024


def leak(*in_use: list[int]) -> int | None:
    return _leak(Trial(1, 1, None, "fits", in_use=tuple(tuple(KIB * size for size in told) for told in in_use)))


def test_what_grows_in_every_step_is_a_leak_by_its_smallest_growth_on_the_worst_rank() -> None:
    assert leak([0, 9000, 9100, 9200, 9200]) == 100 * KIB
    assert leak([0, 9000, 9100, 9300, 9300], [0, 9000, 9300, 9500, 9500]) == 200 * KIB
    assert leak([0, 9000, 9100, 9200, 9300, 9450, 9450]) == 100 * KIB


def test_what_comes_with_the_first_two_steps_is_none() -> None:
    assert leak([0, 9000, 9000, 9000, 9000]) is None


def test_a_single_jump_is_none() -> None:
    assert leak([0, 9000, 9000, 9900, 9900]) is None


def test_growth_that_a_garbage_collection_ends_is_none() -> None:
    assert leak([0, 9000, 9100, 9200, 9001]) is None


def test_growth_within_the_noise_is_none() -> None:
    assert leak([0, 9000, 9060, 9120, 9120]) is None


def test_too_few_steps_tell_nothing() -> None:
    assert leak([0, 9000, 9900, 9900]) is None
    assert leak([0, 0], []) is None
