"""The certificate: whether an engine's speculation is exact for one model on one machine, tried rather than assumed."""
