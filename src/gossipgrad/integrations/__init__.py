"""Integrations with other frameworks; each module imports only its own framework.

`gossipgrad.integrations.transformers`, `.accelerate`, `.lightning` and `.torchtitan`.
"""
