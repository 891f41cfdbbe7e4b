# SPDX-License-Identifier: Apache-2.0
"""Reuse of KV behind a missing stretch of a prompt: the stretch alone is computed."""
