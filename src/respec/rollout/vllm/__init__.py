"""vLLM in the engine's place: a worker process by a Python that has vLLM, and the engine that asks it."""
