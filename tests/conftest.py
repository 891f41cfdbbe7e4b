# SPDX-License-Identifier: Apache-2.0
"""Makes ``support`` importable in every test, by being here."""
