# SPDX-License-Identifier: Apache-2.0
"""The device's runtime, of which nothing is emulated but its name."""

from acl import rt as rt
