"""Histograms of gradients: bins, sketches, sums, splits. No parties, no Flower."""
