# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Requests while the folder of a shared tier fails in several ways.

``folder`` of a plan is the tier's. Requests come one by one, while another decodes all the time.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from support.connector import bad_folders
from support.scenarios import connector, scenario
from support.scenarios.engine import Prompt, Tokens, answer_of, random_tokens, sampling_of

Engine = connector.Engine

PROMPT_TOKENS = (400, 700, 333)
_REPLY_TOKENS = 8
_SLOW_S = 0.02

Fault = Callable[[Path], AbstractContextManager[Any]]


def prompts_of(name: str) -> list[Tokens]:
    rng = random.Random(name)
    return [random_tokens(rng, length) for length in PROMPT_TOKENS]


def objects_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/r*/objects/*/*"))


@contextmanager
def _after_lookups(act: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    """After a lookup has found something, act before the get."""
    from vllm_ascend_kvext.shared_tier.files import FilesTier

    exist = FilesTier.exist

    def exist_and_act(tier: Any, names: Any) -> list[str]:
        found = exist(tier, names)
        if any(found):
            act()
        return found

    FilesTier.exist = exist_and_act  # type: ignore[method-assign]
    try:
        yield
    finally:
        FilesTier.exist = exist  # type: ignore[method-assign]
        end()


@contextmanager
def _slow(name: str, _: Path) -> Iterator[None]:
    """Make each call 20 ms slower."""
    from vllm_ascend_kvext.shared_tier.files import FilesTier

    call = getattr(FilesTier, name)

    def slow(*arguments: Any) -> Any:
        time.sleep(_SLOW_S)
        return call(*arguments)

    setattr(FilesTier, name, slow)
    try:
        yield
    finally:
        setattr(FilesTier, name, call)


def _removed_before_gets(folder: Path) -> AbstractContextManager[None]:
    elsewhere = folder.with_name("removed")

    def remove() -> None:  # This takes one step.
        if folder.exists():
            folder.rename(elsewhere)

    return _after_lookups(remove, partial(shutil.rmtree, elsewhere))


def _evicted_before_gets(folder: Path) -> AbstractContextManager[None]:
    def evict() -> None:  # This takes one step.
        for path in folder.glob("*/r*/objects"):
            path.rename(path.with_name("evicted"))

    return _after_lookups(evict, lambda: None)


def _gets_hang(folder: Path) -> AbstractContextManager[None]:
    found = bad_folders.Hanging(folder)
    return _after_lookups(found.begin, found.end)


@contextmanager
def _removed(folder: Path) -> Iterator[None]:
    shutil.rmtree(folder)
    yield


@contextmanager
def _damaged(how: str, folder: Path) -> Iterator[None]:
    paths = objects_of(folder)
    contents = [path.read_bytes() for path in paths]
    for number, path in enumerate(paths):
        data = bytearray(contents[number])
        if how == "flipped":
            data[number * 97 % len(data)] ^= 1 << number % 8
        changed = {"cut": data[: len(data) // 2], "longer": data + b"\0", "another's": b""}
        path.write_bytes(changed.get(how, data) or contents[number - 1])
    yield


@contextmanager
def _notes_changed_places(folder: Path) -> Iterator[None]:
    """Let each note lead to an object of another prompt, with the same position and size."""
    places: dict[tuple[str, str], list[Path]] = {}
    for link in sorted(folder.glob("*/r*/notes/*/*")):
        name = os.path.basename(os.readlink(link)).rpartition("-")[0]
        places.setdefault((link.parts[-4], name), []).append(link)
    for links in places.values():
        targets = [os.readlink(link) for link in links]
        objects = [os.path.basename(target).partition(".")[0][-32:] for target in targets]
        for link, own in zip(links, objects, strict=True):
            other = next((t for t, each in zip(targets, objects, strict=True) if each != own), None)
            link.unlink()
            if other is not None:
                link.symlink_to(other)
    yield


@contextmanager
def _something_else(make: Callable[[Path], object], folder: Path) -> Iterator[None]:
    for path in objects_of(folder):
        path.unlink()
        make(path)
    yield


FAULTS: Mapping[str, Fault] = {
    "nothing": lambda _: nullcontext(),
    "lookups are slow": partial(_slow, "exist"),
    "gets are slow": partial(_slow, "get_into"),
    "flipped": partial(_damaged, "flipped"),
    "cut": partial(_damaged, "cut"),
    "longer": partial(_damaged, "longer"),
    "another's": partial(_damaged, "another's"),
    "notes have changed places": _notes_changed_places,
    "folders in places": partial(_something_else, Path.mkdir),
    "pipes in places": partial(_something_else, os.mkfifo),
    "removed": _removed,
    "removed before gets": _removed_before_gets,
    "evicted before gets": _evicted_before_gets,
    "no permission": bad_folders.forbidden,
    "disk full": partial(bad_folders.full, num_bytes=256 << 10),
    "lookups hang": bad_folders.hanging,
    "gets hang": _gets_hang,
}
PATIENCE_S = {"MAX_LOOKUP_S": ("lookups hang",), "MAX_STALL_S": ("gets hang", "lookups hang")}
"""Limits that are raised, so a busy machine does not look like a fault. These faults need them."""

HITTING = ("nothing", "lookups are slow", "gets are slow")


@scenario
def store(engine: Engine) -> None:
    """The prompts of the faults, each under the name of its fault."""
    for name in FAULTS:
        for prompt in prompts_of(name):
            engine.ask(name, [prompt], reply_tokens=_REPLY_TOKENS)
            engine.finish()


@scenario
def stuck(engine: Engine) -> None:
    """Hang for ever in a lookup or in a get, as planned. The file ``mark`` shows when it begins."""
    from vllm_ascend_kvext.shared_tier.files import FilesTier

    folder = Path(engine.plan["folder"])
    read = FilesTier._read
    exist = FilesTier.exist
    mark = Path(engine.plan["mark"])

    def read_and_hang(tier: Any, file: int, each: Any, on_bytes: Any) -> bool:
        read(tier, file, each._replace(num_bytes=each.num_bytes // 2), on_bytes)
        mark.touch()
        time.sleep(1000)
        return True

    def exist_and_hang(tier: Any, names: Any) -> list[str]:
        mark.touch()
        time.sleep(1000)
        return exist(tier, names)

    assert objects_of(folder / "kvext4")
    if engine.plan["call"] == "get":
        FilesTier._read = read_and_hang  # type: ignore[method-assign]
    else:
        FilesTier.exist = exist_and_hang  # type: ignore[method-assign]
    for name in FAULTS:
        engine.side.secondary._gets._paused_until_s = 0.0
        engine.ask(name, prompts_of(name)[:1])
    while True:  # The loop ends when the process is killed.
        time.sleep(1)


class _Watch:
    """Measures calls of the scheduler, and when requests get their first tokens.

    Each call has three numbers of seconds: by the clock, of CPU time, and of waiting for a free
    CPU. In the rest of the time, the thread waited for a lock, such as the interpreter's.
    """

    def __init__(self, engine: Engine) -> None:
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self.first_s: dict[str, float] = {}
        self.calls: dict[str, list[tuple[float, float, float]]] = {"schedule": [], "match": []}
        scheduler = engine.scheduler
        self._schedule = scheduler.schedule
        scheduler.schedule = self._timed_schedule
        connector = scheduler.connector
        connector.get_num_new_matched_tokens = partial(
            self._timed, "match", connector.get_num_new_matched_tokens
        )

    def _unscheduled_s(self) -> float:
        return int(os.pread(self._schedstat, 100, 0).split()[1]) / 1e9

    def _timed(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        waited_s = self._unscheduled_s()
        cpu_s = time.thread_time()
        began_s = time.perf_counter()
        result = call(*arguments)
        seconds = time.perf_counter() - began_s
        cpu_s = time.thread_time() - cpu_s
        self.calls[name].append((seconds, cpu_s, self._unscheduled_s() - waited_s))
        return result

    def _timed_schedule(self, *arguments: Any) -> Any:
        output = self._timed("schedule", self._schedule, *arguments)
        if not output.num_scheduled_tokens:
            self.calls[
                "schedule"
            ].pop()  # It may wait a little, because there is nothing else to do.
        for request_id in output.num_scheduled_tokens:
            # vLLM adds a suffix to each id.
            self.first_s.setdefault(request_id.partition("-")[0], time.perf_counter())
        return output

    def take(self) -> dict[str, list[tuple[float, float, float]]]:
        found = self.calls
        self.calls = {"schedule": [], "match": []}
        return found


class _Stream:
    """Requests that come one by one, while another one decodes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._llm = engine.llm.llm_engine
        self.watch = _Watch(engine)
        self._num_requests = 0
        self._decoder = ""

    def ask(self, prompt: Tokens) -> tuple[dict[str, Any], float]:
        """The answer, and how long the request waited for its first tokens."""
        request_id = self._add(prompt, _REPLY_TOKENS)
        added_s = time.perf_counter()
        while True:
            for output in self.step():
                if output.request_id == request_id and output.finished:
                    waited_s = self.watch.first_s[request_id] - added_s
                    return answer_of(Prompt(prompt), output), waited_s

    def step(self) -> list[Any]:
        if not self._decoder:
            self._decoder = self._add([5] * 16, 1900)
        outputs = self._llm.step()
        if any(each.request_id == self._decoder and each.finished for each in outputs):
            self._decoder = ""
        return list(outputs)

    def _add(self, prompt: Tokens, reply_tokens: int) -> str:
        self._num_requests += 1
        request_id = f"r{self._num_requests}"
        sampling = sampling_of(reply_tokens)
        self._llm.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
        return request_id

    def end(self) -> None:
        self._llm.abort_request([self._decoder])
        self._engine.finish()


@scenario
def faults(engine: Engine) -> None:
    """All faults. Before each fault and at the end, the folder is restored.

    If the plan has ``measures``, the tier keeps its own limits of time.
    """
    from vllm_ascend_kvext.shared_tier.scheduler import limits

    patience_s = {name: getattr(limits, name) for name in PATIENCE_S}
    root = Path(engine.plan["folder"]) / "kvext4"
    kept = root.with_name("kept")
    shutil.copytree(root, kept, symlinks=True)
    stream = _Stream(engine)
    side = engine.side.secondary
    stream.ask([7] * 20)

    def restore() -> None:
        engine.finish()
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(kept, root, symlinks=True)

    for name, fault in FAULTS.items():
        restore()
        for limit, exceptions in PATIENCE_S.items():
            is_own = engine.plan["measures"] or name in exceptions
            setattr(limits, limit, patience_s[limit] if is_own else 20.0)
        side._gets._paused_until_s = side._puts._paused_until_s = 0.0
        before = engine.counted.copy()
        counters = engine.side.counters
        own = counters.totals()
        stream.watch.take()
        with fault(root):
            asked = [stream.ask(prompt) for prompt in prompts_of(name)]
            for _ in range(50):
                stream.step()
        for _ in range(20):
            stream.step()
        engine.note_answers(name, [answer for answer, _ in asked], engine.counted - before)
        changed = {key: value - own[key] for key, value in counters.totals().items()}
        calls = stream.watch.take()
        engine.note(
            name,
            {
                "waited_s": [waited_s for _, waited_s in asked],
                "counted": {key: value for key, value in changed.items() if "shared_" in key},
                **{key: sorted(times, reverse=True)[:5] for key, times in calls.items()},
                "num_steps": len(calls["schedule"]),
            },
        )
    restore()
    stream.end()


_NUM_DOCUMENTS = 40
_NUM_QUESTIONS = 10
_SOAK_REPLY_TOKENS = 4


def soak_prompt(number: int) -> Tokens:
    """One of the prompts of the soak: a document, and a question about it."""
    document, question = divmod(number, _NUM_QUESTIONS)
    rng = random.Random(f"document {document}")
    text = random_tokens(rng, rng.randrange(200, 700))
    return [*text, *random_tokens(random.Random(f"question {number}"), 20 + question)]


num_soak_prompts = _NUM_DOCUMENTS * _NUM_QUESTIONS


@scenario
def soak_reference(engine: Engine) -> None:
    """Each prompt, sent once."""
    prompts = [soak_prompt(number) for number in range(num_soak_prompts)]
    for first in range(0, num_soak_prompts, 8):
        engine.ask("soak", prompts[first : first + 8], reply_tokens=_SOAK_REPLY_TOKENS)


@scenario
def soak(engine: Engine) -> None:
    """Random prompts, four at once. Each answer is immediately written to a file, as a line."""
    rng = random.Random(engine.plan["seed"])
    num_left = int(engine.plan["requests"])
    with Path(engine.plan["answers"]).open("a", buffering=1) as answers:
        while num_left > 0:
            numbers = [int(num_soak_prompts * rng.random() ** 2) for _ in range(min(4, num_left))]
            replies = engine.ask(
                "soak", [soak_prompt(each) for each in numbers], reply_tokens=_SOAK_REPLY_TOKENS
            )
            hits = [each["hit_tokens"] for each in engine.asked.pop("soak")["answers"]]
            for each in zip(numbers, replies, hits, strict=True):
                answers.write(json.dumps(each) + "\n")
            num_left -= len(numbers)
    engine.finish()
    engine.asked["soak"] = {"answers": [], "counted": {}}
