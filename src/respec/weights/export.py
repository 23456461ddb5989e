"""A policy's weights as other programs load them: a Hugging Face folder, or an adapter in peft's format."""

from __future__ import annotations

import shutil
from pathlib import Path

from respec.models.adapted import is_adapted, plain_state, save_adapter
from respec.models.load import Policy

ADAPTER = "adapter"


def save_trained(policy: Policy, folder: Path) -> None:
    """What training changes, and the tokenizer: the adapter where there is one, else the model."""
    if not is_adapted(policy.model):
        return save_model(policy, folder)
    save_adapter(policy.model, folder, policy.source)
    policy.tokenizer.save_pretrained(folder)
    return None


def save_model(policy: Policy, folder: Path) -> None:
    """The model, an adapter merged in, with its tokenizer; loads with `from_pretrained`."""
    state = dict(plain_state(policy.model)) if is_adapted(policy.model) else None
    policy.model.save_pretrained(folder, state_dict=state)
    policy.tokenizer.save_pretrained(folder)


def export_adapter(policy: Policy, run_dir: Path) -> None:
    """Puts the adapter, where there is one, into the run folder as `adapter/`: the old one stays until the new one is whole."""
    if not is_adapted(policy.model):
        return
    scratch, target = run_dir / f".{ADAPTER}.tmp", run_dir / ADAPTER
    shutil.rmtree(scratch, ignore_errors=True)
    save_trained(policy, scratch)
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)
