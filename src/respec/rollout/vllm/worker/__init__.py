"""What runs under the Python that has vLLM, which need not have respec: these files import nothing of it, and each other by bare names."""
