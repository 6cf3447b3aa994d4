"""One party: its settings and policy, its table, its state on disk, and how it answers a message.

A site answers each step of a run once, refuses what its policy or the run's plan does not allow,
and masks or seals what leaves it. It knows no method: handlers of messages are in ``clients``, and
the server is known only by its messages. Begin with ``answer``, then ``roles`` and ``settings``.
"""
