"""What is trained: an adapter leaves the weights below it alone, its snapshot is the policy it trains, and frozen weights stay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from respec.config import LoraConfig, PolicyConfig, parse_config
from respec.errors import ConfigError
from respec.models.adapted import is_adapted, plain_state
from respec.policy.adapters import choose_trained, matched, with_lora
from respec.policy.learner import PolicyLearner
from respec.policy.logprobs import token_logprobs
from respec.policy.pack import pack
from respec.rollout.draft.suffix import SuffixDrafter
from respec.rollout.engine import Engine
from respec.types import PLAIN, Ask, Plan, Prompt, Sample, Sampling, ScoredRollout, Stream
from respec.weights.publish import publish

pytest.importorskip("peft")
ADVANTAGES = (1.0, -1.0, 0.5, -0.5, 0.7, -0.7, 0.0, 0.0)
LORA = [LoraConfig(r=3, alpha=6.0), LoraConfig(r=3, alpha=6.0, dora=True)]


def adapted(policy, config: PolicyConfig):
    choose_trained(policy.model, config, seed=3)
    return policy


def trained(policy, config: PolicyConfig, make_samples, updates: int = 3):
    learner = PolicyLearner(adapted(policy, config), config, 10)
    for _ in range(updates):
        learner.update(make_samples(ADVANTAGES), 1.0)
    return learner


@pytest.mark.parametrize("lora", LORA, ids=["lora", "dora"])
def test_weights_below_an_adapter_keep_every_bit_and_have_no_gradient(make_policy, make_samples, lora):
    plain = {name: weight.clone() for name, weight in make_policy(torch.float32).model.named_parameters()}
    policy = make_policy(torch.float32)
    trained(policy, PolicyConfig(lr=0.01, lora=lora), make_samples)
    below = {name.replace(".base_layer", ""): w for name, w in policy.model.named_parameters() if ".lora_" not in name}
    assert below.keys() == plain.keys()
    for name, weight in below.items():
        assert torch.equal(weight, plain[name]) and weight.grad is None and not weight.requires_grad, name
    merged = dict(plain_state(policy.model))
    moved = {name for name, weight in plain.items() if not torch.equal(merged[name], weight)}
    assert moved == {name for name in plain if name.endswith("_proj.weight")}


@pytest.mark.parametrize("lora", LORA, ids=["lora", "dora"])
def test_a_new_adapter_changes_nothing_and_is_drawn_by_its_seed(make_policy, lora):
    token = torch.arange(1, 12)[None]
    policies = [make_policy() for _ in range(3)]
    before = policies[0].model(input_ids=token).logits
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    for policy, seed in zip(policies, (1, 1, 2), strict=True):
        with_lora(policy.model, lora, seed)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.allclose(policies[0].model(input_ids=token).logits, before, atol=1e-12)
    drawn = [next(w for n, w in p.model.named_parameters() if "lora_A" in n) for p in policies]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("lora", LORA, ids=["lora", "dora"])
def test_the_merged_snapshot_decodes_what_the_adapter_trains(make_policy, make_samples, lora):
    """Laws 1 and 2: drafted and plain tokens agree to the bit, and the learner recomputes their log-probabilities to 1e-10."""
    policy = make_policy()
    trained(policy, PolicyConfig(lr=0.02, lora=lora), make_samples)
    prompts = [Prompt(row, "", tuple(range(1 + row, 9 + row))) for row in range(3)]
    asks, sampling = [Ask(prompt, Stream.TRAIN, 0, 3) for prompt in prompts], Sampling(20, temperature=0.7)

    def draw(plan: Plan):
        engine = Engine(
            publish(policy, "float64", 1), policy.tokenizer, policy.eos_token_ids, 0, max_batch=4, drafters=[SuffixDrafter(1, 0.1, 1000)]
        )  # fmt: skip
        return engine.rollout(asks, sampling, plan)

    (drafted, stats), (plain, _) = draw(Plan("suffix", 3, 1, 3)), draw(PLAIN)
    assert stats.drafted > 0
    for one, other in zip(drafted, plain, strict=True):
        assert np.array_equal(one.token_T, other.token_T) and np.array_equal(one.logprob_T, other.logprob_T)
    samples = [Sample(ScoredRollout(r, 0.0, {}), np.zeros(len(r.token_T), np.float32)) for r in plain]
    (batch,) = pack(samples, 10_000, 0.7)
    again_C, _ = token_logprobs(policy.model, batch, 64)
    # rollouts keep their log-probabilities in float32
    assert (again_C.float() - batch.rollout_logprob_C).abs().max() < 1e-6
    merged = make_policy()
    merged.model.load_state_dict(dict(plain_state(policy.model)))
    assert (token_logprobs(merged.model, batch, 64)[0] - again_C).abs().max() < 1e-10


class Products(TorchDispatchMode):
    """Shapes that matrix products make within."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.shapes.add(tuple(made.shape))
        return made


def test_no_gradient_of_a_frozen_weight_is_computed(make_policy, make_samples):
    (batch,) = pack(make_samples(ADVANTAGES), 10_000, 1.0)
    made = []
    for config in (PolicyConfig(), PolicyConfig(lora=LORA[0])):
        model = adapted(make_policy(), config).model
        below = {tuple(w.shape) for name, w in model.named_parameters() if ".lora_" not in name and w.ndim == 2}
        logprob_C, _ = token_logprobs(model, batch, 64)
        with Products() as products:
            logprob_C.sum().backward()
        made.append(below & products.shapes)
    assert made[0] == below and not made[1]


def test_an_adapter_learns(make_policy, make_samples):
    policy, samples = make_policy(), make_samples((1.0, 1.0, 0.0, 0.0))
    learner = trained(policy, PolicyConfig(lr=0.02, lora=LORA[0], aggregation="token_mean"), make_samples, updates=0)
    (batch,) = pack(samples[:2], 10_000, 1.0)
    before = token_logprobs(policy.model, batch, 64)[0].sum()
    for _ in range(8):
        learner.update(samples, 1.0)
    assert token_logprobs(policy.model, batch, 64)[0].sum() > before + 1


def test_targets_are_chosen_by_pattern(make_policy):
    model = make_policy().model
    with_lora(model, LoraConfig(targets=("layers.1.*.q_proj", "mlp")), 0)
    found = {name.rpartition(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name}
    assert found == {
        "model.layers.1.self_attn.q_proj",
        *(f"model.layers.{i}.mlp.{part}_proj" for i in (0, 1) for part in ("gate", "up", "down")),
    }
    assert is_adapted(model) and not is_adapted(make_policy().model)


@pytest.mark.parametrize("target", ["query", "lm_head", "embed_tokens"])
def test_a_target_that_is_none_is_refused_with_what_there_is(make_policy, target):
    with pytest.raises(ConfigError, match=rf"policy.lora.targets: '{target}' matches nothing.*self_attn.q_proj"):
        with_lora(make_policy().model, LoraConfig(targets=("q_proj", target)), 0)


def test_dropout_is_refused():
    tree = {"model": {"path": "x"}, "task": {"dataset": "x"}, "policy": {"lora": {"dropout": 0.1}}}
    with pytest.raises(ConfigError, match=r"policy.lora.dropout: must be 0.*got 0.1"):
        parse_config(tree)
    tree["policy"]["lora"] = {}
    assert parse_config(tree).policy.lora == LoraConfig()


def test_frozen_weights_stay_and_the_others_move_as_if_none_were(make_policy, make_samples):
    frozen, free = make_policy(), make_policy()
    config = PolicyConfig(lr=0.01, freeze=("embed_tokens", "layers.0.*", "model.norm"), grad_clip=1e9)
    trained(frozen, config, make_samples, updates=1)
    trained(free, config.model_copy(update={"freeze": ()}), make_samples, updates=1)
    start, moved = dict(make_policy().model.named_parameters()), dict(free.model.named_parameters())
    for name, weight in frozen.model.named_parameters():
        held = name.startswith(("model.embed_tokens.", "model.layers.0.", "model.norm."))
        assert weight.requires_grad != held
        assert torch.equal(weight, start[name] if held else moved[name]), name


def test_a_pattern_is_a_run_of_whole_parts_of_a_name():
    names = ["model.layers.1.mlp.up.weight", "model.layers.10.mlp.up.weight", "model.norm.weight"]
    assert matched(["layers.1"], names, "key") == names[:1]
    assert matched(["layers.1*.mlp"], names, "key") == names[:2]
    assert matched(["norm", "*.weight"], names, "key") == [names[2], *names[:2]]
    with pytest.raises(ConfigError, match=r"policy.freeze: 'layer.1' matches nothing; there are model.norm.weight"):
        matched(["layer.1"], names, "policy.freeze")


def test_freezing_everything_is_refused(make_policy):
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        choose_trained(make_policy().model, PolicyConfig(freeze=("*",)), 0)
