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
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.fullmatch(
        r"kills 20 torn (\d+) resumed (\d+) steps (\d+) same True", done.stdout.strip()
    )
    assert found, done.stdout
    torn, resumed, steps = map(int, found.groups())
    # Some kills came while a checkpoint was being written, and most runs went further.
    assert torn >= 2 and resumed >= 5 and steps > 50
