"""The anchors that reach the engine with a chat's prompt, and that nothing else has any."""

from __future__ import annotations

from dataclasses import replace

from support.fake_engine import INFO, FakeEngine
from support.http_server import serving

SYSTEM = "s" * 100
SYSTEM_END = len(f"system:{SYSTEM}|user:")  # 113: a byte is a token here, and there is no BOS in a chat


def test_a_chat_submits_where_others_will_fork_in_whole_pages() -> None:
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "u" * 50}]
    with serving(engine=FakeEngine(info=replace(INFO, page_size=4))) as world:
        world.chat(messages=chat, max_tokens=1)
        world.chat(messages=[chat[0], {"role": "user", "content": "other"}], max_tokens=1)
        first, second = world.engine.submits
    end = len(first.token_ids) - len("assistant:")
    # The next turn writes "assistant:" too, so it forks at the end of the prompt.
    assert first.anchors == (112, end // 4 * 4)
    assert second.anchors[0] == 112
    assert first.token_ids[:112].tolist() == second.token_ids[:112].tolist()


def test_all_choices_have_the_same_anchors() -> None:
    with serving() as world:
        world.chat(messages=[{"role": "user", "content": "u" * 100}], n=3, max_tokens=1)
        anchors = [submit.anchors for submit in world.engine.submits]
    assert anchors == [(96,)] * 3


def test_a_text_completion_has_no_anchor_but_its_end_which_is_kept_anyway() -> None:
    with serving() as world:
        world.complete(prompt="x" * 100, max_tokens=1)
        assert world.engine.submits[0].anchors == ()


def test_a_model_without_sliding_windows_needs_no_anchors_and_renders_once() -> None:
    with serving(engine=FakeEngine(info=replace(INFO, window=None))) as world:
        world.chat(messages=[{"role": "user", "content": "u" * 100}], max_tokens=1)
        assert world.engine.submits[0].anchors == ()
        assert world.template is not None
        assert len(world.template.calls) == 1


def test_a_probe_that_the_template_refuses_leaves_the_answer_alone() -> None:
    """TagTemplate refuses by text: here it takes the chat itself, and nothing that comes after it."""
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hello"}]
    with serving() as world:
        assert world.template is not None
        world.template.refuses_longer_than = len(chat)
        answer = world.chat(messages=chat, max_tokens=1)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert world.engine.submits[0].anchors == (SYSTEM_END // 16 * 16,)
