"""Runs other projects' clients and load tools, unmodified, against a running server.

    .venv/bin/python tests/compat/run.py TOOL URL MODEL [--model-dir DIRECTORY]

TOOL: langchain, litellm, guidellm or aiperf. Each is installed into a virtual environment of its own below a
temporary folder. MODEL: the name that is served. guidellm and aiperf make prompts of a length in tokens, with
the tokenizer in DIRECTORY. The exit status is the tool's. Not part of the tests: installing takes minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Tool:
    """requirement: what pip installs. command: from (bin folder, URL, model, model folder)."""

    requirement: str
    command: Callable[[Path, str, str, str], list[str]]


TOOLS = {
    "langchain": Tool(
        "langchain-openai==1.*",
        lambda bin_dir, url, model, _: [f"{bin_dir}/python", f"{HERE}/langchain_calls.py", url, model],
    ),
    "litellm": Tool(
        "litellm==1.*",
        lambda bin_dir, url, model, _: [f"{bin_dir}/python", f"{HERE}/litellm_calls.py", url, model],
    ),
    "guidellm": Tool(
        "guidellm==0.8.1",
        lambda bin_dir, url, model, model_dir: [
            f"{bin_dir}/guidellm", "run", "--disable-progress",
            "--backend", f"kind=openai_http,target={url},model={model}",
            "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=20",
            "--tokenizer", f"kind=hf_auto,model={model_dir}",
            "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        ],
    ),
    "aiperf": Tool(
        "aiperf==0.13.*",
        lambda bin_dir, url, model, model_dir: [
            f"{bin_dir}/aiperf", "profile", "--url", url, "--model", model, "--tokenizer", model_dir,
            "--endpoint-type", "chat", "--streaming", "--concurrency", "4", "--request-count", "20",
            "--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16", "--ui", "none",
        ],
    ),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tool", choices=sorted(TOOLS))
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--model-dir", default="")
    arguments = parser.parse_args()
    tool = TOOLS[arguments.tool]
    with tempfile.TemporaryDirectory() as directory:
        venv.create(directory, with_pip=True)
        bin_dir = Path(directory, "bin")
        subprocess.run([str(bin_dir / "pip"), "install", "-q", tool.requirement], check=True)
        command = tool.command(bin_dir, arguments.url, arguments.model, arguments.model_dir)
        return subprocess.run(command, cwd=directory, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
