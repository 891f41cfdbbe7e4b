# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A prefill node and a decode node: KV goes from one to the other by vLLM-Ascend's Mooncake.

Each node is an engine in its own process, with Mooncake's connector and a KvextConnector. Prompts
go to the prefill node, and answers come from the decode node. They are compared with those of one
engine without connectors. The pool of the decode node is small, so that requests are preempted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from emulated_plans import CROWDED_BLOCKS, pool_of
from support import mooncake
from support.prefill_decode.conversations import Conversations
from support.prefill_decode.nodes import NodeProcess
from support.prefill_decode.plans import Deployment
from support.prefill_decode.proxy import Asked, Phase, Proxy
from support.sample import IS_LONG
from support.scenarios.answers import NPU_TOLERANCE, WRONG, Answer, errors
from support.scenarios.engine import random_tokens
from support.scenarios.processes import NO_PREFIX_CACHING, PLUGIN_OFF, Plan

MODEL = "full attention"
LENGTHS = (300, 777, 64, 129, 16, 256)
WHOLE_BLOCKS_TOKENS = sum((length - 1) // 128 * 128 for length in LENGTHS)
"""The tokens of the prompts' full blocks, without the last token, which is always computed."""
STORM_LENGTHS = tuple(180 + 7 * number for number in range(10))
STORM_REPLY_TOKENS = 250

Start = Callable[..., NodeProcess]


@pytest.fixture(scope="module")
def start(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Start]:
    """Start a ``prefill`` node, a ``decode`` node, or ``one`` engine without connectors.

    With the plan of a node that has ended, another node takes its place.
    """
    mooncake.require()
    nodes: list[NodeProcess] = []

    def start(
        kind: str,
        deployment: Deployment | None = None,
        plan: Plan | None = None,
        model: str = MODEL,
        **engine: Any,
    ) -> NodeProcess:
        folder = tmp_path_factory.mktemp(f"{kind}{len(nodes)}")
        if kind == "one":
            plan = Plan(folder_of(model), (), engine=pool_of(model) | NO_PREFIX_CACHING)
            nodes.append(NodeProcess(kind, folder, plan, PLUGIN_OFF))
        else:
            pool = pool_of(model, CROWDED_BLOCKS) if kind == "decode" else pool_of(model)
            deployment = deployment or Deployment()
            plan = plan or deployment.plan(kind, folder_of(model), pool | engine)
            nodes.append(NodeProcess(kind, folder, plan))
        return nodes[-1]

    yield start
    for node in nodes:
        node.end()


@pytest.fixture(scope="module")
def proxy(start: Start) -> Proxy:
    return Proxy(start("prefill"), start("decode"))


@pytest.fixture(scope="module")
def one(start: Start) -> Proxy:
    return Proxy(None, start("one"))


@pytest.fixture
def nodes(proxy: Proxy) -> Iterator[Proxy]:
    """The nodes, whose caches are empty. After the test, nothing is left for ended requests."""
    forget(proxy)
    yield proxy
    # A test that has failed may have left these.
    proxy.decode.call("let_transfers_go")
    proxy.decode.call("set_fault", "none")
    for node in proxy.nodes:
        node.call("load_nothing", False)
    check_nothing_is_left(proxy)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(31)
    return [random_tokens(rng, length) for length in LENGTHS]


@pytest.fixture(scope="module")
def reference(one: Proxy, prompts: list[list[int]]) -> list[Asked]:
    """Answers to the prompts, of one engine without connectors."""
    return one.ask(prompts)


def forget(proxy: Proxy) -> None:
    for node in proxy.nodes:
        node.call("spoil_pages")
        node.call("forget")


def check_nothing_is_left(proxy: Proxy) -> None:
    proxy.wait_until_idle()
    for node in proxy.nodes:
        left = node.call("left")
        # Mooncake's connector never forgets the id of a request that was aborted on its node.
        left.pop("in process", None)
        assert set(left.values()) == {0}, (node.name, left)


def logprob_errors(found: Sequence[Asked], expected: Sequence[Asked]) -> list[float]:
    """The largest difference of a log-probability in each answer."""
    answers = [[Answer(**each.answer) for each in of if each.answer] for of in (found, expected)]
    return errors(*answers)


def check_equal(found: Sequence[Asked], expected: Sequence[Asked]) -> None:
    assert [each.reply for each in found] == [each.reply for each in expected]
    differences = logprob_errors(found, expected)
    assert max(differences) <= NPU_TOLERANCE, differences


@contextmanager
def counting(node: NodeProcess) -> Iterator[dict[str, Any]]:
    """The growth of a node's counters inside the block. The dictionary is filled at its end."""
    before = node.call("counted")
    grown: dict[str, Any] = {}
    yield grown
    after = node.call("counted")
    grown.update({name: value - before.get(name, 0) for name, value in after.items()})


def test_answers_are_those_of_one_engine(
    nodes: Proxy, prompts: list[list[int]], reference: list[Asked]
) -> None:
    with counting(nodes.nodes[1]) as counted:
        check_equal(nodes.ask(prompts), reference)
    assert counted["mooncake reads"] == len(prompts)
    # Of each prompt, the decode node computes the last token, and each answer's but the last.
    assert counted["computed tokens"] == sum(each.reply_tokens for each in reference)


def test_zeros_in_place_of_what_crosses_change_answers(
    nodes: Proxy, prompts: list[list[int]], reference: list[Asked]
) -> None:
    """The control of all comparisons here: the decode node reads what has crossed."""
    decode = nodes.nodes[1]
    decode.call("set_fault", "zeros")
    found = nodes.ask(prompts)
    decode.call("set_fault", "none")
    assert min(logprob_errors(found, reference)) > WRONG


@pytest.mark.parametrize("loads", ["loads", "loads nothing"])
def test_the_prefill_node_sends_what_it_has_taken_from_host_memory(
    nodes: Proxy, prompts: list[list[int]], reference: list[Asked], loads: str
) -> None:
    """As a control, loads move nothing, and the decode node gets wrong bytes."""
    prefill, decode = nodes.nodes
    nodes.ask(prompts)
    nodes.wait_until_idle()
    prefill.call("spoil_pages")
    decode.call("spoil_pages")
    prefill.call("load_nothing", loads == "loads nothing")
    with counting(prefill) as of_prefill, counting(decode) as of_decode:
        found = nodes.ask(prompts)
    prefill.call("load_nothing", False)
    assert of_prefill["host_hit_tokens"] == WHOLE_BLOCKS_TOKENS
    assert of_decode["host_hit_tokens"] == 0
    assert of_decode["mooncake reads"] == len(prompts)
    if loads == "loads":
        check_equal(found, reference)
    else:
        assert max(logprob_errors(found, reference)) > WRONG


@pytest.mark.parametrize("loads", ["loads", "loads nothing"])
def test_preempted_requests_come_back_from_host_memory_on_the_decode_node(
    nodes: Proxy, one: Proxy, loads: str
) -> None:
    rng = random.Random(32)
    storm = [random_tokens(rng, length) for length in STORM_LENGTHS]
    expected = one.ask(storm, STORM_REPLY_TOKENS)
    decode = nodes.nodes[1]
    decode.call("load_nothing", loads == "loads nothing")
    with counting(decode) as counted:
        found = nodes.ask(storm, STORM_REPLY_TOKENS)
    decode.call("load_nothing", False)
    assert counted["preemptions"] > 0
    assert counted["host_swapped_requests"] > 0
    assert counted["host_hit_requests"] > 0
    assert counted["mooncake reads"] == len(storm), "once for each request"
    if loads == "loads":
        check_equal(found, expected)
    else:
        assert max(logprob_errors(found, expected)) > WRONG


def test_next_turns_hit_on_both_nodes(nodes: Proxy, one: Proxy, prompts: list[list[int]]) -> None:
    """The prefill node has the prompt of the turn before, and the decode node the answer, too."""
    rng = random.Random(33)
    first = nodes.ask(prompts, 130)
    turns = [[*each.prompt, *each.reply, *random_tokens(rng, 40)] for each in first]
    expected = one.ask(turns)
    nodes.wait_until_idle()
    for node in nodes.nodes:
        node.call("spoil_pages")
    with counting(nodes.nodes[0]) as of_prefill:
        check_equal(nodes.ask(turns), expected)
    assert of_prefill["host_hit_tokens"] >= WHOLE_BLOCKS_TOKENS
    nodes.wait_until_idle()
    nodes.nodes[1].call("spoil_pages")
    # A proxy may send a turn to the decode node alone.
    alone = Proxy(None, nodes.nodes[1])
    with counting(nodes.nodes[1]) as of_decode:
        check_equal(alone.ask(turns), expected)
    assert of_decode["host_hit_tokens"] >= sum((len(turn) - 41) // 128 * 128 for turn in turns)


@pytest.mark.parametrize("fault", ["fails", "half"])
@pytest.mark.parametrize("is_stored", [False, True])
def test_what_did_not_cross_is_computed_or_loaded(
    nodes: Proxy, prompts: list[list[int]], reference: list[Asked], fault: str, is_stored: bool
) -> None:
    decode = nodes.nodes[1]
    if is_stored:
        nodes.ask(prompts)
        nodes.wait_until_idle()
        decode.call("spoil_pages")
    decode.call("set_fault", fault)
    with counting(decode) as counted:
        check_equal(nodes.ask(prompts), reference)
    decode.call("set_fault", "none")
    assert counted["mooncake failed"] == len(prompts)
    assert counted["host_hit_tokens"] == (WHOLE_BLOCKS_TOKENS if is_stored else 0)
    # Nothing wrong was stored: all is read from host memory once more.
    nodes.wait_until_idle()
    decode.call("spoil_pages")
    with counting(decode) as counted:
        check_equal(Proxy(None, decode).ask(prompts), reference)
    assert counted["host_hit_tokens"] == WHOLE_BLOCKS_TOKENS


def test_what_another_connector_still_loads_is_not_stored(
    nodes: Proxy, prompts: list[list[int]], reference: list[Asked]
) -> None:
    """Of three requests that wait for their KV, one is aborted. Two have the same prompt."""
    decode = nodes.nodes[1]
    with counting(decode) as counted:
        decode.call("hold_transfers")
        waiting = [nodes.send(prompts[number]) for number in (1, 0, 1)]
        nodes.wait_for(lambda: all(_waits(decode, each) for each in waiting))
        nodes.wait_for(lambda: decode.call("num_waiting_transfers") > 0)
        nodes.abort(waiting[0])
        for _ in range(10):
            nodes.pump()
    assert counted["host_entries"] == 0
    assert decode.call("left")["blocks"] >= 7 + 3, "the transfer still writes into them"
    decode.call("let_transfers_go")
    nodes.wait_for(lambda: all(each.is_over for each in waiting))
    check_equal(waiting[1:], [reference[0], reference[1]])
    nodes.wait_until_idle()
    decode.call("spoil_pages")
    check_equal(Proxy(None, decode).ask(prompts), reference)


def _waits(decode: NodeProcess, asked: Asked) -> bool:
    return bool(decode.call("status_of", asked.request_id) == "WAITING_FOR_REMOTE_KVS")


def test_aborted_requests_leave_nothing(nodes: Proxy, prompts: list[list[int]]) -> None:
    """Requests are aborted on the prefill node, in transfer, and while they are answered."""
    decode = nodes.nodes[1]
    sent = [nodes.send(prompt) for prompt in prompts]
    for each in sent:
        nodes.abort(each)
    check_nothing_is_left(nodes)
    decode.call("hold_transfers")
    sent = [nodes.send(prompt) for prompt in prompts]
    nodes.wait_for(lambda: all(each.phase is Phase.DECODE for each in sent))
    nodes.wait_for(lambda: any(_waits(decode, each) for each in sent))
    for each in sent:
        nodes.abort(each)
    decode.call("let_transfers_go")
    check_nothing_is_left(nodes)
    sent = [nodes.send(prompt, 200) for prompt in prompts]
    nodes.wait_for(lambda: all(each.phase is Phase.ANSWERING for each in sent))
    for each in sent:
        nodes.abort(each)
    check_nothing_is_left(nodes)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4 if IS_LONG else 1))
def test_conversations(nodes: Proxy, one: Proxy, seed: int) -> None:
    """Turns go to the prefill node and then to the decode node, and some clients leave."""
    prefill, decode = nodes.nodes
    conversations = Conversations(nodes, seed)
    with counting(prefill) as of_prefill, counting(decode) as of_decode:
        conversations.run(200 if IS_LONG else 72)
    happened = conversations.happened
    print(dict(happened), *({k: v for k, v in of.items() if v} for of in (of_prefill, of_decode)))
    check_nothing_is_left(nodes)
    done = conversations.done
    for first in range(0, len(done), 12):
        some = done[first : first + 12]
        sent = [one.send(each.prompt, each.reply_tokens) for each in some]
        one.wait_for(lambda sent=sent: all(each.is_over for each in sent))
        check_equal(some, sent)
    for where in ("prefill", "WAITING_FOR_REMOTE_KVS", "answering"):
        assert happened[f"aborted: {where}"] > 0, happened
    assert of_prefill["host_hit_tokens"] > 0
    assert of_decode["host_hit_tokens"] > 0
    assert of_decode["host_swapped_requests"] > 0


def test_a_killed_node(start: Start, reference: list[Asked], prompts: list[list[int]]) -> None:
    """What was to come from a killed prefill node is computed, once another one has its port.

    The connector of the decode node tells the prefill node about each end of a transfer. Where
    nobody listens, it waits for ever after the first, see docs/prefill_decode.md.
    """
    prefill, decode = start("prefill"), start("decode")
    nodes = Proxy(prefill, decode)
    decode.call("hold_transfers")
    sent = [nodes.send(prompt) for prompt in prompts]
    nodes.wait_for(lambda: all(each.phase is Phase.DECODE for each in sent))
    prefill.kill()
    decode.call("let_transfers_go")
    alone = nodes.without_prefill()
    alone.wait_for(lambda: any(each.is_over for each in sent))
    prefill = start("prefill", plan=prefill.plan)
    prefill.wait_until_ready()
    alone.wait_for(lambda: all(each.is_over for each in sent))
    check_equal(sent, reference)
    check_nothing_is_left(alone)
    nodes = Proxy(prefill, decode)
    forget(nodes)
    check_equal(nodes.ask(prompts), reference)
    check_nothing_is_left(nodes)
    # A decode node is killed while it reads.
    decode.call("hold_transfers")
    sent = [nodes.send(prompt) for prompt in prompts]
    nodes.wait_for(lambda: all(each.phase is Phase.DECODE for each in sent))
    decode.kill()
    check_nothing_is_left(Proxy(None, prefill))  # After the time that Mooncake's connector waits.
    check_equal(Proxy(prefill, start("decode")).ask(prompts), reference)


@pytest.mark.parametrize("order", [("kvext", "mooncake")])
def test_the_order_of_connectors_does_not_matter(
    start: Start, reference: list[Asked], prompts: list[list[int]], order: tuple[str, ...]
) -> None:
    """Host memory of the decode node has the prompts when they are sent again."""
    deployment = Deployment(order=order)
    nodes = Proxy(start("prefill", deployment), start("decode", deployment))
    for _ in range(2):
        check_equal(nodes.ask(prompts), reference)
        nodes.wait_until_idle()
        for node in nodes.nodes:
            node.call("spoil_pages")
    assert nodes.nodes[0].call("counted")["host_hit_tokens"] == WHOLE_BLOCKS_TOKENS
    assert nodes.nodes[1].call("counted")["mooncake reads"] == 2 * len(prompts)
    check_nothing_is_left(nodes)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_the_recompute_scheduler_keeps_preempted_requests(
    start: Start, proxy: Proxy, one: Proxy, enable_prefix_caching: bool
) -> None:
    """Without host memory, vLLM-Ascend ends them, and their proxy sends them once more.

    The engine computes no prompt, so it does not know what computing costs.
    """
    rng = random.Random(32)
    storm = [random_tokens(rng, length) for length in STORM_LENGTHS]
    expected = one.ask(storm, STORM_REPLY_TOKENS)
    decode = start(
        "decode",
        Deployment(load_if_slower=False),
        additional_config={"recompute_scheduler_enable": True},
        enable_prefix_caching=enable_prefix_caching,
    )
    nodes = Proxy(proxy.nodes[0], decode)
    with counting(decode) as counted:
        found = nodes.ask(storm, STORM_REPLY_TOKENS)
    assert counted["host_swapped_requests"] > 0
    assert counted["host_hit_requests"] > 0
    check_equal(found, expected)
    check_nothing_is_left(nodes)


STATE_LENGTHS = (300, 777, 64, 383, 16, 256)
"""None is one more than whole blocks. Sent twice, such a prompt ends the decode node, see
docs/prefill_decode.md."""


def test_states_cross(start: Start) -> None:
    """A state crosses with the tokens. All that the tests above show, once."""
    rng = random.Random(34)
    prompts = [random_tokens(rng, length) for length in STATE_LENGTHS]
    storm = [random_tokens(rng, length) for length in STORM_LENGTHS]
    prefill, decode, one = (start(kind, model="states") for kind in ("prefill", "decode", "one"))
    nodes, alone = Proxy(prefill, decode), Proxy(None, one)
    expected, expected_storm = alone.ask(prompts), alone.ask(storm, 150)
    check_equal(nodes.ask(prompts), expected)
    nodes.wait_until_idle()
    prefill.call("spoil_pages")
    with counting(prefill) as of_prefill:
        check_equal(nodes.ask(prompts), expected)
    assert of_prefill["host_hit_tokens"] > 0
    for fault in ("fails", "half", "zeros"):
        nodes.wait_until_idle()
        forget(nodes)
        decode.call("set_fault", fault)
        with counting(decode) as counted:
            found = nodes.ask(prompts)
        decode.call("set_fault", "none")
        assert counted["mooncake reads"] == len(prompts)
        if fault == "zeros":
            assert min(logprob_errors(found, expected)) > WRONG
        else:
            check_equal(found, expected)
    for loads in ("loads", "loads nothing"):
        nodes.wait_until_idle()
        forget(nodes)
        decode.call("load_nothing", loads == "loads nothing")
        with counting(decode) as counted:
            found = nodes.ask(storm, 150)
        decode.call("load_nothing", False)
        assert counted["host_swapped_requests"] > 0
        assert counted["host_hit_requests"] > 0
        if loads == "loads":
            check_equal(found, expected_storm)
        else:
            assert max(logprob_errors(found, expected_storm)) > WRONG
    check_nothing_is_left(nodes)
