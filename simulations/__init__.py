"""Studies of fedapp: how fast, how good, how safe, beside the papers and XGBoost.

``python -m simulations`` (``__main__.py``) runs them all; ``study.py`` is the harness they share,
and the file to read first: options, repeats, JSON lines, tables. ``paper.py`` keeps the papers'
results and prints them, ``attack.py`` runs and tabulates attacks, ``deployment.py`` starts real
sites on this machine, ``reference.py`` digests what every method computes.

- ``bench/``: seconds, memory and bytes, each after a comparison with a reference.
- ``attacks/``: what parties and coordinators can find out from runs of honest parties.
- ``papers/``: published tables and figures, reproduced, and public benchmarks.
- ``examples/``: two apps to copy.

The product imports nothing from here, and no study imports another, but the sites of
``bench/sites.py``.
"""
