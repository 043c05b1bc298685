"""Two tokenizers of a few hundred tokens: one spelled like Gemma's or Llama's, one like Qwen's."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

SAMPLE = [
    "Hello world, hello  wörld! 日本語 🚂 naïve e\u0301",
    "def f(x):\n    return x\n\n\nprint('hi')",
    "über Straße",
]


def sentencepiece_like(*, strips_prefix_space: bool = False, adds_bos: bool = True) -> tokenizers.Tokenizer:
    """Byte fallback, "▁" for a space. strips_prefix_space: puts a space before every text, as Llama does."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    pieces += [
        "▁",
        *"abcdefghijklmnopqrstuvwxyzHW日本語",
        "▁w",
        "or",
        "▁wor",
        "ld",
        "▁world",
        "▁▁",
        "He",
        "ll",
        "Hell",
    ]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [
        ("▁", "w"),
        ("o", "r"),
        ("▁w", "or"),
        ("l", "d"),
        ("▁wor", "ld"),
        ("▁", "▁"),
        ("H", "e"),
        ("l", "l"),
    ]
    merges.append(("He", "ll"))
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips_prefix_space:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<pad>", "<eos>", "<bos>", "<unk>")]
    )
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos>:0 $A:0", pair="<bos>:0 $A:0 $B:1", special_tokens=[("<bos>", 2)]
        )
    return tokenizer


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE with NFC, no BOS, two special tokens and one added token that is text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.add_special_tokens(
        [AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)]
    )
    tokenizer.add_tokens([AddedToken("<think> 日", special=False, normalized=False)])
    return tokenizer
