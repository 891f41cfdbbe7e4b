# SPDX-License-Identifier: Apache-2.0
"""The shared tier beside plain files and other file tiers; see `transfers` and `first_token`."""
