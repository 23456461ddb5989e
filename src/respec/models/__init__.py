"""Models: loading, attention and cache hooks, and the decoders that read weight snapshots."""
