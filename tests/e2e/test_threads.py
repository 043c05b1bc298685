"""The threads that a server computes with: as asked for, and no more than its cores."""

from __future__ import annotations

import os
from pathlib import Path

from support.served import serve_ready


def test_the_engine_computes_with_as_many_threads_as_asked_for(letters_dir: Path) -> None:
    with serve_ready(letters_dir, "--threads", "3") as served:
        assert served.log.wait_for_event("ready")["threads"] == 3


def test_a_server_bound_to_one_core_computes_with_one_thread(letters_dir: Path) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})  # the server inherits it
    try:
        with serve_ready(letters_dir) as served:
            assert served.log.wait_for_event("ready")["threads"] == 1
    finally:
        os.sched_setaffinity(0, before)
