"""Every error a user can meet, each one a kind with a message that says what was wrong, what was got, what to do.

The command line prints a `RespecError` as one short paragraph, without a traceback; anything else is a bug of ours.
"""

from __future__ import annotations


class RespecError(Exception):
    """Base of all errors that are the caller's to mend."""


class ConfigError(RespecError):
    """A configuration that cannot be run: unknown key, wrong type, impossible combination."""


class TaskError(RespecError):
    """A task whose data cannot be used: missing file or column, empty split, prompt longer than the context."""


class RewardError(RespecError):
    """A reward function that raised, hung, returned the wrong shape, or returned NaN; names function and sample."""


class ModelError(RespecError):
    """A model that cannot be loaded or is not of a supported family, with the reason."""


class CacheError(RespecError):
    """The KV cache cannot hold what was asked of it, or an invariant of it was broken."""


class StaleError(RespecError):
    """Something computed from weights of another version was about to be used (law 4)."""


class NonFiniteError(RespecError):
    """A loss, gradient or logit that is NaN or infinite; raised before it can reach the weights."""


class CheckpointError(RespecError):
    """A checkpoint that is damaged, incomplete or of another run."""


class RunDirError(RespecError):
    """A run folder that belongs to another configuration, or is in use by a living process."""


class VllmError(RespecError):
    """The vLLM that was to draw the rollouts is not there, is another than can be used, failed, or holds other weights than it should."""
