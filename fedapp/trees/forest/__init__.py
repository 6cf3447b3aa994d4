"""A random forest by scikit-learn's rules, grown level by level on coded labels.

``encrypted`` searches a node's best split from sums by cell, which another party may have
decrypted; ``cart`` has the sums where labels and columns are together. ``levels`` numbers nodes and
draws rows and columns alike at every party, ``bagged`` is the forest itself. The room knows nothing
of messages or Flower. Read ``encrypted`` first.
"""
