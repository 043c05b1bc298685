"""How the engine's threads wait for each other."""

from __future__ import annotations

import pytest

from forkpoint.scheduler.engine_process import shorten_spinning


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"GOMP_SPINCOUNT": "2000"}),
        ({"OMP_NUM_THREADS": "4"}, {"OMP_NUM_THREADS": "4", "GOMP_SPINCOUNT": "2000"}),
        ({"GOMP_SPINCOUNT": "5"}, {"GOMP_SPINCOUNT": "5"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_threads_spin_shortly_unless_a_person_chose_otherwise(
    before: dict[str, str], after: dict[str, str]
) -> None:
    environment = dict(before)
    shorten_spinning(environment)
    assert environment == after
