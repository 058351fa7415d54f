"""Training data: batches in order, checked, with fingerprints; targets and weights."""
