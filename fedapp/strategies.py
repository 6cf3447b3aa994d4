"""The strategies for a ServerApp of your own: ``from fedapp.strategies import ...`` is ``from
strategies import ...``, which a wheel finds only once fedapp is imported."""

from strategies import *  # noqa: F403
