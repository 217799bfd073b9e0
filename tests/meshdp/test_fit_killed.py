"""SIGKILL at random moments changes nothing but the time it takes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("fitting_killed.py")


@pytest.mark.slow
def test_twenty_kills_give_the_parameters_of_an_uninterrupted_run_bit_by_bit(tmp_path):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path), "1"],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.fullmatch(
        r"kills 20 torn (\d+) resumed (\d+) steps (\d+) same True", done.stdout.strip()
    )
    assert found, done.stdout
    torn, resumed, steps = map(int, found.groups())
    # How far each run gets between two kills depends on the machine; that they get on does not.
    assert torn >= 0 and resumed >= 1 and steps > 0
