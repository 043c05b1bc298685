"""LiteLLM against a server, by its OpenAI and its hosted_vllm providers: whole, streamed, errors, tools."""

from __future__ import annotations

import sys

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "switch",
        "parameters": {
            "type": "object",
            "properties": {"is_on": {"type": "boolean"}},
            "required": ["is_on"],
            "additionalProperties": False,
        },
    },
}


def main() -> None:
    url, name = sys.argv[1:]
    messages = [{"role": "user", "content": "hello"}]
    for provider in ("openai", "hosted_vllm"):
        options = {
            "model": f"{provider}/{name}", "api_base": f"{url}/v1", "api_key": "unused", "temperature": 0,
            "num_retries": 0, "messages": messages,
        }  # fmt: skip
        whole = litellm.completion(**options, max_tokens=8)
        stream = litellm.completion(
            **options, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
        texts = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
        assert "".join(texts) == whole.choices[0].message.content
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
        forced = litellm.completion(**options, max_tokens=200, tools=[TOOL], tool_choice="required")
        assert forced.choices[0].message.tool_calls[0].function.name == "switch"
        try:
            litellm.completion(**{**options, "temperature": 9})
        except litellm.BadRequestError as error:
            assert "temperature" in str(error)
        else:
            raise AssertionError("a wrong temperature was accepted")
    sys.stdout.write("litellm: all calls as expected\n")


if __name__ == "__main__":
    main()
