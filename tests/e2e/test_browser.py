"""The page in a real browser: chats stream, reuse is told, the tree forks, hostile text stays text."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from support.served import ServedModel, serve_ready

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE_MS = 60_000
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SYSTEM = "You are a careful clerk. " * 12

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def served(letters_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    file = tmp_path_factory.mktemp("template") / "turns.jinja"
    file.write_text(TEMPLATE, encoding="utf-8")
    flags = ("--page-size", "4", "--max-total-tokens", "20000", "--swa-total-tokens", "8000")
    with serve_ready(letters_dir, *flags, "--chat-template", str(file)) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Root in a container has no sandbox to offer.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, served: ServedModel) -> Iterator[Page]:
    """A fresh tab on an empty cache; what goes wrong in it fails the test."""
    served.flush()
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    page.goto(served.url)
    expect(page.locator("#state")).to_have_text("ready")
    yield page
    page.close()
    assert faults == []


def ask(page: Page, question: str) -> None:
    """Ask, and wait for the whole answer."""
    page.fill("#question", question)
    page.keyboard.press("Enter")
    finish(page)


def finish(page: Page) -> None:
    expect(page.locator("#stop")).to_be_hidden()
    expect(page.locator(".message").last.locator(".reuse")).to_be_visible()


def set_up(page: Page, *, max_tokens: int = 6) -> None:
    page.click("#settings summary")
    page.fill("#system", SYSTEM)
    page.fill("#max_tokens", str(max_tokens))
    page.fill("#temperature", "0")
    page.click("#settings summary")


def tokens(page: Page, kind: str) -> int:
    """Prompt tokens of the last answer that were cached, rebuilt or computed, as the page says."""
    text = page.locator(".message").last.locator(f".numbers span:has(> .{kind})").inner_text()
    return int(re.sub(r"\D", "", text))


def test_a_chat_streams_and_the_next_turn_reuses_it(page: Page) -> None:
    set_up(page, max_tokens=40)
    page.fill("#question", "What is on the third page?")
    page.keyboard.press("Enter")
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator(".message .text").last).not_to_be_empty()
    finish(page)
    assert tokens(page, "cached") == 0
    expect(page.locator(".why").last).to_contain_text("Nothing was reused")
    ask(page, "And on the fourth?")
    assert tokens(page, "cached") > len(SYSTEM)
    expect(page.locator(".why").last).to_contain_text("the conversation so far")
    assert page.locator(".message").count() == 4


def test_regenerate_and_another_conversation_hit_and_the_tree_shows_where_they_part(page: Page) -> None:
    set_up(page)
    ask(page, "What is on the third page?")
    page.get_by_role("button", name="Regenerate answer 1").click()
    finish(page)
    assert tokens(page, "computed") <= 16
    expect(page.locator(".why").last).to_contain_text("it has been asked before")
    page.click("#new-conversation")
    ask(page, "Who wrote the letters?")
    assert tokens(page, "cached") + tokens(page, "rebuilt") > len(SYSTEM) - 8
    expect(page.locator("#tree-size")).to_contain_text("nodes")
    entries = page.locator("#tree-list li")
    page.click("#cache details summary")
    expect(entries.filter(has_text="2 ways go on")).not_to_have_count(0)
    expect(entries.filter(has_text="Window kept at")).not_to_have_count(0)


def test_edit_asks_another_question_in_its_place(page: Page, served: ServedModel) -> None:
    set_up(page)
    ask(page, "First question")
    ask(page, "Second question")
    page.get_by_role("button", name="Edit message 1").click()
    page.get_by_label("Edited message").fill("Another question")
    page.get_by_role("button", name="Ask this instead").click()
    finish(page)
    assert page.locator(".message").count() == 2
    expect(page.locator(".message.user .text")).to_have_text("Another question")
    assert tokens(page, "cached") + tokens(page, "rebuilt") > len(SYSTEM) - 8


def test_the_tree_answers_to_the_keyboard(page: Page) -> None:
    set_up(page)
    ask(page, "What is on the third page?")
    expect(page.locator("#tree-size")).to_contain_text("nodes")
    page.focus("#tree")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tree-detail")).to_contain_text("Positions 0 to")
    page.keyboard.press("Enter")
    expect(page.locator("#zoom-out")).to_be_enabled()
    page.keyboard.press("Escape")
    expect(page.locator("#zoom-out")).to_be_disabled()


def test_stop_ends_an_answer_and_frees_its_place(page: Page, served: ServedModel) -> None:
    set_up(page, max_tokens=1500)
    page.fill("#question", "Go on for long")
    page.keyboard.press("Enter")
    expect(page.locator(".message .text").last).not_to_be_empty()
    page.click("#tab-requests")
    expect(page.locator("#request-rows tr")).to_contain_text("answering")
    page.click("#stop")
    expect(page.locator(".message").last).to_contain_text("Stopped by you")
    expect(page.locator("#request-rows tr")).to_contain_text("No request is under way")
    served.wait_idle()
    expect(page.locator("#steps-detail")).to_contain_text("The latest")


def test_hostile_text_stays_text(page: Page) -> None:
    hostile = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"

    def answer(route: object) -> None:
        chunk = {"choices": [{"index": 0, "delta": {"content": hostile}, "finish_reason": "stop"}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}
        body = "".join(f"data: {json.dumps(each)}\n\n" for each in (chunk, usage)) + "data: [DONE]\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=body)  # type: ignore[attr-defined]

    page.route("**/v1/chat/completions", answer)
    ask(page, hostile)
    texts = page.locator(".message .text")
    assert texts.all_inner_texts() == [hostile, hostile]
    assert page.locator(".message img, .message script").count() == 0
    assert "taken" not in page.title()


def test_a_phone_shows_one_view_at_a_time_without_scrolling_sideways(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    expect(page.locator("#tab-chat")).to_be_visible()
    for name in ("cache", "requests", "chat"):
        page.click(f"#tab-{name}")
        for other in ("chat", "cache", "requests"):
            assert page.locator(f"#{other}").is_visible() == (other == name)
        assert page.evaluate_handle("document.documentElement.scrollWidth").json_value() <= 360


def test_a_key_is_asked_for_once(letters_dir: Path, browser: Browser) -> None:
    with serve_ready(letters_dir, "--api-key", "secret", "--max-total-tokens", "4096") as served:
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(served.url)
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key")).to_have_value("")
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_text("ready", timeout=PATIENCE_MS)
        expect(page.locator("#key-dialog")).to_be_hidden()
        page.close()
