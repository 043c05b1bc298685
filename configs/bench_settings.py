"""The flags of `forkpoint bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

SERVER = Group.create_ordered("Server")
WORKLOAD = Group.create_ordered("What is asked")
LOAD = Group.create_ordered("How much at a time")
OUTPUT = Group.create_ordered("Output")

BenchWorkloadName = Literal["shared-prefix", "random", "chat"]
Endpoint = Literal["auto", "completions", "chat"]
PromptFormat = Literal["auto", "text", "ids"]


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Which server is measured, with which load. None: decided by the server or the other settings."""

    base_url: Annotated[
        str,
        Parameter(name=("--base-url", "--url"), group=SERVER, help="Address of an OpenAI-compatible server."),
    ] = "http://127.0.0.1:8000"
    model: Annotated[
        str | None,
        Parameter(group=SERVER, show_default=False, help="Served name; default: the first that it serves."),
    ] = None
    endpoint: Annotated[
        Endpoint,
        Parameter(
            group=SERVER,
            help="Where requests go. auto: /v1/completions; for chat /v1/chat/completions, and chats "
            "of a model without a chat template go to completions too, and that is said.",
        ),
    ] = "auto"
    api_key: Annotated[
        str | None,
        Parameter(group=SERVER, show_default=False, help="Key that the server wants; `ps` shows it."),
    ] = None
    api_key_file: Annotated[
        Path | None, Parameter(group=SERVER, show_default=False, help="File whose first line is the key.")
    ] = None
    timeout_s: Annotated[float, Parameter(group=SERVER, help="Seconds after which a request has failed.")] = (
        600.0
    )
    flush_cache: Annotated[
        bool,
        Parameter(
            group=SERVER, negative="", help="Empty the server's prefix cache first; fail if it cannot."
        ),
    ] = False

    workload: Annotated[
        BenchWorkloadName,
        Parameter(
            group=WORKLOAD,
            help="shared-prefix: each question follows one of a few system prompts. random: no two prompts "
            "have anything in common. chat: conversations, in which each turn holds all before it.",
        ),
    ] = "shared-prefix"
    system_tokens: Annotated[
        int, Parameter(group=WORKLOAD, help="Tokens of each system prompt; of random: none.")
    ] = 1024
    question_tokens: Annotated[
        int, Parameter(group=WORKLOAD, help="Tokens of each question; of random: the whole prompt.")
    ] = 128
    output_tokens: Annotated[int, Parameter(group=WORKLOAD, help="Tokens of each answer.")] = 64
    num_prompts: Annotated[
        int, Parameter(group=WORKLOAD, help="Requests that are measured; of chat: conversations.")
    ] = 64
    num_prefixes: Annotated[int, Parameter(group=WORKLOAD, help="Different system prompts.")] = 4
    zipf: Annotated[
        float,
        Parameter(
            group=WORKLOAD, help="System prompt k is chosen with weight 1 / k ** ZIPF. 0: all equally often."
        ),
    ] = 1.0
    turns: Annotated[int, Parameter(group=WORKLOAD, help="Turns of each conversation of chat.")] = 4
    temperature: Annotated[float, Parameter(group=WORKLOAD, help="Sent with each request.")] = 0.0
    seed: Annotated[
        int,
        Parameter(
            group=WORKLOAD,
            help="Makes other prompts, choices and arrivals. The same seed asks the same again, and a server "
            "that still holds it in its cache answers from there: change the seed, or --flush-cache.",
        ),
    ] = 0
    prompt_format: Annotated[
        PromptFormat,
        Parameter(
            group=WORKLOAD,
            help="text, or token ids (completions only). auto: text; ids where --tokenizer is given.",
        ),
    ] = "auto"
    tokenizer: Annotated[
        Path | None,
        Parameter(
            group=WORKLOAD,
            show_default=False,
            help="Directory with the model's tokenizer.json, for exact lengths where the server has no "
            "/tokenize.",
        ),
    ] = None

    request_rate: Annotated[
        float | None,
        Parameter(
            group=LOAD,
            show_default=False,
            help="Open loop: requests (of chat: conversations) begin at random at this rate per second, "
            "whether or not earlier ones are answered. inf: all at once.",
        ),
    ] = None
    burstiness: Annotated[
        float,
        Parameter(
            group=LOAD,
            help="Of an open loop, shape of the gamma distribution between arrivals. 1: Poisson; below: "
            "bursts; above: more even.",
        ),
    ] = 1.0
    concurrency: Annotated[
        int | None,
        Parameter(
            group=LOAD,
            show_default=False,
            help="Closed loop: as many at a time, each begins when another ends. Default: 8, if there is no "
            "--request-rate.",
        ),
    ] = None
    warmup_requests: Annotated[
        int,
        Parameter(
            group=LOAD,
            help="Requests (of chat: conversations) of the same workload that go ahead and do not count.",
        ),
    ] = 0

    json: Annotated[
        str | None,
        Parameter(
            group=OUTPUT,
            show_default=False,
            allow_leading_hyphen=True,
            help="File for all figures and an entry for each request; - is standard output.",
        ),
    ] = None
    plot: Annotated[
        Path | None,
        Parameter(group=OUTPUT, show_default=False, help="PNG of the latencies and the hit rate over time."),
    ] = None
