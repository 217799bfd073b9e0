"""Many processes that are one JAX program."""
