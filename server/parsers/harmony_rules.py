"""The grammar of an output in channels: what binds an answer or its calls, with reasoning before it."""

from __future__ import annotations

import re

from forkpoint.server.parsers.harmony import (
    ANALYSIS_OPENING,
    CHANNEL,
    END,
    FINAL_OPENING,
    MARKERS,
    MESSAGE,
    NEXT_MESSAGE,
    START,
)
from forkpoint.server.structured_rules import OutputRule, SpecialTokenId, either, marked_text


def written_header(prompt_end: str, continued: str) -> str:
    """What the prompt already has of the header of the message that the output goes on with.

    prompt_end: the last characters of the prompt. continued: the answer that is to be continued, or empty.
    """
    if continued:
        return FINAL_OPENING
    _, _, message = prompt_end.rpartition(START)
    header, _, rest = message.rpartition(MESSAGE) if MESSAGE in message else (message, "", "")
    if CHANNEL not in header or END in rest:
        return ""
    return header[header.index(CHANNEL) :] + (MESSAGE if MESSAGE in message else "")


def channels_rule(
    answer: OutputRule | None, calls: OutputRule | None, special_id: SpecialTokenId, *, header: str
) -> OutputRule:
    """`answer` as a final message, or `calls`, at least one of them; after one message of reasoning or none.

    header: see written_header().
    """

    def text(part: str) -> str:
        return marked_text(part, MARKERS, special_id)

    is_answering = header.endswith(MESSAGE) and header != ANALYSIS_OPENING
    rules = []
    if answer is not None:
        opening = "" if is_answering else text(FINAL_OPENING)
        rules.append(_preceded(opening, answer))
    if calls is not None:
        rules.append(_preceded(text(NEXT_MESSAGE) if is_answering else "", calls))
    rule = rules[0] if len(rules) == 1 else either(*rules)
    if is_answering:
        return rule
    if special_id(END) is None:
        escaped = re.escape(END).replace("/", "\\/")
        thought = f"thought[lazy]: /(?s:.*){escaped}/"
        thinking = f"thought {text(NEXT_MESSAGE.removeprefix(END))}"
    else:
        thought = "thought: /(?s:.*)/"
        thinking = f"thought {text(NEXT_MESSAGE)}"
    if header != ANALYSIS_OPENING:
        thinking = f"({text(ANALYSIS_OPENING)} {thinking})?"
    return OutputRule(f"{thinking} ({rule.expression})", (thought, *rule.rules), rule.grammars)


def _preceded(opening: str, rule: OutputRule) -> OutputRule:
    return OutputRule(f"{opening} ({rule.expression})", rule.rules, rule.grammars) if opening else rule
