"""The decoder layers of the known families for training, each one step of the graph, with its gradient written out.

Autograd over transformers' modelling code keeps what every small operation read; a layer here keeps what its gradient cannot cheaply make
again: its input, the raw queries, keys and values, what attention made of them, the residual in the middle, gate and up. That is less than
half, and norms, rotations and the gated product are made again, at the price of reading them. With nothing kept (gradient checkpointing) the
backward pass runs the layer again from its input, to the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from respec.models.gradients import product
from respec.models.grid_attention import attend, attend_gradient
from respec.models.grids import Layout


class Weights(NamedTuple):
    """A layer's parameters; biases and the norms of single heads where the family has them."""

    before: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    value_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Tensor
    between: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Shape:
    """`width` is a head's; `products` the dtype of matrix products, None for the weights' own; `keeps` whether activations are kept; `adds` whether
    matrices' gradients are added in place."""

    width: int
    eps: float
    scale: float
    products: torch.dtype | None
    keeps: bool
    adds: bool = False


class Kept(NamedTuple):
    """What a layer's gradient reads beside its input. `lse_G` are attention's log-normalisers, a grid each."""

    scale_N: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    mixed: Tensor
    middle_NE: Tensor
    middle_scale_N: Tensor
    gate: Tensor
    up: Tensor
    lse_G: tuple[Tensor, ...]


def run(
    x_NE: Float[Tensor, "N E"],
    turn: tuple[Float[Tensor, "N 1 half"], Float[Tensor, "N 1 half"]],
    layout: Layout,
    shape: Shape,
    w: Weights,
) -> tuple[Float[Tensor, "N E"], Kept]:
    """One layer over packed sequences; `turn` holds the cosines and sines of their positions."""
    h_NE, scale_N = _norm(x_NE, w.before, shape.eps)
    h_NE = _cast(h_NE, shape)
    query, key, value = (
        F.linear(h_NE, _cast(weight, shape), _cast(bias, shape))
        for weight, bias in ((w.query, w.query_bias), (w.key, w.key_bias), (w.value, w.value_bias))
    )
    mixed, lse_G = attend(*_turned(query, key, value, turn, shape, w), layout, shape.width, shape.scale)
    mixed = _cast(mixed, shape)
    middle_NE = x_NE + F.linear(mixed, _cast(w.out, shape))
    h_NE, middle_scale_N = _norm(middle_NE, w.between, shape.eps)
    h_NE = _cast(h_NE, shape)
    gate, up = F.linear(h_NE, _cast(w.gate, shape)), F.linear(h_NE, _cast(w.up, shape))
    y_NE = middle_NE + F.linear(F.silu(gate).mul_(up), _cast(w.down, shape))
    return y_NE, Kept(scale_N, query, key, value, mixed, middle_NE, middle_scale_N, gate, up, lse_G)


class Layer(torch.autograd.Function):
    """`run` with its gradient. Arguments: x_NE, cosines, sines, layout, shape, and the weights one by one."""

    @staticmethod
    def forward(
        ctx: Any, x_NE: Tensor, cos: Tensor, sin: Tensor, layout: Layout, shape: Shape, *weights: Tensor | None
    ) -> Tensor:
        y_NE, kept = run(x_NE, (cos, sin), layout, shape, Weights(*weights))  # pyright: ignore[reportArgumentType]
        ctx.layout, ctx.shape = layout, shape
        ctx.save_for_backward(x_NE, cos, sin, *weights, *((*kept[:-1], *kept.lse_G) if shape.keeps else ()))
        return y_NE

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (y_grad_NE,) = gradients
        x_NE, cos, sin, *rest = ctx.saved_tensors
        count = len(Weights._fields)
        w, shape, places = Weights(*rest[:count]), ctx.shape, len(Kept._fields) - 1
        if shape.keeps:
            kept = Kept._make((*rest[count : count + places], tuple(rest[count + places :])))
        else:
            _, kept = run(x_NE, (cos, sin), ctx.layout, shape, w)
        wanted = Weights(*ctx.needs_input_grad[5:])
        middle_grad_NE, inner = _mlp_gradient(y_grad_NE, kept, shape, w, wanted)
        x_grad_NE, outer = _attention_gradient(middle_grad_NE, x_NE, kept, (cos, sin), ctx.layout, shape, w, wanted)
        found = outer | inner
        return x_grad_NE, None, None, None, None, *(found.get(name) for name in Weights._fields)


def _mlp_gradient(
    y_grad_NE: Tensor, kept: Kept, shape: Shape, w: Weights, wanted: Weights
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The gradient at the residual between attention and MLP, and the MLP's weights'."""
    h_NE = _cast(_normed(kept.middle_NE, kept.middle_scale_N, w.between), shape)
    slope = _cast(y_grad_NE, shape)
    active = F.silu(kept.gate)
    found = {"down": _weight_gradient(slope, active * kept.up, w.down, wanted.down, shape)}
    inner = slope @ _cast(w.down, shape)
    up_grad = active.mul_(inner)
    gate_grad = torch.ops.aten.silu_backward(inner.mul_(kept.up), kept.gate)
    found["gate"] = _weight_gradient(gate_grad, h_NE, w.gate, wanted.gate, shape)
    found["up"] = _weight_gradient(up_grad, h_NE, w.up, wanted.up, shape)
    h_grad_NE = (gate_grad @ _cast(w.gate, shape)).addmm_(up_grad, _cast(w.up, shape))
    through_NE, found["between"] = _norm_gradient(h_grad_NE, kept.middle_NE, kept.middle_scale_N, w.between)
    return through_NE.add_(y_grad_NE), found


def _attention_gradient(
    middle_grad_NE: Tensor,
    x_NE: Tensor,
    kept: Kept,
    turn: tuple[Tensor, Tensor],
    layout: Layout,
    shape: Shape,
    w: Weights,
    wanted: Weights,
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The gradient at the layer's input, and attention's weights'."""
    slope = _cast(middle_grad_NE, shape)
    found = {"out": _weight_gradient(slope, kept.mixed, w.out, wanted.out, shape)}
    heads = _turned(kept.query, kept.key, kept.value, turn, shape, w)
    mixed, mixed_slope = (x.to(x_NE.dtype) for x in (kept.mixed, slope @ _cast(w.out, shape)))
    grads = attend_gradient(mixed_slope, *heads, mixed, kept.lse_G, layout, shape.width, shape.scale)
    h_NE, h_grad_NE = _cast(_normed(x_NE, kept.scale_N, w.before), shape), None
    for place, (name, raw) in enumerate((("query", kept.query), ("key", kept.key), ("value", kept.value))):
        grad, weight = grads[place], getattr(w, name)
        if name != "value":
            grad = _rotate(grad.view(len(grad), -1, shape.width), turn[0], -turn[1])
            if (norm := getattr(w, f"{name}_norm")) is not None:
                grad, found[f"{name}_norm"] = _head_norm_gradient(grad, raw, norm, shape)
        grad = _cast(grad.flatten(1), shape)
        found[name] = _weight_gradient(grad, h_NE, weight, getattr(wanted, name), shape)
        if getattr(w, f"{name}_bias") is not None:
            found[f"{name}_bias"] = grad.sum(0, dtype=weight.dtype)
        h_grad_NE = grad @ _cast(weight, shape) if h_grad_NE is None else h_grad_NE.addmm_(grad, _cast(weight, shape))
    assert h_grad_NE is not None
    through_NE, found["before"] = _norm_gradient(h_grad_NE, x_NE, kept.scale_N, w.before)
    return through_NE.add_(middle_grad_NE), found


def _cast(tensor: Any, shape: Shape) -> Any:
    return tensor if tensor is None or shape.products is None else tensor.to(shape.products)


def _weight_gradient(slope: Tensor, read: Tensor, weight: Tensor, wanted: Any, shape: Shape) -> Tensor | None:
    return product(slope, read, weight, shape.adds) if wanted else None


def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) * weight over the last dimension, and 1 / rms(x) (Zhang & Sennrich 2019, arXiv 1910.07467, equation 4)."""
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    scale = square.add_(eps).rsqrt_()
    return _normed(x, scale, weight), scale


def _normed(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    return (x * scale).mul_(weight)


def _norm_gradient(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """With n = x * scale: the gradient at x, scale (g w - n mean(g w n)), and at the weight, sum of g n."""
    grad = grad.to(x.dtype)
    plain = x * scale
    product = grad * plain
    weight_grad = product.flatten(0, -2).sum(0)
    mean = (product @ weight)[..., None].div_(x.shape[-1])
    return (grad * weight).addcmul_(plain, mean, value=-1).mul_(scale), weight_grad


def _head_norm_gradient(grad: Tensor, raw: Tensor, weight: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    x = raw.view(grad.shape).to(grad.dtype)
    _, scale = _norm(x, weight, shape.eps)
    return _norm_gradient(grad, x, scale, weight)


def _turned(
    query: Tensor, key: Tensor, value: Tensor, turn: tuple[Tensor, Tensor], shape: Shape, w: Weights
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys normed where the family does, and turned to their positions; each [N, heads * width], in the weights' dtype."""
    made = []
    for raw, norm in ((query, w.query_norm), (key, w.key_norm)):
        x = raw.view(len(raw), -1, shape.width).to(w.before.dtype)
        if norm is not None:
            x, _ = _norm(x, norm, shape.eps)
        made.append(_rotate(x, *turn).flatten(1))
    return made[0], made[1], value.to(w.before.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (RoFormer, arXiv 2104.09864, equation 34), pairs a half apart."""
    one, other = x.chunk(2, dim=-1)
    turned = torch.empty_like(x)
    left, right = turned.chunk(2, dim=-1)
    torch.mul(one, cos, out=left).addcmul_(other, sin, value=-1)
    torch.mul(other, cos, out=right).addcmul_(one, sin)
    return turned


def weights_of(layer: nn.Module) -> Weights | None:
    """A decoder layer's weights, or None where it is not made of plain linear layers (an adapter is not), or has biases that are not read here."""
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    query, key, value, out = (getattr(attention, f"{name}_proj") for name in "qkvo")
    gate, up, down = (getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down"))
    if any(type(linear) is not nn.Linear for linear in (query, key, value, out, gate, up, down)):
        return None
    if any(linear.bias is not None for linear in (out, gate, up, down)):
        return None
    norms = [getattr(attention, name).weight if hasattr(attention, name) else None for name in ("q_norm", "k_norm")]
    before, between = (layer.get_parameter(f"{name}_layernorm.weight") for name in ("input", "post_attention"))
    return Weights(
        before, query.weight, key.weight, value.weight, query.bias, key.bias, value.bias, norms[0], norms[1],
        out.weight, between, gate.weight, up.weight, down.weight,
    )  # fmt: skip
