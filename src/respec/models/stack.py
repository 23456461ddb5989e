"""All layers of a lean decoder in one native call: `native/stack.c`, and what it is told.

Interpreted, the two hundred and seventy calls of a pass of SmolLM2's thirty layers take a fifth of the time of a pass over few sequences. The kernels and
torch's prepacked products are the same, so are the bits.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from respec.models import kernels
from respec.models.decoder import DecodeShape, KVStore
from respec.models.linear import PackedLinear

_PTR, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_CODE_OF = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
PRODUCTS = ("qkv", "output", "gate_up", "down")
NORMS = ("input_norm", "q_norm", "k_norm", "post_norm")


@dataclass(frozen=True)
class Layer:
    """One decoder layer's weights. Norm weights are float32; q_norm and k_norm exist in Qwen3 only."""

    input_norm: Float[Tensor, "hidden"]
    qkv: nn.Module
    q_norm: Float[Tensor, "dim"] | None
    k_norm: Float[Tensor, "dim"] | None
    output: nn.Module
    post_norm: Float[Tensor, "hidden"]
    gate_up: nn.Module
    down: nn.Module


class Places(NamedTuple):
    """Where each token stands: its position, its index in the cache, its slot there; and of a branching draft, see `kernels.attention`."""

    position: Int64[Tensor, "M"]
    write: Int64[Tensor, "M"]
    slot: Int64[Tensor, "M"]
    fork: Int64[Tensor, "M"] | None
    path: Int64[Tensor, "M D"] | None


class _Torch(ctypes.Structure):
    _fields_ = [(name, _PTR) for name in ("linear", "from_blob", "data", "drop")] + [("dtype", _I32), ("device", _I32)]


class _Layer(ctypes.Structure):
    _fields_ = [(name, _PTR) for name in (*PRODUCTS, *(f"{name}_bias" for name in PRODUCTS), *NORMS)]


class _Pass(ctypes.Structure):
    _fields_ = [
        *((name, _I64) for name in ("rows", "padded", "hidden", "inner", "capacity", "deepest", "layers", "tapped")),
        *((name, _I32) for name in ("heads", "kv_heads", "dim", "threads", "bf16")),
        *((name, _F32) for name in ("eps", "scale")),
        *((name, _PTR) for name in ("position", "write", "slot", "fork", "path", "taps", "cos", "sin", "norm")),
        *((name, _PTR) for name in ("residual", "q", "tap", "normed", "mixed", "active", "out", "keys", "values")),
    ]


class Stack:
    """The layers' weights as the native call wants them. It holds on to them."""

    def __init__(self, layers: Sequence[Layer], norm: Float[Tensor, "hidden"], shape: DecodeShape, eps: float) -> None:
        self._layers, self._norm, self._shape, self._eps = layers, norm, shape, eps
        self._torch = _torch(shape.dtype)
        down = layers[0].down
        assert isinstance(down, PackedLinear), "asked of `fits` before"
        self._inner = down.in_features
        self._native = (_Layer * len(layers))(*map(self._told, layers))

    def _told(self, layer: Layer) -> _Layer:
        products: list[Any] = [getattr(layer, name) for name in PRODUCTS]
        handles = [
            self._handle(tensor) for part in ("weight", "bias") for tensor in (getattr(p, part) for p in products)
        ]
        return _Layer(*handles, *(_address(getattr(layer, name)) for name in NORMS))

    def _handle(self, tensor: Tensor | None) -> int | None:
        """A reference of torch's own to a tensor; a prepacked one has no address."""
        if tensor is None:
            return None
        refer = _refer()
        assert refer is not None, "asked of `fits` before"
        handle = _get_pointer(refer(tensor), None)
        weakref.finalize(self, _library().aoti_torch_delete_tensor_object, handle).atexit = False
        return handle

    def run(
        self,
        residual: Float[Tensor, "padded hidden"],
        places: Places,
        tables: tuple[Float[Tensor, "positions dim"], Float[Tensor, "positions dim"]],
        cache: KVStore,
        taps: Sequence[int],
    ) -> tuple[Float[Tensor, "padded hidden"], Float[Tensor, "taps M hidden"]]:
        """The last layer's normed output and the hidden states before the layers `taps`, which ascend; writes the cache. `residual` comes in as the
        embedding and is used up. Raises MemoryError."""
        path = places.path
        shape, rows, (padded, hidden) = self._shape, len(places.position), residual.shape
        kv_heads, capacity = cache.values[0].shape[1:3]
        q = torch.empty(rows, shape.heads, shape.head_dim)
        normed, out = torch.empty(2, padded, hidden, dtype=shape.dtype)
        # rows of padding have no place in the cache, and attend to nothing
        mixed = torch.zeros(padded, shape.heads * shape.head_dim, dtype=shape.dtype)
        active = torch.empty(padded, self._inner, dtype=shape.dtype)
        tapped, wanted = torch.empty(len(taps), rows, hidden), torch.tensor(taps, dtype=torch.long)
        keys, values = (
            (_PTR * len(self._layers))(*(tensor.data_ptr() for tensor in tensors))
            for tensors in (cache.keys, cache.values)
        )
        asked = _Pass(
            rows, padded, hidden, self._inner, capacity, path.shape[1] if path is not None else 0, len(self._layers), len(taps),
            shape.heads, kv_heads, shape.head_dim, torch.get_num_threads(), kernels.DTYPES[shape.dtype],
            self._eps, shape.head_dim**-0.5,
            *map(_address, (*places, wanted, *tables, self._norm)),
            *map(_address, (residual, q, tapped, normed, mixed, active, out)),
            ctypes.addressof(keys), ctypes.addressof(values),
        )  # fmt: skip
        if _native().stack(ctypes.byref(self._torch), self._native, ctypes.byref(asked)):
            raise MemoryError(f"a pass over {rows} tokens could not get memory for {capacity} keys")
        return out, tapped


def fits(layers: Sequence[Layer]) -> bool:
    """Whether these layers' products are torch's prepacked ones, and torch lets them be called from outside."""
    products = (getattr(layer, name) for layer in layers for name in PRODUCTS)
    return all(isinstance(product, PackedLinear) and product.packed for product in products) and _callable()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = _PTR, [ctypes.py_object, ctypes.c_char_p]


def _torch(dtype: torch.dtype) -> _Torch:
    library = _library()
    names = ("cpu__linear_pointwise", "create_tensor_from_blob", "get_data_ptr", "delete_tensor_object")
    functions = (ctypes.cast(getattr(library, f"aoti_torch_{name}"), _PTR) for name in names)
    code = getattr(library, f"aoti_torch_dtype_{_CODE_OF[dtype]}")()
    return _Torch(*functions, code, library.aoti_torch_device_type_cpu())


@functools.cache
def _callable() -> bool:
    try:
        _torch(torch.float32)
        return _refer() is not None
    except (OSError, AttributeError):
        return False


def _refer() -> Callable[[Tensor], Any] | None:
    """A new reference to a tensor as torch's C interface has it, in a capsule; None where this torch has no such thing."""
    return getattr(getattr(torch._C, "_aoti", None), "unsafe_alloc_void_ptr_from_tensor", None)


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    library.aoti_torch_delete_tensor_object.argtypes = [_PTR]
    return library


@functools.cache
def _native() -> ctypes.CDLL:
    library = kernels.compiled()
    library.stack.argtypes = [_PTR, _PTR, _PTR]
    return library
