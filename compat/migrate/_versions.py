"""JAX versions, as pairs of numbers."""

NEWEST = (0, 12)
"""The newest JAX that the tables were checked against; `--jax` chooses another."""


def parse_version(text: str) -> tuple[int, int]:
    """Turns `"0.12"` or `"0.12.0.1"` into `(0, 12)`.

    **Raises:**

    - `ValueError`: if `text` does not start with two numbers.
    """
    parts = text.split(".")
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        raise ValueError(
            f"not a JAX version: {text!r}. Write major and minor number, such as 0.12."
        )
    return int(parts[0]), int(parts[1])
