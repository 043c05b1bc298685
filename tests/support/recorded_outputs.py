"""Outputs in the formats of model families, and the messages that they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Recorded:
    """calls: (name, arguments) in order; None: what the model wrote is no call at all."""

    parser: str
    text: str
    content: str
    calls: tuple[tuple[str, dict[str, Any]], ...]


SCHEMAS: dict[str, dict[str, dict[str, str]]] = {
    "get_weather": {"city": {"type": "string"}, "days": {"type": "integer"}, "zip": {"type": "string"}},
    "search": {"query": {"type": "string"}, "filters": {"type": "object"}},
    "now": {},
}
PARIS = ("get_weather", {"city": "Paris"})
ROME = ("get_weather", {"city": "Rome", "days": 2})
NOW: tuple[str, dict[str, Any]] = ("now", {})
SEARCH = (
    "search",
    {"query": 'say "hi" \\ {[<tool_call>', "filters": {"a": [1, -2.5e3, None, True, {}], "b": {"c": "ü 🚂"}}},
)
_SEARCH_JSON = (
    '{"query": "say \\"hi\\" \\\\ {[<tool_call>", '
    '"filters": {"a": [1, -2.5e3, null, true, {}], "b": {"c": "\\u00fc 🚂"}}}'
)

RECORDED = (
    # Hermes 2 Pro, Qwen 2.5 and 3.
    Recorded("hermes", "It is sunny.\n", "It is sunny.\n", ()),
    Recorded(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "",
        (PARIS,),
    ),
    Recorded(
        "hermes",
        'Let me look.\n<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>\nDone.',
        "Let me look.Done.",
        (PARIS, ROME),
    ),
    Recorded(
        "hermes",
        f'<tool_call>{{"name": "search", "arguments": {_SEARCH_JSON}}}</tool_call>',
        "",
        (SEARCH,),
    ),
    Recorded("hermes", '<tool_call>{"name":"now"}</tool_call>', "", (NOW,)),
    Recorded("hermes", '<tool_call>{"name":"now","arguments":null}</tool_call>', "", (NOW,)),
    Recorded(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        "",
        (PARIS,),
    ),
    # One brace too few, which small models often write.
    Recorded(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}\n</tool_call>',
        "",
        (PARIS,),
    ),
    # A line break and an escape that JSON does not know.
    Recorded(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "it\\\'s\nP\\d"}}</tool_call>',
        "",
        (("get_weather", {"city": "it's\nP\\d"}),),
    ),
    Recorded("hermes", "<tool_call>none</tool_call>", "<tool_call>none</tool_call>", ()),
    Recorded("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', ()),
    Recorded("hermes", '<tool_call>{"nam', '<tool_call>{"nam', ()),
    Recorded("hermes", "a <tool_ca", "a <tool_ca", ()),
    # Qwen3-Coder.
    Recorded(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        "",
        (ROME,),
    ),
    Recorded(
        "qwen3_coder",
        "Well.\n<tool_call>\n<function=get_weather>\n<parameter=zip>\n0123\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "Well.",
        (("get_weather", {"zip": "0123"}), NOW),
    ),
    Recorded(
        "qwen3_coder",
        '<tool_call>\n<function=search>\n<parameter=query>\nfirst\nsecond\n<parameter=filters>\n{"a": [1]}\n'
        "</parameter>\n</function>\n</tool_call>",
        "",
        (("search", {"query": "first\nsecond", "filters": {"a": [1]}}),),
    ),
    Recorded("qwen3_coder", "<tool_call>\n<fun", "<tool_call>\n<fun", ()),
    # Llama 3.1 to 3.3.
    Recorded("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", (PARIS,)),
    Recorded(
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "get_weather", "parameters": {"city": "Rome", "days": 2}}',
        "",
        (PARIS, ROME),
    ),
    Recorded(
        "llama3_json",
        f'\n\n{{"name": "search", "parameters": {_SEARCH_JSON}}}\n',
        "",
        (SEARCH,),
    ),
    Recorded("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', ()),
    Recorded("llama3_json", '{"answer": [1, 2]} is it', '{"answer": [1, 2]} is it', ()),
    Recorded(
        "llama3_json",
        '<|python_tag|>brave_search.call(query="x")',
        '<|python_tag|>brave_search.call(query="x")',
        (),
    ),
    # Mistral 7B v0.3 and later.
    Recorded(
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}, '
        '{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}]',
        "",
        (PARIS, ROME),
    ),
    Recorded(
        "mistral",
        f'I search.[TOOL_CALLS][{{"name": "search", "arguments": {_SEARCH_JSON}}}]',
        "I search.",
        (SEARCH,),
    ),
    Recorded(
        "mistral_v11",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[CALL_ID]abc123[ARGS]{}',
        "",
        (PARIS, NOW),
    ),
    Recorded("mistral_v11", '[TOOL_CALLS]get_weather{"city": "Paris"}', "", (PARIS,)),
    Recorded("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", ()),
    Recorded("mistral", "[TOOL_", "[TOOL_", ()),
    # Gemma 3, prompted for JSON or for Python.
    Recorded(
        "gemma",
        '```json\n[{"name": "get_weather", "parameters": {"city": "Paris"}},\n'
        ' {"name": "now", "parameters": {}}]\n```',
        "",
        (PARIS, NOW),
    ),
    Recorded("gemma", "[get_weather(city=\"Paris\"), get_weather(city='Rome', days=2)]", "", (PARIS, ROME)),
    Recorded(
        "gemma",
        '```tool_code\nprint(get_weather(city="Paris"))\nnow()\n```',
        "",
        (PARIS, NOW),
    ),
    Recorded(
        "gemma",
        "I will.\n```tool_code\nsearch(query='a)]\\'\"', filters={'x': [1, (2.5, None)], \"y\": True})\n```",
        "I will.",
        (("search", {"query": "a)]'\"", "filters": {"x": [1, [2.5, None]], "y": True}}),),
    ),
    Recorded("gemma", "[1] is a footnote", "[1] is a footnote", ()),
    Recorded("gemma", "now() is a call", " is a call".lstrip(), (NOW,)),
    Recorded("gemma", "```python\nprint(1)\n```", "```python\nprint(1)\n```", ()),
    Recorded("gemma", "[get_weather(city=", "[get_weather(city=", ()),
    # FunctionGemma.
    Recorded(
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Rome<escape>,days:2}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>",
        "",
        (ROME, NOW),
    ),
    Recorded(
        "functiongemma",
        '<start_function_call>call:search{query:<escape>a, {b}: "c"<escape>,'
        "filters:{a:[1,<escape>x<escape>],ok:true}}<end_function_call>",
        "",
        (("search", {"query": 'a, {b}: "c"', "filters": {"a": [1, "x"], "ok": True}}),),
    ),
    Recorded("functiongemma", "<start_function_call>call:now{", "<start_function_call>call:now{", ()),
    # Templates that know no tools.
    Recorded("json", '{"name": "get_weather", "arguments": {"city": "Paris"}}', "", (PARIS,)),
    Recorded(
        "json",
        '{"name": "get_weather", "arguments": {"city": "Paris"}}\n{"name": "now", "arguments": {}}',
        "",
        (PARIS, NOW),
    ),
    Recorded(
        "json",
        'Sure:\n```json\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n```\nWait.',
        "Sure:Wait.",
        (PARIS,),
    ),
    Recorded("json", '{"name": "Bob"}', '{"name": "Bob"}', ()),
    Recorded("json", "```json\n{}\n```", "```json\n{}\n```", ()),
    Recorded("json", "", "", ()),
    Recorded("json", "   ", "   ", ()),
)
