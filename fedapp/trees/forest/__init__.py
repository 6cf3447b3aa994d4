"""Federated Forest's trees: CART, level by level, on coded labels."""
