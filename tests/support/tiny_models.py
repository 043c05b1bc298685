"""Model directories of a few megabytes that `forkpoint serve` takes: weights, tokenizer, chat template."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from support.tiny_checkpoints import save_random_checkpoint
from tokenizers import AddedToken, decoders, models
from transformers import Gemma3TextConfig, PreTrainedConfig

VOCAB_SIZE = 320
WINDOW = 32
CONTEXT_LENGTH = 4096
NUM_SPECIAL = 4
_SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}:"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def one_character_per_token() -> tokenizers.Tokenizer:
    """Every token but the special ones is one character of its own, so a text tells its tokens."""
    characters = ["\n", *map(chr, range(ord(" "), ord("~") + 1))]
    num_others = VOCAB_SIZE - NUM_SPECIAL - len(characters)
    characters += [chr(ord("一") + index) for index in range(num_others)]
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL_TOKENS, *characters])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse()])
    return _with_special_tokens(tokenizer)


def bytes_and_pieces() -> tokenizers.Tokenizer:
    """Mostly single bytes and a few pieces of words: random output is full of broken UTF-8."""
    pieces = [*_SPECIAL_TOKENS, *[f"<0x{byte:02X}>" for byte in range(256)], "▁", *"helowrd日本語é🚂"]
    pieces += [f"▁p{index}" for index in range(VOCAB_SIZE - len(pieces))]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _with_special_tokens(tokenizer)


def save_tiny_model(directory: Path, tokenizer: tokenizers.Tokenizer) -> Path:
    """Save a Gemma 3 of four layers, SSSF, with this tokenizer. Returns its directory."""
    save_random_checkpoint(_config(), directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def _config() -> PreTrainedConfig:
    return Gemma3TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        sliding_window=WINDOW,
        # Tied and random, the last token's own row would win every time, whatever came before it.
        tie_word_embeddings=False,
        query_pre_attn_scalar=24,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
        },
    )


def _with_special_tokens(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL_TOKENS])
    return tokenizer
