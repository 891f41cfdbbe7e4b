# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The kernels of the V1 model runner that states and drafts need and that have no CPU code.

With states in mode ``align``, the runner moves a state to the block in which the next step begins
(before the step), and to the last block that the accepted drafts have filled (after the step).
vLLM has these two kernels in Triton only. Here they copy with `ctypes.memmove`. What they copy
follows the kernels' documentation in ``vllm/v1/worker/mamba_utils.py``.

Release 0.30 hands the kernels of drafts to launchers, which read the kernels' names of parameters.
The runner of the CPU replaces the kernels, but not those of the launchers.
"""

from __future__ import annotations

import ctypes
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

COUNTED: Counter[str] = Counter()
"""The calls that moved a state, by kernel. ``backward``: to a block before that of the step."""

_COLUMN_BYTES = 4
"""The size of a block's number in a block table."""


class Kernel:
    """A function in place of a kernel. The grid of a launch does not matter to it."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.func = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.func


class _StateTensors:
    """The tensors with states: their layouts, and the tables of their groups' blocks.

    Args:
        launched: The arguments of a kernel by name, see ``mamba_utils``.
    """

    def __init__(self, launched: dict[str, Any]) -> None:
        self.row_bytes = launched["block_table_stride_req"] * _COLUMN_BYTES
        self.tables = launched["block_table_ptrs_ptr"].tolist()
        names = (
            "state_group_indices_ptr",
            "state_base_addrs_ptr",
            "state_block_strides_ptr",
            "state_elem_sizes_ptr",
            "state_inner_sizes_ptr",
            "state_conv_widths_ptr",
        )
        self.tensors = list(zip(*(launched[name].tolist() for name in names), strict=True))

    def move(self, row: int, from_column: int, to_column: int, num_tokens: int) -> None:
        """Copy the states of a request after a number of accepted drafts.

        A convolution keeps its tokens in one block, and leaves out the oldest. A matrix after each
        draft has a block of its own.
        """
        for group, base, block_bytes, element_bytes, elements, width in self.tensors:
            columns = self.tables[group] + row * self.row_bytes

            def address(
                column: int, base: int = base, columns: int = columns, step: int = block_bytes
            ) -> int:
                block = ctypes.c_int32.from_address(columns + column * _COLUMN_BYTES).value
                return base + int(block) * step

            unit_bytes = element_bytes * elements
            if width:
                source = address(from_column) + num_tokens * unit_bytes
                ctypes.memmove(address(to_column), source, (width - num_tokens) * unit_bytes)
            else:
                source = address(from_column + num_tokens)
                ctypes.memmove(address(to_column), source, unit_bytes)


def _requests(launched: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """The row of each request in block tables, and its index in other arguments."""
    mapping = launched.get("idx_mapping_ptr")
    for row in range(launched["num_reqs"]):
        index = row if mapping is None else int(mapping[row])
        if index >= 0:
            yield row, index


def _move_before_step(launched: dict[str, Any]) -> None:
    states = _StateTensors(launched)
    for row, index in _requests(launched):
        source = int(launched["src_col_ptr"][index])
        target = int(launched["mamba_state_idx_ptr"][index])
        if source >= 0 and source != target:
            COUNTED["before a step"] += 1
            states.move(row, source, target, int(launched["token_bias_ptr"][index]))


def _move_after_step(launched: dict[str, Any]) -> None:
    """Copy the state at the last end of a block that the step passed, if it passed one."""
    if launched.get("PRECOMPUTED_NEW_COMPUTED"):
        raise NotImplementedError("only the V2 runner counts computed tokens like this")
    states = _StateTensors(launched)
    block_tokens = launched["block_size"]
    for row, index in _requests(launched):
        accepted, source, scheduled, computed, drafted = (
            int(launched[name][index])
            for name in (
                "num_accepted_tokens_ptr",
                "mamba_state_idx_ptr",
                "num_scheduled_tokens_ptr",
                "num_computed_tokens_ptr",
                "num_draft_tokens_ptr",
            )
        )
        first_tokens = computed + scheduled - drafted
        boundary_tokens = (first_tokens + accepted - 1) // block_tokens * block_tokens
        if boundary_tokens < first_tokens:
            continue
        behind_tokens = boundary_tokens - first_tokens
        target = boundary_tokens // block_tokens - 1
        COUNTED["after a step"] += 1
        COUNTED["backward"] += target < source
        if source == target:
            launched["num_accepted_tokens_out_ptr"][index] = 1
        if source != target or behind_tokens:
            states.move(row, source, target, behind_tokens)


def _copy(src_ptrs: Any, dst_ptrs: Any, sizes: Any) -> None:
    for source, target, num_bytes in zip(
        src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist(), strict=True
    ):
        ctypes.memmove(target, source, num_bytes)


def _by_name(kernel: Any, function: Callable[[dict[str, Any]], None]) -> Kernel:
    """A kernel that calls a function with its arguments by the names of the original's."""
    signature = inspect.signature(kernel)

    def launch(*args: Any, **more: Any) -> None:
        bound = signature.bind(*args, **more)
        if bound.arguments.get("CONV_STATE_DIM_FIRST"):
            raise NotImplementedError("expected the tokens of convolutions before their channels")
        function(bound.arguments)

    return Kernel(launch)


def install() -> None:
    """Give the kernels CPU code, once per process."""
    from vllm.v1.worker import mamba_utils

    mamba_utils.batch_memcpy = _copy
    for name, function in (
        ("precopy_mamba_align_fused_kernel", _move_before_step),
        ("postprocess_mamba_fused_kernel", _move_after_step),
    ):
        kernel = getattr(mamba_utils, name, None)  # Release 0.23 has only the second.
        if inspect.isfunction(kernel):
            setattr(mamba_utils, name, _by_name(kernel, function))
    _hand_to_launchers()
    _ignore_precision_of_noise()


def _hand_to_launchers() -> None:
    """Give each launcher of a kernel vLLM's kernel of the same name for CPUs.

    Both kernels have the same parameters in the same order, but not the same names.
    """
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode import utils

    for launcher in [*vars(rejection_sampler).values(), *vars(utils).values()]:
        kernel = getattr(launcher, "kernel", None)
        for_cpus = getattr(cpu_triton_utils, getattr(kernel, "__name__", ""), None)
        if inspect.isfunction(kernel) and for_cpus is not None:
            launcher.kernel = _in_order(kernel, for_cpus.func)


def _ignore_precision_of_noise() -> None:
    """Release 0.23 passes an argument that its kernel for CPUs does not have."""
    from vllm.utils import cpu_triton_utils

    kernel = cpu_triton_utils.sample_recovered_tokens_kernel
    function = kernel.func
    has_argument = "USE_FP64_GUMBEL" in inspect.signature(function).parameters
    if has_argument or isinstance(kernel, Kernel):
        return

    def sample(*args: Any, USE_FP64_GUMBEL: bool = False, **more: Any) -> None:  # noqa: N803
        function(*args, **more)

    cpu_triton_utils.sample_recovered_tokens_kernel = Kernel(sample)


def _in_order(kernel: Any, function: Callable[..., None]) -> Kernel:
    """A kernel with the original's names, which calls a function with the values in order."""
    names = tuple(inspect.signature(kernel).parameters)

    def launch(**launched: Any) -> None:
        function(*(launched[name] for name in names))

    launch.__signature__ = inspect.signature(kernel)  # type: ignore[attr-defined]
    return Kernel(launch)
