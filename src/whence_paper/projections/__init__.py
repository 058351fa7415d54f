"""Pictures of last layers: where in a network's own space its predictions are uncertain."""
