"""Many processes that are one JAX program."""

from ._initialize import initialize as initialize
