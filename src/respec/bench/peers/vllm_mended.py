"""vLLM's CPU worker with one fault mended, so that its speculative decoding samples at the temperature asked for.

In 0.32 the CPU's `expand_kernel` hands `output.to(int64)`, a copy, to the native code: the temperatures of drafted places stay what lay in
memory. Greedy decoding does not read them. Whatever else is in vLLM is as it comes.
"""

from __future__ import annotations

import torch
from vllm.v1.sample import rejection_sampler  # pyright: ignore[reportMissingImports]
from vllm.v1.worker.cpu_worker import CPUWorker  # pyright: ignore[reportMissingImports]


def expand(
    x: torch.Tensor, cumulative: torch.Tensor, count: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """The value of each sequence, once for each of its draft tokens; `cumulative` are the counts summed up."""
    each = torch.diff(cumulative, prepend=cumulative.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(each, output_size=count)


rejection_sampler.expand_batch_to_tokens = expand


class Worker(CPUWorker):
    """What vLLM is to take for its `worker_cls`."""
