"""Histograms of gradients: bins, sketch, build, split. Never parties or Flower."""
