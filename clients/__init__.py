"""The parties' side of each method: what a party keeps, and its answers, listed in ``HANDLERS``.

A file has the name of the method's messages. Several methods share ``handshake`` and ``scoring``
(horizontal and common parts), ``vertical``, ``inference`` and ``secagg``. A role of a method is a
dataclass with its state, its handlers and the order in which it answers (``fedapp.site.roles``).
Nothing here knows Flower, or what the server computes. Read ``handshake`` first, then
``local_boosting``.
"""
