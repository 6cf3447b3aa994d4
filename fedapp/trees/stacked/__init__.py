"""FedXGBllr's model: the outputs of all parties' trees, weighted by a network."""
