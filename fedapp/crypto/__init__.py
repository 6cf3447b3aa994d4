"""Secrets: Paillier, sums of ciphertexts, sealed parcels, private set intersection."""
