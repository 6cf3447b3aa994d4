"""Flower apps on fedapp's strategies, each a folder for ``flwr run``."""
