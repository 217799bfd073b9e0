"""Train any pytree model on many devices."""
