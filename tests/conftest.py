"""Settings of the whole test run that must be made before torch is imported."""

from __future__ import annotations

import os

# As in the engine process: threads that spin at barriers slow each other and the servers under test down.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
