"""Tokenizer of a GGUF file, written as tokenizer.json, tokenizer_config.json and generation_config.json.

transformers knows how to build it from the file's vocabulary; what it leaves out is added here: the BOS
token before every text (without it Gemma's perplexity is 81 instead of 10.9), and every token that ends a
turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    GGUF_TOKENIZER_MAPPING,
    convert_gguf_tokenizer,
)

from forkpoint.configs.errors import ModelLoadError

_CONTROL = 3  # value of tokenizer.ggml.token_type for tokens that are no text
# Files name one end token; llama.cpp finds these by their text, and so do we.
END_OF_TURN_TOKENS = frozenset({"<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>"})
# Byte-level vocabularies of Llama 3 want BOS though their files seldom say so (as in llama.cpp).
_PRE_TOKENIZERS_WITH_BOS = frozenset({"llama3", "llama-v3", "llama-bpe"})
_GPT2_SPLITS = frozenset({"default", "gpt-2"})
# Split as gpt-2, and every digit for itself (as in llama.cpp); transformers would leave out the digits.
_SINGLE_DIGIT_SPLITS = frozenset({"smollm"})
_TOKEN_FIELDS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def write_tokenizer(
    directory: Path, metadata: Mapping[str, Any], *, architecture: str, chat_template: str | None
) -> None:
    """Write the tokenizer's files into `directory`. chat_template: what to use if the file has none.

    Raises ModelLoadError if the file has no vocabulary, or one of a kind that transformers does not know.
    """
    _refuse_unknown(metadata, architecture)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    described = {
        name: metadata[f"tokenizer.{key}"]
        for key, name in GGUF_TOKENIZER_MAPPING["tokenizer"].items()
        if f"tokenizer.{key}" in metadata
    }
    try:
        tokenizer, _ = convert_gguf_tokenizer(architecture, described)
    except ValueError as exc:
        raise ModelLoadError(f"the GGUF file's tokenizer cannot be used: {exc}") from exc
    if metadata.get("tokenizer.ggml.pre") in _SINGLE_DIGIT_SPLITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    named = {name: tokens[metadata[key]] for name, key in _TOKEN_FIELDS.items() if key in metadata}
    has_bos = _adds_bos(metadata) and "bos_token" in named
    if has_bos:
        bos = named["bos_token"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos}:0 $A:0",
            pair=f"{bos}:0 $A:0 $B:1",
            special_tokens=[(bos, tokenizer.token_to_id(bos))],
        )
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "add_bos_token": has_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(metadata[f"{architecture}.context_length"]),
    }
    _write_json(directory / "tokenizer_config.json", config)
    generation = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(metadata),
    }
    _write_json(directory / "generation_config.json", generation)
    template = metadata.get("tokenizer.chat_template", chat_template)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _refuse_unknown(metadata: Mapping[str, Any], architecture: str) -> None:
    """Raise ModelLoadError for what transformers would pass over, with other tokens as the result."""
    for key in ("tokens", "token_type"):
        if f"tokenizer.ggml.{key}" not in metadata:
            raise ModelLoadError(f"the GGUF file has no tokenizer.ggml.{key}", hint="is the file complete?")
    model, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    known_splits = GGUF_PRE_TOKENIZER_SPLITS.keys() | _GPT2_SPLITS | _SINGLE_DIGIT_SPLITS
    if model == "gpt2" and split not in known_splits:
        raise ModelLoadError(
            f"the GGUF file splits text as {split!r}, which is not known here",
            hint="serve the original checkpoint (a directory with tokenizer.json) instead",
        )
    has_no_space = metadata.get("tokenizer.ggml.add_space_prefix") is False
    if model == "llama" and has_no_space and not architecture.startswith("gemma"):
        raise ModelLoadError(
            "the GGUF file wants no space before a text, which is not built for its tokenizer",
            hint="serve the original checkpoint (a directory with tokenizer.json) instead",
        )


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    if metadata.get("tokenizer.ggml.add_eos_token"):
        raise ModelLoadError("the GGUF file wants an end token after every prompt: no generating model does")
    default = (
        metadata.get("tokenizer.ggml.model") == "llama"
        or metadata.get("tokenizer.ggml.pre") in _PRE_TOKENIZERS_WITH_BOS
    )
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def _end_ids(metadata: Mapping[str, Any]) -> list[int]:
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    named = {int(metadata[key]) for key in keys if key in metadata}
    by_text = {
        token_id
        for token_id, (token, kind) in enumerate(
            zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
        )
        if kind == _CONTROL and token in END_OF_TURN_TOKENS
    }
    return sorted(named | by_text)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
