"""Histograms of gradients: how columns are cut into bins, summed by bin, and split.

``bins`` codes values, ``sketch`` finds the bins of one table or of the union of several, ``build``
sums gradients by node, column and bin, ``split`` takes the best split from the sums, and
``fixed_point`` makes sums exact in any order. The room knows nothing of trees beyond a node's
number, nothing of parties and nothing of Flower. Read ``bins`` first.
"""
