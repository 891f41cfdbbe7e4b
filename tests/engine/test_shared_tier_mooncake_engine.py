# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A Mooncake Store between real engines, which run one after the other, or side by side.

Log-probabilities equal those of an engine without this package. Controls show that wrong bytes
would change them.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.mooncake import Servers, raw_client
from support.sample import IS_LONG
from support.scenarios.answers import LOGPROB_TOLERANCE, Served
from support.scenarios.connector import SHARED_TOKENS
from test_shared_tier_engine import HITS, MODELS, Sharing, check, floor, own, until

from vllm_ascend_kvext.shared_tier.backend import SEAL_BYTES, seal_of

pytestmark = pytest.mark.main_version

long_only = pytest.mark.skipif(not IS_LONG, reason="engines that differ little from those above")


class Stored:
    """Engines of one model that share a store."""

    def __init__(self, model: Path, folders: pytest.TempPathFactory) -> None:
        self.servers = Servers(folders.mktemp("servers"), "512 MB")
        self.sharing = Sharing(model, folders, self.servers.url)

    def serve(self) -> Served:
        """The answers of an engine.

        If the machine is too busy for a lookup, another engine answers.
        """
        for _ in range(4):
            served = self.sharing.serve()
            names = ("late", "given_up", "paused")
            if not any(own(served, f"shared_requests.{name}") for name in names):
                break
        return served

    def objects(self) -> list[str]:
        keys = self.servers.stored_keys()
        return [key for key in keys if key.rpartition("/")[2][0] in "RT"]

    def overwrite(self, change: Callable[[bytes, int], bytes], fits: bool) -> None:
        """Change all objects.

        Their seals fit the change if ``fits``, and otherwise the old bytes.
        """
        store: Any = raw_client(self.servers)
        for number, key in enumerate(self.objects()):
            value = store.get(key)
            content = change(value[:-SEAL_BYTES], number)
            seal = seal_of(key, content) if fits else value[-SEAL_BYTES:]
            assert store.upsert(key, content + seal) == 0
        store.close()


@pytest.fixture(scope="module", params=MODELS if IS_LONG else MODELS[:1])
def stored(
    request: pytest.FixtureRequest,
    model_folder: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stored]:
    found = Stored(model_folder(request.param), tmp_path_factory)
    yield found
    found.servers.end()


@pytest.fixture(scope="module")
def reference(stored: Stored) -> Served:
    return stored.sharing.reference()


@pytest.fixture(scope="module")
def first(stored: Stored) -> Served:
    """The engine that fills the store."""
    return stored.sharing.serve()


def test_the_second_engine_hits_what_the_first_has_stored(
    first: Served, stored: Stored, reference: Served
) -> None:
    second = stored.serve()
    check(first, reference)
    check(second, reference)
    assert first.hit_tokens("shared") == [0] * len(HITS)
    assert second.hit_tokens("shared") == HITS
    assert second.hit_tokens("shared, again") == HITS
    assert second.hit_tokens("shared, parting")[0] >= floor(SHARED_TOKENS)
    assert second.hit_tokens("shared, salted") == [HITS[0]]
    assert own(second, "transfer_bytes.get") > 0
    for reason in ("get_absent", "get_broken", "get_unreachable", "put_unreachable"):
        assert own(second, f"shared_failures.{reason}") == 0


@long_only
@pytest.mark.main_version
def test_engines_that_differ_do_not_meet(first: Served, stored: Stored) -> None:
    served = stored.sharing.serve(dtype="bfloat16")
    assert served.hit_tokens("shared") == [0] * len(HITS)
    assert own(served, "transfer_bytes.get") == 0
    assert "differs in: dtypes" in served.log.replace("groups; ", "")


@long_only
@pytest.mark.main_version
def test_wrong_bytes_without_a_right_seal_are_computed(
    first: Served, stored: Stored, reference: Served
) -> None:
    """Such objects are removed, and later requests store them again."""

    def flipped(content: bytes, number: int) -> bytes:
        at = number * 97 % len(content)
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]

    stored.overwrite(flipped, fits=False)
    served = stored.sharing.serve()
    check(served, reference)
    assert served.hit_tokens("shared") == [0] * len(HITS)
    is_busy = own(served, "shared_requests.late") + own(served, "shared_requests.paused") > 0
    assert is_busy or own(served, "shared_failures.get_broken") > 0


@long_only
@pytest.mark.main_version
def test_wrong_bytes_would_change_answers(stored: Stored, reference: Served) -> None:
    """The control: the objects are zeros, with fitting seals."""
    stored.serve()  # This stores again what was removed before.
    stored.overwrite(lambda content, _: bytes(len(content)), fits=True)
    served = stored.serve()
    assert served.hit_tokens("shared") == HITS
    assert served.logprob_error("shared", reference) > 100 * LOGPROB_TOLERANCE


@long_only
@pytest.mark.main_version
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_an_engine_that_dies_or_stops_while_it_puts_harms_nobody(
    how: signal.Signals,
    model_folder: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The engine has put some of the objects that the other engine asks for. It is putting more."""
    stored = Stored(model_folder("full"), tmp_path_factory)
    reference = stored.sharing.reference()
    try:
        with stored.sharing.running("shared_for_long") as engine:
            until(lambda: len(stored.objects()) > 40, engine)
            engine.send_signal(how)
            served = stored.serve()
            assert engine.poll() is None or how is signal.SIGKILL
    finally:
        stored.servers.end()
    check(served, reference)
    assert served.hit_tokens("shared") == HITS
    assert own(served, "shared_failures.get_broken") == 0
