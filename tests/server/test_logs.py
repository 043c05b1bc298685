"""Log lines: one format for all sources, the request's id in them, never a prompt or a key."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from support.fake_engine import FakeEngine
from support.http_server import serving

from forkpoint.configs.logs import configure_logging


@pytest.fixture(autouse=True)
def _logging_of_pytest_survives() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers = handlers
    root.setLevel(level)


def test_requests_are_logged_with_their_id_and_without_prompt_or_key() -> None:
    log = io.StringIO()
    configure_logging("debug", "json", log)
    with serving(api_keys=("secret-key",)) as world:
        headers = {"authorization": "Bearer secret-key", "x-request-id": "my-id"}
        body = {"prompt": "secret-prompt", "max_tokens": 3}
        world.http.post("/v1/completions", json=body, headers=headers)
        world.http.post("/v1/completions", json={**body, "n": 0}, headers=headers)
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [line["status"] for line in lines if line.get("request_id") == "my-id"] == [200, 400]
    assert "secret" not in log.getvalue()


def test_traceback_of_a_fault_shows_no_values() -> None:
    def broken(submit: object) -> object:
        raise ZeroDivisionError

    log = io.StringIO()
    configure_logging("info", "console", log)
    with serving(FakeEngine(reply=broken)) as world:  # type: ignore[arg-type]
        world.http.post("/v1/completions", json={"prompt": "secret-prompt"})
    assert "ZeroDivisionError" in log.getvalue()
    assert "secret-prompt" not in log.getvalue()


def test_lines_of_the_standard_library_have_the_same_format() -> None:
    log = io.StringIO()
    configure_logging("info", "json", log)
    logging.getLogger("some.library").warning("disk %s is full", "a")
    structlog.stdlib.get_logger("ours").info("ready", port=8000)
    logging.getLogger("some.library").debug("not shown")
    first, second = (json.loads(line) for line in log.getvalue().splitlines())
    assert (first["event"], first["level"]) == ("disk a is full", "warning")
    assert (second["event"], second["port"], second["level"]) == ("ready", 8000, "info")
    assert first.keys() | {"port"} == second.keys()


def test_auto_is_json_unless_on_a_terminal() -> None:
    log = io.StringIO()
    configure_logging("info", "auto", log)
    structlog.stdlib.get_logger("ours").info("ready")
    assert json.loads(log.getvalue())["event"] == "ready"
