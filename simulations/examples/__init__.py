"""Flower apps that use fedapp's strategies, each a folder for ``flwr run``."""
