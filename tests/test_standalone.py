"""What single stages load."""

from __future__ import annotations

from pathlib import Path

import pytest

from respec.errors import CheckpointError
from respec.standalone import model_of


def test_a_run_without_a_checkpoint_is_no_model_yet(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        model_of(str(tmp_path))


@pytest.mark.parametrize("path", ["builtin:demo", "owner/name", "absent"])
def test_what_is_no_run_is_taken_as_it_is(path: str) -> None:
    assert model_of(path) == path
