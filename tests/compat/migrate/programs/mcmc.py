"""More Markov chains than devices, as soft_pmap allowed."""

import jax
import jax.numpy as jnp
from jax import lax, soft_pmap

CHAINS, STEPS = 16, 20


def log_density(x):
    return -0.5 * jnp.sum((x - 1.0) ** 2)


def step(x, key):
    move_key, accept_key = jax.random.split(key)
    proposal = x + 0.5 * jax.random.normal(move_key, x.shape)
    log_ratio = log_density(proposal) - log_density(x)
    accept = jnp.log(jax.random.uniform(accept_key)) < log_ratio
    return jnp.where(accept, proposal, x), accept


def chain(key):
    x, accepted = lax.scan(step, jnp.zeros(2), jax.random.split(key, STEPS))
    mean = lax.pmean(x, "chains")
    return x, accepted.mean(), mean


def main():
    keys = jax.random.split(jax.random.PRNGKey(6), CHAINS)
    samples, rates, means = soft_pmap(chain, axis_name="chains")(keys)
    return {"samples": samples, "rates": rates, "mean": means[0]}
