"""Trees, boosted and of forests: grow, keep, predict, and weigh them. Never parties or Flower."""
