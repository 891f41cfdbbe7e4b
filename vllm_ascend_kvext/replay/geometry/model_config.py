# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Has vLLM plan the KV cache of a model, from its ``config.json`` alone.

The layers of the model are made on torch's ``meta`` device: they have shapes, and no memory. vLLM's
own functions read the specs of the layers, choose the block sizes and form the groups. The process
in which they do so makes no other engine.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.errors import DOCS_URL, ReplayError
from vllm_ascend_kvext.groups.kinds import kind_of
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import KVLayout
from vllm_ascend_kvext.replay.geometry.pages import pages_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_CONFIG = "config.json"

_MANY_BYTES = 1 << 60
"""The memory that the planner is told to have. The number of blocks is set behind it."""

_DEFAULTS_OF_GPUS = {"block_size": 16, "max_num_batched_tokens": 8192, "max_num_seqs": 256}
"""vLLM's defaults for a server on a GPU, by the name of the argument. The CPU's platform has
others. A log that is played on a CPU is mostly that of another device."""

REMEDY = (
    "Name the folder of a model that this vLLM serves, with the arguments of vllm serve; or run "
    "the command where the model is served; or describe its groups in a file for --groups, see "
    f"{DOCS_URL}replay.md."
)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model as vLLM's scheduler sees it.

    Attributes:
        kv_cache_config: The config of the scheduler.
        pages: The pages of one worker.
        num_workers: The tensor parallel size.
        scheduler_block_tokens: The argument ``block_size`` of vLLM's scheduler.
        hash_block_tokens: The argument ``hash_block_size``.
    """

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    pages: KVLayout
    num_workers: int
    scheduler_block_tokens: int
    hash_block_tokens: int

    @property
    def has_sparse_groups(self) -> bool:
        """Whether a group keeps less than all tokens, so that retention has something to choose."""
        groups = self.kv_cache_config.kv_cache_groups
        return any(kind_of(group.kv_cache_spec) is not GroupKind.FULL for group in groups)

    @property
    def pool_bytes(self) -> int:
        """The bytes of the pool on all workers.

        Each group has pages of equal size, and a block id of any group takes one of them.
        """
        page_bytes = max(
            sum(plane.page_stride_bytes for plane in group.planes) for group in self.pages.groups
        )
        return page_bytes * int(self.kv_cache_config.num_blocks) * self.num_workers

    def describe(self) -> list[str]:
        """The groups, one line each."""
        lines = []
        for index, group in enumerate(self.pages.groups):
            window = f" of {group.window_tokens}" if group.window_tokens else ""
            row_bytes = sum(plane.row_bytes for plane in group.planes)
            lines.append(
                f"group {index}: {len(group.planes)} layers, {group.kind.value}{window}, "
                f"{group.tokens_per_page} tokens per block, "
                f"{row_bytes * group.rows_per_page / 1024:,.0f} KiB per block"
            )
        return lines


def plan_model(
    model: Path, serve_arguments: Sequence[str], num_blocks: int, max_model_tokens: int
) -> PlannedModel:
    """Plan the KV cache of a model.

    Args:
        model: A folder with a ``config.json``, or the file.
        serve_arguments: Further arguments of ``vllm serve``.
        num_blocks: The size of the pool.
        max_model_tokens: The length of the longest request.

    Raises:
        ReplayError: vLLM cannot make this model here, or the pool holds no request of that length.
    """
    source = model.parent if model.is_file() else model
    config = _read_config(model if model.is_file() else model / _CONFIG)
    with _model_folder(config, source) as folder:
        vllm_config, num_workers = _vllm_config(folder, serve_arguments, max_model_tokens)
        try:
            specs = _layer_specs(vllm_config, num_workers)
        except Exception as error:  # Whatever a model's code raises on this device.
            raise ReplayError(
                f"{model}: expected a model whose layers vLLM can make on this device without "
                f"weights, found: {_first_line(error)}. {REMEDY}"
            ) from error
    return plan_specs(vllm_config, specs, num_blocks, num_workers)


def plan_specs(
    vllm_config: VllmConfig, specs: dict[str, KVCacheSpec], num_blocks: int, num_workers: int
) -> PlannedModel:
    """Form the groups of some layers, as vLLM's engine core does.

    Args:
        specs: One spec for each layer that has a KV cache.

    Raises:
        ReplayError: See `plan_model`.
    """
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    if not specs:
        raise ReplayError(
            f"expected a model with a KV cache, found no layer that has one. {REMEDY}"
        )
    cache = vllm_config.cache_config
    cache.num_gpu_blocks_override = num_blocks
    if hasattr(cache, "kv_cache_layout"):
        # Since vLLM 0.30, attention backends choose the order of axes. The scheduler does not see
        # it. This order suits every mixture of layers.
        cache.kv_cache_layout = "LBNHC"
    register_all_kvcache_specs(vllm_config)
    try:
        (of_worker,) = kv_cache_utils.get_kv_cache_configs(vllm_config, [specs], [_MANY_BYTES])
    except (ValueError, NotImplementedError) as error:
        raise ReplayError(
            f"expected a pool that holds the longest request, found one of {num_blocks} blocks and "
            f"{vllm_config.model_config.max_model_len} tokens: {_first_line(error)} Give more "
            "--blocks, or leave such requests out of the log."
        ) from error
    config = kv_cache_utils.generate_scheduler_kv_cache_config([of_worker])
    cache.num_gpu_blocks = config.num_blocks
    cache.block_size = min(group.kv_cache_spec.block_size for group in config.kv_cache_groups)
    block_sizes = kv_cache_utils.resolve_kv_cache_block_sizes(config, vllm_config)
    pages = pages_of(of_worker)
    return PlannedModel(vllm_config, config, pages, num_workers, *block_sizes)


def with_interval(config: KVCacheConfig, interval_tokens: int | None) -> KVCacheConfig:
    """A config with vLLM's own retention interval. Before vLLM 0.30 a variable sets it."""
    if not hasattr(config, "prefix_cache_retention_interval"):
        return config
    return replace(config, prefix_cache_retention_interval=interval_tokens)


def vllm_config_of(
    config: Mapping[str, Any], serve_arguments: Sequence[str], max_model_tokens: int
) -> tuple[VllmConfig, int]:
    """The configuration of ``vllm serve`` for one worker, and the number of workers.

    Args:
        config: The config of the model.

    Raises:
        ReplayError: The arguments are wrong.
    """
    with _model_folder(config, None) as folder:
        return _vllm_config(folder, serve_arguments, max_model_tokens)


@contextmanager
def _model_folder(config: Mapping[str, Any], source: Path | None) -> Iterator[Path]:
    """A folder with a config and the other files of a model. The config says nothing of weights.

    Weights do not matter here, and the code of many formats refuses devices that it has no kernels
    for. The format of the KV cache is an argument of ``vllm serve``, or auto.
    """
    with tempfile.TemporaryDirectory(prefix="kvext-replay-") as folder:
        for path in source.iterdir() if source is not None else ():
            if path.name != _CONFIG:
                (Path(folder) / path.name).symlink_to(path.resolve())
        (Path(folder) / _CONFIG).write_text(json.dumps(_dropping(config)), encoding="utf-8")
        yield Path(folder)


def _dropping(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without the formats of weights, also in the configs of its parts."""
    return {
        name: _dropping(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in ("quantization_config", "compression_config")
    }


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReplayError(
            f"--model-config: expected a folder with the config.json of a model, found: {error}. "
            "Weights are not needed."
        ) from error
    if not isinstance(config, dict) or "architectures" not in config:
        raise ReplayError(
            f"--model-config: expected a JSON object with architectures in {path}, found none. "
            "Name the folder of the model that is served, not that of an adapter."
        )
    return config


def _vllm_config(
    folder: Path, serve_arguments: Sequence[str], max_model_tokens: int
) -> tuple[VllmConfig, int]:
    """The configuration of ``vllm serve`` for one worker, and the number of workers."""
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = [*serve_arguments, "--model", str(folder), "--skip-tokenizer-init"]
    engine_args = EngineArgs.from_cli_args(parser.parse_args(arguments))
    num_workers = engine_args.tensor_parallel_size
    # One worker is planned. Stages of a pipeline together store what one worker stores.
    engine_args.tensor_parallel_size = engine_args.pipeline_parallel_size = 1
    engine_args.data_parallel_size = 1
    engine_args.load_format = "dummy"
    engine_args.enforce_eager = True
    engine_args.enable_prefix_caching = True
    engine_args.async_scheduling = False
    engine_args.max_model_len = max_model_tokens
    engine_args.kv_transfer_config = None
    engine_args.quantization = None
    if current_platform.is_cpu():
        for name, value in _DEFAULTS_OF_GPUS.items():
            if getattr(engine_args, name) is None:
                setattr(engine_args, name, value)
    try:
        vllm_config = engine_args.create_engine_config()
    except Exception as error:  # pydantic's and vLLM's own errors have no common class.
        raise ReplayError(
            f"expected arguments that vllm serve takes for this model, found: "
            f"{_first_line(error)}. {REMEDY}"
        ) from error
    cache = vllm_config.cache_config
    cache.enable_prefix_caching = True  # The CPU's platform turns it off for some models.
    return vllm_config, num_workers


def _layer_specs(vllm_config: VllmConfig, num_workers: int) -> dict[str, KVCacheSpec]:
    """The specs of all layers that have a KV cache, of one worker among several."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    from vllm_ascend_kvext.replay.geometry.unused_attention import UnusedImplementation

    choose = current_platform.get_attn_backend_cls
    if current_platform.is_cpu():
        from vllm.model_executor.layers.attention import mla_attention

        choose = _unused_backend
        mla_attention.get_mla_prefill_backend = lambda _: UnusedImplementation
    current_platform.get_attn_backend_cls = _any_backend(choose)
    with set_current_vllm_config(vllm_config):
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"tcp://127.0.0.1:{_free_port()}",
            backend="gloo",
        )
        parallel_state.initialize_model_parallel()
        # The layers of a worker divide their heads by these numbers. They send nothing yet.
        parallel_state.get_tp_group().world_size = num_workers
        vllm_config.parallel_config.tensor_parallel_size = num_workers
        try:
            with torch.device("meta"), set_default_torch_dtype(vllm_config.model_config.dtype):
                initialize_model(vllm_config)
            current_platform.update_block_size_for_backend(vllm_config)
            vllm_config.validate_block_size()
            specs: dict[str, KVCacheSpec] = get_kv_cache_spec(vllm_config)
        finally:
            parallel_state.get_tp_group().world_size = 1
            vllm_config.parallel_config.tensor_parallel_size = 1
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
    vllm_config.compilation_config.static_forward_context.clear()
    return specs


def _any_backend(choose: Callable[..., str]) -> Callable[..., str]:
    """As a platform's choice of an attention backend, but with one for every kind of attention.

    The backend computes nothing here. A platform refuses models whose attention it has no kernel
    for.
    """

    def get_attn_backend_cls(*arguments: Any, **named: Any) -> str:
        try:
            return choose(*arguments, **named)
        except (NotImplementedError, ValueError):
            return _unused_backend()

    return get_attn_backend_cls


def _unused_backend(*_arguments: Any, **_named: Any) -> str:
    """A backend without wishes. The CPU's has some, and a log is mostly that of another device."""
    return "vllm_ascend_kvext.replay.geometry.unused_attention.UnusedBackend"


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _first_line(error: BaseException) -> str:
    """The first line of a message; of several, as pydantic's, the one that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    is_count = len(lines) > 2 and "validation error" in lines[0]
    return (lines[1] if is_count else lines[0]).rstrip(".")[:300]
