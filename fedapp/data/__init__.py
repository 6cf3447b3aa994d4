"""Tables: reading and checking them, data sets known by name, splits into rows and parties.

A file or frame becomes an Arrow frame (``read``, ``frames``), then a ``Table`` of float32 features
with labels, weights and ids (``table``). This room knows no messages, no sites and no training.
Begin with ``table``, then ``read``; ``datasets`` resolves what the setting ``data`` names.
"""
