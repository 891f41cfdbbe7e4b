# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Carry vLLM's wheel for CUDA, and what it needs, to a machine that reaches no package index.

vLLM's wheel has 274 MB. The program downloads wheels on a machine with an index, joins them to one
stream, and cuts that into parts. The other machine gets the parts one by one, checks them, and
installs the wheels::

    here    python tests/gpu/wheels.py fetch --installed LIST --out out/gpu
    there   python tests/gpu/wheels.py keep out/gpu/part-1 --into /tmp/kvext_gpu   (for each part)
    there   python tests/gpu/wheels.py install /tmp/kvext_gpu --package .

``LIST`` is a file with the packages that the other machine has, one a line, as ``name`` or
``name==version``. pip uses the configuration of its user.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

VLLM = "vllm==0.23.0"
MAX_PART_BYTES = 55_000_000
MANIFEST = "manifest.json"
SITE = "site"
"""The folder below the kept parts into which wheels are installed."""

LEFT_OUT: Mapping[str, str] = {
    "flashinfer-cubin": "its kernels are not used: attention is FlashAttention's or Triton's",
    "flashinfer-python": "its kernels are not used: attention is FlashAttention's or Triton's",
    "humming-kernels": "quantized weights only",
    "nvidia-cudnn-frontend": "attention of images only",
    "nvidia-cutlass-dsl": "kernels of newer cards only",
    "quack-kernels": "kernels of newer cards only",
    "tilelang": "a model with hyper-connections only",
    "tokenspeed-mla": "kernels of newer cards only",
    "fastsafetensors": "another loader of weights only",
    "numba": "drafts from n-grams only",
}
"""Requirements of vLLM that no test here imports, and why."""

REPLACED: Mapping[str, str] = {"apache-tvm-ffi": ">=0.1.11"}
"""Versions that take the place of those that vLLM pins. xgrammar needs this one; vLLM's is for
packages that are left out."""

TARGET = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_system": "Linux",
    "python_full_version": "3.12.3",
    "python_version": "3.12",
    "sys_platform": "linux",
}
"""The environment of the other machine, for markers of requirements."""
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)


@dataclass(frozen=True)
class Piece:
    """A file, with the number and the SHA-256 of its bytes."""

    name: str
    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Piece:
        return cls(path.name, path.stat().st_size, digest(path))

    def require(self, path: Path) -> None:
        """Raise `SystemExit` if a file is not this one."""
        found = Piece.of(path) if path.is_file() else None
        if found != self:
            raise SystemExit(f"{path}: expected {self}, found {found}. Bring it again.")


@dataclass(frozen=True)
class Manifest:
    """The wheels in the order in which they are joined, and the parts of the whole."""

    wheels: tuple[Piece, ...]
    parts: tuple[Piece, ...]

    def write(self, folder: Path) -> None:
        text = json.dumps(asdict(self), indent=1) + "\n"
        (folder / MANIFEST).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return cls(
            *(tuple(Piece(**piece) for piece in found[name]) for name in ("wheels", "parts"))
        )


def digest(path: Path) -> str:
    found = hashlib.sha256()
    for chunk in _bytes_of([path]):
        found.update(chunk)
    return found.hexdigest()


# Cutting and joining.


def split(wheels: Sequence[Path], out: Path, max_part_bytes: int = MAX_PART_BYTES) -> Manifest:
    """Cut wheels into parts, each in a folder of its own with the manifest."""
    for old in out.glob("part-*"):
        shutil.rmtree(old)
    parts: list[Path] = []
    num_left = 0
    target = None
    for wheel in wheels:
        with wheel.open("rb") as source:
            while chunk := source.read(min(num_left, 1 << 20) or 1):
                if target is None or not num_left:
                    if target is not None:
                        target.close()
                    folder = out / f"part-{len(parts) + 1}"
                    folder.mkdir(parents=True)
                    parts.append(folder / f"part-{len(parts) + 1}.bin")
                    target = parts[-1].open("wb")
                    num_left = max_part_bytes
                target.write(chunk)
                num_left -= len(chunk)
    if target is not None:
        target.close()
    manifest = Manifest(tuple(map(Piece.of, wheels)), tuple(map(Piece.of, parts)))
    for part in parts:
        manifest.write(part.parent)
    return manifest


def keep(part: Path, into: Path) -> tuple[int, int]:
    """Check the part in a folder, and copy it. Returns how many parts there are and are expected.

    Raises:
        SystemExit: The part is damaged, or belongs to another set than those that are kept.
    """
    manifest = Manifest.read(part)
    into.mkdir(parents=True, exist_ok=True)
    if (into / MANIFEST).exists() and Manifest.read(into) != manifest:
        raise SystemExit(f"{into}: has parts of another set. Remove the folder.")
    for piece in manifest.parts:
        if (part / piece.name).exists():
            piece.require(part / piece.name)
            shutil.copyfile(part / piece.name, into / piece.name)
    manifest.write(into)
    return sum((into / piece.name).exists() for piece in manifest.parts), len(manifest.parts)


def join(kept: Path) -> list[Path]:
    """Check all parts, and write the wheels that they hold into ``wheels``.

    Raises:
        SystemExit: A part is missing or damaged.
    """
    manifest = Manifest.read(kept)
    missing = [piece.name for piece in manifest.parts if not (kept / piece.name).exists()]
    if missing:
        raise SystemExit(f"{kept}: lacks {', '.join(missing)}. Keep them first.")
    for piece in manifest.parts:
        piece.require(kept / piece.name)
    folder = kept / "wheels"
    folder.mkdir(exist_ok=True)
    stream = _bytes_of([kept / piece.name for piece in manifest.parts])
    rest = b""
    for wheel in manifest.wheels:
        path = folder / wheel.name
        num_left = wheel.num_bytes
        with path.open("wb") as target:
            while num_left:
                rest = rest or next(stream)
                target.write(rest[:num_left])
                num_left, rest = max(num_left - len(rest), 0), rest[num_left:]
        wheel.require(path)
    return [folder / wheel.name for wheel in manifest.wheels]


def _bytes_of(paths: Sequence[Path]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                yield chunk


# What is needed.


def read_installed(text: str) -> dict[str, str | None]:
    """Versions of packages by their normalized names; None where the line has no version."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pairs = (line.partition("==") for line in lines if line)
    return {normalized(name): version or None for name, _, version in pairs}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def requirements_of(wheel: Path, extras: frozenset[str]) -> list[str]:
    """What a wheel requires on the other machine."""
    with zipfile.ZipFile(wheel) as files:
        name = next(each for each in files.namelist() if each.endswith(".dist-info/METADATA"))
        return applicable(files.read(name).decode(), extras)


def applicable(metadata: str, extras: frozenset[str]) -> list[str]:
    """The requirements in a wheel's metadata whose markers hold on the other machine."""
    from packaging.requirements import Requirement

    found = []
    for line in email.message_from_string(metadata).get_all("Requires-Dist") or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(
            marker.evaluate({**TARGET, "extra": extra}) for extra in extras or {""}
        ):
            requirement.marker = None
            found.append(str(requirement))
    return found


def fetch(
    wanted: str, installed: Mapping[str, str | None], folder: Path
) -> tuple[list[Path], list[str]]:
    """Download a package and all that it requires and the other machine lacks.

    Returns:
        The wheels, and messages about what is left out and what has another version there.
    """
    from packaging.requirements import Requirement

    folder.mkdir(parents=True, exist_ok=True)
    wheels: dict[str, Path] = {}
    notes: list[str] = []
    specifiers: dict[str, set[str]] = {}
    todo = deque([(wanted, "the command line")])
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        line, by = todo.popleft()
        requirement = Requirement(line)
        name, extras = normalized(requirement.name), frozenset(requirement.extras)
        if name in REPLACED:
            requirement = Requirement(name + REPLACED[name])
        specifiers.setdefault(name, set()).add(str(requirement.specifier))
        if name in LEFT_OUT or name in installed:
            why = LEFT_OUT.get(name) or _misfit(installed[name], requirement)
            if why and (note := f"{requirement} of {by}: {why}") not in notes:
                notes.append(note)
            continue
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        if name not in wheels:
            wheels[name] = download(f"{requirement.name}{requirement.specifier}", folder)
        # Without an extra, the marker of an ordinary requirement is asked with an empty one.
        todo += ((each, name) for each in requirements_of(wheels[name], extras | {""}))
    for name, wheel in wheels.items():
        version = wheel.name.split("-")[1]
        for specifier in specifiers[name]:
            if why := _misfit(version, Requirement(f"{name}{specifier}")):
                notes.append(f"{name}{specifier}: {why}")
    return list(wheels.values()), notes


def _misfit(version: str | None, requirement: object) -> str:
    specifier = requirement.specifier  # type: ignore[attr-defined]
    if version is None or specifier.contains(version, prereleases=True):
        return ""
    return f"the machine has {version}"


def download(requirement: str, folder: Path) -> Path:
    """Download one wheel for the other machine, unless the folder has it. Returns its path.

    Raises:
        SystemExit: pip failed.
    """
    into = folder / re.sub(r"[^\w.=]+", "_", requirement)
    if not list(into.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        command += ["download", "--no-deps", "--only-binary=:all:", "--dest", str(into)]
        command += ["--python-version", "3.12", "--implementation", "cp"]
        for platform in PLATFORMS:
            command += ["--platform", platform]
        subprocess.run([*command, requirement], check=True)
    (wheel,) = into.glob("*.whl")
    return wheel


def install(kept: Path, package: Path | None) -> Path:
    """Install the kept wheels, and the package that a checkout holds. Returns their folder.

    The package's compiled module is built by the CMake, ninja, scikit-build-core and nanobind of
    this machine.
    """
    site = kept / SITE
    wheels = [str(path) for path in join(kept)]
    if package is not None:
        wheels.append(str(package.resolve()))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    command += ["--no-index", "--no-deps", "--no-build-isolation", "--no-compile"]
    command += ["--no-cache-dir", "--upgrade", "--target", str(site)]
    environ = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count()), **os.environ}
    subprocess.run([*command, *wheels], check=True, env=environ)
    return site


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("fetch", help="download wheels, and cut them into parts")
    one.add_argument("--installed", type=Path, required=True)
    one.add_argument("--out", type=Path, default=Path("out/gpu"))
    one.add_argument("--max-part-bytes", type=int, default=MAX_PART_BYTES)
    one = commands.add_parser("keep", help="check a part, and copy it")
    one.add_argument("part", type=Path)
    one.add_argument("--into", type=Path, required=True)
    one = commands.add_parser("install", help="join the kept parts, and install their wheels")
    one.add_argument("kept", type=Path)
    one.add_argument("--package", type=Path, help="a checkout to build and to install, too")
    options = parser.parse_args()
    began_s = time.monotonic()
    if options.command == "fetch":
        installed = read_installed(options.installed.read_text(encoding="utf-8"))
        wheels, notes = fetch(VLLM, installed, options.out / "wheels")
        print(*(f"note: {note}" for note in notes), sep="\n")
        manifest = split(wheels, options.out, options.max_part_bytes)
        for piece in (*manifest.wheels, *manifest.parts):
            print(f"{piece.num_bytes:>11,} bytes  {piece.name}")
    elif options.command == "keep":
        num_parts, num_expected = keep(options.part, options.into)
        print(f"{options.into}: {num_parts} of {num_expected} parts")
    else:
        print(f"export PYTHONPATH={install(options.kept, options.package)}")
    print(f"{time.monotonic() - began_s:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
