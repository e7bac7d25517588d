"""Federated training across real sites, on Flower: the same training as a simulation, with clients
that are elsewhere."""
