"""The parties' side of each method: functions from a request to a reply, in a table ``HANDLERS``.

A file has the name of the method's messages. Several methods share ``handshake`` and ``scoring``
(horizontal and common parts), ``vertical``, ``inference`` and ``secagg``. State between requests is
in the site's store. Nothing here knows Flower, or what the server computes; tables of phases say
which request may come next. Read ``handshake`` first, then ``local_boosting``.
"""
