"""The leak check of tests/conftest.py complains about tests that leak, and about no others: samples in a child run."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"

SAMPLES = """
import os, subprocess, threading

kept = []
never = threading.Event()

def test_clean(tmp_path):
    open(tmp_path / "closed", "w").close()
    thread = threading.Thread(target=int)
    thread.start()
    subprocess.run(["true"], check=True)

def test_thread():
    threading.Thread(target=never.wait, name="stray", daemon=True).start()

def test_file(tmp_path):
    os.open(tmp_path / "left-open", os.O_CREAT | os.O_WRONLY)

def test_child():
    kept.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))
"""


@pytest.mark.full
def test_leaks_are_reported_by_kind_and_clean_tests_pass(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST.read_text().replace("JOIN_TIMEOUT_S = 60.0", "JOIN_TIMEOUT_S = 0.05"))
    pytester.makepyfile(SAMPLES)
    pytester.makeini("[pytest]\nmarkers =\n    quick\n    full\n    soak\n")
    result = pytester.runpytest_subprocess("-p", "no:xdist", timeout=180)
    result.assert_outcomes(passed=4, errors=3)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_thread*",
            "E *left behind: thread stray*",
            "*ERROR at teardown of test_file*",
            "E *left behind: open file */left-open (descriptor *)*",
            "*ERROR at teardown of test_child*",
            "E *left behind: child process *: cat*",
        ]
    )
