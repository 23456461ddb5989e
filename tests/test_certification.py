"""The certificate of our own engine, end to end on a tiny model: it passes as the engine is, and fails where the engine is broken."""

from __future__ import annotations

import json
import os

import pytest
import torch
import typer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from respec.certification import certify, default_drafters
from respec.cli.verification import certify as command
from respec.config import ModelConfig
from respec.errors import ConfigError
from respec.models import kernels
from respec.models.eagle import create_head, save_head
from respec.models.load import load_policy
from respec.rollout.tree import ROOT
from respec.types import Ask, Prompt, Sampling, Stream

PROMPTS = ("abcabcabc", "hello there hello", "xyz", "q")
TOKENS = 2048
# Those that need nothing but the policy.
NAMES = ("ngram", "suffix", "previous", "self_quant")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRS"]
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def failed(certificate) -> set[tuple[str, str]]:
    return {(finding.check, finding.subject) for finding in certificate.findings if finding.outcome == "failed"}


def test_the_engine_as_it_is_gets_its_certificate(folder):
    said = []
    certificate = certify(folder, prompts=PROMPTS, tokens=TOKENS, say=said.append)
    assert certificate.passed, failed(certificate)
    passed = {(finding.check, finding.subject) for finding in certificate.findings if finding.outcome == "passed"}
    assert {("same tokens", f"{name}, {kind}") for name in NAMES for kind in ("chain", "tree")} <= passed
    assert {("batch invariance", "decoder"), ("prefill = decode", "decoder"), ("rollback", "decoder")} <= passed
    for subject in ("plain decoding", *(f"rejection, {name}" for name in NAMES)):
        assert {(check, subject) for check in ("distribution", "first tokens", "log-probabilities")} <= passed
    lossy = next(finding for finding in certificate.findings if finding.check == "mode lossy")
    assert lossy.outcome == "unchecked" and "cannot be certified" in lossy.sentence
    assert len(said) > 10 and certificate.circumstances["threads"] == torch.get_num_threads()


def test_drafters_that_need_a_head_or_a_model_are_certified_once_they_have_it(folder, tmp_path):
    policy = load_policy(ModelConfig(path=folder))
    save_head(create_head(policy.model), tmp_path)
    assert not {"eagle", "model"} & set(default_drafters())
    makers = default_drafters(tmp_path, folder)
    certificate = certify(folder, None, {name: makers[name] for name in ("eagle", "model")}, PROMPTS, TOKENS)
    assert certificate.passed, failed(certificate)
    passed = {(finding.check, finding.subject) for finding in certificate.findings if finding.outcome == "passed"}
    assert {("same tokens", f"{name}, {kind}") for name in ("eagle", "model") for kind in ("chain", "tree")} <= passed
    assert {("distribution", "rejection, eagle"), ("distribution", "rejection, model")} <= passed


def test_the_pytorch_path_is_certified_and_says_that_the_kernels_are_not(folder, monkeypatch):
    monkeypatch.delenv("RESPEC_NATIVE", raising=False)
    certificate = certify(folder, "torch", {"suffix": default_drafters()["suffix"]}, PROMPTS, 512)
    assert certificate.passed and "PyTorch" in certificate.engine
    unchecked = {finding.check: finding for finding in certificate.findings if finding.outcome == "unchecked"}
    assert "native kernels" in unchecked and "ngram" in unchecked["drafters"].subject
    # what comes after has the kernels again
    assert "RESPEC_NATIVE" not in os.environ


def test_a_verifier_that_takes_the_first_draft_unjudged_fails(folder, monkeypatch):
    def credulous(tree, drawn):
        children = tree.children.get(ROOT, ())
        return (children[0],) if children else ()

    monkeypatch.setattr("respec.rollout.verify.matched_path", credulous)
    certificate = certify(folder, None, {"suffix": default_drafters()["suffix"]}, PROMPTS, 512)
    assert not certificate.passed
    assert {("same tokens", "suffix, chain"), ("same tokens", "suffix, tree")} <= failed(certificate)
    assert not any(check == "batch invariance" or "rejection" in subject for check, subject in failed(certificate))


def test_a_rejection_mode_that_rejects_too_little_fails_in_distribution(folder, monkeypatch):
    """Drafts stand with eight times their probability. Where half of the tokens are drafted the TV is far above the 0.1 that 2048
    tokens detect with probability 0.99."""
    from respec.rollout import verify

    right = verify.judge_children
    monkeypatch.setattr(verify, "judge_children", lambda p, children, law, accept: right(p, children, law, accept / 8))
    certificate = certify(folder, None, {"suffix": default_drafters()["suffix"]}, PROMPTS, TOKENS)
    assert ("distribution", "rejection, suffix") in failed(certificate)
    assert not any(check in ("same tokens", "rollback") or "plain" in subject for check, subject in failed(certificate))


def test_a_race_margin_is_the_lead_that_the_engine_drew_by(folder):
    """In float32, the margin of the token that was drawn is positive against every other that raced."""
    from respec.certification import race_margin
    from respec.certify.reference import Reference
    from respec.rollout.engine import Engine
    from respec.weights.publish import publish

    policy = load_policy(ModelConfig(path=folder, dtype="float32"))
    engine = Engine(publish(policy, "float32", 0), policy.tokenizer, policy.eos_token_ids, 3, 8)
    (rollout,), _ = engine.rollout([Ask(Prompt(7, "", (4, 5)), Stream.BENCH, 2, 1)], Sampling(12))
    reference, margin = Reference(policy.model), race_margin(3)
    for position, token in enumerate(rollout.token_T.tolist()):
        logp = reference.after([4, 5, *rollout.token_T[:position].tolist()], 1.0)
        leads = [margin(rollout, position, logp, token, other) for other in range(48) if other != token]
        assert all(lead is not None and lead > 0 for lead in leads)
        assert margin(rollout, position, logp, token, 3) == -(margin(rollout, position, logp, 3, token) or 0.0)


@pytest.mark.parametrize("count", [2, 15, 70])
def test_any_number_of_prompts_will_do(folder, count):
    letters = "abcdefghijklmnop"
    prompts = [letters[i % 16] * 2 + letters[i // 16] * 2 for i in range(count)]
    certificate = certify(folder, None, {"suffix": default_drafters()["suffix"]}, prompts, 256)
    assert certificate.passed, failed(certificate)


def test_a_dtype_that_engines_do_not_decode_in_is_refused(folder):
    with pytest.raises(ConfigError, match="float64"):
        certify(folder, prompts=PROMPTS, dtype="float64")


def test_prompts_that_cannot_be_used_are_refused(folder):
    for prompts in (("abc",), ("abc", ""), ("abc", "a" * 250)):
        with pytest.raises(ConfigError):
            certify(folder, prompts=prompts)


@pytest.fixture
def invoke():
    app = typer.Typer()
    app.command()(command)
    return lambda *words: CliRunner().invoke(app, [*map(str, words), "--threads", "1"])


def test_the_command_prints_a_table_writes_json_and_ends_with_0(folder, invoke, tmp_path):
    lines, out = tmp_path / "prompts.txt", tmp_path / "certificate.json"
    lines.write_text("abcabc\\nabc\n\nhello hello\nxyzxyz\n")
    done = invoke("--model", folder, "--drafter", "ngram", "--prompts", lines, "--json", out, "--tokens", 512)
    assert done.exit_code == 0, done.output
    tree = json.loads(out.read_text())
    assert tree["passed"] and {finding["check"] for finding in tree["findings"]} >= {"same tokens", "distribution"}
    assert "✓" in done.output and "exact: " in done.output and "not asked for" in done.output


def test_the_command_ends_with_1_when_something_failed(folder, invoke, monkeypatch):
    monkeypatch.setattr("respec.rollout.kv_cache.KVCache.move", lambda *_: None)
    done = invoke("--model", folder, "--drafter", "suffix", "--tokens", 256)
    assert done.exit_code == 1 and "NOT EXACT" in done.output and "✗" in done.output


def test_the_command_refuses_what_it_does_not_know(folder, invoke, monkeypatch, tmp_path):
    for words in (("--engine", "oracle"), ("--drafter", "oracle"), ("--prompts", tmp_path / "none")):
        done = invoke("--model", folder, *words)
        assert isinstance(done.exception, ConfigError)
    monkeypatch.setattr(kernels, "available", lambda: (False, "no C compiler"))
    assert "no C compiler" in str(invoke("--model", folder, "--engine", "native").exception)
