"""Attacks on runs of honest parties, against chance; and whether what stops others is tested.

``python -m simulations.attacks`` runs those of ``simulations.attacks.frame`` and prints one table.
"""
