"""Boosted trees: model, objective, grow, predict, XGBoost JSON. Never parties or Flower."""
