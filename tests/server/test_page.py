"""The page at `/`: its files, headers, and the flag that turns it off. tests/e2e/test_browser.py opens it."""

from __future__ import annotations

import re

import pytest
from support.fake_engine import FakeEngine
from support.http_server import error_of, serving

from forkpoint.server.page import PAGE_PATHS


def test_every_file_that_a_file_names_is_served_with_its_type_and_a_strict_policy() -> None:
    with serving(FakeEngine()) as world:
        waiting, seen = ["/"], set[str]()
        while waiting:
            path = waiting.pop()
            if path in seen:
                continue
            seen.add(path)
            response = world.http.get(path)
            assert response.status_code == 200
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            names = re.findall(r'(?:href|src)="ui/([^"]+)"|from "\./([^"]+)"', response.text)
            waiting += [f"/ui/{one or other}" for one, other in names]
        assert seen == PAGE_PATHS
        assert world.http.get("/ui/main.js").headers["content-type"].startswith("text/javascript")
        assert world.http.head("/").status_code == 200


def test_files_need_nothing_from_elsewhere_and_nothing_inline() -> None:
    with serving(FakeEngine()) as world:
        for path in PAGE_PATHS:
            text = world.http.get(path).text
            assert not re.search(r"(?:https?:)?//[a-z]+\.", text), path
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), (
                path
            )
        page = world.http.get("/").text
        assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|style=", page)


def test_an_unchanged_file_is_not_sent_again() -> None:
    with serving(FakeEngine()) as world:
        tag = world.http.get("/").headers["etag"]
        again = world.http.get("/", headers={"if-none-match": tag})
        assert (again.status_code, again.content) == (304, b"")
        assert world.http.get("/", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", sorted(PAGE_PATHS))
def test_no_ui_serves_none_of_it(path: str) -> None:
    with serving(FakeEngine(), has_page=False) as world:
        error_of(world.http.get(path), 404)
        assert world.http.get("/debug/steps").status_code == 200
