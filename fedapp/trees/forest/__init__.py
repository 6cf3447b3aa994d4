"""A random forest by scikit-learn's rules, grown level by level on coded labels.

``encrypted`` searches a node's best split from sums by cell, which another party may have
decrypted; ``summed`` adds up sums over rows of several parties, and ``cart`` has the mathematics of
one column. ``bagged`` draws rows and columns alike at every party, and is the forest itself. The
room knows nothing of messages or Flower. Read ``encrypted`` first.
"""
