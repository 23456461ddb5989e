"""The live page: `respec dash` serves the reports of running and past runs on this machine, to this machine alone."""
