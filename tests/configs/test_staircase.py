"""The rows of a rebuild, against examples made by hand and dependences followed one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint.configs.staircase import Staircase


def test_the_example_of_fourteen_layers() -> None:
    stairs = Staircase("SSSSSFSSSSSFSS", window=6, page_size=1)
    expected = (90, 95, 100, 105, 110, 115, 115, 120, 125, 130, 135, 140, 140, 145, 150)
    assert stairs.first_rows(150, 0) == expected


def test_nothing_lost_means_nothing_to_run() -> None:
    assert Staircase("SFS", 4, 1).first_rows(80, 80) == (80, 80, 80, 80)


def test_the_target_begins_at_a_page_edge() -> None:
    stairs = Staircase("SFSS", window=16, page_size=4)
    assert stairs.live_from(200, 0) == 184
    assert stairs.first_rows(200, 0) == (154, 169, 169, 184, 200)


def test_the_floor_is_the_resume_point_and_zero() -> None:
    stairs = Staircase("SSSS", window=16, page_size=1)
    assert stairs.first_rows(40, 0) == (0, 0, 10, 25, 40)
    assert stairs.first_rows(40, 20) == (20, 20, 20, 25, 40)
    assert stairs.live_from(40, 30) == 30


def test_layers_above_the_topmost_swa_layer_run_nothing() -> None:
    assert Staircase("SFF", window=4, page_size=1).first_rows(50, 0) == (47, 50, 50, 50)


def test_tiles_round_down_at_every_layer_but_not_below_the_resume_point() -> None:
    stairs = Staircase("SSS", window=10, page_size=1, tile=8)
    assert stairs.first_rows(100, 0) == (56, 72, 88, 100)
    assert stairs.first_rows(100, 70) == (70, 72, 88, 100)


def test_a_depth_stops_the_staircase_early() -> None:
    stairs = Staircase("SSSSS", window=10, page_size=1, depth=2)
    assert stairs.first_rows(100, 0) == (82, 82, 82, 82, 91, 100)


def test_row_layers_count_attention_rows_of_each_layer() -> None:
    stairs = Staircase("SFSS", window=16, page_size=4)
    assert stairs.row_layers(200, 0, 154, 200) == 31 + 31 + 16 + 0
    assert stairs.row_layers(200, 0, 154, 210) == 41 + 41 + 26 + 10
    assert stairs.row_layers(200, 0, 200, 210) == 40


@settings(max_examples=300, deadline=None)
@given(
    pattern=st.text("SF", min_size=1, max_size=7).filter(lambda text: "S" in text),
    window=st.integers(1, 9),
    full_hit=st.integers(1, 60),
    resume=st.integers(0, 59),
    page_size=st.sampled_from([1, 2, 4]),
    tile=st.sampled_from([1, 3, 8]),
)
def test_exactly_the_dependences_of_the_target_are_run(
    pattern: str, window: int, full_hit: int, resume: int, page_size: int, tile: int
) -> None:
    """Follow what the target windows depend on: it must be run, and with tile 1 no more."""
    full_hit -= full_hit % page_size
    resume = min(resume - resume % page_size, full_hit)
    if full_hit == resume:
        return
    rows = Staircase(pattern, window, page_size, tile).first_rows(full_hit, resume)
    assert list(rows) == sorted(rows) and rows[-1] == full_hit
    target = Staircase(pattern, window, page_size).live_from(full_hit, resume)

    needed_x = full_hit  # lowest position at which the layer above's input is needed
    for layer in range(len(pattern) - 1, -1, -1):
        if pattern[layer] == "S":
            keys = min(target, needed_x - (window - 1)) if needed_x < full_hit else target
            needed_x = max(resume, min(keys, needed_x))
        assert rows[layer] <= needed_x, "something the target depends on is not run"
        if tile == 1:
            assert rows[layer] == needed_x, "more is run than the target depends on"


@pytest.mark.parametrize(
    ("pattern", "window", "hit", "percent"),
    [("SSSSSF" * 3, 512, 8192, 41.6), ("SF" * 12, 128, 32768, 2.1), ("SF" * 12, 128, 2048, 34)],
)
def test_the_work_is_the_known_share_of_a_cold_prefill(
    pattern: str, window: int, hit: int, percent: float
) -> None:
    stairs = Staircase(pattern, window, page_size=1)
    rows = stairs.row_layers(hit, 0, stairs.start(hit, 0), hit)
    assert 100 * rows / (hit * len(pattern)) == pytest.approx(percent, abs=0.5)
