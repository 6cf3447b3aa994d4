"""The audit of a finished run: how far attacks get on it, at the coordinator's and parties' seats.

``run`` trains the run again while ``listening`` records what each seat sees, and lets the attacks
of ``attacks`` work on that. ``pax_rows``, ``timberstrike``, ``vertical`` and ``membership``
are their arithmetic, which ``simulations/attacks`` runs on public tables. Read ``run`` first.
"""
