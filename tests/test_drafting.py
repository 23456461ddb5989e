"""Every drafter that a configuration can name is made for the policy, or refused with what is missing."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from respec.config import ModelConfig, SpeculationConfig, parse_config
from respec.config.speculation import DrafterName
from respec.drafting import MAKERS, first_head, make_drafters
from respec.errors import ConfigError, ModelError
from respec.models.eagle import create_head, save_head
from respec.models.load import Policy, load_policy

NAMES = get_args(DrafterName)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(ModelConfig(path="builtin:demo"))


def needs(name: str, folder) -> dict[str, str]:
    return {"eagle": {"drafter_path": str(folder)}, "model": {"draft_model": "builtin:demo"}}.get(name, {})


def test_the_table_and_the_configuration_name_the_same():
    assert set(MAKERS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_drafter_is_made_by_its_name(policy, tmp_path, name):
    save_head(create_head(policy.model, None, 0, "builtin:demo"), tmp_path)
    config = SpeculationConfig.model_validate({"drafter": name, **needs(name, tmp_path)})
    (made,) = make_drafters(config, policy, "auto")
    assert made.name == name
    again = SpeculationConfig.model_validate(
        {"drafter": "auto", "candidates": [name, "ngram"], **needs(name, tmp_path)}
    )
    assert [drafter.name for drafter in make_drafters(again, policy, "auto")] == [name, "ngram"]


def test_off_makes_none(policy):
    assert make_drafters(SpeculationConfig(drafter="off"), policy, "auto") == ()


@pytest.mark.parametrize(("name", "key"), [("eagle", "drafter_path"), ("model", "draft_model")])
def test_what_a_drafter_needs_is_asked_for(name, key):
    tree = {"model": {"path": "builtin:demo"}, "task": {"dataset": "chain_sum"}}
    with pytest.raises(ConfigError, match=f"needs speculation.{key}"):
        parse_config({**tree, "speculation": {"drafter": name}})
    with pytest.raises(ConfigError, match=f"needs speculation.{key}"):
        parse_config({**tree, "speculation": {"candidates": ["suffix", name]}})


def test_a_folder_without_a_head_is_refused(policy, tmp_path):
    config = SpeculationConfig.model_validate({"drafter": "eagle", "drafter_path": str(tmp_path)})
    with pytest.raises(ModelError):
        make_drafters(config, policy, "auto")


def test_a_head_is_put_where_the_policy_is(tmp_path):
    policy = load_policy(ModelConfig(path="builtin:demo"))
    save_head(create_head(policy.model, None, 0, "builtin:demo"), tmp_path)
    config = SpeculationConfig.model_validate({"drafter": "eagle", "drafter_path": str(tmp_path)})
    torch.nn.Module.to(policy.model, "meta")
    assert {tensor.device.type for tensor in first_head(config, policy).state_dict().values()} == {"meta"}
