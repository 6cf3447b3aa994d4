"""Attacks on runs of honest parties, against chance, and tests of the guards that stop others.

``python -m simulations.attacks`` runs those of ``simulations.attacks.frame`` and prints one table.
"""
