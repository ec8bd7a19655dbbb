"""The leak check of tests/conftest.py fails tests that leak, and no others: run on small samples in a child pytest."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"

SAMPLES = {
    "clean": ("def test_sample(tmp_path):\n    open(tmp_path / 'f', 'w').close()\n    assert True\n", None),
    "thread": (
        "import threading\nkeep = threading.Event()\n"
        "def test_sample():\n"
        "    threading.Thread(target=keep.wait, name='stray', daemon=True).start()\n    assert True\n",
        "thread stray",
    ),
    "file": (
        "import os\ndef test_sample(tmp_path):\n"
        "    os.open(tmp_path / 'left-open', os.O_CREAT | os.O_WRONLY)\n    assert True\n",
        "left-open",
    ),
    "child": (
        "import subprocess\nkeep = []\n"
        "def test_sample():\n    keep.append(subprocess.Popen(['cat'], stdin=subprocess.PIPE))\n    assert True\n",
        "child process",
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_leaks_are_reported_by_kind_and_clean_tests_pass(pytester: pytest.Pytester, name: str) -> None:
    body, complaint = SAMPLES[name]
    pytester.makeconftest(CONFTEST.read_text().replace("JOIN_TIMEOUT_S = 5.0", "JOIN_TIMEOUT_S = 0.05"))
    pytester.makepyfile(body)
    pytester.makeini("[pytest]\nmarkers =\n    quick\n    full\n    soak\n")
    result = pytester.runpytest_subprocess("-p", "no:xdist", timeout=60)
    if complaint is None:
        result.assert_outcomes(passed=1)
    else:
        result.assert_outcomes(passed=1, errors=1)
        result.stdout.fnmatch_lines([f"*left behind: *{complaint}*"])
