"""Our rollouts in TRL's real GRPOTrainer: the engine's own tokens, of the weights that the trainer has, whatever drafts."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from respec.config import ModelConfig
from respec.integrations.trl_terms import row_of
from respec.models.load import Policy, load_policy
from respec.rollout.engine import Engine
from respec.types import Ask, Prompt, Sampling, Stream
from respec.weights.publish import publish

from .conftest import PROMPTS, Kept, grpo, quiet

pytest.importorskip("trl")


def alone(
    policy: Policy, prompt_ids: list[list[int]], draw: int, sampling: Sampling, stream: Stream = Stream.TRAIN
) -> dict:
    """Completions and log-probabilities by an engine that has never heard of TRL: {(prompt, sample): ...}."""
    engine = Engine(publish(policy, "float32", 0), policy.tokenizer, policy.eos_token_ids, 0, 64)
    asks = [
        Ask(Prompt(row_of(ids), "", ids), stream, draw, prompt_ids.count(list(ids)))
        for ids in dict.fromkeys(map(tuple, prompt_ids))
    ]
    return {(r.prompt.token_ids, r.sample): r for r in engine.rollout(asks, sampling)[0]}


def test_each_step_draws_the_engines_own_tokens_of_the_weights_that_the_trainer_has_then(tmp_path):
    weights: list[dict[str, torch.Tensor]] = []
    kept = Kept(quiet(), lambda trainer: weights.append(copy.deepcopy(trainer.model.state_dict())))
    grpo(tmp_path, kept, max_steps=3, temperature=0.9).train()
    assert kept.versions == [0, 1, 2] and len(kept.given) == 3
    policy, drawn = load_policy(ModelConfig(path="builtin:demo")), []
    for step, (given, state) in enumerate(zip(kept.given, weights, strict=True)):
        policy.model.load_state_dict(state)
        own, seen = alone(policy, given["prompt_ids"], step, Sampling(20, 0.9)), dict[tuple[int, ...], int]()
        for ids, completion, logprobs in zip(
            *(given[k] for k in ("prompt_ids", "completion_ids", "logprobs")), strict=True
        ):
            key = tuple(ids)
            seen[key] = seen.get(key, -1) + 1
            assert completion == own[key, seen[key]].token_T.tolist()
            assert logprobs == own[key, seen[key]].logprob_T.tolist()
        drawn.append([r.token_T.tolist() for r in own.values()])
    # of the first weights, the third step's tokens would be others
    policy.model.load_state_dict(weights[0])
    stale = alone(policy, kept.given[2]["prompt_ids"], 2, Sampling(20, 0.9))
    assert [r.token_T.tolist() for r in stale.values()] != drawn[2]


@pytest.mark.parametrize(
    "speculation", [{"drafter": "auto"}, {"drafter": "suffix"}, {"drafter": "self_quant", "s": 3}], ids=str
)
def test_speculation_changes_no_completion_and_no_weight(tmp_path, speculation):
    runs = {}
    for name, asked in (("on", speculation), ("off", {"drafter": "off"})):
        kept = Kept(quiet(speculation=asked))
        trainer = grpo(tmp_path / name, kept, max_steps=3)
        trainer.train()
        runs[name] = kept, trainer
    (on, trained), (off, plainly) = runs["on"], runs["off"]
    assert on.given == off.given
    assert all(torch.equal(a, b) for a, b in zip(trained.model.parameters(), plainly.model.parameters(), strict=True))
    logged = trained.state.log_history[1]
    assert logged["respec/rollout/tokens"] == sum(map(len, on.tokens[1]))
    assert sum(value for name, value in logged.items() if name.startswith("respec/plan/")) == pytest.approx(1)
    if speculation["drafter"] != "auto":
        assert logged["respec/rollout/accepted_length"] > 1 and logged["respec/plan/off"] == 0
    assert plainly.state.log_history[1]["respec/rollout/accepted_length"] == 1


@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"temperature": 1.0, "top_k": 3}], ids=str)
def test_log_probabilities_are_those_of_trls_own_forward_pass(tmp_path, sampling):
    """In float32 to 1e-4. A truncation, of which TRL's pass knows nothing, adds the mass that it kept."""
    kept, scored = Kept(quiet()), []
    trainer = grpo(tmp_path, kept, max_steps=2, num_iterations=2, **sampling)
    made = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: scored.append(made(inputs)) or scored[-1]
    trainer.train()
    (batch,) = scored
    mask = batch["completion_mask"].bool()
    ours, theirs = batch["sampling_per_token_logps"][mask], batch["old_per_token_logps"][mask]
    kept_mass = torch.tensor(np.concatenate([_mass(kept, ids) for ids in kept.given[0]["completion_ids"]]))
    assert (ours + kept_mass - theirs).abs().max() < 1e-4
    assert (kept_mass.abs().max() > 0.05) == ("top_k" in sampling)


def _mass(kept: Kept, ids: list[int]) -> np.ndarray:
    return next(r.kept_logmass_T for r in kept.rollouts.rollouts if r.token_T.tolist() == ids)


def test_the_policy_learns_from_them(tmp_path):
    """200 completions: a reward for short ones is raised well beyond chance (its deviation is about 0.2 in a step of 32)."""

    def short(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [1 - len(ids) / 20 for ids in completion_ids]

    trainer = grpo(
        tmp_path, quiet(), per_device_train_batch_size=32, num_generations=8, max_steps=8, learning_rate=3e-4, more={"reward_funcs": short}
    )  # fmt: skip
    trainer.train()
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    assert len({line["loss"] for line in trainer.state.log_history if "loss" in line}) > 3
    assert np.mean(rewards[-2:]) > rewards[0] + 0.1


@pytest.mark.parametrize(
    "settings, generations",
    [
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 1}, 8),
        ({"gradient_accumulation_steps": 2}, 2),
        ({"gradient_accumulation_steps": 1, "steps_per_generation": 2}, 1),
        ({"num_iterations": 2}, 1),
    ],
    ids=str,
)
def test_every_generation_is_drawn_once_and_anew(tmp_path, settings, generations):
    """With one prompt in all the data, no two generations have the same completions, not those of one optimizer step either."""
    kept = Kept(quiet())
    grpo(tmp_path, kept, prompts=PROMPTS[:1] * 8, max_steps=2, learning_rate=0.0, temperature=2.0, **settings).train()
    assert len(kept.given) == generations
    completions = [tuple(ids) for tokens in kept.tokens for ids in tokens]
    assert len(set(completions)) > 0.9 * len(completions)


def test_an_evaluation_samples_as_trl_does_or_greedily_and_leaves_training_as_it_was(tmp_path):
    from datasets import Dataset

    runs = {}
    for name, greedy, every in (("sampled", False, 1), ("greedy", True, 1), ("none", False, 0)):
        kept = Kept(quiet(greedy_eval=greedy))
        evaluated = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4} if every else {}
        given = {"eval_dataset": Dataset.from_dict({"prompt": PROMPTS[:2]})} if every else {}
        trainer = grpo(tmp_path / name, kept, max_steps=2, temperature=2.0, more=given, **evaluated)
        trainer.train()
        runs[name] = kept, trainer
    for kept, _ in runs.values():
        assert [given for given, mode in zip(kept.given, kept.modes, strict=True) if mode == "train"] == runs["none"][
            0
        ].given
    for name, different in (("sampled", True), ("greedy", False)):
        kept, trainer = runs[name]
        tokens = [given for given, mode in zip(kept.tokens, kept.modes, strict=True) if mode == "eval"]
        assert len(tokens) == 4 and all(len(part) == 4 for part in tokens)
        assert all((len(set(map(tuple, part))) > 1) == different for part in tokens)
        assert any("eval_respec/rollout/tokens_per_s" in line for line in trainer.state.log_history)
        # the weights after the step, not those that it began with
        assert kept.versions == [0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("chat", [True, False])
def test_prompts_are_tokenized_as_in_trls_own_generation(tmp_path, chat):
    from transformers import AutoTokenizer

    from .conftest import DEMO

    def tokenizer() -> Any:
        made = AutoTokenizer.from_pretrained(DEMO)
        made.chat_template = "{% for m in messages %}{{ m['content'] }}{{ '!' if thinking else '' }}{% endfor %}{% if add_generation_prompt %}\n{% endif %}"
        return made

    prompts = [[{"role": "user", "content": text.strip()}] for text in PROMPTS] if chat else PROMPTS
    settings = {"max_steps": 1, "chat_template_kwargs": {"thinking": True}, "prompts": prompts}
    kept, seen = Kept(quiet()), []
    grpo(tmp_path / "ours", kept, more={"processing_class": tokenizer()}, **settings).train()
    plain = grpo(tmp_path / "theirs", None, more={"processing_class": tokenizer()}, **settings)
    own = plain._generate_single_turn
    plain._generate_single_turn = lambda prompt_ids, *rest: seen.append(prompt_ids) or own(prompt_ids, *rest)
    plain.train()
    assert kept.given[0]["prompt_ids"] == [list(ids) for ids in seen[0]]
    assert all(len(ids) > 5 for ids in seen[0])


def test_a_killed_and_resumed_run_draws_what_one_never_killed_does(tmp_path):
    """Law 8; a checkpoint lies between two generations, and within an epoch: TRL begins each anew with the order of the first."""
    whole, stopped, resumed = (Kept(quiet()) for _ in range(3))
    prompts = [f"{i} + {i + 1} =\n" for i in range(9)] + [f"{i} - {i - 1} =\n" for i in range(2, 9)]
    saved = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2, "prompts": prompts}
    trainer = grpo(tmp_path / "whole", whole, max_steps=4, **saved)
    trainer.train()
    grpo(tmp_path / "stopped", stopped, max_steps=2, **saved).train()
    again = grpo(tmp_path / "stopped", resumed, max_steps=4, **saved)
    again.train(resume_from_checkpoint=True)
    assert whole.given == stopped.given + resumed.given
    assert resumed.versions == [2, 3]
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), again.model.parameters(), strict=True))


def test_weights_that_change_without_a_step_are_seen(tmp_path):
    kept = Kept(quiet())
    trainer = grpo(tmp_path, kept, max_steps=1, learning_rate=0.0)
    batch = [{"prompt": prompt} for prompt in PROMPTS for _ in range(4)]
    trainer._generate([row["prompt"] for row in batch])
    with torch.no_grad():
        trainer.model.model.norm.weight.mul_(0.5)
    trainer._generate([row["prompt"] for row in batch])
    assert kept.versions == [0, 1]


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_is_merged_into_what_draws(tmp_path, dora):
    """The tokens are those of the adapted model: its own forward pass, by TRL, gives the log-probabilities."""
    from peft import LoraConfig

    peft_config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=dora, init_lora_weights=False)
    kept, scored = Kept(quiet()), []
    trainer = grpo(
        tmp_path,
        kept,
        max_steps=2,
        gradient_accumulation_steps=1,
        num_iterations=1,
        beta=0.1,
        more={"peft_config": peft_config},
    )
    made = trainer._generate_and_score_completions

    def and_score(inputs: Any) -> Any:
        batch = made(inputs)
        ids, mask = (torch.cat([batch[f"prompt_{k}"], batch[f"completion_{k}"]], 1) for k in ("ids", "mask"))
        with torch.no_grad():
            logps = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, mask, batch["completion_ids"].shape[1]
            )[0]
        scored.append((batch, logps))
        return batch

    trainer._generate_and_score_completions = and_score
    trainer.train()
    assert len(scored) == 2 and kept.versions == [0, 1]
    for batch, logps in scored:
        mask = batch["completion_mask"].bool()
        assert (batch["sampling_per_token_logps"] - logps)[mask].abs().max() < 1e-4
        assert (batch["sampling_per_token_logps"] - batch["ref_per_token_logps"])[mask].abs().max() > 0.01
