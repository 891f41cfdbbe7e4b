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

0.5.5 and 0.5.6 have the same numbers, but for one that 0.5.6 has retired
(``query_prefetch_lookup_hits``): 0.5.5 looks the request up that it names, finds none, and answers;
0.5.6 logs a number that it does not know, and goes on. It is put only where a server does not have
what is new in 0.5.6, its stream of KV events, which ``--kv-event-log-size 0`` takes away.

No number may be asked that an older release does not have: it ends the loop of LMCache 0.5.5
(``_main_loop`` in ``lmcache/v1/multiprocess/mq.py``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_ascend_kvext.lmcache.errors import LMCacheError

ANSWER_LIMIT_S = 10.0
OLD_RELEASE_AFTER_S = 2.0
"""Without an answer, older releases are asked for."""

_GET_CHUNK_SIZE = 21
_OF_OLD_RELEASES = {14: "0.4.5", 19: "0.4.6", 18: "0.4.7"}
"""Numbers of the requests `noop`, `noop` and `ping` there."""

RETIRED_AFTER_PING_S = 1.0
"""For the answer to a request that the server has begun before it answered a ping."""

KV_EVENTS = "kv_event_stream"
"""What a server of LMCache 0.5.6 is capable of (``KV_EVENT_CAPABILITY`` in ``custom_types.py``)."""

_RETIRED = 11
_PING = 22
_NO_REQUEST = "kvext-handshake"
"""A request id that no engine has."""


class Exchange(Protocol):
    """Single requests to a server, without LMCache's client."""

    def ask(self, number: int, *arguments: object) -> None:
        """Put a request."""

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

    def ask(self, number: int, *arguments: object) -> None:
        import msgspec

        values = [msgspec.msgpack.encode(argument) for argument in arguments]
        self._socket.send_multipart([bytes([number]), bytes([number]), *values])

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


def require_no_retired_request(
    exchange: Exchange, capabilities: Collection[str], url: str, installed: str
) -> None:
    """Refuse a server of LMCache 0.5.5, which cannot read what workers of 0.5.6 register.

    A server begins requests in their order, so the time for an answer counts from that of a ping.

    Args:
        exchange: With a server that has answered as one of the current protocol.
        capabilities: What it says that it is capable of.
        url: Of the server, for the message.
        installed: Release of LMCache in this environment, which is not 0.5.5; for the message.

    Raises:
        LMCacheError: If it answers a request that 0.5.6 has retired.
    """
    if KV_EVENTS in capabilities:
        return
    exchange.ask(_RETIRED, _NO_REQUEST)
    exchange.ask(_PING, None)
    limit_s = ANSWER_LIMIT_S
    while (answer := exchange.answer(limit_s)) is not None:
        number, value = answer
        if number == _RETIRED:
            raise LMCacheError(
                f"LMCacheMPConnector: the server at {url} is LMCache 0.5.5, by its answer "
                f"{value!r} to request {number}; here LMCache {installed} is installed, whose "
                "workers register what 0.5.5 cannot read. Install the same release on both sides"
            )
        limit_s = RETIRED_AFTER_PING_S
