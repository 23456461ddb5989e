"""`respec doctor`: what this machine can do, tried rather than guessed, and what to do about what is missing."""

from __future__ import annotations

import importlib.util
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from respec.models import kernels
from respec.models.decoder import decode_dtype
from respec.models.linear import PackedLinear, can_prepack

OPTIONAL = ("tensorboard", "peft", "vllm", "wandb", "trackio", "mlflow", "starlette", "uvicorn")


@dataclass(frozen=True)
class Finding:
    """One line of the examination. `slow`: works, by a slower path. `advice` is empty when there is nothing to do."""

    what: str
    state: Literal["ok", "slow", "missing"]
    found: str
    advice: str = ""


def examine() -> tuple[Finding, ...]:
    """Looks at processor, memory, fast paths, exactness, GPU and packages. Takes a second or two."""
    return (_processor(), _memory(), _dtype(), _prepacked(), _kernels(), _exactness(), _gpu(), *_packages())


def _processor() -> Finding:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    name = next(
        (line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")),
        platform.processor(),
    )
    flags = set(next((line.split(":", 1)[1].split() for line in text.splitlines() if line.startswith("flags")), []))
    fast = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    cores = psutil.cpu_count(logical=False) or 1
    return Finding(
        "processor",
        "ok",
        f"{name}, {cores} cores, torch takes {torch.get_num_threads()} threads; {', '.join(fast) or 'no vector flags known'}",
    )


def _memory() -> Finding:
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(Path.cwd())
    state = "ok" if disk.free > 2e9 else "slow"
    advice = "" if state == "ok" else "checkpoints need room: free some of the disk"
    return Finding(
        "memory, disk",
        state,
        f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free; disk {disk.free / 1e9:.0f} GB free",
        advice,
    )


def _dtype() -> Finding:
    dtype = decode_dtype("auto", torch.device("cpu"))
    if dtype == torch.bfloat16:
        return Finding("decoding dtype", "ok", "auto takes bfloat16 on this processor")
    return Finding(
        "decoding dtype",
        "slow",
        "auto takes float32: the processor does not multiply bfloat16",
        "nothing to do; decoding costs about twice",
    )


def _prepacked() -> Finding:
    works = [str(dtype).removeprefix("torch.") for dtype in (torch.bfloat16, torch.float32) if can_prepack(dtype)]
    if len(works) == 2:
        return Finding("prepacked linear layers", "ok", "oneDNN takes bfloat16 and float32")
    return Finding(
        "prepacked linear layers",
        "slow",
        f"oneDNN takes {', '.join(works) or 'none'}; products run in blocks of rows instead",
        "a torch build with oneDNN is faster",
    )


def _kernels() -> Finding:
    there, where = kernels.available()
    if there:
        return Finding("native kernels", "ok", where)
    return Finding(
        "native kernels",
        "slow",
        where,
        "install a C compiler (Debian: apt-get install gcc); PyTorch's paths are used until then",
    )


def _exactness() -> Finding:
    """Speculation is exact only if a row's product does not depend on how many rows come along."""
    broken = {
        str(dtype).removeprefix("torch."): rows
        for dtype in (torch.bfloat16, torch.float32)
        if (rows := _differing_rows(dtype))
    }
    if not broken:
        return Finding("exactness", "ok", "a row's bits do not depend on its batch (1 to 320 rows, both dtypes)")
    return Finding(
        "exactness",
        "missing",
        "a row's bits depend on its batch: "
        + "; ".join(f"{name} among {', '.join(map(str, rows))} rows" for name, rows in broken.items()),
        "try another torch build" if "float32" in broken else "decode with model.dtype = 'float32'",
    )


def _differing_rows(dtype: torch.dtype) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    layer = PackedLinear((torch.randn(256, 192, generator=generator) * 0.05).to(dtype))
    x = torch.randn(320, 192, generator=generator).to(dtype)
    whole = layer(x)
    return [rows for rows in (1, 2, 3, 4, 5, 8, 16, 31, 64, 100, 200) if not torch.equal(layer(x[:rows]), whole[:rows])]


def _gpu() -> Finding:
    if torch.cuda.is_available():
        return Finding("GPU", "ok", ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())))
    if shutil.which("nvidia-smi") and torch.version.cuda is None:
        return Finding(
            "GPU",
            "slow",
            f"there is an NVIDIA driver, but torch {torch.__version__} is built without CUDA",
            "install the CUDA build of the same torch version (pytorch.org/get-started)",
        )
    return Finding("GPU", "ok", "none that torch sees; everything runs on the processor")


def _packages() -> tuple[Finding, ...]:
    there = [name for name in OPTIONAL if importlib.util.find_spec(name) is not None]
    absent = [name for name in OPTIONAL if name not in there]
    return (
        Finding(
            "optional packages",
            "ok",
            f"installed: {', '.join(there) or 'none'}; not installed: {', '.join(absent) or 'none'}",
        ),
    )
