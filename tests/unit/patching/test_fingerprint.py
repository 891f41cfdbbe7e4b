# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
from __future__ import annotations

import functools
import importlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import vllm_ascend_kvext
from vllm_ascend_kvext.errors import FingerprintError
from vllm_ascend_kvext.patching.fingerprint import (
    fingerprint_live,
    fingerprint_source,
    forget_sources,
)

# One example of each construct whose syntax tree has differed between versions of Python.
SAMPLE = '''\
from __future__ import annotations

class Sample:
    @property
    def name(self) -> str:
        """Docstring."""
        return f"{self!r:>{10}} {self.x=} {{}} {'a' 'b'}" "tail"

    async def run(self, a, /, b: int = 1, *c, d=None, **e) -> dict[str, int]:
        async with a as f, b:
            await f
        return {**e, "k": -1, "s": a[1:2, ..., ::3], "t": (yield), "n": None, "u": u"u"}

def outer(x: list[int]) -> None:
    global y
    y: int = 1_000_000
    z = lambda q=0.1, *, w: q if w else (0x10, 1j, b"\\xff", "\\u00e9\\U0001f600")
    try:
        del x[0], x[-1:]
    except (ValueError, TypeError) as error:
        raise RuntimeError from error
    else:
        x += [i for i in range(3) if i if not i]
    finally:
        assert x, "empty"
    match x:
        case [1, *rest] if (n := len(rest)):
            pass
        case {"a": None, **others} | others:
            pass
        case str() as s:
            pass
        case _:
            pass
    def inner(): ...
    return inner

if True:
    def conditional(): return 1
else:
    def other(): pass
try:
    def tried(): pass
except ImportError:
    pass
'''
# A change here makes every stored fingerprint invalid. Store them again with the change.
SAMPLE_FINGERPRINTS = {
    "sample:Sample.name": "56cf340700170d75",
    "sample:Sample.run": "82c97bf201dfec63",
    "sample:outer": "f49f397e16df9d61",
    "sample:conditional": "fa65443b10ddc527",
    "sample:other": "e3a1b8d663150e81",
    "sample:tried": "21a319432aaa26d7",
}

OTHER_PYTHONS = ("python3.10", "python3.11", "python3.12", "python3.13")


@pytest.fixture
def fingerprint_of(tmp_path: Path) -> Callable[..., str]:
    def fingerprint(source: str, name: str = "function") -> str:
        (tmp_path / "mod.py").write_text(source, encoding="utf-8")
        forget_sources()
        return fingerprint_source(tmp_path, f"mod:{name}")

    return fingerprint


@pytest.fixture
def sample_root(tmp_path: Path) -> Path:
    (tmp_path / "sample.py").write_text(SAMPLE, encoding="utf-8")
    return tmp_path


FUNCTION = """\
@decorator(1)
def function(a, b=1, *, c: int = 2) -> int:
    x = a + b  # sum
    def g():
        return 1
    return x * c
"""


@pytest.mark.parametrize(
    "same",
    [
        FUNCTION.replace("  # sum", ""),
        FUNCTION.replace("a + b", "(a\n        + b)"),
        FUNCTION.replace("    x =", '    """What it does."""\n    x ='),
        "import os\n\n\n" + FUNCTION,
        FUNCTION.replace("(a, b=1, *, c: int = 2)", "(\n    a, b=1,\n    *, c: int = 2,\n)"),
        FUNCTION.replace("    def g():\n", "    def g():\n        'doc'\n"),
        "def function(): return 1\n" + FUNCTION,  # The last definition counts.
    ],
)
def test_layout_comments_docstrings_and_earlier_definitions_do_not_count(
    fingerprint_of: Callable[..., str], same: str
) -> None:
    assert same != FUNCTION
    assert fingerprint_of(same) == fingerprint_of(FUNCTION)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("b=1", "b=2"),
        ("b=1", "b=True"),
        ("b=1", "b"),
        ("a, b=1", "b, a=1"),
        ("*, c", "c"),
        ("c: int", "c: float"),
        ("-> int", "-> float"),
        ("a + b", "a - b"),
        ("a + b", "b + a"),
        ("return x * c", "return x"),
        ("return x * c", "return x * c\n    return None"),
        ("    x = a", '    "a string"; y = "another"\n    x = a'),
        ("decorator(1)", "decorator(2)"),
        ("@decorator(1)\n", ""),
        ("def function", "async def function"),
        ("def function", "def other"),
    ],
)
def test_meaning_counts(fingerprint_of: Callable[..., str], old: str, new: str) -> None:
    changed = FUNCTION.replace(old, new)
    assert changed != FUNCTION
    name = "other" if "def other" in new else "function"
    assert fingerprint_of(changed, name) != fingerprint_of(FUNCTION)


@pytest.mark.parametrize("name", ["sample:inner", "sample:Sample", "sample:Sample.missing"])
def test_what_is_not_defined_in_a_module_or_class_body_is_refused(
    sample_root: Path, name: str
) -> None:
    with pytest.raises(FingerprintError, match=r"sample\.py does not define"):
        fingerprint_source(sample_root, name)


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FingerprintError, match=r"missing\.py cannot be read"):
        fingerprint_source(tmp_path, "missing:f")
    (tmp_path / "broken.py").write_text("def f(:\n", encoding="utf-8")
    with pytest.raises(FingerprintError, match=r"broken\.py cannot be parsed"):
        fingerprint_source(tmp_path, "broken:f")


def define(path: Path, source: str) -> object:
    """Write a file, and return the function that it defines."""
    path.write_text(source)
    forget_sources()
    defined: dict[str, object] = {}
    exec(compile(source, str(path), "exec"), defined)
    return defined["function"]


def test_the_source_of_a_function_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "read_once.py"
    function = define(path, "def function():\n    return 1\n")
    found = fingerprint_live(function)
    forget_sources()
    path.unlink()
    assert fingerprint_live(function) == found


def test_functions_with_equal_code_keep_their_own_fingerprints(tmp_path: Path) -> None:
    """The annotation of a variable is not part of the code object."""
    path = tmp_path / "equal_code.py"
    functions = []
    found = []
    for annotation in ("int", "str"):
        source = f"def function():\n    x: {annotation} = 1\n    return x\n"
        functions.append(define(path, source))
        found.append(fingerprint_live(functions[-1]))
    assert functions[0].__code__ == functions[1].__code__  # type: ignore[attr-defined]
    assert found[0] != found[1]
    assert [fingerprint_live(function) for function in functions] == found


def test_fingerprints_are_those_that_the_store_was_made_with(sample_root: Path) -> None:
    """Some of these functions are in classes and under conditions."""
    found = {name: fingerprint_source(sample_root, name) for name in SAMPLE_FINGERPRINTS}
    assert found == SAMPLE_FINGERPRINTS


@pytest.mark.parametrize("python", OTHER_PYTHONS)
def test_every_python_agrees(sample_root: Path, python: str) -> None:
    executable = shutil.which(python)
    runs = (
        executable is not None
        and not subprocess.run([executable, "-c", ""], capture_output=True, check=False).returncode
    )
    if not runs:
        pytest.skip(f"no working {python} on PATH")
    script = (
        "import json, pathlib, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from vllm_ascend_kvext.patching.fingerprint import fingerprint_source\n"
        "root = pathlib.Path(sys.argv[2])\n"
        "print(json.dumps({name: fingerprint_source(root, name) for name in sys.argv[3:]}))\n"
    )
    package_root = Path(vllm_ascend_kvext.__file__).parent.parent
    command = [str(executable), "-c", script, str(package_root), str(sample_root)]
    command += SAMPLE_FINGERPRINTS
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == SAMPLE_FINGERPRINTS


class TestLive:
    @pytest.mark.parametrize(
        "qualname",
        ["Pool.free", "Pool.find", "Pool.count", "Base.inherited", "touch", "conditional"],
    )
    def test_equals_that_of_the_source(self, upstream_root: Path, qualname: str) -> None:
        pool = importlib.import_module("fake_upstream.pool")
        owner: object = pool
        *path, attribute = qualname.split(".")
        for part in path:
            owner = getattr(owner, part)
        live = fingerprint_live(vars(owner)[attribute])
        assert live == fingerprint_source(upstream_root, f"fake_upstream.pool:{qualname}")

    def test_a_copied_name_deceives_nobody(self, upstream_root: Path) -> None:
        pool = importlib.import_module("fake_upstream.pool")

        @functools.wraps(pool.touch)
        def impostor(number: int) -> int:
            return number

        name = "fake_upstream.pool:touch"
        assert fingerprint_live(impostor) != fingerprint_source(upstream_root, name)

    def test_a_lambda_is_refused(self) -> None:
        with pytest.raises(FingerprintError, match="does not define '<lambda>'"):
            fingerprint_live(lambda: None)

    @pytest.mark.parametrize("thing", [len, 3, type])
    def test_what_has_no_source_is_refused(self, thing: object) -> None:
        with pytest.raises(FingerprintError, match="expected a Python function"):
            fingerprint_live(thing)

    def test_code_that_came_from_no_file_is_refused(self) -> None:
        scope: dict[str, object] = {}
        exec("def made(): pass", scope)
        with pytest.raises(FingerprintError, match="<string> cannot be read"):
            fingerprint_live(scope["made"])
