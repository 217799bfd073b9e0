"""pmap-era code on today's JAX."""
