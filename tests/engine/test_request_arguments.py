# SPDX-License-Identifier: Apache-2.0
"""Arguments of requests mean the same in every form that an endpoint of ``vllm serve`` takes."""

from __future__ import annotations

import json
import random
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import connector_models
import pytest
from connector_models import WINDOW_TOKENS
from http_served import Client, serving

BLOCK_TOKENS = 16
DOCUMENT_TOKENS = 333
HIT_TOKENS = DOCUMENT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
CONNECTOR = {
    "kv_connector": "KvextConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "host_memory_gib": 0.25,
        "load_if_slower": True,
        "blending": True,
        "segment_sink": [2],
    },
}
ARGUMENTS = (
    *("--enforce-eager", "--dtype", "float32", "--block-size", str(BLOCK_TOKENS)),
    *("--max-model-len", "2048", "--num-gpu-blocks-override", "1500"),
    *("--no-disable-hybrid-kv-cache-manager", "--enable-prompt-tokens-details"),
    *("--enable-prefix-caching", "--kv-transfer-config", json.dumps(CONNECTOR)),
)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
rng = random.Random(0)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    model = tmp_path_factory.mktemp("model")
    connector_models.write_one_window(model)
    write_tokenizer(model)
    log = tmp_path_factory.mktemp("server") / "log"
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_ASCEND_KVEXT_RETENTION": "adaptive"}
    with serving(model, ARGUMENTS, environ, log) as client:
        yield client


def write_tokenizer(folder: Path) -> None:
    """A word for each token, and chats that are the words of their messages."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{token_id:03}": token_id for token_id in range(connector_models.VOCABULARY_TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t000"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="t000",
        eos_token="t001",
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    ).save_pretrained(folder)


def random_tokens(num_tokens: int) -> list[int]:
    return [rng.randrange(100, 500) for _ in range(num_tokens)]


def ask(client: Client, path: str, prompt: list[int], **arguments: Any) -> dict[str, Any]:
    text = " ".join(f"t{token_id:03}" for token_id in prompt)
    asked = {COMPLETIONS: {"prompt": text}, CHAT: {"messages": [{"role": "user", "content": text}]}}
    response = client.post(path, {**asked[path], "max_tokens": 1, "vllm_xargs": arguments})
    assert response["usage"]["prompt_tokens"] == len(prompt)
    return response


def host_hit_tokens(client: Client, path: str, **hint: Any) -> tuple[int, float]:
    """What the second question about a document hits in host memory; hints that adaptive
    retention has taken from the first."""
    document = random_tokens(DOCUMENT_TOKENS)
    pinned = client.read_metrics()["kvext_hints_pinned_total"]
    ask(client, path, document + random_tokens(150), **hint)
    pinned = client.read_metrics()["kvext_hints_pinned_total"] - pinned
    wait_for_stores(client)
    client.reset()
    details = ask(client, path, document + random_tokens(150))["usage"]["prompt_tokens_details"]
    return ((details or {}).get("cached_tokens") or 0), pinned


def wait_for_stores(client: Client) -> None:
    """Until what has been stored is reported, which comes with steps."""
    deadline_s = time.monotonic() + 60
    before = -1.0
    while (stored := client.read_metrics()["kvext_transfers_total.store"]) != before:
        assert time.monotonic() < deadline_s
        before = stored
        ask(client, COMPLETIONS, random_tokens(5))
        time.sleep(0.2)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("form", ["[333]", " [333, 400] ", "333", 333])
def test_a_hint_is_taken_in_every_form(client: Client, path: str, form: Any) -> None:
    found, pinned = host_hit_tokens(client, path, kvext_checkpoint_tokens=form)
    assert found == HIT_TOKENS
    assert pinned == (2 if "400" in str(form) else 1)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_without_a_hint_less_is_hit(client: Client, path: str) -> None:
    found, pinned = host_hit_tokens(client, path)
    assert found < HIT_TOKENS and not pinned


def test_only_chats_take_lists(client: Client) -> None:
    """Why the documents name the text."""
    found, _ = host_hit_tokens(client, CHAT, kvext_checkpoint_tokens=[333])
    assert found == HIT_TOKENS
    with pytest.raises(urllib.error.HTTPError, match="400"):
        ask(client, COMPLETIONS, random_tokens(5), kvext_checkpoint_tokens=[333])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("truth", [True, "true", 1])
def test_segments_are_stored_and_reused(client: Client, path: str, truth: Any) -> None:
    document = random_tokens(203)
    stored = ask(client, path, document, kvext_store_segment=truth)
    assert stored["kv_transfer_params"] == {"kvext_stored_tokens": len(document)}
    wait_for_stores(client)
    prompt = [*random_tokens(21), *document, *random_tokens(30)]
    said = ask(client, path, prompt, kvext_segments="[[21, 224]]")["kv_transfer_params"]
    assert said["kvext_reused_tokens"] == len(document) - (WINDOW_TOKENS - 1)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_wrong_arguments_end_no_request(client: Client, path: str) -> None:
    for name in ("kvext_checkpoint_tokens", "kvext_segments", "kvext_store_segment"):
        for wrong in ("[333", "{}", -1, 1.5, '"text"'):
            ask(client, path, random_tokens(40), **{name: wrong})
