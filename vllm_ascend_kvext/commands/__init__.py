# SPDX-License-Identifier: Apache-2.0
"""The commands of ``python -m vllm_ascend_kvext``: each adds its arguments and runs."""
