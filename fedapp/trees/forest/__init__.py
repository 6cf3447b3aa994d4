"""A random forest by scikit-learn's rules, grown level by level on coded labels.

``cart`` searches a node's best split where labels and columns are together, ``encrypted`` where
another party reads the sums, ``levels`` numbers nodes and draws rows and columns alike at every
party, ``bagged`` is the forest itself. The room knows nothing of messages or Flower. Read ``cart``
first.
"""
