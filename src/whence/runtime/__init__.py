"""How a fit runs: chunks, memory, processes, progress, and the model left as it was found."""
