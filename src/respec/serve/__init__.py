"""An OpenAI-compatible endpoint over an engine: what is asked, the thread that decodes, what is answered. It gets the engine as argument."""
