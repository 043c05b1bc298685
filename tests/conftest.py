"""Settings of the whole test run that must be made before torch is imported."""

from __future__ import annotations

import os

# As in the engine process: threads that spin for long slow each other and the servers under test down.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
