# SPDX-License-Identifier: Apache-2.0
"""What a server serves is asked; one that does not answer is named with the remedy."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import pytest

from vllm_ascend_kvext.lmcache.errors import LMCacheError
from vllm_ascend_kvext.lmcache.handshake import (
    TransferMode,
    choose_transfer_mode,
    chunk_tokens,
    require_capabilities,
)

URL = "tcp://host:1"
LMCACHE, ENGINE = TransferMode.LMCACHE_DRIVEN, TransferMode.ENGINE_DRIVEN


@dataclass
class Answer:
    """Of a server, or of nobody."""

    value: object
    is_given: bool

    def result(self, timeout: float | None = None) -> object:
        assert timeout is not None
        if not self.is_given:
            raise TimeoutError
        return self.value


@dataclass
class Server:
    """It serves some modes, and its answers never come where it has no handler."""

    modes: Collection[TransferMode] = ()
    is_lmcache: bool = True
    tells_capabilities: bool = True
    asked: list[TransferMode] = field(default_factory=list)

    def get_chunk_size(self) -> Answer:
        return Answer(256, self.is_lmcache)

    def get_experimental(self) -> Answer:
        return Answer(["a stream"], self.tells_capabilities)

    def unregister_kv_cache(self, instance_id: int) -> Answer:
        return self._end(LMCACHE)

    def unregister_kv_cache_engine_driven_context(self, instance_id: int) -> Answer:
        return self._end(ENGINE)

    def _end(self, mode: TransferMode) -> Answer:
        self.asked.append(mode)
        return Answer(None, mode in self.modes)


def test_the_chunk_size_is_the_servers() -> None:
    assert chunk_tokens(Server(), URL) == 256


def test_a_port_of_something_else_is_refused() -> None:
    with pytest.raises(LMCacheError, match=r"tcp://host:1 accepts.*chunk size.*lmcache.mp.port"):
        chunk_tokens(Server(is_lmcache=False), URL)


def test_a_server_that_does_not_tell_its_capabilities_is_refused() -> None:
    assert require_capabilities(Server(), URL, "0.5.6") == ("a stream",)
    with pytest.raises(LMCacheError, match=r"host:1.*0\.5\.3 and 0\.5\.4.*LMCache 0\.5\.6 is"):
        require_capabilities(Server(tells_capabilities=False), URL, "0.5.6")


@pytest.mark.parametrize(
    ("served", "chosen"),
    [({LMCACHE}, LMCACHE), ({ENGINE}, ENGINE), ({LMCACHE, ENGINE}, LMCACHE)],
)
def test_without_a_setting_the_mode_is_one_that_the_server_serves(
    served: set[TransferMode], chosen: TransferMode
) -> None:
    assert choose_transfer_mode(Server(served), URL, "auto") is chosen


@pytest.mark.parametrize("mode", TransferMode)
def test_a_mode_that_is_set_is_asked_for_alone(mode: TransferMode) -> None:
    server = Server(set(TransferMode))
    assert choose_transfer_mode(server, URL, mode.value) is mode
    assert server.asked == [mode]


@pytest.mark.parametrize(("wanted", "served"), [(LMCACHE, ENGINE), (ENGINE, LMCACHE)])
def test_a_mode_that_is_set_and_not_served_is_refused(
    wanted: TransferMode, served: TransferMode
) -> None:
    text = rf"{wanted.value}.*host:1.*--supported-transfer-mode {wanted.value}.*{served.value}"
    with pytest.raises(LMCacheError, match=text):
        choose_transfer_mode(Server({served}), URL, wanted.value)


def test_a_server_that_serves_no_mode_is_refused() -> None:
    with pytest.raises(LMCacheError, match="neither"):
        choose_transfer_mode(Server(), URL, "auto")


def test_a_mode_that_is_unknown_is_left_to_lmcache() -> None:
    server = Server()
    assert choose_transfer_mode(server, URL, "typo") is None
    assert not server.asked
