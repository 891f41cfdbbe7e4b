# SPDX-License-Identifier: Apache-2.0
"""The worker side: carries out what the scheduler side has planned."""
