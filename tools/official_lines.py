# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Read the command lines of vLLM-Ascend's tutorials, and keep their flags as data.

    python tools/official_lines.py 0.30.0rc2 vllm_ascend-0.30.0rc2.tar.gz

The source archive has the documentation. ``pip download --no-binary=:all:`` brings it, as
`make_env.unpack_ascend` does. The result is ``tests/support/official_lines/RELEASE.json``: one
entry for each distinct set of flags of a page. Only names and values of flags are kept.

A flag that names a machine, a file or the form of an answer is left out: it is another one for each
user, and the engine does not depend on it.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

DATA = Path(__file__).resolve().parents[1] / "tests" / "support" / "official_lines"

PAGES = re.compile(r"[^/]+/docs/source/tutorials/(?P<name>.+)\.md")
"""The paths of tutorials in a source archive."""

LEFT_OUT = (
    "allowed-local-media-path",
    "api-key",
    "api-server-count",
    "chat-template",
    "chat-template-content-format",
    "data-parallel-address",
    "data-parallel-external-lb",
    "data-parallel-hybrid-lb",
    "data-parallel-rank",
    "data-parallel-rpc-port",
    "data-parallel-size-local",
    "data-parallel-start-rank",
    "default-chat-template-kwargs",
    "disable-access-log",
    "disable-log-requests",
    "disable-uvicorn-access-log",
    "enable-auto-tool-choice",
    "enable-log-requests",
    "headless",
    "host",
    "limit-mm-per-prompt",
    "load-format",
    "master-addr",
    "master-port",
    "media-io-kwargs",
    "mm-processor-kwargs",
    "model-loader-extra-config",
    "model-name",
    "nnodes",
    "node-rank",
    "override-generation-config",
    "port",
    "profiler-config",
    "reasoning-parser",
    "safetensors-load-strategy",
    "served-model-name",
    "tokenizer",
    "tool-call-parser",
    "uvicorn-log-level",
)
"""Flags of machines, files, logs, and of the form of questions and answers."""

MACHINE_KEYS = frozenset({"engine_id", "kv_ip", "kv_port", "kv_connector_module_path"})
"""Keys of values in JSON that name a machine or a file."""

DRAFT = "draft"
"""Stands for the path of a draft model."""

SHORT = {
    "-tp": "tensor-parallel-size",
    "-dp": "data-parallel-size",
    "-pp": "pipeline-parallel-size",
}
SHORT |= {"-dcp": "decode-context-parallel-size", "-pcp": "prefill-context-parallel-size"}
SHORT |= {"-q": "quantization", "-O": "compilation-config", "-O.cudagraph_mode": "cudagraph-mode"}

ENGINE_VARIABLE = re.compile(
    r"VLLM_(?!EXECUTE|LOGGING|USE_MODELSCOPE|HOST|RPC|ENGINE_READY|TORCH_PROFILER|USE_V1|WORKER)\w+"
    r"|DYNAMIC_EPLB|EXPERT_MAP_RECORD"
)
"""The names of variables that may change the engine."""


class Line(NamedTuple):
    """One command line.

    Attributes:
        page: The tutorial, such as ``models/GLM5``.
        number: The number of the command's first line in the page.
        model: The last part of the model's path. Empty if it is a placeholder.
        flags: Values by flag, without dashes. A flag without a value has the value ``true``.
        environ: The variables that the code block exports and that may change the engine.
    """

    page: str
    number: int
    model: str
    flags: Mapping[str, Any]
    environ: Mapping[str, str]

    @property
    def key(self) -> str:
        """The text that is the same for lines with the same flags."""
        return json.dumps([self.page, self.flags, self.environ], sort_keys=True)


def lines_of(page: str, text: str) -> Iterator[Line]:
    """The command lines and the ``LLM(...)`` calls in a page's code blocks."""
    for start, block in _code_blocks(text):
        variables: dict[str, str] = {}
        position = 0
        for found in re.finditer(
            r"^[ \t]*(?:export (?P<name>\w+)=(?P<value>.*)|(?:nohup |exec )?(?P<own>(?:\w+=\S+ )*)"
            r"vllm serve(?P<rest>[ \t].*)|(?:\w+ = )?(?P<call>LLM\().*)$",
            block,
            re.MULTILINE,
        ):
            if found.start() < position:
                continue  # This text is a part of the last command.
            number = start + block[: found.start()].count("\n")
            if found["name"]:
                value = re.match(r"""'([^']*)|"([^"]*)|(\S*)""", found["value"])
                variables[found["name"]] = _filled(value[value.lastindex or 0], variables)
            elif found["call"]:
                call = _call(block[found.start("call") :])
                yield _from_call(page, number, call)
            else:
                own = dict(word.split("=", 1) for word in found["own"].split())
                words = _words(block[found.start("rest") :])
                if "..." in words:
                    continue  # The page shows only a part of the command.
                known = variables | own
                yield _from_words(page, number, [_filled(word, known) for word in words], known)


def _code_blocks(text: str) -> Iterator[tuple[int, str]]:
    """The code blocks of a page, each with the number of its first line."""
    for fenced in re.finditer(
        r"^(?P<indent>[ \t]*)(?P<fence>`{3,})[^`\n]*\n(?P<code>.*?)^[ \t]*(?P=fence)[ \t]*$",
        text,
        re.MULTILINE | re.DOTALL,
    ):
        yield text[: fenced.start("code")].count("\n") + 1, fenced["code"]


def _words(text: str) -> list[str]:
    """The words of the command at the beginning of a text, as a shell reads them.

    Some pages put a comment or a blank after a backslash, and some forget the last backslashes of a
    command. A line that begins with two dashes therefore always belongs to the command.
    """
    text = re.sub(r"\$\(\(.*?\)\)", "0", text)  # a port that the shell computes
    text = re.sub(r"<([\w. -]+)>", r"$\1", text)  # a placeholder, which is not a redirection
    text = re.sub(r"\\[ \t]*(?:#[^\n]*)?\n", " ", text)
    text = re.sub(r"\n[ \t]*(?:#[^\n]*\n[ \t]*)*(?=--?[a-zA-Z])", " ", text)
    command = ""
    for line in text.splitlines(keepends=True):
        command += line
        lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;><")
        lexer.whitespace_split = True
        lexer.commenters = ""
        try:
            words = list(lexer)
        except ValueError:
            continue  # The quoted text continues on the next line.
        ends = [at for at, word in enumerate(words) if re.fullmatch(r"[|&;><]+", word)]
        if not ends:
            return words
        is_of_errors = ">" in words[ends[0]] and words[ends[0] - 1] in ("1", "2")
        return words[: ends[0] - 1 if is_of_errors else ends[0]]
    raise ValueError(f"a command without an end: {text[:80]}")


def _filled(word: str, variables: Mapping[str, str]) -> str:
    """A word with the values of variables. Unknown variables stay."""

    def value_of(found: re.Match[str]) -> str:
        return variables.get(found["name"], found[0])

    return re.sub(r"\$\{?(?P<name>\w+)\}?", value_of, word)


def _from_words(page: str, number: int, words: list[str], variables: Mapping[str, str]) -> Line:
    flags: dict[str, Any] = {}
    model = ""
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("-") or word == "-":
            model = model or word
            continue
        name, has_value, value = word.partition("=")
        name = SHORT.get(name, name.lstrip("-")).replace("_", "-") if "." not in name else name[2:]
        if not has_value and waiting and not re.match(r"--?[a-zA-Z]", waiting[0]):
            value = waiting.pop(0)
            while waiting and not waiting[0].startswith("-"):
                word = waiting.pop(0)
                value += "" if word.startswith("$") else " " + word
            has_value = "="
        if name == "model":
            model = value
        elif name not in LEFT_OUT:
            flags[name] = _value(value) if has_value else True
    environ = {name: value for name, value in variables.items() if ENGINE_VARIABLE.fullmatch(name)}
    return Line(page, number, _last_part(model), flags, environ)


def _call(text: str) -> ast.Call:
    """The call at the beginning of a text."""
    for end in (found.end() for found in re.finditer(r"\)", text)):
        try:
            (statement,) = ast.parse(text[:end]).body
        except SyntaxError:
            continue
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            return statement.value
    raise ValueError(f"a call without an end: {text[:80]}")


def _from_call(page: str, number: int, call: ast.Call) -> Line:
    flags: dict[str, Any] = {}
    model = ""
    for keyword in call.keywords:
        name = (keyword.arg or "").replace("_", "-")
        value = ast.literal_eval(keyword.value) if name != "model" else ""
        if name == "model":
            model = str(getattr(keyword.value, "value", ""))
        elif name not in LEFT_OUT:
            flags[name] = _without_machines(value)
    return Line(page, number, _last_part(model), flags, {})


def _last_part(path: str) -> str:
    """The name of a model. A placeholder in place of a path has none."""
    return "" if re.search(r"[$<>{}]", path) else path.rstrip("/").rpartition("/")[2]


def _value(text: str) -> Any:
    """The value of a flag: JSON if it is an object, None if a launcher gives it, else its text."""
    text = text.strip()
    if text.startswith("$"):
        return None
    if not text.startswith("{"):
        return text
    try:
        return _without_machines(json.loads(text))
    except ValueError:
        return " ".join(text.split())


def _without_machines(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: DRAFT if key == "model" else _without_machines(each)
            for key, each in value.items()
            if key not in MACHINE_KEYS
        }
    return [_without_machines(each) for each in value] if isinstance(value, list) else value


def pages_of(archive: Path) -> Iterator[tuple[str, str]]:
    """The names and texts of the tutorials in a source archive."""
    with tarfile.open(archive) as files:
        for member in sorted(files.getmembers(), key=lambda member: member.name):
            found = PAGES.fullmatch(member.name)
            content = files.extractfile(member) if found else None
            if found and content is not None:
                yield found["name"], content.read().decode()


def entries(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """One entry for each distinct set of flags of a page, with the numbers of its lines."""
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        entry = found.setdefault(
            line.key,
            {
                "page": line.page,
                "lines": [],
                "models": [],
                "flags": dict(line.flags),
                "environ": dict(line.environ),
            },
        )
        entry["lines"].append(line.number)
        if line.model and line.model not in entry["models"]:
            entry["models"].append(line.model)
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("release", help="the release of vLLM-Ascend, such as 0.30.0rc2")
    parser.add_argument("archive", type=Path, help="its source archive")
    options = parser.parse_args()
    lines = [line for name, text in pages_of(options.archive) for line in lines_of(name, text)]
    found = entries(lines)
    rows = ",\n".join(json.dumps(entry, sort_keys=True) for entry in found)
    (DATA / f"{options.release}.json").write_text(f"[\n{rows}\n]\n")
    print(f"{options.release}: {len(lines)} lines, {len(found)} distinct sets of flags")


if __name__ == "__main__":
    main()
