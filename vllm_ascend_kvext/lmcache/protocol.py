# SPDX-License-Identifier: Apache-2.0
"""Which protocol an LMCache server speaks, by what it answers and not by guess.

Releases number their requests otherwise (``RequestType`` in
``lmcache/v1/multiprocess/protocols/base.py``), and the client of LMCache 0.5.6 has one numbering
(``LEGACY_OPERATION_IDS`` in ``transport/zmq_impl/wire.py``) and one form of a store, block ids by
group. So this is what can be found:

    ============  ==================  ====================  =====================================
    release       block ids of        answer to request 21  can be used from 0.5.6
    of a server   a store             of 0.5.6
    ============  ==================  ====================  =====================================
    0.5.6         a list per group    chunk size            yes
    0.5.5         a list per group    chunk size            no: cannot read what workers register
    0.5.3, 0.5.4  a list per group    chunk size            no: does not say what it is capable of
    0.5.0-0.5.2   a list per group    "OK"                  no: other numbers
    0.4.7         a list per group    none                  no: other numbers
    0.4.5, 0.4.6  one list            none                  no: other numbers, and another store
    ============  ==================  ====================  =====================================

A server of another numbering takes LMCache 0.5.6's requests for others. So the first is put by
hand, and LMCache's client says nothing to a server that does not answer it as expected. Where there
is no answer, three more tell older releases apart: they ask these whether they are there, and are
refused by all others for want of arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from vllm_ascend_kvext.lmcache.errors import LMCacheError

ANSWER_LIMIT_S = 10.0
OLD_RELEASE_AFTER_S = 2.0
"""Without an answer, older releases are asked for."""

_GET_CHUNK_SIZE = 21
_OF_OLD_RELEASES = {14: "0.4.5", 19: "0.4.6", 18: "0.4.7"}
"""Numbers of the requests `noop`, `noop` and `ping` there."""


class Exchange(Protocol):
    """Single requests to a server, without LMCache's client."""

    def ask(self, number: int) -> None:
        """Put a request without arguments."""

    def answer(self, limit_s: float) -> tuple[int, object] | None:
        """The next answer, and to which number; None when the time is up."""


@dataclass(slots=True)
class ZmqExchange:
    """Over a socket as LMCache's client has one: the request's own number, its kind, arguments."""

    url: str

    def __post_init__(self) -> None:
        import zmq

        self._socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(self.url)

    _socket: Any = None

    def ask(self, number: int) -> None:
        self._socket.send_multipart([bytes([number]), bytes([number])])

    def answer(self, limit_s: float) -> tuple[int, object] | None:
        import msgspec

        if not self._socket.poll(limit_s * 1000):
            return None
        number, _, *values = self._socket.recv_multipart()
        return number[0], msgspec.msgpack.decode(values[0]) if values else None

    def close(self) -> None:
        self._socket.close()


def require_current_protocol(exchange: Exchange, url: str, installed: str) -> None:
    """Refuse a server that does not speak the protocol of the LMCache that is installed.

    Args:
        exchange: With the server.
        url: Of the server, for the message.
        installed: Release of LMCache in this environment, for the message.

    Raises:
        LMCacheError: If it is another release's, or does not answer.
    """
    exchange.ask(_GET_CHUNK_SIZE)
    answer = exchange.answer(OLD_RELEASE_AFTER_S)
    if answer is None:
        for number in _OF_OLD_RELEASES:
            exchange.ask(number)
        answer = exchange.answer(ANSWER_LIMIT_S - OLD_RELEASE_AFTER_S)
    if answer is None:
        raise LMCacheError(
            f"LMCacheMPConnector: {url} accepts connections, but does not answer LMCache's request "
            f"for the chunk size within {ANSWER_LIMIT_S:.0f} s. Expected the request port of an "
            f"LMCache server of the release that is installed here, {installed}: check that "
            "lmcache.mp.port is its --port, and not its --http-port, that both sides have the same "
            "release, and the server's log"
        )
    number, value = answer
    if number == _GET_CHUNK_SIZE and isinstance(value, int) and not isinstance(value, bool):
        return
    release = _OF_OLD_RELEASES.get(number, "0.5.0 to 0.5.2")
    raise LMCacheError(
        f"LMCacheMPConnector: the server at {url} is LMCache {release}, by its answer {value!r} to "
        f"request {number}; here LMCache {installed} is installed, which numbers its requests "
        "otherwise and cannot speak with it, with one KV cache group or with several. Install the "
        "same release on both sides"
    )
