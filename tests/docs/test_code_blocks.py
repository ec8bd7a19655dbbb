"""The code in the documents runs: README.md and everything below docs/.

Each document is one program in a child process and an empty folder of its own. Its ```python blocks run in order in
one namespace, and its ```bash blocks in between, but those only where the line before says `<!-- run -->`. A python
block that cannot run here says why in the line before: `<!-- not run: it needs a GPU -->`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```[ ]*$", re.MULTILINE | re.DOTALL
)
RUN, NOT_RUN = "<!-- run -->", re.compile(r"<!-- not run: \S.* -->")

PROGRAM = """
import json, subprocess, sys
name, namespace = sys.argv[1], {"__name__": "__main__"}
for block in json.load(sys.stdin):
    if block["language"] == "python":
        lines_before = "\\n" * block["line"]
        exec(compile(lines_before + block["code"], name, "exec"), namespace)
    elif subprocess.run(["bash", "-euo", "pipefail", "-c", block["code"]], stdin=subprocess.DEVNULL).returncode:
        sys.exit(f"{name}:{block['line'] + 1}: the bash block failed")
"""


@dataclass(frozen=True)
class Block:
    """A fenced block that is to run; `line` is the number of its fence."""

    language: str
    code: str
    line: int


def runnable(text: str) -> list[Block]:
    """The blocks of a document that run, in order."""
    found = []
    for match in FENCE.finditer(text):
        language, line = match["language"], text.count("\n", 0, match.start()) + 1
        before = text[: match.start()].rstrip().rpartition("\n")[2].strip()
        if (language == "python" and not NOT_RUN.fullmatch(before)) or (language == "bash" and before == RUN):
            indent = match["indent"]
            code = "".join(each.removeprefix(indent) for each in match["code"].splitlines(keepends=True))
            found.append(Block(language, code, line))
    return found


def run(name: str, blocks: list[Block], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run blocks as one program in `folder`, with this environment's commands first in PATH."""
    environment = os.environ | {"PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, name],
        input=json.dumps([asdict(block) for block in blocks]),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "document",
    [path for path in DOCUMENTS if runnable(path.read_text(encoding="utf-8"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_code_of_the_document_runs(document: Path, tmp_path: Path) -> None:
    finished = run(document.name, runnable(document.read_text(encoding="utf-8")), tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr


SAMPLE = """# Title
```python
x = 1
```
text
<!-- not run: it would never end -->
```python
while True: pass
```
```bash
exit 3
```
<!-- run -->
```bash
echo from bash
```
* a list
  ```python
  assert x == 1
  if x:
      print("from", "python")
  ```
```text
not code
```
"""


def test_blocks_share_a_namespace_and_marked_ones_are_skipped(tmp_path: Path) -> None:
    blocks = runnable(SAMPLE)
    assert [(block.language, block.line) for block in blocks] == [("python", 2), ("bash", 14), ("python", 18)]
    finished = run("sample.md", blocks, tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert sorted(finished.stdout.splitlines()) == ["from bash", "from python"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text\n\n```python\nx = 1\nassert x == 2\n```\n", 'File "sample.md", line 5'),
        ("<!-- run -->\n```bash\nfalse\necho went on\n```\n", "sample.md:3: the bash block failed"),
    ],
)
def test_failing_block_fails_and_is_named_by_line(tmp_path: Path, text: str, message: str) -> None:
    finished = run("sample.md", runnable(text), tmp_path)
    assert finished.returncode != 0
    assert message in finished.stderr
    assert "went on" not in finished.stdout
