"""COALA's names on this engine: ``import allhands.federated as coala``."""
