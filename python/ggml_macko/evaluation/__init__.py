"""Running models over texts: activation statistics, perplexity and KL divergence."""

from __future__ import annotations
