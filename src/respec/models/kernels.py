"""The native decoding kernels: built once with the system's C compiler, bound by ctypes.

`native/lanes.h` says what they guarantee. Where there is no compiler, `available()` says so with the reason, and the engine takes
the PyTorch path (`models/attention.py`), slower and under the padding rules that keep it exact.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt64
from torch import Tensor

from respec.models.switch import Switch

SOURCES = Path(__file__).with_name("native")
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared")
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


# off: `available` says no, and what asks takes the PyTorch path
switch = Switch()


def available() -> tuple[bool, str]:
    """Whether the kernels can be used here, and why not (or where the library lies)."""
    if not switch.on:
        return False, "switched off for the while"
    try:
        return True, str(_library()._name)
    except OSError as error:
        return False, str(error)


def supports(dtype: torch.dtype, device: torch.device, head_dim: int, group: int) -> bool:
    """Whether a model of these shapes can take the kernels on this machine."""
    fits = head_dim % 16 == 0 and head_dim <= 512 and group in GROUPS
    return device.type == "cpu" and dtype in DTYPES and fits and available()[0]


def add_rmsnorm(
    residual: Float[Tensor, "M width"],
    x: Float[Tensor, "M width"] | None,
    weight: Float[Tensor, "width"],
    eps: float,
    dtype: torch.dtype,
) -> Float[Tensor, "M width"]:
    """residual += x in place, then its RMS norm times weight, in `dtype`. residual and weight are float32."""
    rows, width = residual.shape
    out = torch.empty(rows, width, dtype=dtype)
    _library().add_rmsnorm(
        _ptr(residual),
        _ptr(x) if x is not None else None,
        _ptr(weight),
        eps,
        _ptr(out),
        rows,
        width,
        _threads(),
        DTYPES[dtype],
    )
    return out


def silu_mul(gate_up: Float[Tensor, "M two_width"]) -> Float[Tensor, "M width"]:
    """silu(gate) * up of the two halves of each row."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype)
    _library().silu_mul(_ptr(gate_up), _ptr(out), rows, width, _threads(), DTYPES[gate_up.dtype])
    return out


def rope_write(
    qkv: Float[Tensor, "padded fused"],
    cos: Float[Tensor, "positions dim"],
    sin: Float[Tensor, "positions dim"],
    position: Int64[Tensor, "M"],
    write: Int64[Tensor, "M"],
    slot: Int64[Tensor, "M"],
    q_weight: Float[Tensor, "dim"] | None,
    k_weight: Float[Tensor, "dim"] | None,
    eps: float,
    keys: Float[Tensor, "slots kv_heads tiles dim 16"],
    values: Float[Tensor, "slots kv_heads capacity dim"],
    heads: int,
) -> Float[Tensor, "M heads dim"]:
    """Norms and rotates q and k by position, writes k and v at (slot, write), returns q in float32. qkv may have rows of padding."""
    rows = position.shape[0]
    _, kv_heads, capacity, dim = values.shape
    q = torch.empty(rows, heads, dim)
    _library().rope_write(
        _ptr(qkv), _ptr(cos), _ptr(sin), _ptr(position), _ptr(write), _ptr(slot),
        _ptr(q_weight) if q_weight is not None else None, _ptr(k_weight) if k_weight is not None else None,
        eps, _ptr(q), _ptr(keys), _ptr(values), rows, heads, kv_heads, dim, capacity, _threads(), DTYPES[qkv.dtype],
    )  # fmt: skip
    return q


def attention(
    q: Float[Tensor, "M heads dim"],
    keys: Float[Tensor, "slots kv_heads tiles dim 16"],
    values: Float[Tensor, "slots kv_heads capacity dim"],
    slot: Int64[Tensor, "M"],
    position: Int64[Tensor, "M"],
    scale: float,
    padded: int,
    fork: Int64[Tensor, "M"] | None = None,
    path: Int64[Tensor, "M D"] | None = None,
) -> Float[Tensor, "padded fused"]:
    """Attention of each token over keys 0..position of its slot; q float32, the result in the cache's dtype, padded with zeros.

    In a branching draft key fork + d of row m lies at index path[m, d] of its slot.
    """
    rows, heads, dim = q.shape
    _, kv_heads, capacity, _ = values.shape
    out = torch.empty(padded, heads * dim, dtype=values.dtype)
    out[rows:] = 0
    code = _library().attention(
        _ptr(q), _ptr(keys), _ptr(values), _ptr(slot), _ptr(position), _ptr(fork) if fork is not None else None,
        _ptr(path) if path is not None else None, path.shape[1] if path is not None else 0, _ptr(out), rows, kv_heads,
        heads // kv_heads, dim, capacity, scale, _threads(), DTYPES[values.dtype],
    )  # fmt: skip
    if code:
        raise MemoryError(f"the attention kernel could not get scratch memory for {capacity} keys")
    return out


def draw(
    logits: Float[Tensor, "M V"],
    key: UInt64[np.ndarray, "M"],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    race: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The race of `rollout.sampling`, natively: token, logprob, kept_logmass, entropy, each [M]."""
    rows, vocabulary = logits.shape
    logits = logits.contiguous()
    token, logprob, kept, entropy = (np.empty(rows, kind) for kind in (np.int32, np.float32, np.float32, np.float32))
    code = _library().draw(
        _ptr(logits), rows, vocabulary, 1.0 / temperature if temperature > 0 else 1.0, int(temperature == 0), top_k, top_p, min_p,
        race, key.ctypes.data, token.ctypes.data, logprob.ctypes.data, kept.ctypes.data, entropy.ctypes.data, _threads(),
        DTYPES[logits.dtype],
    )  # fmt: skip
    if code:
        raise MemoryError(f"the sampler could not get scratch memory for a vocabulary of {vocabulary}")
    return token, logprob, kept, entropy


def _ptr(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _threads() -> int:
    return torch.get_num_threads()


@functools.cache
def _library() -> ctypes.CDLL:
    library = compiled()
    i64, i32, f32, f64, ptr = ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.c_double, ctypes.c_void_p
    library.add_rmsnorm.argtypes = [ptr, ptr, ptr, f32, ptr, i64, i64, i32, i32]
    library.silu_mul.argtypes = [ptr, ptr, i64, i64, i32, i32]
    library.rope_write.argtypes = [ptr] * 8 + [f32, ptr, ptr, ptr, i64, i32, i32, i32, i64, i32, i32]
    library.attention.argtypes = [ptr] * 7 + [i64, ptr, i64, i32, i32, i32, i64, f32, i32, i32]
    library.draw.argtypes = [ptr, i64, i64, f32, i32, i64, f64, f64, i64, ptr, ptr, ptr, ptr, ptr, i32, i32]
    for name in ("add_rmsnorm", "silu_mul", "rope_write"):
        getattr(library, name).restype = None
    return library


@functools.cache
def compiled() -> ctypes.CDLL:
    """Loads the library of all that is in `native/`, building it first if these sources, these flags and this processor have not been seen before.

    Raises OSError when it can be neither found nor built.
    """
    if os.environ.get("RESPEC_NATIVE") == "0":
        raise OSError("switched off by RESPEC_NATIVE=0")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    files = sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.c")])
    tag = "\n".join((*(file.read_text() for file in files), *FLAGS, platform.machine(), _processor(), compiler or ""))
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "respec"
    path = folder / f"kernels-{hashlib.sha256(tag.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        if compiler is None:
            raise OSError("no C compiler found (cc, gcc or clang); install one to get the native kernels")
        _build(compiler, path)
    return ctypes.CDLL(str(path))


def _build(compiler: str, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            built = Path(scratch) / path.name
            command = [compiler, *FLAGS, "-o", str(built), *map(str, sorted(SOURCES.glob("*.c"))), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode:
                raise OSError(f"'{' '.join(command)}' failed: {done.stderr.strip()[-400:]}")
            built.replace(path)
    except (subprocess.SubprocessError, PermissionError) as error:
        raise OSError(f"the native kernels could not be built with {compiler}: {error}") from error


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
