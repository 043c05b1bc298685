"""The model families: the only place that knows a model by name. `docs/models.md` says how to add one."""

from forkpoint.model.families.family import Family
from forkpoint.model.families.read import read_config
from forkpoint.model.families.table import FAMILIES

__all__ = ["FAMILIES", "Family", "read_config"]
