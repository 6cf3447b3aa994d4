"""Cryptography between parties, on arrays of integers and bytes.

``paillier``, ``packing`` and ``sums`` encrypt gradients and add them up under encryption;
``masking`` hides vectors in their sum; ``noise`` is differential privacy; ``psi`` intersects lists
of ids; ``sealed`` encrypts parcels for one receiver. The room knows nothing of Flower, rounds,
trees or tables: bytes and arrays in, bytes and arrays out. Big integers are multiplied by a
``Ring`` (``rings``), side by side where the processor can (``lanes``), shared among ``workers``.
Read ``paillier`` first.
"""
