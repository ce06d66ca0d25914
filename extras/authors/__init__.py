# SPDX-License-Identifier: MIT
"""The authors' own training programs and our scripts, compared step by step: docs/authors.md."""
