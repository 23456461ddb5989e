"""What every section of a configuration is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Room(BaseModel):
    """Base of every section: frozen; unknown keys, NaN and infinity are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
