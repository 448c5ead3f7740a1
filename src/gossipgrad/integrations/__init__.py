"""Doors into other frameworks; each is a module that imports its own framework, and no other.

`gossipgrad.integrations.transformers`, `.accelerate`, `.lightning` and `.torchtitan`.
"""
