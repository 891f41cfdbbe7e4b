# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Plays a log of requests through vLLM's scheduler, without a model or a device.

`trace` reads logs. The command is ``python -m vllm_ascend_kvext replay``; nothing else imports this
package.
"""
