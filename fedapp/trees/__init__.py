"""Trees, boosted and of forests: grow, store, predict and weigh them. No parties, no Flower."""
