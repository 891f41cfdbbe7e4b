# SPDX-License-Identifier: Apache-2.0
"""Measures what is computed if parts of prompts are missing. The command is `run`."""
