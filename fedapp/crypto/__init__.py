"""Paillier encryption, encrypted sums, sealed parcels, masks, noise, private set intersection."""
