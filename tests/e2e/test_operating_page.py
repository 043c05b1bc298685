"""The shell blocks of docs/operating.md that are marked `sh`, run as a reader would beside a server."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from support import served
from support.served import serve_ready

PAGE = Path(__file__).parents[2] / "docs" / "operating.md"
URL = "http://127.0.0.1:8000"


def test_every_command_of_the_page_that_can_be_run_here_succeeds(letters_dir: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) > 4
    path = f"{Path(served.FORKPOINT).parent}{os.pathsep}{os.environ['PATH']}"
    with serve_ready(letters_dir) as server:
        for block in blocks:
            assert "http" not in block.replace(URL, "")
            command = block.replace(URL, server.url)
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", command],
                capture_output=True,
                text=True,
                env={**os.environ, "PATH": path},
            )
            assert done.returncode == 0, (command, done.stdout, done.stderr)
            assert done.stdout
