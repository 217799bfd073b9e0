"""Every test runs on eight forced CPU devices, or fails."""

import signal

import jax
import pytest

# The background job of a shell ignores SIGINT, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    # Fail, do not skip: a parallel test on one device proves nothing.
    assert jax.device_count() == 8, "something initialised JAX before conftest.py"
