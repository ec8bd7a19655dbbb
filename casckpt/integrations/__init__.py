"""Adapters of frameworks: each folder knows one framework, and nothing else of casckpt knows any."""
