"""Boosted trees, as XGBoost grows and writes them."""
