"""What `make peers` installs: exact versions, ours where the peer allows, and nothing that a CPU build of torch cannot load."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from respec.bench.peers.process import ROLLOUT_PEERS, STEP_PEERS, WORKERS

ROOT = Path(__file__).parents[3]
LISTS = sorted((ROOT / "benchmarks" / "peers").glob("*.txt"))


def versions(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.!+-]+", line) for line in lines)
    return dict(line.split("==") for line in lines)


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_a_list_is_exact_and_loads_on_a_cpu(path: Path):
    held = versions(path)
    assert held["torch"] == versions(ROOT / "constraints.txt")["torch"]
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(held)


def test_generate_is_measured_in_our_own_version_of_transformers():
    held = versions(ROOT / "benchmarks" / "peers" / "hf.txt")
    assert held["transformers"] == versions(ROOT / "constraints.txt")["transformers"]


def test_every_peer_has_a_list_and_a_worker():
    for kind in (*ROLLOUT_PEERS.values(), *STEP_PEERS.values()):
        assert kind.environment in {path.stem for path in LISTS}
        assert (WORKERS / kind.worker).exists()
