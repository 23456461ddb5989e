from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config

from respec.config import LoraConfig, ModelConfig
from respec.errors import CheckpointError
from respec.models.load import Policy, load_policy
from respec.policy.adapters import with_lora
from respec.weights.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint


def make_policy(seed: int = 0, width: int = 16, dtype: torch.dtype = torch.float32) -> Policy:
    config = Qwen3Config(
        vocab_size=5,
        hidden_size=width,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    backend = Tokenizer(WordLevel({"<eos>": 0, "a": 1, "b": 2, "c": 3, "d": 4}, unk_token="<eos>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")
    return Policy(model, tokenizer, (0,), 0, 64)


def make_state(seed: int = 0) -> dict:
    torch.manual_seed(seed)
    return {
        "updates": 7,
        "scale": 0.1 + 0.2,
        "exp_avg.layer.weight": torch.randn(5, 3),
        "nested": {"half": torch.randn(4).bfloat16(), "double": torch.randn(2, 2).double().T, "deeper": {"n": -1}},
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run folder with checkpoints of steps 10 and 20."""
    for step in (10, 20):
        save_checkpoint(tmp_path, step, make_policy(step), make_state(step), {"step": step}, keep=3)
    return tmp_path


def silent(line: str) -> None:
    raise AssertionError(f"nothing was to be said, got: {line}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    policy, state = make_policy(1, dtype=dtype), make_state()
    counters = {"step": 3, "tokens": 12345, "draws": {"4": 1}, "started": 0.1 + 0.2}
    path = save_checkpoint(tmp_path, 3, policy, state, counters, keep=2)
    found = latest_checkpoint(tmp_path, silent)
    assert found is not None and (found.path, found.step, found.counters) == (path, 3, counters)
    other = make_policy(2, dtype=dtype)
    read = load_checkpoint(found, other)
    before = policy.model.state_dict()
    assert all(torch.equal(weight, before[name]) for name, weight in other.model.state_dict().items())
    assert (read["updates"], read["scale"], read["nested"]["deeper"]) == (7, 0.1 + 0.2, {"n": -1})
    pairs = [(read["exp_avg.layer.weight"], state["exp_avg.layer.weight"])]
    pairs += [(read["nested"][name], state["nested"][name]) for name in ("half", "double")]
    for one, two in pairs:
        assert one.dtype == two.dtype and torch.equal(one, two)


def test_the_folder_is_a_hugging_face_model(tmp_path: Path) -> None:
    policy = make_policy()
    path = save_checkpoint(tmp_path, 1, policy, {"updates": 0}, {}, keep=1)
    ids = torch.tensor([[1, 2, 3]])
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(loaded.lm_head.weight, policy.model.state_dict()["lm_head.weight"])
    assert loaded(ids).logits.shape == (1, 3, 5)
    assert AutoTokenizer.from_pretrained(path).convert_tokens_to_ids("c") == 3
    assert load_policy(ModelConfig(path=str(path), dtype="float32")).eos_token_ids == (0,)


def test_there_is_none_before_the_first(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path, silent) is None
    (tmp_path / "checkpoints" / ".tmp-000005").mkdir(parents=True)
    assert latest_checkpoint(tmp_path, silent) is None


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


FILES = (
    "model.safetensors",
    "config.json",
    "tokenizer.json",
    "optimizer.safetensors",
    "optimizer.json",
    "counters.json",
)


@pytest.mark.parametrize("damage", [flip, truncate, grow, Path.unlink])
def test_damage_to_any_file_makes_the_one_before_be_used(saved: Path, damage: Callable[[Path], None]) -> None:
    path = saved / "checkpoints" / "000020"
    names = sorted(item.name for item in path.iterdir() if item.name != "manifest.json")
    assert set(FILES) <= set(names)
    for name in names:
        kept = (path / name).read_bytes()
        damage(path / name)
        said: list[str] = []
        found = latest_checkpoint(saved, said.append)
        assert found is not None and found.step == 10
        assert len(said) == 1 and "000020" in said[0] and name in said[0]
        (path / name).write_bytes(kept)
    found = latest_checkpoint(saved, silent)
    assert found is not None and found.step == 20


@pytest.mark.parametrize("damage", [truncate, Path.unlink, lambda path: path.write_text("{}")])
def test_a_damaged_manifest_is_damage(saved: Path, damage: Callable[[Path], None]) -> None:
    damage(saved / "checkpoints" / "000020" / "manifest.json")
    said: list[str] = []
    found = latest_checkpoint(saved, said.append)
    assert found is not None and found.step == 10 and "manifest" in said[0]


def test_a_checkpoint_under_another_name_is_not_taken(saved: Path) -> None:
    (saved / "checkpoints" / "000010").rename(saved / "checkpoints" / "000030")
    said: list[str] = []
    found = latest_checkpoint(saved, said.append)
    assert found is not None and found.step == 20 and said


def test_when_all_are_damaged_the_run_is_not_begun_again_silently(saved: Path) -> None:
    for step in ("000010", "000020"):
        flip(saved / "checkpoints" / step / "model.safetensors")
    with pytest.raises(CheckpointError, match="all 2 checkpoints"):
        latest_checkpoint(saved, lambda line: None)


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_only_the_last_are_kept_and_leftovers_are_swept(saved: Path) -> None:
    (saved / "checkpoints" / ".tmp-000015").mkdir()
    save_checkpoint(saved, 30, make_policy(), make_state(), {}, keep=2)
    assert names(saved) == ["000020", "000030"]


def test_checkpoints_of_a_cut_off_future_go(saved: Path) -> None:
    """Gone on with from 10, 20 being damaged: 15 must not be thrown away in favour of 20."""
    flip(saved / "checkpoints" / "000020" / "model.safetensors")
    save_checkpoint(saved, 15, make_policy(), make_state(), {}, keep=1)
    assert names(saved) == ["000015"]


def test_a_truncated_one_is_not_counted_among_those_kept(saved: Path) -> None:
    truncate(saved / "checkpoints" / "000020" / "model.safetensors")
    save_checkpoint(saved, 30, make_policy(), make_state(), {}, keep=2)
    assert names(saved) == ["000010", "000030"]


def test_the_same_step_can_be_saved_again(saved: Path) -> None:
    save_checkpoint(saved, 20, make_policy(), make_state(), {"again": 1}, keep=2)
    found = latest_checkpoint(saved, silent)
    assert found is not None and found.counters == {"again": 1} and names(saved) == ["000010", "000020"]


def test_one_that_was_being_replaced_is_still_found(saved: Path) -> None:
    (saved / "checkpoints" / "000020").rename(saved / "checkpoints" / ".old-000020")
    found = latest_checkpoint(saved, silent)
    assert found is not None and found.step == 20


def test_weights_of_another_model_are_refused(saved: Path) -> None:
    found = latest_checkpoint(saved, silent)
    assert found is not None
    for other in (make_policy(width=32), make_policy(dtype=torch.float64)):
        before = {name: weight.clone() for name, weight in other.model.state_dict().items()}
        with pytest.raises(CheckpointError, match="of another model"):
            load_checkpoint(found, other)
        assert all(torch.equal(weight, before[name]) for name, weight in other.model.state_dict().items())


@pytest.mark.parametrize("state", [{"a/b": 1}, {"a": "text"}, {3: 1}])
def test_a_state_that_cannot_be_kept_is_a_bug(tmp_path: Path, state: dict) -> None:
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path, 1, make_policy(), state, {}, keep=1)


def test_a_disk_that_refuses_leaves_what_was_there(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("respec.weights.checkpoint.save_file", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save_checkpoint(saved, 30, make_policy(), make_state(), {}, keep=1)
    assert names(saved) == ["000010", "000020"]


def test_killed_at_any_moment_a_whole_checkpoint_is_left(tmp_path: Path) -> None:
    """A child dies by SIGKILL at its n-th system call that changes the disk, for every n until it lives through a save."""
    program = """
import os, shutil, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_checkpoint as t
import respec.weights.checkpoint as checkpoint
run = Path(sys.argv[2])
policy, state = t.make_policy(), t.make_state()
kill_at = [-1]
count = 0
def counted(call):
    def wrapped(*args, **kwargs):
        global count
        count += 1
        if count == kill_at[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return wrapped
for owner, name in ((checkpoint, "save_file"), (checkpoint, "_sync"), (Path, "rename"), (Path, "mkdir"),
                    (shutil, "rmtree"), (Path, "write_text"), (os, "unlink"), (os, "rmdir")):
    setattr(owner, name, counted(getattr(owner, name)))
# One import serves all: each n is a fork, killed alone.
for n in range(1, 10_000):
    child = os.fork()
    if child == 0:
        kill_at[0] = n
        checkpoint.save_checkpoint(run, 20, policy, state, {"n": n}, keep=1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    found = checkpoint.latest_checkpoint(run, t.silent)
    assert found is not None, n
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0 and found.step == 20
        print("lived", n)
        break
"""
    save_checkpoint(tmp_path, 10, make_policy(), make_state(), {}, keep=1)
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", program, here, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 10
    assert names(tmp_path) == ["000020"]


def make_adapted(seed: int, base: int = 0) -> Policy:
    """A policy with an adapter in which every number is drawn."""
    policy = make_policy(base)
    with_lora(policy.model, LoraConfig(r=2, dora=True), 0)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if ".lora_" in name:
                weight.normal_()
    return policy


def test_of_an_adapter_only_the_adapter_is_kept_and_comes_back_bit_for_bit(tmp_path: Path) -> None:
    policy = make_adapted(1)
    path = save_checkpoint(tmp_path, 3, policy, make_state(), {"step": 3}, keep=2)
    assert not list(path.glob("model*")) and (path / "adapter_model.safetensors").exists()
    found, other = latest_checkpoint(tmp_path, silent), make_adapted(2)
    assert found is not None
    load_checkpoint(found, other)
    before = policy.model.state_dict()
    assert all(torch.equal(weight, before[name]) for name, weight in other.model.state_dict().items())


def test_an_adapter_goes_on_its_own_base_and_only_where_one_is_configured(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 3, make_adapted(1), {}, {}, keep=2)
    found = latest_checkpoint(tmp_path, silent)
    assert found is not None
    with pytest.raises(CheckpointError, match="trained on other weights"):
        load_checkpoint(found, make_adapted(1, base=5))
    with pytest.raises(CheckpointError, match=r"is of a run with \[policy.lora\], the one configured is not"):
        load_checkpoint(found, make_policy())
    save_checkpoint(tmp_path, 4, make_policy(), {}, {}, keep=2)
    found = latest_checkpoint(tmp_path, silent)
    assert found is not None
    with pytest.raises(CheckpointError, match=r"is of a run without \[policy.lora\]"):
        load_checkpoint(found, make_adapted(1))
