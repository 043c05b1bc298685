"""LangChain's ChatOpenAI and OpenAI against a server: whole, streamed, batched, structured, with tools."""

from __future__ import annotations

import sys

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict


class Verdict(BaseModel):
    """Whether it is so."""

    model_config = ConfigDict(extra="forbid")
    is_so: bool


class Switch(BaseModel):
    """Switch the light on or off."""

    model_config = ConfigDict(extra="forbid")
    is_on: bool


def main() -> None:
    url, model = sys.argv[1:]
    options = {
        "base_url": f"{url}/v1",
        "api_key": "unused",
        "model": model,
        "temperature": 0,
        "max_retries": 0,
    }
    chat = ChatOpenAI(**options, max_tokens=8, stream_usage=True)
    whole = chat.invoke("hello")
    chunks = list(chat.stream("hello"))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    assert any(chunk.usage_metadata for chunk in chunks)
    assert len(chat.batch(["a", "b", "c"])) == 3
    assert chat.bind(logprobs=True).invoke("hello").response_metadata["logprobs"]["content"]
    roomy = ChatOpenAI(**options, max_tokens=200)
    assert isinstance(roomy.with_structured_output(Verdict, method="json_schema").invoke("is it?"), Verdict)
    (call,) = (
        roomy.bind_tools([Switch], tool_choice="required", parallel_tool_calls=False).invoke("go").tool_calls
    )
    assert call["name"] == "Switch" and isinstance(call["args"]["is_on"], bool)
    assert isinstance(OpenAI(**options, max_tokens=8).invoke("once"), str)
    sys.stdout.write("langchain: all calls as expected\n")


if __name__ == "__main__":
    main()
