"""What is added to vLLM's own worker processes: weights from a file, under a version; entropies; and what is known to be wrong, mended.

vLLM imports this file by name in each of its processes.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import drafts  # pyright: ignore[reportMissingImports]
import torch
from safetensors import safe_open
from vllm import version  # pyright: ignore
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead  # pyright: ignore[reportMissingImports]
from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
from vllm.v1.outputs import LogprobsTensors  # pyright: ignore[reportMissingImports]
from vllm.v1.sample import rejection_sampler  # pyright: ignore[reportMissingImports]
from vllm.v1.sample.sampler import Sampler  # pyright: ignore[reportMissingImports]

VERSION = str(version.__version__)
MEND = "RESPEC_VLLM_MEND"
MILLIONTHS = 1_000_000


def gather_with_entropy(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
    """vLLM's `gather_logprobs` with the entropy of each row (nats, in millionths, negative and less 1) in the place of the token's rank, which
    nobody here reads: so it goes all the way that a token's log-probability goes. A rank is positive, so one left as it was is noticed."""
    likeliest, index = torch.topk(logprobs, num_logprobs, dim=-1)
    own = token_ids.unsqueeze(-1)
    entropy = torch.special.entr(logprobs.float().exp()).sum(-1)
    return LogprobsTensors(
        torch.cat((own, index), dim=1).to(torch.int32),
        torch.cat((logprobs.gather(-1, own), likeliest), dim=1),
        -1 - (entropy * MILLIONTHS).round().to(torch.int64),
    )


def expand(
    x: torch.Tensor, cumulative: torch.Tensor, count: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """The value of each sequence, once for each of its draft tokens; `cumulative` are the counts summed up.

    In 0.32 the CPU's own hands a copy to the native code, so that the temperatures of drafted places stay what lay in memory.
    """
    each = torch.diff(cumulative, prepend=cumulative.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(each, output_size=count)


def repack(model: Any) -> None:
    """Has the packed copy made anew that a CPU multiplies a head by. vLLM's reload does not process a head that is tied to the embeddings (it says so
    among its limits): the copy would stay that of the weights it was started with."""
    for layer in model.modules() if current_platform.is_cpu() else ():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def mended() -> list[str]:
    """Mends what this build has wrong, and says what that was."""
    if os.environ.get(MEND) != "1" or not current_platform.is_cpu() or not VERSION.startswith("0.32."):
        return []
    rejection_sampler.expand_batch_to_tokens = expand
    return ["temperatures of drafted tokens (the CPU build of 0.32 reads them from memory nobody wrote)"]


def keep_apart() -> None:
    """A drafter's weights are its own, so that what is pushed to it stays out of the target."""
    with suppress(ImportError, AttributeError):
        # where vLLM has it under another name, a drafter that shares is refused when it is pushed
        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer as Base  # pyright: ignore

        Base._maybe_share_embeddings = drafts.apart(Base._maybe_share_embeddings, "has_own_embed_tokens")
        Base._maybe_share_lm_head = drafts.apart(Base._maybe_share_lm_head, "has_own_lm_head")


Sampler.gather_logprobs = staticmethod(gather_with_entropy)
MENDED = mended()
keep_apart()


class Extension:
    """Methods that vLLM adds to each of its workers; called over its `collective_rpc` with plain values only."""

    respec_version = -1
    respec_drafter = 0

    def respec_push(self, path: str, version: int, drafter: bool) -> None:
        """Takes the weights in the file, the policy's or the drafter's; the version of its metadata must be the one announced."""
        worker: Any = self
        with safe_open(path, framework="pt") as file:
            stamped = int(file.metadata()["version"])
            if stamped != version:
                raise RuntimeError(f"the weights in '{path}' are of version {stamped}, announced was {version}")
            names = list(file.keys())
            if drafter:
                drafts.replace(worker, {name: file.get_tensor(name) for name in names}, repack)
                self.respec_drafter = version
                return
            worker.reload_weights(weights_iterator=((name, file.get_tensor(name)) for name in names))
        repack(worker.get_model())
        self.respec_version = version

    def respec_held(self) -> tuple[int, int]:
        """The versions in use, the policy's and the drafter's; -1 and 0 for those it was started with."""
        return self.respec_version, self.respec_drafter

    def respec_depth(self, depth: int) -> None:
        """Has the drafter take this for the depth that it was made for."""
        worker: Any = self
        worker.model_runner.drafter.num_speculative_tokens = depth
